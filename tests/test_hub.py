"""Datasets of the Hugging Face hub: which splits and classes are used, and what identifies their images."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from probprompt.data.benchmarks import find
from probprompt.data.loading import load
from probprompt.errors import UserError

CLASSES = ("ant", "bee", "cat")


class Split:
    """As much of a split of the package ``datasets`` as is used."""

    def __init__(self, labels: Sequence[int | None], fingerprint: str | None = "f0", size: tuple[int, int] = (8, 6)):
        self.labels, self.size = list(labels), size
        self._fingerprint = fingerprint
        label = type("ClassLabel", (), {"names": list(CLASSES)})()
        self.features = {"img": type("Image", (), {})(), "label": label}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: str | int) -> Any:
        return list(self.labels) if key == "label" else {"img": Image.new("RGB", self.size, (int(key), 0, 0))}


Hub = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A hub that answers every name with these splits, and what it was asked for."""
    monkeypatch.chdir(tmp_path)

    def give(splits: Any) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def load_dataset(name: str, config: str | None, revision: str | None) -> Any:
            asked.append((name, config, revision))
            return splits

        def load_from_disk(folder: str) -> Any:
            asked.append((folder,))
            return splits

        errors = SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))
        module = SimpleNamespace(load_dataset=load_dataset, load_from_disk=load_from_disk, exceptions=errors)
        monkeypatch.setitem(sys.modules, "datasets", module)
        return asked

    return give


def both(**more: Any) -> dict[str, Split]:
    return {"train": Split([0, 1, 2] * 4, **more), "test": Split([0, 1, 2], **more)}


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_the_side_that_is_stored_is_recorded(hub: Hub, validation: float) -> None:
    hub(both(size=(400, 300)))
    source = find("hf:owner/name")
    for side in (73, None):
        data = source.load(side)
        if validation:
            data = source.hold_out(data, validation)
        for images in (data.train, data.test):
            loaded = load(images, torch.device("cpu"), lambda _: None)
            assert loaded.describe()["stored_side"] == (side or "full")
            assert int(loaded.store.sizes.min()) == (side or 300)


def test_other_images_are_another_split(hub: Hub) -> None:
    hashes = []
    for fingerprint in ("f0", "f0", "f1", None):
        hub(both(fingerprint=fingerprint))
        hashes.append(find("hf:owner/name").load(4).split_hash())
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


def test_a_split_without_classes_is_passed_over_and_told(hub: Hub) -> None:
    train, labelled = Split([0, 1, 2] * 5), Split([2, 1, 0])
    for unlabelled in (Split([-1, -1]), Split([0, None]), Split([])):
        hub({"train": train, "test": unlabelled, "validation": labelled})
        source = find("hf:owner/name")
        data = source.load(4)
        assert data.test.names[0] == "validation@f0/0000000" and data.test.labels.tolist() == [2, 1, 0]
        (remark,) = source.remarks()
        assert "'test' of hf:owner/name has images without a class: the test set is 'validation'" in remark
    hub({"train": train, "test": Split([-1, -1])})
    source = find("hf:owner/name")
    assert (len(source.load(4).train), len(source.load(4).test)) == (12, 3)
    assert "the test set is a part of 'train'" in source.remarks()[0]
    hub({"train": train, "test": labelled, "validation": Split([-1])})
    assert find("hf:owner/name").remarks() == []
    hub({"train": Split([0, -1])})
    with pytest.raises(UserError, match="'train' has images without a class: choose a dataset"):
        find("hf:owner/name").load(4)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("cifar100", ("cifar100", None, None)),
        ("cifar100:fine@main", ("cifar100", "fine", "main")),
        ("owner/name:small@refs/pr/1", ("owner/name", "small", "refs/pr/1")),
    ],
)
def test_a_dataset_is_named_with_or_without_its_owner(hub: Hub, name: str, asked: tuple[Any, ...]) -> None:
    found = hub(both())
    assert find(f"hf:{name}").load(4).class_names == CLASSES
    assert found == [asked]


def test_a_single_split_saved_on_disk_is_divided(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    asked = hub(Split([0, 1, 2] * 5))
    data = find("hf:saved").load(4)
    assert asked == [("saved",)] and (len(data.train), len(data.test)) == (12, 3)


def test_what_is_neither_a_name_nor_saved_is_refused(hub: Hub, tmp_path: Path) -> None:
    asked = hub(both())
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match=r"is a folder, but none that datasets has saved: .*class folders of your own"):
        find("hf:photos").load(4)
    with pytest.raises(UserError, match=r"is neither a name nor a folder: write hf:owner/name or hf:name"):
        find("hf:/no/such/folder").load(4)
    assert not asked


def test_classes_without_images_are_left_out_and_told(hub: Hub) -> None:
    hub({"train": Split([0, 2] * 5), "test": Split([2, 0])})
    source = find("hf:owner/name")
    data = source.load(4)
    assert data.class_names == ("ant", "cat")
    assert sorted(set(data.train.labels.tolist())) == [0, 1] and data.test.labels.tolist() == [1, 0]
    assert data.train.labels.dtype == np.int64
    assert source.remarks() == ["1 class(es) of hf:owner/name have no image and are left out: bee"]


@pytest.mark.parametrize(("train", "test", "side"), [([0, 1], [0, 1, 2], "train"), ([0, 1, 2], [0, 1], "test")])
def test_a_class_of_one_side_alone_is_refused(hub: Hub, train: list[int], test: list[int], side: str) -> None:
    hub({"train": Split(train), "test": Split(test)})
    with pytest.raises(UserError, match=f"the split '{side}' has no image of cat, which another split has: choose"):
        find("hf:owner/name").load(4)


def test_what_the_package_saves_is_read_and_told_apart(tmp_path: Path) -> None:
    package = pytest.importorskip("datasets")
    label = package.ClassLabel(names=list(CLASSES))
    features = package.Features({"img": package.Image(), "label": label})

    def split(red: int) -> Any:
        pictures = [Image.new("RGB", (40, 30), (red, row, 0)) for row in range(10)]
        return package.Dataset.from_dict({"img": pictures, "label": [0, 2] * 5}, features=features)

    for name, red in (("one", 1), ("other", 2)):
        split(red).save_to_disk(str(tmp_path / name))
    one, again, other = (find(f"hf:{tmp_path / name}").load(8) for name in ("one", "one", "other"))
    assert one.class_names == ("ant", "cat") and (len(one.train), len(one.test)) == (8, 2)
    assert one.split_hash() == again.split_hash() != other.split_hash()
    assert one.test.read(0).shape == (8, 11, 3) and one.test.read(0)[0, 0, 0] == 1
    (tmp_path / "one" / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        find(f"hf:{tmp_path / 'one'}").load(8)
