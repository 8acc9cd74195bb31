"""Architectures of Transformers that no other test names, over tensor ranks, stages and
shared sequences: one process's numbers, or refused on all ranks in words that name the
knob."""

from __future__ import annotations

import functools

import pytest

from tests.accelerate.architectures import KINDS, MODES, Training, alone, outcomes
from tests.core.tensor_parallel.model_cases import differences
from tests.harness import run_ranks

KNOB = {
    "auto": "tensor_parallel",
    "infer": "tensor_parallel",
    "pipeline": "pipeline_parallel_degree",
    "context": "context_parallel_degree",
}
# What is refused, and why; everything else is exact.
REFUSED: dict[str, dict[str, str]] = {
    "auto": {
        "carries no plan": "BitNet GPTNeo GPTNeoXJapanese RecurrentGemma Mamba2 Rwkv XLNet DistilBert Electra "
        "FNet ConvBert MegatronBert DeiT Dinov2WithRegisters ViTMAE Segformer WavLM Swin Swinv2 Hiera VideoMAE",
        "is an encoder-decoder without a known plan": "Pegasus MBart ProphetNet SwitchTransformers Moonshine Whisper",
        "has roles that are not built yet: mla_kv_a_proj": "DeepseekV2",
        "is 'column_gather' in model.layers.0": "Qwen3Next",
    },
    "infer": {
        "no layer of": "BitNet Mamba2",
        "tokens cannot be split over": "ViTMAE Moonshine",
        "was called with output_hidden_states=True": "WavLM",
    },
    "pipeline": {
        "its blocks hand on 2 tensors": "WavLM",
        "its output loss is another in stages": "ViTMAE",
        "does not take what": "SwitchTransformers",
        "its forward fails where blocks are on other stages": "Swinv2",
        "did not run in the call that": "Idefics3",
    },
    "context": {
        "takes no position_ids": "DeiT Dinov2WithRegisters ViTMAE Segformer WavLM Rwkv XLNet Swin Swinv2 Hiera "
        "VideoMAE Idefics3",
        "does not use Transformers' attention interface": "GPTNeo GPTNeoXJapanese MegatronBert ConvBert",
        "layers of type 'linear_attention'": "Mamba2 Jamba RecurrentGemma Qwen3Next",
        "is an encoder-decoder": "Pegasus MBart ProphetNet SwitchTransformers Moonshine Whisper",
        "computes something else over each rank's tokens": "FNet",
    },
}


def why(name: str, mode: str) -> str | None:
    return next(
        (words for words, names in REFUSED[mode].items() if name in names.split()), None
    )


@functools.cache
def in_one_process(name: str, micro_batches: int) -> Training:
    return alone(name, micro_batches)


def require(runs: list[tuple[str, str]]) -> None:
    for rank, found in enumerate(run_ranks(outcomes, 2, runs, timeout=600)):
        for (name, mode), seen in zip(runs, found, strict=True):
            words, where = why(name, mode), f"{name}, {mode}, rank {rank}: {seen}"
            if words is None:
                assert isinstance(seen, Training), where
                assert (
                    differences(
                        seen, in_one_process(name, 2 if mode == "pipeline" else 1)
                    )
                    == []
                ), where
            else:
                assert isinstance(seen, str) and words in seen and KNOB[mode] in seen, (
                    where
                )


@pytest.mark.parametrize(
    "part",
    [slice(1, None), pytest.param(slice(1), marks=pytest.mark.slow)],
    ids=["some", "more"],
)
def test_some_architectures(part: slice) -> None:
    """A bias beside the heads; state spaces and attention in one stack; a decoder that
    wants tokens of its own; a model of speech, which has no embedding and always shows
    its hidden states; a mask that is drawn before the blocks and read behind them."""
    inspected = [(name, "infer") for name in ("GPTNeoXJapanese", "WavLM")]
    in_stages = [(name, "pipeline") for name in ("Jamba", "Pegasus", "ViTMAE")]
    require([*inspected[part], *in_stages[part]])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_all_architectures(name: str) -> None:
    require([(name, mode) for mode in MODES])
