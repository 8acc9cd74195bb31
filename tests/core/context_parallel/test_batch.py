"""Batches split along the sequence: targets, documents, padding, counts, and what is
refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from smp_core.context_parallel.batch import BatchLayout, ContextParallel
from smp_core.context_parallel.key_value_exchange import register_group
from smp_core.context_parallel.replaced_attention import (
    enabled,
    part_of_mean,
    positions,
    weighted_mean,
)
from tests.core.context_parallel.measuring import DEGREE, split_on
from tests.harness import run_ranks


def rejoined(
    batch: Any, read: Any, layout: BatchLayout | None = None, **options: Any
) -> torch.Tensor:
    """A tensor of the split batches, put together again."""
    parts = [split_on(rank, batch, layout, **options) for rank in range(DEGREE)]
    return (
        parts[0]
        .plan.in_sequence_order(
            torch.cat([read(part).transpose(0, 1) for part in parts])
        )
        .transpose(0, 1)
    )


TOKENS = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]])


def test_labels_are_shifted_before_they_are_split() -> None:
    batch = {"input_ids": TOKENS, "labels": TOKENS.clone()}
    targets = rejoined(batch, lambda part: part.shift_labels)
    assert targets.tolist() == [
        [11, 12, 13, 14, 15, -100, -100, -100],
        [21, 22, 23, 24, 25, -100, -100, -100],
    ]
    # Where somebody shifts once more there is nothing to learn from.
    assert (rejoined(batch, lambda part: part.batch["labels"]) == -100).all()
    assert torch.equal(batch["labels"], TOKENS)


def test_models_that_do_not_shift_get_their_labels_where_they_are() -> None:
    batch = {"input_ids": TOKENS, "labels": TOKENS.clone()}
    labels = rejoined(batch, lambda part: part.batch["labels"], shifts=False)
    assert torch.equal(labels[:, :6], TOKENS) and (labels[:, 6:] == -100).all()


@pytest.mark.parametrize(
    "told_by",
    [
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0]])},
        {"document_ids": torch.tensor([[7, 7, 8, 8, 8, 8], [1, 1, 1, 1, 1, 5]])},
        {"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])},
    ],
    ids=lambda told: next(iter(told)),
)
def test_packed_documents_restart_and_do_not_predict_one_another(
    told_by: dict[str, torch.Tensor],
) -> None:
    batch = {"input_ids": TOKENS, "labels": TOKENS, **told_by}
    part = split_on(0, batch)
    assert part.plan.documents == ((0, 2, 6), (0, 5, 6))
    assert set(part.batch) == {"input_ids", "labels", "shift_labels", "position_ids"}
    assert rejoined(batch, lambda part: part.position_ids)[:, :6].tolist() == [
        [0, 1, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 0],
    ]
    targets = rejoined(batch, lambda part: part.shift_labels)[:, :6]
    assert targets.tolist() == [
        [11, -100, 13, 14, 15, -100],
        [21, 22, 23, 24, -100, -100],
    ]


def test_padding_is_a_document_of_its_own() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    batch = {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": mask}
    assert split_on(0, batch).plan.documents == ((0, 2, 6), (0, 3, 6))
    # The last padding token predicts nothing.
    assert rejoined(batch, lambda part: part.shift_labels)[0, 1] == -100
    assert rejoined(batch, lambda part: part.batch["attention_mask"])[:, 6:].sum() == 0


def test_other_tensors_of_the_sequence_are_split_and_others_are_not() -> None:
    batch = {
        "inputs_embeds": torch.randn(2, 6, 3),
        "token_type_ids": TOKENS,
        "ids": torch.tensor([1, 2]),
        "name": "x",
    }
    part = split_on(1, batch)
    assert part.batch["inputs_embeds"].shape == (2, 4, 3) and part.batch[
        "token_type_ids"
    ].shape == (2, 4)
    assert part.batch["ids"].tolist() == [1, 2] and part.batch["name"] == "x"
    assert torch.equal(
        rejoined(batch, lambda part: part.batch["inputs_embeds"])[:, :6],
        batch["inputs_embeds"],
    )


class Pair(NamedTuple):
    tokens: torch.Tensor
    target: torch.Tensor


def test_pairs_are_split_as_they_are() -> None:
    target = TOKENS + 100
    for batch in ((TOKENS, target), [TOKENS, target], Pair(TOKENS, target)):
        part = split_on(0, batch)
        assert type(part.batch) is type(batch)
        assert (
            rejoined(batch, lambda part: part.batch[1])[:, :6].tolist()
            == target.tolist()
        )
        assert (
            rejoined(batch, lambda part: part.shift_labels)[:, 6:].tolist()
            == [[-100, -100]] * 2
        )


def test_a_mask_behind_the_targets_is_no_target() -> None:
    batch = (TOKENS, TOKENS + 100, TOKENS > 12)
    targets = rejoined(batch, lambda part: part.shift_labels)
    assert targets[:, :6].equal(TOKENS + 100) and (targets[:, 6:] == -100).all()
    mask = rejoined(batch, lambda part: part.batch[2])
    assert mask[:, :6].equal(TOKENS > 12) and not mask[:, 6:].any()


def test_the_layout_says_keys_dims_and_values() -> None:
    """[S, B] tensors under other names."""
    batch = {
        "words": TOKENS.T.contiguous(),
        "next": TOKENS.T + 1,
        "weights": torch.ones(6, 2),
    }
    layout = BatchLayout(
        dims={"words": 0, "next": 0},
        targets="next",
        shift_targets=False,
        order="contiguous",
        pad_values={"words": 9},
    )
    parts = [split_on(rank, batch, layout) for rank in range(2)]
    words = torch.cat([part.batch["words"] for part in parts])
    assert words.tolist() == [*TOKENS.T.tolist(), [9, 9], [9, 9]]
    assert (
        torch.cat([part.batch["next"] for part in parts])[6:].tolist()
        == [[-100, -100]] * 2
    )
    assert parts[0].batch["weights"].shape == (6, 2)
    assert parts[0].plan.order == "contiguous"


@pytest.mark.parametrize(
    ("batch", "layout", "message"),
    [
        (TOKENS, None, "a mapping with input_ids and labels, or a tuple"),
        ({"x": TOKENS}, None, "neither input_ids nor inputs_embeds"),
        ((torch.tensor([1, 2]), TOKENS), None, "has no sequence"),
        (
            {"input_ids": TOKENS, "labels": torch.tensor([0, 1])},
            None,
            "labels of .2,. are not per token",
        ),
        (
            {"input_ids": TOKENS, "attention_mask": torch.ones(2, 1, 6, 6)},
            None,
            r"attention_mask has to be \[B, S\]",
        ),
        (
            {
                "input_ids": TOKENS,
                "attention_mask": torch.tensor([[1] * 6, [1, 1, 0, 0, 1, 1]]),
            },
            None,
            "row 1 has zeros between tokens of one document .after token 1.",
        ),
        (
            {"input_ids": TOKENS, "position_ids": torch.zeros(3, 2, 6)},
            None,
            "multimodal positions",
        ),
        (
            {"a": TOKENS, "b": TOKENS[:, :3]},
            BatchLayout(dims={"a": 1, "b": 1}),
            "differ in length: {'a': 6, 'b': 3}",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_batches_that_cannot_be_split_are_refused(
    batch: Any, layout: BatchLayout | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        split_on(0, batch, layout)


def test_a_hole_between_documents_is_padding() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
    batch = {
        "input_ids": TOKENS[:1],
        "attention_mask": mask,
        "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1]]),
    }
    assert split_on(0, batch).plan.documents == ((0, 2, 3, 4, 6),)


def counted_and_gathered() -> dict[str, Any]:
    """Two pairs of context ranks; other batches on every rank, of which the first of
    each pair counts."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    context = ContextParallel(register_group(pairs[rank // 2]), dist.group.WORLD)
    tokens = torch.arange(6)[None] + 10 * rank
    target = tokens.clone()
    target[:, : 1 + rank] = -100
    split = context.split((tokens, target))
    _, local = split.batch
    outputs = context.gather_all(
        {"logits": split.batch[0][..., None].float(), "loss": torch.tensor(1.0)}, split
    )
    with enabled(split):
        of_targets = torch.where(local != -100, local, 0).sum() / (local != -100).sum()
        automatic = part_of_mean(of_targets)
        part = weighted_mean(of_targets)
        assert torch.equal(automatic, part)
        assert part_of_mean(part) is part, "a loss is weighted once"
        where = positions(split.batch[0])
    total = part.clone()
    dist.all_reduce(total)
    return {
        "tokens": outputs["logits"].flatten().tolist(),
        "loss": outputs["loss"].item(),
        "mean": (total / dist.get_world_size()).item(),
        "positions": where.flatten().tolist(),
        "plain": positions(tokens).flatten().tolist(),
    }


def test_targets_count_over_all_ranks_and_outputs_come_back_whole() -> None:
    seen = run_ranks(counted_and_gathered, 4)
    targets = [*range(1, 6), *range(23, 26)]
    for rank, result in enumerate(seen):
        assert result["tokens"] == [20 * (rank // 2) + i for i in range(6)], (
            "the first peer's batch, without padding"
        )
        assert result["mean"] == pytest.approx(sum(targets) / len(targets), abs=1e-5)
        assert result["positions"] == ([0, 1, 6, 7] if rank % 2 == 0 else [2, 3, 4, 5])
        assert result["plain"] == list(range(6))
