"""Predictions, learning reports, versions and evaluations of a classifier."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    source: str
    """File of the image, or its position in the input."""
    label: str | None
    """Most probable class, even if the image is unknown; None if it could not be read."""
    probability: float
    """Probability of that class."""
    top: tuple[tuple[str, float], ...]
    """Most probable classes with their probabilities."""
    unknown: bool
    """True if the image is farther from all classes than 95% of the held-out images of known classes."""
    novelty: float
    """Distance from the nearest class: 0 is typical of known images, above 1 the image is unknown."""
    error: str | None = None
    """Reason why the image could not be read."""


@dataclass(frozen=True)
class ConfusionRisk:
    """An old class that may now be classified as a new one."""

    old: str
    new: str
    share: float
    """Mean probability of the new class on held-out images of the old one, 0 to 1."""


@dataclass(frozen=True)
class LearnReport:
    """The result of a call of ``learn``."""

    version: int
    classes: tuple[str, ...]
    images: int
    seconds: float
    calibration_error: float | None
    """Expected calibration error on held-out images, 0 to 1; None without held-out images."""
    temperature: float
    confusion_risks: tuple[ConfusionRisk, ...]
    """Old classes that may be classified as new ones, the largest risk first."""
    warnings: tuple[str, ...] = ()
    refined: tuple[str, ...] = ()
    """Existing classes that got more images."""


@dataclass(frozen=True)
class Version:
    """A kept version of the classifier."""

    number: int
    when: str  # ISO time, UTC
    what: str
    """learned, refined, forgot, renamed or rolled back."""
    classes: tuple[str, ...]
    """Classes that were changed."""
    images: int
    note: str = ""
    known: int = 0  # number of classes


@dataclass(frozen=True)
class TaskScore:
    """Accuracy in % on the classes of one call of ``learn``."""

    name: str
    classes: tuple[str, ...]
    images: int
    accuracy: float
    """Accuracy among all current classes."""
    when_learned: float | None
    """Accuracy of the version that had just learned the task; None if it is not kept."""

    @property
    def forgotten(self) -> float | None:
        """Percentage points lost since the task was learned."""
        return None if self.when_learned is None else self.when_learned - self.accuracy


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in % and other measures on labeled images."""

    accuracy: float
    images: int
    per_task: tuple[TaskScore, ...]
    per_class: dict[str, float]
    forgetting: float | None
    """Percentage points lost on average by the tasks before the last; None if unknown."""
    confusion: tuple[tuple[int, ...], ...]
    """Number of images by true class (row) and predicted class (column)."""
    classes: tuple[str, ...]
    """Classes of the rows and columns of ``confusion``."""
    calibration_error: float
    flagged: float
    """Share of these images that are flagged as unknown, in %."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Files that could not be read, with the reason."""
    auroc: float | None = None
    """AUROC of novelty for unknown against known images; None without unknown images."""
    fpr_at_95: float | None = None
    """Share of unknown images that pass if 95% of the known ones do, 0 to 1."""
    unknown_images: int = 0
    unknown_flagged: float | None = None
    """Share of the unknown images that are flagged as unknown, in %."""
