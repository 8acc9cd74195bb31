"""Every private name that this room uses, with its reason, and whether the installed
torch has it.

FSDP2 has public methods for what a unit communicates with, when it is gathered ahead,
freed and reduced. It has none for what a unit consists of, for hooks of gathers and
reductions, and for what an interrupted pass leaves behind. :data:`INTERNALS` is what a
maintainer reads beside the diff of a new torch. `tests/core/test_architecture.py` holds
it against the code, and its length against the number it had: it may only become
shorter. Each entry names a request for a public way; the word is the heading of its
section: `docs/upstream.md#<request>`.

:func:`require_internals` looks for the same names before anything is sharded, so that a
torch that lacks one is refused in words. `tests/contract` tries out what they do.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp_core.sharding.fsdp import param_group, param_group_2_11, param_group_2_13
from smp_core.sharding.fsdp.param_group import ParamGroup
from smp_core.sharding.fsdp.param_group_2_11 import ParamGroup211
from smp_core.sharding.fsdp.param_group_2_13 import ParamGroup213
from smp_core.torch_facts import TESTED_TORCH

logger = logging.getLogger("smp")


@dataclass(frozen=True)
class Internal:
    """Private names of one class or module that serve one purpose.

    Attributes:
        owner: the class of FSDP2, or the dotted path of what is public around it.
        names: of methods with "()" behind them, otherwise of attributes.
        reason: what they are used for.
        request: the heading of a section of docs/upstream.md, which asks for a public
            way.
        only: the generation that needs them: "newest", "2.13" (2.13 and 2.14), "2.11"
            (2.11 and 2.12), "" for all.
    """

    owner: str
    names: tuple[str, ...]
    reason: str
    request: str
    only: str = ""


_OLDER = "2.11 2.13"

INTERNALS = (
    # What a unit consists of
    Internal(
        "FSDPModule",
        ("_get_fsdp_state()",),
        "the way from a module to its unit",
        "unit",
    ),
    Internal("FSDPState", ("_fsdp_param_group",), "a unit's parameters", "unit"),
    Internal(
        "FSDPState",
        ("_is_root",),
        "which module reset_iter_state may be called on",
        "unit",
    ),
    Internal(
        "FSDPParamGroup", ("fsdp_params",), "which parameters, in which order", "unit"
    ),
    Internal(
        "FSDPParamGroup",
        ("is_sharded", "is_unsharded"),
        "what an earlier call left",
        "unit",
    ),
    Internal(
        "FSDPParamGroup",
        ("offload_policy",),
        "where the shards of a pre-sharded model live",
        "unit",
    ),
    Internal(
        "FSDPParamGroup",
        ("mp_policy",),
        "what a pre-sharded model computes and reduces in",
        "unit",
        _OLDER,
    ),
    Internal(
        "FSDPParam",
        ("mp_policy",),
        "what a pre-sharded model computes and reduces in",
        "unit",
        "newest",
    ),
    Internal("FSDPParam", ("sharded_param",), "a parameter's shard", "unit"),
    Internal(
        "FSDPParam",
        ("padded_sharded_param_size",),
        "places in the flat tensor of set_all_reduce_hook",
        "unit",
    ),
    Internal(
        "FSDPParam",
        ("_unsharded_param",),
        "the gathered copy: which received a gradient",
        "unit",
    ),
    # Shards that were exchanged
    Internal(
        "FSDPParam",
        ("reset_sharded_param()", "_sharded_param_data"),
        "shards in another dtype from the first optimizer on, or tied after they were sharded: FSDP2 looks at the "
        "first forward only",
        "exchanged",
    ),
    Internal(
        "FSDPParamGroup", ("_init_mp_dtypes()",), "the same for dtypes", "exchanged"
    ),
    Internal(
        "FSDPParam",
        ("_sharded_local_tensor",),
        "weights that are gathered in FP8: the documented way, a tensor subclass as the parameter, would show in state "
        "dicts",
        "extensions",
    ),
    # Gathers
    Internal(
        "FSDPParamGroup",
        ("unshard()",),
        "patched: every gather, also those of backward passes",
        "hooks",
    ),
    Internal(
        "FSDPParamGroup",
        ("_to_sharded()",),
        "reshards after a forward that failed",
        "failed",
    ),
    Internal(
        "FSDPParamGroup",
        ("_all_gather_result",),
        "gathers ahead of a forward that never came",
        "cancel",
    ),
    Internal(
        "AllGatherResult", ("all_gather_event", "all_gather_work"), "the same", "cancel"
    ),
    # Reductions
    Internal(
        "FSDPParamGroup",
        ("post_backward()",),
        "patched: what was received, before it is reduced",
        "hooks",
    ),
    Internal(
        "FSDPParamGroup",
        ("finalize_backward()", "_training_state"),
        "reductions outside of a pass",
        "reduce",
    ),
    Internal("FSDPState", ("_comm_ctx",), "the same", "reduce"),
    Internal(
        "FSDPCommContext",
        ("reduce_scatter_states",),
        "inputs of reductions, kept until the next",
        "reduce",
        "newest 2.13",
    ),
    Internal(
        "FSDPCommContext", ("reduce_scatter_state",), "the same", "reduce", "2.11"
    ),
    Internal(
        "FSDPParam",
        ("unsharded_accumulated_grad",),
        "gradients for a later reduction",
        "reduce",
        _OLDER,
    ),
    Internal(
        "FSDPParamGroup",
        ("_all_reduce_state",),
        "sums of units, held to the end of a pass",
        "reduce",
        "newest 2.11",
    ),
    Internal(
        "FSDPParam",
        ("to_sharded_dtensor()",),
        "DTensor.from_local takes ten times as long",
        "gradient",
    ),
    Internal(
        "FSDPParamGroup",
        ("_partial_reduce_output",),
        "torch's own two-hop between micro-batches",
        "partial",
    ),
    # Passes
    Internal("torch", ("_C",), "the number of the backward pass that runs", "autograd"),
    Internal("torch._C", ("_current_graph_task_id()",), "the same", "autograd"),
    Internal(
        "torch.autograd.Variable",
        ("_execution_engine",),
        "the end of a backward pass",
        "autograd",
        _OLDER,
    ),
    Internal(
        "torch.utils",
        ("_python_dispatch",),
        "hooks of units inside selectively checkpointed modules are no operations of the model",
        "modes",
    ),
    Internal(
        "torch.utils._python_dispatch",
        ("_disable_current_modes()",),
        "the same",
        "modes",
    ),
    # What a failed pass leaves, where there is no reset_iter_state
    Internal(
        "FSDPState",
        ("_modules_to_run_forward",),
        "reset after a failed pass",
        "failed",
        "2.11",
    ),
    Internal("FSDPState", ("_state_ctx",), "the same", "failed", "2.11"),
    Internal(
        "FSDPStateContext",
        ("iter_forward_root", "post_backward_final_callback_queued"),
        "the same",
        "failed",
        "2.11",
    ),
    Internal(
        "FSDPCommContext",
        ("all_gather_state", "post_forward_order"),
        "the same",
        "failed",
        "2.11",
    ),
    Internal(
        "FSDPParamGroup",
        ("_post_reduce_event", "_reshard_after_forward_event", "_post_forward_indices"),
        "the same",
        "failed",
        "2.11",
    ),
    # Tensors
    Internal(
        "DTensor",
        ("_local_tensor",),
        "whether .data was assigned; to_local makes new tensors",
        "tensors",
    ),
    Internal(
        "torch.Tensor", ("_version",), "whether a tensor was written into", "tensors"
    ),
    Internal(
        "torch.Tensor",
        ("_backward_hooks", "_post_accumulate_grad_hooks"),
        "where register_hook and its sibling put what they are given",
        "tensors",
    ),
)


def generation() -> str:
    """Return which FSDP2 this is: "newest" (torch >= 2.15), "2.13" (2.13 and 2.14),
    "2.11" (2.11 and 2.12)."""
    if not hasattr(FSDPModule, "reset_iter_state"):
        return "2.11"
    if not hasattr(FSDPModule, "set_manual_backward_finalization"):
        return "2.13"
    return "newest"


def needed(of: str) -> list[Internal]:
    """Return the internals that a generation needs."""
    return [
        internal
        for internal in INTERNALS
        if not internal.only or of in internal.only.split()
    ]


@functools.cache
def require_internals() -> None:
    """Refuse a torch without one of the names that this room uses; warn, once, at one
    that is newer than those tested.

    Raises:
        RuntimeError: in words, with what to install.
    """
    # Missing names are fatal; a version that was never tested is worth a line.
    missing = missing_internals()
    newest = TESTED_TORCH[-1]
    tested = f"torch-smp is tested with torch {', '.join(TESTED_TORCH)}"
    if missing:
        raise RuntimeError(
            f"this is torch {torch.__version__}, whose FSDP2 has no {', '.join(missing)}, which torch-smp needs; "
            f"{tested}: pip install 'torch=={newest}'"
        )
    if Version(torch.__version__).release[:2] > Version(newest).release[:2]:
        logger.warning(
            "this is torch %s; %s. All that it needs of FSDP2 is there by name",
            torch.__version__,
            tested,
        )


def missing_internals() -> list[str]:
    """Return what this torch lacks of the names that its generation needs, as
    "owner.name"."""
    owners, missing = _owners(), []
    for internal in needed(generation()):
        owner = owners[internal.owner]
        for name in internal.names:
            bare = name.removesuffix("()")
            is_attribute = bare == name and isinstance(owner, type)
            if not hasattr(owner, bare) and not (
                is_attribute and bare in _attributes(owner)
            ):
                missing.append(f"{internal.owner}.{bare}")
    _attributes.cache_clear()
    return missing


def _owners() -> dict[str, Any]:
    """Return the owners of :data:`INTERNALS` by name: the classes behind FSDPModule,
    found where each is used, and what is at dotted paths of torch; None where one is
    not there."""
    owners: dict[str, Any] = {"FSDPModule": FSDPModule, "DTensor": DTensor}
    # These classes are private: each is found among the globals of a method that uses
    # it.
    for name, user in (
        ("FSDPState", "FSDPModule"),
        ("FSDPStateContext", "FSDPState"),
        ("FSDPParamGroup", "FSDPState"),
        ("FSDPCommContext", "FSDPState"),
        ("FSDPParam", "FSDPParamGroup"),
        ("AllGatherResult", "FSDPParamGroup"),
    ):
        function = next(_functions(owners[user]), None)
        owners[name] = None if function is None else function.__globals__.get(name)
    for path in {internal.owner for internal in INTERNALS} - owners.keys():
        owners[path] = torch
        for name in path.split(".")[1:]:
            owners[path] = getattr(owners[path], name, None)
    return owners


def _functions(kind: Any) -> Iterator[Any]:
    """Yield the functions that a class defines, without their decorators."""
    for member in vars(kind).values() if isinstance(kind, type) else ():
        function: Any = inspect.unwrap(
            member.fget if isinstance(member, property) else member  # type: ignore[arg-type]
        )
        if inspect.isfunction(function):
            yield function


@functools.cache
def _attributes(kind: type) -> set[str]:
    """Return the names that a class declares, or its methods use: the attributes of its
    objects are among them."""
    names = set(inspect.get_annotations(kind))
    codes = [function.__code__ for function in _functions(kind)]
    # Comprehensions and inner functions have code objects of their own.
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [
            constant for constant in code.co_consts if isinstance(constant, CodeType)
        ]
    return names


def state_of(module: nn.Module | FSDPModule) -> Any:
    """Return FSDP2's state of a module that ``fully_shard`` was called on."""
    return module._get_fsdp_state()  # type: ignore[operator]


def group_of(module: Any) -> ParamGroup | None:
    """Return the parameters of a module that ``fully_shard`` was called on; None: it
    has none of its own."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return None
    older = {"2.11": ParamGroup211, "2.13": ParamGroup213}
    return older.get(generation(), ParamGroup)(module, group)


def groups_of(model: nn.Module) -> Iterator[ParamGroup]:
    """Yield the groups of a model's units."""
    for module in model.modules():
        group = group_of(module) if isinstance(module, FSDPModule) else None
        if group is not None:
            yield group


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the present backward pass is over."""
    queue = getattr(
        torch.autograd.graph, "queue_callback", param_group_2_13.queue_callback
    )
    queue(callback)


def reset_passes(modules: Iterable[FSDPModule]) -> None:
    """Discard what a failed forward or backward left in FSDP2, of all modules of a
    model that it manages."""
    of_this_torch = param_group_2_11 if generation() == "2.11" else param_group
    of_this_torch.reset_passes(modules)
