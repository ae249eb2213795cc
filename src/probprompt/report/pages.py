"""The page of a report: run folders are read and checked, put into words, and set in HTML."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from probprompt.errors import UserError, shorten
from probprompt.evaluation import metrics
from probprompt.report import figures
from probprompt.report.compare import (
    FAA,
    FILES,
    FORGETTING,
    MARKED,
    SIMILARITY,
    ColumnGroup,
    Comparison,
    Entry,
    Measure,
    Row,
    Table,
)
from probprompt.report.figures import Bar, Growth, Series
from probprompt.report.formats import count, duration, number, percent
from probprompt.report.reading import Run, Similarity, read_runs
from probprompt.runs.grid import describe
from probprompt.storage import write_bytes, write_error


def _plain(value: object) -> str:
    if value is None or value == "":
        return "—"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value) or "—"
    return str(value)


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Give the leaves of nested settings, with their full names."""
    if isinstance(value, dict) and (value or not name):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, None if value == {} else value


def _rows(content: dict[str, Any]) -> list[dict[str, str]]:
    """Rows of a table; a hash is cut short, and its full value kept for the title."""
    rows = []
    for name, value in _flat(content):
        text = _plain(value)
        digest = bool(re.search(r"sha256|hash", name)) and len(text) > 16
        rows.append({"name": name, "text": text[:12] + "…" if digest else text, "full": text if digest else ""})
    return rows


def _seconds(run: Run) -> float | None:
    seconds = run.record.time.get("total_s")
    return float(seconds) if isinstance(seconds, int | float) else None


def _headline(run: Run) -> str:
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


def _badges(run: Run) -> list[str]:
    badges = [] if run.finished else [f"unfinished: {run.steps} of {count(run.total, 'task')}"]
    if run.record.evaluated_on != "test":
        badges.append(f"evaluated on {run.record.evaluated_on} images")
    badges += run.record.marks
    if run.record.audit:
        leaks = ", ".join(map(str, run.record.audit.get("leaks", [])))
        badges.append(f"audited: LEAKS ({leaks})" if leaks else "audited: predictions depend on their own image alone")
    return badges


# Comparing


def _distinct(runs: Sequence[Run], value: Callable[[Run], object]) -> bool:
    return len({json.dumps(value(run), sort_keys=True, default=str) for run in runs}) > 1


def _each(runs: Sequence[Run], value: Callable[[Run], object]) -> str:
    return ", ".join(f"{_plain(value(run))} ({run.label})" for run in runs)


def differences(runs: Sequence[Run]) -> list[str]:
    """Reasons why the numbers of these runs must not be set against each other."""
    reasons = []
    if _distinct(runs, lambda run: run.benchmark):
        reasons.append("The benchmarks differ: " + _each(runs, lambda run: run.benchmark) + ".")
    if _distinct(runs, lambda run: run.total):
        reasons.append("The numbers of tasks differ: " + _each(runs, lambda run: run.total) + ".")
    elif _distinct(runs, lambda run: [sorted(task) for task in run.record.stream.tasks]):
        reasons.append("The tasks do not hold the same classes in the same order.")
    if _distinct(runs, lambda run: run.record.evaluated_on):
        reasons.append(
            "Not all were evaluated on the same images: " + _each(runs, lambda run: run.record.evaluated_on) + "."
        )
    elif not reasons and _distinct(runs, lambda run: run.record.stream.split_hash):
        reasons.append("The division into training and test images differs.")
    return reasons


def _caveats(runs: Sequence[Run]) -> list[str]:
    """Differences that are allowed in a comparison, but that its reader must know."""
    notes = []
    if _distinct(runs, lambda run: run.record.backbone.get("sha256") or run.record.backbone.get("name")):
        names = _each(runs, lambda run: run.record.backbone.get("name"))
        notes.append(f"The backbones differ: {names}. The method is not the only cause of a difference.")
    if _distinct(runs, lambda run: run.record.preprocessing):
        notes.append("The preprocessing of the images differs: see the provenance of each run.")
    if not all(run.finished for run in runs):
        notes.append("An unfinished run has had fewer tasks to forget: only finished runs are ranked.")
    for run in runs:
        notes += [f"{run.label} must not be ranked. {mark.capitalize()}." for mark in run.record.marks]
    notes.append("Each row is a single run: a difference of a few points may be chance.")
    return notes


def _best(runs: Sequence[Run], value: Callable[[Run], float | None], sign: int) -> set[int]:
    """Find the runs that are best to the digits shown; none where all are level."""
    values = {run.index: round(v, 2) * sign for run in runs if _ranked(run) and (v := value(run)) is not None}
    if len(set(values.values())) < 2:
        return set()
    return {index for index, v in values.items() if v == max(values.values())}


def _ranked(run: Run) -> bool:
    """Whether it stands for a ranking: all tasks learned, and nothing published that is wrong was asked for."""
    return run.finished and not run.record.marks


def _table(runs: Sequence[Run], ranked: bool) -> list[dict[str, Any]]:
    measures: list[tuple[Callable[[Run], float | None], int]] = [
        (lambda run: run.accuracy.final, 1),
        (lambda run: run.accuracy.cumulative, 1),
        (lambda run: run.accuracy.forgetting, -1),
    ]
    best = [_best(runs, value, sign) if ranked else set() for value, sign in measures]
    rows = []
    for run in runs:
        cells = [
            {"text": "—" if (v := value(run)) is None else number(v, 2), "best": run.index in marked}
            for (value, _), marked in zip(measures, best, strict=True)
        ]
        seconds = _seconds(run)
        trainable = run.record.trainable_parameters
        rows.append(
            _identity(run)
            | {"cells": cells, "badges": _badges(run)}
            | {"time": "—" if seconds is None else duration(seconds)}
            | {"parameters": "—" if trainable is None else f"{trainable:,}"}
        )
    return rows


def _verdict(runs: Sequence[Run]) -> str:
    ranked = sorted((run for run in runs if run.finished), key=lambda run: -run.accuracy.final)
    if len(ranked) < 2:
        return " ".join(_headline(run) for run in runs)
    first, second = ranked[0], ranked[1]
    setting = f"After {count(first.total, 'task')}, "
    gap = round(first.accuracy.final, 2) - round(second.accuracy.final, 2)
    if gap < 0.005:
        both = f"{first.label} and {second.label} are level"
        return f"{setting}{both} at {percent(first.accuracy.final)} average accuracy."
    points = number(gap, 1 if gap >= 0.05 else 2)
    rest = f"{points} points above {second.label}"
    rest += f", the next of {len(ranked)} runs" if len(ranked) > 2 else ""
    share = f"{percent(first.accuracy.final)} of the {first.record.evaluated_on} images"
    return f"{setting}{first.label} recognises {share} on average, {rest}."


def _config_differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    settings = [dict(_flat(run.record.config)) for run in runs]
    names = list(dict.fromkeys(name for flat in settings for name in flat))
    rows = [
        {"name": name, "values": [_plain(flat[name]) if name in flat else "not set" for flat in settings]}
        for name in names
    ]
    return [row for row in rows if len(set(row["values"])) > 1 and row["name"] != "name"]


# Sections


def _identity(run: Run) -> dict[str, Any]:
    return {"label": run.label, "anchor": f"run-{run.index + 1}", "swatch": Markup(figures.swatch(run.index))}


def _floor(runs: Sequence[Run]) -> float:
    return figures.accuracy_floor([v for run in runs for row in run.accuracy.matrix for v in row if v is not None])


def _curves(runs: Sequence[Run], key: str) -> dict[str, Any]:
    """Average accuracy after each step, and the accuracy on each task, of all given runs."""
    floor, total = _floor(runs), max(run.total for run in runs)
    words = "; ".join(f"{run.label}: {', '.join(number(v) for v in run.accuracy.averages)}" for run in runs)
    average = figures.average_curves(
        [Series(run.accuracy.averages, run.index) for run in runs],
        total,
        floor,
        f"{key}-average",
        f"Line chart of the average accuracy in percent after each task. {words}.",
    )
    panels = [_panel(runs, task, floor, key) for task in range(max(run.steps for run in runs))]
    return {
        "average": Markup(average),
        "legend": [_identity(run) | {"value": number(run.accuracy.final)} for run in runs],
        "panels": panels,
        "floor": f"{floor:.0f}",
    }


def _panel(runs: Sequence[Run], task: int, floor: float, key: str) -> dict[str, Any]:
    series, legend, words = [], [], []
    for run in runs:
        if run.steps <= task:
            continue
        line = Series(run.accuracy.matrix[task][: run.steps], run.index)
        values = line.points[1]
        drop = number(values[0] - values[-1])
        series.append(line)
        legend.append(_identity(run) | {"drop": drop})
        words.append(f"{run.label} from {number(values[0])} to {number(values[-1])}, drop {drop}")
    total = max(run.total for run in runs)
    description = f"Accuracy on task {task + 1} in percent: {'; '.join(words)}."
    svg = figures.task_panel(series, total, floor, f"{key}-task-{task + 1}", description)
    return {"task": task + 1, "svg": Markup(svg), "legend": legend}


def _matrix(run: Run, floor: float) -> dict[str, Any]:
    def cell(value: float | None) -> dict[str, str] | None:
        if value is None:
            return None
        background, ink = figures.shade(value, floor, 100.0)
        return {"text": "100" if value >= 99.95 else number(value), "background": background, "ink": ink}

    rows = [[cell(value) for value in row[: run.steps]] for row in run.accuracy.matrix[: run.steps]]
    key = [figures.shade(floor + (100.0 - floor) * part / 6, floor, 100.0)[0] for part in range(7)]
    averages = [number(value) for value in run.accuracy.averages]
    return {"rows": rows, "averages": averages, "floor": f"{floor:.0f}", "key": key, "dense": run.steps > 10}


def _mean_similarity(part: Similarity) -> str:
    mean = f"mean {number(part.mean, 2)}"
    return mean if part.initial_mean is None else f"{mean}, {number(part.initial_mean, 2)} at initialisation"


def _similarity(run: Run, low: float) -> dict[str, Any] | None:
    part = run.diagnostics.similarity
    if part is None:
        return None
    key = f"run-{run.index + 1}"
    words = _mean_similarity(part)
    heat = figures.similarity_map(
        part.matrix,
        part.labels,
        low,
        f"{key}-similarity",
        f"Heat map of the cosine similarity between the prompts of {len(part.labels)} classes; {words}.",
    )
    blocks = list(part.per_block.items())
    bars = ""
    if len(blocks) > 1:
        spoken = ", ".join(f"block {name}: {number(value, 2)}" for name, value in blocks)
        bars = figures.block_bars(
            blocks, part.mean, f"{key}-blocks", f"Bar chart of the mean similarity by block. {spoken}."
        )
    numbers = [("Mean similarity", part.mean, part.initial_mean, 2)]
    if part.effective_rank is not None:
        numbers.append(("Effective rank", part.effective_rank, part.initial_effective_rank, 1))
    shown = [
        (name, number(value, digits), None if start is None else number(start, digits))
        for name, value, start, digits in numbers
    ]
    return {"svg": Markup(heat), "bars": Markup(bars), "numbers": shown, "classes": len(part.labels)}


def _relevance(run: Run) -> dict[str, Any] | None:
    part = run.diagnostics.relevance
    if part is None:
        return None
    spoken = ", ".join(
        f"block {block}: {number(value, 2)}" for block, value in zip(part.blocks, part.entropy, strict=True)
    )
    svg = figures.relevance_map(
        part.usage,
        part.blocks,
        part.entropy,
        part.max_weight,
        f"run-{run.index + 1}-relevance",
        f"Heat map of the use of {len(part.usage[0])} prompt distributions by block. Entropy by {spoken}.",
    )
    size = len(part.usage[0])
    mean = math.fsum(part.entropy) / len(part.entropy)
    return {
        "svg": Markup(svg),
        "number": size,
        "even": f"{100 / size:.3g}",
        "entropy": number(mean, 2),
        "weight": bool(part.max_weight),
    }


def _queries(run: Run) -> dict[str, Any] | None:
    part = run.diagnostics.queries
    if part is None:
        return None
    present = sorted(set(part.labels))
    svg = figures.query_scatter(
        part.points,
        part.labels,
        f"run-{run.index + 1}-queries",
        f"Scatter plot ({part.embedding}) of {len(part.points)} queries of {count(len(present), 'class')}.",
    )
    legend = [(Markup(figures.swatch(index, line=False)), part.names[index]) for index in present]
    return {"svg": Markup(svg), "legend": legend, "embedding": part.embedding, "task": part.task}


def _loss(run: Run) -> Markup | None:
    finite = [value for task in run.losses for _, value in task if math.isfinite(value)]
    if not finite:
        return None
    words = f"Line chart of the training loss, from {finite[0]:.3g} to {finite[-1]:.3g}."
    return Markup(figures.loss_curve(run.losses, run.index, f"run-{run.index + 1}-loss", words))


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    record, accuracy = run.record, run.accuracy
    tiles = [
        ("Final average (FAA)", percent(accuracy.final, 2), "mean over the tasks after the last step"),
        (
            "Cumulative average (CAA)",
            percent(accuracy.cumulative, 2),
            "mean of the averages after each step",
        ),
    ]
    if accuracy.forgetting is not None and run.steps > 1:
        tiles.append(("Forgetting", number(accuracy.forgetting, 2), "points below the best, on earlier tasks"))
    if record.trainable_parameters is not None:
        whole = run.backbone_size
        about = [f"{100 * record.trainable_parameters / whole:.2g}\u00a0% of the backbone's"] if whole else []
        if record.model_mb:
            use, learn = (_size(record.model_mb[part]) for part in ("use", "learn"))
            about.append(f"{use} on disk, {learn} to learn on")
        tiles.append(("Trained parameters", f"{record.trainable_parameters:,}", "; ".join(about)))
    seconds = _seconds(run)
    if seconds is not None:
        memory = record.peak_memory_mb
        tiles.append(("Time", duration(seconds), "" if memory is None else f"{memory:,.0f} MB at most"))
    return tiles


def _size(megabytes: float) -> str:
    if megabytes < 1:
        return f"{number(1000 * megabytes, 0)}\u00a0kB"
    return f"{number(megabytes, 1)}\u00a0MB"


def _provenance(run: Run) -> list[tuple[str, list[dict[str, str]]]]:
    record = run.record
    seconds = {k.removesuffix("_s"): duration(v) for k, v in record.time.items() if isinstance(v, int | float)}
    memory = {} if record.peak_memory_mb is None else {"peak memory": f"{record.peak_memory_mb:,.0f} MB"}
    size = {} if run.backbone_size is None else {"parameters": f"{run.backbone_size:,}"}
    groups = {
        "Run": {"name": record.name, "created": record.created.replace("T", " "), "evaluated on": record.evaluated_on},
        "Backbone": record.backbone | size,
        "Preprocessing": record.preprocessing,
        "Stream": {"class order hash": record.stream.order_hash, "split hash": record.stream.split_hash},
        "Time and memory": seconds | memory,
        "Hardware": record.hardware,
        "Versions": record.versions,
    }
    return [(title, _rows(content)) for title, content in groups.items() if content]


def _tasks(run: Run) -> list[dict[str, Any]]:
    stream = run.record.stream

    def images(counts: list[int], task: int) -> str:
        return f"{counts[task]:,}" if task < len(counts) else "—"

    return [
        {
            "number": task + 1,
            "classes": classes,
            "train": images(stream.train_images, task),
            "test": images(stream.test_images, task),
        }
        for task, classes in enumerate(stream.tasks)
    ]


def _view(run: Run, peers: Sequence[Run], low: float) -> dict[str, Any]:
    """All that the page says about one run, on one colour scale with the runs it is compared with."""
    return _identity(run) | {
        "headline": _headline(run),
        "setting": ([] if len(peers) > 1 else _stream_words(run)) + _model_words(run),
        "images": run.record.evaluated_on,
        "badges": _badges(run),
        "tiles": _tiles(run),
        "matrix": _matrix(run, _floor(peers)),
        "curves": _curves([run], f"run-{run.index + 1}") if len(peers) == 1 and run.total > 1 else None,
        "similarity": _similarity(run, low),
        "relevance": _relevance(run),
        "queries": _queries(run),
        "loss": _loss(run),
        "config": _rows(run.record.config),
        "provenance": _provenance(run),
        "tasks": _tasks(run),
        "skipped": run.record.skipped,
    }


def _similarity_floor(runs: Sequence[Run]) -> float:
    """One colour scale for the similarities of all runs: from 0, or lower where some are negative, to 1."""
    parts = [run.diagnostics.similarity for run in runs]
    lowest = min((value for part in parts if part for row in part.matrix for value in row), default=0.0)
    return min(0.0, math.floor(lowest * 10) / 10)


def _stream_words(run: Run) -> list[str]:
    """Say in a few words what was to be learned."""
    classes = len({name for task in run.record.stream.tasks for name in task})
    words = [run.benchmark, count(run.total, "task"), count(classes, "class")]
    return [word for word in words if word]


def _model_words(run: Run) -> list[str]:
    """Say in a few words what learned it."""
    words = [f"method {run.method}" if run.method else "", str(run.record.backbone.get("name") or "")]
    return [word for word in words if word]


def _comparison(runs: Sequence[Run], reasons: Sequence[str]) -> dict[str, Any]:
    """All that the page says about the runs together; reasons forbid ranking them and drawing them as one."""
    rows = _table(runs, ranked=not reasons)
    return {
        "reasons": reasons,
        "caveats": [] if reasons else _caveats(runs),
        "rows": rows,
        "starred": any(cell["best"] for row in rows for cell in row["cells"]),
        "curves": _curves(runs, "all") if not reasons and runs[0].total > 1 else None,
        "settings": _config_differences(runs),
    }


def render_runs(runs: Sequence[Run]) -> str:
    """Set the runs in one HTML page."""
    several = len(runs) > 1
    reasons = differences(runs) if several else []
    headline = _verdict(runs) if several else _headline(runs[0])
    if reasons:
        headline = "These runs did not learn the same thing, so their numbers cannot be set against each other."
    low = _similarity_floor(runs)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = resources.files("probprompt.report").joinpath("report.html.jinja").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        title=" · ".join(run.label for run in runs),
        headline=headline,
        setting=[] if reasons else _stream_words(runs[0]) + ([] if several else _model_words(runs[0])),
        created=sorted({run.record.created[:10] for run in runs if run.record.created}),
        comparison=_comparison(runs, reasons) if several else None,
        runs=[_view(run, [run] if reasons else runs, low) for run in runs],
    )
    return figures.UNPRINTABLE.sub("�", page)


# Writing


def write(path: Path, content: bytes) -> Path:
    """Write a file, in a new folder if need be; what stands in the way is told in words."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise write_error(path, problem) from problem
    write_bytes(path, content)
    return path


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the page; see probprompt.report.write_report."""
    return write(Path(out), render_runs(read_runs(runs)).encode("utf-8"))


def save_overview(runs: Sequence[Path], out: Path) -> Path:
    """Save the picture; see probprompt.report.save_overview."""
    out = Path(out)
    kind = out.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise UserError(f"{out} must end in .png or .svg: that says which kind of picture to save")
    read = read_runs(runs)
    reasons = differences(read)
    if reasons:
        raise UserError("these runs cannot share one picture. " + " ".join(reasons))
    return write(out, figures.overview(_overview(read), kind))


def _overview(runs: Sequence[Run]) -> figures.Overview:
    first, shown = runs[0], next((run for run in runs if run.diagnostics.similarity), None)
    similarity = shown.diagnostics.similarity if shown else None
    words = ""
    if shown and similarity:
        words = f"{shown.label}, {_mean_similarity(similarity)}"
    return figures.Overview(
        lines=[(run.label, Series(run.accuracy.averages, run.index)) for run in runs],
        total=first.total,
        floor=_floor(runs),
        matrix=[row[: first.steps] for row in first.accuracy.matrix[: first.steps]],
        matrix_of=first.label,
        similarity=similarity.matrix if similarity else None,
        similarity_of=words,
    )


COMPONENTS = ("method.components", "method.components_per_task")


def render_comparison(comparison: Comparison) -> str:
    """Set the comparison in one self-contained HTML page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages = resources.files("probprompt.report")
    template = pages.joinpath("comparison.html.jinja").read_text(encoding="utf-8")
    # The report's own style sheet: the two pages look alike.
    style = re.search(r"<style>\n(.*?)</style>", pages.joinpath("report.html.jinja").read_text("utf-8"), re.DOTALL)
    made = environment.from_string(template).render(
        style=Markup(style[1] if style else ""),
        title=_title(comparison),
        headline=" ".join(filter(None, (_comparison_verdict(comparison, place) for place in comparison.places))),
        setting=_setting(comparison),
        created=sorted({str(result.record.get("created", ""))[:10] for result in comparison.results} - {""}),
        failed=comparison.failed,
        tables=[_comparison_table(comparison, table) for table in comparison.tables()],
        legend_items=_legend(comparison),
        sections=_sections(comparison),
        tasks=[part for place in comparison.places if (part := _tasks_section(comparison, place))],
    )
    return figures.UNPRINTABLE.sub("�", made)


# Words


def _title(comparison: Comparison) -> str:
    names = list(dict.fromkeys(row.name for row in comparison.rows))
    where = list(dict.fromkeys(place.benchmark for place in comparison.places))
    what = count(len(names), "method") if len(names) > 2 else " and ".join(names)
    return f"{what} on {', '.join(where) if len(where) < 4 else count(len(where), 'benchmark')}"


def _setting(comparison: Comparison) -> list[str]:
    presets = list(dict.fromkeys(place.preset for place in comparison.places))
    words = [f"preset{'s' if len(presets) > 1 else ''} {', '.join(presets)}"]
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
    where = f"On {place.benchmark} ({place.preset}), "
    gap = round(first, 2) - round(second, 2)
    if gap < 0.005:
        level = [row.label for (value, _), row in ranked if round(value, 2) == round(first, 2)]
        return f"{where}{' and '.join(level[:2]) if len(level) < 3 else shorten(level)} are level at {percent(first)}."
    less = ", less than the spread over the seeds" if gap < max(spread, other) else ""
    points = number(gap, 1 if gap >= 0.05 else 2)
    return f"{where}{best.label} ends at {percent(first)} on average, {points} points above {next_best.label}{less}."


# Tables


def _comparison_table(comparison: Comparison, table: Table) -> dict[str, Any]:
    groups = [{"label": place.label, "width": width} for place, width in table.places]
    starts = {sum(width for _, width in table.places[:group]) for group in range(1, len(groups))}
    rows = [
        {
            "label": row.label,
            "bound": row.bound,
            "swatch": _swatch(comparison, row),
            "cells": [
                {"text": shown.text, "sign": shown.sign, "rank": shown.rank, "first": place in starts}
                for place, shown in enumerate(cells)
            ],
        }
        for row, cells in table.rows
    ]
    columns = [{"name": measure.heading, "first": place in starts} for place, (_, measure) in enumerate(table.columns)]
    heads = {"groups": groups if len(groups) > 1 else [], "columns": columns}
    return {"caption": table.caption, **heads, "rows": rows, "notes": table.notes}


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


def _swatch(comparison: Comparison, row: Row) -> Markup:
    return Markup(figures.swatch(_looks(comparison)[row]))


def _legend(comparison: Comparison) -> list[dict[str, Any]]:
    """The look of each row that is drawn line by line."""
    drawn = {row for (row, _), entry in comparison.entries.items() if len(entry.matrix) > 1}
    return [{"label": row.label, "swatch": _swatch(comparison, row)} for row in comparison.rows if row in drawn]


def _here(comparison: Comparison, place: ColumnGroup) -> list[tuple[int, Row, Entry]]:
    """The rows of a place, with the index of their look."""
    found = ((look, row, comparison.entries.get((row, place))) for row, look in _looks(comparison).items())
    return [(look, row, entry) for look, row, entry in found if entry]


def _sections(comparison: Comparison) -> list[dict[str, Any]]:
    """Pictures by subject, one of each place."""
    subjects: list[tuple[str, str, Callable[[Comparison, ColumnGroup, str], str]]] = [
        ("Final accuracy", _FINAL, _final),
        ("Average accuracy", _AVERAGE, _average),
        ("Forgetting", _FORGETTING, _forgetting),
        ("Prompt similarity", _SIMILAR, _similarity_section),
        ("More components", _MORE, _more),
    ]
    found = []
    for subject, (title, text, draw) in enumerate(subjects):
        drawn = [
            {"label": place.label, "svg": Markup(svg)}
            for index, place in enumerate(comparison.places)
            if (svg := draw(comparison, place, f"s{subject}-{index}"))
        ]
        if drawn:
            found.append({"title": title, "text": text, "figures": drawn})
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


def _bars(comparison: Comparison, place: ColumnGroup, measure: Measure, axis: str, key: str) -> str:
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
        return ""
    digits = 1 if measure.better else 2
    return figures.bars(drawn, axis, digits, key, f"Bar chart of {axis}: {'; '.join(words)}.")


def _final(comparison: Comparison, place: ColumnGroup, key: str) -> str:
    return _bars(comparison, place, FAA, "final average accuracy, %", key)


def _forgetting(comparison: Comparison, place: ColumnGroup, key: str) -> str:
    return _bars(comparison, place, FORGETTING, "forgetting, points", key)


def _similarity_section(comparison: Comparison, place: ColumnGroup, key: str) -> str:
    return _bars(comparison, place, SIMILARITY, "prompt similarity", key)


def _comparison_floor(here: Sequence[tuple[int, Row, Entry]]) -> float:
    return figures.accuracy_floor([float(np.nanmin(entry.matrix)) for _, _, entry in here])


def _average(comparison: Comparison, place: ColumnGroup, key: str) -> str:
    here = _here(comparison, place)
    total = max((len(entry.curve) for _, _, entry in here), default=0)
    if total < 2:
        return ""
    lines, words = [], []
    for index, row, entry in here:
        curve = entry.curve
        at_once = row.bound and len(curve) < total  # known in the end only
        values: list[float | None] = [*([None] * (total - len(curve)) if at_once else []), *curve]
        lines.append((row.label, Series(values, index)))
        words.append(f"{row.label}: {', '.join(number(value) for value in curve)}")
    floor = figures.accuracy_floor([value for _, _, entry in here for value in entry.curve])
    description = f"Line chart of the average accuracy in percent after each task. {'; '.join(words)}."
    return figures.named_curves(lines, total, floor, key, description)


def _more(comparison: Comparison, place: ColumnGroup, key: str) -> str:
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
        return ""
    words = "; ".join(
        f"{line.name}: " + ", ".join(f"{number(value, 3)} with {size:g}" for size, value, _ in line.points)
        for line in grown
    )
    description = f"Line chart of the prompt similarity against the number of components. {words}."
    return figures.growth(grown, "components", "prompt similarity", key, description)


# Task by task


def _tasks_section(comparison: Comparison, place: ColumnGroup) -> dict[str, Any] | None:
    """The course of each task under all methods, and what each lost of it."""
    here = [(index, row, entry) for index, row, entry in _here(comparison, place) if len(entry.matrix) > 1]
    if not here:
        return None
    total, floor = max(len(entry.matrix) for _, _, entry in here), _comparison_floor(here)
    at = comparison.places.index(place)
    panels = [
        {"task": task + 1, "svg": Markup(_comparison_panel(here, task, total, floor, f"t{at}-{task}"))}
        for task in range(total)
    ]
    rows = []
    for index, row, entry in here:
        drops = [number(value) for value in metrics.per_task_drop(entry.matrix)[:-1]]
        drops += [""] * (total - 1 - len(drops))
        forgetting = entry.value(FORGETTING)
        mean = number(forgetting[0]) if forgetting else ""
        rows.append({"label": row.label, "swatch": Markup(figures.swatch(index)), "drops": drops, "forgetting": mean})
    return {"label": place.label, "panels": panels, "rows": rows, "total": total, "floor": f"{floor:.0f}"}


def _comparison_panel(here: Sequence[tuple[int, Row, Entry]], task: int, total: int, floor: float, key: str) -> str:
    series, words = [], []
    for index, row, entry in here:
        if len(entry.matrix) <= task:
            continue
        values = [None if np.isnan(value) else float(value) for value in entry.matrix[task]]
        series.append(Series(values, index))
        words.append(f"{row.label} from {number(values[task] or 0.0)} to {number(values[-1] or 0.0)}")
    description = f"Accuracy on task {task + 1} in percent: {'; '.join(words)}."
    return figures.task_panel(series, total, floor, key, description)


# Writing


def write_comparison(comparison: Comparison, out: Path) -> list[Path]:
    """Write the tables and the page into a folder."""
    pass
    from probprompt.report.tables import csv_table, latex, markdown

    if not comparison.results:
        raise UserError("no run is finished: there is nothing to compare")
    makers: dict[str, Callable[[Comparison], str]] = dict(
        zip(FILES, (markdown, latex, csv_table, render_comparison), strict=True)
    )
    return [write(out / name, make(comparison).encode("utf-8", "replace")) for name, make in makers.items()]


def write_page(comparison: Comparison, path: Path) -> Path:
    """Put the tables into a page of Markdown; what else stands in it stays."""
    from probprompt.report.tables import fill_page

    before = path.read_text(encoding="utf-8") if path.exists() else ""
    return write(path, fill_page(before, comparison).encode())
