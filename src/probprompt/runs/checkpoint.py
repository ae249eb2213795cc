"""Checkpoints of a run; randomness is keyed, so no generator state is saved."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from probprompt.engine.build import group
from probprompt.engine.hardware import CHECKPOINTS
from probprompt.engine.learner import Learner, MidTask
from probprompt.engine.loader import TaskImages
from probprompt.engine.saved_model import learner_tensors, learning_only, restore_tensors, saved_tensors
from probprompt.errors import UserError
from probprompt.storage import read_tensors, write_tensors

SHARE = 0.01  # share of the time spent on checkpoints
LATENCY, SPEED = 0.01, 2e8  # assumed seconds per small file and bytes per second, until a checkpoint was timed


@dataclass
class Position:
    """Progress of a run: tasks before ``task`` and ``epoch`` epochs of it are done."""

    task: int = 0
    epoch: int = 0
    matrix: list[list[float | None]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def save_checkpoint(
    path: Path, config_hash: str, position: Position, learner: Learner, optimizer: Optimizer | None
) -> None:
    """Write a checkpoint, with the optimizer inside a task."""
    if position.task == len(position.matrix):
        later = learning_only(learner)
        tensors = {name: value for name, value in learner_tensors(learner).items() if name not in later}
    else:
        tensors = saved_tensors(learner)
    for index, state in optimizer.state_dict()["state"].items() if optimizer else ():
        tensors.update({f"optimiser.{index}.{name}": value for name, value in state.items()})
    write_tensors(path, tensors, {"config": config_hash, "position": vars(position)})


class CheckpointTimer:
    """Decides when to write a checkpoint, so that all take a small share of the time."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._size, self._end = size, time.perf_counter()
        self._duration, self._written = LATENCY, LATENCY * SPEED

    def due(self) -> bool:
        """Return True if it is time for a checkpoint."""
        expected = self._duration * max(1.0, self._size() / self._written)
        return os.environ.get(CHECKPOINTS) == "all" or time.perf_counter() - self._end >= expected / SHARE

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the block that writes a checkpoint."""
        start = time.perf_counter()
        yield
        self._end, self._written = time.perf_counter(), max(1, self._size())
        self._duration = self._end - start


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read."""

    position: Position
    tensors: dict[str, Tensor]

    def restore(self, learner: Learner, tasks: list[TaskImages]) -> None:
        """Restore the state of a new learner."""
        for task in tasks[: self.position.task + bool(self.position.epoch)]:  # a method grows with its tasks
            learner.begin_method(task)
        restore_tensors(learner, self.tensors)

    @property
    def mid_task(self) -> MidTask | None:
        """Where to continue inside a task; None between tasks."""
        return MidTask(self.position.epoch, self._restore_optimizer) if self.position.epoch else None

    def _restore_optimizer(self, optimizer: Optimizer) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in group(self.tensors, "optimiser").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value.cpu() if key == "step" else value  # as AdamW keeps it
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def load_checkpoint(path: Path, config_hash: str, device: torch.device) -> Checkpoint:
    """Read a checkpoint that belongs to these settings."""
    try:
        tensors, note = read_tensors(path, device)
        if note.get("config") != config_hash:
            raise UserError(f"{path} belongs to a run with other settings.")
    except UserError as problem:
        raise UserError(f"{str(problem).rstrip('.')}. Restore the file, or remove it to start from scratch.") from None
    return Checkpoint(Position(**note["position"]), tensors)
