"""The knobs as arguments of the strategy: by name, as one object or mapping, and in its
signature, for LightningCLI."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

from smp_core.config import DEFAULTS, SmpConfig


def read_config(
    config: SmpConfig | Mapping[str, Any] | None,
    knobs: dict[str, Any],
    arguments: Iterable[str],
) -> SmpConfig:
    """Read the strategy's arguments into a configuration; knobs that are not among them
    come from the environment.

    Args:
        arguments: names of its other arguments, which a misspelt knob may stand for.

    Raises:
        ValueError: an unknown knob, something else than a config, or one and also
            knobs.
    """
    # All names at once, so that a misspelt one is named whichever way it was given.
    given = config if isinstance(config, Mapping) else {}
    SmpConfig.require_known({**given, **knobs}, arguments=list(arguments))
    if isinstance(config, Mapping):
        config = SmpConfig.from_dict(config)
    # LightningCLI gives every argument, most of them at their defaults.
    changed = {
        knob: value for knob, value in knobs.items() if value != getattr(DEFAULTS, knob)
    }
    # All knobs are given by LightningCLI alone: those at their defaults are left to the
    # environment then.
    if config is None:
        return SmpConfig.from_code(
            changed if len(knobs) == len(SmpConfig.knobs()) else knobs
        )
    if not isinstance(config, SmpConfig):
        raise ValueError(
            f"SmpShardedStrategy(config={config!r}): allowed: an SmpConfig or a mapping from knobs to values; write "
            "config=SmpConfig.from_yaml(path) for a file"
        )
    # Two sources of one knob: which should win is not ours to guess.
    if changed:
        raise ValueError(
            f"SmpShardedStrategy got config= and also {', '.join(changed)}; write dataclasses.replace(config, "
            f"{', '.join(f'{k}={v!r}' for k, v in changed.items())}) or give keywords only"
        )
    config.name_unused_variables()
    return config


def list_knobs(init: Callable[..., None]) -> list[str]:
    """Put every knob, with its types and default, into the signature in the place of
    ``**knobs``. Text is a type of each, as command lines have it.

    Returns:
        the names of the other arguments.
    """
    signature, types = inspect.signature(init), get_type_hints(SmpConfig)
    keyword = inspect.Parameter.KEYWORD_ONLY
    # The signature is what LightningCLI and help() read; the function itself takes
    # `**knobs`.
    knobs = [
        inspect.Parameter(
            knob,
            keyword,
            default=getattr(DEFAULTS, knob),
            annotation=types[knob] | str,
        )
        for knob in SmpConfig.knobs()
    ]
    others = [
        each
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    init.__signature__ = signature.replace(parameters=[*others, *knobs])  # type: ignore[attr-defined]
    return [each.name for each in others if each.name != "self"]
