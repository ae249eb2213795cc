"""Calibrated probabilities and novelty, fitted on held-out images."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from probprompt.classifier.statistics import Moments
from probprompt.storage import from_upper, upper

BINS = 10
UNFITTED = 0.1  # temperature without held-out images; typical of logits between 0 and 1
SPREAD = 0.5  # standard deviation of the prior of the log temperature
FEWEST = 20  # smallest number of held-out images for which a calibration error is reported


@dataclass(frozen=True)
class Calibration:
    """Temperature of the softmax, ``softmax(logits / temperature)``."""

    temperature: float = UNFITTED
    error: float | None = None  # expected calibration error on held-out images, 0 to 1; None if there are too few
    images: int = 0  # number of held-out images


def calibrate(logits: Tensor, labels: Tensor, fallback: float = UNFITTED) -> Calibration:
    """Fit the temperature on logits (n, C); the error of each half uses that of the other."""
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


def fit_temperature(logits: Tensor, labels: Tensor, default: float) -> float:
    """Return the most probable temperature under a log-normal prior around the default.

    >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    >>> labels = torch.tensor([0, 0, 1, 1])  # three of four are correct: log 3 apart
    >>> round(fit_temperature(logits.repeat(1000, 1), labels.repeat(1000), default=0.1), 1)
    1.8
    >>> round(fit_temperature(logits[:2], labels[:2], default=0.1), 2)  # both are correct
    0.1
    """
    from scipy.optimize import minimize_scalar  # slow to load

    wide = logits.double()

    def loss(log: float) -> float:
        prior = ((log - math.log(default)) / SPREAD) ** 2 / 2
        return float(nn.functional.cross_entropy(wide / math.exp(log), labels, reduction="sum")) + prior

    bounds = math.log(1e-3), math.log(1e3)
    minimum = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return math.exp(minimum.x)


def expected_calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean gap between confidence and accuracy over bins of confidence.

    >>> expected_calibration_error(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 0, 1]))
    0.0
    """
    confidence, chosen = probabilities.double().max(dim=1)  # (n,)
    correct = (chosen == labels).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = (abs(float((confidence - correct)[bins == number].sum())) for number in bins.unique().tolist())
    return sum(gaps) / len(labels)


KNOWN = 0.95  # share of known images that must pass as known
SHRINKAGE = 0.3  # shrinkage of covariances towards their mean diagonal
_ROUNDING = 1e-12  # apparent variance of equal features of length 1


def unit(features: Tensor) -> Tensor:
    """Scale features (n, D) to length 1."""
    return nn.functional.normalize(features, dim=1)


@dataclass(frozen=True)
class Gaussians:
    """One mean per class with a shared covariance, and one Gaussian of all images.

    The score is the squared Mahalanobis distance from the nearest class minus that from all images (Ren et al., 2021):
    images far from everything are not novel. Both are |x W - m|^2, where W W^T is the inverse covariance.
    """

    within: Tensor  # (D, D): W of the covariance within classes, upper triangular
    means: Tensor  # (C, D)
    whole: Tensor  # (D, D): W of the covariance of all images
    center: Tensor  # (1, D)

    @classmethod
    def of(cls, moments: Moments, shrinkage: float = SHRINKAGE) -> "Gaussians":
        """Fit the Gaussians to the moments of the :func:`unit` features of all images."""
        center, covariance = moments.total
        within, whole = _whitening(moments.within, shrinkage), _whitening(covariance, shrinkage)
        return cls(within, moments.means @ within, whole, center[None] @ whole)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> "Gaussians":
        """Restore the result of :meth:`tensors`."""
        wide = {name: value.to(device).double() for name, value in tensors.items()}
        within, whole = (from_upper(wide[name], wide["means"].shape[1]) for name in ("within", "whole"))
        return cls(within, wide["means"], whole, wide["centre"])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, in float32 and without the zeros."""
        halves = {"within": upper(self.within), "whole": upper(self.whole)}
        return {name: value.float() for name, value in {"means": self.means, "centre": self.center, **halves}.items()}

    def score(self, features: Tensor) -> Tensor:
        """Score unit features (n, D); large scores (n,) belong to no class."""
        wide = features.double()  # the score is a small difference of large squares
        nearest = _squares(wide @ self.within, self.means).amin(dim=1)  # (n,)
        return nearest - _squares(wide @ self.whole, self.center)[:, 0]


def _whitening(covariance: Tensor, shrinkage: float) -> Tensor:
    """Return W with W W^T = S^-1, for a covariance S shrunk towards its mean diagonal."""
    level = float(covariance.diagonal().mean())
    shrunk = (1 - shrinkage) * covariance
    shrunk.diagonal().add_(shrinkage * level if level > _ROUNDING else 1.0)  # the identity if it is zero
    eye = torch.eye(len(shrunk), dtype=shrunk.dtype, device=shrunk.device)
    inverse: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(shrunk), eye, upper=False)
    return inverse.T


def _squares(points: Tensor, centers: Tensor) -> Tensor:
    return points.square().sum(dim=1)[:, None] + centers.square().sum(dim=1) - 2 * points @ centers.T


@dataclass(frozen=True)
class Scale:
    """Median score of known images, and the limit that 95% stay below."""

    usual: float = 0.0
    limit: float | None = None  # None without held-out images: nothing is then flagged as unknown

    @classmethod
    def of(cls, scores: Tensor) -> "Scale":
        """Measure the scores (n,) of held-out images."""
        count = len(scores)
        if count < 2:
            return cls()
        ordered = scores.double().sort().values
        quantile = min(count, math.ceil((count + 1) * KNOWN)) - 1
        return cls(float(ordered[(count - 1) // 2]), float(ordered[quantile]))

    def novelty(self, scores: Tensor) -> Tensor:
        """Scale scores (n,) so that the median is 0 and the limit 1."""
        if self.limit is None:
            return torch.zeros_like(scores)
        return (scores - self.usual) / max(self.limit - self.usual, 1e-12)


def auroc(known: Tensor, unknown: Tensor) -> float:
    """Return the probability that an unknown image scores above a known one; ties count half.

    >>> auroc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
    0.875
    """
    from sklearn.metrics import roc_auc_score

    truth = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
    return float(roc_auc_score(truth.numpy(), torch.cat([known, unknown]).double().cpu().numpy()))


def false_positive_rate(known: Tensor, unknown: Tensor, share: float = KNOWN) -> float:
    """Return the share of unknown images that pass if this share of known images does.

    >>> false_positive_rate(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 3.0]))
    0.5
    """
    ordered = known.double().sort().values
    limit = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
    return float((unknown.double() <= limit).double().mean())
