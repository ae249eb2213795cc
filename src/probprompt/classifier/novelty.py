"""None of these: how far an image is from all known classes, by the Gaussians of their features."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from probprompt.classifier.sums import Moments

KNOWN = 0.95
"""The share of known images that must pass."""
SHRINKAGE = 0.1


@dataclass(frozen=True)
class Gaussians:
    """One mean per class and one covariance for all, in coordinates in which that covariance is the identity.

    The distance of features x from class c is |x W - m_c|^2, Mahalanobis' distance squared, and that of an image the
    distance from the nearest class.
    """

    whitening: Tensor  # (D, D): W
    means: Tensor  # (C, D): m_c = mu_c W

    @classmethod
    def of(cls, moments: Moments, shrinkage: float = SHRINKAGE) -> "Gaussians":
        """From the sums over all images; the covariance is drawn towards its mean diagonal."""
        covariance = moments.within
        side = len(covariance)
        level = float(covariance.diagonal().mean())
        level = level if level > 0 else 1.0  # one image per class
        covariance = (1 - shrinkage) * covariance
        covariance.diagonal().add_(shrinkage * level)
        factor = torch.linalg.cholesky(covariance)  # L L^T
        eye = torch.eye(side, dtype=covariance.dtype, device=covariance.device)
        whitening = torch.linalg.solve_triangular(factor, eye, upper=False).T  # L^-T
        return cls(whitening.float(), (moments.means @ whitening).float())

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> "Gaussians":
        """What :meth:`tensors` gave."""
        return cls(tensors["whitening"].to(device), tensors["means"].to(device))

    def tensors(self) -> dict[str, Tensor]:
        """To be kept."""
        return {"whitening": self.whitening, "means": self.means}

    def distances(self, features: Tensor) -> Tensor:
        """Squared distances from every class, (n, C), of features (n, D)."""
        white = features.to(self.whitening) @ self.whitening  # (n, D)
        # In float64: a difference of large squares decides.
        wide, means = white.double(), self.means.double()
        squares = wide.square().sum(dim=1)[:, None] + means.square().sum(dim=1) - 2 * wide @ means.T
        return squares.clamp(min=0)  # (n, C)

    def score(self, features: Tensor) -> Tensor:
        """How far images are from the nearest class: (n,)."""
        return self.distances(features).amin(dim=1).sqrt()


@dataclass(frozen=True)
class Scale:
    """What scores of known images are like: the usual one, and the one that 95 % stay below."""

    usual: float = 0.0
    limit: float | None = None
    """None where no image could be held out: then nothing is marked."""

    @classmethod
    def of(cls, scores: Tensor) -> "Scale":
        """From the scores (n,) of held-out images of known classes."""
        count = len(scores)
        if count < 2:
            return cls()
        ordered = scores.double().sort().values
        place = min(count, math.ceil((count + 1) * KNOWN)) - 1
        return cls(float(ordered[(count - 1) // 2]), float(ordered[place]))

    def novelty(self, scores: Tensor) -> Tensor:
        """Scores (n,) so that the usual one is 0 and the limit 1."""
        if self.limit is None:
            return torch.zeros_like(scores)
        return (scores - self.usual) / max(self.limit - self.usual, 1e-12)


def auroc(known: Tensor, unknown: Tensor) -> float:
    """The chance that an unknown image scores above a known one, ties counted half.

    >>> auroc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
    0.875
    """
    every, inverse, counts = torch.cat([known, unknown]).double().unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[inverse]  # (n,): from 1, the mean of those that tie
    positive = len(unknown)
    return float((ranks[len(known) :].sum() - positive * (positive + 1) / 2) / (len(known) * positive))


def false_positive_rate(known: Tensor, unknown: Tensor, share: float = KNOWN) -> float:
    """The share of unknown images that pass where this share of the known ones does.

    >>> false_positive_rate(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 3.0]))
    0.5
    """
    ordered = known.double().sort().values
    limit = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
    return float((unknown.double() <= limit).double().mean())
