"""Delayed initialisation: the same numbers on every number of ranks, from every initialiser a model may have."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from smp_core.sharding.delayed_init import has_meta_tensors, materialize
from tests.harness import run_ranks

CPU = torch.device("cpu")


class Scale(nn.Module):
    """A 0-d parameter, which FSDP2 can not shard, and a buffer that only reset_parameters() can recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(()))
        self.register_buffer("mask", torch.empty(4, 4, dtype=torch.bool), persistent=False)
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
    """Tied, frozen, uneven (3 and 7 rows), 0-d, BatchNorm, buffers, a module that reads its child."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 3), nn.GELU(), nn.Linear(3, 6)) for _ in range(2))
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

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 37, "n_positions": 3}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


MODELS: dict[str, Callable[[], nn.Module]] = {"everything": Everything, "gpt2": gpt2}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def materialized(make: Callable[[], nn.Module], seed: int = 0, **kwargs: Any) -> nn.Module:
    model = on_meta(make)
    materialize(model, CPU, seed=seed, **kwargs)
    return model


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for name, t in named}


def digest(model: nn.Module) -> str:
    """sha256 over names, dtypes and bytes of all parameters and buffers, non-persistent ones included."""
    total = hashlib.sha256()
    for name, tensor in sorted(full_state(model).items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


UNITS = ("Sequential", "MultiheadAttention", "GPT2Block")


def shard(model: nn.Module, degree: int, units: tuple[str, ...]) -> None:
    """Wraps modules by class name; a tied parameter must stay in one unit (here the root), or FSDP2 cuts the tie."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // degree, degree), mesh_dim_names=("replicate", "shard"))
    scalars = {p for p in model.parameters() if p.ndim == 0}
    for module in reversed(list(model.modules())):  # inner units first
        if type(module).__name__ in units:
            fully_shard(module, mesh=mesh["shard"], ignored_params=scalars)
    fully_shard(model, mesh=mesh["shard"], ignored_params=scalars)


def sharded_digests(degree: int, units: tuple[str, ...]) -> list[str]:
    digests = []
    for make in MODELS.values():
        torch.manual_seed(dist.get_rank())  # must not matter
        model = on_meta(make)
        shard(model, degree, units)
        materialize(model, CPU, seed=5)
        assert not has_meta_tensors(model)
        digests.append(digest(model))
    return digests


@pytest.fixture(scope="module")
def plain_digests() -> list[str]:
    return [digest(materialized(make, seed=5)) for make in MODELS.values()]


@pytest.mark.parametrize(
    ("world", "degree"),
    [(1, 1), (4, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2), (3, 3), (4, 1), (4, 4)))],
)
def test_same_numbers_at_every_world_size_and_shard_degree(world: int, degree: int, plain_digests: list[str]) -> None:
    assert run_ranks(sharded_digests, world, degree, UNITS) == [plain_digests] * world


@pytest.mark.parametrize("units", [(), ("BatchNorm1d", "Halved", "LayerNorm")])
def test_same_numbers_whatever_the_units_are(units: tuple[str, ...], plain_digests: list[str]) -> None:
    assert run_ranks(sharded_digests, 2, 2, units) == [plain_digests] * 2


def test_other_seed_gives_other_numbers() -> None:
    assert digest(materialized(gpt2, seed=1)) != digest(materialized(gpt2, seed=2))


def test_equal_modules_under_other_names_get_other_numbers() -> None:
    model = materialized(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert not torch.equal(model[0].weight, model[1].weight)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step on a batch that is the same on every rank, so that gradients are those of one process."""
    model.eval()  # no dropout
    out = model(torch.arange(6).view(2, 3))
    loss = (out if isinstance(out, torch.Tensor) else out.logits).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def sharded_step(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    model = on_meta(MODELS[name]).double()
    shard(model, dist.get_world_size(), UNITS)
    objects = list(model.parameters())
    optimizer = torch.optim.SGD(objects, lr=0.1)  # made before: its references must survive
    materialize(model, CPU, seed=5)
    storages = [p.to_local().data_ptr() for p in objects if isinstance(p, DTensor)]
    loss = step(model, optimizer)
    assert all(p is q for p, q in zip(objects, model.parameters(), strict=True))
    assert storages == [p.to_local().data_ptr() for p in objects if isinstance(p, DTensor)]
    return loss, full_state(model)


@pytest.mark.parametrize("name", MODELS)
def test_sharded_model_trains_after_materialisation(name: str) -> None:
    """Losses and weights after a step equal one process's. float64, 1e-12: nothing but the order of sums differs."""
    model = materialized(lambda: MODELS[name]().double(), seed=5)
    loss = step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = full_state(model)
    for world in (1, 2, 4):
        for rank_loss, state in run_ranks(sharded_step, world, name):
            assert rank_loss == pytest.approx(loss, rel=1e-12)
            assert state.keys() == expected.keys()
            for key, tensor in expected.items():
                torch.testing.assert_close(state[key], tensor, rtol=0, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")


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
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    decoder = {**sizes, **special, "num_key_value_heads": 2, "vocab_size": 101}
    if family == "gpt2":
        config: Any = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=101, n_positions=32, **special)
    elif family == "llama3-rope":
        rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        config = LlamaConfig(**decoder, rope_parameters=rope)
    elif family == "mixtral":
        config = MixtralConfig(**decoder, num_local_experts=4)
    elif family == "vit":
        return lambda: AutoModelForImageClassification.from_config(ViTConfig(**sizes, image_size=32, patch_size=8))
    elif family == "swin":
        swin = SwinConfig(image_size=32, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)
        return lambda: AutoModelForImageClassification.from_config(swin)
    else:
        t5 = T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=101, **special)
        return lambda: AutoModelForSeq2SeqLM.from_config(t5)
    return lambda: AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ["gpt2", "llama3-rope", "mixtral", "vit", "swin", "t5"])
def test_same_distributions_and_buffers_as_from_config(family: str) -> None:
    """Mean and standard deviation of every parameter against a plain construction, buffers bit for bit.

    Two samples of n draws of standard deviation s: one sigma of the difference of their means is s sqrt(2/n), of their
    standard deviations at most s/sqrt(n) (less for uniform and truncated). 5 sigma are allowed. Constants are equal.
    """
    torch.manual_seed(0)
    plain, delayed = tiny(family)(), materialized(tiny(family), seed=1)
    names = [name for name, _ in plain.named_parameters()]
    assert names == [name for name, _ in delayed.named_parameters()]
    for name, expected, got in zip(names, plain.parameters(), delayed.parameters(), strict=True):
        expected, got, n = expected.detach().double(), got.detach().double(), expected.numel()
        spread = expected.std(correction=0).item()
        if spread == 0:
            assert torch.equal(expected, got), name
            continue
        assert abs(expected.mean() - got.mean()) < 5 * spread * math.sqrt(2 / n), name
        assert abs(spread - got.std(correction=0)) < 5 * spread / math.sqrt(n), name
    buffers, delayed_buffers = dict(plain.named_buffers()), dict(delayed.named_buffers())
    assert buffers.keys() == delayed_buffers.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == delayed_buffers[name].dtype and torch.equal(buffer, delayed_buffers[name]), name


def test_residual_projection_scale_would_be_noticed() -> None:
    """GPT-2's c_proj is drawn with initializer_range / sqrt(2 n_layer) = 0.01 by its parent, c_fc with 0.02."""
    block = materialized(tiny("gpt2")).transformer.h[0]
    for projection, std in [(block.attn.c_proj, 0.01), (block.mlp.c_proj, 0.01), (block.mlp.c_fc, 0.02)]:
        n = projection.weight.numel()  # 5 sigma of a normal sample's standard deviation
        assert projection.weight.std().item() == pytest.approx(std, abs=5 * std / math.sqrt(2 * n))


def test_parent_that_scales_its_child_sees_the_childs_values() -> None:
    halved = materialized(lambda: nn.ModuleDict({"inner": Halved()}))["inner"]
    alone = materialized(lambda: nn.ModuleDict({"inner": nn.ModuleDict({"inner": nn.Linear(6, 6)})}))["inner"]
    assert torch.equal(halved.inner.weight, 0.5 * alone["inner"].weight)


def test_tied_weights_stay_one_tensor_with_the_first_modules_values() -> None:
    model = materialized(Everything)
    assert model.head.weight is model.embed.weight
    assert not model.embed.weight[0].any(), "Embedding zeroes its padding row, Linear does not"


def test_flags_attributes_and_buffer_kinds_survive() -> None:
    model = on_meta(Everything)
    model.embed.weight.no_weight_decay = True  # type: ignore[attr-defined]
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    materialize(model, CPU, seed=0)
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    assert not all(flags.values())
    assert model.head.weight.no_weight_decay is True
    assert "scale.mask" not in model.state_dict()
    assert torch.equal(model.scale.mask, torch.ones(4, 4).tril().bool())
    assert torch.equal(model.norm.running_var, torch.ones(6)) and model.norm.num_batches_tracked.item() == 0


def test_generators_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    materialized(gpt2)
    assert torch.equal(torch.rand(3), expected)


def test_activation_checkpointing_does_not_change_the_numbers() -> None:
    def wrapped() -> nn.Module:
        model = gpt2()
        model.transformer.h[0].mlp = checkpoint_wrapper(model.transformer.h[0].mlp)
        return model

    for expected, got in zip(materialized(gpt2).parameters(), materialized(wrapped).parameters(), strict=True):
        assert torch.equal(expected, got)


def test_recurrent_module_runs_on_its_new_weights() -> None:
    lstm = materialized(lambda: nn.LSTM(4, 4))
    x = torch.ones(2, 1, 4)
    expected = torch.nn.LSTM(4, 4)
    expected.load_state_dict(lstm.state_dict())
    assert torch.equal(lstm(x)[0], expected(x)[0])


def test_user_init_fn_has_the_last_word_and_leaves_the_rest_to_the_model() -> None:
    def init_fn(module: nn.Module) -> None:
        if type(module).__name__ == "Conv1D" and module.weight.shape[0] == 64:
            nn.init.constant_(module.weight, 3.0)

    block = materialized(tiny("gpt2"), seed=0, init_fn=init_fn).transformer.h[0]
    own = materialized(tiny("gpt2"), seed=0).transformer.h[0]
    assert (block.attn.c_proj.weight == 3).all(), "the model's rescaling must not come after init_fn"
    assert not block.attn.c_proj.bias.any()
    assert torch.equal(block.mlp.c_proj.weight, own.mlp.c_proj.weight)


def exact_class_init(module: nn.Module) -> None:
    if type(module) is nn.BatchNorm1d:
        nn.init.constant_(module.weight, 2.0)


def sharded_exact_class() -> torch.Tensor:
    model = on_meta(Everything)
    shard(model, 2, ("BatchNorm1d",))
    materialize(model, CPU, seed=0, init_fn=exact_class_init)
    assert type(model.norm).__name__ == "FSDPBatchNorm1d"
    return full_state(model)["norm.weight"]


def test_initialisers_see_the_class_a_unit_had_before_it_was_sharded() -> None:
    for weight in run_ranks(sharded_exact_class, 2):
        assert torch.equal(weight, torch.full((6,), 2.0))


def test_real_modules_keep_their_values() -> None:
    torch.manual_seed(0)
    backbone = gpt2()
    expected = digest(backbone)

    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone
            with torch.device("meta"):
                self.head = nn.Linear(32, 2)

        def _init_weights(self, module: nn.Module) -> None:
            for parameter in module.parameters():
                nn.init.ones_(parameter)

    model = WithHead()
    materialize(model, CPU, seed=0)
    assert digest(backbone) == expected
    assert (model.head.weight == 1).all()


class Forgetful(nn.Module):
    def __init__(self, forgotten: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if forgotten == "parameter":
            self.token = nn.Parameter(torch.zeros(1, 1, 2))
        elif forgotten == "buffer":
            self.register_buffer("positions", torch.arange(5), persistent=False)
        elif forgotten == "attribute":
            self.table = [torch.arange(5)]


class HalfFilled(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.weight[0])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Forgetful("parameter"), r"parameter 'token' of Forgetful"),
        (lambda: nn.Sequential(Forgetful("buffer")), r"buffer '0\.positions' of Forgetful"),
        (lambda: Forgetful("attribute"), r"tensor attribute 'table'"),
        (lambda: HalfFilled(2, 2), r"parameter 'weight' of HalfFilled"),
    ],
)
def test_what_no_initialiser_fills_is_named_with_the_fix(make: Callable[[], nn.Module], named: str) -> None:
    with pytest.raises(ValueError, match=named + r".*reset_parameters\(\).*init_fn.*delayed_init=False"):
        materialized(make)


def test_init_fn_fills_what_the_class_does_not() -> None:
    def init_fn(module: nn.Module) -> None:
        if isinstance(module, Forgetful):
            nn.init.ones_(module.token)

    model = materialized(lambda: Forgetful("parameter"), init_fn=init_fn)
    assert (model.token == 1).all() and not has_meta_tensors(model)


def test_failing_initialiser_is_named() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if self.weight.is_meta:
                return
            raise KeyError("no such scheme")

    with pytest.raises(RuntimeError, match=r"reset_parameters\(\) failed on module '1' \(Broken\).*no such scheme"):
        materialized(lambda: nn.Sequential(nn.Linear(2, 2), Broken(2, 2)))


def test_initialisers_called_by_constructors_only_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    class SelfMade(nn.Linear):
        def init_weights(self) -> None:
            nn.init.zeros_(self.weight)

    with caplog.at_level(logging.WARNING, logger="smp"):
        materialized(lambda: SelfMade(2, 2))
    assert "SelfMade.init_weights()" in caplog.text


class LiveBytes(TorchDispatchMode):
    """Bytes in storages that are alive on the CPU, and their peak, among those made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # First, for what is made now may have got the address of what is gone.
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return out


def big_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 6, "n_head": 2, "vocab_size": 256, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def zero_first_row(module: nn.Module) -> None:
    """Leaves the other rows out, so that every module takes a second attempt."""
    if isinstance(getattr(module, "weight", None), nn.Parameter):
        nn.init.zeros_(module.weight[0])


def peak_of_materialisation(init_fn: Callable[[nn.Module], None] | None) -> tuple[int, int]:
    model = on_meta(big_gpt2)
    shard(model, dist.get_world_size(), UNITS)
    with LiveBytes() as live:
        materialize(model, CPU, seed=0, init_fn=init_fn)
    own = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in [*model.parameters(), *model.buffers()])
    return live.peak, own


@pytest.mark.parametrize("init_fn", [None, zero_first_row])
def test_peak_host_memory_is_the_own_shards_and_one_module(init_fn: Callable[[nn.Module], None] | None) -> None:
    model = on_meta(big_gpt2)
    total = sum(p.nbytes for p in model.parameters())
    largest = max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in model.modules())
    for peak, own in run_ranks(peak_of_materialisation, 4, init_fn):
        assert own == pytest.approx(total / 4, rel=0.01)
        assert largest < peak <= own + largest + 2**14  # 16 KiB: generator states and scalars
        assert own + largest + 2**14 < 0.5 * total, "the bound must tell one module from the model"
