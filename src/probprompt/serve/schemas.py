"""Jobs as they are stored, and what the service answers: predictions, history, accuracy matrix and figures."""

import threading
from collections.abc import Callable
from typing import Literal, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from probprompt.classifier import ContinualClassifier, Prediction

State = Literal["waiting", "running", "done", "failed", "cancelled"]
FINISHED: frozenset[State] = frozenset({"done", "failed", "cancelled"})


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TaughtClass(_Record):
    """A class of a lesson, and how many images it has there."""

    name: str
    images: int


class Progress(_Record):
    """How far a job is."""

    stage: str
    done: int
    total: int


class Risk(_Record):
    """An old class that may now be taken for a new one."""

    old: str
    new: str
    share: float
    """Of the old class's images, as its stored statistics let expect."""


class Report(_Record):
    """What a lesson did."""

    classes: list[str]
    images: int
    seconds: float
    calibration_error: float | None
    temperature: float | None
    retention: list[Risk]


class Job(_Record):
    """A lesson or an undoing, and what became of it."""

    id: int
    kind: Literal["teach", "rollback"]
    state: State = "waiting"
    created: str
    finished: str | None = None
    classes: list[TaughtClass] = []
    refine: bool = False
    to: int | None = None
    """The version to go back to."""
    before: int | None = None
    """The version that answered before this job: going back to it undoes the job."""
    version: int | None = None
    """The version that the job made."""
    progress: Progress | None = None
    report: Report | None = None
    warnings: list[str] = []
    error: str | None = None


class JobChanges(TypedDict, total=False):
    """Fields of a job that change while it is run."""

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
    """Why a request was refused."""

    error: str


class Ranked(_Value):
    """A class with its probability."""

    label: str
    probability: float


class PredictedImage(_Value):
    """What the model makes of one image."""

    name: str = Field(description="what the sender called the file")
    label: str | None = Field(description="the most probable class; null where the file could not be read")
    probability: float
    top: list[Ranked]
    unknown: bool = Field(description="whether the image is of none of the classes")
    novelty: float = Field(description="how far the image is from all classes: above 1 it is unknown")
    error: str | None = Field(description="why the file could not be read")

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
    """The predictions for the images of one request, in their order, all by one version of the model."""

    version: int
    predictions: list[PredictedImage]


class ModelLimits(_Value):
    """What one request may hold."""

    images: int
    lesson_images: int
    image_bytes: int
    upload_bytes: int
    pixels: int


class Model(_Value):
    """The model that answers now."""

    version: int
    classes: list[str]
    tasks: int
    backbone: str
    limits: ModelLimits


class KeptVersion(_Value):
    """One state of the model that is kept."""

    number: int
    when: str
    what: str
    classes: list[str]
    images: int
    known: int
    note: str
    current: bool


class History(_Value):
    """What was learned when, the newest first."""

    versions: list[KeptVersion]


class Jobs(_Value):
    """Lessons and undoings, the newest first."""

    jobs: list[Job]


class Back(_Record):
    """Which version to go back to."""

    to: int = Field(ge=1)


class Cell(_Value):
    """An accuracy, and the colours that show it."""

    text: str
    value: float
    background: str
    ink: str


class Row(_Value):
    """The accuracies on one lesson after it and each later one."""

    name: str
    cells: list[Cell | None]


class AccuracyMatrix(_Value):
    """Accuracy on each lesson (rows) by each version (columns), in %."""

    note: str
    steps: list[str]
    rows: list[Row]
    averages: list[str]


class Drawing(_Value):
    """A figure whose colours are those of the page."""

    svg: str
    caption: str


class PromptFigures(_Value):
    """How alike the prompts are that classes receive."""

    note: str
    figures: list[Drawing]


HELD_OUT = (
    "One row per lesson, one column per version: accuracy in % on the images of the lesson that are held out while "
    "probabilities are calibrated, under a head that has not seen them. Reading along a row shows what was kept."
)
NOTHING_HELD_OUT = "There is nothing to show: lessons with three images of a class or more have some held out."
NO_PROMPTS = (
    "There is nothing to show: this needs two classes or more, and a method with prompts whose queries are kept, "
    "as in the preset 'flagship'."
)
Figures = TypeVar("Figures")
_DRAWING = threading.Lock()


def once_per_version(draw: Callable[[ContinualClassifier], Figures]) -> Callable[[ContinualClassifier], Figures]:
    """Draw tables or figures of a classifier once for each version."""
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

    named = zip(found.tasks, found.values, strict=True)
    rows = [Row(name=name, cells=[cell(value) for value in values]) for name, values in named]
    columns = [[value for value in column if value is not None] for column in zip(*found.values, strict=True)]
    averages = [_number(sum(column) / len(column)) if column else "" for column in columns]
    return AccuracyMatrix(note=HELD_OUT, steps=list(map(str, found.versions)), rows=rows, averages=averages)


def draw_prompts(classifier: ContinualClassifier) -> PromptFigures:
    """Draw the similarity of prompts between classes, and by block."""
    from probprompt.report import figures  # late: matplotlib is slow to load

    found = classifier.prompt_diversity()
    if found is None:
        return PromptFigures(note=NO_PROMPTS, figures=[])
    labels, mean, start = found["labels"], found["mean"], found["initial_mean"]
    low = min(0.0, *(value for row in found["matrix"] for value in row))
    words = f"mean {mean:.2f}, {start:.2f} at initialisation"
    told = f"Heat map of the cosine similarity between the prompts of {len(labels)} classes; {words}."
    heat = figures.similarity_map(found["matrix"], labels, low, told)
    drawn = [_drawing(heat, "Cosine similarity between the prompts for an image of each class.")]
    blocks = found["per_block"]
    if len(blocks) > 1:
        spoken = ", ".join(f"block {name}: {value:.2f}" for name, value in blocks.items())
        bars = figures.block_bars(blocks, mean, f"Bar chart of the mean similarity by block. {spoken}.")
        drawn.append(_drawing(bars, "Mean similarity in each block; the dashed line is the mean of all."))
    note = (
        f"Mean similarity {mean:.2f} ({start:.2f} at initialisation), effective rank {found['effective_rank']:.1f} "
        f"({found['initial_effective_rank']:.1f}). At a similarity of 1 every class gets the same prompt."
    )
    return PromptFigures(note=note, figures=drawn)


def _drawing(svg: str, caption: str) -> Drawing:
    # The page sets styles itself: its content security policy rejects style attributes.
    return Drawing(svg=svg.replace(' style="', ' data-style="'), caption=caption)


def _number(value: float) -> str:
    return "100" if value >= 99.95 else f"{value:.1f}"
