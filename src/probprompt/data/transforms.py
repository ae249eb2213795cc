"""From stored images to inputs of the backbone: crops and flips, color augmentation, resizing, normalization.

A view is a box per image and two small matrices that resample it (with antialiasing, as torchvision's bilinear and
bicubic resize), so a whole batch of boxes of different sizes is two matrix products on any device. All randomness is
the caller's: uniform numbers in [0, 1), a row per image, decide everything, so the view of an image depends on its own
row only. Colors are decided on the CPU, wherever the rows are; pixels stay on their device.
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

Kernel = Literal["bilinear", "bicubic"]
"""How pixels between pixels are computed."""

CANVAS = 2**27  # bytes of images that are cut together; cutting takes ten times as much
TRIES = 10  # torchvision's: boxes tried before the whole image is taken
DRAWS = 2 * TRIES + 3  # uniform numbers per image: area and ratio of each try, position, flip


@dataclass(frozen=True)
class Packed:
    """Decoded images (H, W, 3) in one flat tensor."""

    pixels: Tensor  # (bytes,) uint8
    offsets: Tensor  # (n,): where each image begins
    sizes: Tensor  # (n, 2): height and width
    shape: tuple[int, int] | None = None
    """Size of all images, if it is the same and nothing is stored between them."""
    resident: bool = True
    """Whether the pixels are on the device of the sizes."""

    @classmethod
    def of(cls, arrays: Sequence[Pixels], device: torch.device) -> Self:
        """Move decoded images (H, W, 3) to the device."""
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
        sizes, starts, found = self.sizes.tolist(), self.offsets.tolist(), []
        for (height, width), start in zip(sizes, starts, strict=True):
            pixels = self.pixels[start : start + 3 * height * width].cpu().numpy()
            found.append(randomness.pixel_key(pixels, height, width))
        return torch.tensor(found, device=self.device)

    def keys(self, indices: Tensor) -> Tensor:
        """Return a number for each image (B,) that its pixels decide: of equal images it is the same."""
        return self._keys[indices]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pixels on the device, the start of each image in them (B,), and sizes (B, 2)."""
        return self.pixels, self.offsets[indices], self.sizes[indices]

    def canvas(self, indices: Tensor) -> Tensor:
        """Return the images (B, 3, H, W), in the top left corner; the rest is never read."""
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
        """Split a batch into runs that share a canvas, since one large image would enlarge it for all."""
        begins, high, wide = [0], 0, 0
        sizes = () if self.shape is not None else self.sizes[indices].tolist()
        for place, (height, width) in enumerate(sizes):
            high, wide = max(high, height), max(wide, width)
            if 3 * high * wide * (place + 1 - begins[-1]) > CANVAS and place > begins[-1]:
                begins.append(place)
                high, wide = height, width
        return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(indices)], strict=True)]


def common_shape(offsets: Tensor, sizes: Tensor, total: int) -> tuple[int, int] | None:
    """Return the size of all images, if it is the same and nothing is stored between them."""
    if not len(sizes) or not bool((sizes == sizes[0]).all()):
        return None
    height, width = sizes[0].tolist()
    length = 3 * height * width
    return (height, width) if total % length == 0 and bool((offsets.cpu() % length == 0).all()) else None


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


def center_boxes(sizes: Tensor, resized: int, size: int) -> Boxes:
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
    center = start[:, None] + (torch.arange(size, device=start.device) + 0.5) * scale  # (B, size)
    position = torch.arange(pixels, device=start.device) + 0.5  # (pixels,)
    distance = (position - center[..., None]).abs() / scale[..., None].clamp(min=1)  # (B, size, pixels)
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
# Colors ---------------------------------------------------------------------------------------------------------
Augmentation = Literal["crop", "crop+color", "autoaugment+crop", "crop+brightness"]
"""``crop``: box and flip alone; ``crop+color``: EvoPrompt's; ``autoaugment+crop``: APT's; ``crop+brightness``:
HiDe-Prompt's, with bicubic crops."""

JITTER_DRAWS = 7
"""Numbers per image that :func:`jitter` needs: whether, order, four strengths, whether gray."""
AUTOAUGMENT_DRAWS = 5
"""Numbers per image that :func:`autoaugment` needs: sub-policy, whether either operation, the sign of either."""

_DRAWS: dict[Augmentation, int] = {
    "crop": 0,
    "crop+color": JITTER_DRAWS,
    "autoaugment+crop": AUTOAUGMENT_DRAWS,
    "crop+brightness": 1,
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
    if kind == "crop+brightness":
        return _brightness(images, 1 + 63 / 255 * (2 * draws[:, 0].to(images) - 1))
    return jitter(images, draws) if kind == "crop+color" else images


JITTER_PROBABILITY, GRAY_PROBABILITY = 0.5, 0.2
CENTERS = (1.0, 1.0, 1.0, 0.0)  # brightness, contrast, saturation, hue
STRENGTHS = (0.4, 0.4, 0.4, 0.1)
ORDERS = tuple(permutations(range(4)))


def jitter(images: Tensor, draws: Tensor) -> Tensor:
    """EvoPrompt's colors: ColorJitter(0.4, 0.4, 0.4, 0.1) of half of the images, then a fifth of all turned gray.

    As torchvision's, each image (3, H, W) in [0, 1] has its own factors and its own order of the four operations.
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
    """Turn hues by a part of the circle, at the same saturation and value (HSV)."""
    red, green, blue = images.unbind(1)
    value = images.amax(dim=1)  # (B, H, W)
    chroma = value - images.amin(dim=1)
    step = torch.where(chroma > 0, chroma, 1)  # a gray pixel has no hue: any will do
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
    """AutoAugment's ImageNet policy on each image of a canvas (B, 3, H, W) of uint8, as torchvision's on tensors.

    An image is the top left part of its canvas that ``sizes`` (B, 2) says; the rest is neither read nor written.
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
        return float(torch.linspace(lowest, highest, 10)[level])  # in float32, as torchvision's: pixels are cut off

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
    """The short side from which an input of this size is cut: 256 for 224.

    >>> enlarged(224)
    256
    """
    return round(size * 256 / 224)


@dataclass(frozen=True)
class RandomViews:
    """How training sees images: a box each, and the draws of their color augmentation."""

    boxes: Boxes
    augmentation: Augmentation = "crop"
    draws: Tensor | None = None  # (B, draws of the augmentation)

    def __getitem__(self, rows: Tensor | slice) -> "RandomViews":
        """The views of some of the images."""
        return RandomViews(self.boxes[rows], self.augmentation, None if self.draws is None else self.draws[rows])


@dataclass(frozen=True)
class Preprocessor:
    """Turns stored images into inputs of the backbone."""

    size: int
    resized: int
    mean: Tensor  # (3, 1, 1)
    std: Tensor  # (3, 1, 1)
    kernel: Kernel = "bilinear"
    """How evaluation views are resized."""
    dtype: torch.dtype = torch.float32
    """What kernels write views in: the backbone's own, so that nothing is rounded later; else it is float32."""

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
        """Return a preprocessor that normalizes by the mean and standard deviation of each color."""
        center, spread = (torch.tensor(values, device=device).view(3, 1, 1) for values in (mean, std))
        return cls(size, resized, center, spread, kernel, dtype)

    def evaluation(self, store: Packed, indices: Tensor) -> Tensor:
        """The evaluation view of images (B, 3, size, size), normalized."""
        boxes = center_boxes(store.sizes[indices], self.resized, self.size)
        return self._cut(store, indices, boxes, self.kernel)

    def cuts(self, store: Packed, augmentation: Augmentation) -> bool:
        """Whether random views are cut by one kernel out of what lies on the device, as a captured step can do."""
        return kernels.usable(store.device) and store.resident and draws_needed(augmentation) == 0

    def random(self, store: Packed, indices: Tensor, views: RandomViews) -> Tensor:
        """Given views of images (B, 3, size, size), normalized."""
        if views.draws is None or draws_needed(views.augmentation) == 0:
            return self._cut(store, indices, views.boxes)
        return torch.cat([self._color(store, indices[some], views[some]) for some in store.groups(indices)])

    def _color(self, store: Packed, indices: Tensor, views: RandomViews) -> Tensor:
        """The same where colors are changed, of images whose canvas is not too large."""
        assert views.draws is not None
        canvas = before_crop(store.canvas(indices), store.sizes[indices], views.draws, views.augmentation)
        kernel: Kernel = "bicubic" if views.augmentation == "crop+brightness" else "bilinear"
        images = after_crop(resample(canvas, views.boxes, self.size, kernel), views.draws, views.augmentation)
        return self._normalize(images)

    def _cut(self, store: Packed, indices: Tensor, boxes: Boxes, kernel: Kernel = "bilinear") -> Tensor:
        """The boxes of images (B, 3, size, size), normalized."""
        if kernels.usable(store.device):
            from probprompt.kernels.pixels import crop  # late: needs Triton

            return crop(*store.batch(indices), boxes, self.size, self.mean, self.std, kernel, self.dtype)
        cut = [resample(store.canvas(indices[some]), boxes[some], self.size, kernel) for some in store.groups(indices)]
        return self._normalize(torch.cat(cut))

    def _normalize(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std

    def record(self) -> dict[str, JsonValue]:
        """Return what a record states of it."""
        return {
            "image_size": self.size,
            "resized": self.resized,
            "mean": self.mean.flatten().tolist(),
            "std": self.std.flatten().tolist(),
            "interpolation": self.kernel,
        }

    def check_record(self, recorded: Mapping[str, JsonValue]) -> None:
        """Raise an error if a record states another preprocessing: the same weights would get other inputs."""
        now = self.record()
        differ = [
            f"{name} {recorded[name]}, now {now[name]}"
            for name in ("image_size", "resized", "mean", "std")
            if name in recorded
            and not torch.tensor(recorded[name]).double().allclose(torch.tensor(now[name]).double(), rtol=0, atol=1e-4)
        ]
        if differ:
            raise UserError(
                f"images would be prepared otherwise than they were ({'; '.join(differ)}): put back the JSON file "
                "beside the weights as it was, or begin anew"
            )
