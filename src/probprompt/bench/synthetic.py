"""Something to measure: random images in memory, and the engine that users run, in the middle of its tasks."""

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

TASKS, CLASSES = 10, 200  # of ImageNet-R, on which the paper's cost table is measured
FULL_SIDE = 500  # pixels: the short side of a photograph that was stored as it is
ASPECTS = ((1, 1.0), (1, 1.25), (1, 1.5), (1.25, 1), (1.5, 1))  # height and width over the short side
STORED = {"cuda": 512, "cpu": 64}  # images in memory: more than a cache of the processor holds
STILL = 1e-9  # a learning rate at which nothing diverges, however long it is measured


@dataclass(frozen=True)
class Scale:
    """How many classes there are, in how many tasks."""

    sizes: tuple[int, ...]

    @classmethod
    def even(cls, tasks: int, classes: int) -> Self:
        """As many classes in each task, as far as that goes.

        >>> Scale.even(3, 7).sizes
        (3, 2, 2)
        """
        if not 1 <= tasks <= classes:
            raise UserError(f"{classes} classes cannot be cut into {tasks} tasks: each needs one at least")
        return cls(tuple(classes // tasks + (index < classes % tasks) for index in range(tasks)))

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The tasks that are set: their number (of 200 classes), or their sizes."""
        tasks = config.data.tasks
        if tasks is None or isinstance(tasks, int):
            return cls.even(tasks or TASKS, max(CLASSES, 2 * (tasks or TASKS)))
        return cls(tuple(part if isinstance(part, int) else len(part) for part in tasks))

    @property
    def classes(self) -> int:
        """Classes of all tasks."""
        return sum(self.sizes)


def without_download(config: BackboneConfig) -> BackboneConfig:
    """Random weights for an architecture whose weights are not given: they cost the same, and none is fetched."""
    if config.weights is not None or config.name == "demo":
        return config
    named = {item.name: item.source.rpartition("/")[2] for item in pretrained.known()}
    architecture = named.get(config.name, config.name).partition(".")[0]
    return config.model_copy(update={"name": architecture, "weights": RANDOM})


def measurable(config: RunConfig) -> RunConfig:
    """The same work at rates so small that nothing diverges; what is refitted after a task, is so for one epoch."""
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
    """Noise in the shapes of photographs, its short side so many pixels long."""
    side = math.ceil(1.5 * short_side)
    noise = randomness.stream(0, "bench", "images").bytes(3 * (side + count) * side)
    canvas = np.frombuffer(noise, dtype=np.uint8).reshape(side + count, side, 3)
    shapes = [(round(short_side * height), round(short_side * width)) for height, width in ASPECTS]
    shapes = [shapes[index % len(shapes)] for index in range(count)]
    return [np.ascontiguousarray(canvas[row : row + height, :width]) for row, (height, width) in enumerate(shapes)]


@dataclass(frozen=True)
class BenchSetup:
    """The engine with a task begun, and images to feed it."""

    config: RunConfig
    device: torch.device
    backbone: LoadedBackbone
    learner: Learner
    task: TaskImages
    """The one that is trained now: the last in which prompts learn. It has an image for each class."""
    later: int
    """Classes of the tasks after it."""
    images_bytes: int
    """What the images in memory take."""
    held_before: int
    """What the device held before anything was built."""

    @property
    def model(self) -> PromptedModel:
        """What predicts."""
        return self.learner.model

    def predict(self, rows: Tensor) -> None:
        """Predict images (n,) from their pixels."""
        images, viewer = self.learner.images.store, self.learner.viewer
        self.model.predict(viewer.evaluation(images, rows), keys=self.model.known(images, rows).keys)

    def close(self) -> None:
        """End the task as the engine does; a head that is solved then learns the classes of later tasks, too."""
        self.learner.finish(self.task, lambda _: None)
        head, seen = self.model.head, self.task.first + self.task.classes
        if isinstance(head, ClosedFormHead) and self.later:
            _learn_made_up(head, seen, self.later, self.device)

    def steps_of(self, steps: int) -> TaskImages:
        """The task with so many batches of images; they repeat where fewer are in memory."""
        return self.rows_of(steps * self.config.training.batch_size)

    def rows_of(self, count: int) -> TaskImages:
        """The task with so many images, its classes in turn."""
        places = torch.arange(count, device=self.device)
        labels = self.task.first + places % self.task.classes
        return replace(self.task, rows=places % len(self.learner.images.store), labels=labels)


@lru_cache(maxsize=1)
def made_backbone(name: str, weights: str | None, image_size: int | None) -> LoadedBackbone:
    """A backbone to look at: drawing the weights of a large one takes longer than measuring it."""
    return load_backbone(name, weights, image_size)


def fresh_backbone(name: str, weights: str | None, image_size: int | None) -> LoadedBackbone:
    """A copy of it, for a measurement to change."""
    made = made_backbone(name, weights, image_size)
    return replace(made, model=deepcopy(made.model))


def build(config: RunConfig, device: torch.device, scale: Scale | None = None) -> BenchSetup:
    """Put the engine in place and go through all tasks before the one to measure, without training them."""
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
    """Every task with an image for each of its classes."""
    found = []
    for index, classes in enumerate(scale.sizes):
        first, places = sum(scale.sizes[:index]), torch.arange(classes, device=device)
        found.append(TaskImages(index, first, classes, places % stored, first + places))
    return found


def _go_to(learner: Learner, tasks: Sequence[TaskImages]) -> TaskImages:
    """Begin the last task in which prompts learn; those before it are gone through with made-up features."""
    adapted = [task for task in tasks if learner.adapts(task)] or list(tasks)
    method, last = learner.model.method, adapted[-1]
    for task in adapted[:-1]:
        learner.begin(task)
        method.end_task(_made_up_summary(learner, task) if method.needs_summary else None)
    learner.begin(last)
    clusters, width = learner.statistics.centroids, learner.model.backbone.width
    mean, variance = (_numbers(learner.device, last.first, clusters, width) for _ in range(2))
    learner.statistics = ClassStatistics(mean, variance)  # (C before the task, K, D) each
    head = learner.model.head
    if isinstance(head, ClosedFormHead) and last.first:
        _learn_made_up(head, 0, last.first, learner.device)
    return last


def _learn_made_up(head: ClosedFormHead, first: int, classes: int, device: torch.device) -> None:
    """Let a head in closed form learn classes of two made-up images each."""
    labels = torch.arange(first, first + classes, device=device).repeat(2)
    head.learn(_numbers(device, len(labels), head.width), labels, classes, first)


def _numbers(device: torch.device, *shape: int) -> Tensor:
    return randomness.uniform(shape, 0, "bench", "features").to(device)


def _made_up_summary(learner: Learner, task: TaskImages) -> TaskSummary:
    width = learner.model.backbone.width
    features, logits = (_numbers(learner.device, len(task), size) for size in (width, task.classes))
    queries = features if learner.model.method.needs_query else None
    return TaskSummary(task.index, task.first, task.classes, task.labels, queries, features, logits)
