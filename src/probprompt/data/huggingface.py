"""Datasets of the Hugging Face hub by name, or as the package ``datasets`` has saved one on disk."""

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

from probprompt.data.datasets import HUB, SIDES, Benchmark, ImageData, ImageSet, stratified_split
from probprompt.data.images import Pixels, UnreadableImageError, read_image
from probprompt.errors import UserError, one_line, shorten
from probprompt.hub import TIMEOUT, asking_for, failures, without_bars

_FORM = "hf:owner/name or hf:name, :configuration and @revision behind it where needed, or hf:FOLDER"
_NAMED = re.compile(r"(?P<name>(?:[\w.-]+/)?[\w.-]+)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")
_TRAIN = "train"
_SEVERAL, _SINGLE = "dataset_dict.json", "state.json"  # of a folder of splits, and of one split alone


class _Split(Protocol):
    """The part of ``datasets.Dataset`` that is used here."""

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
    """The splits of a dataset and their classes."""

    splits: Splits
    image: str
    """Column of images."""
    classes: tuple[str, ...]
    side: str | None
    """Split of test images; None if no such split has classes."""
    labels: dict[str, NDArray[np.int64]]
    """By split: training and test."""
    notes: tuple[str, ...]


class HubDataset(Benchmark):
    """A dataset of images with class labels; its test or validation split is the test set, else a part of train."""

    name = "hf"
    summary = "a dataset of the Hugging Face hub"
    remote = True

    def __init__(self, where: str, test_fraction: float = 0.2) -> None:
        self.where = where
        self.test_fraction = test_fraction

    def load(self, short_side: int | None) -> ImageData:
        """Download the dataset unless it is cached, and read its columns."""
        opened = self._opened
        whole = _images(opened, _TRAIN, short_side)
        if opened.side:
            return ImageData(opened.classes, whole, _images(opened, opened.side, short_side))
        kept, held = stratified_split(whole.labels, self.test_fraction, "test", opened.classes)
        return ImageData(opened.classes, whole.subset(kept), whole.subset(held))

    def notes(self) -> list[str]:
        """Report an old copy, splits without classes, and classes without images."""
        return list(self._opened.notes)

    @cached_property
    def _opened(self) -> _Opened:
        where = f"{HUB}{self.where}"
        splits, notes = _open(self.where)
        if _TRAIN not in splits:
            only = f"only {shorten(sorted(splits))}" if splits else "and no other"
            raise UserError(f"{where} has no split {_TRAIN!r} with images, {only}: choose another dataset")
        image, column = _columns(splits[_TRAIN], self.where)
        labels = {_TRAIN: _labels(splits[_TRAIN], column)}
        if (labels[_TRAIN] < 0).any():
            raise UserError(f"{where}: the split {_TRAIN!r} has images without a class: choose a dataset that has them")
        present = [name for name in SIDES if name in splits]
        side = next((name for name in present if (_labels(splits[name], column) >= 0).all()), None)
        if side:
            _check_columns(splits[_TRAIN], splits[side], (image, column), f"{where}: the split {side!r}")
            labels[side] = _labels(splits[side], column)
        instead = repr(side) if side else f"a part of {_TRAIN!r}"
        notes += [
            f"the split {name!r} of {where} has images without a class: the test set is {instead}"
            for name in present[: present.index(side) if side else None]
        ]
        names = tuple(splits[_TRAIN].features[column].names)
        classes, numbered = _without_empty(names, labels, where)
        if len(classes) < len(names):
            empty = shorten(sorted(set(names) - set(classes)))
            notes.append(f"{len(names) - len(classes)} class(es) of {where} have no image and are left out: {empty}")
        return _Opened(splits, image, classes, side, numbered, tuple(notes))


def _open(where: str) -> tuple[Splits, list[str]]:
    """Return all splits with images, and notes; a single saved split is for training."""
    try:
        datasets: Any = import_module("datasets")
    except ImportError:
        raise UserError(f"{HUB}{where} needs the package 'datasets': pip install 'probprompt[hub]'") from None
    folder = Path(where).expanduser()
    with _quiet(datasets):
        if not any((folder / name).is_file() for name in (_SEVERAL, _SINGLE)):
            return _fetch(datasets, where)
        try:
            found: Any = datasets.load_from_disk(str(folder))
        except Exception as problem:  # noqa: BLE001 (what is damaged makes the package raise anything)
            raise UserError(
                f"{HUB}{where} cannot be loaded: {one_line(problem)}; save it anew, without splits that are empty"
            ) from None
    splits = found if isinstance(found, Mapping) else {_TRAIN: found}
    return {name: split for name, split in splits.items() if len(split)}, []


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Silence the package and the hub's client."""
    packages = (datasets.utils, import_module("huggingface_hub.utils"))
    with without_bars(*packages), ExitStack() as later:
        for one in packages:
            later.callback(one.logging.set_verbosity, one.logging.get_verbosity())
            one.logging.set_verbosity(logging.CRITICAL)
        yield


@dataclass(frozen=True)
class _Named:
    """A dataset of the hub by name."""

    where: str
    """As the user wrote it."""
    name: str
    config: str | None
    revision: str | None


def _fetch(datasets: Any, where: str) -> tuple[Splits, list[str]]:
    """Return a dataset at the present commit of its revision; without the hub, the copy downloaded last."""
    found = _NAMED.fullmatch(where)
    folder = Path(found["name"] if found else where).expanduser()
    if found is None or folder.is_dir():
        what = "a folder, but none that datasets has saved" if folder.is_dir() else "neither a name nor a folder"
        own = f"; class folders of your own go without {HUB}" if folder.is_dir() else ""
        raise UserError(f"{HUB}{where} is {what}: write {_FORM}{own}")
    asked = _Named(f"{HUB}{where}", found["name"], found["config"], found["revision"])
    if datasets.config.HF_HUB_OFFLINE:
        return _fetched_before(datasets, asked, "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set")
    errors: Any = import_module("huggingface_hub.errors")
    api = import_module("huggingface_hub").HfApi(endpoint=datasets.config.HF_ENDPOINT, library_name="probprompt")
    try:
        with asking_for("dataset", asked.name, asked.where):
            about = api.dataset_info(asked.name, revision=asked.revision, timeout=TIMEOUT)
    except errors.HFValidationError as problem:
        raise UserError(f"{asked.where} is no name of a dataset: {one_line(problem)}") from None
    except failures() as problem:
        return _fetched_before(datasets, asked, one_line(problem))
    return _fetch_commit(datasets, asked, str(about.id), str(about.sha)), []


def _fetch_commit(datasets: Any, asked: _Named, name: str, commit: str) -> Splits:
    """Return the splits of one commit, never of another one in the cache."""
    try:
        builder = datasets.load_dataset_builder(name, asked.config, revision=commit)
    except Exception as problem:  # noqa: BLE001 (what others put on the hub makes the package raise anything)
        configs: list[str] = []
        if isinstance(problem, ValueError):
            with suppress(Exception):  # that it cannot be loaded is said already
                configs = list(datasets.get_dataset_config_names(name, revision=commit))
        if configs and (asked.config not in configs if asked.config else len(configs) > 1):
            at = f"@{asked.revision}" if asked.revision else ""
            raise UserError(
                f"{asked.where}: name one of its configurations, {shorten(configs)}, as in "
                f"{HUB}{asked.name}:{configs[0]}{at}"
            ) from None
        if isinstance(problem, datasets.exceptions.DatasetNotFoundError):  # it is there, as the hub said
            raise _unusable(asked, problem, "run 'hf auth login' or set HF_TOKEN") from None
        raise _unusable(asked, problem) from None
    if builder.hash != commit:  # the package takes what it has where the hub does not answer
        raise _unusable(asked, ConnectionError("the hub does not give its files"))
    try:
        builder.download_and_prepare()
        return _splits(builder)
    except Exception as problem:  # noqa: BLE001 (as above)
        raise _unusable(asked, problem) from None


def _unusable(
    asked: _Named, problem: Exception, remedy: str = "try again, or choose another revision or dataset"
) -> UserError:
    reason = one_line(problem.__cause__ if isinstance(problem.__cause__, Exception) else problem)
    return UserError(f"{asked.where} cannot be loaded: {reason}; {remedy}")


def _fetched_before(datasets: Any, asked: _Named, reason: str) -> tuple[Splits, list[str]]:
    """Return the copy of a dataset downloaded last; a copy of another revision is rejected."""
    unreached, network = f"the hub cannot be reached ({reason})", "see that the network is there"
    if "/" not in asked.name:
        raise UserError(f"{unreached}, and {asked.where} is without its owner: {network}, or write {HUB}owner/name")
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True  # else it would ask the hub again, for half a minute
    try:
        builder = datasets.load_dataset_builder(asked.name, asked.config)
        splits = _splits(builder)
    except ConnectionError:
        raise UserError(f"{unreached}, and {asked.where} was not fetched before: {network}") from None
    except Exception as problem:  # noqa: BLE001 (what is damaged makes the package raise anything)
        reason = one_line(problem)
        raise UserError(f"{unreached}, and no copy of {asked.where} can be used: {reason}; {network}") from None
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    if asked.revision not in (None, builder.hash):
        raise UserError(
            f"{unreached}, and what was fetched last of {asked.name} is the commit {builder.hash}: {network}, or name "
            "that commit"
        )
    config = "" if asked.config else f", configuration {builder.config.name}"
    return splits, [f"{unreached}: {asked.where} is what was fetched last, commit {builder.hash}{config}"]


def _splits(builder: Any) -> Splits:
    # The package cannot open a split without images.
    return {name: builder.as_dataset(split=name) for name, known in builder.info.splits.items() if known.num_examples}


def _columns(split: _Split, where: str) -> tuple[str, str]:
    """Return the only column of images, and the only column of classes or the one named label."""
    kinds = {name: type(feature).__name__ for name, feature in split.features.items()}
    images, labels = ([name for name in kinds if kinds[name] == kind] for kind in ("Image", "ClassLabel"))
    for usual in ("label", "fine_label"):
        labels = [usual] if usual in labels else labels
    if len(images) != 1 or len(labels) != 1:
        raise UserError(
            f"{HUB}{where} must have one column of images and one of class labels, but its columns are "
            + ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        )
    return images[0], labels[0]


def _labels(split: _Split, column: str) -> NDArray[np.int64]:
    """Return the class numbers of a split, -1 for images without a class."""
    if column not in split.features:
        return np.full(len(split), -1, np.int64)
    found = split.with_format(None)[column][:]
    return np.array([-1 if label is None else label for label in found], dtype=np.int64)


def _check_columns(train: _Split, other: _Split, columns: tuple[str, str], where: str) -> None:
    """A class must have the same number in both splits."""
    for column in columns:
        one, two = train.features[column], other.features.get(column)
        if type(one) is not type(two) or getattr(one, "names", None) != getattr(two, "names", None):
            raise UserError(f"{where} has another column {column!r} than {_TRAIN!r}: save both with the same features")


def _without_empty(
    names: tuple[str, ...], labels: dict[str, NDArray[np.int64]], where: str
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """Return the classes that have images, numbered again; a class missing from one split is rejected."""
    present = {side: np.unique(found) for side, found in labels.items()}
    kept = np.unique(np.concatenate(list(present.values())))
    for side, found in present.items():
        missing = np.setdiff1d(kept, found)
        if len(missing):
            raise UserError(
                f"{where}: the split {side!r} has no image of {shorten(names[label] for label in missing)}, which "
                "another split has: choose a dataset whose splits have the same classes, or save one without these"
            )
    return tuple(names[label] for label in kept), {side: np.searchsorted(kept, all_) for side, all_ in labels.items()}


def _images(opened: _Opened, side: str, short_side: int | None) -> ImageSet:
    labels, column, whole = opened.labels[side], opened.image, opened.splits[side]
    encoded = type(whole.features[column])(decode=False)
    split = whole.with_format(None).select_columns([column]).cast_column(column, encoded)
    folder = f"{side}@{whole._fingerprint}"  # of the dataset's commit, or of what was saved

    def read(row: int) -> Pixels:
        found = split[row][column] or {"bytes": None, "path": None}
        if found["bytes"] is None and found["path"] is None:
            raise UnreadableImageError("there is no image in this row")
        return read_image(Path(found["path"]) if found["bytes"] is None else BytesIO(found["bytes"]), short_side)

    return ImageSet(tuple(f"{folder}/{row:07}" for row in range(len(labels))), labels, read, short_side=short_side)
