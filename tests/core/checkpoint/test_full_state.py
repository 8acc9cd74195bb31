"""The whole state dict comes back, offline and online, with bounded memory and nothing
dropped in silence."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from smp_core.checkpoint import (
    CheckpointError,
    consolidate,
    export_checkpoint,
    full_state,
    full_state_dict,
    save_checkpoint,
    save_full_state,
)
from smp_core.checkpoint.foreign.torch_file import TorchFile
from smp_core.checkpoint.full_state import numbered_optimizer_state
from tests.core.checkpoint.states import (
    differences,
    gathered,
    rest,
    shard_mesh,
    sharded_state,
    values,
)
from tests.harness import ROOT, run_ranks


def save(path: str, shard_degree: int, facts: dict[str, Any]) -> Any:
    state = sharded_state(shard_degree, seed=1)
    save_checkpoint(
        path,
        state,
        metadata=facts,
        extra_files={"config.json": "{}", "tokenizer.json": b"[]"},
    )
    return gathered(state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("full") / "a"
    return path, run_ranks(save, 4, str(path), 4, {})[0]


def read_folder(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    index = folder / f"{stem}.safetensors.index.json"
    if not index.exists():
        return load_file(folder / f"{stem}.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert sum(len(file) for file in files.values()) == len(weight_map)
    return {name: files[file][name] for name, file in weight_map.items()}


@pytest.mark.parametrize("workers", [1, 3])
def test_safetensors_hold_every_weight_and_state_in_files_of_the_asked_size(
    saved: tuple[Path, Any], tmp_path: Path, workers: int
) -> None:
    path, state = saved
    seen: list[int] = []

    class Bar:
        def __init__(self, total: int) -> None:
            self.total = total

        def __enter__(self) -> Any:
            return seen.append

        def __exit__(self, *exc: object) -> None:
            assert sum(seen) == self.total

    made = consolidate(
        path,
        tmp_path / "out",
        max_shard_size=300,
        optimizer=True,
        workers=workers,
        progress=Bar,
    )
    weights = state["state_dict"]
    expected = {
        name: tensor.contiguous()
        for name, tensor in weights.items()
        if name != "tied.weight"
    }
    assert (
        differences(
            dict(sorted(read_folder(tmp_path / "out", "model").items())),
            dict(sorted(expected.items())),
        )
        == []
    )
    states = read_folder(tmp_path / "out", "optimizer")
    momentum = state["optimizer_states"][1]["state"]["wide.weight"]["momentum_buffer"]
    assert torch.equal(
        states["optimizer_states.1.state.wide.weight.momentum_buffer"], momentum
    )
    groups = json.loads((tmp_path / "out" / "optimizer.json").read_text())[
        "optimizer_states"
    ][0]["param_groups"]
    assert groups[0]["lr"] == 1e-3
    assert {"config.json", "tokenizer.json"} <= set(made)
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 1
    for file in files:
        content = load_file(file)
        assert len(content) == 1 or sum(t.nbytes for t in content.values()) <= 300


def test_a_tied_weight_is_written_once_and_the_header_says_of_what(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    consolidate(saved[0], tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert "tied.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata() == {"format": "pt", "tied.weight": "wide.weight"}


def test_a_cast_touches_floating_point_weights_only(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    path, state = saved
    consolidate(path, tmp_path / "out", dtype="bf16", optimizer=True)
    found = read_folder(tmp_path / "out", "model")
    assert torch.equal(
        found["wide.weight"], state["state_dict"]["wide.weight"].bfloat16()
    )
    assert found["counts"].dtype == torch.int64
    assert (
        read_folder(tmp_path / "out", "optimizer")[
            "optimizer_states.0.state.norm.bias.exp_avg"
        ].dtype
        == torch.float32
    )


def test_an_optimizer_without_tensors_is_exported_with_its_groups(
    tmp_path: Path,
) -> None:
    groups = [{"params": ["w"], "lr": 0.5}]
    state = {"state_dict": {"w": torch.ones(2)}, "optimizer": {"param_groups": groups}}
    save_checkpoint(tmp_path / "a", state)
    made = consolidate(tmp_path / "a", tmp_path / "out", optimizer=True)
    assert made == ["model.safetensors", "optimizer.json"]
    found = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert found == {"optimizer": {"param_groups": groups}}


def test_a_dtype_that_others_would_read_as_integers_is_not_exported(
    tmp_path: Path,
) -> None:
    weight = torch.ones(2, 3).to(torch.float8_e4m3fnuz)
    save_checkpoint(tmp_path / "a", {"state_dict": {"w": weight}})
    with pytest.raises(
        CheckpointError, match="w is float8_e4m3fnuz, which safetensors"
    ):
        consolidate(tmp_path / "a", tmp_path / "out")
    consolidate(tmp_path / "a", tmp_path / "out", dtype="fp32")
    assert read_folder(tmp_path / "out", "model")["w"].dtype == torch.float32


def test_a_prefix_comes_off_as_recorded_or_as_asked(tmp_path: Path) -> None:
    state = {
        "state_dict": {
            "model.a": torch.ones(2),
            "model.b": torch.zeros(1),
            "loss.weight": torch.ones(1),
        }
    }
    save_checkpoint(tmp_path / "a", state, metadata={"module_prefix": "model."})
    consolidate(tmp_path / "a", tmp_path / "out")
    assert set(read_folder(tmp_path / "out", "model")) == {"a", "b", "loss.weight"}
    consolidate(tmp_path / "a", tmp_path / "whole", strip_prefix="")
    assert set(read_folder(tmp_path / "whole", "model")) == {
        "model.a",
        "model.b",
        "loss.weight",
    }
    consolidate(tmp_path / "a", tmp_path / "x.pt", strip_prefix="model.")
    assert set(torch.load(tmp_path / "x.pt")) == {"a", "b", "loss.weight"}
    with pytest.raises(CheckpointError, match=r"strip_prefix='net\.' fits no tensor"):
        consolidate(tmp_path / "a", tmp_path / "y", strip_prefix="net.")
    save_checkpoint(
        tmp_path / "b", {"state_dict": {"model.a": torch.ones(2), "a": torch.zeros(1)}}
    )
    with pytest.raises(CheckpointError, match="two tensors would be called 'a'"):
        consolidate(tmp_path / "b", tmp_path / "z", strip_prefix="model.")


def test_a_ckpt_is_an_ordinary_lightning_checkpoint(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    path, state = saved
    consolidate(path, tmp_path / "a.ckpt", optimizer=True)
    found = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert found["state_dict"]["tied.weight"] is not None
    assert (
        differences(
            dict(sorted(found["state_dict"].items())),
            dict(sorted(state["state_dict"].items())),
        )
        == []
    )
    assert differences(found["rest"], rest(1)) == []
    assert (
        differences(
            found["optimizer_states"],
            [numbered_optimizer_state(s) for s in state["optimizer_states"]],
        )
        == []
    )
    consolidate(path, tmp_path / "b.ckpt")
    assert "optimizer_states" not in torch.load(tmp_path / "b.ckpt", weights_only=True)


def test_a_numbered_optimizer_state_loads_into_torchs_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(
        [{"params": [model.bias], "lr": 0.2}, {"params": [model.weight]}]
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    plain = optimizer.state_dict()
    names = ["bias", "weight"]
    named = {
        "state": {name: plain["state"][i] for i, name in enumerate(names)},
        "param_groups": [
            {**g, "params": [names[i] for i in g["params"]]}
            for g in plain["param_groups"]
        ],
    }
    # A value that an optimizer keeps for none of its parameters.
    plain["state"]["shared"] = named["state"]["shared"] = {"count": 3}
    assert differences(numbered_optimizer_state(named), plain) == []


def test_what_is_at_the_target_stays_unless_overwriting_is_asked_for(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "small", {"state_dict": {"w": torch.ones(2)}})
    consolidate(tmp_path / "small", tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        consolidate(saved[0], tmp_path / "out")
    assert list(read_folder(tmp_path / "out", "model")) == ["w"]
    consolidate(saved[0], tmp_path / "out", overwrite=True)
    assert "wide.weight" in read_folder(tmp_path / "out", "model")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "small"]


@pytest.mark.parametrize(
    "inside",
    ["precious", "run_partial.csv", "checkpoint-1/weights", "both", "logs/run"],
)
def test_overwriting_removes_no_folder_that_is_more_than_an_export(
    saved: tuple[Path, Any], tmp_path: Path, inside: str
) -> None:
    """The output folder of a trainer has a model, and all its checkpoints, in it."""
    out = tmp_path / "out"
    if inside == "both":
        consolidate(saved[0], out)
        inside = "checkpoint-1/weights"
    if inside == "logs/run":
        export_checkpoint(saved[0], out, "accelerate")
    file = out / inside
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x")
    for attempt in (
        lambda: consolidate(saved[0], out, overwrite=True),
        lambda: consolidate(saved[0], out, output_format="pt", overwrite=True),
        lambda: export_checkpoint(saved[0], out, "dcp", overwrite=True),
    ):
        with pytest.raises(CheckpointError, match="which overwrite=True"):
            attempt()
    assert file.read_text() == "x"


@pytest.mark.parametrize("kind", ["folder", "dcp", "lightning", "accelerate", "ckpt"])
@pytest.mark.parametrize("exchange", [True, False])
def test_exports_replace_each_other(
    saved: tuple[Path, Any],
    tmp_path: Path,
    kind: str,
    exchange: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not exchange:
        monkeypatch.setattr(full_state, "rename_exchange", lambda first, second: False)
    out = tmp_path / ("out.ckpt" if kind == "ckpt" else "out")
    for _ in range(2):
        if kind in ("folder", "ckpt"):
            consolidate(saved[0], out, overwrite=True)
        else:
            export_checkpoint(saved[0], out, kind, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == [out.name]


def test_what_was_replaced_stays_where_the_new_one_cannot_take_its_place(
    saved: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that cannot exchange names."""

    def fails(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    consolidate(saved[0], tmp_path / "out")
    monkeypatch.setattr(full_state, "rename_exchange", lambda first, second: False)
    monkeypatch.setattr(full_state, "rename_new", fails)
    with pytest.raises(OSError, match="No space left"):
        consolidate(saved[0], tmp_path / "out", overwrite=True)
    assert "wide.weight" in read_folder(tmp_path / "out", "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_names_that_safetensors_files_keep_for_themselves_are_refused(
    tmp_path: Path,
) -> None:
    one = torch.ones(2)
    for name, state in {
        "__metadata__": {"__metadata__": one, "w": torch.zeros(3)},
        "format": {"w": one, "format": one},
    }.items():
        save_checkpoint(tmp_path / name, {"state_dict": state})
        with pytest.raises(CheckpointError, match=f"a tensor is called '{name}'"):
            consolidate(tmp_path / name, tmp_path / "out")
        consolidate(tmp_path / name, tmp_path / f"{name}.pt")
        written = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert differences(written, state) == []


def test_two_tensors_of_one_name_are_not_exported_as_one(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    save_checkpoint(tmp_path / "a", {"model": state})
    for out in ("out", "out.pt", "out.ckpt"):
        with pytest.raises(CheckpointError, match=r"both be called 'a\.b'"):
            consolidate(tmp_path / "a", tmp_path / out)


def test_a_model_is_not_exported_as_what_lies_under_state_dict(tmp_path: Path) -> None:
    state = {"ema": {"w": torch.ones(2)}, "state_dict": {"w": torch.zeros(2)}}
    save_checkpoint(tmp_path / "a", state, metadata={"model_key": "ema"})
    consolidate(tmp_path / "a", tmp_path / "out")
    assert torch.equal(read_folder(tmp_path / "out", "model")["w"], torch.ones(2))
    with pytest.raises(CheckpointError, match="something else under 'state_dict'"):
        consolidate(tmp_path / "a", tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="something else under 'state_dict'"):
        export_checkpoint(tmp_path / "a", tmp_path / "lightning", "lightning")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float33"}, "dtype='float33' is not a torch dtype"),
        ({"dtype": "int8"}, "dtype=int8 would cut off"),
        ({"workers": 0}, "workers=0 must be 1 or more"),
        (
            {"max_shard_size": "big"},
            "max_shard_size='big' is not a size; write e.g. 5GB",
        ),
        (
            {"output_format": "tar"},
            "format='tar' is not known; allowed: auto, safetensors, ckpt, pt",
        ),
    ],
)
def test_wrong_arguments_say_what_is_allowed(
    saved: tuple[Path, Any], tmp_path: Path, arguments: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        consolidate(saved[0], tmp_path / "out", **arguments)


def test_a_damaged_checkpoint_is_not_consolidated(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", {"state_dict": values(1)})
    file = tmp_path / "a" / "tensors-00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"tensors-00000-of-00001\.safetensors is damaged"
    ):
        consolidate(tmp_path / "a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def save_online(path: str) -> Any:
    state = sharded_state(2, seed=1)
    save_full_state(path, {**state, "epoch": 3})
    return gathered(state)


def test_the_online_full_save_is_the_file_that_torch_save_would_make(
    tmp_path: Path,
) -> None:
    expected = run_ranks(save_online, 4, str(tmp_path / "last.ckpt"))[0]
    found = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert found.pop("epoch") == 3
    assert differences(found, expected) == []
    weights = found["state_dict"]
    assert weights["tied.weight"].data_ptr() == weights["wide.weight"].data_ptr()
    with zipfile.ZipFile(tmp_path / "last.ckpt") as archive:
        assert archive.testzip() is None, "the archive's checksums are right"
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def save_online_with_a_broken_disk(path: str) -> str:
    original = TorchFile.fill

    def fill(self: TorchFile, number: int, tensor: torch.Tensor) -> None:
        if number == 2:
            raise OSError(28, "No space left on device")
        original(self, number, tensor)

    TorchFile.fill = fill  # type: ignore[method-assign]
    try:
        save_full_state(path, sharded_state(2, seed=2))
    except CheckpointError as error:
        return str(error)
    finally:
        TorchFile.fill = original  # type: ignore[method-assign]
    return ""


def test_an_online_full_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    torch.save({"old": 1}, tmp_path / "last.ckpt")
    for message in run_ranks(
        save_online_with_a_broken_disk, 2, str(tmp_path / "last.ckpt")
    ):
        assert "No space left" in message
    assert torch.load(tmp_path / "last.ckpt") == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


MEASURE = """
import sys
import torch
from smp_core.checkpoint import consolidate
def memory(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
open("/proc/self/clear_refs", "w").write("5")  # the peak so far (imports) does not count
before = memory("VmRSS")
consolidate(sys.argv[1], sys.argv[2], max_shard_size="100MB", dtype=sys.argv[3] or None)
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "out"), [("", "out"), ("bf16", "out"), ("fp64", "out"), ("", "out.ckpt")]
)
def test_memory_stays_within_two_of_the_largest_tensors_plus_200_mb(
    tmp_path: Path, dtype: str, out: str
) -> None:
    largest = 128 << 20
    state = {f"w{i}": torch.full((largest // 4,), float(i)) for i in range(6)}
    save_checkpoint(tmp_path / "a", {"state_dict": state})
    del state
    command = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path / "a"),
        str(tmp_path / out),
        dtype,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    written = largest * (2 if dtype == "fp64" else 1)
    assert largest < int(done.stdout) <= 2 * written + (200 << 20)
    found = (
        torch.load(tmp_path / out)["state_dict"]
        if "." in out
        else read_folder(tmp_path / out, "model")
    )
    assert torch.equal(found["w5"].float(), torch.full((largest // 4,), 5.0))


def online(rank0_only: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = shard_mesh(2)
    fully_shard(model, mesh=mesh)
    found = full_state_dict(model, rank0_only)
    nested = full_state_dict(
        {
            "a": [
                distribute_tensor(torch.eye(3), mesh, [Shard(1)], src_data_rank=None)
            ],
            "n": 3,
        },
        rank0_only,
    )
    kinds = {type(tensor) for tensor in found.values()}
    return (
        differences(dict(found), expected) if found else None,
        nested,
        DTensor in kinds,
    )


@pytest.mark.parametrize(
    "rank0_only", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_the_online_state_dict_is_whole_on_rank_0_or_on_all(rank0_only: bool) -> None:
    for rank, (wrong, nested, sharded) in enumerate(run_ranks(online, 4, rank0_only)):
        if rank and rank0_only:
            assert wrong is None and nested == {}
        else:
            assert wrong == [] and not sharded
            assert torch.equal(nested["a"][0], torch.eye(3)) and nested["n"] == 3


def column_sharded(path: str) -> None:
    mesh = shard_mesh(2)
    tensor = torch.arange(5 * 7 * 3, dtype=torch.float32).view(5, 7, 3)
    save_checkpoint(
        path,
        {
            "state_dict": {
                "w": distribute_tensor(tensor, mesh, [Shard(1)], src_data_rank=None)
            }
        },
    )


def test_slices_along_any_dimension_come_together(tmp_path: Path) -> None:
    run_ranks(column_sharded, 2, str(tmp_path / "a"))
    consolidate(tmp_path / "a", tmp_path / "out")
    assert torch.equal(
        read_folder(tmp_path / "out", "model")["w"],
        torch.arange(5 * 7 * 3, dtype=torch.float32).view(5, 7, 3),
    )


def test_the_reader_in_the_documentation_reads_every_tensor(
    saved: tuple[Path, Any],
) -> None:
    text = (ROOT / "docs" / "checkpoint-format.md").read_text()
    scope: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], scope)
    path, state = saved
    for name in ("wide.weight", "tied.weight", "counts", "scalar", "empty"):
        found = torch.from_numpy(scope["read"](path, f"state_dict.{name}"))
        assert torch.equal(found, state["state_dict"][name]), name


def open_files(folder: Path) -> list[str]:
    """The files in a folder, removed ones too, that this process holds open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [file for file in found if file.startswith(str(folder))]


def test_a_failed_file_leaves_no_room_taken_on_the_disk(tmp_path: Path) -> None:
    """A removed file that is still open keeps a full disk full: the next save, of any
    size, would fail too."""
    save_checkpoint(tmp_path / "a", {"state_dict": values(1)})
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(TorchFile, "_write_at", side_effect=full):
        # The errors are kept, as a program that goes on may.
        with pytest.raises(CheckpointError) as first:
            save_full_state(tmp_path / "x.ckpt", {"state_dict": values(1)})
        assert "No space left" in str(first.value) and open_files(tmp_path) == []
        with pytest.raises(OSError, match="No space left") as second:
            consolidate(tmp_path / "a", tmp_path / "y.ckpt")
        assert second.value is full and open_files(tmp_path) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
