"""A run that was stopped anywhere ends, once resumed, as if it had never stopped."""

import copy
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from probprompt import api, storage
from probprompt.backbones.pretrained import load_backbone
from probprompt.config import parse_config
from probprompt.data.cache import ImageCache
from probprompt.engine import build
from probprompt.errors import UserError
from probprompt.progress import ProgressCallback
from probprompt.runs import train
from probprompt.runs.checkpoint import load_checkpoint
from probprompt.runs.run import Run, config_hash
from probprompt.storage import read_tensors, write_tensors
from run_cases import BACKBONE, CPU, PROBPROMPT, StopHereError, Stopper, as_options, events, outcome, overlay

REGULAR = {**PROBPROMPT, "regularization": 0.1}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "compared with the last step": {"method": {**REGULAR, "reference": "step"}},
    "compared with the last epoch": {"method": {**REGULAR, "reference": "epoch"}},
    "compared with the last task": {"method": {**REGULAR, "reference": "task"}},
    "prompts fixed after a task": {"method": REGULAR, "training": {"adapt_tasks": 1}},
    "a task of a single class": {"method": REGULAR, "data": {"tasks": [3, 1, 2]}},
    "no prompts at all": {"method": {"name": "linear-probe"}},
    "a head in closed form": {"method": REGULAR, "head": {"kind": "ridge", "projections": 20}, "data": {"tasks": 3}},
    "sums that follow the prompts": {
        "method": REGULAR,
        "head": {"kind": "ridge", "projections": 20, "compensate_drift": True},
        "training": {"adapt_tasks": 2, "later_lr_scale": 0.5},
        "data": {"tasks": 3},
    },
    "a pool that grows, clipped and augmented": {
        "method": {"name": "hide-prompt", "tokens": 4, "blocks": [0, 2]},
        "training": {"clip": 0.1, "augmentation": "crop+color"},
        "alignment": {"centroids": 2},
    },
    "rows placed by prototypes": {"method": {"name": "evo-prompt", "tokens": 2, "hidden": 4, "blocks": [0, 2]}},
    "a backbone that learns": {"method": {"name": "ft"}, "training": {"head_lr": 0.001}},
}


def configure(pictures: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a run of less than a second; groups given by name go over them."""
    base: dict[str, dict[str, Any]] = {
        "data": {"benchmark": str(pictures), "tasks": 2},
        "backbone": {**BACKBONE, "precision": "fp32"},
        "training": {"epochs": 2, "batch_size": 12, "head_lr": 0.01},
        "alignment": {"epochs": 2, "lr": 0.01},
    }
    return overlay(base, groups)


class CrashError(BaseException):
    """The process dies here."""


@dataclass
class Minefield(ProgressCallback):
    """Lets a run die at every place it reaches for the first time, or at a share of them."""

    share: float = 1.0
    dice: random.Random = field(default_factory=lambda: random.Random(3))
    seen: set[tuple[object, ...]] = field(default_factory=set)
    crashes: int = 0
    where: str = ""
    steps: int = 0

    def tread(self, *place: object) -> None:
        key = (self.where, self.steps, *place)
        if key in self.seen:
            return
        self.seen.add(key)
        if self.dice.random() < self.share:
            self.crashes += 1
            raise CrashError(key)

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        self.where, self.steps = description, 0
        self.tread("begin")
        yield
        self.tread("end")

    def advance(self, steps: int) -> None:
        if self.where.startswith("task"):  # images are read by threads
            self.steps += steps
            self.tread("advance")

    def describe(self, text: str) -> None:
        self.tread(text)

    def around(self, name: str, act: Callable[[], None]) -> None:
        self.tread("before", name)
        act()
        self.tread("after", name)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the backbone once; a run gets a copy, which it may train."""
    loaded = load_backbone("test_vit", "random", 32)
    monkeypatch.setattr(build, "load_backbone", lambda *_: copy.deepcopy(loaded))


def carry_through(settings: dict[str, Any], out: Path, mines: Minefield, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Restart the run until it ends; it may also die where it writes a file or an event."""
    write, log = storage.write_with, Run.log
    monkeypatch.setattr(storage, "write_with", lambda path, fill: mines.around(path.name, lambda: write(path, fill)))
    monkeypatch.setattr(Run, "log", lambda run, event, **values: mines.around(event, lambda: log(run, event, **values)))
    for _ in range(500):
        mines.where = "beginning"
        try:
            if (out / "run.json").exists():
                return train.resume(out, progress=mines)
            return train.train(parse_config(settings), out, progress=mines)
        except CrashError:
            continue
    raise AssertionError("the run never ends")


@pytest.mark.parametrize("case", CASES)
def test_crashes(pictures: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """At every place that the first case reaches, and at many places of the others."""
    settings, every = configure(pictures, **CASES[case]), case == next(iter(CASES))
    expected = outcome(train.train(parse_config(settings), tmp_path / "whole"))
    mines = Minefield(share=1.0 if every else 0.2)
    run = carry_through(settings, tmp_path / "stopped", mines, monkeypatch)
    assert outcome(run) == expected and not list(run.folder.rglob("*.part"))
    assert (mines.crashes == len(mines.seen) > 60) if every else mines.crashes > 8


SERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    """Let new processes start from one that has imported everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        SERVER.set_forkserver_preload(["probprompt.runs.train", "timm"])
        yield


def await_change(path: Path, before: int, alive: Callable[[], bool]) -> bool:
    """Wait until the file is another one; False if the process ends before."""
    deadline = time.monotonic() + 60
    while modified(path) == before:
        if not alive():
            return modified(path) != before
        assert time.monotonic() < deadline, f"{path} does not change"
        time.sleep(0.002)
    return True


def modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_runs_end_as_one_that_was_not(pictures: Path, tmp_path: Path, processes: None, seed: int) -> None:
    case = list(CASES)[seed - 1]
    settings = configure(pictures, **CASES[case], training={"epochs": 5, "batch_size": 8, "head_lr": 0.01})
    config, out, dice = parse_config(settings), tmp_path / "killed", random.Random(seed)
    expected = outcome(train.train(config, tmp_path / "whole"))
    kills, saved = 0, Run(out).checkpoint
    while True:
        before = modified(saved)
        act, arguments = (train.resume, (out,)) if kills else (train.train, (config, out))
        process = SERVER.Process(target=act, args=arguments)
        process.start()
        if kills == 4 or not await_change(saved, before, process.is_alive):
            break
        time.sleep(dice.choice([0.0, dice.uniform(0, 0.05), dice.uniform(0, 0.3)]))
        process.kill()
        process.join()
        if process.exitcode == 0:  # it was faster
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    process.join()
    assert process.exitcode == 0 and kills >= 2
    assert outcome(Run.open(out)) == expected


Command = Callable[..., Any]


def test_command_survives_a_kill_and_an_interrupt(pictures: Path, tmp_path: Path, probprompt: Command) -> None:
    settings = configure(pictures, method=REGULAR, training={"epochs": 6})
    out = tmp_path / "a run"
    saved = Run(out).checkpoint
    command = [sys.executable, "-m", "probprompt", "train"]
    for arguments, stop in (
        ([*as_options(settings), "--out", str(out)], signal.SIGKILL),
        (["--resume", str(out)], signal.SIGINT),
    ):
        before = modified(saved)
        with subprocess.Popen(
            [*command, *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process:
            assert await_change(saved, before, lambda process=process: process.poll() is None)  # type: ignore[misc]
            process.send_signal(stop)
            _, message = process.communicate()
        assert process.returncode == (-signal.SIGKILL if stop == signal.SIGKILL else 130)
    assert message == f"Interrupted. Continue with: probprompt train --resume {shlex.quote(str(out))}\n"
    position = load_checkpoint(saved, config_hash(parse_config(settings)), CPU).position
    assert 0 < 6 * position.task + position.epoch < 12  # it was stopped on its way
    answer = probprompt(*shlex.split(message.partition("probprompt")[2]))
    assert answer.code == 0 and "average accuracy" in answer.out
    assert outcome(Run.open(out)) == outcome(train.train(parse_config(settings), tmp_path / "whole"))


@dataclass(frozen=True)
class Stopped:
    """A run that was stopped, its images and weights, and its results without the stop."""

    run: Run
    images: Path
    weights: Path
    expected: dict[str, bytes]

    def copy(self, folder: Path) -> Run:
        return Run(Path(shutil.copytree(self.run.folder, folder)))


@pytest.fixture(scope="module")
def stopped(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    home = tmp_path_factory.mktemp("stopped")
    images, weights = Path(shutil.copytree(pictures, home / "images")), home / "tiny.safetensors"
    save_weights(weights, seed=1)
    settings = configure(images, method=REGULAR, backbone={"weights": str(weights)})
    expected = outcome(train.train(parse_config(settings), home / "whole"))
    with pytest.raises(StopHereError):
        train.train(parse_config(settings), home / "run", progress=Stopper())
    return Stopped(Run(home / "run"), images, weights, expected)


@pytest.fixture
def changed(stopped: Stopped, pictures: Path) -> Iterator[Stopped]:
    """The stopped run, whose images and weights are restored after the test."""
    weights = stopped.weights.read_bytes()
    yield stopped
    shutil.rmtree(stopped.images)
    shutil.copytree(pictures, stopped.images)
    stopped.weights.write_bytes(weights)
    stopped.weights.with_suffix(".json").unlink(missing_ok=True)


def save_weights(path: Path, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        save_file(timm.create_model("test_vit", num_classes=0).state_dict(), path)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def refused(probprompt: Command, run: Run, *more: object) -> str:
    """Return the message of a rejected run, of which nothing may change."""
    before = contents(run.folder)
    answer = probprompt("train", "--resume", run.folder, *more)
    assert answer.code == 2 and answer.err.startswith("error: ") and "Traceback" not in answer.err + answer.out
    assert contents(run.folder) == before
    return str(answer.err)


def test_stopped_run_continues_in_the_middle_of_its_task(
    stopped: Stopped, tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pick = Mock(side_effect=build.pick_device)
    monkeypatch.setattr(train, "pick_device", pick)
    run = stopped.copy(tmp_path / "run")
    answer = probprompt("train", stopped.images, "--resume", run.folder, "--epochs", 2, "--tasks", 2, "--seed", 0)
    assert answer.code == 0 and "task 1 of 2" not in answer.out and "task 2 of 2: done" in answer.out
    assert events(run, "resumed") == [{"event": "resumed", "task": 1, "epoch": 1, "device": "cpu"}]
    assert outcome(run) == stopped.expected and run.report.exists()
    pick.assert_called_once_with("cpu")  # the device it started on
    answer = probprompt("train", "--resume", run.folder)
    assert answer.code == 0 and f"{run.folder} is already finished" in answer.out and answer.err == ""
    assert outcome(run) == stopped.expected


def test_resume_from_another_folder(stopped: Stopped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stopped.images.parent)
    settings = configure(Path("images"), method=REGULAR, backbone={"weights": "tiny.safetensors"})
    with pytest.raises(StopHereError):
        api.start(parse_config(settings), tmp_path / "run", progress=Stopper())
    monkeypatch.chdir(tmp_path)
    assert api.resume("run").metrics == Run(stopped.run.folder.parent / "whole").metrics


def test_corrupted_and_foreign_checkpoints_are_rejected(stopped: Stopped, tmp_path: Path, probprompt: Command) -> None:
    run = stopped.copy(tmp_path / "run")
    whole = run.checkpoint.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:-100], whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :], b""):
        run.checkpoint.write_bytes(damaged)
        message = refused(probprompt, run)
        assert f"{run.checkpoint} is corrupted and was not loaded" in message and "remove it" in message
    save_file({"a": torch.ones(2)}, run.checkpoint)
    assert "state.safetensors was not written by probprompt" in refused(probprompt, run)
    tensors, note = read_tensors(stopped.run.checkpoint, CPU)
    for other in ({"config": "0" * 64}, {}):
        write_tensors(run.checkpoint, tensors, {**note, **other} if other else {})
        assert "state.safetensors belongs to a run with other settings" in refused(probprompt, run)
    run.checkpoint.unlink()
    assert outcome(train.resume(run.folder)) == stopped.expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--out", "elsewhere"), "remove --out"),
        (("--epochs", 9), "training.epochs: 2 became 9"),
        (("--set", "method.samples=5"), "method.samples: 3 became 5"),
        (("--set", "evaluation_batch_size=7"), "evaluation_batch_size: None became 7"),
        (("--method", "linear-probe"), "method.name: 'probprompt' became 'linear-probe'"),
        (("--seed", 4), "seeds.data: 0 became 4; seeds.init: 0 became 4; seeds.order: 0 became 4"),
        (("--validate",), "data.validation: 0.0 became 0.2"),
        (("--tasks", "4,2"), "data.tasks: 2 became [4, 2]"),
    ],
)
def test_changed_settings(stopped: Stopped, probprompt: Command, arguments: tuple[object, ...], named: str) -> None:
    assert named in refused(probprompt, stopped.run, *arguments)


def test_other_folders_are_rejected(tmp_path: Path, probprompt: Command) -> None:
    (tmp_path / "photo.txt").write_text("mine")
    assert f"{tmp_path} is not a run: it has no run.json" in refused(probprompt, Run(tmp_path))
    assert "nowhere does not exist" in refused(probprompt, Run(tmp_path / "nowhere"))


PREPROCESSING = {"image_size": 32, "mean": [0, 0, 0], "std": [1, 1, 1]}  # next to the weights, which are the same
CHANGES: dict[str, tuple[Callable[[Stopped], object], str]] = {
    "image": (
        lambda run: Image.new("RGB", (36, 36)).save(run.images / "class3" / "new.png"),
        "have changed since the run",
    ),
    "class": (lambda run: shutil.copytree(run.images / "class3", run.images / "class9"), "The tasks of"),
    "no weights": (lambda run: run.weights.unlink(), "not found"),
    "weights": (lambda run: save_weights(run.weights, seed=2), "SHA-256 mismatch"),
    "preprocessing": (
        lambda run: run.weights.with_suffix(".json").write_text(json.dumps({"preprocessing": PREPROCESSING})),
        "(mean [0.5, 0.5, 0.5], now [0.0, 0.0, 0.0]; std",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_images_and_weights_are_rejected(changed: Stopped, probprompt: Command, change: str) -> None:
    act, named = CHANGES[change]
    act(changed)
    message = refused(probprompt, changed.run)
    assert named in message
    if change == "weights":
        hashes = {changed.run.record.backbone.sha256, load_backbone("test_vit", changed.weights).sha256}
        assert set(re.findall("[0-9a-f]{64}", message)) == hashes and len(hashes) == 2


def test_image_that_became_readable_is_rejected(pictures: Path, tmp_path: Path, probprompt: Command) -> None:
    images = Path(shutil.copytree(pictures, tmp_path / "images"))
    broken = images / "class1" / "3.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:50])
    settings = configure(images, method={"name": "linear-probe"}, data={"skip_unreadable": True})
    with pytest.raises(StopHereError):
        train.train(parse_config(settings), tmp_path / "run", progress=Stopper())
    broken.write_bytes(whole)
    assert "since the run started (class1/3.png)" in refused(probprompt, Run(tmp_path / "run"))


def test_weights_may_move_into_the_folder_of_the_run(changed: Stopped, tmp_path: Path) -> None:
    run = changed.copy(tmp_path / "run")
    away = changed.weights.rename(tmp_path / "away.safetensors")
    save_weights(run.folder / changed.weights.name, seed=2)
    with pytest.raises(UserError, match="SHA-256 mismatch"):
        train.resume(run.folder)
    shutil.copy(away, run.folder / changed.weights.name)
    assert outcome(train.resume(run.folder)) == changed.expected


def test_new_pixels(stopped: Stopped, tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped.copy(tmp_path / "run")
    data = run.record.to_json()["data"]
    data["train"]["pixels_sha256"] = "a" * 64
    run.update(data=data)
    with monkeypatch.context() as cached:
        cached.setattr(ImageCache, "default", lambda: ImageCache(tmp_path / "cache", worth=0))
        message = refused(probprompt, run)
        assert re.search(r"The pixels of the train images of .* \(hash a{12}, now [0-9a-f]{12}\)", message)
    assert outcome(train.resume(run.folder)) == stopped.expected  # without a cache, there is no hash to compare
