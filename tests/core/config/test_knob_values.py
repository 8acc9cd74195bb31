"""Values of SmpConfig's knobs: how they may be written, and with which words a wrong
one is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp_core.config import SmpConfig
from smp_core.config.recipes import (
    RECIPES,
    Activations,
    Checkpoint,
    Collectives,
    Compile,
    Compression,
    DelayedInit,
    Planner,
    Units,
)


@pytest.mark.parametrize(
    ("knob", "value", "says"),
    [
        ("shard_degree", 0, "'node', 'world', 'auto'"),
        ("shard_degree", True, "an integer of at least 1"),
        ("shard_degree", "4.0", "an integer of at least 1"),
        ("shard_degree", 4.0, "an integer of at least 1"),
        ("shard_degree", "wolrd", "did you mean 'world'"),
        ("shard_degree", None, "an integer of at least 1"),
        ("context_parallel_degree", "-2", "an integer of at least 1"),
        (
            "reshard_after_forward",
            1,
            "true, false, an integer of at least 2, 'node', 'auto'",
        ),
        ("units", "Block,Head", "JSON list"),
        ("units", ["Block", 3], "a list of class names or globs"),
        ("units", '["Block"', "a list of class names or globs"),
        ("units", torch.nn.Linear, "a list of class names or globs"),
        ("forward_methods", [""], "none of them empty"),
        ("delayed_init", 1, "true, false"),
        ("delayed_init", "ja", "true, false"),
        ("param_dtype", "bf16", "did you mean 'bfloat16'"),
        ("master_dtype", "FP32", "did you mean 'float32'"),
        ("param_dtype", torch.int8, "'bfloat16'"),
        ("on_nonfinite_grad_norm", "skp", "did you mean 'skip'"),
        ("activations", "every:0", "'every:N'"),
        ("activations", "ful", "did you mean 'full'"),
        ("compression", "int9", "did you mean 'int8'"),
        ("checkpoint", "asnc", "did you mean 'async'"),
        ("keep_between_micro_batches", "gradient", "did you mean 'gradients'"),
        (
            "planner",
            None,
            "a mapping of fields (memory_headroom, device_memory_gib, optimizer)",
        ),
        ("collectives", "flat", "write for example collectives={'hierarchical': False"),
    ],
)
def test_a_wrong_value_is_refused_with_knob_value_and_what_is_allowed(
    knob: str, value: Any, says: str
) -> None:
    with pytest.raises(ValueError) as caught:
        SmpConfig(**{knob: value})
    complaint = str(caught.value)
    assert complaint.startswith(f"{knob}={value!r} is not allowed; allowed: ")
    assert says in complaint


@pytest.mark.parametrize(
    ("knob", "field", "value", "says"),
    [
        ("collectives", "hierarchical", "maybe", "true, false, 'auto'"),
        (
            "collectives",
            "forward_prefetch",
            -1,
            "write collectives={'forward_prefetch': ...}",
        ),
        (
            "units",
            "min_parameters",
            -1,
            "write for example units={'min_parameters': 0}",
        ),
        ("planner", "memory_headroom", 1.0, "a number in [0, 1)"),
        ("planner", "memory_headroom", float("nan"), "a number in [0, 1)"),
        ("planner", "device_memory_gib", 0, "a number above 0, none"),
        ("activations", "checkpoint", "every:0", "'every:N'"),
        (
            "activations",
            "offload",
            1,
            "write activations={'offload': true} or activations={'offload': false}",
        ),
        ("delayed_init", "seed", "", "an integer of at least 0"),
        ("compression", "gather", "int4", "allowed: none, 'int8', 'fp8'"),
        ("compression", "reduce", "fp8", "write compression={'reduce': ...}"),
        ("checkpoint", "verify", "size", "did you mean 'sizes'"),
    ],
)
def test_a_wrong_value_of_a_field_is_refused_by_its_dotted_name(
    knob: str, field: str, value: Any, says: str
) -> None:
    """Wherever it is written: in a mapping, in JSON, in the recipe itself."""
    recipe = {**RECIPES, "delayed_init": DelayedInit}[knob]
    for build in (
        lambda: SmpConfig(**{knob: {field: value}}),
        lambda: recipe(**{field: value}),
    ):
        with pytest.raises(ValueError) as caught:
            build()
        complaint = str(caught.value)
        assert (
            complaint.startswith(f"{knob}.{field}={value!r} is not allowed; allowed: ")
            and says in complaint
        )


@pytest.mark.parametrize(
    ("knob", "written", "meant"),
    [
        ("activations", "full", Activations(checkpoint="full")),
        ("activations", "every:2", Activations(checkpoint="every:2")),
        (
            "activations",
            {"offload": "true", "checkpoint": "full"},
            Activations(checkpoint="full", offload=True),
        ),
        (
            "activations",
            '{"checkpoint": {"*.mlp": "full"}}',
            Activations(checkpoint={"*.mlp": "full"}),
        ),
        ("compile", True, Compile()),
        ("compile", "max-autotune", Compile(mode="max-autotune")),
        ("compile", "off", None),
        ("compression", "none", Compression()),
        ("compression", None, Compression()),
        ("compression", "int8", Compression(gather="int8", reduce="int8")),
        ("compression", "fp8", Compression(gather="fp8")),
        ("compression", "int4", Compression(reduce="int4")),
        ("compression", "bf16", Compression(reduce="bf16")),
        ("units", ["Block"], Units(modules=("Block",))),
        ("units", "Block", Units(modules=("Block",))),
        ("units", '["Block", "head"]', Units(modules=("Block", "head"))),
        ("units", {"min_parameters": "7"}, Units(min_parameters=7)),
        ("delayed_init", True, DelayedInit()),
        ("delayed_init", "on", DelayedInit()),
        ("delayed_init", False, None),
        ("delayed_init", "none", None),
        ("delayed_init", {"seed": 3}, DelayedInit(seed=3)),
        ("checkpoint", "sharded", Checkpoint()),
        ("checkpoint", "full", Checkpoint(full_state_dict=True)),
        ("checkpoint", "async", Checkpoint(async_save=True)),
        ("collectives", {"hierarchical": False}, Collectives(hierarchical=False)),
        ("planner", '{"optimizer": "SGD"}', Planner(optimizer="sgd")),
    ],
    ids=lambda value: str(value),
)
def test_a_word_a_mapping_and_a_recipe_are_the_same(
    knob: str, written: Any, meant: Any
) -> None:
    config = SmpConfig(**{knob: written})
    assert getattr(config, knob) == meant
    assert SmpConfig(**{knob: meant}) == config
    if isinstance(written, str):
        assert SmpConfig.from_env({f"SMP_{knob.upper()}": written}) == config


def test_an_unknown_field_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(
        ValueError, match=r"unknown field 'gathr' of compression; did you mean 'gather'"
    ):
        SmpConfig(compression={"gathr": "int8"})
    with pytest.raises(
        ValueError,
        match=r"unknown field 'chekpoint' of activations; did you mean 'checkpoint'",
    ):
        SmpConfig(activations={"chekpoint": "full"})
    with pytest.raises(
        ValueError,
        match=r"unknown field 'qqq' of checkpoint; known: full_state_dict, async_save",
    ):
        SmpConfig(checkpoint={"qqq": 1})
    with pytest.raises(
        ValueError, match=r"write activations=\{'checkpoint': \{'\*\.mlp': 'full'\}\}"
    ):
        SmpConfig(activations={"*.mlp": "full"})
    with pytest.raises(
        ValueError, match=r"is no JSON .*write for example checkpoint='\{"
    ):
        SmpConfig(checkpoint="{async")


def test_text_and_torch_objects_are_read_where_they_mean_one_thing() -> None:
    config = SmpConfig(
        shard_degree="4",  # type: ignore[arg-type]
        delayed_init="TRUE",
        units='["GPT2Block", "head"]',
        forward_methods="generate",  # type: ignore[arg-type]
        param_dtype=torch.bfloat16,  # type: ignore[arg-type]
        reduce_dtype="none",  # type: ignore[arg-type]
        planner={"memory_headroom": "2.5e-1"},
    )
    assert (config.shard_degree, config.delayed_init, config.units) == (
        4,
        DelayedInit(),
        Units(modules=("GPT2Block", "head")),
    )
    assert (config.forward_methods, config.param_dtype, config.reduce_dtype) == (
        ("generate",),
        "bfloat16",
        None,
    )
    assert config.planner.memory_headroom == 0.25


def test_units_take_a_function() -> None:
    def rule(name: str, module: torch.nn.Module) -> bool:
        return name.endswith("block")

    for config in (SmpConfig(units=rule), SmpConfig(units={"modules": rule})):
        assert config.units.modules is rule
        assert str(config.effective()["units.modules"]).endswith("rule")


def test_context_degree_has_to_fit_into_the_partition_group() -> None:
    with pytest.raises(
        ValueError,
        match=r"context_parallel_degree=8 is larger than shard_degree=4.*shard_degree=8",
    ):
        SmpConfig(shard_degree=4, context_parallel_degree=8)
    with pytest.raises(
        ValueError,
        match="context_parallel_degree=4 does not divide shard_degree=6; allowed: 1, 2, 3",
    ):
        SmpConfig(shard_degree=6, context_parallel_degree=4)
    assert (
        SmpConfig(shard_degree=8, context_parallel_degree=8).context_parallel_degree
        == 8
    )
    # The layout says how many ranks that is.
    assert SmpConfig(shard_degree="node", context_parallel_degree=4)


def test_reshard_degree_has_to_divide_the_partition_group() -> None:
    with pytest.raises(
        ValueError,
        match=r"reshard_after_forward=4 does not divide shard_degree=6.*2, 3, 6",
    ):
        SmpConfig(shard_degree=6, reshard_after_forward=4)


def test_kept_parameters_are_not_freed_after_forward() -> None:
    for forward in (True, 2, "node"):
        with pytest.raises(
            ValueError,
            match=r"='parameters' keeps .*write reshard_after_forward='auto'",
        ):
            SmpConfig(
                reshard_after_forward=forward,
                keep_between_micro_batches="parameters",
                shard_degree=4,
            )
    assert SmpConfig(
        reshard_after_forward=False, keep_between_micro_batches="parameters"
    )


def test_one_file_cannot_be_written_behind_training() -> None:
    with pytest.raises(
        ValueError,
        match=r"async_save=True has no effect with checkpoint\.full_state_dict=True",
    ):
        SmpConfig(checkpoint={"async_save": True, "full_state_dict": True})
