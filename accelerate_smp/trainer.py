"""SmpTrainerMixin: smp_core under transformers' Trainer and its subclasses (TRL's
SFTTrainer).

Trainer builds its Accelerator itself, so the mixin puts SmpAccelerator in its place
while it does; the rest is what Trainer leaves undone for sharded models:

    save_model           always a model that ``from_pretrained`` loads: safetensors, config, tokenizer
    checkpoints, resume  on any number of ranks (accelerate_smp/trainer_checkpoints.py)
    long sequences       over several ranks (accelerate_smp/trainer_sequences.py)
    pipeline stages      compute_loss for each micro-batch (accelerate_smp/trainer_pipeline.py)
    evaluate, predict    before, between and after training, with BatchNorm statistics of rank 0 everywhere
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    trainer as trainer_module,
)
from transformers.integrations import WandbCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import TrainOutput

from accelerate_smp import transformers_names
from accelerate_smp.accelerator import SmpAccelerator
from accelerate_smp.callbacks import Fp8MonitorCallback, SmpMonitorCallback
from accelerate_smp.full_weights import full_state
from accelerate_smp.handle import parallel_of
from accelerate_smp.loss_counts import seeing_use
from accelerate_smp.trainer_checkpoints import CheckpointingTrainerMixin
from accelerate_smp.trainer_generation import (
    count_readers,
    gathering_once,
    seed_readers,
)
from accelerate_smp.trainer_pipeline import PipelinedTrainerMixin
from accelerate_smp.trainer_sequences import SharedSequencesTrainerMixin
from smp_core.checkpoint import Ranks
from smp_core.cluster import Axis
from smp_core.config import SmpConfig
from smp_core.context_parallel import active_split
from smp_core.expert_parallel import losses_multiplied_by
from smp_core.outside import changed
from smp_core.sharding.optimizer import say_where_gradients_are
from smp_core.torch_facts import is_rank_0
from smp_core.watch import meet

logger = logging.getLogger("smp")
_DDP_TIMEOUT = TrainingArguments.__dataclass_fields__["ddp_timeout"].default

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class SmpTrainerMixin(
    PipelinedTrainerMixin, SharedSequencesTrainerMixin, CheckpointingTrainerMixin, _Base
):
    """A mixin before a Trainer class: ``class MyTrainer(SmpTrainerMixin, SFTTrainer):
    ...``.

    Args:
        smp_config: all knobs as :class:`SmpConfig`, dict or YAML file; default:
            ``SMP_*`` variables and the file that ``SMP_CONFIG_FILE`` names.
        arguments: the Trainer's own.
    """

    accelerator: SmpAccelerator
    _came_sharded = False

    def __init__(
        self,
        *arguments: Any,
        smp_config: SmpConfig | Mapping[str, Any] | str | None = None,
        **keywords: Any,
    ) -> None:
        # Trainer's own __init__ makes the accelerator, which asks for it.
        self._smp_config = smp_config
        super().__init__(*arguments, **keywords)
        # TRL divides the tokens that it counts by the ranks of a batch, which `gather`
        # gives once already.
        if hasattr(self, "_tp_size"):
            self._tp_size = 1
        seed_readers(self.args, self.accelerator)
        if self.accelerator.sharding:
            _refuse_trackers_of_weights(self.callback_handler.callbacks)
        # Trainer decides by the class's name, which sharding changes, where labels
        # belong.
        if self.label_smoother is not None:
            if not transformers_names.SMOOTHS_BY_COUNT:
                raise ValueError(
                    f"label_smoothing_factor={self.args.label_smoothing_factor}: this Transformers' Trainer multiplies "
                    "the smoothed loss by the number of ranks; write 0, or type: pip install -U 'transformers>=5'"
                )
            self.label_smoother = SmoothedLabels(
                self.label_smoother.epsilon, shift=_predicts_next_token(self.model)
            )

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """The flag by which Trainer leaves a model alone that Transformers sharded:
        SmpAccelerator does not."""
        return self._came_sharded and not self.accelerator.sharding

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, value: bool) -> None:
        self._came_sharded = value

    @property
    def place_model_on_device(self) -> bool:
        """The flag by which Trainer moves the model; a pre-sharded model is on its
        device."""
        return self._place_model and not self._came_sharded

    @place_model_on_device.setter
    def place_model_on_device(self, value: bool) -> None:
        self._place_model = value

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator as Trainer does, but an SmpAccelerator. A trial of a
        search makes one when it has begun already, so that it takes over what the one
        before has in hand.
        """
        before: SmpAccelerator | None = getattr(self, "accelerator", None)
        self._see_the_other_cpus()
        on_cpu = self.args.device.type == "cpu"
        if self.args.fp16 and on_cpu:
            raise ValueError(
                "fp16=True scales losses on a GPU and cannot run on CPU; allowed there: bf16=True or neither; write "
                "TrainingArguments(bf16=True), or leave fp16 out"
            )
        options = self.args.fsdp_config
        if self.args.fsdp and isinstance(options, dict) and "version" in options:
            # Transformers 4 leaves it out.
            os.environ.setdefault("FSDP_VERSION", str(options["version"]))
        # Transformers leaves ddp_timeout out on a CPU.
        if on_cpu and dist.is_initialized() and self.args.ddp_timeout != _DDP_TIMEOUT:
            dist.group.WORLD.set_timeout(self.args.ddp_timeout_delta)  # type: ignore[union-attr]
        # Trainer looks the name up in its own module.
        ours = functools.partial(SmpAccelerator, smp_config=self._smp_config)
        with changed(trainer_module, Accelerator=ours):
            super().create_accelerator_and_postprocess()
        if on_cpu:
            # There is no device to copy to; torch would warn for every loader.
            self.args.dataloader_pin_memory = False
        if before is not None:
            self.accelerator.take_over(before)
        # Targets are counted in whole batches first.
        self.accelerator.split_in_loader = False
        _refuse_arguments(self.args, self.accelerator.sharding)
        _refuse_stages_of_trl(type(self), self.accelerator.stages)
        count_readers(self.args, self.accelerator)

    def _see_the_other_cpus(self) -> None:
        """Set ``use_cpu=True``: TrainingArguments take a CPU process under torchrun for
        a single one otherwise."""
        alone = self.args.world_size == 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1
        if (
            alone
            and "LOCAL_RANK" in os.environ
            and not torch.accelerator.is_available()
        ):
            self.args.use_cpu = True
            self.args.__dict__.pop("_setup_devices", None)
            assert self.args.device.type == "cpu"

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer as Trainer does, in the same groups before and after the
        model is sharded: Trainer would divide those of a model that has been evaluated
        by meshes, and no other run could load their states."""
        # A function of Trainer's module that splits groups of parameters by their
        # meshes.
        found: Any = getattr(trainer_module, "has_mixed_dtensor", None)
        trainer_module.has_mixed_dtensor = lambda tensors: False
        try:
            return super().create_optimizer(*args, **kwargs)
        finally:
            trainer_module.has_mixed_dtensor = found

    def get_tp_size(self) -> int:
        """Return 1: the ranks that share a batch count its targets once each, and the
        losses of all are averaged. Transformers before 5.20 divides the count by such
        ranks and not the loss.
        """
        return 1

    get_cp_size = get_tp_size

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as Trainer does, which multiplies it by ranks where targets
        of all of them are counted; an auxiliary loss of routers is a mean, and is not
        multiplied. Nor is the mean of a model that takes the count and does not divide
        by it (BERT's classifiers)."""
        # Trainer multiplies the loss by the number of ranks where it was divided by the
        # targets of all of them.
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        is_multiplied = counts and self.args.average_tokens_across_devices
        count = kwargs.get("num_items_in_batch")
        with self._counting_ranks_once():
            factor = (
                self.accelerator.num_processes
                if is_multiplied and count is not None
                else 1
            )
            model = args[0] if args else kwargs["model"]
            with (
                losses_multiplied_by(factor),
                self._seeing_use_of(count if factor > 1 else None, model),
            ):
                result = super().compute_loss(*args, **kwargs)
        if factor == 1 or not self._ignores_count:
            return result
        return (
            (result[0] / factor, *result[1:])
            if isinstance(result, tuple)
            else result / factor
        )

    @contextlib.contextmanager
    def _seeing_use_of(self, count: Any, model: torch.nn.Module) -> Iterator[None]:
        """Find out, the first time, whether a loss is divided by the count of
        targets."""
        # Once is enough: a model's loss does not change its mind.
        parallel = (
            parallel_of(model)
            if self._ignores_count is None and isinstance(count, torch.Tensor)
            else None
        )
        # Over context ranks the loss is computed with counts of its own.
        if parallel is None or parallel.config.context_parallel_degree > 1:
            yield
            return
        with seeing_use(count) as reads, _noting_trainers_own() as calls:
            yield
        # A compute_loss of a subclass that does not call Trainer's is not multiplied.
        ignores = bool(calls) and not reads.seen
        # The last stage computes the loss; a step tells the others behind it.
        if parallel.pipeline is not None and not self._takes_micro_batches:
            ignores = parallel.pipeline.share(ignores)
        self._ignores_count = ignores

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._counting_ranks_once():
            return super()._get_num_items_in_batch(*args, **kwargs)

    def _counting_ranks_once(self) -> contextlib.AbstractContextManager[None]:
        """Let the accelerator tell Trainer of no ranks that share a batch: Transformers
        before 5.20 divides counts and ``num_processes`` by them, which here counts them
        once already (a loss of 0 at two tensor ranks)."""
        return changed(self.accelerator, counts_ranks_itself=True)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of an optimizer step over all ranks."""
        return self.samples_of_a_batch() * args.gradient_accumulation_steps

    def _has_mixed_mesh_grads(self, model: torch.nn.Module) -> bool:
        # The accelerator's own norm takes plain and sharded gradients together.
        return False

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does, with the figures of :class:`SmpMonitorCallback` and
        :class:`Fp8MonitorCallback` alongside the loss, and the loss of a whole
        training.
        """
        # The entry that ends a training.
        if "train_loss" in logs and "train_runtime" in logs:
            # Trainer writes into what it returns, too.
            logs["train_loss"] = self._over_ranks(logs["train_loss"])
        # An entry of training; those of evaluations have "eval_loss".
        if "loss" in logs:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, (SmpMonitorCallback, Fp8MonitorCallback)):
                    logs = {**logs, **callback.latest}
        super().log(logs, *args, **kwargs)

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        """Train as Trainer does; with ``optimizer_shard="world"`` a warning says which
        of a user's callbacks and methods look for gradients where there are none."""
        says = _SaysWhereGradientsAre(self)
        self.add_callback(says)
        alpha = self.neftune_noise_alpha
        if alpha is not None:
            # NEFTune's noise is smaller for longer sequences, of which a rank that
            # shares them sees a part.
            layout = self.accelerator.layout
            parts = 1 if layout is None else layout.size(Axis.CONTEXT)
            self.neftune_noise_alpha = alpha / math.sqrt(parts)
        try:
            with gathering_once(self):
                output = super().train(resume_from_checkpoint, *arguments, **keywords)
        except BaseException as error:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, SmpMonitorCallback):
                    callback.end(self.state.global_step, error)
            raise
        finally:
            self.remove_callback(says)
            self.neftune_noise_alpha = alpha
        loss = self._over_ranks(output.training_loss)
        return TrainOutput(
            output.global_step, loss, {**output.metrics, "train_loss": loss}
        )

    def hyperparameter_search(self, *arguments: Any, **keywords: Any) -> Any:
        """Search as Trainer does, without pruning on several ranks.

        Raises:
            ValueError: an option by which optuna would end a trial, or the search, on
                rank 0 alone.
        """
        backend = keywords.get("backend", (*arguments, *[None] * 5)[4])
        if self.args.world_size > 1 and backend in (None, "optuna"):
            keywords |= _without_pruning(keywords)
        return super().hyperparameter_search(*arguments, **keywords)

    def _over_ranks(self, train_loss: float) -> float:
        """Return the loss of a whole training: to those of all ranks that it logged
        Trainer adds this rank's own, of the steps after the last logged one."""
        own = torch.tensor(train_loss, dtype=torch.float64, device=self.args.device)
        mean: torch.Tensor = self.accelerator.reduce(own, "mean")
        return mean.item()

    # Evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as Trainer does, with rank 0's BatchNorm statistics on every rank;
        no bytes count to a step."""
        # Seq2SeqTrainer would keep the samples that loaders repeat, and every copy of
        # those that ranks share.
        if self.gather_function == self.accelerator.gather:
            self.gather_function = functools.partial(
                self.accelerator.gather_for_metrics,
                use_gather_object=self.args.eval_use_gather_object,
            )
        handle = parallel_of(self.model)  # type: ignore[arg-type]
        if handle is None:
            return super().evaluation_loop(*args, **kwargs)
        # BatchNorm's statistics differ between ranks, each of which has seen its own
        # samples.
        handle.broadcast_buffers()
        with (
            handle.meter.outside_steps(),
            gathering_once(self),
            self._evaluation_that_may_end(*args, **kwargs),
            self._counting_samples_of_a_rank(),
        ):
            result = super().evaluation_loop(*args, **kwargs)
        handle.require_same_collectives()
        return result

    @contextlib.contextmanager
    def _evaluation_that_may_end(
        self, dataloader: Any, *_: Any, **__: Any
    ) -> Iterator[None]:
        """Let an evaluation in the middle of training be left when the job is about to
        be ended."""
        if self.leaves is None:
            yield
            return
        self.leaves.begin_evaluation(dataloader)
        try:
            yield
        finally:
            self.leaves.end_evaluation()

    def _counting_samples_of_a_rank(self) -> contextlib.AbstractContextManager[None]:
        """Let Trainer repeat the loss of a batch once for each sample that this rank
        has of it: with ``split_batches`` it takes a rank's part for the whole batch,
        and the last batch of a stream has the loss of rank 0."""
        size = self.args.per_device_eval_batch_size
        if self.accelerator.split_batches:
            size //= self.accelerator.data_size
        return changed(self.args, per_device_eval_batch_size=size)

    # Saving

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Write the files that ``from_pretrained`` loads: safetensors, ``config.json``,
        tokenizer. Collective."""
        handle = parallel_of(self.model)  # type: ignore[arg-type]
        if handle is None:
            super().save_model(output_dir, _internal_call)
            return
        meet("trainer.save_model(...)")
        # Trainer's own writer, or a subclass's, which only the rank that writes runs.
        folder = output_dir or self.args.output_dir
        state = full_state(handle)

        def write() -> None:
            self._save(folder, state_dict=state)

        with _as_one_model(handle.module):
            Ranks().on_first(f"trainer.save_model({folder!r})", write)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(
                commit_message="Model save", revision=self.args.hub_revision
            )


@contextlib.contextmanager
def _noting_trainers_own() -> Iterator[list[Any]]:
    """Note calls of Trainer's own compute_loss inside the block, from a subclass's."""
    stock, calls = Trainer.compute_loss, []

    def noted(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return stock(self, *args, **kwargs)

    with changed(Trainer, compute_loss=noted):
        yield calls


def _as_one_model(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Hide that Transformers sharded the model: it would gather itself on all ranks
    when it is saved, whatever state it is given.
    """
    config = getattr(model, "config", None)
    if getattr(config, "distributed_config", None) is None:
        return contextlib.nullcontext()
    return changed(config, distributed_config=None)


class SmoothedLabels(LabelSmoother):
    """A label smoother that decides by itself whether labels are shifted.

    Trainer tells it by the name of the model's class, which FSDP2 changes: labels of a
    sharded causal language model would be compared with the tokens they stand at. Of a
    split batch the targets are known already.
    """

    def __init__(self, epsilon: float, shift: bool) -> None:
        super().__init__(epsilon)
        self.shift = shift

    def __call__(
        self,
        model_output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        split = active_split()
        if split is not None and split.shift_labels is not None:
            count = (
                split.tokens_per_rank
                if num_items_in_batch is None
                else num_items_in_batch
            )
            return super().__call__(
                model_output, split.shift_labels, num_items_in_batch=count
            )
        shift = shift_labels or self.shift
        return super().__call__(
            model_output,
            labels,
            shift_labels=shift,
            num_items_in_batch=num_items_in_batch,
        )


def _predicts_next_token(model: Any) -> bool:
    """Return whether a model is one of Transformers' causal language models, adapters
    and sharding put aside."""
    # By the classes below: FSDP2 puts one of its own on top.
    if hasattr(model, "get_base_model"):  # PEFT
        model = model.get_base_model()
    return any(
        kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for kind in type(model).__mro__
    )


class _SaysWhereGradientsAre(TrainerCallback):
    """Warns when training begins: earlier the model is not sharded yet."""

    def __init__(self, trainer: SmpTrainerMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        handle = parallel_of(model)
        if handle is not None and (
            handle.window.world is not None or handle.pipeline is not None
        ):
            in_stages = handle.window.world is None
            say_where_gradients_are(
                self._before_steps(),
                "trainer.accelerator.parallel",
                in_stages=in_stages,
            )

    def _before_steps(self) -> Iterator[Callable[..., Any]]:
        """Yield what a user's callbacks and Trainer do between backward passes and
        steps."""
        for callback in self.trainer.callback_handler.callbacks:
            yield from _written_by_user(type(callback), "on_pre_optimizer_step")
            yield from _written_by_user(type(callback), "on_optimizer_step")
        yield from _written_by_user(type(self.trainer), "training_step")


def _written_by_user(kind: type, name: str) -> Iterator[Callable[..., Any]]:
    """Yield the methods of this name of a class and its bases, but those of
    Transformers and of this package."""
    for base in kind.__mro__:
        if name in vars(base) and base.__module__.split(".")[0] not in (
            "transformers",
            "accelerate_smp",
        ):
            yield vars(base)[name]


def _refuse_arguments(args: TrainingArguments, sharding: bool) -> None:
    """Refuse what Trainer does on one rank alone, or to states that are not there.

    Raises:
        ValueError: names the argument, and what to write.
    """
    if args.save_only_model and args.load_best_model_at_end and sharding:
        raise ValueError(
            "load_best_model_at_end=True needs the sharded state that save_only_model=True leaves out; write "
            "save_only_model=False"
        )
    if getattr(args, "enable_jit_checkpoint", False):  # Transformers 5
        raise ValueError(
            "enable_jit_checkpoint=True saves on a rank when that rank is told to end, where a save needs all of "
            "them; leave it out: SmpTrainer saves on SIGTERM and SIGUSR1 by itself, on all ranks after one step"
        )
    if args.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True: a checkpoint is one folder that every rank sees; write False and use a "
            "shared folder"
        )
    if args.auto_find_batch_size and sharding and args.world_size > 1:
        raise ValueError(
            f"auto_find_batch_size=True begins again on the rank that runs out of memory, for which the others of "
            f"{args.world_size} would wait; leave it out, and find per_device_train_batch_size with `smp plan`"
        )


def _refuse_stages_of_trl(kind: type, stages: int) -> None:
    """Refuse pipeline stages where TRL computes the loss: it gathers metrics there, and
    that code runs on the last stage alone.

    Raises:
        ValueError: names the trainer, and what to write.
    """
    own = (base for base in kind.__mro__ if "compute_loss" in vars(base))
    computes = [
        base for base in own if base.__module__.split(".")[0] != "accelerate_smp"
    ]
    if stages > 1 and computes[0].__module__.split(".")[0] == "trl":
        raise ValueError(
            f"pipeline_parallel_degree={stages}: TRL's {computes[0].__name__} gathers metrics in compute_loss, which "
            "runs on the last stage alone; write pipeline_parallel_degree=1, and shard_degree or "
            "tensor_parallel_degree where a rank needs less memory, or a compute_loss of your own that does not gather"
        )


# What WandbCallback does on rank 0 alone, by the variable that asks for it, and what to
# write instead.
_WEIGHTS_OF_RANK_0 = {
    "WANDB_LOG_MODEL": (
        "saves the model",
        "write trainer.save_model(folder) and upload the folder on rank 0",
    ),
    "WANDB_WATCH": ("reads weights and gradients", "grad_norm is logged without it"),
}


def _refuse_trackers_of_weights(callbacks: Iterable[TrainerCallback]) -> None:
    """Refuse what would leave rank 0 waiting for the others, which Weights & Biases
    does not call.

    Raises:
        ValueError: ``WANDB_LOG_MODEL`` or ``WANDB_WATCH`` asks for weights.
    """
    if not any(isinstance(callback, WandbCallback) for callback in callbacks):
        return
    for variable, (what, instead) in _WEIGHTS_OF_RANK_0.items():
        value = os.environ.get(variable, "false")
        if value.lower() not in ("false", "0", "no", "off", "n", "f", ""):
            raise ValueError(
                f"{variable}={value}: Trainer's WandbCallback {what} on rank 0 alone, where a sharded model needs all "
                f"ranks; allowed: false; type: unset {variable} ({instead})"
            )


def _without_pruning(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pruner of a search on several ranks, one that never prunes: optuna
    looks at a trial on rank 0 alone, and its own default ends that one's training there,
    in the middle of the others'.

    Raises:
        ValueError: another pruner, or an option that ends something on rank 0 alone.
    """
    try:
        from optuna.pruners import NopPruner
    except ImportError:  # Trainer says it, or takes another backend
        return {}
    given = {name: options.get(name) for name in ("timeout", "catch", "n_jobs")}
    given["n_jobs"] = None if given["n_jobs"] == 1 else given["n_jobs"]
    pruner = options.get("pruner")
    given["pruner"] = None if isinstance(pruner, NopPruner) else pruner
    for name, value in given.items():
        if value:
            raise ValueError(
                f"hyperparameter_search({name}={value!r}): optuna looks at trials on rank 0 alone, and the other ranks "
                f"would wait in one that it ends there; leave {name} out, or search in one process"
            )
    if pruner is None and is_rank_0():
        logger.warning(
            "hyperparameter_search prunes no trial: optuna would end it on rank 0 alone"
        )
    return {"pruner": NopPruner()}


class SmpTrainer(SmpTrainerMixin, Trainer):
    """A :class:`transformers.Trainer` on smp_core, with the same arguments, and
    ``smp_config``."""
