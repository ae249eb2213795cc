"""Hardware, package versions, and the switches that affect speed."""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from probprompt import __version__, kernels
from probprompt.engine import loader
from probprompt.kernels import cuda_graphs

CHECKPOINTS = "PROBPROMPT_CHECKPOINTS"
"""Environment variable; ``all`` saves a checkpoint after every epoch and task."""
SWITCHES = (kernels.SWITCH, cuda_graphs.SWITCH, loader.SWITCH, CHECKPOINTS)
"""Environment variables that affect the speed of a run, but not its settings."""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute."""
    numbers = {"python": platform.python_version()}
    for package in ("probprompt", "torch", "torchvision", "timm", "numpy", "pillow"):
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:  # a source tree that is not installed
            numbers[package] = __version__ if package == "probprompt" else "not installed"
    revision = _revision()
    return {**numbers, "revision": revision} if revision else numbers


def _revision() -> str | None:
    """Return the commit of a source tree, marked if changed; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def machine_name(record: Mapping[str, Any]) -> str:
    """Return the name of a machine: its GPU, or else its processor."""
    return str(record.get("gpu") or record.get("processor") or record["machine"])


def chip_words(record: Mapping[str, Any]) -> str:
    """Return the GPU, or else the number of cores and the processor.

    >>> chip_words({"threads": 2, "cores": 16, "machine": "x86_64"})
    '2 of 16 cores, x86_64'
    """
    return str(record.get("gpu") or f"{record['threads']} of {record['cores']} cores, {machine_name(record)}")


def hardware(device: torch.device) -> dict[str, str | int]:
    """Return the hardware, and the switches that affect speed."""
    machine, unit = platform.machine(), kernels.bf16_unit()
    processor = str(torch.cpu.get_capabilities().get("cpu_name") or "").strip() or machine
    record: dict[str, str | int] = {
        "device": device.type,
        "machine": machine,
        "processor": f"{processor} with {unit}" if unit else processor,
        "system": platform.system(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        record["gpu"] = torch.cuda.get_device_name(device)
    if switches := [f"{name}={os.environ[name]}" for name in SWITCHES if os.environ.get(name)]:
        record["switches"] = ", ".join(switches)
    return record
