"""Models on the meta device that can be run all the same: of what they compute there
are shapes and no values, while what follows from their inputs alone (positions, masks)
has values as ever."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

# _subclasses: torch's documentation of fake tensors has it.
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)


@contextlib.contextmanager
def with_fake_values(model: nn.Module, refusal: str) -> Iterator[None]:
    """Let fake tensors on the CPU stand for the parameters and buffers of a model that
    are on the meta device; without any there is nothing to do.

    Raises:
        ValueError: code inside needs a value; begins with ``refusal``.
    """
    places = [
        (module, name, tensor)
        for module in model.modules()
        for named in (
            module.named_parameters(recurse=False),
            module.named_buffers(recurse=False),
        )
        for name, tensor in named
        if tensor.is_meta
    ]
    if not places:
        yield
        return
    fakes: dict[Tensor, Tensor] = {}  # tied ones stay tied
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for _, _, tensor in places:
        if tensor not in fakes:
            fakes[tensor] = _fake(tensor, mode)
    # Put back whatever happens; what fails for want of values is said so.
    try:
        for module, name, tensor in places:
            setattr(module, name, fakes[tensor])
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{refusal}it is on the meta device, and its forward cannot be played without values "
            f"({type(error).__name__}: {error}); build it with values, and write delayed_init=False"
        ) from error
    finally:
        for module, name, tensor in places:
            setattr(module, name, tensor)


def is_played(module: nn.Module) -> bool:
    """Return whether fake tensors stand for parameters of a module at present."""
    return any(isinstance(parameter, FakeTensor) for parameter in module.parameters())


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
