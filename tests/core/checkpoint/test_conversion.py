"""Checkpoints of other programs come in and go out with every number as it was."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from smp_core.checkpoint import (
    CheckpointError,
    consolidate,
    export_checkpoint,
    import_checkpoint,
    load_checkpoint,
    read_index,
    read_manifest,
    read_rest,
    save_checkpoint,
)
from tests.core.checkpoint.states import differences, rest, values
from tests.harness import run_ranks


def everything(path: Path) -> Any:
    return read_rest(path, tensors=["*"])


def lightning_content(seed: int) -> dict[str, Any]:
    weights = values(seed)
    weights["tied"] = weights["wide.weight"]
    adam = {0: {"exp_avg": torch.randn(7, 5), "step": torch.tensor(2.0)}}
    return {
        "epoch": 1,
        "global_step": 20,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": weights,
        "optimizer_states": [
            {
                "state": adam,
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
            }
        ],
        "hyper_parameters": rest(seed),
    }


def test_a_lightning_ckpt_comes_in_and_goes_out_as_it_was(tmp_path: Path) -> None:
    content = lightning_content(1)
    torch.save(content, tmp_path / "last.ckpt")
    assert (
        import_checkpoint(tmp_path / "last.ckpt", tmp_path / "ours") == "lightning-file"
    )
    assert differences(everything(tmp_path / "ours"), content) == []
    assert read_manifest(tmp_path / "ours").step == 20
    assert read_index(tmp_path / "ours").aliases == {
        "state_dict.tied": "state_dict.wide.weight"
    }
    consolidate(tmp_path / "ours", tmp_path / "again.ckpt", optimizer=True)
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    assert (
        again["state_dict"]["tied"].data_ptr()
        == again["state_dict"]["wide.weight"].data_ptr()
    )
    assert (
        differences(
            {key: again[key] for key in content},
            {**content, "state_dict": again["state_dict"]},
        )
        == []
    )
    assert (
        differences(
            dict(sorted(again["state_dict"].items())),
            dict(sorted(content["state_dict"].items())),
        )
        == []
    )


def test_a_hugging_face_folder_comes_in_with_its_ties_and_files(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in values(2).items()}
    names = list(weights)
    first = {name: weights[name] for name in names[:4]}
    second = {name: weights[name] for name in names[4:]}
    save_file(
        first,
        source / "model-00001-of-00002.safetensors",
        {"format": "pt", "lm_head.weight": "wide.weight"},
    )
    save_file(second, source / "model-00002-of-00002.safetensors", {"format": "pt"})
    weight_map = {n: "model-00001-of-00002.safetensors" for n in first} | {
        n: "model-00002-of-00002.safetensors" for n in second
    }
    (source / "model.safetensors.index.json").write_text(
        f'{{"weight_map": {weight_map!r}}}'.replace("'", '"')
    )
    (source / "config.json").write_text('{"layers": 2}')
    import_checkpoint(
        source, tmp_path / "ours", add_prefix="model.", ties={"other": "half"}
    )
    expected = {f"model.{n}": t for n, t in weights.items()}
    expected["model.lm_head.weight"] = weights["wide.weight"]
    expected["model.other"] = weights["half"]
    found = everything(tmp_path / "ours")["state_dict"]
    assert (
        differences(dict(sorted(found.items())), dict(sorted(expected.items()))) == []
    )
    made = consolidate(tmp_path / "ours", tmp_path / "back")
    assert made == ["config.json", "model.safetensors"]
    with pytest.raises(CheckpointError, match="there is no tensor 'nothing'"):
        import_checkpoint(source, tmp_path / "x", ties={"a": "nothing"})
    with pytest.raises(CheckpointError, match="a tensor 'half' of its own"):
        import_checkpoint(source, tmp_path / "x", ties={"half": "wide.weight"})


def test_a_dcp_folder_comes_in_and_goes_out(tmp_path: Path) -> None:
    state = {
        "model": values(3),
        "optimizer": {
            "state": {"a.b": {"step": torch.tensor(1.0)}},
            "param_groups": [{"lr": 0.1, "params": ["a.b"]}],
        },
        "list": [torch.ones(2), {"x": torch.zeros(1)}],
        # DCP looks into neither of them, unless a list has a tensor itself.
        "nests": {"tuple": (torch.ones(1), {"x": 2}), "lists": [[torch.zeros(1)], [3]]},
        "rest": {"epoch": 3, "betas": (0.9, 0.99)},
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert import_checkpoint(tmp_path / "dcp", tmp_path / "ours") == "dcp"
    assert differences(everything(tmp_path / "ours"), state) == []
    export_checkpoint(tmp_path / "ours", tmp_path / "again", "dcp")
    target = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in values(3).items()},
        "rest": {"epoch": 0},
    }
    dcp.load(target, checkpoint_id=tmp_path / "again", no_dist=True)
    assert differences(target["model"], values(3)) == []
    assert target["rest"]["epoch"] == 3
    import_checkpoint(tmp_path / "again", tmp_path / "back")
    assert differences(everything(tmp_path / "back"), state) == []


def sharded_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def full(state: Any) -> Any:
    from tests.core.checkpoint.states import gathered

    return gathered(state)


def lightning_round_trip(folder: str) -> Any:
    """Save with Lightning's own code, bring in, send out, load with Lightning's own
    code into another model."""
    from lightning.fabric.strategies.model_parallel import (
        _distributed_checkpoint_save,
        _load_checkpoint,
    )

    model, optimizer = sharded_model(1)
    state = {
        "state_dict": get_model_state_dict(model),
        "optimizer_0": get_optimizer_state_dict(model, optimizer),
    }
    source = Path(folder, "lightning")
    source.mkdir(exist_ok=True)
    _distributed_checkpoint_save(state, source)
    rank = torch.distributed.get_rank()
    if rank == 0:
        torch.save({"epoch": 4, "loops": {"a": (1, 2)}}, source / "meta.pt")
        assert import_checkpoint(source, f"{folder}/ours") == "lightning"
        export_checkpoint(f"{folder}/ours", f"{folder}/again", "lightning")
    torch.distributed.barrier()
    ours = {"state_dict": get_model_state_dict(sharded_model(3)[0])}
    load_checkpoint(f"{folder}/ours", ours)
    other, other_optimizer = sharded_model(2)
    meta = _load_checkpoint(
        Path(folder, "again"),
        {"state_dict": other, "optimizer_0": other_optimizer},
        weights_only=True,
    )
    found = {
        "state_dict": get_model_state_dict(other),
        "optimizer_0": get_optimizer_state_dict(other, other_optimizer),
    }
    expected = full(state)
    return (
        meta,
        differences(full(found), expected),
        differences(full(ours)["state_dict"], expected["state_dict"]),
    )


@pytest.mark.slow  # imports the whole framework on every rank
def test_lightnings_sharded_folder_comes_in_and_lightning_loads_ours(
    tmp_path: Path,
) -> None:
    pytest.importorskip("lightning")
    for result in run_ranks(lightning_round_trip, 2, str(tmp_path)):
        assert result == ({"epoch": 4, "loops": {"a": (1, 2)}}, [], [])


def accelerate_round_trip(folder: str) -> Any:
    """The same with Accelerate's own code."""
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType

    plugin: Any = SimpleNamespace(
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        fsdp_version=2,
        state_dict_config=SimpleNamespace(),
    )
    accelerator: Any = SimpleNamespace(
        process_index=torch.distributed.get_rank(),
        is_fsdp2=True,
        wait_for_everyone=torch.distributed.barrier,
    )
    with mock.patch.object(fsdp_utils, "logger", SimpleNamespace(info=lambda *a: None)):
        return accelerate_saves_and_loads(folder, fsdp_utils, plugin, accelerator)


def accelerate_saves_and_loads(
    folder: str, fsdp_utils: Any, plugin: Any, accelerator: Any
) -> Any:
    model, optimizer = sharded_model(1)
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, f"{folder}/accelerate")
    fsdp_utils.save_fsdp_optimizer(
        plugin, accelerator, optimizer, model, f"{folder}/accelerate"
    )
    if torch.distributed.get_rank() == 0:
        assert (
            import_checkpoint(f"{folder}/accelerate", f"{folder}/ours") == "accelerate"
        )
        export_checkpoint(f"{folder}/ours", f"{folder}/again", "accelerate")
    torch.distributed.barrier()
    other, other_optimizer = sharded_model(2)
    fsdp_utils.load_fsdp_model(plugin, accelerator, other, f"{folder}/again")
    fsdp_utils.load_fsdp_optimizer(
        plugin, accelerator, other_optimizer, other, f"{folder}/again"
    )
    expected = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    found = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, other_optimizer),
    }
    return differences(full(found), full(expected))


@pytest.mark.slow  # imports the whole framework on every rank
def test_accelerates_folder_comes_in_and_accelerate_loads_ours(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(accelerate_round_trip, 2, str(tmp_path)) == [[], []]


def test_an_export_finds_the_model_by_its_key_and_names_what_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"net": values(1), "rest": {"epoch": 3}}
    save_checkpoint(tmp_path / "a", state, metadata={"model_key": "net"})
    export_checkpoint(tmp_path / "a", tmp_path / "out", "accelerate")
    assert "not exported (no tensors of the model or optimizer): rest" in caplog.text
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert differences(everything(tmp_path / "back"), {"model": values(1)}) == []


def test_what_cannot_be_imported_is_refused_with_a_reason(tmp_path: Path) -> None:
    cases = {
        "sagemaker": (
            ["model_0_partial/x_smp_rank_0.pt"],
            "layout of SageMaker SMP's partial checkpoints is not publ",
        ),
        "files": (["pytorch_model_fsdp_0_rank0.bin"], "per-rank files"),
        "notes": (["a.txt"], "no checkpoint known here: a.txt"),
    }
    for name, (files, message) in cases.items():
        for file in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text("x")
        with pytest.raises(CheckpointError, match=message):
            import_checkpoint(tmp_path / name, tmp_path / "out")
    save_checkpoint(tmp_path / "ours", {"state_dict": values(1)})
    with pytest.raises(
        CheckpointError,
        match="kind='tar' is not known; allowed: dcp, lightning, accelerate",
    ):
        export_checkpoint(tmp_path / "ours", tmp_path / "out", "tar")
    assert not os.path.exists(tmp_path / "out")


def test_counters_and_the_like_come_out_as_they_were(tmp_path: Path) -> None:
    counted = Counter(a=3, b=2)
    save_checkpoint(tmp_path / "a", {"state_dict": values(1), "seen": counted})
    export_checkpoint(tmp_path / "a", tmp_path / "out", "lightning")
    assert torch.load(tmp_path / "out" / "meta.pt")["seen"] == counted
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert everything(tmp_path / "back")["seen"] == counted


class Sized:
    """A pickle that calls a class with a number."""

    def __init__(self, made: Any, *arguments: Any) -> None:
        self.made, self.arguments = made, arguments

    def __reduce__(self) -> Any:
        return self.made, self.arguments


@pytest.mark.parametrize(
    "value",
    [
        Sized(bytearray, 1 << 20),
        Sized(torch.FloatTensor, 1 << 20),
        Sized(torch.Tensor, 1 << 20),
        torch.zeros(1).expand(1 << 40),
    ],
    ids=["bytearray", "FloatTensor", "Tensor", "expanded"],
)
@pytest.mark.parametrize("where", ["file", "DCP folder"])
def test_a_small_file_cannot_ask_for_large_memory(
    tmp_path: Path, value: Any, where: str
) -> None:
    content = {"state_dict": {"w": torch.zeros(2)}, "more": value}
    if where == "file":
        torch.save(content, tmp_path / "source")
    else:

        class Planner(dcp.DefaultSavePlanner):
            def transform_object(self, write_item: Any, object: Any) -> Any:
                if isinstance(object, torch.Tensor):
                    return object
                buffer = io.BytesIO()
                torch.save(value, buffer)
                return buffer

        content["more"] = "a text"
        dcp.save(
            content,
            checkpoint_id=tmp_path / "source",
            planner=Planner(),
            no_dist=True,
        )
    with pytest.raises(CheckpointError, match="not read"):
        import_checkpoint(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_expanded_tensor_of_ordinary_size_comes_in(tmp_path: Path) -> None:
    torch.save({"mask": torch.arange(8.0).expand(4, 8)}, tmp_path / "a.ckpt")
    import_checkpoint(tmp_path / "a.ckpt", tmp_path / "out")
    found = everything(tmp_path / "out")["state_dict"]["mask"]
    assert torch.equal(found, torch.arange(8.0).expand(4, 8))


@pytest.mark.parametrize("kind", ["dcp", "lightning", "accelerate"])
def test_an_export_never_takes_the_place_of_its_source(
    tmp_path: Path, kind: str
) -> None:
    source = tmp_path / "run" / "step"
    save_checkpoint(source, {"state_dict": values(1)})
    for out in (source, tmp_path / "run", tmp_path / "run" / "x" / ".."):
        with pytest.raises(CheckpointError, match="would be lost; choose another path"):
            export_checkpoint(source, out, kind, overwrite=True)
        with pytest.raises(CheckpointError, match="would be lost; choose another path"):
            consolidate(source, out, overwrite=True)
    export_checkpoint(source, source / "inside", kind)
    assert differences(everything(source), {"state_dict": values(1)}) == []


def test_a_hugging_face_index_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(2)}, folder / "model-2.safetensors")

    def listed(**places: str) -> None:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": places})
        )

    listed(a="model-1.safetensors", b="model-1.safetensors", c="model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors that are not in .* c: index"):
        import_checkpoint(folder, tmp_path / "out")
    # An older copy lies in a file that another tensor needs.
    for place, value in (("1", 0.0), ("2", 1.0)):
        listed(
            a="model-1.safetensors",
            b=f"model-{place}.safetensors",
        )
        import_checkpoint(folder, tmp_path / "out", overwrite=True)
        found = everything(tmp_path / "out")["state_dict"]
        assert torch.equal(found["b"], torch.full((2,), value))
    # Transformers reads this file where both are there.
    save_file({"a": torch.full((2,), 3.0)}, folder / "model.safetensors")
    import_checkpoint(folder, tmp_path / "out", overwrite=True)
    assert list(everything(tmp_path / "out")["state_dict"]) == ["a"]
