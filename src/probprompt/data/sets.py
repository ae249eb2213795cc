"""What a benchmark is: images with names and classes, on two sides, and a source that can list them."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from probprompt import randomness
from probprompt.data.images import ImageFiles, Pixels
from probprompt.errors import UserError


@dataclass(frozen=True)
class ImageSet:
    """Images that can be read one by one, with their names and class numbers."""

    names: tuple[str, ...]
    labels: NDArray[np.int64]
    read: Callable[[int], Pixels]
    files: ImageFiles | None = None
    """All the files of the folder that the images come from, where they do."""
    rows: NDArray[np.int64] | None = None
    """Which of the files they are."""
    pixels: Pixels | None = None
    """All images (n, H, W, 3), where they lie in memory anyway and have one size."""
    short_side: int | None = None
    """What the short side of an image is reduced to at most when it is read; None leaves the size as it is."""
    known_as: tuple[str, ...] | None = None
    """What images are called in the fingerprint of a split, where their names only tell how they lie on this disk."""

    @classmethod
    def of_files(cls, files: ImageFiles, labels: NDArray[np.int64]) -> "ImageSet":
        """All images of a folder."""
        return cls(files.names, labels, files.read, files, np.arange(len(files)), short_side=files.short_side)

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, indices: Sequence[int]) -> "ImageSet":
        """Some of the images, in this order."""
        chosen = list(indices)
        return ImageSet(
            tuple(self.names[index] for index in chosen),
            self.labels[chosen],
            lambda index: self.read(chosen[index]),
            self.files,
            None if self.rows is None else self.rows[chosen],
            None if self.pixels is None else self.pixels[chosen],
            self.short_side,
            None if self.known_as is None else tuple(self.known_as[index] for index in chosen),
        )


@dataclass(frozen=True)
class ImageData:
    """What a benchmark holds: its classes, and a training and a test set."""

    class_names: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    lists: tuple[str, ...] = ()
    """The sha256 of the files that say which images are for training and which for the test, where there are such."""

    def split_hash(self) -> str:
        """Fingerprint of which image is in which class and on which side."""
        digest = hashlib.sha256()
        for side, images in (("train", self.train), ("test", self.test)):
            names = images.known_as or images.names
            for name, label in sorted(zip(names, images.labels.tolist(), strict=True)):
                digest.update(f"{side}\t{self.class_names[label]}\t{name}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


class Benchmark(ABC):
    """A source of images."""

    name: ClassVar[str]
    summary: ClassVar[str]
    tasks: ClassVar[int] = 10
    enlarge: ClassVar[bool] = True
    """Whether evaluation resizes to 256/224 of the input before the centre crop (else straight to the input)."""
    remote: ClassVar[bool] = False
    """Whether it may have to be fetched before anything can be said of it."""

    @abstractmethod
    def load(self, short_side: int | None) -> ImageData:
        """List the images; each is decoded when read, its short side reduced to at most so many pixels."""

    def remarks(self) -> list[str]:
        """What a user should know before it is used."""
        return []

    def usual_tasks(self, classes: int) -> int:
        """How many tasks there are where nobody says: fewer than usual where a task would have a single class."""
        return min(self.tasks, max(1, classes // 2))

    def hold_out(self, data: ImageData, fraction: float) -> ImageData:
        """Replace the test set by a part of the training set: how anything should be chosen."""
        kept, held = stratified_split(data.train.labels, fraction, "validation", data.class_names)
        return replace(data, train=data.train.subset(kept), test=data.train.subset(held))


_REGISTRY: dict[str, type[Benchmark]] = {}


def benchmark(source: type[Benchmark]) -> type[Benchmark]:
    """Make a benchmark known by its name."""
    _REGISTRY[source.name] = source
    return source


def registered() -> Mapping[str, type[Benchmark]]:
    """All benchmarks by name."""
    return dict(sorted(_REGISTRY.items()))


def stratified_split(
    labels: NDArray[np.int64], fraction: float, purpose: str, class_names: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Hold out a part of every class, at least one image: the same part for everybody, whatever the seeds."""
    kept: list[int] = []
    held: list[int] = []
    for label, name in enumerate(class_names):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            raise UserError(f"the class {name!r} has {len(members)} image(s): at least 2 are needed to hold one out")
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        mixed = members[randomness.permutation(len(members), "split", purpose, name)]
        held += sorted(mixed[:count].tolist())
        kept += sorted(mixed[count:].tolist())
    return kept, held
