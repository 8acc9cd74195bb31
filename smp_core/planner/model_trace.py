"""ModelTrace: what a model's blocks and the rest of it compute, move and keep, for any
number of samples and tokens. Measured by :mod:`smp_core.planner.trace`, which says what
is counted."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch

from smp_core.plan import Shapes


@dataclass(frozen=True)
class Figures:
    """Counts of one micro-batch: FLOPs and bytes as the module says.

    Attributes:
        forward_moved, backward_moved: bytes of what operators beside products read and
            write, one by one.
        forward_fused, backward_fused: the same where a compiler makes those between two
            products one kernel.
        forward_experts, backward_experts: FLOPs of grouped products, which no other
            product counts.
        forward_weights, backward_weights: bytes of all experts' matrices that these
            read or make, however few the rows.
        forward_operands, backward_operands: bytes of activations and their gradients
            that products, but for grouped ones, read and write.
        forward_matrices, backward_matrices: the same of parameters and their gradients.
        full_attention: FLOPs of attention in forward with those above the diagonal, by
            the convention of MFU.
        keys: bytes of keys and values that forward's attention reads.
        kept: the highest bytes of activations until backward reaches the last block.
        left: bytes of activations that are there between forward and backward.
    """

    forward_products: float = 0.0
    forward_attention: float = 0.0
    forward_moved: float = 0.0
    forward_fused: float = 0.0
    forward_experts: float = 0.0
    forward_weights: float = 0.0
    forward_operands: float = 0.0
    forward_matrices: float = 0.0
    backward_products: float = 0.0
    backward_attention: float = 0.0
    backward_moved: float = 0.0
    backward_fused: float = 0.0
    backward_experts: float = 0.0
    backward_weights: float = 0.0
    backward_operands: float = 0.0
    backward_matrices: float = 0.0
    full_attention: float = 0.0
    keys: float = 0.0
    kept: float = 0.0
    left: float = 0.0

    def of_experts_over(self, degree: int) -> Figures:
        """Return the figures of a rank that has one of so many parts of the experts,
        and as many rows."""
        if degree == 1:
            return self
        # Rows stay as many with a balanced router; only the matrices that are read are
        # fewer.
        shares = {
            name: getattr(self, name) / degree
            for name in ("forward_weights", "backward_weights")
        }
        return replace(self, **shares)

    def compiled(self) -> Figures:
        """Return the figures of what is compiled."""
        return replace(
            self, forward_moved=self.forward_fused, backward_moved=self.backward_fused
        )

    def combined(
        self, other: Figures, weigh: Callable[[float, float], float]
    ) -> Figures:
        names = [field.name for field in fields(self)]
        return Figures(
            **{name: weigh(getattr(self, name), getattr(other, name)) for name in names}
        )


@dataclass(frozen=True)
class Curve:
    """Figures at any number of samples and tokens, through those at (1, s), (2, s) and
    (1, s / 2)."""

    tokens: int
    one: Figures
    two: Figures
    half: Figures
    _known: dict[tuple[int, float], Figures] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def compiled(self) -> Curve:
        return Curve(
            self.tokens, self.one.compiled(), self.two.compiled(), self.half.compiled()
        )

    def at(self, samples: int, tokens: float) -> Figures:
        """Return the figures of ``samples`` sequences of ``tokens`` tokens each."""
        place = (samples, tokens)
        if place not in self._known:
            self._known[place] = self._through(samples, tokens)
        return self._known[place]

    def _through(self, samples: int, tokens: float) -> Figures:
        s = self.tokens

        def value(name: str) -> float:
            # Matrices are read once, however large the batch.
            if name.endswith(("_weights", "_matrices")):
                return float(getattr(self.one, name))
            one, two, half = (
                getattr(figures, name) for figures in (self.one, self.two, self.half)
            )
            # Three measurements give three unknowns of s (a + b (c + d s)).
            of_sample = two - one  # b s (c + d s) at b = 1
            shared = (one - of_sample) / s  # a
            of_half = half - shared * s / 2
            square = 2 * (of_sample - 2 * of_half) / (s * s)  # d
            linear = of_sample / s - square * s  # c
            return max(tokens * (shared + samples * (linear + square * tokens)), 0.0)

        return Figures(**{field.name: value(field.name) for field in fields(Figures)})


# Batches, sequences (as shares of the traced one), and shares of activations that a
# rank holds, for which the highest instants are looked for.
_SAMPLES = (1, 2, 4, 16, 64)
_LENGTHS = (1 / 8, 1 / 2, 1.0)
_SHARES = (1.0, 0.25, 1 / 16)


Instant = tuple[int, int, int, str]
"""After an operation: blocks that backward has come to, bytes of activations and of
gradients, the operation."""

_Pair = tuple[float, float]
_Place = tuple[int, int, float, _Pair]

LEFT, FORWARD = 3, 4
"""Stand for backward that has left the first block, and for forward."""


@dataclass(frozen=True)
class Instants:
    """The instants of a step of two blocks at which memory can be at its highest.

    Attributes:
        points: for 0, 1 and 2 blocks that backward has come to, from the last, after it
            has left both, and in forward: bytes of activations for (1, s), (2, s) and
            (1, s / 2) samples and tokens, and bytes of gradients, which depend on
            neither.
        kept: bytes of activations that a block keeps of its forward, for the same; of
            split layers.
        attending: as points, after each of attention's operators, and whether it is
            backward's.
    """

    tokens: int
    points: tuple[tuple[tuple[float, float, float, float], ...], ...]
    kept: tuple[float, ...] = (0.0, 0.0, 0.0)
    attending: tuple[tuple[tuple[float, float, float, float, bool], ...], ...] = (
        (),
    ) * (FORWARD + 1)
    _known: dict[_Place, _Pair] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        tokens: int,
        *runs: list[Instant],
        kept: tuple[float, ...] = (0.0, 0.0, 0.0),
    ) -> Instants:
        """Keep what can be the highest of what three runs had after each operation that
        all of them have."""
        found: list[tuple[tuple[float, float, float, float], ...]] = []
        attending: list[tuple[tuple[float, float, float, float, bool], ...]] = []
        for reached in range(FORWARD + 1):
            rows = _of_the_same([_while(reached, run) for run in runs])
            # No instant is of this part in all three runs.
            if not rows:
                found.append(((0.0, 0.0, 0.0, 0.0),))
                attending.append(())
                continue
            # Activations grow with the batch and are kept for three sizes; gradients do
            # not.
            lives = [(one[1], two[1], half[1]) for one, two, half in rows]
            held = [one[2] for one, *_ in rows]
            # Which instants are the highest depends on the batch, and on how much of
            # activations a rank holds.
            highest = set()
            for samples, length, share in itertools.product(
                _SAMPLES, _LENGTHS, _SHARES
            ):
                # Weights of the three runs at this batch, as this share of activations.
                x, y, z = (share * weight for weight in _weights(samples, length))
                totals = [
                    x * a + y * b + z * c + one
                    for (a, b, c), one in zip(lives, held, strict=True)
                ]
                highest.add(totals.index(max(totals)))
            places = sorted(highest)
            found.append(tuple((*lives[at], held[at]) for at in places))
            # Attention may take more than was traced, so that all its instants can be
            # the highest.
            operators = [
                (at, one[3])
                for at, (one, *_) in enumerate(rows)
                if "attention" in one[3]
            ]
            attending.append(
                tuple(
                    (*lives[at], held[at], "backward" in name) for at, name in operators
                )
            )
        return cls(tokens, tuple(found), kept, tuple(attending))

    def kept_at(self, samples: int, tokens: float) -> float:
        """Return the bytes of activations that a block keeps of its forward."""
        weights = _weights(samples, tokens / self.tokens)
        return sum(
            weight * kept for weight, kept in zip(weights, self.kept, strict=True)
        )

    def highest(
        self, reached: int, samples: int, tokens: float, beside: _Pair = (0.0, 0.0)
    ) -> _Pair:
        """Return the bytes of activations and of gradients at the highest instant after
        backward has come to so many blocks.

        Args:
            beside: bytes that attention takes beside what was traced, in forward and in
                backward.
        """
        # A search asks for the same batches under many layouts.
        place = (reached, samples, tokens, beside)
        if place not in self._known:
            one, two, half = _weights(samples, tokens / self.tokens)
            found = [
                (one * a + two * b + half * c, held)
                for a, b, c, held in self.points[reached]
            ]
            # At attention's own instants what it takes beside the trace comes on top.
            for a, b, c, held, is_backward in self.attending[reached]:
                found.append((one * a + two * b + half * c + beside[is_backward], held))
            self._known[place] = max(found, key=sum)
        return self._known[place]


@dataclass(frozen=True)
class SplitRun:
    """A step of two blocks with split layers: its instants, and what a block keeps of
    its forward."""

    instants: list[Instant]
    kept: float


@dataclass(frozen=True)
class SplitTrace:
    """Figures of two blocks with split layers.

    Attributes:
        instants: at which memory can be at its highest, by the ranks that layers are
            split over and by recomputation mode.
        dims: in which parameters are split, by name; others are whole on each rank.
            None: they were not run.
        unsplit: why layers are not split over so many ranks.
    """

    instants: Mapping[tuple[int, str], Instants] = field(default_factory=dict)
    dims: Mapping[str, int] | None = None
    unsplit: Mapping[int, str] = field(default_factory=dict)


def between(
    degree: int, fewest: int, one: SplitRun, most: int, other: SplitRun
) -> SplitRun:
    """Return the run over ``degree`` ranks, from those over fewest and most: bytes are
    a + b / ranks."""
    # Linear in 1 / ranks, through both runs.
    weight = (
        0.0 if fewest == most else (1 / degree - 1 / most) / (1 / fewest - 1 / most)
    )

    def at(a: float, b: float) -> int:
        return round(b + weight * (a - b))

    instants = []
    for (reached, live, held, name), (_, lives, helds, _) in _of_the_same(
        [one.instants, other.instants]
    ):
        instants.append((reached, at(live, lives), at(held, helds), name))
    return SplitRun(instants, at(one.kept, other.kept))


def _while(reached: int, run: list[Instant]) -> list[Instant]:
    return [instant for instant in run if instant[0] == reached]


def _names(run: list[Instant]) -> list[str]:
    return [name for *_, name in run]


def _of_the_same(runs: list[list[Instant]]) -> list[list[Instant]]:
    """Return the instants of all runs, operation by operation, without operations that
    not all runs have: those depend on the number of samples or tokens."""
    # By the place of an operation in the first run, for each operation that all others
    # have as well.
    rows = {place: [instant] for place, instant in enumerate(runs[0])}
    for run in runs[1:]:
        same: dict[int, Instant] = {}
        # The longest common runs of names. `autojunk` would drop the commonest names of
        # long lists.
        matcher = difflib.SequenceMatcher(
            None, _names(runs[0]), _names(run), autojunk=False
        )
        for begin, there, size in matcher.get_matching_blocks():
            same |= {begin + i: run[there + i] for i in range(size)}
        rows = {
            place: [*row, same[place]] for place, row in rows.items() if place in same
        }
    return list(rows.values())


def _weights(samples: int, length: float) -> tuple[float, float, float]:
    """Return what (1, s), (2, s) and (1, s / 2) count for at b samples of ``length`` s
    tokens: s (a + b (c + d s)) through all three."""
    bend = samples * (length * length - length)
    of_two = (samples - 1) * length
    return 2 * length - samples * length + 2 * bend, of_two, -4 * bend


@dataclass(frozen=True)
class ModelTrace:
    """A model as the planner sees it.

    Attributes:
        shapes: by recomputation mode; trainable parameters in float32, as mixed
            precision keeps them.
        blocks: how many.
        block, rest: curves of one block, and of all else, by recomputation mode.
        inside: what names of parameters in blocks begin with, for each list of blocks.
        instants: at which memory can be at its highest, by recomputation mode.
        heads: what tensor and context degrees have to divide: the heads of keys; 0: the
            model is not split over such ranks by itself.
        vocabulary: rows of the embedding; of what is not Transformers', of the largest
            parameter outside blocks.
        early: the part of the rest that works before the blocks.
        uncut: why there are no pipeline stages; "": the shapes have the chain of blocks
            that are dealt out to them.
        split: what was seen of split layers; empty: they were not run.
        dropped_scores: the share of attention's scores that training drops, which
            context ranks cannot.
        experts: names of the parameters that grouped products read, which have a matrix
            for each expert.
        unpadded: rows that the vocabulary had before it was padded for tensor ranks; 0:
            it was not.
        quantized: how the configuration quantizes its weights, which no plan does.
        untraced: recomputation modes that the model does not run with, and why.
        product_inputs: bytes of a token's activations that a block keeps for weights of
            FP8 layers alone, in bfloat16.
    """

    shapes: Mapping[str, Shapes]
    blocks: int
    block: Mapping[str, Curve]
    rest: Mapping[str, Curve]
    inside: tuple[str, ...]
    instants: Mapping[str, Instants]
    heads: int = 0
    vocabulary: int = 1
    early: Curve | None = None
    uncut: str = "its blocks were not followed"
    split: SplitTrace = field(default_factory=SplitTrace)
    dropped_scores: float = 0.0
    experts: frozenset[str] = frozenset()
    unpadded: int = 0
    quantized: str = ""
    untraced: Mapping[str, str] = field(default_factory=dict)
    product_inputs: float = 0.0
    _stored: dict[tuple[str, bool, bool], Shapes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _of_blocks: dict[tuple[int, bool], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def rest_degree(self, tensor: int) -> int:
        """Return over how many tensor ranks embedding, head and logits are split: all,
        or they are replicated."""
        return tensor if self.vocabulary % tensor == 0 else 1

    def of_precision(self, mode: str, precision: str, dealt: bool = False) -> Shapes:
        """Return the shapes with parameters as they are stored: in float32 ("mixed"),
        in "bfloat16", or as those of a built model are ("trainer"); with experts as
        units of their own where they are ``dealt`` to ranks.

        Raises:
            ValueError: a mode of recomputation that is not traced, or that the model
                does not run with.
        """
        if mode not in self.shapes:
            raise ValueError(
                f"activations.checkpoint={mode!r} is not planned with; write none, selective or full"
            )
        if mode in self.untraced:
            raise ValueError(self.untraced[mode])
        # "mixed" and "trainer" take the shapes as they are: a trace of words has
        # float32, one of a built model that model's dtypes.
        key = mode, precision == "bfloat16", dealt
        if key not in self._stored:
            shapes = self.shapes[mode]
            if precision == "bfloat16":
                shapes = in_dtype(shapes, torch.bfloat16)
            self._stored[key] = shapes.with_experts_apart() if dealt else shapes
        return self._stored[key]

    @cached_property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return self.shapes["none"].elements

    @cached_property
    def expert_elements(self) -> int:
        """Elements of all experts' matrices."""
        return sum(
            each.elements
            for each in self.shapes["none"].parameters
            if each.name in self.experts
        )

    @cached_property
    def active_parameters(self) -> float:
        """Elements that one token's products read, those of the embedding among
        them."""
        return self.parameters - (1 - self._share_met) * self.expert_elements

    @cached_property
    def _share_met(self) -> float:
        """The share of a layer's experts that a token meets."""
        one = self.block["none"].one
        # Two FLOPs for each element and token; grouped products are of two bytes an
        # element.
        return (
            one.forward_experts / (self.block["none"].tokens * one.forward_weights)
            if one.forward_weights
            else 1.0
        )

    @property
    def experts_of_token(self) -> float:
        """Experts of a layer that a token goes to."""
        return self._share_met * self.shapes["none"].experts[0].experts

    def block_elements(self, tensor: int = 1, of_experts: bool = False) -> float:
        """Return the elements of a block that one of so many tensor ranks holds, of all
        or of experts."""
        key = tensor, of_experts
        if key not in self._of_blocks:
            shapes = self.shapes["none"].over(tensor)
            held = [
                each for each in shapes.parameters if each.name.startswith(self.inside)
            ]
            if of_experts:
                held = [
                    each
                    for each in held
                    if each.name.rpartition(".")[0] in shapes.expert_names
                ]
            self._of_blocks[key] = sum(each.elements for each in held) / self.blocks
        return self._of_blocks[key]

    @cached_property
    def trained(self) -> tuple[float, float]:
        """The shares of a block's elements, and of those outside of blocks, that are
        trained."""
        inside, outside = ([0, 0], [0, 0])
        # Elements, and those of them that are trained, inside blocks and outside.
        for each in self.shapes["none"].parameters:
            counts = inside if each.name.startswith(self.inside) else outside
            counts[0] += each.elements
            counts[1] += each.elements * each.trainable
        return inside[1] / max(inside[0], 1), outside[1] / max(outside[0], 1)


def in_dtype(shapes: Shapes, dtype: torch.dtype) -> Shapes:
    """Return the shapes with trained parameters in another dtype than the one that they
    compute in; frozen ones stay in that."""
    cast = []
    for each in shapes.parameters:
        is_cast = each.dtype.is_floating_point and each.trainable
        cast.append(replace(each, dtype=dtype) if is_cast else each)
    return replace(shapes, parameters=tuple(cast), checkpoints_itself=False)
