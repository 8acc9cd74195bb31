"""The machines and the ranks on them: launchers, links, the layout's axes and its
process groups.

A Layout names the axes of a run; an SmpMesh makes their process groups. Links are
latency and bandwidth as measured. agreement checks that all ranks were given the same.
(Which rank sits on which node is smp_core/topology.py.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_core import lazy_exports

if TYPE_CHECKING:
    from smp_core.cluster.agreement import (
        agreed as agreed,
        broadcast_from_rank_0 as broadcast_from_rank_0,
        host_group as host_group,
        lists_of_all_ranks as lists_of_all_ranks,
        of_all_ranks as of_all_ranks,
        of_rank_0 as of_rank_0,
        send_to_stages as send_to_stages,
    )
    from smp_core.cluster.launch import (
        MPI_RANKS as MPI_RANKS,
        LaunchEnvironment as LaunchEnvironment,
        launch_environment as launch_environment,
    )
    from smp_core.cluster.layout import (
        DATA as DATA,
        DEGREES as DEGREES,
        GRADIENTS as GRADIENTS,
        GROUPS as GROUPS,
        INNER as INNER,
        PARTITION as PARTITION,
        Axes as Axes,
        Axis as Axis,
        Layout as Layout,
        Ranks as Ranks,
        degrees_of as degrees_of,
        inner_degree as inner_degree,
        stages as stages,
    )
    from smp_core.cluster.links import (
        KINDS as KINDS,
        LINKS_VARIABLE as LINKS_VARIABLE,
        PLACES as PLACES,
        Collectives as Collectives,
        Kind as Kind,
        LinkFit as LinkFit,
        Links as Links,
        Place as Place,
        gather_seconds as gather_seconds,
        reduce_seconds as reduce_seconds,
        replica_sum_seconds as replica_sum_seconds,
        ring_bytes as ring_bytes,
        rounds as rounds,
    )
    from smp_core.cluster.mesh import (
        SmpMesh as SmpMesh,
        collective_timeout as collective_timeout,
        mesh_of_run as mesh_of_run,
        mesh_on as mesh_on,
        note_mesh as note_mesh,
        prefers_messages as prefers_messages,
    )
else:
    __getattr__, __all__ = lazy_exports(__name__, __file__)
