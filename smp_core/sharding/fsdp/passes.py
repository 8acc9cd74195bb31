"""Backward passes as FSDP2 sees them: which one runs, its end, and what one that failed
leaves behind.

And the order in which units are reduced when a pass is over, the same on all ranks.
FSDP2 reduces a unit when its inputs have their gradients, the last unit of the forward
first. Units whose inputs want none (those before anything trainable) have no such
moment: FSDP2 reduces them at the end of the pass, a root first. Whether a unit's inputs
want gradients may depend on the branch that a rank took before it (embeddings that an
image tower adds to, while the rest is frozen), so that ranks would reduce in different
orders. Here the units that are left are reduced like the others, the last of the
forward first.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp_core.sharding.fsdp.internals import (
    generation,
    group_of,
    queue_callback,
    reset_passes,
)

FAILED_PASS = (
    "an earlier backward pass failed and left part of its gradients behind; call window.abandon() before the next "
    "forward (in Lightning: trainer.strategy.window.abandon())"
)

# What has nothing inside; and what cannot be looked into.
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
CLOSED = (Iterator, types.FunctionType, types.MethodType, functools.partial)

# Returns a number for the backward pass that is running, to tell it from the one
# before; -1 outside of one. Asked for with each collective of a unit, so it is torch's
# function itself.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id


class _RunningPass:
    """A backward pass that units or windows have heard of, and what is to be done at
    its end. Only autograd refers to it, from its first event to its end, or until it
    fails."""

    def __init__(self) -> None:
        self.number = backward_pass()
        # What windows and units want done, behind FSDP2's own callbacks.
        self.at_end: list[Callable[[], None]] = []
        self.is_over = False

    def __call__(self) -> None:
        # Queued once more: FSDP2's roots have queued theirs during the pass.
        self.is_over = True
        for callback in self.at_end:
            queue_callback(callback)


_latest: weakref.ref[_RunningPass] | None = None


def _outermost() -> _RunningPass:
    """Return the backward pass that is running, or the one around it: reentrant
    checkpoints and reversible layers run backward passes within one."""
    global _latest
    # A pass that failed was never over, and is gone with the reference.
    running = None if _latest is None else _latest()
    if running is None or running.is_over:
        running = _RunningPass()
        queue_callback(running)
        _latest = weakref.ref(running)
    return running


def outermost_pass() -> int:
    """Return what :func:`backward_pass` gives for the pass around the one that is
    running, if that is within another and units or windows have heard of the other.
    Only within a pass."""
    return _outermost().number


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the present backward pass, and a pass around it, is over
    and FSDP2 has finished it for every root.

    FSDP2's roots queue their own final callbacks while the pass runs, some perhaps
    after this call; queueing once more from the end of the pass puts ours behind all of
    them.
    """
    # Asked for at the end of a pass, this very one has to be found over.
    running = None if _latest is None else _latest()
    if running is not None and running.is_over and running.number == backward_pass():
        # At the end of the pass already.
        queue_callback(lambda: queue_callback(callback))
    else:
        _outermost().at_end.append(callback)


@dataclasses.dataclass(eq=False)
class Passes:
    """The backward pass that comes through a model's units, whether one of them failed,
    and the units that are reduced at the end of the present one, in the order of
    forward.

    A pass whose gradients are differentiated again (``create_graph``) leaves all units
    unsharded up to the end of the pass that does so: what it computed refers to their
    parameters.

    Attributes:
        is_open: from its first gather to its end. Still open between passes, it has
            failed.
        is_differentiated: whether the pass that runs is such a one.
        keep_unsharded: called at the beginning of such a pass (True), and at the end of
            the next other one (False).
        show_shards: called at the end of such a pass.
    """

    is_open: bool = False
    is_differentiated: bool = False
    keep_unsharded: Callable[[bool], None] = lambda kept: None
    show_shards: Callable[[], None] = lambda: None
    # Whether units stay gathered for a second differentiation.
    _keeps: bool = False
    # What reduces the units that are left for the end of the pass.
    _left: dict[object, Callable[[], None]] = dataclasses.field(default_factory=dict)

    def comes_through(self, recomputes: bool) -> None:
        """Take note of the pass that runs: it gathers a unit, perhaps for a recomputed
        forward, which is differentiated in any pass."""
        if self.is_open:
            return
        self.is_open = True
        self.is_differentiated = torch.is_grad_enabled() and not recomputes
        at_end_of_backward(self._end)
        # Graph recording in backward means create_graph, except in a recomputed
        # forward.
        if self.is_differentiated and not self._keeps:
            self._keeps = True
            self.keep_unsharded(True)

    def _end(self) -> None:
        # Gathered parameters stay until a pass that is not differentiated has used
        # them.
        if self.is_differentiated:
            self.show_shards()
        elif self._keeps:
            self._keeps = False
            self.keep_unsharded(False)
        self.forget()

    def forget(self) -> None:
        """Forget the pass: it is over, or what it left was discarded."""
        self.is_open = self.is_differentiated = False

    def used(self, unit: object, inputs: Any, reduce: Callable[[], None]) -> None:
        """Take note of a forward that a backward pass may follow.

        Args:
            reduce: reduces the unit; what FSDP2 calls itself.
        """
        # Taken out and put in again, as the last: a unit goes by its latest forward.
        self._left.pop(unit, None)
        # FSDP2 reduces units with an input that wants a gradient as backward goes.
        leaves = (leaf for leaf, _ in leaves_of(inputs, hidden=False))
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if not any(tensor.requires_grad for tensor in tensors):
            self._left[unit] = reduce

    def reduce_left(self, unit: object) -> bool:
        """Reduce all that are left, where FSDP2 begins with ``unit``; False: it is no
        such unit."""
        if unit not in self._left:
            return False
        # Emptied first, because each reduction comes back through the hook.
        left, self._left = self._left, {}
        for reduce in reversed(left.values()):
            reduce()
        return True


@torch.no_grad()
def forget_passes(modules: Iterable[nn.Module]) -> None:
    """Bring units back to where they are between steps, also from the middle of a
    forward or backward that failed: sharded, nothing in flight, no gradients.

    Args:
        modules: of all units of a model.
    """
    managed = [module for module in modules if isinstance(module, FSDPModule)]
    # Kernels that still read gathered memory would find it freed.
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    groups = list(filter(None, map(group_of, managed)))
    for group in groups:
        # It has to end: its messages would meet those of the next pass.
        group.drop_gather()
    reset_passes(managed)
    for group in groups:
        group.forget_gradients()


def leaves_of(nest: Any, hidden: bool = True) -> Iterator[tuple[Any, str | None]]:
    """Yield what has no inside in the arguments or the output of a call, tensors above
    all, each with the class of what hides it from FSDP2; None: nothing does.

    FSDP2 looks into tuples, lists and dicts and, since torch 2.13, into dataclasses and
    classes of dicts. Functions and iterators may have tensors inside, and cannot be
    looked into.

    Args:
        hidden: look into what FSDP2 does not look into, too.
    """
    # A stack in the place of recursion: nests may be deep, and objects may refer to one
    # another.
    known: set[int] = set()
    left: list[tuple[Any, str | None]] = [(nest, None)]
    while left:
        value, inside = left.pop()
        # Containers that FSDP2 unpacks itself hide nothing.
        if isinstance(value, (tuple, list)):
            left += [(each, inside) for each in value]
        elif isinstance(value, (torch.Tensor, nn.Module, type, *_PLAIN, *CLOSED)):
            yield value, inside
        elif id(value) not in known:
            known.add(id(value))
            # Below anything that FSDP2 does not open all leaves are hidden by it.
            if generation() == "2.11":
                is_seen = type(value) in (dict, OrderedDict, defaultdict)
            else:
                is_seen = isinstance(value, dict) or dataclasses.is_dataclass(value)
            if not is_seen and not hidden:
                continue
            around = inside if is_seen else type(value).__name__
            parts: Iterable[Any]
            if isinstance(value, Mapping):
                parts = value.values()
            elif dataclasses.is_dataclass(value):
                names = [field.name for field in dataclasses.fields(value)]
                parts = [getattr(value, name) for name in names]
            else:
                parts = getattr(value, "__dict__", {}).values()
            left += [(each, around) for each in parts]
