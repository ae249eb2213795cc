"""Carrying out a grid's cells: one after another, side by side, or on a Ray cluster, all along one path."""

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
    Cell,
    ExecutionOptions,
    Executor,
    Grid,
    GridCallback,
    Outcome,
    RunActions,
    describe,
    failed,
)


class TimeEstimator:
    """How long cells take, from those that are finished."""

    def __init__(self, outcomes: Iterable[Outcome] = ()) -> None:
        self._known: dict[tuple[object, ...], list[float]] = {}
        for outcome in outcomes:
            self.learn(outcome)

    def learn(self, outcome: Outcome) -> None:
        """Take note of a cell that has ended."""
        if outcome.seconds is not None:
            for key in self._keys(outcome.cell):
                self._known.setdefault(key, []).append(outcome.seconds)

    def expect(self, cells: Iterable[Cell]) -> float | None:
        """Seconds that these cells may take: each as the cells most like it did; None before any is known."""
        if not self._known:
            return None
        nearest = (next(key for key in self._keys(cell) if key in self._known) for cell in cells)
        return sum(fmean(self._known[key]) for key in nearest)

    @staticmethod
    def _keys(cell: Cell) -> tuple[tuple[object, ...], ...]:
        """What a cell shares with others, from nearly all to nothing."""
        row = (cell.method, *describe(cell.varied))
        return (cell.benchmark, cell.preset, row), (cell.benchmark, cell.method), (cell.method,), ()


def run_grid(
    grid: Grid, way: RunActions, progress: GridCallback = SILENT_GRID, where: ExecutionOptions | None = None
) -> list[Outcome]:
    """Run what is not finished; a cell that fails is recorded and does not stop the rest."""
    place = where or ExecutionOptions()
    if place.on is None:
        pick_device(way.device)
    before = grid.outcomes()
    waiting = [outcome.cell for outcome in before if not outcome.run]
    if waiting:
        _refuse_other_weights(before)
    with progress.grid(len(before), len(before) - len(waiting)):
        if waiting:
            with _executor(grid.out, way, place, progress) as executor:
                carry_out(waiting, executor, progress, TimeEstimator(before))
    return grid.outcomes()


def _refuse_other_weights(outcomes: Sequence[Outcome]) -> None:
    """Refuse to go on beside finished runs whose file of weights holds others by now: no table could compare them."""
    hashed = cache(digest)
    for outcome in outcomes:
        path = Path(outcome.cell.config.backbone.weights or "")
        if outcome.run and path.is_file():
            before, found = outcome.run.record.backbone.sha256, hashed(path)
            if before != found:
                raise UserError(
                    f"{outcome.cell.folder} was run with other weights than {path} holds now (sha256 {before}, now "
                    f"{found}): put them back, or begin in another folder"
                )


def _executor(
    out: Path, way: RunActions, where: ExecutionOptions, progress: GridCallback
) -> AbstractContextManager[Executor]:
    """What carries out cells; whatever still runs when its block is left is stopped."""
    if where.on is not None:
        from probprompt.runs.ray_executor import on_ray  # it builds upon this module, and few need it

        return on_ray(out, way, where, progress)
    return _Processes(way, where.workers) if where.workers > 1 else nullcontext(_OneByOne(way, progress))


def carry_out(waiting: list[Cell], executor: Executor, progress: GridCallback, pace: TimeEstimator) -> None:
    """Hand out cells in their order, and tell of each that has ended."""
    left, running = list(waiting), list[Cell]()
    while left or running:
        while left and len(running) < executor.ahead:
            running.append(left.pop(0))
            if executor.ahead == 1:
                progress.begin(running[0], pace.expect(running), pace.expect(left))
            executor.submit(running[-1])
        outcome = executor.receive()
        running.remove(outcome.cell)
        pace.learn(outcome)
        rest = pace.expect([*running, *left])
        together = max(1, min(executor.places, len(running) + len(left)))
        progress.end(outcome, None if rest is None else rest / together)


class _OneByOne:
    """Each cell in this process."""

    ahead = places = 1

    def __init__(self, way: RunActions, progress: GridCallback) -> None:
        self._way, self._progress = way, progress

    def submit(self, cell: Cell) -> None:
        self._cell = cell

    def receive(self) -> Outcome:
        return self._way.carry_out(self._cell, self._progress)


class _Processes(AbstractContextManager[Executor]):
    """A new process per cell: one that dies takes nobody with it."""

    def __init__(self, way: RunActions, workers: int) -> None:
        self.ahead = self.places = workers
        self._running: dict[BaseProcess, Cell] = {}
        self._way = way
        self._context = multiprocessing.get_context("spawn")  # a copy of this process could not use a GPU
        self._threads = max(1, (os.cpu_count() or 1) // workers)

    def submit(self, cell: Cell) -> None:
        process = self._context.Process(target=_carry_out_alone, args=(cell, self._way, self._threads), daemon=True)
        process.start()
        self._running[process] = cell

    def receive(self) -> Outcome:
        ready = connection.wait([process.sentinel for process in self._running])
        ended = next(process for process in self._running if process.sentinel in ready)
        ended.join()
        cell = self._running.pop(ended)
        outcome = cell.outcome
        if outcome.run or outcome.problem:
            return outcome
        code = ended.exitcode  # one that was killed has left nothing
        return failed(cell, RuntimeError(f"its process ended with exit code {code} (killed, or out of memory?)"))

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.join()


def _carry_out_alone(cell: Cell, way: RunActions, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    with suppress(KeyboardInterrupt):  # the process that waits for this one tells what to do
        way.carry_out(cell, SILENT_GRID)
