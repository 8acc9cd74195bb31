"""Replicated parameters are computed with in the dtype that the parameters of units are
gathered in.

FSDP2 casts what it gathers. What no unit can hold (parameters tied across units, 0-d
ones) stays a plain tensor in the dtype that it is stored in, and would meet gathered
parameters and activations in another one. So from the beginning of the outermost call
of a module around such a parameter to its end, modules show a cast of it. The cast is
an operation of autograd: gradients arrive at the stored parameter, in its dtype.

A cast is no ``nn.Parameter``, which is all that a module takes by assignment under a
parameter's name: it is put where ``nn.Module`` keeps them (``_parameters``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smp_core.torch_facts import is_absent


class CastParameters:
    """The casts of a model's replicated parameters.

    Args:
        dtypes: name of a parameter -> dtype that it computes in.
        recomputed: modules whose forward will run again in backward, without its hooks;
            checkpointing is applied to them after this.
    """

    def __init__(
        self,
        model: nn.Module,
        dtypes: Mapping[str, torch.dtype],
        recomputed: Iterable[nn.Module],
    ) -> None:
        # The module, or the call of a method, that shows casts.
        self._outermost: object = None
        self._shown: list[tuple[nn.Module, str, nn.Parameter, Tensor]] = []
        # By identity, because one parameter may be shown under several names.
        named = dict(model.named_parameters(remove_duplicate=False))
        ids = {
            id(named[name]): dtype
            for name, dtype in dtypes.items()
            if not is_absent(named[name])
        }
        self._places = [
            (module, name, ids[id(parameter)])
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in ids
        ]
        # Any module around such a parameter may be called first.
        holding = {module for module, _, _ in self._places}
        around = [
            module
            for module in model.modules()
            if ids and not holding.isdisjoint(module.modules())
        ]
        for module in around:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, always_call=True)
        # Checkpointing runs their forward alone, without the hooks above.
        for module in set(around).intersection(recomputed):
            vars(module)["forward"] = self._showing(module.forward)

    @contextlib.contextmanager
    def shown(self, by: object) -> Iterator[None]:
        """Let modules show casts inside; ``by`` is the module or the call that
        begins."""
        self._begin(by)
        try:
            yield
        finally:
            self._end(by)

    def _showing(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that makes its own casts: in its recomputation it makes them
        inside, too."""

        @functools.wraps(forward)
        def showing(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():  # nothing is computed again
                return forward(*args, **kwargs)
            # Casts of the outer call would belong to a graph that recomputation does
            # not have.
            outermost, around = self._outermost, self._shown
            self._put_back()
            self._outermost = showing
            self._show()
            try:
                return forward(*args, **kwargs)
            finally:
                self._put_back()
                self._outermost, self._shown = outermost, around
                # The outer call goes on with its own.
                for module, name, _, cast in around:
                    module._parameters[name] = cast  # type: ignore[assignment]

        return showing

    @torch.compiler.disable
    def _begin(self, by: object, *_: Any) -> None:
        # The same module begins again without having ended: its forward raised.
        if self._outermost is by:  # was interrupted
            self._end(by)
        if self._outermost is None:
            self._outermost = by
            self._show()

    @torch.compiler.disable
    def _end(self, by: object, *_: Any) -> None:
        if self._outermost is by:
            self._outermost = None
            self._put_back()

    def _show(self) -> None:
        # Tied places show one cast, so that its gradient is added up once.
        casts: dict[nn.Parameter, Tensor] = {}
        for module, name, dtype in self._places:
            parameter = module.get_parameter(name)
            if parameter.dtype != dtype:
                if parameter not in casts:
                    casts[parameter] = parameter.to(dtype)
                self._shown.append((module, name, parameter, casts[parameter]))
        for module, name, _, cast in self._shown:
            module._parameters[name] = cast  # type: ignore[assignment]

    def _put_back(self) -> None:
        for module, name, parameter, cast in self._shown:
            if module._parameters.get(name) is cast:
                module._parameters[name] = parameter
        self._shown = []
