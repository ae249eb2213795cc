"""HTML pages of one run and of a comparison."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import chain, repeat
from pathlib import Path
from shlex import join
from typing import NamedTuple, Self

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from probprompt import presets
from probprompt.config import flatten, from_stored, parse_value
from probprompt.errors import UserError, shorten
from probprompt.evaluation import metrics
from probprompt.report import figures
from probprompt.report.compare import (
    DIFFERS,
    FAA,
    FILES,
    FORGETTING,
    MEANING,
    SIMILARITY,
    ColumnGroup,
    Comparison,
    Entry,
    FormattedCell,
    Measure,
    Row,
    Table,
    gather_runs,
    seed_list,
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
    """Contents of the files of a run, checked."""

    record: RunRecord
    accuracy: Accuracy
    diagnostics: Diagnostics
    losses: list[list[tuple[int, float]]]
    label: str

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read the folder of a run; the error names a missing or invalid file."""
        run = Run.open(folder)
        record = run.record
        return cls(record, run.accuracy, run.diagnostics, run.losses, record.name or run.folder.name)

    @property
    def total(self) -> int:
        """Number of tasks of the run."""
        return len(self.record.stream.tasks)

    @property
    def steps(self) -> int:
        """Number of tasks learned so far."""
        return self.accuracy.finished_steps

    @property
    def finished(self) -> bool:
        """True if all tasks were learned."""
        return self.steps == self.total

    @property
    def matrix(self) -> list[list[float | None]]:
        """Accuracies of the tasks learned so far."""
        return [row[: self.steps] for row in self.accuracy.matrix[: self.steps]]

    @property
    def random_guess(self) -> str:
        """Accuracy of a random guess among the classes learned so far, as text."""
        return percent(100 / max(1, len(set(chain(*self.record.stream.tasks[: self.steps])))))


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
    name = "Final average accuracy" if run.finished and run.steps > 1 else "Accuracy" if run.total == 1 else ""
    name = name or f"Average accuracy after {run.steps} of {run.total} tasks"
    images = f"{run.record.evaluated_on} images (random guess: {run.random_guess})"
    forgetting, text = run.accuracy.forgetting, f"{name} {percent(run.accuracy.final)} on {images}."
    if run.steps == 1 or forgetting is None:
        return text
    if forgetting < 0.05:
        return f"{text} Earlier tasks lost nothing on average."
    return f"{text} Earlier tasks lost {number(forgetting)} points on average."


def _setting(run: RunFiles) -> list[str]:
    """Return benchmark, tasks, classes, method and backbone as text."""
    record, classes = run.record, len(set(chain(*run.record.stream.tasks)))
    method = f"method {record.method}" if record.method else ""
    backbone = f"backbone {record.backbone.name}" if record.backbone.name else ""
    parts = (record.benchmark, count(run.total, "task"), count(classes, "class"), method, backbone)
    return [part for part in parts if part]


def _badges(run: RunFiles) -> list[tuple[str, str]]:
    """Return badges, each with its explanation of one line."""
    badges, record = [], run.record
    if not run.finished:
        text = "All numbers are of the finished tasks. Continue with 'probprompt train --resume RUN'."
        badges.append((f"Unfinished: {run.steps} of {count(run.total, 'task')}", text))
    if record.joint:
        badges.append(("Upper bound", "The run learned all tasks jointly, which continual learning does not allow."))
    if record.evaluated_on != "test":
        text = "Accuracy is measured on training images that were held out, not on the test set."
        badges.append((f"Evaluated on {record.evaluated_on} images", text))
    text = "The run repeats a known error of published code. Do not compare it with correct runs."
    badges += [(f"Not comparable: {mark}", text) for mark in record.marks]
    if record.audit:
        leaks = ", ".join(map(str, record.audit.get("leaks", [])))
        text = "The audit checks if predictions depend on anything but their image, such as other images in the batch."
        badges.append((f"Leakage audit: {f'failed ({leaks})' if leaks else 'passed'}", text))
    return badges


def repeat_command(record: RunRecord) -> str:
    """Return the command that repeats a run; empty if another version made its settings."""
    if record.settings is None or not record.benchmark or not record.method:
        return ""
    arguments = ["probprompt", "train", record.benchmark, "--method", record.method]
    if record.preset in presets.NAMES:
        arguments += ["--preset", str(record.preset)]
    allowed = flatten(record.settings.model_dump(mode="json")).keys() - {"data.benchmark", "data.tasks"}
    values = {name: record.flat_settings[name] for name in record.preset_overrides if name in allowed}
    tasks, seeds = record.config["data"].get("tasks"), record.config.get("seeds", {})
    if isinstance(tasks, int) or (isinstance(tasks, list) and all(isinstance(size, int) for size in tasks)):
        arguments += ["--tasks", ",".join(map(str, [tasks] if isinstance(tasks, int) else tasks))]
    elif tasks:
        values["data.tasks"] = tasks
    if len(set(seeds.values())) == 1:
        arguments += ["--seed", str(next(iter(seeds.values())))]
    else:
        values |= {f"seeds.{name}": seed for name, seed in seeds.items()}
    for name, value in values.items():
        arguments += ["--set", f"{name}={_as_assigned(value)}"]
    return join([*arguments, *(["--gpus", str(record.world_size)] if record.world_size > 1 else [])])


def _as_assigned(value: object) -> str:
    """Write a value as ``--set`` reads it."""
    if isinstance(value, str):
        return value if parse_value(value) == value else json.dumps(value)
    return "none" if value is None else json.dumps(value)


def _tiles(run: RunFiles) -> list[tuple[str, str, str]]:
    record, accuracy = run.record, run.accuracy
    tiles = [
        ("Final average (FAA\u00a0↑)", percent(accuracy.final), f"random guess: {run.random_guess}"),
        ("Cumulative average (CAA\u00a0↑)", percent(accuracy.cumulative), "mean over all steps"),
    ]
    if accuracy.forgetting is not None and run.steps > 1:
        tiles.append(("Forgetting ↓", number(accuracy.forgetting), "points lost on earlier tasks"))
    if record.trainable_parameters is not None:
        whole = record.backbone.parameters
        about = [f"{100 * record.trainable_parameters / whole:.2g}% of the backbone"] if whole else []
        if record.model_mb:
            use, learn = (_size(record.model_mb[part]) for part in ("use", "learn"))
            about.append(f"{use} to predict, {learn} to continue training")
        tiles.append(("Trained parameters", f"{record.trainable_parameters:,}", "; ".join(about)))
    seconds = record.time.get("total_s")
    if seconds is not None:
        memory = record.peak_memory_mb
        tiles.append(("Time", duration(seconds), "" if memory is None else f"{memory:,.0f} MB peak memory"))
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


def _floor(runs: Sequence[RunFiles]) -> float:
    return figures.accuracy_floor([v for run in runs for row in run.accuracy.matrix for v in row if v is not None])


def _average_curve(run: RunFiles, floor: float) -> Markup:
    averages = run.accuracy.averages
    description = f"Line chart of the average accuracy in percent after each task: {', '.join(map(number, averages))}."
    return figures.average_curves([Series(averages)], run.total, floor, description)


def _task_panels(run: RunFiles, floor: float) -> list[tuple[Markup, str]]:
    """Draw the accuracy on each task over the steps; return it with the change as text."""
    panels = []
    for task, row in enumerate(run.matrix):
        line = Series(row)
        first, last = line.points[1][0], line.points[1][-1]
        change = f"{'lost' if first >= last else 'gained'} {number(abs(first - last))}"
        text = f"{run.label} from {number(first)} to {number(last)}, {change} points"
        description = f"Accuracy on task {task + 1} in percent: {text}."
        svg = figures.task_panel([line], run.total, floor, f"task-{task + 1}", description)
        panels.append((svg, change if task + 1 < run.steps else "last"))
    return panels


def _matrix_cell(value: float | None, floor: float) -> tuple[str, str, str] | None:
    """Return the text, background and ink of a cell of the accuracy matrix."""
    if value is None:
        return None
    return ("100" if value >= 99.95 else number(value), *figures.shade(value, floor, 100.0))


def _mean_similarity(part: Similarity) -> str:
    mean = f"mean {number(part.mean, 2)}"
    return mean if part.initial_mean is None else f"{mean}, {number(part.initial_mean, 2)} at initialization"


def _similarity_figures(part: Similarity) -> list[Markup]:
    """Draw the similarity of prompts, between classes and by block."""
    lowest = min(0.0, math.floor(min(map(min, part.matrix)) * 10) / 10)
    text = f"the prompts of {len(part.labels)} classes; {_mean_similarity(part)}"
    description = f"Heat map of the cosine similarity between {text}."
    drawn = [figures.similarity_map(part.matrix, part.labels, lowest, description)]
    if len(part.per_block) > 1:
        values = ", ".join(f"block {name}: {number(value, 2)}" for name, value in part.per_block.items())
        description = f"Bar chart of the mean similarity by block. {values}."
        drawn.append(figures.block_bars(part.per_block, part.mean, description))
    return drawn


def _relevance_map(part: Relevance) -> Markup:
    pairs = zip(part.blocks, part.entropy, strict=True)
    values = ", ".join(f"block {block}: {number(value, 2)}" for block, value in pairs)
    description = f"Heat map of the use of {len(part.usage[0])} prompt distributions by block. Entropy by {values}."
    return figures.relevance_map(part, description)


def _query_scatter(part: Queries) -> Markup:
    classes = count(len(set(part.labels)), "class")
    description = f"Scatter plot ({part.embedding}) of {len(part.points)} queries of {classes}."
    return figures.query_scatter(part.points, part.labels, description)


def _loss(run: RunFiles) -> Markup | None:
    finite = [value for task in run.losses for _, value in task if math.isfinite(value)]
    if not finite:
        return None
    return figures.loss_curve(run.losses, f"Line chart of the training loss, from {finite[0]:.3g} to {finite[-1]:.3g}.")


def render_run(run: RunFiles) -> str:
    """Write a run as one self-contained HTML page."""
    floor, diagnostics = _floor([run]), run.diagnostics
    return _render(
        "report",
        run=run,
        record=run.record,
        number=number,
        swatch=figures.swatch,
        headline=_headline(run),
        setting=_setting(run),
        badges=_badges(run),
        command=repeat_command(run.record),
        tiles=_tiles(run),
        floor=f"{floor:.0f}",
        average=_average_curve(run, floor) if run.total > 1 else None,
        panels=_task_panels(run, floor),
        cells=[[_matrix_cell(value, floor) for value in row] for row in run.matrix],
        ramp=[figures.shade(floor + (100.0 - floor) * part / 6, floor, 100.0)[0] for part in range(7)],
        diagnostics=diagnostics,
        similarity=diagnostics.similarity,
        similarity_figures=_similarity_figures(diagnostics.similarity) if diagnostics.similarity else [],
        relevance=diagnostics.relevance,
        relevance_map=_relevance_map(diagnostics.relevance) if diagnostics.relevance else None,
        queries=diagnostics.queries,
        query_scatter=_query_scatter(diagnostics.queries) if diagnostics.queries else None,
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


def write(path: Path, content: bytes) -> Path:
    """Write a file, and create its folder if necessary."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise write_error(path, problem) from problem
    write_bytes(path, content)
    return path


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write one self-contained HTML page about the given runs and return its path.

    Several runs must be finished; they are compared, as by ``compare``.
    """
    if not runs:
        raise UserError("No run was given. Pass at least one run folder.")
    several = len(runs) > 1
    page = render_comparison(gather_runs(runs, preset_columns=False)) if several else render_run(RunFiles.read(runs[0]))
    return write(Path(out), page.encode("utf-8", "replace"))


def save_overview(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Save one wide figure (PNG or SVG) of the main results of the given runs.

    It shows the average accuracy of all runs, the accuracy matrix of the first, and the prompt similarity of two.
    """
    out = Path(out)
    kind = out.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise UserError(f"Unknown format of {out}. Use a name that ends in .png or .svg.")
    if len(runs) > 1:
        _check_comparable(gather_runs(runs, preset_columns=False))
    return write(out, figures.overview(_overview([RunFiles.read(run) for run in runs]), kind))


def _check_comparable(comparison: Comparison) -> None:
    places = comparison.places
    reasons = [note for place in places if not comparison.comparable(place) for note in comparison.caveats(place)]
    if len(places) > 1:
        reasons.insert(0, f"The benchmarks differ: {', '.join(place.benchmark for place in places)}.")
    if reasons:
        raise UserError(f"Cannot draw these runs in one figure. {' '.join(reasons)}")


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


COMPONENTS = ("method.components", "method.components_per_task")


def render_comparison(comparison: Comparison) -> str:
    """Write a comparison as one self-contained HTML page."""
    style = re.search(r"<style>\n(.*?)</style>", _template("report"), re.DOTALL)
    return _render(
        "comparison",
        style=Markup(style[1] if style else ""),
        title=_title(comparison),
        headline=" ".join(filter(None, (_comparison_verdict(comparison, place) for place in comparison.places))),
        baselines=[text for place in comparison.places if (text := _baselines(comparison, place))],
        setting=_comparison_setting(comparison),
        commands=_commands(comparison),
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


def _comparison_setting(comparison: Comparison) -> list[str]:
    names = list(dict.fromkeys(place.preset for place in comparison.places if place.preset))
    parts = [f"preset{'s' if len(names) > 1 else ''} {', '.join(names)}"] if names else []
    return [*parts, count(len(comparison.results), "run"), seed_list(comparison.seeds)]


def _baselines(comparison: Comparison, place: ColumnGroup) -> str:
    """Return the random guess and the upper bounds of a group of columns as text."""
    entries = [(row, comparison.entries[row, place]) for row in comparison.rows if (row, place) in comparison.entries]
    guess = _random_guess(comparison, place)
    parts = [f"random guess: {percent(guess)}"] if guess else []
    bounds = [(row, entry.value(FAA)) for row, entry in entries if row.bound]
    parts += [f"upper bound ({row.label}): {percent(value[0])}" for row, value in bounds if value]
    if not parts:
        return ""
    text = ", ".join(parts)
    return f"{place.label}: {text}." if len(comparison.places) > 1 else f"{text[0].upper()}{text[1:]}."


def _random_guess(comparison: Comparison, place: ColumnGroup) -> float | None:
    """Return the accuracy in % of a random guess; None if the runs differ in it or do not record their classes."""
    classes = {len(result.record.stream.classes) for result in comparison.results if result.place == place}
    return 100 / classes.pop() if len(classes) == 1 and classes != {0} else None


def _commands(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the command that repeats the first run of each row in each group of columns."""
    several = len(comparison.places) > 1
    first = [(row.label, place, entry.results[0].record) for (row, place), entry in comparison.entries.items()]
    labeled = ((f"{label} ({place.label})" if several else label, repeat_command(run)) for label, place, run in first)
    return [(label, command) for label, command in labeled if command]


def _comparison_verdict(comparison: Comparison, place: ColumnGroup) -> str:
    """Compare the two best rows; they are level within the standard deviation over seeds."""
    if not comparison.comparable(place):
        return ""
    ranked = [(value, row) for row, entry in comparison.level(place).items() if (value := entry.value(FAA))]
    ranked.sort(key=lambda pair: -pair[0][0])
    if len(ranked) < 2:
        return ""
    ((first, spread), best), ((second, other), next_best) = ranked[:2]
    where = f"On {place.benchmark}{f' ({place.preset})' if place.preset else ''}, "
    gap = round(first, 2) - round(second, 2)
    if gap < 0.005:
        level = [row.label for (value, _), row in ranked if round(value, 2) == round(first, 2)]
        return f"{where}{' and '.join(level[:2]) if len(level) < 3 else shorten(level)} are level at {percent(first)}."
    within = ", within the standard deviation over seeds" if gap < max(spread, other) else ""
    points = number(gap, 1 if gap >= 0.05 else 2)
    return f"{where}{best.label} reaches {percent(first)} FAA, {points} points above {next_best.label}{within}."


class PageTable(NamedTuple):
    """A table of the page; a true value starts a group of columns."""

    caption: str
    groups: list[tuple[str, int]]
    columns: list[tuple[str, bool]]
    rows: list[tuple[Row, Markup, list[tuple[FormattedCell, bool]]]]
    notes: Sequence[str]
    differences: Sequence[str]
    """Notes on settings that differ from the preset, which are folded."""


def _page_table(comparison: Comparison, table: Table) -> PageTable:
    groups = [(place.label, width) for place, width in table.places]
    starts = {sum(width for _, width in groups[:group]) for group in range(1, len(groups))}
    looks = _looks(comparison)
    rows = [
        (row, figures.swatch(looks[row]), [(cell, place in starts) for place, cell in enumerate(cells)])
        for row, cells in table.rows
    ]
    columns = [(measure.heading, place in starts) for place, (_, measure) in enumerate(table.columns)]
    differences = [note for note in table.notes if note.startswith(DIFFERS)]
    notes = [note for note in table.notes if not note.startswith((DIFFERS, MEANING))]
    return PageTable(table.caption, groups if len(groups) > 1 else [], columns, rows, notes, differences)


def _looks(comparison: Comparison) -> dict[Row, int]:
    """Return the style index of each row: a color per method, then dashes and markers."""
    names, used = list(dict.fromkeys(row.method for row in comparison.rows)), Counter[int]()
    looks = {}
    for row in comparison.rows:
        color = names.index(row.method) % len(figures.PALETTE)
        looks[row] = color + len(figures.PALETTE) * used[color]
        used[color] += 1
    return looks


def _legend(comparison: Comparison) -> list[tuple[Markup, str]]:
    """Return the swatch and label of each row that is drawn as a line."""
    drawn = {row for (row, _), entry in comparison.entries.items() if len(entry.matrix) > 1}
    return [(figures.swatch(look), row.label) for row, look in _looks(comparison).items() if row in drawn]


def _entries(comparison: Comparison, place: ColumnGroup) -> list[tuple[int, Row, Entry]]:
    """Return the rows of a group of columns with their style index."""
    entries = comparison.entries
    return [(look, row, entries[row, place]) for row, look in _looks(comparison).items() if (row, place) in entries]


def _sections(comparison: Comparison) -> list[tuple[str, str, list[tuple[str, Markup]]]]:
    """Return title, text and figures of each section, a figure per group of columns."""
    subjects: list[tuple[str, str, Callable[[Comparison, ColumnGroup, str], Markup | None]]] = [
        ("Final accuracy", _FINAL, partial(_bars, FAA, "final average accuracy, %")),
        ("Average accuracy", _AVERAGE, _average),
        ("Forgetting", _FORGETTING, partial(_bars, FORGETTING, "forgetting, points")),
        ("Prompt similarity", _SIMILAR, partial(_bars, SIMILARITY, "prompt similarity")),
        ("More components", _MORE, _more),
    ]
    sections = []
    for subject, (title, text, draw) in enumerate(subjects):
        drawn = [
            (place.label, svg)
            for index, place in enumerate(comparison.places)
            if (svg := draw(comparison, place, f"s{subject}-{index}"))
        ]
        if drawn:
            sections.append((title, text, drawn))
    return sections


_FINAL = (
    "FAA ↑: average accuracy over all tasks after the last one, mean and standard deviation over seeds. The dotted "
    "line is a random guess. Outlined bars are not ranked: an upper bound, or a known error of published code (†)."
)
_AVERAGE = "Mean accuracy over all tasks learned so far, after each task. A single point at the end is an upper bound."
_FORGETTING = "↓ Points that earlier tasks lost from their best accuracy. Negative values are gains."
_SIMILAR = (
    "Mean cosine similarity between the prompts of different classes. The diamond shows it before training; only the "
    "change is meaningful, because random prompts differ. At 1.0 all classes get the same prompt (collapse)."
)
_MORE = "Prompt similarity by number of components. Dotted lines with hollow markers: before training."


def _bars(measure: Measure, axis: str, comparison: Comparison, place: ColumnGroup, key: str) -> Markup | None:
    drawn, texts = [], []
    for look, row, entry in _entries(comparison, place):
        value, start = entry.value(measure), entry.start(measure)
        if value is None:
            continue
        name = row.label + (MARKED if entry.marks else "")
        error = value[1] if len(entry.results) > 1 else None
        drawn.append(Bar(name, value[0], error, look, start, outlined=row.bound or bool(entry.marks)))
        spread = "" if error is None else f" ± {number(error, measure.digits)}"
        first = "" if start is None else f", {number(start, measure.digits)} at the start"
        texts.append(f"{name} {number(value[0], measure.digits)}{spread}{first}")
    if not drawn:
        return None
    digits, guess = 1 if measure.better else 2, _random_guess(comparison, place) if measure is FAA else None
    return figures.bars(drawn, axis, digits, key, f"Bar chart of {axis}: {'; '.join(texts)}.", guess)


def _average(comparison: Comparison, place: ColumnGroup, key: str) -> Markup | None:
    curves = [(index, row, entry.curve) for index, row, entry in _entries(comparison, place)]
    total = max((len(curve) for _, _, curve in curves), default=0)
    if total < 2:
        return None
    absent = {
        row: total - len(curve) if row.bound else 0 for _, row, curve in curves
    }  # a bound has a value for the last step only
    lines = [(row.label, Series([*[None] * absent[row], *curve], index)) for index, row, curve in curves]
    values = "; ".join(f"{row.label}: {', '.join(map(number, curve))}" for _, row, curve in curves)
    floor = figures.accuracy_floor([value for _, _, curve in curves for value in curve])
    description = f"Line chart of the average accuracy in percent after each task. {values}."
    return figures.named_curves(lines, total, floor, key, description)


def _more(comparison: Comparison, place: ColumnGroup, key: str) -> Markup | None:
    """Draw the similarity by number of components, if that is varied."""
    lines: dict[str, tuple[int, list[tuple[float, float, float | None]]]] = {}
    for index, row, entry in _entries(comparison, place):
        setting = [(name, value) for name, value in row.varied if name in COMPONENTS]
        value = entry.value(SIMILARITY)
        if len(setting) != 1 or not value or not isinstance(setting[0][1], int | float):
            continue
        rest = describe(tuple((name, value) for name, value in row.varied if name not in COMPONENTS))
        name = ", ".join((row.name, *rest))
        point = (float(setting[0][1]), value[0], entry.start(SIMILARITY))
        lines.setdefault(name, (index, []))[1].append(point)
    grown = [Growth(name, index, sorted(points)) for name, (index, points) in lines.items() if len(points) > 1]
    if not grown:
        return None
    values = "; ".join(
        f"{line.name}: " + ", ".join(f"{number(value, 3)} with {size:g}" for size, value, _ in line.points)
        for line in grown
    )
    description = f"Line chart of the prompt similarity by number of components. {values}."
    return figures.growth(grown, "components", "prompt similarity", key, description)


class TasksSection(NamedTuple):
    """Accuracy on each task over the steps, and the points that each row lost."""

    label: str
    panels: list[Markup]
    rows: list[tuple[Markup, str, list[str], str]]
    floor: str


def _tasks_section(comparison: Comparison, place: ColumnGroup) -> TasksSection | None:
    entries = [(index, row, entry) for index, row, entry in _entries(comparison, place) if len(entry.matrix) > 1]
    if not entries:
        return None
    total = max(len(entry.matrix) for _, _, entry in entries)
    floor = figures.accuracy_floor([float(np.nanmin(entry.matrix)) for _, _, entry in entries])
    at = comparison.places.index(place)
    panels = [_comparison_panel(entries, task, total, floor, f"t{at}-{task}") for task in range(total)]
    rows = []
    for index, row, entry in entries:
        drops = [number(value) for value in metrics.per_task_drop(entry.matrix)[:-1]]
        drops += [""] * (total - 1 - len(drops))
        forgetting = entry.value(FORGETTING)
        rows.append((figures.swatch(index), row.label, drops, number(forgetting[0]) if forgetting else ""))
    return TasksSection(place.label, panels, rows, f"{floor:.0f}")


def _comparison_panel(
    entries: Sequence[tuple[int, Row, Entry]], task: int, total: int, floor: float, key: str
) -> Markup:
    series, texts = [], []
    for index, row, entry in entries:
        if len(entry.matrix) <= task:
            continue
        values = [None if np.isnan(value) else float(value) for value in entry.matrix[task]]
        series.append(Series(values, index))
        texts.append(f"{row.label} from {number(values[task] or 0.0)} to {number(values[-1] or 0.0)}")
    description = f"Accuracy on task {task + 1} in percent: {'; '.join(texts)}."
    return figures.task_panel(series, total, floor, key, description)


def write_comparison(comparison: Comparison, out: Path) -> list[Path]:
    """Write the tables and the page into a folder."""
    if not comparison.results:
        raise UserError("No run is finished yet. Compare runs once they are.")
    makers: tuple[Callable[[Comparison], str], ...] = (markdown, latex, csv_table, render_comparison)
    return [
        write(out / name, make(comparison).encode("utf-8", "replace")) for name, make in zip(FILES, makers, strict=True)
    ]


def write_page(comparison: Comparison, path: Path) -> Path:
    """Put the tables into a page of Markdown and keep the rest of it."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    return write(path, fill_page(before, comparison).encode())
