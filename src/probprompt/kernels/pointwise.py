"""Layer norms of a frozen network, fused with the residual sum before them, and the GELU.

Each is one pass over memory: a program holds a few whole rows, so that nothing is read twice.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from probprompt.errors import UserError

WIDEST = 4096
"""Maximum width: a program holds whole rows in registers."""
FORWARD = {"elements": 2048, "warps": 4}
"""Elements per program step (rows, padded to a power of two), and warps."""
BACKWARD = {"elements": 2048, "warps": 4}
"""The same for the backward pass."""


@triton.jit
def _add_norm(
    inputs,
    update,
    weight,
    bias,
    total,
    normed,
    mean,
    rstd,
    count,
    eps,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    inside = column[None, :] < width
    mask = (row[:, None] < count) & inside
    place = row[:, None].to(tl.int64) * width + column[None, :]
    values = tl.load(inputs + place, mask=mask, other=0.0).to(tl.float32)  # (rows, columns)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)  # (columns,)
    shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    if update is not None:
        values += tl.load(update + place, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=mask)
        # The backward pass sees the rounded sum, so the norm must use it too.
        values = rounded.to(tl.float32)
    middle = tl.sum(values, axis=1) / width  # (rows,)
    centred = tl.where(inside, values - middle[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, axis=1) / width + eps)
    tl.store(mean + row, middle, mask=row < count)
    tl.store(rstd + row, spread, mask=row < count)
    result = centred * spread[:, None] * factor[None, :] + shift[None, :]
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(
    grad,
    total,
    weight,
    mean,
    rstd,
    residual,
    result,
    count,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    mask = (row[:, None] < count) & (column[None, :] < width)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    values = tl.load(total + place, mask=mask, other=0.0).to(tl.float32)  # (rows, columns)
    # All loads are issued before the first sum waits for one of them.
    back = tl.zeros((rows, columns), tl.float32)
    if residual is not None:
        back += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    slope = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    slope *= tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    middle = tl.load(mean + row, mask=row < count, other=0.0)
    spread = tl.load(rstd + row, mask=row < count, other=0.0)
    standard = (values - middle[:, None]) * spread[:, None]
    offset = tl.sum(slope, axis=1) / width  # (rows,)
    along = tl.sum(slope * standard, axis=1) / width
    back += (slope - offset[:, None] - standard * along[:, None]) * spread[:, None]
    tl.store(result + place, back.to(result.dtype.element_ty), mask=mask)


def add_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x + update (R, D), its layer norm, and float32 mean and reciprocal std (R,).

    The sum is rounded to the dtype of x before its norm is computed. Without an update the sum is x itself. Rows are
    contiguous.
    """
    total = x if update is None else torch.empty_like(x)  # (R, D)
    normed = torch.empty_like(x)  # (R, D)
    mean = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)  # (R,)
    rstd = torch.empty_like(mean)  # (R,)
    grid, sizes = _launch(x, FORWARD)
    _add_norm[grid](x, update, weight, bias, total, normed, mean, rstd, x.shape[0], eps, **sizes)
    return total, normed, mean, rstd


def norm_backward(
    grad: Tensor, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None
) -> Tensor:
    """Return the gradient (R, D) of a norm's input for that of its output, plus a residual's."""
    result = torch.empty_like(grad)  # (R, D)
    grid, sizes = _launch(grad, BACKWARD)
    _norm_backward[grid](grad, total, weight, mean, rstd, residual, result, grad.shape[0], **sizes)
    return result


def _launch(x: Tensor, tuning: dict[str, int]) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid, and compile-time constants."""
    count, width = x.shape
    if width > WIDEST:
        raise UserError(f"The norm kernel supports widths up to {WIDEST}, got {width}. Set PROBPROMPT_KERNELS=off.")
    columns = 1 << (width - 1).bit_length()
    rows = max(1, tuning["elements"] // columns)
    sizes = {"width": width, "rows": rows, "columns": columns, "num_warps": tuning["warps"]}
    return (-(-count // rows),), sizes


BLOCK = 2048
"""Numbers per program."""


@triton.jit
def _normal(x):
    """Return the normal CDF and sqrt(2 pi) times its density, to 1e-7 (A&S 7.1.26)."""
    bell = tl.exp2(x * x * -0.7213475204444817)  # exp(-x^2 / 2)
    part = 1.0 / (1.0 + 0.23164189 * tl.abs(x))  # 0.3275911 / sqrt(2)
    series = 0.254829592 + part * (-0.284496736 + part * (1.421413741 + part * (-1.453152027 + part * 1.061405429)))
    beyond = 0.5 * part * series * bell  # tail beyond |x|
    return tl.where(x > 0, 1.0 - beyond, beyond), bell


@triton.jit
def _gelu(x, result, count, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    share, _ = _normal(value)
    tl.store(result + place, (value * share).to(result.dtype.element_ty), mask=place < count)


@triton.jit
def _gelu_backward(grad, x, result, count, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    given = tl.load(grad + place, mask=place < count, other=0.0).to(tl.float32)
    share, bell = _normal(value)
    slope = share + 0.3989422804014327 * value * bell
    tl.store(result + place, (given * slope).to(result.dtype.element_ty), mask=place < count)


def gelu(x: Tensor) -> Tensor:
    """Compute the GELU of a contiguous tensor of any shape."""
    result = torch.empty_like(x)
    _gelu[(triton.cdiv(x.numel(), BLOCK),)](x, result, x.numel(), BLOCK)
    return result


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient of :func:`gelu` at x, in place of ``grad``."""
    _gelu_backward[(triton.cdiv(x.numel(), BLOCK),)](grad, x, grad, x.numel(), BLOCK)
    return grad
