"""Python functions for the commands on runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probprompt import distributed, presets
from probprompt.config import RunConfig, apply_values, merge, parse_config, with_absolute_paths
from probprompt.data.datasets import benchmark_label
from probprompt.engine.build import pick_device
from probprompt.errors import UserError, renamed_arguments
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
    """Train one method on a benchmark or a folder of images; write the run and its report.

    ``preset`` gives all settings (``published``, ``matched``, ``ridge``, ``flagship``); other arguments override it.
    ``settings`` are fields of :class:`~probprompt.RunConfig` by unambiguous names (``samples=10, tasks=5``); ``config``
    takes them nested, with lower priority. Under torchrun, all processes train together and return the same run.
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
    """Execute a run whose settings are complete."""
    return _reported(runs_train.train(with_absolute_paths(config), out, device, progress, track))


def resume(
    out: str | Path, device: str | None = None, progress: ProgressCallback = SILENT, track: str | None = None
) -> Run:
    """Resume an interrupted run; its result is bit-exact."""
    return _reported(runs_train.resume(Path(out), device, progress, track))


def _reported(run: Run) -> Run:
    """Write the report of a run, once, and return the run."""
    if distributed.from_environment().writes:
        from probprompt.report.pages import write_report  # slow to load

        write_report([run.folder], run.report)
    return run


@renamed_arguments(on="ray", gpus_per_cell="gpus_per_run", cpus_per_cell="cpus_per_run")
def compare(
    spec: GridSpec | Mapping[str, Any],
    out: str | Path,
    device: str | None = None,
    progress: GridCallback = SILENT_GRID,
    workers: int = 1,
    ray: str | None = None,
    gpus_per_run: float | None = None,
    cpus_per_run: float | None = None,
) -> list[Outcome]:
    """Train a grid of methods, benchmarks, seeds and settings, and write its tables.

    Finished runs are skipped. ``ray`` selects a Ray cluster instead of ``workers`` processes: ``ray`` (this machine),
    ``ray:auto`` or ``ray://HOST:PORT``. Each run there takes ``gpus_per_run`` GPUs, possibly a fraction.
    """
    from probprompt.report.compare import gather
    from probprompt.report.pages import write_comparison  # slow to load

    grid = Grid(spec if isinstance(spec, GridSpec) else parse_spec(spec), Path(out))
    options = ExecutionOptions(workers, ray, gpus_per_run, cpus_per_run)
    outcomes = run_grid(grid, RunActions(start, resume, device), progress, options)
    if any(outcome.run for outcome in outcomes):
        write_comparison(gather(grid, outcomes), grid.out)
    return outcomes


@renamed_arguments(images="num_images")
def audit(
    target: str | Path | None = None,
    *,
    method: str | None = None,
    data: str | None = None,
    num_images: int | None = None,
    config: Mapping[str, Any] | None = None,
    device: str | None = None,
    progress: ProgressCallback = SILENT,
) -> "AuditReport":
    """Check that predictions do not leak information between images.

    ``target`` is the folder of a run or model, audited with its own images or those of ``data``. With ``method``, it is
    the benchmark that the method is trained on for the audit (default: emoji-r); ``config`` overrides its settings.
    """
    from probprompt.runs import leak_audit

    chosen = pick_device(device)
    if method is None:
        if target is None:
            raise UserError("Nothing to audit. Pass the folder of a run or model, or method=NAME.")
        if config:
            raise UserError("config= needs method=: a saved model has its own settings.")
        count = num_images or leak_audit.SAVED_IMAGES
        return leak_audit.audit_saved(Path(target), chosen, count=count, data=data, progress=progress)
    if data is not None:
        raise UserError("data= needs a saved model. Pass the benchmark of a method as the target.")
    settings = leak_audit.quick_config(method, str(target or "emoji-r"), config or {})
    return leak_audit.audit_method(settings, chosen, count=num_images or leak_audit.METHOD_IMAGES, progress=progress)


def default_folder(config: RunConfig) -> Path:
    """Return a new folder under ``runs``, named after the benchmark, method and seed."""
    name = benchmark_label(config.data.benchmark)
    return free_folder(Path("runs"), f"{name}-{config.method.name}-s{config.seeds.order}")


def free_folder(parent: Path, name: str) -> Path:
    """Return a folder that does not exist: the name, or the name with a number."""
    candidate, number = parent / name, 2
    while candidate.exists():
        candidate, number = parent / f"{name}-{number}", number + 1
    return candidate
