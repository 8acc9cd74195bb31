"""Optimizers that know of shards.

Muon orthogonalizes whole matrices, each on the one rank that owns it (owners);
``muon_groups`` says which parameters of a model these are. Adafactor adds its column
factors up over shards. AdamW8bit keeps AdamW's moments in 8 bits. Which of other
libraries' optimizers may step shards is said in sharding/optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.optim.adafactor import Adafactor as Adafactor
    from smp_core.optim.adamw8bit import AdamW8bit as AdamW8bit
    from smp_core.optim.hidden_matrices import muon_groups as muon_groups
    from smp_core.optim.muon import Muon as Muon
    from smp_core.optim.owners import KIND as KIND, StepsTogether as StepsTogether
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
