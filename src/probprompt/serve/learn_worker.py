"""Program that learns one lesson in a separate process, so that the service keeps answering.

:mod:`probprompt.serve.lessons` starts it with the model's folder and writes a :class:`Request` to its standard input.
It writes a :class:`Message` per line: progress, then a report or an error. It ends with its input.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel

from probprompt.classifier import changing
from probprompt.classifier.lesson import Existing
from probprompt.classifier.outputs import LearnReport
from probprompt.errors import UserError, is_out_of_memory
from probprompt.progress import ProgressCallback
from probprompt.serve.schemas import Progress

WAIT_SECONDS = 0.2
"""Seconds between two attempts to change a model that another process is changing."""
_ORPHANED = 3  # exit code


class Request(BaseModel):
    """Images to learn by class, and the note of the new version."""

    images: dict[str, list[str]]
    refine: bool
    name: str
    device: str | None = None


class Message(BaseModel):
    """One line of output with exactly one of these."""

    progress: Progress | None = None
    report: LearnReport | None = None
    error: str = ""


class Lines(ProgressCallback):
    """Writes a line for each percent of progress."""

    def __init__(self) -> None:
        self._stage, self._done, self._total, self._percent = "", 0, 1, -1

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        """Start a stage."""
        self._stage, self._done, self._total, self._percent = description, 0, max(1, total), -1
        self.advance(0)
        yield

    def advance(self, steps: int) -> None:
        """Count steps of the stage."""
        self._done += steps
        percent = 100 * self._done // self._total
        if percent != self._percent:
            self._percent = percent
            write_progress(self._stage, self._done, self._total)


def write(message: Message) -> None:
    """Write one line."""
    sys.stdout.write(message.model_dump_json(exclude_defaults=True) + "\n")
    sys.stdout.flush()


def write_progress(stage: str, done: int, total: int) -> None:
    """Write one line of progress."""
    write(Message(progress=Progress(stage=stage, done=done, total=total)))


def main(arguments: list[str]) -> None:
    """Learn one lesson and save the model."""
    folder = Path(arguments[0])
    request = Request.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    with suppress(OSError, AttributeError):
        os.nice(10)  # predictions have priority
    try:
        write_progress("loading", 0, 1)
        existing: Existing = "extend" if request.refine else "error"
        with changing(folder, request.device, busy=wait) as classifier:
            learned = classifier.learn(request.images, existing=existing, note=request.name, progress=Lines())
    except UserError as problem:
        write(Message(error=str(problem)))
    except (MemoryError, RuntimeError, OSError) as problem:
        if not is_out_of_memory(problem):
            raise
        reason = "Out of memory. The model is unchanged. Teach fewer images at a time."
        write(Message(error=reason))
    else:
        write(Message(report=learned))


def wait() -> None:
    """Wait for another process that is changing the model."""
    write_progress("waiting for another process to finish changing the model", 0, 1)
    time.sleep(WAIT_SECONDS)


def _end_with_input() -> None:
    """End this process with the service."""
    sys.stdin.buffer.read()
    os._exit(_ORPHANED)


if __name__ == "__main__":
    main(sys.argv[1:])
