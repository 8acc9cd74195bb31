"""Models that are only planned for: built without values from a short name, a
configuration file or a function.

    llama-3.1-8b           a name of :mod:`smp_core.planner.known_models`, also as Llama-3.1-8B-Instruct with its owner
    owner/name             the configuration that the hub's cache has
    config.json, folder    a Transformers configuration
    package.module:name    a function that returns a model, or (model, batch), where batch(samples, tokens)
                           is what a step gets
    any of these+lora:16   with adapters of rank 16 on all linear layers but the head, which alone are trained
    a module               one that is to be trained, copied without its values

A Transformers model is called with token ids and labels. Another model, a
LightningModule too, needs the batch.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smp_core.config import did_you_mean
from smp_core.outside import how_to_install, read_json
from smp_core.plan import Entry, call_with, example_of
from smp_core.planner.known_models import KNOWN_MODELS, known_model
from smp_core.planner.trace_meter import tensors_in


@dataclass(frozen=True, eq=False)
class Source:
    """A model and its step.

    Attributes:
        batch: (samples, tokens of each) -> such a batch.
        loss_of: batch -> its loss.
        entry: what a step calls (:func:`smp_core.plan.units.plan_units`).
        splits: layers and sequences can be split without being told how: the model is
            Transformers'.
        unpadded: rows that the vocabulary had before it was padded; 0: it was not.
        quantized: how a configuration quantizes its weights, which are not here.
    """

    model: nn.Module
    batch: Callable[[int, int], Any]
    loss_of: Callable[[Any], torch.Tensor]
    entry: Entry = "forward"
    splits: bool = False
    unpadded: int = 0
    quantized: str = ""

    def loss(self, samples: int, tokens: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.loss_of(self.batch(samples, tokens))


_MOST_LAYERS = 10_000
_TENSOR_RANKS = 8
PADDED_TO = 64
"""What a vocabulary is padded to a multiple of, as is usual, where eight tensor ranks
do not divide it."""

ADAPTERS = "+lora:"
"""Behind a model's name, and before the rank of its adapters."""


def build(words: str, sequence: int, fields: Mapping[str, Any] | None = None) -> Source:
    """Build the model that ``words`` mean, on the current default device and in the
    current default dtype.

    Args:
        sequence: tokens of a sample; a configuration by name gets as many positions.
        fields: a Transformers configuration instead of words for it.

    Raises:
        ValueError: there is no such model, or it cannot be built; says what to write
            instead.
    """
    # Adapters may stand behind any of the other forms.
    base, adapters, rank = words.partition(ADAPTERS)
    if adapters:
        return _with_adapters(build(base, sequence, fields), rank)
    if fields is not None:
        return _of_fields(dict(fields), sequence)
    # Where it may be: a folder, a file, the cache of the hub.
    path = Path(words)
    if path.is_dir():
        path = path / "config.json"
    elif _ON_HUB.fullmatch(words) and not path.exists():
        path = _cached_config(words) or path
    known = None if path.is_file() else known_model(words)
    if known is not None:
        return _of_fields(dict(known), sequence)
    if path.is_file():
        read = read_json(path)
        if not isinstance(read, dict) or "model_type" not in read:
            raise ValueError(
                f"{path} is no configuration of a Transformers model: it has no `model_type`"
            )
        return _of_fields(read, sequence)
    # Files were looked for before: a path may have a colon, too.
    module, colon, name = words.partition(":")
    if colon:
        return _of_function(module, name, words)
    if Path(words).is_dir():
        raise ValueError(
            f"the folder {words} has no config.json; write the folder that a Transformers model was saved in"
        )
    # It is nowhere: say what could have been meant.
    download = ""
    if _ON_HUB.fullmatch(words):
        download = (
            f" Its configuration alone is enough: `hf download {words} config.json` puts it into the hub's cache "
            "(after `hf auth login`, where the owner grants access), where this command looks for it."
        )
    nearest = did_you_mean(words.rpartition("/")[2].lower(), KNOWN_MODELS)
    raise ValueError(
        f"model {words!r} is no file and no known name{nearest or '.'}{download} Known: {', '.join(KNOWN_MODELS)}. Or "
        "write the config.json of a Transformers model, or package.module:function"
    )


_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def _cached_config(words: str) -> Path | None:
    """Return the config.json of a name on the hub where its cache has it. Nothing is
    downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    # It may also return an object that stands for "known not to be there".
    found = try_to_load_from_cache(words, "config.json")
    return Path(found) if isinstance(found, str) else None


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank beside it, as LoRA has it
    (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def _with_adapters(source: Source, rank: str) -> Source:
    """Return a model of which adapters on its linear layers are trained, and nothing
    else. PEFT's own modules are not made of tensors without values."""
    if not rank.isdigit() or int(rank) < 1:
        raise ValueError(
            f"{ADAPTERS}{rank} names no adapters; write a rank of at least 1, as {ADAPTERS}16"
        )
    # The head has no adapter, as LoRA's usual settings leave it out.
    source.model.requires_grad_(False)
    head: Any = getattr(source.model, "get_output_embeddings", lambda: None)()
    linear = [
        name
        for name, each in source.model.named_modules()
        if type(each) is nn.Linear and each is not head
    ]
    if not linear:
        raise ValueError(
            f"{ADAPTERS}{rank}: {type(source.model).__name__} has no nn.Linear that could get adapters"
        )
    for name in linear:
        parent, _, own = name.rpartition(".")
        # The name of a layer stays, with the frozen layer inside as PEFT names it.
        setattr(
            source.model.get_submodule(parent),
            own,
            _Adapted(source.model.get_submodule(name), int(rank)),  # type: ignore[arg-type]  # linear
        )
    return replace(source, splits=False)


def _of_fields(fields: dict[str, Any], sequence: int) -> Source:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError(
            f"the model is a Transformers configuration, and that is not installed; {how_to_install('transformers')}"
        ) from None
    # A file from elsewhere may ask for any number of layers, each of which is built as
    # modules.
    for name, value in fields.items():
        if "layer" in name and isinstance(value, (int, float)) and value > _MOST_LAYERS:
            raise ValueError(
                f"{name}={value!r} in the configuration: at most {_MOST_LAYERS:,} layers are planned for"
            )
    # Whatever Transformers makes of the fields, an error in them is the user's to mend,
    # and is told with their words.
    kind, code = fields.pop("model_type"), fields.get("auto_map") or {}
    try:
        quantized = fields.pop("quantization_config", None) or {}
        method = str(quantized.get("quant_method", "unnamed")) if quantized else ""
        config = AutoConfig.for_model(kind, **fields)
        config.use_cache = False
        # The sequence to plan for may be longer than the model's own limit.
        for name in ("n_positions", "max_position_embeddings"):
            if getattr(config, name, sequence) < sequence:
                setattr(config, name, sequence)
        # A decoder alone says that it has none.
        words, has_encoder = config.vocab_size, config.is_encoder_decoder
        # Tensor ranks cannot split a vocabulary that they do not divide.
        if words % _TENSOR_RANKS:
            config.vocab_size = -(-words // PADDED_TO) * PADDED_TO
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=_attention(), trust_remote_code=False
        )
    except Exception as error:
        # What a field lacks stands in a second line; a list of all models helps nobody.
        said = " ".join(str(error).split("\n")[:2]).partition(" Should contain one")[0]
        said = " ".join(said.split()).rstrip(".")
        if code:
            said += f" (its author's code, auto_map, is not run: {', '.join(code)})"
        raise ValueError(
            f"the configuration ({kind}) makes no causal language model: {said}. Write package.module:function, a "
            "function that returns the model and its batch"
        ) from error
    _require_class(model, has_encoder)
    unpadded = words if words < config.vocab_size else 0
    return replace(_of_model(model), unpadded=unpadded, quantized=method)


def _require_class(model: nn.Module, has_encoder: bool) -> None:
    """Refuse a model of another class than its configuration names: a part of it would
    be planned in its place."""
    config: Any = model.config
    made, named = type(model).__name__, (config.architectures or [None])[0]
    if named is None and has_encoder:
        named = "a model with is_encoder_decoder"
    if named not in (None, made):
        raise ValueError(
            f"the configuration is of {named}, and {made} is what would be planned: configurations are planned as "
            f"causal language models. Write package.module:function, a function that returns {named} and its batch; "
            f"or, if {made} is what is trained, architectures: [{made}]"
        )


def _attention() -> str:
    """Register scaled_dot_product_attention without masks, and return its name: whether
    a batch is padded or packed is a question of values, which are not there."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("smp_planned", sdpa_attention_forward)
    AttentionMaskInterface.register("smp_planned", lambda *args, **kwargs: None)
    return "smp_planned"


def _of_model(model: nn.Module) -> Source:
    def batch(samples: int, tokens: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(samples, tokens, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    config: Any = model.config
    has_plan = bool(
        getattr(config, "base_model_tp_plan", None)
    ) or config.model_type in ("gpt2", "opt", "bert")
    return Source(model, batch, lambda batch: _loss_of(model(**batch)), splits=has_plan)


def copied(model: nn.Module, dtype: torch.dtype | None) -> Source:
    """Copy a model that is there without its values, under a fake tensor mode. Of a
    module around a Transformers model with all parameters, that model is copied;
    another one is called with its example, of other sizes.

    Args:
        dtype: what is computed in; None: in each parameter's own.

    Raises:
        ValueError: nothing is known to call it with; says what to write.
    """
    inner = _transformers_model(model)
    root = inner or model
    # deepcopy takes what the memo has in place of a copy: empty tensors in place of
    # values.
    memo: dict[int, Any] = {}
    for tensor in [*root.parameters(), *root.buffers()]:
        trains = isinstance(tensor, nn.Parameter)
        own = (
            dtype
            if dtype is not None and trains and tensor.is_floating_point()
            else tensor.dtype
        )
        empty = torch.empty(tensor.shape, dtype=own, device="cpu")
        memo[id(tensor)] = (
            nn.Parameter(empty, tensor.requires_grad) if trains else empty
        )
    # Other tensors, an example for one, stay what they are.
    for module in root.modules():
        for tensor in tensors_in(list(vars(module).values())):
            memo.setdefault(id(tensor), tensor)
    # Tied parameters are one tensor in the memo, and stay tied.
    copy: Any = deepcopy(root, memo)
    # A cache of keys is for inference; masks would be a question of values.
    if inner is not None:
        copy.config.use_cache = False
        copy.set_attn_implementation(_attention())
        return _of_model(copy)
    # All else is called as its example shows.
    args, kwargs = example_of(model, model, "")

    def batch(samples: int, tokens: int) -> tuple[Any, Any]:
        return _resized(args, samples, tokens), _resized(kwargs, samples, tokens)

    def loss_of(batch: tuple[Any, Any]) -> torch.Tensor:
        positions, keywords = batch
        try:
            return _loss_of(copy(*positions, **keywords))
        except NotImplementedError:  # a LightningModule whose steps call its parts
            return _loss_of(
                copy.training_step(
                    keywords or (positions if len(positions) > 1 else positions[0]), 0
                )
            )

    return Source(copy, batch, loss_of)


def _transformers_model(model: nn.Module) -> Any:
    """Return the causal language model of Transformers that has all parameters of a
    module, if there is one."""
    # A wrapper of a Transformers model trains nothing else: the model is traced as
    # Transformers calls it, with labels.
    total = set(model.parameters())
    module: Any
    for module in model.modules():
        if hasattr(module, "get_output_embeddings") and hasattr(
            module, "loss_function"
        ):
            has_head = module.get_output_embeddings() is not None
            if has_head and total == set(module.parameters()):
                return module
    return None


def _resized(values: Any, samples: int, tokens: int) -> Any:
    """Return zeros of other sizes in the place of tensors [samples, tokens, ...]."""
    if isinstance(values, Mapping):
        return {
            name: _resized(value, samples, tokens) for name, value in values.items()
        }
    if isinstance(values, tuple):
        return tuple(_resized(value, samples, tokens) for value in values)
    if isinstance(values, torch.Tensor) and values.ndim > 1:
        return torch.zeros(samples, tokens, *values.shape[2:], dtype=values.dtype)
    return values


def _of_function(module: str, name: str, words: str) -> Source:
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"model {words!r}: {error}; write package.module:function as Python imports it"
        ) from None
    # User code, whose own errors go through as they are.
    made = function()
    model, batch = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model {words!r} returned {type(model).__name__}; it has to return an nn.Module"
        )
    if batch is None:
        if hasattr(model, "config") and hasattr(model, "get_input_embeddings"):
            return _of_model(model)
        raise ValueError(
            f"model {words!r}: {type(model).__name__} is no Transformers model, so that its batch is not known; return "
            "(model, batch), where batch(samples, tokens) is what a step gets"
        )
    # A LightningModule returns the loss itself, and its step is what a run calls.
    if hasattr(model, "training_step"):
        step: Any = model.training_step
        return Source(model, batch, lambda batch: _loss_of(step(batch, 0)), "steps")
    return Source(model, batch, lambda batch: _loss_of(call_with(model, batch)))


def _loss_of(output: Any) -> torch.Tensor:
    """Return the loss of an output: its ``loss``, or the mean of a tensor."""
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    output = getattr(output, "loss", output)
    if not isinstance(output, torch.Tensor):
        raise ValueError(
            f"a step returned {type(output).__name__}; it has to return a tensor, or what has a loss"
        )
    return output if output.ndim == 0 else output.float().mean()
