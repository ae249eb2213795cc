"""Tables of a page from records, and the estimated cost of the paper."""

import doctest
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from probprompt import methods
from probprompt.bench import measure
from probprompt.bench.results import FORMAT, KIND, make_record, write_record
from probprompt.config import parse_config
from probprompt.errors import UserError
from reproduction import bench_pages, paper, results_page, scaling
from reproduction.bench_pages import SEEDS, published, run_seconds
from reproduction.paper import EXPERIMENTS, Experiment

Command = Callable[..., Any]
HARDWARE = {"device": "cuda", "machine": "x86_64", "system": "Linux", "cores": 16, "threads": 4, "gpu": "NVIDIA H200"}
VERSIONS = {"python": "3.12", "probprompt": "0.1", "torch": "2.11", "torchvision": "0.26", "timm": "1.0"}
VIT = "vit_base_patch16_224"


def _rate(speed: float, *rounds: float) -> dict[str, Any]:
    return {"images_per_s": speed, "rounds": list(rounds or (speed,)), "warm_up_s": 12.34, "first_s": 9.0}


def _entry(method: str = "probprompt", **more: Any) -> Any:
    return {
        **{"method": method, "backbone": VIT, "precision": "bf16", "image_size": 224, "batch": 128, "static": False},
        "training": _rate(4000.0, 3900.0, 4000.0, 4111.0),
        "inference": _rate(6000.0),
        "frozen_pass": _rate(13000.0),
        "stages": None,
        "latency": {"median_ms": 12.5, "p99_ms": 20.0},
        "memory": {"training_peak": 5 * 2**30 // 4},
        "flops_per_image": {"query": 32e9, "prompted": 33e9, "training": 98.44e9, "inference": 65.4e9},
        "share_of_peak": {"training": 0.561, "inference": 0.614},
        "cost": {"prompts_mb": 2.4576, "epoch_s": 6.0, "fps": 80.0},
        **more,
    }


STILL = {"training": None, "memory": {"training_peak": None}, "share_of_peak": {"inference": 0.6}}
"""Entries of a method that trains nothing."""


def _curve(label: str = "classes, 10 tasks", worse: Sequence[str] = (), note: str = "", **exponents: float) -> Any:
    points = [{"value": value, "note": note if value == 10_000 else ""} for value in (100, 10_000)]
    fitted = {name: {"whole": value, "end": value + 0.1} for name, value in exponents.items()}
    about = {"method": "probprompt", "backbone": VIT, "precision": "bf16", "axis": label.partition(",")[0]}
    return {**about, "label": label, "points": points, "exponents": fitted, "worse_than_linear": list(worse)}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes records."""

    def write(name: str, *results: dict[str, Any], growth: Sequence[Any] = (), gpu: str = "NVIDIA H200") -> Path:
        about = {"kind": KIND, "format": FORMAT, "hardware": {**HARDWARE, "gpu": gpu}}
        content = {**about, "versions": {**VERSIONS, "revision": "abc"}, "results": results, "growth": growth}
        (tmp_path / name).write_text(json.dumps(content))
        return tmp_path / name

    return write


def _page(*names: str) -> str:
    tables = (f"{start}\nold\n{end}" for start, end in map(bench_pages._comments, names))
    return "# Title\n\nWords before.\n\n" + "\n\n".join(tables) + "\n\nWords after.\n"


def _fill(names: str, *records: Path, page: Path = Path("page.md")) -> str:
    return bench_pages.fill_page(_page(*names.split()), page, records)


def _rows(text: str, first: str) -> list[list[str]]:
    """Return the cells of table rows with this start."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [line for line in cells if line[0] == first]


# The page


def test_pages_change_only_between_the_comments(write: Callable[..., Path]) -> None:
    one = write("one.json", _entry())
    filled = _fill("figures", one)
    before, start, rest = filled.partition("<!-- bench figures: made by python -m reproduction pages -->")
    assert before == "# Title\n\nWords before.\n\n" and start and "old" not in rest
    assert rest.endswith("<!-- end of bench figures -->\n\nWords after.\n")
    assert bench_pages.fill_page(filled, Path("page.md"), [one]) == filled
    open_page = _page("figures").replace("<!-- end of bench figures -->", "")
    with pytest.raises(UserError, match="lacks the comment <!-- end of bench figures -->"):
        bench_pages.fill_page(open_page, Path("page.md"), [one])


def test_the_order_of_records_does_not_matter(write: Callable[..., Path]) -> None:
    small = _entry(backbone="vit_tiny", flops_per_image={"prompted": 2e9, "training": 7e9, "inference": 5e9})
    paths = [write("a.json", small), write("b.json", _entry("vq-prompt")), write("c.json", _entry())]
    (filled,) = {_fill("figures", *order) for order in (paths, paths[::-1], paths * 2)}
    assert [row[1] for row in _rows(filled, f"`{VIT}`, bf16, batch 128")] == ["`probprompt`", "`vq-prompt`"]
    assert filled.index(f"| `{VIT}`") < filled.index("| `vit_tiny`")


def test_pages_without_comments_get_all_tables(write: Callable[..., Path]) -> None:
    paths = [write("one.json", _entry()), write("grown.json", growth=[_curve(training_s=0.5)])]
    filled = bench_pages.fill_page("# Mine\n", Path("page.md"), paths)
    assert filled.startswith("# Mine\n\n<!-- bench figures") and "<!-- bench growth" in filled
    assert "bench methods" not in filled and filled.endswith("-->\n")
    assert bench_pages.fill_page(filled, Path("page.md"), paths) == filled


@pytest.mark.parametrize("name", ["methods", "growth", "reproduction"])
def test_tables_without_records_say_what_they_need(write: Callable[..., Path], name: str) -> None:
    filled = _fill(f"figures {name}", write("one.json", _entry()))
    assert filled.count("Not measured: this table needs a record of") == 1


# Figures


def test_figures_are_those_of_the_record(write: Callable[..., Path]) -> None:
    filled = _fill("figures", write("one.json", _entry()), write("two.json", _entry("lda", **STILL)))
    still, measured = _rows(filled, f"`{VIT}`, bf16, batch 128")
    assert measured[1:] == ["`probprompt`", "4,000", "6,000", "12.50", "1.25"]
    assert "NVIDIA H200; python 3.12, torch 2.11, torchvision 0.26, timm 1.0, probprompt 0.1 (abc)" in filled
    assert still[2:] == ["-", "6,000", "12.50", "-"]


def test_methods_are_compared_in_time(write: Callable[..., Path]) -> None:
    """At half the speed an image takes twice the time: 100% more."""
    fast = _entry("vq-prompt", training=_rate(8000.0, 7000.0, 9000.0), inference=_rate(5700.0, 5700.0, 6000.0))
    filled = _fill("figures", write("one.json", _entry()), write("two.json", fast))
    assert f"`probprompt` over `vq-prompt` (`{VIT}`, bf16, batch 128): training +100.0%, inference" in filled
    assert "inference −5.0% (the rounds of both overlap)." in filled
    assert "is 27.3 and 8.5 times as fast" in filled  # 8000 / 293, 8000 / 943


@pytest.mark.parametrize("other", [{"batch": 64}, {"precision": "fp32"}, {"backbone": "demo"}, {"image_size": 384}])
def test_different_setups_are_not_compared(write: Callable[..., Path], other: dict[str, Any]) -> None:
    filled = _fill("figures", write("one.json", _entry()), write("two.json", _entry("vq-prompt", **other)))
    assert "over" not in filled and ("official" in filled) == ("precision" in other)


def test_different_machines_are_not_compared(write: Callable[..., Path]) -> None:
    filled = _fill("figures", write("one.json", _entry()), write("two.json", _entry("vq-prompt"), gpu="NVIDIA L4"))
    assert "over" not in filled and "official" not in filled
    assert "`one.json`: measured on NVIDIA H200" in filled and "`two.json`: measured on NVIDIA L4" in filled


# Methods and growth


def test_the_cost_table_has_every_method(write: Callable[..., Path]) -> None:
    still = _entry("lda", **STILL, static=True, cost={"prompts_mb": 0.0, "epoch_s": None, "fps": 200.0})
    filled = _fill("methods", write("all.json", _entry(), _entry("linear-probe", static=True), still))
    assert _rows(filled, "`probprompt`") == [["`probprompt`", "2.46", "6.00", "80.0", "4,000", "6,000", "1.25"]]
    assert _rows(filled, "`linear-probe` (head only)")
    assert _rows(filled, "`lda`") == [["`lda`", "0.00", "-", "200.0", "-", "6,000", "-"]]
    assert f"`{VIT}`, bf16, images of 224 px, batch 128." in filled and "24,000 images" in filled


def test_growth_shows_the_plot_and_what_is_not_linear(write: Callable[..., Path], tmp_path: Path) -> None:
    worse = _curve(worse=["closing_s"], note="out of memory", training_s=-0.02, closing_s=1.81)
    straight = _curve("batch", training_s=0.9, inference_s=1.0, memory=0.8)
    path, page = write("growth.json", growth=[worse, straight]), tmp_path / "page.md"
    assert "![" not in _fill("growth", path, page=page)
    (tmp_path / "growth.png").write_bytes(b"")
    filled = _fill("growth", path, page=page)
    assert "](growth.png)" in filled
    apart = [write(f"{number}.json", growth=[one]) for number, one in enumerate((straight, worse))]
    assert _fill("growth", *apart, page=page) == filled.replace("growth.json`", "0.json`")  # in one table all the same
    (classes,), (batch,) = _rows(filled, "classes, 10 tasks"), _rows(filled, "batch")
    assert classes[1:] == ["100 to 10,000", "−0.02 (0.08)", "-", "-", "**1.81 (1.91)**"]
    assert batch[2:] == ["0.90 (1.00)", "1.00 (1.10)", "0.80 (0.90)", "-"]
    assert "Worse than linear (above 1.15): end of task with classes." in filled
    assert "Not measured: 10,000 classes: out of memory." in filled
    assert "Worse than linear (above 1.15): nothing." in _fill("growth", write("one.json", growth=[straight]))


# What the paper costs


def test_the_papers_methods_learn_prompts_or_the_backbone() -> None:
    assert len(set(paper.METHODS)) == 13 and set(paper.METHODS) <= set(methods.registered())
    assert all(methods.find(name).learns or methods.find(name).trains_backbone for name in paper.METHODS)
    columns = {(column.benchmark, column.tasks) for table in paper.tables() for column in table.columns}
    assert {(each.benchmark, each.tasks) for each in EXPERIMENTS} <= columns
    assert all(published("probprompt", each).data.tasks == each.tasks for each in EXPERIMENTS)


@pytest.mark.parametrize(
    ("method", "tasks", "images", "passed"),
    [
        # 20 epochs; statistics of every training image once; each of 5 parts of the test set after 1 to 5 tasks
        ("probprompt", 5, 20 * 24_000, 24_000 + 1_200 * (1 + 2 + 3 + 4 + 5)),
        ("probprompt", 20, 20 * 24_000, 24_000 + 300 * sum(range(1, 21))),
        ("hide-prompt", 10, 150 * 24_000, 2 * 24_000 + 600 * 55),  # the refit's statistics, and the task identity's
        ("evo-prompt", 10, 50 * 24_000, 2 * 24_000 + 600 * 55),  # mean queries before a task, a summary after it
        ("coda-prompt", 10, 50 * 24_000, 600 * 55),  # no refit
        ("joint", 10, 50 * 24_000, 6_000),  # learned jointly, evaluated once
    ],
)
def test_run_seconds_count_epochs_and_passes(method: str, tasks: int, images: int, passed: int) -> None:
    experiment = Experiment("imagenet-r", "", tasks, 24_000, 6_000)
    measured: Any = {"method": method, "training": {"images_per_s": 10.0}, "inference": {"images_per_s": 40.0}}
    assert run_seconds(measured, experiment) == pytest.approx(images / 10 + passed / 40)


def test_hours_are_the_sum_of_all_runs(write: Callable[..., Path]) -> None:
    entries = [_entry(name, training=_rate(1000.0 + 100 * place)) for place, name in enumerate(paper.METHODS)]
    filled = _fill("reproduction", write("methods.json", *entries, _entry("lda", **STILL)))
    hours = SEEDS * sum(run_seconds(one, each) for one in entries for each in EXPERIMENTS) / 3600
    assert _rows(filled, "all")[0][-1] == f"{hours:.1f}" and _rows(filled, "Hours")[0][1] == f"{hours:.1f}"
    apart = [float(row[-1]) for name in paper.METHODS for row in _rows(filled, f"`{name}`")]
    assert len(apart) == 13 and sum(apart) == pytest.approx(hours, abs=13 * 0.05)
    assert _rows(filled, "`probprompt`")[0][1] == f"{run_seconds(entries[-1], EXPERIMENTS[0]) / 60:.1f}"
    one, eight, many = (float(cell) for cell in _rows(filled, "Hours")[0][1:])
    assert one / 8 <= eight + 0.05 and one / 64 <= many + 0.05 and many < eight < one
    assert "325 runs (13 methods, 5 benchmarks, 5 seeds)" in filled and "An estimate, not a measurement" in filled
    assert "batch sizes of 16 to 192" in filled and "`evo-prompt` and `apt` also change colors" in filled
    some = _fill("reproduction", write("methods.json", *entries[1:]))
    assert "Not measured: this table needs a record of all methods of the paper" in some


@pytest.mark.parametrize("module", [bench_pages, scaling, results_page])
def test_examples_in_docstrings_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


# The command


def test_pages_are_filled_and_plots_drawn_from_measurements(reproduction: Command, tmp_path: Path) -> None:
    cpu, backbone = torch.device("cpu"), {"name": "test_vit", "weights": "random", "image_size": 32}
    base = {"backbone": backbone, "training": {"batch_size": 4}, "data": {"tasks": [3, 2]}}
    peaks, path, page = measure.Peaks(cpu, 0.01), tmp_path / "real.json", tmp_path / "new.md"
    measured: list[Any] = [measure.measure(parse_config(base), 0.01, peaks)]
    write_record(path, make_record(measured, [], peaks.measured, cpu, 0.01))
    answer = reproduction("pages", path, "--page", page, "--plot", tmp_path / "methods.png")
    assert answer.code == 0, answer.err
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Performance\n\n<!--")
    assert f" {measured[0]['training']['images_per_s']:,.0f} |" in text
    picture = (tmp_path / "methods.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("one.json",), "--page FILE"),
        (("absent.json", "--page", "page.md"), "absent.json"),
        (("one.json", "one.json", "--plot", "growth.png"), "growth of 0"),
        (("one.json", "--page", "nowhere/page.md"), "does not exist"),
        (("one.json", "--page", "latin.md"), "Markdown file"),
    ],
)
def test_mistakes_are_explained(
    reproduction: Command, write: Callable[..., Path], monkeypatch: Any, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(write("one.json", _entry()).parent)
    Path("page.md").write_text(_page("growth"), encoding="utf-8")
    Path("latin.md").write_bytes(b"\xe9")
    answer = reproduction("pages", *arguments)
    assert answer.code == 2 and words in answer.err and "Traceback" not in answer.err
    assert Path("page.md").read_text(encoding="utf-8") == _page("growth")
