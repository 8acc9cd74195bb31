"""MiCS-style sharded data parallelism for PyTorch: the core under `lightning_smp` and `accelerate_smp`.

Importing this package imports nothing else; each capability lives in a module of its own.
"""

from __future__ import annotations

__version__ = "0.1.0"
