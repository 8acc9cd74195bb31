"""Search: every configuration of the open knobs, those that fit, ranked. A candidate is
a plan of :func:`smp_core.engine.decide.decide`, with a micro-batch: what is refused
there is no candidate here.

Open are the knobs of :class:`smp_core.planner.search_space.SearchSpace` that the user
did not fix. A micro-batch is enlarged until memory ends. All micro-batches of a step go
through pipeline stages in one batch, unless `pipeline.microbatches` is fixed.

The same model, machines and batch give the same ranking. The pick is the simplest
configuration within the time model's own error of the fastest: the fewest axes, then
the fewest nodes in a partition group, then the time; within 1 % of that, the fewest
knobs. Layouts are walked in that order, so that one with stages only has to be looked
at where it can be faster than all that are simpler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mode
from typing import Any, Literal

from smp_core.cluster import DEGREES, Layout
from smp_core.config import SmpConfig
from smp_core.engine import decide_activations, decide_pipeline
from smp_core.engine.decide import decide
from smp_core.outside import parse_yaml
from smp_core.plan import GIB, TRAINERS_OWN, Cluster, Plan, Precision, chunks_of
from smp_core.planner.candidate import Candidate, spread_of
from smp_core.planner.fitted import band_of
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.search_space import (
    EXPERTS,
    LATER,
    MICRO_BATCH,
    Batch,
    SearchSpace,
)
from smp_core.planner.stage_part import StageStates, states_of
from smp_core.planner.stage_time import StagedModel, step_model
from smp_core.planner.step_memory import MEMORY_KINDS, PeakMemory, peak_memory
from smp_core.planner.time import StepModel, computed_seconds, model_flops
from smp_core.planner.workload import Workload

Objective = Literal["time", "memory", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("time", "memory", "cost")

SHORT_NAMES = {
    "shard": "shard_degree",
    **{
        axis.value: knob
        for axis, knob in DEGREES.items()
        if axis.value not in SmpConfig.knobs()
    },
    "recomputation": "activations",
}
"""What `--fix` also takes for a knob; `pipeline` with a number is the number of
stages."""

Fixed = Mapping[str, Any] | Sequence[tuple[str, Any]]
"""Knobs and their values; `pipeline` may be there twice, as a degree and as a
schedule."""

TIE = 0.01
_UNPLANNED = ("units", "planner")
# Configurations with stages whose bound is further behind the best than a tie are
# neither played nor ranked.
_FAR = 1 + TIE


@dataclass
class Found:
    """The outcome of a search.

    Attributes:
        ranked: those that fit, the best first.
        closest: of those that do not fit, the one with the smallest peak.
        considered: configurations looked at, micro-batches included.
        refused: what decide() said to some that it refused.
        indivisible: degrees of data ranks that do not divide the global batch.
    """

    ranked: list[Candidate] = field(default_factory=list)
    closest: Candidate | None = None
    considered: int = 0
    refused: list[str] = field(default_factory=list)
    indivisible: set[int] = field(default_factory=set)

    @property
    def shortfall(self) -> str:
        """A line about the sparest configuration, where none fits."""
        assert self.closest is not None
        memory = self.closest.memory
        # By kind, so that a reader sees what would have to shrink.
        kinds = ", ".join(
            f"{kind} {getattr(memory, kind) / GIB:.1f}" for kind in MEMORY_KINDS
        )
        return (
            f"nothing fits: the sparest of {self.considered} configurations needs {memory.total / GIB:.1f} GiB of "
            f"{memory.capacity / GIB:.1f} ({(memory.total - memory.capacity) / GIB:.1f} GiB over: {kinds})"
        )


def read_fixed(given: Fixed) -> dict[str, Any]:
    """Return knob -> value of what is fixed, short names written out.

    Raises:
        ValueError: a knob that is not there, one that is not planned with, or a value
            that is not allowed.
    """
    # Command lines give text, which is read as YAML: `true`, `4` and `{schedule:
    # gpipe}` get the types that a file would give them.
    fixed: dict[str, Any] = {}
    for name, written in given.items() if isinstance(given, Mapping) else given:
        value = (
            parse_yaml(written, f"--fix {name}={written}")
            if isinstance(written, str)
            else written
        )
        # A number of stages and a schedule are both written `pipeline`; only the type
        # of the value says which is meant.
        knob = SHORT_NAMES.get(name, name)
        if name == "pipeline" and type(value) is int:
            knob = "pipeline_parallel_degree"
        if knob in _UNPLANNED:
            raise ValueError(
                f"{name}={value!r} is not planned with yet; leave it out and add it to the file by hand"
            )
        if knob in fixed:
            raise ValueError(f"{knob} is fixed twice: {fixed[knob]!r} and {value!r}")
        fixed[knob] = value
    # The micro-batch is no field of SmpConfig, whose readers therefore do not check it.
    # A bool is an int to Python.
    micro_batch = fixed.get(MICRO_BATCH, 1)
    if (
        isinstance(micro_batch, bool)
        or not isinstance(micro_batch, int)
        or micro_batch < 1
    ):
        raise ValueError(
            f"micro_batch={micro_batch!r} is not a number of samples of at least 1"
        )
    # All other values go through the readers of the configuration once, which check
    # them and bring them into the form that knobs have.
    read = SmpConfig.from_dict(
        {knob: value for knob, value in fixed.items() if knob != MICRO_BATCH}
    )
    plain = read.to_dict()
    return {knob: fixed[knob] if knob == MICRO_BATCH else plain[knob] for knob in fixed}


def search(
    trace: ModelTrace,
    hardware: Hardware,
    workload: Workload,
    fixed: Mapping[str, Any] | None = None,
    objective: Objective = "time",
    *,
    cluster: Cluster | None = None,
    precision: Precision = TRAINERS_OWN,
    prunes: bool = True,
) -> Found:
    """Return the configurations that fit, ranked.

    Args:
        fixed: of :func:`read_fixed`.
        cluster: the machines as decisions see them; None: those of ``hardware``.
        precision: what a trainer's precision means, as :func:`decide` takes it.
        prunes: leave out configurations that bounds show to be behind others of the
            same degrees and recomputation, or with stages behind the best; the pick is
            the same without.

    Raises:
        ValueError: no configuration is allowed at all (a contradiction among fixed
            knobs, a batch that no layout divides); says why.
    """
    of_memory = objective == "memory"
    # The search for the lowest peak walks over everything: the bounds that prune are
    # bounds of time.
    space = SearchSpace(
        trace, hardware, workload, fixed or {}, cluster or hardware.cluster()
    )
    found = _Search(space, precision, of_memory, prunes and not of_memory).look()
    if not found.ranked and found.closest is None:
        raise ValueError(nothing_allowed(found, workload, hardware, space.micro_batch))
    # The walk's order is by layout, and the ranking by the objective. Behind the pick,
    # which is moved to the front, candidates stay in that order.
    found.ranked.sort(key=_by_memory if of_memory else _by_time)
    if found.ranked:
        chosen = (
            _with_fewest_knobs(found.ranked, _by_memory)
            if of_memory
            else simplest(found.ranked)
        )
        found.ranked.remove(chosen)
        found.ranked.insert(0, chosen)
    return found


def simplest(ranked: Sequence[Candidate]) -> Candidate:
    """Return the pick among configurations by rising time: more axes and wider groups
    have to save more time than the model may be off."""
    fastest = ranked[0]
    # All that the time model cannot tell from the fastest, by its error on published
    # runs.
    near = [
        each
        for each in ranked
        if each.time.total <= fastest.time.total * (1 + fastest.band.share)
    ]
    least = min(each.spread for each in near)
    return _with_fewest_knobs([each for each in near if each.spread == least], _by_time)


def _with_fewest_knobs(
    ranked: Sequence[Candidate], key: Callable[[Candidate], tuple[Any, ...]]
) -> Candidate:
    # A tie is 1 %: a knob that saves less than that is not worth having to be
    # understood.
    limit = key(ranked[0])[0] * (1 + TIE)
    tied = [each for each in ranked if key(each)[0] <= limit]
    return min(tied, key=lambda each: (each.complexity, *key(each)))


def _by_time(candidate: Candidate) -> tuple[Any, ...]:
    return (
        candidate.time.total,
        candidate.complexity,
        candidate.memory.total,
        candidate.words,
    )


def _by_memory(candidate: Candidate) -> tuple[Any, ...]:
    return (
        candidate.memory.total,
        candidate.time.total,
        candidate.complexity,
        candidate.words,
    )


_States = tuple[StageStates, ...]
"""Of a plan's stages; recomputation does not change them."""


@dataclass(frozen=True)
class _Way:
    """The times of a plan, and a batch, with what they take of memory; of stages the
    plan has the schedule, and not yet the micro-batches."""

    model: StepModel
    batch: Batch
    memory: PeakMemory


class _Search:
    """One walk over the open knobs."""

    def __init__(
        self, space: SearchSpace, precision: Precision, of_memory: bool, prunes: bool
    ) -> None:
        self.space = space
        self.precision = precision
        self.of_memory = of_memory
        self.prunes = prunes
        self.trace = space.trace
        self.hardware = space.hardware
        self.workload = space.workload
        self.best = math.inf  # seconds, or bytes
        # By degrees and recomputation.
        self.best_of: dict[tuple[Layout, str], float] = {}
        self.shared: dict[Any, Any] = {}  # between models of steps
        # Figures that all candidates share: model FLOPs, the peak of a device, tokens
        # of a step.
        flops = model_flops(
            self.trace, self.workload.global_batch, self.workload.sequence
        )
        self.of_all = (
            flops,
            self.hardware.device.flops,
            self.workload.sequence * self.workload.global_batch,
        )
        self.found = Found()

    def look(self) -> Found:
        """Walk over layouts; over the other knobs only where the sparest of them
        fits."""
        for layout in sorted(self.space.layouts(), key=self._spread):
            # Fixed degrees may be of a product that does not divide the devices.
            stages = layout["pipeline_parallel_degree"]
            split = math.prod(layout[knob] for knob in DEGREES.values())
            data = self.hardware.devices // split
            if data * split != self.hardware.devices:
                self._decided(dict(layout))  # decide() says why not
                continue
            samples = self.workload.global_batch // data
            # Each rank that reads its own samples has as many of them in a step.
            batches = (
                []
                if self.workload.global_batch % data
                else self.space.batches(samples, stages > 1)
            )
            if not batches:
                self.found.indivisible.add(data)
                continue
            # Bounds on computing alone drop batches before anything is decided about,
            # which is what takes the time of a search.
            choices = list(self.space.later_knobs(stages))  # the sparest is the last
            near = []
            for knobs in choices:
                near.append(
                    [
                        each
                        for each in batches
                        if not self._is_too_long(layout, knobs, each)
                    ]
                )
            all_knobs = list(self.space.states_of(layout, samples > batches[0].size))
            self.found.considered += len(all_knobs) * len(choices) * len(batches)
            if any(near):
                self._look_inside(all_knobs, choices, near, batches[0])
        self.found.refused += self.space.refused
        return self.found

    def _look_inside(
        self,
        all_knobs: list[dict[str, Any]],
        choices: list[dict[str, Any]],
        near: list[list[Batch]],
        smallest: Batch,
    ) -> None:
        """Walk over the other knobs of a layout, where the sparest of them fits.

        Args:
            near: the batches to look at of each of the choices.
        """
        # Decisions about model states are made once for all modes of recomputation,
        # which change none of them.
        for knobs in all_knobs:
            decided = self._decided(knobs)
            sparest = None if decided is None else self._model(*decided, choices[-1])
            if decided is None or sparest is None:
                continue
            # If even the sparest choice with the smallest batch does not fit, nothing
            # else of these knobs does.
            if not any(
                way.memory.fits
                for way in self._ways(*sparest, [smallest], all_of_them=True)
            ):
                continue
            for others, batches in zip(reversed(choices), reversed(near), strict=True):
                if not batches:
                    continue
                timed = (
                    sparest if others is choices[-1] else self._model(*decided, others)
                )
                if timed is not None:
                    self._take(self._ways(*timed, batches))

    def _spread(self, layout: dict[str, int]) -> tuple[int, int]:
        pipeline, tensor, context = (
            layout[f"{axis}_parallel_degree"]
            for axis in ("pipeline", "tensor", "context")
        )
        return spread_of(
            pipeline,
            tensor,
            context,
            layout["shard_degree"],
            self.hardware.ranks_per_node,
        )

    def _decided(self, knobs: dict[str, Any]) -> tuple[Plan, _States] | None:
        """Decide about all knobs but those of :data:`LATER`; None: refused."""
        # What the user fixed wins over what the walk proposes; "auto" leaves it to the
        # walk.
        given = self.space.fixed.items()
        knobs = knobs | {knob: value for knob, value in given if value != "auto"}
        own = {knob: value for knob, value in knobs.items() if knob not in LATER}
        try:
            # Refusals that only the trace knows of; all others are for decide() to say.
            if knobs.get("pipeline_parallel_degree", 1) > 1 and self.trace.uncut:
                raise ValueError(self.trace.uncut)
            unsplit = self.trace.split.unsplit.get(
                knobs.get("tensor_parallel_degree", 1)
            )
            # A tensor plan that the user wrote may split what ours could not.
            if unsplit is not None and "tensor_parallel" not in self.space.fixed:
                raise ValueError(unsplit)
            if (
                knobs.get("context_parallel_degree", 1) > 1
                and self.trace.dropped_scores
            ):
                raise ValueError(
                    f"context_parallel_degree={knobs['context_parallel_degree']}: the model drops "
                    f"{self.trace.dropped_scores:.0%} of attention's scores in training, which several ranks cannot do "
                    "with one softmax; set that dropout to 0 (GPT-2: attn_pdrop), or leave the degree out"
                )
            # Units depend on whether experts are dealt to ranks, which makes each of
            # them one of its own.
            shapes = self.trace.of_precision(
                "none", self.workload.precision, knobs[EXPERTS] != 1
            )
            plan = decide(
                shapes, SmpConfig(**own), self.space.cluster, precision=self.precision
            )
        except ValueError as error:
            self.found.refused.append(str(error))
            return None
        return plan, states_of(plan, self.workload.states)

    def _model(
        self, plan: Plan, states: _States, knobs: dict[str, Any]
    ) -> tuple[StepModel, _States] | None:
        """Return the times of a plan with the knobs of :data:`LATER`, and its stages'
        states; None: refused."""
        # States were made for the blocks of each stage as they were cut before.
        cut_before = plan.stages and plan.stages.sizes
        try:
            plan = self._decided_later(plan, knobs)
        except ValueError as error:
            self.found.refused.append(str(error))
            return None
        if plan.stages is not None and plan.stages.sizes != cut_before:
            # Its schedule or its split cuts elsewhere.
            states = states_of(plan, self.workload.states)
        return step_model(
            plan, self.trace, self.hardware, self.workload.sequence, self.shared
        ), states

    def _ways(
        self,
        model: StepModel,
        states: _States,
        batches: list[Batch],
        all_of_them: bool = False,
    ) -> Iterator[_Way]:
        """Yield what rising micro-batches take of memory, the first that does not fit
        last. Without stages a larger micro-batch never makes a step longer, so that
        only the largest that fits is yielded.

        Args:
            all_of_them: also those that are far behind the best.
        """
        plan, tokens = model.plan, self.workload.sequence
        takes_largest = self.prunes and plan.stages is None and not all_of_them
        # The bound for layouts without stages: the largest micro-batch is the fastest,
        # also where it does not fit.
        if takes_largest:
            # Even its largest micro-batch is slower, by more than a tie, than a ranked
            # configuration of the same degrees and recomputation.
            best = self.best_of.get((plan.layout, model.mode), math.inf)
            if model.step(batches[-1].size, batches[-1].count).total > _FAR * best:
                return
        largest: _Way | None = None
        for batch in batches:
            if (
                batch.in_stages % plan.layout.pipeline
                and chunks_of(plan.knobs.pipeline.schedule) > 1
            ):
                continue  # not a full round
            # Playing a schedule takes longest of all, so that a bound goes before it.
            sizes = (batch.size, batch.count)
            if self.prunes and not all_of_them and isinstance(model, StagedModel):
                if model.least(*sizes, batch.in_stages) > _FAR * self.best:
                    continue  # it cannot come near the best so far
            memory = peak_memory(
                plan, self.trace, *sizes, tokens, states, batch.in_stages
            )
            way = _Way(model, batch, memory)
            if not takes_largest:
                yield way
            # Larger micro-batches take no less memory: the first that does not fit ends
            # the walk. The sparest of all that fail is what an error names.
            if not memory.fits:
                closest = self.found.closest
                if closest is None or memory.total < closest.memory.total:
                    self.found.closest = self._candidate(way)
                break
            largest = way
        if takes_largest and largest is not None:
            yield largest

    def _is_too_long(
        self, layout: dict[str, int], knobs: dict[str, Any], batch: Batch
    ) -> bool:
        """Return whether computing alone takes stages longer than the best
        configuration so far: what all compute by the number of stages, or what the one
        with most blocks does, and the first round."""
        stages = layout["pipeline_parallel_degree"]
        # FP8 and compiled blocks take less time than the figures that the bound is made
        # of.
        in_less = self.space.fixed.get("fp8") or self.space.fixed.get("compile")
        if stages == 1 or not self.prunes or in_less:
            return False
        context = layout["context_parallel_degree"]
        mode = knobs["activations"].checkpoint
        # The model does not run with this mode of recomputation, which has no figures.
        if mode not in self.trace.block:
            return False  # refused later
        experts = layout[EXPERTS] if isinstance(layout[EXPERTS], int) else 1
        tokens = self.workload.sequence / context
        # Many layouts share these figures, so that they are computed once for all.
        where = (
            mode,
            batch.size,
            layout["tensor_parallel_degree"],
            context,
            tokens,
            experts,
        )
        if where not in self.shared:
            self.shared[where] = computed_seconds(self.trace, self.hardware, *where)
        of_block, of_rest = self.shared[where]
        blocks = self.trace.blocks
        # In each batch the first micro-batch goes through all other stages forward, and
        # the last one backward, while a stage waits for them.
        chunk = max(blocks // (stages * chunks_of(knobs["pipeline"])), 1)
        begun = batch.count / batch.in_stages * (stages - 1) * chunk * of_block
        slowest = max(
            -(-blocks // stages) * of_block, (blocks * of_block + of_rest) / stages
        )
        return bool(batch.count * slowest + begun > _FAR * self.best)

    def _decided_later(self, plan: Plan, knobs: dict[str, Any]) -> Plan:
        own = {knob: value for knob, value in knobs.items() if knob != "pipeline"}
        # Shapes depend on the mode: which modules are recomputed is part of them.
        mode = str(knobs["activations"].checkpoint)
        dealt = plan.knobs.expert_parallel_degree != 1
        plan = decide_activations(
            plan, self.trace.of_precision(mode, self.workload.precision, dealt), **own
        )
        if "pipeline" in knobs:
            plan = decide_pipeline(
                plan, {**self.space.pipeline, "schedule": knobs["pipeline"]}
            )
        return plan

    def _take(self, ways: Iterator[_Way]) -> None:
        """Rank configurations that fit; those with stages only if they are not far
        behind the best."""
        for way in ways:
            # A candidate's time is found by playing its schedule, which is slow: only
            # those near the lowest peak are worth it.
            is_far = (
                self.of_memory
                and way.model.plan.stages is not None
                and way.memory.total > _FAR * self.best
            )
            if is_far or not way.memory.fits:
                continue
            candidate = self._candidate(way)
            self.found.ranked.append(candidate)
            # What later configurations have to be near to: of this outline, and of all.
            outline = (candidate.plan.layout, way.model.mode)
            self.best_of[outline] = min(
                self.best_of.get(outline, math.inf), candidate.time.total
            )
            self.best = min(
                self.best,
                candidate.memory.total if self.of_memory else candidate.time.total,
            )

    def _candidate(self, way: _Way) -> Candidate:
        plan, batch = way.model.plan, way.batch
        # The plan learns how many micro-batches go through its stages in one batch,
        # which decisions left open.
        if isinstance(way.model, StagedModel):
            time = way.model.step(batch.size, batch.count, batch.in_stages)
            flow = {**self.space.pipeline, "schedule": plan.knobs.pipeline.schedule}
            plan = decide_pipeline(plan, {**flow, "microbatches": batch.in_stages})
        else:
            time = way.model.step(batch.size, batch.count)
        knobs = plan.knobs
        band = band_of(plan.layout, knobs.fp8 is not None, knobs.compile is not None)
        return Candidate(
            plan, batch.size, batch.count, way.memory, time, *self.of_all, band
        )


def nothing_allowed(
    found: Found, workload: Workload, hardware: Hardware, micro_batch: int | None
) -> str:
    """Return why no configuration was looked at."""
    # Refusals of many layouts are mostly alike. That of the layout with the fewest axes,
    # which was looked at first, says what the matter is; most layouts say what is allowed.
    if found.refused:
        knob = found.refused[0].partition("=")[0]
        said = mode(each for each in found.refused if each.startswith(knob))
        return f"no configuration is allowed with these knobs: {said}"
    if not found.indivisible:
        # Every batch was passed over, for rounds that it does not fill.
        return (
            f"global_batch={workload.global_batch}: chunks of pipeline stages take micro-batches in whole rounds, one "
            "for each stage, which no layout has; write a larger one, or another schedule (pipeline=1f1b)"
        )
    ranks = min(found.indivisible)
    if micro_batch is not None:
        return (
            f"micro_batch={micro_batch}: with global_batch={workload.global_batch} no layout of "
            f"{hardware.devices} devices gives each rank a multiple of it; leave it open, or change one of both"
        )
    near = max(round(workload.global_batch / ranks), 1) * ranks
    return (
        f"global_batch={workload.global_batch} is divided by no layout of {hardware.devices} devices: the fewest ranks "
        f"that read different samples are {ranks}; write a multiple of it, as {near}"
    )
