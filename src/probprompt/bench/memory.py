"""What training holds in memory at its peak, without the images.

On a GPU the allocator knows. On a CPU nobody does: there the tensors that a step makes are followed from birth to
death, and what is held all the time is added. Scratch memory inside an operation is not seen that way.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from probprompt.bench.workshop import Workshop


@dataclass(frozen=True)
class MemoryUse:
    """Bytes."""

    peak: int
    """Tensors alive at once at most: backbone, prompts, head, statistics, gradients, activations, one batch."""
    reserved: int | None
    """What the GPU's allocator took from the device, the images left out here too; None on a CPU."""


class LiveTensors(TorchDispatchMode):
    """Adds up the memory of tensors made while it is active, and keeps the largest sum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and note what it made."""
        made = func(*args, **(kwargs or {}))
        given = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(made):
            # A view, or what was changed in place, is no new memory.
            if isinstance(leaf, Tensor) and _place(leaf) not in given and _place(leaf) not in self._known:
                self._note(leaf)
        return made

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = _place(tensor), storage.nbytes()

        def forget(_: object) -> None:
            self.now -= size
            self._known.pop(place, None)

        self._known[place] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def held(workshop: Workshop, optimiser: torch.optim.Optimizer) -> int:
    """Bytes that training holds all the time, on whatever device: weights, prompts, head, statistics, moments."""
    learner = workshop.learner
    parts: list[Tensor] = [*learner.model.parameters(), *learner.model.buffers(), *learner.trained.parameters()]
    parts += [learner.statistics.mean, learner.statistics.variance, learner.prototypes]
    parts += [value for state in optimiser.state.values() for value in state.values() if isinstance(value, Tensor)]
    return size_of(parts)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors; what two of them share is counted once."""
    return sum({_place(one): one.untyped_storage().nbytes() for one in tensors}.values())


def watched(workshop: Workshop, train: Callable[[], Any]) -> MemoryUse:
    """The peak on a GPU while something trains from its first step on."""
    device = workshop.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    train()
    without = workshop.held_before + workshop.images_bytes
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return MemoryUse(peak - without, reserved - without)


def followed(workshop: Workshop, optimiser: torch.optim.Optimizer, train: Callable[[], Any]) -> MemoryUse:
    """The peak on a CPU while something trains that has made a step already."""
    with LiveTensors() as live:
        train()
    return MemoryUse(held(workshop, optimiser) + live.peak, None)
