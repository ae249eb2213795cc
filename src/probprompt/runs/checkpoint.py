"""Where a run stands: everything that is needed to go on as if it had never stopped.

All randomness is keyed, so no generator's state is among it.
"""

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

SHARE = 0.01
"""Of the time, for checkpoints."""
LATENCY, SPEED = 0.01, 2e8
"""Seconds that a small file takes and bytes written in a second, until one was written and timed."""


@dataclass
class Position:
    """How far a run has come: ``epoch`` epochs of task ``task`` are done, and all tasks before it."""

    task: int = 0
    epoch: int = 0
    matrix: list[list[float | None]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def save_checkpoint(
    path: Path, config_hash: str, position: Position, learner: Learner, optimizer: Optimizer | None
) -> None:
    """Write a checkpoint; the optimizer goes with one in the middle of a task.

    After the last task what only further learning needs, which may be large, stays out: the model's folder has it.
    """
    if position.task == len(position.matrix):
        later = learning_only(learner)
        tensors = {name: value for name, value in learner_tensors(learner).items() if name not in later}
    else:
        tensors = saved_tensors(learner)
    for index, state in optimizer.state_dict()["state"].items() if optimizer else ():
        tensors.update({f"optimiser.{index}.{name}": value for name, value in state.items()})
    note = {"config": config_hash, "position": vars(position)}
    write_tensors(path, tensors, note)


class Saving:
    """When a checkpoint is written after an epoch or a task: so seldom that all take a small share of the time.

    A small task may take no longer than writing where it ended. Not more than a hundred times what a checkpoint takes,
    by its size and the speed of the last, and one epoch, is ever lost; at the end of a run there is always one.
    """

    def __init__(self, size: Callable[[], int]) -> None:
        self._size, self._ended = size, time.perf_counter()
        self._took, self._written = LATENCY, LATENCY * SPEED

    def due(self) -> bool:
        """Whether it is time for another."""
        expected = self._took * max(1.0, self._size() / self._written)
        return os.environ.get(CHECKPOINTS) == "all" or time.perf_counter() - self._ended >= expected / SHARE

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around the writing of one."""
        begun = time.perf_counter()
        yield
        self._ended, self._written = time.perf_counter(), max(1, self._size())
        self._took = self._ended - begun


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read."""

    position: Position
    tensors: dict[str, Tensor]

    def restore(self, learner: Learner, tasks: list[TaskImages]) -> None:
        """Put a new learner where the saved one was."""
        begun = self.position.task + (1 if self.position.epoch else 0)
        for task in tasks[:begun]:  # a method grows by its tasks: its tensors then fit
            learner.begin_method(task)
        restore_tensors(learner, self.tensors)

    @property
    def mid_task(self) -> MidTask | None:
        """Where to continue inside a task, if the position is inside one."""
        return MidTask(self.position.epoch, self._restore_optimizer) if self.position.epoch else None

    def _restore_optimizer(self, optimizer: Optimizer) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in group(self.tensors, "optimiser").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value.cpu() if key == "step" else value  # as AdamW keeps it
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def load_checkpoint(path: Path, config_hash: str, device: torch.device) -> Saved:
    """Read a checkpoint that belongs to these settings."""
    try:
        tensors, note = read_tensors(path, device)
        if note.get("config") != config_hash:
            raise UserError(f"{path} belongs to a run with other settings and was not loaded")
    except UserError as problem:
        raise UserError(f"{problem}. Put the right file back, or remove it: the run then begins anew") from None
    return Saved(Position(**note["position"]), tensors)
