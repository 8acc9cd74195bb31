"""The sequences that several ranks share, under Accelerate: the further work of
SmpAccelerator for them.

prepare_data_loader    context peers read the same samples, and a loader yields this rank's part of the first peer's
                       batch
prepared models        run with that batch active
backward               likewise, from this rank's part of the mean over all ranks' targets, or samples
gather, reduce         one copy of what ranks of one batch hold
gather_for_metrics     unsplit sequences, each sample once
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_smp.loader_places import begin_with_its_sampler, share_order
from accelerate_smp.pipeline import INSIDE_STEP, PipelinedAccelerator
from accelerate_smp.uneven import joined, require_as_many_batches
from smp_core.checkpoint import iterate_tensors
from smp_core.cluster import DATA, GRADIENTS, Axis, Ranks, SmpMesh
from smp_core.context_parallel import (
    BatchLayout,
    SplitBatch,
    active_split,
    enabled,
    part_of_mean,
    shifts_labels,
)
from smp_core.engine import ParallelModel
from smp_core.outside import changed
from smp_core.pipeline import Within
from smp_core.watch import here


class SharedSequencesAccelerator(PipelinedAccelerator):
    """An Accelerator for ranks that share sequences. While the context degree is 1 it
    is Accelerate's own.

    Attributes:
        batch_layout: the tensors of a batch to split, and their dims; None: found in
            the batch.
        split_in_loader: whether loaders yield parts; False where SmpTrainer splits.
        count_targets: whether targets are counted when micro-batches are split; False
            where SmpTrainer counts.
        joins_uneven: whether ranks that run out of batches repeat their last one.
        batch_weight: factor of the present batch's loss; 0.0 where it is repeated.
    """

    batch_layout: BatchLayout | None = None
    split_in_loader = True
    count_targets = True
    joins_uneven = False
    batch_weight = 1.0
    _present: SplitBatch | None = None
    _number = 0  # that of the batch which is present
    _n_split = 0
    _split_as: Any = None
    """Tensors of the batches that a loader has yielded -> their batch's number; none is
    kept alive."""
    _each_sample_once = False

    if TYPE_CHECKING:

        @property
        def parallel(self) -> ParallelModel: ...

        @property
        def mesh(self) -> SmpMesh: ...

    @property
    def context_degree(self) -> int:
        """The ranks that share a sequence."""
        return 1 if self.layout is None else self.layout.context

    @property
    def batch_degree(self) -> int:
        """The ranks that read the same batch."""
        return (
            1
            if self.layout is None
            else self.layout.world_size // self.layout.size(*DATA)
        )

    def prepare_data_loader(
        self, data_loader: DataLoader, *args: Any, **kwargs: Any
    ) -> Any:
        """Prepare a loader as Accelerate does; it yields this rank's part of each
        batch."""
        if self.layout is None or getattr(
            data_loader, "_is_accelerate_prepared", False
        ):
            prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
            if self.smp and prepared is not data_loader:
                share_order(prepared)
                begin_with_its_sampler(prepared)
            return prepared
        prepared = self._prepared_alike(data_loader, *args, **kwargs)
        share_order(prepared)
        begin_with_its_sampler(prepared)
        require_as_many_batches(prepared)
        return self._through_here(prepared)

    def _prepared_alike(
        self, data_loader: DataLoader, *args: Any, **kwargs: Any
    ) -> Any:
        """Prepare a loader that reads the same samples on ranks that share a batch."""
        if self.batch_degree == 1:
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        # Rank 0's dispatcher knows nothing of ranks that share a batch.
        if self.dispatch_batches:
            raise ValueError(
                "dispatch_batches=True deals out other samples to each context, tensor or pipeline rank, which share "
                "them; write False or leave it out"
            )
        # Every rank reads a stream and takes its samples.
        is_stream = isinstance(data_loader.dataset, IterableDataset)
        dispatches = False if is_stream else self.dispatch_batches
        with changed(self.dataloader_config, dispatch_batches=dispatches):
            return super().prepare_data_loader(data_loader, *args, **kwargs)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader of the batches that are left of an epoch; behind it
        ``dataloader`` is in the next one."""
        left = super().skip_first_batches(dataloader, num_batches)
        return (
            self._through_here(left, dataloader)
            if self.smp and left is not dataloader
            else left
        )

    def _through_here(self, prepared: Any, rest_of: Any = None) -> Any:
        """Let the batches of a prepared loader come through this accelerator.

        Args:
            rest_of: the loader of which ``prepared`` has what is left of an epoch.
        """
        # The loader's iteration is changed by a derived class: Python looks `__iter__`
        # up in the class.
        kind, accelerator = type(prepared), self

        def iterate(loader: Any) -> Iterator[Any]:
            epoch = getattr(loader, "iteration", None)
            batches = loader.batch_sampler
            # Where all are skipped, loaders of rank 0's batches would deal out none.
            if (
                rest_of is None
                or not hasattr(batches, "skip_batches")
                or batches.skip_batches < batches.total_length
            ):
                yield from through(loader)
            if rest_of is not None and epoch is not None:
                # Accelerate counts no epoch of which nothing was left.
                rest_of.iteration = epoch + 1

        def through(loader: Any) -> Iterator[Any]:
            # An evaluation in the block repeats nothing: its results would count twice.
            # What it evaluates is in Accelerate's own list, `_models`, which has no
            # public name.
            if accelerator.joins_uneven and any(
                model.training for model in accelerator._models
            ):
                before = accelerator.batch_weight
                for batch, accelerator.batch_weight in joined(loader, kind.__iter__):
                    yield batch
                accelerator.batch_weight = before
                return
            # The batch of a loop that this one is inside of.
            around = accelerator._present, accelerator._number
            for batch in kind.__iter__(loader):
                part = accelerator._part_of(batch)
                number = accelerator._number
                yield part
                # Two loaders take turns: neither is inside of the other.
                if accelerator._number != number:
                    around = None, 0
            accelerator._present, accelerator._number = around

        # A property of Accelerate's loaders hides their class behind their base's;
        # object's own slot sets the class.
        methods = {
            "__iter__": iterate,
            "set_epoch": _tell_epoch,
            "__module__": kind.__module__,
        }
        ours = type(kind.__name__, (kind,), methods)
        vars(object)["__class__"].__set__(prepared, ours)
        return prepared

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """Run a block of training in which ranks may run out of batches before others
        (docs/uneven-batches.md).

        Args:
            joinables: as of Accelerate's; what is joined are the prepared loaders that
                the block iterates.
            even_batches: False: samples are dealt out to ranks without repeating any.
                None: as the accelerator was told.

        Raises:
            ValueError: several ranks share a batch.
        """
        if self.layout is None:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        # Accelerate makes batches even by itself: nothing is left to join.
        if even_batches or (even_batches is None and self.even_batches):
            yield
            return
        if self.batch_degree > 1:
            raise ValueError(
                "join_uneven_inputs where ranks share a batch (context, tensor or pipeline degree above 1) is not "
                "built yet; give all ranks as many batches: even_batches=True (Accelerate's default), or "
                "DataLoader(drop_last=True)"
            )
        with changed(self, joins_uneven=True, batch_weight=1.0):
            yield

    def _part_of(self, batch: Any) -> Any:
        if self.context_degree == 1 or not self.split_in_loader or self.stages > 1:
            return batch
        # Tensors of the part are known by number from here on, so that a call with an
        # older batch is noticed.
        self._present = self._split(batch)
        self._number = self._n_split = self._n_split + 1
        if self._split_as is None:
            self._split_as = WeakIdKeyDictionary()
        for _, tensor in iterate_tensors(self._present.batch, mapping=MutableMapping):
            self._split_as[tensor] = self._number
        return self._present.batch

    def _require_present(self, given: Any) -> None:
        """Refuse a call of the model with a batch that the loader has left behind: it
        would attend over this rank's part alone, or by the tokens of another batch.

        Raises:
            ValueError: the batch is not the one that the loader yielded last.
        """
        # Tensors that the loader did not give have no number, and are the user's own.
        numbers = [
            (self._split_as or {}).get(tensor)
            for _, tensor in iterate_tensors(given, mapping=MutableMapping)
        ]
        present = None if self._present is None else self._number
        if any(number not in (None, present) for number in numbers):
            raise ValueError(
                f"context_parallel_degree={self.context_degree}: the model is called with a batch that its loader has "
                "moved on from, and ranks share the sequences of the one that was yielded last. Call the model inside "
                "of `for batch in loader:`, before the next batch is asked for: no list(loader), and no reading ahead "
                "(to overfit one batch, give the loader a dataset of these samples)"
            )

    def _split(self, batch: Any) -> SplitBatch:
        context = self.parallel.context
        assert context is not None
        shifts = shifts_labels(self.parallel.module)
        return context.split(
            batch, self.batch_layout, shifts=shifts, count=self.count_targets
        )

    def split_micro_batches(self, parts: list[Any]) -> tuple[list[Any], Within]:
        """Return this rank's parts of micro-batches, and what each of them runs in.
        Collective over all ranks."""
        if self.context_degree == 1:
            return super().split_micro_batches(parts)
        # All micro-batches at once: splitting is collective, and stages would come to
        # it one after the other.
        splits = [self._split(part) for part in parts]

        @contextlib.contextmanager
        def within(number: int) -> Iterator[None]:
            split = splits[number]
            with changed(self, _present=split), enabled(split):
                yield

        return [split.batch for split in splits], within

    def over_shared_sequences(self, returned: Any) -> Any:
        """Return tokens of whole sequences, and the means of numbers over the ranks
        that share them. Collective."""
        if self.context_degree == 1:
            return returned
        return recursively_apply(self._whole, returned)

    def _whole(self, tensor: Tensor) -> Tensor:
        if self._present is None and tensor.is_floating_point():
            return self.mean_over_context(tensor)
        return self._over_context(tensor)

    def run_over_ranks(self, model: nn.Module) -> None:
        """Let ``model`` attend over the present batch's unsplit sequences.

        Hooks do it, because the model's other hooks, which fill in positions and
        counts, have to see the batch too. A step in pipeline stages does it around each
        micro-batch, whose forward leaves the model in the middle.
        """
        if self.stages > 1:
            return
        # A stack, since a model may call itself.
        entered: list[AbstractContextManager[None]] = []

        def enter(
            model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            # A trial of the model, which enters a batch of its own, calls it too.
            present = self._present if active_split() is None else None
            if active_split() is None:
                self._require_present((args, kwargs))
            if present is not None and present.trial is not None:
                present.trial.of_call(model, args, kwargs, present)
            entered.append(enabled(present))
            entered[-1].__enter__()

        def leave(model: nn.Module, _: Any, output: Any) -> None:
            entered.pop().__exit__(None, None, None)
            if self._present is not None and self._present.trial is not None:
                self._present.trial.of_output(model, output, self._present)

        model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        model.register_forward_hook(leave, always_call=True)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as Accelerate does; a mean over this rank's targets counts as
        its part of the mean over all of them.
        """
        # Backward needs the batch too: attention's backward runs over all ranks, and
        # recomputation calls the blocks again.
        with enabled(self._present):
            loss = part_of_mean(loss)
            super().backward(
                loss if self.batch_weight == 1.0 else loss * self.batch_weight, **kwargs
            )

    def full_sequence(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Gather a tensor of the present batch's tokens over all ranks that share them.
        Collective; no gradient."""
        if self._present is None:
            return tensor
        assert self.parallel.context is not None
        return self.parallel.context.gather(tensor, self._present, dim)

    def gather(self, tensor: Any) -> Any:
        """Gather as Accelerate does, of each batch one copy; inside
        :meth:`gather_for_metrics` each sample once."""
        with here.waiting("accelerator.gather"):
            gathered = super().gather(tensor)
        if self.layout is None:
            return gathered
        world = self.layout.world_size
        # One rank for each sample, or for each part of one.
        holders = list(
            self._readers
            if self._each_sample_once
            else self.layout.ranks(0, *GRADIENTS)
        )
        if len(holders) == world:
            return gathered
        return recursively_apply(
            lambda t: t.unflatten(0, (world, -1))[holders].flatten(0, 1), gathered
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce as Accelerate does, of each batch one copy."""
        if (
            self.layout is None
            or self.layout.size(*GRADIENTS) == self.layout.world_size
        ):
            return super().reduce(tensor, reduction, scale)
        if self._is_inside_step:
            raise ValueError(INSIDE_STEP)
        return recursively_apply(
            self._reduced, tensor, reduction=reduction, error_on_other_type=True
        )

    def _reduced(self, tensor: Tensor, reduction: str) -> Tensor:
        total = tensor.clone()
        op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        with here.waiting("accelerator.reduce"):
            dist.all_reduce(total, op, group=self.mesh.gradient_group)
        return total / self.num_processes if reduction == "mean" else total

    @property
    def _readers(self) -> Ranks:
        """One rank for each batch that is read."""
        assert self.layout is not None
        return self.layout.ranks(0, *DATA)

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that read different samples: for collectives of your own, and
        counts of samples."""
        return self.mesh.data_group

    @property
    def data_size(self) -> int:
        """The number of ranks that read different samples."""
        return 1 if self.layout is None else self.layout.size(*DATA)

    @property
    def data_rank(self) -> int:
        """The place of this rank among those that read different samples."""
        return (
            0
            if self.layout is None
            else self.layout.coordinate(self.state.process_index, *DATA)
        )

    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False
    ) -> Any:
        """Gather unsplit sequences, each sample once; a number becomes the mean over
        the ranks that share it. Inside of Trainer's ``compute_loss`` a number is of a
        rank's own tokens, and those of all ranks are gathered."""
        if self.batch_degree == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        if (
            not self.split_in_loader
            and active_split() is not None
            and isinstance(input_data, Tensor)
            and input_data.ndim == 0
        ):
            return self.gather(input_data)
        first = self.state.process_index in self._readers
        try:
            input_data = recursively_apply(
                self._over_context, input_data, error_on_other_type=True
            )
        # Objects that are no tensors: each reader gives its own, and the others
        # nothing.
        except TypeError:
            return super().gather_for_metrics(input_data if first else [], True)
        with changed(self, _each_sample_once=not use_gather_object):
            return super().gather_for_metrics(
                input_data if first or not use_gather_object else [], use_gather_object
            )

    def _over_context(self, tensor: Tensor) -> Tensor:
        split = self._present
        if split is None:
            return tensor
        # Known by its size: a tensor [samples, local tokens, ...] is put together, and
        # a number is averaged.
        if tensor.dim() >= 2 and tensor.shape[1] == split.plan.local_length:
            return self.full_sequence(tensor)
        return self.mean_over_context(tensor) if tensor.is_floating_point() else tensor

    def mean_over_context(self, tensor: Tensor) -> Tensor:
        """Average a tensor over the ranks that share sequences. Collective over
        them."""
        if self.context_degree == 1:
            return tensor
        tensor = tensor.detach().clone()
        dist.all_reduce(tensor, group=self.parallel.mesh.group(Axis.CONTEXT))
        return tensor / self.context_degree


def _tell_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to all samplers of a prepared loader, each inside of the one
    before, and to its dataset.

    Accelerate does so in one process; on several ranks it leaves out the user's batch
    sampler, or dataset, behind what deals batches out to ranks, and on all behind what
    skips some.
    """
    loader.iteration = epoch
    # From the outermost to the user's own, whatever is around it.
    inside = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    told = [loader.dataset]
    while inside is not None:
        told.append(inside)
        inside = getattr(inside, "batch_sampler", getattr(inside, "sampler", None))
    for each in told:
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
