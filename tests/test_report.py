"""The page of a run: its numbers, its sections, and what it rejects."""

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest

from probprompt.errors import UserError
from probprompt.report import save_overview, write_report
from report_cases import Matrix, Page, write_run

HOSTILE = ["<script>alert(1)</script>", "a & b", "$x^2$ $", 'q" onload="x', "nul\x00\x1b", "\ud800", "猫 🐱", "t\tn\n"]


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
    names = names or [f"class {number}" for number in range(2 * tasks)]
    each = len(names) // tasks
    steps = steps or tasks
    matrix: Matrix = [[None] * tasks for _ in range(tasks)]
    for task in range(steps):
        for step in range(task, steps):
            matrix[task][step] = round(start + 1.37 * math.sin(7 * task) - drop * (step - task) ** 0.5, 3)
    record = {
        "status": "finished" if steps == tasks else "running",
        "config": {
            "data": {"benchmark": "emoji-r"},
            "method": {"name": "probprompt" if prompts else "linear-probe"},
            "training": {"epochs": 4, "flip": True},
        },
        "backbone": {"name": "vit_tiny", "sha256": "ab" * 32, "parameters": 5_000_000},
        "stream": {
            "tasks": [names[each * task : each * (task + 1)] for task in range(tasks)],
            "order_hash": "cd" * 32,
            "split_hash": "ef" * 32,
        },
        "versions": {"torch": "2.11.0"},
        "trainable_parameters": 123_456,
        "model_mb": {"use": 0.125, "learn": 32.04},
        "time": {"total_s": 754.0},
        "peak_memory_mb": 1843.0,
    }
    write_run(folder, matrix, diagnostics(names) if prompts else {}, **record | changes)
    if events:
        lines = [
            {"event": "epoch", "task": task + 1, "epoch": epoch + 1, "loss": 2.0 / (epoch + 1), "accuracy": 50.0}
            for task in range(steps)
            for epoch in range(4)
        ]
        (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"event": "start"}, *lines]))
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


def test_numbers_are_those_of_the_run(one: Page, runs: list[Path]) -> None:
    accuracy = json.loads((runs[0] / "accuracy.json").read_text())
    cells = [cell for row in accuracy["matrix"] for cell in row if cell is not None]
    averages = [sum(row[step] for row in accuracy["matrix"][: step + 1]) / (step + 1) for step in range(3)]
    shown = [text for text in one.within("td") if re.fullmatch(r"\d+\.\d", text)]
    assert shown == [f"{value:.1f}" for value in cells + averages]
    figures = one.within("b")
    for key in ("FAA", "CAA"):
        assert f"{accuracy[key]:.2f}\u00a0%" in figures
    assert f"{accuracy['forgetting']:.2f}" in figures
    assert f"learned 6 classes in 3 tasks, one after another, and recognises {accuracy['FAA']:.1f} %" in one.text
    assert f"{accuracy['forgetting']:.1f} points below its best" in one.text


def test_sections_and_their_numbers(one: Page) -> None:
    one.check()
    hidden = [svg for svg in one.all("svg") if svg.get("aria-hidden")]
    assert len(one.all("svg")) == len(one.all("svg", **{"class": "plot"})) + len(hidden)
    sections = ["Average accuracy", "Task by task", "Accuracy matrix", "Prompt similarity"]
    sections += ["Use of the prompt distributions", "Queries of task 1", "Training loss", "Record"]
    assert one.headings[:9] == ["probprompt", *sections]
    for text in (
        "0.31 0.02 at initialisation",
        "6.5 9.5 at initialisation",
        "Mean entropy 0.84 :",
        "Even use would be 25 % each",
        "12 min 34 s",
        "2.5 % of the backbone's; 125 kB on disk, 32.0 MB to learn on",
    ):
        assert text in one.text
    for text in ("Comparison", "skipped file", "unfinished", "evaluated on validation"):
        assert text not in one.text
    for digest in ("ab" * 32, "cd" * 32, "ef" * 32):  # shortened, and whole in the title
        assert one.all("code", title=digest) and digest[:12] + "…" in one.within("code")
    assert "training.epochs" in one.within("th") and {"2.11.0", "class 0, class 1"} <= set(one.within("td"))


def test_page_of_an_unfinished_run_without_prompts(root: Path) -> None:
    page = report(make_run(root / "half", steps=2, start=99.0, prompts=False, evaluated_on="test"))
    assert page.headings.count("Accuracy matrix") == page.headings.count("Training loss") == 1
    assert not {"Prompt similarity", "Use of the prompt distributions", "Queries of task 1"} & set(page.headings)
    assert "unfinished: 2 of 3 tasks" in page.text and "images so far" in page.text


def test_page_of_a_single_task_on_validation_images(root: Path) -> None:
    page = report(make_run(root / "validated", tasks=1, evaluated_on="validation", skipped=["a/b.png", "c.png"]))
    assert "evaluated on validation images" in page.within("span")
    assert "2 skipped files" in page.within("summary") and "a/b.png" in page.within("code")
    assert not {"Average accuracy", "Task by task"} & set(page.headings) and "Forgetting" not in page.within("dt")


def test_long_runs_show_every_number(root: Path) -> None:
    long = report(make_run(root / "long", tasks=11, drop=1.0, prompts=False, events=False))
    long.check()
    shown = [text for text in long.within("td") if re.fullmatch(r"\d+\.\d|100", text)]
    assert len(shown) == 11 * 12 // 2 + 11
    assert len(long.all("figure", **{"class": "panel"})) == 11
    assert "Training loss" not in long.headings


def test_hostile_names_stay_text(root: Path) -> None:
    hostile = report(make_run(root / "hostile", tasks=2, names=HOSTILE, name="<b>&", skipped=["a/<i>.png"]))
    hostile.check()
    assert "<b>&" in hostile.within("h1")
    assert "<script>alert(1)</script>" in hostile.within("span")  # legend of the queries
    labels = hostile.within("text")
    for name in ("<script>alert(1…", "a & b", "$x^2$ $", 'q" onload="x', "nul��", "�", "猫 🐱", "t n"):
        assert name in labels
    assert "a/<i>.png" in hostile.within("code")


def test_runs_of_equal_names_are_numbered(runs: list[Path], tmp_path: Path) -> None:
    from probprompt.report.reading import read_runs

    twin = make_run(tmp_path / "twin", prompts=False, name="probe")
    assert [run.label for run in read_runs([*runs, twin])] == ["probprompt", "probe (1)", "probe (2)"]


def test_pages_ignore_the_settings_of_matplotlib(one: Page, runs: list[Path], tmp_path: Path) -> None:
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30.0, "svg.fonttype": "path"}):
        again = write_report([runs[0]], tmp_path / "again.html")
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert again.read_text(encoding="utf-8") == one.raw


def test_last_event_of_an_epoch_counts(tmp_path: Path) -> None:
    from probprompt.report.reading import read_run

    run = make_run(tmp_path / "run", prompts=False)
    losses = ((1, 1, 3.0), (1, 2, 9.0), (1, 2, 1.0))
    lines = [{"event": "epoch", "task": task, "epoch": epoch, "loss": loss} for task, epoch, loss in losses]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "events.jsonl").write_text(text + '{"event": "epo')
    assert read_run(run).losses == [[(1, 3.0), (2, 1.0)]]
    (run / "events.jsonl").write_text('{"torn\n' + text)
    with pytest.raises(UserError, match=r"events\.jsonl is malformed: line 1 is not JSON"):
        read_run(run)


SPOILED: list[tuple[str, bytes | dict[str, Any] | None, str]] = [
    ("run.json", None, "run is not a run folder"),
    ("run.json", b"{", r"run\.json cannot be read: "),
    ("run.json", b"\xff", r"run\.json cannot be read: "),
    ("run.json", b"[]", r"run\.json has the format None"),
    ("run.json", {"format": 2}, r"run\.json has the format 2"),
    ("run.json", {"stream": {"tasks": []}}, r"run\.json is malformed: stream\.tasks: "),
    ("accuracy.json", None, "nothing to report yet"),
    ("accuracy.json", {"finished_steps": 0, "FAA": None}, "nothing to report yet"),
    ("accuracy.json", {"FAA": "high"}, r"accuracy\.json is malformed: FAA: "),
    ("accuracy.json", {"FAA": 12.5}, r"accuracy\.json is malformed: FAA is 12\.5, but the matrix gives"),
    ("accuracy.json", {"matrix": [[1.0, 2.0]]}, r"accuracy\.json is malformed: the matrix is not square"),
    ("accuracy.json", {"finished_steps": 4}, r"finished_steps is 4, but the matrix has 3 tasks"),
    ("accuracy.json", {"matrix": [[None] * 3] * 3}, r"no accuracy on task 1 after step 1"),
    ("run.json", {"stream": {"tasks": [["a"]]}}, r"accuracy\.json has 3 tasks, but run\.json has 1"),
    ("diagnostics.json", {"relevance": {"blocks": [0]}}, r"diagnostics\.json is malformed: relevance\."),
    ("diagnostics.json", {"similarity": {"labels": ["a"], "matrix": [[1.0, 2.0]], "mean": 1.0}}, "similarity: "),
    ("diagnostics.json", {"queries": {"points": [[0.0, 0.0]], "labels": [3], "names": ["a"]}}, "queries: points"),
    ("events.jsonl", b'{"event": "epoch"}\n', r"events\.jsonl is malformed: task: "),
]


@pytest.mark.parametrize(("name", "content", "message"), SPOILED)
def test_corrupted_files_are_named(name: str, content: Any, message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    if isinstance(content, dict):
        content = json.dumps(json.loads((run / name).read_text()) | content).encode()
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_wrong_requests_are_rejected(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run was given"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(UserError, match="missing is not a run folder"):
        write_report([tmp_path / "missing"], tmp_path / "report.html")
    with pytest.raises(UserError, match=r"overview\.gif must end in \.png or \.svg"):
        save_overview(runs, tmp_path / "overview.gif")
    with pytest.raises(UserError, match="The numbers of tasks differ"):
        save_overview([runs[0], make_run(tmp_path / "b", tasks=2)], tmp_path / "overview.png")


def test_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=1, prompts=False, events=False)
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "taken", tmp_path / "file" / "report.html"):
        with pytest.raises(UserError, match=rf"{path.name} could not be written"):
            write_report([run], path)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken", "file"}
    written = write_report([run], tmp_path / "new" / "report.html")
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]


def test_overview_figure(runs: list[Path], tmp_path: Path) -> None:
    picture = save_overview(runs, tmp_path / "overview.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])
    assert width > 2000 and 2 < width / height < 4
    first = save_overview([runs[1]], tmp_path / "overview.svg").read_bytes()
    assert first == save_overview([runs[1]], tmp_path / "again.svg").read_bytes()
    drawing = ElementTree.fromstring(first)
    assert not list(drawing.iter("{http://www.w3.org/2000/svg}text"))  # letters are drawn: no font is needed


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
    for colour, name in figures.THEME.items():
        assert name == "page" or variables(light)[name] == colour
    for value in range(101):
        assert figures.contrast(*figures.shade(value, 0.0, 100.0)) >= 4.5
    assert set(figures.MARKERS) == set(figures.SHAPES)
