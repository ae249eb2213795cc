"""ProbPrompt: prompts are sampled from a query-conditioned mixture of learned Gaussians (the paper, Sec. 3).

Every prompted block holds M pools, one per prompt token, of N diagonal Gaussians each. A query weights the Gaussians of
a pool by their Mahalanobis distance (Eqs. 2-3), the mixture is moment-matched to one Gaussian (Eqs. 4-7), N_s prompts
are drawn from it (Eq. 8) and averaged by their cosine to the query (Eqs. 9-10). The first half of the M tokens extends
the block's attention keys, the second half its values. A loss keeps the Gaussians near a cached copy of themselves
(Eqs. 13-14). Each choice that the paper leaves open is a setting; the defaults follow its wording.
"""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from probprompt import equations, kernels, randomness
from probprompt.errors import UserError
from probprompt.kernels import mixture as mixtures
from probprompt.methods.base import EVALUATION, Blocks, Context, Method, MethodConfig, Prompted, Shape, register
from probprompt.methods.settings import Experiment, Positive, Setting, Settings, TunedRates, vq_protocol
from probprompt.prompts import Prefix, Prompt, Tokens


class ProbPromptConfig(MethodConfig):
    """Settings of ProbPrompt."""

    name: Literal["probprompt"] = "probprompt"
    blocks: Blocks = (0, 1, 2, 3, 4)
    """Blocks that receive prompts, counted from 0."""
    tokens: int = Field(8, ge=2, multiple_of=2)
    """M: prompt tokens per block; each has its own pool."""
    components: int = Field(10, ge=1)
    """N: Gaussians per pool."""
    samples: int = Field(30, ge=0)
    """N_s: prompts drawn per token and image; 0 uses the mixture's mean."""
    evaluation_samples: int | None = Field(None, ge=0)
    """N_s at evaluation. None: as in training."""
    query: Literal["raw", "unit", "whitened"] = "raw"
    """The query unchanged, scaled to length 1, or centered and decorrelated with statistics of the first task."""
    relevance: Literal["distance", "density"] = "distance"
    """``distance`` is Eq. 3; ``density`` adds the log-determinant, without which wider Gaussians are always nearer."""
    relevance_gradient: mixtures.Learning = "full"
    """Parameters that the relevance trains: means and standard deviations (``full``), only ``means``, or ``none``."""
    relevance_temperature: Literal["sqrt_dim", "dim", "initial_std"] | Positive = 1.0
    """Divisor of S² before the softmax of Eq. 2; 1 follows the paper's wording. ``initial_std`` divides by
    1/initial_std²: distances start as with a standard deviation of 1, and ``initial_std`` only scales the noise."""
    initial_mean: Literal["uniform", "symmetric", "normal"] = "uniform"
    """Distribution of means: U[0, 1), U(-1, 1) or N(0, 1), times ``initial_mean_scale``."""
    initial_mean_scale: Positive = 1.0
    initial_std: Positive = 1.0
    initial_log_std_scale: float = Field(0.0, ge=0)
    """Scale of U[0, 1) numbers that are added to the logarithm of ``initial_std``."""
    log_std_lr_scale: float = Field(1.0, ge=0)
    """Learning rate of the standard deviations as a multiple of the means'; 0 freezes them."""
    evaluation: Literal["sample", "image", "mean"] = "sample"
    """Prompts at evaluation: one draw for all images, a draw keyed by the image's pixels, or the mixture's mean."""
    evaluation_draws: int = Field(1, ge=1)
    """Beyond the paper: number of draws over which features are averaged at evaluation, each with N_s samples and a
    pass."""
    injection: Literal["prefix", "projected", "tokens", "read-tokens"] = "prefix"
    """Place of the prompts: before the block's keys and values, before the input of their projection, or into the
    sequence, where their outputs may replace the class token as feature, as in L2P."""
    halves: bool = True
    """Use half the M tokens of a prefix as keys and half as values; otherwise each token is both."""
    regularization: float = Field(1e-6, ge=0)
    """λ: weight of the distribution regularization loss."""
    reference: Literal["step", "epoch", "task"] = "step"
    """Earlier state of the Gaussians that the loss compares with."""
    top_k: int | None = Field(None, ge=1)
    """Keep only the K most relevant Gaussians of a pool."""
    aggregation: Literal["cosine", "mean"] = "cosine"
    """Weights of the samples: Eq. 10, or equal."""
    aggregation_temperature: Positive = 1.0
    """Divisor of the cosines of Eq. 10."""
    variant: Literal["mixture", "independent", "deterministic"] = "mixture"
    """The paper's ablation: sample from the mixture; sample from each Gaussian and mix the samples; no sampling."""

    @model_validator(mode="after")
    def _enough_components(self) -> "ProbPromptConfig":
        if self.top_k is not None and self.top_k > self.components:
            raise ValueError(f"top_k is {self.top_k}, but a pool has only {self.components} components.")
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
    query_mean: Tensor
    whitening: Tensor

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return VQ-Prompt's protocol and the interpretation that fits the paper best."""
        own: dict[str, Setting] = {"initial_std": 4.5, "relevance_temperature": "initial_std", "evaluation": "image"}
        return vq_protocol(experiment, relevance_gradient="none", **own)

    def __init__(self, config: ProbPromptConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)
        shape.check_blocks(config.blocks)
        self.config = config
        fixed = config.variant == "deterministic"  # first row of the ablation: unit variance, frozen
        pool, std = (config.tokens, config.components), 1.0 if fixed else config.initial_std
        named = {"sqrt_dim": shape.width**0.5, "dim": float(shape.width), "initial_std": std**-2}
        self.temperature = named.get(str(config.relevance_temperature)) or float(config.relevance_temperature)
        mean = config.initial_mean_scale * self._drawn(config.initial_mean, pool, "initial mean")
        self.mean = nn.Parameter(mean)  # (blocks, M, N, D)
        log_std = torch.full_like(mean, math.log(std))  # (blocks, M, N, D)
        if config.initial_log_std_scale and not fixed:
            log_std += config.initial_log_std_scale * self._drawn("uniform", pool, "initial log std")
        if fixed or not config.log_std_lr_scale:
            self.register_buffer("log_std", log_std)
        else:
            self.log_std = nn.Parameter(log_std)
        self.register_buffer("cached_mean", mean.clone())
        self.register_buffer("cached_log_std", self.log_std.detach().clone())
        if config.query == "whitened":
            self.statistics = ("query_mean", "whitening")
            self.register_buffer("query_mean", torch.zeros(shape.width, dtype=torch.float64))
            self.register_buffer("whitening", torch.eye(shape.width, dtype=torch.float64))
        self.readout = "tokens" if config.injection == "read-tokens" else "class"
        if self._samples(EVALUATION):
            self.draws, self.needs_keys = config.evaluation_draws, config.evaluation == "image"
        groups = math.prod(pool) if config.variant == "independent" else config.tokens
        count = (groups, self._samples(Context(sampled=True)))  # G, N_s
        keys = [(), *((draw,) for draw in range(1, self.draws))]  # the first draw has no number
        noise = torch.stack([self._drawn("normal", count, "evaluation noise", *key) for key in keys], dim=1)
        self.register_buffer("fixed_noise", noise, persistent=False)  # (blocks, draws, G, N_s, D): the seed gives it

    def groups(self) -> Iterable[tuple[list[nn.Parameter], float]]:
        """Yield means and standard deviations, which may have another learning rate."""
        scale, parts = self.config.log_std_lr_scale, [part for part in self.parameters() if part.requires_grad]
        yield from zip([parts] if scale == 1 else [[part] for part in parts], (1.0, scale), strict=False)

    def see_queries(self, queries: Tensor) -> None:
        """Compute the statistics that decorrelate queries."""
        self.query_mean, self.whitening = equations.whitening(queries)

    def begin_task(self, task: int, classes: int) -> None:
        """Update the reference of the regularization."""
        self._cache("task")

    def begin_epoch(self) -> None:
        """Update the reference of the regularization."""
        self._cache("epoch")

    def before_step(self) -> None:
        """Update the reference of the regularization."""
        self._cache("step")

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Sample prompts for each query (B, D); in training also return the regularization loss."""
        assert query is not None
        query = self._prepared(query)
        apart = self.config.variant == "independent" and self._samples(context)
        tokens = (self._mix_samples if apart else self._sample_mixture)(query, context)  # (B, pools, D)
        loss = self.config.regularization * self.drift() if context.training and self.config.regularization else None
        parts = tokens.chunk(len(self.config.blocks), dim=1)  # (B, M, D) each
        return Prompted(dict(zip(self.config.blocks, map(self._injected, parts), strict=True)), loss)

    def drift(self) -> Tensor:
        """Return L_DR, KL(cached || current): mean over tokens and components, sum over blocks."""
        pools = self.config.tokens * self.config.components  # of a block
        return mixtures.drift(self.mean, self.log_std, self.cached_mean, self.cached_log_std) / pools

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        """Return relevance scores s(n) per prompted block: ``(B, M, N)``."""
        weights = self._mixture(self._prepared(query))[0].chunk(len(self.config.blocks), dim=1)  # (B, M, N) each
        return dict(zip(self.config.blocks, weights, strict=True))

    def _injected(self, tokens: Tensor) -> Prompt:  # (B, M, D)
        if self.config.injection in ("tokens", "read-tokens"):
            return Tokens(tokens, positioned=self.config.injection == "read-tokens")
        keys, values = tokens.chunk(2, dim=1) if self.config.halves else (tokens, tokens)
        return Prefix(keys, values, projected=self.config.injection == "projected")

    def _prepared(self, query: Tensor) -> Tensor:
        """Return queries ``(B, D)`` as all equations use them."""
        if self.config.query == "unit":
            return nn.functional.normalize(query, dim=-1)
        if self.config.query == "whitened":
            return ((query.double() - self.query_mean) @ self.whitening).float()
        return query

    def _mixture(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return relevance (B, pools, N), mean and standard deviation (B, pools, D) of all pools."""
        config, mean, log_std = self.config, self.mean.flatten(0, 1), self.log_std.flatten(0, 1)  # (pools, N, D) each
        density, learning = config.relevance == "density", config.relevance_gradient
        return mixtures.mixture(query, mean, log_std, self.temperature, config.top_k, density, learning)

    def _sample_mixture(self, query: Tensor, context: Context) -> Tensor:
        """Sample prompts ``(B, pools, D)`` from the mixtures, block by block, and average them."""
        _, mean, std = self._mixture(query)
        count = self._samples(context)
        if not count:
            return mean
        if context.training and kernels.usable(mean.device) and self.config.aggregation_temperature == 1:
            from probprompt.kernels.gaussians import sampled_prompt

            assert context.noise is not None
            noise, equal = context.noise, self.config.aggregation == "mean"
            return sampled_prompt(mean, std, query, noise.seed, count, noise.first, equal)
        return self._draw(mean, std, query, context)

    def _mix_samples(self, query: Tensor, context: Context) -> Tensor:
        """Sample from every Gaussian, then weight the results by relevance (ablation, second row)."""
        pools = self.mean.shape[:3]  # blocks, M, N
        mean, std = (part.flatten(0, 2).expand(query.shape[0], -1, -1) for part in (self.mean, self.log_std.exp()))
        drawn = self._draw(mean, std, query, context).unflatten(1, (pools[0] * pools[1], -1))  # (B, pools, N, D)
        return torch.einsum("bmn,bmnd->bmd", self._mixture(query)[0], drawn)  # (B, pools, D)

    def _draw(self, mean: Tensor, std: Tensor, query: Tensor, context: Context) -> Tensor:
        """Average samples of Gaussians ``(B, G, D)``, the same number in each block."""
        means, stds = (part.chunk(len(self.config.blocks), dim=1) for part in (mean, std))
        pairs = enumerate(zip(means, stds, strict=True))
        return torch.cat([self._average(slot, *pair, query, context) for slot, pair in pairs], dim=1)  # (B, G, D)

    def _average(self, slot: int, mean: Tensor, std: Tensor, query: Tensor, context: Context) -> Tensor:
        """Average samples of the Gaussians (B, G, D) of one block."""
        noise, turns, (images, pools, width) = self.fixed_noise[slot, context.draw], None, mean.shape
        if context.training:
            assert context.noise is not None
            noise = context.noise.normal((images, pools, self.config.samples, width), slot * pools)  # (B, G, N_s, D)
        elif self.needs_keys or context.sampled:
            if context.keys is None:
                raise UserError("method.evaluation='image' needs a key per image. Pass keys=, of randomness.pixel_key.")
            turns = randomness.Turns(context.keys, pools, width, self.seed, "turned noise", slot)
            mean, std, query = turns.turn(mean), turns.turn(std, signs=False), turns.turn(query[:, None])
        if self.config.aggregation == "mean":
            drawn = equations.average(equations.sample_prompts(mean, std, noise.shape[-2], noise=noise))
        else:
            drawn = equations.sampled_prompt(mean, std, query, noise, self.config.aggregation_temperature)
        return turns.back(drawn) if turns else drawn

    def _samples(self, context: Context) -> int:
        config, other = self.config, None if context.training else self.config.evaluation_samples
        sampled = context.training or (config.evaluation != "mean" if context.sampled is None else context.sampled)
        count = config.samples if other is None else other
        return count if sampled and config.variant != "deterministic" else 0

    def _drawn(self, kind: randomness.Start, count: tuple[int, int], *key: randomness.Key) -> Tensor:
        shape = (*count, self.shape.width)
        return torch.stack([randomness.initial(kind, shape, self.seed, *key, block) for block in self.config.blocks])

    @torch.no_grad()
    def _cache(self, now: str) -> None:
        if self.config.reference == now:
            self.cached_mean.copy_(self.mean)
            self.cached_log_std.copy_(self.log_std)
