"""Gradients from the first micro-batch of a window to the optimizer step.

An AccumulationWindow holds a UnitWindow for each unit: gradients are added up, summed
across replicas, divided once (unit_window; by how much: Route in comm/traffic.py), and
become ``.grad``. Before that, ranks compare what
they received and issued; where they differ, all of them raise RanksDiverged. Replicated
parameters and hooks of parameters have their own files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.sharding.gradients.accumulation import (
        AccumulationWindow as AccumulationWindow,
    )
    from smp_core.sharding.gradients.divergence import (
        RanksDiverged as RanksDiverged,
        require_same_collectives as require_same_collectives,
    )
    from smp_core.sharding.gradients.received_gradients import Told as Told
    from smp_core.sharding.gradients.window import Window as Window
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
