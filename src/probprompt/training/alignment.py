"""Refitting the head on pseudo-features of every class, drawn from one stored Gaussian per class.

Training a task moves only the rows of its own classes, so the rows of different tasks are never weighed against
each other. After each task the head is trained on features drawn from the stored mean and variance of every class
seen (VQ-Prompt's classifier bias mitigation, after HiDe-Prompt and SLCA). No image is kept.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from probprompt import randomness
from probprompt.config import AlignmentConfig
from probprompt.heads import LinearHead

Rates = tuple[float, float, float | None]  # at the beginning, at the end, at the very first step


@dataclass(frozen=True)
class ClassStatistics:
    """Mean and variance of the features of each class seen so far: (C, D) each."""

    mean: Tensor
    variance: Tensor

    @classmethod
    def empty(cls, width: int, device: torch.device) -> Self:
        """No class yet."""
        return cls(torch.empty(0, width, device=device), torch.empty(0, width, device=device))

    def __len__(self) -> int:
        return len(self.mean)

    def extended(self, features: Tensor, labels: Tensor, classes: int) -> "ClassStatistics":
        """Add the next ``classes`` classes from their features (n, D); labels count all classes seen."""
        first = len(self)
        groups = [features[labels == first + new].double() for new in range(classes)]
        mean = torch.stack([group.mean(dim=0) for group in groups]).float()  # (new, D)
        variance = torch.stack([group.var(dim=0, correction=0) for group in groups]).float()  # (new, D)
        return ClassStatistics(torch.cat([self.mean, mean]), torch.cat([self.variance, variance]))

    def draw(self, labels: Tensor, floor: float, generator: torch.Generator) -> Tensor:
        """Pseudo-features (n, D) of these classes; ``floor`` is added to the variance."""
        noise = torch.randn(len(labels), self.mean.shape[1], device=self.mean.device, generator=generator)
        return self.mean[labels] + (self.variance[labels] + floor).sqrt() * noise


def align(
    head: LinearHead,
    statistics: ClassStatistics,
    new_classes: int,
    settings: AlignmentConfig,
    batch: int,
    new_row_rate: float,
    key: tuple[int | str, ...],
) -> None:
    """Refit the head on all classes seen. A single new class was never trained: its row is fitted first."""
    old_classes = len(statistics) - new_classes
    if not old_classes:
        return
    size = max(1, round(batch * settings.batch_ratio))
    if new_classes == 1:
        start: Rates = (new_row_rate, settings.final_rate, None)
        _refit(head, old_classes, old_classes, statistics, settings, size, start, (*key, "new row"))
    rates = (settings.rate, settings.final_rate, settings.first_rate)
    _refit(head, 0, old_classes, statistics, settings, size, rates, key)


def _refit(
    head: LinearHead,
    first_row: int,
    steps: int,
    statistics: ClassStatistics,
    settings: AlignmentConfig,
    size: int,
    rates: Rates,
    key: tuple[int | str, ...],
) -> None:
    """Train the rows from ``first_row`` on, so many steps an epoch; the rows before it stay as they are."""
    weight, bias = nn.Parameter(head.weight[first_row:].detach()), nn.Parameter(head.bias[first_row:].detach())
    optimiser = torch.optim.AdamW([weight, bias], weight_decay=settings.weight_decay)
    base, final, first = rates
    seen, total = len(statistics), steps * settings.epochs
    for epoch in range(settings.epochs):
        generator = randomness.generator(head.weight.device, *key, epoch)
        mixed = torch.randperm(seen * size, device=head.weight.device, generator=generator)[: steps * size]
        for step, labels in enumerate((mixed % seen).split(size)):
            features = statistics.draw(labels, settings.variance_floor, generator)  # (b, D)
            fixed = nn.functional.linear(features, head.weight[:first_row], head.bias[:first_row]).detach()
            logits = torch.cat([fixed, nn.functional.linear(features, weight, bias)], dim=1)  # (b, C)
            done = epoch * steps + step
            rate = final + (base - final) * (1 + math.cos(math.pi * done / total)) / 2
            for group in optimiser.param_groups:
                group["lr"] = first if first is not None and done == 0 else rate
            optimiser.zero_grad()
            nn.functional.cross_entropy(logits, labels).backward()
            optimiser.step()
    with torch.no_grad():
        head.weight[first_row:] = weight
        head.bias[first_row:] = bias
