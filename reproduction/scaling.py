"""Growth of cost: increase one setting at a time, and measure speed and memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any, cast

import numpy as np
import torch

from probprompt.bench import measure, timing
from probprompt.bench.results import BenchRecord, Curve, Ratio
from probprompt.bench.results import Point as Costs
from probprompt.bench.synthetic import CLASSES, TASKS, Scale, build, cached_backbone, without_download
from probprompt.config import RunConfig, merge, parse_config
from probprompt.engine.build import default_precision, release
from probprompt.errors import UserError, suggest
from probprompt.progress import ProgressCallback

WORSE = 1.15  # an exponent above this is worse than linear; below it may be noise of the measurement
COSTS = {
    "training_s": "training",
    "inference_s": "inference",
    "memory": "memory in training",
    "closing_s": "end of task",
}
"""Costs to which a power law is fitted. Seconds are per image, or per batch where the batch grows."""
LONGEST_CLOSING = {"cuda": 60.0, "cpu": 10.0}  # seconds: longer ends of tasks are not measured
CLOSING = {"tasks": 0, "classes": 2}
"""Axes on which the end of a task is measured, with the power of its growth: a refit takes a step per class."""
SIZES = (0.5, 0.75, 1.0, 1.5, 2.0)  # of the backbone's image size
SMALL_BATCHES = (4, 8, 16, 32, 64)  # for a CPU


@dataclass(frozen=True)
class Axis:
    """A setting that grows."""

    name: str
    label: str
    values: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()  # its names in the settings of methods

    def field(self, config: RunConfig) -> str | None:
        """Return its name in the settings of the method."""
        return next((name for name in self.fields if name in type(config.method).model_fields), None)


AXES = {
    axis.name: axis
    for axis in (
        Axis("tasks", f"tasks, {CLASSES} classes", (5, 10, 20, 50, 100)),
        Axis("classes", f"classes, {TASKS} tasks", (100, 300, 1000, 3000, 10_000)),
        Axis("components", "components N", (5, 10, 20, 40, 80), ("components", "components_per_task")),
        Axis("tokens", "prompt tokens M", (4, 8, 16, 32, 64), ("tokens",)),
        Axis("samples", "samples N_s", (5, 10, 20, 40, 80), ("samples",)),
        Axis("batch", "batch", (8, 16, 32, 64, 128, 256, 512)),
        Axis("image-size", "image size"),
    )
}


@dataclass(frozen=True)
class Point:
    """Costs at one value; None if not measured."""

    value: int
    training_images_per_s: float | None = None
    inference_images_per_s: float | None = None
    memory: int | None = None
    closing_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Exponent:
    """Exponent with which a cost grows."""

    whole: float  # over all points
    end: float  # over the last three, where fixed costs matter less

    @property
    def worse_than_linear(self) -> bool:
        """Whether the cost grows faster than the setting."""
        return max(self.whole, self.end) > WORSE


def find_axes(names: Iterable[str], config: RunConfig) -> list[Axis]:
    """Return the axes of these names; ``all`` means all that the method has."""
    axes: dict[str, Axis] = {}
    for name in names:
        if name == "all":
            axes |= {axis.name: axis for axis in AXES.values() if not axis.fields or axis.field(config)}
        elif name not in AXES:
            raise UserError(f"Unknown setting {name!r}. {suggest(name, [*AXES, 'all'])}")
        elif AXES[name].fields and not AXES[name].field(config):
            raise UserError(f"{config.method.name} has no setting {name}. Remove it from the command.")
        else:
            axes[name] = AXES[name]
    return list(axes.values())


def values_of(axis: Axis, config: RunConfig, device: torch.device) -> tuple[int, ...]:
    """Return the values to measure."""
    if axis.name == "batch" and device.type == "cpu":
        return SMALL_BATCHES
    if axis.name != "image-size":
        return axis.values
    chosen = without_download(config.backbone)
    backbone = cached_backbone(chosen.name, chosen.weights, chosen.image_size)
    (patch, _), size = backbone.model.model.patch_embed.patch_size, backbone.preprocessing.image_size
    return tuple(sorted({max(1, round(size * part / patch)) * patch for part in SIZES}))


def variant(axis: Axis, value: int, config: RunConfig) -> tuple[RunConfig, Scale | None]:
    """Return the settings with one value changed."""
    if axis.name == "tasks":
        return config, Scale.even(value, max(CLASSES, 2 * value))
    if axis.name == "classes":
        return config, Scale.even(TASKS, value)
    changes = {"batch": {"training": {"batch_size": value}}, "image-size": {"backbone": {"image_size": value}}}
    change = changes.get(axis.name, {"method": {axis.field(config): value}})
    return parse_config(merge(config.model_dump(mode="json"), change)), None


def measure_point(
    axis: Axis, value: int, config: RunConfig, device: torch.device, seconds: float, closing: bool
) -> Point:
    """Measure one value, including the end of a task if ``closing``."""
    try:
        changed, scale = variant(axis, value, config)
        setup = build(changed, device, scale)
        trained = measure.training(setup, seconds)
        close = closing or not setup.model.head.trained
        closing_s = timing.timed(setup.close, setup.device) if close else None
        predicted = measure.inference(setup, seconds)
    except torch.OutOfMemoryError:
        return Point(value, note="out of memory")
    return Point(
        value,
        training_images_per_s=trained.rate["images_per_s"] if trained else None,
        inference_images_per_s=predicted["images_per_s"],
        memory=trained.peak if trained else None,
        closing_s=closing_s if closing else None,
    )


def measure_curve(
    axis: Axis, config: RunConfig, device: torch.device, seconds: float, progress: ProgressCallback
) -> Curve:
    """Measure all values of an axis and fit the growth of each cost."""
    values, points = values_of(axis, config, device), list[Point]()
    with progress.stage(axis.name, len(values)):
        if axis.name in CLOSING:  # loading and compiling are not timed
            changed, scale = variant(axis, values[0], config)
            build(changed, device, scale).close()
            release(device)
        for value in values:
            progress.describe(f"{value}")
            points.append(measure_point(axis, value, config, device, seconds, _is_closed(axis, points, value, device)))
            release(device)
            progress.advance(1)
        fitted = fit_exponents(axis, points)
        worse = [cost for cost, exponent in fitted.items() if exponent.worse_than_linear]
        progress.describe(f"worse than linear: {', '.join(COSTS[cost] for cost in worse) or 'nothing'}")
    return {
        "axis": axis.name,
        "label": axis.label,
        "method": config.method.name,
        "backbone": config.backbone.name,
        "precision": config.backbone.precision or default_precision(device),
        "config": config.to_stored(),
        "points": [cast(Costs, asdict(point)) for point in points],
        "exponents": {cost: asdict(exponent) for cost, exponent in fitted.items()},
        "worse_than_linear": worse,
    }


def _is_closed(axis: Axis, points: Sequence[Point], value: int, device: torch.device) -> bool:
    """Return True if the end of a task is measured: the previous value predicts a short time."""
    if not points or axis.name not in CLOSING:
        return axis.name in CLOSING
    last = points[-1]
    growth = (value / last.value) ** CLOSING[axis.name]
    return last.closing_s is not None and last.closing_s * growth < LONGEST_CLOSING[device.type]


def fit_exponents(axis: Axis, points: Sequence[Point]) -> dict[str, Exponent]:
    """Fit the exponent of every cost with two values; the image size counts by pixels."""
    exponents = {}
    for cost in COSTS:
        pairs = [(p.value**2 if axis.name == "image-size" else p.value, _cost(axis, p, cost)) for p in points]
        known = [(float(value), paid) for value, paid in pairs if paid is not None]
        if len(known) > 1:
            exponents[cost] = Exponent(fit_power(known), fit_power(known[-3:]))
    return exponents


def _cost(axis: Axis, point: Point, name: str) -> float | None:
    """Return a cost of a point by its name in :data:`COSTS`."""
    if name in ("memory", "closing_s"):
        return point.memory if name == "memory" else point.closing_s
    speed = point.training_images_per_s if name == "training_s" else point.inference_images_per_s
    return None if speed is None else (point.value if axis.name == "batch" else 1) / speed


def fit_power(points: Sequence[tuple[float, float]]) -> float:
    """Return the exponent a of y = b x^a, fitted to points (x, y) on log axes.

    >>> round(fit_power([(1, 3), (2, 12), (4, 48)]), 6)
    2.0
    """
    places, values = (np.log([pair[axis] for pair in points]) for axis in (0, 1))
    return float(np.polyfit(places, values, 1)[0])


def curve_ratios(before: BenchRecord, now: BenchRecord) -> Iterator[Ratio]:
    """Yield speeds of the curves of both records, as geometric means over shared values."""
    earlier = {(curve["axis"], curve["method"]): curve for curve in before["growth"]}
    for new in now["growth"]:
        curves = (earlier.get((new["axis"], new["method"])), new)
        first, second = ({p["value"]: cast(Mapping[str, Any], p) for p in c["points"]} if c else {} for c in curves)
        for name in ("training", "inference"):
            key = f"{name}_images_per_s"
            pairs = [(first[value][key], point[key]) for value, point in second.items() if value in first]
            known = [pair for pair in pairs if all(pair)]
            if known:
                old, later = map(geometric_mean, zip(*known, strict=True))
                yield Ratio(f"{new['method']}, {new['axis']} growing", f"{name}, images/s, mean", old, later, True)
