"""What a result says of the machine and the versions that it was measured with."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


def about(benchmark: str) -> dict[str, Any]:
    """Return the head of a result that was measured on processors alone."""
    return {
        "benchmark": benchmark,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no accelerator",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
