"""torch.save and pickle write whole tensors or refuse, never this rank's part in
silence."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from smp_core.checkpoint import full_state_dict
from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.harness import run_ranks


def pickled(degree: int, **knobs: Any) -> dict[str, Any]:
    """What each way to pickle says, or the whole sum of what it wrote."""
    config = SmpConfig(shard_degree=degree, **knobs)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    handle = parallelize(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    handle.prepare_optimizer(optimizer)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()

    def saved(state: Any) -> Any:
        file = io.BytesIO()
        try:
            torch.save(state, file)
        except pickle.PicklingError as error:
            return str(error)
        file.seek(0)
        return torch.load(file)  # weights_only: plain tensors alone

    first = next(model.parameters())
    return {
        "weights": saved(model.state_dict()),
        "optimizer": saved(optimizer.state_dict()),
        "parameter": saved(first),
        "whole": saved(full_state_dict(handle.model_state())),
        "own part": saved(getattr(first, "to_local", lambda: first)().detach()),
    }


def test_a_sharded_tensor_is_not_pickled() -> None:
    first, second = run_ranks(pickled, 2, 2)
    for seen in (first, second):
        for what in ("weights", "optimizer", "parameter"):
            assert (
                "this rank's part alone" in seen[what]
                and "get_state_dict" in seen[what]
            ), what
    assert first["own part"].shape == (3, 6) and second["own part"].shape == (2, 6)
    assert first["whole"]["0.weight"].shape == (5, 6) and second["whole"] == {}


def test_what_every_rank_holds_whole_is_pickled_as_plain_tensors() -> None:
    """A partition group of one, also where FSDP2 casts and tensors are DTensors."""
    for seen in run_ranks(pickled, 2, 1, param_dtype="bfloat16"):
        for what in ("weights", "optimizer", "parameter"):
            assert not isinstance(seen[what], str), seen[what]
        assert type(seen["weights"]["0.weight"]) is torch.Tensor and seen["weights"][
            "0.weight"
        ].shape == (5, 6)
