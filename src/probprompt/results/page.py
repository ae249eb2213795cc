"""RESULTS.md, all of it made from the book: the paper's tables with ours beside them, its figures, every run."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from probprompt import checkpoints, presets
from probprompt.bench.page import PAPER, PAPER_METHODS
from probprompt.bench.record import read_record
from probprompt.data.published import published_lists
from probprompt.evaluation import metrics
from probprompt.report.comparison import NOTHING, Comparison, Place, pixels_hash, read_result
from probprompt.report.comparison import Row as MethodRow
from probprompt.report.page import number, write
from probprompt.report.tables import markdown
from probprompt.results import paper
from probprompt.results.book import Entry, read_entries
from probprompt.results.figures import Picture, pictures
from probprompt.runs.grid import describe
from probprompt.runs.naming import backbone_words, family
from probprompt.runs.record import machine_name

WEIGHTS, DATA, SETTINGS, MARKED = "†", "‡", "¶", "§"
MARKS = {
    WEIGHTS: "other weights than the paper's, so not the paper's experiment",
    DATA: "other images than the paper's, so not the paper's experiment",
    SETTINGS: "other settings than those behind the paper's number, so not the paper's experiment",
    MARKED: "not to be compared: published behaviour that is wrong was asked for, see the run",
}
COSTS = {"memory_mb": "Memory, MB", "epoch_min": "Epoch, min", "fps": "FPS"}
_IMAGES = {each.benchmark: (each.training, each.test) for each in PAPER}
_SIDE = 224  # of the paper's images
_PAPERS_NETWORK = "vit_base_patch16_224"
_ORDER = (*PAPER_METHODS, "linear-probe", "nearest-mean", "lda", "ranpac")

Cells = dict[str, list[Entry]]
"""Runs by the key of a column."""


# What stands beside what


@dataclass(frozen=True)
class Whose:
    """A row of ours beside one of the paper's: what was run, and how it differs from the paper's experiment."""

    benchmark: str
    """Where it is not the paper's."""
    backbone: str
    sha256: str
    preset: str
    marks: str

    @property
    def text(self) -> str:
        """In words."""
        named = ", ".join(filter(None, ("ours", self.benchmark, self.backbone, f"`{self.preset}`")))
        return f"{named} {self.marks}".strip()


def same_weights(entry: Entry, backbone: str) -> bool:
    """Whether a run used weights that the paper names, from where they are published.

    A file under such a name could be anything, so it does not count, but for weights that are published as a file only.
    """
    used, given = entry.content["backbone"], entry.config["backbone"].get("weights")
    source = _published().get(backbone, "")
    if entry.config["backbone"].get("image_size") not in (None, _SIDE):
        return False
    if given is not None:
        return bool(used["name"] == backbone) and given != checkpoints.RANDOM and not source.startswith("hub:")
    return bool(used["name"] == backbone or used["source"] == source)


@cache
def _published() -> dict[str, str]:
    """Where named weights come from."""
    return {known.name: known.source for known in checkpoints.known()}


def same_data(entry: Entry, column: paper.Column) -> bool:
    """Whether a run met the benchmark of a column, with all its images, as published.

    Of records that do not say how theirs differ, only those are believed whose benchmark is cut without any lists.
    """
    stream = entry.content["stream"]
    images = sum(stream["train_images"]), sum(stream["test_images"])
    whole = images == _IMAGES.get(column.benchmark) and not entry.content.get("skipped")
    differs = stream.get("differences", published_lists(column.benchmark))
    return entry.config["data"]["benchmark"] == column.benchmark and whole and not differs


def same_settings(entry: Entry, row: paper.Row) -> bool:
    """Whether a run has the settings behind the paper's number, its crops cut from images of the same size."""
    smaller = presets.are_smaller(entry.config["data"])
    return entry.preset == paper.PRESET and entry.varied == row.as_run and not smaller


def is_papers(entry: Entry, row: paper.Row, column: paper.Column) -> bool:
    """Whether a run is the paper's own experiment: its weights, its images, its settings."""
    return same_settings(entry, row) and same_data(entry, column) and same_weights(entry, column.backbone)


def belongs(table: paper.Table, row: paper.Row, column: paper.Column, entry: Entry) -> bool:
    """Whether a run stands beside a number of the paper, with marks where it is another experiment."""
    if entry.held_out or entry.method != row.method or entry.tasks != column.tasks:
        return False
    if entry.varied not in (row.settings, row.as_run):
        return False
    return table.study or (entry.benchmark == column.benchmark and _of_family(column, entry))


def _of_family(column: paper.Column, entry: Entry) -> bool:
    """Whether it is about this way of pretraining; one without columns of its own belongs to the supervised."""
    kind = family(entry.config["backbone"])
    if column.family:
        return kind == column.family
    own = (other for table in paper.tables() for other in table.columns if other.family == kind != "")
    return not any((other.benchmark, other.tasks) == (column.benchmark, column.tasks) for other in own)


def _whose(table: paper.Table, row: paper.Row, column: paper.Column, entry: Entry) -> Whose:
    marks = "" if same_weights(entry, column.backbone) else WEIGHTS
    marks += "" if same_data(entry, column) else DATA
    marks += "" if same_settings(entry, row) else SETTINGS
    marks += MARKED if entry.content.get("marks") else ""
    benchmark = entry.benchmark if table.study and entry.benchmark != column.benchmark else ""
    return Whose(benchmark, entry.backbone, str(entry.content["backbone"]["sha256"]), entry.preset, marks)


def beside(table: paper.Table, entries: Sequence[Entry]) -> dict[str, dict[Whose, Cells]]:
    """Our runs by the label of the paper's row, by what was run, by column.

    Of a study, runs that fill a single row say nothing and are left to other tables, unless they are the paper's own;
    and its rows are shown over the seeds that all of them have, for each seed has its own order of classes.
    """
    found: dict[str, dict[Whose, Cells]] = {row.label: {} for row in table.rows}
    for row in table.rows:
        for column in table.columns:
            for entry in entries:
                if belongs(table, row, column, entry):
                    cells = found[row.label].setdefault(_whose(table, row, column, entry), {})
                    cells.setdefault(column.key, []).append(entry)
    if table.study:
        filled = [whose for ours in found.values() for whose in ours]
        kept = {whose for whose in filled if filled.count(whose) > 1 or not whose.marks}
        found = {label: {who: ours[who] for who in ours if who in kept} for label, ours in found.items()}
        for whose in kept:
            _over_shared_seeds([ours[whose] for ours in found.values() if whose in ours])
    return found


def _over_shared_seeds(rows: Sequence[Cells]) -> None:
    """Leave out of each column what not all rows have; where they share no seed at all, leave it as it is."""
    for key in {key for row in rows for key in row}:
        filled = [row for row in rows if key in row]
        shared = set.intersection(*({entry.seed for entry in row[key]} for row in filled))
        for row in filled if shared else ():
            row[key] = [entry for entry in row[key] if entry.seed in shared]


def is_there(table: paper.Table, row: paper.Row, column: paper.Column, entry: Entry) -> bool:
    """Whether a run is one behind a number of the paper."""
    return belongs(table, row, column, entry) and is_papers(entry, row, column)


def missing(table: paper.Table, entries: Sequence[Entry]) -> list[tuple[paper.Row, paper.Column, int]]:
    """The paper's own runs that the book lacks, by seed."""
    wanted = [(row, column, seed) for row, column in table.cells() for seed in table.seeds(row, column)]
    return [
        (row, column, seed)
        for row, column, seed in wanted
        if not any(entry.seed == seed and is_there(table, row, column, entry) for entry in entries)
    ]


# The paper's tables


def paper_table(table: paper.Table, entries: Sequence[Entry], benches: Sequence[Mapping[str, Any]] = ()) -> str:
    """A table of the paper in Markdown, our rows under the paper's."""
    single = len(table.columns) == 1
    header = [table.first, "Whose"]
    header += [m if single else f"{c.heading}: {m}" for c in table.columns for m in table.measures]
    header += [COSTS[cost] for cost in table.costs]
    ours, lines = beside(table, entries), list[list[str]]()
    for row in table.rows:
        lines.append([row.label, f"paper, {_papers_weights(table)}", *_printed(table, row)])
        for whose, cells in ours[row.label].items():
            empty = [NOTHING] * len(table.costs)
            lines.append(["", whose.text, *_measured(table, cells), *empty])
        lines += [["", *line] for line in _benched(table, row, benches)]
    told = "".join(line[1] for line in lines)
    return "\n\n".join([markdown_table(header, lines), _bullets(_table_notes(table, entries, told))])


def _papers_weights(table: paper.Table) -> str:
    names = dict.fromkeys(column.backbone for column in table.columns)
    return f"ViT-B/16 ({', '.join(names)})"


def _printed(table: paper.Table, row: paper.Row) -> list[str]:
    shown = []
    for column in table.columns:
        found = row.printed.get(column.key, {})
        for place, measure in enumerate(table.measures):
            words = row.words if column.key in row.printed and not place else ""
            shown.append(_number(found[measure], table.runs) if measure in found else words or NOTHING)
    return shown + [number(row.costs[cost], 2) for cost in table.costs]


def _number(value: Sequence[float], runs: int) -> str:
    """Mean, deviation and number of seeds; the latter two where they are known."""
    mean, *spread = value
    told = f"{number(mean, 2)}{f' ± {number(spread[0], 2)}' if spread else ''}"
    return f"{told} ({runs})" if runs and spread else told


def _measured(table: paper.Table, cells: Cells) -> list[str]:
    return [_ours(cells.get(column.key, []), measure) for column in table.columns for measure in table.measures]


def _ours(entries: Sequence[Entry], measure: str) -> str:
    known = [entry for entry in entries if measure == "FAA" or len(entry.matrix) > 1]  # one step has no course
    if not known:
        return NOTHING
    mean, spread = metrics.mean_and_std([metrics.summarize(entry.matrix)[measure] for entry in known])
    return f"{_number((mean,) if len(known) == 1 else (mean, spread), 0)} ({len(known)})"


def _benched(table: paper.Table, row: paper.Row, benches: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """What a method costs on machines that were measured; accuracy plays no part there."""
    lines = []
    for words, entries in _costs(table, benches).items():
        for cost in (entry["cost"] for entry in entries if entry["method"] == row.method):
            epoch = f"{number(cost['epoch_s'] / 60, 2)} ({number(cost['epoch_s'], 1)} s)"
            lines.append([words, NOTHING, number(cost["with_backbone_mb"], 2), epoch, number(cost["fps"], 2)])
    return lines


def _costs(table: paper.Table, benches: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Measured costs by what was measured, each time from one record: that with most of the table's methods.

    Of several such records the youngest counts: speeds of different days and machines are not mixed. The paper's are of
    a GPU: what a processor takes is shown only where there is nothing else.
    """
    benches = [record for record in benches if record["hardware"].get("gpu")] or benches
    wanted = {row.method for row in table.rows}
    found: dict[str, tuple[tuple[int, str], list[Mapping[str, Any]]]] = {}
    for record in benches if table.costs else ():
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for entry in record["results"]:
            if entry["method"] in wanted and entry["cost"]["epoch_s"] is not None:
                groups.setdefault(_bench_words(table, record, entry), []).append(entry)
        for words, entries in groups.items():
            rank = len({entry["method"] for entry in entries}), str(record["created"])
            if words not in found or rank > found[words][0]:
                found[words] = rank, entries
    return {words: entries for words, (_, entries) in found.items()}


def _bench_words(table: paper.Table, record: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    config, column = entry["config"], table.columns[0]
    weights = config["backbone"]["weights"]
    given = {"name": entry["backbone"], "weights": weights}
    marks = WEIGHTS if weights or entry["backbone"] != column.backbone else ""
    marks += "" if config["data"]["benchmark"] == column.benchmark else DATA
    marks += "" if config.get("preset") == paper.PRESET else SETTINGS
    machine = machine_name(record["hardware"])
    told = f"ours, {machine}, {backbone_words(given)}, {entry['precision']}, batch {entry['batch']}"
    return f"{told} {marks}".strip()


def is_base(backbone: str) -> bool:
    """Whether a backbone is of the paper's architecture, with whatever weights."""
    return backbone_words({"name": backbone}).startswith(backbone_words({"name": _PAPERS_NETWORK}))


def _table_notes(table: paper.Table, entries: Sequence[Entry], told: str) -> list[str]:
    marks = [f"{sign} {words}." for sign, words in MARKS.items() if sign in told]
    counts = sum(len(table.seeds(row, column)) for row, column in table.cells())
    there = counts - len(missing(table, entries))
    shared = "In a study our rows are over the seeds that all of them have: each seed has its own order of classes."
    return [
        *marks,
        *([shared] if table.study and "ours" in told else []),
        *table.notes,
        f"The paper's numbers: `{table.label}` of its source, lines {table.rows[0].line} to {table.rows[-1].line}.",
        f"With the paper's weights, images and settings: {there} of {counts} runs are here; "
        f"`probprompt reproduce {table.name}` runs the others.",
    ]


def read_benches(book: Path) -> list[dict[str, Any]]:
    """Records of costs that lie in the book."""
    return [read_record(path) for path in sorted((book / "bench").glob("*.json"))]


# Every run


def _every_run(entries: Sequence[Entry]) -> list[str]:
    """Tables of all runs, by benchmark, number of tasks and backbone: what was compared on one footing."""
    groups: dict[tuple[str, int, str, str, bool], list[Entry]] = {}
    for entry in entries:
        weights = str(entry.content["backbone"]["sha256"])
        benchmark = str(entry.config["data"]["benchmark"])
        groups.setdefault((benchmark, entry.tasks, entry.backbone, weights, entry.held_out), []).append(entry)
    parts = []
    for (benchmark, tasks, backbone, weights, held_out), some in sorted(groups.items()):
        where = ", on held-out training images" if held_out else ""
        parts.append(f"### {benchmark}, {tasks} tasks, {backbone}{where}")
        parts.append(f"Weights: sha256 `{weights[:12]}`, {_plural(len(some), 'run')}.")
        for preset in sorted({entry.preset for entry in some}):
            here = [entry for entry in some if entry.preset == preset]
            tables = markdown(_comparison(here, [entry for entry in entries if entry not in here]))
            parts.append(re.sub(r"^## ", "#### ", tables.partition("\n")[2].strip(), flags=re.MULTILINE))
    return parts


def _comparison(entries: Sequence[Entry], others: Sequence[Entry]) -> Comparison:
    """Tables of these runs; others are those that may have run beside them."""
    results = []
    for entry in entries:
        varied = tuple(entry.departures.items())
        row = MethodRow(", ".join((entry.method, *describe(varied))), entry.method, entry.method, varied)
        place = Place(entry.benchmark, entry.preset)
        results.append(read_result(entry.recorded, row, place, entry.seed))
    rows = dict.fromkeys(result.row for result in results)
    places = list(dict.fromkeys(result.place for result in results))
    beside = [entry.content for entry in others]
    return Comparison(sorted(rows, key=lambda row: _rank(row.method)), places, results, others=beside)


def _rank(method: str) -> int:
    return _ORDER.index(method) if method in _ORDER else len(_ORDER)


def _sources(entries: Sequence[Entry]) -> list[str]:
    """Which weights, images and machines are behind the numbers."""

    def table(header: Sequence[str], line: Callable[[Entry], tuple[str, ...]]) -> str:
        found: dict[tuple[str, ...], int] = {}
        for entry in entries:
            found[line(entry)] = found.get(line(entry), 0) + 1
        return markdown_table([*header, "Runs"], [[*key, str(count)] for key, count in sorted(found.items())], -1)

    def weights(entry: Entry) -> tuple[str, ...]:
        used = entry.content["backbone"]
        return entry.backbone, f"`{used['name']}`", used["source"], f"`{used['sha256'][:12]}`"

    def images(entry: Entry) -> tuple[str, ...]:
        stream = entry.content["stream"]
        counts = (f"{sum(stream[name]):,}" for name in ("train_images", "test_images"))
        side = "held-out training images" if entry.held_out else "test"
        known = stream["split_hash"], pixels_hash(entry.content)
        hashes = (f"`{text[:12]}`" if text else NOTHING for text in known)
        return entry.benchmark, *counts, side, *hashes, "; ".join(stream.get("differences") or ()) or NOTHING

    def machine(entry: Entry) -> tuple[str, ...]:
        used, versions = entry.content["hardware"], entry.content["versions"]
        revision = f"`{versions['revision']}`" if versions.get("revision") else NOTHING
        return machine_name(used), versions["torch"], versions["timm"], revision

    return [
        "### Weights",
        table(("Backbone", "Name", "Source", "sha256"), weights),
        "### Images",
        "Split: hash of the names of all images with their classes and sides. Pixels: hash of those evaluated, or of "
        "all files of the folder. Older files say neither this nor, all of it, how images differ from the published.",
        table(("Benchmark", "Training", "Evaluated", "On", "Split", "Pixels", "Differs from the published"), images),
        "### Machines",
        "A revision that ends in `-dirty` is of a working tree with changes that were not committed: what they were is "
        "not known.",
        table(("Hardware", "torch", "timm", "Revision"), machine),
    ]


def _plural(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


# The page


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]], words: int = 2) -> str:
    """A table, its first columns words and the others numbers; a negative count leaves so many numbers at the end."""
    body = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    left = words if words >= 0 else len(header) + words
    widths = [max(3, *map(len, column)) for column in zip(header, *body, strict=True)]
    rule = ["-" * width if place < left else "-" * (width - 1) + ":" for place, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        sides = (
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(sides)} |"

    return "\n".join(map(line, (header, rule, *body)))


def _bullets(notes: Iterable[str]) -> str:
    return "\n".join(f"- {note}" for note in notes)


def build(book: Path, page: Path) -> tuple[str, list[Picture]]:
    """The text of the page, and the pictures that it shows."""
    entries, benches = read_entries(book), read_benches(book)
    drawn = pictures(entries)
    folder = os.path.relpath(book.absolute(), page.absolute().parent).replace(os.sep, "/")
    parts = [
        "# Results",
        f"<!-- made by `probprompt book` from the files in {folder}: change those, not this page -->",
        f"{_plural(len(entries), 'run')}, each a file in [{folder}]({folder}) that says its settings, weights, images, "
        "versions and hardware. First the tables of the paper with ours under each of its rows, then every run.",
        "## The paper's tables",
        "In %, mean ± standard deviation (population) over the seeds, whose number stands in parentheses where it is "
        "known. FAA: average accuracy over all tasks in the end; CAA: its mean over all steps. A row that carries "
        f"{WEIGHTS}, {DATA} or {SETTINGS} is another experiment than the paper's, with other weights, images or "
        "settings: it can be set against other such rows, not against the paper's.",
    ]
    for table in paper.tables():
        parts += [f"### {table.heading}", paper_table(table, entries, benches)]
    if drawn:
        parts.append("## The paper's figures, from our runs")
        for picture in drawn:
            parts += [f"### {picture.title}", f"![{picture.title}]({folder}/{picture.file})", picture.caption]
    if entries:
        parts += ["## Every run", *_every_run(entries), "## What is behind the numbers", *_sources(entries)]
    return "\n\n".join(parts) + "\n", drawn


def write_page(book: Path, page: Path) -> list[Path]:
    """Write the page and its pictures."""
    text, drawn = build(book, page)
    written = [write(book / picture.file, picture.draw()) for picture in drawn]
    return [write(page, text.encode()), *written]
