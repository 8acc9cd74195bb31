"""The FP8 training: delayed scaling, FP8 layers, FP8 weight gathering. Only the recipe
is loaded at once (no torch)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.config import Fp8Recipe as Fp8Recipe
    from smp_core.fp8.backends import convert_with as convert_with
    from smp_core.fp8.convert import (
        Fp8Model as Fp8Model,
        choose as choose,
        convert_to_fp8 as convert_to_fp8,
    )
    from smp_core.fp8.gathered import (
        GatheredWeight as GatheredWeight,
        WeightGather as WeightGather,
    )
    from smp_core.fp8.linear import (
        SITES as SITES,
        Float8Linear as Float8Linear,
        unquantized as unquantized,
    )
    from smp_core.fp8.monitoring import Fp8Watch as Fp8Watch
    from smp_core.fp8.rules import FP8 as FP8
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
