"""The sequences that several ranks share, under transformers' Trainer.

Trainer counts targets over the micro-batches of an optimizer step and divides by them,
so the loss is exact as soon as

    batches are split where Trainer would prepare torch's own context parallelism
    (``_prepare_context_parallel_inputs``, private as all of Trainer's steps; there is
    no public hook around forward and backward) targets are counted once per sample,
    without those that cross into another document (``_get_num_items_in_batch``)

and evaluation and prediction see unsplit sequences and each sample once. Functions that
compute a loss from logits and labels (``label_smoothing_factor``,
``compute_loss_func``) get this rank's tokens and their targets. Models with a loss in
chunks (``chunked_cross_entropy``) smooth labels themselves, and chunk in evaluation too
where only the loss counts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, trainer as trainer_module
from transformers.trainer_utils import seed_worker

from accelerate_smp.accelerator import SmpAccelerator
from accelerate_smp.handle import parallel_of
from smp_core.checkpoint import iterate_tensors
from smp_core.cluster import GRADIENTS, of_all_ranks
from smp_core.context_parallel import (
    IGNORED,
    ContextParallel,
    SplitBatch,
    active_split,
    enabled,
    labels_within_documents,
    loss_only,
    shifts_labels,
    smoothed,
)
from smp_core.outside import changed
from smp_core.pipeline import digest_of

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class SharedSequencesTrainerMixin(_Base):
    """A mixin before a Trainer class. While the context degree is 1 it changes
    nothing."""

    accelerator: SmpAccelerator
    _split: SplitBatch | None = None
    _takes_micro_batches = False
    _predicts = False
    _compared_in: tuple[Any, int] | None = None

    @property
    def _context(self) -> ContextParallel | None:
        handle = parallel_of(self.model)  # type: ignore[arg-type]
        return None if handle is None else handle.context

    @property
    def compute_loss_func(self) -> Callable[..., Any] | None:
        """The user's loss function; while sequences are shared, it sees this rank's
        tokens and their targets."""
        function = self._compute_loss_func
        return (
            None if function is None else functools.partial(_of_own_targets, function)
        )

    @compute_loss_func.setter
    def compute_loss_func(self, function: Callable[..., Any] | None) -> None:
        self._compute_loss_func = function

    def _check_context_parallel(self) -> None:
        """Refuse a model that would count targets by itself."""
        if not shifts_labels(self.model):  # type: ignore[arg-type]
            raise ValueError(
                f"{type(self.model).__name__} computes its loss as a mean over a rank's own targets; under Trainer "
                "context_parallel_degree is for causal language models"
            )

    def _prepare_context_parallel_inputs(
        self, model: torch.nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], contextlib.AbstractContextManager[None]], dict[str, Any]]:
        """Return a context for forward and backward, and this rank's part of the first
        context peer's batch."""
        context = self._context
        if context is None:
            return super()._prepare_context_parallel_inputs(model, inputs)
        self._check_context_parallel()
        # Moved to the device before it is split: the split is of tensors there.
        inputs = self._prepare_inputs(inputs)
        # Trainer has counted the targets of all micro-batches, unless the model does
        # not take their number.
        count = self.accelerator.count_targets = not self.model_accepts_loss_kwargs
        if self._takes_micro_batches:
            return contextlib.nullcontext, inputs  # each micro-batch is split by itself
        self._split = context.split(inputs, self.accelerator.batch_layout, count=count)
        return functools.partial(enabled, self._split), self._split.batch

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Prepare a batch as Trainer does, once: copies of a split batch's labels would
        not be known as its own."""
        if self._split is not None and inputs is self._split.batch:
            return dict(inputs)
        return super()._prepare_inputs(inputs)

    def _get_num_items_in_batch(
        self, batch_samples: list[Any], device: torch.device
    ) -> Any:
        """Count targets as Trainer does: of all micro-batches, over all ranks, or for
        this one its part of those that it shares.
        """
        context = self._context
        if context is None or not batch_samples or "labels" not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        # Each sample once: the first context peer counts, and the others' labels are
        # ignored.
        counted = []
        for batch in batch_samples:
            labels = labels_within_documents(batch)
            # Whether a row's first label counts is Trainer's own decision, by the class
            # of the model.
            labels[:, 0] = batch["labels"][:, 0]
            # Peers may have other samples than the first, whose batch it is.
            counted.append(
                {
                    "labels": labels
                    if context.group.rank == 0
                    else torch.full_like(labels, -100)
                }
            )
        number = super()._get_num_items_in_batch(counted, device)
        if not isinstance(number, Tensor):
            return number
        if self.args.average_tokens_across_devices:
            return number
        # Without a sum over all ranks the first peer's count is that of the batch, of
        # which each rank has its share.
        dist.broadcast(
            number, src=context.group.ranks[0], group=context.group.process_group
        )
        return number / context.degree

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count tokens as Trainer does, which adds up the unsplit batches of all ranks
        that share them."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = (
            before + counted // self.accelerator.context_degree
        )

    def store_flos(self) -> None:
        """Add up operations as Trainer does, over all ranks; those of a batch that
        several ranks share, once."""
        self.current_flos = round(self.current_flos / self.accelerator.batch_degree)
        super().store_flos()

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Make a loader as Trainer does, whose workers on ranks that share a batch draw
        alike: Trainer seeds them by process."""
        if self.accelerator.batch_degree == 1:
            return super()._get_dataloader(*args, **kwargs)
        # A function of Trainer's module, which it looks up there.
        seed = functools.partial(_seed_by_reader, self.accelerator.data_rank)
        with changed(trainer_module, seed_worker=seed):
            return super()._get_dataloader(*args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the sampler as Trainer does; one that deals batches out to ranks itself
        (``batch_rebalance``) deals them out to those that read different samples."""
        sampler: Any = super()._get_train_sampler(*args, **kwargs)
        shared = self.accelerator.batch_degree
        if shared == 1 or not hasattr(sampler, "dp_size"):
            return sampler
        return type(sampler)(
            lengths=sampler.lengths,
            effective_batch_size=sampler.effective_batch_size // shared,
            dp_size=self.accelerator.data_size,
            grad_accum=sampler.grad_accum,
            rank=self.accelerator.data_rank,
            drop_last=sampler.drop_last,
        )

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Take a batch as Trainer does; in each epoch the first is compared on the
        ranks that share it, each of which draws the epoch's order by itself."""
        epoch = (self.state, int(self.state.epoch or 0))
        shared = self.accelerator.batch_degree > self.accelerator.context_degree
        if shared and epoch != self._compared_in:
            self._compared_in = epoch
            self._require_same_batch(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def _require_same_batch(self, inputs: dict[str, Any]) -> None:
        """Compare a batch on the ranks that compute on it. Collective over the world.

        Raises:
            ValueError: some have another one; on all ranks.
        """
        layout = self.accelerator.layout
        assert layout is not None
        tensors = (tensor for _, tensor in iterate_tensors(inputs, mapping=Mapping))
        # Context peers get the first one's batch, and are apart here.
        digests: dict[int, dict[int, str]] = {}
        for rank, digest in enumerate(of_all_ranks(digest_of(tensors))):
            reader = layout.coordinate(rank, *GRADIENTS)
            digests.setdefault(reader, {})[rank] = digest
        for found in digests.values():
            if len(set(found.values())) > 1:
                raise ValueError(
                    f"ranks {', '.join(map(str, found))} share a batch and read different ones in epoch "
                    f"{int(self.state.epoch or 0) + 1}: their order of samples, or what changes samples, comes from "
                    "random numbers that went apart; draw it from a generator with one seed (torch.Generator()."
                    "manual_seed(seed + epoch) in the sampler), and take draws out of `if is_world_process_zero:`"
                )

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the loss as Trainer does; a model whose loss is chunked smooths
        labels itself, because smoothing needs logits.
        """
        if self._predicts and self._context is not None and active_split() is None:
            # Trainer splits batches of an evaluation since Transformers 5.20; before,
            # only those of training.
            make, inputs = self._prepare_context_parallel_inputs(model, inputs)
            # Trainers with a prediction step of their own (TRL's) count no targets, and
            # a mean over a rank's own would not be the batch's.
            if len(args) < 2 and kwargs.get("num_items_in_batch") is None:
                kwargs["num_items_in_batch"] = self._targets_of_batch()
            with make():
                return self.compute_loss(model, inputs, *args, **kwargs)
        smoother, handle = self.label_smoother, parallel_of(self.model)  # type: ignore[arg-type]
        in_chunks = (
            handle is not None and handle.config.chunked_cross_entropy is not None
        )
        # A loss of the user's own calls the smoother itself.
        trainers_own = (
            self.compute_loss_func is None
            and super().compute_loss.__func__ is Trainer.compute_loss  # type: ignore[attr-defined]
        )
        if smoother is None or not in_chunks or not trainers_own:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with changed(self, label_smoother=None), smoothed(smoother.epsilon):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _targets_of_batch(self) -> Tensor | None:
        """Return the targets of the present batch, as a loss that Trainer multiplies by
        ranks is divided by. Collective."""
        split = self._split
        takes_count = (
            self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        )
        if split is None or not takes_count:
            return None
        if split.tokens_per_rank is None and split.count_targets is not None:
            split.count_targets()
        if split.tokens_per_rank is None:
            return None
        is_multiplied = self.args.average_tokens_across_devices
        ranks = self.accelerator.num_processes if is_multiplied else 1
        return split.tokens_per_rank * ranks

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Predict as Trainer does, with the loss of the unsplit sequences, and logits
        of all their tokens."""
        context = self._context
        asked_for = loss_only() if prediction_loss_only else contextlib.nullcontext()
        if context is None:
            with asked_for:
                return super().prediction_step(
                    model, inputs, prediction_loss_only, ignore_keys
                )
        # Without labels there is no loss, whose computation would split the batch.
        self._split = None
        around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if any(inputs.get(name) is None for name in self.label_names):
            make, inputs = self._prepare_context_parallel_inputs(model, inputs)
            around = make()
        with changed(self, _predicts=True), around, asked_for:
            loss, logits, labels = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
        # Each rank has the loss and the logits of its own tokens.
        if loss is not None:
            loss = self.accelerator.mean_over_context(loss)
        if logits is not None and self._split is not None:
            logits = context.gather_all(logits, self._split)
        return loss, logits, labels


def _seed_by_reader(reader: int, worker: int, num_workers: int, rank: int) -> None:
    seed_worker(worker, num_workers, reader)


def _of_own_targets(
    function: Callable[..., Any], outputs: Any, labels: Tensor | None, **options: Any
) -> Any:
    """Call a loss function of Trainer, which compares a token's logits with the next
    token's label, on this rank's tokens.

    The targets of a split batch become the labels of the tokens after them, and a token
    without logits of its own stands at the end.
    """
    split = active_split()
    # Whole sequences, or labels where their tokens are.
    if split is None or split.labels is None:
        return function(outputs, labels, **options)
    assert split.shift_labels is not None
    # The function shifts labels by one itself: what it is given is shifted back.
    labels = F.pad(split.shift_labels, (1, 0), value=IGNORED)
    if isinstance(outputs, dict):
        outputs = copy.copy(outputs)
        outputs["logits"] = F.pad(outputs["logits"], (0, 0, 0, 1))
    else:
        outputs = (F.pad(outputs[0], (0, 0, 0, 1)), *outputs[1:])
    return function(outputs, labels, **options)
