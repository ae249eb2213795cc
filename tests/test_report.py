"""The page of a run: its numbers, its sections, and what it rejects."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from shlex import split
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from html_page import Page
from probprompt import presets
from probprompt.config import apply_assignments, parse_config
from probprompt.errors import UserError
from probprompt.evaluation import metrics
from probprompt.report.pages import repeat_command, save_overview, write_report
from probprompt.runs.run import Run, RunRecord

HOSTILE = ["<script>alert(1)</script>", "a & b", "$x^2$ $", 'q" onload="x', "nul\x00\x1b", "\ud800", "猫 🐱", "t\tn\n"]


def accuracies(tasks: int, steps: int, start: float, drop: float) -> dict[str, Any]:
    matrix = np.full((tasks, tasks), np.nan)
    for task in range(steps):
        for step in range(task, steps):
            matrix[task, step] = round(start + 1.37 * math.sin(7 * task) - drop * (step - task) ** 0.5, 3)
    return {"matrix": metrics.to_json(matrix), **metrics.summarize(matrix), "finished_steps": steps}


def diagnostics(names: list[str]) -> dict[str, Any]:
    number = len(names)
    similarity = [[1.0 if i == j else 0.3 + 0.1 * math.sin(i * j) for j in range(number)] for i in range(number)]
    return {
        "similarity": {
            "labels": names,
            "matrix": similarity,
            "mean": 0.314,
            "initial_mean": 0.021,
            "per_block": {"0": 0.2, "1": 0.43},
            "effective_rank": 6.5,
            "initial_effective_rank": 9.5,
        },
        "relevance": {
            "blocks": [0, 1],
            "usage": [[0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]],
            "entropy": [1.0, 0.678],
            "max_weight": [0.4, 0.9],
        },
        "queries": {
            "embedding": "t-SNE",
            "points": [[math.cos(k), math.sin(k)] for k in range(12)],
            "labels": [k % 2 for k in range(12)],
            "names": names[:2],
            "task": 1,
        },
    }


def make_run(
    folder: Path,
    *,
    tasks: int = 3,
    steps: int | None = None,
    start: float = 92.0,
    drop: float = 2.0,
    prompts: bool = True,
    names: list[str] | None = None,
    events: bool = True,
    **changes: Any,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = names or [f"class {number}" for number in range(2 * tasks)]
    each = len(names) // tasks
    steps = steps or tasks
    record = {
        "format": 1,
        "name": folder.name,
        "created": "2026-03-14T09:21:07+00:00",
        "status": "finished" if steps == tasks else "running",
        "config": {
            "data": {"benchmark": "emoji-r"},
            "method": {"name": "probprompt" if prompts else "linear-probe"},
            "training": {"epochs": 4, "flip": True},
            "seeds": {"order": 0, "init": 1, "data": 2},
        },
        "backbone": {"name": "vit_tiny", "source": "timm", "sha256": "ab" * 32, "parameters": 5_000_000},
        "preprocessing": {"image_size": 224, "mean": [0.5, 0.5, 0.5]},
        "stream": {
            "classes": names,
            "tasks": [names[each * task : each * (task + 1)] for task in range(tasks)],
            "order_hash": "cd" * 32,
            "split_hash": "ef" * 32,
            "train_images": [120] * tasks,
            "test_images": [30] * tasks,
        },
        "versions": {"torch": "2.11.0"},
        "hardware": {"device": "cpu"},
        "trainable_parameters": 123_456,
        "model_mb": {"use": 0.125, "learn": 32.04},
        "evaluated_on": "test",
        "skipped": [],
        "time": {"total_s": 754.0, "training_s": 600.0},
        "peak_memory_mb": 1843.0,
    } | changes
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "accuracy.json").write_text(json.dumps(accuracies(tasks, steps, start, drop)))
    if prompts:
        (folder / "diagnostics.json").write_text(json.dumps(diagnostics(names)))
    if events:
        lines: list[dict[str, Any]] = [{"event": "start"}]
        lines += [
            {"event": "epoch", "task": task + 1, "epoch": epoch + 1, "loss": 2.0 / (epoch + 1), "accuracy": 50.0}
            for task in range(steps)
            for epoch in range(4)
        ]
        (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def report(*runs: Path) -> Page:
    return Page(write_report(runs, runs[0] / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(root: Path) -> list[Path]:
    return [make_run(root / "probprompt"), make_run(root / "probe", start=88.0, drop=5.0, prompts=False)]


@pytest.fixture(scope="module")
def one(runs: list[Path]) -> Page:
    return report(runs[0])


@pytest.fixture(scope="module")
def hostile(root: Path) -> Page:
    return report(make_run(root / "hostile", tasks=2, names=HOSTILE, name="<b>&", skipped=["a/<i>.png"]))


@pytest.fixture(scope="module")
def long(root: Path) -> Page:
    return report(make_run(root / "long", tasks=11, drop=1.0, prompts=False, events=False))


@pytest.mark.parametrize("name", ["one", "hostile", "long"])
def test_page_is_accessible_and_needs_nothing_from_elsewhere(name: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(name)
    page.check()
    hidden = [svg for svg in page.all("svg") if svg.get("aria-hidden")]
    assert len(page.all("svg")) == len(page.all("svg", **{"class": "plot"})) + len(hidden)


def test_numbers_are_those_of_the_run(one: Page, runs: list[Path]) -> None:
    accuracy = json.loads((runs[0] / "accuracy.json").read_text())
    cells = [cell for row in accuracy["matrix"] for cell in row if cell is not None]
    averages = [sum(row[step] for row in accuracy["matrix"][: step + 1]) / (step + 1) for step in range(3)]
    shown = [text for text in one.within("td") if re.fullmatch(r"\d+\.\d", text)]
    assert shown == [f"{value:.1f}" for value in cells + averages]
    figures = one.within("b")
    for key in ("FAA", "CAA"):
        assert f"{accuracy[key]:.1f}%" in figures
    assert f"{accuracy['forgetting']:.1f}" in figures
    assert f"{accuracy['FAA']:.1f}% on test images (random guess: 16.7%)" in one.text
    assert f"lost {accuracy['forgetting']:.1f} points" in one.text


def test_sections_and_their_numbers(one: Page) -> None:
    sections = ["Average accuracy", "Task by task", "Accuracy matrix", "Prompt similarity"]
    sections += ["Use of the prompt distributions", "Queries of task 1", "Training loss", "Record"]
    assert one.headings[:9] == ["probprompt", *sections]
    for text in (
        "0.31 0.02 at initialization",
        "6.5 9.5 at initialization",
        "Mean entropy 0.84 :",
        "Even use would be 25% each",
        "12 min 34 s",
        "2.5% of the backbone; 125 kB to predict, 32.0 MB to continue training",
    ):
        assert text in one.text
    for text in ("Comparison", "skipped file", "Unfinished", "Evaluated on validation"):
        assert text not in one.text
    for digest in ("ab" * 32, "cd" * 32, "ef" * 32):  # shortened, and whole in the title
        assert one.all("code", title=digest) and digest[:12] + "…" in one.within("code")
    assert "training.epochs" in one.within("th") and {"2.11.0", "class 0, class 1"} <= set(one.within("td"))


def test_page_of_an_unfinished_run_without_prompts(root: Path) -> None:
    page = report(make_run(root / "half", steps=2, start=99.0, prompts=False, evaluated_on="test"))
    assert page.headings.count("Accuracy matrix") == page.headings.count("Training loss") == 1
    assert not {"Prompt similarity", "Use of the prompt distributions", "Queries of task 1"} & set(page.headings)
    assert "Unfinished: 2 of 3 tasks" in page.within("a") and "after 2 of 3 tasks" in page.text


def test_page_of_a_single_task_on_validation_images(root: Path) -> None:
    page = report(make_run(root / "validated", tasks=1, evaluated_on="validation", skipped=["a/b.png", "c.png"]))
    assert "Evaluated on validation images" in page.within("a") and page.all("dt", id="badge-1")
    assert "2 skipped files" in page.within("summary") and "a/b.png" in page.within("code")
    assert not {"Average accuracy", "Task by task"} & set(page.headings) and "Forgetting" not in page.within("dt")


def test_long_runs_show_every_number(long: Page) -> None:
    shown = [text for text in long.within("td") if re.fullmatch(r"\d+\.\d|100", text)]
    assert len(shown) == 11 * 12 // 2 + 11
    assert len(long.all("figure", **{"class": "panel"})) == 11
    assert long.all("table", **{"class": "matrix dense"}) and "\n.matrix.dense { font-size: " in long.raw
    assert "Training loss" not in long.headings


def test_hostile_names_stay_text(hostile: Page) -> None:
    assert "<b>&" in hostile.within("h1")
    assert "<script>alert(1)</script>" in hostile.within("span")  # legend of the queries
    labels = hostile.within("text")
    for name in ("<script>alert(1…", "a & b", "$x^2$ $", 'q" onload="x', "nul��", "�", "猫 🐱", "t n"):
        assert name in labels
    assert "a/<i>.png" in hostile.within("code")


def test_pages_ignore_the_settings_of_matplotlib(one: Page, runs: list[Path], tmp_path: Path) -> None:
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30.0, "svg.fonttype": "path"}):
        again = write_report([runs[0]], tmp_path / "again.html")
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert again.read_text(encoding="utf-8") == one.raw


def test_last_event_of_an_epoch_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", prompts=False)
    lines = [
        {"event": "epoch", "task": t, "epoch": e, "loss": v} for t, e, v in ((1, 1, 3.0), (1, 2, 9.0), (1, 2, 1.0))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "events.jsonl").write_text(text + '{"event": "epo')
    assert Run.open(run).losses == [[(1, 3.0), (2, 1.0)]]
    (run / "events.jsonl").write_text('{"torn\n' + text)
    with pytest.raises(UserError, match=r"events\.jsonl is malformed: line 1 is not JSON"):
        _ = Run.open(run).losses


def change(name: str, **changes: Any) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        path = run / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (lambda run: (run / "run.json").unlink(), r"run is not a run: it has no run\.json"),
    (lambda run: (run / "run.json").write_text("{"), r"run\.json"),
    (lambda run: (run / "run.json").write_bytes(b"\xff"), r"run\.json"),
    (lambda run: (run / "run.json").write_text("[]"), r"run has format None"),
    (change("run.json", format=2), r"run has format 2"),
    (change("run.json", stream={"tasks": []}), r"run\.json is malformed: stream\.tasks: "),
    (lambda run: (run / "accuracy.json").unlink(), "no finished task yet"),
    (change("accuracy.json", finished_steps=0, FAA=None), "no finished task yet"),
    (change("accuracy.json", FAA="high"), r"accuracy\.json is malformed: FAA: "),
    (change("accuracy.json", FAA=12.5), r"accuracy\.json is malformed: FAA is 12\.5, but the matrix gives"),
    (change("accuracy.json", matrix=[[1.0, 2.0]]), r"accuracy\.json is malformed: the matrix is not square"),
    (change("accuracy.json", finished_steps=4), r"finished_steps is 4, but the matrix has 3 tasks"),
    (change("accuracy.json", matrix=[[None] * 3] * 3), r"no accuracy on task 1 after step 1"),
    (change("run.json", stream={"tasks": [["a"]]}), r"accuracy\.json has 3 tasks, but run\.json has 1"),
    (change("diagnostics.json", relevance={"blocks": [0]}), r"diagnostics\.json is malformed: relevance\."),
    (
        change("diagnostics.json", similarity={"labels": ["a"], "matrix": [[1.0, 2.0]], "mean": 1.0}),
        r"diagnostics\.json is malformed: similarity: the matrix does not have",
    ),
    (
        change("diagnostics.json", queries={"points": [[0.0, 0.0]], "labels": [3], "names": ["a"]}),
        r"diagnostics\.json is malformed: queries: points, labels and names",
    ),
    (lambda run: (run / "events.jsonl").write_text('{"event": "epoch"}\n'), r"events\.jsonl is malformed: task: "),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_corrupted_files_are_named(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    spoil(run)
    with pytest.raises(UserError, match=message):
        write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_wrong_requests_are_rejected(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No run was given"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(UserError, match="missing does not exist"):
        write_report([tmp_path / "missing"], tmp_path / "report.html")
    with pytest.raises(UserError, match=r"overview\.gif.*\.png or \.svg"):
        save_overview(runs, tmp_path / "overview.gif")
    with pytest.raises(UserError, match="different tasks"):
        save_overview([runs[0], make_run(tmp_path / "b", tasks=2, prompts=False)], tmp_path / "overview.png")
    with pytest.raises(UserError, match="benchmarks differ: cub200, emoji-r"):
        other = {"data": {"benchmark": "cub200"}, "method": {"name": "lda"}, "seeds": {"order": 0}}
        save_overview([runs[0], make_run(tmp_path / "c", config=other)], tmp_path / "overview.png")
    half = make_run(tmp_path / "half", steps=2)
    with pytest.raises(UserError, match=r"half is not finished"):
        write_report([runs[1], half], tmp_path / "report.html")


def test_several_runs_are_compared(tmp_path: Path) -> None:
    """With their presets in one group of columns."""
    folders = []
    for method, preset in (("probprompt", "flagship"), ("ranpac", "matched"), ("linear-probe", "matched")):
        config = presets.settings(preset, method, "emoji-r") | {"seeds": {"order": 0}}
        folders.append(make_run(tmp_path / method, start=80.0 + len(method) / 2, config=config))
    page = report(*folders)
    page.check()
    shown = dict.fromkeys(label for label in page.within("th") if "preset=" in label)
    assert list(shown) == [
        f"{p.name}, preset={q}" for p, q in zip(folders, ("flagship", *["matched"] * 2), strict=True)
    ]
    assert "linear-probe, preset=matched reaches" in page.text and page.within("h1") == ["3 methods on emoji-r"]
    save_overview(folders, tmp_path / "overview.svg")


def test_command_repeats_the_settings_of_a_run() -> None:
    config = presets.settings("flagship", "probprompt", "emoji-r", 5) | {"backbone": {"name": "demo", "image_size": 32}}
    command = split(repeat_command(RunRecord(config=config | {"seeds": dict.fromkeys(("order", "init", "data"), 3)})))
    assert command[3:11] == ["--method", "probprompt", "--preset", "flagship", "--tasks", "5", "--seed", "3"]
    given = {"data": {"benchmark": "emoji-r", "tasks": 5}, "method": {"name": "probprompt"}}
    repeated = presets.resolve("flagship", apply_assignments(given, command[12::2]))
    assert command[11:13:2] == ["--set"] and parse_config(repeated) == parse_config(config)


def test_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=1, prompts=False, events=False)
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "taken", tmp_path / "file" / "report.html"):
        with pytest.raises(UserError, match=rf"write .*{path.name}"):
            write_report([run], path)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken", "file"}
    written = write_report([run], tmp_path / "new" / "report.html")
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]


def test_overview_figure(runs: list[Path], tmp_path: Path) -> None:
    figure = save_overview(runs, tmp_path / "overview.png").read_bytes()
    assert figure.startswith(b"\x89PNG")
    width, height = int.from_bytes(figure[16:20]), int.from_bytes(figure[20:24])
    assert width > 2000 and 2 < width / height < 4
    first = save_overview([runs[1]], tmp_path / "overview.svg").read_bytes()
    assert first == save_overview([runs[1]], tmp_path / "again.svg").read_bytes()
    drawing = ElementTree.fromstring(first)
    assert not list(drawing.iter("{http://www.w3.org/2000/svg}text"))  # letters are paths, so no font is needed


def variables(css: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css))


def test_colors_are_readable_in_light_and_dark() -> None:
    from probprompt.report import figures, pages

    template = (Path(pages.__file__).parent / "report.html.jinja").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", template, flags=re.DOTALL)[:2]
    for theme in (variables(light), variables(dark)):
        assert set(figures.THEME.values()) <= set(theme)
        for name in ("ink", "muted", "accent", *(f"series-{k}" for k in range(len(figures.PALETTE)))):
            assert figures.contrast(theme[name], theme["page"]) >= 4.5, name
        assert figures.contrast(theme["warn"], theme["warn-tint"]) >= 4.5
    for color, name in figures.THEME.items():
        assert name == "page" or variables(light)[name] == color
    for value in range(101):
        assert figures.contrast(*figures.shade(value, 0.0, 100.0)) >= 4.5
    assert set(figures.MARKERS) == set(figures.SHAPES)
