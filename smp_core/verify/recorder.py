"""Recorder: what one process of a run writes down for `smp verify`. The faces' own
hooks call it.

    begin          the model and its optimizers are there: weights of the start, hooks on modules
    batch          a batch was read: noted on ranks, replaced by the ranks' batches in one process
    loss           of a micro-batch, before its backward pass
    gradients      complete gradients, before they are clipped
    step_ended     the optimizer has stepped; behind the last step the record is written and the process ends

What is collective is called at the same places on all ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import full_state_dict
from smp_core.cluster import DATA
from smp_core.config import DEFAULTS
from smp_core.engine import ParallelModel
from smp_core.sharding import CpuSyncBatchNorm
from smp_core.torch_facts import DROPOUTS, clean_name, is_absent
from smp_core.verify.activations import Activations, Moments, as_real
from smp_core.verify.batches import NotJoinable, join, map_batch, sample_hashes
from smp_core.verify.request import Request

Weights = dict[str, torch.Tensor]

REFUSED = "smp verify: "
"""How the last line of a process begins that refuses what it was given."""

NOT_JOINABLE = "the batches cannot be joined: "
"""How one process begins its refusal of batches of different shapes."""


@dataclass(eq=False)
class Record:
    """The record of what one process saw.

    Attributes:
        data_rank, data_size: its place among those that read different samples, and
            their number.
        losses: of each step, those of its micro-batches.
        norms: of each step's gradients, before clipping; nan where there were none.
        samples: of each step, hashes of the samples that were read.
        natural: in one process: hashes of the samples that its own loader would have
            given, in order; None: not known.
        events, draws: of the first step's forward passes (:class:`Activations`).
        gradients: of the first step, on rank 0; None: not compared.
        without_gradient: trained parameters that had none in the first step.
        start, first, end: full weights and buffers on rank 0, before training, behind
            the first and the last step.
        digests: sums of each full parameter at the end, of this rank's replica.
        buffers: the same of this rank's own buffers.
        metrics: numbers that the script logged.
        facts: what explains differences: BatchNorm layers, dropout, dtypes, degrees.
        missing: what could not be compared, in words.
    """

    rank: int
    ranks: int
    data_rank: int = 0
    data_size: int = 1
    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    samples: list[list[str]] = field(default_factory=list)
    natural: list[str] | None = None
    events: list[Moments] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)
    gradients: Weights | None = None
    start: Weights = field(default_factory=dict)
    first: Weights = field(default_factory=dict)
    end: Weights = field(default_factory=dict)
    digests: dict[str, tuple[float, ...]] = field(default_factory=dict)
    buffers: dict[str, tuple[float, ...]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


class Recorder:
    """The recorder of this process.

    Args:
        request: what was asked.

    Attributes:
        record: what it has seen.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        # One process stands for all ranks of its layout, and has a record of one.
        self.record = Record(_rank(), request.ranks if request.role == "ranks" else 1)
        self.parallel: ParallelModel | None = None
        self._model: nn.Module | None = None
        self._activations: Activations | None = None
        self._losses: list[float] = []
        self._samples: list[str] = []
        self._batches: dict[str, list[Any]] = {}
        self._given: dict[str, list[Any]] | None = None
        self._read: dict[str, int] = {}
        self._norm = float("nan")

    # The model

    @property
    def has_begun(self) -> bool:
        """The flag of a model that is known."""
        return self._model is not None

    def begin(self, model: nn.Module, parallel: ParallelModel | None) -> None:
        """Begin with a model before its first step. Collective.

        Args:
            model: the whole module.
            parallel: its handle on ranks; None in one process.
        """
        # A face may call this from several hooks; the first counts.
        if self._model is not None:
            return
        self._model, self.parallel = model, parallel
        if parallel is not None:
            self.record.data_rank, self.record.data_size = (
                parallel.mesh.data_rank,
                parallel.mesh.data_size,
            )
        self._note_facts(model)
        # With dropout on, ranks and one process would draw different masks.
        if not self.request.keep_dropout:
            self.record.facts["dropout off"] = turn_off_dropout(model)
        # Before any step, and after dropout: the rest of the run starts from here.
        self.record.start = self._weights()
        self._activations = Activations(model)

    def _note_facts(self, model: nn.Module) -> None:
        facts = self.record.facts
        # Of the model.
        norms = [
            (clean_name(name), each)
            for name, each in model.named_modules()
            if isinstance(each, _BATCH_NORMS)
        ]
        facts["BatchNorm"] = [name for name, norm in norms if norm.training]
        synced = (nn.SyncBatchNorm, CpuSyncBatchNorm)
        facts["BatchNorm per rank"] = [
            n for n, norm in norms if norm.training and not isinstance(norm, synced)
        ]
        parameters = list(model.parameters())
        facts["dtypes"] = sorted(
            {str(each.dtype).removeprefix("torch.") for each in parameters}
        )
        # Which buffers differ matters for the likely cause (BatchNorm).
        facts["buffers"] = [clean_name(name) for name, _ in model.named_buffers()]
        facts["frozen"] = [
            clean_name(name)
            for name, each in model.named_parameters()
            if not each.requires_grad
        ]
        # Of the layout.
        if self.parallel is not None:
            knobs = self.parallel.config
            facts["degrees"] = {
                "shard": self.parallel.mesh.shard_degree,
                "replicate": self.parallel.mesh.replicate_degree,
                "context": knobs.context_parallel_degree,
                "tensor": knobs.tensor_parallel_degree,
                "pipeline": knobs.pipeline_parallel_degree,
            }
            if self.parallel.pipeline is not None:
                facts["calls of a batch"] = self.parallel.pipeline.micro_batches
            facts["stage"] = self.parallel.mesh.stage
            facts["lossy"] = [
                name
                for name in ("compression", "fp8")
                if knobs.asked(name) != getattr(DEFAULTS, name)
            ]
            # Computing in fewer bits widens the tolerance.
            facts["dtypes"] += [
                str(dtype)
                for dtype in (knobs.param_dtype, knobs.reduce_dtype)
                if dtype is not None
            ]

    # The batches

    def batch(self, batch: Any, loader: str = "train") -> Any:
        """Take a batch that was read, and return the one to train on. Ranks note
        theirs; one process gets the ranks'.

        Args:
            loader: which loader it came from, where there are several.
        """
        batch = self.as_computed(batch)
        number = self._read.get(loader, 0)
        self._read[loader] = number + 1
        # One process trains on exactly what the ranks read.
        if self.request.role == "one process":
            given = self._given_batches(loader)
            if number < len(given):
                batch = given[number]
        else:
            # A copy, since training may change the batch in place.
            copy = map_batch(batch, lambda tensor: tensor.detach().to("cpu", copy=True))
            self._batches.setdefault(loader, []).append(copy)
        return batch

    def as_computed(self, batch: Any) -> Any:
        """Return a batch in the dtype that was asked for."""
        return map_batch(batch, _to_double) if self.request.float64 else batch

    def reads(self, batch: Any) -> None:
        """Note the samples of a batch that is trained on."""
        self._samples += sample_hashes(batch)
        self.begins_batch()

    def begins_batch(self) -> None:
        """Note that the step's own code begins: the batch was read."""
        if self._activations is not None:
            self._activations.begin_batch()

    def batches_of_ranks(self, loader: str = "train") -> int:
        """Return how many batches the ranks have read together, in one process."""
        readers = len(list(Path(self.request.batches).glob("batches*.pt")))
        return len(self._given_batches(loader)) * (
            1 if self.request.one_by_one else readers
        )

    def note_sample(self, hash_: str) -> None:
        """Note a sample that is trained on, by its hash."""
        self._samples.append(hash_)

    def _given_batches(self, loader: str) -> list[Any]:
        # Read once: batches of all loaders lie in the same files.
        if self._given is None:
            try:
                self._given = joined_batches(
                    Path(self.request.batches), self.request.one_by_one
                )
            except NotJoinable as error:
                refuse(f"{NOT_JOINABLE}{error}")
        assert self._given is not None
        return self._given.get(loader, [])

    # A step

    def loss(self, value: torch.Tensor | float | None) -> None:
        """Note the loss of a micro-batch: its mean over this rank's samples or tokens,
        weighted as its backward is."""
        if value is None:
            return
        self._losses.append(float(value))

    def enter_backward(self) -> None:
        """Stop looking at forwards, which activation checkpointing repeats in
        backward."""
        if self._activations is not None:
            self._activations.end_forward()

    def leave_backward(self) -> None:
        """Look at forwards again."""
        if self._activations is not None:
            self._activations.is_open = True

    def gradients(self, norm: torch.Tensor | float | None = None) -> None:
        """Note complete gradients, before they are clipped. Collective.

        Args:
            norm: over all ranks, where the trainer has computed it.
        """
        # The norm is computed where the trainer has none, from complete gradients.
        if norm is None:
            norm = self._gradient_norm()
        self._norm = float(norm)
        # Gradients by parameter are large: those of the first step are enough.
        if not self.record.norms and self.record.gradients is None:
            self.record.gradients = self._gradients()

    def _gradient_norm(self) -> torch.Tensor:
        if self.parallel is not None:
            return self.parallel.grad_norm()
        assert self._model is not None
        gradients = [
            parameter.grad
            for parameter in self._model.parameters()
            if parameter.grad is not None
        ]
        return torch.nn.utils.get_total_norm(gradients)

    @property
    def is_last_step(self) -> bool:
        return len(self.record.norms) + 1 >= self.request.steps

    def step_ended(self, metrics: Mapping[str, float] | None = None) -> None:
        """Close a step; behind the last one write the record and end this process.
        Collective.

        Args:
            metrics: numbers that the script has logged so far.
        """
        record = self.record
        record.losses.append(self._losses)
        record.norms.append(self._norm)
        record.samples.append(self._samples)
        # Counts begin anew for the next step.
        self._losses, self._samples, self._norm = [], [], float("nan")
        if len(record.norms) == 1:
            record.first = self._weights()
            if self._activations is not None:
                # Later activations differ by grown rounding, and are not looked at.
                self._activations.close()
                record.events, record.draws = (
                    self._activations.events,
                    self._activations.draws,
                )
                record.facts["float32 inside"] = any(
                    event.dtype == "float32" for event in record.events
                )
        if metrics:
            record.metrics.update(metrics)
        if len(record.norms) >= self.request.steps:
            self.finish()

    def finish(self) -> None:
        """Write the record and end this process, with status 0. Collective."""
        # The end's weights need all ranks, so they come before any rank ends.
        self.record.end = self._weights()
        self._note_digests()
        self.write()
        # A rank that ended earlier would look lost to the others.
        if dist.is_initialized():
            dist.barrier()
        end_process()

    def write(self) -> None:
        """Write the record into the request's folder."""
        folder = self.request.folder
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.record, folder / f"rank{self.record.rank}.pt")
        # Ranks that hold one batch together have equal copies of it: one of them
        # writes.
        if self._batches and self._is_first_of_its_readers():
            torch.save(self._batches, folder / f"batches{self.record.data_rank}.pt")

    def _is_first_of_its_readers(self) -> bool:
        if self.parallel is None:
            return True
        return self.record.rank in self.parallel.mesh.layout.ranks(0, *DATA)

    # Tensors of all ranks

    @torch.no_grad()
    def _weights(self) -> Weights:
        """Return full weights and buffers, on rank 0. Collective."""
        assert self._model is not None
        if self.parallel is None:
            # The names of one process have no wrappers' parts either.
            state: Mapping[str, Any] = self._model.state_dict()
            state = {clean_name(name): value for name, value in state.items()}
            return {
                name: _copy(value)
                for name, value in state.items()
                if isinstance(value, torch.Tensor)
            }
        # Parameters that are gathered at the moment would be saved as such.
        self.parallel.reshard()
        state = full_state_dict(
            self.parallel.model_state(), stages=self.parallel.stage_group
        )
        return {
            name: as_real(value)
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    @torch.no_grad()
    def _gradients(self) -> Weights | None:
        """Return the full gradients of trained parameters, on rank 0: zeros where there
        is none. Collective."""
        assert self._model is not None
        if self.parallel is not None and self.parallel.window.world is not None:
            self.record.missing.append(
                "gradients by parameter (optimizer_shard='world' keeps parts of them)"
            )
            return None
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in self._model.named_parameters():
            own = clean_name(name)
            if is_absent(parameter):
                gradients[own] = parameter
            elif parameter.requires_grad:
                # A gradient of None is compared as zeros.
                gradients[own] = (
                    torch.zeros_like(parameter)
                    if parameter.grad is None
                    else parameter.grad
                )
        if self.parallel is None:
            return {name: _copy(value) for name, value in gradients.items()}
        full = full_state_dict(gradients, stages=self.parallel.stage_group)
        return {name: as_real(value) for name, value in full.items()}

    @torch.no_grad()
    def _note_digests(self) -> None:
        """Note sums of this rank's replica of each parameter, and of its own buffers.
        Collective."""
        if self.parallel is None or self._model is None:
            return
        for name, parameter in self._model.named_parameters():
            if not is_absent(parameter):
                # All shards of this rank's replica: replicas are compared by their
                # sums.
                full = (
                    parameter.full_tensor()
                    if isinstance(parameter, DTensor)
                    else parameter
                )
                self.record.digests[clean_name(name)] = _digest(full)
        for name, buffer in self._model.named_buffers():
            if not isinstance(buffer, DTensor):
                self.record.buffers[clean_name(name)] = _digest(buffer)


# _BatchNorm: torch has no public class over the three.
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return as_real(tensor.detach()).to("cpu", copy=True)


def _digest(tensor: torch.Tensor) -> tuple[float, ...]:
    """Return the sums of the finite elements and of their squares, and how many others
    there are: a mask of -inf is a buffer too."""
    value = as_real(tensor.detach()).double()
    others = value.numel() - int(value.isfinite().sum())
    finite = value.nan_to_num(0.0, 0.0, 0.0)
    return float(finite.sum()), float(finite.square().sum()), float(others)


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def turn_off_dropout(model: nn.Module) -> list[str]:
    """Set the probability of all dropout in a model to 0.

    Returns:
        the modules that had one above 0: dropout layers, also of others' classes, and
            modules with a number under a name with "drop" in it (``attn_drop``,
            ``drop_prob``, ``layerdrop``), which they hand to a function.
    """
    found = []
    for name, module in model.named_modules():
        # Layers, and those of stochastic depth, call their probability `p`.
        kind = type(module).__name__.lower()
        is_layer = (
            isinstance(module, DROPOUTS) or "drop" in kind or kind == "stochasticdepth"
        )
        on = [
            key
            for key, value in vars(module).items()
            if ("drop" in key.lower() or (is_layer and key == "p")) and _is_on(value)
        ]
        for key in on:
            setattr(module, key, 0.0)
        if on:
            found.append(clean_name(name))
    return found


def _is_on(value: Any) -> bool:
    return isinstance(value, float) and 0.0 < value < 1.0


def joined_batches(folder: Path, one_by_one: bool) -> dict[str, list[Any]]:
    """Return what one process trains on, by loader: each batch of all data ranks
    joined, or one after another.

    Raises:
        NotJoinable: batches that differ in more than their number of samples.
    """
    files = sorted(
        folder.glob("batches*.pt"),
        key=lambda path: int(path.stem.removeprefix("batches")),
    )
    # Our own processes wrote them.
    by_rank = [torch.load(path, weights_only=False) for path in files]
    given: dict[str, list[Any]] = {}
    for loader in by_rank[0]:
        # The n-th batches of all ranks belong together; what one rank lacks ends them
        # all.
        together = zip(*(batches.get(loader, []) for batches in by_rank), strict=False)
        if one_by_one:
            given[loader] = [batch for batches in together for batch in batches]
        else:
            given[loader] = [join(batches) for batches in together]
    return given


def refuse(words: str) -> None:
    """End this process with an error of one line, which the parent shows in place of
    the output."""
    print(f"{REFUSED}{words}", file=sys.stderr)
    end_process(2)


def end_process(status: int = 0) -> None:
    """End this process at once by ``os._exit``: the rest of the script, evaluations and
    saves, is not wanted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
