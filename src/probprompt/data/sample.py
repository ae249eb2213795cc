"""Pictures to try things with: some of the embedded emoji, written as a folder of class folders."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from probprompt.data import emoji_r
from probprompt.errors import UserError, suggest

_SIDES = ((160, 160), (200, 150), (150, 200))  # as photographs lie: square, wide and tall
_QUALITY = 90


def write_sample(folder: str | Path, classes: Sequence[str] | int = 4, images: int = 12, test: bool = False) -> Path:
    """Write pictures of the embedded benchmark as JPEG files in a folder per class.

    ``classes`` are names or how many; ``images`` how many of each; ``test`` takes the pictures in styles that training
    never shows. Beside them lies who drew them.
    """
    root = Path(folder).expanduser()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"{root} exists already: name a new folder, nothing is written over what is there")
    if images < 1:
        raise UserError(f"the number of images of each class must be at least 1, got {images}")
    pixels, renditions = emoji_r.read()
    side = "test" if test else "train"
    for name in _chosen(classes):
        own = [place for place, item in enumerate(renditions) if (item.label, item.split) == (name, side)]
        spread = np.unique(np.linspace(0, len(own) - 1, min(images, len(own))).round().astype(int))
        (root / name).mkdir(parents=True)
        for number, place in enumerate(own[index] for index in spread):
            picture = Image.fromarray(np.asarray(pixels[place])).resize(_SIDES[number % len(_SIDES)])
            picture.save(root / name / f"{renditions[place].emoji} ({renditions[place].style}).jpg", quality=_QUALITY)
    (root / "ATTRIBUTION.md").write_bytes((Path(emoji_r.__file__).parent / "ATTRIBUTION.md").read_bytes())
    return root


def _chosen(classes: Sequence[str] | int) -> tuple[str, ...]:
    """Names of classes that there are."""
    known = emoji_r.classes()
    if isinstance(classes, int):
        if not 1 <= classes <= len(known):
            raise UserError(f"there are {len(known)} classes of pictures: {classes} cannot be written")
        return known[:classes]
    for name in classes:
        if name not in known:
            raise UserError(f"there are no pictures of {name!r}: {suggest(name, known)}")
    return tuple(dict.fromkeys(classes))
