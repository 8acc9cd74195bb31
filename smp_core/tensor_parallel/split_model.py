"""SplitModel: the parts of a model that are split over tensor ranks, and their
description. WholeGradients: gradients of replicated parameters, which have to be made
equal where sums are sent as codes.

A block of codes shares one scale, and blocks hold elements of several parameters: what
is rounded off a norm's gradient depends on the split weights beside it, which differ
between tensor ranks. The norms would drift apart. So the sums of the first tensor rank
are everyone's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from smp_core.tensor_parallel.blocks import BlockForward, Stack
from smp_core.tensor_parallel.loss import SplitLogits
from smp_core.tensor_parallel.operators import TensorAxis
from smp_core.tensor_parallel.roles import Split
from smp_core.tensor_parallel.unsplit_trial import ComparedForward
from smp_core.torch_facts import local_part


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model that was split, and what of it.

    Attributes:
        splits: every module that has a role.
        sequence_parallel: whether blocks hold 1/T of the tokens.
        split_loss: whether the training loss is computed from split logits.
        split_vocabulary: the logits of a head whose vocabulary is split; None: no head
            is.
        whole: names of parameters that every tensor rank holds whole.
        whole_elements: how many elements these have.
        in_pieces: how many layers are multiplied in pieces, behind messages.
        stacks, blocks: whose tokens may be split.
        compared: what is compared with the unsplit model outside of these.
    """

    axis: TensorAxis
    splits: tuple[Split, ...]
    sequence_parallel: bool
    split_loss: bool
    split_vocabulary: SplitLogits | None
    whole: tuple[str, ...]
    whole_elements: int
    in_pieces: int
    stacks: Sequence[Stack] = ()
    blocks: Sequence[BlockForward] = ()
    compared: Sequence[ComparedForward] = ()

    def stand_around_blocks(
        self, in_stages: bool = False, without_values: bool = False
    ) -> None:
        """Split and join tokens around blocks, from here on; when these were told to
        recompute.

        Args:
            in_stages: nothing stands between blocks; pipeline stages hand on 1/T of the
                tokens.
            without_values: nothing can be tried out; blocks are taken to compute the
                same with a part of their tokens.
        """
        # Pipeline stages hand on split tokens, so that the stacks need not learn it.
        for stack in self.stacks if in_stages or without_values else ():
            stack.know(without_values)
        # The block's forward may have become one that recomputes; ours stands around
        # that.
        for each in self.blocks:
            each.original, each.block.forward = each.block.forward, each
            each.unsplit = None if without_values else each.unsplit
        # Comparing with the unsplit model needs values.
        for module in self.compared if not without_values else ():
            module.original = module.module.forward
            module.module.forward = module

    def learn(self) -> None:
        """Let tokens stay split between blocks, where the last step showed that they
        can. Collective over the axis; when a step's gradients are complete."""
        for stack in self.stacks:
            stack.learn()

    def describe(self) -> str:
        """Return one line for people."""
        # How many layers have each role.
        counts: dict[str, int] = {}
        for split in self.splits:
            counts[split.role] = counts.get(split.role, 0) + 1
        layers = ", ".join(f"{count} {role}" for role, count in counts.items())
        tokens = "tokens split in blocks" if self.sequence_parallel else "tokens whole"
        loss = ", loss over split logits" if self.split_loss else ""
        pieces = (
            f", {self.in_pieces} of them multiplied in pieces"
            if self.axis.overlap != "sums"
            else ""
        )
        return (
            f"layers over {self.axis.degree} ranks: {layers}{pieces}; {tokens}{loss}; "
            f"{self.whole_elements:,} parameters whole on every tensor rank"
        )


class WholeGradients:
    """Gradients of parameters that are whole on every rank of a tensor axis.

    Args:
        device: where collectives run.
        stepped: what an optimizer steps in the place of these parameters: themselves,
            or masters.
    """

    def __init__(
        self,
        axis: TensorAxis,
        device: torch.device,
        stepped: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._axis = axis
        self._device = device
        self._stepped = stepped

    @torch.no_grad()
    def take_the_first_ranks(self) -> None:
        """Let every rank have those of the first. Collective over the axis; all ranks
        have gradients of the same."""
        # One message for all parameters, in the order of the optimizer, which is that
        # of every rank.
        gradients = [
            tensor.grad for tensor in self._stepped() if tensor.grad is not None
        ]
        locals_ = [local_part(each) for each in gradients]
        if not locals_:
            return
        flat = torch.cat([each.reshape(-1) for each in locals_]).to(self._device)
        # The sum of one rank's values and zeros is a broadcast that every backend has.
        if self._axis.rank != 0:
            flat.zero_()
        total = self._axis.all_reduce(flat)
        for each, of_first in zip(
            locals_, total.split([each.numel() for each in locals_]), strict=True
        ):
            each.copy_(of_first.view_as(each))
