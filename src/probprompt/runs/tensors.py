"""Tensors with a JSON note in one safetensors file: loading executes no code, and damage is noticed."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from probprompt.errors import UserError
from probprompt.runs.files import write_bytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Write tensors and a note atomically, with a digest over both."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(note, sort_keys=True)
    write_bytes(path, save(plain, {"note": text, "digest": _digest(plain, text)}))


def read_tensors(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and note; a truncated, altered or foreign file is refused."""
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, SafetensorError) as problem:
        raise UserError(f"{path} is damaged and was not loaded: {problem}") from None
    if "note" not in metadata:
        raise UserError(f"{path} was not written by probprompt: it carries no note of what it holds")
    if metadata.get("digest") != _digest(tensors, metadata["note"]):
        raise UserError(f"{path} is damaged and was not loaded: its contents do not match its digest")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, json.loads(metadata["note"])


def _digest(tensors: Mapping[str, Tensor], note: str) -> str:
    digest = hashlib.sha256(note.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
