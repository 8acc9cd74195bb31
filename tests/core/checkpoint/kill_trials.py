"""Kill a saving world at random instants and look at what is left. Run as a script,
prints one JSON line per trial.

A parent that has imported torch forks four gloo ranks per trial. They save step 2 over
step 1 (or a new folder when ``fresh``); at an instant drawn uniformly over the measured
time of a save, the parent kills one rank or all of them with SIGKILL. Then a fresh fork
loads the path: it must find exactly step 1 or exactly step 2 (or, when ``fresh``, step
2 or a clear error), and one more save must succeed and leave no temporaries behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp_core.checkpoint import (
    AsyncCheckpointer,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)

WORLD = 4
ROWS = 1 << 20  # 4 MB of float32 per tensor
# Seconds after a kill. An undisturbed world may take as long as it takes: who started
# this script has a limit.
SURVIVORS_LIMIT = 20.0


def state(seed: int) -> dict[str, Any]:
    """Numbers that tell the two steps apart in every element."""
    return {
        "model": {
            f"w{i}": torch.full((ROWS,), float(seed * 100 + i)) for i in range(4)
        },
        "step": seed,
    }


def fork(work: Callable[[], None]) -> int:
    """Run something in a forked child; its exit status is 0 when it returned, 3 when it
    raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 3
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def rank_work(rank: int, store: str, path: str, started: int, async_save: bool) -> None:
    """One rank: join the group, say that it starts, save step 2."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD
    )
    saver = AsyncCheckpointer() if async_save else None
    mine = state(2)
    dist.barrier()
    os.write(started, b"s")
    if saver is None:
        save_checkpoint(path, mine)
    else:
        saver.save(path, mine)
        for tensor in mine["model"].values():
            tensor.zero_()  # training goes on
        saver.close()
    dist.barrier()


def run_world(
    path: str, async_save: bool, kill_after: float | None, victims: list[int]
) -> float:
    """Fork a world, kill the victims ``kill_after`` seconds into the save; seconds that
    the world lived on."""
    # A file, not a port: one that is free now may be taken when rank 0 listens.
    with tempfile.TemporaryDirectory(prefix="smp-kill-") as meeting:
        return run_world_that_meets(
            f"{meeting}/store", path, async_save, kill_after, victims
        )


def run_world_that_meets(
    store: str,
    path: str,
    async_save: bool,
    kill_after: float | None,
    victims: list[int],
) -> float:
    read_end, write_end = os.pipe()
    pids = [
        fork(lambda r=rank: rank_work(r, store, path, write_end, async_save))
        for rank in range(WORLD)
    ]  # type: ignore[misc]
    os.close(write_end)
    heard = 0
    while heard < WORLD and (piece := os.read(read_end, WORLD)):
        heard += len(piece)
    os.close(read_end)
    begin = time.perf_counter()
    if kill_after is not None:
        time.sleep(kill_after)
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
    end = time.monotonic() + SURVIVORS_LIMIT
    waiting = set(pids)
    while waiting and (kill_after is None or time.monotonic() < end):
        for pid in list(waiting):
            if os.waitpid(pid, os.WNOHANG)[0]:
                waiting.discard(pid)
        time.sleep(0.002)
    # Survivors that hang in a collective: the launcher would end them.
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return time.perf_counter() - begin


def what_loads(path: str) -> str:
    """``"1"`` or ``"2"`` when exactly that step loads, ``"error: ..."`` for a refusal,
    ``"WRONG"`` otherwise."""
    target = {"model": {f"w{i}": torch.zeros(ROWS) for i in range(4)}, "step": 0}
    try:
        load_checkpoint(path, target)
    except CheckpointError as error:
        return f"error: {error}"
    for seed in (1, 2):
        expected = state(seed)
        same = all(
            torch.equal(target["model"][name], expected["model"][name])
            for name in expected["model"]
        )  # type: ignore[index]
        if same and target["step"] == seed:
            return str(seed)
    return "WRONG"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = random.Random(options.seed)
    for async_save in (False, True):
        path = str(options.folder / ("async" if async_save else "sync") / "last.ckpt")
        save_checkpoint(path, state(1))
        lasts = run_world(path, async_save, None, [])
        assert what_loads(path) == "2", "the save that nobody disturbed must succeed"
        for number in range(options.trials):
            for killed in ("one", "all"):
                fresh = number % 4 == 3
                shutil.rmtree(path)
                if not fresh:
                    save_checkpoint(path, state(1))
                victims = (
                    [generator.randrange(WORLD)]
                    if killed == "one"
                    else list(range(WORLD))
                )
                instant = generator.uniform(0, lasts)
                run_world(path, async_save, instant, victims)
                found = what_loads(path)
                left = [
                    name
                    for name in os.listdir(os.path.dirname(path))
                    if name.startswith(".")
                ]
                save_checkpoint(path, state(2))
                after = [
                    name
                    for name in os.listdir(os.path.dirname(path))
                    if name.startswith(".")
                ]
                print(
                    json.dumps(
                        {
                            "async": async_save,
                            "killed": killed,
                            "victims": victims,
                            "instant": round(instant, 4),
                            "save_seconds": round(lasts, 4),
                            "fresh": fresh,
                            "found": found,
                            "left_behind": len(left),
                            "after_next_save": after,
                            "next_save": what_loads(path),
                        }
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
