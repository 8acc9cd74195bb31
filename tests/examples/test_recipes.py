"""Recipes: each trains tiny on ranks as it does on one, and its full size is a
configuration that is there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from smp_core.checkpoint import is_checkpoint
from smp_core.config import SmpConfig
from tests.harness import ROOT, run_ranks, run_script

FOLDER = ROOT / "examples" / "recipes"
TEXT = ROOT / "docs" / "architecture.md"
# Sums of float32 in another order, over the steps; FP8 rounds a value near the middle
# of two to either.
TOLERANCE, IN_FP8 = 1e-5, 1e-3
RANKS = {
    "gpt2_30b_mics": 4,
    "llama_70b_3d": 4,
    "qwen3_30b_experts": 4,
    "vision_ema": 2,
    "qwen3_8b_finetune": 2,
}
LAUNCHED = {"TORCHELASTIC_RUN_ID": "recipes", "HF_HUB_OFFLINE": "1"}


def recipe(name: str) -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def losses_of(name: str, arguments: list[str]) -> list[float]:
    return recipe(name).main(["--tiny", "--data", str(TEXT), *arguments])


def assert_ranks_train_like_one(
    name: str, ranks: int, arguments: list[str], tolerance: float
) -> None:
    alone = run_ranks(losses_of, 1, name, arguments, env=LAUNCHED)[0]
    assert alone[-1] < alone[0] - 1e-3
    for losses in run_ranks(
        losses_of, ranks, name, arguments, ranks_per_node=2, env=LAUNCHED
    ):
        assert losses == pytest.approx(alone, abs=tolerance)


@pytest.mark.slow
def test_sequences_on_two_ranks_in_fp8(tmp_path: Path) -> None:
    arguments = ["--steps", "3", "--cache-dir", str(tmp_path)]
    assert_ranks_train_like_one("llama_8b_16k", 2, arguments, IN_FP8)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_recipes_train_on_ranks_as_on_one(name: str, tmp_path: Path) -> None:
    arguments = [
        "--steps",
        "3",
        "--cache-dir",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    assert_ranks_train_like_one(name, RANKS[name], arguments, TOLERANCE)
    saved = tmp_path / "out"
    assert (
        is_checkpoint(saved / "checkpoint")
        or (saved / "model" / "config.json").exists()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["--lora"], ["--lora", "--trl"]], ids=["lora", "lora-trl"]
)
def test_adapters_train_on_ranks_as_on_one(flags: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    if "--trl" in flags:
        pytest.importorskip("trl")
    arguments = [
        *flags,
        "--steps",
        "3",
        "--cache-dir",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    assert_ranks_train_like_one("qwen3_8b_finetune", 2, arguments, TOLERANCE)
    assert (tmp_path / "out" / "model" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_adapters_beside_a_base_of_codes_train_alike_on_two_ranks_and_four(
    tmp_path: Path,
) -> None:
    """One process has no shards to store codes on."""
    pytest.importorskip("peft")
    arguments = ["--steps", "3", "--cache-dir", str(tmp_path)]
    coded, four, exact = (
        run_ranks(
            losses_of,
            ranks,
            "qwen3_8b_finetune",
            [flag, *arguments],
            ranks_per_node=2,
            env=LAUNCHED,
        )[0]
        for ranks, flag in ((2, "--qlora"), (4, "--qlora"), (2, "--lora"))
    )
    assert four == pytest.approx(coded, abs=TOLERANCE)
    assert coded != pytest.approx(exact, abs=TOLERANCE) and coded[-1] < coded[0] - 1e-3


@pytest.mark.slow
def test_the_script_that_knows_accelerate_alone_trains_the_same_under_a_yaml(
    tmp_path: Path,
) -> None:
    """Its printed losses have four digits, which sums in another order do not reach."""
    script = [
        FOLDER / "plain_accelerate.py",
        "--tiny",
        "--steps",
        "4",
        "--data",
        TEXT,
        "--cache-dir",
        tmp_path,
    ]
    assert "smp" not in re.sub(
        r'^""".*?"""', "", script[0].read_text(), flags=re.DOTALL
    )
    alone = run_script(script)
    launched = [
        "-m",
        "accelerate_smp.cli",
        "launch",
        "--config_file",
        ROOT / "examples/accelerate/four_ranks_cpu.yaml",
    ]
    together = run_script([*launched, *script], env={"SMP_RANKS_PER_NODE": "2"})
    lines = [
        re.findall(r"^loss .*$", done.stdout, re.MULTILINE)
        for done in (alone, together)
    ]
    assert len(lines[0]) == 1 and lines[0] == lines[1], (
        together.stdout[-2000:] + together.stderr[-4000:]
    )
    assert "units:" in together.stdout + together.stderr, "it was sharded"


def test_full_sizes_are_configurations_and_their_ranks_divide_the_batch() -> None:
    """Degrees are refused with the machines they are for only when a run starts; here
    with their numbers alone."""
    for name in ["llama_8b_16k", *RANKS]:
        module = recipe(name)
        size, (nodes, _) = module.RECIPE.full, module.RECIPE.cluster.split("x")
        config = SmpConfig.from_dict(dict(size.knobs))
        ranks = 8 * int(nodes)
        degrees = [
            size.knobs.get(degree, 1)
            for degree in importlib.import_module("recipe").DEGREES
        ]
        readers = ranks
        for degree in degrees:
            assert readers % degree == 0, name
            readers //= degree
        loaded = size.micro_batch * size.knobs.get("pipeline", {}).get(
            "microbatches", 1
        )
        assert size.global_batch % (readers * loaded) == 0, name
        assert (
            config.shard_degree in ("node", "world") or ranks % config.shard_degree == 0
        ), name


def test_ranks_that_do_not_divide_the_batch_are_told_what_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = recipe("gpt2_30b_mics")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(
        SystemExit,
        match=r"3 ranks do not divide the 8 samples of a step by 2 at a time; start as many",
    ):
        module.main(["--tiny"])
