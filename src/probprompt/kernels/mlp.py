"""The second half of a narrow frozen block as one kernel each way: residual sums, layer norm and MLP.

A program holds a block of whole rows, so that it norms them itself, and walks over the hidden layer chunk by chunk:
what the first layer gives goes through the GELU and into the second one while it is still in registers. Neither the
normed rows nor the hidden layer ever go to memory: the way back computes both again from what went into the norm, which
is one more product and saves keeping them. On the way forth it also takes the norm that the next block begins with.
Both ways sum over the hidden layer in a fixed order, so that what a row gives depends neither on its neighbours nor on
how the rows are cut.

Blocks of a product are powers of two wide. A width that is none, such as 192, is cut into two that are (128 + 64), both
where it is summed over and where it is the result, so that nothing is computed in vain.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from probprompt.errors import UserError

WIDEST = 256
"""The widest row: a program holds its sums over the hidden layer in registers."""
LEAST = 16
"""The narrowest block of a product."""

Norm = tuple[Tensor, Tensor, float]
"""A layer norm: its weight (D,), its bias (D,), and what it adds to the variance."""
Normed = tuple[Tensor, Tensor, Tensor]
"""Rows after a layer norm (R, D), their means and one over their deviations before it (R,), in float32."""


class Tuning(NamedTuple):
    """How a kernel cuts its work."""

    rows: int  # of a program
    chunk: int  # columns of the hidden layer at a time
    warps: int
    stages: int  # of the loop over chunks
    # On the way back: of how many inputs (none, the rows, rows and gradient) the part that is left of a width that is
    # no power of two stays in registers, because its room in shared memory is wanted for one more stage.
    held: int = 0
    registers: int | None = None  # of a thread, at most


FORWARD = {192: Tuning(128, 64, 8, 3), 256: Tuning(128, 64, 8, 2)}
"""By width, at most. Blocks of 128 rows leave processors idle in a second wave, which what runs beside it then takes:
that is worth more than a kernel that is faster by itself, or a second launch for what is left over."""
BACKWARD = {192: Tuning(128, 64, 8, 3, held=1), 256: Tuning(64, 32, 4, 3)}
"""The same for the way back."""
FEW = 64 * 132
"""Up to so many rows a program takes 64 of them: on a GPU of 132 processors all still run side by side."""
SINGLE = Tuning(16, 32, 4, 1)
"""For float32, whose products run without tensor cores."""


class Plan(NamedTuple):
    """What a kernel is compiled for."""

    width: int
    low: int  # the columns that come first, and those that are left (or none): powers of two
    high: int
    hidden: int
    rows: int
    chunk: int
    held: int


@triton.jit
def _gelu(x: tl.tensor) -> tl.tensor:
    """The exact GELU: max(x, 0) less |x| times the share of the normal distribution that lies beyond |x|.

    The polynomial is the logarithm to base 2 of that share: a minimax fit on [0, 6] that puts the share off by 8e-9 at
    most, far below float32's own rounding. It falls for ever, so that it holds beyond that range too.
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
def _gelu_slope(x: tl.tensor) -> tl.tensor:
    """The derivative of the GELU, from a single exponential.

    Below 0 it is the bell exp(-x^2 / 2) times a function of |x| (Mills' ratio less |x|, over sqrt(2 pi)): a minimax
    fit on [0, 6] that puts the derivative off by 7e-8 at most. Above 0 it is what that leaves of 1.
    """
    size = tl.minimum(tl.abs(x), 12.0)  # beyond it the bell is 0, and must not meet an infinity
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
def _block(
    matrix: tl.tensor, row: tl.tensor, column: tl.tensor, stride: tl.constexpr, known: tl.tensor | None
) -> tl.tensor:
    """Some rows and columns of a matrix, zero in rows that are not known."""
    place = matrix + row[:, None] * stride + column[None, :]
    return tl.load(place) if known is None else tl.load(place, mask=known[:, None], other=0.0)


@triton.jit
def _rows(matrix: tl.tensor, row: tl.tensor, known: tl.tensor | None, plan: tl.constexpr) -> tl.tuple:
    """Some rows of a matrix (any, width), in two parts."""
    low = _block(matrix, row, tl.arange(0, plan.low), plan.width, known)
    high = low
    if plan.high > 0:
        high = _block(matrix, row, plan.low + tl.arange(0, plan.high), plan.width, known)
    return low, high


@triton.jit
def _first(weight: tl.tensor, start: tl.tensor, plan: tl.constexpr) -> tl.tuple:
    """A chunk (chunk, width) of the first layer's weight, in two parts."""
    return _rows(weight, start + tl.arange(0, plan.chunk), None, plan)


@triton.jit
def _second(weight: tl.tensor, start: tl.tensor, plan: tl.constexpr) -> tl.tuple:
    """A chunk (chunk, width) of the second layer's weight, transposed, in two parts."""
    column = start + tl.arange(0, plan.chunk)
    low = tl.trans(_block(weight, tl.arange(0, plan.low), column, plan.hidden, None))
    high = low
    if plan.high > 0:
        high = tl.trans(_block(weight, plan.low + tl.arange(0, plan.high), column, plan.hidden, None))
    return low, high


@triton.jit
def _shift(bias: tl.tensor | None, start: tl.tensor, plan: tl.constexpr) -> tl.tensor:
    """The first layer's bias (chunk,); of the last chunk, where the start is beyond it."""
    chunk: tl.constexpr = plan.chunk
    if bias is None:
        shift = tl.zeros((chunk,), tl.float32)
    else:
        shift = tl.load(bias + tl.minimum(start, plan.hidden - chunk) + tl.arange(0, chunk))
    return shift


@triton.jit
def _into(rows: tl.tuple, weight: tl.tuple, plan: tl.constexpr) -> tl.tensor:
    """Products (rows, chunk) of rows and a chunk of a weight."""
    hidden = tl.dot(rows[0], tl.trans(weight[0]), input_precision="ieee")
    if plan.high > 0:
        hidden = tl.dot(rows[1], tl.trans(weight[1]), hidden, input_precision="ieee")
    return hidden


@triton.jit
def _onto(totals: tl.tuple, hidden: tl.tensor, weight: tl.tuple, plan: tl.constexpr) -> tl.tuple:
    """Add to the sums (rows, width) the product of a part (rows, chunk) of the hidden layer and a chunk of a weight."""
    low = tl.dot(hidden, weight[0], totals[0], input_precision="ieee")
    high = totals[1]
    if plan.high > 0:
        high = tl.dot(hidden, weight[1], high, input_precision="ieee")
    return low, high


@triton.jit
def _nothing(plan: tl.constexpr) -> tl.tuple:
    """Sums (rows, width) to begin with, in two parts."""
    rows: tl.constexpr = plan.rows
    low: tl.constexpr = plan.low
    high: tl.constexpr = plan.high if plan.high > 0 else plan.low
    return tl.zeros((rows, low), tl.float32), tl.zeros((rows, high), tl.float32)


@triton.jit
def _write(result: tl.tensor, values: tl.tuple, row: tl.tensor, known: tl.tensor, plan: tl.constexpr) -> None:
    """Write rows (rows, width), those that are known."""
    kind: tl.constexpr = result.dtype.element_ty
    place = result + row[:, None] * plan.width + tl.arange(0, plan.low)[None, :]
    tl.store(place, values[0].to(kind), mask=known[:, None])
    if plan.high > 0:
        place = result + row[:, None] * plan.width + plan.low + tl.arange(0, plan.high)[None, :]
        tl.store(place, values[1].to(kind), mask=known[:, None])


@triton.jit
def _again(matrix: tl.tensor, row: tl.tensor, known: tl.tensor, plan: tl.constexpr) -> tl.tuple:
    """Rows that the program has read or written before the loop: from memory, since no register had room for them."""
    # They may be what another thread wrote; and without the barrier the compiler would not read them a second time.
    tl.debug_barrier()
    return _rows(matrix, row, known, plan)


@triton.jit
def _added(one: tl.tuple, two: tl.tuple) -> tl.tuple:
    """Sums in float32 of what comes in two parts."""
    return one[0].to(tl.float32) + two[0].to(tl.float32), one[1].to(tl.float32) + two[1].to(tl.float32)


@triton.jit
def _vector(vector: tl.tensor, plan: tl.constexpr) -> tl.tuple:
    """A vector (width,) as a row (1, width) in float32, in two parts."""
    low = tl.load(vector + tl.arange(0, plan.low)).to(tl.float32)[None, :]
    high = low
    if plan.high > 0:
        high = tl.load(vector + plan.low + tl.arange(0, plan.high)).to(tl.float32)[None, :]
    return low, high


@triton.jit
def _mean(values: tl.tuple, plan: tl.constexpr) -> tl.tensor:
    """The means (rows, 1) of rows (rows, width)."""
    total = tl.sum(values[0], axis=1)
    if plan.high > 0:
        total += tl.sum(values[1], axis=1)
    return (total / plan.width)[:, None]


@triton.jit
def _moments(rows: tl.tuple, eps: tl.tensor, plan: tl.constexpr) -> tl.tuple:
    """The mean of rows, and one over their deviation: (rows, 1) each."""
    low, high = rows[0].to(tl.float32), rows[1].to(tl.float32)
    mean = _mean((low, high), plan)
    low, high = low - mean, high - mean
    return mean, tl.rsqrt(_mean((low * low, high * high), plan) + eps)


@triton.jit
def _standard(rows: tl.tuple, moments: tl.tuple) -> tl.tuple:
    """Rows less their mean and over their deviation, in two parts, in float32."""
    low, high = rows[0].to(tl.float32), rows[1].to(tl.float32)
    return (low - moments[0]) * moments[1], (high - moments[0]) * moments[1]


@triton.jit
def _norm(rows: tl.tuple, moments: tl.tuple, weight: tl.tensor, bias: tl.tensor, plan: tl.constexpr) -> tl.tuple:
    """The layer norm of rows, in two parts, in their dtype."""
    low, high = _standard(rows, moments)
    weight_low, weight_high = _vector(weight, plan)
    bias_low, bias_high = _vector(bias, plan)
    return (low * weight_low + bias_low).to(rows[0].dtype), (high * weight_high + bias_high).to(rows[1].dtype)


@triton.jit
def _norm_backward(slope: tl.tuple, rows: tl.tuple, moments: tl.tuple, plan: tl.constexpr) -> tl.tuple:
    """The gradient of rows, for that of their layer norm, which its weight is in already; both in two parts."""
    low, high = _standard(rows, moments)
    offset = _mean(slope, plan)
    along = _mean((slope[0] * low, slope[1] * high), plan)
    spread = moments[1]
    return (slope[0] - offset - low * along) * spread, (slope[1] - offset - high * along) * spread


@triton.jit
def _held(values: tl.tensor, size: tl.constexpr, zero: tl.tensor) -> tl.tensor:
    """The same values (rows, size), in float32, in those registers in which a product leaves its result.

    What a product reads next then needs no shared memory, and what is summed with a product's result no other layout.
    A zero that the compiler does not know keeps apart what it would otherwise take for one and hold in shared memory.
    """
    place = tl.arange(0, size)
    unit = (place[:, None] + zero == place[None, :]).to(values.dtype)
    return tl.dot(values, unit, input_precision="ieee")


@triton.jit
def _through(
    given: tl.tuple,
    weight1: tl.tensor,
    bias1: tl.tensor | None,
    weight2: tl.tensor,
    kind: tl.constexpr,
    plan: tl.constexpr,
) -> tl.tuple:
    """Normed rows through both layers and the GELU, without the second bias."""
    size: tl.constexpr = plan.rows
    chunk: tl.constexpr = plan.chunk
    totals = _nothing(plan)
    # The second product stays one chunk behind, so that the tensor cores work on it during the next chunk's GELU. What
    # waits for it is rounded where it is used: only then is it passed on in registers.
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
    before: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    eps: tl.tensor,
    weight1: tl.tensor,
    bias1: tl.tensor | None,
    weight2: tl.tensor,
    bias2: tl.tensor | None,
    next_weight: tl.tensor | None,
    next_bias: tl.tensor | None,
    next_eps: tl.tensor,
    middle: tl.tensor,
    after: tl.tensor,
    normed: tl.tensor | None,
    mean: tl.tensor | None,
    rstd: tl.tensor | None,
    count: tl.tensor,
    plan: tl.constexpr,
) -> None:
    kind: tl.constexpr = middle.dtype.element_ty
    top = tl.program_id(0) * plan.rows
    place = top.to(tl.int64) * plan.width
    row = tl.arange(0, plan.rows)
    known = row < count - top
    low, high = _added(_rows(before + place, row, known, plan), _rows(update + place, row, known, plan))
    # The way back sees the rounded sum, so the norm must be of that one.
    low, high = low.to(kind), high.to(kind)
    _write(middle + place, (low, high), row, known, plan)
    low, high = _norm((low, high), _moments((low, high), eps, plan), weight, bias, plan)
    totals = _nothing(plan)
    # A loop of one turn, for the compiler: what comes into a loop and changes there goes to shared memory, where the
    # products read it. What was merely computed would be loaded into registers again for every chunk. And addresses
    # that are made of the turn are not kept in registers meanwhile.
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
def _back(
    normed: tl.tuple,
    grad: tl.tuple,
    weight1: tl.tensor,
    bias1: tl.tensor | None,
    weight2: tl.tensor,
    kind: tl.constexpr,
    plan: tl.constexpr,
) -> tl.tuple:
    """The gradient of normed rows for that of what the MLP makes of them."""
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
def _backward(
    grad: tl.tensor,
    middle: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    eps: tl.tensor,
    weight1: tl.tensor,
    bias1: tl.tensor | None,
    weight2: tl.tensor,
    result: tl.tensor,
    count: tl.tensor,
    plan: tl.constexpr,
) -> None:
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
    while turn < tl.minimum(count, top + plan.rows):  # one, as on the way forth
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
    """Whether these kernels are for an MLP of that width: narrow, and one power of two or the sum of two."""
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
    """The sum before + update (R, D), and that sum plus what the MLP makes of its layer norm (R, D).

    The MLP is the layer (H, D), the exact GELU and the layer (D, H). Each sum is rounded to the dtype of the rows
    before its norm is taken. The second sum's own norm comes along where it is given: ``following``.
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
    """The gradient (R, D) of the first sum that :func:`mlp` gives, for the gradient (R, D) of the second."""
    _check(middle, grad, norm, weight1, weight2)
    result = torch.empty_like(middle)  # (R, D)
    grid, options = _launch(middle, weight1, BACKWARD)
    _backward[grid](grad, middle, *norm, weight1, bias1, weight2, result, middle.shape[0], **options)
    return result


def _check(rows: Tensor, other: Tensor, norm: Norm, weight1: Tensor, weight2: Tensor) -> None:
    width, hidden = rows.shape[1], weight1.shape[0]
    if not fits(width) or hidden % LEAST:
        raise UserError(
            f"the MLP's kernel takes widths up to {WIDEST} that are a power of two or the sum of two, from {LEAST} on, "
            f"and hidden layers of a multiple of {LEAST}, not {width} and {hidden}: switch the kernels off"
        )
    if weight1.shape != (hidden, width) or weight2.shape != (width, hidden):
        shapes = [tuple(tensor.shape) for tensor in (rows, weight1, weight2)]
        raise UserError(f"the MLP's kernel takes (R, D), (H, D) and (D, H), not {shapes[0]}, {shapes[1]}, {shapes[2]}")
    _check_norm(norm, width)
    tensors = (rows, other, weight1, weight2)
    if not all(tensor.is_contiguous() and tensor.dtype == rows.dtype for tensor in tensors):
        raise UserError("the MLP's kernel takes tensors of one dtype that lie in order in memory: call contiguous()")
    if other.shape != rows.shape:
        given = f"{tuple(rows.shape)} and {tuple(other.shape)}"
        raise UserError(f"the MLP's kernel takes an update or a gradient for every row, not {given}")


def _check_norm(norm: Norm, width: int) -> None:
    if norm[0].shape != (width,) or norm[1].shape != (width,):
        shapes = [tuple(tensor.shape) for tensor in norm[:2]]
        raise UserError(f"the MLP's kernel takes a norm of {width} weights and biases, not of {shapes[0]}, {shapes[1]}")


def _launch(rows: Tensor, weight1: Tensor, table: dict[int, Tuning]) -> tuple[tuple[int], dict[str, object]]:
    """The grid, and what the kernels are compiled for."""
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
