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

    def set(self, origin: str, knob: str, value: Any, note: str = "") -> None:
        """Record `knob` = `value` for an option with its value; two options that
        disagree about a knob are an error."""
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


@dataclass(frozen=True)
class Option:
    """An option of a block, and the translation that it becomes a part of."""

    name: str
    value: Any
    to: Translation

    @property
    def words(self) -> str:
        return f"{self.name}={self.value!r}"

    @property
    def is_on(self) -> bool:
        return _boolean(self.name, self.value)

    def read_by(self, reader: read.Reader) -> Any:
        return reader(self.name, self.value)

    def set(self, knob: str, value: Any, note: str = "") -> None:
        """Record that it means this value of a knob."""
        self.to.set(self.words, knob, value, note)

    def without_effect(self, why: str) -> None:
        """Record that there is nothing to set for it."""
        self.to.lines.append(f"{self.words}: no effect here; {why}")


Handler = Callable[[Option], None]


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
            origin = f"sharding_strategy={strategy!r}"
            translation.set(origin, "reshard_after_forward", False)
    # Each option, and what their absence means.
    for option, value in translation.options.items():
        SMP_OPTIONS[option](Option(option, value, translation))
    # Nothing was said of sharding, which SMP takes as plain data parallelism.
    if "shard_degree" not in translation.settings:
        translation.lines.append(
            "neither sharded_data_parallel_degree nor hybrid_shard_degree: shard_degree stays 'auto', the smallest "
            "degree that fits the device; write shard_degree=1 for plain replicas"
        )
    _warn_of_silent_clipping(parameters, translation)
    return translation


def _knob(knob: str, reader: read.Reader) -> Handler:
    return lambda option: option.set(knob, option.read_by(reader))


def _no_effect(reader: read.Reader, why: str) -> Handler:
    def handle(option: Option) -> None:
        option.read_by(reader)
        option.without_effect(why)

    return handle


def _only(allowed: Any, reader: read.Reader, why: str, instead: str) -> Handler:
    """Accept the one value that is the case here anyway; refuse any other with what to
    use instead."""

    def handle(option: Option) -> None:
        if option.read_by(reader) != allowed:
            raise ValueError(f"{option.words} cannot be had here; {instead}")
        option.without_effect(why)

    return handle


def _half_precision(dtype: str) -> Handler:
    # Casts of the trainer and param_dtype have to agree.
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    trainer = {
        "bf16": 'Trainer(precision="bf16-mixed")',
        "fp16": 'Trainer(precision="16-mixed"), which scales the loss',
    }[short]
    flag = f"set the trainer's precision to match: Lightning {trainer}; HF TrainingArguments({short}=True)"

    def handle(option: Option) -> None:
        if not option.is_on:
            option.without_effect("param_dtype follows the trainer's precision")
            return
        masters = "master_dtype='float32', as SMP steps a float32 copy of the weights"
        option.set("param_dtype", dtype, f"{masters}; {flag}")
        # SMP's optimizer steps float32 copies; here that is a knob of its own.
        option.to.settings["master_dtype"] = "float32"
        option.to.origins["master_dtype"] = f"SMP {option.words}"

    return handle


def _hybrid_shard_degree(option: Option) -> None:
    degree = option.read_by(read.integer(0))
    # 0 means: as FSDP was told in the script.
    strategy = option.to.strategy
    if degree == 0 and strategy is None:
        raise ValueError(
            f"{option.name}=0 takes the sharding strategy from the FSDP call in the training script, which is not part "
            'of this block; pass it: SmpConfig.from_smp_parameters(..., sharding_strategy="FULL_SHARD") for '
            'shard_degree="world", "HYBRID_SHARD" for shard_degree="node", "NO_SHARD" for shard_degree=1'
        )
    note = "plain replicas, nothing is sharded" if degree == 1 else ""
    shards: int | str = degree
    if degree == 0 and strategy is not None:
        shards, note = _SHARDING_STRATEGIES[strategy][0], f"FSDP's {strategy}"
    option.set("shard_degree", shards, note)


def _offload_activations(option: Option) -> None:
    # Here only inputs of checkpointed modules can be offloaded, so these are switched
    # on with it.
    offload = option.is_on
    if offload:
        note = (
            "SMP offloads what the script checkpoints; here that is every wrapped block"
        )
        if (
            option.name == "offload_activations"
            and "activation_loading_horizon" not in option.to.options
        ):
            note += "; activations.loading_horizon is 2 here where it is left out, SMP v1 has 4"
        option.set("activations.checkpoint", "full", note)
    option.set("activations.offload", offload)


def _horizon(option: Option) -> None:
    blocks = option.read_by(read.integer(1))
    # v1 and v2 have a name each for the switch that the horizon belongs to.
    asked = [
        name
        for name in ("offload_activations", "sm_activation_offloading")
        if name in option.to.options
    ]
    if any(_boolean(name, option.to.options[name]) for name in asked):
        option.set("activations.loading_horizon", blocks)
    else:
        option.without_effect(
            "nothing is offloaded unless offload_activations or sm_activation_offloading"
        )


def _shard_optimizer_state(option: Option) -> None:
    if not option.is_on:
        option.without_effect(
            "optimizer states are sharded exactly like their parameters (shard_degree)"
        )
        return
    if (
        # SMP shards optimizer states alone then, which is a degree of 1 with states
        # over the world.
        "sharded_data_parallel_degree" not in option.to.options
        and "hybrid_shard_degree" not in option.to.options
    ):
        option.set("shard_degree", 1, "parameters stay whole on each rank")
    option.set("optimizer_shard", "world", "optimizer states sharded over all ranks")


def _gradient_clipping(option: Option) -> None:
    # A number other than 0 asks for clipping, which belongs to the trainer.
    clip = option.read_by(read.number(0.0, include_lowest=True))
    if clip:
        raise ValueError(
            f"{option.words} is not a matter of the sharding here; remove it and write "
            f"Trainer(gradient_clip_val={clip:g}), or TrainingArguments(max_grad_norm={clip:g}) with HF: the norm is "
            "taken over all shards"
        )
    option.without_effect("gradients are clipped only where the trainer is told to")


def _microbatches(option: Option) -> None:
    count = option.read_by(read.integer(1))
    # With stages it is the number of parts of a batch; without, gradient accumulation.
    if _stages_of(option.to) > 1:
        note = "parts of a batch that goes through pipeline stages"
        option.set("pipeline.microbatches", count, note)
        return
    if count > 1:
        raise ValueError(
            f"{option.name}={count} splits a batch inside @smp.step, which needs pipeline stages here; remove it, "
            f"write Trainer(accumulate_grad_batches={count}) (HF: gradient_accumulation_steps={count}) and divide the "
            f"data loader's batch size by {count}"
        )
    option.without_effect(
        "a batch is one micro-batch unless accumulate_grad_batches says otherwise"
    )


def _stages_of(to: Translation) -> int:
    asked = [
        to.options[name]
        for name in ("partitions", "pipeline_parallel_degree")
        if name in to.options
    ]
    return max((_DEGREE("partitions", value) for value in asked), default=1)


def _schedule(option: Option) -> None:
    schedule, note = _SCHEDULES[option.read_by(read.word(*_SCHEDULES))]
    # Without stages a schedule says nothing.
    if _stages_of(option.to) == 1:
        option.without_effect(_STAGES)
    else:
        option.set("pipeline.schedule", schedule, note)


def _deepspeed_json(option: Option) -> None:
    raise ValueError(
        f"{option.words} names a private JSON file of SMP v1; remove it and write what it sets as knobs of "
        "SmpConfig (shard_degree, collectives.hierarchical, ...)"
    )


def _placement(knob: str, value: Any) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if text not in ("cluster", "spread") and sorted(text) != ["D", "P", "T"]:
        raise read.refusal(knob, value, "'cluster', 'spread', a permutation of 'DPT'")
    return text


def _fp8(option: Option) -> None:
    note = "FP8 products in the linear layers, as Transformer Engine's fp8_autocast"
    # Fields of the recipe switch on what they belong to, so they are translated in its
    # place.
    if not option.is_on:
        option.without_effect("products are in FP8 only with the knob `fp8`")
    elif any(name in option.to.options for name in _FP8_FIELDS):
        option.set("fp8.scaling", "delayed", note)
    else:
        option.set("fp8", True, note)


def _fp8_field(option: Option) -> None:
    field_of_recipe, reader = _FP8_FIELDS[option.name]
    read_value = option.read_by(reader)
    if "fp8" in option.to.options and _boolean("fp8", option.to.options["fp8"]):
        option.set(f"fp8.{field_of_recipe}", read_value)
    else:
        option.without_effect(
            "it is a field of the FP8 recipe, which `fp8` switches on"
        )


def _loss_scale(option: Option) -> None:
    # Dynamic scaling is what trainers do.
    if option.value is None or (option.name == "dynamic_loss_scale" and option.is_on):
        option.without_effect(
            'the trainer scales losses by itself: Trainer(precision="16-mixed")'
        )
        return
    # Any other scaling is an object that the trainer is given.
    scaler = {
        "static_loss_scale": f"init_scale={option.value}, growth_interval=2**31 - 1",
        "dynamic_loss_scale": "enabled=False",
        "dynamic_loss_args": "init_scale=..., growth_interval=...",
    }[option.name]
    raise ValueError(
        f"{option.words} is an argument of SMP's DistributedOptimizer; remove it and write "
        f'plugins=[MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler({scaler}))] for Lightning\'s Trainer, or '
        "kwargs_handlers=[GradScalerKwargs(...)] for SmpAccelerator; bf16 needs no scaling"
    )


def _passes(option: Option) -> None:
    count = option.read_by(read.integer(1))
    if count > 1:
        raise ValueError(
            f"{option.name}={count} is an argument of SMP's DistributedModel; remove it and write "
            f"Trainer(accumulate_grad_batches={count}) (HF: gradient_accumulation_steps={count})"
        )
    option.without_effect(
        "each backward pass ends a window unless accumulate_grad_batches says otherwise"
    )


def _smp_moe(option: Option) -> None:
    # SMP would change the router; here a model keeps its own.
    if option.is_on and "moe_load_balancing" not in option.to.options:
        option.to.warnings.append(
            "SMP routes tokens by 'sinkhorn' unless moe_load_balancing says otherwise; here the model's own router does"
        )
    option.without_effect(
        "experts stay the model's own modules; expert_parallel_degree divides them"
    )


def _moe_load_balancing(option: Option) -> None:
    # Only the auxiliary loss leaves the choice of experts to the router.
    kind = option.read_by(_MOE_BALANCING)
    if kind == "none":
        option.without_effect(
            "a model has an auxiliary loss only with config.output_router_logits=True"
        )
        return
    if kind != "aux_loss":
        raise ValueError(
            f"{option.words} gives tokens to other experts than the model's own router chooses, which changes what "
            'the model computes; remove it and write router_balance="global" with model.config.output_router_logits='
            "True (an auxiliary loss), or router_bias_update_rate=0.001 for routers with a bias like DeepSeek-V3's"
        )
    note = "the loss is the model's own: model.config.output_router_logits=True"
    option.set("router_balance", "global", note)


def _moe_coefficient(option: Option) -> None:
    number = option.read_by(read.number(0.0, include_lowest=True))
    balancing = "moe_load_balancing"
    is_auxiliary = option.name == "moe_aux_loss_coeff"
    has_loss = (
        not is_auxiliary
        # Without the option SMP balances by "sinkhorn", which has no loss.
        or _MOE_BALANCING(balancing, option.to.options.get(balancing, "sinkhorn"))
        == "aux_loss"
    )
    if number and has_loss:
        loss = (
            f"model.config.router_aux_loss_coef={number:g}"
            if is_auxiliary
            else f"loss = loss + {number:g} * router_logits.logsumexp(-1).square().mean() for each router"
        )
        raise ValueError(
            f"{option.words} is a matter of the model's loss here; remove it and write {loss}"
        )
    option.without_effect("no such loss is added to the model's own")


def _sharding_strategy(option: Option) -> None:
    """Refuse what is an argument of the translation, beside the block."""
    raise ValueError(
        f"{option.words} is FSDP's and not part of this block; remove it and write "
        f"SmpConfig.from_smp_parameters(..., sharding_strategy={option.value!r})"
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
