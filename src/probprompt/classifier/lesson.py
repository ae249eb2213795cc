"""Transitions between states: learning, extending and forgetting classes."""

import copy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from probprompt import randomness
from probprompt.classifier.confidence import UNFITTED, Gaussians, Scale, calibrate
from probprompt.classifier.evaluate import held_out_accuracy
from probprompt.classifier.outputs import ConfusionRisk
from probprompt.classifier.predictor import ModelFactory
from probprompt.classifier.statistics import VIEWS, Statistics, Views, compact, hold_out
from probprompt.classifier.store import KnownClass, LearnedTask, Part, State
from probprompt.data.image_store import Loaded, load
from probprompt.data.inputs import LabeledImages, check_not_empty, same_name, unreadable
from probprompt.engine.learner import Learner
from probprompt.engine.loader import TaskImages
from probprompt.engine.model import PromptedModel
from probprompt.engine.saved_model import learner_tensors
from probprompt.errors import UserError, shorten
from probprompt.heads.closed_form import ClosedFormHead, RidgeHead
from probprompt.heads.head import Head
from probprompt.progress import ProgressCallback

Existing = Literal["error", "extend"]
FEW = 5  # images of a class below which a warning is given


@dataclass(frozen=True)
class Lesson:
    """Images of one ``learn`` call, their labels in the head's order, and which are held out."""

    loaded: Loaded
    labels: Tensor  # (n,)
    held: Tensor  # (n,) of booleans
    new: tuple[str, ...]
    refined: tuple[str, ...]
    warnings: tuple[str, ...]

    def task(self, old: State, chosen: Tensor | None = None) -> TaskImages:
        """Return the images, or those chosen by booleans (n,), as the next task."""
        rows = (torch.ones_like(self.held) if chosen is None else chosen).nonzero().flatten()
        return TaskImages(len(old.tasks), len(old.classes), len(self.new), rows, self.labels[rows])


def read_lesson(
    engine: ModelFactory, old: State, given: LabeledImages, existing: Existing, progress: ProgressCallback
) -> Lesson:
    """Load images, distinguish new from existing classes, and hold some images out."""
    new, refined = sort_classes(engine, old, given.classes, existing)
    with progress.stage("reading images", len(given.images)):
        loaded = load(given.images, engine.device, progress.advance)
    check_not_empty(given.classes, loaded.labels.tolist(), loaded.unreadable)
    order = (*old.names, *new)
    places = torch.tensor([order.index(name) for name in given.classes], device=engine.device)
    labels = places[loaded.labels]  # (n,)
    held = torch.zeros(len(labels), dtype=torch.bool, device=engine.device)
    few = []
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero().flatten()
        before = len(old.classes[label].held.tensors["rows"]) if label < len(old.classes) else 0
        drawn = hold_out(len(rows), engine.config.seeds.data, len(old.tasks), order[label])
        held[rows[drawn[: 20 - before]]] = True
        if len(rows) < FEW and label >= len(old.classes):
            few.append(f"{order[label]} ({len(rows)})")
    warnings = unreadable(loaded.unreadable)
    if few:
        warnings.append(f"Expect low accuracy for classes with fewer than {FEW} images: {shorten(few)}")
    return Lesson(loaded, labels, held, new, refined, tuple(warnings))


def add_lesson(rest: Statistics, lesson: Lesson, features: Tensor, views: Views) -> Statistics:
    """Add the features (n, V, D or more) of all images that are not held out."""
    rest = rest.grown(len(lesson.new))
    for label in lesson.labels.unique().tolist():
        rest.add_rows(label, features[(lesson.labels == label) & ~lesson.held].flatten(0, 1), views)
    return rest


def with_lesson(
    engine: ModelFactory, old: State, lesson: Lesson, features: Tensor, learner: Learner, name: str, version: int
) -> State:
    """Return the state after a lesson, before it is settled."""
    new, tasks, head = lesson.new, old.tasks, learner.model.head
    parts: dict[str, dict[str, Tensor]] = {"method": {}, "later": {}}
    for key, value in learner_tensors(learner).items():
        if not key.startswith("head."):
            parts["method" if key.startswith(("method.", "backbone.")) else "later"][key] = value
    if new:
        tasks = (*tasks, LearnedTask(name, version, int((lesson.labels >= len(old.classes)).sum())))
    return replace(
        old,
        classes=_extended(engine, old, lesson, features, learner.model),
        tasks=tasks,
        adapted=(*old.adapted, len(new)) if new and engine.adapts(len(old.tasks)) else old.adapted,
        next_uid=old.next_uid + len(new),
        strength=float(head.strength) if isinstance(head, RidgeHead) and not bool(head.strength.isnan()) else None,
        method=Part.of(parts["method"]),
        head=Part.of(_needed(head)),
        later=Part.of(parts["later"]),
    )


def sort_classes(
    engine: ModelFactory, state: State, classes: tuple[str, ...], existing: Existing
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the new classes, and the existing ones that get more images."""
    if existing not in ("error", "extend"):
        raise UserError(f"Unknown value {existing!r} for 'existing'. Expected 'error' or 'extend'.")
    named = {same_name(name): name for name in state.names}
    for name in classes:
        same = named.get(same_name(name))
        if same is not None and same != name:
            raise UserError(f"Class {name!r} differs from the existing class {same!r} only in spelling. Use {same!r}.")
    extended = tuple(name for name in classes if name in state.names)
    if extended and existing == "error":
        raise UserError(
            f"Classes already in the model: {shorten(extended)}. Add these images to them with --existing extend "
            "(existing='extend'), or rename or remove their folders."
        )
    if extended and not engine.closed_form:
        raise UserError(
            f"Cannot add images to {shorten(extended)}: the head {engine.config.head.kind!r} would need the old images "
            "again. Create a model with a closed-form head (ridge, lda or nearest-mean) to do this."
        )
    if extended and engine.adapts(len(state.tasks)):
        raise UserError(
            f"Cannot add images to {shorten(extended)}: prompts are still trained in task {len(state.tasks) + 1}. "
            "Teach new classes first, or create the model with a lower training.adapt_tasks."
        )
    return tuple(name for name in classes if name not in state.names), extended


def _extended(
    engine: ModelFactory, state: State, lesson: Lesson, features: Tensor, model: PromptedModel
) -> tuple[KnownClass, ...]:
    """Return the classes with the stored features of the new images."""
    classes = list(state.classes)
    order = (*state.names, *lesson.new)
    keys = model.known(lesson.loaded.store, torch.arange(len(features), device=features.device)).keys  # (n,)
    for label in lesson.labels.unique().tolist():
        own = lesson.labels == label
        rest, held = features[own & ~lesson.held], dict(zip(VIEWS, features[own & lesson.held].unbind(1), strict=False))
        before = classes[label] if label < len(classes) else None
        earlier = before.rest.tensors if before else {}
        kept = compact(rest.flatten(0, 1), earlier, engine.views, engine.widths)
        if keys is not None:
            held["keys"] = keys[own & lesson.held]
            if "rows" in kept:
                more = keys[own & ~lesson.held].repeat_interleave(features.shape[1])
                kept["keys"] = torch.cat([earlier["keys"].to(more), more]) if earlier else more
        if before is not None:
            held = {view: torch.cat([before.held.tensors[view].to(rows), rows]) for view, rows in held.items()}
        known = KnownClass(
            uid=before.uid if before else state.next_uid + label - len(state.classes),
            name=order[label],
            task=before.task if before else len(state.tasks),
            images=(before.images if before else 0) + int(own.sum()),
            held=Part.of({name: rows if name == "keys" else rows.float() for name, rows in held.items()}),
            rest=Part.of(kept),
        )
        classes[label : label + 1] = [known]  # replace it, or append
    return tuple(classes)


def _needed(head: Head) -> dict[str, Tensor]:
    """Return the tensors of a head that prediction needs."""
    return {name: value for name, value in head.state_dict().items() if name not in head.learning_only}


def unlearned(engine: ModelFactory, state: State, rest: Statistics, head: Head) -> Head:
    """Return a head that has not learned from the held-out images."""
    if not isinstance(head, ClosedFormHead):
        return head
    judge = copy.deepcopy(head)
    engine.solve(judge, rest.solved, state.strength)
    return judge


def held_rows(engine: ModelFactory, state: State) -> list[Tensor]:
    """Return the features (n, D) of the held-out images of each class."""
    return [known.held.tensors["rows"].to(engine.device) for known in state.classes]


@torch.no_grad()
def settle(engine: ModelFactory, state: State, rest: Statistics, judge: Head) -> State:
    """Calibrate a state with the head ``judge``, and add its Gaussians and statistics."""
    held = held_rows(engine, state)
    features = torch.cat(held)  # (h, D)
    labels = torch.cat([torch.full((len(rows),), label) for label, rows in enumerate(held)]).to(engine.device)
    order = torch.from_numpy(randomness.permutation(len(labels), engine.config.seeds.data, "halves")).to(labels.device)
    small = engine.config.head.kind in ("ridge", "nearest-mean")  # logits of about 1
    logits = judge(features)  # (h, C)
    calibration = calibrate(logits[order], labels[order], UNFITTED if small else 1.0)
    scale = Scale.of(Gaussians.of(rest.of["unit"]).score(engine.views["unit"](features)))
    every = engine.with_held_out(state, rest)
    return replace(
        state,
        gaussians=Part.of(Gaussians.of(every.of["unit"]).tensors()),
        sums=Part.of(rest.tensors()),
        calibration=calibration,
        scale=scale,
        held_out=held_out_accuracy(engine, state, logits, labels),
    )


def forget(engine: ModelFactory, state: State, name: str) -> State:
    """Return the state without a class, its head solved from the remaining ones."""
    if not engine.closed_form:
        raise UserError(
            f"Cannot forget {name!r} exactly: the head {engine.config.head.kind!r} was trained on all classes jointly. "
            "Only closed-form heads (ridge, lda, nearest-mean) can forget."
        )
    if engine.adapts(len(state.tasks)):
        raise UserError(
            f"Cannot forget {name!r} yet: prompts are still trained in task {len(state.tasks) + 1}. "
            "Teach new classes first, or create the model with a lower training.adapt_tasks."
        )
    if len(state.classes) == 1:
        raise UserError(f"Cannot forget {name!r}: it is the only class. Teach another class first.")
    remaining = tuple(known for known in state.classes if known.name != name)
    state = replace(state, classes=remaining, sums=None)
    head = engine.build(replace(state, method=None, head=None)).head
    assert isinstance(head, ClosedFormHead)
    rest = engine.sums(state)
    engine.solve(head, engine.with_held_out(state, rest).solved, state.strength)
    state = replace(state, head=Part.of(_needed(head)))
    return settle(engine, state, rest, unlearned(engine, state, rest, head))


MIN_RISK = 0.05  # smaller shares are not reported


@torch.no_grad()
def confusion_risks(engine: ModelFactory, state: State, judge: Head, old: int) -> tuple[ConfusionRisk, ...]:
    """Estimate how often held-out images of old classes are classified as later ones."""
    risks, names = [], state.names
    for label, rows in enumerate(held_rows(engine, state)[:old]):
        if not len(rows):
            continue
        shares = (judge(rows).double() / state.calibration.temperature).softmax(dim=1).mean(dim=0).tolist()  # (C,)
        later = enumerate(shares[old:], old)
        risks += [ConfusionRisk(names[label], names[new], share) for new, share in later if share >= MIN_RISK]
    return tuple(sorted(risks, key=lambda risk: (-risk.share, risk.old, risk.new)))
