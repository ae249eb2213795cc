"""A run is a folder that says what was done, with what, and what came of it; the same seeds give the same run."""

import gc
import json
import platform
import subprocess
import sys
import time
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
from probprompt.config import RunConfig, parse_config
from probprompt.errors import UserError
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs import checkpoint, execute
from probprompt.runs.checkpoint import load_checkpoint
from probprompt.runs.record import CHECKPOINTS, SWITCHES, Run, config_hash, hardware
from probprompt.runs.tracking import open_tracker
from probprompt.storage import read_tensors

CPU = torch.device("cpu")


def tiny(pictures: Path) -> dict[str, Any]:
    """A run of less than a second."""
    return {
        "data": {"benchmark": str(pictures), "tasks": 3},
        "backbone": {"name": "test_vit", "weights": "random", "image_size": 32},
        "method": {"name": "probprompt", "samples": 3, "components": 4, "tokens": 4, "blocks": [0, 2]},
        "training": {"epochs": 2, "batch": 8},
        "alignment": {"epochs": 2},
    }


def fast(pictures: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """Without prompts it is faster still; groups of settings are laid over."""
    base = {**tiny(pictures), "method": {"name": "linear-probe"}}
    return {**base, **{name: {**base[name], **group} for name, group in groups.items()}}


@pytest.fixture(scope="module")
def finished(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run as the Python interface leaves it."""
    return api.train(config=tiny(pictures), out=tmp_path_factory.mktemp("runs") / "first", seed=5)


def strict(text: str) -> Any:
    """Read JSON that holds neither NaN nor infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def everything_learned(run: Run) -> dict[str, Tensor]:
    return read_tensors(run.checkpoint, CPU)[0]


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_leaves_its_files_and_no_others(finished: Run) -> None:
    found = files(finished.folder)
    models = {name for name in found if name.startswith("model/") and name.endswith(".safetensors")}
    assert len(models) == 2
    assert found - models == {
        ".lock",
        "run.json",
        "events.jsonl",
        "accuracy.json",
        "diagnostics.json",
        "model/model.json",
        "checkpoint/state.safetensors",
        "report.html",
    }


def test_all_json_is_valid(finished: Run) -> None:
    for path in finished.folder.rglob("*.json"):
        assert isinstance(strict(path.read_text(encoding="utf-8")), dict), path
    lines = (finished.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert len([strict(line) for line in lines]) == 3 * 2 + 3


def test_run_json_says_what_was_used(finished: Run, pictures: Path) -> None:
    record = strict((finished.folder / "run.json").read_text())
    assert record["name"] == "first" and record["status"] == "finished" and finished.finished
    assert parse_config(record["config"]) == finished.config
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
def test_a_processor_that_has_bf16_computes_in_it(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, able: dict[str, object], expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    record = api.train(config=fast(pictures), out=tmp_path / "run").record
    assert f"{record['backbone']['precision']}: {record['hardware']['processor']}" == expected
    chosen = fast(pictures, backbone={"precision": "fp32"})
    assert api.train(config=chosen, out=tmp_path / "chosen").record["backbone"]["precision"] == "fp32"


def test_a_record_says_which_switches_changed_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert "switches" not in hardware(CPU)
    monkeypatch.setenv("PROBPROMPT_QUERIES", "keep")
    monkeypatch.setenv("PROBPROMPT_GRAPHS", "off")
    monkeypatch.setenv("PROBPROMPT_KERNELS", "")  # like one that is not set
    assert hardware(CPU)["switches"] == "PROBPROMPT_GRAPHS=off, PROBPROMPT_QUERIES=keep"


def test_accuracy_json_holds_the_matrix_and_what_follows_from_it(finished: Run) -> None:
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


def test_events_tell_every_epoch_and_every_task(finished: Run) -> None:
    events = [strict(line) for line in (finished.folder / "events.jsonl").read_text().splitlines()]
    epochs = [(event["task"], event["epoch"]) for event in events if event["event"] == "epoch"]
    assert epochs == [(task, epoch) for task in range(3) for epoch in range(2)]
    scores = [event["accuracies"] for event in events if event["event"] == "task"]
    matrix = finished.matrix
    assert scores == [[float(matrix[i, j]) for i in range(j + 1)] for j in range(3)]


def test_diagnostics_and_report_are_there(finished: Run) -> None:
    found = strict((finished.folder / "diagnostics.json").read_text())
    assert set(found) == {"similarity", "relevance", "queries"}
    assert found["similarity"]["labels"] == finished.record["stream"]["classes"]
    page = finished.report.read_text(encoding="utf-8")
    assert "first" in page and "</html>" in page


def test_the_same_seeds_give_the_same_run_bit_by_bit(finished: Run, pictures: Path, tmp_path: Path) -> None:
    again = execute.train(
        parse_config({**tiny(pictures), "seeds": dict.fromkeys(("order", "init", "data"), 5)}), tmp_path / "again"
    )
    for name in ("accuracy.json", "diagnostics.json", "events.jsonl"):
        assert (again.folder / name).read_bytes() == (finished.folder / name).read_bytes(), name
    assert equal(everything_learned(again), everything_learned(finished))
    assert {path.name for path in again.model.iterdir()} == {path.name for path in finished.model.iterdir()}


@pytest.mark.parametrize("which", ["order", "init", "data"])
def test_each_seed_changes_its_own_part(finished: Run, pictures: Path, tmp_path: Path, which: str) -> None:
    seeds = {"order": 5, "init": 5, "data": 5, which: 6}
    other = execute.train(parse_config({**tiny(pictures), "seeds": seeds}), tmp_path / "other")
    same_tasks = other.record["stream"]["tasks"] == finished.record["stream"]["tasks"]
    assert same_tasks == (which != "order")
    assert other.record["stream"]["split_hash"] == finished.record["stream"]["split_hash"]
    assert not equal(everything_learned(other), everything_learned(finished))


# Other heads, other methods


def test_a_run_with_a_closed_form_head_trains_prompts_in_its_first_task_alone(pictures: Path, tmp_path: Path) -> None:
    config = parse_config({**tiny(pictures), "preset": "mine", "head": {"kind": "ridge", "projections": 20}})
    run = execute.train(config, tmp_path / "run")
    events = [strict(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["task"]) for event in events] == [
        ("epoch", 0),
        ("epoch", 0),
        ("task", 0),
        ("task", 1),
        ("task", 2),
    ]
    assert run.record["head"] == "ridge" and run.record["config"]["preset"] == "mine"
    assert run.record["trainable_parameters"] == 2 * (2 * 4 * 4 * 64) + 6 * 20
    saved = load_checkpoint(run.checkpoint, config_hash(config), CPU)
    assert saved.tensors["head.weight"].shape == (6, 20) and saved.tensors["trained.weight"].shape == (2, 64)


def test_a_method_names_the_head_where_the_user_does_not(pictures: Path, tmp_path: Path) -> None:
    for method, head in (("nearest-mean", "nearest-mean"), ("apt", "normalised")):
        settings = {**fast(pictures, training={"epochs": 1}), "method": method}
        assert execute.train(parse_config(settings), tmp_path / method).record["head"] == head


def test_joint_training_is_one_step_evaluated_task_by_task(pictures: Path, tmp_path: Path) -> None:
    settings = {**fast(pictures, training={"epochs": 3, "head_rate": 0.001}), "method": "joint"}
    run = api.start(parse_config(settings), tmp_path / "run")
    record, found = run.record, strict((run.folder / "accuracy.json").read_text())
    assert record["joint"] and record["status"] == "finished"
    stream = record["stream"]
    assert len(stream["tasks"]) == 1 and stream["tasks"][0] == stream["classes"] and len(stream["classes"]) == 6
    assert (stream["train_images"], stream["test_images"], stream["test_classes"]) == ([48], [4] * 3, [2] * 3)
    events = [strict(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    (scores,) = [event["accuracies"] for event in events if event["event"] == "task"]
    assert len(scores) == 3 and np.mean(scores) > 20
    assert found["matrix"] == [[pytest.approx(np.mean(scores))]]
    assert found["FAA"] == found["CAA"] == found["matrix"][0][0]
    assert record["trainable_parameters"] == record["backbone"]["parameters"] + 6 * 65
    diagnosed = strict((run.folder / "diagnostics.json").read_text())
    assert set(diagnosed) == {"queries"} and len(diagnosed["queries"]["labels"]) == 4
    assert run.report.exists()


def test_the_order_of_classes_is_the_same_for_joint_training(pictures: Path, tmp_path: Path) -> None:
    apart, joint = (
        execute.prepare(parse_config({**fast(pictures), "method": method}), CPU, SILENT)
        for method in ("linear-probe", "joint")
    )
    one, other = (execute.describe(workshop, "run")["stream"] for workshop in (apart, joint))
    for name in ("classes", "order_hash", "split_hash", "test_images", "test_classes"):
        assert one[name] == other[name], name


def test_a_published_mistake_that_was_asked_for_marks_the_record(pictures: Path, tmp_path: Path) -> None:
    settings = {**tiny(pictures), "method": {"name": "l2p", "batchwise": True}}
    workshop = execute.prepare(parse_config(settings), CPU, SILENT)
    (mark,) = execute.describe(workshop, "run")["marks"]
    assert mark.startswith("batchwise: ")


@pytest.mark.parametrize(
    ("normalisation", "mean", "std"),
    [
        ("backbone", [0.5] * 3, [0.5] * 3),
        ("unit", [0.0] * 3, [1.0] * 3),
        ("cifar100", [0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761]),
    ],
)
def test_the_input_is_normalised_as_set_and_recorded(
    pictures: Path, normalisation: str, mean: list[float], std: list[float]
) -> None:
    settings = fast(pictures, backbone={"normalisation": normalisation}, data={"interpolation": "bicubic"})
    workshop = execute.prepare(parse_config(settings), CPU, SILENT)
    recorded = execute.describe(workshop, "run")["preprocessing"]
    assert recorded["normalisation"] == normalisation
    assert recorded["mean"] == pytest.approx(mean) and recorded["std"] == pytest.approx(std)
    assert workshop.scorer.viewer is workshop.learner.viewer and workshop.scorer.viewer.kernel == "bicubic"


@pytest.mark.parametrize(("kernel", "side"), [("bilinear", None), ("bilinear", "full"), ("bicubic", "full")])
def test_large_photographs_are_evaluated_as_torchvision_resizes_them(
    kernel: str, side: str | None, tmp_path: Path
) -> None:
    """Smaller copies are reduced bilinearly, which is why the preset published keeps photographs whole."""
    drawn = np.random.default_rng(0)
    for place in range(4):
        path = tmp_path / "photographs" / "ab"[place % 2] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn.integers(0, 256, (90, 120, 3), dtype=np.uint8)).save(path)
    data = {"interpolation": kernel, "stored_side": side, "tasks": 1, "test_fraction": 0.5}
    settings = fast(tmp_path / "photographs", data=data, backbone={"normalisation": "unit"})
    workshop = execute.prepare(parse_config(settings), CPU, SILENT)
    images = workshop.scorer.images
    found = workshop.scorer.viewer.evaluation(images.store, torch.arange(len(images.names)))
    view = transforms.Compose(
        [transforms.Resize(37, transforms.InterpolationMode(kernel)), transforms.CenterCrop(32), transforms.ToTensor()]
    )
    for name, one in zip(images.names, found, strict=True):
        expected = view(Image.open(tmp_path / "photographs" / name))
        assert (one - expected).abs().max() < 2 / 255


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, Path]]:
    """What would be carried out, and where."""
    found: list[tuple[RunConfig, Path]] = []
    monkeypatch.setattr(api, "start", lambda config, out, *_: found.append((config, out)))
    return found


def test_what_is_named_goes_before_the_config_and_defaults_do_not(
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


def test_a_folder_of_its_own_is_found_for_every_run(tmp_path: Path) -> None:
    assert api.free_folder(tmp_path, "a") == tmp_path / "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert api.free_folder(tmp_path, "a") == tmp_path / "a-3"


class Nosy(ProgressCallback):
    """Notes whether anything was begun."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, description: str, total: int) -> Any:
        self.stages.append(description)
        return super().stage(description, total)


@pytest.mark.parametrize("kind", ["run", "used", "file"])
def test_a_folder_that_is_taken_is_refused_before_any_work(
    pictures: Path, tmp_path: Path, finished: Run, kind: str
) -> None:
    out = finished.folder if kind == "run" else tmp_path / "out"
    if kind == "used":
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
    elif kind == "file":
        out.write_text("mine")
    before = files(out) if out.is_dir() else set()
    progress = Nosy()
    hint = "go on with --resume" if kind == "run" else "choose another folder"
    with pytest.raises(UserError, match=hint):
        execute.train(parse_config(fast(pictures)), out, progress=progress)
    assert progress.stages == []
    assert before == (files(out) if out.is_dir() else set())


def test_an_empty_folder_is_taken(pictures: Path, tmp_path: Path) -> None:
    assert execute.train(parse_config(fast(pictures)), tmp_path).finished


def test_another_process_on_the_same_run_is_kept_out_until_it_is_gone(pictures: Path, tmp_path: Path) -> None:
    run = interrupted(fast(pictures), tmp_path / "run")
    hold = (
        "import fcntl, sys; h = open(sys.argv[1], 'w'); fcntl.flock(h, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(run.folder / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        before = {name: (run.folder / name).read_bytes() for name in files(run.folder)}
        with pytest.raises(UserError, match=r"another process is working on .*run"):
            execute.resume(run.folder)
        assert before == {name: (run.folder / name).read_bytes() for name in files(run.folder)}
        other.kill()
    assert execute.resume(run.folder).finished


class StopHere(BaseException):
    """The run is stopped here."""


class Stopper(ProgressCallback):
    """Stops a run as it begins its second task."""

    def stage(self, description: str, total: int) -> Any:
        if description.startswith("task 2"):
            raise StopHere
        return super().stage(description, total)


def interrupted(config: dict[str, Any], out: Path) -> Run:
    with pytest.raises(StopHere):
        execute.train(parse_config(config), out, progress=Stopper())
    return Run.open(out)


def test_half_a_line_and_half_a_file_of_a_killed_process_are_cleared_away(pictures: Path, tmp_path: Path) -> None:
    run = interrupted(fast(pictures), tmp_path / "run")
    with (run.folder / "events.jsonl").open("a") as stream:
        stream.write('{"event": "epoch", "ta')
    (run.checkpoint.parent / ".state.safetensors.1234abcd.part").write_bytes(b"half")
    api.resume(run.folder)
    assert not list(run.folder.rglob("*.part"))
    events = [strict(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert [event["task"] for event in events if event["event"] == "task"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 7}', "has format 7, this version reads 1"),
        ("[1, 2]", "has format None, this version reads 1"),
        ('{"format": ', r"run\.json is damaged: it is not valid JSON"),
        (None, r"is not a run: it has no run\.json"),
    ],
)
def test_a_folder_that_is_no_run_is_told(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=message):
        Run.open(tmp_path)


def test_unfinished_runs_have_metrics_of_what_they_finished(pictures: Path, tmp_path: Path) -> None:
    run = interrupted(fast(pictures), tmp_path / "run")
    found = strict((run.folder / "accuracy.json").read_text())
    assert found["finished_steps"] == 1 and found["FAA"] == found["matrix"][0][0]
    assert not run.finished and run.record["status"] == "running"


def test_validation_never_reads_a_test_image(pictures: Path, tmp_path: Path) -> None:
    test = tmp_path / "test"
    for name in (path.name for path in pictures.iterdir()):
        (test / name).mkdir(parents=True)
        (test / name / "broken.png").write_text("this is no image")
    data = {"test": str(test)}
    with pytest.raises(UserError, match=r"6 image file\(s\) cannot be read"):
        execute.train(parse_config(fast(pictures, data=data)), tmp_path / "tested")
    run = execute.train(parse_config(fast(pictures, data={**data, "validation": 0.2})), tmp_path / "validated")
    assert run.record["evaluated_on"] == "validation"
    assert run.record["stream"]["train_images"] == [16] * 3 and run.record["stream"]["test_images"] == [4] * 3


def test_divergence_is_told_and_the_checkpoint_before_it_kept(pictures: Path, tmp_path: Path) -> None:
    config = parse_config(fast(pictures, training={"weight_decay": 1e18}))  # a factor of -1e15 at every step
    attempts: list[Callable[[], Run]] = [
        lambda: execute.train(config, tmp_path / "run"),
        lambda: execute.resume(tmp_path / "run"),
    ]
    for attempt in attempts:
        with pytest.raises(
            UserError, match=r"training diverged: .* in task 1, epoch 2.*Lower training\.head_rate \(0\.0025\)"
        ):
            attempt()
        run = Run.open(tmp_path / "run")
        saved = load_checkpoint(run.checkpoint, config_hash(config), CPU)
        assert (saved.position.task, saved.position.epoch) == (0, 1)
        assert all(bool(tensor.isfinite().all()) for tensor in saved.tensors.values())
    for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines():
        strict(line)


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


def test_a_run_that_filled_the_disk_goes_on_when_there_is_room(finished: Run, pictures: Path, small_disk: Path) -> None:
    config = parse_config({**tiny(pictures), "seeds": dict.fromkeys(("order", "init", "data"), 5)})
    out = small_disk / "run"
    with pytest.raises(UserError, match=r"run/.* could not be written: the disk is full"):
        execute.train(config, out)
    assert not list(out.rglob("*.part"))
    assert load_checkpoint(Run.open(out).checkpoint, config_hash(config), CPU).position.epoch == 1
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    run = execute.resume(out)
    assert equal(everything_learned(run), everything_learned(finished))
    assert (run.folder / "accuracy.json").read_bytes() == (finished.folder / "accuracy.json").read_bytes()


def test_numbers_go_to_tensorboard(pictures: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = execute.train(parse_config(fast(pictures)), tmp_path / "run", track="tensorboard")
    found = accumulator.EventAccumulator(str(run.folder / "tensorboard")).Reload()
    losses = [point.value for point in found.Scalars("loss")]
    events = [strict(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert losses == pytest.approx([event["loss"] for event in events if event["event"] == "epoch"])
    assert [point.step for point in found.Scalars("average accuracy")] == [1, 3, 5]


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_numbers_go_to_hosted_trackers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    module = types.ModuleType(name)
    for call in ("init", "log", "finish"):
        monkeypatch.setattr(module, call, lambda *a, _call=call, **k: calls.append((_call, (*a, k))), raising=False)
    monkeypatch.setitem(sys.modules, name, module)
    tracker = open_tracker(name, tmp_path / "mine", {"a": 1})
    tracker.log({"loss": 0.5}, 3)
    tracker.close()
    assert calls == [
        ("init", ({"project": "probprompt", "name": "mine", "config": {"a": 1}},)),
        ("log", ({"loss": 0.5}, {"step": 3})),
        ("finish", ({},)),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [("wandb", r"wandb is not installed: pip install 'probprompt\[wandb\]'"), ("wanb", "did you mean 'wandb'")],
)
def test_a_tracker_that_is_not_there_is_told_before_any_work(
    pictures: Path, tmp_path: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=message):
        execute.train(parse_config(fast(pictures)), tmp_path / "run", track=name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cdua", "no device is called 'cdua': did you mean 'cuda'"),
        ("tpu7", "no device is called 'tpu7': allowed: cpu, cuda"),
        ("meta", "the device 'meta' is not supported: use cpu, cuda"),
        ("cuda:99", r"the device 'cuda:99' is not there: this machine has \d+ GPU"),
    ],
)
def test_a_device_that_is_not_there_is_told(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        execute.pick_device(name)


def test_a_folder_that_may_not_be_written_is_told(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"could not be written: Not a directory"):
        execute.train(parse_config(fast(pictures)), tmp_path / "file" / "run")


def test_a_lock_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match="could not be written: Is a directory"), Run(tmp_path).locked():
        pass


def test_checkpoints_after_epochs_take_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("probprompt.runs.checkpoint.time.perf_counter", lambda: now)
    monkeypatch.delenv(CHECKPOINTS)
    size = 1000
    saving = checkpoint.Saving(lambda: size)
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


def test_a_run_writes_few_checkpoints_and_one_at_its_end(
    settings: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []
    save = checkpoint.save_checkpoint

    def slowly(path: Path, config: str, position: Any, *others: Any) -> None:
        written.append((position.task, position.epoch))
        time.sleep(0.2)
        save(path, config, position, *others)

    monkeypatch.setattr(execute, "save_checkpoint", slowly)
    monkeypatch.setattr(checkpoint, "LATENCY", 10.0)  # however long this machine takes, it is too short for another
    monkeypatch.delenv(CHECKPOINTS)
    run = execute.train(parse_config(settings(training={"epochs": 3, "batch": 8})), tmp_path / "run")
    assert written == [(len(run.matrix), 0)]
    whole = execute.train(run.config, tmp_path / "other")  # nothing that is found depends on it
    monkeypatch.setenv(CHECKPOINTS, "all")
    written.clear()
    every = execute.train(run.config, tmp_path / "every")
    assert len(written) == 4 * len(run.matrix)  # three epochs and the end of each task
    for one in (whole, every):
        assert one.metrics == run.metrics
        assert sorted(path.name for path in one.model.iterdir()) == sorted(path.name for path in run.model.iterdir())


def test_the_model_of_an_unfinished_run_predicts_without_what_learning_needs(
    settings: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    class Stop(ProgressCallback):
        tasks = 0

        def describe(self, text: str) -> None:
            self.tasks += text.startswith("average")
            if text.startswith("loss") and self.tasks:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute.train(parse_config(settings(training={"epochs": 2, "batch": 8})), tmp_path / "run", progress=Stop())
    model = tmp_path / "run" / "model"
    assert json.loads((model / "model.json").read_text())["statistics"] is None
    assert len(probprompt.load_model(model).class_names) == 2
    finished = execute.resume(tmp_path / "run")
    assert json.loads((finished.model / "model.json").read_text())["statistics"]
