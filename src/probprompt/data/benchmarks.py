"""Where images come from: benchmarks by name, or any folder of class folders.

A new benchmark is one class here: it says its name, its usual number of tasks and how to load itself.
"""

import hashlib
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from probprompt import randomness
from probprompt.data import emoji_r
from probprompt.data.images import SUFFIXES, ImageFiles, Pixels
from probprompt.errors import UserError, shorten, suggest


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

    @classmethod
    def of_files(cls, files: ImageFiles, labels: NDArray[np.int64]) -> "ImageSet":
        """All images of a folder."""
        return cls(files.names, labels, files.read, files, np.arange(len(files)))

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
        )


@dataclass(frozen=True)
class ImageData:
    """What a benchmark holds: its classes, and a training and a test set."""

    class_names: tuple[str, ...]
    train: ImageSet
    test: ImageSet

    def split_hash(self) -> str:
        """Fingerprint of which image is in which class and on which side."""
        digest = hashlib.sha256()
        for side, images in (("train", self.train), ("test", self.test)):
            for name, label in sorted(zip(images.names, images.labels.tolist(), strict=True)):
                digest.update(f"{side}\t{self.class_names[label]}\t{name}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


class Benchmark(ABC):
    """A source of images."""

    name: ClassVar[str]
    summary: ClassVar[str]
    tasks: ClassVar[int] = 10
    enlarge: ClassVar[bool] = True
    """Whether evaluation resizes to 256/224 of the input before the centre crop (else straight to the input)."""

    @abstractmethod
    def load(self, short_side: int | None) -> ImageData:
        """List the images; each is decoded when read, its short side reduced to at most so many pixels."""

    def hold_out(self, data: ImageData, fraction: float) -> ImageData:
        """Replace the test set by a part of the training set: how anything should be chosen."""
        kept, held = stratified_split(data.train.labels, fraction, "validation", data.class_names)
        return ImageData(data.class_names, data.train.subset(kept), data.train.subset(held))


_REGISTRY: dict[str, type[Benchmark]] = {}


def benchmark(source: type[Benchmark]) -> type[Benchmark]:
    """Make a benchmark known by its name."""
    _REGISTRY[source.name] = source
    return source


def registered() -> Mapping[str, type[Benchmark]]:
    """All benchmarks by name."""
    return dict(sorted(_REGISTRY.items()))


def find(name: str, test: str | None = None, test_fraction: float = 0.2) -> Benchmark:
    """A benchmark by its name, or a folder of class folders by its path."""
    if name in _REGISTRY:
        if test is not None:
            raise UserError(f"{name!r} has a test set of its own: a test folder goes with a folder of images only")
        return _REGISTRY[name]()
    path = Path(name).expanduser()
    if path.is_dir():
        return Folder(path, Path(test).expanduser() if test else None, test_fraction)
    kind = "is a file, not a folder" if path.exists() else "is neither a benchmark nor a folder"
    raise UserError(f"{name!r} {kind}: {suggest(name, _REGISTRY)}, or the path of a folder of class folders")


@benchmark
class EmojiR(Benchmark):
    """Emoji of ten icon sets; the test set is drawn in styles never seen in training."""

    name = "emoji-r"
    summary = "renditions: 20 classes of emoji, tested in styles never trained on (embedded, 64 px)"
    tasks = 5
    enlarge = False
    held_out_styles = ("fluent-emoji-high-contrast", "twemoji")
    """One set of line drawings and one of colours: a third of the training images."""

    def load(self, short_side: int | None) -> ImageData:
        """Unpack the embedded sheets."""
        pixels, renditions = emoji_r.read()
        classes = emoji_r.classes()
        names = tuple(f"{item.label}/{item.emoji}.{item.style}" for item in renditions)
        labels = np.array([classes.index(item.label) for item in renditions], dtype=np.int64)
        every = ImageSet(names, labels, lambda index: pixels[index])
        sides = [[i for i, item in enumerate(renditions) if item.split == side] for side in ("train", "test")]
        return ImageData(classes, every.subset(sides[0]), every.subset(sides[1]))

    def hold_out(self, data: ImageData, fraction: float) -> ImageData:
        """Hold out whole styles, whatever the fraction: the test set, too, is in styles never seen."""
        held = [name.endswith(self.held_out_styles) for name in data.train.names]
        sides = [[i for i, out in enumerate(held) if out is wanted] for wanted in (False, True)]
        return ImageData(data.class_names, data.train.subset(sides[0]), data.train.subset(sides[1]))


class Folder(Benchmark):
    """Any folder of class folders; the test images are a folder of their own or a stratified part of it."""

    name = "folder"
    summary = "any folder of class folders, by its path"

    def __init__(self, root: Path, test: Path | None = None, test_fraction: float = 0.2) -> None:
        self.root, self.test = _find_sides(root, test)
        self.test_fraction = test_fraction

    def load(self, short_side: int | None) -> ImageData:
        """List the class folders and split the images."""
        classes = _class_folders(self.root)
        train = _list_images(self.root, classes, short_side)
        if self.test is None:
            kept, held = stratified_split(train.labels, self.test_fraction, "test", classes)
            return ImageData(classes, train.subset(kept), train.subset(held))
        found = _class_folders(self.test)
        for missing, where in ((set(classes) - set(found), self.test), (set(found) - set(classes), self.root)):
            if missing:
                raise UserError(f"{where} has no folder for the class(es) {shorten(sorted(missing))}")
        return ImageData(classes, train, _list_images(self.test, classes, short_side))


def _find_sides(root: Path, test: Path | None) -> tuple[Path, Path | None]:
    """Use ``train/`` and ``test/`` (or ``val/``) inside the folder where they are all it holds."""
    if test is not None:
        if not test.is_dir():
            raise UserError(f"the test folder {test} is not a folder")
        return root, test
    inside = {path.name: path for path in _subfolders(root)}
    for other in ("test", "val"):
        if {"train", other} <= set(inside) <= {"train", "test", "val"}:
            return inside["train"], inside[other]
    return root, None


def _subfolders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _class_folders(root: Path) -> tuple[str, ...]:
    names = [path.name for path in _subfolders(root)]
    if len(names) < 2:
        loose = sum(path.suffix.lower() in SUFFIXES for path in root.iterdir() if path.is_file())
        hint = f"; its {loose} image(s) must lie in one folder per class" if loose else ""
        raise UserError(f"{root} holds {len(names)} class folder(s), at least 2 are needed{hint}")
    seen: dict[str, str] = {}
    for name in names:
        same = unicodedata.normalize("NFC", name).casefold().strip()
        if same in seen:
            raise UserError(f"{root} has two classes of one name, {seen[same]!r} and {name!r}: rename or merge one")
        seen[same] = name
    return tuple(names)


def _list_images(root: Path, classes: Sequence[str], short_side: int | None) -> ImageSet:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = sorted(path for path in (root / name).rglob("*") if _is_image(path, root))
        if not files:
            raise UserError(f"the class folder {root / name} holds no image: fill it or remove it")
        paths += files
        labels += [label] * len(files)
    names = tuple(path.relative_to(root).as_posix() for path in paths)
    return ImageSet.of_files(ImageFiles(root, names, short_side), np.array(labels, dtype=np.int64))


def _is_image(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return path.suffix.lower() in SUFFIXES and not hidden and path.is_file()


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
