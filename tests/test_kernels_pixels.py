"""The kernels that cut views out of stored pixels, and images into patches, against the plain way."""

import pytest
import torch
from torch import Tensor

from kernel_helpers import DEVICE
from probprompt import randomness
from probprompt.data.transforms import DRAWS, Boxes, Kernel, center_boxes, random_boxes, resample
from probprompt.errors import UserError

pytest.importorskip("triton")

from probprompt.kernels import pixels as kernels_pixels
from probprompt.kernels.pixels import crop, patches

KERNELS: tuple[Kernel, ...] = ("bilinear", "bicubic")
MEAN, STD = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.25, 1.0]).view(3, 1, 1)
RAGGED = torch.tensor([[9, 13], [21, 11], [24, 30]])


def paint(sizes: Tensor) -> list[Tensor]:
    """Noise, (H, W, 3) each: nothing that a wrong weight could hide in."""
    source = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (h, w, 3), generator=source, dtype=torch.uint8) for h, w in sizes.tolist()]


def cut(
    images: list[Tensor], boxes: Boxes, size: int, kernel: Kernel = "bilinear", dtype: torch.dtype = torch.float32
) -> Tensor:
    """By the kernel; the images lie in the reverse order, with bytes between them that belong to none."""
    gap = torch.full((7,), 255, dtype=torch.uint8)
    pieces = [part for image in reversed(images) for part in (gap, image.flatten())]
    lengths = torch.tensor([len(gap) + image.numel() for image in reversed(images)])
    offsets = (lengths.cumsum(0) - lengths + len(gap)).flip(0)
    sizes = torch.tensor([image.shape[:2] for image in images])
    there = Boxes(boxes.places.to(DEVICE), None if boxes.flip is None else boxes.flip.to(DEVICE))
    pixels, offsets, sizes = (part.to(DEVICE) for part in (torch.cat(pieces), offsets, sizes))
    return crop(pixels, offsets, sizes, there, size, MEAN.to(DEVICE), STD.to(DEVICE), kernel, dtype).cpu()


def expected(images: list[Tensor], boxes: Boxes, size: int, kernel: Kernel = "bilinear") -> Tensor:
    """The plain way."""
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    canvas = torch.zeros(len(images), 3, height, width, dtype=torch.uint8)
    for row, image in zip(canvas, images, strict=True):
        row[:, : image.shape[0], : image.shape[1]] = image.permute(2, 0, 1)
    return (resample(canvas, boxes, size, kernel) - MEAN) / STD


def drawn(sizes: Tensor, key: str, flip: bool = True) -> Boxes:
    return random_boxes(sizes, randomness.uniform((len(sizes), DRAWS), 0, key), (0.4, 1.0), flip=flip)


@pytest.mark.parametrize(
    ("size", "kernel"), [(8, "bilinear"), (8, "bicubic"), (18, "bilinear"), (18, "bicubic"), (34, "bilinear")]
)
def test_random_views_of_ragged_images(size: int, kernel: Kernel) -> None:
    """Down to 8, up and down to 18, up to 34, which is more than one block in both directions."""
    images, boxes = paint(RAGGED), drawn(RAGGED, "ragged")
    scale = boxes.places[:, 2:4]
    assert scale.min() < 9 and scale.max() > 19
    assert boxes.flip is not None and boxes.flip.any() and not boxes.flip.all()
    view = cut(images, boxes, size, kernel)
    assert view.shape == (3, 3, size, size)
    torch.testing.assert_close(view, expected(images, boxes, size, kernel), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_evaluation_views_begin_between_pixels(kernel: Kernel) -> None:
    images, boxes = paint(RAGGED), center_boxes(RAGGED, 16, 14)
    assert (boxes.places[:, 0] % 1 != 0).any()
    torch.testing.assert_close(cut(images, boxes, 14, kernel), expected(images, boxes, 14, kernel), rtol=0, atol=2e-5)


def test_some_are_flipped() -> None:
    sizes = RAGGED[:2]
    images, boxes = paint(sizes), drawn(sizes, "flips", flip=False)
    plain = cut(images, boxes, 12)
    flipped = cut(images, Boxes(boxes.places, torch.tensor([True, False])), 12)
    torch.testing.assert_close(flipped[0], plain[0].flip(-1), rtol=0, atol=2e-6)
    torch.testing.assert_close(flipped[1], plain[1], rtol=0, atol=0)


def test_no_grey_level_is_lost_in_large_images() -> None:
    """In float32 a position near 4000 is known to 1/4096 of a pixel: 1e-4 of the whole range in this image."""
    image = torch.zeros(3, 4000, 3, dtype=torch.uint8)
    image[:, ::2] = 255
    one = torch.tensor([1.0], dtype=torch.float64)
    boxes = Boxes.of((0 * one, 3981.3 * one, 3 * one, 14.4 * one), (0 * one, 3 * one, 0 * one, 4000 * one))
    torch.testing.assert_close(cut([image], boxes, 16), expected([image], boxes, 16), rtol=0, atol=1e-5)


def test_what_lies_outside_the_limits_is_never_seen() -> None:
    image = torch.full((12, 14, 3), 255, dtype=torch.uint8)
    image[3:8, 4:11] = 51
    top, left, height, width, bottom, right = torch.tensor([[3], [4], [5], [7], [8], [11]], dtype=torch.float64)
    boxes = Boxes.of((top, left, height, width), (top, bottom, left, right))
    for kernel in KERNELS:
        grey = ((0.2 - MEAN) / STD).expand(1, 3, 9, 9)
        torch.testing.assert_close(cut([image], boxes, 9, kernel), grey, rtol=0, atol=2e-6)


def test_bicubic_overshoot_is_cut_off_before_it_is_normalised() -> None:
    edge = torch.zeros(8, 8, 3, dtype=torch.uint8)
    edge[:, 4:] = 255
    view = cut([edge], center_boxes(torch.tensor([[8, 8]]), 20, 20), 20, "bicubic")
    assert view[0, 2].min() == (0 - MEAN[2]) / STD[2]
    torch.testing.assert_close(view[0, 2].max(), ((1 - MEAN[2]) / STD[2])[0, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "ulps"), [(torch.float16, 0), (torch.bfloat16, 1)])
def test_narrow_results(dtype: torch.dtype, ulps: int) -> None:
    """The interpreter cuts the digits off that bfloat16 has not; a GPU rounds."""
    images, boxes = paint(RAGGED[:1]), drawn(RAGGED[:1], "narrow")
    view, exact = cut(images, boxes, 8, dtype=dtype), cut(images, boxes, 8)
    assert view.dtype == dtype
    torch.testing.assert_close(view, exact.to(dtype), rtol=ulps * torch.finfo(dtype).eps, atol=0)


def test_what_is_given_must_fit() -> None:
    images, boxes = paint(RAGGED[:1]), drawn(RAGGED[:1], "errors")
    with pytest.raises(UserError, match="id you mean 'bicubic'"):
        cut(images, boxes, 8, "bicubical")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="uint8 pixels"):
        cut([images[0].int()], boxes, 8)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("size", "patch"), [((32, 32), (16, 16)), ((28, 42), (14, 14)), ((12, 40), (3, 8))])
def test_patches_are_those_of_a_permutation(
    size: tuple[int, int], patch: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_pixels, "COLUMNS", 16)  # several programs for a line
    images = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    (height, width), (high, wide) = size, patch
    grid = images.view(3, 3, height // high, high, width // wide, wide)
    expected = grid.permute(0, 2, 4, 1, 3, 5).reshape(-1, 3 * high * wide)
    assert torch.equal(patches(images, high, wide), expected)
    lying = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # the same images, colours last in memory
    assert torch.equal(patches(lying, high, wide), expected)


def test_a_part_of_a_patch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"30x32 pixels .* 16x16"):
        patches(torch.zeros(1, 3, 30, 32, device=DEVICE), 16, 16)
