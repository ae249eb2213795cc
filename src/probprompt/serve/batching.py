"""Classify images of several requests in one batch; each answer depends on its image only."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

from PIL import Image

from probprompt.classifier import ContinualClassifier, Prediction
from probprompt.data.images import Pixels

BatchCallback = Callable[[int, int], None]
"""Called after each batch with its numbers of images and of unknown images."""


class OverloadedError(Exception):
    """More images are waiting than the capacity allows."""


class Capacity:
    """Limit on waiting images, counted before they are decoded, and on decoded bytes."""

    def __init__(self, images: int, size: int) -> None:
        self._most, self._size = images, size
        self.images = self.bytes = 0

    @contextmanager
    def reserve(self, images: int) -> Iterator[Callable[[Pixels], None]]:
        """Reserve capacity for the images of a request; call the result for each decoded one."""
        if self.images + images > self._most:
            raise OverloadedError
        held = 0

        def hold(pixels: Pixels) -> None:
            nonlocal held
            if self.bytes + pixels.nbytes > self._size:
                raise OverloadedError
            self.bytes += pixels.nbytes
            held += pixels.nbytes

        self.images += images
        try:
            yield hold
        finally:
            self.images -= images
            self.bytes -= held


@dataclass(frozen=True)
class Answer:
    """Predictions for one request, all by one version."""

    version: int
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class _Group:
    """Images of one request."""

    images: Sequence[Pixels]
    top_k: int
    answer: Future[Answer]


class Batcher:
    """A thread that collects requests for a moment and classifies their images jointly."""

    def __init__(
        self, classifier: ContinualClassifier, callback: BatchCallback, window: float = 0.003, most: int = 16
    ) -> None:
        self.classifier = classifier
        """The current version; it is replaced as a whole and never changed."""
        self._callback, self._window, self._most = callback, window, most
        self._groups: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="predictions", daemon=True)
        self._thread.start()

    async def predict(self, images: Sequence[Pixels], top_k: int) -> Answer:
        """Classify the images of one request."""
        group = _Group(images, top_k, Future())
        self._groups.put(group)
        return await asyncio.wrap_future(group.answer)

    def close(self) -> None:
        """Answer waiting requests, then stop."""
        self._groups.put(None)
        self._thread.join()

    def _work(self) -> None:
        open_for_more = True
        while open_for_more:
            groups, open_for_more = self._gather()
            self._answer([group for group in groups if group.answer.set_running_or_notify_cancel()])

    def _gather(self) -> tuple[list[_Group], bool]:
        """Return requests until a batch is full or the window ends, and if more may come."""
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
            predictions = iter(self._predict(classifier, groups))
        except Exception as problem:  # noqa: BLE001 (any error answers the request)
            if len(groups) == 1:
                groups[0].answer.set_exception(problem)
                return
            for group in groups:  # an error of one request must not fail the others
                self._answer([group])
            return
        for group in groups:
            own = (replace(one, top=one.top[: group.top_k]) for one in islice(predictions, len(group.images)))
            group.answer.set_result(Answer(classifier.version, tuple(own)))

    def _predict(self, classifier: ContinualClassifier, groups: Sequence[_Group]) -> list[Prediction]:
        images = [Image.fromarray(pixels) for group in groups for pixels in group.images]
        top_k = max((group.top_k for group in groups), default=1)
        predictions: list[Prediction] = []
        for start in range(0, len(images), self._most):
            some = classifier.predict(images[start : start + self._most], top_k=top_k)
            self._callback(len(some), sum(prediction.unknown for prediction in some))
            predictions += some
        return predictions
