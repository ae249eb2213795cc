"""The figure and the table of docs/fidelity.md, and the table of docs/demo.md, from recorded runs."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from probprompt.config import flatten
from probprompt.evaluation import metrics
from probprompt.report.figures import INK, MARKERS, MUTED, PALETTE, styled
from probprompt.report.tables import NOTHING, markdown_table
from probprompt.runs.run import Recorded, read_book
from reproduction import paper
from reproduction.plots import to_png
from reproduction.results import preset_overrides

STD = 4.5  # the initial standard deviation of published
_INPUTS = {"unit": "[0, 1] input", "backbone": "normalized input"}
_PROMPTS = {"mean_similarity": 2, "mean_rank": 1, "components_used": 1}


def select(runs: Sequence[Recorded], **settings: Any) -> list[Recorded]:
    """Return the runs that have these settings, whose dots are double underscores."""
    wanted = {name.replace("__", "."): value for name, value in settings.items()}
    return [run for run in runs if wanted.items() <= flatten(run.record.config).items()]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return a mean, with the standard deviation of several values."""
    mean, std = metrics.mean_and_std(values)
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if len(values) > 1 else "")


def accuracy(runs: Sequence[Recorded]) -> str:
    """Return the final average accuracy of runs."""
    return spread([metrics.final_average_accuracy(run.matrix) for run in runs])


@styled
def draw_noise(book: Path) -> bytes:
    """Draw accuracy against the noise in a prompt, for two injections and two inputs, with the paper's points."""
    runs = read_book(book)
    figure = Figure(figsize=(8.0, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for number, (injection, scale) in enumerate(product(("prefix", "tokens"), ("unit", "backbone"))):
        points = dict[float, list[float]]()
        for run in select(runs, method__injection=injection, backbone__normalisation=scale):
            method = run.record.config["method"]
            noise = round(method["initial_std"] / method["samples"] ** 0.5, 4)
            points.setdefault(noise, []).append(metrics.final_average_accuracy(run.matrix))
        places = sorted(points)
        look: dict[str, Any] = {"color": PALETTE[number], "marker": MARKERS[number], "markersize": 4.5}
        axes.plot(places, [np.mean(points[place]) for place in places], label=f"{injection}, {_INPUTS[scale]}", **look)
        pairs = [(place, value) for place in places for value in points[place]]
        axes.plot(*zip(*pairs, strict=True), linestyle="", alpha=0.45, **look)
    printed = [(row.label, row.printed["10"].get("FAA")) for row in paper.find("samples").rows]
    pairs = [(STD / int(count) ** 0.5, values[0]) for count, values in printed if count.isdigit() and values]
    axes.plot(*zip(*pairs, strict=True), "--", color=MUTED, marker="x", label=f"the paper, if its σ is {STD:g}")
    axes.set_xscale("log")
    axes.set_xticks([0.25, 0.5, 1, 1.5, 2, 3, 4, 8], ["0.25", "0.5", "1", "1.5", "2", "3", "4", "8"], color=INK)
    axes.minorticks_off()
    axes.set(xlabel="noise in a prompt, σ/√N_s", ylabel="final average accuracy, %")
    axes.legend(frameon=False)
    return to_png(figure)


def fill(page: str, table: str) -> str:
    """Put a table into a page between its two marks."""
    begin, end = "<!-- table: made by python -m reproduction fidelity -->", "<!-- end of table -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"


def demo_table(book: Path) -> str:
    """Set the recorded runs of the demo, one row per method."""
    every, rows = read_book(book), []
    for method, name in {"probprompt": "ProbPrompt", "vq-prompt": "VQ-Prompt", "ranpac": "RanPAC"}.items():
        runs = select(every, method__name=method)
        has_prompts = "mean_rank" in runs[0].similarity
        cells = [accuracy(runs), spread([metrics.average_forgetting(run.matrix) for run in runs])]
        for key, digits in _PROMPTS.items():
            cells.append(spread([run.similarity[key] for run in runs], digits) if has_prompts else NOTHING)
        rows.append((name, *cells))
    header = ("Method", "FAA ↑", "Forgetting ↓", "Similarity of mean prompts", "Effective rank", "Components used")
    return markdown_table(header, rows)


def fidelity_table(results: Path) -> str:
    """Set what the paper reports next to what recorded runs of an interpretation give."""
    literal, samples = (read_book(results / "cifar100" / f"{name}.jsonl") for name in ("fidelity", "samples"))
    readings = read_book(results / "emoji-r" / "readings.jsonl")

    def several(name: str, *values: Any, **settings: Any) -> str:
        """List accuracies in the literal interpretation, with these settings and no others."""
        varied = {key.replace("__", ".") for key in (f"method.{name}", "training.epochs", "data.validation", *settings)}
        found = [run for run in literal if set(preset_overrides(run.record)) <= varied]
        return ", ".join(accuracy(select(found, **{f"method__{name}": value}, **settings)) for value in values)

    def prompts(gradient: str) -> str:
        """Describe mean prompts with distances in units of the initial standard deviation."""
        runs = select(readings, method__relevance_temperature=0.05, method__relevance_gradient=gradient)
        mean = [float(np.mean([run.similarity[name] for run in runs])) for name in (*_PROMPTS, "largest_share")]
        return "{:.2f}, rank {:.1f}, {:.1f} of 10 used, largest share {:.2f}".format(*mean)

    counts = ", ".join(accuracy(select(samples, method__samples=count)) for count in (1, 5, 10, 30, 0))
    free = {"method__regularisation": 0.0}
    parts = several("variant", "deterministic", "independent", "mixture", **free)
    rows = (
        ("Fig. 1b, 2: similarity .82 to .86", "`published`", prompts("none"), "fits, for mean prompts"),
        ("the same, rivals .94 and more", "gradient into all", prompts("full"), "collapses as rivals do"),
        ("Table 6: 1 fails; 33.6, 61.0, 80.2 for 5, 10, 30; mean 79.2", "`published`", counts, "few samples fail"),
        ("Table 4: 77.5, 78.7, 80.0", "literal", parts, "not seen"),
        ("Table 4, 6: the loss adds 0.3", "literal", several("regularisation", 0.0, 1e-6, 1.0), "not seen"),
        ("Table 5: K = 7 to 10 within 0.2", "literal", several("top_k", 7, 8, 9, None), "as in the paper"),
        ("Table 8: 79.1, 80.0 by cosine", "literal", several("aggregation", "mean", "cosine", **free), "not seen"),
    )
    return markdown_table(("The paper", "Interpretation", "Measured here", "Result"), rows, text_columns=4)


def tables(results: Path) -> dict[str, str]:
    """Return the table of each page."""
    return {"demo.md": demo_table(results / "emoji-r" / "demo.jsonl"), "fidelity.md": fidelity_table(results)}
