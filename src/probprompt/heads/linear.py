"""Heads trained by gradient, and their alignment to all classes after a task."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from probprompt import randomness
from probprompt.heads.head import Head, HeadSettings, register
from probprompt.kernels.cuda_graphs import Captured, make_optimizer, set_rate


class LinearSettings(HeadSettings):
    """A linear layer, trained together with the prompts."""

    kind: Literal["linear"] = "linear"


class NormalizedSettings(HeadSettings):
    """A trained linear layer on normalized features."""

    kind: Literal["normalized"] = "normalized"


@register
class LinearHead(Head):
    """A linear layer that grows by one row per class, drawn from the seed and the class.

    >>> LinearHead(width=4, seed=0).grow(3)(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    Settings: ClassVar[type[LinearSettings | NormalizedSettings]] = LinearSettings
    trained = True
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, width: int, seed: int) -> None:
        super().__init__(width, seed)
        self.replace(torch.empty(0, width), torch.empty(0))

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Return shapes: weights (C, D) and biases (C,)."""
        return {"weight": (classes, self.width), "bias": (classes,)}

    def grow(self, classes: int) -> Self:
        """Add rows for ``classes`` new classes, drawn as by PyTorch's linear layer."""
        seen, width = self.weight.shape
        bound = 1 / math.sqrt(width)
        rows = [randomness.uniform((width + 1,), self.seed, "head", seen + new) for new in range(classes)]
        if rows:
            drawn = (bound * (2 * torch.stack(rows) - 1)).to(self.weight)  # (new, D + 1)
            self.replace(torch.cat([self.weight.data, drawn[:, :-1]]), torch.cat([self.bias.data, drawn[:, -1]]))
        return self

    def replace(self, weight: Tensor, bias: Tensor) -> None:
        """Replace all rows, by any number of them."""
        self.weight, self.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.contiguous())

    def _take(self, tensors: Mapping[str, Tensor | None]) -> None:
        weight, bias = tensors["weight"], tensors["bias"]
        assert weight is not None and bias is not None
        self.replace(weight.to(self.weight, copy=True), bias.to(self.bias, copy=True))

    def logits(self, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return logits ``(B, C)`` of features (B, D) under given rows (C, D) and biases (C,)."""
        return nn.functional.linear(features, weight, bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``(B, C)`` of features ``(B, D)``."""
        return self.logits(features, self.weight, self.bias)


@register
class NormalizedHead(LinearHead):
    """Standardized features times rows of length 1, without biases (APT); a logit is at most sqrt(D).

    >>> head = NormalizedHead(width=4, seed=0).grow(1)
    >>> bool(torch.isclose(head(torch.ones(1, 4) + head.weight), head(1 + 5 * head.weight), rtol=1e-3))
    True
    """

    Settings = NormalizedSettings

    def replace(self, weight: Tensor, bias: Tensor) -> None:
        """Replace all rows, by any number of them; biases stay zero."""
        super().replace(weight, torch.zeros_like(bias))
        self.bias.requires_grad_(False)

    def logits(self, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return logits ``(B, C)`` of features (B, D) under given rows (C, D), without biases."""
        standard = nn.functional.layer_norm(features, (self.width,))  # (B, D)
        return nn.functional.linear(standard, nn.functional.normalize(weight, dim=1))


MOMENTUM = 0.9
LLOYD_STEPS = 300  # maximum; k-means converges long before
Key = tuple[randomness.Key, ...]


class AlignmentConfig(BaseModel):
    """Alignment: fitting the head to Gaussian pseudo-features of all classes after each task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool | None = None
    """None: as the method does it, which is always except for fine-tuning."""
    epochs: int = Field(10, ge=1)
    lr: float = Field(1e-5, gt=0, le=1e36)
    min_lr: float = Field(1e-6, ge=0)
    first_lr: float | None = Field(None, gt=0)
    """Learning rate of the very first step, if different (1e-4 in VQ-Prompt's code)."""
    lr_delay: int = Field(0, ge=0)
    """Steps by which all later learning rates are late (1 in VQ-Prompt's code)."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """``sgd`` has a momentum of 0.9."""
    schedule: Literal["step", "epoch"] = "step"
    """Period after which the learning rate follows its cosine."""
    weight_decay: float = Field(5e-4, ge=0)
    batch_ratio: float = Field(4.0, gt=0)
    """Batch size of pseudo-features, as a multiple of the training batch size."""
    centroids: int = Field(1, ge=1)
    """Gaussians per class, one per cluster of a k-means; a small class repeats its clusters."""
    variance_floor: float = Field(1e-4, gt=0)
    augmented_statistics: bool = True
    """Take class statistics from augmented images (the paper's protocol), not from evaluation views. Without
    trainable prompts they always come from evaluation views."""


@dataclass(frozen=True)
class ClassStatistics:
    """Mean and variance of each class's features, for each of its K clusters: (C, K, D) each."""

    mean: Tensor
    variance: Tensor

    @classmethod
    def empty(cls, width: int, device: torch.device, centroids: int = 1) -> Self:
        """Return statistics without classes."""
        shape = (0, centroids, width)
        return cls(torch.empty(shape, device=device), torch.empty(shape, device=device))

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def centroids(self) -> int:
        """Clusters per class (K)."""
        return self.mean.shape[1]

    @property
    def center(self) -> Tensor:
        """Mean of what is drawn for each class (C, D)."""
        return self.mean.mean(dim=1)

    def extended(self, features: Tensor, labels: Tensor, classes: int, key: Key = (0,)) -> "ClassStatistics":
        """Add the next ``classes`` classes from their features (n, D); labels count all classes.

        ``key`` seeds k-means.
        """
        first = len(self)
        groups = [features[labels == first + new].double() for new in range(classes)]
        parts = [self._clusters(group, (*key, "k-means", first + new)) for new, group in enumerate(groups)]
        mean = torch.stack([torch.stack([cluster.mean(dim=0) for cluster in part]) for part in parts])  # (new, K, D)
        variance = torch.stack(
            [torch.stack([cluster.var(dim=0, correction=0) for cluster in part]) for part in parts]
        )  # (new, K, D)
        return ClassStatistics(
            torch.cat([self.mean, mean.to(self.mean)]), torch.cat([self.variance, variance.to(self.variance)])
        )

    def _clusters(self, group: Tensor, key: Key) -> list[Tensor]:
        """Split the features of a class ``(n, D)`` into K clusters.

        At most half its images give distinct clusters, and clusters of one image are dropped if others remain, since
        they have no variance. Clusters are repeated to K, so that all classes are drawn equally often.
        """
        count = max(1, min(self.centroids, len(group) // 2))
        if count == 1:
            return [group] * self.centroids
        cluster = k_means(group, count, *key)  # (n,)
        parts = [group[cluster == index] for index in range(count)]
        parts = [part for part in parts if len(part) > 1] or [part for part in parts if len(part)]
        return [parts[index % len(parts)] for index in range(self.centroids)]

    def draw(self, labels: Tensor, floor: float, generator: torch.Generator) -> Tensor:
        """Draw pseudo-features ``(n, D)`` of classes; ``floor`` is added to the variance."""
        count, device = self.centroids, self.mean.device
        cluster = torch.zeros_like(labels)  # (n,)
        if count > 1:
            cluster = torch.randint(count, labels.shape, device=device, generator=generator)
        noise = torch.randn(len(labels), self.mean.shape[2], device=device, generator=generator)
        return self.mean[labels, cluster] + (self.variance[labels, cluster] + floor).sqrt() * noise


def k_means(points: Tensor, count: int, *key: randomness.Key) -> Tensor:
    """Assign points (n, D) to ``count`` clusters (n,) by Lloyd's algorithm in float64.

    It starts from k-means++ under the key. A cluster may be empty if points coincide.

    >>> k_means(torch.tensor([[0.0], [9.0], [1.0], [8.0]]), 2, 0).tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])
    True
    """
    wide = points.double().cpu()  # on one kind of device, so that rounding does not depend on the machine
    centers = _spread_points(wide, count, key)  # (K, D)
    cluster = torch.cdist(wide, centers).argmin(dim=1)  # (n,)
    for _ in range(LLOYD_STEPS):
        members = nn.functional.one_hot(cluster, count).double()  # (n, K)
        size = members.sum(dim=0)[:, None]  # (K, 1)
        centers = torch.where(size > 0, members.T @ wide / size.clamp(min=1), centers)
        before, cluster = cluster, torch.cdist(wide, centers).argmin(dim=1)
        if torch.equal(before, cluster):
            break
    return cluster.to(points.device)


def _spread_points(points: Tensor, count: int, key: Key) -> Tensor:
    """Choose centers by k-means++: each is drawn by its squared distance to the nearest one."""
    draws = randomness.uniform((count,), *key).double()
    chosen = [int(draws[0] * len(points))]
    distance = torch.full((len(points),), math.inf, dtype=torch.float64)
    for draw in draws[1:]:
        distance = torch.minimum(distance, (points - points[chosen[-1]]).square().sum(dim=1))  # (n,)
        total = distance.cumsum(dim=0)
        chosen.append(min(int(torch.searchsorted(total, draw * total[-1], right=True)), len(points) - 1))
    return points[chosen]


def align(
    head: LinearHead,
    statistics: ClassStatistics,
    new_classes: int,
    settings: AlignmentConfig,
    batch: int,
    new_row_rate: float,
    key: Key,
) -> None:
    """Refit the head, with all its trained parameters, to all classes seen.

    A single new class was never trained: its row is fitted first, with AdamW at ``new_row_rate``, the rest fixed.
    """
    old_classes = len(statistics) - new_classes
    if not old_classes:
        return
    size = max(1, round(batch * settings.batch_ratio))
    if new_classes == 1:
        own = {"lr": new_row_rate, "first_lr": None, "lr_delay": 0, "optimizer": "adamw", "schedule": "step"}
        _refit(head, old_classes, old_classes, statistics, settings.model_copy(update=own), size, (*key, "new row"))
    _refit(head, 0, old_classes, statistics, settings, size, key)


def _refit(
    head: LinearHead,
    first_row: int,
    steps: int,
    statistics: ClassStatistics,
    settings: AlignmentConfig,
    size: int,
    key: Key,
) -> None:
    """Train the rows from ``first_row`` on for ``steps`` steps per epoch; others stay fixed."""
    weight, bias = (nn.Parameter(rows[first_row:].detach(), rows.requires_grad) for rows in (head.weight, head.bias))
    others = [] if first_row else [part for name, part in head.named_parameters() if name not in ("weight", "bias")]
    learning = [part for part in (weight, bias, *others) if part.requires_grad]
    if not learning:
        return
    device = head.weight.device
    optimizer = _make_optimizer(learning, settings, device)

    def learn(features: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        fixed = head.logits(features, head.weight[:first_row], head.bias[:first_row]).detach()
        logits = torch.cat([fixed, head.logits(features, weight, bias)], dim=1)  # (b, C)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
        return ()

    step, seen, rates = Captured(learn, device.type == "cuda"), len(statistics), _rates(settings, steps)
    for epoch in range(settings.epochs):
        generator = randomness.generator(device, *key, epoch)
        mixed = torch.randperm(seen * size, device=device, generator=generator)[: steps * size]
        for labels in (mixed % seen).split(size):
            rate = next(rates)
            for group in optimizer.param_groups:
                set_rate(group, rate)
            step(statistics.draw(labels, settings.variance_floor, generator), labels)  # (b, D), (b,)
    optimizer.zero_grad()
    with torch.no_grad():
        head.weight[first_row:] = weight
        head.bias[first_row:] = bias


def _make_optimizer(
    parameters: list[nn.Parameter], settings: AlignmentConfig, device: torch.device
) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if settings.optimizer == "sgd":
        return make_optimizer(torch.optim.SGD, groups, device, momentum=MOMENTUM, weight_decay=settings.weight_decay)
    return make_optimizer(torch.optim.AdamW, groups, device, weight_decay=settings.weight_decay)


def _rates(settings: AlignmentConfig, steps: int) -> Iterator[float]:
    """Yield the learning rate of every step: half a cosine, with an own first step if set."""
    base, final, total = settings.lr, settings.min_lr, steps * settings.epochs
    for done in range(total):
        along = done - done % steps if settings.schedule == "epoch" else max(0, done - settings.lr_delay)
        rate = final + (base - final) * (1 + math.cos(math.pi * along / total)) / 2
        yield settings.first_lr if settings.first_lr is not None and done == 0 else rate
