"""Small runs: settings, interruptions, and what they leave; a pickle that must not be read."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from probprompt.progress import ProgressCallback
from probprompt.runs.run import Run
from probprompt.storage import read_tensors

CPU = torch.device("cpu")
PROBPROMPT: dict[str, Any] = {"name": "probprompt", "samples": 3, "components": 4, "tokens": 4, "blocks": [0, 2]}
BACKBONE: dict[str, Any] = {"name": "test_vit", "weights": "random", "image_size": 32}
GRID: dict[str, dict[str, Any]] = {
    "backbone": BACKBONE,
    "data": {"tasks": 2},
    "training": {"epochs": 1, "batch_size": 16},
    "alignment": {"epochs": 1},
    "method": {"samples": 2, "components": 4, "tokens": 4, "blocks": [0]},
}


def overlay(base: dict[str, dict[str, Any]], groups: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return groups of settings, with others over them."""
    return {name: {**base.get(name, {}), **groups.get(name, {})} for name in {**base, **groups}}


def as_options(settings: dict[str, dict[str, Any]]) -> list[str]:
    """Return settings as options of the command line."""
    pairs = [(f"{group}.{name}", value) for group, values in settings.items() for name, value in values.items()]
    return [part for name, value in pairs for part in ("--set", f"{name}={json.dumps(value)}")]


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


class StopHereError(BaseException):
    """The run is stopped here."""


class Stopper(ProgressCallback):
    """Stops a run in the second epoch of its second task."""

    stage_name = ""
    steps = 0

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        self.stage_name, self.steps = description, 0
        yield

    def advance(self, steps: int) -> None:
        self.steps += steps
        if self.stage_name.startswith("task 2") and self.steps == 3:
            raise StopHereError


def events(run: Run, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the events of a run, which hold neither NaN nor infinity."""
    found = [strict(line) for line in (run.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event for event in found if kind is None or event["event"] == kind]


def strict(text: str) -> Any:
    """Read JSON without NaN and infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def outcome(run: Run) -> dict[str, bytes]:
    """Return all results of a run; they must not depend on where it was stopped."""
    paths = [*run.model.iterdir(), run.folder / "accuracy.json", run.folder / "diagnostics.json"]
    found = {path.name: path.read_bytes() for path in paths}
    tensors, _ = read_tensors(run.checkpoint, CPU)  # its note also holds times
    losses = {(event["task"], event["epoch"]): event["loss"] for event in events(run, "epoch")}  # the last of an epoch
    found["losses"] = json.dumps(sorted(losses.items())).encode()
    return {**found, **{name: value.numpy().tobytes() for name, value in tensors.items()}}


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of a given size."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system may not be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
