"""What is shown of the model's inside: the accuracy matrix, and how different prompts are."""

import threading

from probprompt.classifier import ContinualClassifier
from probprompt.serve.values import AccuracyMatrix, Cell, Drawing, PromptFigures, Row

HELD_OUT = (
    "One row per lesson, one column per version: accuracy in % on the images of the lesson that are held out while "
    "probabilities are calibrated, under a head that has not seen them. Reading along a row shows what was kept."
)
NOTHING_HELD_OUT = "There is nothing to show: lessons with three images of a class or more have some held out."
NO_PROMPTS = (
    "There is nothing to show: this needs two classes or more, and a method with prompts whose queries are kept, "
    "as in the preset 'flagship'."
)


class Insight:
    """Tables and figures, made once for each version."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accuracy: tuple[int, AccuracyMatrix] | None = None
        self._prompts: tuple[int, PromptFigures] | None = None

    def accuracy(self, classifier: ContinualClassifier) -> AccuracyMatrix:
        """The accuracy matrix of the versions that are kept."""
        with self._lock:
            if self._accuracy is None or self._accuracy[0] != classifier.version:
                self._accuracy = classifier.version, draw_matrix(classifier)
            return self._accuracy[1]

    def prompts(self, classifier: ContinualClassifier) -> PromptFigures:
        """Figures of how alike the prompts of classes are."""
        with self._lock:
            if self._prompts is None or self._prompts[0] != classifier.version:
                self._prompts = classifier.version, draw_prompts(classifier)
            return self._prompts[1]


def draw_matrix(classifier: ContinualClassifier) -> AccuracyMatrix:
    """The accuracy matrix with the colours that reports give it."""
    from probprompt.report import figures  # matplotlib loads only when somebody looks

    found = classifier.accuracy_matrix()
    known = [value for row in found.values for value in row if value is not None]
    if not known:
        return AccuracyMatrix(note=NOTHING_HELD_OUT, steps=[], rows=[], averages=[])
    floor = figures.accuracy_floor(known)

    def cell(value: float | None) -> Cell | None:
        if value is None:
            return None
        background, ink = figures.shade(value, floor, 100.0)
        return Cell(text=_number(value), value=value, background=background, ink=ink)

    rows = [
        Row(name=name, cells=[cell(value) for value in values])
        for name, values in zip(found.tasks, found.values, strict=True)
    ]
    columns = [[value for value in column if value is not None] for column in zip(*found.values, strict=True)]
    averages = [_number(sum(column) / len(column)) if column else "" for column in columns]
    return AccuracyMatrix(
        note=HELD_OUT, steps=[str(version) for version in found.versions], rows=rows, averages=averages
    )


def draw_prompts(classifier: ContinualClassifier) -> PromptFigures:
    """The similarity of prompts between classes, and by block."""
    from probprompt.report import figures  # matplotlib loads only when somebody looks

    found = classifier.prompt_diversity()
    if found is None:
        return PromptFigures(note=NO_PROMPTS, figures=[])
    labels, mean, start = found["labels"], found["mean"], found["initial_mean"]
    low = min(0.0, *(value for row in found["matrix"] for value in row))
    words = f"mean {mean:.2f}, {start:.2f} at initialisation"
    heat = figures.similarity_map(
        found["matrix"],
        labels,
        low,
        "similarity",
        f"Heat map of the cosine similarity between the prompts of {len(labels)} classes; {words}.",
    )
    drawn = [Drawing(svg=_unstyled(heat), caption="Cosine similarity between the prompts for an image of each class.")]
    blocks = list(found["per_block"].items())
    if len(blocks) > 1:
        spoken = ", ".join(f"block {name}: {value:.2f}" for name, value in blocks)
        bars = figures.block_bars(blocks, mean, "blocks", f"Bar chart of the mean similarity by block. {spoken}.")
        drawn.append(
            Drawing(svg=_unstyled(bars), caption="Mean similarity in each block; the dashed line is the mean of all.")
        )
    note = (
        f"Mean similarity {mean:.2f} ({start:.2f} at initialisation), effective rank {found['effective_rank']:.1f} "
        f"({found['initial_effective_rank']:.1f}). At a similarity of 1 every class gets the same prompt."
    )
    return PromptFigures(note=note, figures=drawn)


def _unstyled(svg: str) -> str:
    """A figure whose styles the page sets itself: its policy refuses them as attributes."""
    return svg.replace(' style="', ' data-style="')


def _number(value: float) -> str:
    return "100" if value >= 99.95 else f"{value:.1f}"
