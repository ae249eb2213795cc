"""Sums over all Gaussians of all pools on a GPU, in float64: what mixture.py needs where (B, M, N, D) is too large."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 32, 64, 8
"""Images and features that a program sees at a time, and its warps."""


@triton.jit
def _distances(
    query: tl.tensor,
    mean: tl.tensor,
    inverse: tl.tensor,
    result: tl.tensor,
    batch: tl.tensor,
    gaussians: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    gaussian = tl.program_id(0)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    total = tl.zeros((rows, columns), tl.float64)
    for start in range(0, width, columns):
        feature = start + tl.arange(0, columns)
        inside = feature < width
        place = gaussian * width + feature
        shrink = tl.load(inverse + place, mask=inside, other=0.0)  # (columns,), 1/σ
        origin = tl.load(mean + place, mask=inside, other=0.0).to(tl.float64) * shrink  # (columns,)
        mask = (row[:, None] < batch) & inside[None, :]
        values = tl.load(query + row[:, None] * width + feature[None, :], mask=mask, other=0.0)  # (rows, columns)
        whitened = values.to(tl.float64) * shrink[None, :] - origin[None, :]
        total += whitened * whitened
    tl.store(result + row.to(tl.int64) * gaussians + gaussian, tl.sum(total, 1), mask=row < batch)


@triton.jit
def _centre(
    weights: tl.tensor,
    mean: tl.tensor,
    row: tl.tensor,
    feature: tl.tensor,
    batch: tl.tensor,
    pool: tl.tensor,
    pools: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """The mixture's mean for some rows and features of a pool."""
    total = tl.zeros((row.shape[0], feature.shape[0]), tl.float64)
    for number in range(count):
        share = tl.load(weights + (row * pools + pool) * count + number, mask=row < batch, other=0.0)  # (rows,)
        values = tl.load(mean + (pool * count + number) * width + feature, mask=feature < width, other=0.0)
        total += share[:, None] * values.to(tl.float64)[None, :]
    return total


@triton.jit
def _moments(
    weights: tl.tensor,
    mean: tl.tensor,
    variance: tl.tensor,
    centre: tl.tensor,
    std: tl.tensor,
    batch: tl.tensor,
    pools: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    pool = tl.program_id(0)
    row = (tl.program_id(1) * rows + tl.arange(0, rows)).to(tl.int64)
    feature = tl.program_id(2) * columns + tl.arange(0, columns)
    middle = _centre(weights, mean, row, feature, batch, pool, pools, count, width)  # (rows, columns)
    total = tl.zeros((rows, columns), tl.float64)
    for number in range(count):
        share = tl.load(weights + (row * pools + pool) * count + number, mask=row < batch, other=0.0)  # (rows,)
        place = (pool * count + number) * width + feature
        deviation = tl.load(mean + place, mask=feature < width, other=0.0).to(tl.float64)[None, :] - middle
        spread = tl.load(variance + place, mask=feature < width, other=0.0)  # (columns,)
        total += share[:, None] * (deviation * deviation + spread[None, :])
    target = (row[:, None] * pools + pool) * width + feature[None, :]
    mask = (row[:, None] < batch) & (feature[None, :] < width)
    tl.store(centre + target, middle.to(centre.dtype.element_ty), mask=mask)
    tl.store(std + target, tl.sqrt(total).to(std.dtype.element_ty), mask=mask)


@triton.jit
def _moments_backward(
    grad_centre: tl.tensor,
    grad_std: tl.tensor,
    std: tl.tensor,
    weights: tl.tensor,
    mean: tl.tensor,
    variance: tl.tensor,
    grad_weights: tl.tensor,
    grad_mean: tl.tensor,
    grad_variance: tl.tensor,
    batch: tl.tensor,
    pools: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    pool, part, slab = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (part * rows + tl.arange(0, rows)).to(tl.int64)
    feature = slab * columns + tl.arange(0, columns)
    middle = _centre(weights, mean, row, feature, batch, pool, pools, count, width)  # (rows, columns)
    whole = (row[:, None] * pools + pool) * width + feature[None, :]  # (rows, columns)
    mask = (row[:, None] < batch) & (feature[None, :] < width)
    # Distances are taken in float64; what is added up to gradients is float32, where a sum is of few numbers.
    force = tl.load(grad_centre + whole, mask=mask, other=0.0).to(tl.float32)
    spread = tl.load(std + whole, mask=mask, other=1.0).to(tl.float32)
    pull = 0.5 * tl.load(grad_std + whole, mask=mask, other=0.0).to(tl.float32) / spread  # by the variance
    for number in range(count):
        share = tl.load(weights + (row * pools + pool) * count + number, mask=row < batch, other=0.0).to(tl.float32)
        place = (pool * count + number) * width + feature
        deviation = tl.load(mean + place, mask=feature < width, other=0.0).to(tl.float64)[None, :] - middle
        deviation = deviation.to(tl.float32)  # (rows, columns)
        own = tl.load(variance + place, mask=feature < width, other=0.0).to(tl.float32)  # (columns,)
        bend = pull * deviation
        # Around the mixture's mean: that changes all weights of a row by one number, and a softmax does not mind.
        slope = tl.sum((force + bend) * deviation + pull * own[None, :], 1)  # (rows,)
        target = ((slab * batch + row) * pools + pool) * count + number
        tl.store(grad_weights + target, slope, mask=row < batch)
        place += part * pools * count * width
        tl.store(grad_mean + place, tl.sum(share[:, None] * (force + 2 * bend), 0), mask=feature < width)
        tl.store(grad_variance + place, tl.sum(share[:, None] * pull, 0), mask=feature < width)


def distances(query: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """S² (B, M, N) in float64 of queries (B, D), means (M, N, D) and 1/σ (M, N, D) in float64."""
    batch, (pools, count, width) = len(query), mean.shape
    result = torch.empty(batch, pools, count, dtype=torch.float64, device=query.device)
    grid = (pools * count, triton.cdiv(batch, ROWS))
    sizes = {"gaussians": pools * count, "width": width, "rows": ROWS, "columns": COLUMNS, "num_warps": WARPS}
    _distances[grid](query.contiguous(), mean.contiguous(), inverse, result, batch, **sizes)
    return result


def moments(weights: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (B, M, D) of mixtures: weights (B, M, N), σ² (M, N, D) in float64, mean (M, N, D)."""
    shape = (len(weights), mean.shape[0], mean.shape[2])
    centre, std = mean.new_empty(shape), mean.new_empty(shape)  # (B, M, D)
    grid, sizes = _cut(weights, mean)
    _moments[grid](weights, mean.contiguous(), variance, centre, std, len(weights), **sizes)
    return centre, std


def moments_backward(
    grad_centre: Tensor, grad_std: Tensor, std: Tensor, weights: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the weights (B, M, N), up to one number per row, of the means and of σ² (M, N, D), in float64."""
    grid, sizes = _cut(weights, mean)
    _, parts, slabs = grid
    grad_weights = weights.new_empty(slabs, *weights.shape, dtype=torch.float32)  # of each program, to be summed
    grad_mean, grad_variance = mean.new_empty(2, parts, *mean.shape, dtype=torch.float32)
    tensors = (grad_centre.contiguous(), grad_std.contiguous(), std, weights, mean.contiguous(), variance)
    _moments_backward[grid](*tensors, grad_weights, grad_mean, grad_variance, len(weights), **sizes)
    slope, first, second = (part.sum(0, dtype=torch.float64) for part in (grad_weights, grad_mean, grad_variance))
    return slope, first, second


def _cut(weights: Tensor, mean: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Programs by pool, images and features, and what they are compiled for."""
    pools, count, width = mean.shape
    grid = (pools, triton.cdiv(len(weights), ROWS), triton.cdiv(width, COLUMNS))
    sizes = {"pools": pools, "count": count, "width": width, "rows": ROWS, "columns": COLUMNS, "num_warps": WARPS}
    return grid, sizes
