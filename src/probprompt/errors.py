"""Errors that a user can correct, and the parts of their messages."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class UserError(Exception):
    """Error that the user can correct: the message states the value given, what is expected, and what to do."""


class Interrupted(Exception):  # noqa: N818 (nothing went wrong)
    """Interruption of a command by the user; the message states how to continue."""


def suggest(value: str, options: Iterable[str]) -> str:
    """Return a sentence with the closest valid names, or with all names if none is close.

    >>> suggest("epoch", ["epochs", "batch"])
    "Did you mean 'epochs'?"
    >>> suggest("zzz", ["b", "a"])
    'Expected one of: a, b.'
    """
    names = sorted(set(options))
    if close := get_close_matches(value, names, n=3, cutoff=0.6):
        return f"Did you mean {' or '.join(map(repr, close))}?"
    return f"Expected one of: {', '.join(names)}."


def shorten(items: Iterable[object], limit: int = 5) -> str:
    """List a few items and count the rest.

    >>> shorten(range(8), 3)
    '0, 1, 2 and 5 more'
    """
    texts = [str(item) for item in items]
    first = ", ".join(texts[:limit])
    return first if len(texts) <= limit else f"{first} and {len(texts) - limit} more"


def one_line(problem: BaseException, limit: int = 300) -> str:
    """Return the message of an error of another package on one line of at most ``limit`` characters.

    >>> one_line(ValueError("no such split.\\n  choose train"))
    'no such split. choose train'
    >>> one_line(TimeoutError())
    'TimeoutError'
    """
    return (" ".join(str(problem).split()) or type(problem).__name__)[:limit].rstrip(" .")


_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "can't start new thread", "std::bad_alloc")


def is_out_of_memory(problem: BaseException) -> bool:
    """Return True if Python, PyTorch or the system reports that memory ran out.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    True
    """
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(problem).lower() for words in _NO_MEMORY)


def renamed_arguments(**renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function reject old names of arguments with an error that gives the new ones."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in renamed.keys() & kwargs.keys():
                raise UserError(f"{function.__name__}() has no argument {name!r}. Use {renamed[name]}.")
            return function(*args, **kwargs)

        return checked

    return decorate
