"""Synthetic setup: random images, and the engine in the middle of its tasks."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from torch import Tensor

from probprompt import randomness
from probprompt.backbones import pretrained
from probprompt.backbones.pretrained import RANDOM, LoadedBackbone, load_backbone
from probprompt.config import BackboneConfig, RunConfig
from probprompt.data.image_store import ImageStore, Loaded
from probprompt.data.images import Pixels
from probprompt.data.transforms import enlarged
from probprompt.engine.build import build_model, build_preprocessor
from probprompt.engine.learner import Learner
from probprompt.engine.loader import TaskImages
from probprompt.engine.model import PromptedModel
from probprompt.errors import UserError
from probprompt.heads.closed_form import ClosedFormHead
from probprompt.heads.linear import AlignmentConfig, ClassStatistics
from probprompt.methods import TaskSummary

TASKS, CLASSES = 10, 200  # ImageNet-R, as in the paper's cost table
FULL_SIDE = 500  # short edge of unscaled photos in pixels
ASPECTS = ((1, 1.0), (1, 1.25), (1, 1.5), (1.25, 1), (1.5, 1))  # height and width over the short edge
STORED = {"cuda": 512, "cpu": 64}  # images in memory; more than fit into the processor's cache
STILL = 1e-9  # learning rate at which nothing diverges


@dataclass(frozen=True)
class Scale:
    """Number of classes in each task."""

    sizes: tuple[int, ...]

    @classmethod
    def even(cls, tasks: int, classes: int) -> Self:
        """Distribute classes evenly over tasks.

        >>> Scale.even(3, 7).sizes
        (3, 2, 2)
        """
        if not 1 <= tasks <= classes:
            raise UserError(f"Cannot split {classes} classes into {tasks} tasks. Expected 1 to {classes} tasks.")
        return cls(tuple(classes // tasks + (index < classes % tasks) for index in range(tasks)))

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the task sizes from the settings, by default of 200 classes."""
        tasks = config.data.tasks
        if tasks is None or isinstance(tasks, int):
            return cls.even(tasks or TASKS, max(CLASSES, 2 * (tasks or TASKS)))
        return cls(tuple(part if isinstance(part, int) else len(part) for part in tasks))

    @property
    def classes(self) -> int:
        """Number of classes of all tasks."""
        return sum(self.sizes)


def without_download(config: BackboneConfig) -> BackboneConfig:
    """Replace weights that would be downloaded by random ones, which cost the same."""
    if config.weights is not None or config.name == "demo":
        return config
    named = {item.name: item.source.rpartition("/")[2] for item in pretrained.known()}
    architecture = named.get(config.name, config.name).partition(".")[0]
    return config.model_copy(update={"name": architecture, "weights": RANDOM})


def measurable(config: RunConfig) -> RunConfig:
    """Lower the learning rates so that nothing diverges, and refits to one epoch."""
    method, once = config.method, {"epochs": 1}
    refits = {name: value.model_copy(update=once) for name, value in method if isinstance(value, AlignmentConfig)}
    still = {"head_lr": STILL, "prompt_lr_scale": 1.0, "min_lr": 0.0}
    return config.model_copy(
        update={
            "backbone": without_download(config.backbone),
            "method": method.model_copy(update=refits),
            "training": config.training.model_copy(update=still),
            "alignment": config.alignment.model_copy(update={**once, "lr": STILL, "first_lr": None}),
        }
    )


def random_images(count: int, short_side: int) -> list[Pixels]:
    """Return noise in the shapes of photos with this short edge in pixels."""
    side = math.ceil(1.5 * short_side)
    noise = randomness.stream(0, "bench", "images").bytes(3 * (side + count) * side)
    canvas = np.frombuffer(noise, dtype=np.uint8).reshape(side + count, side, 3)
    shapes = [(round(short_side * height), round(short_side * width)) for height, width in ASPECTS]
    shapes = [shapes[index % len(shapes)] for index in range(count)]
    return [np.ascontiguousarray(canvas[row : row + height, :width]) for row, (height, width) in enumerate(shapes)]


@dataclass(frozen=True)
class BenchSetup:
    """The engine with a started task, and images for it."""

    config: RunConfig
    device: torch.device
    backbone: LoadedBackbone
    learner: Learner
    task: TaskImages  # current task: the last that trains prompts, with one image per class
    later: int  # number of classes of later tasks
    images_bytes: int  # memory of the images
    held_before: int  # memory that the device held before the setup

    @property
    def model(self) -> PromptedModel:
        """The model."""
        return self.learner.model

    def predict(self, rows: Tensor) -> None:
        """Predict images (n,) from their pixels."""
        images, viewer = self.learner.images.store, self.learner.viewer
        self.model.predict(viewer.evaluation(images, rows), keys=self.model.known(images, rows).keys)

    def close(self) -> None:
        """End the task as the engine does; a closed-form head also learns later classes."""
        self.learner.finish(self.task, lambda _: None)
        head, seen = self.model.head, self.task.first + self.task.classes
        if isinstance(head, ClosedFormHead) and self.later:
            _learn_random(head, seen, self.later, self.device)

    def steps_of(self, steps: int) -> TaskImages:
        """Return the task with images for this number of batches, repeated if necessary."""
        return self.rows_of(steps * self.config.training.batch_size)

    def rows_of(self, count: int) -> TaskImages:
        """Return the task with this number of images, its classes in turn."""
        rows = torch.arange(count, device=self.device)
        labels = self.task.first + rows % self.task.classes
        return replace(self.task, rows=rows % len(self.learner.images.store), labels=labels)


@lru_cache(maxsize=1)
def cached_backbone(name: str, weights: str | None, image_size: int | None) -> LoadedBackbone:
    """Load a backbone, cached: drawing random weights can take longer than measuring."""
    return load_backbone(name, weights, image_size)


def fresh_backbone(name: str, weights: str | None, image_size: int | None) -> LoadedBackbone:
    """Return a copy of the cached backbone, for a measurement to change."""
    cached = cached_backbone(name, weights, image_size)
    return replace(cached, model=deepcopy(cached.model))


def build(config: RunConfig, device: torch.device, scale: Scale | None = None) -> BenchSetup:
    """Set up the engine, and go through all tasks before the measured one without training."""
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    config, scale = measurable(config), scale or Scale.of(config)
    chosen = config.backbone
    backbone = fresh_backbone(chosen.name, chosen.weights, chosen.image_size)
    side = enlarged(backbone.preprocessing.image_size)
    arrays = random_images(STORED[device.type], config.data.short_side(side) or FULL_SIDE)
    loaded = Loaded(ImageStore.of(arrays, device), torch.zeros(len(arrays), dtype=torch.long, device=device), ())
    model = build_model(config, backbone, device)
    learner = Learner(model, loaded, build_preprocessor(config, backbone, device, side), config)
    tasks = _tasks(Scale((scale.classes,)) if learner.model.method.joint else scale, len(arrays), device)
    task = _go_to(learner, tasks)
    later, images = scale.classes - task.first - task.classes, sum(array.nbytes for array in arrays)
    return BenchSetup(config, device, backbone, learner, task, later, images, held)


def _tasks(scale: Scale, stored: int, device: torch.device) -> list[TaskImages]:
    """Return all tasks with one image per class."""
    tasks = []
    for index, classes in enumerate(scale.sizes):
        first, rows = sum(scale.sizes[:index]), torch.arange(classes, device=device)
        tasks.append(TaskImages(index, first, classes, rows % stored, first + rows))
    return tasks


def _go_to(learner: Learner, tasks: Sequence[TaskImages]) -> TaskImages:
    """Start the last task that trains prompts, after earlier ones with random features."""
    adapted = [task for task in tasks if learner.adapts(task)] or list(tasks)
    method, last = learner.model.method, adapted[-1]
    for task in adapted[:-1]:
        learner.begin(task)
        method.end_task(_random_summary(learner, task) if method.needs_summary else None)
    learner.begin(last)
    clusters, width = learner.statistics.centroids, learner.model.backbone.width
    mean, variance = (_random(learner.device, last.first, clusters, width) for _ in range(2))
    learner.statistics = ClassStatistics(mean, variance)  # (C before the task, K, D) each
    head = learner.model.head
    if isinstance(head, ClosedFormHead) and last.first:
        _learn_random(head, 0, last.first, learner.device)
    return last


def _learn_random(head: ClosedFormHead, first: int, classes: int, device: torch.device) -> None:
    """Teach a closed-form head classes of two random images each."""
    labels = torch.arange(first, first + classes, device=device).repeat(2)
    head.learn(_random(device, len(labels), head.width), labels, classes, first)


def _random(device: torch.device, *shape: int) -> Tensor:
    return randomness.uniform(shape, 0, "bench", "features").to(device)


def _random_summary(learner: Learner, task: TaskImages) -> TaskSummary:
    width = learner.model.backbone.width
    features, logits = (_random(learner.device, len(task), size) for size in (width, task.classes))
    queries = features if learner.model.method.needs_query else None
    return TaskSummary(task.index, task.first, task.classes, task.labels, queries, features, logits)
