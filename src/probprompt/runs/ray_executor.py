"""Cells as tasks of a Ray cluster: one started on this machine, or one of many machines that is there already.

Every cell has a process of its own. Where that dies, with its machine or alone, another goes on from the cell's last
checkpoint. All machines must see the grid's folder, and the images, under the same path.
"""

import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from probprompt import __version__
from probprompt.errors import UserError
from probprompt.runs.grid import (
    SILENT_GRID,
    Cell,
    ExecutionOptions,
    Executor,
    GridCallback,
    Outcome,
    RunActions,
    failed,
)
from probprompt.runs.run import Run
from probprompt.storage import write_bytes, write_errors

_LOCAL = "local"
_TRIES = 3  # workers that a cell may lose without coming any further
_GRACE = 20.0  # seconds for running cells to stop by themselves
_PATIENCE = 60.0  # seconds for a machine to answer, or for a file of another to be seen here
_LINE = 300  # characters of a message of Ray's
_STORE = 100 * 2**20  # bytes of shared memory: next to nothing passes between cells
_TOKEN_HINT = "Where it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH here, too"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # messages of its servers: what matters of them is told in ours
}


class Machine(TypedDict, total=False):
    """A machine as Ray describes it."""

    NodeID: str
    NodeManagerHostname: str
    Resources: dict[str, float]


@contextmanager
def on_ray(out: Path, way: RunActions, where: ExecutionOptions, progress: GridCallback) -> Iterator[Executor]:
    """Cells run on the cluster that is named; what still runs when the block is left is stopped at a checkpoint."""
    address = parse_address(where.on or "ray")
    with _connected(address) as ray, _marked(out) as mark:
        machines = _machines(ray)
        share = find_share(where, way.device, machines)
        fitting = [machine for machine in machines if share.fits(machine)]
        _tell_room(share, machines, fitting, address, progress)
        if address != _LOCAL or len(machines) > 1:
            _check_machines(ray, fitting, mark)
        cells = RayCells(ray, replace(way, device=share.device(way.device)), share, mark, progress)
        try:
            yield cells
        finally:
            cells.stop()


# The cluster


def parse_address(on: str) -> str:
    """Where the cluster is, as Ray calls it.

    >>> parse_address("ray:auto"), parse_address("ray:10.0.0.1:6379"), parse_address("ray://head:10001")
    ('auto', '10.0.0.1:6379', 'ray://head:10001')
    """
    kind, colon, rest = on.partition(":")
    if kind != "ray" or (colon and not rest.strip("/")):
        allowed = "ray (on this machine), ray:auto, ray:HOST:PORT or ray://HOST:PORT"
        raise UserError(f"cells cannot run on {on!r}: give {allowed}")
    if not colon:
        return os.environ.get("RAY_ADDRESS") or _LOCAL  # it is set within a job of a cluster
    return on if rest.startswith("//") else rest


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected; a cluster that was started here ends with the block, and its files with it."""
    ray = _load_ray()
    if ray.is_initialized():  # in a notebook, say: it stays as it is
        yield ray
        return
    with ExitStack() as stack:
        own = _prepare(stack) if address == _LOCAL else {}
        if address != _LOCAL:
            _refuse_silent(address)
        stack.callback(ray.shutdown)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as problem:
            hint = "" if address == _LOCAL else f". {_TOKEN_HINT}"
            raise UserError(f"the Ray cluster {address!r} could not be used: {_line(problem)}{hint}") from problem
        yield ray


def _prepare(stack: ExitStack) -> dict[str, str | int]:
    """Settings of a cluster on this machine that leaves nothing behind: no files, and no token in the home folder."""
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))
    parent = os.environ.get("RAY_TMPDIR") or ("/tmp" if os.access("/tmp", os.W_OK) else None)  # sockets: short paths
    files = TemporaryDirectory(prefix="ray-", dir=parent, ignore_cleanup_errors=True)
    return {"include_dashboard": False, "object_store_memory": _STORE, "_temp_dir": stack.enter_context(files)}


def _load_ray() -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)  # before it is imported
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed: pip install 'probprompt[ray]', or leave --on away") from None
    return ray


def _refuse_silent(address: str) -> None:
    """Refuse an address where nobody answers: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as problem:
        told = f"no Ray cluster answers at {host}:{port} ({problem.strerror or 'no answer'})"
        raise UserError(f"{told}: is it running, and is this its address?") from None


def _line(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:_LINE]


@dataclass(frozen=True)
class Share:
    """What a cell takes of a machine."""

    gpus: float
    cpus: float

    def fits(self, machine: Machine) -> int:
        """How many cells a machine can run at a time."""
        wanted = (("GPU", self.gpus), ("CPU", self.cpus))
        return min(int(machine["Resources"].get(name, 0) / number + 1e-6) for name, number in wanted if number)

    def device(self, asked: str | None) -> str | None:
        """Where a cell computes: a GPU that it has not taken is not its to use, though it may see one."""
        return asked if self.gpus else "cpu"

    def __str__(self) -> str:
        return f"{f'{self.gpus:g} GPU and ' if self.gpus else ''}{self.cpus:g} CPU"


def find_share(where: ExecutionOptions, device: str | None, machines: list[Machine]) -> Share:
    """What each cell takes: a GPU where there are any, and a CPU, unless asked for otherwise."""
    if device not in (None, "cpu", "cuda"):
        raise UserError(f"Ray gives each cell its GPU: --device takes cpu or cuda there, not {device!r}")
    wants_gpu = device != "cpu" and any(machine["Resources"].get("GPU") for machine in machines)
    gpus, cpus = where.gpus_per_cell, where.cpus_per_cell
    share = Share(float(wants_gpu) if gpus is None else gpus, 1.0 if cpus is None else cpus)
    for name, number in (("GPUs", share.gpus), ("CPUs", share.cpus)):
        if number < 0 or (number > 1 and number != int(number)) or (number == 0 and name == "CPUs"):
            raise UserError(f"{name} per cell: a part of one or a whole number, not {number:g}")
    if device == "cuda" and not share.gpus:
        raise UserError("--device cuda, but the cells take no GPU: the cluster has none, or --gpus-per-cell is 0")
    return share


def _machines(ray: Any) -> list[Machine]:
    return [machine for machine in ray.nodes() if machine["Alive"]]


def _tell_room(
    share: Share, machines: list[Machine], fitting: list[Machine], address: str, progress: GridCallback
) -> None:
    if fitting:
        room = sum(map(share.fits, fitting))
        progress.note(f"Ray: room for {room} cells at a time on {len(fitting)} machine(s), {share} each")
    elif address == _LOCAL:
        has = {name: machines[0]["Resources"].get(name, 0) for name in ("GPU", "CPU")}
        raise UserError(
            f"a cell wants {share}, this machine has {Share(has['GPU'], has['CPU'])}: ask for less per cell"
        )
    else:
        progress.note(f"Ray: no machine of the cluster has {share} now; waiting for one to join")


# Whether the machines can work on the grid


@contextmanager
def _marked(out: Path) -> Iterator[Path]:
    """A file by which machines can tell that they see the grid's folder."""
    mark = out.absolute() / f".shared-{token_hex(8)}"
    with write_errors(out):
        mark.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(mark, b"")
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def _not_shared(host: str, mark: Path) -> str:
    return (
        f"{host} does not see the grid's folder {mark.parent}: with several machines --out must be on a file system "
        "that all of them share, under the same path"
    )


def _check_machines(ray: Any, machines: list[Machine], mark: Path) -> None:
    """Refuse machines that do not see the grid's folder, or have another version of this package or none."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def look() -> tuple[bool, str]:  # an inner function travels whole: it can tell where the package is missing
        import probprompt

        return mark.exists(), probprompt.__version__

    task = ray.remote(num_cpus=0, max_retries=0)(look)
    there = [NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False) for machine in machines]
    asked = [task.options(scheduling_strategy=place).remote() for place in there]
    wrong = []
    for machine, answer in zip(machines, asked, strict=True):
        host = machine["NodeManagerHostname"]
        try:
            sees, version = ray.get(answer, timeout=_PATIENCE)
        except ray.exceptions.RayError as problem:
            reason = _line(getattr(problem, "cause", None) or problem)
            wrong.append(f"{host} cannot work for this grid ({reason}): install probprompt {__version__} there")
            continue
        if version != __version__:
            wrong.append(f"{host} has probprompt {version}, here is {__version__}: install the same on all machines")
        if not sees:
            wrong.append(_not_shared(host, mark))
    if wrong:
        raise UserError("\n".join(dict.fromkeys(wrong)))


# The cells


def carry_out_there(cell: Cell, way: RunActions, mark: Path, threads: int) -> bool:
    """Run a cell on the machine that was chosen for it; whether it is finished."""
    import torch

    if not mark.exists():  # a machine that joined later
        raise UserError(_not_shared(socket.gethostname(), mark))
    torch.set_num_threads(threads)
    return way.carry_out(cell, SILENT_GRID).run is not None


class Losses:
    """Counts the workers that cells have lost."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}  # where a cell stood, and how often its worker died there

    def bearable(self, cell: Cell) -> bool:
        """Take note of another one; whether the cell came further since the last, or has not lost too many."""
        checkpoint = Run(cell.folder).checkpoint
        stands = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        before, count = self._known.get(cell.name, (stands, 0))
        self._known[cell.name] = stands, count + 1 if stands == before else 1
        return self._known[cell.name][1] < _TRIES


class RayCells:
    """Cells handed to a cluster, all at once: it can then see how much there is to do, and grow."""

    ahead = math.inf

    def __init__(self, ray: Any, way: RunActions, share: Share, mark: Path, progress: GridCallback) -> None:
        self._ray, self._share, self._progress = ray, share, progress
        taken = {"num_gpus": share.gpus, "num_cpus": share.cpus}
        self._task = ray.remote(**taken, max_retries=0, max_calls=1)(carry_out_there)  # a new process for each
        self._how = way, mark, max(1, int(share.cpus))
        self._running: dict[Any, Cell] = {}
        self._losses = Losses()

    @property
    def places(self) -> int:
        """How many cells the cluster can run now."""
        return sum(map(self._share.fits, _machines(self._ray)))

    def submit(self, cell: Cell) -> None:
        """Have a cell carried out where there is room."""
        there = replace(cell, folder=cell.folder.absolute())
        self._running[self._task.remote(there, *self._how)] = cell

    def receive(self) -> Outcome:
        """Wait until a cell has ended; one whose worker died goes on with another."""
        while True:
            try:
                (ended, *_), _ = self._ray.wait(list(self._running), num_returns=1)
            except ConnectionError as problem:
                raise UserError(f"the Ray cluster was lost ({_line(problem)}): go on with the same command") from None
            outcome = self._outcome(ended, self._running.pop(ended))
            if outcome:
                return outcome

    def _outcome(self, ended: Any, cell: Cell) -> Outcome | None:
        """What became of a cell; None where it was handed out again."""
        errors = self._ray.exceptions
        lost = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.ObjectLostError)
        try:
            return _seen(cell, self._ray.get(ended))
        except lost as loss:
            died = f"its worker died ({type(loss).__name__})"
        except errors.RayError as problem:  # before the run began: it records its own failures
            return failed(cell, getattr(problem, "cause", None) or problem)
        if not self._losses.bearable(cell):
            return failed(cell, RuntimeError(f"{died}, {_TRIES} times at the same place (killed, or out of memory?)"))
        told = "it goes on from its last checkpoint" if cell.run else "it begins anew"
        self._progress.note(f"{cell.name}: {died}; {told}")
        self.submit(cell)
        return None

    def stop(self) -> None:
        """Stop what runs, each cell where it last wrote a checkpoint."""
        running = list(self._running)
        if not running:
            return
        try:
            for task in running:
                self._ray.cancel(task)  # an interruption, as of one run by Ctrl-C
            _, running = self._ray.wait(running, num_returns=len(running), timeout=_GRACE)
        finally:  # also where the user is in a hurry
            for task in running:
                self._ray.cancel(task, force=True)


def _seen(cell: Cell, finished: bool) -> Outcome:
    """What another machine has written, as soon as it can be seen here: file systems that are shared may take time."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        outcome = cell.outcome
        if outcome.run if finished else outcome.problem:
            return outcome
        if time.monotonic() > deadline:
            told = f"its worker has written what cannot be seen in {cell.folder}: is the file system shared?"
            return failed(cell, RuntimeError(told))
        time.sleep(0.2)
