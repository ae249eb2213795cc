"""Heads: features to logits over the classes seen so far. Any head goes with any method."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, JsonValue

from probprompt.heads.closed_form import (
    ClosedFormSettings,
    LDAHead,
    LDASettings,
    NearestMeanHead,
    NearestMeanSettings,
    RidgeHead,
    RidgeSettings,
)
from probprompt.heads.linear import Head, HeadSettings, LinearHead, LinearSettings, NormalizedHead, NormalizedSettings

AnyHeadSettings = Annotated[
    LinearSettings | NormalizedSettings | RidgeSettings | LDASettings | NearestMeanSettings, Field(discriminator="kind")
]
HEADS: dict[str, tuple[type[HeadSettings], type[Head]]] = {
    "linear": (LinearSettings, LinearHead),
    "normalised": (NormalizedSettings, NormalizedHead),
    "ridge": (RidgeSettings, RidgeHead),
    "lda": (LDASettings, LDAHead),
    "nearest-mean": (NearestMeanSettings, NearestMeanHead),
}
"""Settings and class of every head by name."""


def make_head(settings: HeadSettings, width: int, seed: int) -> Head:
    """Build a head without any class yet.

    >>> import torch
    >>> make_head(RidgeSettings(projections=5), width=4, seed=0).grow(3)(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """
    head = HEADS[settings.kind][1].create(settings, width, seed)
    if isinstance(settings, ClosedFormSettings):
        head.layers, head.mirrored = settings.layers, settings.mirrored
    return head


def setting_names(kind: str | None = None) -> list[str]:
    """Return the settings of one kind of head, or of all.

    >>> setting_names("linear")
    ['kind']
    """
    kinds = HEADS if kind is None else [kind]
    return list(dict.fromkeys(name for one in kinds for name in HEADS[one][0].model_fields))


def complete(given: Mapping[str, JsonValue], preferred: str) -> dict[str, JsonValue]:
    """Name the kind of head, and drop the settings of other kinds that have their default.

    Until version 0.1 every head recorded the settings of all kinds.

    >>> complete({"kind": None, "projections": 2000}, "linear")
    {'kind': 'linear'}
    """
    kind = str(given.get("kind") or preferred)
    if kind not in HEADS:
        raise ValueError(f"head.kind must be one of {', '.join(HEADS)}, not {kind!r}")
    settings: dict[str, JsonValue] = {"kind": kind}
    for name, value in given.items():
        others = [other for other, (parts, _) in HEADS.items() if name in parts.model_fields]
        if name != "kind" and others and kind not in others:
            if value != HEADS[others[0]][0].model_fields[name].default:
                kinds = ", ".join(others)
                raise ValueError(f"head.{name} does not apply to head.kind={kind}, only to {kinds}")
        elif name != "kind":
            settings[name] = value
    return settings
