"""How cost grows: one setting after another is made larger, all else equal, and the same figures are measured."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from probprompt.bench import measure, timing
from probprompt.bench.synthetic import CLASSES, TASKS, Scale, build, made_backbone, without_download
from probprompt.bench.synthetic import BenchSetup as Workshop
from probprompt.config import RunConfig, merge, parse_config
from probprompt.errors import UserError, suggest
from probprompt.progress import ProgressCallback as Watcher
from probprompt.runs.execute import release, usual_precision

WORSE = 1.15
"""An exponent above this is worse than linear; what is below it could be noise of the measurement."""
COSTS = {
    "training_s": "training",
    "inference_s": "inference",
    "memory": "memory in training",
    "closing_s": "closing a task",
}
"""What is fitted, in words. Seconds are for one image; where the batch grows, for one batch."""
LONGEST_CLOSING = {"cuda": 60.0, "cpu": 10.0}  # seconds: where it would take longer, it is not measured
CLOSING = {"tasks": 0, "classes": 2}
"""On which axes the end of a task is measured, and with which power it may grow: the head is refitted in as many steps
as there are classes, each over all of them."""
SIDES = (0.5, 0.75, 1.0, 1.5, 2.0)  # of the backbone's own image size


@dataclass(frozen=True)
class Axis:
    """Something that grows."""

    name: str
    label: str
    values: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    """The method's setting, under the names that methods have for it."""


AXES = {
    axis.name: axis
    for axis in (
        Axis("tasks", f"tasks, {CLASSES} classes", (5, 10, 20, 50, 100)),
        Axis("classes", f"classes, {TASKS} tasks", (100, 300, 1000, 3000, 10_000)),
        Axis("components", "components N", (5, 10, 20, 40, 80), ("components", "components_per_task")),
        Axis("tokens", "prompt tokens M", (4, 8, 16, 32, 64), ("tokens",)),
        Axis("samples", "samples N_s", (5, 10, 20, 40, 80), ("samples",)),
        Axis("batch", "batch", (8, 16, 32, 64, 128, 256, 512)),
        Axis("image-size", "side of the image"),
    )
}
SMALL_BATCHES = (4, 8, 16, 32, 64)  # for a CPU


@dataclass(frozen=True)
class Point:
    """What was measured at one value; None where it was not."""

    value: int
    training_images_per_s: float | None = None
    inference_images_per_s: float | None = None
    memory: int | None = None
    closing_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Exponent:
    """With which power of what is made larger a cost grows."""

    whole: float
    """Fitted over all points."""
    end: float
    """Fitted over the last three, where a fixed cost hides less of it."""

    @property
    def worse_than_linear(self) -> bool:
        """Whether the cost grows faster than what is made larger."""
        return max(self.whole, self.end) > WORSE


def find_axes(names: Iterable[str], config: RunConfig) -> list[Axis]:
    """The axes of these names; ``all`` means all that the method has."""
    found: dict[str, Axis] = {}
    for name in names:
        if name == "all":
            found |= {axis.name: axis for axis in AXES.values() if not axis.fields or _field(axis, config)}
        elif name not in AXES:
            raise UserError(f"nothing that can grow is called {name!r}: {suggest(name, [*AXES, 'all'])}")
        elif AXES[name].fields and not _field(AXES[name], config):
            raise UserError(f"{config.method.name} has no {name} that could grow: leave that out of --grow")
        else:
            found[name] = AXES[name]
    return list(found.values())


def _field(axis: Axis, config: RunConfig) -> str | None:
    return next((name for name in axis.fields if name in type(config.method).model_fields), None)


def values_of(axis: Axis, config: RunConfig, device: torch.device) -> tuple[int, ...]:
    """The values that are tried."""
    if axis.name == "batch" and device.type == "cpu":
        return SMALL_BATCHES
    if axis.name != "image-size":
        return axis.values
    chosen = without_download(config.backbone)
    backbone = made_backbone(chosen.name, chosen.weights, chosen.image_size)
    (patch, _), size = backbone.model.model.patch_embed.patch_size, backbone.preprocessing.image_size
    return tuple(sorted({max(1, round(size * part / patch)) * patch for part in SIDES}))


def variant(axis: Axis, value: int, config: RunConfig) -> tuple[RunConfig, Scale | None]:
    """The settings with one value changed."""
    if axis.name == "tasks":
        return config, Scale.even(value, max(CLASSES, 2 * value))
    if axis.name == "classes":
        return config, Scale.even(TASKS, value)
    changes = {
        "batch": {"training": {"batch": value}},
        "image-size": {"backbone": {"image_size": value}},
    }
    change = changes.get(axis.name, {"method": {_field(axis, config): value}})
    return parse_config(merge(config.model_dump(mode="json"), change)), None


def measure_point(
    axis: Axis, value: int, config: RunConfig, device: torch.device, seconds: float, closing: bool
) -> Point:
    """Measure one value; ``closing`` measures the end of a task, too."""
    try:
        changed, scale = variant(axis, value, config)
        workshop = build(changed, device, scale)
        trained = measure.training(workshop, seconds)
        closed = _close(workshop) if closing or not workshop.model.head.trained else None
        predicted = measure.inference(workshop, seconds)
    except torch.OutOfMemoryError:
        return Point(value, note="out of memory")
    return Point(
        value,
        training_images_per_s=trained.rate.images_per_s if trained else None,
        inference_images_per_s=predicted.images_per_s,
        memory=trained.memory.peak if trained else None,
        closing_s=closed if closing else None,
    )


def _close(workshop: Workshop) -> float:
    return timing.timed(workshop.close, workshop.device)


def measure_curve(
    axis: Axis, config: RunConfig, device: torch.device, seconds: float, watch: Watcher | None = None
) -> dict[str, Any]:
    """Measure all values of an axis, and fit how each cost grows."""
    watch = watch or Watcher()
    values, points = values_of(axis, config, device), list[Point]()
    with watch.stage(axis.name, len(values)):
        if axis.name in CLOSING:  # what is loaded and compiled for the end of a task is not to be timed
            changed, scale = variant(axis, values[0], config)
            build(changed, device, scale).close()
            release(device)
        for value in values:
            watch.describe(f"{value}")
            closing = axis.name in CLOSING and _affordable(axis, points, value, device)
            points.append(measure_point(axis, value, config, device, seconds, closing))
            release(device)
            watch.advance(1)
        watch.describe(_verdict(exponents(axis, points)))
    precision = config.backbone.precision or usual_precision(device)
    return describe(axis, config, precision, points)


def _affordable(axis: Axis, points: Sequence[Point], value: int, device: torch.device) -> bool:
    """Whether a task can be closed in good time, judged by the value before."""
    if not points:
        return True
    last = points[-1]
    grown = (value / last.value) ** CLOSING[axis.name]
    return last.closing_s is not None and last.closing_s * grown < LONGEST_CLOSING[device.type]


def describe(axis: Axis, config: RunConfig, precision: str, points: Sequence[Point]) -> dict[str, Any]:
    """A curve for the record."""
    fitted = exponents(axis, points)
    return {
        "axis": axis.name,
        "label": axis.label,
        "method": config.method.name,
        "backbone": config.backbone.name,
        "precision": precision,
        "config": config.model_dump(mode="json"),
        "points": [asdict(point) for point in points],
        "exponents": {name: asdict(exponent) for name, exponent in fitted.items()},
        "worse_than_linear": [name for name, exponent in fitted.items() if exponent.worse_than_linear],
    }


def exponents(axis: Axis, points: Sequence[Point]) -> dict[str, Exponent]:
    """The exponent of every cost that was measured at two values or more."""
    found = {}
    for name in COSTS:
        costs = [(amount(axis, point.value), cost(axis, point, name)) for point in points]
        known = [(large, paid) for large, paid in costs if paid is not None]
        if len(known) > 1:
            found[name] = Exponent(fit(known), fit(known[-3:]))
    return found


def amount(axis: Axis, value: int) -> float:
    """What cost is compared with: the value, of a side its square, which is the number of pixels."""
    return float(value**2 if axis.name == "image-size" else value)


def cost(axis: Axis, point: Point, name: str) -> float | None:
    """A cost of a point, by its name in :data:`COSTS`."""
    if name in ("memory", "closing_s"):
        paid: float | None = getattr(point, name)
        return paid
    speed = point.training_images_per_s if name == "training_s" else point.inference_images_per_s
    if speed is None:
        return None
    return (point.value if axis.name == "batch" else 1) / speed


def fit(points: Sequence[tuple[float, float]]) -> float:
    """The exponent a of the power law y = b x^a through points (x, y), by least squares of the logarithms.

    >>> round(fit([(1, 3), (2, 12), (4, 48)]), 6)
    2.0
    """
    places, values = (np.log([pair[axis] for pair in points]) for axis in (0, 1))
    return float(np.polyfit(places, values, 1)[0])


def _verdict(fitted: dict[str, Exponent]) -> str:
    worse = [COSTS[name] for name, exponent in fitted.items() if exponent.worse_than_linear]
    return f"worse than linear: {', '.join(worse)}" if worse else "nothing worse than linear"
