"""A grid of runs: benchmarks x presets x methods x settings x seeds, every cell a recorded run in its own folder."""

import hashlib
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from probprompt import methods, presets
from probprompt.config import (
    RunConfig,
    field_names,
    flatten,
    merge,
    nest,
    parse_config,
    to_stored,
    unknown_setting,
    with_absolute_paths,
)
from probprompt.data import datasets
from probprompt.errors import UserError, shorten, suggest
from probprompt.heads import setting_names
from probprompt.progress import ProgressCallback
from probprompt.runs.run import Run, config_hash
from probprompt.storage import read_json, write_errors, write_json

CUSTOM = "custom"
"""No preset: the defaults of all settings, with those of the grid laid over them."""
FAILED = "failed.json"
_NAME = 60  # characters that a value may take in the name of a folder
_OWN = {"data.benchmark": "benchmarks", "method.name": "methods", "preset": "presets"} | dict.fromkeys(
    ("seeds.order", "seeds.init", "seeds.data"), "seeds"
)  # settings that the grid itself gives
Varied = tuple[tuple[str, Any], ...]  # settings by their dotted names
VAGUE = ("alignment.", "head.kind")  # begin settings whose last part says nothing by itself
Result = TypeVar("Result")


# What is asked for


def _listed(value: Any) -> Any:
    """A single value as a list of one; what is named twice, once."""
    values = [value] if isinstance(value, str | int) else value
    return list(dict.fromkeys(values)) if isinstance(values, list | tuple) else values


Names = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_listed)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), BeforeValidator(_listed)]


class GridSpec(BaseModel):
    """What a comparison is asked to run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    methods: Annotated[
        Names,
        BeforeValidator(lambda value: list(methods.registered()) if value == ["all"] else value),
        BeforeValidator(_listed),
    ]
    """Names of methods, in the order of the table's rows; ``all`` stands for every one."""
    benchmarks: Names
    """Names of benchmarks, or paths of folders of class folders."""
    seeds: Seeds = (0, 1, 2)
    """Each sets all three: order of classes, initial parameters, batches."""
    presets: Names = ("matched",)
    """Settings that belong together; ``custom`` stands for none."""
    settings: dict[str, Any] = {}
    """Laid over those of the preset; one of a method goes to those methods that have it."""
    vary: Annotated[
        dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]],
        BeforeValidator(lambda value: flatten(value) if isinstance(value, Mapping) else value),
    ] = {}
    """Values to try, by setting; all are combined. One of a method varies those methods that have it."""
    labels: dict[str, str] = {}
    """How methods and benchmarks are called in tables, where not by their names."""


def parse_spec(given: Mapping[str, Any]) -> GridSpec:
    """Check what a grid is asked for."""
    try:
        return GridSpec.model_validate(given)
    except ValidationError as problem:
        first = {error["loc"][0]: _explain(error) for error in reversed(problem.errors())}
        raise UserError("\n".join(reversed(first.values()))) from None


def _explain(error: Any) -> str:
    where = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"a grid has no entry {where!r}. {suggest(where, GridSpec.model_fields)}"
    if error["type"] in ("missing", "too_short"):
        return f"the grid names no {where}: give at least one"
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}, not {error['input']!r}"


def _resolve(key: str, own: Iterable[str], every: Iterable[str]) -> str:
    """A setting's dotted name, from itself or its last part: one of the grid's methods, or of any other."""
    known = list(dict.fromkeys((*own, *every)))
    found = [name for name in own if key in (name, name.rpartition(".")[2])]
    found = found or [name for name in known if key in (name, name.rpartition(".")[2])]
    if len(found) > 1 and key not in found:
        raise UserError(f"{key!r} could be {' or '.join(found)}: write it out")
    if not found:
        raise UserError(unknown_setting(key, known))
    name = key if key in found else found[0]
    if name in _OWN:
        raise UserError(f"{name} is no setting of a grid: name them in its {_OWN[name]}")
    return name


# Cells


@dataclass(frozen=True)
class Cell:
    """One run of a grid: what it is, and where it is kept."""

    method: str
    varied: Varied
    preset: str
    benchmark: str
    seed: int
    config: RunConfig
    folder: Path
    name: str
    """The folder's path within the grid."""

    @property
    def run(self) -> Run | None:
        """The run, where it was begun."""
        return Run.open(self.folder) if (self.folder / "run.json").exists() else None

    @property
    def outcome(self) -> "Outcome":
        """How things stand."""
        run = self.run
        if run and run.finished:
            return Outcome(self, run)
        failure = self.folder / FAILED
        return Outcome(self, problem=read_json(failure) if failure.exists() else None)


@dataclass(frozen=True)
class Outcome:
    """A cell with its finished run, or with what it failed of, or with neither."""

    cell: Cell
    run: Run | None = None
    problem: Mapping[str, str] | None = None

    @property
    def reason(self) -> str:
        """What a failed cell failed of, in one line."""
        told = self.problem or {}
        kind = "" if told.get("type") == "UserError" else f"{told.get('type')}: "
        return " ".join(f"{kind}{told.get('message')}".split()).removesuffix(":")

    @property
    def seconds(self) -> float | None:
        """How long the finished run took."""
        return self.run.record.time.get("total_s") if self.run else None


def brief(value: Any) -> str:
    """A setting's value in as few characters as tell it.

    >>> brief((0, 1)), brief(True), brief("dim"), brief(0.5), brief(None)
    ('[0,1]', 'true', 'dim', '0.5', 'none')
    >>> brief([["cat", "dog"], ["owl"]])
    '[2,1]-by-name-b97593'
    """
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)
    if isinstance(value, list | tuple) and value and all(isinstance(part, list | tuple) for part in value):
        return f"{brief([len(part) for part in value])}-by-name-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return text


def describe(varied: Varied) -> list[str]:
    """Varied settings as ``key=value``; a key is its last part where that says enough and no other ends in it.

    >>> describe((("method.components", 5), ("training.epochs", 2), ("alignment.enabled", False)))
    ['components=5', 'epochs=2', 'alignment.enabled=false']
    """
    last = [key.rpartition(".")[2] for key, _ in varied]
    return [
        f"{short if last.count(short) == 1 and not key.startswith(VAGUE) else key}={brief(value)}"
        for (key, value), short in zip(varied, last, strict=True)
    ]


def _folder_name(text: str) -> str:
    """A name that any file system takes; where that changes it, a few digits keep it apart from others."""
    plain = re.sub(r"[^\w.,=+\[\]-]", "-", text)[:_NAME]
    return plain if plain == text else f"{plain}~{hashlib.sha256(text.encode()).hexdigest()[:6]}"


# The grid


class Grid:
    """All cells of a comparison: which are finished, which failed, which are still to be run."""

    def __init__(self, spec: GridSpec, out: Path) -> None:
        self.spec, self.out = spec, out
        self._not_offered: dict[tuple[str, str], dict[str, str]] = {}
        _check_names(spec)
        self._fields = {
            method: list(field_names(RunConfig, {"method": {"name": method}})) for method in methods.registered()
        }
        self._settings, self._vary = self._resolved(flatten(spec.settings)), self._resolved(spec.vary)
        self.cells = self._expand()
        """Every one with checked settings, all those of the first seed first: a whole table comes early."""
        self._refuse_unused()
        self._refuse_clashes()
        self._refuse_other_settings()

    @property
    def left_out(self) -> str:
        """Combinations that a preset does not offer, in words."""
        return "; ".join(
            f"{preset} on {benchmark} for {shorten(reasons)} ({next(iter(reasons.values()))})"
            for (preset, benchmark), reasons in self._not_offered.items()
        )

    def outcomes(self) -> list[Outcome]:
        """How things stand, cell by cell."""
        return [cell.outcome for cell in self.cells]

    def _resolved(self, settings: Mapping[str, Result]) -> dict[str, Result]:
        """Settings by their dotted names; all that are unknown are refused at once."""
        own, every = (
            list(dict.fromkeys(name for method in some for name in self._fields[method]))
            for some in (self.spec.methods, self._fields)
        )
        names = _all_of(partial(_resolve, key, own, every) for key in settings)
        return dict(zip(names, settings.values(), strict=True))

    def _expand(self) -> list[Cell]:
        groups = list(product(self.spec.benchmarks, self.spec.presets, self.spec.methods))
        bases = {group: base for group in groups if (base := self._base(*group)) is not None}
        if not bases:
            raise UserError(f"the grid has no cell: {self.left_out}")
        return _all_of(
            partial(self._cell, group, base, varied, seed)
            for seed, (group, base) in product(self.spec.seeds, bases.items())
            for varied in self._variations(group[2])
        )

    def _own(self, settings: Mapping[str, Result], method: str) -> dict[str, Result]:
        """Those settings that a run with this method has."""
        return {name: value for name, value in settings.items() if name in self._fields[method]}

    def _base(self, benchmark: str, preset: str, method: str) -> dict[str, Any] | None:
        """The settings of a cell's preset; None for what it does not offer."""
        if preset == CUSTOM:
            return {"data": {"benchmark": benchmark}, "method": {"name": method}}
        try:
            return presets.settings(preset, method, benchmark, self._settings.get("data.tasks"))
        except UserError as problem:
            left_out = self._not_offered.setdefault((preset, datasets.benchmark_label(benchmark)), {})
            left_out[method] = str(problem)
            return None

    def _variations(self, method: str) -> Iterator[Varied]:
        """All combinations of the values that are varied for this method: one and empty where none is."""
        own = self._own(self._vary, method)
        return (tuple(zip(own, chosen, strict=True)) for chosen in product(*own.values()))

    def _cell(self, group: tuple[str, str, str], base: dict[str, Any], varied: Varied, seed: int) -> Cell:
        benchmark, preset, method = group
        label, stored = datasets.benchmark_label(benchmark), tuple(to_stored(dict(varied)).items())
        row = f"{label}/{preset}/{','.join((method, *map(_folder_name, describe(stored))))}"
        seeds = dict.fromkeys(("order", "init", "data"), seed)
        try:
            given = nest({**self._own(self._settings, method), **dict(varied), "seeds": seeds})
            config = with_absolute_paths(parse_config(merge(base, given), any_head=True))  # see _refuse_unused
        except UserError as problem:
            raise UserError(f"{row}: {problem}") from None
        name = f"{row}/seed-{seed}"
        return Cell(method, varied, preset, label, seed, config, self.out / name, name)

    def _refuse_unused(self) -> None:
        """Refuse settings of a head that no cell has; where some have it, the others go without."""
        kinds = {cell.config.head.kind for cell in self.cells}
        used = {f"head.{name}" for kind in kinds for name in setting_names(kind)}
        unused = [name for name in (*self._settings, *self._vary) if name.startswith("head.") and name not in used]
        if unused:
            raise UserError(
                f"{', '.join(unused)}: no cell of the grid has such a head, only {', '.join(sorted(kinds))}"
            )

    def _refuse_clashes(self) -> None:
        """Refuse two cells in one folder: benchmarks of one name, or a value that is named twice."""
        seen: dict[str, Cell] = {}
        for cell in self.cells:
            other = seen.setdefault(cell.name, cell)
            if other is not cell:
                paths = sorted({cell.config.data.benchmark, other.config.data.benchmark})
                reason = f"{' and '.join(paths)} have one name, rename one" if len(paths) > 1 else "name a value once"
                raise UserError(f"two cells of the grid would lie in {cell.name}: {reason}")

    def _refuse_other_settings(self) -> None:
        """Refuse folders that hold a run with settings that this grid does not give it."""
        found = [
            f"{cell.folder} ({shorten(_differences(run.config, cell.config))})"
            for cell in self.cells
            if (run := cell.run) and config_hash(run.config) != config_hash(cell.config)
        ]
        if found:
            raise UserError(
                f"{len(found)} cell(s) of the grid hold a run with other settings: {'; '.join(found[:3])}"
                f"{' and more' if len(found) > 3 else ''}. Choose another folder with --out, or remove these runs"
            )


def _check_preset(name: str) -> None:
    known = (*presets.NAMES, CUSTOM)
    if name not in known:
        raise UserError(f"no preset is called {name!r}. {suggest(name, known)}")


def _check_names(spec: GridSpec) -> None:
    """Refuse unknown methods, presets and benchmarks, all at once."""
    test = flatten(spec.settings).get("data.test")
    checks: list[Callable[[], object]] = [partial(methods.find, method) for method in spec.methods]
    checks += [partial(_check_preset, preset) for preset in spec.presets]
    checks += [partial(datasets.find, benchmark, test) for benchmark in spec.benchmarks]
    _all_of(checks)


def _all_of(checks: Iterable[Callable[[], Result]]) -> list[Result]:
    """What checks give back; a user's mistakes are all told at once."""
    results, mistakes = list[Result](), list[str]()
    for check in checks:
        try:
            results.append(check())
        except UserError as problem:
            mistakes.append(str(problem))
    if mistakes:
        raise UserError("\n".join(dict.fromkeys(mistakes)))
    return results


def _differences(recorded: RunConfig, wanted: RunConfig) -> list[str]:
    before, after = (flatten(config.model_dump(mode="json")) for config in (recorded, wanted))
    names = dict.fromkeys((*before, *after))
    told = {name: [brief(side[name]) if name in side else "absent" for side in (before, after)] for name in names}
    return [f"{name} is {there}, wanted {here}" for name, (there, here) in told.items() if there != here]


# Progress


class GridCallback(ProgressCallback):
    """Receives the progress of a grid's runs as well; this one ignores it."""

    @contextmanager
    def grid(self, total: int, finished: int) -> Iterator[None]:
        """Start a grid of ``total`` runs, some of them finished before."""
        yield

    def begin(self, cell: Cell, expected: float | None, rest: float | None) -> None:
        """Called when a run starts, with the estimated seconds for it and for the rest."""

    def end(self, outcome: Outcome, rest: float | None) -> None:
        """Called when a run has finished or failed, with the estimated seconds for the rest."""


SILENT_GRID = GridCallback()


@dataclass(frozen=True)
class RunActions:
    """How a cell is begun, how it goes on, and on which device; both give back the finished run."""

    start: Callable[[RunConfig, Path, str | None, ProgressCallback], Run]
    resume: Callable[[Path, str | None, ProgressCallback], Run]
    device: str | None = None

    def carry_out(self, cell: Cell, progress: GridCallback) -> Outcome:
        """Run a cell from its beginning or its last checkpoint; a failure is recorded in its folder."""
        try:
            (cell.folder / FAILED).unlink(missing_ok=True)  # a new run wants an empty folder
            if cell.run is None:
                self.start(cell.config, cell.folder, self.device, progress)
            else:
                self.resume(cell.folder, self.device, progress)
        except Exception as problem:  # noqa: BLE001 (whatever happens to one cell, the others go on)
            return failed(cell, problem)
        return cell.outcome


@dataclass(frozen=True)
class ExecutionOptions:
    """Where cells are carried out: in this process, in several, or on a Ray cluster."""

    workers: int = 1
    """Cells that run side by side, each in a process of its own."""
    on: str | None = None
    """``ray`` for a cluster on this machine; ``ray:auto``, ``ray:HOST:PORT`` or ``ray://HOST:PORT`` for one that is
    there."""
    gpus_per_cell: float | None = None
    """On Ray; a fraction lets cells share a GPU. One by default, where the cluster has any."""
    cpus_per_cell: float | None = None
    """On Ray; one by default."""

    def __post_init__(self) -> None:
        given = (self.gpus_per_cell, self.cpus_per_cell)
        if self.on is None and any(number is not None for number in given):
            raise UserError("GPUs and CPUs per cell are for Ray: name a cluster with --on ray, or leave them away")
        if self.on is not None and self.workers != 1:
            raise UserError("a Ray cluster runs as many cells as it has room for: leave --workers away")


class Executor(Protocol):
    """Takes cells, and gives back what became of them."""

    @property
    def ahead(self) -> float:
        """How many cells it takes before the first has ended."""

    @property
    def places(self) -> int:
        """How many of them run at a time."""

    def submit(self, cell: Cell) -> None:
        """Have a cell carried out."""

    def receive(self) -> Outcome:
        """Wait until a cell has ended."""


def failed(cell: Cell, problem: BaseException) -> Outcome:
    """Record in a cell's folder what it failed of."""
    told = {
        "type": type(problem).__name__,
        "message": str(problem),
        "traceback": "".join(traceback.format_exception(problem)),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with write_errors(cell.folder):
        cell.folder.mkdir(parents=True, exist_ok=True)
    write_json(cell.folder / FAILED, told)
    return Outcome(cell, problem=told)
