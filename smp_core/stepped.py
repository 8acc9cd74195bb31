"""What an optimizer steps where that is not the model's parameter: facts that steps, norms, checkpoints and reports
share."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch.utils.weak import WeakIdKeyDictionary

_model_parameters = WeakIdKeyDictionary()  # master -> the parameter whose part it is


def stands_for(master: torch.Tensor, parameter: torch.Tensor) -> None:
    """Note that optimizers step ``master`` in the place of a parameter of the model."""
    _model_parameters[master] = parameter


def model_parameter(stepped: torch.Tensor) -> torch.Tensor:
    """Return the model's parameter that a master stands for; any other tensor is itself."""
    found: torch.Tensor = _model_parameters.get(stepped, stepped)
    return found


class StepsOnHost:
    """An optimizer whose states never see the device (``state_offload="optimizer"``)."""

    __slots__ = ()

    @abstractmethod
    def host_bytes(self) -> int:
        """Return what states, masters and gradients take in host memory."""
