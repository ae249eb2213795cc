"""The command that compares: a grid of runs with its progress, then the tables."""

import re
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from probprompt import api, distributed
from probprompt.cli import Interrupted
from probprompt.cli.console import PLAIN, WIDE, WORDS, Screen
from probprompt.config import flatten, parse_value, read_toml
from probprompt.data.stream import parse_tasks
from probprompt.errors import UserError
from probprompt.report.compare import (
    SEEDS,
    ColumnGroup,
    Comparison,
    FormattedCell,
    Measure,
    Row,
    Table,
    gather,
    gather_runs,
)
from probprompt.report.pages import write_comparison, write_page
from probprompt.report.tables import NOTHING, duration
from probprompt.runs.executors import ExecutionOptions, GridCallback, RunActions, run_grid
from probprompt.runs.grid import Cell, Grid, GridSpec, Outcome, parse_spec
from probprompt.runs.run import write_book


def run_compare(
    file: Path | None,
    given: Mapping[str, list[str] | None],
    assignments: Sequence[str],
    vary: Sequence[str],
    runs: Sequence[Path],
    out: Path | None,
    device: str | None,
    show_only: bool,
    book: Path | None = None,
    page: Path | None = None,
    where: ExecutionOptions | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Run what a grid lacks, then show and write its tables; a failed cell makes the exit code 1, at the end."""
    distributed.refuse_several("a comparison")
    screen = GridScreen()
    if runs:
        if file or any(given.values()) or options or assignments or vary or show_only:
            raise UserError("--from takes runs that are there: leave the grid and its settings away")
        _present(screen, gather_runs(runs), out or Path("comparison"), book, page)
        return
    spec = read_spec(file, given, assignments, vary, options)
    grid = Grid(spec, out or Path("runs") / (file.stem if file else "compare"))
    if grid.left_out:
        screen.say(f"left out, not offered: {grid.left_out}")
    outcomes = grid.outcomes() if show_only else _carry_out(grid, device, screen, where)
    if any(outcome.run for outcome in outcomes):
        _present(screen, gather(grid, outcomes), grid.out, book, page)
    _conclude(screen, outcomes)


def _carry_out(grid: Grid, device: str | None, screen: "GridScreen", where: ExecutionOptions | None) -> list[Outcome]:
    try:
        return run_grid(grid, RunActions(api.start, api.resume, device), screen, where)
    except KeyboardInterrupt:
        finished = sum(outcome.run is not None for outcome in grid.outcomes())
        told = f"{finished} of {len(grid.cells)} cells are finished; go on with the same command"
        raise Interrupted(f"interrupted; {told}") from None


def _conclude(screen: Screen, outcomes: Sequence[Outcome]) -> None:
    """Tell which cells are not there."""
    failed = [outcome for outcome in outcomes if outcome.problem]
    missing = [outcome for outcome in outcomes if not outcome.run and not outcome.problem]
    if missing:
        screen.say(f"not run yet: {len(missing)} of {len(outcomes)} cells")
    if failed:
        screen.say(f"failed: {len(failed)} of {len(outcomes)} cells (the same command tries them again)")
        for outcome in failed:
            screen.say(f"  {outcome.cell.folder}: {outcome.reason}")
        raise SystemExit(1)


# What is asked for


def read_spec(
    file: Path | None,
    given: Mapping[str, list[str] | None],
    assignments: Sequence[str],
    vary: Sequence[str],
    options: Mapping[str, Any] | None = None,
) -> GridSpec:
    """A grid from a file; over it the options, which may be settings by their dotted names."""
    entries = read_toml(file) if file else {}
    named = {name: [part for text in texts for part in _split(text)] for name, texts in given.items() if texts}
    if "seeds" in named:
        entries["seeds"] = [seed for text in named.pop("seeds") for seed in _seeds(text)]
    entries |= named
    settings, varied = (dict(_table(entries, name)) for name in ("settings", "vary"))
    settings = dict(flatten(settings)) | dict(options or {})
    for assignment in assignments:
        key, text = _assigned("--set", assignment)
        settings[key] = parse_value(text)
    for key in ("tasks", "data.tasks"):
        if isinstance(settings.get(key), str):
            settings[key] = parse_tasks(settings[key])
    for assignment in vary:
        key, text = _assigned("--vary", assignment)
        varied[key] = _values(text)
    return parse_spec({**entries, "settings": settings, "vary": varied})


def _table(entries: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = entries.get(name, {})
    if not isinstance(found, Mapping):
        raise UserError(f"{name} of a grid must be a table of settings, not {found!r}")
    return found


def _assigned(option: str, assignment: str) -> tuple[str, str]:
    key, equals, text = (part.strip() for part in assignment.partition("="))
    if not equals or not key or not text:
        raise UserError(f"{option} takes key=value, not {assignment!r}")
    return key, text


def _split(text: str) -> list[str]:
    """Parts between commas; the path of a folder may have commas in it."""
    return [text] if Path(text).expanduser().is_dir() else [part.strip() for part in text.split(",") if part.strip()]


def _values(text: str) -> list[Any]:
    """Values between commas: as in a TOML list, or one by one."""
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except tomllib.TOMLDecodeError:
        return [parse_value(part.strip()) for part in text.split(",")]


def _seeds(text: str) -> range:
    """One seed or a range of them.

    >>> _seeds("3"), _seeds("0-4")
    (range(3, 4), range(0, 5))
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not found or int(found[2] or found[1]) < int(found[1]):
        raise UserError(f"--seeds takes numbers such as 0,1,2 or a range such as 0-4, not {text!r}")
    return range(int(found[1]), int(found[2] or found[1]) + 1)


# What is shown


class _Left(TimeRemainingColumn):
    """Of the whole grid the time that its cells may take; of a stage the time at its own pace."""

    def render(self, task: Task) -> Text:
        told = task.fields["left"]
        return Text(told(), style="progress.remaining") if told else super().render(task)


class GridScreen(Screen, GridCallback):
    """A bar for the whole grid over one for the stage of its cell; where there is no terminal, a line per cell."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: Progress | None = None
        self._number = self._total = 0
        self._expected: float | None = None
        self._rest: float | None = None
        self._begun = 0.0

    @contextmanager
    def grid(self, total: int, finished: int) -> Iterator[None]:
        """A bar for the whole grid."""
        self._number, self._total = finished, total
        if finished:
            self.say(f"{finished} of {total} cells are finished already")
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            _Left(),
            TextColumn("{task.fields[remark]}"),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
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
        self.say(f"[{self._number}/{self._total}] {outcome.cell.name}: {told}{left and f'; {left}'}")
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


def _present(screen: Screen, comparison: Comparison, out: Path, book: Path | None, page: Path | None) -> None:
    """Write the tables, and show them."""
    files = write_comparison(comparison, out)
    if book:
        files.append(write_book(book, comparison.recorded))
    if page:
        files.append(write_page(comparison, page))
    for table in comparison.tables():
        screen.title(f"\n{table.caption}")
        if not _show(screen, table):
            screen.say("Without the standard deviations, for which this window is too narrow.")
        for note in table.notes:
            screen.say(note)
    screen.say("")
    for path in files:
        screen.say(f"written: {path}")


def _show(screen: Screen, table: Table) -> bool:
    """The whole table side by side where it fits, else place by place; whether all of its numbers were shown."""
    if _fits(screen, _plain(table)):
        screen.console.print(_plain(table))
        return True
    whole = True
    for place, _ in table.places:
        chosen = [index for index, (where, _) in enumerate(table.columns) if where == place]
        rows = [(row, [cells[index] for index in chosen]) for row, cells in table.rows]
        columns = [table.columns[index] for index in chosen]
        present = [(row, cells) for row, cells in rows if _has_runs(columns, cells)]
        part = Table(place.label, columns, present)
        if len(table.places) > 1:
            screen.say(place.label)
        whole &= _show_place(screen, part)
    return whole


def _has_runs(columns: Sequence[tuple[ColumnGroup, Measure]], cells: Sequence[FormattedCell]) -> bool:
    """Whether a row has any number here, but for that of its seeds, which may be 0."""
    return any(shown.mean != NOTHING for (_, measure), shown in zip(columns, cells, strict=True) if measure != SEEDS)


def _show_place(screen: Screen, part: Table) -> bool:
    """No number is cut: standard deviations go first, then names fold, at last each row takes several lines."""
    spreads = any(shown.std for _, cells in part.rows for shown in cells)
    for spread, fold in ((True, None), (False, None), (False, WORDS)):
        if _fits(screen, _plain(part, spread, fold)):
            screen.console.print(_plain(part, spread, screen.console.width if fold else None))
            return spread or not spreads
    for row, cells in part.rows:
        numbers = zip((measure.heading for _, measure in part.columns), (shown.text for shown in cells), strict=True)
        screen.entry(_label(row), numbers)
    return True


def _fits(screen: Screen, table: RichTable) -> bool:
    options = screen.console.options.update(width=WIDE)
    return Measurement.get(screen.console, options, table).maximum <= screen.console.width


def _label(row: Row) -> str:
    return row.label + (" (upper bound)" if row.bound else "")


def _plain(table: Table, spread: bool = True, fold: int | None = None) -> RichTable:
    """Names on the left, folded where they are wider than allowed, numbers on the right, the best bold."""
    single = len(table.places) == 1
    made = RichTable(**PLAIN)
    made.add_column("method", no_wrap=fold is None, max_width=fold, overflow="fold")
    for place, measure in table.columns:
        heading = measure.heading.replace(" (", "\n(")
        made.add_column(
            heading if single else f"{place.benchmark}\n{place.preset}\n{heading}", justify="right", no_wrap=True
        )
    for row, cells in table.rows:
        numbers = (shown if spread else replace(shown, std="") for shown in cells)
        made.add_row(Text(_label(row)), *map(_styled, numbers))
    return made


def _styled(shown: FormattedCell) -> Text:
    return Text.assemble((shown.text, {1: "bold", 2: "underline", 0: ""}[shown.rank]), shown.sign)
