"""SageMaker SMP's options: each is translated, said to have no effect, or refused; the
migration page says the same."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from smp_core.config import SmpConfig
from smp_core.config.smp_parameters import SMP_OPTIONS, translate_smp_parameters
from tests.harness import ROOT

PAGE = ROOT / "docs" / "migrating-from-smp.md"

# Options in the documentation of SMP v1 and v2, each with a value that people write.
DOCUMENTED: dict[str, Any] = {
    "partitions": 1,
    "pipeline_parallel_degree": 1,
    "microbatches": 4,
    "pipeline": "interleaved",
    "optimize": "speed",
    "placement_strategy": "DPT",
    "auto_partition": True,
    "default_partition": 0,
    "ddp": True,
    "memory_weight": 0.2,
    "active_microbatches": 3,
    "deterministic_server": False,
    "offload_activations": True,
    "activation_loading_horizon": 4,
    "tensor_parallel_degree": 1,
    "fp16": True,
    "fp16_params": True,
    "bf16": True,
    "shard_optimizer_state": True,
    "prescaled_batch": True,
    "skip_tracing": True,
    "delayed_parameter_initialization": True,
    "sharded_data_parallel_degree": 16,
    "sdp_reduce_bucket_size": 5e8,
    "sdp_param_persistence_threshold": 1_000_000,
    "sdp_max_live_parameters": 1_000_000_000,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
    "ddp_dist_backend": "auto",
    "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": 16777216,
    "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": 134217728,
    "_sharded_data_parallelism_config": "zero2d.json",
    "hybrid_shard_degree": 8,
    "sm_activation_offloading": True,
    "fsdp_cache_flush_warnings": True,
    "allow_empty_shards": False,
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "random_seed": 12345,
    # Of blocks that hold more than their options: arguments of SMP's calls and scripts,
    # and of the `mpi` dict.
    "_fp32_grad_accumulation": True,
    "horovod": False,
    "contiguous": True,
    "load_partition": False,
    "partition_file": "partition.data",
    "ddp_port": 29400,
    "processes_per_host": 8,
    "custom_mpi_options": "--mca btl_vader_single_copy_mechanism none",
    "trace_device": "gpu",
    "trace_execution_times": False,
    "trace_memory_usage": False,
    "overlapping_allreduce": True,
    "bucket_cap_mb": 25,
    "gradient_as_bucket_view": True,
    "find_unused_parameters": False,
    "broadcast_buffers": True,
    "backward_passes_per_step": 1,
    "average_grads_across_microbatches": True,
    "dynamic_loss_scale": True,
    "static_loss_scale": 128.0,
    "dynamic_loss_args": {"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    "process_count_per_node": 8,
    "mpi_additional_options": ["-x", "NCCL_DEBUG"],
    "fp8": 1,
    "fp8_amax_history_len": 16,
    "fp8_amax_compute_algo": "most_recent",
    "delayed_param": 1,
    "cp_comm_type": "p2p",
    "moe": 0,
    "smp_moe": True,
    "moe_load_balancing": "aux_loss",
    "global_token_shuffle": False,
    "moe_all_to_all_dispatcher": True,
    "moe_aux_loss_coeff": 0.001,
    "moe_z_loss_coeff": 0.001,
    "sharding_strategy": "hybrid_shard",
}

# These are only something to set beside others.
BESIDE: dict[str, dict[str, Any]] = {
    "activation_loading_horizon": {"sm_activation_offloading": True},
    "fp8_amax_history_len": {"fp8": 1},
    "fp8_amax_compute_algo": {"fp8": 1},
    "microbatches": {"partitions": 2},
    "pipeline": {"partitions": 2},
    "moe_aux_loss_coeff": {"moe_load_balancing": "aux_loss"},
}


def promised() -> dict[str, set[str]]:
    """Option -> what the tables of options on the migration page say becomes of it."""
    promises: dict[str, set[str]] = {}
    for section in re.findall(
        r"## Options of SMP v\d\n(.*?)(?=\n## |\n`)",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL,
    ):
        for row in re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE):
            for option in re.findall(r"`(\w+)`", row[0]):
                promises.setdefault(option, set()).add(row[1])
    return promises


def test_the_migration_page_and_the_translation_know_the_same_options() -> None:
    assert set(promised()) == set(SMP_OPTIONS) == set(DOCUMENTED)


@pytest.mark.parametrize("option", DOCUMENTED)
def test_each_option_ends_as_the_migration_page_says(option: str) -> None:
    block = {option: DOCUMENTED[option], **BESIDE.get(option, {})}
    (promise,) = promised()[option]
    if promise == "refused":
        with pytest.raises(ValueError, match=rf"^{option}=.*(write|remove)"):
            translate_smp_parameters(block)
        return
    translation = translate_smp_parameters(block)
    (line,) = [
        line
        for line in translation.lines
        if line.startswith(f"{option}={DOCUMENTED[option]!r}: ")
    ][-1:]
    if promise == "no effect":
        assert translation.knobs == {}
        assert re.search(r": no effect here; \w+", line)
    else:
        knob = re.fullmatch(r"knob `([\w.]+)`", promise)
        assert knob is not None, promise
        assert knob[1] in translation.settings
        assert f"{knob[1]}={translation.settings[knob[1]]!r}" in line
        assert translation.origins[knob[1]] == f"SMP {option}={DOCUMENTED[option]!r}"
    SmpConfig.from_smp_parameters(block)


@pytest.mark.parametrize("option", DOCUMENTED)
def test_no_option_takes_any_value_whatever(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        translate_smp_parameters({option: object(), **BESIDE.get(option, {})})


@pytest.mark.parametrize(
    ("block", "knobs"),
    [
        ({"sharded_data_parallel_degree": 16, "ddp": True}, {"shard_degree": 16}),
        ({"hybrid_shard_degree": "1"}, {"shard_degree": 1}),
        (
            {"hybrid_shard_degree": 8, "context_parallel_degree": 8},
            {"shard_degree": 8, "context_parallel_degree": 8},
        ),
        (
            {"bf16": True, "fp16": False},
            {"param_dtype": "bfloat16", "master_dtype": "float32"},
        ),
        ({"fp16": True}, {"param_dtype": "float16", "master_dtype": "float32"}),
        (
            {"sdp_hierarchical_allgather": False},
            {"collectives": {"hierarchical": False}},
        ),
        ({"delayed_parameter_initialization": True}, {"delayed_init": True}),
        (
            {
                "partitions": 2,
                "pipeline": "simple",
                "microbatches": 4,
                "active_microbatches": 2,
            },
            {
                "pipeline_parallel_degree": 2,
                "pipeline": {"microbatches": 4, "schedule": "gpipe"},
            },
        ),
        (
            {"partitions": 2, "pipeline": "interleaved"},
            {"pipeline_parallel_degree": 2, "pipeline": {"schedule": "1f1b"}},
        ),
        (
            {"sm_activation_offloading": False, "activation_loading_horizon": 4},
            {"activations": {"offload": False}},
        ),
        (
            {"offload_activations": True, "activation_loading_horizon": 4},
            {
                "activations": {
                    "offload": True,
                    "checkpoint": "full",
                    "loading_horizon": 4,
                }
            },
        ),
        (
            {"shard_optimizer_state": True},
            {"optimizer_shard": "world", "shard_degree": 1},
        ),
        ({"shard_optimizer_state": False}, {}),
        ({"sdp_gradient_clipping": 0}, {}),
        (
            {"hybrid_shard_degree": 8, "delayed_parameter_initialization": 1},
            {"shard_degree": 8, "delayed_init": True},
        ),
        ({"fp8": 1}, {"fp8": True}),
        ({"fp8": 0, "fp8_amax_history_len": 16}, {}),
        ({"fp8": True, "fp8_amax_history_len": 16}, {"fp8": {"amax_history_len": 16}}),
        (
            {
                "expert_parallel_degree": 4,
                "smp_moe": True,
                "moe_load_balancing": "aux_loss",
                "moe_aux_loss_coeff": 0,
            },
            {"expert_parallel_degree": 4, "router_balance": "global"},
        ),
        (
            {
                "moe_load_balancing": "none",
                "moe_aux_loss_coeff": 0.001,
                "moe_z_loss_coeff": 0.0,
            },
            {},
        ),
        (
            {
                "static_loss_scale": None,
                "dynamic_loss_scale": True,
                "trace_device": None,
            },
            {},
        ),
    ],
)
def test_blocks_as_people_have_them(
    block: dict[str, Any], knobs: dict[str, Any]
) -> None:
    assert SmpConfig.from_smp_parameters(block) == SmpConfig(**knobs)


@pytest.mark.parametrize(
    ("strategy", "knobs"),
    [
        ("FULL_SHARD", {"shard_degree": "world"}),
        ("shard_grad_op", {"shard_degree": "world", "reshard_after_forward": False}),
        ("HYBRID_SHARD", {"shard_degree": "node"}),
        (
            "_HYBRID_SHARD_ZERO2",
            {"shard_degree": "node", "reshard_after_forward": False},
        ),
        ("NO_SHARD", {"shard_degree": 1}),
    ],
)
def test_shard_degree_zero_follows_the_script_s_strategy(
    strategy: str, knobs: dict[str, Any]
) -> None:
    expected = SmpConfig(**knobs)
    assert (
        SmpConfig.from_smp_parameters(
            {"hybrid_shard_degree": 0}, sharding_strategy=strategy
        )
        == expected
    )
    assert SmpConfig.from_smp_parameters({}, sharding_strategy=strategy) == expected


def test_a_shard_degree_overrides_the_script_s_strategy_but_not_its_resharding() -> (
    None
):
    config = SmpConfig.from_smp_parameters(
        {"hybrid_shard_degree": 4}, sharding_strategy="_HYBRID_SHARD_ZERO2"
    )
    assert config == SmpConfig(shard_degree=4, reshard_after_forward=False)


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (
            {"hybrid_shard_degree": 0},
            'sharding_strategy="FULL_SHARD".*shard_degree="world".*"HYBRID_SHARD".*"node"',
        ),
        (
            {"hybrid_shard_degre": 8},
            "unknown SageMaker SMP option 'hybrid_shard_degre'; did you mean 'hybrid_shard_deg",
        ),
        ({"sdp_gradient_clipping": 0.5}, r"Trainer\(gradient_clip_val=0.5\)"),
        ({"microbatches": 4}, r"Trainer\(accumulate_grad_batches=4\)"),
        ({"backward_passes_per_step": 4}, r"Trainer\(accumulate_grad_batches=4\)"),
        ({"static_loss_scale": 128}, r"GradScaler\(init_scale=128, growth_interval"),
        ({"dynamic_loss_scale": False}, r"GradScaler\(enabled=False\)"),
        ({"average_grads_across_microbatches": 0}, "multiply the loss"),
        ({"horovod": True}, "Horovod is not used: remove it"),
        ({"ddp": 2}, "ddp=2 is not allowed; allowed: true, false"),
        ({"ddp": False}, "ddp=False .*write True"),
        ({"moe": True}, "no layer is exchanged for one of SMP's"),
        (
            {"moe_load_balancing": "sinkhorn"},
            'own router chooses.*write router_balance="global".*router_bias_up',
        ),
        (
            {"moe_load_balancing": "balanced"},
            'own router chooses.*write router_balance="global".*router_bias_up',
        ),
        (
            {"moe_load_balancing": "even"},
            "allowed: 'aux_loss', 'none', 'sinkhorn', 'balanced'",
        ),
        (
            {"moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.01},
            "write model.config.router_aux_loss_coef=0.01",
        ),
        (
            {"moe_z_loss_coeff": 0.001},
            r"write loss = loss \+ 0.001 \* router_logits.logsumexp",
        ),
        (
            {"bf16": True, "fp16": True},
            "fp16=True and SMP bf16=True contradict each other about param_dtype",
        ),
        (
            {"sharded_data_parallel_degree": 4, "hybrid_shard_degree": 8},
            "contradict each other about shard_degree",
        ),
        (
            {"hybrid_shard_degree": 4, "context_parallel_degree": 8},
            "larger than shard_degree=4",
        ),
        ({"placement_strategy": "DDT"}, "permutation of 'DPT'"),
        (
            {"parameters": {}},
            r"pass the block inside: distribution\[\"smdistributed\"\]",
        ),
        ({"smdistributed": {}}, "this is the whole `distribution` argument"),
    ],
)
def test_refusals_say_what_to_use_instead(block: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SmpConfig.from_smp_parameters(block)


def test_an_unknown_strategy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match="sharding_strategy='ZERO' is not allowed; allowed: FULL_SHARD, SHARD_GRAD_OP",
    ):
        SmpConfig.from_smp_parameters({}, sharding_strategy="ZERO")


def test_expert_ranks_are_the_same_ones_here() -> None:
    config = SmpConfig.from_smp_parameters(
        {"expert_parallel_degree": 2, "hybrid_shard_degree": 8}
    )
    assert (config.expert_parallel_degree, config.shard_degree) == (2, 8)


def test_one_line_of_the_log_for_each_option(caplog: pytest.LogCaptureFixture) -> None:
    block = {
        "ddp": True,
        "sharded_data_parallel_degree": 4,
        "bf16": True,
        "skip_tracing": True,
        "partitions": 1,
    }
    with caplog.at_level(logging.INFO, logger="smp"):
        config = SmpConfig.from_smp_parameters(block)
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.INFO
    ]
    assert [line.partition("=")[0] for line in lines] == list(block)
    assert (
        'Trainer(precision="bf16-mixed")' in caplog.text
        and "bf16-true" not in caplog.text
    )
    assert config.why("shard_degree") == "SMP sharded_data_parallel_degree=4"


@pytest.mark.parametrize(
    ("block", "warned"),
    [
        ({"sharded_data_parallel_degree": 4}, True),
        ({"sharded_data_parallel_degree": 4, "sdp_gradient_clipping": 0}, False),
        ({"sharded_data_parallel_degree": 1}, False),
        ({"hybrid_shard_degree": 4}, False),
    ],
)
def test_clipping_that_smp_did_by_default_is_not_lost_in_silence(
    block: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="smp"):
        SmpConfig.from_smp_parameters(block)
    assert ("gradient_clip_val=1.0" in caplog.text) is warned


@pytest.mark.parametrize(
    ("block", "warned"), [({}, True), ({"moe_load_balancing": "none"}, False)]
)
def test_routing_that_smp_did_by_default_is_not_lost_in_silence(
    block: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="smp"):
        SmpConfig.from_smp_parameters({"smp_moe": True, **block})
    assert ("unless moe_load_balancing says otherwise" in caplog.text) is warned
