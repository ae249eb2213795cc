"""Crop, resize, flip and normalize boxes of stored images in one pass, and cut images into patches.

:func:`crop` gives the views of :func:`probprompt.data.transforms.resample`, for images of different sizes that are
stored one after another.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"
from typing import Literal, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from probprompt.errors import UserError, suggest

Kernel = Literal["bilinear", "bicubic"]
"""Interpolation."""
RADIUS = {"bilinear": 1, "bicubic": 2}
"""Radius of a kernel in pixels of the output or of the input, whichever are larger."""
PIXELS, WARPS = 256, 4
"""Output pixels per program, of one line if they fit, and warps: the fastest of 23 shapes."""


@triton.jit
def _start(index, begin, length, size: tl.constexpr, radius: tl.constexpr):
    """Return first input pixel, its place in the kernel, step and number, by output pixel.

    Float64 for these few numbers; all others are relative to the kernel and small enough for float32.
    """
    scale = length / size
    wide = tl.maximum(scale, 1.0)
    centre = begin + (index.to(tl.float64) + 0.5) * scale
    first = tl.floor(centre - radius * wide + 0.5)
    offset = ((first + 0.5 - centre) / wide).to(tl.float32)
    return first.to(tl.int32), offset, (1 / wide).to(tl.float32), tl.ceil(2 * radius * wide).to(tl.int32)


@triton.jit
def _limits(low, high, pixels):
    """Return the first pixel whose center is between limits, and the one after the last."""
    return tl.maximum(tl.floor(low + 0.5).to(tl.int32), 0), tl.minimum(tl.ceil(high - 0.5).to(tl.int32), pixels)


@triton.jit
def _kernel(distance, radius: tl.constexpr):
    """Compute a triangle, or Keys' piecewise cubic with a = -1/2."""
    distance = tl.abs(distance)
    if radius == 1:
        weight = tl.maximum(1 - distance, 0.0)
    else:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weight = tl.where(distance < 1, near, tl.where(distance < 2, far, 0.0))
    return weight


@triton.jit
def _tap(first, along, step, tap, low, high, pixels, radius: tl.constexpr):
    """Return the weight and the place of a pixel under the kernel; outside the weight is 0."""
    place = first + tap
    weight = tl.where((place >= low) & (place < high), _kernel(along + tap * step, radius), 0.0)
    return weight, tl.minimum(tl.maximum(place, 0), pixels - 1)


@triton.jit
def _put(sums, total, mean, std, target, mask):
    """Store a color of the output, clamped and normalized, from weighted sums of levels."""
    level = tl.minimum(tl.maximum(sums / (255 * total), 0.0), 1.0)
    tl.store(target, ((level - tl.load(mean)) / tl.load(std)).to(target.dtype.element_ty), mask=mask)


@triton.jit
def _crop(
    pixels,
    offsets,
    sizes,
    boxes,
    flip,
    mean,
    std,
    result,
    size: tl.constexpr,
    radius: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    seen = tl.minimum(column, size - 1)
    if flip is not None:
        seen = tl.where(tl.load(flip + image) != 0, size - 1 - seen, seen)
    box = boxes + 8 * image  # top, left, height, width; limits: top, bottom, left, right
    y, along_y, step_y, taps_y = _start(tl.minimum(row, size - 1), tl.load(box), tl.load(box + 2), size, radius)
    x, along_x, step_x, taps_x = _start(seen, tl.load(box + 1), tl.load(box + 3), size, radius)
    height, width = tl.load(sizes + 2 * image).to(tl.int32), tl.load(sizes + 2 * image + 1).to(tl.int32)
    top, bottom = _limits(tl.load(box + 4), tl.load(box + 5), height)
    left, right = _limits(tl.load(box + 6), tl.load(box + 7), width)
    source = pixels + tl.load(offsets + image)
    red = tl.zeros((rows, columns), tl.float32)
    green, blue, total = red, red, red
    if (taps_y <= 2 * radius) & (taps_x <= 2 * radius):
        # No reduction, as for most boxes: with a constant number of taps all pixels are loaded in parallel.
        for down in tl.static_range(2 * radius):
            weight_y, start = _tap(y, along_y, step_y, down, top, bottom, height, radius)  # (rows,)
            for across in tl.static_range(2 * radius):
                weight_x, place = _tap(x, along_x, step_x, across, left, right, width, radius)  # (columns,)
                weight = weight_y[:, None] * weight_x[None, :]
                colors = source + (start[:, None] * width + place[None, :]) * 3  # (rows, columns)
                red += weight * tl.load(colors).to(tl.float32)
                green += weight * tl.load(colors + 1).to(tl.float32)
                blue += weight * tl.load(colors + 2).to(tl.float32)
                total += weight
    else:
        down = 0
        while down < taps_y:  # the interpreter has no range of a tensor
            weight_y, start = _tap(y, along_y, step_y, down, top, bottom, height, radius)  # (rows,)
            reds = tl.zeros((rows, columns), tl.float32)
            greens, blues, sums = reds, reds, tl.zeros((columns,), tl.float32)
            across = 0
            while across < taps_x:
                weight_x, place = _tap(x, along_x, step_x, across, left, right, width, radius)  # (columns,)
                colors = source + (start[:, None] * width + place[None, :]) * 3  # (rows, columns)
                reds += weight_x[None, :] * tl.load(colors).to(tl.float32)
                greens += weight_x[None, :] * tl.load(colors + 1).to(tl.float32)
                blues += weight_x[None, :] * tl.load(colors + 2).to(tl.float32)
                sums += weight_x
                across += 1
            red += weight_y[:, None] * reds
            green += weight_y[:, None] * greens
            blue += weight_y[:, None] * blues
            total += weight_y[:, None] * sums[None, :]
            down += 1
    target = result + image * 3 * size * size + row[:, None] * size + column[None, :]
    mask = (row[:, None] < size) & (column[None, :] < size)
    _put(red, total, mean, std, target, mask)
    _put(green, total, mean + 1, std + 1, target + size * size, mask)
    _put(blue, total, mean + 2, std + 2, target + 2 * size * size, mask)


class Boxes(Protocol):
    """Places (B, 8) in float64 (top, left, height, width; limits: top, bottom, left, right), and flips (B,)."""

    @property
    def places(self) -> Tensor: ...  # noqa: D102
    @property
    def flip(self) -> Tensor | None: ...  # noqa: D102


def crop(
    pixels: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    boxes: Boxes,
    size: int,
    mean: Tensor,
    std: Tensor,
    kernel: Kernel = "bilinear",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Crop, resize with antialiasing and normalize boxes: (B, 3, size, size) in ``dtype``.

    pixels: images (H, W, 3) of uint8, one after another in one flat tensor; offsets (B,) in int64: their starts; sizes
    (B, 2) in int64: height and width; mean and std (3, 1, 1) of values in [0, 1].
    """
    if kernel not in RADIUS:
        raise UserError(f"Unknown kernel {kernel!r}. {suggest(kernel, RADIUS)}")
    if pixels.dtype != torch.uint8 or offsets.dtype != torch.int64 or sizes.dtype != torch.int64:
        given = f"{pixels.dtype}, {offsets.dtype} and {sizes.dtype}"
        raise ValueError(f"Expected uint8 pixels and int64 offsets and sizes, got {given}.")
    places = boxes.places.contiguous()  # (B, 8)
    flip = None if boxes.flip is None else boxes.flip.contiguous()  # (B,)
    color = (mean.float().contiguous(), std.float().contiguous())  # (3, 1, 1)
    result = torch.empty(len(places), 3, size, size, dtype=dtype, device=pixels.device)
    columns = min(PIXELS, triton.next_power_of_2(size))
    rows = PIXELS // columns
    grid = (len(places), triton.cdiv(size, rows), triton.cdiv(size, columns))
    tiles = {"size": size, "radius": RADIUS[kernel], "rows": rows, "columns": columns, "num_warps": WARPS}
    _crop[grid](pixels, offsets.contiguous(), sizes.contiguous(), places, flip, *color, result, **tiles)
    return result


COLUMNS, WARPS = 256, 4
"""Maximum pixels of a line per program, and warps."""


@triton.jit
def _patches(
    images,
    result,
    height: tl.constexpr,
    width: tl.constexpr,
    colors: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Copy one color of a row of patches: a band of ``high`` lines."""
    band, color = tl.program_id(0).to(tl.int64), tl.program_id(1)
    down = tl.arange(0, rows)  # lines of the band
    across = tl.program_id(2) * columns + tl.arange(0, columns)
    known = (down[:, None] < high) & (across[None, :] < width)
    image, line = band // (height // high), (band % (height // high)) * high
    source = images + (image * colors + color) * height * width + (line + down)[:, None] * width + across[None, :]
    patch = band * (width // wide) + across // wide  # (columns,)
    place = patch[None, :] * (colors * high * wide) + color * high * wide + down[:, None] * wide + across % wide
    tl.store(result + place, tl.load(source, mask=known), mask=known)


def patches(images: Tensor, high: int, wide: int) -> Tensor:
    """Cut images (B, C, H, W) into patches of (high, wide): (B H/high W/wide, C high wide).

    Equals ``images.unfold`` and ``permute``, in one pass over memory; both edges must be whole numbers of patches.
    """
    batch, colors, height, width = images.shape
    if height % high or width % wide:
        raise ValueError(f"Images of {height}x{width} pixels cannot be cut into patches of {high}x{wide}.")
    result = images.new_empty(batch * (height // high) * (width // wide), colors * high * wide)
    columns = min(COLUMNS, triton.next_power_of_2(width))
    grid = (batch * (height // high), colors, triton.cdiv(width, columns))
    sizes = {"height": height, "width": width, "colors": colors, "high": high, "wide": wide}
    tiles = {"rows": triton.next_power_of_2(high), "columns": columns, "num_warps": WARPS}
    _patches[grid](images.contiguous(), result, **sizes, **tiles)
    return result
