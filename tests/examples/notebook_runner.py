"""Runs the cells of examples/tour.ipynb one after another in one process, without
Jupyter, and gives what they show.

    python -m tests.examples.notebook_runner           # prints the texts, as JSON
    python -m tests.examples.notebook_runner --write   # puts texts and pictures into the notebook

Cells are plain Python, or begin with `%%writefile NAME`. Pictures are what `plt.show()`
shows.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

from tests.harness import ROOT

NOTEBOOK = ROOT / "examples" / "tour.ipynb"
WRITES = "%%writefile "
Outputs = list[dict[str, Any]]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, names: dict[str, Any]) -> Outputs:
    if source.startswith(WRITES):
        first, _, text = source.partition("\n")
        file = first.removeprefix(WRITES)
        Path(file).write_text(text, encoding="utf-8")
        return [_text(f"Writing {file}\n")]
    printed, pictures = io.StringIO(), []

    def show() -> None:
        png = io.BytesIO()
        pyplot.savefig(png, format="png", dpi=80, metadata={"Software": None})
        pyplot.close()
        pictures.append(png.getvalue())

    pyplot.show = show
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "<cell>", "exec"), names)
    outputs = [_text(printed.getvalue())] if printed.getvalue() else []
    return outputs + [_picture(png) for png in pictures]


def _text(text: str) -> dict[str, Any]:
    return {
        "name": "stdout",
        "output_type": "stream",
        "text": text.splitlines(keepends=True),
    }


def _picture(png: bytes) -> dict[str, Any]:
    data = {"image/png": base64.b64encode(png).decode()}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def texts(outputs: Outputs) -> list[str]:
    """What a cell shows, pictures as a word: they differ with versions of
    matplotlib."""
    return ["".join(each["text"]) if "text" in each else "picture" for each in outputs]


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number, cell in enumerate(code_cells(notebook), start=1):
                outputs = run_cell("".join(cell["source"]), names)
                cell["outputs"], cell["execution_count"] = outputs, number
                shown.append(texts(outputs))
        finally:
            os.chdir(ROOT)
    if "--write" in sys.argv[1:]:
        NOTEBOOK.write_text(
            json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    else:
        json.dump(shown, sys.stdout)


if __name__ == "__main__":
    main()
