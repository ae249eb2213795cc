"""Files that are written whole or not at all, JSON and tensors with a hash, and a lock.

Tensors and their JSON note are one safetensors file: loading executes no code, and corruption is noticed.
"""

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from probprompt.errors import UserError

_PART = ".part"  # ends the name of a file that is not whole yet
_KEY = "probprompt"  # one entry only: several would be written in any order, and the same tensors as other bytes


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: a crash leaves either the old or the new content."""
    write_with(path, lambda temporary: temporary.write_bytes(data))


def write_with(path: Path, fill: Callable[[Path], object]) -> None:
    """Let ``fill`` write a temporary file next to the path, then replace the path by it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")
    with write_errors(path):
        try:
            fill(temporary)
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_parts(folder: Path) -> None:
    """Remove what killed writers left in a folder; only while no process writes to it."""
    for path in folder.rglob("*"):
        if is_part(path):
            with suppress(OSError):
                path.unlink()


def content_hash(content: Mapping[str, JsonValue]) -> str:
    """Return the SHA-256 of a record without its own hash.

    >>> content_hash({"a": 1}) == content_hash(with_hash({"a": 1})) != content_hash({"a": 2})
    True
    >>> content_hash({"a": {2: 0, 10: 0}}) == content_hash({"a": {"10": 0, "2": 0}})
    True
    """
    record = {name: part for name, part in content.items() if name != "sha256"}
    stored = json.loads(json.dumps(record, allow_nan=False))  # as it is read again: keys are text there
    text = json.dumps(stored, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def with_hash(content: Mapping[str, object]) -> dict[str, object]:
    """Add its hash to a record, so that later edits are noticed."""
    return {**content, "sha256": content_hash(cast(Mapping[str, JsonValue], content))}


def is_changed(content: Mapping[str, JsonValue]) -> bool:
    """Return True if a record does not match its hash; records of earlier versions have none."""
    return "sha256" in content and content["sha256"] != content_hash(content)


def natural_order(path: Path) -> list[str | int]:
    """Return a key that sorts paths by the numbers in them: 10 after 2."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.as_posix())]


def is_part(path: Path) -> bool:
    """Return True if this is a file that was not written to its end."""
    return path.name.startswith(".") and path.suffix == _PART


def write_error(path: Path, problem: OSError) -> UserError:
    """Return the error that says why a file could not be written."""
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = "the disk is full, make room on it" if full else (problem.strerror or problem)
    return UserError(f"{path} could not be written: {reason}. What was saved before is intact")


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise the error that says why this path could not be written."""
    try:
        yield
    except OSError as problem:
        raise write_error(path, problem) from problem


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN is rejected, since JSON has none."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read JSON; a missing or invalid file is a UserError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UserError(f"{path} cannot be read: {problem.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is damaged: it is not valid JSON") from None


def lock(path: Path, wait: bool = False) -> IO[str] | None:
    """Lock a file for this process and those that inherit the handle; the kernel unlocks it when they end.

    Returns None where files cannot be locked. Raises BlockingIOError while another process holds the lock, unless
    ``wait`` is set.
    """
    handle = path.open("a")
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise
    except (ImportError, OSError):  # not on every system, nor on every file system
        handle.close()
        return None
    return handle


def write_tensors(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Write tensors and a note atomically, with a digest over both."""
    write_bytes(path, _encode(tensors, json.dumps(note, sort_keys=True))[1])


def write_named_by_contents(folder: Path, kind: str, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors into a file that is named by their digest, and return that name."""
    digest, data = _encode(tensors, json.dumps({"kind": kind}))
    name = f"{kind}-{digest[:16]}.safetensors"
    write_bytes(folder / name, data)
    return name


def store_by_contents(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors into ``<digest>.safetensors`` unless they are there already, and return the digest."""
    digest, data = _encode(tensors, "{}")
    path = folder / f"{digest}.safetensors"
    if not path.is_file() or path.stat().st_size != len(data):
        write_bytes(path, data)
    return digest


def _encode(tensors: Mapping[str, Tensor], note: str) -> tuple[str, bytes]:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    digest = _digest(plain, note)
    return digest, save(plain, {_KEY: f"{digest} {note}"})


def read_tensors(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and note; a truncated, altered or foreign file is rejected."""
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


def upper(matrix: Tensor) -> Tensor:
    """Return the upper triangle (L (L + 1) / 2,) of a matrix (L, L), row by row."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def from_upper(half: Tensor, width: int) -> Tensor:
    """Restore an upper triangular matrix from the result of :func:`upper`."""
    whole = half.new_zeros(width, width)
    rows, columns = torch.triu_indices(width, width, device=half.device)
    whole[rows, columns] = half
    return whole


def _digest(tensors: Mapping[str, Tensor], note: str) -> str:
    digest = hashlib.sha256(note.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name}\t{tensor.dtype}\t{list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_name(path: Path) -> None:
    """Reject a file of tensors that is corrupted, or whose contents do not match its name."""
    tensors, note = read_tensors(path, torch.device("cpu"))
    digest = _digest(tensors, json.dumps(note, sort_keys=True))
    if not digest.startswith(path.stem.rpartition("-")[2]):
        raise UserError(f"{path} holds other tensors than its name says: it was exchanged for another file")
