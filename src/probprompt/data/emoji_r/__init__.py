"""The embedded dataset emoji-r: 20 classes of emoji, drawn in the styles of ten open icon sets.

Training and test pictures come from different families of icon sets, so a test picture is always in a style
that training never showed. `manifest.json` lists every picture; `ATTRIBUTION.md` credits the authors.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rendition", "classes", "manifest", "read"]

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Rendition:
    """What is known of one picture."""

    label: str
    """Name of the class."""
    emoji: str
    """Name of the emoji."""
    style: str
    """Icon set that drew it."""
    family: str
    """Icon sets that share drawings form one family, and a family stays on one side of the split."""
    licence: str
    """SPDX name of the licence of the artwork."""
    split: str
    """Either "train" or "test"."""


def _load() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((_FOLDER / "manifest.json").read_text(encoding="utf-8"))
    return loaded


def manifest() -> dict[str, object]:
    """Return the manifest: sizes, classes, icon sets with versions and licences, sheets, and all pictures."""
    return _load()


def classes() -> tuple[str, ...]:
    """Return the class names in their fixed order, shuffled once when the dataset was built."""
    return tuple(_load()["classes"])


def _sheet(name: str, digest: str) -> NDArray[np.uint8]:
    """Return the pixels of one sheet, after checking that the file is the one that was published."""
    from PIL import Image

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
    index = _load()
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
