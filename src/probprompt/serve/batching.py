"""Images of different requests are classified together; each answer is that of the image alone."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from PIL import Image

from probprompt.classifier import ContinualClassifier, Prediction
from probprompt.data.images import Pixels


class OverloadedError(Exception):
    """More images are waiting than may wait."""


class Room:
    """How much may wait at a time: images, counted before they are decoded, and the bytes of those that are."""

    def __init__(self, images: int, size: int) -> None:
        self._most, self._size = images, size
        self.images = self.bytes = 0

    @contextmanager
    def taken(self, images: int) -> Iterator["Place"]:
        """A place for the images of one request, as long as the block lasts."""
        if self.images + images > self._most:
            raise OverloadedError
        place = Place(self)
        self.images += images
        try:
            yield place
        finally:
            self.images -= images
            self.bytes -= place.bytes

    def hold(self, size: int) -> None:
        """Take so many bytes."""
        if self.bytes + size > self._size:
            raise OverloadedError
        self.bytes += size


class Place:
    """What one request takes of the room."""

    def __init__(self, room: Room) -> None:
        self._room, self.bytes = room, 0

    def hold(self, pixels: Pixels) -> None:
        """Keep the pixels of an image."""
        self._room.hold(pixels.nbytes)
        self.bytes += pixels.nbytes


@dataclass(frozen=True)
class Answer:
    """What one request gets: all its predictions by one version of the model."""

    version: int
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class _Group:
    """The images of one request, which stay together."""

    images: Sequence[Pixels]
    top_k: int
    answer: "asyncio.Future[Answer]"


class Told(Protocol):
    """Is told of every batch."""

    def __call__(self, images: int, unknown: int) -> None:
        """So many images were classified together."""


class Batcher:
    """A thread that gathers requests for a moment and classifies their images in one go."""

    def __init__(
        self,
        classifier: ContinualClassifier,
        told: Told,
        window: float = 0.003,
        most: int = 16,
    ) -> None:
        self.classifier = classifier
        """Who answers: replaced as a whole, and never changed in between."""
        self._told, self._window, self._most = told, window, most
        self._groups: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="predictions", daemon=True)
        self._thread.start()

    async def predict(self, images: Sequence[Pixels], top_k: int) -> Answer:
        """Classify the images of one request, together with whatever others ask for at the time."""
        group = _Group(images, top_k, self._loop.create_future())
        self._groups.put(group)
        return await group.answer

    def close(self) -> None:
        """Answer what is waiting, then stop."""
        self._groups.put(None)
        self._thread.join()

    def _work(self) -> None:
        open_for_more = True
        while open_for_more:
            groups, open_for_more = self._gather()
            wanted = [group for group in groups if not group.answer.cancelled()]
            if wanted:
                self._answer(wanted)

    def _gather(self) -> tuple[list[_Group], bool]:
        """Whole requests, until there are enough images or the moment is over; and whether more may come."""
        groups: list[_Group] = []
        until = None
        while sum(len(group.images) for group in groups) < self._most:
            try:
                patience = None if until is None else max(0.0, until - time.monotonic())
                group = self._groups.get(timeout=patience)
            except queue.Empty:
                break
            if group is None:
                return groups, False
            groups.append(group)
            until = until or time.monotonic() + self._window
        return groups, True

    def _answer(self, groups: Sequence[_Group]) -> None:
        classifier = self.classifier
        try:
            outcomes: list[tuple[_Group, Answer | Exception]] = list(self._together(classifier, groups))
        except Exception as problem:  # noqa: BLE001 (whatever it is, it is whose request it was to know)
            if len(groups) > 1:  # one request's trouble is not the others'
                for group in groups:
                    self._answer([group])
                return
            outcomes = [(groups[0], problem)]
        self._loop.call_soon_threadsafe(_deliver, outcomes)

    def _together(
        self, classifier: ContinualClassifier, groups: Sequence[_Group]
    ) -> Sequence[tuple[_Group, Answer | Exception]]:
        images = [Image.fromarray(pixels) for group in groups for pixels in group.images]
        top_k = max(group.top_k for group in groups)
        found: list[Prediction] = []
        for start in range(0, len(images), self._most):
            some = classifier.predict(images[start : start + self._most], top_k=top_k)
            self._told(len(some), sum(prediction.unknown for prediction in some))
            found += some
        answers, place = [], 0
        for group in groups:
            own = found[place : place + len(group.images)]
            place += len(own)
            cut = tuple(replace(prediction, top=prediction.top[: group.top_k]) for prediction in own)
            answers.append((group, Answer(classifier.version, cut)))
        return answers


def _deliver(outcomes: Sequence[tuple[_Group, Answer | Exception]]) -> None:
    """Hand out answers, in the loop of those who wait for them."""
    for group, outcome in outcomes:
        if group.answer.done():  # given up in the meantime
            continue
        if isinstance(outcome, Exception):
            group.answer.set_exception(outcome)
        else:
            group.answer.set_result(outcome)
