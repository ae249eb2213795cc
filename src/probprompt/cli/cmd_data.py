"""Commands ``data get``, ``data check``, ``data sample`` and ``data cache``."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from probprompt.cli.console import DATASETS, Screen, argument, option
from probprompt.errors import Interrupted, UserError, suggest

if TYPE_CHECKING:
    from probprompt.data.datasets import Benchmark
    from probprompt.data.published import Dataset

Quick = Annotated[bool, option("Count files without decoding them.", None, "--quick")]
app = typer.Typer(no_args_is_help=True, help="Download, verify and sample datasets, show the image cache.")


@app.command("get")
def get_dataset(
    name: Annotated[
        str, argument("cifar100, cub200, imagenet-r, tiny-imagenet or tu-berlin.", "NAME", autocompletion=DATASETS)
    ],
    folder: Annotated[Path | None, option("Folder for datasets.", "FOLDER", "--dir", default="PROBPROMPT_DATA")] = None,
    url: Annotated[str | None, option("Mirror of the archive; it must have the published hash.", "ADDRESS")] = None,
    file: Annotated[Path | None, option("Local copy of the archive.", "ARCHIVE")] = None,
    quick: Quick = False,
) -> None:
    """Download a dataset.

    An interrupted download resumes. The dataset is unpacked and checked.

    Example: probprompt data get cifar100
    """
    from probprompt.data.download import get
    from probprompt.data.published import PLACE, data_folder

    kind, screen = _published(name), Screen()
    try:
        dataset = get(kind, folder, url, file, screen)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted. Run the same command again to resume.") from None
    screen.print(f"{name}: {dataset.place}")
    if folder is not None and dataset.place.parent != data_folder():
        screen.print(f"To use this folder by default: export {PLACE}={quote(str(dataset.place.parent))}")
    _check(dataset, quick, screen)


@app.command("check")
def check_dataset(
    path: Annotated[str, argument("Dataset folder or benchmark name.", "PATH")],
    benchmark: Annotated[
        str | None, option("Expected dataset.", "NAME", default="detected from the layout", autocompletion=DATASETS)
    ] = None,
    quick: Quick = False,
) -> None:
    """Verify a dataset.

    Finds wrong counts, unreadable files and images in both splits. The exit code is 1 if there are problems.

    Example: probprompt data check photos/
    """
    _check(_named(path, benchmark), quick, Screen())


@app.command("sample")
def write_images(
    folder: Annotated[Path, argument("New folder for the images.", "FOLDER")],
    classes: Annotated[str, option("Number of classes, or their names with commas between.", "N")] = "4",
    images: Annotated[int, option("Images per class.", "N", min=1)] = 12,
    test: Annotated[bool, option("Draw the images in icon styles that training never uses.", None, "--test")] = False,
) -> None:
    """Write sample images.

    The emoji images come with the package, one folder per class.

    Example: probprompt data sample photos/
    """
    from probprompt.data.datasets import subfolders
    from probprompt.data.emoji_r import write_sample

    named = int(classes) if classes.isdecimal() else [name.strip() for name in classes.split(",")]
    root = write_sample(folder, named, images, test)
    Screen().print(f"Wrote {root} ({', '.join(path.name for path in subfolders(root))}).")


@app.command("cache")
def show_cache(
    max_size: Annotated[
        float | None, option("Delete the least recently used images beyond this size in GB.", "GB", min=0)
    ] = None,
) -> None:
    """Show or shrink the image cache.

    The cache holds decoded images.

    Example: probprompt data cache --max-size 5
    """
    from probprompt.data.cache import ImageCache

    screen, cache = Screen(), ImageCache.default()
    if cache is None:
        screen.print("The image cache is switched off.")
        return
    if max_size is not None:
        screen.print(f"Deleted {cache.clean(round(max_size * 1e9)) / 1e9:.2f} GB.")
    screen.print(f"{cache.folder}: {cache.size() / 1e9:.2f} GB of decoded images")


def list_benchmarks(screen: Screen) -> None:
    """Print a table of the benchmarks, and whether their images are on this machine."""
    from probprompt.data import datasets
    from probprompt.data.huggingface import HubDataset
    from probprompt.data.published import data_folder

    try:
        searched = f"Folder for datasets: {data_folder()}"
    except UserError as problem:
        searched = str(problem)
    rows = [(name, kind.summary, f"{kind.tasks} tasks", _local(kind)) for name, kind in datasets.registered().items()]
    for form, other in (("FOLDER", datasets.Folder), ("hf:OWNER/NAME", HubDataset)):
        rows.append((form, other.summary, f"{other.tasks} tasks", ""))
    screen.listing(("benchmark", "description", "default", "local"), rows)
    screen.print(f"{searched}\nDownload a dataset with 'probprompt data get NAME'.")


def _local(kind: "type[Benchmark]") -> str:
    """Return whether the images of a benchmark are on this machine."""
    from probprompt.data.published import Dataset

    if not issubclass(kind, Dataset):
        return "packaged"
    try:
        return "yes" if kind().recognize() else "no"
    except UserError:  # no folder for datasets is set, and there is no home folder
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
        raise UserError(f"Unknown dataset {name!r}. {suggest(name, known)}")
    return known[name]


def _check(dataset: "Benchmark", quick: bool, screen: Screen) -> None:
    from probprompt.data.verify import check

    report = check(dataset, screen, quick)
    for line in report.facts:
        screen.print(line)
    for line in report.notes:
        screen.print(f"note: {line}")
    for line in report.problems:
        screen.print(f"PROBLEM: {line}")
    if report.problems:
        screen.print(f"Found {len(report.problems)} kind(s) of problems.")
        raise typer.Exit(1)
    screen.print("No problems found.")
