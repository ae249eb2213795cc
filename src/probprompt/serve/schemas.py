"""Stored jobs and responses of the service: predictions, history, accuracy matrix, figures."""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from probprompt.classifier import ContinualClassifier, Prediction
from probprompt.errors import UserError

State = Literal["waiting", "running", "done", "failed", "cancelled"]
FINISHED: frozenset[State] = frozenset({"done", "failed", "cancelled"})


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TaughtClass(_Record):
    """A class of a lesson, with its number of images."""

    name: str
    images: int


class Progress(_Record):
    """Progress of a job."""

    stage: str
    done: int
    total: int


class Risk(_Record):
    """An old class that may now be classified as a new one."""

    old: str
    new: str
    share: float
    """Expected share of the old class's images, estimated from its held-out images."""


class Report(_Record):
    """Result of a lesson."""

    classes: list[str]
    images: int
    seconds: float
    calibration_error: float | None
    temperature: float | None
    retention: list[Risk]


class Job(_Record):
    """A lesson or a rollback, with its result."""

    id: int
    kind: Literal["teach", "rollback"]
    state: State = "waiting"
    created: str
    finished: str | None = None
    classes: list[TaughtClass] = []
    refine: bool = False
    to: int | None = None
    """Version to restore."""
    before: int | None = None
    """Current version before this job; rolling back to it undoes the job."""
    version: int | None = None
    """Version that the job created."""
    progress: Progress | None = None
    report: Report | None = None
    warnings: list[str] = []
    error: str | None = None


class JobChanges(TypedDict, total=False):
    """Fields of a job that change while it runs."""

    state: State
    finished: str
    before: int
    version: int
    progress: Progress | None
    report: Report
    warnings: list[str]
    error: str | None


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True)


class Problem(_Value):
    """Reason why a request was rejected."""

    error: str


class Ranked(_Value):
    """A class with its probability."""

    label: str
    probability: float


class PredictedImage(_Value):
    """Prediction for one image."""

    name: str = Field(description="file name given by the sender")
    label: str | None = Field(description="most probable class; null if the file could not be read")
    probability: float
    top: list[Ranked]
    unknown: bool = Field(description="true if the image is unlike all classes")
    novelty: float = Field(description="distance from the nearest class; above 1 the image is unknown")
    error: str | None = Field(description="reason why the file could not be read")

    @classmethod
    def of(cls, name: str, prediction: Prediction) -> "PredictedImage":
        """Return a prediction under the sender's name for the image."""
        top = [Ranked(label=label, probability=probability) for label, probability in prediction.top]
        return cls.model_validate({**vars(prediction), "name": name, "top": top})

    @classmethod
    def refused(cls, name: str, reason: str) -> "PredictedImage":
        """Return the answer for a file that could not be read."""
        return cls(name=name, label=None, probability=0.0, top=[], unknown=False, novelty=0.0, error=reason)


class Predictions(_Value):
    """Predictions for the images of one request, in order, all by one version."""

    version: int
    predictions: list[PredictedImage]


class ModelLimits(_Value):
    """Limits of one request."""

    images: int
    lesson_images: int
    image_bytes: int
    upload_bytes: int
    pixels: int


class Model(_Value):
    """The current model."""

    version: int
    classes: list[str]
    tasks: int
    backbone: str
    accuracy: float | None = Field(description="accuracy in % on held-out images; null if it was not measured")
    held_out_images: int = Field(description="number of images behind the accuracy")
    random_guess: float | None = Field(description="accuracy in % of a random guess; null without classes")
    limits: ModelLimits


class KeptVersion(_Value):
    """One kept version of the model."""

    number: int
    when: str
    what: str
    classes: list[str]
    images: int
    known: int
    note: str
    current: bool


class History(_Value):
    """Kept versions, the newest first."""

    versions: list[KeptVersion]


class Jobs(_Value):
    """Lessons and rollbacks, the newest first."""

    jobs: list[Job]


class Back(_Record):
    """Request to restore a version."""

    to: int = Field(ge=1)


class Cell(_Value):
    """An accuracy with its colors."""

    text: str
    value: float
    background: str
    ink: str


class Row(_Value):
    """Accuracy on one lesson under each version."""

    name: str
    cells: list[Cell | None]


class AccuracyMatrix(_Value):
    """Accuracy in % on each lesson (rows) under each version (columns)."""

    note: str
    steps: list[str]
    rows: list[Row]
    averages: list[str]


class Drawing(_Value):
    """A figure in the colors of the page."""

    svg: str
    caption: str


class PromptFigures(_Value):
    """Similarity of the prompts of different classes."""

    note: str
    figures: list[Drawing]


HELD_OUT = (
    "Accuracy in % on held-out images of each lesson (rows) under each version (columns), by a head that has not seen "
    "them. Falling values mean forgetting."
)
NOTHING_HELD_OUT = "No held-out images. Lessons hold some out for classes with three or more images."
NO_PROMPTS = "Not available. This needs two classes and stored queries, as in the preset 'flagship'."


@lru_cache(maxsize=1)
def measure_held_out(classifier: ContinualClassifier) -> tuple[float | None, int]:
    """Return the accuracy in % on held-out images and their number.

    The accuracy is None if prompts have changed since, or if the model has no statistics to count the images by.
    """
    if not classifier.classes:
        return None, 0
    state = classifier.predictor.state
    images = [0] * len(state.tasks)
    try:
        for known in state.classes:
            images[known.task] += len(known.held.tensors["rows"])
    except UserError:  # a model that was published without its statistics
        return None, 0
    pairs = [(value, count) for value, count in zip(state.held_out, images, strict=True) if count]
    measured = [value * count for value, count in pairs if value is not None]
    return sum(measured) / sum(images) if measured and len(measured) == len(pairs) else None, sum(images)


Figures = TypeVar("Figures")
_DRAWING = threading.Lock()


def once_per_version(draw: Callable[[ContinualClassifier], Figures]) -> Callable[[ContinualClassifier], Figures]:
    """Return a function that draws only when the version has changed."""
    drawn: tuple[int, Figures] | None = None

    def draw_once(classifier: ContinualClassifier) -> Figures:
        nonlocal drawn
        with _DRAWING:
            if drawn is None or drawn[0] != classifier.version:
                drawn = classifier.version, draw(classifier)
            return drawn[1]

    return draw_once


def draw_matrix(classifier: ContinualClassifier) -> AccuracyMatrix:
    """Return the accuracy matrix of the kept versions, with the colors of reports."""
    from probprompt.report import figures  # late: matplotlib is slow to load

    matrix = classifier.accuracy_matrix()
    accuracies = [value for row in matrix.values for value in row if value is not None]
    if not accuracies:
        return AccuracyMatrix(note=NOTHING_HELD_OUT, steps=[], rows=[], averages=[])
    floor = figures.accuracy_floor(accuracies)

    def cell(value: float | None) -> Cell | None:
        if value is None:
            return None
        background, ink = figures.shade(value, floor, 100.0)
        return Cell(text=_number(value), value=value, background=background, ink=ink)

    named = zip(matrix.tasks, matrix.values, strict=True)
    rows = [Row(name=name, cells=[cell(value) for value in values]) for name, values in named]
    columns = [[value for value in column if value is not None] for column in zip(*matrix.values, strict=True)]
    averages = [_number(sum(column) / len(column)) if column else "" for column in columns]
    return AccuracyMatrix(note=HELD_OUT, steps=list(map(str, matrix.versions)), rows=rows, averages=averages)


def draw_prompts(classifier: ContinualClassifier) -> PromptFigures:
    """Draw the similarity of prompts between classes, and by block."""
    from probprompt.report import figures  # late: matplotlib is slow to load

    diversity = classifier.prompt_diversity()
    if diversity is None:
        return PromptFigures(note=NO_PROMPTS, figures=[])
    labels, mean, start = diversity["labels"], diversity["mean"], diversity["initial_mean"]
    low = min(0.0, *(value for row in diversity["matrix"] for value in row))
    text = f"mean {mean:.2f}, {start:.2f} at initialization"
    description = f"Heat map of the cosine similarity between the prompts of {len(labels)} classes; {text}."
    heat = figures.similarity_map(diversity["matrix"], labels, low, description)
    drawn = [_drawing(heat, "Cosine similarity between the prompts for one image of each class.")]
    blocks = diversity["per_block"]
    if len(blocks) > 1:
        values = ", ".join(f"block {name}: {value:.2f}" for name, value in blocks.items())
        bars = figures.block_bars(blocks, mean, f"Bar chart of the mean similarity by block. {values}.")
        drawn.append(_drawing(bars, "Mean similarity in each block; the dashed line is the mean of all."))
    note = (
        f"Mean similarity {mean:.2f} ({start:.2f} at initialization), effective rank "
        f"{diversity['effective_rank']:.1f} ({diversity['initial_effective_rank']:.1f}). "
        "At 1.0 all classes get the same prompt (collapse)."
    )
    return PromptFigures(note=note, figures=drawn)


def _drawing(svg: str, caption: str) -> Drawing:
    # The page sets styles itself: its content security policy rejects style attributes.
    # The text is converted to str first, because Markup.replace would escape the quotes.
    return Drawing(svg=str(svg).replace(' style="', ' data-style="'), caption=caption)


def _number(value: float) -> str:
    return "100" if value >= 99.95 else f"{value:.1f}"
