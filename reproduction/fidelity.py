"""The tables and the figure of docs/fidelity.md and docs/demo.md, from recorded runs."""

import re
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import t as student

from probprompt.config import flatten, from_stored
from probprompt.evaluation import metrics
from probprompt.report.figures import INK, MARKERS, MUTED, PALETTE, styled
from probprompt.report.tables import NOTHING, markdown_table
from probprompt.runs.run import RecordedRun, read_results
from reproduction import paper
from reproduction.plots import to_png
from reproduction.results import preset_overrides

STD = 4.5  # the initial standard deviation of published
_INPUTS = {"unit": "[0, 1] input", "backbone": "normalized input"}
_RIVALS = (
    ("vq-prompt", "ProbPrompt minus VQ-Prompt: 0.65, 0.8", "no lead"),
    ("coda-prompt", "ProbPrompt minus CODA-Prompt", "ahead on CIFAR-100"),
    ("linear-probe", "ProbPrompt minus linear probe", "behind on emoji-r"),
)
_TABLE = re.compile(r"(<!-- table: made by .*? -->).*?(<!-- end of table -->)", re.DOTALL)
_PROMPTS = {"mean_similarity": 2, "mean_rank": 1, "components_used": 1}


def select(runs: Sequence[RecordedRun], **settings: Any) -> list[RecordedRun]:
    """Return the runs that have these settings, with dots or double underscores."""
    expected = {name.replace("__", "."): value for name, value in settings.items()}
    return [run for run in runs if all(_settings(run).get(key) == value for key, value in expected.items())]


@cache
def _settings(run: RecordedRun) -> dict[str, Any]:
    """Return all settings by dotted names, with defaults for those that a record lacks."""
    return {**run.record.flat_settings, **flatten(from_stored(run.record.config))}


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return a mean, with the standard deviation of several values."""
    mean, std = metrics.mean_and_std(values)
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if len(values) > 1 else "")


def accuracy(runs: Sequence[RecordedRun]) -> str:
    """Return the final average accuracy of runs."""
    return spread([metrics.final_average_accuracy(run.matrix) for run in runs])


@styled
def draw_noise(book: Path) -> bytes:
    """Draw accuracy against the noise in a prompt, with the paper's points."""
    runs = read_results(book)
    figure = Figure(figsize=(8.0, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for number, (injection, scale) in enumerate(product(("prefix", "tokens"), ("unit", "backbone"))):
        points = dict[float, list[float]]()
        for run in select(runs, method__injection=injection, backbone__normalization=scale):
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
    """Put a table into a page between its two comments."""
    return _TABLE.sub(lambda comments: f"{comments[1]}\n\n{table}\n\n{comments[2]}", page)


def demo_table(book: Path) -> str:
    """Tabulate the recorded runs of the demo, one row per method."""
    every, rows = read_results(book), []
    for method, name in {"probprompt": "ProbPrompt", "vq-prompt": "VQ-Prompt", "ranpac": "RanPAC"}.items():
        runs = select(every, method__name=method)
        has_prompts = "mean_rank" in runs[0].similarity
        cells = [accuracy(runs), spread([metrics.average_forgetting(run.matrix) for run in runs])]
        for key, digits in _PROMPTS.items():
            cells.append(spread([run.similarity[key] for run in runs], digits) if has_prompts else NOTHING)
        rows.append((name, *cells))
    header = ("Method", "FAA ↑", "Forgetting ↓", "Similarity of mean prompts", "Effective rank", "Components used")
    return markdown_table(header, rows)


def by_seed(runs: Sequence[RecordedRun]) -> dict[int, NDArray[np.float64]]:
    """Return final average accuracy and forgetting of runs by seed."""
    numbers = metrics.final_average_accuracy, metrics.average_forgetting
    return {run.record.config["seeds"]["order"]: np.array([of(run.matrix) for of in numbers]) for run in runs}


def paired(runs: Sequence[RecordedRun], other: str, evaluation: str = "image") -> str:
    """Return ProbPrompt minus another method over seeds, with half the 95% interval."""
    theirs = by_seed(select(runs, method__name=other))
    mine = by_seed(select(runs, method__name="probprompt", method__evaluation=evaluation))
    apart = np.array([mine[seed] - theirs[seed] for seed in mine])
    half = student.ppf(0.975, len(apart) - 1) * apart.std(0, ddof=1) / len(apart) ** 0.5
    return ", forgetting ".join(
        f"{mean:+.1f} ± {wide:.1f}".replace("-", "−") for mean, wide in zip(apart.mean(0), half, strict=True)
    )


def fidelity_table(results: Path) -> str:
    """Tabulate what the paper reports and what recorded runs give."""
    published, cifar = (read_results(results / "cifar100" / f"{name}.jsonl") for name in ("published", "paired"))
    emoji = read_results(results / "emoji-r" / "paired.jsonl")
    shared = set.intersection(*(set(preset_overrides(run.record)) for run in published))

    def several(name: str, *values: Any, tasks: int = 10, **settings: Any) -> str:
        """Return accuracies under these settings and no others as text."""
        varied = {"data.tasks", *shared, *(f"method.{key}" for key in (name, *settings))}
        runs = [run for run in select(published, data__tasks=tasks) if set(preset_overrides(run.record)) <= varied]
        fixed = {f"method__{key}": value for key, value in settings.items()}
        return ", ".join(accuracy(select(runs, **fixed, **{f"method__{name}": value})) for value in values)

    def prompts(runs: Sequence[RecordedRun]) -> str:
        """Describe mean prompts, and the change of accuracy with the prompts of another image."""
        mean = {name: float(np.mean([run.similarity[name] for run in runs])) for name in runs[0].similarity}
        swapped = mean["swap_swapped"] - mean["swap_own"]
        text = "{mean_similarity:.2f}, rank {mean_rank:.1f}, {components_used:.0f} of {components:.0f} used"
        return f"{text.format(**mean)}, swap {swapped:+.1f}".replace("-", "−")

    parts = several("variant", "deterministic", "independent", "mixture", regularization=0.0)
    rows = [
        ("Fig. 1b, 2: ProbPrompt, .82 to .86", prompts(select(cifar, method__name="probprompt")), "diverse"),
        ("VQ-Prompt, .94 and more", prompts(select(cifar, method__name="vq-prompt")), "collapses"),
        ("CODA-Prompt, .94 and more", prompts(select(cifar, method__name="coda-prompt")), "diverse"),
        ("Table 6: N_s = 1 fails; 5 and 10: 33.6, 61.0", several("samples", 1, 5, 10), "same shape"),
        ("N_s = 20 and 30: 80.0, 80.2; mean: 79.2", several("samples", 20, 30, 0), "mean better, not worse"),
        ("Table 4: 77.5, 78.7, 80.0", parts, "opposite"),
        ("Tables 4, 6: the loss adds 0.3", several("regularization", 0.0, 1e-6), "within the seeds"),
        ("Table 5: K = 7, 8, 9, 10 within 0.2", several("top_k", 7, 8, 9, None), "as in the paper"),
        ("the same, 5 tasks", several("top_k", 7, 8, 9, None, tasks=5), "as in the paper"),
        ("Table 8: 79.1; 80.0 by cosine", several("aggregation", "mean", "cosine", regularization=0.0), "not seen"),
    ]
    for name, title, result in _RIVALS:
        rows.append((title, f"{paired(cifar, name)}; emoji-r {paired(emoji, name)}", result))
    rows.append(("with mean prompts, minus VQ-Prompt", f"emoji-r {paired(emoji, 'vq-prompt', 'mean')}", "no lead"))
    return markdown_table(("The paper", "Measured here", "Result"), rows, text_columns=3)


def tables(results: Path) -> dict[str, str]:
    """Return the table of each page."""
    return {"demo.md": demo_table(results / "emoji-r" / "demo.jsonl"), "fidelity.md": fidelity_table(results)}
