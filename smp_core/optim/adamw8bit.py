"""AdamW with its two moments in 8 bits, on shards: the numbers of one process at every
degree.

The moments of a matrix are codes and scales (:mod:`smp_core.codecs.moments`) in blocks
of up to 256 elements of a row. In a step they are decoded, advanced and used in
float32, and encoded again. What a rank holds are some of the rows, or parts of rows
that end where blocks end, so it has the very blocks that one process has. What is kept
in 8 bits at all follows from the shape of the whole parameter.

Besides, the arithmetic is written in operations that round once each (no fused
multiply-add), because a kernel may fuse in the middle of a tensor and not at its end,
and a shard ends elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import like_parameter, map_tensors, shard_like
from smp_core.codecs import BLOCK, MomentCodec, n_blocks
from smp_core.torch_facts import local_part

_SHORTEST_ROW = 8  # of shorter rows scales would be as large as what codes save
# Stepped at a time, so that what is decoded stays small beside the states.
_ELEMENTS = 2**22

_MOMENTS = ("exp_avg", "exp_avg_sq")
_Codecs = tuple[MomentCodec, MomentCodec]


def _scale(name: str) -> str:
    return f"{name}_scale"


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW with moments of 8 bits and a scale for each 256 elements of a
    row: 2.03 bytes a parameter.

    A state has ``step`` as torch's, ``exp_avg`` and ``exp_avg_sq`` as uint8 of the
    parameter's shape, and their scales ``exp_avg_scale`` and ``exp_avg_sq_scale``,
    float32, a row of them for each row. Vectors, parameters with fewer than
    ``min_8bit_size`` elements and those with rows of fewer than 8 keep float32 moments,
    as torch's AdamW does.

    Args:
        params: parameters or groups; a group may have a ``min_8bit_size`` of its own.
        lr, betas, eps, weight_decay, maximize: as of torch.optim.AdamW.
        min_8bit_size: elements of a whole parameter from which on its moments are kept
            in 8 bits, as of bitsandbytes.

    Raises:
        ValueError: an option is out of range, or a parameter is not of real numbers.
    """

    states_by_rows: ClassVar[frozenset[str]] = frozenset(map(_scale, _MOMENTS))
    """States that are sharded by the parameter's rows without being of its shape."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        min_8bit_size: int = 4096,
    ) -> None:
        # Options are checked once; a group of its own may still differ.
        for name, value in (
            ("lr", lr),
            ("eps", eps),
            ("weight_decay", weight_decay),
            ("min_8bit_size", min_8bit_size),
        ):
            if value < 0:
                raise ValueError(f"{name}={value}: allowed are 0 and above")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"betas={tuple(betas)}: allowed are two numbers from 0 to below 1"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "min_8bit_size": min_8bit_size,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ValueError: a parameter is of complex numbers.
        """
        super().add_param_group(param_group)
        strange = [
            p.dtype
            for p in self.param_groups[-1]["params"]
            if not p.is_floating_point()
        ]
        if strange:
            self.param_groups.pop()
            raise ValueError(
                f"AdamW8bit steps real numbers; {len(strange)} parameters are of {strange[0]}"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of torch.optim.AdamW too. Codes and scales stay what they are,
        where torch's own method would make all states of the parameter's dtype."""
        # torch loads the groups; the states below are loaded as they are.
        super().load_state_dict({**state_dict, "state": {}})
        numbers = itertools.chain.from_iterable(
            group["params"] for group in state_dict["param_groups"]
        )
        parameters = itertools.chain.from_iterable(
            group["params"] for group in self.param_groups
        )
        for number, parameter in zip(numbers, parameters, strict=True):
            entry = state_dict["state"].get(number)
            if entry is not None:
                self.state[parameter] = _on_device(entry, local_part(parameter).device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Nothing is sent.

        Returns:
            What ``closure`` returns.

        Raises:
            ValueError: a parameter's rows are cut inside a block. On all ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Made once: tables that are brought to a device make the host wait. An
        # unpickled one has none yet.
        codecs: dict[torch.device, _Codecs] = vars(self).setdefault("_smp_codecs", {})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                device = local_part(parameter).device
                if device not in codecs:
                    codecs[device] = (
                        MomentCodec(True, device),
                        MomentCodec(False, device),
                    )
                self._step_parameter(parameter, group, codecs[device])
        return loss

    def require_whole_blocks(self) -> None:
        """Refuse parameters that are sharded inside of blocks, by columns.

        Raises:
            ValueError: with their shapes. The same on all ranks.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                first_dim = _row_dim(parameter.shape, group["min_8bit_size"])
                if first_dim is not None and isinstance(parameter, DTensor):
                    _require_whole_blocks(parameter, first_dim)

    def _step_parameter(
        self, parameter: nn.Parameter, group: dict[str, Any], codecs: _Codecs
    ) -> None:
        # A gradient may be replicated, or still to be added up.
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            assert isinstance(parameter, DTensor)
            if gradient.placements != parameter.placements:
                gradient = gradient.redistribute(
                    parameter.device_mesh, parameter.placements
                )
        state = self.state[parameter]
        # What is kept in 8 bits follows from the whole parameter, on every rank alike.
        first_dim = _row_dim(parameter.shape, group["min_8bit_size"])
        _complete(state, parameter, first_dim, codecs)
        state["step"] += 1
        weights = local_part(parameter)
        # A shard without rows has a state all the same, and steps nothing.
        if not weights.numel():
            return
        # Everything as rows, which are views unless a tensor is not contiguous.
        row = 1 if first_dim is None else math.prod(weights.shape[first_dim:])
        stepped = [weights, *(local_part(state[name]) for name in _MOMENTS)]
        rows, *moments = (each.reshape(-1, row) for each in stepped)
        gradients = local_part(gradient).reshape(-1, row)
        scales = [
            local_part(state[_scale(name)]).flatten(0, -2)
            for name in _MOMENTS
            if first_dim is not None
        ]
        rates = _rates(group, int(_number(state["step"])))
        # Some rows at a time: what is decoded stays small beside the states.
        at_once = max(1, _ELEMENTS // row)
        for begin in range(0, len(rows), at_once):
            part = slice(begin, begin + at_once)
            if first_dim is None:
                _advance(
                    rows[part],
                    gradients[part],
                    moments[0][part],
                    moments[1][part],
                    rates,
                )
                continue
            decoded = [
                codec.decode(kept[part], of_rows[part])
                for codec, kept, of_rows in zip(codecs, moments, scales, strict=True)
            ]
            _advance(rows[part], gradients[part], decoded[0], decoded[1], rates)
            for codec, kept, of_rows, moment in zip(
                codecs, moments, scales, decoded, strict=True
            ):
                new_codes, new_scales = codec.encode(moment)
                kept[part] = new_codes
                of_rows[part] = new_scales
        # Rows of these were copies, so the results go back.
        for tensor, new in zip(stepped, (rows, *moments), strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(new.view(tensor.shape))


class _Rates(NamedTuple):
    """A step's numbers: a group's, and what follows from the number of the step."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    size: float
    norm: float
    maximize: bool


def _rates(group: dict[str, Any], step: int) -> _Rates:
    # As torch's AdamW: the bias corrections are in size and norm.
    lr, beta1, beta2 = (_number(each) for each in (group["lr"], *group["betas"]))
    return _Rates(
        beta1,
        beta2,
        eps=group["eps"],
        decay=1 - lr * group["weight_decay"],
        size=lr / (1 - beta1**step),
        norm=math.sqrt(1 - beta2**step),
        maximize=group["maximize"],
    )


def _advance(
    weights: Tensor, gradients: Tensor, first: Tensor, second: Tensor, rates: _Rates
) -> None:
    """Step weights and both moments in place. All are of the same shape; each operation
    rounds once."""
    gradients = gradients.to(first.dtype)
    if rates.maximize:
        gradients = -gradients
    first.mul_(rates.beta1).add_(gradients * (1 - rates.beta1))
    second.mul_(rates.beta2).add_(gradients.square().mul_(1 - rates.beta2))
    divisor = second.sqrt().div_(rates.norm).add_(rates.eps)
    update = (first / divisor).mul_(rates.size)
    weights.copy_((weights.to(first.dtype) * rates.decay).sub_(update))


# States


def _row_dim(shape: torch.Size, least: int) -> int | None:
    """Return the first of the dims that are a row of a whole parameter; None: its
    moments are not kept in 8 bits.

    A row is the last dim, and as many before it as make up a block. Dim 0, by which
    FSDP2 shards, is never of it.
    """
    if len(shape) < 2 or shape.numel() < least:
        return None
    # Short last dims are taken together with those before, up to a block.
    first = len(shape) - 1
    while first > 1 and math.prod(shape[first:]) < BLOCK:
        first -= 1
    return first if math.prod(shape[first:]) >= _SHORTEST_ROW else None


def _require_whole_blocks(parameter: DTensor, first_dim: int) -> None:
    # How many parts each dim is cut into; only parts of rows can cut a block.
    shards: dict[int, int] = {}  # dim -> into how many parts it is cut
    for axis, placement in enumerate(parameter.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and dim >= first_dim:
            shards[dim] = shards.get(dim, 1) * parameter.device_mesh.size(axis)
    for dim, count in shards.items():
        length = math.prod(parameter.shape[dim:])
        if count > 1 and (
            dim > first_dim or parameter.shape[dim] % count or length // count % BLOCK
        ):
            raise ValueError(
                f"AdamW8bit: a parameter {list(parameter.shape)} is cut into {count} along dim {dim}, inside of blocks "
                f'of {BLOCK} elements that share a scale; put it into a group with "min_8bit_size": 2**62, which '
                "keeps its moments in float32, or use torch.optim.AdamW"
            )


def _complete(
    state: dict[str, Any],
    parameter: nn.Parameter,
    first_dim: int | None,
    codecs: _Codecs,
) -> None:
    """Make a parameter's state what it has to be: zeros at first, codes of float32
    moments that were loaded, this rank's rows of scales that were loaded whole."""
    if "step" not in state:
        state["step"] = torch.tensor(0.0)
    if (
        first_dim is not None
        and isinstance(parameter, DTensor)
        and "exp_avg" not in state
    ):
        _require_whole_blocks(parameter, first_dim)
    # Loaded scales may be whole, and loaded moments in float32 or in 8 bits.
    for name, codec in zip(_MOMENTS, codecs, strict=True):
        scales = state.get(_scale(name))
        if (
            isinstance(parameter, DTensor)
            and scales is not None
            and not isinstance(scales, DTensor)
        ):
            state[_scale(name)] = scales = shard_like(parameter, scales, by_rows=True)
        kept = state.get(name)
        # Were in 8 bits.
        if kept is not None and scales is not None and first_dim is None:
            kept, scales = _decoded(kept, state.pop(_scale(name)), codec), None
        if first_dim is None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            state[name] = (
                torch.zeros_like(parameter, dtype=dtype)
                if kept is None
                else kept.to(dtype)
            )
        elif scales is None:
            state[name], state[_scale(name)] = _encoded(
                kept, parameter, first_dim, codec
            )


def _encoded(
    moment: Tensor | None, parameter: nn.Parameter, first_dim: int, codec: MomentCodec
) -> tuple[Tensor, Tensor]:
    """Return codes and scales, sharded like a parameter, of its moment; None: of
    zeros."""
    # Of the whole parameter's shape, so that every rank makes the same states.
    shape = parameter.shape
    blocks = n_blocks(math.prod(shape[first_dim:]))
    codes = torch.zeros_like(parameter, dtype=torch.uint8)
    scales = like_parameter(
        parameter, (*shape[:first_dim], blocks), torch.float32, by_rows=True
    )
    of_rank = local_part(codes)
    if of_rank.numel():
        values = (
            torch.zeros_like(of_rank, dtype=torch.float32)
            if moment is None
            else local_part(moment)
        )
        new_codes, new_scales = codec.encode(
            values.reshape(-1, math.prod(of_rank.shape[first_dim:]))
        )
        of_rank.copy_(new_codes.reshape(of_rank.shape))
        local_part(scales).copy_(new_scales.view(local_part(scales).shape))
    return codes, scales


def _decoded(codes: Tensor, scales: Tensor, codec: MomentCodec) -> Tensor:
    """Return a moment, sharded like its codes."""
    moment = torch.zeros_like(codes, dtype=torch.float32)
    of_rank, of_rows = local_part(codes), local_part(scales)
    if of_rank.numel():
        row = math.prod(of_rank.shape[of_rows.ndim - 1 :])
        values = codec.decode(of_rank.reshape(-1, row), of_rows.flatten(0, -2))
        local_part(moment).copy_(values.reshape(of_rank.shape))
    return moment


def _number(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else value


def _on_device(entry: dict[str, Any], device: torch.device) -> dict[str, Any]:
    moved = {
        key: map_tensors(value, lambda tensor: tensor.to(device))
        for key, value in entry.items()
    }
    return {**moved, "step": entry["step"]} if "step" in entry else moved
