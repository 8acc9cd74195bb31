"""A checkpoint that was damaged after it was written never loads wrong numbers: the
error names the file."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from smp_core.checkpoint import (
    CheckpointError,
    is_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    read_manifest,
    read_rest,
    read_tensors,
    save_checkpoint,
    save_step,
    verify_checkpoint,
)
from tests.core.checkpoint.damage import rewrite_manifest
from tests.core.checkpoint.states import differences, rest, values
from tests.harness import run_ranks

TENSORS = "tensors-00000-of-00004.safetensors"
FILES = [
    "manifest.json",
    "index.json",
    "rest.json",
    "rest.pt",
    TENSORS,
    "extra/config.json",
]
SEED = 20


def state(seed: int) -> dict[str, object]:
    # Of unsharded tensors only large ones are dealt out: other ranks have files too.
    large = {
        f"large.{number}": torch.full((512, 512), seed + 0.5) for number in range(2)
    }
    return {"state_dict": {**values(seed), **large}, "rest": rest(seed)}


def save(path: str, seed: int) -> None:
    save_checkpoint(path, state(seed), extra_files={"config.json": '{"layers": 2}'})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "step-00000001"
    run_ranks(save, 4, str(path), 1)
    return path


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "step-00000001"))


def load(path: Path) -> dict[str, object]:
    """Everything a resume reads: the extra files are read by consolidate, so they are
    checked by verify here."""
    target = state(1)
    for tensor in target["state_dict"].values():  # type: ignore[attr-defined]
        tensor.zero_()
    target["rest"] = {}
    load_checkpoint(path, target, verify="digests")
    return target


def refused(path: Path, file: str) -> None:
    """The damage is found by loading and by verify, and both name the file."""
    with pytest.raises(CheckpointError, match=Path(file).name):
        load(path)
    assert any(
        Path(file).name in problem for problem in verify_checkpoint(path, deep=True)
    )


def test_the_undamaged_copy_loads(copy: Path) -> None:
    assert differences(load(copy), state(1)) == []
    assert verify_checkpoint(copy, deep=True) == []


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_found_in_every_kind_of_file(copy: Path, file: str) -> None:
    content = (copy / file).read_bytes()
    generator = random.Random(SEED)
    for position in [
        0,
        len(content) - 1,
        *(generator.randrange(len(content)) for _ in range(10)),
    ]:
        broken = bytearray(content)
        broken[position] ^= 1 << generator.randrange(8)
        (copy / file).write_bytes(broken)
        refused(copy, file)


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_file_is_found(copy: Path, file: str) -> None:
    content = (copy / file).read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 100, len(content) - 1):
        (copy / file).write_bytes(content[: max(length, 0)])
        refused(copy, file)


@pytest.mark.parametrize("file", FILES)
def test_a_deleted_file_is_found(copy: Path, file: str) -> None:
    (copy / file).unlink()
    refused(copy, file)


def test_swapped_files_are_found_by_the_cheap_check_too(copy: Path) -> None:
    first, second, *_ = sorted(copy.glob("tensors-*.safetensors"))
    size = max(first.stat().st_size, second.stat().st_size)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    refused(copy, "tensors-0000")
    # Even where the sizes happen to be equal, the header does not fit.
    manifest = json.loads((copy / "manifest.json").read_bytes())
    for file, content in ((first, b), (second, a)):
        file.write_bytes(content.ljust(size))
        manifest["files"][file.name]["bytes"] = size
    rewrite_manifest(copy, manifest)
    assert any(
        "not the file that this save wrote" in problem
        for problem in verify_checkpoint(copy)
    )


def test_a_file_of_another_save_is_found(copy: Path, tmp_path: Path) -> None:
    # Same state, same sizes, same tensors: only the identity of the save differs.
    run_ranks(save, 4, str(tmp_path / "other"), 2)
    shutil.copy(tmp_path / "other" / "tensors-00000-of-00004.safetensors", copy)
    with pytest.raises(CheckpointError, match=r"tensors-00000-of-00004\.safetensors"):
        target = state(1)
        load_checkpoint(copy, target, verify="sizes")


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.update(step=5),
        lambda m: m["files"].pop("rest.json"),
        lambda m: m["files"]["index.json"].update(bytes=1),
        lambda m: m.update(format="something else"),
        lambda m: m.update(version=99),
        lambda m: m.update(manifest_digest="0" * 32),
    ],
    ids=["step", "file removed", "size", "format", "version", "digest"],
)
def test_an_edited_manifest_is_refused(copy: Path, edit: object) -> None:
    content = json.loads((copy / "manifest.json").read_bytes())
    edit(content)  # type: ignore[operator]
    (copy / "manifest.json").write_text(json.dumps(content))
    refused(copy, "manifest.json")
    assert not is_checkpoint(copy)


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_of_the_format_is_refused_by_its_number(
    copy: Path, version: int
) -> None:
    rewrite_manifest(
        copy, {**json.loads((copy / "manifest.json").read_bytes()), "version": version}
    )
    with pytest.raises(
        CheckpointError,
        match=f"has format version {version}; this torch-smp reads version 2",
    ):
        read_manifest(copy)


def test_missing_empty_half_and_foreign_folders_are_told_apart(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path, {"state_dict": {}})
        assert not is_checkpoint(path)
        return str(caught.value)

    assert "nothing exists" in message(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "empty folder" in message(tmp_path / "empty")
    half = tmp_path / "half"
    save_checkpoint(half, state(1))
    (half / "manifest.json").unlink()
    assert "half a checkpoint" in message(half)
    for files, expected in [
        ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint"),
        ([".metadata", "meta.pt", "__0_0.distcp"], "Lightning"),
        (["pytorch_model_fsdp_0/.metadata"], "Accelerate"),
        (["model.safetensors", "config.json"], "Hugging Face"),
        (["letter.txt"], r"it holds letter.txt"),
    ]:
        folder = tmp_path / expected.replace(" ", "-")
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("x")
        assert expected in message(folder)
    (tmp_path / "last.ckpt").write_bytes(b"PK")
    assert "single file" in message(tmp_path / "last.ckpt")
    save_checkpoint(tmp_path / "runs" / "a", state(1))
    assert "a folder of checkpoints" in message(tmp_path / "runs")


def test_the_newest_whole_one_is_found_and_broken_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step, state(step))
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    with open(
        tmp_path / "step-00000003" / "tensors-00000-of-00001.safetensors", "ab"
    ) as file:
        file.write(b"x")
    found = newest_checkpoint(tmp_path)
    assert found == str(tmp_path / "step-00000002")
    assert differences(read_rest(found, "rest"), rest(2)) == []
    assert "step-00000004" in caplog.text and "step-00000003" in caplog.text


def test_without_digests_a_flipped_bit_would_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix above bites: with a digest that is blind, the same damage goes through
    and a weight is wrong."""

    class Blind:
        def update(self, data: object) -> None: ...

        def hexdigest(self) -> str:
            return "0"

    for module in ("layout", "folders.storage", "verify"):
        monkeypatch.setattr(
            f"smp_core.checkpoint.{module}.new_digest", lambda algorithm: Blind()
        )
    path = tmp_path / "blind"
    save_checkpoint(path, state(1))
    file = path / "tensors-00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    assert differences(load(path), state(1)) != []


def test_the_digest_algorithm_is_a_choice_and_is_recorded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", state(1), digest="sha256")
    assert read_manifest(tmp_path / "a").algorithm == "sha256"
    assert verify_checkpoint(tmp_path / "a", deep=True) == []
    assert torch.equal(
        read_tensors(tmp_path / "a")["state_dict.half"], values(1)["half"]
    )
    with pytest.raises(
        CheckpointError, match="digest='crc16' is not known; allowed: xxh3, sha256"
    ):
        save_checkpoint(tmp_path / "b", state(1), digest="crc16")
