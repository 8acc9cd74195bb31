"""FP8 with sequences that several ranks hold, with recomputation, and with models
initialised on their ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_smp import Fp8Precision, Fp8Recipe
from tests.core.gpt import SmallGpt
from tests.harness import run_ranks
from tests.lightning.context_modules import LENGTH, VOCABULARY, HfModule
from tests.lightning.modules import LanguageModule
from tests.lightning.running import Run, make_trainer, report, together

RECIPE = Fp8Recipe(amax_history_len=4)
WHOLE = {"shard_degree": 2}
SHARED = {"shard_degree": 2, "context_parallel_degree": 2}


class Llama(HfModule):
    """Layers of sizes that FP8 takes; float64, so that attention in another order does
    not flip casts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(2)
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
        }
        heads = {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": LENGTH,
        }
        self.model = LlamaForCausalLM(
            LlamaConfig(**sizes, **heads, use_cache=False)
        ).double()

    val_dataloader = LanguageModule.val_dataloader

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("not in these tests")


def train(knobs: dict[str, Any], batches: int) -> Run:
    module = Llama(context=knobs.get("context_parallel_degree", 1), batches=batches)
    trainer = make_trainer(
        knobs, plugins=[Fp8Precision(RECIPE, "float32")], limit_val_batches=0
    )
    trainer.fit(module)
    parallel = trainer.strategy.parallel
    calls = parallel.meter.per_step().get("amax_all_reduce/calls")
    state = parallel.fp8.state
    return report(
        trainer,
        module,
        history=state.history,
        scale=state.scale,
        sites=len(parallel.fp8.sites),
        calls=calls,
    )


def alone() -> Run:
    """One process, whole sequences."""
    return train({"shard_degree": 1}, 20)


def variants() -> dict[str, Run]:
    return {
        "shared": train(SHARED, 20),
        "again": train(SHARED, 4),
        "recomputed": train({**SHARED, "activations": "full"}, 4),
    }


def assert_like(shared: Run, whole: Run) -> None:
    """First loss within 1e-6: scales are powers of two, so the amax of a rank's own
    tokens casts almost every value to the same FP8 number. The mean of 20 within 0.5
    %."""
    assert (
        len(shared.losses) == len(whole.losses) == 20
        and shared.extra["sites"] == whole.extra["sites"] == 14
    )
    assert abs(shared.losses[0] - whole.losses[0]) <= 1e-6 * whole.losses[0]
    assert abs(sum(shared.losses) - sum(whole.losses)) <= 5e-3 * sum(whole.losses)


@pytest.mark.slow  # in the normal run: tests/core/fp8
def test_shared_sequences_train_in_fp8_as_whole_ones_do_also_recomputing() -> None:
    """Recomputing changes nothing, not even a bit."""
    whole = run_ranks(alone, 1)[0]
    ranks = together(variants, ranks=2)
    for found in ranks:
        shared, again, recomputed = found["shared"], found["again"], found["recomputed"]
        assert_like(shared, whole)
        assert shared.extra["calls"] == 1.0
        assert torch.equal(shared.extra["scale"], ranks[0]["shared"].extra["scale"]), (
            "equal on all ranks"
        )
        assert recomputed.losses == again.losses
        assert torch.equal(recomputed.extra["history"], again.extra["history"])
        assert all(
            torch.equal(recomputed.weights[name], value)
            for name, value in again.weights.items()
        )


def more_variants() -> dict[str, Run]:
    """Sequences over both ranks of a node, over two nodes, and in two replicas."""
    return {
        "node": train({"shard_degree": 4, "context_parallel_degree": 2}, 20),
        "nodes": train({"shard_degree": 4, "context_parallel_degree": 4}, 20),
        "replicas": train(SHARED, 20),
    }


@pytest.mark.slow
def test_shared_sequences_train_in_fp8_as_whole_ones_do_on_four_ranks() -> None:
    whole = run_ranks(alone, 1)[0]
    for found in together(more_variants):
        for shared in found.values():
            assert_like(shared, whole)


class Late(LanguageModule):
    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        self.model = SmallGpt(vocabulary=32, width=32, layers=2, heads=2, length=8)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def late(knobs: dict[str, Any]) -> Run:
    module = Late(batches=4)
    trainer = make_trainer(
        {**knobs, "delayed_init": True}, plugins=[Fp8Precision(RECIPE, "float32")]
    )
    trainer.fit(module)
    fp8 = trainer.strategy.parallel.fp8
    return report(trainer, module, history=fp8.state.history, sites=len(fp8.sites))


def late_variants() -> list[Run]:
    return [
        late(knobs)
        for knobs in (WHOLE, {"shard_degree": 1}, {**WHOLE, "activations": "full"})
    ]


@pytest.mark.slow
def test_models_initialised_on_their_ranks_train_in_fp8_the_same_however_they_are_sharded() -> (
    None
):
    for sharded, *others in together(late_variants, ranks=2):
        assert sharded.extra["sites"] == 8 and sharded.losses[-1] < sharded.losses[0]
        assert sharded.extra["history"].count_nonzero() == 4 * 8 * 3
        for other in others:
            assert other.losses == sharded.losses and torch.equal(
                other.extra["history"], sharded.extra["history"]
            )
            assert all(
                torch.equal(other.weights[name], value)
                for name, value in sharded.weights.items()
            )
