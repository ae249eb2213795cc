"""Installation of published datasets: resumable download, hash check, atomic unpacking."""

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

ATTEMPTS = 5  # number of consecutive attempts without progress
PAUSE = 1.0  # seconds before the second attempt, doubled for each later one
TIMEOUT = 30.0  # seconds without a byte after which a connection counts as interrupted
SLACK = 64 * 2**20  # bytes to keep free on the disk
NOTE = "source.json"  # file next to the images with their sources and hashes

_CHUNK = 2**18
_SPACE = 2.5  # space for an archive and its files, relative to the archive
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_NO_SERVER = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
_RETRY_CODES = (408, 425, 429, 500, 502, 503, 504)
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError)


class _State(TypedDict):
    url: str
    version: str | None
    total: int | None


class ArchiveError(UserError):
    """An archive with the wrong hash or contents."""


class _IncompleteDownloadError(Exception):
    """A connection that closed early; the rest can be requested."""


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects to web addresses only, and from HTTPS to HTTPS only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after not in ("http", "https") or (before == "https" and after != "https"):
            raise UserError(f"{req.full_url} redirects to {newurl}, which is less secure. Pass a mirror with --url.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str, target: Path, progress: ProgressCallback, space: float = 1.0) -> None:
    """Download a file, or resume its download if it is unchanged on the server.

    Incomplete files have the suffix ``.part``. ``space`` is the free disk space needed, relative to the file's size.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{url!r} is not a web address. It must start with https:// or http://.")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _Part(target)
    failures = 0
    while True:
        before = part.size
        try:
            _request(url, part, progress, space)
            break
        except (_IncompleteDownloadError, OSError, http.client.HTTPException) as problem:
            if isinstance(problem, urllib.error.HTTPError) and problem.code not in _RETRY_CODES:
                raise UserError(f"{url}: {problem.code} {problem.reason}. Pass a mirror with --url.") from None
            if getattr(problem, "errno", None) in _DISK_ERRORS:
                raise UserError(f"Could not write {part.path}: {problem}.") from None
            cause = problem.reason if isinstance(problem, urllib.error.URLError) else problem
            reason = getattr(cause, "strerror", None) or cause
            unreachable = isinstance(cause, _NO_SERVER) or getattr(cause, "errno", None) in _NO_ROUTE
            offline = failures == 0 and cause is not problem and unreachable  # then retrying does not help
            failures, megabytes = 1 if part.size > before else failures + 1, f"{part.size / 1e6:.1f} MB"
            if offline or failures >= ATTEMPTS:
                kept = f"{megabytes} are kept; the same command resumes." if part.size else "Nothing was downloaded."
                raise UserError(
                    f"Could not reach {url} ({reason}). {kept} Check the network, pass a mirror with --url, or pass "
                    "a local archive with --file."
                ) from None
            progress.note(f"Interrupted after {megabytes} ({reason}). Resuming.")
            time.sleep(PAUSE * 2 ** (failures - 1))
    part.path.replace(target)
    part.remove()


class _Part:
    """An incomplete file, and the version of it on the server."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".part")
        self.state = target.with_name(target.name + ".part.json")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def known(self, url: str) -> _State | None:
        """Return the recorded state if the bytes are from this address."""
        with suppress(OSError, ValueError, AttributeError):
            state: _State = json.loads(self.state.read_text(encoding="utf-8"))
            if state.get("url") == url and self.size:
                return state
        return None

    def start(self, url: str, headers: Message, total: int | None) -> None:
        tag = headers.get("ETag") or ""
        version = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")
        self.path.write_bytes(b"")
        self.state.write_text(json.dumps({"url": url, "version": version, "total": total}), encoding="utf-8")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)


def _request(url: str, part: _Part, progress: ProgressCallback, space: float) -> None:
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
            part.remove()  # the file on the server is shorter
            raise _IncompleteDownloadError("the file on the server changed") from None
        raise
    with response:
        resumes = response.status == 206
        start = start if resumes else 0
        length = response.headers.get("Content-Length") or ""  # of the rest
        total = start + int(length) if length.isdecimal() else None
        if resumes:
            first = (response.headers.get("Content-Range") or "").removeprefix("bytes ").partition("-")[0]
            if known is None or first != str(start) or known.get("total") != total:
                part.remove()
                raise _IncompleteDownloadError("the file on the server changed")
        else:
            part.start(url, response.headers, total)
        if total is not None:
            check_space(part.path.parent, round(space * total) - start + SLACK, part.path.stem)
        with progress.transfer(part.path.stem, total, start):
            with part.path.open("ab") as out:
                _copy(response, out, progress.advance)
            if total is not None and part.size != total:
                raise _IncompleteDownloadError(f"{part.size} of {total} bytes")


def _copy(response: http.client.HTTPResponse, out: IO[bytes], advance: Callable[[int], None]) -> None:
    try:
        while piece := response.read1(_CHUNK):
            out.write(piece)
            advance(len(piece))
    except http.client.IncompleteRead as problem:
        out.write(problem.partial)
        raise _IncompleteDownloadError("the connection was closed") from None


def check_space(folder: Path, needed: int, purpose: str) -> None:
    """Raise UserError if the disk has not enough free space."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        size = f"{needed / 1e9:.2f} GB in {folder}, but only {free / 1e9:.2f} GB are free"
        raise UserError(f"{purpose} needs {size}. Free some space, or choose another folder with --dir.")


def check_hash(path: Path, source: Source, progress: ProgressCallback) -> dict[str, str]:
    """Return the MD5 and SHA-256 of a file; raise ArchiveError if it is not the published one."""
    digests = {"md5": hashlib.md5(usedforsecurity=False), "sha256": hashlib.sha256()}
    with progress.transfer("verifying", path.stat().st_size), path.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            for digest in digests.values():
                digest.update(piece)
            progress.advance(len(piece))
    hashes = {name: digest.hexdigest() for name, digest in digests.items()}
    if hashes[source.algorithm] != source.digest:
        found = f"expected {source.digest}, got {hashes[source.algorithm]}"
        raise ArchiveError(f"{path} is not the published {source.file}: {source.algorithm} mismatch ({found}).")
    return hashes


def unpack(archive: Path, target: Path, progress: ProgressCallback) -> None:
    """Unpack a tar or zip archive whose hash was checked."""

    def transfer(size: int) -> AbstractContextManager[None]:
        check_space(target.parent, size + SLACK, f"unpacking {archive.name}")
        return progress.transfer("unpacking", size)

    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed, transfer(sum(item.file_size for item in packed.infolist())):
                for item in packed.infolist():
                    packed.extract(item, target)
                    progress.advance(item.file_size)
        else:
            with tarfile.open(archive) as tar, transfer(round(1.5 * archive.stat().st_size)):  # an estimate
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # missing in Python 3.11.3
                for member in tar:
                    tar.extract(member, target)
                    progress.advance(member.size)
    except (OSError, *_BROKEN) as problem:
        if getattr(problem, "errno", None) is not None:  # an error of the disk, not of the archive
            raise
        raise ArchiveError(f"Could not unpack {archive}: {one_line(problem)}.") from None


def get(
    kind: type[Dataset], to: Path | None, url: str | None, file: Path | None, progress: ProgressCallback
) -> Dataset:
    """Install a dataset below ``to`` from its publisher, a mirror ``url`` or a local ``file``.

    A dataset that exists already stays unchanged.
    """
    if url and file:
        raise UserError("--url and --file cannot be combined. Pass a mirror, or a local archive.")
    home = (to.expanduser().absolute() if to else data_folder()).resolve()
    dataset = kind(home / kind.name)
    existing = dataset.recognize()
    if existing is None:
        try:
            _install(dataset, home, url, file, progress)
        except OSError as problem:
            raise UserError(f"Could not write {kind.name} to {home}: {problem.strerror or problem}.") from None
        return dataset
    progress.note(f"{kind.name} exists already in {existing[0]}.")
    if existing[1] is LISTED and find_lists(existing[0]) is None:
        for source in kind.sources[1:]:
            _add_list(source, dataset.place, progress, file)
    return dataset


def _install(dataset: Dataset, home: Path, url: str | None, file: Path | None, progress: ProgressCallback) -> None:
    """Download and unpack next to the target, then move everything into place by a rename."""
    target, (source, *lists) = dataset.place, dataset.sources
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not {dataset.name}. Move it, or choose another folder with --dir.")
    part = home / f".{dataset.name}.{secrets.token_hex(4)}"
    try:
        part.mkdir(parents=True)
        notes = [_add_list(one, part, progress, file) for one in lists]  # first, since small files fail early
        notes.insert(0, _add_archive(source, type(dataset)(part), home, url, file, progress))
        (part / NOTE).write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
        if target.exists():
            target.rmdir()  # checked above to be empty
        part.rename(target)
        if file is None:
            (home / source.file).unlink()
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _add_archive(
    source: Source, part: Dataset, home: Path, url: str | None, file: Path | None, progress: ProgressCallback
) -> dict[str, str]:
    path, origin = file or home / source.file, url or source.url
    if file and not file.is_file():
        raise UserError(f"{file} is not a file. Pass the archive {source.file}.")
    present = path.exists()
    remedy = "It existed before. Remove it and run the same command to download it."
    if file:
        remedy = f"Pass the published {source.file}."
    elif not present:
        remedy = "It was removed. Try again, or pass a mirror with --url."
        download(origin, path, progress, _SPACE)
    try:
        hashes = check_hash(path, source, progress)
        unpack(path, part.place, progress)
        if part.recognize() is None:
            raise ArchiveError(f"{path} does not contain {part.name}.")
    except ArchiveError as problem:
        if not present:
            path.unlink()
        raise UserError(f"{problem} {remedy}") from None
    return {"file": source.file, "from": str(path) if present else origin, **hashes}


def _add_list(source: Source, folder: Path, progress: ProgressCallback, file: Path | None) -> dict[str, str]:
    """Add a list of images from its publisher or from the folder of the archive ``file``."""
    path = folder / source.file
    unchecked, origin = path.with_name(f".{path.name}"), source.url
    try:
        if file and (near := file.parent / source.file).is_file():
            shutil.copyfile(near, unchecked)
            origin = str(near)
        else:
            download(source.url, unchecked, progress)
        hashes = check_hash(unchecked, source, progress)
        unchecked.replace(path)
    finally:
        unchecked.unlink(missing_ok=True)
    return {"file": source.file, "from": origin, **hashes}
