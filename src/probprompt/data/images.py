"""Image files: rotated by EXIF, palette, gray, 16-bit, transparent, CMYK or HEIC."""

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
"""Exceptions of Pillow for corrupted files."""
_AHEAD = 4  # results per thread that may wait, to bound the memory
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")


class UnreadableImageError(Exception):
    """A file that cannot be decoded, with the reason as the message."""

    def __init__(self, reason: str, passing: bool = False) -> None:
        super().__init__(reason)
        self.passing = passing
        """Whether the file may be readable next time, since the system failed."""


@dataclass(frozen=True)
class ImageFiles:
    """Image files of one folder and their decoded size."""

    root: Path
    names: tuple[str, ...]  # paths relative to the folder
    short_side: int | None  # largest short side in pixels; None keeps the size

    def __len__(self) -> int:
        return len(self.names)

    def read(self, row: int) -> Pixels:
        """Decode one file."""
        return read_image(self.root / self.names[row], self.short_side)


def read_image(source: Path | IO[bytes], short_side: int | None = None, formats: list[str] | None = None) -> Pixels:
    """Decode a file to RGB `(H, W, 3)` with a short side of at most ``short_side`` pixels.

    ``formats``: allowed formats by Pillow's names; None allows all.
    """
    try:
        with _open(source, formats) as opened:
            limit = Image.MAX_IMAGE_PIXELS
            if limit and opened.width * opened.height > limit:
                raise UnreadableImageError(f"{opened.width}x{opened.height} pixels exceed the limit of {limit}")
            image = to_rgb(ImageOps.exif_transpose(opened))
    except UnidentifiedImageError:
        raise UnreadableImageError("not a supported image format") from None
    except Image.DecompressionBombError:
        raise UnreadableImageError(f"far more than {Image.MAX_IMAGE_PIXELS} pixels") from None
    except (OSError, EOFError, MemoryError, *_BROKEN) as problem:
        # Errors of the system have an errno; those of Pillow about corrupted files do not.
        passing = isinstance(problem, MemoryError) or getattr(problem, "errno", None) is not None
        raise UnreadableImageError(str(problem).strip() or type(problem).__name__, passing) from None
    return np.asarray(reduce_to(image, short_side))


def _open(source: Path | IO[bytes], formats: list[str] | None) -> Image.Image:
    """Open a file; HEIC photos need an extra package."""
    available = None if formats is None else [name for name in formats if name in Image.OPEN]
    try:
        return Image.open(source, formats=available)
    except UnidentifiedImageError:
        if (formats is not None and "HEIF" not in formats) or not _is_heic(source):
            raise
    try:
        import pillow_heif
    except ImportError:
        message = "a HEIC photo; to read it, run: pip install 'probprompt[heic]'"
        raise UnreadableImageError(message, passing=True) from None
    pillow_heif.register_heif_opener()
    return Image.open(source, formats=formats and ["HEIF"])


def _is_heic(source: Path | IO[bytes]) -> bool:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return _is_heic(file)
    source.seek(0)
    head = source.read(12)
    source.seek(0)
    return head[4:8] == b"ftyp" and head[8:12] in _HEIC_BRANDS


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB, with transparency on white and 16-bit gray scaled to 8 bits."""
    if image.mode in _SIXTEEN_BIT or image.mode == "I":
        gray = np.asarray(image).astype(np.float64) / 257.0  # 65535 becomes 255
        return Image.fromarray(gray.clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def reduce_to(image: Image.Image, short_side: int | None) -> Image.Image:
    """Shrink an image to a short side of at most ``short_side`` pixels; never enlarge."""
    width, height = image.size
    if short_side is None or min(width, height) <= short_side:
        return image
    scale = short_side / min(width, height)
    return image.resize((max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.BILINEAR)


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[tuple[Item, Result | UnreadableImageError]]:
    """Read items in order on several threads, by default one per usable core."""

    def attempt(item: Item) -> Result | UnreadableImageError:
        try:
            return read(item)
        except UnreadableImageError as problem:
            return problem

    usable = getattr(os, "sched_getaffinity", None)  # missing on some systems
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
