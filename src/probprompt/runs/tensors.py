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

_KEY = "probprompt"  # one entry only: several would be written in any order, and the same tensors as other bytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Write tensors and a note atomically, with a digest over both."""
    write_bytes(path, _encode(tensors, note)[1])


def write_named_by_contents(folder: Path, kind: str, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors into a file whose name tells them apart from all others, and return that name."""
    digest, data = _encode(tensors, {"kind": kind})
    name = f"{kind}-{digest[:16]}.safetensors"
    write_bytes(folder / name, data)
    return name


def store_by_contents(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Keep tensors in ``<digest>.safetensors``, written only where they are not kept there yet; returns the digest."""
    digest, data = _encode(tensors, {})
    path = folder / f"{digest}.safetensors"
    if not path.is_file() or path.stat().st_size != len(data):
        write_bytes(path, data)
    return digest


def _encode(tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> tuple[str, bytes]:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(note, sort_keys=True)
    digest = _digest(plain, text)
    return digest, save(plain, {_KEY: f"{digest} {text}"})


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
    if _KEY not in metadata:
        raise UserError(f"{path} was not written by probprompt: it carries no note of what it holds")
    digest, _, text = metadata[_KEY].partition(" ")
    if digest != _digest(tensors, text):
        raise UserError(f"{path} is damaged and was not loaded: its contents do not match its digest")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, json.loads(text)


def _digest(tensors: Mapping[str, Tensor], note: str) -> str:
    digest = hashlib.sha256(note.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name}\t{tensor.dtype}\t{list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
