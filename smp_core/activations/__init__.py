"""Activations that forward keeps for backward: recomputed, or offloaded to host memory.

``save_activations`` (activation_memory) applies what the rules settled: checkpointed
modules, the outputs that are kept all the same (selective), and inputs that wait in
host memory (offloading, host_pool).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.activations.activation_memory import (
        NO_ACTIVATION_MEMORY_SAVED as NO_ACTIVATION_MEMORY_SAVED,
        ActivationMemory as ActivationMemory,
        save_activations as save_activations,
    )
    from smp_core.activations.checkpointing import SENDS as SENDS
    from smp_core.activations.host_pool import HostPool as HostPool
    from smp_core.activations.rules import ACTIVATIONS as ACTIVATIONS
    from smp_core.activations.selective import (
        keep_outputs_of as keep_outputs_of,
        kept_outputs_shown_to as kept_outputs_shown_to,
        selective_contexts as selective_contexts,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
