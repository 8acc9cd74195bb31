"""Comparison: the records of a layout's ranks against that of one process, and where
the two part first."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from smp_core.verify.activations import (
    Moments,
    Place,
    difference,
    in_fewer_calls,
    over_ranks,
)
from smp_core.verify.recorder import Record
from smp_core.verify.tolerance import Tolerance


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        what: was compared.
        found: in words.
        difference: the largest; None: nothing to measure.
        limit: the largest that is allowed.
        agrees: None: not compared.
    """

    what: str
    found: str
    difference: float | None = None
    limit: float | None = None
    agrees: bool | None = True


@dataclass(frozen=True)
class Part:
    """The place where a layout and one process part first.

    Attributes:
        step: from 1; 0: before training.
        what: "run" (it failed), "samples", "start", "activations", "loss", "gradients",
            "weights", "replicas", "buffers" or "metrics".
        where: the module or parameter; "" where it is none.
        words: a sentence.
    """

    step: int
    what: str
    where: str
    words: str


@dataclass
class Comparison:
    """The result for one layout.

    Attributes:
        words: the layout.
        rows: of the table.
        part: the first difference; None: there is none.
        causes: likely ones, the likeliest first.
        missing: what was not compared, and why.
        reference: how the one process trained: on joined batches, or on one after
            another.
    """

    words: str
    tolerance: Tolerance
    rows: list[Row] = field(default_factory=list)
    part: Part | None = None
    causes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    reference: str = ""

    @property
    def agrees(self) -> bool:
        return self.part is None

    def note(self, row: Row, part: Part | None = None) -> None:
        """Add a row, and where it disagrees the place, unless one of an earlier step,
        or before in this, is known."""
        self.rows.append(row)
        if row.agrees is False:
            place = part or Part(0, row.what, "", row.found)
            # Rows come in the order of a step, so the first of a step is where it
            # parts; later rows may belong to earlier steps.
            if self.part is None or place.step < self.part.step:
                self.part = place

    def note_difference(
        self, row: str, step: int, what: str, where: str, words: str
    ) -> None:
        """Add a row that disagrees, and its place, in the same words."""
        self.note(Row(row, words, agrees=False), Part(step, what, where, words))


def compare(
    words: str,
    ranks: Sequence[Record],
    alone: Record,
    tolerance: Tolerance,
    one_by_one: bool = False,
) -> Comparison:
    """Compare a layout with one process.

    Args:
        ranks: the records of all ranks, in order.
        alone: that of the one process, which trained on the batches of these ranks.
        one_by_one: whether it took them one after another, so that it called each
            module more often.
    """
    # One process then called each module once for each rank's batch: its calls are put
    # together as ranks' are.
    if one_by_one:
        alone = replace(
            alone,
            events=[
                *over_ranks([in_fewer_calls(alone.events, ranks[0].data_size)]).values()
            ],
        )
    # In the order in which a step computes, so that the first difference is where the
    # two part.
    found = Comparison(words, tolerance)
    first = ranks[0]
    found.missing += sorted({each for record in ranks for each in record.missing})
    _compare_samples(found, ranks, alone)
    _compare_start(found, first, alone)
    _compare_activations(found, ranks, alone)
    losses, theirs = losses_of(ranks), losses_of([alone])
    _compare_by_step(found, "loss", losses, theirs, tolerance.loss)
    _compare_gradients(found, ranks, alone)
    norms = first.norms
    _compare_by_step(found, "gradient norm", norms, alone.norms, tolerance.gradients)
    _compare_weights(found, first, alone, one_by_one)
    _compare_replicas(found, ranks)
    _compare_metrics(found, ranks, alone)
    return found


# Samples


def _compare_samples(found: Comparison, ranks: Sequence[Record], alone: Record) -> None:
    # Ranks that hold one batch together have to have read the same.
    # Reversed, so that the first reader of a batch stands for it.
    readers = {record.data_rank: record for record in reversed(ranks)}
    for record in ranks:
        if record.samples != readers[record.data_rank].samples:
            pair = f"ranks {readers[record.data_rank].rank} and {record.rank}"
            words = f"{pair} hold one batch and read different samples"
            found.note_difference("samples", 1, "samples", "", words)
            return
    # Ranks that hold different batches have to share no sample.
    for step in range(len(alone.samples)):
        counts = Counter(
            hash_ for reader in readers.values() for hash_ in reader.samples[step]
        )
        # Sets: a sample that one rank reads twice is not shared by several.
        inside = Counter(
            hash_ for reader in readers.values() for hash_ in set(reader.samples[step])
        )
        # Samples may be equal: one process shows how many of a step are.
        equal = Counter(alone.samples[step])
        shared = [
            hash_ for hash_, times in inside.items() if times > max(1, equal[hash_])
        ]
        if shared:
            words = f"{len(shared)} of {len(counts)} samples of step {step + 1} are read by several ranks"
            found.note_difference("samples", step + 1, "samples", "", words)
            return
    # All ranks together have to read what one process reads, step by step.
    consumed = []
    for step in range(len(alone.samples)):
        by_reader = [reader.samples[step] for reader in readers.values()]
        consumed.append(Counter(itertools.chain.from_iterable(by_reader)))
    # A batch without tensors (lists of texts) has nothing to hash.
    total = sum(sum(step.values()) for step in consumed)
    if not total:
        found.rows.append(Row("samples", "no tensors in the batches", agrees=None))
        return
    found.note(
        _row_of_order(consumed, total, alone.natural),
        Part(1, "samples", "", _OTHER_SAMPLES),
    )


_OTHER_SAMPLES = (
    "the ranks together read other samples than one process reads of the same data"
)


def _row_of_order(
    consumed: Sequence[Counter[str]], total: int, natural: Sequence[str] | None
) -> Row:
    """Return the row for the ranks' samples of each step beside those that one process
    reads."""
    read = f"{total} samples in {len(consumed)} steps, none twice"
    if natural is None:
        return Row(
            "samples",
            f"{read}; their order is not compared (they are made anew when read)",
        )
    # Natural samples are those of one epoch; what ranks read of the next is not
    # compared.
    place, steps = 0, 0
    same = True
    for step in consumed:
        size = sum(step.values())
        if place + size > len(natural):
            break
        same = same and Counter(natural[place : place + size]) == step
        place, steps = place + size, steps + 1
    if same:
        whole = (
            ""
            if steps == len(consumed)
            else f" up to step {steps}, where its epoch ends"
        )
        return Row(
            "samples", f"{read}; those that one process reads, step by step{whole}"
        )
    # The same samples, of another order: another finding than other samples.
    if sum(consumed[:steps], Counter()) == Counter(natural[:place]):
        return Row(
            "samples",
            f"{read}; those that one process reads, in other steps",
            agrees=False,
        )
    return Row("samples", f"{read}; {_OTHER_SAMPLES}", agrees=False)


# Step 1: weights, activations, loss, gradients


def norm(tensor: Tensor) -> float:
    """Return the 2-norm of a tensor of any dtype, in float64."""
    return float(tensor.double().norm())


def finite_norm(tensor: Tensor) -> float:
    """Return the same of the finite elements: a mask has others, too."""
    return norm(tensor.double().nan_to_num(0.0, 0.0, 0.0))


def minus(one: Tensor, other: Tensor) -> Tensor:
    """Return the difference of two tensors in float64; 0 where both are the same
    infinity, or nan."""
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).masked_fill(same, 0.0)


def relative(one: float, other: float) -> float:
    """Return the difference of two numbers relative to the second; 0 where both are the
    same infinity, or nan."""
    if one == other or (one != one and other != other):
        return 0.0
    return abs(one - other) / max(abs(other), 1e-30)


def _share_off(
    ours: Tensor, theirs: Tensor, measure: Tensor, floor: float = 0.0
) -> float:
    """Return how far two tensors are apart, relative to the norm of a third, or to a
    floor where that is smaller."""
    return norm(minus(ours, theirs)) / max(finite_norm(measure), floor, 1e-30)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _unlike(one: Tensor, other: Tensor) -> float:
    """Return how far tensors of whole numbers (counts, codes, flags) are off: not at
    all, or beyond any limit."""
    return 0.0 if torch.equal(one, other) else math.inf


def _compare_start(found: Comparison, first: Record, alone: Record) -> None:
    # Names first: another model cannot be compared.
    missing = sorted(alone.start.keys() ^ first.start.keys())
    if missing:
        words = f"{_names(missing)}: only in one of the two models"
        found.note_difference("weights at the start", 0, "start", missing[0], words)
        return
    # Relative to each tensor's own norm.
    off = {}
    for name, value in alone.start.items():
        if _is_float(value):
            off[name] = _share_off(first.start[name], value, value)
        else:
            off[name] = _unlike(first.start[name], value)
    limit = 1e-2
    # Only rounding of the dtype is allowed: nothing was computed yet.
    if found.tolerance.dtype.startswith("float64"):
        limit = 1e-12
    elif found.tolerance.dtype == "float32":
        limit = 1e-6
    worst = _worst(off)
    row = _row("weights at the start", worst, off, limit)
    # `not <=` here and below: a nan is a difference.
    many = sum(not value <= limit for value in off.values())
    words = f"{many} of {len(off)} tensors begin with other values, {worst} first"
    found.note(row, Part(0, "start", worst, words))


def _compare_activations(
    found: Comparison, ranks: Sequence[Record], alone: Record
) -> None:
    together = _moments_of(ranks, alone)
    limit = found.tolerance.activations
    compared = 0
    skipped = []
    worst = 0.0
    part: Part | None = None
    # In the order of the calls, so that the first module that is off is the one that
    # made it.
    for there in alone.events:
        here = together.get(there.place)
        off = None if here is None else difference(here, there)
        # Not called there, or cut so that its elements are no multiple.
        if off is None:
            skipped.append(there.name)
            continue
        compared += 1
        worst = max(worst, off)
        if off > limit and part is None:
            part = _part_of(there, off)
    if skipped:
        names = list(dict.fromkeys(skipped))
        found.missing.append(
            f"activations of {_names(names)} (not called alike, or cut in another way)"
        )
    if not compared:
        found.rows.append(Row("activations", "none in common", agrees=None))
        return
    shown = f"of {len({event.name for event in alone.events})} modules in step 1"
    found.note(Row("activations", shown, worst, limit, part is None), part)


def _moments_of(ranks: Sequence[Record], alone: Record) -> dict[Place, Moments]:
    """Return the moments of a layout. With pipeline stages, a module around the blocks
    counts on the stage that has it: others have a stand-in there, which gives zeros."""
    by_stage: dict[int, list[list[Moments]]] = {}
    for record in ranks:
        # A micro-batch of a pipeline is a call of its own; all of a batch count as one.
        events = in_fewer_calls(record.events, record.facts.get("calls of a batch", 1))
        by_stage.setdefault(record.facts.get("stage", 0), []).append(events)
    stages = [over_ranks(by_stage[stage]) for stage in sorted(by_stage)]
    together: dict[Place, Moments] = {}
    for event in alone.events:
        having = [moments[event.place] for moments in stages if event.place in moments]
        # A stand-in gives zeros, so the stage whose moments are not zero has the
        # module.
        working = [moments for moments in having if moments.magnitude != 0.0] or having
        if working:
            together[event.place] = working[0]
    return together


def _part_of(event: Moments, off: float) -> Part:
    """Return the place of the first moments that differ."""
    name = event.name or "the model"
    if not event.goes_in:
        words = f"comes out of {name} differs by {off:.1e}, what went in agrees"
        # A number is a loss: of a model that is given its labels, or of a criterion.
        if event.dims == 0:
            return Part(1, "loss", event.name, f"the loss that {words}")
        return Part(1, "activations", event.name, f"what {words}")
    # Nothing that came out before differs: it was computed in the forward of the module
    # around.
    around = event.name.rpartition(".")[0]
    parent = around or "the model"
    words = f"what {parent} gives {name} differs by {off:.1e}, and what its modules gave before agrees"
    return Part(1, "activations", event.name, words)


def losses_of(records: Sequence[Record]) -> list[float]:
    """Return the loss of each step, over micro-batches and ranks; nan where the script
    has none."""
    steps = []
    for step in range(len(records[0].losses)):
        values = [value for record in records for value in record.losses[step]]
        # The mean over micro-batches and ranks, as gradients are averaged.
        steps.append(math.fsum(values) / len(values) if values else math.nan)
    return steps


def _compare_by_step(
    found: Comparison,
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    limit: float,
) -> None:
    """Compare a number of each step; differences of later steps may have grown, and are
    allowed more."""
    # A loss of inf or nan on both sides is the script's own.
    off = [relative(*pair) for pair in zip(ours, theirs, strict=True)]
    if all(value != value for value in (*ours, *theirs)):
        found.rows.append(Row(what, "the script gave none", agrees=None))
        return
    # Differences grow with the steps: each step is allowed one limit more.
    grown = [value / (1 + step) for step, value in enumerate(off)]
    # `not <=` instead of `>`: a nan is a difference.
    parted = [step for step, value in enumerate(grown) if not value <= limit]
    shown = f"{ours[-1]:.7g} against {theirs[-1]:.7g} in step {len(ours)}"
    part = None
    if parted:
        step = parted[0]
        words = f"{what} of step {step + 1} is {ours[step]:.7g} and on one process {theirs[step]:.7g}"
        shown = f"{ours[step]:.7g} against {theirs[step]:.7g} in step {step + 1}"
        part = Part(
            step + 1, "gradients" if what == "gradient norm" else "loss", "", words
        )
    found.note(Row(what, shown, max(grown), limit, not parted), part)


def _compare_gradients(
    found: Comparison, ranks: Sequence[Record], alone: Record
) -> None:
    ours, theirs = ranks[0].gradients, alone.gradients
    if ours is None or theirs is None:
        found.rows.append(Row("gradients of step 1", "not compared", agrees=None))
        return
    off = gradient_differences(ours, theirs, found.tolerance)
    worst = _worst(off)
    row = _row("gradients of step 1", worst, off, found.tolerance.gradients)
    limit = found.tolerance.gradients
    many = [name for name, value in off.items() if not value <= limit]
    words = f"gradients of {len(many)} of {len(off)} parameters differ: {_names(many)}"
    found.note(
        row, Part(1, "gradients", _last_in_forward(many, alone.events) or worst, words)
    )


def _last_in_forward(names: Sequence[str], events: Sequence[Moments]) -> str:
    """Return the parameter whose module comes last in the forward: where a backward
    pass parts first."""
    places = {
        event.name: number for number, event in enumerate(events) if not event.goes_in
    }
    return max(
        names, key=lambda name: places.get(name.rpartition(".")[0], -1), default=""
    )


def gradient_differences(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: Tolerance
) -> dict[str, float]:
    """Return how far each gradient is off, relative to its norm. Gradients that are
    rounding are held against what others are."""
    typical = root_mean_square(theirs.values())
    off = {}
    for name in dict.fromkeys([*theirs, *ours]):
        if name not in ours or name not in theirs:
            off[name] = 1.0
            continue
        # A parameter's gradient may be nothing but rounding; it is held against what
        # gradients of this model are.
        floor = typical * tolerance.floor * math.sqrt(theirs[name].numel())
        off[name] = _share_off(ours[name], theirs[name], theirs[name], floor)
    return off


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """Return that of all elements of several tensors."""
    given = list(tensors)
    elements = sum(tensor.numel() for tensor in given)
    return math.sqrt(
        math.fsum(finite_norm(tensor) ** 2 for tensor in given) / max(elements, 1)
    )


# Later steps


def updates(
    weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what training has changed in each floating-point tensor, in float64."""
    return {
        name: minus(value, start[name])
        for name, value in weights.items()
        if _is_float(value)
    }


def weight_differences(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
) -> dict[str, float]:
    """Return how far each weight is off, relative to the norm of what training changed
    in it; whole numbers have to be the same."""
    changes = updates(theirs, start)
    typical = root_mean_square(changes.values())
    # Likewise: a weight that hardly moves is held against what others do.
    off = {}
    for name, change in changes.items():
        floor = 1e-2 * typical * math.sqrt(change.numel())
        off[name] = _share_off(ours[name], theirs[name], change, floor)
    for name, value in theirs.items():
        if not _is_float(value):
            off[name] = _unlike(ours[name], value)
    return off


def _compare_weights(
    found: Comparison, first: Record, alone: Record, one_by_one: bool
) -> None:
    rounding = _rounding(alone, found.tolerance)
    if rounding:
        found.missing.append(
            f"weights of {_names(rounding)} (their gradients are rounding, which Adam makes steps of)"
        )
    # One process called each module once for each rank's batch, and counted that.
    counts = [name for name, value in alone.end.items() if not _is_float(value)]
    if one_by_one and counts:
        found.missing.append(
            f"{_names(counts)} (whole numbers; one process took more micro-batches)"
        )
        rounding += counts
    # Behind the first step, and behind the last if there is another.
    steps = [(1, first.first, alone.first)]
    if len(alone.norms) > 1:
        steps.append((len(alone.norms), first.end, alone.end))
    for step, ours, theirs in steps:
        off = weight_differences(ours, theirs, alone.start)
        off = {name: value for name, value in off.items() if name not in rounding}
        worst, limit = _worst(off), found.tolerance.weights
        buffers = [name for name in off if name in first.facts.get("buffers", [])]
        many = [name for name, value in off.items() if not value <= limit]
        words = f"{len(many)} of {len(off)} tensors differ behind step {step}: {_names(many)}"
        kind = "buffers" if many and set(many) <= set(buffers) else "weights"
        found.note(
            _row(f"weights behind step {step}", worst, off, limit),
            Part(step, kind, worst, words),
        )


def _rounding(alone: Record, tolerance: Tolerance) -> list[str]:
    if alone.gradients is None or tolerance.dtype.startswith("float64"):
        return []
    # Adam divides a gradient by its own size, so rounding alone makes a full step.
    typical = root_mean_square(alone.gradients.values())
    small = typical * tolerance.floor
    return [
        n
        for n, g in alone.gradients.items()
        if 0 < norm(g) < small * math.sqrt(g.numel())
    ]


def _compare_replicas(found: Comparison, ranks: Sequence[Record]) -> None:
    """Compare each rank's own copy of all parameters with those of the others."""
    steps = len(ranks[0].norms)
    # Parameters, against the first rank that holds each.
    apart: dict[str, list[int]] = {}
    for record in ranks:
        # Ranks hold other parameters on other pipeline stages: the first holder is
        # compared with.
        for name, digest in record.digests.items():
            holder = next(each for each in ranks if name in each.digests)
            if not _same(digest, holder.digests[name]):
                apart.setdefault(name, []).append(record.rank)
    if apart:
        name, others = next(iter(apart.items()))
        words = f"{len(apart)} parameters are not the same on all replicas: {name} on rank {others[0]}"
        found.note_difference("replicas", steps, "replicas", name, words)
    else:
        found.rows.append(Row("replicas", "all ranks hold the same weights"))
    # Buffers, against the first rank.
    first = ranks[0]
    names = []
    for name in first.buffers:
        # Not every stage has every buffer.
        if not all(_same_buffer(record, first, name) for record in ranks):
            names.append(name)
    if names:
        words = f"{len(names)} buffers differ between ranks: {_names(names)}"
        found.note_difference("buffers", steps, "buffers", names[0], words)


def _same(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(map(_equal, one, other))


def _equal(one: float, other: float) -> bool:
    return relative(one, other) <= 1e-12


def _same_buffer(record: Record, first: Record, name: str) -> bool:
    return name not in record.buffers or _same(
        record.buffers[name], first.buffers[name]
    )


def _compare_metrics(found: Comparison, ranks: Sequence[Record], alone: Record) -> None:
    ours, theirs = ranks[0].metrics, alone.metrics
    off = {}
    for name in sorted(ours.keys() & theirs.keys()):
        off[name] = relative(ours[name], theirs[name])
    lone = sorted(ours.keys() ^ theirs.keys())
    if lone:
        found.missing.append(f"logged {_names(lone)}: only in one of the two")
    if not off:
        return
    # Logged numbers come from all steps, and may have grown apart like the loss.
    limit = found.tolerance.loss * (1 + len(alone.norms))
    worst = _worst(off)
    many = [name for name, value in off.items() if not value <= limit]
    shown = f"{worst}: {ours[worst]:.7g} against {theirs[worst]:.7g}"
    words = (
        f"logged {worst} is {ours[worst]:.7g} and on one process {theirs[worst]:.7g}"
    )
    others = [name for name in many if name != worst]
    if others:
        words += f"; {_names(others)} differ as well"
    found.note(
        Row("logged numbers", shown, off[worst], limit, not many),
        Part(len(alone.norms), "metrics", worst, words),
    )


def _worst(off: Mapping[str, float]) -> str:
    # nan is worse than any number.
    return max(
        off,
        key=lambda name: math.inf if off[name] != off[name] else off[name],
        default="",
    )


def _row(what: str, worst: str, off: Mapping[str, float], limit: float) -> Row:
    value = off.get(worst, 0.0)
    return Row(
        what, f"worst: {worst}" if worst else "none", value, limit, value <= limit
    )


def _names(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
