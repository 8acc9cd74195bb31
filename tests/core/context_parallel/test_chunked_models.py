"""Transformers models whose loss is computed in chunks: the loss they would have,
whatever they do with logits."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from smp_core.config import SmpConfig
from smp_core.context_parallel.chunked_models import (
    PendingLogits,
    chunk_losses,
    loss_only,
    smoothed,
    use_chunked_loss,
)
from smp_core.context_parallel.replaced_attention import enabled
from smp_core.entry import parallelize
from tests.core.context_parallel.model_cases import (
    _COMMON,
    VOCABULARY,
    Run,
    build,
    whole_batch,
)
from tests.harness import run_ranks
from tests.older_transformers import EAGER_EXPERTS

# What models do with what their head returns: nothing (tied and not), capped, divided,
# multiplied, a bias and a layer before it, and a loss of the router's beside.
KINDS: dict[str, Any] = {
    "gpt2": lambda: build("gpt2").config,
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "gemma2": lambda: transformers.Gemma2Config(
        **_COMMON, head_dim=8, final_logit_softcapping=3.0
    ),
    "granite": lambda: transformers.GraniteConfig(**_COMMON, logits_scaling=4.0),
    "cohere": lambda: transformers.CohereConfig(**_COMMON, logit_scale=0.3),
    "roberta": lambda: transformers.RobertaConfig(
        **{**_COMMON, "max_position_embeddings": 66},
        is_decoder=True,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_COMMON, num_local_experts=4, output_router_logits=True
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1
    ),
}


def made(kind: str) -> Any:
    torch.manual_seed(3)
    config = KINDS[kind]()
    return (
        transformers.AutoModelForCausalLM.from_config(config, **EAGER_EXPERTS)
        .double()
        .train()
    )


def both(kind: str, chunk: int = 7) -> tuple[Any, Any]:
    model = made(kind)
    chunked = copy.deepcopy(model)
    use_chunked_loss(chunked, chunk)
    return model, chunked


def batch() -> dict[str, torch.Tensor]:
    return whole_batch(Run("llama", 1, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_what_they_were(kind: str) -> None:
    """float64 logits are not cast to float32 here, as Transformers' own loss does:
    1e-6."""
    model, chunked = both(kind)
    outputs = [each(**batch(), use_cache=False) for each in (model, chunked)]
    for each in outputs:
        each.loss.backward()
    assert outputs[1].logits is None
    assert abs(outputs[0].loss - outputs[1].loss) <= 1e-6
    assert outputs[0].keys() - outputs[1].keys() == {"logits"}
    for one, other in zip(chunked.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or (one.grad - other.grad).abs().max() <= 1e-6


def test_logits_are_there_for_whoever_asks_for_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, chunked = both("gemma2")
    inputs = {"input_ids": batch()["input_ids"], "use_cache": False}
    with caplog.at_level(logging.WARNING, "smp"):
        for _ in range(2):
            assert torch.equal(chunked(**inputs).logits, model(**inputs).logits)
    assert [record.getMessage() for record in caplog.records] == [
        "chunked_cross_entropy has no effect on Gemma2ForCausalLM: its forward gets no labels, so its logits are made "
        "whole"
    ]
    in_a_tuple = chunked(**batch(), use_cache=False, return_dict=False)
    assert in_a_tuple[0].dim() == 0 and in_a_tuple[1] is None
    seen = chunked.eval()(**batch(), use_cache=False)
    expected = model.eval()(**batch(), use_cache=False)
    assert torch.equal(seen.loss, expected.loss) and torch.equal(
        seen.logits, expected.logits
    )
    with loss_only():
        seen = chunked(**batch(), use_cache=False)
    assert seen.logits is None and abs(seen.loss - expected.loss) <= 1e-6


def test_smoothed_labels_in_training_and_evaluation() -> None:
    model, chunked = both("granite")
    logits, targets = (
        model(**batch()).logits[:, :-1].flatten(0, 1),
        batch()["labels"][:, 1:].flatten(),
    )
    expected = (
        torch.nn.functional.cross_entropy(
            logits, targets, label_smoothing=0.1, reduction="sum"
        )
        / 7
    )
    for each in (chunked.train(), chunked.eval()):
        with smoothed(0.1):
            assert abs(each(**batch(), num_items_in_batch=7).loss - expected) <= 1e-10
        assert abs(each(**batch(), num_items_in_batch=7).loss - expected) > 1e-3


def test_what_is_done_to_logits_is_written_down() -> None:
    head, hidden, words = torch.nn.Linear(4, 6), torch.randn(2, 3, 4), torch.randn(6)

    def done_to(logits: Any) -> Any:
        logits = torch.tensor(2.0) * (torch.tanh(logits.float() / 3) + words) - 1
        return logits.to(torch.float64).clamp(min=-2.5)

    pending = done_to(PendingLogits("Model", head, hidden))
    assert torch.equal(pending.whole(), done_to(head(hidden)))
    for refused in (
        lambda: pending.shape,
        lambda: pending[:, 1:],
        lambda: pending + pending.tanh(),
        lambda: pending + hidden,
    ):
        with pytest.raises(ValueError, match="Model does"):
            refused()


class Reversed(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:  # type: ignore[override]
        return {
            "loss": self.loss_function(
                self.lm_head(self.model(input_ids)[0]).flip(-1), labels, VOCABULARY
            )
        }


def test_what_cannot_be_chunked_is_refused() -> None:
    common = {
        key: value for key, value in _COMMON.items() if key != "intermediate_size"
    }
    with pytest.raises(ValueError, match="causal language model, not Linear"):
        use_chunked_loss(torch.nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"chunked_cross_entropy=8: Linear holds no Transformers model"
    ):
        chunk_losses(torch.nn.Linear(2, 2), 8)
    for model in (
        transformers.BertForMaskedLM(transformers.BertConfig(**_COMMON)),
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(**common, d_model=16, d_kv=4, d_ff=8)
        ),
    ):
        with pytest.raises(
            ValueError,
            match=f"{type(model).__name__} does not have the loss of a causal",
        ):
            chunk_losses(model, 8)
    model = Reversed(KINDS["llama"]())
    use_chunked_loss(model, 8)
    with pytest.raises(ValueError, match="Reversed does 'flip' with its logits"):
        model(batch()["input_ids"], labels=batch()["labels"])
    assert "lm_head.weight" in dict(model.named_parameters()), (
        "the head is back in its place"
    )


def step_of(
    kind: str, context: int, chunk: int | None, head_alone: bool
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss over all ranks, all gradients, and how many collectives of each kind there
    were."""
    run = Run(kind, 2, context, "packed")
    wanted = {"units": ("LlamaDecoderLayer", "lm_head")} if head_alone else {}
    config = SmpConfig(
        shard_degree=2,
        context_parallel_degree=context,
        chunked_cross_entropy=chunk,
        **wanted,
    )
    model: Any = made(kind)
    parallel = parallelize(model, config)
    mesh = parallel.mesh
    mine = {
        key: value.chunk(mesh.data_size)[mesh.data_rank]
        for key, value in whole_batch(run).items()
    }
    split = None if parallel.context is None else parallel.context.split(mine)
    inputs = mine if split is None else split.batch
    if split is None:
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        inputs = {**mine, "num_items_in_batch": count / dist.get_world_size()}
    with enabled(split):
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
    parallel.window.close()
    parallel.meter.close_step()
    calls = {
        what: figure
        for what, figure in parallel.meter.per_step().items()
        if what.endswith("/calls")
    }
    total = loss.detach().clone()
    dist.all_reduce(total)
    grads = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for p in model.parameters()
    ]
    return (
        total.item() / dist.get_world_size(),
        torch.cat([grad.flatten() for grad in grads]),
        calls,
    )


def compared(
    cases: list[tuple[str, int, bool]],
) -> list[tuple[float, float, dict[str, float], dict[str, float]]]:
    found = []
    for kind, context, head_alone in cases:
        loss, gradients, calls = step_of(kind, context, None, head_alone)
        chunked_loss, chunked, calls_then = step_of(kind, context, 3, head_alone)
        found.append(
            (
                abs(loss - chunked_loss),
                (gradients - chunked).abs().max().item(),
                calls,
                calls_then,
            )
        )
    return found


@pytest.mark.parametrize(
    "cases",
    [
        [("gpt2", 2, False), ("llama", 1, True)],
        pytest.param([("gpt2", 1, False), ("llama", 2, True)], marks=pytest.mark.slow),
    ],
    ids=["half", "rest"],
)
def test_sharded_and_split_models_have_the_same_loss_and_gradients(
    cases: list[tuple[str, int, bool]],
) -> None:
    """1e-6: Transformers' own loss casts to float32. With a tied head, one in the root
    unit and one that is a unit of its own, which is gathered as often as without
    chunks, however many there are."""
    for seen in run_ranks(compared, 4, cases):
        for case, (loss, gradient, calls, calls_then) in zip(cases, seen, strict=True):
            assert loss <= 1e-6 and gradient <= 1e-6, case
            assert calls == calls_then and calls["all_gather/calls"] > 0, case
