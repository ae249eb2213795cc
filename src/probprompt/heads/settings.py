"""Heads: features to logits over the classes seen so far. Any head goes with any method.

Trained heads learn by gradient together with the prompts. Closed-form heads add up sums over images, in float64, and
are solved from them: after any sequence of tasks they equal the head of all those images at once, whatever the order,
as long as the features of an image stay what they are. No image is kept.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["linear", "normalised", "ridge", "lda", "nearest-mean"]


class HeadConfig(BaseModel):
    """Which head, and its settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind | None = None
    """None: the one that the method prefers."""
    projections: int = Field(2000, ge=0)
    """Random ReLU projections under the ridge head; 0 takes the features as they are."""
    ridge: float | None = Field(None, gt=0, allow_inf_nan=False)
    """lambda of the ridge head; None chooses it on held-out images."""
    ridge_choice: Literal["first", "every"] = "first"
    """Lambda is chosen once, on a fifth of the first task's images; or anew after every task, on a fifth of the images
    of all tasks so far, each judged when it came. What is right for a first task of few classes is too much later."""
    with_query: bool = False
    """Whether a head in closed form also sees the query, which is computed anyway: what the backbone says without
    prompts then stands beside what it says with them."""
    layers: int = Field(0, ge=0)
    """Of how many blocks before the last a head in closed form also reads the class token and the mean of the patches,
    under prompts and each normalised."""
    readings: Literal["beside", "projected"] = "beside"
    """Whether the ridge head takes them as they are, beside its projections, or projects them with the feature."""
    mirrored: bool = False
    """Whether a head in closed form is given the mean of what is read of an image and of its mirror image, wherever it
    learns or predicts: twice the work of both, and less chance in a feature. The query is the image's own."""
    with_mirrors: bool = False
    """Whether a head in closed form also learns the mirror image of every image, as one more image of its class: twice
    the passes of learning, and no more work at prediction."""
    follow: bool = False
    """Whether the sums of a head in closed form follow where prompts that learn in several tasks
    (``training.adapt_tasks``) move the features: by the linear map from what the head made of the new task's images
    before to what it makes of them after it."""
    shrinkage: float = Field(1e-3, gt=0, le=1)
    """How far the covariance of the LDA head is drawn towards its mean diagonal."""


def given_width(config: HeadConfig, width: int) -> int:
    """The width of what a head is given where features are of this width: these, the query, then readings of blocks.

    >>> given_width(HeadConfig(with_query=True, layers=3), 10)
    80
    """
    return width * (1 + config.with_query) + readings_width(config, width)


def readings_width(config: HeadConfig, width: int) -> int:
    """The width of what a head reads of blocks before the last: of each the class token and the mean of the patches."""
    return 2 * config.layers * width


def untouched_width(config: HeadConfig, width: int) -> int:
    """The width of what a ridge head takes as it is, beside its projections.

    >>> untouched_width(HeadConfig(layers=3), 10), untouched_width(HeadConfig(layers=3, readings="projected"), 10)
    (60, 0)
    """
    return readings_width(config, width) if config.readings == "beside" else 0
