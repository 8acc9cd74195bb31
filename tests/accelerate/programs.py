"""Random programs of transformers' Trainer, drawn from a seed.

A program is a plain dict, which prints and pickles; a fixed one is ``{**USUAL, ...}``.
"""

from __future__ import annotations

import random
from typing import Any

from tests.accelerate.program_parts import (
    CALLBACKS,
    DECODERS,
    FAMILIES,
    MORE_KNOBS,
    OVERRIDES,
    OWN,
    some,
)

Program = dict[str, Any]

USUAL: Program = {
    "seed": 1,
    "model": "gpt2",
    "world": 2,
    "batch": 4,
    "micro_batches": 1,
    "samples": 16,
    "lengths": "fixed",
    "data": "map",
    "eval_samples": [8],
    "eval_data": "map",
    "arguments": {"max_steps": 3, "logging_steps": 1},
    "accelerator_config": {},
    "overrides": [],
    "callbacks": [],
    "metrics": False,
    "largest": False,
    "extras": [],
    "script": ["train"],
    "knobs": {"shard_degree": 2},
    "resume": None,
    "by": "one process",
}

# How a batch is shared, by the knobs for it.
SHARED: dict[str, dict[str, Any]] = {
    "tensor": {
        "tensor_parallel_degree": 2,
        "tensor_parallel": {"sequence_parallel": False, "across_nodes": True},
    },
    "context": {"context_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2},
}
_SCHEDULES: list[dict[str, Any]] = [
    {"lr_scheduler_type": "linear"},
    {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
    {"lr_scheduler_type": "cosine", "warmup_steps": 0.3},
    {
        "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 2},
    },
    {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 1},
    {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
        "warmup_steps": 1,
    },
]
# What a constructor is given, or what is done to a model before.
_EXTRAS = [
    "given optimizer",
    "frozen",
    "unlabelled",
    "loss function",
    "inputs by object",
]
_OPTIMIZERS = [
    "adamw_torch",
    "adamw_torch",
    "adamw_torch_fused",
    "sgd",
    "adagrad",
    "rmsprop",
    "adafactor",
]


def samples_ranks(program: Program, world: int | None = None) -> int:
    """The ranks that read different samples."""
    knobs = program["knobs"]
    shared = 1
    for name in (
        "tensor_parallel_degree",
        "context_parallel_degree",
        "pipeline_parallel_degree",
    ):
        shared *= knobs.get(name, 1)
    return (world or program["world"]) // shared


def draw(seed: int) -> Program:
    """A program. What of it stock Trainer computes in another way on several ranks is
    measured by DDP."""
    rng = random.Random(seed)
    program: Program = {**USUAL, "seed": seed}
    shared = rng.choice([None, None, None, *SHARED])
    program["model"] = rng.choice(["gpt2", "gpt2", "llama", "bert", "t5", *OWN])
    if shared is not None:
        program["model"] = rng.choice(DECODERS)
    program["world"] = rng.choice([2, 2, 4])
    program["batch"], program["micro_batches"] = (
        rng.choice([4, 8]),
        rng.choice([1, 1, 2, 3]),
    )
    whole = program["batch"] * program["micro_batches"]
    program["samples"] = rng.choice(
        [whole * rng.randint(2, 3), rng.randint(program["batch"], whole * 3 + 3)]
    )
    if program["model"] not in OWN and rng.random() < 0.4:
        program["lengths"] = "ragged"
    program["data"] = rng.choice(
        ["map", "map", "map", "stream", "own loader", "group_by_length", "sequential"]
    )
    if program["data"] == "stream":
        # Of a shorter one Trainer never makes a step.
        program["samples"] = max(program["samples"], whole)
    if shared is not None and program["data"] == "group_by_length":
        program["data"] = "map"
    if program["model"] in DECODERS and rng.random() < 0.1:
        program |= {"data": "batch_rebalance", "lengths": "ragged"}
    program["knobs"] = _draw_knobs(rng, program, shared)
    program["arguments"] = _draw_arguments(rng, program)
    _draw_evaluation(rng, program)
    _draw_methods(rng, program)
    _draw_script(rng, program)
    _draw_more(rng, program)
    if program["arguments"]["optim"] in ("adafactor", "adagrad", "rmsprop") and program[
        "model"
    ] in ("gpt2", "bert"):
        # The bias of keys has no gradient but what rounding leaves, 1e-18, which these
        # divide by itself.
        program["arguments"]["optim"] = "sgd"
    if "tensor_parallel_degree" in program["knobs"]:
        # A split head that computes the loss leaves no logits.
        program["overrides"] = [
            each
            for each in program["overrides"]
            if each not in ("two losses", "own sum")
        ]
    if samples_ranks(program) == 1:
        _of_one_reader(program)
    if (
        "pipeline_parallel_degree" in program["knobs"]
        and "use_seedable_sampler" in program["accelerator_config"]
    ):
        # Each step takes a draw of the generator that torch's sampler draws from.
        program["accelerator_config"] = {}
    if samples_ranks(program) < program["world"] and program["data"] == "stream":
        if program["samples"] % program["batch"]:
            program["resume"] = None  # other layouts fill the last batch otherwise
    if program["script"][0] != "train" and (
        program["data"] == "group_by_length" or _measure(program) != "one process"
    ):
        # The order is drawn from what is left of a generator; and what stock Trainer
        # has evaluated before training it does not wrap in DDP any more, so that each
        # rank trains for itself.
        program["script"] = program["script"][1:]
    if (
        program["knobs"].get("optimizer_shard") == "world"
        and "plain norms" in program["callbacks"]
    ):
        # Parameters have no gradients there, as is said.
        program["callbacks"].remove("plain norms")
    by_rank_0 = program["accelerator_config"].get("dispatch_batches") or "stream" in (
        program["data"],
        program["eval_data"],
    )
    if samples_ranks(program) < program["world"]:
        # Of batches that rank 0 deals out it is known how many samples the last one
        # has; other ranks count it as full.
        if any(samples % program["batch"] for samples in program["eval_samples"]):
            program["eval_data"] = "map"
    if program["accelerator_config"].get("split_batches"):
        # Stock Trainer takes a rank's part for the whole batch; ours does not.
        program["eval_samples"] = [
            -(-samples // program["batch"]) * program["batch"]
            for samples in program["eval_samples"]
        ]
        if _measure(program) != "one process":
            program["eval_data"] = "map"
    readers = max(samples_ranks(program), _readers_of_resumption(program))
    if by_rank_0 and program["lengths"] == "ragged" and readers > 1:
        # Rank 0 cannot put batches of several lengths together.
        program["lengths"] = "fixed"
        if program["data"] == "batch_rebalance":
            program["data"] = "map"
    if program["lengths"] == "ragged" and "context_parallel_degree" in program["knobs"]:
        # Padding attends to other padding there, so that its logits, which are in no
        # metrics, differ.
        program["script"] = [call for call in program["script"] if call != "predict"]
    if program["model"] == "bert" and _measure(program) != "one process":
        # Under DDP stock Trainer multiplies the mean of BERT's classifiers by the
        # ranks; ours does not.
        program["arguments"]["average_tokens_across_devices"] = False
    program["by"] = _measure(program)
    if (
        program["lengths"] == "ragged"
        and program["by"] == "one process"
        and samples_ranks(program) > 1
    ):
        # Where a rank's rows are shorter, gathered logits are filled with -100; one
        # process has those of padding.
        program["script"] = [call for call in program["script"] if call != "predict"]
    measured_alone = program["by"] == "one process" and not program[
        "accelerator_config"
    ].get("dispatch_batches")
    if program["resume"] and not measured_alone and program["data"] != "stream":
        # In a later epoch than the first, DDP resumes with the order of the first, and
        # so do batches of rank 0.
        program["arguments"].pop("max_steps", None)
        program["arguments"]["num_train_epochs"] = 1
    return program


def _readers_of_resumption(program: Program) -> int:
    resume = program["resume"]
    return 1 if resume is None else samples_ranks(resume, resume["world"])


def _of_one_reader(program: Program) -> None:
    """Leave out what Trainer does in another way on several ranks than in one process,
    which is all there is of DDP."""
    # Gathered objects are lists of rows, and one process's are tensors.
    program["extras"] = [
        each for each in program["extras"] if each != "inputs by object"
    ]


def _draw_knobs(
    rng: random.Random, program: Program, shared: str | None
) -> dict[str, Any]:
    world = program["world"]
    knobs: dict[str, Any] = {} if shared is None else dict(SHARED[shared])
    degrees = [degree for degree in (1, 2, 4) if degree <= world]
    if "tensor_parallel_degree" in knobs or "pipeline_parallel_degree" in knobs:
        degrees = [degree for degree in degrees if degree <= world // 2]
    if "context_parallel_degree" in knobs:
        degrees = [degree for degree in degrees if degree >= 2]
    knobs["shard_degree"] = rng.choice(degrees)
    if rng.random() < 0.5:
        more = rng.choice(MORE_KNOBS)
        if not (
            "pipeline_parallel_degree" in knobs and "keep_between_micro_batches" in more
        ):
            knobs |= more
    return knobs


def _draw_arguments(rng: random.Random, program: Program) -> dict[str, Any]:
    arguments: dict[str, Any] = {"learning_rate": rng.choice([1e-3, 5e-3])}
    if program["data"] == "stream" or rng.random() < 0.4:
        arguments["max_steps"] = rng.randint(2, 6)
    else:
        arguments["num_train_epochs"] = rng.choice([1, 2, 1.5])
    arguments |= rng.choice(_SCHEDULES)
    arguments["optim"] = rng.choice(_OPTIMIZERS)
    arguments["max_grad_norm"] = rng.choice([0.0, 0.05, 1.0, float("inf")])
    arguments["weight_decay"] = rng.choice([0.0, 0.1])
    arguments["logging_steps"] = rng.choice([1, 1, 2, 0.3])
    if rng.random() < 0.2:
        arguments["logging_strategy"] = "epoch"
    rare: list[dict[str, Any]] = [
        {"dataloader_drop_last": True},
        {"average_tokens_across_devices": False},
        {"logging_first_step": True},
        {"include_num_input_tokens_seen": rng.choice(["all", "non_padding"])},
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": rng.random() < 0.5},
        },
        {"label_smoothing_factor": 0.1},
        {"data_seed": 7},
        {"logging_nan_inf_filter": False},
    ]
    for each in rare:
        if rng.random() < 0.15:
            arguments |= each
    if program["model"] in OWN or program["model"] == "t5":
        for name in (
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
            "label_smoothing_factor",
        ):
            arguments.pop(name, None)
    if rng.random() < 0.15 and program["data"] != "batch_rebalance":
        program["accelerator_config"] = rng.choice(
            [
                {"split_batches": True},
                {"use_seedable_sampler": False},
                {"dispatch_batches": True},
            ]
        )
    return arguments


def _draw_evaluation(rng: random.Random, program: Program) -> None:
    arguments = program["arguments"]
    program["eval_samples"] = rng.choice(
        [[8], [8], [16], [8, 16], [16, 8], [11], [13, 6]]
    )
    program["eval_data"] = rng.choice(["map", "map", "stream"])
    if rng.random() < 0.25:
        return
    how = rng.choice(["steps", "steps", "epoch"])
    arguments["eval_strategy"] = how
    if how == "steps":
        arguments["eval_steps"] = rng.choice([1, 2, 0.4])
    arguments |= dict.fromkeys(
        some(rng, ["eval_on_start", "prediction_loss_only"], 0.15), True
    )
    if rng.random() < 0.3:
        arguments["eval_accumulation_steps"] = 1
    program["metrics"] = rng.random() < 0.6
    if program["metrics"]:
        program["largest"] = rng.random() < 0.3
        arguments |= dict.fromkeys(some(rng, ["batch_eval_metrics"], 0.3), True)
        if rng.random() < 0.3 and program["model"] not in OWN:
            arguments["include_for_metrics"] = ["inputs", "loss"]
        if rng.random() < 0.15 and not arguments.get("batch_eval_metrics"):
            arguments["eval_do_concat_batches"] = False
    name = "eval_loss" if len(program["eval_samples"]) == 1 else "eval_b_loss"
    if rng.random() < 0.2:
        arguments |= {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "metric_for_best_model": name,
        }
        arguments["lr_scheduler_kwargs"] = {"patience": 0, "factor": 0.5}
        arguments.pop("warmup_steps", None)
    if rng.random() < 0.4:
        arguments |= {
            "load_best_model_at_end": True,
            "save_strategy": how,
            "metric_for_best_model": name,
        }
        arguments["greater_is_better"] = rng.random() < 0.3
        if how == "steps":
            arguments["save_steps"] = arguments["eval_steps"]
        if rng.random() < 0.5:
            arguments["save_total_limit"] = rng.choice([1, 2])
    elif rng.random() < 0.2:
        arguments |= {"save_strategy": "best", "metric_for_best_model": name}


def _draw_methods(rng: random.Random, program: Program) -> None:
    known = list(OVERRIDES)
    known.remove("own loader")
    shared = samples_ranks(program) < program["world"]
    if "pipeline_parallel_degree" in program["knobs"]:
        known = ["groups", "steps", "own schedule", "predictions"]
    program["overrides"] = some(rng, known, 0.12)
    program["extras"] = some(rng, _EXTRAS, 0.12)
    if program["model"] == "t5" or "pipeline_parallel_degree" in program["knobs"]:
        program["extras"] = [
            each
            for each in program["extras"]
            if each not in ("unlabelled", "loss function")
        ]
    if program["model"] not in (*DECODERS, "counting"):
        program["extras"] = [
            each for each in program["extras"] if each != "loss function"
        ]
    if "loss function" in program["extras"]:
        program["arguments"].pop("label_smoothing_factor", None)
    if "given optimizer" in program["extras"]:
        program["overrides"] = [
            each
            for each in program["overrides"]
            if each not in ("own schedule", "groups")
        ]
        program["arguments"] |= {"lr_scheduler_type": "linear", "optim": "adamw_torch"}
        program["arguments"].pop("lr_scheduler_kwargs", None)
    if program["data"] == "own loader":
        program["overrides"].append("own loader")
    if program["data"] == "batch_rebalance":
        program["arguments"].pop("dataloader_drop_last", None)
    if (
        program["arguments"].get("lr_scheduler_type") == "reduce_lr_on_plateau"
        or program["largest"]
    ):
        program["overrides"] = [
            each
            for each in program["overrides"]
            if each not in ("own schedule", "predictions")
        ]
    callbacks = [
        name
        for name in CALLBACKS
        if name != "generates" or program["model"] in DECODERS
    ]
    if shared:
        callbacks = [name for name in callbacks if name not in ("generates",)]
    if "pipeline_parallel_degree" in program["knobs"]:
        callbacks = ["flags", "stops epoch", "stops training", "rates"]
    program["callbacks"] = some(rng, callbacks, 0.12)
    if program["arguments"].get("load_best_model_at_end") and rng.random() < 0.3:
        program["callbacks"].append("early stopping")
    if program["model"] == "counting" and "two losses" in program["overrides"]:
        program["overrides"].remove("two losses")


def _draw_script(rng: random.Random, program: Program) -> None:
    program["script"] = rng.choice(
        [
            ["train"],
            ["train", "evaluate", "predict"],
            ["evaluate", "train", "predict"],
            ["predict", "train", "save"],
            ["train", "evaluate", "train"],
            ["train", "save"],
        ]
    )
    arguments = program["arguments"]
    if rng.random() < 0.35 and program["script"].count("train") == 1:
        if "save_strategy" not in arguments:
            # A checkpoint behind which an evaluation is due would begin with it, which
            # stock Trainer leaves out.
            by_epoch = arguments.get("eval_strategy") == "epoch"
            arguments |= {
                "save_strategy": "epoch" if by_epoch else "steps",
                "save_steps": rng.choice([1, 2]),
            }
        program["resume"] = {
            "which": rng.choice(["first", "middle", "last"]),
            "world": rng.choice([program["world"], 2, 4]),
            "knobs": {"shard_degree": rng.choice([1, 2])},
            "ignore_data_skip": rng.random() < 0.15,
            "stock": rng.random() < 0.2,
        }
        if rng.random() < 0.3:
            arguments["restore_callback_states_from_checkpoint"] = True
    if "save_strategy" not in arguments:
        arguments["save_strategy"] = "no"


def _draw_more(rng: random.Random, program: Program) -> None:
    arguments, extras = program["arguments"], program["extras"]
    if program["model"] in FAMILIES and program["data"] == "map" and rng.random() < 0.2:
        program["data"] = "arrow"
    if program["model"] == "t5" and rng.random() < 0.4:
        extras.append("seq2seq")
    if program["model"] in DECODERS and "frozen" not in extras and rng.random() < 0.25:
        extras.append("lora")
        program["callbacks"] = [
            name for name in program["callbacks"] if name != "halves"
        ]
    if rng.random() < 0.15:
        arguments |= {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
    if (
        rng.random() < 0.15
        and program["resume"] is None
        and not arguments.get("load_best_model_at_end")
    ):
        arguments["save_only_model"] = True
    if rng.random() < 0.15:
        program["script"] = [*program["script"], "evaluate two"]
    if rng.random() < 0.15 and not {"given optimizer", "lora"} & set(extras):
        extras.append("model init")
    if program["resume"] and rng.random() < 0.3:
        program["resume"]["which"] = "newest"
    if program["resume"] and arguments.get("save_total_limit") == 1:
        # Trainer removes all but the best, which is named where it was copied from.
        program["resume"]["stock"] = False


def _measure(program: Program) -> str:
    """Whose numbers are expected, and why."""
    arguments = program["arguments"]
    if arguments.get("average_tokens_across_devices") is False:
        return "DDP: each rank divides by its own targets, as was asked for"
    by_rank = (
        samples_ranks(program) > 1 and "context_parallel_degree" not in program["knobs"]
    )
    if (
        "plain loss" in program["overrides"]
        and program["model"] in DECODERS
        and by_rank
    ):
        return "DDP: the mean of each rank's own targets"
    evaluates = arguments.get("eval_strategy") or {
        "evaluate",
        "predict",
        "evaluate two",
    } & set(program["script"])
    if evaluates and any(
        samples % program["batch"] for samples in program["eval_samples"]
    ):
        return "DDP: of an incomplete last batch Trainer repeats samples before it takes the mean of a rank's loss"
    if program["data"] == "batch_rebalance" and program["samples"] % program["batch"]:
        return "DDP: the last samples are repeated until there is one for each rank and micro-batch"
    if program["data"] == "group_by_length":
        return "DDP: which batches are alike in length follows from the batch of a rank"
    if program["lengths"] == "ragged" and program["model"] == "t5":
        return "DDP: the mean of each rank's own targets"
    if program["lengths"] == "ragged":
        counts = arguments.get("include_num_input_tokens_seen") == "all"
        if (
            counts
            or "two losses" in program["overrides"]
            or arguments.get("label_smoothing_factor")
        ):
            return "DDP: each rank pads to its own longest row"
    if "inputs by object" in program["extras"]:
        return "DDP: gathered objects are lists of rows, and one process's are tensors"
    if program["accelerator_config"].get("use_seedable_sampler") is False:
        return "DDP: torch's sampler draws from another generator"
    by_rank_0 = (
        program["accelerator_config"].get("dispatch_batches")
        or program["data"] == "stream"
    )
    if by_rank_0 and samples_ranks(program) == program["world"]:
        if program["samples"] % program["batch"] and not arguments.get(
            "dataloader_drop_last"
        ):
            return "DDP: rank 0 fills a last batch until ranks divide it"
    return "one process"
