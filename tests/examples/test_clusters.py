"""Files that start a training on a cluster: they say what their tools take, and under a
real Slurm the training is one process's whoever starts it, and goes on where a signal
ended it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.harness import ROOT, run_script

FOLDER = Path(ROOT, "examples", "clusters")
NODES, RANKS = 2, 2
RESTORED = "Restored all states from the checkpoint"


def loss_of(text: str) -> tuple[int, str]:
    found = re.search(r"step (\d+), loss ([0-9.]+)$", text, re.MULTILINE)
    assert found is not None, text[-3000:]
    return int(found[1]), found[2]


@pytest.mark.slow
def test_the_training_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    command = [
        str(FOLDER / "train.py"),
        "--folder",
        str(tmp_path / "run"),
        "--save-every",
        "2",
    ]
    whole = run_script([*command[:2], str(tmp_path / "whole"), "--steps", "4"])
    first, second = (run_script([*command, "--steps", steps]) for steps in ("2", "4"))
    assert loss_of(first.stdout)[0] == 2
    # A run that begins anew comes to the same loss: what tells them apart is what
    # Lightning says.
    said = [RESTORED in run.stdout + run.stderr for run in (whole, first, second)]
    assert said == [False, False, True]
    assert loss_of(second.stdout) == loss_of(whole.stdout)


def commands() -> Iterator[tuple[str, list[str]]]:
    """(file, arguments) of each torchrun of the manifests."""
    for path in sorted(FOLDER.glob("kubernetes/*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            spec = manifest["spec"]
            if manifest["kind"] == "Job":
                (container,) = spec["template"]["spec"]["containers"]
                yield path.name, container["command"]
            if manifest["kind"] == "TrainJob":
                yield path.name, spec["trainer"]["command"]


def test_manifests_start_what_is_there() -> None:
    found = list(commands())
    assert [name for name, _ in found] == ["indexed-job.yaml", "trainjob.yaml"]
    for _, command in found:
        assert command[0] == "torchrun"
        asked = get_args_parser().parse_args(command[1:])
        assert Path(ROOT, asked.training_script.removeprefix("torch-smp/")).is_file()
        assert any(
            argument.startswith("--folder=") for argument in asked.training_script_args
        )


def test_the_job_finds_its_first_pod() -> None:
    service, job = yaml.safe_load_all(
        (FOLDER / "kubernetes" / "indexed-job.yaml").read_text()
    )
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"][
        "selector"
    ] == {"job-name": name}
    (container,) = pod["containers"]
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:29400" in container["command"]
    assert f"--nnodes={job['spec']['completions']}" in container["command"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("name", ["srun.sbatch", "torchrun.sbatch"])
def test_batch_scripts_are_bash(name: str) -> None:
    done = subprocess.run(
        ["bash", "-n", str(FOLDER / name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["srun.sbatch", "torchrun.sbatch"])
def test_tasks_get_the_processors_that_the_job_asks_for(name: str) -> None:
    """srun gives a task one processor where it is not told again, since Slurm 22.05:
    eight threads would share it."""
    text = (FOLDER / name).read_text()
    assert "#SBATCH --cpus-per-task=" in text
    told = text.index("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")
    assert told < text.index("\nsrun ")


def test_the_image_gets_nothing_that_a_checkout_has_beside_its_sources() -> None:
    """`COPY .` takes an environment of several GB along otherwise."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    left_out = {line.removeprefix("**/") for line in lines}
    ignored = {
        line.rstrip("/")
        for line in (ROOT / ".gitignore").read_text().splitlines()
        if line[0] != "#"
    }
    assert ignored | {".git"} <= left_out


# Under a Slurm of two nodes posed on this machine; as root, where slurm-wlm and a munge
# that runs are there


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a Slurm's commands."""
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        pytest.skip("no slurm-wlm here, or not root")
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode:
        pytest.skip("munge does not run")
    host, ports = os.uname().nodename.split(".")[0], "[17101-17102]"
    lines = [
        *(
            "ClusterName=posed",
            f"SlurmctldHost={host}",
            "SlurmctldPort=17100",
            "SlurmUser=root",
            "SlurmdUser=root",
        ),
        *(
            f"StateSaveLocation={tmp_path}/state",
            f"SlurmdSpoolDir={tmp_path}/%n",
            "MpiDefault=none",
            "JobRequeue=1",
        ),
        *(
            f"SlurmctldPidFile={tmp_path}/slurmctld.pid",
            f"SlurmdPidFile={tmp_path}/%n.pid",
        ),
        *(
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
        ),
        f"NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs={RANKS} State=UNKNOWN",
        "PartitionName=all Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP",
    ]
    (tmp_path / "slurm.conf").write_text("\n".join(lines) + "\n")
    for name in ("state", "node1", "node2"):
        (tmp_path / name).mkdir()
    environment = {
        **{
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM", "SMP_"))
        },
        **{
            "SLURM_CONF": str(tmp_path / "slurm.conf"),
            "MASTER_ADDR": "127.0.0.1",
            "HEAD": "127.0.0.1",
        },
        **{
            "RANKS_PER_NODE": str(RANKS),
            "SMP_RANKS_PER_NODE": str(RANKS),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ROOT,
        },
        "PATH": f"{Path(ROOT, '.venv', 'bin')}{os.pathsep}{os.environ['PATH']}",
    }
    daemons = [
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", name] for name in ("node1", "node2")),
    ]
    started = [
        subprocess.Popen(each, env=environment, stderr=subprocess.DEVNULL)
        for each in daemons
    ]
    try:
        yield environment
    finally:
        for daemon in reversed(started):
            daemon.terminate()
            daemon.wait(60)


def submit(environment: dict[str, str], out: Path, *arguments: str) -> str:
    """The number of the job, which the first call waits for Slurm with."""
    own = [
        "--parsable",
        "--gpus-per-node=0",
        "--cpus-per-task=1",
        f"--chdir={out.parent}",
        f"--output={out}",
    ]
    for _ in range(60):
        done = subprocess.run(
            ["sbatch", *own, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.returncode:
            return done.stdout.strip()
        time.sleep(1)
    raise AssertionError(done.stderr)


def wait_for(out: Path, words: str, seconds: float = 300.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        text = out.read_text() if out.exists() else ""
        if words in text:
            return text
        time.sleep(1)
    raise AssertionError(text[-3000:])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_batch_scripts_train_alike_and_requeue(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    # Jobs begin in a folder like a checkout.
    (tmp_path / "examples").symlink_to(Path(ROOT, "examples"))
    steps, ranks = (
        ["--steps", "60", "--save-every", "1000"],
        f"--ntasks-per-node={RANKS}",
    )
    by_srun, by_torchrun, ended = (
        tmp_path / f"{name}.log" for name in ("srun", "torchrun", "ended")
    )
    submit(slurm, by_srun, ranks, str(FOLDER / "srun.sbatch"), *steps)
    expected = loss_of(wait_for(by_srun, "step 60, loss"))
    submit(slurm, by_torchrun, str(FOLDER / "torchrun.sbatch"), *steps)
    assert loss_of(wait_for(by_torchrun, "step 60, loss")) == expected

    # A notice in the middle: the job saves, queues again, and goes on. Slurm lets it
    # wait two minutes.
    job = submit(
        slurm,
        ended,
        ranks,
        str(FOLDER / "srun.sbatch"),
        "--steps",
        "1000",
        "--save-every",
        "5",
    )
    wait_for(ended, "Setting signal handlers")
    time.sleep(20)
    subprocess.run(["scancel", "--signal=USR1", job], env=slurm, check=True)
    wait_for(ended, "the run ends before its end")
    text = wait_for(ended, "Restored all states from the checkpoint", 400.0)
    assert "last-preempted.ckpt" in text
    subprocess.run(["scancel", job], env=slurm, check=True)
    wait_for(ended, "SIGTERM: the run ends before its end")


# Under torchrun and Ray, which lose a rank


def starts(launcher: str, folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Start the training on two ranks; what it says goes into FOLDER.log."""
    commands = {
        "torchrun": [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--max-restarts=3",
            str(FOLDER / "train.py"),
        ],
        "ray": [str(FOLDER / "ray_train.py")],
    }
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM", "SMP_"))
    }
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ROOT,
        "RAY_DEDUP_LOGS": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    own |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, *commands[launcher], "--folder", str(folder), *flags]
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=kept | own,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def last_rank(launcher: str, parent: int, log: Path) -> int:
    """Return the process id of rank 1."""
    if launcher == "ray":
        return int(re.findall(r"pid=(\d+)\) world_rank=1", log.read_text())[-1])
    (found,) = (
        child.pid
        for child in psutil.Process(parent).children()
        if child.environ().get("RANK") == "1"
    )
    return found


def ended(launcher: subprocess.Popen[bytes]) -> None:
    """Wait for a launcher, which is killed with all that it started when it takes too
    long."""
    try:
        assert launcher.wait(400) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_a_training_that_loses_a_rank_goes_on(launcher: str, tmp_path: Path) -> None:
    """Its last loss is that of torchrun's ranks which nothing happened to, in all
    digits printed."""
    if launcher == "ray":
        pytest.importorskip("ray.train", reason="Ray Train is not installed")
    flags = ["--steps", "300", "--save-every", "10"]
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    ended(starts("torchrun", whole, *flags))
    running = starts(launcher, struck, *flags)
    log = struck.with_suffix(".log")
    try:
        # Ray alone takes more than a minute to start on two busy cores.
        deadline = time.monotonic() + 400
        while not (struck / "last.ckpt").exists():
            assert running.poll() is None and time.monotonic() < deadline, (
                log.read_text()[-3000:]
            )
            time.sleep(0.5)
        assert "step 300" not in log.read_text(), (
            "it has ended before it could be struck"
        )
        os.kill(last_rank(launcher, running.pid, log), signal.SIGKILL)
    except BaseException:
        os.killpg(running.pid, signal.SIGKILL)
        raise
    ended(running)
    assert RESTORED in log.read_text()
    (expected, found) = (
        loss_of(each.read_text()) for each in (whole.with_suffix(".log"), log)
    )
    assert found == expected
