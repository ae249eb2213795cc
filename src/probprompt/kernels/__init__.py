"""Fused kernels for NVIDIA GPUs, in Triton. Each equals a plain function, which runs wherever these cannot.

:mod:`~probprompt.kernels.norm` and :mod:`~probprompt.kernels.attention` serve the frozen blocks
(:mod:`probprompt.fused`), :mod:`~probprompt.kernels.mixture` and :mod:`~probprompt.kernels.sampling` ProbPrompt's
equations, :mod:`~probprompt.kernels.crop` and
:mod:`~probprompt.kernels.patches` the way from stored pixels to views and patches.
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


@cache
def _installed() -> bool:
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
