"""A process of `smp verify` that runs the user's training: a script as __main__, or a
pickled call.

The recorders of the faces are put in place when their frameworks have been imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import random
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smp_core.verify.recorder import refuse
from smp_core.verify.request import Request, requested

SEED = 20220430
"""The seed of torch, numpy and Python where the script sets none."""
FACES = {
    "lightning": ("lightning_smp.verification", "install"),
    "accelerate": ("accelerate_smp.verification", "install"),
    "accelerate_smp.trainer": ("accelerate_smp.verification", "install_trainer"),
}
"""Module that is imported -> module and function that put a recorder in place then. The
faces stand above this module and are named, not imported."""


def _install(name: str) -> None:
    module, function = FACES[name]
    getattr(importlib.import_module(module), function)()


class _FacesAfterFrameworks(importlib.abc.MetaPathFinder):
    """A finder that lets others find a framework, and puts the face's recorder in place
    after it was imported."""

    def __init__(self) -> None:
        self._waiting = {name for name in FACES if name not in sys.modules}

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        self._waiting.remove(fullname)
        # The finder has removed the name, so that this looks among the others.
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_record(module: ModuleType) -> None:
            execute(module)
            _install(fullname)

        spec.loader.exec_module = execute_and_record  # type: ignore[method-assign]
        return spec


def prepare() -> None:
    """Seed this process, and put the recorders in place."""
    request = requested()
    assert request is not None
    # Before the script: what it draws is then the same on all ranks.
    random.seed(SEED)
    torch.manual_seed(SEED)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed(SEED)
    # Models that make parameters without a dtype get float64.
    if request.float64:
        torch.set_default_dtype(torch.float64)
        _stay_in_float64()
    # The server may have imported a framework before the fork.
    for name in FACES:
        if name in sys.modules:
            _install(name)
    sys.meta_path.insert(0, _FacesAfterFrameworks())


def _stay_in_float64() -> None:
    """Let float64 tensors stay what they are where code asks for float32, as norms and
    losses of Transformers do."""
    # Where code asks for float32 the difference would be rounding of float32.
    own_float, own_to = Tensor.float, Tensor.to

    def as_float(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (
            tensor
            if tensor.dtype == torch.float64
            else own_float(tensor, *args, **kwargs)
        )

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            # The dtype may stand in either place.
            args = tuple(
                torch.float64 if each is torch.float32 else each for each in args
            )
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return own_to(tensor, *args, **kwargs)

    Tensor.float, Tensor.to = as_float, to  # type: ignore[method-assign, assignment]
    for place in (torch, Tensor, torch.nn.functional):
        for name in _WITH_DTYPE:
            if hasattr(place, name):
                setattr(place, name, _keeping_float64(getattr(place, name)))


_WITH_DTYPE = ("sum", "mean", "prod", "cumsum", "softmax", "log_softmax")
"""Functions that compute in the dtype they are told: float32 in eager attention and in
label smoothing."""


def _keeping_float64(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def keeping(tensor: Any, *args: Any, **kwargs: Any) -> Tensor:
        is_double = isinstance(tensor, Tensor) and tensor.dtype == torch.float64
        if is_double and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return original(tensor, *args, **kwargs)

    return keeping


def turn_off_functions() -> None:
    """Let torch's functions drop nothing in this process, as a forward calls them with
    a number of its own (``F.dropout(x, 0.5)``)."""
    for name in ("", "1d", "2d", "3d"):
        function = getattr(F, f"dropout{name}")
        setattr(F, f"dropout{name}", _without(function, training=True))
    for name in ("alpha_dropout", "feature_alpha_dropout"):
        setattr(F, name, _without(getattr(F, name), training=False))


def _without(function: Any, training: bool) -> Any:
    # Not by functools.wraps(): TorchScript would compile the source of what is wrapped.
    def kept(
        input: Tensor,
        p: float = 0.5,
        training: bool = training,
        inplace: bool = False,
    ) -> Tensor:
        # All or nothing needs no random numbers.
        return function(input, 0.0 if 0.0 < p < 1.0 else p, training, inplace)

    return kept


def train(command: Sequence[str]) -> None:
    """Run a script with its arguments, or ``--call FILE``; a recorder ends this process
    in it.

    Raises:
        SystemExit: the training came to its end before that.
    """
    request = requested()
    assert request is not None
    if not request.keep_dropout:
        turn_off_functions()
    sys.argv = list(command)
    if command[0] == "--call":
        # Our own parent's.
        function, arguments, keywords = pickle.loads(Path(command[1]).read_bytes())
        function(*arguments, **keywords)
    else:
        # As Python does for a script.
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    # The recorder ends the process in time; coming here means that it did not.
    refuse(_ended_early(request))


def _ended_early(request: Request) -> str:
    if not {"lightning", "accelerate"} & sys.modules.keys():
        return (
            "the script imported neither lightning nor accelerate; verify looks at trainings under Trainer(strategy="
            '"smp_sharded"), SmpAccelerator or SmpTrainer'
        )
    return (
        f"the script ended before it had taken {request.steps} optimizer steps under torch-smp. If it trains longer, "
        'it trains without: write `import lightning_smp` and Trainer(strategy="smp_sharded"), SmpAccelerator() in '
        "place of Accelerator(), or SmpTrainer in place of Trainer. Otherwise write --steps with a smaller number"
    )
