"""Heads: features to logits over the classes seen so far. Any head goes with any method.

Trained heads learn by gradient together with the prompts. Closed-form heads add up sums over images, in float64, and
are solved from them: after any sequence of tasks they equal the head of all those images at once, whatever the order,
as long as the features of an image stay what they are. No image is kept.
"""

from probprompt.errors import UserError
from probprompt.heads.closed_form import LDAHead, NearestMeanHead, RidgeHead
from probprompt.heads.linear import Head, LinearHead, NormalizedHead
from probprompt.heads.settings import HeadConfig

HEADS: dict[str, type[Head]] = {
    "linear": LinearHead,
    "normalised": NormalizedHead,
    "ridge": RidgeHead,
    "lda": LDAHead,
    "nearest-mean": NearestMeanHead,
}
"""All heads by name."""


def make_head(config: HeadConfig, preferred: str, width: int, seed: int) -> Head:
    """Build the head that is set, or else the preferred one.

    >>> make_head(HeadConfig(projections=5), "ridge", width=4, seed=0).grow(3)(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """
    kind = config.kind or preferred
    if HEADS[kind].trained:
        for name in ("with_query", "layers", "mirrored", "with_mirrors"):
            if getattr(config, name):
                closed = ", ".join(other for other, head in HEADS.items() if not head.trained)
                raise UserError(f"head.{name} is for heads in closed form ({closed}), not for {kind!r}: set head.kind")
    if config.mirrored and config.with_mirrors:
        raise UserError("head.mirrored takes in mirror images already: set it or head.with_mirrors, not both")
    head = HEADS[kind].create(config, width, seed)
    head.layers, head.mirrored = config.layers, config.mirrored
    return head
