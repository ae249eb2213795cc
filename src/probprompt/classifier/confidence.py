"""Calibrated probabilities and novelty, fitted on images that the head has not learned from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from probprompt.classifier.statistics import Moments
from probprompt.storage import from_upper, upper

BINS = 10
UNFITTED = 0.1
"""Temperature without held-out images: typical of logits between 0 and 1 (results/classifier.md)."""
SPREAD = 0.5
"""Standard deviation of the prior of the log temperature; without it, a few correct images would mean certainty."""
FEWEST = 20
"""Smallest number of held-out images whose calibration error is meaningful."""


@dataclass(frozen=True)
class Calibration:
    """Temperature of the softmax, ``softmax(logits / temperature)``."""

    temperature: float = UNFITTED
    error: float | None = None
    """Expected calibration error on held-out images, 0 to 1; None if there are too few."""
    images: int = 0
    """Number of held-out images."""


def calibrate(logits: Tensor, labels: Tensor, fallback: float = UNFITTED) -> Calibration:
    """Fit the temperature on logits (n, C) of held-out images; the error of each half uses that of the other half."""
    if len(labels) == 0:
        return Calibration(fallback)
    temperature = fit_temperature(logits, labels, fallback)
    if len(labels) < FEWEST:
        return Calibration(temperature, None, len(labels))
    logits = logits.double()
    halves = torch.arange(len(labels), device=labels.device) % 2
    probabilities = torch.empty_like(logits)
    for half in (0, 1):
        other = fit_temperature(logits[halves != half], labels[halves != half], fallback)
        probabilities[halves == half] = (logits[halves == half] / other).softmax(dim=1)
    return Calibration(temperature, expected_calibration_error(probabilities, labels), len(labels))


def fit_temperature(logits: Tensor, labels: Tensor, usual: float) -> float:
    """Return the most probable temperature, with a normal prior on its logarithm around the default one.

    >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    >>> labels = torch.tensor([0, 0, 1, 1])  # three of four are right: log 3 apart
    >>> round(fit_temperature(logits.repeat(1000, 1), labels.repeat(1000), usual=0.1), 1)
    1.8
    >>> round(fit_temperature(logits[:2], labels[:2], usual=0.1), 2)  # both are right
    0.1
    """
    from scipy.optimize import minimize_scalar  # late: it takes long to load

    wide = logits.double()

    def loss(log: float) -> float:
        opinion = ((log - math.log(usual)) / SPREAD) ** 2 / 2
        return float(nn.functional.cross_entropy(wide / math.exp(log), labels, reduction="sum")) + opinion

    lowest, highest = math.log(1e-3), math.log(1e3)
    minimum = minimize_scalar(loss, bounds=(lowest, highest), method="bounded", options={"xatol": 1e-4})
    return math.exp(minimum.x)


def expected_calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean distance of confidence and accuracy over bins of confidence, weighted by images (n, C).

    >>> expected_calibration_error(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 0, 1]))
    0.0
    """
    confidence, chosen = probabilities.double().max(dim=1)  # (n,)
    right = (chosen == labels).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = (abs(float((confidence - right)[bins == number].sum())) for number in bins.unique().tolist())
    return sum(gaps) / len(labels)


KNOWN = 0.95
"""Share of known images that must pass."""
SHRINKAGE = 0.3
"""Shrinkage of covariances towards their mean diagonal."""
_ROUNDING = 1e-12  # variance that features of length 1 may seem to have where there is none


def unit(features: Tensor) -> Tensor:
    """Scale features (n, D) to length 1."""
    return nn.functional.normalize(features, dim=1)


@dataclass(frozen=True)
class Gaussians:
    """A mean per class with one covariance for all, and one Gaussian of all images.

    The score of an image is the squared Mahalanobis distance from the nearest class less that from all images (Ren et
    al., 2021), so that an image that is far from everything, such as another drawing style, is not novel for that.
    Both are |x W - m|^2 in coordinates in which the covariance is the identity.
    """

    within: Tensor  # (D, D): W of the covariance within classes, upper triangular
    means: Tensor  # (C, D)
    whole: Tensor  # (D, D): W of the covariance of all images
    centre: Tensor  # (1, D)

    @classmethod
    def of(cls, moments: Moments, shrinkage: float = SHRINKAGE) -> "Gaussians":
        """Fit them to the moments of all images' :func:`unit` features."""
        centre, covariance = moments.total
        within, whole = _whitening(moments.within, shrinkage), _whitening(covariance, shrinkage)
        return cls(within, moments.means @ within, whole, centre[None] @ whole)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> "Gaussians":
        """Restore the result of :meth:`tensors`."""
        wide = {name: value.to(device).double() for name, value in tensors.items()}
        within, whole = (from_upper(wide[name], wide["means"].shape[1]) for name in ("within", "whole"))
        return cls(within, wide["means"], whole, wide["centre"])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, in float32 and without the zeros."""
        halves = {"within": upper(self.within), "whole": upper(self.whole)}
        return {name: value.float() for name, value in {"means": self.means, "centre": self.centre, **halves}.items()}

    def score(self, features: Tensor) -> Tensor:
        """Score unit features (n, D): large values belong to no class (n,)."""
        wide = features.double()  # a difference of large squares decides
        nearest = _squares(wide @ self.within, self.means).amin(dim=1)  # (n,)
        return nearest - _squares(wide @ self.whole, self.centre)[:, 0]


def _whitening(covariance: Tensor, shrinkage: float) -> Tensor:
    """Return W with W W^T = S^-1 of a covariance shrunk towards its mean diagonal (the identity if it is zero)."""
    level = float(covariance.diagonal().mean())
    drawn = (1 - shrinkage) * covariance
    drawn.diagonal().add_(shrinkage * level if level > _ROUNDING else 1.0)
    eye = torch.eye(len(drawn), dtype=drawn.dtype, device=drawn.device)
    inverse: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(drawn), eye, upper=False)
    return inverse.T


def _squares(points: Tensor, centres: Tensor) -> Tensor:
    return points.square().sum(dim=1)[:, None] + centres.square().sum(dim=1) - 2 * points @ centres.T


@dataclass(frozen=True)
class Scale:
    """Scores of known images: the median, and the limit that 95% stay below."""

    usual: float = 0.0
    limit: float | None = None
    """None without held-out images: then nothing is flagged as unknown."""

    @classmethod
    def of(cls, scores: Tensor) -> "Scale":
        """Measure scores (n,) of held-out images."""
        count = len(scores)
        if count < 2:
            return cls()
        ordered = scores.double().sort().values
        place = min(count, math.ceil((count + 1) * KNOWN)) - 1
        return cls(float(ordered[(count - 1) // 2]), float(ordered[place]))

    def novelty(self, scores: Tensor) -> Tensor:
        """Scale scores (n,) so that the median is 0 and the limit 1."""
        if self.limit is None:
            return torch.zeros_like(scores)
        return (scores - self.usual) / max(self.limit - self.usual, 1e-12)


def auroc(known: Tensor, unknown: Tensor) -> float:
    """Probability that an unknown image scores above a known one; ties count half.

    >>> auroc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
    0.875
    """
    from sklearn.metrics import roc_auc_score

    truth = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
    return float(roc_auc_score(truth.numpy(), torch.cat([known, unknown]).double().cpu().numpy()))


def false_positive_rate(known: Tensor, unknown: Tensor, share: float = KNOWN) -> float:
    """Return the share of unknown images that pass if this share of the known ones does.

    >>> false_positive_rate(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 3.0]))
    0.5
    """
    ordered = known.double().sort().values
    limit = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
    return float((unknown.double() <= limit).double().mean())
