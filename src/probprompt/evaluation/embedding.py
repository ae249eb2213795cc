"""Two-dimensional pictures of high-dimensional points: principal components and exact t-SNE."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

FEWEST = 5
"""Below this many points neighbourhoods say nothing, and t-SNE gives way to principal components."""
EXAGGERATION = 12.0
TINY = 1e-12


def _as_points(points: ArrayLike) -> Array:
    array = np.asarray(points, dtype=np.float64)
    if array.ndim != 2:
        raise ValueError(f"points must have the shape (number, dimensions), not {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError("points must be finite, but some are nan or infinite")
    return array


def pca(points: ArrayLike, dimensions: int = 2) -> Array:
    """Project points onto the directions of their largest variance.

    The sign of each direction is fixed (its largest entry is positive), so equal points give equal
    pictures. Directions that the points do not have are zero.

    >>> pca([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], dimensions=1).round(3).tolist()
    [[-1.414], [0.0], [1.414]]
    >>> pca([[3.0, 4.0]]).tolist()
    [[0.0, 0.0]]
    """
    array = _as_points(points)
    picture = np.zeros((len(array), dimensions))
    if array.size == 0:
        return picture
    centred = array - array.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    directions = directions[:dimensions]
    largest = np.abs(directions).argmax(axis=1)
    signs = np.sign(directions[np.arange(len(directions)), largest])
    picture[:, : len(directions)] = centred @ (directions * signs[:, None]).T
    return picture


def _squared_distances(points: Array) -> Array:
    norms = (points**2).sum(axis=1)
    distances: Array = norms[:, None] + norms[None, :] - 2.0 * points @ points.T
    np.maximum(distances, 0.0, out=distances)
    return distances


def _neighbourhoods(distances: Array, perplexity: float) -> Array:
    """Joint probabilities whose every row has the given perplexity: bisection on all rows at once."""
    number = len(distances)
    others = ~np.eye(number, dtype=bool)
    rows = distances[others].reshape(number, number - 1)
    rows = rows - rows.min(axis=1, keepdims=True)  # the nearest neighbour never underflows
    rows /= max(float(rows.mean()), TINY)
    low, high, precision = np.zeros(number), np.full(number, np.inf), np.ones(number)
    target = np.log(perplexity)
    for _ in range(60):
        weights = np.exp(-rows * precision[:, None])
        total = weights.sum(axis=1)
        entropy = np.log(total) + precision * (rows * weights).sum(axis=1) / total
        too_wide = entropy > target
        low, high = np.where(too_wide, precision, low), np.where(too_wide, high, precision)
        precision = np.where(np.isinf(high), precision * 2.0, (low + high) / 2.0)
        # Points that coincide keep their entropy whatever the precision: it must not run away.
        precision = np.minimum(precision, 1e12)
    conditional = np.zeros_like(distances)
    conditional[others] = (weights / total[:, None]).ravel()
    joint: Array = (conditional + conditional.T) / (2.0 * number)
    return np.maximum(joint, TINY)


def _descend(picture: Array, joint: Array, iterations: int) -> Array:
    """Gradient descent with momentum and per-coordinate gains (van der Maaten and Hinton, 2008)."""
    number = len(picture)
    rate = max(number / EXAGGERATION / 4.0, 50.0)
    exaggerated = iterations // 4
    velocity, gains = np.zeros_like(picture), np.ones_like(picture)
    kernel, pull = np.empty_like(joint), np.empty_like(joint)
    for iteration in range(iterations):
        early = iteration < exaggerated
        norms = (picture**2).sum(axis=1)
        np.matmul(picture, -2.0 * picture.T, out=kernel)
        kernel += norms[:, None]
        kernel += norms[None, :] + 1.0
        np.reciprocal(kernel, out=kernel)  # Student-t kernel 1 / (1 + distance^2)
        np.fill_diagonal(kernel, 0.0)
        np.multiply(kernel, -1.0 / kernel.sum(), out=pull)
        pull += joint * EXAGGERATION if early else joint
        pull *= kernel
        gradient = 4.0 * (pull.sum(axis=1)[:, None] * picture - pull @ picture)
        uphill = np.sign(gradient) == np.sign(velocity)
        gains = np.maximum(np.where(uphill, gains * 0.8, gains + 0.2), 0.01)
        velocity = (0.5 if early else 0.8) * velocity - rate * gains * gradient
        picture = picture + velocity
    picture -= picture.mean(axis=0)
    return picture


def tsne(points: ArrayLike, perplexity: float = 30.0, iterations: int = 500, seed: int = 0) -> Array:
    """Place points in the plane so that neighbours stay neighbours: exact t-SNE, shape (number, 2).

    It starts from the principal components, so the same points and seed give the same picture. The
    perplexity is lowered to a third of the number of points where there are few; fewer than five
    points are shown by their principal components. Time and memory grow with the square of the number.

    >>> tsne([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]]).tolist()
    [[-4.5, 0.0], [4.5, 0.0]]
    >>> tsne(np.eye(8)).shape
    (8, 2)
    """
    array = _as_points(points)
    start = pca(array, 2)
    spread = float(start[:, 0].std()) if len(array) else 0.0
    if len(array) < FEWEST or spread < TINY:
        return start
    joint = _neighbourhoods(_squared_distances(array - array.mean(axis=0)), _bounded(perplexity, len(array)))
    # A small start lets points pass each other; the noise separates points that coincide.
    noise = np.random.default_rng(seed).standard_normal(start.shape)
    return _descend(start / spread * 1e-4 + noise * 1e-6, joint, iterations)


def _bounded(perplexity: float, number: int) -> float:
    if perplexity <= 0:
        raise ValueError(f"perplexity must be positive, not {perplexity}")
    return max(min(perplexity, (number - 1) / 3.0), 1.01)
