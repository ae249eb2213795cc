"""Tables of a page come from records, the words of the page stay, and the cost of the paper is counted right."""

import doctest
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from probprompt import methods
from probprompt.bench import measure, page
from probprompt.bench.page import PAPER, PAPER_METHODS, SEEDS, Experiment, fill_page, published, run_seconds, time_on
from probprompt.bench.results import FORMAT, KIND, make_record, write_record
from probprompt.config import parse_config
from probprompt.errors import UserError

Command = Callable[..., Any]
HARDWARE = {"device": "cuda", "machine": "x86_64", "system": "Linux", "cores": 16, "threads": 4, "gpu": "NVIDIA H200"}
VERSIONS = {
    "python": "3.12",
    "probprompt": "0.1",
    "torch": "2.11",
    "torchvision": "0.26",
    "timm": "1.0",
    "revision": "abc",
}


def rate(speed: float, *rounds: float) -> dict[str, Any]:
    return {"images_per_s": speed, "rounds": list(rounds or (speed,)), "warm_up_s": 12.34, "first_s": 9.0}


def entry(method: str = "probprompt", **more: Any) -> dict[str, Any]:
    return {
        "method": method,
        "backbone": "vit_base_patch16_224",
        "precision": "bf16",
        "image_size": 224,
        "batch": 128,
        "static": False,
        "training": rate(4000.0, 3900.0, 4000.0, 4111.0),
        "inference": rate(6000.0),
        "frozen_pass": rate(13000.0),
        "latency": {"median_ms": 12.5, "p99_ms": 20.0},
        "memory": {"training_peak": 5 * 2**30 // 4},
        "flops_per_image": {"query": 32e9, "prompted": 33e9, "training": 98.44e9, "inference": 65.4e9},
        "share_of_peak": {"training": 0.561, "inference": 0.614},
        "cost": {"prompts_mb": 2.4576, "epoch_s": 6.0, "fps": 80.0},
        **more,
    }


def curve(label: str = "classes, 10 tasks", worse: tuple[str, ...] = (), note: str = "", **exponents: float) -> Any:
    points = [{"value": value, "note": note if value == 10_000 else ""} for value in (100, 10_000)]
    fitted = {name: {"whole": value, "end": value + 0.1} for name, value in exponents.items()}
    about = {"method": "probprompt", "backbone": "vit_base_patch16_224", "precision": "bf16"}
    about["axis"] = label.partition(",")[0]
    return {**about, "label": label, "points": points, "exponents": fitted, "worse_than_linear": list(worse)}


def written(
    folder: Path, name: str, *results: dict[str, Any], growth: tuple[Any, ...] = (), hardware: dict[str, Any] = HARDWARE
) -> Path:
    found = {"kind": KIND, "format": FORMAT, "hardware": hardware, "versions": VERSIONS}
    path = folder / name
    path.write_text(json.dumps({**found, "results": results, "growth": growth}))
    return path


def marked(*names: str) -> str:
    marks = "\n\n".join(
        f"<!-- bench {name}: made by probprompt bench -->\nold\n<!-- end of bench {name} -->" for name in names
    )
    return f"# Title\n\nWords before.\n\n{marks}\n\nWords after.\n"


def rows(text: str, first: str) -> list[list[str]]:
    """The cells of lines of tables that begin so."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [line for line in cells if line[0] == first]


# The page --------------------------------------------------------------------------------------------------------


def test_only_what_stands_between_the_marks_changes_and_a_second_time_nothing(tmp_path: Path) -> None:
    one = written(tmp_path, "one.json", entry())
    filled = fill_page(marked("figures"), tmp_path / "page.md", [one])
    before, begin, rest = filled.partition("<!-- bench figures: made by probprompt bench -->")
    assert before == "# Title\n\nWords before.\n\n" and begin
    assert rest.endswith("<!-- end of bench figures -->\n\nWords after.\n") and "old" not in rest
    assert fill_page(filled, tmp_path / "page.md", [one]) == filled


def test_the_order_of_the_records_does_not_matter(tmp_path: Path) -> None:
    small = entry(backbone="vit_tiny_patch16_224", flops_per_image={"prompted": 2e9, "training": 7e9, "inference": 5e9})
    paths = [written(tmp_path, "a.json", small), written(tmp_path, "b.json", entry("vq-prompt"))]
    paths.append(written(tmp_path, "c.json", entry()))
    filled = {fill_page(marked("figures"), tmp_path / "page.md", order) for order in (paths, paths[::-1], paths * 2)}
    assert len(filled) == 1
    shown = [line.split("|")[1:3] for line in filled.pop().splitlines() if line.startswith("| `")][:3]
    assert [tuple(cell.strip() for cell in pair) for pair in shown] == [
        ("`vit_base_patch16_224`", "`probprompt`"),
        ("`vit_base_patch16_224`", "`vq-prompt`"),
        ("`vit_tiny_patch16_224`", "`probprompt`"),
    ]


def test_a_page_without_marks_gets_all_that_there_is_at_its_end(tmp_path: Path) -> None:
    paths = [written(tmp_path, "one.json", entry()), written(tmp_path, "grown.json", growth=(curve(training_s=0.5),))]
    filled = fill_page("# Mine\n", tmp_path / "page.md", paths)
    assert filled.startswith("# Mine\n\n<!-- bench figures") and "<!-- bench growth" in filled
    assert "bench methods" not in filled and filled.endswith("-->\n")
    assert fill_page(filled, tmp_path / "page.md", paths) == filled


@pytest.mark.parametrize("name", ["methods", "growth", "reproduction"])
def test_a_table_that_no_record_can_fill_says_what_it_lacks(tmp_path: Path, name: str) -> None:
    filled = fill_page(marked("figures", name), tmp_path / "page.md", [written(tmp_path, "one.json", entry())])
    assert filled.count("Not measured: this table needs a record of") == 1


def test_a_mark_that_is_not_closed_is_refused(tmp_path: Path) -> None:
    text = marked("figures").replace("<!-- end of bench figures -->", "")
    with pytest.raises(UserError, match="without <!-- end of bench figures -->"):
        fill_page(text, tmp_path / "page.md", [written(tmp_path, "one.json", entry())])


# Figures ---------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_record(tmp_path: Path) -> None:
    filled = fill_page(marked("figures"), tmp_path / "page.md", [written(tmp_path, "one.json", entry())])
    label = ["`vit_base_patch16_224`", "`probprompt`", "bf16", "128"]
    speeds, costs = rows(filled, label[0])
    assert speeds == [*label, "4,000", "3,900 to 4,111", "6,000", "13,000", "12.50"]
    assert costs == [*label, "1.25", "98.4", "56 %", "65.4", "61 %", "12.3"]
    assert "NVIDIA H200; python 3.12, torch 2.11, torchvision 0.26, timm 1.0, probprompt 0.1 (abc)" in filled


def test_what_is_not_trained_has_no_training(tmp_path: Path) -> None:
    still = entry("lda", training=None, memory={"training_peak": None}, share_of_peak={"inference": 0.6})
    speeds, costs = rows(
        fill_page(marked("figures"), tmp_path / "page.md", [written(tmp_path, "one.json", still)]),
        "`vit_base_patch16_224`",
    )
    assert speeds[4:6] == ["-", "-"] and costs[4] == costs[6] == costs[-1] == "-" and costs[8] == "60 %"


def test_the_cost_over_another_method_is_in_time(tmp_path: Path) -> None:
    """At half the speed an image takes twice the time: 100 % more."""
    fast = entry("vq-prompt", training=rate(8000.0, 7000.0, 9000.0), inference=rate(5700.0, 5700.0, 6000.0))
    paths = [written(tmp_path, "one.json", entry()), written(tmp_path, "two.json", fast)]
    filled = fill_page(marked("figures"), tmp_path / "page.md", paths)
    assert (
        "`probprompt` over `vq-prompt` (`vit_base_patch16_224`, bf16, batch 128): training +100.0 %, inference"
        in filled
    )
    assert "inference −5.0 % (the rounds of both overlap)." in filled
    assert "is 27.3 and 8.5 times as fast" in filled  # 8000 / 293, 8000 / 943


@pytest.mark.parametrize("other", [{"batch": 64}, {"precision": "fp32"}, {"backbone": "demo"}, {"image_size": 384}])
def test_what_was_set_otherwise_is_not_compared(tmp_path: Path, other: dict[str, Any]) -> None:
    paths = [written(tmp_path, "one.json", entry()), written(tmp_path, "two.json", entry("vq-prompt", **other))]
    filled = fill_page(marked("figures"), tmp_path / "page.md", paths)
    assert "over" not in filled and ("official" in filled) == ("precision" in other)


def test_another_machine_is_named_and_not_compared(tmp_path: Path) -> None:
    other = {**HARDWARE, "gpu": "NVIDIA L4"}
    paths = [written(tmp_path, "one.json", entry())]
    paths.append(written(tmp_path, "two.json", entry("vq-prompt"), hardware=other))
    filled = fill_page(marked("figures"), tmp_path / "page.md", paths)
    assert "over" not in filled and "official" not in filled
    assert "`one.json`: measured on NVIDIA H200" in filled and "`two.json`: measured on NVIDIA L4" in filled


# Methods and growth ----------------------------------------------------------------------------------------------


def test_the_cost_table_has_every_method(tmp_path: Path) -> None:
    still = entry("lda", training=None, static=True, memory={"training_peak": None})
    still["cost"] = {"prompts_mb": 0.0, "epoch_s": None, "fps": 200.0}
    path = written(tmp_path, "all.json", entry(), entry("linear-probe", static=True), still)
    filled = fill_page(marked("methods"), tmp_path / "page.md", [path])
    assert rows(filled, "`probprompt`") == [["`probprompt`", "2.46", "6.00", "80.0", "4,000", "6,000", "1.25"]]
    assert rows(filled, "`linear-probe` (head alone)")
    assert rows(filled, "`lda`") == [["`lda`", "0.00", "-", "200.0", "-", "6,000", "-"]]
    assert "`vit_base_patch16_224`, bf16, images of 224 px, batch 128." in filled and "24,000 images" in filled


def test_growth_says_what_is_worse_than_linear_and_shows_its_picture(tmp_path: Path) -> None:
    grown = (
        curve(worse=("closing_s",), note="out of memory", training_s=-0.02, closing_s=1.81),
        curve("batch", training_s=0.9, inference_s=1.0, memory=0.8),
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "bench").mkdir()
    path, target = written(tmp_path / "bench", "growth.json", growth=grown), tmp_path / "docs" / "page.md"
    assert "![" not in fill_page(marked("growth"), target, [path])
    (tmp_path / "docs" / "growth.png").write_bytes(b"")
    filled = fill_page(marked("growth"), target, [path])
    assert "](growth.png)" in filled
    apart = [written(tmp_path / "bench", f"{number}.json", growth=(one,)) for number, one in enumerate(grown[::-1])]
    assert fill_page(marked("growth"), target, apart) == filled  # one table, whatever files the curves come from
    classes = rows(filled, "classes, 10 tasks")
    assert classes == [["classes, 10 tasks", "100 to 10,000", "−0.02 (0.08)", "-", "-", "**1.81 (1.91)**"]]
    assert rows(filled, "batch")[0][2:] == ["0.90 (1.00)", "1.00 (1.10)", "0.80 (0.90)", "-"]
    assert "Worse than linear (above 1.15): closing a task with classes." in filled
    assert "Not measured: 10,000 classes: out of memory." in filled
    straight = written(tmp_path / "bench", "growth.json", growth=grown[1:])
    assert "Worse than linear (above 1.15): nothing." in fill_page(marked("growth"), target, [straight])


# What the paper costs --------------------------------------------------------------------------------------------


def test_the_paper_has_thirteen_methods_with_prompts_or_a_backbone_that_learn() -> None:
    assert len(set(PAPER_METHODS)) == 13 and set(PAPER_METHODS) <= set(methods.registered())
    assert all(methods.find(name).learns or methods.find(name).trains_backbone for name in PAPER_METHODS)


@pytest.mark.parametrize(
    ("method", "tasks", "images", "looked"),
    [
        # 20 epochs; statistics of every training image once; each of 5 parts of the test set after 1 to 5 tasks
        ("probprompt", 5, 20 * 24_000, 24_000 + 1_200 * (1 + 2 + 3 + 4 + 5)),
        ("probprompt", 20, 20 * 24_000, 24_000 + 300 * sum(range(1, 21))),
        ("hide-prompt", 10, 150 * 24_000, 2 * 24_000 + 600 * 55),  # the refit's statistics, and the task identity's
        ("evo-prompt", 10, 50 * 24_000, 2 * 24_000 + 600 * 55),  # mean queries before a task, a summary after it
        ("coda-prompt", 10, 50 * 24_000, 600 * 55),  # no refit
        ("joint", 10, 50 * 24_000, 6_000),  # learned at once, evaluated once
    ],
)
def test_a_run_is_its_epochs_and_the_passes_beside_them(method: str, tasks: int, images: int, looked: int) -> None:
    experiment = Experiment("imagenet-r", "", tasks, 24_000, 6_000)
    measured = {"method": method, "training": {"images_per_s": 10.0}, "inference": {"images_per_s": 40.0}}
    assert run_seconds(measured, experiment) == pytest.approx(images / 10 + looked / 40)


def test_experiments_are_those_of_the_paper() -> None:
    assert [(each.benchmark, each.tasks) for each in PAPER] == [
        ("cifar100", 10),
        ("imagenet-r", 5),
        ("imagenet-r", 10),
        ("imagenet-r", 20),
        ("cub200", 10),
    ]
    assert all(published("probprompt", each).data.tasks == each.tasks for each in PAPER)


@pytest.mark.parametrize("gpus", [1, 2, 3, 7])
def test_gpus_take_runs_in_their_order(gpus: int) -> None:
    """Against a clock that ticks: at every second, whoever is free takes the next run."""
    runs, waiting, left, clock = [3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 5, 9, 2, 6], [0] * gpus, 0
    while waiting or any(left):
        for number in range(gpus):
            if not left[number] and waiting:
                left[number] = waiting.pop(0)
        left, clock = [max(0, seconds - 1) for seconds in left], clock + 1
    assert time_on(gpus, runs) == clock


def test_all_hours_are_the_sum_of_the_runs(tmp_path: Path) -> None:
    entries = [entry(name, training=rate(1000.0 + 100 * place)) for place, name in enumerate(PAPER_METHODS)]
    path = written(tmp_path, "methods.json", *entries, entry("lda", training=None, memory={"training_peak": None}))
    filled = fill_page(marked("reproduction"), tmp_path / "page.md", [path])
    hours = SEEDS * sum(run_seconds(one, each) for one in entries for each in PAPER) / 3600
    assert rows(filled, "all")[0][-1] == f"{hours:.1f}" and rows(filled, "Hours")[0][1] == f"{hours:.1f}"
    apart = [float(row[-1]) for name in PAPER_METHODS for row in rows(filled, f"`{name}`")]
    assert len(apart) == 13 and sum(apart) == pytest.approx(hours, abs=13 * 0.05)
    last = entries[-1]
    assert rows(filled, "`probprompt`")[0][1] == f"{run_seconds(last, PAPER[0]) / 60:.1f}"
    one, eight, many = (float(cell) for cell in rows(filled, "Hours")[0][1:])
    assert one / 8 <= eight + 0.05 and one / 64 <= many + 0.05 and many < eight < one
    assert "325 runs (13 methods, 5 benchmarks, 5 seeds)" in filled and "An estimate, not a measurement" in filled
    assert "batches of 16 to 192" in filled and "`evo-prompt` and `apt` change colours" in filled


def test_a_record_without_all_methods_gives_no_estimate(tmp_path: Path) -> None:
    entries = [entry(name) for name in PAPER_METHODS[1:]]
    filled = fill_page(marked("reproduction"), tmp_path / "page.md", [written(tmp_path, "methods.json", *entries)])
    assert "Not measured: this table needs a record of all methods of the paper" in filled


def test_doctests() -> None:
    assert doctest.testmod(page).failed == 0


# The command -----------------------------------------------------------------------------------------------------


def test_the_command_fills_a_page_from_what_was_really_measured(probprompt: Command, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    config = parse_config(
        {
            "method": {"name": "probprompt"},
            "backbone": {"name": "test_vit", "weights": "random", "image_size": 32},
            "training": {"batch": 4},
            "data": {"tasks": [3, 2]},
        }
    )
    peaks = measure.Peaks(cpu, 0.01)
    found = measure.measure(config, 0.01, peaks)
    made = make_record([found], [], peaks.found, cpu, 0.01)
    write_record(tmp_path / "real.json", made)
    target = tmp_path / "page.md"
    target.write_text(marked("figures"), encoding="utf-8")
    answer = probprompt("bench", "--from", tmp_path / "real.json", "--page", target)
    assert answer.code == 0, answer.err
    text = target.read_text(encoding="utf-8")
    assert rows(text, "`test_vit`")[0][4] == f"{found['training']['images_per_s']:,.0f}"
    assert "Words before." in text and "Words after." in text and f"torch {made['versions']['torch']}" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--from", "one.json"), "--from RECORD goes with --page FILE"),
        (("--page", "page.md"), "--from RECORD goes with --page FILE"),
        (
            ("--from", "one.json", "--page", "page.md", "--method", "apt", "--batch", "8"),
            "leave --method, --batch away",
        ),
        (("--from", "absent.json", "--page", "page.md"), "cannot be read"),
        (("--from", "one.json", "--plot", "growth.png"), "a picture of growth is of one method"),
        (("--from", "one.json", "--page", "nowhere/page.md"), "there is no folder"),
        (("--from", "one.json", "--page", "latin.md"), "name a file of Markdown"),
    ],
)
def test_mistakes_are_answered_in_words(
    probprompt: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "one.json", entry())
    text = marked("growth")
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    (tmp_path / "latin.md").write_bytes(b"\xe9")
    answer = probprompt("bench", *arguments)
    assert answer.code == 2 and words in answer.err and "Traceback" not in answer.err
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text


def test_records_of_growth_make_one_picture(probprompt: Command, tmp_path: Path) -> None:
    paths = []
    for name in ("batch", "samples"):
        paths += ["--from", tmp_path / f"{name}.json"]
        small = ("--backbone", "test_vit", "--batch", "2", "--seconds", "0.01", "--device", "cpu")
        assert probprompt("bench", "--grow", name, "--out", paths[-1], *small).code == 0
    answer = probprompt("bench", *paths, "--plot", tmp_path / "growth.png", "--page", tmp_path / "page.md")
    assert answer.code == 0 and (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "](growth.png)" in page and page.index("| samples N_s") < page.index("| batch")


def test_a_page_that_is_not_there_is_begun(probprompt: Command, tmp_path: Path) -> None:
    answer = probprompt("bench", "--from", written(tmp_path, "one.json", entry()), "--page", tmp_path / "new.md")
    assert answer.code == 0 and (tmp_path / "new.md").read_text(encoding="utf-8").startswith("# Performance\n\n<!--")
