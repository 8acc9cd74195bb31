"""`smp doctor`: what this machine has that torch-smp uses, what is missing, and what to
change.

Each check looks at one thing on this machine, takes at most a few seconds, and returns
what it found. Nothing is changed, and nothing is sent over a network; links are
measured by `smp topology --measure`. What a subject uses of the machine it looks for
itself (:meth:`smp_core.plan.plan.Subject.machine`).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import typer
from packaging.version import Version
from rich.table import Table

from smp_core.checkpoint.memory import left_by_ended_jobs
from smp_core.outside import OLDEST, console, is_older
from smp_core.plan import Finding
from smp_core.torch_facts import TESTED_TORCH

# torch's are those of docs/versions.md; the others those of constraints.txt
# (tests/core/cli/test_doctor.py compares them).
TESTED = {
    "torch": TESTED_TORCH,
    "lightning": ("2.6.6",),
    "accelerate": ("1.15.0",),
    "transformers": ("5.23.0", "5.24.0"),
    "numpy": ("2.4.6",),
    "safetensors": ("0.8.0",),
}
NVIDIA_DRIVER = Path("/proc/driver/nvidia")
"""Is there where NVIDIA's driver is loaded."""
_WRITTEN = 64 * 2**20  # bytes of the storage check
_TIME_ERROR = 5  # of adjtimex(2): the clock is not synchronised

# Environment variables that decide how NCCL connects, waits and takes memory
# (docs/nccl.md).
_FOR_NCCL = (
    *("NCCL_", "TORCH_NCCL_", "FI_", "OFI_NCCL_"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)


def versions() -> Iterator[Finding]:
    """Compare installed versions with the oldest that work and with those tested."""
    for name, tested in TESTED.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(
                name, "note", "not installed", f"pip install {name}, if you use it"
            )
            continue
        # Older ones are refused at import; untested ones usually work.
        if name in OLDEST and is_older(name, installed):
            yield Finding(
                name,
                "problem",
                f"{installed}, older than {OLDEST[name]}",
                f"pip install '{name}>={OLDEST[name]}'",
            )
        elif not any(
            Version(installed).release[:2] == Version(each).release[:2]
            for each in tested
        ):
            yield Finding(name, "note", f"{installed}; tested with {', '.join(tested)}")
        else:
            yield Finding(name, "ok", installed)


def devices() -> Iterator[Finding]:
    """Look at accelerators and what they can compute in."""
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "torch is built for CPU"
        )
        # pip's torch for Linux is built for CUDA: on a machine without a driver there
        # is nothing to be found.
        unseen = torch.version.cuda is not None and NVIDIA_DRIVER.exists()
        fix = (
            "see whether nvidia-smi lists devices, and CUDA_VISIBLE_DEVICES"
            if unseen
            else ""
        )
        yield Finding(
            "devices", "problem" if unseen else "note", f"CPU only; {built}", fix
        )
        return
    # Ranks on different devices wait for the slowest.
    kinds = {
        torch.cuda.get_device_name(number)
        for number in range(torch.cuda.device_count())
    }
    memory = (
        min(
            torch.cuda.mem_get_info(number)[0]
            for number in range(torch.cuda.device_count())
        )
        / 2**30
    )
    found = f"{torch.cuda.device_count()} x {', '.join(sorted(kinds))}, at least {memory:.0f} GiB free"
    yield Finding.unless(len(kinds) == 1, "devices", found, "use one kind")
    yield Finding(
        "cuDNN",
        "ok" if torch.backends.cudnn.is_available() else "note",
        str(torch.backends.cudnn.version()),
    )


def kernels() -> Iterator[Finding]:
    # torch.compile and our kernels need it on a GPU only.
    """Look for what compiles and provides kernels."""
    triton = importlib.util.find_spec("triton") is not None
    if triton:
        yield Finding("Triton", "ok", "yes", "")
    elif torch.cuda.is_available():
        yield Finding("Triton", "problem", "not installed", "pip install triton")
    else:
        yield Finding("Triton", "note", "not installed", "")


def network() -> Iterator[Finding]:
    """Look at what connects processes."""
    # The name of this node.
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        loopback = address.startswith("127.")
        fix = (
            "other nodes cannot reach it: give MASTER_ADDR a name that resolves to the network's address"
            if loopback
            else ""
        )
        yield Finding(
            "host name", "note" if loopback else "ok", f"{name} is {address}", fix
        )
    except OSError as error:
        yield Finding(
            "host name",
            "problem",
            f"{name}: {error}",
            f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    # Interfaces that variables choose.
    interfaces = sorted(name for _, name in socket.if_nameindex())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # "^" excludes and "=" means exactly; the names are prefixes.
        asked = os.environ.get(variable, "")
        prefixes = filter(None, asked.lstrip("^=").split(","))
        missing = []
        for prefix in prefixes:
            if not any(name.startswith(prefix) for name in interfaces):
                missing.append(prefix)
        if missing:
            fix = f"unset it, or choose among {', '.join(interfaces)}"
            yield Finding(
                variable, "problem", f"{', '.join(missing)}: no such interface", fix
            )
    # What NCCL finds.
    told = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_FOR_NCCL)
    )
    if told:
        yield Finding("NCCL is told", "ok", ", ".join(told))
    # What follows is of use on a GPU only.
    if torch.cuda.is_available():
        if not dist.is_nccl_available():
            yield Finding(
                "NCCL",
                "problem",
                "torch is built without it",
                "install a CUDA build of torch",
            )
            return
        yield Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
        plugin = os.environ.get("NCCL_NET_PLUGIN") or ctypes.util.find_library(
            "nccl-net"
        )
        fabric = Path("/sys/class/infiniband")
        cards = sorted(os.listdir(fabric)) if fabric.is_dir() else []
        yield Finding(
            "network cards",
            "ok" if cards else "note",
            ", ".join(cards) or "none with RDMA",
        )
        # Without its plug-in NCCL uses plain sockets on EFA cards.
        elastic = any(card.startswith(("efa", "rdmap")) for card in cards)
        state: Literal["ok", "problem"] = "problem" if elastic and not plugin else "ok"
        yield Finding(
            "NCCL network plug-in",
            state,
            str(plugin or "none"),
            "install aws-ofi-nccl" if state == "problem" else "",
        )


def limits() -> Iterator[Finding]:
    """Look at what the system allows a process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding.unless(files >= 4096, "open files", str(files), "ulimit -n 65536")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / 2**30
        fix = (
            "data loaders with workers need it: docker run --shm-size=8g, or --ipc=host"
        )
        yield Finding.unless(
            free >= 1, "shared memory", f"{free:.1f} GiB free in {shared}", fix
        )
    # Threads of all ranks of this node share its cores.
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = f"{threads} x {ranks} ranks on {cores} cores"
    fix = f"OMP_NUM_THREADS={max(1, cores // ranks)}"
    yield Finding.unless(threads * ranks <= cores, "threads", found, fix)


def states_in_memory() -> Iterator[Finding]:
    """Look for states of training that jobs which have ended left in shared memory."""
    for path, size in left_by_ended_jobs():
        fix = f"start that job again to go on with it, or free it: rm -r {path}"
        yield Finding(
            "states in memory",
            "note",
            f"{size} of a job that has ended, in {path}",
            fix,
        )


def clock() -> Iterator[Finding]:
    """Ask the kernel whether the clock is synchronised, by which logs of several nodes
    are compared."""
    library = ctypes.CDLL(None)
    # adjtimex is Linux's.
    if platform.system() != "Linux" or not hasattr(library, "adjtimex"):
        return
    # Struct timex has 208 bytes; zeros ask only.
    state = library.adjtimex(ctypes.create_string_buffer(512))
    synchronised = state not in (-1, _TIME_ERROR)
    fix = (
        ""
        if synchronised
        else "start chrony or systemd-timesyncd; training itself does not need it"
    )
    yield Finding(
        "clock",
        "ok" if synchronised else "note",
        "synchronised" if synchronised else "not synchronised",
        fix,
    )


def storage(folder: Path) -> Iterator[Finding]:
    """Write, sync, rename and read a file of 64 MiB in the folder that checkpoints go
    to."""
    try:
        # In a folder of its own, which is removed with all that is in it.
        with tempfile.TemporaryDirectory(
            prefix=".smp-doctor-", dir=folder
        ) as directory:
            first, second = Path(directory, "a"), Path(directory, "b")
            block, begun = os.urandom(1 << 20), time.perf_counter()
            # With fsync: without it the page cache would be measured.
            with first.open("wb") as file:
                for _ in range(_WRITTEN >> 20):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            rate = _WRITTEN / 2**20 / (time.perf_counter() - begun)
            first.rename(second)
            whole = second.stat().st_size == _WRITTEN
    except OSError as error:
        yield Finding(
            "storage",
            "problem",
            f"{folder}: {error}",
            "choose a folder that can be written, synced and renamed in",
        )
        return
    free = shutil.disk_usage(folder).free / 2**30
    state: Literal["ok", "problem"] = "ok" if whole else "problem"
    yield Finding(
        "storage",
        state,
        f"{folder}: {rate:.0f} MiB/s with fsync, renames, {free:.0f} GiB free",
    )


def findings(folder: Path) -> list[Finding]:
    """Run all checks, those of subjects included; one that fails is a finding too."""
    # The engine takes a second, which no other command has to wait.
    from smp_core.engine import SUBJECTS

    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", versions),
        ("devices", devices),
        ("kernels", kernels),
        ("network", network),
        ("limits", limits),
        ("states in memory", states_in_memory),
        ("clock", clock),
        ("storage", lambda: storage(folder)),
        *((subject.name, subject.machine) for subject in SUBJECTS),
    ]
    found: list[Finding] = []
    # A check that fails must not hide what the others found.
    for name, check in checks:
        try:
            found += check()
        except Exception as error:
            found.append(
                Finding(
                    name,
                    "note",
                    f"could not be looked at: {type(error).__name__}: {error}",
                )
            )
    return found


def table_of(found: list[Finding]) -> Table:
    """Return the findings as a table, problems first."""
    table = Table(
        title=f"Python {platform.python_version()} on {platform.platform()}",
        title_justify="left",
    )
    for column in ("", "looked at", "found", "what to do"):
        table.add_column(column, overflow="fold")
    order = ("problem", "note", "ok")
    for each in sorted(found, key=lambda finding: order.index(finding.state)):
        table.add_row(each.state, each.topic, each.found, each.fix)
    return table


def doctor(
    folder: Annotated[
        Path, typer.Option(help="a folder that checkpoints go to")
    ] = Path("."),
) -> None:
    """Look at devices, kernels, network, limits, storage and versions, and say what to
    change; exit status 1 if something has to be."""
    found = findings(folder)
    console().print(table_of(found))
    if any(each.state == "problem" for each in found):
        raise typer.Exit(1)
