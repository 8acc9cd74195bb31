"""Models of many shapes, small, each with a loss: what a wrap plan has to cope with.

Transformers is imported only by the builders that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smp_core.plan.units import Entry

VOCABULARY, LENGTH, PIXELS = 19, 6, 8


@dataclass(frozen=True)
class Specimen:
    """``loss(model, run, batch)``: ``run(method, *args)`` calls a method of the model
    as a step would (:meth:`ParallelModel.run_as_forward` on ranks)."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Callable[..., Any], Any], torch.Tensor]
    batch: Callable[[torch.Generator], Any]
    entry: Entry = "forward"
    knobs: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-12


def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)


def images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.randn(2, 3, PIXELS, PIXELS, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(5, (2,), generator=generator)


def vectors(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def causal_loss(
    model: nn.Module, run: Callable[..., Any], batch: torch.Tensor
) -> torch.Tensor:
    """From the logits: Transformers' own loss is computed in float32."""
    logits = model(input_ids=batch).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def class_loss(
    model: nn.Module, run: Callable[..., Any], batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    output = model(batch[0])
    return F.cross_entropy(getattr(output, "logits", output), batch[1])


def square_loss(
    model: nn.Module, run: Callable[..., Any], batch: torch.Tensor
) -> torch.Tensor:
    return model(batch).double().square().mean()


def step_loss(model: nn.Module, run: Callable[..., Any], batch: Any) -> torch.Tensor:
    return run(model.step, batch)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_embd": 12,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": LENGTH,
        "vocab_size": VOCABULARY,
    }
    quiet = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet, use_cache=False))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    more = {
        "intermediate_size": 17,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, **more))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 15,
    }
    more = {"image_size": PIXELS, "patch_size": 4, "num_labels": 5}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **more, **quiet))


class Residual(nn.Module):
    """Convolutions with BatchNorm; ``frozen`` statistics, as in fine-tuning, also while
    training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3)
        self.stages = nn.Sequential(Residual(7), Residual(7))
        self.head = nn.Linear(7, 5)

    def train(self, mode: bool = True) -> ConvNet:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(pixels)).mean((2, 3)))


def conv_net() -> nn.Module:
    net = ConvNet()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return net.train()


class Mlp(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Encoder(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.layers = embedding, nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Decoder(Encoder):
    def forward(
        self, ids: torch.Tensor, memory: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert memory is not None
        return (
            super().forward(ids) + memory.mean(1, keepdim=True)
        ) @ self.embedding.weight.T


class Translator(nn.Module):
    """Steps like a LightningModule: no forward of its own, one embedding shared by two
    children."""

    def __init__(self) -> None:
        super().__init__()
        embedding = nn.Embedding(VOCABULARY, 6)
        self.encoder, self.decoder = Encoder(embedding), Decoder(embedding)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.decoder(ids[:, :-1], self.encoder(ids))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class WithOwnParameters(nn.Module):
    """Steps like a LightningModule, and owns a temperature, a bias, and a 0-d gate of
    its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.bias = (
            nn.Parameter(torch.ones(1)),
            nn.Parameter(torch.zeros(5, 6)),
        )
        self.gate = nn.Parameter(torch.tensor(0.3))
        self.first, self.second = Mlp(), Mlp()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.bias.sum(0)
        return (self.second(x) / self.temperature + self.gate).square().mean()


class Listed(nn.Module):
    """Parameters in a ParameterList and a ParameterDict, a 0-d one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.directions = nn.ParameterList(
            nn.Parameter(torch.randn(6)) for _ in range(3)
        )
        self.named = nn.ParameterDict(
            {
                "shift": nn.Parameter(torch.randn(6)),
                "gain": nn.Parameter(torch.tensor(0.7)),
            }
        )
        self.blocks = nn.ModuleDict({"a": Mlp(), "b": Mlp()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (
            self.blocks["b"](self.blocks["a"](x)) * self.named["gain"]
            + self.named["shift"]
        )
        return torch.stack([x @ direction for direction in self.directions])


class TiedBlocks(nn.Module):
    """A linear layer that is one object in both blocks, and a weight of one block used
    by the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.blocks[1].down = self.blocks[0].down
        self.head = nn.Linear(6, 7)
        self.head.weight = self.blocks[2].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shared(nn.Module):
    """One block called as both of two layers (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        block = Mlp()
        self.blocks, self.last = nn.ModuleList([block, Mlp(), block]), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def compiled() -> nn.Module:
    """Compiled blocks, one by one; without code generation, which takes its time."""
    model = TiedBlocks()
    model.blocks = nn.ModuleList(
        torch.compile(block, backend="eager") for block in model.blocks
    )  # type: ignore[misc]
    return model


class MixedLeaf(nn.Module):
    """Two trainable dtypes in one leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn(6, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.scale.double()


class InFloat32(nn.Module):
    """A leaf in another dtype than its surroundings, as a router or a norm often is."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 6, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.router(x.float())).double()


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(Mlp().double(), InFloat32()) for _ in range(2)
        )
        self.mixed, self.norm = MixedLeaf(), nn.LayerNorm(6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(self.mixed(x))


def sequential() -> nn.Module:
    """A root that owns nothing itself; blocks of two kinds and a frozen one."""
    model = nn.Sequential(Mlp(), nn.Tanh(), Mlp(), nn.Linear(6, 4))
    model[0].requires_grad_(False)
    return model


SPECIMENS: dict[str, Specimen] = {
    "GPT-2": Specimen(gpt2, causal_loss, tokens),
    "Llama": Specimen(llama, causal_loss, tokens),
    "ViT": Specimen(vit, class_loss, images),
    "convnet": Specimen(conv_net, class_loss, images),
    "tied across children": Specimen(Translator, step_loss, tokens, entry="steps"),
    "tied across children, by hand": Specimen(
        Translator, step_loss, tokens, entry="children"
    ),
    "own parameters": Specimen(WithOwnParameters, step_loss, vectors, entry="steps"),
    "own parameters, by hand": Specimen(
        WithOwnParameters, step_loss, vectors, entry="children"
    ),
    "parameter list": Specimen(Listed, square_loss, vectors),
    "tied across blocks": Specimen(TiedBlocks, square_loss, vectors),
    "shared block": Specimen(Shared, square_loss, vectors),
    "compiled blocks": Specimen(compiled, square_loss, vectors),
    "compiled": Specimen(
        lambda: torch.compile(TiedBlocks(), backend="eager"), square_loss, vectors
    ),  # type: ignore
    "sequential": Specimen(sequential, square_loss, vectors),
    "every layer a unit": Specimen(
        TiedBlocks, square_loss, vectors, knobs={"units": {"min_parameters": 1}}
    ),
    # float32 parameters in it: 3 steps of a few roundings, 6e-8 each.
    "mixed dtypes": Specimen(MixedDtypes, square_loss, vectors, tolerance=1e-6),
    "mixed dtypes, small units": Specimen(
        MixedDtypes,
        square_loss,
        vectors,
        knobs={"units": {"min_parameters": 1}},
        tolerance=1e-6,
    ),
}
KEEP_DTYPE = {"mixed dtypes", "mixed dtypes, small units"}


def build(name: str) -> nn.Module:
    model = SPECIMENS[name].build()
    return model if name in KEEP_DTYPE else model.double()
