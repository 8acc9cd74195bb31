"""What splitting layers costs and saves: bytes between tensor ranks, activations kept
for backward, logits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.tensor_parallel.inspection import infer_plan
from smp_core.tensor_parallel.trial import Trial
from tests.harness import run_ranks

SAMPLES, TOKENS, WIDTH, INNER, WORDS = 2, 128, 128, 352, 1024


def llama(layers: int, dtype: torch.dtype = torch.float32) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def split(
    layers: int, tensor: int, sequence: bool, dtype: torch.dtype = torch.float32
) -> ParallelModel:
    recipe = {"sequence_parallel": sequence}
    knobs = {
        "shard_degree": 1,
        "tensor_parallel_degree": tensor,
        "tensor_parallel": recipe,
    }
    # Weights stay: memory of freed ones would be that of activations.
    return parallelize(
        llama(layers, dtype), SmpConfig(**knobs, reshard_after_forward=False)
    )


def words() -> torch.Tensor:
    return torch.randint(
        WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1)
    )


def sent_in_a_step(parallel: ParallelModel) -> float:
    for _ in range(2):
        parallel.module(input_ids=words(), labels=words()).loss.backward()
        # Behind the first step it is known where tokens stay split.
        parallel.window.close()
        parallel.meter.close_step()
    return sum(
        value
        for name, value in parallel.meter.per_step().items()
        if name.startswith("tensor_") and "bytes" in name
    )


def bytes_of_a_block(tensor: int) -> list[float]:
    """With and without split tokens: what one more block adds."""
    return [
        sent_in_a_step(split(2, tensor, sequence))
        - sent_in_a_step(split(1, tensor, sequence))
        for sequence in (True, False)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_block_sends_four_all_reduces_of_its_activations_however_tokens_are_split(
    tensor: int,
) -> None:
    """Within 1 %: with split tokens the gradients of two norms, one vector each, are
    added up too."""
    expected = 4 * 2 * (tensor - 1) / tensor * SAMPLES * TOKENS * WIDTH * 4
    for sent in run_ranks(bytes_of_a_block, tensor, tensor):
        assert sent == pytest.approx([expected, expected], rel=0.01)


class Kept:
    """Bytes of the storages that autograd keeps for backward, those of parameters left
    out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._sizes: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def watch(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda tensor: tensor
        )

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        place = _storage(tensor).data_ptr()
        if place not in self._sizes:
            weights = {
                _storage(parameter).data_ptr() for parameter in self._model.parameters()
            }
            self._sizes[place] = 0 if place in weights else _storage(tensor).nbytes()
            self._alive.append(tensor)
        return tensor

    @property
    def total(self) -> int:
        return sum(self._sizes.values())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
    ).untyped_storage()


def kept_by_a_block(tensor: int, sequence: bool) -> float:
    totals = []
    for layers in (1, 2):
        parallel = split(layers, tensor, sequence, torch.bfloat16)
        model = parallel.module
        # FSDP2's first forward prepares buffers.
        model(input_ids=words(), labels=words())
        kept = Kept(model)
        with kept.watch():
            model(input_ids=words(), labels=words())
        totals.append(kept.total)
    return (totals[1] - totals[0]) / (SAMPLES * TOKENS * WIDTH)


def kept_by_blocks(tensor: int) -> list[float]:
    return [kept_by_a_block(tensor, sequence) for sequence in (False, True)]


@pytest.mark.parametrize(
    "tensor", [2, *(pytest.param(degree, marks=pytest.mark.slow) for degree in (4, 8))]
)
def test_a_block_keeps_a_part_of_its_activations_and_split_tokens_the_rest(
    tensor: int,
) -> None:
    """Bytes per token and feature in bfloat16, within 3 %.

    The norms keep their input in float32 and what they multiply by their weight: 12.
    The inputs of the column layers, which every rank needs whole: 4. Queries, keys,
    values and what attention returns: 8, and 8 for each inner feature; the logarithms
    of attention's sums are float32, one for each head, as the norms' roots are for each
    token.
    """
    norms, inputs, features = 12 + 8 / WIDTH, 4, 8 + 8 * INNER / WIDTH + 4 * 8 / WIDTH
    expected = [
        norms + inputs + features / tensor,
        norms / tensor + inputs + features / tensor,
    ]
    for kept in run_ranks(kept_by_blocks, tensor, tensor):
        assert kept == pytest.approx(expected, rel=0.03)


class Widest(TorchDispatchMode):
    """The largest tensor that any operation makes with a word of the vocabulary in its
    last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if (
                isinstance(each, torch.Tensor)
                and each.ndim > 1
                and each.shape[-1] in (WORDS, WORDS // 2)
            ):
                self.elements = max(self.elements, each.numel())
        return made


def largest_logits(tensor: int) -> tuple[int, list[str]]:
    model = split(1, tensor, True).module
    with Widest() as seen:
        model(input_ids=words(), labels=words()).loss.backward()
    return seen.elements, [
        name for name, module in model.named_modules() if "forward" in vars(module)
    ]


def test_no_rank_makes_the_logits_of_the_whole_vocabulary_and_one_rank_alone_wraps_nothing() -> (
    None
):
    ((whole, wrapped),) = run_ranks(largest_logits, 1, 1)
    assert whole == SAMPLES * TOKENS * WORDS and wrapped == []
    for elements, wrapped in run_ranks(largest_logits, 2, 2):
        assert elements == whole // 2 and len(wrapped) > 5


def trials(layers: int) -> int:
    """Of an inspection that finds nothing to split: norms over all features stand
    before the rows."""
    sizes = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.BitNetForCausalLM(
        transformers.BitNetConfig(**sizes, num_hidden_layers=layers)
    )
    with mock.patch.object(
        Trial, "_passes", autospec=True, side_effect=Trial._passes
    ) as passes:
        with pytest.raises(ValueError, match="no layer of BitNetForCausalLM"):
            infer_plan(model, 2, True)
    return passes.call_count


def test_what_cannot_be_split_is_tried_in_one_of_the_blocks_that_are_alike() -> None:
    assert trials(3) == trials(1) > 0
