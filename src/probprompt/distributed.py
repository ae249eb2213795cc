"""Several processes, one run: which of them this is, what it computes, and how results come together.

torchrun starts the processes and tells each its place through the environment. Every one holds the whole model and
sees all images, computes its part of each batch and gathers the parts of the others; the first one alone writes.

DistributedDataParallel is not used. It wraps one module with one forward, sorts a fixed set of parameters into buckets
and hides their exchange behind a long backward. Here a step goes through a method, a backbone and a head that come from
different places, parameters are added with every task, and the gradients of prompts and head are a few MB: one
exchange of all of them in one piece, after the backward, costs as little and leaves nothing to keep in step.
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

TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others: longer than images take to be decoded by the first. One that has died is
noticed at once, by its closed connection or by torchrun."""

_CPU = torch.device("cpu")

Value = TypeVar("Value")


class LostError(UserError):
    """A process of the run is gone, so that the others cannot go on."""


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them; by itself it is a run of a single process."""

    rank: int = 0
    """Which of all processes this is."""
    size: int = 1
    """How many there are."""
    local_rank: int = 0
    """Which of those on this machine this is."""
    local_size: int = 1
    """How many there are on this machine."""

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    @property
    def writes(self) -> bool:
        """Whether this process writes what all computed, and talks to the user."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """Which of so many rows are this process' own; parts differ by one row at most.

        >>> [World(rank, 3).part(8) for rank in range(3)]
        [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
        """
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def share(self, rows: Tensor) -> Tensor:
        """The part of rows (n, ...), which every process has, that is for this one."""
        return rows[self.part(len(rows))]

    def gather(self, own: Tensor, count: int) -> Tensor:
        """All of so many rows (count, ...), in order, from the :meth:`part` that each process has."""
        if self.alone:
            return own
        parts = [World(rank, self.size).part(count) for rank in range(self.size)]
        lengths = [part.stop - part.start for part in parts]
        padded = own.new_zeros(max(lengths), *own.shape[1:])  # parts are exchanged at one length
        padded[: lengths[self.rank]] = own.detach()
        found = [torch.empty_like(padded) for _ in parts]
        with _together():
            dist.all_gather(found, padded)
        return torch.cat([rows[:length] for rows, length in zip(found, lengths, strict=True)])

    @torch.no_grad()
    def average(self, values: Sequence[Tensor]) -> None:
        """Replace values, the same ones everywhere, by their mean over the processes."""
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
        """Replace values by those of the first process, bit by bit."""
        if self.alone or not values:
            return
        whole = [value.contiguous().flatten().view(torch.uint8) for value in values]  # (bytes,) each
        flat = torch.cat(whole)
        with _together():
            dist.broadcast(flat, src=0)
        for value, part in zip(values, flat.split([len(part) for part in whole]), strict=True):
            value.copy_(part.clone().view(value.dtype).view_as(value))  # a copy begins where any type may

    def total(self, count: int) -> int:
        """The sum of whole numbers over the processes."""
        if self.alone:
            return count
        counted = torch.tensor(count, dtype=torch.int64)
        with _together():
            dist.all_reduce(counted)
        return int(counted)

    def agree(self, value: Value) -> Value:
        """What the first process says."""
        if self.alone:
            return value
        said = [value]
        with _together():
            dist.broadcast_object_list(said, src=0, device=_CPU)
        return said[0]

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.total(0)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Do something in the first process of each machine, then in its others, which find what it left on disk."""
        if self.local_rank:
            self.barrier()
        yield
        if not self.local_rank:
            self.barrier()

    def place(self, device: torch.device) -> torch.device:
        """Where this process computes: each on a GPU of its own, unless one GPU (cuda:N) is named for all."""
        if self.alone or str(device) != "cuda":
            return device
        count = torch.cuda.device_count()
        if self.local_size > count:
            raise UserError(
                f"{self.local_size} processes were started on this machine, but it has {count} GPU(s): start at most "
                f"{count} (torchrun --nproc-per-node {count}), or compute on the CPU (--device cpu)"
            )
        return torch.device("cuda", self.local_rank)


ALONE = World()
"""A single process."""


@contextmanager
def _together() -> Iterator[None]:
    """Tell in words that an exchange failed because another process is gone."""
    try:
        yield
    except RuntimeError as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise LostError(
            f"another process of this run has ended, and it cannot go on without ({reason}). What was saved is intact"
        ) from problem


# Joining ---------------------------------------------------------------------------------------------------------


def refuse_several(command: str) -> None:
    """Refuse a command that one process does, where several were started."""
    size = from_environment().size
    if size > 1:
        raise UserError(f"{command} is done by one process, not by {size}: start it without torchrun")


def from_environment(environment: Mapping[str, str] | None = None) -> World:
    """The world that torchrun's variables tell of; a single process without them.

    >>> from_environment({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    World(rank=1, size=4, local_rank=1, local_size=2)
    """
    given = os.environ if environment is None else environment
    if not _started(given):
        return ALONE
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = {name: given.get(name, given[other]) for name, other in zip(names, names[:2] * 2, strict=True)}
    told = ", ".join(f"{name}={text}" for name, text in texts.items())
    try:
        rank, size, local_rank, local_size = map(int, texts.values())
    except ValueError:
        raise UserError(f"the environment says {told}, which are not all numbers: {_REMEDY}") from None
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UserError(f"the environment says {told}, which fits no set of processes: {_REMEDY}")
    return World(rank, size, local_rank, local_size)


def _started(environment: Mapping[str, str]) -> bool:
    """Whether torchrun, or what sets the same variables, started this process."""
    return "RANK" in environment and "WORLD_SIZE" in environment


_REMEDY = "start the processes with torchrun --nproc-per-node N -m probprompt, or unset these variables"


def join(device: torch.device) -> tuple[World, torch.device]:
    """Meet the other processes, where there are any; returns the world and where this process computes.

    The connection is kept until the process ends: runs one after the other use the same.
    """
    world = from_environment()
    place = world.place(device)
    if world.alone:
        return world, place
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        # NCCL wants a GPU for each process. Words and counts always go by the CPU.
        backend = "cpu:gloo,cuda:nccl" if str(device) == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=TIMEOUT, rank=world.rank, world_size=world.size)
        except (ValueError, RuntimeError) as problem:
            raise UserError(f"the {world.size} processes did not find each other ({problem}): {_REMEDY}") from problem
        atexit.register(_leave)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _stopped)
    return world, place


def _stopped(number: int, frame: FrameType | None) -> None:
    """Tell in words why torchrun stops this process, which may come before any exchange fails."""
    raise LostError("another process of this run has ended, so this one was stopped. What was saved is intact")


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# Starting --------------------------------------------------------------------------------------------------------


def must_launch(gpus: int, device: str | None) -> bool:
    """Whether so many GPUs ask for processes that are still to be started; refuses what this machine has not."""
    if _started(os.environ):
        world = from_environment()
        if gpus != world.size:
            raise UserError(
                f"--gpus {gpus} was given, but torchrun started {world.size} process(es): leave --gpus away, or start "
                f"as many (torchrun --nproc-per-node {gpus})"
            )
        return False
    if device is not None and device.startswith("cuda:"):
        raise UserError(f"--gpus {gpus} and --device {device} contradict each other: leave one of them away")
    available = torch.cuda.device_count()
    if device != "cpu" and available < gpus:
        raise UserError(
            f"--gpus {gpus} was given, but this machine has {available} GPU(s): give at most that many, or try it with "
            f"{gpus} processes on the CPU (--gpus {gpus} --device cpu)"
        )
    return gpus > 1


def launch(processes: int, *arguments: str) -> None:
    """Run Python with these arguments in so many processes on this machine, as torchrun does, to the end.

    A process that fails has said why and ends the program; one that was killed has not, which is a
    :class:`LostError`.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException  # late: they take a second
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = max(1, (os.cpu_count() or 1) // processes)  # all cores for each would be far too many
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
    logging.disable()  # what torch would say of a failure is said below
    try:
        elastic_launch(settings, sys.executable)(*arguments)
    except SignalException as stop:
        raise SystemExit(128 + stop.sigval) from None
    except ChildFailedError as failure:
        first = min(found.timestamp for found in failure.failures.values())  # later ones are its consequence
        codes = {rank: found.exitcode for rank, found in failure.failures.items() if found.timestamp == first}
        _tell(codes, processes)
    finally:
        logging.disable(logging.NOTSET)


def _tell(codes: Mapping[int, int], processes: int) -> None:
    """Say which process was killed; where none was, end as one that failed did.

    >>> _tell({0: 2, 1: -signal.SIGTERM}, 2)
    Traceback (most recent call last):
    SystemExit: 2
    >>> _tell({0: 2, 1: -signal.SIGKILL}, 2)
    Traceback (most recent call last):
    probprompt.distributed.LostError: process 2 of 2 was killed (SIGKILL, as systems do that run out of memory)
    """
    # The others are stopped by a SIGTERM once one has failed.
    rank = min(codes, key=lambda rank: (codes[rank] == -signal.SIGTERM, codes[rank] >= 0))
    if codes[rank] >= 0:
        raise SystemExit(codes[rank])
    name = signal.Signals(-codes[rank]).name
    memory = ", as systems do that run out of memory" if name == "SIGKILL" else ""
    raise LostError(f"process {rank + 1} of {processes} was killed ({name}{memory})")
