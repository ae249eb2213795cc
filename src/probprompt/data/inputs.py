"""Images that users pass: folders, files, PIL images, arrays, mappings, torch datasets."""

import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from probprompt.data.datasets import ImageSet, is_hidden, list_classes, listed_images, loose_images, subfolders
from probprompt.data.images import SUFFIXES, Pixels, UnreadableImageError, read_ahead, read_image, reduce_to, to_rgb
from probprompt.errors import UserError, shorten

_JOINING = dict.fromkeys([0x200C, 0x200D, *range(0xE0020, 0xE0080)])
"""Invisible characters in words (Persian, Hindi) and emoji (families, flags)."""
ALLOWED = "a path, a PIL image or an array of pixels"


@dataclass(frozen=True)
class LabeledImages:
    """Images with labels that index ``classes``."""

    classes: tuple[str, ...]
    images: ImageSet


@dataclass(frozen=True)
class InputImage:
    """An image with its name, decoded when read."""

    source: str
    read: Callable[[], Pixels]


def to_pixels(image: object, short_side: int | None = None) -> Pixels:
    """Decode an image to RGB `(H, W, 3)` with a short side of at most ``short_side`` pixels."""
    if isinstance(image, str | os.PathLike):
        path = Path(image)
        if path.is_dir():
            raise UnreadableImageError("is a folder, not an image")
        return read_image(path, short_side)
    if isinstance(image, Image.Image):
        try:
            return np.asarray(reduce_to(to_rgb(ImageOps.exif_transpose(image)), short_side))
        except (OSError, ValueError, SyntaxError) as problem:  # from a lazily opened file
            raise UnreadableImageError(str(problem)) from None
    return np.asarray(reduce_to(Image.fromarray(_plain_array(image)), short_side))


def _plain_array(image: Any) -> Pixels:
    _check_kind(image)
    tensor = isinstance(image, torch.Tensor)
    image = pixels = image.detach().cpu().numpy() if tensor else image
    if pixels.ndim == 3 and (tensor or pixels.shape[2] not in (1, 3, 4)) and pixels.shape[0] in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)  # channels first, as in torch
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or 0 in pixels.shape:
        raise UnreadableImageError(f"expected an array (H, W), (H, W, 3) or (3, H, W), got shape {image.shape}")
    if np.issubdtype(pixels.dtype, np.floating):
        if not np.isfinite(pixels).all() or pixels.min() < 0 or pixels.max() > 1:
            raise UnreadableImageError("float pixels must be within [0, 1]; pass images before normalization")
        pixels = (255 * pixels).round().astype(np.uint8)
    elif pixels.dtype != np.uint8:
        raise UnreadableImageError(f"expected an array of uint8 or of floats within [0, 1], got {pixels.dtype}")
    if pixels.shape[2] == 4:
        return np.asarray(to_rgb(Image.fromarray(np.ascontiguousarray(pixels), "RGBA")))
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def labeled(images: object, short_side: int | None) -> LabeledImages:
    """Read a folder of class folders, lists by class name, or a dataset with ``classes``."""
    if isinstance(images, str | os.PathLike):
        return _class_folders(Path(images).expanduser(), short_side)
    if isinstance(images, Mapping):
        return _by_class(images, short_side)
    if hasattr(images, "__getitem__") and hasattr(images, "__len__") and not isinstance(images, Sequence | np.ndarray):
        return _dataset(images, short_side)
    raise UserError(
        'Labeled images must be a folder of class folders, lists by class name such as {"cat": ["a.jpg", ...]}, or a '
        f"torch dataset with classes, got {type(images).__name__}."
    )


def clean_name(name: object) -> str:
    """Normalize a class name: composed characters (NFC), no spaces around it."""
    if not isinstance(name, str):
        raise UserError(f"A class name must be a string, got {name!r}.")
    clean = unicodedata.normalize("NFC", name).strip()
    visible = clean.translate(_JOINING)
    if not visible or not visible.isprintable():
        raise UserError(f"A class name must have visible characters on one line, got {clean!r}. Rename the class.")
    return clean


def same_name(name: str) -> str:
    """Return a key that ignores case and Unicode composition.

    >>> same_name("Caf\\u00e9") == same_name("cafe\\u0301")
    True
    """
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()).strip()


def _distinct(names: Iterable[object], where: str) -> tuple[str, ...]:
    seen: dict[str, str] = {}
    for name in map(clean_name, names):
        key = same_name(name)
        if key in seen:
            raise UserError(f"{where} has the class {name!r} twice (as {seen[key]!r}). Merge them.")
        seen[key] = name
    return tuple(seen.values())


def _class_folders(root: Path, short_side: int | None) -> LabeledImages:
    if not root.is_dir():
        kind = "is a file" if root.exists() else "does not exist"
        raise UserError(f"{root} {kind}. Pass a folder with one folder of images per class.")
    folders = [path.name for path in subfolders(root)]
    if not folders:
        hint = loose_images(root) or "Put the images of each class into a folder there."
        raise UserError(f"{root} contains no class folder. {hint}")
    classes = _distinct(folders, str(root))
    images = listed_images(root, list_classes(root, folders), short_side)
    return LabeledImages(classes, ImageSet(images.names, images.labels, images.read))  # without files: never cached


def _by_class(groups: Mapping[Any, Any], short_side: int | None) -> LabeledImages:
    if not groups:
        raise UserError("The mapping of images is empty. Pass at least one class.")
    classes = _distinct(groups, "The mapping")
    names: list[str] = []
    labels: list[int] = []
    items: list[object] = []
    for label, (name, group) in enumerate(zip(classes, groups.values(), strict=True)):
        members = list(_members(group))
        if not members:
            raise UserError(f"Class {name!r} has no image. Add images or remove the class.")
        items += members
        labels += [label] * len(members)
        names += [_file_name(item, f"{name}/{index}") for index, item in enumerate(members)]
    return _set_of(classes, names, labels, items, short_side)


def _members(group: object) -> Iterator[object]:
    if isinstance(group, str | os.PathLike):
        path = Path(group).expanduser()
        yield from sorted(walk(path)) if path.is_dir() else [path]
    elif isinstance(group, Image.Image):
        yield group
    elif isinstance(group, Iterable):
        yield from group
    else:
        raise UserError(f"The images of a class must be a list or a folder, got {type(group).__name__}.")


def _dataset(dataset: Any, short_side: int | None) -> LabeledImages:
    """Read a dataset of (image, label) pairs; omit classes without images."""
    names = getattr(dataset, "classes", None)
    if names is None:
        names = getattr(getattr(dataset, "dataset", None), "classes", None)  # of a torch Subset
    if names is None:
        raise UserError(f"{type(dataset).__name__} has no attribute 'classes'. Set it to the list of class names.")
    every = _distinct(names, "The dataset")
    pixels: list[object] = []
    labels: list[int] = []
    for index in range(len(dataset)):
        try:
            image, label = dataset[index]
            pixels.append(to_pixels(image, short_side))
            labels.append(range(len(every))[int(label)])
        except UnreadableImageError as problem:
            raise UserError(f"Image {index} of the dataset is not usable: {problem}.") from None
        except (TypeError, ValueError, IndexError) as problem:
            raise UserError(f"Item {index} of the dataset is not an (image, label) pair: {problem}.") from None
    if not labels:
        raise UserError("The dataset is empty. Pass a dataset with images.")
    present, places = np.unique(labels, return_inverse=True)
    classes = tuple(every[label] for label in present.tolist())
    return _set_of(classes, [f"item {index}" for index in range(len(labels))], places.tolist(), pixels, short_side)


def _set_of(
    classes: tuple[str, ...], names: Sequence[str], labels: Sequence[int], items: list[object], short_side: int | None
) -> LabeledImages:
    for item in items:
        _check_kind(item)
    images = ImageSet(tuple(names), np.array(labels, dtype=np.int64), lambda row: to_pixels(items[row], short_side))
    return LabeledImages(classes, images)


def _check_kind(item: object) -> None:
    if not isinstance(item, str | os.PathLike | Image.Image | np.ndarray | torch.Tensor):
        raise UserError(f"An image must be {ALLOWED}, got {type(item).__name__} ({item!r:.60}).")


def _file_name(item: object, default: str) -> str:
    if isinstance(item, str | os.PathLike):
        return os.fsdecode(item)
    name = getattr(item, "filename", "")
    return str(name) if isinstance(item, Image.Image) and name else default


def input_images(images: object, short_side: int | None = None) -> Iterator[InputImage]:
    """Yield images of a file, a folder with its subfolders, an image, or several of these.

    Folders of any size are listed lazily. A missing file is an unreadable image.
    """
    count = 0
    for item in _each(images):
        if isinstance(item, str | os.PathLike):
            path = Path(os.fsdecode(item)).expanduser()
            for file, problem in walk_on(path) if path.is_dir() else iter([(path, None)]):
                yield InputImage(str(file), partial(_read_listed, file, short_side, problem))
                count += 1
        else:
            _check_kind(item)
            yield InputImage(_file_name(item, str(count)), partial(to_pixels, item, short_side))
            count += 1


def _read_listed(file: Path, short_side: int | None, problem: str | None) -> Pixels:
    if problem is not None:
        raise UnreadableImageError(problem)
    return read_image(file, short_side)


def _each(images: object) -> Iterator[object]:
    if isinstance(images, str | os.PathLike | Image.Image):
        yield images
    elif isinstance(images, np.ndarray | torch.Tensor):
        yield from images if images.ndim == 4 else [images]
    elif isinstance(images, Iterable):
        yield from images
    else:
        raise UserError(f"Images must be {ALLOWED}, a folder, or a list of these, got {type(images).__name__}.")


def walk(folder: Path) -> Iterator[Path]:
    """Yield all visible image files below a folder, in the order of the file system."""
    for path, problem in walk_on(folder):
        if problem is not None:
            raise UserError(f"{problem[0].upper()}{problem[1:]}.")
        yield path


def walk_on(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield files as :func:`walk` does, and unreadable folders with the reason."""
    inside: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    inside.append(entry.path)
                elif Path(entry.name).suffix.lower() in SUFFIXES and entry.is_file():
                    yield Path(entry.path), None
    except OSError as problem:
        yield folder, f"cannot read folder {folder}: {problem.strerror}"
    for path in sorted(inside):
        yield from walk_on(Path(path))


def decode_ahead(items: Iterator[InputImage]) -> Iterator[tuple[InputImage, Pixels | UnreadableImageError]]:
    """Decode images in order on several threads."""
    return read_ahead(lambda image: image.read(), items)


def unreadable(problems: Sequence[tuple[str, str]], limit: int = 20) -> list[str]:
    """Return a line with the reason per unreadable file, and the number of further ones."""
    lines = [f"Skipped {name}: {reason}" for name, reason in problems[:limit]]
    more = len(problems) - limit
    return [*lines, f"Skipped {more} more unreadable images"] if more > 0 else lines


def check_not_empty(classes: Sequence[str], left: Iterable[int], problems: Sequence[tuple[str, str]]) -> None:
    """Raise UserError if a class has no readable image left."""
    empty = sorted(set(range(len(classes))) - set(left))
    if empty:
        names, lines = shorten(classes[label] for label in empty), "\n".join(unreadable(problems, 10))
        raise UserError(f"No readable image in class(es) {names}.\n{lines}\nRepair these files, or remove the class.")
