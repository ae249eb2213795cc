"""Rates, latencies, the machine's matrix peak, and the shares of a training step."""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, TypedDict
from unittest import mock

import numpy as np
import torch

from probprompt import randomness
from probprompt.backbones.vit import DTYPES, Precision
from probprompt.bench.synthetic import BenchSetup
from probprompt.kernels.cuda_graphs import SWITCH

ROUNDS = 5  # rounds of a measurement, if it has enough calls
MOST_LATENCIES = 2000
PEAK_SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024, 2048)}
PEAK_SECONDS = 0.4  # per size
STAGES = ("data", "query", "prompts", "prompted forward", "backward", "optimiser", "other")
"""Parts of a training step; the patch embedding of both passes belongs to the query."""


class Rate(TypedDict):
    """Work done in a time; the warm-up before it is reported separately."""

    images_per_s: float  # median of the rounds, since other work on the machine may slow one of them
    images: int
    steps: int
    seconds: float
    rounds: Sequence[float]  # images per second in each round
    first_s: float  # seconds of the first call, including compilation and capture
    warm_up_s: float  # seconds before the measurement, including the first call


class Latency(TypedDict):
    """Time for a single image."""

    median_ms: float
    p99_ms: float
    count: int


class Peak(TypedDict):
    """Most operations per second of square matrix products."""

    flops: float
    size: int
    precision: Precision


Work = Callable[[], tuple[int, int]]  # does something once, and returns its number of images and steps


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the work takes, including work on the device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def rate(work: Work, seconds: float, device: torch.device, warm_ups: int = 3) -> Rate:
    """Repeat the work for about this time, after a warm-up."""
    # The warm-up takes at most a fifth of the time, but at least one call after the first.
    warm = [timed(work, device)]
    while len(warm) < warm_ups and (len(warm) < 2 or sum(warm[1:]) < seconds / 5):
        warm.append(timed(work, device))
    calls = max(2, math.ceil(seconds / max(warm[-1], 1e-6)))
    counts = [len(part) for part in np.array_split(range(calls), min(ROUNDS, calls))]
    rounds = [_round(work, count, device) for count in counts]
    speeds = [images / seconds for images, _, seconds in rounds]
    return Rate(
        images_per_s=statistics.median(speeds),
        images=sum(images for images, _, _ in rounds),
        steps=sum(steps for _, steps, _ in rounds),
        seconds=sum(seconds for _, _, seconds in rounds),
        rounds=speeds,
        first_s=warm[0],
        warm_up_s=sum(warm),
    )


def _round(work: Work, calls: int, device: torch.device) -> tuple[int, int, float]:
    """Do the work ``calls`` times without synchronizing; return images, steps and seconds."""
    done: list[tuple[int, int]] = []
    spent = timed(lambda: done.extend(work() for _ in range(calls)), device)
    return sum(images for images, _ in done), sum(steps for _, steps in done), spent


def latency(work: Callable[[int], object], seconds: float, device: torch.device) -> Latency:
    """Time numbered calls one by one for about this time."""
    for number in range(3):
        timed(partial(work, number), device)
    times, start = list[float](), time.perf_counter()
    while len(times) < 2 or (time.perf_counter() - start < seconds and len(times) < MOST_LATENCIES):
        times.append(timed(partial(work, len(times)), device))
    median, tail = (1e3 * float(np.percentile(times, share)) for share in (50, 99))
    return Latency(median_ms=median, p99_ms=tail, count=len(times))


def matrix_peak(device: torch.device, precision: Precision, seconds: float) -> Peak:
    """Measure the best of several sizes of square products, ``seconds`` for each."""
    best = Peak(flops=0.0, size=0, precision=precision)
    for size in PEAK_SIZES[device.type]:
        source = randomness.generator(device, 0, "bench", "matrix")
        square = torch.randn(size, size, device=device, generator=source).to(DTYPES[precision])

        def multiply(square: torch.Tensor = square) -> tuple[int, int]:
            torch.mm(square, square)
            return 1, 1

        products_per_s = rate(multiply, seconds, device)["images_per_s"]
        flops = 2 * size**3 * products_per_s
        if flops > best["flops"]:
            best = Peak(flops=flops, size=size, precision=precision)
        if products_per_s * seconds < 1:
            break  # larger products would take too long
    return best


class Stopwatch:
    """Adds up the time of stages; nested stages count to the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(STAGES[:-1], 0.0)
        self._inside = False

    def around(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that its time counts to the stage."""

        @wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            synchronize(self.device)
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                synchronize(self.device)
                self.seconds[stage] += time.perf_counter() - start
                self._inside = False

        return counted


def shares(setup: BenchSetup, steps: int) -> dict[str, float]:
    """Return the share of each stage in this number of training steps."""
    # Synchronizing at each call slows steps, so the shares come from a separate pass.
    learner, model, device, task = setup.learner, setup.model, setup.device, setup.steps_of(steps)
    watch = Stopwatch(device)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {SWITCH: "off"}))  # replayed steps have no calls to time
        optimizer = learner.optimizer(task)  # a new optimizer makes the engine build a new step
        learner.train_epoch(setup.steps_of(1), 0, optimizer, lambda _: None)
        calls: tuple[tuple[Any, str, str], ...] = (
            (type(learner.viewer), "random", "data"),  # the instance is frozen
            (learner.loader, "_random_views", "data"),
            (model.backbone, "embed", "query"),
            (model.backbone, "query", "query"),
            (model.method, "prompts", "prompts"),
            (model.backbone, "features", "prompted forward"),
            (torch.autograd, "backward", "backward"),
            (optimizer, "zero_grad", "optimiser"),
            (model.method, "before_step", "optimiser"),
            (optimizer, "step", "optimiser"),
        )
        for owner, name, stage in calls:
            stack.enter_context(mock.patch.object(owner, name, watch.around(stage, getattr(owner, name))))
        whole = timed(lambda: learner.train_epoch(task, 0, optimizer, lambda _: None), device)
    parts = {stage: seconds / whole for stage, seconds in watch.seconds.items()}
    return {**parts, STAGES[-1]: 1 - sum(parts.values())}
