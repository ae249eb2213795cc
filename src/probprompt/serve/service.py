"""Service behind the routes: predictions, lessons, history, counters."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from probprompt.classifier import ContinualClassifier
from probprompt.classifier.store import lock_folder
from probprompt.data.images import Pixels
from probprompt.data.inputs import same_name
from probprompt.engine.build import pick_device
from probprompt.errors import UserError, shorten
from probprompt.serve.batching import Answer, Batcher, Capacity
from probprompt.serve.jobs import Draft, JobStore
from probprompt.serve.lessons import LessonRunner
from probprompt.serve.schemas import (
    Job,
    KeptVersion,
    PredictedImage,
    Predictions,
    draw_matrix,
    draw_prompts,
    once_per_version,
)
from probprompt.serve.security import Access, Limits
from probprompt.serve.uploads import Decoders, Lesson, RefusedImageError, Upload, decode_each, each

DECODERS = 2
WAITING_IMAGES, WAITING_BYTES = 1024, 2**30
"""Largest number of images that wait for a prediction, and of bytes of decoded ones."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)
LOCK_SECONDS = 5.0
"""Seconds to wait for the folder, until the learning process of a killed service has ended."""


class KnownClassError(Exception):
    """A lesson on an existing class that does not allow to extend it."""


class Metrics:
    """Counters and times of one service, for Prometheus."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by route, method and status.", "route", "method", "status")
        self.seconds = self._histogram("request_seconds", "Time from a request to its response.", SECONDS, "route")
        self.images = self._counter("predicted_images", "Images that were classified.")
        self.unknown = self._counter("unknown_images", "Images found to be of no known class.")
        self.refused = self._counter("refused_images", "Uploads that could not be decoded.")
        self.batches = self._histogram("batch_images", "Images that were classified together.", SIZES)
        self.jobs = self._counter("jobs", "Jobs by kind and how they ended.", "kind", "state")

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"probprompt_{name}_total", about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, bounds: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"probprompt_{name}", about, labels, registry=self._registry, buckets=bounds)

    def gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Add a number that is read at each scrape."""
        Gauge(f"probprompt_{name}", about, registry=self._registry).set_function(value)

    def text(self) -> str:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry).decode()


class Service:
    """Service of the model in a folder."""

    def __init__(self, folder: Path, access: Access, limits: Limits, device: str | None = None) -> None:
        self.folder, self.access, self.limits, self.device = folder, access, limits, device
        self.metrics, self.capacity = Metrics(), Capacity(WAITING_IMAGES, WAITING_BYTES)
        self._first = ContinualClassifier.load(folder, device=device)
        warm_up(self._first)
        self._lock = hold(folder)
        self.jobs = JobStore(folder / "serve" / "jobs")
        self.accuracy, self.prompts = once_per_version(draw_matrix), once_per_version(draw_prompts)
        self._start_time = time.time()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while the block lasts; accepted jobs are kept for the next start."""
        classifier = self._first
        self.decoders = Decoders(DECODERS, self.limits.pixels, classifier.short_side)
        most = 16 if pick_device(self.device).type == "cpu" else 64  # per batch, while others arrive
        self.batcher = Batcher(classifier, self._count, most=most)
        held = () if self._lock is None else (self._lock.fileno(),)
        self.lessons = LessonRunner(
            self.folder, self.jobs, self._switch, lambda: self.classifier.version, self._count_job, self.device, held
        )
        self._add_gauges()
        await self.decoders.start()
        self.lessons.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.lessons.close)
            await asyncio.to_thread(self.batcher.close)
            await self.decoders.close()
            self.close()

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            self._lock.close()

    @property
    def classifier(self) -> ContinualClassifier:
        """The current version."""
        return self.batcher.classifier

    def _switch(self, classifier: ContinualClassifier) -> None:
        """Make this version current; running requests finish with the earlier one."""
        warm_up(classifier)
        self.batcher.classifier = classifier

    def _count(self, images: int, unknown: int) -> None:
        self.metrics.batches.observe(images)
        self.metrics.images.inc(images)
        self.metrics.unknown.inc(unknown)

    def _count_job(self, kind: str, state: str) -> None:
        self.metrics.jobs.labels(kind, state).inc()

    def _add_gauges(self) -> None:
        add = self.metrics.gauge
        add("model_version", "Current version.", lambda: self.classifier.version)
        add("model_classes", "Number of classes.", lambda: len(self.classifier.classes))
        add("waiting_images", "Images waiting for a prediction.", lambda: self.capacity.images)
        add("unfinished_jobs", "Accepted jobs that are not finished yet.", lambda: len(self.jobs.unfinished()))
        add("decoder_deaths", "Decoding processes that were replaced.", lambda: self.decoders.deaths)
        add("start_time_seconds", "Start of the service in Unix time.", lambda: self._start_time)

    async def predict(self, uploads: list[Upload], top_k: int) -> Predictions:
        """Classify the images of one request; unreadable files get the reason."""
        with self.capacity.reserve(len(uploads)) as take:
            decoded = await decode_each(self.decoders, uploads, take)
            readable = [pixels for pixels in decoded if not isinstance(pixels, RefusedImageError)]
            empty = Answer(self.classifier.version, ())
            answer = await self.batcher.predict(readable, top_k) if readable else empty
        self.metrics.refused.inc(len(uploads) - len(readable))
        predictions = iter(answer.predictions)
        rows = [
            PredictedImage.refused(upload.name, str(pixels))
            if isinstance(pixels, RefusedImageError)
            else PredictedImage.of(upload.name, next(predictions))
            for upload, pixels in zip(uploads, decoded, strict=True)
        ]
        return Predictions(version=answer.version, predictions=rows)

    async def teach(self, lesson: Lesson) -> Job:
        """Accept a lesson; it is on disk when this returns."""
        lesson = self._as_known(lesson)
        draft = await asyncio.to_thread(self.jobs.draft)
        try:
            kept, warnings = await self._keep(draft, lesson)
            self._as_known(lesson)  # another lesson on the same class may have been accepted
            job = await asyncio.to_thread(
                draft.accept,
                kind="teach",
                classes=[{"name": name, "images": count} for name, count in kept.items()],
                refine=lesson.refine,
                warnings=warnings,
            )
        finally:
            draft.drop()  # removes nothing once it is accepted
        self.lessons.wake()
        return job

    def roll_back(self, to: int) -> Job:
        """Accept a rollback to a version."""
        versions = [version.number for version in self.classifier.history()]
        if to not in versions:
            raise UserError(f"Version {to} is not kept. Choose one of {shorten(reversed(versions), 20)}.")
        job = self.jobs.draft().accept(kind="rollback", to=to)
        self.lessons.wake()
        return job

    def history(self) -> list[KeptVersion]:
        """Return the kept versions, the newest first."""
        versions = self.classifier.history()
        return [KeptVersion(**vars(one), current=one is versions[-1]) for one in reversed(versions)]

    def _as_known(self, lesson: Lesson) -> Lesson:
        """Use the spelling of existing classes; reject them unless they may be extended."""
        waiting = [taught.name for job in self.jobs.unfinished() for taught in job.classes]
        known = {same_name(name): name for name in (*self.classifier.classes, *waiting)}
        again = [name for name in lesson.classes if same_name(name) in known]
        if again and not lesson.refine:
            raise KnownClassError(
                f"Classes already in the model: {shorten(again)}. Add images to them with known=refine, or choose "
                "another name."
            )
        return replace(lesson, classes={known.get(same_name(name), name): own for name, own in lesson.classes.items()})

    async def _keep(self, draft: Draft, lesson: Lesson) -> tuple[dict[str, int], list[str]]:
        """Store the images of a lesson; return counts by class, and warnings."""
        counts, warnings = {}, []
        for index, (name, uploads) in enumerate(lesson.classes.items()):
            outcomes = await each(partial(self._keep_image, draft, index), list(enumerate(uploads)), 2 * DECODERS)
            counts[name] = outcomes.count(None)
            problems = [f"Skipped {outcome}" for outcome in outcomes if outcome is not None]
            if not counts[name]:
                raise UserError(f"No usable image of {name!r}. {shorten(problems)}")
            warnings += problems
        return counts, warnings

    async def _keep_image(self, draft: Draft, index: int, numbered: tuple[int, Upload]) -> str | None:
        """Store an image of a class; return the reason if it cannot be read."""
        number, upload = numbered
        try:
            png = await self.decoders.png_of(await upload.read())
        except RefusedImageError as problem:
            self.metrics.refused.inc()
            return f"{upload.name}: {problem}"
        await asyncio.to_thread(draft.add_image, index, number, png)
        return None


def warm_up(classifier: ContinualClassifier) -> None:
    """Load everything before the first request."""
    if classifier.classes:
        blank: Pixels = np.zeros((32, 32, 3), np.uint8)
        classifier.predict([blank])


def hold(folder: Path) -> IO[str] | None:
    """Lock a folder against a second service; None if files cannot be locked."""
    until = time.monotonic() + LOCK_SECONDS

    def wait() -> None:
        if time.monotonic() > until:
            raise UserError(f"Another service is using {folder}. Stop it first.")
        time.sleep(0.1)

    return lock_folder(folder / "serve", "lock", wait)
