"""What README.md and docs/ show can be pasted: blocks marked with `<!-- this runs -->` run, and links lead somewhere.

All blocks run in one process, one after the other in an empty folder each, so that torch and Lightning are imported
once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = "<!-- this runs -->"
BLOCK = re.compile(rf"{MARK}\n+```python\n(.*?)\n```", re.DOTALL)

# Names a block, runs it, says how it went: one JSON line per block on the real stdout.
RUNNER = """
import contextlib, io, json, os, sys, tempfile, traceback
for name, source in json.load(sys.stdin):
    problem, output = None, io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(output):
        os.chdir(folder)
        try:
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
        except BaseException:
            problem = traceback.format_exc()
        os.chdir("/")
    print(json.dumps({"name": name, "problem": problem}), flush=True)
"""


def blocks() -> list[tuple[str, str]]:
    """(page and number, source) of every marked block."""
    return [
        (f"{page.relative_to(ROOT)} block {number}", source)
        for page in PAGES
        for number, source in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")), start=1)
    ]


def test_marked_code_blocks_run() -> None:
    found = blocks()
    marks = sum(page.read_text(encoding="utf-8").count(MARK) for page in PAGES)
    assert len(found) == marks >= 6, "a mark must stand right above a python block"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SMP_", "SLURM_"))}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUNNER],
        input=json.dumps(found),
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,  # the end of a hang: on a busy machine the imports alone take minutes
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert [report["name"] for report in reports] == [name for name, _ in found], done.stderr[-3000:]
    problems = [f"{report['name']}:\n{report['problem']}" for report in reports if report["problem"]]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http", "mailto:"))]
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        headings = (
            re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            if target.suffix == ".md" and target.exists()
            else []
        )
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if not target.exists() or (anchor and anchor not in anchors):
            broken.append(link)
    assert broken == []
