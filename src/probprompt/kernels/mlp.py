"""The MLP of a narrow frozen block as one kernel each way: its hidden layer never goes to memory.

A program holds a block of rows and walks over the hidden layer chunk by chunk: what the first layer gives goes through
the GELU and into the second one while it is still in registers. The way back computes the hidden layer again from the
rows, which is one more product and saves keeping it. Both sum over the hidden layer in a fixed order, so that what a
row gives depends neither on its neighbours nor on how the rows are cut.

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
"""By width, at most."""
BACKWARD = {192: Tuning(128, 64, 8, 3, held=1), 256: Tuning(128, 32, 8, 3)}
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
    """The part of x that is above 0, less |x| times the normal distribution beyond |x|: right to fp32's rounding.

    The polynomial is the logarithm to base 2 of that tail: a minimax fit, in error 8e-9 of the tail itself. It falls
    for ever, so that what lies beyond the range that it was fitted on comes out right.
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
    """The derivative of the GELU, right to 1.1e-7, from a single exponential.

    Below 0 it is the bell exp(-x^2 / 2) times a function of |x| (Mills' ratio, less |x|, over sqrt(2 pi)): a minimax
    fit whose error is weighed by the bell. Above 0 it is what is missing to 1.
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
    if known is None:
        values = tl.load(place)
    else:
        values = tl.load(place, mask=known[:, None], other=0.0)
    return values


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
def _write(
    result: tl.tensor, totals: tl.tuple, bias: tl.tensor | None, row: tl.tensor, known: tl.tensor, plan: tl.constexpr
) -> None:
    """Write sums (rows, width), with a bias."""
    _write_part(result, totals[0], bias, row, tl.arange(0, plan.low), known, plan)
    if plan.high > 0:
        _write_part(result, totals[1], bias, row, plan.low + tl.arange(0, plan.high), known, plan)


@triton.jit
def _write_part(
    result: tl.tensor,
    total: tl.tensor,
    bias: tl.tensor | None,
    row: tl.tensor,
    column: tl.tensor,
    known: tl.tensor,
    plan: tl.constexpr,
) -> None:
    if bias is not None:
        total += tl.load(bias + column).to(tl.float32)[None, :]
    place = result + row[:, None] * plan.width + column[None, :]
    tl.store(place, total.to(result.dtype.element_ty), mask=known[:, None])


@triton.jit
def _held(values: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """The same values (rows, size), where a product leaves its result: in the registers that the next one reads."""
    place = tl.arange(0, size)
    unit = (place[:, None] == place[None, :]).to(values.dtype)
    return tl.dot(values, unit, input_precision="ieee").to(values.dtype)


@triton.jit
def _forward(
    rows: tl.tensor,
    weight1: tl.tensor,
    bias1: tl.tensor | None,
    weight2: tl.tensor,
    bias2: tl.tensor | None,
    result: tl.tensor,
    count: tl.tensor,
    plan: tl.constexpr,
) -> None:
    size: tl.constexpr = plan.rows
    chunk: tl.constexpr = plan.chunk
    top = tl.program_id(0) * plan.rows
    place = top.to(tl.int64) * plan.width
    row = tl.arange(0, plan.rows)
    given = _rows(rows + place, row, row < count - top, plan)
    totals = _nothing(plan)
    # The second product stays one chunk behind, so that the tensor cores work on it during the next chunk's GELU. What
    # waits for it is rounded where it is used: only then is it passed on in registers.
    active = tl.zeros((size, chunk), tl.float32)
    shift = _shift(bias1, 0, plan)
    for start in range(0, plan.hidden, plan.chunk):
        later = _shift(bias1, start + plan.chunk, plan)
        hidden = _into(given, _first(weight1, start, plan), plan)
        totals = _onto(totals, active.to(given[0].dtype), _second(weight2, tl.maximum(start - chunk, 0), plan), plan)
        active = _gelu(hidden + shift.to(tl.float32)[None, :])
        shift = later
    totals = _onto(totals, active.to(given[0].dtype), _second(weight2, plan.hidden - plan.chunk, plan), plan)
    _write(result + place, totals, bias2, row, row < count - top, plan)


@triton.jit
def _backward(
    grad: tl.tensor,
    rows: tl.tensor,
    weight1: tl.tensor,
    bias1: tl.tensor | None,
    weight2: tl.tensor,
    result: tl.tensor,
    count: tl.tensor,
    plan: tl.constexpr,
) -> None:
    top = tl.program_id(0) * plan.rows
    place = top.to(tl.int64) * plan.width
    row = tl.arange(0, plan.rows)
    low, high = _rows(rows + place, row, row < count - top, plan)
    grad_low, grad_high = _rows(grad + place, row, row < count - top, plan)
    if plan.held > 0:
        high = _held(high, plan.high)
    if plan.held > 1:
        grad_high = _held(grad_high, plan.high)
    totals = _nothing(plan)
    shift = _shift(bias1, 0, plan)
    for start in range(0, plan.hidden, plan.chunk):
        later = _shift(bias1, start + plan.chunk, plan)
        weight = _first(weight1, start, plan)
        hidden = _into((low, high), weight, plan)  # (rows, chunk)
        slope = _into((grad_low, grad_high), _second(weight2, start, plan), plan)
        slope *= _gelu_slope(hidden + shift.to(tl.float32)[None, :])
        totals = _onto(totals, slope.to(low.dtype), weight, plan)
        shift = later
    _write(result + place, totals, None, row, row < count - top, plan)


def fits(width: int) -> bool:
    """Whether these kernels are for an MLP of that width: narrow, and one power of two or the sum of two."""
    return LEAST <= width <= WIDEST and width.bit_count() <= 2 and width % LEAST == 0


def mlp(rows: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    """Rows (R, D) through the layer (H, D), the exact GELU and the layer (D, H): (R, D)."""
    _check(rows, weight1, weight2)
    result = torch.empty_like(rows)  # (R, D)
    grid, options = _launch(rows, weight1, FORWARD)
    _forward[grid](rows, weight1, bias1, weight2, bias2, result, rows.shape[0], **options)
    return result


def mlp_backward(grad: Tensor, rows: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor) -> Tensor:
    """The gradient (R, D) of the rows, for the gradient (R, D) of what :func:`mlp` made of them."""
    _check(rows, weight1, weight2, grad)
    result = torch.empty_like(rows)  # (R, D)
    grid, options = _launch(rows, weight1, BACKWARD)
    _backward[grid](grad, rows, weight1, bias1, weight2, result, rows.shape[0], **options)
    return result


def _check(rows: Tensor, weight1: Tensor, weight2: Tensor, *others: Tensor) -> None:
    width, hidden = rows.shape[1], weight1.shape[0]
    if not fits(width) or hidden % LEAST:
        raise UserError(
            f"the MLP's kernel takes widths up to {WIDEST} that are a power of two or the sum of two, from {LEAST} on, "
            f"and hidden layers of a multiple of {LEAST}, not {width} and {hidden}: switch the kernels off"
        )
    if weight1.shape != (hidden, width) or weight2.shape != (width, hidden):
        shapes = [tuple(tensor.shape) for tensor in (rows, weight1, weight2)]
        raise UserError(f"the MLP's kernel takes (R, D), (H, D) and (D, H), not {shapes[0]}, {shapes[1]}, {shapes[2]}")
    tensors = (rows, weight1, weight2, *others)
    if not all(tensor.is_contiguous() and tensor.dtype == rows.dtype for tensor in tensors):
        raise UserError("the MLP's kernel takes tensors of one dtype that lie in order in memory: call contiguous()")


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
