"""Optimal transport against assignments, the line and brute force."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from probprompt.transport import optimal_transport


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("count", [1, 2, 7, 16, 40])
def test_between_points_of_equal_weight_it_is_the_best_assignment(count: int) -> None:
    cost = torch.rand(count, count, generator=source(count))
    plan = optimal_transport(cost, torch.ones(count), torch.ones(count))
    rows, columns = linear_sum_assignment(cost.numpy())
    expected = np.zeros((count, count))
    expected[rows, columns] = 1 / count
    np.testing.assert_allclose(plan.numpy(), expected, atol=1e-12)


def test_no_permutation_is_cheaper() -> None:
    cost = torch.rand(5, 5, generator=source()).double()
    plan = optimal_transport(cost, torch.ones(5), torch.ones(5))
    cheapest = min(sum(float(cost[i, j]) for i, j in enumerate(order)) for order in permutations(range(5)))
    assert float((plan * cost).sum()) == pytest.approx(cheapest / 5)


@pytest.mark.parametrize(("n", "m"), [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_the_plan_carries_the_weights(n: int, m: int) -> None:
    start, end = 5 * torch.rand(n, generator=source(1)), 3 * torch.rand(m, generator=source(2))
    plan = optimal_transport(torch.rand(n, m, generator=source(3)), start, end)
    assert plan.shape == (n, m) and plan.dtype == torch.float64 and (plan >= 0).all()
    torch.testing.assert_close(plan.sum(dim=1), start.double() / start.double().sum(), rtol=0, atol=1e-9)
    torch.testing.assert_close(plan.sum(dim=0), end.double() / end.double().sum(), rtol=0, atol=1e-9)
    assert (plan > 1e-12).sum() <= n + m - 1  # a corner


def on_a_line(
    start: Tensor, end: Tensor, first: Tensor, second: Tensor
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Between places on a line nothing overtakes: fill from left to right."""
    plan = np.zeros((len(start), len(end)))
    left, right = (first / first.sum()).tolist(), (second / second.sum()).tolist()
    rows, columns = start.argsort().tolist(), end.argsort().tolist()
    while rows and columns:
        i, j = rows[0], columns[0]
        amount = min(left[i], right[j])
        plan[i, j] += amount
        left[i] -= amount
        right[j] -= amount
        if left[i] <= right[j]:
            rows.pop(0)
        else:
            columns.pop(0)
    return plan


@pytest.mark.parametrize("seed", range(5))
def test_on_a_line_nothing_overtakes(seed: int) -> None:
    start, end = torch.randn(8, generator=source(seed)).double(), torch.randn(6, generator=source(seed + 9)).double()
    first, second = torch.rand(8, generator=source(seed + 20)).double(), torch.rand(6, generator=source(seed)).double()
    cost = (start[:, None] - end[None]).square()
    plan = optimal_transport(cost, first, second)
    np.testing.assert_allclose(plan.numpy(), on_a_line(start, end, first, second), atol=1e-9)


def test_a_point_without_weight_gives_and_takes_nothing() -> None:
    plan = optimal_transport(torch.rand(3, 3, generator=source()), torch.tensor([1.0, 0, 1]), torch.tensor([0, 1.0, 3]))
    assert not plan[1].any() and not plan[:, 0].any()
    assert float(plan.sum()) == pytest.approx(1)


def test_gradients_and_precision_of_the_weights_do_not_matter() -> None:
    cost = torch.rand(3, 3, generator=source(), requires_grad=True)
    plan = optimal_transport(cost, torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.float16))
    assert not plan.requires_grad and float(plan.max()) == pytest.approx(1 / 3)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, math.nan, 1.0]], ids=str)
def test_weights_without_meaning_are_refused(weights: list[float]) -> None:
    good, bad = torch.ones(3), torch.tensor(weights)
    with pytest.raises(ValueError, match="source needs 3 weights"):
        optimal_transport(torch.zeros(3, 3), bad, good)
    with pytest.raises(ValueError, match="target needs 3 weights"):
        optimal_transport(torch.zeros(3, 3), good, bad)
