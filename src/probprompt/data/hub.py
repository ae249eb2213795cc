"""Datasets of the Hugging Face hub by name, or as the package ``datasets`` has saved one on disk."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from probprompt.data.images import Pixels, UnreadableImageError, reduce_to, to_rgb
from probprompt.data.layouts import SIDES
from probprompt.data.sets import Benchmark, ImageData, ImageSet, stratified_split
from probprompt.errors import UserError, shorten

PREFIX = "hf:"
_FORM = "hf:owner/name, hf:owner/name:configuration, either with @revision behind it, or hf:FOLDER"
_NAMED = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")
_BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class HubDataset(Benchmark):
    """A dataset of images with class labels; its test or validation split is the test set, else a part of train."""

    name = "hf"
    summary = "a dataset of the Hugging Face hub"

    def __init__(self, where: str, test_fraction: float = 0.2) -> None:
        self.where = where
        self.test_fraction = test_fraction

    def load(self, short_side: int | None) -> ImageData:
        """Fetch the dataset, unless it is there already, and read its columns."""
        splits = _open(self.where)
        train = splits.get("train")
        if train is None:
            raise UserError(f"{PREFIX}{self.where} has no split 'train', only {shorten(sorted(splits))}")
        image, label = _columns(train, self.where)
        classes = tuple(train.features[label].names)
        whole = _images(train, "train", image, label, short_side)
        side = next((side for side in SIDES if side in splits), None)
        if side is None:
            kept, held = stratified_split(whole.labels, self.test_fraction, "test", classes)
            return ImageData(classes, whole.subset(kept), whole.subset(held))
        return ImageData(classes, whole, _images(splits[side], side, image, label, short_side))


def _open(where: str) -> Any:
    """All splits by name."""
    try:
        datasets: Any = import_module("datasets")
    except ImportError:
        raise UserError(f"{PREFIX}{where} needs the package 'datasets': pip install 'probprompt[hub]'") from None
    folder = Path(where).expanduser()
    if (folder / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(folder))
    named = _NAMED.fullmatch(where)
    if named is None:
        raise UserError(f"{PREFIX}{where} is neither a name nor a folder that datasets has saved: write {_FORM}")
    try:
        return datasets.load_dataset(named["name"], named["config"], revision=named["revision"])
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as problem:
        raise UserError(f"{PREFIX}{where} cannot be loaded: {problem}") from None


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


def _images(split: Any, side: str, image: str, label: str, short_side: int | None) -> ImageSet:
    labels = np.array(split[label][:], dtype=np.int64)
    if len(labels) == 0 or labels.min() < 0:
        raise UserError(f"the split {side!r} has images without a class: choose a dataset whose splits are labelled")

    def read(row: int) -> Pixels:
        try:
            found = ImageOps.exif_transpose(split[row][image])
            return np.asarray(reduce_to(to_rgb(found), short_side))
        except _BROKEN as problem:
            raise UnreadableImageError(str(problem) or type(problem).__name__) from None

    return ImageSet(tuple(f"{side}/{row:07}" for row in range(len(labels))), labels, read)
