"""The HTTP routes of the service, and its server."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import JsonValue
from starlette.exceptions import HTTPException

from probprompt import __version__
from probprompt.errors import UserError
from probprompt.serve.batching import OverloadedError
from probprompt.serve.schemas import (
    AccuracyMatrix,
    Back,
    History,
    Job,
    Jobs,
    Model,
    ModelLimits,
    Predictions,
    Problem,
    PromptFigures,
    measure_held_out,
)
from probprompt.serve.security import Access, Guard, Limits, RequestTooLargeError
from probprompt.serve.service import KnownClassError, Service
from probprompt.serve.uploads import BadRequestError, lesson, question

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_FILES: JsonValue = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
_IMAGE: JsonValue = {"schema": {"type": "string", "format": "binary"}}
_OF = "index of the name of each image, from 0; optional with one name"
_KNOWN = "if a class already exists: reject the lesson, or add the images to the class"


def _form(required: list[JsonValue], properties: dict[str, JsonValue]) -> JsonValue:
    return {"schema": {"type": "object", "required": required, "properties": properties}}


def _body(content: dict[str, JsonValue]) -> dict[str, JsonValue]:
    return {"requestBody": {"required": True, "content": content}}


QUESTION_BODY = _body(
    {
        "multipart/form-data": _form(["images"], {"images": _FILES}),
        **dict.fromkeys(("image/png", "image/jpeg", "image/webp"), _IMAGE),
    }
)
_LESSON: dict[str, JsonValue] = {
    "names": {"type": "array", "items": {"type": "string"}, "description": "class names"},
    "images": _FILES,
    "of": {"type": "array", "items": {"type": "integer"}, "description": _OF},
    "known": {"type": "string", "enum": ["refuse", "refine"], "default": "refuse", "description": _KNOWN},
}
LESSON_BODY = _body({"multipart/form-data": _form(["names", "images"], _LESSON)})
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": description}
    for status, description in {
        400: "invalid request",
        401: "missing or wrong token",
        413: "request too large",
        503: "too many images are waiting",
    }.items()
}


def make_app(service: Service) -> FastAPI:
    """Build the application; the service runs as long as it does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="probprompt",
        version=__version__,
        summary="Classify images with a continual classifier, and teach it.",
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    metrics = service.metrics
    app.add_middleware(
        Guard, access=service.access, limits=service.limits, requests=metrics.requests, seconds=metrics.seconds
    )
    _add_page(app)
    _add_errors(app)
    _add_queries(app, service)
    _add_teaching(app, service)
    _add_monitoring(app, service)
    return app


def _add_page(app: FastAPI) -> None:
    def add_file(path: str, name: str, kind: str) -> None:
        content = files("probprompt.serve").joinpath("page", name).read_bytes()

        @app.get(path, include_in_schema=False)
        async def file() -> Response:
            return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    for path, (name, kind) in PAGE.items():
        add_file(path, name, kind)


def _add_errors(app: FastAPI) -> None:
    """Answer every error with a status and a message."""

    def answer(status: int, message: object, **headers: str) -> JSONResponse:
        return JSONResponse({"error": str(message)}, status, headers=headers or None)

    @app.exception_handler(UserError)
    @app.exception_handler(BadRequestError)
    async def answer_invalid(request: Request, problem: Exception) -> Response:
        if isinstance(problem.__cause__, OSError):  # not the sender's error
            return await answer_unwritten(request, problem.__cause__)
        return answer(400, problem)

    @app.exception_handler(KnownClassError)
    async def answer_known(_: Request, problem: Exception) -> Response:
        return answer(409, problem)

    @app.exception_handler(RequestTooLargeError)
    async def answer_too_large(_: Request, problem: RequestTooLargeError) -> Response:
        return answer(problem.status, problem, connection="close")

    @app.exception_handler(OverloadedError)
    async def answer_overloaded(_: Request, problem: Exception) -> Response:
        return answer(503, "Too many images are waiting. Try again in a moment.", **{"retry-after": "1"})

    @app.exception_handler(OSError)
    async def answer_unwritten(_: Request, problem: OSError) -> Response:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            return answer(507, "The disk is full. Free some space.")
        return answer(500, problem.strerror or problem)

    @app.exception_handler(RequestValidationError)
    async def answer_unparsed(_: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        return answer(400, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def answer_other(_: Request, problem: HTTPException) -> Response:
        return JSONResponse({"error": str(problem.detail)}, problem.status_code, headers=problem.headers)


def _add_queries(app: FastAPI, service: Service) -> None:
    @app.post("/api/predict", openapi_extra=QUESTION_BODY, responses=REFUSALS)
    async def predict(request: Request, top_k: Annotated[int, Query(ge=1, le=1000)] = 1) -> Predictions:
        """Classify images: files named `images`, or one image as the body."""
        async with question(request, service.limits) as uploads:
            return await service.predict(uploads, top_k)

    @app.get("/api/model")
    async def model() -> Model:
        """Return the current model: classes, accuracy on held-out images, limits of requests."""
        classifier, limits = service.classifier, service.limits
        accuracy, images = await asyncio.to_thread(measure_held_out, classifier)
        return Model(
            version=classifier.version,
            classes=list(classifier.classes),
            tasks=classifier.task_count,
            backbone=classifier.settings.backbone.name,
            accuracy=accuracy,
            held_out_images=images,
            random_guess=100 / len(classifier.classes) if classifier.classes else None,
            limits=ModelLimits.model_validate(vars(limits)),
        )

    @app.get("/api/history")
    async def history() -> History:
        """List the kept versions, the newest first."""
        return History(versions=service.history())

    @app.get("/api/accuracy")
    async def accuracy() -> AccuracyMatrix:
        """Return the accuracy on each lesson under each version."""
        return await asyncio.to_thread(service.accuracy, service.classifier)

    @app.get("/api/prompts")
    async def prompts() -> PromptFigures:
        """Draw the similarity of the prompts of different classes."""
        return await asyncio.to_thread(service.prompts, service.classifier)


def _add_teaching(app: FastAPI, service: Service) -> None:
    @app.post("/api/teach", status_code=202, openapi_extra=LESSON_BODY, responses=REFUSALS)
    async def teach(request: Request) -> Job:
        """Teach classes as a job in the background. Needs the token."""
        async with lesson(request, service.limits) as given:
            return await service.teach(given)

    @app.post("/api/rollback", status_code=202, responses=REFUSALS)
    def rollback(back: Back) -> Job:
        """Restore an earlier version as a job in the background. Needs the token."""
        return service.roll_back(back.to)

    @app.get("/api/jobs")
    async def jobs() -> Jobs:
        """List lessons and rollbacks, the newest first."""
        return Jobs(jobs=service.jobs.all())

    @app.get("/api/jobs/{number}")
    async def job(number: Annotated[int, PathParameter(ge=1)]) -> Job:
        """Return a job with its progress or result."""
        return _existing(service.jobs.get(number), number)

    @app.delete("/api/jobs/{number}", responses=REFUSALS)
    def cancel(number: Annotated[int, PathParameter(ge=1)]) -> Job:
        """Cancel a job that is not finished. Needs the token."""
        return _existing(service.lessons.cancel(number), number)


def _existing(job: Job | None, number: int) -> Job:
    if job is None:
        raise HTTPException(404, f"Job {number} not found.")
    return job


def _add_monitoring(app: FastAPI, service: Service) -> None:
    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return counters and times for Prometheus."""
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return a constant; the service is running."""
        return {"status": "ok"}


CONNECTIONS = 512
GRACE_SECONDS = 30
"""Seconds in which running requests must finish when the service stops."""


class Server(uvicorn.Server):
    """A server on a socket; it calls ``ready`` once it accepts requests."""

    def __init__(self, service: Service, listening: socket.socket, ready: Callable[[], None] | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # the client is never taken from its headers
                ws="none",
                limit_concurrency=CONNECTIONS,
                backlog=CONNECTIONS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self._listening, self._ready = listening, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests."""
        await super().startup(sockets)
        if self._ready and not self.should_exit:
            self._ready()

    def work(self) -> None:
        """Serve until the process is stopped."""
        with self._listening:
            self.run([self._listening])


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket before the model is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except (OSError, OverflowError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"Cannot use {host} port {port}: {reason}. Choose another with --host or --port.") from None
    listening.setblocking(False)
    return listening


def address_of(listening: socket.socket) -> str:
    """Return the address for a browser."""
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
    """Serve a model until the process is stopped; running requests are answered first."""
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
        raise UserError("The service could not start. See the message above.")
