"""The text of the examples: split by file, cached whole, the same everywhere, and read
back as it was."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import corpus as corpus_module
from examples.corpus import (
    Corpus,
    Document,
    TextData,
    TextError,
    TokenBlocks,
    build_corpus,
    own_text,
    split,
    standard_library,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixty files of text in two folders, beside things that are no text or hidden."""
    texts = tmp_path / "texts"
    for number in range(60):
        path = texts / ("even" if number % 2 == 0 else "odd") / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"File {number} says: the cat sat on mat {number}, naïve and 漢字.\n" * 20,
            encoding="utf-8",
        )
    (texts / "image.bin").write_bytes(b"\x89PNG\xff\x00")
    (texts / ".hidden").mkdir()
    (texts / ".hidden" / "secret.txt").write_text("no")
    return texts


def test_every_file_is_on_exactly_one_side() -> None:
    documents = standard_library()
    train, validation = split(documents)
    names = [document.name for document in [*train, *validation]]
    assert sorted(names) == sorted({document.name for document in documents})
    assert 0.05 < len(validation) / len(documents) < 0.15
    assert not any(
        part in ("test", "site-packages") for name in names for part in name.split("/")
    )
    assert any(name.startswith("built-in/") for name in names)
    assert "json/decoder.py" in names


def test_a_files_side_does_not_depend_on_the_other_files() -> None:
    documents = [Document(f"{number}.txt", "text") for number in range(200)]
    held_out = {document.name for document in split(documents)[1]}
    fewer = split(documents[50:150])
    assert {document.name for document in fewer[1]} == held_out & {
        document.name for document in documents[50:150]
    }


def test_the_cap_takes_whole_documents_from_all_over() -> None:
    documents = [
        Document(f"{folder}/{number}.py", "x" * 100)
        for folder in "abcd"
        for number in range(100)
    ]
    train, validation = split(
        [*documents, Document("huge.py", "x" * 100_000)], max_bytes=10_000
    )
    taken = [*train, *validation]
    assert len(taken) == 100
    assert {document.name[0] for document in taken} == set("abcd")


def test_a_single_file_is_cut_near_its_end() -> None:
    [train], [validation] = split([Document("book.txt", "0123456789" * 10)])
    assert train.text + validation.text == "0123456789" * 10
    assert len(validation.text) == 10


def test_own_text_leaves_out_hidden_and_binary_files(folder: Path) -> None:
    names = {document.name for document in own_text(folder)}
    assert len(names) == 60
    assert "even/0.txt" in names


def test_tokens_read_back_as_the_text(folder: Path, tmp_path: Path) -> None:
    built = build_corpus(folder, vocab_size=400, cache_dir=tmp_path / "cache")
    tokenizer = built.tokenizer()
    train, validation = split(own_text(folder))
    for side, documents in (("train", train), ("validation", validation)):
        expected = "".join(document.text + "<|endoftext|>" for document in documents)
        assert tokenizer.decode(built.tokens(side).tolist()) == expected
    unseen = "Zeichen, die nie vorkamen: ß \t €"
    assert tokenizer.decode(tokenizer(unseen)["input_ids"]) == unseen
    assert tokenizer.eos_token_id == built.end_of_text
    assert int(built.tokens("train").max()) < built.vocab_size <= 400


def test_the_cache_is_used_and_a_changed_file_or_flag_is_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = build_corpus(folder, vocab_size=400, cache_dir=cache)
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.delattr(corpus_module, "_build")  # any attempt to build fails
        assert build_corpus(folder, vocab_size=400, cache_dir=cache) == first
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == before
    assert build_corpus(folder, vocab_size=350, cache_dir=cache).folder != first.folder
    (folder / "even" / "0.txt").write_text("changed")
    assert build_corpus(folder, vocab_size=400, cache_dir=cache).folder != first.folder


def _build_in_a_process(folder: Path, cache: Path) -> tuple[Corpus, int]:
    built = build_corpus(folder, vocab_size=400, cache_dir=cache)
    return built, len(built.tokens("train"))


@pytest.mark.slow
def test_ranks_that_start_together_share_one_build(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    # Not forked: this process may have threads, whose locks a fork would leave locked.
    with ProcessPoolExecutor(
        3, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        results = list(pool.map(_build_in_a_process, [folder] * 3, [cache] * 3))
    assert results == [results[0]] * 3
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [
        results[0][0].folder.name
    ]


def test_an_interrupted_build_leaves_nothing_that_looks_finished(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module.np, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_corpus(folder, vocab_size=400, cache_dir=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert (
        len(
            build_corpus(folder, vocab_size=400, cache_dir=tmp_path / "cache").tokens(
                "train"
            )
        )
        > 0
    )


def test_every_token_but_the_first_is_predicted_once() -> None:
    blocks = TokenBlocks(np.arange(31, dtype=np.uint16), seq_len=10)
    assert len(blocks) == 3
    assert torch.cat(
        [block["targets"] for block in map(blocks.__getitem__, range(3))]
    ).tolist() == list(range(1, 31))
    assert torch.cat(
        [block["input_ids"] for block in map(blocks.__getitem__, range(3))]
    ).tolist() == list(range(30))


def test_validation_has_whole_batches_for_every_rank_and_no_block_twice(
    folder: Path, tmp_path: Path
) -> None:
    built = build_corpus(folder, vocab_size=300, cache_dir=tmp_path)
    data = TextData(built, seq_len=8, batch_size=3, ranks=4, validation_blocks=50)
    assert len(data.validation_blocks) == 48
    assert len(set(data.validation_blocks.indices)) == 48


def test_unigram_perplexity_is_that_of_the_counted_frequencies(
    folder: Path, tmp_path: Path
) -> None:
    built = build_corpus(folder, vocab_size=300, cache_dir=tmp_path)
    data = TextData(built, seq_len=8, batch_size=2, validation_blocks=10)
    train = built.tokens("train").tolist()
    losses = []
    for number in data.validation_blocks.indices:
        for token in built.tokens("validation")[
            number * 8 + 1 : number * 8 + 9
        ].tolist():
            losses.append(
                -math.log((train.count(token) + 1) / (len(train) + built.vocab_size))
            )
    # Sums of 80 float64 logarithms in another order.
    assert data.unigram_perplexity() == pytest.approx(
        math.exp(sum(losses) / len(losses)), rel=1e-12
    )


def test_refusals_name_the_flag(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"--data .*missing has no UTF-8 text"):
        own_text(tmp_path / "missing")
    with pytest.raises(TextError, match="--vocab-size 100 is too small"):
        build_corpus(folder, vocab_size=100, cache_dir=tmp_path / "cache")
    with pytest.raises(TextError, match="too few to hold out one in ten by file"):
        split([Document("a", "x"), Document("b", "y")])
    built = build_corpus(folder, vocab_size=300, cache_dir=tmp_path / "cache")
    with pytest.raises(TextError, match="too few for 64 ranks with --batch-size 64"):
        TextData(built, seq_len=64, batch_size=64, ranks=64)
