"""The watch over ranks: those that wait, part, die, are told to leave or have fewer batches.

There is one watch for each process, from its start to its end: ranks show signs of life on boards, a lost rank is
found and named, and a line says who waits, in what, and where the others are. Meetings compare which call ranks came
to; preemption agrees on a notice of the job's end; joined and counting are about uneven numbers of batches.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_core.watch.counting import gather_with_gradient, report_equal_terms, synchronize_metrics
    from smp_core.watch.explanations import explain, explain_uncaught_errors
    from smp_core.watch.joined import JoinedLoader, count_samples, join, length_of
    from smp_core.watch.preemption import SIGNALS, Preempted, Preemption
    from smp_core.watch.rank_watch import (
        ENDING,
        RankWatch,
        count_call,
        expect_calls,
        looks_like_a_lost_peer,
        meet,
        meet_between_calls,
        meet_between_runs,
        report,
        stop_watching,
        watch_ranks,
    )
    from smp_core.watch.whereabouts import here, innermost_user_line, ranks_in_words, went_apart

_PLACES = {
    "count_call": "rank_watch",
    "count_samples": "joined",
    "ENDING": "rank_watch",
    "expect_calls": "rank_watch",
    "explain": "explanations",
    "explain_uncaught_errors": "explanations",
    "gather_with_gradient": "counting",
    "here": "whereabouts",
    "innermost_user_line": "whereabouts",
    "join": "joined",
    "JoinedLoader": "joined",
    "length_of": "joined",
    "looks_like_a_lost_peer": "rank_watch",
    "meet": "rank_watch",
    "meet_between_calls": "rank_watch",
    "meet_between_runs": "rank_watch",
    "Preempted": "preemption",
    "Preemption": "preemption",
    "ranks_in_words": "whereabouts",
    "RankWatch": "rank_watch",
    "report": "rank_watch",
    "report_equal_terms": "counting",
    "SIGNALS": "preemption",
    "stop_watching": "rank_watch",
    "synchronize_metrics": "counting",
    "watch_ranks": "rank_watch",
    "went_apart": "whereabouts",
}

__all__ = [
    "count_call",
    "count_samples",
    "ENDING",
    "expect_calls",
    "explain",
    "explain_uncaught_errors",
    "gather_with_gradient",
    "here",
    "innermost_user_line",
    "join",
    "JoinedLoader",
    "length_of",
    "looks_like_a_lost_peer",
    "meet",
    "meet_between_calls",
    "meet_between_runs",
    "Preempted",
    "Preemption",
    "ranks_in_words",
    "RankWatch",
    "report",
    "report_equal_terms",
    "SIGNALS",
    "stop_watching",
    "synchronize_metrics",
    "watch_ranks",
    "went_apart",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: not all of this folder is needed everywhere."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
