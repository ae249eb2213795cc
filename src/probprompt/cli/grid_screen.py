"""Terminal output of a comparison: the progress of its grid, then its tables."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.progress import MofNCompleteColumn, Progress, Task, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from probprompt.cli.console import NOTE, PLAIN, WORDS, Screen
from probprompt.report.compare import SEEDS, ColumnGroup, FormattedCell, Measure, Row, Table
from probprompt.report.tables import NOTHING, duration
from probprompt.runs.grid import GridCallback, Outcome, RunSpec


class _TimeLeft(TimeRemainingColumn):
    """Estimated time for the rest of the grid; for a stage, the time at its present speed."""

    def render(self, task: Task) -> Text:
        estimate = task.fields["left"]
        return Text(estimate(), style="progress.remaining") if estimate else super().render(task)


class GridScreen(Screen, GridCallback):
    """A bar for the whole grid above one for the stage of its run; a line per run if this is not a terminal."""

    _bars_of_grid: Progress | None = None
    _number = _total = 0
    _expected: float | None = None
    _rest: float | None = None
    _started = 0.0

    @contextmanager
    def grid(self, total: int, finished: int) -> Iterator[None]:
        """Show a bar for the whole grid."""
        self._number, self._total = finished, total
        if finished:
            self.print(f"{finished} of {total} runs are already finished.")
        with self._bars(14, MofNCompleteColumn(), _TimeLeft(), NOTE) as progress:
            self._runs = progress.add_task("runs", total=total, completed=finished, note="", left=self._time_left)
            self._bars_of_grid = progress
            yield
            progress.update(self._runs, note="")
        self._bars_of_grid = None

    def begin(self, cell: RunSpec, expected: float | None, rest: float | None) -> None:
        """Show the run that starts."""
        self._expected, self._rest, self._started = expected, rest, time.monotonic()
        if self._bars_of_grid:
            self._bars_of_grid.update(self._runs, note=cell.name)

    def end(self, outcome: Outcome, rest: float | None) -> None:
        """Print the result of a run."""
        self._number += 1
        self._expected, self._rest, self._started = rest, 0.0, time.monotonic()  # other runs may still be going
        if outcome.run:
            result = f"FAA {outcome.run.metrics['FAA']:.2f}%, {duration(outcome.seconds or 0.0)}"
        else:
            result = f"failed: {outcome.reason}"
        left = self._time_left()
        self.print(f"[{self._number}/{self._total}] {outcome.spec.name}: {result}{left and f'; {left}'}")
        if self._bars_of_grid:
            self._bars_of_grid.advance(self._runs)

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        """Show a bar for this stage below that of the grid."""
        if self._bars_of_grid is None:
            with super().stage(description, total):
                yield
            return
        self._progress = self._bars_of_grid
        self._bar = self._progress.add_task(description, total=total, note="", left=None)
        try:
            yield
        finally:
            self._bars_of_grid.remove_task(self._bar)
            self._progress = None

    def _time_left(self) -> str:
        if self._expected is None or self._rest is None or self._number == self._total:
            return ""
        current = max(0.0, self._expected - (time.monotonic() - self._started))
        return f"about {duration(self._rest + current)} left"


def show_table(screen: Screen, table: Table) -> bool:
    """Show the table whole if it fits, else by column group; return False if standard deviations were left out."""
    if screen.fits(_plain(table)):
        screen.console.print(_plain(table))
        return True
    complete = True
    for group, _ in table.places:
        chosen = [index for index, (place, _) in enumerate(table.columns) if place == group]
        rows = [(row, [cells[index] for index in chosen]) for row, cells in table.rows]
        columns = [table.columns[index] for index in chosen]
        part = Table(group.label, columns, [(row, cells) for row, cells in rows if _has_runs(columns, cells)])
        if len(table.places) > 1:
            screen.print(group.label)
        complete &= _show_group(screen, part)
    return complete


def _has_runs(columns: Sequence[tuple[ColumnGroup, Measure]], cells: Sequence[FormattedCell]) -> bool:
    """Return True if a row has a number here besides that of its seeds, which may be 0."""
    return any(cell.mean != NOTHING for (_, measure), cell in zip(columns, cells, strict=True) if measure != SEEDS)


def _show_group(screen: Screen, part: Table) -> bool:
    """Drop standard deviations first, then fold names, then use several lines per row; never truncate a number."""
    has_std = any(cell.std for _, cells in part.rows for cell in cells)
    for std, fold in ((True, None), (False, None), (False, WORDS)):
        if screen.fits(_plain(part, std, fold)):
            screen.console.print(_plain(part, std, screen.console.width if fold else None))
            return std or not has_std
    for row, cells in part.rows:
        numbers = zip((measure.heading for _, measure in part.columns), (cell.text for cell in cells), strict=True)
        screen.entry(_label(row), numbers)
    return True


def _label(row: Row) -> str:
    return row.label + (" (upper bound)" if row.bound else "")


def _plain(table: Table, std: bool = True, fold: int | None = None) -> RichTable:
    """Create a table with names on the left, numbers on the right, and the best in bold."""
    single = len(table.places) == 1
    plain = RichTable(**PLAIN)
    plain.add_column("method", no_wrap=fold is None, max_width=fold, overflow="fold")
    for group, measure in table.columns:
        heading = measure.heading.replace(" (", "\n(")
        heading = heading if single else f"{group.benchmark}\n{group.preset}\n{heading}"
        plain.add_column(heading, justify="right", no_wrap=True)
    for row, cells in table.rows:
        numbers = (cell if std else replace(cell, std="") for cell in cells)
        styled = (Text.assemble((cell.text, ("", "bold", "underline")[cell.rank]), cell.sign) for cell in numbers)
        plain.add_row(Text(_label(row)), *styled)
    return plain
