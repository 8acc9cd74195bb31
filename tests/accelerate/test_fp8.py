"""FP8 under Accelerate: the knob, Accelerate's own settings, checkpoints, the Trainer
under bf16."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import TERecipeKwargs
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from accelerate_smp import Fp8MonitorCallback
from accelerate_smp.fp8 import recipe_of
from accelerate_smp.launch import LaunchFile
from smp_core.checkpoint import read_rest
from smp_core.cli import app
from smp_core.fp8 import Fp8Recipe
from smp_core.fp8.monitoring import Fp8Log
from tests.accelerate.running import fresh_accelerator, full_weights
from tests.accelerate.trainers import make_trainer, whole_weights
from tests.core.fp8 import transformer_engine_stand_in as stand_in
from tests.core.gpt import SmallGpt
from tests.harness import run_ranks

RECIPE = Fp8Recipe(amax_history_len=4)
ENGINE = Fp8Recipe(backend="transformer_engine", fp8_all_gather=False)
TOKENS = torch.randint(32, (24, 9), generator=torch.Generator().manual_seed(3))


def prepared(**arguments: Any) -> tuple[Any, ...]:
    accelerator = fresh_accelerator(**{"shard_degree": 2, "fp8": RECIPE, **arguments})
    torch.manual_seed(accelerator.process_index)
    model = SmallGpt(vocabulary=32, width=32, layers=2, heads=2, length=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return (
        accelerator,
        *accelerator.prepare(model, optimizer, DataLoader(TOKENS, batch_size=2)),
    )


def steps(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, first: int, last: int
) -> list[float]:
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


def resuming(
    folder: str,
) -> tuple[list[float], list[float], bool, bool, list[float], float]:
    accelerator, model, optimizer, loader = prepared()
    straight = steps(accelerator, model, optimizer, loader, 0, 3)
    accelerator.save_state(folder)
    straight += steps(accelerator, model, optimizer, loader, 3, 6)
    calls = accelerator.parallel.meter.per_step()["amax_all_reduce/calls"]
    weights, history = full_weights(model), accelerator.parallel.fp8.state.history

    second, model, optimizer, loader = prepared(mixed_precision="no")
    second.load_state(folder)
    resumed = steps(second, model, optimizer, loader, 3, 6)
    same = all(
        torch.equal(value, weights[name]) for name, value in full_weights(model).items()
    )
    same_history = torch.equal(second.parallel.fp8.state.history, history)
    third, model, optimizer, loader = prepared(mixed_precision="fp8")
    assert third.mixed_precision == "bf16"
    return (
        straight,
        resumed,
        same,
        same_history,
        steps(third, model, optimizer, loader, 0, 6),
        calls,
    )


def test_a_loop_goes_on_where_it_was_saved_and_runs_under_bf16(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    for straight, resumed, same, same_history, bf16, calls in run_ranks(
        resuming, 2, str(folder)
    ):
        assert resumed == straight[3:] and same and same_history and calls == 1.0
        # Activations are rounded to 0.4 %; the steep first steps enlarge that, more or
        # less by the processor.
        assert bf16 != straight and bf16 == pytest.approx(straight, rel=5e-2)
    rest = read_rest(folder, tensors=["*"])
    assert not [
        name for name in rest["state_dict"] if "scale" in name or "amax" in name
    ]
    assert set(rest["smp_fp8"]["sites"]) == {
        f"blocks.{n}.{layer}"
        for n in range(2)
        for layer in ("qkv", "project", "up", "down")
    }


def late(degree: int) -> tuple[list[float], torch.Tensor]:
    """Initialised on its ranks."""
    accelerator = fresh_accelerator(shard_degree=degree, fp8=RECIPE, delayed_init=True)
    with torch.device("meta"):
        model = SmallGpt(vocabulary=32, width=32, layers=2, heads=2, length=8)
    model = accelerator.prepare(model)
    optimizer, loader = accelerator.prepare(
        torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(TOKENS, batch_size=2)
    )
    return steps(
        accelerator, model, optimizer, loader, 0, 4
    ), accelerator.parallel.fp8.state.history


def late_both() -> tuple[Any, Any]:
    return late(2), late(1)


def test_a_model_initialised_on_its_ranks_trains_in_fp8_the_same_however_it_is_sharded() -> (
    None
):
    for (losses, history), (replicated, other) in run_ranks(late_both, 2):
        assert losses == replicated and losses[-1] < losses[0]
        assert torch.equal(history, other) and history.count_nonzero() == 4 * 8 * 3


def in_transformer_engine() -> tuple[list[float], list[int], int]:
    with stand_in.installed(before_2_9=True) as regions:
        accelerator, model, optimizer, loader = prepared(
            fp8=ENGINE, mixed_precision="bf16"
        )
        losses = steps(accelerator, model, optimizer, loader, 0, 6)
    return losses, [size for _, size in regions.passes], regions.outside


def test_a_loop_runs_in_a_region_of_transformer_engine() -> None:
    """A stand-in with its signatures."""
    for losses, passes, outside in run_ranks(in_transformer_engine, 2):
        assert passes == [2] * 6 and outside == 0 and losses[-1] < losses[0]


def trainer_runs(folder: str) -> tuple[list[float], list[float], bool, str]:
    """With and without FP8; the second half of the FP8 run again from a checkpoint."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def run(
        knobs: dict[str, Any], resume: str | None = None, **flags: Any
    ) -> tuple[list[float], Any]:
        trainer, recorder = make_trainer(
            folder, 8, 1, {"shard_degree": 2, **knobs}, bf16=True, use_cpu=True, **flags
        )
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 61,
            "n_positions": 16,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
        }
        config = GPT2Config(
            **sizes,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=0,
            eos_token_id=0,
        )
        trainer.model = GPT2LMHeadModel(config)
        trainer.model_wrapped = trainer.model
        trainer.train(resume_from_checkpoint=resume)
        return recorder.run.losses, trainer

    fp8, trainer = run({"fp8": "hybrid"}, save_strategy="steps", save_steps=3)
    weights = whole_weights(trainer.model)
    assert len(trainer.accelerator.parallel.fp8.sites) == 8
    _, again = run({"fp8": "hybrid"}, resume=f"{folder}/checkpoint-3")
    same = all(
        torch.equal(value, weights[name])
        for name, value in whole_weights(again.model).items()
    )
    return fp8, run({})[0], same, trainer.accelerator.mixed_precision


def test_the_trainer_computes_in_fp8_under_bf16_and_resumes_exactly(
    tmp_path: Path,
) -> None:
    for fp8, plain, same, precision in run_ranks(trainer_runs, 2, str(tmp_path)):
        assert precision == "bf16" and same
        assert fp8 != plain and fp8 == pytest.approx(plain, rel=2e-2)


def fp8_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "n_positions": 16,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def monitored(folder: str) -> tuple[list[dict[str, Any]], torch.Tensor, str]:
    """Five optimizer steps of two micro-batches, every other one probed; and a run
    without FP8. E4M3 gradients reach far less low than E5M2 ones: some become zero."""
    recipe = Fp8Recipe(amax_history_len=4, fp8_format="e4m3")
    flags: dict[str, Any] = {"model": fp8_model(), "max_steps": 5, "logging_steps": 1}
    trainer, _ = make_trainer(folder, 8, 2, {"shard_degree": 2, "fp8": recipe}, **flags)
    trainer.add_callback(Fp8MonitorCallback(every_n_steps=2, modules=["*.0.mlp.c_fc"]))
    trainer.train()
    state, log = trainer.accelerator.parallel.fp8.state, trainer.state.log_history
    trainer, _ = make_trainer(
        folder, 8, 2, {"shard_degree": 2}, **{**flags, "model": fp8_model()}
    )
    trainer.add_callback(Fp8MonitorCallback())
    with pytest.raises(ValueError) as refused:
        trainer.train()
    return log, state.scale, str(refused.value)


@pytest.mark.slow
def test_the_monitor_logs_rates_and_scales_under_trainer(tmp_path: Path) -> None:
    ranks = run_ranks(monitored, 2, str(tmp_path))
    for log, _, refused in ranks:
        seen = {
            entry["step"]: [name for name in entry if name.startswith("fp8/")]
            for entry in log
            if "loss" in entry
        }
        site = "fp8/transformer.h.0.mlp.c_fc/"
        assert {step: len(names) for step, names in seen.items()} == {
            1: 7,
            2: 0,
            3: 7,
            4: 0,
            5: 7,
        }
        assert all(name.startswith(site) for names in seen.values() for name in names)
        assert (
            "this run computes without FP8" in refused
            and 'write smp_config={"fp8": True}' in refused
        )
    log, scale, _ = ranks[0]
    found = Fp8Log.read(tmp_path / "fp8.jsonl")
    assert found.steps == [1, 3, 5] and len(found.figures["input_flushed"]) == 8
    # What the file says last are the scales at the end, and the first step, which
    # calibrates, saturates nothing.
    names = list(found.figures["input_scale"])
    for role, figure in enumerate(("input_scale", "weight_scale", "gradient_scale")):
        assert [found.figures[figure][name][-1] for name in names] == scale[
            :, role
        ].tolist()
    assert all(values[0] == 0 for values in found.figures["input_saturated"].values())
    assert (
        max(
            value
            for values in found.figures["gradient_flushed"].values()
            for value in values
        )
        > 0
    )
    assert (
        log[0][site + "input_scale"]
        == found.figures["input_scale"]["transformer.h.0.mlp.c_fc"][0]
    )
    shown = CliRunner().invoke(app, ["fp8-report", str(tmp_path / "fp8.jsonl")])
    assert shown.exit_code == 0 and "3 probed steps, 1 to 5" in shown.output
    with pytest.raises(ValueError, match="Fp8MonitorCallback: every_n_steps=0"):
        Fp8MonitorCallback(every_n_steps=0)


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
def test_settings_of_accelerate_are_understood(
    settings: dict[str, Any], meant: Fp8Recipe
) -> None:
    assert recipe_of(settings) == meant


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"amax_history": 4}, "did you mean 'amax_history_len'"),
        ({"fp8_format": "E5M2"}, "not for training; allowed: HYBRID, E4M3"),
        ({"interval": 4}, "interval=4 has no counterpart"),
        (
            {"override_linear_precision": [False, False, True]},
            "all three products run in FP8",
        ),
        ({"use_mxfp8_block_scaling": True}, "a tensor has one scale"),
        ({"backend": "MSAMP"}, "not maintained"),
        ({"backend": "XYZ"}, "allowed: TE, AO"),
    ],
)
def test_settings_without_counterpart_are_refused(
    settings: dict[str, Any], words: str
) -> None:
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
    # Accelerate does not let one write the recipe down where the library is missing; it
    # is not used here.
    monkeypatch.setattr(
        "accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True
    )
    handler = TERecipeKwargs(amax_history_len=8, amax_compute_algo="max")
    accelerator = fresh_accelerator(
        mixed_precision="fp8", kwargs_handlers=[handler], cpu=True
    )
    assert accelerator.smp_config.fp8 == Fp8Recipe(amax_history_len=8)
    assert accelerator.mixed_precision == "bf16"
    with pytest.raises(
        ValueError,
        match=r"Accelerate's own settings say Fp8Recipe\(amax_history_len=8\); remove one",
    ):
        fresh_accelerator(fp8="dynamic", kwargs_handlers=[handler], cpu=True)


def test_fp8_config_in_the_launch_file(tmp_path: Path) -> None:
    document = {
        "num_processes": 2,
        "mixed_precision": "fp8",
        "smp_config": {"shard_degree": 2},
    }
    path = tmp_path / "smp.yaml"
    path.write_text(
        yaml.safe_dump({**document, "fp8_config": {"backend": "TE", "margin": 1}})
    )
    file = LaunchFile.read(path)
    file.check(2)
    assert file.smp.fp8 == Fp8Recipe(margin=1)
    assert file.accelerate == {"num_processes": 2, "mixed_precision": "bf16"}
    path.write_text(
        yaml.safe_dump(
            {**document, "fp8_config": {"margin": 1}, "smp_config": {"fp8": "dynamic"}}
        )
    )
    with pytest.raises(ValueError, match="remove one of the two"):
        LaunchFile.read(path)
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError, match="mixed_precision: fp8 needs the FP8 plugin"):
        LaunchFile.read(path).check(2)
