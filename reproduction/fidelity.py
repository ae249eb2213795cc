"""The figure and the table of docs/fidelity.md, from recorded runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from probprompt.config import flatten
from probprompt.evaluation import metrics
from probprompt.report.figures import INK, MARKERS, MUTED, PALETTE, styled
from probprompt.runs.run import Recorded, read_book
from reproduction.plots import to_png

PRINTED = {30: 80.23, 20: 80.00, 10: 61.04, 5: 33.55}
"""Final average accuracy by N_s in the paper's Table 6; with one sample training fails."""
STD = 4.5
"""The initial standard deviation that fits them."""


def select(runs: Sequence[Recorded], **settings: Any) -> list[Recorded]:
    """Return the runs that have these settings, whose dots are double underscores."""
    wanted = {name.replace("__", "."): value for name, value in settings.items()}
    return [run for run in runs if wanted.items() <= flatten(run.record.config).items()]


def accuracy(runs: Sequence[Recorded]) -> str:
    """Return the final average accuracy of runs, with its standard deviation over several."""
    mean, std = metrics.mean_and_std([metrics.final_average_accuracy(run.matrix) for run in runs])
    return f"{mean:.1f}" + (f" ± {std:.1f}" if len(runs) > 1 else "")


@styled
def draw_noise(book: Path) -> bytes:
    """Draw accuracy against the noise in a prompt, for two injections and two inputs, with the paper's points."""
    runs = read_book(book)
    figure = Figure(figsize=(8.0, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    lines = [("prefix", "unit"), ("prefix", "backbone"), ("tokens", "unit"), ("tokens", "backbone")]
    names = {"prefix": "prefix", "tokens": "input tokens", "unit": "[0, 1] input", "backbone": "normalized input"}
    for number, (injection, scale) in enumerate(lines):
        points = dict[float, list[float]]()
        for run in select(runs, method__injection=injection, backbone__normalisation=scale):
            method = run.record.config["method"]
            noise = round(method["initial_std"] / method["samples"] ** 0.5, 4)
            points.setdefault(noise, []).append(metrics.final_average_accuracy(run.matrix))
        places = sorted(points)
        look: dict[str, Any] = {"color": PALETTE[number], "marker": MARKERS[number], "markersize": 4.5}
        axes.plot(places, [np.mean(points[place]) for place in places], linewidth=1.6, **look)
        axes.plot([], [], label=f"{names[injection]}, {names[scale]}", **look)
        pairs = [(place, value) for place in places for value in points[place]]
        axes.plot(*zip(*pairs, strict=True), linestyle="", alpha=0.45, **look)
    places = [STD / count**0.5 for count in PRINTED]
    axes.plot(places, list(PRINTED.values()), "--", color=MUTED, marker="x", label=f"the paper, if its σ is {STD:g}")
    axes.set_xscale("log")
    axes.set_xticks([0.25, 0.5, 1, 1.5, 2, 3, 4, 8], ["0.25", "0.5", "1", "1.5", "2", "3", "4", "8"], color=INK)
    axes.minorticks_off()
    axes.set(xlabel="noise in a prompt, σ/√N_s", ylabel="final average accuracy, %")
    axes.legend(frameon=False)
    return to_png(figure)
