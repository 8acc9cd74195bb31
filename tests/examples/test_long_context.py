"""The long-context example: the same losses over 1, 2 and 4 ranks, less memory; and its
plan on meta."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.harness import ROOT, run_script

SCRIPT = ROOT / "examples" / "train_long_context.py"


@pytest.mark.slow
def test_losses_are_the_same_at_every_degree_and_memory_falls(tmp_path: Path) -> None:
    """1e-5: float32 sums in another order, over two steps. Memory: per-token tensors
    dominate at 1,024 tokens."""
    out = tmp_path / "seen.json"
    options = [
        "--length",
        "1024",
        "--steps",
        "2",
        "--out",
        out,
        "--cache-dir",
        tmp_path / "cache",
    ]
    finished = run_script([SCRIPT, *options], env={"SMP_RANKS_PER_NODE": "2"})
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    one, two, four = json.loads(out.read_text())
    assert [seen["degree"] for seen in (one, two, four)] == [1, 2, 4]
    for seen in (two, four):
        assert seen["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert one["losses"][-1] < one["losses"][0]
    for more, less in ((one, two), (two, four)):
        assert less["activation_bytes"] < 0.6 * more["activation_bytes"]


@pytest.mark.slow
def test_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    texts = [
        f"the {number} quick brown foxes jump over {number * 7} lazy dogs. " * 20
        for number in range(12)
    ]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    words.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"])
    )
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(
        tmp_path / "tokenizer"
    )
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    out = tmp_path / "seen.json"
    own = ["--tokenizer", tmp_path / "tokenizer", "--data", tmp_path, "--out", out]
    degree = [
        "--context-parallel-degree",
        "2",
        "--ranks",
        "2",
        "--length",
        "256",
        "--steps",
        "2",
    ]
    finished = run_script([SCRIPT, *own, *degree])
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    first, last = json.loads(out.read_text())["losses"]
    assert last < first < 6.0, "of 300 words: log 300 is 5.7"
    finished = run_script([SCRIPT, *own, *degree, "--length", "100000"])
    assert (
        finished.returncode != 0
        and "give more text with --data, or a smaller --length" in finished.stderr
    )


@pytest.mark.slow
def test_the_walk_through_of_smp_plans_on_meta() -> None:
    finished = run_script([SCRIPT, "--plan"])
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert (
        "8.03 billion parameters" in finished.stdout
        and "2,048 of 16,384 tokens" in finished.stdout
    )
