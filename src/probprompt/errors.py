"""What goes wrong by a user's mistake, and how it is said."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A mistake that the user can mend: the message says what was given, what is allowed, what to do next."""


class Interrupted(Exception):  # noqa: N818 (nothing went wrong)
    """The user stopped a command; the message says how to continue."""


def suggest(value: str, options: Iterable[str]) -> str:
    """Say the nearest valid names, or list them all where none is near.

    >>> suggest("epoch", ["epochs", "batch"])
    "did you mean 'epochs'?"
    >>> suggest("zzz", ["b", "a"])
    'allowed: a, b'
    """
    names = sorted(set(options))
    near = get_close_matches(value, names, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(name) for name in near) + "?"
    return "allowed: " + ", ".join(names)


def shorten(items: Iterable[object], limit: int = 5) -> str:
    """List a few items and count the rest.

    >>> shorten(range(8), 3)
    '0, 1, 2 and 5 more'
    """
    listed = [str(item) for item in items]
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"


def one_line(problem: BaseException, limit: int = 300) -> str:
    """What an error of another package says, on one line of so many letters at most.

    >>> one_line(ValueError("no such split.\\n  choose train"))
    'no such split. choose train'
    >>> one_line(TimeoutError())
    'TimeoutError'
    """
    return (" ".join(str(problem).split()) or type(problem).__name__)[:limit].rstrip(" .")


_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "can't start new thread", "std::bad_alloc")


def says_out_of_memory(problem: BaseException) -> bool:
    """Whether an error means that memory was not enough: Python's own, the system's or PyTorch's.

    >>> says_out_of_memory(MemoryError()), says_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    >>> says_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    True
    """
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(problem).lower() for words in _NO_MEMORY)
