"""Folder and record of a run, and files with the records of several runs."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from probprompt import presets, storage
from probprompt.config import RunConfig, flatten, from_stored, parse_config, parse_stored
from probprompt.errors import UserError
from probprompt.evaluation import metrics
from probprompt.heads import default_settings

FORMAT = 1


def config_hash(config: RunConfig) -> str:
    """Return a hash of all settings."""
    return settings_hash(config.to_stored())


def settings_hash(settings: object) -> str:
    """Return a hash of settings as stored."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


Finite = Annotated[float, Field(allow_inf_nan=False)]
Value = str | int | float | bool | list[Any] | None  # value of a setting, as in JSON


class Part(BaseModel):
    """Part of a run's files; unknown entries of other versions are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def to_json(self) -> dict[str, Any]:
        """Return the entries of the file."""
        return self.model_dump(mode="json", exclude_unset=True)


class BackboneRecord(Part):
    """Frozen weights of a run."""

    name: str = ""
    source: str = ""
    sha256: str = ""
    parameters: int | None = None
    precision: Literal["fp32", "bf16"] | None = None


class PreprocessingRecord(Part):
    """Preprocessing of the images."""

    image_size: int | None = None
    resized: int | None = None
    mean: list[float] = []
    std: list[float] = []
    interpolation: str = "bilinear"
    normalisation: str = "backbone"


class ImagesRecord(Part):
    """Stored images of a split."""

    stored_side: int | Literal["full"] | None = None
    bytes: int | None = None
    resident: str | None = None
    resident_share: float | None = None
    pixels_sha256: str | None = None  # hash of the pixels, or of all files of a folder


class StreamRecord(Part):
    """Classes and images by task."""

    classes: list[str] = []
    tasks: list[list[str]] = Field(default=[], min_length=1)
    order_hash: str = ""
    split_hash: str = ""
    differences: list[str] | None = None  # differences from the published images; None if not recorded
    train_images: list[int] = []
    test_images: list[int] = []
    test_classes: list[int] = []


class HardwareRecord(Part):
    """Machine of a run."""

    device: str | None = None
    machine: str | None = None
    processor: str | None = None
    system: str | None = None
    cores: int | None = None
    threads: int | None = None
    gpu: str | None = None


def _flat(config: RunConfig) -> dict[str, Value]:
    """Return all settings by dotted names, with defaults for other kinds of heads."""
    settings = config.model_dump(mode="json")
    return flatten(settings | {"head": default_settings() | settings["head"]})


class RunRecord(Part):
    """``run.json``: settings, data, environment and cost of a run."""

    format: Literal[1] = 1
    name: str = ""
    created: str = ""
    status: Literal["running", "finished"] = "running"
    config: dict[str, Any] = {}  # settings in the spelling of files, possibly of another version
    config_hash: str = ""
    backbone: BackboneRecord = BackboneRecord()
    preprocessing: PreprocessingRecord = PreprocessingRecord()
    data: dict[Literal["train", "test"], ImagesRecord] = {}
    stream: StreamRecord = StreamRecord()
    versions: dict[str, str] = {}
    hardware: HardwareRecord = HardwareRecord()
    world_size: int = 1
    evaluated_on: Literal["test", "validation"] = "test"
    head: str = ""
    joint: bool = False
    marks: list[str] = []
    skipped: list[str] = []
    time: dict[str, float] = {}
    peak_memory_mb: float | None = None
    trainable_parameters: int | None = None
    model_mb: dict[str, float] = {}
    audit: dict[str, Any] = {}

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.config.get("method", {}).get("name", ""))

    @property
    def benchmark(self) -> str:
        """Name of the benchmark, or the folder of its images."""
        return str(self.config.get("data", {}).get("benchmark", ""))

    @property
    def preset(self) -> str | None:
        """Preset of the settings."""
        return self.config.get("preset") or None

    @cached_property
    def settings(self) -> RunConfig | None:
        """All settings, new ones at their defaults; None if this version cannot parse them."""
        try:
            return parse_stored(self.config)
        except UserError:
            return None

    @cached_property
    def flat_settings(self) -> dict[str, Value]:
        """All settings by dotted names; as stored if this version cannot parse them."""
        return _flat(self.settings) if self.settings else flatten(from_stored(self.config))

    @cached_property
    def preset_settings(self) -> dict[str, Value] | None:
        """Settings of the preset, or the defaults, by dotted names; None if not parsable."""
        defaults = {"data": {"benchmark": self.benchmark}, "method": {"name": self.method}}
        try:
            chosen = presets.of_run(self.preset, self.config, self.config["data"].get("tasks")) or defaults
            return _flat(parse_config(chosen))
        except UserError:
            return None

    @cached_property
    def preset_overrides(self) -> dict[str, Value]:
        """Settings that differ from the preset or the defaults, except seeds."""
        own, base = without_paths(self.flat_settings), self.preset_settings or {}
        return {name: own[name] for name in own if own[name] != base.get(name) and not name.startswith("seeds.")}


class Accuracy(Part):
    """``accuracy.json``: entry (i, j) is the accuracy in % on task i after step j."""

    matrix: list[list[Finite | None]]
    final: Finite = Field(alias="FAA")
    cumulative: Finite = Field(alias="CAA")
    forgetting: Finite | None = None
    finished_steps: int = Field(ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        size = len(self.matrix)
        if any(len(row) != size for row in self.matrix):
            raise ValueError(f"the matrix is not square: {size} rows of {[len(row) for row in self.matrix]}.")
        if self.finished_steps > size:
            raise ValueError(f"finished_steps is {self.finished_steps}, but the matrix has {size} tasks.")
        missing = [(i, j) for j in range(self.finished_steps) for i in range(j + 1) if self.matrix[i][j] is None]
        if missing:
            task, step = missing[0]
            raise ValueError(f"the matrix has no accuracy on task {task + 1} after step {step + 1}.")
        if abs(self.averages[-1] - self.final) > 0.05:
            raise ValueError(f"FAA is {self.final}, but the matrix gives {self.averages[-1]:.2f} after the last step.")
        return self

    @property
    def averages(self) -> list[float]:
        """Average accuracy over the tasks seen, after each finished step."""
        columns = ([row[step] for row in self.matrix[: step + 1]] for step in range(self.finished_steps))
        return [math.fsum(value or 0.0 for value in column) / len(column) for column in columns]


class Similarity(Part):
    """Similarity of the prompts of different classes."""

    labels: list[str]
    matrix: list[list[Finite]] = Field(min_length=1)
    mean: Finite
    initial_mean: Finite | None = None
    per_block: dict[str, Finite] = {}
    effective_rank: Finite | None = None
    initial_effective_rank: Finite | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {len(self.labels)} != {len(self.matrix), *map(len, self.matrix)}:
            raise ValueError(f"the matrix does not have one row and one column per label ({len(self.labels)}).")
        return self


class Relevance(Part):
    """Use of each prompt distribution in each block."""

    blocks: list[int] = Field(min_length=1)
    usage: list[list[Finite]]
    entropy: list[Finite]
    max_weight: list[Finite] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        lengths = {len(self.usage), len(self.entropy), len(self.max_weight or self.blocks)}
        if lengths != {len(self.blocks)} or len({len(row) for row in self.usage}) != 1 or not self.usage[0]:
            raise ValueError(f"usage, entropy and max_weight do not match the {len(self.blocks)} blocks.")
        return self


class Queries(Part):
    """Queries of one task in the plane."""

    points: list[tuple[Finite, Finite]] = Field(min_length=1)
    labels: list[Annotated[int, Field(ge=0)]]
    names: list[str]
    embedding: str = "t-SNE"
    task: int = 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.labels) != len(self.points) or max(self.labels) >= len(self.names):
            raise ValueError("points, labels and names do not match.")
        return self


class Diagnostics(Part):
    """``diagnostics.json``: any part may be missing."""

    similarity: Similarity | None = None
    relevance: Relevance | None = None
    queries: Queries | None = None
    prompts: dict[str, Finite] = {}
    """Similarity and rank of mean and sampled prompts, use of components, noise; also before."""
    swap: dict[str, Finite] = {}  # accuracy in % with own prompts, prompts of another image, and average prompts


class _Epoch(Part):
    """Line of ``events.jsonl`` with a training loss."""

    task: int
    epoch: int
    loss: float | None


Kind = TypeVar("Kind", bound=Part)


def _checked(kind: type[Kind], content: object, path: Path) -> Kind:
    """Parse a part of a file; an error names the file and the first invalid entry."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = (".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, "))
        raise UserError(f"{path} is malformed: {': '.join(filter(None, parts))}") from error


class Run:
    """Folder of a run, with each file written atomically.

    Contains ``run.json`` (settings, weights, split, versions, hardware), ``events.jsonl`` (append-only),
    ``accuracy.json``, ``diagnostics.json``, ``model/``, ``checkpoint/`` and ``report.html``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "checkpoint" / "state.safetensors"
        self.model = folder / "model"
        self.report = folder / "report.html"
        self._events = folder / "events.jsonl"

    @classmethod
    def create(cls, folder: Path, record: RunRecord) -> "Run":
        """Create a run in a new or empty folder."""
        check_unused(folder)
        run = cls(folder)
        with storage.write_errors(folder):
            run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            run.model.mkdir(exist_ok=True)
        storage.write_json(folder / "run.json", {"format": FORMAT, **record.to_json()})
        return run

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """Open an existing run."""
        folder = Path(folder)
        if not (folder / "run.json").is_file():
            reason = "is not a run: it has no run.json" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {reason}.")
        content = storage.read_json(folder / "run.json")
        version = content.get("format") if isinstance(content, dict) else None
        if version != FORMAT:
            raise UserError(f"{folder} has format {version!r}. This version reads format {FORMAT}.")
        return cls(folder)

    @property
    def record(self) -> RunRecord:
        """Content of ``run.json``."""
        return _checked(RunRecord, storage.read_json(self.folder / "run.json"), self.folder / "run.json")

    @property
    def config(self) -> RunConfig:
        """Settings of the run."""
        return parse_stored(self.record.config)

    @property
    def finished(self) -> bool:
        """True if all tasks were learned."""
        return self.record.status == "finished"

    @property
    def accuracy(self) -> Accuracy:
        """Content of ``accuracy.json``, checked."""
        path = self.folder / "accuracy.json"
        content = storage.read_json(path) if path.is_file() else {"finished_steps": 0}
        if isinstance(content, dict) and content.get("finished_steps") == 0:
            raise UserError(f"{self.folder} has no finished task yet (see accuracy.json). Resume it with --resume.")
        accuracy, tasks = _checked(Accuracy, content, path), len(self.record.stream.tasks)
        if len(accuracy.matrix) > tasks:
            raise UserError(f"{path} has {len(accuracy.matrix)} tasks, but run.json has {tasks}.")
        return accuracy

    @property
    def diagnostics(self) -> Diagnostics:
        """Content of ``diagnostics.json``, checked."""
        path = self.folder / "diagnostics.json"
        return _checked(Diagnostics, storage.read_json(path), path) if path.is_file() else Diagnostics()

    @property
    def losses(self) -> list[list[tuple[int, float]]]:
        """Training losses of each task by epoch; after a resume the last event of an epoch counts."""
        path = self._events
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        except (OSError, ValueError) as error:
            raise UserError(f"Cannot read {path}: {error}.") from error
        losses: dict[int, dict[int, float]] = {}
        for number, line in enumerate(lines, start=1):
            try:
                event = json.loads(line) if line.strip() else {}
            except ValueError as error:
                if number == len(lines):
                    break  # a killed run may leave an incomplete line
                raise UserError(f"{path} is malformed: line {number} is not JSON: {error}.") from error
            if isinstance(event, dict) and event.get("event") == "epoch":
                epoch = _checked(_Epoch, event, path)
                losses.setdefault(epoch.task, {})[epoch.epoch] = math.nan if epoch.loss is None else epoch.loss
        return [sorted(losses[task].items()) for task in sorted(losses)]

    @property
    def matrix(self) -> NDArray[np.float64]:
        """Accuracy in % on task i (row) after step j (column); NaN before the task is seen."""
        return metrics.from_json(storage.read_json(self.folder / "accuracy.json")["matrix"])

    @property
    def metrics(self) -> dict[str, float]:
        """FAA, CAA and forgetting of the steps finished so far."""
        return metrics.summarize(self.matrix)

    def update(self, **values: Any) -> None:
        """Change entries of ``run.json``."""
        storage.write_json(self.folder / "run.json", {**storage.read_json(self.folder / "run.json"), **values})

    def write_accuracy(self, matrix: NDArray[np.float64]) -> None:
        """Write the accuracy matrix and its metrics."""
        summary = metrics.summarize(matrix)
        content = {"matrix": metrics.to_json(matrix), **summary, "finished_steps": metrics.finished_steps(matrix)}
        storage.write_json(self.folder / "accuracy.json", content)

    def log(self, event: str, **values: Any) -> None:
        """Append an event."""
        line = json.dumps({"event": event, **values}, allow_nan=False) + "\n"
        with storage.write_errors(self._events), self._events.open("a", encoding="utf-8") as stream:
            stream.write(line)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing into the folder; the lock ends with the process."""
        try:
            held = storage.lock(self.folder / ".lock")
        except BlockingIOError:
            raise UserError(f"Another process is using {self.folder}. Wait until it ends, or stop it.") from None
        except OSError as problem:
            raise storage.write_error(self.folder, problem) from problem
        with held or nullcontext():  # None where files cannot be locked
            storage.remove_parts(self.folder)  # a killed process leaves incomplete files, and an incomplete last event
            if self._events.exists():
                lines, end, rest = self._events.read_bytes().rpartition(b"\n")
                if rest:
                    storage.write_bytes(self._events, lines + end)
            yield


def check_unused(folder: Path) -> None:
    """Raise an error if a folder for a new run is not empty."""
    if (folder / "run.json").exists():
        raise UserError(f"{folder} already contains a run. Resume it with --resume {folder}, or choose another folder.")
    # A run that was killed early leaves folders, a lock and incomplete files.
    used = (not (entry.is_dir() or entry.name == ".lock" or storage.is_part(entry)) for entry in folder.rglob("*"))
    if folder.exists() and (not folder.is_dir() or any(used)):
        raise UserError(f"{folder} is not empty. Choose another folder with --out.")


RECORDS_FORMAT = 1
_SIMILARITY = ("mean", "initial_mean", "effective_rank", "initial_effective_rank")


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A finished run: record, accuracy matrix and diagnostics of its prompts."""

    where: str
    record: RunRecord
    matrix: NDArray[np.float64]
    similarity: Mapping[str, float]

    @classmethod
    def of(cls, run: Run, where: str) -> "RecordedRun":
        """Read a run's folder."""
        path = run.folder / "diagnostics.json"
        content = storage.read_json(path) if path.exists() else {}
        values = {name: value for name, value in content.get("similarity", {}).items() if name in _SIMILARITY}
        values |= content.get("prompts", {}) | {f"swap_{key}": value for key, value in content.get("swap", {}).items()}
        return cls(where, run.record, run.matrix, values)

    def line(self) -> str:
        """Format as a line of a results file, without paths of this machine."""
        entry = {"where": self.where, "matrix": metrics.to_json(self.matrix), "similarity": dict(self.similarity)}
        content = {"book": RECORDS_FORMAT, **entry, "run": self.record.to_json()}
        return json.dumps(storage.with_hash(without_paths(content)), allow_nan=False)


def is_absolute(text: str) -> bool:
    """Return True if a text is an absolute path of some system."""
    return PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def without_paths(value: Any) -> Any:
    """Replace each absolute path by its last part."""
    if isinstance(value, Mapping):
        return {str(key): without_paths(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(part) for part in value]
    if isinstance(value, str):
        prefix, path = ("file:", value.removeprefix("file:")) if value.startswith("file:") else ("", value)
        kind = PurePosixPath if PurePosixPath(path).is_absolute() else PureWindowsPath
        return prefix + (kind(path).name if is_absolute(path) else path)
    return value


def write_results(path: Path, runs: Iterable[RecordedRun]) -> Path:
    """Write a results file."""
    storage.write_bytes(path, "".join(run.line() + "\n" for run in runs).encode())
    return path


def read_results(path: Path) -> list[RecordedRun]:
    """Read a results file."""
    try:
        return [_parse(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as problem:
        raise UserError(f"Cannot read {path}: {problem.strerror}.") from None
    except (UnicodeDecodeError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{path} is not a results file, or it is corrupted: {problem}") from None


def _parse(entry: Any) -> RecordedRun:
    if entry["book"] != RECORDS_FORMAT:
        raise ValueError(f"It has format {entry['book']!r}. This version reads format {RECORDS_FORMAT}.")
    if storage.is_changed(entry):
        raise ValueError(f"The line of {entry['where']} does not match its hash; it may have been edited.")
    record, matrix = RunRecord.model_validate(entry["run"]), metrics.from_json(entry["matrix"])
    return RecordedRun(entry["where"], record, matrix, entry["similarity"])
