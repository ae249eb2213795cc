"""Where the time of a training step goes: timers around the engine's own calls, the device waited for at each.

Waiting makes the steps slower, and a step that is otherwise captured and replayed whole is made call by call, so this
is a pass of its own: its shares tell where to look, its sum is no measure of speed.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from probprompt.bench.timing import synchronise
from probprompt.bench.workshop import Workshop
from probprompt.capture import SWITCH

STAGES = ("data", "query", "prompts", "prompted forward", "backward", "optimiser", "other")
"""What the time is shared among. The embedding of patches, which both passes share, belongs to the query."""


class Stopwatch:
    """Adds up the time of stages; inside one, no other begins."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(STAGES[:-1], 0.0)
        self._inside = False

    def around(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, its time counted to the stage."""

        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            synchronise(self.device)
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                synchronise(self.device)
                self.seconds[stage] += time.perf_counter() - begun
                self._inside = False

        return counted


def _calls(workshop: Workshop, optimiser: torch.optim.Optimizer) -> list[tuple[Any, str, str]]:
    """Which call belongs to which stage: its owner, its name, the stage."""
    learner, model = workshop.learner, workshop.model
    return [
        (learner.viewer, "random", "data"),
        (learner, "_random_views", "data"),
        (model.backbone, "embed", "query"),
        (model.backbone, "query", "query"),
        (model.method, "prompts", "prompts"),
        (model.backbone, "features", "prompted forward"),
        (torch.autograd, "backward", "backward"),
        (optimiser, "zero_grad", "optimiser"),
        (model.method, "before_step", "optimiser"),
        (optimiser, "step", "optimiser"),
    ]


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put another value in the place of an attribute of an object or a module, for a while."""
    own = vars(owner)
    before = own.get(name)
    own[name] = value
    try:
        yield
    finally:
        if before is None:
            del own[name]
        else:
            own[name] = before


@contextmanager
def _plain_steps() -> Iterator[None]:
    """Keep the engine from capturing steps that begin now: a replayed one cannot be timed call by call."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "off"
    try:
        yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def shares(workshop: Workshop, steps: int) -> dict[str, float]:
    """The share of each stage in so many training steps."""
    learner, device, task = workshop.learner, workshop.device, workshop.steps_of(steps)
    watch = Stopwatch(device)
    with ExitStack() as stack:
        stack.enter_context(_plain_steps())
        optimiser = learner.optimiser(task)  # a new one, so that the engine makes its step anew
        learner.train_epoch(workshop.steps_of(1), 0, optimiser, lambda _: None)
        for owner, name, stage in _calls(workshop, optimiser):
            stack.enter_context(_replaced(owner, name, watch.around(stage, getattr(owner, name))))
        synchronise(device)
        begun = time.perf_counter()
        learner.train_epoch(task, 0, optimiser, lambda _: None)
        synchronise(device)
        whole = time.perf_counter() - begun
    found = {stage: seconds / whole for stage, seconds in watch.seconds.items()}
    return {**found, STAGES[-1]: 1 - sum(found.values())}
