"""Views on the device against torchvision's own."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode, functional

from probprompt import randomness
from probprompt.data.image_store import ImageStore
from probprompt.data.transforms import DRAWS, Kernel, center_boxes, random_boxes, resample

KERNELS: tuple[Kernel, ...] = ("bilinear", "bicubic")


def _image(height: int, width: int) -> torch.Tensor:
    coarse = torch.from_numpy(np.random.RandomState(1).randint(0, 256, (3, height // 4 + 1, width // 4 + 1)))
    fine = coarse.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :height, :width]
    return fine.to(torch.uint8)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("height", "width", "size"), [(40, 60, 96), (200, 150, 64), (32, 32, 32), (90, 300, 48)])
def test_random_crops_equal_torchvisions_on_the_same_boxes(height: int, width: int, size: int, kernel: Kernel) -> None:
    image, mode = _image(height, width), InterpolationMode(kernel)
    sizes = torch.tensor([[height, width]]).expand(8, 2)
    boxes = random_boxes(sizes, randomness.uniform((8, DRAWS), 0, "test", height))
    ours = resample(image.expand(8, -1, -1, -1), boxes, size, kernel) * 255
    assert boxes.flip is not None
    for index in range(8):
        box = [int(getattr(boxes, name)[index]) for name in ("top", "left", "height", "width")]
        theirs = functional.resized_crop(image, *box, [size, size], mode, antialias=True)
        exact = functional.resized_crop(image.float(), *box, [size, size], mode, antialias=True).clamp(0, 255)
        if boxes.flip[index]:
            theirs, exact = functional.horizontal_flip(theirs), functional.horizontal_flip(exact)
        assert (ours[index] - theirs).abs().mean() < 1.0  # theirs is rounded, twice
        assert (ours[index] - exact).abs().max() < 0.01


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("height", "width"), [(40, 60), (200, 150), (64, 64), (300, 90)])
def test_evaluation_view_equals_resize_and_centre_crop(height: int, width: int, kernel: Kernel) -> None:
    image, mode = _image(height, width), InterpolationMode(kernel)
    for resized, size in ((37, 32), (32, 32), (73, 64)):
        boxes = center_boxes(torch.tensor([[height, width]]), resized, size)
        ours = resample(image[None], boxes, size, kernel)[0] * 255
        view = v2.Compose([v2.Resize(resized, mode, antialias=True), v2.CenterCrop(size)])
        assert (ours - view(image)).abs().mean() < 1.0
        assert (ours - view(image.float()).clamp(0, 255)).abs().max() < 0.01


def test_bicubic_overshoot_is_cut_off() -> None:
    edge = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    edge[..., 4:] = 255
    boxes = center_boxes(torch.tensor([[8, 8]]), 64, 64)
    view = resample(edge, boxes, 64, "bicubic")
    assert view.min() == 0 and view.max() == 1
    assert (view[..., 16:48] != resample(edge, boxes, 64)[..., 16:48]).any()


def test_boxes_are_distributed_as_torchvisions() -> None:
    count = 4000
    boxes = random_boxes(torch.tensor([[100, 140]]).expand(count, 2), randomness.uniform((count, DRAWS), 0, "boxes"))
    torch.manual_seed(0)
    theirs = torch.tensor([_torchvision_box() for _ in range(count)]).double()
    ours = torch.stack([boxes.top, boxes.left, boxes.height, boxes.width], dim=1)
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 2.5).all()
    assert ((ours.std(0) - theirs.std(0)).abs() < 2.5).all()
    assert (boxes.top + boxes.height <= 100).all() and (boxes.left + boxes.width <= 140).all()


def _torchvision_box() -> list[int]:
    crop = v2.RandomResizedCrop(8)
    parameters = crop.make_params([torch.empty(3, 100, 140)])
    return [parameters[name] for name in ("top", "left", "height", "width")]


def test_extreme_shapes_fall_back_to_the_largest_allowed_box() -> None:
    draws = torch.full((2, DRAWS), 0.999)
    boxes = random_boxes(torch.tensor([[10, 400], [400, 10]]), draws, scale=(1.0, 1.0))
    assert boxes.height.tolist() == [10, 13] and boxes.width.tolist() == [13, 10]


def test_images_of_different_sizes_share_a_canvas() -> None:
    arrays = [np.full((20, 30, 3), 200, np.uint8), np.full((50, 10, 3), 100, np.uint8)]
    store = ImageStore.of(arrays, torch.device("cpu"))
    rows = torch.tensor([0, 1])
    views = resample(store.canvas(rows), center_boxes(store.sizes[rows], 16, 16), 16)
    assert torch.allclose(views[0], torch.tensor(200 / 255), atol=1e-6)
    assert torch.allclose(views[1], torch.tensor(100 / 255), atol=1e-6)
