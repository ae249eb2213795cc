"""A run is a folder: what was asked, what was used, what came out, and where it can go on."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from probprompt import __version__, capture, kernels
from probprompt.config import RunConfig, parse_config
from probprompt.errors import UserError
from probprompt.evaluation import metrics
from probprompt.storage import is_part, lock, read_json, remove_parts, write_bytes, write_error, write_json
from probprompt.training import queries

FORMAT = 1
CHECKPOINTS = "PROBPROMPT_CHECKPOINTS"
"""The environment variable that asks for a checkpoint after every epoch and task when it is ``all``."""
SWITCHES = (kernels.SWITCH, capture.SWITCH, queries.SWITCH, CHECKPOINTS)
"""Environment variables that change how long a run takes, but nothing that it is asked for."""


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


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {"python": platform.python_version()}
    for package in ("probprompt", "torch", "torchvision", "timm", "numpy", "pillow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree that is not installed
            found[package] = __version__ if package == "probprompt" else "not installed"
    revision = _revision()
    return {**found, "revision": revision} if revision else found


def _revision() -> str | None:
    """The commit of a source tree, with a sign where it was changed; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16"}  # by torch's names


def bf16_unit() -> str | None:
    """By what the processor computes in bf16; None where it would emulate it, and be slower."""
    able = torch.cpu.get_capabilities()
    return next((words for name, words in _BF16.items() if able.get(name)), None)


def machine_name(found: Mapping[str, Any]) -> str:
    """What a record calls its machine, from what it says of the hardware: the GPU, or else the processor."""
    return str(found.get("gpu") or found.get("processor") or found["machine"])


def chip_words(found: Mapping[str, Any]) -> str:
    """What computed: the GPU, or else how many cores of which processor.

    >>> chip_words({"threads": 2, "cores": 16, "machine": "x86_64"})
    '2 of 16 cores, x86_64'
    """
    return str(found.get("gpu") or f"{found['threads']} of {found['cores']} cores, {machine_name(found)}")


def _processor() -> str:
    """Its name, where torch knows it, and by what it computes in bf16."""
    name = str(torch.cpu.get_capabilities().get("cpu_name") or "").strip() or platform.machine()
    unit = bf16_unit()
    return f"{name} with {unit}" if unit else name


def hardware(device: torch.device) -> dict[str, str | int]:
    """The machine, in words, and the switches that change how long it takes."""
    found: dict[str, str | int] = {
        "device": device.type,
        "machine": platform.machine(),
        "processor": _processor(),
        "system": platform.system(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    if switches := [f"{name}={os.environ[name]}" for name in SWITCHES if os.environ.get(name)]:
        found["switches"] = ", ".join(switches)
    return found
