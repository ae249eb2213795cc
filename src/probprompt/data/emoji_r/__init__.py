"""The embedded benchmark emoji-r: 20 classes of emoji, drawn in the styles of ten open icon sets.

Training and test pictures come from different families of icon sets, so a test picture is always in a style
that training never showed. `manifest.json` lists every picture; `ATTRIBUTION.md` credits the authors.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from probprompt.data.datasets import Benchmark, ImageData, ImageSet, benchmark
from probprompt.errors import UserError, suggest

_FOLDER = Path(__file__).parent
_SIDES = ((160, 160), (200, 150), (150, 200))  # as photographs lie: square, wide and tall
_QUALITY = 90


@dataclass(frozen=True)
class Rendition:
    """The description of one image."""

    label: str
    emoji: str
    style: str
    """Icon set of the drawing."""
    family: str
    """Icon sets that share drawings form one family, which stays in one split."""
    licence: str
    """SPDX name of the license of the artwork."""
    split: str
    """Either "train" or "test"."""


def manifest() -> dict[str, Any]:
    """Return the manifest: sizes, classes, icon sets with versions and licenses, sheets, and all images."""
    return dict(json.loads((_FOLDER / "manifest.json").read_text(encoding="utf-8")))


def classes() -> tuple[str, ...]:
    """Return the class names in their fixed order, shuffled once when the dataset was built."""
    return tuple(manifest()["classes"])


def _sheet(name: str, digest: str) -> NDArray[np.uint8]:
    """Return the pixels of one sheet, after checking that the file is the one that was published."""
    path = _FOLDER / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RuntimeError(f"emoji-r: cannot read {path}: {error}; reinstall the package") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise RuntimeError(f"emoji-r: {path} is damaged (its sha256 differs); reinstall the package")
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.uint8)


def read() -> tuple[NDArray[np.uint8], list[Rendition]]:
    """Return all pictures as (count, 64, 64, 3) bytes with their descriptions, grouped by class in class order.

    Raises:
        RuntimeError: a sheet is missing or damaged; the message names the file.

    """
    index = manifest()
    size, columns = index["size"], index["columns"]
    sheets = {label: _sheet(f"{label}.webp", index["sheets"][f"{label}.webp"]) for label in index["classes"]}
    images = np.empty((len(index["images"]), size, size, 3), dtype=np.uint8)
    renditions = []
    for number, (*fields, place) in enumerate(index["images"]):
        rendition = Rendition(*fields)
        top, left = place // columns * size, place % columns * size
        images[number] = sheets[rendition.label][top : top + size, left : left + size]
        renditions.append(rendition)
    return images, renditions


@benchmark
class EmojiR(Benchmark):
    """Emoji of ten icon sets; the test set is drawn in styles never seen in training."""

    name = "emoji-r"
    summary = "renditions: 20 classes of emoji, tested in styles never trained on (embedded, 64 px)"
    tasks = 5
    enlarge = False
    held_out_styles = ("fluent-emoji-high-contrast", "twemoji")
    """One set of line drawings and one of colors: a third of the training images."""

    def load(self, short_side: int | None) -> ImageData:
        """Unpack the embedded sheets."""
        pixels, renditions = read()
        class_names = classes()
        names = tuple(f"{item.label}/{item.emoji}.{item.style}" for item in renditions)
        labels = np.array([class_names.index(item.label) for item in renditions], dtype=np.int64)
        every = ImageSet(names, labels, lambda index: pixels[index])
        sides = [[i for i, item in enumerate(renditions) if item.split == side] for side in ("train", "test")]
        return ImageData(class_names, every.subset(sides[0]), every.subset(sides[1]))

    def hold_out(self, data: ImageData, fraction: float) -> ImageData:
        """Hold out whole styles, whatever the fraction: the test set, too, is in styles never seen."""
        held = [name.endswith(self.held_out_styles) for name in data.train.names]
        sides = [[i for i, out in enumerate(held) if out is wanted] for wanted in (False, True)]
        return ImageData(data.class_names, data.train.subset(sides[0]), data.train.subset(sides[1]))


def write_sample(folder: str | Path, classes: Sequence[str] | int = 4, images: int = 12, test: bool = False) -> Path:
    """Write images of the embedded benchmark as JPEG files, in one folder per class.

    Args:
        folder: A new or empty folder; ``ATTRIBUTION.md`` in it will name the authors of the images.
        classes: Names of classes, or their number.
        images: Number of images of each class.
        test: Take the images in styles that training never shows.

    Returns:
        The folder.

    """
    root = Path(folder).expanduser()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"{root} exists already: name a new folder, nothing is written over what is there")
    if images < 1:
        raise UserError(f"the number of images of each class must be at least 1, got {images}")
    pixels, renditions = read()
    side = "test" if test else "train"
    for name in _chosen(classes):
        own = [place for place, item in enumerate(renditions) if (item.label, item.split) == (name, side)]
        spread = np.unique(np.linspace(0, len(own) - 1, min(images, len(own))).round().astype(int))
        (root / name).mkdir(parents=True)
        for number, place in enumerate(own[index] for index in spread):
            picture = Image.fromarray(np.asarray(pixels[place])).resize(_SIDES[number % len(_SIDES)])
            picture.save(root / name / f"{renditions[place].emoji} ({renditions[place].style}).jpg", quality=_QUALITY)
    (root / "ATTRIBUTION.md").write_bytes((_FOLDER / "ATTRIBUTION.md").read_bytes())
    return root


def _chosen(wanted: Sequence[str] | int) -> tuple[str, ...]:
    known = classes()
    if isinstance(wanted, int):
        if not 1 <= wanted <= len(known):
            raise UserError(f"there are {len(known)} classes of pictures: {wanted} cannot be written")
        return known[:wanted]
    for name in wanted:
        if name not in known:
            raise UserError(f"there are no pictures of {name!r}. {suggest(name, known)}")
    return tuple(dict.fromkeys(wanted))
