"""Pictures of a benchmark, as PNG: speed, stages and memory of methods, and how cost grows."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from probprompt.bench.grow import COSTS
from probprompt.bench.timing import STAGES
from probprompt.report.figures import INK, MARKERS, MUTED, PAGE, PALETTE, label, styled
from probprompt.runs.record import machine_name

Curve = Mapping[str, Any]
STAGE_COLOURS = (*PALETTE, "#a9b0ba")
WARNING = "#a3161f"


def draw(record: Mapping[str, Any]) -> bytes:
    """The picture of a record: its growth where that was measured, else its methods."""
    return growth(record) if record["growth"] else methods(record)


def subtitle(record: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """What was measured on what, in a line."""
    return f"{about['backbone']}, {about['precision']}, {machine_name(record['hardware'])}"


@styled
def methods(record: Mapping[str, Any]) -> bytes:
    """Speed, shares of the stages, and memory of every method."""
    results = record["results"]
    figure = Figure(figsize=(13, 1.9 + 0.42 * len(results)), layout="constrained", facecolor="white")
    speed, stages, memory = figure.subplots(1, 3, sharey=True, width_ratios=(1.2, 1.2, 0.8))
    _speed_bars(speed, results)
    _stage_bars(stages, results)
    _memory_bars(memory, results)
    speed.set_yticks(range(len(results)), [label(entry["method"], 24) for entry in results], color=INK)
    speed.set_ylim(len(results) - 0.5, -0.5)
    first = results[0]
    figure.suptitle(
        f"{subtitle(record, first)}, images of {first['image_size']} px, batch {first['batch']}",
        x=0.01,
        ha="left",
        color=MUTED,
        fontsize=10,
    )
    return _png(figure)


def _speed_bars(axes: Axes, results: Sequence[Mapping[str, Any]]) -> None:
    for offset, name, colour in ((-0.2, "training", PALETTE[0]), (0.2, "inference", PALETTE[1])):
        rates = [(entry[name] or {}).get("images_per_s", 0.0) for entry in results]
        places = np.arange(len(results)) + offset
        axes.barh(places, rates, 0.36, color=colour, label=name, zorder=2)
        for place, rate in zip(places, rates, strict=True):
            if rate:
                axes.text(rate, place, f" {rate:,.0f}", va="center", color=INK, fontsize=8)
    shown = [entry[name]["images_per_s"] for entry in results for name in ("training", "inference") if entry[name]]
    if max(shown) > 30 * min(shown):  # a head alone is trained a hundred times faster than prompts
        axes.set_xscale("log")
        axes.set_xlim(min(shown) / 2, max(shown) * 4)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    else:
        axes.margins(x=0.16)
    _finish_bars(axes, "images/s")


def _stage_bars(axes: Axes, results: Sequence[Mapping[str, Any]]) -> None:
    start = np.zeros(len(results))
    for stage, colour in zip(STAGES, STAGE_COLOURS, strict=True):
        shares = np.array([100 * (entry["stages"] or {}).get(stage, 0.0) for entry in results])
        axes.barh(range(len(results)), shares, 0.62, left=start, color=colour, edgecolor=PAGE, label=stage, zorder=2)
        start += shares
    axes.set_xlim(0, 100)
    _finish_bars(axes, "% of a training step, stages timed apart")


def _memory_bars(axes: Axes, results: Sequence[Mapping[str, Any]]) -> None:
    sizes = [(entry["memory"]["training_peak"] or 0) / 2**20 for entry in results]
    axes.barh(range(len(results)), sizes, 0.62, color=PALETTE[2], zorder=2)
    for place, size in enumerate(sizes):
        if size:
            axes.text(size, place, f" {size:,.0f}", va="center", color=INK, fontsize=8)
    axes.margins(x=0.25)
    _finish_bars(axes, "peak memory in training, MiB")


def _finish_bars(axes: Axes, text: str) -> None:
    axes.grid(False, axis="y")
    axes.set_xlabel(text)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, handlelength=1)


# How cost grows -------------------------------------------------------------------------------------------------

Rows = tuple[tuple[str, tuple[tuple[str, str, Callable[[float], float]], ...]], ...]


def _same(value: float) -> float:
    return value


def _mebibytes(value: float) -> float:
    return value / 2**20


ROWS: Rows = (
    ("images/s", (("training_images_per_s", "training_s", _same), ("inference_images_per_s", "inference_s", _same))),
    ("peak memory, MiB", (("memory", "memory", _mebibytes),)),
    ("closing a task, s", (("closing_s", "closing_s", _same),)),
)
"""Rows of panels: each line with its entry in a point, the cost that was fitted to it, and its unit."""


@styled
def growth(record: Mapping[str, Any]) -> bytes:
    """Small panels on log axes: a column for each setting that grows, a row for speed, memory and the end of a task."""
    curves = record["growth"]
    rows = [row for row in ROWS if any(_values(curve, entry) for curve in curves for entry, _, _ in row[1])]
    size = (2.6 * max(len(curves), 3), 1.0 + 2.1 * len(rows))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = figure.subplots(len(rows), len(curves), squeeze=False, sharex="col")
    for number, (text, lines) in enumerate(rows):
        for axes, curve in zip(panels[number], curves, strict=True):
            _panel(axes, curve, lines)
        panels[number][0].set_ylabel(text)
    for column, curve in enumerate(curves):
        panels[0][column].set_title(curve["label"], loc="left", fontsize=10, fontweight="bold")
        shown = [axes for axes in panels[:, column] if axes.get_visible()]
        shown[-1].tick_params(labelbottom=True)
    said = "numbers: exponent of the cost over all points and at the end; red: worse than linear"
    about = f"{curves[0]['method']}, {subtitle(record, curves[0])}"
    figure.suptitle(f"{about}\n{said}", x=0.01, ha="left", color=MUTED, fontsize=10)
    return _png(figure)


def _values(curve: Curve, entry: str) -> list[tuple[int, float]]:
    return [(point["value"], point[entry]) for point in curve["points"] if point[entry] is not None]


def _panel(axes: Axes, curve: Curve, lines: Sequence[tuple[str, str, Callable[[float], float]]]) -> None:
    """One panel: its lines, each with the exponent of its cost; one that is worse than linear stands out."""
    drawn = [(index, line) for index, line in enumerate(lines) if _values(curve, line[0])]
    if not drawn:
        axes.set_visible(False)
        return
    for place, (index, (entry, fitted, unit)) in enumerate(drawn):
        places, values = zip(*_values(curve, entry), strict=True)
        axes.plot(places, [unit(value) for value in values], color=PALETTE[index], marker=MARKERS[index], markersize=4)
        worse = fitted in curve["worse_than_linear"]
        note = axes.text(
            0.03,
            0.04 + 0.1 * place,
            f"{COSTS[fitted]} {_exponent(curve, fitted)}",
            transform=axes.transAxes,
            fontsize=8,
            color=WARNING if worse else PALETTE[index],
            fontweight="bold" if worse else "normal",
        )
        note.set_in_layout(False)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _log_ticks(axes, [point["value"] for point in curve["points"]])


def _exponent(curve: Curve, fitted: str) -> str:
    found = curve["exponents"].get(fitted)
    return f"{found['whole']:.2f}, {found['end']:.2f}".replace("-", "−") if found else ""


def _log_ticks(axes: Axes, values: Sequence[int]) -> None:
    """Name the values that were tried, and leave room below the lines for the exponents."""
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


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()
