"""How a run tells what it is doing; the command line draws bars from it."""

from collections.abc import Iterator
from contextlib import contextmanager


class Watcher:
    """Is told of stages and steps; this one keeps quiet."""

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        """Begin a stage of so many steps; it ends with the block."""
        yield

    def advance(self, steps: int) -> None:
        """Some steps of the stage are done."""

    def describe(self, text: str) -> None:
        """A short remark on the stage's progress (loss, accuracy)."""

    def note(self, text: str) -> None:
        """Something the user should read."""
