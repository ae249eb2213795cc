"""GELU and its derivative at the speed of memory: the error function is made of one exponential."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Numbers of a program."""


@triton.jit
def _normal(x: tl.tensor) -> tl.tuple:
    """The normal distribution up to x, and sqrt(2 pi) times its density: right to 1e-7 (Abramowitz & Stegun 7.1.26)."""
    bell = tl.exp2(x * x * -0.7213475204444817)  # exp(-x^2 / 2)
    part = 1.0 / (1.0 + 0.23164189 * tl.abs(x))  # 0.3275911 / sqrt(2)
    series = 0.254829592 + part * (-0.284496736 + part * (1.421413741 + part * (-1.453152027 + part * 1.061405429)))
    beyond = 0.5 * part * series * bell  # the tail beyond |x|
    return tl.where(x > 0, 1.0 - beyond, beyond), bell


@triton.jit
def _gelu(x: tl.tensor, result: tl.tensor, count: tl.tensor, block: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    share, _ = _normal(value)
    tl.store(result + place, (value * share).to(result.dtype.element_ty), mask=place < count)


@triton.jit
def _gelu_backward(grad: tl.tensor, x: tl.tensor, result: tl.tensor, count: tl.tensor, block: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    given = tl.load(grad + place, mask=place < count, other=0.0).to(tl.float32)
    share, bell = _normal(value)
    slope = share + 0.3989422804014327 * value * bell
    tl.store(result + place, (given * slope).to(result.dtype.element_ty), mask=place < count)


def gelu(x: Tensor) -> Tensor:
    """X times the normal distribution up to x, for a contiguous tensor of any shape."""
    result = torch.empty_like(x)
    _gelu[(triton.cdiv(x.numel(), BLOCK),)](x, result, x.numel(), BLOCK)
    return result


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of :func:`gelu` at x, written over ``grad``."""
    _gelu_backward[(triton.cdiv(x.numel(), BLOCK),)](grad, x, grad, x.numel(), BLOCK)
    return grad
