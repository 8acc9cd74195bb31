"""The `parameters` block of SageMaker SMP v1 and v2 in the words of SmpConfig.

Owns the list of SMP's options (`SMP_OPTIONS`) and what each becomes here: a knob,
nothing (with the sentence that says why there is nothing to set), or a refusal that
says what to use instead. Options and their meaning: the SageMaker Python SDK's
`smd_model_parallel_general` page (v1), AWS's "distributed-model-parallel-v2-reference"
page (v2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smp_core.config import values as read
from smp_core.config.recipe import nested

# FSDP1's ShardingStrategy -> (shard_degree, reshard_after_forward).
_SHARDING_STRATEGIES: dict[str, tuple[int | str, bool]] = {
    "FULL_SHARD": ("world", True),
    "SHARD_GRAD_OP": ("world", False),
    "HYBRID_SHARD": ("node", True),
    "_HYBRID_SHARD_ZERO2": ("node", False),
    "NO_SHARD": (1, True),
}


@dataclass
class Translation:
    """A block of SMP options, translated.

    Attributes:
        options: the block.
        strategy: FSDP's beside it, a key of `_SHARDING_STRATEGIES`; None: there is none.
        settings: knob of SmpConfig, or field of one ("activations.offload") -> value.
        origins: the same names -> the SMP option and value it comes from.
        lines: one sentence for each option, for the log.
        warnings: differences from SMP that change training results, for the log.
    """

    options: Mapping[str, Any]
    strategy: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def set(
        self, option: str, asked: Any, knob: str, value: Any, note: str = ""
    ) -> None:
        """Record `knob` = `value` for the option; two options that disagree about a
        knob are an error."""
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


Handler = Callable[[str, Any, Translation], None]


def _boolean(option: str, value: Any) -> bool:
    """Return True or False; in the JSON and the scripts of SMP also 1 or 0."""
    return bool(read.boolean()(option, bool(value) if value in (0, 1) else value))


def translate_smp_parameters(
    parameters: Mapping[str, Any], *, sharding_strategy: str | None = None
) -> Translation:
    """Translate a `parameters` block.

    Args:
        parameters: SMP option -> value.
        sharding_strategy: FSDP's strategy in the training script, a key of
            `_SHARDING_STRATEGIES` in any case. It gives the shard degree when
            `hybrid_shard_degree` is 0 or missing.

    Raises:
        ValueError: an option is unknown, refused, contradicts another, or has a value
            that is not allowed.
    """
    # Whether it is such a block.
    # The keys above the block are never options of it.
    for wrapper in ("smdistributed", "modelparallel", "parameters"):
        if wrapper in parameters:
            raise ValueError(
                f"this is the whole `distribution` argument (it has the key {wrapper!r}); pass the block inside: "
                'distribution["smdistributed"]["modelparallel"]["parameters"]'
            )
    # Unknown names are refused before anything is translated, with the nearest known
    # one.
    for option in parameters:
        if option not in SMP_OPTIONS:
            raise read.unknown_name(
                "SageMaker SMP option",
                str(option),
                tuple(SMP_OPTIONS),
                "docs/migrating-from-smp.md",
            )
    translation = Translation(parameters)
    if sharding_strategy is not None:
        strategy = sharding_strategy.upper()
        if strategy not in _SHARDING_STRATEGIES:
            raise read.refusal(
                "sharding_strategy", sharding_strategy, ", ".join(_SHARDING_STRATEGIES)
            )
        # With a strategy beside it, a degree of 0 means the strategy's.
        translation.strategy = strategy
        translation.options = {"hybrid_shard_degree": 0, **parameters}
        if not _SHARDING_STRATEGIES[strategy][1]:
            translation.set(
                "sharding_strategy", strategy, "reshard_after_forward", False
            )
    # Each option, and what their absence means.
    for option, value in translation.options.items():
        SMP_OPTIONS[option](option, value, translation)
    # Nothing was said of sharding, which SMP takes as plain data parallelism.
    if "shard_degree" not in translation.settings:
        translation.lines.append(
            "neither sharded_data_parallel_degree nor hybrid_shard_degree: shard_degree stays 'auto', the smallest "
            "degree that fits the device; write shard_degree=1 for plain replicas"
        )
    _warn_of_silent_clipping(parameters, translation)
    return translation


def _knob(knob: str, reader: read.Reader) -> Handler:
    def handle(option: str, value: Any, to: Translation) -> None:
        to.set(option, value, knob, reader(option, value))

    return handle


def _no_effect(reader: read.Reader, why: str) -> Handler:
    def handle(option: str, value: Any, to: Translation) -> None:
        reader(option, value)
        to.without_effect(option, value, why)

    return handle


def _only(allowed: Any, reader: read.Reader, why: str, instead: str) -> Handler:
    """Accept the one value that is the case here anyway; refuse any other with what to
    use instead."""

    def handle(option: str, value: Any, to: Translation) -> None:
        if reader(option, value) != allowed:
            raise ValueError(f"{option}={value!r} cannot be had here; {instead}")
        to.without_effect(option, value, why)

    return handle


def _half_precision(dtype: str) -> Handler:
    # Casts of the trainer and param_dtype have to agree.
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    trainer = {
        "bf16": 'Trainer(precision="bf16-mixed")',
        "fp16": 'Trainer(precision="16-mixed"), which scales the loss',
    }[short]
    flag = f"set the trainer's precision to match: Lightning {trainer}; HF TrainingArguments({short}=True)"

    def handle(option: str, value: Any, to: Translation) -> None:
        if _boolean(option, value):
            masters = (
                "master_dtype='float32', as SMP steps a float32 copy of the weights"
            )
            to.set(option, value, "param_dtype", dtype, f"{masters}; {flag}")
            # SMP's optimizer steps float32 copies; here that is a knob of its own.
            to.settings["master_dtype"], to.origins["master_dtype"] = (
                "float32",
                f"SMP {option}={value!r}",
            )
        else:
            to.without_effect(
                option, value, "param_dtype follows the trainer's precision"
            )

    return handle


def _hybrid_shard_degree(option: str, value: Any, to: Translation) -> None:
    degree = read.integer(0)(option, value)
    # 0 means: as FSDP was told in the script.
    strategy = to.strategy
    if degree == 0 and strategy is None:
        raise ValueError(
            f"{option}=0 takes the sharding strategy from the FSDP call in the training script, which is not part of "
            'this block; pass it: SmpConfig.from_smp_parameters(..., sharding_strategy="FULL_SHARD") for '
            'shard_degree="world", "HYBRID_SHARD" for shard_degree="node", "NO_SHARD" for shard_degree=1'
        )
    note = "plain replicas, nothing is sharded" if degree == 1 else ""
    shards: int | str = degree
    if degree == 0 and strategy is not None:
        shards, note = _SHARDING_STRATEGIES[strategy][0], f"FSDP's {strategy}"
    to.set(option, value, "shard_degree", shards, note)


def _offload_activations(option: str, value: Any, to: Translation) -> None:
    # Here only inputs of checkpointed modules can be offloaded, so these are switched
    # on with it.
    offload = _boolean(option, value)
    if offload:
        note = (
            "SMP offloads what the script checkpoints; here that is every wrapped block"
        )
        if (
            option == "offload_activations"
            and "activation_loading_horizon" not in to.options
        ):
            note += "; activations.loading_horizon is 2 here where it is left out, SMP v1 has 4"
        to.set(option, value, "activations.checkpoint", "full", note)
    to.set(option, value, "activations.offload", offload)


def _horizon(option: str, value: Any, to: Translation) -> None:
    blocks = read.integer(1)(option, value)
    # v1 and v2 have a name each for the switch that the horizon belongs to.
    asked = [
        name
        for name in ("offload_activations", "sm_activation_offloading")
        if name in to.options
    ]
    if any(_boolean(name, to.options[name]) for name in asked):
        to.set(option, value, "activations.loading_horizon", blocks)
    else:
        to.without_effect(
            option,
            value,
            "nothing is offloaded unless offload_activations or sm_activation_offloading",
        )


def _shard_optimizer_state(option: str, value: Any, to: Translation) -> None:
    if not _boolean(option, value):
        to.without_effect(
            option,
            value,
            "optimizer states are sharded exactly like their parameters (shard_degree)",
        )
        return
    if (
        # SMP shards optimizer states alone then, which is a degree of 1 with states
        # over the world.
        "sharded_data_parallel_degree" not in to.options
        and "hybrid_shard_degree" not in to.options
    ):
        to.set(option, value, "shard_degree", 1, "parameters stay whole on each rank")
    to.set(
        option,
        value,
        "optimizer_shard",
        "world",
        "optimizer states sharded over all ranks",
    )


def _gradient_clipping(option: str, value: Any, to: Translation) -> None:
    # A number other than 0 asks for clipping, which belongs to the trainer.
    clip = read.number(0.0, include_lowest=True)(option, value)
    if clip:
        raise ValueError(
            f"{option}={value!r} is not a matter of the sharding here; remove it and write "
            f"Trainer(gradient_clip_val={clip:g}), or TrainingArguments(max_grad_norm={clip:g}) with HF: the norm is "
            "taken over all shards"
        )
    to.without_effect(
        option, value, "gradients are clipped only where the trainer is told to"
    )


def _microbatches(option: str, value: Any, to: Translation) -> None:
    count = read.integer(1)(option, value)
    # With stages it is the number of parts of a batch; without, gradient accumulation.
    if _stages_of(to) > 1:
        to.set(
            option,
            value,
            "pipeline.microbatches",
            count,
            "parts of a batch that goes through pipeline stages",
        )
        return
    if count > 1:
        raise ValueError(
            f"{option}={count} splits a batch inside @smp.step, which needs pipeline stages here; remove it, write "
            f"Trainer(accumulate_grad_batches={count}) (HF: gradient_accumulation_steps={count}) and divide the data "
            f"loader's batch size by {count}"
        )
    to.without_effect(
        option,
        value,
        "a batch is one micro-batch unless accumulate_grad_batches says otherwise",
    )


def _stages_of(to: Translation) -> int:
    asked = [
        to.options[name]
        for name in ("partitions", "pipeline_parallel_degree")
        if name in to.options
    ]
    return max((_DEGREE("partitions", value) for value in asked), default=1)


def _schedule(option: str, value: Any, to: Translation) -> None:
    schedule, note = _SCHEDULES[read.word(*_SCHEDULES)(option, value)]
    # Without stages a schedule says nothing.
    if _stages_of(to) == 1:
        to.without_effect(option, value, _STAGES)
    else:
        to.set(option, value, "pipeline.schedule", schedule, note)


def _deepspeed_json(option: str, value: Any, to: Translation) -> None:
    raise ValueError(
        f"{option}={value!r} names a private JSON file of SMP v1; remove it and write what it sets as knobs of "
        "SmpConfig (shard_degree, collectives.hierarchical, ...)"
    )


def _placement(knob: str, value: Any) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if text not in ("cluster", "spread") and sorted(text) != ["D", "P", "T"]:
        raise read.refusal(knob, value, "'cluster', 'spread', a permutation of 'DPT'")
    return text


def _fp8(option: str, value: Any, to: Translation) -> None:
    note = "FP8 products in the linear layers, as Transformer Engine's fp8_autocast"
    # Fields of the recipe switch on what they belong to, so they are translated in its
    # place.
    if not _boolean(option, value):
        to.without_effect(option, value, "products are in FP8 only with the knob `fp8`")
    elif any(name in to.options for name in _FP8_FIELDS):
        to.set(option, value, "fp8.scaling", "delayed", note)
    else:
        to.set(option, value, "fp8", True, note)


def _fp8_field(option: str, value: Any, to: Translation) -> None:
    field_of_recipe, reader = _FP8_FIELDS[option]
    read_value = reader(option, value)
    if "fp8" in to.options and _boolean("fp8", to.options["fp8"]):
        to.set(option, value, f"fp8.{field_of_recipe}", read_value)
    else:
        to.without_effect(
            option, value, "it is a field of the FP8 recipe, which `fp8` switches on"
        )


def _loss_scale(option: str, value: Any, to: Translation) -> None:
    # Dynamic scaling is what trainers do.
    if value is None or (option == "dynamic_loss_scale" and _boolean(option, value)):
        to.without_effect(
            option,
            value,
            'the trainer scales losses by itself: Trainer(precision="16-mixed")',
        )
        return
    # Any other scaling is an object that the trainer is given.
    scaler = {
        "static_loss_scale": f"init_scale={value}, growth_interval=2**31 - 1",
        "dynamic_loss_scale": "enabled=False",
        "dynamic_loss_args": "init_scale=..., growth_interval=...",
    }[option]
    raise ValueError(
        f"{option}={value!r} is an argument of SMP's DistributedOptimizer; remove it and write "
        f'plugins=[MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler({scaler}))] for Lightning\'s Trainer, or '
        "kwargs_handlers=[GradScalerKwargs(...)] for SmpAccelerator; bf16 needs no scaling"
    )


def _passes(option: str, value: Any, to: Translation) -> None:
    count = read.integer(1)(option, value)
    if count > 1:
        raise ValueError(
            f"{option}={count} is an argument of SMP's DistributedModel; remove it and write "
            f"Trainer(accumulate_grad_batches={count}) (HF: gradient_accumulation_steps={count})"
        )
    to.without_effect(
        option,
        value,
        "each backward pass ends a window unless accumulate_grad_batches says otherwise",
    )


def _smp_moe(option: str, value: Any, to: Translation) -> None:
    # SMP would change the router; here a model keeps its own.
    if _boolean(option, value) and "moe_load_balancing" not in to.options:
        to.warnings.append(
            "SMP routes tokens by 'sinkhorn' unless moe_load_balancing says otherwise; here the model's own router does"
        )
    to.without_effect(
        option,
        value,
        "experts stay the model's own modules; expert_parallel_degree divides them",
    )


def _moe_load_balancing(option: str, value: Any, to: Translation) -> None:
    # Only the auxiliary loss leaves the choice of experts to the router.
    kind = _MOE_BALANCING(option, value)
    if kind == "none":
        to.without_effect(
            option,
            value,
            "a model has an auxiliary loss only with config.output_router_logits=True",
        )
        return
    if kind != "aux_loss":
        raise ValueError(
            f"{option}={value!r} gives tokens to other experts than the model's own router chooses, which changes what "
            'the model computes; remove it and write router_balance="global" with model.config.output_router_logits='
            "True (an auxiliary loss), or router_bias_update_rate=0.001 for routers with a bias like DeepSeek-V3's"
        )
    to.set(
        option,
        value,
        "router_balance",
        "global",
        "the loss is the model's own: model.config.output_router_logits=True",
    )


def _moe_coefficient(option: str, value: Any, to: Translation) -> None:
    number = read.number(0.0, include_lowest=True)(option, value)
    balancing = "moe_load_balancing"
    is_auxiliary = option == "moe_aux_loss_coeff"
    has_loss = (
        not is_auxiliary
        # Without the option SMP balances by "sinkhorn", which has no loss.
        or _MOE_BALANCING(balancing, to.options.get(balancing, "sinkhorn"))
        == "aux_loss"
    )
    if number and has_loss:
        loss = (
            f"model.config.router_aux_loss_coef={number:g}"
            if is_auxiliary
            else f"loss = loss + {number:g} * router_logits.logsumexp(-1).square().mean() for each router"
        )
        raise ValueError(
            f"{option}={value!r} is a matter of the model's loss here; remove it and write {loss}"
        )
    to.without_effect(option, value, "no such loss is added to the model's own")


def _sharding_strategy(option: str, value: Any, to: Translation) -> None:
    """Refuse what is an argument of the translation, beside the block."""
    raise ValueError(
        f"{option}={value!r} is FSDP's and not part of this block; remove it and write "
        f"SmpConfig.from_smp_parameters(..., sharding_strategy={value!r})"
    )


def _trace_device(option: str, value: Any) -> str | None:
    return None if value is None else read.word("gpu", "cpu")(option, value)


def _list_of_text(option: str, value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, str) for each in value
    ):
        raise read.refusal(option, value, "a list of text")
    return value


def _words_of(what: str) -> read.Reader:
    """Return a reader of options that only have to be text, which belongs to something
    that is not there."""

    def words(option: str, value: Any) -> str:
        if not isinstance(value, str):
            raise read.refusal(option, value, what)
        return value

    return words


def _warn_of_silent_clipping(parameters: Mapping[str, Any], to: Translation) -> None:
    # SMP clips where nothing was asked; moving here needs a word to the trainer.
    degree = to.settings.get("shard_degree")
    if (
        "sharded_data_parallel_degree" not in parameters
        or "sdp_gradient_clipping" in parameters
        or degree == 1
    ):
        return
    to.warnings.append(
        "SMP v1 clips gradients to a norm of 1.0 by default under sharded data parallelism; here nothing is clipped "
        "unless the trainer is told: Trainer(gradient_clip_val=1.0)"
    )


_DEGREE = read.integer(1)
# SMP's and DeepSpeed's pages write 5e8.
_ELEMENTS = read.number(1.0, include_lowest=True)
_MOE_BALANCING = read.word("aux_loss", "none", "sinkhorn", "balanced")
# SMP's schedule -> ours, and what is said of it.
_SCHEDULES = {
    "interleaved": ("1f1b", "SMP's interleaved takes backwards between forwards"),
    "simple": ("gpipe", "all forwards before all backwards"),
}
_FP8_FIELDS: dict[str, tuple[str, read.Reader]] = {
    "fp8_amax_history_len": ("amax_history_len", _DEGREE),
    "fp8_amax_compute_algo": ("amax_compute_algo", read.word("max", "most_recent")),
}
_PROCESSES = (
    "the launcher starts processes: Trainer(devices=...), or torchrun --nproc-per-node"
)
_MPI = "an option of mpirun, which need not start the processes: torchrun does as well"
_UNTRACED = "the model is not traced"
_NO_DDP = "no DistributedDataParallel is made: units, not buckets, are reduced"
_STAGES = "pipeline stages are arranged by the knob `pipeline`"
_UNIT = "parameters are gathered and gradients reduced unit by unit; the knob `units` sizes them"
_NO_SMDDP = _no_effect(read.integer(0), "SMDDP's collectives are not used")

# Option of SMP -> what becomes of it. v1 first, then v2; options that both have stand
# once. Beside those of the block, what people write into it: arguments of SMP's calls,
# of its example scripts and of the estimator's `mpi` dict.
SMP_OPTIONS: dict[str, Handler] = {
    # Version 1: stages and their schedule.
    "partitions": _knob("pipeline_parallel_degree", _DEGREE),
    "pipeline_parallel_degree": _knob("pipeline_parallel_degree", _DEGREE),
    "microbatches": _microbatches,
    "pipeline": _schedule,
    "optimize": _no_effect(read.word("memory", "speed"), _STAGES),
    "placement_strategy": _no_effect(
        _placement, "a partition group is always consecutive ranks, node by node"
    ),
    "auto_partition": _no_effect(_boolean, _STAGES),
    "default_partition": _no_effect(read.integer(0), _STAGES),
    "ddp": _only(
        True,
        _boolean,
        "all ranks always train data-parallel",
        "ranks always train data-parallel: remove it or write True",
    ),
    "memory_weight": _no_effect(
        read.number(0.0, 1.0 + 1e-9, include_lowest=True), _STAGES
    ),
    "active_microbatches": _no_effect(_DEGREE, _STAGES),
    "deterministic_server": _no_effect(_boolean, _STAGES),
    # Memory, other axes and precision.
    "offload_activations": _offload_activations,
    "activation_loading_horizon": _horizon,
    "tensor_parallel_degree": _knob("tensor_parallel_degree", _DEGREE),
    "fp16": _half_precision("float16"),
    "fp16_params": _half_precision("float16"),
    "bf16": _half_precision("bfloat16"),
    "shard_optimizer_state": _shard_optimizer_state,
    "prescaled_batch": _no_effect(_boolean, "tensor ranks always read the same batch"),
    "skip_tracing": _no_effect(_boolean, _UNTRACED),
    "delayed_parameter_initialization": _knob("delayed_init", _boolean),
    # Sharding.
    "sharded_data_parallel_degree": _knob("shard_degree", _DEGREE),
    "sdp_reduce_bucket_size": _no_effect(_ELEMENTS, _UNIT),
    "sdp_param_persistence_threshold": _no_effect(
        read.integer(0),
        "every parameter is sharded, except 0-d ones; small ones travel with their unit",
    ),
    "sdp_max_live_parameters": _no_effect(_ELEMENTS, _UNIT),
    "sdp_hierarchical_allgather": _knob("collectives.hierarchical", _boolean),
    "sdp_gradient_clipping": _gradient_clipping,
    # Transport and accumulation.
    "ddp_dist_backend": _no_effect(
        read.word("auto", "nccl", "smddp"),
        "the trainer picks the backend: SmpShardedStrategy(process_group_backend=...)",
    ),
    "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": _NO_SMDDP,
    "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": _NO_SMDDP,
    "_sharded_data_parallelism_config": _deepspeed_json,
    "_fp32_grad_accumulation": _no_effect(
        _boolean,
        "gradients of half precision are added up in float32 unless the knob reduce_dtype says otherwise",
    ),
    "horovod": _only(
        False,
        _boolean,
        "ranks always train data-parallel, without Horovod",
        "Horovod is not used: remove it",
    ),
    # What only version 1's partitioner and launcher read.
    "contiguous": _no_effect(_boolean, _STAGES),
    "ddp_port": _no_effect(_DEGREE, "the launcher picks the port: MASTER_PORT"),
    "load_partition": _no_effect(_boolean, _STAGES),
    "partition_file": _no_effect(_words_of("a path"), _STAGES),
    "processes_per_host": _no_effect(_DEGREE, _PROCESSES),
    "custom_mpi_options": _no_effect(_words_of("text"), _MPI),
    # Arguments of SMP's calls in the training script.
    "trace_device": _no_effect(_trace_device, _UNTRACED),
    "trace_execution_times": _no_effect(_boolean, _UNTRACED),
    "trace_memory_usage": _no_effect(_boolean, _UNTRACED),
    "overlapping_allreduce": _no_effect(
        _boolean, "gradients are always reduced while backward goes on"
    ),
    "backward_passes_per_step": _passes,
    "average_grads_across_microbatches": _only(
        True,
        _boolean,
        "a step's gradient is the mean over its micro-batches",
        "a step's gradient is the mean over its micro-batches: remove it and multiply the loss by their number",
    ),
    "bucket_cap_mb": _no_effect(read.number(0.0), _NO_DDP),
    "find_unused_parameters": _no_effect(
        _boolean, "parameters without a gradient need no flag"
    ),
    "broadcast_buffers": _no_effect(
        _boolean, "evaluation and checkpoints take rank 0's buffers"
    ),
    "gradient_as_bucket_view": _no_effect(_boolean, _NO_DDP),
    "static_loss_scale": _loss_scale,
    "dynamic_loss_scale": _loss_scale,
    "dynamic_loss_args": _loss_scale,
    # Version 2.
    "hybrid_shard_degree": _hybrid_shard_degree,
    "sm_activation_offloading": _offload_activations,
    "fsdp_cache_flush_warnings": _no_effect(
        _boolean,
        "torch.cuda.memory_stats()['num_alloc_retries'] counts the allocator's flushes",
    ),
    "allow_empty_shards": _no_effect(
        _boolean, "a tensor with fewer rows than ranks is always accepted"
    ),
    "context_parallel_degree": _knob("context_parallel_degree", _DEGREE),
    "expert_parallel_degree": _knob("expert_parallel_degree", _DEGREE),
    # What version 2's launcher and Transformer Engine read.
    "random_seed": _no_effect(
        read.integer(0),
        "tensor ranks draw as one process does, from the script's seed; call seed_everything(seed)",
    ),
    "process_count_per_node": _no_effect(_DEGREE, _PROCESSES),
    "mpi_additional_options": _no_effect(_list_of_text, _MPI),
    "fp8": _fp8,
    "fp8_amax_history_len": _fp8_field,
    "fp8_amax_compute_algo": _fp8_field,
    "sharding_strategy": _sharding_strategy,
    "cp_comm_type": _no_effect(
        read.word("p2p", "all_gather"),
        "keys and values of a sequence are always gathered, with the same results",
    ),
    # Experts.
    "moe": _only(
        False,
        _boolean,
        "experts are sharded like every other layer",
        "no layer is exchanged for one of SMP's: remove it; models with experts train as they are",
    ),
    "smp_moe": _smp_moe,
    "moe_load_balancing": _moe_load_balancing,
    "global_token_shuffle": _no_effect(
        _boolean, "no token is dropped, whichever rank it comes from"
    ),
    "moe_all_to_all_dispatcher": _no_effect(
        _boolean, "tokens go to their experts by all-to-all, same results"
    ),
    "moe_aux_loss_coeff": _moe_coefficient,
    "moe_z_loss_coeff": _moe_coefficient,
    "delayed_param": _knob("delayed_init", _boolean),
}
