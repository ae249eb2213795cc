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
from probprompt.bench.record import make_record, read_record, write_record
from probprompt.config import RunConfig, merge, parse_config
from probprompt.data import benchmarks
from probprompt.errors import UserError, suggest
from probprompt.results import paper
from probprompt.results.book import Entry, add_runs, read_entries, same_settings
from probprompt.results.page import is_base, read_benches
from probprompt.runs.carry_out import GridWatcher, Way, Where, run_grid
from probprompt.runs.execute import pick_device
from probprompt.runs.files import write_error
from probprompt.runs.grid import Cell, Grid, GridSpec, Outcome, nest
from probprompt.runs.progress import Watcher
from probprompt.runs.record import hardware, machine_name

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
    booked: int
    """In the book."""
    cells: tuple[Cell, ...]
    """Not in the book: to be run, or finished in their folders and only to be added."""

    @property
    def wanted(self) -> int:
        """How many runs there should be."""
        return len(self.wish.spec.seeds)

    @property
    def waiting(self) -> list[Cell]:
        """To be run, or to be finished."""
        return [cell for cell in self.cells if not cell.outcome.run]

    @property
    def to_run(self) -> int:
        """How many runs are still missing, also where they cannot be described yet."""
        return self.wanted - self.booked - (len(self.cells) - len(self.waiting))


@dataclass(frozen=True)
class Plan:
    """A table: what is there, what is missing, and what stands in the way."""

    table: paper.Table
    standings: tuple[Standing, ...]
    problems: tuple[str, ...]
    """Images and weights that are not on this machine, with what to do."""
    out: Path
    measure: bool
    """Whether costs are to be measured."""

    @property
    def to_run(self) -> int:
        """How many runs are missing."""
        return sum(standing.to_run for standing in self.standings)

    @property
    def grid(self) -> Cells:
        """All that is not in the book."""
        return Cells((cell for standing in self.standings for cell in standing.cells), self.out)


def make_plan(
    table: paper.Table, wanted: Sequence[Wish], book: Path, out: Path, device: torch.device | None = None
) -> Plan:
    """Find out what of a table is there, and what is missing to run the rest; costs are those of a device."""
    entries, problems = read_entries(book), dict[str, None]()
    standings = []
    for wish in wanted:
        try:
            cells = Grid(wish.spec, wish.out).cells
        except UserError as problem:
            problems[_with_remedy(wish.column.benchmark, str(problem))] = None
            standings.append(Standing(wish, 0, ()))
            continue
        there = [cell for cell in cells if _in_book(cell, entries)]
        standings.append(Standing(wish, len(there), tuple(cell for cell in cells if cell not in there)))
    needed = [cell.config for standing in standings for cell in standing.waiting]
    problems |= dict.fromkeys(lacking(needed))
    measure = bool(table.costs) and not _costs_known(table, read_benches(book), device or pick_device(None))
    return Plan(table, tuple(standings), tuple(problems), out, measure)


def _in_book(cell: Cell, entries: Sequence[Entry]) -> bool:
    near = (entry for entry in entries if (entry.method, entry.seed) == (cell.method, cell.seed))
    return any(same_settings(entry, cell.config) for entry in near)


def lacking(configs: Iterable[RunConfig]) -> list[str]:
    """Images and weights that runs need and this machine has not, each with the command to get it."""
    found: dict[str, None] = {}
    every = list(configs)
    for name, test in dict.fromkeys((config.data.benchmark, config.data.test) for config in every):
        try:
            benchmarks.find(name, test).load(None)
        except UserError as problem:
            found[_with_remedy(name, str(problem))] = None
    known = {listing.name: listing for listing in checkpoints.known()}
    for backbone in dict.fromkeys(config.backbone for config in every):
        listing = known.get(backbone.name)
        there = listing.available if listing else "." in backbone.name  # any other of timm's is fetched by its run
        if backbone.weights is None and not there:
            found[_weights_remedy(backbone.name, listing.source if listing else None)] = None
        elif backbone.weights not in (None, checkpoints.RANDOM) and not Path(str(backbone.weights)).is_file():
            found[f"the weights {backbone.name}: there is no file {backbone.weights}"] = None
    return list(found)


def _with_remedy(benchmark: str, problem: str) -> str:
    if "data get" in problem:
        return problem
    return f"the images of {benchmark}: {problem}. Get them with: probprompt data get {benchmark}"


def _weights_remedy(name: str, source: str | None) -> str:
    if not (source or "").startswith("hub:"):
        return f"the weights {name} are not fetched for you: bring their file, and name it with --weights {name}=FILE"
    command = f"python -c \"from probprompt.checkpoints import load_backbone; load_backbone('{name}')\""
    return f"the weights {name} are not on this machine. Get them with: {command}"


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
            seconds += standing.to_run * run_seconds(speeds[row.method], experiment, epochs)
        else:
            unknown += standing.to_run
    return Estimate(seconds / 3600, unknown, machine_name(record["hardware"]))


# Carrying it out


def carry_out(
    plan: Plan, book: Path, device: str | None = None, watcher: GridWatcher | None = None, where: Where | None = None
) -> list[Outcome]:
    """Run what is missing; whatever is finished by the end, however that came, is in the book."""
    if plan.problems:
        raise UserError("\n".join(plan.problems))
    grid = plan.grid
    try:
        return run_grid(grid, Way(api.start, api.resume, device), watcher, where)
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
    return is_base(entry["backbone"]) and entry["config"].get("preset") == paper.PRESET


def measure_costs(
    table: paper.Table,
    book: Path,
    device: torch.device,
    watcher: Watcher | None = None,
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
    results = list(measure_each(configs, seconds, peaks, watcher))
    path = book / "bench" / f"{table.name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise write_error(path, problem) from problem
    write_record(path, make_record(results, [], peaks.found, device, seconds))
    return path
