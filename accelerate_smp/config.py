"""The configuration of an SmpAccelerator, from all the places where users of Accelerate
write settings.

Knobs come from keywords, ``SMP_*`` variables, the file ``SMP_CONFIG_FILE`` names, and
Accelerate's own settings (``ParallelismConfig``, ``FullyShardedDataParallelPlugin``,
given in code or through the variables `accelerate launch` sets). Accelerate's are
translated or refused, never dropped; two places that contradict each other are an
error.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.fsdp.wrap import (
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from smp_core.config import DEFAULTS, SmpConfig, nested

logger = logging.getLogger("smp")

# Accelerate would build its own engine when it saw these.
_ENGINES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")


def resolve_config(
    config: SmpConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    knobs: Mapping[str, Any],
    parallelism: ParallelismConfig | None,
    fsdp: FullyShardedDataParallelPlugin | None,
) -> SmpConfig:
    """Resolve the configuration in effect.

    Args:
        config: all knobs, as an object, a dict or a YAML file; the environment does not
            count then.
        knobs: single knobs; they override the environment.
        parallelism, fsdp: Accelerate's own settings, or None to look at the variables
            `accelerate launch` sets.

    Raises:
        ValueError: an unknown knob, a bad value, ``config`` and ``knobs`` together, an
            option of Accelerate that has no counterpart, or two places that contradict
            each other.
    """
    # The knobs.
    if config is not None:
        if knobs:
            raise ValueError(
                f"smp_config= and also {', '.join(knobs)} were given; write the knobs into smp_config or give "
                "keywords only"
            )
        base = _as_config(config)
        base.name_unused_variables()
        asked = _asked(base)
    else:
        base = SmpConfig.from_code(knobs)
        asked = _asked(base, base.given)

    # Accelerate's own settings, as knobs.
    parallelism = _sizes_in_effect(parallelism)
    if fsdp is None and _flag("ACCELERATE_USE_FSDP"):
        refuse_fsdp1(os.environ.get("FSDP_VERSION", 1))
        fsdp = FullyShardedDataParallelPlugin()
    translated: dict[str, Any] = {}
    if fsdp is not None:
        translated.update(
            _from_fsdp(
                fsdp, has_degree="shard_degree" in asked or parallelism is not None
            )
        )
    if parallelism is not None:
        translated.update(_from_parallelism(parallelism))

    # The two together.
    for knob, value in translated.items():
        if knob in asked and not _same(asked[knob], value):
            raise ValueError(
                f"{knob}={asked[knob]!r} was asked of torch-smp but Accelerate's own settings say {knob}={value!r}; "
                "remove one of the two (in the YAML: `parallelism_config`/`fsdp_config` or the line in `smp_config`)"
            )
    # "auto" leaves it to them.
    settled = {
        knob: value
        for knob, value in asked.items()
        if value != "auto" or knob not in translated
    }
    if translated.keys() - settled.keys():
        base = SmpConfig.from_dict(nested({**translated, **settled}))
    return base


def _sizes_in_effect(parallelism: ParallelismConfig | None) -> ParallelismConfig | None:
    """Return Accelerate's sizes: those that are given, or of the variables that
    `accelerate launch` sets."""
    if parallelism is None and _flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return ParallelismConfig()
    return parallelism


def accelerators_arguments(
    accelerator: Accelerator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments for ``Accelerator.__init__`` by name.

    Args:
        accelerator: stands for ``self`` in the signature.
        args, kwargs: the user's, without knobs.

    Raises:
        ValueError: a keyword that is neither an argument of Accelerator nor a knob.
    """
    # Whatever Accelerate of this version takes.
    signature = inspect.signature(Accelerator.__init__)
    unknown = {
        name: value
        for name, value in kwargs.items()
        if name not in signature.parameters
    }
    known = [name for name in signature.parameters if name not in ("self", "kwargs")]
    SmpConfig.require_known(unknown, arguments=known)
    arguments = dict(signature.bind_partial(accelerator, *args, **kwargs).arguments)
    arguments.pop("self")
    return arguments


def asked_precision(arguments: Mapping[str, Any]) -> str:
    """Return the ``mixed_precision`` that Accelerate would take."""
    # The same order as in Accelerate: the argument, then the variable of its launcher.
    asked = arguments.get("mixed_precision") or os.environ.get(
        "ACCELERATE_MIXED_PRECISION", "no"
    )
    return str(getattr(asked, "value", asked))


def refuse_precision(arguments: Mapping[str, Any]) -> None:
    """Refuse fp16 where it cannot run.

    Args:
        arguments: those for ``Accelerator``.
    """
    on_cpu = arguments.get("cpu") or not torch.accelerator.is_available()
    if asked_precision(arguments) == "fp16" and on_cpu:
        raise ValueError(
            "mixed_precision='fp16' scales losses on a GPU and cannot run on CPU; write 'bf16' or 'no'"
        )


def refuse_engine_in_effect(distributed_type: Any) -> None:
    """Refuse an engine that Accelerate has chosen by itself."""
    engine = str(distributed_type).rpartition(".")[2]
    if engine in ("FSDP", "XLA"):
        raise ValueError(
            f"distributed_type={engine} and SmpAccelerator both want to shard; write distributed_type: MULTI_GPU "
            "or MULTI_CPU, or SmpAccelerator(smp=False)"
        )


def refuse_engines(arguments: Mapping[str, Any]) -> None:
    """Refuse another engine, which Accelerate drops in silence where there is no GPU.

    Args:
        arguments: those for ``Accelerator``.

    Raises:
        ValueError: DeepSpeed or Megatron-LM, asked for in code or by `accelerate
            launch`.
    """
    for engine, name in (("DEEPSPEED", "deepspeed"), ("MEGATRON_LM", "megatron_lm")):
        asked = (
            [f"{name}_plugin="]
            if arguments.get(f"{name}_plugin") or arguments.get(f"{name}_plugins")
            else []
        )
        asked += (
            [f"distributed_type: {engine}"] if _flag(f"ACCELERATE_USE_{engine}") else []
        )
        if asked:
            raise ValueError(
                f"{asked[0]} and SmpAccelerator both want to shard; leave it out (distributed_type: MULTI_GPU or "
                "MULTI_CPU), or write SmpAccelerator(smp=False)"
            )


def check_world(parallelism: ParallelismConfig | None, world_size: int) -> None:
    """Refuse degrees of a ``ParallelismConfig`` whose product is not the number of
    processes."""
    parallelism = _sizes_in_effect(parallelism)
    if parallelism is None or parallelism.total_size == world_size:
        return
    sizes = {
        name: getattr(parallelism, name)
        for name in ("dp_replicate_size", "dp_shard_size", "cp_size", "tp_size")
        if getattr(parallelism, name) != 1
    }
    shown = (
        " x ".join(f"{name}={size}" for name, size in sizes.items())
        or "dp_shard_size=1"
    )
    raise ValueError(
        f"{shown} makes {parallelism.total_size}, but {world_size} processes were started; start "
        f"{parallelism.total_size}, or leave parallelism_config out and write shard_degree: (replicas follow from it)"
    )


def check_degree(parallelism: ParallelismConfig | None, shard_degree: int) -> None:
    """Refuse a ``ParallelismConfig`` of another shard degree than "node" or "world" has
    turned out to mean."""
    parallelism = _sizes_in_effect(parallelism)
    if parallelism is None:
        return
    sizes = parallelism.dp_shard_size * parallelism.cp_size
    if sizes != shard_degree:
        raise ValueError(
            f"shard_degree is {shard_degree} here, but Accelerate's own settings say {sizes} (dp_shard_size x "
            "cp_size); remove one of the two (in the YAML: `parallelism_config` or the line in `smp_config`)"
        )


@contextlib.contextmanager
def engines_off() -> Iterator[None]:
    """Keep Accelerate's own engines off inside the block: smp_core shards."""
    before = {name: os.environ.pop(name) for name in _ENGINES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _as_config(
    config: SmpConfig | Mapping[str, Any] | str | os.PathLike[str],
) -> SmpConfig:
    if isinstance(config, SmpConfig):
        return config
    return (
        SmpConfig.from_dict(config)
        if isinstance(config, Mapping)
        else SmpConfig.from_yaml(config)
    )


def _asked(config: SmpConfig, written: Iterable[str] = ()) -> dict[str, Any]:
    """Return the settings that differ from their defaults. A knob that was ``written``
    at its default counts too, with all its fields."""
    at_default = [
        knob for knob in written if config.asked(knob) == DEFAULTS.asked(knob)
    ]
    plain = [name for knob in at_default for name in SmpConfig.settings_of(knob)]
    asked = [
        name
        for name in SmpConfig.settings()
        if name in plain or config.asked(name) != DEFAULTS.asked(name)
    ]
    return {name: config.asked(name) for name in asked}


def _flag(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")


def _same(asked: Any, translated: Any) -> bool:
    # "node" and "world" may well be the number that the other place writes, which
    # check_degree() compares once it is known.
    return (
        asked == translated
        or asked in ("auto", "node", "world")
        or list_or_self(asked) == list_or_self(translated)
    )


def list_or_self(value: Any) -> Any:
    """Turn a tuple into a list, so that the two compare equal in knobs."""
    return list(value) if isinstance(value, (list, tuple)) else value


def _from_parallelism(parallelism: ParallelismConfig) -> dict[str, Any]:
    sequence_ranks = getattr(parallelism, "sp_size", 1)  # Accelerate 1.12
    if sequence_ranks > 1:
        raise ValueError(
            f"sp_size={sequence_ranks} belongs to DeepSpeed; allowed: 1; write cp_size={sequence_ranks}"
        )
    return {
        # Accelerate counts context ranks apart from the shard ranks, smp_core among
        # them.
        "shard_degree": parallelism.dp_shard_size * parallelism.cp_size,
        "context_parallel_degree": parallelism.cp_size,
        "tensor_parallel_degree": parallelism.tp_size,
    }


def refuse_fsdp1(version: Any) -> None:
    """Refuse the first version of FSDP, Accelerate's default where no version is
    written."""
    if str(version) != "2":
        raise ValueError(
            f"fsdp_version={version}: torch-smp stands on FSDP2; write fsdp_version: 2"
        )


def _refuse_casts(policy: Any) -> None:
    """Refuse casts of FSDP2's MixedPrecisionPolicy that no knob stands for."""
    if not getattr(policy, "cast_forward_inputs", True):
        raise ValueError(
            "fsdp mixed_precision_policy cast_forward_inputs=False: inputs are cast to param_dtype; allowed: True; "
            "leave it out, or write Accelerator(mixed_precision='bf16') in place of the policy, which casts by autocast"
        )
    given = getattr(policy, "output_dtype", None)
    if given not in (None, getattr(policy, "param_dtype", None)):
        raise ValueError(
            f"fsdp mixed_precision_policy output_dtype={given}: a block gives what it computes in; allowed: None, or "
            "param_dtype; leave it out (Accelerator(mixed_precision='bf16') returns the model's outputs in float32)"
        )


def _from_fsdp(
    fsdp: FullyShardedDataParallelPlugin, has_degree: bool
) -> dict[str, Any]:
    """Translate a ``fsdp_config:`` section to settings: knobs, and dotted names of
    fields."""
    # What cannot be translated is refused, then what can is.
    refuse_fsdp1(fsdp.fsdp_version)
    if fsdp.ignored_modules:
        raise ValueError(
            "fsdp ignored_modules: torch-smp shards every parameter; leave it out"
        )
    if fsdp.param_init_fn is not None:
        raise ValueError(
            "fsdp param_init_fn: modules on the meta device use their own reset_parameters(); leave it out"
        )
    if callable(fsdp.auto_wrap_policy) and fsdp.auto_wrap_policy not in (
        transformer_auto_wrap_policy,
        size_based_auto_wrap_policy,
    ):
        raise ValueError(
            "fsdp auto_wrap_policy: a function of your own is not called; write units= in torch-smp's knobs"
        )
    knobs: dict[str, Any] = {"reshard_after_forward": bool(fsdp.reshard_after_forward)}
    if not has_degree:
        knobs["shard_degree"] = "world"  # as plain FSDP
    classes = fsdp.transformer_cls_names_to_wrap
    if classes:
        knobs["units.modules"] = tuple(
            classes.split(",") if isinstance(classes, str) else classes
        )
    if fsdp.min_num_params:
        knobs["units.min_parameters"] = fsdp.min_num_params
    if (
        getattr(fsdp.cpu_offload, "offload_params", None)
        or type(fsdp.cpu_offload).__name__ == "CPUOffloadPolicy"
    ):
        knobs["state_offload"] = "all"
    if fsdp.activation_checkpointing:
        knobs["activations.checkpoint"] = "full"
    if getattr(fsdp, "activation_checkpointing_offload", False):  # Accelerate 1.15
        knobs["activations.offload"] = True
    policy = fsdp.mixed_precision_policy
    _refuse_casts(policy)
    for knob in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, knob, None)
        if dtype is not None:
            knobs[knob] = str(dtype).removeprefix("torch.")
    # What torch-smp does in any case is said, and needs no knob.
    if fsdp.cpu_ram_efficient_loading:
        logger.info(
            "fsdp cpu_ram_efficient_loading has no effect: rank 0's weights go to every rank unit by unit"
        )
    if "FULL" in str(fsdp.state_dict_type):
        logger.info(
            "fsdp state_dict_type=FULL_STATE_DICT has no effect: checkpoints are sharded and load on any number of "
            "ranks; save_model() and get_state_dict() give the whole model"
        )
    return knobs
