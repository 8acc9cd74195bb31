"""Stand-ins: what a pipeline stage computes instead of modules that run before the
blocks and that another stage holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from smp_core.plan.chain.chain import StandIn

Early = tuple[nn.Module, Tensor | None, Any]
"""(module, the first tensor that it took, what it gave)."""


def find_stand_ins(
    model: nn.Module,
    early: list[Early],
    before: set[str],
    names: Mapping[nn.Parameter, str],
    refusal: str,
) -> Iterator[StandIn]:
    """Say what stands for the modules that are called before the first block and hold
    parameters.

    Args:
        early: modules in the order in which they returned.
        before: names of the parameters that work there and nowhere else.
        names: of all parameters.

    Raises:
        ValueError: a parameter or a module that nothing can stand for; begins with
            ``refusal``.
    """
    paths = {module: name for name, module in model.named_modules()}
    covered: set[nn.Parameter] = set()
    inside: set[nn.Module] = set()
    # A module returns behind those inside it.
    for module, taken, output in reversed(early):
        own = list(module.parameters(recurse=False))
        if module in inside or not own:
            continue
        inside |= set(module.modules())
        covered |= set(module.parameters())
        yield _stand_in(paths[module], module, taken, output, refusal)
    for parameter, name in names.items():
        if name in before and parameter not in covered:
            raise ValueError(
                f"{refusal}{name} works before the blocks in a forward that runs the blocks too; put it into a module "
                "of its own, such as nn.Embedding, which stages without it can leave out"
            )


def _stand_in(
    name: str, module: nn.Module, taken: Tensor | None, output: Any, refusal: str
) -> StandIn:
    # Known kinds only if their output has the expected shape: a subclass may take
    # something else than tokens or features. A module may be known by its shapes alone;
    # all else is played on the meta device.
    if taken is not None and isinstance(output, Tensor):
        if isinstance(module, nn.Embedding) and output.shape == (
            *taken.shape,
            module.embedding_dim,
        ):
            return StandIn(name, module.embedding_dim)
        if isinstance(module, nn.Linear) and output.shape == (
            *taken.shape[:-1],
            module.out_features,
        ):
            return StandIn(name, module.out_features, rows=True)
        if output.shape == taken.shape and output.dtype == taken.dtype:
            return StandIn(name)
    if is_nest_of_tensors(output):
        return StandIn(name, played=True)
    raise ValueError(
        f"{refusal}{name} ({type(module).__name__}) works before the blocks and gives {type(output).__name__}; stages "
        "without it can put zeros in the place of tensors, and of tuples, lists and dicts of them"
    )


def is_nest_of_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, a number or text, or a tuple, list or dict of
    such values."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return all(map(is_nest_of_tensors, value))
    return value is None or isinstance(value, (Tensor, int, float, str))
