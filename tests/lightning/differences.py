"""Where what ranks show differs from what one process shows."""

from __future__ import annotations

import math
from typing import Any

import torch

TOLERANCE = 1e-9  # float64, a few steps of an optimizer that divides by small numbers


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two results differ, numbers by more than the tolerance."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        lines = [f"{path}: only one has {key}" for key in ours.keys() ^ theirs.keys()]
        for key in theirs:
            lines += (
                differences(ours[key], theirs[key], f"{path} / {key}")
                if key in ours
                else []
            )
        return lines
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return [
                f"{path}: {len(ours)} items, in one process {len(theirs)}: {ours} {theirs}"
            ]
        lines = []
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            lines += differences(one, other, f"{path} / {number}")
        return lines
    if torch.is_tensor(theirs):
        same = ours.shape == theirs.shape and torch.allclose(
            ours, theirs, rtol=0, atol=TOLERANCE
        )
        return (
            [] if same else [f"{path}: tensors are {(ours - theirs).abs().max()} apart"]
        )
    try:
        same = math.isclose(
            float(ours), float(theirs), rel_tol=0, abs_tol=TOLERANCE
        ) or str(ours) == str(theirs)
    except (TypeError, ValueError):
        same = ours == theirs
    return [] if same else [f"{path}: {ours}, in one process {theirs}"]
