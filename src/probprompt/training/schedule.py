"""Learning rates over a task."""

import math
from dataclasses import dataclass
from typing import Literal


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
