"""The command line: help, output, files, and errors."""

import io
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import typer
from rich.console import Console

import probprompt as package
from probprompt import api, cli, methods, presets
from probprompt.backbones import pretrained
from probprompt.cli import app, console
from probprompt.cli.console import Screen
from probprompt.config import RunConfig, merge, parse_config
from probprompt.data import emoji_r
from probprompt.evaluation import metrics
from probprompt.heads.closed_form import RidgeSettings
from probprompt.runs import train
from probprompt.runs.run import Run, RunRecord

TINY = ("--backbone", "test_vit", "--weights", "random", "--set", "image_size=32", "--batch-size", "8", "--epochs", "1")
PROBE = ("--method", "linear-probe", *TINY)

Command = Callable[..., Any]  # arguments to (exit code, output, errors)


@pytest.fixture
def probprompt(probprompt: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """The command line in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "80")
    return probprompt


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Settings of runs that a command would start; none is started."""
    configs: list[RunConfig] = []

    def start(config: RunConfig, *_: object) -> None:
        configs.append(config)
        raise SystemExit(0)

    monkeypatch.setattr(api, "start", start)
    return configs


def error(answer: Any) -> str:
    """The message of a command with wrong input."""
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ") and "Traceback" not in answer.err
    return str(answer.err)


def has_row(output: str, run: Run) -> bool:
    """Return True if the summary table shows the metrics of the run."""
    values = " +".join(re.escape(f"{run.metrics[name]:.2f}") for name in ("FAA", "CAA", "forgetting"))
    return re.search(rf"^{run.config.method.name} +{values}$", output, re.MULTILINE) is not None


def commands(command: Any, words: str = "probprompt") -> Iterator[tuple[str, Any]]:
    """All commands and groups, by what a user types."""
    yield words, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{words} {name}")


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_help_shows_panels_hint_and_exit_codes(probprompt: Command) -> None:
    answer = probprompt("--help")
    assert answer.code == 0 and answer.err == "" and probprompt("-h").out == answer.out
    parts = ["New here? Run 'probprompt demo'", "Use a model", "Run experiments", "Project", "Exit codes"]
    assert sorted(parts, key=answer.out.index) == parts
    assert probprompt("--version") == (0, f"probprompt {package.__version__}\n", "")


@pytest.mark.parametrize("words", COMMANDS)
def test_help_is_short(words: str) -> None:
    command = COMMANDS[words]
    for line in command.help.split("\n\n"):
        assert len(line) <= 110 and line == line.strip() and "\n" not in line
    assert len(command.help.split("\n")[0]) <= 70 or words == "probprompt"
    for param in command.params:
        assert param.name.endswith("_completion") or re.fullmatch(r".{5,74}\.", param.help), (param.name, param.help)
        assert param.param_type_name == "argument" or all(name.islower() for name in param.opts)


def test_names_of_presets_are_those_of_presets() -> None:
    assert tuple(console.PRESETS) == presets.NAMES


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("train --method l2", ["l2p", "l2p++"]),
        ("compare --methods apt,l2", ["apt,l2p", "apt,l2p++"]),
        ("learn --preset m", ["matched"]),
        ("train --backbone de", ["demo"]),
        ("predict --format c", ["csv"]),
        ("data get cu", ["cub200"]),
    ],
)
def test_names_are_completed(line: str, completions: list[str]) -> None:
    environment = os.environ | {"_PROBPROMPT_COMPLETE": "complete_bash", "COMP_WORDS": f"probprompt {line}"}
    environment["COMP_CWORD"] = str(len(line.split()))
    code = "from probprompt.cli import app; app(prog_name='probprompt')"
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert answer.stdout.split() == completions


OLD_NAMES = [(old, old, f"'{new}'") for old, new in cli._REMOVED_COMMANDS.items()]
OLD_NAMES += [
    (f"{name} {old}", old, f"'{new}'")
    for name, old_options in cli._REMOVED_OPTIONS.items()
    for old, new in old_options.items()
]


@pytest.mark.parametrize(("line", "old", "new"), OLD_NAMES)
def test_old_name_is_answered_with_the_new_one(probprompt: Command, line: str, old: str, new: str) -> None:
    message = error(probprompt(*line.split()))
    assert f"{old}' is now {new}." in message
    if new.startswith("'probprompt"):  # the new name exists
        assert " ".join(new.strip("'").split()[:3]) in COMMANDS or " ".join(new.split()[:2]).strip("'") in COMMANDS
    elif new.startswith("'--"):
        command = COMMANDS[f"probprompt {line.removesuffix(old).strip()}"]
        assert new.strip("'").split()[0] in {name for param in command.params for name in param.opts}


def test_old_command_with_old_option_names_both(probprompt: Command) -> None:
    message = error(probprompt("rollback", "my-model", "--to=2"))
    assert "'probprompt model rollback'" in message and "'probprompt model rollback MODEL VERSION'" in message
    assert "--to" not in error(probprompt("model", "rollback", "absent", "2"))


@pytest.mark.parametrize(
    ("what", "listed"),
    [
        ("methods", list(methods.registered())),
        ("benchmarks", ["emoji-r", "FOLDER", "5 tasks"]),
        ("backbones", ["demo", "sup1k", "sup21k", "dino1k", "local"]),
        ("presets", list(presets.NAMES)),
    ],
)
def test_names_are_listed(probprompt: Command, what: str, listed: list[str]) -> None:
    answer = probprompt("list", what)
    assert answer.code == 0 and all(name in answer.out for name in listed)
    assert max(map(len, answer.out.splitlines()[:-1])) <= 80


def test_kinds_are_listed_with_counts(probprompt: Command) -> None:
    assert "'methods'" in error(probprompt("list", "method"))
    rows = [line.split() for line in probprompt("list").out.splitlines()]
    assert ["methods", str(len(methods.registered()))] in rows and ["presets", "4"] in rows


def test_name_in_a_narrow_listing_is_never_truncated(probprompt: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "a", "vit_small_patch14_reg4_dinov2.lvd142m_and_a_tag_that_goes_on_and_on"
    words = "what it is, in more words than a narrow terminal has room for next to such a name"
    items = [pretrained.Listing(name, words, "hub:x", "mit", True, "the cache", 10**8) for name in names]
    monkeypatch.setattr(pretrained, "known", lambda: items)
    answer = probprompt("list", "backbones")
    assert names[1] in answer.out.split() and "…" not in answer.out and answer.out.count("100.0 MB, the cache") == 2
    assert max(map(len, answer.out.splitlines()[:-1])) <= 80


def test_train_learns_a_folder_of_images(probprompt: Command, pictures: Path) -> None:
    answer = probprompt("train", pictures, "--tasks", 3, *TINY, "--set", "samples=2", "--set", "blocks=[0]")
    assert answer.code == 0 and answer.err == ""
    run = Run.open(Path("runs/pictures-probprompt-s0"))
    assert run.finished and f"Wrote {run.report}." in answer.out and run.report.exists()
    lines = answer.out.splitlines()
    assert lines[0] == "reading images: done"
    assert re.match(rf"task 1 of 3: done, average accuracy {run.matrix[0, 0]:.1f} ?%", lines[1])
    assert re.search(rf"^task 3 +{run.matrix[2, 2]:.1f}$", answer.out, re.MULTILINE) and has_row(answer.out, run)


def test_tasks_by_number_sizes_or_file(
    probprompt: Command, asked: list[RunConfig], pictures: Path, tmp_path: Path
) -> None:
    lines, lists = tmp_path / "tasks.txt", tmp_path / "tasks.json"
    lines.write_text("# three\nclass5, class1\nclass0,class2\nclass3,class4\n")
    lists.write_text('[["class5", "class1"], ["class0", "class2"], ["class3", "class4"]]')
    for tasks in ("3", "2,2,2", lines, lists):
        assert probprompt("train", pictures, "--tasks", tasks).code == 0
    named = (("class5", "class1"), ("class0", "class2"), ("class3", "class4"))
    assert [config.data.tasks for config in asked] == [3, (2, 2, 2), named, named]


def test_one_seed_sets_all_three_and_each_can_be_set(probprompt: Command, asked: list[RunConfig]) -> None:
    for options in ("--seed 7", "--set seeds.order=1", "--seed 7 --set seeds.init=2"):
        assert probprompt("train", *options.split()).code == 0
    seeds = [(config.seeds.order, config.seeds.init, config.seeds.data) for config in asked]
    assert seeds == [(7, 7, 7), (1, 0, 0), (7, 2, 7)]


def test_settings_go_over_options_over_the_file(probprompt: Command, asked: list[RunConfig], tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        'evaluation_batch_size = 5\n[training]\nepochs = 3\nbatch_size = 4\nhead_lr = 0.5\n[data]\ntasks = "2,2,2"\n'
        '[method]\nname = "probprompt"\nsamples = 9\n'
    )
    assert probprompt("train", "--config", config, "--epochs", 6, "--batch-size", 7, "--set", "batch_size=8").code == 0
    assert probprompt("train", "--config", config, "--method", "linear-probe", "--set", "flip=false").code == 0
    first, second = asked
    assert (first.training.epochs, first.training.batch_size, first.training.head_lr) == (6, 8, 0.5)
    assert (
        first.evaluation_batch_size == 5 and first.data.tasks == (2, 2, 2) and first.method.model_dump()["samples"] == 9
    )
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
def test_presets_of_methods(
    probprompt: Command, asked: list[RunConfig], preset: str, method: str, benchmark: str
) -> None:
    assert probprompt("train", benchmark, "--method", method, "--preset", preset).code == 0
    (config,) = asked
    assert config == parse_config(presets.settings(preset, method, benchmark))
    assert (config.preset, config.method.name, config.data.benchmark) == (preset, method, benchmark)
    assert config != parse_config({"preset": preset, "method": method, "data": {"benchmark": benchmark}})


def test_preset_from_option_or_file(
    probprompt: Command, asked: list[RunConfig], tmp_path: Path, pictures: Path
) -> None:
    config = tmp_path / "config.toml"
    given = '[method]\nname = "apt"\nema = 0.5\n[training]\nbatch_size = 3\n'
    config.write_text(f'preset = "ridge"\n[data]\nbenchmark = "{pictures}"\n{given}')
    over = {"method": {"name": "apt", "ema": 0.5}, "training": {"batch_size": 3}}
    assert probprompt("train", "--preset", "matched").code == 0
    assert probprompt("train", "--config", config).code == 0
    assert probprompt("train", "--preset", "published", "--config", config).code == 0
    first, second, third = asked
    assert first == parse_config(presets.settings("matched", "probprompt", "emoji-r"))
    assert second == parse_config(merge(presets.settings("ridge", "apt", str(pictures)), over))
    assert third == parse_config(merge(presets.settings("published", "apt", str(pictures)), over))
    assert third.training.augmentation == "autoaugment+crop" and third.training.batch_size == 3
    assert (second.preset, third.preset) == ("ridge", "published")


@pytest.mark.parametrize("preset", ["ridge", "flagship"])
def test_settings_of_the_head_that_the_preset_chooses(preset: str, probprompt: Command, asked: list[RunConfig]) -> None:
    assert probprompt("train", "emoji-r", "--preset", preset, "--set", "head.projections=50").code == 0
    assert asked[0].head == RidgeSettings(
        **{**presets.settings(preset, "probprompt", "emoji-r")["head"], "projections": 50}
    )
    refused = probprompt("train", "emoji-r", "--preset", "matched", "--set", "head.projections=50")
    assert refused.code == 2 and "head.projections does not apply to head.kind=linear, only to ridge" in refused.err


def test_options_and_assignments_go_over_the_preset(probprompt: Command, asked: list[RunConfig]) -> None:
    arguments = ("--epochs", 3, "--tasks", "10,10", "--seed", 4, "--backbone", "sup1k", "--validate")
    assignments = ("batch_size=7", "alignment.lr=0.5", "head.kind=lda", "samples=2", "initial_std=0.7", "clip=none")
    named = [part for assignment in assignments for part in ("--set", assignment)]
    assert probprompt("train", "emoji-r", "--preset", "flagship", *arguments, *named).code == 0
    (config,) = asked
    over = {
        "training": {"epochs": 3, "batch_size": 7, "clip": None},
        "data": {"tasks": (10, 10), "validation": 0.2},
        "seeds": dict.fromkeys(("order", "init", "data"), 4),
        "backbone": {"name": "sup1k"},
        "alignment": {"lr": 0.5},
        "head": {"kind": "lda"},
        "method": {"samples": 2, "initial_std": 0.7},
    }
    preset = presets.settings("flagship", "probprompt", "emoji-r")
    assert config == parse_config(merge(preset, over)) != parse_config(preset)
    assert config.method.model_dump()["relevance_temperature"] == "dim", "what is not named stays the preset's"


def test_coda_prompt_shares_100_components_among_the_tasks() -> None:
    for tasks, components in ((None, 10), (5, 20), (20, 5)):
        config = parse_config(presets.settings("published", "coda-prompt", "imagenet-r", tasks))
        assert config.method.model_dump()["components_per_task"] == components
        assert config.data.tasks == (tasks or 10)


def test_a_grid_is_run_and_its_runs_are_tabulated_again(probprompt: Command, pictures: Path) -> None:
    grid = ("--methods", "linear-probe,nearest-mean", "--benchmarks", pictures, "--seeds", "1", "--presets", "custom")
    settings = ("tasks=2", "backbone.name=test_vit", "weights=random", "image_size=32", "training.epochs=1")
    named = [part for assignment in settings for part in ("--set", assignment)]
    answer = probprompt("compare", *grid, *named, "--out", "grid", "--device", "cpu")
    assert answer.code == 0 and answer.err == "" and "[2/2]" in answer.out
    runs = sorted(path.parent for path in Path("grid").rglob("run.json"))
    assert len(runs) == 2 and all(Run.open(run).finished for run in runs)
    table = answer.out[answer.out.rindex("method ") :]
    again = probprompt("compare", *grid, *named, "--out", "grid", "--tables-only")
    assert again.code == 0 and again.out.endswith(table) and "[2/2]" not in again.out
    tables = probprompt("compare", "--runs", runs[0], "--runs", runs[1], "--out", "tables")
    assert tables.code == 0 and "Wrote tables" in tables.out
    wrong = probprompt("compare", "--methods", "apd", "--benchmarks", pictures, "--out", "other")
    assert "'apt'" in error(wrong) and not Path("other").exists()


def test_unreadable_images_are_found_or_skipped(probprompt: Command, pictures: Path, tmp_path: Path) -> None:
    images, broken = (Path(shutil.copytree(pictures, tmp_path / name)) for name in ("images", "broken"))
    for path in broken.rglob("*.png"):
        path.write_text("this is no image")
    (images / "class2" / "4.png").write_bytes((images / "class2" / "4.png").read_bytes()[:60])
    (images / "class0" / "note.jpg").write_text("no image")
    arguments = ("train", images, "--test", broken, "--validate", "--tasks", 2, *PROBE, "--out", "run")
    message = error(probprompt(*arguments))
    assert all(part in message for part in ("--skip-unreadable", "class2/4.png: ", "class0/note.jpg: "))
    assert not Path("run").exists()
    answer = probprompt(*arguments, "--skip-unreadable")
    assert answer.code == 0 and "held-out training images" in answer.out
    assert "Skipped class2/4.png (unreadable)." in answer.out
    record = Run.open(Path("run")).record
    assert sorted(record.skipped) == ["class0/note.jpg", "class2/4.png"] and record.evaluated_on == "validation"


def test_options_are_recorded_and_runs_are_reported(probprompt: Command, pictures: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tasks.txt").write_text("class5,class1\nclass0,class2,class3,class4\n")
    arguments = ("--tasks", tmp_path / "tasks.txt", "--seed", 3, "--track", "tensorboard", "--preset", "matched")
    answer = probprompt("train", pictures, *arguments, *PROBE, "--out", "one")
    assert answer.code == 0 and answer.err == "" and "Not comparable" not in answer.out
    run = Run.open(Path("one"))
    assert run.record.stream.tasks == [["class5", "class1"], ["class0", "class2", "class3", "class4"]]
    assert run.config.preset == "matched" and run.config.training.epochs == 1 and run.config.training.batch_size == 8
    assert [path.name.startswith("events.out") for path in Path("one/tensorboard").iterdir()] == [True]
    assert probprompt("train", "--resume", "one").code == 0

    batchwise = ("--method", "l2p", *TINY, "--set", "batchwise=true", "--out", "two")
    answer = probprompt("train", pictures, "--tasks", 2, *batchwise)
    (mark,) = Run.open(Path("two")).record.marks
    assert answer.code == 0 and f"Not comparable: {mark}\n" in answer.out and mark.startswith("batchwise: ")

    Path("one/report.html").unlink()
    assert probprompt("report", "one") == (0, "Wrote one/report.html.\n", "")
    assert Path("one/report.html").exists()
    assert probprompt("report", "one", "two") == (0, "Wrote report.html.\n", "")
    page = Path("report.html").read_text(encoding="utf-8")
    assert "linear-probe" in page and "l2p" in page and "preset=matched" in page
    assert probprompt("report", "two", "--out", "deep/page.html").code == 0
    assert Path("deep/page.html").exists()
    assert "run.json" in error(probprompt("report", Path("deep")))


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstration with few pictures and one epoch."""
    preset, (images, rows) = presets.settings, emoji_r.read()
    seen = Counter[tuple[str, str]]()
    kept = [
        index for index, row in enumerate(rows) if not seen.update([side := (row.label, row.split)]) and seen[side] < 4
    ]
    monkeypatch.setattr(emoji_r, "read", lambda: (images[kept], [rows[index] for index in kept]))
    small = {"data": {"tasks": 2}, "training": {"epochs": 1, "batch_size": 24}}
    monkeypatch.setattr(presets, "settings", lambda *given: merge(preset(*given), small))


def test_the_demo_compares_without_a_network(
    probprompt: Command, small_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    answer = probprompt("demo", "--seed", 2)
    assert answer.code == 0 and answer.err == ""
    home = Path("runs/demo")
    names = [method for method, _, _ in presets.DEMO]
    assert names == ["probprompt", "vq-prompt", "ranpac"]
    runs = [Run.open(home / name) for name in names]
    assert all(run.finished and run.config.seeds.data == 2 for run in runs)
    assert [(run.config.method.name, run.config.preset) for run in runs] == [row[:2] for row in presets.DEMO]
    assert "docs/demo.md" in answer.out and all(has_row(answer.out, run) for run in runs)
    assert "Wrote runs/demo/report.html." in answer.out and (home / "report.html").exists()
    message = error(probprompt("demo", "--out", home))
    assert "runs/demo already exists" in message and "--out" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--method probpromt", "'probprompt'"),
        ("--set training.epoch=3", "'training.epochs'"),
        ("--set smaples=3", "'method.samples'"),
        ("--set epochs", "=value"),
        ("--set training.epochs=many", "training.epochs: "),
        ("--track tensorbord", "'tensorboard'"),
        ("--track wandb", "pip install 'probprompt[wandb]'"),
        ("--device cdua", "'cuda'"),
        ("--tasks junk", "'junk'"),
        ("--tasks 4,4", "[4, 4] add up to 8, expected 6 classes"),
        ("--tasks 7", "1 to 6 tasks"),
        ("--weights gone.safetensors", "gone.safetensors"),
        ("--backbone vit_huge_9000", "'vit_huge_9000'"),
        ("--config gone.toml", "gone.toml"),
        ("--out taken", "taken is not empty"),
        ("--preset publishd", "'published'"),
        ("--preset best", "flagship, matched, published, ridge"),
        ("--preset flagship --method l2p", "'matched'"),
        ("--preset ridge --method linear-probe", "'matched'"),
        ("--preset matched --method l2q", "'l2p'"),
        ("--resume run --preset matched", "--preset"),
    ],
)
def test_wrong_values_give_a_clear_message(
    probprompt: Command, pictures: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    Path("taken").mkdir()
    Path("taken/thesis.tex").write_text("mine")
    answer = probprompt("train", pictures, "--tasks", 3, *TINY, "--out", "run", *arguments.split())
    assert message in error(answer)
    assert sorted(str(path) for path in Path().rglob("*")) == ["taken", "taken/thesis.tex"]


def test_an_unknown_benchmark_is_answered_with_the_nearest(probprompt: Command) -> None:
    for name, hint in (("emojir", "Did you mean 'emoji-r'?"), ("xyz", "Expected one of: cifar100, cub200, emoji-r")):
        message = error(probprompt("train", name))
        assert repr(name) in message and hint in message


def test_wrong_options_are_answered_with_the_usage(probprompt: Command) -> None:
    for arguments in (("train", "--epochs", "0"), ("train", "--epoks", "3"), ("trian",)):
        answer = probprompt(*arguments)
        assert answer.code == 2 and "Usage" in answer.err and "Traceback" not in answer.err


def test_a_mistake_in_a_process_ends_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "probprompt", "data", "check", "nowhere"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.startswith("error: nowhere")
    assert ended.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_interrupt_shows_how_to_continue(
    probprompt: Command, pictures: Path, small_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    prepare = train.prepare
    monkeypatch.setattr(train, "prepare", interrupt)
    assert probprompt("train", pictures, "--out", "run") == (130, "", "Interrupted. Nothing was written yet.\n")
    monkeypatch.setattr(train, "prepare", prepare)
    monkeypatch.setattr(train.RunLoop, "run_all", interrupt)
    for arguments in ((pictures, "--tasks", 2, *TINY, "--out", "my run"), ("--resume", "my run")):
        answer = probprompt("train", *arguments)
        assert answer.code == 130 and answer.err.endswith("probprompt train --resume 'my run'\n")
    assert probprompt("demo").err.endswith("probprompt train --resume runs/demo/probprompt\n")


def screen(terminal: bool = False) -> tuple[Screen, io.StringIO]:
    """A screen of 80 columns, and its output."""
    output, terminal_screen = io.StringIO(), Screen()
    terminal_screen.console = Console(
        file=output, width=80, force_terminal=terminal, highlight=False, legacy_windows=False
    )
    return terminal_screen, output


def pretended(tasks: int, name: str = "probprompt") -> Run:
    """The parts of a run that a screen reads."""
    matrix = np.full((tasks, tasks), np.nan)
    for task in range(tasks):
        matrix[task, task:] = 100.0 - np.arange(tasks - task)
    record = RunRecord(config={"method": {"name": name}})
    values = {"matrix": matrix, "record": record, "metrics": metrics.summarize(matrix), "report": "r.html"}
    return cast(Run, SimpleNamespace(**values))


@pytest.mark.parametrize(
    ("tasks", "rows"),
    [
        (10, [["after", *map(str, range(1, 11))], ["task", "1", *(f"{100.0 - lost:.1f}" for lost in range(10))]]),
        (20, [["task", "1", "100.0", "81.0"], ["task", "20", "100.0", "100.0"]]),  # too wide: first and last accuracy
    ],
)
def test_the_matrix_fits_on_a_screen_of_eighty_columns(tasks: int, rows: list[list[str]]) -> None:
    display, output = screen()
    display.show(pretended(tasks))
    lines = output.getvalue().splitlines()
    assert all(row in map(str.split, lines) for row in rows)
    assert max(map(len, lines)) <= 80 and "…" not in output.getvalue()


def test_runs_are_compared_in_one_table() -> None:
    display, output = screen()
    display.compare([pretended(3), pretended(3, "linear-probe")])
    assert output.getvalue().count("FAA  ") == 1
    assert re.search(r"probprompt +99\.00 .*\nlinear-probe +99\.00 ", output.getvalue())


def test_names_are_printed_as_is(capsys: pytest.CaptureFixture[str]) -> None:
    display = Screen()
    for text in ("runs/[bold]x[/bold]", "runs/:cat:", "a" * 200):
        display.print(text)
        assert capsys.readouterr().out == f"{text}\n"
    display.listing(("name",), [("[red]:cat:",)])
    assert "[red]:cat:" in capsys.readouterr().out


def test_every_stage_keeps_its_bar_on_a_terminal() -> None:
    display, output = screen(terminal=True)
    for task in (1, 2):
        with display.stage(f"task {task} of 2", 4):
            display.advance(4)
            display.describe(f"average accuracy {task}0.0 %")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    final = [line.rpartition("\r")[2] for line in plain.splitlines()]
    for task in (1, 2):
        assert any(re.search(rf"^task {task} of 2 +━+ 4/4 .* average accuracy {task}0\.0 %$", line) for line in final)
