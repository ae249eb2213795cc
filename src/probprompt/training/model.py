"""The whole model: image to query, query to prompts, image and prompts to features, features to logits."""

import torch
from torch import Tensor, nn

from probprompt.backbone import FrozenViT
from probprompt.heads import LinearHead
from probprompt.methods import EVALUATION, Context, Method


class PromptedModel(nn.Module):
    """A frozen backbone, a method that prompts it, and a head."""

    def __init__(self, backbone: FrozenViT, method: Method, head: LinearHead) -> None:
        super().__init__()
        self.backbone, self.method, self.head = backbone, method, head

    @property
    def static(self) -> bool:
        """Whether the features of an image never change, so that only the head learns."""
        return not any(parameter.requires_grad for parameter in self.method.parameters())

    def features(
        self, images: Tensor, context: Context = EVALUATION, query: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Features (B, D) of images, and the method's own loss; a query computed before may be given."""
        if query is None and self.method.needs_query:
            query = self.backbone.query(images)  # (B, D)
        prompted = self.method.prompts(query, context)
        if not prompted.prompts:
            return self.backbone.query(images), prompted.loss
        return self.backbone.features(images, prompted.prompts), prompted.loss

    @torch.no_grad()
    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Logits (B, C) over the classes seen so far, at evaluation."""
        logits: Tensor = self.head(self.features(images, EVALUATION, query)[0])
        return logits
