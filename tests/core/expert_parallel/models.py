"""Tiny mixtures of experts: ten Transformers families, and one of one's own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.core.blocks import OwnExperts
from tests.core.tensor_parallel.models import _COMMON, MODELS, VOCABULARY
from tests.older_transformers import EAGER_EXPERTS

EXPERTS = 4
_DEEPSEEK = {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_JAMBA = {
    "num_experts": EXPERTS, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 0,
    "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_d_conv": 2,
}  # fmt: skip
_GLM = {
    "head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {
        "head_dim": 8,
        "num_experts": EXPERTS,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "Olmoe": {"num_experts": EXPERTS},
    "DeepseekV3": _DEEPSEEK,
    "GptOss": {
        "head_dim": 8,
        "num_local_experts": EXPERTS,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "GraniteMoe": {"num_local_experts": EXPERTS},
    "Glm4Moe": _GLM,
    "Jamba": _JAMBA,
    "Phimoe": {
        "num_local_experts": EXPERTS,
        "router_jitter_noise": 0.0,
        "input_jitter_noise": 0.0,
    },
    "MiniMax": {
        "head_dim": 8,
        "num_local_experts": EXPERTS,
        "layer_types": ["full_attention", "linear_attention"],
        "block_size": 4,
    },
}


def _family(kind: str, **sizes: Any) -> nn.Module:
    known = {
        **_COMMON,
        "num_experts_per_tok": 2,
        "attention_dropout": 0.0,
        **EAGER_EXPERTS,
    }
    known |= {**{**FAMILIES, **FURTHER}[kind], **sizes}
    config = getattr(transformers, f"{kind}Config")(**known)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight", "router.layer.weight")):
                parameter.mul_(20.0)  # choices that are no ties
    return model


def _to_few(model: nn.Module, chosen: list[int]) -> nn.Module:
    """A model whose tokens all go to these experts, so that the ranks of others get
    none."""
    for module in model.modules():
        if hasattr(module, "num_experts") and any(
            True for _ in module.parameters(recurse=False)
        ):
            module.register_forward_pre_hook(functools.partial(_choose, chosen))
    return model


def _choose(
    few: list[int], _: nn.Module, args: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...] | None:
    if len(args) != 3:  # a router
        return None
    hidden, chosen, weights = args
    return hidden, torch.tensor(few[: chosen.shape[-1]]).expand(chosen.shape), weights


class OwnBlock(nn.Module):
    def __init__(self, to_one: bool) -> None:
        super().__init__()
        self.router, self.experts, self.to_one = (
            nn.Linear(16, EXPERTS),
            OwnExperts(EXPERTS, 16, spread=0.25),
            to_one,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.router(hidden).softmax(-1)
        weights, chosen = scores.topk(1 if self.to_one else 2, dim=-1)
        if self.to_one:  # one expert takes all: the other ranks get no token
            weights, chosen = scores[..., 1:2], torch.ones_like(chosen)
        flat = self.experts(
            hidden.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1)
        )
        return hidden + flat.view(hidden.shape)


class OwnModel(nn.Module):
    """A mixture of experts that is none of Transformers'."""

    def __init__(self, to_one: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(OwnBlock(to_one) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _frozen_words() -> nn.Module:
    """Nothing that the first experts get has a gradient, and one expert takes all."""
    model = OwnModel(to_one=True)
    model.words.requires_grad_(False)
    return model


def written_out(
    gate_logits: Any, num_experts: int, top_k: int = 2, attention_mask: Any = None
) -> torch.Tensor:
    """The loss of all tokens in the dtype of its input; Transformers' own counts in
    float32."""
    shares = torch.cat([layer.softmax(-1) for layer in gate_logits])
    mask = (
        torch.ones(len(shares))
        if attention_mask is None
        else attention_mask.reshape(-1).repeat(len(gate_logits))
    )
    chosen = F.one_hot(shares.topk(top_k, -1).indices, num_experts).sum(1).to(shares)
    weights = mask.to(shares)[:, None]
    return (
        num_experts
        * ((chosen * weights).sum(0) * (shares * weights).sum(0)).sum()
        / weights.sum() ** 2
    )


def balanced(kind: str = "Mixtral", exact: bool = True, **sizes: Any) -> nn.Module:
    """A model with an auxiliary loss that its gradients are half of."""
    model: Any = _family(kind, **sizes)
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    if exact:
        sys.modules[type(model).__module__].load_balancing_loss_func = written_out  # type: ignore[attr-defined]
    return model


def adapted(targets: list[str], parameters: list[str]) -> nn.Module:
    """A Mixtral with PEFT's adapters."""
    import peft

    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        init_lora_weights=False,
        target_modules=targets,
        target_parameters=parameters,
    )
    return peft.get_peft_model(_family("Mixtral"), config)


def _one_adapted() -> nn.Module:
    """Adapters of experts of which one takes all."""
    import peft

    config = peft.LoraConfig(
        r=2,
        init_lora_weights=False,
        target_modules=[],
        target_parameters=["experts.matrices"],
    )
    return peft.get_peft_model(OwnModel(to_one=True), config)  # type: ignore[arg-type]


def _wide() -> nn.Module:
    """Experts whose halves FP8 takes."""
    return _family("Qwen3Moe", moe_intermediate_size=32)


# What is drawn: families besides those above, and what is unusual about a model.
_QWEN2 = {
    "num_experts": EXPERTS,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
_DOTS = {**_GLM, "first_k_dense_replace": 0}
_ERNIE = {
    "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
    "moe_layer_start_index": 0,
}  # fmt: skip
_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}  # fmt: skip
_SHARED = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": EXPERTS,
    "num_shared_experts": 1,
}
_LINEAR = {
    **_SHARED, "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_WINDOWS = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
FURTHER: dict[str, dict[str, Any]] = {
    # Biases that are parameters; experts beside a perceptron; latent attention; experts
    # behind convolutions and linear attention; one layer of several without experts.
    "Afmoe": {**_SHARED, **_WINDOWS, "num_dense_layers": 1},
    "Cohere2Moe": {**_SHARED, **_WINDOWS},
    "DeepseekV2": {**_MLA, "n_group": 2, "topk_group": 1},
    "ExaoneMoe": {**_SHARED, **_WINDOWS},
    "GraniteMoeHybrid": {
        "num_local_experts": EXPERTS, "shared_intermediate_size": 24, "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4,
    },
    "HunYuanMoEV1": {"head_dim": 8, "num_experts": EXPERTS, "moe_topk": 2},
    "Lfm2Moe": {
        "moe_intermediate_size": 16, "num_experts": EXPERTS, "num_dense_layers": 0, "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"],
    },
    "Mistral4": _MLA,
    "Qwen3Next": _LINEAR,
    "Qwen2Moe": _QWEN2,
    "GraniteMoeShared": {"num_local_experts": EXPERTS, "shared_intermediate_size": 24},
    "FlexOlmo": {"num_experts": EXPERTS},
    "Dots1": _DOTS,
    "Ernie4_5_Moe": _ERNIE,
    "MiniMaxM2": {"num_local_experts": EXPERTS, "head_dim": 8, "rotary_dim": 8},
}  # fmt: skip
DRAWN = (*FAMILIES, *FURTHER, "own experts")
WITH_LOSS = (
    "Mixtral",
    "Qwen3Moe",
    "Olmoe",
    "GptOss",
    "GraniteMoe",
    "Phimoe",
    "Qwen2Moe",
    "FlexOlmo",
    "MiniMaxM2",
    "GraniteMoeHybrid",
    "Qwen3Next",
)
WITH_BIASES = ("DeepseekV3", "Glm4Moe", "Dots1")
WITH_ADAPTERS = ("Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV3", "Qwen2Moe", "Dots1")


def features_of(family: str) -> list[str]:
    """What may be unusual about a model of a family."""
    if family == "own experts":
        return [
            "to one",
            "frozen router",
            "frozen experts",
            "shared module",
            "shared matrices",
        ]
    found = [
        "to one",
        "to two",
        "frozen router",
        "frozen experts",
        "frozen others",
        "tied",
        "one choice",
        "8 experts",
    ]
    if family in WITH_LOSS:
        found.append("auxiliary")
    if family in WITH_ADAPTERS:
        found += ["adapted", "adapted experts"]
    return found


def featured(kind: str) -> nn.Module:
    """A family's model with the features behind its name: "Mixtral, tied, to one"."""
    family, *features = kind.split(", ")
    model: Any = (
        _own_with(features)
        if family == "own experts"
        else _family_with(family, features)
    )
    for name, parameter in model.named_parameters():
        is_expert = ".experts." in name and "shared_expert" not in name
        is_router = any(part in name for part in ("gate.weight", "router"))
        of_feature = {
            "frozen experts": is_expert,
            "frozen router": is_router,
            "frozen others": not is_expert,
        }
        if any(of_feature.get(feature, False) for feature in features):
            parameter.requires_grad_(False)
    if "adapted" in features or "adapted experts" in features:
        import peft

        targets = (
            ["experts.gate_up_proj", "experts.down_proj"]
            if "adapted experts" in features
            else []
        )
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            init_lora_weights=False,
            target_modules=["o_proj"],
            target_parameters=targets,
        )
        model = peft.get_peft_model(model, config)
    return model


def _own_with(features: list[str]) -> nn.Module:
    model: Any = OwnModel(to_one="to one" in features)
    first, second = model.blocks[0].experts, model.blocks[1].experts
    if "shared matrices" in features:
        second.matrices = first.matrices
    if "shared module" in features:
        model.blocks[1].experts = first
    return model


def _family_with(family: str, features: list[str]) -> nn.Module:
    sizes: dict[str, Any] = {"tie_word_embeddings": "tied" in features}
    known = {**FAMILIES, **FURTHER}[family]
    if "8 experts" in features:
        sizes |= {
            name: 2 * EXPERTS
            for name, value in known.items()
            if value == EXPERTS and "experts" in name
        }
    if "one choice" in features:
        sizes["moe_k" if "moe_k" in known else "num_experts_per_tok"] = 1
    if "4 layers" in features:
        kinds = (
            {"layer_types": 2 * known["layer_types"]} if "layer_types" in known else {}
        )
        sizes |= {"num_hidden_layers": 4, **kinds}
    model: Any = (
        balanced(family, **sizes)
        if "auxiliary" in features
        else _family(family, **sizes)
    )
    few = [FEW[name] for name in ("one", "two") if f"to {name}" in features]
    return _to_few(model, few[0]) if few else model


OWN: dict[str, Callable[[], nn.Module]] = {
    "own experts": OwnModel,
    "one expert takes all": functools.partial(OwnModel, to_one=True),
    "frozen words": _frozen_words,
}
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FEW = {"one": [0, 0], "two": [0, 1]}
SKEWED = {
    f"{kind}, to {name}": functools.partial(featured, f"{kind}, to {name}")
    for name in FEW
    for kind in FAMILIES
}
ADAPTED = {
    "adapted": functools.partial(adapted, ["q_proj", "v_proj"], []),
    "adapted experts": functools.partial(adapted, ["q_proj"], FUSED),
    "adapted experts only": functools.partial(adapted, [], FUSED),
    "adapted, one expert takes all": _one_adapted,
}
LONG_GPT_OSS = {"layer_types": ["full_attention", "sliding_attention"] * 2}
BALANCED = {
    "balanced on 4 stages": functools.partial(balanced, num_hidden_layers=4),
    "balanced Qwen3Moe": functools.partial(
        balanced, "Qwen3Moe", num_hidden_layers=4, decoder_sparse_step=1
    ),
    "Qwen3Moe whose last layers are dense": functools.partial(
        balanced, "Qwen3Moe", num_hidden_layers=4, mlp_only_layers=[2, 3]
    ),
    "balanced Olmoe": functools.partial(balanced, "Olmoe", num_hidden_layers=4),
    "balanced GptOss": functools.partial(
        balanced, "GptOss", num_hidden_layers=4, **LONG_GPT_OSS
    ),
    "wide experts": _wide,
    "balanced": balanced,
    "balanced in float32": functools.partial(balanced, exact=False),
}
MODELS.update(
    {
        **ADAPTED,
        **SKEWED,
        **BALANCED,
        **{kind: functools.partial(_family, kind) for kind in FAMILIES},
        **OWN,
    }
)
