"""Heads: features to logits over the classes seen so far. Any head works with any method."""

from typing import Annotated

from pydantic import Field

from probprompt.heads.closed_form import LDASettings, NearestMeanSettings, RidgeSettings
from probprompt.heads.head import HEADS, complete, default_settings, make_head, setting_names
from probprompt.heads.linear import LinearSettings, NormalizedSettings

AnyHeadSettings = Annotated[
    LinearSettings | NormalizedSettings | RidgeSettings | LDASettings | NearestMeanSettings, Field(discriminator="kind")
]

__all__ = ["HEADS", "AnyHeadSettings", "complete", "default_settings", "make_head", "setting_names"]
