"""What README.md and the other pages show can be pasted: blocks marked with `<!-- this
runs -->` run, the other ones import what is there and give it arguments that it has,
and links lead somewhere.

All blocks run in one process, one after the other in an empty folder each, so that
torch and Lightning are imported once.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

from smp_core.config import SmpConfig
from smp_core.planner.hardware import Hardware
from tests.examples.snippet_runner import run_block

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
MARK = "<!-- this runs -->"
PYTHON_BLOCK = re.compile(rf"({MARK})?\n*```python\n(.*?)\n```", re.DOTALL)
YAML_BLOCK = re.compile(r"```yaml\n(.*?)\n```", re.DOTALL)


def python_blocks(marked: bool) -> list[tuple[str, str]]:
    """(page and number, source) of every block with the mark, or of every one
    without."""
    found = []
    for page in PAGES:
        blocks = PYTHON_BLOCK.findall(page.read_text(encoding="utf-8"))
        for number, (mark, source) in enumerate(blocks, start=1):
            if bool(mark) == marked:
                found.append((f"{page.relative_to(ROOT)} block {number}", source))
    return found


def test_marked_code_blocks_run() -> None:
    """In one fresh process (tests/examples/snippet_runner.py)."""
    found = python_blocks(marked=True)
    marks = sum(page.read_text(encoding="utf-8").count(MARK) for page in PAGES)
    assert len(found) == marks >= 6, "a mark must stand right above a python block"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SMP_", "SLURM_"))
    }
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.examples.snippet_runner"],
        input=json.dumps(found),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        # The end of a hang: on a busy machine the imports alone take minutes.
        timeout=800,
    )
    reports = [
        json.loads(line)
        for line in done.stdout.splitlines()
        if line.startswith('{"name"')
    ]
    assert [report["name"] for report in reports] == [name for name, _ in found], (
        done.stderr[-3000:]
    )
    problems = [
        f"{report['name']}:\n{report['problem']}"
        for report in reports
        if report["problem"]
    ]
    assert not problems, "\n".join(problems)


def test_a_block_that_shows_an_error_fails_when_none_comes() -> None:
    shows = "try:\n    int({})\nexcept ValueError as error:\n    assert 'invalid' in str(error)"
    run_block(shows.format("'four'"), "raises")
    with pytest.raises(AssertionError, match=r"line 1 .*shows an error, and none came"):
        run_block(shows.format("'4'"), "raises nothing")


def test_blocks_that_are_not_run_name_what_is_there() -> None:
    """Imports are made, and what is called by an imported name takes the keywords it is
    given."""
    wrong = []
    for name, source in python_blocks(marked=False):
        nodes = list(ast.walk(ast.parse(source, name)))
        there: dict[str, Any] = {}
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                exec(compile(ast.Module([node], []), name, "exec"), there)
        for node in nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in there
            ):
                given = {keyword.arg for keyword in node.keywords if keyword.arg}
                unknown = given - keywords_of(there[node.func.id])
                wrong += [
                    f"{name}, line {node.lineno}: {node.func.id} takes no {word}"
                    for word in sorted(unknown)
                ]
    assert wrong == []


def keywords_of(called: Any) -> set[str]:
    """Arguments of a class or function; ``**knobs`` and the like are the knobs, or
    those of the class above."""
    found: set[str] = set()
    for kind in getattr(called, "__mro__", (called,)):
        if isinstance(kind, type) and "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(kind).parameters.values()
        found |= {parameter.name for parameter in parameters}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
        found |= set(SmpConfig.knobs())
        if "trainer_arguments" in found:
            found |= keywords_of(Trainer)
    return found


def test_yaml_blocks_hold_knobs_that_exist(tmp_path: Path) -> None:
    """Or a cluster, for the planner."""
    found = [
        block
        for page in PAGES
        for block in YAML_BLOCK.findall(page.read_text(encoding="utf-8"))
    ]
    sections = [block for block in found if "smp_config" in yaml.safe_load(block)]
    for block in sections:
        SmpConfig.from_dict(yaml.safe_load(block)["smp_config"])
    clusters = [block for block in found if block not in sections]
    for block in clusters:
        (tmp_path / "cluster.yaml").write_text(block)
        assert Hardware.parse(tmp_path / "cluster.yaml").devices > 1
    assert len(sections) >= 2 and clusters


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [
        link
        for link in re.findall(r"\]\(([^)\s]+)\)", text)
        if not link.startswith(("http", "mailto:"))
    ]
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        headings = (
            re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            if target.suffix == ".md" and target.exists()
            else []
        )
        anchors = {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in headings
        }
        if not target.exists() or (anchor and anchor not in anchors):
            broken.append(link)
    assert broken == []


def test_the_page_on_lightning_names_every_strategy_that_is_registered() -> None:
    importlib.import_module("lightning_smp")
    registered = {
        name
        for name in StrategyRegistry.available_strategies()
        if name.startswith("smp_")
    }
    table = (
        (ROOT / "docs" / "lightning.md")
        .read_text()
        .split("| name | partition group |", 1)[1]
        .split("\n\n", 1)[0]
    )
    assert set(re.findall(r'^\| `"(smp_\w+)"`', table, re.MULTILINE)) == registered
