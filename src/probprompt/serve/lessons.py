"""Run accepted lessons and rollbacks one by one, lessons in a separate process.

A job that was running when the service stopped runs again at the next start, unless the history of the model shows
that it had finished.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from probprompt.classifier import ContinualClassifier, changing
from probprompt.classifier.outputs import LearnReport
from probprompt.classifier.store import Store
from probprompt.errors import UserError, shorten
from probprompt.serve.jobs import JobStore, now
from probprompt.serve.learn_worker import WAIT_SECONDS, Message, Request
from probprompt.serve.schemas import Job, JobChanges, Report, Risk
from probprompt.serve.uploads import child_environment

IDLE_SECONDS = 2.0
"""Seconds between two checks for changes of the model while no job is queued."""
_TAIL = 300  # characters of the last line of a process that ended
Count = Callable[[str, str], None]
"""Called with the kind of a finished job and its state."""


class JobRunner:
    """A thread that runs jobs one by one in the order of acceptance."""

    def __init__(
        self, store: JobStore, run: Callable[[Job], JobChanges], count: Count, idle: Callable[[], None]
    ) -> None:
        self._store, self._run_job, self._count, self._idle = store, run, count, idle
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)
        self.closing = False

    def start(self) -> None:
        """Start, with the jobs that an earlier service left unfinished."""
        self._thread.start()

    def wake(self) -> None:
        """Check for jobs now."""
        self._wake.set()

    def stop(self) -> None:
        """Start no further job; the caller has to interrupt the running one."""
        self.closing = True
        self._wake.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _work(self) -> None:
        while not self.closing:
            self._wake.clear()
            waiting = self._store.unfinished()
            if waiting:
                self._run(waiting[0])
            elif not self._wake.wait(IDLE_SECONDS):
                with suppress(Exception):  # the next check tries again; jobs must continue
                    self._idle()

    def _run(self, job: Job) -> None:
        changes: JobChanges
        try:
            started = self._store.begin(job.id)
            if started is None:
                return
            changes = self._run_job(started)
        except InterruptedError:  # the service ends; the job stays unfinished and runs again
            return
        except UserError as problem:
            changes = {"state": "failed", "error": str(problem)}
        except Exception as problem:  # noqa: BLE001 (a failed job must not end later ones)
            changes = {"state": "failed", "error": f"{type(problem).__name__}: {problem}"}
        self._count(job.kind, changes["state"])
        with suppress(UserError):  # the disk may be full; the next start determines the result again
            changes.update({"finished": now(), "progress": None})
            self._store.update(job.id, **changes)


class _CanceledError(Exception):
    """A job was canceled while it was running."""


class LessonRunner:
    """Runs jobs on the model in a folder and passes on each new version."""

    def __init__(
        self,
        folder: Path,
        store: JobStore,
        switch: Callable[[ContinualClassifier], None],
        answering: Callable[[], int],
        count: Count,
        device: str | None = None,
        held: tuple[int, ...] = (),
    ) -> None:
        self._folder, self._store, self._device = folder, store, device
        self._switch, self._answering = switch, answering
        self._held = held  # handles of the lock on the folder, which a learning process holds as well
        self._runner = JobRunner(store, self._run, count, self._follow)
        self._process: subprocess.Popen[bytes] | None = None
        self._canceled: set[int] = set()
        self._lock = threading.Lock()
        self.start, self.wake = self._runner.start, self._runner.wake

    def close(self) -> None:
        """Stop; an interrupted lesson stays accepted."""
        self._runner.stop()
        self._kill()
        self._runner.join()

    def cancel(self, number: int) -> Job | None:
        """Cancel a job that is not finished; None if it does not exist."""
        job = self._store.cancel_waiting(number)
        if job is not None and job.state == "running":
            self._canceled.add(number)
            self._kill()
        return job

    def _kill(self) -> None:
        """Interrupt learning; the saved model is the old or the new version."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _load(self) -> ContinualClassifier:
        return ContinualClassifier.load(self._folder, device=self._device)

    def _follow(self) -> None:
        """Switch to a version that another process has saved."""
        with suppress(UserError):  # a change may be in progress; the next check tries again
            if Store(self._folder).head()["version"] != self._answering():
                self._switch(self._load())

    def _run(self, job: Job) -> JobChanges:
        changes = self._roll_back(job) if job.kind == "rollback" else self._teach(job)
        if changes["state"] == "done":
            self._switch(self._load())
        return changes

    def _roll_back(self, job: Job) -> JobChanges:
        assert job.to is not None

        def busy() -> None:  # another process is changing the model
            if self._runner.closing:
                raise InterruptedError
            if job.id in self._canceled:
                raise _CanceledError
            time.sleep(WAIT_SECONDS)

        try:
            with changing(self._folder, self._device, busy=busy) as classifier:
                last = classifier.history()[-1]
                done = last.what == "rolled back" and last.note == f"to version {job.to}" and last.when >= job.created
                if not done:  # unless it finished just before the service was killed
                    classifier.rollback(job.to)
        except _CanceledError:
            return {"state": "cancelled"}
        return _done(classifier.version)

    def _teach(self, job: Job) -> JobChanges:
        before = self._load()
        learned = version_of(before, job)
        if learned is not None:  # finished just before the service was killed
            return _done(learned)
        self._store.update(job.id, before=before.version)
        answer = self._learn(job)
        if isinstance(answer, Message):
            if answer.report is None:
                raise UserError(answer.error)
            warnings = [*job.warnings, *answer.report.warnings]
            return {**_done(answer.report.version), "report": _report(answer.report), "warnings": warnings}
        learned = version_of(self._load(), job)
        if learned is not None:  # saved, but the process ended before its report
            return _done(learned)
        if job.id in self._canceled:
            return {"state": "cancelled"}
        if self._runner.closing:
            raise InterruptedError
        raise UserError(f"Learning stopped early ({answer}). The model is unchanged. Try again with fewer images.")

    def _learn(self, job: Job) -> Message | str:
        """Learn in a process; return its message, or as text how it ended."""
        images = {name: [str(path) for path in paths] for name, paths in self._store.images(job).items()}
        request = Request(images=images, refine=job.refine, name=title_of(job), device=self._device)
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._runner.closing:
                    raise InterruptedError
                if job.id in self._canceled:
                    return "canceled"
                self._process = process = subprocess.Popen(
                    [sys.executable, "-m", "probprompt.serve.learn_worker", str(self._folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=child_environment(),
                    pass_fds=self._held,
                    start_new_session=True,  # the service handles interrupts from the terminal
                )
            try:
                return self._listen(job, process, request) or _last_words(process, errors)
            finally:
                with self._lock:
                    self._process = None
                process.kill()
                process.wait()

    def _listen(self, job: Job, process: subprocess.Popen[bytes], request: Request) -> Message | None:
        assert process.stdin is not None and process.stdout is not None
        # If it has ended already, writing fails, and so does closing what could not be written.
        with suppress(BrokenPipeError), process.stdin, process.stdout:
            process.stdin.write(request.model_dump_json().encode() + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                message = Message.model_validate_json(line)
                if message.progress is None:
                    return message
                self._store.update(job.id, progress=message.progress)
        process.wait()
        return None


def title_of(job: Job) -> str:
    """Return the note of a lesson in the model's history."""
    return f"{shorten((taught.name for taught in job.classes), 3)} (lesson {job.id})"


def version_of(classifier: ContinualClassifier, job: Job) -> int | None:
    """Return the version that a job created, found by title and time; None without one."""
    title, versions = title_of(job), reversed(classifier.history())
    return next((one.number for one in versions if one.note.startswith(title) and one.when >= job.created), None)


def _done(version: int) -> JobChanges:
    # Another process may have changed the model while the job was queued.
    return {"state": "done", "before": version - 1, "version": version}


def _report(learned: LearnReport) -> Report:
    fields = {name: value for name, value in vars(learned).items() if name in Report.model_fields}
    risks = [Risk(**vars(risk)) for risk in learned.confusion_risks]
    return Report(**{**fields, "classes": [*learned.classes, *learned.refined], "retention": risks})


def _last_words(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """Return how a process ended, with the last line that it wrote."""
    code = process.wait()
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    end = f"killed by signal {-code}, perhaps out of memory" if code < 0 else f"exit code {code}"
    return f"{end}: {lines[-1][-_TAIL:]}" if lines else end
