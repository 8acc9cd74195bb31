"""Optimizers over sharded parameters: what is made right for them, once and whenever
their groups change.

A prepared optimizer is of a class derived from its own. Before each step, and whenever
parameters are added or states are loaded or saved, its groups are looked at again:

- parameters that sharding has replaced since the optimizer was made give way to those
  that the model has now, and bring their states along; a parameter of no model is an
  error
- with ``optimizer_shard="world"`` parameters give way to masters of this rank's part,
  while it steps, and while its states are saved or loaded; at all other times groups
  hold the model's parameters, for code that looks them up there
- where plain and sharded tensors meet they are stepped one by one, because torch's
  fused and foreach kernels take only one kind at a time

With ``state_offload="optimizer"`` it steps on the host
(:mod:`smp_core.sharding.optimizer.host`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_core.checkpoint import numbered, stepped_parameters
from smp_core.cluster import SmpMesh
from smp_core.comm import CommMeter
from smp_core.optim import AdamW8bit, StepsTogether
from smp_core.plan import Plan
from smp_core.sharding.fsdp import ShardedUnit
from smp_core.sharding.gradients.window import Window
from smp_core.sharding.operands import take_part_of_gradient
from smp_core.sharding.optimizer.gradient_readers import (
    say_of_callers,
    say_where_gradients_are,
)
from smp_core.sharding.optimizer.host import OnHost, step_on_host
from smp_core.sharding.optimizer.kinds import (
    choose_kernels,
    derive,
    may_read_loss,
    refuse_unsaveable,
    require_elementwise,
    require_steps_shards,
    require_tensorwise,
)
from smp_core.sharding.optimizer.shards import (
    MASTER,
    WorldSharding,
    local_of,
    master_dtype,
    sharded_state,
    sharded_states,
)
from smp_core.sharding.optimizer.states_by_parameter import StatesByParameter
from smp_core.sharding.replaced import ReplacedParameters, step_alike, take_in_attached
from smp_core.torch_facts import (
    clean_name,
    is_outermost,
    model_parameter,
    parameters_of,
)
from smp_core.watch import meet

logger = logging.getLogger("smp")

_KERNELS = ("fused", "foreach", "capturable")


class SteppedModel(Protocol):
    """The interface of a parallelized model whose parameters an optimizer steps."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def mesh(self) -> SmpMesh: ...
    @property
    def window(self) -> Window: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def units(self) -> tuple[ShardedUnit, ...]: ...
    @property
    def replaced(self) -> ReplacedParameters: ...
    @property
    def meter(self) -> CommMeter: ...
    def reshard(self) -> None: ...


class Prepared:
    """Methods of a prepared optimizer. ``_smp_homes`` has the models that its
    parameters are of."""

    __slots__ = ()
    _smp_unprepared: Any

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Zero gradients, and drop what open windows hold of the parameters, as would
        be done without a window."""
        # torch's zero_grad has to see masters, where those have the gradients.
        with _masters_in_groups(self):
            for window in self._smp_homes.windows:
                window.drop(
                    parameters_of(self),
                    set_to_none,
                )
            self._smp_unprepared.zero_grad(self, set_to_none)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, also of adapters that were attached since.
        Collective over the world."""
        homes = _homes_of(self)
        # By the model's parameter: in the groups a master may stand for it.
        before = {model_parameter(parameter) for parameter in parameters_of(self)}
        # Torch's own checks come first; a group that ours refuse is taken out again.
        self._smp_unprepared.add_param_group(self, param_group)
        try:
            meet(
                f"optimizer.add_param_group({homes.in_words(self.param_groups[-1]['params'])})"
            )
            settle(self, together=True)
            # Torch compared tensors before replaced parameters gave way to those of
            # now, which other groups may hold already.
            if not before.isdisjoint(
                map(model_parameter, self.param_groups[-1]["params"])
            ):
                raise ValueError(
                    "some parameters appear in more than one parameter group"
                )
        except (ValueError, RuntimeError):
            del self.param_groups[-1]
            raise

    def state_dict(self: Any) -> dict[str, Any]:
        """Return the state as torch does. Collective with
        ``optimizer_shard="world"``."""
        with _masters_in_groups(self):
            state: dict[str, Any] = self._smp_unprepared.state_dict(self)
            for world in self._smp_homes.worlds:
                state = world.full_state(self, state)
        return state

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Load a state, of sharded or unsharded tensors, except with which kernels the
        optimizer steps: these are chosen for this run, not by the checkpoint."""
        # torch's functions for checkpoints call parameters by names.
        state_dict = {**state_dict, **numbered(state_dict)}
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):
            taken = []
            for saved, own in zip(groups, self.param_groups, strict=True):
                taken.append(
                    {**saved, **{flag: own[flag] for flag in _KERNELS if flag in own}}
                )
            state_dict = {**state_dict, "param_groups": taken}
        with _masters_in_groups(self):
            states = sharded_states(self, state_dict, isinstance(self, OnHost))
            state_dict = {**state_dict, "state": states}
            if not isinstance(self, OnHost):
                # Masters that were saved beside half precision weights are the weights
                # here.
                state_dict = {
                    **state_dict,
                    "state": self._smp_homes.take_masters(self, state_dict),
                }
            # Saved states are like parameters; masters take this rank's part of them.
            for world in self._smp_homes.worlds:
                state_dict = world.own_state(self, state_dict)
            self._smp_unprepared.load_state_dict(self, state_dict)


class Homes:
    """The models whose parameters an optimizer steps."""

    def __init__(self, models: Sequence[SteppedModel]) -> None:
        self._models = tuple(models)
        self.windows = [model.window for model in models]
        self.parameters_on_host = any(
            model.plan.knobs.state_offload == "all" for model in models
        )
        self.in_stages = any(model.plan.stages is not None for model in models)
        self._own: dict[int, Tensor] = {}
        self._attached: dict[int, Tensor] = {}
        self.users = 0
        """How many methods at work need masters in the groups."""
        self.is_new = True
        self.hooks_before: dict[int, Callable[..., Any]] = {}
        """Hooks before the optimizer's step, ours included; the optimizer's own dict."""

    @property
    def worlds(self) -> list[WorldSharding]:
        return [window.world for window in self.windows if window.world is not None]

    def close_windows(self, optimizer: Optimizer) -> None:
        """Complete the gradients before the optimizer steps. Collective."""
        # What is of no unit was attached since: the window asks the other ranks, too.
        strange = not self._owns_all(optimizer)
        for window in self.windows:
            window.close()
            if strange:
                window.refuse_attached()

    def say_where_gradients_are(self) -> None:
        """Warn before the first step of code that looks for gradients in vain."""
        say_of_callers(inspect.currentframe(), in_stages=not self.worlds)
        if self.worlds:
            say_where_gradients_are(self.hooks_before.values(), in_step=True)

    def mean_loss(self, loss: Any) -> Any:
        """Return the mean over the ranks of the loss that a closure returned: each rank
        has that of its own samples, and one that decides by it, as a line search does,
        would go another way than the others. Collective."""
        # Nothing else can steer a line search.
        if not isinstance(loss, (float, Tensor)):
            return loss
        mesh = self._models[0].mesh
        # A Python float comes back unrounded from float64.
        own = (
            loss.detach()
            if isinstance(loss, Tensor)
            else torch.tensor(loss, dtype=torch.float64)
        )
        # A copy, because the all-reduce would write into the user's own loss.
        total = own.to(mesh.device, copy=True)
        dist.all_reduce(total, group=mesh.gradient_group)
        mean = total / mesh.gradient_degree
        return mean if isinstance(loss, Tensor) else mean.item()

    def owns(self, parameter: Tensor) -> bool:
        return id(model_parameter(parameter)) in self._own

    def _owns_all(self, optimizer: Optimizer) -> bool:
        return all(self.owns(parameter) for parameter in parameters_of(optimizer))

    def in_words(self, parameters: Sequence[Tensor]) -> str:
        """Return the names of a few parameters."""
        names = {
            id(each): name
            for model in self._models
            for name, each in model.module.named_parameters()
        }
        found = [
            clean_name(names.get(id(each), f"one {list(each.shape)}"))
            for each in parameters
        ]
        return ", ".join(found[:2] + ["..."] * (len(found) > 2))

    def take_in(self, optimizer: Optimizer, together: bool = False) -> None:
        """Give the optimizer today's parameters in the place of replaced ones, with
        their states.

        Args:
            together: all ranks are in this call: adapters that were attached since are
                taken in, and groups compared.

        Raises:
            ValueError: it has parameters of no model; ranks attached other parameters
                or step other ones.
        """
        if not together and self._owns_all(optimizer):
            return
        for model in self._models:
            model.reshard()
        # What was attached since can be taken in only where all ranks are in the call.
        for model in self._models if together else ():
            take_in_attached(model)
        self._own = {
            id(parameter): parameter
            for model in self._models
            for parameter in model.module.parameters()
        }
        # Attached ones do not count yet: ranks may hold other values of them.
        self._attached = {
            id(p): self._own.pop(id(p))
            for window in self.windows
            for p in window.attached().values()
        }
        for model in self._models:
            replaced = model.replaced
            old = [p for p in parameters_of(optimizer) if replaced.current(p) is not p]
            # States are found by the parameter, and taken out before it changes.
            states = [
                (parameter, optimizer.state.pop(parameter))
                for parameter in old
                if parameter in optimizer.state
            ]
            # The same list: LBFGS has the first one under a name of its own, too.
            for group in optimizer.param_groups:
                group["params"][:] = map(replaced.current, group["params"])
            if old:
                optimizer.state.update(
                    replaced.current_states(states, model.mesh.device)
                )
        # Ranks that step different parameters would add up different gradients.
        if together:
            step_alike(optimizer, self._models)
        self._refuse_strangers(optimizer)

    def _refuse_strangers(self, optimizer: Optimizer) -> None:
        strangers: dict[int, list[str]] = {}
        for number, group in enumerate(optimizer.param_groups):
            # The window refuses attached ones, with another remedy.
            strange = [
                p
                for p in group["params"]
                if not self.owns(p) and id(p) not in self._attached
            ]
            strangers[number] = [f"{list(p.shape)}" for p in strange]
        count = sum(map(len, strangers.values()))
        if count:
            groups = [
                f"group {n}: shapes {', '.join(shapes[:3])}"
                for n, shapes in strangers.items()
                if shapes
            ]
            raise ValueError(
                f"the optimizer ({type(optimizer).__name__}) steps {count} parameters of no prepared model "
                f"({'; '.join(groups)}), whose gradients nobody would synchronise; make it from model.parameters(): in "
                "Lightning in configure_optimizers, under Accelerate before prepare(model, optimizer) or after "
                "prepare(model); in a loop of your own name all models that it steps: "
                "parallel.prepare_optimizer(optimizer, other_parallel)"
            )

    def give_masters(self, optimizer: Optimizer) -> None:
        """Put masters in the place of parameters, and their part of the states, with
        ``optimizer_shard="world"``."""
        for world in self.worlds:
            for group in optimizer.param_groups:
                before, group["params"] = (
                    group["params"],
                    world.stepped(group["params"]),
                )
                # A state from before there were masters is cut to this rank's part.
                if isinstance(optimizer.state, StatesByParameter):
                    continue
                for old, new in zip(before, group["params"], strict=True):
                    if new is not old and old in optimizer.state:
                        optimizer.state[new] = self.part_of_state(
                            old, optimizer.state.pop(old)
                        )

    def show_parameters(self, optimizer: Optimizer) -> None:
        """Put parameters in the place of masters, unless a method at work needs those;
        states stay the masters', and are found by the parameter, too."""
        if self.users or not self.worlds:
            return
        for group in optimizer.param_groups:
            group["params"] = [model_parameter(stepped) for stepped in group["params"]]
        if not isinstance(optimizer.state, StatesByParameter):
            optimizer.state = StatesByParameter(
                self.stepped, self.part_of_state, optimizer.state
            )

    def part_of_state(self, parameter: Tensor, entry: Any) -> Any:
        """Return this rank's part of a state that is like a parameter's."""
        for world in self.worlds:
            entry = world.part_of_state(parameter, sharded_state(parameter, entry))
        return entry

    def stepped(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return what is stepped in the place of parameters."""
        found = list(parameters)
        for world in self.worlds:
            found = world.stepped(found)
        return found

    @torch.no_grad()
    def take_masters(
        self, optimizer: Optimizer, numbered: dict[str, Any]
    ) -> dict[Any, Any]:
        """Copy the masters that a state dict has into float32 weights; return its
        states without them."""
        state = {number: dict(entry) for number, entry in numbered["state"].items()}
        saved = [
            number for group in numbered["param_groups"] for number in group["params"]
        ]
        # Torch itself refuses groups of other lengths when it loads the rest.
        for number, parameter in zip(
            saved, stepped_parameters(optimizer), strict=False
        ):
            # A master is a weight, and no state for the optimizer to keep.
            master = state.get(number, {}).pop(MASTER, None)
            if master is None:
                continue
            # Half precision weights are loaded by themselves: masters are only finer.
            if parameter.dtype == torch.float32:
                local_of(parameter).copy_(local_of(master))
            for world in self.worlds:
                world.take_weights({id(parameter): master})
        return state

    def store_masters(self) -> None:
        """Store half precision weights in float32 that were made trainable since the
        model was sharded."""
        for model in self._models:
            if model.plan.dtypes.masters and not model.plan.dtypes.stored_as_gathered:
                for unit in model.units:
                    unit.store_masters()

    def keep_gradients_fine(self, optimizer: Optimizer) -> None:
        """Let half precision parameters have gradients of any dtype: masters on the
        host are stepped with the sums as they are."""
        for parameter in parameters_of(optimizer):
            # Masters of a part have had a grad_dtype since they were made.
            if (
                master_dtype(parameter) != parameter.dtype
                and model_parameter(parameter) is parameter
            ):
                parameter.grad_dtype = None

    def bring_weights(self, optimizer: Optimizer) -> None:
        """Bring what the optimizer has stepped into the models' parameters.
        Collective."""
        for world in self.worlds:
            world.after_step(optimizer)
        # A forward without backward (one network's inside the other one's step) leaves
        # its roots unsharded.
        for model in self._models:
            model.reshard()


def prepare_optimizer(optimizer: Optimizer, models: Sequence[SteppedModel]) -> bool:
    """Make an optimizer over the parameters of these models right for them. Collective
    over the world.

    Returns:
        False if it was prepared for them before, and nothing was to be done.

    Raises:
        ValueError: it has parameters of no model, it cannot step shards, with
            ``optimizer_shard="world"`` it looks across a tensor or across tensors, with
            pipeline stages across tensors, or its states are of a kind that cannot be
            saved.
    """
    # A rank that is elsewhere is named, instead of a hang in the first collective.
    meet(f"prepare_optimizer({type(optimizer).__name__})")
    before: Homes | None = getattr(optimizer, "_smp_homes", None)
    if before is not None:
        if set(map(id, before.windows)) != {id(model.window) for model in models}:
            raise ValueError(
                f"the optimizer ({type(optimizer).__name__}) was prepared for other models; make a new one"
            )
        settle(optimizer, together=True)
        return False
    # Phase 1: refuse what this kind of optimizer rules out, before anything is changed.
    refuse_unsaveable(optimizer)
    homes = Homes(models)
    if homes.in_stages:
        require_tensorwise(optimizer)
    if isinstance(optimizer, StepsTogether):
        _require_on_device(optimizer, models)
        optimizer.meter = models[0].meter
    # Phase 2: its groups get the parameters that the models have now.
    homes.take_in(optimizer, together=True)
    if isinstance(optimizer, AdamW8bit):
        # Its scales are of blocks of a row, which no shard may cut.
        optimizer.require_whole_blocks()
    # Phase 3: masters of this rank's part, where states are sharded over all replicas.
    host = any(model.plan.knobs.state_offload == "optimizer" for model in models)
    for model in models:
        if model.plan.knobs.optimizer_shard == "world":
            require_elementwise(optimizer)
            # Made once for a model, whose parameters several optimizers may step.
            first = model.window.world is None
            model.window.shard_over_world(on_host=host).follow_parameters()
            if first:
                _follow_flags_in_calls(model, model.window.world)
    # Phase 4: groups hold what is stepped, and kernels that take it.
    if homes.worlds:
        homes.give_masters(optimizer)
    choose_kernels(optimizer, homes.parameters_on_host, stepped_there=host)
    # Masters are plain tensors, of which any elementwise optimizer can step parts.
    if homes.worlds:
        homes.show_parameters(optimizer)
    else:
        require_steps_shards(optimizer)
    if host:
        homes.keep_gradients_fine(optimizer)
        step_on_host(optimizer, models[0].mesh.device)
    # Phase 5: its class and hooks; from now on every step closes the window first.
    optimizer._smp_homes = homes  # type: ignore[attr-defined]
    # A class, not attributes of the instance: Lightning derives its own wrapper's class
    # from it. One for all optimizers of a kind, by which LearningRateMonitor tells them
    # apart.
    kind: Any = type(optimizer)
    optimizer.__class__ = _prepared(kind)
    own = [
        optimizer.register_step_pre_hook(_before_step),
        optimizer.register_step_post_hook(_after_step),
    ]
    # Hooks that the user registered before see complete gradients, and new weights.
    for registered in own:
        hooks: Any = registered.hooks_dict_ref()
        hooks.move_to_end(registered.id, last=False)
    hooked: Any = own[0].hooks_dict_ref()
    homes.hooks_before = hooked
    return True


def _require_on_device(
    optimizer: StepsTogether, models: Sequence[SteppedModel]
) -> None:
    """Refuse states in host memory, where ranks cannot exchange what a step sends."""
    for model in models:
        where = model.plan.knobs.state_offload
        if where is not None:
            raise ValueError(
                f"state_offload={where!r} steps in host memory, where {type(optimizer).__name__} "
                f"cannot exchange {optimizer.exchanged} between ranks; leave state_offload out, or use "
                "torch.optim.AdamW"
            )


def _follow_flags_in_calls(model: SteppedModel, world: WorldSharding | None) -> None:
    """Let masters and parameters agree on ``requires_grad`` before each forward of a
    root: an optimizer's user may have set it on masters."""
    assert world is not None
    for unit in model.plan.shapes.units.units:
        if unit.is_root:
            module = model.module.get_submodule(unit.name)
            module.register_forward_pre_hook(
                lambda *_: world.follow_flags(), prepend=True
            )


def stepped_by(optimizer: Optimizer) -> list[Tensor]:
    """Return what an optimizer steps, which has the gradients: with
    ``optimizer_shard="world"`` masters."""
    parameters = parameters_of(optimizer)
    homes: Homes | None = getattr(optimizer, "_smp_homes", None)
    return parameters if homes is None else homes.stepped(parameters)


def settle(optimizer: Optimizer, together: bool = False) -> None:
    """Look at the groups of a prepared optimizer again: whatever was put there since.

    Args:
        together: as of :meth:`Homes.take_in`.

    Raises:
        ValueError: a parameter of no model, groups that ranks do not have alike.
    """
    homes: Homes = optimizer._smp_homes  # type: ignore[attr-defined]
    homes.take_in(optimizer, together)
    # In the same order as when it was prepared: storage, masters, kernels.
    homes.store_masters()
    homes.give_masters(optimizer)
    if isinstance(optimizer, OnHost):
        homes.keep_gradients_fine(optimizer)
    stepped_there = isinstance(optimizer, OnHost)
    choose_kernels(optimizer, homes.parameters_on_host, stepped_there)
    homes.show_parameters(optimizer)


def _homes_of(optimizer: Optimizer) -> Homes:
    """Return the models of a prepared optimizer, which its copies have not.

    Raises:
        RuntimeError: it is a copy.
    """
    homes: Homes | None = getattr(optimizer, "_smp_homes", None)
    if homes is None:
        raise RuntimeError(
            f"this {type(optimizer).__name__} is a copy of a prepared optimizer (copy.deepcopy, pickle), whose "
            "parameters are copies, too, and no model's; keep copy.deepcopy(optimizer.state_dict()), and load that"
        )
    return homes


@contextlib.contextmanager
def _masters_in_groups(optimizer: Any) -> Iterator[None]:
    """Let groups hold what is stepped, and states be found by that."""
    homes = _homes_of(optimizer)
    # A count, because such methods call one another.
    homes.users += 1
    try:
        settle(optimizer)
        yield
    finally:
        homes.users -= 1
        homes.show_parameters(optimizer)


def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Complete the gradients before weights are stepped: now, or when the closure has
    run its backward passes."""
    homes: Homes = optimizer._smp_homes
    if homes.is_new and (homes.worlds or homes.in_stages):
        homes.say_where_gradients_are()
    homes.is_new = False
    # args[0] is the optimizer itself; a closure comes behind it, or by name.
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        homes.close_windows(optimizer)
        _before_weights_change(optimizer)
        return None

    def closed() -> Any:
        # The closure runs the backward passes, so gradients are complete only behind
        # it. A line search calls it several times, with a window each.
        result = closure()
        homes.close_windows(optimizer)
        _before_weights_change(optimizer)
        reads_loss = may_read_loss(optimizer._smp_unprepared)
        return homes.mean_loss(result) if reads_loss else result

    return (
        ((args[0], closed, *args[2:]), kwargs)
        if len(args) > 1
        else (args, {**kwargs, "closure": closed})
    )


def _before_weights_change(optimizer: Optimizer) -> None:
    """Let groups hold what is stepped, up to :func:`_after_step`."""
    # Set and not counted: a step that raised has left its own behind.
    optimizer._smp_homes.users = 1  # type: ignore[attr-defined]
    settle(optimizer)
    homes: Homes = optimizer._smp_homes  # type: ignore[attr-defined]
    for stepped in stepped_by(optimizer):
        # A gradient that was assigned to a parameter whose master has none, as torch's
        # functions for checkpoints do to make an optimizer's states.
        parameter = model_parameter(stepped)
        if parameter is not stepped and stepped.grad is None:
            given, parameter.grad = parameter.grad, None
            if given is not None:
                part = homes.part_of_state(parameter, given).detach()
                stepped.grad = part.to(stepped.grad_dtype)
        # Gradients that the user assigned whole, or in another layout.
        take_part_of_gradient(stepped)
    # Weights may have been loaded, or edited, since the last step.
    for world in optimizer._smp_homes.worlds:  # type: ignore[attr-defined]
        world.follow_parameters()


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    homes: Homes = optimizer._smp_homes  # type: ignore[attr-defined]
    homes.bring_weights(optimizer)
    # A step inside another one leaves masters in the groups for the outer one.
    if is_outermost(optimizer):
        homes.users = 0
        homes.show_parameters(optimizer)


@functools.cache
def _prepared(kind: Any) -> Any:
    prepared = derive(kind, Prepared, "_smp_unprepared")
    # Only those that have such methods: schedule-free optimizers.
    for name in ("train", "eval"):
        if callable(getattr(kind, name, None)):
            setattr(prepared, name, _moving(getattr(kind, name)))
    return prepared


def _moving(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method by which schedule-free optimizers change the weights between
    training and evaluation."""

    @functools.wraps(method)
    def moving(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        _before_weights_change(self)
        result = method(self, *args, **kwargs)
        _after_step(self)
        return result

    return moving
