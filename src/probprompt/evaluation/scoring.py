"""Accuracy on every task seen so far, over all classes seen so far, without being told the task."""

import torch
from torch import Tensor

from probprompt.data.loading import Loaded, Viewer
from probprompt.training.model import PromptedModel


class Scorer:
    """Scores a model on the test images of tasks. The backbone is frozen, so each query is computed once."""

    def __init__(self, model: PromptedModel, images: Loaded, viewer: Viewer, batch: int) -> None:
        self.model, self.images, self.viewer, self.batch = model, images, viewer, batch
        self._queries: dict[int, Tensor] = {}

    def accuracy(self, rows: Tensor, labels: Tensor) -> float:
        """Accuracy in % on these images; labels in order of appearance."""
        correct = sum(
            int((self.logits(part).argmax(dim=1) == truth).sum())
            for part, truth in zip(rows.split(self.batch), labels.split(self.batch), strict=True)
        )
        return 100 * correct / len(rows)

    def logits(self, rows: Tensor) -> Tensor:
        """Logits (n, C) of these images."""
        images = self.viewer.evaluation(self.images.store, rows)
        query = self.queries(rows, images) if self.model.method.needs_query else None
        return self.model.predict(images, query)

    def queries(self, rows: Tensor, images: Tensor | None = None) -> Tensor:
        """Queries (n, D) of these images, from the cache where they were needed before."""
        wanted = rows.tolist()
        missing = [place for place, row in enumerate(wanted) if row not in self._queries]
        if missing:
            new = rows[missing]
            views = self.viewer.evaluation(self.images.store, new) if images is None else images[missing]
            self._queries.update(zip(new.tolist(), self.model.backbone.query(views), strict=True))
        return torch.stack([self._queries[row] for row in wanted])
