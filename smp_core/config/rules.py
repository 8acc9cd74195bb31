"""Which knobs of SmpConfig go together, and what is said about a name that is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from smp_core.config import values as read
from smp_core.config.other_strategies import argument_of_another
from smp_core.config.recipes import RECIPES, Compression
from smp_core.config.smp_parameters import SMP_OPTIONS
from smp_core.topology import divisors, listed

T = TypeVar("T")


@dataclass(frozen=True)
class Clash(Generic[T]):
    """One respect in which a subject does not go together with another yet, for errors
    and for pages.

    Attributes:
        other: the name of the other subject.
        words: the part of the other subject that is meant, as docs/combinations.md
            shows it.
        found: returns what was asked for, with its value; None: nothing of the kind.
            Takes a configuration, or the draft of a plan.
        instead: what to write.
    """

    other: str
    words: str
    found: Callable[[T], str | None]
    instead: str


def contradictions(asked: Any) -> Iterator[str]:
    """Yield what is wrong with knobs of a configuration (as asked for) that are fine by
    themselves and not together."""
    # Degrees.
    # Degrees as words ("node") are known only with the cluster, and looked at there.
    degree = asked.shard_degree
    context = asked.context_parallel_degree
    kept = asked.reshard_after_forward
    if isinstance(degree, int) and context > degree:
        yield (
            f"context_parallel_degree={context} is larger than shard_degree={degree}; context ranks are part of "
            f"the partition group: write shard_degree={context} or more, or context_parallel_degree={degree}"
        )
    elif isinstance(degree, int) and degree % context:
        allowed = listed(divisors(degree))
        yield f"context_parallel_degree={context} does not divide shard_degree={degree}; allowed: {allowed}"
    # What is kept after forward, and between micro-batches.
    if isinstance(degree, int) and type(kept) is int and degree % kept:
        allowed = listed(["true", "false", *divisors(degree)[1:]])
        yield f"reshard_after_forward={kept} does not divide shard_degree={degree}; allowed: {allowed}"
    if asked.keep_between_micro_batches == "parameters" and kept not in ("auto", False):
        yield (
            "keep_between_micro_batches='parameters' keeps parameters gathered from one micro-batch to the next, and "
            f"reshard_after_forward={kept!r} frees them before that; write reshard_after_forward='auto', or "
            "keep_between_micro_batches='shards'"
        )
    yield from _of_memory(asked)
    yield from _of_fp8(asked)
    yield from _of_compression(asked.compression)


def _of_memory(asked: Any) -> Iterator[str]:
    if asked.activations.offload and asked.activations.checkpoint == "none":
        yield (
            "activations.offload=true offloads the inputs of checkpointed modules, but activations.checkpoint='none'; "
            "write activations={'checkpoint': 'full', 'offload': true} (or another mode), or leave offload out"
        )
    if asked.optimizer_shard == "world" and asked.state_offload == "all":
        yield (
            "optimizer_shard='world' steps parts of parameters that are on the device, and state_offload='all' keeps "
            "them in host memory; write state_offload='optimizer', or optimizer_shard='shard'"
        )
    # Both step float32 copies, which master_dtype=None would leave out.
    needs = {"optimizer_shard": "world", "state_offload": "optimizer"}
    for knob in [
        knob
        for knob, value in needs.items()
        if getattr(asked, knob) == value and not asked.master_dtype
    ]:
        yield (
            f"master_dtype=None: {knob}={needs[knob]!r} steps float32 masters of half precision parameters; leave "
            f"master_dtype out, or leave {knob} out"
        )
    if asked.checkpoint.async_save and asked.checkpoint.full_state_dict:
        yield (
            "checkpoint.async_save=True has no effect with checkpoint.full_state_dict=True: whole tensors are gathered "
            "by all ranks while training waits; write checkpoint='full', or checkpoint='async' and bring a file back "
            "with `smp checkpoint consolidate`"
        )
    if asked.checkpoint.memory_every_n_steps and asked.checkpoint.full_state_dict:
        yield (
            f"checkpoint.memory_every_n_steps={asked.checkpoint.memory_every_n_steps} keeps each rank's shards, and "
            "checkpoint.full_state_dict=True saves whole tensors; write full_state_dict=false, or leave "
            "memory_every_n_steps out"
        )


def _of_fp8(asked: Any) -> Iterator[str]:
    # The same objects make docs/combinations.md.
    for clash in FP8_APART:
        what = None if asked.fp8 is None else clash.found(asked)
        if what is not None:
            yield f"{what}; {clash.instead}"


def _recomputes_in_transformer_engine(asked: Any) -> str | None:
    if (
        asked.fp8.backend != "transformer_engine"
        or asked.activations.checkpoint == "none"
    ):
        return None
    return "fp8.backend='transformer_engine' has other scales when it recomputes activations"


def _gathers_in_two_codes(asked: Any) -> str | None:
    if not asked.fp8.fp8_all_gather or asked.compression.gather is None:
        return None
    return f"compression.gather={asked.compression.gather!r}: with fp8 weights travel in FP8 already"


FP8_APART: tuple[Clash[Any], ...] = (
    Clash(
        "activations",
        "recomputation in Transformer Engine's layers (`fp8.backend`), whose scales are others the second time",
        _recomputes_in_transformer_engine,
        "write activations='none', or fp8={'backend': 'native'}",
    ),
    Clash(
        "communication",
        "`compression.gather`, where weights travel in FP8 already (`fp8.fp8_all_gather`)",
        _gathers_in_two_codes,
        "leave it at none, or write fp8={'fp8_all_gather': false}",
    ),
)


def _of_compression(asked: Compression) -> Iterator[str]:
    if asked.error_feedback is True and asked.reduce_codes is None:
        yield (
            "compression.error_feedback=true adds back what codes of gradients round off; write compression="
            "{'reduce': 'int8'} or {'reduce': 'int4'} too"
        )
    # They say how something is done that is not done at all.
    for field in ("gather_inside_nodes", "gather_after_steps", "gather_exclude"):
        if getattr(asked, field) and asked.gather is None:
            yield (
                f"compression.{field} says how compression.gather works; write compression={{'gather': 'int8'}} or "
                "{'gather': 'fp8'} too"
            )


def unknown_knob(
    name: str, known: Iterable[str], *, arguments: Iterable[str] = ()
) -> ValueError:
    """Return the complaint about a name that is not a knob, with what to write: the
    knob that it is a field of, the nearest knob, the way to read an option of SMP, or
    what stands in the place of another strategy's argument.

    Args:
        known: the knobs.
        arguments: what else could have been meant where the name was written: the other
            arguments of a class.
    """
    # From the most certain guess to the least: another strategy, SMP, a field, a
    # similar name.
    if other := argument_of_another(name):
        return other
    if name in SMP_OPTIONS:
        return ValueError(
            f"{name!r} is an option of SageMaker SMP, not a knob; build the configuration with "
            f"SmpConfig.from_smp_parameters({{{name!r}: ...}}), or see docs/migrating-from-smp.md for the knob"
        )
    # A field that was written as if it were a knob.
    holders = [recipe.KNOB for recipe in RECIPES.values() if name in recipe.readers()]
    if holders:
        spelled = " or ".join(f"{knob}={{{name!r}: ...}}" for knob in holders)
        return ValueError(f"{name!r} is a field of a knob; write {spelled}")
    what = "argument" if arguments else "knob"
    return read.unknown_name(
        what, name, (*known, *arguments), listed_in="docs/configuration.md"
    )
