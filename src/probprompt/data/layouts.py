"""Layouts of datasets on disk, each read as a training and a test set."""

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
    TEST_SPLITS,
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

Listed = Sequence[tuple[str, int]]  # images by relative path, with labels
Rename = Callable[[Path, Sequence[str]], tuple[str, ...]]
"""Function of the dataset's folder and its class folders that returns class names."""

LARGEST = 2**30  # largest size of a pickle in bytes; CIFAR's are 155 MB
LONGEST = 10**7  # largest number of items in all lists of a pickle; small files can repeat long lists
_CODES = b".(NIJKMLTUXVSBC\x88\x89\x8a\x8c)t\x85\x86\x87]lae}qpr\x94ghjc\x93Rb\x80\x95"  # of protocols 0 to 4
_KEYS = {str, bytes, int}
_PLAIN = {type(None), str, bytes, int, bool}
_WNID = re.compile(r"n\d{8}")
_RENDERED = 200  # classes of ImageNet-R
_RENDITION = re.compile(r"[a-z]+_\d+\.jpe?g")  # its files, such as sketch_0.jpg


@dataclass(frozen=True)
class Layout:
    """A way to store a dataset."""

    form: str  # description for users
    fits: Callable[[Path], bool]  # predicate for folders that may have this layout
    load: Callable[[Path, int | None], ImageData]
    is_unique: Callable[[Path], bool] = lambda _: False  # predicate for fitting folders that can be no other dataset


def assemble(root: Path, short_side: int | None, classes: Sequence[str], train: Listed, test: Listed) -> ImageData:
    """Return a training and a test set of one folder, sharing one cache entry."""
    images, count = listed_images(root, [*train, *test], short_side), len(train)
    return ImageData(tuple(classes), images.subset(range(count)), images.subset(range(count, len(images))))


def _test_folder(root: Path) -> str | None:
    """Return the first test folder with the classes of ``train``, else the first with any."""
    splits = [name for name in ("train", *TEST_SPLITS) if (root / name).is_dir()]
    folders = {name: {path.name for path in subfolders(root / name)} for name in splits}
    classes = folders.pop("train", set())
    same = [name for name in folders if folders[name] == classes]
    some = [name for name in folders if len(folders[name]) > 1]
    return next(iter(same + some), None) if len(classes) > 1 else None


def tree(rename: Rename) -> Layout:
    """Return the layout ``train/<class>/`` and ``test/<class>/``."""

    def load(root: Path, short_side: int | None) -> ImageData:
        held = _test_folder(root) or "test"
        classes = same_classes(root / "train", root / held)
        train, test = (list_classes(root, classes, within) for within in ("train", held))
        return assemble(root, short_side, rename(root, classes), train, test)

    form = "train/<class>/ and test/<class>/ (or val/) with PNG or JPEG files"
    return Layout(form, lambda root: bool(_test_folder(root)), load)


def flat(form: str, purpose: str, rename: Rename) -> Layout:
    """Return the layout of one folder of class folders; a fifth of each class is held out."""

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
    """Return folder names with spaces instead of underscores.

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
    """Return words for WordNet ids, from ``words.txt`` or ``README.txt`` near the images."""
    files = (folder / file for folder in (root, root.parent) for file in ("words.txt", "README.txt"))
    words = next(filter(None, map(_words, files)), {})
    return _distinct([words.get(name, name) for name in folders], folders)


def _words(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    # Lines are such as "n01443537 goldfish, Carassius auratus".
    lines = re.findall(rf"^({_WNID.pattern})\s+([^,\n]+)", text, flags=re.MULTILINE)
    return {number: word.strip().replace("_", " ") for number, word in lines}


def _distinct(names: Sequence[str], folders: Sequence[str]) -> tuple[str, ...]:
    seen = Counter(names)
    return tuple(name if seen[name] == 1 else f"{name} ({folder})" for name, folder in zip(names, folders, strict=True))


def load_cifar(root: Path, short_side: int | None) -> ImageData:
    """Load the Python pickles of CIFAR-100, with the fine labels."""
    try:
        meta = _with_text_keys(read_pickle(root / "meta"))
        classes = plain_names(root, [_text(name) for name in meta["fine_label_names"]])
        train, test = (_cifar_split(root / name, classes, short_side) for name in ("train", "test"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise UserError(f"The files in {root} are not CIFAR-100 ({problem!r}). Download them again.") from None
    return ImageData(classes, train, test)


def _cifar_split(path: Path, classes: Sequence[str], short_side: int | None) -> ImageSet:
    content = _with_text_keys(read_pickle(path))
    labels = np.array(content["fine_labels"], dtype=np.int64)
    pixels = content["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # (n, 32, 32, 3)
    if len(pixels) != len(labels) or len(labels) == 0 or not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError("labels do not match images or classes")
    files = [_text(name) for name in content["filenames"]]
    names = tuple(f"{path.name}/{classes[label]}/{file}" for label, file in zip(labels, files, strict=True))
    full_size = short_side is None or short_side >= pixels.shape[1]

    def read(index: int) -> Pixels:
        image: Pixels = pixels[index]
        return image if full_size else np.asarray(reduce_to(Image.fromarray(image), short_side))

    return ImageSet(names, labels, read, pixels=pixels if full_size else None)


def _with_text_keys(content: Mapping[Any, Any]) -> dict[str, Any]:
    return {_text(key): value for key, value in content.items()}


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8")


CIFAR = Layout(
    "cifar-100-python/ with the pickles train, test and meta",
    lambda root: all((root / name).is_file() for name in ("train", "test", "meta")),
    load_cifar,
    lambda _: True,
)


class _Bytes:
    """Stand-in for NumPy's dtype, which must be uint8."""

    def __init__(self, code: str | bytes, *_: int) -> None:
        if code not in ("u1", b"u1"):
            raise ValueError(f"it has an array of type {code!r}, not bytes")

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order and alignment."""


class _Array:
    """Stand-in for a NumPy array, empty until its state is set."""

    content: NDArray[np.uint8] | None = None

    def __init__(self, *_: object) -> None:
        """Ignore the type, shape and code of the empty array."""

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Bytes, bool, bytes]) -> None:
        _, shape, kind, fortran, content = state
        if type(kind) is not _Bytes or type(content) is not bytes or math.prod(shape) != len(content):
            raise ValueError("an array does not match its shape")
        self.content = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Latin1:
    """Stand-in for the function that encodes bytes in old protocols."""

    __slots__ = ()

    def __call__(self, text: str, codec: str) -> bytes:
        if codec != "latin1":
            raise ValueError(f"it uses the codec {codec!r}, not 'latin1'")
        return text.encode("latin-1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): object(),
    ("numpy", "dtype"): _Bytes,
    ("_codecs", "encode"): _Latin1(),
}


def _fill(code: int, keys: slice) -> Callable[[Any], None]:
    """Return an instruction that fills a dictionary after checking the types of its keys."""
    load = pickle._Unpickler.dispatch[code]

    def checked(reader: Any) -> None:
        if not set(map(type, reader.stack[keys])) <= _KEYS:
            raise pickle.UnpicklingError("a dictionary has a key that is neither text nor a number")
        load(reader)

    return checked


class _PlainUnpickler(pickle._Unpickler):
    """An unpickler of plain data that can only call the stand-ins above.

    It is Python's own. The one in C accepts all instructions, allocates memory for any index of the memo, and overflows
    the stack when it hashes a deeply nested tuple.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {code: pickle._Unpickler.dispatch[code] for code in _CODES}
    dispatch |= {code: _fill(code, slice(start, None, 2)) for code, start in zip(b"sud", (-2, 0, 0), strict=True)}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name."""
        if (module, name) not in _STAND_INS:
            hint = "; save it with protocol 4" if name == "_frombuffer" else ""  # of arrays in protocol 5
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which is not plain data{hint}")
        return _STAND_INS[module, name]


def read_pickle(path: Path) -> dict[str | bytes | int, Any]:
    """Read a dictionary of text, numbers, lists of these and byte arrays; execute nothing.

    Strings of Python 2 are returned as ``bytes``.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path} is larger than {LARGEST} bytes, so it is not a file of CIFAR-100.")
        data = path.read_bytes()
    except OSError as problem:
        raise UserError(f"Could not read {path}: {problem.strerror or problem}.") from None
    try:
        return _plain(_PlainUnpickler(io.BytesIO(data), encoding="bytes").load())
    except Exception as problem:  # noqa: BLE001 (corrupted pickles raise any exception)
        reason = f"corrupted, or more than plain data ({one_line(problem)})"
        raise UserError(f"Rejected {path}: {reason}. Nothing was executed. Download it again.") from None


def _plain(value: Any) -> dict[str | bytes | int, Any]:
    if type(value) is not dict:
        raise ValueError("it is not a dictionary")
    if sum(len(item) for item in value.values() if type(item) is list) > LONGEST:
        raise ValueError(f"its lists have more than {LONGEST} items")
    return {key: _plain_item(item) for key, item in value.items()}


def _plain_item(value: Any) -> Any:
    if type(value) is _Array and value.content is not None:
        return value.content
    if not set(map(type, value if type(value) is list else [value])) <= _PLAIN:
        raise ValueError("it contains something that is not plain data")
    return value


def load_cub(root: Path, short_side: int | None) -> ImageData:
    """Load CUB-200 by its official lists, in the order and with the names of the tree layout."""
    paths, labels = _table(root / "images.txt"), _table(root / "image_class_labels.txt")
    training = _table(root / "train_test_split.txt")
    folders = _cub_folders(paths, labels, root)
    splits: dict[str, list[tuple[int, PurePosixPath]]] = {"1": [], "0": []}
    for number, path in paths.items():
        if training.get(number) not in splits:
            raise UserError(f"{root / 'train_test_split.txt'} has no line for image {number}. Download it again.")
        splits[training[number]].append((int(labels[number]) - 1, PurePosixPath(path)))
    train, test = ([(f"images/{path}", label) for label, path in sorted(split)] for split in splits.values())
    _check_files(root, {root / "images.txt": [name for name, _ in train + test]})
    data = assemble(root, short_side, numbered_names(root, folders), train, test)
    return replace(data, train=_as_in_tree("train", data.train), test=_as_in_tree("test", data.test))


def _as_in_tree(split: str, images: ImageSet) -> ImageSet:
    return replace(images, canonical_names=tuple(f"{split}/{name.partition('/')[2]}" for name in images.names))


def _cub_folders(paths: Mapping[str, str], labels: Mapping[str, str], root: Path) -> list[str]:
    folders: dict[str, str] = {}
    source = root / "image_class_labels.txt"
    for number, path in paths.items():
        label, folder = labels.get(number, "none"), path.split("/")[0]
        if not label.isdecimal() or folders.setdefault(label, folder) != folder:
            raise UserError(f"{source} gives image {number} the class {label}. Download it again.")
    expected = [str(label) for label in range(1, len(folders) + 1)]
    if set(folders) != set(expected):
        raise UserError(f"{source} lacks classes. Download it again.")
    return [folders[label] for label in expected]


def _table(path: Path) -> dict[str, str]:
    rows: dict[str, str] = {}
    for place, line in _lines(path):
        number, _, value = line.partition(" ")
        if not value.strip() or number in rows:
            expected = f"expected '<id> <value>' with a unique id, got {line!r}"
            raise UserError(f"{path}, line {place}: {expected}. Download the list again.")
        rows[number] = value.strip()
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"Could not read the list {path}: {problem}.") from None
    for place, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield place, line.strip()


def _check_files(root: Path, lists: Mapping[Path, Sequence[str]]) -> None:
    existing: set[str] = set()
    for folder, _, files in os.walk(root):
        within = Path(folder).relative_to(root).as_posix()
        existing.update(file if within == "." else f"{within}/{file}" for file in files)
    messages = [
        f"{root} lacks {len(missing)} of {len(names)} images in {source}: {shorten(missing, 3)}."
        for source, names in lists.items()
        if (missing := [name for name in names if name not in existing])
    ]
    if messages:
        raise UserError(" ".join(messages))


CUB = Layout(
    "CUB_200_2011/ with images/, images.txt, image_class_labels.txt and train_test_split.txt",
    lambda root: all((root / f"{name}.txt").is_file() for name in ("images", "train_test_split")),
    load_cub,
    lambda _: True,
)


def find_lists(root: Path) -> tuple[Path, Path] | None:
    """Return the lists of training and test images, or None."""
    folders = (root, root.parent, root / "splits", root.parent / "splits")
    for folder, name, ending in product(folders, ("imagenet-r_", ""), (".yaml", ".yml", ".txt")):
        train, test = (folder / f"{name}{split}{ending}" for split in ("train", "test"))
        if train.is_file() and test.is_file():
            return train, test
    return None


def read_list(path: Path) -> tuple[list[str], list[int] | None]:
    """Return images as ``class/file``, and class numbers if the list has them.

    A list is YAML with the lists ``data`` and ``targets``, or text: a path per line, optionally with a number.
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
            raise UserError(f"{path}, line {place}: expected a path or a number, got {line!r}. Download it again.")
    names, targets = ["/".join(name.split("/")[-2:]) for name in parts["data"]], parts["targets"]
    wrong = [name for name in names if "/" not in name or ".." in name.split("/") or name.startswith("/")]
    if wrong or not names:
        raise UserError(f"{path} must list images as class/file, got {shorten(wrong or ['nothing'], 3)}.")
    if targets and (len(targets) != len(names) or not all(number.isdecimal() for number in targets)):
        raise UserError(f"{path} has {len(names)} images but {len(targets)} class numbers. Download it again.")
    return names, [int(number) for number in targets] or None


def load_listed(root: Path, short_side: int | None) -> ImageData:
    """Load class folders split by two lists of files, with classes in order of number."""
    lists = find_lists(root)
    if lists is None:
        raise UserError(f"{root} has no lists of training and test images. Add train.txt and test.txt.")
    (train, train_labels), (test, test_labels) = map(read_list, lists)
    twice = set(train) & set(test)
    if twice or len(set(train)) != len(train) or len(set(test)) != len(test):
        names = shorten(sorted(twice) or ["in one list"], 3)
        raise UserError(f"{lists[0]} and {lists[1]} list images twice: {names}. Remove the duplicates.")
    if (train_labels is None) != (test_labels is None):
        with_, without = lists if train_labels else lists[::-1]
        raise UserError(f"{with_} has class numbers, but {without} has none. Add them to both, or remove them.")
    labels = train_labels + test_labels if train_labels and test_labels else None
    folders = _numbered_folders(train + test, labels, lists)
    _check_files(root, {lists[0]: train, lists[1]: test})
    number = {folder: label for label, folder in enumerate(folders)}
    splits = ([(name, number[name.split("/")[0]]) for name in split] for split in (train, test))
    data = assemble(root, short_side, wordnet_names(root, folders), *splits)
    return replace(data, lists=tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in lists))


def _numbered_folders(names: Sequence[str], labels: Sequence[int] | None, lists: tuple[Path, Path]) -> list[str]:
    """Return class folders in the order of their numbers, or by name without numbers."""
    folders = [name.split("/")[0] for name in names]
    if labels is None:
        return in_order(set(folders))
    pairs, classes = sorted(set(zip(labels, folders, strict=True))), len(set(folders))
    if [label for label, _ in pairs] != list(range(classes)):
        raise UserError(f"{lists[0]} and {lists[1]}: expected one number from 0 to {classes - 1} for each class.")
    return [folder for _, folder in pairs]


def _wordnet_folders(root: Path) -> list[Path]:
    return [path for path in subfolders(root) if _WNID.fullmatch(path.name)]


def is_imagenet_r(root: Path) -> bool:
    """Return True for ImageNet-R, by its lists or its numbers and names of folders and files."""
    folders = _wordnet_folders(root)
    if find_lists(root) is not None:
        return len(folders) <= _RENDERED
    similar = abs(len(folders) - _RENDERED) <= _RENDERED // 20
    return similar and all(any(_RENDITION.fullmatch(path.name) for path in folder.iterdir()) for folder in folders)


LISTED = Layout(
    "imagenet-r/ with 200 folders such as n01443537/, next to imagenet-r_train.yaml and imagenet-r_test.yaml (or your "
    "train.txt and test.txt)",
    lambda root: len(_wordnet_folders(root)) > 1,
    load_listed,
    is_imagenet_r,
)


def load_tiny(root: Path, short_side: int | None) -> ImageData:
    """Load Tiny-ImageNet with its validation images as the test set; test/ has no labels."""
    folders, annotations = class_folders(root / "train"), root / "val" / "val_annotations.txt"
    number = {folder: label for label, folder in enumerate(folders)}
    test = []
    for place, line in _lines(annotations):
        file, *rest = line.split("\t")
        if not rest or rest[0] not in number or "/" in file:
            raise UserError(f"{annotations}, line {place}: expected a file and a class of train/, got {line!r}.")
        test.append((f"val/images/{file}", number[rest[0]]))
    _check_files(root / "val", {annotations: [name.removeprefix("val/") for name, _ in test]})
    train = list_classes(root, folders, "train")
    return assemble(root, short_side, wordnet_names(root, folders), train, test)


TINY = Layout(
    "tiny-imagenet-200/ with train/<wnid>/images/ and val/ with images/ and val_annotations.txt",
    lambda root: (root / "val" / "val_annotations.txt").is_file() and (root / "train").is_dir(),
    load_tiny,
    lambda _: True,
)
