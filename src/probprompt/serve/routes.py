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
_OF = "for each image the number of its name, from 0; not needed with one name"
_KNOWN = "what happens where a class is known: nothing, or it gets more images"


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
    "names": {"type": "array", "items": {"type": "string"}, "description": "the names of the classes"},
    "images": _FILES,
    "of": {"type": "array", "items": {"type": "integer"}, "description": _OF},
    "known": {"type": "string", "enum": ["refuse", "refine"], "default": "refuse", "description": _KNOWN},
}
LESSON_BODY = _body({"multipart/form-data": _form(["names", "images"], _LESSON)})
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": words}
    for status, words in {
        400: "the request does not say what it should",
        401: "a token is needed",
        413: "more than is allowed",
        503: "too much is asked at once",
    }.items()
}


def make_app(service: Service) -> FastAPI:
    """Build the application of a service, which runs as long as the application does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="probprompt",
        version=__version__,
        summary="Predictions of a continual classifier, and lessons for it.",
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    metrics = service.metrics
    app.add_middleware(
        Guard, access=service.access, limits=service.limits, requests=metrics.requests, seconds=metrics.seconds
    )
    _add_page(app)
    _add_refusals(app)
    _add_asking(app, service)
    _add_teaching(app, service)
    _add_watching(app, service)
    return app


def _add_page(app: FastAPI) -> None:
    def serve_file(path: str, name: str, kind: str) -> None:
        content = files("probprompt.serve").joinpath("page", name).read_bytes()

        @app.get(path, include_in_schema=False)
        async def file() -> Response:
            return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    for path, (name, kind) in PAGE.items():
        serve_file(path, name, kind)


def _add_refusals(app: FastAPI) -> None:
    """Answer every error with a status and a message."""

    def say(status: int, words: object, **headers: str) -> JSONResponse:
        return JSONResponse({"error": str(words)}, status, headers=headers or None)

    @app.exception_handler(UserError)
    @app.exception_handler(BadRequestError)
    async def refuse_bad(request: Request, problem: Exception) -> Response:
        if isinstance(problem.__cause__, OSError):  # not the sender's error
            return await refuse_unwritten(request, problem.__cause__)
        return say(400, problem)

    @app.exception_handler(KnownClassError)
    async def refuse_known(_: Request, problem: Exception) -> Response:
        return say(409, problem)

    @app.exception_handler(RequestTooLargeError)
    async def refuse_large(_: Request, problem: RequestTooLargeError) -> Response:
        return say(problem.status, problem, connection="close")

    @app.exception_handler(OverloadedError)
    async def refuse_more(_: Request, problem: Exception) -> Response:
        return say(503, "too many images are waiting: try again in a moment", **{"retry-after": "1"})

    @app.exception_handler(OSError)
    async def refuse_unwritten(_: Request, problem: OSError) -> Response:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        return say(507 if full else 500, "the disk is full: make room on it" if full else problem.strerror or problem)

    @app.exception_handler(RequestValidationError)
    async def refuse_invalid(_: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        return say(400, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def refuse_other(_: Request, problem: HTTPException) -> Response:
        return JSONResponse({"error": str(problem.detail)}, problem.status_code, headers=problem.headers)


def _add_asking(app: FastAPI, service: Service) -> None:
    @app.post("/api/predict", openapi_extra=QUESTION_BODY, responses=REFUSALS)
    async def predict(request: Request, top_k: Annotated[int, Query(ge=1, le=1000)] = 1) -> Predictions:
        """Classify images: files named `images`, or one image as the body."""
        async with question(request, service.limits) as uploads:
            return await service.predict(uploads, top_k)

    @app.get("/api/model")
    async def model() -> Model:
        """Tell about the model that answers now."""
        classifier, limits = service.classifier, service.limits
        return Model(
            version=classifier.version,
            classes=list(classifier.classes),
            tasks=classifier.task_count,
            backbone=classifier.settings.backbone.name,
            limits=ModelLimits.model_validate(vars(limits)),
        )

    @app.get("/api/history")
    async def history() -> History:
        """What was learned when."""
        return History(versions=service.history())

    @app.get("/api/accuracy")
    async def accuracy() -> AccuracyMatrix:
        """Accuracy on each lesson by each version."""
        return await asyncio.to_thread(service.accuracy, service.classifier)

    @app.get("/api/prompts")
    async def prompts() -> PromptFigures:
        """How alike the prompts are that classes receive."""
        return await asyncio.to_thread(service.prompts, service.classifier)


def _add_teaching(app: FastAPI, service: Service) -> None:
    @app.post("/api/teach", status_code=202, openapi_extra=LESSON_BODY, responses=REFUSALS)
    async def teach(request: Request) -> Job:
        """Teach classes by their images. Needs the token. The lesson is learned in the background, as a job."""
        async with lesson(request, service.limits) as given:
            return await service.teach(given)

    @app.post("/api/rollback", status_code=202, responses=REFUSALS)
    def rollback(back: Back) -> Job:
        """Let an earlier version answer again. Needs the token. Happens in the background, as a job."""
        return service.roll_back(back.to)

    @app.get("/api/jobs")
    async def jobs() -> Jobs:
        """Lessons and undoings, the newest first."""
        return Jobs(jobs=service.jobs.all())

    @app.get("/api/jobs/{number}")
    async def job(number: Annotated[int, PathParameter(ge=1)]) -> Job:
        """What became of a job."""
        return _found(service.jobs.get(number), number)

    @app.delete("/api/jobs/{number}", responses=REFUSALS)
    def cancel(number: Annotated[int, PathParameter(ge=1)]) -> Job:
        """Give up a lesson that is not finished. Needs the token."""
        return _found(service.lessons.cancel(number), number)


def _found(job: Job | None, number: int) -> Job:
    if job is None:
        raise HTTPException(404, f"there is no job {number}")
    return job


def _add_watching(app: FastAPI, service: Service) -> None:
    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counts and times, for Prometheus."""
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/health")
    async def health() -> dict[str, str]:
        """A sign of life."""
        return {"status": "ok"}


CONNECTIONS = 512
GRACE_SECONDS = 30
"""Seconds that running requests may take to finish when the service stops."""


class Server(uvicorn.Server):
    """A server on a socket; it calls ``ready`` when it answers."""

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
        """Start to answer."""
        await super().startup(sockets)
        if self._ready and not self.should_exit:
            self._ready()

    def work(self) -> None:
        """Answer until the process is asked to stop."""
        with self._listening:
            self.run([self._listening])


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket, before anything slow is done."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except (OSError, OverflowError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"{host} port {port} cannot be used: {reason}. Choose another with --host or --port") from None
    found.setblocking(False)
    return found


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
    """Serve a model until the process is asked to stop; running requests are answered first."""
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
