"""A saved model as something to be handed on: what predicts, how it is fed, and what its answers mean."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

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
    """Read the model of a run."""
    loaded = load_model(folder)
    note = loaded.note
    return Source(
        model=loaded.model,
        classes=loaded.class_names,
        view=View.of(note["preprocessing"]),
        facts={
            "method": note["method"]["name"],
            "backbone": {name: note["backbone"][name] for name in ("name", "sha256")},
            "marks": note["marks"],
        },
    )
