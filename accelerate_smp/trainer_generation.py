"""What TRL's trainers that generate (GRPO, RLOO) count by processes, where several ranks
hold one batch.

    generation_batch_size       TRL counts all processes; prompts would be skipped and others taken twice
    gather, gather_object       Accelerate's functions, which give one part for each process, while TRL takes its own
                                at `accelerator.process_index`: the advantages of another batch
    set_seed                    another one on each process, so that ranks of one batch would sample other tokens
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather, gather_object, set_seed

from smp_core.cluster import GRADIENTS
from smp_core.torch_facts import is_rank_0

if TYPE_CHECKING:
    from accelerate_smp.accelerator import SmpAccelerator

logger = logging.getLogger("smp")


def count_readers(args: Any, accelerator: SmpAccelerator) -> None:
    """Set the samples that are generated at once to those of the ranks that read
    different samples.

    Raises:
        ValueError: they are no whole groups of completions; ranks share sequences,
            which TRL's batches of prompts and completions do not allow.
    """
    steps = getattr(args, "steps_per_generation", None)
    if steps is None or accelerator.batch_degree == 1:
        return
    if accelerator.context_degree > 1:
        raise ValueError(
            f"context_parallel_degree={accelerator.context_degree}: a trainer that generates reads whole sequences; "
            "write context_parallel_degree=1, and tensor_parallel_degree where a rank needs less memory"
        )
    readers = accelerator.data_size
    generated = args.per_device_train_batch_size * readers * steps
    _require_whole_groups(
        args,
        "train",
        generated,
        args.num_generations,
        readers,
        " or steps_per_generation",
    )
    if args.eval_strategy != "no":
        evaluated = args.per_device_eval_batch_size * readers
        group = getattr(args, "num_generations_eval", None) or args.num_generations
        _require_whole_groups(args, "eval", evaluated, group, readers)
    if generated != args.generation_batch_size and is_rank_0():
        logger.warning(
            "generation_batch_size is %d, not %d: only %d of %d ranks read different samples",
            generated,
            args.generation_batch_size,
            readers,
            args.world_size,
        )
    args.generation_batch_size = generated


def _require_whole_groups(
    args: Any, mode: str, generated: int, group: int, readers: int, or_what: str = ""
) -> None:
    name = f"per_device_{mode}_batch_size"
    if generated % group:
        raise ValueError(
            f"{name}={getattr(args, name)}: {readers} of {args.world_size} ranks read different samples and generate "
            f"{generated} completions at once, no whole groups of num_generations={group}; write a {name}{or_what} "
            "that makes it a multiple"
        )


def seed_readers(args: Any, accelerator: SmpAccelerator) -> None:
    """Seed the ranks of one batch alike, which TRL has seeded by process."""
    if hasattr(args, "steps_per_generation") and accelerator.batch_degree > 1:
        set_seed(args.seed + accelerator.data_rank)


@contextlib.contextmanager
def gathering_once(trainer: Any) -> Iterator[None]:
    """Let TRL's modules, and those of the trainer's classes, gather one copy of what
    ranks of one batch hold."""
    accelerator: SmpAccelerator = trainer.accelerator
    if accelerator.batch_degree == 1:
        yield
        return

    def objects(found: list[Any]) -> list[Any]:
        assert accelerator.layout is not None
        holds = accelerator.state.process_index in accelerator.layout.ranks(
            0, *GRADIENTS
        )
        return gather_object(found if holds else [])  # type: ignore[no-any-return]

    ours = {
        "gather": (gather, accelerator.gather),
        "gather_object": (gather_object, objects),
    }
    own = {kind.__module__ for kind in type(trainer).__mro__}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "trl" and module_name not in own:
            continue
        # Their names were bound when they were imported.
        names = vars(module)
        for name, (stock, mine) in ours.items():
            if names.get(name) is stock:
                replaced.append((names, name, stock))
                names[name] = mine
    try:
        yield
    finally:
        for names, name, stock in replaced:
            names[name] = stock
