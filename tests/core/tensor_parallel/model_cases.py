"""Tiny models over tensor ranks and in one process: losses, norms, gradients and weights in float64.

Transformers computes its loss, its norms and its softmax in float32, also of float64 models; :class:`Wide` leaves
these casts out, on both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from smp_core.config import SmpConfig
from smp_core.engine import parallelize
from smp_core.parallel_model import ParallelModel
from smp_core.sharding.delayed_init import materialize
from smp_core.tensor_parallel.roles import transformers_model
from tests.harness import run_ranks

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
_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0}


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
    changes = {"ffn_dim": 48, "dropout": 0.0, "attention_dropout": 0.0, "word_embed_proj_dim": 32}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**{**_COMMON, **changes}))


def _bert() -> nn.Module:
    changes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**_COMMON, **changes}))


def _falcon(**changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        known = {**_COMMON, **_NO_DROPOUT, "ffn_hidden_size": 48, "alibi": False, "bias": True, **changes}
        return transformers.FalconForCausalLM(transformers.FalconConfig(**known))

    return make


def _bloom() -> nn.Module:
    known = {**_COMMON, **_NO_DROPOUT, "n_layer": 2, "n_head": 4}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**known))


def _t5(**changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        known = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        known |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**known, **changes))

    return make


class Pixels(nn.Module):
    """A vision transformer with nine patches and one token more, over pictures that tokens make."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.ViTConfig(
            **{**_COMMON, **_NO_DROPOUT}, image_size=TOKENS, patch_size=4, num_channels=1, num_labels=VOCABULARY
        )
        config.attention_probs_dropout_prob = 0.0
        self.vit = transformers.ViTForImageClassification(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        wave = (tokens.double() / VOCABULARY - 0.5).to(self.vit.classifier.bias.dtype)
        return self.vit(pixel_values=(wave[:, None, :, None] + wave.square()[:, None, None, :])).logits


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
        q, k, v = (part.view(batch, tokens, -1, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
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
    """One whose initialiser reads what it overwrites, in all of its modules, and draws for one after the other."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5).add_(0.01 * torch.randn_like(parameter))


class OddBlock(PlainBlock):
    """With a number of its own, and statistics that are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.statistics = nn.Parameter(torch.tensor(0.5)), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gate + self.statistics(x.transpose(1, 2)).transpose(1, 2)


class OddModel(PlainModel):
    """Statistics before the blocks, in them and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.early, self.late = nn.BatchNorm1d(TOKENS), nn.BatchNorm1d(TOKENS, affine=False)
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
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(tokens)))


class StrangeBlock(nn.Module):
    """Names and numbers that nobody knows: attention in the block's own attributes, a weight between the halves of
    the perceptron, a norm of each head, a filter over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(32), nn.LayerNorm(32)
        self.core = StrangeCore()
        self.wide, self.narrow, self.bend = nn.Linear(32, 48), nn.Linear(48, 32), nn.PReLU()
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
        q, k, v = (part(x).view(batch, tokens, self.lot, 8).transpose(1, 2) for part in (self.a, self.b, self.c))
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

        return peft.get_peft_model(MODELS[kind](), peft.LoraConfig(r=4, target_modules=targets, lora_alpha=8))

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
    "odd": OddModel,
    "encoder": EncoderModel,
    "strange": StrangeModel,
    "opt": _opt,
    "bert": _bert,
    "gemma2": _causal("Gemma2", head_dim=8),
    "gemma3": _causal("Gemma3Text", head_dim=8),
    "mistral": _causal("Mistral"),
    "mixtral": _causal("Mixtral", num_local_experts=4, experts_implementation="eager"),
    "qwen3_moe": _causal(
        "Qwen3Moe",
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        experts_implementation="eager",
    ),
    "phi3": _causal("Phi3", resid_pdrop=0.0, embd_pdrop=0.0),
    "olmo2": _causal("Olmo2"),
    "gpt_neox": _causal("GPTNeoX", **_NO_DROPOUT),
    "starcoder2": _causal("Starcoder2", attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0),
    "falcon": _falcon(new_decoder_architecture=True, num_attention_heads=8, num_kv_heads=4),
    "falcon_heads": _falcon(multi_query=False, parallel_attn=False),
    "bloom": _bloom,
    "vit": Pixels,
    "t5": _t5(),
    "t5_gated": _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "llama_lora": _lora("llama", ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]),
    "gpt2_lora": _lora("gpt2", ["c_attn", "c_proj", "c_fc"]),
    "glm": _causal("Glm", head_dim=8, attention_dropout=0.0),
}
PLANS: dict[str, Any] = {"plain": GLOBS, "encoder": ENCODER_GLOBS, "strange": "infer"}


class Wide(TorchFunctionMode):
    """Casts of float64 tensors to float32 are left out. For forward and backward passes: every look at a tensor's
    attribute is slower under it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if func is torch.Tensor.float:
                return first
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def wide_when_computed_again(model: nn.Module) -> nn.Module:
    """Let blocks, and attention and perceptrons in them, leave casts out by themselves: backward passes begin outside
    of the mode around them."""

    def wide(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with Wide():
            return forward(*args, **kwargs)

    for module in model.modules():
        for block in list(module) if isinstance(module, nn.ModuleList) else ():
            for part in (block, *block.children()):
                if any(True for _ in part.children()):
                    part.forward = functools.partial(wide, part.forward)
    return model


def build(kind: str, seed: int = 0, delayed: bool = False) -> nn.Module:
    """``delayed``: on the meta device."""
    torch.manual_seed(seed)
    if delayed:
        with torch.device("meta"):
            return MODELS[kind]().double()
    model = MODELS[kind]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batches(micro_batches: int, steps: int = STEPS) -> torch.Tensor:
    """[steps, micro-batches, samples, tokens]"""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCABULARY, (steps, micro_batches, SAMPLES, TOKENS), generator=generator)


def own_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int = VOCABULARY, **_: Any) -> torch.Tensor:
    """Transformers' causal loss, written out."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(model, Pixels):
        return F.cross_entropy(model(tokens), tokens[:, 0])
    if transformers_model(model) is not None:
        return model(input_ids=tokens, labels=tokens).loss
    return own_loss(model(tokens), tokens)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@dataclass
class Training:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    shows_gradients: bool = True
    """False: parameters have none, but masters over the world do."""

    def take(self, model: nn.Module, loss: float, norm: float, step: int) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        if self.shows_gradients:
            found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            self.gradients |= {f"{step} {name}": full(gradient) for name, gradient in found.items()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Gradients of key biases are zero but for rounding errors; a small eps would make steps of these.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


@functools.cache
def alone(kind: str, micro_batches: int, steps: int = STEPS, max_norm: float = 0.5, delayed: bool = False) -> Training:
    """The same training in one process; ``delayed``: from the values of delayed initialisation."""
    seen = Training()
    model: Any = build(kind, delayed=delayed)
    if delayed:
        materialize(model, torch.device("cpu"), seed=0)
    known = transformers_model(model)
    if known is not None and "Causal" in known.loss_function.__name__:
        known.loss_function = own_loss
    optimizer = optimizer_of(model)
    for step, micro in enumerate(batches(micro_batches, steps)):
        total = 0.0
        for tokens in micro:
            with Wide():
                loss = loss_of(model, tokens) / micro_batches
                loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        seen.take(model, total, norm.item(), step)
        optimizer.step()
        optimizer.zero_grad()
    seen.weights = {name: full(value) for name, value in model.state_dict().items()}
    return seen


@dataclass(frozen=True)
class Case:
    """What one training over ranks is like; the world is tensor x shard x replicas."""

    kind: str
    tensor: int = 2
    shard: int = 1
    sequence: bool = True
    micro_batches: int = 1
    knobs: tuple[tuple[str, Any], ...] = ()
    mutation: str = ""
    steps: int = STEPS

    def parallel(self, **more: Any) -> ParallelModel:
        model = build(self.kind, seed=dist.get_rank())
        if "activations" in dict(self.knobs) and "compile" not in dict(self.knobs):
            model = wide_when_computed_again(model)
        recipe = {"plan": PLANS.get(self.kind, "auto"), "sequence_parallel": self.sequence}
        knobs = {"shard_degree": self.shard, "tensor_parallel_degree": self.tensor, "tensor_parallel": recipe}
        return parallelize(model, SmpConfig(**{**knobs, **dict(self.knobs), **more}))


def together(case: Case, max_norm: float = 0.5) -> Training:
    """The training over the ranks of the default group."""
    seen = Training(shows_gradients=dict(case.knobs).get("optimizer_shard") != "world")
    parallel = case.parallel()
    model, mesh = parallel.module, parallel.mesh
    optimizer = optimizer_of(model)
    parallel.prepare_optimizer(optimizer)
    for step, micro in enumerate(batches(case.micro_batches, case.steps)):
        total = torch.zeros((), dtype=torch.float64)
        for number, tokens in enumerate(micro):
            own = tokens.chunk(mesh.data_size)[mesh.data_rank]
            with parallel.window.accumulate(number < case.micro_batches - 1), Wide():
                loss = loss_of(model, own) / case.micro_batches
                loss.backward()
            total += loss.detach()
        norm = parallel.clip_grad_norm_(max_norm)
        dist.all_reduce(total)
        seen.take(model, total.item() / dist.get_world_size(), norm.item(), step)
        optimizer.step()
        optimizer.zero_grad()
    seen.weights = {name: full(value) for name, value in model.state_dict().items()}
    return seen


def differences(seen: Training, expected: Training, tolerance: float = 1e-12) -> list[str]:
    """What is further off than ``tolerance`` from the training of one process; gradients where ``seen`` has any."""
    found = []
    for what in ("losses", "norms"):
        for step, (ours, theirs) in enumerate(zip(getattr(seen, what), getattr(expected, what), strict=True)):
            if not abs(ours - theirs) <= tolerance:
                found.append(f"{what} of step {step}: {ours} against {theirs}")
    for what in ("gradients", "weights") if seen.gradients else ("weights",):
        ours, theirs = getattr(seen, what), getattr(expected, what)
        if ours.keys() != theirs.keys():
            found.append(f"{what} of {sorted(ours.keys() ^ theirs.keys())} on one side only")
        for name in ours.keys() & theirs.keys():
            worst = (ours[name] - theirs[name]).abs().max().item()
            if not worst <= tolerance:
                found.append(f"{what} of {name} is {worst:.3g} off")
    return found


def several(cases: list[Case]) -> list[Training]:
    return [together(case) for case in cases]


def assert_like_one_process(cases: list[Case], world: int, ranks_per_node: int | None = None) -> None:
    for rank, trained in enumerate(run_ranks(several, world, cases, ranks_per_node=ranks_per_node, timeout=1200)):
        for case, seen in zip(cases, trained, strict=True):
            assert differences(seen, alone(case.kind, case.micro_batches, case.steps)) == [], f"{case} on rank {rank}"
