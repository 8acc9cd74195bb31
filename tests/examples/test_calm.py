"""Examples say nothing that is not theirs when they begin
(tests/examples/test_accelerate_examples.py listens)."""

from __future__ import annotations

import pytest

from tests.harness import ROOT

SCRIPTS = sorted(path.stem for path in (ROOT / "examples").glob("train_*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_example_is_calm_before_it_imports_others(name: str) -> None:
    """What is quieted by an import has to come before what it quiets."""
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    calm = lines.index("import calm  # noqa: F401")
    noisy = [
        number
        for number, line in enumerate(lines)
        if line.startswith(("from transformers", "import transformers"))
    ]
    assert noisy and calm < min(noisy)
