"""The program that learns a lesson: a process of its own, so that predictions go on, whatever becomes of it.

Started by :mod:`probprompt.serve.lessons` with the model's folder and a request in JSON on its standard input. It
tells its progress on its standard output, a line of JSON each, and at last what it learned or why it could not. It
ends when its input does, that is with the service, however that ended.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from probprompt.classifier import changing
from probprompt.classifier.lesson import Known
from probprompt.errors import UserError, says_out_of_memory
from probprompt.progress import ProgressCallback

WAIT_SECONDS = 0.2
"""How often the model is looked at while somebody else changes it."""
_ORPHANED = 3  # exit code


class Lines(ProgressCallback):
    """Tells how far learning is, a line for each step that changes the percentage."""

    def __init__(self) -> None:
        self._stage, self._done, self._total, self._told = "", 0, 1, -1

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        """A stage begins."""
        self._stage, self._done, self._total, self._told = description, 0, max(1, total), -1
        self.advance(0)
        yield

    def advance(self, steps: int) -> None:
        """Some steps of it are done."""
        self._done += steps
        percent = 100 * self._done // self._total
        if percent != self._told:
            self._told = percent
            tell({"progress": {"stage": self._stage, "done": self._done, "total": self._total}})


def tell(message: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Learn one lesson and save the model."""
    folder = Path(arguments[0])
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    with suppress(OSError, AttributeError):
        os.nice(10)  # predictions go first
    try:
        tell({"progress": {"stage": "loading", "done": 0, "total": 1}})
        known: Known = "refine" if request["refine"] else "refuse"
        with changing(folder, request["device"], busy=wait) as classifier:
            learned = classifier.learn(request["images"], known=known, name=request["name"], progress=Lines())
    except UserError as problem:
        tell({"error": str(problem)})
    except (MemoryError, RuntimeError, OSError) as problem:
        if not says_out_of_memory(problem):
            raise
        tell(
            {"error": "there is not enough memory to learn this; the model is as it was. Teach fewer images at a time"}
        )
    else:
        tell({"report": asdict(learned)})


def wait() -> None:
    """Somebody else is changing the model: the lesson was accepted, and goes on when they are done."""
    tell({"progress": {"stage": "waiting for another process that changes the model", "done": 0, "total": 1}})
    time.sleep(WAIT_SECONDS)


def _end_with_input() -> None:
    """When the service is gone, nobody is left to learn for."""
    sys.stdin.buffer.read()
    os._exit(_ORPHANED)


if __name__ == "__main__":
    main(sys.argv[1:])
