"""Small models of one's own with what real ones have around their blocks, drawn from a
seed: positions from a number, outputs in tuples, heads that nobody uses, teachers,
masks. Each trains in stages as in one process, or is refused on all ranks before
training."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.pipeline.batches import split_batch
from tests.core.pipeline.cases import of_all_stages

WORDS, WIDTH, TOKENS, SAMPLES = 16, 8, 6, 4


class Table(nn.Module):
    """Positions, of a number or of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * TOKENS, WIDTH))

    def forward(self, of: Any) -> torch.Tensor:
        return self.table[: of if isinstance(of, int) else of.shape[1]]


class NumberedEmbedding(nn.Embedding):
    def forward(self, count: int) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.arange(count))


class Sinusoid(nn.Module):
    """Positions from a keyword, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, *, length: int) -> torch.Tensor:
        return torch.arange(length).outer(torch.ones(WIDTH)).sin() * self.scale


class Scaled(nn.Module):
    """Gives floats of its tokens' shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()).double())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self.scale


class Both(nn.Module):
    """Embeds, and gives the mask with it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.words(tokens) * self.gate, tokens > 0


@dataclass
class Scored:
    logits: torch.Tensor
    hidden: Any


class Given(NamedTuple):
    hidden: torch.Tensor
    share: Any


class Block(nn.Module):
    def __init__(self, kind: str, keeps: str) -> None:
        super().__init__()
        self.kind, self.keeps = kind, keeps
        self.kept: Any = []
        self.mix, self.up, self.down = (
            nn.Linear(TOKENS, TOKENS),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
        )
        self.unused = nn.Linear(WIDTH, 2)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, bias: Any = None
    ) -> Any:
        x = (
            x + self.mix(x.mT).mT
            if mask is None
            else x + self.mix(x.mT).mT * mask[..., None]
        )
        inner = self.up(x).tanh()
        x = x + self.down(inner)
        if self.kind == "unused head":
            self.unused(x)
        size = inner.square().mean()
        if self.keeps == "list":
            self.kept = [size]
        elif self.keeps in ("loss", "detached"):
            self.kept = size if self.keeps == "loss" else size.detach()
        extra: dict[str, Any] = {
            "none": None,
            "number": 0.5,
            "text": "block",
            "unread tensor": inner,
            "loss": inner.square().mean(),
            "hidden": x,
            "bias": bias if bias is not None else x.mean(1, keepdim=True).detach(),
        }
        if self.kind in ("plain", "unused head"):
            return x
        if self.kind == "named":
            return Given(x, 0.5)
        if self.kind == "list":
            return [x, None]
        if self.kind == "dict":
            return {"x": x}
        return x, extra[self.kind]


# Each with its simplest first.
FEATURES: dict[str, tuple[str, ...]] = {
    "enters": ("embedding", "both", "recurrent", "convolved", "scaled", "linear", "bag"),
    "places": ("none", "number", "tensor", "numbered", "keyword", "bare", "buffer"),
    "gives": (
        "plain", "none", "number", "text", "unread tensor", "loss", "hidden", "bias", "named", "list", "dict",
        "unused head",
    ),
    "reads": ("first", "checks", "adds"),
    "beside": ("none", "mask", "condition", "layer condition", "skip", "middle skip", "detached skip"),
    "heads": ("one", "unused after", "unused before", "teacher", "tied", "detached tie", "pooled"),
    "outputs": ("tensor", "dict", "tuple", "all hidden", "dataclass"),
    "units": ("auto", "small", "named", "leaves"),
    "frozen": ("nothing", "before", "blocks", "head"),
    "noise": ("none", "dropout", "norm"),
    "keeps": ("nothing", "loss", "list", "detached", "sum of hidden", "size of logits"),
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A model; the fields are those of ``FEATURES``."""

    enters: str = "embedding"
    places: str = "none"
    gives: str = "plain"
    reads: str = "first"
    beside: str = "none"
    heads: str = "one"
    outputs: str = "tensor"
    units: str = "auto"
    frozen: str = "nothing"
    noise: str = "none"
    keeps: str = "nothing"
    stages: int = 2
    shard: int = 1
    schedule: str = "1f1b"

    def __str__(self) -> str:
        plain = Drawn()
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return (
            ", ".join(
                f"{name}={value!r}"
                for name, value in told.items()
                if value != getattr(plain, name)
            )
            or "plain"
        )


def draw(seed: int, ranks: int) -> Drawn:
    """Two features or three that are not the simplest, and a layout."""
    generator = random.Random(seed)
    names = generator.sample(sorted(FEATURES), generator.choice((1, 2, 2, 3)))
    chosen = {name: generator.choice(FEATURES[name][1:]) for name in names}
    stages = ranks if ranks == 2 else generator.choice((2, 4))
    schedule = (
        generator.choice(("1f1b", "gpipe", "interleaved:2")) if stages == 2 else "1f1b"
    )
    return Drawn(**chosen, stages=stages, shard=ranks // stages, schedule=schedule)


class Model(nn.Module):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.words: nn.Module = {
            "both": Both,
            "scaled": lambda: nn.Sequential(
                Scaled(), nn.Unflatten(1, (TOKENS, 1)), nn.Linear(1, WIDTH)
            ),
            "linear": lambda: nn.Linear(WORDS, WIDTH),
            "bag": lambda: nn.Linear(WORDS, WIDTH, bias=False),
        }.get(drawn.enters, lambda: nn.Embedding(WORDS, WIDTH))()
        if drawn.enters == "recurrent":
            self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        if drawn.enters == "convolved":
            self.convolved = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        kinds: dict[str, Callable[[], nn.Module]] = {
            "number": Table,
            "tensor": Table,
            "numbered": lambda: NumberedEmbedding(2 * TOKENS, WIDTH),
            "keyword": Sinusoid,
        }
        if drawn.places in kinds:
            self.places = kinds[drawn.places]()
        if drawn.places == "bare":
            self.table = nn.Parameter(torch.randn(TOKENS, WIDTH))
        if drawn.places == "buffer":
            self.register_buffer("offsets", torch.randn(TOKENS, WIDTH))
        self.norm_before = (
            nn.LayerNorm(WIDTH) if drawn.noise == "norm" else nn.Dropout(0.0)
        )
        self.drop = nn.Dropout(0.1 if drawn.noise == "dropout" else 0.0)
        self.blocks = nn.ModuleList(Block(drawn.gives, drawn.keeps) for _ in range(4))
        if drawn.beside == "condition":
            self.condition = nn.Linear(TOKENS, TOKENS)
        if drawn.beside == "layer condition":
            self.conditions = nn.ModuleList(nn.Linear(TOKENS, TOKENS) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if drawn.heads.startswith("unused"):
            self.other = nn.Linear(WIDTH, 3)
        if drawn.heads == "teacher":
            self.teacher = copy.deepcopy(self.head)
        if drawn.heads == "pooled":
            self.pool = nn.Linear(WIDTH, WIDTH)
        if drawn.heads == "tied" and isinstance(self.words, nn.Embedding):
            self.head.weight = self.words.weight
        frozen = {
            "before": self.words,
            "blocks": self.blocks[1],
            "head": self.head,
        }.get(drawn.frozen)
        if frozen is not None:
            frozen.requires_grad_(False)
        self.example_input_array = torch.arange(2 * TOKENS).view(2, TOKENS) % WORDS

    def forward(self, tokens: torch.Tensor) -> Any:
        drawn = self.drawn
        # What comes before the blocks.
        mask = None
        if drawn.enters == "both":
            x, mask = self.words(tokens)
        elif drawn.enters in ("linear", "bag"):
            x = self.words(F.one_hot(tokens, WORDS).to(self.head.weight.dtype))
        else:
            x = self.words(tokens)
        if drawn.enters == "recurrent":
            x, (last, _) = self.recurrent(x)
            x = x + last[-1][:, None]
        if drawn.enters == "convolved":
            x = self.convolved(x.mT).mT
        length = tokens.shape[1]
        if drawn.places in ("number", "numbered"):
            x = x + self.places(length)
        elif drawn.places == "tensor":
            x = x + self.places(tokens)
        elif drawn.places == "keyword":
            x = x + self.places(length=length)
        elif drawn.places == "bare":
            x = x + self.table
        elif drawn.places == "buffer":
            x = x + self.offsets
        x = entered = self.drop(self.norm_before(x))
        if drawn.heads == "unused before":
            self.other(x)
        if drawn.beside == "mask":
            mask = (tokens != 1).to(x.dtype)
        elif drawn.beside == "condition":
            mask = self.condition(tokens.to(x.dtype))
        # The blocks.
        total, bias, hidden, middle = x.new_zeros(()), None, [], None
        for number, block in enumerate(self.blocks):
            if drawn.beside == "layer condition":
                mask = self.conditions[number](tokens.to(x.dtype))
            given = block(x, mask, bias)
            x = (
                given
                if isinstance(given, torch.Tensor)
                else given["x"]
                if isinstance(given, dict)
                else given[0]
            )
            if isinstance(given, (tuple, list)) and drawn.reads != "first":
                extra = given[1]
                if drawn.gives == "bias":
                    bias = extra
                elif drawn.reads == "adds" and not isinstance(extra, str):
                    total = total + (
                        0
                        if drawn.gives == "none" or drawn.gives == "list"
                        else torch.as_tensor(extra).mean()
                    )
                elif extra is not None and not isinstance(extra, str):
                    total = total + torch.as_tensor(extra).mean()
            hidden.append(x)
            middle = x if number == 1 else middle
        # What comes behind them.
        if drawn.beside == "skip":
            x = x + entered
        elif drawn.beside == "detached skip":
            x = x + entered.detach()
        elif drawn.beside == "middle skip":
            x = x + middle
        x = self.norm(x)
        if drawn.heads == "unused after":
            self.other(x)
        if drawn.heads == "pooled":
            x = x + self.pool(x[:, :1]).tanh()
        logits = self.head(x)
        if drawn.keeps == "sum of hidden":
            self.kept = sum(each.square().mean() for each in hidden)
        elif drawn.keeps == "size of logits":
            self.kept = logits.square().mean()
        if drawn.heads == "teacher":
            with torch.no_grad():
                taught = self.teacher(x)
            logits = logits + taught
        if drawn.heads == "detached tie" and isinstance(self.words, nn.Embedding):
            logits = logits + F.linear(x, self.words.weight.detach())
        if drawn.outputs == "dict":
            return {"logits": logits, "aux": total}
        if drawn.outputs == "tuple":
            return logits, total
        if drawn.outputs == "dataclass":
            return Scored(logits, None)
        if drawn.outputs == "all hidden":
            return logits, total, hidden
        return logits + total if drawn.reads != "first" else logits


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    given = model(tokens)
    given = given.logits if isinstance(given, Scored) else given
    logits = (
        given["logits"]
        if isinstance(given, dict)
        else given
        if isinstance(given, torch.Tensor)
        else given[0]
    )
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    aux = (
        given["aux"]
        if isinstance(given, dict)
        else given[1]
        if isinstance(given, tuple)
        else 0
    )
    return loss + 0.1 * aux + 0.1 * kept_by(model)


def kept_by(model: nn.Module) -> Any:
    """The sum of what the model or its blocks keep with a gradient."""
    kept = [each.kept for each in model.modules() if hasattr(each, "kept")]
    total: Any = 0
    for each in kept:
        for tensor in each if isinstance(each, list) else [each]:
            total = total + (tensor if tensor.requires_grad else 0)
    return total


def built(drawn: Drawn) -> Model:
    torch.manual_seed(0)
    return Model(drawn).double()


def units_of(drawn: Drawn) -> Any:
    """Stand-ins that are units, and stand-ins in units."""
    return {
        "auto": "auto",
        "small": {"min_parameters": 1},
        "named": ["Block", "Embedding", "Table", "Both", "LSTM", "Conv1d"],
        "leaves": {"modules": ["Block", "Linear"]},
    }[drawn.units]


def batches() -> torch.Tensor:
    return torch.randint(
        WORDS, (2, SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def alone(drawn: Drawn) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = built(drawn)
    optimizer, losses = optimizer_of(model), []
    for tokens in batches():
        parts = [loss_of(model, part) / 2 for part in tokens.chunk(2)]
        sum(parts).backward()  # type: ignore[union-attr]
        losses.append(float(sum(parts)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def outcome(drawn: Drawn) -> str:
    """What a case came to on this rank: "exact", "refused: ..." or what is wrong."""
    model = built(drawn)
    names = (
        [each for each in units_of(drawn)] if isinstance(units_of(drawn), list) else []
    )
    kinds = {type(module).__name__ for module in model.modules()}
    units = [name for name in names if name in kinds] or units_of(drawn)
    pipeline = {"microbatches": 2, "schedule": drawn.schedule}
    knobs: dict[str, Any] = {
        "shard_degree": drawn.shard,
        "pipeline_parallel_degree": drawn.stages,
        "pipeline": pipeline,
    }
    try:
        parallel = parallelize(model, SmpConfig(**knobs, units=units))
    except ValueError as error:
        return f"refused: {error}"
    try:
        losses = trained(parallel)
    except Exception as error:
        return f"late {type(error).__name__}: {error}"
    weights = of_all_stages(parallel, dict(parallel.module.named_parameters()))
    if drawn.noise == "dropout":
        return "exact"  # it ran; dropout draws other numbers
    expected, whole = alone(drawn)
    wrong = [
        f"loss {ours} instead of {theirs}"
        for ours, theirs in zip(losses, expected, strict=True)
        if abs(ours - theirs) > 1e-12
    ]
    wrong += [
        name
        for name, value in whole.items()
        if name in weights and not torch.allclose(weights[name], value, 0, 1e-11)
    ]
    wrong += sorted(whole.keys() - weights.keys())
    return f"wrong: {', '.join(wrong[:4])}" if wrong else "exact"


def trained(parallel: Any) -> list[float]:
    """Losses of the steps, on all ranks."""
    optimizer = optimizer_of(parallel.module)
    parallel.prepare_optimizer(optimizer)
    losses = []
    for tokens in batches():
        mine = tokens.chunk(parallel.mesh.data_size)[parallel.mesh.data_rank]
        parts = split_batch(mine, 2)
        calls = [
            lambda part=part: parallel.run_as_forward(loss_of, parallel.module, part)
            for part in parts
        ]
        found = parallel.pipeline.train(calls, lambda loss: loss, 0.5, mine)
        parallel.window.close()
        optimizer.step()
        optimizer.zero_grad()
        mean = parallel.pipeline.share(torch.stack(found).mean() if found else None)
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def outcomes(cases: list[Drawn]) -> list[str]:
    return [outcome(case) for case in cases]
