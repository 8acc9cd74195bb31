"""What cannot work ends at once, on every rank, with an error that names the value and
says what to type."""

from __future__ import annotations

import functools
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from torch import nn
from torch.utils.data import DataLoader

from lightning_smp import SmpShardedStrategy
from smp_core.config import SmpConfig
from tests.harness import run_ranks
from tests.lightning.modules import (
    LanguageModule,
    LateModule,
    PictureModule,
    token_rows,
)
from tests.lightning.running import make_trainer
from tests.lightning.staged import StagedModule, knobs_of


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"shard_degre": 2}, r"shard_degre.*shard_degree"),
        (
            {"presicion_plugin": None},
            r"unknown argument 'presicion_plugin'; did you mean 'precision_plugin'\?",
        ),
        ({"shard_degree": 0}, r"shard_degree=0.*allowed"),
        (
            {"shard_degree": "pod"},
            r"shard_degree='pod'.*'node'|shard_degree='pod'.*\"node\"",
        ),
        (
            {"config": SmpConfig(), "shard_degree": 2},
            r"config=.*shard_degree.*dataclasses.replace",
        ),
        (
            {"shard_degree": 4, "context_parallel_degree": 8},
            r"context_parallel_degree=8 is larger than shard_degree=4",
        ),
        (
            {"shard_degree": 4, "context_parallel_degree": 3},
            r"context_parallel_degree=3 does not divide.*1, 2, 4",
        ),
        ({"pipeline": "zero-bubble"}, r"pipeline='zero-bubble'.*1f1b.*gpipe"),
        ({"precision": "bf16-mixed"}, r"of Trainer.*Trainer\(precision='bf16-mixed'\)"),
        ({"num_nodes": 2}, r"of Trainer.*Trainer\(num_nodes=2\)"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_bad_knobs_are_refused_by_the_constructor(
    arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        SmpShardedStrategy(**arguments)


@pytest.mark.parametrize(
    "strategy", [DDPStrategy, FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy]
)
def test_arguments_of_another_strategy_get_a_sentence_that_says_what_to_write_here(
    strategy: type,
) -> None:
    own = inspect.signature(SmpShardedStrategy.__init__).parameters
    known = (*own, *SmpConfig.knobs(), "kwargs")
    theirs = [
        name
        for name in inspect.signature(strategy.__init__).parameters
        if name not in known
    ]
    assert theirs
    for name in theirs:
        with pytest.raises(
            ValueError,
            match=rf"'{name}' is an argument of \w+, not a knob.*; (write|leave|tensor_par)",
        ):
            SmpShardedStrategy(**{name: None})


def message_of(case: Callable[..., Any], *args: Any) -> str:
    """The message of the ValueError that ``case`` raises on this rank."""
    try:
        case(*args)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def assert_says(
    case: Callable[..., Any],
    *args: Any,
    words: list[str],
    ranks: int = 2,
    **kwargs: Any,
) -> None:
    for rank, message in enumerate(
        run_ranks(message_of, ranks, case, *args, **{"ranks_per_node": 2, **kwargs})
    ):
        for word in words:
            assert word in message, f"rank {rank}: {word!r} is not in: {message}"


def fit_with(knobs: dict[str, Any]) -> None:
    make_trainer(knobs).fit(LanguageModule())


def test_nccl_on_cpu_is_refused() -> None:
    words = [
        "process_group_backend='nccl'",
        "on CPU; allowed there: 'gloo', 'mpi'; write process_group_backend='gloo'",
    ]
    assert_says(fit_with, {"process_group_backend": "nccl"}, words=words)


class Doubling(StagedModule):
    """Its backward passes would be over before this one is called."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


def fit_in_stages(kind: type[StagedModule], *callbacks: Callback) -> None:
    make_trainer(knobs_of(2), callbacks=list(callbacks)).fit(
        kind(kind="plain", batch_size=8)
    )


def test_a_backward_that_stages_would_pass_over_is_refused() -> None:
    words = [
        "pipeline_parallel_degree: backward of the LightningModule",
        "leave it out",
    ]
    assert_says(fit_in_stages, Doubling, words=words)


class Thaws(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        pass


def test_a_callback_that_looks_at_the_values_of_all_stages_is_refused() -> None:
    words = ["pipeline_parallel_degree: Thaws", "pipeline_parallel_degree=1"]
    assert_says(fit_in_stages, StagedModule, Thaws(), words=words)


def test_a_degree_that_does_not_divide_the_world_is_refused() -> None:
    assert_says(
        fit_with,
        {"shard_degree": 3},
        words=["shard_degree=3", "4 ranks", "1, 2, 4"],
        ranks=4,
    )


def fit_on(devices: int, num_nodes: int) -> None:
    make_trainer({}, devices=devices, num_nodes=num_nodes).fit(LanguageModule())


def test_other_numbers_of_devices_than_processes_on_the_node_are_refused_on_all_ranks() -> (
    None
):
    """Lightning lets both pass: ranks 2 and 3 have no device, or a step half of its
    batch."""
    words = [
        "devices=2, num_nodes=2",
        "4 processes on this node and 4 in all; write Trainer(devices=4, num_nodes=1)",
    ]
    assert_says(fit_on, 2, 2, words=words, ranks=4)
    words = [
        "devices=4, num_nodes=1",
        "2 processes on this node and 2 in all",
        "torchrun --nproc-per-node 4",
    ]
    assert_says(fit_on, 4, 1, words=words, ranks=2)


def test_a_wrap_rule_that_matches_nothing_names_the_classes() -> None:
    assert_says(
        fit_with,
        {"units": ("Blok",), "shard_degree": 2},
        words=["units='Blok'", "did you mean 'Block'"],
    )


@pytest.mark.parametrize("degree", [1, 2])
def test_a_forward_method_that_no_unit_has_is_refused_also_where_nothing_is_gathered(
    degree: int,
) -> None:
    knobs = {"shard_degree": degree, "forward_methods": ["sampel"]}
    assert_says(
        fit_with, knobs, words=["forward_methods='sampel'", "no unit has this method"]
    )


class Uneven(LanguageModule):
    """Ranks that read other numbers of batches: options["train"], options["val"]:
    batches of the last rank, of 4."""

    def _loader(self, batches: int) -> DataLoader[Any]:
        last = dist.get_rank() == dist.get_world_size() - 1
        return DataLoader(token_rows(batches if last else 4), batch_size=8)

    def train_dataloader(self) -> Any:
        return self._loader(self.options["train"])

    def val_dataloader(self) -> Any:
        return self._loader(self.options["val"])


def fit_uneven(train: int, val: int, **flags: Any) -> None:
    make_trainer({"shard_degree": 2}, use_distributed_sampler=False, **flags).fit(
        Uneven(train=train, val=val)
    )


def test_ranks_with_other_numbers_of_batches_end_at_once_and_not_after_a_timeout() -> (
    None
):
    said = "rank 2: 4, rank 3: 3"
    assert_says(
        fit_uneven,
        3,
        4,
        words=["rank 0: 4, rank 1: 4, " + said, "limit_train_batches=3"],
        ranks=4,
    )
    # Evaluation takes any number.
    assert_says(fit_uneven, 4, 3, words=["nothing was raised"], ranks=4)


def test_other_numbers_of_batches_are_fine_where_no_rank_comes_to_its_last() -> None:
    assert_says(
        functools.partial(fit_uneven, max_steps=2, limit_val_batches=2),
        3,
        3,
        words=["nothing was raised"],
    )


def fit_with_plugin(kind: type[CheckpointIO], full: bool) -> None:
    make_trainer(
        {"shard_degree": 2, "checkpoint": {"full_state_dict": full}}, plugins=[kind()]
    ).fit(LanguageModule(batches=1))


def test_async_checkpoint_io_is_refused_for_what_it_does_not_write() -> None:
    assert_says(
        fit_with_plugin,
        AsyncCheckpointIO,
        False,
        words=["AsyncCheckpointIO", "checkpoint='async'"],
    )
    assert_says(fit_with_plugin, AsyncCheckpointIO, True, words=["nothing was raised"])


def test_uneven_nodes_are_refused() -> None:
    assert_says(
        fit_with, {}, words=["SMP_RANKS_PER_NODE", "3", "4"], ranks=4, ranks_per_node=3
    )


class Narrow(LanguageModule):
    """Another architecture under the same names: options["change"]."""

    def build(self) -> None:
        super().build()
        if self.options["change"] == "shape":
            self.model.unused = nn.Linear(8, 6)
        elif self.options["change"] == "layer":
            self.model.added = nn.Linear(8, 6)  # type: ignore[assignment]
        else:
            del self.model.unused


class TwoOptimizers(LanguageModule):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [
            torch.optim.SGD(self.model.blocks.parameters(), 0.1),
            torch.optim.SGD([self.model.gain], 0.1),
        ]


def save(knobs: dict[str, Any], path: str) -> None:
    module = LanguageModule(batches=1)
    trainer = make_trainer(knobs)
    trainer.fit(module)
    trainer.save_checkpoint(path)


def resume(kind: type[LanguageModule], options: dict[str, Any], path: str) -> None:
    make_trainer({"shard_degree": 2}, max_epochs=2).fit(kind(**options), ckpt_path=path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run's checkpoint as a sharded folder and as one file."""
    folder = tmp_path_factory.mktemp("saved")
    paths = {"folder": folder / "sharded", "file": folder / "whole.ckpt"}
    run_ranks(save, 4, {"shard_degree": 4}, str(paths["folder"]), ranks_per_node=2)
    run_ranks(
        save,
        4,
        {"shard_degree": 2, "checkpoint": "full"},
        str(paths["file"]),
        ranks_per_node=2,
    )
    return paths


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    assert_says(resume, LanguageModule, {}, path, words=[path, "no checkpoint"])


@pytest.mark.parametrize("damage", ["manifest", "tensors", "truncated"])
def test_half_a_checkpoint_is_refused(
    damage: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    half = tmp_path / "half"
    shutil.copytree(saved["folder"], half)
    tensors = sorted(half.rglob("*.safetensors"), key=lambda path: path.stat().st_size)[
        -1
    ]
    victim = next(half.rglob("manifest.json")) if damage == "manifest" else tensors
    if damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:-8])
    else:
        victim.unlink()
    assert_says(resume, LanguageModule, {}, str(half), words=[str(half), victim.name])


@pytest.mark.parametrize("foreign", ["folder", "file"])
def test_what_is_no_checkpoint_of_ours_or_lightnings_is_refused(
    foreign: str, tmp_path: Path
) -> None:
    path = tmp_path / "foreign"
    if foreign == "folder":
        path.mkdir()
        (path / "model.bin").write_bytes(b"something else")
    else:
        torch.save({"weights": torch.zeros(2)}, path)
    assert_says(resume, LanguageModule, {}, str(path), words=[str(path)])


@pytest.mark.parametrize("form", ["folder", "file"])
@pytest.mark.parametrize(
    "change, words",
    [
        ("shape", ["model.unused.weight", "5", "6"]),
        ("layer", ["model.added"]),
        ("less", ["model.unused"]),
    ],
)
def test_another_architecture_is_refused(
    change: str, words: list[str], form: str, saved: dict[str, Path]
) -> None:
    path = str(saved[form])
    assert_says(resume, Narrow, {"change": change}, path, words=[*words, path])


@pytest.mark.parametrize("form", ["folder", "file"])
def test_another_number_of_optimizers_is_refused(
    form: str, saved: dict[str, Path]
) -> None:
    words = ["1 optimizers", "made 2", str(saved[form])]
    assert_says(resume, TwoOptimizers, {}, str(saved[form]), words=words)


class Custom:
    """Something of the user's that only pickle could carry."""


class CustomHyperparameter(LanguageModule):
    def build(self) -> None:
        super().build()
        self.save_hyperparameters({"augmentation": Custom(), "width": 8})


def save_custom(knobs: dict[str, Any], path: str) -> None:
    module = CustomHyperparameter(batches=1)
    trainer = make_trainer(knobs)
    trainer.fit(module)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_hyper_parameter_of_a_custom_class_is_named(
    async_save: bool, tmp_path: Path
) -> None:
    path = tmp_path / "custom"
    words = [
        "hyper_parameters.augmentation",
        "Custom",
        "save_hyperparameters(ignore=[...])",
    ]
    assert_says(
        save_custom,
        {"shard_degree": 2, "checkpoint": {"async_save": async_save}},
        str(path),
        words=words,
    )
    assert not path.exists()


class NeverTrained(CustomHyperparameter):
    def on_fit_start(self) -> None:
        raise AssertionError("the run has begun")


def fit_with_checkpoints(folder: str) -> None:
    trainer = make_trainer(
        {"shard_degree": 2}, enable_checkpointing=True, default_root_dir=folder
    )
    trainer.fit(NeverTrained(batches=1))


def test_such_a_hyper_parameter_is_named_before_training(tmp_path: Path) -> None:
    assert_says(
        fit_with_checkpoints,
        str(tmp_path),
        words=["hyper_parameters.augmentation", "save_hyperparameters(ignore=[...])"],
    )


class TakenOut(CustomHyperparameter):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["hyper_parameters"]


def fit_that_takes_it_out(folder: str) -> list[str]:
    knobs = {"shard_degree": 2}
    trainer = make_trainer(knobs, enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(TakenOut(batches=1))
    return sorted(path.name for path in Path(folder).rglob("manifest.json"))


def test_one_that_a_hook_takes_out_of_the_checkpoint_is_no_matter(
    tmp_path: Path,
) -> None:
    assert run_ranks(fit_that_takes_it_out, 2, str(tmp_path)) == [["manifest.json"]] * 2


def save_over_file(path: str) -> None:
    save({"shard_degree": 2}, path)


def test_a_folder_is_not_written_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_text("precious")
    assert_says(save_over_file, str(path), words=[str(path), "is a file"])
    assert path.read_text() == "precious"


def refit(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Two trainers, one module; the words strategy: knobs, others: the Trainer's
    flags."""
    module = PictureModule(batches=1)
    for flags in (first, second):
        knobs = {"shard_degree": 2, **flags.get("strategy", {})}
        rest = {name: value for name, value in flags.items() if name != "strategy"}
        make_trainer(knobs, **{"precision": "64-true", **rest}).fit(module)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"strategy": {"shard_degree": 4}}, ["shard_degree=4", "sharded before", "2"]),
        ({"precision": "32-true"}, ["precision='32-true'", "64-true"]),
        (
            {"sync_batchnorm": True},
            ["sync_batchnorm=True", "sharded before", "model.1"],
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_sharded_module_is_not_sharded_in_another_way(
    flags: dict[str, Any], words: list[str]
) -> None:
    assert_says(refit, {}, flags, words=words)


def fit_meta(kind: type[LanguageModule]) -> None:
    make_trainer({"shard_degree": 2, "delayed_init": True}).fit(kind())


class LateTroubled(LateModule):
    """Its 0-d gain, a bare parameter, has no initialiser."""

    def configure_model(self) -> None:
        LanguageModule.build(self)


def test_a_module_without_initialiser_is_named() -> None:
    assert_says(
        fit_meta, LateTroubled, words=["gain", "TroubledModel", "reset_parameters"]
    )
