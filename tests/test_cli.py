"""The command line as a user meets it: what it prints, what it leaves, and how it answers mistakes."""

import io
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import probprompt as package
from probprompt import api, checkpoints, methods, presets
from probprompt.cli.screen import Screen
from probprompt.config import RunConfig, merge, parse_config
from probprompt.errors import UserError
from probprompt.evaluation import metrics
from probprompt.runs import execute
from probprompt.runs.record import Run

TINY = ("--backbone", "test_vit", "--weights", "random", "--set", "image_size=32", "--batch", "8", "--epochs", "1")
PROBE = ("--method", "linear-probe", *TINY)


Command = Callable[..., Any]  # arguments to (exit code, output, errors)


@pytest.fixture
def probprompt(probprompt: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """The command line, in an empty folder of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "80")
    return probprompt


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Settings of runs that a command would carry out; none is."""
    found: list[RunConfig] = []

    def start(config: RunConfig, *_: object) -> None:
        found.append(config)
        raise SystemExit(0)

    monkeypatch.setattr(api, "start", start)
    return found


def mistake(answer: Any) -> str:
    """The message of a command that was refused."""
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ") and "Traceback" not in answer.err
    return str(answer.err)


# What can be asked


def test_help_names_the_commands(probprompt: Command) -> None:
    answer = probprompt("--help")
    assert answer.code == 0 and answer.err == ""
    assert all(name in answer.out for name in ("demo", "train", "compare", "list", "report", "--version"))
    assert probprompt("-h").out == answer.out


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (("book", "add", "runs/a"), "results"),
        (("reproduce", "table1"), "run"),
        (("bench", "--grow", "all"), "scaling"),
        (("bench", "--from", "a.json", "--page=b.md"), "pages"),
    ],
)
def test_removed_commands_name_the_new_ones(probprompt: Command, arguments: tuple[str, ...], command: str) -> None:
    answer = probprompt(*arguments)
    assert answer.code == 2 and f"'python -m reproduction {command}'" in answer.err


def test_help_of_training_explains_its_options(probprompt: Command) -> None:
    answer = probprompt("train", "--help")
    options = (
        "--preset --tasks --test --backbone --weights --seed --order-seed --validate --set --config --resume --track"
    )
    assert answer.code == 0 and all(option in answer.out for option in options.split())


def test_the_version_is_the_packages(probprompt: Command) -> None:
    assert probprompt("--version") == (0, f"probprompt {package.__version__}\n", "")


@pytest.mark.parametrize(
    ("what", "listed"),
    [
        ("methods", list(methods.registered())),
        ("benchmarks", ["emoji-r", "FOLDER", "5 tasks"]),
        ("backbones", ["demo", "sup1k", "sup21k", "dino1k", "on this machine"]),
    ],
)
def test_what_there_is_can_be_listed(probprompt: Command, what: str, listed: list[str]) -> None:
    answer = probprompt("list", what)
    assert answer.code == 0 and all(name in answer.out for name in listed)
    assert max(map(len, answer.out.splitlines()[:-1])) <= 80


def test_a_name_to_be_typed_is_never_cut(probprompt: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "vit_small_patch14_reg4_dinov2.lvd142m_and_a_tag_that_goes_on_and_on"
    words = "what it is, in more words than a narrow terminal has room for beside such a name"
    items = [
        checkpoints.Listing(name, words, "hub:x", "mit", True, "Hugging Face cache", 10**8) for name in ("a", long)
    ]
    monkeypatch.setattr(checkpoints, "known", lambda: items)
    answer = probprompt("list", "backbones")
    assert (
        long in answer.out.split() and "…" not in answer.out and answer.out.count("100.0 MB, Hugging Face cache") == 2
    )
    assert max(map(len, answer.out.splitlines()[:-1])) <= 80


# Training


def test_a_folder_of_pictures_is_learned(probprompt: Command, pictures: Path) -> None:
    answer = probprompt("train", pictures, "--tasks", 3, *TINY, "--set", "samples=2", "--set", "blocks=[0]")
    assert answer.code == 0 and answer.err == ""
    run = Run.open(Path("runs/pictures-probprompt-s0"))
    assert run.finished and f"report: {run.report}" in answer.out and run.report.exists()
    lines = answer.out.splitlines()
    assert lines[:2] == ["reading images: done", f"task 1 of 3: done, average accuracy {run.matrix[0, 0]:.1f} %"]
    assert re.search(r"^task 3 +" + re.escape(f"{run.matrix[2, 2]:.1f}") + "$", answer.out, re.MULTILINE)
    values = " +".join(re.escape(f"{run.metrics[name]:.2f}") for name in ("FAA", "CAA", "forgetting"))
    assert re.search(rf"^probprompt +{values}$", answer.out, re.MULTILINE)
    again = probprompt("train", pictures, "--tasks", 3, *PROBE, "--seed", 0)
    assert again.code == 0 and Path("runs/pictures-linear-probe-s0").is_dir()


def test_tasks_are_a_number_or_sizes_or_a_file(
    probprompt: Command, asked: list[RunConfig], pictures: Path, tmp_path: Path
) -> None:
    lines, lists = tmp_path / "tasks.txt", tmp_path / "tasks.json"
    lines.write_text("# three\nclass5, class1\nclass0,class2\nclass3,class4\n")
    lists.write_text('[["class5", "class1"], ["class0", "class2"], ["class3", "class4"]]')
    for tasks in ("3", "2,2,2", lines, lists):
        assert probprompt("train", pictures, "--tasks", tasks).code == 0
    named = (("class5", "class1"), ("class0", "class2"), ("class3", "class4"))
    assert [config.data.tasks for config in asked] == [3, (2, 2, 2), named, named]


def test_a_file_of_tasks_decides_the_order(probprompt: Command, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.txt").write_text("class5,class1\nclass0,class2,class3,class4\n")
    answer = probprompt("train", pictures, "--tasks", tmp_path / "tasks.txt", *PROBE, "--out", "run", "--seed", 3)
    assert answer.code == 0
    assert Run.open(Path("run")).record["stream"]["tasks"] == [
        ["class5", "class1"],
        ["class0", "class2", "class3", "class4"],
    ]


def test_one_seed_sets_all_three_and_each_can_be_set_alone(probprompt: Command, asked: list[RunConfig]) -> None:
    for arguments in (
        ("--seed", 7),
        ("--order-seed", 1),
        ("--init-seed", 2),
        ("--data-seed", 3),
        ("--seed", 7, "--init-seed", 2),
    ):
        assert probprompt("train", *arguments).code == 0
    found = [(config.seeds.order, config.seeds.init, config.seeds.data) for config in asked]
    assert found == [(7, 7, 7), (1, 0, 0), (0, 2, 0), (0, 0, 3), (7, 2, 7)]


def test_settings_go_over_options_and_options_over_the_file(
    probprompt: Command, asked: list[RunConfig], tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        'evaluation_batch = 5\n[training]\nepochs = 3\nbatch = 4\nhead_rate = 0.5\n[data]\ntasks = "2,2,2"\n'
        '[method]\nname = "probprompt"\nsamples = 9\n'
    )
    assert probprompt("train", "--config", config, "--epochs", 6, "--batch", 7, "--set", "batch=8").code == 0
    assert probprompt("train", "--config", config, "--method", "linear-probe", "--set", "flip=false").code == 0
    first, second = asked
    assert (first.training.epochs, first.training.batch, first.training.head_rate) == (6, 8, 0.5)
    assert first.evaluation_batch == 5 and first.data.tasks == (2, 2, 2) and first.method.model_dump()["samples"] == 9
    assert second.method.name == "linear-probe" and second.training.flip is False


@pytest.mark.parametrize(
    ("preset", "method", "benchmark"),
    [
        ("published", "vq-prompt", "emoji-r"),
        ("published", "hide-prompt", "imagenet-r"),
        ("matched", "probprompt", "emoji-r"),
        ("matched", "ft", "emoji-r"),
        ("ridge", "coda-prompt", "cifar100"),
        ("flagship", "probprompt", "emoji-r"),
    ],
)
def test_a_preset_gives_its_settings_for_method_and_benchmark(
    probprompt: Command, asked: list[RunConfig], preset: str, method: str, benchmark: str
) -> None:
    assert probprompt("train", benchmark, "--method", method, "--preset", preset).code == 0
    (config,) = asked
    assert config == parse_config(presets.settings(preset, method, benchmark))
    assert (config.preset, config.method.name, config.data.benchmark) == (preset, method, benchmark)
    assert config != parse_config({"preset": preset, "method": method, "data": {"benchmark": benchmark}})


def test_a_preset_is_for_what_is_learned_by_default_or_by_the_file(
    probprompt: Command, asked: list[RunConfig], tmp_path: Path, pictures: Path
) -> None:
    config = tmp_path / "config.toml"
    given = '[method]\nname = "apt"\nema = 0.5\n[training]\nbatch = 3\n'
    config.write_text(f'preset = "ridge"\n[data]\nbenchmark = "{pictures}"\n{given}')
    assert probprompt("train", "--preset", "matched").code == 0
    assert probprompt("train", "--preset", "published", "--config", config).code == 0
    first, second = asked
    assert first == parse_config(presets.settings("matched", "probprompt", "emoji-r"))
    over = {"method": {"name": "apt", "ema": 0.5}, "training": {"batch": 3}}
    assert second == parse_config(merge(presets.settings("published", "apt", str(pictures)), over))
    assert second.training.augmentation == "autoaugment+crop" and second.training.batch == 3
    assert second.preset == "published", "the one that was asked for, whatever the file says"


def test_options_and_assignments_go_over_the_preset(probprompt: Command, asked: list[RunConfig]) -> None:
    arguments = ("--epochs", 3, "--tasks", "10,10", "--seed", 4, "--backbone", "sup1k", "--validate")
    assignments = ("batch=7", "alignment.rate=0.5", "head.kind=lda", "samples=2", "initial_std=0.7", "clip=none")
    named = [part for assignment in assignments for part in ("--set", assignment)]
    assert probprompt("train", "emoji-r", "--preset", "flagship", *arguments, *named).code == 0
    (config,) = asked
    over = {
        "training": {"epochs": 3, "batch": 7, "clip": None},
        "data": {"tasks": (10, 10), "validation": 0.2},
        "seeds": dict.fromkeys(("order", "init", "data"), 4),
        "backbone": {"name": "sup1k"},
        "alignment": {"rate": 0.5},
        "head": {"kind": "lda"},
        "method": {"samples": 2, "initial_std": 0.7},
    }
    preset = presets.settings("flagship", "probprompt", "emoji-r")
    assert config == parse_config(merge(preset, over)) != parse_config(preset)
    assert config.method.model_dump()["relevance_temperature"] == "dim", "what is not named stays the preset's"


def test_a_run_with_a_preset_is_recorded_under_its_name(probprompt: Command, pictures: Path) -> None:
    answer = probprompt("train", pictures, "--preset", "matched", "--tasks", 2, *PROBE, "--out", "run")
    assert answer.code == 0 and answer.err == ""
    config = Run.open(Path("run")).config
    assert config.preset == "matched" and config.training.epochs == 1 and config.training.batch == 8
    assert probprompt("train", "--resume", "run").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "publishd"), "no preset is called 'publishd': did you mean 'published'?"),
        (("--preset", "best"), "no preset is called 'best': allowed: flagship, matched, published, ridge"),
        (
            ("--preset", "flagship", "--method", "l2p"),
            "the preset 'flagship' is for probprompt alone, not for l2p: use 'matched'",
        ),
        (
            ("--preset", "ridge", "--method", "linear-probe"),
            "the preset 'ridge' is for methods with prompts, not for linear-probe: use 'matched'",
        ),
        (("--preset", "matched", "--method", "l2q"), "no method is called 'l2q': did you mean 'l2p'"),
        (
            ("--resume", "run", "--preset", "matched"),
            "--resume goes on with the run's own settings: leave --preset away",
        ),
    ],
)
def test_a_preset_that_does_not_fit_is_refused(
    probprompt: Command, asked: list[RunConfig], arguments: tuple[str, ...], message: str
) -> None:
    assert message in mistake(probprompt("train", *arguments))
    assert not asked and not list(Path().iterdir())


def test_a_grid_is_run_and_its_runs_are_tabulated_again(probprompt: Command, pictures: Path) -> None:
    grid = ("--methods", "linear-probe,nearest-mean", "--benchmarks", pictures, "--seeds", "0-1", "--presets", "custom")
    settings = ("tasks=2", "backbone.name=test_vit", "weights=random", "image_size=32", "training.epochs=1")
    named = [part for assignment in settings for part in ("--set", assignment)]
    answer = probprompt("compare", *grid, *named, "--out", "grid", "--device", "cpu")
    assert answer.code == 0 and answer.err == ""
    assert answer.out.count("linear-probe") > 2 and "[4/4]" in answer.out
    runs = sorted(path.parent for path in Path("grid").rglob("run.json"))
    assert len(runs) == 4 and all(Run.open(run).finished for run in runs)
    table = answer.out[answer.out.rindex("method ") :]
    again = probprompt("compare", *grid, *named, "--out", "grid", "--no-run")
    assert again.code == 0 and again.out.endswith(table) and "[4/4]" not in again.out
    chosen = [part for run in runs for part in ("--from", run)]
    tables = probprompt("compare", *chosen, "--out", "tables")
    assert tables.code == 0 and "written: tables" in tables.out
    wrong = probprompt("compare", "--methods", "apd", "--benchmarks", pictures, "--out", "other")
    assert "no method is called 'apd': did you mean 'apt'" in mistake(wrong) and not Path("other").exists()


def test_validation_is_done_on_training_images_and_says_so(probprompt: Command, pictures: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(pictures, tmp_path / "broken"))
    for path in broken.rglob("*.png"):
        path.write_text("this is no image")
    answer = probprompt("train", pictures, "--test", broken, "--validate", "--tasks", 2, *PROBE, "--out", "run")
    assert answer.code == 0 and "accuracy in % on held-out training images" in answer.out
    record = Run.open(Path("run")).record
    assert record["evaluated_on"] == "validation" and record["stream"]["test_images"] == [6, 6]


def test_numbers_go_to_tensorboard(probprompt: Command, pictures: Path) -> None:
    pytest.importorskip("tensorboard")
    answer = probprompt("train", pictures, "--tasks", 2, *PROBE, "--track", "tensorboard", "--out", "run")
    assert answer.code == 0
    assert [path.name.startswith("events.out") for path in Path("run/tensorboard").iterdir()] == [True]


def test_unreadable_images_are_found_before_training_or_skipped_and_listed(
    probprompt: Command, pictures: Path, tmp_path: Path
) -> None:
    images = Path(shutil.copytree(pictures, tmp_path / "images"))
    (images / "class2" / "4.png").write_bytes((images / "class2" / "4.png").read_bytes()[:60])
    (images / "class0" / "note.jpg").write_text("no image")
    arguments = ("train", images, "--tasks", 2, *PROBE, "--out", "run")
    message = mistake(probprompt(*arguments))
    assert "2 image file(s) cannot be read:" in message and "--skip-unreadable" in message
    assert "class2/4.png: " in message and "class0/note.jpg: " in message
    assert not Path("run").exists()
    answer = probprompt(*arguments, "--skip-unreadable")
    assert answer.code == 0 and "skipped, unreadable: class2/4.png" in answer.out
    assert sorted(Run.open(Path("run")).record["skipped"]) == ["class0/note.jpg", "class2/4.png"]


def test_a_published_mistake_that_was_asked_for_is_said_beside_the_result(probprompt: Command, pictures: Path) -> None:
    arguments = ("train", pictures, "--tasks", 2, "--method", "l2p", *TINY)
    answer = probprompt(*arguments, "--set", "batchwise=true", "--out", "marked")
    (mark,) = Run.open(Path("marked")).record["marks"]
    assert answer.code == 0 and f"not to be compared: {mark}\n" in answer.out and mark.startswith("batchwise: ")
    assert "not to be compared" not in probprompt(*arguments, "--out", "plain").out


# Reports and the demonstration


def test_reports_are_written_of_one_run_and_of_several(probprompt: Command, pictures: Path) -> None:
    for name in ("one", "two"):
        assert probprompt("train", pictures, "--tasks", 2, *PROBE, "--out", name).code == 0
    Path("one/report.html").unlink()
    assert probprompt("report", "one") == (0, "report: one/report.html\n", "")
    assert Path("one/report.html").exists()
    assert probprompt("report", "one", "two") == (0, "report: report.html\n", "")
    page = Path("report.html").read_text(encoding="utf-8")
    assert "one" in page and "two" in page
    assert probprompt("report", "two", "--out", "deep/page.html").code == 0
    assert Path("deep/page.html").exists()


def test_a_report_on_what_is_no_run_is_refused(probprompt: Command) -> None:
    Path("empty").mkdir()
    assert mistake(probprompt("report", "nowhere")) == "error: nowhere does not exist\n"
    assert "empty is not a run: it has no run.json" in mistake(probprompt("report", "empty"))
    assert not Path("empty/report.html").exists()


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch, pictures: Path) -> None:
    """The demonstration with few pictures and one epoch."""
    preset = presets.settings
    small = {"data": {"benchmark": str(pictures), "tasks": 2}, "training": {"epochs": 1, "batch": 24}}
    monkeypatch.setattr(presets, "settings", lambda *given: merge(preset(*given), small))


def refuse_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_the_demonstration_compares_methods_without_a_network(
    probprompt: Command, small_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_network(monkeypatch)
    answer = probprompt("demo", "--seed", 2)
    assert answer.code == 0 and answer.err == ""
    home = Path("runs/demo")
    names = [method for method, _ in presets.DEMO]
    assert names[0] == "probprompt" and "linear-probe" in names
    runs = [Run.open(home / name) for name in names]
    assert all(run.finished and run.config.seeds.data == 2 for run in runs)
    assert [(run.config.method.name, run.config.preset) for run in runs] == list(presets.DEMO)
    assert "What of the gain is the head's, and what the prompts', is in docs/demo.md." in answer.out
    assert "report: runs/demo/report.html" in answer.out and (home / "report.html").exists()
    for run in runs:
        values = " +".join(re.escape(f"{run.metrics[name]:.2f}") for name in ("FAA", "CAA", "forgetting"))
        assert re.search(rf"^{run.config.method.name} +{values}$", answer.out, re.MULTILINE)
    message = mistake(probprompt("demo", "--out", home))
    assert "runs/demo exists already: choose another folder with --out" in message


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "probpromt"), "no method is called 'probpromt': did you mean 'probprompt' or "),
        (("--set", "training.epoch=3"), "no setting is called 'training.epoch': did you mean 'training.epochs'"),
        (("--set", "smaples=3"), "no setting is called 'smaples': did you mean 'method.samples'?"),
        (("--set", "epochs"), "--set takes key=value, not 'epochs'"),
        (("--set", "training.epochs=many"), "training.epochs: "),
        (("--track", "tensorbord"), "no tracker is called 'tensorbord': did you mean 'tensorboard'?"),
        (("--track", "wandb"), "wandb is not installed: pip install 'probprompt[wandb]'"),
        (("--device", "cdua"), "no device is called 'cdua': did you mean 'cuda'"),
        (("--tasks", "junk"), "the tasks 'junk' are no number, and no such file exists: allowed are a number of tasks"),
        (("--tasks", "4,4"), "the sizes [4, 4] add up to 8, but there are 6 classes"),
        (("--tasks", "7"), "6 classes cannot fill 7 tasks: allowed are 1 to 6 tasks"),
        (("--weights", "gone.safetensors"), "there is no file gone.safetensors"),
        (("--backbone", "vit_huge_9000"), "there is no backbone 'vit_huge_9000'"),
        (("--config", "gone.toml"), "the config file gone.toml cannot be read: No such file"),
        (("--out", "taken"), "taken exists and is not empty: choose another folder for the run"),
    ],
)
def test_mistakes_are_answered_in_words(
    probprompt: Command, pictures: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    Path("taken").mkdir()
    Path("taken/thesis.tex").write_text("mine")
    assert message in mistake(probprompt("train", pictures, "--tasks", 3, *TINY, "--out", "run", *arguments))
    assert sorted(str(path) for path in Path().rglob("*")) == ["taken", "taken/thesis.tex"]


@pytest.mark.parametrize(
    ("name", "hint"), [("emojir", "did you mean 'emoji-r'?"), ("xyz", "allowed: cifar100, cub200, emoji-r")]
)
def test_an_unknown_benchmark_is_answered_with_the_nearest(probprompt: Command, name: str, hint: str) -> None:
    message = mistake(probprompt("train", name))
    assert f"{name!r} is neither a benchmark nor a folder: {hint}" in message


def test_wrong_options_are_answered_with_the_usage(probprompt: Command) -> None:
    for arguments in (("train", "--epochs", "0"), ("train", "--epoks", "3"), ("list", "nothing"), ("trian",)):
        answer = probprompt(*arguments)
        assert answer.code == 2 and "Usage" in answer.err and "Traceback" not in answer.err


def empty_a_class(images: Path) -> None:
    for path in (images / "class2").iterdir():
        path.unlink()


def double_a_class(images: Path) -> None:
    (images / "class2").rename(images / "CLASS1")


def leave_one_image(images: Path) -> None:
    for path in sorted((images / "class2").iterdir())[1:]:
        path.unlink()


def leave_no_class(images: Path) -> None:
    for path in images.iterdir():
        shutil.rmtree(path)
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(images / "loose.png")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (empty_a_class, "class2 holds no image: fill it or remove it"),
        (double_a_class, "has two classes of one name, 'CLASS1' and 'class1': rename or merge one"),
        (leave_one_image, "the class 'class2' has 1 image(s): at least 2 are needed to hold one out"),
        (leave_no_class, "at least 2 are needed; its 1 image(s) must lie in one folder per class"),
    ],
)
def test_mistakes_in_the_images_are_answered_in_words(
    probprompt: Command, pictures: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    images = Path(shutil.copytree(pictures, tmp_path / "images"))
    spoil(images)
    assert message in mistake(probprompt("train", images, "--tasks", 2, *TINY, "--out", "run"))
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("class0,class1\nclass1,class2", "the class 'class1' is in task 1 and in task 2: keep one"),
        ("class0,class1\nclass2,clas3", "task 2 has an unknown class 'clas3': did you mean 'class3'"),
        ("class0,class1\nclass2", "3 of 6 classes are in no task: class3, class4, class5"),
        ("class0\nclass1,class2,class3,class4,class5", "the first task has only one class"),
        ("", "has no tasks in it"),
    ],
)
def test_mistakes_in_a_file_of_tasks_are_answered_in_words(
    probprompt: Command, pictures: Path, tasks: str, message: str
) -> None:
    Path("tasks.txt").write_text(tasks)
    assert message in mistake(probprompt("train", pictures, "--tasks", "tasks.txt", *TINY, "--out", "run"))
    assert not Path("run").exists()


def test_divergence_is_answered_in_words(probprompt: Command, pictures: Path) -> None:
    arguments = ("train", pictures, "--tasks", 3, *TINY, "--set", "samples=2", "--set", "blocks=[0]", "--out", "run")
    message = mistake(probprompt(*arguments, "--set", "training.head_rate=1e30"))
    assert "training diverged: the loss became nan in task 1, epoch 1. Lower training.head_rate (1e+30)" in message
    events = Path("run/events.jsonl")
    assert not events.exists() or all(json.loads(line) for line in events.read_text().splitlines())


def test_a_mistake_in_a_process_of_its_own_is_answered_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "probprompt", "train", "nowhere", "--out", "run"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: 'nowhere' is neither a benchmark nor a folder")
    assert ended.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


# Interruptions


def test_an_interrupt_before_anything_is_written_says_so(
    probprompt: Command, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "prepare", interrupt)
    answer = probprompt("train", pictures, "--out", "run")
    assert answer == (130, "", "interrupted; nothing was written yet\n")


def test_an_interrupted_run_says_how_to_go_on(
    probprompt: Command, pictures: Path, small_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(execute.Execution, "run_all", interrupt)
    answer = probprompt("train", pictures, "--tasks", 2, *TINY, "--out", "my run")
    assert (answer.code, answer.err) == (130, "interrupted; go on with: probprompt train --resume 'my run'\n")
    answer = probprompt("train", "--resume", "my run")
    assert (answer.code, answer.err) == (130, "interrupted; go on with: probprompt train --resume 'my run'\n")
    answer = probprompt("demo")
    assert answer.err == "interrupted; go on with: probprompt train --resume runs/demo/probprompt\n"


# What the screen shows


def screen(width: int, terminal: bool = False) -> tuple[Screen, io.StringIO]:
    shown, made = io.StringIO(), Screen()
    made.console = Console(file=shown, width=width, force_terminal=terminal, highlight=False, legacy_windows=False)
    return made, shown


def pretended(tasks: int, name: str = "probprompt") -> Run:
    """A run of so many tasks, as far as the screen is concerned."""
    matrix = np.full((tasks, tasks), np.nan)
    for task in range(tasks):
        matrix[task, task:] = 100.0 - np.arange(tasks - task)
    record = {"config": {"method": {"name": name}}, "evaluated_on": "test", "skipped": [], "marks": []}
    values = {"matrix": matrix, "record": record, "metrics": metrics.summarize(matrix), "report": "r.html"}
    return cast(Run, SimpleNamespace(**values))


def test_ten_tasks_fit_on_a_screen_of_eighty_columns() -> None:
    shown_on, shown = screen(80)
    shown_on.show(pretended(10))
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert ["after", *map(str, range(1, 11))] in lines
    assert ["task", "1", *(f"{100.0 - lost:.1f}" for lost in range(10))] in lines
    assert max(map(len, shown.getvalue().splitlines())) <= 80 and "…" not in shown.getvalue()


def test_more_tasks_than_fit_are_shown_by_their_two_ends() -> None:
    shown_on, shown = screen(80)
    shown_on.show(pretended(20))
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert ["when", "learned", "in", "the", "end"] in lines
    assert ["task", "1", "100.0", "81.0"] in lines and ["task", "20", "100.0", "100.0"] in lines
    assert "…" not in shown.getvalue()


def test_runs_are_compared_in_one_table() -> None:
    shown_on, shown = screen(80)
    shown_on.compare([pretended(3), pretended(3, "linear-probe")])
    assert shown.getvalue().count("FAA  ") == 1
    assert re.search(r"probprompt +99\.00 .*\nlinear-probe +99\.00 ", shown.getvalue())


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    shown_on = Screen()
    for text in ("runs/[bold]x[/bold]", "runs/:cat:", "a" * 200):
        shown_on.say(text)
        assert capsys.readouterr().out == f"{text}\n"
    shown_on.listing(("name",), [("[red]:cat:",)])
    assert "[red]:cat:" in capsys.readouterr().out


def test_every_stage_keeps_its_bar_on_a_terminal() -> None:
    shown_on, shown = screen(80, terminal=True)
    for task in (1, 2):
        with shown_on.stage(f"task {task} of 2", 4):
            shown_on.advance(4)
            shown_on.describe(f"average accuracy {task}0.0 %")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    final = [line.rpartition("\r")[2] for line in plain.splitlines()]
    for task in (1, 2):
        assert any(re.search(rf"^task {task} of 2 +━+ 4/4 .* average accuracy {task}0\.0 %$", line) for line in final)


def test_a_preset_named_in_a_file_is_applied_not_only_written_down(tmp_path: Path) -> None:
    given = {"preset": "matched", "data": {"benchmark": "emoji-r"}, "method": {"name": "lda"}}
    config = parse_config(api.with_preset(None, given))
    assert config == parse_config(presets.settings("matched", "lda", "emoji-r"))
    assert api.with_preset("flagship", {"preset": "matched"})["preset"] == "flagship"
    assert api.with_preset(None, {"training": {"epochs": 3}}) == {"training": {"epochs": 3}}
    with pytest.raises(UserError, match="no preset is called 'machted': did you mean 'matched'"):
        api.with_preset(None, {"preset": "machted"})


def test_a_hundred_components_of_coda_prompt_are_shared_by_the_tasks() -> None:
    for tasks, components in ((None, 10), (5, 20), (20, 5)):
        config = parse_config(presets.settings("published", "coda-prompt", "imagenet-r", tasks))
        assert config.method.model_dump()["components_per_task"] == components
        assert config.data.tasks == (tasks or 10)
