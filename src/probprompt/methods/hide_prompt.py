"""HiDe-Prompt: a prompt per task, and a head on the query that predicts the task (Wang et al., NeurIPS 2023).

*Task identity*: a residual perceptron and a linear head over all classes seen read the query. At evaluation their best
class decides the task whose prompt the image gets. *Within a task*: a prefix per task and block, mixed with a small
share of the earlier tasks' mean, and a contrastive loss on features of the batch and of past classes. *Across tasks*:
both heads are refitted on Gaussians of all classes, the identity head here and the head of prompted features by the
engine.

The published code trains the task identity in a separate run, before. Here its loss is added to that of the prompts in
the first ``identity_epochs`` of a task, with the same augmentation and schedule. The two share no parameter and Adam
treats each parameter separately, so each learns as it would alone. *Gradient clipping by the common norm couples them.*
Alignment here trains perceptron and head; that of the engine, only the head.

The contrastive loss is ``weight * mean_i -log softmax_j(M_i . M_j / temperature)[i]`` with M = [k-means centroids of
the past classes' features; features of the batch], without normalization.

The published code reshapes prompts so that keys and values go to other images of the batch, and its results depend on
the test batches. Here every image gets its own; ``legacy_reshape`` restores the published error.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from probprompt import randomness
from probprompt.heads.linear import AlignmentConfig, ClassStatistics, LinearHead, align
from probprompt.methods.base import Blocks, Context, Method, MethodConfig, Prompted, Shape, TaskSummary, register
from probprompt.methods.settings import Experiment, Positive, Settings, TunedRates, google_protocol
from probprompt.prompts import Prefix


class IdentityAlignmentConfig(AlignmentConfig):
    """Alignment of the task identity; its statistics always come from evaluation views."""

    epochs: int = Field(30, ge=1)
    lr: float = Field(0.005 * 24 / 256, gt=0, le=1e36)
    min_lr: float = Field(0.0, ge=0)
    optimizer: Literal["adamw", "sgd"] = "sgd"
    schedule: Literal["step", "epoch"] = "epoch"
    weight_decay: float = Field(0.0, ge=0)
    batch_ratio: float = Field(1.0, gt=0)
    """Batch size of pseudo-queries, as a multiple of ``identity_batch_size``."""
    centroids: int = Field(10, ge=1)


class HiDePromptConfig(MethodConfig):
    """Settings of HiDe-Prompt."""

    name: Literal["hide-prompt"] = "hide-prompt"
    blocks: Blocks = (0, 1, 2, 3, 4)
    """Blocks that receive prompts, counted from 0."""
    tokens: int = Field(40, ge=2, multiple_of=2)
    """Prompt tokens per block and task, half for the keys and half for the values (CIFAR-100: 10)."""
    momentum: float = Field(0.01, ge=0, lt=1)
    """Share of the mean of earlier tasks' prompts in a task's prompt."""
    copy_previous: bool = True
    """Start a task's prompt as a copy of the previous one; otherwise it is drawn."""
    contrast: float = Field(0.5, ge=0)
    """Weight of the contrastive loss (CIFAR-100: 0.1, CUB: 0.01)."""
    contrast_temperature: Positive = 0.8
    contrast_centroids: int = Field(10, ge=1)
    """Centroids per past class in the contrastive loss."""
    identity_lr_scale: Positive = 1 / 60
    """Learning rate of the task identity, as a multiple of the prompts' (CUB: 1/3)."""
    identity_epochs: int | None = Field(None, ge=1)
    """Number of epochs of a task, from its first, that train the task identity; None: all. With gradient clipping by
    the common norm, these epochs also train the prompts differently."""
    identity_alignment: IdentityAlignmentConfig = IdentityAlignmentConfig()
    identity_batch_size: int = Field(24, ge=1)
    identity_row_lr: Positive = 0.0025
    """Learning rate of the alignment for the row of a task's only class, which training cannot fit."""
    legacy_reshape: bool = False
    """Published error: axes of keys, values and images are mixed up, in training and at evaluation."""

    def marks(self) -> tuple[str, ...]:
        """Return a warning if predictions depend on other images in the batch."""
        mixed = "legacy_reshape: images get keys and values of others in the batch, so predictions depend on them"
        return (mixed,) if self.legacy_reshape else ()


class IdentityHead(LinearHead):
    """Linear head on LayerNorm(q + W' GELU(W q)), with a perceptron twice as wide as the query."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__(width, seed)
        self.inner = _layer(width, 2 * width, seed, "identity", 0)
        self.outer = _layer(2 * width, width, seed, "identity", 1)
        self.norm = nn.LayerNorm(width)

    def logits(self, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return logits ``(B, C)`` of queries (B, D) under given rows (C, D) and biases (C,)."""
        change = self.outer(functional.gelu(self.inner(features)))  # (B, D)
        return functional.linear(self.norm(features + change), weight, bias)


@register
class HiDePrompt(Method):
    """A prompt per task, chosen by a head on the query."""

    Config = HiDePromptConfig
    summary = "a prefix per task, chosen by a refitted head on the query"
    tuned_rates = TunedRates(matched=2.0, ridge=8.0)
    needs_summary = True

    contrasts: Tensor
    epochs_begun: Tensor
    query_mean: Tensor
    query_variance: Tensor
    task_of_class: Tensor

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the settings of the authors' code, except for clipping.

        Gradients of prompts and task identity, which it trains separately, are clipped by their common norm. Its batch
        size of 24 is that of one of eight GPUs.
        """
        protocol, known = experiment.protocol, experiment.known
        slower = 1 if protocol == "cub200" else 10  # the head's learning rate, compared with the prompts'
        settings = google_protocol(
            rate=0.03,
            batch=24,
            epochs=150 if protocol == "imagenet-r" else 50,
            tokens=10 if protocol == "cifar100" else 40,
            contrast={"cifar100": 0.1, "cub200": 0.01}.get(protocol, 0.5),
            identity_lr_scale=1 / 3 if protocol == "cub200" else 1 / 60,
            identity_epochs=20,
        )
        settings["training"] |= {
            "batch_size": 192 if known else 24,
            "head_lr": 0.03 * 24 / 256 / slower,
            "prompt_lr_scale": float(slower),
            "schedule": "cosine" if protocol == "imagenet-r" else "step",
        }
        settings["alignment"] = {
            "enabled": True,
            "centroids": 10,
            "optimizer": "sgd",
            "schedule": "epoch",
            "epochs": 30,
            "lr": 0.005,
            "min_lr": 0.0,
            "weight_decay": 0.0,
            "batch_ratio": 120 / 192 if known else 5.0,
            "augmented_statistics": False,
        }
        if protocol == "cifar100":
            settings["backbone"]["normalization"] = "cifar100"
            settings["training"] |= {"augmentation": "crop+brightness", "crop_scale": (0.08, 1.0)}
        return settings

    def __init__(self, config: HiDePromptConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)
        shape.check_blocks(config.blocks)
        self.config = config
        self.pool = nn.ParameterList()  # per task (blocks, M, D)
        self.identity = IdentityHead(shape.width, seed)
        clusters = config.identity_alignment.centroids
        self.register_buffer("contrasts", torch.empty(0, config.contrast_centroids, shape.width))  # (C, K, D)
        self.register_buffer("query_mean", torch.empty(0, clusters, shape.width))  # (C, K, D)
        self.register_buffer("query_variance", torch.empty(0, clusters, shape.width))  # (C, K, D)
        self.register_buffer("task_of_class", torch.empty(0, dtype=torch.long), persistent=False)  # (C,)
        # Epochs of the task. Saved if there is a limit, because a resumed task starts again but its past epochs do not.
        self.register_buffer("epochs_begun", torch.tensor(0), persistent=config.identity_epochs is not None)
        self.identity_learns = True

    def begin_task(self, task: int, classes: int) -> None:
        """Add the task's prompt, freeze the earlier ones, and add its classes."""
        shape = (self.config.tokens, self.shape.width)
        key = (self.seed, "task prompt")
        drawn = [randomness.initial("symmetric", shape, *key, block, task) for block in self.config.blocks]
        prompt = torch.stack(drawn).to(self.contrasts)  # (blocks, M, D)
        if self.config.copy_previous and len(self.pool):
            prompt = self.mixed()[-1].detach().clone()
        self.pool.requires_grad_(False)
        self.pool.append(nn.Parameter(prompt))
        self.epochs_begun.zero_()
        self.identity_learns = True
        self.identity.grow(classes)
        for name in ("contrasts", "query_mean", "query_variance"):
            held = self.get_buffer(name)
            self.register_buffer(name, torch.cat([held, held.new_zeros(classes, *held.shape[1:])]))
        belongs = self.task_of_class.new_full((classes,), task)
        self.register_buffer("task_of_class", torch.cat([self.task_of_class, belongs]), persistent=False)

    def begin_epoch(self) -> None:
        """Count the task's epochs: only the first ones train the task identity."""
        self.epochs_begun += 1
        limit = self.config.identity_epochs
        self.identity_learns = limit is None or int(self.epochs_begun) <= limit
        self.step_key = self.identity_learns

    def groups(self) -> Iterable[tuple[list[nn.Parameter], float]]:
        """Yield the prompts, and the task identity with its own factor."""
        yield [prompt for prompt in self.pool if prompt.requires_grad], 1.0
        yield [part for part in self.identity.parameters() if part.requires_grad], self.config.identity_lr_scale

    def mixed(self) -> Tensor:
        """Return prompts of all tasks, mixed with the earlier ones: (tasks, blocks, M, D).

        Always mixing equals mixing in training, and once more permanently when the task ends.
        """
        prompts: list[Tensor] = []
        total = torch.zeros_like(self.pool[0])  # (blocks, M, D)
        for task, prompt in enumerate(self.pool):
            mixed = torch.lerp(prompt, total / task, self.config.momentum) if task else prompt
            total = total + mixed.detach()
            prompts.append(mixed)
        return torch.stack(prompts)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Inject the prompt of the task, known in training and predicted from each query (B, D)."""
        assert query is not None
        if not len(self.pool):
            return Prompted()
        task = self.tell_task(query) if context.task is None else context.task  # (B,) or one for all
        prompt = self.mixed()[task]  # (B, blocks, M, D) or (blocks, M, D)
        parts = zip(self.config.blocks, prompt.unbind(dim=-3), strict=True)
        injected = {block: self._prefix(tokens, query.shape[0]) for block, tokens in parts}
        return Prompted(injected, self._identity_loss(query, context))

    def tell_task(self, query: Tensor) -> Tensor:
        """Return the task of the most likely class for each query: (B,)."""
        return self.task_of_class[self.identity(query).argmax(dim=1)]

    def _identity_loss(self, query: Tensor, context: Context) -> Tensor | None:
        """Return the cross-entropy of the task's classes on the queries while it is trained."""
        if not context.training or context.labels is None or not self.identity_learns:
            return None
        head, first = self.identity, context.first
        logits = head.logits(query, head.weight[first:], head.bias[first:])  # (B, new)
        return functional.cross_entropy(logits, context.labels - first)

    def _prefix(self, tokens: Tensor, batch: int) -> Prefix:
        prefix = Prefix.split(tokens)
        if not self.config.legacy_reshape:
            return prefix
        # (keys, values) by image is read as (image) by (key, value).
        both = [part.expand(batch, -1, -1) for part in (prefix.key, prefix.value)]  # (B, M / 2, D) each
        pairs = torch.cat(both).unflatten(0, (batch, 2))  # (B, 2, M / 2, D)
        return Prefix(pairs[:, 0], pairs[:, 1])

    def feature_loss(self, features: Tensor, context: Context) -> Tensor | None:
        """Return the contrastive loss of features ``(B, D)`` and past classes."""
        if not self.config.contrast:
            return None
        past = self.contrasts[: context.first].flatten(0, 1)  # (C K, D)
        every = torch.cat([past, features]).double()  # (C K + B, D); products of long features lose too much in TF32
        similarity = every @ every.T / self.config.contrast_temperature
        itself = torch.arange(len(every), device=every.device)
        return self.config.contrast * functional.cross_entropy(similarity, itself).to(features.dtype)

    def statistics_context(self, task: int) -> Context:
        """Return a context that gives training images the prompt of their task."""
        return Context(task=task)

    def end_task(self, summary: TaskSummary | None) -> None:
        """Store the task's class statistics, and refit the task identity to all classes."""
        assert summary is not None and summary.queries is not None
        config, first, labels, new = self.config, summary.first, summary.labels, summary.classes
        key = (self.seed, "hide-prompt", summary.task)
        empty = ClassStatistics.empty(self.shape.width, self.contrasts.device, config.contrast_centroids)
        self.contrasts[first:] = empty.extended(summary.features, labels - first, new, (*key, "features")).mean
        past = ClassStatistics(self.query_mean[:first], self.query_variance[:first])
        seen = past.extended(summary.queries, labels, new, (*key, "queries"))
        self.query_mean.copy_(seen.mean)
        self.query_variance.copy_(seen.variance)
        settings = config.identity_alignment
        if settings.enabled is not False:
            align(self.identity, seen, new, settings, config.identity_batch_size, config.identity_row_lr, key)

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        """Return the task whose prompt each query gets: one-hot, ``(B, 1, tasks)``."""
        if not len(self.pool):
            return {}
        chosen = functional.one_hot(self.tell_task(query), len(self.pool)).to(query.dtype)[:, None]  # (B, 1, tasks)
        return dict.fromkeys(self.config.blocks, chosen)


def _layer(inputs: int, outputs: int, *key: randomness.Key) -> nn.Linear:
    """Return a linear layer with weights from N(0, 0.02²), without biases."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.copy_(0.02 * randomness.normal((outputs, inputs), *key))
        layer.bias.zero_()
    return layer
