"""L2P: a pool of prompts with keys; an image gets the entries whose keys have the largest cosine with its query.

Three methods share the pool. ``l2p`` is Learning to Prompt (Wang et al., CVPR 2022): chosen entries are input tokens of
the transformer, and the mean of their outputs is the feature. ``l2p++`` and ``deep-l2p++`` are the baselines of
CODA-Prompt (Smith et al., CVPR 2023): chosen entries are prefixes, half keys and half values, in the first block or in
the first five; each block has its own pool. A loss pulls the chosen keys towards the query.

The defaults of ``l2p`` are those of its PyTorch port. The JAX original has ``tokens=10, top_k=4, pull=1.0,
initial="uniform", initial_scale=0.01``. Both publish their results with ``batchwise=True``.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from probprompt import randomness
from probprompt.methods.base import Blocks, Context, Method, MethodConfig, Prompted, Shape, cosines, register
from probprompt.methods.settings import Experiment, Positive, Settings, TunedRates, coda_protocol, google_protocol
from probprompt.prompts import Prefix, Prompt, Tokens


class PoolConfig(MethodConfig):
    """Common settings of the three methods."""

    components: int = Field(10, ge=1)
    """N: entries of a pool, each with its own key."""
    tokens: int = Field(5, ge=1)
    """M: tokens of an entry."""
    top_k: int = Field(5, ge=1)
    """k: entries chosen for an image."""
    pull: float = Field(0.1, ge=0)
    """Weight of the loss that pulls the chosen keys towards the query."""
    initial: Literal["uniform", "symmetric"] = "symmetric"
    """Distribution of entries and keys: U[0, 1) or U(-1, 1), times ``initial_scale``."""
    initial_scale: Positive = 1.0
    batchwise: bool = False
    """Published error: a batch shares the entries that most of its images chose, also at evaluation."""

    @model_validator(mode="after")
    def _enough_entries(self) -> "PoolConfig":
        if self.top_k > self.components:
            raise ValueError(f"top_k is {self.top_k}, but a pool has only {self.components} components.")
        return self

    def marks(self) -> tuple[str, ...]:
        """Return a warning if predictions depend on other images in the batch."""
        vote = "batchwise: the images of a batch vote on their prompts, so predictions depend on other images"
        return (vote,) if self.batchwise else ()


class L2PConfig(PoolConfig):
    """Settings of L2P."""

    name: Literal["l2p"] = "l2p"


class PrefixPoolConfig(PoolConfig):
    """Common settings of L2P++ and Deep L2P++."""

    blocks: Blocks = (0,)
    """Blocks that receive prefixes, counted from 0; each has its own pool."""
    components: int = Field(30, ge=1)
    tokens: int = Field(20, ge=2, multiple_of=2)
    """M: tokens of an entry, half for the keys and half for the values."""
    pull: float = Field(1.0, ge=0)
    initial: Literal["uniform", "symmetric"] = "uniform"
    legacy_key_loss: bool = False
    """Published error: each query also pulls the keys of other images in the batch."""

    def marks(self) -> tuple[str, ...]:
        """Return the published errors that are switched on."""
        loss = "legacy_key_loss: in training each query also pulls keys chosen by other images in the batch"
        return super().marks() + ((loss,) if self.legacy_key_loss else ())


class L2PPlusConfig(PrefixPoolConfig):
    """Settings of L2P++."""

    name: Literal["l2p++"] = "l2p++"


class DeepL2PPlusConfig(PrefixPoolConfig):
    """Settings of Deep L2P++."""

    name: Literal["deep-l2p++"] = "deep-l2p++"
    blocks: Blocks = (0, 1, 2, 3, 4)


class PooledPrompts(Method):
    """Pools of prompts, one per prompted block, selected by cosine between query and keys."""

    def __init__(self, config: PoolConfig, blocks: Sequence[int], shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)
        shape.check_blocks(blocks)
        self.config, self.blocks = config, tuple(blocks)
        self.pool = self._draw("pool", (config.components, config.tokens, shape.width))  # (blocks, N, M, D)
        self.keys = self._draw("keys", (config.components, shape.width))  # (blocks, N, D)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Inject the chosen entries for each query (B, D); in training also pull their keys."""
        assert query is not None
        pull = self.config.pull if context.training else 0.0
        injected: dict[int, Prompt] = {}
        losses = []
        for slot, block in enumerate(self.blocks):
            cosine = cosines(query, self.keys[slot])  # (B, N)
            chosen = self._choose(cosine)  # (B, k)
            injected[block] = self._prompt(self.pool[slot][chosen])  # of (B, k, M, D)
            if pull:
                losses.append(pull * self._key_loss(cosine, chosen))
        return Prompted(injected, torch.stack(losses).sum().to(self.keys.dtype) if losses else None)

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        """Return the share 1/k of each chosen entry per prompted block: (B, 1, N)."""
        shares = {}
        for slot, block in enumerate(self.blocks):
            cosine = cosines(query, self.keys[slot])  # (B, N)
            chosen = self._choose(cosine)  # (B, k)
            share = torch.zeros_like(cosine, dtype=query.dtype).scatter(1, chosen, 1 / self.config.top_k)  # (B, N)
            shares[block] = share[:, None]
        return shares

    def _choose(self, cosine: Tensor) -> Tensor:
        """Return the k nearest entries of each image, by index: (B, N) -> (B, k)."""
        top_k = self.config.top_k
        chosen = cosine.argsort(dim=1, descending=True, stable=True)[:, :top_k]  # (B, k)
        if self.config.batchwise:
            votes = torch.zeros_like(cosine).scatter(1, chosen, 1).sum(dim=0)  # (N,)
            chosen = votes.argsort(descending=True, stable=True)[:top_k].expand(cosine.shape[0], -1)  # (B, k)
        # The order of entries has no effect. Sorted by index, equal sets are equal slot by slot, so that prompts of
        # images can be compared. Among equal cosines the first entry is chosen.
        return chosen.sort(dim=1).values

    def _prompt(self, entries: Tensor) -> Prompt:
        """Return the prompt of a block for the chosen entries ``(B, k, M, D)``."""
        raise NotImplementedError

    def _key_loss(self, cosine: Tensor, chosen: Tensor) -> Tensor:
        """Return the loss of a block's chosen keys ``(B, k)`` from the cosines ``(B, N)``."""
        raise NotImplementedError

    def _draw(self, what: str, shape: tuple[int, ...]) -> nn.Parameter:
        """Draw numbers for every prompted block: ``(blocks, *shape)``."""
        kind = self.config.initial
        drawn = [randomness.initial(kind, shape, self.seed, what, block) for block in self.blocks]
        return nn.Parameter(self.config.initial_scale * torch.stack(drawn))


@register
class L2P(PooledPrompts):
    """Learning to Prompt: chosen entries are input tokens, and their outputs are read out."""

    Config = L2PConfig
    summary = "input tokens chosen from a pool by their keys (Learning to Prompt)"
    tuned_rates = TunedRates(matched=0.1, ridge=8.0)
    readout = "tokens"

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the settings of the authors' code."""
        return google_protocol(rate=0.03, batch=16, epochs=5)

    def __init__(self, config: L2PConfig, shape: Shape, seed: int) -> None:
        super().__init__(config, (0,), shape, seed)

    def _prompt(self, entries: Tensor) -> Prompt:
        return Tokens(entries.flatten(1, 2), positioned=True)  # (B, k M, D)

    def _key_loss(self, cosine: Tensor, chosen: Tensor) -> Tensor:
        """Return minus the cosines, summed over chosen keys and averaged over the batch."""
        return -cosine.gather(1, chosen).sum(dim=1).mean()


class PrefixPools(PooledPrompts):
    """Pools whose chosen entries are prefixes of a block's attention."""

    sums_loss = True
    config: PrefixPoolConfig

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the settings of CODA-Prompt's code, which introduced these variants."""
        return coda_protocol(experiment)

    def __init__(self, config: PrefixPoolConfig, shape: Shape, seed: int) -> None:
        super().__init__(config, config.blocks, shape, seed)

    def _prompt(self, entries: Tensor) -> Prompt:
        key, value = entries.chunk(2, dim=2)  # (B, k, M / 2, D) each: every entry brings keys and values
        return Prefix(key.flatten(1, 2), value.flatten(1, 2))  # (B, k M / 2, D) each

    def _key_loss(self, cosine: Tensor, chosen: Tensor) -> Tensor:
        """Return 1 - cosine, summed over the chosen keys and over the batch, as published."""
        if self.config.legacy_key_loss:
            return (1 - cosine[:, chosen]).sum()  # (B, B, k): every query with the choice of every image
        return (1 - cosine.gather(1, chosen)).sum()  # (B, k)


@register
class L2PPlus(PrefixPools):
    """L2P++: the pool's entries are prefixes of the first block."""

    Config = L2PPlusConfig
    summary = "prefixes of the first block chosen from a pool by their keys (L2P++)"
    tuned_rates = TunedRates(matched=0.5, ridge=0.5)


@register
class DeepL2PPlus(PrefixPools):
    """Deep L2P++: the first five blocks have a pool of prefixes each."""

    Config = DeepL2PPlusConfig
    summary = "prefixes of the first five blocks, each chosen from a separate pool (Deep L2P++)"
    tuned_rates = TunedRates(matched=0.5, ridge=0.5)
