"""Pre-sharded models: sharded by Transformers'
``from_pretrained(distributed_config=...)``, or by hand.

Sharded on a 1-D mesh, they get our communication objects, replica hop and window like
any other. On a 2-D mesh (replicate, shard), torch has reserved the hop across replicas
for itself; then its own two-hop is what a window is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from smp_core.plan import DEALT, GivenSharding
from smp_core.sharding.fsdp import forget_partial_sums, given_policy, partial_sum_bytes
from smp_core.sharding.optimizer.shards import WorldSharding


def given_sharding(model: nn.Module) -> GivenSharding | None:
    """Return how ``model`` is sharded already; None if it is not.

    Raises:
        ValueError: sharded in a way that cannot be taken over: not by FSDP2, over
            several meshes (but for experts that Transformers' own expert parallelism
            has dealt), tensor parallel, along another dim than the first, or with its
            shards in host memory.
    """
    sharded = {
        name: p for name, p in model.named_parameters() if isinstance(p, DTensor)
    }
    if not sharded:
        return None
    # All parameters on one mesh, by FSDP2; experts that were dealt, on the ranks that
    # hold the same ones.
    kind = type(model).__name__.removeprefix("FSDP")
    dealt = {
        name: p.device_mesh
        for name, p in sharded.items()
        if DEALT in (p.device_mesh.mesh_dim_names or ())
    }
    # Ranks that hold different experts; over the others each expert is sharded.
    experts = next(iter(dealt.values()))[DEALT].size() if dealt else 1
    _refuse_split_layers(model, kind)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            f"{kind} has DTensor parameters that are not FSDP2's; load it without them"
        )
    # Any parameter that is no expert: the others have to lie like it.
    first = next(p for name, p in sharded.items() if name not in dealt)
    for name, parameter in sharded.items():
        if name in dealt:
            continue
        if (
            parameter.device_mesh != first.device_mesh
            or parameter.placements != first.placements
        ):
            raise ValueError(
                f"{kind} is sharded over several meshes ({name} is {parameter.placements} on {parameter.device_mesh}); "
                "allowed: one for all parameters; with DistributedConfig write fsdp_size, dp_replicate_size, ep_size"
            )
    # By rows, and on the device.
    placements = tuple(first.placements)
    if placements not in ((Shard(0),), (Replicate(), Shard(0))):
        raise ValueError(
            f"{kind} is sharded as {placements}; allowed: (Shard(0),), or (Replicate(), Shard(0)); with "
            "DistributedConfig write fsdp_size and dp_replicate_size only"
        )
    # Policies of all units are taken to be those of the first.
    policy = given_policy(model)
    if policy.offloads:
        raise ValueError(
            f"{kind} is sharded with its shards in host memory; write fsdp_cpu_offload=False"
        )
    mesh, two = first.device_mesh, len(placements) == 2
    # Over two axes: the ranks of one replica, along the inner one.
    ranks = (
        mesh[mesh.mesh_dim_names[-1]].mesh if two and mesh.mesh_dim_names else mesh.mesh
    )
    if ranks.ndim != 1:
        raise ValueError(
            f"{kind} is sharded over {mesh}, whose axes have no names; give it mesh_dim_names"
        )
    return GivenSharding(
        tuple(ranks.tolist()), two, policy.param_dtype, policy.reduce_dtype, experts
    )


def _refuse_split_layers(model: nn.Module, kind: str) -> None:
    """Refuse a model whose layers Transformers has split over tensor ranks."""
    # Transformers notes the degree on the modules whose layers it has split.
    degrees = (getattr(module, "tp_size", None) for module in model.modules())
    degree = next(
        (size for size in degrees if isinstance(size, int) and size > 1), None
    )
    if degree is not None:
        raise ValueError(
            f"{kind} came with its layers split over {degree} ranks (DistributedConfig(tp_size={degree}), or tp_plan=)"
            f"; load it without, and write tensor_parallel_degree={degree}: torch-smp splits it"
        )


class NativeWindow:
    """torch's own two-hop as a :class:`smp_core.sharding.gradients.window.Window`:
    inside :meth:`accumulate` gradients are reduce-scattered and kept, the first pass
    outside it adds them up across replicas.

    Args:
        model: sharded on a (replicate, shard) mesh.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last = True
        self.world: WorldSharding | None = None
        self.micro_batches = 0
        """Passes through :meth:`accumulate` since the window was closed."""
        # Whose gradients were dropped since, beside others of their unit.
        self._dropped: set[int] = set()
        self._half_dropped: list[nn.Parameter] = []

    @property
    def is_open(self) -> bool:
        """Return whether gradients are held that no ``.grad`` shows yet."""
        return partial_sum_bytes(self._model) > 0

    def attached(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name that FSDP2 has not sharded."""
        named = sorted(self._model.named_parameters(), key=lambda pair: pair[0])
        return {
            name: each
            for name, each in named
            if each.requires_grad and not isinstance(each, DTensor)
        }

    def refuse_attached(self) -> None:
        """Refuse gradients of what was attached.

        Raises:
            ValueError: there are any on this rank.
        """
        # Only this rank is asked: torch reduces nothing of such parameters.
        for name, parameter in self.attached().items():
            if parameter.grad is not None:
                raise ValueError(
                    f"{name} was attached after the model was sharded, on a (replicate, shard) mesh that is not ours: "
                    "nothing adds its gradients up; attach adapters before the model is sharded"
                )

    @contextlib.contextmanager
    def accumulate(self, enabled: bool = True) -> Iterator[None]:
        """Treat backward passes inside as not the window's last."""
        self._require_whole_units()
        # Contexts nest: the outer one decides whether the last pass may be inside.
        before, self._last = self._last, self._last and not enabled
        self._all_reduce(self._last)
        try:
            yield
        finally:
            self._last = before
            self._all_reduce(before)
            self.micro_batches += enabled

    def close(self) -> None:
        """Check that nothing is held any more.

        Raises:
            RuntimeError: every backward pass ran inside ``accumulate``, so replicas
                have not been reduced.
        """
        self._require_whole_units()
        # Sums over the partition group are held until torch may reduce across replicas.
        if self.is_open:
            raise RuntimeError(
                "every backward pass of this step ran inside no_sync(), and torch reduces replicas in a pass outside "
                "it; run the step's last one outside, or let torch-smp shard the model (without distributed_config)"
            )
        self.micro_batches = 0

    def abandon(self) -> None:
        """Drop the window's gradients, held and closed."""
        forget_partial_sums(self._model)
        self._dropped.clear()
        self._half_dropped.clear()
        for parameter in self._model.parameters():
            parameter.grad = None
        self.micro_batches = 0

    def drop(self, parameters: Iterable[Tensor], set_to_none: bool = True) -> None:
        """Drop what is held of these parameters. torch holds gradients of a unit
        together: those of a part of a unit are an error at the next pass or step, if
        the rest has not been dropped until then."""
        if not self.is_open:
            return
        self._dropped |= {id(parameter) for parameter in parameters}
        self._half_dropped = forget_partial_sums(self._model, self._dropped)
        if not self.is_open:
            self.micro_batches = 0
            self._dropped.clear()

    def _require_whole_units(self) -> None:
        kept, self._half_dropped = self._half_dropped, []
        self._dropped.clear()
        if kept:
            names = {id(p): name for name, p in self._model.named_parameters()}
            raise RuntimeError(
                f"zero_grad dropped gradients of {names[id(kept[0])]} between backward passes inside no_sync(), and "
                "torch holds them in one tensor with others of the same module, which was not dropped; call zero_grad "
                "of all optimizers of the model there, or behind the step, or let torch-smp shard the model (without "
                "distributed_config)"
            )

    def zero_grad(self, parameters: Iterable[Tensor], set_to_none: bool = True) -> None:
        self.drop(parameters, set_to_none)

    def held_bytes(self) -> int:
        return partial_sum_bytes(self._model)

    def shard_over_world(self, on_host: bool = False) -> WorldSharding:
        raise AssertionError(
            "optimizer_shard='world' is settled as 'shard' where torch reduces across replicas"
        )

    def _all_reduce(self, wanted: bool) -> None:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_all_reduce(wanted, recurse=False)
