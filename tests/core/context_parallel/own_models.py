"""Random models of one's own: features that look along the tokens outside of attention,
and features that do not."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from smp_core.context_parallel.replaced_attention import positions, weighted_mean

VOCABULARY, WIDTH, LENGTH, TABLE = 29, 16, 16, 64

WRONG = (
    *(
        "arange",
        "sliced table",
        "sinusoids",
        "cumsum of a mask",
        "rotary by length",
        "tril",
        "fixed table",
    ),
    *(
        "conv",
        "depthwise conv",
        "average pool",
        "max pool",
        "max",
        "mean",
        "centered",
        "class token",
        "last token",
    ),
    *(
        "roll",
        "difference",
        "cumulative sum",
        "flip",
        "token mixing",
        "softmax over tokens",
        "gru",
        "lstm",
    ),
    *(
        "bag of tokens",
        "own attention",
        "fft",
        "token shift",
        "sorted",
        "unfold",
        "flatten",
    ),
)
WRONG_STEPS = ("shifted step", "class step", "last step", "mean step")
DIVIDED_STEPS = (
    "class weights step",
    "constant step",
    "half step",
    "masked step",
    "masked sum step",
    "padded mean step",
    "row means step",
    "smooth step",
    "smooth constant step",
    "squares step",
    "sum step",
    "weighted terms step",
)
WRONG_ENDS = (
    "shifted loss",
    "class head",
    "last head",
    "mean head",
    "rolled targets",
    "sequence loss",
)
FINE = (
    *(
        "mlp",
        "norm",
        "glu",
        "layer scale",
        "bias by position",
        "sinusoids by position",
        "dropout 0",
        "dropout",
    ),
    *(
        "conv over channels",
        "group norm of channels",
        "experts",
        "router",
        "rotary",
        "embedding of inputs",
        "noise",
    ),
    *(
        "bidirectional",
        "causal",
        "grouped",
        "multi-head",
        "encoder layer",
        "checkpointed",
        "reshaped",
        "buffer",
    ),
)
ENDS = ("logits", "loss", "weighted loss", "tuple", "mapping", "flat logits")


@dataclass(frozen=True)
class Case:
    """A model: features in order, how it ends, and what the step makes of its
    logits."""

    features: tuple[str, ...]
    end: str
    step: str = "cross entropy"
    takes_positions: bool = False

    @property
    def is_right(self) -> bool:
        return not {*self.features, self.end, self.step} & {
            *WRONG,
            *WRONG_ENDS,
            *WRONG_STEPS,
        }


def draw(seed: int) -> Case:
    """Every second case has one wrong thing; among any 82 there is each of them."""
    seeded = random.Random(seed)
    features = seeded.sample(FINE, seeded.randint(1, 4))
    end, step = seeded.choice(ENDS), "cross entropy"
    if seed % 2:
        everything = (*WRONG, *WRONG_ENDS, *WRONG_STEPS)
        wrong = everything[seed // 2 % len(everything)]
        if wrong in WRONG:
            features.insert(seeded.randint(0, len(features)), wrong)
        elif wrong in WRONG_ENDS:
            end = wrong
        else:
            end, step = "logits", wrong
    return Case(tuple(features), end, step, seeded.random() < 0.3)


class Feature(nn.Module):
    """One feature of a model: [B, L, WIDTH] -> the same, added to its input."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.scale = (
            nn.Linear(WIDTH, 3),
            nn.Parameter(torch.rand(WIDTH) + 0.5),
        )
        self.table, self.norm = nn.Embedding(TABLE, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.learned = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        conv = {"conv": 1, "depthwise conv": WIDTH}.get(name, 1)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=conv)
        self.channels = nn.Conv1d(WIDTH, WIDTH, 1)
        self.group_norm, self.mix = nn.GroupNorm(4, WIDTH), nn.Linear(LENGTH, LENGTH)
        self.rnn: Any = (
            nn.LSTM(WIDTH, WIDTH, batch_first=True) if name == "lstm" else None
        )
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True) if name == "gru" else self.rnn
        self.heads = (
            nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            if name == "multi-head"
            else None
        )
        layer = name == "encoder layer"
        self.layer = (
            nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)
            if layer
            else None
        )
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(
        self, x: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        return x + self.out(self.compute(self.norm(x), tokens, places))

    def compute(
        self, x: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        return getattr(self, f"_{self.name.replace(' ', '_').replace('-', '_')}")(
            x, tokens, places
        )

    # What counts positions by its own length

    def _arange(self, x: Any, *_: Any) -> Any:
        return x + self.table(torch.arange(x.shape[1]))

    def _sliced_table(self, x: Any, *_: Any) -> Any:
        return x + self.table.weight[: x.shape[1]]

    def _fixed_table(self, x: Any, *_: Any) -> Any:
        return x + self.learned

    def _sinusoids(self, x: Any, *_: Any) -> Any:
        return x + _waves(torch.linspace(0, x.shape[1] - 1, x.shape[1], dtype=x.dtype))

    def _cumsum_of_a_mask(self, x: Any, tokens: Any, _: Any) -> Any:
        return x + self.table((tokens >= 0).cumsum(1) - 1)

    def _rotary_by_length(self, x: Any, *_: Any) -> Any:
        return self._attend(_rotated(x, torch.arange(x.shape[1])[None]), causal=True)

    def _tril(self, x: Any, *_: Any) -> Any:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return (mask / mask.sum(1, keepdim=True)) @ self.into(x)

    # What mixes tokens

    def _conv(self, x: Any, *_: Any) -> Any:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)

    _depthwise_conv = _conv

    def _average_pool(self, x: Any, *_: Any) -> Any:
        return F.avg_pool1d(x.transpose(1, 2), 3, stride=1, padding=1).transpose(1, 2)

    def _max_pool(self, x: Any, *_: Any) -> Any:
        return F.max_pool1d(x.transpose(1, 2), 3, stride=1, padding=1).transpose(1, 2)

    def _max(self, x: Any, *_: Any) -> Any:
        return x - x.amax(1, keepdim=True)

    def _mean(self, x: Any, *_: Any) -> Any:
        return x + self.into(x.mean(1, keepdim=True))

    def _centered(self, x: Any, *_: Any) -> Any:
        return F.layer_norm(x, x.shape[1:])

    def _class_token(self, x: Any, *_: Any) -> Any:
        return x * self.into(x[:, :1])

    def _last_token(self, x: Any, *_: Any) -> Any:
        return x * self.into(x[:, -1]).unsqueeze(1)

    def _roll(self, x: Any, *_: Any) -> Any:
        return torch.roll(x, 1, 1)

    def _difference(self, x: Any, *_: Any) -> Any:
        return torch.diff(x, dim=1, prepend=x[:, :1])

    def _cumulative_sum(self, x: Any, *_: Any) -> Any:
        return x.cumsum(1) / x.shape[1]

    def _flip(self, x: Any, *_: Any) -> Any:
        return x + x.flip(1)

    def _token_mixing(self, x: Any, *_: Any) -> Any:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)

    def _softmax_over_tokens(self, x: Any, *_: Any) -> Any:
        return x * self.into(x).softmax(1)

    def _gru(self, x: Any, *_: Any) -> Any:
        return self.rnn(x)[0]

    _lstm = _gru

    def _bag_of_tokens(self, x: Any, tokens: Any, _: Any) -> Any:
        return (
            x
            + F.one_hot(tokens, VOCABULARY)
            .sum(1, keepdim=True)
            .to(x.dtype)[..., :WIDTH]
        )

    def _own_attention(self, x: Any, *_: Any) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(1, 2) / WIDTH**0.5).softmax(-1) @ v

    def _fft(self, x: Any, *_: Any) -> Any:
        return torch.fft.fft(x, dim=1).real

    def _token_shift(self, x: Any, *_: Any) -> Any:
        return 0.5 * x + 0.5 * F.pad(x, (0, 0, 1, -1))

    def _sorted(self, x: Any, *_: Any) -> Any:
        return x.sort(1).values

    def _unfold(self, x: Any, *_: Any) -> Any:
        return F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1)

    def _flatten(self, x: Any, *_: Any) -> Any:
        return x + x.flatten(1)[:, : x.shape[1] * WIDTH : x.shape[1]].unsqueeze(1)

    # What does not

    def _mlp(self, x: Any, *_: Any) -> Any:
        return F.gelu(self.into(x))

    def _norm(self, x: Any, *_: Any) -> Any:
        return F.layer_norm(x, (WIDTH,)) * self.scale

    def _glu(self, x: Any, *_: Any) -> Any:
        return self.into(x) * x.sigmoid()

    def _layer_scale(self, x: Any, *_: Any) -> Any:
        return x * self.scale

    def _bias_by_position(self, x: Any, _: Any, places: Any) -> Any:
        return x + self.table(places)

    def _sinusoids_by_position(self, x: Any, _: Any, places: Any) -> Any:
        return x + _waves(places.to(x.dtype))

    def _dropout_0(self, x: Any, *_: Any) -> Any:
        return F.dropout(x, 0.0, self.training)

    def _dropout(self, x: Any, *_: Any) -> Any:
        return F.dropout(x, 0.0, True) + 0 * F.dropout(x, 0.3, True)

    def _noise(self, x: Any, *_: Any) -> Any:
        return x + 0 * torch.randn_like(x)

    def _conv_over_channels(self, x: Any, *_: Any) -> Any:
        return self.channels(x.transpose(1, 2)).transpose(1, 2)

    def _group_norm_of_channels(self, x: Any, *_: Any) -> Any:
        return self.group_norm(x.flatten(0, 1)).view_as(x)

    def _experts(self, x: Any, *_: Any) -> Any:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for expert in range(3):
            rows, slots = torch.where(chosen == expert)
            out.index_add_(
                0,
                rows,
                self.into(flat[rows]) * weights[rows, slots, None] * (expert + 1),
            )
        return out.view_as(x)

    def _router(self, x: Any, *_: Any) -> Any:
        flat = x.flatten(0, 1)
        order = self.gate(flat).argmax(-1).argsort()
        return self.into(flat[order])[order.argsort()].view_as(x)

    def _rotary(self, x: Any, _: Any, places: Any) -> Any:
        return self._attend(_rotated(x, places), causal=True)

    def _embedding_of_inputs(self, x: Any, tokens: Any, _: Any) -> Any:
        return x + self.table(tokens)

    def _bidirectional(self, x: Any, *_: Any) -> Any:
        return self._attend(x, causal=False)

    def _causal(self, x: Any, *_: Any) -> Any:
        return self._attend(x, causal=True)

    def _grouped(self, x: Any, *_: Any) -> Any:
        q, k, v = self.qkv(x).split([WIDTH, WIDTH, WIDTH], -1)
        q, k, v = (
            part.unflatten(-1, (-1, 4)).transpose(1, 2)
            for part in (q, k[..., :8], v[..., :8])
        )
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )

    def _multi_head(self, x: Any, *_: Any) -> Any:
        assert self.heads is not None
        return self.heads(x, x, x, need_weights=False)[0]

    def _encoder_layer(self, x: Any, *_: Any) -> Any:
        assert self.layer is not None
        return self.layer(x)

    def _checkpointed(self, x: Any, *_: Any) -> Any:
        return checkpoint(self._attend, x, True, use_reentrant=False)

    def _reshaped(self, x: Any, *_: Any) -> Any:
        flat = x.reshape(-1, WIDTH)
        return self.into(flat).reshape(x.shape)

    def _buffer(self, x: Any, *_: Any) -> Any:
        if self.training:
            self.steps += 1
        return x / (1 + 0.1 * self.steps.to(x.dtype))

    def _attend(self, x: torch.Tensor, causal: bool) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, 4)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            .transpose(1, 2)
            .flatten(2)
        )


class OwnModel(nn.Module):
    """``forward(tokens, targets, places)`` returns what ``case.end`` says."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.case = case
        self.words, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.features = nn.ModuleList(Feature(name) for name in case.features)

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        places: torch.Tensor | None = None,
    ) -> Any:
        places = positions(tokens) if places is None else places
        x = self.words(tokens)
        for feature in self.features:
            x = feature(x, tokens, places)
        return self._end(x, tokens, targets)

    def _end(self, x: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        end = self.case.end
        if end in ("class head", "last head", "mean head"):
            return self.head(
                {"class head": x[:, 0], "last head": x[:, -1], "mean head": x.mean(1)}[
                    end
                ]
            )
        logits = self.head(x)
        if end == "shifted loss":
            return F.cross_entropy(
                logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
            )
        if end == "rolled targets":
            return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if end == "sequence loss":
            return loss + logits.mean(1).square().mean()
        ends = {
            "logits": logits,
            "loss": loss,
            "tuple": (logits, loss),
            "mapping": {"loss": loss, "logits": logits},
        }
        ends |= {"flat logits": logits.flatten(0, 1)}
        return weighted_mean(loss) if end == "weighted loss" else ends[end]


def loss_of(
    output: Any, targets: torch.Tensor, step: str = "cross entropy"
) -> torch.Tensor:
    """The loss of what a model returned."""
    if step == "shifted step":
        return F.cross_entropy(output[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    if step in (*WRONG_STEPS, "all tokens step"):
        pooled = {
            "class step": output[:, 0],
            "last step": output[:, -1],
            "mean step": output.mean(1),
            "all tokens step": output,
        }[step]
        return pooled.logsumexp(-1).square().mean()
    if step in DIVIDED_STEPS:
        return _divided(output.flatten(0, 1), targets, step)
    if isinstance(output, dict):
        return output["loss"]
    if isinstance(output, tuple):
        return output[1]
    if output.dim() == 0:
        return output
    if output.shape[0] == targets.shape[0] and output.dim() == 2:
        return output.square().mean()
    return F.cross_entropy(output.reshape(-1, VOCABULARY), targets.flatten())


def _divided(logits: torch.Tensor, targets: torch.Tensor, step: str) -> torch.Tensor:
    """A sum of cross entropies, divided in one of several ways."""
    flat, is_target = targets.flatten(), targets != -100
    if step == "class weights step":
        weights = torch.linspace(0.5, 1.5, VOCABULARY, dtype=logits.dtype)
        return F.cross_entropy(logits, flat, weights)
    smoothing = 0.1 if "smooth" in step else 0.0
    values = F.cross_entropy(
        logits, flat, reduction="none", label_smoothing=smoothing
    ).view(targets.shape)
    # A z-loss, whose gradient is one of the probabilities too.
    z = logits.logsumexp(-1).view(targets.shape).square() * is_target * 0.01
    mask = is_target & (targets % 3 != 0)
    return {
        "constant step": lambda: values.sum() / 40,
        "smooth step": lambda: (values + z).sum() / is_target.sum(),
        "smooth constant step": lambda: (values + z).sum() / 40,
        "squares step": lambda: (
            (logits.square().mean(-1).view(targets.shape) * is_target).sum()
            / is_target.sum()
        ),
        "half step": lambda: 0.5 * values.sum() / is_target.sum(),
        "masked step": lambda: (values * mask).sum() / mask.sum(),
        "masked sum step": lambda: (values * mask).sum() / is_target.sum(),
        "padded mean step": values.mean,
        "row means step": lambda: (values.sum(1) / is_target.sum(1)).mean(),
        "sum step": values.sum,
        "weighted terms step": lambda: (values * (targets + 1)).sum() / is_target.sum(),
    }[step]()


def _waves(places: torch.Tensor) -> torch.Tensor:
    rates = torch.arange(1, WIDTH + 1, dtype=places.dtype) / WIDTH
    return (places[..., None] * rates).sin()


def _rotated(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    waves, half = _waves(places.to(x.dtype)), WIDTH // 2
    return x * waves.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * waves
