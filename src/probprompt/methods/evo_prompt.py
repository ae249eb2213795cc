"""EvoPrompt: a small network per block writes the prompts and is fused over tasks (Kurniawan et al., AAAI 2024).

In every block a bottleneck turns the query into tokens that join the sequence: W' ReLU(W q), without biases. After each
task except the first, the trained networks (the working memory) are fused into the earlier ones (the reference):

1. Hidden neurons are matched by optimal transport. Neurons are weighted by the L1 norm of their incoming weights, and
   the cost is the squared distance of the weights' directions. With columns of the plan normalized to 1, neuron j of
   the aligned memory is the mean of the working neurons transported to neuron j of the reference.
2. theta = reference + w (aligned - reference), with w = fusion + fusion (new - past) per neuron. ``new`` is its mean
   ReLU activation on correctly classified training images of the task, ``past`` the maximum over earlier tasks, both
   scaled to [0, 1] within the layer.

New rows of the head start as mixtures of the old ones: the feature is split into sub-heads, and in each an old class is
weighted by the cosine of its mean query with that of the new class. The published 192 sub-heads have 4 features each,
and other widths keep the 4: with 192 sub-heads of 1 feature every cosine would be 1 or -1.

The published code also transports the output neurons. They are coordinates of the backbone's tokens, which cannot be
permuted, so here they are not transported. It mixes rows by queries after the final norm; here all queries are before
it.
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from probprompt import randomness
from probprompt.methods.base import Blocks, Context, Method, MethodConfig, Prompted, Shape, TaskSummary, register
from probprompt.methods.settings import NO_ALIGNMENT, Experiment, Positive, Settings, TunedRates
from probprompt.prompts import Tokens

CHUNK = 256  # queries in memory while activations are averaged


class EvoPromptConfig(MethodConfig):
    """Settings of EvoPrompt."""

    name: Literal["evo-prompt"] = "evo-prompt"
    blocks: Blocks | None = None
    """Blocks that receive prompts, counted from 0; None: all."""
    tokens: int = Field(5, ge=1)
    """Tokens that join the sequence at each block and stay."""
    hidden: int = Field(16, ge=1)
    """Neurons in the bottleneck."""
    fusion: float = Field(0.5, ge=0, le=1)
    """Distance that the reference moves towards the trained weights, and the factor on the attributions."""
    transport: bool = True
    """Match hidden neurons before fusion."""
    attribution: bool = True
    """Move neurons that a task uses further; otherwise all move by ``fusion``."""
    compositional: bool = True
    """Start new rows of the head from the old ones."""
    part: int = Field(4, ge=1)
    """Minimum features of a sub-head, rounded up to a divisor of the width: 4 splits 768 features in 192."""
    temperature: Positive = 0.05


@register
class EvoPrompt(Method):
    """Prompts written by a bottleneck per block, fused from task to task."""

    Config = EvoPromptConfig
    summary = "tokens from a small network per block, fused with its past after each task"
    tuned_rates = TunedRates(matched=0.1, ridge=0.5)
    query_readout = "class before norm"
    needs_summary = True
    needs_prototypes = True

    reference_inner: Tensor
    reference_outer: Tensor
    hidden_attribution: Tensor
    token_attribution: Tensor

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the settings of the authors' code."""
        return {
            **NO_ALIGNMENT,
            "backbone": {"name": "vit_base_patch16_224.augreg_in21k_ft_in1k"},
            "data": {"interpolation": "bicubic"},
            "training": {
                "epochs": 20 if experiment.protocol == "cifar100" else 50,
                "batch_size": 64,
                "head_lr": 0.005,
                "prompt_lr_scale": 1.0,
                "schedule": "constant",
                "clip": 1.0,
                "augmentation": "crop+color",
            },
        }

    def __init__(self, config: EvoPromptConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)
        self.config = config
        self.blocks = tuple(range(shape.depth)) if config.blocks is None else config.blocks
        shape.check_blocks(self.blocks)
        width, written = shape.width, config.tokens * shape.width
        self.inner = nn.Parameter(self._initial("inner", config.hidden, width))  # (blocks, H, D)
        self.outer = nn.Parameter(self._initial("outer", written, config.hidden))  # (blocks, M D, H)
        self.register_buffer("reference_inner", self.inner.detach().clone())
        self.register_buffer("reference_outer", self.outer.detach().clone())
        self.register_buffer("hidden_attribution", torch.zeros(len(self.blocks), config.hidden))  # (blocks, H)
        self.register_buffer("token_attribution", torch.zeros(len(self.blocks), written))  # (blocks, M D)

    def _initial(self, name: str, outputs: int, inputs: int) -> Tensor:
        """Draw weights as PyTorch's linear layer does."""
        shape = (outputs, inputs)
        key = (self.seed, "evo-prompt", name)
        drawn = [randomness.initial("symmetric", shape, *key, block) for block in self.blocks]
        return torch.stack(drawn) / math.sqrt(inputs)  # (blocks, outputs, inputs)

    @torch.no_grad()
    def begin_task(self, task: int, classes: int) -> None:
        """Copy the current networks to the reference."""
        self.reference_inner.copy_(self.inner)
        self.reference_outer.copy_(self.outer)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Write the tokens of every block from the queries (B, D)."""
        assert query is not None
        written = self._activations(query)[1].unflatten(2, (self.config.tokens, -1))  # (B, blocks, M, D)
        return Prompted({block: Tokens(written[:, slot]) for slot, block in enumerate(self.blocks)})

    def _activations(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden neurons ``(B, blocks, H)`` and written tokens ``(B, blocks, M D)``."""
        hidden = torch.einsum("bd,khd->bkh", query, self.inner).relu()
        return hidden, torch.einsum("bkh,koh->bko", hidden, self.outer)

    @torch.no_grad()
    def end_task(self, summary: TaskSummary | None) -> None:
        """Fuse the trained networks into the reference, and store which neurons the task used."""
        assert summary is not None and summary.queries is not None
        right = summary.logits.argmax(dim=1) == summary.labels - summary.first  # (n,)
        hidden, written = self._attributions(summary.queries[right])  # (blocks, H), (blocks, M D)
        if summary.task:
            inner, outer, hidden = self._aligned(hidden) if self.config.transport else (self.inner, self.outer, hidden)
            weight = self._weights(hidden, self.hidden_attribution)  # (blocks, H, 1)
            self.inner.copy_(torch.lerp(self.reference_inner, inner, weight))
            weight = self._weights(written, self.token_attribution)  # (blocks, M D, 1)
            self.outer.copy_(torch.lerp(self.reference_outer, outer, weight))
        self.hidden_attribution.copy_(torch.maximum(self.hidden_attribution, hidden))
        self.token_attribution.copy_(torch.maximum(self.token_attribution, written))

    def _attributions(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean ReLU activations of hidden (blocks, H) and output (blocks, M D) neurons."""
        hidden = torch.zeros_like(self.hidden_attribution, dtype=torch.float64)
        written = torch.zeros_like(self.token_attribution, dtype=torch.float64)
        for some in queries.split(CHUNK):
            active, tokens = self._activations(some)
            hidden += active.double().sum(dim=0)
            written += tokens.relu().double().sum(dim=0)
        count = max(1, len(queries))
        return (hidden / count).float(), (written / count).float()

    def _aligned(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Match hidden neurons to the reference's; return weights and attributions (blocks, H)."""
        pairs = zip(self.inner, self.reference_inner, strict=True)
        plan = torch.stack([match_neurons(new, old) for new, old in pairs]).to(hidden)  # (blocks, H, H)
        inner = plan.mT @ self.inner  # (blocks, H, D)
        return inner, self.outer @ plan, (plan.mT @ hidden[..., None])[..., 0]

    def _weights(self, new: Tensor, past: Tensor) -> Tensor:
        """Return how far each neuron moves from the reference: ``(blocks, neurons, 1)``."""
        more = _scaled(new) - _scaled(past) if self.config.attribution else torch.zeros_like(new)
        return (self.config.fusion * (1 + more))[..., None]

    def initial_rows(self, prototypes: Tensor, known: Tensor, rows: Tensor) -> Tensor | None:
        """Mix old rows (old, D) by similarity of new and known prototypes, per sub-head."""
        if not self.config.compositional or not len(known):
            return None
        width = self.shape.width
        part = next(size for size in range(min(self.config.part, width), width + 1) if width % size == 0)
        new, old, values = (_cut(whole, part) for whole in (prototypes, known, rows))  # (sub-heads, classes, part)
        cosine = functional.normalize(new, dim=2) @ functional.normalize(old, dim=2).mT  # (sub-heads, new, old)
        mixed = (cosine / self.config.temperature).softmax(dim=2) @ values  # (sub-heads, new, part)
        return mixed.transpose(0, 1).flatten(1)  # (new, D)


def match_neurons(new: Tensor, old: Tensor) -> Tensor:
    """Return a matching ``(H, H)`` of two layers' neurons ``(H, D)``, columns summing to 1."""
    start, end = (functional.normalize(weights.double(), dim=1) for weights in (new, old))  # (H, D) each
    cost = 2 - 2 * start @ end.T  # (H, H), squared distances of directions
    source, target = (weights.double().abs().sum(dim=1) + 1e-9 for weights in (new, old))  # (H,) each
    plan = optimal_transport(cost, source, target)
    return plan / plan.sum(dim=0).clamp(min=1e-12)


def _cut(features: Tensor, part: int) -> Tensor:
    """Split features (classes, D) into parts: ``(D / part, classes, part)``."""
    return features.reshape(len(features), -1, part).transpose(0, 1)


def _scaled(attribution: Tensor) -> Tensor:
    """Scale attributions (blocks, neurons) to [0, 1] within each block; 0 if all are equal."""
    low, high = attribution.aminmax(dim=1, keepdim=True)
    return (attribution - low) / (high - low).clamp(min=1e-9)


def optimal_transport(cost: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Return the cheapest plan (n, m) that moves weights (n,) to (m,) at costs (n, m).

    Both weights are normalized to 1: the plan's rows sum to the source's, its columns to the target's. It solves ``min
    <cost, plan>`` as a linear program in float64, and is a corner of the polytope of plans: between equally many points
    of equal weights, the best assignment.

    >>> cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> optimal_transport(cost, torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]))
    tensor([[0.5000, 0.2500],
            [0.0000, 0.2500]], dtype=torch.float64)
    """
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, kron, vstack

    wide = cost.detach().double().cpu()  # (n, m)
    rows, columns = _shares("source", source, wide.shape[0]), _shares("target", target, wide.shape[1])
    row_sums = kron(eye_array(len(rows)), [[1.0] * len(columns)])  # (n, n m)
    column_sums = kron([[1.0] * len(rows)], eye_array(len(columns)))  # (m, n m)
    # All rows and all columns have the same sum: one equation is redundant, and rounding would contradict it.
    equations = vstack([row_sums, column_sums], format="csr")[:-1]  # (n + m - 1, n m)
    sums = torch.cat([rows, columns])[:-1].numpy()
    answer = linprog(wide.flatten().numpy(), A_eq=equations, b_eq=sums, method="highs-ds")
    if answer.x is None:
        raise ValueError(f"Optimal transport failed: {answer.message}.")
    return torch.from_numpy(answer.x).double().clamp(min=0).view_as(wide)


def _shares(name: str, weights: Tensor, count: int) -> Tensor:
    """Normalize weights to a sum of 1."""
    wide = weights.detach().double().cpu()
    if wide.shape != (count,) or not bool(wide.isfinite().all()) or bool((wide < 0).any()) or not float(wide.sum()):
        raise ValueError(f"{name} needs {count} weights, none negative and not all zero, got {weights.tolist()}.")
    return wide / wide.sum()
