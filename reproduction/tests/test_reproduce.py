"""Reproduction of a table of the paper: plan, cost, resumed and recorded runs."""

import json
import pickle
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

from probprompt.backbones import pretrained
from probprompt.bench.results import FORMAT, KIND, write_record
from probprompt.config import flatten, parse_config
from probprompt.data import datasets
from probprompt.data.cache import ImageCache
from probprompt.errors import UserError
from probprompt.runs.grid import GridCallback, Outcome, RunSpec
from probprompt.runs.run import RunRecord
from probprompt.storage import with_hash
from reproduction import local_resources, paper, reproduce, results, results_page
from reproduction.bench_pages import run_seconds

Command = Callable[..., Any]
SMALL: dict[str, Any] = {"backbone.name": "test_vit", "backbone.weights": "random", "backbone.image_size": 32}
SHORT: dict[str, Any] = {"training.epochs": 1, "training.batch_size": 8, "alignment.epochs": 1}
OPTIONS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture(autouse=True)
def _no_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBPROMPT_DATA", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def table(pictures: Path) -> paper.Table:
    """Return a table like the paper's on a few images."""
    column = {"key": "3", "heading": "3 tasks", "benchmark": str(pictures), "tasks": 3, "backbone": "demo"}
    rows = [
        {"label": label, "line": line, "settings": {**SHORT, **settings}, "printed": {"3": {"FAA": [faa, 1.0]}}}
        for line, label, settings, faa in ((1, "30", {}, 50.0), (2, "5", {"method.samples": 5}, 40.0))
    ]
    about = {"name": "samples", "number": 6, "label": "tab:few", "title": "A few images", "study": True}
    content = {**about, "measures": ["FAA"], "columns": [{**column, "seeds": [0, 1]}], "rows": rows}
    return paper.Table.model_validate(content)


def _tree(root: Path, images: int = 4) -> Path:
    """Write six invented classes as folders, with a number of training images each."""
    for split, count in (("train", images), ("test", 2)):
        for label, name in enumerate(("apple", "baby", "camel", "dolphin", "elm", "fox")):
            for index in range(count):
                path = root / split / name / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (32, 32), (40 * label, 20 * index, 99)).save(path)
    return root


@pytest.fixture
def cifar(table: paper.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> paper.Table:
    """Return the same table for CIFAR-100, with a small invented copy of the images."""
    _tree(tmp_path / "datasets" / "cifar100")
    column = table.columns[0].model_copy(update={"benchmark": "cifar100", "seeds": (0,)})
    chosen = table.model_copy(update={"columns": (column,), "rows": table.rows[:1]})
    monkeypatch.setattr(paper, "tables", lambda: (chosen,))
    return chosen


def _plan(
    table: paper.Table, folder: Path, out: str = "runs", seeds: Sequence[int] = (), **given: Any
) -> reproduce.Plan:
    requested = reproduce.requested_runs(table, folder / out, seeds, settings=given)
    return reproduce.make_plan(table, requested, folder / "book", folder / out)


def _missing(table: paper.Table, folder: Path, **settings: Any) -> int:
    return _plan(table, folder, "elsewhere", **settings).missing


# Which runs a table is


def _cells(name: str, **named: Any) -> list[RunSpec]:
    return [cell for run in reproduce.requested_runs(paper.find(name), Path("out"), **named) for cell in run.cells]


@pytest.mark.parametrize("table", paper.tables(), ids=lambda table: table.name)
def test_numbers_are_run_with_the_papers_settings(table: paper.Table) -> None:
    requested = reproduce.requested_runs(table, Path("out"))
    cells = [cell for run in requested for cell in run.cells]
    assert len(cells) == sum(len(table.seeds(row, column)) for row, column in table.cells())
    assert len({cell.folder for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.preset == "published" and cell.config.backbone.name in table.backbones
        assert cell.config.backbone.normalization in ("unit", "cifar100")
    for run in requested:
        config = run.cells[0].config.to_stored()
        assert results.preset_overrides(RunRecord(config=config)) == run.row.all_settings, run.row.label


def test_runs_follow_methods_and_benchmarks() -> None:
    coda = [cell.config for cell in _cells("table1", methods=["coda-prompt"], seeds=[0])]
    per_task = {config.data.tasks: flatten(config.model_dump())["method.components_per_task"] for config in coda}
    assert per_task == {5: 20, 10: 10, 20: 5}
    birds = [cell for cell in _cells("table2", methods=["vq-prompt"]) if cell.benchmark == "cub200"]
    assert [cell.seed for cell in birds] == [0, 12, 24, 36, 48] and birds[0].config.backbone.name == "sup21k"
    assert [cell.seed for cell in _cells("table1", methods=["joint"])] == [0]
    assert not [cell for cell in _cells("table2", methods=["l2p++"]) if cell.benchmark == "cub200"]
    weights = {cell.config.backbone.weights for cell in _cells("table3", weights={"ibot1k": "teacher.pth"})}
    assert weights == {"teacher.pth", None}
    with pytest.raises(UserError, match="table3 has no method 'apt'"):
        _cells("table3", methods=["apt"])


def test_tables_share_runs() -> None:
    folders = {table.name: {cell.folder for cell in _cells(table.name)} for table in paper.tables()}
    assert all(folders["table1"] & folders[name] for name in ("ablation", "samples", "topk", "cost"))
    assert folders["cost"] <= folders["table1"] and folders["aggregation"] & folders["ablation"]


# What counts as recorded


def test_runs_on_other_images_are_not_the_papers(cifar: paper.Table, tmp_path: Path) -> None:
    plan = _plan(cifar, tmp_path)
    assert plan.is_paper and (plan.missing, plan.deviating, plan.to_run) == (1, 0, 1)
    assert "cifar100: 6 classes, published: 100" in plan.differences
    (outcome,) = reproduce.run_missing(plan, tmp_path / "book", "cpu")
    assert outcome.run, outcome.reason
    entries = results.read_entries(tmp_path / "book")
    assert len(entries) == len(results_page.missing(cifar, entries)) == 1, "the page does not count it either"
    for out in ("runs", "elsewhere"):
        again = _plan(cifar, tmp_path, out)
        assert (again.missing, again.deviating, again.to_run) == (1, 1, 0), "neither counted nor repeated"
    _tree(tmp_path / "datasets" / "cifar100", images=5)
    other = _plan(cifar, tmp_path, "third")
    assert (other.missing, other.deviating, other.to_run) == (1, 0, 1)
    (problem,) = other.problems
    assert "--results" in problem, "adding it would be rejected, hours later"


def test_the_papers_run_counts_wherever_its_images_are(cifar: paper.Table, tmp_path: Path) -> None:
    reproduce.run_missing(_plan(cifar, tmp_path), tmp_path / "book", "cpu")
    (entry,) = results.read_entries(tmp_path / "book")
    stream = {**entry.content["stream"], "differences": [], "train_images": [50_000], "test_images": [10_000]}
    content = {**entry.content, "stream": {**stream, "test_classes": [2, 2, 2]}}
    (tmp_path / "book" / entry.path).write_text(json.dumps(with_hash(content)))
    (tmp_path / "datasets").rename(tmp_path / "away")
    plan = _plan(cifar, tmp_path, "elsewhere")
    assert plan.is_paper and (plan.missing, plan.to_run) == (0, 0)
    assert not results_page.missing(cifar, results.read_entries(tmp_path / "book"))
    assert _missing(cifar, tmp_path, **{"method.samples": 3}) == 1


def _save_weights(path: Path, seed: int) -> Path:
    path.parent.mkdir()
    torch.manual_seed(seed)
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), path)
    return path


def test_own_settings_need_the_same_images_and_weights(cifar: paper.Table, tmp_path: Path) -> None:
    files = [_save_weights(tmp_path / name / "weights.safetensors", seed) for seed, name in enumerate(("a", "b"))]
    own: dict[str, Any] = {"backbone.name": "test_vit.r160_in1k", "backbone.image_size": 32}
    first, second = ({**own, "backbone.weights": str(file)} for file in files)
    reproduce.run_missing(_plan(cifar, tmp_path, **first), tmp_path / "book", "cpu")
    plan = _plan(cifar, tmp_path, "elsewhere", **first)
    assert not plan.is_paper and (plan.missing, plan.to_run) == (0, 0)
    assert _missing(cifar, tmp_path, **second) == 1, "a file of the same name, but other weights"
    (tmp_path / "datasets" / "cifar100").rename(tmp_path / "cifar")
    root = {"data.root": str(tmp_path / "cifar")}
    assert _missing(cifar, tmp_path, **first, **root) == 0, "the same images in another place"
    _tree(tmp_path / "cifar", images=5)
    assert _missing(cifar, tmp_path, **first, **root) == 1, "other images"


def test_images_are_compared_by_pixels(cifar: paper.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ImageCache(tmp_path / "cache", worth=0)
    monkeypatch.setattr(ImageCache, "default", lambda: cache)
    reproduce.run_missing(_plan(cifar, tmp_path, **SMALL), tmp_path / "book", "cpu")
    (entry,) = results.read_entries(tmp_path / "book")
    recorded = entry.content["data"]["train"]
    assert recorded["pixels_sha256"] and _missing(cifar, tmp_path, **SMALL) == 0
    for path in (tmp_path / "datasets").rglob("*.png"):
        Image.new("RGB", (32, 32), (1, 2, 3)).save(path)
    files = datasets.find("cifar100").load(recorded["stored_side"]).train.files
    place = cache.entry(files) if files else None
    assert place and place.write(lambda steps: None, lambda text: None)
    assert _missing(cifar, tmp_path, **SMALL) == 1


def _pickles(root: Path, shade: int) -> None:
    """Write six invented classes in files such as CIFAR-100's, in one shade."""
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 4), ("test", 2)):
        labels = [label for label in range(6) for _ in range(count)]
        names = [f"{place}.png".encode() for place in range(len(labels))]
        content = {b"data": np.full((len(labels), 3072), shade, np.uint8), b"fine_labels": labels, b"filenames": names}
        (root / split).write_bytes(pickle.dumps(content, protocol=4))
    (root / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"class_%d" % n for n in range(6)]}, protocol=4))


def test_images_in_one_file_are_compared_by_their_pixels(cifar: paper.Table, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "datasets" / "cifar100")
    _pickles(tmp_path / "datasets" / "cifar100", 1)
    reproduce.run_missing(_plan(cifar, tmp_path, **SMALL), tmp_path / "book", "cpu")
    assert _missing(cifar, tmp_path, **SMALL) == 0
    _pickles(tmp_path / "datasets" / "cifar100", 2)
    assert _missing(cifar, tmp_path, **SMALL) == 1


def test_a_folder_with_another_run_does_not_hide_the_rest(table: paper.Table, tmp_path: Path) -> None:
    reproduce.run_missing(_plan(table, tmp_path, **SMALL), tmp_path / "book", "cpu")
    (changed, *_) = sorted((tmp_path / "runs").rglob("run.json"))
    record = json.loads(changed.read_text())
    record["config"]["training"]["epochs"] += 1
    changed.write_text(json.dumps(record))
    plan = _plan(table, tmp_path, **SMALL)
    assert sorted(row.recorded for row in plan.rows) == [0, 2]
    with pytest.raises(UserError, match=r"training.epochs.*--out"):
        reproduce.run_missing(plan, tmp_path / "book", "cpu")


# What is said before


def test_the_plan_shows_settings_and_images(cifar: paper.Table, reproduction: Command) -> None:
    answer = reproduction("run", "samples")
    assert answer.code == 0 and "the paper's weights, images and settings" in answer.out
    before, _, after = answer.out.partition("add --yes")
    assert "published images: cifar100: train: 24 images, published: 50000" in before and after
    answer = reproduction("run", "samples", *OPTIONS)
    assert "the paper's weights, images and settings" not in answer.out and "your settings" in answer.out
    assert "cifar100, 3 tasks, test_vit" in answer.out


def test_a_folder_of_images_can_be_passed(tmp_path: Path, reproduction: Command) -> None:
    def answer(root: Path, method: str) -> str:
        command = ("run", "table2", "--dry-run", "--seed", 0, *OPTIONS, "--set", f"data.root={root}")
        return str(reproduction(*command, "--method", method).out)

    cifar = _tree(tmp_path / "mine" / "cifar100")
    text = answer(cifar, "ft")
    assert "Problem: cifar100" not in text and "published images: cifar100: 6 classes" in text
    assert "is for cifar100 and cub200" in answer(cifar, "probprompt")
    _tree(tmp_path / "mine" / "cub200")
    text = answer(tmp_path / "mine", "probprompt")
    assert "Problem: " not in text and "published images: cub200: 6 classes" in text


def test_weights_on_the_hub_are_downloaded_first(
    cifar: paper.Table, tmp_path: Path, reproduction: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = cifar.columns[0].model_copy(update={"backbone": "dino1k"})
    monkeypatch.setattr(paper, "tables", lambda: (cifar.model_copy(update={"columns": (column,)}),))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))

    def fail(checkpoint: Any) -> Path:
        raise UserError(f"{checkpoint.source} could not be fetched")

    monkeypatch.setattr(pretrained, "_download", fail)
    answer = reproduction("run", "samples", "--device", "cpu")
    assert answer.code == 0 and "before the first run: weights dino1k" in answer.out
    assert "add --yes" in answer.out and "Problem: " not in answer.out
    answer = reproduction("run", "samples", "--device", "cpu", "--yes")
    assert answer.code == 2 and "timm/vit_base_patch16_224.dino could not be fetched" in answer.err
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_everything_missing_is_shown_before_the_start(
    tmp_path: Path, reproduction: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = reproduction("run", "table2", "--dry-run")
    assert answer.code == 0 and "82 runs, 82 missing" in answer.out
    assert "GPU hours on one NVIDIA H200" in answer.out, "from this checkout's record, where the folder has none"
    assert "The runs will use the CPU" in answer.out
    assert all(f"probprompt data get {name}" in answer.out for name in ("cifar100", "cub200"))
    answer = reproduction("run", "table2", "--dry-run", "--bench", "none.json")
    assert answer.code == 0 and "No estimate of GPU hours: none.json" in answer.out
    answer = reproduction("run", "table2", "--yes")
    assert answer.code == 2 and "Nothing was started" in answer.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("study", "first"), [("table2", "method"), ("ablation", "N, mixture, L_DR"), ("topk", "K")])
def test_symbols_of_the_paper_keep_their_case(reproduction: Command, study: str, first: str) -> None:
    assert re.search(rf"^{first} +method ", reproduction("run", study, "--dry-run").out, re.MULTILINE)


@pytest.mark.parametrize(
    ("backbone", "words"),
    [
        ({"name": "demo"}, None),
        ({"name": "test_vit", "weights": "random"}, None),
        ({"name": "sup1k"}, None),  # is downloaded
        ({"name": "sup1k", "weights": "nowhere.safetensors"}, ["nowhere.safetensors is not a file"]),
        ({"name": "ibot1k"}, ["checkpoint_teacher.pth", "--weights ibot1k=FILE"]),
        ({"name": "vit_base_patch16_224"}, ["has no default weights", "--set backbone.weights=FILE"]),
    ],
)
def test_missing_weights_are_reported_with_a_remedy(backbone: dict[str, Any], words: list[str] | None) -> None:
    configs = [parse_config({"backbone": backbone, "data": {"benchmark": "emoji-r"}})] * 2
    problems = local_resources.missing_resources(configs, local_resources.LocalResources())
    assert len(problems) == (words is not None) and all(word in problems[0] for word in words or ())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tabel2",), "Did you mean 'table2'"),
        (("table3", "--weights", "sup1k=file"), "ibot1k, dino1k"),
        (("table2", "--set", "method.nonsense=1"), "nonsense"),
    ],
)
def test_wrong_options_are_explained(reproduction: Command, arguments: tuple[str, ...], words: str) -> None:
    answer = reproduction("run", *arguments, "--dry-run")
    assert answer.code == 2 and words in answer.err and "data get" not in answer.err


def test_the_cost_is_estimated_from_a_record(tmp_path: Path, reproduction: Command) -> None:
    rows: list[Any] = [
        {"method": name, "training": {"images_per_s": speed}, "inference": {"images_per_s": 3 * speed}}
        for name, speed in (("probprompt", 1000.0), ("vq-prompt", 2000.0))
    ]
    bench = tmp_path / "speeds.json"
    bench.write_text(json.dumps({"kind": KIND, "format": FORMAT, "hardware": {"gpu": "NVIDIA H200"}, "results": rows}))
    table = paper.find("table3")
    plan = reproduce.make_plan(table, reproduce.requested_runs(table, Path("out")), tmp_path / "book", Path("out"))
    cost = reproduce.estimate(plan, bench)
    (experiment,) = (each for each in paper.EXPERIMENTS if (each.benchmark, each.tasks) == ("imagenet-r", 10))
    assert cost and cost.hours == pytest.approx(sum(6 * run_seconds(row, experiment) for row in rows) / 3600)
    assert cost.unknown == 18
    answer = reproduction("run", "table3", "--dry-run", "--bench", bench)
    assert f"{cost.hours:.1f} GPU hours on one NVIDIA H200, without 18 runs" in answer.out


# Running it


class _Impatient(GridCallback):
    """Callback that interrupts after the first run."""

    def end(self, outcome: Outcome, rest: float | None) -> None:
        raise KeyboardInterrupt


def test_a_table_is_run_resumed_and_recorded(table: paper.Table, tmp_path: Path) -> None:
    plan = _plan(table, tmp_path, **SMALL)
    assert plan.to_run == 4 and not plan.problems and not plan.measure
    assert [cell.seed for cell in plan.grid.runs] == [0, 0, 1, 1], "a whole table comes early"
    book = tmp_path / "book"
    with pytest.raises(KeyboardInterrupt):
        reproduce.run_missing(_plan(table, tmp_path, seeds=[3], **SMALL), book, "cpu", _Impatient())
    assert len(results.read_entries(book)) == 1, "what was finished is kept"
    plan = _plan(table, tmp_path, seeds=[3], **SMALL)
    assert plan.to_run == 1
    (outcome,) = reproduce.run_missing(plan, book, "cpu")
    assert outcome.run
    samples = {(entry.seed, entry.varied.get("method.samples", 30)) for entry in results.read_entries(book)}
    assert samples == {(3, 5), (3, 30)}
    assert _plan(table, tmp_path, "elsewhere", [3], **SMALL).to_run == 0, "what is recorded is not run again"
    files = sorted(book.rglob("*.json"))
    for path in files:
        path.unlink()
    plan = _plan(table, tmp_path, seeds=[3], **SMALL)
    assert plan.to_run == 0 and len(plan.grid.runs) == 2, "finished, and only to be added"
    reproduce.run_missing(plan, book, "cpu", _Impatient())  # nothing is started, so nothing ends
    assert sorted(book.rglob("*.json")) == files


def test_the_command_asks_runs_and_shows_the_table(
    table: paper.Table, tmp_path: Path, reproduction: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "tables", lambda: (table,))
    command = ("run", "samples", "--seed", 0, *OPTIONS, "--device", "cpu")
    answer = reproduction(*command)
    assert answer.code == 0 and "add --yes" in answer.out and "2 runs, 2 missing" in answer.out
    assert not (tmp_path / "runs").exists() and not (tmp_path / "results").exists()
    cells = _plan(table, Path(), "runs/reproduce", [0], **SMALL).grid.runs
    (blocked,) = (cell.folder for cell in cells if dict(cell.varied).get("method.samples") == 5)
    blocked.mkdir(parents=True)
    (blocked / "something").write_text("in the way")
    answer = reproduction(*command, "--yes")
    assert answer.code == 1 and "Failed: 1 of 2 runs" in answer.out
    assert len(results.read_entries(tmp_path / "results")) == 1, "one that fails does not stop the others"
    (blocked / "something").unlink()
    answer = reproduction(*command, "--yes")
    assert answer.code == 0 and "50.00 ± 1.00" in answer.out
    assert answer.out.count("ours, pictures, test_vit (random) at 32 px, `published` †‡") == 2
    answer = reproduction(*command)
    assert answer.code == 0 and "2 runs, 0 missing" in answer.out and "ours, " in answer.out


def test_costs_are_measured_if_none_are_recorded(tmp_path: Path) -> None:
    cost, book = paper.find("cost").model_copy(update={"rows": paper.find("cost").rows[-1:]}), tmp_path / "book"

    def is_to_be_measured() -> bool:
        return reproduce.make_plan(cost, [], book, tmp_path / "runs").measure

    assert is_to_be_measured()
    small = {"backbone": {"name": "test_vit", "image_size": 32}, "training": {"batch_size": 4}}
    path = reproduce.measure_costs(cost, book, torch.device("cpu"), settings=small, seconds=0.01)
    benches = results_page.read_benches(book)
    assert path.is_file() and [entry["method"] for entry in benches[0]["results"]] == ["probprompt"]
    assert "test_vit" in results_page.paper_table(cost, [], benches)
    assert is_to_be_measured(), "that was not a ViT-B/16"
    text = path.read_text().replace('"backbone": "test_vit"', '"backbone": "vit_base_patch16_224"')
    write_record(path, json.loads(text))
    assert not is_to_be_measured()
    for old, new in (
        ('"preset": "published"', '"preset": null'),  # other settings
        ('"stored_side": "full"', '"stored_side": null'),  # smaller copies of images
        ('"processor": "', '"processor": "not '),  # another machine
    ):
        write_record(path, json.loads(text.replace(old, new)))
        assert is_to_be_measured()
