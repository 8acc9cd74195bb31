"""Adafactor on shards: torch.optim.Adafactor's numbers, with two small sums over the
partition group in a step.

Adafactor (arXiv 1804.04235) keeps, of the squares of a matrix's gradients, the means of
rows and of columns. FSDP2 shards by rows: row factors are this rank's rows and need
nothing of others; column factors, and the norms of weights and updates, are sums over
all rows. In a step the sums of all parameters travel together: first column sums, sums
of row factors and norms of weights, then norms of updates. R, C: rows and columns of a
matrix; r: this rank's rows.

An update is computed twice, for its norm and to be applied, so that those of all
parameters are never there at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from smp_core.checkpoint import like_parameter, shard_like
from smp_core.optim.owners import StepsTogether
from smp_core.torch_facts import local_part, parameters_of

_FACTORS = ("row_var", "col_var")


class Adafactor(StepsTogether):
    """torch.optim.Adafactor on parameters that are sharded by rows, as FSDP2 does, or
    not at all.

    A state has torch's names: ``step``; ``row_var`` [..., R, 1] and ``col_var`` [...,
    1, C] of matrices and stacks of them; ``variance`` of vectors. Those of half
    precision parameters are float32.

    Args:
        params, lr, beta2_decay, eps, d, weight_decay, maximize: as of
            torch.optim.Adafactor.

    Raises:
        ValueError: an option is out of range.
    """

    states_by_rows: ClassVar[frozenset[str]] = frozenset(_FACTORS)
    """States that checkpoints give back sharded, without being of the parameter's
    shape."""
    exchanged = "sums"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        # As torch's, with the same bounds.
        for name, value in (
            ("lr", lr),
            ("weight_decay", weight_decay),
            ("eps[0]", eps[0] or 0.0),
            ("eps[1]", eps[1]),
        ):
            if value < 0:
                raise ValueError(f"{name}={value}: allowed are 0 and above")
        if beta2_decay > 0:
            raise ValueError(f"beta2_decay={beta2_decay}: allowed are 0 and below")
        if d < 1:
            raise ValueError(f"d={d}: allowed are 1 and above")
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d}
        super().__init__(
            params, {**defaults, "weight_decay": weight_decay, "maximize": maximize}
        )

    @staticmethod
    @override
    def planned_states(group: Mapping[str, Any]) -> int:
        return 0  # factors of rows and columns

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of torch.optim.Adafactor too. Factors keep their dtype, where
        torch's own method would make them of the parameter's."""
        super().load_state_dict(state_dict)
        # torch's method has cast them; the given ones are taken again.
        numbers = [
            number for group in state_dict["param_groups"] for number in group["params"]
        ]
        parameters = parameters_of(self)
        for number, parameter in zip(numbers, parameters, strict=True):
            for name in (*_FACTORS, "variance"):
                if name in state_dict["state"].get(number, {}):
                    given = state_dict["state"][number][name]
                    self.state[parameter][name] = given.to(local_part(parameter).device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Collective over the partition
        group.

        Returns:
            What ``closure`` returns.

        Raises:
            ValueError: a parameter is sharded in another way than by rows. On all
                ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Phase by phase over all parameters, so that each sum is one message.
        stepped = [
            _Stepped(parameter, self.state[parameter], group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._sum([each.sums() for each in stepped], stepped)
        for each in stepped:
            each.take_sums()
        self._sum([each.norm_of_update() for each in stepped], stepped)
        for each in stepped:
            each.apply()
        return loss

    def _sum(self, parts: Sequence[torch.Tensor], stepped: Sequence[_Stepped]) -> None:
        """Add up each parameter's numbers over the ranks that it is sharded over, all
        of them in one collective."""
        # Parameters over the same ranks, of one dtype, go together.
        together: dict[Any, list[tuple[torch.Tensor, _Stepped]]] = {}
        for part, each in zip(parts, stepped, strict=True):
            each.summed = part
            if each.group is not None:
                together.setdefault((each.group, part.dtype, part.device), []).append(
                    (part, each)
                )
        for (group, _, _), members in together.items():
            flat = torch.cat([part for part, _ in members])
            ranks = dist.get_process_group_ranks(group)
            if self.meter is None:
                dist.all_reduce(flat, group=group)
            else:
                with self.meter.ring("adafactor_all_reduce", ranks, flat.nbytes):
                    dist.all_reduce(flat, group=group)
            for (_, each), part in zip(
                members, flat.split([part.numel() for part, _ in members]), strict=True
            ):
                each.summed = part


class _Stepped:
    """A parameter in one step.

    Attributes:
        group: the ranks that it is sharded over; None: this rank has all of it.
        summed: what was added up last.
    """

    def __init__(
        self, parameter: nn.Parameter, state: dict[str, Any], options: dict[str, Any]
    ) -> None:
        self.group = _group_of_rows(parameter)
        self._shape, self._options = parameter.shape, options
        # float32 for half precision, as factors need the digits.
        self._dtype = torch.promote_types(parameter.dtype, torch.float32)
        self._weights = local_part(parameter)
        assert parameter.grad is not None
        self._gradient = local_part(parameter.grad)
        self._eps1 = (
            torch.finfo(parameter.dtype).eps
            if options["eps"][0] is None
            else options["eps"][0]
        )
        # Only of a matrix are rows, and columns' sums, divided among ranks; of a stack
        # whole matrices are.
        self._rows_are_divided = parameter.ndim == 2 and self.group is not None
        _complete(state, parameter, self._dtype)
        state["step"] += 1
        self._number = _number(state["step"])
        self._state = state
        self.summed = self._alpha = torch.empty(0)
        self._row_mean: torch.Tensor | None = None

    def sums(self) -> torch.Tensor:
        """Advance what needs no other rank, and return what does: the square of the
        weights' norm; of a matrix the sum of its row factors and column sums [C]
        too."""
        # What needs no other rank advances now.
        weights_norm = _square_sum(self._weights, self._dtype)
        squares = self._gradient.to(self._dtype).square()
        fraction = self._number ** self._options["beta2_decay"]
        if self._gradient.ndim < 2:
            local_part(self._state["variance"]).lerp_(squares, fraction)
            return weights_norm
        row_var = local_part(self._state["row_var"])
        row_var.lerp_(squares.mean(dim=-1, keepdim=True), fraction)
        # Sums of this rank's rows; the means follow when all are added up.
        if self._rows_are_divided:
            return torch.cat([weights_norm, row_var.sum().view(1), squares.sum(dim=0)])
        local_part(self._state["col_var"]).lerp_(
            squares.mean(dim=-2, keepdim=True), fraction
        )
        return weights_norm

    def take_sums(self) -> None:
        """Advance column factors and find the step's size, by sums over all ranks;
        decay the weights."""
        # The root mean square of weights bounds the step.
        lr, (_, eps2) = _number(self._options["lr"]), self._options["eps"]
        rows = self._shape[0] if self._shape else 1
        if self._rows_are_divided:
            column_means = self.summed[2:].view(1, -1) / rows
            self._state["col_var"].lerp_(
                column_means, self._number ** self._options["beta2_decay"]
            )
            self._row_mean = self.summed[1] / rows
        norm = (self.summed[0] / self._shape.numel()).sqrt()
        self._alpha = norm.clamp(min=eps2) * min(lr, 1 / math.sqrt(self._number))
        if self._options["weight_decay"]:
            self._weights.mul_(1 - lr * self._options["weight_decay"])

    def norm_of_update(self) -> torch.Tensor:
        """Return the square of the norm of this rank's part of the update."""
        return _square_sum(self._update(), self._dtype)

    def apply(self) -> None:
        """Step the weights, by no more than ``d`` in the root of the mean square."""
        # The root mean square of the update is limited to d.
        size = (self.summed[0] / self._shape.numel()).sqrt() / self._options["d"]
        sign = 1.0 if self._options["maximize"] else -1.0
        update = self._update().mul_(sign * self._alpha / size.clamp(min=1.0))
        self._weights.copy_(self._weights.to(self._dtype).add_(update))

    def _update(self) -> torch.Tensor:
        if self._gradient.ndim < 2:
            variance = local_part(self._state["variance"]).clone()
        else:
            row_var, col_var = (local_part(self._state[name]) for name in _FACTORS)
            # Of divided rows the mean is over all of them.
            mean = (
                row_var.mean(dim=-2, keepdim=True)
                if self._row_mean is None
                else self._row_mean
            )
            variance = (row_var @ col_var).div_(mean.clamp(min=self._eps1))
        return variance.clamp_(min=self._eps1**2).rsqrt_().mul_(self._gradient)


def _complete(
    state: dict[str, Any], parameter: nn.Parameter, dtype: torch.dtype
) -> None:
    """Make a parameter's state what it has to be: zeros at first, this rank's rows of
    factors that were loaded whole, column factors whole."""
    if "step" not in state:
        state["step"] = torch.tensor(0.0)
    shape = parameter.shape
    wanted: Iterable[tuple[str, tuple[int, ...]]] = [("variance", tuple(shape))]
    if len(shape) > 1:
        wanted = [
            ("row_var", (*shape[:-1], 1)),
            ("col_var", (*shape[:-2], 1, shape[-1])),
        ]
    # Column factors of a matrix are whole on every rank; all else goes by rows.
    for name, of_shape in wanted:
        by_rows = isinstance(parameter, DTensor) and not (
            name == "col_var" and len(shape) == 2
        )
        kept = state.get(name)
        if kept is None and by_rows:
            state[name] = like_parameter(parameter, of_shape, dtype, by_rows=True)
        elif kept is None:
            state[name] = torch.zeros(
                of_shape, dtype=dtype, device=local_part(parameter).device
            )
        elif isinstance(kept, DTensor) and not by_rows:
            state[name] = kept.full_tensor()  # a checkpoint's
        elif by_rows and not isinstance(kept, DTensor):
            state[name] = shard_like(parameter, kept, by_rows=True)
        state[name] = state[name].to(dtype)


def _group_of_rows(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that a parameter's rows are divided among; None: none.

    Raises:
        ValueError: it is divided in another way.
    """
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return None
    if parameter.placements != (Shard(0),):
        raise ValueError(
            f"Adafactor steps parameters that are sharded by rows, and one {list(parameter.shape)} is "
            f"{parameter.placements}: layers over tensor ranks (write tensor_parallel_degree=1), or experts that ranks "
            "divide (write expert_parallel_degree=1); use torch.optim.AdamW or smp_core.optim.AdamW8bit beside them"
        )
    return parameter.device_mesh.get_group()


def _square_sum(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of squares [1]."""
    return tensor.to(dtype).square().sum().view(1)


def _number(value: float | torch.Tensor) -> float:
    return value.item() if isinstance(value, torch.Tensor) else value
