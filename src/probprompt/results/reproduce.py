"""A table of the paper, run again: what of it is in the book, what is missing, what that costs, and carrying it out.

The cells are those numbers that the paper prints, each with the paper's weights and images and the settings behind that
number: the preset ``published``, or how others ran the method where the number comes from them. They are run as
``probprompt compare`` runs a grid. Tables share runs: what one has, the others need not run again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from probprompt import api, checkpoints, presets
from probprompt.bench.measure import Peaks, measure_each
from probprompt.bench.page import PAPER, run_seconds
from probprompt.bench.results import make_record, read_record, write_record
from probprompt.config import RunConfig, merge, parse_config
from probprompt.errors import UserError, suggest
from probprompt.progress import SILENT, ProgressCallback
from probprompt.results import page, paper
from probprompt.results.at_hand import Here, lacking, to_fetch, told_differences
from probprompt.results.book import Entry, add_runs, content_of, file_of, read_entries
from probprompt.results.page import is_base, is_there, read_benches, same_weights
from probprompt.runs.book import without_paths
from probprompt.runs.carry_out import SILENT_GRID, GridCallback, Way, Where, run_grid
from probprompt.runs.execute import pick_device
from probprompt.runs.grid import Cell, Grid, GridSpec, Outcome, brief, nest
from probprompt.runs.record import hardware, machine_name
from probprompt.storage import write_error

NETWORK = "vit_base_patch16_224"
"""What the paper's costs are of."""
SECONDS = 1.0  # for each measurement of a cost
SPEEDS = Path("bench") / "methods.json"
"""Of all methods, within a book."""


def known_speeds(book: Path) -> Path:
    """The record of speeds in a book, or the one of this project: it comes with the package, or lies in its tree."""
    here = Path(__file__).parent
    places = (book / SPEEDS, here / "speeds.json", here.parents[2] / "results" / SPEEDS)
    return next((place for place in places if place.is_file()), places[0])


# What is wanted


@dataclass(frozen=True)
class Wish:
    """A number of the paper: the runs behind it, and the grid that has them."""

    row: paper.Row
    column: paper.Column
    spec: GridSpec
    out: Path

    @property
    def where(self) -> str:
        """Benchmark, tasks and backbone as they are asked for, in words."""
        tasks, backbone = (self.spec.settings[name] for name in ("data.tasks", "backbone.name"))
        return f"{self.column.benchmark}, {brief(tasks)} tasks, {backbone}"


def wishes(
    table: paper.Table,
    out: Path,
    seeds: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    weights: Mapping[str, str] | None = None,
) -> list[Wish]:
    """The numbers of a table, or those of some methods, each over its own seeds or others; weights by name as files."""
    _refuse_unknown(table, methods)
    files = {name: {"backbone.weights": file} for name, file in (weights or {}).items()}
    found = []
    for row, column in table.cells():
        if not methods or row.method in methods:
            spec = GridSpec(
                methods=(row.method,),
                benchmarks=(column.benchmark,),
                seeds=tuple(seeds or table.seeds(row, column)),
                presets=(paper.PRESET,),
                settings={
                    "data.tasks": column.tasks,
                    "backbone.name": column.backbone,
                    **files.get(column.backbone, {}),
                    **row.protocol,
                    **(settings or {}),
                },
                vary={name: (value,) for name, value in row.settings.items()},
            )
            found.append(Wish(row, column, spec, out / f"{column.backbone}-{column.tasks}-tasks"))
    return found


def _refuse_unknown(table: paper.Table, methods: Sequence[str] | None) -> None:
    known = dict.fromkeys(row.method for row in table.rows)
    for method in methods or ():
        if method not in known:
            raise UserError(f"{table.name} has no row for {method!r}: {suggest(method, known)}")


# How things stand


class Cells(Grid):
    """Cells of several grids as one, those of the first seed first."""

    def __init__(self, cells: Iterable[Cell], out: Path) -> None:
        kept = list({cell.folder: cell for cell in cells}.values())
        order = list(dict.fromkeys(cell.seed for cell in kept))
        self.out, self._not_offered = out, {}
        self.cells = sorted(kept, key=lambda cell: order.index(cell.seed))


@dataclass(frozen=True)
class Standing:
    """A number of the paper, and how many of its runs are there."""

    wish: Wish
    papers: bool
    """Whether the paper's own experiment is asked for, and not one with other settings or weights."""
    there: int
    """As asked for, in the book or finished in their folders."""
    otherwise: int
    """Run already with what this machine has, which is not the paper's: they do not count, and are not repeated."""
    finished: tuple[Cell, ...]
    """In their folders, and only to be added."""
    waiting: tuple[Cell, ...]
    """To be run, or to be finished."""

    @property
    def wanted(self) -> int:
        """How many runs there should be."""
        return len(self.wish.spec.seeds)

    @property
    def missing(self) -> int:
        """How many runs as asked for there are not."""
        return self.wanted - self.there


@dataclass(frozen=True)
class Plan:
    """A table: what is there, what is missing, and what stands in the way."""

    table: paper.Table
    standings: tuple[Standing, ...]
    problems: tuple[str, ...]
    """What keeps the runs from being started, with what to do."""
    differences: tuple[str, ...]
    """How the images that the runs would meet differ from the published ones."""
    fetched: tuple[str, ...]
    """Weights that are fetched from the hub before the first run."""
    out: Path
    measure: bool
    """Whether costs are to be measured."""

    @property
    def papers(self) -> bool:
        """Whether all that is asked for is the paper's own."""
        return all(standing.papers for standing in self.standings)

    @property
    def missing(self) -> int:
        """How many runs as asked for there are not."""
        return sum(standing.missing for standing in self.standings)

    @property
    def otherwise(self) -> int:
        """How many of these were run with what this machine has, which is not the paper's."""
        return sum(standing.otherwise for standing in self.standings)

    @property
    def to_run(self) -> int:
        """How many runs are to be started."""
        return sum(len(standing.waiting) for standing in self.standings)

    @property
    def grid(self) -> Cells:
        """All that is to be run or to be added."""
        cells = (cell for standing in self.standings for cell in (*standing.finished, *standing.waiting))
        return Cells(cells, self.out)


def make_plan(
    table: paper.Table, wanted: Sequence[Wish], book: Path, out: Path, device: torch.device | None = None
) -> Plan:
    """Find out what of a table is there, and what is missing to run the rest; costs are those of a device."""
    entries, here = read_entries(book), Here()
    standings, refused = list[Standing](), list[str]()
    for wish in wanted:
        try:
            standings.append(_standing(table, wish, entries, here))
        except UserError as problem:  # such as a folder that holds another run: the rest can be told all the same
            refused.append(str(problem))
            standings.append(Standing(wish, papers=True, there=0, otherwise=0, finished=(), waiting=()))
    if refused and len(refused) == len(wanted):
        raise UserError(refused[0])
    waiting = [cell.config for standing in standings for cell in standing.waiting]
    problems = dict.fromkeys([*refused, *lacking(waiting, here), *_taken(standings, entries, book)])
    measure = bool(table.costs) and not _costs_known(table, read_benches(book), device or pick_device(None))
    differ, fetched = told_differences(waiting, here), to_fetch(waiting)
    return Plan(table, tuple(standings), tuple(problems), differ, fetched, out, measure)


def _standing(table: paper.Table, wish: Wish, entries: Sequence[Entry], here: Here) -> Standing:
    there, otherwise, finished, waiting = 0, 0, list[Cell](), list[Cell]()
    cells = Grid(wish.spec, wish.out).cells
    papers = all(_asks_for_papers(cell.config, wish) for cell in cells)

    def asked(entry: Entry, cell: Cell) -> bool:
        if papers:
            return entry.seed == cell.seed and is_there(table, wish.row, wish.column, entry)
        return here.would_repeat(entry, cell.config, wish.column)

    for cell in cells:
        near = [entry for entry in entries if (entry.method, entry.seed) == (cell.method, cell.seed)]
        run = cell.outcome.run
        if any(asked(entry, cell) for entry in near):
            there += 1
        elif run:
            as_asked = asked(Entry("", content_of(run)), cell)
            there, otherwise = there + as_asked, otherwise + (not as_asked)
            finished.append(cell)
        elif here.differences(cell.config) and any(here.would_repeat(e, cell.config, wish.column) for e in near):
            otherwise += 1
        else:
            waiting.append(cell)
    return Standing(wish, papers, there, otherwise, tuple(finished), tuple(waiting))


def _asks_for_papers(config: RunConfig, wish: Wish) -> bool:
    """Whether settings are the paper's, with weights that the paper names: then only images can make a difference."""
    used = {"name": config.backbone.name, "source": ""}
    asked = Entry("", {"config": config.model_dump(mode="json"), "backbone": used})
    same = page.same_settings(asked, wish.row) and same_weights(asked, wish.column.backbone)
    return same and config.data.tasks == wish.column.tasks


def _taken(standings: Iterable[Standing], entries: Sequence[Entry], book: Path) -> list[str]:
    """Files of the book that hold other runs where the new ones would stand: adding those would be refused."""
    held = {entry.path for entry in entries}
    files = (_file(cell.config) for standing in standings for cell in standing.waiting)
    return [
        f"{book / file} holds a run with other images, weights or settings, which is not replaced: name another book "
        "with --book, or move that file away"
        for file in dict.fromkeys(files)
        if file in held
    ]


def _file(config: RunConfig) -> str:
    """Where a run with these settings will stand in the book."""
    tasks = config.data.tasks
    count = tasks if isinstance(tasks, int) else len(tasks or ())
    return file_of({"config": without_paths(config.model_dump(mode="json")), "stream": {"tasks": range(count)}})


# What it will cost


@dataclass(frozen=True)
class Estimate:
    """What missing runs will take on a GPU like that of a record."""

    hours: float
    unknown: int
    """Runs that the record says nothing about."""
    machine: str


def estimate(plan: Plan, bench: Path) -> Estimate | None:
    """GPU hours of what is missing, at the speeds of a recorded bench; None where there is no record."""
    if not bench.is_file():
        return None
    record = read_record(bench)
    speeds = {entry["method"]: entry for entry in record["results"] if entry["training"]}
    known = {(each.benchmark, each.tasks): each for each in PAPER}
    seconds, unknown = 0.0, 0
    for standing in plan.standings:
        row, column = standing.wish.row, standing.wish.column
        experiment = known.get((column.benchmark, column.tasks))
        if row.method in speeds and experiment:
            epochs = row.protocol.get("training.epochs")
            seconds += len(standing.waiting) * run_seconds(speeds[row.method], experiment, epochs)
        else:
            unknown += len(standing.waiting)
    return Estimate(seconds / 3600, unknown, machine_name(record["hardware"]))


# Carrying it out


def carry_out(
    plan: Plan, book: Path, device: str | None = None, progress: GridCallback = SILENT_GRID, where: Where | None = None
) -> list[Outcome]:
    """Fetch weights, then run what is missing; whatever is finished by the end, however that came, is in the book."""
    if plan.problems:
        raise UserError("\n".join(plan.problems))
    for name in plan.fetched:
        progress.note(f"the weights {name}: {checkpoints.fetch(name)}")
    grid = plan.grid
    try:
        return run_grid(grid, Way(api.start, api.resume, device), progress, where)
    finally:
        finished = [outcome.cell.folder for outcome in grid.outcomes() if outcome.run]
        if finished:
            add_runs(finished, book)


def _costs_known(table: paper.Table, benches: Sequence[Mapping[str, Any]], device: torch.device) -> bool:
    """Whether one record has what every method of the table costs as published, on the paper's network and here."""
    wanted, machine = {row.method for row in table.rows}, machine_name(hardware(device))
    return any(
        wanted <= {entry["method"] for entry in record["results"] if _as_published(entry)}
        for record in benches
        if machine_name(record["hardware"]) == machine
    )


def _as_published(entry: Mapping[str, Any]) -> bool:
    smaller = presets.are_smaller(entry["config"]["data"])
    return is_base(entry["backbone"]) and entry["config"].get("preset") == paper.PRESET and not smaller


def measure_costs(
    table: paper.Table,
    book: Path,
    device: torch.device,
    progress: ProgressCallback = SILENT,
    settings: Mapping[str, Any] | None = None,
    seconds: float = SECONDS,
) -> Path:
    """Measure what the methods of a table cost on this machine, and put the record into the book."""
    column = table.columns[0]
    base: dict[str, Any] = merge({"backbone": {"name": NETWORK}}, settings or {})
    configs = [
        parse_config(
            merge(
                presets.settings(paper.PRESET, row.method, column.benchmark, column.tasks),
                merge(nest(row.protocol), base),
            )
        )
        for row in table.rows
    ]
    peaks = Peaks(device, seconds)
    results = list(measure_each(configs, seconds, peaks, progress))
    path = book / "bench" / f"{table.name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise write_error(path, problem) from problem
    write_record(path, make_record(results, [], peaks.found, device, seconds))
    return path
