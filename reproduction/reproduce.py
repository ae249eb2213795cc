"""Reproduction of a table of the paper: plan, estimate and run its missing runs.

A number of the paper stands for runs with the paper's weights and images and the settings behind it: the preset
``published``, or those of other authors. Tables share runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from probprompt import api, presets
from probprompt.backbones import pretrained
from probprompt.bench.measure import Peaks, measure_each
from probprompt.bench.results import BenchRecord, make_record, read_record, write_record
from probprompt.bench.results import Entry as Measured
from probprompt.config import RunConfig, merge, nest, parse_config
from probprompt.engine.build import pick_device
from probprompt.engine.hardware import hardware, machine_name
from probprompt.errors import UserError, suggest
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs.executors import run_grid
from probprompt.runs.grid import (
    SILENT_GRID,
    ExecutionOptions,
    Grid,
    GridCallback,
    GridSpec,
    Outcome,
    RunActions,
    RunSpec,
    brief,
)
from probprompt.runs.run import RunRecord, without_paths
from probprompt.storage import write_error
from reproduction import paper
from reproduction.bench_pages import run_seconds
from reproduction.local_resources import LocalResources, image_differences, missing_resources, weights_to_download
from reproduction.results import Entry, add_runs, entry_content, entry_path, read_entries
from reproduction.results_page import (
    PAPER_NETWORK,
    has_paper_settings,
    has_paper_weights,
    has_smaller_images,
    is_paper_network,
    is_paper_run,
    read_benches,
)

SECONDS = 1.0  # for each measurement of a cost


def recorded_speeds(folder: Path) -> Path:
    """Return the record of speeds in a folder of results, or else in this checkout."""
    places = [results / "bench" / "methods.json" for results in (folder, Path(__file__).parents[1] / "results")]
    return next((place for place in places if place.is_file()), places[0])


@dataclass(frozen=True)
class RequestedRun:
    """A number of the paper with the grid of its runs."""

    row: paper.Row
    column: paper.Column
    spec: GridSpec
    out: Path

    @property
    def setup(self) -> str:
        """Benchmark, tasks and backbone as text."""
        tasks, backbone = (self.spec.settings[name] for name in ("data.tasks", "backbone.name"))
        return f"{self.column.benchmark}, {brief(tasks)} tasks, {backbone}"

    @property
    def cells(self) -> list[RunSpec]:
        """Its runs, one per seed."""
        return list(Grid(self.spec, self.out).runs)


def requested_runs(
    table: paper.Table,
    out: Path,
    seeds: Sequence[int] = (),
    methods: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    weights: Mapping[str, str] | None = None,
) -> list[RequestedRun]:
    """Return the numbers of a table, or of some methods, each over its seeds or others.

    Settings (by dotted names) override those of the paper. Weights are files by the names of backbones.
    """
    known = dict.fromkeys(row.method for row in table.rows)
    for method in methods:
        if method not in known:
            raise UserError(f"{table.name} has no method {method!r}. {suggest(method, known)}")
    files = {name: {"backbone.weights": file} for name, file in (weights or {}).items()}
    runs = []
    for row, column in table.cells():
        if not methods or row.method in methods:
            own = {"data.tasks": column.tasks, "backbone.name": column.backbone, **files.get(column.backbone, {})}
            spec = GridSpec(
                methods=(row.method,),
                benchmarks=(column.benchmark,),
                seeds=tuple(seeds or table.seeds(row, column)),
                presets=(paper.PRESET,),
                settings={**own, **row.protocol, **(settings or {})},
                vary={name: (value,) for name, value in row.settings.items()},
            )
            runs.append(RequestedRun(row, column, spec, out / f"{column.backbone}-{column.tasks}-tasks"))
    return runs


class JoinedGrid(Grid):
    """Runs of several grids as one, sorted by seed."""

    def __init__(self, cells: Iterable[RunSpec], out: Path) -> None:
        unique = list({cell.folder: cell for cell in cells}.values())
        order = list(dict.fromkeys(cell.seed for cell in unique))
        self.out, self._not_offered = out, {}
        self.runs = sorted(unique, key=lambda cell: order.index(cell.seed))


@dataclass(frozen=True)
class RowStatus:
    """A number of the paper, with counts of its runs."""

    requested: RequestedRun
    is_paper: bool
    """Whether the paper's own experiment is requested, without other settings or weights."""
    recorded: int = 0
    """As requested, among the results or finished in their folders."""
    deviating: int = 0
    """Run with this machine's images or weights, which are not the paper's: not counted, not repeated."""
    finished: tuple[RunSpec, ...] = ()  # only to be added
    waiting: tuple[RunSpec, ...] = ()  # to be started or resumed

    @property
    def total(self) -> int:
        """Number of runs."""
        return len(self.requested.spec.seeds)


@dataclass(frozen=True)
class Plan:
    """RecordedRun and missing runs of a table, and the problems that prevent a start."""

    table: paper.Table
    rows: tuple[RowStatus, ...]
    problems: tuple[str, ...]  # with remedies
    differences: tuple[str, ...]  # of the images from the published ones
    downloads: tuple[str, ...]  # weights from the Hub
    out: Path
    measure: bool  # whether to measure costs

    @property
    def is_paper(self) -> bool:
        """Whether only the paper's own experiment is requested."""
        return all(row.is_paper for row in self.rows)

    @property
    def total(self) -> int:
        """Number of requested runs."""
        return sum(row.total for row in self.rows)

    @property
    def missing(self) -> int:
        """Number of requested runs that are not recorded."""
        return self.total - sum(row.recorded for row in self.rows)

    @property
    def deviating(self) -> int:
        """Number of missing runs that were run with this machine's images or weights."""
        return sum(row.deviating for row in self.rows)

    @property
    def to_run(self) -> int:
        """Number of runs to start."""
        return sum(len(row.waiting) for row in self.rows)

    @property
    def grid(self) -> JoinedGrid:
        """All runs to start or to add."""
        return JoinedGrid((cell for row in self.rows for cell in (*row.finished, *row.waiting)), self.out)


def make_plan(
    table: paper.Table, requested: Sequence[RequestedRun], folder: Path, out: Path, device: torch.device | None = None
) -> Plan:
    """Find out what of a table is recorded and what the other runs need."""
    entries, local = read_entries(folder), LocalResources()
    rows, rejected = list[RowStatus](), list[str]()
    for run in requested:
        try:
            rows.append(_status(table, run, entries, local))
        except UserError as error:  # such as a folder with another run: show the rest
            rejected.append(str(error))
            rows.append(RowStatus(run, is_paper=True))
    if rejected and len(rejected) == len(requested):
        raise UserError(rejected[0])
    waiting = [cell.config for row in rows for cell in row.waiting]
    problems = dict.fromkeys([*rejected, *missing_resources(waiting, local), *_conflicts(waiting, entries, folder)])
    measure = bool(table.costs) and not _are_costs_known(table, read_benches(folder), device or pick_device(None))
    differences, downloads = image_differences(waiting, local), weights_to_download(waiting)
    return Plan(table, tuple(rows), tuple(problems), differences, downloads, out, measure)


def _status(table: paper.Table, run: RequestedRun, entries: Sequence[Entry], local: LocalResources) -> RowStatus:
    cells, recorded, deviating, finished, waiting = run.cells, 0, 0, list[RunSpec](), list[RunSpec]()
    is_paper = all(_is_paper_experiment(cell.config, run) for cell in cells)

    def is_requested(entry: Entry, cell: RunSpec) -> bool:
        if is_paper:
            return entry.seed == cell.seed and is_paper_run(table, run.row, run.column, entry)
        return local.would_repeat(entry, cell.config, run.column)

    for cell in cells:
        near = [entry for entry in entries if (entry.method, entry.seed) == (cell.method, cell.seed)]
        done = cell.outcome.run
        if any(is_requested(entry, cell) for entry in near):
            recorded += 1
        elif done:
            as_requested = is_requested(Entry("", entry_content(done)), cell)
            recorded, deviating = recorded + as_requested, deviating + (not as_requested)
            finished.append(cell)
        elif local.images(cell.config).differences and any(
            local.would_repeat(entry, cell.config, run.column) for entry in near
        ):
            deviating += 1
        else:
            waiting.append(cell)
    return RowStatus(run, is_paper, recorded, deviating, tuple(finished), tuple(waiting))


def _is_paper_experiment(config: RunConfig, run: RequestedRun) -> bool:
    """Return True if settings and weights are the paper's, so that only images can differ."""
    used = {"name": config.backbone.name, "source": ""}
    entry = Entry("", {"config": config.to_stored(), "backbone": used})
    same = has_paper_settings(entry, run.row) and has_paper_weights(entry, run.column.backbone)
    return same and config.data.tasks == run.column.tasks


def _conflicts(configs: Iterable[RunConfig], entries: Sequence[Entry], folder: Path) -> list[str]:
    """List files of results that contain other runs under the names of the new ones."""
    known = {entry.path for entry in entries}
    return [
        f"{folder / file} contains a run with other images, weights or settings. Pass another folder with --results, "
        "or move that file."
        for file in dict.fromkeys(map(_planned_path, configs))
        if file in known
    ]


def _planned_path(config: RunConfig) -> str:
    """Return where a run with these settings will be recorded."""
    tasks = config.data.tasks
    count = tasks if isinstance(tasks, int) else len(tasks or ())
    settings = without_paths(config.to_stored())
    return entry_path(RunRecord.model_validate({"config": settings, "stream": {"test_classes": [0] * count}}))


@dataclass(frozen=True)
class Estimate:
    """Time of missing runs on a GPU like that of a record."""

    hours: float
    unknown: int  # runs that the record does not cover
    machine: str


def estimate(plan: Plan, bench: Path) -> Estimate | None:
    """Estimate the GPU hours of missing runs at the speeds of a record, None without one."""
    if not bench.is_file():
        return None
    record = read_record(bench)
    speeds = {entry["method"]: entry for entry in record["results"] if entry["training"]}
    known = {(each.benchmark, each.tasks): each for each in paper.EXPERIMENTS}
    seconds, unknown = 0.0, 0
    for status in plan.rows:
        row, column = status.requested.row, status.requested.column
        experiment = known.get((column.benchmark, column.tasks))
        if row.method in speeds and experiment:
            epochs = row.protocol.get("training.epochs")
            seconds += len(status.waiting) * run_seconds(speeds[row.method], experiment, epochs)
        else:
            unknown += len(status.waiting)
    return Estimate(seconds / 3600, unknown, machine_name(record["hardware"]))


def run_missing(
    plan: Plan,
    folder: Path,
    device: str | None = None,
    progress: GridCallback = SILENT_GRID,
    where: ExecutionOptions | None = None,
) -> list[Outcome]:
    """Download weights, run what is missing, and add all finished runs, also after an error."""
    if plan.problems:
        raise UserError("\n".join(plan.problems))
    for name in plan.downloads:
        progress.note(f"Weights {name}: {pretrained.download(name)}")
    grid = plan.grid
    try:
        return run_grid(grid, RunActions(api.start, api.resume, device), progress, where)
    finally:
        finished = [outcome.spec.folder for outcome in grid.outcomes() if outcome.run]
        if finished:
            add_runs(finished, folder)


def _are_costs_known(table: paper.Table, benches: Sequence[BenchRecord], device: torch.device) -> bool:
    """Return True if one record has all costs as published, on this machine."""
    methods, machine = {row.method for row in table.rows}, machine_name(hardware(device))
    here = [record["results"] for record in benches if machine_name(record["hardware"]) == machine]
    return any(methods <= {entry["method"] for entry in entries if _is_as_published(entry)} for entries in here)


def _is_as_published(entry: Measured) -> bool:
    smaller = has_smaller_images(entry["config"]["data"])
    return is_paper_network(entry["backbone"]) and entry["config"].get("preset") == paper.PRESET and not smaller


def measure_costs(
    table: paper.Table,
    folder: Path,
    device: torch.device,
    progress: ProgressCallback = SILENT,
    settings: Mapping[str, Any] | None = None,
    seconds: float = SECONDS,
) -> Path:
    """Measure the costs of a table's methods on this machine, and record them."""
    column, own = table.columns[0], merge({"backbone": {"name": PAPER_NETWORK}}, settings or {})
    configs = []
    for row in table.rows:
        published = presets.settings(paper.PRESET, row.method, column.benchmark, column.tasks)
        configs.append(parse_config(merge(published, merge(nest(row.protocol), own))))
    peaks = Peaks(device, seconds)
    results = list(measure_each(configs, seconds, peaks, progress))
    path = folder / "bench" / f"{table.name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from error
    write_record(path, make_record(results, [], peaks.measured, device, seconds))
    return path
