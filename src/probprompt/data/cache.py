"""Cache of decoded images: a folder is decoded once, and later runs map one file.

``<root>/images/<key>/`` contains ``pixels.u8``, the bytes of all images `(H, W, 3)`, and ``index.json``. The key is a
hash of the folder, the names, sizes and modification times of its files, the stored side and the decoders. The train,
validation and test images of one folder share an entry.

The root is ``PROBPROMPT_CACHE``, else ``probprompt`` in the user's cache folder; ``PROBPROMPT_CACHE=off`` disables the
cache. :meth:`ImageCache.clean` removes the least recently used entries; any entry can also be deleted manually.
Corrupted entries are decoded again. If the disk is full, images stay in memory.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Self, TypedDict

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import features

from probprompt.data.images import ImageFiles, Pixels, UnreadableImageError, read_ahead
from probprompt.errors import UserError
from probprompt.storage import file_hash, lock, sync

FORMAT = 1
SWITCH = "PROBPROMPT_CACHE"  # environment variable with the cache's root, or ``off``
WORTH = 8 * 2**20  # smallest size in bytes of a cached folder; smaller ones decode in about a second

_PIXELS, _INDEX = "pixels.u8", "index.json"
_ATTEMPTS = 3  # to move an entry into place, in case others do the same without locks
_CODECS = ("libjpeg_turbo", "jpg", "jpg_2000", "libtiff", "webp")  # decoded pixels depend on their versions
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)  # from corrupted entries

Read = Callable[[int], Pixels]
Advance = Callable[[int], None]
Note = Callable[[str], None]


class _Index(TypedDict):
    format: int
    key: str
    folder: str
    stored_side: int | str
    decoders: dict[str, str | None]
    sha256: str
    unreadable: list[tuple[int, str, bool]]
    sizes: list[list[int]]
    names: Sequence[str]


@dataclass(frozen=True)
class Decoded:
    """Decoded images of a set."""

    pixels: NDArray[np.uint8]  # all images `(H, W, 3)` in one array `(bytes,)`
    sizes: NDArray[np.int64]  # height and width `(n, 2)`; 0 for unreadable images
    unreadable: dict[int, str]  # reasons by row
    sha256: str | None = None  # hash of the pixels; None if not computed

    @classmethod
    def of(cls, images: Pixels) -> Self:
        """Return images `(n, H, W, 3)` that need no decoding."""
        sizes = np.tile(np.array(images.shape[1:3], np.int64), (len(images), 1))
        pixels = np.empty(images.shape, np.uint8)
        for color in range(3):  # twice as fast as one copy if the color planes are stored separately
            pixels[..., color] = images[..., color]
        return cls(pixels.reshape(-1), sizes, {})

    def hashed(self) -> Self:
        """Return a copy with the hash of the pixels."""
        return replace(self, sha256=hashlib.sha256(self.pixels.data).hexdigest())

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Offset of each image in the pixels `(n,)`."""
        ends = np.cumsum(3 * self.sizes.prod(axis=1))
        return np.concatenate([np.zeros(1, np.int64), ends])[: len(self.sizes)]


def decode(read: Read, count: int, advance: Advance, workers: int | None = None) -> Decoded:
    """Decode images into memory."""
    pixels = bytearray()  # grows in place, without copies of images
    sizes, failed = _decode_into(pixels.extend, read, count, advance, workers)
    flat = np.frombuffer(pixels, np.uint8) if pixels else np.empty(0, np.uint8)
    return Decoded(flat, sizes, {row: str(problem) for row, problem in failed.items()})


def _decode_into(
    write: Callable[[memoryview], None], read: Read, count: int, advance: Advance, workers: int | None
) -> tuple[NDArray[np.int64], dict[int, UnreadableImageError]]:
    """Write the bytes of images in order; return sizes `(n, 2)` and errors by row."""
    sizes, failed = np.zeros((count, 2), np.int64), dict[int, UnreadableImageError]()
    for row, image in read_ahead(read, range(count), workers):
        if isinstance(image, UnreadableImageError):
            failed[row] = image
        else:
            sizes[row] = image.shape[:2]
            write(np.ascontiguousarray(image).reshape(-1).data)
        advance(1)
    return sizes, failed


@dataclass(frozen=True)
class ImageCache:
    """Decoded images of folders below one root."""

    root: Path
    worth: int = WORTH

    @classmethod
    def default(cls) -> Self | None:
        """Return the user's cache; None if it is disabled."""
        root = os.environ.get(SWITCH, "")
        if root.lower() == "off":
            return None
        if root:
            return cls(Path(root).expanduser().absolute())
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            return cls((xdg if xdg.is_absolute() else Path.home() / ".cache") / "probprompt")
        except RuntimeError:  # no home directory
            return None

    @property
    def folder(self) -> Path:
        """Folder of the entries."""
        return self.root / "images"

    def entry(self, files: ImageFiles) -> "Entry | None":
        """Return the entry of these files, filled or not; None if they are too small."""
        key, size = _fingerprint(files)
        return Entry(self.folder / key, files) if size >= self.worth else None

    def size(self) -> int:
        """Return the size of all entries in bytes."""
        return sum(map(_size, self.folder.glob("*")))

    def clean(self, keep_bytes: int = 0) -> int:
        """Remove the least recently used entries beyond ``keep_bytes``; return bytes freed.

        Runs may keep using a removed entry.
        """
        entries = [path for path in sorted(self.folder.glob("[!.]*")) if path.is_dir()]
        total = freed = 0
        for path in sorted(entries, key=_last_used, reverse=True):
            size = _size(path)
            total += size
            if total > keep_bytes and _discard(path):
                freed += size
        for path in self.folder.glob("*.lock"):
            with suppress(BlockingIOError), lock(path) or nullcontext() as held:
                if held:
                    _remove_parts(path.with_suffix(""))
        return freed


@dataclass(frozen=True)
class Entry:
    """The cache entry of a folder's images, filled or not."""

    folder: Path
    files: ImageFiles

    def read(self, verify: bool = False) -> Decoded | None:
        """Return the images; None if missing or corrupted. ``verify`` also checks the hash."""
        try:
            index: _Index = json.loads((self.folder / _INDEX).read_text(encoding="ascii"))
            sizes = np.array(index["sizes"], dtype=np.int64).reshape(-1, 2)
            unreadable = {int(row): str(reason) for row, reason, _ in index["unreadable"]}
            passing = [int(row) for row, _, passing in index["unreadable"] if passing]
            if not self._whole(index, sizes, unreadable):
                return None
            sha256 = str(index["sha256"])
            if verify and file_hash(self.folder / _PIXELS) != sha256:
                _discard(self.folder)  # other reads would not notice the corruption
                return None
            pixels = np.memmap(self.folder / _PIXELS, np.uint8, "r") if sizes.any() else np.empty(0, np.uint8)
        except _BROKEN:
            return None
        if any(not isinstance(image, UnreadableImageError) for _, image in read_ahead(self.files.read, passing)):
            return None
        with suppress(OSError):
            os.utime(self.folder)  # for the order of removal
        return Decoded(pixels, sizes, unreadable, sha256)

    def write(self, advance: Advance, note: Note, workers: int | None = None) -> Decoded:
        """Decode and store the files; keep the images in memory if storing fails."""
        done = reported = 0

        def count(steps: int) -> None:
            nonlocal done, reported
            done += steps
            if done > reported:  # decoding again does not count twice
                advance(done - reported)
                reported = done

        try:
            return self._fill(count, note, workers)
        except OSError as problem:
            note(
                f"Could not store decoded images in {self.folder.parent} ({problem.strerror or problem}). They stay in "
                f"memory for this run only. Free some space, or set {SWITCH} to another folder."
            )
        done = 0
        try:
            return decode(self.files.read, len(self.files), count, workers)
        except MemoryError:
            raise UserError(
                f"The images of {self.files.root} fit neither in {self.folder.parent} nor in memory. Free some space, "
                f"set {SWITCH} to another folder, or set a smaller data.stored_size."
            ) from None

    def _fill(self, advance: Advance, note: Note, workers: int | None) -> Decoded:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self._lock(note) or nullcontext() as held:
            if held:
                decoded = self.read()  # another process may have been first
                if decoded is not None:
                    advance(len(self.files))
                    return decoded
                _remove_parts(self.folder)
            part = _part(self.folder)
            try:
                part.mkdir()
                self._decode_to(part, advance, workers)
                self._put(part)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            decoded = self.read()
        if decoded is None:
            raise OSError("the written entry cannot be read")
        return decoded

    def _lock(self, note: Note) -> IO[str] | None:
        path = self.folder.with_suffix(".lock")
        try:
            return lock(path)
        except BlockingIOError:
            note("Waiting for another process that decodes the same images.")
            return lock(path, wait=True)

    def _decode_to(self, folder: Path, advance: Advance, workers: int | None) -> None:
        digest = hashlib.sha256()
        with (folder / _PIXELS).open("wb") as stream:

            def save(data: memoryview) -> None:
                digest.update(data)
                stream.write(data)

            sizes, failed = _decode_into(save, self.files.read, len(self.files), advance, workers)
        sync(folder / _PIXELS)
        index: _Index = {
            "format": FORMAT,
            "key": self.folder.name,
            "folder": str(self.files.root.absolute()),
            "stored_side": self.files.short_side or "full",
            "decoders": _versions(),
            "sha256": digest.hexdigest(),
            "unreadable": [(row, str(problem), problem.passing) for row, problem in failed.items()],
            "sizes": sizes.tolist(),
            "names": self.files.names,
        }
        with (folder / _INDEX).open("w", encoding="ascii") as text:
            json.dump(index, text)
        sync(folder / _INDEX)

    def _put(self, part: Path) -> None:
        """Move a finished folder into place, unless another process wrote a valid entry."""
        for attempt in range(_ATTEMPTS):
            try:
                part.rename(self.folder)
                return
            except OSError:
                if self.read() is not None:
                    return
                if not _discard(self.folder) and attempt == _ATTEMPTS - 1:
                    raise

    def _whole(self, index: _Index, sizes: NDArray[np.int64], unreadable: dict[int, str]) -> bool:
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


def _fingerprint(files: ImageFiles) -> tuple[str, int]:
    root, total = files.root.resolve(), 0
    settings = json.dumps([FORMAT, files.short_side, _versions(), str(root)])
    digest = hashlib.sha256(settings.encode("ascii"))
    for name in files.names:
        try:
            status = (root / name).stat()
            state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        except OSError:  # deleted after listing
            state = (0, -1, -1)
        total += state[0]
        digest.update(f"\n{name}\0{state}".encode(errors="surrogateescape"))
    return digest.hexdigest(), total


def _versions() -> dict[str, str | None]:
    return {"pillow": PIL.__version__, **{name: features.version(name) for name in _CODECS}}


def _last_used(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # another process is removing it
        return 0


def _size(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.glob("*"))
    except OSError:
        return 0


def _part(folder: Path) -> Path:
    """Return an unused path next to a folder for incomplete or discarded contents."""
    return folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")


def _remove_parts(folder: Path) -> None:
    for path in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(path, ignore_errors=True)


def _discard(folder: Path) -> bool:
    """Remove a folder atomically, by a rename; return False if that fails."""
    part = _part(folder)
    try:
        folder.rename(part)
    except OSError:
        return False
    shutil.rmtree(part, ignore_errors=True)
    return True
