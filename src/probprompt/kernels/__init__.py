"""Fused kernels for NVIDIA GPUs, in Triton. Each equals a plain function, which runs where these cannot.

:mod:`~probprompt.kernels.pointwise`, :mod:`~probprompt.kernels.attention` and :mod:`~probprompt.kernels.mlp` serve the
frozen blocks (:mod:`~probprompt.kernels.vit_blocks`), :mod:`~probprompt.kernels.mixture` and
:mod:`~probprompt.kernels.gaussians` the equations of ProbPrompt, :mod:`~probprompt.kernels.pixels` the path from stored
pixels to views and patches.
"""

import importlib.util
import os
from functools import cache

import torch

SWITCH = "PROBPROMPT_KERNELS"
"""The environment variable that switches the kernels off when it is ``off``: everything then runs plainly."""


def usable(device: torch.device) -> bool:
    """Whether the kernels run on this device: an NVIDIA GPU, with Triton installed."""
    return device.type == "cuda" and os.environ.get(SWITCH) != "off" and _installed()


_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16"}  # by torch's names


def bf16_unit() -> str | None:
    """By what the processor computes in bf16; None where it would emulate it, and be slower."""
    able = torch.cpu.get_capabilities()
    return next((words for name, words in _BF16.items() if able.get(name)), None)


@cache
def _installed() -> bool:
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
