"""Teach an image classifier new classes one task at a time, without keeping old images."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Imported on first use: torch and timm take seconds to load, which would delay help and errors.
_HOME = {
    "ContinualClassifier": "probprompt.classifier",
    "FrozenViT": "probprompt.backbones.vit",
    "Run": "probprompt.runs.run",
    "RunConfig": "probprompt.config",
    "UserError": "probprompt.errors",
    "audit": "probprompt.api",
    "compare": "probprompt.api",
    "load_backbone": "probprompt.backbones.pretrained",
    "load_model": "probprompt.engine.saved_model",
    "resume": "probprompt.api",
    "train": "probprompt.api",
    "write_report": "probprompt.report.pages",
    "write_sample": "probprompt.data.emoji_r",
}

if TYPE_CHECKING:
    from probprompt.api import audit, compare, resume, train
    from probprompt.backbones.pretrained import load_backbone
    from probprompt.backbones.vit import FrozenViT
    from probprompt.classifier import ContinualClassifier
    from probprompt.config import RunConfig
    from probprompt.data.emoji_r import write_sample
    from probprompt.engine.saved_model import load_model
    from probprompt.errors import UserError
    from probprompt.report.pages import write_report
    from probprompt.runs.run import Run

__all__ = [
    "ContinualClassifier",
    "FrozenViT",
    "Run",
    "RunConfig",
    "UserError",
    "__version__",
    "audit",
    "compare",
    "load_backbone",
    "load_model",
    "resume",
    "train",
    "write_report",
    "write_sample",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
