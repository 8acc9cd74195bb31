"""Errors of other libraries about a sharded model: what they mean, and what to type, stands under them."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.local_sgd import LocalSGD

from accelerate_smp import SmpAccelerator
from smp_core import rank_watch
from tests.core.models import TroubledModel
from tests.harness import run_ranks


def message_with_notes(case: Callable[[], Any]) -> str:
    """What is printed of an error that nobody catches."""
    try:
        case()
    except Exception as error:
        printed = io.StringIO()
        # A process that has come so far ends, but this one is needed for other cases.
        with redirect_stderr(printed), mock.patch.object(rank_watch, "end_within"):
            sys.excepthook(type(error), error, error.__traceback__)
        return printed.getvalue()
    return "nothing was raised"


def explained() -> dict[str, str]:
    accelerator = SmpAccelerator(smp_config={"shard_degree": 2})
    model = TroubledModel()
    teacher, shadow = copy.deepcopy(model), [p.detach().clone() for p in model.parameters()]
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def local_sgd() -> None:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2):
            raise AssertionError("replicas drift apart")

    def penalty() -> None:
        loss = model(torch.zeros(2, 4, dtype=torch.long)).sum() + sum(
            parameter.square().sum() for parameter in model.parameters()
        )
        accelerator.backward(loss)

    def average() -> None:
        for kept, parameter in zip(teacher.parameters(), model.parameters(), strict=True):
            kept.data.mul_(0.9).add_(parameter.detach(), alpha=0.1)

    def diffusers_average() -> None:
        with torch.no_grad():
            for kept, parameter in zip(shadow, model.parameters(), strict=True):
                kept.sub_(0.1 * (kept - parameter))

    def gradients() -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(model(torch.zeros(2, 4, dtype=torch.long)).sum(), trained)

    def peer_gone() -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:49052.")

    cases = {
        "peer": peer_gone,
        "submodule": lambda: model.head(torch.randn(2, 8)),
        "copy": lambda: copy.deepcopy(model),
        "LocalSGD": local_sgd,
        "average": average,
        "diffusers": diffusers_average,
        "teacher's state": lambda: teacher.load_state_dict(model.state_dict()),
        "gradients": gradients,
        "penalty": penalty,
    }
    return {name: message_with_notes(case) for name, case in cases.items()}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_errors_that_are_not_ours_say_what_to_type() -> None:
    for said in run_ranks(explained, 2):
        assert "Every rank has to make each call" in said["peer"]
        assert "forward_methods=" in said["submodule"] and "parallel.call(" in said["submodule"]
        assert "sum(p.square().sum().full_tensor() for p in model.parameters())" in said["penalty"]
        assert "before it is prepared" in said["copy"]
        for name in ("average", "diffusers", "teacher's state"):
            assert "Make the copy after prepare" in said[name] and "prepare(model, teacher)" in said[name], name
            assert "forward_methods" not in said[name], name
        assert "read parameter.grad" in said["gradients"]
        assert "accelerator.no_sync(model)" in said["LocalSGD"] and "LocalSGD" in said["LocalSGD"]
