"""The whole model: image to query, query to prompts, image and prompts to features, features to logits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from probprompt.backbones.vit import DTYPES, Embedded, FrozenViT, Precision
from probprompt.data.transforms import Packed
from probprompt.errors import UserError
from probprompt.heads.head import Head
from probprompt.kernels.cuda_graphs import Replays
from probprompt.methods import EVALUATION, Context, Method
from probprompt.prompts import Prompts, Tokens


class PromptedModel(nn.Module):
    """A backbone, a method that prompts or trains it, and a head."""

    def __init__(self, backbone: FrozenViT, method: Method, head: Head) -> None:
        super().__init__()
        if head.layers >= backbone.depth:
            most = backbone.depth - 1
            raise UserError(f"head.layers is {head.layers}, but the backbone supports at most {most}. Reduce it.")
        self.backbone, self.method, self.head = backbone, method, head
        self._mixed: Precision = "fp32"  # autocast precision of a trained backbone
        self._replays: Replays | None = None
        self.on_the_way_back: Callable[[], None] | None = None
        """Called in the backward pass once the backbone is done and only the method is left."""
        if method.trains_backbone:
            backbone.unfreeze()

    def set_precision(self, precision: Precision) -> None:
        """Set the precision of the backbone; trained weights stay float32."""
        if self.method.trains_backbone:
            self._mixed = precision
        else:
            self.backbone.set_precision(precision)

    @property
    def precision(self) -> Precision:
        """Precision of the backbone."""
        return self._mixed if self.method.trains_backbone else self.backbone.precision

    def adaptable(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that decide the features: the backbone's only in fine-tuning."""
        yield from self.method.parameters()
        if self.method.trains_backbone:
            yield from self.backbone.parameters()

    def fix(self) -> None:
        """Freeze the features of all images: from now on only the head learns."""
        self.method.requires_grad_(False)
        self.backbone.unfreeze(False)

    @property
    def static(self) -> bool:
        """True if features never change, so that only the head learns."""
        return not any(parameter.requires_grad for parameter in self.adaptable())

    @property
    def embeds_first(self) -> bool:
        """True if a frozen backbone sees the images before the prompts."""
        return not self.static and not self.backbone.learns

    def embed(self, images: Tensor) -> Tensor | Embedded:
        """Return what passes over the same images share, if the backbone is frozen."""
        return images if self.backbone.learns else self.backbone.embed(images)

    def query(self, images: Tensor | Embedded) -> Tensor | None:
        """Return the queries ``(B, D)`` of images, or None if the method needs none."""
        return self.backbone.query(images, self.method.query_readout) if self.method.needs_query else None

    def features(
        self, images: Tensor | Embedded, context: Context = EVALUATION, query: Tensor | None = None, layers: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return features ``(B, D)`` of images and the method's own loss.

        With ``layers``, features of that number of intermediate blocks follow each feature.
        """
        if isinstance(images, Tensor) and query is None:
            images = self.embed(images)
        if query is None:
            query = self.query(images)  # (B, D)
        prompted = self.method.prompts(query, context)
        if not prompted.prompts and not self.method.trains_backbone:
            return self.backbone.query(images, layers=layers), prompted.loss
        if self.on_the_way_back is not None:
            _call_on_the_way_back(self.on_the_way_back, prompted.prompts)
        device = next(self.backbone.parameters()).device
        with torch.autocast(device.type, DTYPES[self._mixed], enabled=self._mixed != "fp32"):
            return self.backbone.features(images, prompted.prompts, self.method.readout, layers), prompted.loss

    def evaluated(
        self,
        images: Tensor,
        seen: Tensor | Embedded,
        context: Context = EVALUATION,
        query: Tensor | None = None,
    ) -> Tensor:
        """Return features with intermediate ones (B, D or more); see :meth:`head_input`.

        ``seen`` is the result of :meth:`embed`. Features are averaged over the method's draws of noise, and over images
        and their flips if the head asks for it.
        """
        contexts = [replace(context, draw=draw) for draw in range(self.method.draws)]
        views = [(seen, query)]
        if self.head.flip_average:
            mirrors = self.embed(images.flip(-1))
            views.append((mirrors, self.query(mirrors)))
        parts = [self.features(view, each, query, self.head.layers)[0] for view, query in views for each in contexts]
        return parts[0] if len(parts) == 1 else torch.stack(parts).mean(dim=0)

    def head_input(self, features: Tensor, query: Tensor | None) -> Tensor:
        """Return the head's input: the feature, the query if used, then intermediate features."""
        if self.head.width == features.shape[1]:
            return features
        assert query is not None
        width = query.shape[1]
        return torch.cat([features[:, :width], query, features[:, width:]], dim=1)

    def known(self, store: Packed, rows: Tensor, context: Context = EVALUATION) -> Context:
        """Return the context of stored images ``(B,)``, with their keys if the method needs them."""
        return replace(context, keys=store.keys(rows)) if self.method.needs_keys else context

    def look(self, images: Tensor, query: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Return the head's input at evaluation (B, D or more).

        On a GPU, batches of few sizes are replayed, since launching the kernels may take longer than running them.
        """
        if query is not None or not images.is_cuda:
            return self._look(images, keys, query)
        if self._replays is None:
            self._replays = Replays(self._look, self)
        return self._replays(images) if keys is None else self._replays(images, keys)

    def _look(self, images: Tensor, keys: Tensor | None = None, query: Tensor | None = None) -> Tensor:
        seen, context = self.embed(images), EVALUATION if keys is None else Context(keys=keys)
        query = self.query(seen) if query is None else query
        return self.head_input(self.evaluated(images, seen, context, query), query)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_replays": None}  # a copy needs its own memory

    @torch.no_grad()
    def predict(self, images: Tensor, query: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Return logits ``(B, C)`` over the classes seen so far.

        ``keys`` (B,) of the stored pixels are required if ``method.needs_keys``.
        """
        logits: Tensor = self.head(self.look(images, query, keys))
        return logits


def _call_on_the_way_back(function: Callable[[], None], prompts: Prompts) -> None:
    """Call a function once the gradient of the first block's prompt is computed."""
    prompt = prompts[min(prompts)]
    value = prompt.tokens if isinstance(prompt, Tokens) else prompt.key
    if value.requires_grad:
        value.register_hook(lambda _: function())
