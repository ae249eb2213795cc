"""Executors of a grid: runs one after another, in parallel processes, or on Ray."""

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean

from probprompt.backbones.weights_file import digest
from probprompt.engine.build import pick_device
from probprompt.errors import UserError
from probprompt.runs.grid import (
    SILENT_GRID,
    ExecutionOptions,
    Executor,
    Grid,
    GridCallback,
    Outcome,
    RunActions,
    RunSpec,
    describe,
    failed,
)


class TimeEstimator:
    """Estimates the duration of runs from finished ones."""

    def __init__(self, outcomes: Iterable[Outcome] = ()) -> None:
        self._known: dict[tuple[object, ...], list[float]] = {}
        for outcome in outcomes:
            self.record(outcome)

    def record(self, outcome: Outcome) -> None:
        """Record the duration of a run that has ended."""
        if outcome.seconds is not None:
            for key in self._keys(outcome.spec):
                self._known.setdefault(key, []).append(outcome.seconds)

    def estimate(self, specs: Iterable[RunSpec]) -> float | None:
        """Estimate the seconds that these runs take from the most similar ones; None if unknown."""
        if not self._known:
            return None
        nearest = (next(key for key in self._keys(spec) if key in self._known) for spec in specs)
        return sum(fmean(self._known[key]) for key in nearest)

    @staticmethod
    def _keys(spec: RunSpec) -> tuple[tuple[object, ...], ...]:
        """Return what a run shares with others, from nearly everything to nothing."""
        row = (spec.method, *describe(spec.varied))
        return (spec.benchmark, spec.preset, row), (spec.benchmark, spec.method), (spec.method,), ()


def run_grid(
    grid: Grid, actions: RunActions, progress: GridCallback = SILENT_GRID, options: ExecutionOptions | None = None
) -> list[Outcome]:
    """Run what is not finished; a failure is recorded and does not stop the other runs."""
    options = options or ExecutionOptions()
    if options.ray is None:
        pick_device(actions.device)
    before = grid.outcomes()
    waiting = [outcome.spec for outcome in before if not outcome.run]
    if waiting:
        _check_weights(before)
    with progress.grid(len(before), len(before) - len(waiting)):
        if waiting:
            with _executor(grid.out, actions, options, progress) as executor:
                execute(waiting, executor, progress, TimeEstimator(before))
    return grid.outcomes()


def _check_weights(outcomes: Sequence[Outcome]) -> None:
    """Raise an error if finished runs used other weights than their file contains now."""
    hashed = cache(digest)
    for outcome in outcomes:
        path = Path(outcome.spec.config.backbone.weights or "")
        if outcome.run and path.is_file():
            before, now = outcome.run.record.backbone.sha256, hashed(path)
            if before != now:
                raise UserError(
                    f"{outcome.spec.folder} was run with other weights than {path} (SHA-256 {before}, now {now}). "
                    "Restore them, or choose another folder with --out."
                )


def _executor(
    out: Path, actions: RunActions, options: ExecutionOptions, progress: GridCallback
) -> AbstractContextManager[Executor]:
    """Return the executor; runs that have not ended when its block is left are stopped."""
    if options.ray is not None:
        from probprompt.runs.ray_executor import on_ray  # imports Ray

        return on_ray(out, actions, options, progress)
    if options.workers > 1:
        return _ProcessExecutor(actions, options.workers)
    return nullcontext(_SequentialExecutor(actions, progress))


def execute(waiting: list[RunSpec], executor: Executor, progress: GridCallback, times: TimeEstimator) -> None:
    """Submit runs in their order, and report each that has ended."""
    left, running = list(waiting), list[RunSpec]()
    while left or running:
        while left and len(running) < executor.ahead:
            running.append(left.pop(0))
            if executor.ahead == 1:
                progress.begin(running[0], times.estimate(running), times.estimate(left))
            executor.submit(running[-1])
        outcome = executor.receive()
        running.remove(outcome.spec)
        times.record(outcome)
        rest = times.estimate([*running, *left])
        parallel = max(1, min(executor.slots, len(running) + len(left)))
        progress.end(outcome, None if rest is None else rest / parallel)


class _SequentialExecutor:
    """Executes each run in this process."""

    ahead = slots = 1

    def __init__(self, actions: RunActions, progress: GridCallback) -> None:
        self._actions, self._progress = actions, progress

    def submit(self, spec: RunSpec) -> None:
        self._spec = spec

    def receive(self) -> Outcome:
        return self._actions.execute(self._spec, self._progress)


class _ProcessExecutor(AbstractContextManager[Executor]):
    """Executes each run in a new process; one that dies does not affect the others."""

    def __init__(self, actions: RunActions, workers: int) -> None:
        self.ahead = self.slots = workers
        self._actions, self._running = actions, dict[BaseProcess, RunSpec]()
        self._context = multiprocessing.get_context("spawn")  # a copy of this process could not use a GPU
        self._threads = max(1, (os.cpu_count() or 1) // workers)

    def submit(self, spec: RunSpec) -> None:
        process = self._context.Process(target=_execute, args=(spec, self._actions, self._threads), daemon=True)
        process.start()
        self._running[process] = spec

    def receive(self) -> Outcome:
        ready = connection.wait([process.sentinel for process in self._running])
        ended = next(process for process in self._running if process.sentinel in ready)
        ended.join()
        outcome = self._running.pop(ended).outcome
        if outcome.run or outcome.problem:
            return outcome
        reason = f"Its process ended with exit code {ended.exitcode} (killed, or out of memory)."
        return failed(outcome.spec, RuntimeError(reason))

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.join()


def _execute(spec: RunSpec, actions: RunActions, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    with suppress(KeyboardInterrupt):  # the parent process reports it
        actions.execute(spec, SILENT_GRID)
