"""What it costs to note collectives, to compare them, and to know where a rank waits (docs/ranks.md).

    python benchmarks/noting.py [--processes 8] [--pairs 200] [--nothing] [--out benchmarks/results/noting.json]

One rank of torch's fake process group steps models of 24 blocks, by turns with noting and without it. Both are steps of
the same models: where a model's objects lie in memory makes more of a difference than noting does. The step behind a
change from one to the other is left out. Each figure is processor time of the main thread (``time.thread_time``). What
disturbs a step (other programs, the memory that they share) only makes it longer, so the fast steps are compared: the
difference of the lower deciles of both kinds. Processes differ by more than steps of one do, since their memory is laid
out otherwise. Reported is the mean of several processes, one after the other, with the standard error of that mean, and
its share of a step of 50 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import inspect
import json
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore  # torch's only way to the fake backend

from smp_core.config import SmpConfig
from smp_core.engine import parallelize
from smp_core.sharding.accumulation import AccumulationWindow
from smp_core.sharding.received_gradients import Told
from smp_core.whereabouts import Whereabouts

WORLD, BLOCKS, WIDTH, TOKENS = 8, 24, 32, 8
MODELS = 3
GOAL = 0.005
STEP_MS = 50.0  # the step that the goal is a share of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


@dataclass
class Communication:
    """A unit's communication object, and FSDP2's setter for it."""

    setter: Callable[[Any], None]
    noted: Any

    def note(self, noting: bool) -> None:
        """Let FSDP2 have it with its notes, or without."""
        self.setter(self.noted if noting else self.noted.args[0].made)


@contextlib.contextmanager
def collected() -> Iterator[list[Communication]]:
    """List what units communicate with."""
    found: list[Communication] = []

    def collecting(name: str) -> Callable[[FSDPModule, Any], None]:
        setter = getattr(FSDPModule, name)

        def collect(module: FSDPModule, noted: Any) -> None:
            found.append(Communication(functools.partial(setter, module), noted))
            setter(module, noted)

        return collect

    with contextlib.ExitStack() as stack:
        for name in ("set_custom_all_gather", "set_custom_reduce_scatter"):
            stack.enter_context(mock.patch.object(FSDPModule, name, collecting(name)))
        yield found


class Unnoted:
    """The stand-in for the notes of a model that keeps none."""

    windows = 0
    backward_pass: Any = None

    def end_micro_batch(self) -> None: ...

    def forget(self) -> None: ...


class UnseenPlace(Whereabouts):
    """A place that nobody is told."""

    nowhere = contextlib.nullcontext()

    def waiting(self, what: str) -> Any:
        return self.nowhere

    def in_window(self) -> None: ...

    def end_window(self, measured: bool) -> None: ...


class Uncompared(Told):
    """Flags of a window without what ranks compare."""

    def divergence(self) -> None:
        return None


def with_globals(function: Any, **replaced: Any) -> Any:
    """Return a function to which other names are global. What would be patched between two steps is looked up slowly
    in the next one, which would then be part of the difference."""
    inner = inspect.unwrap(function)  # of torch.no_grad
    copied = types.FunctionType(
        inner.__code__, {**inner.__globals__, **replaced}, None, inner.__defaults__, inner.__closure__
    )
    return copied if inner is function else torch.no_grad()(copied)


def bare_window() -> type[AccumulationWindow]:
    """Return a window that notes and compares nothing."""
    told = type("Told", (Uncompared,), {"__init__": with_globals(Told.__init__, told_by=lambda *_: [])})
    replaced = {"Told": told, "here": UnseenPlace()}
    names = ("close", "_queue_end")
    methods = {name: with_globals(getattr(AccumulationWindow, name), **replaced) for name in names}
    return type("BareWindow", (AccumulationWindow,), methods)


class Stepped:
    """A model that steps with noting and without."""

    bare = bare_window()

    def __init__(self) -> None:
        torch.manual_seed(0)
        with collected() as self.units:
            parallel = parallelize(nn.Sequential(*(Block() for _ in range(BLOCKS))), SmpConfig(shard_degree=WORLD))
        self.module, self.window = parallel.module, cast(Any, parallel.window)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        parallel.prepare_optimizer(self.optimizer)
        self.issued = self.window._issued
        self.x = torch.randn(TOKENS, WIDTH)

    def note(self, noting: bool) -> None:
        """Note from here on, or do not."""
        for unit in self.units:
            unit.note(noting)
        self.window.__class__ = AccumulationWindow if noting else self.bare
        self.window._issued = self.issued if noting else Unnoted()

    def step(self) -> float:
        """Return the seconds of processor time that a step takes."""
        begun = time.thread_time()
        self.module(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.thread_time() - begun


def measured(pairs: int, both: bool = False) -> tuple[list[float], list[float]]:
    """Return seconds of steps with noting, and of those without that follow or precede them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    models = [Stepped() for _ in range(MODELS)]
    for model in models * 5:
        model.step()
    gc.collect()
    gc.disable()  # whichever step it falls into would pay for all
    ours: list[float] = []
    bare: list[float] = []
    for pair in range(pairs):
        model = models[pair % MODELS]
        for seconds in (ours, bare) if pair % 2 else (bare, ours):
            model.note(both or seconds is ours)
            model.step()
            seconds.append(model.step())
    return ours, bare


def decile(seconds: list[float]) -> float:
    """Return what a tenth of the steps take less than."""
    return statistics.quantiles(seconds, n=10)[0]


def of_a_process(pairs: int, both: bool) -> tuple[float, float]:
    """Return the seconds that noting adds to a step of this process, and those of a step without it."""
    torch.set_num_threads(1)
    ours, bare = measured(pairs, both)
    return decile(ours) - decile(bare), decile(bare)


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--pairs", type=int, default=200, help="of each process")
    arguments.add_argument("--processes", type=int, default=8)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--nothing", action="store_true", help="compare noting with noting: what chance makes")
    asked = arguments.parse_args()
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        of_each = [asked.pairs] * asked.processes, [asked.nothing] * asked.processes
        differences, steps = zip(*pool.map(of_a_process, *of_each), strict=True)
    difference = statistics.fmean(differences)
    result = {
        "processes": asked.processes,
        "pairs": asked.pairs * asked.processes,
        "units": BLOCKS,
        "step_ms": round(1e3 * statistics.fmean(steps), 2),
        "differences_ms": [round(1e3 * each, 4) for each in differences],
        "difference_ms": round(1e3 * difference, 4),
        "uncertainty_ms": round(1e3 * statistics.stdev(differences) / asked.processes**0.5, 4),
        "share_of_50_ms": round(1e3 * difference / STEP_MS, 5),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(result, indent=2))
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(result["share_of_50_ms"] > GOAL)


if __name__ == "__main__":
    sys.exit(main())
