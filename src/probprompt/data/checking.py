"""Whether a dataset on disk is what was published: counts, unreadable files, images on both sides."""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from probprompt.data.benchmarks import Folder
from probprompt.data.cache import decoders
from probprompt.data.datasets import Dataset, recognise
from probprompt.data.images import UnreadableImageError
from probprompt.data.layouts import LISTED, find_lists
from probprompt.data.sets import Benchmark, ImageData, ImageSet
from probprompt.errors import UserError, shorten
from probprompt.progress import ProgressCallback

_AHEAD = 4  # images per thread that may wait
_SHOWN = 5


@dataclass(frozen=True)
class Report:
    """What a check found."""

    facts: tuple[str, ...]
    """What is there."""
    remarks: tuple[str, ...]
    """What one should know, though nothing is wrong."""
    troubles: tuple[str, ...]
    """What is wrong."""


def check(source: Benchmark, watch: ProgressCallback, quick: bool = False) -> Report:
    """Look at all images of a dataset or folder; ``quick`` counts them and looks into a few files."""
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
    troubles = source.miscounts(data) if isinstance(source, Dataset) else []
    if quick:
        return Report(tuple(facts), tuple(_remarks(source, data)), tuple(troubles))
    with watch.stage("reading images", len(data.train) + len(data.test)):
        train, test = (_look(images, within, watch) for images, within in _sides(data))
    remarks = _remarks(source, data, train.sizes | test.sizes)
    damaged = [f"{name} ({reason})" for side in (train, test) for name, reason in side.unreadable.items()]
    troubles += [f"{len(damaged)} file(s) cannot be read: {shorten(damaged, 20)}"] if damaged else []
    _shared(train, test, source, remarks, troubles)
    return Report(tuple(facts), tuple(remarks), tuple(troubles))


def _remarks(source: Benchmark, data: ImageData, sizes: set[tuple[int, int]] | None = None) -> list[str]:
    """How a dataset differs from the published one, or what one should know of any other source."""
    return source.other_ways(data, sizes) if isinstance(source, Dataset) else source.remarks()


def _counts(data: ImageData) -> list[str]:
    """Say how many there are of what."""
    facts = [f"classes: {len(data.class_names)}"]
    for side, images in (("train", data.train), ("test", data.test)):
        per_class = np.bincount(images.labels, minlength=len(data.class_names))
        few, many = per_class.min(), per_class.max()
        each = f"{few}" if few == many else f"{few} to {many}"
        facts.append(f"{side}: {len(images)} images, {each} of each class")
    return facts


# Content ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """What the images of one side hold."""

    names: dict[bytes, list[str]]
    """By the hash of their pixels."""
    unreadable: dict[str, str]
    sizes: set[tuple[int, int]]
    """Widths and heights."""


def _sides(data: ImageData) -> Iterator[tuple[ImageSet, str]]:
    """Both sides, and the folder that their names leave out: that of the side, where each has one of its own."""
    roots = [images.files.root if images.files else None for images in (data.train, data.test)]
    for images, root in zip((data.train, data.test), roots, strict=True):
        yield images, f"{root.name}/" if root and roots[0] != roots[1] else ""


def _look(images: ImageSet, within: str, watch: ProgressCallback) -> _Seen:
    names: dict[bytes, list[str]] = {}
    unreadable: dict[str, str] = {}
    sizes: set[tuple[int, int]] = set()
    paths = (within + name for name in images.names)
    for name, found in zip(paths, _digests(images), strict=True):
        if isinstance(found, str):
            unreadable[name] = found
        else:
            content, size = found
            names.setdefault(content, []).append(name)
            sizes.add(size)
        watch.advance(1)
    return _Seen(names, unreadable, sizes)


def _digests(images: ImageSet) -> Iterator[tuple[bytes, tuple[int, int]] | str]:
    """The hash of each image's pixels and its size, or why it cannot be read; in order, on several threads."""

    def digest(index: int) -> tuple[bytes, tuple[int, int]] | str:
        try:
            pixels = images.read(index)
        except UnreadableImageError as problem:
            return str(problem)
        content = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
        content.update(np.ascontiguousarray(pixels).data)
        height, width, _ = pixels.shape
        return content.digest(), (width, height)

    workers = decoders()
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque(pool.submit(digest, index) for index in range(min(len(images), _AHEAD * workers)))
        for index in range(len(images)):
            yield waiting.popleft().result()
            if index + _AHEAD * workers < len(images):
                waiting.append(pool.submit(digest, index + _AHEAD * workers))


def _shared(train: _Seen, test: _Seen, source: Benchmark, remarks: list[str], troubles: list[str]) -> None:
    """Say which test images are training images, too: published data has some of its own."""
    pairs = [
        f"{name} = {train.names[content][0]}"
        for content in test.names
        if content in train.names
        for name in test.names[content]
    ]
    within = Counter({"train": _repeated(train), "test": _repeated(test)})
    remarks += [f"{count} image(s) of {side} are there more than once" for side, count in within.items() if count]
    if not pairs:
        return
    text = f"{len(pairs)} test image(s) are training images, too: {shorten(pairs, _SHOWN)}"
    known = source.figures.shared if isinstance(source, Dataset) else 0
    if known is None:
        remarks.append(f"{text}. Whether the published data has as many is not known")
    elif len(pairs) <= known:
        remarks.append(f"{text}. The published data has {known} of them")
    else:
        troubles.append(f"{text}. " + (f"The published data has {known} of them" if known else "Remove them from one"))


def _repeated(seen: _Seen) -> int:
    return sum(len(names) - 1 for names in seen.names.values())


def source_at(path: Path) -> Benchmark:
    """What lies in a folder: a published dataset where its layout or name says so, else a folder of class folders."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder: name a dataset's folder, or a benchmark")
    return recognise(path) or Folder(path)
