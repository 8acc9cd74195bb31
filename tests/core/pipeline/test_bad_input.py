"""What a step of several stages cannot do is an error on the rank that finds it, and no
rank goes on."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from smp_core.checkpoint import full_state_dict
from smp_core.config import SmpConfig
from smp_core.engine.parallel_model import ParallelModel
from smp_core.entry import parallelize
from smp_core.pipeline import TiedGradients
from smp_core.pipeline.batches import split_batch
from smp_core.sharding.gradients.divergence import RanksDiverged
from smp_core.sharding.optimizer.kinds import register_tensorwise
from tests.core.branching import Block, batch_of
from tests.core.pipeline.cases import Case
from tests.core.tensor_parallel.model_cases import loss_of
from tests.harness import run_ranks


class ClipsInside(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        return super().step(closure)


@register_tensorwise
class EachByItself(torch.optim.SGD):
    """Looks across each tensor."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


def said(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misuse() -> dict[str, str]:
    parallel: ParallelModel = Case("plain", micro_batches=1).parallel()
    pipeline, model = parallel.pipeline, parallel.module
    assert pipeline is not None
    tokens = torch.zeros(2, 6, dtype=torch.long)

    def step(call: Callable[[], Any], batch: Any = tokens) -> Callable[[], Any]:
        return lambda: pipeline.evaluate(call, batch)

    def twice() -> Any:
        model(tokens)
        return model(tokens)

    def one_by_one() -> Any:
        hidden = model.words(tokens)
        for block in model.blocks:
            hidden = block(hidden)
        return model.head(model.norm(hidden))

    def outside_on_rank_0() -> Any:
        with torch.no_grad():
            return (
                model(tokens) if dist.get_rank() == 0 else step(lambda: model(tokens))()
            )

    found = {
        "outside": said(lambda: model(tokens)),
        "calls": said(outside_on_rank_0),
        "shapes": said(step(lambda: model(tokens), tokens[dist.get_rank() :])),
        "different": said(step(lambda: model(tokens), tokens + dist.get_rank())),
        "never": said(step(lambda: model(tokens) if dist.get_rank() == 0 else 0)),
        "pickled": said(lambda: torch.save(model.state_dict(), io.BytesIO())),
        "whole": said(lambda: full_state_dict(model)),
        "number": said(
            lambda: [
                float(parameter.detach().sum()) for parameter in model.parameters()
            ]
        ),
        "optimizer": said(
            lambda: parallel.prepare_optimizer(torch.optim.LBFGS(model.parameters()))
        ),
        "unknown": said(
            lambda: parallel.prepare_optimizer(ClipsInside(model.parameters()))
        ),
        "known": said(
            lambda: parallel.prepare_optimizer(EachByItself(model.parameters()))
        ),
    }
    only_first = (("fp8", {"include": ["blocks.0.*"]}),)
    found["fp8"] = said(
        lambda: Case("plain", micro_batches=1, knobs=only_first).parallel()
    )
    together = torch.optim.AdamW(model.parameters(), foreach=True)
    parallel.prepare_optimizer(together)
    found["kernel"] = str(together.param_groups[0]["foreach"])
    reference = Case("plain", micro_batches=1).parallel().module
    with torch.no_grad():
        found["twice"] = said(step(twice))
        found["one by one"] = said(step(one_by_one))
        found["another"] = said(step(lambda: model(tokens) - reference(tokens)))
    return found


def test_misuse_is_refused_in_words() -> None:
    first, last = run_ranks(misuse, 2)
    for found in (first, last):
        assert "PlainModel was called outside of a step" in found["outside"]
        assert re.match(
            r"ValueError: pipeline stages went apart: rank 0: a call of the model outside of a step with tensors of "
            r"\(2, 6\) \(test_bad_input.py:\d+ in outside_on_rank_0\); rank 1: an evaluation step with tensors of "
            r"\(2, 6\) \(test_bad_input.py:\d+ in .*\). All of them have to make the same calls",
            found["calls"],
        )
        assert re.search(
            r"rank 0: an evaluation step .* \(2, 6\) .* rank 1: .* \(1, 6\)",
            found["shapes"],
        )
        assert "pipeline stages read different batches" in found["different"]
        assert "PicklingError" in found["pickled"]
        assert "lies on other pipeline stages" in found["whole"]
        assert "lies on other pipeline stages" in found["number"]
        assert "LBFGS looks across all its parameters" in found["optimizer"]
        assert (
            "ClipsInside is not known to step each tensor by itself" in found["unknown"]
        )
        assert found["known"] == "nothing"
        assert "ValueError: pipeline stage 1: fp8: no layer of" in found["fp8"]
        assert found["kernel"] == "True", (
            "tensors of other stages keep no kernel from taking all others at once"
        )
        assert "called twice in one step" in found["twice"], (
            "what fails in a first forward is told to all"
        )
        assert "a step called PlainBlock by itself" in found["one by one"]
        assert "PlainModel was called inside a step of PlainModel" in found["another"]
    assert "has to call the model once" in last["never"]


def test_batches_of_several_loaders_are_cut_whatever_their_number() -> None:
    """Two loaders of two samples; a list of text for each sample is refused."""
    batch = [[torch.arange(2), torch.ones(2, 3)] for _ in range(2)]
    parts = split_batch(batch, 2)
    assert [part[1][0].tolist() for part in parts] == [[0], [1]]
    with pytest.raises(ValueError, match="a list of 2 str, one for each sample"):
        split_batch([torch.arange(2), ["a", "b"]], 2)


def lengths() -> list[float]:
    """Losses of batches of two lengths, without and with gradients."""
    parallel: ParallelModel = Case("plain", micro_batches=1).parallel()
    pipeline = parallel.pipeline
    assert pipeline is not None
    losses = []
    for tokens in (
        torch.ones(2, 6, dtype=torch.long),
        torch.ones(4, 3, dtype=torch.long),
    ) * 2:
        with torch.no_grad():
            seen = pipeline.evaluate(lambda: loss_of(parallel.module, tokens), tokens)  # noqa: B023
        trained = pipeline.train(
            [lambda: loss_of(parallel.module, tokens)],  # noqa: B023
            lambda loss: loss,
            1.0,
            tokens,
        )
        losses.append(
            pipeline.share(float(F.l1_loss(seen, trained[0])) if trained else None)
        )
        parallel.window.abandon()
    return losses


def test_batches_of_several_shapes_go_through_one_pipeline() -> None:
    assert run_ranks(lengths, 2) == [[0.0] * 4] * 2


class Ordered(nn.Module):
    """Blocks of equal shapes, in an order that may change after they were recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8)).double()
        self.order = list(range(8))
        self.dummy_inputs: Any = batch_of(0, 0, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


def diverging(orders: dict[int, list[int]]) -> list[str]:
    """For each rank that takes its stage's blocks in another order than its neighbour:
    what all are told."""
    torch.manual_seed(0)
    knobs = SmpConfig(shard_degree=2, pipeline_parallel_degree=2, units=["Block"])
    parallel = parallelize(Ordered(), knobs)
    model, pipeline, window = parallel.module, parallel.pipeline, parallel.window
    assert pipeline is not None
    said = []

    def loss() -> torch.Tensor:
        return model(batch_of(0, 0, 0)).square().mean()

    for alone, order in orders.items():
        model.order = order if dist.get_rank() == alone else list(range(8))
        pipeline.train([loss, loss], lambda loss: loss, 0.5, batch_of(0, 0, 0))
        with pytest.raises(RanksDiverged) as error:
            window.close()
        assert not window.is_open and all(
            parameter.grad is None for parameter in model.parameters()
        )
        said.append(str(error.value))
    with torch.no_grad():
        model(batch_of(0, 0, 0))
    with pytest.raises(RanksDiverged) as error:
        parallel.require_same_collectives()
    said.append(str(error.value))
    model.order = list(range(8))
    window.abandon()
    pipeline.train([loss, loss], lambda loss: loss, 0.5, batch_of(0, 0, 0))
    window.close()
    return said


def test_ranks_of_one_stage_that_go_apart_stop_all_stages() -> None:
    """Blocks 0 to 3 are on ranks 0 and 1, the others on ranks 2 and 3."""
    results = run_ranks(
        diverging, 4, {1: [0, 2, 1, *range(3, 8)], 2: [*range(5), 6, 5, 7]}
    )
    assert all(said == results[0] for said in results)
    first, last, evaluated = results[0]
    assert (
        "rank 0: all_gather of 'blocks.1' in forward; rank 1: all_gather of 'blocks.2' in forward"
        in first
    )
    assert (
        "rank 2: all_gather of 'blocks.6' in forward; rank 3: all_gather of 'blocks.5' in forward"
        in last
    )
    assert "rank 2: all_gather of 'blocks.6'" in evaluated and "rank 0" not in evaluated


def test_an_end_of_a_window_that_fails_loses_no_earlier_gradients() -> None:
    tied = nn.Parameter(torch.ones(2))
    tied.grad = torch.full((2,), 3.0)
    earlier: Any = TiedGradients([tied], None, None, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="lost"), earlier.added_up():
        tied.grad = torch.zeros(2)
        raise RuntimeError("a rank was lost")
    assert torch.equal(tied.grad, torch.full((2,), 3.0))
