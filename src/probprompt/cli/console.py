"""What commands share: their options, and what the user sees in the terminal, which are progress bars and tables.

Rich is imported inside, so that help comes at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from probprompt.progress import ProgressCallback

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

    from probprompt.runs.run import Run


class Precision(StrEnum):
    """What the backbone computes in."""

    fp32 = "fp32"
    bf16 = "bf16"


Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N; the GPU where there is one by default.")]
Preset = Annotated[str | None, Option(help="published, matched, ridge or flagship.")]
Backbone = Annotated[str | None, Option(help="A named checkpoint or any timm arch.tag.")]
Weights = Annotated[str | None, Option(help="A file of weights for that architecture.")]
Tasks = Annotated[str | None, Option(help="5, or sizes 4,4,2, or a file of class lists (JSON, or a line per task).")]
TestFolder = Annotated[Path | None, Option(help="A separate test folder; else a part is held out.")]
Validate = Annotated[
    bool, Option("--validate", help="Hold out 20 % of the training images and report on them, not on test.")
]
SkipUnreadable = Annotated[
    bool, Option("--skip-unreadable", help="Go on without images that cannot be read; they are listed.")
]
Assignments = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Any setting; may be repeated.")]


def named_settings(
    tasks: str | None,
    test: Path | None,
    backbone: str | None,
    weights: str | None,
    validate: bool,
    skip_unreadable: bool,
) -> dict[str, Any]:
    """Return the settings of these options by their dotted names; None where one is not given."""
    return {
        "data.tasks": tasks,
        "data.test": str(test) if test else None,
        "data.validation": 0.2 if validate else None,  # the share of the training images
        "data.skip_unreadable": skip_unreadable or None,
        "backbone.name": backbone,
        "backbone.weights": weights,
    }


PLAIN: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
WIDE = 10_000  # columns: more than any table has
WORDS = 16  # columns that words need at least to be read
REMARK = "{task.fields[remark]}"  # a column of a bar


class Screen(ProgressCallback):
    """Draws a bar per stage; where there is no terminal, a line per stage."""

    def __init__(self, stderr: bool = False) -> None:
        from rich.console import Console

        self.console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
        self._progress: Progress | None = None
        self._remark = ""

    def print(self, text: str) -> None:
        """Print a line as it is."""
        self.console.print(text, soft_wrap=True)

    def title(self, text: str) -> None:
        """Print a heading."""
        self.console.print(text, style="bold")

    def _bars(self, width: int, *columns: ProgressColumn | str) -> Progress:
        """Bars that are drawn in a terminal only."""
        from rich.progress import BarColumn, Progress, TextColumn

        first = TextColumn(f"{{task.description:<{width}}}"), BarColumn(bar_width=20)
        return Progress(*first, *columns, console=self.console, disable=not self.console.is_terminal)

    @contextmanager
    def _bar_of(self, bars: Progress, description: str, total: int | None, done: int = 0) -> Iterator[None]:
        self._remark = ""
        with bars as self._progress:
            self._bar = bars.add_task(description, total=total, completed=done, remark="")
            try:
                yield
            finally:
                self._progress = None
        if not self.console.is_terminal:
            self.print(f"{description}: done{', ' + self._remark if self._remark else ''}")

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        """A bar for this stage."""
        from rich.progress import MofNCompleteColumn, TimeRemainingColumn

        timer = TimeRemainingColumn(elapsed_when_finished=True)
        with self._bar_of(self._bars(14, MofNCompleteColumn(), timer, REMARK), description, total):
            yield

    @contextmanager
    def transfer(self, description: str, total: int | None, done: int = 0) -> Iterator[None]:
        """A bar of bytes, with their speed and the time that is left."""
        from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

        timer = TimeRemainingColumn(elapsed_when_finished=True)
        with self._bar_of(self._bars(24, DownloadColumn(), TransferSpeedColumn(), timer), description, total, done):
            yield

    def advance(self, steps: int) -> None:
        """Move the bar."""
        if self._progress:
            self._progress.advance(self._bar, steps)

    def describe(self, text: str) -> None:
        """Put a remark beside the bar."""
        self._remark = text
        if self._progress:
            self._progress.update(self._bar, remark=text)

    note = print

    def figures(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table of names and numbers."""
        self.console.print(_table(header, rows))

    def listing(self, header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (1,)) -> None:
        """A plain table: in a narrow terminal columns of words fold, names to be typed and numbers stay whole.

        Where words would be left too little room, they stand under the name of their row.
        """
        from rich.cells import cell_len
        from rich.table import Table

        table, least = Table(**PLAIN), 0
        for place, column in enumerate(zip(header, *rows, strict=True)):
            longest = max(map(cell_len, column))
            least += min(longest, WORDS) if place in words else longest
            table.add_column(header[place], no_wrap=place not in words)
        for row in rows:
            table.add_row(*row)
        if least + PLAIN["padding"][1] * (len(header) - 1) <= self.console.width:
            self.console.print(table)
            return
        for name, *rest in rows:
            self.entry(name, zip(header[1:], rest, strict=True))

    def fits(self, table: Table) -> bool:
        """Return True if the terminal is wide enough for a table."""
        from rich.measure import Measurement

        options = self.console.options.update(width=WIDE)
        return Measurement.get(self.console, options, table).maximum <= self.console.width

    def entry(self, name: str, parts: Iterable[tuple[str, str]]) -> None:
        """A row that is too wide for one line: its name, and under it what the columns say."""
        from rich.padding import Padding

        self.print(name)
        for heading, text in parts:
            told = f"{heading}: {text}" if heading else text
            self.console.print(Padding(told, (0, 0, 0, 2), expand=False))

    def show(self, run: Run) -> None:
        """The outcome of a run."""
        self.compare([run])
        for mark in run.record.marks:
            self.print(f"not to be compared: {mark}")
        for name in run.record.skipped:
            self.print(f"skipped, unreadable: {name}")
        self.print(f"report: {run.report}")

    def compare(self, runs: Sequence[Run]) -> None:
        """The outcomes of several runs."""
        for run in runs:
            self._matrix(run)
        keys = ("FAA", "CAA", "forgetting")
        rows = [(run.record.method, *(f"{run.metrics[key]:.2f}" for key in keys)) for run in runs]
        self.print("")
        self.figures(("", *keys), rows)
        self.print("FAA: average accuracy over all tasks in the end; CAA: its mean over all steps\n")

    def _matrix(self, run: Run) -> None:
        record, matrix = run.record, run.matrix
        where = "held-out training images" if record.evaluated_on == "validation" else "test images"
        self.title(f"\n{record.method}: accuracy in % on {where}")
        steps = ("after 1", *(str(step) for step in range(2, len(matrix) + 1)))
        rows = [(f"task {index + 1}", *map(_cell, row)) for index, row in enumerate(matrix)]
        whole = _table(("", *steps), rows)
        if self.fits(whole):
            self.console.print(whole)
            return
        ends = [(f"task {index + 1}", _cell(row[index]), _cell(row[-1])) for index, row in enumerate(matrix)]
        self.figures(("", "when learned", "in the end"), ends)


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Names on the left, numbers on the right."""
    from rich.table import Table

    table = Table(header[0], **PLAIN)
    for name in header[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
