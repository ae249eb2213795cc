"""Access to the service: token, local addresses, limits on requests, headers for browsers."""

import asyncio
import hmac
import ipaddress
import json
import secrets
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from probprompt.errors import UserError

SHORTEST_TOKEN = 16
UPLOAD_SECONDS = 120.0
"""Seconds in which a request must arrive."""
OPEN_PATHS = frozenset({"/", "/app.js", "/style.css", "/icon.svg", "/health"})
"""The page itself, which contains nothing of the model, and the health check."""
READ_ONLY = frozenset({"/api/predict"})
"""Paths that accept images but change nothing."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


@dataclass(frozen=True)
class Access:
    """The token, and whether local requests need it."""

    token: str
    loopback: bool
    """True if only this machine can reach the service; then only teaching needs the token."""

    def allows(self, method: str, path: str, token: str | None) -> bool:
        """Return True if a request is allowed."""
        harmless = method in ("GET", "HEAD") or path in READ_ONLY
        if path in OPEN_PATHS or (self.loopback and harmless):
            return True
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def knows_host(self, host: str) -> bool:
        """Return True for our own host name; a foreign name on loopback is DNS rebinding."""
        return not self.loopback or is_loopback(_name(host))


@dataclass(frozen=True)
class Limits:
    """Limits of a request."""

    pixels: int = 64_000_000
    """Pixels of one image."""
    image_bytes: int = 32 * 2**20
    """Bytes of one file."""
    images: int = 64
    """Images to classify in one request."""
    lesson_images: int = 1000
    """Images to teach in one request."""
    upload_bytes: int = 512 * 2**20
    """Bytes of a whole request."""
    name_length: int = 100
    """Characters of a class name."""


class RequestTooLargeError(Exception):
    """A request that is too large or too slow."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_access(host: str, token: str | None) -> Access:
    """Return the access rules of an address; draw a token if none is given."""
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or any(map(str.isspace, token))):
        raise UserError(
            f"Invalid token of {len(token)} characters. Use {SHORTEST_TOKEN} or more ASCII characters without spaces, "
            "or pass none to get a random one."
        )
    return Access(token or secrets.token_urlsafe(24), is_loopback(host))


def _name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    return _split(f"//{host}").hostname or ""


def _split(address: str) -> SplitResult:
    """Split an address; an invalid one has empty parts."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


class Guard:
    """Middleware that checks access, counts requests, and adds headers for browsers."""

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, requests: Counter, seconds: Histogram) -> None:
        self._app, self._access, self._limits, self._requests, self._seconds = app, access, limits, requests, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_time, status = time.perf_counter(), 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        rejection = self._check(scope)
        try:
            if rejection:
                await _reject(send_with_headers, *rejection)
            else:
                await self._app(scope, _Limited(receive, self._limits.upload_bytes), send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._requests.labels(route, _known(scope["method"]), status).inc()
            self._seconds.labels(route).observe(time.perf_counter() - start_time)

    def _check(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and message if a request is rejected."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._access.knows_host(host):
            return 421, f"Host {host!r} is not allowed. Use a loopback address."
        if origin is not None and _split(origin).netloc != host:
            return 403, f"Pages of {origin} may not use this service."
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else None
        if not self._access.allows(scope["method"], scope["path"], token):
            problem = "Wrong token" if token else "A token is required"
            return 401, f"{problem}. Send 'Authorization: Bearer TOKEN' with the token printed in the terminal."
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._limits.upload_bytes:
            return 413, f"Request of {length} bytes. The limit is {self._limits.upload_bytes}."
        return None


class _Limited:
    """Body of a request; an error if it is too large or too slow."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most = receive, most
        self._seen, self._whole = 0, False
        self._until = asyncio.get_running_loop().time() + UPLOAD_SECONDS

    async def __call__(self) -> Message:
        if self._whole:  # only the end of the connection is left to receive
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise RequestTooLargeError(408, f"The request took more than {UPLOAD_SECONDS:g} s to arrive.") from None
        self._seen += len(message.get("body", b""))
        if self._seen > self._most:
            raise RequestTooLargeError(413, f"The request exceeds the limit of {self._most} bytes.")
        self._whole = not message.get("more_body", False)
        return message


def _known(method: str) -> str:
    """Return a method as a label; each invented name would otherwise add a counter."""
    return method if method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH") else "other"


async def _reject(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": message}, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
