"""Tiny models whose layers are split over tensor ranks: Transformers' and some that
carry no plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.older_transformers import EAGER_EXPERTS

VOCABULARY, SAMPLES, TOKENS, STEPS = 48, 8, 12, 2
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_NO_DROPOUT = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
}


def _causal(kind: str, **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **changes})
        return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)

    return make


def _gpt2(layers: int = 2) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=layers, n_head=4, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _opt() -> nn.Module:
    changes = {
        "ffn_dim": 48,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "word_embed_proj_dim": 32,
    }
    return transformers.OPTForCausalLM(transformers.OPTConfig(**{**_COMMON, **changes}))


def _bert() -> nn.Module:
    changes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**{**_COMMON, **changes})
    )


def _falcon(**changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        known = {
            **_COMMON,
            **_NO_DROPOUT,
            "ffn_hidden_size": 48,
            "alibi": False,
            "bias": True,
            **changes,
        }
        return transformers.FalconForCausalLM(transformers.FalconConfig(**known))

    return make


def _bloom() -> nn.Module:
    known = {**_COMMON, **_NO_DROPOUT, "n_layer": 2, "n_head": 4}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**known))


def _t5(**changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        known = {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
        }
        known |= {
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "relative_attention_num_buckets": 8,
        }
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**known, **changes)
        )

    return make


class Pixels(nn.Module):
    """A vision transformer with nine patches and one token more, over pictures that
    tokens make."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.ViTConfig(
            **{**_COMMON, **_NO_DROPOUT},
            image_size=TOKENS,
            patch_size=4,
            num_channels=1,
            num_labels=VOCABULARY,
        )
        config.attention_probs_dropout_prob = 0.0
        self.vit = transformers.ViTForImageClassification(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        wave = (tokens.double() / VOCABULARY - 0.5).to(self.vit.classifier.bias.dtype)
        return self.vit(
            pixel_values=(wave[:, None, :, None] + wave.square()[:, None, None, :])
        ).logits


class PlainBlock(nn.Module):
    """A block whose author has never heard of any of this; attention without masks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attend = PlainAttention()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.scale = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.before(x))
        x = x + self.scale(x).tanh()
        return x + self.down(F.gelu(self.up(self.between(x))))


class PlainAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, -1, 8).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class PlainModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.arange(12, device="cpu").view(2, 6)
        self.words = nn.Embedding(VOCABULARY, 32, padding_idx=3)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class HalvedModel(PlainModel):
    """One whose initialiser reads what it overwrites, in all of its modules, and draws
    for one after the other."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5).add_(0.01 * torch.randn_like(parameter))


def _frozen(*names: str) -> Callable[[], nn.Module]:
    """With modules that are not trained: on two pipeline stages all of one of them."""

    def make() -> nn.Module:
        model = PlainModel()
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    return make


class OddBlock(PlainBlock):
    """With a number of its own, and statistics that are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.statistics = nn.Parameter(torch.tensor(0.5)), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gate + self.statistics(
            x.transpose(1, 2)
        ).transpose(1, 2)


class RoutingBlock(PlainBlock):
    """A sample goes to one of two experts; the examples all to one, so that recordings
    do not see the other."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        routes = x.detach()[:, 0, 0] > 0
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (own := routes == number).any():
                mixed[own] = expert(x[own])
        return x + mixed


class RoutingModel(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RoutingBlock() for _ in range(2))
        self.example_input_array = torch.zeros(2, 6, dtype=torch.long)


class OddModel(PlainModel):
    """Statistics before the blocks, in them and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.early, self.late = (
            nn.BatchNorm1d(TOKENS),
            nn.BatchNorm1d(TOKENS, affine=False),
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("factor", torch.rand(()))  # rank 0's counts
        self.example_input_array = torch.zeros(2, TOKENS, dtype=torch.long)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.early(self.words(tokens))
        for block in self.blocks:
            x = block(x)
        self.seen += tokens.numel()
        return self.head(self.norm(self.late(x * self.factor)))


GLOBS = {
    "*.qkv": "column:3",
    "*.out": "row",
    "*.up": "column",
    "*.down": "row",
    "words": "vocabulary",
    "head": "column_gather",
}


class EncoderModel(nn.Module):
    """torch's own layers, whose attention is called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.arange(12).view(2, 6)
        self.words = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(
            32, 4, 48, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(tokens)))


class StrangeBlock(nn.Module):
    """Names and numbers that nobody knows: attention in the block's own attributes, a
    weight between the halves of the perceptron, a norm of each head, a filter over
    tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(32), nn.LayerNorm(32)
        self.core = StrangeCore()
        self.wide, self.narrow, self.bend = (
            nn.Linear(32, 48),
            nn.Linear(48, 32),
            nn.PReLU(),
        )
        self.smooth = Smooth()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.core(self.one(x))
        x = x + self.smooth(x)
        return x + self.narrow(self.bend(self.wide(self.two(x))))


class StrangeCore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lot, self.span = 4, 32
        self.a, self.b, self.c, self.d = (nn.Linear(32, 32) for _ in range(4))
        self.level = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part(x).view(batch, tokens, self.lot, 8).transpose(1, 2)
            for part in (self.a, self.b, self.c)
        )
        mixed = F.scaled_dot_product_attention(self.level(q), k, v)
        return self.d(mixed.transpose(1, 2).reshape(batch, tokens, self.span))


class Smooth(nn.Module):
    """Every token with the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(1, 1) * self.weight


class StrangeModel(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StrangeBlock() for _ in range(2))


ENCODER_GLOBS = {"*.linear1": "column", "*.linear2": "row", "*.self_attn": "whole"}


def _lora(kind: str, targets: list[str]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import peft

        return peft.get_peft_model(
            MODELS[kind](), peft.LoraConfig(r=4, target_modules=targets, lora_alpha=8)
        )

    return make


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _causal("Llama", attention_bias=True, mlp_bias=True),
    "llama_tied": _causal("Llama", tie_word_embeddings=True),
    "llama_deep": _causal("Llama", tie_word_embeddings=True, num_hidden_layers=4),
    "llama_deeper": _causal("Llama", tie_word_embeddings=True, num_hidden_layers=8),
    "qwen3": _causal("Qwen3", head_dim=8),
    "gpt2": _gpt2,
    "gpt2_deep": functools.partial(_gpt2, 4),
    "plain": PlainModel,
    "halved": HalvedModel,
    "routing": RoutingModel,
    "first_frozen": _frozen("words", "blocks.0"),
    "last_frozen": _frozen("blocks.1", "norm", "head"),
    "odd": OddModel,
    "encoder": EncoderModel,
    "strange": StrangeModel,
    "opt": _opt,
    "bert": _bert,
    "gemma2": _causal("Gemma2", head_dim=8),
    "gemma3": _causal("Gemma3Text", head_dim=8),
    "mistral": _causal("Mistral"),
    "mixtral": _causal("Mixtral", num_local_experts=4, **EAGER_EXPERTS),
    "qwen3_moe": _causal(
        "Qwen3Moe",
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        **EAGER_EXPERTS,
    ),
    "phi3": _causal("Phi3", resid_pdrop=0.0, embd_pdrop=0.0),
    "olmo2": _causal("Olmo2"),
    "gpt_neox": _causal("GPTNeoX", **_NO_DROPOUT),
    "starcoder2": _causal(
        "Starcoder2", attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0
    ),
    "falcon": _falcon(
        new_decoder_architecture=True, num_attention_heads=8, num_kv_heads=4
    ),
    "falcon_heads": _falcon(multi_query=False, parallel_attn=False),
    "bloom": _bloom,
    "vit": Pixels,
    "t5": _t5(),
    "t5_gated": _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "llama_lora": _lora(
        "llama", ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    ),
    "gpt2_lora": _lora("gpt2", ["c_attn", "c_proj", "c_fc"]),
    "glm": _causal("Glm", head_dim=8, attention_dropout=0.0),
}
PLANS: dict[str, Any] = {
    **dict.fromkeys(("plain", "halved", "first_frozen", "last_frozen"), GLOBS),
    "encoder": ENCODER_GLOBS,
    "strange": "infer",
}
