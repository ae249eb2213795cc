"""Images on the device: decoded once, before training starts, and held there as uint8."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from probprompt.data.benchmarks import ImageSet
from probprompt.data.colour import Augmentation, after_crop, before_crop
from probprompt.data.images import Pixels, UnreadableImageError
from probprompt.data.views import Boxes, Kernel, centre_boxes, resample
from probprompt.errors import UserError

Advance = Callable[[int], None]
DECODERS = 8  # threads that decode images


def enlarged(size: int) -> int:
    """The short side from which an input of this size is cut: 256 for 224.

    >>> enlarged(224)
    256
    """
    return round(size * 256 / 224)


@dataclass(frozen=True)
class ImageStore:
    """Decoded images: one (n, 3, H, W) tensor where all have one size, else a tensor each."""

    images: Tensor | tuple[Tensor, ...]
    sizes: Tensor  # (n, 2): height and width

    @classmethod
    def of(cls, arrays: Sequence[Pixels], device: torch.device) -> Self:
        """Move decoded images (H, W, 3) to the device."""
        sizes = torch.tensor([array.shape[:2] for array in arrays], device=device).view(-1, 2)
        planes = [torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1))) for array in arrays]
        if len({plane.shape for plane in planes}) == 1:
            return cls(torch.stack(planes).to(device), sizes)
        return cls(tuple(plane.to(device) for plane in planes), sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def canvas(self, indices: Tensor) -> Tensor:
        """The images (B, 3, H, W); smaller ones stand in the top left corner, the rest is never looked at."""
        if isinstance(self.images, Tensor):
            return self.images[indices]
        chosen = [self.images[index] for index in indices.tolist()]
        height, width = (max(image.shape[axis] for image in chosen) for axis in (1, 2))
        canvas = torch.zeros(len(chosen), 3, height, width, dtype=torch.uint8, device=self.sizes.device)
        for row, image in zip(canvas, chosen, strict=True):
            row[:, : image.shape[1], : image.shape[2]] = image
        return canvas


@dataclass(frozen=True)
class RandomViews:
    """How training looks at images: a box each, and what happens to their colours."""

    boxes: Boxes
    augmentation: Augmentation = "crop"
    draws: Tensor | None = None  # (B, draws of the augmentation)

    def __getitem__(self, rows: Tensor) -> "RandomViews":
        """The views of some of the images."""
        return RandomViews(self.boxes[rows], self.augmentation, None if self.draws is None else self.draws[rows])


@dataclass(frozen=True)
class Viewer:
    """Turns stored images into what the backbone is fed."""

    size: int
    resized: int
    mean: Tensor  # (3, 1, 1)
    std: Tensor  # (3, 1, 1)
    kernel: Kernel = "bilinear"
    """How evaluation views are resized."""

    @classmethod
    def of(
        cls, size: int, resized: int, mean: Sequence[float], std: Sequence[float], kernel: Kernel, device: torch.device
    ) -> Self:
        """A viewer that normalises by the mean and spread of each colour."""
        centre, spread = (torch.tensor(values, device=device).view(3, 1, 1) for values in (mean, std))
        return cls(size, resized, centre, spread, kernel)

    def evaluation(self, store: ImageStore, indices: Tensor) -> Tensor:
        """The evaluation view of images (B, 3, size, size), normalised."""
        boxes = centre_boxes(store.sizes[indices], self.resized, self.size)
        return self._normalise(resample(store.canvas(indices), boxes, self.size, self.kernel))

    def random(self, store: ImageStore, indices: Tensor, views: RandomViews) -> Tensor:
        """Given views of images (B, 3, size, size), normalised."""
        canvas = store.canvas(indices)
        if views.draws is not None:
            canvas = before_crop(canvas, store.sizes[indices], views.draws, views.augmentation)
        images = resample(canvas, views.boxes, self.size)
        if views.draws is not None:
            images = after_crop(images, views.draws, views.augmentation)
        return self._normalise(images)

    def _normalise(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


@dataclass(frozen=True)
class Loaded:
    """A set in memory: what was read, and what was not."""

    store: ImageStore
    labels: Tensor  # (n,)
    names: tuple[str, ...]
    unreadable: tuple[tuple[str, str], ...] = ()


def load(images: ImageSet, device: torch.device, advance: Advance, workers: int = DECODERS) -> Loaded:
    """Decode a set, all of it; files that cannot be read are left out and named."""

    def decode(index: int) -> Pixels | str:
        try:
            return images.read(index)
        except UnreadableImageError as problem:
            return str(problem)
        finally:
            advance(1)

    with ThreadPoolExecutor(workers) as pool:
        decoded = list(pool.map(decode, range(len(images))))
    kept = [index for index, pixels in enumerate(decoded) if not isinstance(pixels, str)]
    failed = tuple((images.names[i], pixels) for i, pixels in enumerate(decoded) if isinstance(pixels, str))
    return Loaded(
        store=ImageStore.of([pixels for pixels in decoded if not isinstance(pixels, str)], device),
        labels=torch.from_numpy(images.labels[kept]).to(device),
        names=tuple(images.names[index] for index in kept),
        unreadable=failed,
    )


def refuse_unreadable(sets: Sequence[Loaded], class_names: Sequence[str], skip: bool) -> list[str]:
    """Stop on unreadable files, or, when they may be skipped, list them; no class may lose its last image."""
    unreadable = [(name, reason) for loaded in sets for name, reason in loaded.unreadable]
    if unreadable and not skip:
        shown = "\n".join(f"  {name}: {reason}" for name, reason in unreadable[:10])
        more = f"\n  and {len(unreadable) - 10} more" if len(unreadable) > 10 else ""
        raise UserError(
            f"{len(unreadable)} image file(s) cannot be read:\n{shown}{more}\n"
            "Repair or remove them, or go on without them with --skip-unreadable."
        )
    for loaded in sets if unreadable else ():
        empty = set(range(len(class_names))) - set(loaded.labels.tolist())
        if empty:
            raise UserError(f"without its unreadable files the class {class_names[min(empty)]!r} has no image left")
    return [name for name, _ in unreadable]
