"""Read the files of a request and decode them in separate, replaceable processes."""

import asyncio
import os
import sys
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from starlette.datastructures import UploadFile
from starlette.requests import Request

import probprompt
from probprompt.data.images import Pixels
from probprompt.data.inputs import clean_name, same_name
from probprompt.serve.decode_worker import ANSWER, PIXELS, PNG, REFUSED, REQUEST
from probprompt.serve.security import Limits, RequestTooLargeError

_BUFFER = 2**20  # bytes read from a process at a time


class RefusedImageError(Exception):
    """An upload that cannot be decoded within the limits, with the reason."""


class Decoders:
    """Several decoding processes."""

    def __init__(self, count: int, pixels: int, short_side: int | None, seconds: float = 20.0) -> None:
        self.count, self.short_side, self.seconds = count, short_side, seconds
        self._free: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()  # the one used last is warm
        self._all = [_Process(pixels) for _ in range(count)]
        for process in self._all:
            self._free.put_nowait(process)
        self.deaths = 0

    async def pixels_of(self, data: bytes) -> Pixels:
        """Decode an upload to RGB, (H, W, 3), its short side reduced."""
        width, height, content = await self._ask(PIXELS, data)
        return np.frombuffer(content, np.uint8).reshape(height, width, 3)

    async def png_of(self, data: bytes) -> bytes:
        """Decode an upload and encode the same pixels as a PNG file."""
        return (await self._ask(PNG, data))[2]

    async def _ask(self, wanted: int, data: bytes) -> tuple[int, int, bytes]:
        process = await self._free.get()
        try:
            async with asyncio.timeout(self.seconds):
                kind, width, height, content = await process.ask(wanted, self.short_side or 0, data)
        except TimeoutError:
            self.deaths += 1
            await process.kill()
            raise RefusedImageError(f"Not decoded within {self.seconds:g} s.") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            self.deaths += 1
            await process.kill()
            raise RefusedImageError("Decoding failed: the file is corrupted or malicious.") from None
        except asyncio.CancelledError:
            await process.kill()  # its answer may be incomplete
            raise
        finally:
            self._free.put_nowait(process)
        if kind == REFUSED:
            raise RefusedImageError(content.decode(errors="replace"))
        return width, height, content

    async def start(self) -> None:
        """Start all processes, so that the first upload does not wait."""
        for process in self._all:
            await process.start()

    async def close(self) -> None:
        """End all processes."""
        for process in self._all:
            await process.kill()


class _Process:
    """One decoding process with its pipes."""

    def __init__(self, pixels: int) -> None:
        self._pixels = pixels
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> asyncio.subprocess.Process:
        """Return the process, started if necessary."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "probprompt.serve.decode_worker", str(self._pixels)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,  # the service handles interrupts from the terminal
                limit=_BUFFER,
            )
        return self._process

    async def ask(self, wanted: int, short_side: int, data: bytes) -> tuple[int, int, int, bytes]:
        """Send one upload and wait for the answer."""
        process = await self.start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(REQUEST.pack(wanted, short_side, len(data)) + data)
        await process.stdin.drain()
        kind, width, height, size = ANSWER.unpack(await process.stdout.readexactly(ANSWER.size))
        return kind, width, height, await process.stdout.readexactly(size)

    async def kill(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def child_environment() -> dict[str, str]:
    """Return the environment of a child process: the same package, and one thread."""
    home = str(Path(probprompt.__file__).parent.parent)
    paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}


Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
_SHOWN = 80  # characters of a file's name


class BadRequestError(Exception):
    """An invalid request, with what is missing."""


@dataclass(frozen=True)
class Upload:
    """One file with the sender's name; its bytes may be on disk."""

    name: str
    source: UploadFile | bytes

    async def read(self) -> bytes:
        """Return the file's bytes."""
        return self.source if isinstance(self.source, bytes) else await self.source.read()


@dataclass(frozen=True)
class Lesson:
    """Images by class, and whether existing classes may be extended."""

    classes: dict[str, list[Upload]]
    refine: bool


@asynccontextmanager
async def question(request: Request, limits: Limits) -> AsyncIterator[list[Upload]]:
    """Read the images to classify: files of a form, or one image as the body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind == "application/octet-stream":
        yield [Upload("image", await _whole_body(request, limits))]
        return
    if kind != "multipart/form-data":
        raise BadRequestError(
            f"Unsupported content type {kind or 'none'!r}. Send files named 'images' as multipart/form-data, or one "
            "image with its own type, such as image/jpeg."
        )
    async with request.form(max_files=limits.images + 1, max_fields=8) as form:
        yield _uploads(form.getlist("images"), limits.images, limits)


@asynccontextmanager
async def lesson(request: Request, limits: Limits) -> AsyncIterator[Lesson]:
    """Read a lesson from a form."""
    async with request.form(max_files=limits.lesson_images + 1, max_fields=limits.lesson_images + 64) as form:
        names = [_class_name(name, limits) for name in form.getlist("names")]
        if not names or len({same_name(name) for name in names}) < len(names):
            raise BadRequestError("Expected distinct class names. Send each once in a field 'names'.")
        uploads = _uploads(form.getlist("images"), limits.lesson_images, limits)
        places = _places([str(place) for place in form.getlist("of")], len(uploads), len(names))
        known = str(form.get("known", "refuse"))
        if known not in ("refuse", "refine"):
            raise BadRequestError(f"Unknown value {known!r} of 'known'. Send 'refuse' or 'refine'.")
        classes: dict[str, list[Upload]] = {name: [] for name in names}
        for upload, place in zip(uploads, places, strict=True):
            classes[names[place]].append(upload)
        for name in names:
            if not classes[name]:
                raise BadRequestError(f"No image of {name!r}. Send files named 'images'.")
        yield Lesson(classes, known == "refine")


async def decode_each(
    decoders: Decoders, uploads: list[Upload], hold: Callable[[Pixels], None]
) -> list[Pixels | RefusedImageError]:
    """Return the pixels of each file, or the error; ``hold`` counts them and may raise."""

    async def one(upload: Upload) -> Pixels | RefusedImageError:
        try:
            pixels = await decoders.pixels_of(await upload.read())
        except RefusedImageError as problem:
            return problem
        hold(pixels)
        return pixels

    return await each(one, uploads, decoders.count)  # files are read into memory one by one


async def each(work: Callable[[Item], Awaitable[Outcome]], items: Sequence[Item], most: int) -> list[Outcome]:
    """Process items, a few at a time; after an error, finish running ones only."""
    slots, failed = asyncio.Semaphore(most), list[Exception]()

    async def one(item: Item) -> list[Outcome]:
        async with slots:
            if failed:
                return []
            try:
                return [await work(item)]
            except Exception as problem:  # noqa: BLE001 (raised below, after running items)
                failed.append(problem)
                return []

    outcomes = await asyncio.gather(*map(one, items))
    if failed:
        raise failed[0]
    return [outcome for some in outcomes for outcome in some]


async def _whole_body(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    async for part in request.stream():
        _check_size(len(body) + len(part), limits)
        body += part
    return bytes(body)


def _uploads(parts: list[UploadFile | str], most: int, limits: Limits) -> list[Upload]:
    files = [part for part in parts if isinstance(part, UploadFile)]
    if not files:
        raise BadRequestError("No image in the request. Send files named 'images'.")
    if len(files) > most:
        raise RequestTooLargeError(413, f"More than {most} images in one request. Send several requests.")
    for file in files:
        _check_size(file.size or 0, limits)
    return [Upload(plain(file.filename or "")[:_SHOWN], file) for file in files]


def _check_size(size: int, limits: Limits) -> None:
    if size > limits.image_bytes:
        raise RequestTooLargeError(
            413, f"A file exceeds the limit of {limits.image_bytes} bytes. Send a smaller image."
        )


def _places(given: list[str], files: int, names: int) -> list[int]:
    """Return the index of each file's name, which is optional if there is one name."""
    if not given and names == 1:
        return [0] * files
    if len(given) != files or not all(place.isdecimal() and int(place) < names for place in given):
        raise BadRequestError(
            f"Expected {files} fields 'of' for {names} names: the index of each image's name, from 0."
        )
    return [int(place) for place in given]


def _class_name(given: UploadFile | str, limits: Limits) -> str:
    if isinstance(given, UploadFile):
        raise BadRequestError("Got a file in 'names'. Send text.")
    name = plain(given)
    if not name or len(name) > limits.name_length:
        raise BadRequestError(f"Class name of {len(name)} characters. Use 1 to {limits.name_length}.")
    return clean_name(name)


def plain(text: str) -> str:
    """Return a name on one line, composed and without control characters.

    >>> plain("  snow\\n leopard\\x00 ")
    'snow leopard'
    """
    visible = "".join(" " if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") else c for c in text)
    return unicodedata.normalize("NFC", " ".join(visible.split()))
