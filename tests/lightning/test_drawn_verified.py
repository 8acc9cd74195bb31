"""`smp verify` of random scripts: right ones are not accused, and a defect at a random
place of a random script is found with its cause."""

from __future__ import annotations

import random

import pytest

from smp_core.verify import verify_command
from smp_core.verify.runs import Server, modules_for
from tests.harness import ROOT
from tests.lightning.scripts.drawn import PLANTS

SCRIPT = str(ROOT / "tests" / "lightning" / "scripts" / "drawn.py")
LAYOUTS = (
    "shard_degree=2 ranks=2",
    "shard_degree=1 ranks=2",
    "shard_degree=2 ranks=4",
)


def verify(server: Server, seed: int, plant: str | None) -> None:
    layout = random.Random(seed).choice(LAYOUTS)
    arguments = [SCRIPT, "--seed", str(seed)]
    if plant is not None:
        arguments += ["--plant", plant]
    report = verify_command(arguments, [layout], steps=3, float64=True, server=server)
    (found,) = report.comparisons
    if plant is None:
        assert report.agrees, (seed, str(report))
        return
    whats, cause = PLANTS[plant]
    assert found.part is not None and found.part.what in whats, (seed, str(report))
    grouped = "how samples are grouped"
    causes = [each for each in found.causes if not each.startswith(grouped)]
    assert causes[0].startswith(cause), (seed, str(report))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_right_scripts_agree(seed: int) -> None:
    with Server(modules_for([SCRIPT])) as server:
        for each in range(seed, seed + 4):
            verify(server, each, None)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_defect_is_found_wherever_it_is(plant: str) -> None:
    with Server(modules_for([SCRIPT])) as server:
        for seed in range(3):
            verify(server, seed, plant)
