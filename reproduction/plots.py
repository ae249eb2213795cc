"""Plots of recorded benchmarks as PNG: cost of methods, and growth of cost."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from probprompt.bench.results import BenchRecord, Curve, Entry
from probprompt.bench.timing import STAGES
from probprompt.engine.hardware import machine_name
from probprompt.report.figures import INK, MARKERS, MUTED, PAGE, PALETTE, label, styled
from reproduction.scaling import COSTS

STAGE_COLORS = (*PALETTE, "#a9b0ba")
WARNING = "#a3161f"


def to_png(figure: Figure) -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def _title(figure: Figure, record: BenchRecord, about: Entry | Curve, before: str, after: str) -> None:
    text = f"{before}{about['backbone']}, {about['precision']}, {machine_name(record['hardware'])}{after}"
    figure.suptitle(text, x=0.01, ha="left", color=MUTED, fontsize=10)


@styled
def draw_methods(record: BenchRecord) -> bytes:
    """Draw speed, shares of the stages and memory of every method of a record."""
    results = record["results"]
    figure = Figure(figsize=(13, 1.9 + 0.42 * len(results)), layout="constrained", facecolor="white")
    speed, stages, memory = figure.subplots(1, 3, sharey=True, width_ratios=(1.2, 1.2, 0.8))
    _speed_bars(speed, results)
    _stage_bars(stages, results)
    sizes = [(entry["memory"]["training_peak"] or 0) / 2**20 for entry in results]
    _bars(memory, range(len(results)), sizes, 0.62, color=PALETTE[2])
    memory.margins(x=0.25)
    texts = ("images/s", "% of a training step, stages timed separately", "peak memory in training, MiB")
    for axes, text in zip((speed, stages, memory), texts, strict=True):
        axes.grid(False, axis="y")
        axes.set_xlabel(text)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, handlelength=1)
    speed.set_yticks(range(len(results)), [label(entry["method"], 24) for entry in results], color=INK)
    speed.set_ylim(len(results) - 0.5, -0.5)
    first = results[0]
    _title(figure, record, first, "", f", images of {first['image_size']} px, batch {first['batch']}")
    return to_png(figure)


def _bars(axes: Axes, places: Sequence[float], values: Sequence[float], height: float, **look: Any) -> None:
    """Draw horizontal bars with their values; zero means not measured."""
    axes.barh(places, values, height, zorder=2, **look)
    for place, value in zip(places, values, strict=True):
        if value:
            axes.text(value, place, f" {value:,.0f}", va="center", color=INK, fontsize=8)


def _speed_bars(axes: Axes, results: Sequence[Entry]) -> None:
    speeds: list[float] = []
    for offset, name, color in ((-0.2, "training", PALETTE[0]), (0.2, "inference", PALETTE[1])):
        measured = [entry["training"] if name == "training" else entry["inference"] for entry in results]
        rates = [rate["images_per_s"] if rate else 0.0 for rate in measured]
        _bars(axes, [place + offset for place in range(len(results))], rates, 0.36, color=color, label=name)
        speeds += filter(None, rates)
    if max(speeds) > 30 * min(speeds):  # training only a head is a hundred times faster
        axes.set_xscale("log")
        axes.set_xlim(min(speeds) / 2, max(speeds) * 4)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    else:
        axes.margins(x=0.16)


def _stage_bars(axes: Axes, results: Sequence[Entry]) -> None:
    start = np.zeros(len(results))
    for stage, color in zip(STAGES, STAGE_COLORS, strict=True):
        shares = np.array([100 * (entry["stages"] or {}).get(stage, 0.0) for entry in results])
        axes.barh(range(len(results)), shares, 0.62, left=start, color=color, edgecolor=PAGE, label=stage, zorder=2)
        start += shares
    axes.set_xlim(0, 100)


ROWS: tuple[tuple[str, float, tuple[tuple[str, str], ...]], ...] = (
    ("images/s", 1, (("training_images_per_s", "training_s"), ("inference_images_per_s", "inference_s"))),
    ("peak memory, MiB", 2**20, (("memory", "memory"),)),
    ("end of task, s", 1, (("closing_s", "closing_s"),)),
)
"""Rows of panels: heading, unit, and lines (an entry of a point with its fitted cost)."""


@styled
def draw_growth(record: BenchRecord) -> bytes:
    """Draw panels of speed, memory and the end of a task over each setting, on log axes."""
    curves = record["growth"]
    rows = [row for row in ROWS if any(_values(curve, entry) for curve in curves for entry, _ in row[2])]
    size = (2.6 * max(len(curves), 3), 1.0 + 2.1 * len(rows))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = figure.subplots(len(rows), len(curves), squeeze=False, sharex="col")
    for own, (heading, unit, lines) in zip(panels, rows, strict=True):
        for axes, curve in zip(own, curves, strict=True):
            _panel(axes, curve, unit, lines)
        own[0].set_ylabel(heading)
    for column, curve in enumerate(curves):
        panels[0][column].set_title(curve["label"], loc="left", fontsize=10, fontweight="bold")
        [axes for axes in panels[:, column] if axes.get_visible()][-1].tick_params(labelbottom=True)
    note = "\nnumbers: exponent of the cost over all points and at the end; red: worse than linear"
    _title(figure, record, curves[0], f"{curves[0]['method']}, ", note)
    return to_png(figure)


def _values(curve: Curve, entry: str) -> list[tuple[int, float]]:
    points: Sequence[Mapping[str, Any]] = curve["points"]
    return [(point["value"], point[entry]) for point in points if point[entry] is not None]


def _panel(axes: Axes, curve: Curve, unit: float, lines: Sequence[tuple[str, str]]) -> None:
    """Draw one panel: lines with the exponents of their costs, red if worse than linear."""
    drawn = [(index, *line) for index, line in enumerate(lines) if _values(curve, line[0])]
    if not drawn:
        axes.set_visible(False)
        return
    for place, (index, entry, cost) in enumerate(drawn):
        places, values = zip(*_values(curve, entry), strict=True)
        look: dict[str, Any] = {"color": PALETTE[index], "marker": MARKERS[index], "markersize": 4}
        axes.plot(places, [value / unit for value in values], **look)
        worse = cost in curve["worse_than_linear"]
        color, weight = (WARNING, "bold") if worse else (PALETTE[index], "normal")
        fit = curve["exponents"].get(cost)
        text = f"{COSTS[cost]} " + (f"{fit['whole']:.2f}, {fit['end']:.2f}".replace("-", "−") if fit else "")
        style: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 8, "color": color, "fontweight": weight}
        axes.text(0.03, 0.04 + 0.1 * place, text, **style).set_in_layout(False)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _log_ticks(axes, [point["value"] for point in curve["points"]])


def _log_ticks(axes: Axes, values: Sequence[int]) -> None:
    """Label the measured values, and leave space below the lines for the exponents."""
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}".replace(",000", "k"))
    low, high = axes.get_ylim()
    low, high = (low / 1.5, high * 1.5) if high < 3 * low else (low, high)
    axes.set_ylim(low / (high / low) ** 0.4, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.tick_params(labelsize=8)
