"""Draw docs/overview.png, the figure of the README, from embedded images and recorded runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from numpy.typing import NDArray

from probprompt.data import emoji_r
from probprompt.report.figures import INK, MUTED, PALETTE, RULE, styled
from reproduction.plots import to_png
from reproduction.results import read_entry

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "results" / "cifar100" / "vit-ti16-augreg-in21k-ft-in1k"
LINES = {
    "probprompt-flagship": "Flagship",
    "ranpac-matched": "RanPAC",
    "linear-probe-matched": "Linear probe",
    "ft-matched": "Fine-tuning",
}
TASKS = (("Task 1", ("cat", "flower")), ("Task 2", ("boat", "clock")))
SHOWN = "cat-face", "fxemoji"
"""Emoji and style of the test image, which the quick start of the README classifies correctly."""


def curve(stem: str) -> tuple[NDArray[np.float64], int]:
    """Return the average accuracy after each task, as the mean over seeds, and the number of seeds."""
    matrices = [read_entry(ROOT / "results", path).matrix for path in sorted(RUNS.glob(f"{stem}-s*.json"))]
    averages = [[matrix[: step + 1, step].mean() for step in range(len(matrix))] for matrix in matrices]
    return np.mean(averages, axis=0), len(matrices)


@styled
def draw_overview() -> bytes:
    """Draw what the tool does on the left, and how accuracy develops over ten tasks on the right."""
    figure = Figure(figsize=(8.0, 3.2), facecolor="white")
    _draw_steps(figure)
    axes = figure.add_axes((0.6, 0.15, 0.225, 0.63))
    counts = dict[int, list[str]]()
    for number, (stem, name) in enumerate(LINES.items()):
        values, seeds = curve(stem)
        axes.plot(range(1, len(values) + 1), values, color=PALETTE[number], marker="o", markersize=3.5, linewidth=2)
        style: dict[str, Any] = {"va": "center", "color": PALETTE[number], "fontsize": 9, "fontweight": "bold"}
        place = (len(values), values[-1]), (7, (3, -1, -2, 0)[number])
        axes.annotate(f"{name} {values[-1]:.1f}", *place, textcoords="offset points", **style)
        counts.setdefault(seeds, []).append(name.lower())
    (most, _), *rest = counts.items()
    exceptions = "".join(f"; {', '.join(names)}: {count}" for count, names in rest)
    _heading(figure, 0.565, "Average accuracy on CIFAR-100, %", f"ViT-Ti/16, mean of {most} seeds{exceptions}")
    axes.set(xlabel="tasks learned", ylim=(0, 101), xlim=(0.6, 10.4))
    axes.set_xticks([1, 4, 7, 10])
    axes.tick_params(labelsize=10)
    axes.xaxis.label.set_fontsize(10)
    return to_png(figure)


def _draw_steps(figure: Figure) -> None:
    """Draw the images of two tasks, and a test image of the first that is still classified correctly."""
    pixels, renditions = emoji_r.read()
    for column, (title, labels) in enumerate(TASKS):
        left = 0.015 + 0.19 * column
        _heading(figure, left, title, ("learn two classes", "add two, in seconds")[column])
        for row, label in enumerate(labels):
            own = [place for place, item in enumerate(renditions) if (item.label, item.split) == (label, "train")]
            for position, place in enumerate((own[1], own[len(own) // 2])):
                _image(figure, pixels[place], (left + 0.077 * position, 0.51 - 0.36 * row, 0.073, 0.27))
            figure.text(left + 0.075, 0.495 - 0.36 * row, label, ha="center", va="top", fontsize=10, color=INK)
    _heading(figure, 0.395, "After task 2", "cat is still right")
    (place,) = (
        place for place, item in enumerate(renditions) if ("cat", *SHOWN) == (item.label, item.emoji, item.style)
    )
    _image(figure, pixels[place], (0.4, 0.36, 0.113, 0.42))
    figure.text(0.4565, 0.33, "cat \u2713", ha="center", va="top", fontsize=14, fontweight="bold", color=PALETTE[2])
    for start in (0.17, 0.36):
        look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 13, "color": MUTED, "linewidth": 1.4}
        figure.add_artist(FancyArrowPatch((start - 0.004, 0.455), (start + 0.034, 0.455), **look))


def _heading(figure: Figure, left: float, title: str, text: str) -> None:
    figure.text(left, 0.91, title, fontsize=11, fontweight="bold", color=INK)
    figure.text(left, 0.84, text, fontsize=9, color=MUTED)


def _image(figure: Figure, pixels: NDArray[np.uint8], box: Sequence[float]) -> None:
    axes = figure.add_axes((box[0], box[1], box[2], box[3]))
    axes.imshow(pixels, interpolation="lanczos")
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(visible=True, color=RULE)


if __name__ == "__main__":
    (ROOT / "docs" / "overview.png").write_bytes(draw_overview())
    print("Wrote docs/overview.png.")
