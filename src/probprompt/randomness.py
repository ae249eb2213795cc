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


def generator(device: torch.device, *key: Key) -> torch.Generator:
    """A torch generator on the device, for draws too large to make on the CPU (training noise)."""
    low, high = _words(key)[:2]
    return torch.Generator(device=device).manual_seed(low | (high & 0x7FFFFFFF) << 32)
