"""How much code there is, how dense it is and how much of it is commented.

    python benchmarks/code_size.py [--before CHECKOUT] [--out
    benchmarks/results/code_size.json]

Counted are the three packages, by room, and the tests: tokens of code (comments,
docstrings, ends of lines and indentation left out), lines that have any, comments, and
statements with several comprehensions. The file keeps two counts: "before", of the
checkout that --before names, or what the file has already; and "after", of this one,
which tests/core/test_code_size.py holds.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "code_size.json"
PRODUCT = ("smp_core", "lightning_smp", "accelerate_smp")
_NO_CODE = {
    *(
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
    ),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# What a statement may have inside that is not its own.
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)


@dataclass(frozen=True)
class Size:
    """The size of some code."""

    tokens: int = 0
    lines: int = 0
    comments: int = 0
    dense: int = 0
    """Statements with several comprehensions."""

    def __add__(self, other: Size) -> Size:
        both = zip(astuple(self), astuple(other), strict=True)
        return Size(*(one + another for one, another in both))

    @property
    def tokens_per_line(self) -> float:
        """The tokens of a line that has code, on average."""
        return self.tokens / max(self.lines, 1)

    @property
    def comments_per_100_lines(self) -> float:
        """The comments for 100 lines that have code."""
        return 100 * self.comments / max(self.lines, 1)

    def as_dict(self) -> dict[str, float]:
        """Return all figures by name."""
        return {
            "tokens": self.tokens,
            "lines": self.lines,
            "tokens_per_line": round(self.tokens_per_line, 3),
            "comments_per_100_lines": round(self.comments_per_100_lines, 3),
            "dense_statements": self.dense,
        }


def size_of(text: str) -> Size:
    """Count the code of one file."""
    tree = ast.parse(text)
    docstrings = set(_docstrings(tree))
    tokens = comments = 0
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        comments += token.type == tokenize.COMMENT
        if token.type not in _NO_CODE and token.start not in docstrings:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return Size(tokens, len(lines), comments, _dense_statements(tree))


def _dense_statements(tree: ast.Module) -> int:
    """Count the statements with several comprehensions; those of statements inside
    others are these ones' own."""

    def comprehensions(node: ast.AST) -> int:
        below = [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, _BLOCKS)
        ]
        return isinstance(node, _COMPREHENSIONS) + sum(map(comprehensions, below))

    return sum(
        isinstance(node, ast.stmt) and comprehensions(node) > 1
        for node in ast.walk(tree)
    )


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield where the docstrings of a file begin; texts under attributes of classes and
    modules count as code."""
    for node in ast.walk(tree):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ):
            if ast.get_docstring(node, clean=False) is not None:
                yield node.body[0].lineno, node.body[0].col_offset


def by_room(root: Path, folders: Sequence[str] = PRODUCT) -> dict[str, Size]:
    """Count the code in folders of a checkout: room (of smp_core its own folders, else
    the folder) -> size."""
    sizes: dict[str, Size] = {}
    for top in folders:
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).parts
            room = "/".join(parts[:2]).removesuffix(".py") if top == "smp_core" else top
            sizes[room] = sizes.get(room, Size()) + size_of(
                path.read_text(encoding="utf-8")
            )
    return sizes


def total(sizes: dict[str, Size]) -> Size:
    """Add up rooms."""
    return sum(sizes.values(), Size())


def figures(root: Path) -> dict[str, Any]:
    """Return the figures of a checkout, as the file has them."""
    sizes, tests = by_room(root), by_room(root, ("tests",))
    rooms = {room: size.as_dict() for room, size in sorted(sizes.items())}
    return {
        "product": total(sizes).as_dict(),
        "tests": total(tests).as_dict(),
        "rooms": rooms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before",
        type=Path,
        help="another checkout, which the file compares with from now on",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    known = (
        json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    )
    after = figures(ROOT)
    before = figures(asked.before) if asked.before else known.get("before", after)
    asked.out.write_text(
        json.dumps({"before": before, "after": after}, indent=1) + "\n",
        encoding="utf-8",
    )

    heads = f"{'tokens':>8} {'before':>8} {'lines':>7} {'a line':>7} {'before':>7} {'comments':>9} {'before':>7} dense"
    print(f"{'':32} {heads}")
    for name, now, then in _rows(before, after):
        size = f"{now['tokens']:8,} {then['tokens']:8,} {now['lines']:7,}"
        density = f"{now['tokens_per_line']:7.2f} {then['tokens_per_line']:7.2f}"
        comments = f"{now['comments_per_100_lines']:9.2f} {then['comments_per_100_lines']:7.2f}"
        print(f"{name:32} {size} {density} {comments} {now['dense_statements']:5}")


def _rows(
    before: dict[str, Any], after: dict[str, Any]
) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    nothing = Size().as_dict()
    for name, now in after["rooms"].items():
        yield name, now, before["rooms"].get(name, nothing)
    for name in ("product", "tests"):
        yield name, after[name], before[name]


if __name__ == "__main__":
    main()
