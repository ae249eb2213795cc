"""Heads: features to logits over the classes seen so far."""

import math
from typing import Self

import torch
from torch import Tensor, nn

from probprompt import randomness


class LinearHead(nn.Module):
    """A linear layer that grows by a row per class; a row's start depends on its seed and class alone."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.weight = nn.Parameter(torch.empty(0, width))  # (C, D)
        self.bias = nn.Parameter(torch.empty(0))  # (C,)

    def __len__(self) -> int:
        return len(self.bias)

    def grow(self, classes: int) -> Self:
        """Add rows for so many new classes, drawn as PyTorch's linear layer draws them."""
        seen, width = self.weight.shape
        bound = 1 / math.sqrt(width)
        rows = [randomness.uniform((width + 1,), self.seed, "head", seen + new) for new in range(classes)]
        drawn = (bound * (2 * torch.stack(rows) - 1)).to(self.weight)  # (new, D + 1)
        self.replace(torch.cat([self.weight.data, drawn[:, :-1]]), torch.cat([self.bias.data, drawn[:, -1]]))
        return self

    def replace(self, weight: Tensor, bias: Tensor) -> None:
        """Take over other rows, whatever their number."""
        self.weight, self.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.contiguous())

    def forward(self, features: Tensor) -> Tensor:
        """Logits (B, C) of features (B, D)."""
        return nn.functional.linear(features, self.weight, self.bias)
