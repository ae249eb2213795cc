"""Accepted lessons and rollbacks, on disk before the request is answered.

A job is a folder ``MODEL/serve/jobs/NUMBER`` with a ``job.json`` and, until it is finished, the images as PNG files
named by numbers. A single rename adds it, so it is complete or absent.
"""

import shutil
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

from pydantic import ValidationError

from probprompt.errors import UserError
from probprompt.serve.schemas import FINISHED, Job, JobChanges
from probprompt.storage import natural_order, read_json, sync, write_bytes, write_error, write_json

KEPT = 200
"""Number of finished jobs to keep."""
_STAGING = ".part"


def now() -> str:
    """Return the current time as jobs record it."""
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
                raise UserError(f"{path} is corrupted: {place}: {wrong['msg']}. Remove {path.parent}.") from None

    def all(self) -> list[Job]:
        """Return all kept jobs, the newest first."""
        with self._lock:
            return sorted(self._jobs.values(), key=lambda job: -job.id)

    def get(self, number: int) -> Job | None:
        """Return a job by its number."""
        with self._lock:
            return self._jobs.get(number)

    def unfinished(self) -> list[Job]:
        """Return the jobs to run, in the order in which they were accepted."""
        with self._lock:
            return [job for job in reversed(self.all()) if job.state not in FINISHED]

    def draft(self) -> "Draft":
        """Start a job, which is listed once it is accepted."""
        with self._lock:
            self._last += 1
            return Draft(self, self._last, self._folder / f"{self._last}{_STAGING}")

    def accept(self, draft: "Draft", job: Job) -> Job:
        """Store a job; no crash or power failure after this loses it."""
        with self._lock:
            write_json(draft.folder / "job.json", job.model_dump())
            try:
                draft.folder.rename(self.place(job.id))
                sync(self._folder)
            except OSError as problem:
                raise write_error(self._folder, problem) from problem
            self._jobs[job.id] = job
            return job

    def place(self, number: int) -> Path:
        """Return the folder of a job."""
        return self._folder / str(number)

    def update(self, number: int, **changes: Unpack[JobChanges]) -> Job:
        """Change and write a job; remove the images of a finished one."""
        with self._lock:
            job = self._jobs[number] = self._jobs[number].model_copy(update=changes)
            if changes.keys() != {"progress"}:  # progress is not stored
                write_json(self.place(number) / "job.json", job.model_copy(update={"progress": None}).model_dump())
            if job.state in FINISHED:
                shutil.rmtree(self.place(number) / "images", ignore_errors=True)
                for old in [one for one in self.all() if one.state in FINISHED][KEPT:]:
                    shutil.rmtree(self.place(old.id), ignore_errors=True)
                    del self._jobs[old.id]
            return job

    def begin(self, number: int) -> Job | None:
        """Mark a job as running; None if it was canceled in the meantime."""
        with self._lock:
            job = self._jobs[number]
            return None if job.state in FINISHED else self.update(number, state="running")

    def cancel_waiting(self, number: int) -> Job | None:
        """Cancel a job if it has not started; return it, or None if it does not exist."""
        with self._lock:
            job = self._jobs.get(number)
            if job is None or job.state != "waiting":
                return job
            return self.update(number, state="cancelled", finished=now())

    def images(self, job: Job) -> dict[str, list[Path]]:
        """Return the files of each class of a lesson."""
        folder = self.place(job.id) / "images"
        return {
            taught.name: sorted((folder / str(index)).glob("*.png"), key=natural_order)
            for index, taught in enumerate(job.classes)
        }


class Draft:
    """A job in preparation, in a separate folder."""

    def __init__(self, store: JobStore, number: int, folder: Path) -> None:
        self._store, self.number, self.folder = store, number, folder
        try:
            folder.mkdir()
        except OSError as problem:
            raise write_error(folder, problem) from problem

    def add_image(self, index: int, image: int, png: bytes) -> None:
        """Store an image of a class; both names are numbers, never the sender's."""
        place = self.folder / "images" / str(index)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise write_error(place, problem) from problem
        write_bytes(place / f"{image}.png", png)

    def accept(self, **details: Any) -> Job:
        """Make it a job."""
        return self._store.accept(self, Job(id=self.number, created=now(), **details))

    def drop(self) -> None:
        """Remove its files."""
        shutil.rmtree(self.folder, ignore_errors=True)
