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


@dataclass(frozen=True)
class Source:
    """A model that predicts."""

    model: PromptedModel
    classes: tuple[str, ...]
    view: View
    temperature: float = 1.0
    """Probabilities are softmax(logits / temperature)."""
    novelty: Callable[[Tensor], Tensor] | None = None
    """Features (B, D) to how far each image is from all known classes (B,): above 1 is unknown."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is worth knowing: method, backbone, marks."""


def open_source(folder: Path) -> Source:
    """Read the current version of a saved classifier, or the model of a run."""
    return _of_classifier(folder) if (folder / "current.json").is_file() else _of_run(folder)


def _of_run(folder: Path) -> Source:
    loaded = load_model(folder)
    note = loaded.note
    facts = {
        "method": note["method"]["name"],
        "backbone": {name: note["backbone"][name] for name in ("name", "sha256")},
        "marks": note["marks"],
    }
    return Source(loaded.model, loaded.class_names, View.of(note["preprocessing"]), facts=facts)


def _of_classifier(folder: Path) -> Source:
    classifier = ContinualClassifier.load(folder, device="cpu")
    predictor = classifier.predictor
    viewer, state, gaussians = predictor.viewer, predictor.state, predictor.gaussians

    def novelty(features: Tensor) -> Tensor:
        return state.scale.novelty(gaussians.score(features))

    predictor.model.set_precision("fp32")  # what was computed in 16 bits on a GPU is not faster so elsewhere
    view = View(
        image_size=viewer.size,
        resized=viewer.resized,
        interpolation=viewer.kernel,
        mean=tuple(viewer.mean.flatten().tolist()),
        std=tuple(viewer.std.flatten().tolist()),
    )
    settings = classifier.settings
    facts = {
        "method": settings.method.name,
        "backbone": {"name": settings.backbone.name, "sha256": read_record(folder).sha256},
        "marks": list(settings.method.marks()),
        "classifier_version": classifier.version,
    }
    known = None if state.scale.limit is None else novelty
    return Source(predictor.model, classifier.classes, view, state.calibration.temperature, known, facts)
