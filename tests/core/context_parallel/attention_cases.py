"""Attention over ranks against attention in one process, written out with a mask of S x S elements."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from smp_core.context_parallel.attention import attention
from smp_core.context_parallel.plan import SequencePlan, document_starts, padded_length
from smp_core.context_parallel.traffic import ContextGroup, register_group

MASKS = (
    "causal",
    "window",
    "packed",
    "packed window",
    "left pad",
    "right pad",
    "left pad window",
    "bidirectional",
    "bidirectional packed",
)


@dataclass(frozen=True)
class Case:
    mask: str
    heads: tuple[int, int] = (8, 2)
    size: int = 64
    length: int = 64
    batch: int = 3
    head_groups: int = 1
    order: str = "zigzag"
    value_size: int | None = None


def matrix() -> list[Case]:
    """Everything the operator promises, in every combination."""
    return [
        Case(mask, heads, size, length, batch, groups, order)
        for mask, heads, size, length, batch, groups, order in itertools.product(
            MASKS, ((8, 8), (8, 2), (8, 1)), (64, 80), (64, 61, 7), (1, 3), (1, 2), ("zigzag", "contiguous")
        )
    ]


def sample(seed: int = 0, per_mask: int = 1) -> list[Case]:
    """Some of :func:`matrix`, of every mask, the plain ones included."""
    chosen = [Case(mask) for mask in MASKS]
    for mask in MASKS:
        chosen += random.Random(f"{seed} {mask}").sample([case for case in matrix() if case.mask == mask], per_mask)
    return [*chosen, Case("causal", value_size=32), Case("packed window", value_size=48)]


def document_ids(case: Case) -> torch.Tensor:
    """[B, S]: other documents in every row; a run of padding is a document of its own."""
    ids = torch.zeros(case.batch, case.length, dtype=torch.long)
    generator = torch.Generator().manual_seed(5)
    for row in range(case.batch):
        at = int(torch.randint(1, case.length, (), generator=generator))
        if "packed" in case.mask:
            cuts = torch.randperm(case.length - 1, generator=generator)[: 1 + row * 2] + 1
            ids[row, cuts] = 1
            ids[row] = ids[row].cumsum(0)
        elif "left" in case.mask or "right" in case.mask:
            ids[row, at:] = 1
    return ids


def visible(case: Case) -> tuple[torch.Tensor, bool, int | None]:
    """[B, S, S], whether causal, the window."""
    ids = document_ids(case)
    seen = ids[:, :, None] == ids[:, None]
    causal, window = "bidirectional" not in case.mask, 9 if "window" in case.mask else None
    query, key = torch.arange(case.length)[:, None], torch.arange(case.length)[None]
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= key > query - window
    return seen, causal, window


def inputs(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output: [B, S, H, D]."""
    generator = torch.Generator().manual_seed(11)
    heads, kv_heads = case.heads
    value_size = case.value_size or case.size
    shapes = [(heads, case.size), (kv_heads, case.size), (kv_heads, value_size), (heads, value_size)]
    made = [torch.randn(case.batch, case.length, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype) for tensor in made]


def alone(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of queries, keys and values: softmax over an explicit mask, of inputs in ``dtype``, computed
    in float64."""
    q, k, v, grad = (tensor.double() for tensor in inputs(case, dtype))
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    share = case.heads[0] // case.heads[1]
    wide_k, wide_v = (tensor.repeat_interleave(share, 2) for tensor in (k, v))
    scores = torch.einsum("blhd,bmhd->bhlm", q, wide_k) * case.size**-0.5
    weights = scores.masked_fill(~visible(case)[0][:, None], float("-inf")).softmax(-1)
    out = torch.einsum("bhlm,bmhe->blhe", weights, wide_v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def sdpa(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same from torch's own attention in ``dtype``."""
    q, k, v, grad = (tensor.transpose(1, 2) for tensor in inputs(case, dtype))
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible(case)[0][:, None], enable_gqa=True
        )
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    return [tensor.transpose(1, 2) for tensor in found]


_registered: dict[int, ContextGroup] = {}


def group_of(head_groups: int) -> ContextGroup:
    key = id(dist.group.WORLD), head_groups
    if key not in _registered:
        _registered[key] = register_group(dist.group.WORLD, head_groups=head_groups)
    return _registered[key]


def plan_of(case: Case, group: ContextGroup) -> SequencePlan:
    ids = document_ids(case)
    length = padded_length(case.length, group.degree)
    ids = torch.cat([ids, torch.full((case.batch, length - case.length), -1)], 1)
    return SequencePlan(group.degree, length, document_starts(ids), case.order, group.number)


def together(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """This rank's part of the same, and where in the sequence it belongs (last)."""
    group = group_of(case.head_groups)
    plan = plan_of(case, group)
    positions = plan.positions(group.rank)
    missing = plan.length - case.length
    local = [
        torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, missing)).index_select(1, positions)
        for tensor in inputs(case, dtype)
    ]
    q, k, v, grad = local
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    _, causal, window = visible(case)
    out = attention(q, k, v, plan.encode(), causal=causal, window=window)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    kept = positions < case.length
    return [*(tensor[:, kept] for tensor in found), positions[kept]]


def largest_errors(cases: list[Case]) -> list[dict]:
    """float64: for every case the largest error of output and gradients on this rank."""
    found = []
    for case in cases:
        expected = alone(case, torch.float64)
        *ours, positions = together(case, torch.float64)
        worst = [
            (mine - whole[:, positions]).abs().max().item() if len(positions) else 0.0
            for mine, whole in zip(ours, expected, strict=True)
        ]
        found.append({**asdict(case), "worst": max(worst)})
    return found


def squared_errors(cases: list[Case], dtype: torch.dtype) -> list[list[tuple[float, float]]]:
    """For every case, of output and each gradient: the summed squared error against float64 on this rank's tokens,
    ours and torch's own attention's in one process."""
    found = []
    for case in cases:
        exact, theirs = alone(case, dtype), sdpa(case, dtype)
        *ours, positions = together(case, dtype)
        found.append(
            [
                (
                    (mine.double() - whole[:, positions]).square().sum().item(),
                    (other.double() - whole)[:, positions].square().sum().item(),
                )
                for mine, other, whole in zip(ours, theirs, exact, strict=True)
            ]
        )
    return found
