"""Random numbers in sharded tensors (``nn.init``, ``p.normal_()``,
``torch.randn_like(p)``): those that one process draws for the whole tensor, at every
degree.

torch draws for this rank's part: on CPU ranks with equal seeds draw equal numbers then,
so that rows repeat; on CUDA numbers differ by rank, and with the number of ranks. Here
every rank draws the whole tensor and keeps its part, from the state that rank 0's
generator has, so that replicas agree, too. It takes the memory of the whole tensor
while it draws, and all ranks have to ask. Dropout of a DTensor is left to torch: it
belongs to a computation and not to a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from smp_core.checkpoint import own_part
from smp_core.cluster import mesh_on
from smp_core.sharding.operands import refuse_copies
from smp_core.sharding.optimizer.shards import local_of
from smp_core.torch_facts import ABSENT, is_absent

DRAWN = (
    "normal_ uniform_ log_normal_ cauchy_ exponential_ geometric_ bernoulli_ random_ "
    "rand_like randn_like randint_like bernoulli poisson normal.Tensor_float "
    "normal.Tensor_Tensor"
)
"""Operations of torch.ops.aten that draw."""


def draw(
    kind: type, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
) -> Any:
    target: DTensor = args[0]
    if is_absent(target):
        raise RuntimeError(ABSENT % list(target.shape))
    # What is drawn into a tensor, or like it, needs its shape alone; a distribution, of
    # which each element decides, needs the values.
    name = function.overloadpacket.__name__
    if name.endswith("_"):
        refuse_copies(function, target)
    if name.endswith(("_", "_like")):
        first = torch.empty(
            target.shape, dtype=target.dtype, device=local_of(target).device
        )
    else:
        first = target.full_tensor()
    others = map(_whole, args[1:])
    named = {name: _whole(value) for name, value in (kwargs or {}).items()}
    with _state_of_rank_0(target, named.get("generator")):
        drawn = function(first, *others, **named)
    # Every rank has drawn all of it, and keeps its part.
    own = own_part(drawn, target)
    if name.endswith("_"):
        local_of(target).copy_(own)
        return target
    made = torch.empty_like(target, dtype=drawn.dtype)
    local_of(made).copy_(own)
    return made


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@contextmanager
def _state_of_rank_0(
    target: DTensor, generator: torch.Generator | None
) -> Iterator[None]:
    """Draw from the state that the generator has on the first rank that holds a part of
    the model. A rank whose own is another one goes on with that afterwards."""
    device = local_of(target).device
    if generator is None:
        # The generator that torch itself would take on this device.
        generator = torch.default_generator
        if device.type != "cpu":
            generator = torch.get_device_module(device).default_generators[device.index]
    mesh = mesh_on(target.device_mesh)
    if mesh is None:
        yield
        return
    # Rank 0's state is sent, so that replicas and shards draw the same numbers.
    own = generator.get_state()
    sent = own.to(mesh.device, copy=True)
    dist.broadcast(sent, group_src=0, group=mesh.model_group)
    state = sent.to(own.device)
    generator.set_state(state)
    try:
        yield
    finally:
        # A rank with another state has not drawn from its own.
        if not torch.equal(state, own):
            generator.set_state(own)
