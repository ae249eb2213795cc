"""What a comparison shows in the terminal: the progress of its grid, then its tables."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.progress import MofNCompleteColumn, Progress, Task, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from probprompt.cli.console import PLAIN, REMARK, WORDS, Screen
from probprompt.report.compare import SEEDS, ColumnGroup, FormattedCell, Measure, Row, Table
from probprompt.report.tables import NOTHING, duration
from probprompt.runs.grid import Cell, GridCallback, Outcome


class _Left(TimeRemainingColumn):
    """Of the whole grid the time that its cells may take; of a stage the time at its own pace."""

    def render(self, task: Task) -> Text:
        told = task.fields["left"]
        return Text(told(), style="progress.remaining") if told else super().render(task)


class GridScreen(Screen, GridCallback):
    """A bar for the whole grid over one for the stage of its cell; where there is no terminal, a line per cell."""

    _whole: Progress | None = None
    _number = _total = 0
    _expected: float | None = None
    _rest: float | None = None
    _begun = 0.0

    @contextmanager
    def grid(self, total: int, finished: int) -> Iterator[None]:
        """A bar for the whole grid."""
        self._number, self._total = finished, total
        if finished:
            self.print(f"{finished} of {total} cells are finished already")
        with self._bars(14, MofNCompleteColumn(), _Left(), REMARK) as progress:
            self._cells = progress.add_task("cells", total=total, completed=finished, remark="", left=self._told_left)
            self._whole = progress
            yield
            progress.update(self._cells, remark="")
        self._whole = None

    def begin(self, cell: Cell, expected: float | None, rest: float | None) -> None:
        """Say which cell it is."""
        self._expected, self._rest, self._begun = expected, rest, time.monotonic()
        if self._whole:
            self._whole.update(self._cells, remark=cell.name)

    def end(self, outcome: Outcome, rest: float | None) -> None:
        """Say what came of the cell."""
        self._number += 1
        self._expected, self._rest, self._begun = rest, 0.0, time.monotonic()  # others may be under way
        if outcome.run:
            told = f"FAA {outcome.run.metrics['FAA']:.2f} %, {duration(outcome.seconds or 0.0)}"
        else:
            told = f"failed: {outcome.reason}"
        left = self._told_left()
        self.print(f"[{self._number}/{self._total}] {outcome.cell.name}: {told}{left and f'; {left}'}")
        if self._whole:
            self._whole.advance(self._cells)

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        """A bar for this stage, under that of the grid."""
        if self._whole is None:
            with super().stage(description, total):
                yield
            return
        self._progress = self._whole
        self._bar = self._whole.add_task(description, total=total, remark="", left=None)
        try:
            yield
        finally:
            self._whole.remove_task(self._bar)
            self._progress = None

    def _told_left(self) -> str:
        if self._expected is None or self._rest is None or self._number == self._total:
            return ""
        under_way = max(0.0, self._expected - (time.monotonic() - self._begun))
        return f"about {duration(self._rest + under_way)} left"


def show_table(screen: Screen, table: Table) -> bool:
    """Show the whole table where it fits, else place by place; return False if standard deviations were left out."""
    if screen.fits(_plain(table)):
        screen.console.print(_plain(table))
        return True
    whole = True
    for place, _ in table.places:
        chosen = [index for index, (where, _) in enumerate(table.columns) if where == place]
        rows = [(row, [cells[index] for index in chosen]) for row, cells in table.rows]
        columns = [table.columns[index] for index in chosen]
        part = Table(place.label, columns, [(row, cells) for row, cells in rows if _has_runs(columns, cells)])
        if len(table.places) > 1:
            screen.print(place.label)
        whole &= _show_place(screen, part)
    return whole


def _has_runs(columns: Sequence[tuple[ColumnGroup, Measure]], cells: Sequence[FormattedCell]) -> bool:
    """Whether a row has any number here, but for that of its seeds, which may be 0."""
    return any(shown.mean != NOTHING for (_, measure), shown in zip(columns, cells, strict=True) if measure != SEEDS)


def _show_place(screen: Screen, part: Table) -> bool:
    """No number is cut: standard deviations go first, then names fold, at last each row takes several lines."""
    spreads = any(shown.std for _, cells in part.rows for shown in cells)
    for spread, fold in ((True, None), (False, None), (False, WORDS)):
        if screen.fits(_plain(part, spread, fold)):
            screen.console.print(_plain(part, spread, screen.console.width if fold else None))
            return spread or not spreads
    for row, cells in part.rows:
        numbers = zip((measure.heading for _, measure in part.columns), (shown.text for shown in cells), strict=True)
        screen.entry(_label(row), numbers)
    return True


def _label(row: Row) -> str:
    return row.label + (" (upper bound)" if row.bound else "")


def _plain(table: Table, spread: bool = True, fold: int | None = None) -> RichTable:
    """Names on the left, folded where they are wider than allowed, numbers on the right, the best bold."""
    single = len(table.places) == 1
    made = RichTable(**PLAIN)
    made.add_column("method", no_wrap=fold is None, max_width=fold, overflow="fold")
    for place, measure in table.columns:
        heading = measure.heading.replace(" (", "\n(")
        heading = heading if single else f"{place.benchmark}\n{place.preset}\n{heading}"
        made.add_column(heading, justify="right", no_wrap=True)
    for row, cells in table.rows:
        numbers = (shown if spread else replace(shown, std="") for shown in cells)
        styled = (Text.assemble((shown.text, ("", "bold", "underline")[shown.rank]), shown.sign) for shown in numbers)
        made.add_row(Text(_label(row)), *styled)
    return made
