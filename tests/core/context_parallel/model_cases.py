"""Tiny Transformers models over context ranks and in one process: loss and every
gradient in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.tensor import DTensor

from smp_core.config import SmpConfig
from smp_core.context_parallel.replaced_attention import enabled
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from tests.older_transformers import EAGER_EXPERTS

VOCABULARY, ROWS = 47, 8
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(kind: str, **changes: Any) -> transformers.PreTrainedConfig:
    return getattr(transformers, f"{kind}Config")(**{**_COMMON, **changes})


MODELS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    ),
    "gpt_neox": functools.partial(
        _config, "GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0
    ),
    "llama": functools.partial(_config, "Llama"),
    "mistral": functools.partial(_config, "Mistral", sliding_window=7),
    "mixtral": functools.partial(
        _config, "Mixtral", num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3": functools.partial(_config, "Qwen3", head_dim=8),
    "gemma3": functools.partial(
        _config,
        "Gemma3Text",
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=None,
    ),
    "olmo2": functools.partial(_config, "Olmo2"),
    "phi3": functools.partial(
        _config, "Phi3", attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    ),
    "starcoder2": functools.partial(
        _config,
        "Starcoder2",
        attention_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
        sliding_window=6,
    ),
    "llama_dynamic": functools.partial(
        _config,
        "Llama",
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    ),
    "phi3_longrope": functools.partial(
        _config,
        "Phi3",
        attention_dropout=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0, 1.1],
            "long_factor": [1.5, 4.0],
            "original_max_position_embeddings": 16,
        },
    ),
    "gpt_oss": functools.partial(
        _config,
        "GptOss",
        head_dim=8,
        sliding_window=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.2,
    ),
    "llama4": functools.partial(
        _config,
        "Llama4Text",
        head_dim=8,
        intermediate_size_mlp=24,
        num_local_experts=4,
        moe_layers=[0],
        no_rope_layers=[1, 0],
        attention_chunk_size=5,
        floor_scale=4,
        attn_scale=0.5,
    ),
    "opt": functools.partial(
        _config,
        "OPT",
        attention_dropout=0.0,
        dropout=0.0,
        ffn_dim=24,
        word_embed_proj_dim=16,
    ),
    "roberta": functools.partial(
        _config,
        "Roberta",
        is_decoder=True,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    ),
}
# Their positions' frequencies follow from the longest sequence that is computed
# together.
LENGTH_DEPENDENT = ("llama_dynamic", "phi3_longrope")


@dataclass(frozen=True)
class Run:
    model: str
    shard: int
    context: int
    rows: str = "plain"
    checkpointing: bool = False
    length: int = 22
    compiled: str | None = None
    """The backend that compiles every layer as one graph."""
    tensor: int = 1


def build(name: str) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        MODELS[name](),
        attn_implementation="eager" if name == "gpt_oss" else "sdpa",
        **EAGER_EXPERTS,
    )
    for module in model.modules():
        if type(module).__name__ == "Gemma3RMSNorm":
            module.forward = functools.partial(_norm_in_float64, module)
    return model.double().train()


def _norm_in_float64(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Gemma's own adds up the weight's gradient over tokens in float32, which no order
    of summation survives."""
    return norm._norm(x) * (1.0 + norm.weight)


def whole_batch(run: Run) -> dict[str, torch.Tensor]:
    """Rows with other numbers of targets; other padding, or documents that begin at
    other places, in every row."""
    generator = torch.Generator().manual_seed(17)
    tokens = torch.randint(3, VOCABULARY, (ROWS, run.length), generator=generator)
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, : 2 * row] = -100
    labels[:, -3:] = torch.where(
        torch.rand(ROWS, 3, generator=generator) < 0.5, -100, labels[:, -3:]
    )
    batch = {"input_ids": tokens, "labels": labels}
    if run.rows in ("left", "right"):
        mask = torch.ones_like(tokens)
        for row in range(ROWS):
            padding = (
                slice(0, row) if run.rows == "left" else slice(run.length - row, None)
            )
            mask[row, padding], labels[row, padding] = 0, -100
            if run.rows == "left":
                labels[row, row] = -100
        batch["attention_mask"] = mask
    if run.rows == "packed":
        position_ids = torch.arange(run.length).repeat(ROWS, 1)
        for row in range(ROWS):
            for start in sorted(
                (torch.randperm(run.length - 1, generator=generator)[:2] + 1).tolist()
            ):
                position_ids[row, start:] = torch.arange(run.length - start)
                labels[row, start] = -100
        batch["position_ids"] = position_ids
    return batch


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
    )


def alone(run: Run) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients with Transformers' own attention and masks."""
    batch = whole_batch(run)
    targets = F.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
    parts = dist.get_world_size() // run.context if run.model in LENGTH_DEPENDENT else 1
    total, gradients = 0.0, {}
    for part in range(parts):
        model = build(run.model)
        inputs = {key: value.chunk(parts)[part] for key, value in batch.items()}
        if run.model == "gpt_oss" and run.rows == "packed" and run.context > 1:
            inputs["attention_mask"] = separating_masks(
                inputs["position_ids"], window=5
            )
        logits = model(**inputs, use_cache=False).logits
        loss = (
            cross_entropy_sum(logits, targets.chunk(parts)[part])
            / (targets != -100).sum()
        )
        loss.backward()
        total += loss.item()
        for name, parameter in model.named_parameters():
            gradients[name] = (
                gradients[name] + parameter.grad if part else parameter.grad
            )
    return total, gradients


def separating_masks(
    position_ids: torch.Tensor, window: int
) -> dict[str, torch.Tensor]:
    """Masks [B, 1, S, S] to add to the scores, by kind of layer: those that GPT-OSS
    makes ignore ``position_ids``."""
    documents = F.pad(position_ids.diff(dim=1) != 1, (1, 0)).cumsum(1)
    places = torch.arange(position_ids.shape[1])
    seen = (documents[:, :, None] == documents[:, None]) & (places[:, None] >= places)
    near = seen & (places[:, None] - places < window)
    lowest = torch.finfo(torch.float64).min
    return {
        name: torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, lowest)[
            :, None
        ]
        for name, mask in (("full_attention", seen), ("sliding_attention", near))
    }


def on_ranks(run: Run) -> tuple[ParallelModel, Any]:
    model = build(run.model)
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if run.compiled is not None:
        layers = model.model.layers
        for place, layer in enumerate(layers):
            layers[place] = torch.compile(layer, backend=run.compiled, fullgraph=True)
    config = SmpConfig(
        shard_degree=run.shard,
        context_parallel_degree=run.context,
        tensor_parallel_degree=run.tensor,
    )
    parallel = parallelize(model, config)
    mesh = parallel.mesh
    mine = {
        key: value.chunk(mesh.data_size)[mesh.data_rank]
        for key, value in whole_batch(run).items()
    }
    if parallel.context is None:
        targets = F.pad(mine["labels"], (0, 1), value=-100)[:, 1:]
        count = (targets != -100).sum().double()
        dist.all_reduce(count)
        inputs = {key: value for key, value in mine.items() if key != "labels"}
        logits = parallel.module(**inputs, use_cache=False).logits
        loss = cross_entropy_sum(logits, targets) / (count / dist.get_world_size())
        loss.backward()
    else:
        split = parallel.context.split(mine)
        with enabled(split):
            # Only what a careless caller gives: positions and targets are filled in.
            mask = split.batch.get("attention_mask")
            logits = parallel.module(
                split.batch["input_ids"], attention_mask=mask, use_cache=False
            ).logits
            loss = cross_entropy_sum(logits, split.shift_labels) / split.tokens_per_rank
            loss.backward()
    dist.all_reduce(loss.detach_())
    return parallel, loss / dist.get_world_size()


def errors(runs: list[Run]) -> list[tuple[Run, float, float, float]]:
    """Per run: error of the loss, largest error of any gradient, largest gradient."""
    found = []
    for run in runs:
        parallel, loss = on_ranks(run)
        expected_loss, expected = alone(run)
        worst = 0.0
        for name, parameter in parallel.module.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            whole = (
                gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            )
            worst = max(
                worst,
                (whole - expected[name.replace("_orig_mod.", "")]).abs().max().item(),
            )
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        found.append((run, abs(loss.item() - expected_loss), worst, largest))
    return found
