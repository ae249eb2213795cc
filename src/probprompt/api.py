"""Runs from Python: the same as on the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probprompt import distributed, presets
from probprompt.config import RunConfig, apply_values, merge, parse_config, with_absolute_paths
from probprompt.data.datasets import benchmark_label
from probprompt.engine.build import pick_device
from probprompt.errors import UserError
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs import train as runs_train
from probprompt.runs.executors import run_grid
from probprompt.runs.grid import (
    SILENT_GRID,
    ExecutionOptions,
    Grid,
    GridCallback,
    GridSpec,
    Outcome,
    RunActions,
    parse_spec,
)
from probprompt.runs.run import Run

if TYPE_CHECKING:
    from probprompt.runs.leak_audit import AuditReport


def train(
    benchmark: str | None = None,
    method: str | None = None,
    *,
    preset: str | None = None,
    out: str | Path | None = None,
    seed: int | None = None,
    epochs: int | None = None,
    config: Mapping[str, Any] | None = None,
    device: str | None = None,
    progress: ProgressCallback = SILENT,
    track: str | None = None,
    **settings: Any,
) -> Run:
    """Learn a benchmark, or a folder of class folders, task by task, and write the run with its report.

    ``preset`` gives all settings at once (``published``, ``matched``, ``ridge``, ``flagship``), and everything else
    named goes before it; ``epochs`` are those of a task; ``settings`` are any other fields of
    :class:`~probprompt.RunConfig` by their unambiguous names (``samples=10, tasks=5``); ``config`` takes them nested,
    and what is named goes before it. A script that torchrun starts in several processes trains with all of them:
    each gets the same run back, which the first has written.
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
    given = apply_values(merge(config or {}, named), settings)
    parsed = parse_config(presets.resolve(preset, given))
    return start(parsed, Path(out) if out else default_folder(parsed), device, progress, track)


def start(
    config: RunConfig,
    out: Path,
    device: str | None = None,
    progress: ProgressCallback = SILENT,
    track: str | None = None,
) -> Run:
    """Carry out a run whose settings are complete."""
    run = runs_train.train(with_absolute_paths(config), out, device, progress, track)
    return _reported(run)


def resume(
    out: str | Path, device: str | None = None, progress: ProgressCallback = SILENT, track: str | None = None
) -> Run:
    """Go on with a run that was stopped; the result is the same as if it had not been."""
    run = runs_train.resume(Path(out), device, progress, track)
    return _reported(run)


def _reported(run: Run) -> Run:
    """Write the run's report, once."""
    if distributed.from_environment().writes:
        from probprompt.report.pages import write_report  # late: drawing takes long to load

        write_report([run.folder], run.report)
    return run


def compare(
    spec: GridSpec | Mapping[str, Any],
    out: str | Path,
    device: str | None = None,
    progress: GridCallback = SILENT_GRID,
    workers: int = 1,
    on: str | None = None,
    gpus_per_cell: float | None = None,
    cpus_per_cell: float | None = None,
) -> list[Outcome]:
    """Run a grid of methods, benchmarks, seeds and settings, and write its tables; nothing finished is run again.

    ``workers`` cells run side by side, each in a process; or ``on`` names a Ray cluster (``ray`` on this machine,
    ``ray:auto``, ``ray://host:10001``), where each cell takes ``gpus_per_cell``, which may be a fraction. A cluster
    that this program is connected to already is used and left open.
    """
    from probprompt.report.compare import gather
    from probprompt.report.pages import write_comparison  # drawing loads only when it is asked for

    grid = Grid(spec if isinstance(spec, GridSpec) else parse_spec(spec), Path(out))
    where = ExecutionOptions(workers, on, gpus_per_cell, cpus_per_cell)
    outcomes = run_grid(grid, RunActions(start, resume, device), progress, where)
    if any(outcome.run for outcome in outcomes):
        write_comparison(gather(grid, outcomes), grid.out)
    return outcomes


def audit(
    target: str | Path | None = None,
    *,
    method: str | None = None,
    data: str | None = None,
    images: int | None = None,
    config: Mapping[str, Any] | None = None,
    device: str | None = None,
    progress: ProgressCallback = SILENT,
) -> "AuditReport":
    """Check that predictions do not leak information between images.

    ``target`` is the folder of a run or of a model, audited on the images of ``data`` or its own; or, with
    ``method``, the benchmark that this method is trained on for the audit (emoji-r by default), with ``config`` over
    the settings of a short training.
    """
    from probprompt.runs import leak_audit

    where = pick_device(device)
    if method is None:
        if target is None:
            raise UserError("name what to audit: the folder of a run or of a model, or method=NAME")
        if config:
            raise UserError("config= goes with method=: a saved model has its settings already")
        return leak_audit.audit_saved(
            Path(target), where, count=images or leak_audit.SAVED_IMAGES, data=data, progress=progress
        )
    if data is not None:
        raise UserError("data= goes with a saved model: name the benchmark of a method as the target")
    settings = leak_audit.quick_config(method, str(target or "emoji-r"), config or {})
    return leak_audit.audit_method(settings, where, count=images or leak_audit.METHOD_IMAGES, progress=progress)


def default_folder(config: RunConfig) -> Path:
    """Where a run goes that was given no folder: a new one under ``runs``, named after what is learned and how."""
    name = benchmark_label(config.data.benchmark)
    return free_folder(Path("runs"), f"{name}-{config.method.name}-s{config.seeds.order}")


def free_folder(parent: Path, name: str) -> Path:
    """A folder that is not there yet: the name, or the name with a number."""
    candidate, number = parent / name, 2
    while candidate.exists():
        candidate, number = parent / f"{name}-{number}", number + 1
    return candidate
