"""Check a dataset on disk against its publication: counts, encodings, unreadable files, duplicates."""

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
"""Endings of formats that can be lossless; of TIFF and WebP the header states it."""
_FORMATS = {"PNG", "BMP", "PPM", "TGA"}
_TIFF = {"raw", "packbits", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "lzma", "zstd"}
_JPEG = {".jpg", ".jpeg"}
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError)
_LOOKED = 64  # files of each split whose first bytes are read


@dataclass(frozen=True)
class Report:
    """Results of a check; notes are no errors."""

    facts: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def check(source: Benchmark, watch: ProgressCallback, quick: bool = False) -> Report:
    """Read all images of a dataset or folder; ``quick`` counts them and reads a few headers."""
    facts: list[str] = []
    try:
        if isinstance(source, Dataset):
            folder, layout = source.locate()
            facts.append(f"{source.name} in {folder}: {layout.form}")
            lists = find_lists(folder) if layout is LISTED else None
            facts += [f"cut by {lists[0]} and {lists[1]}"] if lists else []
        data = source.load(None)
    except UserError as problem:
        return Report(tuple(facts), (), (str(problem),))
    facts += _counts(data)
    if isinstance(source, Folder) and source.test is None:
        facts.append(f"no test set is here: {100 * source.test_fraction:.0f} % of each class are held out as one")
    problems = source.miscounts(data) if isinstance(source, Dataset) else []
    if quick:
        return Report(tuple(facts), tuple(_notes(source, data)), tuple(problems))
    roots = [images.files.root if images.files else None for images in (data.train, data.test)]
    within = [f"{root.name}/" if root and roots[0] != roots[1] else "" for root in roots]
    with watch.stage("reading images", len(data.train) + len(data.test)):
        train, test = _look(data.train, within[0], watch), _look(data.test, within[1], watch)
    notes = _notes(source, data, train.sizes | test.sizes)
    damaged = [f"{name} ({reason})" for side in (train, test) for name, reason in side.unreadable.items()]
    problems += [f"{len(damaged)} file(s) cannot be read: {shorten(damaged, 20)}"] if damaged else []
    _shared(train, test, source, notes, problems)
    return Report(tuple(facts), tuple(notes), tuple(problems))


def _notes(source: Benchmark, data: ImageData, sizes: set[tuple[int, int]] | None = None) -> list[str]:
    return other_differences(source, data, sizes) if isinstance(source, Dataset) else source.notes()


def _counts(data: ImageData) -> list[str]:
    facts = [f"classes: {len(data.class_names)}"]
    for side, images in (("train", data.train), ("test", data.test)):
        per_class = np.bincount(images.labels, minlength=len(data.class_names))
        few, many = per_class.min(), per_class.max()
        each = f"{few}" if few == many else f"{few} to {many}"
        facts.append(f"{side}: {len(images)} images, {each} of each class")
    return facts


@dataclass(frozen=True)
class _Seen:
    """The contents of the images of one split."""

    names: dict[bytes, list[str]] = field(default_factory=dict)
    """By the hash of their pixels."""
    unreadable: dict[str, str] = field(default_factory=dict)
    sizes: set[tuple[int, int]] = field(default_factory=set)
    """Widths and heights."""


def _look(images: ImageSet, within: str, watch: ProgressCallback) -> _Seen:
    """Read all images, whose names get ``within`` before them."""
    seen = _Seen()

    def digest(index: int) -> tuple[bytes, tuple[int, int]]:
        pixels = images.read(index)
        height, width, _ = pixels.shape
        content = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
        content.update(np.ascontiguousarray(pixels).data)
        return content.digest(), (width, height)

    for index, result in read_ahead(digest, range(len(images))):
        name = within + images.names[index]
        if isinstance(result, UnreadableImageError):
            seen.unreadable[name] = str(result)
        else:
            seen.names.setdefault(result[0], []).append(name)
            seen.sizes.add(result[1])
        watch.advance(1)
    return seen


def _shared(train: _Seen, test: _Seen, source: Benchmark, notes: list[str], problems: list[str]) -> None:
    shared = [content for content in test.names if content in train.names]
    pairs = [f"{name} = {train.names[content][0]}" for content in shared for name in test.names[content]]
    for side, seen in (("train", train), ("test", test)):
        repeated = sum(len(names) - 1 for names in seen.names.values())
        notes += [f"{repeated} image(s) of {side} are there more than once"] if repeated else []
    if not pairs:
        return
    text = f"{len(pairs)} test image(s) are training images, too: {shorten(pairs)}"
    known = source.figures.shared if isinstance(source, Dataset) else 0
    if known is None:
        notes.append(f"{text}. Whether the published data has as many is not known")
    elif len(pairs) <= known:
        notes.append(f"{text}. The published data has {known} of them")
    else:
        problems.append(f"{text}. " + (f"The published data has {known} of them" if known else "Remove them from one"))


def source_at(path: Path) -> Benchmark:
    """Return the published dataset in a folder, by its layout or name, else a folder of class folders."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder: name a dataset's folder, or a benchmark")
    return recognize(path) or Folder(path)


@dataclass(frozen=True)
class Header:
    """The header of an image file."""

    kind: str
    """Format, such as PNG, whatever the name."""
    lossless: bool
    size: tuple[int, int]
    """Width and height."""


def read_header(path: Path) -> Header | None:
    """Read a file's header without decoding it; None if it is not a readable image."""
    try:
        with path.open("rb") as file, Image.open(file) as image:
            kind = image.format or ""
            lossless = kind in _FORMATS or (kind == "TIFF" and image.info.get("compression") in _TIFF)
            return Header(kind, lossless or (kind == "WEBP" and _whole_webp(file)), image.size)
    except _BROKEN:
        return None


def _whole_webp(file: IO[bytes]) -> bool:
    file.seek(12)
    while len(head := file.read(8)) == 8:
        if head[:4] in (b"VP8L", b"VP8 "):
            return head[:4] == b"VP8L"
        size = int.from_bytes(head[4:], "little")
        file.seek(size + size % 2, 1)
    return False


def differences(source: Dataset, data: ImageData) -> list[str]:
    """Compare loaded data with the publication; only a few headers are read."""
    return [*source.miscounts(data), *other_differences(source, data)]


def other_differences(source: Dataset, data: ImageData, sizes: Collection[tuple[int, int]] | None = None) -> list[str]:
    """Return differences other than counts: re-encoded or resized images, other lists.

    ``sizes``: widths and heights if all images were read; else a few headers are read.
    """
    figures, due = source.figures, source.figures.size
    telling = due or figures.encoding == "lossless"
    headers = [header for path in _spread(data) if (header := read_header(path))] if telling else []
    seen = {header.size for header in headers} if sizes is None else set(sizes)
    found = _other_files(figures, data, headers)
    if due and (others := [f"{width} x {height}" for width, height in sorted(seen - {due})]):
        found.append(f"images have {shorten(others, 3)} pixels, published are {due[0]} x {due[1]}: they were resized")
    return found + _other_split(source.lists(), data)


def _other_files(figures: Figures, data: ImageData, headers: Collection[Header]) -> list[str]:
    names = chain.from_iterable(images.names for images in (data.train, data.test) if images.pixels is None)
    endings = {PurePath(name).suffix.lower() for name in names}
    if figures.encoding is None:
        return []
    due, allowed = {"jpeg": ("JPEG files", _JPEG), "lossless": ("images without loss", LOSSLESS)}[figures.encoding]
    others = {"JPEG" if ending in _JPEG else ending.lstrip(".").upper() for ending in endings - allowed}
    others |= {header.kind for header in headers if figures.encoding == "lossless" and not header.lossless}
    kinds = ", ".join(sorted(others))
    return [f"images are {kinds} files, published are {due}: they were encoded anew"] if others else []


def _other_split(published: set[str], data: ImageData) -> list[str]:
    if published and not data.lists:
        return [
            "no lists say which images are for training and which for the test: whether they are cut as published "
            "cannot be known"
        ]
    return [
        f"the list of the {side} images is not the published one (sha256 {digest}): results do not compare with "
        "published ones"
        for side, digest in zip(("training", "test"), data.lists, strict=False)
        if digest not in published
    ]


def _spread(data: ImageData) -> Iterator[Path]:
    """Return some files of each split, from its first to its last."""
    for images in (data.train, data.test):
        if images.files:
            for place in np.linspace(0, len(images) - 1, min(len(images), _LOOKED)).astype(int).tolist():
                yield images.files.root / images.names[place]
