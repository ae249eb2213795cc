"""Probabilities that mean what they say: one temperature, fitted on images that the head has not learned from."""

import math
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

BINS = 10
UNFITTED = 0.1
"""The temperature where no image could be held out: what logits between 0 and 1 needed where there were many
(results/classifier.md)."""
SPREAD = 0.5
"""How far, in its logarithm, the temperature is expected from the usual one before any image is seen: without that, a
few images that are all told apart would ask for certainty."""
FEWEST = 20
"""Held-out images from which on their error tells more than chance."""


@dataclass(frozen=True)
class Calibration:
    """How logits become probabilities: softmax(logits / temperature)."""

    temperature: float = UNFITTED
    error: float | None = None
    """Expected calibration error on held-out images, 0 to 1; None where there were too few to tell."""
    images: int = 0
    """How many images were held out."""


def calibrate(logits: Tensor, labels: Tensor, fallback: float = UNFITTED) -> Calibration:
    """Fit the temperature on logits (n, C) of held-out images; their error is that of temperatures fitted without them.

    Each half of the images is judged by the temperature of the other half.
    """
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
    """The most probable temperature, by its logarithm; the usual one counts as an opinion.

    >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    >>> labels = torch.tensor([0, 0, 1, 1])  # three of four are right: log 3 apart
    >>> round(fit_temperature(logits.repeat(1000, 1), labels.repeat(1000), usual=0.1), 1)
    1.8
    >>> round(fit_temperature(logits[:2], labels[:2], usual=0.1), 2)  # both are right
    0.1
    """
    wide = logits.double()

    def loss(log: float) -> float:
        opinion = ((log - math.log(usual)) / SPREAD) ** 2 / 2
        return float(nn.functional.cross_entropy(wide / math.exp(log), labels, reduction="sum")) + opinion

    lowest, highest = math.log(1e-3), math.log(1e3)
    minimum = minimize_scalar(loss, bounds=(lowest, highest), method="bounded", options={"xatol": 1e-4})
    return math.exp(minimum.x)


def expected_calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """The mean distance of confidence and accuracy over bins of confidence, weighed by their images (n, C).

    >>> expected_calibration_error(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 0, 1]))
    0.0
    """
    confidence, chosen = probabilities.double().max(dim=1)  # (n,)
    right = (chosen == labels).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    error = 0.0
    for number in bins.unique().tolist():
        inside = bins == number
        error += abs(float((confidence[inside] - right[inside]).sum()))
    return error / len(labels)
