"""FP8 under Accelerate: the knob, Accelerate's own settings, checkpoints, the Trainer under bf16."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import TERecipeKwargs
from torch.utils.data import DataLoader

from accelerate_smp.fp8 import recipe_of
from accelerate_smp.launch import LaunchFile
from smp_core.checkpoint import read_rest
from smp_core.fp8 import Fp8Recipe
from tests.accelerate.running import fresh_accelerator, full_weights
from tests.accelerate.trainers import make_trainer, whole_weights
from tests.core.gpt import SmallGpt
from tests.harness import run_ranks

RECIPE = Fp8Recipe(amax_history_len=4)
TOKENS = torch.randint(32, (24, 9), generator=torch.Generator().manual_seed(3))


def prepared(**arguments: Any) -> tuple[Any, ...]:
    accelerator = fresh_accelerator(**{"shard_degree": 2, "fp8": RECIPE, **arguments})
    torch.manual_seed(accelerator.process_index)
    model = SmallGpt(vocabulary=32, width=32, layers=2, heads=2, length=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return (accelerator, *accelerator.prepare(model, optimizer, DataLoader(TOKENS, batch_size=2)))


def steps(accelerator: Any, model: Any, optimizer: Any, loader: Any, first: int, last: int) -> list[float]:
    losses = []
    for number, tokens in enumerate(loader):
        if first <= number < last:
            with accelerator.accumulate(model):
                loss = model(tokens)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def resuming(folder: str) -> tuple[list[float], list[float], bool, bool, list[float], float]:
    accelerator, model, optimizer, loader = prepared()
    straight = steps(accelerator, model, optimizer, loader, 0, 3)
    accelerator.save_state(folder)
    straight += steps(accelerator, model, optimizer, loader, 3, 6)
    calls = accelerator.parallel.meter.per_step()["amax_all_reduce/calls"]
    weights, history = full_weights(model), accelerator.parallel.fp8.state.history

    second, model, optimizer, loader = prepared(mixed_precision="no")
    second.load_state(folder)
    resumed = steps(second, model, optimizer, loader, 3, 6)
    same = all(torch.equal(value, weights[name]) for name, value in full_weights(model).items())
    same_history = torch.equal(second.parallel.fp8.state.history, history)
    third, model, optimizer, loader = prepared(mixed_precision="fp8")
    assert third.mixed_precision == "bf16"
    return straight, resumed, same, same_history, steps(third, model, optimizer, loader, 0, 6), calls


def test_a_loop_goes_on_where_it_was_saved_and_runs_under_bf16(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    for straight, resumed, same, same_history, bf16, calls in run_ranks(resuming, 2, str(folder)):
        assert resumed == straight[3:] and same and same_history and calls == 1.0
        assert bf16 != straight and bf16 == pytest.approx(straight, rel=2e-2)
    rest = read_rest(folder, tensors=["*"])
    assert not [name for name in rest["state_dict"] if "scale" in name or "amax" in name]
    assert set(rest["smp_fp8"]["sites"]) == {
        f"blocks.{n}.{layer}" for n in range(2) for layer in ("qkv", "project", "up", "down")
    }


def trainer_runs(folder: str) -> tuple[list[float], list[float], bool, str]:
    """With and without FP8; the second half of the FP8 run again from a checkpoint."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def run(knobs: dict[str, Any], resume: str | None = None, **flags: Any) -> tuple[list[float], Any]:
        trainer, recorder = make_trainer(folder, 8, 1, {"shard_degree": 2, **knobs}, bf16=True, use_cpu=True, **flags)
        torch.manual_seed(0)
        sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
        config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
        trainer.model = GPT2LMHeadModel(config)
        trainer.model_wrapped = trainer.model
        trainer.train(resume_from_checkpoint=resume)
        return recorder.run.losses, trainer

    fp8, trainer = run({"fp8": "hybrid"}, save_strategy="steps", save_steps=3)
    weights = whole_weights(trainer.model)
    assert len(trainer.accelerator.parallel.fp8.sites) == 8
    _, again = run({"fp8": "hybrid"}, resume=f"{folder}/checkpoint-3")
    same = all(torch.equal(value, weights[name]) for name, value in whole_weights(again.model).items())
    return fp8, run({})[0], same, trainer.accelerator.mixed_precision


def test_the_trainer_computes_in_fp8_under_bf16_and_resumes_exactly(tmp_path: Path) -> None:
    for fp8, plain, same, precision in run_ranks(trainer_runs, 2, str(tmp_path), timeout=120):
        assert precision == "bf16" and same
        assert fp8 != plain and fp8 == pytest.approx(plain, rel=2e-2)


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({"backend": "TE", "fp8_format": "HYBRID", "amax_history_len": 16}, Fp8Recipe(amax_history_len=16)),
        ({"backend": "TE", "amax_compute_algo": "most_recent", "margin": 1, "interval": 1},
         Fp8Recipe(amax_compute_algo="most_recent", margin=1)),
        ({"fp8_format": "E4M3", "override_linear_precision": [False, False, False]}, Fp8Recipe(fp8_format="e4m3")),
        ({"backend": "AO", "enable_fsdp_float8_all_gather": False}, Fp8Recipe(scaling="dynamic", fp8_all_gather=False)),
    ],
)  # fmt: skip
def test_settings_of_accelerate_are_understood(settings: dict[str, Any], meant: Fp8Recipe) -> None:
    assert recipe_of(settings) == meant


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"amax_history": 4}, "did you mean 'amax_history_len'"),
        ({"fp8_format": "E5M2"}, "not for training; allowed: HYBRID, E4M3"),
        ({"interval": 4}, "interval=4 has no counterpart"),
        ({"override_linear_precision": [False, False, True]}, "all three products run in FP8"),
        ({"use_mxfp8_block_scaling": True}, "a tensor has one scale"),
        ({"backend": "MSAMP"}, "not maintained"),
        ({"backend": "XYZ"}, "allowed: TE, AO"),
    ],
)
def test_settings_without_counterpart_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="fp8_config") as refused:
        recipe_of(settings)
    assert words in str(refused.value)


def test_a_setting_without_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "smp"):
        recipe_of({"use_autocast_during_eval": True, "pad_inner_dim": False})
    assert [record.getMessage() for record in caplog.records] == [
        "fp8_config: use_autocast_during_eval has no effect: evaluation runs in FP8 with the scales of training"
    ]


def test_recipes_of_accelerate_given_in_code(monkeypatch: pytest.MonkeyPatch) -> None:
    # Accelerate does not let one write the recipe down where the library is missing; it is not used here.
    monkeypatch.setattr("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True)
    handler = TERecipeKwargs(amax_history_len=8, amax_compute_algo="max")
    accelerator = fresh_accelerator(mixed_precision="fp8", kwargs_handlers=[handler], cpu=True)
    assert accelerator.smp_config.fp8 == Fp8Recipe(amax_history_len=8)
    assert accelerator.mixed_precision == "bf16"
    with pytest.raises(ValueError, match=r"Accelerate's own settings say Fp8Recipe\(amax_history_len=8\); remove one"):
        fresh_accelerator(fp8="dynamic", kwargs_handlers=[handler], cpu=True)


def test_fp8_config_in_the_launch_file(tmp_path: Path) -> None:
    document = {"num_processes": 2, "mixed_precision": "fp8", "smp_config": {"shard_degree": 2}}
    path = tmp_path / "smp.yaml"
    path.write_text(yaml.safe_dump({**document, "fp8_config": {"backend": "TE", "margin": 1}}))
    file = LaunchFile.read(path)
    file.check(2)
    assert file.smp.fp8 == Fp8Recipe(margin=1)
    assert file.accelerate == {"num_processes": 2, "mixed_precision": "bf16"}
    path.write_text(yaml.safe_dump({**document, "fp8_config": {"margin": 1}, "smp_config": {"fp8": "dynamic"}}))
    with pytest.raises(ValueError, match="remove one of the two"):
        LaunchFile.read(path)
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError, match="mixed_precision: fp8 needs the FP8 plugin"):
        LaunchFile.read(path).check(2)
