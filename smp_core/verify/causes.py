"""Likely causes of a difference, from where it begins and from its size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from smp_core.verify.activations import STEP
from smp_core.verify.compare import (
    Comparison,
    Part,
    gradient_differences,
    losses_of,
    norm,
    updates,
)
from smp_core.verify.recorder import Record


def likely_causes(
    found: Comparison, ranks: Sequence[Record], alone: Record
) -> list[str]:
    """Return what may have caused the first difference, the likeliest first; empty
    where there is none."""
    if found.part is None:
        return []
    by_kind = {
        "run": lambda *_: iter(()),
        "samples": _of_samples,
        "start": _of_start,
        "activations": _of_activations,
        "loss": _of_loss,
        "gradients": _of_gradients,
        "weights": _of_weights,
        "replicas": lambda *_: iter((_MISSING_SYNC,)),
        "buffers": _of_buffers,
        "metrics": _of_metrics,
    }
    # Each kind of difference has its own list of causes.
    causes = list(by_kind[found.part.what](found, found.part, ranks, alone))
    # Replicas that hold different weights explain whatever else differs.
    replicas_differ = any(
        row.what == "replicas" and row.agrees is False for row in found.rows
    )
    if found.part.what not in ("samples", "replicas") and replicas_differ:
        causes.insert(0, _MISSING_SYNC)
    # Two lists may name the same cause.
    return list(dict.fromkeys(causes))


_MISSING_SYNC = (
    "missing sync: replicas hold different weights; gradients are not added up over all of them (a backward pass "
    "outside of the strategy or accelerator, parameters that are stepped by code of your own)"
)


def _of_samples(
    found: Comparison, part: Part, ranks: Sequence[Record], alone: Record
) -> Iterator[str]:
    if "several ranks" in part.words:
        yield (
            "data order: each rank reads the whole data or shuffles it with a seed of its own; leave the sampler to "
            "the trainer (use_distributed_sampler, accelerator.prepare), or give DistributedSampler this strategy's "
            "data_size and data_rank"
        )
    elif "one batch" in part.words:
        yield (
            "data order: ranks that hold one batch together (context, tensor, pipeline) have to read the same samples; "
            "deal them out by data_rank and data_size, and seed augmentations alike"
        )
    else:
        yield (
            "data order: a sampler or shuffle that depends on the rank or the number of ranks; samples are dropped, "
            "repeated, or come in other steps"
        )


def _of_start(
    found: Comparison, part: Part, ranks: Sequence[Record], alone: Record
) -> Iterator[str]:
    yield (
        f"initial weights: {part.where} is drawn or loaded differently where there are several ranks (a seed by rank, "
        "random numbers drawn on some ranks before the model is built, weights loaded on one rank only)"
    )


def _of_activations(
    found: Comparison, part: Part, ranks: Sequence[Record], alone: Record
) -> Iterator[str]:
    degrees = ranks[0].facts.get("degrees", {})
    # The first layer that differs is a BatchNorm: nothing else needs to be guessed.
    name = part.where
    if name in ranks[0].facts.get("BatchNorm per rank", []):
        yield (
            f"BatchNorm per rank: {name} normalises with the statistics of its rank's samples; use "
            "Trainer(sync_batchnorm=True) or convert_sync_batchnorm, or a norm without batch statistics"
        )
    # Random numbers come first: nothing else can be judged while they differ.
    draws = _draws(ranks, alone)
    if STEP in draws:
        yield _DRAWN_IN_THE_STEP
    if any(_is_around(drawn, name) for drawn in draws - {STEP}):
        yield (
            f"random numbers: {name} draws them in its forward (dropout that is still on, noise, masks), and ranks "
            "draw others than one process; numbers can agree only without"
        )
    # Then what each axis cuts: tokens, features, samples.
    if degrees.get("context", 1) > 1:
        yield (
            f"positions: {name or 'the model'} makes positions, a mask or a sum over tokens from the local length, "
            "where each rank holds a part of the sequence; take position_ids from the batch, attend by "
            "scaled_dot_product_attention"
        )
    if degrees.get("tensor", 1) > 1:
        yield (
            f"tensor parallelism: layers around {name or 'the model'} are split in a way that their forward does not "
            "stand (it reads a size, or mixes features); leave it out of the plan (tensor_parallel={'plan': ...})"
        )
    if ranks[0].data_size > 1:
        yield (
            f"samples are mixed: {name or 'the model'} computes over all samples of its batch (a mean, a norm, a "
            "queue, in-batch negatives), and a rank sees its own only"
        )
    yield f"rank-dependent code in the forward of {name or 'the model'}"


_DRAWN_IN_THE_STEP = (
    "random numbers: the training step draws them outside of modules (noise, timesteps, masks), and ranks draw others "
    "than one process; to compare, draw them where the data are made (Dataset, collate_fn), so that they belong to a "
    "sample"
)


def _draws(ranks: Sequence[Record], alone: Record) -> set[str]:
    return {drawn for record in (*ranks, alone) for drawn in record.draws}


def _is_around(drawn: str, name: str) -> bool:
    return (
        drawn == name
        or name.startswith(f"{drawn}.")
        or drawn.startswith(f"{name}.")
        or name == ""
    )


def _of_loss(
    found: Comparison, part: Part, ranks: Sequence[Record], alone: Record
) -> Iterator[str]:
    ours = losses_of(ranks)[part.step - 1]
    theirs = losses_of([alone])[part.step - 1]
    # A loss that is off by the number of ranks with other samples or tokens is divided
    # wrongly.
    factor = theirs / ours if ours else math.inf
    size = ranks[0].data_size * ranks[0].facts.get("degrees", {}).get("context", 1)
    if part.step == 1:
        # What the loss itself draws is in no activation.
        if STEP in _draws(ranks, alone):
            yield _DRAWN_IN_THE_STEP
        if size > 1 and _near(factor, size):
            yield (
                f"wrong divisor: the loss is a sum over samples or tokens, and the mean over {size} ranks is 1/{size} "
                "of that of one process; take a mean, or divide by the number over all ranks"
            )
        elif size > 1 and _near(factor, 1 / size):
            yield f"wrong divisor: the loss is {size} times that of one process; it is multiplied by the ranks"
        yield (
            "the loss weighs samples differently: a mean over targets of which ranks have different numbers (padding), "
            "in-batch negatives, or a term computed from one rank's samples only"
        )
    else:
        # The first step agreed: what it left behind did not.
        yield from _of_weights(found, part, ranks, alone)
        yield f"a state that grows apart before step {part.step}: buffers, a schedule counted in batches, an average"


def _of_gradients(
    found: Comparison, part: Part, ranks: Sequence[Record], alone: Record
) -> Iterator[str]:
    ours, theirs = ranks[0].gradients, alone.gradients
    # Without the gradients themselves only their norms are known.
    if part.step > 1 or ours is None or theirs is None:
        # Which parameter is off is not known; the ratio of norms is.
        factor = ranks[0].norms[part.step - 1] / max(alone.norms[part.step - 1], 1e-30)
        if not _near(factor, 1.0) and _is_simple(factor):
            yield f"wrong divisor: gradients are {factor:.4g} times those of one process"
        yield from _of_weights(found, part, ranks, alone)
        return
    # Which parameters differ, which have no gradient at all, and by what factor the
    # others are off.
    off = gradient_differences(ours, theirs, found.tolerance)
    limit = found.tolerance.gradients
    parted = [name for name, value in off.items() if not value <= limit]
    # A gradient that is exactly zero was never computed.
    lost = [
        name
        for name in parted
        if name in ours and norm(ours[name]) == 0.0 < norm(theirs.get(name, ours[name]))
    ]
    factors = {
        name: _factor(ours[name], theirs[name])
        for name in parted
        if name in ours and name in theirs
    }
    common = _common(list(factors.values()))
    # The words of requires_grad are certain; a gradient of zeros is nearly so.
    frozen = set(ranks[0].facts["frozen"]) ^ set(alone.facts["frozen"])
    if frozen & set(parted):
        yield (
            f"frozen part: {', '.join(sorted(frozen & set(parted))[:3])} are trained in one of the two only "
            "(requires_grad is changed by rank, by the number of ranks, or after the model was sharded)"
        )
        return
    which = (
        "all gradients"
        if len(parted) == len(off)
        else f"gradients of {', '.join(parted[:3])}"
    )
    if lost:
        yield (
            f"frozen part or lost hook: {', '.join(lost[:3])} get no gradient at this layout (frozen after it was "
            "sharded, a hook on a parameter that was replaced, a detach that depends on the rank)"
        )
        return
    # A few parameters point to their own code, all of them to the loss or the sum over
    # ranks.
    few = len(parted) < len(off)
    if few:
        yield (
            f"lost hook: {which} are changed in one of the two only (a hook on a parameter that was replaced when it "
            "was sharded, a second use of the parameter outside of the model's forward, a detach by rank)"
        )
    if common is not None and not _near(common, 1.0):
        yield (
            f"wrong divisor: {which} are {common:.4g} times those of one process (a sum where a mean is meant, a loss "
            "multiplied by ranks, micro-batches counted twice)"
        )
    elif not few:
        yield _MISSING_SYNC


def _of_weights(
    found: Comparison, part: Part, ranks: Sequence[Record], alone: Record
) -> Iterator[str]:
    first = ranks[0]
    # Updates, not weights: a weight that was never trained agrees with itself.
    ours, theirs = (
        (first.first, alone.first) if part.step == 1 else (first.end, alone.end)
    )
    here, there = updates(ours, first.start), updates(theirs, alone.start)
    still = [
        name for name, value in here.items() if norm(value) == 0.0 < norm(there[name])
    ]
    moved = [
        name for name, value in here.items() if norm(value) > 0.0 == norm(there[name])
    ]
    if still and len(still) < len(here):
        yield (
            f"frozen part: {', '.join(still[:3])} are trained on one process and stand still at this layout (not in "
            "the optimizer, which has a parameter of before sharding; frozen on some ranks)"
        )
    if moved:
        yield (
            f"frozen part: {', '.join(moved[:3])} stand still on one process and are trained at this layout "
            "(unfrozen, or given to the optimizer, where there are several ranks)"
        )
    # Half precision shows in what the optimizer is given, or in values that bfloat16
    # can hold.
    half = [
        dtype
        for dtype in (*first.facts.get("dtypes", []), *alone.facts.get("dtypes", []))
        if "16" in dtype
    ]
    rounded = [
        name
        for name, value in first.end.items()
        if _is_rounded(value) and not _is_rounded(alone.end[name])
    ]
    if half or rounded:
        which = (
            f"weights at this layout ({', '.join(rounded[:2])}) are values of bfloat16"
            if rounded
            else half[0]
        )
        yield (
            f"half-precision masters: {which}; a step in half precision rounds small updates away where one process "
            "keeps them, or the other way round; see master_dtype"
        )
    # One factor for all updates is a rate, not an optimizer.
    factors = {
        name: _factor(here[name], there[name])
        for name in here
        if norm(there[name]) > 0.0
    }
    common = _common(list(factors.values()))
    if common is not None and not _near(common, 1.0):
        yield (
            f"learning rate: all updates are {common:.4g} times those of one process (a rate scaled by the number of "
            "ranks, a schedule that is stepped more often)"
        )
    elif not still and not moved and not rounded:
        yield "the optimizer's step: it looks at a part of a tensor, or its options depend on the number of ranks"


def _of_buffers(
    found: Comparison, part: Part, ranks: Sequence[Record], alone: Record
) -> Iterator[str]:
    if ranks[0].facts.get("BatchNorm per rank"):
        yield (
            f"BatchNorm per rank: {part.where} holds the statistics of its rank's samples; use "
            "Trainer(sync_batchnorm=True) or convert_sync_batchnorm"
        )
    yield f"a buffer that is computed from one rank's samples or steps: {part.where}; average it over data_group"


def _of_metrics(
    found: Comparison, part: Part, ranks: Sequence[Record], alone: Record
) -> Iterator[str]:
    ours, theirs = ranks[0].metrics[part.where], alone.metrics[part.where]
    factor = ours / theirs if theirs else math.inf
    # What was reduced is the same on all ranks; one rank's share may be a simple part
    # of it by chance.
    values = [
        record.metrics[part.where] for record in ranks if part.where in record.metrics
    ]
    is_reduced = all(_near(value, ours) for value in values)
    if is_reduced and _is_simple(factor) and not _near(factor, 1.0):
        yield (
            f"a metric that sums: {part.where} is {factor:.4g} times that of one process; it is added up over ranks "
            "that hold copies, or summed where a mean is meant (or the other way round)"
        )
    else:
        yield (
            f"a metric of one rank: {part.where} is not reduced over the ranks (sync_dist=True, gather_for_metrics), "
            "or is a mean of means over unequal batches"
        )


def _is_rounded(tensor: Tensor) -> bool:
    """Return whether a tensor of a finer dtype holds values of bfloat16."""
    return (
        tensor.is_floating_point()
        and tensor.numel() > 8
        and torch.equal(tensor.bfloat16().to(tensor.dtype), tensor)
    )


def _factor(ours: Tensor, theirs: Tensor) -> float:
    """Return k for which ours is k times theirs; nan where it is no multiple."""
    size = norm(theirs)
    if size == 0.0:
        return math.nan
    # Least squares: the factor of the projection, and how much of ours is not along
    # theirs.
    factor = float((ours.double() * theirs.double()).sum()) / size**2
    rest = norm(ours.double() - factor * theirs.double()) / size
    return factor if rest <= 2e-2 * max(abs(factor), 1e-3) else math.nan


def _common(factors: Sequence[float]) -> float | None:
    """Return the one factor that nearly all have, within two percent; None where there
    are different ones."""
    known = sorted(factor for factor in factors if factor == factor)  # without nan
    if not known:
        return None
    # The median of all factors, and how many are near it.
    middle = known[len(known) // 2]
    near = [factor for factor in known if abs(factor - middle) <= 2e-2 * abs(middle)]
    return middle if len(near) >= 0.7 * len(factors) else None


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= 2e-2 * abs(other)


def _is_simple(factor: float) -> bool:
    """Return whether a factor is a small whole number or one over it."""
    for value in (factor, 1 / factor if factor else math.inf):
        if (
            math.isfinite(value)
            and 1 <= round(value) <= 64
            and _near(value, round(value))
        ):
            return True
    return False


def facts_in_words(facts: Mapping[str, object]) -> list[str]:
    """Return what was changed or left alone in all runs, for the end of the table."""
    off = facts.get("dropout off")
    if isinstance(off, list) and off:
        return [
            f"dropout was off in {len(off)} modules ({off[0]}, ...); --keep-dropout leaves it on"
        ]
    return []
