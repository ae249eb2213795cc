"""Interface of heads, from features to logits over the classes seen so far, and their registry."""

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, JsonValue
from torch import Tensor, nn


class HeadSettings(BaseModel):
    """Settings of a head; a subclass sets a default ``kind`` and adds fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str

    def input_width(self, width: int) -> int:
        """Return the width of the head's input for features of this width."""
        return width


class Head(nn.Module):
    """Features (B, D) to logits (B, C), for a growing number of classes."""

    Settings: ClassVar[type[HeadSettings]]
    trained: ClassVar[bool]
    """True if trained by gradient."""
    layers: int = 0
    """Number of intermediate blocks that it reads."""
    flip_average: bool = False
    """True if its input is averaged over an image and its horizontal flip."""
    learning_only: ClassVar[frozenset[str]] = frozenset()
    """Saved tensors that prediction does not need."""

    weight: Tensor

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.width = width
        self.seed = seed

    @classmethod
    def create(cls, settings: HeadSettings, width: int, seed: int) -> Self:
        """Build the head without classes, for features of this width."""
        return cls(settings.input_width(width), seed)

    def __len__(self) -> int:
        return len(self.weight)

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every saved tensor for a number of classes."""
        raise NotImplementedError

    def grow(self, classes: int) -> Self:
        """Add ``classes`` new classes."""
        raise NotImplementedError

    def saved(self) -> dict[str, Tensor]:
        """Return the tensors for :meth:`restore` by name."""
        return dict(self.state_dict())

    def restore(self, tensors: Mapping[str, Tensor]) -> Self:
        """Load saved tensors of any number of classes.

        Those of ``learning_only`` may be missing: such a head predicts, but cannot learn.
        """
        expected = self.shapes(len(tensors["weight"]) if "weight" in tensors else 0)
        missing = set(expected) - set(tensors) - self.learning_only
        unknown = set(tensors) - set(expected)
        if missing or unknown:
            raise ValueError(f"{type(self).__name__} misses tensors {sorted(missing)}, unknown: {sorted(unknown)}.")
        for name, value in tensors.items():
            if tuple(value.shape) != expected[name]:
                raise ValueError(f"{type(self).__name__} needs {name} {expected[name]}, got {tuple(value.shape)}.")
        self._take({name: tensors.get(name) for name in expected})
        return self

    def _take(self, tensors: Mapping[str, Tensor | None]) -> None:
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``(B, C)`` of features ``(B, D)``."""
        raise NotImplementedError


HEADS: dict[str, type[Head]] = {}
"""Heads by kind."""


def register(head: type[Head]) -> type[Head]:
    """Register a head by its kind."""
    HEADS[head.Settings.model_fields["kind"].default] = head
    return head


def make_head(settings: HeadSettings, width: int, seed: int) -> Head:
    """Build a head without classes.

    >>> import torch
    >>> from probprompt.heads import RidgeSettings
    >>> make_head(RidgeSettings(projections=5), width=4, seed=0).grow(3)(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """
    return HEADS[settings.kind].create(settings, width, seed)


def default_settings() -> dict[str, JsonValue]:
    """Return the default settings of all kinds of heads; shared settings have one default."""
    return {name: field.default for head in HEADS.values() for name, field in head.Settings.model_fields.items()}


def setting_names(kind: str) -> list[str]:
    """Return the settings of one kind of head.

    >>> setting_names("linear")
    ['kind']
    """
    return list(HEADS[kind].Settings.model_fields)


def complete(given: Mapping[str, JsonValue], preferred: str, any_head: bool = False) -> dict[str, JsonValue]:
    """Add the kind of head, and drop other kinds' defaults, or with ``any_head`` settings.

    Until version 0.1 every head recorded the settings of all kinds.

    >>> complete({"kind": None, "projections": 2000}, "linear")
    {'kind': 'linear'}
    """
    kind = str(given.get("kind") or preferred)
    if kind not in HEADS:
        raise ValueError(f"Unknown head.kind {kind!r}. Expected one of: {', '.join(HEADS)}.")
    defaults, own = default_settings(), setting_names(kind)
    foreign = [name for name in given if name in defaults and name not in own]
    for name in foreign:
        if not any_head and given[name] != defaults[name]:
            kinds = ", ".join(other for other in HEADS if name in setting_names(other))
            raise ValueError(f"head.{name} does not apply to head.kind={kind}, only to {kinds}.")
    return {**{name: value for name, value in given.items() if name not in foreign}, "kind": kind}
