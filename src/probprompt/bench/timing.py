"""Stopwatches: how often a piece of work is done in a given time, how long one takes, what the machine can do."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from probprompt import randomness
from probprompt.backbone import DTYPES, Precision

ROUNDS = 5  # that the calls of a measurement are divided into, as far as there are so many
MOST_LATENCIES = 2000
PEAK_SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024, 2048)}
PEAK_SECONDS = 0.4  # for each size


@dataclass(frozen=True)
class Rate:
    """Work done in a time; the warm-up before it is told apart."""

    images: int
    steps: int
    seconds: float
    rounds: tuple[float, ...]
    """Images in a second, in each round of the measurement."""
    first_s: float
    """The very first call, with whatever is compiled or captured in it."""
    warm_up_s: float
    """All that was done before the measurement, the first call included."""

    @property
    def images_per_s(self) -> float:
        """Images in a second: the median of the rounds, since other work on the machine may slow one of them."""
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class Latency:
    """How long one image takes, by itself."""

    median_ms: float
    p99_ms: float
    count: int


@dataclass(frozen=True)
class Peak:
    """The most operations in a second that square matrix products reach."""

    flops: float
    size: int
    precision: Precision


Work = Callable[[], tuple[int, int]]
"""Does something once, and says how many images and steps that was."""


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the work takes, to its end on the device."""
    synchronise(device)
    begun = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - begun


def rate(work: Work, seconds: float, device: torch.device, warm_ups: int = 3) -> Rate:
    """Do the work again and again for about so many seconds, after some calls that are not counted."""
    first = timed(work, device)
    # As much as a fifth of the time is spent on warming up; one call more than the first is the least.
    warm, last = [first], first
    while len(warm) < warm_ups and (len(warm) < 2 or sum(warm[1:]) < seconds / 5):
        last = timed(work, device)
        warm.append(last)
    calls = max(2, math.ceil(seconds / max(last, 1e-6)))
    counts = [len(part) for part in np.array_split(range(calls), min(ROUNDS, calls))]
    rounds = [_round(work, count, device) for count in counts]
    return Rate(
        images=sum(part.images for part in rounds),
        steps=sum(part.steps for part in rounds),
        seconds=sum(part.seconds for part in rounds),
        rounds=tuple(part.images / part.seconds for part in rounds),
        first_s=first,
        warm_up_s=sum(warm),
    )


@dataclass(frozen=True)
class _Round:
    images: int
    steps: int
    seconds: float


def _round(work: Work, calls: int, device: torch.device) -> _Round:
    """Do the work so many times without waiting for the device in between."""
    done: list[tuple[int, int]] = []
    spent = timed(lambda: done.extend(work() for _ in range(calls)), device)
    return _Round(sum(images for images, _ in done), sum(steps for _, steps in done), spent)


def latency(work: Callable[[int], object], seconds: float, device: torch.device) -> Latency:
    """Time calls one by one for about so many seconds; each is given its number."""
    for number in range(3):
        timed(partial(work, number), device)
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < 2 or (time.perf_counter() - begun < seconds and len(found) < MOST_LATENCIES):
        found.append(timed(partial(work, len(found)), device))
    median, tail = (1e3 * float(np.percentile(found, share)) for share in (50, 99))
    return Latency(median, tail, len(found))


def matrix_peak(device: torch.device, precision: Precision, seconds: float) -> Peak:
    """Measure the machine's matrix peak: the best of several sizes of square products, so many seconds for each."""
    best = Peak(0.0, 0, precision)
    for size in PEAK_SIZES[device.type]:
        source = randomness.generator(device, 0, "bench", "matrix")
        square = torch.randn(size, size, device=device, generator=source).to(DTYPES[precision])

        def multiply(square: torch.Tensor = square) -> tuple[int, int]:
            torch.mm(square, square)
            return 1, 1

        products_per_s = rate(multiply, seconds, device).images_per_s
        best = max(best, Peak(2 * size**3 * products_per_s, size, precision), key=lambda peak: peak.flops)
        if products_per_s * seconds < 1:
            break  # larger ones would take too long
    return best
