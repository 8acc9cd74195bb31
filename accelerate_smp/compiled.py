"""Accelerate's torch.compile (``dynamo_plugin=``, Trainer's ``torch_compile=True``) as
the knob ``compile``.

Accelerate would compile the sharded model as a whole, and with it the hooks that
gather, around the model and around every block: such passes did not gather as they
should, and a later step failed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn

from accelerate_smp.handle import parallel_of
from smp_core.config import Compile, SmpConfig
from smp_core.outside import changed


def with_dynamo_plugin(config: SmpConfig, accelerator: Accelerator) -> SmpConfig:
    """Return the configuration with what Accelerate was asked to compile.

    Raises:
        ValueError: the knob asks for something else.
    """
    plugin: Any = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or plugin.disable:
        return config
    asked = Compile(**plugin.to_kwargs())
    if config.compile not in (None, asked):
        raise ValueError(
            f"compile={config.compile!r}, but dynamo_plugin= (Trainer's torch_compile=) asks for {asked!r}; "
            "leave one out"
        )
    return config.with_resolved(
        "compile", asked, "dynamo_plugin=, or Trainer's torch_compile="
    )


def compiled_already(
    model: nn.Module, accelerator: Accelerator
) -> AbstractContextManager[None]:
    """Keep Accelerate from compiling a model whose blocks were compiled before it was
    sharded."""
    plugin: Any = accelerator.state.dynamo_plugin
    # The plugin is shared by all accelerators of the process, and is put back.
    backend = plugin.backend if parallel_of(model) is None else DynamoBackend.NO
    return changed(plugin, backend=backend)
