"""Rules for compilation: where there is nothing to compile, or nothing that could
be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from smp_core.config import Clash
from smp_core.plan import Finding, ModelDraft, Subject


def _came_sharded(draft: ModelDraft) -> str | None:
    return None if draft.given is None else "the model came sharded"


def _recomputes_split_layers(draft: ModelDraft) -> str | None:
    # torch makes one operator of a recomputed stretch, in which nothing may stay
    # outside of the graph.
    if draft.layout.tensor == 1 or not draft.activations.checkpointed:
        return None
    return "the compiler leaves out what is recomputed around split layers"


def _recomputes_dispatches(draft: ModelDraft) -> str | None:
    if draft.knobs.expert_parallel_degree == 1 or not draft.activations.checkpointed:
        return None
    return "the compiler leaves out what is recomputed around experts on several ranks"


class Compilation(Subject):
    """torch.compile of blocks, as one of the subjects."""

    name = "compilation"
    page = "configuration.md"
    knobs = ("compile",)
    optional = True
    apart = (
        Clash(
            "sharding",
            "models that came sharded: they are not compiled, with a warning",
            _came_sharded,
            "call .compile() on its blocks before it is sharded",
        ),
        Clash(
            "tensor parallelism",
            "recomputed blocks (`activations`): they are not compiled, with a warning",
            _recomputes_split_layers,
            "leave activations or compile out",
        ),
        Clash(
            "expert parallelism",
            "recomputed blocks (`activations`) with experts on several ranks: they are not compiled, with a warning",
            _recomputes_dispatches,
            "leave activations or compile out",
        ),
    )

    def settle(self, draft: ModelDraft) -> None:
        """Leave compilation out where there is nothing to compile, or nothing that
        could be."""
        blocks = draft.shapes.units
        # Of several reasons the first is reported.
        reasons = [
            f"{what}; {clash.instead}"
            for clash in self.apart
            if (what := clash.found(draft))
        ]
        if not blocks.blocks:
            reasons.append(
                f"there are no blocks ({blocks.why}); name them with units=[...]"
            )
        if draft.knobs.compile and reasons:
            draft.drop("compile", None, reasons[0])

    def machine(self) -> Iterator[Finding]:
        """Look for a C compiler."""
        compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
        fix = "torch.compile and Triton need one: install gcc"
        yield Finding.unless(
            compiler is not None, "C compiler", compiler or "none", fix
        )


COMPILATION = Compilation()
