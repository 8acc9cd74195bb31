"""SUBJECTS: the list of all subjects, in the order in which they decide and describe
themselves.

Each of them may build on what those before it have decided: which units some ranks may
leave out is known before stages are asked about it, and what is recomputed before it is
compiled.
"""

from __future__ import annotations

from smp_core.activations import ACTIVATIONS
from smp_core.comm import COMMUNICATION
from smp_core.context_parallel import CONTEXT_PARALLELISM
from smp_core.engine.compile_rules import COMPILATION
from smp_core.expert_parallel import EXPERT_PARALLELISM, ROUTER_BALANCE
from smp_core.fp8 import FP8
from smp_core.pipeline import PIPELINE_PARALLELISM
from smp_core.plan import Subject
from smp_core.sharding import FROZEN_STORAGE, SHARDING
from smp_core.tensor_parallel import TENSOR_PARALLELISM

SUBJECTS: tuple[Subject, ...] = (
    SHARDING,
    COMMUNICATION,
    EXPERT_PARALLELISM,
    ROUTER_BALANCE,
    FROZEN_STORAGE,
    PIPELINE_PARALLELISM,
    CONTEXT_PARALLELISM,
    TENSOR_PARALLELISM,
    ACTIVATIONS,
    COMPILATION,
    FP8,
)
