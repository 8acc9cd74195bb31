"""A dry run: a step of the real sharded model on rank 0 of a fake process group, without values, on one CPU.

    python -m smp_core.dry_run QUESTION ANSWER     files of :mod:`smp_core.planning.dry_run`

The model is built with fake tensors, made parallel by the ``parallelize_model`` that a training uses, and trained for
three steps: the first makes optimizer states and FSDP2's buffers, the second finds where most is allocated, the third
stops there and asks what each storage is (:mod:`smp_core.allocations`). The process group's backend is torch's fake
one, whose collectives do nothing and which takes the way of an accelerator's through our communication objects.

Differs from a GPU: memory of several streams that the allocator cannot use again, temporaries of the optimizer (one
tensor at a time here), kernels that keep other tensors for backward.
"""

from __future__ import annotations

import contextlib
import pickle
import resource
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (  # _subclasses: torch's documentation of fake tensors has it
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from smp_core.activations.host_pool import HostPool
from smp_core.allocations import Allocations
from smp_core.comm.background import Background, Pending
from smp_core.comm.flat import CommObject
from smp_core.config import SmpConfig
from smp_core.mesh import SmpMesh
from smp_core.parallel_model import ParallelModel
from smp_core.parallelize import parallelize_model
from smp_core.pipeline import tied
from smp_core.pipeline.batches import SameBatches
from smp_core.pipeline.messages import Format
from smp_core.pipeline.randomness import StepSeeds
from smp_core.planning.chain_recording import with_chain
from smp_core.planning.decide import Plan, decide
from smp_core.planning.dry_run import RUN_KINDS, DryRun, Question
from smp_core.planning.model_source import Source, build
from smp_core.planning.pipeline_rules import Stages
from smp_core.planning.shapes import Shapes
from smp_core.planning.trace import scores_kept
from smp_core.sharding.accumulation import AccumulationWindow
from smp_core.sharding.received_gradients import Told
from smp_core.split_trace import alike

# Those of `smp_core.planning.optimizers.OPTIMIZERS` that torch has and that make their states in a step.
_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "adam": torch.optim.Adam,
    "adam-amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "rmsprop": torch.optim.RMSprop,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "sgd": torch.optim.SGD,
}
_LATEST = -1  # no storage's address


@dataclass
class _Rank:
    """The rank that runs.

    Attributes:
        allocated: storage -> "gathered" or "other", of buffers that communication objects allocated; of one that is
            allocated at the moment under ``_LATEST``.
    """

    source: Source
    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    question: Question
    allocated: dict[int, str]

    def step(self) -> None:
        question, pipeline, window = self.question, self.parallel.pipeline, self.parallel.window
        loss = partial(self.source.loss, question.micro_batch, question.sequence)
        if pipeline is not None:
            for _ in range(question.count // pipeline.micro_batches):
                pipeline.train([loss] * pipeline.micro_batches, lambda loss: loss, 1.0, None)
            window.close()
        else:
            for number in range(question.count):
                with window.accumulate(number < question.count - 1):
                    loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    # The storages of each kind

    def parameters(self) -> list[torch.Tensor]:
        parallel = self.parallel
        if not parallel.units:
            return list(parallel.module.parameters())
        named = dict(parallel.module.named_parameters())
        sharded = [parameter for unit in parallel.units for parameter in unit.parameters()]
        return [*sharded, *(named[name] for name in parallel.plan.replicated)]

    def states(self) -> list[torch.Tensor]:
        entries = [value for state in self.optimizer.state.values() for name, value in state.items() if name != "step"]
        world = self.parallel.window.world
        shards = [] if world is None else world.shards
        masters = [master for shard in shards if not shard.on_host for master in shard.masters]
        return [*(value for value in entries if isinstance(value, torch.Tensor)), *masters]

    def unsharded(self) -> list[torch.Tensor]:
        return [tensor for unit in self.parallel.units for tensor in unit.unsharded()]

    def gradients(self) -> list[torch.Tensor]:
        own = [each.grad for each in self.parameters() if each.grad is not None]
        unsharded = [gradient for unit in self.parallel.units for gradient in unit.unsharded_gradients()]
        window = self.parallel.window
        assert isinstance(window, AccumulationWindow)
        return [*own, *unsharded, *window.held()]

    def _root_sizes(self) -> set[int]:
        """Return the bytes of embeddings and heads: their gradients wait in autograd's buffers where they are tied."""
        roots = [unit for unit in self.parallel.units if unit.is_root]
        found = (tensor for unit in roots for tensor in unit.unsharded() if tensor.ndim > 1)
        return {tensor.numel() * tensor.element_size() for tensor in found}

    def _copy_sizes(self) -> set[int]:
        """Return the bytes of parts of matrices that are kept between forward and backward."""
        keep = self.parallel.config.reshard_after_forward
        if type(keep) is not int:
            return set()
        blocks = [unit for unit in self.parallel.units if not unit.is_root]
        found = (tensor for unit in blocks for tensor in unit.unsharded() if tensor.ndim > 1)
        return {tensor.numel() * tensor.element_size() // keep for tensor in found}

    def kinds_of(self, sizes: Mapping[int, int]) -> dict[str, int]:
        """Add up storages by kind; what nothing else claims is activations. Host memory is left out."""
        config = self.parallel.config
        parameters = "host" if config.state_offload == "all" else "parameters"
        optimizer = "host" if config.state_offload else "optimizer"
        known: dict[int, str] = dict(self.allocated)
        if _LATEST in known:
            known[list(sizes)[-1]] = known[_LATEST]
        for kind, tensors in (
            ("gathered", self.unsharded()),
            ("gradients", self.gradients()),
            ("other", list(self.parallel.module.buffers())),
            (optimizer, self.states()),
            (parameters, self.parameters()),
        ):
            known |= dict.fromkeys(map(id, _storages(tensors)), kind)
        found = Counter[str]()
        roots, copies = self._root_sizes(), self._copy_sizes()
        for address, size in sizes.items():
            kind = known.get(address, "activations")
            if kind == "activations":
                kind = "gradients" if size in roots else "gathered" if size in copies else kind
            found[kind] += size
        return {kind: found[kind] for kind in RUN_KINDS}


def rehearse(question: Question) -> DryRun:
    """Run a configuration in this process, with process groups of its own: as rank 0, and as the first rank of each
    pipeline stage of which no earlier one takes as much memory.

    Raises:
        ValueError: knobs or a model that cannot be run.
    """
    asked = SmpConfig(**question.knobs)
    if asked.context_parallel_degree > 1:
        degree = asked.context_parallel_degree
        raise ValueError(f"context_parallel_degree={degree}: a dry run has no such groups yet; leave --dry-run out")
    if asked.fp8 is not None:
        raise ValueError("fp8: a dry run has no FP8 yet; leave --dry-run out")
    if question.optimizer not in _OPTIMIZERS:
        raise ValueError(
            f"optimizer={question.optimizer!r}: a dry run steps optimizers of torch: {', '.join(_OPTIMIZERS)}; "
            "plan with one of them that keeps as many states, or leave --dry-run out"
        )
    formats: list[Format] = []
    first, stages = _as_first_of(0, question, asked, formats)
    others = [] if stages is None else [_as_first_of(n, question, asked, formats)[0] for n in stages.unlike[1:]]
    return replace(first, others=tuple(others))


def _as_first_of(
    stage: int, question: Question, asked: SmpConfig, formats: list[Format]
) -> tuple[DryRun, Stages | None]:
    """Run as the first rank of a stage; return the stages, too. The first of them notes formats for the others."""
    devices, began = question.hardware.devices, time.process_time()
    dist.init_process_group("fake", rank=stage * devices // asked.pipeline_parallel_degree, world_size=devices)
    before = torch.get_default_dtype()
    try:
        with _told_by_stages(formats):
            found, of_plan = _rehearsed(question, asked)
        return replace(found, stage=stage, seconds=time.process_time() - began), of_plan
    finally:
        torch.set_default_dtype(before)
        dist.destroy_process_group()


def _rehearsed(question: Question, asked: SmpConfig) -> tuple[DryRun, Stages | None]:
    hardware, allocated = question.hardware, dict[int, str]()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _at_once(), _undivided(), _real_meshes(), _noted(allocated), scores_kept():
        with fake:
            torch.set_default_dtype(torch.float32 if question.precision == "mixed" else torch.bfloat16)
            source = build(question.model, question.sequence, question.fields)
            shapes = Shapes.of(source.model, asked, source.entry)
            if asked.pipeline_parallel_degree > 1:
                shapes = with_chain(shapes, source.model)
            plan = decide(shapes, asked, hardware.cluster())
        in_stages = plan.knobs.pipeline.microbatches if plan.stages is not None else 1
        if isinstance(in_stages, int) and question.count % in_stages:
            raise ValueError(f"{question.count} micro-batches cannot be batches of pipeline.microbatches={in_stages}")
        mesh = _mesh_of(plan, question)  # of real tensors
        with fake:
            parallel = parallelize_model(source.model, mesh, plan)
            optimizer = _OPTIMIZERS[question.optimizer](parallel.module.parameters())
            parallel.prepare_optimizer(optimizer)
            rank = _Rank(source, parallel, optimizer, question, allocated)
            return _watched(rank, hardware.devices), plan.stages


def _watched(rank: _Rank, ranks: int) -> DryRun:
    with Allocations([]):
        rank.step()
    tensors = [*rank.parameters(), *rank.parallel.module.buffers(), *rank.states(), *rank.unsharded()]
    before = _storages(tensors)
    with Allocations(before) as first:
        rank.step()
    memory: dict[str, int] = {}
    rank.parallel.meter.close_step()
    with Allocations(before, first.highest_at, lambda sizes: memory.update(rank.kinds_of(sizes))) as second:
        rank.step()
    rank.parallel.meter.close_step()
    metered = rank.parallel.meter.per_step().items()
    sent = {name.removesuffix("_bytes"): value for name, value in metered if name.endswith("_bytes") and "/" in name}
    calls: dict[str, tuple[int, int]] = {}
    for (kind, group, n_bytes), times in second.collectives.items():
        count, total = calls.get(f"{kind} over {len(group)}", (0, 0))
        calls[f"{kind} over {len(group)}"] = (count + times, total + times * n_bytes)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return DryRun(memory, {k: v for k, v in sent.items() if v}, calls, ranks, 0.0, resident)


def _mesh_of(plan: Plan, question: Question) -> SmpMesh:
    knobs, keep = plan.knobs, plan.knobs.reshard_after_forward
    return SmpMesh.build(
        plan.layout,
        question.hardware.cluster().topology,
        torch.device("cpu"),
        in_stages=knobs.asked("collectives.hierarchical") is not False,
        secondary=keep if type(keep) is int else None,
    )


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """Let meshes that are made on the way be made of real tensors: their ranks are values."""
    secondary, holders = SmpMesh.secondary, SmpMesh.holders
    concatenate = DeviceMesh._concatenate  # of fully_shard on a model that is split already; it looks at ranks

    def real_secondary(self: SmpMesh, degree: int) -> DeviceMesh:
        with unset_fake_temporarily():
            return secondary(self, degree)

    def real_holders(self: SmpMesh) -> list[DeviceMesh]:
        with unset_fake_temporarily():
            return holders(self)

    def real_concatenate(*args: Any, **kwargs: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return concatenate(*args, **kwargs)

    SmpMesh.secondary, SmpMesh.holders = real_secondary, real_holders  # type: ignore[method-assign]
    DeviceMesh._concatenate = staticmethod(real_concatenate)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        SmpMesh.secondary, SmpMesh.holders = secondary, holders  # type: ignore[method-assign]
        DeviceMesh._concatenate = staticmethod(concatenate)  # type: ignore[method-assign,assignment]


class _Done:
    def wait(self) -> None:
        pass


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Let what runs behind the computation run at once, in this thread: fake tensors and modes are a thread's own."""
    submit = Background.submit

    def run_now(self: Background, run: Callable[[], None]) -> Pending:
        with torch.no_grad():
            run()
        return _Done()

    Background.submit = run_now  # type: ignore[method-assign]
    try:
        yield
    finally:
        Background.submit = submit  # type: ignore[method-assign]


@contextlib.contextmanager
def _undivided() -> Iterator[None]:
    """Let ranks be told to agree: whether they do is a question of values, and here is one rank."""
    divergence = Told.divergence
    Told.divergence = lambda self: None  # type: ignore[method-assign]
    try:
        with alike():
            yield
    finally:
        Told.divergence = divergence  # type: ignore[method-assign]


@contextlib.contextmanager
def _told_by_stages(formats: list[Format]) -> Iterator[None]:
    """Let a pipeline stage be told that others begin the same batch, and the form of all activations between blocks."""
    begin, draw, encoded, decoded = SameBatches.begin, StepSeeds.draw, Format.encoded, Format.decoded
    is_received = tied.is_received

    def noting(self: Format, device: torch.device) -> torch.Tensor:
        formats.append(self)
        return encoded(self, device)

    SameBatches.begin = lambda *_: ("a batch", 0)  # type: ignore[method-assign]
    StepSeeds.draw = lambda _: 0  # type: ignore[method-assign,assignment,misc]
    Format.encoded = noting  # type: ignore[method-assign]
    Format.decoded = staticmethod(lambda _: formats[0])  # type: ignore[method-assign,assignment]
    tied.is_received = lambda _: True  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        SameBatches.begin, StepSeeds.draw = begin, draw  # type: ignore[method-assign]
        Format.encoded, Format.decoded = encoded, decoded  # type: ignore[method-assign]
        tied.is_received = is_received


@contextlib.contextmanager
def _noted(allocated: dict[int, str]) -> Iterator[None]:
    """Note buffers that communication objects and the pool of host memory allocate."""
    allocate, take = CommObject.allocate, HostPool.take

    def note(tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        allocated[id(storage)] = kind
        weakref.finalize(storage, allocated.pop, id(storage), None)  # another storage may get its address

    def noting(self: CommObject, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kind = allocated[_LATEST] = "gathered" if "Gather" in type(self).__name__ else "other"
        made = allocate(self, size, dtype=dtype, device=device)
        del allocated[_LATEST]
        note(made, kind)
        return made

    def taken(self: HostPool, n_bytes: int) -> Any:
        buffer = take(self, n_bytes)
        note(buffer.bytes, "host")
        return buffer

    CommObject.allocate, HostPool.take = noting, taken  # type: ignore[method-assign]
    try:
        yield
    finally:
        CommObject.allocate, HostPool.take = allocate, take  # type: ignore[method-assign]


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in tensors]


def _main(asked: str, out: str) -> None:
    torch.set_num_threads(1)
    found: list[DryRun | ValueError] = []
    for question in pickle.loads(Path(asked).read_bytes()):
        try:
            found.append(rehearse(question))
        except (ValueError, NotImplementedError) as error:
            found.append(ValueError(str(error)))
    Path(out).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
