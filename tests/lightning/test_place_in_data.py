"""A resumed run goes on with the next sample and the next random number, mid-epoch,
between epochs, on other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
)

from lightning_smp import resume
from smp_core.checkpoint import CheckpointError, read_per_rank, read_rest
from tests.core.models import VOCABULARY
from tests.harness import run_ranks
from tests.lightning.modules import LanguageModule, token_rows
from tests.lightning.running import (
    Run,
    SaveAt,
    assert_same,
    make_trainer,
    report,
    together,
)

BATCHES = 6
EXACT: dict[str, Any] = {"precision": "64-true", "max_epochs": 3}


class Noisy(Dataset[torch.Tensor]):
    """Token rows that reading shifts by a random number, as an augmentation does."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> torch.Tensor:
        return (self.rows[number] + torch.randint(VOCABULARY, ())) % VOCABULARY


class Keeping(DataLoader[Any]):
    """Knows its place: the batches of the epoch that it has given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._later(super().__iter__(), self.given % len(self))

    def _later(self, batches: Iterator[Any], begin: int) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number >= begin:
                self.given = number + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Drawing(LanguageModule):
    """Draws while it reads and while it trains. options: per-rank batch size, workers,
    loaders that keep their place alone or beside another, and who needs the data
    early."""

    def loss(self, tokens: Any) -> torch.Tensor:
        if isinstance(tokens, dict):
            return sum(self.loss(each) for each in tokens.values())  # type: ignore[return-value]
        return super().loss(tokens) * (1 + torch.rand(()))

    def configure_optimizers(self) -> Any:
        if self.options.get("early"):
            # Lightning makes the loaders for it, before it loads.
            assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()

    def train_dataloader(self) -> Any:
        workers = self.options.get("workers", 0)
        rows, size = token_rows(BATCHES), 8 // dist.get_world_size()
        data: Any = rows if workers else Noisy(rows)
        if self.options.get("keeping"):
            keeping = Keeping(rows, batch_size=size)
            return (
                {"keeping": keeping, "other": DataLoader(rows.flip(0), size)}
                if self.options["keeping"] == 2
                else keeping
            )
        if self.options.get("own_batches"):
            return DataLoader(
                data,
                batch_sampler=BatchSampler(RandomSampler(data), size, drop_last=True),
            )
        return DataLoader(data, batch_size=size, shuffle=True, num_workers=workers)


class SaveBetweenEpochs(Callback):
    """Calls trainer.save_checkpoint when an epoch has ended, validation included."""

    def __init__(self, path: str, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def fit(
    folder: str, options: dict[str, Any], place: tuple[int, int | None], load: bool
) -> tuple[list[float], Any]:
    """To the end; saved at ``place``, or loaded from there. Losses of this rank's
    batches, and weights."""
    seed_everything(dist.get_rank(), verbose=False)
    path = f"{folder}/{place}"
    module = Drawing(batches=BATCHES, **options)
    flags = {"use_distributed_sampler": options.get("distributed", True)}
    epoch, batch = place
    saver = (
        SaveBetweenEpochs(path, epoch) if batch is None else SaveAt(path, epoch, batch)
    )
    trainer = make_trainer(
        {"shard_degree": 2}, callbacks=[] if load else [saver], **EXACT, **flags
    )
    trainer.fit(module, ckpt_path=path if load else None)
    return [float(loss) for loss in module.losses], report(trainer, module).weights


def resume_everywhere(
    folder: str, options: dict[str, Any], places: list[tuple[int, int | None]]
) -> list[tuple[float, int]]:
    """For each place: how far losses and weights of the resumed run are off, and how
    many batches it had."""
    found = []
    for place in places:
        losses, weights = fit(folder, options, place, load=False)
        again, weights_again = fit(folder, options, place, load=True)
        rest = losses[len(losses) - len(again) :]
        off = [abs(a - b) for a, b in zip(again, rest, strict=True)]
        off += [
            float((weights_again[name] - value).abs().max())
            for name, value in weights.items()
        ]
        found.append((max(off), len(again)))
    return found


# Epoch, and the batch after which it is saved; None: after the epoch.
PLACES: list[tuple[int, int | None]] = [(1, 2), (0, None)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"place": 0}, id="in an epoch"),
        pytest.param({}, id="", marks=pytest.mark.slow),
        pytest.param(
            {"distributed": False, "own_batches": True},
            id="each rank shuffles for itself",
            marks=pytest.mark.slow,
        ),
        pytest.param({"early": True}, id="loaders made early", marks=pytest.mark.slow),
        pytest.param({"workers": 1}, id="a worker reads", marks=pytest.mark.slow),
        pytest.param(
            {"keeping": 1, "early": True, "place": 1},
            id="a loader that keeps its place, made early, behind an epoch",
        ),
        pytest.param(
            {"keeping": 1, "early": True},
            id="the same at both places",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"keeping": 1}, id="a loader that keeps its place", marks=pytest.mark.slow
        ),
        pytest.param(
            {"keeping": 2, "early": True},
            id="one beside another, made early",
            marks=pytest.mark.slow,
        ),
        pytest.param({"keeping": 2}, id="one beside another", marks=pytest.mark.slow),
    ],
)
def test_the_next_batch_and_the_next_random_number(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """On the same ranks: exact, on every rank."""
    options = dict(options)
    places = [PLACES[options.pop("place")]] if "place" in options else PLACES
    for results in run_ranks(resume_everywhere, 2, str(tmp_path), options, places):
        for (epoch, batch), (off, batches) in zip(places, results, strict=True):
            length = BATCHES if options.get("distributed", True) else 2 * BATCHES
            seen = epoch * length + (length if batch is None else batch + 1)
            assert batches == 3 * length - seen
            assert off <= 1e-12


class Plain(LanguageModule):
    """2 samples a batch on every rank, in the order of DistributedSampler."""

    def train_dataloader(self) -> Any:
        return DataLoader(
            token_rows(BATCHES), batch_size=self.options["size"], shuffle=True
        )


def run_plain(
    knobs: dict[str, Any],
    size: int,
    accumulate: int,
    load: str | None = None,
    save_at: Any = None,
    **options: Any,
) -> Run:
    module = (Streaming if options.get("stream") else Plain)(batches=BATCHES, size=size)
    callbacks = [] if save_at is None else [SaveAt(*save_at)]
    trainer = make_trainer(
        knobs, callbacks=callbacks, accumulate_grad_batches=accumulate, **EXACT
    )
    trainer.fit(module, ckpt_path=load)
    facts = {
        "steps": trainer.global_step,
        "accumulate": trainer.accumulate_grad_batches,
        "batches": len(module.losses),
    }
    return report(trainer, module, **facts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    """A run of 4 ranks with 2 samples each, saved after the third batch of the second
    epoch; and that run."""
    path = str(tmp_path_factory.mktemp("saved") / "place")
    run = together(run_plain, {"shard_degree": 2}, 2, 1, save_at=(path, 1, 2))[0]
    return path, run


def test_the_place_is_kept_in_samples_and_random_states_by_rank(
    saved: tuple[str, Run],
) -> None:
    place = read_rest(saved[0], "smp_data")
    assert place == {
        "batches": 3,
        "samples_per_batch": [8],
        "samples_in_epoch": [24],
        "accumulate_grad_batches": 1,
    }
    assert len(read_per_rank(saved[0])) == 4


def test_on_fewer_ranks_accumulation_keeps_the_global_batch(
    saved: tuple[str, Run],
) -> None:
    """2 ranks with 2 samples each: two micro-batches are one step, and begin with the
    25th sample."""
    path, expected = saved
    for run in together(run_plain, {"shard_degree": 2}, 2, 1, load=path, ranks=2):
        assert run.extra == {
            "steps": expected.extra["steps"],
            "accumulate": 2,
            "batches": 2 * (3 * BATCHES - 9),
        }
        assert_same(run, Run(run.losses, expected.weights, expected.metrics))


def resume_with_other_batches(path: str) -> tuple[str, int, int]:
    with pytest.raises(ValueError) as refused:
        run_plain({"shard_degree": 2}, 3, 1, load=path)
    knobs = {"shard_degree": 2, "checkpoint": {"allow_batch_change": True}}
    with mock.patch.object(resume.logger, "warning") as warned:
        run = run_plain(knobs, 3, 1, load=path)
    said = sum("allow_batch_change" in call.args[0] for call in warned.mock_calls)
    return str(refused.value), run.extra["batches"], said


def test_another_global_batch_is_refused_unless_it_is_allowed(
    saved: tuple[str, Run],
) -> None:
    """3 samples on each of 4 ranks: 12 are no part of 8. Allowed, it goes on with the
    25th sample."""
    found = run_ranks(resume_with_other_batches, 4, saved[0], ranks_per_node=2)
    assert [lines for *_, lines in found] == [1, 0, 0, 0]
    for said, batches, _ in found:
        assert (
            "had 8 samples" in said
            and "has 12 here" in said
            and "{'allow_batch_change': True}" in said
        )
        assert batches == (BATCHES * 8 - 24) // 12 + BATCHES * 8 // 12


class Stream(IterableDataset[torch.Tensor]):
    """Rows of this rank, in order; nothing can be left out without reading it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(token_rows(BATCHES)[dist.get_rank() :: dist.get_world_size()])

    def __len__(self) -> int:
        return 8 * BATCHES // dist.get_world_size()


class Streaming(Plain):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=self.options["size"])


def resume_stream(folder: str) -> tuple[Run, Run]:
    path = f"{folder}/stream"
    whole = run_plain({"shard_degree": 2}, 2, 1, save_at=(path, 1, 2), stream=True)
    return whole, run_plain({"shard_degree": 2}, 2, 1, load=path, stream=True)


def test_a_stream_is_read_up_to_its_place(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(resume_stream, 4, str(tmp_path), ranks_per_node=2):
        assert_same(
            resumed, Run(whole.losses[BATCHES + 3 :], whole.weights, whole.metrics)
        )


class Damage:
    """What happens to the newest checkpoints of a folder, by name."""

    @staticmethod
    def manifest(folder: Path) -> None:
        (folder / "last.ckpt" / "manifest.json").unlink()

    @staticmethod
    def bit(folder: Path) -> None:
        for name in ("last.ckpt", "step=10.ckpt"):
            file = max(
                (folder / name).glob("*.safetensors"),
                key=lambda path: path.stat().st_size,
            )
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)


def fit_keeping(
    folder: str, load: str | None, knobs: dict[str, Any], **flags: Any
) -> Run:
    module = Drawing(batches=BATCHES)
    seed_everything(dist.get_rank(), verbose=False)
    saver = ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        every_n_train_steps=5,
        save_top_k=-1,
        save_last=True,
    )
    trainer = make_trainer(
        {"shard_degree": 2, **knobs},
        callbacks=[saver],
        enable_checkpointing=True,
        **{**EXACT, **flags},
    )
    trainer.fit(module, ckpt_path=load)
    return report(trainer, module, steps=trainer.global_step)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return together(
        fit_keeping, str(tmp_path_factory.mktemp("uncut")), None, {}, ranks=2
    )[0]


def refused_with_a_flipped_bit(folder: str) -> list[str]:
    fit_keeping(folder, None, {}, max_epochs=2)
    dist.barrier()
    if dist.get_rank() == 0:
        Damage.bit(Path(folder))
    dist.barrier()
    errors = []
    for path in ("last", f"{folder}/step=10.ckpt"):
        with pytest.raises(CheckpointError) as raised:
            fit_keeping(folder, path, {})
        errors.append(str(raised.value))
    return errors


def test_no_flipped_bit_is_gone_on_from_at_default_settings(tmp_path: Path) -> None:
    for errors in run_ranks(refused_with_a_flipped_bit, 2, str(tmp_path)):
        assert all("is damaged: its bytes from" in error for error in errors), errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage, knobs, skipped",
    [
        pytest.param("manifest", {}, ["last.ckpt"], marks=pytest.mark.slow),
        ("bit", {"checkpoint": {"verify": "digests"}}, ["last.ckpt", "step=10.ckpt"]),
        pytest.param(
            "bit", {"checkpoint": "full"}, ["last.ckpt"], marks=pytest.mark.slow
        ),
    ],
    ids=["half", "bits flipped", "one file, cut"],
)
def test_last_skips_what_is_broken_and_names_it(
    damage: str,
    knobs: dict[str, Any],
    skipped: list[str],
    uncut: Run,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The run goes on from the newest whole one and ends where the uninterrupted one
    does."""
    folder = tmp_path / "cut"
    together(fit_keeping, str(folder), None, knobs, max_epochs=2, ranks=2)
    if knobs.get("checkpoint") == "full":
        with open(folder / "last.ckpt", "r+b") as file:
            file.truncate(2000)
    else:
        getattr(Damage, damage)(folder)
    capfd.readouterr()
    resumed = together(fit_keeping, str(folder), "last", knobs, ranks=2)
    assert len(resumed[0].losses) == 3 * BATCHES - (5 if len(skipped) == 2 else 10)
    assert_same(resumed, Run(resumed[0].losses, uncut.weights, uncut.metrics))
    assert resumed[0].extra["steps"] == uncut.extra["steps"]
    said = capfd.readouterr()
    for name in skipped:
        assert (
            f"{folder}/{name}" in said.out + said.err
            and "BROKEN CHECKPOINT SKIPPED" in said.out + said.err
        )


def fit_from_weights(folder: str, kinds: list[bool]) -> list[str]:
    said = []
    for whole in kinds:
        trainer = make_trainer(
            {"shard_degree": 2, "checkpoint": {"full_state_dict": whole}}, **EXACT
        )
        trainer.fit(Plain(batches=1, size=2))
        trainer.save_checkpoint(f"{folder}/{whole}.ckpt", weights_only=True)
        with pytest.raises(CheckpointError) as refused:
            make_trainer({"shard_degree": 2}, **EXACT).fit(
                Plain(batches=1, size=2), ckpt_path=f"{folder}/{whole}.ckpt"
            )
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize(
    "kinds",
    [[False], pytest.param([False, True], marks=pytest.mark.slow)],
    ids=["parts", "both"],
)
def test_weights_alone_are_no_run_to_go_on_with(
    kinds: list[bool], tmp_path: Path
) -> None:
    for words in run_ranks(fit_from_weights, 2, str(tmp_path), kinds, ranks_per_node=2):
        for whole, said in zip(kinds, words, strict=True):
            assert f"{tmp_path}/{whole}.ckpt holds weights only" in said
            assert "leave ckpt_path out" in said and "load_from_checkpoint" in said
