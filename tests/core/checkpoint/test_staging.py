"""What staging remembers from one save to the next is never used for tensors or names
that have changed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from smp_core.checkpoint import save_checkpoint
from smp_core.checkpoint.layout import CheckpointError
from smp_core.checkpoint.memory.folder import NodeMemory
from smp_core.checkpoint.memory.slots import SharedSlots
from smp_core.checkpoint.save_plan import StagedTensor, find_ties
from smp_core.checkpoint.staging import HostBuffers, stage
from smp_core.checkpoint.tree import _is_plain, encode_rest


def in_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostBuffers:
    return HostBuffers()


def in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostBuffers:
    monkeypatch.setenv("SMP_MEMORY_FOLDER", str(tmp_path))
    return SharedSlots(NodeMemory("run"), 0)


@pytest.fixture(params=[in_host_memory, in_shared_memory])
def buffers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HostBuffers:
    made: HostBuffers = request.param(tmp_path, monkeypatch)
    return made


def staged_values(
    buffers: HostBuffers, state: Any
) -> tuple[dict[str, torch.Tensor], dict[str, str | None]]:
    """Stage a state; the copied values, and which name is tied to which."""
    if isinstance(buffers, SharedSlots):
        buffers.turn()
    staged = stage(state, None, 0, False, buffers)
    values = {}
    for name, tensor in staged.tensors.items():
        assert isinstance(tensor, StagedTensor)
        (values[name],) = tensor.slices.values()
    assert list(staged.paths) == list(values)
    return {name: value.clone() for name, value in values.items()}, find_ties(
        staged.tensors
    )


def test_each_save_has_the_values_and_the_ties_of_its_instant(
    buffers: HostBuffers,
) -> None:
    """Everything that the layout follows from changes once, between saves in which
    nothing but values does."""
    one, other = torch.zeros(4), torch.zeros(4)
    wide = torch.arange(16.0)
    states: list[dict[str, Any]] = [
        {"a": one, "b": other},
        {"a": one, "b": one},  # tied now
        {"a": one, "b": other},
        {"b": other, "a": one},  # another order
        {"a": one, "b": wide[::4]},  # other strides
        {"a": one, "b": wide[:4]},
        {"a": one, "b": other.to(torch.int64)},
        {"a": one, "b": other.reshape(2, 2)},
        {"a": one, "c": other},  # another name
        {"a": one},
        {"a": {"b": one}, "a.b": other},  # names that join alike
    ]
    count = 0
    for state in states:
        # New, then as in the save before, then as in the one before that.
        for _ in range(3):
            for tensor in (one, other, wide):
                count += 1
                tensor.copy_(torch.arange(tensor.numel()) + 100 * count)
            if "b" in state and state["b"].dtype == torch.int64:
                state["b"].copy_(other)
            values, ties = staged_values(buffers, state)
            tensors = (
                [state["a"]["b"], state["a.b"]]
                if "a.b" in state
                else list(state.values())
            )
            names = ['["a", "b"]', '["a.b"]'] if "a.b" in state else list(state)
            assert len(values) == len(tensors)
            for value, tensor in zip(values.values(), tensors, strict=True):
                assert value.dtype == tensor.dtype and torch.equal(value, tensor)
            if "a.b" not in state:
                assert list(values) == names
                is_tied = len(tensors) == 2 and tensors[0] is tensors[1]
                assert ties == {name: names[0] if is_tied else name for name in names}
            assert len(set(values)) == len(tensors)


def test_a_tensor_that_can_no_longer_be_saved_is_refused(buffers: HostBuffers) -> None:
    dense = torch.ones(3, 3)
    staged_values(buffers, {"a": dense})
    for refused in (dense.to_sparse(), dense.to("meta")):
        with pytest.raises(CheckpointError, match=r"^a is "):
            staged_values(buffers, {"a": refused})
    assert torch.equal(staged_values(buffers, {"a": dense})[0]["a"], dense)


class Marked:
    """A class that torch.load(weights_only=True) does not know."""


def marked(tensor: torch.Tensor) -> torch.Tensor:
    tensor.mark = Marked()  # type: ignore[attr-defined]
    return tensor


VALUES = {
    "plain": torch.arange(6),
    "a view": torch.arange(12.0)[::2],
    "transposed": torch.ones(2, 3).t(),
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "empty": torch.empty(0),
    "scalar": torch.tensor(1),
    "a leaf": torch.ones(2, requires_grad=True),
    "a result": torch.ones(2, requires_grad=True) * 2,
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "marked": marked(torch.ones(2)),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_not_tried_out_would_have_come_back(name: str) -> None:
    value = VALUES[name]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    if name == "marked":
        with pytest.raises(CheckpointError, match="refuses it"):
            encode_rest(value, {})
        return
    encode_rest(value, {})
    restored = torch.load(buffer, weights_only=True)
    assert type(restored) is torch.Tensor
    assert _is_plain(value) == (name not in ("sparse", "meta"))
    if _is_plain(value):
        assert torch.equal(restored, value) and restored.dtype == value.dtype


@pytest.mark.parametrize(
    "key", [b"x", frozenset([1]), torch.float32, numpy.int64(3), float("nan")], ids=str
)
def test_a_key_that_the_index_cannot_hold_is_named(tmp_path: Path, key: Any) -> None:
    with pytest.raises(CheckpointError, match=r"under the key .*use e\.g\. str"):
        save_checkpoint(tmp_path / "a", {"model": {key: torch.ones(2)}})
    with pytest.raises(CheckpointError, match=r"under the key .*use e\.g\. str"):
        save_checkpoint(tmp_path / "a", {"model": {("x", key): torch.ones(2)}})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint1, torch.bits8], ids=str)
def test_a_dtype_below_a_byte_is_refused_by_its_name(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    with pytest.raises(CheckpointError, match=rf"codes is {dtype}.*view\(torch.uint8"):
        save_checkpoint(tmp_path / "a", {"codes": torch.empty(2, dtype=dtype)})
