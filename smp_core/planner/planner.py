"""plan(): one call from a model, machines and a batch to a configuration, with its
reasons."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from smp_core.config import SmpConfig
from smp_core.plan import GIB
from smp_core.planner.candidate import Candidate
from smp_core.planner.expert_bytes import expert_degree
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_source import ADAPTERS
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.search import (
    OBJECTIVES,
    Fixed,
    Found,
    Objective,
    read_fixed,
    search,
    simplest,
)
from smp_core.planner.search_space import require_degrees, require_fp8_products
from smp_core.planner.stage_time import step_model
from smp_core.planner.time import TIME_PARTS
from smp_core.planner.trace import trace
from smp_core.planner.workload import Workload

ALTERNATIVES = 5
_MOST_NODES = 4096
_RANK = 16  # of adapters that are offered
_SHARES = tuple(percent / 100 for percent in range(10, 100, 5))
_RATE_BETWEEN_NODES = 400.0  # of a cluster of one node, whose string needs none


class NothingFits(ValueError):
    """No configuration fits the devices.

    Attributes:
        changes: what would fit, as (what to change, the configuration that fits then);
            each was looked at.
    """

    def __init__(self, message: str, changes: list[tuple[str, Candidate]]) -> None:
        super().__init__(message)
        self.changes = changes


@dataclass(frozen=True)
class Flip:
    """A share of a rate at which another configuration would be picked.

    Attributes:
        rate: as :meth:`smp_core.planner.fitted.Fitted.share_of` names it; ``what``: in
            words.
        now: the share that is assumed.
    """

    rate: str
    what: str
    now: float
    share: float
    pick: Candidate

    @property
    def words(self) -> str:
        return f"{self.what} at {self.share:.0%} of their rate, not {self.now:.0%}: {layout_words(self.pick)}"


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The configuration that was chosen, and what it was chosen from.

    Attributes:
        model: as it was asked for.
        fixed: knobs that were given, and are as they were given.
    """

    model: str
    trace: ModelTrace
    hardware: Hardware
    workload: Workload
    fixed: Mapping[str, Any]
    objective: Objective
    found: Found

    @property
    def chosen(self) -> Candidate:
        return self.found.ranked[0]

    @property
    def config(self) -> SmpConfig:
        """Return the knobs, as SmpConfig.from_yaml and both faces take them."""
        return self.chosen.asked

    @cached_property
    def alternatives(self) -> list[Candidate]:
        """Return the next best, each with other degrees or another recomputation than
        those before it."""
        seen, others = {_outline(self.chosen)}, []
        for candidate in self.found.ranked[1:]:
            if _outline(candidate) not in seen:
                seen.add(_outline(candidate))
                others.append(candidate)
        return others[:ALTERNATIVES]

    def why_not(self, **knobs: Any) -> str:
        """Return why these knobs were not chosen: what refuses them, what does not fit,
        or what it would cost.

        Args:
            knobs: as `fixed` of :func:`plan`; the others are chosen anew.
        """
        # The whole search again with these knobs fixed as well: the others may be
        # chosen otherwise then.
        said = ", ".join(f"{knob}={value}" for knob, value in knobs.items())
        try:
            given = {**self.fixed, **read_fixed(knobs)}
            found = search(
                self.trace, self.hardware, self.workload, given, self.objective
            )
        except ValueError as error:
            return f"{said}: {error}"
        return f"{said}: {_compared(found.ranked[0], self.chosen) if found.ranked else found.shortfall}"

    def flips(self) -> list[Flip]:
        """Return what would change the pick: of each assumed rate the nearest shares,
        below and above, at which other axes, or partition groups of one node or of
        several, win among what is shown and the fastest of each spread."""
        # All of them are timed again for each share; the search itself is not repeated,
        # so that other configurations may be better still.
        fastest = {each.spread: each for each in reversed(self.found.ranked)}
        among = list(
            {
                id(each): each
                for each in (self.chosen, *self.alternatives, *fastest.values())
            }.values()
        )
        found = []
        for rate, words in self._rates().items():
            now = self.hardware.fitted.share_of(rate, self.hardware.device.name)
            falling = [share for share in reversed(_SHARES) if share < now]
            rising = [share for share in _SHARES if share > now]
            # The nearest share in both directions from the assumed one.
            for shares in (falling, rising):
                picks = (
                    Flip(rate, words, now, share, self._pick(among, rate, share))
                    for share in shares
                )
                other = next(
                    (each for each in picks if each.pick.kind != self.chosen.kind), None
                )
                found += [] if other is None else [other]
        return found

    def _rates(self) -> dict[str, str]:
        """Return the rates that are assumed, and their words."""
        # Measured links are no assumption, and links that machines do not have decide
        # nothing.
        rates = {"products": "matrix products"}
        if self.hardware.measured is None and self.hardware.ranks_per_node > 1:
            rates["link"] = "links inside nodes"
        if self.hardware.measured is None and self.hardware.nodes > 1:
            rates["network"] = "links between nodes"
        return rates

    def _pick(self, among: Sequence[Candidate], rate: str, share: float) -> Candidate:
        fitted = self.hardware.fitted.with_share(rate, self.hardware.device.name, share)
        hardware, timed = replace(self.hardware, fitted=fitted), []
        for each in among:
            model = step_model(each.plan, self.trace, hardware, self.workload.sequence)
            timed.append(replace(each, time=model.step(each.micro_batch, each.count)))
        return simplest(sorted(timed, key=lambda each: each.time.total))

    def days(self, candidate: Candidate | None = None) -> float | None:
        """Return the days of the whole training; None where its tokens are not
        known."""
        tokens = self.workload.tokens
        return (
            None
            if tokens is None
            else tokens / (candidate or self.chosen).tokens_per_second / 86400
        )

    def cost(self, candidate: Candidate | None = None) -> float | None:
        """Return the price of the whole training; None where tokens or price are not
        known."""
        days, price = self.days(candidate), self.hardware.price
        return (
            None
            if days is None or price is None
            else days * 24 * price * self.hardware.nodes
        )

    def front(self) -> list[Recommendation]:
        """Return the plans for half as many nodes, a quarter and so on as long as one
        fits, the most nodes first."""
        plans: list[Recommendation] = []
        smaller: Recommendation | None = self
        while smaller is not None:
            plans.append(smaller)
            # Measured links are of the number of nodes that they were measured on.
            nodes, is_odd = divmod(smaller.hardware.nodes, 2)
            smaller = (
                None if is_odd or self.hardware.measured is not None else self.on(nodes)
            )
        return plans

    def on(self, nodes: int) -> Recommendation | None:
        """Return the plan for another number of nodes; None: nothing fits, or the batch
        does not divide."""
        # A single node has no rate between nodes; one has to be assumed for several.
        hardware = replace(
            self.hardware, nodes=nodes, gbit=self.hardware.gbit or _RATE_BETWEEN_NODES
        )
        try:
            found = search(
                self.trace, hardware, self.workload, self.fixed, self.objective
            )
        except ValueError:
            return None
        return replace(self, hardware=hardware, found=found) if found.ranked else None


def within(
    found: Recommendation, days: float | None, budget: float | None
) -> Recommendation:
    """Return the plan for the fewest nodes (half as many, or twice, and so on) that
    trains in so many days for so much.

    Raises:
        ValueError: tokens or the price are not known, or no number of nodes does; says
            how near it comes.
    """
    require_limits(found.workload, found.hardware, days, budget)

    def suits(each: Recommendation) -> bool:
        of_all, cost = each.days(), each.cost()
        assert of_all is not None
        return (days is None or of_all <= days) and (
            budget is None or cost is None or cost <= budget
        )

    # Fewer nodes as long as a plan fits; more as long as that is faster.
    tried = found.front()
    while (
        days is not None
        and not suits(tried[0])
        and tried[0].hardware.nodes * 2 <= _MOST_NODES
    ):
        more = found.on(tried[0].hardware.nodes * 2)
        if more is None or more.chosen.time.total >= tried[0].chosen.time.total:
            break
        tried.insert(0, more)
    enough = [each for each in tried if suits(each)]
    if not enough:
        each = min(tried, key=lambda each: each.chosen.time.total)
        cost = "" if each.cost() is None else f", for {each.cost():,.0f}"
        raise ValueError(
            f"no number of nodes trains as asked: {each.hardware.nodes} take {each.days():.3g} days{cost}; write more "
            "days, a larger budget, or a larger global batch, which more ranks divide"
        )
    return min(enough, key=lambda each: each.hardware.nodes)


def require_limits(
    workload: Workload, hardware: Hardware, days: float | None, budget: float | None
) -> None:
    """Refuse days and a budget that no plan can be held against."""
    for name, value in (("days", days), ("budget", budget)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(
                f"{name}={value:g} of the training is not a number above 0"
            )
    if (days is not None or budget is not None) and workload.tokens is None:
        raise ValueError(
            "days and a budget are of a whole training: write its tokens, as --tokens 2e12"
        )
    if budget is not None and hardware.price is None:
        raise ValueError(
            "a budget needs the price of a node for an hour: write --price 98"
        )


def plan(
    model: str | ModelTrace,
    cluster: str | os.PathLike[str] | Hardware,
    workload: Workload,
    *,
    fixed: Fixed = (),
    objective: Objective = "time",
) -> Recommendation:
    """Choose every open knob for a model on machines that need not be there.

    Args:
        model: a known name, a Transformers configuration, or package.module:function
            (:mod:`smp_core.planner.model_source`); or a trace, to plan again without
            tracing.
        cluster: as "32x8:a100-40g@400gbps" (:mod:`smp_core.planner.hardware`).
        fixed: knobs that stay as they are given, and `micro_batch`; "shard", "context"
            and "tensor" are short names.
        objective: "time", "memory" (the lowest peak) or "cost" (the cheapest number of
            nodes up to the cluster's).

    Raises:
        NothingFits: with changes that do.
        ValueError: a model, cluster, knob or batch that is not possible; says what to
            write.
    """
    if objective not in OBJECTIVES:
        raise ValueError(
            f"objective={objective!r} is not known; allowed: {', '.join(OBJECTIVES)}"
        )
    # What the user wrote is checked before the trace, which takes seconds.
    hardware = cluster if isinstance(cluster, Hardware) else Hardware.parse(cluster)
    given = read_fixed(fixed)
    require_degrees(given, hardware)
    require_fp8_products(given, hardware.device)
    traced = model if isinstance(model, ModelTrace) else trace(model, workload.sequence)
    found = search(traced, hardware, workload, given, objective)
    name = "model" if isinstance(model, ModelTrace) else model
    if not found.ranked:
        raise _nothing_fits(traced, hardware, workload, given, found, name)
    recommended = Recommendation(
        name, traced, hardware, workload, given, objective, found
    )
    # Seconds of a step by nodes is what a training costs, whatever their price.
    if objective == "cost":
        return min(
            recommended.front(),
            key=lambda each: each.chosen.time.total * each.hardware.nodes,
        )
    return recommended


def _outline(candidate: Candidate) -> tuple[Any, ...]:
    knobs = candidate.plan.knobs
    return (
        candidate.plan.layout,
        knobs.activations.checkpoint,
        knobs.expert_parallel_degree,
    )


def _compared(candidate: Candidate, chosen: Candidate) -> str:
    """Return how much longer a step is, and what makes it so."""
    # Compared with the pick: time by the part that grows most, and memory.
    more = candidate.time.total / chosen.time.total - 1
    if candidate.knobs == chosen.knobs and candidate.micro_batch == chosen.micro_batch:
        return "this is what was chosen"
    lost = {
        part: getattr(candidate.time, part) - getattr(chosen.time, part)
        for part in TIME_PARTS
    }
    worst = max(lost, key=lambda part: lost[part])
    less = (chosen.memory.total - candidate.memory.total) / GIB
    memory = f"{abs(less):.1f} GiB {'less' if less > 0 else 'more'} memory"
    # No slower than the pick, which is simpler and within the time model's error.
    if more <= 0:
        complexity = (
            f"{candidate.complexity} axes and knobs instead of {chosen.complexity}"
        )
        return f"{more:+.1%} step time, {memory}, and {complexity}"
    return f"{more:+.1%} step time ({worst} {lost[worst]:+.3g} s), {memory}"


def layout_words(candidate: Candidate) -> str:
    """Return the degrees of a configuration, as in "8 x 4, stages 2": replicas and
    shards, then what is not 1."""
    layout = candidate.plan.layout
    others = {
        "stages": layout.pipeline,
        "context": layout.context,
        "tensor": layout.tensor,
    }
    others["experts"] = expert_degree(candidate.plan)
    words = [f"{layout.replicate} x {candidate.plan.shard_degree}"]
    words += [f"{name} {size}" for name, size in others.items() if size > 1]
    return ", ".join(words)


def experts_words(traced: ModelTrace) -> str:
    """Return how many of a mixture's parameters are experts, and how many a token
    meets."""
    experts = traced.expert_elements / 1e9
    active = traced.active_parameters / 1e9
    total = traced.parameters / 1e9
    return f"Experts: {experts:.1f} of {total:.1f} billion parameters, of which a token meets {active:.1f} in all"


def _nothing_fits(
    traced: ModelTrace,
    hardware: Hardware,
    workload: Workload,
    fixed: dict[str, Any],
    found: Found,
    name: str,
) -> NothingFits:
    changes: list[tuple[str, Candidate]] = []
    # Each change is searched for, until three of them fit: what is offered does fit.
    for words, case in _changes(_Case(hardware, workload, fixed), name):
        try:
            # Not every model has layers that get adapters.
            model = trace(case.model, case.workload.sequence) if case.model else traced
            tried = search(model, case.hardware, case.workload, case.fixed)
        except ValueError:
            continue
        if tried.ranked:
            changes.append((words, tried.ranked[0]))
        if len(changes) == 3:
            break
    lines = [found.shortfall]
    if traced.experts:
        lines.append(experts_words(traced))
    if changes:
        lines.append("what would fit:")
    lines += [
        f"- {words}: {each.memory.total / GIB:.1f} GiB, {each.time.total:.3g} s a step"
        for words, each in changes
    ]
    return NothingFits("\n".join(lines), changes)


@dataclass(frozen=True)
class _Case:
    """The question of a search.

    Attributes:
        model: another one, by its name; None: the same.
    """

    hardware: Hardware
    workload: Workload
    fixed: dict[str, Any]
    model: str | None = None


def _changes(asked: _Case, name: str) -> Iterator[tuple[str, _Case]]:
    """Yield changes in words and what is searched with then, the cheapest first: knobs
    that were fixed, the host's memory, fewer bytes, adapters, more nodes, less to
    compute.

    Args:
        name: of the model; "model": it has none.
    """
    hardware, workload, fixed = asked.hardware, asked.workload, asked.fixed
    # What costs nothing: a knob that was fixed.
    for knob in fixed:
        rest = {each: value for each, value in fixed.items() if each != knob}
        words = f"leave {knob} open instead of {fixed[knob]!r}"
        yield words, replace(asked, fixed=rest)
    # Then states on the host, which takes time for copies.
    offloads = () if "state_offload" in fixed else ("optimizer", "all")
    for where in offloads:
        offloaded = {**fixed, "state_offload": where}
        yield f"state_offload={where!r}", replace(asked, fixed=offloaded)
    # Then fewer bytes for each parameter, which changes the training's numbers.
    if workload.precision == "mixed":
        words = (
            "parameters and states in bfloat16 (precision bfloat16; rounds every step)"
        )
        small = replace(asked, workload=replace(workload, precision="bfloat16"))
        yield words, small
        for where in offloads:
            offloaded = {**fixed, "state_offload": where}
            both = f"{words}, and state_offload={where!r}"
            yield both, replace(small, fixed=offloaded)
    # Then adapters alone. A trace that was given has no name to build another model
    # from.
    if name != "model" and ADAPTERS not in name:
        model = f"{name}{ADAPTERS}{_RANK}"
        words = f"adapters of rank {_RANK} alone are trained (the model {model})"
        yield words, replace(asked, model=model)
    # Then more nodes. The batch grows where more ranks do not divide it.
    nodes = hardware.nodes
    rate = hardware.gbit or _RATE_BETWEEN_NODES
    at = "" if hardware.gbit else f" at {rate:g} Gbit/s"
    while hardware.measured is None and nodes * 2 <= _MOST_NODES:
        nodes *= 2
        more = replace(hardware, nodes=nodes, gbit=rate)
        case, same = replace(asked, hardware=more), ""
        if workload.global_batch % more.devices:
            whole = math.lcm(workload.global_batch, more.devices)
            case = replace(case, workload=replace(workload, global_batch=whole))
            same = f" and global_batch={whole}"
        yield f"{nodes} nodes{at}{same}", case
    # At last shorter sequences.
    sequence = workload.sequence
    while sequence >= 256:
        sequence //= 2
        shorter = replace(workload, sequence=sequence)
        yield f"sequences of {sequence} tokens", replace(asked, workload=shorter)
