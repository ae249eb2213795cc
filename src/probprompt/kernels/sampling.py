"""Sampled prompts (Eqs. 8 to 10) without the samples: noise is made in registers, and made again on the way back.

A number of the noise depends on the seed and on its place alone, that is on the row of the whole batch, the pool, the
sample and the feature: Philox, a counter-based generator, then Box and Muller's transformation.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from probprompt.errors import UserError

WIDEST = 4096
"""The widest prompt: a program holds a whole one in its registers."""
FEATURES_PER_WARP = 256
"""Features of a prompt per warp: fewer need fewer registers, and more exchange between threads."""

_ROUNDS = tl.constexpr(7)  # the fewest with which Philox passes the known tests of randomness (Salmon et al. 2011)
_PLAIN = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter knows no instructions of the GPU
_SHORTEST = tl.constexpr(1e-8)  # a shorter vector counts as zero, as in probprompt.equations


@triton.jit
def _pair(one: tl.tensor, two: tl.tensor) -> tl.tensor:
    """Two normal numbers of two random words."""
    share = one.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # (word + 1/2) / 2**32
    turn = two.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-9  # from -π to π
    if _PLAIN:
        bits, cosine, sine = tl.log2(share), tl.cos(turn), tl.sin(turn)
    else:  # one instruction each; what they lose, 1e-6, is nothing to noise
        bits, cosine, sine = libdevice.fast_log2f(share), libdevice.fast_cosf(turn), libdevice.fast_sinf(turn)
    length = tl.sqrt(tl.maximum(-1.3862943611198906 * bits, 0.0))  # √(-2 ln share); near 1 the logarithm may be above 0
    return length * cosine, length * sine


@triton.jit
def _normals(
    seed: tl.tensor, row: tl.tensor, pool: tl.tensor, group: tl.tensor, feature: tl.tensor, width: tl.constexpr
) -> tl.tensor:
    """The noise of samples 4 group to 4 group + 3."""
    one, two, three, four = tl.philox(seed, row, pool, feature, group, _ROUNDS)
    noise0, noise1 = _pair(one, two)
    noise2, noise3 = _pair(three, four)
    # With a width of three quarters of a power of two, as most have, this tells the compiler to leave a quarter out.
    inside = feature < width
    return (
        tl.where(inside, noise0, 0.0),
        tl.where(inside, noise1, 0.0),
        tl.where(inside, noise2, 0.0),
        tl.where(inside, noise3, 0.0),
    )


@triton.jit
def _plus(
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    b2: tl.tensor,
    b3: tl.tensor,
) -> tl.tensor:
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _sums(a0: tl.tensor, a1: tl.tensor, a2: tl.tensor, a3: tl.tensor) -> tl.tensor:
    """Four sums at once: threads wait for each other once, not four times."""
    return tl.reduce((a0, a1, a2, a3), 0, _plus)


@triton.jit
def _shrink(square: tl.tensor, short: tl.tensor) -> tl.tensor:
    """1 / (|P| |q|) of |P|² and 1 / |q|, bounded where either is zero."""
    return tl.minimum(tl.rsqrt(tl.maximum(square, _SHORTEST * _SHORTEST)) * short, 1 / _SHORTEST)


@triton.jit
def _weight(along: tl.tensor, square: tl.tensor, short: tl.tensor, used: tl.tensor) -> tl.tensor:
    """exp(cos(P, q)) of <P, q> and |P|²: a cosine is at most 1, so no maximum need be taken off first."""
    return tl.where(used, tl.exp(along * _shrink(square, short)), 0.0)


@triton.jit
def _slopes(
    along: tl.tensor, square: tl.tensor, slope: tl.tensor, short: tl.tensor, total: tl.tensor, used: tl.tensor
) -> tl.tensor:
    """How much of q and of -P there is in the gradient of a sample P; slope: <G σ, ε - m>."""
    least = _SHORTEST * _SHORTEST
    shrink = _shrink(square, short)
    cosine = along * shrink
    change = tl.where(used, tl.exp(cosine) / total * slope, 0.0)  # of the loss by the cosine
    free = (square > least) & (shrink < 1 / _SHORTEST)  # else its length does not matter
    return change * shrink, tl.where(free, change * cosine / tl.maximum(square, least), 0.0)


# Features are `step` = 1 apart, and the compiler must not know it: it would load four at a time into each thread, make
# noise one at a time, and move every number of it between threads through shared memory.
@triton.jit(do_not_specialize=["first", "step"])
def _forward(
    mean: tl.tensor,
    std: tl.tensor,
    query: tl.tensor,
    seed: tl.tensor,
    prompt: tl.tensor,
    mixed: tl.tensor,
    weight: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    pools: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    equal: tl.constexpr,
) -> None:
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
    grad: tl.tensor,
    mean: tl.tensor,
    std: tl.tensor,
    query: tl.tensor,
    seed: tl.tensor,
    mixed: tl.tensor,
    weight: tl.tensor,
    grad_mean: tl.tensor,
    grad_std: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    pools: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
) -> None:
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
    level = tl.sum(scaled * middle, 0)  # the mean of <G σ, ε>
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
    seed: tl.tensor,
    result: tl.tensor,
    first: tl.tensor,
    place: tl.tensor,
    pools: tl.constexpr,
    count: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
) -> None:
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
    """Average ``count`` samples of each Gaussian, by their cosine to the query or, if ``equal``, equally (Eqs. 8-10).

    mean and std (B, M, D) in float32, query (B, D), seed (1,) in int64 -> (B, M, D): what
    :func:`probprompt.equations.sampled_prompt` gives with ``noise(B, M, count, D, seed, first)``. Gradients reach mean
    and std.
    """
    if query.requires_grad:
        raise ValueError("the sampling kernel has no gradient for the query: detach it")
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if mean.dtype != torch.float32 or std.dtype != torch.float32:
        raise ValueError(f"the sampling kernel takes mean and std in float32, not {mean.dtype} and {std.dtype}")
    result: Tensor = _Sampled.apply(mean, std, query, seed, count, first, equal)  # type: ignore[no-untyped-call]
    return result


def noise(rows: int, pools: int, count: int, width: int, seed: Tensor, first: int = 0, place: int = 0) -> Tensor:
    """The standard normal numbers (rows, pools, count, width) of :func:`sampled_prompt`, in float32.

    ``first`` numbers the first row in the whole batch, ``place`` the first pool among all pools.
    """
    result = torch.empty(rows, pools, count, width, device=seed.device)
    grid = (rows * pools, -(-count // 4))
    _write_noise[grid](seed, result, first, place, pools, count, **_sizes(width))
    return result


class _Sampled(torch.autograd.Function):
    """The prompt with its way back."""

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
        """Make the noise again."""
        mean, std, query, seed, mixed, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()  # (B, M, D)
        if ctx.equal:
            return gradient, gradient * mixed, None, None, None, None, None
        grad_mean, grad_std = torch.empty_like(mean), torch.empty_like(mean)  # (B, M, D)
        tensors = (gradient, mean, std, query, seed, mixed, weight, grad_mean, grad_std)
        _backward[(weight.numel(),)](*tensors, ctx.first, 1, **ctx.sizes)
        return grad_mean, grad_std, None, None, None, None, None


def _sizes(width: int) -> dict[str, int]:
    """What the kernels are compiled for, and how many warps a program has."""
    if width > WIDEST:
        raise UserError(f"the sampling kernel takes prompts of width {WIDEST} at most, not {width}: switch kernels off")
    columns = 1 << (width - 1).bit_length()
    return {"width": width, "columns": columns, "num_warps": max(1, columns // FEATURES_PER_WARP)}
