"""Evaluation of a classifier and its versions on labeled images."""

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
from probprompt.data.inputs import InputImage, LabeledImages, input_images
from probprompt.errors import UserError, shorten, suggest
from probprompt.evaluation.diagnostics import prompt_diversity
from probprompt.heads.closed_form import ClosedFormSettings
from probprompt.progress import ProgressCallback


@dataclass(frozen=True)
class Earlier:
    """A kept version that had just learned a task."""

    task: int
    predictor: Predictor
    same_features: bool  # it computes the same features as the current version
    uids: tuple[int, ...]  # class uids in the order of its head
    answers: list[Tensor] = field(default_factory=list)


def evaluate(
    engine: ModelFactory,
    predictor: Predictor,
    kept: Sequence[SavedVersion],
    given: LabeledImages,
    unknown: object,
    progress: ProgressCallback,
) -> Evaluation:
    """Measure the current version on labeled images, and its novelty on unknown ones."""
    names = predictor.state.names
    foreign = [name for name in given.classes if name not in names]
    if foreign:
        raise UserError(
            f"Unknown classes: {shorten(foreign)}. {suggest(foreign[0], names)} Remove their folders, or pass these "
            "images with --unknown."
        )
    rows = [names.index(name) for name in given.classes]
    labels = iter(given.images.labels.tolist())
    earlier = list(_earlier(engine, predictor, kept))
    images = (InputImage(name, partial(given.images.read, row)) for row, name in enumerate(given.images.names))
    size = engine.config.images_at_a_time(engine.device.type)
    truth: list[int] = []
    outputs, unknown_novelty = list[tuple[Tensor, Tensor]](), list[Tensor]()
    unreadable: list[tuple[str, str]] = []
    with progress.stage("evaluating", len(given.images)):
        for batch in predictor.judge_each(images, size):
            pairs = zip(batch.images, labels, strict=False)  # the rest of the labels belongs to later batches
            truth += [rows[label] for (_, pixels), label in pairs if not isinstance(pixels, UnreadableImageError)]
            outputs.append((batch.probabilities.cpu(), batch.novelty.cpu()))
            for one in earlier if batch.pixels else ():
                features = batch.features if one.same_features else one.predictor.look(batch.pixels)
                one.answers.append(one.predictor.judge(features)[0].argmax(dim=1).cpu())
            unreadable += batch.unreadable
            progress.advance(len(batch.images))
    if not truth:
        raise UserError("None of the images can be read. Check the folder.")
    for batch in predictor.judge_each(input_images(unknown, engine.short_side), size) if unknown is not None else ():
        unknown_novelty.append(batch.novelty.cpu())
        unreadable += batch.unreadable
    if unknown is not None and not sum(map(len, unknown_novelty)):
        raise UserError("None of the unknown images can be read. Pass a folder or a list of images.")
    probabilities, novelty = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    evaluation = _measure(predictor.state, earlier, torch.tensor(truth), probabilities, novelty)
    evaluation = replace(evaluation, unreadable=tuple(unreadable))
    if not unknown_novelty:
        return evaluation
    far = torch.cat(unknown_novelty)
    return replace(
        evaluation,
        auroc=auroc(novelty, far),
        fpr_at_95=false_positive_rate(novelty, far),
        unknown_images=len(far),
        unknown_flagged=100 * float((far > 1).double().mean()),
    )


def _earlier(engine: ModelFactory, predictor: Predictor, kept: Sequence[SavedVersion]) -> Iterator[Earlier]:
    """Yield the kept versions that had just learned a task, except the last task."""
    state, states = predictor.state, {one.version.number: one.state for one in kept}
    for index, task in enumerate(state.tasks[:-1]):
        then = states.get(task.version)
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
    correct = (chosen == truth).double()
    count = len(state.names)
    confusion = (truth * count + chosen).bincount(minlength=count * count).view(count, count)
    scores = _per_task(state, earlier, truth, correct)
    newest = {known.name for known in state.classes if known.task == len(state.tasks) - 1}  # not forgotten yet
    lost = [score.forgotten for score in scores if score.forgotten is not None and newest.isdisjoint(score.classes)]
    return Evaluation(
        accuracy=100 * float(correct.mean()),
        images=len(truth),
        per_task=scores,
        per_class={state.names[row]: 100 * float(correct[truth == row].mean()) for row in truth.unique().tolist()},
        forgetting=sum(lost) / len(lost) if lost else None,
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        classes=state.names,
        calibration_error=expected_calibration_error(probabilities, truth),
        flagged=100 * float((novelty > 1).double().mean()),
    )


def _per_task(state: State, earlier: Sequence[Earlier], truth: Tensor, correct: Tensor) -> tuple[TaskScore, ...]:
    """Return the accuracy per task now and when it was learned; skip tasks without images."""
    task_of = torch.tensor([known.task for known in state.classes])[truth]  # (n,)
    uid_of = torch.tensor([known.uid for known in state.classes])[truth]  # (n,)
    then = {one.task: one for one in earlier}
    scores = []
    for index, task in enumerate(state.tasks):
        own = task_of == index
        if not bool(own.any()):
            continue
        now, before = 100 * float(correct[own].mean()), None
        if index in then:
            answers = torch.tensor(then[index].uids)[torch.cat(then[index].answers)]  # (n,)
            before = 100 * float((answers[own] == uid_of[own]).double().mean())
        elif index == len(state.tasks) - 1:
            before = now
        members = tuple(known.name for known in state.classes if known.task == index)
        scores.append(TaskScore(task.name, members, int(own.sum()), now, before))
    return tuple(scores)


MOST_CLASSES = 100  # largest number of classes whose prompts are compared
_SAME_KNOWLEDGE = ("renamed", "rolled back")  # versions that predict like an earlier one


@dataclass(frozen=True)
class AccuracyMatrix:
    """Accuracy in % on held-out images of each task (rows) by each kept version (columns)."""

    tasks: tuple[str, ...]
    versions: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]
    """None if a version did not know the task, or its prompts have changed since."""


def held_out_accuracy(engine: ModelFactory, state: State, logits: Tensor, labels: Tensor) -> tuple[float | None, ...]:
    """Return held-out accuracy in % per task; None without images or after prompts changed."""
    task_of = torch.tensor([known.task for known in state.classes], device=labels.device)[labels]  # (h,)
    correct = (logits.argmax(dim=1) == labels).double()
    changed = max((task for task in range(len(state.tasks)) if engine.adapts(task)), default=0)
    return tuple(
        100 * float(correct[task_of == task].mean()) if task >= changed and bool((task_of == task).any()) else None
        for task in range(len(state.tasks))
    )


def accuracy_matrix(kept: Sequence[SavedVersion]) -> AccuracyMatrix:
    """Return the held-out accuracy of each task under the versions before the current one."""
    tasks = kept[-1].state.tasks if kept else ()
    steps = [one for one in kept if one.version.what not in _SAME_KNOWLEDGE]
    steps = [one for one in steps if one.state.tasks == tasks[: len(one.state.tasks)]]
    values = tuple(
        tuple(one.state.held_out[row] if row < len(one.state.held_out) else None for one in steps)
        for row in range(len(tasks))
    )
    return AccuracyMatrix(tuple(task.name for task in tasks), tuple(one.version.number for one in steps), values)


def diversity(engine: ModelFactory, state: State) -> dict[str, Any] | None:
    """Return the similarity of prompts of one image per class; None without stored queries."""
    head = engine.config.head
    if not state.classes or not isinstance(head, ClosedFormSettings) or not head.with_query:
        return None
    width = engine.backbone.model.width
    queries, names, keys = [], [], []
    for known in state.classes[:MOST_CLASSES]:
        kept = known.held.tensors if len(known.held.tensors["rows"]) else known.rest.tensors
        if len(kept.get("rows", ())):
            queries.append(kept["rows"][0, width : 2 * width])  # features, query, intermediate features
            names.append(known.name)
            keys += kept["keys"][:1].tolist() if "keys" in kept else []
    if len(names) < 2:
        return None
    fresh, method = (engine.build(one).method for one in (replace(State(), adapted=state.adapted), state))
    fresh.copy_statistics(method)
    given = torch.tensor(keys, device=engine.device) if keys else None
    return prompt_diversity(method, fresh, torch.stack(queries).to(engine.device), names, given)
