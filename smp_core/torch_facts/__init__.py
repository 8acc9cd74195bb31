"""Facts about torch: differences between versions, streams, names of wrapped modules,
absent tensors, masters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.torch_facts.coded import (
        CodedTensor as CodedTensor,
        as_codes as as_codes,
        decode_rows as decode_rows,
        decoded as decoded,
    )
    from smp_core.torch_facts.compat import (
        FSDP_METHODS as FSDP_METHODS,
        TESTED_TORCH as TESTED_TORCH,
        TrialGenerator as TrialGenerator,
        all_gather_single as all_gather_single,
        caches_in as caches_in,
        depends_on as depends_on,
        embeddings_of as embeddings_of,
        is_rank_0 as is_rank_0,
        reduce_scatter_single as reduce_scatter_single,
        seed_generators as seed_generators,
        symmetric_memory_operators as symmetric_memory_operators,
        transformers_models as transformers_models,
        without_caches as without_caches,
    )
    from smp_core.torch_facts.kernels import (
        device_multiplies_fp8 as device_multiplies_fp8,
        has_triton as has_triton,
    )
    from smp_core.torch_facts.modules import (
        ABSENT as ABSENT,
        DROPOUTS as DROPOUTS,
        Args as Args,
        Kwargs as Kwargs,
        StepsOnHost as StepsOnHost,
        after_each_step as after_each_step,
        base_without_dict as base_without_dict,
        clean_name as clean_name,
        first_names as first_names,
        fsdp_has as fsdp_has,
        is_absent as is_absent,
        is_compiled as is_compiled,
        is_outermost as is_outermost,
        lies_in as lies_in,
        load_host_master as load_host_master,
        local_part as local_part,
        mixin_before as mixin_before,
        model_parameter as model_parameter,
        modules_that_look_up as modules_that_look_up,
        note_host_master as note_host_master,
        parameters_of as parameters_of,
        stands_for as stands_for,
        take_loaded as take_loaded,
        uncompiled as uncompiled,
        with_host_master as with_host_master,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
