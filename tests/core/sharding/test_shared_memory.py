"""Tensors over one memory and modules in TorchScript, which shards cannot stand in for,
are refused on all ranks; views side by side are not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from smp_core.config import SmpConfig
from smp_core.entry import parallelize
from tests.harness import run_ranks


def tied_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    return model


def wrapped_again() -> nn.Module:
    """A well-known mistake: a parameter of a parameter is another one."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    model[1].weight = nn.Parameter(model[0].weight)
    return model


def buffer_of_a_parameter() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("last", model.weight.detach()[3])
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return tied_by_data()


def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))


def with_frozen_script() -> nn.Module:
    """Without parameters: they are constants of its code."""
    frozen = torch.jit.freeze(torch.jit.script(nn.Linear(4, 4).eval()))
    return nn.Sequential(nn.Linear(4, 4), frozen)


class SideBySide(nn.Module):
    """Rows of one memory, columns of another, and a frozen copy of a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        rows, columns = torch.ones(6, 4), torch.ones(4, 6)
        self.a, self.b = nn.Parameter(rows[:2]), nn.Parameter(rows[2:])
        self.c, self.d = nn.Parameter(columns[:, :2]), nn.Parameter(columns[:, 2:])
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("same", self.frozen.weight)


def said_of(make: Callable[[], nn.Module], degree: int) -> str:
    try:
        parallelize(make(), SmpConfig(shard_degree=degree))
    except ValueError as error:
        return str(error)
    return ""


def all_said() -> list[str]:
    made = (tied_by_data, wrapped_again, buffer_of_a_parameter, on_meta, scripted)
    said = [said_of(make, 2) for make in made]
    kept = [said_of(make, 2) for make in (SideBySide, with_frozen_script)]
    return [*said, said_of(scripted, 1), *kept, said_of(tied_by_data, 1)]


def test_what_shards_cannot_stand_in_for_is_refused_on_all_ranks() -> None:
    said, other = run_ranks(all_said, 2)
    assert said == other
    two = " are two parameters over the same memory"
    assert said[0].startswith("0.weight and 1.weight" + two)
    assert said[1].startswith("0.weight and 1.weight" + two)
    assert "head.weight = embedding.weight" in said[1]
    assert said[2].startswith("the buffer last has the memory of the parameter weight,")
    assert said[3].startswith("0.weight and 1.weight" + two)
    assert said[4].startswith("1 is TorchScript (torch.jit.script, trace or load)")
    assert said[5] == said[4] and "torch.jit.freeze" in said[5]
    # Parameters that stay what they are go on sharing.
    assert said[6:] == [""] * 3
