"""The `smp` command: its application, with all commands or the one that is going to
run.

Groups of commands stand beside what they show, `smp doctor` and `smp topology` here. A
command's module is imported when the command is asked for: torch takes longer to import
than `smp report` to draw a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_core import lazy_exports
from smp_core.cli.cli import application

if TYPE_CHECKING:
    from smp_core.cli.cli import (
        application as application,
        main as main,
        outline as outline,
    )
    from smp_core.cli.doctor import findings as findings, table_of as table_of
else:
    _export, __all__ = lazy_exports(__name__, __file__)

    def __getattr__(name: str) -> Any:
        """Make ``app``, the application of all commands, when it is asked for."""
        return application() if name == "app" else _export(name)
