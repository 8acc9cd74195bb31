"""Parameters of a model that are not those of before it was sharded: others in their
place, or attached since.

Replaced: an optimizer (or a list for clipping) that was made before the model was
sharded holds parameters that the model has no longer: nothing it does would reach the
model. Hooks of such parameters move to those of now; reading ``.grad`` of a replaced
parameter, which stays empty, is an error.

Attached, as adapters are by peft's ``get_peft_model``: FSDP2 knows nothing of them.
Each rank holds them whole: all get rank 0's values, and gradients are added up over all
ranks as those of other replicated parameters are. Ranks may attach them in another
order, and list them for an optimizer in another order: rank 0's order holds for all,
because code that sums over parameters, or sends them one after another, goes by it.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from smp_core.checkpoint import iterate_tensors, map_tensors, path_text, shard_like
from smp_core.cluster import (
    broadcast_from_rank_0,
    lists_of_all_ranks,
    of_all_ranks,
    of_rank_0,
)
from smp_core.sharding.gradients.accumulation import AccumulationWindow
from smp_core.sharding.gradients.parameter_hooks import (
    move_hooks,
    reached_by_hooks,
    registered_hooks,
)
from smp_core.torch_facts import clean_name, model_parameter

_all: weakref.WeakSet[ReplacedParameters] = weakref.WeakSet()


class ReplacedParameters:
    """The parameters of a model before it was sharded -> those it has now, by name.

    Made before anything is sharded. It keeps no parameter alive: those without other
    references are freed unit by unit.

    Attributes:
        model: the name of its class.
        hooked: the parameters that have hooks, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = type(model).__name__
        # Weak references, so that whole parameters are freed while units are sharded.
        named = list(model.named_parameters(remove_duplicate=False))
        self._before = [(name, TensorWeakRef(parameter)) for name, parameter in named]
        # What users have noted on parameters (groups of an optimizer, no weight decay).
        self._noted = {name: dict(vars(parameter)) for name, parameter in named}
        self.hooked = {
            name: parameter for name, parameter in named if registered_hooks(parameter)
        }
        self._now = WeakIdKeyDictionary()

    def settle(self, model: nn.Module) -> None:
        """Note which parameters the model has now; they get the hooks of those that
        they replace.

        Raises:
            ValueError: a hook refers to replaced parameters.
        """
        # Under every name that a tied parameter has.
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, reference in self._before:
            old, new = reference(), after.get(name)
            if old is not None and new is not None and new is not old:
                # Its class changes, so that a list which still holds it fails when it
                # is used.
                self._now[old] = new
                if type(old) is nn.Parameter:
                    old.__class__ = _Replaced
        for name, noted in self._noted.items():
            if name in after:
                vars(after[name]).update(noted | vars(after[name]))
        # No name is needed from here on: parameters are looked up by identity.
        self._before.clear()
        self._noted.clear()
        _all.add(self)
        for name, old in self.hooked.items():
            if old in self._now:
                self._require_no_reference(name, old)
                move_hooks(old, self._now[old])
        self.hooked.clear()

    def _require_no_reference(self, name: str, old: Tensor) -> None:
        # A hook that steps an optimizer, say, would change parameters of no model.
        if any(tensor in self._now for tensor in reached_by_hooks(old)):
            raise ValueError(
                f"a hook of {name} refers to parameters that {self.model} had before it was sharded (an optimizer, a "
                "dict by parameter, a weight), which are trained no more; register it on the parameters that "
                "model.parameters() has after prepare(model), in Lightning in on_fit_start"
            )

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._now

    def current(self, parameter: Tensor) -> Tensor:
        """Return what stands in the place of a parameter now; one that was not replaced
        is itself."""
        return self._now.get(parameter, parameter)

    def current_states(
        self, states: Iterable[tuple[Tensor, Any]], device: torch.device
    ) -> dict[Tensor, Any]:
        """Return optimizer states of replaced parameters as those of the parameters
        that the model has now: rank 0's, as the weights are; tensors of a parameter's
        shape become shards of it. Collective over the world.

        Args:
            states: (replaced parameter, its entry in ``optimizer.state``).
            device: where tensors can be sent from.

        Raises:
            ValueError: ranks have different states, or a state is on the meta device.
        """
        states = list(states)
        # Ranks have to send the same tensors in the same order.
        require_alike([entry for _, entry in states])
        found = {}
        for old, entry in states:
            new = self.current(old)
            tensors = [tensor for _, tensor in iterate_tensors(entry)]
            if any(tensor.is_meta for tensor in tensors):
                raise ValueError(
                    "the optimizer made states of parameters on the meta device, which have no values; make it after "
                    "the model was sharded: in Lightning in configure_optimizers, elsewhere after prepare(model)"
                )
            # Weights are rank 0's, so their states are too.
            broadcast_from_rank_0(tensors, device)
            found[new] = map_tensors(entry, functools.partial(shard_like, new))
        return found


class _Replaced(nn.Parameter):
    """A parameter that a model had before it was sharded. It receives no gradient: a
    list of such parameters that is clipped or stepped would do nothing."""

    @property
    def grad(self) -> Tensor | None:
        raise RuntimeError(
            f"a parameter of shape {list(self.shape)} was read for its gradient, which a model had before it was "
            "sharded, and which receives none any more: make the list anew from model.parameters() after "
            "prepare(model), in Lightning in on_fit_start"
        )

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(
            self.detach().clone(), self.requires_grad
        )
        return copied


def of_replaced(parameters: Iterable[Tensor]) -> tuple[str | None, int]:
    """Count the parameters that a model had before it was sharded.

    Returns:
        (the class of a model that had some, their number); None, 0 without.
    """
    # A parameter may have been in several models.
    owners = [
        each.model for parameter in parameters for each in _all if parameter in each
    ]
    return (owners[0], len(owners)) if owners else (None, 0)


def require_alike(entries: list[Any]) -> None:
    """Compare what optimizer states consist of. Collective over the world.

    Raises:
        ValueError: ranks differ; the same error on all of them.
    """
    # Names, shapes and dtypes are enough: values may differ.
    own = []
    for entry in entries:
        tensors = iterate_tensors(entry)
        own.append(
            [
                f"{path_text(path)} {list(tensor.shape)} {tensor.dtype}"
                for path, tensor in tensors
            ]
        )
    if any(said != own for said in of_all_ranks(own)):
        raise ValueError(
            "the optimizer has other states on some ranks than on others; prepare it before its first step, and bring "
            "its states with a checkpoint"
        )


logger = logging.getLogger("smp")


def take_in_attached(model: Any) -> None:
    """Take in what was attached to a model since it was sharded, or since the last
    call. Collective over the world.

    Args:
        model: a :class:`smp_core.sharding.optimizer.prepared.SteppedModel`.

    Raises:
        ValueError: ranks attached different parameters, or the model's layout has no
            place for them. On all ranks.
    """
    # All ranks look, also those to which nothing was attached.
    window, mesh = model.window, model.mesh
    attached = window.attached()
    _require_the_same(attached)
    if not attached:
        return
    if (
        not isinstance(window, AccumulationWindow)
        or mesh.pipeline_degree > 1
        or mesh.tensor_degree > 1
    ):
        raise ValueError(
            f"{next(iter(attached))} was attached after the model was sharded, which is not built with "
            "pipeline stages, tensor ranks, or a model that came sharded on a (replicate, shard) mesh; attach adapters "
            "before the model is prepared"
        )
    # First the order, then values, one tensor after another, then sums of gradients.
    _order_as_on_rank_0(model.module)
    broadcast_from_rank_0(attached.values(), mesh.device, mesh.model_group)
    window.add_replicated(attached)
    if mesh.rank == 0:
        elements = sum(parameter.numel() for parameter in attached.values())
        logger.info(
            "%d parameters (%s elements) were attached after the model was sharded: whole on every rank, rank 0's "
            "values; attached before, they would be sharded",
            len(attached),
            f"{elements:,}",
        )


def _require_the_same(attached: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that ranks do not have alike.

    Raises:
        ValueError: on all ranks.
    """
    own = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in attached.items()
    ]
    # Without a difference there is nothing to compare.
    by_rank = lists_of_all_ranks(own) or []
    for rank, theirs in enumerate(by_rank):
        odd = sorted(set(theirs).symmetric_difference(by_rank[0]))
        if odd:
            name, shape, dtype, trained = odd[0]
            raise ValueError(
                f"ranks 0 and {rank} attached different parameters to the model: {name} {list(shape)} {dtype}, "
                f"requires_grad={trained}, is on one of them only; attach the same adapters on all ranks, before or "
                "after the model is prepared"
            )


def _order_as_on_rank_0(model: nn.Module) -> None:
    """Bring modules and parameters into the order that rank 0 has them in. Collective
    over the world.

    It is the order of ``_modules`` and ``_parameters``, in which nothing public moves
    an entry.

    Raises:
        ValueError: modules of an ``nn.Sequential`` are in another order, which would
            compute something else. On all ranks.
    """
    # Rank 0's order, if any rank has another.
    own = [name for name, _ in model.named_parameters()]
    if lists_of_all_ranks(own) is None:
        return
    places = {
        name: (list(each._modules), list(each._parameters))
        for name, each in model.named_modules()
    }
    first = of_rank_0(lambda: places)
    # Modules that rank 0 does not have stay as they are.
    moved = [name for name, here in places.items() if here != first.get(name, here)]
    sequences = [
        name
        for name in moved
        if isinstance(model.get_submodule(name), (nn.Sequential, nn.ModuleList))
    ]
    for names in lists_of_all_ranks(sequences) or []:
        if names:
            raise ValueError(
                f"{names[0]} has its modules in another order on some ranks than on rank 0, and would compute "
                "something else there; build it in the same way on all ranks"
            )
    for name in moved:
        module = model.get_submodule(name)
        registries: tuple[dict[str, Any], ...] = (module._modules, module._parameters)
        # Taken out and put in again, key by key, entries end in this order.
        for registry, order in zip(registries, first[name], strict=True):
            for key in [key for key in order if key in registry]:
                registry[key] = registry.pop(key)


def step_alike(optimizer: torch.optim.Optimizer, models: Sequence[Any]) -> None:
    """Bring each group's parameters into the order that the first rank with the same
    layers has them in. Collective over the world.

    Raises:
        ValueError: ranks step other parameters. On all ranks.
    """
    # Names are compared, because tensors of several ranks cannot be.
    names = {}
    for number, model in enumerate(models):
        for name, parameter in model.module.named_parameters():
            names[id(parameter)] = f"{clean_name(name)}" + (
                f" of model {number}" if number else ""
            )
    own: list[list[str]] = []
    for group in optimizer.param_groups:
        # What is of no model is refused by its shape.
        own.append(
            [
                names.get(id(model_parameter(p)), f"none, {list(p.shape)}")
                for p in group["params"]
            ]
        )
    by_rank = lists_of_all_ranks(own)
    if by_rank is None:
        return
    # Ranks of one pipeline stage hold the same layers; the first of them is the
    # measure.
    stage = models[0].mesh.stage
    stages = of_all_ranks(stage)
    for rank, theirs in enumerate(by_rank):
        first = stages.index(stages[rank])
        _require_the_same_groups(
            type(optimizer).__name__, (first, by_rank[first]), (rank, theirs)
        )
    for group, order, here in zip(
        optimizer.param_groups, by_rank[stages.index(stage)], own, strict=True
    ):
        # Positions in the first rank's groups.
        place = {name: number for number, name in enumerate(order)}
        pairs = sorted(
            zip(here, group["params"], strict=True), key=lambda pair: place[pair[0]]
        )
        # The same list: LBFGS has the first one under a name of its own, too.
        group["params"][:] = [parameter for _, parameter in pairs]


_Groups = Sequence[Sequence[str]]


def _require_the_same_groups(
    kind: str, at_one: tuple[int, _Groups], at_other: tuple[int, _Groups]
) -> None:
    """Refuse groups that two ranks do not have alike, whatever the order in them."""
    (one, ours), (other, theirs) = at_one, at_other
    what_to_do = (
        "give the optimizer the same parameters in the same groups on all ranks"
    )
    if len(ours) != len(theirs):
        raise ValueError(
            f"the optimizer ({kind}) has {len(ours)} parameter groups on rank {one} and {len(theirs)} on rank {other}; "
            + what_to_do
        )
    for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        odd = sorted(set(left).symmetric_difference(right))
        if odd:
            only, others = (one, other) if odd[0] in left else (other, one)
            raise ValueError(
                f"the optimizer ({kind}) steps {odd[0]} in group {number} on rank {only} and not on rank {others}; "
                + what_to_do
            )
