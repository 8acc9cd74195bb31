"""The time of a step of Megatron-LM with tensor, data and pipeline degrees, as the
planner's constants have it.

    layer     what one tensor rank computes (:mod:`megatron_model`, traced), recomputing all; and six all-reduces of
              [B, S, E] over the tensor ranks, which are waited for: two in forward, two when it runs again, two in
              backward
    stage     its layers; and, where there are other stages, an activation and a gradient of which each tensor rank
              sends its part. The last stage has the head and the loss too
    step      1F1B: the last stage works through all micro-batches, the others fill and drain once. Then all-reduces of
              float32 gradients over the data ranks, which are waited for, and AdamW

Tensor ranks are neighbours in a node, data ranks come next and stages last, as Megatron
places them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import megatron_model
from planner_fit import (
    EMPTYING,
    Case,
    Constants,
    Row,
    fitted_of,
    refilled,
    remembered,
)

from smp_core.cluster.links import Links
from smp_core.planner.devices import DEVICES
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_trace import Figures, ModelTrace
from smp_core.planner.time import STEP_BYTES, pass_seconds
from smp_core.planner.trace import trace_model

VOCABULARY = 51200
STATE_BYTES = 16
"""Of an element while a step's passes run, in float16: parameter and gradient, and in
float32 the master and AdamW's two (megatron/arguments.py: gradients are added up in
float32 for bfloat16 alone)."""

PASSES = 3
"""Forward, again in backward, and backward."""

START = {"products_A100": 0.6, "link": 0.6, "network": 0.6, "launching": 1e-3}
"""Where the fit of the constants starts. The share of the memory's bandwidth is the
planner's and not fitted: the kernels that are traced are those that ran, and runs of
one size cannot tell it from the share of products."""


@dataclass(frozen=True)
class Run:
    """The degrees and the batch of a step."""

    layers: int
    tensor: int
    data: int
    stages: int
    micro_batch: int
    micro_batches: float
    sequence: int

    @classmethod
    def of(cls, row: Row) -> Run:
        """Read a published row."""
        names = ("layers", "tensor", "data", "pipeline", "micro_batch")
        layers, tensor, data, stages, micro_batch = (int(row[name]) for name in names)
        micro_batches = int(row["global_batch"]) / data / micro_batch
        return cls(
            layers,
            tensor,
            data,
            stages,
            micro_batch,
            micro_batches,
            int(row["sequence"]),
        )


@cache
def traced(
    width: int, layers: int, heads: int, sequence: int, tensor: int
) -> ModelTrace:
    """Trace one tensor rank's part of a model."""
    print(
        f"tracing Megatron's GPT: width {width}, {layers} layers, tensor {tensor}",
        flush=True,
    )
    fields = {
        "width": width,
        "layers": layers,
        "heads": heads,
        "vocabulary": VOCABULARY,
    }
    megatron_model.FIELDS.update(fields, tokens=sequence, tensor=tensor)
    return trace_model("megatron_model:build", sequence)


def tensor_sum(links: Links, tensor: int, n_bytes: float) -> float:
    """Return the seconds of an all-reduce over tensor ranks: inside nodes, and over the
    nodes that they span."""
    return _all_reduce(
        links,
        min(tensor, links.ranks_per_node),
        max(tensor // links.ranks_per_node, 1),
        n_bytes,
    )


def data_sum(links: Links, run: Run, n_bytes: float) -> float:
    """Return the seconds of an all-reduce over data ranks, of which some share a
    node."""
    inside = min(max(links.ranks_per_node // run.tensor, 1), run.data)
    return _all_reduce(links, inside, run.data // inside, n_bytes)


def _all_reduce(links: Links, inside: int, nodes: int, n_bytes: float) -> float:
    seconds = 0.0
    if inside > 1:
        assert links.intra is not None
        seconds += links.intra.seconds("all_reduce", inside, n_bytes)
    if nodes > 1:
        assert links.inter is not None
        seconds += links.inter.seconds("all_reduce", nodes, n_bytes / inside)
    return seconds


def step_seconds(
    run: Run, layer: Figures, rest: Figures, parameters: float, hardware: Hardware
) -> float:
    """Return the seconds of a step.

    Args:
        layer, rest: one tensor rank's figures of a layer, and of embedding, head and
            loss, for one micro-batch.
        parameters: of all layers and the rest on one tensor rank.
    """
    links = hardware.links
    activation = layer.kept  # a layer that runs again keeps its input alone
    of_layer = sum(pass_seconds(layer, 1, 1, hardware)) + 6 * tensor_sum(
        links, run.tensor, activation
    )
    of_head = sum(pass_seconds(rest, 1, 1, hardware))

    of_stage = run.layers / run.stages * of_layer
    if run.stages > 1:
        assert links.inter is not None
        # Two ranks, half from each.
        of_stage += 2 * links.inter.seconds(
            "all_gather", 2, 2 * activation / run.tensor
        )
    worked = run.micro_batches * (of_stage + of_head) + (run.stages - 1) * of_stage

    own = parameters / run.stages
    summed = data_sum(links, run, 4 * own)
    updated = STEP_BYTES * own / (hardware.device.hbm * hardware.fitted.moving)
    return worked + summed + updated


def taken_again(
    run: Run, layer: Figures, rest: Figures, parameters: float, hardware: Hardware
) -> float:
    """Return the GiB of a step that the allocator frees and takes again.

    With stages the host waits for the device at each message (its
    p2p_communication.py), so that only one pass is ahead. What two sums of each layer
    read is marked.
    """
    if run.tensor == 1:
        return 0.0
    layers, input_bytes = run.layers / run.stages, layer.kept
    waiting = min(run.stages, run.micro_batches)
    others = STATE_BYTES * parameters / run.stages
    others += waiting * layers * input_bytes
    # The first of several stages has most inputs, and no logits.
    others += rest.kept if run.stages == 1 else 0.0
    groups = 1 + sum(degree > 1 for degree in (run.tensor, run.data, run.stages))
    one = refilled(2 * layers * input_bytes, others, groups, hardware.device)
    return PASSES * run.micro_batches * one


def predictor(row: Row) -> Callable[[Constants], float]:
    """Return the function that predicts a published row from constants."""
    run = Run.of(row)
    heads = int(row["heads"])
    trace = traced(int(row["hidden"]), run.layers, heads, run.sequence, run.tensor)
    hardware = Hardware(int(row["gpus"]) // 8, 8, DEVICES["a100-80g"], 1600)
    layer = trace.block["full"].at(run.micro_batch, run.sequence)
    rest = trace.rest["none"].at(run.micro_batch, run.sequence)

    again = taken_again(run, layer, rest, trace.parameters, hardware)

    def predict(constants: Constants) -> float:
        machines = replace(hardware, fitted=fitted_of(constants, "A100"))
        return step_seconds(run, layer, rest, trace.parameters, machines)

    seconds = remembered(predict, hardware)
    return lambda constants: seconds(constants) + again * constants.get(EMPTYING, 0.0)


def megatron(rows: list[Row]) -> list[Case]:
    """Return the published rows with their predictions."""
    return [
        Case(
            row,
            row["parameters_billion"] + "B",
            float(row["step_ms"]) / 1e3,
            predictor(row),
        )
        for row in rows
    ]
