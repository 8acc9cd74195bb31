"""The device that is checked, and the CPU that poses as one in a rehearsal: everything
runs, figures mean nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from smp_core.torch_facts import kernels


class NotHere(Exception):
    """An error: what a row needs is not on this machine; its text says what."""


class Device:
    """All questions to the device, in one place; `rehearsal` is true on the CPU."""

    def __init__(self, kind: str) -> None:
        self.rehearsal = kind == "cpu"
        self.device = torch.device(
            kind, *(() if self.rehearsal else (int(os.environ.get("LOCAL_RANK", "0")),))
        )
        if self.rehearsal:
            # The paths of a device with FP8 tensor cores, without Triton; products are
            # slow reference kernels.
            kernels._CAPABLE[self.device] = True
            kernels._TRITON = False
            self.activities = [ProfilerActivity.CPU]
        else:
            torch.cuda.set_device(self.device)
            self.activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]

    def needs(self, *, fp8: bool = False) -> None:
        """Raise `NotHere` in a rehearsal, or without FP8 tensor cores where they are
        needed."""
        if self.rehearsal:
            raise NotHere("no device")
        if fp8 and not kernels.device_multiplies_fp8(self.device):
            raise NotHere("no FP8 tensor cores")

    def synchronize(self) -> None:
        if not self.rehearsal:
            torch.cuda.synchronize(self.device)

    def sleep(self, milliseconds: float) -> None:
        """Keep the present stream busy."""
        if not self.rehearsal:
            torch.cuda._sleep(int(milliseconds * 1.5e6))

    def start_peak(self) -> None:
        if not self.rehearsal:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return 0 if self.rehearsal else torch.cuda.max_memory_allocated(self.device)

    def allocated_bytes(self) -> int:
        return 0 if self.rehearsal else torch.cuda.memory_allocated(self.device)

    def give_back(self) -> None:
        if not self.rehearsal:
            torch.cuda.empty_cache()

    def milliseconds(
        self, work: Callable[[], object], repeats: int = 10, warm_up: int = 3
    ) -> float:
        """Return the median between recorded events."""
        if self.rehearsal:
            repeats = warm_up = 1
        for _ in range(warm_up):
            work()
        times = []
        for _ in range(repeats):
            if self.rehearsal:
                began = time.perf_counter()
                work()
                times.append(1e3 * (time.perf_counter() - began))
                continue
            start, end = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    @contextlib.contextmanager
    def one_rank(self, bound: bool = False) -> Iterator[None]:
        """Make a world of this process: NCCL for the device, gloo for the CPU it is
        compared with; ``bound``: NCCL only, for the device alone, as Lightning has
        it."""
        backend, given = "gloo" if self.rehearsal else "cpu:gloo,cuda:nccl", {}
        if bound and not self.rehearsal:
            backend, given = "nccl", {"device_id": torch.device("cuda", 0)}
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"
        )
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/store",
                rank=0,
                world_size=1,
                **given,
            )
            try:
                yield
            finally:
                dist.destroy_process_group()


def machine() -> dict[str, Any] | None:
    """Return what figures depend on; None without a device."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    triton = __import__("triton").__version__ if kernels.has_triton() else None
    asked = {"devices": int(os.environ["RANKS"])} if "RANKS" in os.environ else {}
    return {
        **asked,
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "python": platform.python_version(),
    }
