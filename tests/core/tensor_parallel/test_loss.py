"""Cross entropy over a split vocabulary is torch's, gradients included; float64, sums
in another order."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

from smp_core.comm.meter import CommMeter
from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.tensor_parallel.loss import cross_entropy_sum
from smp_core.tensor_parallel.operators import TensorAxis
from smp_core.topology import Topology
from tests.core.tensor_parallel.model_cases import Case, batches, loss_of
from tests.harness import run_ranks

TOKENS, WORDS = 7, 12


def inputs(ruled_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    # Larger than exp() takes, and a row in which one word has everything.
    logits = 400 * torch.randn(TOKENS, WORDS, generator=generator, dtype=torch.float64)
    logits[2, 5] = 1e4
    targets = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    targets[3] = -7
    if ruled_out:
        targets[targets == 4] = 5
        logits[:, 4] = -torch.inf
    return logits.requires_grad_(), targets


def split_loss(smoothing: float, ruled_out: bool = False) -> tuple[float, torch.Tensor]:
    world = dist.get_world_size()
    axis = TensorAxis(
        dist.group.WORLD, CommMeter(Topology.uniform(world, world), dist.get_rank())
    )
    logits, targets = inputs(ruled_out)
    own = axis.part(logits.detach(), -1).requires_grad_()
    loss = cross_entropy_sum(
        own, targets, axis, ignore_index=-7, label_smoothing=smoothing
    )
    (3 * loss).backward()
    assert own.grad is not None
    return loss.item(), own.grad


@pytest.mark.parametrize(
    ("smoothing", "ruled_out"),
    [pytest.param(0.0, False, marks=pytest.mark.slow), (0.0, True), (0.1, False)],
)
def test_a_split_vocabulary_gives_the_loss_of_a_whole_one(
    smoothing: float, ruled_out: bool
) -> None:
    logits, targets = inputs(ruled_out)
    expected = F.cross_entropy(
        logits, targets, reduction="sum", ignore_index=-7, label_smoothing=smoothing
    )
    (3 * expected).backward()
    found = run_ranks(split_loss, 3, smoothing, ruled_out)
    assert all(loss == pytest.approx(expected.item(), rel=1e-14) for loss, _ in found)
    torch.testing.assert_close(
        torch.cat([grad for _, grad in found], -1), logits.grad, rtol=1e-13, atol=1e-15
    )


def outputs_of(case: Case) -> dict[str, object]:
    parallel = case.parallel()
    model, tokens = parallel.module, batches(1)[0, 0]
    training = model(input_ids=tokens, labels=tokens)
    without_labels = model(input_ids=tokens).logits
    with torch.no_grad():
        # 11 tokens on two ranks: padded where nothing is trained.
        evaluated = model(input_ids=tokens[:, :11], labels=tokens[:, :11])
    halves = (
        training.loss * 2,
        model(input_ids=tokens, labels=tokens, num_items_in_batch=44).loss,
    )
    with (
        warnings.catch_warnings(record=True) as warned,
        pytest.raises(ValueError) as error,
    ):
        loss_of(model, tokens[:, :11])
    return {
        "no logits": training.logits is None,
        "shapes": (tuple(without_labels.shape), tuple(evaluated.logits.shape)),
        "by number": [value.item() for value in halves],
        "evaluated": evaluated.loss.item(),
        "said": str(error.value),
        "warned": [str(each.message) for each in warned],
    }


def test_logits_are_whole_wherever_somebody_looks_at_them() -> None:
    for seen in run_ranks(outputs_of, 2, Case("llama")):
        assert seen["no logits"] and seen["shapes"] == ((8, 12, 48), (8, 11, 48))
        twice, by_number = seen["by number"]  # type: ignore[misc]
        assert by_number == pytest.approx(twice, rel=1e-14)  # 88 targets, divided by 44
        assert "pad_to_multiple_of=2" in str(seen["said"]) and seen["evaluated"]
        assert not seen["warned"]


class PaddedVocabulary(transformers.LlamaForCausalLM):
    """Leaves the last words, which are padding, out of its loss."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        logits = logits[..., :40]
        return self.loss_function(logits=logits, labels=labels, vocab_size=40)


def padded_vocabulary() -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    return PaddedVocabulary(config).double(), torch.arange(16).view(2, 8)


def loss_of_padded_vocabulary() -> float:
    model, tokens = padded_vocabulary()
    parallel = parallelize(model, SmpConfig(tensor_parallel_degree=2))
    return parallel.module(tokens, tokens).item()


def test_a_forward_that_chooses_among_its_logits_gets_all_of_them() -> None:
    model, tokens = padded_vocabulary()
    expected = pytest.approx(
        model(tokens, tokens).item(), rel=1e-12
    )  # float64 rounding
    assert run_ranks(loss_of_padded_vocabulary, 2) == [expected] * 2
