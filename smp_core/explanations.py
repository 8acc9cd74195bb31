"""What torch's and others' errors mean for a sharded model, and what to type, as a note under the error.

They come from places that are not ours (an operator that meets a shard, a copy of a module), so they cannot be refused
before. A note is printed with the traceback wherever the error is printed.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

_SUBMODULE = (
    "parameters are shards outside of the model's forward, and a submodule or an operator was given one with a plain "
    "tensor. Call the model itself; or put the call into a method of the model and name it, "
    "forward_methods=['sample']; or, in Lightning, write trainer.strategy.parallel.call(submodule, x). All ranks have "
    "to make the call. To compute with a weight itself: parameter.full_tensor() on all ranks; in a term of the loss, "
    "term.full_tensor(), as in loss + 0.1 * sum(p.square().sum().full_tensor() for p in model.parameters())."
)
_COPY = (
    "a sharded model cannot be copied. Copy it before it is prepared (in Lightning: in __init__ or configure_model), "
    "and prepare the copy with it; for an average of weights use Lightning's EMAWeightAveraging, or "
    "smp_core.averaging.ShardedAverage(parallel); for the weights alone, {name: p.detach().clone() for name, p in "
    "model.named_parameters()}, which are shards as well."
)
_NO_SYNC = (
    "no_sync is DistributedDataParallel's. To hold gradients back write `with accelerator.no_sync(model):`, or in "
    "Lightning `with trainer.strategy.block_backward_sync():`. LocalSGD, which lets replicas drift apart, has no "
    "counterpart: leave it out; gradient accumulation saves as many messages with one process's numbers."
)
_NOT_TOGETHER = (
    "another rank did not come to this collective, or has ended. Every rank has to make each call into a sharded "
    "model, equally often: take it out of `if rank == 0:`, give all ranks as many batches. Where a rank failed, its "
    "own error or a line of torch-smp names it."
)
_NOTES = {
    "got mixed torch.Tensor and DTensor": _SUBMODULE,
    "FSDP does not support deepcopy": _COPY,
    "object has no attribute 'no_sync'": _NO_SYNC,
    "Connection closed by peer": _NOT_TOGETHER,
    "Timed out waiting": _NOT_TOGETHER,
}


def explain(error: BaseException) -> None:
    """Add the note that belongs to an error, if there is one and it has not got it."""
    text = str(error)
    for sign, note in _NOTES.items():
        said = f"torch-smp: {note}"
        if sign in text and said not in getattr(error, "__notes__", []):
            add_note = getattr(error, "add_note", None)  # Python >= 3.11
            if add_note is not None:
                add_note(said)


def explain_uncaught_errors() -> None:
    """Add the notes to uncaught errors of this process, too."""
    if not isinstance(sys.excepthook, _Explaining):
        sys.excepthook = _Explaining(sys.excepthook)


class _Explaining:
    """The interpreter's hook for uncaught exceptions, with notes."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain(error)
        self._before(kind, error, trace)
