"""convert_to_fp8(): the choice of modules that compute in FP8, and the handle that
steps their scales."""

from __future__ import annotations

import fnmatch
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smp_core.cluster import of_all_ranks
from smp_core.config import Fp8Recipe
from smp_core.fp8.gathered import WeightGather
from smp_core.fp8.linear import SITES, Fp8Site, fp8_class
from smp_core.fp8.scaling import Fp8State
from smp_core.torch_facts import after_each_step, is_absent, is_rank_0, local_part

logger = logging.getLogger("smp")

_ALIGNMENT = 16
_NO_PRODUCT = (
    *(nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def _alone(amax: Tensor) -> None:
    """Leave the tensor as it is: one process has nothing to agree on."""


@dataclass
class Fp8Model:
    """A converted model: its state, the weights, and the reasons why other modules were
    left out.

    Attributes:
        left_out: module name -> reason, of every module with a matrix product that
            stays as it is.
        all_reduce_max: makes a float32 tensor the elementwise maximum over all ranks
            that share the model, in place.
        device: the device on which the model computes; None: that of its parameters.
        group: the ranks that have the same sites; None: all.
        stages: the ranks of the other pipeline stages, which have other sites; None:
            there are none.
    """

    model: nn.Module
    recipe: Fp8Recipe
    state: Fp8State
    sites: tuple[tuple[nn.Module, str, Fp8Site], ...]
    left_out: Mapping[str, str]
    all_reduce_max: Callable[[Tensor], None] = field(default=_alone)
    device: torch.device | None = None
    group: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None

    def of_all_stages(self, by_site: dict[str, Any]) -> dict[str, Any]:
        """Return what there is by site name, of all pipeline stages. Collective over
        these."""
        if self.stages is None:
            return by_site
        everyone = of_all_ranks(by_site, self.stages)
        return {
            name: found for of_stage in everyone for name, found in of_stage.items()
        }

    def gather_of(self, module: nn.Module, parameter: str) -> WeightGather | None:
        """Return the FP8 form of this parameter for all-gathers; None: it is gathered
        in its own dtype."""
        site = getattr(module, SITES, {}).get(parameter)
        return (
            WeightGather(self.state, site.index)
            if site is not None and self.recipe.fp8_all_gather
            else None
        )

    @torch.no_grad()
    def weight_amax(self) -> Tensor:
        """Return ``[N]`` float32: the largest magnitude of each weight, of this rank's
        shards where it is sharded."""
        weights = []
        # The weights as the modules show them now: between calls, shards.
        for module, name, _ in self.sites:
            weight = getattr(module, name).detach()
            weights.append(local_part(weight))
        if not weights:
            return torch.zeros(0, device=self.state.device)
        # torch._foreach_norm is one kernel for all of them and has no public name; it
        # takes no empty tensors.
        filled = [weight for weight in weights if weight.numel()]
        norms = iter(torch._foreach_norm(filled, torch.inf) if filled else ())
        nothing = torch.zeros((), device=weights[0].device)
        amax = [
            next(norms).float() if weight.numel() else nothing for weight in weights
        ]
        # One copy to the device where weights are in host memory.
        return torch.stack(amax).to(self.state.device)

    def refresh_weights(self) -> None:
        """Scale weights by their present values, after they were made, loaded or
        edited. Collective."""
        # Conversion may have been on the meta device, or on another one.
        self.state.to(self.device or next(self.model.parameters()).device)
        amax = self.weight_amax()
        self.all_reduce_max(amax)
        self.state.set_weight_scales(amax)

    def step(self) -> None:
        """Make new scales after an optimizer step. Collective; one all-reduce."""
        bad = self.state.step(self.weight_amax(), self.all_reduce_max)
        # The first few names; a model may have hundreds of sites.
        if bad:
            shown = ", ".join(bad[:5]) + (
                f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            )
            # Weights alone skip no step: they became so in the one that was just taken.
            weights_alone = all(name.endswith("(weight)") for name in bad)
            skipped = "" if weights_alone else "the step is skipped and "
            logger.warning(
                "fp8: inf or nan in %s; %sthese scales stay as they were",
                shown,
                skipped,
            )

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Call :meth:`step` after every step of ``optimizer``."""
        after_each_step(optimizer, self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors by module name, the same on every rank and for every
        number of ranks.

        Collective only where ``reduce_amax=False`` (ranks' own histories are merged to
        their maximum), and over pipeline stages.
        """
        state = self.state.state_dict()
        # Ranks have histories of their own then, of which no rank has the whole.
        if not self.recipe.reduce_amax:
            history = self.state.history.clone()
            self.all_reduce_max(history)
            for number, tensors in enumerate(state["sites"].values()):
                tensors["amax_history"] = history[:, number].cpu()
        return {**state, "sites": self.of_all_stages(state["sites"])}

    def load_state_dict(
        self, state: Mapping[str, Any] | None, name_there: Callable[[str], str] = str
    ) -> None:
        """Load a state, and scale weights by their present values. Collective.

        Args:
            state: of :meth:`state_dict`; None or with modules missing: those are
                calibrated anew, and a warning says so.
            name_there: a site's name here -> its name in ``state``.
        """
        missing = self.state.load_state_dict(state or {}, name_there)
        if missing:
            logger.warning(
                "the checkpoint has no FP8 scales of %s: calibrated anew in the next step",
                "any module"
                if len(missing) == len(self.state.names)
                else ", ".join(missing[:5]),
            )
        self.refresh_weights()

    def describe(self) -> str:
        """Describe the modules that compute in FP8 and those that do not, with reasons,
        for people."""
        kinds: dict[str, int] = defaultdict(int)
        # Kinds of layers with their numbers, then what was left out, by reason.
        for module, _, _ in self.sites:
            kinds[type(module).__name__] += 1
        lines = [
            f"fp8: {len(self.sites)} weights in "
            + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        ]
        by_reason: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.left_out.items():
            by_reason[reason].append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            lines.append(f"fp8: left out: {', '.join(names[:4])}{more} ({reason})")
        return "\n".join(lines)


def convert_to_fp8(
    model: nn.Module, recipe: Fp8Recipe | None = None, *, parts: int = 1
) -> Fp8Model:
    """Make the linear layers of ``model`` compute in FP8, in place; call it before the
    model is sharded.

    The function converts ``nn.Linear``, Transformers' ``Conv1D`` and fused experts with
    ``gate_up_proj`` and ``down_proj``. Parameters stay the same objects with the same
    names. After every optimizer step, :meth:`Fp8Model.step` has to run on every rank
    (:meth:`Fp8Model.follow`).

    Args:
        parts: tensor ranks that layers are split over afterwards; the kernels' sizes
            are those of a part.

    Returns:
        the handle with the state. ``refresh_weights`` has to be called once the weights
        have values; this is done here unless some are on the meta device.

    Raises:
        ValueError: no module can be converted, or a glob of ``include`` matches
            nothing.
    """
    recipe = recipe or Fp8Recipe()
    if recipe.backend != "native":
        raise ValueError(
            f"fp8: convert_to_fp8 is the native backend; backend={recipe.backend!r} is applied by "
            "smp_core.fp8.backends.convert_with"
        )

    # The modules, and a site for each of their weights.
    chosen, left_out = choose(model, recipe, parts)
    names = [
        _site_name(name, parameter)
        for name, _, parameters in chosen
        for parameter in parameters
    ]
    state = Fp8State(recipe, names, _device(model))
    sites: list[tuple[nn.Module, str, Fp8Site]] = []
    for _, module, parameters in chosen:
        # Sites are numbered in the order of modules, in the state and in this list.
        own = {}
        for parameter in parameters:
            own[parameter] = Fp8Site(state, len(sites), names[len(sites)])
            sites.append((module, parameter, own[parameter]))
        # The class changes in place: parameters, names and hooks stay.
        module.__class__ = fp8_class(type(module))  # type: ignore[arg-type]  # modules' classes are hashable
        setattr(module, SITES, own)

    fp8 = Fp8Model(model, recipe, state, tuple(sites), left_out)
    if not any(getattr(module, name).is_meta for module, name, _ in sites):
        fp8.refresh_weights()
    return fp8


def choose(
    model: nn.Module, recipe: Fp8Recipe, parts: int = 1
) -> tuple[list[tuple[str, nn.Module, tuple[str, ...]]], dict[str, str]]:
    """Choose the modules to convert, as (name, module, parameters), and the reasons why
    others are left out."""
    # The modules that hold each parameter.
    holders: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)].append(name)
    # Each module with a product: chosen, or left out for a reason.
    chosen: list[tuple[str, nn.Module, tuple[str, ...]]] = []
    left_out: dict[str, str] = {}
    matched: set[str] = set()
    for name, module in model.named_modules():
        if not _has_product(module):
            continue
        globs = (*recipe.include, *recipe.exclude)
        matched |= {glob for glob in globs if fnmatch.fnmatchcase(name, glob)}
        reason = _why_not(name, module, recipe, holders, parts)
        if reason is None:
            chosen.append((name, module, _weights(module)))
        else:
            left_out[name] = reason
    # Globs that choose nothing are mistakes.
    unmatched = [glob for glob in recipe.include if glob not in matched]
    if unmatched and left_out:
        examples = [name for name, *_ in chosen] or list(left_out)
        raise ValueError(
            f"fp8: include={unmatched[0]!r} matches no linear layer; there are for example {', '.join(examples[:3])}"
        )
    if not chosen:
        why = "; ".join(
            f"{name or 'the model'}: {reason}"
            for name, reason in list(left_out.items())[:5]
        )
        raise ValueError(
            f"fp8: no layer of {type(model).__name__} can be converted ({why or 'it has no linear layer'})"
        )
    # And so are those that leave nothing out, but for the usual names of heads.
    usual = Fp8Recipe().exclude
    for glob in recipe.exclude:
        if glob not in (*matched, *usual) and is_rank_0():
            logger.warning(
                "fp8: exclude has %r, which matches no linear layer; in FP8 are for example %s",
                glob,
                ", ".join(name for name, *_ in chosen[:3]),
            )
    return chosen, left_out


def _has_product(module: nn.Module) -> bool:
    """Return whether the module itself multiplies by a weight matrix, as far as its
    parameters show.

    Such modules are linear layers, and modules with matrices of their own that are
    neither embeddings nor convolutions.
    """
    if isinstance(module, _NO_PRODUCT):
        return False
    return any(
        parameter.ndim in (2, 3) for parameter in module.parameters(recurse=False)
    )


def _why_not(
    name: str,
    module: nn.Module,
    recipe: Fp8Recipe,
    holders: Mapping[int, list[str]],
    parts: int,
) -> str | None:
    """Return the reason why a module is not converted; None: it is."""
    # Phase 1: what the recipe says.
    if not any(fnmatch.fnmatchcase(name, glob) for glob in recipe.include):
        return f"not in include={list(recipe.include)}"
    for glob in recipe.exclude:
        if fnmatch.fnmatchcase(name, glob):
            return f"exclude has {glob!r}"
    # Phase 2: what can be multiplied in FP8 on tensor cores.
    weights = _weights(module)
    if not weights:
        return f"{type(module).__name__} has a forward of its own"
    for weight in weights:
        parameter = getattr(module, weight)
        if is_absent(parameter):
            return "it is on another pipeline stage"
        if isinstance(parameter, DTensor):
            return "its weight is sharded already"
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            return f"its weight is {parameter.dtype}"
        if any(size % (_ALIGNMENT * parts) for size in parameter.shape[-2:]):
            each = "" if parts == 1 else f" for each of {parts} tensor ranks"
            return f"its size {' x '.join(map(str, parameter.shape[-2:]))} is not in multiples of {_ALIGNMENT}{each}"
        shared = [other for other in holders[id(parameter)] if other != name]
        if shared:
            return f"its weight is shared with {shared[0]}"
    return None


def _weights(module: nn.Module) -> tuple[str, ...]:
    """List the parameters that the FP8 forward multiplies by; none where the class has
    no such forward."""
    kind = type(module)
    if kind is nn.Linear:
        return ("weight",)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return ("weight",)
    own = dict(module.named_parameters(recurse=False))
    if kind.__name__.endswith("Experts") and set(own) == {"gate_up_proj", "down_proj"}:
        up, down = own["gate_up_proj"], own["down_proj"]
        if _are_halves(up, down) and _has_known_forward(module):
            return ("gate_up_proj", "down_proj")
    return ()


_EXPERT_CALL = ["self", "hidden_states", "top_k_index", "top_k_weights"]


def _are_halves(up: Tensor, down: Tensor) -> bool:
    """Return whether the projections are [E, 2I, K] and [E, K, I], so not
    transposed."""
    return (
        up.ndim == down.ndim == 3
        and up.shape[1] == 2 * down.shape[2]
        and up.shape[2] == down.shape[1]
    )


def _has_known_forward(experts: nn.Module) -> bool:
    """Return whether fused experts compute as
    :class:`smp_core.fp8.linear._ExpertsForward`, halves side by side."""
    kind = type(experts)
    has_parts = callable(getattr(experts, "act_fn", None)) and isinstance(
        getattr(experts, "num_experts", None), int
    )
    others = ("is_transposed", "has_bias", "has_post_expert_norm")
    is_plain = getattr(experts, "is_concatenated", True) and not any(
        getattr(experts, flag, False) for flag in others
    )
    has_call = list(inspect.signature(kind.forward).parameters) == _EXPERT_CALL
    return has_parts and is_plain and _plain_gate(kind) and has_call


def _plain_gate(kind: type[nn.Module]) -> bool:
    """Return whether the experts gate as act(gate) * up: a class with another gate
    defines ``_apply_gate`` (Transformers' name) itself.
    """
    gate = getattr(kind, "_apply_gate", None)
    return gate is None or gate.__module__ == "transformers.integrations.moe"


def _site_name(module: str, parameter: str) -> str:
    if parameter == "weight":
        return module or parameter
    return f"{module}.{parameter}" if module else parameter


def _device(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    return torch.device("cpu")
