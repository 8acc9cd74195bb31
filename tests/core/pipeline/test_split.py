"""Which blocks are on which stage, batches in equal parts, and models that are no
chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine.decide import decide
from smp_core.pipeline.batches import split_batch
from smp_core.plan.chain.recording import with_chain
from smp_core.plan.plan import Plan
from smp_core.plan.shapes import Cluster, Shapes
from smp_core.topology import Topology
from tests.core.pipeline.cases import example_of
from tests.core.tensor_parallel.model_cases import build


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Chain(nn.Module):
    """The norm behind the blocks stands before them in the code, as in OPT."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.head = nn.Linear(4, 9)
        self.dummy_inputs: Any = torch.zeros(1, 3, dtype=torch.long)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Skipping(Chain):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = words = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + words))


class Scaling(Chain):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = 2 * block(x)
        return self.head(self.norm(x))


class Repeating(Chain):
    """The same blocks twice, as models of recurrent depth have them."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(self.norm(x))


class Sharing(Chain):
    def __init__(self, *widths: int) -> None:
        super().__init__(*widths)
        self.blocks[1].up.weight = self.blocks[0].up.weight


class Bare(Chain):
    def __init__(self, *widths: int) -> None:
        super().__init__(*widths)
        self.place = nn.Parameter(torch.zeros(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plan_of(model: nn.Module, stages: int, ranks: int = 4, **recipe: Any) -> Plan:
    asked = SmpConfig(
        shard_degree=1,
        pipeline_parallel_degree=stages,
        pipeline=recipe,
        units=["Block"],
    )
    shapes = with_chain(Shapes.of(model, asked), model)
    return decide(shapes, asked, Cluster(Topology.uniform(ranks, 2)))


def test_the_largest_stage_is_as_small_as_can_be() -> None:
    stages = plan_of(Chain(8, 8, 8, 40), 2).stages
    assert stages is not None and stages.sizes == (3, 1)
    by_hand = plan_of(Chain(8, 8, 8, 40), 2, split=[1, 3]).stages
    assert by_hand is not None and max(stages.elements) < max(by_hand.elements)
    assert stages.owners["norm.weight"] == (1,) and stages.owners["words.weight"] == (
        0,
    )


def test_of_equal_largest_stages_the_cut_with_the_most_even_blocks_is_taken() -> None:
    """With the last block and the head as the limit, five of the others would still fit
    on one stage."""
    stages = plan_of(Chain(*[8] * 6, 40), 3, ranks=6).stages
    assert stages is not None and stages.sizes == (3, 3, 1)


def test_frozen_parameters_and_unused_ones_have_a_stage_too() -> None:
    model = Chain(8, 8)
    model.words.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.unused = nn.Linear(4, 4)
    stages = plan_of(model, 2).stages
    assert (
        stages is not None
        and stages.owners.keys() == dict(model.named_parameters()).keys()
    )
    assert stages.owners["blocks.1.up.weight"] == (1,) and stages.owners[
        "unused.weight"
    ] == (0,)
    assert not model.words.weight.requires_grad


class Towers(Chain):
    """Its longest list of alike modules is no chain, which a forward shows."""

    def __init__(self, *widths: int) -> None:
        super().__init__(*widths)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)
        )
        self.early = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.steps = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.steps += 1
        self.cached = self.words(tokens)
        x = self.early(self.words(tokens).transpose(1, 2)).transpose(1, 2)
        x = x + sum(tower(x) for tower in self.towers)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_recording_that_tries_several_lists_of_blocks_leaves_state_alone() -> None:
    model = Towers(8, 8)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    chain = with_chain(Shapes.of(model, SmpConfig()), model).chain
    assert chain is not None and chain.blocks == ("blocks.0", "blocks.1")
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert model.steps == 0 and not hasattr(model, "cached")


def test_recording_changes_nothing() -> None:
    model = example_of(build("odd"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with_chain(Shapes.of(model, SmpConfig()), model)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(
        torch.equal(before[name], value) for name, value in model.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )


class Asking(Chain):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (
            super().forward(tokens)
            if self.head.weight.sum() > 100
            else super().forward(tokens.flip(1))
        )


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = Asking(8, 8)
    model.dummy_inputs = torch.zeros(1, 3, dtype=torch.long)
    return model


def without_example() -> nn.Module:
    model = Chain(8, 8)
    del model.dummy_inputs
    return model


def checkpointing() -> nn.Module:
    model = Chain(8, 8)
    model.gradient_checkpointing = True  # as Transformers' models have it
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Skipping(8, 8),
            "what comes behind the blocks uses activations from before them",
        ),
        (
            lambda: Repeating(8, 8),
            "blocks.0 is called several times.*once; write pipeline_parallel_degree=1",
        ),
        (lambda: Scaling(8, 8), "blocks.1 does not take what blocks.0 gives"),
        (lambda: Sharing(8, 8), "blocks.0.up.weight works in block 0 and in block 1"),
        (lambda: Bare(8, 8), "place works before the blocks.*a module of its own"),
        (
            on_meta,
            "its forward cannot be played without values .DataDependent.*delayed_init=False",
        ),
        (
            without_example,
            "it is run once to see what its blocks do; set example_input_array",
        ),
        (lambda: Chain(8), "no chain of blocks"),
        (
            checkpointing,
            "activations='full' in place of that.*gradient_checkpointing=False",
        ),
    ],
    ids=[
        "skip",
        "twice",
        "scale",
        "share",
        "bare",
        "meta",
        "example",
        "one",
        "checkpointing",
    ],
)
def test_a_model_that_is_no_chain_is_refused_with_the_place(
    make: Callable[[], nn.Module], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of(make(), 2)


@pytest.mark.parametrize(
    ("stages", "ranks", "recipe", "said"),
    [
        (4, 4, {}, "Chain has 2 blocks, and every stage needs one; write 2 or less"),
        (
            3,
            4,
            {},
            "pipeline_parallel_degree=3 does not cut 2 x 2 ranks.*allowed: 1, 2, 4",
        ),
        (
            2,
            4,
            {"split": [2]},
            r"pipeline.split=\[2\] is not 2 numbers that add up to the 2 blocks",
        ),
        (2, 4, {"split": [2, 1]}, r"pipeline.split=\[2, 1\]"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(
    stages: int, ranks: int, recipe: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of(Chain(8, 8), stages, ranks, **recipe)


def test_batches_are_cut_in_equal_parts() -> None:
    batch = {
        "ids": torch.arange(6).view(6, 1),
        "scale": 2.0,
        "also": (torch.arange(6), torch.tensor(1)),
    }
    parts = split_batch(batch, 3)
    assert [part["ids"].tolist() for part in parts] == [
        [[0], [1]],
        [[2], [3]],
        [[4], [5]],
    ]
    assert all(part["scale"] == 2.0 and part["also"][1] == 1 for part in parts)


def test_one_micro_batch_is_the_batch_whatever_its_tensors_are() -> None:
    """As TRL packs rows into one, beside a list of their lengths."""
    batch = {"ids": torch.arange(6).view(1, 6), "lengths": torch.tensor([2, 4])}
    (part,) = split_batch(batch, 1)
    assert torch.equal(part["ids"], batch["ids"])
    assert torch.equal(part["lengths"], batch["lengths"])


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            torch.zeros(3, 2),
            "pipeline.microbatches=2 does not divide a batch of 3 samples.*drop_last",
        ),
        ([torch.zeros(4), torch.zeros(2)], "tensors of 2, 4 samples"),
        (
            {"text": ["a", "b"], "ids": torch.zeros(2)},
            "a list of 2 str, one for each sample",
        ),
        ({"text": "a"}, "no tensors"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        split_batch(batch, 2)
