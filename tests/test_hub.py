"""Datasets of the Hugging Face hub: made and read by the package itself, fetched from a stand-in over real HTTP."""

import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import HfFileSystem
from PIL import Image

from local_hub import DATASETS, ROUTES, Hub, Repository, alone, say
from probprompt.data.datasets import find
from probprompt.data.image_store import load
from probprompt.data.images import UnreadableImageError
from probprompt.errors import UserError

PACKAGE: Any = import_module("datasets")  # its functions are not annotated
CLASSES = ("ant", "bee", "cat")
FEATURES = PACKAGE.Features({"img": PACKAGE.Image(), "label": PACKAGE.ClassLabel(names=list(CLASSES))})
Command = Callable[..., Any]
Labels = Sequence[int | None]

# Datasets ------------------------------------------------------------------------------------------------------------


def split(labels: Labels, red: int = 0, size: tuple[int, int] = (8, 6)) -> Any:
    """Pictures of these classes, each in a colour of its own."""
    pictures = [Image.new("RGB", size, (red, row, 0)) for row in range(len(labels))]
    return PACKAGE.Dataset.from_dict({"img": pictures, "label": list(labels)}, features=FEATURES)


def parquet(made: Any) -> bytes:
    """As the package sends a split to the hub."""
    written = io.BytesIO()
    made.to_parquet(written)
    return written.getvalue()


def files(splits: Mapping[str, Any], folder: str = "data") -> dict[str, bytes]:
    return {f"{folder}/{name}-00000-of-00001.parquet": parquet(made) for name, made in splits.items()}


def card(*configs: str) -> bytes:
    """What the hub shows of a dataset, with its configurations, each in a folder."""
    lines = (f"- config_name: {name}\n  data_dir: {name}\n" for name in configs)
    return f"---\nconfigs:\n{''.join(lines)}---\nPictures.\n".encode()


def both(red: int = 0, size: tuple[int, int] = (8, 6)) -> dict[str, Any]:
    return {"train": split([0, 1, 2] * 4, red, size), "test": split([0, 1, 2], red, size)}


def save(splits: Any, folder: Path) -> str:
    """Save splits, or one alone, by the package; and how they are named."""
    made = PACKAGE.DatasetDict(splits) if isinstance(splits, dict) else splits
    made.save_to_disk(str(folder))
    return f"hf:{folder}"


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with nothing on it yet; what is fetched is kept beside the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    HfFileSystem.clear_instance_cache()  # it remembers listings by address, which may come again
    with alone(monkeypatch, tmp_path) as made:
        monkeypatch.setattr(PACKAGE.config, "HF_ENDPOINT", made.url)
        monkeypatch.setattr(PACKAGE.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
        monkeypatch.setattr(PACKAGE.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
        for name in ("HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
            monkeypatch.setattr(PACKAGE.config, name, tmp_path / "prepared" / name.lower())
        yield made


def publish(hub: Hub, content: Mapping[str, bytes], name: str = "owner/name") -> str:
    """A commit on the hub."""
    return hub.repositories.setdefault(f"{DATASETS}{name}", Repository()).commit(dict(content))


def refused(name: str) -> str:
    """Why a dataset is refused, on one line."""
    with pytest.raises(UserError) as problem:
        find(name).load(4)
    told = str(problem.value)
    assert "\n" not in told and len(told) < 500
    return told


# From the hub --------------------------------------------------------------------------------------------------------


def test_a_dataset_is_fetched_once_and_without_a_word(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    publish(hub, files(both(red=7, size=(40, 30))))
    client: Any = import_module("huggingface_hub.utils")
    for one in (PACKAGE.utils, client):
        assert not one.are_progress_bars_disabled()
    capfd.readouterr()
    data = find("hf:owner/name").load(8)
    assert capfd.readouterr() == ("", "")
    for one in (PACKAGE.utils, client):
        assert not one.are_progress_bars_disabled() and one.logging.get_verbosity() == logging.WARNING
    assert data.class_names == CLASSES and (len(data.train), len(data.test)) == (12, 3)
    assert data.test.labels.tolist() == [0, 1, 2] and data.train.labels.dtype == np.int64
    assert data.train.read(5).shape == (8, 11, 3) and data.train.read(5)[0, 0].tolist() == [7, 5, 0]
    hub.requests.clear()
    assert find("hf:owner/name").load(8).split_hash() == data.split_hash()
    assert not any(".parquet" in request for request in hub.requests)


def test_other_images_are_another_split(hub: Hub) -> None:
    first = publish(hub, files(both(red=1)))
    second = publish(hub, files(both(red=2)))
    hub.repositories["datasets/owner/name"].names = {"v1": first, "refs/pr/1": second}
    found = {name: find(f"hf:owner/name@{name}").load(4) for name in (first, second, "v1", "refs/pr/1", "main")}
    reds = {name: int(data.train.read(0)[0, 0, 0]) for name, data in found.items()}
    assert reds == {first: 1, second: 2, "v1": 1, "refs/pr/1": 2, "main": 2}
    hashes = {name: data.split_hash() for name, data in found.items()}
    assert hashes[first] == hashes["v1"] != hashes[second] == hashes["refs/pr/1"] == hashes["main"]
    assert refused("hf:owner/name@v2").endswith("has no such revision: name a branch, a tag or a commit of it")


def test_one_of_several_configurations_is_named(hub: Hub) -> None:
    coarse, fine = files(both(red=1), "coarse"), files(both(red=2), "fine")
    earlier = publish(hub, {"README.md": card("coarse"), **coarse})
    publish(hub, {"README.md": card("coarse", "fine"), **coarse, **fine})
    assert find("hf:owner/name:fine").load(4).train.read(0)[0, 0, 0] == 2
    assert find(f"hf:owner/name@{earlier}").load(4).train.read(0)[0, 0, 0] == 1
    for wrong in ("", ":medium"):
        told = refused(f"hf:owner/name{wrong}@main")
        assert told.endswith("name one of its configurations, coarse, fine, as in hf:owner/name:coarse@main")


def test_a_name_without_its_owner_is_looked_up(hub: Hub, tmp_path: Path) -> None:
    publish(hub, files(both()), "owner/pets")
    hub.moved["datasets/pets"] = "datasets/owner/pets"
    assert find("hf:pets").load(4).split_hash() == find("hf:owner/pets:default@main").load(4).split_hash()
    Image.new("RGB", (8, 6)).save(tmp_path / "train.png")
    assert "the hub has no dataset imagefolder" in refused("hf:imagefolder")  # to the package, this folder


def test_pictures_in_class_folders_on_the_hub_are_read(hub: Hub) -> None:
    pictures = {}
    for number, name in enumerate(("ant", "bee")):
        for row in range(3):
            written = io.BytesIO()
            Image.new("RGB", (8, 6), (number, row, 0)).save(written, "PNG")
            pictures[f"train/{name}/{row}.png"] = written.getvalue()
    publish(hub, pictures)
    data = find("hf:owner/name").load(4)
    assert data.class_names == ("ant", "bee") and (len(data.train), len(data.test)) == (4, 2)
    assert [data.test.read(row)[0, 0, 0] for row in range(2)] == data.test.labels.tolist()


def test_what_the_hub_does_not_have_is_said(hub: Hub) -> None:
    hidden = "or it is private and not shown to you: check the name, and run 'hf auth login' or set HF_TOKEN"
    hub.repositories["datasets/owner/private"] = Repository(private=True)
    for name in ("owner/unknown", "owner/private", "unknown"):
        assert refused(f"hf:{name}") == f"the hub has no dataset {name}, {hidden}"
    assert "hf:owner--s/name is no name of a dataset: Cannot have --" in refused("hf:owner--s/name")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({".gitattributes": b""}, "doesn't contain any data files"),
        ({"name.py": b"raise SystemExit('code of a dataset was run')"}, "scripts are no longer supported"),
        ({"README.md": b"---\nconfigs: [\n---\n"}, "while parsing a flow node"),
        ({"data/train.parquet": b"PAR1 cut off"}, "Parquet"),
        ({"train.csv": b"a,b\n1,2\n", "test.csv": b"c\n3\n"}, "because column names don't match"),
    ],
)
def test_what_cannot_be_used_is_told_on_one_line(
    hub: Hub,
    content: dict[str, bytes],
    reason: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    publish(hub, content)
    told = refused("hf:owner/name")
    assert told.startswith("hf:owner/name cannot be loaded: ") and reason in told
    assert told.endswith("; try again, or choose another revision or dataset")
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused("hf:owner/name") == "hf:owner/name needs the package 'datasets': pip install 'probprompt[hub]'"


# Without the hub -----------------------------------------------------------------------------------------------------


def test_without_a_network_what_was_fetched_before_is_used_and_told(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = files(both(red=1), "fine")
    first = publish(hub, {"README.md": card("fine"), **config})
    second = publish(hub, {"README.md": card("fine", "coarse"), **config, **files(both(red=2), "coarse")})
    online = find(f"hf:owner/name:fine@{first}").load(4)
    capfd.readouterr()
    monkeypatch.setattr(PACKAGE.config, "HF_ENDPOINT", "http://127.0.0.1:1")
    for name in (f"owner/name:fine@{first}", f"owner/name@{first}", "owner/name"):
        source = find(f"hf:{name}")
        assert source.load(4).split_hash() == online.split_hash()
        (remark,) = source.notes()
        assert remark.startswith("the hub cannot be reached (")
        assert f": hf:{name} is what was fetched last, commit {first}" in remark
        assert remark.endswith("configuration fine") is (":" not in name)
    for revision in (second, "main"):
        told = refused(f"hf:owner/name@{revision}")
        assert told.endswith(f"is the commit {first}: see that the network is there, or name that commit")
    assert "no copy of hf:owner/name:coarse can be used: Couldn't find cache" in refused("hf:owner/name:coarse")
    assert refused("hf:owner/other").endswith("hf:owner/other was not fetched before: see that the network is there")
    assert refused("hf:csv").endswith("is without its owner: see that the network is there, or write hf:owner/name")
    assert capfd.readouterr() == ("", "") and not caplog.records
    assert not PACKAGE.config.HF_HUB_OFFLINE


def test_who_wants_no_network_is_not_given_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, files(both()))
    find("hf:owner/name").load(4)
    hub.requests.clear()
    monkeypatch.setattr(PACKAGE.config, "HF_HUB_OFFLINE", True)
    assert "(HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set): hf:owner/name is what" in find("hf:owner/name").notes()[0]
    assert not hub.requests


@pytest.mark.parametrize(
    ("code", "headers", "told"),
    [
        (403, {}, "the hub does not give its files; try again"),
        (401, {"X-Error-Code": "GatedRepo"}, "You must be authenticated to access it; run 'hf auth login' or set HF_T"),
    ],
)
def test_what_the_hub_shows_but_does_not_give(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, code: int, headers: dict[str, str], told: str
) -> None:
    """An older copy, which the package would take, does not stand for it."""
    publish(hub, files(both(red=1)))
    if not headers:
        find("hf:owner/name").load(4)
    publish(hub, files(both(red=2)))

    def refuse(_: Hub, to: BaseHTTPRequestHandler, body: bytes, **more: str) -> None:
        say(to, code, {"error": "Not for you"}, headers)

    for page in [pattern for pattern in ROUTES if "resolve" in pattern]:
        monkeypatch.setitem(ROUTES, page, refuse)
    assert told in refused("hf:owner/name")


# Splits and classes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_the_side_that_is_stored_is_recorded(tmp_path: Path, validation: float) -> None:
    source = find(save(both(size=(400, 300)), tmp_path / "saved"))
    for side in (73, None):
        data = source.load(side)
        if validation:
            data = source.hold_out(data, validation)
        for images in (data.train, data.test):
            loaded = load(images, torch.device("cpu"), lambda _: None)
            assert loaded.describe()["stored_side"] == (side or "full")
            assert int(loaded.store.sizes.min()) == (side or 300)


def test_a_validation_split_is_the_test_set_where_there_is_no_other(hub: Hub) -> None:
    publish(hub, files({"train": split([0, 1, 2] * 4), "validation": split([2, 1, 0])}))
    source = find("hf:owner/name")
    data = source.load(4)
    assert data.test.names[0].startswith("validation@") and data.test.labels.tolist() == [2, 1, 0]
    assert source.notes() == []


def test_of_a_training_split_alone_a_part_is_held_out(hub: Hub) -> None:
    publish(hub, files({"train": split([0, 1, 2] * 5)}))
    data = find("hf:owner/name").load(4)
    assert (len(data.train), len(data.test)) == (12, 3)
    assert sorted(data.train.names + data.test.names)[0].startswith("train@")


@pytest.mark.parametrize("unlabelled", [[-1, -1], [0, None]])
def test_a_split_without_classes_is_passed_over_and_told(hub: Hub, unlabelled: Labels) -> None:
    train, labelled = split([0, 1, 2] * 5), split([2, 1, 0])
    publish(hub, files({"train": train, "test": split(unlabelled), "validation": labelled}))
    source = find("hf:owner/name")
    assert source.load(4).test.names[0].startswith("validation@")
    (remark,) = source.notes()
    assert "'test' of hf:owner/name has images without a class: the test set is 'validation'" in remark


def test_which_splits_have_classes_decides_about_the_test_set(tmp_path: Path) -> None:
    train, labelled, unlabelled = split([0, 1, 2] * 5), split([2, 1, 0]), split([-1, -1])
    source = find(save({"train": train, "test": unlabelled}, tmp_path / "without"))
    assert (len(source.load(4).train), len(source.load(4).test)) == (12, 3)
    assert "the test set is a part of 'train'" in source.notes()[0]
    for name, split_ in (("column", labelled.remove_columns("label")), ("other", unlabelled)):
        source = find(save({"train": train, "test": split_, "validation": labelled}, tmp_path / name))
        assert "'test'" in source.notes()[0] and "the test set is 'validation'" in source.notes()[0]
    assert find(save({"train": train, "test": labelled, "validation": unlabelled}, tmp_path / "all")).notes() == []
    told = refused(save({"train": split([0, -1])}, tmp_path / "train"))
    assert told.endswith("'train' has images without a class: choose a dataset that has them")


def test_a_split_without_images_is_as_none(hub: Hub, tmp_path: Path) -> None:
    full, empty = split([0, 1, 2] * 5), split([])
    publish(hub, files({"train": full, "test": empty}))
    source = find("hf:owner/name")
    assert len(source.load(4).test) == 3 and source.notes() == []
    told = refused(save({"train": full, "test": empty}, tmp_path / "saved"))  # written by the package, but not read
    assert told.endswith("save it anew, without splits that are empty")
    publish(hub, files({"train": empty, "test": full}))
    assert refused("hf:owner/name").endswith("has no split 'train' with images, only test: choose another dataset")


def test_classes_without_images_are_left_out_and_told(tmp_path: Path) -> None:
    name = save({"train": split([0, 2] * 5), "test": split([2, 0])}, tmp_path / "saved")
    source = find(name)
    data = source.load(4)
    assert data.class_names == ("ant", "cat")
    assert sorted(set(data.train.labels.tolist())) == [0, 1] and data.test.labels.tolist() == [1, 0]
    assert source.notes() == [f"1 class(es) of {name} have no image and are left out: bee"]


@pytest.mark.parametrize(("train", "test", "side"), [([0, 1], [0, 1, 2], "train"), ([0, 1, 2], [0, 1], "test")])
def test_a_class_of_one_side_alone_is_refused(tmp_path: Path, train: list[int], test: list[int], side: str) -> None:
    told = refused(save({"train": split(train), "test": split(test)}, tmp_path / "saved"))
    assert f"the split '{side}' has no image of cat, which another split has: choose" in told


def test_splits_of_other_columns_are_refused(tmp_path: Path) -> None:
    turned = split([0, 1, 2]).cast_column("label", PACKAGE.ClassLabel(names=list(reversed(CLASSES))))
    renamed = split([0, 1, 2]).rename_column("img", "image")
    for column, other in (("label", turned), ("img", renamed)):
        told = refused(save({"train": split([0, 1, 2]), "test": other}, tmp_path / column))
        assert told.endswith(f"'test' has another column '{column}' than 'train': save both with the same features")


def test_of_several_labels_the_usual_one_is_taken_and_others_are_refused(tmp_path: Path) -> None:
    fine, plain = split([0, 1, 2] * 2), PACKAGE.Value("int64")
    other = fine.rename_column("label", "fine_label").add_column("coarse_label", [0] * 6, feature=FEATURES["label"])
    assert find(save(other, tmp_path / "fine")).load(4).class_names == CLASSES
    told = refused(save(fine.cast_column("label", plain), tmp_path / "numbers"))
    assert told.endswith("one of class labels, but its columns are img (Image), label (Value)")


# On disk -------------------------------------------------------------------------------------------------------------


def test_what_the_package_saves_is_read_and_told_apart(tmp_path: Path) -> None:
    for name, red in (("one", 1), ("other", 2)):
        save(split([0, 2] * 5, red, (40, 30)), tmp_path / name)
    one, again, other = (find(f"hf:{name}").load(8) for name in ("one", tmp_path / "one", "other"))
    assert one.class_names == ("ant", "cat") and (len(one.train), len(one.test)) == (8, 2)
    assert one.split_hash() == again.split_hash() != other.split_hash()
    assert one.test.read(0).shape == (8, 11, 3) and one.test.read(0)[0, 0, 0] == 1
    (tmp_path / "one" / "dataset_info.json").write_text("{")
    told = refused("hf:one")
    assert told.startswith("hf:one cannot be loaded: ") and "; save it anew" in told


def test_what_is_neither_a_name_nor_saved_is_refused(hub: Hub, tmp_path: Path) -> None:
    publish(hub, files(both()), "my/photos")
    (tmp_path / "my" / "photos").mkdir(parents=True)
    for name in ("my", "my/photos", "my/photos:default@main"):
        told = refused(f"hf:{name}")
        assert "is a folder, but none that datasets has saved: write hf:owner/name or" in told
        assert told.endswith("class folders of your own go without hf:")
    assert "is neither a name nor a folder: write hf:owner/name or hf:name" in refused("hf:/no/such/folder")
    assert not hub.requests


def test_the_form_that_a_split_was_saved_in_does_not_matter(tmp_path: Path) -> None:
    plain = split([0, 1, 2] * 2, red=9)
    forms = {
        "tensors": plain.with_format("torch"),
        "table": plain.with_format("pandas"),
        "columns": plain.with_format("numpy", columns=["img"]),
        "encoded": plain.cast_column("img", PACKAGE.Image(decode=False)),
    }
    for name, made in forms.items():
        data = find(save(made, tmp_path / name)).load(4)
        assert data.train.labels.tolist() == [0, 1, 2] and data.train.read(0)[0, 0, 0] == 9


def test_an_image_that_is_missing_or_damaged_is_unreadable(tmp_path: Path) -> None:
    rows = [{"bytes": b"no picture", "path": None}, None]
    encoded = PACKAGE.Features({**FEATURES, "img": PACKAGE.Image(decode=False)})
    made = PACKAGE.Dataset.from_dict({"img": rows, "label": [0, 1]}, features=encoded)
    made = made.cast_column("img", PACKAGE.Image())
    images = find(save({"train": made, "test": made}, tmp_path / "saved")).load(4).train
    for row, reason in enumerate(("no image format that can be read", "there is no image in this row")):
        with pytest.raises(UnreadableImageError, match=reason):
            images.read(row)


# The command ---------------------------------------------------------------------------------------------------------


def test_a_run_on_a_dataset_of_the_hub(hub: Hub, probprompt: Command, tmp_path: Path) -> None:
    publish(hub, files(both(size=(32, 32))))
    settings = ("--backbone", "test_vit", "--set", "backbone.weights=random", "--method", "nearest-mean", "--tasks", 3)
    answer = probprompt("train", "hf:owner/name", *settings, "--out", tmp_path / "run")
    assert answer.code == 0 and answer.out.startswith("opening data: done\nreading images: done\n"), answer
    assert answer.err == ""
    answer = probprompt("train", "hf:owner/other", *settings, "--out", tmp_path / "other")
    assert answer.code and "the hub has no dataset owner/other" in answer.err and "Traceback" not in answer.err
