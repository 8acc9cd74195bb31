"""Kill a process that keeps a state in memory before each call that changes its folder,
and look at what is found then.

Run as a script; prints one JSON line for each kill. A process that has imported torch
forks a child, which keeps the states of steps 1 and 2, and is killed with SIGKILL
before the n-th call that opens for writing, renames or removes while it keeps that of
step 3 (n = 0: when half of its tensors have been copied). Another child then looks for
a state, goes on from it, keeps one more and ends well.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from smp_core.checkpoint import load_checkpoint
from smp_core.checkpoint.memory import save as memory_save, slots as memory_slots
from smp_core.checkpoint.memory.tier import MemoryTier
from tests.core.checkpoint.kill_trials import fork

CALLS = ("open", "os.rename", "os.remove")


def state(step: int) -> dict[str, Any]:
    return {
        "model": {
            f"w{number}": torch.full((5000,), float(10 * step + number))
            for number in range(4)
        },
        "step": step,
    }


def tier(folder: Path) -> MemoryTier:
    os.environ["SMP_MEMORY_FOLDER"] = str(folder)
    return MemoryTier(1, str(folder / "disk"), [[0]], posed=False, layout="")


def killed_before(number: int, folder: Path) -> None:
    memory_save._SMALL_BYTES = -1  # beside training, as states are that are not small
    kept = tier(folder)
    kept.leave()
    for step in (1, 2):
        kept.save(state(step), step, {}, step)
    kept._saver.wait()
    calls = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal calls
        if event in CALLS and str(folder) in str(arguments[0]):
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    if number:
        sys.addaudithook(hook)
    else:
        copy = memory_slots.copy_to_hosts

        def half(pairs: Any) -> None:
            copy(pairs[: len(pairs) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        memory_slots.copy_to_hosts = half
    kept.save(state(3), 3, {}, 3)
    kept._saver.wait()


def look(folder: Path, seen: Path) -> None:
    kept = tier(folder)
    found = kept.find()
    assert found is not None, "nothing was found"
    read = {"model": {name: torch.zeros(5000) for name in state(0)["model"]}, "step": 0}
    load_checkpoint(kept.take(found), read)
    expected = state(found.step)
    exact = all(
        torch.equal(read["model"][name], value)
        for name, value in expected["model"].items()
    )
    kept.begin(found.step)
    kept.save(state(4), 4, {}, 4)
    kept.close(ended_well=True)
    left = [path.name for path in folder.glob("torch-smp-*/*")]
    seen.write_text(
        json.dumps(
            {
                "found": found.step,
                "exact": exact and read["step"] == found.step,
                "left": left,
            }
        )
    )


def main() -> None:
    top = Path(sys.argv[1])
    for number in range(100):
        folder = top / str(number)
        folder.mkdir()
        _, status = os.waitpid(fork(lambda: killed_before(number, folder)), 0)  # noqa: B023
        seen = top / "seen"
        _, looked = os.waitpid(fork(lambda: look(folder, seen)), 0)  # noqa: B023
        found = json.loads(seen.read_text()) if looked == 0 else {"error": looked}
        print(
            json.dumps({"number": number, "killed": status == signal.SIGKILL, **found}),
            flush=True,
        )
        shutil.rmtree(folder)
        if status == 0:
            return


if __name__ == "__main__":
    main()
