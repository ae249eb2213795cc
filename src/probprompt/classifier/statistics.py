"""Sums over the images of classes: all that later learning, forgetting and calibration need of them.

Of each class a few images are held out: their features are kept one by one, and are what probabilities and the
threshold of novelty are calibrated on. Of the others either the features or the sums over them are kept, whichever is
smaller. Sums over all classes follow from that; they are kept beside it only to save time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from probprompt import randomness
from probprompt.errors import UserError
from probprompt.heads.closed_form import symmetric
from probprompt.storage import read_tensors, store_by_contents

CHUNK = 4096  # images that are added up at a time
VIEWS = ("rows", "mirrors")
"""Features that are kept one by one: of images, and of their mirror images where the head learns them, too."""
Views = Mapping[str, Callable[[Tensor], Tensor]]
"""How features (n, D) are seen before they are added up, (n, L), by name."""


class Part:
    """Tensors that belong together and never change: in memory, or in a file that is read when they are needed."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, path: Path | None = None) -> None:
        self._tensors, self._path = tensors, path
        self.digest = path.stem if path else None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors, on the CPU."""
        if self._tensors is None:
            assert self._path is not None
            if not self._path.is_file():
                raise UserError(
                    f"{self._path} is missing: if the classifier was changed since it was loaded, load it again; if it "
                    "was pulled without its statistics, it predicts but cannot learn or change (push it with "
                    "--with-statistics, and pull that); else its folder is damaged"
                )
            self._tensors = read_tensors(self._path, torch.device("cpu"))[0]
        return self._tensors

    @property
    def there(self) -> bool:
        """Whether the tensors can be had: a part that can be made again may have been removed."""
        return self._tensors is not None or (self._path is not None and self._path.is_file())

    def store(self, folder: Path) -> str:
        """Keep the tensors in a folder of files named by their contents; returns that name."""
        if self.digest is None or not (folder / f"{self.digest}.safetensors").is_file():
            self.digest = store_by_contents(folder, self.tensors)
        if self._path is None:
            self._path = folder / f"{self.digest}.safetensors"
        return self.digest

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Keep copies on the CPU, so that nobody changes them."""
        return cls({name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()})


@dataclass(frozen=True)
class Moments:
    """Counts (C,), sums (C, L) and the sum of squares (L, L) over the images of classes, in float64."""

    counts: Tensor
    totals: Tensor
    moment: Tensor

    @classmethod
    def zero(cls, classes: int, width: int, device: torch.device) -> Self:
        """No image yet."""
        nothing = torch.zeros(classes, dtype=torch.float64, device=device)
        return cls(nothing, nothing.new_zeros(classes, width), nothing.new_zeros(width, width))

    def grown(self, classes: int) -> "Moments":
        """With room for so many more classes."""
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
    """Moments of features as several readers see them, by name; what the head is solved from comes last."""

    of: dict[str, Moments]

    @classmethod
    def zero(cls, classes: int, widths: Mapping[str, int], device: torch.device) -> Self:
        """No image yet."""
        return cls({name: Moments.zero(classes, width, device) for name, width in widths.items()})

    @property
    def solved(self) -> Moments:
        """What a head in closed form is solved from."""
        return list(self.of.values())[-1]

    @property
    def widths(self) -> dict[str, int]:
        """The width of what is added up, by name."""
        return {name: moments.totals.shape[1] for name, moments in self.of.items()}

    def grown(self, classes: int) -> "Statistics":
        """With room for so many more classes."""
        return Statistics({name: moments.grown(classes) for name, moments in self.of.items()})

    def copy(self) -> "Statistics":
        """The same in other memory."""
        return Statistics(
            {
                name: Moments(moments.counts.clone(), moments.totals.clone(), moments.moment.clone())
                for name, moments in self.of.items()
            }
        )

    def add_rows(self, label: int, rows: Tensor, views: Views) -> None:
        """Add images of one class by their features (n, D)."""
        for some in rows.split(CHUNK):
            for name, moments in self.of.items():
                moments.add_class(label, views[name](some.double()))

    def add_class(self, label: int, kept: Mapping[str, Tensor], views: Views) -> None:
        """Add what is kept of a class: features, or sums."""
        if "rows" in kept:
            for view in VIEWS:
                if view in kept:
                    self.add_rows(label, kept[view].to(self.solved.moment.device), views)
            return
        for name, moments in self.of.items():
            moments.counts[label] += kept["count"].to(moments.counts)[0]
            moments.totals[label] += kept[f"{name}.totals"].to(moments.totals)[0]
            moments.moment.add_(_unpacked(kept[f"{name}.moment"], moments.moment))

    def tensors(self) -> dict[str, Tensor]:
        """To be kept: one half of what is symmetric."""
        found = {"count": self.solved.counts}
        for name, moments in self.of.items():
            found[f"{name}.totals"], found[f"{name}.moment"] = moments.totals, _packed(moments.moment)
        return found

    @classmethod
    def from_tensors(cls, kept: Mapping[str, Tensor], widths: Mapping[str, int], device: torch.device) -> Self:
        """What :meth:`tensors` gave."""
        found = cls.zero(len(kept["count"]), widths, device)
        for name, moments in found.of.items():
            moments.counts.copy_(kept["count"])
            moments.totals.copy_(kept[f"{name}.totals"])
            moments.moment.copy_(_unpacked(kept[f"{name}.moment"].to(device), moments.moment))
        return found


def compact(rows: Tensor, before: Mapping[str, Tensor] | None, views: Views, widths: Mapping[str, int]) -> Part:
    """Keep features (n, D) of a class, with what is kept of it already: one by one, or as sums where that is less."""
    if before and "rows" in before:
        rows = torch.cat([before["rows"].to(rows), rows])
    summed = before is not None and "rows" not in before
    if not summed and 4 * rows.numel() <= 8 * sum(side * (side + 3) // 2 for side in widths.values()):
        return Part.of({"rows": rows.float()})
    sums = Statistics.zero(1, widths, rows.device)
    if before is not None and summed:
        sums.add_class(0, before, views)
    sums.add_rows(0, rows, views)
    return Part.of(sums.tensors())


def hold_out(count: int, *key: randomness.Key) -> list[int]:
    """Which of a class's images are held out: a fifth, at most 20, at least one of three."""
    held = min(20, max(count // 5, int(count > 2)))
    return sorted(randomness.permutation(count, *key, "held out")[:held].tolist())


def add_up(kept: Iterable[Part], sums: Statistics, views: Views) -> Statistics:
    """Add what is kept of each class, in order, to sums that have room for them."""
    for label, part in enumerate(kept):
        sums.add_class(label, part.tensors, views)
    return sums


def _packed(matrix: Tensor) -> Tensor:
    """Half of a symmetric matrix (L, L), (L (L + 1) / 2,), column by column: the lower one, which alone a solve reads.

    A product of a matrix with itself need not be symmetric to the last bit on every processor.
    """
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[columns, rows]


def _unpacked(half: Tensor, like: Tensor) -> Tensor:
    """The symmetric matrix (L, L) of its half."""
    whole = torch.zeros_like(like)
    rows, columns = torch.triu_indices(*like.shape, device=like.device)
    whole[rows, columns] = half.to(like)
    return whole + whole.triu(1).T
