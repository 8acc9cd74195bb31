"""A dry run: a step of the real sharded model on rank 0 of a fake process group,
without values, on one CPU.

    python -m smp_core.dry_run.step QUESTION ANSWER     files of :mod:`smp_core.planner.dry_run`

The model is built with fake tensors, made parallel by the ``parallelize_model`` that a
training uses, and trained for three steps: the first makes optimizer states and FSDP2's
buffers, the second finds where most is allocated, the third stops there and asks what
each storage is (:mod:`smp_core.dry_run.allocations`). The process group's backend is
torch's fake one, whose collectives do nothing and which takes the way of an
accelerator's through our communication objects.

Differs from a GPU: memory of several streams that the allocator cannot use again,
temporaries of the optimizer (one tensor at a time here), kernels that keep other
tensors for backward; attention over split sequences is a flash kernel's here, in any
dtype.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

# _subclasses: torch's documentation of fake tensors has it.
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    unset_fake_temporarily,
)

from smp_core.cluster import SmpMesh
from smp_core.config import SmpConfig
from smp_core.context_parallel import SplitBatch, attention, enabled
from smp_core.dry_run.allocations import Allocations
from smp_core.dry_run.without_values import (
    LATEST,
    at_once,
    devices_attention,
    noted,
    real_meshes,
    told_by_stages,
    trials_apart,
    undivided,
)
from smp_core.engine import ParallelModel, parallelize_model
from smp_core.engine.decide import decide
from smp_core.fp8 import GatheredWeight
from smp_core.optim import AdamW8bit
from smp_core.outside import answer_parent
from smp_core.pipeline import Format
from smp_core.plan import Shapes, Stages
from smp_core.plan.chain import with_chain
from smp_core.planner import RUN_KINDS, DryRun, Question, Source, build, scores_kept
from smp_core.sharding.gradients import AccumulationWindow
from smp_core.torch_facts import local_part

# Those of `smp_core.plan.optimizers.OPTIMIZERS` that torch or this project has and that
# make their states in a step.
_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "adamw8bit": AdamW8bit,
    "adam": torch.optim.Adam,
    "adam-amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "rmsprop": torch.optim.RMSprop,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "sgd": torch.optim.SGD,
}


@dataclass
class _Rank:
    """The rank that runs.

    Attributes:
        allocated: storage -> "gathered" or "other", of buffers that communication
            objects allocated; of one that is allocated at the moment under ``LATEST``.
        stored: the storages of parameters; those of codes are decoded where operations
            are watched.
    """

    source: Source
    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    question: Question
    allocated: dict[int, str]
    split: SplitBatch | None = None
    stored: Sequence[torch.UntypedStorage] = ()

    def step(self) -> None:
        question = self.question
        pipeline = self.parallel.pipeline
        window = self.parallel.window
        # A batch of a pipeline is several calls, one for each micro-batch.
        if pipeline is not None:
            calls = [self._loss] * pipeline.micro_batches
            for _ in range(question.count // pipeline.micro_batches):
                pipeline.train(
                    calls, lambda loss: loss, 1.0, None, lambda _: enabled(self.split)
                )
            window.close()
        else:
            # The last micro-batch closes the window, as in training.
            for number in range(question.count):
                with (
                    window.accumulate(number < question.count - 1),
                    enabled(self.split),
                ):
                    self._loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self) -> torch.Tensor:
        if self.split is not None:
            return self.source.loss_of(self.split.batch)
        return self.source.loss(self.question.micro_batch, self.question.sequence)

    # The storages of each kind

    def states(self) -> list[torch.Tensor]:
        entries = [
            value
            for state in self.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ]
        world = self.parallel.window.world
        # Masters of optimizer_shard="world" are on the device, unless the host has
        # them.
        shards = [] if world is None else world.shards
        masters = [
            master for shard in shards if not shard.on_host for master in shard.masters
        ]
        return [
            *(value for value in entries if isinstance(value, torch.Tensor)),
            *masters,
        ]

    def unsharded(self) -> list[torch.Tensor]:
        return [tensor for unit in self.parallel.units for tensor in unit.unsharded()]

    def gradients(self) -> list[torch.Tensor]:
        own = [
            each.grad
            for each in self.parallel.stored_parameters()
            if each.grad is not None
        ]
        # Between passes gradients are unsharded, in a window, or both.
        unsharded = [
            gradient
            for unit in self.parallel.units
            for gradient in unit.unsharded_gradients()
        ]
        window = self.parallel.window
        assert isinstance(window, AccumulationWindow)
        return [*own, *unsharded, *window.held()]

    def _root_sizes(self) -> set[int]:
        """Return the bytes of embeddings and heads: their gradients wait in autograd's
        buffers where they are tied."""
        roots = [unit for unit in self.parallel.units if unit.is_root]
        found = (
            tensor for unit in roots for tensor in unit.unsharded() if tensor.ndim > 1
        )
        return {tensor.numel() * tensor.element_size() for tensor in found}

    def kinds_of(self, sizes: Mapping[int, int]) -> dict[str, int]:
        """Add up storages by kind; what nothing else claims is activations. Host memory
        is left out."""
        config = self.parallel.config
        parameters = "host" if config.state_offload == "all" else "parameters"
        optimizer = "host" if config.state_offload else "optimizer"
        # What each storage is, later kinds over earlier ones.
        known: dict[int, str] = dict(self.allocated)
        # An allocation that is under way has no address yet.
        if LATEST in known:
            known[list(sizes)[-1]] = known[LATEST]
        for kind, tensors in (
            ("gathered", [*self.unsharded(), *self.parallel.traffic.parts()]),
            ("gradients", self.gradients()),
            ("other", list(self.parallel.module.buffers())),
            (optimizer, self.states()),
        ):
            known |= dict.fromkeys(map(id, _storages(tensors)), kind)
        known |= dict.fromkeys(map(id, self.stored), parameters)
        # How many bytes of each kind.
        found = Counter[str]()
        roots = self._root_sizes()
        for address, size in sizes.items():
            kind = known.get(address, "activations")
            if kind == "activations":
                kind = "gradients" if size in roots else kind
            found[kind] += size
        return {kind: found[kind] for kind in RUN_KINDS}


def rehearse(question: Question) -> DryRun:
    """Run a configuration in this process, with process groups of its own: as rank 0,
    and as the first rank of each pipeline stage of which no earlier one takes as much
    memory.

    Raises:
        ValueError: knobs or a model that cannot be run.
    """
    asked = SmpConfig(**question.knobs)
    if asked.fp8 is not None:
        raise ValueError("fp8: a dry run has no FP8 yet; leave --dry-run out")
    if question.optimizer not in _OPTIMIZERS:
        raise ValueError(
            f"optimizer={question.optimizer!r}: a dry run steps optimizers of torch: {', '.join(_OPTIMIZERS)}; "
            "plan with one of them that keeps as many states, or leave --dry-run out"
        )
    formats: list[Format] = []
    # Stage by stage, and only those that may take more memory than an earlier one.
    first, stages = _as_first_of(0, question, asked, formats)
    if stages is None:
        return first
    others = tuple(
        _as_first_of(stage, question, asked, formats)[0] for stage in stages.unlike[1:]
    )
    return replace(first, others=others)


def _as_first_of(
    stage: int, question: Question, asked: SmpConfig, formats: list[Format]
) -> tuple[DryRun, Stages | None]:
    """Run as the first rank of a stage; return the stages, too. The first of them notes
    formats for the others."""
    # The ranks of a stage stand behind each other; this is the first of its.
    devices, began = question.hardware.devices, time.process_time()
    dist.init_process_group(
        "fake",
        rank=stage * devices // asked.pipeline_parallel_degree,
        world_size=devices,
    )
    before = torch.get_default_dtype()
    try:
        # Stages tell each other the format of activations, which is noted here.
        with told_by_stages(formats):
            found, of_plan = _rehearsed(question, asked)
        return replace(found, stage=stage, seconds=time.process_time() - began), of_plan
    finally:
        torch.set_default_dtype(before)
        dist.destroy_process_group()


def _rehearsed(question: Question, asked: SmpConfig) -> tuple[DryRun, Stages | None]:
    hardware, allocated = question.hardware, dict[int, str]()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # Everything that needs values, other ranks or a device is stood in for.
    with (
        at_once(),
        undivided(),
        real_meshes(),
        trials_apart(),
        devices_attention(),
        noted(allocated),
        scores_kept(),
    ):
        # Fake tensors from here on: shapes and dtypes without memory.
        with fake:
            # Mixed precision trains float32 parameters, others bfloat16.
            torch.set_default_dtype(
                torch.float32 if question.precision == "mixed" else torch.bfloat16
            )
            source = build(question.model, question.sequence, question.fields)
            shapes = Shapes.of(source.model, asked, source.entry)
            if asked.pipeline_parallel_degree > 1:
                shapes = with_chain(shapes, source.model)
            plan = decide(shapes, asked, hardware.cluster())
        in_stages = plan.knobs.pipeline.microbatches if plan.stages is not None else 1
        if isinstance(in_stages, int) and question.count % in_stages:
            raise ValueError(
                f"{question.count} micro-batches cannot be batches of pipeline.microbatches={in_stages}"
            )
        # The mesh is made of real tensors: its ranks are values.
        mesh = SmpMesh.build(plan.knobs, plan.layout, plan.cluster.topology, "cpu")
        with fake:
            # What a training does, on a mesh of real tensors.
            parallel = parallelize_model(source.model, mesh, plan)
            optimizer = _OPTIMIZERS[question.optimizer](parallel.module.parameters())
            parallel.prepare_optimizer(optimizer)
            rank = _Rank(
                source,
                parallel,
                optimizer,
                question,
                allocated,
                _split(source, parallel, question),
            )
            return _watched(rank, hardware.devices), plan.stages


def _split(
    source: Source, parallel: ParallelModel, question: Question
) -> SplitBatch | None:
    """Split a batch over context ranks. Where its documents begin is a question of
    values, and it has some."""
    if parallel.context is None:
        return None
    with unset_fake_temporarily():
        return parallel.context.split(
            source.batch(question.micro_batch, question.sequence)
        )


def _watched(rank: _Rank, ranks: int) -> DryRun:
    # The first step makes optimizer states, which are there from then on.
    with Allocations([]):
        rank.step()
    tensors = [
        *rank.parallel.stored_parameters(),
        *rank.parallel.module.buffers(),
        *rank.states(),
        *rank.unsharded(),
    ]
    before, rank.stored = (
        _storages(tensors),
        _storages(rank.parallel.stored_parameters()),
    )
    # The second finds the instant of the peak, the third what is there then.
    with Allocations(before, inside=attention.INSIDE) as first:
        rank.step()
    memory: dict[str, int] = {}
    # Steps are counted apart, so that the third one's bytes are its own.
    rank.parallel.meter.close_step()

    def note(sizes: Mapping[int, int]) -> None:
        there = sum(sizes.values())
        # Anything that happened in only one of the two would make the kinds untrue.
        if abs(there - first.highest) > first.highest / 1000:
            raise ValueError(
                f"a dry run's two steps are not alike: {first.highest} bytes at the peak, and {there}"
            )
        memory.update(rank.kinds_of(sizes))

    with Allocations(before, first.highest_at, note, attention.INSIDE):
        rank.step()
    rank.parallel.meter.close_step()
    # Bytes, by kind and link.
    metered = rank.parallel.meter.per_step().items()
    sent = {
        name.removesuffix("_bytes"): value
        for name, value in metered
        if name.endswith("_bytes") and "/" in name
    }
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    groups = tuple(rank.parallel.mesh.communicators)
    return DryRun(
        memory, {k: v for k, v in sent.items() if v}, groups, ranks, 0.0, resident
    )


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    found = []
    for each in tensors:
        local = local_part(each)
        # A code's bytes are in its inner tensor, not in the wrapper.
        found.append(local.data8 if isinstance(local, GatheredWeight) else local)
    return [tensor.untyped_storage() for tensor in found]


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer_parent(lambda questions: list(map(rehearse, questions)))
