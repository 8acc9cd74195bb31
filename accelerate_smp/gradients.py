"""The accumulation window, norms and clipping over the mesh, under Accelerate's
names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from accelerate_smp.handle import parallel_of
from smp_core.cluster import SmpMesh
from smp_core.config import SmpConfig
from smp_core.engine import ParallelModel
from smp_core.sharding.optimizer import clip_grad_norm_, clip_grad_value_
from smp_core.sharding.optimizer.grad_norm import grad_norm


class GradientsAccelerator(Accelerator):
    """An Accelerator that knows where the gradients of sharded models are. ``_models``
    is Accelerate's own list, and has no public name."""

    smp_mesh: SmpMesh | None
    smp_config: SmpConfig
    monitor: Any = None
    """The :class:`accelerate_smp.SmpMonitor` of this loop; it puts itself here."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as Accelerate does; a monitor takes its time."""
        with (
            contextlib.nullcontext()
            if self.monitor is None
            else self.monitor.around_backward(loss)
        ):
            super().backward(loss, **kwargs)

    def end_training(self) -> None:
        """End training as Accelerate does, and before that the monitor's log."""
        if self.monitor is not None:
            self.monitor.end()
        super().end_training()

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep the accumulation window open over the backward passes inside the block.

        Gradients are summed inside the partition group (with
        ``keep_between_micro_batches="gradients"`` on each rank, as Accelerate's own
        does), replicas do not communicate, and ``.grad`` does not change.
        """
        handle = parallel_of(model)
        with super().no_sync(model) if handle is None else handle.window.accumulate():
            yield

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> Any:
        """Clip by the norm over all ranks.

        Returns:
            the norm before clipping: a plain 0-d tensor, equal on all ranks.
        """
        if self.smp_mesh is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return clip_grad_norm_(
            self._gradients_of(parameters),
            max_norm,
            norm_type=norm_type,
            masters_over=self.smp_mesh.gradient_group,
            on_nonfinite=self.smp_config.on_nonfinite_grad_norm,
            **self._over_stages(),
        )

    def clip_grad_value_(
        self, parameters: Tensor | Iterable[Tensor], clip_value: float
    ) -> None:
        """Limit every gradient element to ``[-clip_value, clip_value]``."""
        if self.smp_mesh is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        clip_grad_value_(self._gradients_of(parameters), clip_value)

    def grad_norm(
        self, parameters: Tensor | Iterable[Tensor], norm_type: float = 2
    ) -> Tensor:
        """Return the norm of the gradients over all ranks, unclipped: a plain 0-d
        tensor, equal on all ranks."""
        assert self.smp_mesh is not None
        over = self.smp_mesh.gradient_group
        return grad_norm(
            self._gradients_of(parameters),
            masters_over=over,
            norm_type=norm_type,
            **self._over_stages(),
        )

    def _handles(self) -> list[ParallelModel]:
        return [
            handle for handle in map(parallel_of, self._models) if handle is not None
        ]

    def _over_stages(self) -> dict[str, Any]:
        return next((handle.over_stages() for handle in self._handles()), {})

    def _gradients_of(self, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
        """Close the windows and undo loss scaling; map parameters of before ``prepare``
        to the sharded ones."""
        # Accelerate takes one tensor, or any iterable, which is walked over once.
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for handle in self._handles():
            handle.window.close()
        self.unscale_gradients()
        for handle in self._handles():
            given = handle.stepped(given)
        return given
