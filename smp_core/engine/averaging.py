"""ShardedAverage: an average of weights (EMA, SWA) that is sharded as the weights are.

Each rank averages the tensors that it steps: its shards or, with
``optimizer_shard="world"``, the masters of its part, in their precision. So the average
takes as much memory as these tensors, and averaging needs no communication.
``torch.optim.swa_utils`` does the averaging; to it, and to callers that swap weights, a
:class:`RankWeights` is a module of plain tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from smp_core.checkpoint import copy_into
from smp_core.engine.parallel_model import ParallelModel
from smp_core.sharding.optimizer import like, local_of, master_dtype
from smp_core.torch_facts import clean_name


class RankWeights(nn.Module):
    """A module with this rank's part of every parameter, and all buffers, of a sharded
    module, in its order.

    The tensors are plain and share memory with the tensors that this rank steps; a copy
    of the module (``copy.deepcopy``) has its own.

    Args:
        parallel: the sharded module's handle.

    Raises:
        ValueError: weights that are stored as codes.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()
        coded = parallel.config.frozen_storage
        if coded is not None:
            raise ValueError(
                "an average of weights would hold decoded copies of the frozen ones, too, which "
                f"frozen_storage={coded!r} stores as codes; leave the average out, or frozen_storage"
            )
        parallel.reshard()
        if parallel.pipeline is not None:
            parallel.broadcast_buffers()  # they change on one stage
        # What was loaded into parameters since the last step has to be in masters.
        world = parallel.window.world
        for shard in () if world is None else world.shards:
            shard.follow_parameters()
        stepped = parallel.stepped(parallel.module.parameters())
        # Views, so that writing into a part writes into what the rank steps.
        self.parts = nn.ParameterList(
            nn.Parameter(local_of(each), requires_grad=False) for each in stepped
        )
        for number, buffer in enumerate(parallel.module.buffers()):
            self.register_buffer(str(number), buffer)

    def finer(self) -> RankWeights:
        """Replace parts in half precision by float32 copies, in place.

        Half precision loses the small changes of an average.
        """
        for part in self.parts:
            part.data = part.data.to(master_dtype(part))
        return self

    def in_dtypes(
        self, parallel: ParallelModel, dtypes: Mapping[str, torch.dtype]
    ) -> RankWeights:
        """Replace parts and buffers by copies in the dtypes that their names have in
        ``dtypes``, in place."""
        # Parts are in the order of the model's parameters.
        for (name, _), part in zip(
            parallel.module.named_parameters(), self.parts, strict=True
        ):
            part.data = part.data.to(dtypes.get(clean_name(name), part.dtype))
        for number, (name, buffer) in enumerate(parallel.module.named_buffers()):
            self.register_buffer(
                str(number), buffer.to(dtypes.get(clean_name(name), buffer.dtype))
            )
        return self


@torch.no_grad()
def take_written(parallel: ParallelModel) -> None:
    """Make the model compute with the values written into its :class:`RankWeights`.
    Collective."""
    world = parallel.window.world
    # Masters were written; parameters follow, then whatever is made of weights.
    for shard in () if world is None else world.shards:
        shard.update_parameters()
    parallel.reshard()
    parallel.broadcast_buffers()
    if parallel.fp8 is not None:
        parallel.fp8.refresh_weights()


class ShardedAverage(AveragedModel):
    """An ``AveragedModel`` of a sharded module.

    Args:
        parallel: the sharded module's handle, its optimizers prepared.
        device: the device of the average; default: that of the weights.
        dtypes: name in the module -> dtype of the average, where the function that
            takes it can mix dtypes; default: that of the weights. In the place of half
            precision it is float32.
        options: of ``AveragedModel``: ``avg_fn``, ``multi_avg_fn``, ``use_buffers``.

    Attributes:
        parallel: the handle.

    Raises:
        ValueError: an averaging function that looks across a tensor.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        device: torch.device | int | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        **options: Any,
    ) -> None:
        # Tried before anything is averaged.
        for name in ("avg_fn", "multi_avg_fn"):
            if options.get(name) is not None:
                _require_elementwise(name, options[name])
        on_cpu = (
            torch.device(parallel.mesh.device if device is None else device).type
            == "cpu"
        )
        has_function = options.get("avg_fn") is not None or on_cpu
        # torch's kernels for many tensors, its default elsewhere than on CPU, take one
        # dtype: that of the weights.
        self._in_one_dtype = options.get("multi_avg_fn") is not None or not has_function
        made = {} if self._in_one_dtype else dtypes or {}
        super().__init__(
            RankWeights(parallel).in_dtypes(parallel, made).finer(), device, **options
        )
        self.parallel = parallel

    def update_parameters(self, model: nn.Module | None = None) -> None:
        """Update the average with the module's present weights.

        Args:
            model: the argument that callers of ``AveragedModel`` give; taken to be the
                sharded module.
        """
        # The average's kernel wants both operands in one dtype.
        weights = RankWeights(self.parallel)
        super().update_parameters(weights.finer() if self._in_one_dtype else weights)

    def _parts(self) -> list[Tensor]:
        return list(cast(RankWeights, self.module).parts)

    # Names: those of the module's state dict.

    def weights(self) -> dict[str, Any]:
        """Return copies of the averages as the module's state dict: DTensors where
        parameters are sharded.

        Collective with ``optimizer_shard="world"``.
        """
        parallel, averages = self.parallel, self._parts()
        # Averages have the order of parameters.
        number_of = {
            id(parameter): i for i, parameter in enumerate(parallel.module.parameters())
        }
        made: dict[int, Tensor] = {}

        # Averages of masters are gathered to the parameters' shards; the others are
        # these shards.
        world = parallel.window.world
        for shard in () if world is None else world.shards:
            numbers = [number_of[id(parameter)] for parameter in shard.parameters]
            parts = {i: averages[number] for i, number in enumerate(numbers)}
            # One collective takes one dtype, and averages may have several.
            for dtype in dict.fromkeys(part.dtype for part in parts.values()):
                together = shard.put_together(
                    {i: part for i, part in parts.items() if part.dtype == dtype}
                )
                made.update({numbers[i]: value for i, value in together.items()})
        for parameter, number in zip(
            parallel.module.parameters(), number_of.values(), strict=True
        ):
            if number not in made:
                average = averages[number]
                made[number] = like(
                    parameter, average, on_host=average.device.type == "cpu"
                )

        # All names of each of them, and of averaged buffers.
        state = self._model_state()
        state.update(
            {
                name: made[number]
                for name, number in self._named_parts()
                if name in state
            }
        )
        state.update(
            {
                name: buffer.clone()
                for name, buffer in self._named_averaged_buffers()
                if name in state
            }
        )
        return state

    @torch.no_grad()
    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        """Set the averages from a state dict of :meth:`weights`."""
        parallel, averages = self.parallel, self._parts()
        world = parallel.window.world
        parameters = list(parallel.module.parameters())
        for name, number in self._named_parts():
            if name in state:
                # A master's part is cut from the shard's values; without masters the
                # shard is the part.
                part = state[name]
                if world is not None:
                    part = world.part_of_state(parameters[number], part)
                averages[number].copy_(local_of(part))
        for name, buffer in self._named_averaged_buffers():
            if name in state:
                buffer.copy_(state[name])

    def _model_state(self) -> dict[str, Any]:
        return dict(get_model_state_dict(self.parallel.module))

    def _named_parts(self) -> list[tuple[str, int]]:
        """Yield every name of every parameter, with its place among the averages."""
        module = self.parallel.module
        number_of = {
            id(parameter): i for i, parameter in enumerate(module.parameters())
        }
        named = module.named_parameters(remove_duplicate=False)
        return [
            (clean_name(name), number_of[id(parameter)]) for name, parameter in named
        ]

    def _named_averaged_buffers(self) -> list[tuple[str, Tensor]]:
        module, averages = self.parallel.module, list(self.module.buffers())
        number_of = {id(buffer): i for i, buffer in enumerate(module.buffers())}
        named = module.named_buffers(remove_duplicate=False)
        return [
            (clean_name(name), averages[number_of[id(buffer)]])
            for name, buffer in named
        ]

    # State dicts of AveragedModel

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of an ``AveragedModel`` of the unsharded module, with the
        tensors of :meth:`weights`."""
        named = {f"module.{name}": value for name, value in self.weights().items()}
        return {**named, "n_averaged": self.n_averaged}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> None:  # type: ignore[override]
        """Load a state of :meth:`state_dict`, with sharded or unsharded tensors.
        Collective."""
        # A template of all names has the right layout for any saved form.
        template = self.weights()
        for name, value in template.items():
            saved = state_dict[f"module.{name}"]
            if isinstance(value, Tensor):
                fill(value, saved)
        self.take_weights(template)
        self.n_averaged.copy_(state_dict["n_averaged"])


@torch.no_grad()
def fill(target: Tensor, value: Tensor) -> None:
    """Copy an unsharded tensor, or a DTensor like ``target``, into ``target``."""
    if isinstance(value, DTensor):
        local_of(target).copy_(local_of(value))
    else:
        copy_into(target, value)


def _require_elementwise(name: str, function: Callable[..., Any]) -> None:
    """Try an averaging function that is not torch's own on a small tensor, at once and
    in two halves."""
    # Functions of torch's own module are known to be elementwise.
    if function.__module__ == AveragedModel.__module__:
        return
    function = copy.deepcopy(function)  # it may count its calls
    average = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    current = torch.arange(24.0).double().sin()
    count = torch.tensor(3)

    def averaged(old: Tensor, new: Tensor) -> Tensor:
        old = old.clone()
        if name == "avg_fn":
            return torch.as_tensor(function(old, new.clone(), count)).reshape(-1)
        function([old], [new.clone()], count)
        return old.reshape(-1)

    # An elementwise function gives the same for a tensor in halves.
    whole = averaged(average, current.view(6, 4))
    halves = [
        averaged(a, c)
        for a, c in zip(
            average.view(-1).split([10, 14]), current.split([10, 14]), strict=True
        )
    ]
    if not torch.allclose(whole, torch.cat(halves), rtol=1e-9, atol=1e-12):
        shown = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"{name}={shown}: an average of sharded weights is taken in parts, and this function looks across a "
            "tensor; allowed: functions of one element at a time, such as get_ema_avg_fn(decay) of "
            "torch.optim.swa_utils"
        )
