"""`generate` of a sharded model gives each rank what one process would, however long
the others' sequences are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from accelerate_smp import SmpTrainerMixin
from tests.accelerate.running import fresh_accelerator
from tests.harness import run_ranks

SIZES: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 2}


def causal() -> Any:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**SIZES, **sizes))


def adapted() -> Any:
    """PEFT's generate calls the adapted model, past the root."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        causal(), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )


def encoder_decoder() -> Any:
    """Transformers' generate calls the encoder, past the root."""
    sizes = {
        "d_model": 32,
        "d_ff": 48,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**SIZES, **sizes))


MODELS = {"causal": causal, "lora": adapted, "encoder and decoder": encoder_decoder}


def generated(kind: str) -> tuple[list[list[int]], list[list[int]], bool]:
    """What this rank generates, sharded and whole, and whether a step follows as
    ever."""
    torch.manual_seed(0)
    whole = MODELS[kind]().eval()
    accelerator = fresh_accelerator(shard_degree=2)
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=1.0
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    prompt = torch.tensor([[5, 9, 11 + accelerator.process_index]])
    own = {
        "do_sample": False,
        "max_new_tokens": 3 + 4 * accelerator.process_index,
        "eos_token_id": None,
    }
    model.eval()
    with torch.no_grad():
        ours = (
            accelerator.unwrap_model(model).generate(input_ids=prompt, **own).tolist()
        )
        theirs = whole.generate(input_ids=prompt, **own).tolist()
    model.train()
    accelerator.backward(model(input_ids=prompt, labels=prompt).loss)
    moved = accelerator.clip_grad_norm_(model.parameters(), 1.0).item() > 0
    optimizer.step()
    return ours, theirs, moved


@pytest.mark.parametrize("kind", MODELS)
def test_each_rank_generates_what_one_process_would(kind: str) -> None:
    if kind == "lora":
        pytest.importorskip("peft")
    results = run_ranks(generated, 2, kind)
    assert all(ours == theirs and moved for ours, theirs, moved in results)
    assert len({len(ours[0]) for ours, _, _ in results}) == 2, (
        "the ranks' sequences are of different lengths"
    )


class Ours(SmpTrainerMixin, Seq2SeqTrainer):
    pass


def predicted(folder: Path, knobs: dict[str, Any] | None) -> list[list[int]]:
    """What Seq2SeqTrainer generates for five samples, of which no two ranks have as
    many."""
    torch.manual_seed(0)
    model = encoder_decoder()
    rows = [
        {"input_ids": torch.arange(3, 9) + number, "labels": torch.arange(5, 10)}
        for number in range(5)
    ]
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=2,
        predict_with_generate=True,
        generation_max_length=6,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer: Any = (
        Seq2SeqTrainer(model, arguments)
        if knobs is None
        else Ours(model, arguments, smp_config=knobs)
    )
    return trainer.predict(rows).predictions.tolist()


def test_seq2seq_trainer_predicts_each_sample_once(tmp_path: Path) -> None:
    """Its own gather kept those that loaders had repeated."""
    expected = predicted(tmp_path, None)
    assert run_ranks(predicted, 2, tmp_path, {"shard_degree": 2}) == [expected] * 2
