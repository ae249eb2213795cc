"""One method on one backbone: all figures of a benchmark, measured through the engine."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from probprompt.backbone import Precision
from probprompt.bench import memory, stages, timing
from probprompt.bench.flops import Count, flops
from probprompt.bench.memory import MemoryUse
from probprompt.bench.timing import Latency, Peak, Rate
from probprompt.bench.workshop import Workshop, build
from probprompt.config import RunConfig
from probprompt.methods import EVALUATION
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs.execute import release

MOST_STEPS = 40  # of an epoch: as many as a tenth of CIFAR-100 has in batches of 128
EPOCHS_TIMED = 4  # what the time is meant for
EPOCH_IMAGES = 24_000  # of ImageNet-R's training set: what the paper's time per epoch is about
STAGE_STEPS = {"cuda": 8, "cpu": 2}
STATIC_STEPS = {"cuda": MOST_STEPS, "cpu": 4}  # of an epoch on features that are kept: it has one length
PARTS = ("training", "stages", "inference", "latency", "frozen pass")
"""What is measured, one after the other."""


@dataclass(frozen=True)
class Training:
    """How fast a task is trained, and what that takes."""

    rate: Rate
    memory: MemoryUse


def training(workshop: Workshop, seconds: float) -> Training | None:
    """Epochs of the engine: data path, both passes, the way back, the optimiser. None where nothing is trained."""
    if workshop.learner.epochs(workshop.task) == 0:
        return None
    epochs, found = Epochs(workshop), list[Rate]()
    if workshop.device.type == "cuda":
        used = memory.watched(workshop, lambda: found.append(_epochs_per_s(epochs, seconds)))
    else:
        found.append(_epochs_per_s(epochs, seconds))
        used = memory.followed(workshop, epochs.optimiser, lambda: epochs(epochs.shortest))
    return Training(found[0], used)


def _epochs_per_s(epochs: "Epochs", seconds: float) -> Rate:
    """Find a length of an epoch that lets several be made in the time, then make them."""
    device, shortest = epochs.workshop.device, epochs.shortest
    first, again = (timing.timed(lambda: epochs(shortest), device) for _ in range(2))
    steps = shortest
    if not epochs.workshop.model.static:
        # On a GPU the first steps tell nothing of the later ones: kernels are still compiled, and no step captured.
        wanted = MOST_STEPS if device.type == "cuda" else math.ceil(seconds / EPOCHS_TIMED / again)
        steps = max(1, min(MOST_STEPS, wanted))
    measured = timing.rate(lambda: epochs(steps), seconds, device, warm_ups=2)
    return replace(measured, first_s=first, warm_up_s=first + again + measured.warm_up_s)


class Epochs:
    """Trains one epoch after another, and counts what it did."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop, self.optimiser = workshop, workshop.learner.optimiser(workshop.task)
        self.shortest = STATIC_STEPS[workshop.device.type] if workshop.model.static else 1
        """Steps of the shortest epoch that can be made."""
        self._number = 0

    def __call__(self, steps: int) -> tuple[int, int]:
        """Train an epoch of so many steps; the images and steps that were made."""
        made: list[int] = []
        training = self.workshop.config.training
        number, task = self._number % training.epochs, self.workshop.steps_of(steps)
        self.workshop.learner.train_epoch(task, number, self.optimiser, made.append)
        self._number += 1
        return sum(made) * training.batch, sum(made)


def inference(workshop: Workshop, seconds: float) -> Rate:
    """Predictions in batches: evaluation views, query, prompted pass, head."""
    batch = workshop.config.training.batch
    rows = workshop.rows_of(batch).rows

    def predict() -> tuple[int, int]:
        workshop.model.predict(workshop.learner.viewer.evaluation(workshop.learner.images.store, rows))
        return batch, 1

    return timing.rate(predict, seconds, workshop.device)


def latency(workshop: Workshop, seconds: float) -> Latency:
    """Predictions of one image at a time, from its pixels to its logits."""
    learner, rows = workshop.learner, workshop.rows_of(len(workshop.learner.images.store)).rows

    def predict(number: int) -> None:
        one = rows[number % len(rows)][None]
        workshop.model.predict(learner.viewer.evaluation(learner.images.store, one))

    return timing.latency(predict, seconds, workshop.device)


def frozen_pass(workshop: Workshop, seconds: float) -> Rate:
    """The backbone without prompts on images that are ready."""
    batch, model, learner = workshop.config.training.batch, workshop.model, workshop.learner
    images = learner.viewer.evaluation(learner.images.store, workshop.rows_of(batch).rows)

    def ask() -> tuple[int, int]:
        model.backbone.query(images, model.method.query_readout)
        return batch, 1

    return timing.rate(ask, seconds, workshop.device)


@torch.no_grad()
def count_flops(workshop: Workshop) -> Count:
    """Operations for one image, by the prompts that the method really injects."""
    model = workshop.model
    query = torch.zeros(1, model.backbone.width, device=workshop.device) if model.method.needs_query else None
    prompts = model.method.prompts(query, EVALUATION).prompts
    learns = model.method.trains_backbone and not model.static
    count = flops(model.backbone, prompts, model.method.needs_query, model.method.readout, learns)
    return replace(count, draws=model.method.draws, looks=2 if model.head.mirrored else 1)


class Peaks:
    """The machine's matrix peak in each precision that is asked for, measured once."""

    def __init__(self, device: torch.device, seconds: float = timing.PEAK_SECONDS) -> None:
        self.device, self.seconds = device, min(seconds, timing.PEAK_SECONDS)
        self.found: dict[Precision, Peak] = {}

    def of(self, precision: Precision) -> Peak:
        """The peak in this precision."""
        if precision not in self.found:
            self.found[precision] = timing.matrix_peak(self.device, precision, self.seconds)
        return self.found[precision]


def measure(config: RunConfig, seconds: float, peaks: Peaks, progress: ProgressCallback = SILENT) -> dict[str, Any]:
    """All figures of one method."""
    workshop = build(config, peaks.device)
    peak = peaks.of(workshop.model.precision)

    def next_part(name: str, work: Callable[[], Any]) -> Any:
        progress.describe(name)
        result = work()
        progress.advance(1)
        return result

    trained = next_part(PARTS[0], lambda: training(workshop, seconds))
    shown = next_part(PARTS[1], lambda: _stages(workshop, trained))
    if not workshop.model.head.trained:
        workshop.close()  # it cannot predict before it is solved
    predicted = next_part(PARTS[2], lambda: inference(workshop, seconds))
    alone = next_part(PARTS[3], lambda: latency(workshop, seconds))
    frozen = next_part(PARTS[4], lambda: frozen_pass(workshop, seconds))
    entry = {
        **_about(workshop),
        "training": _rate(trained.rate) if trained else None,
        "inference": _rate(predicted),
        "latency": asdict(alone),
        "frozen_pass": _rate(frozen),
        "memory": _memory(workshop, trained.memory if trained else None),
        "stages": shown,
        **_efficiency(workshop, trained, predicted, peak),
    }
    return {**entry, "cost": _cost(entry)}


def _stages(workshop: Workshop, trained: Training | None) -> dict[str, float] | None:
    if trained is None or workshop.model.static:
        return None  # nothing passes through the backbone
    return stages.shares(workshop, STAGE_STEPS[workshop.device.type])


def _about(workshop: Workshop) -> dict[str, Any]:
    """What was measured."""
    config, model = workshop.config, workshop.model
    return {
        "method": config.method.name,
        "backbone": workshop.backbone.name,
        "precision": model.precision,
        "image_size": workshop.backbone.preprocessing.image_size,
        "batch": config.training.batch,
        "task": workshop.task.index + 1,
        "classes": workshop.task.first + workshop.task.classes,
        "static": model.static,
        "config": config.model_dump(mode="json"),
    }


def _rate(found: Rate) -> dict[str, Any]:
    return {"images_per_s": found.images_per_s, **asdict(found)}


def _memory(workshop: Workshop, used: MemoryUse | None) -> dict[str, Any]:
    """Bytes."""
    method = workshop.model.method
    return {
        "training_peak": used.peak if used else None,
        "training_reserved": used.reserved if used else None,
        "images": workshop.images_bytes,
        "prompts": memory.size_of(method.parameters()),
        "backbone": memory.size_of(workshop.model.backbone.parameters()),
    }


def _efficiency(workshop: Workshop, trained: Training | None, predicted: Rate, peak: Peak) -> dict[str, Any]:
    """Operations for one image, and which share of the machine's peak they were done at."""
    count = count_flops(workshop)
    needed, done = {"inference": count.inference}, {"inference": predicted.images_per_s}
    if trained and not workshop.model.static:  # else no image passes through the backbone while the head learns
        needed["training"], done["training"] = count.training, trained.rate.images_per_s
    shares = {name: operations * done[name] / peak.flops for name, operations in needed.items()}
    parts = {name: getattr(count, name) for name in ("query", "prompted", "backward")}
    return {"passes": count.passes, "flops_per_image": {**parts, **needed}, "share_of_peak": shares}


def _cost(entry: dict[str, Any]) -> dict[str, Any]:
    """The columns of the paper's cost table."""
    used, trained = entry["memory"], entry["training"]
    return {
        "prompts_mb": used["prompts"] / 1e6,
        "with_backbone_mb": (used["prompts"] + used["backbone"]) / 1e6,
        "epoch_s": EPOCH_IMAGES / trained["images_per_s"] if trained else None,
        "fps": 1e3 / entry["latency"]["median_ms"],
    }


def measure_each(
    configs: Sequence[RunConfig], seconds: float, peaks: Peaks, progress: ProgressCallback = SILENT
) -> Iterator[dict[str, Any]]:
    """All figures of several methods, one after the other."""
    for config in configs:
        with progress.stage(config.method.name, len(PARTS)):
            entry = measure(config, seconds, peaks, progress)
            progress.describe(f"{(entry['training'] or entry['inference'])['images_per_s']:,.0f} images/s")
        yield entry
        release(peaks.device)
