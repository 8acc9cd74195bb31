"""Tensor parallelism: layers over several ranks, with sequence parallelism
(docs/tensor-parallelism.md).

``apply_tensor_parallel`` (apply) splits the layers of a model as its plan says (roles),
or as an inspection proposes (inspection, trial), before anything is sharded. What is
sent between the ranks of a layer is in operators, overlap and fused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.tensor_parallel.apply import (
        apply_tensor_parallel as apply_tensor_parallel,
    )
    from smp_core.tensor_parallel.inspection import (
        Inspected as Inspected,
        inspect as inspect,
    )
    from smp_core.tensor_parallel.operators import TensorAxis as TensorAxis
    from smp_core.tensor_parallel.rules import (
        TENSOR_PARALLELISM as TENSOR_PARALLELISM,
        require_tensor_degree as require_tensor_degree,
    )
    from smp_core.tensor_parallel.split_model import (
        SplitModel as SplitModel,
        WholeGradients as WholeGradients,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
