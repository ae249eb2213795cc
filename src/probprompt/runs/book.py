"""A book of results: what each finished run proves, a line per run, small enough to be committed and read."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probprompt.config import parse_config
from probprompt.errors import UserError
from probprompt.evaluation import metrics
from probprompt.runs.record import Run
from probprompt.storage import is_changed, read_json, with_hash, write_bytes

FORMAT = 1
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
        return json.dumps(with_hash(without_paths({"book": FORMAT, **entry, "run": self.record})), allow_nan=False)


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
    if entry["book"] != FORMAT:
        raise ValueError(f"it has format {entry['book']!r}, this version reads {FORMAT}")
    if is_changed(entry):
        raise ValueError(f"the line of {entry['where']} was changed by hand: it has not the hash that it records")
    return Recorded(entry["where"], entry["run"], metrics.from_json(entry["matrix"]), entry["similarity"])
