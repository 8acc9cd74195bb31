"""Which modules become units, and which parameters stay whole."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from smp_core.config import SmpConfig
from smp_core.plan.units import Entry, WrapPlan, plan_units
from tests.core import zoo
from tests.core.fuzz.models import Ways


def plan(model: nn.Module, *, entry: Entry = "forward", **knobs) -> WrapPlan:
    made = plan_units(model, SmpConfig(**knobs), entry=entry)
    check(model, made)
    return made


def check(model: nn.Module, made: WrapPlan) -> None:
    """What holds of every plan: each parameter in exactly one place, children before
    parents, no 0-d parameter and no two trainable dtypes in a unit."""
    placed = [name for unit in made.units for name in unit.parameters] + list(
        made.replicated
    )
    assert sorted(placed) == sorted(name for name, _ in model.named_parameters())
    by_name = dict(model.named_parameters())
    seen: list[nn.Module] = []
    for unit in made.units:
        module = model.get_submodule(unit.name)
        inner = set(module.modules()) - {module}
        later = {model.get_submodule(each.name) for each in made.units[len(seen) + 1 :]}
        assert not inner & later, f"{unit.name} before its children"
        seen.append(module)
        own = [by_name[name] for name in unit.parameters]
        assert all(parameter.ndim > 0 for parameter in own)
        assert (
            len({parameter.dtype for parameter in own if parameter.requires_grad}) <= 1
        )
        assert not isinstance(
            module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList)
        ), "FSDP2 refuses those"


def names(made: WrapPlan) -> list[str]:
    return [unit.name for unit in made.units]


def roots(made: WrapPlan) -> list[str]:
    return [unit.name for unit in made.units if unit.is_root]


@pytest.mark.parametrize("name", zoo.SPECIMENS)
def test_every_model_gets_a_plan_that_fsdp2_can_take(name: str) -> None:
    specimen = zoo.SPECIMENS[name]
    plan(zoo.build(name), entry=specimen.entry, **specimen.knobs)


@pytest.mark.parametrize(
    ("build", "blocks", "kind"),
    [
        (zoo.gpt2, ["transformer.h.1", "transformer.h.0"], "GPT2Block"),
        (zoo.llama, ["model.layers.1", "model.layers.0"], "LlamaDecoderLayer"),
    ],
)
def test_transformers_models_are_cut_at_their_no_split_modules(
    build, blocks: list[str], kind: str
) -> None:
    made = plan(build())
    assert names(made) == [*blocks, ""]
    assert made.why == f"_no_split_modules: {kind}"
    assert made.replicated == ()


def test_a_vision_transformer_is_cut_at_its_layers() -> None:
    made = plan(zoo.vit())
    assert {"vit.layers.0", "vit.layers.1"} <= set(names(made)) or {
        "vit.encoder.layer.0",
        "vit.encoder.layer.1",
    } <= set(names(made))
    assert made.why.startswith("_no_split_modules: ")


def test_repeated_members_of_a_module_list_are_blocks() -> None:
    made = plan(zoo.TiedBlocks())
    assert names(made) == ["blocks.2", "blocks.1", "blocks.0", ""]
    assert made.why == "repeated blocks: Mlp"


def test_repeated_members_of_a_sequential_are_blocks_and_single_leaves_are_not() -> (
    None
):
    assert names(plan(zoo.sequential())) == ["2", "0", ""]
    assert names(plan(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))) == [""]


def test_blocks_inside_blocks_are_not_cut_again() -> None:
    """A stage of a convnet holds a Sequential of alike members; the stage is the
    block."""
    model = nn.ModuleList(
        [nn.Sequential(zoo.Mlp(), zoo.Mlp()), nn.Sequential(zoo.Mlp(), zoo.Mlp())]
    )
    holder = nn.Sequential()
    holder.add_module("stages", nn.Sequential(*model))
    assert names(plan(holder)) == ["stages.1", "stages.0", ""]


def test_without_repeated_blocks_the_model_is_one_unit() -> None:
    made = plan(zoo.Mlp())
    assert names(made) == [""]
    assert made.why == "no repeated blocks found: roots only"


def test_wrap_by_class_name() -> None:
    made = plan(zoo.gpt2(), units=("GPT2MLP",))
    assert names(made) == ["transformer.h.1.mlp", "transformer.h.0.mlp", ""]


def test_wrap_by_glob() -> None:
    assert names(plan(zoo.TiedBlocks(), units=("blocks.[02]",))) == [
        "blocks.2",
        "blocks.0",
        "",
    ]
    assert names(plan(zoo.gpt2(), units=("transformer.h.*.attn", "GPT2MLP"))) == [
        "transformer.h.1.mlp",
        "transformer.h.1.attn",
        "transformer.h.0.mlp",
        "transformer.h.0.attn",
        "",
    ]


def test_a_glob_that_also_matches_containers_wraps_only_what_can_be_called() -> None:
    """``blocks`` is a ModuleList; ``blocks.0.down`` is also ``blocks.1.down``, and one
    unit."""
    leaves = [
        ["blocks.2.down", "blocks.2.up"],
        ["blocks.1.up"],
        ["blocks.0.down", "blocks.0.up"],
    ]
    assert names(plan(zoo.TiedBlocks(), units=("blocks*",))) == [
        *leaves[0],
        *leaves[1],
        *leaves[2],
        "",
    ]


def test_wrap_by_callable() -> None:
    made = plan(zoo.TiedBlocks(), units=lambda name, module: name == "blocks.1")
    assert names(made) == ["blocks.1", ""]
    assert made.why == "units: a function"


@pytest.mark.parametrize(
    "wrap",
    ["auto", ("Mlp",), ("blocks.?",), lambda name, module: isinstance(module, zoo.Mlp)],
)
def test_a_compiled_block_is_a_unit_with_its_wrapper(wrap) -> None:
    model = zoo.Shared()
    model.blocks[1] = torch.compile(model.blocks[1])  # type: ignore[call-overload]
    made = names(plan(model, units=wrap))
    assert "blocks.1" in made
    assert "blocks.1._orig_mod" not in made


def test_an_unknown_name_is_refused_with_the_nearest_one_and_all_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"GPT2Blok.*did you mean 'GPT2Block'.*GPT2MLP"
    ):
        plan(zoo.gpt2(), units=("GPT2Blok",))
    with pytest.raises(
        ValueError,
        match=r"blocks\.7.*matches no class name and no module name of TiedBlocks",
    ):
        plan(zoo.TiedBlocks(), units=("blocks.7",))


def test_large_modules_become_units_too() -> None:
    """The embedding's 19 x 12 = 228 parameters reach the threshold, the position
    embedding's 6 x 12 = 72 do not."""
    made = plan(zoo.llama(), units={"min_parameters": 228})
    assert "model.embed_tokens" in names(made)
    assert "lm_head" in names(made)
    assert "model.norm" not in names(made)


def test_the_size_threshold_counts_what_no_smaller_unit_took() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2)), nn.Linear(3, 3)
    )
    assert names(plan(model, units={"min_parameters": 110})) == ["0.0", ""]
    assert names(plan(model, units={"min_parameters": 111})) == ["0", ""]


def test_a_parameter_tied_across_units_stays_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="smp"):
        made = plan(zoo.TiedBlocks())
    assert set(made.replicated) == {
        "blocks.0.down.weight",
        "blocks.0.down.bias",
        "blocks.2.up.weight",
    }
    assert "blocks.2.up.weight" in caplog.text


def test_an_embedding_tied_to_the_head_of_the_same_unit_is_sharded() -> None:
    made = plan(zoo.gpt2())
    assert made.replicated == ()
    assert "transformer.wte.weight" in made.units[-1].parameters


def test_an_embedding_tied_to_the_head_is_sharded_by_the_unit_around_both_also_above_the_size_threshold() -> (
    None
):
    made = plan(zoo.gpt2(), units={"min_parameters": 100})
    assert made.replicated == ()
    assert "transformer.wte" not in names(made)
    assert "lm_head" not in names(made)


def test_an_embedding_shared_by_two_roots_stays_whole() -> None:
    for entry in ("steps", "children"):
        made = plan(zoo.Translator(), entry=entry)
        assert made.replicated == ("encoder.embedding.weight",)
        assert roots(made) == ["decoder", "encoder"]


def test_a_module_that_owns_parameters_is_the_root_of_its_steps() -> None:
    made = plan(zoo.WithOwnParameters(), entry="steps")
    assert names(made) == ["second", "first", ""]
    assert roots(made) == [""]
    assert made.units[-1].parameters == ("temperature", "bias")
    assert made.replicated == ("gate",)


def test_own_parameters_stay_whole_where_backward_runs_inside_the_step() -> None:
    made = plan(zoo.WithOwnParameters(), entry="children")
    assert roots(made) == ["second", "first"]
    assert made.replicated == ("temperature", "bias", "gate")


def test_children_that_share_a_unit_have_a_root_above_them() -> None:
    """FSDP2 knows one root for a unit, and finds it at the first call."""
    for entry in ("steps", "children"):
        made = plan(Ways(), entry=entry, units=["Linear"])
        assert roots(made) == [""] and made.units[-1].parameters == ()
        assert "left.common" in names(made)
        nested = nn.Module()
        nested.part = zoo.Mlp()
        nested.all = nn.Sequential(nested.part, nn.Linear(4, 4))
        made = plan(nested, entry=entry)
        assert roots(made) == [""] and "part" in names(made)
        no_units = plan(Ways(), entry=entry)
        assert roots(no_units) == ["leave", "adapted", "right", "left", "enter"]


def test_children_in_containers_are_roots_of_their_own() -> None:
    model = nn.Module()
    model.parts = nn.ModuleDict(
        {"a": zoo.Mlp(), "b": nn.ModuleList([zoo.Mlp(), zoo.Mlp()])}
    )
    assert roots(plan(model, entry="steps")) == ["parts.b.1", "parts.b.0", "parts.a"]


def test_scalars_stay_whole() -> None:
    assert plan(zoo.Listed()).replicated == ("named.gain",)


def test_another_dtype_than_the_units_becomes_a_unit_or_stays_whole() -> None:
    made = plan(zoo.MixedDtypes())
    assert {"blocks.0.1.router", "blocks.1.1.router"} <= set(names(made))
    assert made.replicated == ("mixed.scale",)


def test_frozen_parameters_of_another_dtype_need_no_unit_of_their_own() -> None:
    model = zoo.MixedDtypes()
    for block in model.blocks:
        block[1].router.requires_grad_(False)
    model.mixed.scale.requires_grad_(False)
    made = plan(model)
    assert not any("router" in name for name in names(made))
    assert made.replicated == ()


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        plan(nn.ReLU())


def test_parameter_names_come_unit_by_unit_for_planning() -> None:
    made = plan(zoo.Shared())
    assert [len(unit.parameters) for unit in made.units] == [4, 4, 2]


class TiedHalves(nn.Module):
    """Mostly bfloat16, with a float32 embedding and head of one weight: each becomes a
    unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.wide = nn.Linear(8, 64).bfloat16()
        self.back = nn.Linear(64, 8).bfloat16()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.back(self.wide(self.embed(tokens).bfloat16())).float())


def test_a_tie_that_units_of_another_dtype_cut_is_found() -> None:
    made = plan_units(TiedHalves(), SmpConfig())
    assert made.replicated == ("embed.weight",)
    assert all(
        "embed" not in name and "head" not in name
        for unit in made.units
        for name in unit.parameters
    )


def test_a_compiled_block_gives_way_to_its_wrapper_wherever_that_stands() -> None:
    model = nn.Module()
    model.block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.compiled = torch.compile(model.block)
    assert plan_units(model, SmpConfig(units=["block"])).blocks == ("compiled",)
