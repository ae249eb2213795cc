"""Datasets of the Hugging Face hub by name, or as the package ``datasets`` has saved one on disk."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from probprompt.data.images import Pixels, UnreadableImageError, reduce_to, to_rgb
from probprompt.data.layouts import SIDES
from probprompt.data.sets import Benchmark, ImageData, ImageSet, stratified_split
from probprompt.errors import UserError, shorten

PREFIX = "hf:"
_FORM = "hf:owner/name or hf:name, :configuration and @revision behind it where needed, or hf:FOLDER"
_NAMED = re.compile(r"(?P<name>(?:[\w.-]+/)?[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")
_BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_TRAIN = "train"
_SEVERAL, _SINGLE = "dataset_dict.json", "state.json"  # of a folder of splits, and of one split alone


@dataclass(frozen=True)
class _Opened:
    """A dataset as it is used: its splits, which of them is the test set, and the class numbers of their images."""

    splits: Mapping[str, Any]
    image: str
    """The column of images."""
    classes: tuple[str, ...]
    side: str | None
    """The split that is the test set, where there is one with classes."""
    labels: dict[str, NDArray[np.int64]]
    """Of the images of the training and the test split."""
    remarks: tuple[str, ...]


class HubDataset(Benchmark):
    """A dataset of images with class labels; its test or validation split is the test set, else a part of train."""

    name = "hf"
    summary = "a dataset of the Hugging Face hub"

    def __init__(self, where: str, test_fraction: float = 0.2) -> None:
        self.where = where
        self.test_fraction = test_fraction

    def load(self, short_side: int | None) -> ImageData:
        """Fetch the dataset, unless it is there already, and read its columns."""
        opened = self._opened
        whole = _images(opened, _TRAIN, short_side)
        if opened.side is None:
            kept, held = stratified_split(whole.labels, self.test_fraction, "test", opened.classes)
            return ImageData(opened.classes, whole.subset(kept), whole.subset(held))
        return ImageData(opened.classes, whole, _images(opened, opened.side, short_side))

    def remarks(self) -> list[str]:
        """Which splits have no classes, and which classes have no images."""
        return list(self._opened.remarks)

    @cached_property
    def _opened(self) -> _Opened:
        where = f"{PREFIX}{self.where}"
        splits = _open(self.where)
        if _TRAIN not in splits:
            raise UserError(f"{where} has no split {_TRAIN!r}, only {shorten(sorted(splits))}: choose another dataset")
        image, column = _columns(splits[_TRAIN], self.where)
        labels = {_TRAIN: _labels(splits[_TRAIN], column)}
        if not _complete(labels[_TRAIN]):
            raise UserError(f"{where}: the split {_TRAIN!r} has images without a class: choose a dataset that has them")
        side, passed_over = None, []
        for name in (name for name in SIDES if name in splits):
            found = _labels(splits[name], column)
            if _complete(found):
                side, labels[name] = name, found
                break
            passed_over.append(name)
        instead = repr(side) if side else f"a part of {_TRAIN!r}"
        remarks = [
            f"the split {name!r} of {where} has images without a class: the test set is {instead}"
            for name in passed_over
        ]
        names = tuple(splits[_TRAIN].features[column].names)
        classes, numbered = _without_empty(names, labels, where)
        if len(classes) < len(names):
            empty = shorten(sorted(set(names) - set(classes)))
            remarks.append(f"{len(names) - len(classes)} class(es) of {where} have no image and are left out: {empty}")
        return _Opened(splits, image, classes, side, numbered, tuple(remarks))


def _open(where: str) -> Mapping[str, Any]:
    """All splits by name; a split that was saved alone is for training."""
    try:
        datasets: Any = import_module("datasets")
    except ImportError:
        raise UserError(f"{PREFIX}{where} needs the package 'datasets': pip install 'probprompt[hub]'") from None
    folder = Path(where).expanduser()
    named = _NAMED.fullmatch(where)
    saved = [name for name in (_SEVERAL, _SINGLE) if (folder / name).is_file()]
    if not saved and (named is None or (folder.is_dir() and "/" not in where)):
        what = "a folder, but none that datasets has saved" if folder.is_dir() else "neither a name nor a folder"
        own = f"; class folders of your own go without {PREFIX}" if folder.is_dir() else ""
        raise UserError(f"{PREFIX}{where} is {what}: write {_FORM}{own}")
    try:
        if saved or named is None:
            found: Any = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(named["name"], named["config"], revision=named["revision"])
    except (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError) as problem:
        remedy = "save it anew" if saved else "see that its name is right and the network is there"
        raise UserError(f"{PREFIX}{where} cannot be loaded: {problem}; {remedy}") from None
    return found if isinstance(found, Mapping) else {_TRAIN: found}


def _columns(split: Any, where: str) -> tuple[str, str]:
    """The only column of images, and the only one of classes, or the one that is called label."""
    kinds = {name: type(feature).__name__ for name, feature in split.features.items()}
    images, labels = ([name for name in kinds if kinds[name] == kind] for kind in ("Image", "ClassLabel"))
    for usual in ("label", "fine_label"):
        labels = [usual] if usual in labels else labels
    if len(images) != 1 or len(labels) != 1:
        raise UserError(
            f"{PREFIX}{where} must have one column of images and one of class labels, but its columns are "
            + ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        )
    return images[0], labels[0]


def _labels(split: Any, column: str) -> NDArray[np.int64]:
    """The class numbers of a split, -1 where an image has none."""
    if column not in split.features:
        return np.full(len(split), -1, np.int64)
    return np.array([-1 if label is None else label for label in split[column][:]], dtype=np.int64)


def _complete(labels: NDArray[np.int64]) -> bool:
    """Whether there are images, and all have a class."""
    return bool(len(labels)) and bool((labels >= 0).all())


def _without_empty(
    names: tuple[str, ...], labels: dict[str, NDArray[np.int64]], where: str
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """The classes that have images, numbered anew; one that has them on one side alone is refused."""
    present = {side: np.unique(found) for side, found in labels.items()}
    kept = np.unique(np.concatenate(list(present.values())))
    for side, found in present.items():
        missing = np.setdiff1d(kept, found)
        if len(missing):
            raise UserError(
                f"{where}: the split {side!r} has no image of {shorten(names[label] for label in missing)}, which "
                "another split has: choose a dataset whose splits have the same classes, or save one without these"
            )
    return tuple(names[label] for label in kept), {side: np.searchsorted(kept, all_) for side, all_ in labels.items()}


def _images(opened: _Opened, side: str, short_side: int | None) -> ImageSet:
    split, labels = opened.splits[side], opened.labels[side]
    mark = getattr(split, "_fingerprint", None)  # of the dataset's revision, or of what was saved
    folder = f"{side}@{mark}" if mark else side

    def read(row: int) -> Pixels:
        try:
            found = ImageOps.exif_transpose(split[row][opened.image])
            return np.asarray(reduce_to(to_rgb(found), short_side))
        except _BROKEN as problem:
            raise UnreadableImageError(str(problem) or type(problem).__name__) from None

    return ImageSet(tuple(f"{folder}/{row:07}" for row in range(len(labels))), labels, read, short_side=short_side)
