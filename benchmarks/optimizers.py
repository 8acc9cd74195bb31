"""Which optimizers step shards as one process steps whole tensors: every class of some
libraries, tried on gloo ranks.

    python benchmarks/optimizers.py [--only NAME ...] [--out
    benchmarks/results/optimizers.json] [--page]

Four ranks pose as two nodes; a net with uneven rows, fewer rows than ranks and a 0-d
parameter is sharded over all of them, or over two with its optimizer states over the
world. Each optimizer, with its own defaults, is prepared and takes some steps in
float64, beside one process that sees all batches. A world that hangs or dies is started
again behind the optimizer that it stopped at. Libraries that are not installed are left
out, and named. ``--page`` writes the table of docs/optimizers.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "optimizers.json"
PAGE = ROOT / "docs" / "optimizers.md"
BEGIN, END = "<!-- from benchmarks/results/optimizers.json -->", "<!-- end -->"
WORLD, STEPS, WIDTH = 4, 4, 8
PATIENCE = 60.0  # seconds for one optimizer
LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {"shard_degree": 4},
    "world": {"shard_degree": 2, "optimizer_shard": "world"},
}
LIBRARIES = {
    "torch": "torch.optim",
    "transformers": "transformers.optimization",
    "torchao": "torchao.optim",
    "schedulefree": "schedulefree",
    "lion-pytorch": "lion_pytorch",
    "adan-pytorch": "adan_pytorch",
    "torch-smp": "smp_core.optim",
    "pytorch_optimizer": "pytorch_optimizer",
}
EXACT = 1e-10
"""Of the largest weight: sums in another order, through the steps of optimizers that
divide by small numbers."""


# What is tried


def kinds() -> Iterator[tuple[str, str]]:
    """Yield (library, name of the class) of every optimizer that is installed."""
    seen: set[type] = set()
    for library, module_name in LIBRARIES.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for name in sorted({*dir(module), *getattr(module, "__all__", ())}):
            kind = getattr(module, name)
            is_one = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
            if (
                is_one
                and kind not in seen
                and kind is not torch.optim.Optimizer
                and not name.startswith("_")
            ):
                seen.add(kind)
                yield library, name


class Net(nn.Module):
    """Rows that do not divide, fewer rows than ranks, vectors and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head, self.gain = nn.Linear(WIDTH, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch [n, WIDTH]."""
        return (self.head(self.second(self.first(x))) * self.gain).square().mean()


def net() -> Net:
    """Make the same net each time, in float64."""
    torch.manual_seed(0)
    return Net().double()


def made(library: str, name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with its own defaults, over what it takes of the model:
    matrices alone, or all."""
    kind: Any = getattr(importlib.import_module(LIBRARIES[library]), name)
    options = (
        {"lr": 1e-3}
        if inspect.signature(kind).parameters["lr"].default is inspect.Parameter.empty
        else {}
    )
    parameters = list(model.parameters())
    if (library, name) == ("torch", "Muon"):
        parameters = [parameter for parameter in parameters if parameter.ndim == 2]
    if (library, name) == ("torch-smp", "Muon"):
        from smp_core.optim import muon_groups

        return kind(muon_groups(model), ns_dtype=torch.float64)
    if (library, name) == ("torch-smp", "AdamW8bit"):
        options["min_8bit_size"] = 0  # the net is small
    return kind(parameters, **options)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int]
) -> int:
    """Take some steps with these ranks' batches.

    Returns:
        the collectives of the last step of the optimizer alone.
    """
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # type: ignore[attr-defined]
    counted = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            generator = torch.Generator().manual_seed(10 * step + rank)
            (
                model(torch.randn(3, WIDTH, generator=generator, dtype=torch.float64))
                / len(ranks)
            ).backward()
        torch.manual_seed(step)  # of optimizers that draw
        with CommDebugMode() as seen:
            optimizer.step()
        counted = seen.get_total_counts()
    return counted


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights, unsharded."""
    named = model.named_parameters()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in named
    }


# On a rank


def outcome(library: str, name: str, layout: str, mesh: Any) -> dict[str, Any]:
    """Try one optimizer. Collective.

    Returns:
        ``verdict``: "exact", "as unstable" (one process differs from itself as much
            when it adds up in another order),
        "differs", "refused" (when it was prepared), "fails" (in a step), or "not
        tried": one process cannot step it like this; and what there is to say about it.
    """
    from smp_core.config import SmpConfig
    from smp_core.entry import parallelize

    alone = net()
    before = whole(alone)
    try:
        train(alone, made(library, name, alone), range(WORLD))
    except Exception as error:
        return {"verdict": "not tried", "why": said(error)}
    expected = whole(alone)
    other = net()
    # Its sums in another order.
    train(other, made(library, name, other), [*reversed(range(WORLD))])
    in_another_order = whole(other)
    parallel = parallelize(
        net(), SmpConfig(units=["Sequential"], **LAYOUTS[layout]), mesh=mesh
    )
    began = time.monotonic()
    try:
        optimizer = made(library, name, parallel.module)
        parallel.prepare_optimizer(optimizer)
    except Exception as error:
        seconds = round(time.monotonic() - began, 2)
        return {
            "verdict": "refused",
            "why": said(error),
            "seconds": seconds,
            "by": type(error).__name__,
        }
    try:
        collectives = train(parallel.module, optimizer, [parallel.mesh.data_rank])
    except Exception as error:
        return {"verdict": "fails", "why": said(error)}
    seen = whole(parallel.module)
    moved = max((expected[key] - before[key]).abs().max().item() for key in expected)
    off = max((expected[key] - seen[key]).abs().max().item() for key in expected)
    noise = max(
        (expected[key] - in_another_order[key]).abs().max().item() for key in expected
    )
    verdict = (
        "exact" if off <= EXACT else "as unstable" if off <= 3 * noise else "differs"
    )
    return {
        "verdict": verdict,
        "off": off,
        "noise": noise,
        "moved": moved,
        "collectives": collectives,
    }


def said(error: Exception) -> str:
    """Return an error's first line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"


def on_rank(out: Path, todo: list[list[str]]) -> None:
    """Try optimizers one after the other; rank 0 writes a line for each."""
    from datetime import timedelta

    from smp_core.config import SmpConfig
    from smp_core.entry import build_mesh
    from smp_core.topology import Topology

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE / 2))
    meshes = {}
    for layout, knobs in LAYOUTS.items():
        meshes[layout], _ = build_mesh(SmpConfig(**knobs), Topology.discover(), "cpu")
    for library, name, layout in todo:
        line = {
            "library": library,
            "name": name,
            "layout": layout,
            **outcome(library, name, layout, meshes[layout]),
        }
        every: list[Any] = [None] * WORLD
        dist.all_gather_object(every, line["verdict"])
        if len(set(every)) > 1:
            line.update(verdict="fails", why=f"ranks differ: {every}")
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


# The driver


def try_all(todo: list[list[str]]) -> list[dict[str, Any]]:
    """Try optimizers in worlds of their own, a new one behind each that hangs or ends
    its ranks."""
    found: list[dict[str, Any]] = []
    while len(found) < len(todo):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "outcomes.jsonl"
            out.touch()
            run_world(out, todo[len(found) :])
            found += [json.loads(line) for line in out.read_text().splitlines()]
        if len(found) < len(todo):
            library, name, layout = todo[len(found)]
            why = "the ranks hang, or end"
            found.append(
                {
                    "library": library,
                    "name": name,
                    "layout": layout,
                    "verdict": "fails",
                    "why": why,
                }
            )
    return found


def run_world(out: Path, todo: list[list[str]]) -> None:
    """Run ranks until they end, or until nothing has come from them for too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(WORLD),
    }
    environment |= {
        "SMP_RANKS_PER_NODE": "2",
        "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(WORLD),
    }
    command = [sys.executable, __file__, "--rank", str(out), json.dumps(todo)]
    ranks = []
    for rank in range(WORLD):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            subprocess.Popen(
                command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )
    size, since = 0, time.monotonic()
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.2)
        if out.stat().st_size != size:
            size, since = out.stat().st_size, time.monotonic()
        # And the time to import and to meet.
        if time.monotonic() - since > PATIENCE + 30:
            break
    deadline = time.monotonic() + 10
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.send_signal(signal.SIGKILL)
            rank.wait()


def versions() -> dict[str, str]:
    """Return the versions of the libraries, or that they are not installed."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            found[library] = "not installed"
    return found


def trainer_names() -> dict[str, list[str]]:
    """Return (library, class) of each name that ``TrainingArguments(optim=...)`` takes
    and that can be made here."""
    from transformers import Trainer, TrainingArguments
    from transformers.training_args import OptimizerNames

    found = {}
    for name in OptimizerNames:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, optim=name.value, use_cpu=True
            )
            try:
                kind, _ = Trainer.get_optimizer_cls_and_kwargs(
                    arguments, nn.Linear(2, 2)
                )
            except (ImportError, ValueError):
                continue  # its library is not installed, or is for devices
        found[name.value] = [kind.__module__.split(".")[0], kind.__name__]
    return found


# The page


def table(result: dict[str, Any]) -> str:
    """Return the table of the page: a row for each optimizer."""
    by_kind: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        by_kind.setdefault((row["library"], row["name"]), {})[row["layout"]] = row
    lines = [
        '| library | optimizer | on shards | with `optimizer_shard="world"` |',
        "|---|---|---|---|",
    ]
    for (library, name), row in by_kind.items():
        if row["shards"]["verdict"] != "not tried":
            lines.append(
                f"| {library} | {name} | {cell(row['shards'])} | {cell(row['world'])} |"
            )
    left_out = sorted(
        name
        for (_, name), row in by_kind.items()
        if row["shards"]["verdict"] == "not tried"
    )
    lines += [
        "",
        f"Not tried: one process cannot step them by a plain `step()`, or so small: {', '.join(left_out)}.",
    ]
    lines += [
        "",
        "| `TrainingArguments(optim=...)` | is | on shards |",
        "|---|---|---|",
    ]
    for name, (library, kind) in result["trainer_names"].items():
        row = by_kind[library, kind]["shards"]
        shown = "refused" if library == "torchao" else cell(row)
        lines.append(f"| `{name}` | {library}'s {kind} | {shown} |")
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    """Return a verdict in words."""
    if row["verdict"] == "exact":
        return (
            "exact"
            if not row["collectives"]
            else f"exact, {row['collectives']} collectives a step"
        )
    if row["verdict"] == "as unstable":
        return "differs no more than one process that adds up in another order"
    if row["verdict"] == "differs":
        return (
            f"differs by {row['off'] / row['moved']:.0e} of the way that weights went"
        )
    return {"refused": "refused", "fails": "fails in its first step, on all ranks"}[
        row["verdict"]
    ]


def write_page(result: dict[str, Any]) -> None:
    """Put the table into the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(result)}\n{END}{rest.partition(END)[2]}")


def merged(
    earlier: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return earlier rows with those that were tried again in their places, and what is
    new behind its library's."""
    kept, library_places = list(earlier), list(LIBRARIES)
    for row in rows:
        same = [row["library"], row["name"], row["layout"]]
        kept = [
            each
            for each in kept
            if [each["library"], each["name"], each["layout"]] != same
        ]
    return sorted(
        [*kept, *rows],
        key=lambda row: (library_places.index(row["library"]), row["name"]),
    )


def main() -> None:
    """Try, or write the page of what was tried."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="classes or libraries; the others' rows stay",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--page", action="store_true", help="write the table of docs/optimizers.md"
    )
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        on_rank(Path(asked.rank[0]), json.loads(asked.rank[1]))
        return
    if not asked.page:
        tried = [
            kind
            for kind in kinds()
            if not asked.only or not {*kind}.isdisjoint(asked.only)
        ]
        rows = try_all([[*kind, layout] for kind in tried for layout in LAYOUTS])
        result = {
            "versions": versions(),
            "ranks": WORLD,
            "trainer_names": trainer_names(),
            "rows": rows,
        }
        if asked.only and asked.out.exists():
            earlier = json.loads(asked.out.read_text())
            result = {**earlier, "rows": merged(earlier["rows"], rows)}
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
        for row in rows:
            print(
                row["library"],
                row["name"],
                row["layout"],
                row["verdict"],
                row.get("why", row.get("off")),
            )
        return
    write_page(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
