"""Checkpoints of other programs, in and out, read without running their code.

torch.save files, folders of torch.distributed.checkpoint and safetensors are read by a
pickle reader that stands in for every class (inert_pickle); conversion imports and
exports them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.checkpoint.foreign.torch_file import (
        check_torch_file as check_torch_file,
        step_of_file as step_of_file,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
