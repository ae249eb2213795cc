"""Learning one task: cross-entropy on its own classes plus the method's loss, then the head is realigned."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from probprompt import randomness
from probprompt.alignment import ClassStatistics, align
from probprompt.config import RunConfig
from probprompt.data.colour import draws_needed
from probprompt.data.loading import Loaded, RandomViews, Viewer
from probprompt.data.views import DRAWS, random_boxes
from probprompt.errors import UserError
from probprompt.heads import ClosedFormHead, LinearHead
from probprompt.methods import EVALUATION, Context, TaskSummary
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
        width, seed = model.backbone.width, config.seeds.init
        head = model.head
        # A head in closed form cannot lead prompts: they learn under a linear one that predicts nothing.
        self.trained = head if isinstance(head, LinearHead) else LinearHead(width, seed).to(self.device)
        self.statistics = ClassStatistics.empty(width, self.device, config.alignment.centroids)
        self.prototypes = torch.empty(0, width, device=self.device)  # mean queries of classes, where a method asks
        self._frozen: tuple[int, tuple[Tensor, Tensor | None]] | None = None  # of which task; features and queries

    def begin(self, task: TaskImages) -> None:
        """Make room for the task's classes."""
        self.check(task)
        self.begin_method(task)
        if self.learns_head(task):
            self.trained.grow(task.classes)
        if self.model.method.needs_prototypes and self.adapts(task):
            self._place_rows(task)

    def begin_method(self, task: TaskImages) -> None:
        """Tell the method of the task; once the prompts are fixed, it is not told and nothing of it changes."""
        if self.adapts(task):
            self.model.method.begin_task(task.index, task.classes)
        else:
            self.model.fix()

    def adapts(self, task: TaskImages) -> bool:
        """Whether prompts learn in this task."""
        adapted = self.config.training.adapt_tasks
        if adapted is None and not self.model.head.trained:
            adapted = 1  # a solve over all tasks needs features that stay where they are
        return adapted is None or task.index < adapted

    def learns_head(self, task: TaskImages) -> bool:
        """Whether a head learns by gradient in this task: not where one in closed form needs no prompts led."""
        return self.model.head.trained or (self.adapts(task) and self.model.method.learns)

    def check(self, task: TaskImages) -> None:
        """Refuse what cannot be learned: one class has nothing to be told apart from."""
        if task.classes > 1 or not self.learns_head(task):
            return
        if task.index == 0:
            raise UserError(
                "the first task has only one class, and nothing to tell it apart from: give it at least two"
            )
        if self.model.head.trained and self.model.method.masked and not self.aligns:
            raise UserError(
                f"task {task.index + 1} has only one class: it can be learned by the alignment alone, "
                "which is switched off (alignment.enabled)"
            )

    def epochs(self, task: TaskImages) -> int:
        """How many epochs the task is trained: none where there is nothing to compare, or nothing to train."""
        alone = task.classes == 1 and (self.model.method.masked or task.index == 0)
        return 0 if alone or not self.learns_head(task) else self.config.training.epochs

    def steps(self, task: TaskImages) -> int:
        """Optimiser steps per epoch; the last, smaller batch is dropped."""
        return len(task) // self._batch(task)

    def optimiser(self) -> torch.optim.AdamW:
        """A new optimiser: prompts at a multiple of the head's rate."""
        settings, model = self.config.training, self.model
        rate = settings.head_rate * settings.prompt_rate_factor
        groups = [{"params": _learning(self.trained.parameters()), "base": settings.head_rate}]
        groups += [{"params": _learning(part), "base": rate * factor} for part, factor in model.method.groups()]
        if model.method.trains_backbone:
            groups.append({"params": _learning(model.backbone.parameters()), "base": rate})
        return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=settings.weight_decay)

    def train_epoch(self, task: TaskImages, epoch: int, optimiser: torch.optim.AdamW, advance: Advance) -> EpochResult:
        """Go once over the task's images."""
        self.model.method.begin_epoch()
        schedule = self._schedule(task)
        first = task.first if self.model.method.masked else 0
        total, correct = torch.zeros(2, device=self.device)
        seen, rate = 0, 0.0
        for step, batch in enumerate(self._batches(task, epoch), start=epoch * self.steps(task)):
            rate = schedule.rate(step, self.config.training.head_rate)
            for group in optimiser.param_groups:
                group["lr"] = schedule.rate(step, group["base"])
            noise = randomness.generator(self.device, self.config.seeds.data, "noise", task.index, step)
            context = Context(True, task.index, batch.labels, task.first, noise)
            features, loss = self._features(batch, context)
            logits = self._logits(features, first)  # (B, new), or (B, C) where old classes are compared with
            labels = batch.labels - first  # (B,)
            objective = nn.functional.cross_entropy(logits, labels)
            optimiser.zero_grad()
            (objective if loss is None else objective + loss).backward()
            self._clip(optimiser)
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
        """Tell the method that the task is trained; then solve the head, or realign it to all classes."""
        if self.adapts(task):
            self.model.method.end_task(self._summary(task, advance) if self.model.method.needs_summary else None)
        if isinstance(self.model.head, ClosedFormHead):
            seen = self.model.head_input(*self._evaluation_pass(task, advance))  # (n, D or 2 D)
            self.model.head.learn(seen, task.labels, task.classes, task.index)
        elif self.aligns:
            self._align(task, advance)
        if not all(bool(value.isfinite().all()) for value in self.model.head.parameters()):
            raise UserError(
                f"the refit of the head diverged after task {task.index + 1}: lower alignment.rate "
                f"({self.config.alignment.rate})"
            )

    @property
    def aligns(self) -> bool:
        """Whether the head is realigned after each task."""
        wanted = self.config.alignment.enabled
        return self.model.method.aligned if wanted is None else wanted

    def parameters(self) -> int:
        """How many numbers were learned: prompts, head, and the backbone where it learns."""
        head = self.model.head
        rows = [value for name, value in head.state_dict().items() if name not in head.learning_only]
        return sum(part.numel() for part in [*self.model.adaptable(), *rows])

    def _align(self, task: TaskImages, advance: Advance) -> None:
        settings, key = self.config.alignment, (self.config.seeds.data, "alignment", task.index)
        if settings.augmented_statistics and not self.model.static:
            features = self._pass(task, self._random_views(task, "statistics", 0), advance)[0]  # (n, D)
        else:
            features = self._evaluation_features(task, advance)
        self.statistics = self.statistics.extended(features, task.labels, task.classes, key)
        batch, rate = self.config.training.batch, self.config.training.head_rate
        align(self.trained, self.statistics, task.classes, settings, batch, rate, key)

    def _summary(self, task: TaskImages, advance: Advance) -> TaskSummary:
        """What the model makes of the task's images."""
        features, queries = self._pass(task, None, advance)
        logits = self._logits(features, task.first).detach()
        return TaskSummary(task.index, task.first, task.classes, task.labels, queries, features, logits)

    def _place_rows(self, task: TaskImages) -> None:
        """Let the method say where the head's new rows start, from the mean query of each class."""
        queries = self._pass(task, None, lambda _: None, only_queries=True)[1]
        assert queries is not None
        labels = range(task.first, task.first + task.classes)
        new = torch.stack([queries[task.labels == label].mean(dim=0) for label in labels])  # (new, D)
        weight = self.trained.weight
        rows = self.model.method.initial_rows(new, self.prototypes, weight.detach()[: task.first])
        self.prototypes = torch.cat([self.prototypes, new])
        if rows is not None:
            with torch.no_grad():
                weight[task.first :] = rows

    def _clip(self, optimiser: torch.optim.AdamW) -> None:
        limit = self.config.training.clip
        if limit is not None:
            parts = [part for group in optimiser.param_groups for part in group["params"] if part.grad is not None]
            torch.nn.utils.clip_grad_norm_(parts, limit)

    def _batch(self, task: TaskImages) -> int:
        return min(self.config.training.batch, len(task))

    def _schedule(self, task: TaskImages) -> Schedule:
        settings = self.config.training
        return Schedule(
            settings.schedule, settings.epochs, self.steps(task), settings.final_rate, settings.frozen_epochs
        )

    def _logits(self, features: Tensor, first: int) -> Tensor:
        """Logits of the classes from ``first`` on: the rows of others get no gradient (but any weight decay)."""
        head = self.trained
        return head.logits(features, head.weight[first:], head.bias[first:])

    def _batches(self, task: TaskImages, epoch: int) -> Iterator["Batch"]:
        seed, batch = self.config.seeds.data, self._batch(task)
        order = randomness.permutation(len(task), seed, "order", task.index, epoch)
        if self.model.static:
            views: RandomViews | Tensor = self._evaluation_features(task, lambda _: None)
        else:
            views = self._random_views(task, "views", epoch)
        for step in range(self.steps(task)):
            chosen = torch.from_numpy(order[step * batch : (step + 1) * batch]).to(self.device)
            yield Batch(task.rows[chosen], task.labels[chosen], views[chosen])

    def _features(self, batch: "Batch", context: Context) -> tuple[Tensor, Tensor | None]:
        """Features of a batch, and what the method adds to the loss."""
        if isinstance(batch.view, Tensor):
            return batch.view, None
        features, loss = self.model.features(self.viewer.random(self.images.store, batch.rows, batch.view), context)
        more = self.model.method.feature_loss(features, context)
        return features, loss if more is None else more if loss is None else loss + more

    def _random_views(self, task: TaskImages, purpose: str, epoch: int) -> RandomViews:
        settings = self.config.training
        key = (self.config.seeds.data, purpose, task.index, epoch)
        draws = randomness.uniform((len(task), DRAWS), *key).to(self.device)
        sizes = self.images.store.sizes[task.rows]  # (n, 2)
        boxes = random_boxes(sizes, draws, settings.crop_scale, flip=settings.flip)
        colours = randomness.uniform((len(task), draws_needed(settings.augmentation)), *key, "colour").to(self.device)
        return RandomViews(boxes, settings.augmentation, colours)

    def _evaluation_features(self, task: TaskImages, advance: Advance) -> Tensor:
        """Features (n, D) of the evaluation views."""
        return self._evaluation_pass(task, advance)[0]

    def _evaluation_pass(self, task: TaskImages, advance: Advance) -> tuple[Tensor, Tensor | None]:
        """Features and queries of the evaluation views; those that nothing changes any more are kept."""
        if not self.model.static:
            return self._pass(task, None, advance)
        if self._frozen is None or self._frozen[0] != task.index:
            self._frozen = (task.index, self._pass(task, None, advance))
        return self._frozen[1]

    @torch.no_grad()
    def _pass(
        self, task: TaskImages, views: RandomViews | None, advance: Advance, only_queries: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Features (n, D) of all the task's images with the prompts of evaluation, and their queries."""
        method = self.model.method
        context = method.statistics_context(task.index) if self.adapts(task) else EVALUATION
        features, queries = [], []
        for rows in torch.arange(len(task), device=self.device).split(self.config.evaluation_batch):
            store, indices = self.images.store, task.rows[rows]
            if views is None:
                images = self.viewer.evaluation(store, indices)
            else:
                images = self.viewer.random(store, indices, views[rows])
            query = self.model.query(images)
            if query is not None:
                queries.append(query)
            if not only_queries:
                features.append(self.model.features(images, context, query)[0])
            advance(1)
        width = self.model.backbone.width
        found = torch.cat(features) if features else torch.empty(0, width, device=self.device)
        return found, torch.cat(queries) if queries else None

    def _refuse_divergence(self, result: EpochResult, task: TaskImages, epoch: int) -> None:
        trained = [*self.model.adaptable(), *self.trained.parameters()]
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
    view: RandomViews | Tensor


def _learning(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]
