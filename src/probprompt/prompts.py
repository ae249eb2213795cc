"""The ways to inject what a method learned into a frozen transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Prefix:
    """Key and value tokens that every token of one attention layer sees in front of the sequence's own.

    Both are (B, P, W), or (P, W) where one prefix serves the whole batch; W is the attention's width, all
    heads together. They live in the space of the projected keys and values: they are not projected again.

    >>> import torch
    >>> Prefix(torch.zeros(4, 48), torch.zeros(4, 48)).length
    4
    """

    key: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        key, value = tuple(self.key.shape), tuple(self.value.shape)
        if key != value:
            raise ValueError(f"a prefix needs keys and values of one shape, got {key} and {value}")
        if len(key) not in (2, 3):
            raise ValueError(f"a prefix is (B, P, W), or (P, W) for the whole batch, got {key}")

    @property
    def length(self) -> int:
        """How many key tokens, and as many value tokens, it holds (P)."""
        return self.key.shape[-2]

    @property
    def width(self) -> int:
        """The attention width it is meant for (W)."""
        return self.key.shape[-1]

    @property
    def batch(self) -> int | None:
        """How many images it is meant for (B); None where one prefix serves them all."""
        return self.key.shape[0] if self.key.ndim == 3 else None

    @classmethod
    def split(cls, tokens: Tensor) -> Prefix:
        """Take prompt tokens (B, M, D) apart: the first half are the keys, the second half the values.

        >>> import torch
        >>> Prefix.split(torch.zeros(2, 8, 48)).key.shape
        torch.Size([2, 4, 48])
        """
        shape = tuple(tokens.shape)
        if len(shape) not in (2, 3):
            raise ValueError(f"prompt tokens are (B, M, D), or (M, D) for the whole batch, got {shape}")
        half, odd = divmod(shape[-2], 2)
        if odd:
            raise ValueError(
                f"{shape[-2]} prompt tokens cannot be half keys and half values: use an even number of them"
            )
        return cls(key=tokens[..., :half, :], value=tokens[..., half:, :])  # (B, M / 2, D) each


Prompt: TypeAlias = Prefix
"""One thing to inject into one block."""

Prompts: TypeAlias = Mapping[int, Prompt]
"""What to inject, by the index of the block, from 0."""
