"""Play random runs again, and make what fails small.

python -m tests.core.fuzz.replay 17                   the case of a seed
python -m tests.core.fuzz.replay CASE.json --shrink   a case from a file (or as text), with what it does not need
                                                      taken away
python -m tests.core.fuzz.replay --from 60 --to 2000  many; says what fails, and how many were refused
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.core.fuzz.cases import Case, objection
from tests.core.fuzz.drawing import draw
from tests.core.fuzz.running import Outcome, play_all, play_alone
from tests.harness import close_pools


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest things first."""
    script = case.script
    size = max(len(script) // 2, 1)
    while size:
        for first in range(0, len(script), size):
            yield dataclasses.replace(
                case, script=script[:first] + script[first + size :]
            )
        size //= 2
    if case.world > 1:
        for world, per_node in ((1, 1), (2, 2), (2, 1), (4, 2)):
            if (world, -per_node) < (case.world, -case.ranks_per_node):
                yield dataclasses.replace(case, world=world, ranks_per_node=per_node)
    for knob in case.knobs:
        if knob != "shard_degree":
            yield dataclasses.replace(
                case,
                knobs={key: value for key, value in case.knobs.items() if key != knob},
            )
    for number, spec in enumerate(case.optimizers):
        plain = {
            **spec,
            "kind": "SGD",
            "kernels": "default",
            "groups": [],
            "late": None,
            "frozen": True,
        }
        for key, value in plain.items():
            if spec[key] != value:
                changed = [*case.optimizers]
                changed[number] = {**spec, key: value}
                yield dataclasses.replace(case, optimizers=changed)
    for number, op in enumerate(script):
        for changed_op in _smaller_operations(op):
            yield dataclasses.replace(
                case, script=[*script[:number], changed_op, *script[number + 1 :]]
            )


def _smaller_operations(op: dict[str, Any]) -> Iterator[dict[str, Any]]:
    plain = {
        "hold": False,
        "calls": 1,
        "twice": False,
        "around": "pass",
        "rows": [1],
        "of": None,
        "eval": False,
    }
    plain |= {"meanwhile": "nothing"}
    for field, value in plain.items():
        if (
            field in op
            and op[field] != value
            and (op["do"], field) != ("step_with_closure", "of")
        ):
            yield {**op, field: value}
    if len(op.get("paths", ())) > 1:
        yield {**op, "paths": op["paths"][:1], "vary": "same"}
    for path in op.get("paths", ()):
        for step in path.split():
            yield {
                **op,
                "paths": [each.replace(step, "").strip() for each in op["paths"]],
            }
    if op.get("knobs"):
        for knob in op["knobs"]:
            if knob != "shard_degree":
                yield {
                    **op,
                    "knobs": {
                        key: value for key, value in op["knobs"].items() if key != knob
                    },
                }


def shrink(outcome: Outcome) -> Outcome:
    """The smallest case on the way down that still fails, in whatever way."""
    found = True
    while found:
        found = False
        for case in smaller(outcome.case):
            if case == outcome.case or objection(case) is not None:
                continue
            try:
                tried = play_alone(case)
            except Exception:  # what is left is nothing that one process could do
                continue
            if tried.problem:
                outcome, found = tried, True
                print(
                    f"{len(case.script)} operations, {len(case.knobs)} knobs: {_last(tried)}",
                    flush=True,
                )
                break
    return outcome


def _last(outcome: Outcome) -> str:
    """The line of a problem that says most."""
    lines = [
        line
        for line in (outcome.problem or "").splitlines()
        if "Error" in line or "operation" in line
    ]
    return (lines[-1] if lines else (outcome.problem or ""))[:300]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "case", nargs="?", help="a seed, a file with a case, or its JSON"
    )
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--from", dest="first", type=int)
    parser.add_argument("--to", dest="end", type=int)
    given = parser.parse_args()
    if given.case is None:
        return _many(given.first or 0, given.end)
    if given.case.isdigit():
        case = draw(int(given.case))
    else:
        case = Case.from_json(
            given.case if given.case.startswith("{") else Path(given.case).read_text()
        )
    print(json.dumps(dataclasses.asdict(case), indent=1))
    reason = objection(case)
    if reason is not None:
        print(f"beyond the limits: {reason}")
    outcome = play_alone(case)
    if outcome.problem and given.shrink:
        outcome = shrink(outcome)
    print(outcome if outcome.problem or outcome.refused else "as in one process")
    return int(outcome.problem is not None)


def _many(first: int, end: int) -> int:
    failed = refused = 0
    for start in range(first, end, 50):
        for outcome in play_all(
            draw(seed) for seed in range(start, min(start + 50, end))
        ):
            failed += outcome.problem is not None
            refused += outcome.refused is not None
            if outcome.problem or outcome.refused:
                print(
                    f"seed {outcome.case.seed}: {_last(outcome) or outcome.refused}",
                    flush=True,
                )
        print(
            f"-- seeds {first} to {min(start + 50, end) - 1}: {failed} failed, {refused} refused",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        close_pools()
