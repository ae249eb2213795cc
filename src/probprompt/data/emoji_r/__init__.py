"""The embedded benchmark emoji-r: 20 classes of emoji in the styles of ten open icon sets.

Test images are in styles that training never uses. `manifest.json` lists all images, `ATTRIBUTION.md` the authors.
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
_SIZES = ((160, 160), (200, 150), (150, 200))  # width and height, as of photos
_QUALITY = 90


@dataclass(frozen=True)
class Rendition:
    """The description of one image."""

    label: str
    emoji: str
    style: str  # icon set
    family: str  # icon sets that share drawings, all in one split
    license: str  # SPDX name
    split: str  # "train" or "test"


def manifest() -> dict[str, Any]:
    """Return the manifest: sizes, classes, icon sets, sheets, and all images."""
    return dict(json.loads((_FOLDER / "manifest.json").read_text(encoding="utf-8")))


def classes() -> tuple[str, ...]:
    """Return the class names in order."""
    return tuple(manifest()["classes"])


def _sheet(name: str, digest: str) -> NDArray[np.uint8]:
    path = _FOLDER / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RuntimeError(f"Could not read {path}: {error}. Reinstall probprompt.") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise RuntimeError(f"{path} is corrupted (SHA-256 mismatch). Reinstall probprompt.")
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.uint8)


def read() -> tuple[NDArray[np.uint8], list[Rendition]]:
    """Return all images `(n, 64, 64, 3)` with their descriptions, in class order."""
    index = manifest()
    size, columns = index["size"], index["columns"]
    sheets = {label: _sheet(f"{label}.webp", index["sheets"][f"{label}.webp"]) for label in index["classes"]}
    images = np.empty((len(index["images"]), size, size, 3), dtype=np.uint8)
    renditions = [Rendition(*fields) for *fields, _ in index["images"]]
    for number, (label, *_, place) in enumerate(index["images"]):
        top, left = place // columns * size, place % columns * size
        images[number] = sheets[label][top : top + size, left : left + size]
    return images, renditions


@benchmark
class EmojiR(Benchmark):
    """Emoji of ten icon sets, with test images in styles that training never uses."""

    name = "emoji-r"
    summary = "renditions: 20 classes of emoji, tested in styles never trained on (embedded, 64 px)"
    tasks = 5
    enlarge = False
    held_out_styles = ("fluent-emoji-high-contrast", "twemoji")  # line drawings and colors, a third of the images

    def load(self, short_side: int | None) -> ImageData:
        """Unpack the embedded sheets."""
        pixels, renditions = read()
        class_names = classes()
        names = tuple(f"{item.label}/{item.emoji}.{item.style}" for item in renditions)
        labels = np.array([class_names.index(item.label) for item in renditions], dtype=np.int64)
        every = ImageSet(names, labels, lambda index: pixels[index])
        rows = [[row for row, item in enumerate(renditions) if item.split == split] for split in ("train", "test")]
        return ImageData(class_names, every.subset(rows[0]), every.subset(rows[1]))

    def hold_out(self, data: ImageData, fraction: float) -> ImageData:
        """Hold out whole styles, since test images are also in unseen styles."""
        held = [name.endswith(self.held_out_styles) for name in data.train.names]
        rows = [[row for row, is_held in enumerate(held) if is_held is part] for part in (False, True)]
        return ImageData(data.class_names, data.train.subset(rows[0]), data.train.subset(rows[1]))


def write_sample(folder: str | Path, classes: Sequence[str] | int = 4, images: int = 12, test: bool = False) -> Path:
    """Write images of the embedded benchmark as JPEG files, in one folder per class.

    Args:
        folder: New or empty folder; it also receives ``ATTRIBUTION.md`` with the authors of the images.
        classes: Names of classes, or their number.
        images: Number of images per class.
        test: Use icon styles that training never uses.

    Returns:
        The folder.

    """
    root = Path(folder).expanduser()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"{root} is not empty. Pass a new folder; nothing was overwritten.")
    if images < 1:
        raise UserError(f"The number of images per class must be at least 1, got {images}.")
    pixels, renditions = read()
    split = "test" if test else "train"
    for name in _select(classes):
        own = [row for row, item in enumerate(renditions) if (item.label, item.split) == (name, split)]
        spread = np.unique(np.linspace(0, len(own) - 1, min(images, len(own))).round().astype(int))
        (root / name).mkdir(parents=True)
        for number, row in enumerate(own[index] for index in spread):
            image = Image.fromarray(np.asarray(pixels[row])).resize(_SIZES[number % len(_SIZES)])
            image.save(root / name / f"{renditions[row].emoji} ({renditions[row].style}).jpg", quality=_QUALITY)
    (root / "ATTRIBUTION.md").write_bytes((_FOLDER / "ATTRIBUTION.md").read_bytes())
    return root


def _select(requested: Sequence[str] | int) -> tuple[str, ...]:
    known = classes()
    if isinstance(requested, int):
        if not 1 <= requested <= len(known):
            raise UserError(f"The number of classes must be 1 to {len(known)}, got {requested}.")
        return known[:requested]
    for name in requested:
        if name not in known:
            raise UserError(f"Unknown class {name!r}. {suggest(name, known)}")
    return tuple(dict.fromkeys(requested))
