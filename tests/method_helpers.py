"""What the tests of the methods share: small methods, queries, what is injected, gradients by finite differences."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from probprompt.methods import EVALUATION, Context, Method, Shape, find, parse_config
from probprompt.prompts import ClassTokenShift, Prefix, Tokens
from probprompt.randomness import Noise

Array = NDArray[np.float64]


def build(name: str, width: int, depth: int, seed: int = 7, /, **settings: Any) -> Method:
    """A method before its first task."""
    return find(name).create(parse_config({"name": name, **settings}), Shape(width, depth), seed)


def normal(*shape: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def move(method: nn.Module, seed: int, distance: float = 0.3) -> None:
    """Change what is trained, as an optimizer would."""
    source = torch.Generator().manual_seed(seed)
    for parameter in method.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=source), alpha=distance)


def training(task: int = 0, labels: Tensor | None = None, first: int = 0, seed: int = 5) -> Context:
    return Context(True, task, labels, first, Noise(torch.tensor([seed])))


def injected(method: Method, query: Tensor | None, context: Context = EVALUATION) -> dict[int, Tensor]:
    """All tokens of every block, (B, M, D): of a prefix or a shift the keys, then the values."""
    found = {}
    for block, prompt in method.prompts(query, context).prompts.items():
        if isinstance(prompt, Tokens):
            tokens = prompt.tokens
        elif isinstance(prompt, Prefix):
            tokens = torch.cat([prompt.key, prompt.value], dim=-2)
        else:
            assert isinstance(prompt, ClassTokenShift)
            tokens = torch.stack([prompt.key, prompt.value])
        found[block] = tokens if query is None else tokens.expand(len(query), -1, -1)
    return found


def loss_of(method: Method, query: Tensor, context: Context) -> Tensor:
    loss = method.prompts(query, context).loss
    assert loss is not None and loss.shape == ()
    return loss


def same(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(tensor, other[block]) for block, tensor in one.items())


def array(value: Tensor) -> Array:
    return value.detach().double().numpy()


def close(found: Tensor, expected: Array, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    np.testing.assert_allclose(array(found), expected, rtol=rtol, atol=atol)


def cosine(one: Tensor, other: Tensor) -> float:
    """In Python's own numbers."""
    first, second = list(map(float, one.detach())), list(map(float, other.detach()))
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return product / math.sqrt(sum(a * a for a in first)) / math.sqrt(sum(b * b for b in second))


def check_gradient(value: Callable[[], Tensor], parameter: Tensor, exact: Callable[[], float] | None = None) -> Tensor:
    """Compare a gradient with finite differences, of the value itself or of a second way to compute it."""
    direction = normal(*parameter.shape, seed=3).double()

    def moved_by(step: float) -> float:
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            result = float(value()) if exact is None else exact()
            parameter.add_(direction, alpha=-step)
        return result

    (gradient,) = torch.autograd.grad(value(), parameter)
    expected = (moved_by(1e-5) - moved_by(-1e-5)) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-6)
    assert abs(expected) > 1e-4
    return gradient
