"""DeepEP: tokens to experts and back by the kernels of a package, where
``collectives.expert_transport`` asks for it.

**It has never run with the package**, only with a stand-in of its interface. That is
the one of ``deep_ep.Buffer`` in release 1.2.1, which 2.1 still has; kernels of 1.2.1
say what they take. A token goes once to each rank that has experts of it, with the
numbers of these there (-1: an expert of another rank) and their weights. What comes
back is added up, over ranks, without weights. The gradient of each way is the other
way. The host waits for the device twice.

Bytes are counted as if each row went straight to its rank; between nodes DeepEP passes
rows on inside a node. Shape letters: as in dispatch, and M rows that arrive, one for
each token.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from smp_core.comm import CommMeter
from smp_core.expert_parallel.dispatch import Experts, places
from smp_core.expert_parallel.exchange import COMBINE, DISPATCH, Exchange, row_bytes
from smp_core.plan import ModelDraft, dtype_of, keep_outputs_of

DTYPES = (torch.bfloat16,)
_PEERS = 8
"""Ranks that DeepEP knows on a node."""

_FEATURES = {False: (16, 8176), True: (256, 7936)}
"""On one node, and on several: what widths are multiples of, and the most that kernels
have memory for."""

_DEGREES = (2, 4, 8, 16, 32, 64, 128, 144, 160)
_ARGUMENTS = {
    "__init__": "group num_nvl_bytes num_rdma_bytes",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_dispatch_layout": "topk_idx num_experts",
    "dispatch": "x handle topk_idx topk_weights num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
    "num_tokens_per_expert",
    "combine": "x handle topk_weights",
}


def missing() -> str:
    """Return why no DeepEP is here whose interface is known, and what to do; "" if it
    is."""
    try:
        from deep_ep import Buffer
    except Exception as error:
        # 2.1 asserts things about CUDA and NCCL when it is imported.
        return f"deep_ep cannot be imported ({error}); install https://github.com/deepseek-ai/DeepEP at v1.2.1"
    # Looked at before anything runs: a signature of another release would fail in the
    # first step.
    for name, arguments in _ARGUMENTS.items():
        method = getattr(Buffer, name, None)
        if method is None or not inspect.signature(method).parameters.keys() >= {
            *arguments.split()
        }:
            return f"the installed deep_ep has another Buffer.{name} than release 1.2.1, which is known; install that"
    return ""


def unfit(draft: ModelDraft, degree: int) -> str:
    """Return why DeepEP's kernels do not fit a run, and what to write; "" if they
    do."""
    knobs, per_node = draft.knobs, draft.groups.topology.ranks_per_node
    computed = dtype_of(knobs.param_dtype)
    if draft.cluster.device != "cuda":
        return f"its kernels are for CUDA, and devices here are of type {draft.cluster.device}"
    if knobs.tensor_parallel_degree > 1:
        return "not built beside tensor ranks; write tensor_parallel_degree=1"
    # More ranks than a node's peers need whole nodes of eight.
    is_whole = per_node == _PEERS if degree > _PEERS else per_node % degree == 0
    if degree not in _DEGREES or not is_whole:
        return (
            f"it has no kernels for {degree} expert ranks on nodes of {per_node}; write expert_parallel_degree=2, 4 or "
            "8, inside a node"
        )
    for parameter in draft.shapes.parameters:
        is_experts = parameter.name.rpartition(".")[0] in draft.shapes.expert_names
        if is_experts and (computed or parameter.dtype) not in DTYPES:
            own = computed or parameter.dtype
            return f"its kernels take bfloat16, and {parameter.name} computes in {own}; write param_dtype='bfloat16'"
    return ""


_numbers = itertools.count()
_by_number: WeakValueDictionary[int, DeepEpDispatch] = WeakValueDictionary()


class DeepEpDispatch:
    """A token once to each rank. ``group``: the ranks that divide experts, on a
    communicator of its own."""

    def __init__(self, group: dist.ProcessGroup, meter: CommMeter) -> None:
        self._group, self._counts = group, Exchange(group, meter)
        self.degree, self.rank = self._counts.degree, self._counts.rank
        self._buffer: Any = None
        self._width = 0
        self._number = next(_numbers)
        _by_number[self._number] = self

    def __call__(
        self,
        tokens_TH: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        n_experts: int,
        run: Experts,
    ) -> Tensor:
        # Phase 1: tokens to ranks.
        weights_TK = weights_TK.float().contiguous()
        chosen_TK = chosen_TK.where(chosen_TK < n_experts, -1).contiguous()
        sent = _dispatch(
            tokens_TH.contiguous(), weights_TK, chosen_TK, n_experts, self._number
        )
        rows_MH, weights_MK, experts_MK, numbers, handle = sent

        # Phase 2: a row for each expert here, and the weighted sum of a token's.
        row_R, place_R = places(experts_MK >= 0, int(numbers[0]))
        made_RH = run(rows_MH[row_R], experts_MK[row_R, place_R])
        weighted_RH = made_RH * weights_MK[row_R, place_R].unsqueeze(-1)
        parts_MH = weighted_RH.new_zeros(rows_MH.shape).index_add(0, row_R, weighted_RH)

        # Phase 3: the sums to where the tokens are, added up over ranks.
        return _combine(parts_MH.to(tokens_TH.dtype), numbers, handle, self._number)

    def send(
        self, tokens_TH: Tensor, weights_TK: Tensor, chosen_TK: Tensor, n_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """Send tokens; return rows, weights and experts that arrive, how many rows
        experts get, leave to and arrive from each rank (on the host), and DeepEP's
        handle of it."""
        buffer = self._buffer_for(tokens_TH)
        to_ranks, to_nodes, to_experts, is_in_rank, _ = buffer.get_dispatch_layout(
            chosen_TK, n_experts
        )
        # One number for each rank: how many rows it sends here, for the meter's and
        # backward's counts.
        ones = [1] * self.degree
        arriving = self._counts.run(to_ranks, ones, ones, DISPATCH)
        # The host waits here once, and in DeepEP's own dispatch once more.
        ways = torch.cat([to_ranks, arriving]).tolist()
        size = row_bytes(tokens_TH) + row_bytes(weights_TK) + row_bytes(chosen_TK)
        with self._counts.sending(ways[: self.degree], size, DISPATCH):
            rows_MH, experts_MK, weights_MK, of_experts, handle, _ = buffer.dispatch(
                tokens_TH,
                topk_idx=chosen_TK,
                topk_weights=weights_TK,
                num_tokens_per_rank=to_ranks,
                num_tokens_per_rdma_rank=to_nodes,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=to_experts,
            )
        return (
            rows_MH,
            weights_MK,
            experts_MK,
            torch.tensor([sum(of_experts), *ways]),
            list(handle),
        )

    def send_again(
        self, tokens_TH: Tensor, numbers: Tensor, handle: list[Tensor]
    ) -> Tensor:
        """Send other rows the same ways: the gradient of :meth:`bring_back`."""
        with self._counts.sending(
            numbers[1 : 1 + self.degree].tolist(), row_bytes(tokens_TH), COMBINE
        ):
            rows_MH, *_ = self._buffer.dispatch(
                tokens_TH.contiguous(), handle=tuple(handle)
            )
        return rows_MH

    def bring_back(
        self,
        rows_MH: Tensor,
        weights_MK: Tensor | None,
        numbers: Tensor,
        handle: list[Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Add up rows where their tokens are; with weights: the gradient of
        :meth:`send`."""
        size = row_bytes(rows_MH) + (0 if weights_MK is None else row_bytes(weights_MK))
        # With weights it is the gradient of the way to experts.
        kind = COMBINE if weights_MK is None else DISPATCH
        with self._counts.sending(numbers[1 + self.degree :].tolist(), size, kind):
            weights_MK = None if weights_MK is None else weights_MK.contiguous()
            tokens_TH, weights_TK, _ = self._buffer.combine(
                rows_MH.contiguous(), tuple(handle), weights_MK
            )
        return tokens_TH, weights_TK

    def _buffer_for(self, tokens_TH: Tensor) -> Any:
        """Return a buffer for rows of this width. Collective where it is made: all
        ranks run the same layers."""
        width, (multiple, most) = tokens_TH.shape[1], _FEATURES[self.degree > _PEERS]
        if tokens_TH.dtype not in DTYPES or width % multiple or width > most:
            raise ValueError(
                f"collectives.expert_transport='deep_ep': its kernels take bfloat16 with a multiple of {multiple} "
                f"features up to {most}, and experts get {tokens_TH.dtype} with {width}; leave it out"
            )
        # A buffer for wider rows serves narrower ones too.
        if width > self._width:
            from deep_ep import Buffer

            asked = width * tokens_TH.element_size(), self.degree
            configs = (
                Buffer.get_dispatch_config(self.degree),
                Buffer.get_combine_config(self.degree),
            )
            inside = max(each.get_nvl_buffer_size_hint(*asked) for each in configs)
            across = 0  # builds without NVSHMEM refuse the question
            if self.degree > _PEERS:
                across = max(each.get_rdma_buffer_size_hint(*asked) for each in configs)
            self._buffer, self._width = Buffer(self._group, inside, across), width
        return self._buffer


@torch.library.custom_op("smp::deep_ep_dispatch", mutates_args=())
def _dispatch(
    tokens: Tensor, weights: Tensor, chosen: Tensor, n_experts: int, number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    return _by_number[number].send(tokens, weights, chosen, n_experts)


@torch.library.custom_op("smp::deep_ep_combine", mutates_args=())
def _combine(
    parts: Tensor, numbers: Tensor, handle: list[Tensor], number: int
) -> Tensor:
    return _by_number[number].bring_back(parts, None, numbers, handle)[0]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...] | Tensor) -> None:
    *given, ctx.number = inputs
    # Dispatch returns them, combine is given them.
    *_, numbers, handle = output if isinstance(output, tuple) else given
    ctx.save_for_backward(numbers, *handle)


def _back_to_tokens(
    ctx: Any, rows: Tensor, weights: Tensor, *_: Any
) -> tuple[Tensor | None, ...]:
    numbers, *handle = ctx.saved_tensors
    return (
        *_by_number[ctx.number].bring_back(rows, weights, numbers, handle),
        None,
        None,
        None,
    )


def _back_to_experts(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    numbers, *handle = ctx.saved_tensors
    return (
        _by_number[ctx.number].send_again(gradient, numbers, handle),
        None,
        [None] * len(handle),
        None,
    )


_dispatch.register_autograd(_back_to_tokens, setup_context=_save)
_combine.register_autograd(_back_to_experts, setup_context=_save)
keep_outputs_of(
    torch.ops.smp.deep_ep_dispatch, torch.ops.smp.deep_ep_combine, in_all_modes=True
)
