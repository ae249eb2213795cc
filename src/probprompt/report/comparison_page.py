"""The page of a comparison: its tables, and pictures of all methods over each other."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from probprompt.errors import shorten
from probprompt.evaluation import metrics
from probprompt.report import figures, page
from probprompt.report.comparison import (
    FAA,
    FORGETTING,
    MARKED,
    SIMILARITY,
    Comparison,
    Entry,
    Measure,
    Place,
    Row,
    Table,
)
from probprompt.report.figures import Bar, Growth, Series
from probprompt.runs.grid import describe

count, number, percent = page.count, page.number, page.percent
COMPONENTS = ("method.components", "method.components_per_task")


def render(comparison: Comparison) -> str:
    """Set the comparison in one self-contained HTML page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages = resources.files("probprompt.report")
    template = pages.joinpath("comparison.html.jinja").read_text(encoding="utf-8")
    # The report's own style sheet: the two pages look alike.
    style = re.search(r"<style>\n(.*?)</style>", pages.joinpath("report.html.jinja").read_text("utf-8"), re.DOTALL)
    made = environment.from_string(template).render(
        style=Markup(style[1] if style else ""),
        title=_title(comparison),
        headline=" ".join(filter(None, (_verdict(comparison, place) for place in comparison.places))),
        setting=_setting(comparison),
        created=sorted({str(result.record.get("created", ""))[:10] for result in comparison.results} - {""}),
        failed=comparison.failed,
        tables=[_table(comparison, table) for table in comparison.tables()],
        legend_items=_legend(comparison),
        sections=_sections(comparison),
        tasks=[part for place in comparison.places if (part := _tasks(comparison, place))],
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


def _verdict(comparison: Comparison, place: Place) -> str:
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


def _table(comparison: Comparison, table: Table) -> dict[str, Any]:
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


def _here(comparison: Comparison, place: Place) -> list[tuple[int, Row, Entry]]:
    """The rows of a place, with the index of their look."""
    found = ((look, row, comparison.entries.get((row, place))) for row, look in _looks(comparison).items())
    return [(look, row, entry) for look, row, entry in found if entry]


def _sections(comparison: Comparison) -> list[dict[str, Any]]:
    """Pictures by subject, one of each place."""
    subjects: list[tuple[str, str, Callable[[Comparison, Place, str], str]]] = [
        ("Final accuracy", _FINAL, _final),
        ("Average accuracy", _AVERAGE, _average),
        ("Forgetting", _FORGETTING, _forgetting),
        ("Prompt similarity", _SIMILAR, _similarity),
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


def _bars(comparison: Comparison, place: Place, measure: Measure, axis: str, key: str) -> str:
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


def _final(comparison: Comparison, place: Place, key: str) -> str:
    return _bars(comparison, place, FAA, "final average accuracy, %", key)


def _forgetting(comparison: Comparison, place: Place, key: str) -> str:
    return _bars(comparison, place, FORGETTING, "forgetting, points", key)


def _similarity(comparison: Comparison, place: Place, key: str) -> str:
    return _bars(comparison, place, SIMILARITY, "prompt similarity", key)


def _floor(here: Sequence[tuple[int, Row, Entry]]) -> float:
    return figures.accuracy_floor([float(np.nanmin(entry.matrix)) for _, _, entry in here])


def _average(comparison: Comparison, place: Place, key: str) -> str:
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


def _more(comparison: Comparison, place: Place, key: str) -> str:
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


def _tasks(comparison: Comparison, place: Place) -> dict[str, Any] | None:
    """The course of each task under all methods, and what each lost of it."""
    here = [(index, row, entry) for index, row, entry in _here(comparison, place) if len(entry.matrix) > 1]
    if not here:
        return None
    total, floor = max(len(entry.matrix) for _, _, entry in here), _floor(here)
    at = comparison.places.index(place)
    panels = [
        {"task": task + 1, "svg": Markup(_panel(here, task, total, floor, f"t{at}-{task}"))} for task in range(total)
    ]
    rows = []
    for index, row, entry in here:
        drops = [number(value) for value in metrics.per_task_drop(entry.matrix)[:-1]]
        drops += [""] * (total - 1 - len(drops))
        forgetting = entry.value(FORGETTING)
        mean = number(forgetting[0]) if forgetting else ""
        rows.append({"label": row.label, "swatch": Markup(figures.swatch(index)), "drops": drops, "forgetting": mean})
    return {"label": place.label, "panels": panels, "rows": rows, "total": total, "floor": f"{floor:.0f}"}


def _panel(here: Sequence[tuple[int, Row, Entry]], task: int, total: int, floor: float, key: str) -> str:
    series, words = [], []
    for index, row, entry in here:
        if len(entry.matrix) <= task:
            continue
        values = [None if np.isnan(value) else float(value) for value in entry.matrix[task]]
        series.append(Series(values, index))
        words.append(f"{row.label} from {number(values[task] or 0.0)} to {number(values[-1] or 0.0)}")
    description = f"Accuracy on task {task + 1} in percent: {'; '.join(words)}."
    return figures.task_panel(series, total, floor, key, description)
