"""Datasets of the Hugging Face Hub by name, or saved on disk by the package ``datasets``."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from probprompt.data.datasets import HUB, TEST_SPLITS, Benchmark, ImageData, ImageSet, stratified_split
from probprompt.data.images import Pixels, UnreadableImageError, read_image
from probprompt.errors import UserError, one_line, shorten
from probprompt.hub import TIMEOUT, failures, repository_errors, without_bars

_FORM = "hf:owner/name[:configuration][@revision] or hf:FOLDER"
_NAME = re.compile(r"(?P<name>(?:[\w.-]+/)?[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")
_TRAIN = "train"
_SAVED = ("dataset_dict.json", "state.json")  # files that the package saves with several splits and with one


class _Split(Protocol):
    features: Mapping[str, Any]
    _fingerprint: str

    def __len__(self) -> int: ...
    def __getitem__(self, key: Any) -> Any: ...
    def with_format(self, kind: None) -> "_Split": ...
    def select_columns(self, names: list[str]) -> "_Split": ...
    def cast_column(self, name: str, feature: Any) -> "_Split": ...


Splits = Mapping[str, _Split]


@dataclass(frozen=True)
class _Opened:
    splits: Splits
    image: str  # column of images
    classes: tuple[str, ...]
    test: str | None  # split of test images; None if no such split has classes
    labels: dict[str, NDArray[np.int64]]  # labels by split
    notes: tuple[str, ...]


class HubDataset(Benchmark):
    """A dataset of the Hub, with its test or validation split (or a part of train) for tests."""

    name = "hf"
    summary = "a dataset of the Hugging Face hub"
    remote = True

    def __init__(self, where: str, test_fraction: float = 0.2) -> None:
        self.where = where
        self.test_fraction = test_fraction

    def load(self, short_side: int | None) -> ImageData:
        """Download the dataset unless it is cached, and read its columns."""
        opened = self._opened
        train = _images(opened, _TRAIN, short_side)
        if opened.test:
            return ImageData(opened.classes, train, _images(opened, opened.test, short_side))
        kept, held = stratified_split(train.labels, self.test_fraction, "test", opened.classes)
        return ImageData(opened.classes, train.subset(kept), train.subset(held))

    def notes(self) -> list[str]:
        """Report an old copy, splits without classes, and classes without images."""
        return list(self._opened.notes)

    @cached_property
    def _opened(self) -> _Opened:
        where = f"{HUB}{self.where}"
        splits, notes = _open(self.where)
        if _TRAIN not in splits:
            others = f"It has {shorten(sorted(splits))}." if splits else "It has no others."
            raise UserError(f"{where} has no split {_TRAIN!r} with images. {others} Choose another dataset.")
        image, column = _columns(splits[_TRAIN], self.where)
        labels = {_TRAIN: _labels(splits[_TRAIN], column)}
        if (labels[_TRAIN] < 0).any():
            raise UserError(f"Split {_TRAIN!r} of {where} has images without a class. Choose another dataset.")
        present = [name for name in TEST_SPLITS if name in splits]
        test = next((name for name in present if (_labels(splits[name], column) >= 0).all()), None)
        if test:
            _check_columns(splits[_TRAIN], splits[test], (image, column), f"Split {test!r} of {where}")
            labels[test] = _labels(splits[test], column)
        instead = repr(test) if test else f"a part of {_TRAIN!r}"
        notes += [
            f"Split {name!r} of {where} has images without a class. The test set is {instead}."
            for name in present[: present.index(test) if test else None]
        ]
        names = tuple(splits[_TRAIN].features[column].names)
        classes, numbered = _without_empty(names, labels, where)
        if len(classes) < len(names):
            empty = shorten(sorted(set(names) - set(classes)))
            notes.append(f"Omitted {len(names) - len(classes)} class(es) of {where} without images: {empty}.")
        return _Opened(splits, image, classes, test, numbered, tuple(notes))


def _open(where: str) -> tuple[Splits, list[str]]:
    """Return all splits with images, and notes; a single saved split is for training."""
    try:
        datasets: Any = import_module("datasets")
    except ImportError:
        raise UserError(f"{HUB}{where} needs the package 'datasets'. Run: pip install 'probprompt[hub]'") from None
    folder = Path(where).expanduser()
    with _quiet(datasets):
        if not any((folder / name).is_file() for name in _SAVED):
            return _download(datasets, where)
        try:
            saved: Any = datasets.load_from_disk(str(folder))
        except Exception as problem:  # noqa: BLE001 (corrupted files raise any exception)
            reason = one_line(problem)
            raise UserError(f"Could not load {HUB}{where}: {reason}. Save it again without empty splits.") from None
    splits = saved if isinstance(saved, Mapping) else {_TRAIN: saved}
    return {name: split for name, split in splits.items() if len(split)}, []


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    packages = (datasets.utils, import_module("huggingface_hub.utils"))
    with without_bars(*packages), ExitStack() as stack:
        for package in packages:
            stack.callback(package.logging.set_verbosity, package.logging.get_verbosity())
            package.logging.set_verbosity(logging.CRITICAL)
        yield


@dataclass(frozen=True)
class _HubName:
    """A dataset of the Hub by name; ``where`` is the user's text."""

    where: str
    name: str
    config: str | None
    revision: str | None


def _download(datasets: Any, where: str) -> tuple[Splits, list[str]]:
    """Return the present commit of a revision, or the last download if the Hub is offline."""
    match = _NAME.fullmatch(where)
    folder = Path(match["name"] if match else where).expanduser()
    if match is None or folder.is_dir():
        kind = "a folder, but not saved by datasets" if folder.is_dir() else "neither a dataset name nor a folder"
        own = f" Pass class folders without {HUB}." if folder.is_dir() else ""
        raise UserError(f"{HUB}{where} is {kind}. Expected {_FORM}.{own}")
    request = _HubName(f"{HUB}{where}", match["name"], match["config"], match["revision"])
    if datasets.config.HF_HUB_OFFLINE:
        return _last_copy(datasets, request, "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set")
    errors: Any = import_module("huggingface_hub.errors")
    api = import_module("huggingface_hub").HfApi(endpoint=datasets.config.HF_ENDPOINT, library_name="probprompt")
    try:
        with repository_errors("dataset", request.name, request.where):
            info = api.dataset_info(request.name, revision=request.revision, timeout=TIMEOUT)
    except errors.HFValidationError as problem:
        raise UserError(f"Invalid dataset name {request.where}: {one_line(problem)}.") from None
    except failures() as problem:
        return _last_copy(datasets, request, one_line(problem))
    return _load_commit(datasets, request, str(info.id), str(info.sha)), []


def _load_commit(datasets: Any, request: _HubName, name: str, commit: str) -> Splits:
    try:
        builder = datasets.load_dataset_builder(name, request.config, revision=commit)
    except Exception as problem:  # noqa: BLE001 (datasets on the Hub raise any exception)
        configs: list[str] = []
        if isinstance(problem, ValueError):
            with suppress(Exception):  # the first problem is reported
                configs = list(datasets.get_dataset_config_names(name, revision=commit))
        if configs and (request.config not in configs if request.config else len(configs) > 1):
            example = f"{HUB}{request.name}:{configs[0]}" + (f"@{request.revision}" if request.revision else "")
            choices = shorten(configs)
            raise UserError(f"{request.where}: choose a configuration, such as {example}. All: {choices}.") from None
        if isinstance(problem, datasets.exceptions.DatasetNotFoundError):  # exists, but needs a login
            raise _load_error(request, problem, "Run 'hf auth login' or set HF_TOKEN.") from None
        raise _load_error(request, problem) from None
    if builder.hash != commit:  # without an answer of the Hub, the package uses its cache
        raise _load_error(request, ConnectionError("the Hub does not send its files"))
    try:
        builder.download_and_prepare()
        return _splits(builder)
    except Exception as problem:  # noqa: BLE001 (as above)
        raise _load_error(request, problem) from None


def _load_error(
    request: _HubName, problem: Exception, remedy: str = "Try again, or choose another revision or dataset."
) -> UserError:
    reason = one_line(problem.__cause__ if isinstance(problem.__cause__, Exception) else problem)
    return UserError(f"Could not load {request.where}: {reason}. {remedy}")


def _last_copy(datasets: Any, request: _HubName, reason: str) -> tuple[Splits, list[str]]:
    """Return the last downloaded copy of a dataset; raise UserError for another revision."""
    offline = f"Could not reach the Hub ({reason})"
    if "/" not in request.name:
        raise UserError(f"{offline}, and {request.where} has no owner. Check the network, or write {HUB}owner/name.")
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True  # saves requests that take half a minute to fail
    try:
        builder = datasets.load_dataset_builder(request.name, request.config)
        splits = _splits(builder)
    except ConnectionError:
        raise UserError(f"{offline}, and {request.where} was never downloaded. Check the network.") from None
    except Exception as problem:  # noqa: BLE001 (corrupted files raise any exception)
        copy = f"no usable copy of {request.where} exists ({one_line(problem)})"
        raise UserError(f"{offline}, and {copy}. Check the network.") from None
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    if request.revision not in (None, builder.hash):
        last = f"the last download of {request.name} is commit {builder.hash}"
        raise UserError(f"{offline}, and {last}. Check the network, or request that commit.")
    config = "" if request.config else f", configuration {builder.config.name}"
    return splits, [f"{offline}. Using the last download of {request.where}: commit {builder.hash}{config}."]


def _splits(builder: Any) -> Splits:
    # The package cannot open a split without images.
    return {name: builder.as_dataset(split=name) for name, info in builder.info.splits.items() if info.num_examples}


def _columns(split: _Split, where: str) -> tuple[str, str]:
    """Return the only column of images, and the only column of classes or the one named label."""
    kinds = {name: type(feature).__name__ for name, feature in split.features.items()}
    images, labels = ([name for name in kinds if kinds[name] == kind] for kind in ("Image", "ClassLabel"))
    for default in ("label", "fine_label"):
        labels = [default] if default in labels else labels
    if len(images) != 1 or len(labels) != 1:
        columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise UserError(f"{HUB}{where} must have one column of images and one of class labels. It has: {columns}.")
    return images[0], labels[0]


def _labels(split: _Split, column: str) -> NDArray[np.int64]:
    """Return the labels of a split, -1 for images without a class."""
    if column not in split.features:
        return np.full(len(split), -1, np.int64)
    labels = split.with_format(None)[column][:]
    return np.array([-1 if label is None else label for label in labels], dtype=np.int64)


def _check_columns(train: _Split, other: _Split, columns: tuple[str, str], where: str) -> None:
    for column in columns:
        one, two = train.features[column], other.features.get(column)
        if type(one) is not type(two) or getattr(one, "names", None) != getattr(two, "names", None):
            raise UserError(f"{where}: column {column!r} differs from {_TRAIN!r}. Save both with the same features.")


def _without_empty(
    names: tuple[str, ...], labels: dict[str, NDArray[np.int64]], where: str
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """Return classes with images and new labels; raise UserError if a split lacks a class."""
    present = {name: np.unique(values) for name, values in labels.items()}
    kept = np.unique(np.concatenate(list(present.values())))
    for name, values in present.items():
        missing = np.setdiff1d(kept, values)
        if len(missing):
            classes = shorten(names[label] for label in missing)
            raise UserError(
                f"Split {name!r} of {where} lacks classes of another split: {classes}. Choose another dataset, or "
                "save it without these classes."
            )
    return tuple(names[label] for label in kept), {name: np.searchsorted(kept, row) for name, row in labels.items()}


def _images(opened: _Opened, name: str, short_side: int | None) -> ImageSet:
    labels, column, split = opened.labels[name], opened.image, opened.splits[name]
    encoded = type(split.features[column])(decode=False)
    rows = split.with_format(None).select_columns([column]).cast_column(column, encoded)
    folder = f"{name}@{split._fingerprint}"  # identifies the commit or the saved data

    def read(row: int) -> Pixels:
        image = rows[row][column] or {"bytes": None, "path": None}
        if image["bytes"] is None and image["path"] is None:
            raise UnreadableImageError("this row has no image")
        return read_image(Path(image["path"]) if image["bytes"] is None else BytesIO(image["bytes"]), short_side)

    return ImageSet(tuple(f"{folder}/{row:07}" for row in range(len(labels))), labels, read, short_side=short_side)
