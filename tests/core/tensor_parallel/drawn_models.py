"""Random models with split layers, random plans and layouts, beside one process: what
blocks and the forward around them do to tokens, and what else blocks read and
return."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

from smp_core.cluster.layout import Axis
from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.core.tensor_parallel.model_cases import (
    Training,
    Wide,
    differences,
    full,
    own_loss,
)

WIDTH, INNER, WORDS, SAMPLES, STEPS = 16, 32, 24, 4, 4

MIXING = (
    "",
    "",
    "",
    "conv",
    "cumsum",
    "mean",
    "roll",
    "positions",
    "batch norm",
    "window",
    "before column",
    "zeroed",
)
BETWEEN = (
    "",
    "",
    "",
    "",
    "scale",
    "skip",
    "cumsum",
    "mean",
    "positions",
    "collected",
    "detached",
)
ATTENTION = ("", "inline", "module", "named", "named", "rotary")
CONDITIONS = (
    "film",
    "film by token",
    "gate",
    "memory",
    "masked memory",
    "returned",
    "inner bias",
    "attribute",
)


@dataclass(frozen=True)
class Drawn:
    """One random training.

    Attributes:
        plan: "written", "infer", or "carried": by a Transformers model, for its
            perceptrons only.
        conditions: what blocks read besides tokens.
        given: how these are given: "position", "keyword", "tuple", "first".
        made: by whom: "module" (trained), "data" or "data with gradients".
    """

    seed: int
    plan: str
    tensor: int
    sequence: bool
    attention: str
    mixing: str
    between: str
    conditions: tuple[str, ...]
    given: str
    made: str
    shares: bool
    tokens: int
    recomputes: bool
    half_of_blocks: bool


def draw(seed: int) -> Drawn:
    rng = random.Random(seed)
    mixing = rng.choice(MIXING)
    return Drawn(
        seed,
        rng.choice(("written", "written", "infer", "carried")),
        # Whose statistics are of one rank's samples.
        4 if mixing == "batch norm" else rng.choice((2, 4)),
        rng.random() < 0.8,
        rng.choice(ATTENTION),
        mixing,
        rng.choice(BETWEEN),
        tuple(rng.sample(CONDITIONS, rng.choice((0, 0, 1, 1, 2)))),
        rng.choice(("position", "keyword", "tuple", "first")),
        rng.choice(("module", "module", "data", "data with gradients")),
        rng.random() < 0.1,
        rng.choice((8, 12)),
        rng.random() < 0.25,
        rng.random() < 0.2,
    )


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.head_dim, self.rotary = 4, rotary
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.rotary:
            turn = torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()
            q, k = q * turn, k * turn
        return self.out(_attend(q, k, v, is_causal=True))


class DrawnBlock(nn.Module):
    def __init__(self, case: Drawn) -> None:
        super().__init__()
        self.case = case
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, INNER),
            nn.Linear(INNER, WIDTH),
        )
        if case.attention == "inline":
            self.mix, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        elif case.attention:
            self.attend = Attention(case.attention == "rotary")
        if case.mixing == "conv":
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        if case.mixing == "batch norm":
            self.statistics = nn.BatchNorm1d(WIDTH)
        if case.mixing == "zeroed":  # as fresh adaLN gates and LayerScale are
            self.gate = nn.Parameter(torch.zeros(WIDTH))
        if any("memory" in each for each in case.conditions):
            self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def _mixed(self, x: torch.Tensor) -> torch.Tensor:
        kind, length = self.case.mixing, x.shape[1]
        if kind == "conv":
            return x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        if kind == "cumsum":
            return x + x.cumsum(1) / length
        if kind == "mean":
            return x + x.mean(1, keepdim=True)
        if kind == "roll":
            return x + F.pad(x, (0, 0, 1, 0))[:, :-1]
        if kind == "positions":
            return x + torch.arange(length, dtype=x.dtype)[:, None] / 10
        if kind == "batch norm":
            return x + self.statistics(x.transpose(1, 2)).transpose(1, 2)
        if kind == "window":
            return x + x.unflatten(1, (-1, 2)).mean(2, keepdim=True).expand(
                -1, -1, 2, -1
            ).flatten(1, 2)
        if kind == "zeroed":
            return x + self.gate * x.mean(1, keepdim=True)
        return x

    def _read(self, x: torch.Tensor, kind: str, c: torch.Tensor) -> torch.Tensor:
        if kind in ("film", "returned", "attribute"):
            return x * (1 + c[:, None])
        if kind == "film by token":
            return x + c
        if kind == "gate":
            return x * c.sigmoid()
        if "memory" in kind:
            mask = torch.ones(1, x.shape[1], c.shape[1], dtype=torch.bool)
            mask[..., -1] = kind != "masked memory"
            return x + _attend(
                self.q(x), *self.kv(c).chunk(2, -1), attn_mask=mask[:, None]
            )
        return x

    def forward(self, x: torch.Tensor, *conditions: Any, **named: Any) -> Any:
        case = self.case
        if case.given == "first" and conditions:
            x, conditions = conditions[-1], (x, *conditions[:-1])
        given = [
            *(conditions[0] if case.given == "tuple" and conditions else conditions),
            *named.values(),
        ]
        of = dict(
            zip(
                [kind for kind in case.conditions if kind != "attribute"],
                given,
                strict=True,
            )
        )
        if "attribute" in case.conditions:
            of["attribute"] = self.attribute
        for kind, c in of.items():
            x = self._read(x, kind, c)
        x = self._mixed(x)
        if case.attention == "inline":
            x = x + self.back(_attend(*self.mix(x).chunk(3, -1), is_causal=True))
        elif case.attention:
            x = x + self.attend(x)
        h = self.norm(x)
        inner = torch.tanh(
            self.up(
                h + h.mean(1, keepdim=True) if case.mixing == "before column" else h
            )
        )
        if "inner bias" in of:
            inner = inner * (1 + of["inner bias"].mean(-1)[:, None, None])
        x = x + self.down(inner)
        return (
            (x, of["returned"] + of["returned"].tanh() / 2) if "returned" in of else x
        )


class DrawnModel(nn.Module):
    def __init__(self, case: Drawn) -> None:
        super().__init__()
        self.case = case
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(DrawnBlock(case) for _ in range(3))
        if case.shares:
            self.blocks[2].norm = self.blocks[0].norm
        self.condition = (
            nn.Linear(WORDS, WIDTH)
            if case.made == "module" and case.conditions
            else None
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.example_input_array = torch.arange(2 * case.tokens).view(2, -1) % WORDS
        self.leaves: list[torch.Tensor] = []

    def _conditions(self, tokens: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        one_hot = F.one_hot(tokens, WORDS).to(self.head.weight.dtype)
        for number, kind in enumerate(self.case.conditions):
            c = one_hot.roll(number, 1)
            if "memory" in kind:
                c = c[:, :3]
            elif kind == "gate":
                c = c[:, :1]
            elif kind != "film by token":
                c = c[:, 0]
            if self.condition is not None:
                c = self.condition(c)
            else:
                c = (
                    c[..., :WIDTH]
                    .contiguous()
                    .requires_grad_(self.case.made == "data with gradients")
                )
            self.leaves.append(c)
            yield kind, c

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        case = self.case
        self.leaves = []
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        conditions = dict(self._conditions(tokens))
        collected, first = [], x
        for number, block in enumerate(self.blocks):
            if case.half_of_blocks and number == 1:
                continue
            x = self._between(x, first, number)
            output = self._called(block, x, conditions)
            if isinstance(output, tuple):
                x, conditions["returned"] = output
            else:
                x = output
            collected.append(x)
        if case.between == "collected":
            x = x + sum(each.mean(1, keepdim=True) for each in collected)
        if case.between == "detached":
            x = x + sum(each.detach().mean(1, keepdim=True) for each in collected)
        return self.head(x)

    def _between(
        self, x: torch.Tensor, first: torch.Tensor, number: int
    ) -> torch.Tensor:
        kind = self.case.between
        if kind == "scale":
            return x * (1 + 0.1 * number)
        if kind == "skip":
            return x + 0.5 * first
        if kind == "cumsum":
            return x + x.cumsum(1) / 8
        if kind == "mean":
            return x - x.mean(1, keepdim=True)
        if kind == "positions":
            return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10
        return x

    def _called(
        self, block: Any, x: torch.Tensor, conditions: dict[str, torch.Tensor]
    ) -> Any:
        if "attribute" in conditions:
            block.attribute = conditions["attribute"]
        given = {
            kind.replace(" ", "_"): c
            for kind, c in conditions.items()
            if kind != "attribute"
        }
        if self.case.given == "keyword":
            return block(x, **given)
        if self.case.given == "tuple":
            return block(x, tuple(given.values())) if given else block(x)
        if self.case.given == "first" and given:
            values = list(given.values())
            return block(values[0], *values[1:], x)
        return block(x, *given.values())


def _carrying(case: Drawn) -> nn.Module:
    rng = random.Random(case.seed)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, use_cache=rng.random() < 0.5,
    )  # fmt: skip
    perceptrons = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
    }
    config.base_model_tp_plan = {**perceptrons, "layers.*.mlp.down_proj": "rowwise"}
    return transformers.LlamaForCausalLM(config)


def build(case: Drawn) -> Any:
    torch.manual_seed(case.seed)
    model = (_carrying(case) if case.plan == "carried" else DrawnModel(case)).double()
    if isinstance(model, DrawnModel):
        assert case.mixing != "zeroed" or not model.blocks[0].gate.any()
    return model


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = (
        model(tokens)
        if isinstance(model, DrawnModel)
        else model(input_ids=tokens).logits
    )
    return own_loss(logits, tokens, WORDS)


def trained(case: Drawn, model: Any, parallel: Any = None) -> Training:
    """Some steps in one process, or over tensor ranks and replicas."""
    seen = Training()
    generator = torch.Generator().manual_seed(case.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    if parallel is not None:
        parallel.prepare_optimizer(optimizer)
    for step in range(STEPS):
        batch = torch.randint(WORDS, (SAMPLES, case.tokens), generator=generator)
        own = (
            batch
            if parallel is None
            else batch.chunk(parallel.mesh.data_size)[parallel.mesh.data_rank]
        )
        with Wide():
            loss = _loss(model, own)
            loss.backward()
        total = loss.detach()
        if parallel is not None:
            parallel.window.close()
            dist.all_reduce(total)
            total = total / dist.get_world_size()
        seen.take(model, total.item(), 0.0, step)
        for number, leaf in enumerate(getattr(model, "leaves", ())):
            if leaf.is_leaf and leaf.grad is not None:
                grads = (
                    leaf.grad
                    if parallel is None
                    else leaf.grad / parallel.mesh.data_size
                )
                seen.gradients[f"{step} condition {number}"] = _of_all(grads, parallel)
        optimizer.step()
        optimizer.zero_grad()
    seen.weights = {name: full(value) for name, value in model.state_dict().items()}
    return seen


def _of_all(gradient: torch.Tensor, parallel: Any) -> torch.Tensor:
    if parallel is None or parallel.mesh.data_size == 1:
        return gradient.clone()
    group = parallel.mesh.group(Axis.REPLICATE)
    parts = [torch.empty_like(gradient) for _ in range(parallel.mesh.data_size)]
    dist.all_gather(parts, gradient.contiguous(), group=group)
    return torch.cat(parts)


def _plan_of(case: Drawn) -> Any:
    if case.plan != "written":
        return "infer" if case.plan == "infer" else "auto"
    plan = {"*.up": "column", "*.down": "row"}
    if case.attention == "named":
        plan |= {"*.qkv": "column:3", "*.attend.out": "row"}
    return plan


def outcome(case: Drawn) -> list[str] | str:
    """Differences from one process, or the words of a refusal before the first step."""
    recipe = {"plan": _plan_of(case), "sequence_parallel": case.sequence}
    knobs: dict[str, Any] = {
        "tensor_parallel_degree": case.tensor,
        "shard_degree": 1,
        "tensor_parallel": recipe,
    }
    # Transformers casts to float32 there, out of the reach of `Wide`; batch norms count
    # recomputed batches again.
    if case.recomputes and case.plan != "carried" and case.mixing != "batch norm":
        knobs["activations"] = "full"
    expected = trained(case, build(case))
    try:
        parallel = parallelize(build(case), SmpConfig(**knobs))
        seen = trained(case, parallel.module, parallel)
    except ValueError as error:
        return str(error)
    return differences(seen, expected, 1e-8)


def outcomes(seeds: list[int]) -> list[list[str] | str]:
    return [outcome(draw(seed)) for seed in seeds]
