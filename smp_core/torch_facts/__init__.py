"""Facts about torch: differences between versions, streams, names of wrapped modules, absent tensors, masters."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.torch_facts.absent import ABSENT, is_absent
    from smp_core.torch_facts.compat import (
        FSDP_METHODS,
        TESTED_TORCH,
        all_gather_single,
        caches_in,
        collective_timeout,
        depends_on,
        embeddings_of,
        fsdp_has,
        reduce_scatter_single,
        symmetric_memory_operators,
        without_caches,
    )
    from smp_core.torch_facts.kernels import device_multiplies_fp8, has_triton
    from smp_core.torch_facts.module_names import clean_name, compiled_of, is_compiled, uncompiled
    from smp_core.torch_facts.stepped import (
        StepsOnHost,
        after_each_step,
        is_outermost,
        load_host_master,
        model_parameter,
        note_host_master,
        stands_for,
        take_loaded,
        with_host_master,
    )

_PLACES = {
    "ABSENT": "absent",
    "after_each_step": "stepped",
    "all_gather_single": "compat",
    "caches_in": "compat",
    "clean_name": "module_names",
    "collective_timeout": "compat",
    "compiled_of": "module_names",
    "depends_on": "compat",
    "device_multiplies_fp8": "kernels",
    "embeddings_of": "compat",
    "fsdp_has": "compat",
    "FSDP_METHODS": "compat",
    "has_triton": "kernels",
    "is_absent": "absent",
    "is_compiled": "module_names",
    "is_outermost": "stepped",
    "load_host_master": "stepped",
    "model_parameter": "stepped",
    "note_host_master": "stepped",
    "reduce_scatter_single": "compat",
    "stands_for": "stepped",
    "StepsOnHost": "stepped",
    "symmetric_memory_operators": "compat",
    "take_loaded": "stepped",
    "TESTED_TORCH": "compat",
    "uncompiled": "module_names",
    "with_host_master": "stepped",
    "without_caches": "compat",
}

__all__ = [
    "ABSENT",
    "after_each_step",
    "all_gather_single",
    "caches_in",
    "clean_name",
    "collective_timeout",
    "compiled_of",
    "depends_on",
    "device_multiplies_fp8",
    "embeddings_of",
    "fsdp_has",
    "FSDP_METHODS",
    "has_triton",
    "is_absent",
    "is_compiled",
    "is_outermost",
    "load_host_master",
    "model_parameter",
    "note_host_master",
    "reduce_scatter_single",
    "stands_for",
    "StepsOnHost",
    "symmetric_memory_operators",
    "take_loaded",
    "TESTED_TORCH",
    "uncompiled",
    "with_host_master",
    "without_caches",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
