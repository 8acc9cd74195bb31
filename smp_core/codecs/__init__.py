"""Payloads that are smaller than their tensors: bfloat16, blockwise int8 and int4, fp8.

``codec(name)`` returns one; its ``size`` is what anything else asks for bytes. On CUDA
the blockwise ones run as one kernel each way, and all are added up by one
(triton_codec). Optimizer states have a codec of their own (moments), and frozen weights
(rows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.codecs.codec import (
        ALIGN as ALIGN,
        BLOCK as BLOCK,
        Codec as Codec,
        CodeName as CodeName,
    )
    from smp_core.codecs.moments import MomentCodec as MomentCodec, n_blocks as n_blocks
    from smp_core.codecs.rows import RowCodec as RowCodec, RowCodeName as RowCodeName
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
