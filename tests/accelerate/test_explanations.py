"""Errors of other libraries about a sharded model: what they mean, and what to type,
stands under them."""

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
from smp_core.watch import rank_watch
from tests.accelerate.program_parts import make_model
from tests.accelerate.programs import SHARED
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
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def local_sgd() -> None:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2):
            raise AssertionError("replicas drift apart")

    def masked() -> None:
        model.head.weight.data[torch.arange(23) > 3] = 0

    def gradients() -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(model(torch.zeros(2, 4, dtype=torch.long)).sum(), trained)

    def norms() -> None:
        torch.tensor([parameter.norm() for parameter in model.parameters()])

    def cast() -> None:
        model(torch.zeros(2, 4, dtype=torch.long))
        model.to(torch.bfloat16)
        model(torch.zeros(2, 4, dtype=torch.long))

    def peer_gone() -> None:
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:49052."
        )

    def channels_last() -> None:
        images = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.Conv2d(4, 4, 3))
        accelerator.prepare(images).to(memory_format=torch.channels_last)

    def peer_aborted() -> None:
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:48512: Connection reset by peer."
        )

    def server_gone() -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    cases = {
        "peer": peer_gone,
        "aborted": peer_aborted,
        "server": server_gone,
        "mixed": masked,
        "norms": norms,
        "copy": lambda: copy.deepcopy(model),
        "numpy": lambda: model.head.weight.detach().cpu().numpy(),
        "LocalSGD": local_sgd,
        "gradients": gradients,
        "cast": cast,
        "layout": channels_last,
        "other views": lambda: torch.ones(2, 3).T.view(-1),
    }
    return {name: message_with_notes(case) for name, case in cases.items()}


def explained_logits(knobs: dict[str, Any]) -> dict[str, str]:
    accelerator = SmpAccelerator(smp_config=knobs)
    model = make_model("gpt2", 0)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    tokens = torch.arange(8).view(1, 8)

    def largest_logit(inputs: dict[str, torch.Tensor]) -> None:
        outputs = model(**inputs)
        assert outputs.loss is not None
        outputs.logits.max()

    def without_labels() -> None:
        model(input_ids=tokens).logits.square().mean().backward()

    def elsewhere() -> None:
        outputs = model(input_ids=tokens, labels=None)
        outputs.loss.backward()

    cases = {
        "logits": lambda: largest_logit({"input_ids": tokens, "labels": tokens}),
        "as said": without_labels,
        "elsewhere": elsewhere,
    }
    return {name: message_with_notes(case) for name, case in cases.items()}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize(
    "knobs", [SHARED["tensor"], {"chunked_cross_entropy": 3}], ids=["tensor", "chunks"]
)
def test_logits_that_are_not_there_beside_a_loss_are_said(
    knobs: dict[str, Any],
) -> None:
    for said in run_ranks(explained_logits, 2, {**knobs, "shard_degree": 1}):
        assert "inputs.pop('labels')" in said["logits"]
        assert said["as said"] == "nothing was raised"
        assert (
            "NoneType" in said["elsewhere"] and "torch-smp: " not in said["elsewhere"]
        )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_errors_that_are_not_ours_say_what_to_type() -> None:
    for said in run_ranks(explained, 2):
        assert "Every rank has to make each call" in said["peer"]
        assert "has to be left by all" in said["aborted"]
        assert "Every rank" not in said["server"]
        # From 2.15 on torch writes into shards through a mask.
        assert (
            said["mixed"] == "nothing was raised" or "parallel.call(" in said["mixed"]
        )
        assert "write float(x) for each x" in said["norms"]
        assert "before it is prepared" in said["copy"]
        assert "parameter.full_tensor().numpy(), on all ranks" in said["numpy"]
        assert "read parameter.grad" in said["gradients"]
        assert "Cast it before it is prepared" in said["cast"]
        assert "leave model.to(memory_format=...)" in said["layout"]
        assert "memory_format" not in said["other views"]
        assert (
            "accelerator.no_sync(model)" in said["LocalSGD"]
            and "LocalSGD" in said["LocalSGD"]
        )
