"""Proof that a prediction depends on its own image alone: not on the batch it came in, nor on classes not yet seen.

Published code of this field lets the images of a test batch vote on their prompts, or hands an image the prompts of
its batch mates. Since test batches usually come from one task, that tells a model the task. Here every image is first
predicted alone; then it is predicted again in batches that differ in size, mates, order and tasks.

Logits are compared. The difference of an image is the largest |found - expected| over the classes, divided by the
spread of the logits: the mean over images of the largest minus the smallest logit. Rounding depends on the shape of a
batch, so a difference is allowed up to a tolerance. Where the backbone computes in bf16 that hides weak leaks; so the
prompts are compared as well, from queries that are the same to the bit: a method computes in float32 and better, and
what it answers is held to the tolerance of fp32 always.
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
    """How much rounding may do: a difference as part of the spread, and the share of images that may be beyond it."""

    difference: float
    share: float = 0.0

    def images(self, count: int) -> int:
        """How many of so many images may be beyond: one at least, where any may.

        >>> [Tolerance(0.1, share).images(64) for share in (0.0, 0.01, 0.1)]
        [0, 1, 6]
        """
        return max(1, int(self.share * count)) if self.share else 0


TOLERANCES: dict[Precision, Tolerance] = {"fp32": Tolerance(1e-3), "bf16": Tolerance(0.1, share=0.1)}
"""By the precision of the backbone's weights. In fp32 the size of a batch changes logits by about 1e-6 of their spread.
To go from fp32 to bf16 changes them by about 0.01, and by up to 0.03; but where two prompts are nearly tied, either may
be chosen, which changes an image by 0.2: so in bf16 a share of images may be beyond."""

_ENORMOUS = 1e9  # stands for a difference that is no number

BATCH = 16
ODD_BATCH = 7
CHECKS = 9  # how many an audit makes


@dataclass(frozen=True)
class Check:
    """One thing that must not matter, and how much it did."""

    name: str
    question: str
    """What was compared."""
    images: int = 0
    worst: float | None = None
    """The largest difference of an image, as part of the spread of the logits."""
    share: float | None = None
    """The share of images beyond the tolerance."""
    changed: int | None = None
    """Images whose predicted class changed."""
    tolerance: float | None = None
    allowed_share: float | None = None
    passed: bool | None = None
    """None where the question does not arise."""
    note: str = ""


@dataclass(frozen=True)
class Audit:
    """The outcome of all checks, and how they were made."""

    precision: Precision
    device: str
    images: int
    classes: int
    tasks: int
    batch: int
    spread: float
    """The mean over images of the largest minus the smallest logit, of images predicted alone."""
    checks: tuple[Check, ...]

    @property
    def tolerance(self) -> Tolerance:
        """What rounding may do in this precision."""
        return TOLERANCES[self.precision]

    @property
    def passed(self) -> bool:
        """Whether nothing leaks."""
        return not self.leaks

    @property
    def leaks(self) -> tuple[str, ...]:
        """The names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.passed is False)

    def also(self, check: Check) -> "Audit":
        """The same with one more check."""
        return replace(self, checks=(*self.checks, check))

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
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
    """Predict images (n, 3, H, W) of known tasks (n,) in many ways, and compare.

    ``classes`` is the number of classes learned so far; ``strangers`` (m, 3, H, W) are images of classes that were
    not. Where the tasks of the images are not known, all are given as one. ``keys`` (n,) are what the stored pixels of
    the images say to a method that asks for it; of images without any, the hash of what the backbone is given.
    """
    if len(images) < 2:
        raise UserError(f"an audit needs at least 2 images, got {len(images)}")
    told, prompts = list[Context](), model.method.prompts

    def watched(query: Tensor | None, context: Context) -> Prompted:
        told.append(context)
        return prompts(query, context)

    with mock.patch.object(model.method, "prompts", watched):
        subject = _Subject(model, images, tasks, TOLERANCES[model.precision], keys)
        made: tuple[Callable[[], Check], ...] = (
            partial(_outputs, subject, classes),
            partial(_batch_size, subject),
            partial(_batch_mates, subject),
            partial(_order, subject),
            partial(_pure_batches, subject),
            partial(_unseen_classes, subject, strangers),
            partial(_prompts, subject),
            partial(_repeated, subject),  # after all else: a model that adapts to what it predicts has done so by now
            partial(_told, told),
        )
        checks = []
        for check in made:
            checks.append(check())
            advance(1)
    return Audit(
        precision=model.precision,
        device=images.device.type,
        images=len(images),
        classes=classes,
        tasks=len(tasks.unique()),
        batch=BATCH,
        spread=subject.spread,
        checks=tuple(checks),
    )


def compare(
    name: str, question: str, found: Sequence[Tensor], expected: Tensor, spread: float, tolerance: Tolerance
) -> Check:
    """Compare logits (n, C), or other numbers, found in one or several other ways with those expected."""
    for logits in found:
        if logits.shape != expected.shape:
            note = f"{logits.shape[1]} logits instead of {expected.shape[1]}"
            return Check(name, question, len(expected), passed=False, note=note)
    every = torch.stack(list(found))  # (ways, n, C)
    difference = (every - expected).abs().amax(dim=(0, 2)).double() / spread  # (n,)
    difference = difference.nan_to_num(_ENORMOUS, _ENORMOUS).clamp(max=_ENORMOUS)
    beyond = int((difference > tolerance.difference).sum())
    changed = (every.argmax(dim=2) != expected.argmax(dim=1)).any(dim=0)  # (n,)
    return Check(
        name,
        question,
        images=len(expected),
        worst=float(difference.max()),
        share=beyond / len(expected),
        changed=int(changed.sum()),
        tolerance=tolerance.difference,
        allowed_share=tolerance.share,
        passed=beyond <= tolerance.images(len(expected)),
    )


def spread_of(logits: Tensor) -> float:
    """The mean over images of the largest minus the smallest logit (n, C); of its size where there is but one class.

    >>> spread_of(torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.0, 1.0]]))
    2.0
    """
    if not bool(logits.isfinite().all()):
        raise UserError("the model predicts numbers that are not finite: it cannot be audited")
    sizes = logits.amax(dim=1) - logits.amin(dim=1) if logits.shape[1] > 1 else logits.abs().amax(dim=1)  # (n,)
    return max(float(sizes.double().mean()), 1e-12)


class _Subject:
    """A model under audit, with images and what it predicts of each alone."""

    def __init__(
        self, model: PromptedModel, images: Tensor, tasks: Tensor, tolerance: Tolerance, keys: Tensor | None
    ) -> None:
        self.model, self.images, self.tolerance = model, images, tolerance
        self.tasks, self.keys = tasks.to(images.device), _hashed(images) if keys is None else keys
        self.rows = torch.arange(len(images), device=images.device)  # (n,)
        self.alone = self.predict_in(self.rows.split(1))  # (n, C)
        self.spread = spread_of(self.alone)

    def predict_in(self, batches: Sequence[Tensor]) -> Tensor:
        """Logits (n, C) of all images, predicted in these batches of row numbers."""
        logits = torch.cat([self.predict(self.images[batch], self.keys[batch]) for batch in batches])  # (n, C)
        return logits[torch.cat(list(batches)).argsort()]

    def predict(self, images: Tensor, keys: Tensor) -> Tensor:
        """Logits (B, C) of images with their keys (B,), where the method asks for these."""
        return self.model.predict(images, keys=keys if self.model.method.needs_keys else None)

    def predict_beside(self, mates: Callable[[int], Tensor]) -> Tensor:
        """Logits (n, C) of all images, each in a batch with its mates (k, 3, H, W), at changing places among them."""
        found = []
        for row, image in enumerate(self.images):
            others = mates(row)
            place = row % (len(others) + 1)
            batch = torch.cat([others[:place], image[None], others[place:]])  # (k + 1, 3, H, W)
            keys = _hashed(others)
            keys = torch.cat([keys[:place], self.keys[row : row + 1], keys[place:]])  # (k + 1,)
            found.append(self.predict(batch, keys)[place])
        return torch.stack(found)

    def noise(self, row: int, *key: str) -> Tensor:
        """Two images of nothing but noise."""
        return randomness.normal((2, *self.images.shape[1:]), 0, "audit", *key, row).to(self.images)

    def shuffled(self, rows: Tensor, *key: int | str) -> Tensor:
        """Row numbers in another order."""
        return rows[torch.from_numpy(randomness.permutation(len(rows), 0, "audit", *key)).to(rows.device)]

    def compare(self, name: str, question: str, found: Sequence[Tensor], expected: Tensor | None = None) -> Check:
        """Compare with what was predicted of each image alone, or with something else."""
        return compare(name, question, found, self.alone if expected is None else expected, self.spread, self.tolerance)


def _outputs(subject: _Subject, classes: int) -> Check:
    question, found = "a logit per class learned, none more", subject.alone.shape[1]
    note = f"{found} logits for {classes} classes"
    return Check("outputs", question, len(subject.rows), passed=found == classes, note=note)


def _batch_size(subject: _Subject) -> Check:
    found = [subject.predict_in(subject.rows.split(size)) for size in (BATCH, ODD_BATCH)]
    return subject.compare("batch size", f"alone, and in batches of {BATCH} and {ODD_BATCH}", found)


def _batch_mates(subject: _Subject) -> Check:
    images, count = subject.images, len(subject.images)
    found = [
        subject.predict_beside(lambda row: images[row][None]),
        subject.predict_beside(lambda row: subject.noise(row, "mates")),
        subject.predict_beside(lambda row: images[[(row + 1) % count, (row + count // 2) % count]]),
    ]
    return subject.compare("batch mates", "alone, beside itself, beside noise, beside other images", found)


def _order(subject: _Subject) -> Check:
    batches = subject.rows.split(BATCH)
    expected = subject.predict_in(batches)
    found = [
        subject.predict_in([batch.flip(0) for batch in batches]),
        subject.predict_in([subject.shuffled(batch, "order", index) for index, batch in enumerate(batches)]),
    ]
    return subject.compare("order", "a batch, the same reversed, the same shuffled", found, expected)


def _pure_batches(subject: _Subject) -> Check:
    name, question = "task-pure batches", "batches of one task, and batches shuffled over tasks"
    present = subject.tasks.unique()
    if len(present) < 2:
        return Check(name, question, note="not applicable: the images are of one task, or their tasks are not known")
    pure = [batch for task in present for batch in subject.rows[subject.tasks == task].split(BATCH)]
    mixed = subject.shuffled(subject.rows, "tasks").split(BATCH)
    return subject.compare(name, question, [subject.predict_in(pure)], subject.predict_in(mixed))


def _unseen_classes(subject: _Subject, strangers: Tensor | None) -> Check:
    name = "unseen classes"
    if strangers is None or not len(strangers):
        found = subject.predict_beside(lambda row: subject.noise(row, "strangers"))
        check = subject.compare(name, "alone, and beside images of no class", [found])
        return replace(check, note="there is no image of a class not learned yet: noise stands for it")
    count = len(strangers)
    found = subject.predict_beside(lambda row: strangers[[row % count, (row + 1) % count]])
    return subject.compare(name, "alone, and beside images of classes not learned yet", [found])


def _prompts(subject: _Subject) -> Check:
    """Ask the method alone, in batches of queries that are the same to the bit."""
    name, question = "prompts", "of the same queries: alone, in batches, in another order, beside their opposites"
    method = subject.model.method
    if not method.needs_query:
        return Check(name, question, note="not applicable: the method is asked without queries")
    backbone = subject.model.backbone
    queries = torch.cat([backbone.query(image, method.query_readout) for image in subject.images.split(1)])  # (n, D)
    keys = subject.keys
    expected = _injected(method, queries.split(1), keys.split(1))  # (n, P)
    if not expected.numel():
        return Check(name, question, note="not applicable: nothing is injected")
    found = [_injected(method, queries.split(size), keys.split(size)) for size in (BATCH, ODD_BATCH)]
    found.append(_injected(method, queries.flip(0).split(BATCH), keys.flip(0).split(BATCH)).flip(0))
    crowds = [torch.cat([query, -query, -query]) for query in queries.split(1)]
    found.append(_injected(method, crowds, [torch.cat([key, ~key, -key]) for key in keys.split(1)])[::3])
    return replace(compare(name, question, found, expected, spread_of(expected), TOLERANCES["fp32"]), changed=None)


def _hashed(images: Tensor) -> Tensor:
    """Keys (n,) of images (n, 3, H, W) that nothing is stored of."""
    keys = [pixel_key(image.cpu().float().numpy().view(np.uint8), *image.shape[1:]) for image in images]
    return torch.tensor(keys, device=images.device)


def _injected(method: Method, batches: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
    """All numbers that are injected for each query, (n, P), the method being asked in these batches."""
    rows = []
    for queries, some in zip(batches, keys, strict=True):
        context = Context(keys=some) if method.needs_keys else EVALUATION
        tokens = injected_tokens(method, queries, context).values()  # per block (slots, B, W)
        rows.append(torch.cat([queries[:, :0], *(part.transpose(0, 1).flatten(1) for part in tokens)], dim=1))  # (B, P)
    return torch.cat(rows)


def _repeated(subject: _Subject) -> Check:
    again = subject.predict_in(subject.rows.split(1))
    return subject.compare("repeated", "alone, and alone again after all the others", [again])


def _told(contexts: Sequence[Context]) -> Check:
    """What the method was given besides queries, in all predictions of the audit."""
    given = {
        name
        for context in contexts
        for name, value in vars(context).items()
        if value is not None and value is not False and (name != "first" or value)
        if name not in ("draw", "keys")  # all images have the same; the audit makes them of the image's own pixels
    }
    note = f"the method was told: {', '.join(sorted(given))}" if given else ""
    question = "neither task, labels nor noise are given to the method"
    return Check("nothing told", question, len(contexts), passed=bool(contexts) and not given, note=note)
