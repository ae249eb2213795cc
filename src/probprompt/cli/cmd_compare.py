"""Command ``compare``: a grid of runs, then its tables."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import probprompt.cli.console as shared
from probprompt.cli.console import DEVICE, METHODS, PRESET_NAMES, RUN, Screen, argument, option
from probprompt.errors import Interrupted, UserError

if TYPE_CHECKING:
    from probprompt.report.compare import Comparison
    from probprompt.runs.grid import GridSpec, Outcome

GRID = "Grid"  # a panel


def compare(
    grid: Annotated[Path | None, argument("TOML file with a grid; see examples/compare.toml.", "[GRID]")] = None,
    methods: Annotated[
        list[str] | None, option("Methods, comma-separated, or all.", "NAMES", autocompletion=METHODS, panel=GRID)
    ] = None,
    benchmarks: Annotated[
        list[str] | None, option("Benchmarks or folders of images, comma-separated.", "NAMES", panel=GRID)
    ] = None,
    seeds: Annotated[list[str] | None, option("Seeds: 0,1,2 or 0-4.", "N", default="0,1,2", panel=GRID)] = None,
    presets: Annotated[
        list[str] | None,
        option(
            "Presets: published, matched, ridge, flagship or custom (none).",
            "NAMES",
            default="matched",
            autocompletion=PRESET_NAMES,
            panel=GRID,
        ),
    ] = None,
    vary: Annotated[
        list[str] | None, option("Values of a setting to compare (repeatable).", "KEY=A,B", panel=GRID)
    ] = None,
    tasks: shared.Tasks = None,
    test: shared.TestFolder = None,
    validate: shared.Validate = False,
    skip_unreadable: shared.SkipUnreadable = False,
    backbone: shared.Backbone = None,
    weights: shared.Weights = None,
    assignments: shared.Assignments = None,
    out: Annotated[
        Path | None, option("Output folder for runs and tables.", "FOLDER", default="a folder under runs/", panel=RUN)
    ] = None,
    device: Annotated[str | None, option(**DEVICE, panel=RUN)] = None,
    runs: Annotated[
        list[Path] | None,
        option("Tabulate existing runs instead of training (run, folder or .jsonl file).", "RUN", panel=RUN),
    ] = None,
    tables_only: Annotated[
        bool, option("Tabulate the finished runs of the grid without training.", None, "--tables-only", panel=RUN)
    ] = False,
    workers: Annotated[int, option("Number of runs in parallel (one process each).", "N", min=1, panel=RUN)] = 1,
    ray: Annotated[
        str | None, option("Run on Ray: local, auto, HOST:PORT or ray://HOST:PORT.", "ADDRESS", panel=RUN)
    ] = None,
    gpus_per_run: Annotated[
        float | None, option("GPUs per run on Ray; fractions share a GPU.", "N", default="1 if any", min=0, panel=RUN)
    ] = None,
    cpus_per_run: Annotated[float | None, option("CPUs per run on Ray.", "N", default="1", min=0, panel=RUN)] = None,
) -> None:
    """Train several methods or settings and tabulate the results.

    Finished runs are kept; the same command continues.

    Example: probprompt compare --methods l2p,ranpac --seeds 0
    """
    from probprompt import api, distributed
    from probprompt.cli.grid_screen import GridScreen
    from probprompt.report.compare import gather, gather_runs
    from probprompt.runs.executors import run_grid
    from probprompt.runs.grid import ExecutionOptions, Grid, RunActions

    given = {"methods": methods, "benchmarks": benchmarks, "seeds": seeds, "presets": presets}
    named = shared.named_settings(tasks, test, backbone, weights, validate, skip_unreadable)
    options = {name: value for name, value in named.items() if value is not None}
    distributed.check_single_process("a comparison")
    screen, execution = GridScreen(), ExecutionOptions(workers, _ray_cluster(ray), gpus_per_run, cpus_per_run)
    if runs:
        if grid or any(given.values()) or options or assignments or vary or tables_only:
            raise UserError("--runs tabulates existing runs. Remove the grid and its settings.")
        _present(screen, gather_runs(runs), out or Path("comparison"))
        return
    spec = read_spec(grid, given, assignments or [], vary or [], options)
    whole = Grid(spec, out or Path("runs") / (grid.stem if grid else "compare"))
    if whole.left_out:
        screen.print(f"Skipped combinations that do not exist: {whole.left_out}")
    try:
        actions = RunActions(api.start, api.resume, device)
        outcomes = whole.outcomes() if tables_only else run_grid(whole, actions, screen, execution)
    except KeyboardInterrupt:
        finished = sum(outcome.run is not None for outcome in whole.outcomes())
        message = f"Interrupted. {finished} of {len(whole.runs)} runs are finished. Run the same command to continue."
        raise Interrupted(message) from None
    if any(outcome.run for outcome in outcomes):
        _present(screen, gather(whole, outcomes), whole.out)
    _conclude(screen, outcomes)


def _ray_cluster(address: str | None) -> str | None:
    """Return a Ray cluster as ``ExecutionOptions`` names it."""
    if address is None or address.startswith("ray://"):
        return address
    return "ray" if address == "local" else f"ray:{address}"


def _present(screen: Screen, comparison: "Comparison", out: Path) -> None:
    from probprompt.cli.grid_screen import show_table
    from probprompt.report.pages import write_comparison

    files = write_comparison(comparison, out)
    for table in comparison.tables():
        screen.title(f"\n{table.caption}")
        if not show_table(screen, table):
            screen.print("Standard deviations are hidden because the window is too narrow.")
        for note in table.notes:
            screen.print(note)
    screen.print("")
    for path in files:
        screen.print(f"Wrote {path}.")


def _conclude(screen: Screen, outcomes: "Sequence[Outcome]") -> None:
    """Report runs that are missing or failed; exit with 1 if any failed."""
    failed = [outcome for outcome in outcomes if outcome.problem]
    missing = sum(not outcome.run and not outcome.problem for outcome in outcomes)
    if missing:
        screen.print(f"Not run yet: {missing} of {len(outcomes)} runs.")
    if failed:
        screen.print(f"Failed: {len(failed)} of {len(outcomes)} runs. Run the same command to try them again.")
        for outcome in failed:
            screen.print(f"  {outcome.spec.folder}: {outcome.reason}")
        raise SystemExit(1)


def read_spec(
    file: Path | None,
    given: Mapping[str, list[str] | None],
    assignments: Sequence[str],
    vary: Sequence[str],
    options: Mapping[str, Any] | None = None,
) -> "GridSpec":
    """Read a grid from a file, and lay the options and dotted settings over it."""
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
    table = entries.get(name, {})
    if not isinstance(table, Mapping):
        raise UserError(f"[{name}] of a grid must be a table of settings, got {table!r}.")
    return table


def _assigned(option: str, assignment: str) -> tuple[str, str]:
    key, equals, text = (part.strip() for part in assignment.partition("="))
    if not equals or not key or not text:
        raise UserError(f"{option} expects KEY=VALUE, got {assignment!r}.")
    return key, text


def _split(text: str) -> list[str]:
    """Return the parts between commas, but keep the path of a folder whole."""
    return [text] if Path(text).expanduser().is_dir() else [part.strip() for part in text.split(",") if part.strip()]


def _values(text: str) -> list[Any]:
    """Parse values between commas as a TOML list, or one by one."""
    import tomllib

    from probprompt.config import parse_value

    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except tomllib.TOMLDecodeError:
        return [parse_value(part.strip()) for part in text.split(",")]


def _seeds(text: str) -> range:
    """Return one seed or a range of seeds.

    >>> _seeds("3"), _seeds("0-4")
    (range(3, 4), range(0, 5))
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise UserError(f"--seeds expects numbers such as 0,1,2 or a range such as 0-4, got {text!r}.")
    return range(int(match[1]), int(match[2] or match[1]) + 1)
