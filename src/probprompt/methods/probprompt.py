"""ProbPrompt: prompts are sampled from a query-conditioned mixture of learned Gaussians (the paper, Sec. 3).

Every prompted block holds M pools, one per prompt token, of N diagonal Gaussians each. A query weighs the Gaussians
of a pool by their Mahalanobis distance to it (Eqs. 2-3), the weighted mixture is moment-matched to one Gaussian
(Eqs. 4-7), N_s prompts are drawn from it (Eq. 8) and averaged by their cosine to the query (Eqs. 9-10). The first
half of the M tokens extends the block's attention keys, the second half its values. A loss keeps the Gaussians near
a cached copy of themselves (Eqs. 13-14). What the paper leaves open is a named setting; the defaults are its
literal reading.
"""

import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from probprompt import equations, kernels, randomness
from probprompt.kernels.mixture import drift, mixture
from probprompt.methods.base import EVALUATION, Blocks, Context, Method, MethodConfig, Prompted, Shape, register
from probprompt.methods.settings import Experiment, Positive, Settings, TunedRates, vq_protocol
from probprompt.prompts import Prefix


class ProbPromptConfig(MethodConfig):
    """The settings of ProbPrompt."""

    name: Literal["probprompt"] = "probprompt"
    blocks: Blocks = (0, 1, 2, 3, 4)
    """Blocks that receive prompts, counted from 0."""
    tokens: int = Field(8, ge=2, multiple_of=2)
    """M: prompt tokens per block, half for the keys and half for the values; each has a pool of its own."""
    components: int = Field(10, ge=1)
    """N: Gaussians per pool."""
    samples: int = Field(30, ge=0)
    """N_s: prompts drawn per token and image; 0 takes the mixture's mean."""
    relevance_temperature: Literal["sqrt_dim", "dim"] | Positive = 1.0
    """What S^2 is divided by before the softmax of Eq. 2: 1 is the literal reading."""
    initial_mean: Literal["uniform", "symmetric", "normal"] = "uniform"
    """U[0, 1), U(-1, 1) or N(0, 1), times ``initial_mean_scale``."""
    initial_mean_scale: Positive = 1.0
    initial_std: Positive = 1.0
    evaluation: Literal["sample", "mean"] = "sample"
    """Prompts at evaluation: one fixed draw of noise, the same for every image; or the mixture's mean."""
    evaluation_draws: int = Field(1, ge=1)
    """Beyond the paper: features at evaluation are averaged over the prompts of so many draws, each of N_s samples and
    with a pass through the backbone of its own."""
    regularisation: float = Field(1e-6, ge=0)
    """lambda: the weight of the distribution regularisation loss."""
    reference: Literal["step", "epoch", "task"] = "step"
    """Which earlier state of the Gaussians the loss compares with."""
    top_k: int | None = Field(None, ge=1)
    """Keep only the K most relevant Gaussians of a pool."""
    aggregation: Literal["cosine", "mean"] = "cosine"
    """How the samples are averaged: Eq. 10, or equally."""
    variant: Literal["mixture", "independent", "deterministic"] = "mixture"
    """The paper's ablation: sample from the mixture; sample from each Gaussian and mix the samples; no sampling."""

    @model_validator(mode="after")
    def _enough_components(self) -> "ProbPromptConfig":
        if self.top_k is not None and self.top_k > self.components:
            raise ValueError(f"top_k is {self.top_k}, but a pool has only {self.components} components")
        return self


@register
class ProbPrompt(Method):
    """Probabilistic prompts."""

    Config = ProbPromptConfig
    summary = "prompts sampled from a mixture of learned Gaussians (the paper)"
    tuned_rates = TunedRates(matched=0.5, ridge=8.0)

    log_std: Tensor
    cached_mean: Tensor
    cached_log_std: Tensor
    fixed_noise: Tensor
    more_noise: Tensor

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the protocol of VQ-Prompt, which the paper follows."""
        return vq_protocol(experiment)

    def __init__(self, config: ProbPromptConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)
        shape.check_blocks(config.blocks)
        self.config = config
        self.temperature = _temperature(config.relevance_temperature, shape.width)
        pools, kind = (config.tokens, config.components, shape.width), config.initial_mean
        drawn = [randomness.initial(kind, pools, seed, "initial mean", block) for block in config.blocks]
        mean = config.initial_mean_scale * torch.stack(drawn)
        self.mean = nn.Parameter(mean)  # (blocks, M, N, D)
        if config.variant == "deterministic":  # the ablation's first row: unit variance, never learned
            self.register_buffer("log_std", torch.zeros_like(mean))
        else:
            self.log_std = nn.Parameter(torch.full_like(mean, math.log(config.initial_std)))  # (blocks, M, N, D)
        self.register_buffer("cached_mean", mean.clone())
        self.register_buffer("cached_log_std", self.log_std.detach().clone())
        # Drawn from the seed again when a model is loaded, so it need not be stored.
        self.register_buffer("fixed_noise", self._fixed_noise("evaluation noise"), persistent=False)
        if self._samples(EVALUATION):
            self.draws = config.evaluation_draws
        more = [self._fixed_noise("evaluation noise", draw) for draw in range(1, self.draws)]
        self.register_buffer("more_noise", torch.stack(more) if more else torch.empty(0), persistent=False)

    def begin_task(self, task: int, classes: int) -> None:
        """Nothing grows; the reference of the regularisation may move."""
        if self.config.reference == "task":
            self._cache()

    def begin_epoch(self) -> None:
        """Move the reference of the regularisation if it is the epoch's."""
        if self.config.reference == "epoch":
            self._cache()

    def before_step(self) -> None:
        """Move the reference of the regularisation if it is the step's."""
        if self.config.reference == "step":
            self._cache()

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Sample prompts for each query (B, D); in training also weigh how far the Gaussians moved."""
        assert query is not None
        if self.config.variant == "independent" and self._samples(context):
            tokens = self._mix_samples(query, context)
        else:
            tokens = self._sample_mixture(query, context)
        weight = self.config.regularisation
        loss = weight * self.drift() if context.training and weight else None
        halves = tokens.unflatten(1, (2 * len(self.config.blocks), -1)).unbind(dim=1)  # (B, M / 2, D) each
        each = map(Prefix, halves[::2], halves[1::2])
        return Prompted(dict(zip(self.config.blocks, each, strict=True)), loss)

    def drift(self) -> Tensor:
        """L_DR (Eqs. 13-14): KL(cached || current), averaged over tokens and components, summed over blocks."""
        pools = self.config.tokens * self.config.components  # of a block
        return drift(self.mean, self.log_std, self.cached_mean, self.cached_log_std) / pools

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        """Relevance scores s(n) per prompted block: (B, M, N)."""
        weights = self._mixture(query)[0].unflatten(1, (len(self.config.blocks), -1))  # (B, blocks, M, N)
        return dict(zip(self.config.blocks, weights.unbind(dim=1), strict=True))

    def _mixture(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For every pool of every block, relevance (B, pools, N), mean and deviation of the mixture (B, pools, D)."""
        pools = self.mean.flatten(0, 1), self.log_std.flatten(0, 1)  # (pools, N, D) each
        return mixture(query, *pools, self.temperature, self.config.top_k)

    def _sample_mixture(self, query: Tensor, context: Context) -> Tensor:
        """Prompts (B, pools, D), all blocks one after the other, drawn from the mixtures and averaged."""
        _, mean, std = self._mixture(query)
        count = self._samples(context)
        if not count:
            return mean
        if context.training and kernels.usable(mean.device):
            from probprompt.kernels.gaussians import sampled_prompt

            assert context.noise is not None
            noise, equal = context.noise, self.config.aggregation == "mean"
            return sampled_prompt(mean, std, query, noise.seed, count, noise.first, equal)
        return self._draw(mean, std, query, context)

    def _mix_samples(self, query: Tensor, context: Context) -> Tensor:
        """Draw from every Gaussian by itself, then weigh the results by relevance (ablation, second row)."""
        pools = self.mean.shape[:3]  # blocks, M, N
        mean, std = (part.flatten(0, 2).expand(query.shape[0], -1, -1) for part in (self.mean, self.log_std.exp()))
        drawn = self._draw(mean, std, query, context).unflatten(1, (pools[0] * pools[1], -1))  # (B, pools, N, D)
        return torch.einsum("bmn,bmnd->bmd", self._mixture(query)[0], drawn)  # (B, pools, D)

    def _draw(self, mean: Tensor, std: Tensor, query: Tensor, context: Context) -> Tensor:
        """Average samples of Gaussians (B, G, D), a block's after the other's, as many in each."""
        blocks = len(self.config.blocks)
        parts = zip(mean.chunk(blocks, dim=1), std.chunk(blocks, dim=1), strict=True)
        drawn = [self._average(slot, *part, query, context) for slot, part in enumerate(parts)]
        return torch.cat(drawn, dim=1)  # (B, G, D)

    def _average(self, slot: int, mean: Tensor, std: Tensor, query: Tensor, context: Context) -> Tensor:
        count = self._samples(context)
        noise = self.more_noise[context.draw - 1, slot] if context.draw else self.fixed_noise[slot]
        if context.training:
            assert context.noise is not None
            shape = (len(mean), mean.shape[1], count, mean.shape[2])
            noise = context.noise.normal(shape, slot * mean.shape[1])  # (B, G of the block, N_s, D)
        if self.config.aggregation == "mean":
            return equations.average(equations.sample_prompts(mean, std, count, noise=noise))
        return equations.sampled_prompt(mean, std, query, noise)

    def _samples(self, context: Context) -> int:
        if self.config.variant == "deterministic":
            return 0
        if not context.training and self.config.evaluation == "mean":
            return 0
        return self.config.samples

    def _fixed_noise(self, *key: randomness.Key) -> Tensor:
        config = self.config
        draws = config.tokens * (config.components if config.variant == "independent" else 1)
        shape = (draws, config.samples, self.shape.width)  # G of a block, N_s, D
        return torch.stack([randomness.normal(shape, self.seed, *key, block) for block in config.blocks])

    @torch.no_grad()
    def _cache(self) -> None:
        self.cached_mean.copy_(self.mean)
        self.cached_log_std.copy_(self.log_std)


def _temperature(setting: str | float, width: int) -> float:
    return {"sqrt_dim": math.sqrt(width), "dim": float(width)}[setting] if isinstance(setting, str) else setting
