"""A file that was made to run code when it is unpickled does not run it: not in any
loader, not in any command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path, PosixPath, PurePath, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import smp_core.checkpoint as checkpoint
from smp_core.checkpoint import CheckpointError, save_checkpoint
from smp_core.checkpoint.foreign.inert_pickle import read_inert
from smp_core.cli import app
from tests.core.checkpoint.damage import rewrite_manifest
from tests.core.checkpoint.states import values


class Bomb:
    """Pickles as a call that makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "exploded"


def crafted(folder: Path, mark: Path, file: str) -> Path:
    """A checkpoint whose rest.pt (or a tensor file) is a bomb, with sizes and digests
    that fit it."""
    path = folder / "crafted"
    save_checkpoint(path, {"state_dict": values(1), "size": torch.Size([1])})
    torch.save({"0": Bomb(mark)}, path / file)
    content = (path / file).read_bytes()
    manifest = json.loads((path / "manifest.json").read_bytes())
    record = manifest["files"][file]
    record.update(
        bytes=len(content), digest=checkpoint.layout.digest_of(content, "xxh3")
    )
    if record["header_bytes"]:
        record["header_digest"] = checkpoint.layout.digest_of(
            content[: record["header_bytes"]], "xxh3"
        )
    rewrite_manifest(path, manifest)
    return path


def loaders(path: Path, out: Path) -> dict[str, Callable[[], Any]]:
    template = {"state_dict": values(1), "size": None}
    return {
        "load": lambda: checkpoint.load_checkpoint(path, template, verify="digests"),
        "load unverified": lambda: checkpoint.load_checkpoint(
            path, template, verify=None
        ),
        "rest": lambda: checkpoint.read_rest(path),
        "per rank": lambda: checkpoint.read_per_rank(path),
        "tensors": lambda: checkpoint.read_tensors(path),
        "manifest": lambda: checkpoint.read_manifest(path),
        "is": lambda: checkpoint.is_checkpoint(path),
        "verify": lambda: checkpoint.verify_checkpoint(path, deep=True),
        "newest": lambda: checkpoint.newest_checkpoint(path.parent),
        "to folder": lambda: checkpoint.consolidate(path, out / "a"),
        "to ckpt": lambda: checkpoint.consolidate(path, out / "a.ckpt"),
        "to pt": lambda: checkpoint.consolidate(path, out / "a.pt"),
        "export": lambda: checkpoint.export_checkpoint(path, out / "b", "dcp"),
        "import": lambda: checkpoint.import_checkpoint(path, out / "c"),
    }


@pytest.mark.parametrize("file", ["rest.pt", "tensors-00000-of-00001.safetensors"])
def test_no_loader_runs_code_from_a_crafted_checkpoint(
    tmp_path: Path, mark: Path, file: str
) -> None:
    path = crafted(tmp_path, mark, file)
    for name, loader in loaders(path, tmp_path).items():
        with contextlib.suppress(CheckpointError):
            loader()
        assert not mark.exists(), name
    if file == "rest.pt":
        with pytest.raises(CheckpointError, match="weights_only=True"):
            checkpoint.read_rest(path)
    torch.load(io.BytesIO((path / file).read_bytes()), weights_only=False)
    assert mark.exists(), "the bomb works where it is let off"


@pytest.mark.parametrize("file", ["rest.pt", "tensors-00000-of-00001.safetensors"])
def test_no_command_runs_code_from_a_crafted_checkpoint(
    tmp_path: Path, mark: Path, file: str
) -> None:
    path = str(crafted(tmp_path, mark, file))
    for arguments in (
        ["inspect", path, "--all", "--plot", str(tmp_path / "plot.png")],
        ["verify", path],
        ["verify", path, "--deep"],
        ["list", str(tmp_path)],
        ["consolidate", path, str(tmp_path / "a")],
        ["consolidate", path, str(tmp_path / "a.ckpt"), "--optimizer"],
        ["consolidate", path, str(tmp_path / "a.pt")],
        ["export", path, str(tmp_path / "b"), "--format", "lightning"],
        ["import", path, str(tmp_path / "c")],
        ["import", f"{path}/{file}", str(tmp_path / "d")],
    ):
        CliRunner().invoke(app, ["checkpoint", *arguments])
        assert not mark.exists(), arguments


def bombs(folder: Path, mark: Path) -> dict[str, Path]:
    """Foreign checkpoints that are bombs."""
    torch.save(
        {"state_dict": values(1), "hyper_parameters": Bomb(mark)}, folder / "a.ckpt"
    )
    (folder / "raw.ckpt").write_bytes(pickle.dumps(Bomb(mark)))
    for name in ("metadata", "value", "lightning"):
        dcp.save(
            {"state_dict": values(1), "rest": Bomb(mark)},
            checkpoint_id=folder / name,
            no_dist=True,
        )
    dcp.save(
        {"state_dict": values(1)}, checkpoint_id=folder / "lightning", no_dist=True
    )
    (folder / "metadata" / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    torch.save({"x": Bomb(mark)}, folder / "lightning" / "meta.pt")
    assert not mark.exists()
    return {
        name: folder / name
        for name in ("a.ckpt", "raw.ckpt", "metadata", "value", "lightning")
    }


def test_importing_does_not_run_code_from_the_source(
    tmp_path: Path, mark: Path
) -> None:
    for name, source in bombs(tmp_path, mark).items():
        with pytest.raises(CheckpointError):
            checkpoint.import_checkpoint(source, tmp_path / f"out-{name}")
        assert not mark.exists(), name
        done = CliRunner().invoke(
            app, ["checkpoint", "import", str(source), str(tmp_path / f"out-{name}")]
        )
        assert done.exit_code == 1 and not mark.exists(), name


def test_custom_classes_are_refused_at_save_time_unless_pickle_is_asked_for_by_name(
    tmp_path: Path, mark: Path
) -> None:
    state = {
        "state_dict": values(1),
        "hyper_parameters": {"model": {"callback": Bomb(mark)}, "lr": 0.1},
    }
    with pytest.raises(
        CheckpointError, match=r"hyper_parameters\.model\.callback \(.*Bomb"
    ):
        save_checkpoint(tmp_path / "a", state)
    assert not (tmp_path / "a").exists()
    save_checkpoint(tmp_path / "a", state, allow_pickle=True)
    assert checkpoint.read_manifest(tmp_path / "a").pickled == [
        "hyper_parameters.model.callback"
    ]
    with pytest.raises(CheckpointError, match="allow_pickle=True if you trust"):
        checkpoint.read_rest(tmp_path / "a")
    # What needs no pickle is there without it.
    assert torch.equal(
        checkpoint.read_tensors(tmp_path / "a")["state_dict.half"], values(1)["half"]
    )
    assert not mark.exists()
    checkpoint.read_rest(tmp_path / "a", allow_pickle=True)
    assert mark.exists()


def hostile_metadata() -> dict[str, bytes]:
    """Metadata of DCP that change a class without a call, or ask for more memory than
    the file has."""
    path = b"cpathlib\nPosixPath\n"
    return {
        "attribute of a class": b"\x80\x02"
        + path
        + b"N}X\x06\x00\x00\x00parentK\x01s\x86b.",
        "through a data class": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}X\x13\x00\x00\x00"
        b"state_dict_metadata" + path + b"N}X\x06\x00\x00\x00parentK\x01s\x86bsb.",
        "memo of 16 GB": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "string of 4 GB": b"\x80\x02X\xff\xff\xff\xff",
        "array of 1 TB": b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
        "key that hashes forever": b"\x80\x02}(K\x01" + b"2\x86" * 64 + b"Nu.",
        "no end": b"\x80\x02N",
        "empty": b"",
    }


@pytest.mark.parametrize("kind", list(hostile_metadata()))
def test_metadata_of_dcp_reach_no_class_of_this_process(
    tmp_path: Path, kind: str
) -> None:
    dcp.save({"state_dict": values(1)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / ".metadata").write_bytes(hostile_metadata()[kind])
    before = (
        dict(vars(Path)),
        dict(vars(PurePath)),
        dict(vars(PurePosixPath)),
        dict(vars(PosixPath)),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        checkpoint.import_checkpoint(tmp_path / "dcp", tmp_path / "out")
    assert (
        dict(vars(Path)),
        dict(vars(PurePath)),
        dict(vars(PurePosixPath)),
        dict(vars(PosixPath)),
    ) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 500_000  # kB


def test_metadata_of_dcp_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    source = tmp_path / "dcp"
    dcp.save({"state_dict": values(1)}, checkpoint_id=source, no_dist=True)
    os.rename(source / "__0_0.distcp", tmp_path / "outside.tcp")
    content = (source / ".metadata").read_bytes()
    (source / ".metadata").write_bytes(
        content.replace(b"__0_0.distcp", b"../outside.t")
    )
    os.rename(tmp_path / "outside.tcp", tmp_path / "outside.t")
    with pytest.raises(CheckpointError, match="not in the folder: not trusted"):
        checkpoint.import_checkpoint(source, tmp_path / "out")
    (source / ".metadata").write_bytes(content)
    os.symlink(tmp_path / "outside.t", source / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="no regular file"):
        checkpoint.import_checkpoint(source, tmp_path / "out")


def test_the_inert_reader_reads_what_the_unpickler_reads() -> None:
    value = {
        "a": [1, -5, 2**70, 1.5, None, True, b"x", "ü"],
        ("t", 1): {"s": ({1, 2}, frozenset({3}))},
        2: bytearray(b"y"),
    }
    value["again"] = value["a"]
    for protocol in (4, 5):  # earlier ones make sets and bytes by calls
        value[2] = b"y" if protocol == 4 else bytearray(b"y")
        assert read_inert(pickle.dumps(value, protocol), "here") == value
    plain = {"a": [1, (2, (3,)), {"b": 4.5}], "c": ()}
    for protocol in range(2, 6):
        assert read_inert(pickle.dumps(plain, protocol), "here") == plain
