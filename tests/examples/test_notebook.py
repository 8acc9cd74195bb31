"""examples/tour.ipynb runs from its first cell to its last, and shows the texts that
stand in it."""

from __future__ import annotations

import ast
import json

import pytest

from tests.harness import ROOT, run_script

pytest.importorskip("matplotlib", reason="the notebook draws: pip install -e '.[plot]'")

from tests.examples.notebook_runner import NOTEBOOK, WRITES, code_cells, texts


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_stands_in_it() -> None:
    """Losses of the layouts are compared in the notebook itself (1e-12, float64); bytes
    are counted, so they are equal.

    `python -m tests.examples.notebook_runner --write` writes it anew.
    """
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    done = run_script(
        ["-W", "ignore", "-m", "tests.examples.notebook_runner"],
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == [
        texts(cell["outputs"]) for cell in code_cells(notebook)
    ]


def test_the_notebook_is_python_with_pictures_and_no_paths_of_a_machine() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in code_cells(notebook):
        source = "".join(cell["source"])
        ast.parse(source.partition("\n")[2] if source.startswith(WRITES) else source)
    shown = [text for cell in code_cells(notebook) for text in texts(cell["outputs"])]
    assert shown.count("picture") >= 2
    assert not [text for text in shown if "/" in text]
