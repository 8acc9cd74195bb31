"""Search: every configuration of the open knobs, those that fit, ranked. A candidate is a plan of
:func:`smp_core.planning.decide.decide`, with a micro-batch: what is refused there is no candidate here.

Open are the tensor, shard and context degrees, recomputation and offloading, what is kept between micro-batches, where
optimizer states live, the copy that a node keeps, the chunked loss, and the micro-batch. Knobs that the user gave are
fixed. A micro-batch is enlarged until memory ends.

Deterministic: the same model, machines and batch give the same ranking. Configurations within 1 % of the best are a
tie, which the one with the fewest axes and knobs wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from smp_core.config import SmpConfig
from smp_core.planning.candidate import Candidate, Choice
from smp_core.planning.cluster import Cluster
from smp_core.planning.decide import TRAINERS_OWN, Plan, decide, decide_activations
from smp_core.planning.dtype_rules import Precision
from smp_core.planning.hardware import Hardware
from smp_core.planning.memory import GradientBytes, MemoryEstimate, estimate, gradient_bytes
from smp_core.planning.model_trace import ModelTrace
from smp_core.planning.step_memory import peak_memory
from smp_core.planning.time import StepModel, model_flops
from smp_core.planning.workload import Workload
from smp_core.recipes import Activations

Objective = Literal["time", "memory", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("time", "memory", "cost")

SHORT_NAMES = {
    "shard": "shard_degree",
    "context": "context_parallel_degree",
    "tensor": "tensor_parallel_degree",
    "recomputation": "activations",
}
"""What `--fix` also takes for a knob."""

MICRO_BATCH, COUNT = "micro_batch", "micro_batches"
TIE = 0.01
_OF_ACTIVATIONS = ("activations", "chunked_cross_entropy")
_UNPLANNED = ("units", "fp8", "pipeline_parallel_degree", "planner")
_LARGEST_MICRO_BATCH = 256
_TOKENS_OF_A_PIECE = 1024  # shorter pieces of a sequence are not worth their exchange of keys


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


def read_fixed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return knob -> value of what is fixed, short names written out.

    Raises:
        ValueError: a knob that is not there, one that is not planned with, or a value that is not allowed.
    """
    fixed: dict[str, Any] = {}
    for name, value in given.items():
        knob = SHORT_NAMES.get(name, name)
        if knob in _UNPLANNED:
            raise ValueError(f"{name}={value!r} is not planned with yet; leave it out and add it to the file by hand")
        if knob in fixed:
            raise ValueError(f"{knob} is fixed twice: {fixed[knob]!r} and {value!r}")
        fixed[knob] = yaml.safe_load(value) if isinstance(value, str) else value
    micro_batch = fixed.get(MICRO_BATCH, 1)
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise ValueError(f"micro_batch={micro_batch!r} is not a number of samples of at least 1")
    read = SmpConfig.from_dict({knob: value for knob, value in fixed.items() if knob != MICRO_BATCH})
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
) -> Found:
    """Return all configurations that fit, ranked.

    Args:
        fixed: of :func:`read_fixed`.
        cluster: the machines as decisions see them; None: those of ``hardware``.
        precision: what a trainer's precision means, as :func:`decide` takes it.

    Raises:
        ValueError: no configuration is allowed at all (a contradiction among fixed knobs, a batch that no layout
            divides); says why.
    """
    run = _Search(trace, hardware, workload, dict(fixed or {}), cluster or hardware.cluster(), precision)
    run.look()
    found = run.found
    if not found.ranked and found.closest is None:
        raise ValueError(_nothing_allowed(found, workload, hardware, run.micro_batch))
    key = {"time": _by_time, "cost": _by_time, "memory": _by_memory}[objective]
    found.ranked.sort(key=key)
    if found.ranked:
        best = key(found.ranked[0])[0]
        tied = [each for each in found.ranked if key(each)[0] <= best * (1 + TIE)]
        chosen = min(tied, key=lambda each: (each.complexity, *key(each)))
        found.ranked.remove(chosen)
        found.ranked.insert(0, chosen)
    return found


def _by_time(candidate: Candidate) -> tuple[Any, ...]:
    return (candidate.time.total, candidate.complexity, candidate.memory.total, candidate.choice.words)


def _by_memory(candidate: Candidate) -> tuple[Any, ...]:
    return (candidate.memory.total, candidate.time.total, candidate.complexity, candidate.choice.words)


@dataclass(frozen=True)
class _States:
    """A plan without recomputation, and its model states, which recomputation does not change."""

    plan: Plan
    names: tuple[str, ...]
    memory: MemoryEstimate
    gradients: GradientBytes


class _Search:
    """One walk over the open knobs."""

    def __init__(
        self,
        trace: ModelTrace,
        hardware: Hardware,
        workload: Workload,
        fixed: dict[str, Any],
        cluster: Cluster,
        precision: Precision,
    ) -> None:
        self.trace, self.hardware, self.workload = trace, hardware, workload
        self.micro_batch, self.count = fixed.pop(MICRO_BATCH, None), fixed.pop(COUNT, None)
        self.fixed = fixed
        self.cluster, self.precision = cluster, precision
        self.links = hardware.links()
        flops = model_flops(trace, workload.global_batch, workload.sequence)
        self.of_all = (flops, hardware.device.flops, workload.tokens_of_step)
        self.found = Found()

    def look(self) -> None:
        """Walk over layouts; over the other knobs only where the sparest of them fits."""
        for layout in self._layouts():
            split = layout["tensor_parallel_degree"] * layout["context_parallel_degree"]
            data = self.hardware.devices // split
            if data * split != self.hardware.devices:
                self._decided(dict(layout))  # decide() says why not
                continue
            if self.workload.global_batch % data:
                self.found.indivisible.add(data)
                continue
            sizes = self._micro_batches(self.workload.global_batch // data)
            if not sizes:
                self.found.indivisible.add(data)
                continue
            several = self.workload.global_batch // data > sizes[0]
            for knobs in self._states_of(layout, several):
                states = self._decided(knobs)
                if states is None:
                    continue
                choices = list(self._activations())  # the sparest is the last
                if not any(each.memory.fits for each in self._candidates(states, choices[-1], sizes[:1], data)):
                    continue
                for others in choices:
                    fitting = [each for each in self._candidates(states, others, sizes, data) if each.memory.fits]
                    self.found.ranked += fitting

    def _layouts(self) -> Iterator[dict[str, int]]:
        k = self.hardware.ranks_per_node
        heads = self.trace.heads
        words = self.trace.vocabulary
        wide = [n for n in range(2, k + 1) if k % n == 0 and heads and heads % n == 0 and words % n == 0]
        tensors = [1, *wide]
        for tensor in self._open("tensor_parallel_degree", tensors):
            groups = self.cluster.topology.of_groups(tensor) if k % tensor == 0 else self.cluster.topology
            shards = self._open("shard_degree", groups.allowed_shard_degrees())
            for shard in shards:
                degree = groups.resolve_shard_degree(shard) if shard in ("node", "world") else shard
                for context in self._open("context_parallel_degree", self._contexts(tensor, degree)):
                    yield {
                        "tensor_parallel_degree": tensor,
                        "shard_degree": degree,
                        "context_parallel_degree": context,
                    }

    def _contexts(self, tensor: int, shard: int) -> list[int]:
        found = [1]
        while self.trace.heads and found[-1] * 2 * tensor <= self.hardware.ranks_per_node:
            degree = found[-1] * 2
            if shard % degree or self.workload.sequence // degree < _TOKENS_OF_A_PIECE:
                break
            found.append(degree)
        return found

    def _open(self, knob: str, values: Any) -> Any:
        """Return the fixed value alone, or all of them."""
        fixed = self.fixed.get(knob, "auto")
        return values if fixed == "auto" else [fixed]

    def _micro_batches(self, samples: int) -> list[int]:
        sizes = [n for n in range(1, min(samples, _LARGEST_MICRO_BATCH) + 1) if samples % n == 0]
        if self.micro_batch is not None:
            sizes = [n for n in [self.micro_batch] if samples % n == 0]
        return sizes if self.count is None else [n for n in sizes if n * self.count == samples]

    def _states_of(self, layout: dict[str, int], several: bool) -> Iterator[dict[str, Any]]:
        """Yield the knobs about model states that mean something in a layout."""
        gathers = layout["shard_degree"] > 1
        k = self.hardware.ranks_per_node // layout["tensor_parallel_degree"]
        kept = ["shards", *(["parameters", "gradients"] if gathers and several else [])]
        replicas = layout["shard_degree"] * layout["tensor_parallel_degree"] < self.hardware.devices
        copies = ["auto", *(["node"] if layout["shard_degree"] > k > 1 else [])]
        dtype = "bfloat16" if self.workload.precision == "mixed" else None
        for keep in self._open("keep_between_micro_batches", kept):
            for copy in self._open("reshard_after_forward", copies if keep == "shards" else ["auto"]):
                for states in self._open("optimizer_shard", ["shard", *(["world"] if replicas else [])]):
                    named = {
                        **layout,
                        "param_dtype": dtype,
                        "keep_between_micro_batches": keep,
                        "reshard_after_forward": copy,
                        "optimizer_shard": states,
                    }
                    yield {**named, **self.fixed}

    def _activations(self) -> Iterator[dict[str, Any]]:
        modes: list[Any] = ["none", "selective", "full", {"checkpoint": "full", "offload": True}]
        chunks = [None, 1024] if self.trace.heads else [None]
        fixed = self.fixed
        for mode in [fixed["activations"]] if "activations" in fixed else modes:
            for chunk in [fixed["chunked_cross_entropy"]] if "chunked_cross_entropy" in fixed else chunks:
                yield {"activations": mode, "chunked_cross_entropy": chunk}

    def _decided(self, knobs: dict[str, Any]) -> _States | None:
        """Decide about all knobs but those of :meth:`_activations`; None: refused."""
        knobs = {**knobs, **{knob: value for knob, value in self.fixed.items() if value != "auto"}}
        own = {knob: value for knob, value in knobs.items() if knob not in _OF_ACTIVATIONS}
        try:
            shapes = self.trace.of_precision("none", self.workload.precision)
            plan = decide(shapes, SmpConfig(**own), self.cluster, precision=self.precision)
        except ValueError as error:
            self.found.refused.append(str(error))
            return None
        return _States(plan, tuple(own), estimate(plan, self.workload.states), gradient_bytes(plan))

    def _candidates(self, states: _States, knobs: dict[str, Any], sizes: list[int], data: int) -> Iterator[Candidate]:
        """Yield the candidates of rising micro-batches, the first that does not fit last."""
        try:
            recipe = Activations.read(knobs["activations"])
            assert recipe is not None
            mode = recipe.checkpoint
            if not isinstance(mode, str) or mode not in self.trace.shapes:
                raise ValueError(f"activations.checkpoint={mode!r} is not planned with; write none, selective or full")
            plan = decide_activations(states.plan, self.trace.of_precision(mode, self.workload.precision), **knobs)
        except ValueError as error:
            self.found.refused.append(str(error))
            return
        choice = Choice(plan.knobs.unresolved, plan, (*states.names, *knobs))
        model = StepModel(plan, self.trace, self.hardware, self.links, self.workload.sequence, self.hardware.fitted)
        samples, tokens = self.workload.global_batch // data, self.workload.sequence
        for size in sizes:
            self.found.considered += 1
            count = samples // size
            memory = peak_memory(plan, states.memory, self.trace, size, count, tokens, states.gradients)
            candidate = Candidate(choice, size, count, memory, model.step(size, count), *self.of_all)
            closest = self.found.closest
            if not memory.fits and (closest is None or memory.total < closest.memory.total):
                self.found.closest = candidate
            yield candidate
            if not memory.fits:
                return


def _nothing_allowed(found: Found, workload: Workload, hardware: Hardware, micro_batch: int | None) -> str:
    if found.refused:
        return f"no configuration is allowed with these knobs: {found.refused[-1]}"
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
