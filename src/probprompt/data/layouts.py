"""Layouts of datasets on disk, and how each becomes a training and a test set."""

import hashlib
import io
import math
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from probprompt.data.datasets import (
    SIDES,
    ImageData,
    ImageSet,
    class_folders,
    in_order,
    is_image,
    list_classes,
    listed_images,
    same_classes,
    stratified_split,
    subfolders,
)
from probprompt.data.images import Pixels, reduce_to
from probprompt.errors import UserError, one_line, shorten

Listed = Sequence[tuple[str, int]]
"""Images by their paths below a folder, each with its class."""
Rename = Callable[[Path, Sequence[str]], tuple[str, ...]]
"""Names of classes, by the dataset's folder and those of the classes."""

LARGEST = 2**30
"""Bytes that a pickle may have: CIFAR's are 155 MB."""
LONGEST = 10**7
"""Items that all lists of a pickle may have together: a small file can name a long list many times."""
_CODES = b".(NIJKMLTUXVSBC\x88\x89\x8a\x8c)t\x85\x86\x87]lae}qpr\x94ghjc\x93Rb\x80\x95"  # of protocols 0 to 4
_KEYS = {str, bytes, int}
_PLAIN = {type(None), str, bytes, int, bool}
_WNID = re.compile(r"n\d{8}")
_RENDERED = 200  # classes of ImageNet-R
_RENDITION = re.compile(r"[a-z]+_\d+\.jpe?g")  # its files, such as sketch_0.jpg


@dataclass(frozen=True)
class Layout:
    """A way to store a dataset."""

    form: str
    """Description for users."""
    fits: Callable[[Path], bool]
    """Return True for a folder that looks like it."""
    load: Callable[[Path, int | None], ImageData]
    telling: Callable[[Path], bool] = lambda _: False
    """Return True if a folder that looks like it can be nothing else."""


def assemble(root: Path, short_side: int | None, classes: Sequence[str], train: Listed, test: Listed) -> ImageData:
    """Make a training and a test set of one folder, whose images share one cache entry."""
    every, cut = listed_images(root, [*train, *test], short_side), len(train)
    return ImageData(tuple(classes), every.subset(range(cut)), every.subset(range(cut, len(every))))


def _side(root: Path) -> str | None:
    """Return the folder of test images: the first with the classes of ``train``, else the first with any."""
    sides = [side for side in ("train", *SIDES) if (root / side).is_dir()]
    found = {side: {path.name for path in subfolders(root / side)} for side in sides}
    classes = found.pop("train", set())
    same = [side for side in found if found[side] == classes]
    some = [side for side in found if len(found[side]) > 1]
    return next(iter(same + some), None) if len(classes) > 1 else None


def tree(rename: Rename) -> Layout:
    """``train/<class>/`` and ``test/<class>/``."""

    def load(root: Path, short_side: int | None) -> ImageData:
        side = _side(root) or "test"
        classes = same_classes(root / "train", root / side)
        train, test = (list_classes(root, classes, within) for within in ("train", side))
        return assemble(root, short_side, rename(root, classes), train, test)

    return Layout("train/<class>/ and test/<class>/ (or val/) with PNG or JPEG files", lambda r: bool(_side(r)), load)


def flat(form: str, purpose: str, rename: Rename) -> Layout:
    """One folder of class folders; a fifth of each class is held out."""

    def fits(root: Path) -> bool:
        first = subfolders(root)[:2]
        return len(first) == 2 and all(any(is_image(path, root) for path in folder.iterdir()) for folder in first)

    def load(root: Path, short_side: int | None) -> ImageData:
        folders = class_folders(root)
        names = rename(root, folders)
        listed = list_classes(root, folders)
        kept, held = stratified_split(np.array([label for _, label in listed]), 0.2, purpose, names)
        return assemble(root, short_side, names, [listed[i] for i in kept], [listed[i] for i in held])

    return Layout(form, fits, load)


def plain_names(root: Path, folders: Sequence[str]) -> tuple[str, ...]:
    """Return folder names with spaces for underscores.

    >>> plain_names(Path(), ["aquarium_fish"])
    ('aquarium fish',)
    """
    return _distinct([name.replace("_", " ") for name in folders], folders)


def numbered_names(root: Path, folders: Sequence[str]) -> tuple[str, ...]:
    """Return folder names without their leading number.

    >>> numbered_names(Path(), ["001.Black_footed_Albatross"])
    ('Black footed Albatross',)
    """
    return plain_names(root, [re.sub(r"^\d+\.", "", name) for name in folders])


def wordnet_names(root: Path, folders: Sequence[str]) -> tuple[str, ...]:
    """Return the words for WordNet's numbers, from ``words.txt`` or ``README.txt`` next to the images."""
    files = (folder / file for folder in (root, root.parent) for file in ("words.txt", "README.txt"))
    words = next(filter(None, map(_words, files)), {})
    return _distinct([words.get(name, name) for name in folders], folders)


def _words(path: Path) -> dict[str, str]:
    """Read lines such as ``n01443537 goldfish, Carassius auratus``; the first word counts."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = re.findall(rf"^({_WNID.pattern})\s+([^,\n]+)", text, flags=re.MULTILINE)
    return {number: word.strip().replace("_", " ") for number, word in lines}


def _distinct(names: Sequence[str], folders: Sequence[str]) -> tuple[str, ...]:
    """Add the folder to names that several classes have."""
    seen = Counter(names)
    return tuple(name if seen[name] == 1 else f"{name} ({folder})" for name, folder in zip(names, folders, strict=True))


def load_cifar(root: Path, short_side: int | None) -> ImageData:
    """Load the Python pickles of CIFAR-100, with the fine labels."""
    try:
        meta = _texts(read_pickle(root / "meta"))
        classes = plain_names(root, [_text(name) for name in meta["fine_label_names"]])
        train, test = (_cifar_side(root / side, classes, short_side) for side in ("train", "test"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise UserError(f"the files of {root} are no CIFAR-100 ({problem!r}): get them anew") from None
    return ImageData(classes, train, test)


def _cifar_side(path: Path, classes: Sequence[str], short_side: int | None) -> ImageSet:
    held = _texts(read_pickle(path))
    labels = np.array(held["fine_labels"], dtype=np.int64)
    pixels = held["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # (n, 32, 32, 3)
    if len(pixels) != len(labels) or len(labels) == 0 or not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError("labels that fit no image or class")
    files = [_text(name) for name in held["filenames"]]
    names = tuple(f"{path.name}/{classes[label]}/{file}" for label, file in zip(labels, files, strict=True))

    whole = short_side is None or short_side >= pixels.shape[1]

    def read(index: int) -> Pixels:
        image: Pixels = pixels[index]
        return image if whole else np.asarray(reduce_to(Image.fromarray(image), short_side))

    return ImageSet(names, labels, read, pixels=pixels if whole else None)


def _texts(held: Mapping[Any, Any]) -> dict[str, Any]:
    return {_text(key): value for key, value in held.items()}


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8")


CIFAR = Layout(
    "cifar-100-python/ with the pickles train, test and meta",
    lambda root: all((root / name).is_file() for name in ("train", "test", "meta")),
    load_cifar,
    telling=lambda _: True,
)


class _Bytes:
    """Stand-in for NumPy's type of numbers: bytes, the only type that is allowed."""

    def __init__(self, code: str | bytes, *_: int) -> None:
        if code not in ("u1", b"u1"):
            raise ValueError(f"its numbers are of type {code!r}, not bytes")

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order and alignment."""


class _Array:
    """Stand-in for a NumPy array: it holds nothing until its state is set."""

    content: NDArray[np.uint8] | None = None

    def __init__(self, *_: object) -> None:
        """Ignore the type, shape and code of the empty array."""

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Bytes, bool, bytes]) -> None:
        _, shape, kind, fortran, content = state
        if type(kind) is not _Bytes or type(content) is not bytes or math.prod(shape) != len(content):
            raise ValueError("an array's numbers do not fit its shape")
        self.content = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Latin1:
    """Stand-in for the function by which Python 3 writes bytes in protocols without bytes."""

    __slots__ = ()

    def __call__(self, text: str, codec: str) -> bytes:
        if codec != "latin1":
            raise ValueError("it asks for another codec than latin1")
        return text.encode("latin-1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): object(),
    ("numpy", "dtype"): _Bytes,
    ("_codecs", "encode"): _Latin1(),
}


def _fill(code: int, keys: slice) -> Callable[[Any], None]:
    """Return an instruction that fills a dictionary, with a check of its keys before they are hashed."""
    load = pickle._Unpickler.dispatch[code]

    def checked(reader: Any) -> None:
        if not set(map(type, reader.stack[keys])) <= _KEYS:
            raise pickle.UnpicklingError("a dictionary has a key that is no text and no number")
        load(reader)

    return checked


class _PlainUnpickler(pickle._Unpickler):
    """Unpickler for the instructions of plain data, in which a file can call nothing but the stand-ins above.

    It is Python's unpickler in Python. The one in C knows all instructions, reserves memory for the largest number of
    the memo, however large, and overflows the stack where it hashes a deeply nested tuple.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {code: pickle._Unpickler.dispatch[code] for code in _CODES}
    dispatch |= {code: _fill(code, slice(start, None, 2)) for code, start in zip(b"sud", (-2, 0, 0), strict=True)}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name."""
        if (module, name) not in _STAND_INS:
            newer = " of protocol 4 or lower" if name == "_frombuffer" else ""  # arrays in protocol 5
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no plain data{newer}")
        return _STAND_INS[module, name]


def read_pickle(path: Path) -> dict[str | bytes | int, Any]:
    """Read a dictionary of texts, numbers, lists of them and arrays of bytes, and run nothing of the file.

    Texts of Python 2 are returned as ``bytes``.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path} is larger than {LARGEST} bytes: this is no file of CIFAR's")
        data = path.read_bytes()
    except OSError as problem:
        raise UserError(f"{path} cannot be read: {problem.strerror or problem}") from None
    try:
        return _plain(_PlainUnpickler(io.BytesIO(data), encoding="bytes").load())
    except Exception as problem:  # noqa: BLE001 (a damaged pickle may raise anything)
        reason = f"it is damaged or holds more than plain data ({one_line(problem)})"
        raise UserError(f"{path} is refused: {reason}. Nothing of it was run; get the file anew") from None


def _plain(value: Any) -> dict[str | bytes | int, Any]:
    if type(value) is not dict:
        raise ValueError("it holds no dictionary")
    if sum(len(item) for item in value.values() if type(item) is list) > LONGEST:
        raise ValueError(f"it has lists of more than {LONGEST} items")
    return {key: _plain_item(item) for key, item in value.items()}


def _plain_item(value: Any) -> Any:
    if type(value) is _Array and value.content is not None:
        return value.content
    if not set(map(type, value if type(value) is list else [value])) <= _PLAIN:
        raise ValueError("it holds something that is no plain data")
    return value


def load_cub(root: Path, short_side: int | None) -> ImageData:
    """Load CUB-200 by its official lists, in the order and with the names of `train/` and `test/`."""
    paths, labels = _table(root / "images.txt"), _table(root / "image_class_labels.txt")
    training = _table(root / "train_test_split.txt")
    folders = _cub_folders(paths, labels, root)
    sides: dict[str, list[tuple[int, PurePosixPath]]] = {"1": [], "0": []}
    for number, path in paths.items():
        if training.get(number) not in sides:
            raise UserError(f"{root / 'train_test_split.txt'} says nothing of image {number}: get the lists anew")
        sides[training[number]].append((int(labels[number]) - 1, PurePosixPath(path)))
    train, test = ([(f"images/{path}", label) for label, path in sorted(side)] for side in sides.values())
    _refuse_missing(root, {root / "images.txt": [name for name, _ in train + test]})
    data = assemble(root, short_side, numbered_names(root, folders), train, test)
    return replace(data, train=_as_in("train", data.train), test=_as_in("test", data.test))


def _as_in(side: str, images: ImageSet) -> ImageSet:
    return replace(images, known_as=tuple(f"{side}/{name.partition('/')[2]}" for name in images.names))


def _cub_folders(paths: Mapping[str, str], labels: Mapping[str, str], root: Path) -> list[str]:
    folders: dict[str, str] = {}
    for number, path in paths.items():
        label, folder = labels.get(number, "none"), path.split("/")[0]
        if not label.isdecimal() or folders.setdefault(label, folder) != folder:
            raise UserError(f"{root / 'image_class_labels.txt'} gives image {number} the class {label}: get it anew")
    due = [str(label) for label in range(1, len(folders) + 1)]
    if set(folders) != set(due):
        raise UserError(f"{root / 'image_class_labels.txt'} leaves out classes: get it anew")
    return [folders[label] for label in due]


def _table(path: Path) -> dict[str, str]:
    """Read lines of a number and its value."""
    rows: dict[str, str] = {}
    for place, line in _lines(path):
        number, _, value = line.partition(" ")
        if not value.strip() or number in rows:
            raise UserError(f"{path}, line {place}: a number and a value are due, each number once, not {line!r}")
        rows[number] = value.strip()
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"the list {path} cannot be read: {problem}") from None
    for place, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield place, line.strip()


def _refuse_missing(root: Path, lists: Mapping[Path, Sequence[str]]) -> None:
    """Check that all listed files exist inside the folder."""
    there: set[str] = set()
    for folder, _, files in os.walk(root):
        within = Path(folder).relative_to(root).as_posix()
        there.update(file if within == "." else f"{within}/{file}" for file in files)
    messages = [
        f"{len(missing)} of {len(names)} images of {source} are not in {root}: {shorten(missing, 3)}"
        for source, names in lists.items()
        if (missing := [name for name in names if name not in there])
    ]
    if messages:
        raise UserError("; ".join(messages))


CUB = Layout(
    "CUB_200_2011/ with images/, images.txt, image_class_labels.txt and train_test_split.txt",
    lambda root: all((root / f"{name}.txt").is_file() for name in ("images", "train_test_split")),
    load_cub,
    telling=lambda _: True,
)


def find_lists(root: Path) -> tuple[Path, Path] | None:
    """Return the lists of training and test images."""
    folders = (root, root.parent, root / "splits", root.parent / "splits")
    for folder, name, ending in product(folders, ("imagenet-r_", ""), (".yaml", ".yml", ".txt")):
        train, test = (folder / f"{name}{side}{ending}" for side in ("train", "test"))
        if train.is_file() and test.is_file():
            return train, test
    return None


def read_list(path: Path) -> tuple[list[str], list[int] | None]:
    """Return images as ``class/file``, and the numbers of their classes if the list has them.

    A list is YAML of two lists, ``data`` and ``targets``, or text: a path per line, optionally with a number.
    """
    parts: dict[str, list[str]] = {"data": [], "targets": []}
    part = "data"
    for place, line in _lines(path):
        if line.startswith("#"):
            continue
        if line.rstrip(":") in parts and line.endswith(":"):
            part = line[:-1]
        elif path.suffix != ".txt" and line.startswith("- "):
            parts[part].append(line[2:].strip(" \"'"))
        elif path.suffix == ".txt":
            name, _, number = line.rpartition(" ") if line.rpartition(" ")[2].isdecimal() else (line, "", "")
            parts["data"].append(name.strip())
            parts["targets"] += [number] if number else []
        else:
            raise UserError(f"{path}, line {place}: a path or a number is due, not {line!r}")
    names, targets = ["/".join(name.split("/")[-2:]) for name in parts["data"]], parts["targets"]
    wrong = [name for name in names if "/" not in name or ".." in name.split("/") or name.startswith("/")]
    if wrong or not names:
        raise UserError(f"{path} must name images as class/file, not {shorten(wrong or ['nothing'], 3)}")
    if targets and (len(targets) != len(names) or not all(number.isdecimal() for number in targets)):
        raise UserError(f"{path} has {len(names)} images and {len(targets)} classes of them: get it anew")
    return names, [int(number) for number in targets] or None


def load_listed(root: Path, short_side: int | None) -> ImageData:
    """Load class folders split by two lists of files; the classes are in the order of their numbers."""
    lists = find_lists(root)
    if lists is None:
        raise UserError(f"{root} has no lists of training and test images: put them there, as train.txt and test.txt")
    (train, train_labels), (test, test_labels) = map(read_list, lists)
    twice = set(train) & set(test)
    if twice or len(set(train)) != len(train) or len(set(test)) != len(test):
        raise UserError(f"{lists[0]} and {lists[1]} name images twice: {shorten(sorted(twice) or ['in one list'], 3)}")
    if (train_labels is None) != (test_labels is None):
        with_, without = lists if train_labels else lists[::-1]
        raise UserError(
            f"{with_} gives its images the numbers of their classes, {without} does not: give them in both, or in "
            "neither for the order of the alphabet"
        )
    labels = train_labels + test_labels if train_labels and test_labels else None
    folders = _numbered_folders(train + test, labels, lists)
    _refuse_missing(root, {lists[0]: train, lists[1]: test})
    number = {folder: label for label, folder in enumerate(folders)}
    sides = ([(name, number[name.split("/")[0]]) for name in side] for side in (train, test))
    data = assemble(root, short_side, wordnet_names(root, folders), *sides)
    return replace(data, lists=tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in lists))


def _numbered_folders(names: Sequence[str], labels: Sequence[int] | None, lists: tuple[Path, Path]) -> list[str]:
    """Return the folder of each class in the order of the lists' numbers, or by name without numbers."""
    folders = [name.split("/")[0] for name in names]
    if labels is None:
        return in_order(set(folders))
    pairs, classes = sorted(set(zip(labels, folders, strict=True))), len(set(folders))
    if [label for label, _ in pairs] != list(range(classes)):
        raise UserError(f"{lists[0]} and {lists[1]} give a class two numbers, or leave out one of 0 to {classes - 1}")
    return [folder for _, folder in pairs]


def _wordnet_folders(root: Path) -> list[Path]:
    return [path for path in subfolders(root) if _WNID.fullmatch(path.name)]


def is_imagenet_r(root: Path) -> bool:
    """Return True for ImageNet-R, by its lists, or by the number of folders and the names of files."""
    folders = _wordnet_folders(root)
    if find_lists(root) is not None:
        return len(folders) <= _RENDERED
    near = abs(len(folders) - _RENDERED) <= _RENDERED // 20
    return near and all(any(_RENDITION.fullmatch(path.name) for path in folder.iterdir()) for folder in folders)


LISTED = Layout(
    "imagenet-r/ with 200 folders such as n01443537/, beside it imagenet-r_train.yaml and imagenet-r_test.yaml "
    "(or train.txt and test.txt of one's own)",
    lambda root: len(_wordnet_folders(root)) > 1,
    load_listed,
    telling=is_imagenet_r,
)


def load_tiny(root: Path, short_side: int | None) -> ImageData:
    """Load Tiny-ImageNet as published; validation images are the test set, since test/ has no labels."""
    folders, annotations = class_folders(root / "train"), root / "val" / "val_annotations.txt"
    number = {folder: label for label, folder in enumerate(folders)}
    test = []
    for place, line in _lines(annotations):
        file, *rest = line.split("\t")
        if not rest or rest[0] not in number or "/" in file:
            due = "a file and one of the classes of train/ are due"
            raise UserError(f"{annotations}, line {place}: {due}, not {line!r}")
        test.append((f"val/images/{file}", number[rest[0]]))
    _refuse_missing(root / "val", {annotations: [name.removeprefix("val/") for name, _ in test]})
    train = list_classes(root, folders, "train")
    return assemble(root, short_side, wordnet_names(root, folders), train, test)


TINY = Layout(
    "tiny-imagenet-200/ with train/<wnid>/images/ and val/ with images/ and val_annotations.txt",
    lambda root: (root / "val" / "val_annotations.txt").is_file() and (root / "train").is_dir(),
    load_tiny,
    telling=lambda _: True,
)
