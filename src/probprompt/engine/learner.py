"""Training on one task: cross-entropy on its classes plus the method's loss, then alignment of the head."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from probprompt.config import RunConfig
from probprompt.data.image_store import Loaded
from probprompt.data.transforms import Preprocessor
from probprompt.distributed import ALONE, World
from probprompt.engine.loader import Advance, Queries, TaskImages, TaskLoader
from probprompt.engine.model import PromptedModel
from probprompt.engine.step import Schedule, Step, logits_from
from probprompt.errors import UserError
from probprompt.heads.closed_form import ClosedFormHead, ClosedFormSettings
from probprompt.heads.linear import ClassStatistics, LinearHead, align
from probprompt.kernels.cuda_graphs import make_optimizer, set_rate
from probprompt.methods import EVALUATION, TaskSummary
from probprompt.progress import SILENT, ProgressCallback


@dataclass(frozen=True)
class EpochResult:
    """Results of an epoch."""

    loss: float
    accuracy: float
    rate: float


class Callbacks:
    """Hooks around training; these do nothing."""

    def timed(self, phase: Literal["training_s", "alignment_s"]) -> AbstractContextManager[None]:
        """Enter around every epoch, and around the end of the task."""
        return nullcontext()

    def epoch_done(self, task: TaskImages, epoch: int, result: EpochResult, optimizer: Optimizer) -> None:
        """Call after every epoch."""


NO_CALLBACKS = Callbacks()


@dataclass(frozen=True)
class MidTask:
    """Position inside a task: finished epochs, and a function that restores the optimizer."""

    epoch: int
    restore: Callable[[Optimizer], None]


class Learner:
    """Trains a model on one task after another.

    Several processes share each batch and each pass over a task's images. All continue with the state of the first.
    """

    def __init__(
        self,
        model: PromptedModel,
        images: Loaded,
        viewer: Preprocessor,
        config: RunConfig,
        world: World = ALONE,
        queries: Queries | None = None,
    ) -> None:
        self.model, self.config, self.world, self.device = model, config, world, images.labels.device
        self.loader = TaskLoader(model, images, viewer, config, world, queries)
        width, seed = model.backbone.width, config.seeds.init
        head = model.head
        # A closed-form head has no gradient: prompts train under a linear head that is not used to predict.
        self.trained = head if isinstance(head, LinearHead) else LinearHead(width, seed).to(self.device)
        self.statistics = ClassStatistics.empty(width, self.device, config.alignment.centroids)
        self.prototypes = torch.empty(0, width, device=self.device)  # mean queries of classes, if the method needs them
        self.before: Tensor | None = None
        """Head inputs of the task's images before the task (n, D or more), if drift is compensated."""
        self._current: Step | None = None

    @property
    def images(self) -> Loaded:
        """Images of all tasks."""
        return self.loader.images

    @property
    def viewer(self) -> Preprocessor:
        """Preprocessing of images."""
        return self.loader.viewer

    def fit(
        self,
        task: TaskImages,
        *,
        solve_on: TaskImages | None = None,
        resume: MidTask | None = None,
        progress: ProgressCallback = SILENT,
        callbacks: Callbacks = NO_CALLBACKS,
    ) -> Tensor | None:
        """Learn one task: add its classes, train by gradient, then solve or align the head.

        ``solve_on`` are the images for a closed-form head, if they are more than those trained on. Returns the inputs
        of that head, (n, V, D or more); None for a trained head.
        """
        first = resume.epoch if resume else 0
        if not first:
            self.begin(task)
        progress.advance(first * self.steps(task))
        epochs = range(first, self.epochs(task))
        if epochs:
            optimizer = self.optimizer(task)
            if resume:
                resume.restore(optimizer)
        for epoch in epochs:
            with callbacks.timed("training_s"):
                result = self.train_epoch(task, epoch, optimizer, progress.advance)
            progress.describe(f"loss {result.loss:.2f}")
            callbacks.epoch_done(task, epoch, result, optimizer)
        with callbacks.timed("alignment_s"):
            return self.finish(solve_on or task, progress.advance)

    def work(self, task: TaskImages, solve_on: TaskImages | None = None) -> int:
        """Return the maximum number of steps that :meth:`fit` reports."""
        passes = self.aligns if self.model.head.trained else self.views
        passes += self.adapts(task) and self.model.method.needs_summary
        return self.epochs(task) * self.steps(task) + passes * self.loader.passes(solve_on or task)

    def begin(self, task: TaskImages) -> None:
        """Add the task's classes."""
        self.check(task)
        if task.index == 0 and self.model.method.statistics:
            queries = self.loader.compute(task, only_queries=True)[1]
            assert queries is not None
            self.model.method.see_queries(queries)
        if self._follows(task):
            self.before = self.model.head_input(*self.loader.compute(task, context=EVALUATION))
        self.begin_method(task)
        if self.learns_head(task):
            self.trained.grow(task.classes)
        if self.model.method.needs_prototypes and self.adapts(task):
            self._place_rows(task)
        self._agree()

    def begin_method(self, task: TaskImages) -> None:
        """Start the task in the method; once the prompts are frozen, fix the model instead."""
        if self.adapts(task):
            self.model.method.begin_task(task.index, task.classes)
        else:
            self.model.fix()

    def adapts(self, task: TaskImages) -> bool:
        """Return True if this task trains the prompts."""
        return self.config.adapts(task.index, self.model.head.trained)

    def learns_head(self, task: TaskImages) -> bool:
        """Return True if this task trains a head by gradient."""
        return self.model.head.trained or (self.adapts(task) and self.model.method.learns)

    def check(self, task: TaskImages) -> None:
        """Reject tasks that cannot be learned, as those of one class, and unequal batches."""
        if not self.world.alone:
            self._check_parts(task)
        if task.classes > 1 or not self.learns_head(task):
            return
        if task.index == 0:
            raise UserError("The first task has only one class. It needs at least two.")
        if self.model.head.trained and self.model.method.masked and not self.aligns:
            raise UserError(f"Task {task.index + 1} has only one class, which needs alignment.enabled=true.")

    def _check_parts(self, task: TaskImages) -> None:
        """Reject what the processes cannot share, or would learn differently."""
        size, batch, settings = self.world.size, self.config.training.batch_size, self.config.method
        for mark in settings.marks():  # these published errors mix the images of a batch
            raise UserError(f"{settings.name} can be trained only by one process, not by {size}: {mark}.")
        if not self.epochs(task):
            return
        if batch % size:
            near = [str(number) for number in (batch - batch % size, batch - batch % size + size) if number]
            divisors = [str(number) for number in range(1, batch + 1) if batch % number == 0]
            raise UserError(
                f"{size} processes cannot split a batch of {batch} equally. Set training.batch_size to "
                f"{' or '.join(near)}, or start {' or '.join(divisors)} process(es)."
            )
        if len(task) < size:
            raise UserError(
                f"Task {task.index + 1} has only {len(task)} training image(s) for {size} processes. "
                f"Start at most {len(task)}."
            )

    def epochs(self, task: TaskImages) -> int:
        """Return the number of epochs: 0 if there is nothing to compare or to train."""
        alone = task.classes == 1 and (self.model.method.masked or task.index == 0)
        return 0 if alone or not self.learns_head(task) else self.config.training.epochs

    def steps(self, task: TaskImages) -> int:
        """Return the number of optimizer steps per epoch."""
        return self.loader.steps(task)

    def optimizer(self, task: TaskImages) -> AdamW:
        """Create an optimizer, with the prompts at a multiple of the head's learning rate."""
        settings, model = self.config.training, self.model
        later = settings.later_lr_scale if task.index else 1.0
        rate = settings.head_lr * settings.prompt_lr_scale * later
        groups = [{"params": _learning(self.trained.parameters()), "base": settings.head_lr}]
        groups += [{"params": _learning(part), "base": rate * factor} for part, factor in model.method.groups()]
        if model.method.trains_backbone:
            groups.append({"params": _learning(model.backbone.parameters()), "base": rate})
        groups = [group for group in groups if group["params"]]
        return make_optimizer(AdamW, groups, self.device, weight_decay=settings.weight_decay)

    def train_epoch(self, task: TaskImages, epoch: int, optimizer: AdamW, advance: Advance) -> EpochResult:
        """Train one epoch."""
        self.model.method.begin_epoch()
        settings, rate, steps = self.config.training, 0.0, self.steps(task)
        schedule = Schedule(
            settings.schedule,
            settings.epochs,
            settings.nominal_steps or steps,
            settings.min_lr,
            settings.frozen_epochs,
        )
        step = self._step(task, optimizer)
        step.tally.zero_()
        queries, computed = self.loader.kept_queries(), list[Tensor]()
        known = queries.get(task.index, epoch, steps * self.loader.batch(task)) if queries else None
        batches = step.ahead(self.loader.batches(task, epoch, known), known is not None)
        for number, batch in enumerate(batches, start=epoch * steps):
            if queries and known is None:
                computed.append(batch[-1].clone())  # before the step, which releases it
            rate = schedule.rate(number, settings.head_lr)
            for group in optimizer.param_groups:
                set_rate(group, schedule.rate(number, group["base"]))
            step.learn(*batch)
            advance(1)
        if queries and computed:
            queries.keep(task.index, epoch, torch.cat(computed))
        self.world.average([step.tally])
        learned = [*self.model.adaptable(), *self.trained.parameters()]
        sound = torch.stack([parameter.isfinite().all() for parameter in learned]).all()
        loss, correct, finite = torch.cat([step.tally / steps, sound[None]]).tolist()  # the only synchronization
        loss = loss if finite else math.nan
        if not math.isfinite(loss):
            raise UserError(
                f"Training diverged: the loss is {loss} in task {task.index + 1}, epoch {epoch + 1}. Lower "
                f"training.head_lr ({settings.head_lr}) or training.prompt_lr_scale ({settings.prompt_lr_scale}). "
                "The checkpoint before this epoch is kept."
            )
        return EpochResult(loss, 100 * correct, rate)

    def _step(self, task: TaskImages, optimizer: AdamW) -> Step:
        """Return the step of this task under this optimizer, kept from epoch to epoch."""
        key = self.model.method.step_key
        if self._current is None or self._current.optimizer is not optimizer or self._current.key != key:
            self._current = None  # release the memory of the last task first
            self._current = Step(self.loader, self.trained, task, optimizer)
        return self._current

    def finish(self, task: TaskImages, advance: Advance) -> Tensor | None:
        """End the task in the method, then solve the head or align it to all classes.

        Returns the inputs of a closed-form head, (n, V, D or more), of each view that it learns.
        """
        seen = None
        self._current = None  # release the memory of captured steps
        if self.adapts(task):
            self.model.method.end_task(self._summary(task, advance) if self.model.method.needs_summary else None)
            self._agree()
        if isinstance(self.model.head, ClosedFormHead):
            seen = self.look(task, advance)[:, None]  # (n, V, D or more)
            if self.views > 1:  # the flipped image after the image itself
                flipped = self.model.head_input(*self.loader.compute(task, advance, flipped=True))
                seen = torch.cat([seen, flipped[:, None]], dim=1)
            if self.before is not None:
                self.model.head.compensate_drift(self.before, seen[:, 0], task.index)
                self.before = None
            self.model.head.learn(seen, task.labels, task.classes, task.index)
        elif self.aligns:
            self._align(task, advance)
        self._agree()
        if not all(bool(value.isfinite().all()) for value in self.model.head.parameters()):
            rate = self.config.alignment.lr
            raise UserError(f"The alignment diverged after task {task.index + 1}. Lower alignment.lr ({rate}).")
        return seen

    def _follows(self, task: TaskImages) -> bool:
        """Return True if the head's statistics have to be corrected for drift in this task."""
        follows = self._closed is not None and self._closed.compensate_drift and len(self.model.head) > 0
        return follows and self.adapts(task) and self.epochs(task) > 0

    @property
    def _closed(self) -> ClosedFormSettings | None:
        return self.config.head if isinstance(self.config.head, ClosedFormSettings) else None

    @property
    def views(self) -> int:
        """Number of views per image that a closed-form head learns."""
        return 2 if self._closed and self._closed.flip_augment else 1

    def look(self, task: TaskImages, advance: Advance) -> Tensor:
        """Return the head's inputs for evaluation views of a task's images: (n, D or more)."""
        return self.model.head_input(*self.loader.evaluation(task, advance))

    def _agree(self) -> None:
        """Copy the first process's numbers to all: rounding may differ between GPUs."""
        if self.world.alone:
            return
        model, statistics = self.model, self.statistics
        parts = [model.method, model.head, *([] if self.trained is model.head else [self.trained])]
        if model.method.trains_backbone:
            parts.append(model.backbone)
        values = [value for part in parts for value in part.state_dict().values()]
        self.world.broadcast([*values, statistics.mean, statistics.variance, self.prototypes])

    @property
    def aligns(self) -> bool:
        """True if the head is aligned after each task."""
        enabled = self.config.alignment.enabled
        return self.model.method.aligned if enabled is None else enabled

    def parameters(self) -> int:
        """Return the number of trained parameters: prompts, head, and backbone if trained."""
        head = self.model.head
        rows = [value for name, value in head.state_dict().items() if name not in head.learning_only]
        return sum(part.numel() for part in [*self.model.adaptable(), *rows])

    def _align(self, task: TaskImages, advance: Advance) -> None:
        settings, key = self.config.alignment, (self.config.seeds.data, "alignment", task.index)
        if settings.augmented_statistics and not self.model.static:
            features = self.loader.augmented_features(task, advance)  # (n, D)
        else:
            features = self.loader.evaluation_features(task, advance)
        self.statistics = self.statistics.extended(features, task.labels, task.classes, key)
        batch, rate = self.config.training.batch_size, self.config.training.head_lr
        align(self.trained, self.statistics, task.classes, settings, batch, rate, key)

    def _summary(self, task: TaskImages, advance: Advance) -> TaskSummary:
        features, queries = self.loader.compute(task, advance)
        features = features[:, : self.model.backbone.width]  # without intermediate features
        logits = logits_from(self.trained, features, task.first).detach()
        return TaskSummary(task.index, task.first, task.classes, task.labels, queries, features, logits)

    def _place_rows(self, task: TaskImages) -> None:
        """Let the method choose the initial rows of the head from the mean query of each class."""
        queries = self.loader.compute(task, only_queries=True)[1]
        assert queries is not None
        labels = range(task.first, task.first + task.classes)
        new = torch.stack([queries[task.labels == label].mean(dim=0) for label in labels])  # (new, D)
        weight = self.trained.weight
        rows = self.model.method.initial_rows(new, self.prototypes, weight.detach()[: task.first])
        self.prototypes = torch.cat([self.prototypes, new])
        if rows is not None:
            with torch.no_grad():
                weight[task.first :] = rows


def _learning(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]
