"""What a request brings: files within limits, whose names are words to show and nothing else."""

import asyncio
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from starlette.datastructures import UploadFile
from starlette.requests import Request

from probprompt.classifier.pictures import clean_name, same_name
from probprompt.data.images import Pixels
from probprompt.serve.decoding import Decoders, RefusedImageError
from probprompt.serve.security import Limits, TooMuchError

Item = TypeVar("Item")
Found = TypeVar("Found")
_SHOWN = 80  # characters of a file's name


class BadRequestError(Exception):
    """A request that does not say what it should; the message says what is missing."""


@dataclass(frozen=True)
class Upload:
    """One file: what the sender calls it, and its bytes, which may still lie on disk."""

    name: str
    source: UploadFile | bytes

    async def read(self) -> bytes:
        """The file's bytes."""
        return self.source if isinstance(self.source, bytes) else await self.source.read()


@dataclass(frozen=True)
class Lesson:
    """What is to be taught: images of each class, and what happens to classes that are known already."""

    classes: dict[str, list[Upload]]
    refine: bool


@asynccontextmanager
async def question(request: Request, limits: Limits) -> AsyncIterator[list[Upload]]:
    """The images to classify: files of a form, or one image as the whole body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind == "application/octet-stream":
        yield [Upload("image", await _whole_body(request, limits))]
        return
    if kind != "multipart/form-data":
        raise BadRequestError(
            f"the body is {kind or 'of no type'}: send files named 'images' as multipart/form-data, or one image "
            "itself as image/jpeg, image/png or another image type"
        )
    async with request.form(max_files=limits.images + 1, max_fields=8) as form:
        yield _uploads(form.getlist("images"), limits.images, limits)


@asynccontextmanager
async def lesson(request: Request, limits: Limits) -> AsyncIterator[Lesson]:
    """What is to be taught: names, files, which name each file belongs to, and what to do with known classes."""
    async with request.form(max_files=limits.lesson_images + 1, max_fields=limits.lesson_images + 64) as form:
        names = [_class_name(name, limits) for name in form.getlist("names")]
        if not names or len({same_name(name) for name in names}) < len(names):
            raise BadRequestError("name each class once, in a field 'names'")
        uploads = _uploads(form.getlist("images"), limits.lesson_images, limits)
        places = _places([str(place) for place in form.getlist("of")], len(uploads), len(names))
        known = str(form.get("known", "refuse"))
        if known not in ("refuse", "refine"):
            raise BadRequestError(f"'known' is {known!r}, allowed: refuse, refine")
        classes: dict[str, list[Upload]] = {name: [] for name in names}
        for upload, place in zip(uploads, places, strict=True):
            classes[names[place]].append(upload)
        for name in names:
            if not classes[name]:
                raise BadRequestError(f"there is no image of {name!r}: send files named 'images'")
        yield Lesson(classes, known == "refine")


async def decode_each(
    decoders: Decoders, uploads: list[Upload], hold: Callable[[Pixels], None]
) -> list[Pixels | RefusedImageError]:
    """The pixels of each file, or why there are none; ``hold`` is told of each, and may refuse."""

    async def one(upload: Upload) -> Pixels | RefusedImageError:
        try:
            pixels = await decoders.pixels_of(await upload.read())
        except RefusedImageError as problem:
            return problem
        hold(pixels)
        return pixels

    return await each(one, uploads, decoders.count)  # a file is read into memory when its turn comes


async def each(work: Callable[[Item], Awaitable[Found]], items: Sequence[Item], at_once: int) -> list[Found]:
    """Do something with each item, a few at a time; where it fails for one, no other is begun or left under way."""
    slots, failed = asyncio.Semaphore(at_once), list[Exception]()

    async def one(item: Item) -> list[Found]:
        async with slots:
            if failed:
                return []
            try:
                return [await work(item)]
            except Exception as problem:  # noqa: BLE001 (raised below, when nothing is under way any more)
                failed.append(problem)
                return []

    found = await asyncio.gather(*map(one, items))
    if failed:
        raise failed[0]
    return [answer for answers in found for answer in answers]


async def _whole_body(request: Request, limits: Limits) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        _refuse_large(size, limits)
        parts.append(part)
    return b"".join(parts)


def _uploads(parts: list[UploadFile | str], most: int, limits: Limits) -> list[Upload]:
    files = [part for part in parts if isinstance(part, UploadFile)]
    if not files:
        raise BadRequestError("there is no image: send files named 'images'")
    if len(files) > most:
        raise TooMuchError(413, f"the request has more than {most} images: send several requests")
    for file in files:
        _refuse_large(file.size or 0, limits)
    return [Upload(plain(file.filename or "")[:_SHOWN], file) for file in files]


def _refuse_large(size: int, limits: Limits) -> None:
    if size > limits.image_bytes:
        raise TooMuchError(413, f"a file has more than the {limits.image_bytes} bytes that are allowed")


def _places(given: list[str], files: int, names: int) -> list[int]:
    """Which name each file belongs to; with one name that need not be said."""
    if not given and names == 1:
        return [0] * files
    if len(given) != files or not all(place.isdecimal() and int(place) < names for place in given):
        raise BadRequestError(
            f"with {names} names each of the {files} images needs a field 'of': the number of its name, from 0"
        )
    return [int(place) for place in given]


def _class_name(given: UploadFile | str, limits: Limits) -> str:
    if isinstance(given, UploadFile):
        raise BadRequestError("'names' holds a file: it must be text")
    name = plain(given)
    if not name or len(name) > limits.name_length:
        raise BadRequestError(f"a class name has {len(name)} characters, allowed: 1 to {limits.name_length}")
    return clean_name(name)


def plain(text: str) -> str:
    """A name as it can be shown: one line, composed, without control characters.

    >>> plain("  snow\\n leopard\\x00 ")
    'snow leopard'
    """
    visible = "".join(" " if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") else c for c in text)
    return unicodedata.normalize("NFC", " ".join(visible.split()))
