"""Decoded images, kept on disk: a folder of files is decoded once, and read by every later run as one mapped file.

``<root>/images/<key>/`` holds ``pixels.u8``, the bytes of all images (H, W, 3) one after the other, and
``index.json``, which says their names and sizes in that order, which could not be read and why, the stored side, the
versions of the decoders and the sha256 of the pixels. The key is a hash of all that decides the content: the folder,
the files' names, sizes and times of modification, the stored side and the decoders. A file that changes, or another
stored side, is another entry; train, validation and test images of one folder share one.

The root is ``PROBPROMPT_CACHE``, else ``probprompt`` in the user's cache folder; ``PROBPROMPT_CACHE=off`` keeps
nothing. Files of less than :data:`WORTH` bytes in all are decoded in about a second, and not kept either. Nothing is
removed by itself: :meth:`ImageCache.clean` removes what was used longest ago, and deleting any entry, or the root, does
no harm. A damaged entry is decoded again; where the disk takes no more, images are held in memory.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import features

from probprompt.data.images import ImageFiles, Pixels, UnreadableImageError, read_ahead
from probprompt.errors import UserError
from probprompt.storage import lock, sync

FORMAT = 1
SWITCH = "PROBPROMPT_CACHE"
"""The environment variable that names the cache's root, or switches the cache off when it is ``off``."""
WORTH = 8 * 2**20
"""Bytes of files from which on their decoded images are kept."""

_PIXELS, _INDEX = "pixels.u8", "index.json"
_ATTEMPTS = 3  # to put an entry in its place, should others be doing the same without locks
_CODECS = ("libjpeg_turbo", "jpg", "jpg_2000", "libtiff", "webp")  # their versions decide pixels
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)  # from reading an entry

Read = Callable[[int], Pixels]
Advance = Callable[[int], None]
Note = Callable[[str], None]


# Decoding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """Images of a set in its order: all pixels, and what could not be read."""

    pixels: NDArray[np.uint8]
    """(bytes,): the images (H, W, 3) one after the other."""
    sizes: NDArray[np.int64]
    """(n, 2): height and width, 0 of an image that could not be read."""
    unreadable: dict[int, str]
    """Which could not be read, and why."""
    sha256: str | None = None
    """Of the pixels, where it is known."""

    @classmethod
    def of(cls, images: Pixels) -> Self:
        """Images (n, H, W, 3) that need no decoding."""
        sizes = np.tile(np.array(images.shape[1:3], np.int64), (len(images), 1))
        whole = np.empty(images.shape, np.uint8)
        for colour in range(3):  # twice as fast as at once, where colours lie apart
            whole[..., colour] = images[..., colour]
        return cls(whole.reshape(-1), sizes, {})

    def hashed(self) -> Self:
        """The same with the hash of its pixels."""
        return replace(self, sha256=hashlib.sha256(self.pixels.data).hexdigest())

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """(n,): where each image begins in the pixels."""
        ends = np.cumsum(3 * self.sizes.prod(axis=1))
        return np.concatenate([np.zeros(1, np.int64), ends])[: len(self.sizes)]


def decode(read: Read, count: int, advance: Advance, workers: int | None = None) -> Decoded:
    """Decode images into memory."""
    pixels = bytearray()  # grows in place, so that no image is held twice

    def extend(data: memoryview) -> None:
        nonlocal pixels
        pixels += data

    sizes, failed = _decode_into(extend, read, count, advance, workers)
    flat = np.frombuffer(pixels, np.uint8) if pixels else np.empty(0, np.uint8)
    return Decoded(flat, sizes, {row: str(problem) for row, problem in failed.items()})


def _decode_into(
    write: Callable[[memoryview], None], read: Read, count: int, advance: Advance, workers: int | None
) -> tuple[NDArray[np.int64], dict[int, UnreadableImageError]]:
    """Hand over the flat bytes of images in their order; returns sizes (n, 2) and what could not be read."""
    sizes, failed = np.zeros((count, 2), np.int64), dict[int, UnreadableImageError]()
    for row, image in read_ahead(read, range(count), workers):
        if isinstance(image, UnreadableImageError):
            failed[row] = image
        else:
            sizes[row] = image.shape[:2]
            write(np.ascontiguousarray(image).reshape(-1).data)
        advance(1)
    return sizes, failed


# Keeping ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageCache:
    """Decoded images of folders, kept under one root."""

    root: Path
    worth: int = WORTH
    """Bytes of files from which on they are kept."""

    @classmethod
    def usual(cls) -> Self | None:
        """The cache of this user; None where it is switched off."""
        named = os.environ.get(SWITCH, "")
        if named.lower() == "off":
            return None
        if named:
            return cls(Path(named).expanduser().absolute())
        shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            return cls((shared if shared.is_absolute() else Path.home() / ".cache") / "probprompt")
        except RuntimeError:  # a user without a home
            return None

    @property
    def folder(self) -> Path:
        """Where the entries are."""
        return self.root / "images"

    def entry(self, files: ImageFiles) -> "Entry | None":
        """The place of these files' images, filled or not; None where they are not worth one."""
        key, size = _fingerprint(files)
        return Entry(self.folder / key, files) if size >= self.worth else None

    def size(self) -> int:
        """Bytes of all entries."""
        return sum(_size(path) for path in _inside(self.folder) if path.is_dir())

    def clean(self, keep_bytes: int = 0) -> int:
        """Remove entries, those used longest ago first, until the others take so many bytes; returns how many went.

        A run that is using an entry goes on with it undisturbed.
        """
        entries = [path for path in _inside(self.folder) if path.is_dir() and not path.name.startswith(".")]
        taken = freed = 0
        for path in sorted(entries, key=_last_used, reverse=True):
            size = _size(path)
            taken += size
            if taken > keep_bytes and _discard(path):
                freed += size
        for path in _inside(self.folder):
            if path.suffix == ".lock":
                with suppress(BlockingIOError), lock(path) or nullcontext() as held:
                    if held:
                        _remove_parts(path.with_suffix(""))
        return freed


@dataclass(frozen=True)
class Entry:
    """A folder's place in the cache, whether its images are there or not."""

    folder: Path
    files: ImageFiles

    def read(self, verify: bool = False) -> Decoded | None:
        """What is there; None where nothing is, or it is damaged. ``verify`` goes through all of the pixels."""
        try:
            index = json.loads((self.folder / _INDEX).read_text(encoding="ascii"))
            sizes = np.array(index["sizes"], dtype=np.int64).reshape(-1, 2)
            unreadable = {int(row): str(reason) for row, reason, _ in index["unreadable"]}
            passing = [int(row) for row, _, passing in index["unreadable"] if passing]
            if not self._whole(index, sizes, unreadable):
                return None
            if verify and not self._intact(index):
                _discard(self.folder)  # nothing else shows that it is damaged
                return None
            pixels = np.memmap(self.folder / _PIXELS, np.uint8, "r") if sizes.any() else np.empty(0, np.uint8)
            sha256 = str(index["sha256"])
        except _DAMAGE:
            return None
        if any(self._readable(row) for row in passing):
            return None
        with suppress(OSError):
            os.utime(self.folder)  # what was used last is removed last
        return Decoded(pixels, sizes, unreadable, sha256)

    def write(self, advance: Advance, note: Note, workers: int | None = None) -> Decoded:
        """Decode the files and keep them; where they cannot be kept, hold them in memory."""
        done = 0

        def count(steps: int) -> None:
            nonlocal done
            done += steps
            advance(steps)

        def count_new(steps: int) -> None:
            nonlocal done
            done -= steps
            if done < 0:
                advance(steps)

        try:
            return self._fill(count, note, workers)
        except OSError as problem:
            note(
                f"decoded images cannot be kept in {self.folder.parent} ({problem.strerror or problem}): they are held "
                f"in memory, and will be decoded again. Make room, or name another folder with {SWITCH}"
            )
        try:
            return decode(self.files.read, len(self.files), count_new, workers)
        except MemoryError:
            raise UserError(
                f"the images of {self.files.root} fit neither the disk of {self.folder.parent} nor the memory: "
                f"make room, name another folder with {SWITCH}, or store them smaller (data.stored_side)"
            ) from None

    def _fill(self, advance: Advance, note: Note, workers: int | None) -> Decoded:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self._lock(note) or nullcontext() as held:
            if held:
                found = self.read()  # another process may have been first
                if found is not None:
                    advance(len(self.files))
                    return found
                _remove_parts(self.folder)
            part = _part(self.folder)
            try:
                part.mkdir()
                self._decode_to(part, advance, workers)
                self._put(part)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            found = self.read()
        if found is None:
            raise OSError("what was written cannot be read back")
        return found

    def _lock(self, note: Note) -> IO[str] | None:
        path = self.folder.with_suffix(".lock")
        try:
            return lock(path)
        except BlockingIOError:
            note("another process is decoding the same images: waiting for it")
            return lock(path, wait=True)

    def _decode_to(self, folder: Path, advance: Advance, workers: int | None) -> None:
        digest = hashlib.sha256()
        with (folder / _PIXELS).open("wb") as stream:

            def keep(data: memoryview) -> None:
                digest.update(data)
                stream.write(data)

            sizes, failed = _decode_into(keep, self.files.read, len(self.files), advance, workers)
        sync(folder / _PIXELS)
        index = {
            "format": FORMAT,
            "key": self.folder.name,
            "folder": str(self.files.root.absolute()),
            "stored_side": self.files.short_side or "full",
            "decoders": _versions(),
            "sha256": digest.hexdigest(),
            "unreadable": [[row, str(problem), problem.passing] for row, problem in failed.items()],
            "sizes": sizes.tolist(),
            "names": self.files.names,
        }
        with (folder / _INDEX).open("w", encoding="ascii") as text:
            json.dump(index, text)
        sync(folder / _INDEX)

    def _put(self, part: Path) -> None:
        """Move what is finished to its place; whole entries of others are left there, damaged ones are not."""
        for attempt in range(_ATTEMPTS):
            try:
                part.rename(self.folder)
                return
            except OSError:
                if self.read() is not None:
                    return
                if not _discard(self.folder) and attempt == _ATTEMPTS - 1:
                    raise

    def _whole(self, index: dict[str, Any], sizes: NDArray[np.int64], unreadable: dict[int, str]) -> bool:
        """Whether an index is of these files, and the pixels are as many as it says."""
        areas = sizes.prod(axis=1)
        return bool(
            index["format"] == FORMAT
            and index["key"] == self.folder.name
            and tuple(index["names"]) == self.files.names
            and len(sizes) == len(self.files)
            and (sizes >= 0).all()
            and np.flatnonzero(areas == 0).tolist() == sorted(unreadable)
            and (self.folder / _PIXELS).stat().st_size == 3 * areas.sum()
        )

    def _intact(self, index: dict[str, Any]) -> bool:
        with (self.folder / _PIXELS).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == str(index["sha256"])

    def _readable(self, row: int) -> bool:
        try:
            self.files.read(row)
        except UnreadableImageError:
            return False
        return True


def _fingerprint(files: ImageFiles) -> tuple[str, int]:
    """A hash of all that decides what decoding gives, and how many bytes the files have."""
    root, total = files.root.resolve(), 0
    about = json.dumps([FORMAT, files.short_side, _versions(), str(root)])
    digest = hashlib.sha256(about.encode("ascii"))
    for name in files.names:
        try:
            found = (root / name).stat()
            state = (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        except OSError:  # gone since it was listed: unreadable, for now
            state = (0, -1, -1)
        total += state[0]
        digest.update(f"\n{name}\0{state}".encode(errors="surrogateescape"))
    return digest.hexdigest(), total


def _versions() -> dict[str, str | None]:
    return {"pillow": PIL.__version__, **{name: features.version(name) for name in _CODECS}}


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _last_used(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # somebody else is removing it
        return 0


def _size(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in _inside(folder))
    except OSError:
        return 0


def _part(folder: Path) -> Path:
    """A name beside a folder, for what is not whole yet or not wanted any more."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")


def _remove_parts(folder: Path) -> None:
    """Remove what killed writers of a folder left behind; only for who holds its lock."""
    for path in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(path, ignore_errors=True)


def _discard(folder: Path) -> bool:
    """Remove a folder at once, so that nobody meets half of it; False where that fails."""
    aside = _part(folder)
    try:
        folder.rename(aside)
    except OSError:
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True
