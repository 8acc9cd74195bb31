"""What differs between versions of Transformers under Trainer, in one place; and the
refusal of older versions.

Modules that need something else than Trainer, its callbacks and its arguments import it
from here.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path

from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from smp_core.outside import require

require("transformers", "SmpTrainer")

try:
    from transformers.trainer_utils import sort_checkpoints
except ImportError:  # Transformers 4

    def sort_checkpoints(output_dir: str) -> list[str]:  # type: ignore[misc]
        """Return the checkpoints in a run's folder, the one of the fewest steps
        first."""
        steps = {}
        for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            step = path.name.rpartition("-")[2]
            if step.isdigit() and path.is_dir():
                steps[os.fspath(path)] = int(step)
        return sorted(steps, key=lambda path: steps[path])


# Transformers 4 takes the mean over a rank's own targets instead, and then multiplies
# it by the number of ranks.
SMOOTHS_BY_COUNT = (
    "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
)

__all__ = ["SMOOTHS_BY_COUNT", "sort_checkpoints"]
