"""Calls of a split model besides training: what they give is what one process gives, or
they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.core.tensor_parallel.model_cases import Case, Wide, build
from tests.harness import run_ranks

KINDS = ("llama", "gpt2")
OPTIONS: list[dict[str, Any]] = [
    {"use_cache": True},
    {"use_cache": True, "num_beams": 2},
    {"use_cache": False},
]


def generated() -> list[tuple[list[list[int]], list[list[int]], float]]:
    """Sequences over ranks and in one process, with an odd number of tokens and padding
    on the left; largest difference of the logits of a step with a cache."""
    found = []
    prompt = torch.tensor([[5, 7, 11, 13, 17], [0, 0, 19, 23, 29]])
    mask = (prompt > 0).long()
    with Wide(), torch.no_grad():
        for kind in KINDS:
            whole: Any = build(kind).eval()
            model: Any = Case(kind).parallel(forward_methods=["generate"]).module.eval()
            for options in OPTIONS:
                asked = {
                    "attention_mask": mask,
                    "max_new_tokens": 6,
                    "do_sample": False,
                    "pad_token_id": 0,
                    **options,
                }
                ours, theirs = (
                    each.generate(prompt, **asked).tolist() for each in (model, whole)
                )
                scores = []
                for each in (model, whole):
                    first = each(prompt, attention_mask=mask, use_cache=True)
                    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
                    more = torch.tensor([[3], [4]])
                    again = each(
                        more,
                        attention_mask=longer,
                        past_key_values=first.past_key_values,
                        use_cache=True,
                    )
                    scores.append(torch.cat([first.logits, again.logits], 1))
                found.append((ours, theirs, (scores[0] - scores[1]).abs().max().item()))
    return found


def test_generate_with_a_cache_gives_what_one_process_gives() -> None:
    """Logits within 1e-12 in float64; the same words."""
    for found in run_ranks(generated, 2):
        for ours, theirs, difference in found:
            assert ours == theirs and difference < 1e-12


def sampled(seed_of_rank: bool) -> list[int] | str:
    parallel = Case("llama").parallel(forward_methods=["generate"])
    torch.manual_seed(parallel.mesh.rank if seed_of_rank else parallel.mesh.data_rank)
    words = torch.tensor([[5, 7, 11]])
    try:
        return (
            parallel.module.eval()
            .generate(words, do_sample=True, max_new_tokens=20)[0]
            .tolist()
        )
    except ValueError as error:
        return str(error)


def test_tensor_ranks_that_sample_other_words_are_told() -> None:
    for said in run_ranks(sampled, 2, True):
        assert "torch.manual_seed(mesh.data_rank)" in said
    first, second = run_ranks(sampled, 2, False)
    assert first == second and len(first) > 3


def asked_for_states() -> list[str]:
    said = []
    model = Case("llama").parallel().module
    tokens = torch.arange(8)[None]
    for called, option in (
        (model, "output_hidden_states"),
        (model.model, "output_attentions"),
    ):
        with pytest.raises(ValueError, match=f"called with {option}=True") as caught:
            called(input_ids=tokens, **{option: True})
        said.append(str(caught.value))
    return said


def test_states_that_no_rank_has_unsplit_are_refused_in_calls() -> None:
    for said in run_ranks(asked_for_states, 2):
        assert all("leave it out" in each for each in said)
