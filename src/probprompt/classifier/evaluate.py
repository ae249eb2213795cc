"""Measure a classifier: accuracy, calibration, novelty and forgetting on labeled images, and what versions kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from probprompt.classifier.confidence import auroc, expected_calibration_error, false_positive_rate
from probprompt.classifier.outputs import Evaluation, TaskScore
from probprompt.classifier.predictor import ModelFactory, Predictor
from probprompt.classifier.store import Part, SavedVersion, State
from probprompt.data.images import UnreadableImageError
from probprompt.data.inputs import InputImage, LabeledImages, pictures
from probprompt.errors import UserError, shorten, suggest
from probprompt.evaluation.diagnostics import prompt_diversity
from probprompt.heads.closed_form import ClosedFormSettings
from probprompt.progress import ProgressCallback


@dataclass(frozen=True)
class Earlier:
    """A version that had just learned a task."""

    task: int
    predictor: Predictor
    same_features: bool
    """Whether its features of images are those of the current version."""
    uids: tuple[int, ...]
    """Of the classes in the order of its head."""
    answers: list[Tensor] = field(default_factory=list)


def evaluate(
    engine: ModelFactory,
    predictor: Predictor,
    kept: Sequence[SavedVersion],
    given: LabeledImages,
    unknown: object,
    progress: ProgressCallback,
) -> Evaluation:
    """Measure the current version on labeled images, and its novelty on images of no known class."""
    names = predictor.state.names
    foreign = [name for name in given.classes if name not in names]
    if foreign:
        raise UserError(
            f"{len(foreign)} class(es) are not known: {shorten(foreign)}. {suggest(foreign[0], names)} Leave them "
            "out, or give them as images of no known class (unknown, --unknown)"
        )
    rows = [names.index(name) for name in given.classes]
    labels = iter(given.images.labels.tolist())
    earlier = list(_earlier(engine, predictor, kept))
    images = (InputImage(name, partial(given.images.read, row)) for row, name in enumerate(given.images.names))
    size = engine.config.images_at_a_time(engine.device.type)
    truth: list[int] = []
    answers, strange = list[tuple[Tensor, Tensor]](), list[Tensor]()
    unreadable: list[tuple[str, str]] = []
    with progress.stage("evaluating", len(given.images)):
        for batch in predictor.judge_each(images, size):
            pairs = zip(batch.images, labels, strict=False)  # labels go on in the next batch
            truth += [rows[label] for (_, found), label in pairs if not isinstance(found, UnreadableImageError)]
            answers.append((batch.probabilities.cpu(), batch.novelty.cpu()))
            for one in earlier if batch.pixels else ():
                features = batch.features if one.same_features else one.predictor.look(batch.pixels)
                one.answers.append(one.predictor.judge(features)[0].argmax(dim=1).cpu())
            unreadable += batch.unreadable
            progress.advance(len(batch.images))
    if not truth:
        raise UserError("none of the images can be read: there is nothing to evaluate")
    for batch in predictor.judge_each(pictures(unknown, engine.short_side), size) if unknown is not None else ():
        strange.append(batch.novelty.cpu())
        unreadable += batch.unreadable
    if unknown is not None and not sum(map(len, strange)):
        raise UserError("none of the unknown images can be read: give a folder, or a list, of images")
    probabilities, novelty = (torch.cat(parts) for parts in zip(*answers, strict=True))
    known = _measure(predictor.state, earlier, torch.tensor(truth), probabilities, novelty)
    known = replace(known, unreadable=tuple(unreadable))
    if not strange:
        return known
    far = torch.cat(strange)
    return replace(
        known,
        auroc=auroc(novelty, far),
        fpr_at_95=false_positive_rate(novelty, far),
        unknown_images=len(far),
        unknown_flagged=100 * float((far > 1).double().mean()),
    )


def _earlier(engine: ModelFactory, predictor: Predictor, kept: Sequence[SavedVersion]) -> Iterator[Earlier]:
    """Return the kept versions that had just learned a task, except the last task."""
    state, found = predictor.state, {one.version.number: one.state for one in kept}
    for index, task in enumerate(state.tasks[:-1]):
        then = found.get(task.version)
        if then is not None and len(then.tasks) == index + 1:
            same = _same(then.method, state.method)
            yield Earlier(index, engine.predictor(then), same, tuple(one.uid for one in then.classes))


def _same(one: Part | None, other: Part | None) -> bool:
    if one is other or one is None or other is None:
        return one is other
    mine, others = one.tensors, other.tensors
    return mine.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in mine.items())


def _measure(
    state: State, earlier: Sequence[Earlier], truth: Tensor, probabilities: Tensor, novelty: Tensor
) -> Evaluation:
    chosen = probabilities.argmax(dim=1)  # (n,)
    right = (chosen == truth).double()
    count = len(state.names)
    confusion = (truth * count + chosen).bincount(minlength=count * count).view(count, count)
    scores = _per_task(state, earlier, truth, right)
    newest = {known.name for known in state.classes if known.task == len(state.tasks) - 1}  # cannot be forgotten yet
    lost = [score.forgotten for score in scores if score.forgotten is not None and newest.isdisjoint(score.classes)]
    return Evaluation(
        accuracy=100 * float(right.mean()),
        images=len(truth),
        per_task=scores,
        per_class={state.names[row]: 100 * float(right[truth == row].mean()) for row in truth.unique().tolist()},
        forgetting=sum(lost) / len(lost) if lost else None,
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        classes=state.names,
        calibration_error=expected_calibration_error(probabilities, truth),
        flagged=100 * float((novelty > 1).double().mean()),
    )


def _per_task(state: State, earlier: Sequence[Earlier], truth: Tensor, right: Tensor) -> tuple[TaskScore, ...]:
    """Return the accuracy on the images of each task now and when it was learned; omit tasks without images."""
    task_of = torch.tensor([known.task for known in state.classes])[truth]  # (n,)
    uid_of = torch.tensor([known.uid for known in state.classes])[truth]  # (n,)
    then = {one.task: one for one in earlier}
    scores = []
    for index, task in enumerate(state.tasks):
        own = task_of == index
        if not bool(own.any()):
            continue
        now, before = 100 * float(right[own].mean()), None
        if index in then:
            answers = torch.tensor(then[index].uids)[torch.cat(then[index].answers)]  # (n,)
            before = 100 * float((answers[own] == uid_of[own]).double().mean())
        elif index == len(state.tasks) - 1:
            before = now
        members = tuple(known.name for known in state.classes if known.task == index)
        scores.append(TaskScore(task.name, members, int(own.sum()), now, before))
    return tuple(scores)


MOST_CLASSES = 100
"""Largest number of classes whose prompts are compared."""
_SAME_KNOWLEDGE = ("renamed", "rolled back")  # versions that recognize what an earlier one does


@dataclass(frozen=True)
class AccuracyMatrix:
    """Accuracy in % on the held-out images of each task (rows) by each version that is kept (columns)."""

    tasks: tuple[str, ...]
    versions: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]
    """None where a version did not know the task, or its images were seen through other prompts."""


def held_out_accuracy(engine: ModelFactory, state: State, logits: Tensor, labels: Tensor) -> tuple[float | None, ...]:
    """Accuracy in % on each task's held-out images (logits (h, C) of a head that has not seen them, labels (h,)).

    None where nothing was held out, and where prompts have changed since the images were seen.
    """
    task_of = torch.tensor([known.task for known in state.classes], device=labels.device)[labels]  # (h,)
    right = (logits.argmax(dim=1) == labels).double()
    changed = max((task for task in range(len(state.tasks)) if engine.adapts(task)), default=0)
    return tuple(
        100 * float(right[task_of == task].mean()) if task >= changed and bool((task_of == task).any()) else None
        for task in range(len(state.tasks))
    )


def accuracy_matrix(kept: Sequence[SavedVersion]) -> AccuracyMatrix:
    """What versions on the way to the current one recognised of each task's held-out images."""
    tasks = kept[-1].state.tasks if kept else ()
    steps = [one for one in kept if one.version.what not in _SAME_KNOWLEDGE]
    steps = [one for one in steps if one.state.tasks == tasks[: len(one.state.tasks)]]  # on the way to the current one
    values = tuple(
        tuple(one.state.held_out[row] if row < len(one.state.held_out) else None for one in steps)
        for row in range(len(tasks))
    )
    return AccuracyMatrix(tuple(task.name for task in tasks), tuple(one.version.number for one in steps), values)


def diversity(engine: ModelFactory, state: State) -> dict[str, Any] | None:
    """Similarity of the prompts for one held-out image per class; None where the queries of images are not kept.

    They are kept if the head reads them in addition to the features (``head.with_query``).
    """
    head = engine.config.head
    if not state.classes or not isinstance(head, ClosedFormSettings) or not head.with_query:
        return None
    width = engine.backbone.model.width
    queries, names, keys = [], [], []
    for known in state.classes[:MOST_CLASSES]:
        kept = known.held.tensors if len(known.held.tensors["rows"]) else known.rest.tensors
        if len(kept.get("rows", ())):
            queries.append(kept["rows"][0, width : 2 * width])  # features, then the query, then readings of blocks
            names.append(known.name)
            keys += kept["keys"][:1].tolist() if "keys" in kept else []
    if len(names) < 2:
        return None
    fresh, method = (engine.build(one).method for one in (replace(State(), adapted=state.adapted), state))
    fresh.copy_statistics(method)
    given = torch.tensor(keys, device=engine.device) if keys else None
    return prompt_diversity(method, fresh, torch.stack(queries).to(engine.device), names, given)
