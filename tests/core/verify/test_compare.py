"""Records that differ in one thing: where a layout parts from one process, and what is
said to have caused it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp_core.verify.activations import (
    STEP,
    Activations,
    Moments,
    difference,
    over_ranks,
)
from smp_core.verify.causes import likely_causes
from smp_core.verify.child import turn_off_functions
from smp_core.verify.compare import Comparison, compare
from smp_core.verify.recorder import Record, Recorder, _digest, turn_off_dropout
from smp_core.verify.report import Report
from smp_core.verify.request import Request
from smp_core.verify.tolerance import tolerance_of

FLOAT64 = tolerance_of({}, float64=True)


def a_record(rank: int, data_size: int) -> Record:
    """One step of a model of two linear layers, as a rank of `data_size` or as one
    process sees it."""
    generator = torch.Generator().manual_seed(0)
    names = ("first.weight", "second.weight")
    start = {
        name: torch.randn(3, 3, generator=generator, dtype=torch.float64)
        for name in names
    }
    gradients = {
        name: torch.randn(3, 3, generator=generator, dtype=torch.float64)
        for name in names
    }
    first = {name: start[name] - 0.1 * gradients[name] for name in names}
    samples = ["a", "b"]
    return Record(
        rank,
        data_size,
        data_rank=rank,
        data_size=data_size,
        losses=[[2.0]],
        norms=[1.0],
        samples=[samples if data_size == 1 else [samples[rank]]],
        natural=samples if data_size == 1 else None,
        gradients=gradients,
        start=start,
        first=first,
        end=first,
        digests={name: (float(value.sum()), 0.0) for name, value in first.items()},
        metrics={"seen": 2.0},
        facts={
            "frozen": [],
            "BatchNorm per rank": [],
            "dtypes": ["float64"],
            "degrees": {"shard": data_size},
        },
    )


def compared(change: Callable[[list[Record]], None]) -> Comparison:
    ranks = [a_record(rank, 2) for rank in range(2)]
    change(ranks)
    alone = a_record(0, 1)
    alone.events = [_out(0, 0, 2.0), _out(1, 3, 10.0)]
    found = compare("2 ranks", ranks, alone, FLOAT64)
    found.causes = likely_causes(found, ranks, alone)
    return found


def test_equal_records_agree() -> None:
    found = compared(lambda ranks: None)
    assert found.agrees and found.causes == []
    assert all(row.agrees is not False for row in found.rows)


def scale_loss(ranks: list[Record]) -> None:
    for record in ranks:
        record.losses = [[1.0]]


def read_twice(ranks: list[Record]) -> None:
    ranks[1].samples = [["a"]]


def other_start(ranks: list[Record]) -> None:
    ranks[0].start["first.weight"][0, 0] += 1e-6


def scale_gradients(ranks: list[Record]) -> None:
    gradients = ranks[0].gradients
    assert gradients is not None
    ranks[0].gradients = {name: 2 * value for name, value in gradients.items()}


def one_gradient(ranks: list[Record]) -> None:
    gradients = ranks[0].gradients
    assert gradients is not None
    gradients["second.weight"] = gradients["second.weight"] + 1.0


def nan_gradient(ranks: list[Record]) -> None:
    gradients = ranks[0].gradients
    assert gradients is not None
    gradients["second.weight"] = gradients["second.weight"] * float("nan")


def no_gradient(ranks: list[Record]) -> None:
    gradients = ranks[0].gradients
    assert gradients is not None
    gradients["second.weight"].zero_()


def freeze(ranks: list[Record]) -> None:
    ranks[0].facts["frozen"] = ["first.weight"]
    assert ranks[0].gradients is not None
    del ranks[0].gradients["first.weight"]


def double_updates(ranks: list[Record]) -> None:
    record = ranks[0]
    record.first = record.end = {
        name: 2 * value - record.start[name] for name, value in record.first.items()
    }


def round_weights(ranks: list[Record]) -> None:
    record = ranks[0]
    record.first = record.end = {
        name: value.bfloat16().double() for name, value in record.end.items()
    }


def part_replicas(ranks: list[Record]) -> None:
    ranks[1].digests["first.weight"] = (0.0, 0.0)


def part_buffers(ranks: list[Record]) -> None:
    for record in ranks:
        record.buffers = {"norm.running_mean": (float(record.rank), 0.0)}
        record.facts["BatchNorm per rank"] = ["norm"]


def sum_metric(ranks: list[Record]) -> None:
    for record in ranks:
        record.metrics["seen"] = 4.0


def own_metrics(ranks: list[Record]) -> None:
    """Rank 0's share is half of the whole by chance."""
    ranks[0].metrics, ranks[1].metrics = (
        {"seen": 1.0, "loss": 1.9},
        {"seen": 3.0, "loss": 2.1},
    )


def loss_of_the_model(ranks: list[Record]) -> None:
    """A model that is given its labels returns a mean over each rank's targets: loss
    first, logits agree."""
    for record in ranks:
        record.losses = [[2.1]]
        record.events = [_out(0, 0, 2.1), _out(1, 3, 5.0)]


def _out(number: int, dims: int, total: float) -> Moments:
    return Moments(("out of", "", 0, number), 1, dims, total, total, total)


def noise_in_the_loss(ranks: list[Record]) -> None:
    scale_loss(ranks)
    for record in ranks:
        record.draws = [STEP]


@pytest.mark.parametrize(
    ("change", "what", "where", "cause"),
    [
        (scale_loss, "loss", "", "wrong divisor: the loss is a sum"),
        (read_twice, "samples", "", "data order"),
        (other_start, "start", "first.weight", "initial weights"),
        (
            scale_gradients,
            "gradients",
            "first.weight",
            "wrong divisor: all gradients are 2 times",
        ),
        (one_gradient, "gradients", "second.weight", "lost hook"),
        (
            nan_gradient,
            "gradients",
            "second.weight",
            "lost hook: gradients of second.weight",
        ),
        (no_gradient, "gradients", "second.weight", "frozen part or lost hook"),
        (freeze, "gradients", "first.weight", "frozen part"),
        (double_updates, "weights", "", "learning rate: all updates are 2 times"),
        (round_weights, "weights", "", "half-precision masters"),
        (part_replicas, "replicas", "first.weight", "missing sync"),
        (part_buffers, "buffers", "norm.running_mean", "BatchNorm per rank"),
        (sum_metric, "metrics", "seen", "a metric that sums: seen is 2 times"),
        (own_metrics, "metrics", "seen", "a metric of one rank: seen"),
        (loss_of_the_model, "loss", "", "the loss weighs samples differently"),
        (noise_in_the_loss, "loss", "", "random numbers: the training step draws them"),
    ],
)
def test_a_difference_is_found_with_its_place_and_cause(
    change: Callable[[list[Record]], None], what: str, where: str, cause: str
) -> None:
    found = compared(change)
    assert found.part is not None and found.part.what == what
    assert found.part.where == where or not where
    assert found.causes and found.causes[0].startswith(cause)
    assert "PARTS from one process" in str(Report([found]))


def test_samples_that_are_equal_in_the_data_are_read_by_several_ranks() -> None:
    ranks, alone = [a_record(rank, 2) for rank in range(2)], a_record(0, 1)
    for record in ranks:
        record.samples = [["a"]]
    alone.samples, alone.natural = [["a", "a"]], ["a", "a"]
    assert compare("2 ranks", ranks, alone, FLOAT64).agrees


def test_samples_are_compared_up_to_the_end_of_the_epoch_that_is_known() -> None:
    """Ranks begin a second epoch within the steps that are looked at, of whose order a
    loader has told nothing."""
    ranks, alone = [a_record(rank, 2) for rank in range(2)], a_record(0, 1)
    for record in (*ranks, alone):
        record.losses, record.norms = [[2.0], [2.0]], [1.0, 1.0]
        record.samples.append(["b"] if record.rank == 0 else ["a"])
    alone.samples[1] = ["b", "a"]
    found = compare("2 ranks", ranks, alone, FLOAT64)
    assert found.agrees and "up to step 1, where its epoch ends" in found.rows[0].found
    ranks[1].samples[0] = ["c"]
    assert not compare("2 ranks", ranks, alone, FLOAT64).agrees


def test_the_earliest_step_counts() -> None:
    """A loss of step 2 comes before gradients in the table, and behind those of step 1
    in time."""

    def later(ranks: list[Record]) -> None:
        for record in ranks:
            record.losses, record.norms = [[2.0], [3.0]], [1.0, 1.0]
        one_gradient(ranks)

    ranks = [a_record(rank, 2) for rank in range(2)]
    later(ranks)
    alone = a_record(0, 1)
    alone.losses, alone.norms, alone.samples = (
        [[2.0], [2.0]],
        [1.0, 1.0],
        [["a", "b"], []],
    )
    for record in ranks:
        record.samples.append([])
    found = compare("2 ranks", ranks, alone, FLOAT64)
    assert found.part is not None and (found.part.step, found.part.what) == (
        1,
        "gradients",
    )


class Net(nn.Module):
    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.first, self.drop, self.second = (
            nn.Linear(4, 4),
            nn.Dropout(0.3),
            nn.Linear(4, 1),
        )
        self.centred = centred

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x))
        if self.centred:
            x = x - x.mean(0)
        return self.second(x)


class DropPath(nn.Module):
    """As of timm and Transformers, with a layer of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_prob, self.attn_drop, self.p, self.rate = 0.1, 0.2, 0.3, 0.4
        self.dropped = DropBlock2d()


class DropBlock2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = 0.9


class Powers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = 0.5


def test_dropout_is_turned_off_in_layers_of_any_class_and_under_any_name() -> None:
    model = nn.Sequential(DropPath(), Powers(), nn.Dropout1d(0.5), nn.LSTM(2, 2))
    assert turn_off_dropout(model) == ["0", "0.dropped", "2"]
    off = model[0]
    assert (off.drop_prob, off.attn_drop, off.p, off.dropped.p) == (0, 0, 0, 0)
    assert (off.rate, model[1].p) == (0.4, 0.5)


def _with_dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.alpha_dropout(x, 0.3, True), p=0.5, training=True)


def test_functions_drop_nothing_whatever_number_a_forward_gives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = ("dropout", "dropout1d", "dropout2d", "dropout3d")
    alpha = ("alpha_dropout", "feature_alpha_dropout")
    for name in (*functions, *alpha):
        monkeypatch.setattr(F, name, getattr(F, name))  # put back afterwards
    turn_off_functions()
    for name in (*functions, *alpha):
        # Dims behind batch and channels.
        dims = int(name[7:-1]) if name.endswith("d") else 1
        x = torch.ones(8, 8, *[2] * dims)
        assert torch.equal(getattr(F, name)(x, 0.5, True), x)
        assert torch.equal(getattr(F, name)(x, p=0.5, training=True), x)
    assert torch.equal(F.dropout(x, 0.5), x)
    assert torch.equal(F.dropout(x, 1.0), torch.zeros_like(x))
    assert torch.equal(F.dropout(x, 1.0, False), x)
    assert torch.equal(torch.jit.script(_with_dropout)(x), x)


@pytest.mark.parametrize("centred", [False, True])
def test_moments_of_ranks_are_those_of_one_process_unless_samples_mix(
    centred: bool,
) -> None:
    """The first difference is what is computed between two modules, in the forward of
    the one around them."""
    torch.manual_seed(0)
    model = Net(centred).double()
    assert turn_off_dropout(model) == ["drop"]
    data = torch.randn(8, 4, dtype=torch.float64)
    runs = []
    for batches in ([data], list(data.chunk(2))):
        events = []
        for batch in batches:
            seen = Activations(model)
            model(batch)
            seen.close()
            events.append(seen.events)
        runs.append(events)
    together = over_ranks(runs[1])
    apart = [
        event.place[:2]
        for event in runs[0][0]
        if (difference(together[event.place], event) or 0.0) > 1e-9
    ]
    assert apart[:1] == ([("into", "second")] if centred else [])


def test_imaginary_parts_of_activations_are_compared() -> None:
    """Fourier layers give complex numbers, which may differ by their imaginary parts
    alone."""
    model = nn.Sequential(nn.Identity())
    data, runs = torch.randn(2, 3, dtype=torch.complex128), []
    for values in (data, data.real + 1.5j * data.imag):
        seen = Activations(model)
        model(values)
        seen.close()
        runs.append({event.place: event for event in seen.events})
    assert runs[0] and runs[0].keys() == runs[1].keys()
    assert all(
        (difference(runs[1][place], event) or 0.0) > 1e-9
        for place, event in runs[0].items()
    )


def trained_record(gradient_turn: float = 1.0, weight_turn: float = 0.0) -> Record:
    """A step of a model with complex weights: imaginary parts of gradients times one
    number, weights plus another."""
    model, recorder = (
        ComplexNet(),
        Recorder(Request("one process", "not written", steps=2)),
    )
    recorder.begin(model, None)
    loss = model(torch.ones(2, dtype=torch.complex128)).real
    recorder.loss(loss.detach())
    recorder.enter_backward()
    loss.backward()
    gradient = model.weight.grad
    assert gradient is not None
    gradient.imag.mul_(gradient_turn)
    recorder.gradients()
    with torch.no_grad():
        model.weight.sub_(0.1 * gradient).add_(weight_turn * 1j)
    recorder.step_ended()
    recorder.record.end = recorder.record.first
    return recorder.record


class ComplexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.tensor([0.5 + 1.0j, 1.0 - 0.5j], dtype=torch.complex128)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).abs().square().sum().to(x.dtype)


@pytest.mark.parametrize(
    ("turns", "what"),
    [({"gradient_turn": 2.0}, "gradients"), ({"weight_turn": 0.1}, "weights")],
)
def test_imaginary_parts_of_gradients_and_weights_are_compared(
    turns: dict[str, float], what: str
) -> None:
    found = compare("1 rank", [trained_record(**turns)], trained_record(), FLOAT64)
    assert found.part is not None and (found.part.what, found.part.where) == (
        what,
        "weight",
    )
    assert compare("1 rank", [trained_record()], trained_record(), FLOAT64).agrees


def test_random_numbers_are_noticed_in_the_innermost_module() -> None:
    model = Net(False)
    seen = Activations(model)
    model(torch.randn(2, 4))
    seen.close()
    assert seen.draws == ["drop"]


@pytest.mark.parametrize(
    "place", ["before", "between", "behind", "by the loader", "nowhere"]
)
def test_random_numbers_of_a_steps_own_code_are_noticed(place: str) -> None:
    """Noise and timesteps are drawn around modules; what reading a batch draws is not
    the step's."""
    model = Net(False)
    seen = Activations(model)
    x = torch.randn(2, 4)
    if place == "by the loader":
        torch.rand(1)
    seen.begin_batch()
    for now in ("before", "between"):
        if place == now:
            x = x + torch.rand_like(x)
        x = model.drop(model.first(x))
    loss = model.second(x).mean()
    if place == "behind":
        loss = loss * torch.rand(())
    seen.end_forward()
    torch.rand(1)
    seen.close()
    drawn = place in ("before", "between", "behind")
    assert (STEP in seen.draws) == drawn and "drop" in seen.draws


def test_later_steps_are_not_looked_at() -> None:
    """What a module draws in step 2, when nothing sees modules any more, is not the
    step's own code's."""
    model = Net(False)
    seen = Activations(model)
    seen.close()
    seen.begin_batch()
    model(torch.randn(2, 4))
    seen.end_forward()
    assert seen.draws == []


def test_copies_and_means_of_copies_are_no_difference() -> None:
    """What several ranks hold whole counts once; a mean of each rank's samples is
    averaged."""
    model = nn.MSELoss()
    runs = []
    data = torch.randn(4, dtype=torch.float64)
    for part in (data, *data.chunk(2)):
        seen = Activations(model)
        model(part.clone().requires_grad_(), torch.zeros_like(part))
        seen.close()
        runs.append(copy.copy(seen.events))
    (alone, *ranks) = runs
    loss = next(event for event in alone if not event.goes_in)
    assert difference(over_ranks(ranks)[loss.place], loss) == pytest.approx(
        0.0, abs=1e-12
    )
    assert difference(over_ranks([alone, alone])[loss.place], loss) == 0.0


def with_buffer(record: Record, value: torch.Tensor) -> Record:
    """A record of a model with one buffer more, and a number that is infinite."""
    for weights in (record.start, record.first, record.end):
        weights["buffer"] = value
    record.facts["buffers"] = ["buffer"]
    record.buffers = {"buffer": _digest(value)}
    record.metrics["best"] = float("inf")
    record.losses, record.norms = [[float("inf")]], [float("inf")]
    return record


MASK = torch.full((3, 3), float("-inf"), dtype=torch.float64).triu(1)


@pytest.mark.parametrize(
    ("here", "there", "what"),
    [
        (MASK, MASK, None),
        (MASK - torch.eye(3), MASK, "start"),
        (-MASK, MASK, "start"),
        (torch.tensor([3, 4]), torch.tensor([3, 4]), None),
        (torch.tensor([3, 5]), torch.tensor([3, 4]), "start"),
        (torch.tensor([True]), torch.tensor([False]), "start"),
    ],
    ids=["mask", "finite", "sign", "numbers", "other numbers", "flags"],
)
def test_masks_of_infinity_and_whole_numbers_are_compared(
    here: torch.Tensor, there: torch.Tensor, what: str | None
) -> None:
    ranks = [with_buffer(a_record(rank, 2), here) for rank in range(2)]
    found = compare("2 ranks", ranks, with_buffer(a_record(0, 1), there), FLOAT64)
    assert (found.part and found.part.what) == what


def test_counts_that_grow_apart_are_found_on_ranks_and_beside_one_process() -> None:
    ranks = [with_buffer(a_record(rank, 2), torch.tensor(0)) for rank in range(2)]
    alone = with_buffer(a_record(0, 1), torch.tensor(0))
    for record, seen in zip((*ranks, alone), (1, 1, 2), strict=True):
        record.first = record.end = {**record.first, "buffer": torch.tensor(seen)}
        record.buffers = {"buffer": _digest(torch.tensor(seen))}
    found = compare("2 ranks", ranks, alone, FLOAT64)
    assert found.part is not None
    assert (found.part.what, found.part.where) == ("buffers", "buffer")
    # One process that takes each rank's batch by itself counts more of them.
    assert compare("2 ranks", ranks, alone, FLOAT64, one_by_one=True).agrees
    ranks[1].buffers = {"buffer": _digest(torch.tensor(0))}
    found = compare("2 ranks", ranks, alone, FLOAT64, one_by_one=True)
    assert found.part is not None and "between ranks" in found.part.words


def test_a_loss_that_is_nan_on_one_side_only_differs() -> None:
    ranks = [a_record(rank, 2) for rank in range(2)]
    alone = a_record(0, 1)
    alone.losses = [[float("nan")]]
    found = compare("2 ranks", ranks, alone, FLOAT64)
    assert found.part is not None and found.part.what == "loss"


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_activations_around_infinities_are_compared(value: float) -> None:
    """Scores are masked with -inf before a softmax."""
    model, runs = nn.Sequential(nn.Identity()), []
    scores = torch.arange(6.0).reshape(2, 3)
    masked = scores.masked_fill(scores > 4, value)
    less = scores.masked_fill(scores > 3, value)
    for values in (masked, masked, masked + 1, less):
        seen = Activations(model)
        model(values)
        seen.close()
        runs.append({event.place: event for event in seen.events})
    same, more, fewer = (
        [difference(run[place], event) for place, event in runs[0].items()]
        for run in runs[1:]
    )
    assert same and set(same) == {0.0}
    assert all(off is not None and off > 1e-9 for off in (*more, *fewer))
