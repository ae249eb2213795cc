"""What the service answers with, as its OpenAPI description tells it."""

from pydantic import BaseModel, ConfigDict, Field

from probprompt.classifier import Prediction, Version
from probprompt.serve.jobs import Job


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
        """A prediction under the sender's name for the image."""
        return cls(
            name=name,
            label=prediction.label,
            probability=prediction.probability,
            top=[Ranked(label=label, probability=probability) for label, probability in prediction.top],
            unknown=prediction.unknown,
            novelty=prediction.novelty,
            error=prediction.error,
        )

    @classmethod
    def refused(cls, name: str, reason: str) -> "PredictedImage":
        """A file that could not be read."""
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

    @classmethod
    def of(cls, version: Version, current: int) -> "KeptVersion":
        """A version of the history."""
        return cls(
            number=version.number,
            when=version.when,
            what=version.what,
            classes=list(version.classes),
            images=version.images,
            known=version.known,
            note=version.note,
            current=version.number == current,
        )


class History(_Value):
    """What was learned when, the newest first."""

    versions: list[KeptVersion]


class Jobs(_Value):
    """Lessons and undoings, the newest first."""

    jobs: list[Job]


class Back(BaseModel):
    """Which version to go back to."""

    model_config = ConfigDict(frozen=True, extra="forbid")
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
