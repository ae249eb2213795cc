"""Views of images: random-resized-crop and flip for training, resize and centre crop for evaluation.

A view is a box per image and two small matrices that resample it (with antialiasing, as torchvision's bilinear and
bicubic resize), so a whole batch of boxes of different sizes is two matrix products on any device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

Kernel = Literal["bilinear", "bicubic"]
"""How pixels between pixels are found."""

TRIES = 10  # torchvision's: boxes tried before the whole image is taken
DRAWS = 2 * TRIES + 3  # uniform numbers per image: area and ratio of each try, position, flip


@dataclass(frozen=True)
class Boxes:
    """Where to look in each image, in its pixels; what lies outside the limits is never read."""

    places: Tensor  # (B, 8) in float64: top, left, height, width; limits: top, bottom, left, right
    flip: Tensor | None = None  # (B,)

    @classmethod
    def of(cls, corner: Sequence[Tensor], limits: Sequence[Tensor], flip: Tensor | None = None) -> Self:
        """Boxes of given top, left, height and width (B,) each, inside limits: top, bottom, left and right."""
        return cls(torch.stack([*corner, *limits], dim=1).double(), flip)

    @property
    def top(self) -> Tensor:
        """The upper edge (B,)."""
        return self.places[:, 0]

    @property
    def left(self) -> Tensor:
        """The left edge (B,)."""
        return self.places[:, 1]

    @property
    def height(self) -> Tensor:
        """From the upper edge to the lower (B,)."""
        return self.places[:, 2]

    @property
    def width(self) -> Tensor:
        """From the left edge to the right (B,)."""
        return self.places[:, 3]

    @property
    def limits(self) -> tuple[Tensor, ...]:
        """Top, bottom, left and right (B,) of what may be read."""
        return self.places[:, 4:].unbind(dim=1)

    def __getitem__(self, rows: Tensor | slice) -> "Boxes":
        """The boxes of some of the images."""
        return Boxes(self.places[rows], None if self.flip is None else self.flip[rows])


def random_boxes(
    sizes: Tensor,
    draws: Tensor,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: bool = True,
) -> Boxes:
    """Choose a box per image as torchvision's RandomResizedCrop does; sizes (B, 2), draws (B, DRAWS) in [0, 1)."""
    draws = draws.double()
    rows, columns = sizes[:, 0].double(), sizes[:, 1].double()  # (B,)
    area = (rows * columns)[:, None] * (scale[0] + (scale[1] - scale[0]) * draws[:, :TRIES])  # (B, TRIES)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * draws[:, TRIES : 2 * TRIES])  # (B, TRIES)
    width, height = torch.sqrt(area * aspect).round(), torch.sqrt(area / aspect).round()  # (B, TRIES)
    fits = (width > 0) & (height > 0) & (width <= columns[:, None]) & (height <= rows[:, None])  # (B, TRIES)
    first = fits.int().argmax(dim=1, keepdim=True)  # (B, 1)
    found = fits.any(dim=1)  # (B,)
    whole_height, whole_width = _largest_box(rows, columns, ratio)
    height = torch.where(found, height.gather(1, first)[:, 0], whole_height)  # (B,)
    width = torch.where(found, width.gather(1, first)[:, 0], whole_width)  # (B,)
    down, across = draws[:, -3], draws[:, -2]
    top = torch.where(found, (down * (rows - height + 1)).floor(), ((rows - height) / 2).floor())
    left = torch.where(found, (across * (columns - width + 1)).floor(), ((columns - width) / 2).floor())
    limits = (top, top + height, left, left + width)
    return Boxes.of((top, left, height, width), limits, draws[:, -1] < 0.5 if flip else None)


def _largest_box(rows: Tensor, columns: Tensor, ratio: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """The largest box of an allowed ratio: what is taken when no try fits."""
    height = torch.where(columns / rows < ratio[0], (columns / ratio[0]).round(), rows)
    width = torch.where(columns / rows > ratio[1], (rows * ratio[1]).round(), columns)
    return height, width


def centre_boxes(sizes: Tensor, resized: int, size: int) -> Boxes:
    """The box that Resize(resized) and CenterCrop(size) look at; sizes (B, 2)."""
    rows, columns = sizes[:, 0].double(), sizes[:, 1].double()  # (B,)
    short = torch.minimum(rows, columns)
    new_rows = torch.where(rows <= columns, torch.full_like(rows, resized), (resized * rows / short).floor())
    new_columns = torch.where(columns <= rows, torch.full_like(rows, resized), (resized * columns / short).floor())
    top = ((new_rows - size) / 2).round() * rows / new_rows
    left = ((new_columns - size) / 2).round() * columns / new_columns
    zero = torch.zeros_like(rows)
    corner = (top, left, size * rows / new_rows, size * columns / new_columns)
    return Boxes.of(corner, (zero, rows, zero, columns))


def resample(canvas: Tensor, boxes: Boxes, size: int, kernel: Kernel = "bilinear") -> Tensor:
    """Cut the boxes out of a canvas (B, 3, H, W) of uint8 and resize them to (B, 3, size, size) in [0, 1]."""
    top, bottom, left, right = boxes.limits
    down = _matrix(boxes.top, boxes.height, top, bottom, canvas.shape[2], size, kernel)  # (B, size, H)
    across = _matrix(boxes.left, boxes.width, left, right, canvas.shape[3], size, kernel)  # (B, size, W)
    if boxes.flip is not None:
        across = torch.where(boxes.flip[:, None, None], across.flip(1), across)
    pixels = canvas.float() / 255  # (B, 3, H, W)
    return (down[:, None] @ (pixels @ across.mT[:, None])).clamp(0, 1)  # (B, 3, size, size)


def _matrix(start: Tensor, length: Tensor, low: Tensor, high: Tensor, pixels: int, size: int, kernel: Kernel) -> Tensor:
    """Weights of the input pixels in each output pixel, (B, size, pixels): a kernel as wide as the reduction."""
    scale = (length / size)[:, None]  # (B, 1)
    centre = start[:, None] + (torch.arange(size, device=start.device) + 0.5) * scale  # (B, size)
    position = torch.arange(pixels, device=start.device) + 0.5  # (pixels,)
    distance = (position - centre[..., None]).abs() / scale[..., None].clamp(min=1)  # (B, size, pixels)
    inside = (position > low[:, None]) & (position < high[:, None])  # (B, pixels)
    weights = _KERNELS[kernel](distance) * inside[:, None]  # (B, size, pixels)
    return (weights / weights.sum(dim=-1, keepdim=True)).float()


def _triangle(distance: Tensor) -> Tensor:
    return (1 - distance).clamp(min=0)


def _cubic(distance: Tensor) -> Tensor:
    """Keys' piecewise cubic with a = -1/2."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))


_KERNELS = {"bilinear": _triangle, "bicubic": _cubic}
