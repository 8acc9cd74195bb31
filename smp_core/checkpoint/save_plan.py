"""The plan of a save: each slice goes to one writing rank, by torch's DCP planner for a
flat dict of tensors.

DCP gives each slice that several ranks hold to the one that has the least to write so
far, so replicas share the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from smp_core.torch_facts import local_part

_SMALL_BYTES = 1 << 20
# Keys of weights, averages of them and states, which replicas have alike.
_ALIKE_ON_REPLICAS = (
    *("state_dict", "more_state_dicts", "model", "models", "module"),
    *("current_model_state", "smp_average"),
    *("optimizer_states", "optimizer", "optimizers"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class StagedTensor:
    """A host copy of one rank's slices of a tensor; it plans like the tensor it was
    copied from.

    Attributes:
        items: DCP's write items of the tensor.
        slices: offset in the tensor -> host tensor.
        tie: :func:`tie_key` of the original.
        can_tie: False for tensor types of other packages, whose memory says nothing
            about ties.
    """

    items: list[WriteItem]
    slices: dict[torch.Size | None, Tensor]
    tie: Any
    can_tie: bool

    # DCP's protocol for tensor-like objects: it asks them instead of computing slices.
    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        return self.items


@dataclasses.dataclass(frozen=True, eq=False)
class LazyTensor:
    """An unsharded tensor that is read only when it is written: a leaf of a state that
    is converted, not trained.

    Attributes:
        shape, dtype: of the tensor.
        load: reads it.
        tie: equal for tensors that share their memory, None for others.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]
    tie: Any = None

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        # One item for the whole tensor: a conversion runs in one process.
        origin = torch.Size([0] * len(self.shape))
        size = torch.Size(self.shape)
        data = TensorWriteData(
            ChunkStorageMetadata(origin, size), TensorProperties(dtype=self.dtype), size
        )
        return [
            WriteItem(
                MetadataIndex(fqn, origin), WriteItemType.TENSOR, tensor_data=data
            )
        ]


class SmpSavePlanner(DefaultSavePlanner):
    """A planner of DCP for a flat dict of tensors that also leaves out empty slices and
    writes tied tensors once.

    A tie is two names over the same memory. A rank whose slice is empty cannot see
    ties, so each rank reports the ties that it sees, and the coordinator keeps those
    that no rank contradicts.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        # Ties are found on each rank and travel with its plan to the coordinator.
        plan = super().create_local_plan()
        items = [item for item in plan.items if _carries_data(item)]
        self.plan = dataclasses.replace(
            plan, items=items, planner_data=find_ties(self.state_dict)
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        # Read as late as possible, so that one tensor at a time is in memory.
        if isinstance(held, LazyTensor):
            return held.load()
        return (
            held.slices[index.offset]
            if isinstance(held, StagedTensor)
            else super().lookup_object(index)
        )

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        # The bytes of a tied tensor are written once, under the first name.
        aliases = agreed_aliases([plan.planner_data for plan in all_plans])
        kept = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index.fqn not in aliases]
            kept.append(dataclasses.replace(plan, items=items))
        # DCP's own plan now deals out the slices that several ranks hold.
        plans, metadata = super().create_global_plan(_small_ones_of_one_rank(kept))
        self.metadata = dataclasses.replace(metadata, planner_data=aliases)
        return plans, self.metadata


def _carries_data(item: WriteItem) -> bool:
    data = item.tensor_data
    assert data is not None and data.chunk is not None
    # DCP makes items for empty slices too, which uneven sharding gives to the last
    # ranks. A tensor without any element keeps its item: its shape has to be saved.
    return data.chunk.sizes.numel() > 0 or data.size.numel() == 0


def _small_ones_of_one_rank(plans: list[SavePlan]) -> list[SavePlan]:
    """Leave unsharded tensors that are small, those without elements, and those of
    neither a model nor an optimizer, to the first rank that has them.

    Where ranks differ in what should be the same (counters, sums of a metric, a
    confusion matrix), values that belong together are then of one rank, as all that is
    no tensor. Only weights and their states take time that sharing would save.
    """
    seen: set[str] = set()
    result = []
    for plan in plans:
        items = []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None and data.chunk is not None
            size = data.size.numel() * data.properties.dtype.itemsize
            top = item.index.fqn.partition(".")[0]
            alike = size >= _SMALL_BYTES and top in _ALIKE_ON_REPLICAS
            if size == 0 or (not alike and data.chunk.sizes == data.size):
                if item.index.fqn in seen:
                    continue
                seen.add(item.index.fqn)
            items.append(item)
        result.append(dataclasses.replace(plan, items=items))
    return result


def tie_key(tensor: Tensor) -> Any:
    """Return a key that two tensors over the same memory have in common; None where
    this rank's slice is empty, or a tensor has no memory of its own."""
    local = local_part(tensor)
    # A subclass that wraps other tensors is at address 0, as are all others like it.
    if local.numel() == 0 or local.data_ptr() == 0:
        return None
    # The same memory can be read as two different tensors, so shape, stride, dtype,
    # placements and signs that are still to be changed (conj) belong to the key.
    placements = tensor.placements if isinstance(tensor, DTensor) else None
    layout = (
        tuple(local.shape),
        local.stride(),
        local.dtype,
        tuple(tensor.shape),
        placements,
        local.is_conj(),
        local.is_neg(),
    )
    return (str(local.device), local.data_ptr(), layout)


def can_tie(tensor: Tensor) -> bool:
    """Return whether the address of a tensor's memory means something: other packages'
    tensors may make their memory when they are asked for it."""
    return isinstance(tensor, DTensor) or not hasattr(tensor, "__create_write_items__")


def find_ties(
    tensors: Mapping[str, Tensor | StagedTensor | LazyTensor],
) -> dict[str, str | None]:
    """Map each name to the first name over the same memory (itself when there is none);
    to None where this rank cannot tell.
    """
    first: dict[Any, str] = {}
    ties: dict[str, str | None] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, StagedTensor):
            is_known, key = tensor.can_tie, tensor.tie
        elif isinstance(tensor, LazyTensor):
            is_known, key = tensor.tie is not None, tensor.tie
        else:
            is_known = can_tie(tensor)
            key = tie_key(tensor) if is_known else None
        if not is_known:
            ties[name] = name
        else:
            # A name is tied to the first one in the order of the state, the same on all
            # ranks.
            ties[name] = None if key is None else first.setdefault(key, name)
    return ties


def agreed_aliases(reports: list[dict[str, str | None]]) -> dict[str, str]:
    """Map each tied name to the name it is tied to, where no rank's :func:`find_ties`
    contradicts."""
    aliases: dict[str, str] = {}
    refuted: set[str] = set()
    for report in reports:
        for name, target in report.items():
            if target is None:
                continue
            # A rank that sees two different memories is right: equal names elsewhere
            # may be views of one buffer by chance.
            if target == name or aliases.get(name, target) != target:
                refuted.add(name)
            aliases[name] = target
    return {name: target for name, target in aliases.items() if name not in refuted}
