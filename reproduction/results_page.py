"""RESULTS.md from recorded runs: the paper's tables and figures with ours, and every run."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from probprompt.backbones import pretrained
from probprompt.backbones.pretrained import backbone_slug, backbone_words
from probprompt.bench.results import BenchRecord, read_record
from probprompt.bench.results import Entry as Measured
from probprompt.data.datasets import registered
from probprompt.data.published import Dataset
from probprompt.engine.hardware import machine_name
from probprompt.evaluation import metrics
from probprompt.presets import PHOTOS
from probprompt.report.compare import SHARED_NOTES, ColumnGroup, Comparison, grouped, pixels_hash, read_result
from probprompt.report.compare import Row as MethodRow
from probprompt.report.pages import write
from probprompt.report.tables import NOTHING, count, markdown_table, markdown_text, number, table_body
from probprompt.runs.grid import describe
from reproduction import paper
from reproduction.paper_figures import PaperFigure, paper_figures
from reproduction.results import Entry, read_entries

WEIGHTS, DATA, SETTINGS, WRONG = "†", "‡", "¶", "§"
FLAGS = {
    WEIGHTS: "other weights than the paper's",
    DATA: "other images than the paper's",
    SETTINGS: "other settings than those behind the paper's number",
    WRONG: "not comparable, because the run repeats incorrect published behavior",
}
_NOTES = (
    "Accuracy in %: mean ± standard deviation (population) over seeds, with the number of seeds in parentheses or in a "
    "column; without ±, one run. In parentheses after similarity and rank: the mean before training.",
    *SHARED_NOTES,
    "Bold: best of a column among the rows with the most seeds. Underlined: second. Upper bounds are not ranked.",
    "In a study of settings our rows are over the seeds that all of them share.",
    "L2P++ is the L2P of the paper's Table 1, also in the figures.",
    "A row with a flag is another experiment than the paper's. Compare it with other rows of the same flags only.",
)
COSTS = {"memory_mb": "Memory, MB", "epoch_min": "Epoch, min", "fps": "FPS"}
PAPER_NETWORK = "vit_base_patch16_224"
_IMAGE_COUNTS = {each.benchmark: (each.training, each.test) for each in paper.EXPERIMENTS}
_IMAGE_SIZE = 224
_ORDER = (*paper.METHODS, "linear-probe", "nearest-mean", "lda", "ranpac")

Cells = dict[str, list[Entry]]  # runs by the key of a column


class RowLabel(NamedTuple):
    """Label of a row of ours, with flags for how it differs from the paper's experiment."""

    text: str
    flags: str
    sha256: str  # of the weights: rows may have the same text


def has_paper_weights(entry: Entry, backbone: str) -> bool:
    """Return True if a run used the weights that the paper names, from their source.

    A file of that name could contain anything, so it counts only for weights that are published as a file.
    """
    used, given = entry.record.backbone, entry.config["backbone"].get("weights")
    source = _published_sources().get(backbone, "")
    if entry.config["backbone"].get("image_size") not in (None, _IMAGE_SIZE):
        return False
    if given is not None:
        return bool(used.name == backbone) and given != pretrained.RANDOM and not source.startswith("hub:")
    return bool(used.name == backbone or used.source == source)


@cache
def _published_sources() -> dict[str, str]:
    return {known.name: known.source for known in pretrained.known()}


def has_paper_data(entry: Entry, column: paper.Column) -> bool:
    """Return True if a run used all images of a column's benchmark, as published.

    A record without a list of differences counts only if the benchmark needs no split lists.
    """
    stream = entry.record.stream
    images = sum(stream.train_images), sum(stream.test_images)
    whole = images == _IMAGE_COUNTS.get(column.benchmark) and not entry.record.skipped
    source, differs = registered().get(column.benchmark), bool(stream.differences)
    if stream.differences is None and source and issubclass(source, Dataset):
        differs = bool(source.lists())
    return entry.config["data"]["benchmark"] == column.benchmark and whole and not differs


def has_paper_settings(entry: Entry, row: paper.Row) -> bool:
    """Return True if a run has the settings behind the paper's number, including crops."""
    smaller = has_smaller_images(entry.config["data"])
    return entry.preset == paper.PRESET and entry.varied == row.all_settings and not smaller


def has_smaller_images(data: Mapping[str, Any]) -> bool:
    """Return True if the data settings crop photos from smaller copies."""
    return data["benchmark"] in PHOTOS and data.get("stored_side") != "full"


def belongs(table: paper.Table, row: paper.Row, column: paper.Column, entry: Entry) -> bool:
    """Return True if a run is shown with a number of the paper, with or without flags."""
    if entry.held_out or entry.method != row.method or entry.tasks != column.tasks:
        return False
    if entry.varied not in (row.settings, row.all_settings):
        return False
    return table.study or (entry.benchmark == column.benchmark and _is_of_family(column, entry))


def pretraining_family(backbone: Mapping[str, Any]) -> str:
    """Return the kind of pretraining if it has separate columns in the paper.

    >>> pretraining_family({"name": "vit_small_patch14_dinov2"}), pretraining_family({"name": "sup1k"})
    ('dino', '')
    """
    name = backbone_slug(backbone)
    return next((kind for kind in ("dino", "ibot") if kind in name), "")


def _is_of_family(column: paper.Column, entry: Entry) -> bool:
    """Return True if a run has the column's kind of pretraining, by default supervised."""
    family = pretraining_family(entry.config["backbone"])
    if column.family:
        return family == column.family
    own = (other for table in paper.tables() for other in table.columns if other.family == family != "")
    return not any((other.benchmark, other.tasks) == (column.benchmark, column.tasks) for other in own)


def is_paper_run(table: paper.Table, row: paper.Row, column: paper.Column, entry: Entry) -> bool:
    """Return True if a run has the weights, images and settings behind a number of the paper."""
    return belongs(table, row, column, entry) and not _flags(row, column, entry)


def _flags(row: paper.Row, column: paper.Column, entry: Entry) -> str:
    """Return the flags of how a run differs from the paper's."""
    same = {
        WEIGHTS: has_paper_weights(entry, column.backbone),
        DATA: has_paper_data(entry, column),
        SETTINGS: has_paper_settings(entry, row),
    }
    return "".join(flag for flag, is_same in same.items() if not is_same)


def _label(table: paper.Table, row: paper.Row, column: paper.Column, entry: Entry) -> RowLabel:
    flags = _flags(row, column, entry) + (WRONG if entry.record.marks else "")
    benchmark = entry.benchmark if table.study and entry.benchmark != column.benchmark else ""
    parts = ", ".join(filter(None, ("ours", benchmark, entry.backbone, f"`{entry.preset}`")))
    return RowLabel(f"{parts} {flags}".strip(), flags, entry.record.backbone.sha256)


def our_rows(table: paper.Table, entries: Sequence[Entry]) -> dict[str, dict[RowLabel, Cells]]:
    """Group our runs by the paper's row, by label and by column.

    A study shows only runs that fill several of its rows or are the paper's own, over seeds that all rows share: each
    seed has another order of classes.
    """
    rows: dict[str, dict[RowLabel, Cells]] = {row.label: {} for row in table.rows}
    for row, column, entry in product(table.rows, table.columns, entries):
        if belongs(table, row, column, entry):
            cells = rows[row.label].setdefault(_label(table, row, column, entry), {})
            cells.setdefault(column.key, []).append(entry)
    if table.study:
        filled = Counter(label for ours in rows.values() for label in ours)
        kept = {label for label in filled if filled[label] > 1 or not label.flags}
        rows = {name: {label: ours[label] for label in ours if label in kept} for name, ours in rows.items()}
        for label in kept:
            _keep_shared_seeds([ours[label] for ours in rows.values() if label in ours])
    return rows


def _keep_shared_seeds(rows: Sequence[Cells]) -> None:
    """Remove from each column the seeds that some row lacks, if the rows share any."""
    for key in {key for row in rows for key in row}:
        filled = [row for row in rows if key in row]
        shared = set.intersection(*({entry.seed for entry in row[key]} for row in filled))
        for row in filled if shared else ():
            row[key] = [entry for entry in row[key] if entry.seed in shared]


def missing(table: paper.Table, entries: Sequence[Entry]) -> list[tuple[paper.Row, paper.Column, int]]:
    """List the paper's runs that are not recorded, by seed."""
    return [
        (row, column, seed)
        for row, column in table.cells()
        for seed in table.seeds(row, column)
        if not any(entry.seed == seed and is_paper_run(table, row, column, entry) for entry in entries)
    ]


def paper_table(table: paper.Table, entries: Sequence[Entry], benches: Sequence[BenchRecord] = ()) -> str:
    """Set a table of the paper in Markdown, our rows under the paper's."""
    single = len(table.columns) == 1
    header = [table.first, "Source"]
    header += [m if single else f"{c.heading}: {m}" for c in table.columns for m in table.measures]
    header += [COSTS[cost] for cost in table.costs]
    ours, lines = our_rows(table, entries), list[list[str]]()
    for row in table.rows:
        lines.append([row.label, f"paper, ViT-B/16 ({', '.join(table.backbones)})", *_printed(table, row)])
        for label, cells in ours[row.label].items():
            numbers = (_mean(cells.get(c.key, []), m) for c in table.columns for m in table.measures)
            lines.append(["", label.text, *numbers, *([NOTHING] * len(table.costs))])
        lines += [["", *line] for line in _measured_costs(table, row, benches)]
    source = f"The paper's numbers: `{table.label}` of its source, lines {table.rows[0].line} to {table.rows[-1].line}."
    runs, without = sum(len(table.seeds(row, column)) for row, column in table.cells()), len(missing(table, entries))
    recorded = f"{runs - without} of {runs} runs with the paper's weights, images and settings are recorded."
    more = f" Run the others: `python -m reproduction run {table.name}`." if without else ""
    return f"{_escaped_table(header, lines, 2)}\n\n{bullets([*table.notes, source, recorded + more])}"


def _printed(table: paper.Table, row: paper.Row) -> list[str]:
    cells = []
    for column in table.columns:
        printed = row.printed.get(column.key, {})
        for place, measure in enumerate(table.measures):
            words = row.words if column.key in row.printed and not place else ""
            cells.append(_number(printed[measure], table.runs) if measure in printed else words or NOTHING)
    return cells + [number(row.costs[cost], 2) for cost in table.costs]


def _number(value: Sequence[float], runs: int) -> str:
    """Return mean, standard deviation and number of seeds as text."""
    mean, *std = value
    text = f"{number(mean, 2)}{f' ± {number(std[0], 2)}' if std else ''}"
    return f"{text} ({runs})" if runs and std else text


def _mean(entries: Sequence[Entry], measure: str) -> str:
    known = [entry for entry in entries if measure == "FAA" or len(entry.matrix) > 1]  # CAA needs several steps
    if not known:
        return NOTHING
    mean, std = metrics.mean_and_std([metrics.summarize(entry.matrix)[measure] for entry in known])
    return f"{_number((mean,) if len(known) == 1 else (mean, std), 0)} ({len(known)})"


def _measured_costs(table: paper.Table, row: paper.Row, benches: Sequence[BenchRecord]) -> list[list[str]]:
    """Return rows with the measured costs of a method."""
    lines = []
    for label, entries in _costs(table, benches).items():
        for cost in (entry["cost"] for entry in entries if entry["method"] == row.method):
            seconds = cost["epoch_s"] or 0.0
            epoch = f"{number(seconds / 60, 2)} ({number(seconds, 1)} s)"
            lines.append([label, NOTHING, number(cost["with_backbone_mb"], 2), epoch, number(cost["fps"], 2)])
    return lines


def _costs(table: paper.Table, benches: Sequence[BenchRecord]) -> dict[str, list[Measured]]:
    """Return measured costs by label, from the latest record with most of the methods.

    Speeds of different days and machines are not mixed. Costs on a CPU are shown only if there are none on a GPU.
    """
    benches = [record for record in benches if record["hardware"].get("gpu")] or benches
    methods = {row.method for row in table.rows}
    best: dict[str, tuple[tuple[int, str], list[Measured]]] = {}
    for record in benches if table.costs else ():
        known = [e for e in record["results"] if e["method"] in methods and e["cost"]["epoch_s"] is not None]
        for label, entries in grouped((_cost_label(table, record, entry), entry) for entry in known).items():
            rank = len({entry["method"] for entry in entries}), str(record["created"])
            if label not in best or rank > best[label][0]:
                best[label] = rank, entries
    return {label: entries for label, (_, entries) in best.items()}


def _cost_label(table: paper.Table, record: BenchRecord, entry: Measured) -> str:
    config, column = entry["config"], table.columns[0]
    weights = config["backbone"]["weights"]
    flags = WEIGHTS if weights or entry["backbone"] != column.backbone else ""
    flags += "" if config["data"]["benchmark"] == column.benchmark else DATA
    flags += "" if config.get("preset") == paper.PRESET else SETTINGS
    backbone = backbone_words({"name": entry["backbone"], "weights": weights})
    machine = machine_name(record["hardware"])
    return f"ours, {machine}, {backbone}, {entry['precision']}, batch {entry['batch']} {flags}".strip()


def is_paper_network(backbone: str) -> bool:
    """Return True if a backbone has the paper's architecture, with any weights."""
    return backbone_words({"name": backbone}).startswith(backbone_words({"name": PAPER_NETWORK}))


def read_benches(folder: Path) -> list[BenchRecord]:
    """Read the records of costs in a folder of results."""
    return [read_record(path) for path in sorted((folder / "bench").glob("*.json"))]


def _every_run(entries: Sequence[Entry]) -> list[str]:
    """Return tables of all runs, by benchmark, number of tasks and backbone."""
    groups = grouped(
        ((str(e.config["data"]["benchmark"]), e.tasks, e.backbone, e.record.backbone.sha256, e.held_out), e)
        for e in entries
    )
    parts = []
    for (benchmark, tasks, backbone, weights, held_out), group in sorted(groups.items()):
        split = ", on held-out training images" if held_out else ""
        parts.append(f"### {benchmark}, {tasks} tasks, {backbone}{split}")
        parts.append(f"Weights: sha256 `{weights[:12]}`, {count(len(group), 'run')}.")
        for _, own in sorted(grouped((entry.preset, entry) for entry in group).items()):
            comparison = _comparison(own, [entry for entry in entries if entry not in own])
            for table in comparison.tables():
                parts += [f"#### {markdown_text(table.caption)}", table_body(table)]
            notes = [note for note in comparison.own_notes if ": backbone." not in note]  # in the heading
            parts += [bullets(map(markdown_text, notes))] if notes else []
    return parts


def _comparison(entries: Sequence[Entry], others: Sequence[Entry]) -> Comparison:
    """Compare runs; others may have run concurrently."""
    results = []
    for entry in entries:
        varied = tuple(entry.preset_overrides.items())
        row = MethodRow(", ".join((entry.method, *describe(varied))), entry.method, entry.method, varied)
        results.append(read_result(entry.recorded, row, ColumnGroup(entry.benchmark, entry.preset), entry.seed))
    ranks = {method: rank for rank, method in enumerate(_ORDER)}
    rows = sorted(dict.fromkeys(result.row for result in results), key=lambda row: ranks.get(row.method, len(ranks)))
    places = list(dict.fromkeys(result.place for result in results))
    return Comparison(rows, places, results, others=[entry.record for entry in others])


def _sources(entries: Sequence[Entry]) -> list[str]:
    """Return tables of the weights, images and machines behind the numbers."""

    def table(header: Sequence[str], line: Callable[[Entry], tuple[str, ...]]) -> str:
        runs = Counter(map(line, entries))
        return _escaped_table([*header, "Runs"], [[*key, str(runs[key])] for key in sorted(runs)], -1)

    def weights(entry: Entry) -> tuple[str, ...]:
        used = entry.record.backbone
        return entry.backbone, f"`{used.name}`", used.source, f"`{used.sha256[:12]}`"

    def images(entry: Entry) -> tuple[str, ...]:
        stream = entry.record.stream
        counts = (f"{sum(images):,}" for images in (stream.train_images, stream.test_images))
        split = "held-out training images" if entry.held_out else "test"
        hashes = (f"`{text[:12]}`" if text else NOTHING for text in (stream.split_hash, pixels_hash(entry.record)))
        return entry.benchmark, *counts, split, *hashes, "; ".join(stream.differences or ()) or NOTHING

    def machine(entry: Entry) -> tuple[str, ...]:
        used, versions = entry.record.hardware.to_json(), entry.record.versions
        revision = f"`{versions['revision']}`" if versions.get("revision") else NOTHING
        return machine_name(used), versions["torch"], versions["timm"], revision

    return [
        "### Weights",
        table(("Backbone", "Name", "Source", "sha256"), weights),
        "### Images",
        "Split: hash of the names of all images with their classes and splits. Pixels: hash of the evaluated images or "
        "of the whole folder. Older records lack it, and may not list all differences from the published images.",
        table(("Benchmark", "Training", "Evaluated", "On", "Split", "Pixels", "Differs from the published"), images),
        "### Machines",
        "A revision that ends in `-dirty` is a working tree with changes that were not committed.",
        table(("Hardware", "torch", "timm", "Revision"), machine),
    ]


def _escaped_table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int) -> str:
    return markdown_table(header, [[cell.replace("|", "\\|") for cell in row] for row in rows], text_columns)


def bullets(notes: Iterable[str]) -> str:
    """Set notes as a list in Markdown."""
    return "\n".join(f"- {note}" for note in notes)


def build(folder: Path, page: Path) -> tuple[str, list[PaperFigure]]:
    """Return the text of the page and its figures."""
    entries = read_entries(folder)
    benches, figures = read_benches(folder), paper_figures(entries)
    link = os.path.relpath(folder.absolute(), page.absolute().parent).replace(os.sep, "/")
    parts = [
        "# Results",
        f"<!-- made by `python -m reproduction results` from the files in {link}: change those, not this page -->",
        f"{count(len(entries), 'run')}, each in a file in [{link}]({link}) with its settings, weights, images and "
        "hardware. The tables of the paper come first, with our runs under each row. All runs follow.",
        "## How to read the tables",
        bullets([*_NOTES, *(f"{flag} {words}." for flag, words in FLAGS.items())]),
        "## The paper's tables",
    ]
    for table in paper.tables():
        parts += [f"### {table.heading}", paper_table(table, entries, benches)]
    if figures:
        parts.append("## The paper's figures, from our runs")
        for figure in figures:
            parts += [f"### {figure.title}", f"![{figure.title}]({link}/{figure.file})", figure.caption]
    if entries:
        parts += ["## Every run", *_every_run(entries), "## Weights, images and machines", *_sources(entries)]
    return "\n\n".join(parts) + "\n", figures


def write_page(folder: Path, page: Path) -> list[Path]:
    """Write the page and its figures."""
    text, figures = build(folder, page)
    written = [write(folder / figure.file, figure.draw()) for figure in figures]
    return [write(page, text.encode()), *written]
