"""What goes wrong by a user's mistake, and how it is said."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A mistake that the user can mend: the message says what was given, what is allowed, what to do next."""


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
