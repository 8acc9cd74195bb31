"""What FSDP2 does in a model of two units on two gloo ranks, looked at once for all
tests of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from smp_core.comm.deferred import Deferred
from smp_core.sharding.fsdp import at_end_of_backward, backward_pass, forget_passes
from smp_core.sharding.fsdp.internals import group_of
from smp_core.sharding.fsdp.param_group import ParamGroup

Seen = dict[str, Any]
OBSERVATIONS: list[Callable[[DeviceMesh], Seen]] = []


def observation(look: Callable[[DeviceMesh], Seen]) -> Callable[[DeviceMesh], Seen]:
    OBSERVATIONS.append(look)
    return look


class Chain(nn.Module):
    """Two units and a root with parameters of its own; the shard of ``odd`` is uneven
    over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 4)
        self.odd = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: torch.Tensor, use_second: bool = True) -> torch.Tensor:
        x = self.first(x)
        return (self.second(x) if use_second else x).sum() + self.odd.sum()


def chain(mesh: DeviceMesh, **policy: Any) -> Any:
    torch.manual_seed(0)
    model = Chain()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined]
        module.set_gradient_divide_factor(1.0)  # type: ignore[attr-defined]
    return model


def group(module: nn.Module) -> ParamGroup:
    found = group_of(module)
    assert found is not None
    return found


def batch() -> torch.Tensor:
    return torch.ones(2, 4)


@observation
def flat_sums(mesh: DeviceMesh) -> Seen:
    model, handed = (
        chain(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        [],
    )
    model.set_all_reduce_hook(handed.append)
    model(batch()).backward()
    own = model.odd.grad.to_local()
    return {
        "dtype": handed[0].dtype,
        "shape": tuple(handed[0].shape),
        "values": handed[0].tolist(),
        "shares memory": handed[0].untyped_storage().data_ptr()
        == own.untyped_storage().data_ptr(),
        "sizes": group(model).shard_sizes(),
    }


@observation
def order_of_parameters(mesh: DeviceMesh) -> Seen:
    model, handed = chain(mesh), []
    model.first.set_all_reduce_hook(handed.append)
    model(batch()).backward()
    gradients = [parameter.grad for parameter in model.first.parameters()]
    padded = []
    for gradient, size in zip(gradients, group(model.first).shard_sizes(), strict=True):
        local = gradient.to_local().flatten()
        padded += [*local.tolist(), *[0.0] * (size - local.numel())]
    return {
        "flat": handed[0].tolist(),
        "by parameter": padded,
        "order": group(model.first).reduction_order(),
    }


@observation
def communication(mesh: DeviceMesh) -> Seen:
    model, calls = chain(mesh), []

    class Gather:
        def allocate(
            self, size: Any, *, dtype: torch.dtype, device: torch.device
        ) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: Any,
            input_tensor: Any,
            group: Any,
            async_op: bool = False,
        ) -> Any:
            slot = output_tensor.chunk(2)[dist.get_rank()]
            calls.append(
                (
                    "input is its slot of the output",
                    input_tensor.data_ptr() == slot.data_ptr(),
                )
            )
            calls.append(("gradients are off", not torch.is_grad_enabled()))
            work = dist.all_gather_into_tensor(
                output_tensor, input_tensor.clone(), group=group, async_op=True
            )
            assert work is not None
            return Deferred(lambda: calls.append(("waited", work.wait())))

    class Scatter(Gather):
        def __call__(
            self,
            output_tensor: Any,
            input_tensor: Any,
            group: Any,
            op: Any = None,
            async_op: bool = False,
        ):
            calls.append(("sums", op == dist.ReduceOp.SUM))
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)

    model.first.set_custom_all_gather(Gather())
    model.first.set_custom_reduce_scatter(Scatter())
    model(batch()).backward()
    return {"calls": calls}


@observation
def gathers_and_reductions(mesh: DeviceMesh) -> Seen:
    model, happened, end = chain(mesh), [], []
    before: dict[str, Any] = {}
    for name, module in (
        ("root", model),
        ("first", model.first),
        ("second", model.second),
    ):
        of_unit = group(module)

        def gather(async_op: bool = False, name: str = name) -> None:
            happened.append(
                f"gather {name} {'backward' if backward_pass() != -1 else 'forward'}"
            )
            before[f"gather {name}"](async_op)

        def reduce(*args: Any, name: str = name) -> None:
            happened.append(f"reduce {name}")
            before[f"reduce {name}"](*args)

        before[f"gather {name}"] = of_unit.replace_gather(gather)
        before[f"reduce {name}"] = of_unit.replace_reduction(reduce)
    loss = model(batch())
    unsharded = [
        group(module).is_unsharded for module in (model, model.first, model.second)
    ]
    sharded = [
        group(module).is_sharded for module in (model, model.first, model.second)
    ]
    loss.register_hook(
        lambda _: at_end_of_backward(
            lambda: end.append([len(happened), group(model).is_sharded])
        )
    )
    loss.backward()
    return {
        "happened": happened,
        "unsharded": unsharded,
        "sharded": sharded,
        "end": end,
        "all": len(happened),
    }


@observation
def copies(mesh: DeviceMesh) -> Seen:
    model = chain(mesh)
    seen: Seen = {"before": group(model.first).copies(), "versions": []}
    shown, kept = [], []

    def look(module: nn.Module, *_: Any) -> None:
        weight, copy = module.weight, group(module).copies()[0]
        assert copy is not None
        shown.append(weight is copy and not isinstance(copy, DTensor))
        kept.append(copy)
        seen["versions"].append(copy._version)

    model.first.register_forward_pre_hook(look)
    for _ in range(2):
        model(batch()).backward()
    seen["shown inside"], seen["the same object"] = shown, kept[0] is kept[1]
    seen["shards between"] = isinstance(model.first.weight, DTensor)
    return seen


@observation
def hooks_around(mesh: DeviceMesh) -> Seen:
    model, order, failed = chain(mesh), [], []

    def noting(word: str) -> Callable[..., None]:
        return lambda *_: order.append((word, group(model.first).is_unsharded))

    model.first.register_forward_pre_hook(noting("before the gather"), prepend=True)
    model.first.register_forward_pre_hook(noting("behind the gather"))
    model.first.register_forward_hook(noting("before it is freed"), prepend=True)
    model.first.register_forward_hook(noting("behind that"), always_call=True)
    model(batch())
    model.second.register_forward_hook(
        lambda *_: failed.append("called"), always_call=True
    )
    try:
        model.second(torch.ones(2, 7))
    except RuntimeError:
        failed.append("raised")
    return {"order": order, "failed": failed}


@observation
def held_gradients(mesh: DeviceMesh) -> Seen:
    model = chain(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    of_unit = group(model.first)
    model.set_requires_gradient_sync(False)
    model(batch()).backward()
    copy = of_unit.copies()[0]
    assert copy is not None
    held = copy.grad
    without = model.first.weight.grad is None and of_unit.is_sharded
    copy.grad = None
    of_unit.forget_gradients()
    model.first.set_requires_gradient_sync(True, recurse=False)
    of_unit.hand_over(0, torch.full_like(copy, 2.0, dtype=of_unit.sum_dtype(0)))
    of_unit.reduce()
    of_unit.end_of_reduction()
    return {
        "there": held is None or bool(held.any()),
        "not reduced": without,
        "dtype": of_unit.sum_dtype(0),
        "reduced": model.first.weight.grad.full_tensor().unique().tolist(),
        "others": model.first.bias.grad is None,
    }


@observation
def failed_passes(mesh: DeviceMesh) -> Seen:
    model, expected = chain(mesh), chain(mesh)
    loss = model(batch())
    handle = model.second.register_full_backward_pre_hook(lambda *_: 1 / 0)
    loss = model(batch())
    failed = ""
    try:
        loss.backward()
    except ZeroDivisionError:
        failed = "ZeroDivisionError"
    handle.remove()
    forget_passes(model.modules())
    sharded = all(
        group(module).is_sharded for module in (model, model.first, model.second)
    )
    for each in (model, expected):
        each(batch()).backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    equal = all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
    return {"failed": failed, "sharded": sharded, "next step": equal}


@observation
def gathers_ahead(mesh: DeviceMesh) -> Seen:
    model = chain(mesh)
    model.first.set_modules_to_forward_prefetch([model.second])
    model(batch()).backward()
    with torch.no_grad():
        model(batch(), use_second=False)
    ahead = group(model.second).has_gather_in_flight
    group(model.second).drop_gather()
    dropped = (
        not group(model.second).has_gather_in_flight and group(model.second).is_sharded
    )
    return {
        "in flight": ahead,
        "dropped": dropped,
        "trains on": bool(torch.isfinite(model(batch()))),
    }


@observation
def exchanged_shards(mesh: DeviceMesh) -> Seen:
    model = chain(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model(batch()).backward()
    weight = model.first.weight
    for kept in model.first.parameters():
        kept.grad = None
        torch.utils.swap_tensors(kept, nn.Parameter(kept.detach().to(torch.bfloat16)))
    group(model.first).shards_changed([0, 1])
    dtypes: list[torch.dtype] = []
    model.first.register_forward_pre_hook(
        lambda module, _: dtypes.append(module.weight.dtype)
    )
    model(batch()).backward()
    return {
        "the same object": model.first.weight is weight,
        "stored": weight.dtype,
        "computed": dtypes,
    }


@observation
def parts_of_fsdp(mesh: DeviceMesh) -> Seen:
    model = chain(mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy, weight = group(model.first).policy(), model.first.weight
    local = torch.ones_like(weight.to_local())
    made = group(model.first).sharded_gradient(0, local)
    places = [
        [(type(module).__name__, name) for module, name in each]
        for each in group(model).places()
    ]
    assert isinstance(model, FSDPModule)
    return {
        "policy": (policy.param_dtype, policy.reduce_dtype, policy.offloads),
        "gradient": (
            made.placements == weight.placements,
            made.shape == weight.shape,
            made.to_local().dtype,
        ),
        "places": places,
        "members are of their own": len(group(model).members) == 1,
    }


@observation
def methods_as_forwards(mesh: DeviceMesh) -> Seen:
    model = chain(mesh)
    vars(model)["extra"] = lambda x: (
        group(model).is_unsharded,
        isinstance(model.odd, DTensor),
        x,
    )
    register_fsdp_forward_method(model, "extra")
    made = vars(model).pop("extra")
    return {"inside": made(1)}


@observation
def two_hops_of_torch(mesh: DeviceMesh) -> Seen:
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=two)
    model.set_requires_all_reduce(False)  # type: ignore[attr-defined]
    model(batch()).sum().backward()
    held = group(model).partial_sum_bytes()
    group(model).forget_partial_sum()
    return {"held": held, "forgotten": group(model).partial_sum_bytes()}


@observation
def split_layers(mesh: DeviceMesh) -> Seen:
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(
        distribute_tensor(layer.weight.detach(), both["tensor"], [Shard(0)])
    )
    fully_shard(layer, mesh=both["shard"])
    weight: Any = layer.weight
    return {
        "axes": weight.device_mesh.mesh_dim_names,
        "local": tuple(weight.to_local().shape),
    }


@observation
def tensors(mesh: DeviceMesh) -> Seen:
    weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]))
    storage, local = weight.untyped_storage(), weight._local_tensor  # type: ignore[attr-defined]
    alike = storage is weight.untyped_storage()
    with torch.no_grad():
        weight.add_(1)
    written = weight._version
    weight.data = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)])
    handle = weight.register_hook(lambda gradient: gradient)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    return {
        "one storage object": alike,
        "written": written > 0,
        "assigned": weight.untyped_storage() is not storage
        and weight._local_tensor is local,  # type: ignore[attr-defined]
        "hooks": (
            bool(weight._backward_hooks),
            bool(weight._post_accumulate_grad_hooks),
            handle is not None,
        ),
        "gradients' dtype": weight.grad_dtype,
        "to_local shares": weight.to_local().data_ptr() == local.data_ptr(),
        "passes": (backward_pass(), _pass_inside()),
    }


@observation
def dispatch_rules(mesh: DeviceMesh) -> Seen:
    """A rule for an operation of DTensors, which leaves some calls to torch."""
    plain = torch.ones(2, 2, requires_grad=True)
    shard = DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)])
    implicit: list[bool] = []

    def rule(
        kind: type, function: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        implicit.append(DTensor._op_dispatcher._allow_implicit_replication)
        implicit.append(any(each.requires_grad for each in args))
        return (
            args[0].detach() + args[1].full_tensor()
            if type(args[0]) is torch.Tensor
            else NotImplemented
        )

    torch.library.register_torch_dispatch(
        torch.ops.aten.nextafter.default, DTensor, rule
    )
    results = [torch.nextafter(plain, shard), torch.nextafter(shard, shard)]
    with implicit_replication():
        torch.nextafter(shard, plain)
    return {
        "results": [type(each) is DTensor for each in results],
        "rule saw": implicit,
    }


def _pass_inside() -> bool:
    seen: list[int] = []
    for _ in range(2):
        value = torch.ones(1, requires_grad=True)
        value.register_hook(lambda _: seen.append(backward_pass()))
        value.sum().backward()
    return -1 not in seen and seen[0] != seen[1]


def observe() -> dict[str, Seen | str]:
    """Make every observation on this rank; one that raises is its error in words."""
    found: dict[str, Seen | str] = {}
    mesh = init_device_mesh("cpu", (2,))
    for look in OBSERVATIONS:
        try:
            found[look.__name__] = look(mesh)
        except Exception as error:
            found[look.__name__] = f"{type(error).__name__}: {error}"
    return found
