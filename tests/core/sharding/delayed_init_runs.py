"""Models on the meta device, and what they become."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from smp_core.sharding.weights.delayed_init import materialize

CPU = torch.device("cpu")


class Scale(nn.Module):
    """A 0-d parameter, which FSDP2 can not shard, and a buffer that only
    reset_parameters() can recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(()))
        self.register_buffer(
            "mask", torch.empty(4, 4, dtype=torch.bool), persistent=False
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.factor, mean=1.0, std=0.1)
        self.mask = torch.tril(torch.ones(4, 4)).bool()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Halved(nn.Module):
    """A parent whose initialiser reads what it overwrites in its child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Everything(nn.Module):
    """Tied, frozen, uneven (3 and 7 rows), 0-d, BatchNorm, buffers, a module that reads
    its child."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 3), nn.GELU(), nn.Linear(3, 6)) for _ in range(2)
        )
        self.halved = Halved()
        self.norm = nn.BatchNorm1d(6)
        self.scale = Scale()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.frozen(self.scale(self.halved(x)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(x.flatten(0, 1)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 37,
        "n_positions": 3,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def materialized(
    make: Callable[[], nn.Module], seed: int = 0, **kwargs: Any
) -> nn.Module:
    model = on_meta(make)
    materialize(model, CPU, seed=seed, **kwargs)
    return model


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach()
        for name, t in named
    }


def digest(model: nn.Module) -> str:
    """sha256 over names, dtypes and bytes of all parameters and buffers, non-persistent
    ones included."""
    total = hashlib.sha256()
    for name, tensor in sorted(full_state(model).items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


UNITS = ("Sequential", "MultiheadAttention", "GPT2Block")


def shard(model: nn.Module, degree: int, units: tuple[str, ...]) -> None:
    """Wraps modules by class name; a tied parameter must stay in one unit (here the
    root), or FSDP2 cuts the tie."""
    mesh = init_device_mesh(
        "cpu",
        (dist.get_world_size() // degree, degree),
        mesh_dim_names=("replicate", "shard"),
    )
    scalars = {p for p in model.parameters() if p.ndim == 0}
    for module in reversed(list(model.modules())):  # inner units first
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh["shard"], ignored_params=scalars)
    fully_shard(model, mesh=mesh["shard"], ignored_params=scalars)


def tiny(family: str) -> Callable[[], nn.Module]:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForSeq2SeqLM,
        GPT2Config,
        LlamaConfig,
        MixtralConfig,
        SwinConfig,
        T5Config,
        ViTConfig,
    )

    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    decoder = {**sizes, **special, "num_key_value_heads": 2, "vocab_size": 101}
    if family == "gpt2":
        config: Any = GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=101, n_positions=32, **special
        )
    elif family == "llama3-rope":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
        }
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        config = LlamaConfig(**decoder, rope_parameters=rope)
    elif family == "mixtral":
        config = MixtralConfig(**decoder, num_local_experts=4)
    elif family == "vit":
        return lambda: AutoModelForImageClassification.from_config(
            ViTConfig(**sizes, image_size=32, patch_size=8)
        )
    elif family == "swin":
        swin = SwinConfig(
            image_size=32, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
        )
        return lambda: AutoModelForImageClassification.from_config(swin)
    else:
        t5 = T5Config(
            d_model=64,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            d_kv=16,
            vocab_size=101,
            **special,
        )
        return lambda: AutoModelForSeq2SeqLM.from_config(t5)
    return lambda: AutoModelForCausalLM.from_config(config)
