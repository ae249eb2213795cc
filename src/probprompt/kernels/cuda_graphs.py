"""Functions of tensors captured as CUDA graphs, and optimisers whose steps can be.

A small backbone spends more time in launching kernels than in running them. A CUDA graph launches a whole step at
once: the same kernels on the same memory, so what goes in is copied to where the captured step looks for it.
"""

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
SWITCH = "PROBPROMPT_GRAPHS"
"""The environment variable that keeps steps and predictions from being captured when it is ``off``."""
WARM_UP = 3
"""Calls that are made the plain way before one is captured: kernels are compiled and moments allocated in them."""


@cache
def _stream(device: int, role: int) -> torch.cuda.Stream:
    """One stream for each role on a device, for good: what cuBLAS allocates for a stream is never given back.

    The first role goes before the others, which fill what it leaves idle.
    """
    return torch.cuda.Stream(device, priority=0 if role else -1)


@contextmanager
def _undisturbed(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """A capture that neither other threads nor what Python throws away meanwhile can spoil.

    An earlier model's graph or memory that the garbage collector freed in the midst of a capture would end it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()


class Captured:
    """A function of tensors that is called plainly at first, then captured and replayed.

    What a replay gives lies in captured memory until the next one: who needs it longer must copy it.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], wanted: bool, role: int = 0) -> None:
        self._function, self._wanted = function, wanted and os.environ.get(SWITCH) != "off"
        self.stream = _stream(torch.cuda.current_device(), role) if self._wanted else None
        """Where it is called and captured. What runs side by side needs streams, since cuBLAS has scratch for each."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()
        self._calls = 0
        self.taken: torch.cuda.Event | None = None
        """When the inputs of the last call had been copied."""

    @property
    def warm(self) -> bool:
        """Whether the next call is captured or replayed."""
        return self._wanted and self._calls >= WARM_UP

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the function, one way or the other."""
        if not self._wanted:
            return self._function(*inputs)
        if not self.warm:
            self._calls += 1
            return self._aside(*inputs)
        if self._graph is None:
            self._graph = self._capture(*inputs)
        if self._graph is None:
            return self._function(*inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self.taken = torch.cuda.current_stream().record_event()
        self._graph.replay()
        return self._outputs

    def _aside(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """A plain call on a stream of its own, as capturing asks for."""
        assert self.stream is not None
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = self._function(*inputs)
        current.wait_stream(self.stream)
        return outputs

    def _capture(self, *inputs: Tensor) -> torch.cuda.CUDAGraph | None:
        """Capture the function; one that cannot be is called plainly from now on."""
        self._inputs, graph = tuple(given.clone() for given in inputs), torch.cuda.CUDAGraph()
        try:  # after a failure torch leaves the stream of the capture current: the outer one is put back here
            with torch.cuda.stream(torch.cuda.current_stream()), _undisturbed(graph, self.stream):
                self._outputs = self._function(*self._inputs)
        except RuntimeError as problem:
            self._wanted = False
            warnings.warn(f"a step cannot be captured and runs slower: {problem}", RuntimeWarning, stacklevel=2)
            return None
        return graph


class Replays:
    """A function of one batch under a module's tensors, captured for the sizes of batches that come again and again.

    A batch of up to ``filled`` is filled up to a power of two, so that there are few sizes. A larger one is captured
    where it is a power of two and not above ``most``, and called plainly else: computing images that nobody asked for
    would cost more than launching does. Tensors may change in place. Where one lies elsewhere, or has another shape,
    what was captured is thrown away. One thread at a time replays.
    """

    filled = 64
    most = 256

    def __init__(self, function: Callable[..., Tensor], module: nn.Module) -> None:
        self._function, self._module = function, module
        self._captured: dict[tuple[int, ...], Captured] = {}
        self._places = list[tuple[int, torch.Size, torch.dtype]]()
        self._lock = threading.Lock()

    def __call__(self, *batch: Tensor) -> Tensor:
        """What the function makes of a batch, (B, ...) each; memory of one's own."""
        if not batch[0].is_cuda or torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing():
            return self._function(*batch)
        if torch.is_inference_mode_enabled():  # what is captured in it could not be written to outside of it
            return self._function(*batch)
        count = len(batch[0])
        size = 1 << max(count - 1, 0).bit_length()
        if not (0 < count <= self.filled or count == size <= self.most):
            return self._function(*batch)
        with self._lock:
            self._check()
            if size > count:
                batch = tuple(torch.cat([part, part[:1].expand(size - count, *part.shape[1:])]) for part in batch)
            key = tuple(number for part in batch for number in part.shape)
            if key not in self._captured:
                self._captured[key] = Captured(self._one, True, 2)
            (found,) = self._captured[key](*batch)
            return found[:count].clone()

    def _one(self, *batch: Tensor) -> tuple[Tensor, ...]:
        return (self._function(*batch),)

    def _check(self) -> None:
        """Throw away what was captured with tensors that are no longer there."""
        places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in _tensors(self._module)]
        if places != self._places:
            self._captured, self._places = {}, places


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module and all within it.

    Asked for with every prediction, so without torch's own ways, which go over all modules once for each kind and make
    a name for each tensor: that takes more than twice as long.
    """
    found, left = list[Tensor](), [module]
    while left:
        part = left.pop()
        for kind in (part._parameters, part._buffers):
            found += [tensor for tensor in kind.values() if tensor is not None]
        left += [inner for inner in part._modules.values() if inner is not None]
    return found


def make_optimizer(
    kind: type[Optimizer], groups: list[dict[str, Any]], device: torch.device, **settings: Any
) -> Optimizer:
    """An optimiser that a captured step can hold: on a GPU its rates lie there, for :func:`set_rate` to change."""
    if device.type != "cpu":
        groups = [{**group, "lr": torch.zeros((), device=device)} for group in groups]
        settings["fused"] = True
        if "capturable" in signature(kind).parameters:
            settings["capturable"] = True
    return kind(groups, **settings)


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Give a group of an optimiser's parameters another rate."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
