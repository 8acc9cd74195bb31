"""Attention over ranks against attention in one process, written out with a mask of S x
S elements."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from smp_core.context_parallel.attention import attention
from smp_core.context_parallel.key_value_exchange import ContextGroup, register_group
from smp_core.context_parallel.sequence_plan import (
    SequencePlan,
    document_starts,
    padded_length,
)

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
    "chunked",
    "packed chunked",
    "left pad chunked",
)
CHUNK = 5


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
    sinks: bool = False


def matrix() -> list[Case]:
    """Everything the operator promises, in every combination; every fifth of them with
    sinks too."""
    plain = [
        Case(mask, heads, size, length, batch, groups, order)
        for mask, heads, size, length, batch, groups, order in itertools.product(
            MASKS,
            ((8, 8), (8, 2), (8, 1)),
            (64, 80),
            (64, 61, 7),
            (1, 3),
            (1, 2),
            ("zigzag", "contiguous"),
        )
    ]
    return [*plain, *(replace(case, sinks=True) for case in plain[::5])]


def sample(seed: int = 0, per_mask: int = 1) -> list[Case]:
    """Some of :func:`matrix`, of every mask, the plain ones included."""
    chosen = [Case(mask) for mask in MASKS]
    for mask in MASKS:
        chosen += random.Random(f"{seed} {mask}").sample(
            [case for case in matrix() if case.mask == mask], per_mask
        )
    chosen += [
        Case(mask, sinks=True, head_groups=2)
        for mask in ("causal", "window", "packed", "bidirectional")
    ]
    # Multi-head latent attention.
    latent = Case("packed", heads=(4, 4), size=192, value_size=128)
    return [
        *chosen,
        latent,
        Case("causal", value_size=32, sinks=True),
        Case("packed window", value_size=48),
    ]


def document_ids(case: Case) -> torch.Tensor:
    """[B, S]: other documents in every row; a run of padding is a document of its
    own."""
    ids = torch.zeros(case.batch, case.length, dtype=torch.long)
    generator = torch.Generator().manual_seed(5)
    for row in range(case.batch):
        at = int(torch.randint(1, case.length, (), generator=generator))
        if "packed" in case.mask:
            cuts = (
                torch.randperm(case.length - 1, generator=generator)[: 1 + row * 2] + 1
            )
            ids[row, cuts] = 1
            ids[row] = ids[row].cumsum(0)
        elif "left" in case.mask or "right" in case.mask:
            ids[row, at:] = 1
    return ids


def visible(case: Case) -> tuple[torch.Tensor, bool, int | None]:
    """[B, S, S], whether causal, the window."""
    ids = document_ids(case)
    seen = ids[:, :, None] == ids[:, None]
    causal, window = (
        "bidirectional" not in case.mask,
        9 if "window" in case.mask else None,
    )
    query, key = torch.arange(case.length)[:, None], torch.arange(case.length)[None]
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= key > query - window
    if "chunked" in case.mask:
        begins = torch.nn.functional.pad(ids.diff(dim=1) != 0, (1, 0))
        place = key - torch.where(begins, key, 0).cummax(1).values
        seen &= place[:, :, None] // CHUNK == place[:, None] // CHUNK
    return seen, causal, window


def inputs(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output: [B, S, H, D]."""
    generator = torch.Generator().manual_seed(11)
    heads, kv_heads = case.heads
    value_size = case.value_size or case.size
    shapes = [
        (heads, case.size),
        (kv_heads, case.size),
        (kv_heads, value_size),
        (heads, value_size),
    ]
    made = [
        torch.randn(
            case.batch, case.length, *shape, generator=generator, dtype=torch.float64
        )
        for shape in shapes
    ]
    return [tensor.to(dtype) for tensor in made]


def sinks_of(case: Case, dtype: torch.dtype) -> torch.Tensor | None:
    """[H], some far below the scores and some far above."""
    return (
        torch.linspace(-4, 6, case.heads[0], dtype=torch.float64).to(dtype)
        if case.sinks
        else None
    )


def alone(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of queries, keys, values and sinks: softmax over an explicit
    mask, and the sinks beside the scores, of inputs in ``dtype``, computed in
    float64."""
    q, k, v, grad = (tensor.double() for tensor in inputs(case, dtype))
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    share = case.heads[0] // case.heads[1]
    wide_k, wide_v = (tensor.repeat_interleave(share, 2) for tensor in (k, v))
    scores = torch.einsum("blhd,bmhd->bhlm", q, wide_k) * case.size**-0.5
    scores = scores.masked_fill(~visible(case)[0][:, None], float("-inf"))
    learned = [q, k, v]
    if (sinks := sinks_of(case, dtype)) is not None:
        learned.append(sinks := sinks.double().requires_grad_(True))
        scores = torch.cat(
            [scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1
        )
    out = torch.einsum(
        "bhlm,bmhe->blhe", scores.softmax(-1)[..., : case.length], wide_v
    )
    return [out.detach(), *torch.autograd.grad(out, learned, grad)]


def sdpa(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same from torch's own attention in ``dtype``; sinks as the scores of a key of
    zeros."""
    q, k, v, grad = (tensor.transpose(1, 2) for tensor in inputs(case, dtype))
    learned = [tensor.requires_grad_(True) for tensor in (q, k, v)]
    mask, sinks = visible(case)[0][:, None], sinks_of(case, dtype)

    def attend(mask: torch.Tensor) -> torch.Tensor:
        missing = mask.shape[-1] - case.length
        keys, values = (
            torch.nn.functional.pad(tensor, (0, 0, 0, missing)) for tensor in (k, v)
        )
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, enable_gqa=True
            )

    if sinks is not None:
        shape = (case.batch, case.heads[0], case.length)
        scores = (
            torch.zeros(mask.shape, dtype=dtype)
            .masked_fill(~mask, float("-inf"))
            .expand(*shape, -1)
        )
        mask = torch.cat(
            [scores, sinks.requires_grad_(True)[:, None, None].expand(*shape, 1)], -1
        )
    out = attend(mask.detach())
    found = [out.detach(), *torch.autograd.grad(out, learned, grad)]
    found = [tensor.transpose(1, 2) for tensor in found]
    # Flash attention has no gradient of its mask: plain products for the sinks alone.
    return (
        found
        if sinks is None
        else [*found, *torch.autograd.grad(attend(mask), [sinks], grad)]
    )


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
    plan = SequencePlan(
        group.degree, length, document_starts(ids), case.order, group.number
    )
    return plan.in_chunks(CHUNK) if "chunked" in case.mask else plan


def together(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """This rank's part of the same (of the sinks' gradient all ranks'), and where in
    the sequence it belongs (last)."""
    group = group_of(case.head_groups)
    plan = plan_of(case, group)
    positions = plan.positions(group.rank)
    missing = plan.length - case.length
    local = [
        torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, missing)).index_select(
            1, positions
        )
        for tensor in inputs(case, dtype)
    ]
    q, k, v, grad = local
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    _, causal, window = visible(case)
    learned = [q, k, v]
    if (sinks := sinks_of(case, dtype)) is not None:
        learned.append(sinks.requires_grad_(True))
    out = attention(q, k, v, plan.encode(), causal=causal, window=window, sinks=sinks)
    found = [out.detach(), *torch.autograd.grad(out, learned, grad)]
    kept = positions < case.length
    of_sinks = found[4:]
    for gradient in of_sinks:
        dist.all_reduce(gradient)
    return [*(tensor[:, kept] for tensor in found[:4]), *of_sinks, positions[kept]]


def largest_errors(cases: list[Case]) -> list[dict]:
    """float64: for every case the largest error of output and gradients on this
    rank."""
    found = []
    for case in cases:
        expected = alone(case, torch.float64)
        *ours, positions = together(case, torch.float64)
        expected[:4] = [whole[:, positions] for whole in expected[:4]]
        worst = [
            (mine - whole).abs().max().item() if mine.numel() else 0.0
            for mine, whole in zip(ours, expected, strict=True)
        ]
        found.append({**asdict(case), "worst": max(worst)})
    return found


def squared_errors(
    cases: list[Case], dtype: torch.dtype
) -> list[list[tuple[float, float]]]:
    """For every case, of output and each gradient: the summed squared error against
    float64 on this rank's tokens, ours and torch's own attention's in one process."""
    found = []
    for case in cases:
        exact, theirs = alone(case, dtype), sdpa(case, dtype)
        *ours, positions = together(case, dtype)
        for whole in (exact, theirs):
            whole[:4] = [tensor[:, positions] for tensor in whole[:4]]
        found.append(
            [
                tuple(
                    (tensor.double() - right).square().sum().item()
                    for tensor in (mine, other)
                )
                for mine, other, right in zip(ours, theirs, exact, strict=True)
            ]
        )
    return found
