import doctest
import importlib
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from probprompt.evaluation.embedding import pca, tsne


def clusters(each: int, number: int = 4, dimensions: int = 32) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    generator = np.random.default_rng(1)
    centres = generator.standard_normal((number, dimensions)) * 4.0
    labels = np.repeat(np.arange(number), each)
    return centres[labels] + generator.standard_normal((len(labels), dimensions)), labels


def nearest_label_agreement(picture: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    distances = ((picture[:, None] - picture[None]) ** 2).sum(axis=-1)
    np.fill_diagonal(distances, np.inf)
    return float((labels[distances.argmin(axis=1)] == labels).mean())


def test_documented_examples_hold() -> None:
    module = importlib.import_module("probprompt.evaluation.embedding")
    outcome = doctest.testmod(module)
    assert outcome.attempted >= 4
    assert outcome.failed == 0


def test_tsne_keeps_separated_clusters_apart() -> None:
    points, labels = clusters(each=30)
    picture = tsne(points)
    assert picture.shape == (120, 2)
    assert nearest_label_agreement(picture, labels) == 1.0
    centres = np.stack([picture[labels == label].mean(axis=0) for label in range(4)])
    radius = max(np.linalg.norm(picture[labels == label] - centres[label], axis=1).max() for label in range(4))
    between = [np.linalg.norm(a - b) for i, a in enumerate(centres) for b in centres[:i]]
    assert min(between) > radius


def test_tsne_shows_neighbours_that_two_components_hide() -> None:
    # Eight clusters on orthogonal axes: two principal components cannot tell them all apart.
    points, labels = clusters(each=12, number=8, dimensions=16)
    assert nearest_label_agreement(tsne(points), labels) > nearest_label_agreement(pca(points), labels)


def test_tsne_is_deterministic_and_the_seed_matters_little() -> None:
    points, labels = clusters(each=15)
    first = tsne(points, seed=3)
    assert np.array_equal(first, tsne(points, seed=3))
    assert nearest_label_agreement(tsne(points, seed=4), labels) == 1.0


def test_tsne_ignores_scale_and_offset() -> None:
    points, labels = clusters(each=10)
    moved = tsne(points * 1e-3 + 7.0)
    assert np.isfinite(moved).all()
    assert nearest_label_agreement(moved, labels) == 1.0


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 6])
def test_tiny_sets_have_finite_pictures(number: int) -> None:
    points = np.random.default_rng(0).standard_normal((number, 7))
    picture = tsne(points)
    assert picture.shape == (number, 2)
    assert np.isfinite(picture).all()


def test_equal_points_have_a_finite_picture() -> None:
    assert np.isfinite(tsne(np.ones((20, 4)))).all()
    points = np.concatenate([np.zeros((15, 4)), np.ones((15, 4))])
    picture = tsne(points)
    assert np.isfinite(picture).all()
    assert nearest_label_agreement(picture, np.repeat([0, 1], 15)) == 1.0


def test_pca_orders_directions_by_variance_with_fixed_signs() -> None:
    points = np.random.default_rng(0).standard_normal((50, 3)) * np.array([1.0, 5.0, 0.2])
    picture = pca(points)
    assert picture[:, 0].var() > picture[:, 1].var()
    np.testing.assert_allclose(pca(points + 3.0), picture, atol=1e-9)
    assert np.corrcoef(picture[:, 0], points[:, 1])[0, 1] > 0.99


def test_pca_fills_missing_directions_with_zero() -> None:
    assert pca([[1.0], [2.0], [3.0]], dimensions=3)[:, 1:].tolist() == [[0.0, 0.0]] * 3
    assert pca(np.zeros((0, 5))).shape == (0, 2)


@pytest.mark.parametrize("points", [[1.0, 2.0], [[float("nan"), 1.0]]])
def test_bad_points_are_refused(points: object) -> None:
    with pytest.raises(ValueError, match="points must"):
        tsne(points)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="perplexity must be positive"):
        tsne(np.eye(9), perplexity=0.0)


def test_six_hundred_points_take_seconds() -> None:
    points, _ = clusters(each=150, dimensions=192)
    started = time.process_time()
    tsne(points, iterations=100)
    assert time.process_time() - started < 10.0  # processor time: other work on the machine does not count
