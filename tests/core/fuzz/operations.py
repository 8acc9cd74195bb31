"""What a random training procedure is made of: one function per operation, on one
process and on ranks alike.

An operation is a dict, ``{"do": "clip", "how": "norm 2", "max": 0.1}``. `OPERATIONS`
has for each its function and the choices that the drawing has for its fields, all of
which have to occur in the cases of the normal run. The functions are written as a
user's loop is; where one process and ranks do something in other words, they ask the
`Run`.

A new operation: a function here, a line in `OPERATIONS`, and a place in the script
(`tests.core.fuzz.drawing`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smp_core.sharding.optimizer.grad_norm import NonfiniteGradNormError
from tests.core.fuzz.families import matching
from tests.core.fuzz.models import Adapted
from tests.core.fuzz.procedure import Run

Op = Mapping[str, Any]


def losses(run: Run, op: Op, *, call: int = 0) -> dict[int, torch.Tensor]:
    """The loss of each data rank whose batches this process sees."""
    found = {}
    for rank in run.data_ranks:
        generator = torch.Generator().manual_seed(1000 * op["data"] + 100 * call + rank)
        rows, path = (
            op["rows"][rank % len(op["rows"])],
            op["paths"][rank % len(op["paths"])],
        )
        x = torch.randn(
            rows, *run.sample_shape, generator=generator, dtype=torch.float64
        )
        output = run.call(x, path)
        found[rank] = output.square().mean() + output.sin().mean()
    run.end_call()
    return found


def mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """As over the ranks of data parallelism: on ranks of the only one there is."""
    return torch.stack(list(values)).mean()


def micro(run: Run, op: Op) -> None:
    """A micro-batch; ``calls`` forwards make its loss, whose backward pass runs once or
    (``twice``) again. Between them parameters with ``what`` in their names are frozen
    or trained again (``meanwhile``), or inside of each call."""
    wanted = op["meanwhile"].startswith("thaw")
    with run.holding(op["hold"] and op["around"] == "pass"):
        if op["meanwhile"].endswith("inside"):
            with run.ending_calls(lambda: set_trainable(run, op["what"], wanted)):
                every = [losses(run, op, call=call) for call in range(op["calls"])]
        else:
            every = [losses(run, op, call=call) for call in range(op["calls"])]
        for each in every:
            run.record("losses", {rank: loss.detach() for rank, loss in each.items()})
        total = mean([loss for each in every for loss in each.values()])
        if op["meanwhile"] in ("freeze", "thaw"):
            set_trainable(run, op["what"], wanted)
        # With all that was used frozen there is no backward pass, on any rank.
        if total.requires_grad:
            with run.holding(op["hold"]):
                total.backward(retain_graph=op["twice"])
                if op["twice"]:
                    total.backward()


def overflow(run: Run, op: Op) -> None:
    """A micro-batch in which one rank's loss is infinite, and the clipping that finds
    out."""
    found = losses(run, op)
    for rank in found:
        if rank == op["rank"]:
            found[rank] = found[rank] * math.inf
    mean(list(found.values())).backward()
    try:
        total = run.clip_grad_norm(0.1, 2.0, None)
    except NonfiniteGradNormError:
        run.record("clipping", "raised")
        run.abandon()
    else:
        run.record("norm is finite", bool(total.isfinite()))


def zero(run: Run, op: Op) -> None:
    """Drop gradients in one of the ways there are."""
    if op["how"] == "parameters":
        run.close()  # what a window holds is no parameter's ``.grad``
        for _, parameter in run.model.named_parameters():
            parameter.grad = None
    elif op["how"].startswith("module"):
        for model in run.models:
            model.zero_grad(set_to_none=op["how"] == "module")
    else:
        for optimizer in run.chosen(op["of"]):
            optimizer.zero_grad(set_to_none=op["how"] == "optimizer")


def freeze(run: Run, op: Op) -> None:
    set_trainable(run, op["what"], op["trainable"])


def set_trainable(run: Run, what: str, trainable: bool) -> None:
    for _, parameter in matching(run.model, what):
        parameter.requires_grad_(trainable)


def merge(run: Run, op: Op) -> None:
    """Add what adapters have learnt to the layers beside them, or take it away again;
    then as after any edit."""
    for module in run.model.modules():
        if isinstance(module, Adapted):
            module.merge(op["enabled"])
    run.weights_changed()


def clip(run: Run, op: Op) -> None:
    parameters = None if op["of"] is None else list(run.parameters_of(op["of"]))
    if op["how"] == "value":
        run.close()
        run.clip_grad_value(op["max"], parameters)
    else:
        run.record(
            "norm",
            run.clip_grad_norm(
                op["max"], float(op["how"].removeprefix("norm ")), parameters
            ),
        )


def norm(run: Run, op: Op) -> None:
    run.close()
    run.record("norm", run.grad_norm(float(op["type"])))


def evaluate(run: Run, op: Op) -> None:
    """A look at losses without training on them; ``mode`` "grad": their graph is
    dropped."""
    modes = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "grad": contextlib.nullcontext,
    }
    run.model.train(not op["eval"])
    with modes[op["mode"]]():
        found = losses(run, op)
    run.record("losses", {rank: loss.detach().clone() for rank, loss in found.items()})
    run.model.train()


@torch.no_grad()
def edit(run: Run, op: Op) -> None:
    """Change weights by hand between calls."""
    for _, parameter in matching(run.model, op["what"]):
        if op["how"] == "in place":
            parameter.mul_(0.9)
        elif op["how"] == "data":
            parameter.data.add_(0.05)
        else:
            parameter.copy_(parameter * 1.1)
    run.weights_changed()


class Deliberate(Exception):
    pass


@contextlib.contextmanager
def failing(module: nn.Module, where: str) -> Iterator[None]:
    """The module's forward raises when it is done, or its backward when it begins."""

    def refuse(*_: object) -> None:
        raise Deliberate

    def hook(_: nn.Module, __: object, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if where == "forward":
            refuse()
        elif tensor.requires_grad:
            tensor.register_hook(refuse)

    handle = module.register_forward_hook(hook)
    try:
        with contextlib.suppress(Deliberate):
            yield
    finally:
        handle.remove()


def fail(run: Run, op: Op) -> None:
    """A pass that fails in the middle, on all ranks, and is given up with all of its
    window."""
    if run.alone:
        run.abandon()
        return
    with (
        failing(run.model.get_submodule(op["module"]), op["where"]),
        run.holding(op["hold"]),
    ):
        total = mean(list(losses(run, op).values()))
        if total.requires_grad:
            total.backward()
    run.abandon()


def abandon(run: Run, op: Op) -> None:
    run.abandon()


def close(run: Run, op: Op) -> None:
    run.close()


def step(run: Run, op: Op) -> None:
    """A step closes an open window, of the model that it steps."""
    for optimizer in run.chosen(op["of"]):
        optimizer.step()
    run.close()
    run.record("gradients", run.gradients())


def step_with_closure(run: Run, op: Op) -> None:
    optimizer = run.optimizers[op["of"]]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = mean(list(losses(run, op).values()))
        if total.requires_grad:
            total.backward()
        return total

    total = optimizer.step(closure)
    run.record("has a loss", isinstance(total, torch.Tensor))
    run.close()
    run.record("gradients", run.gradients())


def round_trip(run: Run, op: Op) -> None:
    """An optimizer takes up its own state dict."""
    for optimizer in run.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


def learning_rate(run: Run, op: Op) -> None:
    """As a schedule does it: tensors in place."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(op["by"])
            else:
                group["lr"] *= op["by"]


def add_group(run: Run, op: Op) -> None:
    run.add_late_parameters()


def save(run: Run, op: Op) -> None:
    run.save(op["name"])


def load(run: Run, op: Op) -> None:
    """Go on from a checkpoint, in the same objects or (``knobs``) in new ones that may
    be sharded in another way."""
    run.load(op["name"], op["knobs"])


@dataclass(frozen=True)
class Operation:
    """``choices``: what the drawing chooses from for fields of the operation, all of
    which have to occur."""

    run: Callable[[Run, Op], None]
    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)


OPERATIONS: dict[str, Operation] = {
    "micro": Operation(
        micro,
        {
            "hold": (False, True),
            "calls": (1, 2),
            "twice": (False, True),
            "around": ("pass", "backward"),
            "meanwhile": ("nothing", "freeze", "thaw", "freeze inside", "thaw inside"),
        },
    ),
    "overflow": Operation(overflow),
    "zero": Operation(
        zero,
        {
            "how": (
                "optimizer",
                "optimizer zeros",
                "module",
                "module zeros",
                "parameters",
            )
        },
    ),
    "freeze": Operation(freeze, {"trainable": (False, True)}),
    "merge": Operation(merge, {"enabled": (True, False)}),
    "clip": Operation(clip, {"how": ("norm 2", "norm 1", "norm inf", "value")}),
    "norm": Operation(norm, {"type": ("2", "1", "inf")}),
    "evaluate": Operation(
        evaluate, {"mode": ("no_grad", "inference_mode", "grad"), "eval": (True, False)}
    ),
    "edit": Operation(edit, {"how": ("in place", "data", "copy")}),
    "fail": Operation(fail, {"where": ("forward", "backward"), "hold": (False, True)}),
    "abandon": Operation(abandon),
    "close": Operation(close),
    "step": Operation(step),
    "step_with_closure": Operation(step_with_closure),
    "round_trip": Operation(round_trip),
    "learning_rate": Operation(learning_rate),
    "add_group": Operation(add_group),
    "save": Operation(save),
    "load": Operation(load),
}
