"""Randomness is keyed, not sequential: a draw depends on its key alone, never on what was drawn before it.

So a resumed run equals an uninterrupted one without any generator's state being saved, and nothing depends on the
order of batches, tasks or processes. A key is a seed followed by words and numbers that say what the draw is for.
"""

import hashlib
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from probprompt import kernels

Key = int | str


def _words(key: tuple[Key, ...]) -> list[int]:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return [int(word) for word in np.frombuffer(digest, dtype="<u4")]


def stream(*key: Key) -> np.random.RandomState:
    """NumPy's legacy generator for this key: its streams are frozen by policy, the same in every later version."""
    return np.random.RandomState(_words(key))


def uniform(shape: tuple[int, ...], *key: Key) -> Tensor:
    """Float32 numbers in [0, 1), the same on every device.

    >>> bool((uniform((3,), 1, "head", 0) == uniform((3,), 1, "head", 0)).all())
    True
    """
    return torch.from_numpy(stream(*key).random_sample(shape).astype(np.float32)).clamp(max=1 - 2**-24)


def normal(shape: tuple[int, ...], *key: Key) -> Tensor:
    """Float32 standard normal numbers, the same on every device."""
    return torch.from_numpy(stream(*key).standard_normal(shape).astype(np.float32))


def initial(kind: Literal["uniform", "symmetric", "normal"], shape: tuple[int, ...], *key: Key) -> Tensor:
    """Float32 numbers for parameters to begin with: of U[0, 1), U(-1, 1) or N(0, 1).

    >>> bool((initial("symmetric", (3,), 1, "keys") == 2 * uniform((3,), 1, "keys") - 1).all())
    True
    """
    if kind == "normal":
        return normal(shape, *key)
    drawn = uniform(shape, *key)
    return 2 * drawn - 1 if kind == "symmetric" else drawn


def permutation(count: int, *key: Key) -> NDArray[np.int64]:
    """A permutation of ``range(count)``."""
    return stream(*key).permutation(count)


def number(*key: Key) -> int:
    """A whole number below 2**63 for this key."""
    low, high = _words(key)[:2]
    return low | (high & 0x7FFFFFFF) << 32


def generator(device: torch.device, *key: Key) -> torch.Generator:
    """A torch generator on the device, for draws too large to make on the CPU."""
    return torch.Generator(device=device).manual_seed(number(*key))


class Noise:
    """Normal numbers for a training step: an image gets the same, whichever part of the batch a process has."""

    def __init__(self, seed: Tensor, first: int = 0, rows: int | None = None) -> None:
        self.seed = seed
        """The step's key as one number (1,), on the device, so that a captured step can be given another."""
        self.first = first
        """Which row of the whole batch the first one here is."""
        self.rows = rows
        """How many rows the whole batch has, where it is more than the ones here."""
        self._source: torch.Generator | None = None

    def normal(self, shape: tuple[int, int, int, int], place: int) -> Tensor:
        """Standard normal numbers (B, M, K, D) for M pools; ``place`` numbers the first of them among all.

        Without kernels the pools must be asked for in the order of their numbers.
        """
        device = self.seed.device
        if kernels.usable(device):
            from probprompt.kernels.gaussians import noise

            return noise(*shape, self.seed, self.first, place)
        if self._source is None:
            self._source = torch.Generator(device=device).manual_seed(int(self.seed))
        whole = torch.randn(self.rows or shape[0], *shape[1:], generator=self._source, device=device)
        return whole[self.first : self.first + shape[0]]
