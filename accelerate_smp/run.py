"""The command `-m accelerate_smp.run script.py ARGS`: an unmodified script on
torch-smp.

Puts SmpAccelerator in the place of ``accelerate.Accelerator`` and SmpTrainer in the
place of ``transformers.Trainer``, so that also their subclasses (Seq2SeqTrainer, TRL's)
stand on it, and runs the script as ``__main__``:

    accelerate launch --config_file acc.yaml -m accelerate_smp.run train.py --lr 1e-4
    torchrun --nproc-per-node 8 -m accelerate_smp.run train.py --lr 1e-4

Knobs come from ``SMP_*`` variables and the file ``SMP_CONFIG_FILE`` names.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import accelerate
import accelerate.accelerator
import torch

from accelerate_smp.accelerator import SmpAccelerator

_USAGE = "usage: python -m accelerate_smp.run [-m] SCRIPT_OR_MODULE [ARGS ...]"
_TRAINERS = ("transformers.trainer", "accelerate_smp.trainer")


def replace_accelerator() -> None:
    """Make ``from accelerate import Accelerator`` give SmpAccelerator from now on."""
    # The package and the module that defines it: both are imported from.
    for module in (accelerate, accelerate.accelerator):
        module.Accelerator = SmpAccelerator  # type: ignore[attr-defined, misc]


def replace_trainer() -> None:
    """Make Trainer SmpTrainer as soon as ``transformers.trainer`` is imported; a script
    without it does not wait for the import.
    """
    if _TRAINERS[0] in sys.modules:
        _put_trainer_in_place()
    else:
        sys.meta_path.insert(0, _AfterImport())


def _put_trainer_in_place() -> None:
    import transformers

    from accelerate_smp import trainer as ours

    # Both names again: scripts import from the package or from the module.
    transformers.trainer.Trainer = ours.SmpTrainer  # type: ignore[misc]
    transformers.Trainer = ours.SmpTrainer  # type: ignore[misc]
    # Whatever a script puts the mixin before has it from here on.
    ours.SmpTrainerMixin = _AlreadyThere  # type: ignore[assignment, misc]


class _AlreadyThere:
    """An empty mixin, for SmpTrainerMixin where every Trainer is SmpTrainer."""


class _AfterImport(importlib.abc.MetaPathFinder):
    """A finder that lets others find a Trainer, and replaces the Trainer after its
    module was executed, whichever is imported first.
    """

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _TRAINERS:
            return None
        # Out of the way while the others look, or it would find itself.
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            # Otherwise our module is being executed around it, and replaces it then.
            if fullname == _TRAINERS[1] or _TRAINERS[1] not in sys.modules:
                _put_trainer_in_place()

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script with the arguments that follow it."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_module = bool(arguments) and arguments[0] == "-m"
    if as_module:
        arguments = arguments[1:]
    if not arguments:
        raise SystemExit(_USAGE)
    # Accelerate takes a CPU process for a single one unless it is told.
    if "LOCAL_RANK" in os.environ and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    replace_accelerator()
    replace_trainer()
    script = arguments[0]
    sys.argv = arguments
    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if not os.path.isfile(script):
        raise SystemExit(f"{script}: no such file. {_USAGE}")
    # As Python does for a script: imports from beside it work.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
