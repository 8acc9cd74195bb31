"""Activations: moments of what goes into each module and comes out of it in the first
step.

A layout cuts activations along samples, tokens or features, or holds them several
times. Sums of all elements over all ranks are the same however they are cut, and a
multiple where they are held several times; so these are compared: the sum, the sum of
magnitudes and the sum of squares, each accumulated in float64. What they cannot see is
elements that changed places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smp_core.checkpoint import iterate_tensors
from smp_core.torch_facts import clean_name, local_part

STEP = "the training step"
"""The name under which random numbers are noted that no module's forward has drawn."""

Place = tuple[str, str, int, int]
"""Whether into a module or out of it, the module's name, the number of its call, and of
the tensor there."""


@dataclass
class Moments:
    """Sums over the elements of one tensor on one rank, or on all.

    Attributes:
        place: where the tensor was seen.
        elements, dims, dtype: of the tensor.
        total, magnitude, squares: of the finite elements.
        others: how many elements are not finite.
    """

    place: Place
    elements: int
    dims: int
    total: float
    magnitude: float
    squares: float
    dtype: str = "float64"
    others: int = 0

    @property
    def name(self) -> str:
        return self.place[1]

    @property
    def goes_in(self) -> bool:
        return self.place[0] == "into"


class Activations:
    """A recorder of moments, by hooks on all modules of a model.

    Attributes:
        events: in the order in which they came.
        draws: modules in whose own forward random numbers were drawn, children aside;
            and ``STEP``.
        is_open: whether calls count; closed during backward, where forwards are
            repeated.
    """

    def __init__(self, model: nn.Module) -> None:
        self.events: list[Moments] = []
        self.draws: list[str] = []
        self.is_open = True
        self._calls: Counter[str] = Counter()
        self._stack: list[tuple[str, int, torch.Tensor]] = []
        self._drew: set[str] = set()
        # The random state that code outside of modules has begun with.
        self._outside: torch.Tensor | None = None
        self._hooks: list[RemovableHandle] = []
        # Hooks on every module, whatever the face has done to it.
        for name, module in model.named_modules():
            own = clean_name(name)
            if name.endswith(("_orig_mod", "_checkpoint_wrapped_module")):
                continue  # the wrapper has the same name
            self._hooks.append(
                module.register_forward_pre_hook(self._before(own), with_kwargs=True)
            )
            self._hooks.append(
                module.register_forward_hook(self._behind(own), always_call=False)
            )

    def close(self) -> None:
        """Remove the hooks: looking at activations costs a pass over each of them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin_batch(self) -> None:
        """Look at the code around modules from here on; what reads batches draws
        numbers of its own before."""
        # Later steps are not looked at: what their modules draw would pass for the
        # step's own.
        if self._hooks:
            self._outside = torch.get_rng_state()

    def end_forward(self) -> None:
        """Close the look: backward begins."""
        # What code outside of modules has drawn until now.
        self._look_outside()
        self._outside, self.is_open = None, False

    def _look_outside(self) -> None:
        if self._outside is None or torch.equal(self._outside, torch.get_rng_state()):
            return
        if STEP not in self.draws:
            self.draws.append(STEP)

    def _before(self, name: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            # Evaluations, and forwards repeated in backward, are not compared.
            if not self._counts(module):
                return
            # The outermost module begins: before it, the step's own code has run.
            if not self._stack:
                self._look_outside()
            call = self._calls[name]
            self._calls[name] += 1
            self._note("into", name, call, [*args, *kwargs.values()])
            self._stack.append((name, call, torch.get_rng_state()))

        return before

    def _behind(self, name: str) -> Any:
        def behind(module: nn.Module, args: Any, output: Any) -> None:
            # A call that was not entered while counting is not left, either.
            if (
                not self._counts(module)
                or not self._stack
                or self._stack[-1][0] != name
            ):
                return
            _, call, random = self._stack.pop()
            # Numbers were drawn inside; children that drew have noted themselves.
            if not torch.equal(random, torch.get_rng_state()):
                inside = f"{name}." if name else ""
                if not any(child.startswith(inside) for child in self._drew):
                    self.draws.append(name)
                self._drew.add(name)
            # What modules draw is not the step's own.
            if not self._stack and self._outside is not None:
                self._outside = torch.get_rng_state()
            self._note("out of", name, call, output)

        return behind

    def _counts(self, module: nn.Module) -> bool:
        return self.is_open and module.training and torch.is_grad_enabled()

    @torch.no_grad()
    def _note(self, side: str, name: str, call: int, values: Any) -> None:
        for number, tensor in enumerate(_floating(values)):
            if side == "into" and tensor.ndim == 0:
                # A count of targets, a temperature: an option and no activation.
                continue
            # A DTensor's own part: sums over ranks make the tensor whole.
            local = local_part(tensor)
            # float64: sums of many elements have to agree to 9 digits.
            value = local.detach().double()
            others = value.numel() - value.isfinite().sum()
            value = value.nan_to_num(0.0, 0.0, 0.0)
            sums = [value.sum(), value.abs().sum(), value.square().sum(), others]
            total, magnitude, squares, lost = torch.stack(sums).tolist()
            dtype = str(local.dtype).removeprefix("torch.")
            place = (side, name, call, number)
            self.events.append(
                Moments(
                    place,
                    value.numel(),
                    value.ndim,
                    total,
                    magnitude,
                    squares,
                    dtype,
                    int(lost),
                )
            )


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones, which can be compared; other
    tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _floating(values: Any) -> list[torch.Tensor]:
    found = iterate_tensors(values, mapping=Mapping)
    tensors = [as_real(tensor) for _, tensor in found]
    return [
        tensor
        for tensor in tensors
        if tensor.is_floating_point() and tensor.device.type != "meta"
    ]


def in_fewer_calls(events: Sequence[Moments], calls: int) -> list[Moments]:
    """Return events in which so many calls of a module, one after another, count as
    one."""
    placed = [(event, event.place) for event in events]
    return [
        replace(event, place=(side, name, call // calls, tensor))
        for event, (side, name, call, tensor) in placed
    ]


def over_ranks(events: Sequence[Sequence[Moments]]) -> dict[Place, Moments]:
    """Return the moments of all ranks together, by place."""
    found: dict[Place, Moments] = {}
    for event in (event for rank in events for event in rank):
        if event.place not in found:
            found[event.place] = Moments(
                event.place, 0, event.dims, 0.0, 0.0, 0.0, event.dtype
            )
        # Elements add up too: they tell how many copies the ranks hold.
        together = found[event.place]
        together.elements += event.elements
        together.total += event.total
        together.magnitude += event.magnitude
        together.squares += event.squares
        together.others += event.others
    return found


def difference(here: Moments, there: Moments) -> float | None:
    """Return how far the moments of a layout are from those of one process, relative to
    their size.

    Returns:
        None where the layout's elements are no whole multiple of one process's: these
        cannot be compared.
    """
    if there.elements == 0 or here.elements % there.elements:
        return None
    # Ranks that hold the same elements make a whole number of copies.
    copies = here.elements // there.elements
    # A mean of ranks' losses is nan where that of one rank is.
    alike = (
        (here.others > 0) == (there.others > 0)
        if there.dims == 0
        else here.others == copies * there.others
    )
    if not alike:
        return float("inf")
    if there.dims == 0 and there.others:
        return 0.0
    if there.dims == 0:
        # A mean over a rank's samples, of which one process has the mean; or its part
        # of a sum over all of them.
        return min(
            _off(here.total / copies, there.total), _off(here.total, there.total)
        )
    return max(
        _off(here.total / copies, there.total, there.magnitude),
        _off(here.magnitude / copies, there.magnitude),
        _off(here.squares / copies, there.squares),
    )


def _off(ours: float, theirs: float, size: float | None = None) -> float:
    """Return the difference of two numbers relative to a size, by default that of the
    second; nan equals nan."""
    if ours != ours or theirs != theirs:
        return 0.0 if ours != ours and theirs != theirs else float("inf")
    return abs(ours - theirs) / max(abs(theirs) if size is None else size, 1e-300)
