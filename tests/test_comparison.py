"""Tables and page of a comparison: numbers, ranks, caveats, and that they can be read anywhere."""

import csv
import io
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from html_page import Page
from probprompt import methods, presets
from probprompt.cli.cmd_compare import compare
from probprompt.cli.console import Screen
from probprompt.cli.grid_screen import show_table
from probprompt.config import parse_config, to_stored
from probprompt.errors import UserError
from probprompt.report import compare as measures
from probprompt.report import figures
from probprompt.report.compare import ColumnGroup, Comparison, FormattedCell, Row, Table, gather, gather_runs
from probprompt.report.pages import render_comparison, write_comparison
from probprompt.report.tables import NOTHING, csv_table, fill_page, latex, markdown
from probprompt.runs.grid import Grid, parse_spec
from probprompt.runs.run import RecordedRun, Run, write_results

Matrix = list[list[float | None]]
SIMILARITY = {"mean": 0.5, "initial_mean": 0.25, "effective_rank": 3.0, "initial_effective_rank": 4.5}


def two(first: float, kept: float, second: float) -> Matrix:
    """Return accuracies on two tasks: the first when learned and after the second, and the second."""
    return [[first, kept], [None, second]]


SAME = two(90, 80, 70)


def make(
    folder: Path,
    method: str,
    seed: int = 0,
    matrix: Matrix = SAME,
    *,
    benchmark: str = "emoji-r",
    preset: str | None = "matched",
    settings: dict[str, Any] | None = None,
    similarity: dict[str, Any] | None = None,
    **record: Any,
) -> Path:
    """Write the folder of a finished run."""
    folder.mkdir(parents=True)
    whole = {
        "format": 1,
        "status": "finished",
        "created": "2026-03-14T09:21:07+00:00",
        "config": {
            "preset": preset,
            "data": {"benchmark": benchmark, "test": None},
            "method": {"name": method, **(settings or {})},
            "seeds": {"order": seed, "init": seed, "data": seed},
        },
        "config_hash": "ab" * 32,
        "backbone": {"name": "vit_tiny", "sha256": "cd" * 32},
        "stream": {"split_hash": "ef" * 32, "order_hash": f"{seed}" * 64},
        "trainable_parameters": 12_345,
        "evaluated_on": "test",
        "marks": [],
        "time": {"total_s": 60.0 + seed},
    }
    (folder / "run.json").write_text(json.dumps(whole | record))
    (folder / "accuracy.json").write_text(json.dumps({"matrix": matrix}))
    (folder / "diagnostics.json").write_text(json.dumps({"similarity": similarity} if similarity else {}))
    return folder


def configure(
    folder: Path, preset: str, method: str, benchmark: str = "cifar100", seed: int = 0, tasks: int = 10, **groups: Any
) -> Path:
    """Write the folder of a run of a preset; groups of settings given by name go over it."""
    config = parse_config(presets.settings(preset, method, benchmark, tasks)).model_dump(mode="json")
    config |= {name: {**config[name], **group} for name, group in groups.items()}
    config["seeds"] = dict.fromkeys(("order", "init", "data"), seed)
    return make(folder, method, seed, benchmark=benchmark, config=to_stored(config))


def labels(found: Comparison) -> list[str]:
    return [row.label for row in found.rows]


def notes(found: Comparison, start: str = "") -> list[str]:
    """Return the notes of the table of accuracies that start with a text."""
    return [note for note in found.tables()[0].notes if note.startswith(start)]


USUAL = "Defaults in this table"


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three methods with two seeds, an upper bound, and one that repeats a published mistake."""
    return [
        make(tmp_path / "a0", "probprompt", 0, two(90, 70, 80), similarity=SIMILARITY),
        make(tmp_path / "a1", "probprompt", 1, two(80, 70, 70), similarity=SIMILARITY | {"mean": 0.7}),
        make(tmp_path / "b0", "vq-prompt", 0, two(100, 60, 60)),
        make(tmp_path / "b1", "vq-prompt", 1, two(100, 60, 70)),
        make(tmp_path / "c0", "l2p++", 0, two(50, 40, 60)),
        make(tmp_path / "c1", "l2p++", 1, two(50, 50, 40)),
        make(tmp_path / "d0", "joint", 0, [[95.0]]),
        make(tmp_path / "e0", "l2p", 0, two(99, 98, 97), marks=["prompts chosen by the batch's majority"]),
    ]


def shown(comparison: Comparison, table: int = 0) -> dict[str, list[str]]:
    """Return the texts of a table by row; the best in asterisks, the second in underscores."""
    around = {0: "{}", 1: "*{}*", 2: "_{}_"}
    return {
        row.label: [around[cell.rank].format(cell.text) + cell.sign for cell in cells]
        for row, cells in comparison.tables()[table].rows
    }


def test_records_in_one_file_give_the_same_tables(runs: list[Path], tmp_path: Path) -> None:
    found = gather_runs(runs)
    book = write_results(tmp_path / "book.jsonl", found.recorded)
    again = gather_runs([book])
    assert markdown(again) == markdown(found) and len(book.read_text().splitlines()) == len(runs)
    assert [one.record for one in again.recorded] == [one.record for one in found.recorded]
    first, *others = book.read_text().splitlines()
    changed = json.loads(first)
    changed["matrix"][0][0] += 1
    book.write_text("\n".join([json.dumps(changed), *others]))
    with pytest.raises(UserError, match=rf"{re.escape(changed['where'])} does not match its hash"):
        gather_runs([book])
    del changed["sha256"]
    book.write_text("\n".join([json.dumps(changed), *others]))
    assert len(gather_runs([book]).results) == len(runs), "files of earlier versions have no hashes"


@pytest.mark.parametrize("text", ("", "{}", "[]", "no json", '{"book": 99}'))
def test_other_files_are_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "book.jsonl").write_text(text + "\n")
    with pytest.raises(UserError, match=r"not a results file|No run to compare"):
        gather_runs([tmp_path / "book.jsonl"])


def test_size_of_a_model_is_shown_where_it_is_recorded(runs: list[Path], tmp_path: Path) -> None:
    assert "On disk" not in markdown(gather_runs(runs))
    text = markdown(gather_runs([*runs, make(tmp_path / "f0", "ranpac", model_mb={"use": 4.0, "learn": 804.26})]))
    assert "On disk, MB" in text and "804.26" in text and "- On disk: " in text


def test_folder_of_runs_is_searched(runs: list[Path], tmp_path: Path) -> None:
    for place, run in zip(("b/seed-10", "b/seed-2", "a"), runs, strict=False):
        shutil.copytree(run, tmp_path / "all" / place)
    folders = [result.folder.removeprefix(f"{tmp_path}/all/") for result in gather_runs([tmp_path / "all"]).results]
    assert folders == ["a", "b/seed-2", "b/seed-10"]
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"not a run: it has no run\.json"):
        gather_runs([tmp_path / "none"])


def test_tables_of_a_page_are_replaced(runs: list[Path]) -> None:
    page = fill_page("# Mine\n\nSome words.\n", gather_runs(runs))
    assert page.startswith("# Mine\n\nSome words.\n\n<!-- comparison")
    assert page.count("## Accuracy in %") == 1 and "**" in page
    later = fill_page(page + "After it.\n", gather_runs(runs[:4]))
    assert later.startswith("# Mine\n\nSome words.\n") and later.endswith("After it.\n")
    assert later.count("## Accuracy in %") == 1 and "l2p" not in later
    assert fill_page(later, gather_runs(runs[:4])) == later


def test_settings_that_most_rows_share_are_noted_once(tmp_path: Path) -> None:
    """Also where one is a list, as the range of a crop is, or younger than some of the records."""
    old = configure(tmp_path / "old", "ridge", "apt", "emoji-r")
    record = json.loads((old / "run.json").read_text())
    del record["config"]["head"]["readings"]
    (old / "run.json").write_text(json.dumps(record))
    changes: list[dict[str, Any]] = [{"training": {"crop_scale": [0.2, 1.0]}}, {"training": {"epochs": 3}}]
    changes.append({"head": {"intermediate": "projected"}})
    made = [configure(tmp_path / str(n), "ridge", "apt", "emoji-r", **change) for n, change in enumerate(changes)]
    found = gather_runs([old, *made])
    assert labels(found) == ["apt", "apt, crop_scale=[0.2,1.0]", "apt, epochs=3", "apt, intermediate=projected"]
    (usual,) = notes(found, USUAL)
    values = set(usual.removesuffix(".").partition(": ")[2].split(", "))
    assert values == {"crop_scale=[0.4,1.0]", "epochs=12", "intermediate=unprojected"}


def test_rows_name_what_differs_from_the_preset(tmp_path: Path) -> None:
    """Even if most rows share it, and if fewer settings vary on one benchmark; presets may differ between them."""

    def change(benchmark: str, name: str, head: dict[str, Any], **training: Any) -> Path:
        place = tmp_path / f"{benchmark}-{name}"
        return configure(place, "flagship", "probprompt", benchmark, head=head, training=training)

    followed = {"compensate_drift": True}
    cifar = [change("cifar100", "followed", followed), change("cifar100", "longer", followed, epochs=7)]
    cifar.append(change("cifar100", "layers", {**followed, "layers": 1}))
    plain = [change(benchmark, "preset", {}) for benchmark in ("cifar100", "emoji-r")]
    found = gather_runs([*cifar, *plain, change("emoji-r", "followed", followed)])
    both = {place.benchmark for place in found.places}
    where = {row.label: {result.place.benchmark for result in found.results if result.row == row} for row in found.rows}
    assert where == {
        "probprompt": both,
        "probprompt, compensate_drift=true": both,
        "probprompt, compensate_drift=true, epochs=7": {"cifar100"},
        "probprompt, layers=1, compensate_drift=true": {"cifar100"},
    }
    usual = "layers=5 (3 for emoji-r, flagship), epochs=40 (12 for emoji-r, flagship), compensate_drift=false"
    assert notes(found, USUAL) == [f"{USUAL}: {usual}."]
    rival = configure(tmp_path / "rival", "ridge", "vq-prompt", head={"layers": 1})
    assert labels(gather_runs([*cifar, rival, configure(tmp_path / "five", "flagship", "probprompt", tasks=5)])) == [
        "probprompt, tasks=10, compensate_drift=true",
        "probprompt, tasks=10, compensate_drift=true, epochs=7",
        "probprompt, tasks=10, layers=1, compensate_drift=true",
        "vq-prompt, tasks=10, layers=1",
        "probprompt, tasks=5",
    ]


def test_default_of_one_method_is_noted_with_its_name(tmp_path: Path) -> None:
    varied: list[dict[str, Any]] = [{}, {"projections": 5}, {"layers": 1}, {"flip_average": True}]
    made = [configure(tmp_path / f"lda{n}", "matched", "lda", head=head) for n, head in enumerate(varied[::2])]
    made += [configure(tmp_path / f"ranpac{n}", "matched", "ranpac", head=head) for n, head in enumerate(varied)]
    found = gather_runs(made)
    more = ["ranpac", "ranpac, projections=5", "ranpac, layers=1", "ranpac, flip_average=true"]
    assert labels(found) == ["lda", "lda, layers=1", *more]
    assert notes(found, f"{USUAL}: projections=10000 (2000 for lda in cifar100, matched), layers=0, flip_average=false")


def test_rows_of_two_heads_name_what_was_set(tmp_path: Path) -> None:
    """Not the defaults of settings that only one of the heads has; and a setting that is not the preset's is noted."""
    heads: list[dict[str, Any]] = [{}, {"kind": "ridge"}, {"kind": "ridge", "projections": 500}]
    made = [configure(tmp_path / str(n), "matched", "probprompt", head=head) for n, head in enumerate(heads)]
    assert labels(gather_runs(made[:2])) == ["probprompt, head.kind=linear", "probprompt, head.kind=ridge"]
    assert labels(gather_runs([made[0], made[2]]))[1] == "probprompt, head.kind=ridge, projections=500"
    assert Run.open(made[2]).record.preset_overrides == {"head.kind": "ridge", "head.projections": 500}


def test_rows_name_backbones_that_differ(tmp_path: Path) -> None:
    """By architecture and pretraining; by their files where these are the same."""

    def run(name: str, weights: str, sha256: str, side: int | None = None) -> Path:
        backbone = {"name": name, "weights": weights, "image_size": side}
        path = configure(tmp_path / sha256, "matched", "ranpac", backbone=backbone)
        record = json.loads((path / "run.json").read_text()) | {"backbone": {"name": name, "sha256": sha256 * 64}}
        (path / "run.json").write_text(json.dumps(record))
        return path

    tiny, dino = "vit_tiny_patch16_224.augreg_in21k", "vit_small_patch14_dinov2"
    found = gather_runs([run(tiny, "a.safetensors", "a"), run(dino, "b.safetensors", "b", 224)])
    assert labels(found) == ["ranpac, ViT-Ti/16 (augreg-in21k)", "ranpac, ViT-S/14 (dinov2) at 224 px"]
    assert not any("image_size" in note for note in notes(found))
    assert any(f'different backbones: {tiny}: "{labels(found)[0]}"' in n for n in notes(found))
    alike = gather_runs([run(tiny, "a.safetensors", "c"), run(tiny, "/there/a.safetensors", "d")])
    assert labels(alike) == [f"ranpac, weights=a.safetensors ({text * 8})" for text in "cd"]
    other = make(tmp_path / "o", "apt", backbone={"name": "vit_large"})
    (note,) = (n for n in notes(gather_runs([make(tmp_path / "p", "lda"), other])) if "backbones" in n)
    assert note.endswith('vit_tiny: "lda"; vit_large: "apt".')


def test_equal_weights_in_two_folders_are_one_row(tmp_path: Path) -> None:
    files = [{"weights": f"/{seed}/vit.safetensors"} for seed in (0, 1)]
    made = [configure(tmp_path / str(n), "matched", "lda", seed=n, backbone=file) for n, file in enumerate(files)]
    assert labels(gather_runs(made)) == ["lda"]


def test_times_of_concurrent_runs_are_noted(tmp_path: Path) -> None:
    """Runs on one machine at one time, of the table or not; a record starts when its images are loaded."""

    def run(method: str, minute: int, gpu: str | None = "H200", seed: int = 0, loading: int = 0) -> Path:
        more: dict[str, Any] = {"hardware": {"gpu": gpu, "threads": minute}} if gpu else {}
        more["created"] = f"2026-03-14T09:{minute:02}:{loading:02}+00:00"
        more["time"] = {"total_s": 60.0, "loading_s": loading}
        return make(tmp_path / f"{method}{seed}", method, seed, **more)

    def noted(paths: list[Path], others: Sequence[Path] = ()) -> list[str]:
        found = gather_runs(paths)
        found = Comparison(found.rows, found.places, found.results, others=[Run.open(path).record for path in others])
        return [note.rpartition(":")[2] for note in found.tables()[1].notes if note.startswith("Times of ")]

    alone, after = run("apt", 0, loading=40), run("l2p", 1)
    elsewhere, unknown = run("ft", 0, "A100"), run("lda", 0, None)
    odd = make(tmp_path / "odd", "ft++", hardware={"gpu": "H200"}, created="in the morning")
    assert noted([alone, after, elsewhere, unknown, odd]) == []
    concurrent, second = run("coda-prompt", 0), run("l2p", 7, seed=1)
    assert noted([alone, after, concurrent]) == [' "apt", "coda-prompt".']
    assert noted([alone, concurrent]) == [" all rows."]
    assert noted([alone, after, second], [concurrent]) == [' "apt".']


def test_unknown_setting_of_one_record_keeps_it_apart(tmp_path: Path) -> None:
    """A setting of another version, which this one cannot complete."""
    known = {"preset": "matched", "data": {"benchmark": "emoji-r", "test": None}, "method": {"name": "lda"}}
    novel = {**known, "head": {"novel": 5}, "seeds": {"order": 0, "init": 0, "data": 0}}
    made = [make(tmp_path / "a", "lda", config=novel), make(tmp_path / "b", "lda", matrix=two(9, 8, 7))]
    for order in (made, made[::-1]):
        assert len(set(labels(gather_runs(order)))) == 2


def test_settings_that_differ_from_the_preset_are_noted(tmp_path: Path) -> None:
    start = "Differs from the preset: "
    assert not notes(gather_runs([configure(tmp_path / "usual", "matched", "lda")]), start)
    other = configure(tmp_path / "other", "matched", "lda", seed=1, head={"shrinkage": 0.9})
    assert notes(gather_runs([other]), start) == [f"{start}head.shrinkage=0.9, in all rows."]
    # A setting younger than the record had its default; the preset may have changed it since.
    older = configure(tmp_path / "older", "flagship", "probprompt", "emoji-r")
    record = json.loads((older / "run.json").read_text())
    assert record["config"]["head"].pop("layers") > 0
    (older / "run.json").write_text(json.dumps(record))
    assert notes(gather_runs([older]), start) == [f"{start}head.layers=0, in all rows."]


def test_means_and_deviations_are_those_of_the_runs(runs: list[Path]) -> None:
    found = gather_runs(runs[:4])
    assert [measure.key for _, measure in found.tables()[0].columns] == ["FAA", "CAA", "forgetting"]
    # FAA of the seeds: 75 and 70; CAA: (90 + 75) / 2 and (80 + 70) / 2; forgetting: 20 and 10.
    entry = found.entries[found.rows[0], found.places[0]]
    assert [entry.value(measure) for measure in measures.ACCURACY] == [(72.5, 2.5), (78.75, 3.75), (15.0, 5.0)]
    assert shown(found) == {
        "probprompt": ["*72.50 ± 2.50*", "_78.75 ± 3.75_", "*15.00 ± 5.00*"],
        "vq-prompt": ["_62.50 ± 2.50_", "*81.25 ± 1.25*", "_40.00 ± 0.00_"],
    }
    assert shown(found, 1) == {
        "probprompt": ["0.600 ± 0.100 (0.250)", "3.0 ± 0.0 (4.5)", "12,345", "1 min 0 s"],
        "vq-prompt": ["—", "—", "12,345", "1 min 0 s"],
    }
    assert notes(found, "Mean ± standard deviation (population) over seeds 0, 1")


def test_numbers_of_seeds(runs: list[Path]) -> None:
    found = gather_runs([runs[0], runs[2]])
    assert shown(found)["probprompt"] == ["*75.00*", "*82.50*", "*20.00*"]
    assert notes(found)[0].startswith("One run each (seed 0)")
    found = gather_runs(runs[:3])
    assert [measure.name for _, measure in found.tables()[0].columns][-1] == "Seeds"
    assert [cells[-1] for cells in shown(found).values()] == ["2", "1"]
    assert any('seeds 0, 1: "probprompt"; seed 0: "vq-prompt".' in note for note in notes(found))
    apart = gather_runs([runs[0], runs[3]])  # as many, but others
    assert notes(apart)[0].startswith("One run each (seed 0, 1)")
    assert any('seed 0: "probprompt"; seed 1: "vq-prompt"' in note for note in notes(apart))


@pytest.mark.parametrize(
    ("values", "expected"), [("321", "120"), ("3310", "1120"), ("3221", "1220"), ("22", "00"), ("5", "0"), ("", "")]
)
def test_level_values_share_their_rank(values: str, expected: str) -> None:
    """A digit each."""
    rows = [Row(str(index), "m") for index in range(len(values))]
    found = measures.ranks(dict(zip(rows, map(float, values), strict=True)))
    assert [found.get(row, 0) for row in rows] == list(map(int, expected))


def test_values_that_look_equal_share_their_rank(tmp_path: Path) -> None:
    folders = [
        make(tmp_path / name, method, 0, two(80, 60, second))
        for name, method, second in (("a", "probprompt", 70.001), ("b", "apt", 70.0), ("c", "ft", 50.0))
    ]
    cells = shown(gather_runs(folders))
    assert [cells[name][0] for name in ("probprompt", "apt", "ft")] == ["*65.00*", "*65.00*", "_55.00_"]
    assert all(not cell.startswith("*") for row in cells.values() for cell in row[2:])  # forgetting: all level


def test_upper_bounds_and_marked_runs_are_shown_but_not_ranked(runs: list[Path]) -> None:
    found = gather_runs(runs)
    cells = shown(found)
    assert cells["joint"] == ["95.00", "—", "—", "1"]
    assert cells["l2p"] == ["97.50†", "98.25", "1.00", "1"]
    assert cells["probprompt"][0] == "*72.50 ± 2.50*" and cells["vq-prompt"][0] == "_62.50 ± 2.50_"
    assert [cells[name][2] for name in ("l2p++", "probprompt")] == ["*5.00 ± 5.00*", "_15.00 ± 5.00_"]
    (mark,) = notes(found, "† prompts chosen by the batch's majority")
    assert mark.endswith("not ranked: l2p (emoji-r, matched).")
    assert notes(found, "Upper bound, ") and notes(found, "Upper bound, ")[0].endswith("not ranked: joint.")


def test_mean_over_other_weights_or_images_is_noted(tmp_path: Path) -> None:
    """Of runs of one path, whose content was changed between the seeds."""
    parts: dict[str, list[dict[str, Any]]] = {
        "weights": [{"backbone": {"name": "demo", "sha256": text * 64}} for text in "ab"],
        "images": [{"stream": {"tasks": [["x"], ["y"]], "split_hash": text * 64}} for text in "ab"],
    }
    row, place = Row("apt", "apt", "apt", ()), ColumnGroup("emoji-r", "matched")
    for what, changes in parts.items():
        made = [make(tmp_path / f"{what}{seed}", "apt", seed, **change) for seed, change in enumerate(changes)]
        results = [
            measures.read_result(RecordedRun.of(Run.open(path), ""), row, place, seed) for seed, path in enumerate(made)
        ]
        found = Comparison([row], [place], results)
        assert notes(found, f"apt (emoji-r, matched): the runs used different {what} ({'a' * 12}, {'b' * 12})")


def test_rows_over_fewer_seeds_are_not_ranked(tmp_path: Path) -> None:
    """A seed's order of classes may be easier than another's."""
    ends = {"probprompt": (60, 80), "vq-prompt": (62, 70), "apt": (79,), "ft": (59,)}
    made = [
        make(tmp_path / f"{name}{seed}", name, seed, two(end, end, end))
        for name, found in ends.items()
        for seed, end in enumerate(found)
    ]
    found = gather_runs(made)
    cells = shown(found)
    assert [cells[name][0] for name in ends] == ["*70.00 ± 10.00*", "_66.00 ± 4.00_", "79.00", "59.00"]
    assert any('seeds 0, 1: "probprompt", "vq-prompt"; seed 0: "apt", "ft".' in note for note in notes(found))
    assert "rows with the most seeds" in notes(found, "Bold")[0]
    assert "4.0 points above vq-prompt, within" in render_comparison(found)
    alone = gather_runs([made[0], made[1], *made[4:]])
    assert not any("*" in cell for row in shown(alone).values() for cell in row) and not notes(alone, "Bold")


def test_other_encodings_of_the_images_are_not_ranked(tmp_path: Path) -> None:
    """Of older records, which have no hash of pixels, nothing can be said."""
    names, hashes = ("apt", "ft", "vq-prompt"), ("a" * 64, "b" * 64, None)
    made = [
        make(tmp_path / name, name, 0, two(80, 60, 70 + index), data={"test": {"pixels_sha256": pixels}})
        for index, (name, pixels) in enumerate(zip(names, hashes, strict=True))
    ]
    start = "emoji-r, matched: not ranked, because the pixels of the images differ"
    found = gather_runs(made)
    (note,) = notes(found, start)
    assert note.endswith(f'{"a" * 12}: "apt"; {"b" * 12}: "ft".')
    assert not any("*" in row[0] for row in shown(found).values()) and "points above" not in render_comparison(found)
    for pair in (made[::2], made[1:]):
        assert not notes(gather_runs(pair), start) and notes(gather_runs(pair), "Bold")


def test_runs_on_validation_images_are_not_ranked(tmp_path: Path, runs: list[Path]) -> None:
    held = make(tmp_path / "v", "apt", 0, two(99, 99, 99), evaluated_on="validation")
    found = gather_runs([runs[0], runs[2], held])
    assert shown(found)["apt"][0] == "99.00‡" and notes(found, "‡ Evaluated on held-out training images (validation)")
    assert not any("*" in cell for cells in shown(found).values() for cell in cells)
    assert any("not ranked, because the rows used different tasks" in note for note in notes(found))
    alone = gather_runs([held])
    assert shown(alone)["apt"][0] == "99.00" and notes(alone, "Evaluated on held-out training images (validation)")


@pytest.mark.parametrize(
    "change", [{"stream": {"split_hash": "other"}}, {"matrix": [[90.0, 80, 70], [None, 80, 70], [None, None, 70]]}]
)
def test_other_images_or_tasks_are_not_ranked(tmp_path: Path, runs: list[Path], change: dict[str, Any]) -> None:
    found = gather_runs([runs[0], runs[2], make(tmp_path / "o", "apt", 0, **change)])
    assert not found.comparable(found.places[0]) and "*" not in "".join(shown(found)["probprompt"])


def test_presets_are_columns_in_the_order_of_the_grid(tmp_path: Path) -> None:
    entries = {"methods": ["vq-prompt", "probprompt"], "benchmarks": "emoji-r", "presets": ["flagship", "matched"]}
    extra = {"seeds": [0, 1], "labels": {"probprompt": "ProbPrompt", "emoji-r": "Emoji-R"}}
    grid = Grid(parse_spec(entries | extra), tmp_path)
    for cell, best in zip(grid.runs, (90.0, 80.0, 70.0), strict=False):
        make(cell.folder, cell.method, cell.seed, two(best, best, best), preset=cell.preset)
    (grid.runs[3].folder).mkdir(parents=True)
    (grid.runs[3].folder / "failed.json").write_text('{"type": "ValueError", "message": "no"}')
    found = gather(grid, grid.outcomes())
    assert [place.label for place in found.places] == ["Emoji-R, flagship", "Emoji-R, matched"]
    # The first cells are flagship probprompt, then matched vq-prompt and probprompt; flagship vq-prompt is not offered.
    assert [row.label for row in found.rows] == ["vq-prompt", "ProbPrompt"]
    assert shown(found) == {
        "vq-prompt": ["—", "—", "—", "*80.00*", "*80.00*", "0.00"],
        "ProbPrompt": ["90.00", "90.00", "0.00", "_70.00_", "_70.00_", "0.00"],
    }
    assert notes(found, "Failed and not in the table: emoji-r/flagship/probprompt/seed-1")
    assert "Not run yet: emoji-r/matched/vq-prompt/seed-1, emoji-r/matched/probprompt/seed-1." in notes(found)


def test_settings_distinguish_runs_of_one_method(tmp_path: Path) -> None:
    folders = [
        make(tmp_path / f"{size}-{seed}", "probprompt", seed, settings={"components": size, "tokens": 8}, preset=None)
        for size, seed in product((5, 10), (0, 1))
    ]
    found = gather_runs(folders)
    assert labels(found) == ["probprompt, components=5", "probprompt, components=10"]
    assert [place.label for place in found.places] == ["emoji-r, custom"]
    assert {len(entry.results) for entry in found.entries.values()} == {2}


def test_runs_that_cannot_be_compared_are_rejected(tmp_path: Path, runs: list[Path]) -> None:
    with pytest.raises(UserError, match=r"a0 and .*twin are the same run"):
        gather_runs([runs[0], make(tmp_path / "twin", "probprompt")])
    with pytest.raises(UserError, match=r"half is not finished"):
        gather_runs([runs[0], make(tmp_path / "half", "apt", status="running")])
    with pytest.raises(UserError, match="No run is finished"):
        write_comparison(Comparison([], [], []), tmp_path)


HOSTILE = "a_b & 100% #1 {x} ^~\\ <b>|*$5$"


@pytest.fixture
def hostile(tmp_path: Path) -> Comparison:
    """Names with characters that are special in some format, in more than one column group."""
    home = tmp_path / "deep" / HOSTILE.replace("\\", "")
    home.mkdir(parents=True)
    made = [
        make(tmp_path / f"{m}{s}{p}", m, s, two(90 + s, 60, 70), benchmark=str(home), preset=p)
        for m, s, p in product(("l2p++", "probprompt"), (0, 1), ("matched", "published"))
    ]
    return gather_runs(made)


def lines_of(text: str) -> list[list[str]]:
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]


def test_markdown(runs: list[Path], hostile: Comparison, tmp_path: Path) -> None:
    text = markdown(gather_runs(runs))
    rows = [[cell.strip() for cell in line] for line in lines_of(text)]
    assert rows[0] == ["Method", "FAA ↑", "CAA ↑", "Forgetting ↓", "Seeds"]
    assert rows[2][:2] == ["probprompt", "**72.50 ± 2.50**"]
    assert rows[3][:2] == ["vq-prompt", "<ins>62.50 ± 2.50</ins>"]
    assert rows[5][:3] == ["joint (upper bound)", "95.00", "—"] and rows[6][1] == "97.50†"
    assert "## Accuracy in %: emoji-r, matched" in text and "## Prompts and cost: emoji-r, matched" in text
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 2  # padded: readable as is
    text = markdown(hostile)
    assert str(tmp_path) not in text and "/deep" not in text
    assert "a\\_b &amp; 100% #1 {x} ^\\~ &lt;b&gt;\\|\\*$5$, matched: FAA ↑" in text
    assert {len(line) for line in lines_of(text)} == {7, 5}


def test_latex(runs: list[Path], hostile: Comparison) -> None:
    text = latex(hostile)
    name = r"a\_b \& 100\% \#1 \{x\} \textasciicircum{}\textasciitilde{} \textless{}b\textgreater{}|*\$5\$"
    assert rf"\multicolumn{{3}}{{c}}{{{name}, matched}}" in text and r"\cmidrule(lr){2-4} \cmidrule(lr){5-7}" in text
    for table, width in zip(text.split(r"\begin{table}")[1:], (7, 5), strict=True):
        assert f"\\begin{{tabular}}{{l{'r' * (width - 1)}}}" in table
        body = table[table.index(r"\midrule") : table.index(r"\bottomrule")].splitlines()[1:]
        assert [len(re.findall(r"(?<!\\)&", line)) for line in body] == [width - 1] * 2
        assert all(line.endswith(r" \\") for line in body)
    for opening, closing in ((r"\begin{", r"\end{"), ("{", "}")):
        plain = re.sub(r"\\[{}]", "", text)
        assert plain.count(opening) == plain.count(closing)
    assert not re.search(r"[±↑↓−—†‡<>]", text)
    text = latex(gather_runs(runs))
    assert r"probprompt & \textbf{72.50 $\pm$ 2.50} & \underline{78.75 $\pm$ 3.75} &" in text
    assert r"joint \emph{(upper bound)} & 95.00 & --- & ---" in text and r"l2p & 97.50$^{\dagger}$" in text
    assert r"l2p++ & 47.50 $\pm$ 2.50" in text


def test_csv_holds_every_number_and_setting(runs: list[Path], hostile: Comparison, tmp_path: Path) -> None:
    found = gather_runs(runs)
    lines = list(csv.DictReader(io.StringIO(csv_table(found))))
    assert len(lines) == len(found.results)
    for line, result in zip(lines, found.results, strict=True):
        for key in ("FAA", "CAA", "forgetting", "similarity", "initial_similarity", "effective_rank", "seconds"):
            assert line[key] == "" if key not in result.values else float(line[key]) == result.values[key]
        assert json.loads(line["matrix"]) == json.loads((Path(result.folder) / "accuracy.json").read_text())["matrix"]
        assert (line["method"], line["method.name"], int(line["seed"])) == (result.row.method,) * 2 + (result.seed,)
        assert line["preset"] == "matched" and line["split_hash"] == "ef" * 32
    assert lines[-1]["marks"] == "prompts chosen by the batch's majority" and lines[-2]["upper_bound"] == "True"
    own = make(tmp_path / "own", "apt", preset=None)
    assert next(csv.DictReader(io.StringIO(csv_table(gather_runs([own])))))["preset"] == "custom"
    for line in csv.DictReader(io.StringIO(csv_table(hostile))):
        assert line["benchmark"] == line["data.benchmark"] == HOSTILE.replace("\\", "")


def many(folder: Path, tasks: int, seeds: Sequence[int]) -> list[Path]:
    """Write runs of all methods in two presets."""
    made = []
    for number, method in enumerate(methods.registered()):
        for preset, seed in product(("matched", "published"), seeds):
            level = 88.0 - 2.1 * number + 0.9 * math.sin(5 * number + seed) + 2.0 * (preset == "matched")
            matrix: Matrix = [
                [None if step < task else level - 1.1 * (step - task) ** 0.7 - task for step in range(tasks)]
                for task in range(tasks)
            ]
            if methods.find(method).joint:
                matrix = [[91.5 + seed]]
            similar = {"mean": 0.9 - 0.04 * number, "initial_mean": 0.5, "effective_rank": 3.0} if number % 3 else None
            marks = ["legacy: batch-wise choice"] if (method, preset) == ("l2p", "published") else []
            place = folder / f"{method}-{preset}-{seed}"
            made.append(make(place, method, seed, matrix, preset=preset, similarity=similar, marks=marks))
    return made


def test_page_is_accessible_and_needs_nothing_from_elsewhere(runs: list[Path], hostile: Comparison) -> None:
    for comparison in (gather_runs(runs), hostile):
        page = Page(render_comparison(comparison))
        page.check()
        assert len(page.all("caption")) == len(page.all("table"))
        assert "--series-5" in page.raw and "prefers-color-scheme: dark" in page.raw


def test_page_shows_tables_ranks_and_figures(runs: list[Path]) -> None:
    page = Page(render_comparison(gather_runs(runs)))
    assert {"72.50 ± 2.50", "81.25 ± 1.25"} <= set(page.within("b")) and "62.50 ± 2.50" in page.within("u")
    assert {"97.50†", "15.0"} <= set(page.within("td")) and "upper bound" in page.within("span")
    assert "5 methods on emoji-r" in page.within("h1")
    lead = "On emoji-r (matched), probprompt reaches 72.5% FAA, 10.0 points above vq-prompt."
    assert page.within("p")[0] == lead
    sections = ["Results", "Final accuracy", "Average accuracy", "Forgetting", "Prompt similarity", "Task by task"]
    assert page.within("h2")[:6] == sections
    spoken = " ".join(str(svg["aria-label"]) for svg in page.all("svg") if "aria-label" in svg)
    assert "probprompt 72.50 ± 2.50; vq-prompt 62.50 ± 2.50" in spoken
    assert "probprompt 0.600 ± 0.100, 0.250 at the start" in spoken
    assert "probprompt: 85.0, 72.5; vq-prompt: 100.0, 62.5" in spoken
    assert "probprompt from 85.0 to 70.0" in spoken  # the course of the first task


def test_lead_within_seed_variance_is_noted(tmp_path: Path) -> None:
    folders = [
        make(tmp_path / f"{method}{seed}", method, seed, two(80, value, value))
        for method, values in (("probprompt", (70, 60)), ("apt", (64, 64)))
        for seed, value in enumerate(values)
    ]
    assert "1.0 points above apt, within the standard deviation over seeds." in render_comparison(gather_runs(folders))
    level = [make(tmp_path / f"level-{m}", m, 0, two(80, 70, 70)) for m in ("ft", "apt", "lda")]
    assert "ft, apt, lda are level at 70.0%." in render_comparison(gather_runs(level))


def test_similarity_by_number_of_components(tmp_path: Path) -> None:
    made = [
        make(tmp_path / f"{m}-{n}", m, settings={name: n}, similarity=SIMILARITY | {"mean": 0.9 - 0.02 * n})
        for (m, name), n in product((("probprompt", "components"), ("coda-prompt", "components_per_task")), (5, 10, 20))
    ]
    page = Page(render_comparison(gather_runs(made)))
    assert "More components" in page.within("h2")
    (spoken,) = (str(svg["aria-label"]) for svg in page.all("svg") if "by number of components" in str(svg))
    assert "probprompt: 0.800 with 5, 0.700 with 10, 0.500 with 20; coda-prompt: 0.800 with 5" in spoken


def test_every_method_has_its_look_and_its_label(tmp_path: Path) -> None:
    comparison = gather_runs(many(tmp_path, tasks=3, seeds=(0,)))
    from probprompt.report.pages import _looks

    looks = _looks(comparison)
    palette, dashes, markers = len(figures.PALETTE), len(figures.DASHES), len(figures.MARKERS)
    assert len({(i % palette, i % dashes, i % markers) for i in looks.values()}) == len(comparison.rows) >= 17
    lines = [(row.label, figures.Series([80.0, 80.0], look)) for row, look in looks.items()]
    svg = figures.named_curves(lines, 2, 50.0, "k", "d")
    written = re.findall(r"<text[^>]*y=\"([\d.-]+)\"[^>]*>([^<]*)</text>", svg) or re.findall(
        r"<text[^>]*translate\([\d.-]+ ([\d.-]+)\)[^>]*>([^<]*)</text>", svg
    )
    places = sorted(float(y) for y, name in written if name in {row.label for row in comparison.rows})
    assert len(places) == len(comparison.rows)
    assert all(after - before > 9.0 for before, after in pairwise(places))  # as high as a letter


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12), st.floats(0.1, 20))
def test_labels_are_spread_no_further_than_needed(values: list[float], gap: float) -> None:
    places = figures.spread(values, gap)
    order = sorted(range(len(values)), key=lambda index: values[index])
    assert all(places[b] - places[a] >= gap - 1e-6 for a, b in pairwise(order))
    if all(values[b] - values[a] >= gap for a, b in pairwise(order)):
        assert places == pytest.approx(values)
    assert sum(places) == pytest.approx(sum(values), abs=1e-6)  # pushed to both sides alike
    room = gap * len(values)
    inside = figures.spread(values, gap, (min(values), max(values) + room))
    assert min(inside) >= min(values) - 1e-6 and max(inside) <= max(values) + room + 1e-6
    moved = {round(after - before, 6) for before, after in zip(places, inside, strict=True)}
    assert max(moved) - min(moved) < 1e-5  # all of them alike


def test_all_files_are_written(runs: list[Path], tmp_path: Path) -> None:
    files = write_comparison(gather_runs(runs), tmp_path / "new" / "out")
    assert [path.name for path in files] == ["table.md", "table.tex", "table.csv", "comparison.html"]
    assert set((tmp_path / "new" / "out").iterdir()) == set(files)
    first = [path.read_bytes() for path in files]
    assert [path.read_bytes() for path in write_comparison(gather_runs(runs), tmp_path / "new" / "out")] == first


def test_command_prints_the_tables(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = r"^probprompt +72\.50 ± 2\.50 +78\.75 ± 3\.75 +15\.00 ± 5\.00 +2 *$"
    for width, some, deviations in (("200", runs, True), ("60", runs, False)):
        monkeypatch.setenv("COLUMNS", width)
        compare(runs=some, out=tmp_path / "out")
        printed = capsys.readouterr().out
        assert bool(re.search(row, printed, re.MULTILINE)) is deviations
        assert ("Standard deviations are hidden" in printed.partition("Prompts and cost")[0]) is not deviations
        assert f"Wrote {tmp_path / 'out'}" in printed


def console(width: int) -> tuple[Screen, io.StringIO]:
    screen, text = Screen(), io.StringIO()
    screen.console = Console(file=text, width=width, highlight=False, legacy_windows=False)
    return screen, text


def test_wide_tables_are_shown_by_column_group(tmp_path: Path) -> None:
    accuracy = gather_runs(many(tmp_path, tasks=2, seeds=(0, 1))).tables()[0]
    for width, headers in ((200, 1), (80, 2), (60, 2)):
        screen, text = console(width)
        assert show_table(screen, accuracy) == (width > 60)
        lines = text.getvalue().splitlines()
        assert sum(line.startswith("method") for line in lines) == headers
        assert not any("…" in line or len(line) > width for line in lines)
        assert ("±" in text.getvalue()) == (width > 60)
    (place, _), *_ = accuracy.places  # a row without runs in a column group is not shown there
    columns = [*((place, measure) for measure in measures.ACCURACY), (place, measures.SEEDS)]
    row = replace(accuracy.rows[0][0], label="x" * 100)
    screen, text = console(80)
    cells = [*(FormattedCell(NOTHING) for _ in measures.ACCURACY), FormattedCell("0")]
    show_table(screen, Table("", columns, [(row, cells)]))
    assert "xxx" not in text.getvalue()


@pytest.mark.parametrize(("width", "headers"), [(80, 1), (50, 1), (30, 0)])
def test_no_number_is_cut_next_to_long_names(tmp_path: Path, width: int, headers: int) -> None:
    for table in gather_runs(many(tmp_path, tasks=2, seeds=(0, 1))).tables():
        more = f"relevance_temperature=sqrt_dim, {'x' * 40}"
        named = [(replace(row, label=f"{row.label}, {more}"), cells) for row, cells in table.rows]
        (first, count), *_ = table.places
        assert all(place == first for place, _ in table.columns[:count])
        part = Table("", table.columns[:count], [(row, cells[:count]) for row, cells in named])
        screen, text = console(width)
        show_table(screen, part)
        assert "…" not in text.getvalue()
        assert sum(line.startswith("method") for line in text.getvalue().splitlines()) <= headers
        assert all(shown.mean in text.getvalue() for _, cells in part.rows for shown in cells)
