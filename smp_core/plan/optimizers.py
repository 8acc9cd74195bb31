"""Optimizer states, counted for the memory plan.

Known are torch's optimizers, read from the object itself (class, momentum, ``amsgrad``,
...), and some by name for plans that are made before there is one. Any other is taken
to keep two tensors of the parameter's shape and dtype, as AdamW does, and the plan says
so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from smp_core.codecs import BLOCK


@dataclass(frozen=True)
class OptimizerStates:
    """The states that an optimizer keeps for each trainable parameter, in its dtype if
    nothing else is said.

    Attributes:
        name: of the optimizer, for people.
        tensors: of the parameter's shape.
        bytes_each: of all of them for each element, where they have a dtype of their
            own; None: the parameter's.
        origin: how this is known: "assumed", "found" or "given".
        known: False: their number is a guess.
    """

    name: str
    tensors: int
    origin: str = "assumed"
    known: bool = True
    bytes_each: float | None = None

    def bytes_of(self, elements: int, itemsize: int) -> int:
        """Return the bytes of the states of so many elements, of a parameter of so many
        bytes each."""
        each = self.tensors * itemsize if self.bytes_each is None else self.bytes_each
        return math.ceil(elements * each)

    def describe(self) -> str:
        """Return a phrase like "assumed adamw, 2 states for each trainable
        parameter"."""
        count = f"{self.tensors} state{'' if self.tensors == 1 else 's'} for each trainable parameter"
        if not self.known:
            return f"{self.origin} {self.name}, which is not known here: assumed {count}, as adamw has"
        size = (
            ""
            if self.bytes_each is None
            else f", {self.bytes_each:.2f} bytes an element"
        )
        return f"{self.origin} {self.name}, {count}{size}"


_TENSORS = {
    "adamw": 2,
    "adamw-amsgrad": 3,
    "adam": 2,
    "adam-amsgrad": 3,
    "adagrad": 1,
    "rmsprop": 1,
    "lion": 1,
    "sgd-momentum": 1,
    "sgd": 0,
}
_IN_8_BITS = 2 * (1 + 4 / BLOCK)
OPTIMIZERS: Mapping[str, OptimizerStates] = {
    **{name: OptimizerStates(name, tensors) for name, tensors in _TENSORS.items()},
    "adamw8bit": OptimizerStates("adamw8bit", 2, bytes_each=_IN_8_BITS),
}
"""By the names that plans are asked for with; the values of `planner.optimizer`."""


def _if_set(*options: str) -> Callable[[Mapping[str, Any]], int]:
    return lambda group: sum(bool(group.get(option)) for option in options)


# torch's optimizers by class: tensors that they always keep, and what a group may ask
# for on top.
_TORCHS: dict[str, tuple[int, Callable[[Mapping[str, Any]], int]]] = {
    "SGD": (0, _if_set("momentum")),
    **dict.fromkeys(("Adam", "AdamW"), (2, _if_set("amsgrad"))),
    **dict.fromkeys(("NAdam", "RAdam", "Adamax", "Adadelta"), (2, _if_set())),
    **dict.fromkeys(("Adagrad", "ASGD"), (1, _if_set())),
    "Muon": (1, _if_set()),
    # factors of rows and columns; Transformers' keeps a first moment too, if asked to
    "Adafactor": (0, lambda group: group.get("beta1") is not None),
    "RMSprop": (1, _if_set("momentum", "centered")),
    "Lion": (1, _if_set()),  # of several libraries, which agree
}
# Of ours, with states of a dtype of their own.
_OURS = {"AdamW8bit": OPTIMIZERS["adamw8bit"]}
_OPTIONS = {
    "momentum": " with momentum",
    "amsgrad": " with amsgrad",
    "centered": ", centered",
}


def states_of(optimizer: Optimizer) -> OptimizerStates:
    """Return what this optimizer is going to keep. Its states are not looked at: before
    the first step there are none."""
    groups = optimizer.param_groups
    # Optimizers of smp_core.optim, a floor above, give the number themselves. Looked up
    # by name, so that this file need not import them.
    of_group = getattr(optimizer, "planned_states", None)
    if of_group is not None:
        return OptimizerStates(
            type(optimizer).__name__,
            max(map(of_group, groups), default=0),
            origin="found",
        )
    # Subclasses keep what their bases do.
    for kind in type(optimizer).__mro__:
        name = kind.__name__
        if name in _OURS:
            return replace(_OURS[name], name=name, origin="found")
        if name in _TORCHS:
            # What options add to it, by the group that asks for most.
            always, more = _TORCHS[name]
            asked = []
            for option, words in _OPTIONS.items():
                if any(group.get(option) for group in groups):
                    asked.append(words)
            most = max((more(group) for group in groups), default=0)
            return OptimizerStates(
                name + "".join(asked if most else ()), always + most, origin="found"
            )
    return OptimizerStates(type(optimizer).__name__, 2, origin="found", known=False)


def planned_states(asked: str, optimizers: Sequence[Optimizer] = ()) -> OptimizerStates:
    """Return what to plan with.

    Args:
        asked: `planner.optimizer`: a name, or "auto": what `optimizers` keep (of
            several the one that keeps most), or AdamW where there is none yet.
    """
    # A name counts more than what the optimizers show.
    if asked in OPTIMIZERS:
        return replace(OPTIMIZERS[asked], origin="given")
    if not optimizers:
        return OPTIMIZERS["adamw"]
    return max(map(states_of, optimizers), key=lambda states: states.bytes_of(1, 4))
