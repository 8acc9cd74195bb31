"""Cases from seeds, so that between them everything occurs.

A case is drawn until it keeps to the limits and has the features that its seed has to
provide: `features` in order, a few for each seed. So the first `NORMAL` seeds have
every value of every knob, every operation in each of its forms, every model and every
optimizer, whatever is added. From there on every second seed draws a case of events and
branches (``mixed``): replicas take other ways through models whose parts are frozen,
thawed, merged, dropped and given to other groups between steps and inside windows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from smp_core.config import SmpConfig
from tests.core.fuzz.cases import KNOBS, Case, objection, value_of
from tests.core.fuzz.families import FAMILIES, WITH_ADAPTERS, Family
from tests.core.fuzz.operations import OPERATIONS
from tests.core.fuzz.optimizers import IN_STEP_WITH_ROUNDING, KERNELS, KINDS

NORMAL = 60
MIXED = range(NORMAL + 1, NORMAL + 21, 2)
ATTEMPTS = 2_000

# (ranks, ranks per node) and how often.
LAYOUTS = {(1, 1): 4, (2, 1): 9, (2, 2): 8, (4, 2): 3, (4, 1): 1, (4, 4): 1}
LAYOUTS_OF_REPLICAS = {(4, 2): 3, (4, 1): 2, (4, 4): 2, (2, 1): 1, (2, 2): 1}

# Knobs that mean something only beside others; where those are not there, they are
# seldom drawn.
_NEEDS = {
    "keep_between_micro_batches": lambda knobs: (
        knobs.get("reshard_after_forward") in (None, False)
    ),
    "activations.check": lambda knobs: "activations.checkpoint" in knobs,
    "activations.offload": lambda knobs: "activations.checkpoint" in knobs,
    "activations.loading_horizon": lambda knobs: "activations.offload" in knobs,
    "activations.offload_min_bytes": lambda knobs: "activations.offload" in knobs,
    "activations.offload_host_gib": lambda knobs: "activations.offload" in knobs,
    "compression.gather_inside_nodes": lambda knobs: "compression.gather" in knobs,
    "compression.gather_after_steps": lambda knobs: "compression.gather" in knobs,
    "compression.gather_exclude": lambda knobs: "compression.gather" in knobs,
    "collectives.reduce_scatter_buffers": lambda knobs: knobs.get("shard_degree") == 1,
    "collectives.separate_reduce_scatter_group": lambda knobs: (
        knobs.get("shard_degree") == 1
    ),
    "collectives.symmetric_memory": lambda knobs: knobs.get("shard_degree") == 1,
}
# How often a knob is not at its default, with and without what it needs.
_OFTEN, _SELDOM = 0.2, 0.002
# The knobs of mixed cases, and how often they are not at their defaults.
_MIXED_KNOBS = {
    "units.modules": 0.7,
    "units.min_parameters": 0.2,
    "units.optional": 0.15,
    "keep_between_micro_batches": 0.5,
    "reshard_after_forward": 0.3,
    "param_dtype": 0.35,
    "optimizer_shard": 0.2,
    "state_offload": 0.15,
    "forward_methods": 0.2,
    "activations.checkpoint": 0.1,
    "collectives.hierarchical": 0.1,
    "on_nonfinite_grad_norm": 0.1,
}

_VARIETIES = ("same", "by replica", "by rank")


def features() -> list[str]:
    """Everything that has to occur, by name."""
    tables: dict[str, list[Any]] = {
        "layout": list(LAYOUTS),
        "model": [
            (name, entry)
            for name, family in FAMILIES.items()
            for entry in family.entries
        ],
        **{knob: list(kinds) for knob, kinds in KNOBS.items()},
        "optimizer": list(KINDS),
        "kernels": list(KERNELS),
        "groups": [True, False],
        "late group": [True, False],
        "paths": list(_VARIETIES),
        "do": list(OPERATIONS),
        "load into": ["the same", "new ones"],
    }
    for name, operation in OPERATIONS.items():
        tables |= {
            f"{name} {field}": list(choices)
            for field, choices in operation.choices.items()
        }
    return [f"{name}={value}" for name, values in tables.items() for value in values]


def features_of(case: Case) -> set[str]:
    family = FAMILIES[case.model]
    found = {f"layout={case.layout}", f"model={(case.model, case.entry)}"}
    for knob, kinds in KNOBS.items():
        found.add(
            f"{knob}={_kind_of(knob, case.knobs[knob], family) if knob in case.knobs else kinds[0]}"
        )
    does = {op["do"] for op in case.script}
    for spec in case.optimizers:
        found |= {
            f"optimizer={spec['kind']}",
            f"kernels={spec['kernels']}",
            f"groups={bool(spec['groups'])}",
        }
        found.add(f"late group={spec['late'] is not None and 'add_group' in does}")
    for op in case.script:
        found.add(f"do={op['do']}")
        found |= {
            f"{op['do']} {field}={op[field]}" for field in OPERATIONS[op["do"]].choices
        }
        if "paths" in op:
            found.add(f"paths={op['vary']}")
        if op["do"] == "load":
            found.add(f"load into={'the same' if op['knobs'] is None else 'new ones'}")
    return found


def _kind_of(knob: str, value: Any, family: Family) -> Any:
    for kind in KNOBS[knob]:
        made = value_of(knob, kind, family)
        if type(made) is type(value) and made == value:
            return kind
    raise AssertionError(f"{knob}={value!r} is not in KNOBS")


@cache
def _provided_by(seed: int) -> frozenset[str]:
    """What the seed has to provide; features that are neighbours in the list, and may
    exclude each other, are provided by different seeds."""
    return frozenset(
        name
        for number, name in enumerate(features())
        if number % NORMAL == seed % NORMAL
    )


def draw(seed: int) -> Case:
    """The case of a seed.

    Raises:
        AssertionError: no case has what this seed has to provide, or a knob was refused
            by a message that names none.
    """
    rng = random.Random(seed)
    mixed = seed > NORMAL and seed % 2 == 1
    wanted = set() if mixed else set(_provided_by(seed % NORMAL))
    for attempt in range(1, ATTEMPTS + 1):
        if attempt % (ATTEMPTS // 4) == 0 and len(wanted) > 1:
            # Two may exclude each other: test_everything_occurs sees whether one is
            # lost.
            wanted.remove(max(wanted))
        case = _Drawing(rng, frozenset(wanted), mixed).draw(seed)
        if wanted <= features_of(case):
            reason = objection(case)
            if reason is None:
                return case
            names_a_knob = any(knob in reason for knob in SmpConfig.knobs())
            assert names_a_knob or not reason.startswith("refused"), (
                f"a refusal that names no knob: {reason}"
            )
    raise AssertionError(
        f"seed {seed}: nothing drawn in {ATTEMPTS} attempts has {sorted(wanted)}"
    )


class _Drawing:
    """One case: what is wanted is chosen more often than by chance."""

    def __init__(self, rng: random.Random, wanted: frozenset[str], mixed: bool) -> None:
        self._rng, self._wanted, self._mixed = rng, wanted, mixed
        layouts = LAYOUTS_OF_REPLICAS if mixed else LAYOUTS
        self._layout = self._choose("layout", list(layouts), list(layouts.values()))
        members = {
            name: family
            for name, family in FAMILIES.items()
            if family.differs or not mixed
        }
        models = [
            (name, entry)
            for name, family in members.items()
            for entry in family.entries
        ]
        self._model, self._entry = self._choose("model", models)
        self._family = FAMILIES[self._model]
        self._knobs = self._draw_knobs()
        self._data = 0
        self._saved = 0

    def draw(self, seed: int) -> Case:
        optimizers = [self._optimizer(part) for part in self._family.parts]
        script = list(self._script())
        return Case(
            seed,
            *self._layout,
            self._model,
            self._entry,
            self._knobs,
            optimizers,
            script,
        )

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _choose(
        self, name: str, choices: Sequence[Any], weights: Sequence[int] | None = None
    ) -> Any:
        wanted = [choice for choice in choices if f"{name}={choice}" in self._wanted]
        if wanted and self._chance(0.8):
            return self._rng.choice(wanted)
        return self._rng.choices(choices, weights)[0]

    def _draw_knobs(self) -> dict[str, Any]:
        world, family = self._layout[0], self._family
        degrees = [
            degree
            for degree in KNOBS["shard_degree"]
            if isinstance(degree, str) or degree <= world
        ]
        if self._mixed:  # several replicas
            degrees = [degree for degree in (1, 2, 2) if degree < world]
        knobs: dict[str, Any] = {"shard_degree": self._choose("shard_degree", degrees)}
        for knob, kinds in KNOBS.items():
            needs = _NEEDS.get(knob, lambda knobs: True)
            often = (
                (0.5 if knob in _NEEDS or knob == "units.modules" else _OFTEN)
                if needs(knobs)
                else _SELDOM
            )
            if self._mixed:
                often = _MIXED_KNOBS.get(knob, 0.0)
            wanted = any(f"{knob}={kind}" in self._wanted for kind in kinds[1:])
            if knob == "shard_degree" or not (wanted or self._chance(often)):
                continue
            kind = self._choose(knob, kinds[1:])
            value = value_of(knob, kind, family)
            if value != []:
                knobs[knob] = value
        return knobs

    def _optimizer(self, part: str) -> dict[str, Any]:
        patterns = [
            pattern
            for pattern in self._family.patterns
            if pattern.startswith(part) or pattern == "bias"
        ]
        options: list[dict[str, Any]] = [{"weight_decay": 0.0}, {"lr": 0.03}]
        in_half = self._knobs.get("param_dtype") == "bfloat16"
        return {
            "kind": self._choose(
                "optimizer", list(IN_STEP_WITH_ROUNDING if in_half else KINDS)
            ),
            "kernels": self._choose("kernels", KERNELS),
            "part": part,
            "groups": [[self._rng.choice(patterns), self._rng.choice(options)]]
            if self._chance(0.5)
            else [],
            "late": self._rng.choice(patterns)
            if self._choose("late group", (True, False), (1, 3))
            else None,
            "frozen": self._chance(0.5),
        }

    def _script(self) -> Iterator[dict[str, Any]]:
        """The operations of a training: steps of micro-batches, with events between
        them."""
        for _ in range(self._rng.randint(2, 4)):
            yield from self._events(0.55 if self._mixed else 0.3)
            micro_batches = self._rng.choice([1, 1, 2, 3])
            for number in range(micro_batches):
                last = number == micro_batches - 1
                yield self._micro(hold=not last or self._chance(0.1))
                yield from self._events(0.15 if last else 0.5 if self._mixed else 0.3)
            if self._chance(0.4):
                yield from self._clip()
            yield from self._step()
            if self._chance(0.85):
                yield from self._zero()

    def _events(self, probability: float) -> Iterator[dict[str, Any]]:
        while self._chance(probability):
            wanted = [
                name
                for name in _EVENTS
                if any(each.startswith((f"do={name}", name)) for each in self._wanted)
            ]
            if wanted and self._chance(0.5):
                event = self._rng.choice(wanted)
            else:
                events = _MIXED_EVENTS if self._mixed else _EVENTS
                event = self._rng.choices(list(events), list(events.values()))[0]
            yield from getattr(self, f"_{event}")()

    def _field(self, name: str, field: str) -> Any:
        return self._choose(f"{name} {field}", OPERATIONS[name].choices[field])

    def _batch(self) -> dict[str, Any]:
        """Which ways through the model the ranks go: those of one partition group
        through the same units."""
        self._data += 1
        world, per_node = self._layout
        family, vary = (
            self._family,
            self._choose("paths", _VARIETIES, (1, 6, 1) if self._mixed else None),
        )
        every_rank = vary == "by rank" and bool(self._knobs.get("units.optional"))
        if not family.differs or (
            vary == "by rank" and not family.other_ways and not every_rank
        ):
            vary = "same"
        degree = {"node": per_node, "world": world}.get(
            self._knobs["shard_degree"], self._knobs["shard_degree"]
        )
        groups = (
            world if every_rank else 1 if vary == "same" else max(world // degree, 1)
        )
        of_groups = [
            family.paths(self._rng, bool(self._knobs.get("forward_methods")))
            for _ in range(groups)
        ]
        paths = (
            [of_groups[rank * groups // world] for rank in range(world)]
            if groups > 1
            else of_groups
        )
        if vary == "by rank" and not every_rank:
            paths = [
                family.other_ways(self._rng, paths[rank % len(paths)])
                for rank in range(world)
            ]
        return {
            "data": self._data,
            "rows": [self._rng.randint(1, 3) for _ in range(world)],
            "vary": vary,
            "paths": paths,
        }

    def _micro(self, hold: bool) -> dict[str, Any]:
        in_half = self._knobs.get("param_dtype") == "bfloat16"
        calls, twice = 2 if self._chance(0.1) and not in_half else 1, self._chance(0.1)
        meanwhile = (
            self._field("micro", "meanwhile") if self._chance(0.15) else "nothing"
        )
        return {
            "do": "micro",
            **self._batch(),
            "hold": hold,
            "calls": calls,
            "twice": twice,
            "around": self._field("micro", "around"),
            "meanwhile": meanwhile,
            "what": self._pattern(),
        }

    def _some_optimizer(self) -> int | None:
        parts = len(self._family.parts)
        return self._rng.choice([None, *range(parts)]) if parts > 1 else None

    def _pattern(self) -> str:
        return self._rng.choice(self._family.patterns)

    def _zero(self) -> Iterator[dict[str, Any]]:
        yield {
            "do": "zero",
            "how": self._field("zero", "how"),
            "of": self._some_optimizer(),
        }

    def _clip(self) -> Iterator[dict[str, Any]]:
        of = (
            self._some_optimizer()
            if self._entry != "apart"
            else self._rng.randrange(len(self._family.parts))
        )
        yield {
            "do": "clip",
            "how": self._field("clip", "how"),
            "max": self._rng.choice([0.02, 0.1, 10.0]),
            "of": of,
        }

    def _step(self) -> Iterator[dict[str, Any]]:
        if self._chance(0.5 if "do=step_with_closure" in self._wanted else 0.07):
            yield {
                "do": "step_with_closure",
                **self._batch(),
                "of": self._rng.randrange(len(self._family.parts)),
            }
        else:
            yield {"do": "step", "of": self._some_optimizer()}

    def _round_trip(self) -> Iterator[dict[str, Any]]:
        yield {"do": "round_trip"}

    def _norm(self) -> Iterator[dict[str, Any]]:
        yield {"do": "norm", "type": self._field("norm", "type")}

    def _freeze(self) -> Iterator[dict[str, Any]]:
        yield {
            "do": "freeze",
            "what": self._pattern(),
            "trainable": self._field("freeze", "trainable"),
        }

    def _merge(self) -> Iterator[dict[str, Any]]:
        if self._model in WITH_ADAPTERS:
            yield {"do": "merge", "enabled": self._field("merge", "enabled")}

    def _evaluate(self) -> Iterator[dict[str, Any]]:
        mode, evaluation = (
            self._field("evaluate", "mode"),
            self._field("evaluate", "eval"),
        )
        yield {"do": "evaluate", **self._batch(), "mode": mode, "eval": evaluation}

    def _edit(self) -> Iterator[dict[str, Any]]:
        yield {"do": "edit", "what": self._pattern(), "how": self._field("edit", "how")}

    def _fail(self) -> Iterator[dict[str, Any]]:
        where, hold = self._field("fail", "where"), self._field("fail", "hold")
        yield {
            "do": "fail",
            **self._batch(),
            "module": self._rng.choice(_modules(self._model)),
            "where": where,
            "hold": hold,
        }

    def _overflow(self) -> Iterator[dict[str, Any]]:
        if self._knobs.get("on_nonfinite_grad_norm", "ignore") != "ignore":
            yield {
                "do": "overflow",
                **self._batch(),
                "rank": self._rng.randrange(self._layout[0]),
            }

    def _abandon(self) -> Iterator[dict[str, Any]]:
        yield {"do": "abandon"}

    def _close(self) -> Iterator[dict[str, Any]]:
        yield {"do": "close"}

    def _learning_rate(self) -> Iterator[dict[str, Any]]:
        yield {"do": "learning_rate", "by": 0.5}

    def _add_group(self) -> Iterator[dict[str, Any]]:
        yield {"do": "add_group"}

    def _save(self) -> Iterator[dict[str, Any]]:
        self._saved += 1
        yield {"do": "save", "name": f"save {self._saved}"}

    def _load(self) -> Iterator[dict[str, Any]]:
        if not self._saved:
            yield from self._save()
        into = self._choose("load into", ("the same", "new ones"))
        knobs = None if into == "the same" else self._draw_knobs()
        yield {
            "do": "load",
            "name": f"save {self._rng.randint(1, self._saved)}",
            "knobs": knobs,
        }


@cache
def _modules(model: str) -> list[str]:
    return [name for name, _ in FAMILIES[model].on_meta().named_modules() if name]


# Events between micro-batches, by the names of `_Script`'s methods, and how often.
_EVENTS = {
    "freeze": 5,
    "merge": 2,
    "evaluate": 5,
    "edit": 3,
    "zero": 3,
    "norm": 2,
    "fail": 2,
    "overflow": 3,
    "abandon": 1,
    "close": 1,
    "learning_rate": 1,
    "round_trip": 1,
    "add_group": 2,
    "save": 1,
    "load": 4,
}
_MIXED_EVENTS = {
    "freeze": 8,
    "merge": 3,
    "evaluate": 2,
    "edit": 1,
    "zero": 2,
    "fail": 2,
    "overflow": 1,
    "abandon": 1,
    "close": 1,
    "add_group": 2,
    "save": 1,
    "load": 1,
}
