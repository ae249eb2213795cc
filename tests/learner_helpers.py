"""What tests of learning share: a learner and its tasks, taught step by step, and what changed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from probprompt.config import parse_config
from probprompt.engine.learner import EpochResult, Learner
from probprompt.engine.loader import TaskImages
from probprompt.methods import Context, Method, Prompted
from probprompt.progress import ProgressCallback
from probprompt.runs.train import TrainingSetup, prepare

Settings = Callable[..., dict[str, Any]]
Weights = dict[str, Tensor]


def build(settings: dict[str, Any], device: str | torch.device = "cpu") -> TrainingSetup:
    return prepare(parse_config(settings), torch.device(device), ProgressCallback())


def quiet(steps: int) -> None:
    """Nobody watches."""


def train(learner: Learner, task: TaskImages) -> list[EpochResult]:
    """Learn a task up to the alignment."""
    learner.begin(task)
    optimizer = learner.optimizer(task)
    return [learner.train_epoch(task, epoch, optimizer, quiet) for epoch in range(learner.epochs(task))]


def teach(workshop: TrainingSetup, tasks: int | None = None) -> Learner:
    """Learn the first tasks, alignment included."""
    for task in workshop.tasks[:tasks]:
        train(workshop.learner, task)
        workshop.learner.finish(task, quiet)
    return workshop.learner


def weights_of(module: nn.Module) -> Weights:
    """A copy of all parameters and buffers."""
    return {name: value.clone() for name, value in module.state_dict(keep_vars=True).items()}


def changed(before: Weights, after: Weights) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def evaluation_features(learner: Learner, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return learner.model.features(learner.viewer.evaluation(learner.images.store, rows))[0]


def contexts_of(method: Method) -> list[Context]:
    """What the method is given from now on, call by call."""
    seen, original = list[Context](), method.prompts

    def noting(query: Tensor | None, context: Context) -> Prompted:
        seen.append(context)
        return original(query, context)

    method.prompts = noting  # type: ignore[method-assign]
    return seen
