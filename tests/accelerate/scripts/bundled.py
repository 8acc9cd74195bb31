"""Run one of Accelerate's bundled test scripts with SmpAccelerator, sharding off, in the place of Accelerator."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import accelerate
import accelerate.accelerator

from accelerate_smp import SmpAccelerator


class Unsharded(SmpAccelerator):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, smp=False, **kwargs)


if __name__ == "__main__":
    accelerate.Accelerator = accelerate.accelerator.Accelerator = Unsharded
    name = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(f"accelerate.test_utils.scripts.{name}", run_name="__main__")
    print("ALL OF", name, "PASSED")
