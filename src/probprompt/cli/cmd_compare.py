"""The command ``compare``: a grid of runs, then the tables."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import probprompt.cli.console as shared
from probprompt.cli.console import Screen
from probprompt.errors import Interrupted, UserError

if TYPE_CHECKING:
    from probprompt.report.compare import Comparison
    from probprompt.runs.grid import GridSpec, Outcome


def compare(
    grid: Annotated[Path | None, Argument(help="A grid in a TOML file (see examples/compare.toml).")] = None,
    methods: Annotated[list[str] | None, Option(help="Methods, with commas between; all: every one.")] = None,
    benchmarks: Annotated[list[str] | None, Option(help="Benchmarks or folders, with commas between.")] = None,
    seeds: Annotated[list[str] | None, Option(help="0,1,2 or 0-4.", show_default="0,1,2")] = None,
    presets: Annotated[
        list[str] | None, Option(help="published, matched, ridge, flagship or custom.", show_default="matched")
    ] = None,
    backbone: shared.Backbone = None,
    weights: shared.Weights = None,
    tasks: shared.Tasks = None,
    test: shared.TestFolder = None,
    validate: shared.Validate = False,
    skip_unreadable: shared.SkipUnreadable = False,
    assignments: shared.Assignments = None,
    vary: Annotated[
        list[str] | None, Option(metavar="KEY=A,B", help="Values of a setting to try; may be repeated.")
    ] = None,
    runs: Annotated[
        list[Path] | None,
        Option("--from", metavar="RUN", help="Tabulate runs that are there: one, a folder of them, or a book."),
    ] = None,
    out: Annotated[Path | None, Option(help="Where runs and tables go; a folder under runs/ by default.")] = None,
    device: shared.Device = None,
    show_only: Annotated[bool, Option("--no-run", help="Only tabulate what is finished.")] = False,
    workers: Annotated[int, Option(min=1, help="Cells that run side by side, each in a process.")] = 1,
    on: Annotated[
        str | None,
        Option(
            metavar="CLUSTER",
            help="ray: started here; ray:auto, ray:HOST:PORT or ray://HOST:PORT: one whose machines share --out.",
        ),
    ] = None,
    gpus_per_cell: Annotated[
        float | None, Option(min=0, help="On Ray; fractions share a GPU.", show_default="1 where there are any")
    ] = None,
    cpus_per_cell: Annotated[float | None, Option(min=0, help="On Ray.", show_default="1")] = None,
    book: Annotated[Path | None, Option(help="Write the records of all runs into one JSONL file.")] = None,
    page: Annotated[Path | None, Option(help="Put the tables into this page of Markdown.")] = None,
) -> None:
    """Run a grid of methods, benchmarks, seeds and settings, and set the results side by side."""
    from probprompt import api, distributed
    from probprompt.cli.grid_screen import GridScreen
    from probprompt.report.compare import gather, gather_runs
    from probprompt.runs.executors import run_grid
    from probprompt.runs.grid import ExecutionOptions, Grid, RunActions

    given = {"methods": methods, "benchmarks": benchmarks, "seeds": seeds, "presets": presets}
    named = shared.named_settings(tasks, test, backbone, weights, validate, skip_unreadable)
    options = {name: value for name, value in named.items() if value is not None}
    distributed.refuse_several("a comparison")
    screen, where = GridScreen(), ExecutionOptions(workers, on, gpus_per_cell, cpus_per_cell)
    if runs:
        if grid or any(given.values()) or options or assignments or vary or show_only:
            raise UserError("--from takes runs that are there: leave the grid and its settings away")
        _present(screen, gather_runs(runs), out or Path("comparison"), book, page)
        return
    spec = read_spec(grid, given, assignments or [], vary or [], options)
    whole = Grid(spec, out or Path("runs") / (grid.stem if grid else "compare"))
    if whole.left_out:
        screen.print(f"left out, not offered: {whole.left_out}")
    try:
        actions = RunActions(api.start, api.resume, device)
        outcomes = whole.outcomes() if show_only else run_grid(whole, actions, screen, where)
    except KeyboardInterrupt:
        finished = sum(outcome.run is not None for outcome in whole.outcomes())
        message = f"{finished} of {len(whole.cells)} cells are finished; go on with the same command"
        raise Interrupted(f"interrupted; {message}") from None
    if any(outcome.run for outcome in outcomes):
        _present(screen, gather(whole, outcomes), whole.out, book, page)
    _conclude(screen, outcomes)


def _present(screen: Screen, comparison: "Comparison", out: Path, book: Path | None, page: Path | None) -> None:
    from probprompt.cli.grid_screen import show_table
    from probprompt.report.pages import write_comparison, write_page
    from probprompt.runs.run import write_book

    files = write_comparison(comparison, out)
    if book:
        files.append(write_book(book, comparison.recorded))
    if page:
        files.append(write_page(comparison, page))
    for table in comparison.tables():
        screen.title(f"\n{table.caption}")
        if not show_table(screen, table):
            screen.print("Without the standard deviations, for which this window is too narrow.")
        for note in table.notes:
            screen.print(note)
    screen.print("")
    for path in files:
        screen.print(f"written: {path}")


def _conclude(screen: Screen, outcomes: "Sequence[Outcome]") -> None:
    """Tell which cells are not there."""
    failed = [outcome for outcome in outcomes if outcome.problem]
    missing = [outcome for outcome in outcomes if not outcome.run and not outcome.problem]
    if missing:
        screen.print(f"not run yet: {len(missing)} of {len(outcomes)} cells")
    if failed:
        screen.print(f"failed: {len(failed)} of {len(outcomes)} cells (the same command tries them again)")
        for outcome in failed:
            screen.print(f"  {outcome.cell.folder}: {outcome.reason}")
        raise SystemExit(1)


def read_spec(
    file: Path | None,
    given: Mapping[str, list[str] | None],
    assignments: Sequence[str],
    vary: Sequence[str],
    options: Mapping[str, Any] | None = None,
) -> "GridSpec":
    """A grid from a file; over it the options, which may be settings by their dotted names."""
    from probprompt.config import flatten, parse_value, read_toml
    from probprompt.data.stream import parse_tasks
    from probprompt.runs.grid import parse_spec

    entries = read_toml(file) if file else {}
    entries |= {name: [part for text in texts for part in _split(text)] for name, texts in given.items() if texts}
    if given.get("seeds"):
        entries["seeds"] = [seed for text in entries["seeds"] for seed in _seeds(text)]
    settings, varied = flatten(_table(entries, "settings")) | dict(options or {}), dict(_table(entries, "vary"))
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
    import tomllib

    from probprompt.config import parse_value

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
