"""Sources of images: benchmarks by name, folders of class folders, Hugging Face datasets.

A benchmark is a class with a name, a default number of tasks and a ``load`` method; see
:mod:`probprompt.data.emoji_r` and :mod:`probprompt.data.published`.
"""

import hashlib
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from probprompt import randomness
from probprompt.data.images import SUFFIXES, ImageFiles, Pixels
from probprompt.errors import UserError, shorten, suggest

HUB = "hf:"  # prefix of Hugging Face datasets
TRAIN_SPLITS = ("train", "training")
TEST_SPLITS = ("test", "testing", "val", "valid", "validation")
SYSTEM_FOLDERS = {"__macosx", "@eadir", "#recycle", "$recycle.bin", "lost+found", "system volume information"}
"""Lower-case names of folders that operating systems and storage devices add."""


@dataclass(frozen=True)
class ImageSet:
    """Images that are read one by one, with names and labels."""

    names: tuple[str, ...]
    labels: NDArray[np.int64]
    read: Callable[[int], Pixels]
    files: ImageFiles | None = None  # all files of the images' folder; None without files
    rows: NDArray[np.int64] | None = None  # indices into the files
    pixels: Pixels | None = None  # all images `(n, H, W, 3)`, if in memory and of one size
    short_side: int | None = None  # largest short side in pixels; None keeps the size
    canonical_names: tuple[str, ...] | None = None
    """Names for the fingerprint of a split, if ``names`` depend on the layout on disk."""

    @classmethod
    def of_files(cls, files: ImageFiles, labels: NDArray[np.int64]) -> Self:
        """Return all images of a folder."""
        return cls(files.names, labels, files.read, files, np.arange(len(files)), short_side=files.short_side)

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, indices: Sequence[int]) -> Self:
        """Return the images at these indices, in order."""
        chosen, known = list(indices), self.canonical_names
        return replace(
            self,
            names=tuple(self.names[index] for index in chosen),
            labels=self.labels[chosen],
            read=lambda index: self.read(chosen[index]),
            rows=None if self.rows is None else self.rows[chosen],
            pixels=None if self.pixels is None else self.pixels[chosen],
            canonical_names=known and tuple(known[index] for index in chosen),
        )


@dataclass(frozen=True)
class ImageData:
    """The classes, training set and test set of a benchmark."""

    class_names: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    lists: tuple[str, ...] = ()  # SHA-256 of the lists of training and test images, if any

    def split_hash(self) -> str:
        """Return a fingerprint of the class and split of every image."""
        digest = hashlib.sha256()
        for split, images in (("train", self.train), ("test", self.test)):
            names = images.canonical_names or images.names
            for name, label in sorted(zip(names, images.labels.tolist(), strict=True)):
                digest.update(f"{split}\t{self.class_names[label]}\t{name}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


class Benchmark(ABC):
    """A source of images."""

    name: ClassVar[str]
    summary: ClassVar[str]
    tasks: ClassVar[int] = 10
    enlarge: ClassVar[bool] = True  # whether evaluation resizes to 256/224 of the input size before the center crop
    remote: ClassVar[bool] = False  # whether loading may start a download
    stored: ClassVar[bool] = False  # whether the constructor takes the folder of the images

    @abstractmethod
    def load(self, short_side: int | None) -> ImageData:
        """List the images, to be read with a short side of at most ``short_side`` pixels."""

    def notes(self) -> list[str]:
        """Return notes for the user."""
        return []

    def default_tasks(self, classes: int) -> int:
        """Return the default number of tasks, with at least two classes each."""
        return min(self.tasks, max(1, classes // 2))

    def hold_out(self, data: ImageData, fraction: float) -> ImageData:
        """Replace the test set by a part of the training set."""
        kept, held = stratified_split(data.train.labels, fraction, "validation", data.class_names)
        return replace(data, train=data.train.subset(kept), test=data.train.subset(held))

    def select(self, data: ImageData, validation: float, per_class: int | None) -> ImageData:
        """Hold out this part of the training images and keep ``per_class`` of each class."""
        data = self.hold_out(data, validation) if validation else data
        if per_class is None:
            return data
        kept: list[int] = []
        for label, name in enumerate(data.class_names):
            members = np.flatnonzero(data.train.labels == label)
            kept += members[randomness.permutation(len(members), "per class", name)[:per_class]].tolist()
        return replace(data, train=data.train.subset(sorted(kept)))


_REGISTRY: dict[str, type[Benchmark]] = {}


def benchmark(source: type[Benchmark]) -> type[Benchmark]:
    """Register a benchmark under its name."""
    _REGISTRY[source.name] = source
    return source


def registered() -> Mapping[str, type[Benchmark]]:
    """Return all benchmarks by name."""
    for module in ("emoji_r", "published"):  # late, since they import this module
        import_module(f"probprompt.data.{module}")
    return dict(sorted(_REGISTRY.items()))


def benchmark_label(name: str) -> str:
    """Return a benchmark's name, or the last part of a folder's path."""
    return name if name in registered() else Path(name).expanduser().resolve().name


def find(name: str, test: str | None = None, test_fraction: float = 0.2, root: str | None = None) -> Benchmark:
    """Return a benchmark by name, a folder of class folders, or ``hf:owner/name``.

    ``root``: folder of a published benchmark; None uses the default folder.
    """
    kind, hub = registered().get(name), name.startswith(HUB)
    if test is not None and (kind or hub):
        raise UserError(f"{name!r} has its own test set. Remove --test, or pass a folder of images instead.")
    if root is not None and not (kind and kind.stored):
        raise UserError(f"data.root={root} cannot be combined with {name!r}. It needs a published benchmark.")
    build: Callable[..., Benchmark] | None = kind
    if build:
        return build(Path(root).expanduser()) if root else build()
    if hub:
        build = import_module("probprompt.data.huggingface").HubDataset
        return build(name.removeprefix(HUB), test_fraction)
    path = Path(name).expanduser()
    if path.is_dir():
        return Folder(path, Path(test).expanduser() if test else None, test_fraction)
    problem = "is a file" if path.exists() else "is neither a benchmark nor a folder"
    raise UserError(f"{name!r} {problem}. Pass a benchmark or a folder of class folders. {suggest(name, registered())}")


def stratified_split(
    labels: NDArray[np.int64], fraction: float, purpose: str, class_names: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Hold out at least one image of every class, independently of seeds."""
    kept: list[int] = []
    held: list[int] = []
    for label, name in enumerate(class_names):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            raise UserError(
                f"Class {name!r} has {len(members)} image(s). Add images: holding one out needs at least 2."
            )
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        shuffled = members[randomness.permutation(len(members), "split", purpose, name)]
        held += sorted(shuffled[:count].tolist())
        kept += sorted(shuffled[count:].tolist())
    return kept, held


def in_order(names: Iterable[str]) -> list[str]:
    """Sort class names alphabetically, or by value if all are numbers.

    >>> in_order(["b", "a", "10", "9"]), in_order(["10", "9", "0"])
    (['10', '9', 'a', 'b'], ['0', '9', '10'])
    """
    listed = sorted(names)
    return sorted(listed, key=int) if all(name.isdecimal() for name in listed) else listed


def subfolders(root: Path) -> list[Path]:
    """Return the visible folders in a folder, in order."""
    names = (path.name for path in root.iterdir() if path.is_dir() and not is_hidden(path.name))
    return [root / name for name in in_order(names)]


def is_hidden(name: str) -> bool:
    """Return True for the name of a hidden file or a system folder."""
    return name.startswith(".") or name.casefold() in SYSTEM_FOLDERS


def class_folders(root: Path) -> tuple[str, ...]:
    """Return the names of class folders, at least two and all distinct."""
    names = [path.name for path in subfolders(root)]
    if len(names) < 2:
        hint = loose_images(root)
        raise UserError(f"{root} contains {len(names)} class folder(s), expected at least 2.{hint and ' ' + hint}")
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", name).casefold().strip()
        if key in seen:
            raise UserError(f"{root} has two folders for one class, {seen[key]!r} and {name!r}. Merge or rename one.")
        seen[key] = name
    return tuple(names)


def loose_images(root: Path) -> str:
    """Return a hint if image files are outside of class folders, else an empty string."""
    loose = sum(path.suffix.lower() in SUFFIXES for path in root.iterdir() if path.is_file())
    return f"Move its {loose} image(s) into one folder per class." if loose else ""


def list_classes(root: Path, classes: Sequence[str], within: str = "") -> list[tuple[str, int]]:
    """List images of class folders in ``root/within`` by relative path, with labels."""
    listed: list[tuple[str, int]] = []
    for label, name in enumerate(classes):
        folder = root / within / name
        files = sorted(path for path in folder.rglob("*") if is_image(path, root))
        if not files:
            raise UserError(f"Class folder {folder} contains no image. Add images or remove it.")
        listed += [(path.relative_to(root).as_posix(), label) for path in files]
    return listed


def listed_images(root: Path, listed: Sequence[tuple[str, int]], short_side: int | None) -> ImageSet:
    """Return images of one folder, listed by relative path and label."""
    files = ImageFiles(root, tuple(name for name, _ in listed), short_side)
    return ImageSet.of_files(files, np.array([label for _, label in listed], dtype=np.int64))


def is_image(path: Path, root: Path) -> bool:
    """Return True for an image file that is not hidden below the root."""
    hidden = any(is_hidden(part) for part in path.relative_to(root).parts)
    return path.suffix.lower() in SUFFIXES and not hidden and path.is_file()


def same_classes(train: Path, test: Path) -> tuple[str, ...]:
    """Return the classes of two splits; raise UserError if they differ."""
    classes, others = class_folders(train), class_folders(test)
    for missing, folder in ((set(classes) - set(others), test), (set(others) - set(classes), train)):
        if missing:
            raise UserError(f"{folder} has no folder for class(es) {shorten(sorted(missing))}. Add it.")
    return classes


class Folder(Benchmark):
    """A folder of class folders, with test images in a second folder or a stratified part."""

    name = "folder"
    summary = "any folder of class folders, by its path"

    def __init__(self, root: Path, test: Path | None = None, test_fraction: float = 0.2) -> None:
        self.root, self.test = _find_splits(root, test)
        self.test_fraction = test_fraction

    def load(self, short_side: int | None) -> ImageData:
        """List the images of the class folders, split for training and test."""
        if self.test is None:
            classes = class_folders(self.root)
            every = listed_images(self.root, list_classes(self.root, classes), short_side)
            kept, held = stratified_split(every.labels, self.test_fraction, "test", classes)
            return ImageData(classes, every.subset(kept), every.subset(held))
        classes = same_classes(self.root, self.test)
        train, test = (listed_images(root, list_classes(root, classes), short_side) for root in (self.root, self.test))
        return ImageData(classes, train, test)

    def notes(self) -> list[str]:
        """Warn if the class folders contain only folders: the path may be one level too high."""
        folders = subfolders(self.root)
        if not folders or not all(_has_only_folders(folder) for folder in folders):
            return []
        names = shorten([folder.name for folder in folders], 3)
        return [f"Classes: {names}. If they are the folders inside these, pass a folder such as {folders[0]}."]


def _has_only_folders(folder: Path) -> bool:
    return len(subfolders(folder)) > 1 and not any(path.suffix.lower() in SUFFIXES for path in folder.iterdir())


def _find_splits(root: Path, test: Path | None) -> tuple[Path, Path | None]:
    """Return ``train/`` and ``test/`` (or ``val/``) if the folder contains nothing else."""
    if test is not None:
        if not test.is_dir():
            raise UserError(f"Test folder {test} is not a folder. Pass a folder of class folders to --test.")
        return root, test
    inside = {path.name.casefold(): path for path in subfolders(root)}
    train, held = (next((name for name in names if name in inside), None) for names in (TRAIN_SPLITS, TEST_SPLITS))
    if train and held and set(inside) <= {train, *TEST_SPLITS}:
        return inside[train], inside[held]
    return root, None
