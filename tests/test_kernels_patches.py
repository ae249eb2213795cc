"""The kernel that cuts images into patches against the plain way; without a GPU in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from probprompt.kernels import pixels
from probprompt.kernels.pixels import patches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("size", "patch"), [((32, 32), (16, 16)), ((28, 42), (14, 14)), ((12, 40), (3, 8))])
def test_patches_are_those_of_a_permutation(
    size: tuple[int, int], patch: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixels, "COLUMNS", 16)  # several programs for a line
    images = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    (height, width), (high, wide) = size, patch
    grid = images.view(3, 3, height // high, high, width // wide, wide)
    expected = grid.permute(0, 2, 4, 1, 3, 5).reshape(-1, 3 * high * wide)
    assert torch.equal(patches(images, high, wide), expected)
    lying = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # the same images, colours last in memory
    assert torch.equal(patches(lying, high, wide), expected)


def test_a_part_of_a_patch_is_refused() -> None:
    with pytest.raises(ValueError, match="30 x 32 pixels are no whole number of 16 x 16"):
        patches(torch.zeros(1, 3, 30, 32, device=DEVICE), 16, 16)
