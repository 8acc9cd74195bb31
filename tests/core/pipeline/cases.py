"""Tiny models through pipeline stages: the training of
tests/core/tensor_parallel/model_cases.py, cut another way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint.live_state import full_state_dict
from smp_core.config import SmpConfig
from smp_core.context_parallel.replaced_attention import (
    SplitBatch,
    enabled,
    part_of_mean,
    weighted_mean,
)
from smp_core.engine.averaging import ShardedAverage
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.pipeline.batches import split_batch
from smp_core.sharding.weights.delayed_tensors import Slot
from tests.core.tensor_parallel.model_cases import (
    Training,
    Wide,
    batches,
    build,
    full,
    loss_of,
    optimizer_of,
    own_loss,
    wide_when_computed_again,
)
from tests.core.tensor_parallel.models import STEPS, TOKENS


def example_of(model: nn.Module, keeps_loss: bool = False) -> nn.Module:
    """The model with what one process computes its loss by, and an example of its input
    where it brings none.

    ``keeps_loss``: the loss is the model's own, which is computed in chunks of tokens
    or from split logits.
    """
    if isinstance(model, transformers.PreTrainedModel):
        if not keeps_loss:
            model.loss_function = own_loss
    else:
        model.dummy_inputs = {"tokens": torch.zeros(2, TOKENS, dtype=torch.long)}  # type: ignore[assignment]
    return model


def of_all_stages(
    parallel: ParallelModel, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What each stage has of the model's tensors, put together. Collective over the
    world."""
    assert parallel.pipeline is not None
    own = parallel.pipeline.stages.owned(parallel.mesh.stage)
    held = {name: full(tensor) for name, tensor in tensors.items() if name in own}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    found: dict[str, torch.Tensor] = {}
    for theirs in everyone:
        for name, tensor in theirs.items():
            assert name not in found or torch.equal(found[name], tensor), (
                f"{name} differs between its stages"
            )
            found[name] = tensor
    return found


@contextlib.contextmanager
def initialised() -> Iterator[list[str]]:
    """Names of the parameters that delayed initialisation makes whole values of
    inside."""
    made: list[str] = []
    full_copy = Slot.full_copy

    def noting(slot: Slot, with_values: bool) -> torch.Tensor:
        if slot.is_parameter:
            made.append(slot.fqn)
        return full_copy(slot, with_values)

    Slot.full_copy = noting  # type: ignore[method-assign]
    try:
        yield made
    finally:
        Slot.full_copy = full_copy  # type: ignore[method-assign]


def next_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """The targets that ``own_loss`` finds in whole sequences."""
    return F.pad(tokens, (0, 1), value=-100)[:, 1:]


def pair_loss(model: Any, split: SplitBatch) -> torch.Tensor:
    """The mean over this rank's targets."""
    tokens, targets = split.batch
    output = model(tokens)
    loss = F.cross_entropy(
        getattr(output, "logits", output).flatten(0, 1), targets.flatten()
    )
    if getattr(output, "aux_loss", None) is None:
        return loss
    # The mean over ranks is that of all tokens already, whatever targets each rank has.
    return weighted_mean(loss) + model.router_aux_loss_coef * output.aux_loss


@dataclass(frozen=True)
class Case:
    """What one training is like; the world is stages x shard x replicas."""

    kind: str
    stages: int = 2
    shard: int = 1
    micro_batches: int = 2
    windows: int = 1
    schedule: str = "1f1b"
    knobs: tuple[tuple[str, Any], ...] = ()

    @property
    def is_delayed(self) -> bool:
        return bool(dict(self.knobs).get("delayed_init"))

    def parallel(self, device: torch.device | None = None) -> ParallelModel:
        keeps_loss = (
            not dict(self.knobs)
            .keys()
            .isdisjoint({"chunked_cross_entropy", "tensor_parallel_degree"})
        )
        model = example_of(
            build(self.kind, seed=dist.get_rank(), delayed=self.is_delayed), keeps_loss
        )
        if "activations" in dict(self.knobs):
            model = wide_when_computed_again(model)
        recipe = {"microbatches": self.micro_batches, "schedule": self.schedule}
        knobs = {
            "shard_degree": self.shard,
            "pipeline_parallel_degree": self.stages,
            "pipeline": recipe,
        }
        config = SmpConfig(**{**knobs, **dict(self.knobs)})
        if not self.is_delayed:
            return parallelize(model.to(device), config, device=device or "cpu")
        with initialised() as names:
            parallel = parallelize(model, config)
        assert parallel.pipeline is not None
        stages, stage = parallel.pipeline.stages, parallel.mesh.stage
        if self.kind != "halved":
            assert set(names) == stages.owned(stage), (
                "a rank makes values of its own stage's parameters"
            )
        held = sum(
            p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)
        )
        assert held == stages.elements[stage] // self.shard
        return parallel

    def backward(self, parallel: ParallelModel, tokens: torch.Tensor) -> torch.Tensor:
        """One batch through all stages; its mean loss, on all ranks."""
        assert parallel.pipeline is not None
        parts = split_batch(tokens, self.micro_batches)
        calls = [
            lambda part=part: parallel.run_as_forward(loss_of, parallel.module, part)
            for part in parts
        ]
        within: Any = lambda _: nullcontext()  # noqa: E731
        if parallel.context is not None:
            splits = [
                parallel.context.split((part, next_tokens(part))) for part in parts
            ]
            calls = [
                lambda split=split: parallel.run_as_forward(
                    pair_loss, parallel.module, split
                )
                for split in splits
            ]
            within = lambda number: enabled(splits[number])  # noqa: E731
        scale = 1 / self.micro_batches / self.windows
        losses = parallel.pipeline.train(calls, part_of_mean, scale, tokens, within)
        if parallel.context is not None:
            pairs = zip(losses, splits, strict=False)
            losses = [
                loss if split.weighted else loss * split.weight for loss, split in pairs
            ]
        mean = parallel.pipeline.share(
            torch.stack(losses).detach().mean() if losses else None
        )
        dist.all_reduce(mean)
        return mean / dist.get_world_size() / self.windows


def together(
    case: Case, max_norm: float = 0.5, device: torch.device | None = None
) -> Training:
    """The training over the ranks of the default group."""
    seen = Training()
    parallel = case.parallel(device)
    model, mesh = parallel.module, parallel.mesh
    optimizer = optimizer_of(model)
    parallel.prepare_optimizer(optimizer)
    for step, micro in enumerate(batches(case.windows).to(device)):
        with Wide():
            losses = [
                case.backward(parallel, tokens.chunk(mesh.data_size)[mesh.data_rank])
                for tokens in micro
            ]
        seen.losses.append(float(sum(losses)))
        seen.norms.append(float(parallel.clip_grad_norm_(max_norm)))
        if step in (0, STEPS - 1):
            gradients = {
                name: p.grad
                for name, p in model.named_parameters()
                if p.grad is not None
            }
            seen.gradients |= {
                f"{step} {name}": g
                for name, g in of_all_stages(parallel, gradients).items()
            }
        optimizer.step()
        optimizer.zero_grad()
    seen.weights = of_all_stages(parallel, dict(model.named_parameters()))
    saved = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    if saved:  # as averages have them
        averages = ShardedAverage(parallel).weights()
        seen.weights |= {name: averages[name] for name in saved}
    return seen


def several(cases: list[Case]) -> list[Training]:
    return [together(case) for case in cases]


def everything(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Weights and optimizer states, unsharded, on all ranks."""
    state = {
        "model": parallel.model_state(),
        "optimizer": parallel.optimizer_state(optimizer)["state"],
    }
    found = full_state_dict(state, rank0_only=False, stages=parallel.stage_group)
    flat = dict(found["model"])
    for name, entry in found["optimizer"].items():
        flat |= {
            f"{name} {key}": full(value)
            for key, value in entry.items()
            if torch.is_tensor(value)
        }
    return flat
