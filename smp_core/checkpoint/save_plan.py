"""Who writes which slice: torch's DCP save planner for a flat dict of tensors, with ties and empty slices settled.

DCP gives each slice that several ranks hold to the one that has the least to write so far, so replicas share the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor


class SmpSavePlanner(DefaultSavePlanner):
    """DCP's planner for a flat dict of tensors, which also leaves out empty slices and writes tied tensors once.

    A tie is two names over the same memory. A rank whose slice is empty cannot see ties, so each rank reports what it
    sees and the coordinator keeps the ties that nobody contradicts.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if _carries_data(item)]
        self.plan = dataclasses.replace(plan, items=items, planner_data=_ties(self.state_dict))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        aliases = _agreed_aliases([plan.planner_data for plan in all_plans])
        kept = [
            dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn not in aliases])
            for plan in all_plans
        ]
        plans, metadata = super().create_global_plan(_one_chunk_when_empty(kept))
        self.metadata = dataclasses.replace(metadata, planner_data=aliases)
        return plans, self.metadata


def _carries_data(item: WriteItem) -> bool:
    data = item.tensor_data
    assert data is not None and data.chunk is not None
    return data.chunk.sizes.numel() > 0 or data.size.numel() == 0


def _one_chunk_when_empty(plans: list[SavePlan]) -> list[SavePlan]:
    seen: set[str] = set()
    result = []
    for plan in plans:
        items = []
        for item in plan.items:
            assert item.tensor_data is not None
            if item.tensor_data.size.numel() == 0:
                if item.index.fqn in seen:
                    continue
                seen.add(item.index.fqn)
            items.append(item)
        result.append(dataclasses.replace(plan, items=items))
    return result


def _ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, str | None]:
    """Name -> the first name over the same memory (itself when there is none), None where this rank cannot tell."""
    first: dict[Any, str] = {}
    ties: dict[str, str | None] = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        if hasattr(tensor, "__create_write_items__") and placements is None:
            ties[name] = name
        elif local.numel() == 0:
            ties[name] = None
        else:
            layout = (tuple(local.shape), local.stride(), local.dtype, tuple(tensor.shape), placements)
            key = (str(local.device), local.data_ptr(), layout)
            ties[name] = first.setdefault(key, name)
    return ties


def _agreed_aliases(reports: list[dict[str, str | None]]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    refuted: set[str] = set()
    for report in reports:
        for name, target in report.items():
            if target is None:
                continue
            if target == name or aliases.get(name, target) != target:
                refuted.add(name)
            aliases[name] = target
    return {name: target for name, target in aliases.items() if name not in refuted}
