"""Chain: the blocks of a model in the order they run in, and which parameters work
before, in and after them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from smp_core.checkpoint import of_kind

Place = int | str
"""Of an argument: its position, or its keyword."""


@dataclass(frozen=True)
class StandIn:
    """A module that works before the first block, and what stands for it on stages that
    do not hold it.

    Attributes:
        name: of the module.
        features: of the zeros that it gives for each of its input's elements
            ("embedding") or rows ("linear"); None: it gives its input as it is.
        rows: whether the input's last dim is replaced.
        played: it gives zeros of the shapes that its forward gives on the meta device,
            whatever it takes.
    """

    name: str
    features: int | None = None
    rows: bool = False
    played: bool = False


@dataclass(frozen=True)
class Chain:
    """Parameters are named by their first names in the model.

    Attributes:
        module: name of the module whose forward runs the blocks.
        blocks: their names, in the order they run in.
        takes: where a block takes the tensor that goes through all of them.
        gives: its place in what a block gives, and how many things that gives; None: it
            gives nothing else.
        kind: what a block gives several things in.
        before, of_blocks, after: names of the parameters that work before, in and
            behind the blocks.
        stand_ins: modules with parameters that are called before the first block.
        buffers: that are saved with the model, extra states of modules among them:
            each one's name and the number of the block that it is in; -1: of a module
            that is called before the first one; None: of any other.
    """

    module: str
    blocks: tuple[str, ...]
    takes: Place
    gives: tuple[int, int] | None
    before: tuple[str, ...]
    of_blocks: tuple[tuple[str, ...], ...]
    after: tuple[str, ...]
    stand_ins: tuple[StandIn, ...]
    buffers: tuple[tuple[str, int | None], ...] = ()
    kind: type = tuple

    def of_more(self, within: str, count: int) -> Chain:
        """Return the chain of a model with ``count`` blocks that are all like the first
        of these.

        Args:
            within: name of the list that holds the blocks.

        Raises:
            ValueError: they are not what that list holds.
        """
        # A trace of one block stands for all of them, with their names.
        first = f"{within}.0"
        inside = all(name.startswith(f"{first}.") for name in self.of_blocks[0])
        if not inside or self.blocks != tuple(
            f"{within}.{number}" for number in range(len(self.blocks))
        ):
            raise ValueError(
                f"pipeline_parallel_degree: its blocks are not those of {within}, in their order"
            )

        def of_block(name: str, number: int) -> str:
            return f"{within}.{number}{name.removeprefix(first)}"

        numbers = range(count)
        blocks = tuple(f"{within}.{number}" for number in numbers)
        parameters = []
        for number in numbers:
            parameters.append(
                tuple(of_block(name, number) for name in self.of_blocks[0])
            )
        # Buffers of the first block are repeated like its parameters.
        outside = [(name, place) for name, place in self.buffers if place in (-1, None)]
        of_first = [name for name, place in self.buffers if place == 0]
        of_all = [
            (of_block(name, number), number) for number in numbers for name in of_first
        ]
        return replace(
            self,
            blocks=blocks,
            of_blocks=tuple(parameters),
            buffers=(*outside, *of_all),
        )

    def inside(self, module: str) -> Chain:
        """Return the chain with the names of a model that holds this one as ``module``;
        "": it is this one."""
        if not module:
            return self

        def named(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(f"{module}.{name}" for name in names)

        stand_ins = [
            replace(each, name=f"{module}.{each.name}") for each in self.stand_ins
        ]
        buffers = [(f"{module}.{name}", place) for name, place in self.buffers]
        return replace(
            self,
            module=f"{module}.{self.module}".removesuffix("."),
            blocks=named(self.blocks),
            before=named(self.before),
            of_blocks=tuple(map(named, self.of_blocks)),
            after=named(self.after),
            stand_ins=tuple(stand_ins),
            buffers=tuple(buffers),
        )


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Any:
    """Return the value in one place of a call's arguments."""
    return args[place] if isinstance(place, int) else kwargs[place]


def with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, value: Any
) -> tuple[Any, dict[str, Any]]:
    """Return a call's arguments with another value in one place."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: value}


def given_by(output: Any, gives: tuple[int, int] | None) -> Tensor:
    """Return the chain's tensor of what a block gave."""
    return output if gives is None else output[gives[0]]


def with_output(output: Any, gives: tuple[int, int] | None, value: Tensor) -> Any:
    """Return what a block gave with another tensor for the chain's."""
    if gives is None:
        return value
    return of_kind(type(output), (*output[: gives[0]], value, *output[gives[0] + 1 :]))
