"""A saved model as something to be handed on: what predicts, how it is fed, and what its answers mean."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from probprompt.classifier import ContinualClassifier
from probprompt.export.bundle import read_record
from probprompt.runs.model_folder import load_model
from probprompt.training.model import PromptedModel


@dataclass(frozen=True)
class View:
    """How an image becomes what the backbone is fed."""

    image_size: int
    resized: int
    """What the short side is resized to before the middle is cut out."""
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, note: dict[str, Any]) -> "View":
        """From what a record says."""
        return cls(
            image_size=int(note["image_size"]),
            resized=int(note["resized"]),
            interpolation=str(note.get("interpolation", "bilinear")),
            mean=tuple(map(float, note["mean"])),
            std=tuple(map(float, note["std"])),
        )


Judge = Callable[[Tensor], tuple[Tensor, ...]]
"""What a head is given (B, D or more) to probabilities (B, C) and, where that is known, novelty (B,)."""


@dataclass(frozen=True)
class Source:
    """A model that predicts."""

    model: PromptedModel
    classes: tuple[str, ...]
    view: View
    judge: Judge
    outputs: tuple[str, ...] = ("probabilities",)
    """The names of what ``judge`` answers."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is worth knowing: temperature, method, backbone, marks."""


def open_source(folder: Path) -> Source:
    """Read the current version of a saved classifier, or the model of a run."""
    return _of_classifier(folder) if (folder / "current.json").is_file() else _of_run(folder)


def _of_run(folder: Path) -> Source:
    loaded = load_model(folder)
    note, head = loaded.note, loaded.model.head

    def judge(features: Tensor) -> tuple[Tensor, ...]:
        return (head(features).softmax(dim=1),)

    facts = {
        "temperature": 1.0,
        "method": note["method"]["name"],
        "backbone": {name: note["backbone"][name] for name in ("name", "sha256")},
        "marks": note["marks"],
    }
    return Source(loaded.model, loaded.class_names, View.of(note["preprocessing"]), judge, facts=facts)


def _of_classifier(folder: Path) -> Source:
    classifier = ContinualClassifier.load(folder, device="cpu")
    predictor, settings = classifier.predictor, classifier.settings
    viewer, state = predictor.viewer, predictor.state
    knows = state.scale.limit is not None
    outputs = ("probabilities", "novelty") if knows else ("probabilities",)

    def judge(features: Tensor) -> tuple[Tensor, ...]:
        return predictor.judge(features)[: len(outputs)]

    predictor.model.set_precision("fp32")  # what was computed in 16 bits on a GPU is not faster so elsewhere
    view = View(
        image_size=viewer.size,
        resized=viewer.resized,
        interpolation=viewer.kernel,
        mean=tuple(viewer.mean.flatten().tolist()),
        std=tuple(viewer.std.flatten().tolist()),
    )
    facts = {
        "temperature": state.calibration.temperature,
        "unknown_above": 1.0 if knows else None,
        "method": settings.method.name,
        "backbone": {"name": settings.backbone.name, "sha256": read_record(folder).sha256},
        "marks": list(settings.method.marks()),
        "classifier_version": classifier.version,
    }
    return Source(predictor.model, classifier.classes, view, judge, outputs, facts)
