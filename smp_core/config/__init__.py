"""Knobs: read once, strictly, with the value that took effect and why."""

from __future__ import annotations

from smp_core.config.config import SmpConfig

__all__ = ["SmpConfig"]
