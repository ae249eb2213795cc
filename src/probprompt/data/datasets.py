"""Where images come from: benchmarks by name, any folder of class folders, or a dataset of the Hugging Face hub.

A new benchmark is one class: it states its name and default number of tasks, and how to load itself. Those of this
package are in :mod:`probprompt.data.emoji_r` and :mod:`probprompt.data.published`.
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

HUB = "hf:"
"""How the name of a dataset of the Hugging Face hub starts."""
TRAINING = ("train", "training")
SIDES = ("test", "testing", "val", "valid", "validation")
SYSTEM_FOLDERS = frozenset(
    {"__macosx", "@eadir", "#recycle", "$recycle.bin", "lost+found", "system volume information"}
)
"""Folders that systems and storage devices add, such as thumbnails; in lower case."""


@dataclass(frozen=True)
class ImageSet:
    """Images that can be read one by one, with their names and class numbers."""

    names: tuple[str, ...]
    labels: NDArray[np.int64]
    read: Callable[[int], Pixels]
    files: ImageFiles | None = None
    """All files of the images' folder; None if they have none."""
    rows: NDArray[np.int64] | None = None
    """Indices into the files."""
    pixels: Pixels | None = None
    """All images (n, H, W, 3), if they are in memory and have one size."""
    short_side: int | None = None
    """Largest short side of an image when it is read; None does not reduce it."""
    known_as: tuple[str, ...] | None = None
    """Names for the fingerprint of a split, if ``names`` depend on the layout on this disk."""

    @classmethod
    def of_files(cls, files: ImageFiles, labels: NDArray[np.int64]) -> Self:
        """All images of a folder."""
        return cls(files.names, labels, files.read, files, np.arange(len(files)), short_side=files.short_side)

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, indices: Sequence[int]) -> Self:
        """Some of the images, in this order."""
        chosen = list(indices)
        return replace(
            self,
            names=tuple(self.names[index] for index in chosen),
            labels=self.labels[chosen],
            read=lambda index: self.read(chosen[index]),
            rows=None if self.rows is None else self.rows[chosen],
            pixels=None if self.pixels is None else self.pixels[chosen],
            known_as=self.known_as and tuple(self.known_as[index] for index in chosen),
        )


@dataclass(frozen=True)
class ImageData:
    """The classes of a benchmark, and its training and test set."""

    class_names: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    lists: tuple[str, ...] = ()
    """The sha256 of the lists of training and test images, if there are any."""

    def split_hash(self) -> str:
        """Return a fingerprint of the class and split of every image."""
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
    """Whether it may have to be downloaded first."""
    stored: ClassVar[bool] = False
    """Whether it is stored in a folder, which it takes as its argument."""

    @abstractmethod
    def load(self, short_side: int | None) -> ImageData:
        """List the images; each is decoded when read, its short side reduced to at most ``short_side`` pixels."""

    def notes(self) -> list[str]:
        """Return what a user should know before using it."""
        return []

    def usual_tasks(self, classes: int) -> int:
        """Return the default number of tasks: fewer if a task would have a single class."""
        return min(self.tasks, max(1, classes // 2))

    def hold_out(self, data: ImageData, fraction: float) -> ImageData:
        """Replace the test set by a part of the training set, for choosing settings."""
        kept, held = stratified_split(data.train.labels, fraction, "validation", data.class_names)
        return replace(data, train=data.train.subset(kept), test=data.train.subset(held))

    def select(self, data: ImageData, validation: float, per_class: int | None) -> ImageData:
        """Hold out a part of the training images if it is above 0, and keep at most so many of each class."""
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
    """Make a benchmark known by its name."""
    _REGISTRY[source.name] = source
    return source


def registered() -> Mapping[str, type[Benchmark]]:
    """All benchmarks by name."""
    for module in ("emoji_r", "published"):  # they import this one, so it loads them late
        import_module(f"probprompt.data.{module}")
    return dict(sorted(_REGISTRY.items()))


def benchmark_label(name: str) -> str:
    """A benchmark's name; of a folder, the last part of its path."""
    return name if name in registered() else Path(name).expanduser().resolve().name


def find(name: str, test: str | None = None, test_fraction: float = 0.2, root: str | None = None) -> Benchmark:
    """Return a benchmark by its name, a folder of class folders, or a Hugging Face dataset as ``hf:owner/name``.

    ``root``: folder of a published benchmark, if it is not the default one.
    """
    kind, hub = registered().get(name), name.startswith(HUB)
    if test is not None and (kind or hub):
        raise UserError(f"{name!r} has a test set of its own: a test folder goes with a folder of images only")
    if root is not None and not (kind and kind.stored):
        raise UserError(f"{name!r} takes no root ({root}): it goes with a published benchmark only")
    build: Callable[..., Benchmark] | None = kind
    if build:
        return build(Path(root).expanduser()) if root else build()
    if hub:
        build = import_module("probprompt.data.huggingface").HubDataset
        return build(name.removeprefix(HUB), test_fraction)
    path = Path(name).expanduser()
    if path.is_dir():
        return Folder(path, Path(test).expanduser() if test else None, test_fraction)
    problem = "is a file, not a folder" if path.exists() else "is neither a benchmark nor a folder"
    raise UserError(f"{name!r} {problem}. Pass a benchmark or a folder of class folders. {suggest(name, registered())}")


def stratified_split(
    labels: NDArray[np.int64], fraction: float, purpose: str, class_names: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Hold out a part of every class, at least one image; the part does not depend on seeds."""
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


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names of classes by the alphabet, or by value if all of them are numbers.

    >>> in_order(["b", "a", "10", "9"]), in_order(["10", "9", "0"])
    (['10', '9', 'a', 'b'], ['0', '9', '10'])
    """
    listed = sorted(names)
    return sorted(listed, key=int) if all(name.isdecimal() for name in listed) else listed


def subfolders(root: Path) -> list[Path]:
    """Return the folders in a folder by name, except hidden ones and those of the system."""
    found = (path.name for path in root.iterdir() if path.is_dir() and not is_hidden(path.name))
    return [root / name for name in in_order(found)]


def is_hidden(name: str) -> bool:
    """Return True if a file or folder is hidden, or one that a system made for itself."""
    return name.startswith(".") or name.casefold() in SYSTEM_FOLDERS


def class_folders(root: Path) -> tuple[str, ...]:
    """Return the names of class folders: at least two, all distinct."""
    names = [path.name for path in subfolders(root)]
    if len(names) < 2:
        hint = loose_images(root)
        raise UserError(f"{root} holds {len(names)} class folder(s), at least 2 are needed{hint and '; ' + hint}")
    seen: dict[str, str] = {}
    for name in names:
        same = unicodedata.normalize("NFC", name).casefold().strip()
        if same in seen:
            raise UserError(f"{root} has two classes of one name, {seen[same]!r} and {name!r}: rename or merge one")
        seen[same] = name
    return tuple(names)


def loose_images(root: Path) -> str:
    """Return a hint at image files outside of class folders, empty if there are none."""
    loose = sum(path.suffix.lower() in SUFFIXES for path in root.iterdir() if path.is_file())
    return f"its {loose} image(s) must lie in one folder per class" if loose else ""


def list_classes(root: Path, classes: Sequence[str], within: str = "") -> list[tuple[str, int]]:
    """List the images in class folders below ``root/within``, by their paths below the root, with labels."""
    found: list[tuple[str, int]] = []
    for label, name in enumerate(classes):
        folder = root / within / name
        files = sorted(path for path in folder.rglob("*") if is_image(path, root))
        if not files:
            raise UserError(f"the class folder {folder} holds no image: fill it or remove it")
        found += [(path.relative_to(root).as_posix(), label) for path in files]
    return found


def listed_images(root: Path, listed: Sequence[tuple[str, int]], short_side: int | None) -> ImageSet:
    """Return images of one folder, listed by their paths below it with labels."""
    files = ImageFiles(root, tuple(name for name, _ in listed), short_side)
    return ImageSet.of_files(files, np.array([label for _, label in listed], dtype=np.int64))


def is_image(path: Path, root: Path) -> bool:
    """Return True for an image file that is not hidden below the root."""
    aside = any(is_hidden(part) for part in path.relative_to(root).parts)
    return path.suffix.lower() in SUFFIXES and not aside and path.is_file()


def same_classes(train: Path, test: Path) -> tuple[str, ...]:
    """Return the classes of two splits, which must be the same."""
    classes, found = class_folders(train), class_folders(test)
    for missing, where in ((set(classes) - set(found), test), (set(found) - set(classes), train)):
        if missing:
            raise UserError(f"{where} has no folder for the class(es) {shorten(sorted(missing))}")
    return classes


class Folder(Benchmark):
    """Any folder of class folders; test images are in a separate folder or a stratified part of it."""

    name = "folder"
    summary = "any folder of class folders, by its path"

    def __init__(self, root: Path, test: Path | None = None, test_fraction: float = 0.2) -> None:
        self.root, self.test = _find_splits(root, test)
        self.test_fraction = test_fraction

    def load(self, short_side: int | None) -> ImageData:
        """List the class folders and split the images."""
        if self.test is None:
            classes = class_folders(self.root)
            every = listed_images(self.root, list_classes(self.root, classes), short_side)
            kept, held = stratified_split(every.labels, self.test_fraction, "test", classes)
            return ImageData(classes, every.subset(kept), every.subset(held))
        classes = same_classes(self.root, self.test)
        train, test = (listed_images(root, list_classes(root, classes), short_side) for root in (self.root, self.test))
        return ImageData(classes, train, test)

    def notes(self) -> list[str]:
        """Warn if the folder may be one level too high: its folders contain folders and no images."""
        folders = subfolders(self.root)
        if not folders or not all(_holds_folders_only(folder) for folder in folders):
            return []
        names = shorten([folder.name for folder in folders], 3)
        return [
            f"the classes are {names}, whose images all lie in folders inside them: if those are the classes, name a "
            f"folder such as {folders[0]}"
        ]


def _holds_folders_only(folder: Path) -> bool:
    return len(subfolders(folder)) > 1 and not any(path.suffix.lower() in SUFFIXES for path in folder.iterdir())


def _find_splits(root: Path, test: Path | None) -> tuple[Path, Path | None]:
    """Use ``train/`` and ``test/`` (or ``val/``, ``validation/``) inside the folder where they are all it holds."""
    if test is not None:
        if not test.is_dir():
            raise UserError(f"the test folder {test} is not a folder")
        return root, test
    inside = {path.name.casefold(): path for path in subfolders(root)}
    train, side = (next((name for name in names if name in inside), None) for names in (TRAINING, SIDES))
    if train and side and set(inside) <= {train, *SIDES}:
        return inside[train], inside[side]
    return root, None
