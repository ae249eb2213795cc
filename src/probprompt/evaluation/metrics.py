"""Metrics of continual learning, from the accuracy matrix of a run.

``A[i, j]`` is the accuracy in percent on the test images of task i after step j, over all classes seen by then.
It is NaN before task i is seen (j < i). A run under way has only its first columns: the metrics then treat it
as a stream of that many tasks. Tasks weigh the same, however many images they have.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "average_forgetting",
    "cumulative_average_accuracy",
    "final_average_accuracy",
    "finished_steps",
    "from_json",
    "mean_and_std",
    "per_task_drop",
    "summarize",
    "to_json",
]

Matrix = NDArray[np.float64]


def finished_steps(accuracy: ArrayLike) -> int:
    """Count the steps whose column is filled; refuse a matrix that no run can have.

    >>> nan = float("nan")
    >>> finished_steps([[90, 80, nan], [nan, 70, nan], [nan, nan, nan]])
    2
    """
    return len(_finished(_square(accuracy)))


def final_average_accuracy(accuracy: ArrayLike) -> float:
    """Average the accuracy of all tasks after the last step: mean_i A[i, T].

    >>> nan = float("nan")
    >>> final_average_accuracy([[90, 80, 70], [nan, 80, 60], [nan, nan, 50]])
    60.0
    """
    return float(_started(accuracy)[:, -1].mean())


def cumulative_average_accuracy(accuracy: ArrayLike) -> float:
    """Average, over the steps, the average accuracy of the tasks seen by then: mean_j mean_{i<=j} A[i, j].

    >>> nan = float("nan")
    >>> cumulative_average_accuracy([[90, 80, 70], [nan, 80, 60], [nan, nan, 50]])  # of 90, 80 and 60
    76.66666666666667
    """
    matrix = _started(accuracy)
    return float(np.mean([matrix[: step + 1, step].mean() for step in range(len(matrix))]))


def average_forgetting(accuracy: ArrayLike) -> float:
    """Average what the earlier tasks lost against their best: mean_{i<T} (max_{j<T} A[i, j] - A[i, T]).

    It is negative where they gained, and 0 for a single task.

    >>> nan = float("nan")
    >>> average_forgetting([[90, 95, 70], [nan, 80, 60], [nan, nan, 50]])  # of 25 and 20
    22.5
    """
    matrix = _started(accuracy)
    last = len(matrix) - 1
    if last == 0:
        return 0.0
    return float(np.mean([matrix[task, task:last].max() - matrix[task, last] for task in range(last)]))


def per_task_drop(accuracy: ArrayLike) -> list[float]:
    """List what each task lost from the step that learned it to the last: A[i, i] - A[i, T].

    >>> nan = float("nan")
    >>> per_task_drop([[90, 95, 70], [nan, 80, 60], [nan, nan, 50]])
    [20.0, 20.0, 0.0]
    """
    matrix = _started(accuracy)
    return [float(drop) for drop in matrix.diagonal() - matrix[:, -1]]


def summarize(accuracy: ArrayLike) -> dict[str, float]:
    """Give the three numbers that the papers report.

    >>> summarize([[90, 80], [None, 70]])
    {'FAA': 75.0, 'CAA': 82.5, 'forgetting': 10.0}
    """
    return {
        "FAA": final_average_accuracy(accuracy),
        "CAA": cumulative_average_accuracy(accuracy),
        "forgetting": average_forgetting(accuracy),
    }


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Give mean and population standard deviation (divided by n, as the papers do) of several results.

    >>> mean_and_std([79.0, 81.0])
    (80.0, 1.0)
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or numbers.size == 0 or not np.isfinite(numbers).all():
        raise ValueError(f"mean_and_std needs a list of at least one finite number, got {values!r}")
    return float(numbers.mean()), float(numbers.std())


def to_json(accuracy: ArrayLike) -> list[list[float | None]]:
    """Turn a matrix into lists that JSON can hold: None for NaN.

    >>> to_json([[90, 80], [float("nan"), 70]])
    [[90.0, 80.0], [None, 70.0]]
    """
    matrix = _square(accuracy)
    _finished(matrix)
    return [[None if np.isnan(value) else float(value) for value in row] for row in matrix]


def from_json(rows: Sequence[Sequence[float | None]]) -> Matrix:
    """Turn the lists of `to_json` back into a matrix.

    >>> from_json([[90.0, 80.0], [None, 70.0]])
    array([[90., 80.],
           [nan, 70.]])
    """
    matrix = _square(rows)
    _finished(matrix)
    return matrix


def _square(accuracy: object) -> Matrix:
    """Make a float64 copy; refuse what is not a square matrix of numbers."""
    try:
        matrix = np.asarray(accuracy, dtype=np.float64).copy()  # None becomes NaN
    except (TypeError, ValueError) as error:
        raise ValueError(f"an accuracy matrix has rows of equal length and holds numbers: {error}") from error
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0:
        raise ValueError(f"an accuracy matrix is square, tasks by steps; got shape {matrix.shape}")
    return matrix


def _finished(matrix: Matrix) -> Matrix:
    """Cut the part that is filled; refuse holes, numbers before their task is seen, and impossible values."""
    known = ~np.isnan(matrix)
    steps = int(known.any(axis=0).sum())
    due = np.triu(np.ones_like(known))
    due[:, steps:] = False
    for task, step in np.argwhere(np.tril(known, k=-1)):
        value = matrix[task, step]
        raise ValueError(f"A[{task}][{step}] is {value}, but step {step} comes before task {task} is seen")
    for task, step in np.argwhere(due & ~known):
        raise ValueError(f"A[{task}][{step}] is missing: task {task} must be scored after step {step}")
    for task, step in np.argwhere(known & ~((matrix >= 0) & (matrix <= 100))):
        raise ValueError(f"A[{task}][{step}] is {matrix[task, step]}: accuracies are percent, from 0 to 100")
    return matrix[:steps, :steps]


def _started(accuracy: ArrayLike) -> Matrix:
    """Cut the part that is filled, of at least one step."""
    matrix = _finished(_square(accuracy))
    if not matrix.size:
        raise ValueError("the accuracy matrix is all NaN: no step is finished, nothing can be measured")
    return matrix
