"""Metrics of matrices worked out by hand, and properties of all matrices."""

import json
import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probprompt.evaluation import metrics

NAN = math.nan
HAND_MADE = [[90.0, 95.0, 70.0], [NAN, 80.0, 60.0], [NAN, NAN, 50.0]]

quick = settings(max_examples=40, deadline=None)
percent = st.floats(0, 100, allow_nan=False)


@st.composite
def matrices(draw: st.DrawFn, smallest: int = 1) -> metrics.Matrix:
    tasks = draw(st.integers(smallest, 6))
    matrix = np.array(draw(st.lists(percent, min_size=tasks**2, max_size=tasks**2))).reshape(tasks, tasks)
    matrix[np.tril_indices(tasks, k=-1)] = NAN
    return matrix


def with_future(matrix: metrics.Matrix, tasks: int) -> metrics.Matrix:
    """The same results, as they stand in a stream with more tasks to come."""
    partial = np.full((len(matrix) + tasks, len(matrix) + tasks), NAN)
    partial[: len(matrix), : len(matrix)] = matrix
    return partial


def test_hand_made_matrix() -> None:
    assert metrics.final_average_accuracy(HAND_MADE) == pytest.approx((70 + 60 + 50) / 3)
    assert metrics.cumulative_average_accuracy(HAND_MADE) == pytest.approx((90 + 87.5 + 60) / 3)
    assert metrics.average_forgetting(HAND_MADE) == pytest.approx(((95 - 70) + (80 - 60)) / 2)
    assert metrics.per_task_drop(HAND_MADE) == [20, 20, 0]
    assert metrics.finished_steps(HAND_MADE) == 3


def test_forgetting_by_hand() -> None:
    assert metrics.average_forgetting([[50.0, 60.0], [NAN, 70.0]]) == -10  # an old task gained
    assert metrics.average_forgetting([[50.0, 90.0, 60.0], [NAN, 70.0, 70.0], [NAN, NAN, 70.0]]) == 15
    assert metrics.summarize([[42.0]]) == {"FAA": 42.0, "CAA": 42.0, "forgetting": 0.0}
    assert metrics.per_task_drop([[42.0]]) == [0.0]


def test_matrix_types_and_unchanged_input() -> None:
    expected, matrix = metrics.summarize(HAND_MADE), np.array(HAND_MADE)
    assert metrics.summarize(matrix) == metrics.summarize(torch.tensor(HAND_MADE)) == expected
    metrics.from_json(metrics.to_json(matrix))[0, 0] = 1.0
    np.testing.assert_array_equal(matrix, HAND_MADE)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1.0, 2.0, 3.0], [NAN, 2.0, 3.0]], r"square.*\(2, 3\)"),
        ([1.0, 2.0], r"square.*\(2,\)"),
        ([], "square"),
        ([[1.0], [2.0, 3.0]], "equal length"),
        ([["high"]], "rows of numbers"),
        ([[NAN, 2.0], [NAN, 2.0]], r"A\[0\]\[0\] is missing"),
        ([[1.0, 2.0], [NAN, NAN]], r"A\[1\]\[1\] is missing"),
        ([[1.0, NAN, 2.0], [NAN, NAN, 2.0], [NAN, NAN, 2.0]], r"A\[0\]\[1\] is missing"),
        ([[1.0, 2.0], [0.0, 2.0]], r"A\[1\]\[0\] is 0.0"),
        ([[100.1]], r"A\[0\]\[0\] is 100.1.* from 0 to 100"),
        ([[math.inf]], "from 0 to 100"),
    ],
)
def test_impossible_matrices_are_refused(matrix: list[list[float]], message: str) -> None:
    for function in (metrics.summarize, metrics.finished_steps, metrics.to_json, metrics.from_json):
        with pytest.raises(ValueError, match=message):
            function(matrix)


def test_nothing_finished() -> None:
    empty = np.full((3, 3), NAN)
    assert metrics.finished_steps(empty) == 0
    assert metrics.to_json(empty) == [[None] * 3] * 3
    for function in (metrics.summarize, metrics.per_task_drop):
        with pytest.raises(ValueError, match="no step is finished"):
            function(empty)


def test_mean_and_std_divides_by_n() -> None:
    assert metrics.mean_and_std([1.0, 2.0, 3.0, 6.0]) == pytest.approx((3.0, math.sqrt(3.5)))
    assert metrics.mean_and_std([7.0]) == (7.0, 0.0)
    for values in ([], [1.0, NAN], [math.inf]):
        with pytest.raises(ValueError, match="at least one finite number"):
            metrics.mean_and_std(values)


@quick
@given(matrices())
def test_bounds(matrix: metrics.Matrix) -> None:
    low, high = float(np.nanmin(matrix)), float(np.nanmax(matrix))
    assert low - 1e-9 <= metrics.final_average_accuracy(matrix) <= high + 1e-9
    assert low - 1e-9 <= metrics.cumulative_average_accuracy(matrix) <= high + 1e-9
    assert abs(metrics.average_forgetting(matrix)) <= high - low + 1e-9


@quick
@given(matrices(smallest=2))
def test_forgetting_is_at_least_the_average_drop(matrix: metrics.Matrix) -> None:
    assert metrics.average_forgetting(matrix) >= np.mean(metrics.per_task_drop(matrix)[:-1]) - 1e-9
    assert metrics.per_task_drop(matrix)[-1] == 0


@quick
@given(matrices(), st.randoms(use_true_random=False))
def test_final_accuracy_ignores_the_order_of_tasks(matrix: metrics.Matrix, shuffler: Random) -> None:
    shuffled = matrix.copy()
    final = matrix[:, -1].tolist()
    shuffler.shuffle(final)
    shuffled[:, -1] = final
    assert metrics.final_average_accuracy(shuffled) == pytest.approx(metrics.final_average_accuracy(matrix))
    assert metrics.cumulative_average_accuracy(shuffled) == pytest.approx(metrics.cumulative_average_accuracy(matrix))


@quick
@given(matrices(), st.integers(0, 3))
def test_unfinished_stream_counts_as_a_shorter_one(matrix: metrics.Matrix, future: int) -> None:
    partial = with_future(matrix, future)
    assert metrics.finished_steps(partial) == len(matrix)
    assert metrics.summarize(partial) == metrics.summarize(matrix)
    assert metrics.per_task_drop(partial) == metrics.per_task_drop(matrix)


@quick
@given(matrices())
def test_cumulative_accuracy_averages_final_ones(matrix: metrics.Matrix) -> None:
    finals = [metrics.final_average_accuracy(matrix[:step, :step]) for step in range(1, len(matrix) + 1)]
    assert metrics.cumulative_average_accuracy(matrix) == pytest.approx(np.mean(finals))


@quick
@given(matrices(), st.integers(0, 2))
def test_json_round_trip(matrix: metrics.Matrix, future: int) -> None:
    partial = with_future(matrix, future)
    text = json.dumps(metrics.to_json(partial), allow_nan=False)
    np.testing.assert_array_equal(metrics.from_json(json.loads(text)), partial)


@quick
@given(st.lists(percent, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_mean_and_std_of_any_order(values: list[float], shuffler: Random) -> None:
    mean, std = metrics.mean_and_std(values)
    shuffled = list(values)
    shuffler.shuffle(shuffled)
    assert metrics.mean_and_std(shuffled) == pytest.approx((mean, std), abs=1e-6)
    assert min(values) - 1e-9 <= mean <= max(values) + 1e-9
    assert 0 <= std <= (max(values) - min(values)) / 2 + 1e-9
