"""Fused Triton kernels for NVIDIA GPUs. Each has an equivalent in plain PyTorch for other devices.

:mod:`~probprompt.kernels.pointwise`, :mod:`~probprompt.kernels.attention` and :mod:`~probprompt.kernels.mlp` serve the
frozen blocks (:mod:`~probprompt.kernels.vit_blocks`), :mod:`~probprompt.kernels.mixture` and
:mod:`~probprompt.kernels.gaussians` the equations of ProbPrompt, :mod:`~probprompt.kernels.pixels` views and patches of
stored pixels.
"""

import importlib.util
import os
from functools import cache

import torch

SWITCH = "PROBPROMPT_KERNELS"
"""Environment variable; ``off`` replaces the kernels by plain PyTorch."""


def usable(device: torch.device) -> bool:
    """Return True if the kernels run on this device: an NVIDIA GPU, with Triton installed."""
    return device.type == "cuda" and os.environ.get(SWITCH) != "off" and _installed()


_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16"}  # torch's names


def bf16_unit() -> str | None:
    """Return the name of the CPU's bf16 unit; None if bf16 would be emulated, and slower."""
    able = torch.cpu.get_capabilities()
    return next((words for name, words in _BF16.items() if able.get(name)), None)


@cache
def _installed() -> bool:
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
