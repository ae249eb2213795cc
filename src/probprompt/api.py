"""Runs from Python: the same as on the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probprompt.config import RunConfig, apply_values, merge, parse_config, with_absolute_paths
from probprompt.report import write_report
from probprompt.runs import execute
from probprompt.runs.progress import Watcher
from probprompt.runs.record import Run


def train(
    benchmark: str | None = None,
    method: str | None = None,
    *,
    out: str | Path | None = None,
    seed: int | None = None,
    epochs: int | None = None,
    config: Mapping[str, Any] | None = None,
    device: str | None = None,
    watcher: Watcher | None = None,
    track: str | None = None,
    **settings: Any,
) -> Run:
    """Learn a benchmark, or a folder of class folders, task by task, and write the run with its report.

    ``epochs`` are those of a task; ``settings`` are any other fields of :class:`~probprompt.RunConfig` by their
    unambiguous names (``samples=10, tasks=5``); ``config`` takes them nested, and what is named goes before it.
    """
    named: dict[str, Any] = {}
    if benchmark is not None:
        named["data"] = {"benchmark": benchmark}
    if method is not None:
        named["method"] = {"name": method}
    if seed is not None:
        named["seeds"] = dict.fromkeys(("order", "init", "data"), seed)
    if epochs is not None:
        named["training"] = {"epochs": epochs}
    parsed = parse_config(apply_values(merge(config or {}, named), settings))
    return start(parsed, Path(out) if out else default_folder(parsed), device, watcher, track)


def start(
    config: RunConfig,
    out: Path,
    device: str | None = None,
    watcher: Watcher | None = None,
    track: str | None = None,
) -> Run:
    """Carry out a run whose settings are complete."""
    run = execute.train(with_absolute_paths(config), out, device, watcher, track)
    write_report([run.folder], run.report)
    return run


def resume(out: str | Path, device: str | None = None, watcher: Watcher | None = None, track: str | None = None) -> Run:
    """Go on with a run that was stopped; the result is the same as if it had not been."""
    run = execute.resume(Path(out), device, watcher, track)
    write_report([run.folder], run.report)
    return run


def default_folder(config: RunConfig) -> Path:
    """Where a run goes that was given no folder: a new one under ``runs``, named after what is learned and how."""
    name = Path(config.data.benchmark).resolve().name
    return free_folder(Path("runs"), f"{name}-{config.method.name}-s{config.seeds.order}")


def free_folder(parent: Path, name: str) -> Path:
    """A folder that is not there yet: the name, or the name with a number."""
    candidate, number = parent / name, 2
    while candidate.exists():
        candidate, number = parent / f"{name}-{number}", number + 1
    return candidate
