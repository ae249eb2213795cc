"""Exact optimal transport between two weighted sets of points."""

import torch
from torch import Tensor


def optimal_transport(cost: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The plan (n, m) that carries the source's weights (n,) to the target's (m,) at the least cost (n, m).

    Both weights are brought to a sum of 1: the plan's rows sum to the source's, its columns to the target's. It solves
    ``min <cost, plan>`` as a linear program, in float64, and is a corner of the polytope of plans: between equally many
    points of equal weights, the best assignment of one to another.

    >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> optimal_transport(cost, torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]))
    tensor([[0.5000, 0.2500],
            [0.0000, 0.2500]], dtype=torch.float64)
    """
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, kron, vstack

    wide = cost.detach().double().cpu()  # (n, m)
    rows, columns = _shares("source", source, wide.shape[0]), _shares("target", target, wide.shape[1])
    row_sums = kron(eye_array(len(rows)), [[1.0] * len(columns)])  # (n, n m)
    column_sums = kron([[1.0] * len(rows)], eye_array(len(columns)))  # (m, n m)
    # The sum over all rows is that over all columns: one equation follows from the others, and rounding would break it.
    equations = vstack([row_sums, column_sums], format="csr")[:-1]  # (n + m - 1, n m)
    sums = torch.cat([rows, columns])[:-1].numpy()
    answer = linprog(wide.flatten().numpy(), A_eq=equations, b_eq=sums, method="highs-ds")
    if answer.x is None:
        raise ValueError(f"no transport plan was found: {answer.message}")
    return torch.from_numpy(answer.x).double().clamp(min=0).view_as(wide)


def _shares(name: str, weights: Tensor, count: int) -> Tensor:
    """Weights with a sum of 1."""
    wide = weights.detach().double().cpu()
    if wide.shape != (count,) or not bool(wide.isfinite().all()) or bool((wide < 0).any()) or not float(wide.sum()):
        raise ValueError(f"{name} needs {count} weights, none negative and not all zero, got {weights.tolist()}")
    return wide / wide.sum()
