"""The commands ``data get``, ``data check`` and ``data sample``."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from probprompt.cli.console import Screen
from probprompt.errors import Interrupted, UserError, suggest

if TYPE_CHECKING:
    from probprompt.data.datasets import Benchmark
    from probprompt.data.published import Dataset

Quick = Annotated[bool, Option("--quick", help="Only count the images, do not read them.")]
app = typer.Typer(no_args_is_help=True, help="Bring published datasets onto this machine, and check them.")


@app.command("get")
def get_dataset(
    name: Annotated[str, Argument(help="cifar100, imagenet-r, cub200, tiny-imagenet or tu-berlin.")],
    to: Annotated[
        Path | None, Option(metavar="FOLDER", help="Where datasets are kept.", show_default="PROBPROMPT_DATA")
    ] = None,
    url: Annotated[str | None, Option(help="A mirror of the archive; it must have the published hash.")] = None,
    file: Annotated[Path | None, Option(help="The archive, where it is on this machine already.")] = None,
    quick: Quick = False,
) -> None:
    """Fetch a dataset (going on where it was cut), verify, unpack and check it."""
    from probprompt.data.download import get
    from probprompt.data.published import PLACE, data_folder

    kind, screen = _published(name), Screen()
    try:
        dataset = get(kind, to, url, file, screen)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command goes on from here") from None
    screen.print(f"{name}: {dataset.place}")
    if to is not None and dataset.place.parent != data_folder():
        screen.print(f"for it to be found there: export {PLACE}={quote(str(dataset.place.parent))}")
    _check(dataset, quick, screen)


@app.command("check")
def check_dataset(
    path: Annotated[str, Argument(help="The folder of a dataset, or the name of a benchmark.")],
    benchmark: Annotated[
        str | None, Option(metavar="NAME", help="What it should be; found out by its layout by default.")
    ] = None,
    quick: Quick = False,
) -> None:
    """Compare with the published figures, find unreadable files and images on both sides; exit code 1 on trouble."""
    _check(_named(path, benchmark), quick, Screen())


@app.command("sample")
def write_pictures(
    folder: Annotated[Path, Argument(help="A new folder.")],
    classes: Annotated[str, Option(help="How many, or their names with commas between.")] = "4",
    images: Annotated[int, Option(min=1, help="Pictures of each class.")] = 12,
    test: Annotated[bool, Option("--test", help="In styles that the others are not drawn in.")] = False,
) -> None:
    """Write pictures to try things with, embedded ones, as a folder of class folders."""
    from probprompt.data.datasets import subfolders
    from probprompt.data.emoji_r import write_sample

    named = int(classes) if classes.isdecimal() else [name.strip() for name in classes.split(",")]
    root = write_sample(folder, named, images, test)
    Screen().print(f"written: {root} ({', '.join(path.name for path in subfolders(root))})")


def list_benchmarks(screen: Screen) -> None:
    """A table of what can be named as a benchmark, with what is on this machine."""
    from probprompt.data import datasets
    from probprompt.data.huggingface import HubDataset
    from probprompt.data.published import data_folder

    try:
        place = f"Datasets are looked for in {data_folder()}"
    except UserError as problem:
        place = str(problem)
    rows = [(name, kind.summary, f"{kind.tasks} tasks", _here(kind)) for name, kind in datasets.registered().items()]
    for form, other in (("FOLDER", datasets.Folder), ("hf:OWNER/NAME", HubDataset)):
        rows.append((form, other.summary, f"{other.tasks} tasks", ""))
    screen.listing(("benchmark", "what it is", "usually", "here"), rows)
    screen.print(f"{place}; what is not there is fetched with: probprompt data get NAME")


def _here(kind: "type[Benchmark]") -> str:
    """Return whether the images of a benchmark are on this machine."""
    from probprompt.data.published import Dataset

    if not issubclass(kind, Dataset):
        return "packaged"
    try:
        return "yes" if kind().recognize() else "no"
    except UserError:  # no folder is named, and there is no home for one
        return "no"


def _named(path: str, name: str | None) -> "Benchmark":
    from probprompt.data import datasets
    from probprompt.data.verify import source_at

    folder = Path(path).expanduser()
    if name is not None:
        return _published(name)(folder)
    if not folder.exists() and path in datasets.registered():
        return datasets.find(path)
    return source_at(folder)


def _published(name: str) -> "type[Dataset]":
    from probprompt.data import datasets
    from probprompt.data.published import Dataset

    known = {key: source for key, source in datasets.registered().items() if issubclass(source, Dataset)}
    if name not in known:
        raise UserError(f"no published dataset is called {name!r}. {suggest(name, known)}")
    return known[name]


def _check(dataset: "Benchmark", quick: bool, screen: Screen) -> None:
    from probprompt.data.verify import check

    report = check(dataset, screen, quick)
    for line in report.facts:
        screen.print(line)
    for line in report.notes:
        screen.print(f"note: {line}")
    for line in report.problems:
        screen.print(f"TROUBLE: {line}")
    if report.problems:
        screen.print(f"{len(report.problems)} kind(s) of trouble")
        raise typer.Exit(1)
    screen.print("all is well")
