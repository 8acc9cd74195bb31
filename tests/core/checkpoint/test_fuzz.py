"""Damaged and hostile inputs of every reader, drawn from a corpus: a CheckpointError or
an answer, and nothing touched.

Each input is a copy of a file or folder of the corpus with one to three mutations, by
seed. While it is read, Python's audit events are watched: nothing is opened, written,
renamed or deleted outside of the case's folder, nothing started.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import smp_core.checkpoint as checkpoint
from smp_core.checkpoint import CheckpointError
from smp_core.checkpoint.foreign.torch_file import check_torch_file, step_of_file
from smp_core.checkpoint.inspection import checkpoint_tables, list_table
from smp_core.checkpoint.layout import digest_of
from smp_core.checkpoint.root import read_latest
from tests.core.checkpoint.damage import rewrite_manifest
from tests.core.checkpoint.states import rest, values

HANG_SECONDS = 20  # ends a hang, and is no estimate: an input takes 20 ms
MEMORY_KB = 1_000_000
SEED = 16
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
)
_NEVER = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
    "os.chmod",
    "os.chown",
)
_READ_ONLY = tuple(
    os.path.realpath(path) for path in {sys.prefix, sys.base_prefix, *sys.path} if path
)


class Watch:
    """An audit hook, which cannot be taken off again: it looks while ``folder`` is
    set."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in _NEVER:
            self.seen.append(f"{event} {arguments[:1]}")
        elif event == "open" and isinstance(arguments[0], (str, bytes)):
            self.look(
                event,
                os.fsdecode(arguments[0]),
                bool(arguments[2] & (os.O_WRONLY | os.O_RDWR)),
            )
        elif event in _CHANGES:
            for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                if isinstance(path, (str, bytes)):
                    self.look(event, os.fsdecode(path), True)

    def look(self, event: str, path: str, changes: bool) -> None:
        folder, self.folder = self.folder, None  # realpath has events of its own
        try:
            # Below an open directory, no links.
            plain = os.path.basename(path) == path and path not in (".", "..")
            there = os.path.realpath(path)
            known = there.startswith(_READ_ONLY) or there.startswith(
                ("/proc/", "/dev/", "/sys/")
            )
            if (
                not plain
                and not there.startswith(f"{folder}/")
                and (changes or not known)
            ):
                self.seen.append(f"{event} {path}")
        finally:
            self.folder = folder


WATCH = Watch()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for step in (1, 2):
        state = {"state_dict": values(step), "rest": rest(step)}
        checkpoint.save_step(
            root / "ours",
            step,
            state,
            extra_files={"config.json": "{}"},
            per_rank={"a": (1,)},
        )
    dcp.save(
        {"model": values(1), "rest": {"a": [1, "x", torch.ones(2)]}},
        checkpoint_id=root / "dcp",
        no_dist=True,
    )
    (root / "hub").mkdir()
    save_file(
        {n: t.contiguous() for n, t in values(1).items()},
        root / "hub" / "model.safetensors",
        {"format": "pt"},
    )
    weights = {"weight_map": dict.fromkeys(values(1), "model.safetensors")}
    (root / "hub" / "model.safetensors.index.json").write_text(json.dumps(weights))
    (root / "file").mkdir()
    torch.save(
        {"state_dict": values(1), "global_step": 3, "rest": rest(1)},
        root / "file" / "last.ckpt",
    )
    return root


def readers(case: Path, out: Path) -> dict[str, list[Callable[[], Any]]]:
    """The readers of each part of the corpus."""
    step, ckpt = case / "ours" / "step-00000002", case / "file" / "last.ckpt"
    template = {
        "state_dict": {
            name: torch.zeros_like(tensor) for name, tensor in values(1).items()
        },
        "rest": None,
    }
    return {
        "ours": [
            lambda: checkpoint.load_checkpoint(step, template),
            lambda: checkpoint.load_checkpoint(
                step, template, strict=False, verify=None, allow_dtype_cast=True
            ),
            lambda: checkpoint.read_rest(step, tensors=["*"]),
            lambda: checkpoint.read_per_rank(step),
            lambda: checkpoint.read_tensors(step),
            lambda: checkpoint.verify_checkpoint(step, deep=True),
            lambda: checkpoint.newest_checkpoint(case / "ours"),
            lambda: checkpoint.first_undamaged([step, case / "ours" / "step-00000001"]),
            lambda: checkpoint_tables(step, all_tensors=True),
            lambda: list_table(case / "ours"),
            lambda: read_latest(case / "ours"),
            lambda: checkpoint.consolidate(step, out / "a", verify=None),
            lambda: checkpoint.consolidate(step, out / "a.ckpt", verify="sizes"),
            lambda: checkpoint.export_checkpoint(
                step, out / "b", "lightning", verify=None
            ),
        ],
        "dcp": [lambda: checkpoint.import_checkpoint(case / "dcp", out / "c")],
        "hub": [lambda: checkpoint.import_checkpoint(case / "hub", out / "d")],
        "file": [
            lambda: checkpoint.import_checkpoint(ckpt, out / "e"),
            lambda: check_torch_file(ckpt),
            lambda: step_of_file(ckpt),
        ],
    }


NUMBERS: list[Any] = [-1, 0, 1 << 70, 1e308]
TEXTS: list[Any] = ["", "../x", "/etc/passwd", "a" * 10_000, "\ud800", "$"]
HOSTILE = [*NUMBERS, *TEXTS, None, True, [], {}, [[]]]


def changed_json(value: Any, draw: random.Random) -> Any:
    """Replace, remove or double something in a JSON value."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.85:
        key = (
            draw.choice(list(value))
            if isinstance(value, dict)
            else draw.randrange(len(value))
        )
        action = draw.random()
        if action < 0.1:
            del value[key]
        elif action < 0.2 and isinstance(value, dict):
            value[draw.choice(TEXTS)] = value[key]
        elif action < 0.25 and isinstance(value, list):
            value.extend(value)
        else:
            value[key] = changed_json(value[key], draw)
        return value
    return draw.choice(HOSTILE)


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    position = draw.randrange(len(data) + 1)
    return draw.choice(
        [
            data[:position],
            data[:position] + data[draw.randrange(len(data) + 1) :],
            data[:position]
            + draw.randbytes(draw.choice([1, 8, 1000]))
            + data[position:],
            data[:position] + bytes([draw.randrange(256)]) + data[position + 1 :],
            data[:position] + b"\xff" * 8 + data[position + 8 :],
            b"[" * 10_000 + data,
        ]
    )


def mutate(file: Path, draw: random.Random) -> None:
    kind = draw.random()
    # A single file is what the user names, links and all.
    if kind < 0.1 and file.suffix != ".ckpt":
        file.unlink()
        draw.choice(
            [
                lambda: os.mkfifo(file),
                lambda: os.symlink("/etc/passwd", file),
                lambda: os.symlink("/dev/zero", file),
                lambda: file.mkdir(),
                lambda: None,
            ]
        )()
        return
    data = file.read_bytes()
    if kind < 0.6 and (file.suffix == ".json"):
        with contextlib.suppress(ValueError, RecursionError):  # changed before
            file.write_text(json.dumps(changed_json(json.loads(data), draw)))
            return
    file.write_bytes(changed_bytes(data, draw))


def refit(step: Path) -> None:
    """Put sizes and digests into the manifest again, as an attacker would."""
    with contextlib.suppress(Exception):
        if (step / "manifest.json").is_symlink() or not (
            step / "manifest.json"
        ).is_file():
            return
        manifest = json.loads((step / "manifest.json").read_bytes())
        for name, record in manifest["files"].items():
            if (step / name).is_symlink() or not (step / name).is_file():
                continue  # a pipe, say
            data = (step / name).read_bytes()
            record.update(bytes=len(data), digest=digest_of(data, "xxh3"))
            if record["header_bytes"]:
                record["header_digest"] = digest_of(
                    data[: record["header_bytes"]], "xxh3"
                )
        rewrite_manifest(step, manifest)


def make_case(corpus: Path, folder: Path, seed: int) -> str:
    """Make an input; return the part of the corpus that it is made from."""
    draw = random.Random(seed)
    part = draw.choices(["ours", "dcp", "hub", "file"], [6, 2, 1, 1])[0]
    shutil.copytree(corpus / part, folder / part)
    for _ in range(draw.randint(1, 3)):
        files = sorted(
            file
            for file in (folder / part).rglob("*")
            if file.is_file() and not file.is_symlink()
        )
        if files:
            mutate(draw.choice(files), draw)
    if part == "ours" and draw.random() < 0.8:
        refit(folder / part / "step-00000002")
    return part


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    def hangs(*_: Any) -> None:
        raise AssertionError(f"it hangs: more than {HANG_SECONDS} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANG_SECONDS)
    WATCH.folder = os.path.realpath(folder)
    try:
        yield
    finally:
        WATCH.folder = None
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_cases(corpus: Path, folder: Path, seeds: range, few: int = 100) -> int:
    """Run inputs through all readers, or through ``few`` drawn ones each; return how
    often one refused."""
    refused = 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        case = folder / str(seed)
        (case / "out").mkdir(parents=True)
        part = make_case(corpus, case, seed)
        WATCH.seen.clear()
        numbered = list(enumerate(readers(case, case / "out")[part]))
        for number, reader in random.Random(seed).sample(
            numbered, min(few, len(numbered))
        ):
            what = f"seed {seed}, reader {number} of {part}"
            with watched(case):
                try:
                    reader()
                except CheckpointError:
                    refused += 1
                except Exception as error:
                    raise AssertionError(
                        f"{what}: {type(error).__name__}: {error}"
                    ) from error
            assert WATCH.seen == [], what
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MEMORY_KB, (
            f"seed {seed}"
        )
        shutil.rmtree(case)
    return refused


def test_the_corpus_itself_is_read(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "case")
    (tmp_path / "out").mkdir()
    for part in readers(tmp_path / "case", tmp_path / "out").values():
        for reader in part:
            reader()


def test_the_watch_sees_what_it_should(tmp_path: Path) -> None:
    WATCH.seen.clear()
    with watched(tmp_path / "case"):
        with contextlib.suppress(OSError):
            Path(tmp_path, "outside").write_text("x")
        Path(tmp_path, "outside").unlink()
        Path("/etc/hostname").exists() and Path("/etc/hostname").read_text()
    assert [text.split()[0] for text in WATCH.seen[:2]] == ["open", "os.remove"]


def test_300_inputs(corpus: Path, tmp_path: Path) -> None:
    assert run_cases(corpus, tmp_path, range(SEED, SEED + 300), few=3) > 200


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_10_000_inputs(corpus: Path, tmp_path: Path, part: int) -> None:
    assert (
        run_cases(corpus, tmp_path, range(1000 * (part + 1), 1000 * (part + 2))) > 1000
    )
