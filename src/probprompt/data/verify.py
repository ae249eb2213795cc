"""Checks of a dataset on disk: counts, encodings, unreadable files, duplicates."""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePath
from typing import IO

import numpy as np
from PIL import Image

from probprompt.data.datasets import Benchmark, Folder, ImageData, ImageSet
from probprompt.data.images import UnreadableImageError, read_ahead
from probprompt.data.layouts import LISTED, find_lists
from probprompt.data.published import Dataset, Figures, recognize
from probprompt.errors import UserError, shorten
from probprompt.progress import ProgressCallback

LOSSLESS = frozenset({".png", ".bmp", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".tif", ".tiff", ".webp"})
"""Suffixes of formats that can be lossless; TIFF and WebP state it in the header."""
_FORMATS = {"PNG", "BMP", "PPM", "TGA"}
_TIFF = {"raw", "packbits", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "lzma", "zstd"}
_JPEG = {".jpg", ".jpeg"}
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError)
_NUM_HEADERS = 64  # headers read per split


@dataclass(frozen=True)
class Report:
    """Results of a check; only ``problems`` are errors."""

    facts: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def check(source: Benchmark, progress: ProgressCallback, quick: bool = False) -> Report:
    """Read all images of a source; ``quick`` counts them and reads a few headers."""
    facts: list[str] = []
    try:
        if isinstance(source, Dataset):
            folder, layout = source.locate()
            facts.append(f"{source.name} in {folder}: {layout.form}")
            lists = find_lists(folder) if layout is LISTED else None
            facts += [f"split by {lists[0]} and {lists[1]}"] if lists else []
        data = source.load(None)
    except UserError as problem:
        return Report(tuple(facts), (), (str(problem),))
    facts += _counts(data)
    if isinstance(source, Folder) and source.test is None:
        facts.append(f"no test folder: holds out {100 * source.test_fraction:.0f}% of each class for testing")
    problems = source.miscounts(data) if isinstance(source, Dataset) else []
    if quick:
        return Report(tuple(facts), tuple(_notes(source, data)), tuple(problems))
    roots = [images.files.root if images.files else None for images in (data.train, data.test)]
    within = [f"{root.name}/" if root and roots[0] != roots[1] else "" for root in roots]
    with progress.stage("reading images", len(data.train) + len(data.test)):
        train, test = _read_all(data.train, within[0], progress), _read_all(data.test, within[1], progress)
    notes = _notes(source, data, train.sizes | test.sizes)
    unreadable = [f"{name} ({reason})" for split in (train, test) for name, reason in split.unreadable.items()]
    problems += [f"{len(unreadable)} unreadable file(s): {shorten(unreadable, 20)}"] if unreadable else []
    _find_duplicates(train, test, source, notes, problems)
    return Report(tuple(facts), tuple(notes), tuple(problems))


def _notes(source: Benchmark, data: ImageData, sizes: set[tuple[int, int]] | None = None) -> list[str]:
    return other_differences(source, data, sizes) if isinstance(source, Dataset) else source.notes()


def _counts(data: ImageData) -> list[str]:
    facts = [f"classes: {len(data.class_names)}"]
    for split, images in (("train", data.train), ("test", data.test)):
        per_class = np.bincount(images.labels, minlength=len(data.class_names))
        low, high = per_class.min(), per_class.max()
        each = f"{low}" if low == high else f"{low} to {high}"
        facts.append(f"{split}: {len(images)} images, {each} per class")
    return facts


@dataclass(frozen=True)
class _SplitContents:
    names: dict[bytes, list[str]] = field(default_factory=dict)  # by hash of the pixels
    unreadable: dict[str, str] = field(default_factory=dict)
    sizes: set[tuple[int, int]] = field(default_factory=set)  # widths and heights


def _read_all(images: ImageSet, prefix: str, progress: ProgressCallback) -> _SplitContents:
    contents = _SplitContents()

    def digest(index: int) -> tuple[bytes, tuple[int, int]]:
        pixels = images.read(index)
        height, width, _ = pixels.shape
        content = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
        content.update(np.ascontiguousarray(pixels).data)
        return content.digest(), (width, height)

    for index, result in read_ahead(digest, range(len(images))):
        name = prefix + images.names[index]
        if isinstance(result, UnreadableImageError):
            contents.unreadable[name] = str(result)
        else:
            contents.names.setdefault(result[0], []).append(name)
            contents.sizes.add(result[1])
        progress.advance(1)
    return contents


def _find_duplicates(
    train: _SplitContents, test: _SplitContents, source: Benchmark, notes: list[str], problems: list[str]
) -> None:
    shared = [content for content in test.names if content in train.names]
    pairs = [f"{name} = {train.names[content][0]}" for content in shared for name in test.names[content]]
    for split, contents in (("train", train), ("test", test)):
        repeated = sum(len(names) - 1 for names in contents.names.values())
        notes += [f"{repeated} duplicate image(s) in {split}"] if repeated else []
    if not pairs:
        return
    text = f"{len(pairs)} test image(s) are also training images: {shorten(pairs)}."
    known = source.figures.shared if isinstance(source, Dataset) else 0
    if known is None:
        notes.append(f"{text} The published number is unknown.")
    elif len(pairs) <= known:
        notes.append(f"{text} The published data has {known}.")
    else:
        problems.append(f"{text} " + (f"The published data has {known}." if known else "Remove them from one split."))


def source_at(path: Path) -> Benchmark:
    """Return the published dataset in a folder, else the folder of class folders."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder. Pass a dataset's folder or a benchmark.")
    return recognize(path) or Folder(path)


@dataclass(frozen=True)
class Header:
    """The header of an image file."""

    kind: str  # format such as PNG, independent of the file name
    lossless: bool
    size: tuple[int, int]  # width and height


def read_header(path: Path) -> Header | None:
    """Read a file's header without decoding it; None if it is not a readable image."""
    try:
        with path.open("rb") as file, Image.open(file) as image:
            kind = image.format or ""
            lossless = kind in _FORMATS or (kind == "TIFF" and image.info.get("compression") in _TIFF)
            return Header(kind, lossless or (kind == "WEBP" and _is_lossless_webp(file)), image.size)
    except _BROKEN:
        return None


def _is_lossless_webp(file: IO[bytes]) -> bool:
    file.seek(12)
    while len(head := file.read(8)) == 8:
        if head[:4] in (b"VP8L", b"VP8 "):
            return head[:4] == b"VP8L"
        size = int.from_bytes(head[4:], "little")
        file.seek(size + size % 2, 1)
    return False


def differences(source: Dataset, data: ImageData) -> list[str]:
    """Return differences of loaded data from the publication, reading a few headers."""
    return [*source.miscounts(data), *other_differences(source, data)]


def other_differences(source: Dataset, data: ImageData, sizes: Collection[tuple[int, int]] | None = None) -> list[str]:
    """Return differences other than counts: re-encoded or resized images, other lists.

    ``sizes``: widths and heights of all images; None reads a few headers.
    """
    figures, published = source.figures, source.figures.size
    needed = published or figures.encoding == "lossless"
    headers = [header for path in _spread(data) if (header := read_header(path))] if needed else []
    present = {header.size for header in headers} if sizes is None else set(sizes)
    differences = _other_files(figures, data, headers)
    if published and (others := [f"{width} x {height}" for width, height in sorted(present - {published})]):
        size = f"{published[0]} x {published[1]}"  # runs record this text, and compare it: it stays
        differences.append(f"images have {shorten(others, 3)} pixels, published are {size}: they were resized")
    return differences + _other_split(source.lists(), data)


def _other_files(figures: Figures, data: ImageData, headers: Collection[Header]) -> list[str]:
    names = chain.from_iterable(images.names for images in (data.train, data.test) if images.pixels is None)
    suffixes = {PurePath(name).suffix.lower() for name in names}
    if figures.encoding is None:
        return []
    published, allowed = {"jpeg": ("JPEG files", _JPEG), "lossless": ("images without loss", LOSSLESS)}[
        figures.encoding
    ]
    others = {"JPEG" if suffix in _JPEG else suffix.lstrip(".").upper() for suffix in suffixes - allowed}
    others |= {header.kind for header in headers if figures.encoding == "lossless" and not header.lossless}
    kinds = ", ".join(sorted(others))
    return [f"images are {kinds} files, published are {published}: they were encoded anew"] if others else []


def _other_split(published: set[str], data: ImageData) -> list[str]:
    if published and not data.lists:
        return ["no lists of training and test images: the split may differ from the published one"]
    return [
        f"the list of {split} images is not the published one (SHA-256 {digest}); results are not comparable"
        for split, digest in zip(("training", "test"), data.lists, strict=False)
        if digest not in published
    ]


def _spread(data: ImageData) -> Iterator[Path]:
    for images in (data.train, data.test):
        if images.files:
            for place in np.linspace(0, len(images) - 1, min(len(images), _NUM_HEADERS)).astype(int).tolist():
                yield images.files.root / images.names[place]
