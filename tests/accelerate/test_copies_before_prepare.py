"""Copies of weights that a script makes before `prepare` (averages, teachers, first
weights) meet sharded parameters, and terms of the loss are made of both: one process's
numbers, in float64."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
)

from smp_core.sharding import operands
from tests.accelerate.running import (
    SAMPLES,
    fresh_accelerator,
    full_weights,
    make_loader,
)
from tests.core.models import WIDTH, TroubledModel, loss_of
from tests.harness import run_ranks

STEPS, DECAY = 3, 0.7
TENSOR = {
    "tensor_parallel_degree": 2,
    "tensor_parallel": {
        "plan": {"*.up": "column", "*.down": "row"},
        "sequence_parallel": False,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard": {"shard_degree": 2},
    "auto": {},
    "all": {"shard_degree": "world"},
    "whole": {"shard_degree": 1},
    "world": {"shard_degree": 2, "optimizer_shard": "world"},
    "replicas over the world": {"shard_degree": 1, "optimizer_shard": "world"},
    "host": {"shard_degree": 2, "state_offload": "all"},
    "tensor": TENSOR,
    "kept": {"shard_degree": 2, "reshard_after_forward": False},
}
Update = Callable[[nn.Module], None]


# What a script makes of a model before it is prepared: what to call after each step.


def loop_in_place(model: nn.Module, kept: dict[str, Any]) -> Update:
    teacher = kept["teacher"] = copy.deepcopy(model)

    def update(student: nn.Module) -> None:
        for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.data.mul_(DECAY).add_(its.detach(), alpha=1 - DECAY)

    return update


def loop_assigned(model: nn.Module, kept: dict[str, Any]) -> Update:
    teacher = kept["teacher"] = copy.deepcopy(model)

    def update(student: nn.Module) -> None:
        for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.data = mine.data * DECAY + its.data * (1 - DECAY)

    return update


def shadow_dict(model: nn.Module, kept: dict[str, Any]) -> Update:
    shadow = kept["shadow"] = {
        name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad
    }

    def update(student: nn.Module) -> None:
        for name, p in student.named_parameters():
            if p.requires_grad:
                shadow[name] = ((1.0 - DECAY) * p.data + DECAY * shadow[name]).clone()

    return update


def shadow_list(model: nn.Module, kept: dict[str, Any]) -> Update:
    shadow = kept["shadow"] = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(student: nn.Module) -> None:
        for mine, its in zip(shadow, student.parameters(), strict=True):
            mine.sub_((1 - DECAY) * (mine - its))

    return update


def lists_at_once(model: nn.Module, kept: dict[str, Any]) -> Update:
    teacher = kept["teacher"] = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(student: nn.Module) -> None:
        pairs = zip(
            teacher.state_dict().values(), student.state_dict().values(), strict=True
        )
        mine, its = zip(
            *((a, b) for a, b in pairs if a.is_floating_point()), strict=True
        )
        torch._foreach_lerp_(list(mine), list(its), weight=1 - DECAY)

    return update


def averaged(**options: Any) -> Callable[[nn.Module, dict[str, Any]], Update]:
    def make(model: nn.Module, kept: dict[str, Any]) -> Update:
        average = kept["average"] = AveragedModel(model, **options)
        return average.update_parameters

    return make


def loaded(model: nn.Module, kept: dict[str, Any]) -> Update:
    teacher = kept["teacher"] = copy.deepcopy(model)

    def update(student: nn.Module) -> None:
        teacher.load_state_dict(student.state_dict())

    return update


def part_of_it(model: nn.Module, kept: dict[str, Any]) -> Update:
    encoder = kept["encoder"] = copy.deepcopy(model.blocks[0])

    @torch.no_grad()
    def update(student: nn.Module) -> None:
        for mine, its in zip(
            encoder.parameters(), student.blocks[0].parameters(), strict=True
        ):
            mine.lerp_(its, 1 - DECAY)

    return update


def swapped_in(model: nn.Module, kept: dict[str, Any]) -> Update:
    """The average is evaluated in the model, which then goes on with its own
    weights."""
    shadow = [p.detach().clone() for p in model.parameters()]
    losses = kept["losses"] = []

    @torch.no_grad()
    def update(student: nn.Module) -> None:
        own = [p.detach().clone() for p in student.parameters()]
        for mine, its in zip(shadow, student.parameters(), strict=True):
            mine.mul_(DECAY).add_((1 - DECAY) * its)
            its.data.copy_(mine.data)
        losses.append(loss_of(student, torch.arange(10).view(2, 5) % 7))
        for before, its in zip(own, student.parameters(), strict=True):
            its.data.copy_(before.data)

    return update


def look_ahead(model: nn.Module, kept: dict[str, Any]) -> Update:
    slow = kept["slow"] = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(student: nn.Module) -> None:
        for mine, its in zip(slow, student.parameters(), strict=True):
            mine.add_(its - mine, alpha=0.5)
            its.copy_(mine)

    return update


def compared(model: nn.Module, kept: dict[str, Any]) -> Update:
    first = [p.detach().clone() for p in model.parameters()]
    distances = kept["distances"] = []

    @torch.no_grad()
    def update(student: nn.Module) -> None:
        pairs = list(zip(first, student.parameters(), strict=True))
        distances.append(torch.stack([(a - b).norm() for a, b in pairs]))
        distances.append(torch.stack([F.mse_loss(b, a) for a, b in pairs]))
        distances.append(torch.tensor([float(torch.dist(a, b)) for a, b in pairs]))
        distances.append(torch.tensor([torch.equal(a, b) for a, b in pairs]))
        distances.append(
            torch.tensor([torch.allclose(b, a, atol=0.05) for a, b in pairs])
        )

    return update


UPDATES: dict[str, Callable[[nn.Module, dict[str, Any]], Update]] = {
    "in place": loop_in_place,
    "assigned": loop_assigned,
    "shadow by name": shadow_dict,
    "shadow in a list": shadow_list,
    "lists at once": lists_at_once,
    "mean": averaged(),
    "own function": averaged(avg_fn=get_ema_avg_fn(DECAY)),
    "many tensors": averaged(
        multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True
    ),
    "many tensors' mean": averaged(multi_avg_fn=get_swa_multi_avg_fn()),
    "loaded": loaded,
    "part of it": part_of_it,
    "swapped in": swapped_in,
    "look ahead": look_ahead,
    "compared": compared,
}


# Terms of the loss, outside of the model's forward, from what was there before.


def trained(model: nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def pairs(
    model: nn.Module, first: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(trained(model), first, strict=True))


def nothing(model: Any, tokens: torch.Tensor, first: list[torch.Tensor]) -> Any:
    return 0.0


def penalty(model: Any, tokens: torch.Tensor, first: list[torch.Tensor]) -> Any:
    return 0.01 * sum(p.pow(2).sum() for p in trained(model))


def norms(model: Any, tokens: torch.Tensor, first: list[torch.Tensor]) -> Any:
    return 0.01 * sum(p.norm() for p in trained(model))


def near_first(model: Any, tokens: torch.Tensor, first: list[torch.Tensor]) -> Any:
    return 0.5 * sum(((p - p0) ** 2).sum() for p, p0 in pairs(model, first))


def near_first_by_weight(
    model: Any, tokens: torch.Tensor, first: list[torch.Tensor]
) -> Any:
    return sum((p0.abs() * (p - p0).pow(2)).sum() for p, p0 in pairs(model, first))


def mean_squares(model: Any, tokens: torch.Tensor, first: list[torch.Tensor]) -> Any:
    return sum(F.mse_loss(p, p0 + 0.1) for p, p0 in pairs(model, first))


def lookups(model: Any, tokens: torch.Tensor, first: list[torch.Tensor]) -> Any:
    """Weights by index, of this rank's samples."""
    return model.embed.weight[tokens].square().mean()


def scaled_by_data(model: Any, tokens: torch.Tensor, first: list[torch.Tensor]) -> Any:
    """Factors that differ by rank."""
    factor = loss_of(model, tokens)
    return (
        factor * model.blocks[0].up.weight.square().mean()
        + factor.detach() * model.embed.weight.norm()
    )


def product(model: Any, tokens: torch.Tensor, first: list[torch.Tensor]) -> Any:
    return F.linear(features(tokens), model.blocks[1].narrow.weight).square().mean()


def submodule(model: Any, tokens: torch.Tensor, first: list[torch.Tensor]) -> Any:
    return model.blocks[1].narrow(features(tokens)).square().mean()


def features(tokens: torch.Tensor) -> torch.Tensor:
    return F.one_hot(tokens % WIDTH, WIDTH).double()


TERMS = {
    term.__name__: term
    for term in (
        *(nothing, penalty, norms, near_first, near_first_by_weight),
        *(mean_squares, lookups, scaled_by_data, product, submodule),
    )
}


class Drawn:
    """Case ``number``: copies, a term of the loss, a layout, a loop."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        kinds = list(UPDATES)
        self.updates = [kinds[(2 * number + place) % len(kinds)] for place in (0, 1)]
        self.term = list(TERMS)[number % len(TERMS)]
        self.layout = draw.choice(list(LAYOUTS))
        self.micro_batches = draw.choice([1, 2])
        self.optimizer = draw.choice(["SGD", "AdamW"])
        self.max_norm = draw.choice([None, 0.1])
        # With optimizer_shard="world" gradients are those of masters.
        self.masks = (
            "none"
            if "world" in self.layout
            else draw.choice(["none", "in place", "assigned"])
        )

    def run(self) -> dict[str, Any]:
        # What a script makes of its model before it is prepared.
        together = dist.is_initialized()
        torch.manual_seed(0)
        model: Any = self.model()
        kept: dict[str, dict[str, Any]] = {name: {} for name in self.updates}
        updates = [UPDATES[name](model, kept[name]) for name in self.updates]
        first = [p.detach().clone() for p in trained(model)]
        masks = [torch.rand_like(p).round() for p in first]
        optimizer = getattr(torch.optim, self.optimizer)(model.parameters(), lr=1e-2)

        data_ranks = (
            dist.get_world_size() // (2 if self.layout == "tensor" else 1)
            if together
            else 1
        )
        loader: Any = make_loader(STEPS, self.micro_batches, SAMPLES // data_ranks)
        accelerator: Any = None
        if together:
            knobs = LAYOUTS[self.layout]
            accelerator = fresh_accelerator(
                gradient_accumulation_steps=self.micro_batches, smp_config=knobs
            )
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for number, batch in enumerate(loader, 1):
            tokens = batch["tokens"]
            loss = loss_of(model, tokens) + TERMS[self.term](model, tokens, first)
            if accelerator is None:
                (loss / self.micro_batches).backward()
            else:
                with accelerator.accumulate(model):
                    accelerator.backward(loss)
            if number % self.micro_batches == 0:
                self.mask(model, masks)
                if self.max_norm is not None:
                    clip = (
                        torch.nn.utils.clip_grad_norm_
                        if accelerator is None
                        else accelerator.clip_grad_norm_
                    )
                    clip(model.parameters(), self.max_norm)
                optimizer.step()
                optimizer.zero_grad()
                for update in updates:
                    update(model)
        return {
            "model": full_weights(model),
            **{name: plain(value) for name, value in kept.items()},
        }

    def model(self) -> nn.Module:
        model = TroubledModel()
        if self.layout == "tensor":  # rows that two ranks divide
            for block in model.blocks:
                block.up, block.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        model.register_buffer("counted", torch.arange(3.0))
        return model.double()

    def mask(self, model: nn.Module, masks: Sequence[torch.Tensor]) -> None:
        with_gradients = [
            (p, mask)
            for p, mask in zip(trained(model), masks, strict=True)
            if p.grad is not None
        ]
        for p, mask in with_gradients:
            if self.masks == "in place":
                p.grad.mul_(mask)  # type: ignore[union-attr]
            elif self.masks == "assigned":
                p.grad = p.grad * mask  # type: ignore[operator]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return full_weights(value) if isinstance(value, nn.Module) else value


def run_drawn(numbers: Sequence[int]) -> list[Any]:
    return [Drawn(number).run() for number in numbers]


def same(ours: Any, theirs: Any) -> bool:
    """Return whether values are those of one process, to 1e-11, and plain where copies
    are."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(
            same(ours[name], value) for name, value in theirs.items()
        )
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return torch.allclose(ours.double(), theirs.double(), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "numbers", [range(1), pytest.param(range(1, 204), marks=pytest.mark.slow)], ids=str
)
def test_drawn_copies_of_before_prepare_have_one_processs_numbers(
    numbers: Sequence[int],
) -> None:
    of_ranks = run_ranks(
        run_drawn, 4, numbers, ranks_per_node=2, timeout=240 + 10 * len(numbers)
    )
    for number, *runs in zip(numbers, *of_ranks, strict=True):
        expected = Drawn(number).run()
        assert all(same(run, expected) for run in runs), (
            f"case {number}, {vars(Drawn(number))}"
        )


def updated_by_rank_0() -> tuple[str, list[str]]:
    """What the rank that is alone is told, and what is said of copies that differ
    between ranks."""
    accelerator = fresh_accelerator(smp_config={"shard_degree": 2})
    torch.manual_seed(accelerator.process_index)
    model: Any = TroubledModel()
    teacher, words = copy.deepcopy(model), ""
    model = accelerator.prepare(model)
    with torch.no_grad():
        if accelerator.is_main_process:
            with pytest.raises(RuntimeError) as caught:
                teacher.head.weight.lerp_(model.head.weight, 0.1)
            words = str(caught.value)
        model(torch.zeros(2, 5, dtype=torch.long))

    operands._warn_once.cache_clear()
    looks = mock.patch.object(operands, "_looks", itertools.count())
    with (
        looks,
        mock.patch.object(operands.logger, "warning") as warning,
        mock.patch.object(operands, "meet_between_calls"),
    ):
        for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.detach().lerp_(its.detach(), 0.1)
    return words, [call.args[0] for call in warning.call_args_list]


def test_an_update_of_one_rank_alone_is_an_error_and_different_copies_are_warned_of() -> (
    None
):
    (words, warnings), (of_others, _) = run_ranks(updated_by_rank_0, 2)
    assert (
        "rank 0 is at lerp_ of a sharded parameter and an unsharded tensor and rank 1 at the model's next"
        in words
    )
    assert "take it out of `if rank == 0:`" in words and of_others == ""
    assert (
        len(warnings) == 1
        and "differs between ranks" in warnings[0]
        and "seed all ranks alike" in warnings[0]
    )
