"""Attention of one token, the one that is read out, to all: what the last block needs."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 512
"""The longest sequence: a program holds the keys of a head."""


@triton.jit
def _place(length: tl.constexpr, head: tl.constexpr, rows: tl.constexpr, wide: tl.constexpr) -> tl.tuple:
    """Rows of the sequence, columns of the head, and where they are of use."""
    row = tl.arange(0, rows)
    column = tl.arange(0, wide)
    return row, column, row < length, column < head


@triton.jit
def _read(
    query: tl.tensor,
    packed: tl.tensor,
    mixed: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    heads: tl.constexpr,
    head: tl.constexpr,
    length: tl.constexpr,
    rows: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    image, which = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0) % heads
    row, column, used, known = _place(length, head, rows, wide)
    width: tl.constexpr = heads * head
    at = image * width + which * head + column
    source = packed + (image * length + row[:, None]) * (2 * width) + which * head + column[None, :]
    mask = used[:, None] & known[None, :]
    key = tl.load(source, mask=mask, other=0.0).to(tl.float32)  # (rows, wide)
    value = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    asked = tl.load(query + at, mask=known, other=0.0).to(tl.float32)  # (wide,)
    logits = tl.where(used, tl.sum(key * asked[None, :], axis=1) * scale, float("-inf"))  # (rows,)
    share = tl.exp(logits - tl.max(logits, axis=0))
    share = share / tl.sum(share, axis=0)
    tl.store(weights + tl.program_id(0).to(tl.int64) * length + row, share, mask=used)
    answer = tl.sum(value * share[:, None], axis=0)  # (wide,)
    tl.store(mixed + at, answer.to(mixed.dtype.element_ty), mask=known)


@triton.jit
def _read_backward(
    grad: tl.tensor,
    query: tl.tensor,
    packed: tl.tensor,
    weights: tl.tensor,
    grad_query: tl.tensor,
    grad_packed: tl.tensor,
    scale: tl.tensor,
    heads: tl.constexpr,
    head: tl.constexpr,
    length: tl.constexpr,
    rows: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    image, which = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0) % heads
    row, column, used, known = _place(length, head, rows, wide)
    width: tl.constexpr = heads * head
    at = image * width + which * head + column
    place = (image * length + row[:, None]) * (2 * width) + which * head + column[None, :]
    mask = used[:, None] & known[None, :]
    value = tl.load(packed + width + place, mask=mask, other=0.0).to(tl.float32)  # (rows, wide)
    given = tl.load(grad + at, mask=known, other=0.0).to(tl.float32)  # (wide,)
    share = tl.load(weights + tl.program_id(0).to(tl.int64) * length + row, mask=used, other=0.0)  # (rows,)
    kind = grad_packed.dtype.element_ty
    tl.store(grad_packed + width + place, (share[:, None] * given[None, :]).to(kind), mask=mask)
    slope = tl.sum(value * given[None, :], axis=1)  # (rows,)
    slope = share * (slope - tl.sum(slope * share, axis=0)) * scale
    asked = tl.load(query + at, mask=known, other=0.0).to(tl.float32)
    tl.store(grad_packed + place, (slope[:, None] * asked[None, :]).to(kind), mask=mask)
    key = tl.load(packed + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(grad_query + at, tl.sum(key * slope[:, None], axis=0).to(grad_query.dtype.element_ty), mask=known)


def read(query: Tensor, packed: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Mix values for one query (B, W) of each image; packed keys and values (B, T, 2 W).

    Returns what is mixed (B, W), and the weights (B, heads, T) in float32 that the way back needs.
    """
    mixed = torch.empty_like(query)
    weights = torch.empty(len(query), heads, packed.shape[1], dtype=torch.float32, device=query.device)
    _read[(len(query) * heads,)](query, packed, mixed, weights, scale, **_shape(query, packed, heads))
    return mixed, weights


def read_backward(
    grad: Tensor, query: Tensor, packed: Tensor, weights: Tensor, heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the query (B, W) and of the packed keys and values (B, T, 2 W) for that of what was mixed."""
    grad_query, grad_packed = torch.empty_like(query), torch.empty_like(packed)
    given = (grad.contiguous(), query, packed, weights, grad_query, grad_packed)
    _read_backward[(len(query) * heads,)](*given, scale, **_shape(query, packed, heads))
    return grad_query, grad_packed


def _shape(query: Tensor, packed: Tensor, heads: int) -> dict[str, int]:
    head, length = query.shape[1] // heads, packed.shape[1]
    rows, wide = triton.next_power_of_2(length), triton.next_power_of_2(head)
    sizes = {"heads": heads, "head": head, "length": length, "rows": rows, "wide": wide}
    return {**sizes, "num_warps": 8 if rows > 256 else 4}
