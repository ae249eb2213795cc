"""Install a published dataset: resume its download, check its hash, unpack it, move it to its place in one step."""

import errno
import hashlib
import http.client
import json
import lzma
import secrets
import shutil
import socket
import ssl
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from email.message import Message
from pathlib import Path
from typing import IO, Any, TypedDict
from urllib.parse import urlsplit

from probprompt.data.layouts import LISTED, find_lists
from probprompt.data.published import Dataset, Source, data_folder
from probprompt.errors import UserError, one_line
from probprompt.progress import ProgressCallback

ATTEMPTS = 5
"""Number of attempts in a row without progress."""
PAUSE = 1.0
"""Seconds before the second attempt; each later one waits twice as long."""
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as interrupted."""
SLACK = 64 * 2**20
"""Bytes that stay free on the disk."""
NOTE = "source.json"
"""File next to the images with their sources and hashes."""

_CHUNK = 2**18
_SPACE = 2.5  # times the size of an archive: itself and its files
_OWN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_NOBODY = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
_LATER = (408, 425, 429, 500, 502, 503, 504)  # codes of servers that may well answer next time
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError)


class _State(TypedDict):
    """What is recorded of an incomplete download."""

    url: str
    version: str | None
    total: int | None


class ArchiveError(UserError):
    """An archive with the wrong hash or contents: another one is needed."""


class _IncompleteDownloadError(Exception):
    """A connection that ended before the file did; the rest can be requested."""


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows to web addresses only, and from an encrypted one to encrypted ones only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after not in ("http", "https") or (before == "https" and after != "https"):
            raise UserError(f"{req.full_url} leads to {newurl}, which is not followed: it is not as safe")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str, target: Path, watch: ProgressCallback, room: float = 1.0) -> None:
    """Download a file, or resume its download if it is unchanged on the server.

    ``room`` times its size must be free on the disk. The incomplete file is next to the target, as ``.part``.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{url!r} is no web address: it must begin with https:// or http://")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _Part(target)
    failures = 0
    while True:
        before = part.size
        try:
            _fetch(url, part, watch, room)
            break
        except (_IncompleteDownloadError, OSError, http.client.HTTPException) as problem:
            if isinstance(problem, urllib.error.HTTPError) and problem.code not in _LATER:
                raise UserError(f"{url} answers {problem.code} {problem.reason}: try a mirror with --url") from None
            if getattr(problem, "errno", None) in _OWN_DISK:
                raise UserError(f"{part.path} cannot be written: {problem}") from None
            cause = problem.reason if isinstance(problem, urllib.error.URLError) else problem
            reason = getattr(cause, "strerror", None) or cause
            lost = isinstance(cause, _NOBODY) or getattr(cause, "errno", None) in _NO_WAY
            nobody = failures == 0 and cause is not problem and lost  # no connection at all: waiting is in vain
            failures, megabytes = 1 if part.size > before else failures + 1, f"{part.size / 1e6:.1f} MB"
            if nobody or failures >= ATTEMPTS:
                kept = f"{megabytes} are kept, and the same command goes on from there"
                raise UserError(
                    f"{url} cannot be reached ({reason}): {kept if part.size else 'nothing was fetched'}. See that the "
                    "network is there; a mirror can be named with --url, an archive on this machine with --file"
                ) from None
            watch.note(f"cut after {megabytes} ({reason}): going on")
            time.sleep(PAUSE * 2 ** (failures - 1))
    part.path.replace(target)
    part.forget()


class _Part:
    """An incomplete file, and the version of it on the server."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".part")
        self.state = target.with_name(target.name + ".part.json")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def known(self, url: str) -> _State | None:
        """Return the recorded state if the bytes came from this address."""
        with suppress(OSError, ValueError, AttributeError):
            state: _State = json.loads(self.state.read_text(encoding="utf-8"))
            if state.get("url") == url and self.size:
                return state
        return None

    def begin(self, url: str, headers: Message, total: int | None) -> None:
        """Start from scratch."""
        tag = headers.get("ETag") or ""
        version = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")
        self.path.write_bytes(b"")
        self.state.write_text(json.dumps({"url": url, "version": version, "total": total}), encoding="utf-8")

    def forget(self) -> None:
        """Remove what is left."""
        self.path.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)


def _fetch(url: str, part: _Part, watch: ProgressCallback, room: float) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "probprompt", "Accept-Encoding": "identity"})
    known = part.known(url)
    start = part.size if known else 0
    if known:
        request.add_header("Range", f"bytes={start}-")
        if known.get("version"):
            request.add_header("If-Range", str(known["version"]))
    try:
        response = urllib.request.build_opener(_SafeRedirects).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as problem:
        if problem.code == 416 and start:
            part.forget()  # there is no such part of it: it is shorter than what is here
            raise _IncompleteDownloadError("the server has another file now") from None
        raise
    with response:
        resumes = response.status == 206
        start = start if resumes else 0
        length = response.headers.get("Content-Length") or ""  # of what is still to come
        total = start + int(length) if length.isdecimal() else None
        if resumes:
            first = (response.headers.get("Content-Range") or "").removeprefix("bytes ").partition("-")[0]
            if known is None or first != str(start) or known.get("total") != total:
                part.forget()
                raise _IncompleteDownloadError("the server has another file now")
        else:
            part.begin(url, response.headers, total)
        if total is not None:
            check_space(part.path.parent, round(room * total) - start + SLACK, part.path.stem)
        with watch.transfer(part.path.stem, total, start):
            with part.path.open("ab") as out:
                _pour(response, out, watch.advance)
            if total is not None and part.size != total:
                raise _IncompleteDownloadError(f"{part.size} of {total} bytes")


def _pour(response: http.client.HTTPResponse, out: IO[bytes], advance: Callable[[int], None]) -> None:
    try:
        while piece := response.read1(_CHUNK):
            out.write(piece)
            advance(len(piece))
    except http.client.IncompleteRead as cut:
        out.write(cut.partial)
        raise _IncompleteDownloadError("the connection was closed") from None


def check_space(folder: Path, needed: int, purpose: str) -> None:
    """Raise an error before anything starts that the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{purpose} needs {needed / 1e9:.2f} GB in {folder}, where {free / 1e9:.2f} GB are free: make room, or "
            "choose another folder with --to"
        )


def check_hash(path: Path, source: Source, watch: ProgressCallback) -> dict[str, str]:
    """Return the MD5 and SHA-256 of a file, one of which must be the published one."""
    digests = {"md5": hashlib.md5(usedforsecurity=False), "sha256": hashlib.sha256()}
    with watch.transfer("verifying", path.stat().st_size), path.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            for digest in digests.values():
                digest.update(piece)
            watch.advance(len(piece))
    hashes = {name: digest.hexdigest() for name, digest in digests.items()}
    if hashes[source.algorithm] != source.digest:
        raise ArchiveError(
            f"{path} is not the published {source.file}: its {source.algorithm} is {hashes[source.algorithm]}, "
            f"published is {source.digest}"
        )
    return hashes


def unpack(archive: Path, target: Path, watch: ProgressCallback) -> None:
    """Unpack a tar or zip archive whose hash was checked."""

    def transfer(size: int) -> AbstractContextManager[None]:
        check_space(target.parent, size + SLACK, f"unpacking {archive.name}")
        return watch.transfer("unpacking", size)

    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed, transfer(sum(item.file_size for item in packed.infolist())):
                for item in packed.infolist():
                    packed.extract(item, target)
                    watch.advance(item.file_size)
        else:
            with tarfile.open(archive) as rolled, transfer(round(1.5 * archive.stat().st_size)):  # a guess
                rolled.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python 3.11.3
                for member in rolled:
                    rolled.extract(member, target)
                    watch.advance(member.size)
    except (OSError, *_BROKEN) as problem:
        if getattr(problem, "errno", None) is not None:  # the disk's, not the archive's
            raise
        raise ArchiveError(f"{archive} cannot be unpacked: {one_line(problem)}") from None


def get(kind: type[Dataset], to: Path | None, url: str | None, file: Path | None, watch: ProgressCallback) -> Dataset:
    """Install a dataset in ``to``/its name, from its publisher, a mirror (``url``) or an archive on disk (``file``).

    A dataset that exists already stays unchanged.
    """
    if url and file:
        raise UserError("--url and --file exclude each other: name a mirror, or an archive that is on this machine")
    home = (to.expanduser().absolute() if to else data_folder()).resolve()
    dataset = kind(home / kind.name)
    found = dataset.recognize()
    if found is None:
        try:
            _install(dataset, home, url, file, watch)
        except OSError as problem:
            raise UserError(f"{kind.name} cannot be written to {home}: {problem.strerror or problem}") from None
        return dataset
    watch.note(f"{kind.name} is in {found[0]} already")
    if found[1] is LISTED and find_lists(found[0]) is None:
        for source in kind.sources[1:]:
            _add_list(source, dataset.place, watch, file)
    return dataset


def _install(dataset: Dataset, home: Path, url: str | None, file: Path | None, watch: ProgressCallback) -> None:
    """Download and unpack next to the target, then move everything to its place with one rename."""
    target, (source, *lists) = dataset.place, dataset.sources
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{target} exists and does not look like {dataset.name}: move it away, or choose another folder with --to"
        )
    part = home / f".{dataset.name}.{secrets.token_hex(4)}"
    try:
        part.mkdir(parents=True)
        notes = [_add_list(one, part, watch, file) for one in lists]  # small: trouble shows early
        notes.insert(0, _add_archive(source, type(dataset)(part), home, url, file, watch))
        (part / NOTE).write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
        if target.exists():
            target.rmdir()  # empty, as was seen before
        part.rename(target)
        if file is None:
            (home / source.file).unlink()
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _add_archive(
    source: Source, part: Dataset, home: Path, url: str | None, file: Path | None, watch: ProgressCallback
) -> dict[str, str]:
    """Download, check and unpack the images; return what ``source.json`` records of them."""
    path, origin = file or home / source.file, url or source.url
    if file and not file.is_file():
        raise UserError(f"{file} is no file: name the archive {source.file}")
    present = path.exists()
    remedy = "It was there already: remove it, and the same command fetches it"
    if file:
        remedy = "Name the right archive"
    elif not present:
        remedy = "It was removed: try again, or name a mirror with --url"
        download(origin, path, watch, _SPACE)
    try:
        hashes = check_hash(path, source, watch)
        unpack(path, part.place, watch)
        if part.recognize() is None:
            raise ArchiveError(f"{path} holds nothing that looks like {part.name}")
    except ArchiveError as problem:
        if not present:
            path.unlink()
        raise UserError(f"{problem}. {remedy}") from None
    return {"file": source.file, "from": str(path) if present else origin, **hashes}


def _add_list(source: Source, folder: Path, watch: ProgressCallback, file: Path | None) -> dict[str, str]:
    """Add a file that is stored with the images, from its publisher or from the folder of the archive ``file``."""
    path = folder / source.file
    unchecked, origin = path.with_name(f".{path.name}"), source.url
    try:
        if file and (near := file.parent / source.file).is_file():
            shutil.copyfile(near, unchecked)
            origin = str(near)
        else:
            download(source.url, unchecked, watch)
        hashes = check_hash(unchecked, source, watch)
        unchecked.replace(path)
    finally:
        unchecked.unlink(missing_ok=True)
    return {"file": source.file, "from": origin, **hashes}
