"""Steps on a GPU: captured once per task and then replayed, the frozen pass of the next beside the learning of this.

A small backbone spends more time in launching kernels than in running them. A CUDA graph launches a whole step at
once: the same kernels on the same memory, so what goes in is copied to where the captured step looks for it.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

Optimiser = TypeVar("Optimiser", bound=torch.optim.Optimizer)

SWITCH = "PROBPROMPT_GRAPHS"
"""The environment variable that keeps steps from being captured when it is ``off``."""

WARM_UP = 3
"""Calls that are made the plain way before one is captured: kernels are compiled and moments allocated in them."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """A batch: what is looked at, its labels, and the key of the step's noise as one number."""

    views: tuple[Tensor, ...]  # images (B, 3, H, W), or frozen features (B, D), or what images are cut out by
    labels: Tensor  # (B,)
    seed: Tensor  # (1,)


@cache
def _stream(device: int, role: int) -> torch.cuda.Stream:
    """One stream for each role on a device, for good: what cuBLAS allocates for a stream is never given back.

    The first role goes before the others, which fill what it leaves idle.
    """
    return torch.cuda.Stream(device, priority=0 if role else -1)


class Captured:
    """A function of tensors that is called plainly at first, then captured and replayed.

    What a replay gives lies in captured memory until the next one: who needs it longer must copy it.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], wanted: bool, role: int = 0) -> None:
        self._function, self._wanted = function, wanted and os.environ.get(SWITCH) != "off"
        self.stream = _stream(torch.cuda.current_device(), role) if self._wanted else None
        """Where it is called and captured. What runs side by side needs streams, since cuBLAS has scratch for each."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()
        self._calls = 0
        self.taken: torch.cuda.Event | None = None
        """When the inputs of the last call had been copied."""

    @property
    def warm(self) -> bool:
        """Whether the next call is captured or replayed."""
        return self._wanted and self._calls >= WARM_UP

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the function, one way or the other."""
        if not self._wanted:
            return self._function(*inputs)
        if not self.warm:
            self._calls += 1
            return self._aside(*inputs)
        if self._graph is None:
            self._graph = self._capture(*inputs)
        if self._graph is None:
            return self._function(*inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self.taken = torch.cuda.current_stream().record_event()
        self._graph.replay()
        return self._outputs

    def _aside(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """A plain call on a stream of its own, as capturing asks for."""
        assert self.stream is not None
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = self._function(*inputs)
        current.wait_stream(self.stream)
        return outputs

    def _capture(self, *inputs: Tensor) -> torch.cuda.CUDAGraph | None:
        """Capture the function; one that cannot be is called plainly from now on."""
        self._inputs, graph = tuple(given.clone() for given in inputs), torch.cuda.CUDAGraph()
        try:  # after a failure torch leaves the stream of the capture current: the outer one is put back here
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=self.stream):
                self._outputs = self._function(*self._inputs)
        except RuntimeError as problem:
            self._wanted = False
            warnings.warn(f"a step cannot be captured and runs slower: {problem}", RuntimeWarning, stacklevel=2)
            return None
        return graph


def look_ahead(
    batches: Iterator[Inputs], look: Captured, learn: Captured, pause: torch.cuda.Event | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """What ``learn`` is to be called with, batch by batch: labels, seed, and what ``look`` makes of the views.

    Where both are captured, looking runs beside the learning from the batches before, which it does not depend on. It
    begins at the event that learning records when it comes to a part that leaves the GPU nearly idle.
    """
    while not (look.warm and learn.warm and learn.taken):
        inputs = next(batches, None)
        if inputs is None:
            return
        yield inputs.labels, inputs.seed, *look(*inputs.views)
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
        yield inputs.labels, inputs.seed, *waiting
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


def make_optimiser(
    kind: type[Optimiser], groups: list[dict[str, Any]], device: torch.device, **settings: Any
) -> Optimiser:
    """An optimiser that a captured step can hold: on a GPU its rates lie there, for :func:`set_rate` to change."""
    if device.type != "cpu":
        groups = [{**group, "lr": torch.zeros((), device=device)} for group in groups]
        settings["fused"] = True
        if "capturable" in signature(kind).parameters:
            settings["capturable"] = True
    return kind(groups, **settings)


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Give a group of an optimiser's parameters another rate."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
