"""Fp8Watch: the fit of some steps' numbers into FP8, per module, in a log that `smp
fp8-report` draws.

A probed step counts, for each converted weight's input and output gradient, the
elements beyond FP8's range (saturated) and those that became zero without having been
zero (flushed). Counting reads every tensor again, so only some steps are probed.
Weights are scaled by their present amax and never saturate; the log has their scales.
"""

from __future__ import annotations

import fnmatch
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from smp_core.fp8.convert import Fp8Model
from smp_core.fp8.scaling import ROLES, WEIGHT
from smp_core.outside import (
    console,
    matplotlibs_figure,
    number,
    numbers,
    printable,
    records_of_log,
    write_new,
)
from smp_core.run_log import write as run_log


class Fp8Probe:
    """A counter of one step at a time.

    Args:
        fp8: the converted model.
        all_reduce_sum: adds a tensor up over all ranks, in place; default one process.
    """

    def __init__(
        self,
        fp8: Fp8Model,
        all_reduce_sum: Callable[[torch.Tensor], Any] = lambda _: None,
    ) -> None:
        self._fp8, self._all_reduce_sum = fp8, all_reduce_sum

    @property
    def is_counting(self) -> bool:
        return self._fp8.state.counts is not None

    def begin(self) -> None:
        """Begin to count, until :meth:`end`."""
        # The state counts as long as it has a tensor to count into.
        state = self._fp8.state
        state.counts = torch.zeros(
            len(state.names), 3, 3, device=state.device, dtype=torch.float64
        )

    @torch.no_grad()
    def end(self) -> dict[str, dict[str, float]]:
        """Stop counting. Collective.

        Returns:
            figures by site name: ``input_saturated``, ``input_flushed``,
                ``gradient_saturated``, ``gradient_flushed``
            (shares of all elements in [0, 1]) and ``input_scale``, ``weight_scale``,
            ``gradient_scale``.
        """
        state = self._fp8.state
        counts, state.counts = state.counts, None
        assert counts is not None, "begin() was not called"
        # Counts of ranks add up; scales are the same on all of them.
        self._all_reduce_sum(counts)
        shares = (counts[..., :2] / counts[..., 2:].clamp(min=1)).tolist()
        scales = state.scale.tolist()
        found: dict[str, dict[str, float]] = {}
        for name, share, scale in zip(state.names, shares, scales, strict=True):
            found[name] = {f"{role}_scale": scale[r] for r, role in enumerate(ROLES)}
            for r, role in enumerate(ROLES):
                if r != WEIGHT:
                    found[name] |= {
                        f"{role}_saturated": share[r][0],
                        f"{role}_flushed": share[r][1],
                    }
        return self._fp8.of_all_stages(found)


class Fp8Watch:
    """A probe of a step every so often, and its log; the core of both faces' FP8
    monitors.

    Args:
        monitor: the name of the face's monitor, for messages.
        every_n_steps: optimizer steps from one probe to the next, >= 1.
        path: the log; default ``fp8.jsonl`` in the folder that :meth:`start` is given.
        modules: globs over module names whose figures :meth:`step_ends` returns; the
            log gets all.

    Raises:
        ValueError: ``every_n_steps`` below 1.
    """

    def __init__(
        self,
        monitor: str,
        every_n_steps: int,
        path: str | Path | None,
        modules: Sequence[str],
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(
                f"{monitor}: every_n_steps={every_n_steps} is not allowed; allowed: 1 and more"
            )
        self.monitor, self.every_n_steps, self.modules = (
            monitor,
            every_n_steps,
            tuple(modules),
        )
        self.path = None if path is None else Path(path)
        self._probe: Fp8Probe | None = None
        self._began = 0

    def start(self, fp8: Fp8Model | None, folder: str | Path, instead: str) -> None:
        """Watch ``fp8`` from now on. Collective over pipeline stages.

        Args:
            instead: the text to write where there is no FP8, for the message.

        Raises:
            ValueError: the run computes without FP8, or in another library's layers, or
                a glob of ``modules`` matches none.
        """
        if fp8 is None:
            raise ValueError(
                f"{self.monitor}: this run computes without FP8 (or not with backend='native'); write {instead}, or "
                f"leave {self.monitor} out"
            )
        names = list(fp8.of_all_stages(dict.fromkeys(fp8.state.names)))
        for glob in self.modules:
            if not fnmatch.filter(names, glob):
                raise ValueError(
                    f"{self.monitor}: modules={glob!r} matches no FP8 layer; there are for example "
                    f"{', '.join(names[:3])}"
                )
        # All ranks with the same sites add up; other stages have theirs.
        together = dist.is_initialized() and dist.get_world_size() > 1
        over_ranks = functools.partial(dist.all_reduce, group=fp8.group)
        self._probe = Fp8Probe(fp8, over_ranks if together else lambda _: None)
        if self.path is None:
            self.path = Path(folder) / "fp8.jsonl"

    def step_begins(self, step: int) -> None:
        """Begin a probe if one is due. Call it before a batch, with the number of
        optimizer steps done."""
        assert self._probe is not None
        # An accumulation window has several batches, and is one step.
        if not self._probe.is_counting and step % self.every_n_steps == 0:
            self._probe.begin()
            self._began = step

    def step_ends(self, step: int, *, writes: bool) -> dict[str, float]:
        """End a probe if its step has ended. Call it after a batch, with the number of
        optimizer steps done.

        Collective where a probed step has ended.

        Args:
            writes: whether this rank writes the log.

        Returns:
            ``fp8/<module>/<figure>`` of the chosen modules; empty where no probed step
            has ended.
        """
        assert self._probe is not None and self.path is not None
        if not self._probe.is_counting or step == self._began:
            return {}  # or inside an accumulation window
        figures = self._probe.end()
        if writes:
            append_to_log(self.path, step, figures)
            run_log.note("fp8", step=step, modules=figures)
        shown: dict[str, float] = {}
        for name, values in figures.items():
            if any(fnmatch.fnmatchcase(name, glob) for glob in self.modules):
                shown |= {
                    f"fp8/{name}/{figure}": value for figure, value in values.items()
                }
        return shown


def append_to_log(path: Path, step: int, figures: dict[str, dict[str, float]]) -> None:
    """Append one JSON line for a probed step."""
    run_log.append(path, "fp8", step=step, modules=figures)


_ROWS = {
    "input": ("input_scale", "input_saturated", "input_flushed"),
    "gradient": ("gradient_scale", "gradient_saturated", "gradient_flushed"),
}
_FIGURES = (*_ROWS["input"], "weight_scale", *_ROWS["gradient"])
_DRAWN, _POINTS = 100, 2000  # modules, and steps of each


@dataclass(frozen=True)
class Fp8Log:
    """The content of a log: steps, and per figure and module a value for each of them
    (nan where there is none)."""

    steps: list[int]
    figures: dict[str, dict[str, list[float]]]

    @classmethod
    def read(cls, path: Path) -> Fp8Log:
        """Read a log; of a step that was logged twice (by a resumed run) the later line
        counts.

        Raises:
            ValueError: no such file, no log, or an empty one.
        """
        records = dict(records_of_log(path, _of_line, "Fp8Monitor's log"))
        if not records:
            raise ValueError(
                f"{path} holds no step that was probed; Fp8Monitor writes such a log"
            )
        steps = sorted(records)
        figures: dict[str, dict[str, list[float]]] = {}
        for name in dict.fromkeys(name for step in steps for name in records[step]):
            # Modules and figures may be missing in some steps: nan stands there.
            for figure in dict.fromkeys(
                f for step in steps for f in records[step].get(name, {})
            ):
                values = [
                    records[step].get(name, {}).get(figure, float("nan"))
                    for step in steps
                ]
                figures.setdefault(figure, {})[name] = values
        return cls(steps, figures)

    def worst(self, figure: str, count: int = 5) -> list[tuple[str, float]]:
        """List the modules with the largest values of a figure in any step."""
        largest = {
            name: max(values) for name, values in self.figures.get(figure, {}).items()
        }
        return sorted(largest.items(), key=lambda pair: -pair[1])[:count]


def _of_line(line: Mapping[str, Any]) -> tuple[int, dict[str, dict[str, float]]] | None:
    step, modules = number(line.get("step")), line.get("modules")
    if step is None or not isinstance(modules, Mapping):
        return None
    return int(step), {
        printable(str(name)): _figures(values) for name, values in modules.items()
    }


def _figures(values: Any) -> dict[str, float]:
    found = numbers(values)
    return {figure: found[figure] for figure in _FIGURES if figure in found}


def draw(log: Fp8Log, path: Path) -> None:
    """Draw scales and rates over steps, a line per module, as PNG (or in the format of
    the suffix).

    Where there are more modules than lines can be told apart, those that saturate or
    flush most.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (the extra ``plot``).
    """
    # As many lines as can be told apart, and as many points as are seen.
    modules = _worst_modules(log)
    every = -(-len(log.steps) // _POINTS)
    figure = matplotlibs_figure()(figsize=(15, 7), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True)
    for axes, (role, names) in zip(grid, _ROWS.items(), strict=True):
        for axis, name in zip(axes, names, strict=True):
            by_module = log.figures.get(name, {})
            for module in (module for module in modules if module in by_module):
                axis.plot(
                    log.steps[::every],
                    by_module[module][::every],
                    linewidth=0.8,
                    label=module,
                )
            axis.set_title(f"{role}: {name.removeprefix(role + '_')}")
            if name.endswith("scale"):
                axis.set_yscale("log", base=2)
            else:
                axis.set_ylim(bottom=0)
    for axis in grid[-1]:
        axis.set_xlabel("optimizer step")
    if len(modules) <= 16:
        figure.legend(
            *grid[0][0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=4,
            fontsize="small",
        )
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix(".") or "png", dpi=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_new(path, content.getvalue())


def _worst_modules(log: Fp8Log) -> list[str]:
    """List the modules that are drawn, in the model's order."""
    names = list(
        dict.fromkeys(name for by_module in log.figures.values() for name in by_module)
    )
    if len(names) <= _DRAWN:
        return names
    # Of figures about fit the worst modules each, in the model's order.
    shares = {
        figure
        for figures in _ROWS.values()
        for figure in figures
        if not figure.endswith("scale")
    }
    worst = {
        name
        for figure in shares
        for name, _ in log.worst(figure, _DRAWN // len(shares))
    }
    return [name for name in names if name in worst]


def fp8_report(
    log: Annotated[Path, typer.Argument(help="the file Fp8Monitor writes: fp8.jsonl")],
    out: Annotated[
        Path | None, typer.Option(help="the picture; default: the log's name with .png")
    ] = None,
) -> None:
    """Draw scales, saturation and underflow over training, and list the modules that
    fit FP8 worst."""
    found = Fp8Log.read(log)
    table = Table(
        title=f"{len(found.steps)} probed steps, {found.steps[0]} to {found.steps[-1]}: worst modules"
    )
    for column in ("share of elements", "module", "largest in any step"):
        table.add_column(column)
    for role in ("input", "gradient"):
        for kind in ("saturated", "flushed"):
            for module, value in found.worst(f"{role}_{kind}", 3):
                table.add_row(f"{role} {kind}", module, f"{value:.3%}")
    console().print(table)
    picture = out or log.with_suffix(".png")
    draw(found, picture)
    console().print(f"{picture}", soft_wrap=True)
