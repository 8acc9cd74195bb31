"""Blocks hold a part of their tokens where they compute the same with it, and all of
them elsewhere: numbers are those of one process, or refused in words on all ranks.

float64: 1e-8 is many rounding errors of models that add up their tokens in every block,
and a token too few or a gradient left out is orders larger.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.tensor_parallel import blocks
from smp_core.tensor_parallel.randomness import settle_random
from tests.core.tensor_parallel.drawn_models import draw, outcomes
from tests.core.tensor_parallel.model_cases import Case
from tests.core.tensor_parallel.models import GLOBS, MODELS, PlainBlock, PlainModel
from tests.harness import run_ranks


def assert_exact_or_refused(seeds: list[int]) -> None:
    for rank, found in enumerate(run_ranks(outcomes, 4, seeds, timeout=1200)):
        for seed, seen in zip(seeds, found, strict=True):
            refused = isinstance(seen, str) and "tensor_parallel" in seen
            assert refused or seen == [], f"{draw(seed)} on rank {rank}: {seen}"


def test_drawn_models_train_like_one_process_or_are_refused() -> None:
    assert_exact_or_refused([0])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 201, 20))
def test_more_drawn_models_train_like_one_process_or_are_refused(first: int) -> None:
    assert_exact_or_refused(list(range(first, first + 20)))


class PlacedBlock(PlainBlock):
    """Adds each token's place, which a part of the tokens does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.arange(x.shape[1])[:, None]


class JumpingModel(PlainModel):
    """Adds what came into the blocks once more between the second and the third."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = x = self.words(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x + first if number == 2 else x)
        return self.head(self.norm(x))


class ChangingModel(PlainModel):
    """Computes with all tokens between its blocks from the second step on."""

    steps = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.blocks[0](self.words(tokens))
        x = x - x.mean(1, keepdim=True) if self.steps > 1 else x
        return self.head(self.norm(self.blocks[1](x)))


class KeepingBlock(PlainBlock):
    """Keeps a number of its tokens, which a step may add to its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.size = x.square().mean()
        return x


def keeping() -> nn.Module:
    model = PlainModel()
    model.blocks[1] = KeepingBlock()
    return model


def placed() -> nn.Module:
    model = PlainModel()
    model.blocks[1] = PlacedBlock()
    return model


def dropping() -> nn.Module:
    model = placed()
    model.blocks[0].drop = nn.Dropout(0.5)
    return model


def llama_of_experts() -> nn.Module:
    """A plan for perceptrons only, as mixtures of experts carry one."""
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    perceptrons = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
    }
    config.base_model_tp_plan = {**perceptrons, "layers.*.mlp.down_proj": "rowwise"}
    return transformers.LlamaForCausalLM(config)


def step(parallel: ParallelModel) -> None:
    tokens = torch.arange(16).view(2, 8)
    output = parallel.module(tokens)
    getattr(output, "logits", output).sum().backward()
    parallel.window.close()


def after_a_step(name: str) -> tuple[list[bool], list[list[bool]], list[str]]:
    """Which blocks hold a part of their tokens, between which tokens stay split, and
    what was said."""
    made = {
        "placed": placed,
        "keeping": keeping,
        "jumping": JumpingModel,
        "experts": llama_of_experts,
    }
    model = made.get(name, MODELS.get(name))().double()  # type: ignore[misc]
    plan = "auto" if isinstance(model, transformers.PreTrainedModel) else GLOBS
    said: list[str] = []
    with mock.patch.object(
        blocks.logger, "warning", lambda text, *args: said.append(text % args)
    ):
        parallel = parallelize(
            model, SmpConfig(tensor_parallel_degree=2, tensor_parallel={"plan": plan})
        )
        step(parallel)
    assert parallel.tensor is not None
    stacks = parallel.tensor.stacks
    return (
        [tokens.split for stack in stacks for tokens in stack.tokens],
        [stack.links for stack in stacks],
        said,
    )


def several_after_a_step() -> dict[str, Any]:
    return {
        name: after_a_step(name)
        for name in (
            "plain",
            "placed",
            "keeping",
            "jumping",
            "llama",
            "gpt2",
            "experts",
        )
    }


def test_tokens_are_split_in_and_between_blocks_that_can_do_with_a_part() -> None:
    for rank, found in enumerate(run_ranks(several_after_a_step, 2)):
        for name in ("plain", "llama", "gpt2"):
            assert found[name] == ([True, True], [[True]], [])
        assert found["jumping"] == ([True] * 4, [[True, False, True]], [])
        split, links, said = found["placed"]
        assert (split, links) == ([True, False], [[False]])
        assert rank or "tokens stay whole in blocks.1" in said[0]
        split, _, said = found["keeping"]
        assert split == [True, False]
        assert rank or "keeps a tensor with a gradient (size)" in said[0]
        split, _, said = found["experts"]
        assert split == [False, False]
        assert rank or (
            "tokens stay whole in model.layers.0" in said[0] and len(said) == 1
        )


class FunctionBlock(PlainBlock):
    """Drops by a function, with a probability that is a number of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


class FunctionModel(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FunctionBlock() for _ in range(2))


def refusals() -> list[str]:
    found = []
    for make in (dropping, ChangingModel, FunctionModel):
        parallel = parallelize(
            make(), SmpConfig(tensor_parallel_degree=2, tensor_parallel={"plan": GLOBS})
        )
        try:
            for _ in range(2):
                step(parallel)
            found.append("trained")
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_exact_is_refused_on_all_ranks() -> None:
    for dropout, changed, function in run_ranks(refusals, 2):
        assert "blocks.1 keeps whole tokens" in dropout and "dropout" in dropout
        assert "the next block did not take what blocks.0 returned" in changed
        assert "blocks.0 calls dropout, of no module of its own" in function


def test_dropout_of_a_part_of_a_configuration_is_found() -> None:
    """A language model inside of one of pictures drops by a function."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            **sizes, image_size=4, patch_size=2
        ),
        text_config=transformers.LlamaConfig(
            **sizes, vocab_size=9, attention_dropout=0.1
        ),
    )
    model = transformers.LlavaForConditionalGeneration(config)
    with pytest.raises(ValueError, match=r"config\.text_config\.attention_dropout"):
        settle_random(model, mock.Mock(), splits_tokens=False)


def anomalies() -> tuple[float, str]:
    parallel = Case("llama", shard=2).parallel()
    tokens = torch.arange(8).view(1, -1)
    with torch.autograd.detect_anomaly(check_nan=True):
        loss = parallel.module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        parallel.window.abandon()
        with pytest.raises(RuntimeError, match="returned nan values") as caught:
            (
                parallel.module(input_ids=tokens, labels=tokens).loss * torch.nan
            ).backward()
    return loss.item(), str(caught.value)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_looks_at_split_parameters() -> None:
    for loss, said in run_ranks(anomalies, 4):
        assert loss > 0 and "nan" in said


def stepped_by_adafactor() -> list[str]:
    said = []
    for kind in (torch.optim.Adafactor, torch.optim.AdamW, torch.optim.Rprop):
        parallel = Case("llama", shard=2).parallel()
        try:
            optimizer = kind(parallel.module.parameters(), lr=1e-3)
            parallel.prepare_optimizer(optimizer)
            tokens = torch.arange(8).view(1, -1)
            parallel.module(input_ids=tokens, labels=tokens).loss.backward()
            parallel.window.close()
            optimizer.step()
            said.append("stepped")
        except ValueError as error:
            said.append(str(error))
    return said


def test_optimizers_that_cannot_step_shards_of_split_layers_are_refused_before_the_first_step() -> (
    None
):
    for adafactor, adamw, rprop in run_ranks(stepped_by_adafactor, 4):
        assert (
            "Adafactor cannot step sharded parameters" in adafactor
            and "without tensor ranks" in adafactor
        )
        assert adamw == "stepped"
        assert rprop == "stepped" or "Rprop cannot step sharded parameters" in rprop


class CountingBlock(PlainBlock):
    """Counts its calls in a buffer that each of them replaces, and returns what it has
    seen of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls = self.calls + 1
        x = super().forward(x)
        return x, x.mean((0, 1))


class CountingModel(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, seen = self.words(tokens), 0
        for block in self.blocks:
            x, means = block(x)
            seen = seen + means.square().sum()
        return self.head(self.norm(x)) + seen


def counted(splits: bool) -> tuple[float, list[float]]:
    torch.manual_seed(0)
    model = CountingModel().double()
    if splits:
        knobs = SmpConfig(tensor_parallel_degree=2, tensor_parallel={"plan": GLOBS})
        model = parallelize(model, knobs).module
    total = model(torch.arange(16).view(2, 8)).square().sum()
    total.backward()
    return total.item(), [block.calls.item() for block in model.blocks]


def test_trials_leave_buffers_alone_and_look_at_vectors_beside_hidden_states() -> None:
    total, calls = counted(False)
    for seen, counts in run_ranks(counted, 2, True):
        assert counts == calls == [1.0, 1.0]
        assert seen == pytest.approx(total, rel=1e-12)  # float64 rounding
