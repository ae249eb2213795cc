"""APT, additive prompt tuning: one learned shift of the class token's key and value per block (Chen et al., 2025).

Every image gets the same shifts, so there is no query and no second pass. One running set of shifts P is trained on all
tasks. Evaluation uses merged shifts G, a moving average over the tasks: G_1 = P_1 and G_t = ema G_(t-1) + (1 - ema)
P_t. The head standardizes features and normalizes its rows.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from probprompt import randomness
from probprompt.methods.base import Blocks, Context, Method, MethodConfig, Prompted, Shape, TaskSummary, register
from probprompt.methods.settings import NO_ALIGNMENT, Experiment, Settings, TunedRates
from probprompt.prompts import ClassTokenShift

BOUND = 2.0  # bound of the initial truncated normal, absolute as in the authors' code: a hundred standard deviations


class APTConfig(MethodConfig):
    """Settings of APT."""

    name: Literal["apt"] = "apt"
    blocks: Blocks | None = None
    """Blocks whose class token is shifted, counted from 0; None: all."""
    ema: float = Field(0.7, ge=0, le=1)
    """Weight of the earlier shifts when a task is merged: 0.8 for ImageNet-R, 0.7 elsewhere."""
    initial_std: float = Field(0.02, gt=0, le=1)


@register
class APT(Method):
    """Additive prompts."""

    Config = APTConfig
    summary = "one learned shift of the class token's key and value per block"
    tuned_rates = TunedRates(matched=2.0, ridge=2.0)
    needs_query = False
    preferred_head = "normalized"

    merged: Tensor
    has_merged: Tensor

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the settings of the authors' code."""
        own = {"cifar100": (0.004, 30, 0.7), "cub200": (0.02, 25, 0.7)}
        rate, epochs, ema = own.get(experiment.protocol, (0.003, 30, 0.8))
        return {
            **NO_ALIGNMENT,
            "method": {"ema": ema},
            "training": {
                "epochs": epochs,
                "batch_size": 64,
                "head_lr": rate,
                "prompt_lr_scale": 1.0,
                "schedule": "vq-epoch",
                "augmentation": "autoaugment+crop",
            },
        }

    def __init__(self, config: APTConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)
        self.config = config
        self.blocks = tuple(range(shape.depth)) if config.blocks is None else config.blocks
        shape.check_blocks(self.blocks)
        drawn = [_truncated_normal((2, shape.width), config.initial_std, seed, block) for block in self.blocks]
        self.running = nn.Parameter(torch.stack(drawn))  # (blocks, 2, D): keys, values
        self.register_buffer("merged", torch.zeros_like(self.running.data))  # (blocks, 2, D)
        self.register_buffer("has_merged", torch.tensor(False))

    @torch.no_grad()
    def end_task(self, summary: TaskSummary | None) -> None:
        """Merge the running shifts of the task."""
        if not self.running.requires_grad:  # frozen shifts are not merged: features must not drift
            return
        ema = self.config.ema
        average = ema * self.merged + (1 - ema) * self.running  # (blocks, 2, D)
        self.merged.copy_(torch.where(self.has_merged, average, self.running))
        self.has_merged.fill_(True)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Shift the class token by the running shifts in training, else by the merged ones."""
        # During a task, evaluation uses the merge of the tasks before it.
        merged = torch.where(self.has_merged, self.merged, self.running)
        shifts = self.running if context.training else merged  # (blocks, 2, D)
        return Prompted(
            {
                block: ClassTokenShift(key=key, value=value)
                for block, (key, value) in zip(self.blocks, shifts, strict=True)
            }
        )


def _truncated_normal(shape: tuple[int, ...], std: float, seed: int, block: int) -> Tensor:
    """Draw from N(0, std²) within the bound, by the inverse of its distribution function."""
    limits = torch.special.ndtr(torch.tensor([-BOUND / std, BOUND / std], dtype=torch.float64))  # (2,)
    level = torch.lerp(limits[0], limits[1], randomness.uniform(shape, seed, "initial shift", block).double())
    drawn: Tensor = std * torch.special.ndtri(level)
    return drawn.clamp(-BOUND, BOUND).float()
