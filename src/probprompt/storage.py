"""Atomic writes of files, hashed JSON and tensors (safetensors with a note), file locks."""

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

_PART = ".part"  # suffix of incomplete files
_KEY = "probprompt"  # one metadata entry only: safetensors does not fix the order of several, so bytes would vary


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: a crash leaves either the old or the new content."""
    write_with(path, lambda temporary: temporary.write_bytes(data))


def write_with(path: Path, fill: Callable[[Path], object]) -> None:
    """Let ``fill`` write a temporary file, then move it to the path."""
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
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_parts(folder: Path) -> None:
    """Remove incomplete files of killed processes; call only while no process writes."""
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
    stored = json.loads(json.dumps(record, allow_nan=False))  # turns number keys into text before they are sorted
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
    """Return True for an incomplete file."""
    return path.name.startswith(".") and path.suffix == _PART


def write_error(path: Path, problem: OSError) -> UserError:
    """Return the user error for a failed write."""
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = "the disk is full. Free some space" if full else (problem.strerror or problem)
    return UserError(f"Could not write {path}: {reason}. Earlier files are intact.")


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError."""
    try:
        yield
    except OSError as problem:
        raise write_error(path, problem) from problem


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; raise ValueError for NaN."""
    write_bytes(path, encode_json(value))


def encode_json(value: Any) -> bytes:
    """Return JSON in the format of all saved files."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Read JSON; raise UserError for a missing or invalid file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UserError(f"Could not read {path}: {problem.strerror}.") from None
    except ValueError:
        raise UserError(f"{path} is corrupted: it is not valid JSON.") from None


def lock(path: Path, wait: bool = False) -> IO[str] | None:
    """Lock a file until the returned handle is closed, also in processes that inherit it.

    Returns None where files cannot be locked. Raises BlockingIOError if another process holds the lock and ``wait``
    is False.
    """
    handle = path.open("a")
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise
    except (ImportError, OSError):  # not supported by every system and file system
        handle.close()
        return None
    return handle


def write_tensors(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Write tensors and a note atomically, with a hash of both."""
    write_bytes(path, _encode(tensors, json.dumps(note, sort_keys=True))[1])


def write_named_by_contents(folder: Path, kind: str, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a file named by their hash, and return the name."""
    digest, data = _encode(tensors, json.dumps({"kind": kind}))
    name = f"{kind}-{digest[:16]}.safetensors"
    write_bytes(folder / name, data)
    return name


def store_by_contents(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to ``<hash>.safetensors`` unless it exists, and return the hash."""
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
    """Read tensors and note; raise UserError for a corrupted or foreign file."""
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except (OSError, SafetensorError) as problem:
        raise UserError(f"{path} is corrupted and was not loaded: {problem}.") from None
    if _KEY not in metadata:
        raise UserError(f"{path} was not written by probprompt: its metadata has no {_KEY!r} entry.")
    digest, _, text = metadata[_KEY].partition(" ")
    if digest != _digest(tensors, text):
        raise UserError(f"{path} is corrupted and was not loaded: its contents do not match its hash.")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, json.loads(text)


def upper(matrix: Tensor) -> Tensor:
    """Return the upper triangle `(L (L + 1) / 2,)` of a matrix `(L, L)`, row by row."""
    rows, columns = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def from_upper(half: Tensor, width: int) -> Tensor:
    """Return the upper triangular matrix of a result of :func:`upper`."""
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
    """Raise UserError if a file of tensors is corrupted or does not match its name."""
    tensors, note = read_tensors(path, torch.device("cpu"))
    digest = _digest(tensors, json.dumps(note, sort_keys=True))
    if not digest.startswith(path.stem.rpartition("-")[2]):
        raise UserError(f"{path} does not match the hash in its name. It was replaced by another file.")
