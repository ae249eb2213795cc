"""Files written whole or not at all."""

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from probprompt.errors import UserError

_PART = ".part"  # ends the name of a file that is not whole yet


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: after a crash there is the old one or the new one."""

    def fill(temporary: Path) -> None:
        temporary.write_bytes(data)

    write_with(path, fill)


def write_with(path: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a temporary file beside the path, then put it in its place."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")
    try:
        try:
            fill(temporary)
            _settle(temporary)
            temporary.replace(path)
            _settle(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as problem:
        raise write_error(path, problem) from problem


def remove_parts(folder: Path) -> None:
    """Remove what killed writers left behind in a folder that nobody is writing to now."""
    for path in folder.rglob("*"):
        if is_part(path):
            with suppress(OSError):
                path.unlink()


def content_hash(content: Mapping[str, Any]) -> str:
    """The sha256 of what a record says, but for this hash.

    >>> content_hash({"a": 1}) == content_hash(sealed({"a": 1})) != content_hash({"a": 2})
    True
    >>> content_hash({"a": {2: 0, 10: 0}}) == content_hash({"a": {"10": 0, "2": 0}})
    True
    """
    said = {name: part for name, part in content.items() if name != "sha256"}
    kept = json.loads(json.dumps(said, allow_nan=False))  # as it is read again: keys are text there
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A record with its hash, by which what is changed by hand is told later."""
    return {**content, "sha256": content_hash(content)}


def is_changed(content: Mapping[str, Any]) -> bool:
    """Whether a record has another hash than it says; those of earlier versions say none."""
    return "sha256" in content and content["sha256"] != content_hash(content)


def natural_order(path: Path) -> list[str | int]:
    """A key that sorts paths by the numbers in them: 10 after 2."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.as_posix())]


def is_part(path: Path) -> bool:
    """Whether this is a file that was not written to its end."""
    return path.name.startswith(".") and path.suffix == _PART


def _settle(path: Path) -> None:
    """Have the disk hold what was written before anything depends on it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_error(path: Path, problem: OSError) -> UserError:
    """Say in plain words that a file could not be written."""
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = "the disk is full, make room on it" if full else (problem.strerror or problem)
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
