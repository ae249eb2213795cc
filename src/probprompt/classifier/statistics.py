"""Statistics of the images of classes, for later learning, forgetting and calibration.

Features of a few held-out images per class are kept one by one; probabilities and the novelty threshold are calibrated
on them. Of the others the features or the sums over them are kept, whichever is smaller. Sums over all classes follow
from these and are stored only to save time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from probprompt import randomness
from probprompt.heads.closed_form import symmetric
from probprompt.storage import from_upper, upper

CHUNK = 4096  # images that are added up at a time
VIEWS = ("rows", "mirrors")
"""Features kept one by one: of images, and of their horizontal flips if the head learns them."""
Views = Mapping[str, Callable[[Tensor], Tensor]]
"""Transformations of features (n, D) before they are summed, (n, L), by name."""


@dataclass(frozen=True)
class Moments:
    """Counts (C,), sums (C, L) and the sum of squares (L, L) over the images of classes, in float64."""

    counts: Tensor
    totals: Tensor
    moment: Tensor

    @classmethod
    def zero(cls, classes: int, width: int, device: torch.device) -> Self:
        """Return statistics of no image."""
        nothing = torch.zeros(classes, dtype=torch.float64, device=device)
        return cls(nothing, nothing.new_zeros(classes, width), nothing.new_zeros(width, width))

    def grown(self, classes: int) -> "Moments":
        """Append more classes without images."""
        more = Moments.zero(classes, self.totals.shape[1], self.totals.device)
        return Moments(torch.cat([self.counts, more.counts]), torch.cat([self.totals, more.totals]), self.moment)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.counts + other.counts, self.totals + other.totals, self.moment + other.moment)

    def add_class(self, label: int, rows: Tensor) -> None:
        """Add images of one class (n, L)."""
        wide = rows.to(self.moment)
        self.counts[label] += len(wide)
        self.totals[label] += wide.sum(dim=0)
        self.moment.addmm_(wide.T, wide)

    @property
    def means(self) -> Tensor:
        """The mean of each class (C, L)."""
        return self.totals / self.counts.clamp(min=1)[:, None]

    @property
    def within(self) -> Tensor:
        """The covariance within classes, one for all (L, L)."""
        whole = symmetric(self.moment)  # the upper half may be rounded otherwise, and is not kept
        scatter = whole - self.totals.T @ self.means
        return (scatter + scatter.T) / 2 / (self.counts.sum() - (self.counts > 0).sum()).clamp(min=1)

    @property
    def total(self) -> tuple[Tensor, Tensor]:
        """Mean (L,) and covariance (L, L) over the images of all classes."""
        count = self.counts.sum().clamp(min=1)
        mean = self.totals.sum(dim=0) / count
        return mean, self.moment / count - torch.outer(mean, mean)


@dataclass(frozen=True)
class Statistics:
    """Moments of transformed features by name; those that the head is solved from come last."""

    of: dict[str, Moments]

    @classmethod
    def zero(cls, classes: int, widths: Mapping[str, int], device: torch.device) -> Self:
        """Return statistics of no image."""
        return cls({name: Moments.zero(classes, width, device) for name, width in widths.items()})

    @property
    def solved(self) -> Moments:
        """Moments that a closed-form head is solved from."""
        return list(self.of.values())[-1]

    def grown(self, classes: int) -> "Statistics":
        """Append more classes without images."""
        return Statistics({name: moments.grown(classes) for name, moments in self.of.items()})

    def add_rows(self, label: int, rows: Tensor, views: Views) -> None:
        """Add images of one class by their features (n, D)."""
        for some in rows.split(CHUNK):
            for name, moments in self.of.items():
                moments.add_class(label, views[name](some.double()))

    def add_class(self, label: int, kept: Mapping[str, Tensor], views: Views) -> None:
        """Add the stored features or sums of a class."""
        if "rows" in kept:
            for view in VIEWS:
                if view in kept:
                    self.add_rows(label, kept[view].to(self.solved.moment.device), views)
            return
        for name, moments in self.of.items():
            moments.counts[label] += kept["count"].to(moments.counts)[0]
            moments.totals[label] += kept[f"{name}.totals"].to(moments.totals)[0]
            moments.moment.add_(_symmetric(kept[f"{name}.moment"], moments.moment))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store; of symmetric matrices one half."""
        found = {"count": self.solved.counts}
        for name, moments in self.of.items():
            # The lower half, which alone a solve reads: a product of a matrix with itself need not be symmetric to the
            # last bit on every processor.
            found[f"{name}.totals"], found[f"{name}.moment"] = moments.totals, upper(moments.moment.T)
        return found

    @classmethod
    def from_tensors(cls, kept: Mapping[str, Tensor], widths: Mapping[str, int], device: torch.device) -> Self:
        """Restore the result of :meth:`tensors`."""
        found = cls.zero(len(kept["count"]), widths, device)
        for name, moments in found.of.items():
            moments.counts.copy_(kept["count"])
            moments.totals.copy_(kept[f"{name}.totals"])
            moments.moment.copy_(_symmetric(kept[f"{name}.moment"], moments.moment))
        return found


def compact(rows: Tensor, before: Mapping[str, Tensor], views: Views, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Keep features (n, D) of a class, with what is kept of it already: one by one, or as sums where that is less."""
    if "rows" in before:
        rows, before = torch.cat([before["rows"].to(rows), rows]), {}
    if not before and 4 * rows.numel() <= 8 * sum(side * (side + 3) // 2 for side in widths.values()):
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
    """Add what is kept of each class, in order, to sums that have room for them."""
    for label, tensors in enumerate(kept):
        sums.add_class(label, tensors, views)
    return sums


def _symmetric(half: Tensor, like: Tensor) -> Tensor:
    whole = from_upper(half.to(like), len(like))
    return whole + whole.triu(1).T
