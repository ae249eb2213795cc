"""Executor of a grid on a Ray cluster, whose machines must share the grid's folder."""

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
from probprompt.errors import UserError, one_line
from probprompt.runs import grid
from probprompt.runs.grid import ExecutionOptions, GridCallback, Outcome, RunActions, RunSpec, failed
from probprompt.runs.run import Run
from probprompt.storage import write_bytes, write_errors

_LOCAL = "local"
_TRIES = 3  # workers that a run may lose without progress
_GRACE = 20.0  # seconds for runs to stop
_PATIENCE = 60.0  # seconds for a machine to answer, or for its files to become visible
_STORE = 100 * 2**20  # bytes of shared memory; runs exchange almost nothing
_TOKEN_HINT = " If it needs a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}  # no messages of its servers


class Machine(TypedDict, total=False):
    """A machine as described by Ray."""

    NodeID: str
    NodeManagerHostname: str
    Resources: dict[str, float]


@contextmanager
def on_ray(
    out: Path, actions: RunActions, options: ExecutionOptions, progress: GridCallback
) -> Iterator[grid.Executor]:
    """Yield an executor on the cluster; runs that have not ended are stopped at a checkpoint."""
    address = parse_address(options.ray or "ray")
    with _connected(address) as ray, _folder_mark(out) as mark:
        machines = _machines(ray)
        share = find_resources(options, actions.device, machines)
        fitting = [machine for machine in machines if share.fits(machine)]
        _report_capacity(share, machines, fitting, address, progress)
        if address != _LOCAL or len(machines) > 1:
            _check_machines(ray, fitting, mark)
        executor = RayExecutor(ray, replace(actions, device=share.device(actions.device)), share, mark, progress)
        try:
            yield executor
        finally:
            executor.stop()


def parse_address(on: str) -> str:
    """Return the address of the cluster in Ray's notation.

    >>> parse_address("ray:auto"), parse_address("ray:10.0.0.1:6379"), parse_address("ray://head:10001")
    ('auto', '10.0.0.1:6379', 'ray://head:10001')
    """
    kind, colon, rest = on.partition(":")
    if kind != "ray" or (colon and not rest.strip("/")):
        allowed = "ray (on this machine), ray:auto, ray:HOST:PORT or ray://HOST:PORT"
        raise UserError(f"Unknown cluster {on!r}. Expected {allowed}.")
    if not colon:
        return os.environ.get("RAY_ADDRESS") or _LOCAL  # set within a job of a cluster
    return on if rest.startswith("//") else rest


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connect to Ray; a local cluster ends with the block, and its files are deleted."""
    ray = _load_ray()
    if ray.is_initialized():  # for example in a notebook: it stays connected
        yield ray
        return
    with ExitStack() as stack:
        own = _prepare(stack) if address == _LOCAL else {}
        if address != _LOCAL:
            _check_reachable(address)
        stack.callback(ray.shutdown)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as problem:
            hint = "" if address == _LOCAL else _TOKEN_HINT
            raise UserError(f"Cannot use the Ray cluster {address!r}: {one_line(problem)}.{hint}") from problem
        yield ray


def _prepare(stack: ExitStack) -> dict[str, str | int]:
    """Return settings of a local cluster that leaves no files and no token behind."""
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
        raise UserError("Ray is not installed. Run pip install 'probprompt[ray]', or remove --ray.") from None
    return ray


def _check_reachable(address: str) -> None:
    """Raise an error if nothing answers at the address; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as problem:
        reason = problem.strerror or "no answer"
        raise UserError(f"No Ray cluster at {host}:{port} ({reason}). Start it, or correct the address.") from None


@dataclass(frozen=True)
class Resources:
    """GPUs and CPUs that a run takes."""

    gpus: float
    cpus: float

    def fits(self, machine: Machine) -> int:
        """Return the number of runs that a machine can execute in parallel."""
        required = (("GPU", self.gpus), ("CPU", self.cpus))
        return min(int(machine["Resources"].get(name, 0) / number + 1e-6) for name, number in required if number)

    def device(self, requested: str | None) -> str | None:
        """Return the device of a run: the CPU unless it takes a GPU."""
        return requested if self.gpus else "cpu"

    def __str__(self) -> str:
        return f"{f'{self.gpus:g} GPU and ' if self.gpus else ''}{self.cpus:g} CPU"


def find_resources(options: ExecutionOptions, device: str | None, machines: list[Machine]) -> Resources:
    """Return what each run takes: a GPU if the cluster has any, and a CPU, unless specified."""
    if device not in (None, "cpu", "cuda"):
        raise UserError(f"Ray assigns the GPUs. Expected --device cpu or --device cuda, got {device!r}.")
    wants_gpu = device != "cpu" and any(machine["Resources"].get("GPU") for machine in machines)
    gpus, cpus = options.gpus_per_run, options.cpus_per_run
    share = Resources(float(wants_gpu) if gpus is None else gpus, 1.0 if cpus is None else cpus)
    for name, number in (("GPUs", share.gpus), ("CPUs", share.cpus)):
        if number < 0 or (number > 1 and number != int(number)) or (number == 0 and name == "CPUs"):
            raise UserError(
                f"Invalid number of {name} per run: {number:g}. Expected a fraction of one or a whole number."
            )
    if device == "cuda" and not share.gpus:
        raise UserError("--device cuda needs a GPU, but the cluster has none, or --gpus-per-run is 0.")
    return share


def _machines(ray: Any) -> list[Machine]:
    return [machine for machine in ray.nodes() if machine["Alive"]]


def _report_capacity(
    share: Resources, machines: list[Machine], fitting: list[Machine], address: str, progress: GridCallback
) -> None:
    if fitting:
        slots = sum(map(share.fits, fitting))
        progress.note(f"Ray: capacity for {slots} parallel runs on {len(fitting)} machine(s), {share} each.")
    elif address == _LOCAL:
        has = {name: machines[0]["Resources"].get(name, 0) for name in ("GPU", "CPU")}
        capacity = Resources(has["GPU"], has["CPU"])
        raise UserError(f"A run needs {share}, this machine has {capacity}. Lower --gpus-per-run or --cpus-per-run.")
    else:
        progress.note(f"Ray: no machine of the cluster has {share}. Waiting for one to join.")


@contextmanager
def _folder_mark(out: Path) -> Iterator[Path]:
    """Create a file by which machines can check that they see the grid's folder."""
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
        f"{host} cannot see the folder {mark.parent}. With several machines, --out must be on a shared file system, "
        "under the same path."
    )


def _check_machines(ray: Any, machines: list[Machine], mark: Path) -> None:
    """Raise an error for machines without the grid's folder or this version of probprompt."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def look() -> tuple[bool, str]:  # Ray sends inner functions by value, so it runs without the package
        import probprompt

        return mark.exists(), probprompt.__version__

    task = ray.remote(num_cpus=0, max_retries=0)(look)
    nodes = [NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False) for machine in machines]
    answers = [task.options(scheduling_strategy=node).remote() for node in nodes]
    wrong = []
    for machine, answer in zip(machines, answers, strict=True):
        host = machine["NodeManagerHostname"]
        try:
            sees, version = ray.get(answer, timeout=_PATIENCE)
        except ray.exceptions.RayError as problem:
            reason = one_line(getattr(problem, "cause", None) or problem)
            wrong.append(f"{host} cannot execute runs ({reason}). Install probprompt {__version__} there.")
            continue
        if version != __version__:
            wrong.append(
                f"{host} has probprompt {version}, expected {__version__}. Install the same version everywhere."
            )
        if not sees:
            wrong.append(_not_shared(host, mark))
    if wrong:
        raise UserError("\n".join(dict.fromkeys(wrong)))


def execute_remotely(spec: RunSpec, actions: RunActions, mark: Path, threads: int) -> bool:
    """Execute a run on the machine that was chosen for it; return True if it is finished."""
    import torch

    if not mark.exists():  # a machine that joined later
        raise UserError(_not_shared(socket.gethostname(), mark))
    torch.set_num_threads(threads)
    return actions.execute(spec, grid.SILENT_GRID).run is not None


class LostWorkers:
    """Counts the workers that runs have lost."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}  # checkpoint, workers lost since

    def can_retry(self, spec: RunSpec) -> bool:
        """Count a lost worker; return False after several without progress in between."""
        checkpoint = Run(spec.folder).checkpoint
        now = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        before, count = self._known.get(spec.name, (now, 0))
        self._known[spec.name] = now, count + 1 if now == before else 1
        return self._known[spec.name][1] < _TRIES


class RayExecutor:
    """Submits all runs to the cluster at the start, so that it can scale to the load."""

    ahead = math.inf

    def __init__(self, ray: Any, actions: RunActions, share: Resources, mark: Path, progress: GridCallback) -> None:
        self._ray, self._share, self._progress = ray, share, progress
        resources = {"num_gpus": share.gpus, "num_cpus": share.cpus}
        remote = ray.remote(**resources, max_retries=0, max_calls=1)  # one call: a new process for each run
        self._task = remote(execute_remotely)
        self._arguments = actions, mark, max(1, int(share.cpus))
        self._running: dict[Any, RunSpec] = {}
        self._lost = LostWorkers()

    @property
    def slots(self) -> int:
        """Number of runs that the cluster can execute now."""
        return sum(map(self._share.fits, _machines(self._ray)))

    def submit(self, spec: RunSpec) -> None:
        """Submit a run."""
        self._running[self._task.remote(replace(spec, folder=spec.folder.absolute()), *self._arguments)] = spec

    def receive(self) -> Outcome:
        """Wait until a run has ended; one whose worker died is submitted again."""
        while True:
            try:
                (ended, *_), _ = self._ray.wait(list(self._running), num_returns=1)
            except ConnectionError as problem:
                raise UserError(f"Lost the Ray cluster ({one_line(problem)}). Resume with the same command.") from None
            outcome = self._outcome(ended, self._running.pop(ended))
            if outcome:
                return outcome

    def _outcome(self, ended: Any, spec: RunSpec) -> Outcome | None:
        """Return the outcome of a run; None if it was submitted again."""
        errors = self._ray.exceptions
        lost = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.ObjectLostError)
        try:
            return _wait_for_outcome(spec, self._ray.get(ended))
        except lost as loss:
            loss_name = type(loss).__name__
        except errors.RayError as problem:  # before the run started, which records its own failures
            return failed(spec, getattr(problem, "cause", None) or problem)
        if not self._lost.can_retry(spec):
            reason = f"Its worker died ({loss_name}) {_TRIES} times without progress (killed, or out of memory)."
            return failed(spec, RuntimeError(reason))
        action = "resuming from its last checkpoint" if spec.run else "starting from scratch"
        self._progress.note(f"{spec.name}: its worker died ({loss_name}); {action}.")
        self.submit(spec)
        return None

    def stop(self) -> None:
        """Stop the active runs; each keeps its last checkpoint."""
        running = list(self._running)
        if not running:
            return
        try:
            for task in running:
                self._ray.cancel(task)  # raises KeyboardInterrupt in the run
            _, running = self._ray.wait(running, num_returns=len(running), timeout=_GRACE)
        finally:  # also after another Ctrl-C
            for task in running:
                self._ray.cancel(task, force=True)


def _wait_for_outcome(spec: RunSpec, finished: bool) -> Outcome:
    """Return the outcome as soon as it is visible here; shared file systems may be slow."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        outcome = spec.outcome
        if outcome.run if finished else outcome.problem:
            return outcome
        if time.monotonic() > deadline:
            reason = f"The files of its worker are not visible in {spec.folder}. Use a shared file system for --out."
            return failed(spec, RuntimeError(reason))
        time.sleep(0.2)
