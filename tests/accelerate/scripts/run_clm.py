"""A Trainer script as Transformers' examples write them (run_clm.py), with a synthetic
data set; knows no torch-smp."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    model_type: str = field(default="gpt2")
    hidden: int = field(default=24)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(61, (samples, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    model_args, training_args = HfArgumentParser(
        (ModelArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = AutoConfig.for_model(
        model_args.model_type,
        vocab_size=61,
        n_positions=16,
        n_embd=model_args.hidden,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Tokens(32, 1),
        eval_dataset=Tokens(16, 2),
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        there = os.path.isdir(training_args.output_dir)
        checkpoint = get_last_checkpoint(training_args.output_dir) if there else None
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        print(f"TRAINER {type(trainer).__name__} {training_args.world_size}")


if __name__ == "__main__":
    main()
