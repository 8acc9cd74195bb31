"""ParallelModel: the handle of a parallelized module, which both faces, loops of one's
own and checkpoints use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_core.activations import NO_ACTIVATION_MEMORY_SAVED, ActivationMemory
from smp_core.checkpoint import Ranks, map_tensors, named_optimizer_state
from smp_core.cluster import DEGREES, SmpMesh, broadcast_from_rank_0, degrees_of
from smp_core.comm import CommMeter, Traffic
from smp_core.config import DEFAULTS, SmpConfig, lines_about_asked, table_as_text
from smp_core.context_parallel import ContextParallel
from smp_core.engine.decide import lines_of_subjects
from smp_core.expert_parallel import BalancedRouters
from smp_core.fp8 import Fp8Model
from smp_core.outside import changed
from smp_core.pipeline import Pipeline, states_of_all_stages
from smp_core.plan import Plan
from smp_core.plan.chain import EXTRA_STATE
from smp_core.sharding import ReplacedParameters, load_full_state
from smp_core.sharding.fsdp import Calls, ShardedUnit, name_uncalled, reshard
from smp_core.sharding.gradients import Window, require_same_collectives
from smp_core.sharding.optimizer import (
    clip_grad_norm_,
    like,
    local_of,
    master_dtype,
    prepare_optimizer,
)
from smp_core.sharding.optimizer.grad_norm import grad_norm
from smp_core.sharding.weights.unsharded import unsharded
from smp_core.tensor_parallel import SplitModel
from smp_core.torch_facts import (
    clean_name,
    is_absent,
    lies_in,
    load_host_master,
    model_parameter,
    parameters_of,
    with_host_master,
)

logger = logging.getLogger("smp")

REPORT_LINES = 15


@dataclass(frozen=True, eq=False)
class ParallelModel:
    """A parallelized model with what steps it.

    Attributes:
        module: what this rank computes of it: all, or its pipeline stage's layers.
        units: its sharded units.
        window: the gradients between a step's first micro-batch and the step.
        calls: decides which tensors modules show, inside of calls and between them.
        replaced: the parameters of before sharding.
        plan: what was decided about it, and why.
        fp8: scales of FP8 layers of ours; None without.
        context: splits its batches where ranks share sequences; None elsewhere.
        tensor: what is split over tensor ranks; None without.
        pipeline: the pipeline that this rank has a stage of; None without.
        routers: what balances the routers of its experts.
        fp8_region: makes the context that another library's FP8 layers want around
            forward.
    """

    module: nn.Module
    units: tuple[ShardedUnit, ...]
    window: Window
    calls: Calls
    replaced: ReplacedParameters
    mesh: SmpMesh
    plan: Plan
    meter: CommMeter
    # What sends; and then what each conversion left, if it was asked for.
    traffic: Traffic
    activations: ActivationMemory = NO_ACTIVATION_MEMORY_SAVED
    fp8: Fp8Model | None = None
    context: ContextParallel | None = None
    fp8_region: Callable[[], AbstractContextManager[Any]] = nullcontext
    tensor: SplitModel | None = None
    pipeline: Pipeline | None = None
    routers: BalancedRouters | None = None

    @property
    def config(self) -> SmpConfig:
        """The knobs in effect, with what was asked and why."""
        return self.plan.knobs

    def stored_parameters(self) -> list[Tensor]:
        """List the shards and the replicated parameters, also where
        ``module.parameters()`` has unsharded ones in between."""
        # Without units everything is replicated.
        if not self.units:
            return list(self.module.parameters())
        # Sharded parameters are the units'; replicated ones the plan names.
        named = dict(self.module.named_parameters())
        shards = [parameter for unit in self.units for parameter in unit.parameters()]
        return [*shards, *(named[name] for name in self.plan.shapes.units.replicated)]

    def run_as_forward(
        self, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call ``method`` of the module (``training_step``) with the module's own
        parameters unsharded."""
        # Outside of a step the user may have frozen or thawed masters.
        if self.window.world is not None:
            self.window.world.follow_flags()
        with self.fp8_region():
            try:
                # The root's own parameters: those of inner units are gathered where
                # these are called.
                for unit in self.units:
                    if unit.module is self.module and unit.parameter_names:
                        return self.calls.run_as_forward(unit, method, *args, **kwargs)
                return method(*args, **kwargs)
            except RuntimeError as error:
                name_uncalled(error, self.units)
                raise

    def call(self, submodule: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a submodule by itself, outside of the model's forward, with the
        parameters of its unit unsharded. Collective.

        Raises:
            ValueError: it is no module of the model.
        """
        named = self.module.named_modules()
        name = next((name for name, module in named if module is submodule), None)
        if name is None:
            raise ValueError(
                f"parallel.call({type(submodule).__name__}): it is no module of the sharded "
                f"{type(self.module).__name__.removeprefix('FSDP')}; give it one that is, such as "
                "parallel.module.get_submodule(name), and call others by themselves"
            )
        # The innermost unit around it holds its parameters.
        holding = [unit for unit in self.units if lies_in(name, unit.name)]
        if not holding:
            return submodule(*args, **kwargs)
        unit = max(holding, key=lambda unit: len(unit.name))
        return self.calls.run_as_forward(unit, submodule, *args, **kwargs)

    def reshard(self) -> None:
        """Free unsharded parameters, e.g. after an evaluation or before weights are
        loaded."""
        reshard(self.module.modules())
        self.traffic.weights_changed()

    @contextmanager
    def unsharded(
        self, module: nn.Module, values: Mapping[str, Tensor]
    ) -> Iterator[None]:
        """Let the model or a part of it be a plain module inside the block, for code
        that one rank runs alone. What all ranks compute together, as layers that are
        split, raises ``RuntimeError`` when it is called there.

        Args:
            values: unsharded weights on the host, by the names of ``module``.
        """
        # What any other axis splits needs all its ranks to compute.
        config = self.config
        split = [
            f"{DEGREES[axis]}={degree}"
            for axis, degree in degrees_of(config).items()
            if degree != 1
        ]
        if config.expert_parallel_degree != 1:
            split.append(f"expert_parallel_degree={config.expert_parallel_degree}")
        if config.fp8 is not None:
            split.append("fp8")
        refusal = ""
        if split:
            refusal = (
                f"{type(module).__name__.removeprefix('FSDP')} was called on one rank alone while its weights were "
                f"saved, and with {', '.join(split)} all ranks compute it together; save without calling it, or load "
                "what was saved into a plain model and call that"
            )
        with changed(self.calls, unsharded=True):
            refused = self._computed_together() if split else frozenset()
            with unsharded(module, values, refusal, refused):
                yield

    def _computed_together(self) -> frozenset[nn.Module]:
        """List what one rank cannot compute: blocks, split layers, layers in FP8, those
        of other stages, and what is in or around one of them."""
        named = {
            clean_name(name): module for name, module in self.module.named_modules()
        }
        names = [name for name in self.plan.shapes.units.blocks if name in named]
        if self.tensor is not None:
            names += [split.name for split in self.tensor.splits]
        by_module = {module: name for name, module in named.items()}
        if self.fp8 is not None:
            layers = [module for module, _, _ in self.fp8.sites]
            names += [by_module[layer] for layer in layers if layer in by_module]
        names += [
            name
            for name, module in named.items()
            if any(map(is_absent, module.parameters(recurse=False)))
        ]
        around = {""}
        for name in names:
            parts = name.split(".")
            around |= {".".join(parts[:length]) for length in range(len(parts))}
        inside = {
            part for name in names if name in named for part in named[name].modules()
        }
        return frozenset(inside | {named[name] for name in around if name in named})

    def require_same_collectives(self) -> None:
        """Compare what ranks that share parameters issued, where no window closes:
        after an evaluation. Collective.

        Raises:
            RanksDiverged: they took different ways through the model; on all ranks.
        """
        require_same_collectives(self.traffic.issued, self.mesh)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """Clip by the norm over all ranks (see
        :func:`smp_core.sharding.optimizer.grad_norm.clip_grad_norm_`); closes the
        window if it is open. ``parameters``: only these, e.g. one optimizer's; default
        all."""
        # The norm is of complete gradients.
        self.window.close()
        return clip_grad_norm_(
            self.stepped(parameters),
            max_norm,
            norm_type=norm_type,
            masters_over=self.mesh.gradient_group,
            on_nonfinite=self.config.on_nonfinite_grad_norm,
            **self.over_stages(),
        )

    def grad_norm(
        self, norm_type: float = 2.0, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Return the gradients' norm over all ranks: a plain 0-d tensor, equal
        everywhere."""
        return grad_norm(
            self.stepped(parameters),
            masters_over=self.mesh.gradient_group,
            norm_type=norm_type,
            **self.over_stages(),
        )

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other pipeline stages of what this rank holds a part
        of; None without stages."""
        return None if self.pipeline is None else self.pipeline.group

    def over_stages(self) -> dict[str, Any]:
        """Return the arguments of norms over pipeline stages
        (:func:`smp_core.sharding.optimizer.grad_norm.grad_norm`)."""
        return (
            {}
            if self.pipeline is None
            else {"stages": self.pipeline.group, "counts": self.pipeline.counts}
        )

    def stepped(self, parameters: Iterable[Tensor] | None = None) -> list[Tensor]:
        """Return what holds the gradients of these parameters (default all; also those
        of before sharding): with ``optimizer_shard="world"`` masters of this rank's
        part, otherwise they themselves."""
        # Parameters from before sharding stand for those that took their place.
        given = (
            self.module.parameters()
            if parameters is None
            else map(self.replaced.current, parameters)
        )
        return (
            list(given)
            if self.window.world is None
            else self.window.world.stepped(given)
        )

    def steps(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer has any of this model's parameters, those of
        before sharding included."""
        own = set(map(id, self.module.parameters()))
        stepped = parameters_of(optimizer)
        return any(
            id(model_parameter(self.replaced.current(parameter))) in own
            for parameter in stepped
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state by parameter name, for checkpoints: that of all
        pipeline stages. Collective over these
        (:func:`smp_core.checkpoint.optimizers.named_optimizer_state`)."""
        # Of this stage; the others' states come from their first ranks.
        named = named_optimizer_state(self.module, optimizer)
        if self.pipeline is None:
            return named
        return states_of_all_stages(
            named,
            self.module,
            self.pipeline.stages,
            self.mesh.stage,
            self.mesh.column.host,
        )

    @torch.no_grad()
    def model_state(self) -> dict[str, Any]:
        """Return the module's state dict: sharded parameters as DTensors, the live
        ones; only where ``optimizer_shard="world"`` or the host keep finer weights than
        parameters, copies of those. Collective with the first."""
        # As DCP's function for it, which walks through the model once for each name.
        # Named without the marks of wrappers, so that checkpoints do not depend on
        # them.
        state: dict[str, Any] = self.module.state_dict()
        for name in list(state):
            clean = clean_name(name)
            if clean != name:
                state[clean] = state.pop(name)
        for name, weight in self._finer_weights().items():
            if name in state:
                state[name] = weight
        return state

    @torch.no_grad()
    def take_model_state(
        self, state: Mapping[str, Any], by_module: bool = True
    ) -> None:
        """Take up what was loaded into the values of :meth:`model_state`.

        Args:
            by_module: also let the module load it, by ``load_state_dict``: its hooks
                run, and what is no memory of its own (its extra state, copies that its
                hooks made) gets there. False where that was done.
        """
        if by_module:
            own_names = {clean_name(name): name for name in self.module.state_dict()}
            shown = {own_names.get(name, name): state[name] for name in state}
            load_full_state(self.module, shown, state, strict=False)
        # A tied parameter is loaded once, under any of its names.
        loaded = {
            p: state[name]
            for name, p in self._parameters_by_name().items()
            if name in state
        }
        # Masters take the value with all its digits, parameters what fits into theirs.
        if self.window.world is not None:
            self.window.world.take_weights(
                {id(parameter): value for parameter, value in loaded.items()}
            )
        elif self._masters_on_host:
            for parameter, value in loaded.items():
                if value.dtype != parameter.dtype:
                    local_of(parameter).copy_(local_of(value))
                    load_host_master(parameter, local_of(value))

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        return {
            clean_name(name): p
            for name, p in self.module.named_parameters(remove_duplicate=False)
        }

    def _finer_weights(self) -> dict[str, Tensor]:
        parameters = self._parameters_by_name()
        if self.window.world is not None:
            # Gathered over replicas: every rank holds a part of each master.
            finer = self.window.world.weights()
            return {
                name: finer[id(p)] for name, p in parameters.items() if id(p) in finer
            }
        # The host's copies are of this rank's shards, so nothing is sent.
        half = {
            p
            for p in parameters.values()
            if self._masters_on_host and p.requires_grad and not is_absent(p)
        }
        half -= {p for p in half if p.dtype == master_dtype(p)}
        made = {p: like(p, with_host_master(p), on_host=True) for p in half}
        return {name: made[p] for name, p in parameters.items() if p in made}

    @property
    def _masters_on_host(self) -> bool:
        on_host = (
            self.config.master_dtype == "float32"
            and self.config.state_offload == "optimizer"
        )
        return on_host and not self.plan.dtypes.masters

    def prepare_optimizer(self, optimizer: Optimizer, *others: ParallelModel) -> bool:
        """Make an optimizer over this model's parameters right for them
        (:mod:`smp_core.sharding.optimizer.prepared`). Collective over the world.

        One that was made from the parameters of before sharding gets those of now. With
        ``optimizer_shard="world"`` it steps masters of this rank's part from now on;
        ``state_dict`` and ``load_state_dict`` are collective then. With
        ``state_offload="optimizer"`` it steps on the host. ``step`` closes an open
        window.

        Args:
            others: further models whose parameters it steps.

        Returns:
            False if it was prepared before, and nothing was to be done.

        Raises:
            ValueError: parameters of no model, an optimizer that cannot step shards,
                ``optimizer_shard="world"`` and one that looks across a tensor or across
                tensors, pipeline stages and one that looks across tensors, states that
                cannot be saved.
        """
        models = (self, *others)
        prepared = prepare_optimizer(optimizer, models)
        # FP8 scales are renewed behind every optimizer's step, since weights change in
        # each; router biases move behind the first one's alone.
        for model in models:
            if prepared and model.fp8 is not None:
                model.fp8.follow(optimizer)
            if prepared and model.routers is not None:
                model.routers.follow(optimizer)
        return prepared

    def describe(self) -> str:
        """Return a few lines for people: the layout, the units, what is replicated."""
        return "\n".join(lines_of_subjects(self.plan, self))

    def report(self) -> str:
        """Return at most fifteen lines for the start of a run: the layout, and what
        became of the knobs that were asked for. All knobs, with reasons, go to the
        logger "smp" at DEBUG."""
        lines = self.describe().splitlines()
        asked = lines_about_asked(self.plan.knobs, DEFAULTS)
        # The layout comes first; what was asked gets the lines that are left.
        room = max(REPORT_LINES - len(lines) - 1, 1)
        if len(asked) > room:
            asked = [*asked[: room - 1], f"and {len(asked) - room + 1} more knobs"]
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", table_as_text(self.config))
            logger.debug(
                "communicators of this rank's device, by their ranks: %s",
                self.mesh.communicators,
            )
            return "\n".join([*lines, *asked])
        return "\n".join(
            [
                *lines,
                *asked,
                'all knobs and reasons: logging.getLogger("smp").setLevel("DEBUG")',
            ]
        )

    @torch.no_grad()
    def broadcast_buffers(self, between_stages: bool = True) -> None:
        """Give every rank rank 0's persistent buffers (BatchNorm statistics), as DDP
        does: before evaluation and saving; with pipeline stages those of the first rank
        of the stage on which they work, and modules' extra states. What is not saved
        (``_non_persistent_buffers_set`` is the only list of it) is not state and is
        left alone.

        Args:
            between_stages: False: inside of a forward, where stages wait for one
                another.
        """
        saved: list[Tensor] = []
        # Only what a state dict would save.
        for module in self.module.modules():
            passing = module._non_persistent_buffers_set
            saved += [
                buffer
                for name, buffer in module.named_buffers(recurse=False)
                if name not in passing
            ]
        broadcast_from_rank_0(saved, self.mesh.device, self.mesh.model_group)
        if self.pipeline is not None and between_stages:
            self._share_between_stages(self.pipeline)

    def _share_between_stages(self, pipeline: Pipeline) -> None:
        """Give all stages what is saved beside parameters, from the stage on which it
        works. Collective over the stages."""
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        extra_states = {}
        for name, stage in pipeline.stages.buffers.items():
            owner, _, last = name.rpartition(".")
            if last == EXTRA_STATE:
                extra_states[owner] = stage
                continue
            broadcast_from_rank_0(
                [buffers[name]], self.mesh.device, pipeline.group, source=stage
            )
        if extra_states:
            self._share_extra_states(extra_states)

    def _share_extra_states(self, stages: Mapping[str, int]) -> None:
        """Give modules on other stages the extra states of the stage on which each
        works, with tensors in host memory. Collective over the stages.

        Args:
            stages: by the module's name; the same on all of them.

        Raises:
            CheckpointError: a module raises on one stage, when it is asked for its
                state or given another's; on all.
        """
        own = self.mesh.stage

        # Tensors on a device would arrive on one of the same number.
        def of_this_stage() -> dict[str, Any]:
            found = {}
            for name in stages:
                if stages[name] == own:
                    state = self.module.get_submodule(name).get_extra_state()
                    found[name] = map_tensors(state, lambda tensor: tensor.cpu())
            return found

        ranks, what = Ranks(self.mesh.column.host), "modules' extra states"
        _, told = ranks.together(what, of_this_stage, lambda found: found)

        def set_others() -> None:
            for name, stage in stages.items():
                if stage != own:
                    self.module.get_submodule(name).set_extra_state(told[stage][name])

        ranks.together(what, set_others)
