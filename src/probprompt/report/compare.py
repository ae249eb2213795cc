"""A comparison: finished runs gathered into rows and columns, and set as Markdown, LaTeX, CSV and HTML."""

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
from probprompt.runs.run import Recorded, Run, RunRecord, Value, read_book, without_paths
from probprompt.storage import natural_order

FILES = ("table.md", "table.tex", "table.csv", "comparison.html")
Cell = str | int | float | None
"""A value in a CSV file."""
Key = TypeVar("Key")
Item = TypeVar("Item")


# What is compared


@dataclass(frozen=True)
class Row:
    """A method, with what is varied of its settings."""

    label: str
    method: str
    name: str = ""
    """The method, as it is shown."""
    varied: Varied = field(default=(), compare=False)
    usual: Varied = field(default=(), compare=False)
    """Of what is varied, that which is as usual and the label leaves out."""

    @property
    def bound(self) -> bool:
        """Whether it learns all tasks at once: an upper bound, not a rival."""
        found = methods.registered().get(self.method)
        return bool(found and found.joint)


@dataclass(frozen=True)
class ColumnGroup:
    """A group of columns: a benchmark under a preset."""

    benchmark: str
    preset: str

    @property
    def label(self) -> str:
        """Both, as text."""
        return f"{self.benchmark}, {self.preset}" if self.preset else self.benchmark


@dataclass(frozen=True)
class Measure:
    """A number of a run: more is better (1), less is (-1), or neither (0)."""

    key: str
    name: str
    digits: int = 2
    better: int = 0
    start: str = ""
    """The key of the same number before training."""

    @property
    def heading(self) -> str:
        """Its name, with an arrow that says which way is better."""
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
    """One finished run, as the tables need it."""

    row: Row
    place: ColumnGroup
    seed: int
    run: Recorded
    values: Mapping[str, float]
    """Its numbers by the keys of the measures; what it does not have is absent."""

    @property
    def folder(self) -> str:
        """Where the run is."""
        return self.run.where

    @property
    def record(self) -> RunRecord:
        """What the run says about itself."""
        return self.run.record

    @property
    def matrix(self) -> NDArray[np.float64]:
        """Accuracy in % on task i (row) after step j (column)."""
        return self.run.matrix

    @property
    def averages(self) -> list[float]:
        """Average accuracy over the tasks seen, after each step."""
        return [float(self.matrix[: step + 1, step].mean()) for step in range(len(self.matrix))]

    def csv_line(self) -> dict[str, Cell]:
        """All numbers and settings, by column."""
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


def read_result(run: Recorded, row: Row, place: ColumnGroup, seed: int) -> Result:
    """What the tables need of a finished run."""
    record, matrix, similarity = run.record, run.matrix, run.similarity
    values = metrics.summarize(matrix)
    if len(matrix) == 1:  # one step has no course and nothing to forget
        values = {FAA.key: values[FAA.key]}
    names = {SIMILARITY.key: "mean", SIMILARITY.start: "initial_mean", RANK.key: RANK.key, RANK.start: RANK.start}
    found = {key: similarity.get(name) for key, name in names.items()} | {
        PARAMETERS.key: record.trainable_parameters,
        DISK.key: record.model_mb.get("learn"),
        TIME.key: record.time.get("total_s"),
    }
    values |= {key: float(value) for key, value in found.items() if value is not None}
    return Result(row, place, seed, run, values)


@dataclass(frozen=True, eq=False)
class Entry:
    """The runs of a row in a place, one per seed."""

    results: Sequence[Result]

    def value(self, measure: Measure) -> tuple[float, float] | None:
        """Mean and standard deviation over the seeds; None where no run has this number."""
        found = [result.values[measure.key] for result in self.results if measure.key in result.values]
        return metrics.mean_and_std(found) if found else None

    def start(self, measure: Measure) -> float | None:
        """The mean of the same number before training."""
        found = self.value(replace(measure, key=measure.start))
        return found[0] if found else None

    @property
    def marks(self) -> tuple[str, ...]:
        """Published behaviour that is wrong, was asked for, and must be said."""
        return tuple(dict.fromkeys(mark for result in self.results for mark in result.record.marks))

    def mixtures(self, named: str) -> list[str]:
        """Why the mean over these runs says nothing: they had different weights, or met different images."""
        hashes = {
            "weights": {result.record.backbone.sha256 for result in self.results},
            "images": {result.record.stream.split_hash for result in self.results},
        }
        return [
            f"{named}: its runs have different {what} ({', '.join(sorted(each[:12] for each in found))}), their mean "
            "says nothing."
            for what, found in hashes.items()
            if len(found) > 1
        ]

    @property
    def held_out(self) -> bool:
        """Whether these numbers are on held-out training images."""
        return any(result.record.evaluated_on != "test" for result in self.results)

    @property
    def protocol(self) -> tuple[object, ...]:
        """What must be the same for numbers to be ranked: tasks, and which images are on which side."""
        splits = sorted({result.record.stream.split_hash for result in self.results})
        return self.held_out, max(len(result.matrix) for result in self.results), *splits

    @property
    def seeds(self) -> tuple[int, ...]:
        """Those that there are runs of."""
        return tuple(result.seed for result in self.results)

    @property
    def pixels(self) -> list[str]:
        """Hashes of the pixels that were evaluated on: several where the same images were encoded in several ways."""
        return sorted({told for result in self.results if (told := pixels_hash(result.record))})

    @property
    def backbone(self) -> str:
        """The name of what learned."""
        return " and ".join(sorted({result.record.backbone.name for result in self.results}))

    @property
    def curve(self) -> list[float]:
        """Average accuracy after each step, in the mean over the seeds."""
        mean: list[float] = np.mean([result.averages for result in self._alike], axis=0).tolist()
        return mean

    @property
    def matrix(self) -> NDArray[np.float64]:
        """The accuracy matrix, in the mean over the seeds."""
        mean: NDArray[np.float64] = np.mean([result.matrix for result in self._alike], axis=0)
        return mean

    @property
    def _alike(self) -> list[Result]:
        """Those with as many tasks as the first: the others cannot be averaged with it."""
        return [result for result in self.results if len(result.matrix) == len(self.results[0].matrix)]


def ranks(values: Mapping[Row, float]) -> dict[Row, int]:
    """The rows that are best (1) and second (2); rows that are level share a rank, and none has one if all are.

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
    """A number as it is shown: mean, standard deviation over several seeds, value at the start, rank, a reference."""

    mean: str
    std: str = ""
    start: str = ""
    rank: int = 0
    sign: str = ""

    @property
    def text(self) -> str:
        """The number alone."""
        spread = f" ± {self.std}" if self.std else ""
        return f"{self.mean}{spread}{f' ({self.start})' if self.start else ''}"


@dataclass(frozen=True)
class Table:
    """A table before it is set in any language."""

    caption: str
    columns: Sequence[tuple[ColumnGroup, Measure]]
    rows: Sequence[tuple[Row, Sequence[FormattedCell]]]
    notes: Sequence[str] = ()
    """What its reader must know."""

    @property
    def places(self) -> list[tuple[ColumnGroup, int]]:
        """Groups of columns, with their widths."""
        return list(Counter(place for place, _ in self.columns).items())


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs in rows (methods) and groups of columns (benchmarks under presets)."""

    rows: Sequence[Row]
    places: Sequence[ColumnGroup]
    results: Sequence[Result]
    failed: Sequence[str] = ()
    missing: Sequence[str] = ()
    others: Sequence[RunRecord] = ()
    """Records of further runs, which may have run beside these."""

    @property
    def recorded(self) -> list[Recorded]:
        """All runs, as a book takes them."""
        return [result.run for result in self.results]

    @cached_property
    def entries(self) -> dict[tuple[Row, ColumnGroup], Entry]:
        """What there is of each row in each place."""
        found = grouped(((result.row, result.place), result) for result in self.results)
        return {key: Entry(sorted(runs, key=lambda result: result.seed)) for key, runs in found.items()}

    def rivals(self, place: ColumnGroup) -> dict[Row, Entry]:
        """Rows that are ranked: no upper bounds, nothing that carries a mark."""
        here = {row: self.entries[row, place] for row in self.rows if (row, place) in self.entries}
        return {row: entry for row, entry in here.items() if not row.bound and not entry.marks}

    def comparable(self, place: ColumnGroup) -> bool:
        """Whether all rivals met the same tasks and images, pixel for pixel as far as their records say."""
        rivals = self.rivals(place).values()
        pixels = {each for entry in rivals for each in entry.pixels}
        return len(pixels) <= 1 and len({entry.protocol for entry in rivals}) <= 1

    def level(self, place: ColumnGroup) -> dict[Row, Entry]:
        """Rivals with the most seeds, the same ones: every seed has its own order of classes, easier or harder."""
        rivals = self.rivals(place)
        rows = Counter(entry.seeds for entry in rivals.values())
        most = max(rows, key=lambda seeds: (len(seeds), rows[seeds]), default=())
        return {row: entry for row, entry in rivals.items() if entry.seeds == most}

    def ranks(self, place: ColumnGroup, measure: Measure) -> dict[Row, int]:
        """Best and second of a column, by the digits that are shown."""
        if not measure.better or not self.comparable(place):
            return {}
        found = {row: entry.value(measure) for row, entry in self.level(place).items()}
        return ranks({row: measure.better * round(v[0], measure.digits) for row, v in found.items() if v})

    @property
    def seeds(self) -> list[int]:
        """All seeds that any row has."""
        return sorted({result.seed for result in self.results})

    @property
    def uneven(self) -> bool:
        """Whether rows differ in the number of their runs."""
        return len({len(entry.results) for entry in self.entries.values()}) > 1

    def tables(self) -> list[Table]:
        """Accuracy; prompts and cost."""
        accuracy = (*ACCURACY, SEEDS) if self.uneven else ACCURACY
        return [
            self._table("Accuracy in %", accuracy, self._accuracy_notes()),
            self._table("Prompts and cost", INSIDE, self._inside_notes()),
        ]

    def _table(self, caption: str, measures: Sequence[Measure], notes: Sequence[str]) -> Table:
        columns = [(place, measure) for place in self.places for measure in measures if self._filled(place, measure)]
        ranked = [(place, measure, self.ranks(place, measure)) for place, measure in columns]
        rows = [
            (row, [self._shown(self.entries.get((row, place)), m, rank.get(row, 0)) for place, m, rank in ranked])
            for row in self.rows
        ]
        return Table(f"{caption}: {self.places[0].label}" if len(self.places) == 1 else caption, columns, rows, notes)

    def _filled(self, place: ColumnGroup, measure: Measure) -> bool:
        here = (entry for (_, where), entry in self.entries.items() if where == place)
        return measure in (FAA, SEEDS) or any(entry.value(measure) for entry in here)

    def _shown(self, entry: Entry | None, measure: Measure, rank: int) -> FormattedCell:
        if measure is SEEDS:
            return FormattedCell(str(len(entry.results)) if entry else "0")
        found = entry.value(measure) if entry else None
        if not entry or not found:
            return FormattedCell(NOTHING)
        if measure is TIME:
            return FormattedCell(duration(found[0]))
        mean, std = (number(value, measure.digits) for value in found)
        begun, mixed = entry.start(measure), len({other.held_out for other in self.entries.values()}) > 1
        signs = (MARKED if entry.marks else "") + (HELD_OUT if mixed and entry.held_out else "")
        return FormattedCell(
            mean,
            "" if measure in (PARAMETERS, DISK) or len(entry.results) == 1 else std,
            "" if begun is None else number(begun, measure.digits),
            rank,
            signs if measure is FAA else "",
        )

    # What must be said

    def _inside_notes(self) -> list[str]:
        told = {SIMILARITY: _SIMILARITY, DISK: _DISK}
        there = [measure for measure in told if any(entry.value(measure) for entry in self.entries.values())]
        return [self._seeds_note(), *(told[measure] for measure in there), *self._time_note()]

    def _time_note(self) -> list[str]:
        """Whose runs were not alone on their machine."""
        company = had_company([result.record for result in self.results], self.others)
        rows = dict.fromkeys(
            f'"{result.row.label}"' + (f" ({result.place.label})" if len(self.places) > 1 else "")
            for result, yes in zip(self.results, company, strict=True)
            if yes
        )
        if not rows:
            return []
        whose = "all rows" if len(rows) == len(self.entries) else shorten(rows)
        return [
            f"Time: other runs ran at the same time on such a machine, so that it says little about speed: {whose}."
        ]

    def _departures(self) -> list[str]:
        """What was set otherwise than the preset that a group of columns is named after."""
        notes, labels = [], ((result, f"{result.row.label} ({result.place.label})") for result in self.results)
        changes = grouped((change, label) for result, label in labels for change in _departures(result))
        for change, where in changes.items():
            rows = dict.fromkeys(where)
            told = "in all rows" if len(rows) == len(self.entries) else ", ".join(rows)
            notes.append(f"Differs from the preset: {change}, {told}.")
        return notes

    def _accuracy_notes(self) -> list[str]:
        backbones = dict.fromkeys(result.record.backbone.name for result in self.results)
        found = [self._seeds_note(), _MEANING, f"Backbone: {', '.join(backbones)}."]
        found += self._usual_note()
        ranked = [place for place in self.places if any(self.ranks(place, measure) for measure in ACCURACY)]
        if ranked:
            some = any(len(self.level(place)) < len(self.rivals(place)) for place in ranked)
            among = " among the rows with the most seeds" if some else ""
            found.append(f"Bold: the best of a column{among}; underlined: the second.")
        bounds = [row.label for row in self.rows if row.bound]
        if bounds:
            found.append(f"Upper bound, learned all at once, not ranked: {', '.join(bounds)}.")
        return found + self._caveats()

    def _usual_note(self) -> list[str]:
        """What labels leave out; where that is not the same for all, whose it is."""
        usual = grouped((name, (brief(value), result)) for result in self.results for name, value in result.row.usual)
        if not usual:
            return []
        most = {name: Counter(value for value, _ in found).most_common(1)[0][0] for name, found in usual.items()}
        names = describe(tuple(most.items()))
        told = [shown + _others(usual[name], most[name]) for shown, name in zip(names, most, strict=True)]
        own = any(value is None for result in self.results for _, value in result.row.usual)
        return [f"Where a row says nothing else: {', '.join(told)}{'; none: as the method has it' if own else ''}."]

    def _seeds_note(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        if all(len(entry.results) == 1 for entry in self.entries.values()):
            return f"One run each (seed {seeds}): a difference of a few points may be chance."
        less = "; where runs are missing, the column Seeds says how many there are" if self.uneven else ""
        return f"Mean ± standard deviation (population) over the seeds {seeds}{less}."

    @property
    def own_notes(self) -> list[str]:
        """Return the notes that are about these runs only, without those that hold for all tables."""
        return [*self._usual_note(), *self._caveats(), *self._time_note()]

    def _caveats(self) -> list[str]:
        """Why some numbers must not be set against others."""
        entries = [(f"{row.label} ({place.label})", entry) for (row, place), entry in self.entries.items()]
        found = [text for label, entry in entries for text in entry.mixtures(label)]
        marks = grouped((mark, label) for label, entry in entries for mark in entry.marks)
        found += [f"{MARKED} {mark}; not ranked: {', '.join(where)}." for mark, where in marks.items()]
        found += self._departures()
        held = [entry.held_out for entry in self.entries.values()]
        if any(held):
            sign = "" if all(held) else f"{HELD_OUT} "
            found.append(f"{sign}Evaluated on held-out training images (validation), not on the test set.")
        for place in self.places:
            found += self.caveats(place)
        if self.failed:
            found.append(f"Failed and not in the table: {', '.join(self.failed)}; failed.json there says why.")
        if self.missing:
            found.append(f"Not run yet: {shorten(self.missing)}.")
        return found

    def caveats(self, place: ColumnGroup) -> list[str]:
        """State why rows of a group of columns are not ranked, or what else differs between them."""
        rivals = self.rivals(place).items()
        found = []
        if len({entry.protocol for _, entry in rivals}) > 1:
            found.append(
                f"{place.label}: not ranked, for the rows did not meet the same tasks and images, by number and name."
            )
        pixels = grouped((each[:12], row.label) for row, entry in rivals for each in entry.pixels)
        if len(pixels) > 1 and not found:
            found.append(f"{place.label}: not ranked, for pixels differ in images of the same names: {_rows(pixels)}.")
        seeds = grouped((_seeds(entry.seeds), row.label) for row, entry in rivals)
        if len(seeds) > 1:
            found.append(f"{place.label}: not all rows have the same seeds and orders of classes: {_rows(seeds)}.")
        backbones = grouped((entry.backbone, row.label) for row, entry in rivals)
        if len(backbones) > 1:
            found.append(f"{place.label}: the backbones differ, a cause of differences too: {_rows(backbones)}.")
        return found


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Collect the items of each key, keys in their first order.

    >>> grouped([("b", 1), ("a", 2), ("b", 3)])
    {'b': [1, 3], 'a': [2]}
    """
    found: dict[Key, list[Item]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found


def _rows(groups: Mapping[str, Sequence[str]]) -> str:
    """Which rows there are of each; their labels hold commas.

    >>> _rows({"seed 0": ["apt", "ft, epochs=2"]})
    'seed 0: "apt", "ft, epochs=2"'
    """
    quoted = {name: [f'"{label}"' for label in rows] for name, rows in groups.items()}
    return "; ".join(f"{name}: {shorten(rows)}" for name, rows in quoted.items())


def _seeds(numbers: Sequence[int]) -> str:
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


_MEANING = (
    "FAA: average accuracy over all tasks in the end. CAA: its mean over all steps. "
    "Forgetting: how far earlier tasks ended below their best."
)
_DISK = "On disk: prompts and head, with all that learning further classes needs; the backbone only where it learns."
_SIMILARITY = (
    "Similarity: mean pairwise cosine of the prompts that different classes receive; eff. rank: how many directions "
    "these span. In parentheses the mean before training: a low similarity says something only beside it."
)

SHARED_NOTES = (_MEANING, _SIMILARITY, _DISK)


# Gathering

MANY = 3
"""From so many settings on that differ between rows, rows name only those that are not as usual."""


def _departures(result: Result) -> list[str]:
    """Settings of a run that are neither its preset's, nor varied, nor its seed or task; as ``key=value``."""
    record = result.record
    if record.preset not in presets.NAMES:
        return []
    expected = {key for key, _ in result.row.varied} | {"data.tasks", "data.validation", "data.benchmark"}
    expected |= {"evaluation_batch_size"}  # changes only rounding
    named = record.preset_overrides.items()
    return [f"{k}={brief(v)}" for k, v in named if k in (record.preset_settings or ()) and k not in expected]


def gather(grid: Grid, outcomes: Sequence[Outcome]) -> Comparison:
    """The finished cells of a grid; rows in the order of its methods."""
    labels, cells = grid.spec.labels, [outcome.cell for outcome in outcomes]
    rows = [_row(cell.method, cell.varied, labels) for cell in cells]
    places = [ColumnGroup(labels.get(cell.benchmark, cell.benchmark), cell.preset) for cell in cells]
    return Comparison(
        sorted(dict.fromkeys(rows), key=lambda row: grid.spec.methods.index(row.method)),
        list(dict.fromkeys(places)),
        [
            read_result(Recorded.of(outcome.run, outcome.cell.name), row, place, outcome.cell.seed)
            for outcome, row, place in zip(outcomes, rows, places, strict=True)
            if outcome.run
        ],
        [outcome.cell.name for outcome in outcomes if outcome.problem],
        [outcome.cell.name for outcome in outcomes if not outcome.run and not outcome.problem],
    )


def _others(found: Sequence[tuple[str, Result]], most: str) -> str:
    """What a setting is for other results than most, and for which: by their place, or their method in it."""
    there = grouped((result.place, value) for value, result in found)

    def whose(result: Result) -> str:
        place = result.place
        return place.label if len(set(there[place])) == 1 else f"{result.row.name} in {place.label}"

    others = grouped((value, whose(result)) for value, result in found if value != most)
    return "".join(f" ({value} for {'; '.join(dict.fromkeys(names))})" for value, names in others.items())


_BACKBONE = ("backbone.name", "backbone.weights", "backbone.image_size")
"""What a backbone is called by."""


def _row(method: str, varied: Varied, labels: Mapping[str, str], usual: Varied = (), backbone: str = "") -> Row:
    """A row by what is varied of it; where that is the backbone, by its name in words, if it has one."""
    name = labels.get(method, method)
    told = tuple(change for change in varied if change not in usual)
    parts = [name]
    if backbone and any(key in _BACKBONE for key, _ in varied):
        told, usual = (tuple(change for change in part if change[0] not in _BACKBONE) for part in (told, usual))
        parts.append(backbone)
    return Row(", ".join((*parts, *describe(told))), method, name, varied, usual)


def _backbones(flat: Sequence[dict[str, Value]]) -> list[str]:
    """The backbone of each in words; nothing where another that differs has the same ones, or there is none."""
    own = [tuple(settings.get(key) for key in _BACKBONE) for settings in flat]
    words = [
        backbone_words(dict(zip(("name", "weights", "image_size"), one, strict=True))) if one[0] else "" for one in own
    ]
    of = grouped(zip(words, own, strict=True))
    return [word if len(set(of[word])) == 1 else "" for word in words]


def _usual(varied: Varied, record: RunRecord, flat: Sequence[dict[str, Value]]) -> Varied:
    """Of what is varied, that which is as the preset of a run has it; without one, as most runs do.

    Never the tasks: a preset has those that it is asked for.
    """
    varied = tuple((name, value) for name, value in varied if name != "data.tasks")
    if record.preset in presets.NAMES and (preset := record.preset_settings):
        return tuple((name, value) for name, value in varied if name in preset and preset[name] == value)
    return tuple((name, value) for name, value in varied if 2 * sum(own.get(name) == value for own in flat) > len(flat))


def gather_runs(paths: Sequence[str | Path], preset_columns: bool = True) -> Comparison:
    """Read finished runs in folders or books; rows of a method are distinguished by the settings in which they differ.

    Presets are groups of columns, or otherwise part of the rows' labels.
    """
    runs = [run for path in paths for run in _read(Path(path))]
    if not runs:
        raise UserError("there is no run to compare")
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
                raise UserError(f"{other.folder} and {run.where} are one and the same run, settings and seed: name one")
        results.append(result)
    listed = {name: number for number, name in enumerate(presets.NAMES)}  # other presets come after them
    return Comparison(
        list(dict.fromkeys(result.row for result in results)),
        sorted({r.place for r in results}, key=lambda p: (p.benchmark, listed.get(p.preset, len(listed)), p.preset)),
        results,
    )


def _settings(runs: Sequence[Recorded]) -> list[dict[str, Value]]:
    """All settings of each: those that are younger than its record as they are by default, weights by name and content.

    Files of the same name are the same weights where their content is, wherever they lie.
    """
    records = [run.record for run in runs]
    names = [without_paths(record.flat_settings.get("backbone.weights")) for record in records]
    contents = grouped((str(name), record.backbone.sha256) for name, record in zip(names, records, strict=True))
    return [
        record.flat_settings
        | {"backbone.weights": f"{name} ({record.backbone.sha256[:8]})" if len(set(contents[str(name)])) > 1 else name}
        for name, record in zip(names, records, strict=True)
    ]


def pixels_hash(record: RunRecord) -> str | None:
    """Hash of the images that a run was evaluated on, or of all files of their folder; older records have none."""
    return record.data["test"].pixels_sha256 if "test" in record.data else None


def _read(path: Path) -> list[Recorded]:
    """A run's folder, a folder of them at any depth (a grid's), or a book."""
    if path.is_file():
        return read_book(path)
    inside = [] if (path / "run.json").exists() else sorted(path.rglob("run.json"), key=natural_order)
    if inside:
        return [run for found in inside for run in _read(found.parent)]
    run = Run.open(path)
    if not run.finished:
        raise UserError(f"only finished runs can be compared, not {path}")
    return [Recorded.of(run, str(path))]


def _apart(flat: Sequence[dict[str, Value]]) -> tuple[list[Varied], bool]:
    """For each run, the settings in which runs of its method and preset differ on some benchmark, other than by seed.

    What a preset has otherwise from benchmark to benchmark is not among them. Where they are many, which is told as
    well, they are for each run those in which any differ: what a row leaves out then is as usual in all of them.
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
"""Seconds by which one run may seem to begin before another has ended, though it does not."""
SHARE = 0.1
"""Of a run's time, what others may take part in."""


def had_company(records: Sequence[RunRecord], others: Sequence[RunRecord] = ()) -> list[bool]:
    """For each record whether other runs, of these or others, ran at the same time on a machine just like its own.

    >>> gpu, at = {"gpu": "H200"}, "2026-03-14T09:00:{}+00:00"
    >>> made = [{"created": at.format(s), "hardware": gpu, "time": {"total_s": 20}} for s in ("00", "10", "30")]
    >>> had_company([RunRecord.model_validate(record) for record in made])
    [True, True, False]
    """
    spans = [(record, span) for record in (*records, *others) if (span := _span(record))]

    def met(record: RunRecord) -> bool:
        begun, ended = _span(record) or (0.0, 0.0)
        shared = sum(
            max(0.0, min(ended, end) - max(begun, start))
            for other, (start, end) in spans
            if other is not record and _chips(other) == _chips(record)
        )
        return shared > max(ROUNDING_S, SHARE * (ended - begun))

    return [met(record) for record in records]


def _chips(record: RunRecord) -> tuple[object, ...]:
    """What machines are distinguished by, whatever a run does with its own."""
    machine = record.hardware
    return machine.machine, machine.processor, machine.cores, machine.gpu


def _span(record: RunRecord) -> tuple[float, float] | None:
    """From when until when it ran, in seconds; None where it does not say when, how long or on what."""
    if not record.hardware.model_fields_set or "total_s" not in record.time:
        return None
    try:
        loaded = datetime.fromisoformat(record.created).timestamp()  # a record is begun once images are there
    except ValueError:
        return None
    start = loaded - record.time.get("loading_s", 0.0)
    return start, start + record.time["total_s"]
