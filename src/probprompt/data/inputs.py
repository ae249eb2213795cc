"""Images that users pass: folders, files, PIL images, arrays, mappings by class, torch datasets."""

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
"""Invisible characters of words (Persian, Hindi) and emoji (families, flags)."""
ALLOWED = "a path, a PIL image or an array of pixels"


@dataclass(frozen=True)
class LabeledImages:
    """Images with their classes; labels count within ``classes``."""

    classes: tuple[str, ...]
    images: ImageSet


@dataclass(frozen=True)
class InputImage:
    """An image with its name; it is decoded when it is read."""

    source: str
    read: Callable[[], Pixels]


def to_pixels(image: object, short_side: int | None = None) -> Pixels:
    """Decode one image of any allowed type to RGB (H, W, 3), its short side at most ``short_side`` pixels."""
    if isinstance(image, str | os.PathLike):
        path = Path(image)
        if path.is_dir():
            raise UnreadableImageError("is a folder, not an image")
        return read_image(path, short_side)
    if isinstance(image, Image.Image):
        try:
            return np.asarray(reduce_to(to_rgb(ImageOps.exif_transpose(image)), short_side))
        except (OSError, ValueError, SyntaxError) as problem:  # a file that is decoded only now
            raise UnreadableImageError(str(problem)) from None
    return np.asarray(reduce_to(Image.fromarray(_plain_array(image)), short_side))


def _plain_array(image: Any) -> Pixels:
    _check_kind(image)
    tensor = isinstance(image, torch.Tensor)
    image = found = image.detach().cpu().numpy() if tensor else image
    if found.ndim == 3 and (tensor or found.shape[2] not in (1, 3, 4)) and found.shape[0] in (1, 3, 4):
        found = found.transpose(1, 2, 0)  # tensors have their colours first
    if found.ndim == 2:
        found = found[:, :, None]
    if found.ndim != 3 or found.shape[2] not in (1, 3, 4) or 0 in found.shape:
        raise UnreadableImageError(f"an array of shape {image.shape} is no image: (H, W), (H, W, 3) or (3, H, W) is")
    if np.issubdtype(found.dtype, np.floating):
        if not np.isfinite(found).all() or found.min() < 0 or found.max() > 1:
            raise UnreadableImageError("an array of fractions must lie within [0, 1]: pass images before normalising")
        found = (255 * found).round().astype(np.uint8)
    elif found.dtype != np.uint8:
        raise UnreadableImageError(f"an array of {found.dtype} is no image: bytes or fractions within [0, 1] are")
    if found.shape[2] == 4:
        return np.asarray(to_rgb(Image.fromarray(np.ascontiguousarray(found), "RGBA")))
    return np.ascontiguousarray(np.broadcast_to(found, (*found.shape[:2], 3)))


def labeled(images: object, short_side: int | None) -> LabeledImages:
    """Read labeled images: a folder of class folders, lists by class name, or a dataset with ``classes``."""
    if isinstance(images, str | os.PathLike):
        return _class_folders(Path(images).expanduser(), short_side)
    if isinstance(images, Mapping):
        return _by_class(images, short_side)
    if hasattr(images, "__getitem__") and hasattr(images, "__len__") and not isinstance(images, Sequence | np.ndarray):
        return _dataset(images, short_side)
    raise UserError(
        f"images with classes must be a folder of class folders, lists by class name such as "
        f'{{"cat": ["a.jpg", ...]}}, or a torch dataset with classes, not {type(images).__name__}'
    )


def clean_name(name: object) -> str:
    """Normalize a class name: composed characters (NFC), no spaces around it."""
    if not isinstance(name, str):
        raise UserError(f"the name of a class must be text, not {name!r}")
    clean = unicodedata.normalize("NFC", name).strip()
    visible = clean.translate(_JOINING)
    if not visible:
        raise UserError(f"the name of a class must not be empty, got {name!r}")
    if not visible.isprintable():
        raise UserError(f"the name of a class must be printable on one line, got {clean!r}")
    return clean


def same_name(name: str) -> str:
    """Return a key that is equal for names that differ only in case or composition.

    >>> same_name("Caf\\u00e9") == same_name("cafe\\u0301")
    True
    """
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()).strip()


def _distinct(names: Iterable[object], where: str) -> tuple[str, ...]:
    """Normalize the names of classes; two equal ones are an error."""
    seen: dict[str, str] = {}
    for name in map(clean_name, names):
        key = same_name(name)
        if key in seen:
            raise UserError(f"{where} has two classes of one name, {seen[key]!r} and {name!r}: merge them")
        seen[key] = name
    return tuple(seen.values())


def _class_folders(root: Path, short_side: int | None) -> LabeledImages:
    if not root.is_dir():
        kind = "is a file" if root.exists() else "does not exist"
        raise UserError(f"{root} {kind}: give a folder with one folder of images per class")
    folders = [path.name for path in subfolders(root)]
    if not folders:
        hint = loose_images(root) or "put the images of each class into a folder there"
        raise UserError(f"{root} holds no class folder: {hint}")
    classes = _distinct(folders, str(root))
    found = listed_images(root, list_classes(root, folders), short_side)
    return LabeledImages(classes, ImageSet(found.names, found.labels, found.read))  # without files: never cached


def _by_class(groups: Mapping[Any, Any], short_side: int | None) -> LabeledImages:
    if not groups:
        raise UserError("no class was given: the mapping is empty")
    classes = _distinct(groups, "the mapping")
    names: list[str] = []
    labels: list[int] = []
    given: list[object] = []
    for label, (name, group) in enumerate(zip(classes, groups.values(), strict=True)):
        found = list(_members(group))
        if not found:
            raise UserError(f"the class {name!r} has no image: give it some, or leave it out")
        given += found
        labels += [label] * len(found)
        names += [_called(item, f"{name}/{index}") for index, item in enumerate(found)]
    return _set_of(classes, names, labels, given, short_side)


def _members(group: object) -> Iterator[object]:
    """Return the images of one class: a folder's files, a single image, or each of several."""
    if isinstance(group, str | os.PathLike):
        path = Path(group).expanduser()
        yield from sorted(walk(path)) if path.is_dir() else [path]
    elif isinstance(group, Image.Image):
        yield group
    elif isinstance(group, Iterable):
        yield from group
    else:
        raise UserError(f"the images of a class must be a list of them or a folder, not {type(group).__name__}")


def _dataset(dataset: Any, short_side: int | None) -> LabeledImages:
    """Read a dataset of (image, label) pairs; classes without images are omitted."""
    named = getattr(dataset, "classes", None)
    if named is None:
        named = getattr(getattr(dataset, "dataset", None), "classes", None)  # of a torch Subset
    if named is None:
        raise UserError(f"a {type(dataset).__name__} says nothing of its classes: give it an attribute classes")
    every = _distinct(named, "the dataset")
    pixels: list[object] = []
    labels: list[int] = []
    for index in range(len(dataset)):
        try:
            image, label = dataset[index]
            pixels.append(to_pixels(image, short_side))
            labels.append(range(len(every))[int(label)])
        except UnreadableImageError as problem:
            raise UserError(f"image {index} of the dataset cannot be used: {problem}") from None
        except (TypeError, ValueError, IndexError) as problem:
            raise UserError(f"item {index} of the dataset is no image with its label: {problem}") from None
    if not labels:
        raise UserError("the dataset is empty")
    present, places = np.unique(labels, return_inverse=True)
    classes = tuple(every[label] for label in present.tolist())
    return _set_of(classes, [f"item {index}" for index in range(len(labels))], places.tolist(), pixels, short_side)


def _set_of(
    classes: tuple[str, ...], names: Sequence[str], labels: Sequence[int], given: list[object], short_side: int | None
) -> LabeledImages:
    for item in given:
        _check_kind(item)
    images = ImageSet(tuple(names), np.array(labels, dtype=np.int64), lambda row: to_pixels(given[row], short_side))
    return LabeledImages(classes, images)


def _check_kind(item: object) -> None:
    if not isinstance(item, str | os.PathLike | Image.Image | np.ndarray | torch.Tensor):
        raise UserError(f"an image must be {ALLOWED}, not {type(item).__name__} ({item!r:.60})")


def _called(item: object, otherwise: str) -> str:
    """Return the file name of an image, if it has one."""
    if isinstance(item, str | os.PathLike):
        return os.fsdecode(item)
    named = getattr(item, "filename", "")
    return str(named) if isinstance(item, Image.Image) and named else otherwise


def pictures(images: object, short_side: int | None = None) -> Iterator[InputImage]:
    """Return images one by one: a file, a folder with all below it, one image, or any number of these.

    Nothing is listed ahead, so folders can have any size. A missing file is an unreadable image.
    """
    count = 0
    for item in _each(images):
        if isinstance(item, str | os.PathLike):
            path = Path(os.fsdecode(item)).expanduser()
            for file, closed in walk_on(path) if path.is_dir() else iter([(path, None)]):
                yield InputImage(str(file), partial(_read_or_say, file, short_side, closed))
                count += 1
        else:
            _check_kind(item)
            yield InputImage(_called(item, str(count)), partial(to_pixels, item, short_side))
            count += 1


def _read_or_say(file: Path, short_side: int | None, closed: str | None) -> Pixels:
    if closed is not None:
        raise UnreadableImageError(closed)
    return read_image(file, short_side)


def _each(images: object) -> Iterator[object]:
    if isinstance(images, str | os.PathLike | Image.Image):
        yield images
    elif isinstance(images, np.ndarray | torch.Tensor):
        yield from images if images.ndim == 4 else [images]
    elif isinstance(images, Iterable):
        yield from images
    else:
        raise UserError(f"images must be {ALLOWED}, a folder, or any number of these, not {type(images).__name__}")


def walk(folder: Path) -> Iterator[Path]:
    """List all image files below a folder, except hidden ones, in the order of the file system."""
    for path, closed in walk_on(folder):
        if closed is not None:
            raise UserError(closed)
        yield path


def walk_on(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """List files as :func:`walk` does; an unreadable folder is one of the paths, with the reason."""
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
        yield folder, f"the folder {folder} cannot be read: {problem.strerror}"
    for path in sorted(inside):
        yield from walk_on(Path(path))


def decode_ahead(items: Iterator[InputImage]) -> Iterator[tuple[InputImage, Pixels | UnreadableImageError]]:
    """Decode images on several threads in their order, a few ahead."""
    return read_ahead(lambda picture: picture.read(), items)


def unreadable(problems: Sequence[tuple[str, str]], limit: int = 20) -> list[str]:
    """Return a line per unreadable file with the reason; the rest are counted."""
    lines = [f"not read: {name}: {reason}" for name, reason in problems[:limit]]
    more = len(problems) - limit
    return [*lines, f"not read: {more} more"] if more > 0 else lines


def refuse_empty(classes: Sequence[str], left: Iterable[int], problems: Sequence[tuple[str, str]]) -> None:
    """No class may lose its last image."""
    empty = sorted(set(range(len(classes))) - set(left))
    if empty:
        shown = "\n".join(unreadable(problems, 10))
        raise UserError(
            f"no image of the class(es) {shorten(classes[label] for label in empty)} can be read:\n{shown}\n"
            "Repair or replace these files, or remove the class"
        )
