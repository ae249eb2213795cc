"""Learning one task: cross-entropy on its own classes plus the method's loss, then the head is realigned."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from probprompt import randomness
from probprompt.config import RunConfig
from probprompt.data.loading import Loaded, Viewer
from probprompt.data.views import DRAWS, Boxes, random_boxes
from probprompt.errors import UserError
from probprompt.methods import EVALUATION, Context
from probprompt.training.alignment import ClassStatistics, align
from probprompt.training.model import PromptedModel
from probprompt.training.schedule import Schedule


@dataclass(frozen=True)
class TaskImages:
    """The training images of a task: where they are in the loaded set, and their labels in order of appearance."""

    index: int
    first: int  # the label of its first class
    classes: int
    rows: Tensor  # (n,)
    labels: Tensor  # (n,)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class EpochResult:
    """How an epoch went."""

    loss: float
    accuracy: float
    rate: float


Advance = Callable[[int], None]


class Learner:
    """Teaches a model one task after another."""

    def __init__(self, model: PromptedModel, images: Loaded, viewer: Viewer, config: RunConfig) -> None:
        self.model, self.images, self.viewer, self.config = model, images, viewer, config
        self.device = images.labels.device
        self.statistics = ClassStatistics.empty(model.backbone.width, self.device)
        self._frozen: tuple[int, Tensor] | None = None  # of which task, and its features

    def begin(self, task: TaskImages) -> None:
        """Make room for the task's classes."""
        self.check(task)
        self.model.head.grow(task.classes)
        self.model.method.begin_task(task.index, task.classes)
        self.fix_prompts(task)

    def fix_prompts(self, task: TaskImages) -> None:
        """From some task on, if so set, the prompts stay as they are and only the head learns."""
        adapted = self.config.training.adapt_tasks
        if adapted is not None and task.index >= adapted:
            self.model.method.requires_grad_(False)

    def check(self, task: TaskImages) -> None:
        """Refuse what cannot be learned: one class has nothing to be told apart from."""
        if task.classes == 1 and task.index == 0:
            raise UserError(
                "the first task has only one class, and nothing to tell it apart from: give it at least two"
            )
        if task.classes == 1 and not self.config.alignment.enabled:
            raise UserError(
                f"task {task.index + 1} has only one class: it can be learned by the alignment alone, "
                "which is switched off (alignment.enabled)"
            )

    def epochs(self, task: TaskImages) -> int:
        """How many epochs the task is trained: none where there is but one class."""
        return 0 if task.classes == 1 else self.config.training.epochs

    def steps(self, task: TaskImages) -> int:
        """Optimiser steps per epoch; the last, smaller batch is dropped."""
        return len(task) // self._batch(task)

    def optimiser(self) -> torch.optim.AdamW:
        """A new optimiser: prompts at a multiple of the head's rate."""
        settings = self.config.training
        prompts = [parameter for parameter in self.model.method.parameters() if parameter.requires_grad]
        groups = [
            {"params": list(self.model.head.parameters()), "base": settings.head_rate},
            {"params": prompts, "base": settings.head_rate * settings.prompt_rate_factor},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=settings.weight_decay)

    def train_epoch(self, task: TaskImages, epoch: int, optimiser: torch.optim.AdamW, advance: Advance) -> EpochResult:
        """Go once over the task's images."""
        self.model.method.begin_epoch()
        schedule = self._schedule(task)
        total, correct = torch.zeros(2, device=self.device)
        seen, rate = 0, 0.0
        for step, batch in enumerate(self._batches(task, epoch), start=epoch * self.steps(task)):
            rate = schedule.rate(step, self.config.training.head_rate)
            for group in optimiser.param_groups:
                group["lr"] = schedule.rate(step, group["base"])
            noise = randomness.generator(self.device, self.config.seeds.data, "noise", task.index, step)
            features, loss = self._features(batch, Context(task.index, noise))
            logits = self._own_logits(features, task)  # (B, new)
            labels = batch.labels - task.first  # (B,)
            objective = nn.functional.cross_entropy(logits, labels)
            optimiser.zero_grad()
            (objective if loss is None else objective + loss).backward()
            self.model.method.before_step()
            optimiser.step()
            total += objective.detach() * len(labels)
            correct += (logits.argmax(dim=1) == labels).sum()
            seen += len(labels)
            advance(1)
        result = EpochResult(total.item() / seen, 100 * correct.item() / seen, rate)
        self._refuse_divergence(result, task, epoch)
        return result

    def finish(self, task: TaskImages, advance: Advance) -> None:
        """Store the statistics of the task's classes and realign the head."""
        settings = self.config.alignment
        if not settings.enabled:
            return
        features = self._statistics_features(task, advance)  # (n, D)
        self.statistics = self.statistics.extended(features, task.labels, task.classes)
        key = (self.config.seeds.data, "alignment", task.index)
        batch, rate = self.config.training.batch, self.config.training.head_rate
        align(self.model.head, self.statistics, task.classes, settings, batch, rate, key)
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.head.parameters()):
            raise UserError(
                f"the refit of the head diverged after task {task.index + 1}: lower alignment.rate ({settings.rate})"
            )

    def _batch(self, task: TaskImages) -> int:
        return min(self.config.training.batch, len(task))

    def _schedule(self, task: TaskImages) -> Schedule:
        settings = self.config.training
        return Schedule(
            settings.schedule, settings.epochs, self.steps(task), settings.final_rate, settings.frozen_epochs
        )

    def _own_logits(self, features: Tensor, task: TaskImages) -> Tensor:
        """Logits of the task's own classes alone: the rows of others get no gradient (but any weight decay)."""
        head = self.model.head
        return nn.functional.linear(features, head.weight[task.first :], head.bias[task.first :])

    def _batches(self, task: TaskImages, epoch: int) -> Iterator["Batch"]:
        seed, batch = self.config.seeds.data, self._batch(task)
        order = randomness.permutation(len(task), seed, "order", task.index, epoch)
        if self.model.static:
            views: Boxes | Tensor = self._frozen_features(task)
        else:
            views = self._random_views(task, "views", epoch)
        for step in range(self.steps(task)):
            chosen = torch.from_numpy(order[step * batch : (step + 1) * batch]).to(self.device)
            yield Batch(task.rows[chosen], task.labels[chosen], views[chosen])

    def _features(self, batch: "Batch", context: Context) -> tuple[Tensor, Tensor | None]:
        if isinstance(batch.view, Tensor):
            return batch.view, None
        return self.model.features(self.viewer.view(self.images.store, batch.rows, batch.view), context)

    def _random_views(self, task: TaskImages, purpose: str, epoch: int) -> Boxes:
        draws = randomness.uniform((len(task), DRAWS), self.config.seeds.data, purpose, task.index, epoch)
        settings = self.config.training
        sizes = self.images.store.sizes[task.rows]  # (n, 2)
        return random_boxes(sizes, draws.to(self.device), settings.crop_scale, flip=settings.flip)

    def _frozen_features(self, task: TaskImages) -> Tensor:
        """Features that no training changes, from one pass over the evaluation views, kept for all epochs."""
        if self._frozen is None or self._frozen[0] != task.index:
            self._frozen = (task.index, self._pass(task, None, lambda _: None))
        return self._frozen[1]

    def _statistics_features(self, task: TaskImages, advance: Advance) -> Tensor:
        if self.model.static:
            return self._frozen_features(task)
        augmented = self.config.alignment.augmented_statistics
        return self._pass(task, self._random_views(task, "statistics", 0) if augmented else None, advance)

    @torch.no_grad()
    def _pass(self, task: TaskImages, views: Boxes | None, advance: Advance) -> Tensor:
        """Features (n, D) of all the task's images with evaluation prompts."""
        found = []
        for rows in torch.arange(len(task), device=self.device).split(self.config.evaluation_batch):
            store, indices = self.images.store, task.rows[rows]
            if views is None:
                images = self.viewer.evaluation(store, indices)
            else:
                images = self.viewer.view(store, indices, views[rows])
            found.append(self.model.features(images, EVALUATION)[0])
            advance(1)
        return torch.cat(found)

    def _refuse_divergence(self, result: EpochResult, task: TaskImages, epoch: int) -> None:
        trained = [*self.model.method.parameters(), *self.model.head.parameters()]
        sound = all(bool(parameter.isfinite().all()) for parameter in trained)
        if not sound or not math.isfinite(result.loss):
            raise UserError(
                f"training diverged: the loss became {result.loss} in task {task.index + 1}, epoch {epoch + 1}. "
                f"Lower training.head_rate ({self.config.training.head_rate}) or "
                f"training.prompt_rate_factor ({self.config.training.prompt_rate_factor}); "
                "the checkpoint before this epoch is kept"
            )


@dataclass(frozen=True)
class Batch:
    """A batch: which images, their labels, and how to look at them (or their frozen features)."""

    rows: Tensor
    labels: Tensor
    view: Boxes | Tensor
