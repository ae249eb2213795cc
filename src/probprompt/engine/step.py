"""One optimizer step, the look-ahead on a GPU, and learning rate schedules.

On a GPU, steps are captured once per task and replayed. The frozen pass of the next batch runs next to the current
step.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from probprompt import kernels
from probprompt.backbones.vit import Embedded
from probprompt.engine.loader import Inputs, TaskImages, TaskLoader
from probprompt.heads.linear import LinearHead
from probprompt.kernels.cuda_graphs import Captured
from probprompt.methods import Context, Method
from probprompt.randomness import Noise


class Step:
    """One training step on a batch: forward, backward, and the optimizer."""

    def __init__(self, loader: TaskLoader, head: LinearHead, task: TaskImages, optimizer: torch.optim.AdamW) -> None:
        self.loader, self.model, self.head, self.task, self.optimizer = loader, loader.model, head, task, optimizer
        self.key = self.model.method.step_key
        self.first = task.first if self.model.method.masked else 0
        self.tally = torch.zeros(2, device=loader.device)
        """Sums over the steps so far: the loss, and the share of correct predictions."""
        self.batch, self.world = loader.batch(task), loader.world
        self.own = self.world.part(self.batch)
        """Local rows of the whole batch."""
        self.weight = (self.own.stop - self.own.start) * self.world.size / self.batch
        """Weight of a local mean in the mean over all processes: 1 if parts are equal."""
        captured = kernels.usable(loader.device) and self.world.alone  # without kernels noise needs the host
        looks = self.model.embeds_first
        self.learn, self._look = Captured(self._learn, captured, 0), Captured(self._see, captured and looks, 1)
        self._glance = Captured(self._embed, captured and looks, 1)
        """The look-ahead if queries are known."""
        # An external event is recorded again by every replay.
        self._pause = torch.cuda.Event(external=True) if captured and looks else None

    def ahead(self, batches: Iterator[Inputs], known: bool = False) -> Iterator[tuple[Tensor, ...]]:
        """Yield the arguments of :attr:`learn`, batch by batch."""
        return look_ahead(batches, self._glance if known else self._look, self.learn, self._pause)

    def _see(self, *views: Tensor) -> tuple[Tensor, ...]:
        """Embed images and compute queries; features and inputs of trained backbones pass."""
        model, images = self.model, self.loader.show(*views)
        if images.ndim == 2 or model.backbone.learns:
            return (images,)
        seen = model.backbone.embed(images)
        return self._given(seen, model.query(seen))

    def _embed(self, *views: Tensor) -> tuple[Tensor, ...]:
        """Embed images without computing queries."""
        return self._given(self.model.backbone.embed(self.loader.show(*views)))

    def _given(self, seen: Embedded, query: Tensor | None = None) -> tuple[Tensor, ...]:
        self._parts = (True, seen.qkv is not None, self.model.method.needs_query)
        return tuple(part for part in (seen.tokens, seen.qkv, query) if part is not None)

    def _learn(self, labels: Tensor, seed: Tensor, *seen: Tensor) -> tuple[Tensor, ...]:
        noise = Noise(seed, self.own.start, self.batch)
        context = Context(True, self.task.index, labels, self.task.first, noise)
        self.model.on_the_way_back = None if self._pause is None else self._note_pause
        features, loss = self._features(seen, context)
        self.model.on_the_way_back = None
        logits = logits_from(self.head, features, self.first)  # (B, new), or (B, C) where old classes are compared with
        labels = labels - self.first  # (B,)
        objective = self._weighted(nn.functional.cross_entropy(logits, labels))
        self.optimizer.zero_grad()
        (objective if loss is None else objective + loss).backward()
        self._settle_gradients()
        self.model.method.before_step()
        self.optimizer.step()
        right = self._weighted((logits.argmax(dim=1) == labels).float().mean())
        self.tally += torch.stack([objective.detach(), right])
        return ()

    def _note_pause(self) -> None:
        assert self._pause is not None
        self._pause.record()

    def _features(self, seen: tuple[Tensor, ...], context: Context) -> tuple[Tensor, Tensor | None]:
        """Return the features of a batch, and the method's loss."""
        model = self.model
        if seen[0].ndim == 2:
            return seen[0], None
        if model.backbone.learns:
            features, loss = model.features(seen[0], context)
        else:
            parts = iter(seen)
            tokens, qkv, query = (next(parts) if present else None for present in self._parts)
            assert tokens is not None
            features, loss = model.features(Embedded(tokens, qkv), context, query)
        if loss is not None:
            loss = self.world.size * loss if model.method.sums_loss else self._weighted(loss)
        more = self._feature_loss(features, context)
        return features, loss if more is None else more if loss is None else loss + more

    def _feature_loss(self, features: Tensor, context: Context) -> Tensor | None:
        """Return the method's loss on the features of the whole batch."""
        method, world = self.model.method, self.world
        if world.alone or type(method).feature_loss is Method.feature_loss:
            return method.feature_loss(features, context)
        assert context.labels is not None
        others, labels = (world.gather(part, self.batch) for part in (features, context.labels))
        every = torch.cat([others[: self.own.start], features, others[self.own.stop :]])  # (B of all, D)
        loss = method.feature_loss(every, replace(context, labels=labels))
        # Only local features have a gradient, and gradients are averaged, not added.
        return None if loss is None else world.size * loss

    def _weighted(self, mean: Tensor) -> Tensor:
        """Weight a local mean by its part of the mean over all processes."""
        return mean if self.weight == 1 else self.weight * mean

    def _settle_gradients(self) -> None:
        """Average gradients over the processes, then clip them."""
        limit = self.loader.config.training.clip
        if self.world.alone and limit is None:
            return
        parts = [part for group in self.optimizer.param_groups for part in group["params"] if part.grad is not None]
        self.world.average([part.grad for part in parts])
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(parts, limit)


def logits_from(head: LinearHead, features: Tensor, first: int) -> Tensor:
    """Return logits of the classes from ``first`` on; other rows get no gradient."""
    return head.logits(features, head.weight[first:], head.bias[first:])


def look_ahead(
    batches: Iterator[Inputs], look: Captured, learn: Captured, pause: torch.cuda.Event | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the arguments of ``learn``: labels, seed, what ``look`` returns, any query.

    If both are captured, looking ahead runs next to the training on earlier batches. It starts at the event that the
    step records when it reaches a part that leaves the GPU nearly idle.
    """
    while not (look.warm and learn.warm and learn.taken):
        inputs = next(batches, None)
        if inputs is None:
            return
        yield inputs.labels, inputs.seed, *look(*inputs.views), *inputs.query
    yield from _side_by_side(batches, look, learn, pause)


def _side_by_side(
    batches: Iterator[Inputs], look: Captured, learn: Captured, pause: torch.cuda.Event | None
) -> Iterator[tuple[Tensor, ...]]:
    """Look ahead on a second stream, up to two batches; results are copied to a buffer.

    It starts with the small kernels at the end of a step, continues through the start of the next one, and ends during
    the pass through the backbone.
    """
    main, side = torch.cuda.current_stream(), look.stream
    assert side is not None and learn.taken is not None
    waiting: tuple[Tensor, ...] = ()
    side.wait_event(learn.taken)  # memory that is free by now may have been read until then
    with torch.cuda.stream(side):
        inputs, seen = _look_at_next(batches, look)
    while inputs is not None:
        with torch.cuda.stream(side):
            side.wait_event(learn.taken)
            waiting = _copied(seen, waiting)
            ready = side.record_event()
            if pause is not None:
                side.wait_event(pause)
            following, seen = _look_at_next(batches, look)
        main.wait_event(ready)
        yield inputs.labels, inputs.seed, *waiting, *inputs.query
        inputs = following


def _look_at_next(batches: Iterator[Inputs], look: Captured) -> tuple[Inputs | None, tuple[Tensor, ...]]:
    inputs = next(batches, None)
    return inputs, look(*inputs.views) if inputs else ()


def _copied(values: tuple[Tensor, ...], places: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy values to existing places, or to new ones."""
    if not places:
        return tuple(value.clone() for value in values)
    for place, value in zip(places, values, strict=True):
        place.copy_(value)
    return places


@dataclass(frozen=True)
class Schedule:
    """Learning rate at each step of a task, as a function of a base rate.

    ``cosine`` decays from the base to the final rate over the actual steps. ``vq`` is VQ-Prompt's code: one step at the
    base rate, then ``frozen_epochs`` at the final rate, then the cosine. ``vq-epoch`` is its schedule for CUB-200: per
    epoch, the first two at the base rate, ending near a tenth of it. ``step`` divides the rate by ten after 31 epochs,
    then every 30.

    >>> schedule = Schedule("cosine", epochs=2, steps_per_epoch=2, final=0.0)
    >>> [round(schedule.rate(step, 1.0), 3) for step in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    >>> quirk = Schedule("vq", epochs=3, steps_per_epoch=2, final=0.0)
    >>> [round(quirk.rate(step, 1.0), 3) for step in range(6)]
    [1.0, 0.0, 0.0, 1.0, 0.854, 0.5]
    """

    kind: Literal["cosine", "vq", "vq-epoch", "step", "constant"]
    epochs: int
    steps_per_epoch: int
    final: float = 1e-6
    frozen_epochs: int = 1

    def rate(self, step: int, base: float) -> float:
        """Return the learning rate of a step, counted from 0 at the start of the task."""
        if self.kind == "constant":
            return base
        epoch = max(0, step // self.steps_per_epoch - 1)  # timm's schedulers are also late by one
        if self.kind == "step":
            return base * 0.1 ** (epoch // 30)
        if self.kind == "vq-epoch":
            return base * math.cos(99 * math.pi * epoch / (200 * max(1, self.epochs - 1)))
        frozen = self.frozen_epochs * self.steps_per_epoch if self.kind == "vq" else 0
        if 0 < step <= frozen:
            return self.final
        total = self.epochs * self.steps_per_epoch
        start = frozen + 1 if self.kind == "vq" else 0  # first step of the cosine
        progress = max(0, step - start) / max(1, total - frozen)
        return self.final + (base - self.final) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
