"""Examples of a model's input, for a run before training.

A model says what its forward takes by ``example_input_array``. A Transformers model
does so by itself: its class names its main input (``main_input_name``), its forward's
signature the others, and its configuration their sizes. Where these leave several forms
open, the first one that the forward takes is the example.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

HOW = (
    "set example_input_array, on the LightningModule or on the model, to what its forward takes: a tensor, a tuple or "
    "a mapping"
)
_SAMPLES, _LENGTH = 2, 6
_SIDES = (32, 64, 224)  # of pictures, where the configuration says nothing

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and keywords of one call."""


def call_with(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a mapping gives keywords, a tuple or list arguments,
    anything else is one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def example_of(model: nn.Module, module: nn.Module, refusal: str) -> Example:
    """Return arguments for one call of ``module``: ``example_input_array`` of either,
    or ``dummy_inputs``.

    Raises:
        ValueError: there are none, or none that the forward takes; begins with
            ``refusal``.
    """
    # The user's word counts most.
    for holder in (model, module):
        example = getattr(holder, "example_input_array", None)
        if example is not None:
            return _arguments(example, module)
    example = getattr(module, "dummy_inputs", None)
    if example is None:
        raise ValueError(f"{refusal}it is run once to see what its blocks do; {HOW}")
    # Other libraries have `dummy_inputs` too; only Transformers' are completed.
    if getattr(module, "main_input_name", None) is None or not hasattr(
        module, "config"
    ):
        return _arguments(example, module)
    return _fitting(module, example, refusal)


def _arguments(example: Any, module: nn.Module) -> Example:
    device = next(module.parameters()).device
    if isinstance(example, Mapping):
        return (), {key: _on(value, device) for key, value in example.items()}
    several = example if isinstance(example, (tuple, list)) else (example,)
    return tuple(_on(value, device) for value in several), {}


def _on(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    # One that was made together with a model on the meta device.
    return torch.zeros_like(value, device=device) if value.is_meta else value.to(device)


# Transformers models


def _fitting(module: Any, known: Mapping[str, Any], refusal: str) -> Example:
    """Return the first of a Transformers model's examples that its forward takes."""
    # Several forms: each is tried, and the first that runs is taken.
    found = list(_candidates(module, known))
    if len(found) == 1:
        return _arguments(found[0], module)
    problem: Exception | None = None
    for each in found:
        example = _arguments(each, module)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                module(*example[0], **example[1])
        except Exception as error:
            problem = problem or error
        else:
            return example
    tried = f" ({type(problem).__name__}: {problem})" if problem is not None else ""
    raise ValueError(
        f"{refusal}it is run once to see what its blocks do, and no example of its {module.main_input_name} was found "
        f"that its forward takes{tried}; {HOW}"
    )


def _candidates(module: Any, known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield examples: with the main input, with what a decoder takes beside it, with
    every input that is known."""
    # PEFT's own forward takes anything, so the signature inside it counts.
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module
    # Inputs that are known by name, in all their forms.
    takes = list(inspect.signature(inner.forward).parameters)
    main = module.main_input_name
    made = {name: list(_MAKERS[name](module)) for name in takes if name in _MAKERS}
    # The model's own example may have more or fewer samples than our other inputs.
    if main in known:
        made[main] = [known[main], *made.get(main, ())]
    if main in known or set(known) != {"input_ids"}:  # what a class says of its own
        yield dict(known)
    # For each form of the main input: alone, with a decoder's, with all others.
    others = {name: forms[0] for name, forms in made.items() if name != main and forms}
    decoder = {
        name: form for name, form in others.items() if name == "decoder_input_ids"
    }
    for form in made.get(main, ()):
        for more in _different([{}, decoder, others]):
            if more or form is not known.get(main):
                yield {main: form, **more}


def _different(choices: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    seen: list[set[str]] = []
    for each in choices:
        if set(each) not in seen:
            seen.append(set(each))
            yield each


def _tokens(module: Any) -> Iterator[Tensor]:
    # Different words, so that blocks see different tokens.
    words = _number(module.config, "vocab_size", 8)
    yield torch.arange(_SAMPLES * _LENGTH).view(_SAMPLES, _LENGTH) % max(words, 1)


def _pictures(module: Any) -> Iterator[Tensor]:
    channels = _number(module.config, "num_channels", 3)
    size = _value(module.config, "image_size")
    frames = _value(module.config, "num_frames")
    # Sides that most pictures have, where the configuration says nothing.
    sides = [(side, side) for side in _SIDES] if size is None else [_pair(size)]
    for side in sides:
        if isinstance(frames, int):
            yield _wave(module, _SAMPLES, frames, channels, *side)
        yield _wave(module, _SAMPLES, channels, *side)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping):
        return size["height"], size["width"]
    return tuple(size)[-2:] if isinstance(size, (list, tuple)) else (size, size)


def _sound(module: Any) -> Iterator[Tensor]:
    """Yield waves [samples, length] or spectra [samples, frames, bins]."""
    config = module.config
    frames, bins = _value(config, "max_length"), _value(config, "num_mel_bins")
    if frames is not None and bins is not None:
        yield _wave(module, _SAMPLES, frames, bins)
    strides = _value(config, "conv_stride") or (320,)
    kernels = _value(config, "conv_kernel") or ()
    # Long enough that some frames are left behind all convolutions.
    length = (_LENGTH + 2) * math.prod(strides) + sum(kernels) * math.prod(strides[:-1])
    yield _wave(module, _SAMPLES, length)
    yield _wave(module, _SAMPLES, _number(config, "audio_channels", 1), length)


def _spectra(module: Any) -> Iterator[Tensor]:
    """Yield spectra [samples, bins, frames] of as many frames as there are places, or
    [samples, frames, bins]."""
    config = module.config
    places = _value(config, "max_source_positions")
    mels = _value(config, "num_mel_bins")
    if places is not None and mels is not None:
        yield _wave(module, _SAMPLES, mels, 2 * places)
    for name in (
        "feature_projection_input_dim",
        "input_feat_per_channel",
        "num_mel_bins",
        "hidden_size",
    ):
        width = _value(config, name)
        if width is not None:
            yield _wave(module, _SAMPLES, 4 * _LENGTH, width)


def _boxes(module: Any) -> Iterator[Tensor]:
    yield torch.zeros(_SAMPLES, _LENGTH, 4, dtype=torch.long)


_MAKERS: dict[str, Callable[[Any], Iterator[Tensor]]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _pictures,
    "pixel_values_videos": _pictures,
    "input_values": _sound,
    "input_features": _spectra,
    "bbox": _boxes,
}


def _wave(module: nn.Module, *shape: int) -> Tensor:
    """Numbers that differ, alike on every rank, in the dtype of the model."""
    dtype = next(
        (p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32
    )
    return (
        torch.arange(math.prod(shape), dtype=torch.float64)
        .mul(0.7)
        .sin()
        .view(shape)
        .to(dtype)
    )


def _value(config: Any, name: str) -> Any:
    """Return what a configuration, or one inside it, says under a name."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    found = [getattr(each, name, None) for each in (config, *inner)]
    return next((each for each in found if each is not None), None)


def _number(config: Any, name: str, otherwise: int) -> int:
    found = _value(config, name)
    return found if isinstance(found, int) else otherwise
