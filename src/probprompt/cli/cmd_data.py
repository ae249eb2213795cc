"""What ``probprompt data`` does: bring datasets onto this machine, and look whether they are right."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from probprompt.cli import Interrupted
from probprompt.cli.console import Screen
from probprompt.data import datasets
from probprompt.data.datasets import Benchmark, subfolders
from probprompt.data.download import get
from probprompt.data.emoji_r import write_sample
from probprompt.data.huggingface import HubDataset
from probprompt.data.published import PLACE, Dataset, data_folder
from probprompt.data.verify import Report, check, source_at
from probprompt.errors import UserError, suggest

TROUBLE = 1  # exit code


class TransferScreen(Screen):
    """Draws, besides, how many bytes were moved, how fast, and how long it will take."""

    @contextmanager
    def transfer(self, description: str, total: int | None, done: int = 0) -> Iterator[None]:
        """A bar of bytes."""
        columns = (
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=20),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            self._progress = progress
            self._bar = progress.add_task(description, total=total, completed=done)
            try:
                yield
            finally:
                self._progress = None
        if not self.console.is_terminal:
            self.say(f"{description}: done")


def run_get(name: str, to: Path | None, url: str | None, file: Path | None, quick: bool) -> None:
    """Fetch a dataset, put it in its place and look at it."""
    kind, screen = _published(name), TransferScreen()
    try:
        dataset = get(kind, to, url, file, screen)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command goes on from here") from None
    screen.say(f"{name}: {dataset.place}")
    if to is not None and dataset.place.parent != data_folder():
        screen.say(f"for it to be found there: export {PLACE}={quote(str(dataset.place.parent))}")
    _tell(check(dataset, screen, quick), screen)


def run_check(path: str, name: str | None, quick: bool) -> None:
    """Look at a dataset that is there."""
    screen = TransferScreen()
    _tell(check(_named(path, name), screen, quick), screen)


def run_sample(folder: Path, classes: str, images: int, test: bool) -> None:
    """Write pictures to try things with."""
    named = int(classes) if classes.isdecimal() else [name.strip() for name in classes.split(",")]
    root = write_sample(folder, named, images, test)
    Screen().say(f"written: {root} ({', '.join(path.name for path in subfolders(root))})")


def list_benchmarks(screen: Screen) -> None:
    """A table of what can be named as a benchmark, with what is on this machine."""
    try:
        place = f"Datasets are looked for in {data_folder()}"
    except UserError as problem:
        place = str(problem)
    rows = [(name, kind.summary, f"{kind.tasks} tasks", _here(kind)) for name, kind in datasets.registered().items()]
    for form, other in (("FOLDER", datasets.Folder), ("hf:OWNER/NAME", HubDataset)):
        rows.append((form, other.summary, f"{other.tasks} tasks", ""))
    screen.listing(("benchmark", "what it is", "usually", "here"), rows)
    screen.say(f"{place}; what is not there is fetched with: probprompt data get NAME")


def _here(kind: type[Benchmark]) -> str:
    """Whether the images of a benchmark are on this machine."""
    if not issubclass(kind, Dataset):
        return "packaged"
    try:
        return "yes" if kind().recognize() else "no"
    except UserError:  # no folder is named, and there is no home for one
        return "no"


def _named(path: str, name: str | None) -> Benchmark:
    folder = Path(path).expanduser()
    if name is not None:
        return _published(name)(folder)
    if not folder.exists() and path in datasets.registered():
        return datasets.find(path)
    return source_at(folder)


def _published(name: str) -> type[Dataset]:
    known = {key: source for key, source in datasets.registered().items() if issubclass(source, Dataset)}
    if name not in known:
        raise UserError(f"no published dataset is called {name!r}: {suggest(name, known)}")
    return known[name]


def _tell(report: Report, screen: Screen) -> None:
    for line in report.facts:
        screen.say(line)
    for line in report.notes:
        screen.say(f"note: {line}")
    for line in report.problems:
        screen.say(f"TROUBLE: {line}")
    if report.problems:
        screen.say(f"{len(report.problems)} kind(s) of trouble")
        raise typer.Exit(TROUBLE)
    screen.say("all is well")
