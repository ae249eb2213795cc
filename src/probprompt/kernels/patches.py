"""Images cut into patches that lie one after another, as the product with the patch embedding reads them."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 256, 4
"""Pixels of a line that a program takes at most, and its warps."""


@triton.jit
def _patches(
    images: tl.tensor,
    result: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    colours: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """One colour of a row of patches: a band of ``high`` lines."""
    band, colour = tl.program_id(0).to(tl.int64), tl.program_id(1)
    down = tl.arange(0, rows)  # lines of the band
    across = tl.program_id(2) * columns + tl.arange(0, columns)
    known = (down[:, None] < high) & (across[None, :] < width)
    image, line = band // (height // high), (band % (height // high)) * high
    source = images + (image * colours + colour) * height * width + (line + down)[:, None] * width + across[None, :]
    patch = band * (width // wide) + across // wide  # (columns,)
    place = patch[None, :] * (colours * high * wide) + colour * high * wide + down[:, None] * wide + across % wide
    tl.store(result + place, tl.load(source, mask=known), mask=known)


def patches(images: Tensor, high: int, wide: int) -> Tensor:
    """Cut images (B, C, H, W) into patches of (high, wide): (B H/high W/wide, C high wide).

    What ``images.unfold`` and ``permute`` say, in one pass over memory; both sides must be whole numbers of patches.
    """
    batch, colours, height, width = images.shape
    if height % high or width % wide:
        raise ValueError(f"images of {height} x {width} pixels are no whole number of {high} x {wide} patches")
    result = images.new_empty(batch * (height // high) * (width // wide), colours * high * wide)
    columns = min(COLUMNS, triton.next_power_of_2(width))
    grid = (batch * (height // high), colours, triton.cdiv(width, columns))
    sizes = {"height": height, "width": width, "colours": colours, "high": high, "wide": wide}
    tiles = {"rows": triton.next_power_of_2(high), "columns": columns, "num_warps": WARPS}
    _patches[grid](images.contiguous(), result, **sizes, **tiles)
    return result
