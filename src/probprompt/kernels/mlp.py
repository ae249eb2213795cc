"""The second half of a narrow frozen block in one kernel per direction: residual sums, layer norm and MLP.

A program holds a block of whole rows, normalizes them, and loops over chunks of the hidden layer, which go through the
GELU into the second layer while in registers. Normalized rows and hidden layer never go to memory; the backward pass
recomputes both from the norm's input, at the cost of one more product. The forward pass also computes the next block's
first norm. Both directions sum over the hidden layer in a fixed order, so that a row's result depends neither on its
neighbors nor on the tiling.

Blocks of a product are powers of two wide. Another width, such as 192, is split into two of these (128 + 64), both
where it is summed over and where it is the result, so that no work is wasted.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from probprompt.errors import UserError

WIDEST = 256
"""Maximum width: a program holds its sums over the hidden layer in registers."""
LEAST = 16
"""Minimum width of a block in a product."""

Norm = tuple[Tensor, Tensor, float]
"""A layer norm: weight (D,), bias (D,), and the constant added to the variance."""
Normed = tuple[Tensor, Tensor, Tensor]
"""Rows after a layer norm (R, D), and their float32 means and reciprocal standard deviations before it (R,)."""


class Tuning(NamedTuple):
    """Tiling of a kernel."""

    rows: int  # of a program
    chunk: int  # columns of the hidden layer per chunk
    warps: int
    stages: int  # of the loop over chunks
    # Backward: how many inputs (none, the rows, rows and gradient) keep the second part of a split width in registers,
    # to free shared memory for one more stage.
    held: int = 0
    registers: int | None = None  # maximum per thread


FORWARD = {192: Tuning(128, 64, 8, 3), 256: Tuning(128, 64, 8, 2)}
"""By maximum width. Blocks of 128 rows leave processors idle in a second wave, which parallel work uses: better than
a kernel that is faster alone, or a second launch for the remainder."""
BACKWARD = {192: Tuning(128, 64, 8, 3, held=1), 256: Tuning(64, 32, 4, 3)}
"""The same for the backward pass."""
FEW = 64 * 132
"""Up to this number of rows a program takes 64 of them: a GPU of 132 processors still runs all in parallel."""
SINGLE = Tuning(16, 32, 4, 1)
"""For float32, without tensor cores."""


class Plan(NamedTuple):
    """Compile-time constants of a kernel."""

    width: int
    low: int  # first columns and remaining ones (or none): powers of two
    high: int
    hidden: int
    rows: int
    chunk: int
    held: int


@triton.jit
def _gelu(x):
    """Compute the exact GELU: max(x, 0) - |x| times the normal tail beyond |x|.

    The polynomial is the base-2 logarithm of the tail: a minimax fit on [0, 6] with an error of at most 8e-9, far below
    float32's rounding. It decreases monotonically, so it is also valid beyond.
    """
    size = tl.abs(x)
    power = -2.7720317e-6 * size + 3.8620557e-5
    power = power * size - 1.82546775e-4
    power = power * size - 1.45871939e-4
    power = power * size + 7.07547385e-3
    power = power * size - 5.25050299e-2
    power = power * size - 4.59204907e-1
    power = power * size - 1.15110572
    power = power * size - 9.99999978e-1
    return tl.maximum(x, 0.0) - size * tl.exp2(power)


@triton.jit
def _gelu_slope(x):
    """Compute the derivative of the GELU with a single exponential.

    Below 0 it is exp(-x²/2) times a function of |x| (Mills' ratio minus |x|, over sqrt(2 pi)): a minimax fit on [0, 6]
    with an error of at most 7e-8. Above 0 it is 1 minus that.
    """
    size = tl.minimum(tl.abs(x), 12.0)  # beyond, the exponential is 0 and must not meet an infinity
    bell = tl.exp2(x * x * -0.7213475204444817)
    ratio = 1.63168507e-6 * size - 3.52077165e-5
    ratio = ratio * size + 3.39738071e-4
    ratio = ratio * size - 1.97462626e-3
    ratio = ratio * size + 7.93938838e-3
    ratio = ratio * size - 2.43139262e-2
    ratio = ratio * size + 6.11548807e-2
    ratio = ratio * size - 1.32513793e-1
    ratio = ratio * size + 2.49916791e-1
    ratio = ratio * size - 7.97878795e-1
    ratio = ratio * size + 4.99999934e-1
    rest = ratio * bell
    return tl.where(x > 0, 1.0 - rest, rest)


@triton.jit
def _block(matrix, row, column, stride: tl.constexpr, known):
    """Load some rows and columns of a matrix, zero in unknown rows."""
    place = matrix + row[:, None] * stride + column[None, :]
    return tl.load(place) if known is None else tl.load(place, mask=known[:, None], other=0.0)


@triton.jit
def _rows(matrix, row, known, plan: tl.constexpr):
    """Load some rows of a matrix (any, width), in two parts."""
    low = _block(matrix, row, tl.arange(0, plan.low), plan.width, known)
    high = low
    if plan.high > 0:
        high = _block(matrix, row, plan.low + tl.arange(0, plan.high), plan.width, known)
    return low, high


@triton.jit
def _first(weight, start, plan: tl.constexpr):
    """Load a chunk (chunk, width) of the first layer's weight, in two parts."""
    return _rows(weight, start + tl.arange(0, plan.chunk), None, plan)


@triton.jit
def _second(weight, start, plan: tl.constexpr):
    """Load a chunk (chunk, width) of the second layer's weight, transposed, in two parts."""
    column = start + tl.arange(0, plan.chunk)
    low = tl.trans(_block(weight, tl.arange(0, plan.low), column, plan.hidden, None))
    high = low
    if plan.high > 0:
        high = tl.trans(_block(weight, plan.low + tl.arange(0, plan.high), column, plan.hidden, None))
    return low, high


@triton.jit
def _shift(bias, start, plan: tl.constexpr):
    """Load the first layer's bias (chunk,); of the last chunk if the start is beyond it."""
    chunk: tl.constexpr = plan.chunk
    if bias is None:
        shift = tl.zeros((chunk,), tl.float32)
    else:
        shift = tl.load(bias + tl.minimum(start, plan.hidden - chunk) + tl.arange(0, chunk))
    return shift


@triton.jit
def _into(rows, weight, plan: tl.constexpr):
    """Return products (rows, chunk) of rows and a chunk of a weight."""
    hidden = tl.dot(rows[0], tl.trans(weight[0]), input_precision="ieee")
    if plan.high > 0:
        hidden = tl.dot(rows[1], tl.trans(weight[1]), hidden, input_precision="ieee")
    return hidden


@triton.jit
def _onto(totals, hidden, weight, plan: tl.constexpr):
    """Add the product of a hidden part (rows, chunk) and a chunk of a weight to the sums."""
    low = tl.dot(hidden, weight[0], totals[0], input_precision="ieee")
    high = totals[1]
    if plan.high > 0:
        high = tl.dot(hidden, weight[1], high, input_precision="ieee")
    return low, high


@triton.jit
def _nothing(plan: tl.constexpr):
    """Return zero sums (rows, width), in two parts."""
    rows: tl.constexpr = plan.rows
    low: tl.constexpr = plan.low
    high: tl.constexpr = plan.high if plan.high > 0 else plan.low
    return tl.zeros((rows, low), tl.float32), tl.zeros((rows, high), tl.float32)


@triton.jit
def _write(result, values, row, known, plan: tl.constexpr):
    """Write the known rows of (rows, width)."""
    kind: tl.constexpr = result.dtype.element_ty
    place = result + row[:, None] * plan.width + tl.arange(0, plan.low)[None, :]
    tl.store(place, values[0].to(kind), mask=known[:, None])
    if plan.high > 0:
        place = result + row[:, None] * plan.width + plan.low + tl.arange(0, plan.high)[None, :]
        tl.store(place, values[1].to(kind), mask=known[:, None])


@triton.jit
def _again(matrix, row, known, plan: tl.constexpr):
    """Load rows again that were read or written before the loop, which had no registers left."""
    # Another thread may have written them, and without the barrier the compiler would not load them again.
    tl.debug_barrier()
    return _rows(matrix, row, known, plan)


@triton.jit
def _added(one, two):
    """Return float32 sums of values in two parts."""
    return one[0].to(tl.float32) + two[0].to(tl.float32), one[1].to(tl.float32) + two[1].to(tl.float32)


@triton.jit
def _vector(vector, plan: tl.constexpr):
    """Load a vector (width,) as a float32 row (1, width), in two parts."""
    low = tl.load(vector + tl.arange(0, plan.low)).to(tl.float32)[None, :]
    high = low
    if plan.high > 0:
        high = tl.load(vector + plan.low + tl.arange(0, plan.high)).to(tl.float32)[None, :]
    return low, high


@triton.jit
def _mean(values, plan: tl.constexpr):
    """Return the means (rows, 1) of rows (rows, width)."""
    total = tl.sum(values[0], axis=1)
    if plan.high > 0:
        total += tl.sum(values[1], axis=1)
    return (total / plan.width)[:, None]


@triton.jit
def _moments(rows, eps, plan: tl.constexpr):
    """Return mean and reciprocal standard deviation of rows: (rows, 1) each."""
    low, high = rows[0].to(tl.float32), rows[1].to(tl.float32)
    mean = _mean((low, high), plan)
    low, high = low - mean, high - mean
    return mean, tl.rsqrt(_mean((low * low, high * high), plan) + eps)


@triton.jit
def _standard(rows, moments):
    """Standardize rows in float32, in two parts."""
    low, high = rows[0].to(tl.float32), rows[1].to(tl.float32)
    return (low - moments[0]) * moments[1], (high - moments[0]) * moments[1]


@triton.jit
def _norm(rows, moments, weight, bias, plan: tl.constexpr):
    """Apply the layer norm to rows, in two parts, in their dtype."""
    low, high = _standard(rows, moments)
    weight_low, weight_high = _vector(weight, plan)
    bias_low, bias_high = _vector(bias, plan)
    return (low * weight_low + bias_low).to(rows[0].dtype), (high * weight_high + bias_high).to(rows[1].dtype)


@triton.jit
def _norm_backward(slope, rows, moments, plan: tl.constexpr):
    """Return the gradient of rows for that of their weighted layer norm, in two parts."""
    low, high = _standard(rows, moments)
    offset = _mean(slope, plan)
    along = _mean((slope[0] * low, slope[1] * high), plan)
    spread = moments[1]
    return (slope[0] - offset - low * along) * spread, (slope[1] - offset - high * along) * spread


@triton.jit
def _held(values, size: tl.constexpr, zero):
    """Return values (rows, size) in float32, in the register layout of a product's result.

    The next product then needs no shared memory, and a sum with a product's result no other layout. A zero unknown to
    the compiler keeps apart values that it would otherwise merge and hold in shared memory.
    """
    place = tl.arange(0, size)
    unit = (place[:, None] + zero == place[None, :]).to(values.dtype)
    return tl.dot(values, unit, input_precision="ieee")


@triton.jit
def _through(given, weight1, bias1, weight2, kind: tl.constexpr, plan: tl.constexpr):
    """Apply both layers and the GELU to normalized rows, without the second bias."""
    size: tl.constexpr = plan.rows
    chunk: tl.constexpr = plan.chunk
    totals = _nothing(plan)
    # The second product is one chunk behind, so that tensor cores work during the next chunk's GELU. Its input is
    # rounded where it is used: only then is it passed on in registers.
    active = tl.zeros((size, chunk), tl.float32)
    shift = _shift(bias1, 0, plan)
    for start in range(0, plan.hidden, plan.chunk):
        later = _shift(bias1, start + plan.chunk, plan)
        hidden = _into(given, _first(weight1, start, plan), plan)
        totals = _onto(totals, active.to(kind), _second(weight2, tl.maximum(start - chunk, 0), plan), plan)
        active = _gelu(hidden + shift.to(tl.float32)[None, :])
        shift = later
    return _onto(totals, active.to(kind), _second(weight2, plan.hidden - plan.chunk, plan), plan)


@triton.jit
def _forward(
    before,
    update,
    weight,
    bias,
    eps,
    weight1,
    bias1,
    weight2,
    bias2,
    next_weight,
    next_bias,
    next_eps,
    middle,
    after,
    normed,
    mean,
    rstd,
    count,
    plan: tl.constexpr,
):
    kind: tl.constexpr = middle.dtype.element_ty
    top = tl.program_id(0) * plan.rows
    place = top.to(tl.int64) * plan.width
    row = tl.arange(0, plan.rows)
    known = row < count - top
    low, high = _added(_rows(before + place, row, known, plan), _rows(update + place, row, known, plan))
    # The backward pass sees the rounded sum, so the norm must use it too.
    low, high = low.to(kind), high.to(kind)
    _write(middle + place, (low, high), row, known, plan)
    low, high = _norm((low, high), _moments((low, high), eps, plan), weight, bias, plan)
    totals = _nothing(plan)
    # A loop of one turn, for the compiler: values that change in a loop go to shared memory, where products read them,
    # instead of being loaded into registers for every chunk. Addresses that depend on the turn are not kept in
    # registers.
    turn = top
    while turn < tl.minimum(count, top + plan.rows):
        totals = _through((low, high), weight1, bias1, weight2, kind, plan)
        low, high = tl.zeros_like(low), tl.zeros_like(high)
        turn += plan.rows
    start = turn - plan.rows
    place = start.to(tl.int64) * plan.width
    known = row < count - start
    if bias2 is not None:
        totals = _added(totals, _vector(bias2, plan))
    low, high = _added(totals, _again(middle + place, row, known, plan))
    low, high = low.to(kind), high.to(kind)
    _write(after + place, (low, high), row, known, plan)
    if next_weight is not None:
        moments = _moments((low, high), next_eps, plan)
        _write(normed + place, _norm((low, high), moments, next_weight, next_bias, plan), row, known, plan)
        tl.store(mean + start + row, moments[0].reshape(plan.rows), mask=known)
        tl.store(rstd + start + row, moments[1].reshape(plan.rows), mask=known)


@triton.jit
def _back(normed, grad, weight1, bias1, weight2, kind: tl.constexpr, plan: tl.constexpr):
    """Return the gradient of normalized rows for that of the MLP's output."""
    totals = _nothing(plan)
    shift = _shift(bias1, 0, plan)
    for start in range(0, plan.hidden, plan.chunk):
        later = _shift(bias1, start + plan.chunk, plan)
        first = _first(weight1, start, plan)
        hidden = _into(normed, first, plan)  # (rows, chunk)
        slope = _into(grad, _second(weight2, start, plan), plan)
        slope *= _gelu_slope(hidden + shift.to(tl.float32)[None, :])
        totals = _onto(totals, slope.to(kind), first, plan)
        shift = later
    return totals


@triton.jit
def _backward(grad, middle, weight, bias, eps, weight1, bias1, weight2, result, count, plan: tl.constexpr):
    kind: tl.constexpr = middle.dtype.element_ty
    top = tl.program_id(0) * plan.rows
    place = top.to(tl.int64) * plan.width
    row = tl.arange(0, plan.rows)
    known = row < count - top
    rows = _rows(middle + place, row, known, plan)
    grad_low, grad_high = _rows(grad + place, row, known, plan)
    moments = _moments(rows, eps, plan)
    low, high = _norm(rows, moments, weight, bias, plan)
    if plan.held > 0:
        high = _held(high, plan.high, 0).to(kind)
    if plan.held > 1:
        grad_high = _held(grad_high, plan.high, 0).to(kind)
    totals = _nothing(plan)
    turn = top
    while turn < tl.minimum(count, top + plan.rows):  # one turn, as in the forward pass
        totals = _back((low, high), (grad_low, grad_high), weight1, bias1, weight2, kind, plan)
        low = tl.zeros_like(low)
        if plan.held == 0:
            high = tl.zeros_like(high)
        turn += plan.rows
    start = turn - plan.rows
    place = start.to(tl.int64) * plan.width
    known = row < count - start
    weight_low, weight_high = _vector(weight, plan)
    slope = totals[0] * weight_low, totals[1] * weight_high
    low, high = _again(middle + place, row, known, plan)
    low = _held(low, plan.low, start - top)
    if plan.high > 0:
        high = _held(high, plan.high, start - top)
    totals = _norm_backward(slope, (low, high), moments, plan)
    _write(result + place, _added(totals, _again(grad + place, row, known, plan)), row, known, plan)


def fits(width: int) -> bool:
    """Return True for supported widths: narrow, and a power of two or the sum of two."""
    return LEAST <= width <= WIDEST and width.bit_count() <= 2 and width % LEAST == 0


def mlp(
    before: Tensor,
    update: Tensor,
    norm: Norm,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    following: Norm | None = None,
) -> tuple[Tensor, Tensor, Normed | None]:
    """Return the sum before + update (R, D), and that plus the MLP of its layer norm (R, D).

    The MLP is the layer (H, D), the exact GELU and the layer (D, H). Each sum is rounded to the dtype of the rows
    before its norm is computed. With ``following``, also returns that norm of the second sum.
    """
    _check(before, update, norm, weight1, weight2)
    if following is not None:
        _check_norm(following, before.shape[1])
    middle, after = torch.empty_like(before), torch.empty_like(before)  # (R, D)
    normed = None
    if following is not None:
        mean, rstd = before.new_empty(2, before.shape[0], dtype=torch.float32)  # (R,) each
        normed = torch.empty_like(before), mean, rstd
    grid, options = _launch(before, weight1, FORWARD)
    inputs = (before, update, *norm, weight1, bias1, weight2, bias2, *(following or (None, None, 0.0)))
    _forward[grid](*inputs, middle, after, *(normed or (None, None, None)), before.shape[0], **options)
    return middle, after, normed


def mlp_backward(
    grad: Tensor, middle: Tensor, norm: Norm, weight1: Tensor, bias1: Tensor | None, weight2: Tensor
) -> Tensor:
    """Return the gradient (R, D) of :func:`mlp`'s first sum for that of the second."""
    _check(middle, grad, norm, weight1, weight2)
    result = torch.empty_like(middle)  # (R, D)
    grid, options = _launch(middle, weight1, BACKWARD)
    _backward[grid](grad, middle, *norm, weight1, bias1, weight2, result, middle.shape[0], **options)
    return result


def _check(rows: Tensor, other: Tensor, norm: Norm, weight1: Tensor, weight2: Tensor) -> None:
    width, hidden = rows.shape[1], weight1.shape[0]
    if not fits(width) or hidden % LEAST:
        raise UserError(
            f"The MLP kernel needs widths from {LEAST} to {WIDEST} that are the sum of one or two powers of two, and "
            f"hidden layers of a multiple of {LEAST}, got {width} and {hidden}. Set PROBPROMPT_KERNELS=off."
        )
    if weight1.shape != (hidden, width) or weight2.shape != (width, hidden):
        shapes = [tuple(tensor.shape) for tensor in (rows, weight1, weight2)]
        raise UserError(f"The MLP kernel needs (R, D), (H, D) and (D, H), got {shapes[0]}, {shapes[1]}, {shapes[2]}.")
    _check_norm(norm, width)
    tensors = (rows, other, weight1, weight2)
    if not all(tensor.is_contiguous() and tensor.dtype == rows.dtype for tensor in tensors):
        raise UserError("The MLP kernel needs contiguous tensors of one dtype. Call contiguous().")
    if other.shape != rows.shape:
        given = f"{tuple(rows.shape)} and {tuple(other.shape)}"
        raise UserError(f"The MLP kernel needs an update or a gradient for every row, got {given}.")


def _check_norm(norm: Norm, width: int) -> None:
    if norm[0].shape != (width,) or norm[1].shape != (width,):
        shapes = [tuple(tensor.shape) for tensor in norm[:2]]
        raise UserError(f"The MLP kernel needs a norm of {width} weights and biases, got {shapes[0]} and {shapes[1]}.")


def _launch(rows: Tensor, weight1: Tensor, table: dict[int, Tuning]) -> tuple[tuple[int], dict[str, object]]:
    """Return the grid, and compile-time constants."""
    count, width = rows.shape
    tuning = SINGLE if rows.dtype == torch.float32 else table[min(most for most in table if most >= width)]
    if count <= FEW and tuning.rows > 64:
        tuning = tuning._replace(rows=64, warps=4)
    hidden = weight1.shape[0]
    low = 1 << (width.bit_length() - 1)
    chunk = min(tuning.chunk, hidden & -hidden)
    held = tuning.held if width > low else 0
    plan = Plan(width, low, width - low, hidden, tuning.rows, chunk, held)
    options = {"num_warps": tuning.warps, "num_stages": tuning.stages, "maxnreg": tuning.registers}
    return (triton.cdiv(count, tuning.rows),), {"plan": plan, **options}
