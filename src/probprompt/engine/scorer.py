"""Accuracy on every task seen so far, over all classes seen so far, without being told the task."""

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

    What never changes is computed once: the query of an image, since the backbone is frozen, and its features once
    the prompts are fixed. Several processes share the images of a task; what else is asked for, each computes.
    """

    def __init__(
        self, model: PromptedModel, images: Loaded, viewer: Preprocessor, batch: int, world: World = ALONE
    ) -> None:
        self.model, self.images, self.viewer, self.batch, self.world = model, images, viewer, batch, world
        self._queries = Cache(len(images.labels))
        self._features = Cache(len(images.labels))

    def accuracy(self, rows: Tensor, labels: Tensor) -> float:
        """Accuracy in % on these images; labels in order of appearance."""
        correct = sum(
            int((self.logits(part).argmax(dim=1) == truth).sum())
            for part, truth in zip(self._batches(rows), self._batches(labels), strict=True)
        )
        return 100 * self.world.total(correct) / len(rows)

    def task_queries(self, rows: Tensor) -> Tensor:
        """Queries (n, D) of a task's images, in the batches of :meth:`accuracy`; in the end every process knows all."""
        own = [self.queries(part) for part in self._batches(rows)]
        found = torch.cat(own) if own else torch.empty(0, self.model.backbone.width, device=rows.device)
        whole = self.world.gather(found, len(rows))
        if not self.world.alone and not self.model.method.trains_backbone:
            self._queries.keep(rows, whole)
        return whole

    def _batches(self, rows: Tensor) -> tuple[Tensor, ...]:
        """What this process looks at of rows (n,), a batch at a time."""
        own = self.world.share(rows)
        return own.split(self.batch) if len(own) else ()

    @torch.no_grad()
    def logits(self, rows: Tensor) -> Tensor:
        """Logits (n, C) of these images."""
        return self._logits(rows, self.features(rows))

    @torch.no_grad()
    def computed_logits(self, rows: Tensor) -> Tensor:
        """The same from features that are computed anew, whatever the cache knows."""
        return self._logits(rows, self._compute(rows))

    def _logits(self, rows: Tensor, features: Tensor) -> Tensor:
        query = self.queries(rows) if self.model.head.width > features.shape[1] else None
        logits: Tensor = self.model.head(self.model.head_input(features, query))
        return logits

    @torch.no_grad()
    def features(self, rows: Tensor) -> Tensor:
        """Features of these images as the head reads them (n, D or more), from the cache where nothing changes them."""
        return self._features.get(rows, self._compute) if self.model.static else self._compute(rows)

    def _compute(self, rows: Tensor) -> Tensor:
        images = self.viewer.evaluation(self.images.store, rows)
        seen, query = self.model.embed(images), None
        if self.model.method.needs_query:
            query = self._queries.get(rows, lambda new: self._ask(new, seen if len(new) == len(rows) else None))
        return self.model.evaluated(images, seen, self.model.known(self.images.store, rows), query)

    @torch.no_grad()
    def queries(self, rows: Tensor) -> Tensor:
        """Queries (n, D) of these images, from the cache where they were needed before."""
        if self.model.method.trains_backbone:  # then it does change
            return self._ask(rows)
        return self._queries.get(rows, self._ask)

    def _ask(self, rows: Tensor, images: Tensor | Embedded | None = None) -> Tensor:
        if images is None:
            images = self.viewer.evaluation(self.images.store, rows)
        return self.model.backbone.query(images, self.model.method.query_readout)


class Cache:
    """Rows of one table that are computed once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._table: Tensor | None = None
        self._known = torch.zeros(size, dtype=torch.bool)

    def get(self, rows: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """These rows (n, D); those not known yet are computed, together."""
        places = rows.cpu()
        missing = (~self._known[places]).nonzero().flatten()
        if len(missing) or self._table is None:
            wanted = rows[missing.to(rows.device)]  # (m,)
            return self.keep(wanted, compute(wanted))[rows]
        return self._table[rows]

    def keep(self, rows: Tensor, values: Tensor) -> Tensor:
        """Take note of rows that were computed (n, D), and give the table."""
        if self._table is None:
            self._table = values.new_empty(self.size, values.shape[1])
        self._table[rows] = values
        self._known[rows.cpu()] = True
        return self._table
