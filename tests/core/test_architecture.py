"""docs/architecture.md is the map of the tree as it is, and imports keep to its
floors."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp_core.cluster.layout import Axis, Layout
from smp_core.sharding.fsdp.internals import INTERNALS, needed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
REQUESTS = ROOT / "docs" / "upstream.md"
PACKAGES = ("smp_core", "lightning_smp", "accelerate_smp")
# What smp_core must not know; the faces' packages are on a floor above it.
FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "transformers")
FACES = {
    "lightning_smp": ("accelerate_smp", "accelerate"),
    "accelerate_smp": ("lightning_smp", "lightning", "pytorch_lightning"),
}
# The one room of FSDP2's internals, the file of it that lists them, and how many there
# are.
INTERNALS_ROOM = "smp_core/sharding/fsdp/"
LIST_OF_INTERNALS = ROOT / INTERNALS_ROOM / "internals.py"
N_INTERNALS = {"newest": 36, "2.13": 37, "2.11": 47}
# Words of theirs that public classes, or ours, have too.
COMMON_WORDS = {"cast_forward_inputs", "clear", "mesh", "param_group", "shard_mesh"}


@cache
def sources() -> dict[str, Path]:
    """Module name -> file, of every module of the packages."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in sorted(files)
    }


@dataclass(frozen=True)
class Import:
    """One imported module of the packages or of another distribution.

    Attributes:
        target: dotted name, as far as it is a module.
        type_checking: under ``if TYPE_CHECKING``, so not there at run time.
        in_function: made when the function runs.
    """

    target: str
    type_checking: bool
    in_function: bool


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> list[Import]:
    modules = sources()
    found: list[Import] = []

    def visit(node: ast.AST, type_checking: bool, in_function: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(
                Import(alias.name, type_checking, in_function) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, (
                f"{path}: relative imports hide where they lead"
            )
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.append(
                    Import(
                        name if name in modules else node.module,
                        type_checking,
                        in_function,
                    )
                )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, True, in_function)
            for child in node.orelse:
                visit(child, type_checking, in_function)
        else:
            inside = in_function or isinstance(
                node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
            )
            for child in ast.iter_child_nodes(node):
                visit(child, type_checking, inside)

    visit(parsed(path), False, False)
    return found


def block(heading: str) -> list[str]:
    """Lines of the first code block under a heading of the page."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1]
    return section.split("```text\n", 1)[1].split("\n```", 1)[0].splitlines()


def files_on_the_map() -> set[str]:
    """Paths from the root, folders with a slash at the end; two spaces of indentation
    are one level."""
    found, above = set(), [""]
    for line in block("Rooms"):
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        path = above[depth] + name
        found.add(path)
        above[depth + 1 :] = [path]
    return found


@cache
def rooms() -> dict[str, tuple[int, int]]:
    """Module or package -> (floor, room); ground floor 0."""
    found = {}
    for floor, line in enumerate(reversed(block("Floors"))):
        for number, room in enumerate(
            line.split(maxsplit=1)[1].split("  ")[-1].split(";")
        ):
            for name in room.split(","):
                full = (
                    name.strip()
                    if name.strip() in PACKAGES
                    else f"smp_core.{name.strip()}"
                )
                found[full] = (floor, number)
    return found


def room_of(module: str) -> tuple[int, int]:
    known = rooms()
    for name in known:
        if module == name or module.startswith(f"{name}."):
            return known[name]
    pytest.fail(f"{module} stands on no floor of docs/architecture.md")


def edges() -> Iterator[tuple[str, str]]:
    """(module, module of the packages that it imports): at the top, inside functions,
    or for type checkers only."""
    modules = sources()
    for module, path in modules.items():
        for each in imports(path):
            if each.target in modules and each.target != module:
                yield module, each.target


def test_every_file_on_the_map_exists() -> None:
    gone = [path for path in sorted(files_on_the_map()) if not (ROOT / path).exists()]
    assert not gone, f"docs/architecture.md names {', '.join(gone)}: not there any more"


def test_every_module_is_on_the_map() -> None:
    there = {str(path.relative_to(ROOT)) for path in sources().values()}
    unnamed = sorted(there - files_on_the_map())
    assert not unnamed, (
        f"add a line under Rooms in docs/architecture.md for {', '.join(unnamed)}"
    )


def test_imports_go_down_the_floors() -> None:
    """Also those for type checkers and those inside functions: they are no way around
    the rule."""
    wrong = []
    for module, target in edges():
        if target == "smp_core":  # holds the version and nothing else
            continue
        above, below = room_of(module), room_of(target)
        if above != below and below[0] >= above[0]:
            wrong.append(
                f"{module} (floor {above[0]}) imports {target} (floor {below[0]})"
            )
    assert wrong == []


def test_no_imports_go_in_a_circle() -> None:
    """Imports inside functions and for type checkers count: a circle that they hide is
    one all the same."""
    graph: dict[str, set[str]] = {}
    for module, target in edges():
        graph.setdefault(module, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def room(module: str) -> str:
    """The room of a module: a package directly in smp_core, a module at its root, or a
    face."""
    return (
        ".".join(module.split(".")[:2])
        if module.startswith("smp_core.")
        else module.split(".")[0]
    )


def test_rooms_are_few_and_none_imports_one_that_imports_it() -> None:
    at_root = [path.name for path in (ROOT / "smp_core").glob("*.py")]
    assert len(at_root) <= 3, at_root
    rooms = {room(module) for module in sources()} - {
        "smp_core",
        "lightning_smp",
        "accelerate_smp",
    }
    assert len(rooms) <= 28
    arrows = {
        (room(module), room(target))
        for module, target in edges()
        if target != "smp_core"
    }
    assert [
        pair for pair in sorted(arrows) if pair[0] < pair[1] and pair[::-1] in arrows
    ] == []


def test_rooms_use_one_another_by_what_their_folders_offer() -> None:
    """Names of other rooms come from what a folder offers; from a file only what is
    named as the file is."""
    modules, wrong = sources(), []
    for module, path in modules.items():
        for node in ast.walk(parsed(path)):
            if (
                not isinstance(node, ast.ImportFrom)
                or node.module not in modules
                or node.module.count(".") == 0
            ):
                continue
            if room(module) == room(node.module) or node.module in (
                "smp_core.entry",
                "smp_core.topology",
            ):
                continue
            names = [
                alias.name
                for alias in node.names
                if f"{node.module}.{alias.name}" not in modules
            ]
            if modules[node.module].name == "__init__.py":
                missing = [name for name in names if name not in offered(node.module)]
            else:
                missing = [
                    name for name in names if name != node.module.rpartition(".")[2]
                ]
            wrong += [f"{module}: {name} of {node.module}" for name in missing]
    assert wrong == [], "offer it in the room's __init__.py, and import it from there"


def offered(package: str) -> list[str]:
    """The names that a package imports for whoever asks: ``from a_file import name as
    name``."""
    imported = [
        each
        for each in ast.walk(parsed(sources()[package]))
        if isinstance(each, ast.ImportFrom)
    ]
    return [
        alias.name
        for each in imported
        for alias in each.names
        if alias.asname == alias.name
    ]


def test_rooms_offer_what_is_there() -> None:
    """Each name that type checkers are shown is one of the package; each room tells
    what it is about."""
    for module, path in sources().items():
        if path.name == "__init__.py" and module.startswith("smp_core."):
            assert ast.get_docstring(parsed(path)), (
                f"{module} does not tell what it is about"
            )
            package = importlib.import_module(module)
            assert sorted(getattr(package, "__all__", [])) == sorted(offered(module))
            assert [
                name for name in offered(module) if not hasattr(package, name)
            ] == []


def test_a_room_tells_of_a_name_that_it_does_not_offer() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Meter'"):
        exec("from smp_core.comm import Meter")
    with pytest.raises(
        AttributeError, match=r"module 'smp_core.comm' has no attribute 'Meter'"
    ):
        importlib.import_module("smp_core.comm").Meter  # noqa: B018


def test_the_core_imports_no_framework() -> None:
    """In a function of a module that is named for it, an import of an optional
    framework would be fine."""
    wrong = [
        f"{module} imports {each.target}"
        for module, path in sources().items()
        if module.startswith("smp_core")
        for each in imports(path)
        if each.target.split(".")[0] in FRAMEWORKS and not each.in_function
    ]
    assert wrong == []


def test_the_faces_do_not_know_one_another() -> None:
    wrong = [
        f"{module} imports {each.target}"
        for module, path in sources().items()
        for each in imports(path)
        if module.split(".")[0] in FACES
        and each.target.split(".")[0] in FACES[module.split(".")[0]]
        # Transformers is no part of either face; whoever uses it does so when it is
        # there.
        and not (each.in_function and each.target.split(".")[0] == "transformers")
    ]
    assert wrong == []


def private_names(path: Path) -> set[str]:
    """Names with a leading underscore that a module takes from others: imported ones,
    and attributes that it does not define itself. Those of ``self`` are inherited,
    which is what protected names are for."""
    tree, found = parsed(path), set()
    own = {
        n.name
        for n in ast.walk(tree)
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    own |= {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }
    own |= {
        n.target.id
        for n in ast.walk(tree)
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and node.attr not in own
        ):
            if not (
                isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            ):
                found.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            found |= {
                part for name in names for part in name.split(".") if is_private(part)
            }
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def explanations(path: Path) -> str:
    """Comments and docstrings of a file."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [
        ast.get_docstring(node) or ""
        for node in ast.walk(parsed(path))
        if isinstance(node, nodes)
    ]
    with tokenize.open(path) as file:
        texts += [
            token.string
            for token in tokenize.generate_tokens(file.readline)
            if token.type == tokenize.COMMENT
        ]
    return "\n".join(texts)


@pytest.mark.parametrize("module", sorted(sources()))
def test_private_names_are_used_only_where_it_says_why(module: str) -> None:
    path = sources()[module]
    said = explanations(path)
    if INTERNALS_ROOM in str(path):
        said = " ".join([said, *listed_internals()])
    silent = sorted(
        name
        for name in private_names(path)
        if not re.search(rf"(?<!\w){name}(?!\w)", said)
    )
    assert silent == [], (
        f"{path.name}: name it in a comment or docstring and say why no public name will do"
    )


def holds_tensors(field: ast.stmt) -> bool:
    """Whether the field of a dataclass is a tensor, or a container of tensors, by its
    annotation."""
    if not isinstance(field, ast.AnnAssign):
        return False
    annotation = ast.unparse(field.annotation)
    return (
        "Callable" not in annotation
        and re.search(r"\b(Tensor|Parameter|\w+Tensor)\b", annotation) is not None
    )


def test_dataclasses_that_hold_tensors_compare_by_identity() -> None:
    """The comparison that a dataclass generates (``in``, ``list.remove``) asks tensors
    for a truth value."""
    found = []
    for module, path in sources().items():
        for node in ast.walk(parsed(path)):
            made = (
                [ast.unparse(each) for each in node.decorator_list]
                if isinstance(node, ast.ClassDef)
                else []
            )
            if any("dataclass" in each and "eq=False" not in each for each in made):
                found += (
                    [f"{module}.{node.name}"]
                    if any(map(holds_tensors, node.body))
                    else []
                )
    assert found == []


def listed_internals(of: str | None = None) -> set[str]:
    """The names of the list, of one generation of FSDP2 or of all."""
    listed = INTERNALS if of is None else needed(of)
    return {name.removesuffix("()") for internal in listed for name in internal.names}


def defined_by_fsdp2() -> set[str]:
    """Methods and attributes of the classes behind ``fully_shard`` that no public class
    has too."""
    spec = importlib.util.find_spec("torch.distributed.fsdp._fully_shard")
    assert spec is not None and spec.submodule_search_locations
    found = set()
    for path in Path(spec.submodule_search_locations[0]).glob("_fsdp_*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found |= {
                    each.name for each in node.body if isinstance(each, ast.FunctionDef)
                }
                found |= names_of_self(node)
    public = (FSDPModule, DTensor, nn.Parameter, nn.Module)
    return {
        name for name in found if not any(hasattr(kind, name) for kind in public)
    } - COMMON_WORDS


def names_of_self(kind: ast.ClassDef) -> set[str]:
    """Attributes that a class declares, or gives to ``self``."""
    declared = {
        n.target.id
        for n in kind.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    stored = [
        n
        for n in ast.walk(kind)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    ]
    return declared | {n.attr for n in stored if ast.unparse(n.value) == "self"}


def names_in(path: Path) -> set[str]:
    """Attributes, imported names, and what is asked for by a string, without what is
    ``self``'s."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            found.add(node.attr)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.isidentifier()
        ):
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {*node.module.split("."), *(alias.name for alias in node.names)}
    return found


def test_the_list_of_fsdp2s_internals_is_what_its_room_uses() -> None:
    """A name that is added has to be listed with its reason, and the numbers below are
    to become smaller only."""
    files = [
        path
        for path in sources().values()
        if INTERNALS_ROOM in str(path) and path != LIST_OF_INTERNALS
    ]
    classes = [
        node
        for path in files
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    ]
    own = {name for kind in classes for name in names_of_self(kind)}
    own |= {
        n.name
        for path in files
        for n in ast.walk(parsed(path))
        if isinstance(n, ast.FunctionDef)
    }
    there = set().union(*map(names_in, files))
    listed, theirs = listed_internals(), defined_by_fsdp2()
    private = {name for name in there if is_private(name)}
    untold = sorted(((there & theirs) | private) - own - listed)
    assert untold == [], "do without, or say why in sharding/fsdp/internals.py"
    unused = sorted(listed - there)
    assert unused == [], "strike them out in sharding/fsdp/internals.py"
    assert {of: len(listed_internals(of)) for of in N_INTERNALS} == N_INTERNALS


def test_names_of_an_older_fsdp2_are_in_its_file_only() -> None:
    """So that they go when that file is deleted."""
    newer = listed_internals("newest")
    for path in sources().values():
        if (
            INTERNALS_ROOM in str(path)
            and path != LIST_OF_INTERNALS
            and "param_group_2_" not in path.name
        ):
            assert names_in(path) & (listed_internals() - newer) == set(), path.name


def test_internals_of_fsdp2_are_in_one_room() -> None:
    own = {name for name in listed_internals() & defined_by_fsdp2() if is_private(name)}
    own |= {"_get_fsdp_state", "_fully_shard"}
    found = {path: names_in(path) & own for path in sources().values()}
    assert any(found.values())
    assert {
        str(path): names
        for path, names in found.items()
        if names and INTERNALS_ROOM not in str(path)
    } == {}


def test_each_request_to_pytorch_has_its_section() -> None:
    """A request is one word; the page's other headings are longer."""
    sections = re.findall(
        r"^## (\w+)$", REQUESTS.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(sections) == sorted({internal.request for internal in INTERNALS})


def test_the_table_of_private_names_is_that_of_the_list() -> None:
    """Which names are needed, by which torch and for which request, and which are
    gone."""
    table = (
        REQUESTS.read_text(encoding="utf-8")
        .split("## Where the private names went", 1)[1]
        .split("\n## ", 1)[0]
    )
    found: dict[str, set[str]] = {"needed": set(), "older": set(), "gone": set()}
    links = {}
    for cells, now, way in re.findall(
        r"^\| (`.*?) \| (\w+) \| (.*) \|$", table, re.MULTILINE
    ):
        names = re.findall(r"`(\w+)`", cells)
        found[now].update(names)
        links.update(dict.fromkeys(names, re.findall(r"\(#(\w+)\)", way)))
    newest = listed_internals("newest")
    assert found["needed"] == newest
    assert found["older"] == listed_internals() - newest
    assert found["gone"] & listed_internals() == set()
    requests = {
        name.removesuffix("()"): each.request
        for each in INTERNALS
        for name in each.names
    }
    assert {name: link for name, link in links.items() if link} == {
        name: [word] for name, word in requests.items()
    }


# Calls in parallelize_model() whose place does not matter to what a model becomes.
NO_CONVERSIONS = {
    "_Layers",
    *(
        "CommMeter",
        "Traffic",
        "Calls",
        "ReplacedParameters",
        "require_plain_lookups",
        "require_shardable",
        "warn_of_lost_writes",
        "sync_over_samples",
        "ParallelModel",
        "DelayedInit",
    ),
    *(
        "change_this_process",
        "units_with",
        "_require_same_hooks",
        "dict",
        "explain_uncalled",
        "follow_window",
        "any",
        "isinstance",
        "tuple",
    ),
    *("_keep_alike", "_veto_of", "_start_scales"),  # around the window
    *("inspect", "require_lengths"),  # look at the model
    "played_of",  # copies of what stages leave out, before they do
}


def test_conversions_come_in_the_order_that_is_told() -> None:
    """At the top of engine/conversions.py with the reasons, and on the page: those
    calls of parallelize_model(), in order."""
    path = ROOT / "smp_core" / "engine" / "conversions.py"
    tree = parsed(path)
    told = re.findall(r"^\d+\. +(\w+):", ast.get_docstring(tree) or "", re.MULTILINE)
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    page = text.split("does what was decided, in this order:", 1)[1].split(
        ". What each", 1
    )[0]
    assert re.findall(r"`(\w+)`", page) == told
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    calls: list[str] = []
    for name in calls_in_order(functions["parallelize_model"]):
        # Its phases are functions of their own.
        calls.append(name)
        if name in PHASES:
            calls += calls_in_order(functions[name])
    assert set(PHASES) <= set(calls)
    assert told == sorted(told, key=calls.index)
    untold = set(calls) - set(PHASES) - set(told) - NO_CONVERSIONS
    assert not untold, (
        f"tell where {sorted(untold)} comes, or list it in NO_CONVERSIONS"
    )


PHASES = ("_convert_layers", "_place_parameters", "_open_window")


def calls_in_order(function: ast.FunctionDef) -> list[str]:
    calls = (
        n for statement in function.body for n in calls_outside_functions(statement)
    )
    return [n.func.id for n in sorted(calls, key=lambda n: n.lineno)]


def calls_outside_functions(node: ast.AST) -> Iterator[ast.Call]:
    """Calls by a plain name; those in functions that are defined here run later."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from calls_outside_functions(child)


# Questions to a layout or a mesh that name axes.
ABOUT_AXES = {"group", "groups", "stages", "ranks", "coordinate", "size", "get_group"}


def axes_as_text(tree: ast.AST) -> Iterator[str]:
    """Yield code that names an axis of the mesh by a text: among arguments of a
    question about axes, as a mesh's index, among the names of a mesh's dimensions."""
    names = {axis.value for axis in Axis}
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call):
            asked += [
                each.value for each in node.keywords if each.arg == "mesh_dim_names"
            ]
            if isinstance(node.func, ast.Attribute) and node.func.attr in ABOUT_AXES:
                asked += node.args
        elif (
            isinstance(node, ast.Subscript)
            and "mesh" in ast.unparse(node.value).lower()
        ):
            asked.append(node.slice)
        texts = {
            each.value
            for part in asked
            for each in ast.walk(part)
            if isinstance(each, ast.Constant)
        }
        if texts & names:
            yield ast.unparse(node)


def test_axes_of_the_mesh_are_named_by_their_enum() -> None:
    """So that a wrong name is found by mypy, or when it is read, and where an axis is
    used can be looked up."""
    found = {
        module: list(axes_as_text(parsed(path))) for module, path in sources().items()
    }
    assert {module: code for module, code in found.items() if code} == {}, (
        "write Axis.TENSOR for 'tensor'"
    )


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("mesh.group('tensor')", True),
        ("layout.ranks(0, *outer, 'pipeline')", True),
        ("device_mesh['shard']", True),
        (
            "init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))",
            True,
        ),
        ("mesh.group(Axis.TENSOR)", False),
        ("draft.settle('pipeline', None, why)", False),
        ("meter.point_to_point('pipeline', [], link)", False),
    ],
)
def test_axes_as_text_are_recognised(code: str, named: bool) -> None:
    assert bool(list(axes_as_text(ast.parse(code)))) is named


def test_a_layout_has_a_size_for_each_axis() -> None:
    """In the same order, by which ranks are counted."""
    assert [field.name for field in fields(Layout)] == [axis.value for axis in Axis]


MOST_LINES_OF_A_FILE = 720
MOST_LINES_OF_A_FUNCTION = 100  # of its body, without the docstring


@pytest.mark.parametrize("module", sorted(sources()))
def test_files_and_functions_are_read_in_one_sitting(module: str) -> None:
    path = sources()[module]
    length = len(path.read_text(encoding="utf-8").splitlines())
    assert length <= MOST_LINES_OF_A_FILE, (
        f"{path.name} has {length} lines: split it by subject"
    )
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1:2] or node.body  # a docstring is none of its steps
            lines = (node.body[-1].end_lineno or 0) - first[0].lineno + 1
            assert lines <= MOST_LINES_OF_A_FUNCTION, (
                f"{node.name} has {lines} lines: name its phases"
            )


def test_tests_share_helpers_and_not_one_another() -> None:
    """What several tests need stands in a module of its own: who runs one file runs no
    other one's fixtures."""
    shared = re.compile(r"^\s*from tests(\.\w+)*\.test_\w+ import", re.MULTILINE)
    files = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if shared.search(path.read_text())
    ]
    assert files == []
