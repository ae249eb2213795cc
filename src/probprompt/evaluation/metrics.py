"""Metrics of continual learning, from the accuracy matrix of a run.

``A[i, j]`` is the accuracy in percent on the test images of task i after step j, over all classes seen by then. It is
NaN before task i is seen (j < i). An unfinished run has only its first columns and counts as a stream of that many
tasks. All tasks have equal weight.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]


def finished_steps(accuracy: ArrayLike) -> int:
    """Count the filled columns; raise an error for an impossible matrix.

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
    """Average the average accuracy over all steps: mean_j mean_{i<=j} A[i, j].

    >>> nan = float("nan")
    >>> cumulative_average_accuracy([[90, 80, 70], [nan, 80, 60], [nan, nan, 50]])  # of 90, 80 and 60
    76.66666666666667
    """
    matrix = _started(accuracy)
    return float(np.mean([matrix[: step + 1, step].mean() for step in range(len(matrix))]))


def average_forgetting(accuracy: ArrayLike) -> float:
    """Average the loss from the best accuracy: mean_{i<T} (max_{j<T} A[i, j] - A[i, T]).

    Negative if earlier tasks gained, and 0 for a single task.

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
    """Return what each task lost from its step to the last: A[i, i] - A[i, T].

    >>> nan = float("nan")
    >>> per_task_drop([[90, 95, 70], [nan, 80, 60], [nan, nan, 50]])
    [20.0, 20.0, 0.0]
    """
    matrix = _started(accuracy)
    return [float(drop) for drop in matrix.diagonal() - matrix[:, -1]]


def summarize(accuracy: ArrayLike) -> dict[str, float]:
    """Return FAA, CAA and forgetting.

    >>> summarize([[90, 80], [None, 70]])
    {'FAA': 75.0, 'CAA': 82.5, 'forgetting': 10.0}
    """
    return {
        "FAA": final_average_accuracy(accuracy),
        "CAA": cumulative_average_accuracy(accuracy),
        "forgetting": average_forgetting(accuracy),
    }


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the population standard deviation (divided by n, as in the papers).

    >>> mean_and_std([79.0, 81.0])
    (80.0, 1.0)
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or numbers.size == 0 or not np.isfinite(numbers).all():
        raise ValueError(f"mean_and_std needs at least one finite number, got {values!r}.")
    return float(numbers.mean()), float(numbers.std())


def to_json(accuracy: ArrayLike) -> list[list[float | None]]:
    """Convert a matrix to lists for JSON, with None for NaN.

    >>> to_json([[90, 80], [float("nan"), 70]])
    [[90.0, 80.0], [None, 70.0]]
    """
    matrix = _square(accuracy)
    _finished(matrix)
    return [[None if np.isnan(value) else float(value) for value in row] for row in matrix]


def from_json(rows: Sequence[Sequence[float | None]]) -> Matrix:
    """Convert the lists of `to_json` to a matrix.

    >>> from_json([[90.0, 80.0], [None, 70.0]])
    array([[90., 80.],
           [nan, 70.]])
    """
    matrix = _square(rows)
    _finished(matrix)
    return matrix


def _square(accuracy: object) -> Matrix:
    """Copy to float64; raise an error unless it is a square matrix of numbers."""
    try:
        matrix = np.asarray(accuracy, dtype=np.float64).copy()  # None becomes NaN
    except (TypeError, ValueError) as error:
        raise ValueError(f"An accuracy matrix needs rows of numbers, of equal length: {error}.") from error
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0:
        raise ValueError(f"An accuracy matrix must be square (tasks by steps), got shape {matrix.shape}.")
    return matrix


def _finished(matrix: Matrix) -> Matrix:
    """Select the filled part; raise an error for gaps, early numbers and impossible values."""
    known = ~np.isnan(matrix)
    steps = int(known.any(axis=0).sum())
    expected = np.triu(np.ones_like(known))
    expected[:, steps:] = False
    for task, step in np.argwhere(np.tril(known, k=-1)):
        value = matrix[task, step]
        raise ValueError(f"A[{task}][{step}] is {value}, but task {task} is not seen before step {task}.")
    for task, step in np.argwhere(expected & ~known):
        raise ValueError(f"A[{task}][{step}] is missing: task {task} must be scored after step {step}.")
    for task, step in np.argwhere(known & ~((matrix >= 0) & (matrix <= 100))):
        raise ValueError(f"A[{task}][{step}] is {matrix[task, step]}. Expected a percentage from 0 to 100.")
    return matrix[:steps, :steps]


def _started(accuracy: ArrayLike) -> Matrix:
    """Select the filled part, of at least one step."""
    matrix = _finished(_square(accuracy))
    if not matrix.size:
        raise ValueError("The accuracy matrix is all NaN: no step is finished.")
    return matrix
