"""The paper's Figures 1a-c, 2 and 4, drawn from recorded runs as PNG files."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from probprompt.backbones.pretrained import backbone_slug, slug
from probprompt.evaluation import metrics
from probprompt.report.compare import grouped
from probprompt.report.figures import DEPTH, INK, MARKERS, MUTED, PALETTE, accuracy_floor, look, scatter, spread, styled
from probprompt.runs.grid import CUSTOM, describe
from reproduction.plots import to_png
from reproduction.results import Entry

METHODS = {"l2p++": "L2P++", "dual-prompt": "DualPrompt", "vq-prompt": "VQ-Prompt"}
METHODS |= {"coda-prompt": "CODA-P", "probprompt": "ProbPrompt"}  # in the order of the paper's Figure 2
FOLDER = "figures"
GROUP_GAP = 0.8  # between groups of bars, in bars
_PRESETS = ("published", "matched", "ridge", "flagship", CUSTOM)
_LEAST = 5.0  # points of accuracy that a panel of Figure 4 spans at least: less is noise
_TEXTS = 14  # lines of small text in the height of a panel of Figure 4
_LINES = 25  # of a legend of classes, per column
_FEW, _STEPS = 5, 10  # tasks of Figure 1a, and of Figures 2 and 4, if there are such runs


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper from our runs."""

    file: str  # within the folder of results
    title: str
    caption: str
    draw: Callable[[], bytes]


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that may share a figure: same benchmark, backbone, preset and settings."""

    benchmark: str
    backbone: str
    preset: str
    settings: str  # that differ from the preset
    entries: Sequence[Entry]

    def figure(self, key: str, title: str, caption: str, draw: Callable[[], bytes]) -> PaperFigure:
        """Return a figure of these runs, by its number in the paper."""
        config = self.entries[0].config
        benchmark = slug(str(config["data"]["benchmark"]))  # a folder's hash distinguishes it from others
        about = ", ".join(filter(None, (self.benchmark, self.backbone, f"`{self.preset}`", self.settings)))
        file = f"{FOLDER}/{key}-{benchmark}-{backbone_slug(config['backbone'])}-{self.preset}.png"
        return PaperFigure(file, f"Figure {key}: {title}, {about}", caption, draw)

    def by_method(self, tasks: int) -> dict[str, list[Entry]]:
        """Return the runs with this number of tasks, over the same seeds for every method.

        If no seed is common to all methods, return only the methods with the most common one.
        """
        own = grouped((entry.method, (entry.seed, entry)) for entry in self.entries if entry.tasks == tasks)
        runs = {method: dict(pairs) for method, pairs in own.items()}
        methods = Counter(seed for of_method in runs.values() for seed in of_method)
        most = max(methods.values(), default=0)
        seeds = sorted(seed for seed, count in methods.items() if count == most)
        if most < len(runs):
            seeds = seeds[:1]
        return {m: [runs[m][seed] for seed in seeds] for m in METHODS if m in runs and set(seeds) <= set(runs[m])}

    @property
    def task_counts(self) -> list[int]:
        """Numbers of tasks of the runs."""
        return sorted({entry.tasks for entry in self.entries})

    @property
    def tasks(self) -> int:
        """Ten if there are such runs, else the most frequent number of tasks."""
        runs = {tasks: sum(map(len, self.by_method(tasks).values())) for tasks in self.task_counts}
        return _STEPS if runs.get(_STEPS) else max(runs, key=lambda tasks: runs[tasks])


def paper_figures(entries: Sequence[Entry]) -> list[PaperFigure]:
    """Return all figures for which there are runs."""
    figures: list[PaperFigure] = []
    for group in _groups(entries):
        figures += [*_queries(group), *_over_tasks(group), *_similarities(group), *_courses(group)]
    return sorted(figures, key=lambda figure: figure.title)


def _groups(entries: Sequence[Entry]) -> list[RunGroup]:
    """Return the runs of the preset with most methods, per benchmark and backbone.

    Runs with settings that differ from their preset are shown only if there are no others.
    """
    chosen = [e for e in entries if e.method in METHODS and e.preset in _PRESETS and not e.held_out]
    places = grouped(((str(entry.config["data"]["benchmark"]), entry.backbone), entry) for entry in chosen)
    groups = []
    for (benchmark, backbone), here in places.items():
        ways = grouped(((entry.preset, _overrides(entry, False)), entry) for entry in here)
        plain = {way: _plainest(runs) for way, runs in ways.items()}
        settings = {way: _settings(way[1], runs) for way, runs in plain.items()}
        best = max(
            plain, key=lambda way: (not settings[way], len({e.method for e in plain[way]}), -_PRESETS.index(way[0]))
        )
        groups.append(RunGroup(benchmark.partition("@")[0], backbone, best[0], settings[best], plain[best]))
    return groups


def _overrides(entry: Entry, of_method: bool) -> str:
    """Return what differs from the preset as text: settings of the method, or all others."""
    size = {name: value for name, value in entry.preset_overrides.items() if name == "data.stored_size"}
    changes = {**entry.varied, **size}
    return ", ".join(describe(tuple((k, v) for k, v in changes.items() if k.startswith("method.") is of_method)))


def _plainest(entries: Sequence[Entry]) -> list[Entry]:
    """Keep the runs of each method that have the fewest settings other than the preset's."""
    chosen: dict[str, str] = {}
    for entry in sorted(entries, key=lambda entry: len(entry.varied)):
        chosen.setdefault(entry.method, _overrides(entry, True))
    return [entry for entry in entries if _overrides(entry, True) == chosen[entry.method]]


def _settings(shared: str, entries: Sequence[Entry]) -> str:
    """Return as text what differs from the preset in all runs, and in those of a method."""
    own = dict.fromkeys(f"{e.method} with {_overrides(e, True)}" for e in entries if _overrides(e, True))
    return ", ".join(filter(None, (shared, *own)))


def _queries(group: RunGroup) -> list[PaperFigure]:
    entries = [entry for entry in group.entries if "queries" in entry.content["pictures"]]
    if not entries:
        return []

    def is_crowded(entry: Entry) -> bool:
        return len(entry.content["pictures"]["queries"]["names"]) > len(PALETTE) * len(MARKERS)

    entry = min(entries, key=lambda e: (is_crowded(e), e.tasks != _FEW, e.tasks != group.tasks, e.tasks, e.seed))
    looks = "some classes share a color and marker" if is_crowded(entry) else "one color and marker per class"
    embedding = entry.content["pictures"]["queries"]["embedding"]
    caption = f"Queries of test images of the first of {entry.tasks} tasks (seed {entry.seed}) by {embedding}; {looks}."
    return [group.figure("1a", "queries of a task", caption, partial(draw_queries, entry))]


def _over_tasks(group: RunGroup) -> list[PaperFigure]:
    runs = {tasks: group.by_method(tasks) for tasks in group.task_counts}
    runs = {tasks: by_method for tasks, by_method in runs.items() if len(by_method) > 1}
    if not runs:
        return []
    figures, seeds = [], _seeds(*runs.values())
    similarities = _means(runs, lambda entry: entry.content["similarity"].get("mean"))
    if any(similarities.values()):
        caption = f"Mean pairwise cosine of the prompts of different classes, {seeds}."
        draw = partial(draw_bars, similarities, "pairwise similarity", 3)
        figures.append(group.figure("1b", "similarity of prompts", caption, draw))
    final = _means(runs, lambda entry: metrics.final_average_accuracy(entry.matrix))
    caption = f"Final average accuracy (FAA), {seeds}; the axis does not start at 0."
    draw = partial(draw_bars, final, "FAA, %", 1)
    return [*figures, group.figure("1c", "final average accuracy", caption, draw)]


def _means(
    runs: Mapping[int, Mapping[str, Sequence[Entry]]], measure: Callable[[Entry], float | None]
) -> dict[int, dict[str, float]]:
    """Return the mean of a measure over seeds, by number of tasks and method."""
    values = {
        tasks: {m: [v for entry in entries if (v := measure(entry)) is not None] for m, entries in by_method.items()}
        for tasks, by_method in runs.items()
    }
    return {tasks: {m: float(np.mean(v)) for m, v in by_method.items() if v} for tasks, by_method in values.items()}


def _seeds(*groups: Mapping[str, Sequence[Entry]]) -> str:
    """Return the seeds of groups of runs by method as text."""
    texts = []
    for group in groups:
        seeds = [str(entry.seed) for entry in next(iter(group.values()))]
        texts.append(f"seed {seeds[0]}" if len(seeds) == 1 else f"mean over seeds {', '.join(seeds)}")
    return texts[0] if len(set(texts)) == 1 else "; ".join(texts)


def _similarities(group: RunGroup) -> list[PaperFigure]:
    runs = group.by_method(group.tasks)
    by_seed = [
        {m: each for m, each in zip(runs, of_seed, strict=True) if "similarity" in each.content["pictures"]}
        for of_seed in zip(*runs.values(), strict=True)
    ]
    chosen = max(by_seed, key=len, default={})  # the first seed that gives most methods
    if len(chosen) < 2:
        return []
    first = next(iter(chosen.values())).content
    count, total = len(first["pictures"]["similarity"]["labels"]), sum(map(len, first["stream"]["tasks"]))
    part = f", {count} of {total} classes" if count < total else ""
    caption = (
        f"Cosine between the prompts of different classes, in the order of learning ({group.tasks} tasks, "
        f"{_seeds({m: [entry] for m, entry in chosen.items()})}{part}), with the mean over all pairs of classes."
    )
    return [group.figure("2", "similarity between classes", caption, partial(draw_similarities, chosen))]


def _courses(group: RunGroup) -> list[PaperFigure]:
    runs = group.by_method(group.tasks)
    if group.tasks < 2 or len(runs) < 2:
        return []
    matrices = {method: np.mean([entry.matrix for entry in entries], axis=0) for method, entries in runs.items()}
    caption = f"Accuracy on each task after each later step, {_seeds(runs)}. In parentheses: points lost at the end."
    return [group.figure("4", "accuracy on each task", caption, partial(draw_courses, matrices))]


def _look(method: str) -> dict[str, Any]:
    return look(list(METHODS).index(method))


@styled
def draw_queries(entry: Entry) -> bytes:
    """Draw queries in the plane, with a color and marker per class."""
    content = entry.content["pictures"]["queries"]
    columns = -(-len(content["names"]) // _LINES)
    figure = Figure(figsize=(5 + 1.4 * columns, 4), layout="constrained", facecolor="white")
    scatter(figure.add_subplot(), content["points"], content["labels"], 5, content["names"])
    figure.legend(frameon=False, ncols=columns, fontsize=7, loc="outside right upper", handletextpad=0.2)
    return to_png(figure)


@styled
def draw_bars(values: Mapping[int, Mapping[str, float]], axis: str, digits: int) -> bytes:
    """Draw bars of methods side by side, in a group for each number of tasks."""
    methods = [method for method in METHODS if any(method in group for group in values.values())]
    bars = sum(map(len, values.values()))
    figure = Figure(figsize=(2.2 + 0.55 * bars, 3.4), layout="constrained", facecolor="white")
    axes, bar, middles, x = figure.add_subplot(), dict[str, Artist](), list[float](), 0.0
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # covers the lines of the grid
    style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 7.5, "color": INK, "bbox": ground, "zorder": 3}
    for group in values.values():
        middles.append(x + (len(group) - 1) / 2)
        for method in filter(group.__contains__, methods):
            bar[method] = axes.bar(x, group[method], 0.92, color=_look(method)["color"], zorder=2)[0]
            text = f"{group[method]:.{digits}f}"
            axes.annotate(text, (x, group[method]), (0, 2), textcoords="offset points", **style)
            x += 1.0
        x += GROUP_GAP
    every = [value for group in values.values() for value in group.values()]
    if min(every) > 1.0:  # percent: bars from 0 would look the same
        axes.set_ylim(accuracy_floor(every), min(100.0, max(every) + 4.0))
    axes.set_xticks(middles, [f"{tasks} tasks" for tasks in values])
    axes.grid(False, axis="x")
    axes.set_ylabel(axis)
    handles, names = [bar[method] for method in methods], [METHODS[method] for method in methods]
    axes.legend(handles, names, frameon=False, ncols=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    return to_png(figure)


@styled
def draw_similarities(chosen: Mapping[str, Entry]) -> bytes:
    """Draw the similarity of prompts between classes, a map per method on one scale."""
    maps = {method: np.asarray(entry.content["pictures"]["similarity"]["matrix"]) for method, entry in chosen.items()}
    low = min(float(matrix.min()) for matrix in maps.values())
    figure = Figure(figsize=(2.3 * len(maps) + 0.8, 2.9), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    for axes, (method, matrix) in zip(panels, maps.items(), strict=True):
        image = axes.imshow(matrix, cmap=DEPTH, vmin=min(low, 0.99), vmax=1.0, interpolation="none")
        axes.grid(False)
        axes.set(xticks=[], yticks=[])
        axes.set_title(METHODS[method], fontsize=10)
        axes.set_xlabel(f"mean {chosen[method].content['similarity']['mean']:.3f}")
    figure.colorbar(image, ax=panels, fraction=0.02, pad=0.01, label="cosine")
    return to_png(figure)


@styled
def draw_courses(matrices: Mapping[str, NDArray[np.float64]]) -> bytes:
    """Draw a panel per task with the accuracy of each method after each step."""
    count = len(next(iter(matrices.values())))
    columns = min(5, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(2.7 * columns, 2.5 * rows), layout="constrained", facecolor="white")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for task, axes in enumerate(panels[:count]):
        _course(axes, task, count, {method: matrix[task, task:] for method, matrix in matrices.items()})
    for axes in panels[count:]:
        axes.set_visible(False)
    handles = [_line(method) for method in matrices]
    figure.legend(handles=handles, frameon=False, ncols=len(handles), fontsize=9, loc="outside upper center")
    figure.supylabel("accuracy, %", fontsize=9.5, color=MUTED)
    figure.supxlabel("after learning task", fontsize=9.5, color=MUTED)
    return to_png(figure)


def _line(method: str, places: Sequence[float] = (), values: Sequence[float] = ()) -> Line2D:
    return Line2D(places, values, label=METHODS[method], markersize=3.5, linewidth=1.3, **_look(method))


def _course(axes: Axes, task: int, count: int, lines: Mapping[str, NDArray[np.float64]]) -> None:
    """Draw a line per method, with what it lost at its end."""
    for method, values in lines.items():
        axes.add_line(_line(method, range(task + 1, count + 1), values.tolist()))
    axes.autoscale_view()
    low, high = axes.get_ylim()
    if high - low < _LEAST:
        low, high = ((low + high + sign * _LEAST) / 2 for sign in (-1, 1))
        axes.set_ylim(low, high)
    gap = (high - low) / _TEXTS
    places = spread([float(values[-1]) for values in lines.values()], gap, (low + gap / 2, high))
    for (method, values), place in zip(lines.items(), places, strict=True):
        lost = f"({values[0] - values[-1]:.1f})".replace("-", "−")
        axes.text(count + 0.35, place, lost, va="center", fontsize=7.5, color=_look(method)["color"])
    axes.set_title(f"Task {task + 1}", fontsize=9.5, color=MUTED)
    axes.set_xlim(0.6, count * 1.28)
    axes.set_xticks(range(count, 0, -count // 5)[::-1])  # at most six steps, the last among them
    axes.tick_params(labelsize=8.5)
    axes.grid(False, axis="x")
