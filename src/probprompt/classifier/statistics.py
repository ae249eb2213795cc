"""Statistics of the images of each class, for later learning, forgetting and calibration.

Features of a few held-out images per class are stored one by one, for calibration. Of the other images, features or
sums are stored, whichever is smaller. Sums over all classes follow from these and are stored only to save time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from probprompt import randomness
from probprompt.heads.closed_form import symmetric
from probprompt.storage import from_upper, upper

CHUNK = 4096  # images per addition
VIEWS = ("rows", "mirrors")  # features stored per image: its own, and of its horizontal flip if the head learns flips
Views = Mapping[str, Callable[[Tensor], Tensor]]
"""Transformations of features (n, D) before they are summed, (n, L), by name."""


@dataclass(frozen=True)
class Moments:
    """Counts (C,), sums (C, L) and sum of squares (L, L) of images by class, in float64."""

    counts: Tensor
    totals: Tensor
    moment: Tensor

    @classmethod
    def zero(cls, classes: int, width: int, device: torch.device) -> Self:
        """Return moments of no image."""
        nothing = torch.zeros(classes, dtype=torch.float64, device=device)
        return cls(nothing, nothing.new_zeros(classes, width), nothing.new_zeros(width, width))

    def grown(self, classes: int) -> "Moments":
        """Append more classes without images."""
        more = Moments.zero(classes, self.totals.shape[1], self.totals.device)
        return Moments(torch.cat([self.counts, more.counts]), torch.cat([self.totals, more.totals]), self.moment)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.counts + other.counts, self.totals + other.totals, self.moment + other.moment)

    def add_class(self, label: int, rows: Tensor) -> None:
        """Add images (n, L) of one class."""
        wide = rows.to(self.moment)
        self.counts[label] += len(wide)
        self.totals[label] += wide.sum(dim=0)
        self.moment.addmm_(wide.T, wide)

    @property
    def means(self) -> Tensor:
        """Mean of each class (C, L)."""
        return self.totals / self.counts.clamp(min=1)[:, None]

    @property
    def within(self) -> Tensor:
        """Shared covariance within classes (L, L)."""
        scatter = symmetric(self.moment) - self.totals.T @ self.means  # the upper half is not stored
        return (scatter + scatter.T) / 2 / (self.counts.sum() - (self.counts > 0).sum()).clamp(min=1)

    @property
    def total(self) -> tuple[Tensor, Tensor]:
        """Mean (L,) and covariance (L, L) over the images of all classes."""
        count = self.counts.sum().clamp(min=1)
        mean = self.totals.sum(dim=0) / count
        return mean, self.moment / count - torch.outer(mean, mean)


@dataclass(frozen=True)
class Statistics:
    """Moments of transformed features by name; the head is solved from the last."""

    of: dict[str, Moments]

    @classmethod
    def zero(cls, classes: int, widths: Mapping[str, int], device: torch.device) -> Self:
        """Return statistics of no image."""
        return cls({name: Moments.zero(classes, width, device) for name, width in widths.items()})

    @property
    def solved(self) -> Moments:
        """Moments from which a closed-form head is solved."""
        return list(self.of.values())[-1]

    def grown(self, classes: int) -> "Statistics":
        """Append more classes without images."""
        return Statistics({name: moments.grown(classes) for name, moments in self.of.items()})

    def add_rows(self, label: int, rows: Tensor, views: Views) -> None:
        """Add images of one class by their features (n, D)."""
        for chunk in rows.split(CHUNK):
            for name, moments in self.of.items():
                moments.add_class(label, views[name](chunk.double()))

    def add_class(self, label: int, kept: Mapping[str, Tensor], views: Views) -> None:
        """Add the stored features or sums of a class."""
        if "rows" in kept:
            for view in filter(kept.__contains__, VIEWS):
                self.add_rows(label, kept[view].to(self.solved.moment.device), views)
            return
        for name, moments in self.of.items():
            moments.counts[label] += kept["count"].to(moments.counts)[0]
            moments.totals[label] += kept[f"{name}.totals"].to(moments.totals)[0]
            moments.moment.add_(_symmetric(kept[f"{name}.moment"], moments.moment))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, one half of each symmetric matrix."""
        tensors = {"count": self.solved.counts}
        for name, moments in self.of.items():
            # A solve reads only the lower half; on some processors the two halves differ in rounding.
            tensors[f"{name}.totals"], tensors[f"{name}.moment"] = moments.totals, upper(moments.moment.T)
        return tensors

    @classmethod
    def from_tensors(cls, kept: Mapping[str, Tensor], widths: Mapping[str, int], device: torch.device) -> Self:
        """Restore the result of :meth:`tensors`."""
        restored = cls.zero(len(kept["count"]), widths, device)
        for name, moments in restored.of.items():
            moments.counts.copy_(kept["count"])
            moments.totals.copy_(kept[f"{name}.totals"])
            moments.moment.copy_(_symmetric(kept[f"{name}.moment"], moments.moment))
        return restored


def compact(rows: Tensor, before: Mapping[str, Tensor], views: Views, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Add features (n, D) to the tensors of a class, as rows or as sums if these are smaller."""
    if "rows" in before:
        rows, before = torch.cat([before["rows"].to(rows), rows]), {}
    if not before and 4 * rows.numel() <= 8 * sum(width * (width + 3) // 2 for width in widths.values()):
        return {"rows": rows.float()}
    sums = Statistics.zero(1, widths, rows.device)
    if before:
        sums.add_class(0, before, views)
    sums.add_rows(0, rows, views)
    return sums.tensors()


def hold_out(count: int, *key: randomness.Key) -> list[int]:
    """Choose the held-out images of a class: a fifth, at most 20, at least one of three."""
    held = min(20, max(count // 5, int(count > 2)))
    return sorted(randomness.permutation(count, *key, "held out")[:held].tolist())


def add_up(kept: Iterable[Mapping[str, Tensor]], sums: Statistics, views: Views) -> Statistics:
    """Add the stored tensors of each class, in order."""
    for label, tensors in enumerate(kept):
        sums.add_class(label, tensors, views)
    return sums


def _symmetric(half: Tensor, like: Tensor) -> Tensor:
    whole = from_upper(half.to(like), len(like))
    return whole + whole.triu(1).T
