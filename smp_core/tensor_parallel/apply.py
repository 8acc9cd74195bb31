"""apply_tensor_parallel(): a model's layers are split over the tensor axis, before
anything is sharded.

Parameters become DTensors over the tensor axis, in equal stretches; FSDP2 makes
DTensors over (shard, tensor) of them. Activations stay plain tensors, so that attention
code, masks and views go on working.

With sequence parallelism the blocks of a stack hold 1/T of the tokens, if they compute
the same with these (:mod:`smp_core.tensor_parallel.blocks`). What stands inside between
split layers (norms, biases of row layers) sees other tokens on each rank, and its
gradients are added up.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from smp_core.tensor_parallel.adapters import (
    around,
    has_adapters,
    is_of_adapter,
    refuse_later_adapters,
    with_adapters,
)
from smp_core.tensor_parallel.blocks import BlockForward, Stack
from smp_core.tensor_parallel.inspection import Inspected, settle_splits
from smp_core.tensor_parallel.layers import (
    WHOLE_TOKENS,
    AttentionForward,
    ColumnForward,
    EmbeddingForward,
    ExpertsForward,
    OwnHeadsForward,
    PartForward,
    RowForward,
    SharingForward,
    SummingForward,
    Tokens,
    WholeForward,
)
from smp_core.tensor_parallel.loss import SplitLogits, split_vocabulary_loss
from smp_core.tensor_parallel.operators import (
    RowsInUse,
    TensorAxis,
    let_anomalies_be_found,
)
from smp_core.tensor_parallel.overlap import ColumnInputs, is_plain_product
from smp_core.tensor_parallel.randomness import RandomForward, settle_random
from smp_core.tensor_parallel.refused import (
    refuse_hooks,
    refuse_unshared_tokens,
    refuse_whole_states,
    refuse_wrapped,
    shared_with_others,
)
from smp_core.tensor_parallel.roles import (
    Split,
    arguments_of_heads,
    divided_attributes,
    has_heads,
    head_size,
    holds,
    is_conv1d,
    reads_other_tokens,
    rows_in_use,
    stacks_of,
    transformers_model,
)
from smp_core.tensor_parallel.split_model import SplitModel
from smp_core.tensor_parallel.unsplit_trial import ComparedForward, Unsplit, units_of
from smp_core.torch_facts import embeddings_of

logger = logging.getLogger("smp")


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    axis: TensorAxis,
    *,
    plan: str | Mapping[str, str] | Inspected,
    sequence_parallel: bool,
    whole: Container[str] = (),
    chunked_loss: bool = False,
) -> SplitModel:
    """Split a model's layers over the tensor axis. In place.

    Args:
        model: with equal values on all ranks of the axis.
        mesh: 1-D, the tensor axis.
        plan: "auto", globs over module names -> roles
            (:mod:`smp_core.tensor_parallel.roles`), or "infer"
            (:mod:`smp_core.tensor_parallel.inspection`), or what an inspection found.
        sequence_parallel: hold 1/T of the tokens in blocks.
        whole: names of parameters that "auto" replicates.
        chunked_loss: the loss is left to the code that computes it in chunks, from
            :attr:`SplitModel.split_vocabulary`.

    Raises:
        ValueError: a model that cannot be split so; says what to write.
    """
    # What is split, and what forbids it.
    found, inspected = settle_splits(model, plan, axis.degree, sequence_parallel, whole)
    if inspected is not None and dist.get_rank() == 0:
        logger.warning("tensor_parallel.plan='infer': %s", inspected.describe())
    # A layer that PEFT has wrapped becomes its base layer and its adapters, each with a
    # role.
    splits = [each for split in found for each in with_adapters(split)]
    refuse_wrapped(model)
    let_anomalies_be_found()
    refuse_whole_states(model)
    # Every layer gets its part of the weights, and a forward that uses it.
    splitting = _Splitting(model, mesh, axis, splits, sequence_parallel, inspected)
    refuse_hooks(model, splitting.blocks)
    splitting.random = settle_random(model, axis, bool(splitting.blocks))
    splitting.split_all()
    for split in found:
        if has_adapters(split.module):
            refuse_later_adapters(split)
    # Logits, and the loss of them.
    known = transformers_model(model)
    # Only a head that is a column layer has logits that are split.
    head = None if known is None else embeddings_of(known)[1]
    split_head = head is not None and any(
        split.module is head and split.is_column for split in splits
    )
    split_loss = split_head and (chunked_loss or split_vocabulary_loss(known, axis))
    # What is no DTensor now is held, and stepped, whole by every tensor rank.
    repeated = {
        name: p.numel()
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor)
    }
    logits = SplitLogits(axis) if split_head else None
    return SplitModel(
        axis,
        tuple(splits),
        bool(splitting.blocks),
        split_loss,
        logits,
        whole=tuple(repeated),
        whole_elements=sum(repeated.values()),
        in_pieces=splitting.n_in_pieces,
        stacks=splitting.stacks,
        blocks=splitting.forwards,
        compared=splitting.compared,
    )


class _Splitting:
    """One model while it is split."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        axis: TensorAxis,
        splits: list[Split],
        sequence_parallel: bool,
        inspected: Inspected | None,
    ) -> None:
        self.inspected = inspected
        self.model = model
        self.mesh = mesh
        self.axis = axis
        self.splits = splits
        # Tokens are split in blocks of stacks only: each block has its own record of
        # it.
        found = stacks_of(model, splits)
        self.stacks = []
        for names in found:
            self.stacks.append(
                Stack(names, [Tokens() for _ in names], axis, sequence_parallel)
            )
        self._tokens: dict[str, Tokens] = {}
        for stack in self.stacks:
            self._tokens |= dict(zip(stack.names, stack.tokens, strict=True))
        # Without sequence parallelism there are stacks (for the trials), and no block
        # whose tokens may be split.
        self.blocks = list(self._tokens) if sequence_parallel else []
        self.whole = [split.name for split in splits if split.role == "whole"]
        self.random: list[str] = []
        self.forwards: list[BlockForward] = []
        self.compared: list[ComparedForward] = []
        # The unsplit model as trials need it: roles now, former attributes once all is
        # split.
        self.unsplit = Unsplit({split.module: split for split in splits})
        self.n_in_pieces = 0
        self._shared: dict[nn.Module, ColumnInputs] = {}
        if sequence_parallel and not self.stacks:
            logger.warning(
                "tensor_parallel: tokens stay whole, as no split layer is inside an nn.ModuleList of blocks; "
                "sequence_parallel=True has no effect"
            )

    def split_all(self) -> None:
        # What splitting changes is found by comparison, so that no step of it has to
        # keep a list.
        before = {
            module: {**vars(module), "forward": module.forward}
            for module in self.model.modules()
        }
        self._split_all()
        for module, had in before.items():
            now = vars(module)
            self.unsplit.before[module] = {
                name: had[name]
                for name in had
                if now.get(name, had[name]) is not had[name]
            }

    def _split_all(self) -> None:
        by_name = {split.name: split for split in self.splits}
        self._refuse_what_the_plan_misses(by_name)
        refuse_unshared_tokens(
            [split for split in self.splits if self._splits_tokens(split.name)],
            self.blocks,
        )
        # Attention counts a rank's heads only.
        attention = self._attention = self._attention_modules()
        # Forwards reshape by these numbers, which would count all ranks' heads.
        for module, attribute in self._divided_attributes():
            setattr(module, attribute, getattr(module, attribute) // self.axis.degree)
        # Something for each head (Bloom's ALiBi) comes for all heads; the rank takes
        # its own.
        for module, argument in (
            arguments_of_heads(self.model) if self.inspected is None else ()
        ):
            heads: Any = module.num_heads
            module.forward = OwnHeadsForward(module.forward, self.axis, argument, heads)
        # Parameters are replaced here; from now on a layer holds this rank's part.
        for split in self.splits:
            if split.is_column:
                self._column(split)
            elif split.role in ("row", "row_split"):
                self._row(split)
            elif split.role == "vocabulary":
                self._vocabulary(split)
            elif split.role == "features":
                self._features(split)
            elif split.role == "experts":
                self._experts(split)
        # Modules that every rank holds whole.
        summing: list[SummingForward] = []
        for name, module in self.model.named_modules():
            role = by_name[name].role if name in by_name else None
            if role in (None, "sum", "replicate", "adapter"):
                # Their own parameters get parts of gradients wherever ranks see
                # different activations.
                summing += self._summing(name, module, role, attention)
        # Forwards around what was split: shared inputs, attention, modules that need
        # all tokens.
        for parent, inputs in self._shared.items():
            parent.forward = SharingForward(parent.forward, inputs)
        for name in attention:
            module = self.model.get_submodule(name)
            module.forward = AttentionForward(
                module.forward, self._inputs(module), self._tokens_in(name)
            )
        for name in self.whole:
            module = self.model.get_submodule(name)
            module.forward = WholeForward(
                module.forward, self.axis, self._tokens_in(name, itself_whole=True)
            )
        self._blocks(summing)
        self.n_in_pieces += sum(
            len(inputs.in_pieces) for inputs in self._shared.values()
        )
        if self.axis.overlap != "sums" and not self.n_in_pieces:
            raise ValueError(
                f"tensor_parallel.overlap={self.axis.overlap!r} has no effect: no split layer among split tokens is a "
                "plain linear layer; write tensor_parallel={'overlap': 'sums'}"
            )

    def _blocks(self, summing: list[SummingForward]) -> None:
        """Prepare what stands around blocks, which is put there when they are told to
        recompute."""
        units = units_of(self.model, self.splits, self._tokens)
        for stack in self.stacks:
            # Reversed, so that the first of several places of a shared block stays.
            places = {
                self.model.get_submodule(name): place
                for place, name in reversed(list(enumerate(stack.names)))
            }
            # One that stands in several is one block.
            for block, place in places.items():
                own = block.forward
                if self.axis.draws:
                    block.forward = RandomForward(block, own, self.axis)
                # The trial of a block settles the assumptions of the forwards in it.
                inside = set(block.modules())
                of_block = [each for each in summing if each.module in inside]
                shared = shared_with_others(self.model, block)
                unsplit = self.unsplit if stack.names[place] in units else None
                self.forwards.append(
                    BlockForward(
                        block,
                        own,
                        own,
                        stack,
                        place,
                        of_block,
                        self.random,
                        shared,
                        unsplit,
                    )
                )
        # Units outside of blocks are compared by a forward of their own.
        for name in units:
            if name not in self._tokens:
                module = self.model.get_submodule(name)
                own = module.forward
                self.compared.append(
                    ComparedForward(name, module, own, own, self.axis, self.unsplit)
                )

    def _divided_attributes(self) -> Iterator[tuple[nn.Module, str]]:
        if self.inspected is None:
            return divided_attributes(self.model)
        return (
            (self.model.get_submodule(name), attribute)
            for name, attribute in self.inspected.divided
        )

    def _splits_tokens(self, name: str, itself_whole: bool = False) -> bool:
        """Return whether a module's inputs hold 1/T of the tokens."""
        others = [each for each in self.whole if not (itself_whole and each == name)]
        return holds(self.blocks, name) and not holds(others, name)

    def _tokens_in(self, name: str, itself_whole: bool = False) -> Tokens:
        """Return the tokens that a module sees."""
        if not self._splits_tokens(name, itself_whole):
            return WHOLE_TOKENS
        return next(
            tokens for block, tokens in self._tokens.items() if holds([block], name)
        )

    def _parent(self, name: str) -> tuple[str, nn.Module]:
        above = around(name)
        return above, self.model.get_submodule(above)

    def _column(self, split: Split) -> None:
        layer: Any = split.module
        above, parent = self._parent(split.name)
        # Transformers' Conv1D keeps its weight transposed.
        dim = 1 if is_conv1d(layer) else 0
        outputs = layer.weight.shape[dim]
        # Outputs of attention are cut between heads, which equal stretches of a packed
        # weight do not do.
        rows = None
        if outputs % self.axis.degree or parent is not self.model:
            head = head_size(parent) if self.inspected is None else None
            rows = rows_in_use(
                split, head, outputs, self._query_outputs(above), self.axis.degree
            )
        if rows is not None and split.role == "column_gather":
            rows = None  # gathered in the order in which they are stored
        # A weight of one block that is not cut in equal stretches has fewer heads than
        # there are ranks.
        if rows is not None and split.blocks == 1:
            self._share_heads(split, parent, above)
        self._distribute(layer, "weight", dim)
        self._distribute(layer, "bias", 0)
        # A layer of the root has no parent whose end would drop the shared inputs.
        alone = parent is self.model
        inputs = ColumnInputs(self.axis) if alone else self._inputs(parent)
        known = transformers_model(self.model)
        is_head = known is not None and layer is embeddings_of(known)[1]
        gathers = functools.partial(_gathers, self.axis, split.role, is_head)
        tokens = self._tokens_in(split.name)
        reads_others = reads_other_tokens(self.model, split.name)
        # Its input was gathered before: for all of attention, or outside of the block.
        is_entered = above in self._attention or reads_others
        # Layers that exchange rows of weights keep autograd's way for their gradients.
        if rows is None:
            in_pieces = (
                tokens is not WHOLE_TOKENS
                and not reads_others
                and self._goes_in_pieces(split)
            )
            inputs.add(layer, split.name if in_pieces else None)
        layer.forward = ColumnForward(
            layer,
            layer.forward,
            self.axis,
            inputs,
            tokens,
            is_entered,
            gathers,
            rows,
            dim,
            alone,
        )

    def _goes_in_pieces(self, split: Split) -> bool:
        # Adapters have few features, and one of a column layer reads what the other one
        # made.
        return self.axis.overlap != "sums" and not is_of_adapter(split.name)

    def _inputs(self, module: nn.Module) -> ColumnInputs:
        return self._shared.setdefault(module, ColumnInputs(self.axis))

    def _query_outputs(self, above: str) -> int:
        """Return outputs of the largest column layer of a module: its queries."""
        siblings = [
            split
            for split in self.splits
            if split.is_column and around(split.name) == above
        ]
        return max(map(_outputs, siblings))

    def _share_heads(self, split: Split, parent: Any, above: str) -> None:
        """Share keys and values of one head among several ranks: a rank's queries all
        belong to it."""
        if not hasattr(parent, "num_key_value_groups"):
            raise ValueError(
                f"tensor_parallel: {split.name} has fewer heads than tensor_parallel_degree={self.axis.degree}, and "
                f"{type(parent).__name__} has no num_key_value_groups that says how queries share them; write a "
                "tensor_parallel_degree that divides its heads"
            )
        # The forward repeats keys by this number: now the queries of this rank for its
        # one head.
        parent.num_key_value_groups = (
            self._query_outputs(above) // parent.head_dim // self.axis.degree
        )

    def _row(self, split: Split) -> None:
        layer: Any = split.module
        dim = 0 if is_conv1d(layer) else 1
        inputs = layer.weight.shape[dim]
        # Equal stretches of inputs have to match the column layers' outputs before it.
        if inputs % self.axis.degree:
            raise ValueError(
                f"tensor_parallel_degree={self.axis.degree} does not divide the {inputs} inputs of {split.name}; leave "
                "it and the column layers before it whole with a plan that does not name them"
            )
        self._distribute(layer, "weight", dim)
        tokens = self._tokens_in(split.name)
        # A product is made in pieces only where the sum of tokens behind it can hide
        # it.
        in_pieces = (
            tokens is not WHOLE_TOKENS
            and self._goes_in_pieces(split)
            and is_plain_product(layer)
        )
        self.n_in_pieces += in_pieces
        layer.forward = RowForward(
            layer,
            layer.forward,
            self.axis,
            tokens,
            split.role == "row_split",
            in_pieces,
        )

    def _vocabulary(self, split: Split) -> None:
        words: Any = split.module
        # The vocabulary is cut into equal stretches of rows.
        if words.weight.shape[0] % self.axis.degree:
            raise ValueError(
                f"tensor_parallel_degree={self.axis.degree} does not divide the {words.weight.shape[0]} rows of "
                f"{split.name}; write 'replicate' for it, or resize it (model.resize_token_embeddings(..., "
                f"pad_to_multiple_of={self.axis.degree}))"
            )
        self._distribute(words, "weight", 0)
        words.forward = EmbeddingForward(words, words.forward, self.axis)

    def _features(self, split: Split) -> None:
        module: Any = split.module
        if module.weight.shape[1] % self.axis.degree:
            raise ValueError(
                f"tensor_parallel_degree={self.axis.degree} does not divide the {module.weight.shape[1]} features of "
                f"{split.name}; write a degree that does"
            )
        self._distribute(module, "weight", 1)
        module.forward = PartForward(module, module.forward)

    def _experts(self, split: Split) -> None:
        """Split weights [E, 2I, H] of gate and up in one, and [E, H, I], by inner
        features; a bias would have to be split too."""
        module: Any = split.module
        weights = _own(module)
        # Other layouts have no known dimension of inner features.
        if set(weights) != {"gate_up_proj", "down_proj"} or any(
            p.ndim != 3 for p in weights.values()
        ):
            raise ValueError(
                f"tensor_parallel: {split.name} ({type(module).__name__}) has parameters {', '.join(weights)}; only "
                "fused experts of gate_up_proj [E, 2I, H] and down_proj [E, H, I] can be split; write 'replicate'"
            )
        inner = weights["down_proj"].shape[2]
        if weights["gate_up_proj"].shape[1] != 2 * inner or inner % self.axis.degree:
            raise ValueError(
                f"tensor_parallel_degree={self.axis.degree} does not divide the {inner} inner features of the experts "
                f"of {split.name}; write 'replicate' for them"
            )
        # Rows of gate and up that each rank has.
        own = inner // self.axis.degree
        by_rank = []
        for rank in range(self.axis.degree):
            gate = range(rank * own, (rank + 1) * own)
            up = range(inner + gate.start, inner + gate.stop)
            by_rank.append((*gate, *up))
        # Stored in equal stretches; the rows of gate and up that belong together are
        # exchanged in each call.
        self._distribute(module, "gate_up_proj", 1)
        self._distribute(module, "down_proj", 2)
        rows = {"gate_up_proj": RowsInUse(tuple(by_rank), 2 * inner)}
        module.forward = ExpertsForward(module, module.forward, self.axis, rows)

    def _distribute(self, module: nn.Module, name: str, dim: int) -> None:
        """Put this rank's stretch of a parameter in its place, once for all modules
        that share the parameter."""
        whole = _own(module).get(name)
        if whole is None or isinstance(whole, DTensor):
            return
        # A copy: a view would keep the memory of the unsplit weight alive.
        part = (
            whole.detach()
            .chunk(self.axis.degree, dim)[self.axis.rank]
            .contiguous()
            .clone()
        )
        # FSDP2 and checkpoints read the unsplit shape and stride from the DTensor.
        stride = torch.empty(whole.shape, device="meta").stride()
        tensor = DTensor.from_local(
            part,
            self.mesh,
            [Shard(dim)],
            run_check=False,
            shape=whole.shape,
            stride=stride,
        )
        split = nn.Parameter(tensor, requires_grad=whole.requires_grad)
        # Tied modules keep sharing one parameter.
        for other in self.model.modules():
            for key, parameter in _own(other).items():
                if parameter is whole:
                    setattr(other, key, split)

    def _attention_modules(self) -> dict[str, bool]:
        """Return modules with heads and column layers -> whether what is between these
        sees the rank's own heads only."""
        # An inspection names them; otherwise attention is what has column layers and
        # known names of heads.
        if self.inspected is not None:
            return dict.fromkeys(self.inspected.attention, True)
        found: dict[str, bool] = {}
        for split in self.splits:
            above, parent = self._parent(split.name)
            if split.is_column and has_heads(parent):
                # Outputs that are gathered show all heads on every rank.
                found[above] = split.role == "column"
        return found

    def _summing(
        self,
        name: str,
        module: nn.Module,
        role: str | None,
        attention: Mapping[str, bool],
    ) -> Iterator[SummingForward]:
        """Put a forward around a module whose own parameters' gradients may have to be
        added up; yield it."""
        own = _own(module).values()
        # Split parameters have complete gradients on their rank.
        if not own or any(isinstance(parameter, DTensor) for parameter in own):
            return
        inside = [above for above in attention if name.startswith(f"{above}.")]
        # The innermost attention decides whether a rank sees its own heads or all of
        # them.
        tokens = self._tokens_in(name)
        always = role == "sum"
        if inside and role not in ("sum", "adapter"):
            if not attention[max(inside, key=len)]:
                return  # of all heads on every rank
            # An inspection has found out which modules between layers get parts
            # ("sum").
            always = self.inspected is None
        # Outside of attention gradients are parts only where tokens are split.
        if always or tokens is not WHOLE_TOKENS:
            # In blocks the assumption is settled by the trial.
            is_open = always and holds(list(self._tokens), name)
            module.forward = summing = SummingForward(
                module, module.forward, self.axis, tokens, always, is_open
            )
            yield summing

    def _refuse_what_the_plan_misses(self, by_name: Mapping[str, Split]) -> None:
        """Refuse parameters alongside column layers of attention, one for each head: no
        role says how they are split. An inspection has run the module with parts of its
        heads."""
        for above in self._attention_modules() if self.inspected is None else ():
            own = _own(self.model.get_submodule(above))
            if own and above not in by_name:
                raise ValueError(
                    f"tensor_parallel: {', '.join(own)} of {above} belongs to heads, and no role says how it is split; "
                    "write a plan that leaves this module whole, or tensor_parallel_degree=1"
                )


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own parameters, those included that another module has too."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _outputs(split: Split) -> int:
    weight: Any = split.module.weight
    return int(weight.shape[1 if is_conv1d(split.module) else 0])


def _gathers(axis: TensorAxis, role: str, is_head: bool) -> bool:
    return role == "column_gather" and (axis.whole_logits or not is_head)
