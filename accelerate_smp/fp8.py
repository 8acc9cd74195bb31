"""The ways to ask Accelerate for FP8, translated to the knob ``fp8``.

Accelerate computes in FP8 by itself only with another library's layers, which
``mixed_precision="fp8"`` means there. Here FP8 is a property of the linear layers
(``smp_config: {fp8: ...}``) under ``mixed_precision: bf16``. What its own settings (the
``fp8_config:`` section, ``TERecipeKwargs``, ``AORecipeKwargs``) say about scaling is
understood; what has no counterpart is refused or said. Without any of them
``mixed_precision="fp8"`` is an error.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)

from accelerate_smp.config import asked_precision
from smp_core.config import Fp8Recipe, SmpConfig, nearest_name

logger = logging.getLogger("smp")

_PREFIX = "ACCELERATE_FP8_"
_SAME = ("margin", "amax_history_len", "amax_compute_algo")
_NO_EFFECT = {
    "use_autocast_during_eval": "evaluation runs in FP8 with the scales of training",
    "pad_inner_dim": "layers whose sizes 16 does not divide stay in bfloat16 and are listed",
}
_ONLY: dict[str, tuple[Any, str]] = {
    "interval": (1, "scales are made anew after every optimizer step"),
    "override_linear_precision": (
        (False, False, False),
        "all three products run in FP8",
    ),
    "use_mxfp8_block_scaling": (False, "a tensor has one scale"),
}
_KEYS = (
    *_SAME,
    *_NO_EFFECT,
    *_ONLY,
    "backend",
    "fp8_format",
    "enable_fsdp_float8_all_gather",
)


def recipe_of(settings: Mapping[str, Any], where: str = "fp8_config") -> Fp8Recipe:
    """Return the recipe that Accelerate's settings ask for; None values are defaults.

    Raises:
        ValueError: a setting that is unknown or has no counterpart.
    """
    fields: dict[str, Any] = {}
    for key, value in settings.items():
        # Accelerate's own key is called fp8_format; others may carry the section's name
        # in front.
        name = str(key).removeprefix("fp8_") if str(key) != "fp8_format" else str(key)
        if name not in _KEYS:
            near = nearest_name(name, _KEYS)
            raise ValueError(
                f"{where}: unknown key {key!r}; "
                + (f"did you mean {near!r}?" if near else "leave it out")
            )
        # What a recipe has too, what it says in other words, and what it does not have.
        if value is None:
            continue
        if name in _SAME:
            fields[name] = value
        elif name == "fp8_format":
            if str(value).upper() not in ("HYBRID", "E4M3"):
                raise ValueError(
                    f"{where}: fp8_format={value!r} is not for training; allowed: HYBRID, E4M3"
                )
            fields["fp8_format"] = str(value).lower()
        elif name == "enable_fsdp_float8_all_gather":
            fields["fp8_all_gather"] = value
        elif name == "backend":
            fields |= _from_backend(str(value).upper(), where)
        elif name in _ONLY:
            only, why = _ONLY[name]
            if _plain(value) not in (only, str(only)):
                raise ValueError(
                    f"{where}: {key}={value!r} has no counterpart: {why}; leave it out"
                )
        elif str(value).lower() not in ("false", "0"):
            logger.info("%s: %s has no effect: %s", where, key, _NO_EFFECT[name])
    return Fp8Recipe(**fields)


def _from_backend(backend: str, where: str) -> dict[str, Any]:
    if backend == "MSAMP":
        raise ValueError(
            f"{where}: backend=MSAMP is not maintained any more; leave backend out"
        )
    if backend == "TE":
        logger.info(
            "%s: backend TE: the same delayed scaling, by torch-smp's own layers", where
        )
        return {}
    if backend == "AO":
        logger.info("%s: backend AO: dynamic scaling, by torch-smp's own layers", where)
        return {"scaling": "dynamic"}
    if backend in ("AUTO", "NO"):
        return {}
    raise ValueError(
        f"{where}: backend={backend!r} is not allowed; allowed: TE, AO, or leave it out"
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def settle_fp8(arguments: dict[str, Any], config: SmpConfig) -> SmpConfig:
    """Take FP8 out of the arguments for ``Accelerator`` and put it into the
    configuration.

    Raises:
        ValueError: ``mixed_precision="fp8"`` and nothing that says how, or two places
            that say different things.
    """
    # Who asks for it: handlers, the environment, the configuration.
    wants_fp8 = asked_precision(arguments) == "fp8"
    given = _from_handlers(arguments)
    if given is None and wants_fp8:
        given = _from_environment()
    if given is not None and config.fp8 not in (None, given):
        raise ValueError(
            f"fp8={config.fp8} was asked of torch-smp but Accelerate's own settings say {given}; remove one of the two "
            "(in the YAML: `fp8_config` or `fp8` in `smp_config`)"
        )
    if config.fp8 is None and given is not None:
        config = dataclasses.replace(config, fp8=given)
    # Accelerate itself computes in bfloat16.
    if wants_fp8:
        if config.fp8 is None:
            raise ValueError(
                "mixed_precision='fp8' needs the FP8 plugin of torch-smp to say how; write smp_config: {fp8: hybrid} "
                "and mixed_precision: bf16"
            )
        arguments["mixed_precision"] = "bf16"
        logger.info(
            "mixed_precision='fp8': linear layers in FP8, everything else as with 'bf16'"
        )
    return config


def _from_handlers(arguments: dict[str, Any]) -> Fp8Recipe | None:
    handlers = list(arguments.get("kwargs_handlers") or ())
    kinds = (TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs)
    ours = [handler for handler in handlers if isinstance(handler, kinds)]
    if not ours:
        return None
    arguments["kwargs_handlers"] = [
        handler for handler in handlers if handler not in ours
    ]
    handler, where = ours[0], type(ours[0]).__name__
    # torchao's filter is a function over modules, which globs cannot say.
    if isinstance(handler, AORecipeKwargs):
        if handler.module_filter_func is not None:
            raise ValueError(
                "AORecipeKwargs: module_filter_func has no counterpart; write include and exclude globs"
            )
        gather = getattr(handler.config, "enable_fsdp_float8_all_gather", True)
        return recipe_of(
            {"backend": "AO", "enable_fsdp_float8_all_gather": gather}, where
        )
    if isinstance(handler, MSAMPRecipeKwargs) and not isinstance(
        handler, TERecipeKwargs
    ):
        return recipe_of({"backend": "MSAMP"}, where)
    return recipe_of({name: getattr(handler, name, None) for name in _KEYS}, where)


def _from_environment() -> Fp8Recipe | None:
    """Read the variables that `accelerate launch` exports of ``fp8_config:``."""
    settings = {
        name.removeprefix(_PREFIX).lower(): v
        for name, v in os.environ.items()
        if name.startswith(_PREFIX)
    }
    # Three variables of the launcher, for one setting.
    overrides = {
        name: settings.pop(name)
        for name in tuple(settings)
        if name.startswith("override_")
    }
    if any(value.lower() in ("true", "1") for value in overrides.values()):
        settings["override_linear_precision"] = str(overrides)
    settings.pop("opt_level", None)  # of MS-AMP; always exported
    if "format" in settings:
        settings["fp8_format"] = settings.pop("format")
    return recipe_of(settings, "ACCELERATE_FP8_*") if settings else None
