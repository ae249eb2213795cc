"""The tables of the pages in results/, from records, as ``page_tables.toml`` lists them."""

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from probprompt.config import flatten
from probprompt.errors import UserError
from probprompt.report.compare import ColumnGroup, Row, read_result
from probprompt.report.tables import NOTHING, markdown_table, number
from probprompt.runs.run import RecordedRun, read_results
from reproduction.fidelity import fill, select, spread
from reproduction.results import preset_overrides, read_entries

SEEDS = 3  # the usual number; a cell with another number of runs states it
_MEASURES: tuple[tuple[str, int, Callable[[Mapping[str, Any]], float]], ...] = (
    ("Accuracy, %", 1, lambda run: run["accuracy"]),
    ("Forgetting, points", 1, lambda run: run["forgetting"]),
    ("Calibration error on fresh images, %", 1, lambda run: 100 * run["calibration_error"]),
    ("Calibration error reported by `learn`, %", 1, lambda run: 100 * run["calibration_error_told"]),
    ("Known images flagged as unknown, %", 1, lambda run: run["known_marked_percent"]),
    ("Unknown images flagged, %", 1, lambda run: run["unknown_marked_percent"]),
    ("AUROC of the score in use", 3, lambda run: run["auroc"]),
    ("AUROC of the largest probability", 3, lambda run: run["scores"]["largest probability"][0]),
    ("AUROC of the nearest class", 3, lambda run: run["scores"]["nearest class, prompted, unit, 0.3"][0]),
    ("False positive rate at 95% recall", 2, lambda run: run["fpr_at_95"]),
    ("First call of `learn`, s", 0, lambda run: run["lesson_seconds"][0]),
    ("Later calls, s", 1, lambda run: fmean(run["lesson_seconds"][1:])),
)


def fill_pages(folder: Path) -> dict[Path, str]:
    """Return the text of each page in a folder of results, with its table."""
    specs = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["table"]
    makers = {spec["page"]: partial(_table, folder, spec) for spec in specs}
    makers["classifier.md"] = partial(_classifier_table, folder / "classifier.jsonl")
    pages = {folder / name: make for name, make in makers.items() if (folder / name).is_file()}
    return {page: fill(page.read_text(encoding="utf-8"), make()) for page, make in pages.items()}


def _classifier_table(path: Path) -> str:
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = []
    for label, digits, measure in _MEASURES:
        values = [measure(run) for run in runs]
        rows.append((label, *(number(value, digits) for value in (*values, fmean(values)))))
    return markdown_table(("Measure", *(f"Seed {run['seed']}" for run in runs), "Mean"), rows)


def _table(folder: Path, spec: Mapping[str, Any]) -> str:
    """Set a table: a cell has the settings of its table, column and row, in this order."""
    rows = []
    for row in spec["rows"]:
        cells = [row["label"]]
        for column in spec["columns"]:
            fits = column["label"] in row.get("only", (column["label"],))
            settings = {**flatten(spec["settings"]), **flatten(column.get("settings", {})), **flatten(row["settings"])}
            cells.append(_cell(folder, column, settings) if fits else NOTHING)
        if set(cells[1:]) == {NOTHING}:
            raise UserError(f"{spec['page']}: no runs for the row {row['label']!r}; correct its settings")
        rows.append(cells)
    return markdown_table((spec["first"], *(column["label"] for column in spec["columns"])), rows)


def _cell(folder: Path, column: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return a mean over seeds, of runs that differ from their preset only as in settings."""
    values, digits = dict[int, float](), column.get("digits", 1)
    for run in (run for name in column["from"] for run in select(_runs(folder, name), **settings)):
        value = read_result(run, Row("", ""), ColumnGroup("", ""), 0).values.get(column.get("measure", "FAA"))
        if value is not None and preset_overrides(run.record).keys() <= {*settings, "data.validation"}:
            values.setdefault(run.record.config["seeds"]["order"], value)
    if not values or column.get("mean"):
        return number(fmean(values.values()), digits) if values else NOTHING
    text = spread(list(values.values()), digits)
    return text if len(values) == SEEDS else f"{text} ({len(values)})"


@cache
def _runs(folder: Path, name: str) -> list[RecordedRun]:
    """Read a file of runs, or all runs with a file each."""
    return (
        read_results(folder / f"{name}.jsonl") if name != "runs" else [each.recorded for each in read_entries(folder)]
    )
