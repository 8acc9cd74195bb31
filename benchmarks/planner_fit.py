"""Fits of the time model's constants on measured steps, judged on model sizes that were
held out of the fit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smp_core.plan.shapes import GIB
from smp_core.planner.devices import Device
from smp_core.planner.fitted import FITTED, Fitted
from smp_core.planner.hardware import Hardware

Row = dict[str, Any]
Constants = dict[str, float]

EMPTYING = "emptying"
"""Seconds in which a GiB is freed and taken again where an allocator runs full
(:func:`refilled`): of the programs that were measured, and not of plans. No figure is
published that a fit could start from, so that it is not drawn back to its start."""

RANGES = {
    "launching": (1e-4, 3e-3),
    "moving": (0.01, 50.0),
    "falls": (0.01, 2.0),
    EMPTYING: (1e-3, 1.0),
}
"""The least and the most that a constant can be; all others are shares from 0.01 to
1."""

GENERATIONS = {"A100": "Ampere", "H100": "Hopper", "H200": "Hopper"}
"""Devices of one generation share their constants, as in "products_Hopper"."""

LARGEST_FACTOR, LEAST_FACTOR = 1.5, 1.01
"""The fit multiplies and divides a constant by factors that shrink from the one to the
other."""

DRAWN_BACK = 0.01
"""How much a constant is drawn to where it starts, times log(constant / start) squared:
one that the rows do not identify stays there, and one that they do hardly feels it."""

NEAR = 0.05
"""Errors below it count by about their square. The fit changes one constant at a time,
and where the loss has an edge, which mean sizes of errors have where a row is exact, no
single one makes it less."""


@dataclass
class Case:
    """A measured step, and a function that predicts it.

    Attributes:
        row: the published row.
        size: of the model; rows of one size are held out together.
        measured: seconds.
        predict: constants -> seconds.
        group: of rows whose mean error is told apart.
        kind: of rows whose mean signed error is told apart, where all programs are
            fitted together.
        used: the planned peak of memory as a share of the device's.
        weight: of the row in a fit.
    """

    row: Row
    size: str
    measured: float
    predict: Callable[[Constants], float]
    group: str = ""
    kind: str = ""
    used: float | None = None
    weight: float = 1.0

    @property
    def work(self) -> tuple[str, ...]:
        """Return what a step did and on how many devices."""
        return tuple(
            self.row.get(name, "")
            for name in ("gpu", "gpus", "global_batch", "sequence")
        )


def fitted_of(constants: Mapping[str, float], device: str) -> Fitted:
    """Return the planner's constants with those of one device, or of its generation, in
    their places."""
    found: dict[str, Any] = {}
    for name, value in constants.items():
        kind, _, of = name.partition("_")
        if name == EMPTYING:
            continue
        if not of:
            found[name] = value
        elif of in (device, GENERATIONS.get(device)):
            found[kind] = {"": value}
    return replace(FITTED, **found)


def remembered(
    predict: Callable[[Constants], float], hardware: Hardware
) -> Callable[[Constants], float]:
    """Return the same function, which computes once for the constants of this hardware:
    a fit changes one at a time, mostly of other machines."""
    device, seconds = hardware.device.name, dict[tuple[float, ...], float]()
    unused = {EMPTYING} if hardware.first_efa else {EMPTYING, "falls"}

    def remember(constants: Constants) -> float:
        own = []
        for name, value in constants.items():
            of = name.partition("_")[2]
            if of in ("", device, GENERATIONS.get(device)) and name not in unused:
                own.append(value)
        key = tuple(own)
        if key not in seconds:
            seconds[key] = predict(constants)
        return seconds[key]

    return remember


def refilled(held: float, others: float, groups: int, device: Device) -> float:
    """Return the GiB that an allocator frees and takes again in one pass through the
    blocks (forward, backward, or computing again); 0 where all of it fits.

    Until 2.7 torch marked what a collective reads (`record_stream`), which is free
    again when the device has passed it. The host runs ahead, by a whole pass of
    forward. Where that does not fit, the allocator gives all that it has back and takes
    it again, as pytorch/pytorch#76861 reports of "models with various types of model
    parallelism"; since #148590 nothing is marked.

    Args:
        held: bytes that collectives of tensor ranks read in a forward pass.
        others: bytes of all else at its end.
        groups: of several ranks, each of which has a communicator.
    """
    taken = FITTED.context_gib + groups * FITTED.communicator_gib
    fits = (held + others) / GIB + taken <= device.memory_gib
    return 0.0 if fits else held / GIB


def errors_of(cases: Sequence[Case], constants: Constants) -> list[float]:
    """Return how far predictions are off, as shares of the measured seconds."""
    return [case.predict(constants) / case.measured - 1 for case in cases]


def mape(errors: Sequence[float]) -> float:
    """Return the mean absolute error."""
    return statistics.fmean(map(abs, errors)) if errors else math.nan


def loss_of(cases: Sequence[Case], constants: Constants, near: float = NEAR) -> float:
    """Return the mean size of log(predicted / measured), with its edge at 0 rounded
    where it is below ``near``, by the weights of rows."""
    errors = []
    for case in cases:
        off = math.log(case.predict(constants) / case.measured)
        errors.append(case.weight * (math.hypot(off, near) - near))
    return sum(errors) / sum(case.weight for case in cases)


def fit(cases: Sequence[Case], start: Constants, near: float = NEAR) -> Constants:
    """Find the constants of the least :func:`loss_of`, drawn back to where they start.

    One constant after the other is multiplied and divided by a factor. The factor
    shrinks when no constant gets better. The same cases give the same constants.
    """

    def loss(constants: Constants) -> float:
        far = sum(
            math.log(value / start[name]) ** 2
            for name, value in constants.items()
            if name != EMPTYING
        )
        return loss_of(cases, constants, near) + DRAWN_BACK * far

    best, least = dict(start), loss(start)
    factor = LARGEST_FACTOR
    while factor > LEAST_FACTOR:
        has_improved = False
        for name in start:
            lowest, highest = RANGES.get(name, (0.01, 1.0))
            for value in (best[name] * factor, best[name] / factor):
                if not lowest <= value <= highest:
                    continue
                tried = {**best, name: value}
                found = loss(tried)
                if found < least - 1e-9:
                    best, least, has_improved = tried, found, True
        if not has_improved:
            factor = math.sqrt(factor)
    return best


def held_out(cases: Sequence[Case], start: Constants) -> dict[str, Any]:
    """Fit on all sizes but one and judge that one, for each; then fit on all. The loss
    is the mean size of errors itself.

    Returns:
        errors of sizes, groups and rows, none of which the constants that judged them
        had seen; and the constants that were fitted on all rows.
    """
    judged: dict[str, Any] = {}
    errors: list[tuple[Case, float]] = []
    for size in sorted({case.size for case in cases}):
        print(f"held out: {size}", flush=True)
        own = [case for case in cases if case.size == size]
        constants = fit([case for case in cases if case.size != size], start, near=0.0)
        found = errors_of(own, constants)
        errors += list(zip(own, found, strict=True))
        judged[size] = {
            "rows": len(own),
            "mape": mape(found),
            "worst": max(found, key=abs),
            "constants": constants,
        }
        # Rows to choose among: one model, one batch, one cluster.
        if len({case.work for case in own}) == 1:
            judged[size]["top_1_regret"] = regret(own, constants)
    by_group = {}
    for group in sorted({case.group for case in cases if case.group}):
        by_group[group] = mape([error for case, error in errors if case.group == group])
    rows = []
    for case, error in errors:
        rows.append(
            {
                **case.row,
                "measured_s": case.measured,
                "held_out_error": error,
                "memory": case.used,
            }
        )
    on_all = fit(cases, start, near=0.0)
    return {
        "held_out_by_size": judged,
        "held_out_mape": mape([error for _, error in errors]),
        "held_out_mape_by_group": by_group,
        "fitted_on_all": on_all,
        "fitted_on_all_mape": mape(errors_of(cases, on_all)),
        "rows": rows,
    }


def without_each(
    programs: Mapping[str, Sequence[Case]], start: Constants
) -> dict[str, Any]:
    """Fit one set of constants on all programs, of equal weights, and on all but each
    one, which is judged.

    Returns:
        of each program the errors when it is in the fit and when it is left out, and
        what was fitted then; the constants that were fitted on all; and by how much the
        loss grows when one of these is a fifth less, or more.
    """
    for cases in programs.values():
        for case in cases:
            case.weight = 1 / len(cases)
    together = [case for cases in programs.values() for case in cases]
    on_all = fit(together, start)
    judged: dict[str, Any] = {}
    for name, own in programs.items():
        print(f"left out: {name}", flush=True)
        others = [
            case for other, cases in programs.items() if other != name for case in cases
        ]
        constants = fit(others, start)
        inside, outside = errors_of(own, on_all), errors_of(own, constants)
        judged[name] = {
            "rows": len(own),
            "mape": mape(inside),
            "worst": max(inside, key=abs),
            "left_out_mape": mape(outside),
            "left_out_worst": max(outside, key=abs),
            "left_out_constants": constants,
            "errors": inside,
            "by_kind": by_kind([case.kind for case in own], inside),
        }
        memory = [case.used for case in own if case.used is not None]
        if memory and name != "llm_foundry":  # whose memory was not measured
            judged[name]["memory_mape"] = mape(memory)
        if len({case.work for case in own}) == 1:
            judged[name]["regret"] = regret(own, constants)
    least = loss_of(together, on_all)
    grows = {}
    for name, value in on_all.items():
        tried = [
            loss_of(together, {**on_all, name: value * factor}) / least - 1
            for factor in (1 / 1.2, 1.2)
        ]
        grows[name] = {"less": tried[0], "more": tried[1]}
    return {
        "programs": judged,
        "fitted_on_all": on_all,
        "loss": least,
        "loss_grows": grows,
    }


def by_kind(
    kinds: Sequence[str], errors: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Return the mean signed error of the rows of each kind that has a name."""
    found = {}
    for kind in sorted(set(kinds) - {""}):
        own = [error for each, error in zip(kinds, errors, strict=True) if each == kind]
        found[kind] = {"rows": len(own), "mean": statistics.fmean(own)}
    return found


def regret(cases: Sequence[Case], constants: Constants) -> float:
    """Return how much slower the row that the model would pick is than the fastest."""
    picked = min(cases, key=lambda case: case.predict(constants))
    return picked.measured / min(case.measured for case in cases) - 1
