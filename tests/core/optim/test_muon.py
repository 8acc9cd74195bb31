"""Muon on shards steps whole matrices: torch.optim.Muon's numbers, bit by bit where
gradients are equal, and one process's training to 1e-12 in float64 (the iteration
multiplies what sums in another order differ by)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import shard_like
from smp_core.config import SmpConfig
from smp_core.engine import ParallelModel
from smp_core.entry import parallelize
from smp_core.optim import KIND, Adafactor, Muon, muon_groups
from smp_core.optim.muon import flops
from smp_core.optim.owners import deal
from smp_core.topology import Topology
from tests.core.expert_parallel.cases import beside_experts
from tests.core.sharding.prepared_runs import difference, weights
from tests.harness import run_ranks
from tests.logged import warnings_said

WIDTH = 12
LAYOUTS: list[dict[str, Any]] = [
    {"shard_degree": 4},
    {"shard_degree": 2},  # two replicas
    {"shard_degree": 1},
    {
        "shard_degree": 2,
        "tensor_parallel_degree": 2,
        "tensor_parallel": {"plan": {"*.up": "column", "*.down": "row"}},
    },
    {"shard_degree": 2, "keep_between_micro_batches": "gradients"},
]


class Block(nn.Module):
    """Matrices of uneven rows, wide and tall, one of fewer rows than ranks, a stack,
    and vectors."""

    def __init__(self, outer: int, narrow: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, outer), nn.Linear(outer, WIDTH)
        self.narrow = nn.Linear(WIDTH, narrow, bias=False)
        self.stack = nn.Parameter(torch.randn(5, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (
            x
            + self.down(torch.tanh(self.up(x)))
            + torch.einsum("nh,ehk->nk", x, self.stack)
        )
        return x * (1 + self.narrow(x).sum(-1, keepdim=True))


class Net(nn.Module):
    """Blocks of which two share a matrix."""

    def __init__(self, outer: int = 30, narrow: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(outer, narrow) for _ in range(3))
        self.blocks[2].narrow.weight = self.blocks[0].narrow.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def net(outer: int = 30, narrow: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(outer, narrow).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)


def muon(model: nn.Module, **options: Any) -> Muon:
    groups = muon_groups(
        model,
        adamw={"lr": 0.01},
        split={"*.up.weight": 3, "blocks.1.down.weight": (4, 8)},
    )
    return Muon(groups, lr=0.02, **{"ns_dtype": torch.float64, **options})


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: list[int],
    steps: range = range(4),
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (model(batch(step, rank)) / len(ranks)).backward()
        optimizer.step()


def parallel_model(model: nn.Module, **knobs: Any) -> ParallelModel:
    return parallelize(
        model, SmpConfig(units=["Block"], **knobs), topology=Topology.discover()
    )


def trained(knobs: dict[str, Any]) -> tuple[ParallelModel, Muon]:
    parallel = parallel_model(net(), **knobs)
    optimizer = muon(parallel.module)
    parallel.prepare_optimizer(optimizer)
    train(parallel.module, optimizer, [parallel.mesh.data_rank])
    return parallel, optimizer


def in_layouts(layouts: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for knobs in layouts:
        parallel, _ = trained(knobs)
        # as many samples a step as there are data ranks
        model = net()
        train(model, muon(model), list(range(parallel.mesh.data_size)))
        apart = difference(weights(parallel.module), weights(model))
        if not apart <= 1e-12:
            wrong.append(f"{knobs}: {apart}")
    return wrong


@pytest.mark.parametrize(
    "layouts",
    [LAYOUTS[1::2], pytest.param(LAYOUTS[::2], marks=pytest.mark.slow)],
    ids=len,
)
def test_trains_like_one_process_in_every_layout(layouts: list[dict[str, Any]]) -> None:
    assert run_ranks(in_layouts, 4, layouts, ranks_per_node=2) == [[]] * 4


def of_experts(model: nn.Module) -> Muon:
    return Muon(muon_groups(model, adamw={"lr": 0.01}), lr=0.02, ns_dtype=torch.float64)


@pytest.mark.parametrize(
    ("shard", "expert"), [(4, 2), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_stacks_of_experts_are_stepped_where_they_are(shard: int, expert: int) -> None:
    assert (
        max(run_ranks(beside_experts, 4, of_experts, shard, expert, ranks_per_node=2))
        <= 1e-12
    )


def test_one_process_steps_like_torchs_muon_and_adamw() -> None:
    """Bit by bit, with its own bfloat16 iteration; a stack is stepped as its
    matrices."""
    ours, theirs = net().float(), net().float()
    groups = muon_groups(ours, adamw={"lr": 0.01})
    optimizer = Muon(
        groups, lr=0.02, weight_decay=0.3, momentum=0.8, adjust_lr_fn="match_rms_adamw"
    )
    options: dict[str, Any] = {
        "weight_decay": 0.3,
        "momentum": 0.8,
        "adjust_lr_fn": "match_rms_adamw",
    }
    stacks = {id(block.stack): block.stack for block in theirs.blocks}
    slices = [
        nn.Parameter(one.detach().clone()) for stack in stacks.values() for one in stack
    ]
    matrices = [parameter for parameter in theirs.parameters() if parameter.ndim == 2]
    separate = [
        torch.optim.Muon([*matrices, *slices], lr=0.02, **options),
        torch.optim.AdamW(
            [parameter for parameter in theirs.parameters() if parameter.ndim == 1],
            lr=0.01,
        ),
    ]
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            model(batch(step, 0).float()).backward()
        gradients = [one for stack in stacks.values() for one in stack.grad]
        for one, gradient in zip(slices, gradients, strict=True):
            one.grad = gradient.clone()
        optimizer.step()
        for each in separate:
            each.step()
        stepped = iter(slices)
        with torch.no_grad():
            for stack in stacks.values():
                stack.copy_(torch.stack([next(stepped) for _ in stack]))
    for (name, parameter), (_, expected) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), name


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        .detach()
        .clone()
    )


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def step_alike(
    alone: torch.optim.Optimizer, sharded: torch.optim.Optimizer, seed: int
) -> None:
    """Step the same matrices, whole and sharded, with the same gradients."""
    torch.manual_seed(seed)
    for parameter, shard in zip(
        alone.param_groups[0]["params"], sharded.param_groups[0]["params"], strict=True
    ):
        parameter.grad = torch.randn_like(parameter)
        shard.grad = shard_like(shard, parameter.grad)
    alone.step()
    sharded.step()


def differ(alone: torch.optim.Optimizer, sharded: torch.optim.Optimizer) -> list[int]:
    pairs = zip(
        alone.param_groups[0]["params"], sharded.param_groups[0]["params"], strict=True
    )
    return [
        place
        for place, (parameter, shard) in enumerate(pairs)
        if not torch.equal(whole(shard), parameter)
    ]


def equal_gradients(
    degree: int, shape: tuple[int, int]
) -> tuple[list[int], float, float]:
    """Steps with equal gradients, float32 weights and the bfloat16 iteration: what
    differs, bytes sent and of all."""
    reference = torch.optim.Muon(matrices_of(net(*shape).float()), lr=0.02)
    parallel = parallel_model(net(*shape).float(), shard_degree=degree)
    optimizer = Muon(matrices_of(parallel.module), lr=0.02)
    parallel.prepare_optimizer(optimizer)
    for step in range(3):
        step_alike(reference, optimizer, step)
        parallel.meter.close_step()
    sent = [
        count
        for name, count in parallel.meter.per_step().items()
        if name.startswith(KIND) and "bytes" in name
    ]
    of_all = torch.tensor(sum(sent))
    dist.all_reduce(of_all)
    sharded = [
        parameter
        for parameter in optimizer.param_groups[0]["params"]
        if isinstance(parameter, DTensor)
    ]
    total = sum(parameter.numel() for parameter in sharded) * torch.bfloat16.itemsize
    return differ(reference, optimizer), of_all.item(), total


@pytest.mark.parametrize("degree", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_equal_gradients_give_torchs_numbers_bit_by_bit(degree: int) -> None:
    for different, sent, total in run_ranks(
        equal_gradients, 4, degree, (30, 3), ranks_per_node=2
    ):
        assert different == []
        assert 0 < sent < 2 * total * (4 // degree)


def test_bytes_are_those_of_two_exchanges() -> None:
    """2(P - 1)/P of the sharded matrices in bfloat16, where rows divide."""
    for different, sent, total in run_ranks(
        equal_gradients, 4, 4, (32, 4), ranks_per_node=2
    ):
        assert different == []
        assert sent == 2 * 3 / 4 * total


def through_checkpoints() -> list[str]:
    """torch's Muon goes on from our states, and ours from its."""
    wrong = []
    reference = torch.optim.Muon(matrices_of(net().float()), lr=0.02)
    parallel = parallel_model(net().float(), shard_degree=2)
    optimizer = Muon(matrices_of(parallel.module), lr=0.02)
    parallel.prepare_optimizer(optimizer)
    step_alike(reference, optimizer, 0)
    of_shards = optimizer.state_dict()
    of_whole = {
        **of_shards,
        "state": {
            key: {"momentum_buffer": whole(value["momentum_buffer"])}
            for key, value in of_shards["state"].items()
        },
    }
    # Groups as torch writes them.
    theirs = {**reference.state_dict(), "state": of_shards["state"]}
    reference.load_state_dict(of_whole)
    optimizer.load_state_dict(theirs)
    step_alike(reference, optimizer, 1)
    if differ(reference, optimizer):
        wrong.append("numbers")
    if [
        key
        for key in ("algorithm", "split", "ns_dtype")
        if key not in optimizer.param_groups[0]
    ]:
        wrong.append("groups of torch's lack options of ours")
    return wrong


def test_states_and_groups_are_torchs() -> None:
    assert run_ranks(through_checkpoints, 2) == [[]] * 2


def refusals() -> list[str]:
    said = []
    for knobs in ({"optimizer_shard": "world"}, {"state_offload": "optimizer"}):
        parallel = parallel_model(net(), shard_degree=1, **knobs)
        try:
            parallel.prepare_optimizer(muon(parallel.module))
        except ValueError as error:
            said.append(str(error))
    return said


def test_states_that_are_not_in_shards_on_the_device_are_refused() -> None:
    for world, host in run_ranks(refusals, 2):
        assert (
            "optimizer_shard='world'" in world and "Muon looks across a tensor" in world
        )
        assert "state_offload='optimizer'" in host and "torch.optim.AdamW" in host


def torchs_on_shards() -> list[str]:
    """What is said of torch.optim.Muon, and why it is refused where a matrix has fewer
    rows than ranks."""
    with warnings_said() as said:
        for narrow in (4, 3):
            parallel = parallel_model(net(32, narrow).float(), shard_degree=4)
            try:
                parallel.prepare_optimizer(
                    torch.optim.Muon(matrices_of(parallel.module))
                )
            except ValueError as error:
                said.append(str(error))
    return [text for text in said if "Muon" in text]


@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11 steps matrices of few rows, too"
)
def test_torchs_own_is_accepted_with_what_it_sends_and_refused_where_it_fails() -> None:
    (warning, refused), *others = run_ranks(torchs_on_shards, 4)
    # three wide matrices [12, 32] and [4, 12], three tall ones [32, 12]; one [4, 12] is
    # shared and not sharded
    wide = 3 * (2 * 12 * 32 + 12**2) + (2 * 4 * 12 + 4**2)
    sent = 5 * 3 / 4 * (wide + 3 * 4 * 12**2) * 2
    assert f"about {sent / 2**30:.3g} GiB from each rank" in warning
    for said in ([refused], *others):
        assert len(said) == 1 and "Muon cannot step sharded parameters" in said[0]
        assert "use smp_core.optim.Muon(muon_groups(model))" in said[0]


def test_wrong_options_are_refused_by_name() -> None:
    vector, matrix = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(
        ValueError,
        match=r"1 parameters are of other shapes, as \[3\]; write Muon\(muon_groups",
    ):
        Muon([matrix, vector])
    with pytest.raises(ValueError, match="momentum=-1: allowed are 0 and above"):
        Muon([matrix], momentum=-1)
    with pytest.raises(ValueError, match="adjust_lr_fn='adam': allowed are 'original'"):
        Muon([matrix], adjust_lr_fn="adam")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="algorithm='sgd': allowed are 'muon', 'adamw'"
    ):
        Muon([{"params": [matrix], "algorithm": "sgd"}])
    with pytest.raises(ValueError, match=r"of other shapes, as \[4, 3\]"):
        Muon([{"params": [matrix], "split": (0, (2, 3))}])
    optimizer = Muon([matrix])
    with pytest.raises(ValueError, match="of other shapes"):
        optimizer.add_param_group({"params": [vector]})
    assert len(optimizer.param_groups) == 1
    # torch's refuses them, too; its AdamW steps them.
    spectrum = nn.Parameter(torch.zeros(4, 3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="Muon steps real numbers; 1 parameters are"):
        Muon([spectrum])
    Muon([matrix, {"params": [spectrum], "algorithm": "adamw"}][1:])
    with pytest.raises(ValueError, match="Adafactor steps real numbers"):
        Adafactor([spectrum])


LLAMA_8B = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
] * 32
QWEN3_30B = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048)] * 48
"""Matrices of all layers; experts stay where they are."""


@pytest.mark.parametrize(
    "shapes", [LLAMA_8B, QWEN3_30B], ids=["Llama-3.1-8B", "Qwen3-30B-A3B"]
)
@pytest.mark.parametrize("degree", [2, 8, 32])
def test_owners_have_about_as_much_to_do(
    shapes: list[tuple[int, int]], degree: int
) -> None:
    costs = [flops(rows, columns, 5) for rows, columns in shapes]
    loads = [0] * degree
    for cost, owner in zip(costs, deal(costs, degree), strict=True):
        loads[owner] += cost
    assert max(loads) <= 1.01 * sum(costs) / degree
