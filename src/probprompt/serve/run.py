"""Starting and stopping the service."""

import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn

from probprompt.errors import UserError
from probprompt.serve.app import make_app
from probprompt.serve.security import Access, Limits
from probprompt.serve.service import Service

CONNECTIONS = 512
GRACE_SECONDS = 30
"""How long requests under way may take to finish once the service is told to stop."""


class Server(uvicorn.Server):
    """A service on a socket; tells when it answers."""

    def __init__(self, service: Service, listening: socket.socket, ready: Callable[[], None] | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # who asks is never taken from what they say
                ws="none",
                limit_concurrency=CONNECTIONS,
                backlog=CONNECTIONS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self.service, self._listening, self._ready = service, listening, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        if self._ready and not self.should_exit:
            self._ready()

    def work(self) -> None:
        """Answer until told to stop."""
        with self._listening:
            self.run([self._listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket on an address, taken before anything slow is done."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except (OSError, OverflowError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"{host} port {port} cannot be used: {reason}. Choose another with --host or --port") from None
    found.setblocking(False)
    return found


def address_of(listening: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    folder: Path,
    listening: socket.socket,
    access: Access,
    limits: Limits,
    device: str | None,
    ready: Callable[[Service], None],
) -> None:
    """Serve a model until the process is told to stop; then everything that was asked is answered first."""
    service = Service(folder, access, limits, device)
    server = Server(service, listening, lambda: ready(service))
    if threading.current_thread() is threading.main_thread():
        for name in (signal.SIGINT, signal.SIGTERM):  # passed on by uvicorn after it has stopped: then all is done
            signal.signal(name, lambda *_: None)
    try:
        server.work()
    finally:
        service.close()
    if not server.started:
        raise UserError("the service could not be started: see the message above")
