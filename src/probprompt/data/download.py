"""Files from the web: resumed when cut, whole or not there at all."""

import errno
import hashlib
import http.client
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from probprompt.data.archives import make_room
from probprompt.data.sources import Source
from probprompt.errors import UserError
from probprompt.progress import ProgressCallback

ATTEMPTS = 5
"""How often a download that gets nowhere is tried before it is given up."""
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as cut."""
SLACK = 64 * 2**20
"""Bytes that stay free on the disk."""

_CHUNK = 2**18
_OWN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_NOBODY = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
_LATER = (408, 425, 429, 500, 502, 503, 504)  # codes of servers that may well answer next time


class _CutError(Exception):
    """A connection that ended before the file did; the rest can be asked for."""


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows to web addresses only, and from an encrypted one to encrypted ones only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if after not in ("http", "https") or (before == "https" and after != "https"):
            raise UserError(f"{req.full_url} leads to {newurl}, which is not followed: it is not as safe")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str, target: Path, watch: ProgressCallback, pause: float = 1.0, room: float = 1.0) -> None:
    """Fetch a file; what was fetched before, and is unchanged on the server, is not fetched again.

    ``room`` is how many times its size the disk must have free. What is there so far lies beside the target, as
    ``.part``.
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
        except (_CutError, OSError, http.client.HTTPException) as problem:
            if isinstance(problem, urllib.error.HTTPError) and problem.code not in _LATER:
                raise UserError(f"{url} answers {problem.code} {problem.reason}: try a mirror with --url") from None
            if problem.__class__ is not _CutError and getattr(problem, "errno", None) in _OWN_DISK:
                raise UserError(f"{part.path} cannot be written: {problem}") from None
            nobody = failures == 0 and _nobody_there(problem)
            failures = 1 if part.size > before else failures + 1
            if nobody or failures >= ATTEMPTS:
                raise UserError(_gave_up(url, problem, part.size)) from None
            watch.note(f"cut after {part.size / 1e6:.1f} MB ({_reason(problem)}): going on")
            time.sleep(pause * 2 ** (failures - 1))
    part.path.replace(target)
    part.forget()


def _nobody_there(problem: Exception) -> bool:
    """Whether no connection came about, for a reason that is still there a moment later."""
    reason = problem.reason if isinstance(problem, urllib.error.URLError) else None
    return isinstance(reason, _NOBODY) or getattr(reason, "errno", None) in _NO_WAY


def _reason(problem: Exception) -> str:
    """In the words of the system, without the class of the error around them."""
    reason = problem.reason if isinstance(problem, urllib.error.URLError) else problem
    return str(getattr(reason, "strerror", None) or reason)


def _gave_up(url: str, problem: Exception, size: int) -> str:
    kept = f"{size / 1e6:.1f} MB are kept, and the same command goes on from there" if size else "nothing was fetched"
    return (
        f"{url} cannot be reached ({_reason(problem)}): {kept}. See that the network is there; a mirror can be named "
        "with --url, an archive on this machine with --file"
    )


class _Part:
    """What is there of a file so far, and by what the server knows that version."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".part")
        self.state = target.with_name(target.name + ".part.json")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def known(self, url: str) -> dict[str, Any] | None:
        """The version and size of the file that the bytes are of, where they came from this address."""
        with suppress(OSError, ValueError, AttributeError):
            state: dict[str, Any] = json.loads(self.state.read_text(encoding="utf-8"))
            if state.get("url") == url and self.size:
                return state
        return None

    def begin(self, url: str, headers: Message, total: int | None) -> None:
        """Start anew."""
        tag = headers.get("ETag") or ""
        version = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")
        self.path.write_bytes(b"")
        self.state.write_text(json.dumps({"url": url, "version": version, "total": total}), encoding="utf-8")

    def forget(self) -> None:
        """Remove what is left."""
        self.path.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)


def _fetch(url: str, part: _Part, watch: ProgressCallback, room: float) -> None:
    """One connection: append what the server sends."""
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
            raise _CutError("the server has another file now") from None
        raise
    with response:
        if response.status == 206:
            total = _length(response.headers, start)
            if known is None or _first_byte(response.headers) != start or known.get("total") != total:
                part.forget()
                raise _CutError("the server has another file now")
        else:
            start, total = 0, _length(response.headers, 0)
            part.begin(url, response.headers, total)
        if total is not None:
            make_room(part.path.parent, round(room * total) - start + SLACK, part.path.stem)
        with watch.transfer(part.path.stem, total, start):
            with part.path.open("ab") as out:
                _pour(response, out, watch.advance)
            if total is not None and part.size != total:
                raise _CutError(f"{part.size} of {total} bytes")


def _pour(response: http.client.HTTPResponse, out: IO[bytes], advance: Callable[[int], None]) -> None:
    while True:
        try:
            piece = response.read1(_CHUNK)
        except http.client.IncompleteRead as cut:
            out.write(cut.partial)
            raise _CutError("the connection was closed") from None
        if not piece:
            return
        out.write(piece)
        advance(len(piece))


def _first_byte(headers: Message) -> int | None:
    span = (headers.get("Content-Range") or "").removeprefix("bytes ").partition("-")[0]
    return int(span) if span.isdecimal() else None


def _length(headers: Message, start: int) -> int | None:
    """How many bytes the whole file has, where the server says so."""
    length = headers.get("Content-Length") or ""
    return start + int(length) if length.isdecimal() else None


# Hashes ----------------------------------------------------------------------------------------------------------


def hashes(path: Path, watch: ProgressCallback) -> dict[str, str]:
    """The MD5 and SHA-256 of a file."""
    found = {"md5": hashlib.md5(usedforsecurity=False), "sha256": hashlib.sha256()}
    with watch.transfer("verifying", path.stat().st_size), path.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            for digest in found.values():
                digest.update(piece)
            watch.advance(len(piece))
    return {name: digest.hexdigest() for name, digest in found.items()}


def verify(path: Path, source: Source, watch: ProgressCallback) -> dict[str, str]:
    """The hashes of a file, which must be the published ones."""
    found = hashes(path, watch)
    for name, published in (("md5", source.md5), ("sha256", source.sha256)):
        if published and found[name] != published:
            raise UserError(
                f"{path} is not the published {source.file}: its {name} is {found[name]}, published is {published}"
            )
    return found
