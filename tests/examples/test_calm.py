"""Examples say nothing that is not theirs when they begin: every one, with all that it imports."""

from __future__ import annotations

import pytest

from tests.harness import ROOT, run_script

SCRIPTS = sorted(path.stem for path in (ROOT / "examples").glob("train_*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_example_is_calm_before_it_imports_others(name: str) -> None:
    """What is quieted by an import has to come before what it quiets."""
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    calm = lines.index("import calm  # noqa: F401")
    noisy = [
        number for number, line in enumerate(lines) if line.startswith(("from transformers", "import transformers"))
    ]
    assert noisy and calm < min(noisy)


def test_imports_are_silent() -> None:
    """Those of one example: torchao and torch speak through loggers, by the same names everywhere."""
    code = "import sys; sys.path.insert(0, 'examples'); sys.argv = ['train_hf_trainer.py']; import train_hf_trainer"
    finished = run_script(["-W", "ignore", "-c", code])
    assert finished.returncode == 0 and finished.stderr == "", finished.stderr
