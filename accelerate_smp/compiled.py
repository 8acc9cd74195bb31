"""Accelerate's torch.compile (``dynamo_plugin=``, Trainer's ``torch_compile=True``) for models that are sharded.

Accelerate would compile the sharded model as a whole, and with it the hooks that gather, around the model and around
every block: such passes did not gather as they should, and a later step failed. Instead repeated blocks are compiled,
each for itself and before the model is sharded, with Accelerate's options; gathers stay outside of what is compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn

from accelerate_smp.handle import parallel_of

logger = logging.getLogger("smp")


def compile_blocks(model: nn.Module, accelerator: Accelerator) -> None:
    """Compile the repeated blocks of a model, in place, where Accelerate was asked to compile.

    Blocks that were compiled already stay as they are. A model without blocks is not compiled, and a warning says so.
    """
    plugin: Any = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:
        return
    blocks = [block for each in model.modules() if _repeats(each) for block in each.children()]
    for block in blocks:
        if vars(block).get("_compiled_call_impl") is None:
            block.compile(**plugin.to_kwargs())
    if not blocks and accelerator.is_main_process:
        logger.warning(
            "torch.compile (dynamo_plugin=, torch_compile=) has no effect: %s has no nn.ModuleList of blocks of one "
            "class; call .compile() on its layers before prepare()",
            type(model).__name__,
        )


def _repeats(module: nn.Module) -> bool:
    """Tell whether a module is a list of modules of one class, as Accelerate's regional compilation does."""
    return isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1


@contextmanager
def compiled_already(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Keep Accelerate from compiling a model whose blocks were compiled before it was sharded."""
    plugin: Any = accelerator.state.dynamo_plugin
    backend = plugin.backend
    if parallel_of(model) is not None:
        plugin.backend = DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = backend
