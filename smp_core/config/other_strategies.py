"""Arguments of other strategies (DDP, FSDP, DeepSpeed, Lightning's
ModelParallelStrategy) and of Lightning's Trainer that are no knobs, and what to write
here instead."""

from __future__ import annotations

_BUCKETS = "leave it out: each unit is what DDP calls a bucket; units=[...] says which modules become units"
_ALWAYS = "leave it out: it is always so here"
_CODES = "write compression={'reduce': 'int8'}, or {'reduce': 'bf16'}"
_CHECKPOINTING = (
    "write activations='full', or activations={'checkpoint': {class name: mode}}"
)
_WHOLE_FILES = "write checkpoint='full' for one ordinary file, or leave it out for a sharded folder"
_BOTH_DTYPES = (
    "write the trainer's precision (Trainer(precision='bf16-mixed'), mixed_precision='bf16'), or param_dtype= and "
    "reduce_dtype="
)
_OF_THE_TRAINER = "write it for the trainer: Trainer({})"

_OF_DEEPSPEED = (
    *(
        "block_size",
        "contiguous_memory_optimization",
        "exclude_frozen_parameters",
        "hysteresis",
        "initial_scale_power",
    ),
    *(
        "load_full_weights",
        "logging_batch_size_per_gpu",
        "logging_level",
        "loss_scale",
        "loss_scale_window",
    ),
    *(
        "max_in_cpu",
        "min_loss_scale",
        "nvme_path",
        "optimizer_buffer_count",
        "overlap_events",
        "params_buffer_count",
    ),
    *(
        "params_buffer_size",
        "pin_memory",
        "queue_depth",
        "remote_device",
        "single_submit",
        "sub_group_size",
    ),
    *(
        "synchronize_checkpoint_boundary",
        "thread_count",
        "zero_allow_untested_optimizer",
    ),
)

ARGUMENTS: dict[str, tuple[str, str]] = {
    # Of DDP.
    "find_unused_parameters": (
        "DDP",
        "leave it out: parameters that no rank used need no flag",
    ),
    "static_graph": ("DDP", "leave it out: the graph may change from step to step"),
    "gradient_as_bucket_view": ("DDP", _BUCKETS),
    "bucket_cap_mb": ("DDP", _BUCKETS),
    "broadcast_buffers": (
        "DDP",
        "leave it out: evaluation and checkpoints use rank 0's buffers",
    ),
    "ddp_comm_hook": ("DDP", _CODES),
    "ddp_comm_state": ("DDP", _CODES),
    "ddp_comm_wrapper": ("DDP", _CODES),
    "model_averaging_period": (
        "DDP",
        "leave it out: replicas are equal after every optimizer step",
    ),
    "start_method": (
        "DDP",
        "leave it out: start processes from a script, with Trainer(devices=...) or torchrun",
    ),
    "process_group_backend": (
        "DDP",
        "write SmpShardedStrategy(process_group_backend=...), or kwargs_handlers=[InitProcessGroupKwargs(backend=...)]",
    ),
    # Of FSDP, its plugins and policies.
    "sharding_strategy": (
        "FSDP",
        "write shard_degree='world' for FULL_SHARD, 'node' for HYBRID_SHARD, 1 for NO_SHARD; with "
        "reshard_after_forward=False for SHARD_GRAD_OP",
    ),
    "auto_wrap_policy": (
        "FSDP",
        "write units=[class names] or units={'min_parameters': ...}",
    ),
    "transformer_layer_cls_to_wrap": ("FSDP", "write units=[class names]"),
    "min_num_params": ("FSDP", "write units={'min_parameters': ...}"),
    "cpu_offload": (
        "FSDP",
        "write state_offload='all', or 'optimizer' for the optimizer states alone",
    ),
    "offload_policy": (
        "FSDP",
        "write state_offload='all', or 'optimizer' for the optimizer states alone",
    ),
    "offload_params": ("FSDP", "write state_offload='all'"),
    "mixed_precision": ("FSDP", _BOTH_DTYPES),
    "mixed_precision_policy": ("FSDP", _BOTH_DTYPES),
    "mp_policy": ("FSDP", _BOTH_DTYPES),
    "activation_checkpointing": ("FSDP", _CHECKPOINTING),
    "activation_checkpointing_policy": ("FSDP", _CHECKPOINTING),
    "limit_all_gathers": (
        "FSDP",
        "leave it out; collectives={'forward_prefetch': ...} says how many gathers run ahead",
    ),
    "use_orig_params": ("FSDP", _ALWAYS),
    "sync_module_states": ("FSDP", _ALWAYS),
    "ignored_modules": (
        "FSDP",
        "leave it out: every parameter is sharded, and frozen ones need no flag",
    ),
    "ignored_states": (
        "FSDP",
        "leave it out: every parameter is sharded, and frozen ones need no flag",
    ),
    "state_dict_type": ("FSDP", _WHOLE_FILES),
    "device_mesh": ("FSDP", "write shard_degree=..., from which the mesh is made"),
    "cpu_ram_efficient_loading": (
        "FSDP",
        "write delayed_init=True and build the model on the meta device",
    ),
    "param_init_fn": ("FSDP", "write init_fn=... of SmpShardedStrategy"),
    "fsdp_version": ("FSDP", "leave it out: it is FSDP2"),
    # Of Lightning's ModelParallelStrategy.
    "data_parallel_size": ("ModelParallelStrategy", "write shard_degree=..."),
    "tensor_parallel_size": (
        "ModelParallelStrategy",
        "tensor_parallel_degree is the knob",
    ),
    "save_distributed_checkpoint": ("ModelParallelStrategy", _WHOLE_FILES),
    # Of DeepSpeed.
    "stage": (
        "DeepSpeed",
        "write shard_degree='world' for 3, shard_degree=1 and optimizer_shard='world' for 1",
    ),
    "zero_stage": (
        "DeepSpeed",
        "write shard_degree='world' for 3, shard_degree=1 and optimizer_shard='world' for 1",
    ),
    "zero_optimization": (
        "DeepSpeed",
        "write shard_degree='world' for 3, shard_degree=1 and optimizer_shard='world' for 1",
    ),
    "offload_optimizer": ("DeepSpeed", "write state_offload='optimizer'"),
    "offload_optimizer_device": ("DeepSpeed", "write state_offload='optimizer'"),
    "offload_parameters": ("DeepSpeed", "write state_offload='all'"),
    "offload_params_device": ("DeepSpeed", "write state_offload='all'"),
    "partition_activations": ("DeepSpeed", _CHECKPOINTING),
    "cpu_checkpointing": (
        "DeepSpeed",
        "write activations={'checkpoint': 'full', 'offload': True}",
    ),
    "zero_hpz_partition_size": (
        "DeepSpeed",
        "write reshard_after_forward='node', or a number of ranks",
    ),
    "zero_quantized_weights": ("DeepSpeed", "write compression={'gather': 'int8'}"),
    "zero_quantized_gradients": ("DeepSpeed", "write compression='int4'"),
    "mics_shard_size": ("DeepSpeed", "write shard_degree=..."),
    "mics_hierarchical_params_gather": (
        "DeepSpeed",
        "write collectives={'hierarchical': True}",
    ),
    "overlap_comm": ("DeepSpeed", _ALWAYS),
    "contiguous_gradients": ("DeepSpeed", _ALWAYS),
    "allgather_bucket_size": ("DeepSpeed", _BUCKETS),
    "reduce_bucket_size": ("DeepSpeed", _BUCKETS),
    "allgather_partitions": ("DeepSpeed", _ALWAYS),
    "reduce_scatter": ("DeepSpeed", _ALWAYS),
    "gradient_clipping": (
        "DeepSpeed",
        "write Trainer(gradient_clip_val=...), max_grad_norm=... or accelerator.clip_grad_norm_(...)",
    ),
    "gradient_accumulation_steps": (
        "DeepSpeed",
        "write it for the trainer: Trainer(accumulate_grad_batches=...), or gradient_accumulation_steps of the "
        "accelerator",
    ),
    # Of Lightning's Trainer itself.
    "precision": ("Trainer", _BOTH_DTYPES),
    "devices": ("Trainer", _OF_THE_TRAINER.format("devices=8")),
    "num_nodes": ("Trainer", _OF_THE_TRAINER.format("num_nodes=2")),
    "gradient_clip_val": ("Trainer", _OF_THE_TRAINER.format("gradient_clip_val=1.0")),
    "accumulate_grad_batches": (
        "Trainer",
        _OF_THE_TRAINER.format("accumulate_grad_batches=4"),
    ),
    **dict.fromkeys(
        _OF_DEEPSPEED, ("DeepSpeed", "leave it out: it has no counterpart here")
    ),
}
"""Argument -> (whose it is, what to write here)."""


def argument_of_another(name: str) -> ValueError | None:
    """Return the complaint about a name that is another strategy's; None if none is
    known."""
    if name not in ARGUMENTS:
        return None
    owner, instead = ARGUMENTS[name]
    return ValueError(
        f"{name!r} is an argument of {owner}, not a knob of torch-smp; {instead}"
    )
