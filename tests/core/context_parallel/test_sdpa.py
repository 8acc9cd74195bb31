"""Any module that calls torch's attention, inside ``enabled(...)``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

from smp_core.context_parallel.batch import ContextParallel
from smp_core.context_parallel.key_value_exchange import register_group
from smp_core.context_parallel.replaced_attention import SplitBatch, enabled, positions
from smp_core.context_parallel.sequence_plan import SequencePlan
from tests.harness import run_ranks

WIDTH, LENGTH, VOCABULARY = 16, 13, 11


class Block(nn.Module):
    """Attention by every name there is."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 20, dropout=0.0, batch_first=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "nn.TransformerEncoderLayer":
            return self.layer(x)
        q, k, v = (
            part.unflatten(-1, (-1, 4)).transpose(1, 2)
            for part in self.qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        )
        attend = (
            imported_by_name
            if self.way == "imported"
            else F.scaled_dot_product_attention
        )
        return x + attend(
            q, k, v, is_causal=self.way != "bidirectional", enable_gqa=True
        ).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, way: str, checkpointing: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.places = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(32, WIDTH),
        )
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(positions(tokens))
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.checkpointing
                else block(x)
            )
        return x @ self.words.weight.T


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
    target = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
    target[0, 4:] = -100
    return tokens, target


def gradient_errors(way: str, checkpointing: bool) -> float:
    context = ContextParallel(register_group(dist.group.WORLD))
    whole, mine = (Model(way, checkpointing).double() for _ in range(2))
    tokens, target = pair()
    F.cross_entropy(whole(tokens).flatten(0, 1), target.flatten()).backward()
    split = context.split((tokens, target))
    local, local_target = split.batch
    with enabled(split):
        logits = mine(local)
        loss = (
            F.cross_entropy(
                logits.flatten(0, 1), local_target.flatten(), reduction="sum"
            )
            / split.tokens_per_rank
        )
        loss.backward()
    worst = 0.0
    for one, other in zip(mine.parameters(), whole.parameters(), strict=True):
        if other.grad is None:
            continue
        dist.all_reduce(one.grad)
        worst = max(
            worst, (one.grad / dist.get_world_size() - other.grad).abs().max().item()
        )
    return worst


WAYS = ["F", "imported", "bidirectional", "nn.TransformerEncoderLayer"]


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_module_has_the_gradients_of_one_process(way: str) -> None:
    """Padded from 13 to 16 tokens, uneven targets, checkpointed. A bidirectional model
    sees padding only if the plan does not know it is there; it does. 1e-12: float64
    rounding."""
    for error in run_ranks(gradient_errors, 4, way, True):
        assert error <= 1e-12


def split_of_one() -> SplitBatch:
    return SplitBatch(None, SequencePlan(1, 8), 8, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.zeros(8, 8)}, "attn_mask"),
        ({"dropout_p": 0.1}, "attention dropout of 0.1"),
        ({"length": 6}, "do not fit the batch's plan"),
        ({"keys": 4}, "cross-attention"),
        ({"heads": 3}, "not a multiple"),
        ({"kv_heads": 2}, "enable_gqa=True"),
        ({"key_dtype": torch.float64}, "one dtype"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_form_over_ranks_is_refused(
    options: dict[str, Any], message: str
) -> None:
    options = dict(options)
    length, heads = options.pop("length", 8), options.pop("heads", 4)
    kv_heads = options.pop("kv_heads", heads if heads != 3 else 2)
    q = torch.randn(1, heads, length, 4)
    k = v = torch.randn(1, kv_heads, options.pop("keys", length), 4)
    k = v = k.to(options.pop("key_dtype", k.dtype))
    with enabled(split_of_one()), pytest.raises(ValueError, match=message):
        F.scaled_dot_product_attention(q, k, v, enable_gqa=heads == 3, **options)


def test_attention_weights_of_whole_sequences_are_refused() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 8, 8)
    with enabled(split_of_one()):
        with pytest.raises(ValueError, match="need_weights=False"):
            layer(x, x, x)
        out, _ = layer(x, x, x, need_weights=False)
    torch.testing.assert_close(out, layer(x, x, x)[0])


def test_outside_nothing_is_changed() -> None:
    q = torch.randn(1, 2, 5, 4)
    before = F.scaled_dot_product_attention(q, q, q)
    with enabled(None):
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), before)
    with pytest.raises(RuntimeError, match="stop"):
        with enabled(split_of_one()):
            raise RuntimeError("stop")
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), before)


def test_a_module_that_is_imported_inside_has_torchs_attention_outside() -> None:
    imported: dict[str, Any] = {}
    with enabled(split_of_one()):
        exec("from torch.nn.functional import scaled_dot_product_attention", imported)
    q = torch.randn(1, 2, 5, 4)
    found = imported["scaled_dot_product_attention"](q, q, q, is_causal=True)
    assert torch.equal(found, F.scaled_dot_product_attention(q, q, q, is_causal=True))


def test_autocast_reaches_attention() -> None:
    q = torch.randn(1, 2, 8, 4)
    with enabled(split_of_one()), torch.autocast("cpu", torch.bfloat16):
        assert (
            F.scaled_dot_product_attention(q, q, q, is_causal=True).dtype
            == torch.bfloat16
        )


def compiled_errors(backend: str) -> float:
    context = ContextParallel(register_group(dist.group.WORLD))
    model = Model("F", False).double()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    worst = 0.0
    for stance in ("default", "fail_on_recompile"):
        split = context.split(pair())  # another one of the same size is the same graph
        found = []
        for call in (model, compiled):
            with torch.compiler.set_stance(stance), enabled(split):
                call(split.batch[0]).square().sum().backward()
            found.append(
                torch.cat(
                    [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                )
            )
            model.zero_grad()
        worst = max(worst, (found[0] - found[1]).abs().max().item())
    return worst


# In the normal run: tests/core/context_parallel/test_models.py compiles layers.
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_plain_module_compiles_as_one_graph(backend: str) -> None:
    for error in run_ranks(compiled_errors, 2, backend, timeout=600):
        assert error <= 1e-12
