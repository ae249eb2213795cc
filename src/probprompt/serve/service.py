"""The service itself, whatever asks it: predictions, lessons, history, and what is going on."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from probprompt.classifier import ContinualClassifier
from probprompt.data.images import Pixels
from probprompt.data.inputs import same_name
from probprompt.engine.build import pick_device
from probprompt.errors import UserError, shorten
from probprompt.serve.batching import Batcher, Room
from probprompt.serve.jobs import Draft, JobStore
from probprompt.serve.lessons import LessonRunner
from probprompt.serve.schemas import (
    AccuracyMatrix,
    Insight,
    Job,
    KeptVersion,
    PredictedImage,
    Predictions,
    PromptFigures,
)
from probprompt.serve.security import Access, Limits
from probprompt.serve.uploads import Decoders, Lesson, RefusedImageError, Upload, decode_each, each
from probprompt.storage import lock, write_error

DECODERS = 2
WAITING_IMAGES, WAITING_BYTES = 1024, 2**30
"""What may wait for its prediction at a time: images, and the memory of those that are decoded."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)
LOCK_SECONDS = 5.0
"""How long to wait for the folder: a process that learned for a killed service may need a moment to notice."""


class KnownClassError(Exception):
    """A lesson on a class that is known already, without saying what to do; the message says how."""


class Metrics:
    """Counters and times of one service, for Prometheus."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by route, method and status.", "route", "method", "status")
        self.seconds = self._histogram("request_seconds", "Time from a request to its answer.", SECONDS, "route")
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
        """Add a number that is looked up at each scrape."""
        Gauge(f"probprompt_{name}", about, registry=self._registry).set_function(value)

    def text(self) -> str:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._registry).decode()


class Service:
    """A model in a folder, answering."""

    def __init__(self, folder: Path, access: Access, limits: Limits, device: str | None = None) -> None:
        self.folder, self.access, self.limits, self.device = folder, access, limits, device
        self.metrics, self.room = Metrics(), Room(WAITING_IMAGES, WAITING_BYTES)
        self._first = ContinualClassifier.load(folder, device=device)
        warm_up(self._first)
        self._lock = hold(folder)
        self.jobs = JobStore(folder / "serve" / "jobs")
        self.insight = Insight()
        self._begun = time.time()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer as long as the block lasts; then finish what was asked, and leave accepted jobs for the next start."""
        classifier = self._first
        self.decoders = Decoders(DECODERS, self.limits.pixels, classifier.short_side)
        most = (
            16 if pick_device(self.device).type == "cpu" else 64
        )  # fewer: others are received while these are classified
        self.batcher = Batcher(classifier, self._count, most=most)
        held = () if self._lock is None else (self._lock.fileno(),)
        self.school = LessonRunner(
            self.folder, self.jobs, self._switch, lambda: self.classifier.version, self._count_job, self.device, held
        )
        self._add_gauges()
        await self.decoders.start()
        self.school.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.school.close)
            await asyncio.to_thread(self.batcher.close)
            await self.decoders.close()
            self.close()

    def close(self) -> None:
        """Let others have the folder."""
        if self._lock is not None:
            self._lock.close()

    @property
    def classifier(self) -> ContinualClassifier:
        """The version that answers now."""
        return self.batcher.classifier

    def _switch(self, classifier: ContinualClassifier) -> None:
        """From now on this version answers; requests under way are finished by the one they began with."""
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
        add("model_version", "The version that answers.", lambda: self.classifier.version)
        add("model_classes", "Classes that it knows.", lambda: len(self.classifier.classes))
        add("waiting_images", "Images that wait for their prediction.", lambda: self.room.images)
        add("unfinished_jobs", "Accepted jobs that are not finished.", lambda: len(self.jobs.unfinished()))
        add("decoder_deaths", "Decoding processes that were replaced.", lambda: self.decoders.deaths)
        add("start_time_seconds", "When the service was started, in Unix time.", lambda: self._begun)

    # What is asked ---------------------------------------------------------------------------------------------------

    async def predict(self, uploads: list[Upload], top_k: int) -> Predictions:
        """Classify the images of one request; a file that cannot be read gets its reason."""
        with self.room.taken(len(uploads)) as place:
            return await self._predict(uploads, await decode_each(self.decoders, uploads, place.hold), top_k)

    async def _predict(
        self, uploads: list[Upload], decoded: list[Pixels | RefusedImageError], top_k: int
    ) -> Predictions:
        readable = [pixels for pixels in decoded if not isinstance(pixels, RefusedImageError)]
        if readable:
            answer = await self.batcher.predict(readable, top_k)
            version, found = answer.version, iter(answer.predictions)
        else:
            version, found = self.classifier.version, iter(())
        rows = []
        for upload, pixels in zip(uploads, decoded, strict=True):
            if isinstance(pixels, RefusedImageError):
                self.metrics.refused.inc()
                rows.append(PredictedImage.refused(upload.name, str(pixels)))
            else:
                rows.append(PredictedImage.of(upload.name, next(found)))
        return Predictions(version=version, predictions=rows)

    async def teach(self, lesson: Lesson) -> Job:
        """Accept a lesson: when this returns, it is on disk."""
        lesson = self._as_known(lesson)
        draft = await asyncio.to_thread(self.jobs.draft)
        try:
            kept, warnings = await self._keep(draft, lesson)
            self._as_known(lesson)  # another lesson on the same class may have been accepted in the meantime
            job = await asyncio.to_thread(
                draft.accept,
                kind="teach",
                classes=[{"name": name, "images": count} for name, count in kept.items()],
                refine=lesson.refine,
                warnings=warnings,
            )
        finally:
            draft.drop()  # nothing is there any more once it is accepted
        self.school.wake()
        return job

    def roll_back(self, to: int) -> Job:
        """Accept the wish to go back to a version."""
        versions = [version.number for version in self.classifier.history()]
        if to not in versions:
            raise UserError(f"version {to} is not kept: there are {shorten(reversed(versions), 20)}")
        job = self.jobs.draft().accept(kind="rollback", to=to)
        self.school.wake()
        return job

    def history(self) -> list[KeptVersion]:
        """What was learned when, the newest first."""
        classifier = self.classifier
        return [KeptVersion.of(version, classifier.version) for version in reversed(classifier.history())]

    async def accuracy(self) -> AccuracyMatrix:
        """The accuracy matrix."""
        return await asyncio.to_thread(self.insight.accuracy, self.classifier)

    async def prompts(self) -> PromptFigures:
        """Figures of prompt diversity."""
        return await asyncio.to_thread(self.insight.prompts, self.classifier)

    def _as_known(self, lesson: Lesson) -> Lesson:
        """Known classes, or such as wait to be learned, by the names they have; refused unless they may be refined."""
        waiting = [taught.name for job in self.jobs.unfinished() for taught in job.classes]
        known = {same_name(name): name for name in (*self.classifier.classes, *waiting)}
        again = [name for name in lesson.classes if same_name(name) in known]
        if again and not lesson.refine:
            raise KnownClassError(
                f"known already: {shorten(again)}. To add images to a known class send known=refine, or choose "
                "another name"
            )
        return replace(lesson, classes={known.get(same_name(name), name): own for name, own in lesson.classes.items()})

    async def _keep(self, draft: Draft, lesson: Lesson) -> tuple[dict[str, int], list[str]]:
        """Keep the images of a lesson as files of ours: how many of each class, and what could not be read."""
        counts, warnings = {}, []
        for index, (name, uploads) in enumerate(lesson.classes.items()):
            outcomes = await self._keep_class(draft, index, uploads)
            counts[name] = outcomes.count(None)
            problems = [f"left out: {outcome}" for outcome in outcomes if outcome is not None]
            if not counts[name]:
                raise UserError(f"no image of {name!r} can be used: {shorten(problems)}")
            warnings += problems
        return counts, warnings

    async def _keep_class(self, draft: Draft, index: int, uploads: Sequence[Upload]) -> list[str | None]:
        async def one(numbered: tuple[int, Upload]) -> str | None:
            number, upload = numbered
            try:
                png = await self.decoders.png_of(await upload.read())
            except RefusedImageError as problem:
                self.metrics.refused.inc()
                return f"{upload.name}: {problem}"
            await asyncio.to_thread(draft.add_image, index, number, png)
            return None

        return await each(one, list(enumerate(uploads)), 2 * self.decoders.count)


def warm_up(classifier: ContinualClassifier) -> None:
    """Have everything loaded before the first person asks."""
    if classifier.classes:
        blank: Pixels = np.zeros((32, 32, 3), np.uint8)
        classifier.predict([blank])


def hold(folder: Path) -> IO[str] | None:
    """Hold a model's folder against a second service; None where the system has no locks."""
    place, until = folder / "serve", time.monotonic() + LOCK_SECONDS
    while True:
        try:
            place.mkdir(exist_ok=True)
            return lock(place / "lock")
        except BlockingIOError:
            if time.monotonic() > until:
                raise UserError(f"another service works with {folder}: stop that one first") from None
        except OSError as problem:
            raise write_error(place, problem) from problem
        time.sleep(0.1)
