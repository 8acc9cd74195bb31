"""Knobs of a further run with a model that is sharded already: it stays as it is, and other knobs for it would have no
effect."""

from __future__ import annotations

from smp_core.config import SmpConfig
from smp_core.knob_rules import contradictions
from smp_core.planning.decide import Plan

# Knobs that do not depend on how a model was sharded.
_OF_EACH_RUN = ("save_full_state_dict", "async_save", "verify_checkpoint", "allow_batch_change")


def knobs_of_next_run(plan: Plan, asked: SmpConfig, model: str) -> SmpConfig:
    """The knobs in effect: the model's, but for the few that every run sets anew.

    Args:
        model: what it is called in messages.

    Raises:
        ValueError: a knob asks for something else than the model has.
    """
    config = kept = plan.knobs
    defaults, asked_before = SmpConfig().to_dict(), kept.to_dict()
    for knob, value in asked.to_dict().items():
        if knob in _OF_EACH_RUN:
            config = config.with_resolved(knob, value, "asked by this run")
        elif value not in (defaults[knob], getattr(kept, knob), asked_before[knob]):
            raise ValueError(
                f"{knob}={value!r}: this {model} was sharded before with {knob}={getattr(kept, knob)!r} and keeps "
                "that; use the same value, or a new module and trainer.fit(..., ckpt_path=...)"
            )
    wrong = [said for said in contradictions(config) if any(knob in said for knob in _OF_EACH_RUN)]
    if wrong:
        raise ValueError("\n".join(wrong))
    return config
