"""Types of prompts that a frozen transformer accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Prefix:
    """Key and value tokens before the sequence's own in one attention layer.

    Both are ``(B, P, W)``, or ``(P, W)`` for the whole batch; W is the attention's width, all heads together. They are
    not projected again. With ``projected`` they have the backbone's width, and the block projects them like its own
    tokens.

    >>> import torch
    >>> Prefix(torch.zeros(4, 48), torch.zeros(4, 48)).length
    4
    """

    key: Tensor
    value: Tensor
    projected: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        key, value = tuple(self.key.shape), tuple(self.value.shape)
        if key != value:
            raise ValueError(f"Keys and values of a prefix need one shape, got {key} and {value}.")
        if len(key) not in (2, 3):
            raise ValueError(f"Expected a prefix (B, P, W), or (P, W) for the whole batch, got {key}.")

    @property
    def length(self) -> int:
        """Number of key tokens, equal to that of value tokens (P)."""
        return self.key.shape[-2]

    @property
    def width(self) -> int:
        """Width of the attention (W)."""
        return self.key.shape[-1]

    @property
    def batch(self) -> int | None:
        """Number of images (B); None if one prefix serves them all."""
        return self.key.shape[0] if self.key.ndim == 3 else None

    @classmethod
    def split(cls, tokens: Tensor) -> Prefix:
        """Split prompt tokens ``(B, M, D)``: the first half are keys, the second half values.

        >>> import torch
        >>> Prefix.split(torch.zeros(2, 8, 48)).key.shape
        torch.Size([2, 4, 48])
        """
        shape = tuple(tokens.shape)
        if len(shape) not in (2, 3):
            raise ValueError(f"Expected prompt tokens (B, M, D), or (M, D) for the whole batch, got {shape}.")
        half, odd = divmod(shape[-2], 2)
        if odd:
            raise ValueError(f"Cannot split {shape[-2]} prompt tokens into keys and values. Use an even number.")
        return cls(key=tokens[..., :half, :], value=tokens[..., half:, :])  # (B, M / 2, D) each


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens that join the sequence before a block and stay: ``(B, P, D)``, or ``(P, D)`` for the whole batch.

    ``positioned`` adds the position embedding of the class token, as L2P does at the input.

    >>> import torch
    >>> Tokens(torch.zeros(2, 5, 48)).length
    5
    """

    tokens: Tensor
    positioned: bool = False

    def __post_init__(self) -> None:
        shape = tuple(self.tokens.shape)
        if len(shape) not in (2, 3):
            raise ValueError(f"Expected tokens (B, P, D), or (P, D) for the whole batch, got {shape}.")

    @property
    def length(self) -> int:
        """Number of tokens (P)."""
        return self.tokens.shape[-2]

    @property
    def width(self) -> int:
        """Width of the backbone (D)."""
        return self.tokens.shape[-1]

    @property
    def batch(self) -> int | None:
        """Number of images (B); None if the tokens serve them all."""
        return self.tokens.shape[0] if self.tokens.ndim == 3 else None


@dataclass(frozen=True, eq=False)
class ClassTokenShift:
    """Shift of the class token's projected key and value: ``(B, W)``, or ``(W,)`` for the whole batch.

    >>> import torch
    >>> ClassTokenShift(torch.zeros(48), torch.zeros(48)).width
    48
    """

    key: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        key, value = tuple(self.key.shape), tuple(self.value.shape)
        if key != value or len(key) not in (1, 2):
            raise ValueError(f"Expected shifts (B, W) or (W,) for key and value, got {key} and {value}.")

    @property
    def width(self) -> int:
        """Width of the attention (W)."""
        return self.key.shape[-1]

    @property
    def batch(self) -> int | None:
        """Number of images (B); None if one shift serves them all."""
        return self.key.shape[0] if self.key.ndim == 2 else None


Prompt: TypeAlias = Prefix | Tokens | ClassTokenShift
"""A prompt for one block."""

Prompts: TypeAlias = Mapping[int, Prompt]
"""Prompts by block index, from 0."""

Readout: TypeAlias = Literal["class", "class before norm", "tokens"]
"""Output of a pass: the class token after or before the final norm, or the mean of injected tokens."""
