"""Archives unpacked safely: nothing outside of the folder, no links, no devices, and not without end."""

import errno
import lzma
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from probprompt.errors import UserError

MEMBERS = 500_000
"""Files that an archive may hold."""
BYTES = 16 * 2**30
"""Bytes that they may have together."""
GROWTH = 50
"""How many times the size of the archive that may be, at most; small archives may have 64 MiB in any case."""

_CHUNK = 2**20
_DRIVE = re.compile(r"[A-Za-z]:")
_BLOCK = tarfile.BLOCKSIZE
_PADDING = 2**26  # empty bytes that may follow the last file
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError)
_STARTS = (b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")  # of zip, gzip, bzip2 and xz
Advance = Callable[[int], None]


class ArchiveError(UserError):
    """An archive that is damaged, refused, or holds something else than it should: another one is needed."""


@dataclass(frozen=True)
class _Member:
    """A file or folder in an archive."""

    name: str
    size: int
    folder: bool
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, target: Path, advance: Advance = lambda _: None) -> None:
    """Unpack a tar or zip archive into a folder that is empty or not there yet; ``advance`` is told of its bytes."""
    target.mkdir(parents=True, exist_ok=True)
    limit = min(BYTES, max(GROWTH * archive.stat().st_size, 64 * 2**20))
    left = limit
    try:
        with _opened(archive) as members:
            for count, member in enumerate(members):
                left -= member.size
                if left < 0 or count >= MEMBERS:
                    raise ArchiveError(f"{archive} holds more than {limit} bytes or {MEMBERS} files: it is refused")
                _write(archive, member, target / _safe(archive, member.name), advance)
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as problem:
        raise ArchiveError(f"{archive} is refused: it holds {problem.filename} twice") from None
    except OSError as problem:
        if problem.errno not in (None, errno.EINVAL):  # damage has no number, or leads to places that cannot be
            raise
        raise ArchiveError(f"{archive} is damaged: {problem}") from None
    except _BROKEN as problem:
        raise ArchiveError(f"{archive} is damaged: {problem}") from None


def unpacked_size(archive: Path) -> int:
    """How much room its files take; of a compressed tar a guess."""
    try:
        with zipfile.ZipFile(archive) as opened:
            return sum(member.file_size for member in opened.infolist())
    except (*_BROKEN, OSError):
        return round(1.5 * archive.stat().st_size)


def _safe(archive: Path, name: str) -> str:
    """A path below the folder, and nothing else."""
    parts = name.rstrip("/").split("/")
    if name.startswith("/") or _DRIVE.match(name) or "\\" in name or "\0" in name or ".." in parts:
        raise ArchiveError(f"{archive} is refused: it would write to {name!r}, outside of its folder")
    return name


def _write(archive: Path, member: _Member, path: Path, advance: Advance) -> None:
    if member.folder:
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = member.open()
    if stream is None:
        raise ArchiveError(f"{archive} is refused: {member.name!r} is no plain file")
    written = 0
    with stream, path.open("xb") as out:
        while piece := stream.read(_CHUNK):
            written += len(piece)
            if written > member.size:  # a size that was understated
                raise ArchiveError(f"{archive} is refused: {member.name!r} is larger than the archive says")
            out.write(piece)
            advance(len(piece))


@contextmanager
def _opened(archive: Path) -> Iterator[Iterator[_Member]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            yield _zip_members(archive, packed)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as rolled:
            yield _tar_members(archive, rolled)
    elif _begins_as_one(archive):
        raise ArchiveError(f"{archive} is damaged: it begins like an archive, but cannot be read as one")
    else:
        raise ArchiveError(f"{archive} is neither a tar nor a zip archive")


def _begins_as_one(archive: Path) -> bool:
    with archive.open("rb") as stream:
        return stream.read(max(map(len, _STARTS))).startswith(_STARTS)


def _zip_members(archive: Path, packed: zipfile.ZipFile) -> Iterator[_Member]:
    for item in packed.infolist():
        kind = stat.S_IFMT(item.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or item.flag_bits & 1:
            raise ArchiveError(f"{archive} is refused: {item.filename!r} is a link, a device or encrypted")
        yield _Member(item.filename, item.file_size, item.is_dir(), lambda item=item: packed.open(item))  # type: ignore[misc]


def _tar_members(archive: Path, rolled: tarfile.TarFile) -> Iterator[_Member]:
    for item in rolled:
        if not (item.isreg() or item.isdir()) or item.issparse():
            raise ArchiveError(f"{archive} is refused: {item.name!r} is a link, a device or sparse")
        yield _Member(item.name, item.size, item.isdir(), lambda item=item: rolled.extractfile(item))  # type: ignore[misc]
    _read_to_the_end(rolled)


def _read_to_the_end(rolled: tarfile.TarFile) -> None:
    """Nothing but empty blocks must follow the last file: tarfile takes a damaged header for the end.

    What is behind the end is read, too: there are the checksums of compressed archives.
    """
    stream = rolled.fileobj
    stream.seek(rolled.offset)
    piece = stream.read(_BLOCK)
    if len(piece) < _BLOCK:
        raise tarfile.ReadError("its end is missing")
    seen = 0
    while piece:
        seen += len(piece)
        if piece.strip(b"\0") or seen > _PADDING:
            raise tarfile.ReadError(f"what follows byte {rolled.offset} cannot be read")
        piece = stream.read(_CHUNK)


def make_room(folder: Path, needed: int, purpose: str) -> None:
    """Refuse to begin what the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{purpose} needs {needed / 1e9:.2f} GB in {folder}, where {free / 1e9:.2f} GB are free: make room, or "
            "choose another folder with --to"
        )
