"""Preprocessing on the device: crops, flips, color augmentation, resizing, normalization.

A view is a box per image and two matrices that resample it (antialiased, as torchvision's bilinear and bicubic resize),
so a batch of boxes of any size needs two matrix products. The caller passes uniform numbers in [0, 1), one row per
image, so the view of an image depends on its own row only. Color parameters are computed on the CPU.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Literal, Self

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from probprompt import kernels, randomness
from probprompt.data.images import Pixels
from probprompt.errors import UserError

Kernel = Literal["bilinear", "bicubic"]  # interpolation kernel

CANVAS = 2**27  # bytes of images that are cropped together; cropping takes ten times as much memory
TRIES = 10  # boxes to try before using the whole image, as in torchvision
DRAWS = 2 * TRIES + 3  # uniform numbers per image: area and ratio of each try, position, flip


@dataclass(frozen=True)
class Packed:
    """Decoded images `(H, W, 3)` in one flat tensor."""

    pixels: Tensor  # (bytes,) uint8
    offsets: Tensor  # (n,)
    sizes: Tensor  # (n, 2): height and width
    shape: tuple[int, int] | None = None  # of all images, if it is the same and nothing is stored between them
    resident: bool = True  # whether the pixels are on the device of the sizes

    @classmethod
    def of(cls, arrays: Sequence[Pixels], device: torch.device) -> Self:
        """Move decoded images `(H, W, 3)` to the device."""
        sizes = torch.tensor([array.shape[:2] for array in arrays], dtype=torch.long).view(-1, 2)
        pixels = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays] or [np.empty(0, np.uint8)]))
        lengths = 3 * sizes.prod(dim=1)  # (n,)
        offsets = lengths.cumsum(0) - lengths
        shape = common_shape(offsets, sizes, len(pixels))
        return cls(pixels.to(device), offsets.to(device), sizes.to(device), shape)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def device(self) -> torch.device:
        """Device on which views of the images are made."""
        return self.sizes.device

    @cached_property
    def _keys(self) -> Tensor:
        keys = []
        for (height, width), start in zip(self.sizes.tolist(), self.offsets.tolist(), strict=True):
            pixels = self.pixels[start : start + 3 * height * width].cpu().numpy()
            keys.append(randomness.pixel_key(pixels, height, width))
        return torch.tensor(keys, device=self.device)

    def keys(self, indices: Tensor) -> Tensor:
        """Return keys `(B,)` that depend only on each image's pixels."""
        return self._keys[indices]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pixels on the device, the offset of each image `(B,)`, and sizes `(B, 2)`."""
        return self.pixels, self.offsets[indices], self.sizes[indices]

    def canvas(self, indices: Tensor) -> Tensor:
        """Return images `(B, 3, H, W)` in the top left corner; the rest is never read."""
        pixels, offsets, sizes = self.batch(indices)
        if self.shape is not None:
            height, width = self.shape
            planes = pixels.view(-1, height * width, 3).transpose(1, 2)  # (n, 3, H W)
            chosen = planes.index_select(0, offsets // (3 * height * width))  # (B, 3, H W)
            return chosen.contiguous().view(-1, 3, height, width)
        places = torch.cat([offsets[:, None], sizes], dim=1).tolist()
        height, width = (max(place[axis] for place in places) for axis in (1, 2))
        canvas = torch.zeros(len(places), 3, height, width, dtype=torch.uint8, device=self.device)
        for row, (start, high, wide) in zip(canvas, places, strict=True):
            image = pixels[start : start + 3 * high * wide].view(-1, 3).t()  # (3, H W)
            row[:, :high, :wide] = image.reshape(3, high, wide)
        return canvas

    def groups(self, indices: Tensor) -> list[slice]:
        """Split a batch into slices with one canvas each, so large images do not enlarge all."""
        starts, high, wide = [0], 0, 0
        sizes = () if self.shape is not None else self.sizes[indices].tolist()
        for place, (height, width) in enumerate(sizes):
            high, wide = max(high, height), max(wide, width)
            if 3 * high * wide * (place + 1 - starts[-1]) > CANVAS and place > starts[-1]:
                starts.append(place)
                high, wide = height, width
        return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(indices)], strict=True)]


def common_shape(offsets: Tensor, sizes: Tensor, total: int) -> tuple[int, int] | None:
    """Return the size of all images, or None if sizes differ or the pixels have gaps."""
    if not len(sizes) or not bool((sizes == sizes[0]).all()):
        return None
    height, width = sizes[0].tolist()
    length = 3 * height * width
    return (height, width) if total % length == 0 and bool((offsets.cpu() % length == 0).all()) else None


@dataclass(frozen=True)
class Boxes:
    """A box per image in pixels; pixels outside the limits are never read."""

    places: Tensor  # (B, 8) in float64: top, left, height, width; limits: top, bottom, left, right
    flip: Tensor | None = None  # (B,)

    @classmethod
    def of(cls, corner: Sequence[Tensor], limits: Sequence[Tensor], flip: Tensor | None = None) -> Self:
        """Return boxes of top, left, height, width, and limits: top, bottom, left, right."""
        return cls(torch.stack([*corner, *limits], dim=1).double(), flip)

    def __getitem__(self, rows: Tensor | slice) -> "Boxes":
        return Boxes(self.places[rows], None if self.flip is None else self.flip[rows])


def random_boxes(
    sizes: Tensor,
    draws: Tensor,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: bool = True,
) -> Boxes:
    """Choose boxes as torchvision's RandomResizedCrop; sizes `(B, 2)`, draws `(B, DRAWS)`."""
    draws = draws.double()
    rows, columns = sizes[:, 0].double(), sizes[:, 1].double()  # (B,)
    area = (rows * columns)[:, None] * (scale[0] + (scale[1] - scale[0]) * draws[:, :TRIES])  # (B, TRIES)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * draws[:, TRIES : 2 * TRIES])  # (B, TRIES)
    width, height = torch.sqrt(area * aspect).round(), torch.sqrt(area / aspect).round()  # (B, TRIES)
    fits = (width > 0) & (height > 0) & (width <= columns[:, None]) & (height <= rows[:, None])  # (B, TRIES)
    first = fits.int().argmax(dim=1, keepdim=True)  # (B, 1)
    valid = fits.any(dim=1)  # (B,)
    largest_height = torch.where(columns / rows < ratio[0], (columns / ratio[0]).round(), rows)  # if no try fits
    largest_width = torch.where(columns / rows > ratio[1], (rows * ratio[1]).round(), columns)
    height = torch.where(valid, height.gather(1, first)[:, 0], largest_height)  # (B,)
    width = torch.where(valid, width.gather(1, first)[:, 0], largest_width)  # (B,)
    down, across = draws[:, -3], draws[:, -2]
    top = torch.where(valid, (down * (rows - height + 1)).floor(), ((rows - height) / 2).floor())
    left = torch.where(valid, (across * (columns - width + 1)).floor(), ((columns - width) / 2).floor())
    limits = (top, top + height, left, left + width)
    return Boxes.of((top, left, height, width), limits, draws[:, -1] < 0.5 if flip else None)


def center_boxes(sizes: Tensor, resized: int, size: int) -> Boxes:
    """Return the boxes of Resize(resized) and CenterCrop(size); sizes `(B, 2)`."""
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
    """Crop boxes of a canvas `(B, 3, H, W)` of uint8 to `(B, 3, size, size)` in [0, 1]."""
    y, x, height, width, top, bottom, left, right = boxes.places.unbind(dim=1)  # (B,) each
    down = _matrix(y, height, top, bottom, canvas.shape[2], size, kernel)  # (B, size, H)
    across = _matrix(x, width, left, right, canvas.shape[3], size, kernel)  # (B, size, W)
    if boxes.flip is not None:
        across = torch.where(boxes.flip[:, None, None], across.flip(1), across)
    pixels = canvas.float() / 255  # (B, 3, H, W)
    return (down[:, None] @ (pixels @ across.mT[:, None])).clamp(0, 1)  # (B, 3, size, size)


def _matrix(start: Tensor, length: Tensor, low: Tensor, high: Tensor, pixels: int, size: int, kernel: Kernel) -> Tensor:
    """Return the weights of input pixels `(B, size, pixels)`, antialiased by the scale."""
    scale = (length / size)[:, None]  # (B, 1)
    center = start[:, None] + (torch.arange(size, device=start.device) + 0.5) * scale  # (B, size)
    position = torch.arange(pixels, device=start.device) + 0.5  # (pixels,)
    distance = (position - center[..., None]).abs() / scale[..., None].clamp(min=1)  # (B, size, pixels)
    inside = (position > low[:, None]) & (position < high[:, None])  # (B, pixels)
    weights = _KERNELS[kernel](distance) * inside[:, None]  # (B, size, pixels)
    return (weights / weights.sum(dim=-1, keepdim=True)).float()


def _triangle(distance: Tensor) -> Tensor:
    return (1 - distance).clamp(min=0)


def _cubic(distance: Tensor) -> Tensor:
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))


_KERNELS = {"bilinear": _triangle, "bicubic": _cubic}  # bicubic: Keys' cubic with a = -1/2
# Colors ---------------------------------------------------------------------------------------------------------
Augmentation = Literal["crop", "crop+color", "autoaugment+crop", "crop+brightness"]
"""Box and flip only; EvoPrompt's; APT's; HiDe-Prompt's (with bicubic crops)."""

JITTER_DRAWS = 7  # numbers per image for :func:`jitter`: whether, order, four strengths, whether gray
AUTOAUGMENT_DRAWS = 5  # numbers per image for :func:`autoaugment`: sub-policy, whether (two), sign (two)

_DRAWS = {"crop": 0, "crop+color": JITTER_DRAWS, "autoaugment+crop": AUTOAUGMENT_DRAWS, "crop+brightness": 1}


def draws_needed(kind: Augmentation) -> int:
    """Return the number of uniform numbers per image in addition to those of the box."""
    return _DRAWS[kind]


def before_crop(canvas: Tensor, sizes: Tensor, draws: Tensor, kind: Augmentation) -> Tensor:
    """Augment whole images: a canvas `(B, 3, H, W)` of uint8, sizes `(B, 2)`."""
    return autoaugment(canvas, sizes, draws, "bilinear") if kind == "autoaugment+crop" else canvas  # as in APT


def after_crop(images: Tensor, draws: Tensor, kind: Augmentation) -> Tensor:
    """Augment crops `(B, 3, H, W)` in [0, 1] with the draws of :func:`before_crop`."""
    if kind == "crop+brightness":
        return _brightness(images, 1 + 63 / 255 * (2 * draws[:, 0].to(images) - 1))
    return jitter(images, draws) if kind == "crop+color" else images


JITTER_PROBABILITY, GRAY_PROBABILITY = 0.5, 0.2
CENTERS = (1.0, 1.0, 1.0, 0.0)  # brightness, contrast, saturation, hue
STRENGTHS = (0.4, 0.4, 0.4, 0.1)
ORDERS = tuple(permutations(range(4)))


def jitter(images: Tensor, draws: Tensor) -> Tensor:
    """Apply EvoPrompt's ColorJitter(0.4, 0.4, 0.4, 0.1) to half of the images, gray to 20%.

    As in torchvision, each image has its own factors and order of operations.
    """
    draws = draws.cpu().double()  # (B, JITTER_DRAWS)
    factors = (torch.tensor(CENTERS) + torch.tensor(STRENGTHS) * (2 * draws[:, 2:6] - 1)).to(images)  # (B, 4)
    order = torch.tensor(ORDERS)[(draws[:, 1] * len(ORDERS)).long()]  # (B, 4)
    order[draws[:, 0] >= JITTER_PROBABILITY] = -1
    images = images.clone()
    for position in range(4):
        for number, operation in enumerate((_brightness, _contrast, _saturation, _hue)):
            rows = (order[:, position] == number).nonzero()[:, 0].to(images.device)
            images[rows] = operation(images[rows], factors[rows, number])
    rows = (draws[:, 6] < GRAY_PROBABILITY).nonzero()[:, 0].to(images.device)
    images[rows] = _gray(images[rows]).expand(-1, 3, -1, -1)
    return images


def _blend(images: Tensor, others: Tensor | float, factor: Tensor) -> Tensor:
    factor = factor[:, None, None, None]  # (B, 1, 1, 1)
    return (factor * images + (1 - factor) * others).clamp(0, 1)


def _gray(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]  # (B, 1, H, W)


def _brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, 0.0, factor)


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, _gray(images).mean(dim=(1, 2, 3), keepdim=True), factor)


def _saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, _gray(images), factor)


def _hue(images: Tensor, shift: Tensor) -> Tensor:
    """Rotate hues by a fraction of the circle, at constant saturation and value (HSV)."""
    red, green, blue = images.unbind(1)
    value = images.amax(dim=1)  # (B, H, W)
    chroma = value - images.amin(dim=1)
    step = torch.where(chroma > 0, chroma, 1)  # avoids division by zero for gray pixels
    green_or_blue = torch.where(value == green, 2 + (blue - red) / step, 4 + (red - green) / step)
    hue = torch.where(value == red, (green - blue) / step, green_or_blue)  # in sixths of the circle
    hue = hue + 6 * shift[:, None, None]
    places = [(hue + offset) % 6 for offset in (5, 3, 1)]  # positions of red, green and blue on their trapezoids
    return torch.stack([value - chroma * torch.minimum(place, 4 - place).clamp(0, 1) for place in places], dim=1)


Operation = tuple[str, float, int]  # name, probability and level from 0 to 9 of an operation
Interpolation = Literal["nearest", "bilinear"]  # interpolation of rotated and sheared images; pixels outside are black

# Cubuk et al., "AutoAugment: Learning augmentation strategies from data" (2019), the policy found on ImageNet.
IMAGENET_POLICY: tuple[tuple[Operation, Operation], ...] = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 0), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 0)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 0)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 0), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 0)),
    (("equalize", 0.0, 0), ("equalize", 0.8, 0)),
    (("invert", 0.6, 0), ("equalize", 1.0, 0)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 0)),
    (("shear", 0.6, 5), ("equalize", 1.0, 0)),
    (("color", 0.4, 0), ("equalize", 0.6, 0)),
    (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
    (("invert", 0.6, 0), ("equalize", 1.0, 0)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
)


def autoaugment(canvas: Tensor, sizes: Tensor, draws: Tensor, interpolation: Interpolation = "nearest") -> Tensor:
    """Apply AutoAugment's ImageNet policy to a canvas `(B, 3, H, W)` of uint8.

    Equals torchvision's on tensors. Images are in the top left with ``sizes`` `(B, 2)`; the rest stays unchanged.
    """
    canvas = canvas.clone()
    for image, (height, width), row in zip(canvas, sizes.tolist(), draws.tolist(), strict=True):
        sub_policy = IMAGENET_POLICY[int(row[0] * len(IMAGENET_POLICY))]
        for (name, probability, level), draw, sign in zip(sub_policy, row[1:3], row[3:5], strict=True):
            if draw < probability:
                real = image[:, :height, :width]
                real.copy_(_operate(real, name, level, -1 if sign < 0.5 else 1, interpolation))
    return canvas


def _operate(image: Tensor, name: str, level: int, sign: int, interpolation: Interpolation) -> Tensor:
    from torchvision.transforms.v2 import InterpolationMode, functional  # late: takes seconds, and few runs need it

    def scaled(lowest: float, highest: float) -> float:
        return float(torch.linspace(lowest, highest, 10)[level])  # in float32, as torchvision's

    mode = InterpolationMode(interpolation)
    tilt = [math.degrees(math.atan(sign * scaled(0, 0.3))), 0.0]
    operations: dict[str, Callable[[], Tensor]] = {
        "rotate": lambda: functional.rotate(image, sign * scaled(0, 30), mode),
        "shear": lambda: functional.affine(image, 0.0, [0, 0], 1.0, tilt, mode, center=[0, 0]),
        "color": lambda: functional.adjust_saturation(image, 1 + sign * scaled(0, 0.9)),
        "contrast": lambda: functional.adjust_contrast(image, 1 + sign * scaled(0, 0.9)),
        "sharpness": lambda: functional.adjust_sharpness(image, 1 + sign * scaled(0, 0.9)),
        "posterize": lambda: functional.posterize(image, round(scaled(8, 4))),
        "solarize": lambda: functional.solarize(image, scaled(255, 0)),
        "autocontrast": lambda: functional.autocontrast(image),
        "equalize": lambda: functional.equalize(image),
        "invert": lambda: functional.invert(image),
    }
    return operations[name]()


def enlarged(size: int) -> int:
    """Return the short side to resize to before a center crop of this size.

    >>> enlarged(224)
    256
    """
    return round(size * 256 / 224)


@dataclass(frozen=True)
class RandomViews:
    """Random views of training images: boxes and draws of the color augmentation."""

    boxes: Boxes
    augmentation: Augmentation = "crop"
    draws: Tensor | None = None  # (B, draws of the augmentation)

    def __getitem__(self, rows: Tensor | slice) -> "RandomViews":
        return RandomViews(self.boxes[rows], self.augmentation, None if self.draws is None else self.draws[rows])


@dataclass(frozen=True)
class Preprocessor:
    """Preprocessing of stored images to inputs of the backbone."""

    size: int
    resized: int
    mean: Tensor  # (3, 1, 1)
    std: Tensor  # (3, 1, 1)
    kernel: Kernel = "bilinear"  # of evaluation views
    dtype: torch.dtype = torch.float32  # of views that GPU kernels write; other views are float32

    @classmethod
    def of(
        cls,
        size: int,
        resized: int,
        mean: Sequence[float],
        std: Sequence[float],
        kernel: Kernel,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Return a preprocessor with the mean and standard deviation of each color."""
        center, spread = (torch.tensor(values, device=device).view(3, 1, 1) for values in (mean, std))
        return cls(size, resized, center, spread, kernel, dtype)

    def evaluation(self, store: Packed, indices: Tensor) -> Tensor:
        """Return normalized evaluation views `(B, 3, size, size)`."""
        boxes = center_boxes(store.sizes[indices], self.resized, self.size)
        return self._crop(store, indices, boxes, self.kernel)

    def is_one_kernel(self, store: Packed, augmentation: Augmentation) -> bool:
        """Return True if one kernel crops random views on the device, as a captured step needs."""
        return kernels.usable(store.device) and store.resident and draws_needed(augmentation) == 0

    def random(self, store: Packed, indices: Tensor, views: RandomViews) -> Tensor:
        """Return normalized random views `(B, 3, size, size)`."""
        if views.draws is None or draws_needed(views.augmentation) == 0:
            return self._crop(store, indices, views.boxes)
        return torch.cat([self._color(store, indices[some], views[some]) for some in store.groups(indices)])

    def _color(self, store: Packed, indices: Tensor, views: RandomViews) -> Tensor:
        assert views.draws is not None
        canvas = before_crop(store.canvas(indices), store.sizes[indices], views.draws, views.augmentation)
        kernel: Kernel = "bicubic" if views.augmentation == "crop+brightness" else "bilinear"
        images = after_crop(resample(canvas, views.boxes, self.size, kernel), views.draws, views.augmentation)
        return self._normalize(images)

    def _crop(self, store: Packed, indices: Tensor, boxes: Boxes, kernel: Kernel = "bilinear") -> Tensor:
        if kernels.usable(store.device):
            from probprompt.kernels.pixels import crop  # late: needs Triton

            return crop(*store.batch(indices), boxes, self.size, self.mean, self.std, kernel, self.dtype)
        parts = ((store.canvas(indices[some]), boxes[some]) for some in store.groups(indices))
        return self._normalize(torch.cat([resample(canvas, part, self.size, kernel) for canvas, part in parts]))

    def _normalize(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std

    def record(self) -> dict[str, JsonValue]:
        """Return the description for a run's record."""
        return {
            "image_size": self.size,
            "resized": self.resized,
            "mean": self.mean.flatten().tolist(),
            "std": self.std.flatten().tolist(),
            "interpolation": self.kernel,
        }

    def check_record(self, recorded: Mapping[str, JsonValue]) -> None:
        """Raise UserError if a record has another preprocessing."""
        now = self.record()
        differ = [
            f"{name} {recorded[name]}, now {now[name]}"
            for name in ("image_size", "resized", "mean", "std")
            if name in recorded
            and not torch.tensor(recorded[name]).double().allclose(torch.tensor(now[name]).double(), rtol=0, atol=1e-4)
        ]
        if differ:
            raise UserError(
                f"The preprocessing of images changed ({'; '.join(differ)}). Restore the JSON file next to the "
                "weights, or start a new run."
            )
