"""MemoryReport: the parts of a step's memory, at its peak.

The kinds of memory:

    parameters    this rank's shards, and replicated parameters
    gathered      units that are unsharded at the moment
    gradients     with the partial sums of an open window
    optimizer     its states, and the masters of ``optimizer_shard="world"``
    activations   tensors that autograd saves for backward or that selective checkpointing keeps, and offloaded inputs
                  that are on the device
    other         on CUDA, the rest of the allocator's memory: temporaries, a module's recomputed activations, buffers
                  of collectives

Host memory under ``state_offload`` or ``activations.offload`` is counted apart.

Saved-tensor hooks see each tensor that autograd saves; a storage counts once,
parameters not at all. Torch applies the innermost pair of hooks only: tensors saved
inside a checkpointed module go to checkpointing's own pair, which holds nothing; the
module's inputs come to ours, or to the offloader's. Samples are taken when a unit
begins and ends its forward, and now and then in backward; the largest is the step's
peak by kind. On CUDA the allocator's own peak, which may lie between samples, decides
how much is "other". On a CPU there is no allocator to ask.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from smp_core.activations import kept_outputs_shown_to
from smp_core.engine import ParallelModel
from smp_core.observe.memory_log import KINDS, MIB, StepMemory, draw
from smp_core.torch_facts import StepsOnHost, local_part

if TYPE_CHECKING:
    from rich.table import Table

# One in so many tensors that backward takes back is an occasion to sample: walking over
# all parameters is not free.
_SAMPLE_EVERY = 32


class _Saved:
    """A tensor that autograd saves, counted until the graph frees it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class MemoryReport:
    """The peak memory of this rank's steps by kind.

    Write ``with report.step():`` around forward, backward and optimizer step; ``steps``
    has the peaks, and ``table()`` and ``save_plot()`` show them.

    Args:
        parallel: the parallelized model (``trainer.strategy.parallel``,
            ``accelerator.parallel``).
        optimizers: the optimizers whose states count.
    """

    def __init__(
        self, parallel: ParallelModel, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        self._parallel, self._optimizers = parallel, list(optimizers)
        self._device = parallel.mesh.device
        self.steps: list[StepMemory] = []
        # Address of a storage -> (bytes, how many hold it).
        self._held: dict[int, tuple[int, int]] = {}
        self._unpacked = 0
        self._peak: dict[str, int] = {}
        self._watching = contextlib.ExitStack()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watch one step, from before its forward until after the optimizer."""
        self.begin()
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.end()

    def begin(self) -> None:
        """Watch until :meth:`end`, for callers without a ``with`` (callbacks).

        Contexts that are entered in between have to be left in between: hooks of saved
        tensors are a stack.
        """
        # What is there at the beginning, so that later tensors are told apart from it.
        self._peak = {}
        self._parameters = {
            local_part(parameter).untyped_storage().data_ptr()
            for parameter in self._parallel.stored_parameters()
        }
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        # Where memory may be largest: at each unit, and around checkpointed modules.
        modules: list[nn.Module] = [
            self._parallel.module,
            *(unit.module for unit in self._parallel.units),
        ]
        modules += [
            self._parallel.module.get_submodule(each.name)
            for each in self._parallel.activations.checkpointed
        ]
        # Sampled before and behind each, so that both ends are seen.
        for module in dict.fromkeys(modules):
            self._watching.callback(
                module.register_forward_pre_hook(self._sample).remove
            )
            self._watching.callback(module.register_forward_hook(self._sample).remove)
        # Everything that autograd saves, and what selective checkpointing keeps.
        self._watching.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        self._watching.enter_context(kept_outputs_shown_to(self._keep))
        self._sample()

    def end(self) -> StepMemory:
        """Return the peak since :meth:`begin`, and add it to ``steps``."""
        self._sample()
        self.abandon()
        # The rest of the allocator's peak is temporaries and other parts.
        if self._device.type == "cuda":
            known = sum(self._peak.values())
            self._peak["other"] = max(
                0, torch.cuda.max_memory_allocated(self._device) - known
            )
        self.steps.append(StepMemory(dict(self._peak), self._on_host()))
        return self.steps[-1]

    def abandon(self) -> None:
        """Stop watching."""
        self._watching.close()

    def activations(self) -> int:
        """Count the bytes on the device that are kept for backward now."""
        offloader = self._parallel.activations.offloader
        parked = 0 if offloader is None else sum(offloader.on_device())
        return sum(size for size, _ in self._held.values()) + parked

    # The memory that is held

    def _pack(self, tensor: Tensor) -> _Saved:
        # The holder lives as long as the graph needs the tensor.
        saved = _Saved(tensor)
        self._count(tensor, saved)
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        # Sampling in backward too, but seldom: it walks over all parameters.
        self._unpacked += 1
        if self._unpacked % _SAMPLE_EVERY == 0:
            self._sample()
        return saved.tensor

    def _keep(self, tensor: Tensor) -> None:
        self._count(tensor, tensor.untyped_storage())

    def _count(self, tensor: Tensor, holder: object) -> None:
        # Other devices are counted apart, and parameters are no activations.
        if tensor.device.type != self._device.type or isinstance(tensor, nn.Parameter):
            return
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        # Shards and gathered units have kinds of their own.
        if key in self._parameters or self._is_gathered(key):
            return
        self._held[key] = (storage.nbytes(), self._held.get(key, (0, 0))[1] + 1)
        # Freed when the graph lets go of it.
        weakref.finalize(holder, self._release, key)

    def _is_gathered(self, address: int) -> bool:
        return any(
            address in unit.gathered_addresses() for unit in self._parallel.units
        )

    def _release(self, key: int) -> None:
        size, count = self._held[key]
        if count == 1:
            del self._held[key]
        else:
            self._held[key] = (size, count - 1)

    # Samples

    def _sample(self, *_: Any) -> None:
        # The largest sample is the peak.
        now = self._on_device()
        if sum(now.values()) > sum(self._peak.values()):
            self._peak = now

    def _on_device(self) -> dict[str, int]:
        # Offloaded shards take no memory of the device.
        everything_offloaded = self._parallel.config.state_offload == "all"
        on_device = [
            p
            for p in self._parallel.stored_parameters()
            if not (everything_offloaded and isinstance(p, DTensor))
        ]
        gradients = [p.grad for p in on_device if p.grad is not None]
        held = self._parallel.window.held_bytes()
        states = 0 if self._parallel.config.state_offload else self._state_bytes()
        world = self._parallel.window.world
        # Masters lie beside the states (optimizer_shard="world").
        if world is not None:
            states += sum(shard.master_bytes for shard in world.shards)
        return {
            "parameters": sum(map(_bytes, on_device)),
            "gathered": sum(unit.gathered_bytes() for unit in self._parallel.units),
            "gradients": sum(map(_bytes, gradients)) + held,
            "optimizer": states,
            "activations": self.activations(),
            "other": 0,
        }

    def _on_host(self) -> dict[str, int]:
        host: dict[str, int] = {}
        # Only the states are on the host.
        if self._parallel.config.state_offload == "optimizer":
            host["optimizer"] = sum(
                each.host_bytes()
                for each in self._optimizers
                if isinstance(each, StepsOnHost)
            )
        # Parameters, their gradients and the states are there.
        if self._parallel.config.state_offload == "all":
            host["optimizer"] = self._state_bytes()
            sharded = [
                p for p in self._parallel.stored_parameters() if isinstance(p, DTensor)
            ]
            host["parameters"] = sum(map(_bytes, sharded))
            host["gradients"] = sum(
                _bytes(p.grad) for p in sharded if p.grad is not None
            )
        offloader = self._parallel.activations.offloader
        if offloader is not None:
            host["activations"] = offloader.pool.n_bytes
        return host

    def _state_bytes(self) -> int:
        entries = (
            entry
            for optimizer in self._optimizers
            for entry in optimizer.state.values()
        )
        # A step's number takes no memory worth counting.
        values = (
            value for entry in entries for key, value in entry.items() if key != "step"
        )
        return sum(_bytes(value) for value in values if isinstance(value, Tensor))

    # For people

    def table(self) -> Table:
        """Make a table of the steps by kind in MiB."""
        from rich.table import Table

        table = Table(
            title="peak memory by step, MiB on the device", caption=self._host_caption()
        )
        for heading in ("step", *KINDS, "total"):
            table.add_column(heading, justify="right")
        for number, step in enumerate(self.steps):
            figures = [*(step.device[kind] for kind in KINDS), step.total]
            table.add_row(str(number), *(f"{figure / MIB:.2f}" for figure in figures))
        return table

    def _host_caption(self) -> str | None:
        host = self.steps[-1].host if self.steps else {}
        if not host:
            return None
        return "in host memory: " + ", ".join(
            f"{kind} {size / MIB:.2f} MiB" for kind, size in host.items()
        )

    def save_plot(self, path: str | os.PathLike[str]) -> None:
        """Draw a stacked bar for each step, as a PNG (or in the format of the ending of
        ``path``).

        Raises:
            ValueError: no step has been watched, or matplotlib is not installed.
        """
        if not self.steps:
            raise ValueError(
                "no step was watched; write `with report.step():` around a training step"
            )
        draw(dict(enumerate(self.steps)), path)


def _bytes(tensor: Tensor) -> int:
    local = local_part(tensor)
    return local.numel() * local.element_size()
