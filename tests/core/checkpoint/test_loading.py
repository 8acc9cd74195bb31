"""What fits is loaded in place; what does not fit is refused with the names, the shapes
and what to do."""

from __future__ import annotations

import enum
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from smp_core.checkpoint import (
    CheckpointError,
    full_state_dict,
    load_checkpoint,
    load_named_optimizer_state,
    named_optimizer_state,
    read_index,
    read_rest,
    read_tensors,
    reader,
    save_checkpoint,
)
from tests.core.checkpoint.states import (
    differences,
    rest,
    shard_mesh,
    sharded_state,
    values,
)
from tests.harness import run_ranks


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(
        tmp_path / "a",
        {"state_dict": values(1), "optimizer": {"state": {}}, "rest": rest(1)},
    )
    return tmp_path / "a"


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in values(1).items()}


def test_tensors_are_filled_in_place(saved: Path) -> None:
    weights = zeros()
    weights["transposed"] = torch.zeros(4, 6).t()  # filled through its strides
    before = {name: tensor.data_ptr() for name, tensor in weights.items()}
    load_checkpoint(saved, {"state_dict": weights})
    assert differences(weights, values(1)) == []
    assert {name: tensor.data_ptr() for name, tensor in weights.items()} == before


def test_missing_and_unexpected_tensors_are_named_and_only_strict_false_passes(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = zeros()
    del weights["half"]
    weights["new.weight"] = torch.full((2,), 7.0)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved, {"state_dict": weights})
    assert "not in the checkpoint: state_dict.new.weight" in str(caught.value)
    assert "in the checkpoint but not in the model: state_dict.half" in str(
        caught.value
    )
    assert torch.equal(weights["counts"], torch.zeros(9, dtype=torch.int64)), (
        "nothing is loaded when refused"
    )
    load_checkpoint(saved, {"state_dict": weights}, strict=False)
    assert torch.equal(weights["new.weight"], torch.full((2,), 7.0))
    assert torch.equal(weights["counts"], values(1)["counts"])
    assert "state_dict.new.weight" in caplog.text and "state_dict.half" in caplog.text


def test_another_architecture_is_refused_with_both_shapes(saved: Path) -> None:
    weights = zeros() | {"wide.weight": torch.zeros(7, 6)}
    with pytest.raises(
        CheckpointError, match=r"wide\.weight: checkpoint \[7, 5\], model \[7, 6\]"
    ):
        load_checkpoint(saved, {"state_dict": weights}, strict=False)


def test_another_dtype_is_refused_unless_asked_for(saved: Path) -> None:
    weights = zeros() | {"wide.weight": torch.zeros(7, 5, dtype=torch.bfloat16)}
    with pytest.raises(
        CheckpointError,
        match=r"torch.float32, model torch.bfloat16.*|allow_dtype_cast=True",
    ):
        load_checkpoint(saved, {"state_dict": weights})
    load_checkpoint(saved, {"state_dict": weights}, allow_dtype_cast=True)
    assert torch.equal(weights["wide.weight"], values(1)["wide.weight"].bfloat16())


def test_parts_load_by_top_level_key_and_by_glob(saved: Path) -> None:
    weights = zeros()
    load_checkpoint(
        saved,
        {"state_dict": weights, "rest": {"epoch": 9}},
        only=["*.weight", "state_dict.half"],
    )
    loaded = {
        name
        for name, tensor in weights.items()
        if tensor.numel() and torch.equal(tensor, values(1)[name])
    }
    assert loaded == {"wide.weight", "head.weight", "half"}
    del weights["half"]
    with pytest.raises(
        CheckpointError,
        match=r"in the checkpoint but not in the model: state_dict\.half",
    ):
        load_checkpoint(saved, {"state_dict": weights}, only=["state_dict.half"])
    assert differences(read_rest(saved, "rest"), rest(1)) == []
    assert read_rest(saved, ("rest", "by_number", 1, "b")) == (1, 2)
    assert list(read_tensors(saved, "state_dict.*.weight")) == [
        "state_dict.wide.weight",
        "state_dict.head.weight",
    ]
    with pytest.raises(CheckpointError, match=r"no tensor fits 'model\.\*'"):
        read_tensors(saved, "model.*")
    with pytest.raises(CheckpointError, match="has no 'loops'"):
        read_rest(saved, "loops")


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        -0.0,
        2**70,
        1e-320,
        "\ud800 lone surrogate and \u2028",
        {1.5: "float key", (1, "a"): "tuple key", None: 0, True: 1},
        OrderedDict({3: [()], "$pt": "0"}),
        frozenset({(1, 2)}),
        [torch.float8_e4m3fn, torch.Size([]), 3 + 4j, bytearray(b"x")],
        np.float32(0.1),
        np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
        ([], {}, (), [[[]]]),
        {"data": [Path("/data/train"), Path()]},
    ],
    ids=repr,
)
def test_values_keep_their_type_and_their_last_bit(tmp_path: Path, value: Any) -> None:
    save_checkpoint(tmp_path / "a", {"value": value})
    found = read_rest(tmp_path / "a", "value")
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype and np.array_equal(found, value)
    elif value != value:
        assert found != found
    else:
        assert type(found) is type(value) and repr(found) == repr(value)


@pytest.mark.parametrize(
    "value",
    [Colour.RED, PurePath("x"), lambda: 0, object()],
    ids=["enum", "path", "lambda", "object"],
)
def test_values_that_would_need_unpickling_are_refused_by_name(
    tmp_path: Path, value: Any
) -> None:
    with pytest.raises(CheckpointError, match=r"loops\.fit\.0 \("):
        save_checkpoint(tmp_path / "a", {"loops": {"fit": [value]}})


def test_names_that_would_collide_stay_apart(tmp_path: Path) -> None:
    state = {
        "a": {"b.c": torch.tensor(1.0)},
        "a.b": {"c": torch.tensor(2.0)},
        "n": {0: torch.ones(1), "0": torch.zeros(1)},
    }
    save_checkpoint(tmp_path / "a", state)
    found = read_rest(tmp_path / "a", tensors=["*"])
    assert differences(found, state) == []


def test_values_beside_a_tensor_are_found_by_keys_of_any_kind(tmp_path: Path) -> None:
    # Beside a tensor each value is looked up by its path, not replaced with its dict.
    saved = {"w": torch.ones(2), (1, ("a",)): 5, None: 3, 1.5: 2, True: 7}
    template = dict.fromkeys(saved, 0) | {"w": torch.zeros(2)}
    save_checkpoint(tmp_path / "a", {"state": saved})
    load_checkpoint(tmp_path / "a", {"state": template})
    assert differences(template, saved) == []


def test_values_beside_a_tensor_in_a_tuple_are_loaded_too(tmp_path: Path) -> None:
    saved = {"pair": (torch.ones(2), 5, ("x", torch.zeros(1)))}
    save_checkpoint(tmp_path / "a", {"state": saved})
    first = torch.zeros(2)
    template = {"pair": (first, 0, ("", torch.ones(1)))}
    load_checkpoint(tmp_path / "a", {"state": template})
    assert differences(template, saved) == []
    assert template["pair"][0] is first, "tensors are filled in place"


def test_a_number_stays_where_a_tensor_was_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path / "a", {"state": {"step": torch.ones(()), "w": zeros()}})
    template = {"state": {"step": 7, "w": zeros()}}
    load_checkpoint(tmp_path / "a", template, strict=False)
    assert template["state"]["step"] == 7
    assert "in the checkpoint only, not used: state.step" in caplog.text


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as packages for quantised weights have them;
    ``unwraps``: operations give plain tensors."""

    unwraps = True

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inner = [each.inner if isinstance(each, cls) else each for each in args]
        result = function(*inner, **(kwargs or {}))
        stays = not cls.unwraps and isinstance(result, torch.Tensor)
        return cls(result) if stays else result


class Opaque(Wrapper):
    unwraps = False


def test_tensors_that_wrap_others_are_not_taken_for_ties(tmp_path: Path) -> None:
    # All of them are at address 0.
    state = {"a": Wrapper(torch.ones(3)), "b": Wrapper(torch.zeros(3))}
    save_checkpoint(tmp_path / "a", state)
    expected = {"a": torch.ones(3), "b": torch.zeros(3)}
    assert differences(read_tensors(tmp_path / "a"), expected) == []
    assert differences(full_state_dict(state), expected) == []
    with pytest.raises(CheckpointError, match=r"a Opaque of shape \[3\] has no bytes"):
        save_checkpoint(tmp_path / "b", {"a": Opaque(torch.ones(3))})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(3).to_sparse(), r"call \.to_dense"),
        (torch.empty(2, device="meta"), "meta device"),
    ],
)
def test_tensors_without_plain_values_are_refused(
    tmp_path: Path, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"model.w .*{message}"):
        save_checkpoint(tmp_path / "a", {"model": {"w": tensor}})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.complex128,
        torch.complex64,
        torch.float8_e4m3fnuz,
        torch.uint16,
        torch.bool,
        torch.float64,
    ],
)
def test_dtypes_that_safetensors_lacks_come_back_too(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    bits = (
        torch.arange(64)
        .bitwise_and(1 if dtype == torch.bool else 255)
        .to(torch.uint8)
        .view(4, 16)
    )
    tensor = bits.view(dtype)
    save_checkpoint(tmp_path / "a", {"w": tensor})
    found = read_tensors(tmp_path / "a")["w"]
    assert found.dtype == dtype and torch.equal(
        found.view(torch.uint8), tensor.view(torch.uint8)
    )


def training(shard_degree: int, path: str, resume: bool) -> list[float]:
    """Two AdamW steps, a checkpoint, two more; or the last two from the checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    frozen = model[0].bias
    frozen.requires_grad_(False)
    fully_shard(model, mesh=shard_mesh(shard_degree))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, amsgrad=True
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    inputs = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)
    losses = []

    def step() -> None:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())

    if resume:
        state = {
            "state_dict": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        load_checkpoint(path, state)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        scheduler.load_state_dict(read_rest(path, "scheduler"))
    else:
        for _ in range(2):
            step()
        state = {
            "state_dict": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        save_checkpoint(path, {**state, "scheduler": scheduler.state_dict()})
        losses.clear()
    for _ in range(2):
        step()
    return losses


@pytest.mark.parametrize(
    ("world", "degree"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_training_goes_on_as_if_it_had_not_stopped_on_other_ranks(
    tmp_path: Path, world: int, degree: int
) -> None:
    expected = run_ranks(training, 4, 4, str(tmp_path / "a"), False)[0]
    found = run_ranks(training, world, degree, str(tmp_path / "a"), True)[0]
    # float64; the order of the sums differs between shard degrees by a few units in the
    # last place.
    assert found == pytest.approx(expected, rel=1e-13)


def load_with_one_rank_wrong(path: str) -> str:
    state = sharded_state(2, seed=-1)
    if dist.get_rank() == 1:
        state["state_dict"]["scalar"] = torch.zeros(3)
    try:
        load_checkpoint(path, state)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def save_partial_sum(path: str) -> str:
    mesh = shard_mesh(2)
    state = {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}
    try:
        save_checkpoint(path, state)
    except CheckpointError as error:
        return str(error)
    return "saved"


def save_sharded(path: str) -> None:
    save_checkpoint(path, sharded_state(2, seed=1))


def test_ctrl_c_while_tensors_are_read_stays_what_it_is(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reader.SmpStorageReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(saved, {"state_dict": zeros()})


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    run_ranks(save_sharded, 2, str(tmp_path / "a"))
    for message in run_ranks(load_with_one_rank_wrong, 2, str(tmp_path / "a")):
        assert "rank 1: 1 tensors of another shape" in message
    for message in run_ranks(save_partial_sum, 2, str(tmp_path / "b")):
        assert "w is a partial sum over its mesh" in message


def test_the_index_says_which_parameter_an_optimizer_state_belongs_to(
    tmp_path: Path,
) -> None:
    run_ranks(save_sharded, 2, str(tmp_path / "a"))
    index = read_index(tmp_path / "a").to_json()
    entry = index["tensors"]["optimizer_states.0.state.norm.bias.exp_avg"]
    assert entry["optimizer_state"] == {"parameter": "norm.bias", "name": "exp_avg"}
    assert [chunk["offset"] for chunk in entry["chunks"]] == [[0], [3]]


def two_groups(model: nn.Module, first: str) -> torch.optim.Optimizer:
    """An optimizer that decays weights only, whose groups stand in either order."""
    kinds = {
        "weights": [p for p in model.parameters() if p.ndim > 1],
        "biases": [p for p in model.parameters() if p.ndim == 1],
    }
    groups = [
        {"params": kinds[kind], "weight_decay": 0.1 if kind == "weights" else 0.0}
        for kind in sorted(kinds, key=lambda kind: kind != first)
    ]
    return torch.optim.AdamW(groups, lr=0.1)


def test_groups_of_other_parameters_do_not_take_each_other_s_values(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    state = named_optimizer_state(model, two_groups(model, "weights"))
    save_checkpoint(tmp_path / "a", {"optimizer": state})
    same, swapped = two_groups(model, "weights"), two_groups(model, "biases")
    load_named_optimizer_state(tmp_path / "a", ("optimizer",), model, same)
    assert [group["weight_decay"] for group in same.param_groups] == [0.1, 0.0]
    with pytest.raises(
        CheckpointError, match=r"group 0 .*0\.weight.* here .*0\.bias.*as it was"
    ):
        load_named_optimizer_state(tmp_path / "a", ("optimizer",), model, swapped)
    assert [group["weight_decay"] for group in swapped.param_groups] == [0.0, 0.1]


def load_into_meta(path: str) -> str:
    weights = {name: tensor.to("meta") for name, tensor in zeros().items()}
    try:
        load_checkpoint(path, {"state_dict": weights})
    except CheckpointError as error:
        return str(error)
    return ""


def test_tensors_without_memory_are_not_taken_for_loaded(saved: Path) -> None:
    for message in (load_into_meta(str(saved)), *run_ranks(load_into_meta, 2, saved)):
        assert "on the meta device (call to_empty first): state_dict." in message
