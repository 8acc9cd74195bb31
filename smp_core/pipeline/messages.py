"""Activations to the next stage and their gradients back.

What arrives is told beforehand only once: with the first micro-batch of shapes that are
new (and of training, or not), each stage sends the next one shape and dtype of its
activation ahead. So nothing of the user's code runs an extra time to find them out, and
batches of another shape need no preparation. Sends are not waited for, receives when
their content is needed. All stages send and receive in one order of the whole pipeline,
so that stages never wait in a circle, also where a backend takes messages of a group one
after the other. Activations and gradients have a group each: a receive may be begun a
computation before it is needed, and what goes the other way passes it.

In the first call of a kind (training, with tensors of these names), a stage whose
forward fails says so in the place of a shape; when the first micro-batch has gone
through all stages they meet once, and all raise what one of them has. Messages of a
step that ended so are never taken for later ones, whose tags differ.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.cluster import Axis, SmpMesh, of_all_ranks
from smp_core.comm import CommMeter
from smp_core.watch import here, innermost_user_line

_FAILED = -1  # in the place of the number of dims
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
_MOST_DIMS = 8


Activations = tuple[Tensor, ...]
"""What a chunk hands on: the tensor that goes through the blocks, and what travels
beside it."""

Gradients = tuple[Tensor | None, ...]
"""Of activations, in their order; None for those that want none."""


@dataclass(frozen=True)
class Format:
    """The form of an activation."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Format:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def encoded(self, device: torch.device) -> Tensor:
        if self.dtype not in _DTYPES or len(self.shape) > _MOST_DIMS:
            raise ValueError(
                f"pipeline stages cannot send activations {list(self.shape)} of {self.dtype}; allowed: at most "
                f"{_MOST_DIMS} dims of {', '.join(map(str, _DTYPES))}"
            )
        # A fixed number of places, so that the receiver knows the size of the header.
        dims = [*self.shape, *[0] * (_MOST_DIMS - len(self.shape))]
        numbers = [
            len(self.shape),
            _DTYPES.index(self.dtype),
            int(self.requires_grad),
            *dims,
        ]
        return torch.tensor(numbers, device=device)

    @classmethod
    def decoded(cls, tensor: Tensor) -> Format | None:
        """Return the format; None: there is no activation."""
        dims, dtype, requires_grad, *shape = tensor.tolist()
        if dims == _FAILED:
            return None
        return cls(tuple(shape[:dims]), _DTYPES[dtype], bool(requires_grad))


class Pending:
    """Messages that are awaited.

    Args:
        tensors: filled when ``works`` are over.
        waiting: a context around waiting.
    """

    def __init__(
        self,
        tensors: Any,
        works: list[Any],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._tensors = tensors
        self._works = works
        self._waiting = waiting

    def wait(self) -> Any:
        """Return what arrived."""
        # On an accelerator the wait is the stream's, not the host's.
        with self._waiting(), here.waiting("a message of another pipeline stage"):
            for work in self._works:
                work.wait()
        return self._tensors


class Messages:
    """The messages of this rank to and from the other stages. All stages' keep to one
    order (:mod:`schedule`). Collective over the stages.

    Args:
        goes_around: whether the last stage sends to the first.
        parts: how many tensors a chunk hands on.
    """

    def __init__(
        self, mesh: SmpMesh, meter: CommMeter, goes_around: bool, parts: int = 1
    ) -> None:
        self._groups, self._device, self._meter, self._parts = (
            mesh.column,
            mesh.device,
            meter,
            parts,
        )
        self._column = mesh.layout.ranks(mesh.rank, Axis.PIPELINE)
        self._link: Any = (
            "inter" if mesh.topology.spans_nodes(self._column) else "intra"
        )
        # Formats by kind of batch and chunk: known after the first micro-batch.
        self._incoming: dict[tuple[Hashable, int], list[Format]] = {}
        self._outgoing: dict[tuple[Hashable, int], list[Format]] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._key: Hashable = None
        self._call: Hashable = None
        self._agreed: set[tuple[Hashable, int]] = set()
        self._is_first_call = True
        self._posted: list[Any] = []
        self._left_behind: list[Any] = []
        self._tag = 0
        self._connect(goes_around)

    def _connect(self, goes_around: bool) -> None:
        """Send one number the way that each message will go, pair after pair of stages.

        NCCL connects two ranks, each way apart, in the first message that goes it, and
        holds both hosts until the other one has begun it. In a schedule a stage may
        begin something else first, which waits for the stage held here.
        """
        number = torch.zeros(1, device=self._device)
        own = self._column.index(dist.get_rank())
        last = len(self._column) - 1
        # Pair after pair, each way: every rank is in one exchange at a time.
        pairs = [(stage, stage + 1) for stage in range(last)]
        if goes_around and last > 1:
            pairs.append((last, 0))
        for pair in pairs:
            for (sender, receiver), group in (
                (pair, self._groups.forward),
                (pair[::-1], self._groups.backward),
            ):
                work: dist.Work | None = None
                if own == sender:
                    work = dist.isend(number, self._column[receiver], group)
                elif own == receiver:
                    work = dist.irecv(number, self._column[sender], group)
                if work is not None:
                    work.wait()

    def begin(self, key: Hashable, call: Hashable) -> None:
        """Begin a step whose micro-batches are all of one kind.

        Args:
            key: equal keys mean equal activations.
            call: what is called, with what; whatever its shapes are.
        """
        self._key, self._call = key, call
        self._posted.clear()
        # Receives of a first call are kept: if it fails, they are never waited for.
        self._is_first_call = not any(each == call for each, _ in self._agreed)

    def is_new(self, chunk: int) -> bool:
        """Return whether no such call has gone through all chunks of a round yet; the
        same on all stages."""
        return (self._call, chunk // len(self._column)) not in self._agreed

    def agree(self, chunk: int, problem: Exception | None) -> None:
        """Meet the other stages behind the first forwards of a round of chunks.
        Collective over them.

        Raises:
            Exception: what this stage's raised, or a ValueError or RuntimeError with
                what another one's raised.
        """
        # All stages learn of a failure at the same place of the schedule.
        own = (
            None
            if problem is None
            else (isinstance(problem, ValueError), in_words(problem))
        )
        with here.waiting("the first forward of all pipeline stages"):
            told = of_all_ranks(own, self._groups.host)
        if not any(told):
            self._agreed.add((self._call, chunk // len(self._column)))
            return
        # Messages of the ended step that still come have the old tag.
        self._tag += 1
        # Gloo wants them alive until their peers take them.
        self._left_behind += [*self._sent, *self._posted]
        self._sent.clear()
        # The next call of this kind begins from nothing known.
        self._agreed = {each for each in self._agreed if each[0] != self._call}
        for formats in (self._incoming, self._outgoing):
            for each in [each for each in formats if each[0] == self._key]:
                del formats[each]
        if problem is not None:
            raise problem
        number, (is_refusal, text) = next(
            (place, each) for place, each in enumerate(told) if each is not None
        )
        raise (ValueError if is_refusal else RuntimeError)(
            f"pipeline stage {number}: {text}"
        )

    def require_format(self, given: Activations) -> None:
        """Refuse activations that cannot be sent.

        Raises:
            ValueError: a dtype or a number of dims.
        """
        self._header([Format.of(activation) for activation in given])

    def _header(self, formats: list[Format]) -> Tensor:
        return torch.stack([format_.encoded(self._device) for format_ in formats])

    def _no_header(self) -> Tensor:
        return torch.zeros(
            self._parts, 3 + _MOST_DIMS, dtype=torch.int64, device=self._device
        )

    def send_failure(self, stage: int) -> None:
        """Say that there will be no activation of this kind."""
        header = self._no_header()
        header[0, 0] = _FAILED
        self._send(header, stage, self._groups.forward)

    def send_activations(self, chunk: int, given: Activations, stage: int) -> None:
        """Send what a chunk gave; the first of its kind after its formats.

        Raises:
            ValueError: activations of other formats than the ones before.
        """
        # The first of a kind is preceded by its formats; the others have to keep to
        # them.
        formats = [Format.of(activation) for activation in given]
        known = self._outgoing.get((self._key, chunk))
        if known is None:
            self._outgoing[self._key, chunk] = formats
            self._send(self._header(formats), stage, self._groups.forward)
        elif known != formats:
            raise ValueError(
                f"micro-batches of equal shapes gave activations of different ones between pipeline stages: {known}, "
                f"then {formats}; a training_step that cuts its batch by what is in it is not built yet"
            )
        for activation in given:
            self._send(activation.detach().contiguous(), stage, self._groups.forward)

    def receive_activations(self, chunk: int, stage: int) -> Pending | None:
        """Await what a chunk of another stage gave; None: its forward has failed."""
        # The first of its kind waits for its format, and then has room made for it.
        if (self._key, chunk) not in self._incoming:
            header = self._no_header()
            self._receive((header,), stage, self._groups.forward).wait()
            formats = [Format.decoded(row) for row in header]
            if formats[0] is None:
                return None
            self._incoming[self._key, chunk] = [
                format_ for format_ in formats if format_ is not None
            ]
        expected = self._incoming[self._key, chunk]
        arriving = tuple(
            torch.empty(each.shape, dtype=each.dtype, device=self._device)
            for each in expected
        )
        pending = self._receive(arriving, stage, self._groups.forward)
        # Leaves of this stage's graph: their gradients go back.
        for tensor, each in zip(arriving, expected, strict=True):
            tensor.requires_grad_(each.requires_grad)
        return pending

    def send_gradients(self, gradients: Gradients, stage: int) -> None:
        """Send the gradients of activations; None is not sent, and not awaited."""
        for gradient in gradients:
            if gradient is not None:
                self._send(gradient.contiguous(), stage, self._groups.backward)

    def receive_gradients(self, of: Activations, stage: int) -> Pending:
        """Await the gradients of activations that were sent and want one."""
        return self._receive(
            tuple(map(_space_for_gradient, of)), stage, self._groups.backward
        )

    def finish(self) -> None:
        """Wait until what was sent has left."""
        while self._sent:
            self._wait_for_oldest()

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        # What is sent is kept until it has left; of what waits longer than a round of
        # all stages, the oldest first.
        while len(self._sent) > 2 * len(self._column):
            self._wait_for_oldest()
        told = [(self._column[stage], tensor.nbytes)]
        with self._meter.point_to_point("pipeline", told, self._link):
            self._sent.append(
                (dist.isend(tensor, self._column[stage], group, self._tag), tensor)
            )

    def _wait_for_oldest(self) -> None:
        with here.waiting("another pipeline stage to take a message"):
            self._sent.popleft()[0].wait()

    def _receive(
        self, tensors: Gradients, stage: int, group: dist.ProcessGroup
    ) -> Pending:
        # Waiting is metered as part of the message, and is no new one.
        def waiting() -> AbstractContextManager[None]:
            return self._meter.point_to_point(
                "pipeline", [], self._link, new_call=False
            )

        # Room for None is not awaited: no gradient will come.
        peer = self._column[stage]
        works = [
            dist.irecv(tensor, peer, group, self._tag)
            for tensor in tensors
            if tensor is not None
        ]
        pending = Pending(tensors, works, waiting if works else nullcontext)
        if self._is_first_call:
            self._posted.append(pending)
        return pending


def _space_for_gradient(of: Tensor) -> Tensor | None:
    if not of.requires_grad:
        return None
    return torch.empty_like(
        of, memory_format=torch.contiguous_format, requires_grad=False
    )


def in_words(problem: Exception) -> str:
    """Return what failed, and the line of the user's code."""
    line = innermost_user_line(traceback.extract_tb(problem.__traceback__))
    text = (
        str(problem)
        if isinstance(problem, ValueError)
        else f"{type(problem).__name__}: {problem}"
    )
    return f"{text} ({line})" if line else text
