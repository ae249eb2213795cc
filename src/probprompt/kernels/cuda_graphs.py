"""Functions of tensors captured as CUDA graphs, and optimizers with capturable steps.

A small backbone spends more time launching kernels than running them. A CUDA graph launches a whole step: the same
kernels on the same memory, so inputs are copied to where the captured step reads them.
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
"""Environment variable; ``off`` disables the capture of steps and predictions."""
WARM_UP = 3
"""Plain calls before the capture, which compile kernels and allocate moments."""


@cache
def _stream(device: int, role: int) -> torch.cuda.Stream:
    """Return one permanent stream per role and device: cuBLAS never frees a stream's memory.

    The first role has priority; the others use its idle time.
    """
    return torch.cuda.Stream(device, priority=0 if role else -1)


@contextmanager
def _undisturbed(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Capture without interference from other threads and the garbage collector.

    Freeing an earlier model's graph or memory during a capture would end it.
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

    The outputs of a replay are overwritten by the next one; copy them to keep them.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], wanted: bool, role: int = 0) -> None:
        self._function, self._wanted = function, wanted and os.environ.get(SWITCH) != "off"
        self.stream = _stream(torch.cuda.current_device(), role) if self._wanted else None
        """Stream of calls and captures. Parallel work needs separate streams, since cuBLAS has scratch memory per
        stream."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()
        self._calls = 0
        self.taken: torch.cuda.Event | None = None
        """Event after the inputs of the last call were copied."""

    @property
    def warm(self) -> bool:
        """True if the next call is captured or replayed."""
        return self._wanted and self._calls >= WARM_UP

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call, capture or replay the function."""
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
        """Call on a separate stream, as required before a capture."""
        assert self.stream is not None
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = self._function(*inputs)
        current.wait_stream(self.stream)
        return outputs

    def _capture(self, *inputs: Tensor) -> torch.cuda.CUDAGraph | None:
        """Capture the function; if that fails, call it plainly from now on."""
        self._inputs, graph = tuple(given.clone() for given in inputs), torch.cuda.CUDAGraph()
        try:  # torch leaves the stream of a failed capture current
            with torch.cuda.stream(torch.cuda.current_stream()), _undisturbed(graph, self.stream):
                self._outputs = self._function(*self._inputs)
        except RuntimeError as problem:
            self._wanted = False
            warnings.warn(f"A step cannot be captured and runs slower: {problem}", RuntimeWarning, stacklevel=2)
            return None
        return graph


class Replays:
    """A function of one batch under a module's tensors, captured for recurring batch sizes.

    Batches up to ``filled`` are padded to a power of two, so that there are few sizes. A larger batch is captured if
    its size is a power of two up to ``most``, and called plainly otherwise, because padding would cost more than
    launching. Tensors may change in place; a move or another shape discards the captures. One thread at a time replays.
    """

    filled = 64
    most = 256

    def __init__(self, function: Callable[..., Tensor], module: nn.Module) -> None:
        self._function, self._module = function, module
        self._captured: dict[tuple[int, ...], Captured] = {}
        self._places = list[tuple[int, torch.Size, torch.dtype]]()
        self._lock = threading.Lock()

    def __call__(self, *batch: Tensor) -> Tensor:
        """Return the function's result on a batch, (B, ...) each, in new memory."""
        if not batch[0].is_cuda or torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing():
            return self._function(*batch)
        if torch.is_inference_mode_enabled():  # inference tensors could not be written to outside this mode
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
            (result,) = self._captured[key](*batch)
            return result[:count].clone()

    def _one(self, *batch: Tensor) -> tuple[Tensor, ...]:
        return (self._function(*batch),)

    def _check(self) -> None:
        """Discard captures if tensors have moved."""
        places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in _tensors(self._module)]
        if places != self._places:
            self._captured, self._places = {}, places


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return parameters and buffers of a module and its submodules.

    Called for every prediction: torch's own iterators build names and take more than twice as long.
    """
    tensors, left = list[Tensor](), [module]
    while left:
        part = left.pop()
        for kind in (part._parameters, part._buffers):
            tensors += [tensor for tensor in kind.values() if tensor is not None]
        left += [inner for inner in part._modules.values() if inner is not None]
    return tensors


def make_optimizer(
    kind: type[Optimizer], groups: list[dict[str, Any]], device: torch.device, **settings: Any
) -> Optimizer:
    """Create an optimizer with capturable steps; on a GPU, :func:`set_rate` sets its rates."""
    if device.type != "cpu":
        groups = [{**group, "lr": torch.zeros((), device=device)} for group in groups]
        settings["fused"] = True
        if "capturable" in signature(kind).parameters:
            settings["capturable"] = True
    return kind(groups, **settings)


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
