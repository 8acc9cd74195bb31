"""Knobs: read once, strictly, with the value that took effect and why.

SmpConfig (config) holds all of them; a knob with fields of its own is a Recipe
(recipes, plan_recipes, fp8_recipe). values reads one value, rules says which go
together, sources reads YAML and the environment, table shows what took effect. Nothing
here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.config.config import DEFAULTS as DEFAULTS, SmpConfig as SmpConfig
    from smp_core.config.fp8_recipe import Fp8Recipe as Fp8Recipe
    from smp_core.config.plan_recipes import AutoPlan as AutoPlan
    from smp_core.config.recipe import nested as nested
    from smp_core.config.recipes import (
        Activations as Activations,
        Compile as Compile,
        DelayedInit as DelayedInit,
        Overlap as Overlap,
        Pipeline as Pipeline,
        TensorParallel as TensorParallel,
    )
    from smp_core.config.rules import (
        FP8_APART as FP8_APART,
        Clash as Clash,
        contradictions as contradictions,
    )
    from smp_core.config.sources import (
        CONFIG_FILE_VARIABLE as CONFIG_FILE_VARIABLE,
        YAML_SECTION as YAML_SECTION,
    )
    from smp_core.config.table import (
        DEFAULT as DEFAULT,
        as_asked as as_asked,
        lines_about_asked as lines_about_asked,
        shown as shown,
        table_as_text as table_as_text,
    )
    from smp_core.config.values import (
        did_you_mean as did_you_mean,
        nearest_name as nearest_name,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
