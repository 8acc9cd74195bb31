"""Adapters of PEFT's kinds, and callbacks that change what is trained: rarer parts of
random programs (`tests.accelerate.program_parts`)."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
from torch import nn
from transformers import TrainerCallback

# What `peft.get_peft_model` is given, by the kind of adapter.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "rank-stabilised": ("LoraConfig", {"r": 2, "use_rslora": True}),
    "dora": ("LoraConfig", {"r": 2, "use_dora": True}),
    "biases": ("LoraConfig", {"r": 2, "bias": "lora_only"}),
    "saved modules": ("LoraConfig", {"r": 2, "modules_to_save": ["norm", "ln_f"]}),
    "of embeddings": ("LoraConfig", {"r": 2, "trainable_token_indices": [3, 4]}),
    "ia3": ("IA3Config", {"feedforward_modules": []}),
    "vera": ("VeraConfig", {"r": 2}),
    "loha": ("LoHaConfig", {"r": 2}),
    "lokr": ("LoKrConfig", {"r": 2}),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 4}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 2}),
    "p-tuning": (
        "PromptEncoderConfig",
        {"num_virtual_tokens": 2, "encoder_hidden_size": 8},
    ),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 2}),
}
# Those that have no layers around others: prompts of their own.
PROMPTS = ("prompt", "p-tuning", "prefix")


def with_adapter(model: Any, kind: str) -> nn.Module:
    """Adapters in float64, all of whose parts matter."""
    name, options = ADAPTERS[kind]
    if kind not in PROMPTS:
        is_gpt2 = hasattr(model, "transformer")
        options = {
            **options,
            "target_modules": ["c_attn"] if is_gpt2 else ["q_proj", "v_proj"],
        }
    else:
        options = {**options, "task_type": "CAUSAL_LM"}
    if "modules_to_save" in options:
        options["modules_to_save"] = ["ln_f" if is_gpt2 else "norm"]
    adapted = peft.get_peft_model(model, getattr(peft, name)(**options)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad and not parameter.abs().sum():
                parameter.copy_(
                    0.1
                    * torch.randn(
                        parameter.shape, generator=generator, dtype=torch.float64
                    )
                )
    return adapted


class Writes(TrainerCallback):
    def __init__(self, recorder: Any, tokens: Any = None) -> None:
        self.recorder = recorder


class Freezes(Writes):
    """Every second step some matrices are left as they are."""

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.c_fc.weight", "mlp.up_proj.weight")):
                parameter.requires_grad_(state.global_step % 2 == 0)


class Averages(Writes):
    """An average by hand, which an evaluation is made with."""

    @torch.no_grad()
    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        named = dict(model.named_parameters())
        if not hasattr(self, "kept"):
            self.kept = {name: each.detach().clone() for name, each in named.items()}
        for name, each in named.items():
            self.kept[name].lerp_(each, 0.3)

    @torch.no_grad()
    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        for name, each in model.named_parameters():
            each.copy_(self.kept[name])


class Forgets(Writes):
    """The optimizer begins again."""

    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        if state.global_step == 1:
            optimizer.state.clear()


class Halves(Writes):
    """Halves gradients of some parameters, drops others."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        for number, parameter in enumerate(model.parameters()):
            if parameter.grad is None:
                continue
            if number % 3 == 0:
                parameter.grad.mul_(0.5)
            elif number % 3 == 1:
                parameter.grad = None


class Noisy(Writes):
    @torch.no_grad()
    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        torch.manual_seed(state.global_step)
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))


class Resets(Writes):
    """A layer begins again in mid-training."""

    @torch.no_grad()
    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if state.global_step == 1:
            torch.manual_seed(5)
            for name, parameter in model.named_parameters():
                if "mlp" in name and parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)


class Keeps(Writes):
    """The best weights, kept as a state dict and loaded at the end."""

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if state.global_step == 1:
            self.kept = copy.deepcopy(
                {name: each.detach() for name, each in model.state_dict().items()}
            )

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        model.load_state_dict(self.kept)


CALLBACKS: dict[str, type[Writes]] = {
    "freezes": Freezes,
    "averages": Averages,
    "forgets": Forgets,
    "halves gradients": Halves,
    "noisy": Noisy,
    "resets": Resets,
    "keeps": Keeps,
}
