"""Learning one task: cross-entropy on its own classes plus the method's loss, then the head is realigned."""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from probprompt import kernels, randomness
from probprompt.backbones.vit import Embedded
from probprompt.config import RunConfig
from probprompt.data.image_store import Loaded
from probprompt.data.transforms import DRAWS, Boxes, Preprocessor, RandomViews, draws_needed, random_boxes
from probprompt.distributed import ALONE, World
from probprompt.engine.loader import Queries
from probprompt.engine.model import PromptedModel
from probprompt.engine.step import Inputs, Schedule, look_ahead
from probprompt.errors import UserError
from probprompt.heads.closed_form import ClosedFormHead, ClosedFormSettings
from probprompt.heads.linear import ClassStatistics, LinearHead, align
from probprompt.kernels.cuda_graphs import Captured, make_optimizer, set_rate
from probprompt.methods import EVALUATION, Context, Method, TaskSummary
from probprompt.randomness import Noise


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


def adapted_tasks(config: RunConfig, trained_head: bool) -> int | None:
    """In how many tasks prompts learn, from the first on; None: in all."""
    adapted = config.training.adapt_tasks
    if adapted is None and not trained_head:
        return 1  # a solve over all tasks needs features that stay where they are
    return adapted


class Learner:
    """Teaches a model one task after another.

    Several processes share the work: each computes its part of every batch and of every pass over a task's images.
    What they then make of all parts, they make alike, and go on with what the first has.
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
        self.model, self.images, self.viewer, self.config, self.world = model, images, viewer, config, world
        self.queries = queries
        """Of training views, kept from run to run."""
        self.device = images.labels.device
        width, seed = model.backbone.width, config.seeds.init
        head = model.head
        # A head in closed form cannot lead prompts: they learn under a linear one that predicts nothing.
        self.trained = head if isinstance(head, LinearHead) else LinearHead(width, seed).to(self.device)
        self.statistics = ClassStatistics.empty(width, self.device, config.alignment.centroids)
        self.prototypes = torch.empty(0, width, device=self.device)  # mean queries of classes, where a method asks
        self.before: Tensor | None = None
        """What the head was given of the task's images before their task (n, D or more), where it has to follow."""
        self._frozen: tuple[TaskImages, tuple[Tensor, Tensor | None]] | None = None  # of which; features and queries
        self._current: Step | None = None
        self._ahead = Prefetcher(self._draw, config.training.epochs if self.device.type == "cuda" else 0)

    def begin(self, task: TaskImages) -> None:
        """Make room for the task's classes."""
        self.check(task)
        if self._follows(task):
            self.before = self.model.head_input(*self._pass(task, None, lambda _: None, context=EVALUATION))
        self.begin_method(task)
        if self.learns_head(task):
            self.trained.grow(task.classes)
        if self.model.method.needs_prototypes and self.adapts(task):
            self._place_rows(task)
        self._agree()

    def begin_method(self, task: TaskImages) -> None:
        """Tell the method of the task; once the prompts are fixed, it is not told and nothing of it changes."""
        if self.adapts(task):
            self.model.method.begin_task(task.index, task.classes)
        else:
            self.model.fix()

    def adapts(self, task: TaskImages) -> bool:
        """Whether prompts learn in this task."""
        adapted = adapted_tasks(self.config, self.model.head.trained)
        return adapted is None or task.index < adapted

    def learns_head(self, task: TaskImages) -> bool:
        """Whether a head learns by gradient in this task: not where one in closed form needs no prompts led."""
        return self.model.head.trained or (self.adapts(task) and self.model.method.learns)

    def check(self, task: TaskImages) -> None:
        """Refuse what cannot be learned: one class has nothing to be told apart from; processes need equal parts."""
        if not self.world.alone:
            self._check_parts(task)
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

    def _check_parts(self, task: TaskImages) -> None:
        """Refuse what so many processes cannot share out, or would not learn as one does."""
        size, batch, settings = self.world.size, self.config.training.batch, self.config.method
        for mark in settings.marks():  # all of these mistakes mix the images of a batch
            raise UserError(f"{settings.name} cannot be trained by {size} processes, only by one: {mark}")
        if not self.epochs(task):
            return
        if batch % size:
            near = [str(number) for number in (batch - batch % size, batch - batch % size + size) if number]
            raise UserError(
                f"{size} processes cannot share a batch of {batch} equally: set training.batch to {' or '.join(near)}, "
                f"or start {' or '.join(str(n) for n in range(1, batch + 1) if batch % n == 0)} process(es)"
            )
        if len(task) < size:
            raise UserError(
                f"task {task.index + 1} has only {len(task)} training image(s), not one for each of {size} processes: "
                f"start at most {len(task)}"
            )

    def epochs(self, task: TaskImages) -> int:
        """How many epochs the task is trained: none where there is nothing to compare, or nothing to train."""
        alone = task.classes == 1 and (self.model.method.masked or task.index == 0)
        return 0 if alone or not self.learns_head(task) else self.config.training.epochs

    def steps(self, task: TaskImages) -> int:
        """Optimiser steps per epoch; the last, smaller batch is dropped."""
        return len(task) // self._batch(task)

    def optimiser(self, task: TaskImages) -> torch.optim.AdamW:
        """A new optimiser: prompts at a multiple of the head's rate, which may be another after the first task."""
        settings, model = self.config.training, self.model
        later = settings.later_rate_factor if task.index else 1.0
        rate = settings.head_rate * settings.prompt_rate_factor * later
        groups = [{"params": _learning(self.trained.parameters()), "base": settings.head_rate}]
        groups += [{"params": _learning(part), "base": rate * factor} for part, factor in model.method.groups()]
        if model.method.trains_backbone:
            groups.append({"params": _learning(model.backbone.parameters()), "base": rate})
        groups = [group for group in groups if group["params"]]
        return make_optimizer(torch.optim.AdamW, groups, self.device, weight_decay=settings.weight_decay)

    def train_epoch(self, task: TaskImages, epoch: int, optimiser: torch.optim.AdamW, advance: Advance) -> EpochResult:
        """Go once over the task's images."""
        self.model.method.begin_epoch()
        schedule, rate = self._schedule(task), 0.0
        step = self._step(task, optimiser)
        step.tally.zero_()
        queries, asked = self._kept_queries(), list[Tensor]()
        known = queries.get(task.index, epoch, self.steps(task) * self._batch(task)) if queries else None
        batches = step.ahead(self._batches(task, epoch, known), known is not None)
        for number, batch in enumerate(batches, start=epoch * self.steps(task)):
            if queries and known is None:
                asked.append(batch[-1].clone())  # before learning begins, which lets go of it
            rate = schedule.rate(number, self.config.training.head_rate)
            for group in optimiser.param_groups:
                set_rate(group, schedule.rate(number, group["base"]))
            step.learn(*batch)
            advance(1)
        if queries and asked:
            queries.keep(task.index, epoch, torch.cat(asked))
        self.world.average([step.tally])
        learned = [*self.model.adaptable(), *self.trained.parameters()]
        sound = torch.stack([parameter.isfinite().all() for parameter in learned]).all()
        loss, correct, finite = torch.cat([step.tally / self.steps(task), sound[None]]).tolist()  # the only wait
        self._refuse_divergence(loss if finite else math.nan, task, epoch)
        return EpochResult(loss, 100 * correct, rate)

    def _step(self, task: TaskImages, optimiser: torch.optim.AdamW) -> "Step":
        """The step of this task under this optimiser, kept from epoch to epoch."""
        key = self.model.method.step_key
        if self._current is None or self._current.optimiser is not optimiser or self._current.key != key:
            self._current = None  # lets go of the last task's memory first
            self._current = Step(self, task, optimiser)
        return self._current

    def finish(self, task: TaskImages, advance: Advance) -> Tensor | None:
        """Tell the method that the task is trained; then solve the head, or realign it to all classes.

        Returns what a head in closed form was given of the images: (n, V, D or more), of each the views that it learns.
        """
        seen = None
        self._current = None  # what captured steps hold is free for what follows
        if self.adapts(task):
            self.model.method.end_task(self._summary(task, advance) if self.model.method.needs_summary else None)
            self._agree()
        if isinstance(self.model.head, ClosedFormHead):
            seen = self._look_at_views(task, advance)  # (n, V, D or more)
            if self.before is not None:
                self.model.head.follow(self.before, seen[:, 0], task.index)
                self.before = None
            self.model.head.learn(seen, task.labels, task.classes, task.index)
        elif self.aligns:
            self._align(task, advance)
        self._agree()
        if not all(bool(value.isfinite().all()) for value in self.model.head.parameters()):
            raise UserError(
                f"the refit of the head diverged after task {task.index + 1}: lower alignment.rate "
                f"({self.config.alignment.rate})"
            )
        return seen

    def _follows(self, task: TaskImages) -> bool:
        """Whether what the head knows has to follow what prompts learn in this task."""
        follows = self._closed is not None and self._closed.follow and len(self.model.head) > 0
        return follows and self.adapts(task) and self.epochs(task) > 0

    @property
    def _closed(self) -> ClosedFormSettings | None:
        return self.config.head if isinstance(self.config.head, ClosedFormSettings) else None

    @property
    def views(self) -> int:
        """How many views of an image a head in closed form learns."""
        return 2 if self._closed and self._closed.with_mirrors else 1

    def look(self, task: TaskImages, advance: Advance) -> Tensor:
        """What the head is given of the evaluation views of a task's images: (n, D or more)."""
        return self.model.head_input(*self._evaluation_pass(task, advance))

    def _look_at_views(self, task: TaskImages, advance: Advance) -> Tensor:
        """The same of all views that it learns, the mirror image after the image itself: (n, V, D or more)."""
        own = self.look(task, advance)
        if self.views == 1:
            return own[:, None]
        return torch.stack([own, self.model.head_input(*self._pass(task, None, advance, mirrored=True))], dim=1)

    def _agree(self) -> None:
        """Let every process go on from the same numbers: rounding may differ from GPU to GPU."""
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
            views = self._random_views(task, self._draw_views(task, "statistics", 0))
            features = self._pass(task, views, advance)[0]  # (n, D)
        else:
            features = self._evaluation_features(task, advance)
        self.statistics = self.statistics.extended(features, task.labels, task.classes, key)
        batch, rate = self.config.training.batch, self.config.training.head_rate
        align(self.trained, self.statistics, task.classes, settings, batch, rate, key)

    def _summary(self, task: TaskImages, advance: Advance) -> TaskSummary:
        """What the model makes of the task's images."""
        features, queries = self._pass(task, None, advance)
        features = features[:, : self.model.backbone.width]  # not what a head reads of other blocks
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

    def _kept_queries(self) -> Queries | None:
        """What is kept of queries, where training asks for any."""
        asks = self.model.method.needs_query and self.world.alone and looks_first(self.model)
        return self.queries if asks else None

    def _batches(self, task: TaskImages, epoch: int, queries: Tensor | None = None) -> Iterator[Inputs]:
        batch, drawn = self._batch(task), self._ahead.take(task, epoch)
        order, noise = drawn.order.to(self.device), drawn.noise.to(self.device)[:, :1]  # (n,), (steps, 1)
        rows, labels = task.rows[order], task.labels[order]  # (n,)
        if drawn.views is None:
            views: Tensor | RandomViews = self._evaluation_features(task, lambda _: None)
        else:
            views = self._random_views(task, drawn.views)
        views = views[order]
        own = self.world.part(batch)
        for step in range(self.steps(task)):
            part = slice(step * batch + own.start, step * batch + own.stop)
            known = () if queries is None else (queries[part],)
            yield Inputs(self._views_of(rows[part], views[part]), labels[part], noise[step], known)

    def _views_of(self, rows: Tensor, view: Tensor | RandomViews) -> tuple[Tensor, ...]:
        """Features, images, or what images are cut out by: their rows and boxes, which :meth:`show` takes."""
        if isinstance(view, Tensor):
            return (view,)
        if self.viewer.cuts(self.images.store, view.augmentation):
            return (rows, view.boxes.places, *([] if view.boxes.flip is None else [view.boxes.flip]))
        return (self.viewer.random(self.images.store, rows, view),)

    def show(self, rows: Tensor, *boxes: Tensor) -> Tensor:
        """The images (B, 3, H, W) that given boxes cut out; features and images that are ready are given back."""
        return self.viewer.random(self.images.store, rows, RandomViews(Boxes(*boxes))) if boxes else rows

    def _draw(self, task: TaskImages, epoch: int) -> "Drawn":
        seed, steps = self.config.seeds.data, self.steps(task)
        order = torch.from_numpy(randomness.permutation(len(task), seed, "order", task.index, epoch))
        seeds = [randomness.number(seed, "noise", task.index, epoch * steps + step) for step in range(steps)]
        # Each on a boundary of 16 bytes, as captured tensors are: Triton compiles another kernel for other addresses.
        noise = torch.tensor([[key, 0] for key in seeds])
        return Drawn(order, noise, None if self.model.static else self._draw_views(task, "views", epoch))

    def _draw_views(self, task: TaskImages, purpose: str, epoch: int) -> tuple[Tensor, Tensor]:
        """Numbers (n, draws) for the boxes and for the colours of random views."""
        key = (self.config.seeds.data, purpose, task.index, epoch)
        colours = draws_needed(self.config.training.augmentation)
        return randomness.uniform((len(task), DRAWS), *key), randomness.uniform((len(task), colours), *key, "colour")

    def _random_views(self, task: TaskImages, drawn: tuple[Tensor, Tensor]) -> RandomViews:
        settings = self.config.training
        draws, colours = (part.to(self.device) for part in drawn)
        sizes = self.images.store.sizes[task.rows]  # (n, 2)
        boxes = random_boxes(sizes, draws, settings.crop_scale, flip=settings.flip)
        return RandomViews(boxes, settings.augmentation, colours)

    def _evaluation_features(self, task: TaskImages, advance: Advance) -> Tensor:
        """Features (n, D) of the evaluation views."""
        return self._evaluation_pass(task, advance)[0][:, : self.model.backbone.width]

    def _evaluation_pass(self, task: TaskImages, advance: Advance) -> tuple[Tensor, Tensor | None]:
        """Features and queries of the evaluation views; those that nothing changes any more are kept."""
        if not self.model.static:
            return self._pass(task, None, advance)
        if self._frozen is None or self._frozen[0] is not task:
            self._frozen = (task, self._pass(task, None, advance))
        return self._frozen[1]

    @torch.no_grad()
    def _pass(
        self,
        task: TaskImages,
        views: RandomViews | None,
        advance: Advance,
        only_queries: bool = False,
        context: Context | None = None,
        mirrored: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Features of all the task's images with the prompts of evaluation, as the head reads them, and queries.

        Or of their mirror images.
        """
        method = self.model.method
        if context is None:
            context = method.statistics_context(task.index) if self.adapts(task) else EVALUATION
        features, queries = [], []
        own = self.world.share(torch.arange(len(task), device=self.device))
        for rows in own.split(self.config.images_at_a_time(self.device.type)) if len(own) else ():
            store, indices = self.images.store, task.rows[rows]
            if views is None:
                images = self.viewer.evaluation(store, indices)
            else:
                images = self.viewer.random(store, indices, views[rows])
            images = images.flip(-1) if mirrored else images
            seen = self.model.embed(images)
            query = self.model.query(seen)
            if query is not None:
                queries.append(query)
            if not only_queries:
                features.append(self.model.evaluated(images, seen, context, query))
            advance(1)
        nothing = torch.empty(0, self.model.backbone.width, device=self.device)
        found = torch.cat(features) if features else nothing.repeat(1, 1 + 2 * self.model.head.layers)
        asked = torch.cat(queries) if queries else nothing
        return (
            nothing if only_queries else self.world.gather(found, len(task)),
            self.world.gather(asked, len(task)) if method.needs_query else None,
        )

    def _refuse_divergence(self, loss: float, task: TaskImages, epoch: int) -> None:
        if not math.isfinite(loss):
            raise UserError(
                f"training diverged: the loss became {loss} in task {task.index + 1}, epoch {epoch + 1}. "
                f"Lower training.head_rate ({self.config.training.head_rate}) or "
                f"training.prompt_rate_factor ({self.config.training.prompt_rate_factor}); "
                "the checkpoint before this epoch is kept"
            )


@dataclass(frozen=True, eq=False)
class Drawn:
    """All that is drawn at random for an epoch, on the host."""

    order: Tensor  # (n,)
    noise: Tensor  # (steps, 2): the key of each step's noise
    views: tuple[Tensor, Tensor] | None  # (n, draws) each; none where features are frozen


class Prefetcher:
    """Draws for one epoch while the GPU trains the one before, which would wait for it otherwise."""

    def __init__(self, draw: Callable[[TaskImages, int], Drawn], epochs: int) -> None:
        self._draw, self._epochs = draw, epochs
        self._next: tuple[tuple[int, int, int], Future[Drawn]] | None = None

    def take(self, task: TaskImages, epoch: int) -> Drawn:
        """What was drawn for this epoch, or is now; the next one's is begun."""
        key, ready = (task.index, len(task), epoch), self._next
        self._next = None
        drawn = ready[1].result() if ready and ready[0] == key else self._draw(task, epoch)
        if epoch + 1 < self._epochs:
            self._next = ((*key[:2], epoch + 1), _helper().submit(self._draw, task, epoch + 1))
        return drawn


@cache
def _helper() -> ThreadPoolExecutor:
    """One thread, for numbers that are drawn ahead."""
    return ThreadPoolExecutor(1, "drawing")


class Step:
    """What is done with a batch of a task: forward, backward, and a step of the optimiser."""

    def __init__(self, learner: Learner, task: TaskImages, optimiser: torch.optim.AdamW) -> None:
        self.learner, self.task, self.optimiser = learner, task, optimiser
        self.key = learner.model.method.step_key
        self.first = task.first if learner.model.method.masked else 0
        self.tally = torch.zeros(2, device=learner.device)
        """Sums over the steps so far: the loss, and the share that was right."""
        self.batch, self.world = learner._batch(task), learner.world
        self.own = self.world.part(self.batch)
        """Which rows of the whole batch are here."""
        self.weight = (self.own.stop - self.own.start) * self.world.size / self.batch
        """What a mean over the images here counts in the mean over all processes: 1 where parts are equal."""
        captured = kernels.usable(learner.device) and self.world.alone  # without kernels noise needs the host
        looks = looks_first(learner.model)
        self.learn, self._look = Captured(self._learn, captured, 0), Captured(self._see, captured and looks, 1)
        self._glance = Captured(self._embed, captured and looks, 1)
        """What is left of looking where queries are known."""
        # An external event is recorded anew whenever a captured step is replayed.
        self._pause = torch.cuda.Event(external=True) if captured and looks else None

    def ahead(self, batches: Iterator[Inputs], known: bool = False) -> Iterator[tuple[Tensor, ...]]:
        """What :attr:`learn` is to be called with, batch by batch; queries may be known."""
        return look_ahead(batches, self._glance if known else self._look, self.learn, self._pause)

    def _see(self, *views: Tensor) -> tuple[Tensor, ...]:
        """What the backbone makes of images before any prompt; nothing where it learns, or features are frozen."""
        model, images = self.learner.model, self.learner.show(*views)
        if images.ndim == 2 or model.backbone.learns:
            return (images,)
        seen = model.backbone.embed(images)
        return self._given(seen, model.query(seen))

    def _embed(self, *views: Tensor) -> tuple[Tensor, ...]:
        """The same without the query."""
        return self._given(self.learner.model.backbone.embed(self.learner.show(*views)))

    def _given(self, seen: Embedded, query: Tensor | None = None) -> tuple[Tensor, ...]:
        """Those parts of what was seen that there are."""
        self._parts = (True, seen.qkv is not None, self.learner.model.method.needs_query)
        return tuple(part for part in (seen.tokens, seen.qkv, query) if part is not None)

    def _learn(self, labels: Tensor, seed: Tensor, *seen: Tensor) -> tuple[Tensor, ...]:
        noise = Noise(seed, self.own.start, self.batch)
        context = Context(True, self.task.index, labels, self.task.first, noise)
        self.learner.model.on_the_way_back = None if self._pause is None else self._note_pause
        features, loss = self._features(seen, context)
        self.learner.model.on_the_way_back = None
        logits = self.learner._logits(features, self.first)  # (B, new), or (B, C) where old classes are compared with
        labels = labels - self.first  # (B,)
        objective = self._weighed(nn.functional.cross_entropy(logits, labels))
        self.optimiser.zero_grad()
        (objective if loss is None else objective + loss).backward()
        self._settle_gradients()
        self.learner.model.method.before_step()
        self.optimiser.step()
        right = self._weighed((logits.argmax(dim=1) == labels).float().mean())
        self.tally += torch.stack([objective.detach(), right])
        return ()

    def _note_pause(self) -> None:
        assert self._pause is not None
        self._pause.record()

    def _features(self, seen: tuple[Tensor, ...], context: Context) -> tuple[Tensor, Tensor | None]:
        """Features of a batch, and what the method adds to the loss."""
        model = self.learner.model
        if seen[0].ndim == 2:  # frozen features
            return seen[0], None
        if model.backbone.learns:
            features, loss = model.features(seen[0], context)
        else:
            parts = iter(seen)
            tokens, qkv, query = (next(parts) if there else None for there in self._parts)
            assert tokens is not None
            features, loss = model.features(Embedded(tokens, qkv), context, query)
        if loss is not None:
            loss = self.world.size * loss if model.method.sums_loss else self._weighed(loss)
        more = self._feature_loss(features, context)
        return features, loss if more is None else more if loss is None else loss + more

    def _feature_loss(self, features: Tensor, context: Context) -> Tensor | None:
        """What the method says to the features of the whole batch, which it may compare with each other."""
        method, world = self.learner.model.method, self.world
        if world.alone or type(method).feature_loss is Method.feature_loss:
            return method.feature_loss(features, context)
        assert context.labels is not None
        others, labels = (world.gather(part, self.batch) for part in (features, context.labels))
        every = torch.cat([others[: self.own.start], features, others[self.own.stop :]])  # (B of all, D)
        loss = method.feature_loss(every, replace(context, labels=labels))
        # The gradient goes through the features that are here alone, and gradients are averaged, not added.
        return None if loss is None else world.size * loss

    def _weighed(self, mean: Tensor) -> Tensor:
        """A mean over the images here, as its part of the mean over all."""
        return mean if self.weight == 1 else self.weight * mean

    def _settle_gradients(self) -> None:
        """Average gradients over the processes, then clip them."""
        limit = self.learner.config.training.clip
        if self.world.alone and limit is None:
            return
        parts = [part for group in self.optimiser.param_groups for part in group["params"] if part.grad is not None]
        self.world.average([part.grad for part in parts])
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(parts, limit)


def looks_first(model: PromptedModel) -> bool:
    """Whether images are seen by a frozen backbone before prompts come in."""
    return not model.static and not model.backbone.learns


def _learning(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]
