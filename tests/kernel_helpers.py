"""What the tests of the kernels share; without a GPU, Triton's interpreter runs them."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from probprompt import randomness

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# The interpreter multiplies the bits of bfloat16 numbers as if they were integers.
HALF = torch.bfloat16 if GPU else torch.float16


def numbers(*shape: int, key: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers by name, rounded to a dtype."""
    return randomness.normal(shape, 0, key).to(DEVICE, dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_near(found: Tensor, expected: Tensor, digits: float) -> None:
    """No further apart than this, where the largest number is 1."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= digits, f"{float(error):.2e} apart"


def compile_for_a_gpu(script: str, folder: Path) -> None:
    """Run a script that compiles kernels: the interpreter runs what the compiler refuses."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, str(folder / "kernel.cubin")]
    answer = subprocess.run(command, env={**outside, "TRITON_CACHE_DIR": str(folder)}, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
