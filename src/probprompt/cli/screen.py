"""What the user sees in the terminal: progress bars and tables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from probprompt.runs.progress import Watcher
from probprompt.runs.record import Run


class Screen(Watcher):
    """Draws a bar per stage; where there is no terminal, a line per stage."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._progress: Progress | None = None
        self._remark = ""

    def say(self, text: str) -> None:
        """Print a line as it is."""
        self.console.print(text, markup=False, soft_wrap=True)

    def title(self, text: str) -> None:
        """Print a heading."""
        self.console.print(text, style="bold", markup=False)

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        """A bar for this stage."""
        columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        rest = (TimeRemainingColumn(), TextColumn("{task.fields[remark]}"))
        self._remark = ""
        with Progress(*columns, *rest, console=self.console, disable=not self.console.is_terminal) as progress:
            self._progress = progress
            self._bar = progress.add_task(description, total=total, remark="")
            yield
            if not self.console.is_terminal:
                self.say(f"{description}: done{', ' + self._remark if self._remark else ''}")
        self._progress = None

    def advance(self, steps: int) -> None:
        """Move the bar."""
        if self._progress:
            self._progress.advance(self._bar, steps)

    def describe(self, text: str) -> None:
        """Put a remark beside the bar."""
        self._remark = text
        if self._progress:
            self._progress.update(self._bar, remark=text)

    def note(self, text: str) -> None:
        """Print a remark of its own."""
        self.say(text)

    def listing(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A plain table."""
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        self.console.print(table, markup=False)

    def show(self, run: Run) -> None:
        """The outcome of a run."""
        self._matrix(run)
        self._summary([run])
        for name in run.record["skipped"]:
            self.say(f"skipped, unreadable: {name}")
        self.say(f"report: {run.report}")

    def compare(self, runs: Sequence[Run]) -> None:
        """The outcomes of several runs."""
        for run in runs:
            self._matrix(run)
        self._summary(runs)

    def _matrix(self, run: Run) -> None:
        record = run.record
        where = "held-out training images" if record["evaluated_on"] == "validation" else "test images"
        title = f"{record['config']['method']['name']}: accuracy in % on {where}"
        matrix = run.matrix
        table = Table("", *(f"after {step + 1}" for step in range(len(matrix))), title=title, title_justify="left")
        for index, row in enumerate(matrix):
            table.add_row(f"task {index + 1}", *("" if np.isnan(value) else f"{value:.1f}" for value in row))
        self.console.print(table)

    def _summary(self, runs: Sequence[Run]) -> None:
        table = Table("", "FAA", "CAA", "forgetting", caption="FAA: final average accuracy; CAA: cumulative average")
        for run in runs:
            values = run.metrics
            name = run.record["config"]["method"]["name"]
            table.add_row(name, *(f"{values[key]:.2f}" for key in ("FAA", "CAA", "forgetting")))
        self.console.print(table)
