"""MiCS-style sharded data parallelism for PyTorch: the core under `lightning_smp` and
`accelerate_smp`.

Importing this package imports none of its rooms; each capability lives in a room of its
own, which imports a file when a name of it is asked for.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return ``__getattr__`` and ``__all__`` of a package whose ``__init__.py`` imports
    under ``if TYPE_CHECKING``.

    Type checkers read those imports; at run time each is made when its name is asked
    for. So each name stands once.

    Args:
        package: the package's ``__name__``.
        file: its ``__file__``, which is read here.
    """
    statements = ast.parse(Path(file).read_bytes()).body
    (for_type_checkers,) = (
        each.body for each in statements if isinstance(each, ast.If)
    )
    imports = [each for each in for_type_checkers if isinstance(each, ast.ImportFrom)]
    modules = {alias.name: str(each.module) for each in imports for alias in each.names}

    def import_when_asked(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return import_when_asked, list(modules)
