"""Delayed initialisation calls the model's own initialisers, names what none of them
fills, and needs little memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.sharding.weights.delayed_init import materialize
from tests.core.sharding.delayed_init_runs import (
    CPU,
    UNITS,
    Everything,
    digest,
    full_state,
    gpt2,
    materialized,
    on_meta,
    shard,
    tiny,
)
from tests.harness import run_ranks
from tests.older_transformers import needs_buffers_filled


def test_recurrent_module_runs_on_its_new_weights() -> None:
    lstm = materialized(lambda: nn.LSTM(4, 4))
    x = torch.ones(2, 1, 4)
    expected = torch.nn.LSTM(4, 4)
    expected.load_state_dict(lstm.state_dict())
    assert torch.equal(lstm(x)[0], expected(x)[0])


@needs_buffers_filled
def test_user_init_fn_has_the_last_word_and_leaves_the_rest_to_the_model() -> None:
    def init_fn(module: nn.Module) -> None:
        if type(module).__name__ == "Conv1D" and module.weight.shape[0] == 64:
            nn.init.constant_(module.weight, 3.0)

    block = materialized(tiny("gpt2"), seed=0, init_fn=init_fn).transformer.h[0]
    own = materialized(tiny("gpt2"), seed=0).transformer.h[0]
    assert (block.attn.c_proj.weight == 3).all(), (
        "the model's rescaling must not come after init_fn"
    )
    assert not block.attn.c_proj.bias.any()
    assert torch.equal(block.mlp.c_proj.weight, own.mlp.c_proj.weight)


def exact_class_init(module: nn.Module) -> None:
    if type(module) is nn.BatchNorm1d:
        nn.init.constant_(module.weight, 2.0)


def sharded_exact_class() -> torch.Tensor:
    model = on_meta(Everything)
    shard(model, 2, ("BatchNorm1d",))
    materialize(model, CPU, seed=0, init_fn=exact_class_init)
    assert type(model.norm).__name__ == "FSDPBatchNorm1d"
    return full_state(model)["norm.weight"]


def test_initialisers_see_the_class_a_unit_had_before_it_was_sharded() -> None:
    for weight in run_ranks(sharded_exact_class, 2):
        assert torch.equal(weight, torch.full((6,), 2.0))


def test_real_modules_keep_their_values() -> None:
    torch.manual_seed(0)
    backbone = gpt2()
    expected = digest(backbone)

    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone
            with torch.device("meta"):
                self.head = nn.Linear(32, 2)

        def _init_weights(self, module: nn.Module) -> None:
            for parameter in module.parameters():
                nn.init.ones_(parameter)

    model = WithHead()
    materialize(model, CPU, seed=0)
    assert digest(backbone) == expected
    assert (model.head.weight == 1).all()


class Forgetful(nn.Module):
    def __init__(self, forgotten: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if forgotten == "parameter":
            self.token = nn.Parameter(torch.zeros(1, 1, 2))
        elif forgotten == "buffer":
            self.register_buffer("positions", torch.arange(5), persistent=False)
        elif forgotten == "attribute":
            self.table = [torch.arange(5)]


class HalfFilled(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.weight[0])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Forgetful("parameter"), r"parameter 'token' of Forgetful"),
        (
            lambda: nn.Sequential(Forgetful("buffer")),
            r"buffer '0\.positions' of Forgetful",
        ),
        (lambda: Forgetful("attribute"), r"tensor attribute 'table'"),
        (lambda: HalfFilled(2, 2), r"parameter 'weight' of HalfFilled"),
    ],
)
def test_what_no_initialiser_fills_is_named_with_the_fix(
    make: Callable[[], nn.Module], named: str
) -> None:
    with pytest.raises(
        ValueError, match=named + r".*reset_parameters\(\).*init_fn.*delayed_init=False"
    ):
        materialized(make)


def test_init_fn_fills_what_the_class_does_not() -> None:
    def init_fn(module: nn.Module) -> None:
        if isinstance(module, Forgetful):
            nn.init.ones_(module.token)

    model = materialized(lambda: Forgetful("parameter"), init_fn=init_fn)
    assert (model.token == 1).all() and not any(
        tensor.is_meta for tensor in (*model.parameters(), *model.buffers())
    )


def test_failing_initialiser_is_named() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if self.weight.is_meta:
                return
            raise KeyError("no such scheme")

    with pytest.raises(
        RuntimeError,
        match=r"reset_parameters\(\) failed on module '1' \(Broken\).*no such scheme",
    ):
        materialized(lambda: nn.Sequential(nn.Linear(2, 2), Broken(2, 2)))


def test_initialisers_called_by_constructors_only_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class SelfMade(nn.Linear):
        def init_weights(self) -> None:
            nn.init.zeros_(self.weight)

    with caplog.at_level(logging.WARNING, logger="smp"):
        materialized(lambda: SelfMade(2, 2))
    assert "SelfMade.init_weights()" in caplog.text


class Rescaled(nn.Module):
    """As nanoGPT is written: what the constructor does last counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, padding_idx=0)
        self.project, self.out, self.twice = nn.Linear(4, 4), nn.Linear(4, 4), Twice()
        self.apply(self._init_weights)
        nn.init.normal_(self.out.weight, std=0.002)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for gate in self.gates:
            nn.init.zeros_(gate.weight)


class Twice(nn.Linear):
    """Calls its initialiser once more than torch's class does by itself."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.reset_parameters()


def layers_of_torch() -> nn.Module:
    return nn.Sequential(
        nn.Transformer(4, 2, 1, 1, 8),
        nn.LSTM(4, 4, bidirectional=True),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3)),
        nn.BatchNorm1d(4),
    )


def warnings_of_delayed(make: Callable[[], nn.Module], init_fn: Any = None) -> str:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("smp")
    logger.addHandler(handler)
    try:
        parallelize(on_meta(make), SmpConfig(delayed_init=True), init_fn=init_fn)
    except ValueError as error:
        # Weight norm on meta has no initialiser.
        assert "no initialiser fills" in str(error)
    finally:
        logger.removeHandler(handler)
    return "\n".join(line for line in records if "a constructor wrote into" in line)


def test_what_a_constructor_wrote_last_is_named_where_it_is_lost() -> None:
    wrote = "a constructor wrote into %s after reset_parameters()"
    assert wrote % "out.weight" in run_ranks(warnings_of_delayed, 1, Rescaled)[0]
    gates = "gates.0.weight, gates.1.weight"
    assert wrote % gates in run_ranks(warnings_of_delayed, 1, Gated)[0]
    assert run_ranks(warnings_of_delayed, 1, Rescaled, nn.Module.train) == [""]
    for make in (Everything, gpt2, layers_of_torch):
        assert run_ranks(warnings_of_delayed, 1, make) == [""]


class LiveBytes(TorchDispatchMode):
    """Bytes in storages that are alive on the CPU, and their peak, among those made
    while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # First, for what is made now may have got the address of what is gone.
        self.live = {
            key: entry for key, entry in self.live.items() if not entry[0].expired()
        }
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.live.setdefault(
                    storage._cdata, (StorageWeakRef(storage), storage.nbytes())
                )
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return out


def big_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_embd": 64,
        "n_layer": 6,
        "n_head": 2,
        "vocab_size": 256,
        "n_positions": 64,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def zero_first_row(module: nn.Module) -> None:
    """Leaves the other rows out, so that every module takes a second attempt."""
    if isinstance(getattr(module, "weight", None), nn.Parameter):
        nn.init.zeros_(module.weight[0])


def peak_of_materialisation(
    init_fn: Callable[[nn.Module], None] | None,
) -> tuple[int, int]:
    model = on_meta(big_gpt2)
    shard(model, dist.get_world_size(), UNITS)
    with LiveBytes() as live:
        materialize(model, CPU, seed=0, init_fn=init_fn)
    own = sum(
        (t.to_local() if isinstance(t, DTensor) else t).nbytes
        for t in [*model.parameters(), *model.buffers()]
    )
    return live.peak, own


@pytest.mark.parametrize(
    "init_fn", [pytest.param(None, marks=pytest.mark.slow), zero_first_row]
)
@needs_buffers_filled
def test_peak_host_memory_is_the_own_shards_and_one_module(
    init_fn: Callable[[nn.Module], None] | None,
) -> None:
    model = on_meta(big_gpt2)
    total = sum(p.nbytes for p in model.parameters())
    largest = max(
        sum(p.nbytes for p in m.parameters(recurse=False)) for m in model.modules()
    )
    for peak, own in run_ranks(peak_of_materialisation, 4, init_fn):
        assert own == pytest.approx(total / 4, rel=0.01)
        # 16 KiB: generator states and scalars.
        assert largest < peak <= own + largest + 2**14
        assert own + largest + 2**14 < 0.5 * total, (
            "the bound must tell one module from the model"
        )
