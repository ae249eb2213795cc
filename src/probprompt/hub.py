"""The client of the Hugging Face hub, as weights, datasets and models use it; it is imported when it is needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from probprompt.errors import UserError

TIMEOUT = 10.0
"""Seconds until the hub must have answered for the first time."""


def failures() -> tuple[type[Exception], ...]:
    """What the client raises where the hub cannot be reached, or answers that it will not."""
    # The hub's client uses another HTTP library from one version to the next: this is the one it uses.
    return OSError, getattr(import_module("huggingface_hub.errors"), "HTTPError", OSError)


@contextmanager
def asking_for(kind: str, name: str, asked: str | None = None) -> Iterator[None]:
    """Say in plain words that the hub has no such repository, or not in this revision.

    ``asked``: what the user wrote, where that is more than the name.
    """
    errors: Any = import_module("huggingface_hub.errors")
    try:
        yield
    except errors.RevisionNotFoundError:
        raise UserError(f"{asked or name} has no such revision: name a branch, a tag or a commit of it") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"the hub has no {kind} {name}, or it is private and not shown to you: check the name, and run "
            "'hf auth login' or set HF_TOKEN"
        ) from None


@contextmanager
def without_bars(*packages: Any) -> Iterator[None]:
    """Draw no bars of the client's own, or of packages that have its way to turn them off."""
    shown = [one for one in packages if not one.are_progress_bars_disabled()]
    for one in shown:
        one.disable_progress_bars()
    try:
        yield
    finally:
        for one in shown:
            one.enable_progress_bars()
