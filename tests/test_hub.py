"""Datasets of the Hugging Face hub: written by its package, downloaded from a stand-in over real HTTP."""

import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from itertools import product
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


def split(labels: Labels, red: int = 0, size: tuple[int, int] = (8, 6)) -> Any:
    """Images of these classes, each in its own color."""
    pictures = [Image.new("RGB", size, (red, row, 0)) for row in range(len(labels))]
    return PACKAGE.Dataset.from_dict({"img": pictures, "label": list(labels)}, features=FEATURES)


def files(splits: Mapping[str, Any], folder: str = "data") -> dict[str, bytes]:
    """Return splits as the package sends them to the hub."""
    found = {}
    for name, made in splits.items():
        written = io.BytesIO()
        made.to_parquet(written)
        found[f"{folder}/{name}-00000-of-00001.parquet"] = written.getvalue()
    return found


def card(*configs: str) -> bytes:
    """The card of a dataset with configurations, each in a folder."""
    lines = (f"- config_name: {name}\n  data_dir: {name}\n" for name in configs)
    return f"---\nconfigs:\n{''.join(lines)}---\nPictures.\n".encode()


def both(red: int = 0, size: tuple[int, int] = (8, 6)) -> dict[str, Any]:
    return {"train": split([0, 1, 2] * 4, red, size), "test": split([0, 1, 2], red, size)}


def save(splits: Any, folder: Path) -> str:
    """Save one or several splits with the package and return their name."""
    made = PACKAGE.DatasetDict(splits) if isinstance(splits, dict) else splits
    made.save_to_disk(str(folder))
    return f"hf:{folder}"


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty hub; downloads are kept in the folder of the test."""
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
    return hub.repositories.setdefault(f"{DATASETS}{name}", Repository()).commit(dict(content))


def refused(name: str) -> str:
    """Return the message, of one line, with which a dataset is refused."""
    with pytest.raises(UserError) as problem:
        find(name).load(4)
    message = str(problem.value)
    assert "\n" not in message and len(message) < 500
    return message


def test_dataset_is_downloaded_once_and_silently(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_revisions_and_their_split_hashes(hub: Hub) -> None:
    first = publish(hub, files(both(red=1)))
    second = publish(hub, files(both(red=2)))
    hub.repositories["datasets/owner/name"].names = {"v1": first, "refs/pr/1": second}
    found = {name: find(f"hf:owner/name@{name}").load(4) for name in (first, second, "v1", "refs/pr/1", "main")}
    reds = {name: int(data.train.read(0)[0, 0, 0]) for name, data in found.items()}
    assert reds == {first: 1, second: 2, "v1": 1, "refs/pr/1": 2, "main": 2}
    hashes = {name: data.split_hash() for name, data in found.items()}
    assert hashes[first] == hashes["v1"] != hashes[second] == hashes["refs/pr/1"] == hashes["main"]
    assert "revision not found" in refused("hf:owner/name@v2")


def test_one_of_several_configurations(hub: Hub) -> None:
    coarse, fine = files(both(red=1), "coarse"), files(both(red=2), "fine")
    earlier = publish(hub, {"README.md": card("coarse"), **coarse})
    publish(hub, {"README.md": card("coarse", "fine"), **coarse, **fine})
    assert find("hf:owner/name:fine").load(4).train.read(0)[0, 0, 0] == 2
    assert find(f"hf:owner/name@{earlier}").load(4).train.read(0)[0, 0, 0] == 1
    for wrong in ("", ":medium"):
        assert refused(f"hf:owner/name{wrong}@main").endswith("such as hf:owner/name:coarse@main. All: coarse, fine.")


def test_name_without_owner_is_looked_up(hub: Hub, tmp_path: Path) -> None:
    publish(hub, files(both()), "owner/pets")
    hub.moved["datasets/pets"] = "datasets/owner/pets"
    assert find("hf:pets").load(4).split_hash() == find("hf:owner/pets:default@main").load(4).split_hash()
    Image.new("RGB", (8, 6)).save(tmp_path / "train.png")
    assert "no dataset imagefolder" in refused("hf:imagefolder")  # to the package, this folder


def test_images_in_class_folders_on_the_hub(hub: Hub) -> None:
    pictures = {}
    for number, row in product(range(2), range(3)):
        written = io.BytesIO()
        Image.new("RGB", (8, 6), (number, row, 0)).save(written, "PNG")
        pictures[f"train/{CLASSES[number]}/{row}.png"] = written.getvalue()
    publish(hub, pictures)
    data = find("hf:owner/name").load(4)
    assert data.class_names == ("ant", "bee") and (len(data.train), len(data.test)) == (4, 2)
    assert [data.test.read(row)[0, 0, 0] for row in range(2)] == data.test.labels.tolist()


def test_missing_and_private_datasets_are_refused(hub: Hub) -> None:
    hub.repositories["datasets/owner/private"] = Repository(private=True)
    for name in ("owner/unknown", "owner/private", "unknown"):
        message = refused(f"hf:{name}")
        assert f"no dataset {name}, or it is private" in message and "set HF_TOKEN" in message
    assert "hf:owner--s/name: Cannot have --" in refused("hf:owner--s/name")


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
def test_unusable_datasets(hub: Hub, content: dict[str, bytes], reason: str, capfd: Any, caplog: Any) -> None:
    publish(hub, content)
    message = refused("hf:owner/name")
    assert message.startswith("Could not load hf:owner/name: ") and reason in message
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused("hf:owner/name").endswith("'datasets'. Run: pip install 'probprompt[hub]'")


def test_without_network_the_cache_is_used(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: Any
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
        assert remark.startswith("Could not reach the Hub (")
        assert f"last download of hf:{name}: commit {first}" in remark
        assert remark.endswith("configuration fine.") is (":" not in name)
    for revision in (second, "main"):
        assert f"is commit {first}" in refused(f"hf:owner/name@{revision}")
    assert "no usable copy of hf:owner/name:coarse exists (Couldn't find cache" in refused("hf:owner/name:coarse")
    assert "hf:owner/other was never downloaded" in refused("hf:owner/other")
    assert refused("hf:csv").endswith("write hf:owner/name.")
    assert capfd.readouterr() == ("", "") and not caplog.records
    assert not PACKAGE.config.HF_HUB_OFFLINE


def test_offline_mode_sends_no_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, files(both()))
    find("hf:owner/name").load(4)
    hub.requests.clear()
    monkeypatch.setattr(PACKAGE.config, "HF_HUB_OFFLINE", True)
    assert (
        "(HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set). Using the last download of hf:owner/name"
        in find("hf:owner/name").notes()[0]
    )
    assert not hub.requests


@pytest.mark.parametrize(
    ("code", "headers", "message"),
    [
        (403, {}, "the Hub does not send its files"),
        (401, {"X-Error-Code": "GatedRepo"}, "You must be authenticated to access it. Run 'hf auth login' or set HF_T"),
    ],
)
def test_gated_datasets_are_refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, code: int, headers: dict[str, str], message: str
) -> None:
    """An older copy, which the package would take, does not replace it."""
    publish(hub, files(both(red=1)))
    if not headers:
        find("hf:owner/name").load(4)
    publish(hub, files(both(red=2)))

    def refuse(_: Hub, to: BaseHTTPRequestHandler, body: bytes, **more: str) -> None:
        say(to, code, {"error": "Not for you"}, headers)

    for page in [pattern for pattern in ROUTES if "resolve" in pattern]:
        monkeypatch.setitem(ROUTES, page, refuse)
    assert message in refused("hf:owner/name")


FULL, SOME = [0, 1, 2] * 5, [2, 1, 0]


@pytest.mark.parametrize(
    ("splits", "test", "size", "remark"),
    [
        ({"train": FULL, "validation": SOME}, "validation@", 3, ""),
        ({"train": FULL}, "train@", 3, ""),
        ({"train": FULL, "test": []}, "train@", 3, ""),
        ({"train": FULL, "test": [-1, -1]}, "train@", 3, "The test set is a part of 'train'"),
        ({"train": FULL, "test": [-1, -1], "validation": SOME}, "validation@", 3, "The test set is 'validation'"),
        ({"train": FULL, "test": [0, None], "validation": SOME}, "validation@", 3, "The test set is 'validation'"),
        ({"train": FULL, "test": None, "validation": SOME}, "validation@", 3, "The test set is 'validation'"),
        ({"train": FULL, "test": SOME, "validation": [-1, -1]}, "test@", 3, ""),
        ({"train": [0, 2] * 5, "test": [2, 0]}, "test@", 2, "without images: bee"),
    ],
)
def test_splits_for_testing_and_their_classes(
    hub: Hub, tmp_path: Path, splits: dict[str, Any], test: str, size: int, remark: str
) -> None:
    plain = split(SOME).remove_columns("label")
    made = {name: plain if labels is None else split(labels) for name, labels in splits.items()}
    if [] in splits.values():  # the package writes an empty split, but cannot read it
        assert refused(save(made, tmp_path / "saved")).endswith("without empty splits.")
        publish(hub, files(made))
    source = find("hf:owner/name" if [] in splits.values() else save(made, tmp_path / "saved"))
    data = source.load(4)
    assert len(data.test) == size and all(name.startswith(test) for name in data.test.names)
    assert len(data.class_names) == size and set(data.train.labels.tolist()) == set(range(size))
    assert [remark in found for found in source.notes()] == [True] * bool(remark)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [], "test": FULL}, "has no split 'train' with images. It has test"),
        ({"train": [0, -1]}, "'train' of hf:owner/name has images without a class"),
        ({"train": [0, 1], "test": [0, 1, 2]}, "Split 'train' of hf:owner/name lacks classes of another split: cat"),
        ({"train": [0, 1, 2], "test": [0, 1]}, "Split 'test' of hf:owner/name lacks classes of another split: cat"),
    ],
)
def test_unusable_splits_are_refused(hub: Hub, splits: dict[str, Labels], message: str) -> None:
    publish(hub, files({name: split(labels) for name, labels in splits.items()}))
    assert message in refused("hf:owner/name")


def test_columns_of_the_splits(tmp_path: Path) -> None:
    turned = split([0, 1, 2]).cast_column("label", PACKAGE.ClassLabel(names=list(reversed(CLASSES))))
    for column, other in (("label", turned), ("img", split([0, 1, 2]).rename_column("img", "image"))):
        message = refused(save({"train": split([0, 1, 2]), "test": other}, tmp_path / column))
        assert f"column '{column}' differs from 'train'" in message
    fine, plain = split([0, 1, 2] * 2), PACKAGE.Value("int64")
    other = fine.rename_column("label", "fine_label").add_column("coarse_label", [0] * 6, feature=FEATURES["label"])
    assert find(save(other, tmp_path / "fine")).load(4).class_names == CLASSES
    message = refused(save(fine.cast_column("label", plain), tmp_path / "numbers"))
    assert message.endswith("It has: img (Image), label (Value).")


def test_saved_datasets_and_their_split_hashes(tmp_path: Path) -> None:
    for name, red in (("one", 1), ("other", 2)):
        save(split([0, 2] * 5, red, (40, 30)), tmp_path / name)
    one, again, other = (find(f"hf:{name}").load(8) for name in ("one", tmp_path / "one", "other"))
    assert one.class_names == ("ant", "cat") and (len(one.train), len(one.test)) == (8, 2)
    assert one.split_hash() == again.split_hash() != other.split_hash()
    assert one.test.read(0).shape == (8, 11, 3) and one.test.read(0)[0, 0, 0] == 1
    for side in (8, None):
        source = find("hf:one")
        loaded = load(source.hold_out(source.load(side), 0.25).test, torch.device("cpu"), lambda _: None)
        assert loaded.describe()["stored_side"] == (side or "full") and int(loaded.store.sizes.min()) == (side or 30)
    (tmp_path / "one" / "dataset_info.json").write_text("{")
    assert refused("hf:one").startswith("Could not load hf:one: ")


def test_folder_that_is_no_dataset_is_refused(hub: Hub, tmp_path: Path) -> None:
    publish(hub, files(both()), "my/photos")
    (tmp_path / "my" / "photos").mkdir(parents=True)
    for name in ("my", "my/photos", "my/photos:default@main"):
        assert "is a folder, but not saved by datasets" in refused(f"hf:{name}")
    assert "is neither a dataset name nor a folder" in refused("hf:/no/such/folder")
    assert not hub.requests


def test_formats_of_saved_splits(tmp_path: Path) -> None:
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


def test_missing_and_damaged_images_are_unreadable(tmp_path: Path) -> None:
    rows = [{"bytes": b"no picture", "path": None}, None]
    encoded = PACKAGE.Features({**FEATURES, "img": PACKAGE.Image(decode=False)})
    made = PACKAGE.Dataset.from_dict({"img": rows, "label": [0, 1]}, features=encoded)
    made = made.cast_column("img", PACKAGE.Image())
    images = find(save({"train": made, "test": made}, tmp_path / "saved")).load(4).train
    for row, reason in enumerate(("not a supported image format", "this row has no image")):
        with pytest.raises(UnreadableImageError, match=reason):
            images.read(row)


def test_train_command(hub: Hub, probprompt: Command, tmp_path: Path) -> None:
    publish(hub, files(both(size=(32, 32))))
    settings = ("--backbone", "test_vit", "--set", "backbone.weights=random", "--method", "nearest-mean", "--tasks", 3)
    answer = probprompt("train", "hf:owner/name", *settings, "--out", tmp_path / "run")
    assert answer.code == 0 and answer.out.startswith("opening data: done\nreading images: done\n"), answer
    assert answer.err == ""
    answer = probprompt("train", "hf:owner/other", *settings, "--out", tmp_path / "other")
    assert answer.code and "no dataset owner/other" in answer.err and "Traceback" not in answer.err
