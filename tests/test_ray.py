"""Runs on a Ray cluster: the same results as without, a killed worker, a failing run, and Ctrl-C."""

import ast
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import probprompt as package
from probprompt import api
from probprompt.config import flatten
from probprompt.errors import UserError
from probprompt.report.compare import gather
from probprompt.runs import ray_executor
from probprompt.runs.executors import run_grid
from probprompt.runs.grid import ExecutionOptions, Grid, GridCallback, GridSpec, Outcome, RunActions, parse_spec
from probprompt.runs.ray_executor import (
    LostWorkers,
    Machine,
    RayExecutor,
    Resources,
    find_resources,
    on_ray,
    parse_address,
)
from probprompt.runs.run import Run
from probprompt.storage import is_part
from run_cases import GRID, overlay

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra: pip install 'probprompt[ray]'")
TINY = overlay(GRID, {"backbone": {"precision": "fp32"}, "training": {"epochs": 3}})
WORKERS = """
import json, os, signal
from pathlib import Path

from probprompt import api
from probprompt.progress import ProgressCallback


class Killer(ProgressCallback):
    "Kills its process when the second epoch is trained and its checkpoint is not yet written."

    epochs = 0

    def describe(self, text):
        self.epochs += text.startswith("loss")
        if self.epochs == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def start(config, out, device, progress):
    import ray

    taken = ray.get_runtime_context().get_assigned_resources()
    Path(os.environ["PROBPROMPT_DIARY"], f"{os.getpid()}").write_text(json.dumps(taken))
    if config.method.name == "lda":
        raise RuntimeError("no luck")
    return api.start(config, out, device, Killer() if config.method.name == "probprompt" else progress)


def resume(out, device, progress):
    return api.resume(out, device, progress)
"""


class Cluster(NamedTuple):
    """A connection to a Ray cluster on this machine, as if it had two cores and a GPU."""

    ray: Any
    workers: ModuleType
    diary: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    modules, diary = tmp_path_factory.mktemp("modules"), tmp_path_factory.mktemp("diary")
    (modules / "ray_workers.py").write_text(WORKERS)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.syspath_prepend(str(modules))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH")))))
        patch.setenv("PROBPROMPT_DIARY", str(diary))
        patch.delenv("RAY_ADDRESS", raising=False)
        ray, own = ray_executor._load_ray(), ray_executor._prepare(stack)
        stack.callback(ray.shutdown)
        ray.init(address="local", num_cpus=2, num_gpus=1, log_to_driver=False, logging_level="ERROR", **own)
        yield Cluster(ray, importlib.import_module("ray_workers"), diary)


@pytest.fixture
def spec(pictures: Path) -> Callable[..., GridSpec]:
    def build(**entries: Any) -> GridSpec:
        base = {"methods": ["probprompt"], "benchmarks": [str(pictures)], "seeds": [0], "presets": ["custom"]}
        return parse_spec({**base, "settings": TINY, **entries})

    return build


Spec = Callable[..., GridSpec]


class Diary(GridCallback):
    """Records notes and ends."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.ended: list[tuple[str, bool]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def end(self, outcome: Outcome, rest: float | None) -> None:
        self.ended.append((outcome.spec.method, bool(outcome.run)))


def events(folder: Path) -> list[tuple[Any, ...]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [(line["event"], line["task"], line.get("epoch")) for line in lines]


def learned(folder: Path) -> list[bytes]:
    """Return what must not depend on where a run was executed: accuracies and all that was trained."""
    tensors = sorted((folder / "model").rglob("*.safetensors"))
    assert tensors
    return [path.read_bytes() for path in (folder / "accuracy.json", *tensors)]


@needs_ray
def test_results_equal_those_without_ray(cluster: Cluster, spec: Spec, tmp_path: Path) -> None:
    grid, diary = Grid(spec(methods=["probprompt", "nearest-mean", "lda"]), tmp_path / "ray"), Diary()
    way = RunActions(cluster.workers.start, cluster.workers.resume, "cpu")
    killed, undisturbed, unlucky = run_grid(grid, way, diary, ExecutionOptions(ray="ray", gpus_per_run=0.5))
    assert killed.run and undisturbed.run and unlucky.reason == "RuntimeError: no luck"
    assert sorted(diary.ended) == [("lda", False), ("nearest-mean", True), ("probprompt", True)]
    assert diary.notes == [
        "Ray: capacity for 2 parallel runs on 1 machine(s), 0.5 GPU and 1 CPU each.",
        f"{killed.spec.name}: its worker died (WorkerCrashedError); resuming from its last checkpoint.",
    ]
    second = [(kind, task, at) for task in (0, 1) for kind, at in [*(("epoch", n) for n in range(3)), ("task", None)]]
    assert events(killed.spec.folder) == [second[0], ("resumed", 0, 1), *second[1:]]
    taken = {path.name: json.loads(path.read_text()) for path in cluster.diary.iterdir()}
    assert len(taken) == 3 and str(os.getpid()) not in taken  # each run has its process
    assert all(shares == {"CPU": 1.0, "GPU": 0.5} for shares in taken.values())
    assert not list(grid.out.glob(".shared-*"))

    plain = Grid(spec(methods=["probprompt", "nearest-mean"]), tmp_path / "plain")
    outcomes = run_grid(plain, RunActions(api.start, api.resume, "cpu"))
    for there, here in zip((killed, undisturbed), outcomes, strict=True):
        assert learned(there.spec.folder) == learned(here.spec.folder)
    tables = [gather(one, one.outcomes()).tables()[0] for one in (Grid(plain.spec, grid.out), plain)]
    assert tables[0] == tables[1] and len(tables[0].rows) == 2


@needs_ray
def test_failure_before_a_run_starts(cluster: Cluster, spec: Spec, tmp_path: Path) -> None:
    (cell,) = Grid(spec(), tmp_path).runs
    way, gone = RunActions(api.start, api.resume, "cpu"), tmp_path / "gone"
    with pytest.raises(UserError, match=f"cannot see the folder {tmp_path}"):
        ray_executor.execute_remotely(cell, way, gone, 1)  # a machine that joins later, and does not share it
    assert not list(tmp_path.iterdir())

    def refuse() -> bool:
        raise UserError("not here")

    cells = RayExecutor(cluster.ray, way, Resources(0, 1), gone, GridCallback())
    cells._running[cluster.ray.remote(refuse).remote()] = cell
    outcome = cells.receive()
    assert outcome.spec is cell and outcome.reason == "not here" and cells.slots == 2
    assert [path.name for path in cell.folder.iterdir()] == ["failed.json"]
    cells.stop()


@needs_ray
def test_machines_need_folder_and_version(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = ray_executor._machines(cluster.ray)
    with ray_executor._folder_mark(tmp_path / "out") as mark:
        ray_executor._check_machines(cluster.ray, machines, mark)
    with pytest.raises(UserError, match=r"cannot see the folder .*out"):
        ray_executor._check_machines(cluster.ray, machines, mark)  # the mark is gone
    with ray_executor._folder_mark(tmp_path / "out") as mark:
        monkeypatch.setattr(ray_executor, "__version__", "0.0")
        with pytest.raises(UserError, match=rf"has probprompt {package.__version__}, expected 0\.0"):
            ray_executor._check_machines(cluster.ray, machines, mark)
    assert not list((tmp_path / "out").iterdir())


def processes(session: int) -> list[str]:
    """Return the names of the processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, _, own, *_ = rest.split()
            if int(own) == session and state != "Z":
                found.append(name)
    return found


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Ray's sockets must have short paths."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@needs_ray
def test_ctrl_c_stops_and_the_same_command_resumes(
    cluster: Cluster, probprompt: Callable[..., Any], pictures: Path, tmp_path: Path, short_folder: Path
) -> None:
    settings = flatten({**TINY, "training": {"epochs": 80, "batch_size": 16}})
    named = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    grid = ["--methods", "probprompt", "--benchmarks", str(pictures), "--seeds", "0", "--presets", "custom"]
    command = ["compare", *grid, *named, "--out", str(tmp_path / "out"), "--device", "cpu", "--ray", "local"]
    folder = tmp_path / "out" / "pictures" / "custom" / "probprompt" / "seed-0"
    begun = subprocess.Popen(
        [sys.executable, "-m", "probprompt", *command],
        env={**os.environ, "RAY_TMPDIR": str(short_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    checkpoint = folder / "checkpoint" / "state.safetensors"
    while not checkpoint.exists() and begun.poll() is None:
        time.sleep(0.02)
    os.killpg(begun.pid, signal.SIGINT)  # as a terminal does: to all that belong to the command
    out, err = begun.communicate(timeout=60)
    assert (begun.returncode, err) == (
        130,
        "Interrupted. 0 of 1 runs are finished. Run the same command to continue.\n",
    )
    assert out.startswith("Ray: capacity for ") and out.count("\n") == 1, "Ray itself says nothing"
    deadline = time.monotonic() + 20
    while processes(begun.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes(begun.pid) == [] and list(short_folder.iterdir()) == []
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert {"run.json", "events.jsonl", "state.safetensors", ".lock"} <= {path.name for path in left}
    assert not any(map(is_part, left)) and not Run.open(folder).finished and not list(folder.parents[3].glob(".*"))

    answer = probprompt(*command)  # this process is connected already: the cluster is used, and stays
    assert answer.code == 0 and "[1/1]" in answer.out and cluster.ray.is_initialized()
    happened = events(folder)
    (resumed,) = (event for event in happened if event[0] == "resumed")
    assert resumed[1:] > (0, 0) and happened.count(("epoch", 0, 0)) == 1 and happened[-1] == ("task", 1, None)


def test_missing_ray_is_named(probprompt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    grid = ("--methods", "lda", "--benchmarks", "emoji-r", "--presets", "custom", "--out", tmp_path / "out")
    answer = probprompt("compare", *grid, "--ray", "local")
    assert answer.code == 2 and not (tmp_path / "out").exists() and "pip install 'probprompt[ray]'" in answer.err


def test_ray_is_imported_only_where_it_is_used() -> None:
    for path in Path(package.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "ray" for name in (*named, *module)), path


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for on in ("slurm", "ray:", "ray://", "Ray", "rays:auto"):
        with pytest.raises(UserError, match=f"'{on}'"):
            parse_address(on)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert parse_address("ray") == "local"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert parse_address("ray") == "10.0.0.1:6379" and parse_address("ray:local") == "local"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "ray://[::1]:1"])
def test_silent_address_is_rejected(address: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match=r"No Ray cluster at .*:1"):
        ray_executor._check_reachable(address)
    assert time.monotonic() - start < 10


PLAIN: Machine = {"Resources": {"CPU": 4.0}}
STRONG: Machine = {"Resources": {"CPU": 8.0, "GPU": 2.0}}


@pytest.mark.parametrize(
    ("asked", "device", "machines", "share", "room"),
    [
        ({}, None, [PLAIN], (0, 1), [4]),
        ({}, None, [PLAIN, STRONG], (1, 1), [0, 2]),
        ({}, "cpu", [PLAIN, STRONG], (0, 1), [4, 8]),
        ({"gpus_per_run": 0.25}, None, [STRONG], (0.25, 1), [8]),
        ({"gpus_per_run": 0.1, "cpus_per_run": 0.1}, "cuda", [STRONG], (0.1, 0.1), [20]),
        ({"gpus_per_run": 0.0, "cpus_per_run": 3}, None, [STRONG, PLAIN], (0, 3), [2, 1]),
        ({"gpus_per_run": 2}, None, [STRONG], (2, 1), [1]),
    ],
)
def test_share_of_a_machine(
    asked: dict[str, Any], device: str | None, machines: list[Any], share: tuple[float, float], room: list[int]
) -> None:
    found = find_resources(ExecutionOptions(ray="ray", **asked), device, machines)
    assert found == Resources(*share) and [found.fits(machine) for machine in machines] == room
    assert found.device(device) == (device if share[0] else "cpu")


@pytest.mark.parametrize(
    ("asked", "device", "message"),
    [
        ({"gpus_per_run": 1.5}, None, "GPUs per run: 1.5"),
        ({"gpus_per_run": -1}, None, "GPUs per run: -1"),
        ({"cpus_per_run": 0}, None, "CPUs per run: 0"),
        ({}, "cuda", "the cluster has none"),
        ({"gpus_per_run": 1}, "cuda:1", "got 'cuda:1'"),
        ({}, "gpu", "got 'gpu'"),
    ],
)
def test_impossible_shares_are_rejected(asked: dict[str, Any], device: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_resources(ExecutionOptions(ray="ray", **asked), device, [PLAIN])


@needs_ray
def test_shares_larger_than_this_machine(cluster: Cluster, tmp_path: Path) -> None:
    way, diary = RunActions(api.start, api.resume, "cpu"), Diary()
    with (
        pytest.raises(UserError, match="A run needs 64 CPU, this machine has 1 GPU and 2 CPU"),
        on_ray(tmp_path, way, ExecutionOptions(ray="ray", cpus_per_run=64), diary),
    ):
        pass
    with on_ray(tmp_path, way, ExecutionOptions(ray="ray:auto", cpus_per_run=64), diary):
        assert diary.notes == ["Ray: no machine of the cluster has 64 CPU. Waiting for one to join."]


def test_run_without_progress_is_given_up(spec: Spec, tmp_path: Path) -> None:
    first, second = Grid(spec(seeds=[0, 1]), tmp_path).runs
    losses = LostWorkers()
    assert [losses.can_retry(first) for _ in range(3)] == [True, True, False]
    checkpoint = second.folder / "checkpoint" / "state.safetensors"
    checkpoint.parent.mkdir(parents=True)
    for moment in (0, 0, 1, 2, 3, 4, 5):
        if moment:
            checkpoint.write_bytes(b"")
            os.utime(checkpoint, ns=(moment, moment))
        assert losses.can_retry(second)
    assert [losses.can_retry(second) for _ in range(2)] == [True, False]
