"""Random programs of Lightning over axes: a model with attention (or experts) whose
sequences, layers or blocks are divided, in modules with the hooks, callbacks, flags and
schedules of `tests.lightning.programs`.

Batches are (tokens, targets). What a step computes stands in one call of the model and
a mean over targets, so that the same step goes through pipeline stages, over context
ranks and in one process.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from smp_core.context_parallel import positions, weighted_mean
from tests.core.blocks import WIDTH, OwnExperts
from tests.lightning.program_parts import METHODS
from tests.lightning.programs import KNOBS, Drawn, Other, Program, draw, is_alone, world

BATCH, VOCABULARY, HEADS, EXPERTS = 8, 24, 4, 4  # samples are over all ranks
LAYERS = {
    "*.qkv": "column:3", "*.out": "row", "*.up": "column", "*.down": "row",
}  # fmt: skip
# Degrees of context, tensor, pipeline and expert ranks on four ranks, and the shard
# degrees that they have.
AXES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "context 2": ({"context_parallel_degree": 2}, (2, 4, "node")),
    "context 4": ({"context_parallel_degree": 4}, (4,)),
    "tensor 2": ({"tensor_parallel_degree": 2}, (1, 2, "world")),
    "pipeline 2": ({"pipeline_parallel_degree": 2}, (1, 2, "node")),
    "pipeline 4": ({"pipeline_parallel_degree": 4}, (1,)),
    "experts 2": ({"expert_parallel_degree": 2}, (2, 4, "node")),
    "experts 4": ({"expert_parallel_degree": 4}, (4,)),
    "context 2, tensor 2": (
        {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
        (2,),
    ),
    "pipeline 2, context 2": (
        {"pipeline_parallel_degree": 2, "context_parallel_degree": 2},
        (2,),
    ),
    "pipeline 2, tensor 2": (
        {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
        (1,),
    ),
    "pipeline 2, experts 2": (
        {"pipeline_parallel_degree": 2, "expert_parallel_degree": 2},
        (2,),
    ),
}


def draw_over_axes(seed: int) -> Program:
    """A program of `draw` over axes of four ranks."""
    program, rng = draw(seed), random.Random(1_000_003 * seed + 5)
    axes = rng.choice(sorted(AXES))
    degrees, shards = AXES[axes]
    stages = degrees.get("pipeline_parallel_degree", 1)
    drawn = {name: rng.choice(values) for name, values in KNOBS.items()}
    knobs = {
        name: value
        for name, value in drawn.items()
        if value is not None and name in program["knobs"]
    }
    knobs |= {**degrees, "shard_degree": rng.choice(shards)}
    if "context_parallel_degree" in degrees:
        knobs["full_outputs"] = True
    if "tensor_parallel_degree" in degrees:
        knobs["tensor_parallel"] = {
            "plan": LAYERS,
            "sequence_parallel": rng.random() < 0.5,
        }
    if stages > 1:
        schedule = (
            rng.choice(("1f1b", "gpipe", "interleaved:2")) if stages == 2 else "1f1b"
        )
        knobs["pipeline"] = {
            "microbatches": 2 if stages == 2 else rng.choice((2, 4)),
            "schedule": schedule,
        }
    changed: dict[str, Any] = {}
    if stages > 1:  # what is refused in words, or warned of
        changed["optimization"] = "automatic"
        not_here = (
            "optimizer_zero_grad",
            "backward",
            "reads weights",
            "freeze and thaw",
            "gradient norm",
        )
        for kind in ("overrides", "callbacks"):
            changed[kind] = [name for name in program[kind] if name not in not_here]
        if program["loaders"].startswith("list"):
            # Of two batches and of two samples a list looks alike.
            changed["loaders"] = "one"
        changed["train"] = (
            BATCH * rng.randint(2, 4)
            if program["loaders"] != "one"
            else BATCH * rng.randint(2, 4) + 4
        )
    if "context_parallel_degree" in degrees:
        changed["loaders"] = "one"  # a batch of batches has no sequence, as is said
    return {
        **program,
        "train": BATCH * rng.randint(2, 4) + rng.choice((0, 0, 4)),
        **changed,
        "axes": axes,
        "judged": stages == 1,
        "layers": 4,
        "tokens": rng.choice((8, 10)),
        "uneven": "context_parallel_degree" in degrees
        and stages == 1
        and rng.random() < 0.5,
        "experts": "expert_parallel_degree" in degrees,
        "all gather": stages == 1 and rng.random() < 0.5,
        "knobs": knobs,
    }


class Attention(nn.Module):
    """Torch's own; heads are counted by their width."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Block(nn.Module):
    def __init__(self, with_experts: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        if with_experts:
            self.router = nn.Linear(WIDTH, EXPERTS)
            self.experts = OwnExperts(EXPERTS, WIDTH, spread=1.0)
        self.with_experts = with_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        if self.with_experts:
            weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
            routed = self.experts(
                x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1)
            )
            x = x + routed.view(x.shape)
        return x + self.down(torch.tanh(self.up(x)))


class Words(nn.Module):
    """Tokens [samples, tokens] -> scores of the next ones, with a tied head."""

    def __init__(self, layers: int, with_experts: bool) -> None:
        super().__init__()
        self.front, self.places = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(16, WIDTH),
        )
        self.blocks = nn.ModuleList(Block(with_experts) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.back = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.back.weight = self.front.weight  # tied
        self.scale = nn.Parameter(torch.ones(()))
        self.dummy_inputs = {"tokens": torch.zeros(2, 8, dtype=torch.long)}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.front(tokens) + self.places(positions(tokens))
        for block in self.blocks:
            x = block(x)
        return self.back(self.norm(x)) * self.scale


def mean_over(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the targets that there are, of all ranks that share sequences."""
    mask = (targets != -100).to(values)
    return weighted_mean((values * mask).sum() / mask.sum().clamp(min=1))


def errors(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of each token; 0 where there is no target."""
    return F.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(targets.shape)


class OverAxes(Drawn):
    """What `Drawn` is, over sequences."""

    def build_networks(self) -> tuple[nn.Module, nn.Module | None]:
        net = Words(self.program["layers"], self.program["experts"])
        return net, Other(VOCABULARY) if self.program["judged"] else None

    @property
    def shares(self) -> int:
        """Ranks that read the same samples."""
        knobs = self.program["knobs"]
        names = (
            "context_parallel_degree",
            "tensor_parallel_degree",
            "pipeline_parallel_degree",
        )
        count = 1
        for name in names:
            count *= 1 if is_alone() else knobs.get(name, 1)
        return count

    @staticmethod
    def pairs_of(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens and targets of a batch of any loader."""
        if torch.is_tensor(batch[0] if isinstance(batch, (list, tuple)) else None):
            return batch[0], batch[1]
        parts = [
            OverAxes.pairs_of(part)
            for part in (batch.values() if isinstance(batch, dict) else batch)
            if part
        ]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat(
            [targets for _, targets in parts]
        )

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        tokens, targets = self.pairs_of(batch)
        if self.program["optimization"] != "automatic":
            return self.step_by_hand((tokens, targets), batch_idx)
        loss = self.loss_of(tokens, targets)
        self.log(
            "train",
            loss,
            on_step=True,
            on_epoch=True,
            sync_dist=True,
            batch_size=len(tokens),
            prog_bar=True,
        )
        if self.program["all gather"]:
            self.log(
                "gathered",
                self.all_gather(loss.detach()).mean(),
                batch_size=len(tokens),
            )
        return (
            {"loss": loss, "predicted": tokens.sum()}
            if self.program["output"] == "dict"
            else loss
        )

    def loss_of(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.net(tokens)
        values = errors(scores, targets)
        if self.program["judged"]:
            values = values + 0.1 * F.softplus(self.other(scores))
        return mean_over(values, targets)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.automatic_optimization and outputs:
            self.noted(outputs["loss"])

    def step_by_hand(self, batch: Any, batch_idx: int) -> None:
        (tokens, targets), optimizers = batch, self.optimizers()
        kind = self.program["optimization"]
        if kind == "two by hand":
            first, second = optimizers  # type: ignore[misc]
            self.toggle_optimizer(first)
            scores = self.net(tokens)
            loss = mean_over(
                errors(scores, targets) + 0.1 * F.softplus(-self.other(scores)), targets
            )
            first.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(
                first, gradient_clip_val=0.5, gradient_clip_algorithm="norm"
            )
            first.step()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            told = mean_over(F.softplus(self.other(self.net(tokens).detach())), targets)
            second.zero_grad()
            self.manual_backward(told)
            if batch_idx % 2 == 0:
                second.step()
            self.untoggle_optimizer(second)
            self.noted(told)
            self.log("told", told, sync_dist=True, batch_size=len(tokens))
        else:
            loss = self.loss_of(tokens, targets)
            length = 2 if kind == "in windows by hand" else 1
            self.manual_backward(loss / length)
            if (batch_idx + 1) % length == 0:
                optimizers.step()  # type: ignore[union-attr]
                optimizers.zero_grad()  # type: ignore[union-attr]
        self.step_schedules()
        self.noted(loss)
        self.log(
            "train",
            loss,
            on_step=True,
            on_epoch=True,
            sync_dist=True,
            batch_size=len(tokens),
        )

    def evaluate(self, batch: Any, name: str) -> None:
        tokens, targets = self.pairs_of(batch)
        scores = self.net(tokens)
        values, is_target = errors(scores, targets), targets != -100
        self.log(
            f"{name}_loss",
            mean_over(values, targets),
            sync_dist=True,
            batch_size=len(tokens),
        )
        self.log(
            f"{name}_largest",
            values.max(),
            sync_dist=True,
            reduce_fx="max",
            batch_size=len(tokens),
        )
        count = is_target.sum().double()
        self.log(
            f"{name}_count",
            count,
            sync_dist=True,
            reduce_fx="sum",
            batch_size=len(tokens),
        )
        if "metric objects" in self.overrides:
            best = scores.max(-1).values[is_target]
            self.error.update(best, torch.ones_like(best))
            self.largest.update(values[is_target])
            self.log(f"{name}_error", self.error)
            self.log(f"{name}_metric", self.largest)

    def predict_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> torch.Tensor:
        return self.net(self.pairs_of(batch)[0])

    # Data

    def loader(self, samples: int, seed: int, is_training: bool = False) -> DataLoader:
        tokens = self.program["tokens"]
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(VOCABULARY, (samples, tokens + 1), generator=generator)
        targets = rows[:, 1:].clone()
        if self.program["uneven"]:
            for number, row in enumerate(targets):
                row[: number % 4] = -100
        data: Any = TensorDataset(rows[:, :-1], targets)
        if not is_alone():
            return DataLoader(data, batch_size=BATCH * self.shares // world())
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=is_training)
        return DataLoader(data, batch_size=BATCH, sampler=sampler)


def module_over_axes(program: Program) -> LightningModule:
    methods: dict[str, Any] = {}
    for name in program["overrides"]:
        methods.update(METHODS.get(name, {}))
    return type("Program", (OverAxes,), methods)(program)
