"""Roles: which layer is split how. Pure decisions about modules; nothing is changed
here.

    column          outputs are split (rows of a Linear's weight); its bias with them
    column:N        the same of N equal blocks in one weight (packed queries, keys and values; gate and up)
    column_gather   outputs are split in computation and gathered behind it
    row             inputs are split; outputs are added up, the bias once
    row_split       the same behind something that needs all features: inputs are split just before
    vocabulary      an embedding whose rows are split
    features        an embedding whose features are split: of position biases, one for each head
    experts         fused experts, each split by its inner features
    sum             whole on every rank, and sees other activations on each: gradients are added up
    whole           whole on every rank, and needs all tokens where they are split
    replicate       whole on every rank

They come from the user's globs, from our table, or from the plan that a Transformers
model carries (``tp_plan``).
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from smp_core.tensor_parallel.operators import RowsInUse
from smp_core.topology import divisors, listed
from smp_core.torch_facts import embeddings_of, transformers_models

logger = logging.getLogger("smp")

SPLIT = (
    "column",
    "column_gather",
    "row",
    "row_split",
    "vocabulary",
    "features",
    "experts",
)
ROLES = (*SPLIT, "sum", "whole", "replicate")

# Transformers' names of the same; a plan with another one is not understood.
_OF_TRANSFORMERS = {
    "colwise": "column",
    "colwise_gather_output": "column_gather",
    "colwise_rep": "column_gather",
    "packed_colwise": "column:2",
    "rowwise": "row",
    "rowwise_split_input": "row_split",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "sum",
    "moe_tp_experts": "experts",
}

_GPT2 = {
    "*.attn.c_attn": "column:3",
    "*.attn.c_proj": "row",
    "*.mlp.c_fc": "column",
    "*.mlp.c_proj": "row",
}
_BERT = {
    **dict.fromkeys(
        ("*.self.query", "*.self.key", "*.self.value", "*.intermediate.dense"), "column"
    ),
    "*.output.dense": "row",
}
_OPT = {
    **dict.fromkeys(("*.self_attn.[qkv]_proj", "*.fc1"), "column"),
    **dict.fromkeys(("*.self_attn.out_proj", "*.fc2"), "row"),
}
_FALCON = {
    **dict.fromkeys(
        ("*.self_attention.query_key_value", "*.mlp.dense_h_to_4h"), "column"
    ),
    **dict.fromkeys(("*.self_attention.dense", "*.mlp.dense_4h_to_h"), "row"),
}
_VIT = {
    **dict.fromkeys(("*.attention.[qkv]_proj", "*.mlp.fc1"), "column"),
    **dict.fromkeys(("*.attention.o_proj", "*.mlp.fc2"), "row"),
}
_T5 = {
    **dict.fromkeys(("*Attention.[qkv]", "*.DenseReluDense.wi*"), "column"),
    **dict.fromkeys(("*Attention.o", "*.DenseReluDense.wo"), "row"),
    "*.relative_attention_bias": "features",
}
# Model types of Transformers that carry no plan, or one that computes attention on
# every rank.
_OWN: dict[str, dict[str, str]] = {
    "gpt2": _GPT2,
    "opt": _OPT,
    "bert": _BERT,
    "roberta": _BERT,
    "falcon": _FALCON,
    "bloom": _FALCON,
    "vit": _VIT,
    "t5": _T5,
}
# Numbers that their forwards read and that count features or heads: glob over modules
# -> attributes.
_DIVIDED: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {"*.attn": ("split_size", "num_heads", "embed_dim")},
    "opt": {"*.self_attn": ("num_heads", "embed_dim")},
    "falcon": {"*.self_attention": ("num_heads", "num_kv_heads")},
    "bloom": {"*.self_attention": ("num_heads",)},
    "bert": {"*.self": ("num_attention_heads", "all_head_size")},
    "roberta": {"*.self": ("num_attention_heads", "all_head_size")},
    "t5": {"*Attention": ("n_heads", "inner_dim")},
}
# Column layers of attention that read other tokens than its queries do: all of them, on
# every rank.
_OF_OTHER_TOKENS = {"t5": "*.EncDecAttention.[kv]"}


# Arguments of modules that hold something for each head in their first dimension, [B x
# heads, ...].
_OF_HEADS: dict[str, dict[str, str]] = {"bloom": {"*.self_attention": "alibi"}}

_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
_NUMBERS_OF_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads")


class NoPlan(ValueError):
    """A model for which no plan is known."""


@dataclass(frozen=True)
class Split:
    """The roles of one module's tensors.

    Attributes:
        role: without the number of blocks.
        blocks: of equal size in the weight, for ``column``.
    """

    name: str
    module: nn.Module
    role: str
    blocks: int = 1

    @property
    def is_column(self) -> bool:
        return self.role in ("column", "column_gather")


def transformers_model(model: nn.Module) -> Any | None:
    """Return the outermost Transformers model in ``model``; None without one."""
    return next(iter(transformers_models(model)), None)


def splits_of(
    model: nn.Module,
    plan: str | Mapping[str, str],
    degree: int,
    whole: Container[str] = (),
) -> list[Split]:
    """Return what happens to which modules, in the model's order.

    Args:
        plan: "auto", or globs over module names -> roles.
        whole: names of parameters that "auto" replicates.

    Raises:
        ValueError: no plan for this model, an unknown role, a glob without a match, a
            layer that no role fits, PEFT's prefix tuning.
    """
    # PEFT's models say of which type their adapter is.
    if any(
        getattr(each, "peft_type", "") == "PREFIX_TUNING" for each in model.modules()
    ):
        raise ValueError(
            f"tensor_parallel_degree={degree}: PEFT's prefix tuning gives attention keys and values of all heads, of "
            f"which a rank has 1/{degree}; use prompt tuning or LoRA, or write tensor_parallel_degree=1"
        )
    if isinstance(plan, str):
        found = list(_of_known_model(model, degree, whole))
    else:
        found = list(_of_globs(model, plan))
    # A role that does not fit its layer is refused here, before anything is changed.
    for split in found:
        _require_fitting(split)
    if not any(split.role in SPLIT for split in found):
        raise ValueError(
            "tensor_parallel.plan splits no layer: every one it names stays whole"
        )
    return found


def _of_globs(model: nn.Module, plan: Mapping[str, str]) -> Iterator[Split]:
    # A glob without a match is most likely a typing error, and would leave layers whole
    # in silence.
    unmatched = dict.fromkeys(plan)
    for name, module in model.named_modules():
        for glob, role in plan.items():
            if name and fnmatch.fnmatchcase(name, glob):
                unmatched.pop(glob, None)
                yield Split(name, module, *_read(glob, role))
                break  # the first that matches decides
    if unmatched:
        linear = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        ]
        raise ValueError(
            f"tensor_parallel.plan: no module matches {', '.join(map(repr, unmatched))}; globs are matched against "
            f"full names, for example {', '.join(map(repr, linear[:3]))}"
        )


def _read(glob: str, role: str) -> tuple[str, int]:
    kind, _, blocks = role.partition(":")
    if kind not in ROLES or (
        blocks and (kind != "column" or not blocks.isdecimal() or int(blocks) < 1)
    ):
        raise ValueError(
            f"tensor_parallel.plan: {glob!r}: {role!r} is no role; allowed: {', '.join(map(repr, ROLES))}, and "
            "'column:N' for N equal blocks in one weight"
        )
    return kind, int(blocks or 1)


def _of_known_model(
    model: nn.Module, degree: int, whole: Container[str]
) -> Iterator[Split]:
    known = transformers_model(model)
    kind = type(model if known is None else known).__name__
    instead = (
        "write globs over module names, for example "
        'tensor_parallel={"plan": {"*.q_proj": "column", "*.o_proj": "row"}}'
    )
    # What no plan can be known for is refused first.
    if known is None:
        raise NoPlan(
            f"tensor_parallel.plan='auto': {kind} is no Transformers model; {instead}"
        )
    if (
        getattr(known.config, "is_encoder_decoder", False)
        and known.config.model_type not in _OWN
    ):
        raise NoPlan(
            f"tensor_parallel.plan='auto': {kind} is an encoder-decoder without a known plan; {instead}"
        )
    beyond = _beyond_plan(known.config, degree)
    if beyond is not None:
        raise NoPlan(
            f"tensor_parallel.plan='auto': {kind} with {beyond} is not built yet; {instead}"
        )
    # The globs of a plan, and the role of each layer in it.
    prefix = next(name for name, module in model.named_modules() if module is known)
    # Plans speak of names inside the Transformers model, which may stand inside of
    # another.
    prefix = f"{prefix}." if prefix else ""
    globs = _OWN.get(known.config.model_type) or _plan_of_transformers(
        known, kind, instead
    )
    # The vocabulary's layers are decided on at the end, together.
    words, head = embeddings_of(known)
    for name, module in model.named_modules():
        if module is head or module is words or not name.startswith(prefix):
            continue
        role = next(
            (
                role
                for glob, role in globs.items()
                if fnmatch.fnmatchcase(name[len(prefix) :], glob)
            ),
            None,
        )
        if role is not None:
            yield Split(name, module, *_read(name, role))
    yield from vocabulary_of(model, words, head, degree, whole)


def _beyond_plan(config: Any, degree: int) -> str | None:
    """Return what our plan of Falcon or Bloom does not split; None: it does, or it is
    another model. Their queries, keys and values lie side by side for each group of
    heads, so that groups can be split."""
    unknown: tuple[str, ...]
    # Options with which these forwards compute something that our table does not
    # describe.
    if config.model_type == "bloom":
        groups = config.n_head
        unknown = ("apply_residual_connection_post_layernorm", "slow_but_exact")
    elif config.model_type == "falcon":
        groups = (
            config.num_kv_heads
            if config.new_decoder_architecture
            else config.num_attention_heads
        )
        unknown = (
            ("alibi",) if config.new_decoder_architecture else ("alibi", "multi_query")
        )
    else:
        return None
    found = [f"config.{name}=True" for name in unknown if getattr(config, name)]
    found += [f"{groups} groups of heads on {degree} ranks"] if groups % degree else []
    return ", ".join(found) or None


def vocabulary_of(
    model: nn.Module, words: Any, head: Any, degree: int, whole: Container[str]
) -> Iterator[Split]:
    """Yield the splits of the embedding and the head, where the vocabulary can be
    split; both or neither, as they may be tied."""
    candidates = [
        module
        for module, kind in ((words, nn.Embedding), (head, nn.Linear))
        if isinstance(module, kind)
    ]
    # Both stacks of an encoder-decoder have the embedding in a module of their own.
    every = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.Linear))
    ]
    # Layers that share a weight (tied, or of both stacks) take part in the decision as
    # one.
    weights = {module.weight for module in candidates}
    named = {name: module for name, module in every if module.weight in weights}
    # All of them stay whole if one cannot be split.
    is_uneven = any(weight.shape[0] % degree for weight in weights)
    if is_uneven or any(f"{name}.weight" in whole for name in named):
        logger.info("tensor_parallel: whole on every rank: %s", ", ".join(named))
        return
    for name, module in named.items():
        yield Split(
            name,
            module,
            "vocabulary" if isinstance(module, nn.Embedding) else "column_gather",
        )


def _plan_of_transformers(known: Any, kind: str, instead: str) -> dict[str, str]:
    """Return globs -> roles of the plan that the model carries."""
    carried = dict(known.tp_plan or {})
    if not carried:
        raise NoPlan(
            f"tensor_parallel.plan='auto': {kind} carries no plan, and none is known for it; {instead}"
        )
    # A role without a counterpart here could not be left out: other layers of the plan
    # rely on it.
    unknown = sorted(set(carried.values()) - set(_OF_TRANSFORMERS))
    if unknown:
        raise NoPlan(
            f"tensor_parallel.plan='auto': the plan that {kind} carries has roles that are not built yet: "
            f"{', '.join(unknown)}; {instead}"
        )
    plan = {glob: _OF_TRANSFORMERS[style] for glob, style in carried.items()}
    experts = [glob for glob, role in plan.items() if role == "experts"]
    for glob in experts:
        # Parameters of fused experts are split with them; what chooses experts needs
        # all tokens.
        plan = {
            each: role for each, role in plan.items() if not each.startswith(f"{glob}.")
        }
        plan[glob.rpartition(".")[0]] = "whole"
    return plan


def _require_fitting(split: Split) -> None:
    # The layer inside, if PEFT has wrapped it.
    module: Any = getattr(split.module, "base_layer", split.module)
    kind = type(module).__name__
    where = f"tensor_parallel: {split.name} ({kind})"
    if split.role in ("vocabulary", "features"):
        if (
            not isinstance(module, nn.Embedding)
            or module.max_norm is not None
            or module.sparse
            or module.scale_grad_by_freq
        ):
            raise ValueError(
                f"{where} is no plain embedding without max_norm, sparse and scale_grad_by_freq; write 'replicate' "
                "for it"
            )
    elif split.role in ("column", "column_gather", "row", "row_split"):
        if not (isinstance(module, nn.Linear) or is_conv1d(module)):
            raise ValueError(
                f"{where} is no linear layer, which {split.role!r} is for; write 'replicate' for it"
            )


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is Transformers' linear layer with a transposed
    weight."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(
        module, "nf"
    )


def divided_attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """List the attributes that a known model's forwards read and that count what is
    split."""
    known = transformers_model(model)
    # Models of other libraries, and types without an entry, have nothing to divide.
    table = {} if known is None else _DIVIDED.get(known.config.model_type, {})
    for name, module in model.named_modules():
        for glob, attributes in table.items():
            if fnmatch.fnmatchcase(name, glob):
                for attribute in attributes:
                    if isinstance(getattr(module, attribute, None), int):
                        yield module, attribute


def arguments_of_heads(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """List the arguments of a known model's modules of which each rank uses the part of
    its own heads."""
    known = transformers_model(model)
    table = {} if known is None else _OF_HEADS.get(known.config.model_type, {})
    for name, module in model.named_modules():
        yield from (
            (module, argument)
            for glob, argument in table.items()
            if fnmatch.fnmatchcase(name, glob)
        )


def reads_other_tokens(model: nn.Module, name: str) -> bool:
    """Return whether a column layer's input is not that of the module it is in, and is
    whole on every rank."""
    known = transformers_model(model)
    glob = None if known is None else _OF_OTHER_TOKENS.get(known.config.model_type)
    return glob is not None and fnmatch.fnmatchcase(name, glob)


def has_heads(module: nn.Module) -> bool:
    """Return whether a module with column layers is attention."""
    return any(hasattr(module, name) for name in (*_HEAD_SIZES, *_NUMBERS_OF_HEADS))


def numbers_of_heads(module: nn.Module) -> dict[str, int]:
    """Return a module's own counts of heads, by name."""
    own = vars(module)
    return {
        name: own[name] for name in _NUMBERS_OF_HEADS if isinstance(own.get(name), int)
    }


def head_size(module: nn.Module) -> int | None:
    """Return the features of a head of attention, if the module has them under a known
    name."""
    found = next(
        (size for name in _HEAD_SIZES if (size := getattr(module, name, None))), None
    )
    return found if isinstance(found, int) else None


def rows_in_use(
    split: Split, head: int | None, outputs: int, query_outputs: int, degree: int
) -> RowsInUse | None:
    """Return which outputs of a column layer each rank computes; None: equal stretches,
    in order.

    Outputs of attention are cut between heads. Keys and values of fewer heads than
    ranks are used by several ranks.

    Args:
        head: the features of a head; None: the layer is not known to have any.
        outputs: of the layer.
        query_outputs: of the largest column layer of the same module.

    Raises:
        ValueError: a number of heads or outputs that ranks cannot share.
    """
    block = outputs // split.blocks
    # A block is cut between heads where it consists of whole heads of a known size.
    heads = block // head if head and block % head == 0 else None
    # Each block of a packed weight gives every rank its stretch: the rank's rows lie
    # apart.
    by_rank: list[list[int]] = [[] for _ in range(degree)]
    for start in range(0, outputs, block):
        for rank in range(degree):
            by_rank[rank] += _stretch(
                split, start, block, heads, rank, degree, outputs < query_outputs
            )
    # Rows are stored in equal stretches, whatever ranks use of them.
    if outputs % degree:
        raise _indivisible(split, f"{outputs} outputs", outputs, degree)
    # Used as stored: nothing has to be exchanged.
    stored = outputs // degree
    if all(
        rows == list(range(rank * stored, (rank + 1) * stored))
        for rank, rows in enumerate(by_rank)
    ):
        return None
    return RowsInUse(tuple(map(tuple, by_rank)), outputs)


def _stretch(
    split: Split,
    start: int,
    size: int,
    heads: int | None,
    rank: int,
    degree: int,
    shared: bool,
) -> range:
    """Return the outputs of one block that a rank computes."""
    parts = size if heads is None else heads
    # Heads (or outputs) that the ranks can share equally.
    if parts % degree == 0:
        return range(start + size // degree * rank, start + size // degree * (rank + 1))
    # Fewer heads than ranks, as of grouped keys and values: T / heads neighbours use
    # the same one.
    if heads is not None and shared and degree % heads == 0:
        head, place = size // heads, rank * heads // degree
        return range(start + head * place, start + head * (place + 1))
    raise _indivisible(
        split, f"{parts} {'outputs' if heads is None else 'heads'}", parts, degree
    )


def _indivisible(split: Split, what: str, number: int, degree: int) -> ValueError:
    return ValueError(
        f"tensor_parallel_degree={degree} does not divide the {what} of {split.name}; allowed: "
        f"{listed(divisors(number))}, or leave the layer whole with a plan that does not name it"
    )


def stacks_of(model: nn.Module, splits: list[Split]) -> list[list[str]]:
    """Return the names of the blocks of every stack (``nn.ModuleList``) that holds
    split layers, in its modules: a list of layers is none."""
    # The outermost list above a layer is its stack: lists inside of blocks are none.
    lists = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    found: dict[str, None] = {}
    for split in splits:
        if split.role in ("column", "row", "column_gather", "row_split", "experts"):
            parts = split.name.split(".")
            above = [".".join(parts[:end]) for end in range(1, len(parts) - 1)]
            outermost = next((name for name in above if name in lists), None)
            if outermost is not None:
                found[outermost] = None
    stacks = []
    for name in found:
        stacks.append(
            [
                f"{name}.{index}"
                for index, _ in model.get_submodule(name).named_children()
            ]
        )
    return stacks


def holds(names: list[str], name: str) -> bool:
    """Return whether a module is one of these, or inside one."""
    return any(name == each or name.startswith(f"{each}.") for each in names)
