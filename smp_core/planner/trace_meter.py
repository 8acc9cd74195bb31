"""TraceMeter: what the operators of one step compute and move, and the bytes that are
alive after each of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

# _python_dispatch is where torch documents it to be.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from smp_core.checkpoint import iterate_tensors
from smp_core.planner.model_trace import FORWARD, LEFT, Figures, Instant

_FUSED = (
    "mean",
    "sum",
    "amax",
    "var_mean",
    "_softmax",
    "_log_softmax",
    "native_layer_norm",
    "cat",
    "clone",
    "_to_copy",
)
"""Operators that compilers fuse beside those that torch tags as pointwise; with their
backward ones."""

_GROUPED = {
    "_grouped_mm": 1,
    "grouped_mm_fallback": 1,
    "grouped_mm_fallback_backward": 2,
}
"""Products of rows by the matrices of their experts, torch's and Transformers', and how
many each operator takes."""


class TraceMeter(TorchDispatchMode):
    """Counts what runs inside, by phase, and follows the storages that are made there.

    Args:
        gradients: shapes of gradients of embeddings and heads with more rows than there
            are tokens, which no activation has.

    Attributes:
        instants: after each operation, as
            :class:`smp_core.planner.model_trace.Instants` takes them.
        has_entered: forward has come to the first block.
        stacks: sizes of parameters with a matrix for each expert, in rising order:
            layouts differ.
    """

    def __init__(self, gradients: set[torch.Size]) -> None:
        super().__init__()
        self._gradients = gradients
        self.phase = "forward"
        self.heads = 0
        self.counts: dict[str, float] = {field.name: 0.0 for field in fields(Figures)}
        self.of_early = dict(self.counts)
        self.has_entered = False
        self.stacks: set[tuple[int, ...]] = set()
        # Storages by id, with a weak reference to each that takes it out when it is
        # freed.
        self._sizes: dict[int, int] = {}
        self._watchers: dict[int, Any] = {}
        self._own: set[torch.Size] = set()  # shapes of parameters
        self._live = {False: 0, True: 0}  # of activations, of gradients
        self._of_gradients: set[int] = set()
        # Storages that fused operators have made, and nothing else has read.
        self._unwritten: set[int] = set()
        # By the kernel that fused operators make since the last product.
        self._read: set[int] = set()
        self.instants: list[Instant] = []
        self._behind_blocks: list[int] = []
        self.blocks_reached = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # A wrapper, as DTensor is.
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # so that operations on what it wraps come here
        # Autograd asks this three times for each operator; a fake tensor knows it.
        if func is torch.ops.prim.device.default:
            return args[0].device
        result = func(*args, **(kwargs or {}))
        # An operator that gives no tensor and changes none asks for a device or a size:
        # it reads no values, and how often it is asked depends on what fake tensors
        # remember.
        tensors = list(tensors_in(result))
        # _schema: no public name for what it changes.
        if not func.is_view and (tensors or func._schema.is_mutable):
            self._count(func, args, kwargs or {}, result, tensors)
        for tensor in tensors:
            self._follow(tensor)
        if tensors:
            reached = FORWARD if self.phase == "forward" else self.blocks_reached
            self.instants.append(
                (reached, self._live[False], self._live[True], str(func))
            )
        return result

    def end_forward(self) -> None:
        """Count backward from here on."""
        self.phase = "backward"
        self.counts["left"] = float(self._live[False])

    def finish(self) -> Figures:
        """Return the counts, after backward."""
        self.counts["kept"] = max(
            live for reached, live, *_ in self.instants if reached in (0, FORWARD)
        )
        return Figures(**self.counts)

    @property
    def early(self) -> Figures:
        """The counts of what comes before the first block, in forward, and of what
        comes behind it in backward."""
        return Figures(**self.of_early)

    def note_block(self, output: torch.Tensor) -> None:
        """Note the end of a block's forward."""
        self._behind_blocks.append(
            self._live[False] - output.untyped_storage().nbytes()
        )

    @property
    def kept(self) -> int:
        """The bytes of activations that the last block keeps of its forward."""
        return self._behind_blocks[-1] - self._behind_blocks[-2]

    def is_gradient(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage with gradients from here on."""
        # It was made as an activation, before it was known to be a gradient.
        address = id(tensor.untyped_storage())
        if address in self._sizes and address not in self._of_gradients:
            self._of_gradients.add(address)
            self._live[False] -= self._sizes[address]
            self._live[True] += self._sizes[address]

    def _count(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        tensors: list[torch.Tensor],
    ) -> None:
        # Each operator is counted once: as a grouped product, attention, another
        # product, or bytes that it moves.
        packet = func.overloadpacket
        name = str(packet).removeprefix("aten.")
        if packet.__name__ in _GROUPED:
            self._count_grouped(_GROUPED[packet.__name__], args[0], args[1], tensors)
        elif (
            "scaled_dot_product" in name
            or "flash_attention" in name
            or "efficient_attention" in name
        ):
            self._count_attention(name, func, args, kwargs)
        elif packet in flop_registry:
            self._add(
                "products", flop_registry[packet](*args, **kwargs, out_val=result)
            )
            self._count_operands(list(tensors_in(args)), tensors)
        # Nothing is read or written.
        elif name.startswith(("empty", "new_empty", "_unsafe_view", "detach")):
            return
        else:
            read = list(tensors_in(args))
            n_bytes = sum(each.numel() * each.itemsize for each in [*read, *tensors])
            self._add("moved", n_bytes)
            # Two counts: each operator by itself (eager), and as kernels of a compiler
            # that fuses pointwise ones.
            if torch.Tag.pointwise in func.tags or name.split("_backward")[0] in _FUSED:
                self._count_fused(read, tensors)
                return
            self._add("fused", n_bytes)
        # What a kernel of fused operators made is written for this one, and the next of
        # them reads anew.
        for each in tensors_in((args, kwargs)):
            if id(each.untyped_storage()) in self._unwritten:
                self._unwritten.discard(id(each.untyped_storage()))
                self._add("fused", each.numel() * each.itemsize)
        self._read.clear()

    def _count_fused(self, read: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Count an operator that is fused with those around it: the kernel reads what
        others have made, once."""
        for each in read:
            storage = id(each.untyped_storage())
            if storage not in self._unwritten and storage not in self._read:
                self._add("fused", each.numel() * each.itemsize)
            self._read.add(storage)
        # What is made is written only when another kernel reads it, unless it is
        # written in place.
        changed = {id(each.untyped_storage()) for each in read}
        for each in made:
            storage = id(each.untyped_storage())
            if storage in changed and storage not in self._unwritten:
                self._add("fused", each.numel() * each.itemsize)  # changed in place
            elif storage not in changed:
                self._unwritten.add(storage)

    def _count_grouped(
        self,
        products: int,
        rows: torch.Tensor,
        matrices: torch.Tensor,
        made: list[torch.Tensor],
    ) -> None:
        """Count products in which each row meets the matrix of one expert, and the
        bytes of all experts' matrices, which are read, or made of two lists of rows.
        Which rows an expert gets makes no difference to the sum."""
        # Rows and matrices in three dims are batched: a group of rows for each matrix.
        groups = len(rows) if rows.ndim == matrices.ndim == 3 else 1
        self._add(
            "experts",
            products * 2 * groups * rows.shape[-2:].numel() * matrices.shape[-1],
        )
        stacked = [each for each in (rows, matrices, *made) if each.ndim == 3]
        self.stacks |= {tuple(sorted(each.shape)) for each in stacked}
        self._add("weights", sum(each.numel() * each.itemsize for each in stacked))

    def _count_operands(
        self, read: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        """Count the bytes that a product reads and writes: of parameters and their
        gradients apart, since they are as many however large the batch."""
        is_own = [self._sizes.get(id(each.untyped_storage())) == 0 for each in read]
        # What is made of two activations in a parameter's shape is its gradient.
        is_own += [not any(is_own) and each.shape in self._own for each in made]
        for each, is_matrix in zip([*read, *made], is_own, strict=True):
            size = each.numel() * each.itemsize
            self._add("matrices" if is_matrix else "operands", size)

    def _add(self, what: str, amount: float) -> None:
        self.counts[f"{self.phase}_{what}"] += amount
        if self.blocks_reached == LEFT or not self.has_entered:
            self.of_early[f"{self.phase}_{what}"] += amount

    def _count_attention(self, name: str, func: Any, args: Any, kwargs: Any) -> None:
        """Count two products in forward, and five in backward, which computes the
        scores again."""
        is_backward = "backward" in name
        # Backward operators have the gradient in front.
        query, key, value = args[1:4] if is_backward else args[:3]
        flops = (
            2
            * query.shape[:-1].numel()
            * key.shape[-2]
            * (query.shape[-1] + value.shape[-1])
        )
        # _schema: no public name for arguments' names.
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        share = 0.5 if given.get("is_causal") else 1.0
        self._add("attention", share * flops * (2.5 if is_backward else 1.0))
        if self.phase == "forward":
            self.counts["full_attention"] += flops
            # Heads of keys in all attentions of the model, which degrees have to
            # divide.
            self.heads = math.gcd(self.heads, key.shape[1] if key.ndim == 4 else 0)
            self.counts["keys"] += (
                key.numel() * key.itemsize + value.numel() * value.itemsize
            )

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._sizes:
            return
        # A weak reference per storage: views share it, and count once.
        size, address = storage.nbytes(), id(storage)
        self._sizes[address] = size
        self._watchers[address] = weakref.ref(storage, lambda _: self._forget(address))
        if tensor.shape in self._gradients:
            self._of_gradients.add(address)
        self._live[address in self._of_gradients] += size

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave the tensor's storage out of what is live."""
        storage = tensor.untyped_storage()
        self._sizes[id(storage)] = 0
        self._own.add(tensor.shape)
        # Held: its address is not given to another one.
        self._watchers[id(storage)] = storage

    def _forget(self, address: int) -> None:
        self._live[address in self._of_gradients] -= self._sizes.pop(address, 0)
        self._of_gradients.discard(address)
        self._unwritten.discard(address)
        self._read.discard(address)
        self._watchers.pop(address, None)


def tensors_in(nest: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of tuples, lists and mappings."""
    return (tensor for _, tensor in iterate_tensors(nest, mapping=Mapping))
