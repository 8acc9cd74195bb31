"""A stand-in for Transformer Engine, which runs on CUDA only: its signatures (2.2 to
2.20), and as much behaviour as our backend relies on. Linear layers cast inputs and
weights to E4M3 inside a region and compute plainly outside; amaxes of a pass are agreed
on once, at the end of the outermost region.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from smp_core.fp8 import transformer_engine as backend


class Format(enum.Enum):
    E4M3 = (448, 448)
    HYBRID = (448, 57344)


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclasses.dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID


class Regions:
    """What happened: depth, amaxes of the pass, and the recipe and group size of every
    outermost region."""

    def __init__(self) -> None:
        self.depth, self.amaxes = 0, []
        self.passes: list[tuple[Any, int]] = []
        self.outside = 0

    @contextlib.contextmanager
    def region(self, enabled: bool, recipe: Any, group: Any) -> Iterator[None]:
        assert enabled
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
        if self.depth == 0 and torch.is_grad_enabled() and dist.is_initialized():
            amaxes, self.amaxes = torch.stack(self.amaxes), []
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group)
            self.passes.append((recipe, dist.get_world_size(group)))


def _in_fp8(x: torch.Tensor) -> torch.Tensor:
    scale = 448 / x.detach().abs().amax()
    return x + (
        (x.detach() * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x.detach()
    )


def _linear(regions: Regions) -> type[nn.Module]:
    class Linear(nn.Module):
        def __init__(
            self,
            in_features: int,
            out_features: int,
            sequence_parallel: bool = False,
            fuse_wgrad_accumulation: bool = False,
            tp_group: Any = None,
            tp_size: int = 1,
            get_rng_state_tracker: Any = None,
            rng_tracker_name: str | None = None,
            init_method: Any = None,
            bias: bool = True,
            return_bias: bool = False,
            params_dtype: torch.dtype | None = None,
            parallel_mode: str | None = None,
            parameters_split: Any = None,
            device: torch.device | str = "cuda",
        ) -> None:
            super().__init__()
            self.in_features, self.out_features, self.use_bias = (
                in_features,
                out_features,
                bias,
            )
            self.weight = nn.Parameter(
                torch.empty(
                    out_features, in_features, device=device, dtype=params_dtype
                )
            )
            self.bias: Any
            if bias:
                self.bias = nn.Parameter(
                    torch.empty(out_features, device=device, dtype=params_dtype)
                )
            else:
                self.bias = torch.Tensor().to(dtype=params_dtype, device=device)
            self.reset_parameters(defer_init=device == "meta")

        def reset_parameters(self, defer_init: bool | None = False) -> None:
            assert defer_init, "Transformer Engine's own initial values"

        def get_extra_state(self) -> torch.Tensor:
            return torch.empty(0, dtype=torch.uint8)

        def set_extra_state(self, state: torch.Tensor) -> None:
            raise AssertionError("no checkpoint has any")

        def forward(
            self, inp: torch.Tensor, is_first_microbatch: bool | None = None
        ) -> torch.Tensor:
            weight, bias = self.weight, self.bias if self.use_bias else None
            if regions.depth == 0:
                regions.outside += 1
                return F.linear(inp, weight, bias)
            regions.amaxes.append(inp.detach().abs().amax().float())
            return F.linear(_in_fp8(inp), _in_fp8(weight), bias)

    return Linear


@contextlib.contextmanager
def installed(*, before_2_9: bool = False) -> Iterator[Regions]:
    """While it lasts, ``import transformer_engine`` finds this, and the backend takes a
    CPU for a device it runs on."""
    regions = Regions()
    names = (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.common",
    )
    modules = {
        name: types.ModuleType(name)
        for name in (*names, "transformer_engine.common.recipe")
    }
    modules["transformer_engine"].__spec__ = mock.Mock()
    te: Any = modules["transformer_engine.pytorch"]
    modules["transformer_engine"].pytorch = te  # type: ignore[attr-defined]
    te.Linear = _linear(regions)

    def fp8_autocast(
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Any = None,
        fp8_group: Any = None,
    ) -> Any:
        return regions.region(enabled, fp8_recipe, fp8_group)

    def autocast(
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
    ) -> Any:
        return regions.region(enabled, recipe, amax_reduction_group)

    te.fp8_autocast = fp8_autocast
    if not before_2_9:
        te.autocast = autocast
    recipes: Any = modules["transformer_engine.common.recipe"]
    recipes.Format, recipes.DelayedScaling, recipes.Float8CurrentScaling = (
        Format,
        DelayedScaling,
        Float8CurrentScaling,
    )
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(backend, "_DEVICES", ("cpu",)),
    ):
        yield regions
