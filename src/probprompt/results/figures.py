"""The paper's Figures 1a-c, 2 and 4, drawn from the runs of the book: PNG files beside them."""

import io
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from probprompt.evaluation import metrics
from probprompt.report.figures import (
    DASHES,
    DEPTH,
    INK,
    MARKERS,
    MUTED,
    PAGE,
    PALETTE,
    accuracy_floor,
    label,
    spread,
    styled,
)
from probprompt.results.book import Entry
from probprompt.runs.grid import CUSTOM, describe
from probprompt.runs.naming import backbone_slug, slug

SHOWN = {
    "l2p++": "L2P++",
    "dual-prompt": "DualPrompt",
    "vq-prompt": "VQ-Prompt",
    "coda-prompt": "CODA-P",
    "probprompt": "ProbPrompt",
}
"""The methods of the paper's figures, in the order of its Figure 2. What it calls L2P is L2P++, as in its Table 1."""
FOLDER = "figures"
_PRESETS = ("published", "matched", "ridge", "flagship", CUSTOM)
_BETWEEN = 0.8  # groups of bars, in bars
_LEAST = 5.0  # points of accuracy that a panel of Figure 4 spans: less is chance, and must not look like a course
_TEXTS = 14  # lines of small text that are as high as a panel of Figure 4
_LINES = 25  # of a legend of classes, in a column
_FEW, _STEPS = 5, 10  # tasks that Figure 1a, and Figures 2 and 4 are about, where they are there


@dataclass(frozen=True)
class Picture:
    """A figure of the paper from our runs."""

    file: str
    """Within the book."""
    title: str
    caption: str
    draw: Callable[[], bytes]
    """As a PNG."""


@dataclass(frozen=True, eq=False)
class Scene:
    """Runs that may share a figure: one benchmark, one backbone, one preset, the same other settings, if any."""

    benchmark: str
    backbone: str
    preset: str
    settings: str
    """What all runs have set otherwise than the preset, in words."""
    entries: Sequence[Entry]

    @property
    def name(self) -> str:
        """For files."""
        backbone = backbone_slug(self.entries[0].config["backbone"])
        benchmark = slug(str(self.entries[0].config["data"]["benchmark"]))  # a folder's hash keeps it apart from others
        return f"{benchmark}-{backbone}-{self.preset}"

    @property
    def words(self) -> str:
        """For captions."""
        return ", ".join(filter(None, (self.benchmark, self.backbone, f"`{self.preset}`", self.settings)))

    def by_method(self, tasks: int) -> dict[str, list[Entry]]:
        """The runs in so many tasks over the same seeds for every method: each seed has its own order of classes.

        Where no seed is common to all, the methods that have the most common one are shown.
        """
        found: dict[str, dict[int, Entry]] = {}
        for entry in self.entries:
            if entry.tasks == tasks:
                found.setdefault(entry.method, {})[entry.seed] = entry
        have = Counter(seed for runs in found.values() for seed in runs)
        most = max(have.values(), default=0)
        seeds = sorted(seed for seed, methods in have.items() if methods == most)
        if most < len(found):
            seeds = seeds[:1]
        return {m: [found[m][seed] for seed in seeds] for m in SHOWN if m in found and set(seeds) <= set(found[m])}

    @property
    def numbers_of_tasks(self) -> list[int]:
        """All that runs have."""
        return sorted({entry.tasks for entry in self.entries})

    @property
    def tasks(self) -> int:
        """Ten where there are such runs, else the number that most runs have."""
        counts = {tasks: sum(map(len, self.by_method(tasks).values())) for tasks in self.numbers_of_tasks}
        return _STEPS if counts.get(_STEPS) else max(counts, key=lambda tasks: counts[tasks])


def pictures(entries: Sequence[Entry]) -> list[Picture]:
    """All figures that the runs give."""
    found: list[Picture] = []
    for scene in _scenes(entries):
        found += [*_queries(scene), *_over_tasks(scene), *_similarities(scene), *_courses(scene)]
    return sorted(found, key=lambda picture: picture.title)


def _scenes(entries: Sequence[Entry]) -> list[Scene]:
    """Of each benchmark and backbone that preset under which most of the paper's methods were run.

    Runs with settings of their own are shown only where there are none without, as on a folder of one's own.
    """
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Entry]]] = {}
    for entry in entries:
        if entry.method in SHOWN and entry.preset in _PRESETS and not entry.held_out:
            here = str(entry.config["data"]["benchmark"]), entry.backbone
            groups.setdefault(here, {}).setdefault((entry.preset, _told(entry, own=False)), []).append(entry)
    scenes = []
    for (benchmark, backbone), ways in groups.items():
        kept = {way: _plainest(some) for way, some in ways.items()}
        way = max(kept, key=lambda way: (not _settings(way, kept[way]), len({e.method for e in kept[way]}), _rank(way)))
        scenes.append(Scene(benchmark.partition("@")[0], backbone, way[0], _settings(way, kept[way]), kept[way]))
    return scenes


def _told(entry: Entry, own: bool) -> str:
    """What a run has set otherwise than its preset: of its method, or of all else, the side of its images with it."""
    kept = {name: value for name, value in entry.departures.items() if name == "data.stored_side"}
    changes = {**entry.varied, **kept}
    return ", ".join(describe(tuple((k, v) for k, v in changes.items() if k.startswith("method.") is own)))


def _plainest(entries: Sequence[Entry]) -> list[Entry]:
    """Of each method the runs with the same settings of its own: none where there are such runs."""
    chosen: dict[str, str] = {}
    for entry in sorted(entries, key=lambda entry: len(entry.varied)):
        chosen.setdefault(entry.method, _told(entry, own=True))
    return [entry for entry in entries if _told(entry, own=True) == chosen[entry.method]]


def _settings(way: tuple[str, str], entries: Sequence[Entry]) -> str:
    """In words, what all runs have set otherwise than the preset, and what those of a method have."""
    own = dict.fromkeys(f"{e.method} with {_told(e, own=True)}" for e in entries if _told(e, own=True))
    return ", ".join(filter(None, (way[1], *own)))


def _rank(way: tuple[str, str]) -> int:
    """Of two ways with as many methods, the one that comes first in the list of presets."""
    return -_PRESETS.index(way[0])


def _picture(scene: Scene, number: str, title: str, caption: str, draw: Callable[[], bytes]) -> Picture:
    return Picture(f"{FOLDER}/{number}-{scene.name}.png", f"Figure {number}: {title}, {scene.words}", caption, draw)


# Which figures there are


def _queries(scene: Scene) -> list[Picture]:
    shown = [entry for entry in scene.entries if "queries" in entry.content["pictures"]]
    if not shown:
        return []

    def many(entry: Entry) -> bool:
        return len(entry.content["pictures"]["queries"]["names"]) > len(PALETTE) * len(MARKERS)

    entry = min(shown, key=lambda run: (many(run), run.tasks != _FEW, run.tasks != scene.tasks, run.tasks, run.seed))
    how = entry.content["pictures"]["queries"]["embedding"]
    where = f"the first of {entry.tasks} tasks (seed {entry.seed})"
    looks = "several classes share a colour and shape" if many(entry) else "each class has its colour and shape"
    caption = f"Queries of test images of {where} by {how}; {looks}."
    return [_picture(scene, "1a", "queries of a task", caption, partial(draw_queries, entry))]


def _over_tasks(scene: Scene) -> list[Picture]:
    counts = [tasks for tasks in scene.numbers_of_tasks if len(scene.by_method(tasks)) > 1]
    if not counts:
        return []
    found = []
    over = _over_seeds(*(scene.by_method(tasks) for tasks in counts))
    alike = {tasks: _values(scene, tasks, _similarity) for tasks in counts}
    if any(alike.values()):
        caption = f"Mean pairwise cosine of the prompts of different classes, {over}.{_renamed(*alike.values())}"
        draw = partial(draw_bars, alike, "pairwise similarity", 3)
        found.append(_picture(scene, "1b", "similarity of prompts", caption, draw))
    final = {tasks: _values(scene, tasks, _final) for tasks in counts}
    caption = (
        f"Average accuracy over all tasks in the end (FAA), {over}; the axis does not begin at 0."
        f"{_renamed(*final.values())}"
    )
    found.append(_picture(scene, "1c", "final average accuracy", caption, partial(draw_bars, final, "FAA, %", 1)))
    return found


def _over_seeds(*groups: Mapping[str, Sequence[Entry]]) -> str:
    """In words, over which seeds each group of runs by method is shown: the same for all methods of a group."""
    told = []
    for group in groups:
        seeds = [str(entry.seed) for entry in next(iter(group.values()))]
        told.append(f"seed {seeds[0]}" if len(seeds) == 1 else f"the mean over seeds {', '.join(seeds)}")
    return told[0] if len(set(told)) == 1 else "; ".join(told)


def _renamed(*groups: Container[str]) -> str:
    """What a reader of the paper must know about a name."""
    return " L2P++ is the L2P of the paper's Table 1." if any("l2p++" in group for group in groups) else ""


def _similarity(entry: Entry) -> float | None:
    found: float | None = entry.content["similarity"].get("mean")
    return found


def _final(entry: Entry) -> float | None:
    return metrics.final_average_accuracy(entry.matrix)


def _values(scene: Scene, tasks: int, measure: Callable[[Entry], float | None]) -> dict[str, float]:
    found = {}
    for method, entries in scene.by_method(tasks).items():
        values = [value for entry in entries if (value := measure(entry)) is not None]
        if values:
            found[method] = float(np.mean(values))
    return found


def _similarities(scene: Scene) -> list[Picture]:
    runs = scene.by_method(scene.tasks)
    drawn = [
        {m: each for m, each in zip(runs, of_seed, strict=True) if "similarity" in each.content["pictures"]}
        for of_seed in zip(*runs.values(), strict=True)
    ]
    chosen = max(drawn, key=len, default={})  # the first seed that gives most methods
    if len(chosen) < 2:
        return []
    shown = len(next(iter(chosen.values())).content["pictures"]["similarity"]["labels"])
    every = sum(map(len, next(iter(chosen.values())).content["stream"]["tasks"]))
    of = f", {shown} of {every} classes" if shown < every else ""
    caption = (
        f"Cosine between the prompts that different classes receive, in the order they were learned "
        f"({scene.tasks} tasks, {_over_seeds({m: [entry] for m, entry in chosen.items()})}{of}); under each name the "
        f"mean over all pairs of classes.{_renamed(chosen)}"
    )
    return [_picture(scene, "2", "similarity between classes", caption, partial(draw_similarities, chosen))]


def _courses(scene: Scene) -> list[Picture]:
    runs = scene.by_method(scene.tasks)
    if scene.tasks < 2 or len(runs) < 2:
        return []
    matrices = {method: np.mean([entry.matrix for entry in entries], axis=0) for method, entries in runs.items()}
    caption = (
        f"Accuracy on each task from the step that learned it to the last, {_over_seeds(runs)}. In parentheses: how "
        f"much each method lost on that task by the end.{_renamed(runs)}"
    )
    return [_picture(scene, "4", "accuracy on each task", caption, partial(draw_courses, matrices))]


# How they are drawn


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def _look(method: str) -> tuple[str, str, int]:
    """A method's colour, marker and place."""
    place = list(SHOWN).index(method)
    return PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)], place


@styled
def draw_queries(entry: Entry) -> bytes:
    """Queries in the plane, a colour and marker per class."""
    content = entry.content["pictures"]["queries"]
    points, labels = np.asarray(content["points"], dtype=float), np.asarray(content["labels"])
    columns = -(-len(content["names"]) // _LINES)
    figure = Figure(figsize=(5 + 1.4 * columns, 4), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for index in np.unique(labels):
        own, marker = points[labels == index], MARKERS[index % len(MARKERS)]
        look: dict[str, Any] = {"color": PALETTE[index % len(PALETTE)], "markeredgecolor": PAGE, "markeredgewidth": 0.5}
        axes.plot(own[:, 0], own[:, 1], marker, markersize=5, label=label(content["names"][index]), **look)
    axes.set(xticks=[], yticks=[])
    axes.set_aspect("equal", adjustable="datalim")
    axes.spines[:].set_visible(True)
    figure.legend(frameon=False, ncols=columns, fontsize=7, loc="outside right upper", handletextpad=0.2)
    return _png(figure)


@styled
def draw_bars(values: Mapping[int, Mapping[str, float]], axis: str, digits: int) -> bytes:
    """Bars of methods side by side, a group for each number of tasks."""
    methods = [method for method in SHOWN if any(method in group for group in values.values())]
    bars = sum(map(len, values.values()))
    figure = Figure(figsize=(2.2 + 0.55 * bars, 3.4), layout="constrained", facecolor="white")
    axes, bar, middles, x = figure.add_subplot(), dict[str, Artist](), list[float](), 0.0
    for group in values.values():
        middles.append(x + (len(group) - 1) / 2)
        for method in filter(group.__contains__, methods):
            bar[method] = axes.bar(x, group[method], 0.92, color=_look(method)[0], zorder=2)[0]
            _value(axes, x, group[method], digits)
            x += 1.0
        x += _BETWEEN
    every = [value for group in values.values() for value in group.values()]
    if min(every) > 1.0:  # percent: bars from 0 would all look alike
        axes.set_ylim(accuracy_floor(every), min(100.0, max(every) + 4.0))
    axes.set_xticks(middles, [f"{tasks} tasks" for tasks in values])
    axes.grid(False, axis="x")
    axes.set_ylabel(axis)
    shown, names = [bar[method] for method in methods], [SHOWN[method] for method in methods]
    axes.legend(shown, names, frameon=False, ncols=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    return _png(figure)


def _value(axes: Axes, x: float, height: float, digits: int) -> None:
    """The number above a bar, on a ground that covers lines of the grid."""
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    look: dict[str, Any] = {"fontsize": 7.5, "color": INK, "bbox": ground, "zorder": 3}
    axes.annotate(
        f"{height:.{digits}f}", (x, height), (0, 2), textcoords="offset points", ha="center", va="bottom", **look
    )


@styled
def draw_similarities(chosen: Mapping[str, Entry]) -> bytes:
    """Likeness of prompts between classes, a map per method on one scale."""
    maps = {method: np.asarray(entry.content["pictures"]["similarity"]["matrix"]) for method, entry in chosen.items()}
    low = min(float(matrix.min()) for matrix in maps.values())
    figure = Figure(figsize=(2.3 * len(maps) + 0.8, 2.9), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    for axes, (method, matrix) in zip(panels, maps.items(), strict=True):
        image = axes.imshow(matrix, cmap=DEPTH, vmin=min(low, 0.99), vmax=1.0, interpolation="none")
        axes.grid(False)
        axes.set(xticks=[], yticks=[])
        axes.set_title(SHOWN[method], fontsize=10)
        axes.set_xlabel(f"mean {chosen[method].content['similarity']['mean']:.3f}")
    figure.colorbar(image, ax=panels, fraction=0.02, pad=0.01, label="cosine")
    return _png(figure)


@styled
def draw_courses(matrices: Mapping[str, NDArray[np.float64]]) -> bytes:
    """A panel per task: its accuracy after each step, a line per method."""
    count = len(next(iter(matrices.values())))
    columns = min(5, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(2.7 * columns, 2.5 * rows), layout="constrained", facecolor="white")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for task, axes in enumerate(panels[:count]):
        _course(axes, task, count, {method: matrix[task, task:] for method, matrix in matrices.items()})
    for axes in panels[count:]:
        axes.set_visible(False)
    shown = [_line(method) for method in matrices]
    figure.legend(handles=shown, frameon=False, ncols=len(shown), fontsize=9, loc="outside upper center")
    figure.supylabel("accuracy, %", fontsize=9.5, color=MUTED)
    figure.supxlabel("after learning task", fontsize=9.5, color=MUTED)
    return _png(figure)


def _line(method: str, places: Sequence[float] = (), values: Sequence[float] = ()) -> Line2D:
    colour, marker, place = _look(method)
    look: dict[str, Any] = {"linestyle": DASHES[place % len(DASHES)], "markersize": 3.5, "linewidth": 1.3}
    return Line2D(places, values, color=colour, marker=marker, label=SHOWN[method], **look)


def _course(axes: Axes, task: int, count: int, lines: Mapping[str, NDArray[np.float64]]) -> None:
    """A line per method, with what it lost at its end."""
    for method, values in lines.items():
        axes.add_line(_line(method, range(task + 1, count + 1), values.tolist()))
    axes.autoscale_view()
    low, high = axes.get_ylim()
    if high - low < _LEAST:
        low, high = ((low + high + side * _LEAST) / 2 for side in (-1, 1))
        axes.set_ylim(low, high)
    gap = (high - low) / _TEXTS
    places = spread([float(values[-1]) for values in lines.values()], gap, (low + gap / 2, high))
    for (method, values), place in zip(lines.items(), places, strict=True):
        lost = f"({values[0] - values[-1]:.1f})".replace("-", "−")
        axes.text(count + 0.35, place, lost, va="center", fontsize=7.5, color=_look(method)[0])
    axes.set_title(f"Task {task + 1}", fontsize=9.5, color=MUTED)
    axes.set_xlim(0.6, count * 1.28)
    axes.set_xticks(_ticks(count))
    axes.tick_params(labelsize=8.5)
    axes.grid(False, axis="x")


def _ticks(count: int) -> list[int]:
    """At most six steps, the last among them."""
    step = -(-count // 5)
    return list(range(count, 0, -step))[::-1]
