import ast
import doctest
import importlib
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest

from probprompt.errors import UserError
from probprompt.report import save_overview, write_report

VOID = {"meta", "link", "br", "hr", "img", "input", "col"}
HOSTILE = ["<script>alert(1)</script>", "a & b", "$x^2$ $", 'q" onload="x', "nul\x00\x1b", "\ud800", "猫 🐱", "t\tn\n"]
Matrix = list[list[float | None]]


class Page(HTMLParser):
    """What a page holds, checked for balance while it is read."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.raw = text
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute is repeated in <{tag}>"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in wanted.items())]

    def within(self, tag: str) -> list[str]:
        return [text for parent, text in self.texts if parent == tag]

    @property
    def headings(self) -> list[str]:
        return [text for parent, text in self.texts if re.fullmatch("h[1-6]", parent)]

    @property
    def text(self) -> str:
        return " ".join(text.replace("\u00a0", " ") for parent, text in self.texts if parent != "style")


def accuracies(tasks: int, steps: int, start: float, drop: float) -> dict[str, Any]:
    matrix: Matrix = [[None] * tasks for _ in range(tasks)]
    for task in range(steps):
        for step in range(task, steps):
            matrix[task][step] = round(start + 1.37 * math.sin(7 * task) - drop * (step - task) ** 0.5, 3)
    columns = [[row[step] or 0.0 for row in matrix[: step + 1]] for step in range(steps)]
    averages = [sum(column) / len(column) for column in columns]
    drops = [max(v for v in matrix[i] if v is not None) - (matrix[i][steps - 1] or 0.0) for i in range(steps - 1)]
    return {
        "matrix": matrix,
        "FAA": averages[-1],
        "CAA": sum(averages) / steps,
        "forgetting": sum(drops) / len(drops) if drops else 0.0,
        "finished_steps": steps,
    }


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
def pair(runs: list[Path]) -> Page:
    return report(*runs)


@pytest.fixture(scope="module")
def one(runs: list[Path]) -> Page:
    return report(runs[0])


@pytest.fixture(scope="module")
def hostile(root: Path) -> Page:
    return report(make_run(root / "hostile", tasks=2, names=HOSTILE, name="<b>&", skipped=["a/<i>.png"]))


@pytest.fixture(scope="module")
def long(root: Path) -> Page:
    return report(make_run(root / "long", tasks=20, drop=1.0, prompts=False, events=False))


@pytest.mark.parametrize("name", ["pair", "one", "hostile", "long"])
def test_page_is_well_formed_and_accessible(name: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(name)
    assert page.all("html") == [{"lang": "en"}]
    assert page.all("meta", name="viewport")
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    plots = page.all("svg", **{"class": "plot"})
    assert plots
    assert all(plot["role"] == "img" and plot["aria-label"] and plot["viewbox"] for plot in plots)
    assert len(page.all("svg")) == len(plots) + len([s for s in page.all("svg") if s.get("aria-hidden")])


@pytest.mark.parametrize("name", ["pair", "one", "hostile", "long"])
def test_page_needs_nothing_from_elsewhere(name: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(name)
    assert not re.search(r"https?://|@import", page.raw)
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object", "embed"}
    ids = {a["id"] for _, a in page.elements if "id" in a}
    for _, attributes in page.elements:
        assert "src" not in attributes
        assert not any(attribute.startswith("on") for attribute in attributes)
        target = attributes.get("href")
        if target is not None:
            assert target.startswith("data:image/png;base64,") or target[1:] in ids
    assert {f"#{i}" for i in ids} >= set(re.findall(r"url\(([^)]*)\)", page.raw))
    assert len(page.raw.encode()) < 1_000_000


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
    headline = f"probprompt learned 6 classes in 3 tasks, one after another, and recognises {accuracy['FAA']:.1f} %"
    assert headline in one.text
    assert f"{accuracy['forgetting']:.1f} points below its best" in one.text


def test_one_run_has_every_section(one: Page) -> None:
    sections = ["Average accuracy", "Task by task", "Accuracy matrix", "Prompt similarity"]
    sections += ["Use of the prompt distributions", "Queries of task 1", "Training loss", "Record"]
    assert one.headings[:9] == ["probprompt", *sections]
    assert "0.31 0.02 at initialisation" in one.text
    assert "6.5 9.5 at initialisation" in one.text
    assert "Mean entropy 0.84 :" in one.text
    assert "Even use would be 25 % each" in one.text
    assert "12 min 34 s" in one.text
    assert "2.5 % of the backbone's; 125 kB on disk, 32.0 MB to learn on" in one.text
    assert "Comparison" not in one.headings
    assert "skipped file" not in one.text
    assert "unfinished" not in one.text
    assert "evaluated on validation" not in one.text


def test_provenance_shortens_hashes_and_keeps_them_whole(one: Page) -> None:
    for digest in ("ab" * 32, "cd" * 32, "ef" * 32):
        assert one.all("code", title=digest)
        assert digest[:12] + "…" in one.within("code")
    assert "training.epochs" in one.within("th")
    assert "2.11.0" in one.within("td")
    assert "class 0, class 1" in one.within("td")


def test_a_run_without_prompts_leaves_their_sections_out(pair: Page) -> None:
    assert pair.headings.count("Accuracy matrix") == 2
    for title in ("Prompt similarity", "Use of the prompt distributions", "Queries of task 1"):
        assert pair.headings.count(title) == 1
    assert pair.headings.count("Training loss") == 2


def test_comparison_sets_runs_side_by_side_and_marks_the_best(pair: Page, runs: list[Path]) -> None:
    first, second = (json.loads((run / "accuracy.json").read_text()) for run in runs)
    values = [accuracy[key] for accuracy in (first, second) for key in ("FAA", "CAA", "forgetting")]
    start = pair.within("td").index(f"{first['FAA']:.2f}")
    shown = [text for text in pair.within("td")[start:] if re.fullmatch(r"\d+\.\d\d", text)]
    assert shown[:6] == [f"{value:.2f}" for value in values]
    assert pair.raw.count('class="num rank best"') == 3
    best = pair.raw.index('class="num rank best"')
    assert pair.raw.index("#run-1") < best < pair.raw.index('href="#run-2"', best)
    gap = first["FAA"] - second["FAA"]
    assert f"recognises {first['FAA']:.1f} % of the test images on average, {gap:.1f} points above probe" in pair.text
    # The curves of both runs are drawn once, over each other.
    assert pair.headings.count("Average accuracy") == pair.headings.count("Task by task") == 1
    drop = first["matrix"][0][0] - first["matrix"][0][2]
    assert f"({drop:.1f})" in pair.text
    assert "method.name" in pair.within("th")


def test_runs_that_do_not_compare_are_not_drawn_together(runs: list[Path], root: Path) -> None:
    other = make_run(root / "other", tasks=2, config={"data": {"benchmark": "cub"}, "method": "probprompt"})
    page = report(other, runs[1])
    assert "Not comparable." in page.within("b")
    assert "The benchmarks differ: cub (other), emoji-r (probe)." in page.text
    assert "The numbers of tasks differ: 2 (other), 3 (probe)." in page.text
    assert "rank best" not in page.raw
    assert page.headings.count("Average accuracy") == 2
    assert not [svg for svg in page.all("svg") if "other" in str(svg.get("aria-label")) and "probe" in str(svg)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"evaluated_on": "validation"}, "Not all were evaluated on the same images"),
        ({"stream": {"tasks": [["x"], ["y"], ["z"]]}}, "do not hold the same classes"),
    ],
)
def test_smaller_differences_also_forbid_a_ranking(
    changes: dict[str, Any], reason: str, runs: list[Path], tmp_path: Path
) -> None:
    from probprompt.report.page import differences
    from probprompt.report.reading import read_runs

    (told,) = differences(read_runs([runs[1], make_run(tmp_path / "b", prompts=False, **changes)]))
    assert reason in told


def test_unfinished_run_tells_how_far_it_is_and_is_not_ranked(runs: list[Path], root: Path) -> None:
    half = make_run(root / "half", steps=2, start=99.0, prompts=False, evaluated_on="test")
    alone = report(half)
    assert "unfinished: 2 of 3 tasks" in alone.text
    assert "images so far" in alone.text
    together = report(half, *runs)
    assert "only finished runs are ranked" in together.text
    best = together.raw.index('class="num rank best"')
    assert together.raw.index('href="#run-2">probprompt') < best


def test_validation_and_skipped_files_are_said(root: Path) -> None:
    page = report(make_run(root / "validated", tasks=1, evaluated_on="validation", skipped=["a/b.png", "c.png"]))
    assert "evaluated on validation images" in page.within("span")
    assert "2 skipped files" in page.within("summary")
    assert "a/b.png" in page.within("code")
    # A single task has no curve and nothing to forget.
    assert "Average accuracy" not in page.headings
    assert "Task by task" not in page.headings
    assert "Forgetting" not in page.within("dt")


def test_long_runs_show_every_number(long: Page) -> None:
    shown = [text for text in long.within("td") if re.fullmatch(r"\d+\.\d|100", text)]
    assert len(shown) == 20 * 21 // 2 + 20
    assert len(long.all("figure", **{"class": "panel"})) == 20
    assert "Training loss" not in long.headings


def test_hostile_names_stay_text(hostile: Page) -> None:
    assert not hostile.all("script")
    assert not hostile.all("b", onload="x")
    assert "<b>&" in hostile.within("h1")
    assert "<script>alert(1)</script>" in hostile.within("span")  # legend of the queries
    labels = hostile.within("text")
    for name in ("<script>alert(1…", "a & b", "$x^2$ $", 'q" onload="x', "nul��", "�", "猫 🐱", "t n"):
        assert name in labels
    assert "a/<i>.png" in hostile.within("code")


def test_equal_names_are_told_apart(runs: list[Path], tmp_path: Path) -> None:
    from probprompt.report.reading import read_runs

    twin = make_run(tmp_path / "twin", prompts=False, name="probe")
    assert [run.label for run in read_runs([runs[0], runs[1], twin])] == ["probprompt", "probe (1)", "probe (2)"]


def test_pages_are_reproducible_and_ignore_the_readers_settings(one: Page, runs: list[Path], tmp_path: Path) -> None:
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30.0, "svg.fonttype": "path"}):
        again = write_report([runs[0]], tmp_path / "again.html")
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert again.read_text(encoding="utf-8") == one.raw


def test_latest_word_on_an_epoch_wins_and_a_torn_line_is_forgiven(tmp_path: Path) -> None:
    from probprompt.report.reading import read_run

    run = make_run(tmp_path / "run", prompts=False)
    lines = [
        {"event": "epoch", "task": t, "epoch": e, "loss": v} for t, e, v in ((1, 1, 3.0), (1, 2, 9.0), (1, 2, 1.0))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "events.jsonl").write_text(text + '{"event": "epo')
    assert read_run(run).losses == [[(1, 3.0), (2, 1.0)]]
    (run / "events.jsonl").write_text('{"torn\n' + text)
    with pytest.raises(UserError, match=r"events\.jsonl is malformed: line 1 is not JSON"):
        read_run(run)


def change(name: str, **changes: Any) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        path = run / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (lambda run: (run / "run.json").unlink(), r"run is not a run folder: there is no run\.json"),
    (lambda run: (run / "run.json").write_text("{"), r"run\.json cannot be read: "),
    (lambda run: (run / "run.json").write_bytes(b"\xff"), r"run\.json cannot be read: "),
    (lambda run: (run / "run.json").write_text("[]"), r"run\.json has the format None; .* reads format 1"),
    (change("run.json", format=2), r"run\.json has the format 2; .* reads format 1"),
    (change("run.json", stream={"tasks": []}), r"run\.json is malformed: stream\.tasks: "),
    (lambda run: (run / "accuracy.json").unlink(), r"run has nothing to report yet: no task is finished"),
    (change("accuracy.json", finished_steps=0, FAA=None), r"run has nothing to report yet: no task is finished"),
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
def test_spoiled_files_are_named(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    spoil(run)
    with pytest.raises(UserError, match=message):
        write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_wrong_requests_are_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run was given"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(UserError, match="missing is not a run folder: there is no such folder"):
        write_report([tmp_path / "missing"], tmp_path / "report.html")
    with pytest.raises(UserError, match=r"overview\.gif must end in \.png or \.svg"):
        save_overview(runs, tmp_path / "overview.gif")
    with pytest.raises(UserError, match=r"cannot share one picture\. The numbers of tasks differ"):
        save_overview([runs[0], make_run(tmp_path / "b", tasks=2)], tmp_path / "overview.png")


def test_a_failed_write_leaves_nothing_behind(runs: list[Path], tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(UserError, match="taken could not be written"):
        write_report([runs[1]], taken)
    assert list(tmp_path.iterdir()) == [taken]
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(UserError, match="could not be written"):
        write_report([runs[1]], blocked / "report.html")
    written = write_report([runs[1]], tmp_path / "new" / "report.html")
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]


def test_overview_is_a_picture_of_its_own(runs: list[Path], tmp_path: Path) -> None:
    picture = save_overview(runs, tmp_path / "overview.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])
    assert width > 2000
    assert 2 < width / height < 4
    first = save_overview([runs[1]], tmp_path / "overview.svg").read_bytes()
    assert first == save_overview([runs[1]], tmp_path / "again.svg").read_bytes()
    drawing = ElementTree.fromstring(first)
    assert not list(drawing.iter("{http://www.w3.org/2000/svg}text"))  # letters are drawn: no font is needed


def variables(css: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css))


def test_colours_are_readable_in_light_and_dark() -> None:
    from probprompt.report import figures, page

    template = (Path(page.__file__).parent / "report.html.jinja").read_text(encoding="utf-8")
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


def test_documented_examples_hold() -> None:
    for name in ("figures", "page"):
        outcome = doctest.testmod(importlib.import_module(f"probprompt.report.{name}"))
        assert outcome.attempted
        assert outcome.failed == 0


def test_the_package_loads_no_drawing_by_itself() -> None:
    source = Path(importlib.import_module("probprompt.report").__file__ or "").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {node.module for node in imports if isinstance(node, ast.ImportFrom)} <= {"collections.abc", "pathlib"}
    assert not [node for node in imports if isinstance(node, ast.Import)]
