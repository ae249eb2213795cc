"""Float64 sums over all Gaussians of all pools on a GPU, where (B, M, N, D) would be too large."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from probprompt.errors import UserError

ROWS, COLUMNS, WARPS = 32, 64, 8
"""Images and features per program step, and warps."""


@triton.jit
def _distances(
    query,
    mean,
    inverse,
    result,
    batch,
    gaussians: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
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
def _centre(weights, mean, row, feature, batch, pool, pools: tl.constexpr, count: tl.constexpr, width: tl.constexpr):
    """Compute the mixture's mean for some rows and features of a pool."""
    total = tl.zeros((row.shape[0], feature.shape[0]), tl.float64)
    for number in range(count):
        share = tl.load(weights + (row * pools + pool) * count + number, mask=row < batch, other=0.0)  # (rows,)
        values = tl.load(mean + (pool * count + number) * width + feature, mask=feature < width, other=0.0)
        total += share[:, None] * values.to(tl.float64)[None, :]
    return total


@triton.jit
def _moments(
    weights,
    mean,
    variance,
    centre,
    std,
    batch,
    pools: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
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
    grad_centre,
    grad_std,
    std,
    weights,
    mean,
    variance,
    grad_weights,
    grad_mean,
    grad_variance,
    batch,
    pools: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    pool, part, slab = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (part * rows + tl.arange(0, rows)).to(tl.int64)
    feature = slab * columns + tl.arange(0, columns)
    middle = _centre(weights, mean, row, feature, batch, pool, pools, count, width)  # (rows, columns)
    whole = (row[:, None] * pools + pool) * width + feature[None, :]  # (rows, columns)
    mask = (row[:, None] < batch) & (feature[None, :] < width)
    # Distances are float64; gradients are accumulated in float32, over few numbers each.
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
        # Around the mixture's mean, which adds a constant to a row's weights; the softmax is invariant to it.
        slope = tl.sum((force + bend) * deviation + pull * own[None, :], 1)  # (rows,)
        target = ((slab * batch + row) * pools + pool) * count + number
        tl.store(grad_weights + target, slope, mask=row < batch)
        place += part * pools * count * width
        tl.store(grad_mean + place, tl.sum(share[:, None] * (force + 2 * bend), 0), mask=feature < width)
        tl.store(grad_variance + place, tl.sum(share[:, None] * pull, 0), mask=feature < width)


def distances(query: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Return float64 S² (B, M, N) of queries (B, D), means and float64 1/σ (M, N, D)."""
    batch, (pools, count, width) = len(query), mean.shape
    result = torch.empty(batch, pools, count, dtype=torch.float64, device=query.device)
    grid = (pools * count, triton.cdiv(batch, ROWS))
    sizes = {"gaussians": pools * count, "width": width, "rows": ROWS, "columns": COLUMNS, "num_warps": WARPS}
    _distances[grid](query.contiguous(), mean.contiguous(), inverse, result, batch, **sizes)
    return result


def moments(weights: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (B, M, D) of mixtures of Gaussians.

    weights (B, M, N), mean (M, N, D), σ² (M, N, D) in float64.
    """
    shape = (len(weights), mean.shape[0], mean.shape[2])
    centre, std = mean.new_empty(shape), mean.new_empty(shape)  # (B, M, D)
    grid, sizes = _cut(weights, mean)
    _moments[grid](weights, mean.contiguous(), variance, centre, std, len(weights), **sizes)
    return centre, std


def moments_backward(
    grad_centre: Tensor, grad_std: Tensor, std: Tensor, weights: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 gradients of weights (B, M, N), means and σ² (M, N, D).

    The weights' gradient is up to a constant per row.
    """
    grid, sizes = _cut(weights, mean)
    _, parts, slabs = grid
    grad_weights = weights.new_empty(slabs, *weights.shape, dtype=torch.float32)  # per program, to be summed
    grad_mean, grad_variance = mean.new_empty(2, parts, *mean.shape, dtype=torch.float32)
    tensors = (grad_centre.contiguous(), grad_std.contiguous(), std, weights, mean.contiguous(), variance)
    _moments_backward[grid](*tensors, grad_weights, grad_mean, grad_variance, len(weights), **sizes)
    slope, first, second = (part.sum(0, dtype=torch.float64) for part in (grad_weights, grad_mean, grad_variance))
    return slope, first, second


def _cut(weights: Tensor, mean: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return the grid of pools, images and features, and compile-time constants."""
    pools, count, width = mean.shape
    grid = (pools, triton.cdiv(len(weights), ROWS), triton.cdiv(width, COLUMNS))
    sizes = {"pools": pools, "count": count, "width": width, "rows": ROWS, "columns": COLUMNS, "num_warps": WARPS}
    return grid, sizes


WIDEST = 4096
"""Maximum width of a prompt: a program holds a whole one in registers."""
FEATURES_PER_WARP = 256
"""Features of a prompt per warp: fewer need fewer registers, but more exchange between threads."""
_ROUNDS = tl.constexpr(7)  # fewest rounds of Philox that pass known tests of randomness (Salmon et al. 2011)
_PLAIN = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter has no GPU instructions
_SHORTEST = tl.constexpr(1e-8)  # a shorter vector counts as zero, as in probprompt.equations


@triton.jit
def _pair(one, two):
    """Return two normal numbers from two random words."""
    share = one.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # (word + 1/2) / 2**32
    turn = two.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-9  # from -π to π
    if _PLAIN:
        bits, cosine, sine = tl.log2(share), tl.cos(turn), tl.sin(turn)
    else:  # one instruction each; the error of 1e-6 does not matter for noise
        bits, cosine, sine = libdevice.fast_log2f(share), libdevice.fast_cosf(turn), libdevice.fast_sinf(turn)
    length = tl.sqrt(
        tl.maximum(-1.3862943611198906 * bits, 0.0)
    )  # √(-2 ln share); near 1 the logarithm may be positive
    return length * cosine, length * sine


@triton.jit
def _normals(seed, row, pool, group, feature, width: tl.constexpr):
    """Return the noise of samples 4 group to 4 group + 3."""
    one, two, three, four = tl.philox(seed, row, pool, feature, group, _ROUNDS)
    noise0, noise1 = _pair(one, two)
    noise2, noise3 = _pair(three, four)
    # Lets the compiler skip a quarter if the width is three quarters of a power of two, as most are.
    inside = feature < width
    return (
        tl.where(inside, noise0, 0.0),
        tl.where(inside, noise1, 0.0),
        tl.where(inside, noise2, 0.0),
        tl.where(inside, noise3, 0.0),
    )


@triton.jit
def _plus(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _sums(a0, a1, a2, a3):
    """Compute four sums with one synchronization of threads."""
    return tl.reduce((a0, a1, a2, a3), 0, _plus)


@triton.jit
def _shrink(square, short):
    """Return 1 / (|P| |q|) from |P|² and 1 / |q|, bounded if either is zero."""
    return tl.minimum(tl.rsqrt(tl.maximum(square, _SHORTEST * _SHORTEST)) * short, 1 / _SHORTEST)


@triton.jit
def _weight(along, square, short, used):
    """Return exp(cos(P, q)) from <P, q> and |P|²; cosines need no maximum subtracted."""
    return tl.where(used, tl.exp(along * _shrink(square, short)), 0.0)


@triton.jit
def _slopes(along, square, slope, short, total, used):
    """Return the shares of q and of -P in the gradient of a sample P; slope: <G σ, ε - m>."""
    least = _SHORTEST * _SHORTEST
    shrink = _shrink(square, short)
    cosine = along * shrink
    change = tl.where(used, tl.exp(cosine) / total * slope, 0.0)  # of the loss by the cosine
    free = (square > least) & (shrink < 1 / _SHORTEST)  # otherwise the length has no effect
    return change * shrink, tl.where(free, change * cosine / tl.maximum(square, least), 0.0)


# Features are `step` = 1 apart, unknown to the compiler: otherwise it loads four per thread, draws noise one by one,
# and moves each number between threads through shared memory.
@triton.jit(do_not_specialize=["first", "step"])
def _forward(
    mean,
    std,
    query,
    seed,
    prompt,
    mixed,
    weight,
    first,
    step,
    pools: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    equal: tl.constexpr,
):
    program = tl.program_id(0)
    row, pool = program // pools, program % pools
    feature = tl.arange(0, columns)
    inside = feature < width
    place = program.to(tl.int64) * width + feature * step
    centre = tl.load(mean + place, mask=inside, other=0.0)  # (columns,)
    scale = tl.load(std + place, mask=inside, other=0.0)
    aim = tl.load(query + row.to(tl.int64) * width + feature * step, mask=inside, other=0.0).to(tl.float32)
    short = 1 / tl.maximum(tl.sqrt(tl.sum(aim * aim, 0)), 1e-30)
    key = tl.load(seed)
    middle = tl.zeros((columns,), tl.float32)  # Σ w ε
    total = 0.0  # Σ w
    for group in range((count + 3) // 4):
        noise0, noise1, noise2, noise3 = _normals(key, first + row, pool, group, feature, width)
        if equal:
            weight0, weight1 = tl.where(4 * group < count, 1.0, 0.0), tl.where(4 * group + 1 < count, 1.0, 0.0)
            weight2, weight3 = tl.where(4 * group + 2 < count, 1.0, 0.0), tl.where(4 * group + 3 < count, 1.0, 0.0)
        else:
            point0, point1 = centre + scale * noise0, centre + scale * noise1
            point2, point3 = centre + scale * noise2, centre + scale * noise3
            along0, along1, along2, along3 = _sums(point0 * aim, point1 * aim, point2 * aim, point3 * aim)
            square0, square1, square2, square3 = _sums(
                point0 * point0, point1 * point1, point2 * point2, point3 * point3
            )
            weight0 = _weight(along0, square0, short, 4 * group < count)
            weight1 = _weight(along1, square1, short, 4 * group + 1 < count)
            weight2 = _weight(along2, square2, short, 4 * group + 2 < count)
            weight3 = _weight(along3, square3, short, 4 * group + 3 < count)
        middle += weight0 * noise0 + weight1 * noise1 + weight2 * noise2 + weight3 * noise3
        total += weight0 + weight1 + weight2 + weight3
    middle = middle / total
    tl.store(prompt + place, centre + scale * middle, mask=inside)
    tl.store(mixed + place, middle, mask=inside)
    tl.store(weight + program, total)


@triton.jit(do_not_specialize=["first", "step"])
def _backward(
    grad,
    mean,
    std,
    query,
    seed,
    mixed,
    weight,
    grad_mean,
    grad_std,
    first,
    step,
    pools: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
):
    program = tl.program_id(0)
    row, pool = program // pools, program % pools
    feature = tl.arange(0, columns)
    inside = feature < width
    place = program.to(tl.int64) * width + feature * step
    centre = tl.load(mean + place, mask=inside, other=0.0)  # (columns,)
    scale = tl.load(std + place, mask=inside, other=0.0)
    aim = tl.load(query + row.to(tl.int64) * width + feature * step, mask=inside, other=0.0).to(tl.float32)
    middle = tl.load(mixed + place, mask=inside, other=0.0)
    slope = tl.load(grad + place, mask=inside, other=0.0)
    short = 1 / tl.maximum(tl.sqrt(tl.sum(aim * aim, 0)), 1e-30)
    key, total = tl.load(seed), tl.load(weight + program)
    scaled = slope * scale
    level = tl.sum(scaled * middle, 0)  # mean of <G σ, ε>
    # With u and v of _slopes: dμ = G + Σ (u q - v P), dσ = G m + Σ (u q - v P) ε, and P = μ + σ ε.
    sum_u, sum_v = 0.0, 0.0
    first_u, first_v, second_v = middle * 0, middle * 0, middle * 0  # Σ u ε, Σ v ε, Σ v ε²
    for group in range((count + 3) // 4):
        noise0, noise1, noise2, noise3 = _normals(key, first + row, pool, group, feature, width)
        point0, point1 = centre + scale * noise0, centre + scale * noise1
        point2, point3 = centre + scale * noise2, centre + scale * noise3
        along0, along1, along2, along3 = _sums(point0 * aim, point1 * aim, point2 * aim, point3 * aim)
        square0, square1, square2, square3 = _sums(point0 * point0, point1 * point1, point2 * point2, point3 * point3)
        slope0, slope1, slope2, slope3 = _sums(scaled * noise0, scaled * noise1, scaled * noise2, scaled * noise3)
        u0, v0 = _slopes(along0, square0, slope0 - level, short, total, 4 * group < count)
        u1, v1 = _slopes(along1, square1, slope1 - level, short, total, 4 * group + 1 < count)
        u2, v2 = _slopes(along2, square2, slope2 - level, short, total, 4 * group + 2 < count)
        u3, v3 = _slopes(along3, square3, slope3 - level, short, total, 4 * group + 3 < count)
        sum_u += u0 + u1 + u2 + u3
        sum_v += v0 + v1 + v2 + v3
        first_u += u0 * noise0 + u1 * noise1 + u2 * noise2 + u3 * noise3
        v0, v1, v2, v3 = v0 * noise0, v1 * noise1, v2 * noise2, v3 * noise3
        first_v += v0 + v1 + v2 + v3
        second_v += v0 * noise0 + v1 * noise1 + v2 * noise2 + v3 * noise3
    tl.store(grad_mean + place, slope + sum_u * aim - sum_v * centre - scale * first_v, mask=inside)
    tl.store(grad_std + place, slope * middle + first_u * aim - first_v * centre - scale * second_v, mask=inside)


@triton.jit(do_not_specialize=["first", "place"])
def _write_noise(
    seed, result, first, place, pools: tl.constexpr, count: tl.constexpr, width: tl.constexpr, columns: tl.constexpr
):
    program, group = tl.program_id(0), tl.program_id(1)
    row, pool = program // pools, program % pools
    feature = tl.arange(0, columns)
    noise0, noise1, noise2, noise3 = _normals(tl.load(seed), first + row, place + pool, group, feature, width)
    target = result + (program.to(tl.int64) * count + 4 * group) * width + feature
    tl.store(target, noise0, mask=feature < width)
    tl.store(target + width, noise1, mask=(feature < width) & (4 * group + 1 < count))
    tl.store(target + 2 * width, noise2, mask=(feature < width) & (4 * group + 2 < count))
    tl.store(target + 3 * width, noise3, mask=(feature < width) & (4 * group + 3 < count))


def sampled_prompt(
    mean: Tensor, std: Tensor, query: Tensor, seed: Tensor, count: int, first: int = 0, equal: bool = False
) -> Tensor:
    """Average samples of each Gaussian by cosine to the query, or equally (Eqs. 8-10).

    mean and std (B, M, D) in float32, query (B, D), seed (1,) in int64 -> (B, M, D): equals
    :func:`probprompt.equations.sampled_prompt` with ``noise(B, M, count, D, seed, first)``. Gradients reach mean and
    std.
    """
    if query.requires_grad:
        raise ValueError("The sampling kernel has no gradient for the query. Detach it.")
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}.")
    if mean.dtype != torch.float32 or std.dtype != torch.float32:
        raise ValueError(f"The sampling kernel needs mean and std in float32, got {mean.dtype} and {std.dtype}.")
    result: Tensor = _Sampled.apply(mean, std, query, seed, count, first, equal)  # type: ignore[no-untyped-call]
    return result


def noise(rows: int, pools: int, count: int, width: int, seed: Tensor, first: int = 0, place: int = 0) -> Tensor:
    """Return the float32 noise ``(rows, pools, count, width)`` of :func:`sampled_prompt`.

    ``first`` numbers the first row in the whole batch, ``place`` the first pool among all pools.
    """
    result = torch.empty(rows, pools, count, width, device=seed.device)
    grid = (rows * pools, -(-count // 4))
    _write_noise[grid](seed, result, first, place, pools, count, **_sizes(width))
    return result


class _Sampled(torch.autograd.Function):
    """The prompt with its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, std: Tensor, query: Tensor, seed: Tensor, count: int, first: int, equal: bool
    ) -> Tensor:
        """Sample and average."""
        mean, std, query = mean.contiguous(), std.contiguous(), query.contiguous()
        rows, pools, width = mean.shape
        prompt, mixed = torch.empty_like(mean), torch.empty_like(mean)  # (B, M, D)
        weight = mean.new_empty(rows, pools)  # (B, M)
        ctx.sizes, ctx.first, ctx.equal = {"pools": pools, "count": count, **_sizes(width)}, first, equal
        tensors = (mean, std, query, seed, prompt, mixed, weight)
        _forward[(rows * pools,)](*tensors, first, 1, equal=equal, **ctx.sizes)
        ctx.save_for_backward(mean, std, query, seed, mixed, weight)
        return prompt

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Compute gradients, drawing the noise again."""
        mean, std, query, seed, mixed, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()  # (B, M, D)
        if ctx.equal:
            return gradient, gradient * mixed, None, None, None, None, None
        grad_mean, grad_std = torch.empty_like(mean), torch.empty_like(mean)  # (B, M, D)
        tensors = (gradient, mean, std, query, seed, mixed, weight, grad_mean, grad_std)
        _backward[(weight.numel(),)](*tensors, ctx.first, 1, **ctx.sizes)
        return grad_mean, grad_std, None, None, None, None, None


def _sizes(width: int) -> dict[str, int]:
    """Return compile-time constants and the number of warps."""
    if width > WIDEST:
        raise UserError(f"The sampling kernel supports widths up to {WIDEST}, got {width}. Set PROBPROMPT_KERNELS=off.")
    columns = 1 << (width - 1).bit_length()
    return {"width": width, "columns": columns, "num_warps": max(1, columns // FEATURES_PER_WARP)}
