"""What a classifier can tell of itself without any image: what was kept of each task, how different its prompts are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from probprompt.classifier.engine import Engine
from probprompt.classifier.state import Kept, LearnedTask, State
from probprompt.evaluation.diagnostics import prompt_diversity

MOST_CLASSES = 100
"""Classes whose prompts are compared at most."""
_SAME_KNOWLEDGE = ("renamed", "rolled back")  # versions that recognise what an earlier one does


@dataclass(frozen=True)
class AccuracyMatrix:
    """Accuracy in % on the held-out images of each task (rows) by each version that is kept (columns)."""

    tasks: tuple[str, ...]
    versions: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]
    """None where a version did not know the task, or its images were seen through other prompts."""


def held_out_accuracy(engine: Engine, state: State, logits: Tensor, labels: Tensor) -> tuple[float | None, ...]:
    """Accuracy in % on each task's held-out images (logits (h, C) of a head that has not seen them, labels (h,)).

    None where nothing was held out, and where prompts have changed since the images were seen.
    """
    task_of = torch.tensor([known.task for known in state.classes], device=labels.device)[labels]  # (h,)
    right = (logits.argmax(dim=1) == labels).double()
    changed = max((task for task in range(len(state.tasks)) if engine.adapts(task)), default=0)
    scores: list[float | None] = []
    for task in range(len(state.tasks)):
        own = task_of == task
        scores.append(100 * float(right[own].mean()) if task >= changed and bool(own.any()) else None)
    return tuple(scores)


def accuracy_matrix(kept: Sequence[Kept]) -> AccuracyMatrix:
    """What versions on the way to the current one recognised of each task's held-out images."""
    if not kept:
        return AccuracyMatrix((), (), ())
    tasks = kept[-1].state.tasks
    steps = [one for one in kept if one.version.what not in _SAME_KNOWLEDGE and _leads_to(one.state.tasks, tasks)]
    values = tuple(
        tuple(one.state.held_out[row] if row < len(one.state.held_out) else None for one in steps)
        for row in range(len(tasks))
    )
    return AccuracyMatrix(tuple(task.name for task in tasks), tuple(one.version.number for one in steps), values)


def _leads_to(earlier: tuple[LearnedTask, ...], tasks: tuple[LearnedTask, ...]) -> bool:
    return tasks[: len(earlier)] == earlier


def diversity(engine: Engine, state: State) -> dict[str, Any] | None:
    """Similarity of the prompts for one held-out image per class; None where the queries of images are not kept.

    They are where the head reads them beside the features (``head.with_query``), as in the preset ``flagship``.
    """
    if not state.classes or not engine.config.head.with_query:
        return None
    width = engine.backbone.model.width
    queries, names = [], []
    for known in state.classes[:MOST_CLASSES]:
        rows = known.held.tensors["rows"]
        if not len(rows):
            rows = known.rest.tensors.get("rows", rows)
        if len(rows):
            queries.append(rows[0, width : 2 * width])  # features, then the query, then readings of blocks
            names.append(known.name)
    if len(names) < 2:
        return None
    fresh = engine.build(replace(State(), adapted=state.adapted)).method
    return prompt_diversity(engine.build(state).method, fresh, torch.stack(queries).to(engine.device), names)
