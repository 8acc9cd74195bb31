"""Real text that every machine has, as blocks of tokens.

Owns the way from files to training data: the Python standard library's sources (with
their documentation strings, and those of the built-in modules, which have no sources)
or one's own files; a split into training and validation *by file*; a byte-level BPE
tokenizer trained on the training files; the tokens, cached on disk. Everything is a
function of the files and the flags: the same machine gives the same numbers on every
run and on every rank.

The unigram model is the yardstick: it knows how frequent each token is and nothing
else. A language model that does not beat its perplexity by far has not learned to read.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import DataLoader, Dataset, Subset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = {
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "pad_token": END_OF_TEXT,
}

# One file in ten is held out.
VALIDATION_SHARE = 0.1

# Tests are not prose and not typical code; encodings and lib2to3 are mostly generated
# tables; the packages are not part of the standard library and differ from machine to
# machine.
SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "encodings",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "__pycache__",
    }
)

# Part of the cache key: change it when the same files and flags would give other
# tokens.
FORMAT = 1


class TextError(ValueError):
    """There is no text, or too little for what is asked; says which flag to change."""


@dataclass(frozen=True)
class Document:
    """One file: its path relative to where it was found (with ``/``), and its text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Return whether the file belongs to validation: decided by its name alone; no
        other file can change it."""
        return _fraction("split:" + self.name) < VALIDATION_SHARE


def _fraction(name: str) -> float:
    """A number in [0, 1) that looks random but depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def standard_library() -> list[Document]:
    """The sources of this Python's standard library, and the documentation strings of
    its built-in modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(relative.parts):
            documents += _read(path, relative.as_posix())
    for module in sys.builtin_module_names:
        text = _documentation(module)
        if text:
            documents.append(Document(f"built-in/{module}.txt", text))
    return documents


def own_text(path: Path) -> list[Document]:
    """One file, or every file below a folder that reads as UTF-8 text; hidden ones are
    left out.

    A single file is cut: its last tenth is held out, because there is no second file to
    validate on.

    Raises:
        TextError: there is no text at ``path``.
    """
    if path.is_dir():
        visible = []
        for name in (p.relative_to(path) for p in path.rglob("*") if p.is_file()):
            if not any(part.startswith(".") for part in name.parts):
                visible.append(name)
        documents = [
            document
            for name in visible
            for document in _read(path / name, name.as_posix())
        ]
    else:
        documents = _read(path, path.name) if path.is_file() else []
    if not documents:
        raise TextError(
            f"--data {path} has no UTF-8 text; give a text file or a folder with text files"
        )
    return documents


def _read(path: Path, name: str) -> list[Document]:
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return [Document(name, text)] if text.strip() and "\0" not in text else []


def _documentation(module: str) -> str:
    """All documentation strings of a module that is compiled into the interpreter."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return ""
    parts = [found.__doc__ or ""]
    for name in sorted(vars(found)):
        member = getattr(found, name)
        # Instances show the documentation of their class; only what is defined here
        # counts.
        if getattr(member, "__module__", None) == module or isinstance(member, type):
            parts.append(
                f"{module}.{name}\n{member.__doc__}"
                if isinstance(member.__doc__, str)
                else ""
            )
    return "\n\n".join(part for part in parts if part)


def split(
    documents: Sequence[Document], max_bytes: int | None = None
) -> tuple[list[Document], list[Document]]:
    """(training, validation) documents, in an order that depends on their names only.

    Args:
        documents: what to split; each goes wholly to one side, unless there is only
            one.
        max_bytes: size of what is taken, documents that no longer fit left out; the
            order mixes all folders, so that it is a fair sample.

    Raises:
        TextError: one side would be empty.
    """
    if len(documents) == 1:
        name, text = documents[0].name, documents[0].text[:max_bytes]
        cut = int(len(text) * (1 - VALIDATION_SHARE))
        return [Document(name, text[:cut])], [
            Document(f"{name} (last tenth)", text[cut:])
        ]
    # A second hash: held-out files must not all come first.
    ordered = sorted(
        documents,
        key=lambda document: (_fraction("order:" + document.name), document.name),
    )
    taken, room = [], math.inf if max_bytes is None else max_bytes
    for document in ordered:
        size = len(document.text.encode())
        if size <= room:
            taken.append(document)
            room -= size
    train = [document for document in taken if not document.held_out]
    validation = [document for document in taken if document.held_out]
    if not train or not validation:
        raise TextError(
            f"{len(taken)} files are too few to hold out one in ten by file; give a folder with more files, a single "
            "file (its last tenth is held out), or a larger --max-mb"
        )
    return train, validation


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the tokens of both sides, in a cache folder.

    Attributes:
        folder: ``tokenizer.json``, ``train.npy``, ``validation.npy``, ``facts.json``.
        facts: where the text came from, files and bytes of each side, vocabulary size.
    """

    folder: Path
    facts: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.facts["vocab_size"])

    @property
    def end_of_text(self) -> int:
        """The token between two files."""
        return int(self.facts["end_of_text"])

    def tokens(self, side: str) -> np.ndarray:
        """The token stream of ``"train"`` or ``"validation"``: 1-D, unsigned integers,
        read from disk when touched."""
        return np.load(self.folder / f"{side}.npy", mmap_mode="r")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_file=str(self.folder / "tokenizer.json"), **SPECIAL_TOKENS
        )

    def describe(self) -> str:
        """One line for people."""
        sides = [
            f"{self.facts[side]['files']} files, {self.facts[side]['bytes'] / 1e6:.1f} MB, "
            f"{len(self.tokens(side)):,} tokens for {purpose}"
            for side, purpose in (("train", "training"), ("validation", "validation"))
        ]
        return f"{self.facts['source']}: {'; '.join(sides)}"


def build_corpus(
    data: Path | None = None,
    *,
    vocab_size: int = 2048,
    max_bytes: int | None = 4_000_000,
    cache_dir: Path | None = None,
) -> Corpus:
    """Collect, split, train the tokenizer and tokenise; or take all of it from the
    cache.

    Safe to call on all ranks at once: one builds, the others wait for it; what is in
    the cache is always whole.

    Args:
        data: one's own file or folder; None: the standard library.
        vocab_size: entries of the BPE vocabulary, the 256 bytes and the end of text
            included; at least 300.
        max_bytes: size of the text to use, None for all of it.
        cache_dir: default ``$XDG_CACHE_HOME/torch-smp`` or ``~/.cache/torch-smp``.

    Raises:
        TextError: no text, too few files, or a vocabulary that cannot hold the bytes.
    """
    if vocab_size < 300:
        raise TextError(
            f"--vocab-size {vocab_size} is too small: 256 bytes and some merges need 300 or more"
        )
    train, validation = split(
        standard_library() if data is None else own_text(data), max_bytes
    )
    source = (
        f"Python {sys.version_info.major}.{sys.version_info.minor} standard library"
        if data is None
        else str(data)
    )
    cache = cache_dir or default_cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"text-{_fingerprint(train, validation, vocab_size)}"
    if not folder.exists():
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                _build(folder, source, train, validation, vocab_size)
    return Corpus(folder, json.loads((folder / "facts.json").read_text()))


def default_cache_dir() -> Path:
    """Return the folder of caches on this machine (XDG base directories)."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-smp"
    )


def _fingerprint(
    train: Sequence[Document], validation: Sequence[Document], vocab_size: int
) -> str:
    digest = hashlib.sha256(f"{FORMAT} {vocab_size} {VALIDATION_SHARE}".encode())
    for side in (train, validation):
        for document in side:
            digest.update(
                f"\n{document.name} {hashlib.sha256(document.text.encode()).hexdigest()}".encode()
            )
        digest.update(b"\n--")
    return digest.hexdigest()[:16]


def _build(
    folder: Path,
    source: str,
    train: Sequence[Document],
    validation: Sequence[Document],
    vocab_size: int,
) -> None:
    """Fill a temporary folder and rename it: a cache folder is there as a whole or not
    at all."""
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as parent:
        building = Path(parent) / "text"
        building.mkdir()
        tokenizer = _train_tokenizer((document.text for document in train), vocab_size)
        tokenizer.save(str(building / "tokenizer.json"))
        end = tokenizer.token_to_id(END_OF_TEXT)
        facts: dict[str, Any] = {
            "source": source,
            "vocab_size": tokenizer.get_vocab_size(),
            "end_of_text": end,
        }
        dtype = np.uint16 if facts["vocab_size"] <= 2**16 else np.uint32
        for side, documents in (("train", train), ("validation", validation)):
            stream: list[int] = []
            for encoding in tokenizer.encode_batch(
                [document.text for document in documents]
            ):
                stream += [*encoding.ids, end]
            np.save(building / f"{side}.npy", np.asarray(stream, dtype=dtype))
            size = sum(len(document.text.encode()) for document in documents)
            facts[side] = {"files": len(documents), "bytes": size}
        (building / "facts.json").write_text(json.dumps(facts, indent=1))
        building.rename(folder)


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """Fixed-length pieces of a token stream; block i predicts tokens i*T+1 ... (i+1)*T
    from those before them.

    Args:
        tokens: 1-D.
        seq_len: T, tokens predicted per block.

    Each item: ``input_ids`` and ``targets``, int64 [T]; ``targets`` are shifted by one
    already, so that the first token of a block is predicted too (by the block before
    it) and every token of the stream counts once.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.seq_len
        piece = torch.from_numpy(
            np.asarray(self.tokens[start : start + self.seq_len + 1], dtype=np.int64)
        )
        return {"input_ids": piece[:-1], "targets": piece[1:]}


class TextData:
    """Training and validation blocks, for any trainer.

    Args:
        corpus: from :func:`build_corpus`.
        seq_len: tokens per block.
        batch_size: blocks per rank and micro-batch.
        ranks: ranks that read different samples; validation takes equally many full
            batches for each, so that no block has to be repeated to fill up and the
            mean over ranks is the mean over the blocks.
        validation_blocks: at most this many, spread evenly over the held-out text.

    Raises:
        TextError: too little text for one batch on every rank.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        batch_size: int,
        ranks: int = 1,
        validation_blocks: int = 256,
    ) -> None:
        self.batch_size = batch_size
        self.vocab_size = corpus.vocab_size
        self.train_blocks = TokenBlocks(corpus.tokens("train"), seq_len)
        held_out = TokenBlocks(corpus.tokens("validation"), seq_len)
        at_once = ranks * batch_size
        count = min(validation_blocks, len(held_out)) // at_once * at_once
        if count < 1 or len(self.train_blocks) < at_once:
            raise TextError(
                f"{len(self.train_blocks)} training and {min(validation_blocks, len(held_out))} validation blocks of "
                f"{seq_len} tokens are too few for {ranks} ranks with --batch-size {batch_size}; use more text "
                "(--data, --max-mb), a shorter --seq-len, a smaller --batch-size, or more --validation-blocks"
            )
        self.validation_blocks = Subset(
            held_out, [i * len(held_out) // count for i in range(count)]
        )

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(
            self.train_blocks, self.batch_size, shuffle=True, drop_last=True
        )

    def val_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(self.validation_blocks, self.batch_size)

    def unigram_perplexity(self) -> float:
        """Validation perplexity of the model that knows how frequent each token is in
        training (counts plus one)."""
        counts = np.bincount(self.train_blocks.tokens, minlength=self.vocab_size) + 1.0
        log_probability = np.log(counts / counts.sum())
        targets = np.concatenate(
            [
                block["targets"].numpy()
                for block in DataLoader(self.validation_blocks, None)
            ]
        )
        return math.exp(-float(log_probability[targets].mean()))
