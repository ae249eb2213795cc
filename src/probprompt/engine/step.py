"""Steps on a GPU: captured once per task and then replayed, the frozen pass of the next beside the learning of this."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from probprompt.kernels.cuda_graphs import Captured


@dataclass(frozen=True, eq=False)
class Inputs:
    """A batch: what is looked at, its labels, and the key of the step's noise as one number."""

    views: tuple[Tensor, ...]  # images (B, 3, H, W), or frozen features (B, D), or what images are cut out by
    labels: Tensor  # (B,)
    seed: Tensor  # (1,)
    query: tuple[Tensor, ...] = ()  # (B, D), where it is known before


def look_ahead(
    batches: Iterator[Inputs], look: Captured, learn: Captured, pause: torch.cuda.Event | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """What ``learn`` is to be called with, batch by batch: labels, seed, what ``look`` makes of the views, any query.

    Where both are captured, looking runs beside the learning from the batches before, which it does not depend on. It
    begins at the event that learning records when it comes to a part that leaves the GPU nearly idle.
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
    """The same on two streams: what was seen in a batch waits in a place of its own while the next is looked at.

    So looking is up to two batches ahead: it begins with the small kernels at the end of a step, goes on through those
    at the start of the next one, and ends during its pass through the backbone.
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
            there = side.record_event()
            if pause is not None:
                side.wait_event(pause)
            following, seen = _look_at_next(batches, look)
        main.wait_event(there)
        yield inputs.labels, inputs.seed, *waiting, *inputs.query
        inputs = following


def _look_at_next(batches: Iterator[Inputs], look: Captured) -> tuple[Inputs | None, tuple[Tensor, ...]]:
    """The next batch, if there is one, and what is seen in it."""
    inputs = next(batches, None)
    return inputs, look(*inputs.views) if inputs else ()


def _copied(values: tuple[Tensor, ...], places: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy values to places, or to new ones."""
    if not places:
        return tuple(value.clone() for value in values)
    for place, value in zip(places, values, strict=True):
        place.copy_(value)
    return places


@dataclass(frozen=True)
class Schedule:
    """The learning rate at each step of a task, as a function of a base rate.

    ``cosine`` falls from the base to the final rate over the steps really made. ``vq`` is what VQ-Prompt's code
    does: one step at the base rate, then ``frozen_epochs`` at the final rate, then the cosine (counted in real steps,
    where that code counts nominal ones that its config files name). ``vq-epoch`` is its
    schedule for CUB-200: per epoch, the first two epochs at the base rate, ending near a tenth of it.

    >>> schedule = Schedule("cosine", epochs=2, steps_per_epoch=2, final=0.0)
    >>> [round(schedule.rate(step, 1.0), 3) for step in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    >>> quirk = Schedule("vq", epochs=3, steps_per_epoch=2, final=0.0)
    >>> [round(quirk.rate(step, 1.0), 3) for step in range(6)]
    [1.0, 0.0, 0.0, 1.0, 0.854, 0.5]
    """

    kind: Literal["cosine", "vq", "vq-epoch", "constant"]
    epochs: int
    steps_per_epoch: int
    final: float = 1e-6
    frozen_epochs: int = 1

    def rate(self, step: int, base: float) -> float:
        """The rate of the step, counted from 0 at the beginning of the task."""
        if self.kind == "constant":
            return base
        if self.kind == "vq-epoch":
            epoch = max(0, step // self.steps_per_epoch - 1)
            return base * math.cos(99 * math.pi * epoch / (200 * max(1, self.epochs - 1)))
        frozen = self.frozen_epochs * self.steps_per_epoch if self.kind == "vq" else 0
        if 0 < step <= frozen:
            return self.final
        total = self.epochs * self.steps_per_epoch
        begun = frozen + 1 if self.kind == "vq" else 0  # the first step of the cosine
        progress = max(0, step - begun) / max(1, total - frozen)
        return self.final + (base - self.final) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
