"""What learning did to the classes known before, told from what is stored of them: no old image is needed.

The features of the images that were held out of each old class are shown to the head that has not learned from them
but has learned the new classes. The probability that it gives to a new class, calibrated, is the part of the old class
that is now at risk. (Features drawn from a Gaussian around the mean of the old class would say far too little: the
head was fitted to that very mean, and hardly ever mistakes what lies around it.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from probprompt.classifier.answers import Risk

WORTH_TELLING = 0.05
"""Smaller shares are not reported."""


@torch.no_grad()
def at_risk(
    judge: nn.Module, held: Sequence[Tensor], names: Sequence[str], old: int, temperature: float
) -> tuple[Risk, ...]:
    """Which of the first ``old`` classes may now be taken for which of the others, the largest share first.

    ``held`` are the features of each class (n, D) that ``judge`` has not learned from; a class without any is passed
    over.
    """
    risks = []
    for label in range(old):
        if not len(held[label]):
            continue
        shares = (judge(held[label]).double() / temperature).softmax(dim=1).mean(dim=0).tolist()  # (C,)
        risks += [
            Risk(names[label], names[new], shares[new])
            for new in range(old, len(names))
            if shares[new] >= WORTH_TELLING
        ]
    return tuple(sorted(risks, key=lambda risk: (-risk.share, risk.old, risk.new)))
