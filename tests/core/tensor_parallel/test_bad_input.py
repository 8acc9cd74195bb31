"""What cannot be split is refused with what to write instead, before any rank changes
its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from smp_core.tensor_parallel.roles import splits_of
from smp_core.tensor_parallel.rules import require_tensor_degree
from smp_core.topology import Topology
from tests.core.tensor_parallel.model_cases import Case
from tests.core.tensor_parallel.models import GLOBS, MODELS, PlainBlock, PlainModel
from tests.harness import run_ranks


class Unplanned(nn.Module):
    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.up = nn.Conv1d(4, 4, 1)
        self.words = nn.Embedding(6, 4, max_norm=max_norm)
        self.dummy_inputs = torch.zeros(1, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x.to(self.up.weight))


def falcon(**changes: Any) -> nn.Module:
    config = {"alibi": False, "multi_query": False, "num_attention_heads": 2, **changes}
    return transformers.FalconForCausalLM(
        transformers.FalconConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, **config
        )
    )


def prefixed() -> nn.Module:
    import peft

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes)
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), prefix)


@pytest.mark.parametrize(
    ("model", "plan", "said"),
    [
        (PlainModel, "auto", "PlainModel is no Transformers model; write globs"),
        (
            PlainModel,
            {"*.qkv": "columns"},
            r"'columns' is no role; allowed: 'column'.*'column:N'",
        ),
        (PlainModel, {"*.qkv": "row:3"}, "'row:3' is no role"),
        (
            PlainModel,
            {**GLOBS, "*.q_proj": "column"},
            r"no module matches '\*\.q_proj'.*for example",
        ),
        (PlainModel, {"*.up": "replicate"}, "splits no layer"),
        (Unplanned, {"up": "column"}, r"up \(Conv1d\) is no linear layer.*'replicate'"),
        (lambda: Unplanned(1.0), {"words": "vocabulary"}, r"max_norm.*'replicate'"),
        (
            lambda: nn.Sequential(nn.Embedding(8, 4, scale_grad_by_freq=True)),
            {"0": "vocabulary"},
            "scale_grad_by_freq; write 'replicate'",
        ),
        (
            lambda: transformers.BartForConditionalGeneration(
                transformers.BartConfig(
                    vocab_size=8,
                    d_model=8,
                    encoder_layers=1,
                    decoder_layers=1,
                    encoder_attention_heads=2,
                    decoder_attention_heads=2,
                )
            ),
            "auto",
            "encoder-decoder",
        ),
        (
            lambda: transformers.MptForCausalLM(
                transformers.MptConfig(vocab_size=8, d_model=8, n_heads=2, n_layers=1)
            ),
            "auto",
            "MptForCausalLM carries no plan.*write globs",
        ),
        (
            lambda: falcon(alibi=True),
            "auto",
            "FalconForCausalLM with config.alibi=True is not built yet; write globs",
        ),
        (
            prefixed,
            "auto",
            "PEFT's prefix tuning gives attention keys and values of all heads",
        ),
        (
            lambda: falcon(multi_query=True),
            "auto",
            "config.multi_query=True is not built",
        ),
        (
            lambda: falcon(new_decoder_architecture=True, num_kv_heads=1),
            "auto",
            "1 groups of heads on 2 ranks",
        ),
    ],
)
def test_plans_that_do_not_fit_a_model(model: Any, plan: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        splits_of(model(), plan, 2)


@pytest.mark.parametrize(
    ("degree", "recipe", "said"),
    [
        (3, {}, "does not divide the 4 ranks of a node.*allowed: 1, 2, 4$"),
        (8, {}, r"allowed: 1, 2, 4; or write tensor_parallel=\{'across_nodes': true\}"),
        (6, {"across_nodes": True}, "allowed: 1, 2, 4$"),
    ],
)
def test_degrees_that_do_not_fit_a_node(
    degree: int, recipe: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        require_tensor_degree(
            SmpConfig(tensor_parallel_degree=degree, tensor_parallel=recipe),
            Topology.uniform(16, 4),
        )
    require_tensor_degree(
        SmpConfig(tensor_parallel_degree=8, tensor_parallel={"across_nodes": True}),
        Topology.uniform(16, 4),
    )


def heads_that_do_not_fit() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=24,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        head_dim=8,
    )
    return transformers.LlamaForCausalLM(config)


def with_dropout() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=48, n_embd=8, n_layer=1, n_head=4)
    )


def with_states() -> nn.Module:
    model: Any = MODELS["llama"]()
    model.config.output_hidden_states = True
    return model


def with_sinks() -> nn.Module:
    model: Any = MODELS["llama"]()
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    return model


def compiled_blocks() -> nn.Module:
    model: Any = PlainModel()
    model.blocks[0] = torch.compile(model.blocks[0])
    return model


def with_adapters() -> nn.Module:
    import peft

    options = {"target_modules": ["down"], "use_dora": True}
    return peft.get_peft_model(PlainModel(), peft.LoraConfig(r=2, **options))


def with_hook() -> nn.Module:
    model = PlainModel()
    model.blocks[1].register_forward_hook(lambda module, args, output: output)
    return model


def without_example() -> nn.Module:
    model = PlainModel()
    del model.example_input_array
    return model


class OtherOnRank1(PlainBlock):
    """A block of equal parameters on all ranks, whose forward on rank 1 turns features
    around between two layers: a part of them is another part then, and these layers
    stay whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.before(x))
        x = x + self.scale(x).tanh()
        inner = self.up(self.between(x))
        return x + self.down(inner.flip(-1) if dist.get_rank() == 1 else inner)


def other_on_rank_1() -> nn.Module:
    model = PlainModel()
    model.blocks[1] = OtherOnRank1()
    return model


INFERRED = {"tensor_parallel": {"plan": "infer"}}
TORCHAO = {"backend": "torchao", "scaling": "dynamic", "fp8_all_gather": False}
REFUSED = {
    "heads": (
        heads_that_do_not_fit,
        {},
        "does not divide the 3 heads of model.layers.0.self_attn.q_proj; allowed: 1",
    ),
    "dropout": (
        with_dropout,
        {"tensor_parallel": {"sequence_parallel": False}},
        "write tensor_parallel={'sequence_p",
    ),
    "states": (with_states, {}, "set config.output_hidden_states = False"),
    "sinks": (with_sinks, {}, "sinks of model.layers.0.self_attn belongs to heads"),
    "compiled": (
        compiled_blocks,
        {"tensor_parallel": {"plan": GLOBS}},
        "torch.compile() wraps 'blocks.0', whose layers then have other names; compile blocks in their place",
    ),
    "adapters": (
        with_adapters,
        {"tensor_parallel": {"plan": {"*.down": "row"}}},
        "a variant of LoRA (use_dora, for example) is not built yet",
    ),
    "proposed": (
        PlainModel,
        {"tensor_parallel": {"plan": "auto"}},
        "or write tensor_parallel={'plan': 'infer'}, which is to split it so: {'blocks.*.attend.qkv': 'column:3', ",
    ),
    "no example": (
        without_example,
        INFERRED,
        "cannot be inspected: it is run once to see what its blocks do; set",
    ),
    "no blocks": (
        Unplanned,
        INFERRED,
        "no layer of Unplanned was found in a block of an nn.ModuleList that 2 ranks can share; write globs",
    ),
    "found apart": (
        other_on_rank_1,
        INFERRED,
        "give all ranks the same example (example_input_array",
    ),
    "infer and fp8": (
        PlainModel,
        {**INFERRED, "fp8": {}},
        "tensor_parallel.plan='infer' and fp8; write globs",
    ),
    "hooks": (
        with_hook,
        {"tensor_parallel": {"plan": GLOBS}},
        "blocks.1 has forward hooks, which would see 1/T",
    ),
    "all tokens": (
        PlainModel,
        {
            "tensor_parallel": {
                "plan": {**GLOBS, "*.up": "column_gather", "*.down": "replicate"}
            }
        },
        "blocks.0.up is 'column_gather' in blocks.0, whose tokens are split",
    ),
    "fp8": (PlainModel, {"fp8": TORCHAO}, "write fp8={'backend': 'native'}"),
}


def refusals() -> dict[str, str]:
    found = {}
    for name, (make, knobs, _) in REFUSED.items():
        MODELS["refused"] = make
        try:
            Case(
                "refused",
                tensor=2,
                knobs=tuple({"tensor_parallel": {}, **knobs}.items()),
            ).parallel()
        except ValueError as error:
            found[name] = str(error)
        finally:
            del MODELS["refused"]
    return found


def test_models_and_knobs_that_are_not_exact_are_refused_on_all_ranks() -> None:
    for found in run_ranks(refusals, 2):
        assert found.keys() == REFUSED.keys()
        for name, (_, _, said) in REFUSED.items():
            assert said in found[name]


def other_batches() -> str:
    parallel = Case("llama").parallel()
    own = torch.full((2, 4), 1 + parallel.mesh.rank)
    with pytest.raises(
        ValueError, match="tensor ranks read different batches"
    ) as caught:
        parallel.module(input_ids=own)
    return str(caught.value)


def other_batches_behind_whole_words() -> str:
    plan = {glob: role for glob, role in GLOBS.items() if glob not in ("words", "head")}
    knobs = SmpConfig(tensor_parallel_degree=2, tensor_parallel={"plan": plan})
    model = parallelize(PlainModel(), knobs).module
    with pytest.raises(
        ValueError, match="tensor ranks read different batches"
    ) as caught:
        model(torch.arange(16).view(2, 8) + dist.get_rank())
    return str(caught.value)


@pytest.mark.parametrize("act", [other_batches, other_batches_behind_whole_words])
def test_ranks_that_read_different_batches_are_told(act: Callable[[], str]) -> None:
    assert all("rank=mesh.data_rank" in said for said in run_ranks(act, 2))
