"""Training images of a task: batches of random views, features of all images, and cached queries.

The backbone is frozen, so the query of a view depends on neither method nor prompts. Views depend only on the seed, the
epoch and the image, so another method on the same stream needs the same queries. Caching them saves a third of the
work.
"""

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from probprompt import randomness
from probprompt.config import RunConfig
from probprompt.data.image_store import Loaded
from probprompt.data.transforms import DRAWS, Boxes, Preprocessor, RandomViews, draws_needed, random_boxes
from probprompt.distributed import ALONE, World
from probprompt.engine.model import PromptedModel
from probprompt.methods import EVALUATION, Context
from probprompt.progress import SILENT

SWITCH = "PROBPROMPT_QUERIES"
"""Environment variable; ``keep`` caches queries."""
SHARE = 0.1
"""Share of a GPU's memory for queries."""
ROOM = 2**30
"""Bytes for queries without a GPU."""

Advance = Callable[[int], None]


@dataclass(frozen=True)
class TaskImages:
    """Training images of a task: rows in the loaded set, and labels in order of appearance."""

    index: int
    first: int  # label of its first class
    classes: int
    rows: Tensor  # (n,)
    labels: Tensor  # (n,)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class Inputs:
    """A batch: views, labels, and the key of the step's noise as one number."""

    views: tuple[Tensor, ...]  # images (B, 3, H, W), frozen features (B, D), or the boxes of images
    labels: Tensor  # (B,)
    seed: Tensor  # (1,)
    query: tuple[Tensor, ...] = ()  # (B, D), where it is known before


class Queries:
    """Cached queries of one stream of views, by task and epoch, in the order of the epoch."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Tensor] = {}

    def get(self, task: int, epoch: int, count: int) -> Tensor | None:
        """Return the first ``count`` queries ``(count, D)`` of an epoch, if cached."""
        queries = self._held.get((task, epoch))
        return None if queries is None or len(queries) < count else queries[:count]

    def keep(self, task: int, epoch: int, queries: Tensor) -> None:
        """Cache an epoch's queries ``(n, D)`` if memory allows."""
        known, device, room = self._held.get((task, epoch)), queries.device, float(ROOM)
        if device.type == "cuda":
            room = SHARE * torch.cuda.get_device_properties(device).total_memory
        held = sum(kept.nbytes for kept in _OF.values())
        if (known is None or len(known) < len(queries)) and queries.nbytes + held <= room:
            self._held[task, epoch] = queries

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(queries.nbytes for queries in self._held.values())


_OF: dict[Hashable, Queries] = {}


def queries_of(stream: Hashable) -> Queries | None:
    """Return the cache of a stream, keyed by all that decides its views; None without caching."""
    return _OF.setdefault(stream, Queries()) if os.environ.get(SWITCH) == "keep" else None


def forget_queries() -> None:
    """Free the memory of all queries."""
    _OF.clear()


@dataclass(frozen=True, eq=False)
class Drawn:
    """All random numbers of an epoch, on the host."""

    order: Tensor  # (n,)
    noise: Tensor  # (steps, 2): the key of each step's noise
    views: tuple[Tensor, Tensor] | None  # (n, draws) each; none where features are frozen


class Prefetcher:
    """Draws the numbers of the next epoch while the GPU trains the current one."""

    def __init__(self, draw: Callable[[TaskImages, int], Drawn], epochs: int) -> None:
        self._draw, self._epochs = draw, epochs
        self._next: tuple[tuple[int, int, int], Future[Drawn]] | None = None

    def take(self, task: TaskImages, epoch: int) -> Drawn:
        """Return the numbers of this epoch, and start to draw those of the next."""
        key, ready = (task.index, len(task), epoch), self._next
        self._next = None
        drawn = ready[1].result() if ready and ready[0] == key else self._draw(task, epoch)
        if epoch + 1 < self._epochs:
            self._next = ((*key[:2], epoch + 1), _helper().submit(self._draw, task, epoch + 1))
        return drawn


@cache
def _helper() -> ThreadPoolExecutor:
    """Return the thread that draws ahead."""
    return ThreadPoolExecutor(1, "drawing")


class TaskLoader:
    """Feeds a model with the images of tasks, in random batches or all of them once.

    Each process loads its part of every batch and of every pass.
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
        """Cached queries of training views."""
        self.device = images.labels.device
        self._frozen: tuple[TaskImages, tuple[Tensor, Tensor | None]] | None = None  # task; features and queries
        self._ahead = Prefetcher(self._draw, config.training.epochs if self.device.type == "cuda" else 0)

    # Batches

    def batch(self, task: TaskImages) -> int:
        """Return the number of images per step, over all processes."""
        return min(self.config.training.batch_size, len(task))

    def steps(self, task: TaskImages) -> int:
        """Return the number of optimizer steps per epoch; the last, smaller batch is dropped."""
        return len(task) // self.batch(task)

    def kept_queries(self) -> Queries | None:
        """Return the query cache, if training needs queries."""
        needed = self.model.method.needs_query and self.world.alone and self.model.embeds_first
        return self.queries if needed else None

    def batches(self, task: TaskImages, epoch: int, queries: Tensor | None = None) -> Iterator[Inputs]:
        """Yield the batches of an epoch in random order; ``queries`` (n, D) are in that order."""
        batch, drawn = self.batch(task), self._ahead.take(task, epoch)
        order, noise = drawn.order.to(self.device), drawn.noise.to(self.device)[:, :1]  # (n,), (steps, 1)
        rows, labels = task.rows[order], task.labels[order]  # (n,)
        if drawn.views is None:
            views: Tensor | RandomViews = self.evaluation_features(task)
        else:
            views = self._random_views(task, drawn.views)
        views = views[order]
        own = self.world.part(batch)
        for step in range(self.steps(task)):
            part = slice(step * batch + own.start, step * batch + own.stop)
            known = () if queries is None else (queries[part],)
            yield Inputs(self._views_of(rows[part], views[part]), labels[part], noise[step], known)

    def _views_of(self, rows: Tensor, view: Tensor | RandomViews) -> tuple[Tensor, ...]:
        """Return features, images, or the rows and boxes that :meth:`show` takes."""
        if isinstance(view, Tensor):
            return (view,)
        if self.viewer.is_one_kernel(self.images.store, view.augmentation):
            return (rows, view.boxes.places, *([] if view.boxes.flip is None else [view.boxes.flip]))
        return (self.viewer.random(self.images.store, rows, view),)

    def show(self, rows: Tensor, *boxes: Tensor) -> Tensor:
        """Return the images ``(B, 3, H, W)`` of boxes; features and images are returned unchanged."""
        return self.viewer.random(self.images.store, rows, RandomViews(Boxes(*boxes))) if boxes else rows

    def _draw(self, task: TaskImages, epoch: int) -> Drawn:
        seed, steps = self.config.seeds.data, self.steps(task)
        order = torch.from_numpy(randomness.permutation(len(task), seed, "order", task.index, epoch))
        seeds = [randomness.number(seed, "noise", task.index, epoch * steps + step) for step in range(steps)]
        # Aligned to 16 bytes, as captured tensors are: Triton compiles another kernel for other addresses.
        noise = torch.tensor([[key, 0] for key in seeds])
        return Drawn(order, noise, None if self.model.static else self._draw_views(task, "views", epoch))

    def _draw_views(self, task: TaskImages, purpose: str, epoch: int) -> tuple[Tensor, Tensor]:
        """Draw numbers ``(n, draws)`` for the boxes and for the colors of random views."""
        key = (self.config.seeds.data, purpose, task.index, epoch)
        colors = draws_needed(self.config.training.augmentation)
        return randomness.uniform((len(task), DRAWS), *key), randomness.uniform((len(task), colors), *key, "colour")

    def _random_views(self, task: TaskImages, drawn: tuple[Tensor, Tensor]) -> RandomViews:
        settings = self.config.training
        draws, colors = (part.to(self.device) for part in drawn)
        sizes = self.images.store.sizes[task.rows]  # (n, 2)
        boxes = random_boxes(sizes, draws, settings.crop_scale, flip=settings.flip)
        return RandomViews(boxes, settings.augmentation, colors)

    # All images of a task

    def passes(self, task: TaskImages) -> int:
        """Return how often :meth:`compute` advances."""
        return -(-len(self.world.share(task.rows)) // self.config.images_at_a_time(self.device.type))

    def evaluation(self, task: TaskImages, advance: Advance = SILENT.advance) -> tuple[Tensor, Tensor | None]:
        """Return features and queries of the evaluation views, cached once they are final."""
        if not self.model.static:
            return self.compute(task, advance)
        if self._frozen is None or self._frozen[0] is not task:
            self._frozen = (task, self.compute(task, advance))
        return self._frozen[1]

    def evaluation_features(self, task: TaskImages, advance: Advance = SILENT.advance) -> Tensor:
        """Return features ``(n, D)`` of the evaluation views, without intermediate features."""
        return self.evaluation(task, advance)[0][:, : self.model.backbone.width]

    def augmented_features(self, task: TaskImages, advance: Advance) -> Tensor:
        """Return features ``(n, D)`` of one random view of each image."""
        return self.compute(task, advance, self._random_views(task, self._draw_views(task, "statistics", 0)))[0]

    @torch.no_grad()
    def compute(
        self,
        task: TaskImages,
        advance: Advance = SILENT.advance,
        views: RandomViews | None = None,
        only_queries: bool = False,
        context: Context | None = None,
        flipped: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the head's features and the queries of all the task's images, or of their flips."""
        method = self.model.method
        if context is None:
            adapts = self.config.adapts(task.index, self.model.head.trained)
            context = method.statistics_context(task.index) if adapts else EVALUATION
        features, queries = [], []
        own = self.world.share(torch.arange(len(task), device=self.device))
        for rows in own.split(self.config.images_at_a_time(self.device.type)) if len(own) else ():
            store, indices = self.images.store, task.rows[rows]
            if views is None:
                images = self.viewer.evaluation(store, indices)
            else:
                images = self.viewer.random(store, indices, views[rows])
            images = images.flip(-1) if flipped else images
            seen = self.model.embed(images)
            query = self.model.query(seen)
            if query is not None:
                queries.append(query)
            if not only_queries:
                features.append(self.model.evaluated(images, seen, self.model.known(store, indices, context), query))
            advance(1)
        nothing = torch.empty(0, self.model.backbone.width, device=self.device)
        joined = torch.cat(features) if features else nothing.repeat(1, 1 + 2 * self.model.head.layers)
        asked = torch.cat(queries) if queries else nothing
        return (
            nothing if only_queries else self.world.gather(joined, len(task)),
            self.world.gather(asked, len(task)) if method.needs_query else None,
        )
