"""Knobs of a further run with a model that is sharded already: it stays as it is, and
other knobs for it would have no effect."""

from __future__ import annotations

import re
from operator import attrgetter

from smp_core.config import DEFAULTS, SmpConfig, contradictions
from smp_core.plan import Plan

# Settings that do not depend on how a model was sharded.
_OF_EACH_RUN = SmpConfig.settings_of("checkpoint")


def knobs_of_next_run(plan: Plan, asked: SmpConfig) -> SmpConfig:
    """Return the knobs in effect: the model's, but for the few that every run sets for
    itself.

    Raises:
        ValueError: a knob asks for something else than the model has.
    """
    config = kept = plan.knobs
    for name in SmpConfig.settings():
        # The default, the value in effect and what was asked then all mean "as it is".
        value, has = asked.asked(name), attrgetter(name)(kept)
        if name in _OF_EACH_RUN:
            config = config.with_resolved(name, value, "asked by this run")
        elif value not in (attrgetter(name)(DEFAULTS), has, kept.asked(name)):
            raise ValueError(
                f"{name}={value!r}: this model was sharded before with {name}={has!r} and keeps "
                "that; use the same value, or a new module and trainer.fit(..., ckpt_path=...)"
            )
    # Contradictions among other knobs were found when the model was sharded.
    names_one = re.compile("|".join(map(re.escape, _OF_EACH_RUN))).search
    wrong = [said for said in contradictions(config) if names_one(said)]
    if wrong:
        raise ValueError("\n".join(wrong))
    return config
