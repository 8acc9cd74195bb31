"""Topology: nodes from what the ranks report, the same conclusion on every rank,
degrees that fit the nodes."""

from __future__ import annotations

import logging
import os
import socket
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st

from smp_core.topology import RankReport, Topology, topology_of_reports
from tests.harness import run_ranks
from tests.logged import warnings_said


def reports(hosts: str, **variables: str) -> list[RankReport]:
    """One report for each letter, which is the hostname."""
    return [RankReport(hostname=host, **variables) for host in hosts]


def discover_as(
    hosts: str, variables: list[dict[str, str]] | None = None
) -> Topology | str:
    """On each rank: pose as the host whose letter is at the rank's place, and discover.
    The error's text, if any."""
    rank = dist.get_rank()
    environ = {} if variables is None else variables[rank]
    with (
        mock.patch.object(socket, "gethostname", lambda: hosts[rank]),
        mock.patch.dict(os.environ, environ),
    ):
        # The harness numbers its ranks as one machine, which the posed hosts are not.
        for variable in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(variable, None)
        try:
            return Topology.discover()
        except ValueError as error:
            return str(error)


def discover_in_subgroup() -> Topology | None:
    group = dist.new_group([2, 3])
    return Topology.discover(group) if dist.get_rank() >= 2 else None


def discover_here() -> Topology:
    return Topology.discover()


def test_ranks_of_one_machine_are_one_node() -> None:
    found = run_ranks(discover_here, 4)
    assert found == [Topology(((0, 1, 2, 3),), (socket.gethostname(),))] * 4


def test_ranks_per_node_variable_poses_as_a_cluster() -> None:
    found = run_ranks(discover_here, 4, ranks_per_node=2)
    assert [topology.nodes for topology in found] == [((0, 1), (2, 3))] * 4


def test_hostnames_exchanged_between_ranks_make_the_nodes() -> None:
    found = run_ranks(discover_as, 4, "aabb")
    assert found == [Topology(((0, 1), (2, 3)), ("a", "b"))] * 4


def test_a_subgroup_is_asked_by_itself() -> None:
    found = run_ranks(discover_in_subgroup, 4)
    assert found[:2] == [None, None]
    assert [topology.world_size for topology in found[2:] if topology] == [2, 2]


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (
            "abab",
            "ranks are not numbered node by node (node a: ranks 0, 2; node b: ranks 1, 3)",
        ),
        (
            "aaab",
            "nodes have different numbers of ranks (node a: ranks 0, 1, 2; node b: rank 3)",
        ),
    ],
)
def test_every_rank_raises_the_same_error_that_prints_the_layout(
    hosts: str, says: str
) -> None:
    found = run_ranks(discover_as, 4, hosts)
    assert len(set(map(str, found))) == 1
    assert isinstance(found[0], str)
    assert says in found[0]
    assert "torchrun --nproc-per-node=N" in found[0]


def test_a_ranks_per_node_variable_on_some_ranks_only_is_an_error_on_all() -> None:
    found = run_ranks(
        discover_as,
        4,
        "aaaa",
        [{"SMP_RANKS_PER_NODE": "2"}, {}, {}, {"SMP_RANKS_PER_NODE": "4"}],
    )
    told = "SMP_RANKS_PER_NODE differs between ranks ('2' on rank 0; not set on ranks 1-2; '4' on rank 3)"
    assert [told in str(error) for error in found] == [True] * 4


@pytest.mark.parametrize("value", ["3", "0", "-2", "two", "8", ""])
def test_a_ranks_per_node_variable_that_does_not_divide_the_world_is_refused(
    value: str,
) -> None:
    with pytest.raises(
        ValueError,
        match=f"SMP_RANKS_PER_NODE={value} does not divide.* 4 ranks; allowed: 1, 2, 4",
    ):
        topology_of_reports(reports("aaaa", ranks_per_node=value))


def test_without_a_process_group_there_is_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SMP_RANKS_PER_NODE", raising=False)
    assert Topology.discover() == Topology(((0,),), (socket.gethostname(),))


def test_hostname_and_boot_id_together_tell_nodes_apart() -> None:
    containers = [RankReport("box1", "boot"), RankReport("box2", "boot")]
    assert topology_of_reports(containers)[0].nodes == ((0,), (1,))
    namesakes = [
        RankReport("localhost", "aaaaaaaa-1"),
        RankReport("localhost", "bbbbbbbb-2"),
    ]
    assert topology_of_reports(namesakes)[0] == Topology(
        ((0,), (1,)), ("localhost/aaaaaaaa", "localhost/bbbbbbbb")
    )


def test_a_local_world_size_that_disagrees_is_told_with_both_numbers() -> None:
    topology, warnings = topology_of_reports(reports("aaaa", local_world_size="2"))
    assert topology.nodes == ((0, 1, 2, 3),), "what was found counts"
    assert "LOCAL_WORLD_SIZE=2 but 4 ranks were found on each node" in warnings[0]
    assert "SMP_RANKS_PER_NODE" in warnings[0]
    assert topology_of_reports(reports("aabb", local_world_size="2"))[1] == []
    assert (
        topology_of_reports(reports("aaaa", local_world_size="4", ranks_per_node="2"))[
            1
        ]
        == []
    )


def test_equal_local_ranks_on_a_node_are_told() -> None:
    _, warnings = topology_of_reports(reports("aa", local_rank="0"))
    assert "ranks 0-1 on node a have LOCAL_RANK 0, 0" in warnings[0]
    distinct = [RankReport("a", local_rank="0"), RankReport("a", local_rank="1")]
    assert topology_of_reports(distinct)[1] == []


def test_posing_across_hosts_is_told() -> None:
    topology, warnings = topology_of_reports(reports("aabb", ranks_per_node="4"))
    assert topology.num_nodes == 1
    assert "counts a, b as one node" in warnings[0]


def test_discovery_logs_its_warnings_on_the_first_rank_only() -> None:
    logged = run_ranks(warnings_logged, 4)
    assert ["LOCAL_WORLD_SIZE=7" in text for text in logged] == [
        True,
        False,
        False,
        False,
    ]


def warnings_logged() -> str:
    with warnings_said() as said, mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="7"):
        Topology.discover()
    return "\n".join(said)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("smp")
    logger.addHandler(handler)
    try:
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="7"):
            Topology.discover()
    finally:
        logger.removeHandler(handler)
    return "\n".join(records)


def test_questions_about_ranks() -> None:
    topology = Topology.uniform(8, 4)
    assert (topology.num_nodes, topology.ranks_per_node, topology.world_size) == (
        2,
        4,
        8,
    )
    assert [topology.node_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (topology.same_node(1, 3), topology.same_node(3, 4)) == (True, False)
    assert (topology.spans_nodes([4, 7]), topology.spans_nodes(range(2, 5))) == (
        False,
        True,
    )
    with pytest.raises(ValueError, match="rank=8 is not in the world of 8 ranks"):
        topology.node_of(8)


def test_a_layout_that_is_no_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="do not describe a cluster"):
        Topology(((0, 1),), ("a", "b"))
    with pytest.raises(ValueError, match="each rank from 0 to 1 must be there once"):
        Topology(((0, 0),), ("a",))
    with pytest.raises(
        ValueError,
        match="ranks_per_node=3 does not divide the world of 8 ranks; allowed: 1, 2, 4, 8",
    ):
        Topology.uniform(8, 3)


def test_words_for_shard_degrees() -> None:
    topology = Topology.uniform(8, 4)
    assert topology.resolve_shard_degree("node") == 4
    assert topology.resolve_shard_degree("world") == 8
    assert [topology.resolve_shard_degree(degree) for degree in (1, 2, 4, 8)] == [
        1,
        2,
        4,
        8,
    ]


@pytest.mark.parametrize(
    ("world", "per_node", "degree", "says"),
    [
        (
            8,
            4,
            6,
            "shard_degree=6 does not divide the world of 8 ranks; allowed: 1, 2, 4, 8",
        ),
        (
            8,
            4,
            16,
            "shard_degree=16 does not divide the world of 8 ranks; allowed: 1, 2, 4, 8",
        ),
        (
            12,
            6,
            4,
            "shard_degree=4 makes partition groups that straddle nodes of 6 ranks unevenly; allowed: 1, 2, 3, 6,",
        ),
        (
            12,
            3,
            2,
            "shard_degree=2 makes partition groups that straddle nodes of 3 ranks unevenly; allowed: 1, 3, 6,",
        ),
        (
            8,
            4,
            "auto",
            "shard_degree='auto' is not a number of ranks; allowed here: 1, 2, 4, 8, 'node', 'world'",
        ),
    ],
)
def test_a_shard_degree_that_does_not_fit_is_answered_with_those_that_do(
    world: int, per_node: int, degree: int | str, says: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Topology.uniform(world, per_node).resolve_shard_degree(degree)
    assert str(caught.value).startswith(says)


@given(nodes=st.integers(1, 12), per_node=st.integers(1, 12))
def test_partition_groups_of_an_allowed_degree_take_equal_parts_of_the_nodes_they_touch(
    nodes: int, per_node: int
) -> None:
    topology = Topology.uniform(nodes * per_node, per_node)
    for degree in topology.allowed_shard_degrees():
        assert topology.resolve_shard_degree(degree) == degree
        for first in range(0, topology.world_size, degree):
            touched = [topology.node_of(rank) for rank in range(first, first + degree)]
            assert len({touched.count(node) for node in touched}) == 1
    for degree in range(1, topology.world_size + 1):
        if degree not in topology.allowed_shard_degrees():
            with pytest.raises(ValueError, match="allowed: 1"):
                topology.resolve_shard_degree(degree)


def test_the_picture_names_nodes_and_their_ranks() -> None:
    assert (
        Topology.uniform(4, 2).describe()
        == "2 nodes x 2 ranks\n  node0  ranks 0-1\n  node1  ranks 2-3"
    )
    assert (
        Topology(((0,),), ("laptop",)).describe() == "1 node x 1 rank\n  laptop  rank 0"
    )
    large = Topology.uniform(512, 8).describe().splitlines()
    assert len(large) < 12
    assert large[-1].split() == ["node63", "ranks", "504-511"]
    assert "57 more nodes" in large[5]
