"""The verdict: a run's log in sentences, with what the model of links predicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from smp_core.cluster import rounds
from smp_core.observe import PARTS
from smp_core.outside import number, numbers
from smp_core.run_log import Run, objects, texts

STALLS = {
    "seconds_save_before": "for the save before",
    "seconds_copying": "copying",
    "seconds_agreeing": "agreeing that a save had ended",
}
"""What a save behind training kept it waiting for, by the names of the log."""


def verdict(run: Run) -> list[str]:
    """Return sentences about a run, the most general first."""
    # Numbers alone: their steps do not matter here.
    figures = {}
    for name, points in run.figures.items():
        figures[name] = [value for _, value in points]
    found = [_end(run), *_loss(run, figures), *_step(figures), *_straggler(figures)]
    return [*found, *_links(run, figures), *_saves(run), *_memory(run)]


def _end(run: Run) -> str:
    resumed = f", resumed {run.starts - 1} times" if run.starts > 1 else ""
    if run.end is None:
        last = max(run.steps, default=0)
        return f"The log has no end: the run goes on, or was killed. Last report: step {last:,}{resumed}."
    # Any other word is the error that ended it.
    how = run.end.get("how")
    said = "was completed" if how == "completed" else f"ended with {how}"
    return f"The run {said} after {int(number(run.end.get('step')) or 0):,} optimizer steps{resumed}."


def _loss(run: Run, figures: Mapping[str, list[float]]) -> list[str]:
    # nan and inf are null in a log.
    bad = [
        step
        for step, line in run.steps.items()
        if "loss" in line and number(line["loss"]) is None
    ]
    found = (
        [f"The loss was inf or nan in {len(bad)} reports, first at step {bad[0]:,}."]
        if bad
        else []
    )
    if len(losses := figures.get("loss", [])) > 1:
        found.append(
            f"Loss: {losses[0]:.4g} in the first report, {losses[-1]:.4g} in the last."
        )
    return found


def _step(figures: Mapping[str, list[float]]) -> list[str]:
    if "seconds_step" not in figures:
        return []
    # The median: a step in which something else happened does not count.
    step = statistics.median(figures["seconds_step"])
    waiting = "seconds_waiting"
    shares = []
    for name in (*(f"seconds_{part}" for part in PARTS), waiting):
        if name in figures and step > 0:
            what = (
                "waiting for other ranks"
                if name == waiting
                else name.removeprefix("seconds_")
            )
            shares.append(f"{what} {statistics.median(figures[name]) / step:.0%}")
    parts = f": {', '.join(shares)}" if shares else ""
    return [f"A step takes {step:.3g} s (median of the reports){parts}."]


def _straggler(figures: Mapping[str, list[float]]) -> list[str]:
    named = figures.get("straggler_rank", [])
    reports = len(figures.get("seconds_step", named))
    # The rank that was named most often, and in how many reports.
    if not named:
        return []
    rank = statistics.mode(named)
    return [
        f"The others waited for rank {rank:.0f} in {named.count(rank)} of {reports} reports."
    ]


def _links(run: Run, figures: Mapping[str, list[float]]) -> list[str]:
    """Predict what the link between nodes takes of a step, and what compressing would
    save."""
    sent, nodes = numbers(run.last("sent")), len(texts(run.asked.get("nodes")))
    if nodes < 2 or not sent.get("inter_bytes"):
        return []
    # Without a measurement nothing can be predicted.
    links = run.asked.get("links")
    inter = links.get("inter") if isinstance(links, Mapping) else None
    if not isinstance(inter, Mapping) or "seconds_step" not in figures:
        return [
            f"Rank 0 sent {sent['inter_bytes'] / 1e6:.3g} MB to other nodes in the last step. How long that takes is "
            "predicted where the links were measured (SMP_LINKS)."
        ]
    step = statistics.median(figures["seconds_step"])
    if step <= 0:
        return []
    # By the same model of links that planning uses.
    seconds = {kind: _seconds(kind, sent, inter, nodes) for kind in inter}
    share = sum(seconds.values()) / step
    found = [
        f"By measured latency and bandwidth the link between nodes is busy for {share:.0%} of a step "
        f"({links.get('measured_with') or 'SMP_LINKS'})."  # type: ignore[union-attr]
    ]
    # What runs behind the computation saves nothing, so no more than what was waited.
    waited = (
        statistics.median(figures["seconds_waiting"])
        if "seconds_waiting" in figures
        else step
    )
    # Each knob that would send less, with the share of bytes that is left.
    for each in objects(run.asked.get("savings")):
        left = number(each.get("share"))
        kinds = [kind for kind in texts(each.get("kinds")) if kind in inter]
        if left is None or not kinds:
            continue
        fewer = sum(
            (1 - left) * _seconds(kind, sent, inter, nodes, latency=False)
            for kind in kinds
        )
        if fewer > 0:
            saved = min(fewer, waited) / step
            found.append(
                f"{each.get('knob')} would save up to {saved:.0%} of a step, predicted from its bytes."
            )
    return found


def _seconds(
    kind: str,
    sent: Mapping[str, float],
    inter: Mapping[str, Any],
    nodes: int,
    latency: bool = True,
) -> float:
    """Return the seconds of a step's collectives of one kind between nodes, by the
    model of :mod:`smp_core.cluster.links`."""
    fit = numbers(inter[kind])
    n_bytes = sent.get(f"{kind}/inter_bytes", 0.0)
    calls = sent.get(f"{kind}/calls", 0.0)
    # A kind that sent nothing, or has no fit, takes no time.
    if not n_bytes or not fit.get("bandwidth"):
        return 0.0
    # Each call waits for the latency of its rounds, however few bytes it sends.
    waits = (
        calls
        * rounds("all_reduce" if kind == "all_reduce" else "all_gather", nodes)
        * fit.get("latency", 0.0)
    )
    return n_bytes / fit["bandwidth"] + (waits if latency else 0.0)


def _saves(run: Run) -> list[str]:
    stalls = [
        stall
        for line in run.checkpoints
        if (stall := number(line.get("stall_seconds"))) is not None
    ]
    if not stalls:
        return []
    total, seconds = sum(stalls), run.seconds
    share = f", {total / seconds:.1%} of the run" if seconds > 0 else ""
    # What was waited for, where the log knows it.
    causes = []
    for name, words in STALLS.items():
        spent = sum(number(line.get(name)) or 0.0 for line in run.checkpoints)
        if spent:
            causes.append(f"{spent:.3g} s {words}")
    by_cause = f": {', '.join(causes)}" if causes else ""
    return [
        f"{len(stalls)} saves kept training waiting for {total:.3g} s in all{share}{by_cause}."
    ]


def _memory(run: Run) -> list[str]:
    planned = numbers(run.asked.get("planned_memory"))
    if not run.memory or not planned:
        # Only where both the plan and a measurement are known.
        return []
    peak = max(
        (numbers(line.get("device")) for line in run.memory.values()),
        key=lambda kinds: sum(kinds.values()),
    )
    # The same kinds on both sides.
    states = sum(peak.get(kind, 0.0) for kind in planned)
    return [
        f"Of what the plan counts (parameters, gathered units, gradients, optimizer states) the highest peak had "
        f"{states / 2**30:.3g} GiB, planned were {sum(planned.values()) / 2**30:.3g} GiB."
    ]
