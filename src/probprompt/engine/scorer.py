"""Accuracy on every task seen so far, over all classes seen so far, without the task's identity."""

from collections.abc import Callable

import torch
from torch import Tensor

from probprompt.backbones.vit import Embedded
from probprompt.data.image_store import Loaded
from probprompt.data.transforms import Preprocessor
from probprompt.distributed import ALONE, World
from probprompt.engine.model import PromptedModel


class Scorer:
    """Scores a model on the test images of tasks.

    Queries are computed once, since the backbone is frozen, and features once the prompts are frozen. Several processes
    share the images of a task.
    """

    def __init__(
        self, model: PromptedModel, images: Loaded, viewer: Preprocessor, batch: int, world: World = ALONE
    ) -> None:
        self.model, self.images, self.viewer, self.batch, self.world = model, images, viewer, batch, world
        self._queries = Cache(len(images.labels))
        self._features = Cache(len(images.labels))

    def accuracy(self, rows: Tensor, labels: Tensor) -> float:
        """Return the accuracy in % on images with labels in order of appearance."""
        correct = sum(
            int((self.logits(part).argmax(dim=1) == truth).sum())
            for part, truth in zip(self._batches(rows), self._batches(labels), strict=True)
        )
        return 100 * self.world.total(correct) / len(rows)

    def task_queries(self, rows: Tensor) -> Tensor:
        """Return queries ``(n, D)`` of a task on every process, batched as in :meth:`accuracy`."""
        own = [self.queries(part) for part in self._batches(rows)]
        queries = torch.cat(own) if own else torch.empty(0, self.model.backbone.width, device=rows.device)
        whole = self.world.gather(queries, len(rows))
        if not self.world.alone and not self.model.method.trains_backbone:
            self._queries.keep(rows, whole)
        return whole

    def _batches(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split this process's part of rows ``(n,)`` into batches."""
        own = self.world.share(rows)
        return own.split(self.batch) if len(own) else ()

    @torch.no_grad()
    def logits(self, rows: Tensor) -> Tensor:
        """Return logits ``(n, C)`` of images."""
        return self._logits(rows, self.features(rows))

    @torch.no_grad()
    def computed_logits(self, rows: Tensor) -> Tensor:
        """Return logits from recomputed features, without the cache."""
        return self._logits(rows, self._compute(rows))

    def _logits(self, rows: Tensor, features: Tensor) -> Tensor:
        query = self.queries(rows) if self.model.head.width > features.shape[1] else None
        logits: Tensor = self.model.head(self.model.head_input(features, query))
        return logits

    @torch.no_grad()
    def features(self, rows: Tensor) -> Tensor:
        """Return head features (n, D or more) of images, cached once they are final."""
        return self._features.get(rows, self._compute) if self.model.static else self._compute(rows)

    def _compute(self, rows: Tensor) -> Tensor:
        images = self.viewer.evaluation(self.images.store, rows)
        seen, query = self.model.embed(images), None
        if self.model.method.needs_query:
            query = self._queries.get(rows, lambda new: self._ask(new, seen if len(new) == len(rows) else None))
        return self.model.evaluated(images, seen, self.model.known(self.images.store, rows), query)

    @torch.no_grad()
    def queries(self, rows: Tensor) -> Tensor:
        """Return queries ``(n, D)`` of images, cached if possible."""
        if self.model.method.trains_backbone:  # the queries change
            return self._ask(rows)
        return self._queries.get(rows, self._ask)

    def _ask(self, rows: Tensor, images: Tensor | Embedded | None = None) -> Tensor:
        if images is None:
            images = self.viewer.evaluation(self.images.store, rows)
        return self.model.backbone.query(images, self.model.method.query_readout)


class Cache:
    """Rows of a table that are computed once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._table: Tensor | None = None
        self._known = torch.zeros(size, dtype=torch.bool)

    def get(self, rows: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return rows ``(n, D)``; missing ones are computed together."""
        places = rows.cpu()
        missing = (~self._known[places]).nonzero().flatten()
        if len(missing) or self._table is None:
            new = rows[missing.to(rows.device)]  # (m,)
            return self.keep(new, compute(new))[rows]
        return self._table[rows]

    def keep(self, rows: Tensor, values: Tensor) -> Tensor:
        """Store computed rows ``(n, D)``, and return the table."""
        if self._table is None:
            self._table = values.new_empty(self.size, values.shape[1])
        self._table[rows] = values
        self._known[rows.cpu()] = True
        return self._table
