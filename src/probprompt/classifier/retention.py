"""What learning did to the classes known before, told from their stored statistics: no old image is needed.

Features are drawn from the Gaussian of each old class and shown to the head as it was and as it is. The share of them
that the old head recognised and the new one takes for a new class is the part of the old class that is at risk.
"""

import torch
from torch import Tensor, nn

from probprompt import randomness
from probprompt.classifier.answers import Risk
from probprompt.classifier.sums import Moments

DRAWS = 256  # features per class, fewer where there are very many classes
_ALL_DRAWS = 2**16
WORTH_TELLING = 0.02
"""Smaller shares are not reported."""


@torch.no_grad()
def at_risk(
    before: nn.Module, after: nn.Module, moments: Moments, names: tuple[str, ...], old: int, seed: int
) -> tuple[Risk, ...]:
    """Which of the first ``old`` classes are now taken for which of the others, the largest share first.

    ``moments`` are those of all classes after learning; the heads take features (n, D) to logits.
    """
    if not old or old == len(names):
        return ()
    factor = _root(moments.within)  # (D, D)
    each = max(16, min(DRAWS, _ALL_DRAWS // old))
    risks = []
    for label in range(old):
        noise = randomness.normal((each, len(factor)), seed, "retention", label).to(factor)  # (n, D)
        drawn = (moments.means[label] + noise @ factor.T).float()
        kept = before(drawn).argmax(dim=1) == label  # (n,)
        now = after(drawn).argmax(dim=1)  # (n,)
        lost = now[kept & (now >= old)].bincount(minlength=len(names)) / each  # (C,)
        risks += [
            Risk(names[label], names[new], float(lost[new]))
            for new in range(old, len(names))
            if lost[new] >= WORTH_TELLING
        ]
    return tuple(sorted(risks, key=lambda risk: (-risk.share, risk.old, risk.new)))


def _root(covariance: Tensor) -> Tensor:
    """A matrix R with R R^T = covariance, which may be short of rank."""
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = vectors * values.clamp(min=0).sqrt()
    return root
