"""Datasets of the Hugging Face hub by name, or as the package ``datasets`` has saved one on disk."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class _Opened:
    """A dataset as it is used: its splits, which of them is the test set, and the class numbers of their images."""

    splits: Mapping[str, Any]
    image: str
    """The column of images."""
    classes: tuple[str, ...]
    side: str | None
    """The split that is the test set, where there is one with classes."""
    labels: dict[str, NDArray[np.int64]]
    """Of the images of the training and the test split."""
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
        """Fetch the dataset, unless it is there already, and read its columns."""
        opened = self._opened
        whole = _images(opened, _TRAIN, short_side)
        if opened.side is None:
            kept, held = stratified_split(whole.labels, self.test_fraction, "test", opened.classes)
            return ImageData(opened.classes, whole.subset(kept), whole.subset(held))
        return ImageData(opened.classes, whole, _images(opened, opened.side, short_side))

    def notes(self) -> list[str]:
        """Whether this is an old copy, which splits have no classes, and which classes have no images."""
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
        if not _complete(labels[_TRAIN]):
            raise UserError(f"{where}: the split {_TRAIN!r} has images without a class: choose a dataset that has them")
        side, passed_over = None, []
        for name in (name for name in SIDES if name in splits):
            found = _labels(splits[name], column)
            if _complete(found):
                _refuse_other_columns(splits[_TRAIN], splits[name], (image, column), f"{where}: the split {name!r}")
                side, labels[name] = name, found
                break
            passed_over.append(name)
        instead = repr(side) if side else f"a part of {_TRAIN!r}"
        notes += [
            f"the split {name!r} of {where} has images without a class: the test set is {instead}"
            for name in passed_over
        ]
        names = tuple(splits[_TRAIN].features[column].names)
        classes, numbered = _without_empty(names, labels, where)
        if len(classes) < len(names):
            empty = shorten(sorted(set(names) - set(classes)))
            notes.append(f"{len(names) - len(classes)} class(es) of {where} have no image and are left out: {empty}")
        return _Opened(splits, image, classes, side, numbered, tuple(notes))


# Opening a dataset ---------------------------------------------------------------------------------------------------


def _open(where: str) -> tuple[Mapping[str, Any], list[str]]:
    """All splits with images by name, and what to know of them; a split that was saved alone is for training."""
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
    """Keep bars and notes of the package, and of the hub's client, off the screen."""
    packages = (datasets.utils, import_module("huggingface_hub.utils"))
    before = [(one, one.logging.get_verbosity()) for one in packages]
    for one in packages:
        one.logging.set_verbosity(logging.CRITICAL)
    try:
        with without_bars(*packages):
            yield
    finally:
        for one, verbosity in before:
            one.logging.set_verbosity(verbosity)


@dataclass(frozen=True)
class _Named:
    """What is asked of the hub."""

    where: str
    """As the user wrote it."""
    name: str
    config: str | None
    revision: str | None


def _fetch(datasets: Any, where: str) -> tuple[Mapping[str, Any], list[str]]:
    """A dataset at the commit that its revision is now; without the hub, what was fetched before."""
    found = _NAMED.fullmatch(where)
    folder = Path(found["name"] if found else where).expanduser()
    if found is None or folder.is_dir():
        what = "a folder, but none that datasets has saved" if folder.is_dir() else "neither a name nor a folder"
        own = f"; class folders of your own go without {HUB}" if folder.is_dir() else ""
        raise UserError(f"{HUB}{where} is {what}: write {_FORM}{own}")
    asked = _Named(f"{HUB}{where}", found["name"], found["config"], found["revision"])
    try:
        name, commit = _ask(datasets, asked)
    except _UnreachedError as problem:
        return _fetched_before(datasets, asked, str(problem))
    return _fetch_commit(datasets, asked, name, commit), []


class _UnreachedError(Exception):
    """The hub does not answer, and why."""


def _ask(datasets: Any, asked: _Named) -> tuple[str, str]:
    """The full name of a dataset, with its owner, and the commit that its revision is."""
    if datasets.config.HF_HUB_OFFLINE:
        raise _UnreachedError("HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set")
    errors: Any = import_module("huggingface_hub.errors")
    api = import_module("huggingface_hub").HfApi(endpoint=datasets.config.HF_ENDPOINT, library_name="probprompt")
    try:
        with asking_for("dataset", asked.name, asked.where):
            found = api.dataset_info(asked.name, revision=asked.revision, timeout=TIMEOUT)
    except errors.HFValidationError as problem:
        raise UserError(f"{asked.where} is no name of a dataset: {one_line(problem)}") from None
    except failures() as problem:
        raise _UnreachedError(one_line(problem)) from None
    return str(found.id), str(found.sha)


def _fetch_commit(datasets: Any, asked: _Named, name: str, commit: str) -> Mapping[str, Any]:
    """The splits of one commit, and of no other that was fetched before."""
    try:
        builder = datasets.load_dataset_builder(name, asked.config, revision=commit)
    except Exception as problem:  # noqa: BLE001 (what others put on the hub makes the package raise anything)
        configs = _configurations(datasets, name, commit) if isinstance(problem, ValueError) else []
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


def _configurations(datasets: Any, name: str, commit: str) -> list[str]:
    """The configurations of a dataset, none where they cannot be told."""
    try:
        return list(datasets.get_dataset_config_names(name, revision=commit))
    except Exception:  # noqa: BLE001 (that it cannot be loaded is said already)
        return []


def _fetched_before(datasets: Any, asked: _Named, reason: str) -> tuple[Mapping[str, Any], list[str]]:
    """What the package has fetched last of a dataset; another revision than the one that is named is refused."""
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


def _splits(builder: Any) -> Mapping[str, Any]:
    """The splits that have images; the package refuses to open one without."""
    return {name: builder.as_dataset(split=name) for name, known in builder.info.splits.items() if known.num_examples}


# Reading it ----------------------------------------------------------------------------------------------------------


def _columns(split: Any, where: str) -> tuple[str, str]:
    """The only column of images, and the only one of classes, or the one that is called label."""
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


def _labels(split: Any, column: str) -> NDArray[np.int64]:
    """The class numbers of a split, -1 where an image has none."""
    if column not in split.features:
        return np.full(len(split), -1, np.int64)
    found = split.with_format(None)[column][:]
    return np.array([-1 if label is None else label for label in found], dtype=np.int64)


def _refuse_other_columns(train: Any, other: Any, columns: tuple[str, str], told: str) -> None:
    """A class must have the same number in both splits."""
    for column in columns:
        one, two = train.features[column], other.features.get(column)
        if type(one) is not type(two) or getattr(one, "names", None) != getattr(two, "names", None):
            raise UserError(f"{told} has another column {column!r} than {_TRAIN!r}: save both with the same features")


def _complete(labels: NDArray[np.int64]) -> bool:
    """Whether all images have a class."""
    return bool((labels >= 0).all())


def _without_empty(
    names: tuple[str, ...], labels: dict[str, NDArray[np.int64]], where: str
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """The classes that have images, numbered anew; one that has them on one side alone is refused."""
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
