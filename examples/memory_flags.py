"""Flags for the memory savers (docs/memory.md), the same in every example."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--activation-checkpointing",
        default="none",
        help="none, full, every:N, selective, or JSON {glob: mode}",
    )
    memory.add_argument(
        "--activation-offloading",
        action="store_true",
        help="inputs of checkpointed blocks on the host",
    )
    memory.add_argument(
        "--activation-loading-horizon",
        type=int,
        default=2,
        help="blocks whose inputs stay (2)",
    )
    memory.add_argument(
        "--state-offload",
        choices=("none", "optimizer", "all"),
        default="none",
        help="on the host",
    )


def memory_knobs(flags: argparse.Namespace) -> dict[str, Any]:
    """The knobs that the flags ask for; those at their defaults are left out."""
    knobs: dict[str, Any] = {}
    activations: dict[str, Any] = {}
    if flags.activation_checkpointing != "none":
        mode = flags.activation_checkpointing
        activations["checkpoint"] = json.loads(mode) if mode.startswith("{") else mode
    if flags.activation_offloading:
        activations |= {
            "offload": True,
            "loading_horizon": flags.activation_loading_horizon,
        }
    if activations:
        knobs["activations"] = activations
    if flags.state_offload != "none":
        knobs["state_offload"] = flags.state_offload
    return knobs


def into_environment(knobs: dict[str, Any]) -> None:
    """Beside the knobs that a launcher has put there, such as the layout in a YAML
    file."""
    for knob, value in knobs.items():
        os.environ[f"SMP_{knob.upper()}"] = (
            json.dumps(value) if isinstance(value, dict) else str(value)
        )
