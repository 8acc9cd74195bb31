"""What each knob of SmpConfig accepts, and which features behind the knobs are not built yet.

A table for each: `READERS` (knob -> strict reader of its value; it also fixes the knobs' order) and `NOT_BUILT` (knob
-> the values that work today). Whoever builds a feature removes its line from `NOT_BUILT`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


# (config -> whether it is asked for, what to say): knobs that are fine by themselves and not together.
CONTRADICTIONS: list[tuple[Callable[[Any], bool], str]] = [
    (
        lambda config: config.optimizer_shard == "world" and config.state_offload == "all",
        "optimizer_shard='world' steps parts of parameters that are on the device, and state_offload='all' keeps them "
        "in host memory; write state_offload='optimizer', or optimizer_shard='shard'",
    ),
    (
        lambda config: (
            getattr(config.fp8, "backend", None) == "transformer_engine" and config.activation_checkpointing != "none"
        ),
        "fp8's backend='transformer_engine' has other scales when it recomputes activations; write "
        "activation_checkpointing='none', or backend='native'",
    ),
    (
        lambda config: not config.reshard_after_backward and config.reshard_after_forward is not False,
        "reshard_after_backward=false keeps parameters gathered from one micro-batch to the next, and "
        "reshard_after_forward frees them before that; write reshard_after_forward=false too, or "
        "reshard_after_backward=true",
    ),
    (
        lambda config: config.quantized_reduce is not None and config.replica_reduce_dtype is not None,
        "quantized_reduce and replica_reduce_dtype both say how gradients travel between replicas; keep one of them",
    ),
    (
        lambda config: config.error_feedback is True and config.asked("quantized_reduce") is None,
        "error_feedback=true adds back what quantized_reduce rounds off; write quantized_reduce='int8' or 'int4' too",
    ),
    (
        lambda config: (
            getattr(config.fp8, "fp8_all_gather", False) and not isinstance(config.reshard_after_forward, bool)
        ),
        "reshard_after_forward='node' (or a number) keeps a copy of gathered weights, which FP8 weights that travel as "
        "bytes do not allow; write reshard_after_forward=true, or fp8={'fp8_all_gather': False}",
    ),
    *(
        (
            lambda config, knob=knob: bool(getattr(config, knob)) and config.asked("quantized_all_gather") is None,
            f"{knob} says how quantized_all_gather works; write quantized_all_gather='int8' or 'fp8' too",
        )
        for knob in ("quantize_inside_nodes", "quantize_after_steps", "quantize_exclude")
    ),
]


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
