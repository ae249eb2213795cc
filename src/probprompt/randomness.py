"""Keyed random numbers: a draw depends only on its key, not on earlier draws.

A resumed run therefore equals an uninterrupted one without saved generator states, and results do not depend on the
order of batches, tasks or processes. A key is a seed followed by words and numbers that name the purpose of the draw.
"""

import hashlib
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from probprompt import kernels

Key = int | str
Start = Literal["uniform", "symmetric", "normal"]


def _words(key: tuple[Key, ...]) -> list[int]:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return [int(word) for word in np.frombuffer(digest, dtype="<u4")]


def stream(*key: Key) -> np.random.RandomState:
    """Return NumPy's legacy generator for a key; its streams are frozen across versions."""
    return np.random.RandomState(_words(key))


def uniform(shape: tuple[int, ...], *key: Key) -> Tensor:
    """Draw float32 numbers in [0, 1), the same on every device.

    >>> bool((uniform((3,), 1, "head", 0) == uniform((3,), 1, "head", 0)).all())
    True
    """
    return torch.from_numpy(stream(*key).random_sample(shape).astype(np.float32)).clamp(max=1 - 2**-24)


def normal(shape: tuple[int, ...], *key: Key) -> Tensor:
    """Draw float32 standard normal numbers, the same on every device."""
    return torch.from_numpy(stream(*key).standard_normal(shape).astype(np.float32))


def initial(kind: Start, shape: tuple[int, ...], *key: Key) -> Tensor:
    """Draw initial float32 parameters from U[0, 1), U(-1, 1) or N(0, 1).

    >>> bool((initial("symmetric", (3,), 1, "keys") == 2 * uniform((3,), 1, "keys") - 1).all())
    True
    """
    if kind == "normal":
        return normal(shape, *key)
    drawn = uniform(shape, *key)
    return 2 * drawn - 1 if kind == "symmetric" else drawn


def permutation(count: int, *key: Key) -> NDArray[np.int64]:
    """Return a permutation of ``range(count)``."""
    return stream(*key).permutation(count)


def number(*key: Key) -> int:
    """Return an integer below 2**63."""
    low, high = _words(key)[:2]
    return low | (high & 0x7FFFFFFF) << 32


def generator(device: torch.device, *key: Key) -> torch.Generator:
    """Return a torch generator on the device, for draws too large for the CPU."""
    return torch.Generator(device=device).manual_seed(number(*key))


_GOLDEN, _FIRST, _SECOND = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def bits(keys: Tensor, count: int, *key: Key) -> Tensor:
    """Return 64-bit random numbers ``(B, count)`` for keys ``(B,)``, the same on every device."""
    places = torch.arange(1, count + 1, device=keys.device) * _GOLDEN + number(*key)
    mixed = keys[:, None] + places  # steps and mixing of SplitMix64, in integers that wrap
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return mixed


def pixel_key(pixels: NDArray[np.uint8], height: int, width: int) -> int:
    """Hash the bytes of an image (H, W, 3)."""
    digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=8, salt=b"%dx%d" % (height, width))
    return int.from_bytes(digest.digest(), "little", signed=True)


class Turns:
    """Random shift of pools and features, with random signs, for each of B keys.

    It turns noise shared by all images into separate noise per image. Turning what is compared with the noise instead
    gives the same result at a much lower cost.
    """

    def __init__(self, keys: Tensor, pools: int, width: int, *key: Key) -> None:
        device, words = keys.device, -(-width // 64)
        drawn = bits(keys, pools * words + 2, *key)
        signs = drawn[:, 2:].view(-1, pools, words, 1) >> torch.arange(64, device=device) & 1
        self._signs = 1 - 2 * signs.flatten(2)[..., :width].float()  # (B, M, D)
        pool = (torch.arange(pools, device=device) + (drawn[:, :1] >> 8)) % pools  # (B, M)
        feature = (torch.arange(width, device=device) + (drawn[:, 1:2] >> 8)) % width  # (B, D)
        self._places = (pool[:, :, None] * width + feature[:, None]).flatten(1)  # (B, M D): where each number goes

    def turn(self, values: Tensor, signs: bool = True) -> Tensor:
        """Return turned values ``(B, M, D)``; squares need no signs."""
        values = values * self._signs if signs else values.expand(self._signs.shape)
        return torch.empty_like(values).flatten(1).scatter_(1, self._places, values.flatten(1)).view_as(values)

    def back(self, values: Tensor) -> Tensor:
        """Return turned values ``(B, M, D)`` to their original positions."""
        return values.flatten(1).gather(1, self._places).view_as(values) * self._signs


class Noise:
    """Normal noise of a training step, the same for an image in every split of the batch over processes."""

    def __init__(self, seed: Tensor, first: int = 0, rows: int | None = None) -> None:
        self.seed = seed
        """Key of the step as one number (1,) on the device, so that a captured step can get another."""
        self.first = first
        """Index of the first local row in the whole batch."""
        self.rows = rows
        """Rows of the whole batch, if more than the local ones."""
        self._source: torch.Generator | None = None

    def normal(self, shape: tuple[int, int, int, int], place: int) -> Tensor:
        """Draw standard normal numbers ``(B, M, K, D)`` for M pools, the first numbered ``place``.

        Without kernels the pools must be requested in the order of their numbers.
        """
        device = self.seed.device
        if kernels.usable(device):
            from probprompt.kernels.gaussians import noise

            return noise(*shape, self.seed, self.first, place)
        if self._source is None:
            self._source = torch.Generator(device=device).manual_seed(int(self.seed))
        whole = torch.randn(self.rows or shape[0], *shape[1:], generator=self._source, device=device)
        return whole[self.first : self.first + shape[0]]
