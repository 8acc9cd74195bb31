"""SearchSpace: the values of the open knobs that a search walks over, given ones as
they were given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smp_core.cluster import DEGREES
from smp_core.config import Activations, Fp8Recipe, Pipeline, SmpConfig
from smp_core.engine import settle_layout
from smp_core.plan import Cluster, Draft, chunks_of
from smp_core.planner.devices import Device
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import ModelTrace
from smp_core.planner.time import computed_seconds
from smp_core.planner.workload import Workload
from smp_core.topology import Topology, divisors, listed

MICRO_BATCH, COUNT = "micro_batch", "micro_batches"
EXPERTS = "expert_parallel_degree"
LATER = ("activations", "chunked_cross_entropy", "pipeline")
"""Knobs that change no model states, but for which of them a stage has."""

# Chunks send several times as much; and where messages take long, all forwards before
# all backwards wait for fewer of them than 1F1B. Both take more memory than 1F1B, which
# is the last therefore.
_BEHIND_SLOW_LINKS = ("gpipe", "1f1b")
_BEHIND_FAST_LINKS = ("interleaved:4", "interleaved:2", "1f1b")
_SLOW = 0.1  # a message by a stage's forward and backward
_LARGEST_MICRO_BATCH = 256
# Shorter pieces of a sequence are not worth their exchange of keys.
_TOKENS_OF_A_PIECE = 1024


def require_degrees(fixed: Mapping[str, Any], hardware: Hardware) -> None:
    """Refuse fixed degrees that the machines do not take, whatever the model is."""
    known = ("shard_degree", *DEGREES.values())
    given = {knob: fixed[knob] for knob in known if knob in fixed}
    asked = {knob: value for knob, value in given.items() if value != "auto"}
    if "shard_degree" not in asked:  # of whose ranks context ranks are
        asked.update(shard_degree=1, context_parallel_degree=1)
    if "tensor_parallel" in fixed:
        asked["tensor_parallel"] = fixed["tensor_parallel"]
    # Where tensor ranks are open, any number of them may be what a partition group needs.
    refused: list[ValueError] = []
    for tensor in divisors(hardware.ranks_per_node):
        tried = SmpConfig(**{"tensor_parallel_degree": tensor, **asked})
        try:
            settle_layout(Draft(tried), hardware.cluster().topology)
        except ValueError as error:
            refused.append(error)
        else:
            return
    raise refused[0]


def require_fp8_products(fixed: Mapping[str, Any], device: Device) -> None:
    """Refuse FP8 on a device, or with fields, that it is not planned with."""
    asked = fixed.get("fp8")
    recipe = None if asked is None else Fp8Recipe.read(asked)
    if recipe is None:
        return
    # Speed is planned of native layers on tensor cores; anything else would be told a
    # time that it does not have.
    if device.fp8_flops is None:
        raise ValueError(
            f"fp8: {device.name} has no tensor cores for FP8 in its data sheet, without which products "
            "are emulated; leave fp8 out, plan for a device that has them, as h100-80g, or write fp8_tflops "
            "of one's own device into its YAML file"
        )
    plain = Fp8Recipe()
    for field in ("backend", "include", "exclude"):
        value, planned = getattr(recipe, field), getattr(plain, field)
        if value != planned:
            raise ValueError(
                f"fp8.{field}={value!r} is not planned with: the native layers in all places are; leave it out, "
                "and add it to the file by hand"
            )


@dataclass(frozen=True)
class Batch:
    """One way to cut a rank's samples of a step.

    Attributes:
        size: samples of a micro-batch.
        count: micro-batches of a step.
        in_stages: of those, how many go through pipeline stages in one batch.
    """

    size: int
    count: int
    in_stages: int


class SearchSpace:
    """The open knobs of one search.

    Args:
        fixed: knobs that stay as they are, with the micro-batch and how many make a
            step.

    Attributes:
        fixed: knobs that stay.
        pipeline: fields of the knob `pipeline` that stay, if it is given: those that
            are not "auto".
        refused: what was said to degrees that the machines do not take.
    """

    def __init__(
        self,
        trace: ModelTrace,
        hardware: Hardware,
        workload: Workload,
        fixed: Mapping[str, Any],
        cluster: Cluster,
    ) -> None:
        self.trace = trace
        self.hardware = hardware
        self.workload = workload
        self.cluster = cluster
        self.fixed = dict(fixed)
        self.micro_batch = self.fixed.pop(MICRO_BATCH, None)
        self.count = self.fixed.pop(COUNT, None)
        # A schedule that is given leaves its micro-batches open, and the other way
        # round.
        asked = self.fixed.get("pipeline")
        given = None if asked is None else Pipeline.read(asked)
        self.pipeline = (
            {}
            if given is None
            else {k: v for k, v in given.to_dict().items() if v != "auto"}
        )
        self.refused: list[str] = []
        self._require_dealt_evenly()
        # A run emulates what its device does not have.
        if workload.precision != "trainer":
            require_fp8_products(self.fixed, hardware.device)

    def _require_dealt_evenly(self) -> None:
        """Refuse a fixed degree that does not divide the experts of a layer, or that is
        neither a part of a node's ranks nor of whole nodes; of those over several nodes
        only what is fixed is planned."""
        asked = self.fixed.get(EXPERTS, 1)
        k = self.hardware.ranks_per_node
        world = self.hardware.devices
        # Experts of all layers are dealt alike, so that each count has to be divided.
        counts = {site.experts for site in self.trace.shapes["none"].experts}
        common = math.gcd(world, *counts)
        allowed = [n for n in divisors(common) if k % n == 0 or n % k == 0]
        if counts and isinstance(asked, int) and asked not in allowed:
            raise ValueError(
                f"{EXPERTS}={asked} does not divide the {' and '.join(map(str, counts))} experts of a layer and the "
                f"{world} devices, or is of parts of nodes of {k}; write {listed(allowed)}, 'node' or "
                "'auto'"
            )

    def layouts(self) -> Iterator[dict[str, int]]:
        """Yield the degrees of all layouts. An axis of which no other size is tried has
        the fixed one, or one rank."""
        # Stages first: each has a topology of its own, with the ranks that are left.
        degrees = {knob: self.fixed.get(knob, 1) for knob in DEGREES.values()}
        for stages in self._open("pipeline_parallel_degree", self._stages()):
            try:
                topology = self.cluster.topology.of_stage(stages)
            except ValueError as error:
                self.refused.append(str(error))
                continue
            for inner in self._layouts_inside(topology):
                yield {**degrees, "pipeline_parallel_degree": stages, **inner}

    def _layouts_inside(self, topology: Topology) -> Iterator[dict[str, int]]:
        """Yield the degrees of one stage's ranks."""
        k = topology.ranks_per_node
        heads = self.trace.heads
        words = self.trace.vocabulary
        unsplit = self.trace.split.unsplit
        takes = [
            n
            for n in divisors(k)
            if n > 1 and heads and heads % n == 0 and n not in unsplit
        ]
        # With whole embeddings only where it is fixed: a longer search.
        wide = [n for n in takes if words % n == 0]
        tensors = [1, *wide]
        for tensor in self._open("tensor_parallel_degree", tensors):
            # A tensor group counts as one rank when partition groups are formed. A
            # degree that does not fit a node is refused by decide().
            groups = topology.of_groups(tensor) if k % tensor == 0 else topology
            shards = self._open("shard_degree", groups.allowed_shard_degrees())
            for shard in shards:
                degree = (
                    groups.resolve_shard_degree(shard)
                    if shard in ("node", "world")
                    else shard
                )
                contexts = self._open(
                    "context_parallel_degree", self._contexts(tensor, degree, k)
                )
                experts = self._experts(tensor, degree, groups.ranks_per_node)
                for context, dealt in itertools.product(contexts, experts):
                    yield {
                        "tensor_parallel_degree": tensor,
                        "shard_degree": degree,
                        "context_parallel_degree": context,
                        EXPERTS: dealt,
                    }

    def _stages(self) -> list[int]:
        """Return numbers of stages: of whole nodes or equal parts of one, with a block
        for each."""
        if self.trace.uncut:
            return [1]
        world, k = self.hardware.devices, self.hardware.ranks_per_node
        sizes = {
            n: world // n
            for n in range(1, min(world, self.trace.blocks) + 1)
            if world % n == 0
        }
        return [n for n, size in sizes.items() if size % k == 0 or k % size == 0]

    def _contexts(self, tensor: int, shard: int, ranks_per_node: int) -> list[int]:
        """Return powers of two that divide a partition group and stay on a node with
        their tensor ranks."""
        found, degree = [1], 2
        splits = self.trace.heads and not self.trace.dropped_scores
        most = (
            min(ranks_per_node // tensor, self.workload.sequence // _TOKENS_OF_A_PIECE)
            if splits
            else 1
        )
        # Context ranks are taken from the partition group.
        while degree <= most and shard % degree == 0:
            found.append(degree)
            degree *= 2
        return found

    def _experts(self, tensor: int, shard: int, ranks_per_node: int) -> list[int]:
        """Return over how many ranks of a node experts may be dealt, or what is fixed,
        which may be several nodes."""
        # Experts are dealt inside a node by default, where links are fast.
        sites = self.trace.shapes["none"].experts
        common = math.gcd(shard, ranks_per_node, *(site.experts for site in sites))
        takes = self.trace.experts and not any(site.problem for site in sites)
        inside = divisors(common) if takes else [1]
        degrees: list[int] = self._open(EXPERTS, inside)
        is_open = tensor > 1 and "tensor_parallel_degree" not in self.fixed
        if (
            is_open
            and isinstance(degrees[0], int)
            and ranks_per_node < degrees[0] <= self.hardware.ranks_per_node
        ):
            return []  # fewer tensor ranks leave as many
        return inside[-1:] if degrees == ["node"] and takes else degrees

    def _open(self, knob: str, values: Any) -> Any:
        """Return the fixed value alone, or all of them."""
        fixed = self.fixed.get(knob, "auto")
        return values if fixed == "auto" else [fixed]

    def batches(self, samples: int, in_stages: bool) -> list[Batch]:
        """Return the ways to cut a rank's samples of a step, by rising size. Where the
        loader's batch is given, stages cut it."""
        sizes = [
            n
            for n in range(1, min(samples, _LARGEST_MICRO_BATCH) + 1)
            if samples % n == 0
        ]
        loaded = self.micro_batch
        fixed = self.pipeline.get("microbatches") if in_stages else None
        if self.count is not None:  # of a run: its loader's batches make a step
            if loaded is None or loaded * self.count != samples:
                return []
            sizes = [n for n in sizes if loaded % n == 0] if in_stages else [loaded]
        elif loaded is not None:
            sizes = [n for n in [loaded] if samples % n == 0]
        found = []
        for size in sizes:
            # How many of the step's micro-batches go through the stages in one batch:
            # all of them, those of a loader's batch, or as many as are fixed.
            count = samples // size
            together = count if self.count is None else count // self.count
            if fixed is not None:
                if count % fixed or (self.count is not None and together != fixed):
                    continue
                together = fixed
            found.append(Batch(size, count, together))
        return found

    def states_of(
        self, layout: dict[str, int], several: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield the knobs about model states that mean something in a layout."""
        # A knob is varied only where it changes something: what is kept between
        # micro-batches where there are several, copies on a node where groups are
        # wider, the optimizer's shard where there are replicas.
        gathers = layout["shard_degree"] > 1
        of_stage = self.hardware.devices // layout["pipeline_parallel_degree"]
        k = (
            min(self.hardware.ranks_per_node, of_stage)
            // layout["tensor_parallel_degree"]
        )
        kept = ["shards", *(["parameters", "gradients"] if gathers and several else [])]
        replicas = layout["shard_degree"] * layout["tensor_parallel_degree"] < of_stage
        # parts of all replicas would cut blocks of 8-bit states, which share a scale
        over_world = replicas and self.workload.states.bytes_each is None
        copies = ["auto", *(["node"] if layout["shard_degree"] > k > 1 else [])]
        # Mixed precision computes in bfloat16; otherwise parameters are computed with
        # as they are stored.
        dtype = "bfloat16" if self.workload.precision == "mixed" else None
        for keep in self._open("keep_between_micro_batches", kept):
            for copy in self._open(
                "reshard_after_forward", copies if keep == "shards" else ["auto"]
            ):
                for states in self._open(
                    "optimizer_shard", ["shard", *(["world"] if over_world else [])]
                ):
                    yield {
                        **layout,
                        "param_dtype": dtype,
                        "keep_between_micro_batches": keep,
                        "reshard_after_forward": copy,
                        "optimizer_shard": states,
                        **self.fixed,
                        EXPERTS: layout[EXPERTS],
                    }

    def later_knobs(self, stages: int) -> Iterator[dict[str, Any]]:
        """Yield the knobs that change no model states: recomputation, the loss's
        chunks, the pipeline's schedule."""
        # By falling memory: the walk looks at the last first, to see whether anything
        # fits.
        modes: list[Any] = [
            "none",
            "selective",
            "full",
            {"checkpoint": "full", "offload": True},
        ]
        modes = [
            mode
            for mode in modes
            if not isinstance(mode, str) or mode not in self.trace.untraced
        ]
        chunks = [None, 1024] if self.trace.heads else [None]
        schedules = [None] if stages == 1 else self._schedules(stages)
        fixed = self.fixed
        for mode in map(
            Activations.read,
            [fixed["activations"]] if "activations" in fixed else modes,
        ):
            # Recomputation goes before chunks of the loss, which only the last of
            # several stages has.
            tried = (
                chunks[:1]
                if stages > 1 and mode is not None and mode.checkpoint != "full"
                else chunks
            )
            for chunk in (
                [fixed["chunked_cross_entropy"]]
                if "chunked_cross_entropy" in fixed
                else tried
            ):
                for schedule in schedules:
                    named = {"activations": mode, "chunked_cross_entropy": chunk}
                    yield named if schedule is None else {**named, "pipeline": schedule}

    def _schedules(self, stages: int) -> list[str]:
        if "schedule" in self.pipeline:
            return [self.pipeline["schedule"]]
        # Which schedule wins follows mostly from how long a message takes beside a
        # stage's computation.
        between, tokens = self.hardware.links.inter, self.workload.sequence
        message = self.trace.block["full"].at(1, tokens).kept
        of_block, _ = computed_seconds(
            self.trace, self.hardware, "full", 1, 1, 1, tokens
        )
        computing = of_block * self.trace.blocks / stages
        slow = (
            between is not None
            and message / between.all_gather.bandwidth > _SLOW * computing
        )
        tried = _BEHIND_SLOW_LINKS if slow else _BEHIND_FAST_LINKS
        return [each for each in tried if stages * chunks_of(each) <= self.trace.blocks]
