"""Models that cannot be split: wrapped, or showing the inside of blocks."""

from __future__ import annotations

from torch import nn

from smp_core.tensor_parallel.roles import Split, holds, transformers_model
from smp_core.torch_facts import Args, Kwargs, transformers_models, uncompiled

_COLLECTING = "transformers.utils.output_capturing"


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse what changes the names that plans speak of."""
    compiled = [
        name
        for name, module in model.named_modules()
        if uncompiled(module) is not module
    ]
    if compiled:
        raise ValueError(
            f"tensor_parallel_degree: torch.compile() wraps {', '.join(map(repr, compiled[:5]))}, whose layers then "
            "have other names; compile blocks in their place: block.compile()"
        )


def refuse_hooks(model: nn.Module, blocks: list[str]) -> None:
    """Refuse forward hooks in blocks whose tokens are split: they would see this
    rank's. torch shows hooks in ``_forward_hooks`` and ``_forward_pre_hooks`` only.
    Transformers' own collect what :func:`refuse_whole_states` refuses to calls."""
    # Hooks of Transformers' own output capturing are let through.
    hooked = []
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if holds(blocks, name) and any(
            getattr(hook, "__module__", "") != _COLLECTING for hook in hooks
        ):
            hooked.append(name)
    if hooked:
        raise ValueError(
            f"tensor_parallel_degree: {', '.join(hooked[:5])} has forward hooks, which would see 1/T of the tokens; "
            "remove them, write tensor_parallel={'sequence_parallel': false}, or put hooks outside of blocks"
        )


def shared_with_others(model: nn.Module, block: nn.Module) -> str:
    """Return why tokens in a block stay whole that has a module in common with others,
    which may see all tokens there; "": it has none."""
    # Every name of each module: shared modules have several.
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for module in block.modules():
        # Modules without parameters compute the same wherever they stand.
        outside = [name for name in names[module] if not holds(names[block], name)]
        if outside and any(True for _ in module.parameters(recurse=False)):
            return (
                f"{outside[0]} ({type(module).__name__}) is a part of it and of others"
            )
    return ""


def refuse_unshared_tokens(splits: list[Split], blocks: list[str]) -> None:
    """Refuse a layer among split tokens that returns all of them, with all features,
    where no layer behind it in its block shares them out again.

    Args:
        splits: those in blocks whose tokens are split, in the model's order.
    """
    # In a block the gathered features of all tokens would be mixed with split ones.
    for place, split in enumerate(splits):
        if split.role == "column_gather":
            block = next(name for name in blocks if holds([name], split.name))
            if not any(
                later.role == "row_split" and holds([block], later.name)
                for later in splits[place:]
            ):
                raise ValueError(
                    f"tensor_parallel.plan: {split.name} is 'column_gather' in {block}, whose tokens are split, and no "
                    "'row_split' behind it there shares the tokens out again; write 'column' and 'row' for the layer "
                    "behind it, 'replicate', or tensor_parallel={'sequence_parallel': false}"
                )


_WHOLE_STATES = ("output_hidden_states", "output_attentions")


def refuse_whole_states(model: nn.Module) -> None:
    """Refuse what shows the inside of blocks, where tokens and heads are split; in
    calls too."""
    known = transformers_model(model)
    if known is None:
        return
    # What the configuration asks for shows before the first call; options of calls are
    # looked at in each.
    for option in _WHOLE_STATES:
        if getattr(known.config, option, False):
            raise ValueError(
                f"tensor_parallel_degree: config.{option}=True: no rank has these unsplit; set config.{option} = False"
            )

    def refuse(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        for option in _WHOLE_STATES:
            if kwargs.get(option):
                raise ValueError(
                    f"tensor_parallel_degree: {type(module).__name__} was called with {option}=True: no rank has these "
                    "unsplit; leave it out, or write tensor_parallel_degree=1"
                )

    for module in transformers_models(known):
        module.register_forward_pre_hook(refuse, with_kwargs=True)
