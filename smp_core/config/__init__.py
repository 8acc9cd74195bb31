"""Knobs: read once, strictly, with the value that took effect and why.

SmpConfig (config) holds all of them; a knob with fields of its own is a Recipe (recipes, plan_recipes, fp8_recipe).
values reads one value, rules says which go together, sources reads YAML and the environment, table shows what took
effect. Nothing here imports torch.
"""

from __future__ import annotations

from smp_core.config.config import SmpConfig
from smp_core.config.fp8_recipe import Fp8Recipe
from smp_core.config.plan_recipes import AutoPlan
from smp_core.config.recipe import nested
from smp_core.config.recipes import Activations, Compile, DelayedInit, Overlap, Pipeline, TensorParallel
from smp_core.config.rules import FP8_APART, Clash, contradictions
from smp_core.config.sources import CONFIG_FILE_VARIABLE, YAML_SECTION
from smp_core.config.table import DEFAULT, as_asked, lines_about_asked, shown, table_as_text
from smp_core.config.values import nearest_name

__all__ = [
    "Activations",
    "as_asked",
    "AutoPlan",
    "Clash",
    "Compile",
    "CONFIG_FILE_VARIABLE",
    "contradictions",
    "DEFAULT",
    "DelayedInit",
    "FP8_APART",
    "Fp8Recipe",
    "lines_about_asked",
    "nearest_name",
    "nested",
    "Overlap",
    "Pipeline",
    "shown",
    "SmpConfig",
    "table_as_text",
    "TensorParallel",
    "YAML_SECTION",
]
