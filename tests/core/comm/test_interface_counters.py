"""The meter against network cards: two nodes in network namespaces, two ranks in each
(see benchmarks/cluster).

Skipped where namespaces cannot be made. Hostname and boot id are one machine's, so
SMP_RANKS_PER_NODE tells the nodes apart; the bytes that pass eth0 are real.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.harness import ROOT, run_script

CLUSTER = Path(ROOT, "benchmarks", "cluster")
# Seconds for what surely comes.
LONG = 600


def load_netlab() -> ModuleType:
    spec = importlib.util.spec_from_file_location("netlab", CLUSTER / "netlab.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["netlab"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skip unless a lab can be made here; the reason is the command that failed."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [
        tool for tool in ("ip", "tc", "bridge", "sysctl") if shutil.which(tool) is None
    ]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    try:
        with load_netlab().Lab(nodes=2, rate=0):
            pass
    except (RuntimeError, OSError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")


def left_behind() -> list[str]:
    """Namespaces of labs whose process is gone."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    owners = {
        line.split()[0]: re.match(r"netlab-(\d+)-", line)
        for line in listed.splitlines()
        if line.strip()
    }
    return [
        name
        for name, owner in owners.items()
        if owner and not Path("/proc", owner[1]).exists()
    ]


@pytest.fixture
def leaves_nothing(namespaces: None, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a lab that leaves no namespace behind. It does not wait for
    labs of other folders: its lock is its own."""
    before = set(left_behind())
    yield {"TMPDIR": str(tmp_path)}
    assert set(left_behind()) <= before


@pytest.mark.slow
def test_bytes_that_pass_the_card_are_the_metered_ones(
    leaves_nothing: dict[str, str], tmp_path: Path
) -> None:
    """Within 2 %: the card also counts 66 bytes of headers per frame of up to 64 KiB
    and pure acknowledgements (0.2 to 0.4 % seen). Without 66 bytes per frame what is
    left over is gloo's message headers, flags, norms and two barriers: within 0.5 %
    (0.1 % seen), and never less than was metered."""
    figures = tmp_path / "wire.json"
    limits = ["--rate", "0", "--timeout", str(LONG)]
    lab = [str(CLUSTER / "netlab.py"), "run", *limits, "--log-dir", str(tmp_path), "--"]
    program = [
        sys.executable,
        str(CLUSTER / "wire_check.py"),
        "--json",
        str(figures),
        "--steps",
        "2",
    ]
    done = run_script([*lab, *program], env=leaves_nothing, timeout=LONG + 60)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert len(found) == 4
    for layout, nodes in found.items():
        assert len(nodes) == 2
        for node in nodes:
            assert node["metered"] > 1e6, (
                f"{layout}: too few bytes for the comparison to mean anything"
            )
            assert node["card"] == pytest.approx(node["metered"], rel=0.02), layout
            assert 1 <= node["payload"] / node["metered"] <= 1.005, layout
    two_stages, flat = (
        found["shard 4, two stages"][0]["card"],
        found["shard 4, flat"][0]["card"],
    )
    assert two_stages < 0.62 * flat, (
        "1/2 x M per collective against 3/4 x M (gather) and M (reduction)"
    )


def test_a_failing_rank_ends_the_lab_and_leaves_nothing(
    leaves_nothing: dict[str, str],
) -> None:
    lab = [str(CLUSTER / "netlab.py"), "run", "--rate", "0", "--quiet", "--"]
    program = ["/bin/sh", "-c", f"[ $RANK = 2 ] && exit 7; sleep {LONG}"]
    done = run_script([*lab, *program], env=leaves_nothing, timeout=LONG / 2)
    assert done.returncode == 7
    assert "rank2 ended with status 7" in done.stderr


def test_a_terminated_lab_leaves_nothing(
    leaves_nothing: dict[str, str], tmp_path: Path
) -> None:
    started = tmp_path / "started"
    lab = [
        sys.executable,
        str(CLUSTER / "netlab.py"),
        "run",
        "--rate",
        "100mbit",
        "--quiet",
        "--",
    ]
    program = ["/bin/sh", "-c", f"echo $$ >> {started}; sleep {LONG}"]
    process = subprocess.Popen([*lab, *program], env={**os.environ, **leaves_nothing})
    try:
        deadline = time.monotonic() + LONG / 4
        while (
            not (started.exists() and started.read_text().count("\n") == 4)
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        ranks = [psutil.Process(int(pid)) for pid in started.read_text().split()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG / 4) == 128 + signal.SIGTERM
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert len(ranks) == 4
    # The signal may come before the lab has noted the last one: that is killed as a
    # process of the namespace, and whose child it is then reaps it.
    _, alive = psutil.wait_procs(ranks, timeout=LONG / 4)
    assert not [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE]
