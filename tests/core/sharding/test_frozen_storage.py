"""Frozen weights that are stored and gathered as codes: training beside them has the
numbers of one process with the decoded base, at every degree and through every
checkpoint, and takes the memory and bytes that docs/low-bit-bases.md says."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smp_core.checkpoint import (
    full_state_dict,
    load_checkpoint,
    load_named_optimizer_state,
    named_optimizer_state,
    save_checkpoint,
    save_full_state,
)
from smp_core.codecs import RowCodec
from smp_core.config import SmpConfig
from smp_core.engine.averaging import ShardedAverage
from smp_core.entry import parallelize
from smp_core.plan import estimate, unit_bytes
from smp_core.topology import Topology
from tests.core.sharding.frozen_runs import (
    Net,
    adapters_of,
    alone,
    batch,
    codes_of,
    frozen,
    furthest,
    is_coded,
    net,
    on_shards,
    parallel_net,
    train,
    with_decoded_base,
)
from tests.harness import run_ranks

WORLD = 4
DEGREES = (1, 2, 4)
# Sums of float64 gradients in another order.
EXACT = 1e-12
KNOBS: list[dict[str, Any]] = [
    {"reshard_after_forward": False},
    {"reshard_after_forward": "node"},
    {"keep_between_micro_batches": "parameters"},
    {"optimizer_shard": "world"},
    {"state_offload": "optimizer"},
    {"state_offload": "all"},
    {"activations": "full"},
    {"compile": True},
]


def at_degrees(
    names: list[str], degrees: list[int], variants: list[dict[str, Any]]
) -> list[float]:
    found = []
    for name in names:
        expected = alone(name, WORLD, 3)
        for degree in degrees:
            for knobs in variants:
                parallel = on_shards(
                    range(3), frozen_storage=name, shard_degree=degree, **knobs
                )
                found.append(furthest(parallel, expected))
    return found


@pytest.mark.parametrize("name", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_every_degree_trains_like_one_process_with_the_decoded_base(name: str) -> None:
    for seen in run_ranks(
        at_degrees, WORLD, [name], list(DEGREES), [{}], ranks_per_node=2
    ):
        assert len(seen) == 3 and max(seen) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_other_knobs_train_like_one_process_with_the_decoded_base(
    knobs: dict[str, Any],
) -> None:
    for seen in run_ranks(
        at_degrees, WORLD, ["int4"], list(DEGREES), [knobs], ranks_per_node=2
    ):
        assert max(seen) <= EXACT


def half_precision() -> list[bool]:
    """Adapters of bfloat16 at two degrees, and in float32 of one process."""
    found = []
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 1e-6)):
        expected = alone("int8", WORLD, 3, dtype)
        parallel = on_shards(range(3), dtype, frozen_storage="int8", shard_degree=2)
        found.append(furthest(parallel, expected) <= tolerance)
    return found


def test_other_dtypes_train_like_one_process() -> None:
    """To rounding: 1e-6 in float32; in bfloat16, where a step of 1e-2 is a few of its
    last digits, two steps' worth."""
    assert run_ranks(half_precision, WORLD, ranks_per_node=2) == [[True, True]] * WORLD


# Memory and bytes


class Wide(nn.Module):
    """Nearly all of it is a frozen base."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.scale[0]).square().mean()


ELEMENTS = 4 * 512 * 512
# As docs/low-bit-bases.md says; float32 has 4.
BYTES = {"int8": 1.01, "int4": 0.53}


def figures(name: str) -> list[float]:
    """Bytes an element that a rank stores, and sends in a forward, and what is planned
    of both."""
    knobs = {
        "units": ["Sequential"],
        "shard_degree": 2,
        "reshard_after_forward": False,
        "frozen_storage": name,
    }
    parallel = parallelize(Wide(), SmpConfig(**knobs), topology=Topology.discover())
    parallel.module(torch.randn(2, 512)).backward()
    parallel.meter.close_step()
    counted = parallel.meter.per_step()
    sent = counted.get("all_gather/intra_bytes", 0.0) + counted.get(
        "all_gather/inter_bytes", 0.0
    )
    stored = sum(
        each.untyped_storage().nbytes() for each in codes_of(parallel.module).values()
    )
    planned = [estimate(parallel.plan).parameters]
    planned.append(
        sum(
            unit_bytes(parallel.plan, unit, "gathered")
            for unit in parallel.plan.shapes.units.units
        )
        // 2
    )
    return [2 * each / ELEMENTS for each in (stored, sent, *planned)]


@pytest.mark.parametrize("name", BYTES)
def test_a_base_takes_and_sends_the_bytes_that_are_stated(name: str) -> None:
    for seen in run_ranks(figures, 2, name):
        assert seen == pytest.approx([BYTES[name]] * 4, rel=0.03)


def beside_decoded(name: str, checkpoint: str) -> list[float]:
    """Bytes an element between forward and backward, of gathered codes and of decoded
    weights, in two steps."""
    asked = {
        "units": ["Sequential"],
        "reshard_after_forward": False,
        "activations": checkpoint,
    }
    parallel = parallelize(
        Wide(),
        SmpConfig(shard_degree=2, frozen_storage=name, **asked),
        topology=Topology.discover(),
    )
    members = [
        member
        for unit in parallel.units
        if unit.group is not None
        for member in unit.group.members
    ]

    def held() -> list[float]:
        codes = sum(
            each.untyped_storage().nbytes()
            for member in members
            for each in member.all_gather_outputs
        )
        return [
            each / ELEMENTS
            for each in (codes, sum(unit.gathered_bytes() for unit in parallel.units))
        ]

    found = []
    for _ in range(2):  # the first gather makes what later ones fill
        loss = parallel.module(torch.randn(2, 512))
        found += held()
        loss.backward()
    return found


@pytest.mark.parametrize(
    "checkpoint", ["none", pytest.param("full", marks=pytest.mark.slow)]
)
def test_gathered_codes_do_not_stay_beside_decoded_weights(checkpoint: str) -> None:
    """But for the trained scale's few bytes."""
    for seen in run_ranks(beside_decoded, 2, "int8", checkpoint):
        assert seen == pytest.approx([0.0, 4.0] * 2, abs=1e-3)


# Checkpoints


def through_checkpoints(folder: Path, name: str, dtype: torch.dtype) -> list[str]:
    wrong = []
    for before, after in ((4, 2), (1, 4), (2, 1)):
        path = folder / f"{before}-{after}"
        first = parallel_net(0, dtype, frozen_storage=name, shard_degree=before)
        optimizer = adapters_of(first.module)
        first.prepare_optimizer(optimizer)
        train(first.module, optimizer, [dist.get_rank()], range(2))
        states = named_optimizer_state(first.module, optimizer)
        save_checkpoint(path, {"model": first.model_state(), "optimizer": states})
        train(first.module, optimizer, [dist.get_rank()], range(2, 4))

        second = parallel_net(1, dtype, frozen_storage=name, shard_degree=after)
        resumed = adapters_of(second.module)
        second.prepare_optimizer(resumed)
        model = second.model_state()
        load_checkpoint(path, {"model": model})
        second.take_model_state(model)
        load_named_optimizer_state(path, ("optimizer",), second.module, resumed)
        train(second.module, resumed, [dist.get_rank()], range(2, 4))
        expected = {key: whole(value) for key, value in first.module.named_parameters()}
        for key, value in second.module.named_parameters():
            # The base bit by bit; adapters to sums in another order.
            is_exact = not value.requires_grad
            off = (whole(value) - expected[key]).abs().max().item()
            if off > (
                0 if is_exact else {torch.float64: EXACT, torch.bfloat16: 0.02}[dtype]
            ):
                wrong.append(f"{before} -> {after}: {key} by {off}")
    return wrong


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = (
        tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    )
    return found.detach()


@pytest.mark.slow  # in the normal run: tests/lightning/test_frozen_storage.py
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("int8", torch.float64), ("int4", torch.bfloat16)],
    ids=["int8-float64", "int4-bfloat16"],
)
def test_a_checkpoint_goes_on_at_another_degree_with_the_same_base(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    assert (
        run_ranks(through_checkpoints, WORLD, tmp_path, name, dtype, ranks_per_node=2)
        == [[]] * WORLD
    )


def decoded_out(folder: Path) -> list[str]:
    """Whole state dicts, files and folders hold decoded weights, for models with codes
    and without."""
    wrong = []
    expected = with_decoded_base(net(), "int8").state_dict()
    coded = parallel_net(frozen_storage="int8", shard_degree=2)
    full = full_state_dict(coded.model_state(), rank0_only=False)
    save_full_state(folder / "whole.pt", {"model": coded.model_state()})
    save_checkpoint(folder / "sharded", {"model": coded.model_state()})

    plain = parallel_net(1, shard_degree=4)
    load_checkpoint(folder / "sharded", {"model": plain.model_state()})
    again = parallel_net(1, frozen_storage="int8", shard_degree=4)
    again.module.load_state_dict(full)
    seen = {
        "dict": full,
        "file": torch.load(folder / "whole.pt", weights_only=True)["model"],
        "folder, without codes": {
            key: whole(value) for key, value in plain.model_state().items()
        },
        "loaded": {key: whole(value) for key, value in again.model_state().items()},
    }
    for what, state in seen.items():
        if state.keys() != expected.keys():
            wrong.append(f"{what}: {sorted(state.keys() ^ expected.keys())}")
        wrong += [
            f"{what}: {key}"
            for key in expected
            if not torch.equal(state[key], expected[key])
        ]
    other = codes_of(again.module)
    wrong += (
        []
        if other.keys() == codes_of(coded.module).keys()
        else ["what was loaded is no code any more"]
    )
    return wrong


def test_state_dicts_and_files_hold_decoded_weights(tmp_path: Path) -> None:
    assert run_ranks(decoded_out, WORLD, tmp_path, ranks_per_node=2) == [[]] * WORLD


def moved_and_pickled() -> list[bool]:
    parallel = parallel_net(frozen_storage="int8", shard_degree=2)
    before = {
        name: local.codes.clone() for name, local in codes_of(parallel.module).items()
    }
    a_part = next(iter(codes_of(parallel.module).values()))
    restored = pickle.loads(pickle.dumps(a_part))
    parallel.module.to("cpu")
    parallel.module.float()
    first = parallel.module(batch(0, 0))
    after = codes_of(parallel.module)
    return [
        type(restored) is torch.Tensor and torch.equal(restored, a_part.decoded()),
        before.keys() == after.keys()
        and all(torch.equal(before[name], after[name].codes) for name in before),
        all(local.dtype == torch.float32 for local in after.values())
        and first.dtype == torch.float32,
    ]


def test_a_cast_model_keeps_its_codes_and_a_pickled_part_is_a_plain_tensor() -> None:
    assert run_ranks(moved_and_pickled, 2) == [[True] * 3] * 2


def built_on_meta(degree: int) -> float:
    with torch.device("meta"):
        model = frozen(Net().double())
    asked = SmpConfig(
        units=["Block"],
        frozen_storage="int4",
        shard_degree=degree,
        delayed_init={"seed": 3},
    )
    parallel = parallelize(model, asked, topology=Topology.discover())
    with torch.device("meta"):
        plain = frozen(Net().double())
    other = SmpConfig(units=["Block"], shard_degree=degree, delayed_init={"seed": 3})
    expected = parallelize(plain, other, topology=Topology.discover()).module
    as_whole = net(1)
    as_whole.load_state_dict(
        {name: whole(value) for name, value in expected.state_dict().items()}
    )
    return furthest(
        parallel, dict(with_decoded_base(as_whole, "int4").named_parameters())
    )


def test_a_model_that_is_built_shard_by_shard_gets_the_codes_of_the_whole_one() -> None:
    assert run_ranks(built_on_meta, 2, 2) == [0.0, 0.0]


# Codes


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str
)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_decoded_weights_have_the_same_codes_again(
    name: Any, dtype: torch.dtype
) -> None:
    """Of all sizes, with rows that are no multiple of a block; a value is off by at
    most what the codec says."""
    codec, bound = RowCodec(name), {"int8": 1 / 250, "int4": 1 / 13.8}[name]
    generator = torch.Generator().manual_seed(0)
    for exponent in range(-12, 15, 3) if dtype == torch.float16 else range(-30, 30, 3):
        for row in (16, 33, 300, 512):
            values = (torch.rand(400, row, generator=generator) - 0.5) * 2.0**exponent
            values = values.to(dtype)
            codes = torch.empty(400, codec.row_bytes(row), dtype=torch.uint8)
            codec.encode(values, codes)
            decoded, again = torch.empty_like(values), torch.empty_like(codes)
            codec.decode(codes, decoded)
            codec.encode(decoded, again)
            assert torch.equal(again, codes)
            largest = values.abs().amax().double()
            rounding = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0.0
            assert (decoded.double() - values.double()).abs().max() <= largest * (
                bound + rounding
            )


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_zeros_stay_zeros_and_what_is_not_finite_shows(name: Any) -> None:
    values = torch.zeros(4, 64)
    values[1, 3], values[2, 5] = torch.inf, torch.nan
    codec = RowCodec(name)
    codes = torch.empty(4, codec.row_bytes(64), dtype=torch.uint8)
    decoded = torch.empty_like(values)
    codec.encode(values, codes)
    codec.decode(codes, decoded)
    assert not decoded[0].any() and not decoded[3].any()
    assert not decoded[1].isfinite().any() and not decoded[2].isfinite().any()


# Refused


def refused(case: str) -> str:
    try:
        if case == "nothing frozen":
            model = Net()
            parallelize(
                model,
                SmpConfig(frozen_storage="int8", shard_degree=2),
                topology=Topology.discover(),
            )
        elif case == "made trainable later":
            parallel = parallel_net(frozen_storage="int8", shard_degree=2)
            for parameter in parallel.module.parameters():
                parameter.requires_grad_(True)
            parallel.module(batch(0, 0))
        elif case == "averaged":
            ShardedAverage(parallel_net(frozen_storage="int8", shard_degree=2))
        else:
            parallel = parallel_net(frozen_storage="int4", shard_degree=2)
            with torch.no_grad():
                parallel.module.blocks[0].up.base.weight.add_(1.0)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nothing frozen", "freeze the base before the model is prepared"),
        ("made trainable later", "make trainable what is to be trained before that"),
        ("written into", "parameter.copy_(values)"),
        ("averaged", "leave the average out"),
    ],
)
def test_what_codes_cannot_be_is_refused_on_all_ranks(case: str, words: str) -> None:
    for seen in run_ranks(refused, 2, case):
        assert words in seen and "frozen_storage" in seen


def test_only_frozen_matrices_are_coded() -> None:
    names = {
        name for name, parameter in net().named_parameters() if is_coded(parameter)
    }
    assert (
        run_ranks(coded_names, 2) == [names] * 2
        and "blocks.0.short.weight" not in names
    )


def coded_names() -> set[str]:
    return set(codes_of(parallel_net(frozen_storage="int8", shard_degree=2).module))
