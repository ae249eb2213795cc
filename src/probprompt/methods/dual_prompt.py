"""DualPrompt: a general prompt that all tasks share, and an expert prompt per task (Wang et al., ECCV 2022).

The first blocks have a general prefix; later ones have one expert prefix per task, each with a key. A task trains the
general prefixes and its own experts, and pulls its own keys towards its queries; earlier experts and keys are frozen.
At evaluation an image gets the expert whose key has the largest cosine with its query.

The defaults are those of CODA-Prompt's comparison: lengths count key and value tokens together, every block has its own
keys, prompts start in U[0, 1). The original counts key and value tokens separately (its lengths 5 and 20 are 10 and 40
here) and has ``shared_keys=True, copy_previous=True, key_loss="mean"``, with ``initial="symmetric"`` (its PyTorch port)
or ``initial_scale=0.01`` (JAX). All published code creates the keys of all tasks at the start, so an image may get the
untrained expert of a future task. Here experts are added with their tasks, and their number need not be known.
"""

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from probprompt import randomness
from probprompt.methods.base import Context, Method, MethodConfig, Prompted, Shape, cosines, register
from probprompt.methods.settings import Experiment, Positive, Settings, TunedRates, google_protocol
from probprompt.prompts import Prefix, Prompt


class DualPromptConfig(MethodConfig):
    """Settings of DualPrompt."""

    name: Literal["dual-prompt"] = "dual-prompt"
    general_blocks: tuple[int, ...] = (0, 1)
    """Blocks with a general prompt, counted from 0."""
    general_tokens: int = Field(6, ge=2, multiple_of=2)
    """Tokens of a general prompt, half for the keys and half for the values."""
    expert_blocks: tuple[int, ...] = (2, 3, 4)
    """Blocks with an expert prompt per task, counted from 0."""
    expert_tokens: int = Field(20, ge=2, multiple_of=2)
    """Tokens of an expert prompt, half for the keys and half for the values."""
    pull: float = Field(1.0, ge=0)
    """Weight of the loss that pulls a task's keys towards its queries."""
    key_loss: Literal["sum", "mean"] = "sum"
    """Reduction of the loss over the batch: CODA-Prompt sums, the original averages. This only scales
    the keys' gradient: it hardly changes Adam, but it does change clipping by the common norm of all gradients."""
    initial: Literal["uniform", "symmetric"] = "uniform"
    """Distribution of prompts and keys: U[0, 1) or U(-1, 1), times ``initial_scale``."""
    initial_scale: Positive = 1.0
    shared_keys: bool = False
    """One key per task, and thus one choice of expert, for all blocks."""
    copy_previous: bool = False
    """Start a new task's expert, but not its key, as a copy of the previous one."""
    batchwise: bool = False
    """Published error: at evaluation a batch shares the expert that most of its images match."""
    legacy_reshape: bool = False
    """Published error: axes of keys, values and images are mixed up, in training and at evaluation."""

    @model_validator(mode="after")
    def _different_blocks(self) -> "DualPromptConfig":
        both = (*self.general_blocks, *self.expert_blocks)
        if len(set(both)) != len(both) or not self.expert_blocks:
            raise ValueError(
                "general_blocks and expert_blocks must all be different, with at least one expert block, "
                f"got {self.general_blocks} and {self.expert_blocks}."
            )
        return self

    def marks(self) -> tuple[str, ...]:
        """Return the published errors that are switched on."""
        vote = "batchwise: the images of a batch vote on their expert, so predictions depend on other images"
        mixed = "legacy_reshape: images get experts of others in the batch, so predictions depend on other images"
        return (vote,) * self.batchwise + (mixed,) * self.legacy_reshape


@register
class DualPrompt(Method):
    """General prompts for all tasks, and an expert per task."""

    Config = DualPromptConfig
    summary = "a general prefix for all tasks and an expert prefix per task, selected by key"
    tuned_rates = TunedRates(matched=0.5, ridge=8.0)

    anchor: Tensor

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the authors' settings, with lengths of keys and values together."""
        cifar = experiment.protocol == "cifar100"
        return google_protocol(
            rate=0.03 if cifar else 0.005,
            batch=24,
            epochs=5 if cifar else 50,
            general_tokens=10,
            expert_tokens=10 if cifar else 40,
            shared_keys=True,
            copy_previous=True,
            initial="symmetric",
            key_loss="mean",
        )

    def __init__(self, config: DualPromptConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)
        shape.check_blocks(config.general_blocks, "method.general_blocks")
        shape.check_blocks(config.expert_blocks, "method.expert_blocks")
        self.config = config
        self.sums_loss = config.key_loss == "sum"
        self.register_buffer("anchor", torch.empty(0), persistent=False)  # device of new experts
        general = [
            self._draw((config.general_tokens, shape.width), "general", block) for block in config.general_blocks
        ]
        self.general = nn.ParameterList(map(nn.Parameter, general))  # per block (M, D)
        self.experts = nn.ParameterList()  # per task (blocks, M, D)
        self.keys = nn.ParameterList()  # per task (blocks, D), or (1, D) if shared

    def begin_task(self, task: int, classes: int) -> None:
        """Add the task's experts and keys, and freeze the earlier ones."""
        config, blocks, width = self.config, self.config.expert_blocks, self.shape.width
        self.experts.requires_grad_(False)
        self.keys.requires_grad_(False)
        shape = (config.expert_tokens, width)
        expert = torch.stack([self._draw(shape, "expert", block, task) for block in blocks])  # (blocks, M, D)
        if config.copy_previous and len(self.experts):
            expert = self.experts[-1].detach().clone()
        owners = blocks[:1] if config.shared_keys else blocks
        key = torch.stack([self._draw((width,), "key", block, task) for block in owners])  # (blocks or 1, D)
        self.experts.append(nn.Parameter(expert))
        self.keys.append(nn.Parameter(key))

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Inject the task's own experts in training, else the best match of each query ``(B, D)``.

        Training also pulls the task's keys towards the queries.
        """
        assert query is not None
        general = zip(self.config.general_blocks, self.general, strict=True)
        injected: dict[int, Prompt] = {block: Prefix.split(tokens) for block, tokens in general}
        if not len(self.experts):
            return Prompted(injected)
        task = self._own_task(context)
        for slot, block in enumerate(self.config.expert_blocks):
            injected[block] = self._prefix(self._tokens(query, slot, task))
        if task is None or not self.config.pull:
            return Prompted(injected)
        distance = 1 - cosines(query, self.keys[task])  # (B, blocks or 1)
        loss = distance.sum() if self.config.key_loss == "sum" else distance.mean(dim=0).sum()
        return Prompted(injected, self.config.pull * loss.to(self.anchor.dtype))

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        """Return the task of the expert that each query gets, per block: one-hot, (B, 1, tasks)."""
        if not len(self.experts):
            return {}
        tasks = torch.arange(len(self.experts), device=query.device)
        matched = [self._match(query, slot)[:, None, None] == tasks for slot in range(len(self.config.expert_blocks))]
        return {block: hot.to(query.dtype) for block, hot in zip(self.config.expert_blocks, matched, strict=True)}

    def _own_task(self, context: Context) -> int | None:
        """Return the task in training; None at evaluation, and once the prompts are frozen."""
        task = context.task if context.training else None
        return task if task is not None and task < len(self.experts) else None

    def _tokens(self, query: Tensor, slot: int, task: int | None) -> Tensor:
        """Return expert tokens ``(B, M, D)`` for each query."""
        if task is not None:
            own: Tensor = self.experts[task]  # (blocks, M, D)
            return own[slot].expand(query.shape[0], -1, -1)
        experts = torch.stack([expert[slot] for expert in self.experts])  # (tasks, M, D)
        return experts[self._match(query, slot)]

    def _match(self, query: Tensor, slot: int) -> Tensor:
        """Return the task (B,) with the key nearest to each query; the first of equal ones."""
        keys = torch.stack([key[0 if self.config.shared_keys else slot] for key in self.keys])  # (tasks, D)
        cosine = cosines(query, keys)  # (B, tasks)
        matched = cosine.argsort(dim=1, descending=True, stable=True)[:, :1]  # (B, 1)
        if self.config.batchwise:
            votes = torch.zeros_like(cosine).scatter(1, matched, 1).sum(dim=0)  # (tasks,)
            matched = votes.argsort(descending=True, stable=True)[:1].expand(query.shape[0], 1)  # (B, 1)
        return matched[:, 0]

    def _prefix(self, tokens: Tensor) -> Prefix:
        """Return keys and values of expert tokens ``(B, M, D)``."""
        prefix = Prefix.split(tokens)
        if not self.config.legacy_reshape:
            return prefix
        both = torch.stack([prefix.key, prefix.value])  # (2, B, M / 2, D)
        # The published error reshapes the axes instead of transposing them.
        mixed = both.reshape(tokens.shape[0], 2, *both.shape[2:])  # (B, 2, M / 2, D)
        return Prefix(mixed[:, 0], mixed[:, 1])

    def _draw(self, shape: tuple[int, ...], *what: int | str) -> Tensor:
        drawn = randomness.initial(self.config.initial, shape, self.seed, *what)
        return self.config.initial_scale * drawn.to(self.anchor)
