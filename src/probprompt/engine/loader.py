"""Queries of training views, kept for later runs of the same process that see the same views.

The backbone is frozen, so the query of a view depends on neither method nor prompts. Views are drawn from the seed, the
epoch and the image: whoever trains another method, or another variant of one, on the same stream asks for the very same
queries, which is a third of the work.
"""

import os
from collections.abc import Hashable

import torch
from torch import Tensor

SWITCH = "PROBPROMPT_QUERIES"
"""The environment variable that has queries kept when it is ``keep``."""


SHARE = 0.1
"""Of a GPU's memory, for queries."""


ROOM = 2**30
"""Bytes for queries where there is no GPU."""


class Queries:
    """The queries of one stream of views, by task and epoch, in the order in which an epoch meets its images."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Tensor] = {}

    def get(self, task: int, epoch: int, count: int) -> Tensor | None:
        """The first so many queries (count, D) of an epoch, where they are known."""
        found = self._held.get((task, epoch))
        return None if found is None or len(found) < count else found[:count]

    def keep(self, task: int, epoch: int, queries: Tensor) -> None:
        """Take note of an epoch's queries (n, D), as long as there is room for them."""
        known = self._held.get((task, epoch))
        if (known is None or len(known) < len(queries)) and queries.nbytes + _held_by_all() <= _room(queries.device):
            self._held[task, epoch] = queries

    @property
    def nbytes(self) -> int:
        """The memory they take."""
        return sum(queries.nbytes for queries in self._held.values())


_OF: dict[Hashable, Queries] = {}


def queries_of(stream: Hashable) -> Queries | None:
    """What is kept of a stream, which must be told by all that decides what is asked; None where nothing is kept."""
    return _OF.setdefault(stream, Queries()) if os.environ.get(SWITCH) == "keep" else None


def forget_queries() -> None:
    """Give all the memory back."""
    _OF.clear()


def _held_by_all() -> int:
    return sum(queries.nbytes for queries in _OF.values())


def _room(device: torch.device) -> float:
    return SHARE * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else ROOM
