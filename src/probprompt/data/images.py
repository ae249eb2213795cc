"""Read image files of any kind: rotated by EXIF, palette, gray, 16-bit, transparent, CMYK or HEIC."""

import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

Pixels = NDArray[np.uint8]
Item = TypeVar("Item")
Result = TypeVar("Result")

_JPEG = {".jpg", ".jpeg", ".jpe", ".jfif", ".jp2"}
_OTHER = {".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".avif"}
_HEIC = {".heic", ".heif", ".hif"}
SUFFIXES = frozenset(_JPEG | _OTHER | _HEIC)
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}
_BROKEN = (SyntaxError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, struct.error)
"""What damaged files raise."""
_AHEAD = 4  # results per thread that may wait to be taken: what bounds the memory
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")


class UnreadableImageError(Exception):
    """A file that holds no image that can be decoded; the message says why."""

    def __init__(self, reason: str, passing: bool = False) -> None:
        super().__init__(reason)
        self.passing = passing
        """Whether the same file may well be read next time: it was the machine that failed."""


@dataclass(frozen=True)
class ImageFiles:
    """Image files of one folder, and how large they are decoded."""

    root: Path
    names: tuple[str, ...]
    """Their paths below the folder."""
    short_side: int | None
    """What the short side is reduced to at most; None leaves the size as it is."""

    def __len__(self) -> int:
        return len(self.names)

    def read(self, row: int) -> Pixels:
        """Decode one of the files."""
        return read_image(self.root / self.names[row], self.short_side)


def read_image(source: Path | IO[bytes], short_side: int | None = None, formats: list[str] | None = None) -> Pixels:
    """Decode a file to RGB, (H, W, 3), its short side reduced to at most ``short_side`` pixels.

    ``formats`` are Pillow's names of those that are allowed; None allows all.
    """
    try:
        with _open(source, formats) as opened:
            limit = Image.MAX_IMAGE_PIXELS
            if limit and opened.width * opened.height > limit:
                raise UnreadableImageError(f"{opened.width} x {opened.height} pixels are more than {limit}")
            image = to_rgb(ImageOps.exif_transpose(opened))
    except UnidentifiedImageError:
        raise UnreadableImageError("no image format that can be read") from None
    except Image.DecompressionBombError:  # refused before it is decoded
        raise UnreadableImageError(f"it has far more than {Image.MAX_IMAGE_PIXELS} pixels") from None
    except (OSError, EOFError, MemoryError, *_BROKEN) as problem:
        # An error of the system has a number; what Pillow says of a damaged file has none.
        passing = isinstance(problem, MemoryError) or getattr(problem, "errno", None) is not None
        raise UnreadableImageError(str(problem).strip() or type(problem).__name__, passing) from None
    return np.asarray(reduce_to(image, short_side))


def _open(source: Path | IO[bytes], formats: list[str] | None) -> Image.Image:
    """Open a file; HEIC photos, whatever their name, need an extra package."""
    try:
        return Image.open(source, formats=_there(formats))
    except UnidentifiedImageError:
        if (formats is not None and "HEIF" not in formats) or not _is_heic(source):
            raise
    try:
        import pillow_heif
    except ImportError:
        message = "a photograph in HEIC; to read such files: pip install 'probprompt[heic]'"
        raise UnreadableImageError(message, passing=True) from None
    pillow_heif.register_heif_opener()
    return Image.open(source, formats=_there(formats))


def _there(formats: list[str] | None) -> list[str] | None:
    return None if formats is None else [name for name in formats if name in Image.OPEN]


def _is_heic(source: Path | IO[bytes]) -> bool:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return _is_heic(file)
    source.seek(0)
    head = source.read(12)
    source.seek(0)
    return head[4:8] == b"ftyp" and head[8:12] in _HEIC_BRANDS


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB: transparency is laid on white, 16-bit grey is scaled, everything else by its own colours."""
    if image.mode in _SIXTEEN_BIT or image.mode == "I":
        grey = np.asarray(image).astype(np.float64) / 257.0  # 65535 becomes 255
        return Image.fromarray(grey.clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def reduce_to(image: Image.Image, short_side: int | None) -> Image.Image:
    """Shrink so that the short side has at most ``short_side`` pixels; never enlarge."""
    width, height = image.size
    if short_side is None or min(width, height) <= short_side:
        return image
    scale = short_side / min(width, height)
    return image.resize((max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.BILINEAR)


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[tuple[Item, Result | UnreadableImageError]]:
    """Read items on several threads in their order, a few ahead; by default one thread per usable core."""

    def attempt(item: Item) -> Result | UnreadableImageError:
        try:
            return read(item)
        except UnreadableImageError as problem:
            return problem

    usable = getattr(os, "sched_getaffinity", None)  # not on every system
    workers = workers or (len(usable(0)) if usable else os.cpu_count() or 1)
    coming, pool = iter(items), ThreadPoolExecutor(workers)
    waiting: deque[tuple[Item, Future[Result | UnreadableImageError]]] = deque()
    try:
        while True:
            fresh = islice(coming, _AHEAD * workers - len(waiting))
            waiting.extend((item, pool.submit(attempt, item)) for item in fresh)
            if not waiting:
                return
            item, result = waiting.popleft()
            yield item, result.result()
    finally:
        pool.shutdown(cancel_futures=True)
