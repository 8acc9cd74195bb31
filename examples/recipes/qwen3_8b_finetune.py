"""Qwen3 8B with Transformers' Trainer on one p5: all weights, LoRA adapters, or QLoRA;
also by TRL's SFTTrainer.

    torchrun --nproc-per-node 8 examples/recipes/qwen3_8b_finetune.py                   # all weights
    torchrun --nproc-per-node 8 examples/recipes/qwen3_8b_finetune.py --lora            # adapters of rank 16
    torchrun --nproc-per-node 8 examples/recipes/qwen3_8b_finetune.py --qlora           # beside a base of 4-bit codes
    torchrun --nproc-per-node 8 examples/recipes/qwen3_8b_finetune.py --lora --trl      # by SFTTrainer
    torchrun --nproc-per-node 2 examples/recipes/qwen3_8b_finetune.py --tiny

The weights are random here; `AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")` in
`build` makes it yours.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recipe import SMALL, Recipe, Run, Size  # isort: skip
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from accelerate_smp import SmpTrainer, SmpTrainerMixin
from smp_core.outside import how_to_install, is_there
from smp_core.planner.known_models import KNOWN_MODELS

RECIPE = Recipe(
    "1xp5",
    full=Size(
        KNOWN_MODELS["qwen3-8b"],
        tokens=4096,
        micro_batch=1,
        global_batch=64,
        knobs={
            "shard_degree": "node",
            "activations": "full",
            "chunked_cross_entropy": 1024,
        },
    ),
    tiny=Size(
        {"model_type": "qwen3", **SMALL, "head_dim": 16},
        tokens=64,
        micro_batch=2,
        global_batch=8,
        knobs={
            "shard_degree": "node",
            "activations": "full",
            "chunked_cross_entropy": 32,
        },
        steps=8,
    ),
    lr=1e-5,
)


def build(run: Run, lora: bool) -> Any:
    """Return the model, with adapters of attention and feed-forward layers if they
    alone are trained."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(run.config)
    return with_adapters(model) if lora else model


def with_adapters(model: Any) -> Any:
    """Return the model with its weights frozen, and LoRA beside each linear layer of
    its blocks."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )


def trainer_of(run: Run, lora: bool, trl: bool) -> Any:
    """Return the Trainer: SmpTrainer, or TRL's on the same class."""
    arguments: dict[str, Any] = {
        "output_dir": str(run.flags.out or "runs/qwen3"),
        "max_steps": run.steps,
        "per_device_train_batch_size": run.loaded,
        "gradient_accumulation_steps": run.accumulate,
        "learning_rate": run.lr * (10 if lora and not run.flags.tiny else 1),
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, run.steps // 10),
        "max_grad_norm": 1.0,
        "bf16": not run.flags.tiny,
        "use_cpu": run.flags.tiny,
        "logging_steps": 1 if run.flags.tiny else 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": run.flags.tiny,
    }
    model, knobs = build(run, lora), run.knobs
    if run.flags.qlora:
        knobs["frozen_storage"] = "int4"
    if not trl:
        args = TrainingArguments(**arguments)
        return SmpTrainer(
            model=model, args=args, train_dataset=run.data(), smp_config=knobs
        )
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class SmpSFTTrainer(SmpTrainerMixin, SFTTrainer):
        """TRL's trainer on the same engine."""

    # The text is tokenised already; TRL would tokenise, cut and pack it itself.
    config = SFTConfig(
        **arguments, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None
    )
    rows = ({"input_ids": sample["input_ids"].tolist()} for sample in run.data())
    # TRL has its own.
    knobs = {
        name: value for name, value in knobs.items() if name != "chunked_cross_entropy"
    }
    return SmpSFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=run.corpus.tokenizer(),
        smp_config=knobs,
    )


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each optimizer step that was logged."""
    parser = RECIPE.flags(__doc__)
    parser.add_argument(
        "--lora", action="store_true", help="train adapters instead of all weights"
    )
    parser.add_argument(
        "--qlora", action="store_true", help="the same beside a base of 4-bit codes"
    )
    parser.add_argument("--trl", action="store_true", help="by TRL's SFTTrainer")
    flags = parser.parse_args(arguments)
    flags.lora = flags.lora or flags.qlora
    for package, wanted in (("peft", flags.lora), ("trl", flags.trl)):
        if wanted and not is_there(package):
            parser.error(f"{package} is not installed; {how_to_install(package)}")
    run = Run(RECIPE, flags)
    trainer = trainer_of(run, flags.lora, flags.trl)
    trainer.train()
    if flags.out is not None:
        # What from_pretrained loads; adapters alone with --lora.
        trainer.save_model(str(flags.out / "model"))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    run.say(
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {run.steps} steps of {run.size.global_batch} samples"
    )
    return losses


if __name__ == "__main__":
    main()
