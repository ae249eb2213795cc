"""A run is a folder: what was asked, what was used, what came out, and where it can go on."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probprompt.config import RunConfig, parse_config
from probprompt.errors import UserError
from probprompt.evaluation import metrics
from probprompt.storage import (
    is_changed,
    is_part,
    lock,
    read_json,
    remove_parts,
    with_hash,
    write_bytes,
    write_error,
    write_json,
)

FORMAT = 1


def config_hash(config: RunConfig) -> str:
    """Fingerprint of all settings."""
    return settings_hash(config.model_dump(mode="json"))


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Fingerprint of settings as they are written down."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


class Run:
    """A run's folder.

    ``run.json`` (settings, weights, split, versions, hardware), ``events.jsonl`` (append-only), ``accuracy.json``,
    ``diagnostics.json``, ``model/``, ``checkpoint/`` and ``report.html``; each is written whole or not at all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "checkpoint" / "state.safetensors"
        self.model = folder / "model"
        self.report = folder / "report.html"
        self._events = folder / "events.jsonl"

    @classmethod
    def create(cls, folder: Path, record: Mapping[str, Any]) -> "Run":
        """Make a new folder; one that holds anything is refused."""
        refuse_used(folder)
        run = cls(folder)
        try:
            run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            run.model.mkdir(exist_ok=True)
        except OSError as problem:
            raise write_error(folder, problem) from problem
        write_json(folder / "run.json", {"format": FORMAT, **record})
        return run

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """Open an existing run."""
        folder = Path(folder)
        if not (folder / "run.json").is_file():
            why = "is not a run: it has no run.json" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {why}")
        found = read_json(folder / "run.json")
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            version = found.get("format") if isinstance(found, dict) else None
            raise UserError(f"{folder} has format {version!r}, this version reads {FORMAT}")
        return cls(folder)

    @property
    def record(self) -> dict[str, Any]:
        """What ``run.json`` says."""
        return dict(read_json(self.folder / "run.json"))

    @property
    def config(self) -> RunConfig:
        """The run's settings."""
        return parse_config(self.record["config"])

    @property
    def finished(self) -> bool:
        """Whether all tasks were learned."""
        return bool(self.record.get("status") == "finished")

    @property
    def matrix(self) -> NDArray[np.float64]:
        """Accuracy in % on task i (row) after step j (column); NaN before the task is seen."""
        return metrics.from_json(read_json(self.folder / "accuracy.json")["matrix"])

    @property
    def metrics(self) -> dict[str, float]:
        """FAA, CAA and forgetting of the steps finished so far."""
        return metrics.summarize(self.matrix)

    def update(self, **values: Any) -> None:
        """Change entries of ``run.json``."""
        write_json(self.folder / "run.json", {**self.record, **values})

    def write_accuracy(self, matrix: NDArray[np.float64]) -> None:
        """Write the accuracy matrix and what follows from it."""
        summary = metrics.summarize(matrix)
        steps = metrics.finished_steps(matrix)
        write_json(
            self.folder / "accuracy.json", {"matrix": metrics.to_json(matrix), **summary, "finished_steps": steps}
        )

    def log(self, event: str, **values: Any) -> None:
        """Append an event."""
        line = json.dumps({"event": event, **values}, allow_nan=False) + "\n"
        try:
            with self._events.open("a", encoding="utf-8") as stream:
                stream.write(line)
        except OSError as problem:
            raise write_error(self._events, problem) from problem

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, so that no second process writes into it; the lock ends with the process."""
        try:
            held = lock(self.folder / ".lock")
        except BlockingIOError:
            raise UserError(f"another process is working on {self.folder}: wait for it, or stop it") from None
        except OSError as problem:
            raise write_error(self.folder, problem) from problem
        with held or nullcontext():  # without locks no process is kept out
            self._tidy()
            yield

    def _tidy(self) -> None:
        """Remove what a killed process left behind: files half written, and half a line of events."""
        remove_parts(self.folder)
        if self._events.exists():
            whole = self._events.read_bytes().rpartition(b"\n")
            if whole[2]:
                write_bytes(self._events, whole[0] + whole[1])


def refuse_used(folder: Path) -> None:
    """Refuse a folder for a new run that holds anything."""
    if (folder / "run.json").exists():
        raise UserError(f"{folder} holds a run already: go on with --resume {folder}, or choose another folder")
    if folder.exists() and (not folder.is_dir() or any(not _negligible(entry) for entry in folder.rglob("*"))):
        raise UserError(f"{folder} exists and is not empty: choose another folder for the run")


def _negligible(entry: Path) -> bool:
    """Whether this is all that a run leaves that was killed before its record was written."""
    return entry.is_dir() or entry.name == ".lock" or is_part(entry)


RECORDS_FORMAT = 1


_INSIDE = ("mean", "initial_mean", "effective_rank", "initial_effective_rank")


@dataclass(frozen=True, eq=False)
class Recorded:
    """A finished run: settings, weights, split, versions and hardware, accuracy, likeness of its prompts."""

    where: str
    record: Mapping[str, Any]
    matrix: NDArray[np.float64]
    similarity: Mapping[str, float]

    @classmethod
    def of(cls, run: Run, where: str) -> "Recorded":
        """Read a run's folder."""
        inside = run.folder / "diagnostics.json"
        found = read_json(inside).get("similarity", {}) if inside.exists() else {}
        return cls(where, run.record, run.matrix, {name: found[name] for name in _INSIDE if name in found})

    def line(self) -> str:
        """As a line of a book, without any path of this machine."""
        entry = {"where": self.where, "matrix": metrics.to_json(self.matrix), "similarity": dict(self.similarity)}
        return json.dumps(
            with_hash(without_paths({"book": RECORDS_FORMAT, **entry, "run": self.record})), allow_nan=False
        )


def is_absolute(text: str) -> bool:
    """Whether a text is a path from the root of some machine."""
    return PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def completed(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """All settings of a record, those that are younger as they are by default; None where another version made it."""
    try:
        return parse_config(config).model_dump(mode="json")
    except UserError:
        return None


def without_paths(value: Any) -> Any:
    """The same, with the last part of every path on a machine in its place."""
    if isinstance(value, Mapping):
        return {str(key): without_paths(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(part) for part in value]
    if isinstance(value, str):
        kind, colon, rest = value.partition(":")
        if colon and kind == "file":
            return f"file:{_last(rest) if is_absolute(rest) else rest}"
        return _last(value) if is_absolute(value) else value
    return value


def _last(text: str) -> str:
    return PurePosixPath(text).name if PurePosixPath(text).is_absolute() else PureWindowsPath(text).name


def write_book(path: Path, runs: Iterable[Recorded]) -> Path:
    """Write a book."""
    write_bytes(path, "".join(run.line() + "\n" for run in runs).encode())
    return path


def read_book(path: Path) -> list[Recorded]:
    """Read a book."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [_parse(json.loads(line)) for line in lines]
    except OSError as problem:
        raise UserError(f"the book {path} cannot be read: {problem.strerror}") from None
    except (UnicodeDecodeError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{path} is not a book of results, or it is damaged: {problem}") from None


def _parse(entry: Mapping[str, Any]) -> Recorded:
    if entry["book"] != RECORDS_FORMAT:
        raise ValueError(f"it has format {entry['book']!r}, this version reads {RECORDS_FORMAT}")
    if is_changed(entry):
        raise ValueError(f"the line of {entry['where']} was changed by hand: it has not the hash that it records")
    return Recorded(entry["where"], entry["run"], metrics.from_json(entry["matrix"]), entry["similarity"])
