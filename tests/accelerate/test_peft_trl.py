"""LoRA adapters and TRL's SFTTrainer, where peft and trl are installed: what one
process trains, and an adapter saved whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from accelerate_smp.trainer import SmpTrainer, SmpTrainerMixin
from tests.accelerate.lora import adapted, split_adapter
from tests.accelerate.running import fresh_accelerator
from tests.accelerate.trainers import (
    Recorder,
    Run,
    make_dataset,
    make_model,
    whole_weights,
)
from tests.harness import RanksFailed, run_ranks

pytest.importorskip("peft")


def common(folder: str, ranks: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 8 // ranks,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "num_train_epochs": 1,
        "use_cpu": True,
    }


def lora(folder: str, knobs: dict[str, Any] | None) -> Run:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    recorder = Recorder()
    model = adapted(dist.get_rank() if ranks > 1 else 0)
    options = {
        "model": model,
        "args": TrainingArguments(**common(folder, ranks)),
        "train_dataset": make_dataset(),
        "callbacks": [recorder],
    }
    trainer = (
        Trainer(**options) if knobs is None else SmpTrainer(**options, smp_config=knobs)
    )
    trainer.train()
    trainer.save_model(folder)
    recorder.run.weights = {
        name: value for name, value in whole_weights(model).items() if "lora" in name
    }
    return recorder.run


@pytest.mark.slow
def test_lora_trains_like_one_process_and_its_adapter_is_saved_whole(
    tmp_path: Path,
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    expected = lora(str(tmp_path / "alone"), None)
    results = run_ranks(
        lora, 2, str(tmp_path / "ranks"), {"shard_degree": 2}, ranks_per_node=2
    )
    for seen in results:
        assert len(seen.losses) == len(expected.losses) == 6
        for step, (ours, theirs) in enumerate(
            zip(seen.losses, expected.losses, strict=True)
        ):
            assert abs(ours - theirs) <= 1e-6 + 2e-7 * step
        for step, (ours, theirs) in enumerate(
            zip(seen.norms, expected.norms, strict=True)
        ):
            assert abs(ours - theirs) <= 1e-6 + 2e-7 * step
    saved = load_file(tmp_path / "ranks" / "adapter_model.safetensors")
    trained = {
        name.replace(".default", ""): value
        for name, value in results[0].weights.items()
    }
    assert saved.keys() == trained.keys() and saved
    assert all(torch.equal(saved[name], value) for name, value in trained.items())
    PeftModel.from_pretrained(make_model(0), tmp_path / "ranks")


def supervised(folder: str, knobs: dict[str, Any] | None) -> Run:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    knobs_or_none = knobs or {}
    readers = ranks // knobs_or_none.get("tensor_parallel_degree", 1)
    readers //= knobs_or_none.get("context_parallel_degree", 1)
    recorder = Recorder()
    rows = [
        {"input_ids": row["input_ids"].tolist()[number % 4 :]}
        for number, row in enumerate(make_dataset())
    ]
    arguments = SFTConfig(
        **common(folder, readers),
        per_device_eval_batch_size=8 // readers,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        bf16=False,
    )
    options: dict[str, Any] = {
        "model": make_model(dist.get_rank() if ranks > 1 else 0),
        "args": arguments,
        "train_dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list(rows[:16]),
        "processing_class": tokenizer(),
        "callbacks": [recorder],
    }
    if knobs is None:
        trainer = SFTTrainer(**options)
    else:

        class SmpSFTTrainer(SmpTrainerMixin, SFTTrainer):
            pass

        trainer = SmpSFTTrainer(**options, smp_config=knobs)
    trainer.train()
    trainer.evaluate()
    for name in ("num_tokens", "entropy", "mean_token_accuracy", "eval_loss"):
        recorder.run.extra[name] = [
            entry[name] for entry in trainer.state.log_history if name in entry
        ]
    return recorder.run


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(61)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "0")),
        pad_token="0",
        eos_token="0",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"shard_degree": 4},
        {
            "shard_degree": 2,
            "tensor_parallel_degree": 2,
            "tensor_parallel": {"sequence_parallel": False},
        },
        {"shard_degree": 4, "context_parallel_degree": 2},
    ],
    ids=["shards", "tensor", "context"],
)
def test_trls_sft_trainer_through_the_mixin(
    tmp_path: Path, knobs: dict[str, Any]
) -> None:
    """TRL halved its count of tokens by tensor ranks, and saw one context rank's. Its
    loss of an evaluation is a mean over ranks' means, but of context ranks over all
    targets."""
    pytest.importorskip("trl")
    expected = supervised(str(tmp_path / "alone"), None)
    counted = ["num_tokens", "entropy", "mean_token_accuracy"]
    if "context_parallel_degree" in knobs:
        counted.append("eval_loss")
    for seen in run_ranks(
        supervised, 4, str(tmp_path / "ranks"), knobs, ranks_per_node=2
    ):
        for name in counted:
            assert seen.extra[name] == pytest.approx(expected.extra[name], abs=1e-5)
        assert len(seen.losses) == len(expected.losses) == 6
        for step, (ours, theirs) in enumerate(
            zip(seen.losses, expected.losses, strict=True)
        ):
            assert abs(ours - theirs) <= 1e-6 + 2e-7 * step


@pytest.mark.slow
def test_an_adapter_over_split_sequences_has_the_loss_and_gradients_of_one_process() -> (
    None
):
    """float32: 1e-6. With the loss in chunks."""
    model = adapted()
    rows = {
        key: torch.stack([row[key] for row in make_dataset(8)])
        for key in ("input_ids", "labels")
    }
    expected = model(**rows).loss
    expected.backward()
    knobs = {
        "shard_degree": 2,
        "context_parallel_degree": 2,
        "chunked_cross_entropy": 3,
    }
    for loss, gradients in run_ranks(split_adapter, 4, knobs, ranks_per_node=2):
        assert abs(loss - expected.item()) <= 1e-6
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert (gradients[name] - parameter.grad).abs().max() <= 1e-6, name


def expert_adapter(base: str, knobs: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Two micro-batches a step in float64, with adapters on fused experts, which PEFT
    parametrizes in each forward."""
    from peft import LoraConfig, get_peft_model
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = MixtralConfig(
        vocab_size=61,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",
        **sizes,
    )
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts)
    model = get_peft_model(MixtralForCausalLM(config), adapters).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            # Begins at 0, where it hides lora_A.
            torch.nn.init.normal_(parameter, std=0.1)
        if base == "trained" and "experts" in name:
            parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1
    )
    ranks = dist.get_world_size() if knobs is not None else 1
    rank = dist.get_rank() if ranks > 1 else 0
    if knobs is not None:
        accelerator = fresh_accelerator(gradient_accumulation_steps=2, **knobs)
        model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.stack([row["input_ids"] for row in make_dataset(16)]).view(
        2, 2, ranks, 4 // ranks, -1
    )
    for step in rows:
        for micro_batch in step[:, rank]:
            if knobs is None:
                (model(input_ids=micro_batch, labels=micro_batch).loss / 2).backward()
                continue
            with accelerator.accumulate(model):
                accelerator.backward(
                    model(input_ids=micro_batch, labels=micro_batch).loss
                )
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model)


EXPERTS = [
    ("frozen", {"shard_degree": 2}),
    ("trained", {"shard_degree": 1, "optimizer_shard": "world"}),
]


@pytest.mark.parametrize(("base", "knobs"), EXPERTS, ids=["frozen", "trained"])
def test_adapters_on_fused_experts_train_as_in_one_process(
    base: str, knobs: dict[str, Any]
) -> None:
    expected = expert_adapter(base, None)
    for seen in run_ranks(expert_adapter, 2, base, knobs, ranks_per_node=2):
        for name, value in seen.items():
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-12), name


def test_a_unit_that_is_parametrized_before_its_gather_is_named() -> None:
    knobs = {"shard_degree": 2, "units": {"modules": ["MixtralExperts"]}}
    with pytest.raises(RanksFailed, match="make the unit a module around both"):
        run_ranks(expert_adapter, 2, "frozen", knobs, ranks_per_node=2)


def quantized_base() -> str:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    quantize_(model[0], Int8WeightOnlyConfig())
    model[0].requires_grad_(False)
    try:
        fresh_accelerator().prepare(model)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_quantized_base_is_refused_by_name() -> None:
    pytest.importorskip("torchao")
    for said in run_ranks(quantized_base, 2):
        assert (
            said.startswith("0.weight is a Int8Tensor of torchao")
            and "frozen_storage=" in said
        )


def attached(order: str) -> dict[str, torch.Tensor]:
    """Adapters that differ on each rank at first, after three steps of a bare loop."""
    from peft import LoraConfig, get_peft_model

    rank, accelerator, model = (
        dist.get_rank(),
        fresh_accelerator(smp_config={"shard_degree": 2}),
        make_model(0),
    )
    options = LoraConfig(
        r=3,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        init_lora_weights="gaussian",
    )
    torch.manual_seed(rank)
    if order == "before":
        model = accelerator.prepare(get_peft_model(model, options))
    elif order == "after":
        model = get_peft_model(accelerator.prepare(model), options)
    else:
        model = accelerator.prepare(model)
        model.add_adapter(options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = accelerator.prepare(torch.optim.AdamW(trained, lr=1e-2))
    for step in range(3):
        rows = make_dataset()[8 * step + 4 * rank :][:4]
        inputs, labels = (
            torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")
        )
        accelerator.backward(model(input_ids=inputs, labels=labels).loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = whole_weights(model)
    return {
        name.removeprefix("base_model.model."): value
        for name, value in weights.items()
        if "lora" in name
    }


@pytest.mark.slow
def test_adapters_train_alike_whenever_peft_attaches_them() -> None:
    """To float32's last digits: gradients of sharded ones are added up in another
    order."""
    expected = run_ranks(attached, 2, "before")[0]
    for order in ("after", "add_adapter"):
        for seen in run_ranks(attached, 2, order):
            assert seen.keys() == expected.keys() and seen
            for name, value in expected.items():
                assert (seen[name] - value).abs().max() <= 1e-5, name


def after_prepare(folder: str) -> list[str]:
    """What is said to adapters with parts of the base that are changed, or copied, in a
    sharded model."""
    from peft import LoraConfig, get_peft_model

    from smp_core.sharding import explain

    said = []
    for case in (
        {"trainable_token_indices": {"wte": [3]}},
        {"modules_to_save": ["ln_f"]},
    ):
        options = LoraConfig(
            r=2, target_modules=["c_attn"], fan_in_fan_out=True, **case
        )
        model = get_peft_model(make_model(), options)
        own = Path(folder) / str(dist.get_rank())
        model.save_pretrained(own)
        model = fresh_accelerator(smp_config={"shard_degree": 2}).prepare(model)
        try:
            if "modules_to_save" in case:
                model.load_adapter(own, "second")
                model.set_adapter("second")
                model(input_ids=torch.ones(1, 4, dtype=torch.long))
            else:
                model.merge_adapter()
        except (RuntimeError, ValueError) as error:
            explain(error)
            said.append("".join((str(error), *getattr(error, "__notes__", []))))
    return said


@pytest.mark.slow
def test_adapters_that_copy_or_replace_shards_are_told_what_to_write(
    tmp_path: Path,
) -> None:
    for merged, copied in run_ranks(after_prepare, 2, str(tmp_path), ranks_per_node=2):
        assert ".data was assigned to" in merged and "parameter.copy_(value)" in merged
        assert "PEFT's modules_to_save" in copied and "before prepare" in copied


def words() -> Any:
    """`tokenizer`, of texts of numbers."""
    from tokenizers import pre_tokenizers

    found = tokenizer()
    found.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found.model_input_names = ["input_ids", "attention_mask"]
    return found


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(int, completion.split())) % 7 / 7 for completion in completions]


def generating(
    kind: str, folder: str, knobs: dict[str, Any], prompts: int
) -> list[dict[str, float]]:
    """What a trainer that samples logs, of as many prompts in each batch."""
    import trl
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    tensor = knobs.get("tensor_parallel_degree", 1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=61, num_attention_heads=4, eos_token_id=0, **sizes)
    )
    arguments = getattr(trl, f"{kind}Config")(
        **common(folder, 1)
        | {
            "per_device_train_batch_size": 4 * prompts * tensor // dist.get_world_size()
        },
        max_steps=5,
        bf16=False,
        gradient_checkpointing=False,
        num_generations=4,
        max_completion_length=5,
        num_iterations=2,
        steps_per_generation=2,
        beta=0.0,
    )
    base = getattr(trl, f"{kind}Trainer")
    rows = [{"prompt": f"{number} {number + 9}"} for number in range(32)]
    trainer = type("Generating", (SmpTrainerMixin, base), {})(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=words(),
        reward_funcs=reward,
        smp_config=knobs,
    )
    trainer.train()
    names = ("loss", "grad_norm", "reward_std", "num_tokens", "entropy")
    return [
        {name: entry[name] for name in names if name in entry}
        for entry in trainer.state.log_history
        if "grad_norm" in entry
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_ranks_of_one_batch_generate_and_are_rewarded_once(
    tmp_path: Path, kind: str
) -> None:
    """Other ranks' completions had their advantages, prompts were skipped, and tensor
    ranks sampled other tokens: what shards of as many batches log."""
    pytest.importorskip("trl")
    split = {
        "shard_degree": 2,
        "tensor_parallel_degree": 2,
        "tensor_parallel": {"sequence_parallel": False},
    }
    options: dict[str, Any] = {"ranks_per_node": 2}
    whole = {"shard_degree": 2}
    expected = run_ranks(generating, 2, kind, str(tmp_path), whole, 2, **options)[0]
    assert len(expected) == 5 and "reward_std" in expected[0]
    for seen in run_ranks(generating, 4, kind, str(tmp_path), split, 2, **options):
        for ours, theirs in zip(seen, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.slow
def test_groups_of_completions_that_ranks_of_one_batch_break_are_refused(
    tmp_path: Path,
) -> None:
    """TRL counts four ranks, of which two read prompts."""
    pytest.importorskip("trl")
    split = {"tensor_parallel_degree": 2}
    with pytest.raises(RanksFailed, match="generate 6 completions at once"):
        run_ranks(begin_to_generate, 4, str(tmp_path), split)
    evaluated = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "eval_strategy": "steps",
        "num_generations_eval": 4,
    }
    with pytest.raises(RanksFailed, match="per_device_eval_batch_size that makes it"):
        run_ranks(begin_to_generate, 4, str(tmp_path), split, **evaluated)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["context", "pipeline"])
def test_ranks_that_share_sequences_or_layers_are_refused_before_a_step(
    tmp_path: Path, axis: str
) -> None:
    """TRL's losses gather metrics, which ranks cannot inside a step in stages."""
    pytest.importorskip("trl")
    knob = f"{axis}_parallel_degree"
    with pytest.raises(RanksFailed, match=f"write {knob}=1, and"):
        size = {"per_device_train_batch_size": 4}
        run_ranks(begin_to_generate, 2, str(tmp_path), {knob: 2}, **size)


def begin_to_generate(folder: str, knobs: dict[str, Any], **options: Any) -> None:
    import trl
    from datasets import Dataset

    arguments = trl.GRPOConfig(
        **common(folder, 1) | {"per_device_train_batch_size": 3} | options,
        bf16=False,
        num_generations=4,
    )
    type("Generating", (SmpTrainerMixin, trl.GRPOTrainer), {})(
        model=make_model(),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1 2"}] * 8),
        eval_dataset=Dataset.from_list([{"prompt": "1 2"}] * 8),
        processing_class=words(),
        reward_funcs=reward,
        smp_config=knobs,
    )
