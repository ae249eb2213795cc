"""The tables and the page of a comparison: their numbers, their marks, and that they can be read anywhere."""

import csv
import doctest
import importlib
import io
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from probprompt import methods, presets
from probprompt.cli import compare as command
from probprompt.cli.screen import Screen
from probprompt.config import parse_config
from probprompt.errors import UserError
from probprompt.report import figures
from probprompt.report.comparison import (
    ACCURACY,
    CAA,
    FAA,
    FORGETTING,
    NOTHING,
    SEEDS,
    Comparison,
    Place,
    Row,
    Shown,
    Table,
    gather,
    gather_runs,
    read_result,
    write_comparison,
)
from probprompt.report.comparison_page import render
from probprompt.report.tables import csv_table, fill_page, latex, markdown
from probprompt.runs.book import Recorded, write_book
from probprompt.runs.grid import Grid, parse_spec
from probprompt.runs.record import Run

Matrix = list[list[float | None]]
SIMILARITY = {"mean": 0.5, "initial_mean": 0.25, "effective_rank": 3.0, "initial_effective_rank": 4.5}


def two(first: float, kept: float, second: float) -> Matrix:
    """Two tasks: the first when learned and in the end, and the second. FAA, CAA and forgetting are easy to tell."""
    return [[first, kept], [None, second]]


def make(
    folder: Path,
    method: str,
    seed: int,
    matrix: Matrix,
    *,
    benchmark: str = "emoji-r",
    preset: str | None = "matched",
    settings: dict[str, Any] | None = None,
    similarity: dict[str, Any] | None = None,
    **record: Any,
) -> Path:
    """A finished run as it lies on the disk."""
    folder.mkdir(parents=True)
    config = {
        "preset": preset,
        "data": {"benchmark": benchmark, "test": None},
        "method": {"name": method, **(settings or {})},
        "seeds": {"order": seed, "init": seed, "data": seed},
    }
    whole = {
        "format": 1,
        "status": "finished",
        "created": "2026-03-14T09:21:07+00:00",
        "config": config,
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


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three methods with two seeds, an upper bound, and one that was asked to repeat a published mistake."""
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
    """Texts of a table by row; the best in asterisks, the second in underscores."""
    around = {0: "{}", 1: "*{}*", 2: "_{}_"}
    return {
        row.label: [around[cell.rank].format(cell.text) + cell.sign for cell in cells]
        for row, cells in comparison.tables()[table].rows
    }


# Books, and what they say of presets


def test_a_book_gives_back_the_same_tables(runs: list[Path], tmp_path: Path) -> None:
    found = gather_runs(runs)
    book = write_book(tmp_path / "book.jsonl", found.recorded)
    assert len(book.read_text().splitlines()) == len(runs)
    again = gather_runs([book])
    assert markdown(again) == markdown(found)
    assert [one.record for one in again.recorded] == [one.record for one in found.recorded]


def test_a_book_that_was_changed_by_hand_is_refused(runs: list[Path], tmp_path: Path) -> None:
    book = write_book(tmp_path / "book.jsonl", gather_runs(runs).recorded)
    first, *others = book.read_text().splitlines()
    changed = json.loads(first)
    changed["matrix"][0][0] += 1
    book.write_text("\n".join([json.dumps(changed), *others]))
    with pytest.raises(UserError, match=rf"the line of {re.escape(changed['where'])} was changed by hand"):
        gather_runs([book])
    del changed["sha256"]
    book.write_text("\n".join([json.dumps(changed), *others]))
    assert len(gather_runs([book]).results) == len(runs), "books of earlier versions have no hashes"


def test_the_size_of_a_model_is_told_where_runs_know_it(runs: list[Path], tmp_path: Path) -> None:
    assert "On disk" not in markdown(gather_runs(runs))
    known = make(tmp_path / "f0", "ranpac", 0, two(90, 70, 80), model_mb={"use": 4.0, "learn": 804.26})
    text = markdown(gather_runs([*runs, known]))
    assert "On disk, MB" in text and "804.26" in text and "- On disk: prompts and head, with all that" in text


def test_a_folder_of_runs_stands_for_all_of_them(runs: list[Path], tmp_path: Path) -> None:
    for place, run in zip(("b/seed-10", "b/seed-2", "a"), runs, strict=False):
        shutil.copytree(run, tmp_path / "all" / place)
    found = gather_runs([tmp_path / "all"])
    assert [result.folder.removeprefix(f"{tmp_path}/all/") for result in found.results] == [
        "a",
        "b/seed-2",
        "b/seed-10",
    ]
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"not a run: it has no run\.json"):
        gather_runs([tmp_path / "none"])


@pytest.mark.parametrize("text", ("", "{}", "[]", "no json", '{"book": 99}'))
def test_what_is_no_book_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "book.jsonl").write_text(text + "\n")
    with pytest.raises(UserError, match="not a book of results" if text else "not a book|no run to compare"):
        gather_runs([tmp_path / "book.jsonl"])


def test_a_page_keeps_its_words_and_gets_the_tables_once(runs: list[Path]) -> None:
    found = gather_runs(runs)
    page = fill_page("# Mine\n\nSome words.\n", found)
    assert page.startswith("# Mine\n\nSome words.\n\n<!-- comparison")
    assert page.count("## Accuracy in %") == 1 and "**" in page
    later = fill_page(page + "After it.\n", gather_runs(runs[:4]))
    assert later.startswith("# Mine\n\nSome words.\n") and later.endswith("After it.\n")
    assert later.count("## Accuracy in %") == 1 and "l2p" not in later
    assert fill_page(later, gather_runs(runs[:4])) == later


def test_what_most_rows_share_is_told_once(tmp_path: Path) -> None:
    """Also where it is a list, as the range of a crop is, or younger than some of the records."""
    config = parse_config(presets.settings("ridge", "apt", "emoji-r")).model_dump(mode="json")

    def changed(name: str, head: dict[str, Any], **training: Any) -> Path:
        whole = {"head": {**config["head"], **head}, "training": {**config["training"], **training}}
        if name == "old":
            del whole["head"]["readings"]
        return make(tmp_path / name, "apt", 0, two(90, 80, 70), config={**config, **whole})

    runs = [changed("old", {}), changed("crop", {}, crop_scale=[0.2, 1.0]), changed("epochs", {}, epochs=3)]
    found = gather_runs([*runs, changed("readings", {"readings": "projected"})])
    assert [row.label for row in found.rows] == [
        *("apt", "apt, crop_scale=[0.2,1.0]", "apt, epochs=3", "apt, readings=projected")
    ]
    (told,) = [note for note in found.tables()[0].notes if note.startswith("Where a row says nothing else")]
    assert set(told.removesuffix(".").partition(": ")[2].split(", ")) == {
        *("crop_scale=[0.4,1.0]", "epochs=12", "readings=beside")
    }


def test_a_row_names_what_is_not_as_the_preset_has_it_alike_on_all_benchmarks(tmp_path: Path) -> None:
    """Even if most rows share it, and if fewer settings vary on one benchmark; presets may differ between them."""

    def changed(benchmark: str, name: str, head: dict[str, Any], **training: Any) -> Path:
        config = parse_config(presets.settings("flagship", "probprompt", benchmark)).model_dump(mode="json")
        whole = {"head": {**config["head"], **head}, "training": {**config["training"], **training}}
        place = tmp_path / f"{benchmark}-{name}"
        return make(place, "probprompt", 0, two(90, 80, 70), benchmark=benchmark, config={**config, **whole})

    followed = {"follow": True}
    found = gather_runs([
        changed("cifar100", "followed", followed),
        changed("cifar100", "longer", followed, epochs=7),
        changed("cifar100", "layers", {**followed, "layers": 1}),
        changed("cifar100", "preset", {}),
        changed("emoji-r", "followed", followed),
        changed("emoji-r", "preset", {}),
    ])  # fmt: skip
    both = {place.benchmark for place in found.places}
    where = {row.label: {result.place.benchmark for result in found.results if result.row == row} for row in found.rows}
    assert where == {
        "probprompt": both,
        "probprompt, follow=true": both,
        "probprompt, follow=true, epochs=7": {"cifar100"},
        "probprompt, layers=1, follow=true": {"cifar100"},
    }
    (told,) = [note for note in found.tables()[0].notes if note.startswith("Where a row says nothing else")]
    usual = "layers=5 (3 for emoji-r, flagship), epochs=40 (12 for emoji-r, flagship), follow=false"
    assert told == f"Where a row says nothing else: {usual}."
    other = parse_config(presets.settings("ridge", "vq-prompt", "cifar100")).model_dump(mode="json")
    other["head"]["layers"] = 1
    rival = make(tmp_path / "rival", "vq-prompt", 0, two(90, 80, 70), benchmark="cifar100", config=other)
    fewer = presets.settings("flagship", "probprompt", "cifar100", 5)
    short = make(
        tmp_path / "five", "probprompt", 0, two(90, 80, 70), benchmark="cifar100",
        config=parse_config(fewer).model_dump(mode="json"),
    )  # fmt: skip
    more = gather_runs([*(tmp_path / f"cifar100-{name}" for name in ("followed", "longer", "layers")), rival, short])
    assert [row.label for row in more.rows] == [
        "probprompt, tasks=10, follow=true",
        "probprompt, tasks=10, follow=true, epochs=7",
        "probprompt, tasks=10, layers=1, follow=true",
        "vq-prompt, tasks=10, layers=1",
        "probprompt, tasks=5",
    ]


def test_rows_of_several_backbones_name_them_in_words(tmp_path: Path) -> None:
    """Unless two that differ have the same words: then they are told apart by all that they are called by."""

    def of(name: str, weights: str, sha256: str, side: int | None = None, seed: int = 0) -> Path:
        config = parse_config(presets.settings("matched", "ranpac", "cifar100")).model_dump(mode="json")
        config["backbone"] |= {"name": name, "weights": weights, "image_size": side}
        config["seeds"] = dict.fromkeys(("order", "init", "data"), seed)
        used = {"name": name, "sha256": sha256 * 64}
        place = tmp_path / f"{sha256}{side}{seed}"
        return make(place, "ranpac", seed, two(90, 80, 70), benchmark="cifar100", config=config, backbone=used)

    tiny, dino = "vit_tiny_patch16_224.augreg_in21k", "vit_small_patch14_dinov2"
    found = gather_runs([of(tiny, "a.safetensors", "a"), of(dino, "b.safetensors", "b", 224)])
    labels = [row.label for row in found.rows]
    assert labels == ["ranpac, ViT-Ti/16 (augreg-in21k)", "ranpac, ViT-S/14 (dinov2) at 224 px"]
    notes = found.tables()[0].notes
    assert not any("image_size" in note for note in notes)
    assert any(f'the backbones differ, a cause of differences too: {tiny}: "{labels[0]}"' in note for note in notes)
    alike = gather_runs([of(tiny, "a.safetensors", "c"), of(tiny, "a.safetensors", "d")])
    assert [row.label for row in alike.rows] == [f"ranpac, weights=a.safetensors ({text * 8})" for text in "cd"]


def test_times_that_were_taken_beside_other_runs_are_told(tmp_path: Path) -> None:
    """On one machine at one time, of the table or not; neither one after the other nor on machines that differ.

    A record is begun once images are there: what loading them takes lies before that.
    """

    def begun(method: str, minute: int, gpu: str | None = "H200", seed: int = 0, loading: int = 0) -> Path:
        more: dict[str, Any] = {"hardware": {"gpu": gpu, "threads": minute}} if gpu else {}
        more["created"] = f"2026-03-14T09:{minute:02}:{loading:02}+00:00"
        more["time"] = {"total_s": 60.0, "loading_s": loading}
        return make(tmp_path / f"{method}{seed}", method, seed, two(90, 80, 70), **more)

    def told(paths: list[Path], others: list[Path] | None = None) -> list[str]:
        found = gather_runs(paths)
        beside = [Run.open(path).record for path in others or []]
        found = Comparison(found.rows, found.places, found.results, others=beside)
        return [note for note in found.tables()[1].notes if note.startswith("Time: ")]

    alone, after = begun("apt", 0, loading=40), begun("l2p", 1)
    elsewhere, unsaid = begun("ft", 0, "A100"), begun("lda", 0, None)
    odd = make(tmp_path / "odd", "ft++", 0, two(90, 80, 70), hardware={"gpu": "H200"}, created="in the morning")
    assert told([alone, after, elsewhere, unsaid, odd]) == []
    beside, second = begun("coda-prompt", 0), begun("l2p", 7, seed=1)
    sentence = "Time: other runs ran at the same time on such a machine, so that it says little about speed:"
    assert told([alone, after, beside]) == [f'{sentence} "apt", "coda-prompt".']
    assert told([alone, beside]) == [f"{sentence} all rows."]
    assert told([alone, after, second], [beside]) == [f'{sentence} "apt".']


def test_what_is_usual_for_one_method_of_a_place_alone_is_told_of_it(tmp_path: Path) -> None:
    def changed(method: str, **head: Any) -> Path:
        config = parse_config(presets.settings("matched", method, "cifar100")).model_dump(mode="json")
        whole = {**config, "head": {**config["head"], **head}}
        place = tmp_path / "-".join((method, *head))
        return make(place, method, 0, two(90, 80, 70), benchmark="cifar100", config=whole)

    varied: list[dict[str, Any]] = [{}, {"projections": 5}, {"layers": 1}, {"mirrored": True}]
    found = gather_runs([changed("lda"), changed("lda", layers=1), *(changed("ranpac", **head) for head in varied)])
    assert [row.label for row in found.rows] == [
        *("lda", "lda, layers=1", "ranpac", "ranpac, projections=5", "ranpac, layers=1", "ranpac, mirrored=true")
    ]
    usual = "projections=10000 (2000 for lda in cifar100, matched), layers=0, mirrored=false"
    (told,) = [note for note in found.tables()[0].notes if note.startswith("Where a row says nothing else")]
    assert told.startswith(f"Where a row says nothing else: {usual}")


def test_a_setting_that_only_the_first_record_has_keeps_it_apart(tmp_path: Path) -> None:
    """One of another version, which this one cannot complete."""
    known = {"preset": "matched", "data": {"benchmark": "emoji-r", "test": None}, "method": {"name": "lda"}}
    seeds = {"order": 0, "init": 0, "data": 0}
    novel = {**known, "head": {"novel": 5}, "seeds": seeds}
    runs = [make(tmp_path / "a", "lda", 0, two(90, 80, 70), config=novel), make(tmp_path / "b", "lda", 0, two(9, 8, 7))]
    for order in (runs, runs[::-1]):
        assert len({row.label for row in gather_runs(order).rows}) == 2


def test_weights_are_the_same_wherever_their_file_lies(tmp_path: Path) -> None:
    def weighed(seed: int, place: str, sha256: str) -> Path:
        own = {"name": "vit", "weights": place}
        config = {"preset": "matched", "data": {"benchmark": "emoji-r", "test": None}, "method": {"name": "lda"}}
        seeds = {"order": seed, "init": seed, "data": seed}
        return make(
            tmp_path / f"{seed}{sha256}", "lda", seed, two(90, 80, 70), backbone={"name": "vit", "sha256": sha256},
            config={**config, "backbone": own, "seeds": seeds},
        )  # fmt: skip

    one, other = weighed(0, "/here/vit.safetensors", "aaaaaaaabb"), weighed(1, "/there/vit.safetensors", "aaaaaaaabb")
    assert [row.label for row in gather_runs([one, other]).rows] == ["lda"]
    changed = weighed(1, "/there/vit.safetensors", "ccccccccdd")
    labels = [row.label for row in gather_runs([one, changed]).rows]
    assert labels == ["lda, weights=vit.safetensors (aaaaaaaa)", "lda, weights=vit.safetensors (cccccccc)"]


def test_settings_that_are_not_the_presets_are_told(tmp_path: Path) -> None:
    """Whoever reads 'matched' above a column must know what is not as in matched."""
    config = parse_config(presets.settings("matched", "lda", "emoji-r")).model_dump(mode="json")
    usual = make(tmp_path / "usual", "lda", 0, two(90, 80, 70), config=config)
    changed = {**config, "head": {**config["head"], "shrinkage": 0.9}}
    other = make(
        tmp_path / "other", "lda", 1, two(90, 80, 70), config={**changed, "seeds": dict.fromkeys(config["seeds"], 1)}
    )
    assert not [note for note in gather_runs([usual]).tables()[0].notes if "preset" in note]
    (told,) = [note for note in gather_runs([other]).tables()[0].notes if "preset" in note]
    assert told == "Not as the preset has it: head.shrinkage=0.9, in all rows."


def test_a_setting_younger_than_a_record_was_as_by_default(tmp_path: Path) -> None:
    """A preset may have taken it up since: then the record is not as the preset has it."""
    config = parse_config(presets.settings("flagship", "probprompt", "emoji-r")).model_dump(mode="json")
    assert config["head"]["layers"] > 0
    older = {**config, "head": {name: value for name, value in config["head"].items() if name != "layers"}}
    run = make(tmp_path / "older", "probprompt", 0, two(90, 80, 70), config=older)
    notes = gather_runs([run]).tables()[0].notes
    assert "Not as the preset has it: head.layers=0, in all rows." in notes


# Numbers


def test_means_and_deviations_are_those_of_the_runs(runs: list[Path]) -> None:
    found = gather_runs(runs[:4])
    assert [measure.key for _, measure in found.tables()[0].columns] == ["FAA", "CAA", "forgetting"]
    # FAA of the seeds: 75 and 70; CAA: (90 + 75) / 2 and (80 + 70) / 2; forgetting: 20 and 10.
    entry = found.entries[found.rows[0], found.places[0]]
    assert [entry.value(measure) for measure in (FAA, CAA, FORGETTING)] == [(72.5, 2.5), (78.75, 3.75), (15.0, 5.0)]
    assert shown(found) == {
        "probprompt": ["*72.50 ± 2.50*", "_78.75 ± 3.75_", "*15.00 ± 5.00*"],
        "vq-prompt": ["_62.50 ± 2.50_", "*81.25 ± 1.25*", "_40.00 ± 0.00_"],
    }
    assert shown(found, 1) == {
        "probprompt": ["0.600 ± 0.100 (0.250)", "3.0 ± 0.0 (4.5)", "12,345", "1 min 0 s"],
        "vq-prompt": ["—", "—", "12,345", "1 min 0 s"],
    }
    assert "Mean ± standard deviation (population) over the seeds 0, 1." in found.tables()[0].notes


def test_one_run_has_no_deviation(runs: list[Path]) -> None:
    found = gather_runs([runs[0], runs[2]])
    assert shown(found)["probprompt"] == ["*75.00*", "*82.50*", "*20.00*"]
    assert found.tables()[0].notes[0].startswith("One run each (seed 0)")


def test_a_number_of_runs_that_differs_is_told(runs: list[Path]) -> None:
    found = gather_runs(runs[:3])
    assert [measure.name for _, measure in found.tables()[0].columns][-1] == "Seeds"
    assert [cells[-1] for cells in shown(found).values()] == ["2", "1"]
    assert "the column Seeds says how many" in found.tables()[0].notes[0]
    told = "emoji-r, matched: not all rows have the same seeds and orders of classes: seeds 0, 1: "
    assert f'{told}"probprompt"; seed 0: "vq-prompt".' in found.tables()[0].notes
    apart = gather_runs([runs[0], runs[3]])  # as many, but others
    assert apart.tables()[0].notes[0].startswith("One run each (seed 0, 1)")
    assert any('seed 0: "probprompt"; seed 1: "vq-prompt"' in note for note in apart.tables()[0].notes)


# Ranks


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 2.0, 1.0], [1, 2, 0]),
        ([3.0, 3.0, 1.0, 0.0], [1, 1, 2, 0]),
        ([3.0, 2.0, 2.0, 1.0], [1, 2, 2, 0]),
        ([2.0, 2.0], [0, 0]),
        ([5.0], [0]),
        ([], []),
    ],
)
def test_best_and_second_share_their_rank_with_what_is_level(values: list[float], expected: list[int]) -> None:
    from probprompt.report.comparison import ranks

    rows = [Row(str(index), "m") for index in range(len(values))]
    found = ranks(dict(zip(rows, values, strict=True)))
    assert [found.get(row, 0) for row in rows] == expected


def test_values_that_look_level_are_level(tmp_path: Path) -> None:
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
    notes = found.tables()[0].notes
    assert "† prompts chosen by the batch's majority; not ranked: l2p (emoji-r, matched)." in notes
    assert "Upper bound, learned all at once, not ranked: joint." in notes


def test_a_mean_over_other_weights_or_images_is_told(tmp_path: Path) -> None:
    """Of runs of one path, whose content was changed between the seeds."""
    parts: dict[str, list[dict[str, Any]]] = {
        "weights": [{"backbone": {"name": "demo", "sha256": text * 64}} for text in "ab"]
    }
    parts["images"] = [{"stream": {"tasks": [["x"], ["y"]], "split_hash": text * 64}} for text in "ab"]
    for what, changes in parts.items():
        made = [make(tmp_path / f"{what}{n}", "apt", n, two(99, 99, 99), **change) for n, change in enumerate(changes)]
        results = [
            read_result(Recorded.of(Run.open(path), ""), Row("apt", "apt", "apt", ()), Place("emoji-r", "matched"), n)
            for n, path in enumerate(made)
        ]
        found = Comparison([results[0].row], [results[0].place], results)
        told = (
            f"apt (emoji-r, matched): its runs have different {what} ({'a' * 12}, {'b' * 12}), their mean says nothing."
        )
        assert told in found.tables()[0].notes


def test_rows_over_fewer_seeds_are_not_ranked(tmp_path: Path) -> None:
    """A seed's order of classes may be easier than another's."""
    ends = {"probprompt": (60, 80), "vq-prompt": (62, 70), "apt": (79,), "ft": (59,)}
    made = [
        make(tmp_path / f"{name}{seed}", name, seed, two(end, end, end))
        for name, found in ends.items()
        for seed, end in enumerate(found)
    ]
    found = gather_runs(made)
    cells, notes = shown(found), found.tables()[0].notes
    assert [cells[name][0] for name in ends] == ["*70.00 ± 10.00*", "_66.00 ± 4.00_", "79.00", "59.00"]
    seeds = 'seeds 0, 1: "probprompt", "vq-prompt"; seed 0: "apt", "ft"'
    assert f"emoji-r, matched: not all rows have the same seeds and orders of classes: {seeds}." in notes
    assert "Bold: the best of a column among the rows with the most seeds; underlined: the second." in notes
    assert "4.0 points above vq-prompt, less than the spread" in render(found)
    alone = gather_runs([made[0], made[1], *made[4:]])
    assert not any("*" in cell for row in shown(alone).values() for cell in row)
    assert not any(text.startswith("Bold") for text in alone.tables()[0].notes)


def test_other_encodings_of_the_same_images_are_told(tmp_path: Path) -> None:
    """And not ranked; of older records, which have no hash of pixels, nothing can be said."""
    names, hashes = ("apt", "ft", "vq-prompt"), ("a" * 64, "b" * 64, None)
    made = [
        make(tmp_path / name, name, 0, two(80, 60, 70 + index), data={"test": {"pixels_sha256": pixels}})
        for index, (name, pixels) in enumerate(zip(names, hashes, strict=True))
    ]
    told = "not ranked, for pixels differ in images of the same names"
    found = gather_runs(made)
    expected = f'emoji-r, matched: {told}: {"a" * 12}: "apt"; {"b" * 12}: "ft".'
    assert expected in found.tables()[0].notes and not any("*" in row[0] for row in shown(found).values())
    assert "points above" not in render(found)
    for pair in (made[::2], made[1:]):
        notes = gather_runs(pair).tables()[0].notes
        assert not any(told in text for text in notes) and any(text.startswith("Bold") for text in notes)


def test_runs_on_validation_are_told_apart(tmp_path: Path, runs: list[Path]) -> None:
    held = make(tmp_path / "v", "apt", 0, two(99, 99, 99), evaluated_on="validation")
    note = "Evaluated on held-out training images (validation), not on the test set."
    found = gather_runs([runs[0], runs[2], held])
    assert shown(found)["apt"][0] == "99.00‡" and f"‡ {note}" in found.tables()[0].notes
    assert not any("*" in cell for cells in shown(found).values() for cell in cells)
    assert any("not ranked, for the rows did not meet the same" in text for text in found.tables()[0].notes)
    alone = gather_runs([held])
    assert shown(alone)["apt"][0] == "99.00" and note in alone.tables()[0].notes


@pytest.mark.parametrize(
    "change", [{"stream": {"split_hash": "other"}}, {"matrix": [[90.0, 80, 70], [None, 80, 70], [None, None, 70]]}]
)
def test_other_images_or_tasks_are_not_ranked_with_these(
    tmp_path: Path, runs: list[Path], change: dict[str, Any]
) -> None:
    other = make(tmp_path / "o", "apt", 0, **{"matrix": two(90, 80, 70), **change})
    found = gather_runs([runs[0], runs[2], other])
    assert not found.comparable(found.places[0]) and "*" not in "".join(shown(found)["probprompt"])


def test_backbones_that_differ_are_told(tmp_path: Path, runs: list[Path]) -> None:
    other = make(tmp_path / "o", "apt", 0, two(90, 80, 70), backbone={"name": "vit_large"})
    (note,) = (text for text in gather_runs([runs[0], other]).tables()[0].notes if "backbones" in text)
    assert note.endswith('vit_tiny: "probprompt"; vit_large: "apt".')


# Gathering


def test_presets_stand_side_by_side_in_the_order_of_the_grid(tmp_path: Path) -> None:
    entries = {"methods": ["vq-prompt", "probprompt"], "benchmarks": "emoji-r", "presets": ["flagship", "matched"]}
    extra = {"seeds": [0, 1], "labels": {"probprompt": "ProbPrompt", "emoji-r": "Emoji-R"}}
    grid = Grid(parse_spec(entries | extra), tmp_path)
    for cell, best in zip(grid.cells, (90.0, 80.0, 70.0), strict=False):
        make(cell.folder, cell.method, cell.seed, two(best, best, best), preset=cell.preset)
    (grid.cells[3].folder).mkdir(parents=True)
    (grid.cells[3].folder / "failed.json").write_text('{"type": "ValueError", "message": "no"}')
    found = gather(grid, grid.outcomes())
    assert [place.label for place in found.places] == ["Emoji-R, flagship", "Emoji-R, matched"]
    # The first cells are flagship probprompt, then matched vq-prompt and probprompt; flagship vq-prompt is not offered.
    assert [row.label for row in found.rows] == ["vq-prompt", "ProbPrompt"]
    assert shown(found) == {
        "vq-prompt": ["—", "—", "—", "*80.00*", "*80.00*", "0.00"],
        "ProbPrompt": ["90.00", "90.00", "0.00", "_70.00_", "_70.00_", "0.00"],
    }
    notes = " ".join(found.tables()[0].notes)
    assert "Failed and not in the table: emoji-r/flagship/probprompt/seed-1; failed.json there" in notes
    assert "Not run yet: emoji-r/matched/vq-prompt/seed-1, emoji-r/matched/probprompt/seed-1." in notes


def test_runs_of_one_method_are_kept_apart_by_their_settings(tmp_path: Path) -> None:
    few, many = {"components": 5, "tokens": 8}, {"components": 10, "tokens": 8}
    folders = [
        make(tmp_path / f"{size['components']}-{seed}", "probprompt", seed, two(90, 80, 70), settings=size, preset=None)
        for size in (few, many)
        for seed in (0, 1)
    ]
    found = gather_runs(folders)
    assert [row.label for row in found.rows] == ["probprompt, components=5", "probprompt, components=10"]
    assert [place.label for place in found.places] == ["emoji-r, custom"]
    assert {len(entry.results) for entry in found.entries.values()} == {2}


def test_what_cannot_be_compared_is_refused(tmp_path: Path, runs: list[Path]) -> None:
    with pytest.raises(UserError, match=r"a0 and .*twin are one and the same run, settings and seed: name one"):
        gather_runs([runs[0], make(tmp_path / "twin", "probprompt", 0, two(1, 1, 1))])
    half = make(tmp_path / "half", "apt", 0, two(1, 1, 1), status="running")
    with pytest.raises(UserError, match=r"only finished runs can be compared, not .*half"):
        gather_runs([runs[0], half])
    with pytest.raises(UserError, match="no run is finished: there is nothing to compare"):
        write_comparison(Comparison([], [], []), tmp_path)


# Languages

HOSTILE = "a_b & 100% #1 {x} ^~\\ <b>|*$5$"


@pytest.fixture
def hostile(tmp_path: Path) -> Comparison:
    """Names that mean something in every language of the tables, and more than one place."""
    home = tmp_path / "deep" / HOSTILE.replace("\\", "")
    home.mkdir(parents=True)
    runs = [
        make(
            tmp_path / f"{method}{seed}{preset}",
            method,
            seed,
            two(90 + seed, 60, 70),
            benchmark=str(home),
            preset=preset,
        )
        for method in ("l2p++", "probprompt")
        for seed in (0, 1)
        for preset in ("matched", "published")
    ]
    return gather_runs(runs)


def lines_of(text: str) -> list[list[str]]:
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]


def test_markdown_is_a_table_with_the_best_bold_and_the_second_underlined(runs: list[Path]) -> None:
    text = markdown(gather_runs(runs))
    rows = [[cell.strip() for cell in line] for line in lines_of(text)]
    assert rows[0] == ["Method", "FAA ↑", "CAA ↑", "Forgetting ↓", "Seeds"]
    assert rows[2][:2] == ["probprompt", "**72.50 ± 2.50**"]
    assert rows[3][:2] == ["vq-prompt", "<ins>62.50 ± 2.50</ins>"]
    assert rows[5][:3] == ["joint (upper bound)", "95.00", "—"] and rows[6][1] == "97.50†"
    assert "## Accuracy in %: emoji-r, matched" in text and "## Prompts and cost: emoji-r, matched" in text
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 2  # padded: readable as it is


def test_markdown_escapes_names_and_holds_no_path_of_this_machine(hostile: Comparison, tmp_path: Path) -> None:
    text = markdown(hostile)
    assert str(tmp_path) not in text and "/deep" not in text
    assert "a\\_b &amp; 100% #1 {x} ^\\~ &lt;b&gt;\\|\\*$5$, matched: FAA ↑" in text
    assert {len(line) for line in lines_of(text)} == {7, 5}


def test_latex_escapes_names_and_has_as_many_cells_in_every_line(hostile: Comparison) -> None:
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


def test_latex_marks_the_best_and_the_second(runs: list[Path]) -> None:
    text = latex(gather_runs(runs))
    assert r"probprompt & \textbf{72.50 $\pm$ 2.50} & \underline{78.75 $\pm$ 3.75} &" in text
    assert r"joint \emph{(upper bound)} & 95.00 & --- & ---" in text and r"l2p & 97.50$^{\dagger}$" in text
    assert r"l2p++ & 47.50 $\pm$ 2.50" in text


def test_csv_gives_back_every_number_and_setting(runs: list[Path], hostile: Comparison, tmp_path: Path) -> None:
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
    own = make(tmp_path / "own", "apt", 0, two(90, 80, 70), preset=None)
    assert next(csv.DictReader(io.StringIO(csv_table(gather_runs([own])))))["preset"] == "custom"
    for line in csv.DictReader(io.StringIO(csv_table(hostile))):
        assert line["benchmark"] == line["data.benchmark"] == HOSTILE.replace("\\", "")


# The page


class Page(HTMLParser):
    """What a page holds, checked for balance while it is read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs))
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def within(self, tag: str) -> list[str]:
        return [text for parent, text in self.texts if parent == tag]


def many(folder: Path, tasks: int = 10, seeds: Sequence[int] = (0, 1, 2)) -> list[Path]:
    """Every method there is, in two presets, and one with more and more components."""
    made = []
    for number, method in enumerate(methods.registered()):
        for preset in ("matched", "published"):
            for seed in seeds:
                level = 88.0 - 2.1 * number + 0.9 * math.sin(5 * number + seed) + (2.0 if preset == "matched" else 0.0)
                matrix: Matrix = [
                    [None if step < task else level - 1.1 * (step - task) ** 0.7 - task for step in range(tasks)]
                    for task in range(tasks)
                ]
                similar = {"mean": 0.9 - 0.04 * number, "initial_mean": 0.5, "effective_rank": 3.0}
                made.append(
                    make(
                        folder / f"{method}-{preset}-{seed}",
                        method,
                        seed,
                        [[91.5 + seed]] if methods.find(method).joint else matrix,
                        preset=preset,
                        similarity=similar if number % 3 else None,
                        marks=["legacy: batch-wise choice"] if (method, preset) == ("l2p", "published") else [],
                    )
                )
    return made


def grown(folder: Path, tasks: int = 3) -> list[Path]:
    """Two methods with three numbers of components."""
    return [
        make(
            folder / f"{method}-{size}",
            method,
            0,
            [[None if step < task else 80.0 - step + size / 10 for step in range(tasks)] for task in range(tasks)],
            settings={name: size},
            similarity=SIMILARITY | {"mean": 0.9 - 0.02 * size},
        )
        for method, name in (("probprompt", "components"), ("coda-prompt", "components_per_task"))
        for size in (5, 10, 20)
    ]


def test_the_page_is_well_formed_accessible_and_needs_nothing_from_elsewhere(
    runs: list[Path], hostile: Comparison
) -> None:
    for comparison in (gather_runs(runs), hostile):
        raw = render(comparison)
        page = Page(raw)
        assert page.all("html") == [{"lang": "en"}]
        assert not re.search(r"https?://|@import", raw)
        assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "b onload"}
        ids = [a["id"] for _, a in page.elements if "id" in a]
        assert len(ids) == len(set(ids))
        assert {f"#{name}" for name in ids} >= set(re.findall(r"url\(([^)]*)\)", raw))
        levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))
        plots = [svg for svg in page.all("svg") if svg.get("class") == "plot"]
        assert plots and all(plot["role"] == "img" and plot["aria-label"] for plot in plots)
        assert len(page.all("caption")) == len(page.all("table"))
        assert all(header["scope"] in ("col", "row", "colgroup") for header in page.all("th"))
        assert "--series-5" in raw and "prefers-color-scheme: dark" in raw


def test_the_page_shows_the_tables_the_marks_and_who_is_ahead(runs: list[Path]) -> None:
    page = Page(render(gather_runs(runs)))
    assert {"72.50 ± 2.50", "81.25 ± 1.25"} <= set(page.within("b")) and "62.50 ± 2.50" in page.within("u")
    assert "97.50†" in page.within("td") and "upper bound" in page.within("span")
    assert "5 methods on emoji-r" in page.within("h1")
    lead = "On emoji-r (matched), probprompt ends at 72.5\u00a0% on average, 10.0 points above vq-prompt."
    assert page.within("p")[0] == lead
    assert page.within("h2") == [
        "Results",
        "Final accuracy",
        "Average accuracy",
        "Forgetting",
        "Prompt similarity",
        "Task by task",
    ]
    spoken = " ".join(str(svg["aria-label"]) for svg in page.all("svg") if "aria-label" in svg)
    assert "probprompt 72.50 ± 2.50; vq-prompt 62.50 ± 2.50" in spoken
    assert "probprompt 0.600 ± 0.100, 0.250 at the start" in spoken
    assert "probprompt: 85.0, 72.5; vq-prompt: 100.0, 62.5" in spoken
    assert "probprompt from 85.0 to 70.0" in spoken  # the course of the first task
    assert "15.0" in page.within("td")


def test_a_lead_that_the_seeds_do_not_bear_out_is_called_so(tmp_path: Path) -> None:
    folders = [
        make(tmp_path / f"{method}{seed}", method, seed, two(80, value, value))
        for method, values in (("probprompt", (70, 60)), ("apt", (64, 64)))
        for seed, value in enumerate(values)
    ]
    assert "1.0 points above apt, less than the spread over the seeds." in render(gather_runs(folders))
    level = [make(tmp_path / f"level-{m}", m, 0, two(80, 70, 70)) for m in ("ft", "apt", "lda")]
    assert "ft, apt, lda are level at 70.0\u00a0%." in render(gather_runs(level))


def test_similarity_is_drawn_against_the_number_of_components(tmp_path: Path) -> None:
    page = Page(render(gather_runs(grown(tmp_path))))
    assert "More components" in page.within("h2")
    (spoken,) = (a["aria-label"] for a in page.all("svg") if "against the number" in str(a.get("aria-label")))
    assert spoken is not None
    assert "probprompt: 0.800 with 5, 0.700 with 10, 0.500 with 20; coda-prompt: 0.800 with 5" in spoken


def test_every_method_has_a_look_of_its_own_and_its_name_beside_its_line(tmp_path: Path) -> None:
    comparison = gather_runs(many(tmp_path, tasks=3, seeds=(0,)))
    from probprompt.report.comparison_page import _looks

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
def test_places_are_spread_no_further_than_needed(values: list[float], gap: float) -> None:
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


# Files and the screen


def test_all_files_are_written(runs: list[Path], tmp_path: Path) -> None:
    files = write_comparison(gather_runs(runs), tmp_path / "new" / "out")
    assert [path.name for path in files] == ["table.md", "table.tex", "table.csv", "comparison.html"]
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == sorted(path.name for path in files)
    first = [path.read_bytes() for path in files]
    assert [path.read_bytes() for path in write_comparison(gather_runs(runs), tmp_path / "new" / "out")] == first


def test_the_command_shows_runs_that_are_there(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command.run_compare(None, {}, [], [], runs, tmp_path / "out", None, False)
    printed = capsys.readouterr().out
    assert re.search(r"^probprompt +72\.50 ± 2\.50 +78\.75 ± 3\.75 +15\.00 ± 5\.00 +2 *$", printed, re.MULTILINE)
    assert f"written: {tmp_path / 'out' / 'comparison.html'}" in printed


def test_deviations_that_are_left_out_are_told(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "Without the standard deviations, for which this window is too narrow."
    for width, some, count in (("80", runs, 0), ("60", runs, 1), ("60", runs[:1], 0)):
        monkeypatch.setenv("COLUMNS", width)
        command.run_compare(None, {}, [], [], some, tmp_path / "out", None, False)
        printed = capsys.readouterr().out.partition("Prompts and cost")[0]
        assert " ".join(printed.split()).count(told) == count


def test_a_table_too_wide_for_the_screen_is_shown_place_by_place(tmp_path: Path) -> None:
    comparison = gather_runs(many(tmp_path, tasks=2, seeds=(0, 1)))
    accuracy = comparison.tables()[0]
    for width, headers in ((200, 1), (80, 2), (60, 2)):
        screen, text = Screen(), io.StringIO()
        screen.console = Console(file=text, width=width, highlight=False, legacy_windows=False)
        assert command._show(screen, accuracy) == (width > 60)
        lines = text.getvalue().splitlines()
        assert sum(line.startswith("method") for line in lines) == headers
        assert not any("…" in line or len(line) > width for line in lines)
        assert ("±" in text.getvalue()) == (width > 60)


@pytest.mark.parametrize(("width", "headers"), [(80, 1), (50, 1), (30, 0)])
def test_no_number_is_cut_beside_long_names(tmp_path: Path, width: int, headers: int) -> None:
    comparison = gather_runs(many(tmp_path, tasks=2, seeds=(0, 1)))
    for table in comparison.tables():
        more = f"relevance_temperature=sqrt_dim, {'x' * 40}"
        named = [(replace(row, label=f"{row.label}, {more}"), cells) for row, cells in table.rows]
        (first, count), *_ = table.places
        assert all(place == first for place, _ in table.columns[:count])
        part = Table("", table.columns[:count], [(row, cells[:count]) for row, cells in named])
        screen, text = Screen(), io.StringIO()
        screen.console = Console(file=text, width=width, highlight=False, legacy_windows=False)
        command._show(screen, part)
        assert "…" not in text.getvalue()
        assert sum(line.startswith("method") for line in text.getvalue().splitlines()) <= headers
        assert all(shown.mean in text.getvalue() for _, cells in part.rows for shown in cells)


def test_a_row_without_runs_in_a_place_is_not_shown_there(tmp_path: Path) -> None:
    accuracy = gather_runs(many(tmp_path, tasks=2, seeds=(0, 1))).tables()[0]
    (place, _), *_ = accuracy.places
    columns = [*((place, measure) for measure in ACCURACY), (place, SEEDS)]
    empty = [*(Shown(NOTHING) for _ in ACCURACY), Shown("0")]
    row = replace(accuracy.rows[0][0], label="x" * 100)
    screen, text = Screen(), io.StringIO()
    screen.console = Console(file=text, width=80, highlight=False, legacy_windows=False)
    command._show(screen, Table("", columns, [(row, empty)]))
    assert "xxx" not in text.getvalue()


def test_documented_examples_hold() -> None:
    for name in ("report.comparison", "report.figures", "runs.grid", "cli.compare"):
        outcome = doctest.testmod(importlib.import_module(f"probprompt.{name}"))
        assert outcome.attempted and outcome.failed == 0
