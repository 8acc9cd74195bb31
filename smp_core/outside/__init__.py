"""What comes from outside and goes there: files that others may have made, the
terminal, other packages and the oldest versions of them and of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.outside.attributes import changed as changed
    from smp_core.outside.child_process import (
        answer_parent as answer_parent,
        ask_child as ask_child,
    )
    from smp_core.outside.command_line import (
        OneLineErrors as OneLineErrors,
        console as console,
        without_commands as without_commands,
    )
    from smp_core.outside.foreign_files import (
        StrPath as StrPath,
        lines_of_log as lines_of_log,
        number as number,
        numbers as numbers,
        parse_yaml as parse_yaml,
        printable as printable,
        read_json as read_json,
        read_yaml as read_yaml,
        records_of_log as records_of_log,
        write_new as write_new,
    )
    from smp_core.outside.long_waits import long_wait as long_wait
    from smp_core.outside.oldest_versions import (
        OLDEST as OLDEST,
        how_to_install as how_to_install,
        is_older as is_older,
        is_there as is_there,
        matplotlibs_figure as matplotlibs_figure,
        require as require,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
