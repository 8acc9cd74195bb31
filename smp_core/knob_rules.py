"""What each knob of SmpConfig accepts, and which go together.

A table for each: `READERS` (knob -> strict reader of its value; it also fixes the knobs' order; fields of recipes have
theirs in smp_core.recipes) and `contradictions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from smp_core import knob_values as read
from smp_core.fp8.recipe import Fp8Recipe
from smp_core.knob_recipe import Recipe
from smp_core.moved_knobs import MOVED, moved
from smp_core.other_strategies import argument_of_another
from smp_core.plan_recipes import AutoPlan, Planner
from smp_core.recipes import (
    RECIPES,
    Activations,
    Checkpoint,
    Collectives,
    Compile,
    Compression,
    DelayedInit,
    Pipeline,
    TensorParallel,
    Units,
)
from smp_core.smp_parameters import SMP_OPTIONS

_DEGREE = read.integer(minimum=1)
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE = read.either(
    read.nothing(), read.dtype_name(*_DTYPES), allowed="'auto', 'float32', 'bfloat16', 'float16', none"
)


def _of(recipe: type[Recipe]) -> read.Reader:
    return lambda knob, value: recipe.read(value)


READERS: dict[str, read.Reader] = {
    "shard_degree": read.either(
        _DEGREE, read.word("node", "world", "auto"), allowed="an integer of at least 1, 'node', 'world', 'auto'"
    ),
    "context_parallel_degree": _DEGREE,
    "tensor_parallel_degree": _DEGREE,
    "tensor_parallel": _of(TensorParallel),
    "pipeline_parallel_degree": _DEGREE,
    "pipeline": _of(Pipeline),
    "reshard_after_forward": read.either(
        # The integer first where text could be either: "1" is refused as a degree and then read as true.
        read.integer(minimum=2),
        read.boolean(),
        read.word("node", "auto"),
        allowed="true, false, an integer of at least 2, 'node', 'auto'",
    ),
    "keep_between_micro_batches": read.word("shards", "parameters", "gradients"),
    "units": _of(Units),
    "forward_methods": read.names(),
    "delayed_init": _of(DelayedInit),
    "param_dtype": _DTYPE,
    "reduce_dtype": _DTYPE,
    "master_dtype": read.either(read.nothing(), read.word("auto", "float32"), allowed="'auto', 'float32', none"),
    "on_nonfinite_grad_norm": read.word("ignore", "skip", "raise"),
    "optimizer_shard": read.word("shard", "world"),
    "state_offload": read.either(read.nothing(), read.word("optimizer", "all"), allowed="none, 'optimizer', 'all'"),
    "activations": _of(Activations),
    "compile": _of(Compile),
    "compression": _of(Compression),
    "fp8": _of(Fp8Recipe),
    "chunked_cross_entropy": read.either(read.nothing(), _DEGREE, allowed="an integer of at least 1, none"),
    "collectives": _of(Collectives),
    "plan": _of(AutoPlan),
    "planner": _of(Planner),
    "checkpoint": _of(Checkpoint),
}


def _settings_of(knob: str) -> tuple[str, ...]:
    return tuple(f"{knob}.{field}" for field in RECIPES[knob].readers()) if knob in RECIPES else (knob,)


SETTINGS: tuple[str, ...] = tuple(name for knob in READERS for name in _settings_of(knob))
"""Everything that can be set, by dotted names: knobs, and in the place of one with a recipe its fields."""


def settings_of(name: str) -> tuple[str, ...]:
    """Return the settings that a knob or a setting stands for.

    Raises:
        ValueError: unknown.
    """
    if name in SETTINGS:
        return (name,)
    if name not in READERS:
        raise unknown_knob(name)
    return _settings_of(name)


def contradictions(asked: Any) -> Iterator[str]:
    """Yield what is wrong with knobs of a configuration (as asked for) that are fine by themselves and not together."""
    degree, context, kept = asked.shard_degree, asked.context_parallel_degree, asked.reshard_after_forward
    if isinstance(degree, int) and context > degree:
        yield (
            f"context_parallel_degree={context} is larger than shard_degree={degree}; context ranks are part of "
            f"the partition group: write shard_degree={context} or more, or context_parallel_degree={degree}"
        )
    elif isinstance(degree, int) and degree % context:
        allowed = ", ".join(str(n) for n in range(1, degree + 1) if degree % n == 0)
        yield f"context_parallel_degree={context} does not divide shard_degree={degree}; allowed: {allowed}"
    if isinstance(degree, int) and type(kept) is int and degree % kept:
        allowed = ", ".join(["true", "false", *(str(n) for n in range(2, degree + 1) if degree % n == 0)])
        yield f"reshard_after_forward={kept} does not divide shard_degree={degree}; allowed: {allowed}"
    if asked.keep_between_micro_batches == "parameters" and kept not in ("auto", False):
        yield (
            "keep_between_micro_batches='parameters' keeps parameters gathered from one micro-batch to the next, and "
            f"reshard_after_forward={kept!r} frees them before that; write reshard_after_forward='auto', or "
            "keep_between_micro_batches='shards'"
        )
    yield from _of_memory(asked)
    yield from _of_fp8(asked)
    yield from _of_compression(asked.compression)


def _of_memory(asked: Any) -> Iterator[str]:
    if asked.activations.offload and asked.activations.checkpoint == "none":
        yield (
            "activations.offload=true offloads the inputs of checkpointed modules, but activations.checkpoint='none'; "
            "write activations={'checkpoint': 'full', 'offload': true} (or another mode), or leave offload out"
        )
    if asked.optimizer_shard == "world" and asked.state_offload == "all":
        yield (
            "optimizer_shard='world' steps parts of parameters that are on the device, and state_offload='all' keeps "
            "them in host memory; write state_offload='optimizer', or optimizer_shard='shard'"
        )
    needs = {"optimizer_shard": "world", "state_offload": "optimizer"}
    for knob in [knob for knob, value in needs.items() if getattr(asked, knob) == value and not asked.master_dtype]:
        yield (
            f"master_dtype=None: {knob}={needs[knob]!r} steps float32 masters of half precision parameters; leave "
            f"master_dtype out, or leave {knob} out"
        )
    if asked.checkpoint.async_save and asked.checkpoint.full_state_dict:
        yield (
            "checkpoint.async_save=True has no effect with checkpoint.full_state_dict=True: whole tensors are gathered "
            "by all ranks while training waits; write checkpoint='full', or checkpoint='async' and bring a file back "
            "with `smp checkpoint consolidate`"
        )
    if asked.checkpoint.memory_every_n_steps and asked.checkpoint.full_state_dict:
        yield (
            f"checkpoint.memory_every_n_steps={asked.checkpoint.memory_every_n_steps} keeps each rank's shards, and "
            "checkpoint.full_state_dict=True saves whole tensors; write full_state_dict=false, or leave "
            "memory_every_n_steps out"
        )


def _of_fp8(asked: Any) -> Iterator[str]:
    if asked.fp8 is None:
        return
    if asked.fp8.backend == "transformer_engine" and asked.activations.checkpoint != "none":
        yield (
            "fp8.backend='transformer_engine' has other scales when it recomputes activations; write "
            "activations='none', or fp8={'backend': 'native'}"
        )
    if asked.fp8.fp8_all_gather and asked.compression.gather is not None:
        yield (
            f"compression.gather={asked.compression.gather!r}: with fp8 weights travel in FP8 already; "
            "leave it at none, or write fp8={'fp8_all_gather': false}"
        )


def _of_compression(asked: Compression) -> Iterator[str]:
    if asked.error_feedback is True and asked.reduce_codes is None:
        yield (
            "compression.error_feedback=true adds back what codes of gradients round off; write compression="
            "{'reduce': 'int8'} or {'reduce': 'int4'} too"
        )
    for field in ("gather_inside_nodes", "gather_after_steps", "gather_exclude"):
        if getattr(asked, field) and asked.gather is None:
            yield (
                f"compression.{field} says how compression.gather works; write compression={{'gather': 'int8'}} or "
                "{'gather': 'fp8'} too"
            )


def require_known(values: Mapping[str, Any], *, arguments: Iterable[str] = ()) -> None:
    """Refuse names that are no knobs.

    Args:
        values: name -> value.
        arguments: what else could have been meant where the names were written: the other arguments of a class.

    Raises:
        ValueError: see :func:`unknown_knob`; of former knobs, with all of them as they are written now.
    """
    if any(name in MOVED for name in values):
        raise moved(values)
    for name in values:
        if name not in READERS:
            raise unknown_knob(str(name), arguments=arguments)


def unknown_knob(name: str, *, arguments: Iterable[str] = ()) -> ValueError:
    """Return the complaint about a name that is not a knob, with the nearest knob, the way to read an option of SMP, or
    what to write in the place of another strategy's argument.

    Args:
        arguments: what else could have been meant where the name was written: the other arguments of a class.
    """
    other = argument_of_another(name)
    if other is None and name in SMP_OPTIONS:
        return ValueError(
            f"{name!r} is an option of SageMaker SMP, not a knob; build the configuration with "
            f"SmpConfig.from_smp_parameters({{{name!r}: ...}}), or see docs/migrating-from-smp.md for the knob"
        )
    what = "argument" if arguments else "knob"
    nearest = read.unknown_name(what, name, (*READERS, *arguments), listed_in="docs/configuration.md")
    return other or nearest
