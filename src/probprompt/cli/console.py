"""Options that commands share, and what they show in the terminal: progress bars and tables.

Rich is imported inside functions, so that help appears quickly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from probprompt.progress import ProgressCallback

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

    from probprompt.runs.run import Run


class Precision(StrEnum):
    """Precision of the backbone."""

    fp32 = "fp32"
    bf16 = "bf16"


def completion(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion for a name, or for the last of several names with commas between."""

    def complete(incomplete: str) -> list[str]:
        before, comma, start = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(start)]

    return complete


def option(
    help: str,
    metavar: str | None = None,
    *names: str,
    default: str | bool = True,
    panel: str | None = None,
    **more: Any,
) -> Any:
    """Declare an option; ``default`` describes a default value of None, ``panel`` is its section of the help."""
    return Option(*names, help=help, metavar=metavar, show_default=default, rich_help_panel=panel, **more)


def argument(help: str, metavar: str, default: str | bool = True, **more: Any) -> Any:
    """Declare an argument; ``default`` describes a default value of None."""
    return Argument(help=help, metavar=metavar, show_default=default, **more)


PRESETS = {
    "published": "each method as its authors ran it",
    "matched": "the same budget, augmentation and head for all methods",
    "ridge": "matched, but prompts train on the first task, under a ridge head",
    "flagship": "ProbPrompt with the ridge head and its most accurate settings",
}
METHODS = completion(lambda: import_module("probprompt.methods").registered())
BACKBONES = completion(lambda: [listing.name for listing in import_module("probprompt.backbones.pretrained").known()])
DATASETS = completion(lambda: set(import_module("probprompt.data.datasets").registered()) - {"emoji-r"})
PRESET_NAMES = completion(lambda: (*PRESETS, "custom"))
DATA, MODEL, TRAINING, RUN = "Data", "Model", "Training", "Run"  # panels

DEVICE: dict[str, Any] = {"help": "cpu, cuda or cuda:N.", "metavar": "NAME", "default": "GPU if available"}
METHOD: dict[str, Any] = {
    "help": "Method to use; see 'probprompt list methods'.",
    "metavar": "NAME",
    "default": "probprompt",
    "autocompletion": METHODS,
}
PRESET: dict[str, Any] = {
    "help": "Settings to start from: published, matched, ridge or flagship.",
    "metavar": "NAME",
    "autocompletion": completion(lambda: PRESETS),
}
BACKBONE: dict[str, Any] = {
    "help": "Named backbone or timm model; see 'probprompt list backbones'.",
    "metavar": "NAME",
    "autocompletion": BACKBONES,
}
WEIGHTS: dict[str, Any] = {"help": "Local weights file (safetensors, npz, pth).", "metavar": "FILE"}
SET = "Override any setting (repeatable).", "KEY=VALUE", "--set"

Device = Annotated[str | None, option(**DEVICE)]
Assignments = Annotated[list[str] | None, option(*SET, panel=TRAINING)]
Backbone = Annotated[str | None, option(**BACKBONE, panel=MODEL)]
Weights = Annotated[str | None, option(**WEIGHTS, panel=MODEL)]
Tasks = Annotated[
    str | None, option("Number of tasks (5), class counts (4,4,2), or a file of class lists.", "N", panel=DATA)
]
TestFolder = Annotated[
    Path | None, option("Folder of test images.", "FOLDER", default="hold out 20% of each class", panel=DATA)
]
Validate = Annotated[
    bool, option("Evaluate on 20% of the training images, not on the test set.", None, "--validate", panel=DATA)
]
SkipUnreadable = Annotated[bool, option("Skip unreadable images and list them.", None, "--skip-unreadable", panel=DATA)]


def named_settings(
    tasks: str | None,
    test: Path | None,
    backbone: str | None,
    weights: str | None,
    validate: bool,
    skip_unreadable: bool,
) -> dict[str, Any]:
    """Return the settings of these options by their dotted names; None if one is not given."""
    return {
        "data.tasks": tasks,
        "data.test": str(test) if test else None,
        "data.validation": 0.2 if validate else None,
        "data.skip_unreadable": skip_unreadable or None,
        "backbone.name": backbone,
        "backbone.weights": weights,
    }


PLAIN: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
UNLIMITED = 10_000  # columns: more than any table has
WORDS = 16  # columns that text needs at least to be readable
NOTE = "{task.fields[note]}"  # a column of a bar


class Screen(ProgressCallback):
    """Terminal output: a bar per stage, or a line per stage if this is not a terminal."""

    def __init__(self, stderr: bool = False) -> None:
        from rich.console import Console

        self.console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
        self._progress: Progress | None = None
        self._note = ""

    def print(self, text: str) -> None:
        """Print a line as is."""
        self.console.print(text, soft_wrap=True)

    def title(self, text: str) -> None:
        """Print a heading."""
        self.console.print(text, style="bold")

    def _bars(self, width: int, *columns: ProgressColumn | str) -> Progress:
        """Create bars that are drawn in a terminal only."""
        from rich.progress import BarColumn, Progress, TextColumn

        first = TextColumn(f"{{task.description:<{width}}}"), BarColumn(bar_width=20)
        return Progress(*first, *columns, console=self.console, disable=not self.console.is_terminal)

    @contextmanager
    def _show_bar(self, bars: Progress, description: str, total: int | None, done: int = 0) -> Iterator[None]:
        self._note = ""
        with bars as self._progress:
            self._bar = bars.add_task(description, total=total, completed=done, note="")
            try:
                yield
            finally:
                self._progress = None
        if not self.console.is_terminal:
            self.print(f"{description}: done{', ' + self._note if self._note else ''}")

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        """Show a bar for this stage."""
        from rich.progress import MofNCompleteColumn, TimeRemainingColumn

        timer = TimeRemainingColumn(elapsed_when_finished=True)
        with self._show_bar(self._bars(14, MofNCompleteColumn(), timer, NOTE), description, total):
            yield

    @contextmanager
    def transfer(self, description: str, total: int | None, done: int = 0) -> Iterator[None]:
        """Show a bar of bytes, with the speed and the remaining time."""
        from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

        timer = TimeRemainingColumn(elapsed_when_finished=True)
        with self._show_bar(self._bars(24, DownloadColumn(), TransferSpeedColumn(), timer), description, total, done):
            yield

    def advance(self, steps: int) -> None:
        """Move the bar."""
        if self._progress:
            self._progress.advance(self._bar, steps)

    def describe(self, text: str) -> None:
        """Show a note next to the bar."""
        self._note = text
        if self._progress:
            self._progress.update(self._bar, note=text)

    note = print

    def figures(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table of names and numbers."""
        self.console.print(_table(header, rows))

    def listing(self, header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (1,)) -> None:
        """Print a plain table; in a narrow terminal only the columns of ``words`` fold.

        If these columns become too narrow, each row takes several lines instead.
        """
        from rich.cells import cell_len
        from rich.table import Table

        table, least = Table(**PLAIN), 0
        for index, column in enumerate(zip(header, *rows, strict=True)):
            longest = max(map(cell_len, column))
            least += min(longest, WORDS) if index in words else longest
            table.add_column(header[index], no_wrap=index not in words)
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

        options = self.console.options.update(width=UNLIMITED)
        return Measurement.get(self.console, options, table).maximum <= self.console.width

    def entry(self, name: str, parts: Iterable[tuple[str, str]]) -> None:
        """Print a row that is too wide for one line: its name, and its columns below."""
        from rich.padding import Padding

        self.print(name)
        for heading, text in parts:
            self.console.print(Padding(f"{heading}: {text}" if heading else text, (0, 0, 0, 2), expand=False))

    def show(self, run: Run) -> None:
        """Print the results of a run."""
        self.compare([run])
        for mark in run.record.marks:
            self.print(f"Not comparable: {mark}")
        for name in run.record.skipped:
            self.print(f"Skipped {name} (unreadable).")
        self.print(f"Wrote {run.report}.")

    def compare(self, runs: Sequence[Run]) -> None:
        """Print the results of several runs."""
        for run in runs:
            self._matrix(run)
        keys = ("FAA", "CAA", "forgetting")
        rows = [(run.record.method, *(f"{run.metrics[key]:.2f}" for key in keys)) for run in runs]
        self.print("")
        self.figures(("", *keys), rows)
        self.print("FAA: final accuracy, averaged over the tasks. CAA: mean of this over all steps.\n")

    def _matrix(self, run: Run) -> None:
        record, matrix = run.record, run.matrix
        images = "held-out training images" if record.evaluated_on == "validation" else "test images"
        self.title(f"\n{record.method}: accuracy in % on {images}")
        steps = ("after 1", *(str(step) for step in range(2, len(matrix) + 1)))
        table = _table(("", *steps), [(f"task {index + 1}", *map(_cell, row)) for index, row in enumerate(matrix)])
        if self.fits(table):
            self.console.print(table)
            return
        ends = [(f"task {index + 1}", _cell(row[index]), _cell(row[-1])) for index, row in enumerate(matrix)]
        self.figures(("", "when learned", "final"), ends)


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Create a table with names on the left and numbers on the right."""
    from rich.table import Table

    table = Table(header[0], **PLAIN)
    for name in header[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
