"""The `parameters` block of SageMaker SMP v1 and v2 in the words of SmpConfig.

Owns the list of SMP's options (`SMP_OPTIONS`) and what each becomes here: a knob, nothing (with the sentence that says
why there is nothing to set), or a refusal that says what to use instead. Options and their meaning: the SageMaker
Python SDK's `smd_model_parallel_general` page (v1), AWS's "distributed-model-parallel-v2-reference" page (v2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smp_core import knob_values as read
from smp_core.knob_recipe import nested

# FSDP1's ShardingStrategy -> (shard_degree, reshard_after_forward).
_SHARDING_STRATEGIES: dict[str, tuple[int | str, bool]] = {
    "FULL_SHARD": ("world", True),
    "SHARD_GRAD_OP": ("world", False),
    "HYBRID_SHARD": ("node", True),
    "_HYBRID_SHARD_ZERO2": ("node", False),
    "NO_SHARD": (1, True),
}
# Key under which the handlers find the sharding strategy; not an identifier, so that no option can have this name.
_STRATEGY = "sharding strategy"


@dataclass
class Translation:
    """A block of SMP options, translated.

    Attributes:
        settings: knob of SmpConfig, or field of one ("activations.offload") -> value.
        origins: the same names -> the SMP option and value it comes from.
        lines: one sentence for each option, for the log.
        warnings: differences from SMP that change training results, for the log.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def set(self, option: str, asked: Any, knob: str, value: Any, note: str = "") -> None:
        """Record `knob` = `value` for the option; two options that disagree about a knob are an error."""
        origin = f"{option}={asked!r}"
        if knob in self.settings and self.settings[knob] != value:
            raise ValueError(
                f"{origin} and {self.origins[knob]} contradict each other about {knob}; keep the one that is meant"
            )
        self.settings[knob] = value
        self.origins[knob] = f"SMP {origin}"
        self.lines.append(f"{origin}: {knob}={value!r}" + (f"; {note}" if note else ""))

    @property
    def knobs(self) -> dict[str, Any]:
        """SmpConfig knob -> value."""
        return nested(self.settings)

    def without_effect(self, option: str, asked: Any, why: str) -> None:
        """Record that there is nothing to set for the option."""
        self.lines.append(f"{option}={asked!r}: no effect here; {why}")


Handler = Callable[[str, Any, Mapping[str, Any], Translation], None]


def translate_smp_parameters(parameters: Mapping[str, Any], *, sharding_strategy: str | None = None) -> Translation:
    """Translate a `parameters` block.

    Args:
        parameters: SMP option -> value.
        sharding_strategy: FSDP's strategy in the training script, a key of `_SHARDING_STRATEGIES` in any case. It
            gives the shard degree when `hybrid_shard_degree` is 0 or missing.

    Raises:
        ValueError: an option is unknown, refused, contradicts another, or has a value that is not allowed.
    """
    for wrapper in ("smdistributed", "modelparallel", "parameters"):
        if wrapper in parameters:
            raise ValueError(
                f"this is the whole `distribution` argument (it has the key {wrapper!r}); pass the block inside: "
                'distribution["smdistributed"]["modelparallel"]["parameters"]'
            )
    for option in parameters:
        if option not in SMP_OPTIONS:
            raise read.unknown_name(
                "SageMaker SMP option", str(option), tuple(SMP_OPTIONS), "docs/migrating-from-smp.md"
            )
    translation = Translation()
    options = dict(parameters)
    if sharding_strategy is not None:
        strategy = sharding_strategy.upper()
        if strategy not in _SHARDING_STRATEGIES:
            raise read.refusal("sharding_strategy", sharding_strategy, ", ".join(_SHARDING_STRATEGIES))
        options = {"hybrid_shard_degree": 0, **options, _STRATEGY: strategy}
        if not _SHARDING_STRATEGIES[strategy][1]:
            translation.set("sharding_strategy", strategy, "reshard_after_forward", False)
    for option, value in options.items():
        if option != _STRATEGY:
            SMP_OPTIONS[option](option, value, options, translation)
    if "shard_degree" not in translation.settings:
        translation.lines.append(
            "neither sharded_data_parallel_degree nor hybrid_shard_degree: shard_degree stays 'auto', the smallest "
            "degree that fits the device; write shard_degree=1 for plain replicas"
        )
    _warn_of_silent_clipping(parameters, translation)
    return translation


def _knob(knob: str, reader: read.Reader, note: str = "") -> Handler:
    def handle(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
        to.set(option, value, knob, reader(option, value), note)

    return handle


def _no_effect(reader: read.Reader, why: str) -> Handler:
    def handle(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
        reader(option, value)
        to.without_effect(option, value, why)

    return handle


def _only(allowed: Any, reader: read.Reader, why: str, instead: str) -> Handler:
    """Accept the one value that is the case here anyway; refuse any other with what to use instead."""

    def handle(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
        if reader(option, value) != allowed:
            raise ValueError(f"{option}={value!r} cannot be had here; {instead}")
        to.without_effect(option, value, why)

    return handle


def _half_precision(dtype: str) -> Handler:
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    trainer = {
        "bf16": 'Trainer(precision="bf16-mixed")',
        "fp16": 'Trainer(precision="16-mixed"), which scales the loss',
    }[short]
    flag = f"set the trainer's precision to match: Lightning {trainer}; HF TrainingArguments({short}=True)"

    def handle(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
        if read.boolean()(option, value):
            masters = "master_dtype='float32', as SMP steps a float32 copy of the weights"
            to.set(option, value, "param_dtype", dtype, f"{masters}; {flag}")
            to.settings["master_dtype"], to.origins["master_dtype"] = "float32", f"SMP {option}={value!r}"
        else:
            to.without_effect(option, value, "param_dtype follows the trainer's precision")

    return handle


def _hybrid_shard_degree(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
    degree = read.integer(0)(option, value)
    strategy = options.get(_STRATEGY)
    if degree == 0 and strategy is None:
        raise ValueError(
            f"{option}=0 takes the sharding strategy from the FSDP call in the training script, which is not part of "
            'this block; pass it: SmpConfig.from_smp_parameters(..., sharding_strategy="FULL_SHARD") for '
            'shard_degree="world", "HYBRID_SHARD" for shard_degree="node", "NO_SHARD" for shard_degree=1'
        )
    if degree == 0 and strategy is not None:
        to.set(option, value, "shard_degree", _SHARDING_STRATEGIES[strategy][0], f"FSDP's {strategy}")
    else:
        to.set(option, value, "shard_degree", degree, "plain replicas, nothing is sharded" if degree == 1 else "")


def _offload_activations(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
    offload = read.boolean()(option, value)
    if offload:
        note = "SMP offloads what the script checkpoints; here that is every wrapped block"
        if option == "offload_activations" and "activation_loading_horizon" not in options:
            note += "; activations.loading_horizon is 2 here where it is left out, SMP v1 has 4"
        to.set(option, value, "activations.checkpoint", "full", note)
    to.set(option, value, "activations.offload", offload)


def _horizon(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
    blocks = read.integer(1)(option, value)
    asked = [name for name in ("offload_activations", "sm_activation_offloading") if name in options]
    if any(read.boolean()(name, options[name]) for name in asked):
        to.set(option, value, "activations.loading_horizon", blocks)
    else:
        to.without_effect(option, value, "nothing is offloaded unless offload_activations or sm_activation_offloading")


def _shard_optimizer_state(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
    if not read.boolean()(option, value):
        to.without_effect(option, value, "optimizer states are sharded exactly like their parameters (shard_degree)")
        return
    if "sharded_data_parallel_degree" not in options and "hybrid_shard_degree" not in options:
        to.set(option, value, "shard_degree", 1, "parameters stay whole on each rank")
    to.set(option, value, "optimizer_shard", "world", "optimizer states sharded over all ranks")


def _gradient_clipping(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
    clip = read.number(0.0, include_lowest=True)(option, value)
    if clip:
        raise ValueError(
            f"{option}={value!r} is not a matter of the sharding here; remove it and write "
            f"Trainer(gradient_clip_val={clip:g}), or TrainingArguments(max_grad_norm={clip:g}) with HF: the norm is "
            "taken over all shards"
        )
    to.without_effect(option, value, "gradients are clipped only where the trainer is told to")


def _microbatches(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
    count = read.integer(1)(option, value)
    if _stages_of(options) > 1:
        to.set(option, value, "pipeline.microbatches", count, "parts of a batch that goes through pipeline stages")
        return
    if count > 1:
        raise ValueError(
            f"{option}={count} splits a batch inside @smp.step, which needs pipeline stages here; remove it, write "
            f"Trainer(accumulate_grad_batches={count}) (HF: gradient_accumulation_steps={count}) and divide the data "
            f"loader's batch size by {count}"
        )
    to.without_effect(option, value, "a batch is one micro-batch unless accumulate_grad_batches says otherwise")


def _stages_of(options: Mapping[str, Any]) -> int:
    asked = [options[name] for name in ("partitions", "pipeline_parallel_degree") if name in options]
    return max((_DEGREE("partitions", value) for value in asked), default=1)


def _schedule(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
    kind = read.word("interleaved", "simple")(option, value)
    if _stages_of(options) == 1:
        to.without_effect(option, value, _STAGES)
    elif kind == "simple":
        to.set(option, value, "pipeline.schedule", "gpipe", "all forwards before all backwards")
    else:
        to.set(option, value, "pipeline.schedule", "1f1b", "SMP's interleaved takes backwards between forwards")


def _deepspeed_json(option: str, value: Any, options: Mapping[str, Any], to: Translation) -> None:
    raise ValueError(
        f"{option}={value!r} names a private JSON file of SMP v1; remove it and write what it sets as knobs of "
        "SmpConfig (shard_degree, collectives.hierarchical, ...)"
    )


def _placement(knob: str, value: Any) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if text not in ("cluster", "spread") and sorted(text) != ["D", "P", "T"]:
        raise read.refusal(knob, value, "'cluster', 'spread', a permutation of 'DPT'")
    return text


def _warn_of_silent_clipping(parameters: Mapping[str, Any], to: Translation) -> None:
    degree = to.settings.get("shard_degree")
    if "sharded_data_parallel_degree" not in parameters or "sdp_gradient_clipping" in parameters or degree == 1:
        return
    to.warnings.append(
        "SMP v1 clips gradients to a norm of 1.0 by default under sharded data parallelism; here nothing is clipped "
        "unless the trainer is told: Trainer(gradient_clip_val=1.0)"
    )


_DEGREE = read.integer(1)
_BOOLEAN = read.boolean()
_STAGES = "pipeline stages are arranged by the knob `pipeline`"
_UNIT = "parameters are gathered and gradients reduced unit by unit; the knob `units` sizes them"

# Option of SMP -> what becomes of it. v1 first, then v2; options that both have stand once.
SMP_OPTIONS: dict[str, Handler] = {
    "partitions": _knob("pipeline_parallel_degree", _DEGREE),
    "pipeline_parallel_degree": _knob("pipeline_parallel_degree", _DEGREE),
    "microbatches": _microbatches,
    "pipeline": _schedule,
    "optimize": _no_effect(read.word("memory", "speed"), _STAGES),
    "placement_strategy": _no_effect(_placement, "a partition group is always consecutive ranks, node by node"),
    "auto_partition": _no_effect(_BOOLEAN, _STAGES),
    "default_partition": _no_effect(read.integer(0), _STAGES),
    "ddp": _only(
        True,
        _BOOLEAN,
        "all ranks always train data-parallel",
        "ranks always train data-parallel: remove it or write True",
    ),
    "memory_weight": _no_effect(read.number(0.0, 1.0 + 1e-9, include_lowest=True), _STAGES),
    "active_microbatches": _no_effect(_DEGREE, _STAGES),
    "deterministic_server": _no_effect(_BOOLEAN, _STAGES),
    "offload_activations": _offload_activations,
    "activation_loading_horizon": _horizon,
    "tensor_parallel_degree": _knob("tensor_parallel_degree", _DEGREE),
    "fp16": _half_precision("float16"),
    "fp16_params": _half_precision("float16"),
    "bf16": _half_precision("bfloat16"),
    "shard_optimizer_state": _shard_optimizer_state,
    "prescaled_batch": _no_effect(_BOOLEAN, "tensor ranks always read the same batch"),
    "skip_tracing": _no_effect(_BOOLEAN, "the model is not traced"),
    "delayed_parameter_initialization": _knob("delayed_init", _BOOLEAN),
    "sharded_data_parallel_degree": _knob("shard_degree", _DEGREE),
    "sdp_reduce_bucket_size": _no_effect(_DEGREE, _UNIT),
    "sdp_param_persistence_threshold": _no_effect(
        read.integer(0), "every parameter is sharded, except 0-d ones; small ones travel with their unit"
    ),
    "sdp_max_live_parameters": _no_effect(_DEGREE, _UNIT),
    "sdp_hierarchical_allgather": _knob("collectives.hierarchical", _BOOLEAN),
    "sdp_gradient_clipping": _gradient_clipping,
    "ddp_dist_backend": _no_effect(
        read.word("auto", "nccl", "smddp"),
        "the trainer picks the backend: SmpShardedStrategy(process_group_backend=...)",
    ),
    "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": _no_effect(read.integer(0), "SMDDP's collectives are not used"),
    "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": _no_effect(read.integer(0), "SMDDP's collectives are not used"),
    "_sharded_data_parallelism_config": _deepspeed_json,
    "hybrid_shard_degree": _hybrid_shard_degree,
    "sm_activation_offloading": _offload_activations,
    "fsdp_cache_flush_warnings": _no_effect(
        _BOOLEAN, "torch.cuda.memory_stats()['num_alloc_retries'] counts the allocator's flushes"
    ),
    "allow_empty_shards": _no_effect(_BOOLEAN, "a tensor with fewer rows than ranks is always accepted"),
    "context_parallel_degree": _knob("context_parallel_degree", _DEGREE),
    "expert_parallel_degree": _only(
        1,
        _DEGREE,
        "experts are sharded like every other layer",
        "expert parallelism does not exist here: write 1 and raise the shard degree; experts are sharded like every "
        "other layer",
    ),
    "random_seed": _no_effect(
        read.integer(0),
        "it seeds tensor and expert parallel ranks, which this version lacks; call seed_everything(seed)",
    ),
}
