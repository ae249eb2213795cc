"""The client of the Hugging Face Hub, imported on first use."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from probprompt.errors import UserError

TIMEOUT = 10.0  # seconds to wait for the Hub's first answer


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of the client for network errors and rejected requests."""
    # The HTTP library depends on the client's version.
    return OSError, getattr(import_module("huggingface_hub.errors"), "HTTPError", OSError)


@contextmanager
def repository_errors(kind: str, name: str, requested: str | None = None) -> Iterator[None]:
    """Turn errors about missing repositories and revisions into UserErrors.

    ``requested``: text of the user's request, if it is more than the name.
    """
    errors: Any = import_module("huggingface_hub.errors")
    try:
        yield
    except errors.RevisionNotFoundError:
        raise UserError(f"{requested or name}: revision not found. Pass an existing branch, tag or commit.") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"The Hub has no {kind} {name}, or it is private. Check the name, and run 'hf auth login' or set HF_TOKEN."
        ) from None


@contextmanager
def without_bars(*packages: Any) -> Iterator[None]:
    """Disable the progress bars of the client and similar packages."""
    with ExitStack() as stack:
        for package in packages:
            if not package.are_progress_bars_disabled():
                package.disable_progress_bars()
                stack.callback(package.enable_progress_bars)
        yield
