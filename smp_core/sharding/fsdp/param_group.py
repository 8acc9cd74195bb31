"""ParamGroup: FSDP2's parameter group behind one unit, as far as this project needs
more of it than the public API.

This file is for the newest FSDP2 (torch >= 2.15), in which gradients accumulate on the
unsharded parameter. ``param_group_2_13.py`` and ``param_group_2_11.py`` override what
differs in older ones, and go with them. :mod:`smp_core.sharding.fsdp.internals` chooses
by probing for names, and lists every private name, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from smp_core.comm import Deferred


@dataclass(frozen=True)
class GivenPolicy:
    """The dtypes that a pre-sharded model computes and reduces in (None: the
    parameters' own), and whether its shards live in host memory."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offloads: bool


class ParamGroup:
    """The parameters that FSDP2 gathers, frees and reduces together.

    Args:
        module: the unit; ``fully_shard`` was called on it, perhaps together with
            others.
        group: FSDP2's own object.

    Attributes:
        members: FSDP2's own objects, one for each parameter, in order; for the files of
            this room.
        key: a number that is equal for two of these of the same group.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        self.module: Any = module
        self.members: list[Any] = group.fsdp_params
        self.key = id(group)
        self._group = group

    # Parameters

    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters (DTensors), trainable or not."""
        return [member.sharded_param for member in self.members]

    def places(self) -> list[list[tuple[nn.Module, str]]]:
        """Return the modules that show each parameter, with its name there: those of
        the unit that are in no unit inside of it. They have to show shards."""
        indices = {
            parameter: index for index, parameter in enumerate(self.parameters())
        }
        # By position, as all lists of this class are.
        found: list[list[tuple[nn.Module, str]]] = [[] for _ in indices]
        left = list(self._group.modules)[::-1]
        while left:
            module = left.pop()
            inside = [
                each for each in module.children() if not isinstance(each, FSDPModule)
            ]
            left += inside[::-1]
            for name, parameter in module.named_parameters(
                recurse=False, remove_duplicate=False
            ):
                if parameter in indices:
                    found[indices[parameter]].append((module, name))
        return found

    def copies(self) -> list[nn.Parameter | None]:
        """Return the unsharded parameters, also those that are freed at the moment:
        their storages have no bytes. None: never gathered."""
        return [getattr(member, "_unsharded_param", None) for member in self.members]

    def shard_sizes(self) -> list[int]:
        """Return the elements of each parameter's shard in gathers and reductions,
        padding included."""
        return [member.padded_sharded_param_size.numel() for member in self.members]

    def reduction_order(self) -> list[int]:
        """Return the indices of the parameters in the order in which a flat reduced
        gradient holds them: by the dtype of their gradients, which a ``grad_dtype`` of
        a parameter's own may set."""
        # FSDP2 groups by dtype in the order of first appearance.
        by_dtype: dict[Any, list[int]] = {}
        for index, parameter in enumerate(self.parameters()):
            by_dtype.setdefault(parameter.grad_dtype, []).append(index)
        return [index for indices in by_dtype.values() for index in indices]

    def shards_changed(self, indices: Iterable[int] | None = None) -> None:
        """Let FSDP2 see that shards were exchanged, of these parameters or of all; it
        looks at the first forward only."""
        for index in range(len(self.members)) if indices is None else indices:
            self.members[index].reset_sharded_param()
        # Dtypes are looked up for the whole group, and only where some shards are
        # others.
        if indices is not None:
            self._group._init_mp_dtypes()

    def see_dtypes(self, indices: Iterable[int]) -> None:
        """Let FSDP2 look again for dtypes of gradients, of these parameters, which may
        have been frozen at its first look; this generation looks at frozen ones too."""

    # Dtypes

    def policy(self) -> GivenPolicy:
        """Return what the group computes and reduces in, and where its shards live."""
        return self._policy(self.members[0].mp_policy)

    def _policy(self, dtypes: MixedPrecisionPolicy) -> GivenPolicy:
        offloads = type(self._group.offload_policy) is not OffloadPolicy
        return GivenPolicy(dtypes.param_dtype, dtypes.reduce_dtype, offloads)

    def sum_dtype(self, index: int) -> torch.dtype:
        """Return what FSDP2 accumulates and reduces the parameter's gradient in."""
        parameter = self.parameters()[index]
        return self.policy().reduce_dtype or parameter.grad_dtype or parameter.dtype

    # Gathers

    @property
    def is_sharded(self) -> bool:
        """True while only shards are there."""
        return self._group.is_sharded

    @property
    def is_unsharded(self) -> bool:
        """True while the parameters are there unsharded."""
        return self._group.is_unsharded

    @property
    def has_gather_in_flight(self) -> bool:
        """True while a gather runs that no forward or backward has waited for."""
        return self._group._all_gather_result is not None

    def replace_gather(self, begin: Callable[[bool], None]) -> Callable[[bool], None]:
        """Replace what begins every gather, in forward, backward and ahead of them;
        return what did so far."""
        before, self._group.unshard = self._group.unshard, begin
        return before

    def reshard(self) -> None:
        """Free the unsharded parameters, also after a forward that failed:
        ``FSDPModule.reshard`` takes the group to be inside of it still."""
        self._group._to_sharded()

    def drop_gather(self) -> None:
        """Forget the gather in flight, if there is one. Its messages have to arrive all
        the same, or they would meet those of the next gather, and on a device it has to
        be over before its memory is used again."""
        result = self._group._all_gather_result
        if result is None:
            return
        if result.all_gather_event is not None:  # None without an accelerator
            # The present stream; one of torch.accelerator's would not.
            result.all_gather_event.wait()
        self._group._all_gather_result = None
        work = result.all_gather_work
        if work is not None and not (isinstance(work, Deferred) and work.has_failed):
            work.wait()

    # Gradients

    def replace_reduction(self, reduce: Callable[..., None]) -> Callable[..., None]:
        """Replace what FSDP2 calls when it reduces the group's gradients; return what
        it called so far."""
        before, self._group.post_backward = self._group.post_backward, reduce
        return before

    def reduce(self) -> None:
        """Reduce the gradients now, as at the end of the group's backward."""
        self._group.post_backward()

    def end_of_reduction(self) -> None:
        """Do for a group that was reduced outside of a backward pass what the end of
        one does."""
        # As behind a pass: the sums are awaited, and the group is idle again.
        self._group.finalize_backward()
        self._group._training_state = type(self._group._training_state).IDLE
        self._let_go_of_reductions()

    def _let_go_of_reductions(self) -> None:
        """Let go of the inputs of reductions, which FSDP2 keeps until the next, or the
        end of the pass. The present stream waits for them already."""
        self.module._get_fsdp_state()._comm_ctx.reduce_scatter_states.clear()

    def take_gradients_as_they_come(self) -> None:
        """Let the pass that begins leave gradients that are held in the dtype in which
        they are computed, as those that are reduced: FSDP2 would have autograd add up
        the uses of a parameter in :meth:`sum_dtype`."""
        for copy in self.copies():
            if copy is not None and not isinstance(copy, DTensor):
                copy.grad_dtype = None

    def let_go_of_sum(self) -> None:
        """Let go of the sum that the hook of a reduction was given: FSDP2 would hold
        those of all units to the end of the pass, beside the sums that they were added
        to. The hook has told its stream that it reads them."""
        self._group._all_reduce_state = None

    def hand_over(self, index: int, gradient: Tensor) -> None:
        """Make ``gradient``, in :meth:`sum_dtype`, what FSDP2 reduces next for the
        parameter."""
        self.members[index]._unsharded_param.grad = gradient

    def sharded_gradient(self, index: int, local: Tensor) -> DTensor:
        """Return this rank's part of a parameter's gradient as a DTensor like the
        parameter. ``DTensor.from_local`` takes ten times as long, for each parameter in
        each step."""
        return self.members[index].to_sharded_dtensor(local)

    def forget_gradients(self) -> None:
        """Drop the gradients of shards and unsharded parameters."""
        for parameter in [*self.parameters(), *self.copies()]:
            if parameter is not None:
                parameter.grad = None

    # torch's own replica all-reduce, of a model that was sharded on a 2-D mesh

    def partial_sum_bytes(self) -> int:
        """Return the bytes of gradients that were reduced inside the partition group
        and not across replicas yet."""
        held = self._group._partial_reduce_output
        return 0 if held is None else held.nbytes

    def forget_partial_sum(self) -> None:
        """Drop what :meth:`partial_sum_bytes` counts."""
        self._group._partial_reduce_output = None


def one_shard_each(groups: Sequence[ParamGroup]) -> None:
    """Let a parameter that two groups manage, because it was tied after they were
    sharded, have one shard: where its rows do not divide evenly each group would pad a
    copy of its own, and gather that one for ever."""
    # Both groups name the same parameter, and get the storage that the last one made.
    shards: dict[nn.Parameter, Tensor] = {}
    for group in groups:
        group.shards_changed()
        shards |= {
            member.sharded_param: member._sharded_param_data for member in group.members
        }
    for member in (member for group in groups for member in group.members):
        member._sharded_param_data = shards[member.sharded_param]


def reset_passes(modules: Iterable[FSDPModule]) -> None:
    """Discard what a failed forward or backward left in FSDP2.

    Args:
        modules: all that ``fully_shard`` was called on.
    """
    # Only roots hold the state of a pass.
    for module in modules:
        if module._get_fsdp_state()._is_root:
            module.reset_iter_state()
