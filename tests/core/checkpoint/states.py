"""States for checkpoint tests: the same numbers on any mesh, with every kind of tensor
and value that must survive."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

SHAPES = {
    "wide.weight": (7, 5),
    "head.weight": (2, 3),
    "norm.bias": (5,),
    "one_row": (1, 4),
}


def shard_mesh(shard_degree: int) -> DeviceMesh:
    """The 1-D partition mesh of this rank; the world is cut into groups of
    ``shard_degree``."""
    world = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu",
        (world // shard_degree, shard_degree),
        mesh_dim_names=("replicate", "shard"),
    )
    return mesh["shard"]


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    """Full tensors, equal for equal seeds: float32 weights of uneven sizes, bf16,
    integers, 0-d and empty ones."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()
    }
    tensors["half"] = torch.randn(6, 4, generator=generator).to(torch.bfloat16)
    tensors["counts"] = torch.randint(0, 100, (9,), generator=generator)
    tensors["empty"] = torch.empty(0, 3)
    tensors["scalar"] = torch.tensor(1.5 + seed)
    tensors["transposed"] = torch.randn(4, 6, generator=generator).t()
    return tensors


def rest(seed: int = 0) -> dict[str, Any]:
    """Values that are no tensors, of every type that must come back as it was."""
    return {
        "epoch": seed,
        "nothing": None,
        "rate": 1e-3,
        "infinite": float("inf"),
        "betas": (0.9, (0.99, "x")),
        "by_number": {0: "a", 1: {"b": (1, 2)}},
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "names": {"x", "y"},
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "raw": b"\x00\xff",
        "dollar": {"$tensor": "no tensor"},
        "flags": [True, False, 1, 0, 1.0],
    }


def sharded_state(shard_degree: int, seed: int = 0) -> dict[str, Any]:
    """A checkpoint-like state: weights as DTensors over the shard mesh, AdamW and SGD
    states, plain tensors, the rest.

    Tied, non-contiguous, 0-d, empty, bf16 and uneven tensors are all in it. Seed -1:
    every tensor is zero.
    """
    mesh = shard_mesh(shard_degree)
    full = values(max(seed, 0))
    if seed < 0:
        full = {name: torch.zeros_like(tensor) for name, tensor in full.items()}

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor.clone(), mesh, [Shard(0)], src_data_rank=None)

    weights: dict[str, torch.Tensor] = {
        n: t if t.ndim == 0 else spread(t) for n, t in full.items()
    }
    weights["tied.weight"] = weights["wide.weight"].detach()
    weights["plain.transposed"] = full["transposed"]
    adam = {
        name: {
            "exp_avg": spread(full[name] * 2),
            "exp_avg_sq": spread(full[name] ** 2),
            "step": torch.tensor(0.0 if seed < 0 else 3.0),
        }
        for name in SHAPES
    }
    sgd = {name: {"momentum_buffer": spread(full[name] * 3)} for name in SHAPES}
    groups = [
        {"lr": 0.0 if seed < 0 else 1e-3, "betas": (0.9, 0.99), "params": list(SHAPES)}
    ]
    return {
        "state_dict": OrderedDict(weights),
        "optimizer_states": [
            {"state": adam, "param_groups": groups},
            {"state": sgd, "param_groups": [{"lr": 0.1, "params": list(SHAPES)}]},
        ],
        "rest": {} if seed < 0 else rest(seed),
        "best": {"score": torch.tensor(0.0 if seed < 0 else 0.25), "kept": 3},
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the full tensor. Collective for DTensors."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def gathered(state: Any) -> Any:
    """The state with DTensors replaced by full tensors. Collective."""
    if isinstance(state, torch.Tensor):
        return whole(state)
    if isinstance(state, dict):
        return type(state)((key, gathered(value)) for key, value in state.items())
    if isinstance(state, (list, tuple)):
        return type(state)(gathered(value) for value in state)
    return state


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two nested states differ in type, keys, dtype, shape or any bit of a
    value."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
        return (
            []
            if alike and torch.equal(found, expected)
            else [f"{path}: tensors differ"]
        )
    if type(found) is not type(expected):
        return [f"{path}: {type(found).__name__} instead of {type(expected).__name__}"]
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return [f"{path}: keys {list(found)} instead of {list(expected)}"]
        return [
            text
            for key in expected
            for text in differences(found[key], expected[key], f"{path}.{key}")
        ]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{path}: {len(found)} entries instead of {len(expected)}"]
        return [
            text
            for i, pair in enumerate(zip(found, expected, strict=True))
            for text in differences(*pair, f"{path}.{i}")
        ]
    return [] if found == expected else [f"{path}: {found!r} instead of {expected!r}"]


def step_in(manifest: Path) -> int:
    """Return the step that a manifest names."""
    step = json.loads(manifest.read_text())["step"]
    assert isinstance(step, int)
    return step
