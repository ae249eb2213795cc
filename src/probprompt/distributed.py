"""Processes of a distributed run: ranks, shares of a batch, and exchange of results.

torchrun sets the ranks in the environment. Each process holds the whole model, computes its part of each batch and
gathers the others; only the first one writes. DistributedDataParallel is not used, because it wraps one module with a
fixed set of parameters, and parameters are added with every task. The gradients are a few MB, in one exchange.
"""

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from probprompt.errors import UserError

TIMEOUT = timedelta(minutes=30)  # longest wait for other processes; decoding images in the first may take long

_CPU = torch.device("cpu")

Value = TypeVar("Value")


class ProcessLostError(UserError):
    """A process of the run has ended, so that the others cannot continue."""


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int = 0  # rank among all processes
    size: int = 1  # number of processes
    local_rank: int = 0  # rank among the processes on this machine
    local_size: int = 1  # number of processes on this machine

    @property
    def alone(self) -> bool:
        """True for a single process."""
        return self.size == 1

    @property
    def writes(self) -> bool:
        """True if this process writes files and reports to the user."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """Return this process's part of ``count`` rows; parts differ by at most one row.

        >>> [World(rank, 3).part(8) for rank in range(3)]
        [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
        """
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def share(self, rows: Tensor) -> Tensor:
        """Return this process's part of rows (n, ...)."""
        return rows[self.part(len(rows))]

    def gather(self, own: Tensor, count: int) -> Tensor:
        """Return all rows (count, ...), in order, from the :meth:`part` of each process."""
        if self.alone:
            return own
        parts = [World(rank, self.size).part(count) for rank in range(self.size)]
        lengths = [part.stop - part.start for part in parts]
        padded = own.new_zeros(max(lengths), *own.shape[1:])  # parts must have equal lengths
        padded[: lengths[self.rank]] = own.detach()
        gathered = [torch.empty_like(padded) for _ in parts]
        with _together():
            dist.all_gather(gathered, padded)
        return torch.cat([rows[:length] for rows, length in zip(gathered, lengths, strict=True)])

    @torch.no_grad()
    def average(self, values: Sequence[Tensor]) -> None:
        """Replace values by their mean over the processes."""
        if self.alone or not values:
            return
        flat = torch.cat([value.flatten() for value in values])
        with _together():
            dist.all_reduce(flat)
        flat /= self.size
        for value, mean in zip(values, flat.split([value.numel() for value in values]), strict=True):
            value.copy_(mean.view_as(value))

    @torch.no_grad()
    def broadcast(self, values: Sequence[Tensor]) -> None:
        """Replace values by bit-exact copies of those of the first process."""
        if self.alone or not values:
            return
        whole = [value.contiguous().flatten().view(torch.uint8) for value in values]  # (bytes,) each
        flat = torch.cat(whole)
        with _together():
            dist.broadcast(flat, src=0)
        for value, part in zip(values, flat.split([len(part) for part in whole]), strict=True):
            value.copy_(part.clone().view(value.dtype).view_as(value))  # a copy is aligned for any type

    def total(self, count: int) -> int:
        """Return the sum of whole numbers over the processes."""
        if self.alone:
            return count
        counted = torch.tensor(count, dtype=torch.int64)
        with _together():
            dist.all_reduce(counted)
        return int(counted)

    def agree(self, value: Value) -> Value:
        """Return the value of the first process."""
        if self.alone:
            return value
        values = [value]
        with _together():
            dist.broadcast_object_list(values, src=0, device=_CPU)
        return values[0]

    def barrier(self) -> None:
        """Wait for all processes."""
        self.total(0)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run the block in the first process of each machine, then in its others."""
        if self.local_rank:
            self.barrier()
        yield
        if not self.local_rank:
            self.barrier()

    def place(self, device: torch.device) -> torch.device:
        """Return the device of this process: its own GPU, or the one (cuda:N) given for all."""
        if self.alone or str(device) != "cuda":
            return device
        count = torch.cuda.device_count()
        if self.local_size > count:
            raise UserError(
                f"{self.local_size} processes were started, but this machine has {count} GPU(s). Start at most {count} "
                f"(torchrun --nproc-per-node {count}), or use the CPU (--device cpu)."
            )
        return torch.device("cuda", self.local_rank)


ALONE = World()


@contextmanager
def _together() -> Iterator[None]:
    """Raise a clear error if an exchange fails because another process has ended."""
    try:
        yield
    except RuntimeError as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise ProcessLostError(
            f"Another process of this run has ended ({reason}). Saved files are intact."
        ) from problem


def check_single_process(command: str) -> None:
    """Raise an error if several processes were started for a command that needs one."""
    size = from_environment().size
    if size > 1:
        raise UserError(f"Cannot run {command} in {size} processes. Start it without torchrun.")


def from_environment(environment: Mapping[str, str] | None = None) -> World:
    """Return the world described by torchrun's variables; a single process without them.

    >>> from_environment({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    World(rank=1, size=4, local_rank=1, local_size=2)
    """
    given = os.environ if environment is None else environment
    if not _started(given):
        return ALONE
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = {name: given.get(name, given[other]) for name, other in zip(names, names[:2] * 2, strict=True)}
    variables = ", ".join(f"{name}={text}" for name, text in texts.items())
    try:
        rank, size, local_rank, local_size = map(int, texts.values())
    except ValueError:
        raise UserError(f"Invalid environment: {variables} must be numbers. {_REMEDY}") from None
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UserError(f"Invalid environment: {variables} are inconsistent. {_REMEDY}")
    return World(rank, size, local_rank, local_size)


def _started(environment: Mapping[str, str]) -> bool:
    """Return True if torchrun, or something that sets its variables, started this process."""
    return "RANK" in environment and "WORLD_SIZE" in environment


_REMEDY = "Start the processes with torchrun --nproc-per-node N -m probprompt, or unset these variables."


def join(device: torch.device) -> tuple[World, torch.device]:
    """Connect to the other processes; return the world and the device of this process."""
    world = from_environment()
    place = world.place(device)
    if world.alone:
        return world, place
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        # NCCL needs one GPU per process. Objects and counts are exchanged on the CPU.
        backend = "cpu:gloo,cuda:nccl" if str(device) == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=TIMEOUT, rank=world.rank, world_size=world.size)
        except (ValueError, RuntimeError) as problem:
            raise UserError(f"Cannot connect the {world.size} processes ({problem}). {_REMEDY}") from problem
        atexit.register(_leave)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _stopped)
    return world, place


def _stopped(number: int, frame: FrameType | None) -> None:
    """Report why torchrun stops this process, possibly before any exchange fails."""
    raise ProcessLostError("Another process of this run has ended. Saved files are intact.")


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def must_launch(gpus: int, device: str | None) -> bool:
    """Return True if processes must be started; raise an error if there are too few GPUs."""
    if _started(os.environ):
        world = from_environment()
        if gpus != world.size:
            raise UserError(
                f"--gpus is {gpus}, but torchrun started {world.size} process(es). Remove --gpus, or start {gpus} "
                f"(torchrun --nproc-per-node {gpus})."
            )
        return False
    if device is not None and device.startswith("cuda:"):
        raise UserError(f"--gpus {gpus} cannot be combined with --device {device}. Remove one of them.")
    available = torch.cuda.device_count()
    if device != "cpu" and available < gpus:
        raise UserError(
            f"--gpus is {gpus}, but this machine has {available} GPU(s). Lower it, or use {gpus} processes on the CPU "
            f"(--gpus {gpus} --device cpu)."
        )
    return gpus > 1


def launch(processes: int, *arguments: str) -> None:
    """Run Python with these arguments in several processes, as torchrun does."""
    from torch.distributed.elastic.multiprocessing.api import SignalException  # slow to load
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = max(1, (os.cpu_count() or 1) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="probprompt",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    logging.disable()  # failures are reported below
    try:
        elastic_launch(settings, sys.executable)(*arguments)
    except SignalException as stop:
        raise SystemExit(128 + stop.sigval) from None
    except ChildFailedError as failure:
        first = min(error.timestamp for error in failure.failures.values())  # later ones are its consequence
        codes = {rank: error.exitcode for rank, error in failure.failures.items() if error.timestamp == first}
        _report_failure(codes, processes)
    finally:
        logging.disable(logging.NOTSET)


def _report_failure(codes: Mapping[int, int], processes: int) -> None:
    """Raise an error for a process that was killed; otherwise exit as the failed one did.

    >>> _report_failure({0: 2, 1: -signal.SIGTERM}, 2)
    Traceback (most recent call last):
    SystemExit: 2
    >>> _report_failure({0: 2, 1: -signal.SIGKILL}, 2)
    Traceback (most recent call last):
    probprompt.distributed.ProcessLostError: Process 2 of 2 was killed (SIGKILL, possibly out of memory).
    """
    # torchrun stops the others by SIGTERM.
    rank = min(codes, key=lambda rank: (codes[rank] == -signal.SIGTERM, codes[rank] >= 0))
    if codes[rank] >= 0:
        raise SystemExit(codes[rank])
    name = signal.Signals(-codes[rank]).name
    memory = ", possibly out of memory" if name == "SIGKILL" else ""
    raise ProcessLostError(f"Process {rank + 1} of {processes} was killed ({name}{memory}).")
