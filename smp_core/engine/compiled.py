"""The `compile` knob: the repeated blocks of a model are compiled, each for itself.

A graph of a whole sharded model would have the hooks that gather in it. Blocks are compiled after they were told to
recompute, so that the compiler sees which values to keep, and before they are sharded, so that gathers stay outside.
"""

from __future__ import annotations

from torch import nn

from smp_core.plan import Plan
from smp_core.torch_facts import is_compiled


def compile_blocks(model: nn.Module, plan: Plan) -> None:
    """Compile the blocks that the plan names, in place. Those that were compiled before stay as they are."""
    asked = plan.knobs.compile
    assert asked is not None
    for name in plan.shapes.units.blocks:
        block = model.get_submodule(name)
        if not is_compiled(block):
            block.compile(**asked.items())
