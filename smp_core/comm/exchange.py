"""Messages between the ranks of one group, for backends whose own collectives move too much or lose full duplex.

Measured on gloo: its reduce_scatter puts a whole ring all-reduce on the wire, and in a group of two its collectives
lose full duplex unless every receive is posted before any send. Both are avoided here: all receives first, straight
into their final place, then all sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

Message = tuple[torch.Tensor, int]


def exchange(sends: Sequence[Message], receives: Sequence[Message], group: dist.ProcessGroup) -> None:
    """Send and receive contiguous tensors; returns when all have arrived and all send buffers are free again.

    Args:
        sends: (tensor, global rank of the destination). Messages to one destination keep their order.
        receives: (tensor, global rank of the source), in the order in which that source sends them.
        group: a group all these ranks belong to.
    """
    pending = [dist.irecv(tensor, src=source, group=group) for tensor, source in receives if tensor.numel()]
    pending += [dist.isend(tensor, dst=destination, group=group) for tensor, destination in sends if tensor.numel()]
    for work in pending:
        if work is not None:
            work.wait()


def prefers_messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether stages of collectives over ``group`` are made of messages (gloo) or of the library's collectives."""
    return device.type == "cpu" and "gloo" in str(dist.get_backend(group))


def sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out = parts[0] + parts[1] + ...`` in that order, so that the result does not depend on arrival.

    Half precision is added up in float32 and rounded once. ``out`` may be one of the parts only if it is the first.
    """
    if out.dtype in (torch.float16, torch.bfloat16) and len(parts) > 2:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
        return
    out.copy_(parts[0])
    for part in parts[1:]:
        out += part
