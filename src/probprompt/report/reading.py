"""Reading run folders for the report: what is missing or malformed is told by file and reason."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from probprompt.errors import UserError

FORMAT = 1
Finite = Annotated[float, Field(allow_inf_nan=False)]
Rows = list[list[Finite]]


class Record(BaseModel):
    """A part of a run's files; what later versions add to them is passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Stream(Record):
    """Which classes were learned in which task."""

    tasks: list[list[str]] = Field(min_length=1)
    order_hash: str = ""
    split_hash: str = ""
    train_images: list[int] = []
    test_images: list[int] = []


class RunRecord(Record):
    """run.json: what was run, on what, and at what cost."""

    name: str
    config: dict[str, Any]
    stream: Stream
    created: str = ""
    backbone: dict[str, Any] = {}
    preprocessing: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    hardware: dict[str, Any] = {}
    trainable_parameters: int | None = None
    model_mb: dict[str, float] = {}
    evaluated_on: str = "test"
    skipped: list[Any] = []
    marks: list[str] = []
    audit: dict[str, Any] = {}
    time: dict[str, Any] = {}
    peak_memory_mb: float | None = None


class Accuracy(Record):
    """accuracy.json: row i, column j is the accuracy in % on task i after step j."""

    matrix: list[list[Finite | None]]
    final: Finite = Field(alias="FAA")
    cumulative: Finite = Field(alias="CAA")
    forgetting: Finite | None = None
    finished_steps: int = Field(ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        size = len(self.matrix)
        if any(len(row) != size for row in self.matrix):
            raise ValueError(f"the matrix is not square: {size} rows of {[len(row) for row in self.matrix]}")
        if self.finished_steps > size:
            raise ValueError(f"finished_steps is {self.finished_steps}, but the matrix has {size} tasks")
        missing = [(i, j) for j in range(self.finished_steps) for i in range(j + 1) if self.matrix[i][j] is None]
        if missing:
            task, step = missing[0]
            raise ValueError(f"the matrix has no accuracy on task {task + 1} after step {step + 1}")
        average = self.averages[-1]
        if abs(average - self.final) > 0.05:
            raise ValueError(f"FAA is {self.final}, but the matrix gives {average:.2f} after the last step")
        return self

    @property
    def averages(self) -> list[float]:
        """Average accuracy over the tasks seen, after each finished step."""
        columns = ([row[step] for row in self.matrix[: step + 1]] for step in range(self.finished_steps))
        return [math.fsum(value or 0.0 for value in column) / len(column) for column in columns]


class Similarity(Record):
    """How alike the prompts of different classes are."""

    labels: list[str]
    matrix: Rows = Field(min_length=1)
    mean: Finite
    initial_mean: Finite | None = None
    per_block: dict[str, Finite] = {}
    effective_rank: Finite | None = None
    initial_effective_rank: Finite | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {len(self.labels)} != {len(self.matrix), *map(len, self.matrix)}:
            raise ValueError(f"the matrix does not have one row and one column per label ({len(self.labels)})")
        return self


class Relevance(Record):
    """How much each prompt distribution is used in each block."""

    blocks: list[int] = Field(min_length=1)
    usage: Rows
    entropy: list[Finite]
    max_weight: list[Finite] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        lengths = {len(self.usage), len(self.entropy), len(self.max_weight or self.blocks)}
        if lengths != {len(self.blocks)} or len({len(row) for row in self.usage}) != 1 or not self.usage[0]:
            raise ValueError(f"usage, entropy and max_weight do not fit the {len(self.blocks)} blocks")
        return self


class Queries(Record):
    """Where the queries of one task lie in the plane."""

    points: list[tuple[Finite, Finite]] = Field(min_length=1)
    labels: list[Annotated[int, Field(ge=0)]]
    names: list[str]
    embedding: str = "t-SNE"
    task: int = 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.labels) != len(self.points) or max(self.labels) >= len(self.names):
            raise ValueError("points, labels and names do not fit each other")
        return self


class Diagnostics(Record):
    """diagnostics.json: any part may be missing."""

    similarity: Similarity | None = None
    relevance: Relevance | None = None
    queries: Queries | None = None


class Epoch(Record):
    """One line of events.jsonl that the report uses."""

    task: int
    epoch: int
    loss: float | None


Kind = TypeVar("Kind", bound=Record)


@dataclass(frozen=True)
class Run:
    """A run folder that has been read and checked."""

    record: RunRecord
    accuracy: Accuracy
    diagnostics: Diagnostics
    losses: list[list[tuple[int, float]]]
    label: str
    index: int

    @property
    def total(self) -> int:
        """Number of tasks that the run is to learn."""
        return len(self.record.stream.tasks)

    @property
    def steps(self) -> int:
        """Number of tasks learned so far."""
        return self.accuracy.finished_steps

    @property
    def finished(self) -> bool:
        """Whether all tasks were learned."""
        return self.steps == self.total

    @property
    def method(self) -> str:
        """Name of the method, as the configuration has it."""
        method = self.record.config.get("method")
        return str(method.get("name", "")) if isinstance(method, dict) else str(method or "")

    @property
    def backbone_size(self) -> int | None:
        """Number of parameters of the frozen backbone, where it is known."""
        parameters = self.record.backbone.get("parameters")
        return parameters if isinstance(parameters, int) and parameters > 0 else None

    @property
    def benchmark(self) -> str:
        """Name of the benchmark, as the configuration has it."""
        data = self.record.config.get("data")
        return str((data if isinstance(data, dict) else self.record.config).get("benchmark", ""))


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _parse(kind: type[Kind], content: object, path: Path) -> Kind:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path} is malformed: {_problem(error)}") from error


def _load(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: neither JSON nor UTF-8
        raise UserError(f"{path} cannot be read: {error}") from error


def _read_record(folder: Path) -> RunRecord:
    path = folder / "run.json"
    if not path.is_file():
        reason = "there is no run.json in it" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder} is not a run folder: {reason}. Give the folder that a run was saved in.")
    content = _load(path)
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise UserError(f"{path} has the format {version!r}; this version of probprompt reads format {FORMAT}")
    return _parse(RunRecord, content, path)


def _read_losses(path: Path) -> list[list[tuple[int, float]]]:
    """Read the training loss of each task; after a resume the latest word on an epoch counts."""
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    losses: dict[int, dict[int, float]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line) if line.strip() else {}
        except ValueError as error:
            if number == len(lines):
                break  # a run that was killed may leave half a line
            raise UserError(f"{path} is malformed: line {number} is not JSON: {error}") from error
        if isinstance(event, dict) and event.get("event") == "epoch":
            epoch = _parse(Epoch, event, path)
            losses.setdefault(epoch.task, {})[epoch.epoch] = math.nan if epoch.loss is None else epoch.loss
    return [sorted(losses[task].items()) for task in sorted(losses)]


def read_run(folder: Path, index: int = 0) -> Run:
    """Read a run folder; what is missing or malformed is an error that names the file."""
    folder = Path(folder)
    record = _read_record(folder)
    path = folder / "accuracy.json"
    content = _load(path) if path.is_file() else {"finished_steps": 0}
    if isinstance(content, dict) and content.get("finished_steps") == 0:
        raise UserError(f"{folder} has nothing to report yet: no task is finished (see accuracy.json)")
    accuracy = _parse(Accuracy, content, path)
    if len(accuracy.matrix) > len(record.stream.tasks):
        tasks = len(record.stream.tasks)
        raise UserError(f"{path} has {len(accuracy.matrix)} tasks, but run.json has {tasks}")
    path = folder / "diagnostics.json"
    diagnostics = _parse(Diagnostics, _load(path), path) if path.is_file() else Diagnostics()
    losses = _read_losses(folder / "events.jsonl")
    return Run(record, accuracy, diagnostics, losses, record.name or folder.name, index)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several run folders and give each a name of its own."""
    if not folders:
        raise UserError("no run was given: name at least one run folder")
    runs = [read_run(folder, index) for index, folder in enumerate(folders)]
    names = Counter(run.label for run in runs)
    seen: Counter[str] = Counter()
    unique = []
    for run in runs:
        seen[run.label] += 1
        label = f"{run.label} ({seen[run.label]})" if names[run.label] > 1 else run.label
        unique.append(replace(run, label=label))
    return unique
