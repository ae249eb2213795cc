"""How well a classifier recognises images whose classes are known, and what it has forgotten."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from probprompt.classifier.confidence import auroc, expected_calibration_error, false_positive_rate
from probprompt.classifier.outputs import Evaluation, TaskScore
from probprompt.classifier.predictor import ModelFactory, Predictor
from probprompt.classifier.store import LearnedTask, SavedVersion, State
from probprompt.data.images import Pixels, UnreadableImageError
from probprompt.data.inputs import InputImage, LabeledImages, decode_ahead, pictures
from probprompt.errors import UserError, shorten, suggest
from probprompt.evaluation.diagnostics import prompt_diversity
from probprompt.progress import ProgressCallback


@dataclass(frozen=True)
class Earlier:
    """A version that had just learned a task: which rows of its head are which classes of now."""

    task: int
    predictor: Predictor
    same_features: bool
    """Whether it sees images as the current version does."""
    uids: tuple[int, ...]


@dataclass
class Tally:
    """What was seen of the images: labels, answers, and what earlier versions answered."""

    truth: list[Tensor]
    probabilities: list[Tensor]
    novelty: list[Tensor]
    earlier: dict[int, list[Tensor]]
    unreadable: list[tuple[str, str]]


def evaluate(
    engine: ModelFactory,
    predictor: Predictor,
    kept: Sequence[SavedVersion],
    given: LabeledImages,
    unknown: object,
    progress: ProgressCallback,
) -> Evaluation:
    """Measure the current version on images with classes, and how it knows images of none."""
    labels = _labels(predictor, given)
    earlier = list(_earlier(engine, predictor, kept))
    tally = Tally([], [], [], {one.task: [] for one in earlier}, [])
    each = ((_picture(given, row), labels[label]) for row, label in enumerate(given.images.labels.tolist()))
    size = engine.config.images_at_a_time(engine.device.type)
    with progress.stage("evaluating", len(given.images)):
        _go_through(predictor, each, earlier, tally, size, progress.advance)
    if not tally.truth:
        raise UserError("none of the images can be read: there is nothing to evaluate")
    strange = None
    if unknown is not None:
        strange = _novelty_of(predictor, pictures(unknown, engine.short_side), tally, size, progress)
    return _summary(predictor, tally, earlier, strange)


def _labels(predictor: Predictor, given: LabeledImages) -> list[int]:
    """The head's row of each class that is given."""
    names = predictor.state.names
    foreign = [name for name in given.classes if name not in names]
    if foreign:
        raise UserError(
            f"{len(foreign)} class(es) are not known: {shorten(foreign)} ({suggest(foreign[0], names)}). Leave them "
            "out, or give them as images of no known class (unknown, --unknown)"
        )
    return [names.index(name) for name in given.classes]


def _picture(given: LabeledImages, row: int) -> InputImage:
    return InputImage(given.images.names[row], partial(given.images.read, row))


def _earlier(engine: ModelFactory, predictor: Predictor, kept: Sequence[SavedVersion]) -> Iterator[Earlier]:
    """The versions that had just learned each task, where they are kept and tell anything new."""
    state, found = predictor.state, {one.version.number: one.state for one in kept}
    last = len(state.tasks) - 1
    for index, task in enumerate(state.tasks):
        then = found.get(task.version)
        if then is None or index == last or len(then.tasks) != index + 1:
            continue
        same = _same(then.method, state.method)
        yield Earlier(index, engine.predictor(then), same, tuple(one.uid for one in then.classes))


def _same(one: object, other: object) -> bool:
    """Whether two parts hold the same tensors."""
    if one is other:
        return True
    mine, others = getattr(one, "tensors", {}), getattr(other, "tensors", {})
    return mine.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in mine.items())


def _go_through(
    predictor: Predictor,
    images: Iterator[tuple[InputImage, int]],
    earlier: Sequence[Earlier],
    tally: Tally,
    size: int,
    advance: Callable[[int], None],
) -> None:
    while group := list(islice(images, size)):
        found = list(decode_ahead(iter([picture for picture, _ in group])))
        readable: list[Pixels] = []
        truth: list[int] = []
        for (picture, pixels), (_, label) in zip(found, group, strict=True):
            if isinstance(pixels, UnreadableImageError):
                tally.unreadable.append((picture.source, str(pixels)))
            else:
                readable.append(pixels)
                truth.append(label)
        if readable:
            features = predictor.look(readable)
            probabilities, novelty = predictor.judge(features)
            tally.truth.append(torch.tensor(truth))
            tally.probabilities.append(probabilities.cpu())
            tally.novelty.append(novelty.cpu())
            for one in earlier:
                seen = features if one.same_features else one.predictor.look(readable)
                tally.earlier[one.task].append(one.predictor.judge(seen)[0].argmax(dim=1).cpu())
        advance(len(group))


def _novelty_of(
    predictor: Predictor, images: Iterator[InputImage], tally: Tally, size: int, progress: ProgressCallback
) -> Tensor:
    """The novelty of images of no known class."""
    found: list[Tensor] = []
    stream = decode_ahead(images)
    while group := list(islice(stream, size)):
        readable = [pixels for _, pixels in group if not isinstance(pixels, UnreadableImageError)]
        tally.unreadable += [(one.source, str(bad)) for one, bad in group if isinstance(bad, UnreadableImageError)]
        if readable:
            found.append(predictor.judge(predictor.look(readable))[1].cpu())
    if not found:
        raise UserError("none of the unknown images can be read: give a folder, or a list, of images")
    return torch.cat(found)


def _summary(predictor: Predictor, tally: Tally, earlier: Sequence[Earlier], strange: Tensor | None) -> Evaluation:
    names, classes = predictor.state.names, predictor.state.classes
    truth, probabilities, novelty = (torch.cat(part) for part in (tally.truth, tally.probabilities, tally.novelty))
    chosen = probabilities.argmax(dim=1)  # (n,)
    right = (chosen == truth).double()
    count = len(names)
    confusion = (truth * count + chosen).bincount(minlength=count * count).view(count, count)
    scores = _per_task(predictor, tally, earlier, truth, right)
    newest = len(predictor.state.tasks) - 1  # of which nothing can be forgotten yet, whether it has images here or not
    newest_classes = {known.name for known in predictor.state.classes if known.task == newest}
    lost = [
        score.forgotten for score in scores if score.forgotten is not None and newest_classes.isdisjoint(score.classes)
    ]
    present = truth.unique().tolist()
    found = Evaluation(
        accuracy=100 * float(right.mean()),
        images=len(truth),
        per_task=scores,
        per_class={classes[label].name: 100 * float(right[truth == label].mean()) for label in present},
        forgetting=sum(lost) / len(lost) if lost else None,
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        classes=names,
        calibration_error=expected_calibration_error(probabilities, truth),
        flagged=100 * float((novelty > 1).double().mean()),
        unreadable=tuple(tally.unreadable),
    )
    if strange is None:
        return found
    return replace(
        found,
        auroc=auroc(novelty, strange),
        fpr_at_95=false_positive_rate(novelty, strange),
        unknown_images=len(strange),
        unknown_flagged=100 * float((strange > 1).double().mean()),
    )


def _per_task(
    predictor: Predictor, tally: Tally, earlier: Sequence[Earlier], truth: Tensor, right: Tensor
) -> tuple[TaskScore, ...]:
    """Accuracy on the images of each task, now and when it was learned; tasks without images are left out."""
    state = predictor.state
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
            answers = torch.tensor(then[index].uids)[torch.cat(tally.earlier[index])]  # (n,)
            before = 100 * float((answers[own] == uid_of[own]).double().mean())
        elif index == len(state.tasks) - 1:
            before = now
        members = tuple(known.name for known in state.classes if known.task == index)
        scores.append(TaskScore(task.name, members, int(own.sum()), now, before))
    return tuple(scores)


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


def held_out_accuracy(engine: ModelFactory, state: State, logits: Tensor, labels: Tensor) -> tuple[float | None, ...]:
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


def accuracy_matrix(kept: Sequence[SavedVersion]) -> AccuracyMatrix:
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


def diversity(engine: ModelFactory, state: State) -> dict[str, Any] | None:
    """Similarity of the prompts for one held-out image per class; None where the queries of images are not kept.

    They are where the head reads them beside the features (``head.with_query``), as in the preset ``flagship``.
    """
    if not state.classes or not engine.reads_query:
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
