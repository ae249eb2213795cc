"""Comparison of finished runs in rows (methods) and columns (benchmarks and measures)."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from probprompt import methods, presets
from probprompt.backbones.pretrained import backbone_words
from probprompt.config import flatten, to_stored
from probprompt.data.datasets import benchmark_label
from probprompt.errors import UserError, shorten
from probprompt.evaluation import metrics
from probprompt.report.tables import HELD_OUT, MARKED, NOTHING, duration, number
from probprompt.runs.grid import CUSTOM, Grid, Outcome, Varied, brief, describe
from probprompt.runs.run import RecordedRun, Run, RunRecord, Value, read_results, without_paths
from probprompt.storage import natural_order

FILES = ("table.md", "table.tex", "table.csv", "comparison.html")
Cell = str | int | float | None
"""A value in a CSV file."""
Key = TypeVar("Key")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Row:
    """A method with its varied settings."""

    label: str
    method: str
    name: str = ""
    """Display name of the method."""
    varied: Varied = field(default=(), compare=False)
    usual: Varied = field(default=(), compare=False)
    """Varied settings with their default values, which the label omits."""

    @property
    def bound(self) -> bool:
        """True if it learns all tasks jointly: an upper bound, which is not ranked."""
        method = methods.registered().get(self.method)
        return bool(method and method.joint)


@dataclass(frozen=True)
class ColumnGroup:
    """A group of columns: a benchmark with a preset."""

    benchmark: str
    preset: str

    @property
    def label(self) -> str:
        """Benchmark and preset as text."""
        return f"{self.benchmark}, {self.preset}" if self.preset else self.benchmark


@dataclass(frozen=True)
class Measure:
    """A number of a run; higher (1) or lower (-1) is better, or neither (0)."""

    key: str
    name: str
    digits: int = 2
    better: int = 0
    start: str = ""
    """Key of the same number before training."""

    @property
    def heading(self) -> str:
        """Name with an arrow for the better direction."""
        return self.name + {1: " ↑", -1: " ↓", 0: ""}[self.better] + (" (at start)" if self.start else "")


FAA, CAA = Measure("FAA", "FAA", better=1), Measure("CAA", "CAA", better=1)
FORGETTING = Measure("forgetting", "Forgetting", better=-1)
SEEDS = Measure("seeds", "Seeds")
SIMILARITY = Measure("similarity", "Similarity", 3, start="initial_similarity")
RANK = Measure("effective_rank", "Eff. rank", 1, start="initial_effective_rank")
PARAMETERS, TIME = Measure("trainable_parameters", "Parameters", 0), Measure("seconds", "Time", 0)
ACCURACY = (FAA, CAA, FORGETTING)
DISK = Measure("disk_mb", "On disk, MB", 2)
INSIDE = (SIMILARITY, RANK, PARAMETERS, DISK, TIME)


@dataclass(frozen=True, eq=False)
class Result:
    """One finished run for the tables."""

    row: Row
    place: ColumnGroup
    seed: int
    run: RecordedRun
    values: Mapping[str, float]
    """Its numbers by the keys of the measures."""

    @property
    def folder(self) -> str:
        """Folder or name of the run."""
        return self.run.where

    @property
    def record(self) -> RunRecord:
        """Record of the run."""
        return self.run.record

    @property
    def matrix(self) -> NDArray[np.float64]:
        """Accuracy in % on task i (row) after step j (column)."""
        return self.run.matrix

    @property
    def averages(self) -> list[float]:
        """Average accuracy over the tasks seen so far, after each step."""
        return [float(self.matrix[: step + 1, step].mean()) for step in range(len(self.matrix))]

    def csv_line(self) -> dict[str, Cell]:
        """Return all numbers and settings by column."""
        record, row = self.record, self.row
        line: dict[str, Cell] = {
            "method": row.method,
            "varied": " ".join(describe(tuple(to_stored(dict(row.varied)).items()))),
            "preset": self.place.preset,
            "benchmark": self.place.benchmark,
            "seed": self.seed,
            **{key: self.values.get(key) for m in (*ACCURACY, *INSIDE) for key in (m.key, m.start) if key},
            "peak_memory_mb": record.peak_memory_mb,
            "upper_bound": row.bound,
            "marks": "; ".join(record.marks),
            "evaluated_on": record.evaluated_on,
            "tasks": len(self.matrix),
            "matrix": json.dumps(metrics.to_json(self.matrix)),
            "backbone": record.backbone.name,
            "backbone_sha256": record.backbone.sha256,
            "order_hash": record.stream.order_hash,
            "split_hash": record.stream.split_hash,
            "config_hash": record.config_hash,
            "created": record.created,
            "device": record.hardware.device,
            "gpu": record.hardware.gpu,
            **{f"{package}_version": record.versions.get(package) for package in ("probprompt", "torch", "timm")},
            "folder": self.folder,
        }
        settings = without_paths(flatten(record.config))
        plain = {k: v if isinstance(v, str | int | float | None) else json.dumps(v) for k, v in settings.items()}
        return line | {name: value for name, value in plain.items() if name not in line}


def read_result(run: RecordedRun, row: Row, place: ColumnGroup, seed: int) -> Result:
    """Read the numbers of a finished run."""
    record, matrix, similarity = run.record, run.matrix, run.similarity
    values = metrics.summarize(matrix)
    if len(matrix) == 1:  # one step cannot forget
        values = {FAA.key: values[FAA.key]}
    names = {SIMILARITY.key: "mean", SIMILARITY.start: "initial_mean", RANK.key: RANK.key, RANK.start: RANK.start}
    more = {key: similarity.get(name) for key, name in names.items()} | {
        PARAMETERS.key: record.trainable_parameters,
        DISK.key: record.model_mb.get("learn"),
        TIME.key: record.time.get("total_s"),
    }
    values |= {key: float(value) for key, value in more.items() if value is not None}
    return Result(row, place, seed, run, values)


@dataclass(frozen=True, eq=False)
class Entry:
    """The runs of a row in a group of columns, one per seed."""

    results: Sequence[Result]

    def value(self, measure: Measure) -> tuple[float, float] | None:
        """Return mean and standard deviation over seeds; None if no run has the number."""
        values = [result.values[measure.key] for result in self.results if measure.key in result.values]
        return metrics.mean_and_std(values) if values else None

    def start(self, measure: Measure) -> float | None:
        """Return the mean of the same number before training."""
        value = self.value(replace(measure, key=measure.start))
        return value[0] if value else None

    @property
    def marks(self) -> tuple[str, ...]:
        """Warnings: known errors of published code that the runs repeat."""
        return tuple(dict.fromkeys(mark for result in self.results for mark in result.record.marks))

    def mixtures(self, label: str) -> list[str]:
        """Return why the mean over these runs is meaningless: different weights or images."""
        hashes = {
            "weights": {result.record.backbone.sha256 for result in self.results},
            "images": {result.record.stream.split_hash for result in self.results},
        }
        return [
            f"{label}: the runs used different {what} ({', '.join(sorted(each[:12] for each in values))}), so their "
            "mean is not meaningful."
            for what, values in hashes.items()
            if len(values) > 1
        ]

    @property
    def held_out(self) -> bool:
        """True if the accuracy is on held-out training images."""
        return any(result.record.evaluated_on != "test" for result in self.results)

    @property
    def protocol(self) -> tuple[object, ...]:
        """What must agree for a ranking: number of tasks, and the split of images."""
        splits = sorted({result.record.stream.split_hash for result in self.results})
        return self.held_out, max(len(result.matrix) for result in self.results), *splits

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the runs."""
        return tuple(result.seed for result in self.results)

    @property
    def pixels(self) -> list[str]:
        """Hashes of the evaluated pixels; encodings of the same images can differ."""
        return sorted({digest for result in self.results if (digest := pixels_hash(result.record))})

    @property
    def backbone(self) -> str:
        """Name of the backbone."""
        return " and ".join(sorted({result.record.backbone.name for result in self.results}))

    @property
    def curve(self) -> list[float]:
        """Average accuracy after each step, mean over seeds."""
        mean: list[float] = np.mean([result.averages for result in self._same_length], axis=0).tolist()
        return mean

    @property
    def matrix(self) -> NDArray[np.float64]:
        """Accuracy matrix, mean over seeds."""
        mean: NDArray[np.float64] = np.mean([result.matrix for result in self._same_length], axis=0)
        return mean

    @property
    def _same_length(self) -> list[Result]:
        """Runs with as many tasks as the first."""
        return [result for result in self.results if len(result.matrix) == len(self.results[0].matrix)]


def ranks(values: Mapping[Row, float]) -> dict[Row, int]:
    """Rank the best (1) and second (2) rows; equal rows share a rank, and no rank if all are.

    >>> a, b, c = (Row(name, name) for name in "abc")
    >>> {row.label: rank for row, rank in ranks({a: 70.0, b: 71.5, c: 71.5}).items()}
    {'a': 2, 'b': 1, 'c': 1}
    """
    levels = sorted(set(values.values()), reverse=True)
    if len(levels) < 2:
        return {}
    return {row: 1 + levels.index(value) for row, value in values.items() if value in levels[:2]}


@dataclass(frozen=True)
class FormattedCell:
    """A number as text: mean, standard deviation, start value, rank, note sign."""

    mean: str
    std: str = ""
    start: str = ""
    rank: int = 0
    sign: str = ""

    @property
    def text(self) -> str:
        """The number without rank and sign."""
        spread = f" ± {self.std}" if self.std else ""
        return f"{self.mean}{spread}{f' ({self.start})' if self.start else ''}"


@dataclass(frozen=True)
class Table:
    """A table in no particular format."""

    caption: str
    columns: Sequence[tuple[ColumnGroup, Measure]]
    rows: Sequence[tuple[Row, Sequence[FormattedCell]]]
    notes: Sequence[str] = ()

    @property
    def places(self) -> list[tuple[ColumnGroup, int]]:
        """Groups of columns with their widths."""
        return list(Counter(place for place, _ in self.columns).items())


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs in rows (methods) and groups of columns (benchmarks with presets)."""

    rows: Sequence[Row]
    places: Sequence[ColumnGroup]
    results: Sequence[Result]
    failed: Sequence[str] = ()
    missing: Sequence[str] = ()
    others: Sequence[RunRecord] = ()
    """Records of other runs, which may have run at the same time."""

    @property
    def recorded(self) -> list[RecordedRun]:
        """All runs in the form of a results file."""
        return [result.run for result in self.results]

    @cached_property
    def entries(self) -> dict[tuple[Row, ColumnGroup], Entry]:
        """Runs by row and group of columns."""
        groups = grouped(((result.row, result.place), result) for result in self.results)
        return {key: Entry(sorted(runs, key=lambda result: result.seed)) for key, runs in groups.items()}

    def rivals(self, place: ColumnGroup) -> dict[Row, Entry]:
        """Return the rows to rank: no upper bounds, no warnings."""
        entries = {row: self.entries[row, place] for row in self.rows if (row, place) in self.entries}
        return {row: entry for row, entry in entries.items() if not row.bound and not entry.marks}

    def comparable(self, place: ColumnGroup) -> bool:
        """Return True if all ranked rows used the same tasks and images, as far as recorded."""
        rivals = self.rivals(place).values()
        pixels = {each for entry in rivals for each in entry.pixels}
        return len(pixels) <= 1 and len({entry.protocol for entry in rivals}) <= 1

    def level(self, place: ColumnGroup) -> dict[Row, Entry]:
        """Return the ranked rows with the most seeds, the same ones, since seeds set the order."""
        rivals = self.rivals(place)
        rows = Counter(entry.seeds for entry in rivals.values())
        most = max(rows, key=lambda seeds: (len(seeds), rows[seeds]), default=())
        return {row: entry for row, entry in rivals.items() if entry.seeds == most}

    def ranks(self, place: ColumnGroup, measure: Measure) -> dict[Row, int]:
        """Rank a column by the displayed digits."""
        if not measure.better or not self.comparable(place):
            return {}
        values = {row: entry.value(measure) for row, entry in self.level(place).items()}
        return ranks({row: measure.better * round(v[0], measure.digits) for row, v in values.items() if v})

    @property
    def seeds(self) -> list[int]:
        """Seeds of all rows."""
        return sorted({result.seed for result in self.results})

    @property
    def uneven(self) -> bool:
        """True if rows differ in their number of runs."""
        return len({len(entry.results) for entry in self.entries.values()}) > 1

    def tables(self) -> list[Table]:
        """Return the tables of accuracy, and of prompts and cost."""
        accuracy = (*ACCURACY, SEEDS) if self.uneven else ACCURACY
        return [
            self._table("Accuracy in %", accuracy, self._accuracy_notes()),
            self._table("Prompts and cost", INSIDE, self._inside_notes()),
        ]

    def _table(self, caption: str, measures: Sequence[Measure], notes: Sequence[str]) -> Table:
        columns = [(place, measure) for place in self.places for measure in measures if self._filled(place, measure)]
        ranked = [(place, measure, self.ranks(place, measure)) for place, measure in columns]
        rows = [
            (row, [self._format(self.entries.get((row, place)), m, rank.get(row, 0)) for place, m, rank in ranked])
            for row in self.rows
        ]
        return Table(f"{caption}: {self.places[0].label}" if len(self.places) == 1 else caption, columns, rows, notes)

    def _filled(self, place: ColumnGroup, measure: Measure) -> bool:
        entries = (entry for (_, other), entry in self.entries.items() if other == place)
        return measure in (FAA, SEEDS) or any(entry.value(measure) for entry in entries)

    def _format(self, entry: Entry | None, measure: Measure, rank: int) -> FormattedCell:
        if measure is SEEDS:
            return FormattedCell(str(len(entry.results)) if entry else "0")
        values = entry.value(measure) if entry else None
        if not entry or not values:
            return FormattedCell(NOTHING)
        if measure is TIME:
            return FormattedCell(duration(values[0]))
        mean, std = (number(value, measure.digits) for value in values)
        start, mixed = entry.start(measure), len({other.held_out for other in self.entries.values()}) > 1
        signs = (MARKED if entry.marks else "") + (HELD_OUT if mixed and entry.held_out else "")
        return FormattedCell(
            mean,
            "" if measure in (PARAMETERS, DISK) or len(entry.results) == 1 else std,
            "" if start is None else number(start, measure.digits),
            rank,
            signs if measure is FAA else "",
        )

    def _inside_notes(self) -> list[str]:
        texts = {SIMILARITY: _SIMILARITY, DISK: _DISK}
        notes = [texts[one] for one in texts if any(entry.value(one) for entry in self.entries.values())]
        return [self._seeds_note(), *notes, *self._time_note()]

    def _time_note(self) -> list[str]:
        """List the rows whose runs shared their machine."""
        concurrent = ran_concurrently([result.record for result in self.results], self.others)
        rows = dict.fromkeys(
            f'"{result.row.label}"' + (f" ({result.place.label})" if len(self.places) > 1 else "")
            for result, shared in zip(self.results, concurrent, strict=True)
            if shared
        )
        if not rows:
            return []
        labels = "all rows" if len(rows) == len(self.entries) else shorten(rows)
        return [f"Times of these rows were measured while other runs shared the machine: {labels}."]

    def _differences(self) -> list[str]:
        """Return a note per setting that differs from the preset of its group of columns."""
        labels = ((result, f"{result.row.label} ({result.place.label})") for result in self.results)
        changes = grouped((change, label) for result, label in labels for change in _overrides(result))
        rows = {change: dict.fromkeys(some) for change, some in changes.items()}
        names = {c: "in all rows" if len(some) == len(self.entries) else ", ".join(some) for c, some in rows.items()}
        return [f"{DIFFERS}: {change}, {labels}." for change, labels in names.items()]

    def _accuracy_notes(self) -> list[str]:
        backbones = dict.fromkeys(result.record.backbone.name for result in self.results)
        notes = [self._seeds_note(), MEANING, f"Backbone: {', '.join(backbones)}."]
        notes += self._defaults_note()
        ranked = [place for place in self.places if any(self.ranks(place, measure) for measure in ACCURACY)]
        if ranked:
            some = any(len(self.level(place)) < len(self.rivals(place)) for place in ranked)
            among = " among the rows with the most seeds" if some else ""
            notes.append(f"Bold: best of a column{among}; underlined: second.")
        bounds = [row.label for row in self.rows if row.bound]
        if bounds:
            notes.append(f"Upper bound, trained on all tasks jointly, not ranked: {', '.join(bounds)}.")
        return notes + self._caveats()

    def _defaults_note(self) -> list[str]:
        """List the settings that labels omit, and the rows with other defaults."""
        usual = grouped((name, (brief(value), result)) for result in self.results for name, value in result.row.usual)
        if not usual:
            return []
        most = {name: Counter(value for value, _ in pairs).most_common(1)[0][0] for name, pairs in usual.items()}
        names = describe(tuple(most.items()))
        texts = [text + _others(usual[name], most[name]) for text, name in zip(names, most, strict=True)]
        own = any(value is None for result in self.results for _, value in result.row.usual)
        return [f"Defaults in this table: {', '.join(texts)}{'; none: the default of the method' if own else ''}."]

    def _seeds_note(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        if all(len(entry.results) == 1 for entry in self.entries.values()):
            return f"One run each (seed {seeds}): differences of a few points may be noise."
        less = "; the column Seeds counts the runs of a row" if self.uneven else ""
        return f"Mean ± standard deviation (population) over seeds {seeds}{less}."

    @property
    def own_notes(self) -> list[str]:
        """Return the notes that are about these runs only, without those that hold for all tables."""
        return [*self._defaults_note(), *self._caveats(), *self._time_note()]

    def _caveats(self) -> list[str]:
        """Return why some numbers must not be compared."""
        entries = [(f"{row.label} ({place.label})", entry) for (row, place), entry in self.entries.items()]
        notes = [text for label, entry in entries for text in entry.mixtures(label)]
        marks = grouped((mark, label) for label, entry in entries for mark in entry.marks)
        notes += [f"{MARKED} {mark}; not ranked: {', '.join(labels)}." for mark, labels in marks.items()]
        notes += self._differences()
        held = [entry.held_out for entry in self.entries.values()]
        if any(held):
            sign = "" if all(held) else f"{HELD_OUT} "
            notes.append(f"{sign}Evaluated on held-out training images (validation), not on the test set.")
        for place in self.places:
            notes += self.caveats(place)
        if self.failed:
            notes.append(f"Failed and not in the table: {', '.join(self.failed)}. The reason is in failed.json.")
        if self.missing:
            notes.append(f"Not run yet: {shorten(self.missing)}.")
        return notes

    def caveats(self, place: ColumnGroup) -> list[str]:
        """Return why rows of a group of columns are not ranked, or how else they differ."""
        rivals = self.rivals(place).items()
        notes = []
        if len({entry.protocol for _, entry in rivals}) > 1:
            notes.append(f"{place.label}: not ranked, because the rows used different tasks or images.")
        pixels = grouped((each[:12], row.label) for row, entry in rivals for each in entry.pixels)
        if len(pixels) > 1 and not notes:
            notes.append(f"{place.label}: not ranked, because the pixels of the images differ: {_rows(pixels)}.")
        seeds = grouped((seed_list(entry.seeds), row.label) for row, entry in rivals)
        if len(seeds) > 1:
            notes.append(f"{place.label}: rows have different seeds and class orders: {_rows(seeds)}.")
        backbones = grouped((entry.backbone, row.label) for row, entry in rivals)
        if len(backbones) > 1:
            notes.append(f"{place.label}: rows use different backbones: {_rows(backbones)}.")
        return notes


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Collect the items of each key, keys in their first order.

    >>> grouped([("b", 1), ("a", 2), ("b", 3)])
    {'b': [1, 3], 'a': [2]}
    """
    groups: dict[Key, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def _rows(groups: Mapping[str, Sequence[str]]) -> str:
    """List the rows of each group, quoted because labels contain commas.

    >>> _rows({"seed 0": ["apt", "ft, epochs=2"]})
    'seed 0: "apt", "ft, epochs=2"'
    """
    quoted = {name: [f'"{label}"' for label in rows] for name, rows in groups.items()}
    return "; ".join(f"{name}: {shorten(rows)}" for name, rows in quoted.items())


def seed_list(numbers: Sequence[int]) -> str:
    """Format seeds as text."""
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


MEANING = (
    "FAA: average accuracy over all tasks after the last one. CAA: its mean over all steps. "
    "Forgetting: points that earlier tasks lost from their best accuracy."
)
DIFFERS = "Differs from the preset"
_DISK = "On disk: prompts, head and the statistics to continue training; the backbone only if it is trained."
_SIMILARITY = (
    "Similarity: mean pairwise cosine similarity of the prompts of different classes; eff. rank: number of directions "
    "that they span. In parentheses the mean before training, to compare with."
)

SHARED_NOTES = (MEANING, _SIMILARITY, _DISK)


MANY = 3
"""With this number of varied settings, labels omit default values."""


def _overrides(result: Result) -> list[str]:
    """Return settings that differ from the preset and are not varied, as ``key=value``."""
    record = result.record
    if record.preset not in presets.NAMES:
        return []
    expected = {key for key, _ in result.row.varied} | {"data.tasks", "data.validation", "data.benchmark"}
    expected |= {"evaluation_batch_size"}  # changes only rounding
    named = record.preset_overrides.items()
    return [f"{k}={brief(v)}" for k, v in named if k in (record.preset_settings or ()) and k not in expected]


def gather(grid: Grid, outcomes: Sequence[Outcome]) -> Comparison:
    """Gather the finished runs of a grid; rows in the order of its methods."""
    labels, cells = grid.spec.labels, [outcome.spec for outcome in outcomes]
    rows = [_row(cell.method, cell.varied, labels) for cell in cells]
    places = [ColumnGroup(labels.get(cell.benchmark, cell.benchmark), cell.preset) for cell in cells]
    return Comparison(
        sorted(dict.fromkeys(rows), key=lambda row: grid.spec.methods.index(row.method)),
        list(dict.fromkeys(places)),
        [
            read_result(RecordedRun.of(outcome.run, outcome.spec.name), row, place, outcome.spec.seed)
            for outcome, row, place in zip(outcomes, rows, places, strict=True)
            if outcome.run
        ],
        [outcome.spec.name for outcome in outcomes if outcome.problem],
        [outcome.spec.name for outcome in outcomes if not outcome.run and not outcome.problem],
    )


def _others(pairs: Sequence[tuple[str, Result]], most: str) -> str:
    """List the results whose value of a setting is not the most frequent one."""
    values = grouped((result.place, value) for value, result in pairs)

    def name(result: Result) -> str:
        place = result.place
        return place.label if len(set(values[place])) == 1 else f"{result.row.name} in {place.label}"

    others = grouped((value, name(result)) for value, result in pairs if value != most)
    return "".join(f" ({value} for {'; '.join(dict.fromkeys(names))})" for value, names in others.items())


_BACKBONE = ("backbone.name", "backbone.weights", "backbone.image_size")
"""Settings that identify a backbone."""


def _row(method: str, varied: Varied, labels: Mapping[str, str], usual: Varied = (), backbone: str = "") -> Row:
    """Make a row labeled by its varied settings; a backbone is shown by its short name."""
    name = labels.get(method, method)
    named = tuple(change for change in varied if change not in usual)
    parts = [name]
    if backbone and any(key in _BACKBONE for key, _ in varied):
        named, usual = (tuple(change for change in part if change[0] not in _BACKBONE) for part in (named, usual))
        parts.append(backbone)
    return Row(", ".join((*parts, *describe(named))), method, name, varied, usual)


def _backbones(flat: Sequence[dict[str, Value]]) -> list[str]:
    """Return the short name of each backbone; empty if it is ambiguous or unknown."""
    own = [tuple(settings.get(key) for key in _BACKBONE) for settings in flat]
    keys = ("name", "weights", "image_size")
    names = [backbone_words(dict(zip(keys, one, strict=True))) if one[0] else "" for one in own]
    groups = grouped(zip(names, own, strict=True))
    return [name if len(set(groups[name])) == 1 else "" for name in names]


def _usual(varied: Varied, record: RunRecord, flat: Sequence[dict[str, Value]]) -> Varied:
    """Return the varied settings that equal the preset or, without one, most runs."""
    # A preset has the requested tasks, so they never count as its default.
    varied = tuple((name, value) for name, value in varied if name != "data.tasks")
    if record.preset in presets.NAMES and (preset := record.preset_settings):
        return tuple((name, value) for name, value in varied if name in preset and preset[name] == value)
    return tuple((name, value) for name, value in varied if 2 * sum(own.get(name) == value for own in flat) > len(flat))


def gather_runs(paths: Sequence[str | Path], preset_columns: bool = True) -> Comparison:
    """Read finished runs from folders or results files; labels show the settings that differ.

    Presets are groups of columns, or part of the labels.
    """
    runs = [run for path in paths for run in _read(Path(path))]
    if not runs:
        raise UserError("No run to compare. Pass folders of finished runs or a results file (.jsonl).")
    results: list[Result] = []
    flat = _settings(runs)
    apart, many = _apart(flat)
    in_rows = not preset_columns and len({run.record.preset for run in runs}) > 1
    for run, varied, backbone in zip(runs, apart, _backbones(flat), strict=True):
        record, preset = run.record, run.record.preset or CUSTOM
        usual = _usual(varied, record, flat) if many else ()
        row = _row(record.method, (("preset", preset), *varied) if in_rows else varied, {}, usual, backbone)
        place = ColumnGroup(benchmark_label(record.benchmark), "" if in_rows else preset)
        result = read_result(run, row, place, record.config["seeds"]["order"])
        for other in results:
            if (other.row, other.place, other.seed) == (row, place, result.seed):
                raise UserError(
                    f"{other.folder} and {run.where} are the same run (settings and seed). Pass one of them."
                )
        results.append(result)
    listed = {name: number for number, name in enumerate(presets.NAMES)}  # other presets come last
    return Comparison(
        list(dict.fromkeys(result.row for result in results)),
        sorted({r.place for r in results}, key=lambda p: (p.benchmark, listed.get(p.preset, len(listed)), p.preset)),
        results,
    )


def _settings(runs: Sequence[RecordedRun]) -> list[dict[str, Value]]:
    """Return all settings of each run; weights by file name, and by hash if names are ambiguous."""
    records = [run.record for run in runs]
    names = [without_paths(record.flat_settings.get("backbone.weights")) for record in records]
    contents = grouped((str(name), record.backbone.sha256) for name, record in zip(names, records, strict=True))
    return [
        record.flat_settings
        | {"backbone.weights": f"{name} ({record.backbone.sha256[:8]})" if len(set(contents[str(name)])) > 1 else name}
        for name, record in zip(names, records, strict=True)
    ]


def pixels_hash(record: RunRecord) -> str | None:
    """Return the hash of the evaluated images or their folder; None for older records."""
    return record.data["test"].pixels_sha256 if "test" in record.data else None


def _read(path: Path) -> list[RecordedRun]:
    """Read a run, a folder of runs at any depth, or a results file."""
    if path.is_file():
        return read_results(path)
    inside = [] if (path / "run.json").exists() else sorted(path.rglob("run.json"), key=natural_order)
    if inside:
        return [run for file in inside for run in _read(file.parent)]
    run = Run.open(path)
    if not run.finished:
        raise UserError(f"{path} is not finished. Continue it with 'probprompt train --resume {path}'.")
    return [RecordedRun.of(run, str(path))]


def _apart(flat: Sequence[dict[str, Value]]) -> tuple[list[Varied], bool]:
    """Return the settings that distinguish each run, and if they are many.

    These are settings in which runs of one method and preset differ on a benchmark, except seeds. If they are many,
    all runs get all of them, so that a label can omit the defaults.
    """
    first: dict[tuple[str, ...], dict[str, Value]] = {}
    differ: dict[tuple[str, ...], set[str]] = {}
    kinds = [tuple(str(own.get(key)) for key in ("method.name", "preset")) for own in flat]
    for own, kind in zip(flat, kinds, strict=True):
        peer = first.setdefault((*kind, str(own.get("data.benchmark"))), own)
        names = {name for name in {**peer, **own} if own.get(name) != peer.get(name)}
        differ.setdefault(kind, set()).update(name for name in names if not name.startswith("seeds."))
    every = set().union(*differ.values())
    many = len(every) >= MANY
    chosen = [every if many else differ[kind] for kind in kinds]
    return [tuple(item for item in own.items() if item[0] in of) for own, of in zip(flat, chosen, strict=True)], many


ROUNDING_S = 2.0
"""Overlap in seconds that rounding of times can cause."""
SHARE = 0.1
"""Largest share of a run's time in which others may run."""


def ran_concurrently(records: Sequence[RunRecord], others: Sequence[RunRecord] = ()) -> list[bool]:
    """Return, per record, whether another run overlapped on the same kind of machine.

    >>> gpu, at = {"gpu": "H200"}, "2026-03-14T09:00:{}+00:00"
    >>> runs = [{"created": at.format(s), "hardware": gpu, "time": {"total_s": 20}} for s in ("00", "10", "30")]
    >>> ran_concurrently([RunRecord.model_validate(run) for run in runs])
    [True, True, False]
    """
    spans = [(record, span) for record in (*records, *others) if (span := _span(record))]

    def overlaps(record: RunRecord) -> bool:
        first, last = _span(record) or (0.0, 0.0)
        shared = sum(
            max(0.0, min(last, end) - max(first, start))
            for other, (start, end) in spans
            if other is not record and _machine(other) == _machine(record)
        )
        return shared > max(ROUNDING_S, SHARE * (last - first))

    return [overlaps(record) for record in records]


def _machine(record: RunRecord) -> tuple[object, ...]:
    """Return what identifies the kind of machine."""
    machine = record.hardware
    return machine.machine, machine.processor, machine.cores, machine.gpu


def _span(record: RunRecord) -> tuple[float, float] | None:
    """Return start and end in seconds; None if time or hardware is not recorded."""
    if not record.hardware.model_fields_set or "total_s" not in record.time:
        return None
    try:
        loaded = datetime.fromisoformat(record.created).timestamp()  # after the images were loaded
    except ValueError:
        return None
    start = loaded - record.time.get("loading_s", 0.0)
    return start, start + record.time["total_s"]
