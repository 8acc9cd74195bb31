"""Runs of one random case: `OneProcess`, plain torch over all ranks' batches, and
`OnRanks`, torch-smp over its own.

Both go through the same script (`tests.core.fuzz.operations`) and record what a user
sees on the way: losses, norms, gradients before each step, and at the end weights,
gradients and optimizer states, whole.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import load_checkpoint, save_checkpoint
from smp_core.checkpoint.optimizers import (
    load_named_optimizer_state,
    named_optimizer_state,
)
from smp_core.cluster.mesh import SmpMesh
from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import build_mesh, parallelize
from smp_core.sharding.gradients.accumulation import AccumulationWindow
from smp_core.sharding.optimizer.grad_norm import (
    NonfiniteGradNormError,
    clip_grad_value_,
)
from smp_core.sharding.weights.delayed_init import materialize
from smp_core.topology import Topology
from tests.core.fuzz.cases import Case, config_of
from tests.core.fuzz.families import FAMILIES
from tests.core.fuzz.models import LENGTH, WIDTH, Adapted
from tests.core.fuzz.optimizers import late_group, make_optimizer

Tensors = dict[str, torch.Tensor | None]
Record = tuple[str, Any]

FIRST_WEIGHTS, OTHER_WEIGHTS = 0, 17


class Run:
    """What operations ask of a run; the parts that one process and ranks do in the same
    words are here.

    Attributes:
        model: the model, or the container of several that are parallelized apart.
        data_ranks: the data ranks whose batches this process computes.
        records: what was seen so far, by label.
    """

    sample_shape = (LENGTH, WIDTH)
    alone: bool

    def __init__(self, case: Case, data_ranks: Iterable[int]) -> None:
        self.case, self.family = case, FAMILIES[case.model]
        self.data_ranks = list(data_ranks)
        self.records: list[Record] = []
        self.model: nn.Module
        self.optimizers: list[torch.optim.Optimizer] = []
        self.has_late_group = False
        self._ends_with: Callable[[], None] | None = None

    @contextlib.contextmanager
    def ending_calls(self, with_: Callable[[], None]) -> Iterator[None]:
        """Let calls inside end with a function."""
        self._ends_with = with_
        try:
            yield
        finally:
            self._ends_with = None

    def end_call(self) -> None:
        """End the call of all ranks; what its end is inside of the call is done
        there."""
        if self._ends_with is not None:
            self._ends_with()

    def record(self, label: str, value: Any) -> None:
        self.records.append((label, value))

    @property
    def models(self) -> list[nn.Module]:
        """What is parallelized: the model, or each of several."""
        return (
            list(self.model.children()) if self.case.entry == "apart" else [self.model]
        )

    def chosen(self, number: int | None) -> list[torch.optim.Optimizer]:
        return self.optimizers if number is None else [self.optimizers[number]]

    def parameters_of(self, number: int) -> Iterator[nn.Parameter]:
        """Those of the part of the model that the optimizer is for."""
        prefix = self.case.optimizers[number]["part"]
        return (
            parameter
            for name, parameter in self.model.named_parameters()
            if name.startswith(prefix)
        )

    def add_late_parameters(self) -> None:
        if not self.has_late_group:
            self.has_late_group = True
            for spec, optimizer in zip(
                self.case.optimizers, self.optimizers, strict=True
            ):
                group = late_group(spec, self.model)
                if group is not None:
                    optimizer.add_param_group(group)

    def build(self, knobs: Mapping[str, Any], draw: int) -> nn.Module:
        if knobs.get("delayed_init"):
            return self.family.on_meta()
        torch.manual_seed(draw)
        return self.family.build().double()

    def finish(self) -> list[Record]:
        """What is left when the script is over."""
        self.close()
        self.record("gradients", self.gradients())
        self.record(
            "weights", {name: whole(p) for name, p in self.model.named_parameters()}
        )
        for number in range(len(self.optimizers)):
            self.record(f"states of optimizer {number}", self.states(number))
        return self.records

    # What differs

    def call(self, x: torch.Tensor, path: str) -> torch.Tensor:
        raise NotImplementedError

    def holding(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        raise NotImplementedError

    def weights_changed(self) -> None:
        raise NotImplementedError

    def clip_grad_norm(
        self, most: float, kind: float, parameters: Sequence[nn.Parameter] | None
    ) -> torch.Tensor:
        raise NotImplementedError

    def clip_grad_value(
        self, most: float, parameters: Sequence[nn.Parameter] | None
    ) -> None:
        raise NotImplementedError

    def grad_norm(self, kind: float) -> torch.Tensor:
        raise NotImplementedError

    def gradients(self) -> Tensors:
        raise NotImplementedError

    def states(self, number: int) -> dict[str, Any]:
        raise NotImplementedError

    def save(self, name: str) -> None:
        raise NotImplementedError

    def load(self, name: str, knobs: Mapping[str, Any] | None) -> None:
        raise NotImplementedError


class OneProcess(Run):
    """What is expected."""

    alone = True

    def __init__(self, case: Case) -> None:
        super().__init__(case, range(case.data_ranks))
        self.model = self.build(case.knobs, FIRST_WEIGHTS)
        delayed = config_of(case.knobs).delayed_init
        if delayed is not None:
            for module in self.models:
                materialize(module, torch.device("cpu"), seed=delayed.seed)
        self.optimizers = [make_optimizer(spec, self.model) for spec in case.optimizers]
        self._saved: dict[str, Any] = {}
        self._take(case.knobs)

    def _take(self, knobs: Mapping[str, Any]) -> None:
        self.nonfinite = knobs.get("on_nonfinite_grad_norm", "ignore")
        self._computes_in = (
            torch.bfloat16 if knobs.get("param_dtype") == "bfloat16" else None
        )

    def call(self, x: torch.Tensor, path: str) -> torch.Tensor:
        # Each rank rounds its own gradients, and adds up in more digits.
        if self._computes_in is not None:
            with rounded(self.model, self._computes_in):
                return self.model(x.to(self._computes_in), path)
        return (self.model if self.case.entry == "forward" else self.model.step)(
            x, path
        )  # type: ignore[operator]

    def holding(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def weights_changed(self) -> None:
        pass

    def clip_grad_norm(
        self, most: float, kind: float, parameters: Sequence[nn.Parameter] | None
    ) -> torch.Tensor:
        parameters = list(self.model.parameters()) if parameters is None else parameters
        total = self.grad_norm(kind, parameters)
        if not total.isfinite() and self.nonfinite == "raise":
            raise NonfiniteGradNormError
        if not total.isfinite() and self.nonfinite == "skip":
            for parameter in parameters:
                parameter.grad = None
            return total
        # Torch's own finds no largest element where there is none.
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= torch.clamp(most / (total + 1e-6), max=1.0)
        return total

    def clip_grad_value(
        self, most: float, parameters: Sequence[nn.Parameter] | None
    ) -> None:
        for parameter in self.model.parameters() if parameters is None else parameters:
            # Torch's own fails where there is no gradient at all.
            if parameter.grad is not None:
                parameter.grad.clamp_(-most, most)

    def grad_norm(
        self, kind: float, parameters: Sequence[nn.Parameter] | None = None
    ) -> torch.Tensor:
        members = self.model.parameters() if parameters is None else parameters
        given = [
            parameter.grad.reshape(-1)
            for parameter in members
            if parameter.grad is not None
        ]
        flat = torch.cat([torch.zeros(1, dtype=torch.float64), *given])
        return torch.linalg.vector_norm(flat, kind)

    def gradients(self) -> Tensors:
        return {
            name: None if p.grad is None else p.grad.clone()
            for name, p in self.model.named_parameters()
        }

    def states(self, number: int) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        optimizer = self.optimizers[number]
        return {names[p]: dict(entry) for p, entry in optimizer.state.items() if entry}

    def save(self, name: str) -> None:
        groups = [
            [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in self.optimizers
        ]
        states = [self.states(number) for number in range(len(self.optimizers))]
        self._saved[name] = copy.deepcopy((self.model.state_dict(), groups, states))

    def load(self, name: str, knobs: Mapping[str, Any] | None) -> None:
        weights, every_groups, every_states = copy.deepcopy(self._saved[name])
        self.model.load_state_dict(weights)
        by_name = dict(self.model.named_parameters())
        for optimizer, groups, states in zip(
            self.optimizers, every_groups, every_states, strict=True
        ):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(saved)
            optimizer.state.clear()
            optimizer.state.update(
                {by_name[name]: entry for name, entry in states.items()}
            )
        if knobs is not None:  # new objects
            self._take(knobs)
            self.abandon()


class OnRanks(Run):
    """What is tried.

    Args:
        folder: where checkpoints may be written, the same on all ranks.
        meshes: made so far in this process group; making groups takes longer than most
            of what is done with them.
    """

    alone = False

    def __init__(
        self, case: Case, folder: Path, meshes: dict[Any, tuple[SmpMesh, SmpConfig]]
    ) -> None:
        self._folder, self._meshes = folder, meshes
        self.handles: list[ParallelModel] = []
        super().__init__(case, [])
        self._start(
            case.knobs, FIRST_WEIGHTS if dist.get_rank() == 0 else OTHER_WEIGHTS
        )
        self.data_ranks = [self.handles[0].mesh.data_rank]

    def _start(self, knobs: Mapping[str, Any], draw: int) -> None:
        self.model, self.handles = self.build(knobs, draw), []
        for module in self.models:
            mesh, config = self._mesh(config_of(knobs))
            entry: Any = "forward" if self.case.entry == "apart" else self.case.entry
            self.handles.append(parallelize(module, config, mesh=mesh, entry=entry))
        self.optimizers = [
            make_optimizer(spec, self.model) for spec in self.case.optimizers
        ]
        for number, optimizer in enumerate(self.optimizers):
            self._handle_of(number).prepare_optimizer(optimizer)

    def _mesh(self, config: SmpConfig) -> tuple[SmpMesh, SmpConfig]:
        """A mesh that was made for the same layout, and the config with what was
        resolved then."""
        decisive = (
            "shard_degree",
            "collectives.hierarchical",
            "reshard_after_forward",
            "keep_between_micro_batches",
        )
        key = tuple(
            (knob, type(value), value)
            for knob in decisive
            for value in [attrgetter(knob)(config)]
        )
        if key not in self._meshes:
            self._meshes[key] = build_mesh(config, Topology.discover(), "cpu")
        mesh, resolved = self._meshes[key]
        for knob in decisive:
            if attrgetter(knob)(resolved) != attrgetter(knob)(config):
                config = config.with_resolved(
                    knob, attrgetter(knob)(resolved), "as for this layout before"
                )
        return mesh, config

    def _handle_of(self, number: int) -> ParallelModel:
        return self.handles[number if len(self.handles) > 1 else 0]

    def call(self, x: torch.Tensor, path: str) -> torch.Tensor:
        if self.case.entry == "forward":
            return self.model(x, path)
        if self.case.entry == "apart":
            return self.model.step(x, path)  # type: ignore[operator]

        def step(x: torch.Tensor, path: str) -> torch.Tensor:
            output = self.model.step(x, path)  # type: ignore[operator]
            self.end_call()
            return output  # type: ignore[no-any-return]

        return self.handles[0].run_as_forward(step, x, path)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def holding(self, enabled: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in self.handles:
                stack.enter_context(handle.window.accumulate(enabled))
            yield

    def close(self) -> None:
        for handle in self.handles:
            handle.window.close()

    def abandon(self) -> None:
        for handle in self.handles:
            handle.window.abandon()

    def weights_changed(self) -> None:
        """In the middle of a window units may be kept gathered, and have to be told."""
        for handle in self.handles:
            if handle.window.is_open:
                handle.reshard()

    def clip_grad_norm(
        self, most: float, kind: float, parameters: Sequence[nn.Parameter] | None
    ) -> torch.Tensor:
        return self._handle_with(parameters).clip_grad_norm_(most, kind, parameters)

    def clip_grad_value(
        self, most: float, parameters: Sequence[nn.Parameter] | None
    ) -> None:
        for handle in (
            self.handles if parameters is None else [self._handle_with(parameters)]
        ):
            clip_grad_value_(handle.stepped(parameters), most)

    def grad_norm(self, kind: float) -> torch.Tensor:
        parts = torch.stack([handle.grad_norm(kind) for handle in self.handles])
        return (
            parts.max() if math.isinf(kind) else torch.linalg.vector_norm(parts, kind)
        )

    def _handle_with(self, parameters: Sequence[nn.Parameter] | None) -> ParallelModel:
        if parameters is None:
            return self.handles[0]
        wanted = {id(parameter) for parameter in parameters}
        return next(
            handle
            for handle in self.handles
            if wanted & {id(p) for p in handle.module.parameters()}
        )

    def gradients(self) -> Tensors:
        found = {
            name: None if p.grad is None else whole(p.grad)
            for name, p in self.model.named_parameters()
        }
        for handle in self.handles:
            found.update(self._gradients_of_masters(handle))
        return found

    def _gradients_of_masters(self, handle: ParallelModel) -> Tensors:
        window = handle.window
        assert isinstance(window, AccumulationWindow)
        names = {
            id(parameter): name for name, parameter in self.model.named_parameters()
        }
        found: Tensors = {}
        for shard in [] if window.world is None else window.world.shards:
            given = {
                i: master.grad
                for i, master in enumerate(shard.masters)
                if master.grad is not None
            }
            for i, gradient in shard.put_together(given).items():
                found[names[id(shard.parameters[i])]] = whole(gradient)
        return found

    def states(self, number: int) -> dict[str, Any]:
        state = named_optimizer_state(self.model, self.optimizers[number])["state"]
        return {
            name: {
                key: whole(value) if isinstance(value, torch.Tensor) else value
                for key, value in entry.items()
            }
            for name, entry in state.items()
            if entry
        }

    def save(self, name: str) -> None:
        optimizers = {
            str(number): named_optimizer_state(
                self._handle_of(number).module, optimizer
            )
            for number, optimizer in enumerate(self.optimizers)
        }
        models = {
            str(number): handle.model_state()
            for number, handle in enumerate(self.handles)
        }
        save_checkpoint(
            self._folder / name, {"models": models, "optimizers": optimizers}
        )

    def load(self, name: str, knobs: Mapping[str, Any] | None) -> None:
        if knobs is not None:
            flags = {
                name: parameter.requires_grad
                for name, parameter in self.model.named_parameters()
            }
            merged = [
                module.is_merged
                for module in self.model.modules()
                if isinstance(module, Adapted)
            ]
            self._start(knobs, OTHER_WEIGHTS + 1)
            if self.has_late_group:
                self.has_late_group = False
                self.add_late_parameters()
            for name_, parameter in self.model.named_parameters():
                parameter.requires_grad_(flags[name_])
            for module in self.model.modules():
                if isinstance(module, Adapted):
                    module.is_merged = merged.pop(0)
        verify = self.handles[0].config.checkpoint.verify
        for handle in self.handles:
            handle.reshard()
        state: dict[str, Any] = {
            str(number): handle.model_state()
            for number, handle in enumerate(self.handles)
        }
        load_checkpoint(self._folder / name, {"models": state}, verify=verify)
        for number, handle in enumerate(self.handles):
            handle.take_model_state(state[str(number)])
        for number, optimizer in enumerate(self.optimizers):
            module = self._handle_of(number).module
            load_named_optimizer_state(
                self._folder / name,
                ("optimizers", str(number)),
                module,
                optimizer,
                verify=verify,
            )


@contextlib.contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let modules compute with rounded parameters. (functional_call of torch 2.13
    leaves them in modules that several others share.)"""
    made = {
        parameter: parameter.to(dtype)
        for parameter in model.parameters()
        if parameter.numel()
    }
    before = [(module, dict(module._parameters)) for module in model.modules()]
    for module, parameters in before:
        module._parameters.update(
            {name: made.get(p, p) for name, p in parameters.items() if p is not None}
        )  # type: ignore[arg-type, misc]
    try:
        yield
    finally:
        for module, parameters in before:
            module._parameters.update(parameters)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of all of it. Collective where it is sharded."""
    return (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        .detach()
        .clone()
    )
