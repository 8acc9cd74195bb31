"""The recipes of the knobs that say how other knobs are planned: `plan` and `planner`.
Plain values; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from smp_core.config import values as read
from smp_core.config.recipe import Recipe, setting

_COUNT_OR_NONE = read.either(
    read.nothing(), read.integer(minimum=1), allowed="an integer of at least 1, none"
)
_GIB = read.either(read.nothing(), read.number(0.0), allowed="a number above 0, none")

# Those of smp_core.plan.optimizers, which stands above this file.
_OPTIMIZERS = (
    *("adamw", "adamw-amsgrad", "adamw8bit", "adam", "adam-amsgrad"),
    *("adagrad", "rmsprop", "lion", "sgd-momentum", "sgd"),
)


@dataclass(frozen=True, kw_only=True, repr=False)
class AutoPlan(Recipe):
    """Settings of a plan that is made when training starts: what a step is, and on what
    it runs.

    Args:
        sequence: Tokens of a sample. Integer >= 2, or None (default; those of the
            model's example_input_array).
        micro_batch: Samples of a micro-batch on each rank that reads samples of its
            own: the batch of the data loader. Integer >= 1, or None (default; those of
            the model's example_input_array).
        global_batch: Samples of an optimizer step over all ranks. With it tensor and
            context degrees are chosen too, of those with which it stays so. Integer >=
            1, or None (default; these degrees are as they were given).
        cluster: The machines, as `smp plan --cluster` takes them
            ("4x8:a100-40g@400gbps"), or None (default; the device by its name, and
            links as measured (SMP_LINKS) or of the machines that the device is sold
            in).
    """

    KNOB: ClassVar[str] = "plan"
    OPTIONAL: ClassVar[bool] = True
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {}}
    ALLOWED: ClassVar[str] = "'auto', none"
    EXAMPLE: ClassVar[str] = '{"sequence": 2048, "micro_batch": 4}'

    sequence: int | None = setting(
        None,
        read.either(
            read.nothing(),
            read.integer(minimum=2),
            allowed="an integer of at least 2, none",
        ),
    )
    micro_batch: int | None = setting(None, _COUNT_OR_NONE)
    global_batch: int | None = setting(None, _COUNT_OR_NONE)
    cluster: str | None = setting(
        None,
        read.either(
            read.nothing(),
            read.pattern(r"\S+"),
            allowed="'4xp5', '2x8:h200@400gbps', a YAML file",
        ),
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Planner(Recipe):
    """Settings that shard_degree="auto" plans with.

    Args:
        memory_headroom: Share of device memory that is left to activations and buffers.
            A number in [0, 1); default 0.35.
        device_memory_gib: Device memory in GiB. A number > 0, or None (default; the
            device is asked).
        optimizer: "adamw", "adamw-amsgrad", "adamw8bit", "adam", "adam-amsgrad",
            "adagrad", "rmsprop", "lion", "sgd-momentum", "sgd" or "auto" (default; the
            one that is prepared together with the model, as under Accelerate; otherwise
            AdamW, and a warning if Lightning's configure_optimizers makes one for which
            another degree would have been chosen).
    """

    KNOB: ClassVar[str] = "planner"
    EXAMPLE: ClassVar[str] = '{"memory_headroom": 0.2, "optimizer": "sgd"}'

    memory_headroom: float = setting(0.35, read.number(0.0, 1.0, include_lowest=True))
    device_memory_gib: float | None = setting(None, _GIB)
    optimizer: str = setting("auto", read.word("auto", *_OPTIMIZERS))
