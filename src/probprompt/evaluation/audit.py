"""Leakage checks: a prediction must not depend on its batch or on classes not yet seen.

Some published code lets the images of a test batch vote on their prompts, or gives an image the prompts of others in
its batch. Test batches usually come from one task, so this reveals the task. Here each image is predicted alone, then
again in batches that differ in size, other images, order and tasks.

The difference of an image is the largest change of its logits, divided by the spread of the logits: the mean over
images of the largest minus the smallest logit. Rounding depends on the shape of a batch, so small differences pass. In
bf16 that hides weak leaks. Prompts are therefore also compared, from bit-exact queries and with fp32 tolerance.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from probprompt import randomness
from probprompt.backbones.vit import Precision
from probprompt.engine.model import PromptedModel
from probprompt.errors import UserError
from probprompt.evaluation.diagnostics import injected_tokens
from probprompt.methods import EVALUATION, Context, Method, Prompted
from probprompt.randomness import pixel_key


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference as a share of the spread, and share of images that may exceed it."""

    difference: float
    share: float = 0.0

    def images(self, count: int) -> int:
        """Return the number of images that may exceed it: at least one if any may.

        >>> [Tolerance(0.1, share).images(64) for share in (0.0, 0.01, 0.1)]
        [0, 1, 6]
        """
        return max(1, int(self.share * count)) if self.share else 0


TOLERANCES: dict[Precision, Tolerance] = {"fp32": Tolerance(1e-3), "bf16": Tolerance(0.1, share=0.1)}
"""Tolerances by the precision of the backbone's weights.

In fp32 the batch size changes logits by about 1e-6 of their spread. Going from fp32 to bf16 changes them by about 0.01
and at most 0.03. Nearly tied prompts may swap, which changes an image by 0.2, so a share of images may exceed it.
"""

LABELS = {"batch mates": "other images", "task-pure batches": "one-task batches"}
LABELS |= {"repeated": "repeatability", "nothing told": "no task labels"}
"""Displayed names of checks, where these differ from the names in files."""
_HUGE = 1e9  # replaces differences that are not finite
BATCH, ODD_BATCH = 16, 7
CHECKS = 9  # number of checks in an audit


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    question: str  # what was compared
    images: int = 0
    worst: float | None = None  # largest difference of an image, as a share of the spread of the logits
    share: float | None = None  # share of images beyond the tolerance
    changed: int | None = None  # number of images whose predicted class changed
    tolerance: float | None = None
    allowed_share: float | None = None
    passed: bool | None = None  # None if the check does not apply
    note: str = ""

    @property
    def label(self) -> str:
        """Displayed name."""
        return LABELS.get(self.name, self.name)


@dataclass(frozen=True)
class Audit:
    """Result of all checks."""

    precision: Precision
    device: str
    images: int
    classes: int
    tasks: int
    batch: int
    spread: float
    """Mean over images of the largest minus the smallest logit, predicted alone."""
    checks: tuple[Check, ...]

    @property
    def tolerance(self) -> Tolerance:
        """Tolerance in this precision."""
        return TOLERANCES[self.precision]

    @property
    def passed(self) -> bool:
        """True if nothing leaks."""
        return not self.leaks

    @property
    def leaks(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.passed is False)

    @property
    def verdict(self) -> str:
        """Outcome as text."""
        return "no leaks" if self.passed else f"leaks: {', '.join(LABELS.get(name, name) for name in self.leaks)}"

    def also(self, check: Check) -> "Audit":
        """Add a check."""
        return replace(self, checks=(*self.checks, check))

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        tolerance = {"tolerance": self.tolerance.difference, "allowed_share": self.tolerance.share}
        return {"passed": self.passed, "leaks": list(self.leaks), **tolerance, **asdict(self)}


@torch.no_grad()
def audit(
    model: PromptedModel,
    images: Tensor,
    tasks: Tensor,
    classes: int,
    strangers: Tensor | None = None,
    keys: Tensor | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Audit:
    """Predict images (n, 3, H, W) of known tasks (n,) in several ways, and compare.

    ``classes`` have been learned; ``strangers`` (m, 3, H, W) are images of others. Methods that need ``keys`` (n,) get
    hashes of the stored pixels, by default of the images.
    """
    if len(images) < 2:
        raise UserError(f"An audit needs at least 2 images, got {len(images)}.")
    contexts, prompts = list[Context](), model.method.prompts

    def recorded(query: Tensor | None, context: Context) -> Prompted:
        contexts.append(context)
        return prompts(query, context)

    with mock.patch.object(model.method, "prompts", recorded):
        subject = _Subject(model, images, tasks, TOLERANCES[model.precision], keys)
        steps: tuple[Callable[[], Check], ...] = (
            partial(_outputs, subject, classes),
            partial(_batch_size, subject),
            partial(_other_images, subject),
            partial(_order, subject),
            partial(_one_task_batches, subject),
            partial(_unseen_classes, subject, strangers),
            partial(_prompts, subject),
            partial(_repeated, subject),  # last: a model that adapts to predictions has done so by now
            partial(_no_task_labels, contexts),
        )
        checks = []
        for step in steps:
            checks.append(step())
            advance(1)
    counts = {"images": len(images), "classes": classes, "tasks": len(tasks.unique()), "batch": BATCH}
    return Audit(model.precision, images.device.type, **counts, spread=subject.spread, checks=tuple(checks))


def compare(
    name: str, question: str, variants: Sequence[Tensor], expected: Tensor, spread: float, tolerance: Tolerance
) -> Check:
    """Compare logits (n, C), or other numbers, of several variants with the expected ones."""
    count = len(expected)
    for logits in variants:
        if logits.shape != expected.shape:
            note = f"{logits.shape[1]} logits instead of {expected.shape[1]}"
            return Check(name, question, count, passed=False, note=note)
    every = torch.stack(list(variants))  # (variants, n, C)
    difference = (every - expected).abs().amax(dim=(0, 2)).double() / spread  # (n,)
    difference = difference.nan_to_num(_HUGE, _HUGE).clamp(max=_HUGE)
    beyond = int((difference > tolerance.difference).sum())
    changed = (every.argmax(dim=2) != expected.argmax(dim=1)).any(dim=0)  # (n,)
    worst, share, allowed = float(difference.max()), beyond / count, (tolerance.difference, tolerance.share)
    passed = beyond <= tolerance.images(count)
    return Check(name, question, count, worst, share, int(changed.sum()), *allowed, passed)


def spread_of(logits: Tensor) -> float:
    """Return the mean range of logits (n, C), or their mean size for a single class.

    >>> spread_of(torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.0, 1.0]]))
    2.0
    """
    if not bool(logits.isfinite().all()):
        raise UserError("The model predicts values that are not finite. Train it with a lower training.head_lr.")
    sizes = logits.amax(dim=1) - logits.amin(dim=1) if logits.shape[1] > 1 else logits.abs().amax(dim=1)  # (n,)
    return max(float(sizes.double().mean()), 1e-12)


class _Subject:
    """A model under audit, with images and their predictions alone."""

    def __init__(
        self, model: PromptedModel, images: Tensor, tasks: Tensor, tolerance: Tolerance, keys: Tensor | None
    ) -> None:
        self.model, self.images, self.tolerance = model, images, tolerance
        self.tasks, self.keys = tasks.to(images.device), _hashed(images) if keys is None else keys
        self.rows = torch.arange(len(images), device=images.device)  # (n,)
        self.alone = self.predict_in(self.rows.split(1))  # (n, C)
        self.spread = spread_of(self.alone)

    def predict_in(self, batches: Sequence[Tensor]) -> Tensor:
        """Return logits (n, C) of all images, predicted in these batches of rows."""
        logits = torch.cat([self.predict(self.images[batch], self.keys[batch]) for batch in batches])  # (n, C)
        return logits[torch.cat(list(batches)).argsort()]

    def predict(self, images: Tensor, keys: Tensor) -> Tensor:
        """Return logits (B, C) of images, with keys (B,) if the method needs them."""
        return self.model.predict(images, keys=keys if self.model.method.needs_keys else None)

    def predict_among(self, others_of: Callable[[int], Tensor]) -> Tensor:
        """Return logits (n, C) of images, each among others (k, 3, H, W) at varying positions."""
        logits = []
        for row, image in enumerate(self.images):
            others = others_of(row)
            index = row % (len(others) + 1)
            batch = torch.cat([others[:index], image[None], others[index:]])  # (k + 1, 3, H, W)
            keys = _hashed(others)
            keys = torch.cat([keys[:index], self.keys[row : row + 1], keys[index:]])  # (k + 1,)
            logits.append(self.predict(batch, keys)[index])
        return torch.stack(logits)

    def noise(self, row: int, *key: str) -> Tensor:
        """Return two images of noise."""
        return randomness.normal((2, *self.images.shape[1:]), 0, "audit", *key, row).to(self.images)

    def shuffled(self, rows: Tensor, *key: int | str) -> Tensor:
        """Shuffle row numbers."""
        return rows[torch.from_numpy(randomness.permutation(len(rows), 0, "audit", *key)).to(rows.device)]

    def compare(self, name: str, question: str, variants: Sequence[Tensor], expected: Tensor | None = None) -> Check:
        """Compare with the predictions of each image alone, or with other ones."""
        expected = self.alone if expected is None else expected
        return compare(name, question, variants, expected, self.spread, self.tolerance)


def _outputs(subject: _Subject, classes: int) -> Check:
    question, count = "one logit per learned class", subject.alone.shape[1]
    note = f"{count} logits for {classes} classes"
    return Check("outputs", question, len(subject.rows), passed=count == classes, note=note)


def _batch_size(subject: _Subject) -> Check:
    variants = [subject.predict_in(subject.rows.split(size)) for size in (BATCH, ODD_BATCH)]
    return subject.compare("batch size", f"alone, and in batches of {BATCH} and {ODD_BATCH}", variants)


def _other_images(subject: _Subject) -> Check:
    images, count = subject.images, len(subject.images)
    variants = [
        subject.predict_among(lambda row: images[row][None]),
        subject.predict_among(lambda row: subject.noise(row, "mates")),
        subject.predict_among(lambda row: images[[(row + 1) % count, (row + count // 2) % count]]),
    ]
    return subject.compare("batch mates", "alone, with a copy, with noise, with other images", variants)


def _order(subject: _Subject) -> Check:
    batches = subject.rows.split(BATCH)
    expected = subject.predict_in(batches)
    variants = [
        subject.predict_in([batch.flip(0) for batch in batches]),
        subject.predict_in([subject.shuffled(batch, "order", index) for index, batch in enumerate(batches)]),
    ]
    return subject.compare("order", "a batch, reversed and shuffled", variants, expected)


def _one_task_batches(subject: _Subject) -> Check:
    name, question = "task-pure batches", "batches of one task, and batches shuffled over tasks"
    present = subject.tasks.unique()
    if len(present) < 2:
        return Check(name, question, note="not applicable: images of one task, or of unknown tasks")
    pure = [batch for task in present for batch in subject.rows[subject.tasks == task].split(BATCH)]
    mixed = subject.shuffled(subject.rows, "tasks").split(BATCH)
    return subject.compare(name, question, [subject.predict_in(pure)], subject.predict_in(mixed))


def _unseen_classes(subject: _Subject, strangers: Tensor | None) -> Check:
    name = "unseen classes"
    if strangers is None or not len(strangers):
        logits = subject.predict_among(lambda row: subject.noise(row, "strangers"))
        check = subject.compare(name, "alone, and with noise", [logits])
        return replace(check, note="noise is used: no images of classes not learned yet")
    count = len(strangers)
    logits = subject.predict_among(lambda row: strangers[[row % count, (row + 1) % count]])
    return subject.compare(name, "alone, and with images of classes not learned yet", [logits])


def _prompts(subject: _Subject) -> Check:
    """Compare the prompts of a method for bit-exact queries in different batches."""
    name, question = "prompts", "of equal queries: alone, in batches, reordered, with their opposites"
    method = subject.model.method
    if not method.needs_query:
        return Check(name, question, note="not applicable: the method uses no queries")
    backbone = subject.model.backbone
    queries = torch.cat([backbone.query(image, method.query_readout) for image in subject.images.split(1)])  # (n, D)
    keys = subject.keys
    expected = _injected(method, queries.split(1), keys.split(1))  # (n, P)
    if not expected.numel():
        return Check(name, question, note="not applicable: no prompts")
    variants = [_injected(method, queries.split(size), keys.split(size)) for size in (BATCH, ODD_BATCH)]
    variants.append(_injected(method, queries.flip(0).split(BATCH), keys.flip(0).split(BATCH)).flip(0))
    opposites = [torch.cat([query, -query, -query]) for query in queries.split(1)]
    variants.append(_injected(method, opposites, [torch.cat([key, ~key, -key]) for key in keys.split(1)])[::3])
    return replace(compare(name, question, variants, expected, spread_of(expected), TOLERANCES["fp32"]), changed=None)


def _hashed(images: Tensor) -> Tensor:
    """Return keys (n,) of images (n, 3, H, W) without stored pixels."""
    keys = [pixel_key(image.cpu().float().numpy().view(np.uint8), *image.shape[1:]) for image in images]
    return torch.tensor(keys, device=images.device)


def _injected(method: Method, batches: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
    """Return all injected numbers for each query, (n, P), computed in these batches."""
    rows = []
    for queries, some in zip(batches, keys, strict=True):
        context = Context(keys=some) if method.needs_keys else EVALUATION
        tokens = injected_tokens(method, queries, context).values()  # per block (slots, B, W)
        rows.append(torch.cat([queries[:, :0], *(part.transpose(0, 1).flatten(1) for part in tokens)], dim=1))  # (B, P)
    return torch.cat(rows)


def _repeated(subject: _Subject) -> Check:
    again = subject.predict_in(subject.rows.split(1))
    return subject.compare("repeated", "alone, and alone again after all other checks", [again])


def _no_task_labels(contexts: Sequence[Context]) -> Check:
    """Check that the method got nothing besides queries in any prediction."""
    given = {
        name
        for context in contexts
        for name, value in vars(context).items()
        if value is not None and value is not False and (name != "first" or value)
        if name not in ("draw", "keys")  # the same for all images, and a hash of the image's own pixels
    }
    note = f"the method was given: {', '.join(sorted(given))}" if given else ""
    question = "the method gets no task, labels or noise"
    return Check("nothing told", question, len(contexts), passed=bool(contexts) and not given, note=note)
