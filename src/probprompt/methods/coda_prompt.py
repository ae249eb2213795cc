"""CODA-Prompt: a prompt is a sum of components weighted by attention; each task adds some (CVPR 2023).

Every prompted block holds components P_k of L tokens each, with a key K_k and an attention vector A_k. A query q,
weighted feature by feature with A_k, is compared with K_k, and the prompt is the weighted sum, with no softmax:

    a_k = cos(q * A_k, K_k),    prompt = sum_k a_k P_k

Each task adds a slice of new components, orthogonal to the earlier ones, and trains only these. A loss may keep the
components near an orthonormal set. The first half of the tokens extends the block's attention keys, the second its
values.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from probprompt import randomness
from probprompt.methods.base import Blocks, Context, Method, MethodConfig, Prompted, Shape, register
from probprompt.methods.settings import Experiment, Settings, TunedRates, coda_protocol
from probprompt.prompts import Prefix

_SMALLEST_NORM = 1e-12  # a shorter vector counts as zero: its cosine with anything is about 0, not NaN
_VANISHED = 1e-5  # a smaller part of a unit vector is rounding


class CodaPromptConfig(MethodConfig):
    """Settings of CODA-Prompt."""

    name: Literal["coda-prompt"] = "coda-prompt"
    blocks: Blocks = (0, 1, 2, 3, 4)
    """Blocks that receive prompts, counted from 0; each has its own components."""
    tokens: int = Field(8, ge=2, multiple_of=2)
    """L: tokens per component, half for the keys and half for the values."""
    components_per_task: int = Field(10, ge=1)
    """Components that a task adds to every block: the paper's 100 divided by the number of tasks."""
    orthogonality_weight: float = Field(0.0, ge=0)
    """Weight of the orthogonality loss: 0.1 in the paper, 0 in the authors' scripts."""


@register
class CodaPrompt(Method):
    """Decomposed attention-based prompts."""

    Config = CodaPromptConfig
    summary = "a sum of components weighted by attention, new ones for every task (CODA-Prompt)"
    tuned_rates = TunedRates(matched=0.1, ridge=0.5)

    anchor: Tensor

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the settings of the authors' code: a hundred components over all tasks."""
        each = max(1, round(100 / experiment.tasks))
        return coda_protocol(experiment, orthogonality_weight=0.0, components_per_task=each)

    def __init__(self, config: CodaPromptConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)
        shape.check_blocks(config.blocks)
        self.config = config
        self.components = nn.ParameterList()  # per task (blocks, n, L, D)
        self.keys = nn.ParameterList()  # per task (blocks, n, D)
        self.attention = nn.ParameterList()  # per task (blocks, n, D)
        self.register_buffer("anchor", torch.empty(0), persistent=False)  # device of the first slice

    def begin_task(self, task: int, classes: int) -> None:
        """Add a slice of components, and freeze the earlier ones."""
        self.requires_grad_(False)
        tokens, width = self.config.tokens, self.shape.width
        for name, slices in self._lists().items():
            features = (tokens, width) if name == "components" else (width,)
            drawn = torch.stack([self._new(name, slot, task) for slot in range(len(self.config.blocks))])
            slices.append(nn.Parameter(drawn.unflatten(-1, features).to(self.anchor)))  # (blocks, n, [L,] D)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Mix the components of all tasks for each query (B, D); in training also weight overlap."""
        assert query is not None
        if not len(self.keys):
            return Prompted()  # before the first task
        injected: dict[int, Prefix] = {}
        for slot, block in enumerate(self.config.blocks):
            components = _all(self.components, slot)  # (N, L, D)
            mixed = torch.einsum("bn,nld->bld", self._weights(slot, query), components)  # (B, L, D)
            injected[block] = Prefix.split(mixed.to(self.anchor.dtype))
        weight = self.config.orthogonality_weight
        return Prompted(injected, weight * self.overlap() if context.training and weight else None)

    def overlap(self) -> Tensor:
        """Return how far keys, attention and components are from orthonormal, summed over blocks."""
        sets = [
            _all(slices, slot).flatten(1)
            for slices in self._lists().values()
            for slot in range(len(self.config.blocks))
        ]  # (N, features) each
        return torch.stack([orthogonality(vectors) for vectors in sets]).sum().to(self.anchor.dtype)

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        """Return each component's share of the absolute weights per prompted block: (B, 1, N)."""
        if not len(self.keys):
            return {}
        sizes = {
            block: self._weights(slot, query)[:, None].abs() + _SMALLEST_NORM  # (B, 1, N)
            for slot, block in enumerate(self.config.blocks)
        }
        return {block: (size / size.sum(-1, keepdim=True)).to(self.anchor.dtype) for block, size in sizes.items()}

    def _weights(self, slot: int, query: Tensor) -> Tensor:
        """Return cosines ``(B, N)`` of the attended query and the keys."""
        # Matrix products over D, so that q * A_k (B, N, D) is never formed. In float64, so that neither autocast, TF32
        # nor the batch size affects the result.
        wide, keys, attention = query.double(), _all(self.keys, slot), _all(self.attention, slot)
        along = wide @ (attention * keys).mT  # (B, N)
        square = (wide.square() @ attention.square().mT) * keys.square().sum(dim=-1)  # (B, N), |q * A_k|^2 |K_k|^2
        return along / square.clamp_min(_SMALLEST_NORM**2).sqrt()  # (B, N)

    def _new(self, name: str, slot: int, task: int) -> Tensor:
        """Draw vectors ``(n, features)`` for a block, orthogonal to its earlier ones, on the CPU."""
        slices = self._lists()[name]
        features = self.shape.width * (self.config.tokens if name == "components" else 1)
        key = (self.seed, "coda-prompt", name, self.config.blocks[slot], task)
        drawn = randomness.normal((self.config.components_per_task, features), *key).double()
        earlier = _all(slices, slot).flatten(1).cpu() if len(slices) else drawn[:0]  # (N, features)
        return orthonormal(drawn, earlier)

    def _lists(self) -> dict[str, nn.ParameterList]:
        return {"components": self.components, "keys": self.keys, "attention": self.attention}


def _all(slices: nn.ParameterList, slot: int) -> Tensor:
    """Return the vectors of all tasks in one block, (N, ...), in float64."""
    return torch.cat([part[slot] for part in slices]).double()


def orthogonality(vectors: Tensor) -> Tensor:
    """Return how far vectors ``(N, F)`` are from orthonormal: the mean of (X X^T - I)^2.

    >>> orthogonality(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    tensor(0.7500)
    """
    identity = torch.eye(len(vectors), dtype=vectors.dtype, device=vectors.device)
    return (vectors @ vectors.mT - identity).square().mean()


def orthonormal(drawn: Tensor, earlier: Tensor) -> Tensor:
    """Orthonormalize drawn vectors (n, F) against earlier ones (N, F) by Gram-Schmidt.

    At most F vectors can be orthogonal. The rest are made orthogonal only to others of their own slice; those that find
    no direction there start again with any direction.

    >>> orthonormal(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([[-0.7071,  0.7071]])
    """
    # Trained vectors are neither of unit length nor orthogonal, so a basis of their span is needed.
    _, strength, directions = torch.linalg.svd(nn.functional.normalize(earlier, dim=-1), full_matrices=False)
    spanned = directions[strength > _VANISHED]  # (R, F)
    room = drawn.shape[1] - len(spanned)
    fitting, rest = drawn[:room], drawn[room:]  # (fit, F), (n - fit, F)
    basis, triangle = torch.linalg.qr(torch.cat([spanned, fitting]).mT)  # (F, R + fit), (R + fit, R + fit)
    upright = basis * torch.where(triangle.diagonal() < 0, -1, 1)  # the sign is free in QR, not in Gram-Schmidt
    fitting = upright.mT[len(spanned) :]  # (fit, F)
    return torch.cat([fitting, orthonormal(rest, fitting)]) if len(rest) else fitting
