"""The content of checkpoint folders, and of states in memory: what an accelerator has
prepared, written and read.

    state_dict, optimizer_states, lr_schedulers    under the names Lightning's folders have, so that each face loads the
                                                   other's; optimizer states by parameter name
    more_state_dicts                               of the second and later models
    accelerate                                     step, scaler, samplers, registered objects
    per rank                                       random states

A LightningModule's names begin with the name of its model (``model.``); the prefix is
in the folder's metadata and is taken off, or put on, when the other face loads.

Accelerate has no public names for what was prepared and registered: ``_models``,
``_optimizers``, ``_schedulers``, ``_dataloaders`` and ``_custom_objects``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accelerate_smp import loader_places
from accelerate_smp.background import BackgroundSavingAccelerator
from accelerate_smp.handle import parallel_of
from smp_core.checkpoint import (
    AsyncCheckpointer,
    CheckpointError,
    OpenCheckpoint,
    Ranks,
    config_files,
    load_checkpoint,
    load_named_optimizer_state,
    named_optimizer_state,
    names_between,
    open_checked,
    open_checkpoint,
    read_per_rank,
    read_rest,
    read_template,
    restore_random_state,
    save_checkpoint,
    stepped_parameters,
)
from smp_core.checkpoint.memory import MemoryTier
from smp_core.checkpoint.random_state import random_state
from smp_core.comm import KEY as REMAINDERS, load_remainder_state
from smp_core.comm.remainder_state import remainder_state
from smp_core.config import DelayedInit
from smp_core.torch_facts import clean_name, uncompiled

logger = logging.getLogger("smp")

FP8_STATE = "smp_fp8"  # as in Lightning's folders
_OURS = {"module_prefix": "", "trainer": "accelerate"}  # in the manifest
# Tensors that are read into place; the rest (a scheduler's, a registered object's)
# comes whole.
_SHARDED = (
    "state_dict.*",
    "more_state_dicts.*",
    "optimizer_states.*",
    f"{REMAINDERS}.*",
)


def after_commit(
    accelerator: BackgroundSavingAccelerator, what: str, action: Callable[[], object]
) -> None:
    """Do something to older checkpoints on the main process, once the save in flight
    has committed."""
    if not accelerator.is_main_process:
        return
    if accelerator.background_saves is None:
        action()
    else:
        accelerator.background_saves.after_commit(what, action)


def write(
    accelerator: BackgroundSavingAccelerator,
    path: str,
    facts: Mapping[str, Any],
    schedulers: list[Any] | None = None,
    random: dict[str, Any] | None = None,
) -> None:
    """Write the objects that the accelerator has prepared to ``path``. Collective.

    Args:
        facts: for the manifest; ``step`` is the optimizer step.
        schedulers: those to save; default the prepared ones.
        random: this rank's random states; default the present ones.
    """
    state, models = _whole_state(accelerator, schedulers)
    options: dict[str, Any] = {
        "metadata": {**_OURS, **facts},
        "extra_files": config_files(models[0]) if models else {},
        "per_rank": {"random": random or random_state()},
    }
    if (
        accelerator.smp_config.checkpoint.async_save
        and accelerator.background_saves is None
    ):
        accelerator.background_saves = AsyncCheckpointer()
    if accelerator.background_saves is None:
        save_checkpoint(path, state, **options)
    else:
        accelerator.background_saves.save(path, state, **options)


def keep(
    accelerator: BackgroundSavingAccelerator,
    tier: MemoryTier,
    facts: Mapping[str, Any],
    schedulers: list[Any] | None = None,
    random: dict[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Keep in shared memory what :func:`write` writes, without files beside it, and
    ``more``. Collective."""
    state, _ = _whole_state(accelerator, schedulers)
    tier.save(
        {**state, **(more or {})},
        facts["step"],
        {**_OURS, **facts},
        {"random": random or random_state()},
    )


def _whole_state(
    accelerator: BackgroundSavingAccelerator, schedulers: list[Any] | None
) -> tuple[dict[str, Any], list[nn.Module]]:
    """Return the state of the prepared objects, and the models. Collective."""
    models = _models(accelerator)
    state: dict[str, Any] = {}
    if models:
        state["state_dict"] = _model_state(models[0])
    if len(models) > 1:
        state["more_state_dicts"] = [_model_state(model) for model in models[1:]]
    # What steps them.
    optimizers = _optimizers(accelerator)
    state["optimizer_states"] = [
        _optimizer_state(_owner(models, each), each) for each in optimizers
    ]
    saved_schedulers = accelerator._schedulers if schedulers is None else schedulers
    state["lr_schedulers"] = [scheduler.state_dict() for scheduler in saved_schedulers]
    # The place in the data, and what else Accelerate saves.
    scaler = None if accelerator.scaler is None else accelerator.scaler.state_dict()
    loaders = [loader_places.state_of(loader) for loader in accelerator._dataloaders]
    custom = [obj.state_dict() for obj in accelerator._custom_objects]
    state["accelerate"] = {
        "step": accelerator.step,
        "scaler": scaler,
        "dataloaders": loaders,
        "custom_objects": custom,
    }
    # What sharding keeps: remainders of compression, scales of FP8.
    handles = [parallel_of(model) for model in models]
    handle = handles[0] if handles else None
    if handle is not None:
        state.update(remainder_state(handle.traffic))
    scales: list[dict[str, Any] | None] = []
    for each in handles:
        fp8 = None if each is None else each.fp8
        scales.append(None if fp8 is None else fp8.state_dict())
    if any(scales):
        state[FP8_STATE], *state["more_" + FP8_STATE] = scales
    return state, models


def read(
    accelerator: BackgroundSavingAccelerator,
    path: str | os.PathLike[str],
    schedulers: list[Any],
    strict: bool = True,
    random: bool = True,
) -> None:
    """Load ``path`` into the objects that the accelerator has prepared, and into
    ``schedulers``. Collective.

    Args:
        random: also the random states.
    """
    models = _models(accelerator)
    # Opened once: all parts, on all ranks, are of one save, whatever becomes of the
    # path meanwhile.
    verify = (
        "sizes"
        if isinstance(path, OpenCheckpoint)
        else accelerator.smp_config.checkpoint.verify
    )
    path = open_checked(
        path, verify, Ranks(), f"checkpoint {os.fspath(path)} was not loaded"
    )
    rest: dict[str, Any] = read_rest(path, tensors=["*"], exclude=_SHARDED)
    accelerator.resume_counting(path.manifest.step or 0)
    load_weights(models[0] if models else None, path, strict, "sizes")
    # Models are matched by their order.
    extra = rest.get("more_state_dicts", [])
    if len(extra) != max(len(models) - 1, 0):
        raise CheckpointError(
            f"{path.address} holds {len(extra) + 1} models but {len(models)} were prepared; prepare the same ones in "
            "the same order"
        )
    if extra:
        more = [
            _template(model, path, ("more_state_dicts", number))
            for number, model in enumerate(models[1:])
        ]
        load_checkpoint(path, {"more_state_dicts": more}, strict=strict, verify="sizes")
        for model, state in zip(models[1:], more, strict=True):
            _take_model_state(model, state)
    # After the weights: masters and scales follow from them.
    load_optimizers(models, _optimizers(accelerator), path, rest)
    handle = parallel_of(models[0]) if models else None
    if handle is not None:
        load_remainder_state(handle.traffic, path)
    _load_fp8(models, path, rest)
    # A folder of Lightning has no section of ours; its schedules are taken if there are
    # as many.
    ours, schedules = rest.get("accelerate"), rest.get("lr_schedulers", [])
    if ours is None:
        same = len(schedulers) == len(schedules)
        loaded = (
            "weights, optimizers and schedulers"
            if same
            else "weights and optimizers, but no schedulers,"
        )
        logger.warning(
            "%s was not saved by Accelerate: %s were loaded", path.address, loaded
        )
        if same:
            _load_each("schedulers", schedulers, schedules, path)
    else:
        _load_each("schedulers", schedulers, schedules, path)
        accelerator.step = ours["step"]
        if accelerator.scaler is not None and ours["scaler"] is not None:
            accelerator.scaler.load_state_dict(ours["scaler"])
        for loader, saved in loader_places.pairs(
            accelerator._dataloaders, ours["dataloaders"]
        ):
            loader_places.restore(loader, saved, path.address)
        _load_each(
            "registered objects",
            accelerator._custom_objects,
            ours["custom_objects"],
            path,
        )
        if random:
            restore_random(
                accelerator,
                path,
                (accelerator.smp_config.delayed_init or DelayedInit()).seed,
            )


def restore_random(
    accelerator: BackgroundSavingAccelerator, path: str | os.PathLike[str], seed: int
) -> None:
    """Give each rank its random states; on another number of ranks, new ones from
    (seed, step, rank)."""
    path = open_checkpoint(path)
    if any(isinstance(part, dict) and "random" in part for part in read_per_rank(path)):
        restore_random_state(
            path, accelerator.state.process_index, accelerator.state.num_processes, seed
        )


def load_weights(
    model: nn.Module | None,
    path: str | os.PathLike[str],
    strict: bool = True,
    verify: str | None = "auto",
) -> None:
    """Load the (first) model's weights from a folder of either face, in place.
    Collective."""
    if model is None:
        return
    handle = parallel_of(model)
    if handle is not None:
        handle.reshard()
    opened = open_checked(
        path, verify, Ranks(), f"weights of {os.fspath(path)} were not loaded"
    )
    # A LightningModule's names begin with its attribute's.
    prefix = opened.manifest.metadata.get("module_prefix", "")
    name_there = names_between("", prefix)
    state = _template(model, opened, ("state_dict",), name_there)
    there = {name_there(name): value for name, value in state.items()}
    load_checkpoint(opened, {"state_dict": there}, strict=strict, verify="sizes")
    _take_model_state(model, {name: there[name_there(name)] for name in state})
    if handle is not None and handle.fp8 is not None:
        handle.fp8.refresh_weights()


def _model_state(model: nn.Module) -> dict[str, Any]:
    handle = parallel_of(model)
    if handle is not None:
        return handle.model_state()
    state = _bare(model).state_dict()
    return {clean_name(name): value for name, value in state.items()}


def _bare(model: nn.Module) -> nn.Module:
    """Return the model without DDP around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    handle = parallel_of(model)
    return (
        named_optimizer_state(model, optimizer)
        if handle is None
        else handle.optimizer_state(optimizer)
    )


def _template(
    model: nn.Module,
    path: OpenCheckpoint,
    prefix: tuple[Any, ...],
    name_there: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Return a model's state to be loaded into.

    Args:
        prefix: where the checkpoint has it.
    """
    template = _model_state(model)
    for name in template:
        # What a module returns for itself may have another structure by now.
        if name.rpartition(".")[2] == "_extra_state":
            place = (*prefix, name_there(name))
            with contextlib.suppress(CheckpointError):  # load_checkpoint says it
                template[name] = read_template(path, place, _empty)
    return template


def _empty(place: Any, name: str, record: Any) -> torch.Tensor:
    return torch.empty(record.shape, dtype=record.dtype)


def _take_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Let a model take up what was loaded: its own hooks run. Collective for errors in
    them."""
    handle = parallel_of(model)

    def take() -> None:
        if handle is None:
            bare = _bare(model)
            own_names = {clean_name(name): name for name in bare.state_dict()}
            shown = {own_names.get(name, name): state[name] for name in state}
            bare.load_state_dict(shown, strict=False)
        else:
            handle.take_model_state(state)

    Ranks().together(f"the loaded state of {type(model).__name__} was not taken", take)


def _load_fp8(
    models: list[nn.Module], path: OpenCheckpoint, rest: dict[str, Any]
) -> None:
    """Load the FP8 scales, after the weights."""
    name_there = names_between("", path.manifest.metadata.get("module_prefix", ""))
    saved = [rest.get(FP8_STATE), *rest.get("more_" + FP8_STATE, [])]
    for number, handle in enumerate(map(parallel_of, models)):
        state = saved[number] if number < len(saved) else None
        if handle is not None and handle.fp8 is not None:
            handle.fp8.load_state_dict(state, name_there)
        elif state is not None:
            logger.info(
                "%s has FP8 scales, which are not used: this run computes without FP8",
                path.address,
            )


def load_optimizers(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    path: str | os.PathLike[str],
    rest: dict[str, Any],
) -> None:
    """Load optimizer states, by parameter name, on any sharding. Collective."""
    path = open_checkpoint(path)
    saved = rest.get("optimizer_states", [])
    if len(saved) != len(optimizers):
        raise CheckpointError(
            f"{os.fspath(path)} holds states of {len(saved)} optimizers but {len(optimizers)} were prepared; prepare "
            "the same ones in the same order"
        )
    name_there = names_between("", path.manifest.metadata.get("module_prefix", ""))
    for number, optimizer in enumerate(optimizers):
        owner = _owner(models, optimizer)
        load_named_optimizer_state(
            path,
            ("optimizer_states", number),
            owner,
            optimizer,
            name_there,
            verify="sizes",
        )


def _models(accelerator: BackgroundSavingAccelerator) -> list[nn.Module]:
    # What is saved are shards, and rank 0's buffers on all ranks.
    for handle in map(parallel_of, accelerator._models):
        if handle is not None:
            handle.reshard()
            handle.broadcast_buffers()
    return [uncompiled(model) for model in accelerator._models]


def _optimizers(accelerator: BackgroundSavingAccelerator) -> list[Optimizer]:
    return [
        getattr(optimizer, "optimizer", optimizer)
        for optimizer in accelerator._optimizers
    ]


def _owner(models: list[nn.Module], optimizer: Optimizer) -> nn.Module:
    """Return the model by whose parameters an optimizer's states are named: the one that
    it steps, or a list of all, where each name begins with the model's place."""
    stepped = {id(parameter) for parameter in stepped_parameters(optimizer)}
    for owner in (*models, nn.ModuleList(models)):
        if stepped <= {id(parameter) for parameter in owner.parameters()}:
            return owner
    raise CheckpointError(
        "an optimizer steps parameters of no model that was prepared; its states cannot be named: prepare the model, "
        "and make the optimizer from its parameters"
    )


def _load_each(what: str, objects: list[Any], saved: list[Any], path: Any) -> None:
    if len(objects) != len(saved):
        raise CheckpointError(
            f"{os.fspath(path)} holds {len(saved)} {what} but there are {len(objects)} here; prepare or register the "
            "same ones"
        )
    for obj, state in zip(objects, saved, strict=True):
        obj.load_state_dict(state)
