"""Fp8Recipe: the products that run in FP8, and the rule for their scales. Plain values; no torch here.

The names follow Transformer Engine's ``DelayedScaling`` (which SageMaker SMP drives) where they mean the same.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Scaling = Literal["delayed", "dynamic"]
Fp8Format = Literal["hybrid", "e4m3"]
AmaxAlgorithm = Literal["max", "most_recent"]
Backend = Literal["native", "torchao", "transformer_engine"]

# The usual names of output heads; their logits feed the loss and need full precision.
HEADS = ("lm_head", "*.lm_head", "head", "*.head", "output", "embed_out", "*.embed_out", "score", "*.score")


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """The settings of matrix products in FP8.

    Args:
        scaling: ``"delayed"`` (scales from the largest magnitudes of earlier steps) or ``"dynamic"`` (every tensor by
            its own present one, which reads it twice).
        fp8_format: ``"hybrid"`` (E4M3 forward, E5M2 for gradients) or ``"e4m3"`` for both.
        amax_history_len: optimizer steps that a scale remembers, >= 1.
        amax_compute_algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
        margin: scales are divided by 2 ** margin: room for values larger than any seen. An integer >= 0.
        reduce_amax: whether ranks agree on the scales of inputs and gradients (one MAX all-reduce per optimizer step).
            False: each rank has its own; weights always share theirs.
        include: globs over names of modules to convert; default all that can be.
        exclude: globs over names of modules to leave out; default the output head by its usual names (``HEADS``).
        calibration_steps: first optimizer steps in which delayed scaling uses present magnitudes, >= 1.
        fp8_all_gather: whether sharded weights are gathered as FP8 bytes (default) or in the parameters' dtype.
        backend: ``"native"``, or another library's FP8 layers by name, with ``fp8_all_gather=False``: ``"torchao"``
            (with ``scaling="dynamic"``) or ``"transformer_engine"`` (CUDA only).

    Raises:
        ValueError: a value that is not allowed; the message names it and the allowed ones.
    """

    scaling: Scaling = "delayed"
    fp8_format: Fp8Format = "hybrid"
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    margin: int = 0
    reduce_amax: bool = True
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = HEADS
    calibration_steps: int = 1
    fp8_all_gather: bool = True
    backend: Backend = "native"

    def __post_init__(self) -> None:
        # Words.
        for field, kind in (
            ("scaling", Scaling),
            ("fp8_format", Fp8Format),
            ("amax_compute_algo", AmaxAlgorithm),
            ("backend", Backend),
        ):
            value = getattr(self, field)
            word = value.strip().lower() if isinstance(value, str) else value
            if word not in get_args(kind):
                raise _refusal(field, value, ", ".join(map(repr, get_args(kind))))
            object.__setattr__(self, field, word)
        # Whole numbers.
        for field, least in (("amax_history_len", 1), ("margin", 0), ("calibration_steps", 1)):
            number = getattr(self, field)
            if isinstance(number, str) and number.strip().isdecimal():
                number = int(number)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise _refusal(field, getattr(self, field), f"an integer of at least {least}")
            object.__setattr__(self, field, number)
        # Flags.
        for field in ("reduce_amax", "fp8_all_gather"):
            flag = {"true": True, "false": False}.get(str(getattr(self, field)).lower())
            if flag is None:
                raise _refusal(field, getattr(self, field), "true, false")
            object.__setattr__(self, field, flag)
        # Globs.
        for field in ("include", "exclude"):
            globs = getattr(self, field)
            globs = (globs,) if isinstance(globs, str) else tuple(globs or ())
            if not all(isinstance(each, str) and each for each in globs):
                raise _refusal(field, getattr(self, field), "a list of globs over module names")
            object.__setattr__(self, field, globs)
        # Limits of the backend.
        for field, only, why in _LIMITS[self.backend, self.scaling]:
            if getattr(self, field) != only:
                raise ValueError(
                    f"fp8: backend={self.backend!r} with {field}={getattr(self, field)!r}: {why}; write "
                    f"{field}={only!r}, or backend='native'"
                )

    def __str__(self) -> str:
        """Show the fields that differ from the defaults, for tables."""
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Fp8Recipe({', '.join(changed)})"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in types that YAML and JSON have, for :meth:`read`."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def read(cls, value: Any) -> Fp8Recipe | None:
        """Read the knob ``fp8``.

        Allowed are None or False (off), True, a scaling or format by name (``"dynamic"``, ``"hybrid"``), a mapping of
        fields (also as JSON text, as in ``SMP_FP8``), or a recipe.

        Raises:
            ValueError: none of these, an unknown field (with the nearest one), or a bad value of one.
        """
        if isinstance(value, str):
            value = _from_text(value)
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            known = [field.name for field in dataclasses.fields(cls)]
            for name in value:
                if name not in known:
                    near = difflib.get_close_matches(str(name), known, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                    raise ValueError(f"fp8: unknown field {name!r}; {hint}")
            return cls(**value)
        raise ValueError(
            f"fp8={value!r} is not allowed; allowed: none, true, 'delayed', 'dynamic', 'hybrid', 'e4m3', an Fp8Recipe "
            "or a mapping of its fields; write for example fp8={'amax_history_len': 1024}"
        )


# Per backend and scaling: (field, the only value there is, why).
_SUBCLASSES = "its FP8 all-gather makes parameters tensor subclasses, which state dicts show"
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
    ("transformer_engine", "dynamic"): (*_TRANSFORMER_ENGINE, ("margin", 0, "its current scaling has no margin")),
}


def _from_text(text: str) -> Any:
    import json

    word = text.strip().lower()
    words: dict[str, Any] = {"none": None, "null": None, "false": None, "off": None, "true": True, "on": True}
    if word in words:
        return words[word]
    if word in get_args(Scaling):
        return {"scaling": word}
    if word in get_args(Fp8Format):
        return {"fp8_format": word}
    if text.strip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"fp8={text!r} is no JSON ({error}); write for example '{{\"margin\": 1}}'") from None
    return text


def _refusal(field: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"fp8: {field}={value!r} is not allowed; allowed: {allowed}")
