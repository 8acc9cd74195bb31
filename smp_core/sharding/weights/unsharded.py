"""A sharded module that is a plain one for a while, with unsharded values on the host:
no call of it communicates.

Code that one rank runs alone can then use the model, such as a `save_pretrained` that
runs it for a model card. The module itself changes, not a copy of it, because others
may hold references to it. nn.Module has no public list of its hooks; FSDP2's are told
from a user's by the module in which they are defined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from smp_core.sharding.weights.delayed_tensors import classes_before_sharding
from smp_core.torch_facts import clean_name

_LIBRARIES = ("torch.distributed.", "smp_core.", "lightning_smp.", "accelerate_smp.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@contextlib.contextmanager
def unsharded(
    module: nn.Module,
    values: Mapping[str, Tensor],
    refusal: str = "",
    refused: Container[nn.Module] = (),
) -> Iterator[None]:
    """Let a module and its parts hold unsharded values inside the block, and run
    without their sharding hooks.

    Args:
        module: a sharded module, or a part of one.
        values: unsharded tensors on the host, by the module's names.
        refusal: why calls of the ``refused`` raise ``RuntimeError``.
        refused: modules that one rank cannot run.
    """
    # Everything is undone in the reverse order, also where the block raises.
    with contextlib.ExitStack() as restored:
        shown: dict[int, nn.Parameter] = {}
        for name, part in module.named_modules():
            prefix = clean_name(f"{name}.") if name else ""
            _show_values(part, prefix, values, shown, restored)
            _hide_hooks(part, restored)
            if part in refused:
                handle = part.register_forward_pre_hook(_refusing(refusal))
                restored.callback(handle.remove)
        # Names in a file of Transformers are by the names of classes.
        restored.enter_context(classes_before_sharding(module))
        yield


def _show_values(
    part: nn.Module,
    prefix: str,
    values: Mapping[str, Tensor],
    shown: dict[int, nn.Parameter],
    restored: contextlib.ExitStack,
) -> None:
    """Put values in the place of a module's own parameters, and copies on the host in
    that of its buffers."""
    # Names are taken first: the registry changes in the loop.
    for name, parameter in list(
        part.named_parameters(recurse=False, remove_duplicate=False)
    ):
        value = values.get(prefix + name)
        if value is None:
            continue
        if id(parameter) not in shown:  # a tied parameter stays one parameter
            # Codes of quantised weights are integers, which take no gradient.
            trains = parameter.requires_grad and (
                value.is_floating_point() or value.is_complex()
            )
            shown[id(parameter)] = nn.Parameter(value, requires_grad=trains)
        restored.callback(part.register_parameter, name, parameter)
        part.register_parameter(name, shown[id(parameter)])
    for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
        restored.callback(setattr, part, name, buffer)
        setattr(part, name, buffer.detach().to("cpu", copy=True))


def _hide_hooks(part: nn.Module, restored: contextlib.ExitStack) -> None:
    """Take the sharding's forward hooks off a module."""
    for kind in _HOOKS:
        # Libraries' hooks go, a user's stay, in their order.
        hooks = getattr(part, kind)
        own = {key: hook for key, hook in hooks.items() if not _is_a_librarys(hook)}
        before = dict(hooks)
        restored.callback(_put_back, hooks, before)
        _put_back(hooks, own)


def _put_back(hooks: dict[int, Any], content: Mapping[int, Any]) -> None:
    hooks.clear()
    hooks.update(content)


def _is_a_librarys(hook: Any) -> bool:
    return f"{getattr(hook, '__module__', '')}.".startswith(_LIBRARIES)


def _refusing(words: str) -> Any:
    def refuse(*_: Any) -> None:
        raise RuntimeError(words)

    return refuse
