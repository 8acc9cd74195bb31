"""Run one of Accelerate's bundled test scripts with SmpAccelerator in the place of
Accelerator and nothing sharded: ``off`` with smp=False, ``whole`` with shard_degree=1,
where our engine trains parameters that every rank holds whole.

Accelerate drops mixed_precision="fp16" on a CPU in silence, and its test_script counts
on that; SmpAccelerator refuses it (tested in test_errors.py), so under ``whole`` the
script is told that there is no fp16.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import accelerate
import accelerate.accelerator
import accelerate.utils
import torch

from accelerate_smp import SmpAccelerator

name, sharding = sys.argv[1:]


class Unsharded(SmpAccelerator):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        knobs: dict[str, Any] = (
            {"smp": False} if sharding == "off" else {"shard_degree": 1}
        )
        super().__init__(*args, **knobs, **kwargs)


if __name__ == "__main__":
    accelerate.Accelerator = accelerate.accelerator.Accelerator = Unsharded
    if sharding == "whole" and not torch.accelerator.is_available():
        accelerate.utils.is_fp16_available = lambda: False
    sys.argv = sys.argv[1:2]
    runpy.run_module(f"accelerate.test_utils.scripts.{name}", run_name="__main__")
    # In one piece: all ranks say it at once, on one stream.
    sys.stdout.write(f"ALL OF {name} PASSED\n")
