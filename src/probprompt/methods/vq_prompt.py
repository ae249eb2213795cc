"""VQ-Prompt: each image gets one prompt of a small pool, learned through a soft mixture (NeurIPS 2024).

Every prompted block holds a pool of N prompts of L tokens each, and a key for each prompt. A query weights the prompts
by its inner product with their normalized keys; the weighted sum is the soft prompt. The nearest prompt of the pool is
injected, all L tokens together, and the gradient passes straight through to the soft prompt. Two losses pull the soft
and the chosen prompt together. The first half of the tokens extends the block's attention keys, the second half its
values.

The paper and its code swap the weights of the two losses. The defaults are the code's: 0.4 moves the soft prompt, 0.1
the chosen one.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import mse_loss, normalize

from probprompt import randomness
from probprompt.methods.base import Blocks, Context, Method, MethodConfig, Prompted, Shape, register
from probprompt.methods.settings import Experiment, Positive, Settings, TunedRates, vq_protocol
from probprompt.prompts import Prefix


class VQPromptConfig(MethodConfig):
    """Settings of VQ-Prompt."""

    name: Literal["vq-prompt"] = "vq-prompt"
    blocks: Blocks = (0, 1, 2, 3, 4)
    """Blocks that receive prompts, counted from 0; each has its own pool and keys."""
    tokens: int = Field(8, ge=2, multiple_of=2)
    """L: tokens per prompt, half for the keys and half for the values."""
    components: int = Field(10, ge=1)
    """N: prompts per pool."""
    temperature: Positive = 1.0
    """Divisor of the scores before the softmax: 1, and 5 on CUB."""
    commitment_weight: float = Field(0.4, ge=0)
    """Weight of the loss that moves the soft prompt, through keys and pool, to the chosen prompt."""
    pool_weight: float = Field(0.1, ge=0)
    """Weight of the loss that moves the chosen prompt to the soft prompt."""
    quantize: bool = True
    """Choose a prompt of the pool; otherwise the soft prompt is injected without losses."""
    initial: Literal["uniform", "symmetric", "normal"] = "uniform"
    """Distribution of pool and keys: U[0, 1), U(-1, 1) or N(0, 1)."""
    initial_scale: Positive = 1.0
    """Scale of the initial pool; the length of a key has no effect."""


@register
class VQPrompt(Method):
    """Vector-quantized prompts."""

    Config = VQPromptConfig
    summary = "the nearest prompt of a learned pool, chosen through a soft mixture (VQ-Prompt)"
    tuned_rates = TunedRates(matched=0.5, ridge=0.5)

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the settings of the authors' code."""
        return vq_protocol(experiment, temperature=5.0 if experiment.protocol == "cub200" else 1.0)

    def __init__(self, config: VQPromptConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)
        shape.check_blocks(config.blocks)
        self.config = config
        pool = self._draw("pool", (config.components, config.tokens, shape.width))
        self.pool = nn.Parameter(config.initial_scale * pool)  # (blocks, N, L, D)
        self.keys = nn.Parameter(self._draw("keys", (config.components, shape.width)))  # (blocks, N, D)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Choose a prompt for each query (B, D); in training also return its losses."""
        assert query is not None
        injected: dict[int, Prefix] = {}
        losses: list[Tensor] = []
        for slot, block in enumerate(self.config.blocks):
            pool = self.pool[slot].double()  # (N, L, D)
            soft = prompt = torch.einsum("bn,nld->bld", self._weights(slot, query), pool)  # (B, L, D)
            if self.config.quantize:
                chosen = pool[nearest(soft, pool)]  # (B, L, D)
                prompt = soft + (chosen - soft).detach()  # value of the chosen prompt, gradient of the soft one
                losses += [self._distance(soft, chosen)] if context.training else []
            injected[block] = Prefix.split(prompt.to(self.pool.dtype))
        loss = torch.stack(losses).sum().to(self.pool.dtype) if losses else None
        return Prompted(injected, loss)

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        """Return weights of the soft mixture per prompted block: (B, 1, N), shared by all tokens."""
        return {
            block: self._weights(slot, query)[:, None].to(self.keys.dtype)
            for slot, block in enumerate(self.config.blocks)
        }

    def _weights(self, slot: int, query: Tensor) -> Tensor:
        """Return weights ``(B, N)`` from the query's inner products with the keys' directions."""
        # In float64, so that neither autocast, TF32 nor the batch size affects the choice.
        scores = query.double() @ normalize(self.keys[slot].double(), dim=-1).mT  # (B, N)
        return torch.softmax(scores / self.config.temperature, dim=-1)  # (B, N)

    def _distance(self, soft: Tensor, chosen: Tensor) -> Tensor:
        commitment = self.config.commitment_weight * mse_loss(soft, chosen.detach())
        return commitment + self.config.pool_weight * mse_loss(chosen, soft.detach())

    def _draw(self, what: str, shape: tuple[int, ...]) -> Tensor:
        """Draw numbers for every prompted block: ``(blocks, *shape)``."""
        kind, key = self.config.initial, (self.seed, "vq-prompt", what)
        return torch.stack([randomness.initial(kind, shape, *key, block) for block in self.config.blocks])


@torch.no_grad()
def nearest(soft: Tensor, pool: Tensor) -> Tensor:
    """Return the prompt (B,) of the pool (N, L, D) nearest to each soft prompt (B, L, D).

    >>> pool = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]])
    >>> nearest(torch.tensor([[[0.9, 0.3]], [[0.9, 0.0]]]), pool)
    tensor([1, 0])
    """
    distance = (soft[:, None] - pool).square().sum(dim=(-2, -1))  # (B, N)
    return distance.argmin(dim=-1)  # (B,)
