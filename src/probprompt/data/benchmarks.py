"""Where images come from: benchmarks by name, or any folder of class folders.

A new benchmark is one class here: it says its name, its usual number of tasks and how to load itself. The published
ones, which lie on disk, are in :mod:`probprompt.data.datasets`.
"""

from pathlib import Path

import numpy as np

from probprompt.data import emoji_r
from probprompt.data.datasets import Dataset
from probprompt.data.hub import PREFIX, HubDataset
from probprompt.data.images import SUFFIXES, ImageFiles
from probprompt.data.layouts import SIDES, TRAINING, class_folders, list_classes, same_classes, subfolders
from probprompt.data.sets import Benchmark, ImageData, ImageSet, benchmark, registered, stratified_split
from probprompt.errors import UserError, shorten, suggest

__all__ = [
    "Benchmark",
    "EmojiR",
    "Folder",
    "HubDataset",
    "ImageData",
    "ImageSet",
    "benchmark",
    "find",
    "registered",
    "stratified_split",
]


def find(name: str, test: str | None = None, test_fraction: float = 0.2, root: str | None = None) -> Benchmark:
    """A benchmark by its name, a folder of class folders by its path, or a Hugging Face dataset as ``hf:owner/name``.

    ``root`` is where the files of a published benchmark lie, where that is not the usual place.
    """
    source = registered().get(name)
    own = source is not None or name.startswith(PREFIX)
    if own and test is not None:
        raise UserError(f"{name!r} has a test set of its own: a test folder goes with a folder of images only")
    if source is not None and issubclass(source, Dataset):
        return source(Path(root).expanduser() if root else None)
    if root is not None:
        raise UserError(f"{name!r} takes no root ({root}): it goes with a published benchmark only")
    if name.startswith(PREFIX):
        return HubDataset(name.removeprefix(PREFIX), test_fraction)
    if source is not None:
        return source()
    path = Path(name).expanduser()
    if path.is_dir():
        return Folder(path, Path(test).expanduser() if test else None, test_fraction)
    kind = "is a file, not a folder" if path.exists() else "is neither a benchmark nor a folder"
    raise UserError(f"{name!r} {kind}: {suggest(name, registered())}, or the path of a folder of class folders")


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
        if self.test is None:
            classes = class_folders(self.root)
            every = _list_images(self.root, classes, short_side)
            kept, held = stratified_split(every.labels, self.test_fraction, "test", classes)
            return ImageData(classes, every.subset(kept), every.subset(held))
        classes = same_classes(self.root, self.test)
        train, test = (_list_images(root, classes, short_side) for root in (self.root, self.test))
        return ImageData(classes, train, test)

    def remarks(self) -> list[str]:
        """Whether the folder may be one level too high: its folders hold folders, and no images of their own."""
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


def _list_images(root: Path, classes: tuple[str, ...], short_side: int | None) -> ImageSet:
    listed = list_classes(root, classes)
    files = ImageFiles(root, tuple(name for name, _ in listed), short_side)
    return ImageSet.of_files(files, np.array([label for _, label in listed], dtype=np.int64))


def _find_sides(root: Path, test: Path | None) -> tuple[Path, Path | None]:
    """Use ``train/`` and ``test/`` (or ``val/``, ``validation/``) inside the folder where they are all it holds."""
    if test is not None:
        if not test.is_dir():
            raise UserError(f"the test folder {test} is not a folder")
        return root, test
    inside = {path.name.casefold(): path for path in subfolders(root)}
    train = next((name for name in TRAINING if name in inside), None)
    if train is not None and set(inside) - {train} <= set(SIDES):
        for other in SIDES:
            if other in inside:
                return inside[train], inside[other]
    return root, None
