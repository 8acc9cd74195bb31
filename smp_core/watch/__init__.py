"""The watch over ranks that wait, take different ways, are lost, receive a notice to
end or have fewer batches.

There is one watch for each process, from its start to its end: ranks show signs of life
on boards, a lost rank is found and named, and a line says who waits, in what, and where
the others are. Meetings compare which call ranks came to; preemption agrees on a notice
of the job's end; joined and counting are about uneven numbers of batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.watch.counting import (
        gather_with_gradient as gather_with_gradient,
        report_equal_terms as report_equal_terms,
        sync_metric as sync_metric,
    )
    from smp_core.watch.joined import (
        JoinedLoader as JoinedLoader,
        count_samples as count_samples,
        join as join,
        length_of as length_of,
    )
    from smp_core.watch.lost_peer import (
        looks_like_a_lost_peer as looks_like_a_lost_peer,
    )
    from smp_core.watch.preemption import (
        SIGNALS as SIGNALS,
        Preempted as Preempted,
        Preemption as Preemption,
    )
    from smp_core.watch.rank_watch import (
        ENDING as ENDING,
        RankWatch as RankWatch,
        count_call as count_call,
        expect_calls as expect_calls,
        meet as meet,
        meet_after_failure as meet_after_failure,
        meet_between_calls as meet_between_calls,
        meet_between_runs as meet_between_runs,
        report as report,
        stop_watching as stop_watching,
        watch_ranks as watch_ranks,
    )
    from smp_core.watch.whereabouts import (
        here as here,
        innermost_user_line as innermost_user_line,
        ranks_in_words as ranks_in_words,
        went_apart as went_apart,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
