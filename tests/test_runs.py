"""A run is a folder with its settings and results; the same seeds give the same run."""

import gc
import json
import platform
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

import probprompt
from probprompt import api
from probprompt.config import RunConfig, parse_config, parse_stored
from probprompt.engine import build
from probprompt.engine.hardware import CHECKPOINTS, SWITCHES, hardware
from probprompt.errors import UserError
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs import checkpoint, train
from probprompt.runs.checkpoint import load_checkpoint
from probprompt.runs.run import Run, RunRecord, config_hash
from probprompt.runs.train import Tracker
from probprompt.storage import read_tensors

CPU = torch.device("cpu")


def tiny(pictures: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a run of less than a second; groups given by name go over them."""
    base: dict[str, dict[str, Any]] = {
        "data": {"benchmark": str(pictures), "tasks": 3},
        "backbone": {"name": "test_vit", "weights": "random", "image_size": 32},
        "method": {"name": "probprompt", "samples": 3, "components": 4, "tokens": 4, "blocks": [0, 2]},
        "training": {"epochs": 2, "batch_size": 8},
        "alignment": {"epochs": 2},
    }
    return {name: {**base.get(name, {}), **groups.get(name, {})} for name in {**base, **groups}}


def fast(pictures: Path, method: str = "linear-probe", **groups: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a run without prompts, which is faster still."""
    return {**tiny(pictures, **groups), "method": {"name": method}}


def describe(settings: dict[str, Any]) -> RunRecord:
    """Return the record with which a run of these settings starts."""
    return train.describe(train.prepare(parse_config(settings), CPU, ProgressCallback()), "run")


@pytest.fixture(scope="module")
def finished(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return api.train(config=tiny(pictures), out=tmp_path_factory.mktemp("runs") / "first", seed=5)


def strict(text: str) -> Any:
    """Read JSON without NaN and infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def events(run: Run) -> list[dict[str, Any]]:
    return [strict(line) for line in (run.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def everything_learned(run: Run) -> dict[str, Tensor]:
    return read_tensors(run.checkpoint, CPU)[0]


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_run_leaves_its_files_and_no_others(finished: Run) -> None:
    found = files(finished.folder)
    models = {name for name in found if name.startswith("model/") and name.endswith(".safetensors")}
    assert len(models) == 2
    others = {".lock", "run.json", "events.jsonl", "accuracy.json", "diagnostics.json", "report.html"}
    assert found - models == others | {"model/model.json", "checkpoint/state.safetensors"}
    for path in finished.folder.rglob("*.json"):
        assert isinstance(strict(path.read_text(encoding="utf-8")), dict), path
    diagnostics = strict((finished.folder / "diagnostics.json").read_text())
    assert set(diagnostics) == {"similarity", "relevance", "queries", "prompts", "swap"}
    assert diagnostics["similarity"]["labels"] == finished.record.stream.classes
    page = finished.report.read_text(encoding="utf-8")
    assert "first" in page and "</html>" in page


def test_run_json_records_what_was_used(finished: Run, pictures: Path) -> None:
    record = strict((finished.folder / "run.json").read_text())
    assert record["name"] == "first" and record["status"] == "finished" and finished.finished
    assert parse_stored(record["config"]) == finished.config
    assert record["config"]["training"]["schedule"] == "cosine"  # defaults are written out
    assert record["config"]["seeds"] == {"order": 5, "init": 5, "data": 5}
    assert record["config_hash"] == config_hash(finished.config)
    assert record["backbone"]["source"] == "random" and len(record["backbone"]["sha256"]) == 64
    assert record["backbone"]["sha256"] == probprompt.load_backbone("test_vit", "random").sha256
    assert record["preprocessing"] == {
        "image_size": 32,
        "resized": 37,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "normalisation": "backbone",
        "interpolation": "bilinear",
    }
    assert record["versions"]["probprompt"] == probprompt.__version__
    stream = record["stream"]
    assert sorted(stream["classes"]) == sorted(path.name for path in pictures.iterdir())
    assert [name for task in stream["tasks"] for name in task] == stream["classes"]
    assert len(stream["order_hash"]) == len(stream["split_hash"]) == 64
    assert stream["train_images"] == [16] * 3 and stream["test_images"] == [4] * 3
    assert stream["test_classes"] == [2] * 3
    assert (record["head"], record["joint"], record["marks"], record["config"]["preset"]) == ("linear", False, [], None)
    assert record["versions"]["torch"] == version("torch") and record["versions"]["timm"] == version("timm")
    assert record["hardware"]["device"] == "cpu" and record["hardware"]["threads"] == torch.get_num_threads()
    assert record["hardware"]["processor"]
    assert record["trainable_parameters"] == 2 * (2 * 4 * 4 * 64) + 6 * (64 + 1)
    sizes = {path.name.partition("-")[0]: path.stat().st_size / 1e6 for path in finished.model.glob("*.safetensors")}
    assert record["model_mb"] == {"use": sizes["model"], "learn": pytest.approx(sum(sizes.values()))}
    assert record["evaluated_on"] == "test" and record["skipped"] == []
    assert record["time"]["total_s"] == pytest.approx(sum(v for k, v in record["time"].items() if k != "total_s"))
    assert all(name.endswith("_s") for name in record["time"]) and record["peak_memory_mb"] > 0


@pytest.mark.parametrize(
    ("able", "expected"),
    [
        ({"amx_bf16": True, "avx512_bf16": True, "cpu_name": "Fast "}, "bf16: Fast with AMX"),
        ({"avx512_bf16": True, "cpu_name": "Other"}, "bf16: Other with AVX-512 BF16"),
        ({"amx_bf16": False}, f"fp32: {platform.machine()}"),
    ],
)
def test_processors_with_bf16_compute_in_it(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, able: dict[str, object], expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    record = describe(fast(pictures))
    assert f"{record.backbone.precision}: {record.hardware.processor}" == expected
    assert describe(fast(pictures, backbone={"precision": "fp32"})).backbone.precision == "fp32"


def test_record_names_switches_that_change_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert "switches" not in hardware(CPU)
    monkeypatch.setenv("PROBPROMPT_QUERIES", "keep")
    monkeypatch.setenv("PROBPROMPT_GRAPHS", "off")
    monkeypatch.setenv("PROBPROMPT_KERNELS", "")  # like one that is not set
    assert hardware(CPU)["switches"] == "PROBPROMPT_GRAPHS=off, PROBPROMPT_QUERIES=keep"


def test_accuracy_json_and_events(finished: Run) -> None:
    found = strict((finished.folder / "accuracy.json").read_text())
    matrix = found["matrix"]
    assert all((matrix[i][j] is None) == (j < i) for i in range(3) for j in range(3))
    columns = [[matrix[i][j] for i in range(j + 1)] for j in range(3)]
    assert found["FAA"] == pytest.approx(np.mean(columns[2]))
    assert found["CAA"] == pytest.approx(np.mean([np.mean(column) for column in columns]))
    lost = [max(matrix[0][0], matrix[0][1]) - matrix[0][2], matrix[1][1] - matrix[1][2]]
    assert found["forgetting"] == pytest.approx(np.mean(lost))
    assert finished.metrics == {name: found[name] for name in ("FAA", "CAA", "forgetting")}
    assert np.isnan(finished.matrix[1, 0]) and finished.matrix[0, 0] == matrix[0][0]
    epochs = [(event["task"], event["epoch"]) for event in events(finished) if event["event"] == "epoch"]
    assert epochs == [(task, epoch) for task in range(3) for epoch in range(2)]
    scores = [event["accuracies"] for event in events(finished) if event["event"] == "task"]
    assert scores == [column[: task + 1] for task, column in enumerate(columns)]


def test_same_seeds_give_the_same_run_bit_exact(finished: Run, pictures: Path, tmp_path: Path) -> None:
    seeds = dict.fromkeys(("order", "init", "data"), 5)
    again = train.train(parse_config(tiny(pictures, seeds=seeds)), tmp_path / "again")
    for name in ("accuracy.json", "diagnostics.json", "events.jsonl"):
        assert (again.folder / name).read_bytes() == (finished.folder / name).read_bytes(), name
    assert equal(everything_learned(again), everything_learned(finished))
    assert {path.name for path in again.model.iterdir()} == {path.name for path in finished.model.iterdir()}


@pytest.mark.parametrize("which", ["order", "init", "data"])
def test_each_seed_changes_its_part(finished: Run, pictures: Path, tmp_path: Path, which: str) -> None:
    seeds = {"order": 5, "init": 5, "data": 5, which: 6}
    other = train.train(parse_config(tiny(pictures, seeds=seeds)), tmp_path / "other")
    same_tasks = other.record.stream.tasks == finished.record.stream.tasks
    assert same_tasks == (which != "order")
    assert other.record.stream.split_hash == finished.record.stream.split_hash
    assert not equal(everything_learned(other), everything_learned(finished))


def test_closed_form_head_trains_prompts_in_the_first_task(pictures: Path, tmp_path: Path) -> None:
    config = parse_config({**tiny(pictures, head={"kind": "ridge", "projections": 20}), "preset": "mine"})
    run = train.train(config, tmp_path / "run")
    happened = [(event["event"], event["task"]) for event in events(run)]
    assert happened == [("epoch", 0), ("epoch", 0), ("task", 0), ("task", 1), ("task", 2)]
    assert run.record.head == "ridge" and run.record.config["preset"] == "mine"
    assert run.record.trainable_parameters == 2 * (2 * 4 * 4 * 64) + 6 * 20
    saved = load_checkpoint(run.checkpoint, config_hash(config), CPU)
    assert saved.tensors["head.weight"].shape == (6, 20) and saved.tensors["trained.weight"].shape == (2, 64)


def test_joint_training_is_one_step_evaluated_task_by_task(pictures: Path, tmp_path: Path) -> None:
    settings = fast(pictures, "joint", training={"epochs": 3, "head_lr": 0.001})
    run = api.start(parse_config(settings), tmp_path)  # an empty folder
    record, found = run.record, strict((run.folder / "accuracy.json").read_text())
    assert record.joint and record.status == "finished"
    stream = record.stream
    assert len(stream.tasks) == 1 and stream.tasks[0] == stream.classes and len(stream.classes) == 6
    assert (stream.train_images, stream.test_images, stream.test_classes) == ([48], [4] * 3, [2] * 3)
    (scores,) = [event["accuracies"] for event in events(run) if event["event"] == "task"]
    assert len(scores) == 3 and np.mean(scores) > 20
    assert found["matrix"] == [[pytest.approx(np.mean(scores))]]
    assert found["FAA"] == found["CAA"] == found["matrix"][0][0]
    assert record.trainable_parameters == (record.backbone.parameters or 0) + 6 * 65
    diagnosed = strict((run.folder / "diagnostics.json").read_text())
    assert set(diagnosed) == {"queries"} and len(diagnosed["queries"]["labels"]) == 4
    assert run.report.exists()
    apart = describe(fast(pictures)).stream
    for name in ("classes", "order_hash", "split_hash", "test_images", "test_classes"):
        assert getattr(stream, name) == getattr(apart, name), name


def test_record_names_the_head_and_published_mistakes(pictures: Path) -> None:
    for method, head in (("nearest-mean", "nearest-mean"), ("apt", "normalised")):
        assert describe(fast(pictures, method)).head == head
    settings = {**tiny(pictures), "method": {"name": "l2p", "batchwise": True}}
    (mark,) = describe(settings).marks
    assert mark.startswith("batchwise: ")


@pytest.mark.parametrize(
    ("normalisation", "mean", "std"),
    [
        ("backbone", [0.5] * 3, [0.5] * 3),
        ("unit", [0.0] * 3, [1.0] * 3),
        ("cifar100", [0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761]),
    ],
)
def test_input_normalization(pictures: Path, normalisation: str, mean: list[float], std: list[float]) -> None:
    settings = fast(pictures, backbone={"normalization": normalisation}, data={"interpolation": "bicubic"})
    workshop = train.prepare(parse_config(settings), CPU, SILENT)
    recorded = train.describe(workshop, "run").preprocessing
    assert recorded.normalisation == normalisation
    assert recorded.mean == pytest.approx(mean) and recorded.std == pytest.approx(std)
    assert workshop.scorer.viewer is workshop.learner.viewer and workshop.scorer.viewer.kernel == "bicubic"


@pytest.mark.parametrize(
    ("kernel", "side", "crop"),
    [("bilinear", None, None), ("bilinear", "full", False), ("bicubic", "full", True)],
)
def test_large_images_are_resized_as_by_torchvision(
    kernel: str, side: str | None, crop: bool | None, tmp_path: Path
) -> None:
    """Smaller copies are reduced bilinearly, which is why the preset published keeps images whole."""
    drawn = np.random.default_rng(0)
    for place in range(4):
        path = tmp_path / "photographs" / "ab"[place % 2] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn.integers(0, 256, (90, 120, 3), dtype=np.uint8)).save(path)
    data = {"interpolation": kernel, "stored_size": side, "tasks": 1, "test_fraction": 0.5, "center_crop": crop}
    settings = fast(tmp_path / "photographs", data=data, backbone={"normalization": "unit"})
    workshop = train.prepare(parse_config(settings), CPU, SILENT)
    images = workshop.scorer.images
    found = workshop.scorer.viewer.evaluation(images.store, torch.arange(len(images.names)))
    resize = transforms.Resize(32 if crop is False else 37, transforms.InterpolationMode(kernel))
    view = transforms.Compose([resize, transforms.CenterCrop(32), transforms.ToTensor()])
    for name, one in zip(images.names, found, strict=True):
        expected = view(Image.open(tmp_path / "photographs" / name))
        assert (one - expected).abs().max() < 2 / 255


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, Path]]:
    """Settings and folders of the runs that would start."""
    found: list[tuple[RunConfig, Path]] = []
    monkeypatch.setattr(api, "start", lambda config, out, *_: found.append((config, out)))
    return found


def test_arguments_override_the_config(
    chosen: list[tuple[RunConfig, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"method": {"name": "linear-probe"}, "data": {"benchmark": "mine"}, "seeds": {"order": 4}}
    api.train(config=config)
    api.train("theirs", "probprompt", config=config, seed=2, epochs=3, samples=7, out="here")
    api.train()
    (first, first_folder), (second, second_folder), (third, _) = chosen
    assert (first.method.name, first.data.benchmark, first.seeds.order) == ("linear-probe", "mine", 4)
    assert first_folder == Path("runs/mine-linear-probe-s4")
    assert (second.method.name, second.data.benchmark, second.seeds.order) == ("probprompt", "theirs", 2)
    assert second.training.epochs == 3 and second.method.model_dump()["samples"] == 7
    assert second_folder == Path("here")
    assert third == parse_config({})
    assert api.free_folder(tmp_path, "a") == tmp_path / "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert api.free_folder(tmp_path, "a") == tmp_path / "a-3"


@pytest.mark.parametrize("kind", ["run", "used", "file"])
def test_used_folders_are_rejected_before_any_work(
    pictures: Path, tmp_path: Path, finished: Run, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = finished.folder if kind == "run" else tmp_path / "out"
    if kind == "used":
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
    elif kind == "file":
        out.write_text("mine")
    before = files(out) if out.is_dir() else set()
    monkeypatch.setattr(train, "prepare", None)
    with pytest.raises(UserError, match="--resume" if kind == "run" else "[Cc]hoose another folder"):
        train.train(parse_config(fast(pictures)), out)
    assert before == (files(out) if out.is_dir() else set())


class StopHere(BaseException):
    """The run is stopped here."""


class Stopper(ProgressCallback):
    """Stops a run as it starts its second task."""

    def stage(self, description: str, total: int) -> Any:
        if description.startswith("task 2"):
            raise StopHere
        return super().stage(description, total)


HOLD = (
    "import fcntl, sys; h = open(sys.argv[1], 'w'); fcntl.flock(h, fcntl.LOCK_EX); "
    "print('held', flush=True); sys.stdin.read()"
)


def test_interrupted_run_is_resumed_by_one_process(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(StopHere):
        train.train(parse_config(tiny(pictures)), tmp_path / "run", progress=Stopper())
    run = Run.open(tmp_path / "run")
    found = strict((run.folder / "accuracy.json").read_text())
    assert found["finished_steps"] == 1 and found["FAA"] == found["matrix"][0][0]
    assert not run.finished and run.record.status == "running"
    assert strict((run.model / "model.json").read_text())["statistics"] is None  # predicts, but cannot learn
    assert len(probprompt.load_model(run.model).class_names) == 2

    command = [sys.executable, "-c", HOLD, str(run.folder / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        before = {name: (run.folder / name).read_bytes() for name in files(run.folder)}
        with pytest.raises(UserError, match=r"Another process is using .*run"):
            train.resume(run.folder)
        assert before == {name: (run.folder / name).read_bytes() for name in files(run.folder)}
        other.kill()

    with (run.folder / "events.jsonl").open("a") as stream:  # what a killed process leaves
        stream.write('{"event": "epoch", "ta')
    (run.checkpoint.parent / ".state.safetensors.1234abcd.part").write_bytes(b"half")
    resumed = api.resume(run.folder)
    assert resumed.finished and not list(run.folder.rglob("*.part"))
    assert [event["task"] for event in events(resumed) if event["event"] == "task"] == [0, 1, 2]
    assert strict((run.model / "model.json").read_text())["statistics"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 7}', "has format 7"),
        ("[1, 2]", "has format None"),
        ('{"format": ', r"run\.json"),
        (None, r"is not a run: it has no run\.json"),
    ],
)
def test_other_folders_are_rejected(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=message):
        Run.open(tmp_path)


def test_validation_does_not_read_test_images(pictures: Path, tmp_path: Path) -> None:
    test = tmp_path / "test"
    for path in pictures.iterdir():
        (test / path.name).mkdir(parents=True)
        (test / path.name / "broken.png").write_text("not an image")
    data = {"test": str(test)}
    with pytest.raises(UserError, match="6 unreadable"):
        train.train(parse_config(fast(pictures, data=data)), tmp_path / "tested")
    run = train.train(parse_config(fast(pictures, data={**data, "validation": 0.2})), tmp_path / "validated")
    assert run.record.evaluated_on == "validation"
    assert run.record.stream.train_images == [16] * 3 and run.record.stream.test_images == [4] * 3


def test_divergence_keeps_the_checkpoint_before_it(pictures: Path, tmp_path: Path) -> None:
    config = parse_config(fast(pictures, training={"weight_decay": 1e18}))  # a factor of -1e15 at every step
    attempts: list[Callable[[], Run]] = [
        lambda: train.train(config, tmp_path / "run"),
        lambda: train.resume(tmp_path / "run"),
    ]
    for attempt in attempts:
        with pytest.raises(UserError, match=r"diverged: .* task 1, epoch 2.*training\.head_lr \(0\.0025\)"):
            attempt()
        run = Run.open(tmp_path / "run")
        saved = load_checkpoint(run.checkpoint, config_hash(config), CPU)
        assert (saved.position.task, saved.position.epoch) == (0, 1)
        assert all(bool(tensor.isfinite().all()) for tensor in saved.tensors.values())
    assert events(Run.open(tmp_path / "run"))  # and no NaN


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system may not be mounted here")
    yield folder
    gc.collect()  # tensors that were read may still lie in a mapped file
    subprocess.run(["umount", str(folder)], check=True)


def test_run_that_filled_the_disk_is_resumed(finished: Run, pictures: Path, small_disk: Path) -> None:
    config = finished.config
    out = small_disk / "run"
    with pytest.raises(UserError, match=r"run/.*: the disk is full"):
        train.train(config, out)
    assert not list(out.rglob("*.part"))
    assert load_checkpoint(Run.open(out).checkpoint, config_hash(config), CPU).position.epoch == 1
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    run = train.resume(out)
    assert equal(everything_learned(run), everything_learned(finished))
    assert (run.folder / "accuracy.json").read_bytes() == (finished.folder / "accuracy.json").read_bytes()


def test_numbers_go_to_tensorboard(pictures: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train.train(parse_config(fast(pictures)), tmp_path / "run", track="tensorboard")
    found = accumulator.EventAccumulator(str(run.folder / "tensorboard")).Reload()
    losses = [point.value for point in found.Scalars("loss")]
    assert losses == pytest.approx([event["loss"] for event in events(run) if event["event"] == "epoch"])
    assert [point.step for point in found.Scalars("average accuracy")] == [1, 3, 5]


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_numbers_go_to_hosted_trackers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    module = types.ModuleType(name)
    for call in ("init", "log", "finish"):
        monkeypatch.setattr(module, call, lambda *a, _call=call, **k: calls.append((_call, (*a, k))), raising=False)
    monkeypatch.setitem(sys.modules, name, module)
    config = parse_config({"training": {"epochs": 1}})
    tracker = Tracker(name, tmp_path / "mine", config)
    tracker.log({"loss": 0.5}, 3)
    tracker.close()
    assert calls == [
        ("init", ({"project": "probprompt", "name": "mine", "config": config.to_stored()},)),
        ("log", ({"loss": 0.5}, {"step": 3})),
        ("finish", ({},)),
    ]


@pytest.mark.parametrize(("name", "message"), [("wandb", r"probprompt\[wandb\]"), ("wanb", "Did you mean 'wandb'")])
def test_missing_trackers_are_named_before_any_work(
    pictures: Path, tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=message):
        train.train(parse_config(fast(pictures)), tmp_path / "run", track=name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cdua", r"'cdua'\. [Dd]id you mean 'cuda'"),
        ("tpu7", r"'tpu7'\. .*: cpu, cuda"),
        ("meta", "Unsupported device 'meta'"),
        ("cuda:99", r"'cuda:99' not found\. This machine has \d+ GPU"),
    ],
)
def test_missing_devices_are_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build.pick_device(name)


def test_folders_that_cannot_be_written_are_named(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="Not a directory"):
        train.train(parse_config(fast(pictures)), tmp_path / "file" / "run")
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match="Is a directory"), Run(tmp_path).locked():
        pass


def test_checkpoints_after_epochs_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("probprompt.runs.checkpoint.time.perf_counter", lambda: now)
    monkeypatch.delenv(CHECKPOINTS)
    size = 1000
    saving = checkpoint.CheckpointTimer(lambda: size)
    assert not saving.due()
    now += 1.01
    assert saving.due()  # a small file is taken to need a hundredth of a second until one was written
    with saving.timed():
        now += 0.1
    due = []
    for _ in range(8):
        now += 2.01
        due.append(saving.due())
    assert due == [False] * 4 + [True] * 4  # a hundredth of ten seconds is what the last one took
    size = 3000
    assert not saving.due()  # it has grown since
    now += 14.01
    assert saving.due()
    monkeypatch.setenv(CHECKPOINTS, "all")
    with saving.timed():
        now += 100
    assert saving.due()


def test_run_writes_few_checkpoints_and_one_at_its_end(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []
    save = checkpoint.save_checkpoint

    def note(path: Path, config: str, position: Any, *others: Any) -> None:
        written.append((position.task, position.epoch))
        save(path, config, position, *others)

    monkeypatch.setattr(train, "save_checkpoint", note)
    monkeypatch.setattr(checkpoint, "LATENCY", 10.0)  # however long this machine takes, it is too short for another
    monkeypatch.delenv(CHECKPOINTS)
    run = train.train(parse_config(tiny(pictures)), tmp_path / "run")
    assert written == [(len(run.matrix), 0)]
    monkeypatch.setenv(CHECKPOINTS, "all")
    written.clear()
    every = train.train(run.config, tmp_path / "every")
    assert len(written) == 3 * len(run.matrix)  # two epochs and the end of each task
    assert every.metrics == run.metrics  # which do not depend on it
    assert sorted(path.name for path in every.model.iterdir()) == sorted(path.name for path in run.model.iterdir())
