"""The pages of a report: run folders are read and checked, described as text, and set in HTML."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from probprompt.config import flatten, from_stored
from probprompt.errors import UserError, shorten
from probprompt.evaluation import metrics
from probprompt.report import figures
from probprompt.report.compare import (
    FAA,
    FILES,
    FORGETTING,
    SIMILARITY,
    ColumnGroup,
    Comparison,
    Entry,
    FormattedCell,
    Measure,
    Row,
    Table,
    gather_runs,
)
from probprompt.report.figures import Bar, Growth, Series
from probprompt.report.tables import (
    MARKED,
    NOTHING,
    count,
    csv_table,
    duration,
    fill_page,
    latex,
    markdown,
    number,
    percent,
)
from probprompt.runs.grid import describe
from probprompt.runs.run import Accuracy, Diagnostics, Queries, Relevance, Run, RunRecord, Similarity
from probprompt.storage import write_bytes, write_error


@dataclass(frozen=True)
class RunFiles:
    """What the files of a run contain, read and checked."""

    record: RunRecord
    accuracy: Accuracy
    diagnostics: Diagnostics
    losses: list[list[tuple[int, float]]]
    label: str

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read a run's folder; a missing or invalid file is an error that names it."""
        run = Run.open(folder)
        record = run.record
        return cls(record, run.accuracy, run.diagnostics, run.losses, record.name or run.folder.name)

    @property
    def total(self) -> int:
        """Number of tasks that the run is to learn."""
        return len(self.record.stream.tasks)

    @property
    def steps(self) -> int:
        """Number of tasks learned so far."""
        return self.accuracy.finished_steps

    @property
    def finished(self) -> bool:
        """Whether all tasks were learned."""
        return self.steps == self.total

    @property
    def matrix(self) -> list[list[float | None]]:
        """Accuracies of the tasks learned so far."""
        return [row[: self.steps] for row in self.accuracy.matrix[: self.steps]]


# The page of a run: text


def _plain(value: object) -> str:
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value) or NOTHING
    return str(value)


def _rows(content: Iterable[tuple[str, object]]) -> list[tuple[str, str, str]]:
    """Return names, values and full hashes, which are abbreviated as values."""
    rows = []
    for name, value in content:
        text = _plain(value)
        digest = bool(re.search(r"sha256|hash", name)) and len(text) > 16
        rows.append((name, text[:12] + "…" if digest else text, text if digest else ""))
    return rows


def _headline(run: RunFiles) -> str:
    classes = len({name for task in run.record.stream.tasks[: run.steps] for name in task})
    end = " so far" if not run.finished else " at the end" if run.steps > 1 else ""
    tasks = f"in {run.steps} tasks, one after another," if run.steps > 1 else "in one task"
    text = (
        f"{run.label} learned {count(classes, 'class')} {tasks} and recognises "
        f"{percent(run.accuracy.final)} of the {run.record.evaluated_on} images{end}"
    )
    if run.steps == 1:
        return text + "."
    forgetting = run.accuracy.forgetting
    text += ", averaged over the tasks."
    if forgetting is None:
        return text
    if forgetting < 0.05:
        return text + " On average, nothing of the earlier tasks was forgotten."
    return text + f" On the earlier tasks it is {number(forgetting)} points below its best."


def _words(run: RunFiles) -> list[str]:
    """State briefly what was to be learned, and by which method and backbone."""
    record, classes = run.record, len({name for task in run.record.stream.tasks for name in task})
    method = f"method {record.method}" if record.method else ""
    words = (record.benchmark, count(run.total, "task"), count(classes, "class"), method, record.backbone.name)
    return [word for word in words if word]


def _badges(run: RunFiles) -> list[str]:
    badges = [] if run.finished else [f"unfinished: {run.steps} of {count(run.total, 'task')}"]
    if run.record.evaluated_on != "test":
        badges.append(f"evaluated on {run.record.evaluated_on} images")
    badges += run.record.marks
    if run.record.audit:
        leaks = ", ".join(map(str, run.record.audit.get("leaks", [])))
        badges.append(f"audited: LEAKS ({leaks})" if leaks else "audited: predictions depend on their own image alone")
    return badges


def _tiles(run: RunFiles) -> list[tuple[str, str, str]]:
    record, accuracy = run.record, run.accuracy
    tiles = [
        ("Final average (FAA)", percent(accuracy.final, 2), "mean over the tasks after the last step"),
        ("Cumulative average (CAA)", percent(accuracy.cumulative, 2), "mean of the averages after each step"),
    ]
    if accuracy.forgetting is not None and run.steps > 1:
        tiles.append(("Forgetting", number(accuracy.forgetting, 2), "points below the best, on earlier tasks"))
    if record.trainable_parameters is not None:
        whole = record.backbone.parameters
        about = [f"{100 * record.trainable_parameters / whole:.2g}\u00a0% of the backbone's"] if whole else []
        if record.model_mb:
            use, learn = (_size(record.model_mb[part]) for part in ("use", "learn"))
            about.append(f"{use} on disk, {learn} to learn on")
        tiles.append(("Trained parameters", f"{record.trainable_parameters:,}", "; ".join(about)))
    seconds = record.time.get("total_s")
    if seconds is not None:
        memory = record.peak_memory_mb
        tiles.append(("Time", duration(seconds), "" if memory is None else f"{memory:,.0f} MB at most"))
    return tiles


def _size(megabytes: float) -> str:
    return f"{number(1000 * megabytes, 0)}\u00a0kB" if megabytes < 1 else f"{number(megabytes, 1)}\u00a0MB"


def _provenance(run: RunFiles) -> list[tuple[str, list[tuple[str, str, str]]]]:
    record = run.record
    memory = {} if record.peak_memory_mb is None else {"peak memory": f"{record.peak_memory_mb:,.0f} MB"}
    size = {"parameters": f"{record.backbone.parameters:,}"} if record.backbone.parameters else {}
    groups = {
        "Run": {"name": record.name, "created": record.created.replace("T", " "), "evaluated on": record.evaluated_on},
        "Backbone": record.backbone.to_json() | size,
        "Preprocessing": from_stored(record.preprocessing.to_json(), "backbone"),
        "Stream": {"class order hash": record.stream.order_hash, "split hash": record.stream.split_hash},
        "Time and memory": {k.removesuffix("_s"): duration(v) for k, v in record.time.items()} | memory,
        "Hardware": record.hardware.to_json(),
        "Versions": record.versions,
    }
    return [(title, _rows(flatten(content).items())) for title, content in groups.items() if content]


def _tasks(run: RunFiles) -> list[tuple[list[str], str, str]]:
    """Return the classes of each task, and its numbers of images."""
    stream = run.record.stream
    train, test = ([f"{images:,}" for images in counts] for counts in (stream.train_images, stream.test_images))
    return list(zip(stream.tasks, chain(train, repeat(NOTHING)), chain(test, repeat(NOTHING)), strict=False))


# The page of a run: figures


def _floor(runs: Sequence[RunFiles]) -> float:
    return figures.accuracy_floor([v for run in runs for row in run.accuracy.matrix for v in row if v is not None])


def _average_curve(run: RunFiles, floor: float) -> Markup:
    words = f"{run.label}: {', '.join(map(number, run.accuracy.averages))}"
    description = f"Line chart of the average accuracy in percent after each task. {words}."
    return figures.average_curves([Series(run.accuracy.averages)], run.total, floor, description)


def _task_panels(run: RunFiles, floor: float) -> list[tuple[Markup, str]]:
    """Draw the accuracy on each task over the steps, and return its drop with it."""
    panels = []
    for task, row in enumerate(run.matrix):
        line = Series(row)
        first, last = line.points[1][0], line.points[1][-1]
        drop = number(first - last)
        words = f"{run.label} from {number(first)} to {number(last)}, drop {drop}"
        description = f"Accuracy on task {task + 1} in percent: {words}."
        panels.append((figures.task_panel([line], run.total, floor, f"task-{task + 1}", description), drop))
    return panels


def _matrix_cell(value: float | None, floor: float) -> tuple[str, str, str] | None:
    """Return the text, background and ink of a cell of the accuracy matrix."""
    if value is None:
        return None
    return ("100" if value >= 99.95 else number(value), *figures.shade(value, floor, 100.0))


def _mean_similarity(part: Similarity) -> str:
    mean = f"mean {number(part.mean, 2)}"
    return mean if part.initial_mean is None else f"{mean}, {number(part.initial_mean, 2)} at initialisation"


def _similarity_figures(part: Similarity) -> list[Markup]:
    """Draw the similarity of prompts, between classes and by block."""
    lowest = min(0.0, math.floor(min(map(min, part.matrix)) * 10) / 10)
    words = _mean_similarity(part)
    description = f"Heat map of the cosine similarity between the prompts of {len(part.labels)} classes; {words}."
    drawn = [figures.similarity_map(part.matrix, part.labels, lowest, description)]
    if len(part.per_block) > 1:
        spoken = ", ".join(f"block {name}: {number(value, 2)}" for name, value in part.per_block.items())
        description = f"Bar chart of the mean similarity by block. {spoken}."
        drawn.append(figures.block_bars(part.per_block, part.mean, description))
    return drawn


def _relevance_map(part: Relevance) -> Markup:
    pairs = zip(part.blocks, part.entropy, strict=True)
    spoken = ", ".join(f"block {block}: {number(value, 2)}" for block, value in pairs)
    description = f"Heat map of the use of {len(part.usage[0])} prompt distributions by block. Entropy by {spoken}."
    return figures.relevance_map(part, description)


def _query_scatter(part: Queries) -> Markup:
    classes = count(len(set(part.labels)), "class")
    description = f"Scatter plot ({part.embedding}) of {len(part.points)} queries of {classes}."
    return figures.query_scatter(part.points, part.labels, description)


def _loss(run: RunFiles) -> Markup | None:
    finite = [value for task in run.losses for _, value in task if math.isfinite(value)]
    if not finite:
        return None
    words = f"Line chart of the training loss, from {finite[0]:.3g} to {finite[-1]:.3g}."
    return figures.loss_curve(run.losses, words)


def render_run(run: RunFiles) -> str:
    """Set a run in one self-contained HTML page."""
    floor, inside = _floor([run]), run.diagnostics
    return _render(
        "report",
        run=run,
        record=run.record,
        number=number,
        swatch=figures.swatch,
        headline=_headline(run),
        setting=_words(run),
        badges=_badges(run),
        tiles=_tiles(run),
        floor=f"{floor:.0f}",
        average=_average_curve(run, floor) if run.total > 1 else None,
        panels=_task_panels(run, floor),
        cells=[[_matrix_cell(value, floor) for value in row] for row in run.matrix],
        ramp=[figures.shade(floor + (100.0 - floor) * part / 6, floor, 100.0)[0] for part in range(7)],
        similarity=inside.similarity,
        inside=inside,
        similarity_figures=_similarity_figures(inside.similarity) if inside.similarity else [],
        relevance=inside.relevance,
        relevance_map=_relevance_map(inside.relevance) if inside.relevance else None,
        queries=inside.queries,
        query_scatter=_query_scatter(inside.queries) if inside.queries else None,
        loss=_loss(run),
        config=_rows(flatten(from_stored(run.record.config)).items()),
        provenance=_provenance(run),
        tasks=_tasks(run),
    )


def _template(name: str) -> str:
    return resources.files("probprompt.report").joinpath(f"{name}.html.jinja").read_text(encoding="utf-8")


def _render(name: str, **content: object) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return figures.UNPRINTABLE.sub("�", environment.from_string(_template(name)).render(content))


# Writing


def write(path: Path, content: bytes) -> Path:
    """Write a file, in a new folder if need be; an obstacle is a clear error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise write_error(path, problem) from problem
    write_bytes(path, content)
    return path


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write one self-contained HTML page on the given run folders and return its path.

    One run gets a separate page; several finished runs are compared, as by ``compare``.
    """
    if not runs:
        raise UserError("no run was given: name at least one run folder")
    several = len(runs) > 1
    page = render_comparison(gather_runs(runs, preset_columns=False)) if several else render_run(RunFiles.read(runs[0]))
    return write(Path(out), page.encode("utf-8", "replace"))


def save_overview(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Save one wide picture (PNG or SVG, by the name) of the essentials of the given runs.

    It shows the average accuracy of all runs, the accuracy matrix of the first, and the prompt similarity of two.
    """
    out = Path(out)
    kind = out.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise UserError(f"{out} must end in .png or .svg: that says which kind of picture to save")
    if len(runs) > 1:
        _check_comparable(gather_runs(runs, preset_columns=False))
    return write(out, figures.overview(_overview([RunFiles.read(run) for run in runs]), kind))


def _check_comparable(comparison: Comparison) -> None:
    places = comparison.places
    reasons = [note for place in places if not comparison.comparable(place) for note in comparison.caveats(place)]
    if len(places) > 1:
        reasons.insert(0, f"The benchmarks differ: {', '.join(place.benchmark for place in places)}.")
    if reasons:
        raise UserError(f"these runs cannot share one picture. {' '.join(reasons)}")


def _overview(runs: Sequence[RunFiles]) -> figures.Overview:
    first, maps = runs[0], [(run.label, run.diagnostics.similarity) for run in runs]
    return figures.Overview(
        lines=[(run.label, Series(run.accuracy.averages, index)) for index, run in enumerate(runs)],
        total=max(run.total for run in runs),
        floor=_floor(runs),
        matrix=first.matrix,
        matrix_of=first.label,
        similarities=[(f"{name}, {_mean_similarity(part)}", part.matrix) for name, part in maps if part],
    )


# The page of a comparison


COMPONENTS = ("method.components", "method.components_per_task")


def render_comparison(comparison: Comparison) -> str:
    """Set the comparison in one self-contained HTML page."""
    # The report's own style sheet: the two pages look alike.
    style = re.search(r"<style>\n(.*?)</style>", _template("report"), re.DOTALL)
    return _render(
        "comparison",
        style=Markup(style[1] if style else ""),
        title=_title(comparison),
        headline=" ".join(filter(None, (_comparison_verdict(comparison, place) for place in comparison.places))),
        setting=_setting(comparison),
        created=sorted({result.record.created[:10] for result in comparison.results} - {""}),
        failed=comparison.failed,
        tables=[_page_table(comparison, table) for table in comparison.tables()],
        legend_items=_legend(comparison),
        sections=_sections(comparison),
        tasks=[part for place in comparison.places if (part := _tasks_section(comparison, place))],
    )


def _title(comparison: Comparison) -> str:
    names = list(dict.fromkeys(row.name for row in comparison.rows))
    where = list(dict.fromkeys(place.benchmark for place in comparison.places))
    what = count(len(names), "method") if len(names) > 2 else " and ".join(names)
    return f"{what} on {', '.join(where) if len(where) < 4 else count(len(where), 'benchmark')}"


def _setting(comparison: Comparison) -> list[str]:
    presets = list(dict.fromkeys(place.preset for place in comparison.places if place.preset))
    words = [f"preset{'s' if len(presets) > 1 else ''} {', '.join(presets)}"] if presets else []
    return [*words, count(len(comparison.results), "run"), f"seeds {', '.join(map(str, comparison.seeds))}"]


def _comparison_verdict(comparison: Comparison, place: ColumnGroup) -> str:
    """Who is ahead, by how much, and whether that is more than the spread over the seeds."""
    if not comparison.comparable(place):
        return ""
    ranked = [(found, row) for row, entry in comparison.level(place).items() if (found := entry.value(FAA))]
    ranked.sort(key=lambda pair: -pair[0][0])
    if len(ranked) < 2:
        return ""
    ((first, spread), best), ((second, other), next_best) = ranked[:2]
    where = f"On {place.benchmark}{f' ({place.preset})' if place.preset else ''}, "
    gap = round(first, 2) - round(second, 2)
    if gap < 0.005:
        level = [row.label for (value, _), row in ranked if round(value, 2) == round(first, 2)]
        return f"{where}{' and '.join(level[:2]) if len(level) < 3 else shorten(level)} are level at {percent(first)}."
    less = ", less than the spread over the seeds" if gap < max(spread, other) else ""
    points = number(gap, 1 if gap >= 0.05 else 2)
    return f"{where}{best.label} ends at {percent(first)} on average, {points} points above {next_best.label}{less}."


# Tables


class PageTable(NamedTuple):
    """A table of the page: groups of columns with widths, headings, rows; true begins a group of columns."""

    caption: str
    groups: list[tuple[str, int]]
    columns: list[tuple[str, bool]]
    rows: list[tuple[Row, Markup, list[tuple[FormattedCell, bool]]]]
    notes: Sequence[str]


def _page_table(comparison: Comparison, table: Table) -> PageTable:
    groups = [(place.label, width) for place, width in table.places]
    starts = {sum(width for _, width in groups[:group]) for group in range(1, len(groups))}
    looks = _looks(comparison)
    rows = [
        (row, figures.swatch(looks[row]), [(shown, place in starts) for place, shown in enumerate(cells)])
        for row, cells in table.rows
    ]
    columns = [(measure.heading, place in starts) for place, (_, measure) in enumerate(table.columns)]
    return PageTable(table.caption, groups if len(groups) > 1 else [], columns, rows, table.notes)


# Pictures


def _looks(comparison: Comparison) -> dict[Row, int]:
    """The index of each row's look: one colour for a method, other dashes and markers for its variations."""
    names, used = list(dict.fromkeys(row.method for row in comparison.rows)), Counter[int]()
    found = {}
    for row in comparison.rows:
        colour = names.index(row.method) % len(figures.PALETTE)
        found[row] = colour + len(figures.PALETTE) * used[colour]
        used[colour] += 1
    return found


def _legend(comparison: Comparison) -> list[tuple[Markup, str]]:
    """The look of each row that is drawn line by line."""
    drawn = {row for (row, _), entry in comparison.entries.items() if len(entry.matrix) > 1}
    return [(figures.swatch(look), row.label) for row, look in _looks(comparison).items() if row in drawn]


def _here(comparison: Comparison, place: ColumnGroup) -> list[tuple[int, Row, Entry]]:
    """The rows of a place, with the index of their look."""
    entries = comparison.entries
    return [(look, row, entries[row, place]) for row, look in _looks(comparison).items() if (row, place) in entries]


def _sections(comparison: Comparison) -> list[tuple[str, str, list[tuple[str, Markup]]]]:
    """Titles, texts and figures by subject, a figure of each place."""
    subjects: list[tuple[str, str, Callable[[Comparison, ColumnGroup, str], Markup | None]]] = [
        ("Final accuracy", _FINAL, partial(_bars, FAA, "final average accuracy, %")),
        ("Average accuracy", _AVERAGE, _average),
        ("Forgetting", _FORGETTING, partial(_bars, FORGETTING, "forgetting, points")),
        ("Prompt similarity", _SIMILAR, partial(_bars, SIMILARITY, "prompt similarity")),
        ("More components", _MORE, _more),
    ]
    found = []
    for subject, (title, text, draw) in enumerate(subjects):
        drawn = [
            (place.label, svg)
            for index, place in enumerate(comparison.places)
            if (svg := draw(comparison, place, f"s{subject}-{index}"))
        ]
        if drawn:
            found.append((title, text, drawn))
    return found


_FINAL = (
    "Average accuracy over all tasks in the end (FAA), mean and standard deviation over the seeds. "
    "An outlined bar is not ranked: an upper bound, or published behaviour that is wrong (†)."
)
_AVERAGE = "After each step: the mean accuracy over all tasks learned so far. A point at the end is an upper bound."
_FORGETTING = "How far the earlier tasks ended below their best, in points. Less is better; below 0 they gained."
_SIMILAR = (
    "Mean cosine similarity between the prompts that different classes receive. The diamond is the same at the start: "
    "random prompts begin unlike each other, and only what training changed says something. At 1 they have collapsed."
)
_MORE = "The similarity against the number of components. Dotted, with hollow marks: the same at the start."


def _bars(measure: Measure, axis: str, comparison: Comparison, place: ColumnGroup, key: str) -> Markup | None:
    drawn, words = [], []
    for look, row, entry in _here(comparison, place):
        found, begun = entry.value(measure), entry.start(measure)
        if found is None:
            continue
        name = row.label + (MARKED if entry.marks else "")
        error = found[1] if len(entry.results) > 1 else None
        drawn.append(Bar(name, found[0], error, look, begun, outlined=row.bound or bool(entry.marks)))
        spread = "" if error is None else f" ± {number(error, measure.digits)}"
        first = "" if begun is None else f", {number(begun, measure.digits)} at the start"
        words.append(f"{name} {number(found[0], measure.digits)}{spread}{first}")
    if not drawn:
        return None
    digits = 1 if measure.better else 2
    return figures.bars(drawn, axis, digits, key, f"Bar chart of {axis}: {'; '.join(words)}.")


def _average(comparison: Comparison, place: ColumnGroup, key: str) -> Markup | None:
    curves = [(index, row, entry.curve) for index, row, entry in _here(comparison, place)]
    total = max((len(curve) for _, _, curve in curves), default=0)
    if total < 2:
        return None
    absent = {row: total - len(curve) if row.bound else 0 for _, row, curve in curves}  # a bound is known in the end
    lines = [(row.label, Series([*[None] * absent[row], *curve], index)) for index, row, curve in curves]
    words = "; ".join(f"{row.label}: {', '.join(map(number, curve))}" for _, row, curve in curves)
    floor = figures.accuracy_floor([value for _, _, curve in curves for value in curve])
    description = f"Line chart of the average accuracy in percent after each task. {words}."
    return figures.named_curves(lines, total, floor, key, description)


def _more(comparison: Comparison, place: ColumnGroup, key: str) -> Markup | None:
    """Similarity against the number of components, where that is varied."""
    lines: dict[str, tuple[int, list[tuple[float, float, float | None]]]] = {}
    for index, row, entry in _here(comparison, place):
        setting = [(name, value) for name, value in row.varied if name in COMPONENTS]
        found = entry.value(SIMILARITY)
        if len(setting) != 1 or not found or not isinstance(setting[0][1], int | float):
            continue
        rest = describe(tuple((name, value) for name, value in row.varied if name not in COMPONENTS))
        name = ", ".join((row.name, *rest))
        point = (float(setting[0][1]), found[0], entry.start(SIMILARITY))
        lines.setdefault(name, (index, []))[1].append(point)
    grown = [Growth(name, index, sorted(points)) for name, (index, points) in lines.items() if len(points) > 1]
    if not grown:
        return None
    words = "; ".join(
        f"{line.name}: " + ", ".join(f"{number(value, 3)} with {size:g}" for size, value, _ in line.points)
        for line in grown
    )
    description = f"Line chart of the prompt similarity against the number of components. {words}."
    return figures.growth(grown, "components", "prompt similarity", key, description)


# Task by task


class TasksSection(NamedTuple):
    """The accuracy on each task over the steps, and the points that each row lost of it."""

    label: str
    panels: list[Markup]
    rows: list[tuple[Markup, str, list[str], str]]
    floor: str


def _tasks_section(comparison: Comparison, place: ColumnGroup) -> TasksSection | None:
    here = [(index, row, entry) for index, row, entry in _here(comparison, place) if len(entry.matrix) > 1]
    if not here:
        return None
    total = max(len(entry.matrix) for _, _, entry in here)
    floor = figures.accuracy_floor([float(np.nanmin(entry.matrix)) for _, _, entry in here])
    at = comparison.places.index(place)
    panels = [_comparison_panel(here, task, total, floor, f"t{at}-{task}") for task in range(total)]
    rows = []
    for index, row, entry in here:
        drops = [number(value) for value in metrics.per_task_drop(entry.matrix)[:-1]]
        drops += [""] * (total - 1 - len(drops))
        forgetting = entry.value(FORGETTING)
        rows.append((figures.swatch(index), row.label, drops, number(forgetting[0]) if forgetting else ""))
    return TasksSection(place.label, panels, rows, f"{floor:.0f}")


def _comparison_panel(here: Sequence[tuple[int, Row, Entry]], task: int, total: int, floor: float, key: str) -> Markup:
    series, words = [], []
    for index, row, entry in here:
        if len(entry.matrix) <= task:
            continue
        values = [None if np.isnan(value) else float(value) for value in entry.matrix[task]]
        series.append(Series(values, index))
        words.append(f"{row.label} from {number(values[task] or 0.0)} to {number(values[-1] or 0.0)}")
    description = f"Accuracy on task {task + 1} in percent: {'; '.join(words)}."
    return figures.task_panel(series, total, floor, key, description)


# Writing a comparison


def write_comparison(comparison: Comparison, out: Path) -> list[Path]:
    """Write the tables and the page into a folder."""
    if not comparison.results:
        raise UserError("no run is finished: there is nothing to compare")
    makers: tuple[Callable[[Comparison], str], ...] = (markdown, latex, csv_table, render_comparison)
    return [
        write(out / name, make(comparison).encode("utf-8", "replace")) for name, make in zip(FILES, makers, strict=True)
    ]


def write_page(comparison: Comparison, path: Path) -> Path:
    """Put the tables into a page of Markdown; what else stands in it stays."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    return write(path, fill_page(before, comparison).encode())
