"""Imported first, leaves out what libraries say that are imported along and that no
example uses.

Transformers imports torchao wherever it is installed. torchao then lists, on every
rank, the kernels that this machine cannot load, and registers its enums in a way that
torch 2.13 warns of.
"""

from __future__ import annotations

import logging

for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
