"""What a classifier answers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """What the classifier makes of one image."""

    source: str
    """The image's file, or its place among what was given."""
    label: str | None
    """The most probable class, also where the image is of none of them; None where it could not be read."""
    probability: float
    """Of that class."""
    top: tuple[tuple[str, float], ...]
    """The most probable classes with their probabilities."""
    unknown: bool
    """Whether the image is farther from all classes than 95 % of the known images that were held out."""
    novelty: float
    """How far it is from the nearest class: 0 is usual for known images, above 1 it is marked as unknown."""
    error: str | None = None
    """Why the image could not be read."""


@dataclass(frozen=True)
class ConfusionRisk:
    """An old class that may now be taken for a new one."""

    old: str
    new: str
    share: float
    """Of the old class, 0 to 1: the probability that its held-out images now give to the new class."""


@dataclass(frozen=True)
class LearnReport:
    """What a call of ``learn`` did."""

    version: int
    classes: tuple[str, ...]
    """The classes that are new."""
    images: int
    seconds: float
    calibration_error: float | None
    """How far probabilities are from how often they are right, on held-out images, 0 to 1; None without any."""
    temperature: float
    retention: tuple[ConfusionRisk, ...]
    """Old classes at risk of being taken for new ones, by their stored statistics; the largest first."""
    warnings: tuple[str, ...] = ()
    refined: tuple[str, ...] = ()
    """Classes known before that got more images."""


@dataclass(frozen=True)
class Version:
    """One state of the classifier that is kept."""

    number: int
    when: str
    """ISO time, UTC."""
    what: str
    """learned, refined, forgot, renamed or rolled back."""
    classes: tuple[str, ...]
    """The classes that this was about."""
    images: int
    """How many images were learned."""
    note: str = ""
    known: int = 0
    """How many classes it knows."""


@dataclass(frozen=True)
class TaskScore:
    """How well the classes of one call of ``learn`` are recognised."""

    name: str
    classes: tuple[str, ...]
    images: int
    accuracy: float
    """In %, among all classes known now."""
    when_learned: float | None
    """In %, of the version that had just learned it, among the classes known then; None where it is not kept."""

    @property
    def forgotten(self) -> float | None:
        """How many points were lost since."""
        return None if self.when_learned is None else self.when_learned - self.accuracy


@dataclass(frozen=True)
class Evaluation:
    """How well images with known classes are recognised."""

    accuracy: float
    """In %."""
    images: int
    per_task: tuple[TaskScore, ...]
    per_class: dict[str, float]
    """In %."""
    forgetting: float | None
    """How many points the tasks before the last lost on average since they were learned, where that is known."""
    confusion: tuple[tuple[int, ...], ...]
    """Images by class (a row) and by what they were taken for (a column)."""
    classes: tuple[str, ...]
    """What the rows and columns of the confusion are."""
    calibration_error: float
    flagged: float
    """The share of these known images that is marked as unknown, in %."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Files that could not be read, with the reason."""
    auroc: float | None = None
    """How well novelty tells unknown images from known ones, 0.5 to 1; with unknown images given."""
    fpr_at_95: float | None = None
    """The share of unknown images that pass where 95 % of the known ones given do, 0 to 1."""
    unknown_images: int = 0
    unknown_flagged: float | None = None
    """The share of the unknown images that is marked as unknown, in %."""
