"""What published methods did to the colours of training images, before and after the crop.

All randomness is the caller's: uniform numbers in [0, 1), a row per image, decide everything, so an image's fate
depends on its own row alone. Decisions are made on the CPU, wherever the rows are; pixels stay on their device.
"""

import math
from collections.abc import Callable
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor

Augmentation = Literal["crop", "crop+colour", "autoaugment+crop"]
"""``crop``: box and flip alone; ``crop+colour``: EvoPrompt's; ``autoaugment+crop``: APT's."""

JITTER_DRAWS = 7
"""Numbers per image that :func:`jitter` needs: whether, order, four strengths, whether grey."""
AUTOAUGMENT_DRAWS = 5
"""Numbers per image that :func:`autoaugment` needs: sub-policy, whether either operation, the sign of either."""

_DRAWS: dict[Augmentation, int] = {
    "crop": 0,
    "crop+colour": JITTER_DRAWS,
    "autoaugment+crop": AUTOAUGMENT_DRAWS,
}


def draws_needed(kind: Augmentation) -> int:
    """How many uniform numbers per image an augmentation needs beside those of its box.

    >>> draws_needed("crop")
    0
    """
    return _DRAWS[kind]


def before_crop(canvas: Tensor, sizes: Tensor, draws: Tensor, kind: Augmentation) -> Tensor:
    """Augment whole images: a canvas (B, 3, H, W) of uint8, sizes (B, 2), draws (B, draws_needed(kind))."""
    return autoaugment(canvas, sizes, draws, "bilinear") if kind == "autoaugment+crop" else canvas  # as APT does


def after_crop(images: Tensor, draws: Tensor, kind: Augmentation) -> Tensor:
    """Augment what was cut out: images (B, 3, H, W) in [0, 1], the same draws as :func:`before_crop`."""
    return jitter(images, draws) if kind == "crop+colour" else images


JITTER_CHANCE, GREY_CHANCE = 0.5, 0.2
CENTRES = (1.0, 1.0, 1.0, 0.0)  # brightness, contrast, saturation, hue
STRENGTHS = (0.4, 0.4, 0.4, 0.1)
ORDERS = tuple(permutations(range(4)))


def jitter(images: Tensor, draws: Tensor) -> Tensor:
    """EvoPrompt's colours: ColorJitter(0.4, 0.4, 0.4, 0.1) of half of the images, then a fifth of all turned grey.

    As torchvision's, each image (3, H, W) in [0, 1] has its own factors and its own order of the four operations.
    """
    draws = draws.cpu().double()  # (B, JITTER_DRAWS)
    factors = (torch.tensor(CENTRES) + torch.tensor(STRENGTHS) * (2 * draws[:, 2:6] - 1)).to(images)  # (B, 4)
    order = torch.tensor(ORDERS)[(draws[:, 1] * len(ORDERS)).long()]  # (B, 4)
    order[draws[:, 0] >= JITTER_CHANCE] = -1
    images = images.clone()
    for position in range(4):
        for number, operation in enumerate((_brightness, _contrast, _saturation, _hue)):
            rows = (order[:, position] == number).nonzero()[:, 0].to(images.device)
            images[rows] = operation(images[rows], factors[rows, number])
    rows = (draws[:, 6] < GREY_CHANCE).nonzero()[:, 0].to(images.device)
    images[rows] = _grey(images[rows]).expand(-1, 3, -1, -1)
    return images


def _blend(images: Tensor, others: Tensor | float, factor: Tensor) -> Tensor:
    factor = factor[:, None, None, None]  # (B, 1, 1, 1)
    return (factor * images + (1 - factor) * others).clamp(0, 1)


def _grey(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]  # (B, 1, H, W)


def _brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, 0.0, factor)


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, _grey(images).mean(dim=(1, 2, 3), keepdim=True), factor)


def _saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, _grey(images), factor)


def _hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn hues by a part of the circle, at the same saturation and value (HSV)."""
    red, green, blue = images.unbind(1)
    value = images.amax(dim=1)  # (B, H, W)
    chroma = value - images.amin(dim=1)
    step = torch.where(chroma > 0, chroma, 1)  # a grey pixel has no hue: any will do
    green_or_blue = torch.where(value == green, 2 + (blue - red) / step, 4 + (red - green) / step)
    hue = torch.where(value == red, (green - blue) / step, green_or_blue)  # in sixths of the circle
    hue = hue + 6 * shift[:, None, None]
    places = [(hue + offset) % 6 for offset in (5, 3, 1)]  # how far red, green and blue are along their trapezia
    return torch.stack([value - chroma * torch.minimum(place, 4 - place).clamp(0, 1) for place in places], dim=1)


Operation = tuple[str, float, int]
"""What, with which probability, at which level from 0 to 9 (0 where there is nothing to measure)."""
Interpolation = Literal["nearest", "bilinear"]
"""How a turned or sheared image finds its pixels; outside the image there is black."""

# Cubuk et al., "AutoAugment: Learning augmentation strategies from data" (2019), the policy found on ImageNet.
IMAGENET_POLICY: tuple[tuple[Operation, Operation], ...] = (
    (("posterise", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarise", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("equalise", 0.8, 0), ("equalise", 0.6, 0)),
    (("posterise", 0.6, 7), ("posterise", 0.6, 6)),
    (("equalise", 0.4, 0), ("solarise", 0.2, 4)),
    (("equalise", 0.4, 0), ("rotate", 0.8, 8)),
    (("solarise", 0.6, 3), ("equalise", 0.6, 0)),
    (("posterise", 0.8, 5), ("equalise", 1.0, 0)),
    (("rotate", 0.2, 3), ("solarise", 0.6, 8)),
    (("equalise", 0.6, 0), ("posterise", 0.4, 6)),
    (("rotate", 0.8, 8), ("colour", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalise", 0.6, 0)),
    (("equalise", 0.0, 0), ("equalise", 0.8, 0)),
    (("invert", 0.6, 0), ("equalise", 1.0, 0)),
    (("colour", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("colour", 1.0, 2)),
    (("colour", 0.8, 8), ("solarise", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 0)),
    (("shear", 0.6, 5), ("equalise", 1.0, 0)),
    (("colour", 0.4, 0), ("equalise", 0.6, 0)),
    (("equalise", 0.4, 0), ("solarise", 0.2, 4)),
    (("solarise", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("invert", 0.6, 0), ("equalise", 1.0, 0)),
    (("colour", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalise", 0.8, 0), ("equalise", 0.6, 0)),
)


def autoaugment(canvas: Tensor, sizes: Tensor, draws: Tensor, interpolation: Interpolation = "nearest") -> Tensor:
    """AutoAugment's ImageNet policy on each image of a canvas (B, 3, H, W) of uint8, as torchvision's on tensors.

    An image is the top left part of its canvas that ``sizes`` (B, 2) says; the rest is neither read nor written.
    """
    canvas = canvas.clone()
    for image, (height, width), row in zip(canvas, sizes.tolist(), draws.tolist(), strict=True):
        sub_policy = IMAGENET_POLICY[int(row[0] * len(IMAGENET_POLICY))]
        for (name, probability, level), chance, sign in zip(sub_policy, row[1:3], row[3:5], strict=True):
            if chance < probability:
                real = image[:, :height, :width]
                real.copy_(_operate(real, name, level, -1 if sign < 0.5 else 1, interpolation))
    return canvas


def _operate(image: Tensor, name: str, level: int, sign: int, interpolation: Interpolation) -> Tensor:
    from torchvision.transforms.v2 import InterpolationMode, functional  # late: takes seconds, and few runs need it

    def scaled(lowest: float, highest: float) -> float:
        return float(torch.linspace(lowest, highest, 10)[level])  # in float32, as torchvision's: pixels are cut off

    mode = InterpolationMode(interpolation)
    tilt = [math.degrees(math.atan(sign * scaled(0, 0.3))), 0.0]
    operations: dict[str, Callable[[], Tensor]] = {
        "rotate": lambda: functional.rotate(image, sign * scaled(0, 30), mode),
        "shear": lambda: functional.affine(image, 0.0, [0, 0], 1.0, tilt, mode, center=[0, 0]),
        "colour": lambda: functional.adjust_saturation(image, 1 + sign * scaled(0, 0.9)),
        "contrast": lambda: functional.adjust_contrast(image, 1 + sign * scaled(0, 0.9)),
        "sharpness": lambda: functional.adjust_sharpness(image, 1 + sign * scaled(0, 0.9)),
        "posterise": lambda: functional.posterize(image, round(scaled(8, 4))),
        "solarise": lambda: functional.solarize(image, scaled(255, 0)),
        "autocontrast": lambda: functional.autocontrast(image),
        "equalise": lambda: functional.equalize(image),
        "invert": lambda: functional.invert(image),
    }
    return operations[name]()
