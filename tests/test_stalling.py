"""Programs in which a rank goes its own way, through both faces: who waits, in what and
why is written to stderr.

What is injected is in tests/stalling_script.py; nothing is said about how long it took,
which depends on the machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.harness import run_script

GATHER = r"all_gather of '(model\.)?{}' in forward"
APART = rf"went apart: in micro-batch 1, rank 0: {GATHER}; rank 1: {GATHER}"
IMAGE = APART.format("vision.0", "text.0")
WAITS = rf"waiting: rank 0 \d+ s in {GATHER.format('text.0')}, step 3, micro-batch 1 \| elsewhere: rank 1: "
IN_SCRIPT = r"stalling_script.py:\d+ in "
# (face, event, rank): what is written.
DIFFERS = "differs? between ranks .* on rank 0; .* on rank 1"
CASES = {
    ("accelerate", "image", 0): IMAGE,
    # Rank 1 wants no gradients of a layer any more.
    (
        "accelerate",
        "frozen",
        1,
    ): r"went apart: in micro-batch 1, rank 0: reduce_scatter of 'text.0' in backward; rank 1: ",
    ("lightning", "image", 0): IMAGE,
    ("lightning", "image", 1): APART.format("text.0", "vision.0"),
    ("accelerate", "swallowed", 0): IMAGE,
    (
        "accelerate",
        "fewer layers",
        1,
    ): r"went apart: in micro-batch 1, rank 0: all_gather of 'text.1' in forward; rank 1: ",
    (
        "accelerate",
        "more layers",
        1,
    ): r"went apart: in micro-batch 1, rank 0: .* in backward; rank 1: all_gather of 'text",
    ("accelerate", "no gradient", 1): r"rank 0 \d+ s in .* in backward, step 3",
    ("lightning", "no gradient", 1): r"rank 0 \d+ s in .* in backward, step 3",
    (
        "lightning",
        "nothing",
        1,
    ): "rank 1 failed: RuntimeError: Skipping the `training_step` by returning None",
    (
        "accelerate",
        "micro-batches",
        1,
    ): r"waiting: rank 0 \d+ s in the window's end, step 3",
    ("accelerate", "sleep", 1): WAITS + IN_SCRIPT + "sleep_in_user_code",
    ("lightning", "sleep", 1): WAITS + IN_SCRIPT + "sleep_in_user_code",
    ("accelerate", "lock", 1): WAITS + IN_SCRIPT + "wait_for_a_lock",
    ("accelerate", "input", 1): WAITS + IN_SCRIPT + "wait_for_input",
    ("accelerate", "loader", 1): WAITS + r"data loading \(" + IN_SCRIPT + "__iter__",
    ("lightning", "loader", 1): WAITS + r"data loading \(" + IN_SCRIPT + "__iter__",
    ("accelerate", "save", 0): r"waiting: rank 1 \d+ s in "
    + GATHER.format("text.0")
    + ".* rank 0: "
    + IN_SCRIPT
    + "save",
    ("accelerate", "barrier", 1): r"rank 1 \d+ s in barrier \(" + IN_SCRIPT + "barrier",
    ("accelerate", "stop", 1): WAITS + "no sign of life: stopped",
    (
        "lightning",
        "stop",
        0,
    ): r"rank 1: waiting: rank 1 .* elsewhere: rank 0: no sign of life: stopped",
    ("accelerate", "swap", 1): WAITS + "no sign of life: stopped, swapped out or lost",
    (
        "accelerate",
        "evaluation",
        1,
    ): r"went apart: in micro-batch 1, .* rank 1: all_gather of 'text.0' in forward",
    ("lightning", "validation", 1): r"rank 0 \d+ s in .*rank 1 \d+ s in "
    + GATHER.format("text.0"),
    (
        "lightning",
        "end",
        1,
    ): r"the run ended on rank 1 \(after optimizer step 3\), and goes on elsewhere",
    ("accelerate", "knobs", 1): "reshard_after_forward " + DIFFERS,
    ("lightning", "model", 1): "the model "
    + DIFFERS
    + ".* the first parameter that differs is number 8",
    (
        "accelerate",
        "kill",
        1,
    ): r"rank 1 was lost: no sign of life any more; it was in optimizer step \d",
    ("lightning", "leave", 1): "rank 1 failed: SystemExit: enough",
    ("accelerate", "fail", 1): "rank 1 failed: ArithmeticError: the user's own mistake",
    ("lightning", "fail", 1): "rank 1 failed: ArithmeticError: the user's own mistake",
}


def said(face: str, event: str, rank: int, expected: str) -> str:
    program = ["-m", "tests.stalling_script", face, event, str(rank), expected]
    return run_script(program, nproc=2).stderr


# In the normal run: tests/core/sharding/test_divergence.py, test_stalls.py.
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_whoever_goes_its_own_way_is_named_with_the_place(
    case: tuple[str, str, int],
) -> None:
    written = said(*case, CASES[case])
    assert re.search(CASES[case], written), written


def load() -> list[subprocess.Popen[bytes]]:
    """Programs that keep the machine busy, as many as bring its load to ten."""
    missing = max(10 - round(os.getloadavg()[0]), 0)
    return [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(missing)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("face", ["accelerate", "lightning"])
@pytest.mark.parametrize("number", range(10))
def test_a_busy_machine_is_no_alarm(number: int, face: str) -> None:
    busy = load()
    try:
        program = ["-m", "tests.stalling_script", face, "none", "0", "nothing"]
        done = run_script(program, nproc=2, env={"STEPS": "300"})
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert done.returncode == 0, done.stderr
    assert "torch-smp, rank" not in done.stderr and "straggler" not in done.stderr, (
        done.stderr
    )
