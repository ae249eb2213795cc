"""The results book: the paper's numbers, one file per run without paths, and a page that nobody types."""

import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from probprompt import api, presets
from probprompt.config import merge, parse_config
from probprompt.errors import UserError
from probprompt.evaluation import metrics
from probprompt.results import book, figures, page, paper
from probprompt.runs.grid import nest
from probprompt.runs.naming import backbone_slug, backbone_words
from probprompt.runs.record import Run, config_hash
from probprompt.storage import content_hash, with_hash

ROOT = Path(__file__).parent.parent
Command = Callable[..., Any]


# What the paper prints


def _printed(name: str, measure: str, key: str) -> dict[str, float]:
    rows = paper.find(name).rows
    return {row.label: row.printed[key][measure][0] for row in rows if measure in row.printed.get(key, {})}


def test_all_tables_of_the_paper_are_there_in_its_order() -> None:
    names = [table.name for table in paper.tables()]
    assert names == ["table1", "table2", "table3", "ablation", "topk", "samples", "cost", "aggregation"]
    assert [table.number for table in paper.tables()] == list(range(1, 9))
    with pytest.raises(UserError, match="did you mean 'table1'"):
        paper.find("tabel1")


@pytest.mark.parametrize("table", paper.tables(), ids=lambda table: table.name)
def test_printed_numbers_are_percentages_at_rising_lines(table: paper.Table) -> None:
    lines = [row.line for row in table.rows]
    assert lines == sorted(set(lines))
    keys = {column.key for column in table.columns}
    for row in table.rows:
        assert row.printed.keys() <= keys and set(row.costs) == set(table.costs)
        for cell in row.printed.values():
            assert set(cell) <= set(table.measures)
            for mean, *spread in cell.values():
                assert 0 < mean < 100 and all(0 < deviation < 15 for deviation in spread)
            if {"FAA", "CAA"} <= cell.keys():  # the end is never better than the course
                assert cell["FAA"][0] < cell["CAA"][0]
        parse_config(presets.settings("published", row.method, table.columns[0].benchmark))


SOURCE = Path(os.environ.get("PROBPROMPT_PAPER") or next(iter(sorted(ROOT.parent.glob("*/paper.tex"))), "paper.tex"))
"""The LaTeX source of the paper: named so, or in a folder beside this one."""
NUMBERS = "350f094804122346"
"""Of all printed numbers, when they were last compared with the source."""


def _numbers(table: paper.Table, row: paper.Row) -> list[float]:
    """In the order of print."""
    cells = (row.printed.get(column.key, {}).get(measure, ()) for column in table.columns for measure in table.measures)
    return [*itertools.chain(*cells), *(row.costs[cost] for cost in table.costs)]


@pytest.mark.skipif(not SOURCE.is_file(), reason="the paper's source is not here: PROBPROMPT_PAPER=paper.tex names it")
@pytest.mark.parametrize("table", paper.tables(), ids=lambda table: table.name)
def test_printed_numbers_are_those_of_the_papers_source(table: paper.Table) -> None:
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    for row in table.rows:
        text = " ".join(lines[row.line - 1 :]).partition(r"\\")[0]
        assert [float(found) for found in re.findall(r"\d+\.\d+", text)] == _numbers(table, row), row.label


def test_printed_numbers_have_not_changed_since_they_were_compared() -> None:
    said = [[table.name, row.line, row.label, _numbers(table, row)] for table in paper.tables() for row in table.rows]
    assert hashlib.sha256(json.dumps(said).encode()).hexdigest()[: len(NUMBERS)] == NUMBERS


@pytest.mark.parametrize("name", ["table1", "table2", "table3"])
def test_the_papers_method_leads_every_column_as_its_text_says(name: str) -> None:
    table = paper.find(name)
    for column, measure in itertools.product(table.columns, table.measures):
        found = _printed(name, measure, column.key)
        found.pop("Joint-Training", None)
        assert max(found, key=lambda label: found[label]) == "ProbPrompt"


def test_tables_that_speak_of_the_same_experiment_agree() -> None:
    own = paper.find("table1").rows[-1].printed["10"]
    assert paper.find("ablation").rows[-1].printed["10"] == own
    (thirty,) = (row for row in paper.find("samples").rows if row.label == "30")
    assert thirty.printed["10"] == own and not thirty.settings
    without = paper.find("ablation").rows[2]
    assert paper.find("aggregation").rows[-1].printed == without.printed
    assert paper.find("aggregation").rows[-1].settings == without.settings
    first = {row.method: row.printed["10"]["FAA"] for row in paper.find("table1").rows if "10" in row.printed}
    assert all(row.printed["10"]["FAA"] == first[row.method] for row in paper.find("cost").rows)


def test_findings_of_the_text_hold_in_the_numbers() -> None:
    ablation = list(_printed("ablation", "FAA", "10").values())
    assert ablation[0] < ablation[1] < ablation[2] < ablation[4] and ablation[1] < ablation[3]
    samples = _printed("samples", "FAA", "10")
    assert samples["5"] < samples["10"] < samples["none"] < samples["40"] < samples["20"] < samples["30"]
    for key in ("5", "10", "20"):  # only marginal gains by leaving distributions away
        values = _printed("topk", "FAA", key).values()
        assert max(values) - min(values) < 0.3


def test_rows_of_settings_are_settings_of_the_method() -> None:
    for table in paper.tables():
        for row in table.rows:
            base = presets.settings("published", row.method, "imagenet-r", 10)
            parse_config(merge(base, nest(row.settings)))
            assert not row.settings or table.study


# Names


@pytest.mark.parametrize(
    ("backbone", "slug", "words"),
    [
        ({"name": "demo"}, "demo", "demo"),
        ({"name": "sup1k"}, "vit-b16-sup1k", "ViT-B/16 (sup1k)"),
        ({"name": "ibot1k", "weights": "/x/teacher.pth"}, "vit-b16-ibot1k", "ViT-B/16 (ibot1k)"),
        (
            {"name": "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "weights": "/x/y.safetensors"},
            "vit-ti16-augreg-in21k-ft-in1k",
            "ViT-Ti/16 (augreg-in21k-ft-in1k)",
        ),
        (
            {"name": "vit_tiny_patch16_224", "weights": "vit_tiny_patch16_224.mine.safetensors@12ab"},
            "vit-ti16-mine",
            "ViT-Ti/16 (mine)",
        ),
        ({"name": "vit_small_patch14_dinov2", "weights": "/x/d.safetensors"}, "vit-s14-dinov2", "ViT-S/14 (dinov2)"),
        ({"name": "vit_small_patch14_dinov2.lvd142m"}, "vit-s14-dinov2", "ViT-S/14 (dinov2)"),
        ({"name": "sup1k", "image_size": 384}, "vit-b16-sup1k-384px", "ViT-B/16 (sup1k) at 384 px"),
        ({"name": "vit_base_patch16_384.augreg_in1k"}, "vit-b16-at-384-augreg-in1k", "ViT-B/16 at 384 (augreg-in1k)"),
        ({"name": "test_vit", "weights": "random"}, "test-vit-random", "test_vit (random)"),
    ],
)
def test_backbones_are_named_shortly(backbone: dict[str, Any], slug: str, words: str) -> None:
    assert backbone_slug(backbone) == slug and backbone_words(backbone) == words


# Files of runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Run:
    config: dict[str, Any] = {
        "data": {"benchmark": str(pictures), "tasks": 3},
        "backbone": {"name": "test_vit", "weights": "random", "image_size": 32},
        "method": {"name": "probprompt", "samples": 3, "components": 4, "tokens": 4, "blocks": [0, 2]},
        "training": {"epochs": 1, "batch": 8},
        "alignment": {"epochs": 1},
    }
    return api.train(config=config, out=tmp_path_factory.mktemp("grid") / "one", device="cpu")


def _copy(run: Run, folder: Path, **changes: Any) -> Path:
    """A run's folder again, with other entries in its record."""
    folder.mkdir(parents=True)
    for name in ("accuracy.json", "diagnostics.json"):
        (folder / name).write_bytes((run.folder / name).read_bytes())
    (folder / "run.json").write_text(json.dumps({**run.record, **changes}))
    return folder


def _with_config(run: Run, **groups: Any) -> dict[str, Any]:
    config = parse_config(merge(run.record["config"], groups))
    return {"config": config.model_dump(mode="json"), "config_hash": config_hash(config)}


def test_a_file_says_everything_and_no_path(run: Run, tmp_path: Path, pictures: Path) -> None:
    (added,), _ = book.add_runs([run.folder], tmp_path)
    name = added.path.relative_to(tmp_path).as_posix()
    assert re.fullmatch(r"pictures/test-vit-random-32px/probprompt-custom,[\w,=.\[\]-]+-s0\.json", name)
    text = added.path.read_text()
    assert str(pictures) not in text and str(run.folder) not in text and '"/' not in text and "file:/" not in text
    (entry,) = book.read_entries(tmp_path)
    content = entry.content
    split = run.record["stream"]["split_hash"][:12]
    assert content["config"]["data"]["benchmark"] == f"pictures@{split}" and entry.benchmark == "pictures"
    assert content["metrics"] == run.metrics and np.array_equal(entry.matrix, run.matrix, equal_nan=True)
    for key in ("versions", "hardware", "backbone", "preprocessing", "time", "peak_memory_mb", "trainable_parameters"):
        assert content[key] == run.record[key]
    assert content["similarity"]["mean"] == pytest.approx(
        json.loads((run.folder / "diagnostics.json").read_text())["similarity"]["mean"]
    )
    assert entry.departures["method.samples"] == 3 and "method.name" not in entry.departures
    assert book.same_settings(entry, run.config)
    assert not book.same_settings(entry, parse_config(merge(run.record["config"], {"seeds": {"init": 7}})))


def test_weights_in_a_file_are_named_by_name_and_hash(run: Run) -> None:
    record = merge(run.record, {"config": {"backbone": {"weights": "/home/me/vit.safetensors"}}})
    record = merge(record, {"backbone": {"source": "file:/home/me/vit.safetensors", "sha256": "ab" * 32}})
    found = book.portable(record)
    assert found["config"]["backbone"]["weights"] == "vit.safetensors@abababababab"
    assert found["backbone"]["source"] == "file:vit.safetensors" and "/home" not in json.dumps(found)
    windows = merge(record, {"config": {"backbone": {"weights": "C:\\me\\vit.safetensors"}}})
    assert book.portable(windows)["config"]["backbone"]["weights"] == "vit.safetensors@abababababab"


def test_unfinished_runs_are_refused_and_then_nothing_is_written(run: Run, tmp_path: Path, probprompt: Command) -> None:
    grid = tmp_path / "grid"
    _copy(run, grid / "a")
    _copy(run, grid / "b", status="running", **_with_config(run, seeds={"order": 1}))
    answer = probprompt("book", "add", grid, "--book", tmp_path / "book")
    assert answer.code == 2 and str(grid / "b") in answer.err and "--skip-unfinished" in answer.err
    assert not (tmp_path / "book").exists()
    answer = probprompt("book", "add", grid, "--book", tmp_path / "book", "--skip-unfinished")
    assert answer.code == 0 and "passed over, not finished: 1" in answer.out
    assert len(book.read_entries(tmp_path / "book")) == 1
    with pytest.raises(UserError, match="is no run and holds none"):
        book.add_runs([tmp_path / "book"], tmp_path / "other")


def test_the_book_may_be_named_before_and_behind_the_command(
    run: Run, tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = probprompt("book", "--book", "before", "add", run.folder)
    assert answer.code == 0 and len(book.read_entries(tmp_path / "before")) == 1
    answer = probprompt("book", "add", run.folder, "--book", "behind")
    assert answer.code == 0 and len(book.read_entries(tmp_path / "behind")) == 1
    answer = probprompt("book", "--book", "before", "add", run.folder, "--book", "before")
    assert answer.code == 0
    assert not (tmp_path / "results").exists()
    answer = probprompt("book", "--book", "before", "add", run.folder, "--book", "behind")
    assert answer.code == 2 and "--book names two folders, before and behind" in answer.err
    answer = probprompt("book", "--page", "page.md", "add", run.folder)
    assert answer.code == 2 and "--page goes with probprompt book alone" in answer.err
    assert not (tmp_path / "results").exists()
    assert probprompt("book", "add", run.folder).code == 0 and len(book.read_entries(tmp_path / "results")) == 1


def test_a_run_of_other_settings_or_weights_is_not_overwritten_silently(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "book"
    (first,), _ = book.add_runs([run.folder], place)
    assert [one.what for one in book.add_runs([run.folder], place)[0]] == ["there already"]
    again = _copy(run, tmp_path / "again", created="later")
    assert [one.what for one in book.add_runs([again], place)[0]] == ["replaced"]
    batch = _copy(run, tmp_path / "batch", **_with_config(run, evaluation_batch=7))
    with pytest.raises(UserError, match=r"other settings.*evaluation_batch.*--replace"):
        book.add_runs([batch], place)
    weights = _copy(run, tmp_path / "weights", backbone={**run.record["backbone"], "sha256": "0" * 64})
    with pytest.raises(UserError, match="sha256 of the weights"):
        book.add_runs([weights], place)
    assert json.loads(first.path.read_text())["created"] == "later"
    assert [one.what for one in book.add_runs([batch], place, replace=True)[0]] == ["replaced"]
    with pytest.raises(UserError, match="would both be"):
        book.add_runs([run.folder, again], tmp_path / "other")


def test_other_settings_and_seeds_get_files_of_their_own(run: Run) -> None:
    names = [
        book.file_of(book.portable({**run.record, **_with_config(run, **groups)})).rpartition("/")[2]
        for groups in (
            {},
            {"seeds": {"order": 1, "init": 1, "data": 1}},
            {"seeds": {"order": 1}},
            {"method": {"top_k": 2}},
            {"data": {"validation": 0.2}},
        )
    ]
    assert len(set(names)) == 5 and names[1].endswith("-s1.json") and names[2].endswith("-s1.0.0.json")
    whole = book.departures({**run.record, **_with_config(run, method={"top_k": 4})})
    assert whole == book.departures(run.record), "of four distributions four are all"


def test_what_was_changed_by_hand_is_refused(run: Run, tmp_path: Path) -> None:
    tampered = _copy(run, tmp_path / "run", config=merge(run.record["config"], {"training": {"epochs": 99}}))
    with pytest.raises(UserError, match="changed by hand"):
        book.add_runs([tampered], tmp_path / "book")
    (added,), _ = book.add_runs([run.folder], tmp_path / "book")
    content = json.loads(added.path.read_text())
    content["metrics"]["FAA"] += 1
    added.path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="its metrics are not those of its matrix"):
        book.read_entries(tmp_path / "book")
    content["metrics"]["FAA"] -= 1
    added.path.write_text(json.dumps(content))
    assert len(book.read_entries(tmp_path / "book")) == 1, "the same content in another order of spaces and lines"
    content["config"]["training"]["batch"] += 1
    added.path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="has not the hash that it records"):
        book.read_entries(tmp_path / "book")
    added.path.write_text("[]")
    with pytest.raises(UserError, match="no file of a results book"):
        book.read_entries(tmp_path / "book")


# The page


TINY = {"name": "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "weights": "tiny.safetensors@e91dc1d51299"}
IMAGES = {"imagenet-r": (24_000, 6_000), "cifar100": (50_000, 10_000), "cub200": (5_994, 5_794)}


def _made(
    method: str,
    final: float,
    seed: int = 0,
    benchmark: str = "cifar100",
    tasks: int = 10,
    preset: str = "published",
    backbone: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """What the book says of a run that never was, and that had ``final`` % on every task from first to last."""
    config = parse_config(
        merge(
            presets.settings(preset, method, benchmark, tasks),
            merge(
                {"backbone": backbone or {}, "seeds": dict.fromkeys(("order", "init", "data"), seed)}, settings or {}
            ),
        )
    )
    size = 1 if method == "joint" else tasks
    matrix = np.full((size, size), np.nan)
    matrix[np.triu_indices(size)] = final
    name = config.backbone.name
    images = IMAGES.get(benchmark, (100, 50))
    content: dict[str, Any] = {
        "book": book.FORMAT,
        "created": "",
        "config": config.model_dump(mode="json"),
        "config_hash": config_hash(config),
        "backbone": {"name": name, "source": "hub:x", "sha256": f"{name:0<64}"[:64]},
        "stream": {
            "tasks": [["a"]] * tasks,
            "test_classes": [1] * tasks,
            "split_hash": f"{benchmark:0<64}",
            "differences": [],
            "train_images": [images[0]],
            "test_images": [images[1]],
        },
        "versions": {"torch": "2.11.0", "timm": "1.0.29"},
        "hardware": {"device": "cuda", "gpu": "NVIDIA H200", "machine": "x86_64"},
        "evaluated_on": "test",
        "matrix": metrics.to_json(matrix),
        "metrics": metrics.summarize(matrix),
        "similarity": {"mean": 0.9},
        "pictures": {"similarity": {"labels": ["a", "b"], "matrix": [[1.0, 0.9], [0.9, 1.0]]}},
        "trainable_parameters": 10,
        "time": {"total_s": 60.0},
    }
    content |= changes
    return with_hash(content)


def _entry(*arguments: Any, **named: Any) -> book.Entry:
    content = _made(*arguments, **named)
    return book.Entry(book.file_of(content), content)


def _ours(table: str, entries: list[book.Entry]) -> list[str]:
    """The lines of a table that are ours, without the spaces that align them."""
    lines = page.paper_table(paper.find(table), entries).splitlines()
    return [re.sub(r" +", " ", line) for line in lines if "ours" in line.partition("|")[2]]


def test_the_papers_experiment_stands_unmarked_beside_its_number() -> None:
    entries = [_entry("probprompt", 89.0, 0), _entry("probprompt", 90.0, 1), _entry("joint", 92.0)]
    table = page.paper_table(paper.find("table2"), entries)
    assert "| ours, ViT-B/16 (sup1k), `published` | 89.50 ± 0.50 (2) | 89.50 ± 0.50 (2) | — | — |" in re.sub(
        " +", " ", table
    )
    assert "| ours, ViT-B/16 (sup1k), `published` | 92.00 (1) | — | — | — |" in re.sub(" +", " ", table)
    assert page.WEIGHTS not in table and page.DATA not in table
    assert "3 of 82 runs are here" in table
    lines = table.splitlines()
    assert "89.38 ± 0.22 (5)" in lines[lines.index(next(line for line in lines if "89.50" in line)) - 1]


def test_nobody_mistakes_other_weights_or_images_for_the_papers() -> None:
    tiny = _entry("probprompt", 76.0, backbone=TINY)
    few = _entry("vq-prompt", 75.0, skipped=["x.png"])
    table = page.paper_table(paper.find("table2"), [tiny, few])
    ours = _ours("table2", [tiny, few])
    assert any("ours, ViT-Ti/16 (augreg-in21k-ft-in1k), `published` † |" in line for line in ours)
    assert any("ours, ViT-B/16 (sup1k), `published` ‡ |" in line for line in ours) and len(ours) == 2
    assert "- † other weights" in table and "- ‡ other images" in table and "0 of 82 runs" in table
    file = _entry("probprompt", 76.0, backbone={"name": "sup1k", "weights": "any.safetensors@00"})
    assert "†" in _ours("table2", [file])[0], "a file under a name could be anything"
    own = _entry("probprompt", 70.0, benchmark="imagenet-r", backbone={"name": "ibot1k", "weights": "t.pth@00"})
    assert "†" not in _ours("table3", [own])[0], "these are published as a file only"


def test_runs_stand_only_where_they_belong() -> None:
    sketches = _entry("probprompt", 60.0, benchmark="tu-berlin")
    held_out = _entry("probprompt", 61.0, evaluated_on="validation")
    other = _entry("probprompt", 62.0, settings={"method": {"initial_std": 0.5}})
    for table in paper.tables():
        assert not _ours(table.name, [sketches, held_out, other])
    dino = _entry("probprompt", 63.0, benchmark="imagenet-r", backbone={"name": "vit_small_patch14_dinov2"})
    assert not _ours("table1", [dino]) and "†" in _ours("table3", [dino])[0]
    cifar = _entry("probprompt", 64.0, backbone={"name": "vit_small_patch14_dinov2", "image_size": 224})
    assert "ours, ViT-S/14 (dinov2) at 224 px, `published` †" in _ours("table2", [cifar])[0]
    large = _entry("probprompt", 64.0, backbone={"image_size": 384})
    assert "ours, ViT-B/16 (sup1k) at 384 px, `published` †" in _ours("table2", [large])[0]
    twenty = _entry("probprompt", 65.0, benchmark="imagenet-r", tasks=20)
    assert "| — | — | — | — | 65.00 (1) | 65.00 (1) |" in _ours("table1", [twenty])[0]


def test_a_study_on_another_benchmark_is_shown_as_such_and_never_by_one_row() -> None:
    whole = _entry("probprompt", 80.0, backbone=TINY)
    some = _entry("probprompt", 79.0, backbone=TINY, settings={"method": {"top_k": 7}})
    assert not _ours("topk", [whole])
    lines = _ours("topk", [whole, some])
    assert len(lines) == 2 and all("ours, cifar100, ViT-Ti/16" in line and "†‡" in line for line in lines)
    assert "| — | 79.00 (1) | — |" in lines[0] and "| — | 80.00 (1) | — |" in lines[1]
    exact = _entry("probprompt", 80.0, benchmark="imagenet-r")
    assert len(_ours("topk", [exact])) == len(_ours("samples", [exact])) == len(_ours("ablation", [exact])) == 1


def test_rows_of_a_study_are_over_the_same_seeds() -> None:
    """Each seed has its own order of classes: a mean over three against one of them would show the orders."""
    whole = [_entry("probprompt", final, seed, backbone=TINY) for seed, final in enumerate((80.0, 90.0, 95.0))]
    few = {"method": {"top_k": 7}}
    some = [_entry("probprompt", 79.0, seed, backbone=TINY, settings=few) for seed in (0, 1)]
    lines = _ours("topk", [*whole, *some])
    assert "| — | 79.00 ± 0.00 (2) | — |" in lines[0] and "| — | 85.00 ± 5.00 (2) | — |" in lines[1]
    assert "over the seeds that all of them have" in page.paper_table(paper.find("topk"), [*whole, *some])
    apart = _ours("topk", [whole[2], *some])
    assert "95.00 (1)" in apart[1] and "(2)" in apart[0], "better shown with their counts than not at all"
    assert "90.00 (1)" in _ours("table2", whole[1:2])[0] and "(3)" in _ours("table2", whole)[0]


def test_marked_results_say_so() -> None:
    (line,) = _ours("table2", [_entry("dual-prompt", 80.0, marks=["predictions depend on the batch"])])
    assert "§" in line


def _bench(created: str, fps: float, *methods: str, **changes: Any) -> dict[str, Any]:
    """A record of costs that never was."""
    cost = {"with_backbone_mb": 345.0, "epoch_s": 66.0, "fps": fps}
    config = {"preset": None, "data": {"benchmark": "emoji-r"}, "backbone": {"weights": "random"}}
    entry = {"backbone": "vit_base_patch16_224", "precision": "bf16", "batch": 128, "cost": cost, "config": config}
    results = [{"method": method, **entry, **changes} for method in methods]
    return {"created": created, "hardware": {"gpu": "NVIDIA H200", "machine": "x86_64"}, "results": results}


def test_measured_costs_stand_beside_the_papers() -> None:
    records = [_bench("2026", 90.0, "vq-prompt"), _bench("2026", 80.0, "vq-prompt", backbone="vit_tiny_patch16_224")]
    table = re.sub(" +", " ", page.paper_table(paper.find("cost"), [], records))
    told = "| ours, NVIDIA H200, ViT-B/16 (random), bf16, batch 128 †‡¶ | — | 345.00 | 1.10 (66.0 s) | 90.00 |"
    assert told in table and "| ours, NVIDIA H200, ViT-Ti/16 (random), bf16, batch 128 †‡¶ |" in table
    config = {"preset": "published", "data": {"benchmark": "imagenet-r"}, "backbone": {"weights": None}}
    papers = _bench("2026", 90.0, "vq-prompt", backbone="sup1k", config=config)
    assert "ViT-B/16 (sup1k), bf16, batch 128 | —" in re.sub(
        " +", " ", page.paper_table(paper.find("cost"), [], [papers])
    )


def test_costs_on_a_processor_are_shown_only_where_there_are_no_others() -> None:
    slow = {**_bench("2026", 9.0, "vq-prompt"), "hardware": {"processor": "Slow", "machine": "x86_64"}}
    alone, both = (
        page.paper_table(paper.find("cost"), [], records) for records in ([slow], [slow, _bench("2026", 90.0, "apt")])
    )
    assert "ours, Slow, ViT-B/16 (random)" in alone and "Slow" not in both


@pytest.mark.parametrize("order", [1, -1])
def test_costs_of_different_records_are_not_mixed(order: int) -> None:
    """The record with most methods counts, and the youngest of several."""
    old, young = (_bench(f"2026-0{month}", 10.0 * month, "vq-prompt", "probprompt") for month in (1, 2))
    records = [old, young, _bench("2026-03", 99.0, "probprompt")][::order]
    lines = [line for line in page.paper_table(paper.find("cost"), [], records).splitlines() if "H200" in line]
    assert len(lines) == 2 and all("20.00 |" in line for line in lines)


def test_other_settings_and_lists_of_ones_own_are_marked() -> None:
    assert "`matched` ¶" in _ours("table2", [_entry("vq-prompt", 80.0, preset="matched")])[0]
    own = {**_made("probprompt", 80.0, benchmark="imagenet-r")["stream"], "differences": ["the list is another"]}
    assert "`published` |" in _ours("table1", [_entry("probprompt", 80.0, benchmark="imagenet-r")])[0]
    unsaid = {name: part for name, part in own.items() if name != "differences"}
    for stream in (own, unsaid):
        entry = _entry("probprompt", 80.0, benchmark="imagenet-r", stream=stream)
        assert "`published` ‡" in _ours("table1", [entry])[0]
    stream = {**_made("probprompt", 80.0)["stream"], "differences": ["images were encoded anew"]}
    assert "`published` ‡" in _ours("table2", [_entry("probprompt", 80.0, stream=stream)])[0]


def test_crops_of_smaller_copies_are_marked_where_published_code_takes_whole_photographs() -> None:
    small = _entry("probprompt", 80.0, benchmark="imagenet-r", settings={"data": {"stored_side": 256}})
    assert "`published` ¶" in _ours("table1", [small])[0]
    assert len(page.missing(paper.find("table1"), [small])) == len(page.missing(paper.find("table1"), []))
    tiny = _entry("probprompt", 80.0, settings={"data": {"stored_side": "full"}})
    assert "`published` |" in _ours("table2", [tiny])[0], "images of 32 pixels are the same in either way"


def test_figures_do_not_mix_crops_of_copies_and_of_whole_photographs() -> None:
    there = {"benchmark": "imagenet-r", "tasks": 10}
    small = {"data": {"stored_side": 256}}
    runs = [_entry(method, 60.0, **there) for method in ("vq-prompt", "probprompt", "coda-prompt")]
    runs += [_entry(method, 40.0, settings=small, **there) for method in ("dual-prompt", "l2p++")]
    (picture,) = [picture for picture in figures.pictures(runs) if picture.title.startswith("Figure 2")]
    assert "L2P++" not in picture.caption, "of the two ways that with more methods is shown"


def test_a_number_that_others_measured_is_run_as_they_did() -> None:
    """The paper's DualPrompt is CODA-Prompt's: what its authors published stands there marked."""
    row = next(row for row in paper.find("table1").rows if row.method == "dual-prompt")
    there = {"benchmark": "imagenet-r", "backbone": {"name": "sup1k"}}
    (theirs,) = _ours("table1", [_entry("dual-prompt", 70.0, settings=nest(row.protocol), **there)])
    (own,) = _ours("table1", [_entry("dual-prompt", 70.0, **there)])
    assert "`published` |" in theirs and "`published` ¶ |" in own


def test_the_page_is_made_from_the_files_and_shows_every_run(tmp_path: Path, probprompt: Command) -> None:
    place = tmp_path / "results"
    made = [
        _made(method, 70.0 + place_, seed, backbone=TINY, preset="matched")
        for place_, method in enumerate(("vq-prompt", "coda-prompt", "probprompt", "ranpac"))
        for seed in (0, 1)
    ]
    made.append(_made("probprompt", 55.0, benchmark="tu-berlin", preset="flagship"))
    for content in made:
        path = place / book.file_of(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    (place / "emoji-r" / "demo").mkdir(parents=True)
    (place / "emoji-r" / "demo" / "notes.json").write_text("{}")  # is passed over
    answer = probprompt("book", "--book", place, "--page", tmp_path / "RESULTS.md")
    assert answer.code == 0 and "9 run(s)" in answer.out
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert page.build(place, tmp_path / "RESULTS.md")[0] == text
    assert "### cifar100, 10 tasks, ViT-Ti/16" in text and "### tu-berlin, 10 tasks" in text and "ranpac" in text
    assert "73.00 ± 0.00" in text and "**73.00 ± 0.00**" in text
    links = re.findall(r"\]\((results/figures[^)]+)\)", text)
    assert len(links) == 4 and all((tmp_path / link).read_bytes().startswith(b"\x89PNG") for link in links)
    assert str(tmp_path) not in text
    (place / book.file_of(made[0])).unlink()
    assert page.build(place, tmp_path / "RESULTS.md")[0] != text


def test_figures_compare_methods_over_the_same_seeds_alone_and_say_which() -> None:
    """A seed has its own order of classes: a mean over others would compare other tasks."""

    def drawn(*runs: tuple[str, int]) -> dict[str, figures.Picture]:
        entries = [_entry(method, 60.0 + 9 * seed, seed) for method, seed in runs]
        return {picture.title.partition(":")[0]: picture for picture in figures.pictures(entries)}

    both = drawn(("vq-prompt", 0), ("vq-prompt", 1), ("probprompt", 0), ("probprompt", 1))
    one = drawn(("vq-prompt", 0), ("vq-prompt", 1), ("probprompt", 0))
    assert {"Figure 1c", "Figure 2", "Figure 4"} <= set(both) and set(both) == set(one)
    assert all("the mean over seeds 0, 1" in both[name].caption for name in ("Figure 1c", "Figure 4"))
    assert all("seed 0" in one[name].caption for name in ("Figure 1c", "Figure 2", "Figure 4"))
    same = drawn(("vq-prompt", 0), ("probprompt", 0))
    assert one["Figure 4"].draw() == same["Figure 4"].draw() != both["Figure 4"].draw()
    shown = drawn(("l2p++", 2), ("vq-prompt", 0), ("vq-prompt", 1), ("probprompt", 1))
    assert "seed 1" in shown["Figure 1c"].caption, "the seed that most methods have; others are left out"


def _drawn(monkeypatch: pytest.MonkeyPatch, picture: figures.Picture) -> Figure:
    """What a picture shows, before it is pixels."""
    kept: list[Figure] = []

    def keep(figure: Figure) -> bytes:
        kept.append(figure)
        return b""

    monkeypatch.setattr(figures, "_png", keep)
    picture.draw()
    return kept[0]


def test_figures_are_of_ten_tasks_and_groups_of_bars_have_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = {"embedding": "PCA", "points": [[0.0, 1.0]], "labels": [0], "names": ["a"], "task": 1}
    entries = [_entry(m, 60.0 + k, tasks=k, preset="matched") for k in (5, 10) for m in ("vq-prompt", "probprompt")]
    entries.append(_entry("l2p++", 60.0, tasks=10, preset="matched"))
    for entry in entries:
        entry.content["pictures"]["queries"] = queries
    made = {picture.title.partition(":")[0]: picture for picture in figures.pictures(entries)}
    assert "the first of 5 tasks" in made["Figure 1a"].caption, "as the paper's"
    assert any("the first of 10 tasks" in picture.caption for picture in figures.pictures(entries[2:]))
    crowd = {**queries, "names": [str(index) for index in range(43)]}
    for entry in entries[:2]:
        entry.content["pictures"]["queries"] = crowd
    (first, *_) = figures.pictures(entries)
    assert "the first of 10 tasks" in first.caption and first.caption.endswith("each class has its colour and shape.")
    (first, *_) = figures.pictures(entries[:2])
    assert first.caption.endswith("several classes share a colour and shape.")
    (axes,) = _drawn(monkeypatch, made["Figure 1c"]).axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    middles = [bar.get_x() + bar.get_width() / 2 for bar in bars]
    assert [round(bar.get_height()) for bar in bars] == [65, 65, 60, 70, 70]
    assert np.diff(middles) == pytest.approx([1, 1 + figures._BETWEEN, 1, 1])
    ticks = {text.get_text(): x for x, text in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)}
    assert ticks == pytest.approx({"5 tasks": np.mean(middles[:2]), "10 tasks": np.mean(middles[2:])})
    legend = axes.get_legend()
    assert legend and [text.get_text() for text in legend.get_texts()] == ["L2P++", "VQ-Prompt", "ProbPrompt"]


def test_figures_show_methods_of_the_tables_under_names_of_one_meaning() -> None:
    assert set(figures.SHOWN) <= {row.method for table in paper.tables() for row in table.rows}
    runs = ("l2p", "l2p++", "vq-prompt", "probprompt")
    made = {picture.title.partition(":")[0]: picture for picture in figures.pictures([_entry(m, 60.0) for m in runs])}
    for name in ("Figure 1c", "Figure 2", "Figure 4"):
        assert "L2P++ is the L2P of the paper's Table 1." in made[name].caption
    without = figures.pictures([_entry(m, 60.0) for m in runs if m != "l2p++"])
    assert not any("L2P" in picture.caption for picture in without)


def test_chance_does_not_look_like_a_course(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [_entry("vq-prompt", 60.0, tasks=2), _entry("probprompt", 60.3, tasks=2)]
    made = {picture.title.partition(":")[0]: picture for picture in figures.pictures(entries)}
    for axes in _drawn(monkeypatch, made["Figure 4"]).axes:
        low, high = axes.get_ylim()
        assert high - low == pytest.approx(5.0) and low + high == pytest.approx(120.3)


def test_a_book_that_is_not_there_is_told(tmp_path: Path, probprompt: Command) -> None:
    answer = probprompt("book", "--book", tmp_path / "nowhere")
    assert answer.code == 2 and "there is no book" in answer.err


def test_the_committed_page_is_what_the_committed_files_make() -> None:
    """To the letter what `probprompt book` writes; without any run there is no page."""
    committed = ROOT / "RESULTS.md"
    text, drawn = page.build(ROOT / "results", committed)
    if not book.read_entries(ROOT / "results"):
        assert not committed.exists()
        return
    assert committed.read_text(encoding="utf-8") == text
    for picture in drawn:
        there, made = (
            np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=float)
            for data in ((ROOT / "results" / picture.file).read_bytes(), picture.draw())
        )
        assert there.shape == made.shape and np.abs(there - made).mean() < 1.0, f"{picture.file}: probprompt book"


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/*/*-s*.json")), ids=lambda path: path.name)
def test_committed_files_lie_where_they_belong_and_name_no_path(path: Path) -> None:
    entry = book.read_entry(ROOT / "results", path)
    assert book.file_of(entry.content) == entry.path
    text = path.read_text(encoding="utf-8")
    assert not re.search(r'"(?:file:)?/[^"]', text), "a path of a machine"


def test_no_committed_record_was_changed_by_hand() -> None:
    benches, books = (sorted((ROOT / "results").glob(pattern)) for pattern in ("bench/*.json", "*/*.jsonl"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in benches]
    for path in books:
        lines = path.read_text(encoding="utf-8").splitlines()
        records += [record for record in map(json.loads, lines) if "book" in record]
    assert records and all(record["sha256"] == content_hash(record) for record in records)
