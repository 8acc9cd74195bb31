"""A torch without one of the names that torch-smp takes from FSDP2 is refused in words,
before anything is sharded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.sharding.fsdp import internals
from smp_core.sharding.fsdp.internals import (
    generation,
    missing_internals,
    needed,
    require_internals,
)
from tests.harness import run_ranks

NAMES = [(each.owner, name) for each in needed(generation()) for name in each.names]


class _Without:
    """What has everything that ``whole`` has, but one name."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._whole, name)


@contextmanager
def without(owner: str, name: str) -> Iterator[None]:
    """A torch in which a class of FSDP2 has renamed one of its methods or attributes,
    or torch has it no more."""
    bare, whole = name.removesuffix("()"), owners()[owner]
    with pytest.MonkeyPatch.context() as patch:
        # Not FSDP2's: written in C, or in use.
        if owner == "DTensor" or owner.split(".")[0] == "torch":
            part = _Without(whole, bare)
            patch.setattr(internals, "_owners", lambda: {**owners(), owner: part})
        else:
            _rename(patch, whole, bare)
        require_internals.cache_clear()
        yield
    require_internals.cache_clear()


owners = internals._owners


def _rename(patch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    for base in kind.__mro__[:-1]:
        if name in vars(base):
            patch.delattr(base, name)
        if name in vars(base).get("__annotations__", {}):
            patch.delitem(vars(base)["__annotations__"], name)
    for function in internals._functions(kind):
        patch.setattr(function, "__code__", _renamed(function.__code__, name))


def _renamed(code: CodeType, name: str) -> CodeType:
    names = tuple("renamed" if each == name else each for each in code.co_names)
    inner = tuple(
        _renamed(each, name) if isinstance(each, CodeType) else each
        for each in code.co_consts
    )
    return code.replace(co_names=names, co_consts=inner)


def refusals(names: list[tuple[str, str]]) -> list[tuple[str, bool]]:
    """By name what a model's sharding says, and whether the model is as it was."""
    found = []
    for owner, name in names:
        model, error = nn.Linear(4, 4), ""
        with without(owner, name):
            try:
                parallelize(model, SmpConfig(shard_degree=2))
            except RuntimeError as raised:
                error = str(raised)
        untouched = type(model) is nn.Linear and type(model.weight) is nn.Parameter
        found.append((error, untouched))
    return found


def test_each_missing_name_is_refused_before_anything_is_sharded() -> None:
    for (owner, name), (error, untouched) in zip(
        NAMES, run_ranks(refusals, 2, NAMES)[0], strict=True
    ):
        bare = name.removesuffix("()")
        assert (
            f"this is torch {torch.__version__}" in error
            and f"no {owner}.{bare}" in error
        ), (owner, name, error)
        assert "tested with torch" in error and "pip install 'torch==" in error
        assert untouched


def test_this_torch_has_all_names() -> None:
    assert missing_internals() == []


def test_a_newer_torch_with_all_names_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "3.1.0")
    require_internals.cache_clear()
    with caplog.at_level(logging.WARNING, "smp"):
        require_internals()
        require_internals()
    require_internals.cache_clear()
    assert [
        record.message.startswith("this is torch 3.1.0") for record in caplog.records
    ] == [True]


def test_a_tested_torch_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    require_internals.cache_clear()
    with caplog.at_level(logging.WARNING, "smp"):
        require_internals()
    newest = tuple(map(int, internals.TESTED_TORCH[-1].split(".")[:2]))
    is_newer = tuple(map(int, torch.__version__.split(".")[:2])) > newest
    assert len(caplog.records) == int(is_newer)
