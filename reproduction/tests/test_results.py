"""The paper's numbers, one file per run, and the page that is made from them."""

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
from probprompt.backbones.pretrained import backbone_slug, backbone_words
from probprompt.config import merge, nest, parse_config
from probprompt.errors import UserError
from probprompt.evaluation import metrics
from probprompt.runs.run import Run, RunRecord, config_hash, read_results
from probprompt.storage import content_hash, with_hash
from reproduction import paper, paper_figures, results, results_page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
Command = Callable[..., Any]

# What the paper prints


def test_tables_are_all_there_in_the_papers_order() -> None:
    names = ["table1", "table2", "table3", "ablation", "topk", "samples", "cost", "aggregation"]
    assert [(table.number, table.name) for table in paper.tables()] == list(enumerate(names, start=1))
    with pytest.raises(UserError, match="'table1'"):
        paper.find("tabel1")


SOURCE = Path(os.environ.get("PROBPROMPT_PAPER") or next(iter(sorted(ROOT.parent.glob("*/paper.tex"))), "paper.tex"))
"""LaTeX source of the paper, from the environment or a folder next to this repository."""
NUMBERS = "350f094804122346"
"""Hash of all printed numbers at the last comparison with the source."""


def _numbers(table: paper.Table, row: paper.Row) -> list[float]:
    """Return the numbers of a row in the order of print."""
    cells = (row.printed.get(column.key, {}).get(measure, ()) for column in table.columns for measure in table.measures)
    return [*itertools.chain(*cells), *(row.costs[cost] for cost in table.costs)]


@pytest.mark.skipif(not SOURCE.is_file(), reason="the paper's source is not here: PROBPROMPT_PAPER=paper.tex names it")
@pytest.mark.parametrize("table", paper.tables(), ids=lambda table: table.name)
def test_printed_numbers_are_those_of_the_source(table: paper.Table) -> None:
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    for row in table.rows:
        text = " ".join(lines[row.line - 1 :]).partition(r"\\")[0]
        assert [float(found) for found in re.findall(r"\d+\.\d+", text)] == _numbers(table, row), row.label


def test_printed_numbers_have_not_changed() -> None:
    rows = [[table.name, row.line, row.label, _numbers(table, row)] for table in paper.tables() for row in table.rows]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[: len(NUMBERS)] == NUMBERS


def test_rows_have_the_settings_of_their_numbers() -> None:
    for table in paper.tables():
        for row in table.rows:
            assert row.printed.keys() <= {column.key for column in table.columns} and set(row.costs) == set(table.costs)
            base = presets.settings("published", row.method, table.columns[0].benchmark, 10)
            parse_config(merge(base, nest(row.settings)))
            assert not row.settings or table.study
    without, mean = paper.find("ablation").rows[2], paper.find("aggregation").rows[-1]
    assert (mean.printed, mean.settings) == (without.printed, without.settings)
    (thirty,) = (row for row in paper.find("samples").rows if row.label == "30")
    assert thirty.printed["10"] == paper.find("table1").rows[-1].printed["10"] and not thirty.settings


@pytest.mark.parametrize(
    ("backbone", "slug", "words"),
    [
        ({"name": "ibot1k", "weights": "/x/teacher.pth"}, "vit-b16-ibot1k", "ViT-B/16 (ibot1k)"),
        (
            {"name": "vit_tiny_patch16_224", "weights": "vit_tiny_patch16_224.mine.safetensors@12ab"},
            "vit-ti16-mine",
            "ViT-Ti/16 (mine)",
        ),
        ({"name": "vit_small_patch14_dinov2.lvd142m"}, "vit-s14-dinov2", "ViT-S/14 (dinov2)"),
        ({"name": "sup1k", "image_size": 384}, "vit-b16-sup1k-384px", "ViT-B/16 (sup1k) at 384 px"),
        ({"name": "vit_base_patch16_384.augreg_in1k"}, "vit-b16-at-384-augreg-in1k", "ViT-B/16 at 384 (augreg-in1k)"),
        ({"name": "test_vit", "weights": "random"}, "test-vit-random", "test_vit (random)"),
    ],
)
def test_backbones_have_short_names(backbone: dict[str, Any], slug: str, words: str) -> None:
    assert backbone_slug(backbone) == slug and backbone_words(backbone) == words


# Files of runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Run:
    config: dict[str, Any] = {
        "data": {"benchmark": str(pictures), "tasks": 3},
        "backbone": {"name": "test_vit", "weights": "random", "image_size": 32},
        "method": {"name": "probprompt", "samples": 3, "components": 4, "tokens": 4, "blocks": [0, 2]},
        "training": {"epochs": 1, "batch_size": 8},
        "alignment": {"epochs": 1},
    }
    return api.train(config=config, out=tmp_path_factory.mktemp("grid") / "one", device="cpu")


def _copy(run: Run, folder: Path, **changes: Any) -> Path:
    """Copy a run's folder with other entries in its record."""
    folder.mkdir(parents=True)
    for name in ("accuracy.json", "diagnostics.json"):
        (folder / name).write_bytes((run.folder / name).read_bytes())
    (folder / "run.json").write_text(json.dumps({**run.record.to_json(), **changes}))
    return folder


def _with_config(run: Run, **groups: Any) -> dict[str, Any]:
    config = parse_config(merge(run.config.model_dump(mode="json"), groups))
    return {"config": config.to_stored(), "config_hash": config_hash(config)}


def _add(path: Path, folder: Path, **options: Any) -> tuple[Path, str]:
    added, _ = results.add_runs([path], folder, **options)
    return next(iter(added.items()))


def test_files_say_everything_and_no_path(run: Run, tmp_path: Path, pictures: Path) -> None:
    path, _ = _add(run.folder, tmp_path)
    name = path.relative_to(tmp_path).as_posix()
    assert re.fullmatch(r"pictures/test-vit-random-32px/probprompt-custom,[\w,=.\[\]-]+-s0\.json", name)
    text = path.read_text()
    assert str(pictures) not in text and str(run.folder) not in text and '"/' not in text and "file:/" not in text
    (entry,) = results.read_entries(tmp_path)
    content, split = entry.content, run.record.stream.split_hash[:12]
    assert content["config"]["data"]["benchmark"] == f"pictures@{split}" and entry.benchmark == "pictures"
    assert content["metrics"] == run.metrics and np.array_equal(entry.matrix, run.matrix, equal_nan=True)
    for key in ("versions", "hardware", "backbone", "preprocessing", "time", "peak_memory_mb", "trainable_parameters"):
        assert content[key] == run.record.to_json()[key]
    similarity = json.loads((run.folder / "diagnostics.json").read_text())["similarity"]["mean"]
    assert content["similarity"]["mean"] == pytest.approx(similarity)
    assert entry.preset_overrides["method.samples"] == 3 and "method.name" not in entry.preset_overrides
    assert results.same_settings(entry, run.config)
    assert not results.same_settings(
        entry, parse_config(merge(run.config.model_dump(mode="json"), {"seeds": {"init": 7}}))
    )


@pytest.mark.parametrize("path", ["/home/me/vit.safetensors", "C:\\me\\vit.safetensors"])
def test_weights_files_are_given_by_name_and_hash(run: Run, tmp_path: Path, path: str) -> None:
    backbone = {**run.record.backbone.to_json(), "source": f"file:{path}", "sha256": "ab" * 32}
    copy = _copy(run, tmp_path / "run", backbone=backbone, **_with_config(run, backbone={"weights": path}))
    content = results.entry_content(Run.open(copy))
    assert content["config"]["backbone"]["weights"] == "vit.safetensors@abababababab"
    assert content["backbone"]["source"] == "file:vit.safetensors" and json.dumps(path)[1:-1] not in json.dumps(content)


def test_unfinished_runs_are_rejected_or_skipped(
    run: Run, tmp_path: Path, reproduction: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _copy(run, Path("grid/a"))
    _copy(run, Path("grid/b"), status="running", **_with_config(run, seeds={"order": 1}))
    for arguments, words in (
        (("add", "grid", "--results", "other"), "--skip-unfinished"),
        (("--results", "other", "add", "grid/a"), "'add'"),
        (("--results", "other"), "other is not a folder"),
    ):
        answer = reproduction("results", *arguments)
        assert answer.code == 2 and words in answer.err and not Path("other").exists()
    answer = reproduction("results", "add", "grid", "--results", "other", "--skip-unfinished")
    assert answer.code == 0 and "Skipped 1 unfinished run" in answer.out and not Path("results").exists()
    assert reproduction("results", "add", "grid/a").code == 0
    assert (
        reproduction("results", "add", "grid/a", "--file", "one.jsonl").code == 0
        and len(read_results(Path("one.jsonl"))) == 1
    )
    assert len(results.read_entries(Path("other"))) == len(results.read_entries(Path("results"))) == 1
    with pytest.raises(UserError, match="is not a run and contains none"):
        results.add_runs([Path("other")], tmp_path / "third")


def test_a_different_run_is_replaced_only_if_requested(run: Run, tmp_path: Path) -> None:
    book = tmp_path / "book"
    path, _ = _add(run.folder, book)
    assert _add(run.folder, book) == (path, "unchanged")
    again = _copy(run, tmp_path / "again", created="later")
    assert _add(again, book) == (path, "replaced")
    batch = _copy(run, tmp_path / "batch", **_with_config(run, evaluation_batch_size=7))
    with pytest.raises(UserError, match=r"other settings.*evaluation_batch_size.*--replace"):
        _add(batch, book)
    weights = _copy(run, tmp_path / "weights", backbone={**run.record.backbone.to_json(), "sha256": "0" * 64})
    with pytest.raises(UserError, match="sha256 of the weights"):
        _add(weights, book)
    assert json.loads(path.read_text())["created"] == "later"
    assert _add(batch, book, replace=True) == (path, "replaced")
    with pytest.raises(UserError, match="would both be"):
        results.add_runs([run.folder, again], tmp_path / "other")


def test_other_settings_and_seeds_give_other_file_names(run: Run) -> None:

    def changed(**groups: Any) -> RunRecord:
        return RunRecord.model_validate(run.record.to_json() | _with_config(run, **groups))

    names = [
        results.entry_path(changed(**groups)).rpartition("/")[2]
        for groups in (
            {},
            {"seeds": {"order": 1, "init": 1, "data": 1}},
            {"seeds": {"order": 1}},
            {"method": {"top_k": 2}},
            {"data": {"validation": 0.2}},
        )
    ]
    assert len(set(names)) == 5 and names[1].endswith("-s1.json") and names[2].endswith("-s1.0.0.json")
    whole = results.preset_overrides(changed(method={"top_k": 4}))
    assert whole == results.preset_overrides(run.record), "of four distributions four are all"


def test_edited_files_are_rejected(run: Run, tmp_path: Path) -> None:
    edited = _copy(run, tmp_path / "run", config=merge(run.record.config, {"training": {"epochs": 99}}))
    with pytest.raises(UserError, match="was edited"):
        _add(edited, tmp_path / "book")
    path, _ = _add(run.folder, tmp_path / "book")
    content = json.loads(path.read_text())

    def change(text: str, message: str) -> None:
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            results.read_entries(tmp_path / "book")

    change(json.dumps(merge(content, {"metrics": {"FAA": 0.0}})), "its metrics do not match")
    change(json.dumps(merge(content, {"config": {"training": {"batch": 99}}})), "does not match its recorded hash")
    change("[]", "not a run recorded")
    path.write_text(json.dumps(content))
    assert len(results.read_entries(tmp_path / "book")) == 1, "the same content with other spaces and lines"


# The page

TINY = {"name": "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "weights": "tiny.safetensors@e91dc1d51299"}
IMAGES = {"imagenet-r": (24_000, 6_000), "cifar100": (50_000, 10_000), "cub200": (5_994, 5_794)}


def _content(
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
    """Return the file of an invented run with ``final`` % on every task."""
    own = {"backbone": backbone or {}, "seeds": dict.fromkeys(("order", "init", "data"), seed)}
    config = parse_config(merge(presets.settings(preset, method, benchmark, tasks), merge(own, settings or {})))
    size = 1 if method == "joint" else tasks
    matrix = np.full((size, size), np.nan)
    matrix[np.triu_indices(size)] = final
    name = config.backbone.name
    train, test = IMAGES.get(benchmark, (100, 50))
    stream = {"tasks": [["a"]] * tasks, "test_classes": [1] * tasks, "split_hash": f"{benchmark:0<64}"}
    stream |= {"differences": [], "train_images": [train], "test_images": [test]}
    content: dict[str, Any] = {
        "book": results.FORMAT,
        "created": "",
        "config": config.to_stored(),
        "config_hash": config_hash(config),
        "backbone": {"name": name, "source": "hub:x", "sha256": f"{name:0<64}"[:64]},
        "stream": stream,
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
    return with_hash(content | changes)


def _entry(*arguments: Any, **named: Any) -> results.Entry:
    content = _content(*arguments, **named)
    return results.Entry(_path(content), content)


def _path(content: dict[str, Any]) -> str:
    return results.entry_path(RunRecord.model_validate(content))


def _table(name: str, entries: list[results.Entry], benches: Any = ()) -> str:
    """Return a table without aligning spaces."""
    return re.sub(" +", " ", results_page.paper_table(paper.find(name), entries, benches))


def _ours(name: str, *entries: results.Entry) -> list[str]:
    """Return our lines of a table."""
    return [line for line in _table(name, list(entries)).splitlines() if "ours" in line.partition("|")[2]]


def test_the_papers_experiment_has_no_flags() -> None:
    entries = [_entry("probprompt", 89.0, 0), _entry("probprompt", 90.0, 1), _entry("joint", 92.0)]
    table = _table("table2", entries)
    own = "| ours, ViT-B/16 (sup1k), `published` | 89.50 ± 0.50 (2) | 89.50 ± 0.50 (2) | — | — |"
    lines = table.splitlines()
    (place,) = (place for place, line in enumerate(lines) if own in line)
    assert "89.38 ± 0.22 (5)" in lines[place - 1]
    assert "| ours, ViT-B/16 (sup1k), `published` | 92.00 (1) | — | — | — |" in table
    assert (
        results_page.WEIGHTS not in table
        and results_page.DATA not in table
        and "3 of 82 runs with the paper's weights" in table
    )


DINO = {"name": "vit_small_patch14_dinov2"}
IMAGENET_R = {"benchmark": "imagenet-r"}
STREAM = _content("probprompt", 80.0, benchmark="imagenet-r")["stream"]
UNKNOWN = {name: part for name, part in STREAM.items() if name != "differences"}


@pytest.mark.parametrize(
    ("table", "label", "named"),
    [
        ("table2", "ViT-Ti/16 (augreg-in21k-ft-in1k), `published` † |", {"backbone": TINY}),
        ("table2", "ViT-B/16 (sup1k), `published` ‡ |", {"skipped": ["x.png"]}),
        # a file could hold anything, unless weights are published only as one
        ("table2", "(sup1k), `published` † |", {"backbone": {"name": "sup1k", "weights": "any.safetensors@00"}}),
        ("table3", "(ibot1k), `published` |", {**IMAGENET_R, "backbone": {"name": "ibot1k", "weights": "t.pth@00"}}),
        ("table3", "(dinov2), `published` † |", {**IMAGENET_R, "backbone": DINO}),
        ("table2", "(dinov2) at 224 px, `published` † |", {"backbone": {**DINO, "image_size": 224}}),
        ("table2", "(sup1k) at 384 px, `published` † |", {"backbone": {"image_size": 384}}),
        ("table1", "`published` | — | — | — | — | 80.00 (1) | 80.00 (1) |", {**IMAGENET_R, "tasks": 20}),
        ("table2", "`published` § |", {"marks": ["predictions depend on the batch"]}),
        ("table2", "`matched` ¶ |", {"preset": "matched"}),
        ("table1", "`published` |", IMAGENET_R),
        ("table1", "`published` ‡ |", {**IMAGENET_R, "stream": {**STREAM, "differences": ["another list"]}}),
        ("table1", "`published` ‡ |", {**IMAGENET_R, "stream": UNKNOWN}),
        ("table1", "`published` ¶ |", {**IMAGENET_R, "settings": {"data": {"stored_size": 256}}}),
        ("table2", "`published` |", {"settings": {"data": {"stored_size": "full"}}}),  # 32 pixels are the same so
    ],
)
def test_other_experiments_are_flagged(table: str, label: str, named: dict[str, Any]) -> None:
    entry = _entry("probprompt", 80.0, **named)
    (line,) = _ours(table, entry)
    before, after = (len(results_page.missing(paper.find(table), runs)) for runs in ([], [entry]))
    assert label in line and before - after == (not re.search("[†‡¶]", label)), line


def test_runs_are_shown_only_where_they_belong() -> None:
    sketches = _entry("probprompt", 60.0, benchmark="tu-berlin")
    held_out = _entry("probprompt", 61.0, evaluated_on="validation")
    other = _entry("probprompt", 62.0, settings={"method": {"initial_std": 0.5}})
    for table in paper.tables():
        assert not _ours(table.name, sketches, held_out, other)
    assert not _ours("table1", _entry("probprompt", 63.0, **IMAGENET_R, backbone=DINO))
    row = next(row for row in paper.find("table1").rows if row.method == "dual-prompt")
    backbone = {"name": "sup1k"}  # the paper's DualPrompt is CODA-Prompt's, not its authors'
    runs = [_entry("dual-prompt", 70.0, **IMAGENET_R, backbone=backbone, settings=s) for s in (nest(row.protocol), {})]
    ((theirs,), (own,)) = (_ours("table1", entry) for entry in runs)
    assert "`published` |" in theirs and "`published` ¶ |" in own


def test_a_study_on_another_benchmark_needs_two_rows() -> None:
    whole = _entry("probprompt", 80.0, backbone=TINY)
    some = _entry("probprompt", 79.0, backbone=TINY, settings={"method": {"top_k": 7}})
    assert not _ours("topk", whole)
    lines = _ours("topk", whole, some)
    assert len(lines) == 2 and all("ours, cifar100, ViT-Ti/16" in line and "†‡" in line for line in lines)
    assert "| — | 79.00 (1) | — |" in lines[0] and "| — | 80.00 (1) | — |" in lines[1]
    exact = _entry("probprompt", 80.0, **IMAGENET_R)
    assert [len(_ours(name, exact)) for name in ("topk", "samples", "ablation")] == [1, 1, 1]


def test_rows_of_a_study_share_their_seeds() -> None:
    """Compare means over the same seeds only: each seed has another order of classes."""
    whole = [_entry("probprompt", final, seed, backbone=TINY) for seed, final in enumerate((80.0, 90.0, 95.0))]
    some = [_entry("probprompt", 79.0, s, backbone=TINY, settings={"method": {"top_k": 7}}) for s in (0, 1)]
    lines = _ours("topk", *whole, *some)
    assert "| — | 79.00 ± 0.00 (2) | — |" in lines[0] and "| — | 85.00 ± 5.00 (2) | — |" in lines[1]
    apart = _ours("topk", whole[2], *some)
    assert "95.00 (1)" in apart[1] and "(2)" in apart[0], "better shown with their counts than not at all"
    assert "90.00 (1)" in _ours("table2", whole[1])[0] and "(3)" in _ours("table2", *whole)[0]


def _bench(created: str, fps: float, *methods: str, hardware: Any = None, **changes: Any) -> dict[str, Any]:
    """Return an invented record of costs."""
    cost = {"with_backbone_mb": 345.0, "epoch_s": 66.0, "fps": fps}
    config = {"preset": None, "data": {"benchmark": "emoji-r"}, "backbone": {"weights": "random"}}
    entry = {"backbone": "vit_base_patch16_224", "precision": "bf16", "batch": 128, "cost": cost, "config": config}
    rows = [{"method": method, **entry, **changes} for method in methods]
    return {"created": created, "hardware": hardware or {"gpu": "NVIDIA H200", "machine": "x86_64"}, "results": rows}


def test_measured_costs_are_next_to_the_papers() -> None:
    tiny = _bench("2026", 80.0, "vq-prompt", backbone="vit_tiny_patch16_224")
    table = _table("cost", [], [_bench("2026", 90.0, "vq-prompt"), tiny])
    own = "| ours, NVIDIA H200, ViT-B/16 (random), bf16, batch 128 †‡¶ | — | 345.00 | 1.10 (66.0 s) | 90.00 |"
    assert own in table and "| ours, NVIDIA H200, ViT-Ti/16 (random), bf16, batch 128 †‡¶ |" in table
    config = {"preset": "published", "data": IMAGENET_R, "backbone": {"weights": None}}
    of_paper = _bench("2026", 90.0, "vq-prompt", backbone="sup1k", config=config)
    assert "ViT-B/16 (sup1k), bf16, batch 128 | —" in _table("cost", [], [of_paper])
    slow = _bench("2026", 9.0, "vq-prompt", hardware={"processor": "Slow", "machine": "x86_64"})
    assert "ours, Slow, ViT-B/16 (random)" in _table("cost", [], [slow])
    assert "Slow" not in _table("cost", [], [slow, _bench("2026", 90.0, "apt")]), "a GPU goes first"


@pytest.mark.parametrize("order", [1, -1])
def test_costs_of_different_records_are_not_mixed(order: int) -> None:
    """Use the latest of the records with most methods."""
    old, young = (_bench(f"2026-0{month}", 10.0 * month, "vq-prompt", "probprompt") for month in (1, 2))
    records = [old, young, _bench("2026-03", 99.0, "probprompt")][::order]
    lines = [line for line in _table("cost", [], records).splitlines() if "H200" in line]
    assert len(lines) == 2 and all("20.00 |" in line for line in lines)


def test_the_page_is_made_from_the_files(tmp_path: Path, reproduction: Command) -> None:
    folder, page = tmp_path / "results", tmp_path / "RESULTS.md"
    contents = [
        _content(method, 70.0 + place, seed, backbone=TINY, preset="matched")
        for place, method in enumerate(("vq-prompt", "coda-prompt", "probprompt", "ranpac"))
        for seed in (0, 1)
    ]
    contents.append(_content("probprompt", 55.0, benchmark="tu-berlin", preset="flagship"))
    for content in contents:
        path = folder / _path(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    (folder / "emoji-r" / "demo").mkdir(parents=True)
    (folder / "emoji-r" / "demo" / "notes.json").write_text("{}")  # is skipped
    answer = reproduction("results", "--results", folder, "--page", page)
    assert answer.code == 0 and "9 runs in" in answer.out
    text = page.read_text(encoding="utf-8")
    assert results_page.build(folder, page)[0] == text
    assert "### cifar100, 10 tasks, ViT-Ti/16" in text and "### tu-berlin, 10 tasks" in text and "ranpac" in text
    assert "73.00 ± 0.00" in text and "**73.00 ± 0.00**" in text and str(tmp_path) not in text
    links = re.findall(r"\]\((results/figures[^)]+)\)", text)
    assert len(links) == 4 and all((tmp_path / link).read_bytes().startswith(b"\x89PNG") for link in links)
    (folder / _path(contents[0])).unlink()
    assert results_page.build(folder, page)[0] != text


# Figures


def _figures(*entries: results.Entry) -> dict[str, paper_figures.PaperFigure]:
    """Return figures by their numbers."""
    made = paper_figures.paper_figures(entries)
    return {figure.title.partition(":")[0].removeprefix("Figure "): figure for figure in made}


def _drawn(monkeypatch: pytest.MonkeyPatch, figure: paper_figures.PaperFigure) -> Figure:
    """Return a figure before it is rendered."""
    monkeypatch.setattr(paper_figures, "to_png", lambda drawn: drawn)
    drawn: Any = figure.draw()
    assert isinstance(drawn, Figure)
    return drawn


def test_figures_compare_methods_over_the_same_seeds() -> None:
    """Compare methods over the same seeds: each seed has another order of classes."""

    def drawn(*runs: tuple[str, int]) -> dict[str, paper_figures.PaperFigure]:
        return _figures(*(_entry(method, 60.0 + 9 * seed, seed) for method, seed in runs))

    both = drawn(("vq-prompt", 0), ("vq-prompt", 1), ("probprompt", 0), ("probprompt", 1))
    one = drawn(("vq-prompt", 0), ("vq-prompt", 1), ("probprompt", 0))
    assert {"1c", "2", "4"} <= set(both) and set(both) == set(one)
    assert all("mean over seeds 0, 1" in both[name].caption for name in ("1c", "4"))
    assert all("seed 0" in one[name].caption for name in ("1c", "2", "4"))
    same = drawn(("vq-prompt", 0), ("probprompt", 0))
    assert one["4"].draw() == same["4"].draw() != both["4"].draw()
    shown = drawn(("l2p++", 2), ("vq-prompt", 0), ("vq-prompt", 1), ("probprompt", 1))
    assert "seed 1" in shown["1c"].caption, "the seed that most methods have; others are left out"


def test_figures_do_not_mix_crops_of_copies_and_of_originals() -> None:
    small = {"data": {"stored_size": 256}}
    runs = [_entry(method, 60.0, **IMAGENET_R) for method in ("vq-prompt", "probprompt", "coda-prompt")]
    runs += [_entry(method, 40.0, settings=small, **IMAGENET_R) for method in ("dual-prompt", "l2p++")]
    assert _figures(*runs)["2"].draw() == _figures(*runs[:3])["2"].draw(), "the setting with more methods is shown"


def test_figures_prefer_the_papers_tasks_and_few_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = {"embedding": "PCA", "points": [[0.0, 1.0]], "labels": [0], "names": ["a"], "task": 1}
    entries = [_entry(m, 60.0 + k, tasks=k, preset="matched") for k in (5, 10) for m in ("vq-prompt", "probprompt")]
    entries.append(_entry("l2p++", 60.0, tasks=10, preset="matched"))
    for entry in entries:
        entry.content["pictures"]["queries"] = queries
    figures = _figures(*entries)
    assert "the first of 5 tasks" in figures["1a"].caption, "as the paper's"
    assert "the first of 10 tasks" in _figures(*entries[2:])["1a"].caption
    for entry in entries[:2]:
        entry.content["pictures"]["queries"] = {**queries, "names": [str(index) for index in range(43)]}
    caption = _figures(*entries)["1a"].caption
    assert "the first of 10 tasks" in caption and "one color and marker per class" in caption
    assert "some classes share" in _figures(*entries[:2])["1a"].caption
    (axes,) = _drawn(monkeypatch, figures["1c"]).axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    middles = [bar.get_x() + bar.get_width() / 2 for bar in bars]
    assert [round(bar.get_height()) for bar in bars] == [65, 65, 60, 70, 70]
    assert np.diff(middles) == pytest.approx([1, 1 + paper_figures.GROUP_GAP, 1, 1]), "no gaps inside of groups"
    ticks = {text.get_text(): x for x, text in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)}
    assert ticks == pytest.approx({"5 tasks": np.mean(middles[:2]), "10 tasks": np.mean(middles[2:])})
    legend = axes.get_legend()
    assert legend and [text.get_text() for text in legend.get_texts()] == ["L2P++", "VQ-Prompt", "ProbPrompt"]


def test_figures_name_methods_as_the_tables_do() -> None:
    assert set(paper_figures.METHODS) <= {row.method for table in paper.tables() for row in table.rows}
    runs = [_entry(method, 60.0) for method in ("l2p", "vq-prompt", "probprompt", "l2p++")]
    assert _figures(*runs)["2"].draw() != _figures(*runs[:-1])["2"].draw() == _figures(*runs[1:-1])["2"].draw()


def test_small_differences_do_not_fill_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = _figures(_entry("vq-prompt", 60.0, tasks=2), _entry("probprompt", 60.3, tasks=2))
    for axes in _drawn(monkeypatch, figures["4"]).axes:
        low, high = axes.get_ylim()
        assert high - low == pytest.approx(5.0) and low + high == pytest.approx(120.3)


# What is committed

RUNS, ROWS = 231, 374
"""Least numbers of recorded runs and of table rows: none may disappear."""


def test_the_committed_page_is_made_from_the_committed_files() -> None:
    """Compare the page with what `python -m reproduction results` writes."""
    page = ROOT / "RESULTS.md"
    text, figures = results_page.build(RESULTS, page)
    assert page.read_text(encoding="utf-8") == text, "write it with: python -m reproduction results"
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| -")]
    assert len(results.read_entries(RESULTS)) >= RUNS and len(rows) >= ROWS
    for figure in figures:
        there, made = (
            np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=float)
            for data in ((RESULTS / figure.file).read_bytes(), figure.draw())
        )
        assert there.shape == made.shape and np.abs(there - made).mean() < 1.0, figure.file


def test_committed_files_have_their_names_and_no_paths() -> None:
    for entry in results.read_entries(RESULTS):
        assert results.entry_path(entry.record) == entry.path
        text = (RESULTS / entry.path).read_text(encoding="utf-8")
        assert not re.search(r'"(?:file:)?/[^"]', text), f"{entry.path}: a path of a machine"


def test_committed_records_were_not_edited() -> None:
    benches, books = (sorted(RESULTS.glob(pattern)) for pattern in ("bench/*.json", "*/*.jsonl"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in benches]
    for path in books:
        lines = path.read_text(encoding="utf-8").splitlines()
        records += [record for record in map(json.loads, lines) if "book" in record]
    assert records and all(record["sha256"] == content_hash(record) for record in records)
