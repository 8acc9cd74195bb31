"""What some Transformers models read off their input's length, one process posing as
each rank in turn; and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.masking_utils import create_chunked_causal_mask

from smp_core.context_parallel.replaced_attention import SplitBatch, enabled
from smp_core.context_parallel.sequence_plan import decode
from smp_core.context_parallel.transformers_models import (
    adapt_transformers_models,
    check_model,
)
from tests.core.context_parallel.measuring import split_on
from tests.core.context_parallel.model_cases import LENGTH_DEPENDENT, MODELS, build
from tests.older_transformers import needs_chunks_of_documents

CHUNK = 5


def tokens(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(rows, length, dtype=torch.long)}


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_frequencies_follow_the_whole_sequence_from_call_to_call(name: str) -> None:
    """Longer and shorter than the original length (16) and than what came before, on
    the rank that has the sequence's end and on the one that has not; sequences so short
    that their padding counts further than they do."""
    whole = build(name).model.rotary_emb
    ranks = [build(name) for _ in range(2)]
    seen, largest = [], []
    for model in ranks:
        adapt_transformers_models(model)
        model.model.rotary_emb.register_forward_pre_hook(
            lambda _, args: largest.append(int(args[1].max()))
        )
    for length in (12, 30, 20, 10, 1, 26):
        x = torch.zeros(1, length, 4, dtype=torch.float64)
        expected = whole(x, torch.arange(length)[None])
        for rank, model in enumerate(ranks):
            split = split_on(rank, tokens(length))
            real = split.plan.positions(rank) < length
            with enabled(split):
                found = model.model.rotary_emb(x, split.position_ids)
            for mine, theirs in zip(found, expected, strict=True):
                assert mine.shape == (2, split.plan.local_length, 4)
                torch.testing.assert_close(
                    mine[:1, real],
                    theirs[:, split.plan.positions(rank)[real]],
                    rtol=0,
                    atol=0,
                )
        assert largest[-2:] == [length - 1] * 2
        seen.append(whole.inv_freq.tolist())
    assert len({tuple(frequencies) for frequencies in seen}) > 1, (
        "the lengths make no difference"
    )
    with enabled(None):
        assert ranks[0].model.rotary_emb(x, torch.arange(3)[None])[0].shape == (
            1,
            3,
            4,
        ), "outside it is as it was"


def shown(split: SplitBatch) -> torch.Tensor:
    """[B, S, S]: who sees whom in a layer that sees chunks, by the rectangles of both
    ranks."""
    plan = decode(split.encoded_in_chunks(CHUNK))
    rows = len(next(iter(split.batch.values())))
    seen = torch.zeros(rows, plan.length, plan.length, dtype=torch.bool)
    for rank in range(plan.degree):
        where = plan.positions(rank)
        for call in plan.calls(rank, True, None):
            q, k, row = (
                call.queries[0],
                call.keys[0],
                slice(None) if call.row is None else call.row,
            )
            for n_q, n_k in call.segments:
                first = int(where[q])
                seen[row, first : first + n_q, k : k + n_k] = torch.ones(
                    n_q, n_k, dtype=torch.bool
                ).tril(n_k - n_q)
                q, k = q + n_q, k + n_k
    return seen[:, : split.length, : split.length]


def counted(*starts: tuple[int, int], length: int) -> list[int]:
    """Positions that go on from ``(index, position)`` to the next one."""
    found: list[int] = []
    for index, position in starts:
        found[index:] = range(position, position + length - index)
    return found


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"position_ids": [counted((0, 3), length=22)] * 2},
        {
            "position_ids": [
                counted((0, 0), (4, 0), (13, 0), length=22),
                counted((0, 0), (21, 0), length=22),
            ]
        },
        {
            "position_ids": [
                counted((0, 7), (9, 0), length=22),
                counted((0, 3), length=22),
            ]
        },
        {
            "position_ids": [
                counted((0, 7), (9, 4), length=22),
                counted((0, 6), (9, 0), length=22),
            ]
        },
        {"attention_mask": [[0] * 3 + [1] * 19, [1] * 22]},
        {"attention_mask": [[1] * 19 + [0] * 3, [0] * 4 + [1] * 10 + [0] * 8]},
        {
            "attention_mask": [[0] * 3 + [1] * 19] * 2,
            "position_ids": [counted((0, 3), length=22)] * 2,
        },
    ],
    ids=[
        "plain",
        "continued",
        "packed",
        "packed and continued",
        "alike",
        "left",
        "right",
        "left and continued",
    ],
)
@needs_chunks_of_documents
def test_chunks_begin_where_transformers_has_them_begin(batch: dict[str, Any]) -> None:
    """Every pair of real tokens; the mask is the installed Transformers' own."""
    batch = {key: torch.tensor(rows) for key, rows in batch.items()}
    config = MODELS["llama4"]()
    config._attn_implementation = "sdpa"
    takes = inspect.signature(create_chunked_causal_mask).parameters
    more: dict[str, Any] = {"cache" if "cache" in takes else "past_key_values": None}
    if "cache_position" in takes:  # Transformers 4
        more["cache_position"] = torch.arange(22)
    expected = create_chunked_causal_mask(
        config,
        torch.zeros(2, 22, 1),
        attention_mask=batch.get("attention_mask"),
        position_ids=batch.get("position_ids"),
        **more,
    )[:, 0]
    split = split_on(0, {**tokens(22), **batch})
    real = batch.get("attention_mask", torch.ones(2, 22)).bool()
    assert torch.equal(shown(split) & real[:, :, None], expected & real[:, :, None])
    assert expected[:, :, 0].sum() < 2 * 22, "no chunk ends"


def test_chunks_across_documents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Transformers 4."""
    monkeypatch.delattr(
        masking_utils, "remap_positions_for_packed_sequence", raising=False
    )
    with pytest.raises(
        ValueError, match=r"chunked_attention.*across the documents.*transformers>=5"
    ):
        adapt_transformers_models(build("llama4"))


@pytest.mark.parametrize("padded", [False, True])
def test_sinks_count_in_whole_sequences_too(padded: bool) -> None:
    """Evaluation and generation outside a split batch, where "sdpa" would drop them.
    1e-12: float64 rounding."""
    ours, theirs = build("gpt_oss").eval(), build("gpt_oss").eval()
    adapt_transformers_models(ours)
    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, : 3 * padded] = 0
    with torch.no_grad():
        logits = [
            model(ids, attention_mask=mask).logits[mask.bool()]
            for model in (ours, theirs)
        ]
        assert (logits[0] - logits[1]).abs().max() <= 1e-12
        options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(
            ours.generate(ids, **options), theirs.generate(ids, **options)
        )
    loss = [
        model(ids, attention_mask=mask, labels=ids).loss for model in (ours, theirs)
    ]
    gradients = [
        torch.autograd.grad(one, model.model.layers[1].self_attn.sinks)[0]
        for one, model in zip(loss, (ours, theirs), strict=True)
    ]
    assert gradients[1].abs().max() > 1e-4
    # Transformers' loss is float32.
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-7


def changed(kind: str, **changes: Any) -> Any:
    model = build(kind)
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def without_rotary_modules() -> Any:
    model = build("llama_dynamic")
    del model.model.rotary_emb
    return model


def encoder_decoder() -> Any:
    sizes = {
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 8,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 11,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def alibi() -> Any:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=11, hidden_size=8, n_layer=1, n_head=2)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            without_rotary_modules,
            "rope_type='dynamic' depends on the length of the sequence",
        ),
        (
            lambda: changed("llama4", attention_chunk_size=None),
            "no attention_chunk_size; set it in the config",
        ),
        (
            lambda: changed("llama", layer_types=["linear_attention"]),
            "layers of type 'linear_attention'",
        ),
        (
            lambda: changed("gemma3", attn_logit_softcapping=50.0),
            r"attn_logit_softcapping=50\.0: capped scores",
        ),
        (
            lambda: changed("llama", attention_dropout=0.1),
            r"set config\.attention_dropout = 0\.0",
        ),
        (encoder_decoder, "is an encoder-decoder"),
        (alibi, "takes no position_ids"),
    ],
    ids=["rope", "chunks", "layers", "capped", "dropout", "encoder-decoder", "alibi"],
)
def test_what_would_be_wrong_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(make())
