"""What is asked of other packages costs nothing where they are not used."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from torch import nn

from smp_core.torch_facts import transformers_models


def test_a_plain_model_does_not_import_transformers_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchmetrics imports the package, and so does Lightning; the file of its
    models takes seconds."""

    class Untouched(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"transformers.{name} was imported")

    monkeypatch.setitem(sys.modules, "transformers", Untouched("transformers"))
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    assert transformers_models(nn.Linear(2, 2)) == []
