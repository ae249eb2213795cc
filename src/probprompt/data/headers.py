"""How image files are stored, by their first bytes: in which format, with loss or without, and how large."""

from dataclasses import dataclass
from pathlib import Path
from typing import IO

from PIL import Image

LOSSLESS = frozenset({".png", ".bmp", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".tif", ".tiff", ".webp"})
"""Endings of formats that can keep every pixel as it is; of TIFF and WebP the file itself says whether it does."""

_FORMATS = {"PNG", "BMP", "PPM", "TGA"}
_TIFF = {"raw", "packbits", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "lzma", "zstd"}
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError)


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    kind: str
    """Its format, such as PNG, whatever its name ends in."""
    lossless: bool
    """Whether it surely keeps every pixel as it was."""
    size: tuple[int, int]
    """Width and height."""


def read_header(path: Path) -> Header | None:
    """What a file says of itself, decoding nothing; None where it holds no image that can be read."""
    try:
        with path.open("rb") as file, Image.open(file) as image:
            kind = image.format or ""
            if kind == "WEBP":
                lossless = _whole_webp(file)
            elif kind == "TIFF":
                lossless = image.info.get("compression") in _TIFF
            else:
                lossless = kind in _FORMATS
            return Header(kind, lossless, image.size)
    except _BROKEN:
        return None


def _whole_webp(file: IO[bytes]) -> bool:
    """Whether the first picture of a WebP file is stored without loss."""
    file.seek(12)
    while len(head := file.read(8)) == 8:
        if head[:4] in (b"VP8L", b"VP8 "):
            return head[:4] == b"VP8L"
        size = int.from_bytes(head[4:], "little")
        file.seek(size + size % 2, 1)
    return False
