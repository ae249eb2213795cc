"""Figures of a report as SVG in the colors of the page.

Figures are drawn in the light colors below, which become CSS variables in the SVG, so that dark mode and print work.
Text stays text, which can be selected and shows any script.
"""

import functools
import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from xml.etree import ElementTree

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, MultipleLocator
from scipy.optimize import isotonic_regression

from probprompt.runs.run import Relevance

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
INK, MUTED, RULE, PAGE = "#1b1f27", "#59616e", "#d8dce2", "#fefefe"
PALETTE = ("#0b62a4", "#c24e0a", "#0a7a5c", "#8d3f92", "#7d6310", "#474d58")
"""Colors that remain distinct with color blindness, with a contrast of at least 4.5:1 on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # seven, so that six colors repeat with another marker
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1)))
SHAPES = {
    "o": "M14 1.6a3.4 3.4 0 1 0 .01 0z",
    "s": "M11 2h6v6h-6z",
    "^": "M14 1.2l3.8 6.8h-7.6z",
    "D": "M14 .8l4.2 4.2-4.2 4.2-4.2-4.2z",
    "v": "M14 8.8l3.8-6.8h-7.6z",
    "P": "M12.8 1.2h2.4v2.6h2.6v2.4h-2.6v2.6h-2.4v-2.6h-2.6v-2.4h2.6z",
    "X": "M11.8 1.1l2.2 2.2 2.2-2.2 1.7 1.7-2.2 2.2 2.2 2.2-1.7 1.7-2.2-2.2-2.2 2.2-1.7-1.7 2.2-2.2-2.2-2.2z",
}
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML and HTML do not allow."""
DEPTH = LinearSegmentedColormap.from_list(
    "depth", ["#f2f5f2", "#cfe3dc", "#94c4c4", "#5098ae", "#276a92", "#194673", "#122a52"]
)
THEME = {INK: "ink", MUTED: "muted", RULE: "rule", PAGE: "page"} | {
    color: f"series-{index}" for index, color in enumerate(PALETTE)
}
STYLE: dict[Any, Any] = {  # Any: the types of the keys differ between versions of matplotlib
    "svg.fonttype": "none",
    "svg.hashsalt": "probprompt",
    "text.parse_math": False,  # a class may be named "$5"
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "auto",
}


@dataclass(frozen=True)
class Series:
    """One line of a plot: values at steps 1, 2, ... or None, and the index of its style."""

    values: Sequence[float | None]
    index: int = 0

    @property
    def points(self) -> tuple[list[int], list[float]]:
        """Steps that have a value, and the values."""
        present = [(step, value) for step, value in enumerate(self.values, start=1) if value is not None]
        return [step for step, _ in present], [value for _, value in present]


def styled(draw: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Draw with the style of this module, independent of the user's matplotlib settings."""

    @functools.wraps(draw)
    def with_style(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        every: dict[Any, Any] = dict(matplotlib.rcParamsDefault)
        defaults = {name: every[name] for name in every if not name.startswith("backend")}
        with matplotlib.rc_context(defaults | STYLE), warnings.catch_warnings():
            # The browser has glyphs that the font for measuring text may lack.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            return draw(*args, **kwargs)

    return with_style


def label(text: str, longest: int = 18) -> str:
    """Make a name printable on one line, and shorten it.

    >>> label("a\\tvery long name of a class")
    'a very long name …'
    """
    plain = UNPRINTABLE.sub("�", " ".join(text.split()))
    return plain if len(plain) <= longest else plain[: longest - 1] + "…"


def contrast(first: str, second: str) -> float:
    """Return the WCAG 2 contrast ratio of two colors, from 1 to 21.

    >>> contrast("#000000", "#ffffff")
    21.0
    """

    def luminance(color: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return round((light + 0.05) / (dark + 0.05), 3)


def shade(value: float, low: float, high: float) -> tuple[str, str]:
    """Return the background of a heat map cell and the text color with most contrast."""
    background = to_hex(DEPTH((value - low) / (high - low)))
    return background, max("#000000", "#ffffff", key=lambda ink: contrast(ink, background))


def accuracy_floor(values: Sequence[float]) -> float:
    """Return the start of an accuracy axis: a round number below the lowest value.

    >>> accuracy_floor([71.0, 96.5])
    60.0
    """
    return max(0.0, 10.0 * math.floor((min(values, default=0.0) - 3.0) / 10.0))


def look(index: int) -> dict[str, Any]:
    """Return color, marker and dashes of a series or a class."""
    looks: dict[str, tuple[Any, ...]] = {"color": PALETTE, "marker": MARKERS, "linestyle": DASHES}
    return {name: every[index % len(every)] for name, every in looks.items()}


def swatch(index: int, line: bool = True) -> Markup:
    """Draw the legend key of a series or a class."""
    own, color = look(index), f"var(--series-{index % len(PALETTE)})"
    marker = f'<path d="{SHAPES[own["marker"]]}" fill="{color}"/>'
    if not line:
        return Markup(f'<svg class="swatch dot" viewBox="9 0 10 10" aria-hidden="true">{marker}</svg>')
    dash = own["linestyle"]
    pattern = "" if isinstance(dash, str) else f' stroke-dasharray="{" ".join(f"{d:g}" for d in dash[1])}"'
    stroke = f'<path d="M0 5H28" fill="none" stroke="{color}" stroke-width="1.6"{pattern}/>'
    return Markup(f'<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true">{stroke}{marker}</svg>')


def _plot(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure with one plot; sizes are in SVG units."""
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    return figure, figure.add_subplot()


def _round(match: re.Match[str]) -> str:
    return f"{float(match.group()):.2f}".rstrip("0").rstrip(".")


def _clean(element: ElementTree.Element, prefix: str, referenced: set[str]) -> None:
    """Rewrite an element for HTML: no namespaces, prefixed ids, colors of the page."""
    element.tag = element.tag.rpartition("}")[2]
    attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    element.attrib.clear()
    if attributes.get("id") not in referenced:
        attributes.pop("id", None)
    for name, value in attributes.items():
        if name == "id":
            value = prefix + value
        elif name == "href" and value.startswith("#"):
            value = f"#{prefix}{value[1:]}"
        elif name in ("d", "x", "y"):
            value = " ".join(re.sub(r"-?\d+\.\d{3,}", _round, value).split())
        elif name == "transform" and value.startswith("rotate(-0 "):
            continue
        value = value.replace("url(#", f"url(#{prefix}")
        if name == "style":
            value = re.sub(r"font-family:[^;]*;? ?", "", value)
            value = re.sub(r"#[0-9a-f]{6}", lambda m: f"var(--{THEME[m[0]]})" if m[0] in THEME else m[0], value)
        element.set(name, value)
    element.tail = None
    if element.tag != "text":
        element.text = None


def _svg(figure: Figure, key: str, description: str) -> Markup:
    """Turn a figure into an SVG element; the key makes its ids unique on the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    view = root.attrib["viewBox"]
    for parent in list(root.iter()):
        for child in list(parent):
            # The style element would apply to the whole page.
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    referenced = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', buffer.getvalue()))
    for element in root.iter():
        _clean(element, f"{key}-", referenced)
    root.attrib.clear()
    root.attrib.update({"class": "plot", "viewBox": view, "role": "img", "aria-label": description})
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _draw(axes: Axes, series: Series, size: float = 4.6) -> None:
    edge = {"markersize": size, "markeredgecolor": PAGE, "markeredgewidth": 0.6}
    axes.plot(*series.points, **look(series.index) | edge, linewidth=1.6, clip_on=False, zorder=3)


def _step_axis(axes: Axes, total: int, most: int) -> None:
    axes.set_xlim(0.6, total + 0.4) if total > 1 else axes.set_xlim(0.5, 1.5)
    if total <= most:
        axes.set_xticks(range(1, total + 1))
    else:
        axes.xaxis.set_major_locator(MultipleLocator(5 * math.ceil(total / 40)))
    axes.grid(False, axis="x")


def _accuracy_axis(axes: Axes, floor: float, most: int) -> None:
    axes.set_ylim(floor, 100.0)
    axes.yaxis.set_major_locator(MultipleLocator(next(s for s in (5, 10, 20, 50) if 100.0 - floor <= most * s)))


def _draw_averages(axes: Axes, lines: Iterable[Series], total: int, floor: float, size: float = 4.6) -> None:
    for line in lines:
        _draw(axes, line, size)
    _accuracy_axis(axes, floor, 6)
    _step_axis(axes, total, 20)
    axes.set(xlabel="after learning task", ylabel="average accuracy, %")


@styled
def average_curves(series: Sequence[Series], total: int, floor: float, description: str) -> Markup:
    """Draw the average accuracy over the tasks seen so far, one line per run."""
    figure, axes = _plot(400, 215)
    _draw_averages(axes, series, total, floor)
    return _svg(figure, "average", description)


@styled
def task_panel(series: Sequence[Series], total: int, floor: float, key: str, description: str) -> Markup:
    """Draw the accuracy on one task since it was learned, one line per run."""
    figure = Figure(figsize=(170 / 72, 112 / 72))  # fixed margins: the panels of a page line up
    axes = figure.add_axes((0.15, 0.15, 0.83, 0.8))
    for line in series:
        _draw(axes, line, size=4.0 if total <= 10 else 3.0)
    _accuracy_axis(axes, floor, 4)
    axes.tick_params(labelsize=9)
    _step_axis(axes, total, 8)
    return _svg(figure, key, description)


def _heat_map(axes: Axes, matrix: Any, low: float, high: float) -> Any:
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes.imshow(matrix, cmap=DEPTH, vmin=low, vmax=high, interpolation="none", aspect="auto")


def _color_bar(figure: Figure, image: Any, axes: Axes, text: str) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.set_label(text)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5))


@styled
def similarity_map(matrix: Sequence[Sequence[float]], labels: Sequence[str], low: float, description: str) -> Markup:
    """Draw the cosine similarity between the prompts of each two classes."""
    figure, axes = _plot(400, 340)
    image = _heat_map(axes, np.asarray(matrix), low, 1.0)
    _name_classes(axes, labels)
    _color_bar(figure, image, axes, "cosine similarity")
    return _svg(figure, "similarity", description)


def _name_classes(axes: Axes, labels: Sequence[str]) -> None:
    if len(labels) > 26:  # names would overlap
        axes.set_xlabel(f"{len(labels)} classes in the order they were learned")
        return
    size = 9.0 if len(labels) <= 14 else 7.5
    names = [label(name, 16) for name in labels]
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.set_xticks(range(len(names)), names, fontsize=size, rotation=90)


@styled
def block_bars(values: Mapping[str, float], mean: float, description: str) -> Markup:
    """Draw the mean prompt similarity in each block, and the mean over all."""
    figure, axes = _plot(400, 130)
    places = range(len(values))
    axes.bar(places, list(values.values()), width=0.62, color=PALETTE[0], zorder=2)
    axes.axhline(mean, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=3)
    axes.set_xticks(places, list(values))
    axes.set_ylim(min(0.0, *values.values()), 1.0)
    axes.grid(False, axis="x")
    axes.set(xlabel="block", ylabel="similarity")
    return _svg(figure, "blocks", description)


@styled
def relevance_map(part: Relevance, description: str) -> Markup:
    """Draw the share of each prompt distribution in each block, and their evenness."""
    shares = np.asarray(part.usage)
    figure = Figure(figsize=(400 / 72, (92 + 17 * len(part.blocks)) / 72), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    image = _heat_map(left, shares, 0.0, float(max(shares.max(), 1e-9)))
    left.set_yticks(range(len(part.blocks)), [str(block) for block in part.blocks])
    left.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    left.xaxis.set_major_formatter(lambda place, _: f"{place + 1:.0f}")
    if shares.shape[1] <= 16:
        left.set_xticks(range(shares.shape[1]))
    left.set(xlabel="prompt distribution", ylabel="block")
    bar = figure.colorbar(image, ax=left, location="top", fraction=0.06, pad=0.02, aspect=40)
    bar.outline.set_visible(False)
    bar.set_label("share of use")
    _evenness(right, part.entropy, part.max_weight)
    return _svg(figure, "relevance", description)


def _evenness(axes: Axes, entropy: Sequence[float], max_weight: Sequence[float]) -> None:
    places = range(len(entropy))
    axes.plot(entropy, places, "o", color=PALETTE[0], markersize=5, clip_on=False)
    if max_weight:
        axes.plot(max_weight, places, "D", color=PALETTE[1], markersize=4.5, markerfacecolor=PAGE, clip_on=False)
    axes.set_xlim(0.0, 1.0)
    axes.set_xticks([0.0, 0.5, 1.0], ["0", "½", "1"])
    axes.set_xlabel("entropy, weight")
    axes.grid(True, axis="both")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(labelleft=False)


def scatter(
    axes: Axes, points: Sequence[Sequence[float]], labels: Sequence[int], size: float, names: Sequence[str] = ()
) -> None:
    """Draw queries in the plane, a color and marker per class."""
    places, classes = np.asarray(points, dtype=float), np.asarray(labels)
    edge = {"linestyle": "none", "markersize": size, "markeredgecolor": PAGE, "markeredgewidth": 0.5}
    for index in np.unique(classes):
        own = places[classes == index]
        axes.plot(own[:, 0], own[:, 1], label=label(names[index]) if names else None, **look(index) | edge)
    axes.set(xticks=[], yticks=[])  # neither direction has a meaning or a unit
    axes.set_aspect("equal", adjustable="datalim")
    axes.spines[:].set_visible(True)


@styled
def query_scatter(points: Sequence[Sequence[float]], labels: Sequence[int], description: str) -> Markup:
    """Draw the queries of one task."""
    figure, axes = _plot(400, 260)
    scatter(axes, points, labels, 5.2)
    axes.spines[:].set_color(RULE)
    return _svg(figure, "queries", description)


@styled
def loss_curve(losses: Sequence[Sequence[tuple[int, float]]], description: str) -> Markup:
    """Draw the training loss over the epochs of all tasks, given (epoch, loss) per task."""
    figure, axes = _plot(400, 170)
    start = 0
    for task, epochs in enumerate(losses, start=1):
        if not epochs:
            continue
        first = min(epoch for epoch, _ in epochs)
        places = [start + epoch - first + 1 for epoch, _ in epochs]
        values = [loss for _, loss in epochs]
        axes.plot(places, values, color=PALETTE[0], linewidth=1.5, marker="o" if len(places) < 12 else "", markersize=3)
        if start:
            axes.axvline(start + 0.5, color=RULE, linewidth=0.8)
        if len(losses) <= 12 or task == 1 or task % 5 == 0:
            text = f"task {task}" if len(losses) <= 6 else str(task)
            middle = (places[0] + places[-1]) / 2
            axes.text(middle, 1.0, text, transform=axes.get_xaxis_transform(), ha="center", va="bottom", color=MUTED)
        start = places[-1]
    axes.set_xlim(0.5, max(start, 1) + 0.5)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(False, axis="x")
    axes.set(xlabel="epoch, over all tasks" if len(losses) > 1 else "epoch", ylabel="training loss")
    return _svg(figure, "loss", description)


@dataclass(frozen=True)
class Bar:
    """One bar; an outlined one is not ranked."""

    name: str
    value: float
    error: float | None = None
    """Standard deviation."""
    index: int = 0
    start: float | None = None
    """Value before training."""
    outlined: bool = False


def spread(values: Sequence[float], gap: float, within: tuple[float, float] | None = None) -> list[float]:
    """Move positions apart, by the least squares, until neighbors keep a gap.

    All positions are then shifted so that none is outside ``within``.

    >>> spread([1.0, 5.0, 5.0], 2.0)
    [1.0, 4.0, 6.0]
    >>> spread([1.0, 5.0, 5.0], 2.0, within=(0.0, 5.0))
    [0.0, 3.0, 5.0]
    """
    order, steps, places = np.argsort(values, kind="stable"), gap * np.arange(len(values)), np.zeros(len(values))
    places[order] = isotonic_regression(np.asarray(values)[order] - steps).x + steps
    low, high = within or (places.min(), places.max())
    moved: list[float] = (places - max(0.0, places.max() - high) + max(0.0, low - places.min())).tolist()
    return moved


@styled
def bars(
    values: Sequence[Bar], axis: str, digits: int, key: str, description: str, baseline: float | None = None
) -> Markup:
    """Draw named bars with values and standard deviations; diamonds mark start values."""
    figure, axes = _plot(400, 40 + 18 * len(values))
    for place, bar in enumerate(values):
        color = PALETTE[bar.index % len(PALETTE)]
        axes.barh(
            place, bar.value, 0.62, color=PAGE if bar.outlined else color, edgecolor=color, linewidth=1.0, zorder=2
        )
        if bar.error and round(bar.error, digits):
            for ink, width, cap, layer in ((PAGE, 3.0, 3.0, 3.0), (INK, 1.0, None, 3.5)):
                style: dict[str, Any] = {"ecolor": ink, "elinewidth": width, "capthick": cap, "zorder": layer}
                axes.errorbar(bar.value, place, xerr=bar.error, capsize=2.5, **style)
        if bar.start is not None:
            axes.plot(bar.start, place, "D", color=INK, markerfacecolor=PAGE, markersize=4.5, zorder=4)
    ends = [max(0.0, bar.value + (bar.error or 0.0), bar.start or 0.0) for bar in values]
    lowest = min(0.0, *(min(bar.value - (bar.error or 0.0), bar.start or 0.0) for bar in values))
    span = max(*ends, 0.0) - lowest or 1.0
    for place, (bar, end) in enumerate(zip(values, ends, strict=True)):
        text = f"{bar.value:.{digits}f}" + ("" if bar.error is None else f" ± {bar.error:.{digits}f}")
        axes.text(end + 0.03 * span, place, text.replace("-", "−"), va="center", color=INK, fontsize=9)
    if baseline is not None:
        axes.axvline(baseline, color=INK, linewidth=1.0, linestyle=(0, (1.5, 1.5)), zorder=5)
    axes.set_yticks(range(len(values)), [label(bar.name, 30) for bar in values], color=INK, fontsize=9)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_xlim(lowest - (0.03 * span if lowest < 0 else 0.0), lowest + 1.3 * span)
    ticks = MaxNLocator(5).tick_values(lowest, lowest + span)
    axes.set_xticks([tick for tick in ticks if lowest <= tick <= lowest + span])
    if lowest < 0:
        axes.axvline(0.0, color=MUTED, linewidth=0.7)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(lowest >= 0)
    axes.set_xlabel(axis)
    return _svg(figure, key, description)


def _name_ends(axes: Axes, ends: Sequence[tuple[str, int, tuple[float, float]]], height: float) -> None:
    """Write the name of each line next to its end without overlaps."""
    low, high = axes.get_ylim()
    places = spread([value for _, _, (_, value) in ends], (high - low) * 12.5 / height, (low, high))
    for (name, index, end), place in zip(ends, places, strict=True):
        color, text = PALETTE[index % len(PALETTE)], axes.get_yaxis_transform()
        arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 4, "relpos": (0.0, 0.5)}
        style: dict[str, Any] = {"va": "center", "fontsize": 9, "color": color, "annotation_clip": False}
        axes.annotate(label(name, 26), end, (1.05, place), textcoords=text, arrowprops=arrow, **style)


@styled
def named_curves(lines: Sequence[tuple[str, Series]], total: int, floor: float, key: str, description: str) -> Markup:
    """Draw the average accuracy over the tasks seen so far, one named line per method."""
    inner = max(160.0, 13.0 * len(lines))
    figure, axes = _plot(440, inner + 50)
    _draw_averages(axes, (line for _, line in lines), total, floor)
    ends = [(name, line.index, (line.points[0][-1], line.points[1][-1])) for name, line in lines]
    _name_ends(axes, ends, inner)
    return _svg(figure, key, description)


@dataclass(frozen=True)
class Growth:
    """A line over a setting: points of (setting, value, value at the start or None)."""

    name: str
    index: int
    points: Sequence[tuple[float, float, float | None]]


@styled
def growth(lines: Sequence[Growth], setting: str, axis: str, key: str, description: str) -> Markup:
    """Draw a value by a setting, one line per method; hollow markers are start values."""
    inner = max(160.0, 13.0 * len(lines))
    figure, axes = _plot(440, inner + 50)
    for line in lines:
        own = look(line.index) | {"linestyle": "-", "clip_on": False}
        values = [(place, value) for place, value, _ in line.points]
        starts = [(place, start) for place, _, start in line.points if start is not None]
        axes.plot(*zip(*values, strict=True), **own, linewidth=1.6, markersize=5)
        if starts:
            own |= {"linestyle": (0, (1.5, 1.5)), "linewidth": 0.8, "markerfacecolor": PAGE, "markersize": 4.5}
            axes.plot(*zip(*starts, strict=True), **own)
    places = sorted({place for line in lines for place, _, _ in line.points})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.grid(False, axis="x")
    _name_ends(axes, [(line.name, line.index, line.points[-1][:2]) for line in lines], inner)
    axes.set(xlabel=setting, ylabel=axis)
    return _svg(figure, key, description)


@dataclass(frozen=True)
class Overview:
    """Content of the overview: named lines, an accuracy matrix, up to two similarities."""

    lines: Sequence[tuple[str, Series]]
    total: int
    floor: float
    matrix: Sequence[Sequence[float | None]]
    matrix_of: str
    similarities: Sequence[tuple[str, Sequence[Sequence[float]]]]


@styled
def overview(content: Overview, kind: str) -> bytes:
    """Draw the main results in one wide figure, as PNG or SVG bytes."""
    maps = content.similarities[:2]
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.03)
    figure = Figure(figsize=(13.2 if maps else 8.8, 3.9), layout=layout, facecolor="white")
    rows: list[Any] = [["lines", "matrix", f"map {number}"][: 3 if maps else 2] for number in range(max(1, len(maps)))]
    axes = figure.subplot_mosaic(rows, width_ratios=[1.25, 1.0, 1.0 if len(maps) == 1 else 0.72][: len(rows[0])])
    _overview_lines(axes["lines"], content)
    _overview_matrix(axes["matrix"], content)
    low = min([0.0, *(float(np.min(matrix)) for _, matrix in maps)])
    for number, (of, matrix) in enumerate(maps):
        panel = axes[f"map {number}"]
        image = _heat_map(panel, np.asarray(matrix), low, 1.0)
        panel.set(xticks=[], yticks=[], aspect="equal", ylabel="class")
        _title(panel, "" if number else "Prompt similarity between classes", of)
        _color_bar(figure, image, panel, "cosine similarity")
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.fonttype": "path"}):  # a separate file cannot rely on fonts
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()


def _title(axes: Axes, text: str, of: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", pad=20)
    axes.text(0.0, 1.03, label(of, 48), transform=axes.transAxes, color=MUTED, va="bottom")


def _overview_lines(axes: Axes, content: Overview) -> None:
    _draw_averages(axes, (line for _, line in content.lines), content.total, content.floor, 6.0)
    axes.set_ylabel("%")
    _title(axes, "Average accuracy so far", f"axis from {content.floor:.0f}%" if content.floor else "")
    names = [f"{label(name, 28)}  {line.points[1][-1]:.1f}%" for name, line in content.lines]
    axes.legend(axes.get_lines(), names, frameon=False, loc="lower left", handlelength=3.2)


def _overview_matrix(axes: Axes, content: Overview) -> None:
    matrix = np.array([[np.nan if v is None else v for v in row] for row in content.matrix], dtype=float)
    _heat_map(axes, matrix, content.floor, 100.0)
    size = 9.5 if len(matrix) <= 6 else 8.0 if len(matrix) <= 10 else 4.6
    for (task, step), value in np.ndenumerate(matrix):
        if np.isfinite(value):
            _, ink = shade(float(value), content.floor, 100.0)
            axes.text(step, task, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=size)
    names = [str(number + 1) for number in range(len(matrix))]
    axes.set_xticks(range(len(matrix)), names, fontsize=size)
    axes.set_yticks(range(len(matrix)), names, fontsize=size)
    axes.set(aspect="equal", xlabel="after learning task", ylabel="task")
    _title(axes, "Accuracy on each task, %", content.matrix_of)
