"""Knobs that have moved: the error shows how they are written now."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from smp_core.config import SmpConfig
from smp_core.knob_rules import READERS
from smp_core.moved_knobs import MOVED
from tests.core.knob_examples import FIELDS, as_text

# Former knob -> a value that was allowed, and how it is written now.
FORMER: dict[str, tuple[Any, str]] = {
    "context_head_groups": (2, "collectives={'context_head_groups': 2}"),
    "hierarchical": (False, "collectives={'hierarchical': False}"),
    "reshard_after_backward": (False, "keep_between_micro_batches='parameters'"),
    "reduce_every_micro_batch": (False, "keep_between_micro_batches='gradients', reshard_after_forward=True"),
    "forward_prefetch": (1, "collectives={'forward_prefetch': 1}"),
    "backward_prefetch": (2, "collectives={'backward_prefetch': 2}"),
    "reduce_scatter_buffers": (2, "collectives={'reduce_scatter_buffers': 2}"),
    "separate_reduce_scatter_group": (True, "collectives={'separate_reduce_scatter_group': True}"),
    "symmetric_memory": (True, "collectives={'symmetric_memory': True}"),
    "wrap": (["Block"], "units=['Block']"),
    "wrap_min_parameters": (1000, "units={'min_parameters': 1000}"),
    "init_seed": (3, "delayed_init={'seed': 3}"),
    "replica_reduce_dtype": ("bf16", "compression='bf16'"),
    "memory_headroom": (0.2, "planner={'memory_headroom': 0.2}"),
    "device_memory_gib": (40.0, "planner={'device_memory_gib': 40.0}"),
    "planned_optimizer": ("sgd", "planner={'optimizer': 'sgd'}"),
    "save_full_state_dict": (True, "checkpoint='full'"),
    "async_save": (True, "checkpoint='async'"),
    "verify_checkpoint": ("digests", "checkpoint={'verify': 'digests'}"),
    "allow_batch_change": (True, "checkpoint={'allow_batch_change': True}"),
    "comm_meter": (False, "collectives={'meter': False}"),
    "activation_checkpointing": ("full", "activations='full'"),
    "activation_checkpointing_check": (True, "activations={'check': True}"),
    "activation_offloading": (True, "activations={'offload': True}"),
    "activation_loading_horizon": (1, "activations={'loading_horizon': 1}"),
    "activation_offloading_min_bytes": (0, "activations={'offload_min_bytes': 0}"),
    "activation_offloading_host_gib": (2.0, "activations={'offload_host_gib': 2.0}"),
    "quantized_all_gather": ("fp8", "compression='fp8'"),
    "quantize_inside_nodes": (True, "compression={'gather_inside_nodes': True}"),
    "quantize_after_steps": (10, "compression={'gather_after_steps': 10}"),
    "quantize_exclude": (["*.bias"], "compression={'gather_exclude': ['*.bias']}"),
    "quantized_reduce": ("int8", "compression={'reduce': 'int8'}"),
    "error_feedback": (False, "compression={'error_feedback': False}"),
}


def test_every_former_knob_has_an_example_here_and_a_place_that_exists() -> None:
    assert FORMER.keys() == MOVED.keys()
    fields = {f"{recipe.KNOB}.{field}" for recipe in FIELDS for field in recipe.readers()}
    assert set(MOVED.values()) <= fields | {"keep_between_micro_batches"}
    assert not MOVED.keys() & set(READERS)


@pytest.mark.parametrize("former", FORMER)
def test_a_former_knob_is_answered_with_the_new_spelling(former: str, tmp_path: Path) -> None:
    value, now = FORMER[former]
    said = f"{former}={value!r} is now written {now}"
    path = tmp_path / "smp.yaml"
    for text in (yaml.safe_dump({"smp_config": {former: value}}), yaml.safe_dump({former: value})):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(said)):
            SmpConfig.from_yaml(path)
    for build in (lambda: SmpConfig(**{former: value}), lambda: SmpConfig.from_dict({former: value})):
        with pytest.raises(ValueError, match=re.escape(said)):
            build()
    # What is said can be typed, and says what was meant; the environment's spelling is read back too.
    if "offload'" not in now and "gather_" not in now:  # these two need another field beside them
        SmpConfig(**eval(f"dict({now})"))
    variable = f"SMP_{former.upper()}"
    with pytest.raises(ValueError, match=f"environment variable {variable}=.* is now written SMP_") as caught:
        SmpConfig.from_env({variable: as_text(value) if not isinstance(value, list) else json.dumps(value)})
    assert all(f"SMP_{knob.upper()}=" in str(caught.value) for knob in re.findall(r"(\w+)=", now))


def test_several_former_knobs_become_one_value() -> None:
    with pytest.raises(ValueError, match=re.escape("is now written compression='int8', activations={'checkpoint'")):
        SmpConfig(
            quantized_all_gather="int8",  # type: ignore[call-arg]
            activation_checkpointing="full",
            quantized_reduce="int8",
            activation_offloading=True,
        )
    both = {"reshard_after_forward": False, "reshard_after_backward": False, "reduce_every_micro_batch": False}
    with pytest.raises(ValueError, match=r"is now written keep_between_micro_batches='gradients'$"):
        SmpConfig.from_dict(both)
