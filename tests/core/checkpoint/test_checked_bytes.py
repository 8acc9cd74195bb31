"""Tensor bytes are checked by default, while they are read: no damage loads, and no
byte is read twice for it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import smp_core.checkpoint.folders.local_folder as local_folder
import smp_core.checkpoint.folders.storage as storage
import smp_core.checkpoint.writer as writer
from smp_core.checkpoint import (
    CheckpointError,
    consolidate,
    import_checkpoint,
    load_checkpoint,
    read_index,
    read_tensors,
    save_checkpoint,
)
from tests.core.checkpoint.damage import edited
from tests.core.checkpoint.states import differences, gathered, sharded_state, values
from tests.harness import run_ranks

TENSORS = "tensors-00000-of-00001.safetensors"
SEED = 16


@pytest.fixture(params=[64, 1 << 20], ids=["small blocks", "one block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (storage, writer):
        monkeypatch.setattr(module, "BLOCK_BYTES", request.param)
    return int(request.param)


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << position % 8
    file.write_bytes(content)


def template() -> dict[str, Any]:
    return {
        "state_dict": {
            name: torch.zeros_like(tensor) for name, tensor in values(1).items()
        }
    }


def test_no_flipped_bit_of_a_tensor_is_loaded_by_default(
    tmp_path: Path, block: int
) -> None:
    original = tmp_path / "original"
    save_checkpoint(original, {"state_dict": values(1)})
    target = template()
    load_checkpoint(original, target)
    assert differences(target["state_dict"], values(1)) == []
    chunks = [
        chunk
        for record in read_index(original).tensors.values()
        for chunk in record.chunks
    ]
    generator = random.Random(SEED)
    for number in range(20):
        copy = Path(shutil.copytree(original, tmp_path / str(number)))
        chunk = generator.choice([chunk for chunk in chunks if chunk.end > chunk.begin])
        position = generator.randrange(chunk.begin, chunk.end)
        flip(copy / TENSORS, position)
        with pytest.raises(
            CheckpointError, match=f"{TENSORS} is damaged: its bytes from"
        ) as found:
            load_checkpoint(copy, template())
        if block == 64:
            [name] = read_index(copy).names_in(TENSORS, position, position + 1)
            assert name in str(found.value)
        with pytest.raises(CheckpointError, match="do not fit their digest"):
            read_tensors(copy)
        with pytest.raises(CheckpointError, match="do not fit their digest"):
            consolidate(copy, copy / "out.ckpt", verify="sizes")


def test_tensors_are_checked_in_any_order_and_alone(tmp_path: Path, block: int) -> None:
    """A block is compared when all of it was hashed, which may be after the tensor that
    was asked for."""
    path = tmp_path / "a"
    save_checkpoint(path, values(1))
    names = list(read_index(path).names())
    found = read_tensors(path, reversed(names))
    assert differences({name: found[name] for name in names}, values(1)) == []
    for name in names:
        for chunk in read_index(path).record(name).chunks:
            if chunk.end > chunk.begin:
                flip(path / TENSORS, chunk.begin)
                with pytest.raises(CheckpointError, match="do not fit their digest"):
                    read_tensors(path, name)
                flip(path / TENSORS, chunk.begin)


def test_damage_of_a_checkpoint_without_digests_of_blocks_is_found_by_default(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, {"state_dict": values(1)})
    edited(path, lambda index: index["blocks"]["files"].clear(), "index.json")
    load_checkpoint(path, template())
    flip(path / TENSORS, -1)
    with pytest.raises(CheckpointError, match=f"{TENSORS} is damaged"):
        load_checkpoint(path, template())


def test_small_tensors_of_a_file_share_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks read them, and have to check the blocks that they lie in."""
    path = tmp_path / "a"
    # Each as large as a block.
    large = {f"{number}.weight": torch.ones(1 << 20) for number in range(4)}
    steps = {f"{number}.step": torch.tensor(float(number)) for number in range(4)}
    state = {
        name: tensor
        for pair in zip(large.items(), steps.items(), strict=True)
        for name, tensor in pair
    }
    save_checkpoint(path, state)
    read: list[int] = []
    count_bytes(monkeypatch, local_folder._LocalRangeFile, read)
    assert read_tensors(path, "*.step") == steps
    assert sum(read) < storage.BLOCK_BYTES


def test_tensors_are_aligned_to_their_items_and_large_ones_to_the_cache_line(
    tmp_path: Path,
) -> None:
    generator = torch.Generator().manual_seed(SEED)
    dtypes = [
        torch.int8,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex128,
    ]
    sizes = [
        int(size) for size in torch.randint(0, 100_000, (40,), generator=generator)
    ]
    sizes[::4] = [size // 64 * 64 for size in sizes[::4]]
    state = {
        str(number): torch.zeros(size, dtype=dtypes[number % 5])
        for number, size in enumerate(sizes)
    }
    save_checkpoint(tmp_path / "a", state)
    for record in read_index(tmp_path / "a").tensors.values():
        for chunk in record.chunks:
            line = 64 if (chunk.end - chunk.begin) % 64 == 0 else 1
            assert chunk.begin % record.dtype.itemsize == chunk.begin % line == 0


def count_bytes(monkeypatch: pytest.MonkeyPatch, kind: Any, read: list[int]) -> None:
    original = kind.read_into

    def counting(self: Any, begin: int, target: memoryview) -> None:
        read.append(len(target))
        original(self, begin, target)

    monkeypatch.setattr(kind, "read_into", counting)


def test_every_byte_is_read_once(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, {"state_dict": values(1)})
    read: list[int] = []
    count_bytes(monkeypatch, local_folder._LocalRangeFile, read)
    load_checkpoint(path, template())
    size = sum(file.stat().st_size for file in path.iterdir())
    headers = (
        2
        * json.loads((path / "manifest.json").read_bytes())["files"][TENSORS][
            "header_bytes"
        ]
    )
    assert size - block < sum(read) <= size + headers + block, (
        "the header is looked at when sizes are checked, and opened"
    )


def test_an_object_store_is_asked_once_for_many_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import smp_core.checkpoint.folders.object_folder as object_folder

    for module in (storage, writer):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    try:
        save_checkpoint("memory://bucket/a", {"w": torch.arange(10_000.0)})
        read: list[int] = []
        count_bytes(monkeypatch, object_folder._ObjectRangeFile, read)
        assert torch.equal(
            read_tensors("memory://bucket/a")["w"], torch.arange(10_000.0)
        )
        assert len(read) <= 4, "the header, two edges, and all between"
    finally:
        fsspec.filesystem("memory").store.clear()


def load_on_ranks(path: str, flipped: bool) -> Any:
    state = sharded_state(2, seed=-1)
    try:
        load_checkpoint(path, state)
    except CheckpointError as error:
        return str(error)
    return differences(gathered(state), gathered(sharded_state(2, seed=1)))


def save_small_blocks(path: str) -> None:
    originals = storage.BLOCK_BYTES
    storage.BLOCK_BYTES = writer.BLOCK_BYTES = 64
    try:
        save_checkpoint(path, sharded_state(2, seed=1))
    finally:
        storage.BLOCK_BYTES = writer.BLOCK_BYTES = originals


def test_parts_of_slices_are_checked_on_another_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "a"
    run_ranks(save_small_blocks, 4, str(path))
    assert run_ranks(load_on_ranks, 2, str(path), False) == [[], []]
    chunk = read_index(path).tensors["state_dict.wide.weight"].chunks[-1]
    flip(path / chunk.file, chunk.end - 1)
    for error in run_ranks(load_on_ranks, 2, str(path), True):
        assert f"{chunk.file} is damaged" in error


def test_a_flipped_bit_in_a_ckpt_file_is_not_imported(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"w": torch.arange(1000.0)}}, file)
    flip(file, file.read_bytes().index(torch.arange(500.0, 510.0).numpy().tobytes()))
    assert not torch.equal(torch.load(file)["state_dict"]["w"], torch.arange(1000.0)), (
        "torch does not notice"
    )
    with pytest.raises(CheckpointError, match="is damaged: the checksum"):
        import_checkpoint(file, tmp_path / "out")
