"""Grids of runs: benchmarks, presets, methods, settings and seeds, combined."""

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

CUSTOM = "custom"  # no preset: the defaults of all settings, overridden by those of the grid
FAILED = "failed.json"
_NAME = 60  # characters of a value in a folder name
_OWN = {"data.benchmark": "benchmarks", "method.name": "methods", "preset": "presets"} | dict.fromkeys(
    ("seeds.order", "seeds.init", "seeds.data"), "seeds"
)  # settings with their own entry in a grid
Varied = tuple[tuple[str, Any], ...]  # settings by their dotted names
VAGUE = ("alignment.", "head.kind")  # prefixes of settings that are shown in full
Result = TypeVar("Result")


def _listed(value: Any) -> Any:
    """Return a single value as a list of one, and a list without duplicates."""
    values = [value] if isinstance(value, str | int) else value
    return list(dict.fromkeys(values)) if isinstance(values, list | tuple) else values


Names = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_listed)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), BeforeValidator(_listed)]


class GridSpec(BaseModel):
    """Specification of a comparison."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    methods: Annotated[
        Names,
        BeforeValidator(lambda value: list(methods.registered()) if value == ["all"] else value),
        BeforeValidator(_listed),
    ]  # names of methods, in the order of the table's rows; all means every method
    benchmarks: Names  # names of benchmarks, or paths of folders of class folders
    seeds: Seeds = (0, 1, 2)  # each sets all three seeds: class order, initial parameters, batches
    presets: Names = ("matched",)  # names of presets; custom means none
    settings: dict[str, Any] = {}
    """Override those of the preset; settings of a method apply to the methods that have them."""
    vary: Annotated[
        dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]],
        BeforeValidator(lambda value: flatten(value) if isinstance(value, Mapping) else value),
    ] = {}  # values to try, by setting; all are combined
    labels: dict[str, str] = {}  # labels of methods and benchmarks in tables, where they differ from the names


def parse_spec(given: Mapping[str, Any]) -> GridSpec:
    """Check the specification of a grid."""
    try:
        return GridSpec.model_validate(given)
    except ValidationError as problem:
        first = {error["loc"][0]: _explain(error) for error in reversed(problem.errors())}
        raise UserError("\n".join(reversed(first.values()))) from None


def _explain(error: Any) -> str:
    where = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"Unknown grid entry {where!r}. {suggest(where, GridSpec.model_fields)}"
    if error["type"] in ("missing", "too_short"):
        return f"The grid has no {where}. Specify at least one."
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}, got {error['input']!r}."


def _resolve(key: str, own: Iterable[str], every: Iterable[str]) -> str:
    """Return the dotted name of a setting given by it or its last part."""
    known = list(dict.fromkeys((*own, *every)))
    matches = [name for name in own if key in (name, name.rpartition(".")[2])]
    matches = matches or [name for name in known if key in (name, name.rpartition(".")[2])]
    if len(matches) > 1 and key not in matches:
        raise UserError(f"Setting {key!r} is ambiguous. Write {' or '.join(matches)}.")
    if not matches:
        raise UserError(unknown_setting(key, known))
    name = key if key in matches else matches[0]
    if name in _OWN:
        raise UserError(f"{name} cannot be a setting of a grid. Use its {_OWN[name]} instead.")
    return name


@dataclass(frozen=True)
class RunSpec:
    """One run of a grid: its settings and its folder."""

    method: str
    varied: Varied
    preset: str
    benchmark: str
    seed: int
    config: RunConfig
    folder: Path
    name: str  # path of the folder within the grid

    @property
    def run(self) -> Run | None:
        """The run, if it was started."""
        return Run.open(self.folder) if (self.folder / "run.json").exists() else None

    @property
    def outcome(self) -> "Outcome":
        """The finished run, the recorded failure, or neither."""
        run = self.run
        if run and run.finished:
            return Outcome(self, run)
        failure = self.folder / FAILED
        return Outcome(self, problem=read_json(failure) if failure.exists() else None)


@dataclass(frozen=True)
class Outcome:
    """A run of a grid with its finished run, with its failure, or with neither."""

    spec: RunSpec
    run: Run | None = None
    problem: Mapping[str, str] | None = None

    @property
    def reason(self) -> str:
        """Reason of a failure, in one line."""
        failure = self.problem or {}
        kind = "" if failure.get("type") == "UserError" else f"{failure.get('type')}: "
        return " ".join(f"{kind}{failure.get('message')}".split()).removesuffix(":")

    @property
    def seconds(self) -> float | None:
        """Duration of the finished run."""
        return self.run.record.time.get("total_s") if self.run else None


def brief(value: Any) -> str:
    """Format the value of a setting in a few characters.

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
    """Format settings as ``key=value``, with the last part of the name where it is unique.

    >>> describe((("method.components", 5), ("training.epochs", 2), ("alignment.enabled", False)))
    ['components=5', 'epochs=2', 'alignment.enabled=false']
    """
    last = [key.rpartition(".")[2] for key, _ in varied]
    return [
        f"{short if last.count(short) == 1 and not key.startswith(VAGUE) else key}={brief(value)}"
        for (key, value), short in zip(varied, last, strict=True)
    ]


def _folder_name(text: str) -> str:
    """Return a valid file name, with a few digits of a hash if it differs from the text."""
    plain = re.sub(r"[^\w.,=+\[\]-]", "-", text)[:_NAME]
    return plain if plain == text else f"{plain}~{hashlib.sha256(text.encode()).hexdigest()[:6]}"


class Grid:
    """All runs of a comparison."""

    def __init__(self, spec: GridSpec, out: Path) -> None:
        self.spec, self.out = spec, out
        self._not_offered: dict[tuple[str, str], dict[str, str]] = {}
        _check_names(spec)
        self._fields = {
            method: list(field_names(RunConfig, {"method": {"name": method}})) for method in methods.registered()
        }
        self._settings, self._vary = self._resolved(flatten(spec.settings)), self._resolved(spec.vary)
        self.runs = self._expand()  # all runs, those of the first seed first, so that a whole table comes early
        self._check_unused()
        self._check_folders()
        self._check_recorded()

    @property
    def left_out(self) -> str:
        """Combinations that a preset does not offer, as text."""
        return "; ".join(
            f"{preset} on {benchmark} for {shorten(reasons)} ({next(iter(reasons.values()))})"
            for (preset, benchmark), reasons in self._not_offered.items()
        )

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each run."""
        return [spec.outcome for spec in self.runs]

    def _resolved(self, settings: Mapping[str, Result]) -> dict[str, Result]:
        """Return settings by their dotted names; one error lists all unknown ones."""
        own, every = (
            list(dict.fromkeys(name for method in some for name in self._fields[method]))
            for some in (self.spec.methods, self._fields)
        )
        names = _all_of(partial(_resolve, key, own, every) for key in settings)
        return dict(zip(names, settings.values(), strict=True))

    def _expand(self) -> list[RunSpec]:
        groups = list(product(self.spec.benchmarks, self.spec.presets, self.spec.methods))
        bases = {group: base for group in groups if (base := self._base(*group)) is not None}
        if not bases:
            raise UserError(f"The grid has no runs: {self.left_out}.")
        return _all_of(
            partial(self._run_spec, group, base, varied, seed)
            for seed, (group, base) in product(self.spec.seeds, bases.items())
            for varied in self._variations(group[2])
        )

    def _own(self, settings: Mapping[str, Result], method: str) -> dict[str, Result]:
        """Return the settings that a run with this method has."""
        return {name: value for name, value in settings.items() if name in self._fields[method]}

    def _base(self, benchmark: str, preset: str, method: str) -> dict[str, Any] | None:
        """Return the settings of the preset; None for a combination that it does not offer."""
        if preset == CUSTOM:
            return {"data": {"benchmark": benchmark}, "method": {"name": method}}
        try:
            return presets.settings(preset, method, benchmark, self._settings.get("data.tasks"))
        except UserError as problem:
            left_out = self._not_offered.setdefault((preset, datasets.benchmark_label(benchmark)), {})
            left_out[method] = str(problem)
            return None

    def _variations(self, method: str) -> Iterator[Varied]:
        """Yield all combinations of the varied values; one empty combination if none varies."""
        own = self._own(self._vary, method)
        return (tuple(zip(own, chosen, strict=True)) for chosen in product(*own.values()))

    def _run_spec(self, group: tuple[str, str, str], base: dict[str, Any], varied: Varied, seed: int) -> RunSpec:
        benchmark, preset, method = group
        label, stored = datasets.benchmark_label(benchmark), tuple(to_stored(dict(varied)).items())
        row = f"{label}/{preset}/{','.join((method, *map(_folder_name, describe(stored))))}"
        seeds = dict.fromkeys(("order", "init", "data"), seed)
        try:
            given = nest({**self._own(self._settings, method), **dict(varied), "seeds": seeds})
            config = with_absolute_paths(parse_config(merge(base, given), any_head=True))
        except UserError as problem:
            raise UserError(f"{row}: {problem}") from None
        name = f"{row}/seed-{seed}"
        return RunSpec(method, varied, preset, label, seed, config, self.out / name, name)

    def _check_unused(self) -> None:
        """Raise an error for head settings that no run of the grid has."""
        kinds = {spec.config.head.kind for spec in self.runs}
        used = {f"head.{name}" for kind in kinds for name in setting_names(kind)}
        unused = [name for name in (*self._settings, *self._vary) if name.startswith("head.") and name not in used]
        if unused:
            heads = ", ".join(sorted(kinds))
            raise UserError(f"No run of the grid has a head with {', '.join(unused)}. Its heads: {heads}.")

    def _check_folders(self) -> None:
        """Raise an error for two runs in one folder."""
        seen: dict[str, RunSpec] = {}
        for spec in self.runs:
            other = seen.setdefault(spec.name, spec)
            if other is not spec:
                paths = sorted({spec.config.data.benchmark, other.config.data.benchmark})
                remedy = f"Rename {' or '.join(paths)}." if len(paths) > 1 else "List each value once."
                raise UserError(f"Two runs of the grid have the same folder {spec.name}. {remedy}")

    def _check_recorded(self) -> None:
        """Raise an error for folders that contain a run with other settings."""
        other = [
            f"{spec.folder} ({shorten(_differences(run.config, spec.config))})"
            for spec in self.runs
            if (run := spec.run) and config_hash(run.config) != config_hash(spec.config)
        ]
        if other:
            raise UserError(
                f"Folders with other settings ({len(other)} runs): {'; '.join(other[:3])}"
                f"{' and more' if len(other) > 3 else ''}. Choose another folder with --out, or remove these runs."
            )


def _check_preset(name: str) -> None:
    known = (*presets.NAMES, CUSTOM)
    if name not in known:
        raise UserError(f"Unknown preset {name!r}. {suggest(name, known)}")


def _check_names(spec: GridSpec) -> None:
    """Raise one error for all unknown methods, presets and benchmarks."""
    test = flatten(spec.settings).get("data.test")
    checks: list[Callable[[], object]] = [partial(methods.find, method) for method in spec.methods]
    checks += [partial(_check_preset, preset) for preset in spec.presets]
    checks += [partial(datasets.find, benchmark, test) for benchmark in spec.benchmarks]
    _all_of(checks)


def _all_of(checks: Iterable[Callable[[], Result]]) -> list[Result]:
    """Return the results of all checks, or raise one error with all their messages."""
    results, messages = list[Result](), list[str]()
    for check in checks:
        try:
            results.append(check())
        except UserError as problem:
            messages.append(str(problem))
    if messages:
        raise UserError("\n".join(dict.fromkeys(messages)))
    return results


def _differences(recorded: RunConfig, requested: RunConfig) -> list[str]:
    both = [flatten(config.model_dump(mode="json")) for config in (recorded, requested)]
    names = dict.fromkeys((*both[0], *both[1]))
    pairs = {name: [brief(settings[name]) if name in settings else "absent" for settings in both] for name in names}
    return [f"{name} is {before}, requested {now}" for name, (before, now) in pairs.items() if before != now]


class GridCallback(ProgressCallback):
    """Receives the progress of a grid's runs as well; this one ignores it."""

    @contextmanager
    def grid(self, total: int, finished: int) -> Iterator[None]:
        """Start a grid of ``total`` runs, some of them finished before."""
        yield

    def begin(self, spec: RunSpec, expected: float | None, rest: float | None) -> None:
        """Start a run, with the estimated seconds for it and for the rest."""

    def end(self, outcome: Outcome, rest: float | None) -> None:
        """Finish a run, with the estimated seconds for the rest."""


SILENT_GRID = GridCallback()


@dataclass(frozen=True)
class RunActions:
    """Functions that start and resume a run and return it, and their device."""

    start: Callable[[RunConfig, Path, str | None, ProgressCallback], Run]
    resume: Callable[[Path, str | None, ProgressCallback], Run]
    device: str | None = None

    def execute(self, spec: RunSpec, progress: GridCallback) -> Outcome:
        """Start or resume a run; a failure is recorded in its folder."""
        try:
            (spec.folder / FAILED).unlink(missing_ok=True)  # a new run needs an empty folder
            if spec.run is None:
                self.start(spec.config, spec.folder, self.device, progress)
            else:
                self.resume(spec.folder, self.device, progress)
        except Exception as problem:  # noqa: BLE001 (the other runs continue)
            return failed(spec, problem)
        return spec.outcome


@dataclass(frozen=True)
class ExecutionOptions:
    """Where runs are executed: in this process, in several, or on a Ray cluster."""

    workers: int = 1  # number of parallel processes
    ray: str | None = None  # ray (local cluster), ray:auto, ray:HOST:PORT or ray://HOST:PORT
    gpus_per_run: float | None = None  # GPUs per run on Ray; fractions share a GPU. Default: 1 if the cluster has any.
    cpus_per_run: float | None = None  # CPUs per run on Ray. Default: 1.

    def __post_init__(self) -> None:
        given = (self.gpus_per_run, self.cpus_per_run)
        if self.ray is None and any(number is not None for number in given):
            raise UserError("GPUs and CPUs per run only apply to Ray. Add --ray local, or remove them.")
        if self.ray is not None and self.workers != 1:
            raise UserError("--workers cannot be combined with --ray, which runs as many as fit. Remove --workers.")


class Executor(Protocol):
    """Executes runs and returns their outcomes."""

    @property
    def ahead(self) -> float:
        """Number of runs that it takes before the first has ended."""

    @property
    def slots(self) -> int:
        """Number of runs that it executes in parallel."""

    def submit(self, spec: RunSpec) -> None:
        """Add a run."""

    def receive(self) -> Outcome:
        """Wait until a run has ended."""


def failed(spec: RunSpec, problem: BaseException) -> Outcome:
    """Record the failure of a run in its folder."""
    failure = {
        "type": type(problem).__name__,
        "message": str(problem),
        "traceback": "".join(traceback.format_exception(problem)),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with write_errors(spec.folder):
        spec.folder.mkdir(parents=True, exist_ok=True)
    write_json(spec.folder / FAILED, failure)
    return Outcome(spec, problem=failure)
