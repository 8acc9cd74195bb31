"""What Transformers 4 lacks: tests of it are left out there, and torch-smp refuses it
or goes without it."""

from __future__ import annotations

import importlib.util

import pytest
from transformers import PreTrainedModel, masking_utils
from transformers.distributed import DistributedConfig
from transformers.models.mixtral import modeling_mixtral

from accelerate_smp.transformers_names import SMOOTHS_BY_COUNT

# Experts one after the other; Transformers 4 has no other way.
EAGER_EXPERTS = (
    {"experts_implementation": "eager"}
    if hasattr(PreTrainedModel, "set_experts_implementation")
    else {}
)

needs_experts_choice = pytest.mark.skipif(
    not EAGER_EXPERTS, reason="this Transformers has one kind of experts' products"
)
needs_sharding = pytest.mark.skipif(
    "fsdp_size" not in DistributedConfig.__dataclass_fields__,
    reason="this Transformers does not shard models",
)
needs_dealt_experts = pytest.mark.skipif(
    "ep_size" not in DistributedConfig.__dataclass_fields__,
    reason="this Transformers deals no experts to ranks",
)
needs_buffers_filled = pytest.mark.skipif(
    importlib.util.find_spec("transformers.initialization") is None,
    reason="this Transformers' _init_weights leaves buffers out, so delayed_init is refused",
)
needs_counted_smoothing = pytest.mark.skipif(
    not SMOOTHS_BY_COUNT,
    reason="this Transformers' Trainer smooths labels without the number of targets",
)
needs_routers = pytest.mark.skipif(
    not hasattr(modeling_mixtral, "MixtralTopKRouter"),
    reason="routers of this Transformers are plain linear layers",
)
needs_chunks_of_documents = pytest.mark.skipif(
    not hasattr(masking_utils, "remap_positions_for_packed_sequence"),
    reason="this Transformers counts chunks across the documents of a sequence, so they are refused",
)
