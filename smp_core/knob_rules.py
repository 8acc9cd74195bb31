"""What each knob of SmpConfig accepts, and which features behind the knobs are not built yet.

A table for each: `READERS` (knob -> strict reader of its value; it also fixes the knobs' order) and `NOT_BUILT` (knob
-> the values that work today). Whoever builds a feature removes its line from `NOT_BUILT`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from smp_core import knob_values as read
from smp_core.fp8.recipe import Fp8Recipe
from smp_core.other_strategies import argument_of_another
from smp_core.smp_parameters import SMP_OPTIONS

_DEGREE = read.integer(minimum=1)
_BOOLEAN = read.boolean()
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE = read.either(
    read.nothing(), read.dtype_name(*_DTYPES), allowed="'auto', 'float32', 'bfloat16', 'float16', none"
)
_CHECKPOINTING = read.either(
    read.word("none", "full", "selective"),
    read.pattern(r"every:[1-9][0-9]*"),
    allowed="'none', 'full', 'every:N', 'selective'",
)

# Those of smp_core.planning.optimizers, which stands above this file.
_PLANNED_OPTIMIZERS = (
    *("adamw", "adamw-amsgrad", "adam", "adam-amsgrad", "adagrad", "rmsprop", "lion", "sgd-momentum", "sgd"),
)

READERS: dict[str, read.Reader] = {
    "shard_degree": read.either(
        _DEGREE, read.word("node", "world", "auto"), allowed="an integer of at least 1, 'node', 'world', 'auto'"
    ),
    "context_parallel_degree": _DEGREE,
    "context_head_groups": read.either(_DEGREE, read.word("auto"), allowed="an integer of at least 1, 'auto'"),
    "tensor_parallel_degree": _DEGREE,
    "pipeline_parallel_degree": _DEGREE,
    "hierarchical": read.either(_BOOLEAN, read.word("auto"), allowed="true, false, 'auto'"),
    "reshard_after_forward": read.either(
        # The integer first where text could be either: "1" is refused as a degree and then read as true.
        read.integer(minimum=2),
        _BOOLEAN,
        read.word("node"),
        allowed="true, false, an integer of at least 2, 'node'",
    ),
    "reshard_after_backward": _BOOLEAN,
    "reduce_every_micro_batch": _BOOLEAN,
    "forward_prefetch": read.either(
        read.integer(minimum=0), read.word("auto"), allowed="an integer of at least 0, 'auto'"
    ),
    "backward_prefetch": read.either(_DEGREE, read.word("auto"), allowed="an integer of at least 1, 'auto'"),
    "reduce_scatter_buffers": read.either(_DEGREE, read.word("auto"), allowed="an integer of at least 1, 'auto'"),
    "separate_reduce_scatter_group": _BOOLEAN,
    "symmetric_memory": _BOOLEAN,
    "wrap": read.either(
        read.word("auto"),
        read.names(),
        read.function("(module_name, module) -> bool"),
        allowed="""'auto', a list of class names or globs (in text a JSON list: '["GPT2Block"]'), a function""",
    ),
    "wrap_min_parameters": read.integer(minimum=0),
    "forward_methods": read.names(),
    "delayed_init": _BOOLEAN,
    "init_seed": read.integer(minimum=0),
    "param_dtype": _DTYPE,
    "reduce_dtype": _DTYPE,
    "replica_reduce_dtype": read.either(read.nothing(), read.word("bf16", "bfloat16"), allowed="none, 'bf16'"),
    "on_nonfinite_grad_norm": read.word("ignore", "skip", "raise"),
    "memory_headroom": read.number(0.0, 1.0, include_lowest=True),
    "device_memory_gib": read.either(read.nothing(), read.number(0.0), allowed="a number above 0, none"),
    "planned_optimizer": read.word("auto", *_PLANNED_OPTIMIZERS),
    "save_full_state_dict": _BOOLEAN,
    "async_save": _BOOLEAN,
    "verify_checkpoint": read.word("auto", "sizes", "digests"),
    "allow_batch_change": _BOOLEAN,
    "comm_meter": _BOOLEAN,
    "fp8": lambda knob, value: Fp8Recipe.read(value),
    "chunked_cross_entropy": read.either(read.nothing(), _DEGREE, allowed="an integer of at least 1, none"),
    "activation_checkpointing": read.either(
        _CHECKPOINTING,
        read.mapping(_CHECKPOINTING),
        allowed="'none', 'full', 'every:N', 'selective', a mapping from class names or globs to one of these (in text "
        """a JSON object: '{"*.mlp": "full"}')""",
    ),
    "activation_checkpointing_check": _BOOLEAN,
    "activation_offloading": _BOOLEAN,
    "activation_loading_horizon": _DEGREE,
    "activation_offloading_min_bytes": read.integer(minimum=0),
    "activation_offloading_host_gib": read.either(read.nothing(), read.number(0.0), allowed="a number above 0, none"),
    "quantized_all_gather": read.either(read.nothing(), read.word("int8", "fp8"), allowed="none, 'int8', 'fp8'"),
    "quantize_inside_nodes": _BOOLEAN,
    "quantize_after_steps": read.integer(minimum=0),
    "quantize_exclude": read.names(),
    "quantized_reduce": read.either(read.nothing(), read.word("int8", "int4"), allowed="none, 'int8', 'int4'"),
    "error_feedback": read.either(_BOOLEAN, read.word("auto"), allowed="true, false, 'auto'"),
    "optimizer_shard": read.word("shard", "world"),
    "state_offload": read.either(read.nothing(), read.word("optimizer", "all"), allowed="none, 'optimizer', 'all'"),
}


@dataclass(frozen=True)
class NotBuilt:
    """A feature that this version lacks.

    Attributes:
        feature: its name with the verb, as in "tensor parallelism is".
        instead: what to write until it is there.
        is_built: whether a value of the knob works without it.
    """

    feature: str
    instead: str
    is_built: Callable[[Any], bool]


def _only(*built: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is ok or (type(value) is type(ok) and value == ok) for ok in built)


NOT_BUILT: dict[str, NotBuilt] = {
    "tensor_parallel_degree": NotBuilt(
        "tensor parallelism is", "leave it at 1 and raise shard_degree until the model fits", _only(1)
    ),
    "pipeline_parallel_degree": NotBuilt(
        "pipeline parallelism is", "leave it at 1 and raise shard_degree until the model fits", _only(1)
    ),
}


def contradictions(asked: Any) -> Iterator[str]:
    """What is wrong with knobs of a configuration (as asked for) that are fine by themselves and not together."""
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
    if not asked.reshard_after_backward and kept is not False:
        yield (
            "reshard_after_backward=false keeps parameters gathered from one micro-batch to the next, and "
            "reshard_after_forward frees them before that; write reshard_after_forward=false too, or "
            "reshard_after_backward=true"
        )
    yield from _of_memory(asked)
    yield from _of_fp8(asked)
    yield from _of_compression(asked)


def _of_memory(asked: Any) -> Iterator[str]:
    if asked.activation_offloading and asked.activation_checkpointing == "none":
        yield (
            "activation_offloading=true offloads the inputs of checkpointed modules, but activation_checkpointing="
            "'none'; write activation_checkpointing='full' (or another mode), or activation_offloading=false"
        )
    if asked.optimizer_shard == "world" and asked.state_offload == "all":
        yield (
            "optimizer_shard='world' steps parts of parameters that are on the device, and state_offload='all' keeps "
            "them in host memory; write state_offload='optimizer', or optimizer_shard='shard'"
        )
    if asked.async_save and asked.save_full_state_dict:
        yield (
            "async_save=True has no effect with save_full_state_dict=True: whole tensors are gathered by all ranks "
            "while training waits; write async_save=False, or save folders and bring a file back with `smp "
            "checkpoint consolidate`"
        )


def _of_fp8(asked: Any) -> Iterator[str]:
    if asked.fp8 is None:
        return
    if asked.fp8.backend == "transformer_engine" and asked.activation_checkpointing != "none":
        yield (
            "fp8's backend='transformer_engine' has other scales when it recomputes activations; write "
            "activation_checkpointing='none', or backend='native'"
        )
    if asked.fp8.fp8_all_gather and not isinstance(asked.reshard_after_forward, bool):
        yield (
            f"reshard_after_forward={asked.reshard_after_forward!r} keeps a secondary shard, which torch cannot "
            "combine with weights that travel in FP8; write reshard_after_forward=true or false, or "
            "fp8={'fp8_all_gather': false}"
        )
    if asked.fp8.fp8_all_gather and asked.quantized_all_gather is not None:
        yield (
            f"quantized_all_gather={asked.quantized_all_gather!r}: with fp8 weights travel in FP8 already; "
            "leave it at none, or write fp8={'fp8_all_gather': false}"
        )


def _of_compression(asked: Any) -> Iterator[str]:
    if asked.quantized_reduce is not None and asked.replica_reduce_dtype is not None:
        yield (
            "quantized_reduce and replica_reduce_dtype both say how gradients travel between replicas; keep one of them"
        )
    if asked.error_feedback is True and asked.quantized_reduce is None:
        yield (
            "error_feedback=true adds back what quantized_reduce rounds off; write quantized_reduce='int8' or 'int4' "
            "too"
        )
    for knob in ("quantize_inside_nodes", "quantize_after_steps", "quantize_exclude"):
        if getattr(asked, knob) and asked.quantized_all_gather is None:
            yield f"{knob} says how quantized_all_gather works; write quantized_all_gather='int8' or 'fp8' too"


def unknown_knob(name: str, *, arguments: Iterable[str] = ()) -> ValueError:
    """The complaint about a name that is not a knob, with the nearest knob, the way to read an option of SMP, or what
    to write in the place of another strategy's argument.

    Args:
        arguments: what else could have been meant where the name was written: the other arguments of a class.
    """
    if name in SMP_OPTIONS:
        return ValueError(
            f"{name!r} is an option of SageMaker SMP, not a knob; build the configuration with "
            f"SmpConfig.from_smp_parameters({{{name!r}: ...}}), or see docs/migrating-from-smp.md for the knob"
        )
    what = "argument" if arguments else "knob"
    nearest = read.unknown_name(what, name, (*READERS, *arguments), listed_in="docs/configuration.md")
    return argument_of_another(name) or nearest
