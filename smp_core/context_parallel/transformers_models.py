"""The Transformers models under context parallelism.

Transformers' attention interface gets a function named "smp_cp". A hook on every model
adds inputs to ``forward`` that the model would otherwise derive from the length of its
input: positions, shifted labels and the number of targets. Outside a split batch
(``generate``, an evaluation of unsplit sequences) "smp_cp" is Transformers' own
``sdpa``.

Some models derive more from the length of their input, and get it from the unsplit
sequence here:

    RoPE "dynamic", "longrope"     the largest position, for its frequencies: appended to the rotary module's positions
    chunked attention (Llama 4)    which chunk a token is in: a plan with the documents cut into chunks
    query temperature (Llama 4)    the place of a token in its row
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_core.context_parallel.attention import attention
from smp_core.context_parallel.replaced_attention import (
    SplitBatch,
    active_split,
    common_dtype,
    positions,
    refuse_dropout,
)
from smp_core.torch_facts import Args, Kwargs, transformers_models

NAME = "smp_cp"
_NO_FORM = {
    "sinks": "attention sinks that differ by token",
    "softcap": "capped attention scores",
    "position_bias": "a position bias added to the scores",
    "block_indices": "sparse attention",
    "indices": "sparse attention",
}
_CHUNKED = "chunked_attention"
_LAYER_TYPES = (
    "full_attention",
    "sliding_attention",
    _CHUNKED,
    "attention",
    "sparse",
    "dense",
    "moe",
)
_UNSHIFTED = (
    "ForMaskedLM",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForSequenceClassification",
)


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the loss of the Transformers model in ``model`` shifts labels:
    True unless it is known not to."""
    found = transformers_models(model)
    return not found or getattr(found[0], "loss_type", None) not in _UNSHIFTED


def adapt_transformers_models(model: nn.Module) -> bool:
    """Let every Transformers model in ``model`` attend over split sequences; False if
    there is none.

    Raises:
        ValueError: a model that would be wrong: attention outside the interface, other
            layers than attention that look along the sequence, positions that depend on
            a rank's length.
    """
    found = transformers_models(model)
    for each in found:
        check_model(each)
    if not found:
        return False
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    # Registered by name: Transformers looks the functions up in each call.
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    for each in found:
        each.set_attn_implementation(NAME)
        # set_attn_implementation only warns where it fails; _attn_implementation alone
        # has the one that took effect.
        if each.config._attn_implementation != NAME:
            raise ValueError(
                f"{type(each).__name__} does not use Transformers' attention interface; {_INSTEAD}"
            )
        each.register_forward_pre_hook(_complete_inputs, with_kwargs=True)
    # Modules that read the length of their input are told of the whole sequence.
    for module in dict.fromkeys(module for each in found for module in each.modules()):
        if _depends_on_length(module):
            module.register_forward_pre_hook(_append_last_position, with_kwargs=True)
            module.register_forward_hook(_drop_last_position)
        elif hasattr(module, "attn_temperature_tuning"):
            module.register_forward_pre_hook(_leave_temperature_to_attention)
    return True


_INSTEAD = "write context_parallel_degree=1 for it"


def _require_chunks_of_documents(name: str) -> None:
    """Refuse a Transformers whose chunks go across the borders of packed documents:
    attention here begins them again."""
    from transformers import masking_utils

    # This function came with Transformers 5.
    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        raise ValueError(
            f"{name} has layers of type {_CHUNKED!r}, whose chunks this Transformers counts across the documents of a "
            f"sequence; type: pip install -U 'transformers>=5', or {_INSTEAD}"
        )


def check_model(model: Any) -> None:
    """Refuse a Transformers model that context parallelism would make wrong.

    Raises:
        ValueError: names the model, the feature in question, and the fix.
    """
    name, config = type(model).__name__, model.config
    # Multimodal models keep the options of their text part apart.
    text = config.get_text_config()
    if getattr(text, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder: cross-attention has no context parallel form; {_INSTEAD}"
        )
    # Positions that depend on the length of the sequence.
    # One set of options for all layers, or one for each type of layer.
    rope = (
        getattr(text, "rope_parameters", None)
        or getattr(text, "rope_scaling", None)
        or {}
    )
    is_by_layer_type = any(isinstance(value, dict) for value in rope.values())
    for each in rope.values() if is_by_layer_type else [rope]:
        kind = str((each or {}).get("rope_type", "default"))
        if _is_dynamic(kind) and not any(
            _depends_on_length(module) for module in model.modules()
        ):
            raise ValueError(
                f"{name}: rope_type={kind!r} depends on the length of the sequence, each rank has only its part of it, "
                "and no module with that rope_type takes position_ids, which could tell; allowed: 'default', "
                f"'linear', 'llama3', 'yarn'. {_INSTEAD.capitalize()}, or set another rope_type"
            )
    # Kinds of attention.
    if _CHUNKED in (getattr(text, "layer_types", None) or ()):
        if not getattr(text, "attention_chunk_size", None):
            raise ValueError(
                f"{name} has layers of type {_CHUNKED!r} and no attention_chunk_size; set it in the config"
            )
        _require_chunks_of_documents(name)
    for layer_type in sorted(set(getattr(text, "layer_types", None) or ())):
        if layer_type not in _LAYER_TYPES:
            raise ValueError(
                f"{name} has layers of type {layer_type!r}, which look along the sequence in another way than "
                f"attention over all of it, a window or a chunk; {_INSTEAD}"
            )
    # Scores and weights of one softmax are never on one rank.
    if getattr(text, "attn_logit_softcapping", None):
        raise ValueError(
            f"{name}: attn_logit_softcapping={text.attn_logit_softcapping}: capped scores; {_INSTEAD}"
        )
    for option in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(text, option, 0.0):
            raise ValueError(
                f"{name}: {option}={getattr(text, option)}: dropping weights of one softmax on several ranks is not "
                f"supported; set config.{option} = 0.0 before the model is built"
            )
    # Without position_ids each rank would count its own part from 0.
    if "position_ids" not in _arguments_of(model):
        raise ValueError(
            f"{name} takes no position_ids, so its tokens would stand in the wrong places; {_INSTEAD}"
        )


def _arguments_of(module: Any) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(type(module).forward).parameters)


def _is_dynamic(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _depends_on_length(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding whose frequencies follow from the
    largest position in its input."""
    # Newer models have a rope_type for each type of layer.
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(
        isinstance(kind, str) and _is_dynamic(kind) for kind in kinds
    ) and "position_ids" in _arguments_of(module)


def _append_last_position(
    module: nn.Module, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs] | None:
    """Let a rotary embedding, called as (x, position_ids), see the largest position of
    the unsplit sequences.

    The state that the module keeps from call to call is then that of one process, too.
    """
    split = active_split()
    if split is None:
        return None
    # Called by keyword or by place.
    position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    last = (
        split.length - 1
        if split.last_position is None
        else split.last_position.to(position_ids.device)
    )
    # Clamped: the padding to a multiple of 2R counts from 0 and might count further
    # than a short sequence does.
    appended = torch.cat(
        [position_ids.clamp(max=last), torch.zeros_like(position_ids[..., :1]) + last],
        -1,
    )
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": appended}
    return (args[0], appended, *args[2:]), kwargs


def _drop_last_position(module: nn.Module, args: Args, output: Any) -> Any:
    """Drop the appended position from a rotary module's output: a tensor [..., L + 1,
    D] or several."""
    if active_split() is None:
        return None
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(tensor[..., :-1, :] for tensor in output)


def _leave_temperature_to_attention(module: Any, args: Args) -> None:
    """Turn off the model's own scaling of queries by their place in the row.

    Llama 4 takes the tokens of its input for the row, and a rank has only some of them;
    :func:`_temperature` scales instead.
    """
    module.attn_temperature_tuning = (
        module.config.attn_temperature_tuning and active_split() is None
    )


def _temperature(module: Any, split: SplitBatch, query: Tensor) -> Tensor:
    """Scale the queries [B, H, L, D] that :func:`_leave_temperature_to_attention` left
    unscaled."""
    if (
        # Layers with rotary positions, and models without the option, are not scaled.
        not hasattr(module, "attn_temperature_tuning")
        or not module.config.attn_temperature_tuning
        or module.use_rope
    ):
        return query
    # The formula of Llama 4, with places in the row instead of in this rank's part.
    places = split.plan.positions(split.rank).to(query.device).float()
    scales = (
        torch.log1p(torch.floor((places + 1.0) / module.floor_scale))
        * module.attn_scale
        + 1.0
    )
    return (query * scales[:, None]).to(query.dtype)


def _chunk_size(module: Any) -> int | None:
    """Return the chunk size of a layer of chunked attention; None for other layers."""
    # Layers of other models see whole documents.
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None) or ()
    if _CHUNKED not in layer_types:
        return None
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(
            f"{type(module).__name__} does not say which layer it is (layer_idx), some of which see chunks"
        )
    return config.attention_chunk_size if layer_types[layer] == _CHUNKED else None  # type: ignore[union-attr]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with Transformers' signature: queries, keys and values [B, H, L, D];
    returns [B, L, H, E]."""
    split = active_split()
    # The call's own word first, then the module's.
    causal = bool(
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    )
    sinks = options.pop("s_aux", None)
    # Outside of a split batch: as Transformers does it.
    if split is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if sinks is not None:
            key, value, attention_mask = _with_sinks_as_a_key(
                query, key, value, attention_mask, causal, sinks
            )
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout,
            scaling,
            is_causal=is_causal,
            **options,
        )
    # What has no form over several ranks.
    name = type(module).__name__
    for option, what in _NO_FORM.items():
        if options.get(option) is not None:
            raise ValueError(
                f"{name} asks for {what} ({option}), which context parallelism does not have; {_INSTEAD}"
            )
    if options.get("output_attentions"):
        raise ValueError(
            "output_attentions=True: no rank has the weights of whole sequences; write False"
        )
    if attention_mask is not None:
        raise ValueError(
            f"{name} brings a mask of its own, which context parallelism cannot split; {_INSTEAD}"
        )
    refuse_dropout(dropout)
    # Autocast casts for torch's attention, and so for this one; kernels take tokens
    # before heads.
    query = _temperature(module, split, query)
    q, k, v = (tensor.transpose(1, 2) for tensor in common_dtype(query, key, value))
    chunk = _chunk_size(module)
    plan = split.encoded if chunk is None else split.encoded_in_chunks(chunk)
    return attention(
        q, k, v, plan, causal=causal, window=sliding_window, scale=scaling, sinks=sinks
    ), None


def _with_sinks_as_a_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    sinks_H: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [B, K, M + 1, *] and an additive mask [B, H, L, M + 1].

    The sinks, which ``sdpa`` ignores, are the scores of one more key of zeros, whose
    value is zero.
    """
    length, keys = query.shape[2], key.shape[2]
    if mask is None:
        # As sdpa has it: aligned at the start (the cache beyond is empty), and one
        # token sees everything.
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device)
        mask = mask.tril() if causal and length > 1 else mask
    # Scores of sinks can only be added to an additive mask.
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(
            ~mask, float("-inf")
        )
    shape = (len(query), query.shape[1], length)
    of_sinks = sinks_H.to(query.dtype)[:, None, None].expand(*shape, 1)
    mask = torch.cat([mask.to(query.dtype).expand(*shape, keys), of_sinks], -1)
    return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), mask


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Make no mask under a split batch, whose plan has the documents; otherwise make
    the one for "sdpa"."""
    if active_split() is not None:
        return None
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs)


def _complete_inputs(
    model: Any, args: Args, kwargs: Kwargs
) -> tuple[Any, dict[str, Any]] | None:
    """Fill in inputs of ``forward`` that the caller left out; refuse labels that are
    not the split batch's."""
    split = active_split()
    if split is None:
        return None
    kwargs = dict(kwargs)
    # Positions of this rank's tokens.
    tokens = next(
        (
            kwargs[key]
            for key in ("input_ids", "inputs_embeds")
            if kwargs.get(key) is not None
        ),
        None,
    )
    # Tokens may come by place.
    if tokens is None and args and isinstance(args[0], Tensor):
        tokens = args[0]
    if kwargs.get("position_ids") is None and tokens is not None:
        kwargs["position_ids"] = positions(tokens)
    # Labels: their targets, some of which are on other ranks, and how many there are.
    if kwargs.get("labels") is not None and split.divided_by_model:
        # Recognised by the tensor itself: other labels have other targets.
        if kwargs.get("shift_labels") is None and kwargs["labels"] is split.labels:
            kwargs["shift_labels"] = split.shift_labels
        if kwargs.get("num_items_in_batch") is None:
            if kwargs.get("shift_labels") is not split.shift_labels:
                raise ValueError(
                    "labels that are not the split batch's own: their shifted targets are on other ranks, and how many "
                    "there are is not known; pass **batch, or labels and shift_labels as they are in it"
                )
            # The loss divides its sum by this, so that the mean over ranks is that over
            # all targets.
            if split.tokens_per_rank is None and split.count_targets is not None:
                split.count_targets()
            assert split.tokens_per_rank is not None
            kwargs["num_items_in_batch"] = split.tokens_per_rank.float()
    return args, kwargs
