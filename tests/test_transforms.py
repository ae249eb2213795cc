"""Views of images and their colors against torchvision's own operations on the same decisions."""

from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

from probprompt import randomness
from probprompt.data.image_store import ImageStore
from probprompt.data.transforms import (
    AUTOAUGMENT_DRAWS,
    DRAWS,
    IMAGENET_POLICY,
    JITTER_DRAWS,
    Augmentation,
    Interpolation,
    Kernel,
    after_crop,
    autoaugment,
    before_crop,
    center_boxes,
    draws_needed,
    jitter,
    random_boxes,
    resample,
)

# Views


KERNELS: tuple[Kernel, ...] = ("bilinear", "bicubic")
EDGES = ("top", "left", "height", "width")


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
        box = [int(edge) for edge in boxes.places[index, :4]]
        theirs = functional.resized_crop(image, *box, [size, size], mode, antialias=True)
        exact = functional.resized_crop(image.float(), *box, [size, size], mode, antialias=True).clamp(0, 255)
        if boxes.flip[index]:
            theirs, exact = functional.horizontal_flip(theirs), functional.horizontal_flip(exact)
        assert (ours[index] - theirs).abs().mean() < 1.0  # theirs is rounded, twice
        assert (ours[index] - exact).abs().max() < 0.01


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("height", "width"), [(40, 60), (200, 150), (64, 64), (300, 90)])
def test_evaluation_view_equals_resize_and_center_crop(height: int, width: int, kernel: Kernel) -> None:
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
    found = [v2.RandomResizedCrop(8).make_params([torch.empty(3, 100, 140)]) for _ in range(count)]
    theirs = torch.tensor([[box[name] for name in EDGES] for box in found]).double()
    ours = boxes.places[:, :4]
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 2.5).all()
    assert ((ours.std(0) - theirs.std(0)).abs() < 2.5).all()
    assert (ours[:, :2] + ours[:, 2:] <= torch.tensor([100, 140])).all()


def test_extreme_shapes_fall_back_to_the_largest_allowed_box() -> None:
    draws = torch.full((2, DRAWS), 0.999)
    boxes = random_boxes(torch.tensor([[10, 400], [400, 10]]), draws, scale=(1.0, 1.0))
    assert boxes.places[:, 2:4].tolist() == [[10, 13], [13, 10]]


def test_images_of_different_sizes_share_a_canvas() -> None:
    arrays = [np.full((20, 30, 3), 200, np.uint8), np.full((50, 10, 3), 100, np.uint8)]
    store = ImageStore.of(arrays, torch.device("cpu"))
    rows = torch.tensor([0, 1])
    views = resample(store.canvas(rows), center_boxes(store.sizes[rows], 16, 16), 16)
    assert torch.allclose(views[0], torch.tensor(200 / 255), atol=1e-6)
    assert torch.allclose(views[1], torch.tensor(100 / 255), atol=1e-6)


# Colors

ALWAYS, NEVER = 0.0, 0.999
OPERATIONS = [getattr(functional, f"adjust_{name}") for name in ("brightness", "contrast", "saturation", "hue")]
KINDS: tuple[Augmentation, ...] = ("crop", "crop+color", "autoaugment+crop", "crop+brightness")


def _images(count: int, height: int = 9, width: int = 12) -> Tensor:
    """Images in [0, 1] with gray, black, white and pure pixels among them."""
    images = randomness.uniform((count, 3, height, width), 3, "images")
    images[:, :, 0] = images[:, :1, 0]
    images[:, :, 1] = (images[:, :, 1] > 0.5).float()
    return images


def _levels(count: int, height: int, width: int, *key: int) -> Tensor:
    """Images of uint8 in which neighbours resemble one another, on part of the range."""
    coarse = randomness.uniform((count, 3, 4, 4), 4, "levels", *key)
    fine = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    noise = randomness.uniform((count, 3, height, width), 4, "noise", *key)
    return (30 + 200 * fine + 10 * noise).clamp(0, 255).to(torch.uint8)


def _jittered(image: Tensor, row: Tensor) -> Tensor:
    """EvoPrompt's colors of one image by torchvision: RandomApply([ColorJitter], 0.5), RandomGrayscale(0.2)."""
    whether, order, brightness, contrast, saturation, hue, gray = row.tolist()
    factors = [0.6 + 0.8 * brightness, 0.6 + 0.8 * contrast, 0.6 + 0.8 * saturation, -0.1 + 0.2 * hue]
    for number in list(permutations(range(4)))[int(24 * order)] if whether < 0.5 else ():
        image = OPERATIONS[number](image, factors[number])
    return functional.rgb_to_grayscale(image, 3) if gray < 0.2 else image


def test_jitter_equals_torchvisions_operations_image_by_image() -> None:
    images, draws = _images(200), randomness.uniform((200, JITTER_DRAWS), 0, "jitter")
    ours = jitter(images, draws)
    theirs = torch.stack([_jittered(image, row) for image, row in zip(images, draws, strict=True)])
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert ours.min() >= 0 and ours.max() <= 1 and ours.dtype == torch.float32


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("strength", [0.0, 0.3, NEVER])
def test_each_operation_equals_torchvisions(number: int, strength: float) -> None:
    images = _images(5)
    draws = torch.full((5, JITTER_DRAWS), 0.5)  # neutral factors
    draws[:, 0], draws[:, 6], draws[:, 2 + number] = ALWAYS, NEVER, strength
    factor = -0.1 + 0.2 * strength if number == 3 else 0.6 + 0.8 * strength
    before = images.clone()
    assert torch.allclose(jitter(images, draws), OPERATIONS[number](images, factor), atol=1e-5)
    assert torch.equal(images, before), "nothing is changed in place"


def test_jitter_has_all_orders() -> None:
    image = _images(1)
    draws = torch.full((24, JITTER_DRAWS), NEVER)
    draws[:, 0], draws[:, 1] = ALWAYS, (torch.arange(24) + 0.5) / 24
    ours = jitter(image.expand(24, -1, -1, -1), draws)
    factors = {f"{name}_factor": 1.3992 for name in ("brightness", "contrast", "saturation")} | {"hue_factor": 0.0998}
    transform = v2.ColorJitter(0.4, 0.4, 0.4, 0.1)
    for order in permutations(range(4)):
        theirs = transform.transform(image[0], {"fn_idx": torch.tensor(order), **factors})
        assert (ours - theirs).abs().amax(dim=(1, 2, 3)).min() < 1e-5
    assert torch.pdist(ours.flatten(1)).min() > 0  # so that 24 matches are 24 different orders


def test_jitter_is_distributed_as_torchvisions() -> None:
    count, image = 1000, _images(1, 3, 3)[0]
    ours = jitter(image.expand(count, -1, -1, -1), randomness.uniform((count, JITTER_DRAWS), 0, "distribution"))
    colors = v2.Compose([v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.5), v2.RandomGrayscale(p=0.2)])
    torch.manual_seed(0)
    theirs = torch.stack([colors(image) for _ in range(count)])
    for results in (ours, theirs):
        unchanged = (results == image).all(dim=3).all(dim=2).all(dim=1).double().mean()
        gray = (results == results[:, :1]).all(dim=3).all(dim=2).all(dim=1).double().mean()
        assert abs(unchanged - 0.5 * 0.8) < 0.05 and abs(gray - 0.2) < 0.04
    assert (ours.mean(0) - theirs.mean(0)).abs().max() < 0.03
    assert (ours.std(0) - theirs.std(0)).abs().max() < 0.03


def test_policy_is_the_published_one() -> None:
    theirs = transforms.AutoAugment(transforms.AutoAugmentPolicy.IMAGENET).policies
    published = [tuple((name.lower().removesuffix("x"), p, level or 0) for name, p, level in pair) for pair in theirs]
    assert list(IMAGENET_POLICY) == published


def _augmented(image: Tensor, row: Tensor, interpolation: Interpolation = "nearest") -> Tensor:
    """The whole of torchvision's AutoAugment on one image, with the decisions of a row of draws."""

    class Decided(transforms.AutoAugment):  # type: ignore[misc]
        @staticmethod
        def get_params(transform_num: int) -> tuple[int, Tensor, Tensor]:
            return int(transform_num * row[0]), row[1:3], (row[3:5] >= 0.5).int()

    result: Tensor = Decided(transforms.AutoAugmentPolicy.IMAGENET, InterpolationMode(interpolation))(image)
    return result


def _nearly(ours: Tensor, theirs: Tensor) -> bool:
    """Whether pixels are equal but for rounding, which can also carry a few of them over a threshold."""
    error = (ours.int() - theirs.int()).abs().double()
    return ours.shape == theirs.shape and bool(error.mean() < 0.5) and bool((error > 2).double().mean() < 0.005)


def _decisions() -> Tensor:
    """Every sub-policy with both operations and every pair of signs, then draws at large."""
    policies = (torch.arange(25) + 0.5) / 25
    signs = torch.tensor([[0.2, 0.2], [0.2, 0.8], [0.8, 0.2], [0.8, 0.8]])
    rows = [torch.cat([policy[None], torch.full((2,), 1e-6), pair]) for policy in policies for pair in signs]
    return torch.cat([torch.stack(rows), randomness.uniform((150, AUTOAUGMENT_DRAWS), 0, "autoaugment")])


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_autoaugment_equals_torchvisions_on_the_same_decisions(interpolation: Interpolation) -> None:
    draws = _decisions()
    images = _levels(len(draws), 24, 31)
    before = images.clone()
    ours = autoaugment(images, torch.tensor([[24, 31]]).expand(len(draws), 2), draws, interpolation)
    for image, row, result in zip(images, draws, ours, strict=True):
        assert _nearly(result, _augmented(image, row, interpolation))
    assert ours.dtype == torch.uint8 and torch.equal(images, before)


def test_a_probability_of_zero_is_never_and_of_one_is_always() -> None:
    impossible, certain = 12, 14  # (equalize 0.0, equalize 0.8) and (color 0.6, contrast 1.0)
    draws = torch.tensor([[(impossible + 0.5) / 25, 0, NEVER, 0, 0], [(certain + 0.5) / 25, NEVER, NEVER, 0, 0]])
    images = _levels(2, 24, 24)
    changed = autoaugment(images, torch.tensor([[24, 24], [24, 24]]), draws)
    assert torch.equal(changed[0], images[0]) and _nearly(changed[1], _augmented(images[1], draws[1]))
    assert not torch.equal(changed[1], images[1])


def test_autoaugment_decides_as_often_as_torchvisions() -> None:
    count, image = 600, _levels(1, 20, 20)[0]
    ours = autoaugment(
        image.expand(count, -1, -1, -1),
        torch.tensor([[20, 20]]).expand(count, 2),
        randomness.uniform((count, AUTOAUGMENT_DRAWS), 0, "frequencies"),
    )
    torch.manual_seed(0)
    policy = transforms.AutoAugment(transforms.AutoAugmentPolicy.IMAGENET)
    theirs = torch.stack([policy(image) for _ in range(count)])
    found = []
    for results in (ours, theirs):
        unchanged = (results == image).flatten(1).all(dim=1).double().mean()
        corner = (results[:, :, 0, 0] == 0).all(dim=1).double().mean()  # black after a turn to either side
        brightness = results.double().mean(dim=(1, 2, 3))
        found.append(torch.stack([unchanged, corner, brightness.mean() / 255, brightness.std() / 255]))
    assert (found[0] - found[1]).abs().max() < 0.06
    assert 0.05 < found[0][0] < 0.4 and found[0][1] > 0.05


def test_padding_is_neither_read_nor_written() -> None:
    draws = _decisions()[::3]
    sizes = torch.tensor([[24, 31], [40, 20], [17, 17], [40, 31]]).repeat(21, 1)  # (84, 2)
    images = [_levels(1, int(height), int(width), index)[0] for index, (height, width) in enumerate(sizes)]
    canvas = torch.full((len(draws), 3, 40, 31), 255, dtype=torch.uint8)
    real = torch.zeros_like(canvas, dtype=torch.bool)
    for index, image in enumerate(images):
        canvas[index, :, : image.shape[1], : image.shape[2]] = image
        real[index, :, : image.shape[1], : image.shape[2]] = True
    ours = autoaugment(canvas, sizes, draws)
    assert (ours[~real] == 255).all()
    for result, image, row in zip(ours, images, draws, strict=True):
        alone = result[:, : image.shape[1], : image.shape[2]]
        assert torch.equal(alone, autoaugment(image[None], torch.tensor([image.shape[1:]]), row[None])[0])
        assert _nearly(alone, _augmented(image, row))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_does_what_it_says_to_each_image_separately(kind: Augmentation) -> None:
    count = 40
    images, canvas = _images(count, 16, 16), _levels(count, 16, 16)
    sizes = torch.tensor([[16, 16]]).expand(count, 2)
    draws = randomness.uniform((count, draws_needed(kind)), 0, "mates")
    early, late = before_crop(canvas, sizes, draws, kind), after_crop(images, draws, kind)
    assert torch.equal(early, canvas) == (kind != "autoaugment+crop")
    assert torch.equal(late, images) == (kind not in ("crop+color", "crop+brightness"))
    if kind == "crop+brightness":
        factors = 1 + 63 / 255 * (2 * draws[:, 0] - 1)
        brighter = map(functional.adjust_brightness, images, factors.tolist())
        torch.testing.assert_close(late, torch.stack(list(brighter)))
    assert torch.equal(early, before_crop(canvas, sizes, draws, kind))
    assert torch.equal(late, after_crop(images, draws, kind))
    for rows in (torch.arange(count).flip(0), torch.tensor([7]), torch.arange(3, 20)):
        assert torch.equal(early[rows], before_crop(canvas[rows], sizes[rows], draws[rows], kind))
        assert (late[rows] - after_crop(images[rows], draws[rows], kind)).abs().max() < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_what_the_cpu_gives(kind: Augmentation) -> None:
    images, canvas, sizes = _images(60, 32, 32), _levels(60, 32, 32), torch.tensor([[32, 32]]).expand(60, 2)
    draws = randomness.uniform((60, draws_needed(kind)), 0, "gpu")
    early, late = before_crop(canvas, sizes, draws, kind), after_crop(images, draws, kind)
    canvas, sizes, images = canvas.cuda(), sizes.cuda(), images.cuda()
    for numbers in (draws, draws.cuda()):
        theirs = before_crop(canvas, sizes, numbers, kind)
        assert theirs.is_cuda and (theirs.cpu() != early).double().mean() < 0.01  # ties of the nearest pixel
        assert (after_crop(images, numbers, kind).cpu() - late).abs().max() < 1e-5
