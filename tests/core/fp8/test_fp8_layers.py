"""Which layers become FP8 ones, what they keep, and that each kind computes what it
computed before, to FP8 noise."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smp_core.config.fp8_recipe import HEADS
from smp_core.fp8 import Float8Linear, Fp8Recipe, convert_to_fp8
from smp_core.fp8.gathered import GatheredWeight
from smp_core.fp8.scaling import GRADIENT, INPUT, state_numbered
from tests.core.fp8.fp8_runs import decibels

transformers = pytest.importorskip("transformers")


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.tied = nn.Linear(32, 48, bias=False)
        self.tied.weight = self.embed.weight
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.odd = nn.Linear(32, 20)
        self.bilinear = nn.Bilinear(16, 16, 16)
        self.lm_head = nn.Linear(32, 48)
        self.norm = nn.LayerNorm(32)
        self.conv = nn.Conv1d(16, 16, 3)


def test_every_module_left_out_has_its_reason() -> None:
    model = Mixed()
    fp8 = convert_to_fp8(model)
    assert [site.name for *_, site in fp8.sites] == ["up", "down"]
    assert {name: reason for name, reason in fp8.left_out.items()} == {
        "tied": "its weight is shared with embed",
        "odd": "its size 20 x 32 is not in multiples of 16",
        "bilinear": "Bilinear has a forward of its own",
        "lm_head": "exclude has 'lm_head'",
    }
    assert fp8.describe().splitlines()[0] == "fp8: 2 weights in 2 Float8Linear"
    assert len(fp8.describe().splitlines()) == 5


def test_include_and_exclude_choose_by_name() -> None:
    fp8 = convert_to_fp8(Mixed(), Fp8Recipe(include=("up", "lm_head"), exclude=()))
    assert [site.name for *_, site in fp8.sites] == ["up", "lm_head"]
    assert fp8.left_out["down"] == "not in include=['up', 'lm_head']"
    with pytest.raises(
        ValueError,
        match=r"include='block\.\*' matches no linear layer; there are for example up",
    ):
        convert_to_fp8(Mixed(), Fp8Recipe(include=("up", "block.*")))
    with pytest.raises(
        ValueError, match=r"no layer of Sequential can be converted \(0: its size 8 x 8"
    ):
        convert_to_fp8(nn.Sequential(nn.Linear(8, 8)))


def test_a_glob_that_leaves_nothing_out_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    convert_to_fp8(Mixed(), Fp8Recipe(exclude=(*HEADS, "dwn", "odd")))
    [said] = caplog.messages
    assert said.startswith("fp8: exclude has 'dwn', which matches no linear layer")


def test_a_converted_model_keeps_parameters_names_and_classes() -> None:
    model = Mixed()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert_to_fp8(model)
    assert isinstance(model.up, nn.Linear) and type(model.up) is Float8Linear
    assert model.state_dict().keys() == Mixed().state_dict().keys()
    assert all(
        parameter is before[name] for name, parameter in model.named_parameters()
    )
    assert all(type(value) is torch.Tensor for value in model.state_dict().values())
    assert optimizer.param_groups[0]["params"][0] is model.embed.weight
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert pickle.loads(pickle.dumps(model.up)).fp8_sites["weight"].name == "up"


def test_a_copy_has_scales_of_its_own() -> None:
    net = nn.Sequential(nn.Linear(32, 32))
    fp8 = convert_to_fp8(net)
    twin = copy.deepcopy(net)
    twin(torch.ones(4, 32)).sum().backward()
    assert fp8.state.current.count_nonzero() == 0
    assert twin[0].fp8_sites["weight"].state.current[0, INPUT] == 1


def test_evaluation_records_nothing_and_is_calibrated_by_itself() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64, bias=False))
    plain = copy.deepcopy(net)
    fp8 = convert_to_fp8(net)
    x = torch.randn(16, 64) * 1e-4
    with torch.no_grad():
        assert decibels(plain(x), net(x)) >= 25
    assert fp8.state.current.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_have_the_dtypes_of_an_ordinary_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Linear(32, 48).to(dtype)
    convert_to_fp8(net)
    x = torch.randn(3, 5, 32, dtype=dtype, requires_grad=True)
    y = net(x)
    assert y.dtype == dtype and y.shape == (3, 5, 48)
    y.float().sum().backward()
    assert x.grad.dtype == net.weight.grad.dtype == net.bias.grad.dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16


def test_frozen_weights_keep_no_input() -> None:
    """As under adapters: gradients pass through, and what only the weight's gradient
    needs is not kept."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64))
    fp8 = convert_to_fp8(net.requires_grad_(False))
    x = torch.randn(32, 64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        y = net(x)
    assert not [t for t in kept if t.shape == x.shape]
    y.sum().backward()
    assert x.grad is not None and fp8.state.current[0, GRADIENT] == 1


def test_the_input_is_kept_in_fp8() -> None:
    net = nn.Sequential(nn.Linear(64, 128))
    convert_to_fp8(net)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    ):
        net(torch.randn(32, 64).bfloat16())
    sizes = [t.numel() * t.element_size() for t in kept if t.shape == (32, 64)]
    assert sizes == [32 * 64]


def small(kind: str) -> nn.Module:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=1, n_head=2, **no_tokens
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape, **heads, **no_tokens)
        )
    config = transformers.MixtralConfig(
        **shape, **heads, **no_tokens, num_local_experts=2, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


SITES = {
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    "llama": [f"self_attn.{p}_proj" for p in "qkvo"]
    + [f"mlp.{p}_proj" for p in ("gate", "up", "down")],
    "mixtral": [f"self_attn.{p}_proj" for p in "qkvo"]
    + ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@pytest.mark.parametrize("kind", SITES)
def test_models_of_transformers(kind: str) -> None:
    """Every block's layers are converted; losses agree to 1e-2, and gradients to 13 dB:
    they pass several layers, each with the 20 dB of one product. (With all experts
    chosen, routing cannot flip.)"""
    model, plain = small(kind).eval(), small(kind).eval()
    fp8 = convert_to_fp8(model)
    assert [site.name.split(".0.", 1)[1] for *_, site in fp8.sites] == SITES[kind]
    assert "lm_head" in fp8.left_out
    tokens = torch.randint(96, (4, 16))
    losses = [net(input_ids=tokens, labels=tokens).loss for net in (model, plain)]
    for loss in losses:
        loss.backward()
    assert abs(losses[0] - losses[1]) < 1e-2
    for (name, ours), theirs in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        assert decibels(theirs.grad, ours.grad) >= 13, name


def test_experts_equal_one_linear_layer_each() -> None:
    """Fused experts against the same products by hand, with the same scales: equal but
    for the order of sums."""
    experts = small("mixtral").model.layers[0].mlp.experts.double()
    fp8 = convert_to_fp8(experts, Fp8Recipe(scaling="dynamic"))
    torch.manual_seed(1)
    x = torch.randn(12, 32, dtype=torch.float64, requires_grad=True)
    index = torch.randint(2, (12, 1))
    weights = torch.rand(12, 1, dtype=torch.float64)
    with torch.no_grad():
        seen = experts(x, index, weights)
        up = nn.Linear(32, 128, bias=False).double()
        down = nn.Linear(64, 32, bias=False).double()
        convert_to_fp8(nn.ModuleList([up, down]), Fp8Recipe(scaling="dynamic"))
        for site, layer in ((0, up), (1, down)):
            layer.fp8_sites["weight"].state.scale = fp8.state.scale[site].expand(2, 3)
            layer.fp8_sites["weight"].state.inverse = fp8.state.inverse[site].expand(
                2, 3
            )
        expected = torch.zeros_like(seen)
        for expert in range(2):
            (
                up.weight.copy_(experts.gate_up_proj[expert]),
                down.weight.copy_(experts.down_proj[expert]),
            )
            gate, linear = up(x).chunk(2, dim=-1)
            mine = (index[:, 0] == expert)[:, None]
            expected += mine * weights * down(nn.functional.silu(gate) * linear)
    assert (seen - expected).abs().max() < 1e-12


def test_all_views_of_a_gathered_weight_have_the_scale_of_its_bytes() -> None:
    """DTensor makes new views: of a layer that is split over tensor ranks, of experts
    over theirs."""
    gathered = GatheredWeight(
        torch.ones(2, 4).to(torch.float8_e4m3fn), torch.tensor(0.5), torch.float32
    )
    view = nn.Parameter(gathered).view_as(gathered)
    view.scale_by(torch.tensor(4.0))
    assert torch.equal(gathered + 0, torch.full((2, 4), 4.0))


def test_compiled_layers_compute_and_record_the_same_without_breaking_the_graph() -> (
    None
):
    """Two graphs: of the calibrating step, and of all others."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    traced = copy.deepcopy(eager)
    ours, theirs = convert_to_fp8(eager), convert_to_fp8(traced)
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(traced, backend=backend, fullgraph=True)
    for _ in range(4):
        x = torch.randn(16, 32)
        eager(x).square().sum().backward()
        compiled(x).square().sum().backward()
        for mine, other in zip(eager.parameters(), traced.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
        assert torch.equal(ours.state.current, theirs.state.current)
        ours.step()
        theirs.step()
    assert len(graphs) == 2


class AttentionBlock(nn.Module):
    """A recomputed block; attention is what makes the compiler save the state's tensors
    for backward, if it can."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(32, 32, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.attend, x, use_reentrant=False)  # type: ignore[no-any-return]

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(1, 16, 2, 16).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).reshape(1, 16, 32))


@pytest.mark.slow
@pytest.mark.parametrize("probed", [False, True])
def test_compiled_blocks_that_recompute_record_the_same(probed: bool) -> None:
    """The state is all layers', and other blocks and micro-batches record between a
    block's forward and its backward. Probed too, in the last step."""
    torch.manual_seed(0)
    eager = nn.Sequential(AttentionBlock(), AttentionBlock())
    traced = copy.deepcopy(eager)
    ours, theirs = convert_to_fp8(eager), convert_to_fp8(traced)
    torch.compiler.reset()
    for block in traced:
        block.compile(backend="aot_eager", fullgraph=True)
    for step in range(3 if probed else 2):
        for fp8 in (ours, theirs) if step == 2 else ():
            fp8.state.counts = torch.zeros(
                len(fp8.state.names), 3, 3, dtype=torch.float64
            )
        batches = [torch.randn(1, 16, 32) for _ in range(2)]
        for model in (eager, traced):
            sum(model(x).square().sum() for x in batches).backward()
        for mine, other in zip(eager.parameters(), traced.parameters(), strict=True):
            # Attention's own order of sums.
            torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(ours.state.current, theirs.state.current)
        assert (theirs.state.current[:, [0, 2]] > 0).all()
        ours.step()
        theirs.step()
    if probed:
        assert (
            theirs.state.counts is not None
            and (theirs.state.counts[:, [0, 2], 2] > 0).all()
        )


def test_a_copied_state_records_for_itself() -> None:
    layer = nn.Sequential(nn.Linear(32, 32))
    state = convert_to_fp8(layer).state
    twin = copy.deepcopy(state)
    assert state_numbered(state.number) is state and state_numbered(twin.number) is twin
