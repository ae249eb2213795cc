"""Lessons and undoings that were accepted: kept on disk before anybody is told so, and carried out one by one.

A job is a folder ``MODEL/serve/jobs/NUMBER`` with a ``job.json`` and, until it is finished, the images to learn, as
PNG files named by numbers. It appears by one renaming, so it is there as a whole or not at all. A job that was
under way when the service was stopped or killed is taken up again at the next start; the model's own history tells
whether it had been learned already.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from probprompt.classifier import ContinualClassifier, changing
from probprompt.classifier.store import Store
from probprompt.errors import UserError, shorten
from probprompt.serve.jobs import JobStore, now
from probprompt.serve.learn_worker import WAIT_SECONDS
from probprompt.serve.schemas import Job, Progress, Report, Risk
from probprompt.serve.uploads import child_environment

IDLE_SECONDS = 2.0
"""How often somebody looks around while there is nothing to do."""
CarryOut = Callable[[Job], dict[str, Any]]
"""Does what a job asks for and says what is to be written down of it."""


class JobRunner:
    """A thread that carries out jobs one by one, in the order in which they were accepted."""

    def __init__(
        self, store: JobStore, carry_out: CarryOut, told: Callable[[str, str], None], idle: Callable[[], None]
    ) -> None:
        self._store, self._carry_out, self._told, self._idle = store, carry_out, told, idle
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)

    def start(self) -> None:
        """Begin, with whatever was left undone."""
        self._thread.start()

    def wake(self) -> None:
        """Say that there is something to do."""
        self._wake.set()

    def stop(self) -> None:
        """Take up no further job; whoever carries one out must be told by the caller."""
        self._closing = True
        self._wake.set()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.is_alive():
            self._thread.join()

    @property
    def closing(self) -> bool:
        """Whether it is to end."""
        return self._closing

    def _work(self) -> None:
        while not self._closing:
            self._wake.clear()
            waiting = self._store.unfinished()
            if not waiting:
                if not self._wake.wait(IDLE_SECONDS):
                    with suppress(Exception):  # whatever it is, the next look will tell; jobs must go on
                        self._idle()
                continue
            self._run(waiting[0])

    def _run(self, job: Job) -> None:
        changes: dict[str, Any]
        try:
            begun = self._store.begin(job.id)
            if begun is None:
                return
            changes = self._carry_out(begun)
        except InterruptedError:  # the service ends: the job stays as it is, and is taken up again
            return
        except UserError as problem:
            changes = {"state": "failed", "error": str(problem)}
        except Exception as problem:  # noqa: BLE001 (a job that fails must not end those after it)
            changes = {"state": "failed", "error": f"{type(problem).__name__}: {problem}"}
        self._told(job.kind, changes["state"])
        with suppress(UserError):  # the disk is full, say: then the next start finds out again what became of it
            self._store.update(job.id, **{"finished": now(), "progress": None, **changes})


_TAIL = 300  # characters of a dead process's last words
Switch = Callable[[ContinualClassifier], None]


class _GivenUpError(Exception):
    """A job that nobody wants any more."""


class LessonRunner:
    """Carries out jobs on the model in a folder, one by one, and hands over each new version."""

    def __init__(
        self,
        folder: Path,
        store: JobStore,
        switch: Switch,
        answering: Callable[[], int],
        told: Callable[[str, str], None],
        device: str | None = None,
        held: tuple[int, ...] = (),
    ) -> None:
        self._folder, self._store, self._device = folder, store, device
        self._switch, self._answering = switch, answering
        self._held = held  # handles of the lock on the folder: as long as a process learns, it holds them, too
        self._runner = JobRunner(store, self._carry_out, told, self._follow)
        self._process: subprocess.Popen[bytes] | None = None
        self._cancelled: set[int] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin, with whatever was left undone."""
        self._runner.start()

    def wake(self) -> None:
        """Say that a job was accepted."""
        self._runner.wake()

    def close(self) -> None:
        """Stop: a lesson under way is broken off, and stays accepted."""
        self._runner.stop()
        self._kill()
        self._runner.join()

    def cancel(self, number: int) -> Job | None:
        """Give up a job that is not finished; None where there is no such job."""
        job = self._store.cancel_waiting(number)
        if job is not None and job.state == "running":
            self._cancelled.add(number)
            self._kill()
        return job

    def _kill(self) -> None:
        """Break off what is being learned: what is saved is the old version or the new one, never a mixture."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _carry_out(self, job: Job) -> dict[str, Any]:
        changes = self._roll_back(job) if job.kind == "rollback" else self._teach(job)
        if changes["state"] == "done":
            self._switch(ContinualClassifier.load(self._folder, device=self._device))
        return changes

    def _follow(self) -> None:
        """Where somebody else has changed the model on disk, let the new version answer."""
        with suppress(UserError):  # it may be in the middle of a change: the next look will tell
            found = Store(self._folder).head()["version"]
            if found != self._answering():
                self._switch(ContinualClassifier.load(self._folder, device=self._device))

    def _roll_back(self, job: Job) -> dict[str, Any]:
        assert job.to is not None

        def busy() -> None:  # somebody else is changing the model
            if self._runner.closing:
                raise InterruptedError
            if job.id in self._cancelled:
                raise _GivenUpError
            time.sleep(WAIT_SECONDS)

        try:
            with changing(self._folder, self._device, busy=busy) as classifier:
                made = went_back(classifier, job)
                if made is None:
                    classifier.rollback(job.to)
                    made = classifier.version
        except _GivenUpError:
            return {"state": "cancelled"}
        return {"state": "done", "before": made - 1, "version": made}

    # Lessons ---------------------------------------------------------------------------------------------------------

    def _teach(self, job: Job) -> dict[str, Any]:
        before = ContinualClassifier.load(self._folder, device=self._device)
        learned = version_of(before, job)
        if learned is not None:  # just before the service was killed
            return {"state": "done", "before": learned - 1, "version": learned}
        self._store.update(job.id, before=before.version)
        told = self._learn(job)
        if "report" in told:
            report = told["report"]
            return {
                "state": "done",
                "before": report["version"] - 1,  # somebody else may have changed it while this was waiting
                "version": report["version"],
                "report": read_report(report),
                "warnings": [*job.warnings, *report["warnings"]],
            }
        if "error" in told:
            raise UserError(told["error"])
        learned = version_of(ContinualClassifier.load(self._folder, device=self._device), job)
        if learned is not None:  # it was saved, but there was no time left to say so
            return {"state": "done", "before": learned - 1, "version": learned}
        if job.id in self._cancelled:
            return {"state": "cancelled"}
        if self._runner.closing:
            raise InterruptedError
        raise UserError(f"learning ended before it was done ({told['end']}); the model is as it was")

    def _learn(self, job: Job) -> dict[str, Any]:
        """Let a process learn: its report or error, or how it ended."""
        request = {
            "images": {name: [str(path) for path in paths] for name, paths in self._store.images(job).items()},
            "refine": job.refine,
            "name": title_of(job),
            "device": self._device,
        }
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._runner.closing:
                    raise InterruptedError
                if job.id in self._cancelled:
                    return {"end": "given up"}
                self._process = process = subprocess.Popen(
                    [sys.executable, "-m", "probprompt.serve.learn_worker", str(self._folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=child_environment(),
                    pass_fds=self._held,
                    start_new_session=True,  # an interrupt at the terminal is the service's to handle
                )
            try:
                return self._listen(job, process, request) or {"end": _last_words(process, errors)}
            finally:
                with self._lock:
                    self._process = None
                process.kill()
                process.wait()

    def _listen(self, job: Job, process: subprocess.Popen[bytes], request: dict[str, Any]) -> dict[str, Any] | None:
        assert process.stdin is not None and process.stdout is not None
        # It may be dead already: writing then fails, and closing what could not be written fails again.
        with suppress(BrokenPipeError), process.stdin, process.stdout:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                told: dict[str, Any] = json.loads(line)
                if "progress" not in told:
                    return told
                self._store.update(job.id, progress=Progress(**told["progress"]))
        process.wait()
        return None


def title_of(job: Job) -> str:
    """What a lesson is called in the model's history."""
    return f"{shorten((taught.name for taught in job.classes), 3)} (lesson {job.id})"


def version_of(classifier: ContinualClassifier, job: Job) -> int | None:
    """The version that a job made, where it did: by its title, and not before the job was accepted."""
    title = title_of(job)
    made = [
        version.number
        for version in classifier.history()
        if version.note.startswith(title) and version.when >= job.created
    ]
    return made[-1] if made else None


def went_back(classifier: ContinualClassifier, job: Job) -> int | None:
    """The version that a job to go back made just before the service was killed, where it did."""
    last = classifier.history()[-1]
    done = last.what == "rolled back" and last.note == f"to version {job.to}" and last.when >= job.created
    return last.number if done else None


def read_report(told: dict[str, Any]) -> Report:
    """What a learning process reported."""
    return Report(
        classes=[*told["classes"], *told["refined"]],
        images=told["images"],
        seconds=told["seconds"],
        calibration_error=told["calibration_error"],
        temperature=told["temperature"],
        retention=[Risk(**risk) for risk in told["retention"]],
    )


def _last_words(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """How a process ended, and what it said last."""
    code = process.wait()
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    end = f"killed by signal {-code}, perhaps for want of memory" if code < 0 else f"exit code {code}"
    return f"{end}: {lines[-1][-_TAIL:]}" if lines else end
