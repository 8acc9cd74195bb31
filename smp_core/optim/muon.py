"""Muon over sharded parameters: each matrix's update is orthogonalized whole, on one
rank.

Momentum stays sharded as the parameters are. In a step all matrices of a partition
group travel to their owners and back (:mod:`smp_core.optim.owners`), in the dtype of
the iteration: bfloat16 loses nothing, since the iteration begins by rounding to it and
ends in it. Replicas repeat the work. Matrices that a rank holds whole are worked on
where they are: unsharded parameters, and stacks [experts, rows, columns] that are
sharded by experts. What is sharded in another way (layers over tensor ranks) is
gathered by every rank.

The rest of a model (embeddings, head, vectors) is stepped by torch's AdamW in the same
optimizer, by groups: :func:`smp_core.optim.muon_groups` makes them.

An update (Keller Jordan, https://kellerjordan.github.io/posts/muon/) is the nearest
matrix with orthonormal rows or columns, roughly: a Newton-Schulz iteration of fifth
order. The coefficients are chosen for speed: singular values come out between about 0.7
and 1.2 and not at 1. The operations are torch.optim.Muon's, in its order, so that a
matrix comes out bit for bit as there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from smp_core.checkpoint import shard_like
from smp_core.optim.owners import Matrix, Owners, StepsTogether
from smp_core.torch_facts import local_part

Split = tuple[int, tuple[int, ...]]
"""Several matrices side by side in one parameter: (dim, their sizes along it)."""

AdjustLr = Literal["original", "match_rms_adamw"]
_ALGORITHMS = ("muon", "adamw")


class Muon(StepsTogether):
    """torch.optim.Muon's numbers on shards, and AdamW for what is no hidden matrix.

    Args:
        params: matrices [rows, columns] and stacks of them [n, rows, columns], or
            groups; a group with ``"algorithm": "adamw"`` takes any shape and AdamW's
            options, one with ``"split"`` (:data:`Split`) has several matrices in each
            parameter.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps,
            adjust_lr_fn: as of torch.optim.Muon.
        ns_dtype: of the Newton-Schulz iteration, and that matrices travel in.

    Raises:
        ValueError: an option is out of range, or a parameter is no matrix.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        # Options are checked once; a group of its own may still differ.
        for name, value in (
            ("lr", lr),
            ("weight_decay", weight_decay),
            ("momentum", momentum),
        ):
            if value < 0:
                raise ValueError(f"{name}={value}: allowed are 0 and above")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn={adjust_lr_fn!r}: allowed are 'original' (or None) and 'match_rms_adamw'"
            )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "algorithm": "muon",
            "split": None,
        }
        # The owners of matrices, for each list of shapes; found in the first step.
        self._owners: dict[Any, Owners] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ValueError: its algorithm is unknown, or a parameter is no matrix.
        """
        algorithm = param_group.get("algorithm", "muon")
        if algorithm not in _ALGORITHMS:
            raise ValueError(
                f"a group's algorithm={algorithm!r}: allowed are {', '.join(map(repr, _ALGORITHMS))}"
            )
        if algorithm == "adamw":
            # AdamW's own defaults, not those of the same names that Muon has
            param_group = {**_adamw([]).defaults, **param_group}
        super().add_param_group(param_group)
        if algorithm == "muon":
            self._require_matrices(self.param_groups[-1])

    @staticmethod
    @override
    def planned_states(group: Mapping[str, Any]) -> int:
        return 2 if group["algorithm"] == "adamw" else 1

    def _require_matrices(self, group: dict[str, Any]) -> None:
        shapes = [
            list(parameter.shape)
            for parameter in group["params"]
            if parameter.ndim not in (2, 3)
        ]
        if group["split"] is not None:
            shapes += [
                list(parameter.shape)
                for parameter in group["params"]
                if not _fits(parameter, group["split"])
            ]
        # The group is taken out again: the optimizer goes on without it.
        if shapes:
            self.param_groups.pop()
            raise ValueError(
                f"Muon steps matrices, and stacks of them, but {len(shapes)} parameters are of other shapes, as "
                f"{shapes[0]}; write Muon(muon_groups(model)), which gives those to AdamW, or put them into a group "
                'with "algorithm": "adamw"'
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state, of torch.optim.Muon too, whose groups know nothing of what is
        added here."""
        super().__setstate__(state)
        self.__dict__.setdefault("_owners", {})
        for group in self.param_groups:
            for name in ("algorithm", "split", "ns_dtype"):
                group.setdefault(name, self.defaults[name])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all groups. Collective over the partition group.

        Returns:
            What ``closure`` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Matrices of one group have the same options; AdamW's groups are stepped
        # together.
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                self._step_matrices(group)
        rest = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        if rest:
            adamw = _adamw(rest)
            adamw.state = self.state
            adamw.step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        # Parameters without a gradient are passed over, on all ranks alike.
        parameters = [
            parameter for parameter in group["params"] if parameter.grad is not None
        ]
        updates = [self._with_momentum(parameter, group) for parameter in parameters]

        def work(matrices: Tensor) -> Tensor:
            return orthogonalize(
                matrices,
                coefficients=group["ns_coefficients"],
                steps=group["ns_steps"],
                eps=group["eps"],
                dtype=group["ns_dtype"],
            )

        # One exchange for each mesh that parameters are sharded over by rows; the rest by
        # itself.
        by_rows: dict[Any, list[int]] = {}
        for place, parameter in enumerate(parameters):
            mesh = _mesh_of_rows(parameter)
            if mesh is not None:
                by_rows.setdefault(mesh, []).append(place)
            else:
                self._step_whole(parameter, updates[place], work, group)
        for mesh, places in by_rows.items():
            of_mesh = [parameters[place] for place in places]
            locals_ = [local_part(updates[place]) for place in places]
            # Updates come back for this rank's rows of each matrix.
            for matrix, update in self._owners_of(mesh, of_mesh, group).work(
                locals_, work, group["ns_dtype"]
            ):
                degree, rank = mesh.size(), mesh.get_local_rank()
                weights = matrix.part_of(
                    local_part(of_mesh[matrix.parameter]), rank, degree
                )
                _apply(weights, update, matrix.shape, group)

    def _with_momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Return what is to be orthogonalized, sharded like the parameter."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        # Sharded like the gradient: momentum needs no other rank.
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _owners_of(
        self,
        mesh: DeviceMesh,
        parameters: Sequence[nn.Parameter],
        group: dict[str, Any],
    ) -> Owners:
        """Return the owners of these parameters' matrices; found once for parameters of
        the same shapes."""
        process_group = mesh.get_group()
        # Shapes and options decide about owners, not which parameters they are.
        key = (
            process_group,
            group["split"],
            group["ns_steps"],
            tuple(parameter.shape for parameter in parameters),
        )
        if key not in self._owners:
            matrices = [
                Matrix(place, parameter.shape[0], rows, columns)
                for place, parameter in enumerate(parameters)
                for rows, columns in _matrices(parameter.shape, group["split"])
            ]

            def cost(n_rows: int, n_columns: int) -> int:
                return flops(n_rows, n_columns, group["ns_steps"])

            self._owners[key] = Owners(process_group, matrices, cost, self.meter)
        return self._owners[key]

    def _step_whole(
        self,
        parameter: nn.Parameter,
        update: Tensor,
        work: Callable[[Tensor], Tensor],
        group: dict[str, Any],
    ) -> None:
        """Step a parameter whose matrices this rank holds whole, or gathers."""
        # Matrices that lie here whole are worked on in place.
        if _holds_whole_matrices(parameter):
            weights, of_rank = local_part(parameter), local_part(update)
            for rows, columns in _matrices(parameter.shape, group["split"]):
                place = (..., slice(*rows), slice(*columns))
                _apply(
                    weights[place], work(of_rank[place]), of_rank[place].shape, group
                )
            return
        # Cut in another way: every rank gathers the matrix and works on all of it.
        assert isinstance(update, DTensor)
        whole = update.full_tensor()
        for rows, columns in _matrices(parameter.shape, group["split"]):
            place = (..., slice(*rows), slice(*columns))
            matrix = whole[place]
            whole[place] = _rate(matrix.shape, group) * work(matrix).to(whole.dtype)
        weights = local_part(parameter)
        # Weight decay and update, of this rank's part.
        weights.mul_(1 - _number(group["lr"]) * group["weight_decay"])
        weights.sub_(local_part(shard_like(update, whole)))


def _apply(
    weights: Tensor, update: Tensor, shape: Sequence[int], group: dict[str, Any]
) -> None:
    """Step this rank's rows of a matrix of this whole ``shape``."""
    weights.mul_(1 - _number(group["lr"]) * group["weight_decay"])
    weights.add_(update, alpha=-_rate(shape, group))


def _rate(shape: Sequence[int], group: dict[str, Any]) -> float:
    """Return the learning rate of a matrix: so that updates of all shapes have like
    sizes."""
    rows, columns = shape[-2:]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return _number(group["lr"]) * 0.2 * math.sqrt(max(rows, columns))
    return _number(group["lr"]) * math.sqrt(max(1, rows / columns))


def _number(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else value


def _mesh_of_rows(parameter: Tensor) -> DeviceMesh | None:
    """Return the mesh of a matrix that is sharded by rows and in no other way; None:
    another kind of tensor."""
    if (
        not isinstance(parameter, DTensor)
        or parameter.ndim != 2
        or parameter.device_mesh.size() == 1
    ):
        return None
    return parameter.device_mesh if parameter.placements == (Shard(0),) else None


def _holds_whole_matrices(parameter: Tensor) -> bool:
    """Return whether each matrix of a parameter lies on one rank: it is not sharded, or
    by dims before the last two."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return True
    dims = (
        getattr(placement, "dim", 0)
        for placement in parameter.placements
        if not placement.is_replicate()
    )
    return all(dim < parameter.ndim - 2 for dim in dims)


def _matrices(
    shape: Sequence[int], split: Split | None
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """List (first row, end), (first column, end) of each matrix in the last two dims of
    a parameter."""
    rows, columns = (0, shape[-2]), (0, shape[-1])
    if split is None:
        return [(rows, columns)]
    dim, sizes = split
    # Parts lie one behind the other along the dim.
    ends = list(itertools.accumulate(sizes))
    stretches = list(itertools.pairwise([0, *ends]))
    return [(each, columns) if dim == 0 else (rows, each) for each in stretches]


def _fits(parameter: Tensor, split: Split) -> bool:
    dim, sizes = split
    return parameter.ndim == 2 and sum(sizes) == parameter.shape[dim]


def _adamw(groups: Sequence[dict[str, Any]]) -> torch.optim.AdamW:
    """Make torch's AdamW that steps these very groups."""
    # Made with a parameter of its own, which gives way to the groups at once.
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(()))])
    adamw.param_groups = list(groups)
    return adamw


def orthogonalize(
    matrices: Tensor,
    *,
    coefficients: Sequence[float],
    steps: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return each matrix with its singular values brought near 1.

    Args:
        matrices: [..., rows, columns], of any floating dtype; a stack of matrices is
            computed as one product a step.
        coefficients: a, b and c of ``aX + (bA + cA²)X`` with ``A = XXᵀ``.
        eps: the least norm that a matrix is divided by at the start.
        dtype: of the iteration and of what is returned; torch.optim.Muon's is bfloat16.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype, copy=True)
    if is_tall:  # products of the shorter side with itself
        x = x.mT
    # Divided by its norm, so that all singular values are at most 1.
    if x.ndim == 2:
        x.div_(x.norm().clamp(min=eps))
        product: Callable[..., Tensor] = torch.addmm
    else:
        x = x.reshape(-1, *x.shape[-2:])
        x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
        product = torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if is_tall else x
    return x.reshape(matrices.shape)


def flops(rows: int, columns: int, steps: int) -> int:
    """Return the operations of one matrix: three products a step, two of them of the
    shorter side with itself."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)
