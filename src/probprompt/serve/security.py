"""Who may ask for what: a token, the addresses that need none, limits on what is sent, and what browsers are told."""

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
"""How long a request may take to arrive."""
OPEN_PATHS = frozenset({"/", "/app.js", "/style.css", "/icon.svg", "/health"})
"""The page itself, which holds nothing of the model, and the sign of life."""
ASKING = frozenset({"/api/predict"})
"""What is sent here is looked at and forgotten: nothing changes."""
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
    """The token, and where it may be left away."""

    token: str
    loopback: bool
    """Whether only this machine can reach the service: then asking needs no token, teaching always does."""

    def allows(self, method: str, path: str, token: str | None) -> bool:
        """Whether a request may go through."""
        harmless = method in ("GET", "HEAD") or path in ASKING
        if path in OPEN_PATHS or (self.loopback and harmless):
            return True
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def knows_host(self, host: str) -> bool:
        """Whether a request is meant for us: on loopback a foreign name is a page that plays tricks with DNS."""
        return not self.loopback or is_loopback(_name(host))


@dataclass(frozen=True)
class Limits:
    """What a request may hold."""

    pixels: int = 64_000_000
    """Of one image."""
    image_bytes: int = 32 * 2**20
    """Of one file."""
    images: int = 64
    """In one request for predictions."""
    lesson_images: int = 1000
    """In one request that teaches."""
    upload_bytes: int = 512 * 2**20
    """Of a whole request."""
    name_length: int = 100
    """Of a class name, in characters."""


class RequestTooLargeError(Exception):
    """A request that is larger than allowed, or slower; the message says how."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

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
    """The rules for an address; without a token of one's own a new one is drawn."""
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or any(map(str.isspace, token))):
        raise UserError(
            f"the token has {len(token)} characters: it needs {SHORTEST_TOKEN} or more, of ASCII and without spaces. "
            "Leave it away to get one that cannot be guessed"
        )
    return Access(token or secrets.token_urlsafe(24), is_loopback(host))


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    return _split(f"//{host}").hostname or ""


def _split(address: str) -> SplitResult:
    """The parts of an address; none where it is no address."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


class Guard:
    """Stands before the application: refuses what is not allowed, counts, and adds what browsers should know."""

    def __init__(self, app: ASGIApp, access: Access, limits: Limits, requests: Counter, seconds: Histogram) -> None:
        self._app, self._access, self._limits, self._requests, self._seconds = app, access, limits, requests, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 500

        async def dressed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        try:
            if refusal:
                await _refuse(dressed, *refusal)
            else:
                await self._app(scope, _Limited(receive, self._limits.upload_bytes), dressed)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._requests.labels(route, _known(scope["method"]), status).inc()
            self._seconds.labels(route).observe(time.perf_counter() - begun)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Why a request may not go through: a status and words."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._access.knows_host(host):
            return 421, f"this service answers at a loopback address, not for {host!r}"
        if origin is not None and _split(origin).netloc != host:
            return 403, f"a page of {origin} may not use this service"
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else None
        if not self._access.allows(scope["method"], scope["path"], token):
            wrong = "the token is not the right one" if token else "a token is needed"
            return 401, f"{wrong}: send 'Authorization: Bearer TOKEN' with the one shown when the service was started"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._limits.upload_bytes:
            return 413, f"the request has {length} bytes, at most {self._limits.upload_bytes} are allowed"
        return None


class _Limited:
    """A request's body, which ends with an error where it is too large or too slow."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most = receive, most
        self._seen, self._whole = 0, False
        self._until = asyncio.get_running_loop().time() + UPLOAD_SECONDS

    async def __call__(self) -> Message:
        if self._whole:  # from here on only the end of the connection is waited for
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise RequestTooLargeError(408, f"the request took more than {UPLOAD_SECONDS:g} s to arrive") from None
        self._seen += len(message.get("body", b""))
        if self._seen > self._most:
            raise RequestTooLargeError(413, f"the request has more than the {self._most} bytes that are allowed")
        self._whole = not message.get("more_body", False)
        return message


def _known(method: str) -> str:
    """A method's name as a label; anybody can make up names, and each would be counted for ever."""
    return method if method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH") else "other"


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": message}, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
