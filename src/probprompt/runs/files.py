"""Files written whole or not at all."""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probprompt.errors import UserError


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: after a crash there is the old one or the new one."""

    def fill(temporary: Path) -> None:
        temporary.write_bytes(data)

    write_with(path, fill)


def write_with(path: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a temporary file beside the path, then put it in its place."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            fill(temporary)
            _settle(temporary)
            temporary.replace(path)
            _settle(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as problem:
        raise write_error(path, problem) from problem


def _settle(path: Path) -> None:
    """Have the disk hold what was written before anything depends on it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_error(path: Path, problem: OSError) -> UserError:
    """Say in plain words that a file could not be written."""
    reason = "the disk is full" if problem.errno in (errno.ENOSPC, errno.EDQUOT) else (problem.strerror or problem)
    return UserError(f"{path} could not be written: {reason}. What was saved before is intact")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN is refused, since it is no JSON."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read JSON; a missing or broken file is the user's to know."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UserError(f"{path} cannot be read: {problem.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is damaged: it is not valid JSON") from None


def sha256(path: Path) -> str:
    """Fingerprint of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
