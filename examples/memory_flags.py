"""Flags for the memory savers (docs/memory.md), the same in every example."""

from __future__ import annotations

import argparse
import os
from typing import Any


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--activation-checkpointing", default="none", help="none, full, every:N, selective, or JSON {glob: mode}"
    )
    memory.add_argument(
        "--activation-offloading", action="store_true", help="inputs of checkpointed blocks on the host"
    )
    memory.add_argument("--activation-loading-horizon", type=int, default=2, help="blocks whose inputs stay (2)")
    memory.add_argument("--state-offload", choices=("none", "optimizer", "all"), default="none", help="on the host")


def memory_knobs(flags: argparse.Namespace) -> dict[str, Any]:
    """The knobs that the flags ask for; those at their defaults are left out."""
    knobs: dict[str, Any] = {}
    if flags.activation_checkpointing != "none":
        knobs["activation_checkpointing"] = flags.activation_checkpointing
    if flags.activation_offloading:
        knobs["activation_offloading"] = True
        knobs["activation_loading_horizon"] = flags.activation_loading_horizon
    if flags.state_offload != "none":
        knobs["state_offload"] = flags.state_offload
    return knobs


def into_environment(knobs: dict[str, Any]) -> None:
    """Beside the knobs that a launcher has put there, such as the layout in a YAML file."""
    os.environ.update({f"SMP_{knob.upper()}": str(value).lower() for knob, value in knobs.items()})
