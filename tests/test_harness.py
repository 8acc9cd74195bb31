"""The harness keeps its word: results in order, a failure on any rank told in full,
nothing left for the next case."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests import harness
from tests.harness import RanksFailed, ScriptTimedOut, run_ranks, run_script

# Seconds that a test waits for a deliberate hang to be given up: collectives end after
# three quarters of them, and what is left has to do for telling it on a busy machine.
HANG_LIMIT = 8.0


def who_am_i(greeting: str, *, punctuation: str) -> tuple[str, int]:
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return f"{greeting}{dist.get_rank()}{punctuation}", int(total.item())


def my_pid() -> int:
    return os.getpid()


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        left, right = 3, 4
        assert left == right
    dist.barrier()


def raise_each_its_own() -> None:
    raise ValueError(f"rank {dist.get_rank()} is unhappy")


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("going to bed")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def hang_without_peers() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def exit_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def kill_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hash_of_a_string() -> tuple[int, int]:
    return hash("shard"), os.getsid(0)


def return_something_that_does_not_pickle() -> object:
    return lambda: None


def launch_environment() -> dict[str, str | None]:
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "SMP_RANKS_PER_NODE",
        "COLOUR",
        "HOME",
    )
    assert int(os.environ["MASTER_PORT"]) > 0
    return {name: os.environ.get(name) for name in names}


def leave_a_mess() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 0
    )
    logging.getLogger("smp").setLevel(logging.CRITICAL)


def look_for_the_mess() -> list[object]:
    return [
        os.environ.get("LEFT_BEHIND"),
        os.getcwd(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.nn.ReLU()(torch.ones(1)).item(),
        logging.getLogger("smp").level,
    ]


def tensor_of_rank(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((2, 3), float(dist.get_rank()), dtype=dtype)


def sum_over_shards(more_groups: bool) -> float:
    """A DTensor result on a submesh whose process groups have other names when other
    groups were made before."""
    if more_groups:
        for _ in range(3):
            dist.new_group([0, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))[
        "shard"
    ]
    doubled = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]) * 2
    assert isinstance(doubled, DTensor)
    return doubled.redistribute(mesh, [Replicate()]).to_local().sum().item()


def test_results_come_in_rank_order() -> None:
    assert run_ranks(who_am_i, 2, "r", punctuation="!") == [("r0!", 3), ("r1!", 3)]


def test_tensors_come_back_whole() -> None:
    for rank, tensor in enumerate(run_ranks(tensor_of_rank, 2, torch.bfloat16)):
        assert tensor.dtype is torch.bfloat16
        assert tensor.tolist() == [[rank] * 3] * 2


def test_ranks_stay_alive_between_cases() -> None:
    assert run_ranks(my_pid, 2) == run_ranks(my_pid, 2)


def test_exception_on_one_rank_shows_every_ranks_traceback() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(raise_on_rank_1, 2)
    message = str(failure.value)
    assert "assert 3 == 4" in message
    rank_0, rank_1 = message.split("--- rank 1")
    assert "in raise_on_rank_1" in rank_0 and "dist.barrier()" in rank_0
    assert "in raise_on_rank_1" in rank_1 and "left == right" in rank_1
    assert run_ranks(who_am_i, 2, "", punctuation="") == [("0", 3), ("1", 3)]


def test_no_ranks_own_error_is_lost_to_a_closed_connection() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(raise_each_its_own, 2)
    assert "ValueError: rank 0 is unhappy" in str(failure.value)
    assert "ValueError: rank 1 is unhappy" in str(failure.value)


def test_hung_rank_shows_where_it_hung() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(hang_on_rank_1, 2, timeout=HANG_LIMIT)
    rank_0, rank_1 = str(failure.value).split("--- rank 1", 1)
    assert "dist.barrier()" in rank_0
    assert (
        "still running" in rank_1
        and "in hang_on_rank_1" in rank_1
        and "going to bed" in rank_1
    )
    assert run_ranks(who_am_i, 2, "", punctuation="") == [("0", 3), ("1", 3)]


@pytest.mark.slow
def test_hang_that_no_peer_waits_for_ends_at_the_limit() -> None:
    with pytest.raises(
        RanksFailed, match=r"ranks \[1\] did not finish within 5 s"
    ) as failure:
        run_ranks(hang_without_peers, 2, timeout=5)
    assert "--- rank 0: returned" in str(failure.value)
    assert "in hang_without_peers" in str(failure.value)


def test_dead_rank_is_named_and_its_pool_reaped() -> None:
    # Not by their ids alone, which the next processes may get.
    processes = [psutil.Process(pid) for pid in run_ranks(my_pid, 2)]
    with pytest.raises(RanksFailed) as failure:
        run_ranks(exit_on_rank_1, 2)
    assert "rank 1: exited with status 3" in str(failure.value)
    assert "in exit_on_rank_1" in str(failure.value).split("--- rank 1")[0]
    assert not any(process.is_running() for process in processes)
    assert run_ranks(who_am_i, 2, "", punctuation="") == [("0", 3), ("1", 3)]


def test_a_rank_that_a_signal_killed_is_reported_so() -> None:
    with pytest.raises(RanksFailed, match="rank 0: was killed by SIGKILL"):
        run_ranks(kill_rank_0, 2)


def test_ranks_are_forked_from_one_thread_and_lead_sessions_of_their_own() -> None:
    seen = run_ranks(hash_of_a_string, 4)
    assert [session for _, session in seen] == run_ranks(my_pid, 4)
    servers = {psutil.Process(pid).parent() for _, pid in seen}
    assert [server.num_threads() for server in servers if server is not None] == [1] * 2


@pytest.mark.skipif(
    "PYTHONHASHSEED" in os.environ, reason="all processes have this seed"
)
def test_neighbouring_ranks_have_their_sets_in_different_orders() -> None:
    first, second = run_ranks(hash_of_a_string, 2)
    assert first[0] != second[0]


def test_a_case_of_another_size_leaves_the_usual_ranks_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = run_ranks(my_pid, 2)
    monkeypatch.setattr(
        harness, "MAX_IDLE_RANKS", sum(size for size in harness._pools if size != 1)
    )
    run_ranks(my_pid, 1)
    assert 1 not in harness._pools and run_ranks(my_pid, 2) == before


def test_result_that_does_not_pickle_is_a_failure_of_the_case() -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(return_something_that_does_not_pickle, 1)


def test_function_that_does_not_pickle_is_refused() -> None:
    with pytest.raises(TypeError, match="module level"):
        run_ranks(lambda: None, 2)


def test_launch_environment_is_that_of_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A leftover in the user's shell must not reach a case.
    monkeypatch.setenv("SMP_RANKS_PER_NODE", "7")
    monkeypatch.setenv("HOME", "/nowhere")
    for rank, seen in enumerate(
        run_ranks(launch_environment, 2, env={"COLOUR": "green", "HOME": None})
    ):
        assert seen == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "SMP_RANKS_PER_NODE": None,
            "COLOUR": "green",
            "HOME": None,
        }


def test_posing_as_nodes_sets_ranks_per_node() -> None:
    assert [
        seen["SMP_RANKS_PER_NODE"]
        for seen in run_ranks(launch_environment, 2, ranks_per_node=1)
    ] == ["1", "1"]


def test_a_case_leaves_nothing_to_the_next() -> None:
    before = run_ranks(look_for_the_mess, 2)
    run_ranks(leave_a_mess, 2)
    assert run_ranks(look_for_the_mess, 2) == before
    assert before[0][2:] == [torch.float32, True, False, 1.0, logging.NOTSET]


def test_dtensor_does_not_remember_the_groups_of_an_earlier_case() -> None:
    for more_groups in (False, True, False):
        # 2 * (0 + 1 + 2 + 3), exact in float32
        assert run_ranks(sum_over_shards, 4, more_groups) == [12.0] * 4


def test_script_output_and_status_come_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys; print(os.environ['COLOUR']); print('oh', file=sys.stderr); sys.exit(4)"
    )
    done = run_script([script], env={"COLOUR": "blue"}, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (4, "blue\n", "oh\n")


@pytest.mark.slow
def test_script_past_its_limit_is_killed_with_its_children_and_shows_stacks(
    tmp_path: Path,
) -> None:
    script, pid_file = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "def snore():\n"
        "    time.sleep(600)\n"
        "snore()\n"
    )
    with pytest.raises(ScriptTimedOut, match="in snore"):
        # The script needs a tenth of a second to get there.
        run_script([script], timeout=10)
    assert _all_end([int(pid_file.read_text())])


@pytest.mark.slow
def test_ranks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "from tests.harness import run_ranks\n"
        "from tests.test_harness import my_pid\n"
        "print(*run_ranks(my_pid, 2), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # TMPDIR: a process that is killed leaves its files behind.
    environ = {"PYTHONPATH": os.pathsep.join([".", *sys.path]), "TMPDIR": str(tmp_path)}
    done = run_script([script], env=environ, timeout=280)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert _all_end(pids)


def _all_end(pids: list[int]) -> bool:
    """Whether the processes end within a minute: a signal is sent at once but not
    obeyed at once."""
    deadline = time.monotonic() + 60
    while any(_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
