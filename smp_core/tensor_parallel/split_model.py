"""SplitModel: what of a model is split over tensor ranks, also in words."""

from __future__ import annotations

from dataclasses import dataclass

from smp_core.tensor_parallel.loss import SplitLogits
from smp_core.tensor_parallel.operators import TensorAxis
from smp_core.tensor_parallel.roles import Split


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model that was split, and what of it.

    Attributes:
        splits: every module that has a role.
        sequence_parallel: whether blocks hold 1/T of the tokens.
        split_loss: whether the training loss is computed from split logits.
        split_vocabulary: the logits of a head whose vocabulary is split; None: no head is.
        whole: names of parameters that every tensor rank holds whole.
        whole_elements: how many elements these have.
        in_pieces: how many layers are multiplied in pieces, behind messages.
    """

    axis: TensorAxis
    splits: tuple[Split, ...]
    sequence_parallel: bool
    split_loss: bool
    split_vocabulary: SplitLogits | None
    whole: tuple[str, ...]
    whole_elements: int
    in_pieces: int

    def describe(self) -> str:
        """Return one line for people."""
        counts: dict[str, int] = {}
        for split in self.splits:
            counts[split.role] = counts.get(split.role, 0) + 1
        layers = ", ".join(f"{count} {role}" for role, count in counts.items())
        tokens = "tokens split in blocks" if self.sequence_parallel else "tokens whole"
        loss = ", loss over split logits" if self.split_loss else ""
        pieces = f", {self.in_pieces} of them multiplied in pieces" if self.axis.overlap != "sums" else ""
        return (
            f"layers over {self.axis.degree} ranks: {layers}{pieces}; {tokens}{loss}; "
            f"{self.whole_elements:,} parameters whole on every tensor rank"
        )
