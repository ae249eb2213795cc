"""Lessons and undoings that were accepted: kept on disk before anybody is told so, and carried out one by one.

A job is a folder ``MODEL/serve/jobs/NUMBER`` with a ``job.json`` and, until it is finished, the images to learn, as
PNG files named by numbers. It appears by one renaming, so it is there as a whole or not at all. A job that was
under way when the service was stopped or killed is taken up again at the next start; the model's own history tells
whether it had been learned already.
"""

import os
import shutil
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from probprompt.errors import UserError
from probprompt.serve.schemas import FINISHED, Job
from probprompt.storage import natural_order, read_json, write_bytes, write_error, write_json

KEPT = 200
"""Finished jobs that are remembered."""
_STAGING = ".part"


def now() -> str:
    """The time, as it is written down."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class JobStore:
    """All jobs, on disk and in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"*{_STAGING}"):  # never accepted
                shutil.rmtree(left, ignore_errors=True)
        except OSError as problem:
            raise write_error(folder, problem) from problem
        self._jobs = {job.id: job for job in self._read()}
        self._last = max(self._jobs, default=0)

    def _read(self) -> Iterable[Job]:
        for path in sorted(self._folder.glob("*/job.json"), key=natural_order):
            try:
                yield Job.model_validate(read_json(path))
            except ValidationError as problem:
                wrong = problem.errors()[0]
                place = ".".join(map(str, wrong["loc"]))
                raise UserError(f"{path} is damaged: {place}: {wrong['msg']}. Move {path.parent} away") from None

    def all(self) -> list[Job]:
        """Every job that is remembered, the newest first."""
        with self._lock:
            return sorted(self._jobs.values(), key=lambda job: -job.id)

    def get(self, number: int) -> Job | None:
        """A job by its number."""
        with self._lock:
            return self._jobs.get(number)

    def unfinished(self) -> list[Job]:
        """Jobs that are to be carried out, in their order."""
        with self._lock:
            return sorted((job for job in self._jobs.values() if job.state not in FINISHED), key=lambda job: job.id)

    def draft(self) -> "Draft":
        """Begin a job: it counts from when it is accepted."""
        with self._lock:
            self._last += 1
            return Draft(self, self._last, self._folder / f"{self._last}{_STAGING}")

    def accept(self, draft: "Draft", job: Job) -> Job:
        """Keep a job: when this returns, neither a crash nor a power cut loses it."""
        with self._lock:
            write_json(draft.folder / "job.json", job.model_dump())
            try:
                draft.folder.rename(self.place(job.id))
                _settle(self._folder)
            except OSError as problem:
                raise write_error(self._folder, problem) from problem
            self._jobs[job.id] = job
            return job

    def place(self, number: int) -> Path:
        """The folder of a job."""
        return self._folder / str(number)

    def update(self, number: int, **changes: Any) -> Job:
        """Write down what became of a job; with that, the images of a finished one go."""
        with self._lock:
            job = self._jobs[number] = self._jobs[number].model_copy(update=changes)
            if changes.keys() != {"progress"}:  # progress is for those who watch, not for the disk
                write_json(self.place(number) / "job.json", job.model_copy(update={"progress": None}).model_dump())
            if job.state in FINISHED:
                shutil.rmtree(self.place(number) / "images", ignore_errors=True)
                self._forget_old()
            return job

    def begin(self, number: int) -> Job | None:
        """Mark a job as running; None where it was given up in the meantime."""
        with self._lock:
            job = self._jobs[number]
            return None if job.state in FINISHED else self.update(number, state="running")

    def cancel_waiting(self, number: int) -> Job | None:
        """Give up a job that has not begun; returns the job as it is then, None where there is no such job."""
        with self._lock:
            job = self._jobs.get(number)
            if job is None or job.state != "waiting":
                return job
            return self.update(number, state="cancelled", finished=now())

    def images(self, job: Job) -> dict[str, list[Path]]:
        """The files of each class of a lesson."""
        folder = self.place(job.id) / "images"
        return {
            taught.name: sorted((folder / str(index)).glob("*.png"), key=natural_order)
            for index, taught in enumerate(job.classes)
        }

    def _forget_old(self) -> None:
        finished = [job for job in self.all() if job.state in FINISHED]
        for job in finished[KEPT:]:
            shutil.rmtree(self.place(job.id), ignore_errors=True)
            del self._jobs[job.id]


class Draft:
    """A job that is being put together in a folder of its own."""

    def __init__(self, store: JobStore, number: int, folder: Path) -> None:
        self._store, self.number, self.folder = store, number, folder
        try:
            folder.mkdir()
        except OSError as problem:
            raise write_error(folder, problem) from problem

    def add_image(self, index: int, image: int, png: bytes) -> None:
        """Keep an image of the class with this index; both names are numbers of ours."""
        place = self.folder / "images" / str(index)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise write_error(place, problem) from problem
        write_bytes(place / f"{image}.png", png)

    def accept(self, **details: Any) -> Job:
        """Make a job of it."""
        return self._store.accept(self, Job(id=self.number, created=now(), **details))

    def drop(self) -> None:
        """Leave nothing of it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _settle(folder: Path) -> None:
    """Have the disk hold a folder's entries."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
