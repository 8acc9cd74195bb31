"""Fp8Recipe: the products that run in FP8, and the rule for their scales. Plain values;
no torch here.

The names follow Transformer Engine's ``DelayedScaling`` (which SageMaker SMP drives)
where they mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from smp_core.config import values as read
from smp_core.config.recipe import Recipe, setting

Scaling = Literal["delayed", "dynamic"]
Fp8Format = Literal["hybrid", "e4m3"]
AmaxAlgorithm = Literal["max", "most_recent"]
Backend = Literal["native", "torchao", "transformer_engine"]

# The usual names of output heads; their logits feed the loss and need full precision.
HEADS = (
    "lm_head",
    "*.lm_head",
    "head",
    "*.head",
    "output",
    "embed_out",
    "*.embed_out",
    "score",
    "*.score",
)


_BOOLEAN = read.boolean()
_GLOBS = read.names()


@dataclass(frozen=True, kw_only=True, repr=False)
class Fp8Recipe(Recipe):
    """The settings of matrix products in FP8.

    Args:
        scaling: ``"delayed"`` (scales from the largest magnitudes of earlier steps) or
            ``"dynamic"`` (every tensor by its own present one, which reads it twice).
        fp8_format: ``"hybrid"`` (E4M3 forward, E5M2 for gradients) or ``"e4m3"`` for
            both.
        amax_history_len: optimizer steps that a scale remembers, >= 1.
        amax_compute_algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
        margin: scales are divided by 2 ** margin: room for values larger than any seen.
            An integer >= 0.
        reduce_amax: whether ranks agree on the scales of inputs and gradients (one MAX
            all-reduce per optimizer step). False: each rank has its own; weights always
            share theirs.
        include: globs over names of modules to convert; default all that can be.
        exclude: globs over names of modules to leave out; default the output head by
            its usual names (``HEADS``).
        calibration_steps: first optimizer steps in which delayed scaling uses present
            magnitudes, >= 1.
        fp8_all_gather: whether sharded weights are gathered as FP8 bytes (default) or
            in the parameters' dtype.
        backend: ``"native"``, or another library's FP8 layers by name, with
            ``fp8_all_gather=False``: ``"torchao"`` (with ``scaling="dynamic"``) or
            ``"transformer_engine"`` (CUDA only).

    Raises:
        ValueError: a value that is not allowed; the message names it and the allowed
            ones.
    """

    KNOB: ClassVar[str] = "fp8"
    OPTIONAL: ClassVar[bool] = True
    WORDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "delayed": {"scaling": "delayed"},
        "dynamic": {"scaling": "dynamic"},
        "hybrid": {"fp8_format": "hybrid"},
        "e4m3": {"fp8_format": "e4m3"},
    }
    ALLOWED: ClassVar[str] = "none, true, 'delayed', 'dynamic', 'hybrid', 'e4m3'"
    EXAMPLE: ClassVar[str] = '{"amax_history_len": 1024}'

    scaling: Scaling = setting("delayed", read.word(*get_args(Scaling)))
    fp8_format: Fp8Format = setting("hybrid", read.word(*get_args(Fp8Format)))
    amax_history_len: int = setting(1024, read.integer(minimum=1))
    amax_compute_algo: AmaxAlgorithm = setting(
        "max", read.word(*get_args(AmaxAlgorithm))
    )
    margin: int = setting(0, read.integer(minimum=0))
    reduce_amax: bool = setting(True, _BOOLEAN)
    include: tuple[str, ...] = setting(("*",), _GLOBS)
    exclude: tuple[str, ...] = setting(HEADS, _GLOBS)
    calibration_steps: int = setting(1, read.integer(minimum=1))
    fp8_all_gather: bool = setting(True, _BOOLEAN)
    backend: Backend = setting("native", read.word(*get_args(Backend)))

    def __post_init__(self) -> None:
        super().__post_init__()
        # Limits of the backend.
        for field, only, why in _LIMITS[self.backend, self.scaling]:
            if getattr(self, field) != only:
                raise ValueError(
                    f"fp8: backend={self.backend!r} with {field}={getattr(self, field)!r}: {why}; write "
                    f"{field}={only!r}, or backend='native'"
                )


# Per backend and scaling: (field, the only value there is, why).
_SUBCLASSES = (
    "its FP8 all-gather makes parameters tensor subclasses, which state dicts show"
)
_TORCHAO = (
    ("scaling", "dynamic", "it dropped delayed scaling"),
    ("fp8_format", "hybrid", "gradients are E5M2 there"),
    ("margin", 0, "its scales have no margin"),
    ("fp8_all_gather", False, _SUBCLASSES),
)
_TRANSFORMER_ENGINE = (
    ("fp8_all_gather", False, _SUBCLASSES),
    ("calibration_steps", 1, "its layers start with scales of 1"),
)
_LIMITS: dict[tuple[str, str], tuple[tuple[str, Any, str], ...]] = {
    ("native", "delayed"): (),
    ("native", "dynamic"): (),
    ("torchao", "delayed"): _TORCHAO,
    ("torchao", "dynamic"): _TORCHAO,
    ("transformer_engine", "delayed"): _TRANSFORMER_ENGINE,
    ("transformer_engine", "dynamic"): (
        *_TRANSFORMER_ENGINE,
        ("margin", 0, "its current scaling has no margin"),
    ),
}
