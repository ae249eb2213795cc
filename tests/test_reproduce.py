"""Running a table of the paper again: the right cells, told ahead, resumed, and kept in the book."""

import json
import pickle
import re
import shutil
import tomllib
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

from probprompt import checkpoints
from probprompt.bench.page import PAPER, run_seconds
from probprompt.bench.record import FORMAT, KIND, write_record
from probprompt.config import flatten, parse_config
from probprompt.data import datasets
from probprompt.data.cache import ImageCache
from probprompt.errors import UserError
from probprompt.results import at_hand, book, page, paper, reproduce
from probprompt.runs.carry_out import GridWatcher
from probprompt.runs.files import sealed
from probprompt.runs.grid import Cell, Grid, Outcome

Command = Callable[..., Any]
SMALL: dict[str, Any] = {"backbone.name": "test_vit", "backbone.weights": "random", "backbone.image_size": 32}
SHORT: dict[str, Any] = {"training.epochs": 1, "training.batch": 8, "alignment.epochs": 1}
OPTIONS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture(autouse=True)
def _no_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBPROMPT_DATA", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def table(pictures: Path) -> paper.Table:
    """A table as the paper has them, on a few pictures."""
    column = {"key": "3", "heading": "3 tasks", "benchmark": str(pictures), "tasks": 3, "backbone": "demo"}
    return paper.Table.model_validate(
        {
            "name": "samples",
            "number": 6,
            "label": "tab:few",
            "title": "A few pictures",
            "study": True,
            "measures": ["FAA"],
            "columns": [{**column, "seeds": [0, 1]}],
            "rows": [
                {"label": "30", "line": 1, "settings": SHORT, "printed": {"3": {"FAA": [50.0, 1.0]}}},
                {
                    "label": "5",
                    "line": 2,
                    "settings": {**SHORT, "method.samples": 5},
                    "printed": {"3": {"FAA": [40.0, 1.0]}},
                },
            ],
        }
    )


def _cells(name: str, **named: Any) -> list[Cell]:
    wanted = reproduce.wishes(paper.find(name), Path("out"), **named)
    return [cell for wish in wanted for cell in Grid(wish.spec, wish.out).cells]


# Which runs a table is


@pytest.mark.parametrize("name", [table.name for table in paper.tables()])
def test_every_printed_number_is_run_with_the_papers_weights_and_settings(name: str) -> None:
    printed = paper.find(name)
    cells = _cells(name)
    assert len(cells) == sum(len(printed.seeds(row, column)) for row, column in printed.cells())
    assert len({cell.folder for cell in cells}) == len(cells)
    backbones = {column.backbone for column in printed.columns}
    for cell in cells:
        assert cell.preset == "published" and cell.config.backbone.name in backbones
        assert cell.config.backbone.normalisation in ("unit", "cifar100")


def test_cells_follow_what_methods_and_benchmarks_ask_for() -> None:
    coda = [cell.config for cell in _cells("table1", methods=["coda-prompt"], seeds=[0])]
    per_task = {config.data.tasks: flatten(config.model_dump())["method.components_per_task"] for config in coda}
    assert per_task == {5: 20, 10: 10, 20: 5}
    birds = [cell for cell in _cells("table2", methods=["vq-prompt"]) if cell.benchmark == "cub200"]
    assert [cell.seed for cell in birds] == [0, 12, 24, 36, 48] and birds[0].config.backbone.name == "sup21k"
    assert [cell.seed for cell in _cells("table1", methods=["joint"])] == [0]
    assert not [cell for cell in _cells("table2", methods=["l2p++"]) if cell.benchmark == "cub200"]
    assert {cell.config.backbone.weights for cell in _cells("table3", weights={"ibot1k": "teacher.pth"})} == {
        "teacher.pth",
        None,
    }
    with pytest.raises(UserError, match="table3 has no row for 'apt'"):
        _cells("table3", methods=["apt"])


def test_tables_share_the_runs_that_they_have_in_common() -> None:
    main = {cell.folder for cell in _cells("table1")}
    for name in ("ablation", "samples", "topk", "cost"):
        assert main & {cell.folder for cell in _cells(name)}, name
    assert {cell.folder for cell in _cells("cost")} <= main
    assert {cell.folder for cell in _cells("aggregation")} & {cell.folder for cell in _cells("ablation")}


# What counts as there


def _tree(root: Path, images: int = 4) -> Path:
    """Six made-up classes as folders, with so many training images each."""
    for side, count in (("train", images), ("test", 2)):
        for label, name in enumerate(("apple", "baby", "camel", "dolphin", "elm", "fox")):
            for index in range(count):
                path = root / side / name / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (32, 32), (40 * label, 20 * index, 99)).save(path)
    return root


@pytest.fixture
def things(table: paper.Table, tmp_path: Path) -> paper.Table:
    """The same table as of CIFAR-100, of which this machine has a small made-up copy."""
    _tree(tmp_path / "datasets" / "cifar100")
    column = table.columns[0].model_copy(update={"benchmark": "cifar100", "seeds": (0,)})
    return table.model_copy(update={"columns": (column,), "rows": table.rows[:1]})


def _stand(table: paper.Table, where: Path, out: str = "runs", **settings: Any) -> reproduce.Plan:
    wanted = reproduce.wishes(table, where / out, settings=settings)
    return reproduce.make_plan(table, wanted, where / "book", where / out)


def test_a_run_on_other_images_is_not_the_papers(things: paper.Table, tmp_path: Path) -> None:
    plan = _stand(things, tmp_path)
    assert plan.papers and (plan.missing, plan.otherwise, plan.to_run) == (1, 0, 1)
    assert "cifar100: 6 classes, published are 100" in plan.differences
    (outcome,) = reproduce.carry_out(plan, tmp_path / "book", "cpu")
    assert outcome.run, outcome.reason
    entries = book.read_entries(tmp_path / "book")
    assert len(entries) == len(page.missing(things, entries)) == 1, "the page does not count it either"
    for out in ("runs", "elsewhere"):
        again = _stand(things, tmp_path, out)
        assert (again.missing, again.otherwise, again.to_run) == (1, 1, 0), "it neither counts nor is repeated"
    _tree(tmp_path / "datasets" / "cifar100", images=5)
    other = _stand(things, tmp_path, "third")
    assert (other.missing, other.otherwise, other.to_run) == (1, 0, 1)
    (told,) = other.problems
    assert "holds a run with other images" in told and "--book" in told, "adding it would be refused, hours later"


def test_the_papers_own_run_is_there_wherever_its_images_are(things: paper.Table, tmp_path: Path) -> None:
    reproduce.carry_out(_stand(things, tmp_path), tmp_path / "book", "cpu")
    (entry,) = book.read_entries(tmp_path / "book")
    stream = {**entry.content["stream"], "differences": [], "train_images": [50_000], "test_images": [10_000]}
    content = {**entry.content, "stream": {**stream, "test_classes": [2, 2, 2]}}
    (tmp_path / "book" / entry.path).write_text(json.dumps(sealed(content)))
    (tmp_path / "datasets").rename(tmp_path / "away")
    plan = _stand(things, tmp_path, "elsewhere")
    assert plan.papers and (plan.missing, plan.to_run) == (0, 0)
    assert not page.missing(things, book.read_entries(tmp_path / "book"))
    assert _stand(things, tmp_path, "elsewhere", **{"method.samples": 3}).missing == 1


def test_with_settings_of_ones_own_images_and_weights_must_be_the_same(things: paper.Table, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    files = [_save_weights(tmp_path / name / weights.name, seed) for seed, name in enumerate(("a", "b"))]
    own: dict[str, Any] = {"backbone.name": "test_vit.r160_in1k", "backbone.image_size": 32}
    first, second = ({**own, "backbone.weights": str(file)} for file in files)
    reproduce.carry_out(_stand(things, tmp_path, **first), tmp_path / "book", "cpu")
    there = _stand(things, tmp_path, "elsewhere", **first)
    assert not there.papers and (there.missing, there.to_run) == (0, 0)
    assert _stand(things, tmp_path, "elsewhere", **second).missing == 1, "a file of the same name, but other weights"
    moved = tmp_path / "datasets" / "cifar100"
    moved.rename(tmp_path / "cifar")
    root = {"data.root": str(tmp_path / "cifar")}
    assert _stand(things, tmp_path, "elsewhere", **first, **root).missing == 0, "the same images in another place"
    _tree(tmp_path / "cifar", images=5)
    assert _stand(things, tmp_path, "elsewhere", **first, **root).missing == 1, "other images"


def test_images_of_the_same_names_are_told_apart_by_their_pixels(
    things: paper.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ImageCache(tmp_path / "cache", worth=0)
    monkeypatch.setattr(ImageCache, "usual", lambda: cache)
    reproduce.carry_out(_stand(things, tmp_path, **SMALL), tmp_path / "book", "cpu")
    (entry,) = book.read_entries(tmp_path / "book")
    told = entry.content["data"]["train"]
    assert told["pixels_sha256"] and _stand(things, tmp_path, "elsewhere", **SMALL).missing == 0
    for path in (tmp_path / "datasets").rglob("*.png"):
        Image.new("RGB", (32, 32), (1, 2, 3)).save(path)
    files = datasets.find("cifar100").load(told["stored_side"]).train.files
    place = cache.entry(files) if files else None
    assert place and place.write(lambda steps: None, lambda text: None)
    assert _stand(things, tmp_path, "elsewhere", **SMALL).missing == 1


def test_a_folder_that_holds_another_run_is_told_beside_the_rest(table: paper.Table, tmp_path: Path) -> None:
    reproduce.carry_out(_stand(table, tmp_path, **SMALL), tmp_path / "book", "cpu")
    (changed, *_) = sorted((tmp_path / "runs").rglob("run.json"))
    record = json.loads(changed.read_text())
    record["config"]["training"]["epochs"] += 1
    changed.write_text(json.dumps(record))
    plan = _stand(table, tmp_path, **SMALL)
    assert len(plan.standings) == 2 and "hold a run with other settings" in plan.problems[0]
    assert sorted(standing.there for standing in plan.standings) == [0, 2]
    with pytest.raises(UserError, match="hold a run with other settings"):
        reproduce.carry_out(plan, tmp_path / "book", "cpu")


def _pickles(root: Path, shade: int) -> None:
    """Six made-up classes in files such as CIFAR-100's, in one shade."""
    root.mkdir(parents=True, exist_ok=True)
    classes = [f"class_{label}" for label in range(6)]
    for side, count in (("train", 4), ("test", 2)):
        labels = [label for label in range(6) for _ in range(count)]
        said = {
            b"data": np.full((len(labels), 3072), shade, np.uint8),
            b"fine_labels": labels,
            b"filenames": [f"{place}.png".encode() for place in range(len(labels))],
        }
        (root / side).write_bytes(pickle.dumps(said, protocol=4))
    (root / "meta").write_bytes(pickle.dumps({b"fine_label_names": [name.encode() for name in classes]}, protocol=4))


def test_images_that_are_no_files_are_told_apart_by_their_pixels_too(things: paper.Table, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "datasets" / "cifar100")
    _pickles(tmp_path / "datasets" / "cifar100", 1)
    reproduce.carry_out(_stand(things, tmp_path, **SMALL), tmp_path / "book", "cpu")
    assert _stand(things, tmp_path, "elsewhere", **SMALL).missing == 0
    _pickles(tmp_path / "datasets" / "cifar100", 2)
    assert _stand(things, tmp_path, "elsewhere", **SMALL).missing == 1


def _save_weights(path: Path, seed: int) -> Path:
    path.parent.mkdir()
    torch.manual_seed(seed)
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), path)
    return path


# What is told ahead


def test_how_images_differ_is_told_before_the_question(
    things: paper.Table, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "tables", lambda: (things,))
    answer = probprompt("reproduce", "samples")
    assert answer.code == 0 and "the paper's weights, images and settings" in answer.out
    before, _, after = answer.out.partition("add --yes")
    assert "not as published: cifar100: train: 24 images, published are 50000" in before and after
    answer = probprompt("reproduce", "samples", *OPTIONS)
    assert "the paper's weights, images and settings" not in answer.out and "of your own" in answer.out
    assert "cifar100, 3 tasks, test_vit" in answer.out


def test_a_folder_of_images_can_be_named(tmp_path: Path, probprompt: Command) -> None:
    table, small = ("reproduce", "table2", "--dry-run", "--seed", 0), OPTIONS
    _tree(tmp_path / "mine" / "cifar100")
    root = ("--set", f"data.root={tmp_path / 'mine' / 'cifar100'}")
    answer = probprompt(*table, *small, *root, "--method", "ft")
    assert "to do first: cifar100" not in answer.out and "not as published: cifar100: 6 classes" in answer.out
    needed = "goes for cifar100 and cub200: name a folder that holds each of them under its name"
    assert needed in probprompt(*table, *small, *root, "--method", "probprompt").out
    _tree(tmp_path / "mine" / "cub200")
    root = ("--set", f"data.root={tmp_path / 'mine'}")
    answer = probprompt(*table, *small, *root, "--method", "probprompt")
    assert "to do first: " not in answer.out and "not as published: cub200: 6 classes" in answer.out


def test_weights_on_the_hub_are_fetched_before_the_first_run(
    things: paper.Table, tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = things.columns[0].model_copy(update={"backbone": "dino1k"})
    table = things.model_copy(update={"columns": (column,)})
    monkeypatch.setattr(paper, "tables", lambda: (table,))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))

    def refuse(checkpoint: Any) -> Path:
        raise UserError(f"{checkpoint.source} could not be fetched")

    monkeypatch.setattr(checkpoints, "_download", refuse)
    answer = probprompt("reproduce", "samples", "--device", "cpu")
    assert answer.code == 0 and "to be fetched before the first run: the weights dino1k" in answer.out
    assert "add --yes" in answer.out and "to do first: " not in answer.out
    answer = probprompt("reproduce", "samples", "--device", "cpu", "--yes")
    assert answer.code == 2 and "timm/vit_base_patch16_224.dino could not be fetched" in answer.err
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_hours_of_a_gpu_are_not_those_of_a_processor(probprompt: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answer = probprompt("reproduce", "table2", "--dry-run")
    assert "GPU hours on one NVIDIA H200" in answer.out and "this machine has no GPU: these hours are not" in answer.out


@pytest.mark.parametrize(
    ("study", "first"), [("table2", "method"), ("ablation", "N, mixture, L_DR"), ("topk", "K"), ("samples", "N_s")]
)
def test_symbols_of_the_paper_keep_their_case(probprompt: Command, study: str, first: str) -> None:
    assert re.search(rf"^{first} +run as ", probprompt("reproduce", study, "--dry-run").out, re.MULTILINE)


def test_all_that_is_missing_is_told_at_once_and_nothing_is_started(tmp_path: Path, probprompt: Command) -> None:
    answer = probprompt("reproduce", "table2", "--dry-run")
    assert answer.code == 0 and "82 run(s), 82 missing" in answer.out
    assert "GPU hours on one NVIDIA H200" in answer.out, "from this project's record, where the book has none"
    answer = probprompt("reproduce", "table2", "--dry-run", "--bench", "none.json")
    assert answer.code == 0 and "no estimate of GPU hours: there is no record none.json" in answer.out
    for name in ("cifar100", "cub200"):
        assert f"probprompt data get {name}" in answer.out
    answer = probprompt("reproduce", "table2", "--yes")
    assert answer.code == 2 and "nothing was started" in answer.err
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_there_are_told_with_what_to_do() -> None:
    def lacking(**backbone: Any) -> list[str]:
        return at_hand.lacking([parse_config({"backbone": backbone, "data": {"benchmark": "emoji-r"}})] * 2)

    assert not lacking(name="demo") and not lacking(name="test_vit", weights="random")
    (told,) = lacking(name="sup1k", weights="nowhere.safetensors")
    assert "there is no file nowhere.safetensors" in told
    (told,) = lacking(name="ibot1k")
    assert "checkpoint_teacher.pth" in told and "--weights ibot1k=FILE" in told
    (told,) = lacking(name="vit_base_patch16_224")
    assert "does not say which weights" in told and "--set backbone.weights=FILE" in told
    assert not lacking(name="sup1k"), "fetched from the hub"


def test_a_wrong_option_is_told(probprompt: Command) -> None:
    answer = probprompt("reproduce", "table3", "--weights", "sup1k=file", "--dry-run")
    assert answer.code == 2 and "ibot1k, dino1k" in answer.err


def test_settings_that_do_not_exist_are_told_as_such(probprompt: Command) -> None:
    answer = probprompt("reproduce", "table2", "--dry-run", "--set", "method.nonsense=1")
    assert answer.code == 2 and "nonsense" in answer.err and "data get" not in answer.err


def _bench(path: Path, methods: dict[str, float]) -> Path:
    results = [
        {"method": name, "training": {"images_per_s": speed}, "inference": {"images_per_s": 3 * speed}}
        for name, speed in methods.items()
    ]
    record = {"kind": KIND, "format": FORMAT, "hardware": {"gpu": "NVIDIA H200"}, "results": results}
    path.write_text(json.dumps(record))
    return path


def test_the_cost_is_estimated_from_a_recorded_bench(tmp_path: Path, probprompt: Command) -> None:
    bench = _bench(tmp_path / "speeds.json", {"probprompt": 1000.0, "vq-prompt": 2000.0})
    wanted = paper.find("table3")
    plan = reproduce.make_plan(wanted, reproduce.wishes(wanted, Path("out")), tmp_path / "book", Path("out"))
    found = reproduce.estimate(plan, bench)
    (experiment,) = (each for each in PAPER if (each.benchmark, each.tasks) == ("imagenet-r", 10))
    entries = json.loads(bench.read_text())["results"]
    assert found and found.hours == pytest.approx(sum(6 * run_seconds(entry, experiment) for entry in entries) / 3600)
    assert found.unknown == 18
    answer = probprompt("reproduce", "table3", "--dry-run", "--bench", bench)
    assert f"{found.hours:.1f} GPU hours on one NVIDIA H200, and 18 run(s)" in answer.out


# Carrying it out


def _plan(table: paper.Table, where: Path, seeds: Sequence[int] | None = None) -> reproduce.Plan:
    wanted = reproduce.wishes(table, where / "runs", seeds, settings=SMALL)
    return reproduce.make_plan(table, wanted, where / "book", where / "runs")


class _Impatient(GridWatcher):
    """Interrupts after the first cell."""

    def end(self, outcome: Outcome, rest: float | None) -> None:
        raise KeyboardInterrupt


def test_a_whole_table_comes_early(table: paper.Table, tmp_path: Path) -> None:
    plan = _plan(table, tmp_path)
    assert plan.to_run == 4 and not plan.problems and not plan.measure
    assert [cell.seed for cell in plan.grid.cells] == [0, 0, 1, 1]


def test_a_table_is_run_resumed_and_kept(table: paper.Table, tmp_path: Path) -> None:
    place = tmp_path / "book"
    with pytest.raises(KeyboardInterrupt):
        reproduce.carry_out(_plan(table, tmp_path, [3]), place, "cpu", _Impatient())
    assert len(book.read_entries(place)) == 1, "what was finished is kept"
    plan = _plan(table, tmp_path, [3])
    assert plan.to_run == 1
    (outcome,) = reproduce.carry_out(plan, place, "cpu")
    assert outcome.run
    found = {(entry.seed, entry.varied.get("method.samples", 30)) for entry in book.read_entries(place)}
    assert found == {(3, 5), (3, 30)}
    (tmp_path / "runs").rename(tmp_path / "away")
    assert _plan(table, tmp_path, [3]).to_run == 0, "what the book has is not run again"
    (tmp_path / "away").rename(tmp_path / "runs")
    files = sorted(place.rglob("*.json"))
    for path in files:
        path.unlink()
    plan = _plan(table, tmp_path, [3])
    assert plan.to_run == 0 and len(plan.grid.cells) == 2, "finished, and only to be added"
    reproduce.carry_out(plan, place, "cpu", _Impatient())  # no cell begins, so none ends
    assert sorted(place.rglob("*.json")) == files


def test_the_command_asks_runs_and_shows_the_table(
    table: paper.Table, tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "tables", lambda: (table,))
    command = ("reproduce", "samples", "--seed", 0, *OPTIONS, "--device", "cpu")
    answer = probprompt(*command)
    assert answer.code == 0 and "add --yes" in answer.out and "2 run(s), 2 missing" in answer.out
    assert not (tmp_path / "runs").exists() and not (tmp_path / "results").exists()
    (blocked,) = (cell.folder for cell in _plan_of(table).grid.cells if dict(cell.varied).get("method.samples") == 5)
    blocked.mkdir(parents=True)
    (blocked / "something").write_text("in the way")
    answer = probprompt(*command, "--yes")
    assert answer.code == 1 and "failed: 1 of 2 runs" in answer.out
    assert len(book.read_entries(tmp_path / "results")) == 1, "one that fails takes nobody with it"
    (blocked / "something").unlink()
    answer = probprompt(*command, "--yes")
    assert answer.code == 0 and "50.00 ± 1.00" in answer.out
    assert answer.out.count("ours, pictures, test_vit (random) at 32 px, `published` †‡") == 2
    answer = probprompt(*command)
    assert answer.code == 0 and "2 run(s), 0 missing" in answer.out and "ours, " in answer.out


def _plan_of(table: paper.Table) -> reproduce.Plan:
    out = Path("runs/reproduce")
    return reproduce.make_plan(table, reproduce.wishes(table, out, [0], settings=SMALL), Path("results"), out)


def test_costs_are_measured_where_the_book_has_none(tmp_path: Path) -> None:
    cost = paper.find("cost").model_copy(update={"rows": paper.find("cost").rows[-1:]})
    plan = reproduce.make_plan(cost, [], tmp_path / "book", tmp_path / "runs")
    assert plan.measure
    small = {"backbone": {"name": "test_vit", "image_size": 32}, "training": {"batch": 4}}
    path = reproduce.measure_costs(cost, tmp_path / "book", torch.device("cpu"), settings=small, seconds=0.01)
    benches = page.read_benches(tmp_path / "book")
    assert path.is_file() and [entry["method"] for entry in benches[0]["results"]] == ["probprompt"]
    assert "test_vit" in page.paper_table(cost, [], benches)
    assert reproduce.make_plan(cost, [], tmp_path / "book", tmp_path / "runs").measure, "that was no ViT-B/16"
    text = path.read_text().replace('"backbone": "test_vit"', '"backbone": "vit_base_patch16_224"')
    write_record(path, json.loads(text))
    assert not reproduce.make_plan(cost, [], tmp_path / "book", tmp_path / "runs").measure
    write_record(path, json.loads(text.replace('"preset": "published"', '"preset": null')))
    assert reproduce.make_plan(cost, [], tmp_path / "book", tmp_path / "runs").measure, "those were other settings"
    write_record(path, json.loads(text.replace('"stored_side": "full"', '"stored_side": null')))
    assert reproduce.make_plan(cost, [], tmp_path / "book", tmp_path / "runs").measure, "of smaller copies"
    write_record(path, json.loads(text.replace('"processor": "', '"processor": "not ')))
    assert reproduce.make_plan(cost, [], tmp_path / "book", tmp_path / "runs").measure, "that was another machine"


def test_a_wheel_brings_the_speeds_that_estimates_need() -> None:
    root = Path(__file__).parent.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    brought = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    (inside,) = (place for file, place in brought.items() if root / file == root / "results" / reproduce.SPEEDS)
    assert root / "src" / inside == Path(reproduce.__file__).parent / "speeds.json"


@pytest.mark.parametrize("table", paper.tables(), ids=lambda table: table.name)
def test_every_cell_has_the_settings_behind_its_number_and_no_others(table: paper.Table) -> None:
    for wish in reproduce.wishes(table, Path("out"), seeds=[0]):
        for cell in Grid(wish.spec, wish.out).cells:
            assert book.departures({"config": cell.config.model_dump(mode="json")}) == wish.row.as_run, wish.row.label
