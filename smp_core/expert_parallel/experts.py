"""deal_experts(): each rank gets some of the experts of every layer, and their forward
sends tokens to where they are. Of a model that Transformers dealt when it loaded it,
experts stay where they are, and tokens go our ways.

The ranks of a partition group are ``rest`` x ``experts``, expert ranks innermost:
DTensors ``Shard(0)`` over expert ranks, which FSDP2 then shards over the rest. An
expert's gradient is then summed over expert ranks by the way back of its tokens, over
the rest by FSDP2's reduce-scatter, and over replicas by the hop: over all ranks, as any
other parameter's, and it is divided once. No expert's part is on two ranks of a
partition group, so norms count it once.

Shape letters: T tokens, K experts of a token, R rows, H features.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from smp_core.activations import SENDS
from smp_core.cluster import Axis, SmpMesh, of_all_ranks
from smp_core.comm import CommMeter
from smp_core.expert_parallel.deep_ep import DeepEpDispatch
from smp_core.expert_parallel.dispatch import Dispatch, FlatDispatch, TwoHopDispatch
from smp_core.expert_parallel.trial import try_experts
from smp_core.plan import DEALT, ExpertShape, Plan, adapters_of
from smp_core.torch_facts import local_part


@torch.no_grad()
def deal_experts(
    model: nn.Module, mesh: SmpMesh, plan: Plan, meter: CommMeter
) -> dict[str, DeviceMesh]:
    """Leave each rank its experts, in place, before anything is sharded. Collective
    over the world.

    Args:
        model: its experts hold the same values on all ranks, or are on meta; or
            Transformers has dealt them.

    Raises:
        ValueError: experts that cannot be computed on several ranks, or that were dealt
            to others than these, with what to write.

    Returns:
        the ranks that hold parts of the same experts, by the name of each unit of
        experts, which is sharded over them.
    """
    degree = plan.knobs.expert_parallel_degree
    assert isinstance(degree, int)
    ranks = mesh.experts(degree, in_stages=plan.experts_in_stages)
    # How tokens are sent: by DeepEP, in two hops over nodes, or directly.
    dispatch: Dispatch
    if plan.knobs.collectives.expert_transport == "deep_ep":
        dispatch = DeepEpDispatch(ranks.all, meter)
    elif ranks.stages is not None:
        dispatch = TwoHopDispatch(*ranks.stages, meter)
    else:
        dispatch = FlatDispatch(ranks.all, meter)
    # Experts of one's own are tried, which raises on the ranks of all stages.
    problem = None if plan.given is not None else _first_problem(model, plan, degree)
    for told in filter(None, of_all_ranks(problem)):
        raise ValueError(told)
    # Every layer's experts: checked, dealt, and given a forward that sends tokens.
    for site in plan.shapes.experts:
        module: Any = model.get_submodule(site.name)
        _require_products(module, site.name)
        if plan.given is not None:
            _require_ranks(module, site, ranks.mesh["experts"])
            module.num_experts = site.experts
            # Transformers' own forward, which sends tokens itself, is taken off.
            vars(module).pop("forward", None)
        else:
            _require_whole_tokens(module, site.name, mesh)
            _keep_own(module, ranks.mesh)
        # The forward of the module, which gets other ranks' tokens; adapters around it
        # are passed by.
        adapters = adapters_of(model, site.name)
        # Their own forward would adapt weights of all experts, which no rank has.
        for adapter in adapters:
            adapter.forward = functools.partial(_call_base, adapter)
        own_forward = functools.partial(type(module).forward, module)
        # Tensor ranks may have put a forward around the experts: it computes with a
        # rank's part of each.
        inner = vars(module).get("forward") or own_forward
        setattr(module, SENDS, True)
        module.forward = _dispatching(
            module,
            inner,
            inspect.signature(own_forward),
            dispatch,
            site.experts,
            adapters,
        )
    return {site.name: ranks.mesh["rest"] for site in plan.shapes.experts}


def _require_whole_tokens(module: nn.Module, name: str, mesh: SmpMesh) -> None:
    """Refuse experts that tensor ranks leave whole and give different tokens: their
    gradients would be added up in forwards that ranks without rows leave out."""
    # Split experts have gradients of their own on each tensor rank.
    is_split = any(
        isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)
    )
    if mesh.tensor_degree > 1 and not is_split and "forward" in vars(module):
        raise ValueError(
            f"expert_parallel_degree beside tensor_parallel_degree={mesh.tensor_degree}: {name} is whole on tensor "
            f"ranks, which have different tokens; write the role 'experts' for it, or 'whole' for the module around it "
            f"(tensor_parallel={{'plan': {{'*.{name.rpartition('.')[2]}': 'experts'}}}}), or "
            "tensor_parallel={'sequence_parallel': false}"
        )


def _require_ranks(module: Any, site: ExpertShape, ranks: DeviceMesh) -> None:
    """Refuse experts that were dealt to other ranks than ours would be."""
    # A token's way is computed from the order of ranks, so this has to be the same one.
    for name, parameter in module.named_parameters(recurse=False):
        dealt = (
            parameter.device_mesh[DEALT].mesh
            if isinstance(parameter, DTensor)
            else None
        )
        if dealt is None or not torch.equal(dealt, ranks.mesh):
            raise ValueError(
                f"{site.name}.{name} came dealt to other ranks than {ranks.mesh.tolist()}; load the model without "
                f"distributed_config, and write expert_parallel_degree={ranks.size()}"
            )


def _keep_own(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leave this rank its experts alone."""
    for name, whole in list(module.named_parameters(recurse=False)):
        dealt = nn.Parameter(_own_part(whole, mesh), whole.requires_grad)
        # Attributes that users set on parameters (names of groups, marks) stay.
        dealt.__dict__.update(whole.__dict__)
        setattr(module, name, dealt)


def _first_problem(model: nn.Module, plan: Plan, degree: int) -> str | None:
    """Return what is wrong with a layer's experts of one's own, in words. Transformers'
    have one form, and what is on meta or on other stages has no numbers."""
    for site in plan.shapes.experts:
        module: Any = model.get_submodule(site.name)
        own = list(module.parameters(recurse=False))
        has_values = not any(each.is_meta or isinstance(each, DTensor) for each in own)
        if getattr(module, "smp_experts", False) and has_values:
            showing = functools.partial(_showing, module, site.experts)
            found = try_experts(module, site.name, degree, showing)
            if found is not None:
                return found
    return None


@contextlib.contextmanager
def _showing(module: Any, experts: int, first: int, number: int) -> Iterator[None]:
    """Let a module that holds all experts have some of them only."""
    kept = dict(module._parameters)
    try:
        module.num_experts = number
        for name, parameter in kept.items():
            module._parameters[name] = parameter.detach().narrow(0, first, number)
        yield
    finally:
        module._parameters.update(kept)
        module.num_experts = experts


def _require_products(module: Any, name: str) -> None:
    """Refuse float64 experts whose products are torch's grouped ones. (Transformers'
    choice of products has no public name to be read by:
    ``_experts_implementation``.)"""
    products = getattr(getattr(module, "config", None), "_experts_implementation", None)
    is_wide = any(
        parameter.dtype == torch.float64
        for parameter in module.parameters(recurse=False)
    )
    if is_wide and products == "grouped_mm":
        raise ValueError(
            f"{name} is of float64, which torch's grouped products do not take (experts_implementation='grouped_mm'); "
            "call model.set_experts_implementation('eager'), or train in float32 or bfloat16"
        )


def _own_part(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return this rank's experts of a parameter, of which tensor ranks may have parts
    of each expert."""
    # Equal stretches of experts, in the order of ranks.
    if not isinstance(whole, DTensor):
        over = mesh["experts"]
        own = whole.detach().chunk(over.size())[over.get_local_rank()].clone()
        return DTensor.from_local(own, over, [Shard(0)], run_check=False)
    # A part of each expert is here already: dealt along the experts, inside of expert
    # ranks.
    over = mesh["experts", Axis.TENSOR.value]
    own = whole.to_local().detach().chunk(over.size(0))[over.get_local_rank(0)].clone()
    placements = [Shard(0), *whole.placements]
    return DTensor.from_local(
        own, over, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _call_base(adapter: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call what an adapter is around: where the experts are, their weights are
    adapted."""
    return adapter.base_layer(*args, **kwargs)


def _dispatching(
    module: Any,
    inner: Callable[..., torch.Tensor],
    signature: inspect.Signature,
    dispatch: Dispatch,
    experts: int,
    adapters: Sequence[Any],
) -> Callable[..., torch.Tensor]:
    """Return the forward of experts of which a rank holds E / D: the same numbers as
    ``inner`` with all of them."""
    local_experts = experts // dispatch.degree
    first = dispatch.rank * local_experts

    def run(
        rows_RH: torch.Tensor, expert_R: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        # The module computes with this rank's experts, as if there were no others.
        with _local(module, local_experts):
            # No row: the zero still makes a graph through the exchanges and the
            # parameters.
            if not rows_RH.shape[0]:
                return rows_RH + _nothing_of(module, adapters)
            _adapt(module, adapters, first, local_experts)
            # Each row is for one expert, with a weight of 1; weights are applied where
            # the tokens are.
            alone_R1 = expert_R[:, None]
            return inner(rows_RH, alone_R1, torch.ones_like(alone_R1, dtype=dtype))

    @torch.compiler.disable  # how many rows there are is known in each call only
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        # Transformers' signature of fused experts, by place or by keyword.
        hidden, chosen, weights = signature.bind(*args, **kwargs).arguments.values()
        tokens_TH = hidden.reshape(-1, hidden.shape[-1])
        chosen_TK = chosen.reshape(-1, chosen.shape[-1])
        # A choice of no expert (-1, or a number beyond them) adds nothing to a token.
        is_none = (chosen_TK < 0) | (chosen_TK > experts)
        chosen_TK = chosen_TK.masked_fill(is_none, experts)
        weights_TK = weights.reshape(-1, weights.shape[-1])
        made_TH = dispatch(
            tokens_TH,
            chosen_TK,
            weights_TK,
            experts,
            functools.partial(run, dtype=weights.dtype),
        )
        made_TH = made_TH.to(hidden.dtype)
        # No view: FSDP2's hook on an output is lost where code adds to a view of it in
        # place.
        return made_TH if hidden.ndim == 2 else made_TH.view(hidden.shape).clone()

    return forward


@contextlib.contextmanager
def _local(module: Any, experts: int) -> Iterator[None]:
    """Let the module have this rank's experts only: plain tensors, or DTensors over
    tensor ranks with parts of each. (They go into ``_parameters``, which has no public
    name: setting an attribute takes nothing but parameters in the place of one.)"""
    kept, all_experts = dict(module._parameters), module.num_experts
    try:
        module.num_experts = experts
        for name, parameter in kept.items():
            # Adapters and biases that are no DTensors are shown as they are.
            module._parameters[name] = (
                _of_own_experts(parameter)
                if isinstance(parameter, DTensor)
                else parameter
            )
        yield
    finally:
        module._parameters.update(kept)
        module.num_experts = all_experts


def _of_own_experts(parameter: DTensor) -> torch.Tensor:
    own = parameter.to_local()
    # With tensor ranks too, what is left is split over these alone.
    if parameter.device_mesh.ndim == 1:
        return own
    return DTensor.from_local(
        own,
        parameter.device_mesh[Axis.TENSOR.value],
        parameter.placements[1:],
        run_check=False,
    )


def _adapt(module: Any, adapters: Sequence[Any], first: int, experts: int) -> None:
    """Add their part of PEFT's adapters to the weights of this rank's experts. Adapters
    are of all experts, and gathered with the layer around: a rank's gradients are zero
    for experts of others, and FSDP2 adds them up."""
    for adapter, active in _active(adapters):
        name = adapter.parameter_name
        left, right, scale = adapter.get_delta_factors(active)
        # This rank's stretch of factors for all experts.
        left = left.narrow(0, first, experts)
        right = right.narrow(0, first, experts)
        # Weights keep their dtype, as with PEFT.
        with torch.autocast(left.device.type, enabled=False):
            module._parameters[name] = torch.baddbmm(
                getattr(module, name), left, right, alpha=scale
            )


def _active(adapters: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the adapters that take part in a forward, each with the name that PEFT has
    it by."""
    for adapter in adapters:
        if not adapter.disable_adapters:
            yield from (
                (adapter, name)
                for name in adapter.active_adapters
                if name in adapter.lora_A
            )


def _nothing_of(module: nn.Module, adapters: Sequence[Any]) -> torch.Tensor:
    """Return a zero that depends on all parameters, for ranks without rows: their
    backward pass has to come through the exchanges like that of the others."""
    # One element of each parameter is enough for a gradient of zeros.
    own = [local_part(each) for each in module.parameters(recurse=False)]
    for adapter, active in _active(adapters):
        own += [adapter.lora_A[active].weight, adapter.lora_B[active].weight]
    firsts = [parameter.reshape(-1)[:1].sum() for parameter in own]
    return torch.stack(firsts).sum() * 0
