"""Several processes train as one does: equal gradients and results, one writer, and a resume when one dies.

torchrun executes this file: see :func:`work`.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from probprompt import methods
from probprompt.config import parse_config
from probprompt.distributed import ALONE, World, from_environment, join
from probprompt.engine.learner import Learner
from probprompt.engine.loader import TaskImages
from probprompt.engine.saved_model import learner_tensors
from probprompt.errors import UserError
from probprompt.progress import SILENT
from probprompt.runs import train
from probprompt.runs.run import Run
from probprompt.storage import read_tensors
from run_cases import BACKBONE, CPU, PROBPROMPT, as_options, events, outcome, overlay

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
REGULAR = {**PROBPROMPT, "regularization": 0.1}
SMALL: dict[str, dict[str, Any]] = {
    "probprompt": REGULAR,
    "vq-prompt": {"tokens": 4, "blocks": [0, 2]},
    "coda-prompt": {"tokens": 4, "components_per_task": 3, "blocks": [0, 2], "orthogonality_weight": 0.1},
    "dual-prompt": {"expert_blocks": [2], "expert_tokens": 4, "general_tokens": 4},
    "l2p++": {"components": 5, "tokens": 4, "top_k": 2},
    "deep-l2p++": {"components": 5, "tokens": 4, "top_k": 2, "blocks": [0, 2]},
    "hide-prompt": {"tokens": 4, "blocks": [0, 2], "identity_alignment": {"epochs": 2, "centroids": 2}},
    "evo-prompt": {"tokens": 2, "hidden": 4, "blocks": [0, 2]},
}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    **{name: {"method": {"name": name, **SMALL.get(name, {})}} for name in methods.registered()},
    **{name: {"method": {"name": name}, "training": {"head_lr": 0.0002}} for name in ("ft", "ft++", "joint")},
    "clipped": {"method": REGULAR, "training": {"clip": 0.01}},
    "equal parts": {"method": REGULAR, "training": {"batch_size": 8, "epochs": 2, "weight_decay": 0.01}},
    "ridge and query": {
        "method": REGULAR,
        "head": {"kind": "ridge", "projections": 20, "with_query": True, "layers": 1, "flip_average": True},
    },
    "mirror images": {"method": {"name": "ranpac"}, "head": {"kind": "ridge", "projections": 20, "flip_augment": True}},
}
"""What learns with one and with two processes. A task has 21 images, so that most have parts of 10 and 11."""


def configure(pictures: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a run of less than a second; groups given by name go over them."""
    base: dict[str, dict[str, Any]] = {
        "data": {"benchmark": str(pictures), "tasks": 2, "test_fraction": 0.3},
        "backbone": {**BACKBONE, "precision": "fp32"},
        "training": {"epochs": 1, "batch_size": 32, "head_lr": 0.01},
        "alignment": {"epochs": 2, "lr": 0.01},
    }
    return overlay(base, groups)


RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "linear": {"method": REGULAR, "training": {"epochs": 3, "batch_size": 8}},
    "ridge": {**CASES["ridge and query"], "training": {"epochs": 2, "batch_size": 8}},
}


def learn(given: dict[str, Any], world: World) -> dict[str, Tensor]:
    """Return all that two tasks leave behind, and the gradients of the first epoch."""
    workshop = train.prepare(parse_config(given), CPU, SILENT, world=world)
    learner, found = workshop.learner, dict[str, Tensor]()
    for task in workshop.tasks:
        if task.index and not world.writes:  # a process that went astray is put right when a task begins
            for value in learner_tensors(learner).values():
                value.fill_(1)
        learner.begin(task)
        optimiser = learner.optimizer(task)
        for epoch in range(learner.epochs(task)):
            result = learner.train_epoch(task, epoch, optimiser, lambda _: None)
            found[f"result.{task.index}.{epoch}"] = torch.tensor([result.loss, result.accuracy])
            if task.index == 0 and epoch == 0:
                learning = [part for group in optimiser.param_groups for part in group["params"]]
                gradients = {f"gradient.{i}": part.grad for i, part in enumerate(learning)}
                found |= {name: value.clone() for name, value in gradients.items() if value is not None}
        learner.finish(task, lambda _: None)
    scores = [workshop.scorer.accuracy(task.rows, task.labels) for task in workshop.test_tasks]
    queries = [workshop.scorer.task_queries(task.rows) for task in workshop.test_tasks]
    found |= {"scores": torch.tensor(scores), "queries": torch.cat(queries)}
    return {name: value.contiguous() for name, value in {**found, **learner_tensors(learner)}.items()}


def work(folder: Path) -> None:
    """Exchange tensors, learn all cases, execute runs, then start one more and die."""
    asked = json.loads((folder / "asked.json").read_text())
    world, _ = join(CPU)
    save_file(exchange(world), folder / f"exchange-{world.rank}.safetensors")
    for name, given in asked["cases"].items():
        save_file(learn(given, world), folder / f"{name}-{world.rank}.safetensors")
    opened = written_below(folder / "runs")
    for name, given in asked["runs"].items():
        run = train.train(parse_config(given), folder / "runs" / (name if world.writes else "elsewhere"))
        assert run.finished and run.folder.name == name
    (folder / f"opened-{world.rank}.json").write_text(json.dumps(opened))
    if world.rank == 1:
        die_in(task=1, epoch=1)
    from probprompt.cli import main

    sys.argv = ["probprompt", *asked["command"]]
    main()


def exchange(world: World) -> dict[str, Tensor]:
    """Exchange tensors that differ between processes."""
    found = {}
    for count in (1, 2, 7):
        rows = torch.arange(3 * count).view(count, 3)  # (n, 3)
        found[f"gathered {count}"] = world.gather(world.share(rows), count)
    mean = [torch.full((2, 2), float(world.rank)), torch.tensor(10.0 * world.rank)]
    world.average(mean)
    same = [torch.tensor(world.rank > 0), torch.full((3,), world.rank), torch.tensor([[0.1 + world.rank]]).double()]
    world.broadcast([*same, torch.empty(0, 4)])
    found |= {f"mean {i}": value for i, value in enumerate(mean)} | {f"same {i}": value for i, value in enumerate(same)}
    return {**found, "total": torch.tensor(world.total(5 + world.rank)), "said": torch.tensor(world.agree(world.rank))}


def written_below(folder: Path) -> list[str]:
    """Record the names of files of a folder that this process opens for writing."""
    opened: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(folder)):
            mode, flags = arguments[1] or "", arguments[2] or 0
            if set(mode) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                opened.append(Path(str(arguments[0])).name)

    sys.addaudithook(note)
    return opened


def die_in(task: int, epoch: int) -> None:
    """Let this process be killed when it reaches an epoch."""
    original = Learner.train_epoch

    def train_epoch(learner: Learner, images: TaskImages, number: int, *rest: Any) -> Any:
        if (images.index, number) == (task, epoch):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(learner, images, number, *rest)

    Learner.train_epoch = train_epoch  # type: ignore[method-assign, assignment]


def run(*command: object) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, env=environment)
    return done.returncode, done.stdout, done.stderr


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


class Worked:
    """Results of two processes."""

    def __init__(self, folder: Path, pictures: Path) -> None:
        self.folder = folder
        self.settings = {name: configure(pictures, **groups) for name, groups in {**CASES, **RUNS}.items()}
        command = ["train", "--device", "cpu", *as_options(self.settings["linear"]), "--out", str(folder / "killed")]
        asked: dict[str, Any] = {"cases": {name: self.settings[name] for name in CASES}}
        asked["runs"] = {name: self.settings[name] for name in RUNS}
        (folder / "asked.json").write_text(json.dumps({**asked, "command": command}))
        self.code, self.out, self.err = run(*TORCHRUN, __file__, folder)

    def of(self, name: str, rank: int) -> dict[str, Tensor]:
        path = self.folder / f"{name}-{rank}.safetensors"
        assert path.exists(), self.err
        return load_file(path)


@pytest.fixture(scope="module")
def worked(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Worked:
    return Worked(tmp_path_factory.mktemp("distributed"), pictures)


@pytest.mark.parametrize("rank", [0, 1])
def test_tensors_are_exchanged(worked: Worked, rank: int) -> None:
    found = worked.of("exchange", rank)
    for count in (1, 2, 7):
        assert found[f"gathered {count}"].tolist() == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(count)]
    assert found["mean 0"].tolist() == [[0.5, 0.5], [0.5, 0.5]] and found["mean 1"].item() == 5
    assert found["same 0"].item() is False and found["same 1"].tolist() == [0, 0, 0]
    assert found["same 2"].dtype == torch.float64 and found["same 2"].item() == torch.tensor(0.1).double().item()
    assert found["total"].item() == 11 and found["said"].item() == 0


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_cover_every_row_once_and_are_nearly_equal(size: int) -> None:
    for count in range(20):
        parts = [list(range(count)[World(rank, size).part(count)]) for rank in range(size)]
        assert [row for part in parts for row in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_as_one(worked: Worked, case: str) -> None:
    alone = learn(worked.settings[case], ALONE)
    first, second = worked.of(case, 0), worked.of(case, 1)
    assert alone.keys() == first.keys() == second.keys()
    assert torch.equal(alone["scores"], first["scores"])
    for name, value in alone.items():
        assert torch.equal(first[name], second[name]), f"{name} differs between processes"
        ours, expected = first[name].double(), value.double()
        largest = max(expected.abs().max().item(), 1e-6) if expected.numel() else 1.0
        # Adam makes full steps of gradients near zero, so that parameters may differ by more than their gradients.
        tolerance = 1e-5 * largest if name.startswith("gradient") else 2e-3
        assert torch.allclose(ours, expected, rtol=1e-4, atol=tolerance), name


def test_cases_have_gradients_to_compare(worked: Worked) -> None:
    compared = {case for case in CASES if any(name.startswith("gradient") for name in worked.of(case, 0))}
    assert set(CASES) - compared == {"nearest-mean", "lda", "ranpac", "mirror images"}
    assert min(worked.of("clipped", 0)["result.0.0"].shape) == 2
    norm = sum(value.square().sum() for name, value in worked.of("clipped", 0).items() if name.startswith("gradient"))
    assert float(norm) ** 0.5 == pytest.approx(0.01, rel=1e-3)  # clipped for all processes together


@pytest.mark.parametrize("name", RUNS)
def test_run_of_two_processes_equals_that_of_one(worked: Worked, tmp_path: Path, name: str) -> None:
    both, alone = Run.open(worked.folder / "runs" / name), train.train(parse_config(worked.settings[name]), tmp_path)
    assert np.array_equal(both.matrix, alone.matrix, equal_nan=True)
    assert (both.record.world_size, alone.record.world_size) == (2, 1)
    left, right = (read_tensors(run.checkpoint, CPU)[0] for run in (both, alone))
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.allclose(value, right[key], rtol=1e-3, atol=2e-3), key
    ours, theirs = (json.loads((run.folder / "diagnostics.json").read_text()) for run in (both, alone))
    assert ours.keys() == theirs.keys()


def test_one_process_writes(worked: Worked) -> None:
    writer, other = (json.loads((worked.folder / f"opened-{rank}.json").read_text()) for rank in (0, 1))
    assert "events.jsonl" in writer and other == []
    assert sorted(path.name for path in (worked.folder / "runs").iterdir()) == sorted(RUNS)
    for name in RUNS:
        lines = (worked.folder / "runs" / name / "events.jsonl").read_text().splitlines()
        assert len(lines) == len(set(lines)) > 3
        assert not list((worked.folder / "runs" / name).rglob("*.part"))


def test_killed_process_ends_the_run_which_is_resumed(worked: Worked) -> None:
    folder = worked.folder / "killed"
    assert worked.code != 0 and "Signal 9 (SIGKILL)" in worked.err
    assert "Another process of this run has ended" in worked.err and f"--resume {folder}" in worked.err
    left = read_tensors(Run(folder).checkpoint, CPU)[1]["position"]
    assert (left["task"], left["epoch"]) == (1, 1) and not Run(folder).finished
    command = (sys.executable, "-m", "probprompt", "train", "--resume", folder, "--gpus", 2, "--device", "cpu")
    code, out, err = run(*command)
    assert code == 0, err
    assert out.count("FAA: ") == out.count("task 2 of 2: done") == 1 and "task 1 of 2" not in out
    assert outcome(Run.open(folder)) == outcome(Run.open(worked.folder / "runs" / "linear"))
    assert [event["world_size"] for event in events(Run(folder), "resumed")] == [2]
    assert (folder / "report.html").exists()


def test_error_is_printed_once_and_ends_all_processes(worked: Worked, tmp_path: Path) -> None:
    given = worked.settings["linear"]
    odd = as_options({**given, "training": {**given["training"], "batch_size": 9}})
    code, out, err = run(*TORCHRUN, "-m", "probprompt", "train", *odd, "--device", "cpu", "--out", tmp_path / "r")
    assert code != 0 and err.count("error: ") == 1
    assert "a batch of 9 equally. Set training.batch_size to 8 or 10, or start 1 or 3 or 9" in err
    assert not (tmp_path / "r").exists() and out.count("reading images") == 1


def prepared(given: dict[str, Any], size: int) -> None:
    train.prepare(parse_config(given), CPU, SILENT, world=World(0, size))


def test_batches_that_cannot_be_shared_are_rejected(pictures: Path) -> None:
    with pytest.raises(UserError, match=r"Set training.batch_size to 20, or start 1 or 2 or 4 or 8 process"):
        prepared(configure(pictures, training={"batch_size": 8}), 20)
    with pytest.raises(UserError, match=r"Task 1 has only 21 training image.* at most 21"):
        prepared(configure(pictures, training={"batch_size": 44}), 22)
    prepared(configure(pictures, method={"name": "lda"}, training={"batch_size": 7}), 3)  # learns from no batches


MIX = "l2p:batchwise l2p++:legacy_key_loss dual-prompt:batchwise dual-prompt:legacy_reshape hide-prompt:legacy_reshape"


@pytest.mark.parametrize("method", MIX.split())
def test_methods_that_mix_the_images_of_a_batch_are_rejected(pictures: Path, method: str) -> None:
    name, _, setting = method.partition(":")
    given = configure(pictures, method={"name": name, setting: True})
    prepared(given, 1)
    with pytest.raises(UserError, match=rf"{re.escape(name)} can be trained only by one process, not by 2"):
        prepared(given, 2)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (("2", "2", "0", "2"), "RANK=2, WORLD_SIZE=2.* inconsistent"),
        (("0", "0", "0", "1"), "inconsistent"),
        (("1", "4", "3", "2"), "inconsistent"),
        (("one", "2", "0", "2"), "RANK=one.* must be numbers"),
    ],
)
def test_impossible_worlds_are_rejected(variables: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_environment(dict(zip(NAMES, variables, strict=True)))


def test_world_of_the_environment() -> None:
    assert from_environment({}) == from_environment({"WORLD_SIZE": "8"}) == ALONE
    assert from_environment(dict(zip(NAMES, "3412", strict=True))) == World(3, 4, 1, 2)
    assert [World(rank, 2).writes for rank in range(2)] == [True, False]
    rows = torch.ones(3, 2)
    assert ALONE.gather(rows, 3) is rows and ALONE.total(4) == 4 and ALONE.agree("here") == "here"
    ALONE.average([rows])
    ALONE.broadcast([rows])
    assert torch.equal(rows, torch.ones(3, 2))


def test_more_gpus_than_exist(probprompt: Callable[..., Any], pictures: Path, tmp_path: Path) -> None:
    there = torch.cuda.device_count()
    for options, message in (
        (("--gpus", there + 2), f"--gpus is {there + 2}, but this machine has {there} GPU(s)"),
        (("--gpus", 2, "--device", "cuda:0"), "--device cuda:0"),
    ):
        answer = probprompt("train", pictures, *options, "--out", tmp_path / "run")
        assert answer.code == 2 and not (tmp_path / "run").exists() and message in answer.err
    with pytest.raises(UserError, match=f"{there + 2} processes were started, but this machine has {there} GPU"):
        World(0, there + 2, 0, there + 2).place(torch.device("cuda"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("train", "--gpus", "4", "--device", "cpu"), "--gpus is 4, but torchrun started 2 process(es)"),
        (("demo",), "in 2 processes"),
        (("compare", "--methods", "lda"), "in 2 processes"),
    ],
)
def test_commands_under_torchrun(
    probprompt: Callable[..., Any], command: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip((*NAMES, "MASTER_ADDR", "MASTER_PORT"), ("0", "2", "0", "2", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    answer = probprompt(*command)
    assert answer.code == 2 and message in " ".join(answer.err.split())


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]))
