"""torch-smp for Hugging Face Accelerate and Transformers: ``from accelerate_smp import
SmpAccelerator``.

Importing needs Accelerate alone; what needs Transformers (``SmpTrainer``,
``SmpTrainerMixin``, their callbacks) is imported when it is asked for.
"""

# ruff: noqa: E402 - the version is looked at before anything is imported that older ones lack

from __future__ import annotations

from typing import Any

from smp_core.outside import require

require("accelerate", "accelerate_smp")

from accelerate_smp.accelerator import SmpAccelerator

_WHEN_ASKED_FOR = {
    "SmpAveragingCallback": "accelerate_smp.averaging",
    "SmpMonitor": "accelerate_smp.loop_monitor",
    "SmpTrainer": "accelerate_smp.trainer",
    "SmpTrainerMixin": "accelerate_smp.trainer",
    "SmpMonitorCallback": "accelerate_smp.callbacks",
    "SmpCheckpointCallback": "accelerate_smp.callbacks",
    "Fp8MonitorCallback": "accelerate_smp.callbacks",
    "verify": "accelerate_smp.verification",
}
_NEED_NO_TRANSFORMERS = ("SmpMonitor", "verify")


def __getattr__(name: str) -> Any:
    if name in _WHEN_ASKED_FOR:
        from importlib import import_module

        if name not in _NEED_NO_TRANSFORMERS:
            require("transformers", name)
        return getattr(import_module(_WHEN_ASKED_FOR[name]), name)
    raise AttributeError(f"module 'accelerate_smp' has no attribute {name!r}")


__all__ = [
    "Fp8MonitorCallback",
    "SmpAccelerator",
    "SmpAveragingCallback",
    "SmpCheckpointCallback",
    "SmpMonitor",
    "SmpMonitorCallback",
    "SmpTrainer",
    "SmpTrainerMixin",
    "verify",
]
