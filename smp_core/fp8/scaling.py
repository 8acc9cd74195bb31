"""Fp8State: the amax history and scales of every FP8 product of a model, in three
tensors.

Delayed scaling (Transformer Engine's, NVIDIA; arXiv 2209.05433, 3): a tensor is cast
with a scale found from the largest magnitudes (amax) it had in earlier steps, so that
the cast needs no pass of its own to look at it first.

- A *site* is one weight with the products it takes part in; each has three *roles*: its
  input x, its weight w, the gradient g of its output.
- While a step runs, magnitudes are recorded (a running maximum, no communication) and
  scales stay as they are. After the optimizer step one MAX all-reduce makes the amaxes
  those of all ranks, histories roll, and new scales are made. Since a maximum does not
  mind being taken twice, recomputing activations needs nothing special, and the
  micro-batches of a step roll the history once.
- Weights are scaled by their present amax, which is known exactly after the optimizer
  step: they never overflow.
- Scales are powers of two, rounded down: multiplying by them rounds nothing, in any
  dtype, so a value casts to the same FP8 number whichever scale (large enough) is in
  effect. At most one of FP8's 9 (E5M2: 15) binades is given up.
- A scale with no history yet is *not calibrated*: its tensors are cast by their own
  present amax.

Shape letters: H history length, N sites, 3 roles.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smp_core.config import Fp8Recipe
from smp_core.torch_facts import clean_name

logger = logging.getLogger("smp")

INPUT = 0
WEIGHT = 1
GRADIENT = 2
ROLES = ("input", "weight", "gradient")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: torch.finfo(E4M3).max, E5M2: torch.finfo(E5M2).max}
# Scales and their inverses stay normal float32 numbers, whatever the amax.
_EXPONENT_LIMIT = 100


def formats_of(recipe: Fp8Recipe) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of inputs, weights and gradients."""
    return E4M3, E4M3, (E5M2 if recipe.fp8_format == "hybrid" else E4M3)


def scale_for(amax: Tensor, largest: Tensor | float, margin: int = 0) -> Tensor:
    """Return the largest power of two that keeps ``amax * scale * 2 ** margin`` within
    ``largest``; float32, same shape.

    1 where ``amax`` is zero or not finite.
    """
    # Nothing to divide by where nothing was seen, or no number.
    usable = torch.isfinite(amax) & (amax > 0)
    ratio = (
        largest
        / torch.where(usable, amax.float(), torch.ones_like(amax, dtype=torch.float32))
    ).clamp(2.0**-_EXPONENT_LIMIT, 2.0**_EXPONENT_LIMIT)
    # frexp gives a mantissa from 0.5 to below 1, so its exponent is one too high.
    _, exponent = torch.frexp(ratio)
    scale = torch.ldexp(torch.ones_like(ratio), exponent - 1 - margin)
    return torch.where(usable, scale, torch.ones_like(scale))


def state_numbered(number: int) -> Fp8State:
    """Return the state with this number."""
    return _states[number]


def _known(state: Fp8State) -> int:
    number = next(_numbers)
    _states[number] = state
    return number


class Fp8State:
    """The histories and scales of all sites of one model.

    Args:
        recipe: history length, algorithm, margin, formats.
        names: the sites' names, which are those of the modules (or parameters, for
            fused experts).
        device: the device of the tensors.

    Attributes:
        history: ``[H, N, 3]`` float32, newest first; 0 where nothing has been recorded.
        current: ``[N, 3]`` float32, the running maximum of the present step on this
            rank.
        scale: ``[N, 3]`` float32; replaced, not written into, by every :meth:`step`, so
            that scales that an earlier forward pass saved for its backward pass do not
            change.
        number: this state's, for operators that torch compiles, which take tensors and
            numbers only.
    """

    def __init__(
        self,
        recipe: Fp8Recipe,
        names: Sequence[str],
        device: torch.device | str = "cpu",
    ) -> None:
        self.recipe = recipe
        self.names = tuple(names)
        self.formats = formats_of(recipe)
        count = len(self.names)
        # Rows are rolled by each step; the newest is the first.
        self.history = torch.zeros(recipe.amax_history_len, count, 3, device=device)
        self.current = torch.zeros(count, 3, device=device)
        self._bad = torch.zeros(count, 3, device=device, dtype=torch.bool)
        self._scale_by(torch.ones(count, 3, device=device))
        self._largest = torch.tensor(
            [LARGEST[dtype] for dtype in self.formats], device=device
        )
        self.steps = 0
        self.number = _known(self)
        self.calibrated = [[False] * 3 for _ in self.names]
        self.counts: Tensor | None = None
        """``[N, 3, 3]`` while :class:`Fp8Monitor` probes: saturated, flushed to zero
        and all elements per role."""

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Restore a copy as a state of its own, with a number of its own."""
        vars(self).update(attributes)
        self.number = _known(self)

    @property
    def device(self) -> torch.device:
        return self.current.device

    def to(self, device: torch.device | str) -> None:
        """Move all tensors."""
        # `current` moves too: what this step has recorded so far stays.
        for name in ("history", "current", "_bad", "_largest"):
            setattr(self, name, getattr(self, name).to(device))
        self._scale_by(self.scale.to(device))

    def uses_history(self, site: int, role: int) -> bool:
        """Return whether tensors of this role are cast with ``scale``; otherwise by
        their own present amax."""
        # A look-up of a bool, so that a compiled forward is compiled again when it
        # changes, and not in every step.
        return self._delayed[site][role]

    @property
    def calibrated(self) -> list[list[bool]]:
        """The flags, per site and role, of scales that come from a history."""
        return self._calibrated

    @calibrated.setter
    def calibrated(self, flags: list[list[bool]]) -> None:
        self._calibrated = flags
        delays = (
            self.recipe.scaling == "delayed"
            and self.steps >= self.recipe.calibration_steps
        )
        self._delayed = []
        for row in flags:
            self._delayed.append(
                [known and (delays or role == WEIGHT) for role, known in enumerate(row)]
            )

    def scales(self, site: int, role: int) -> tuple[Tensor, Tensor]:
        """Return the scale and its inverse, 0-d float32."""
        return self.scale[site, role], self.inverse[site, role]

    @torch.no_grad()
    def record(self, site: int, role: int, amax: Tensor) -> None:
        """Record a 0-d amax of the present step; nan and inf are kept, and veto the
        step (see :meth:`nonfinite`)."""
        # A plain maximum in place: nothing is sent until the step ends.
        slot = self.current[site, role]
        torch.maximum(slot, amax.to(slot.dtype), out=slot)

    @torch.no_grad()
    def nonfinite(self) -> Tensor:
        """Return whether an input or gradient since the last call held inf or nan on
        this rank: a 0-d bool tensor.

        :meth:`step` names them, where it comes next. A script that takes no step then
        goes on with other batches, of which they say nothing.
        """
        self._bad = ~torch.isfinite(self.current)
        self.current.masked_fill_(self._bad, 0.0)
        return self._bad.any()

    @torch.no_grad()
    def set_weight_scales(self, amax: Tensor) -> None:
        """Set the scales of the weights from their present amaxes ``[N]``, those of
        unsharded weights, equal on all ranks.
        """
        # Weights need no history: their amax is known.
        fresh = scale_for(amax, LARGEST[self.formats[WEIGHT]], self.recipe.margin)
        scale = self.scale.clone()
        scale[:, WEIGHT] = fresh
        self._scale_by(scale)
        self.calibrated = [[x, True, g] for x, _, g in self.calibrated]

    @torch.no_grad()
    def step(
        self, weight_amax: Tensor, all_reduce_max: Callable[[Tensor], None]
    ) -> list[str]:
        """Agree on the amaxes after an optimizer step, roll histories, make new scales.
        Collective.

        Args:
            weight_amax: ``[N]``, of this rank's shards of the weights.
            all_reduce_max: makes a float32 tensor the elementwise maximum over the
                ranks, in place. Called once.

        Returns:
            tensors that held inf or nan on any rank, as ``"<site> (<role>)"``; their
            histories and scales stay.
        """
        # Phase 1: the amaxes of all ranks.
        amax = self.current.masked_fill(self._bad, torch.inf)
        amax[:, WEIGHT] = weight_amax
        # Libraries compare, and a nan wins or loses by its place in the comparison; inf
        # is ordered.
        amax = torch.where(torch.isfinite(amax), amax, torch.full_like(amax, torch.inf))
        if self.recipe.reduce_amax:
            all_reduce_max(amax)
        else:
            weights = amax[:, WEIGHT].contiguous()
            all_reduce_max(weights)
            amax[:, WEIGHT] = weights
        # Phase 2: histories roll, and scales follow from them. Where nothing was seen, or
        # no number, both stay.
        fine = torch.isfinite(amax) & (amax > 0)
        rolled = torch.cat([amax[None], self.history[:-1]])
        self.history = torch.where(fine[None], rolled, self.history)
        # Weights are scaled by their present amax, whatever the algorithm.
        basis = (
            self.history.amax(0)
            if self.recipe.amax_compute_algo == "max"
            else self.history[0].clone()
        )
        basis[:, WEIGHT] = self.history[0, :, WEIGHT]
        fresh = scale_for(basis, self._largest, self.recipe.margin)
        self._scale_by(torch.where(basis > 0, fresh, self.scale))
        self._bad = torch.zeros_like(self._bad)
        self.current.zero_()  # a CUDA graph that records goes on with this memory
        # One copy to the host per step; the veto of a non-finite step has waited for
        # the device already.
        seen, bad, new = torch.stack([basis > 0, torch.isinf(amax), amax > 0]).tolist()
        # Of several optimizers that step behind one backward pass the first one counts.
        self.steps += any(row[INPUT] or row[GRADIENT] for row in new)
        self.calibrated = seen
        found = []
        for name, row in zip(self.names, bad, strict=True):
            found += [
                f"{name} ({role})"
                for role, is_bad in zip(ROLES, row, strict=True)
                if is_bad
            ]
        return found

    def _scale_by(self, scale: Tensor) -> None:
        """Take new scales, and their inverses, which lie 16 bytes apart: cuBLASLt takes
        no scale at another address."""
        self.scale = scale
        self.inverse = scale.new_empty(*scale.shape, 16 // scale.element_size())[..., 0]
        self.inverse.copy_(1.0 / scale)

    def state_dict(self) -> dict[str, Any]:
        """Return plain CPU tensors by site name (``amax_history`` ``[H, 3]``, ``scale``
        ``[3]``), and the step count.
        """
        history, scale = self.history.cpu(), self.scale.cpu()
        sites = {
            clean_name(name): {
                "amax_history": history[:, i].clone(),
                "scale": scale[i].clone(),
            }
            for i, name in enumerate(self.names)
        }
        return {"steps": self.steps, "sites": sites}

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Any], name_there: Callable[[str], str] = str
    ) -> list[str]:
        """Load a state of :meth:`state_dict`; a history of another length is cut or
        filled up with zeros.

        Args:
            name_there: a site's name here -> its name in ``state``.

        Returns:
            names of sites that ``state`` lacks: they are calibrated anew.
        """
        saved = {
            clean_name(name): tensors
            for name, tensors in state.get("sites", {}).items()
        }
        missing = []
        # Everything anew: what a site lacks is calibrated by its first tensors.
        self.history = torch.zeros_like(self.history)
        scale = torch.ones_like(self.scale)
        self.current = torch.zeros_like(self.current)
        for i, name in enumerate(self.names):
            tensors = saved.get(name_there(clean_name(name)))
            if tensors is None:
                missing.append(name)
                continue
            # The newest rows, as far as this history reaches.
            rows = tensors["amax_history"].to(self.history)[: self.history.shape[0]]
            self.history[: rows.shape[0], i] = rows
            scale[i] = tensors["scale"].to(scale)
        self._scale_by(scale)
        self.steps = int(state.get("steps", 0)) if len(missing) < len(self.names) else 0
        self.calibrated = (self.history.amax(0) > 0).tolist()
        return missing


_states: weakref.WeakValueDictionary[int, Fp8State] = weakref.WeakValueDictionary()
_numbers = itertools.count()
