"""Benchmarks by name and folders of class folders, as people have them."""

import os
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from probprompt.config import parse_config
from probprompt.data.datasets import Folder, ImageData, ImageSet, find, registered, stratified_split
from probprompt.data.image_store import Loaded, check_readable, load
from probprompt.data.published import Cifar100
from probprompt.errors import UserError
from probprompt.progress import ProgressCallback
from probprompt.runs.train import describe, prepare

Settings = Callable[..., dict[str, Any]]

CPU = torch.device("cpu")


def draw(path: Path, colour: int = 0, size: tuple[int, int] = (6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 255 - colour, 7)).save(path)
    return path


def folder(root: Path, **classes: int) -> Path:
    """Class folders with this number of images each, all of another color."""
    for label, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            draw(root / name / f"{index:02}.png", 40 * label + index)
    return root


def read(root: Path, test: Path | None = None, fraction: float = 0.2) -> ImageData:
    return find(str(root), str(test) if test else None, fraction).load(None)


def count(images: ImageSet) -> dict[int, int]:
    return dict(Counter(images.labels.tolist()))


# By name


def test_emoji_r_has_twenty_classes_on_both_sides() -> None:
    source = find("emoji-r")
    data = source.load(None)
    assert len(data.class_names) == len(set(data.class_names)) == 20
    assert set(count(data.train)) == set(count(data.test)) == set(range(20))
    assert not set(data.train.names) & set(data.test.names)
    pixels = data.test.read(len(data.test) - 1)
    assert pixels.shape == (64, 64, 3) and pixels.dtype == np.uint8
    for images in (data.train, data.test):
        for name, label in zip(images.names, images.labels.tolist(), strict=True):
            assert name.startswith(f"{data.class_names[label]}/")
    held = source.hold_out(data, 0.2)
    styles = [{name.rpartition(".")[2] for name in side.names} for side in (held.train, held.test)]
    assert styles[1] == {"fluent-emoji-high-contrast", "twemoji"} and not styles[0] & styles[1], "whole styles"
    assert sorted(held.train.names + held.test.names) == sorted(data.train.names)
    assert len(count(held.train)) == len(count(held.test)) == 20


def test_a_name_that_cannot_be_found_is_met_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither a benchmark nor a folder.*class folders. Did you mean 'emoji-r'"):
        find("emoji_r")
    with pytest.raises(UserError, match=r"neither a benchmark nor a folder.*Expected one of: .*emoji-r"):
        find("/no/such/place")
    with pytest.raises(UserError, match="is a file"):
        find(str(draw(tmp_path / "a.png")))
    assert "emoji-r" in registered()
    assert all(kind.name == name and kind.summary and kind.tasks >= 1 for name, kind in registered().items())


# Class folders


def test_class_folders_become_classes_in_order_of_their_names(tmp_path: Path) -> None:
    source = find(str(folder(tmp_path, cat=5, ant=10, bee=5)))
    assert isinstance(source, Folder) and (source.root, source.test) == (tmp_path, None)
    data = source.load(None)
    assert data.class_names == ("ant", "bee", "cat")
    assert count(data.train) == {0: 8, 1: 4, 2: 4}
    assert count(data.test) == {0: 2, 1: 1, 2: 1}
    every = {*data.train.names, *data.test.names}
    assert len(every) == 20 and "bee/04.png" in every
    for images in (data.train, data.test):
        for index, name in enumerate(images.names):
            assert data.class_names[images.labels[index]] == name.split("/")[0]
            np.testing.assert_array_equal(images.read(index), np.asarray(Image.open(tmp_path / name)))
    assert source.load(3).train.read(0).shape == (3, 4, 3), "where it is asked for"


@pytest.mark.parametrize("sides", [("test",), ("val",), ("val", "test")])
def test_train_and_test_folders_inside_are_used(tmp_path: Path, sides: tuple[str, ...]) -> None:
    folder(tmp_path / "train", ant=3, bee=1)
    for extra, side in enumerate(sides):  # of two the test folder is preferred
        folder(tmp_path / side, ant=1 + extra, bee=2)
    data = read(tmp_path)
    assert data.class_names == ("ant", "bee")
    assert (count(data.train), count(data.test)) == ({0: 3, 1: 1}, {0: len(sides), 1: 2})


def test_train_and_test_beside_other_folders_are_classes(tmp_path: Path) -> None:
    assert read(folder(tmp_path, train=2, test=2, bus=2)).class_names == ("bus", "test", "train")


def test_a_separate_test_folder_leaves_all_others_for_training(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "one", ant=3, bee=4), folder(tmp_path / "two", bee=2, ant=1)
    data = read(one, two)
    assert (count(data.train), count(data.test)) == ({0: 3, 1: 4}, {0: 1, 1: 2})
    with pytest.raises(UserError, match=r"nowhere is not a folder.*--test"):
        read(one, tmp_path / "nowhere")
    three = folder(tmp_path / "three", ant=2, bee=2, cat=2)
    for train, test in ((three, two), (two, three)):
        with pytest.raises(UserError, match=r"two has no folder for .*cat"):
            read(train, test)


def test_hidden_files_and_files_that_are_no_images_do_not_count(tmp_path: Path) -> None:
    root = folder(tmp_path / ".cache" / "data", ant=3, bee=3)
    draw(root / "ant" / "._00.png")
    draw(root / "ant" / ".thumbnails" / "00.png")
    draw(root / ".git" / "00.png")
    draw(root / "loose.png")
    (root / "ant" / "notes.txt").write_text("seen in June")
    (root / "ant" / "Thumbs.db").write_bytes(b"\0")
    (root / "bee" / "folder.png").mkdir()
    draw(root / "bee" / "2024" / "june" / "A.JPG")
    data = read(root)
    assert data.class_names == ("ant", "bee")
    every = {*data.train.names, *data.test.names}
    assert len(every) == 7 and every >= {"bee/2024/june/A.JPG", "bee/00.png"}, "folders of a class belong to it"


@pytest.mark.parametrize(
    ("classes", "reason"),
    [
        ({"ant": 3, "bee": 0, "cat": 3}, "/bee .*Add images"),
        ({}, "0 class folder.*at least 2.$"),
        ({"ant": 5}, "1 class folder.*at least 2.$"),
        ({"ant": 3, "bee": 1}, "'bee' has 1 image.*at least 2"),
    ],
)
def test_classes_that_cannot_be_learned_are_refused(tmp_path: Path, classes: dict[str, int], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read(folder(tmp_path, **classes))


def test_loose_images_are_met_with_a_hint(tmp_path: Path) -> None:
    for index in range(3):
        draw(tmp_path / f"{index}.png")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"Move its 3 image\(s\)"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Cat", "cat"),
        (unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")),
        (unicodedata.normalize("NFC", "É"), unicodedata.normalize("NFD", "é")),
        ("straße", "STRASSE"),
        ("cat", "cat "),
    ],
    ids=["case", "unicode", "both", "sharp s", "blank"],
)
def test_two_classes_of_one_name_are_refused(tmp_path: Path, one: str, other: str) -> None:
    folder(tmp_path, **{one: 2})
    if (tmp_path / other).exists():
        pytest.skip("this file system takes the two for one")
    folder(tmp_path, **{other: 2})
    with pytest.raises(UserError, match="Merge or rename one") as problem:
        read(tmp_path)
    assert repr(one) in str(problem.value) and repr(other) in str(problem.value)


# The split


@pytest.mark.parametrize(
    ("images", "fraction", "held"),
    [(2, 0.2, 1), (2, 0.9, 1), (10, 0.2, 2), (10, 0.26, 3), (10, 0.01, 1), (10, 0.99, 9), (13, 0.5, 6)],
)
def test_a_fraction_of_every_class_is_held_out(images: int, fraction: float, held: int) -> None:
    labels = np.arange(3 * images, dtype=np.int64) % 3
    kept, out = stratified_split(labels, fraction, "test", ("ant", "bee", "cat"))
    assert sorted(kept + out) == list(range(3 * images))
    assert Counter(labels[out].tolist()) == {0: held, 1: held, 2: held}


def test_the_split_is_the_same_every_time_and_for_everybody(tmp_path: Path) -> None:
    root = folder(tmp_path / "here", ant=20, bee=20)
    first, second = read(root), read(root)
    assert (first.train.names, first.test.names) == (second.train.names, second.test.names)
    elsewhere = read(Path(shutil.copytree(root, tmp_path / "there")))
    assert first.test.names == elsewhere.test.names
    assert first.split_hash() == elsewhere.split_hash()
    three = read(folder(tmp_path / "three", ant=20, bee=20, cow=7))
    assert set(first.test.names) == {name for name in three.test.names if not name.startswith("cow")}
    _, held = stratified_split(np.zeros(20, dtype=np.int64), 0.2, "test", ("ant",))
    assert held == [1, 17, 18, 19], "as it always was: runs of different versions must be comparable"


def test_classes_and_purposes_are_not_split_alike() -> None:
    held = [
        stratified_split(np.zeros(50, dtype=np.int64), 0.3, purpose, (name,))[1]
        for purpose, name in (("test", "ant"), ("test", "bee"), ("validation", "ant"))
    ]
    assert held[0] != held[1] and held[0] != held[2]


def test_the_split_hash_changes_when_a_file_moves(tmp_path: Path) -> None:
    train, test = folder(tmp_path / "train", ant=3, bee=3), folder(tmp_path / "test", ant=3, bee=3)
    hashes = [read(tmp_path).split_hash()]
    for old, new in (
        (train / "ant" / "00.png", train / "bee" / "moved.png"),  # to another class
        (train / "ant" / "01.png", test / "ant" / "moved.png"),  # to the other side
        (test / "ant" / "moved.png", test / "ant" / "renamed.png"),
    ):
        old.rename(new)
        hashes.append(read(tmp_path).split_hash())
    (train / "bee").rename(train / "cow")
    (test / "bee").rename(test / "cow")
    hashes.append(read(tmp_path).split_hash())
    assert len(set(hashes)) == len(hashes) == 5
    data = read(tmp_path)
    turned = data.train.subset(range(len(data.train) - 1, -1, -1))
    assert replace(data, train=turned).split_hash() == hashes[-1], "and not with the order"


def test_a_file_name_that_is_no_unicode_has_a_hash(tmp_path: Path) -> None:
    folder(tmp_path, ant=2, bee=2)
    try:
        (tmp_path / "ant" / "00.png").rename(os.fsdecode(os.fsencode(tmp_path / "ant") + b"/caf\xe9.png"))
    except OSError:
        pytest.skip("this file system takes unicode only")
    assert len(read(tmp_path).split_hash()) == 64


def test_the_split_hash_does_not_change_with_the_seeds(settings: Settings) -> None:
    runs = [
        prepare(parse_config(settings(seeds=dict.fromkeys(("order", "init", "data"), seed))), CPU, ProgressCallback())
        for seed in (0, 5)
    ]
    assert runs[0].split_hash == runs[1].split_hash
    assert runs[0].stream != runs[1].stream


def test_validation_holds_out_training_images_only(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=20, bee=10)
    folder(tmp_path / "test", ant=4, bee=4)
    data = read(tmp_path)
    held = find(str(tmp_path)).hold_out(data, 0.3)
    assert (count(held.train), count(held.test)) == ({0: 14, 1: 7}, {0: 6, 1: 3})
    assert sorted(held.train.names + held.test.names) == sorted(data.train.names)
    assert held.class_names == data.class_names
    assert find(str(tmp_path)).hold_out(data, 0.3).test.names == held.test.names
    for index, name in enumerate(held.test.names):
        np.testing.assert_array_equal(held.test.read(index), np.asarray(Image.open(tmp_path / "train" / name)))


def test_few_training_images_of_each_class_are_the_same_ones_every_time(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=20, bee=10, cow=2)
    folder(tmp_path / "test", ant=4, bee=4, cow=4)
    data, source = read(tmp_path), find(str(tmp_path))
    few, fewer = (source.select(data, 0.0, number) for number in (5, 3))
    assert count(few.train) == {0: 5, 1: 5, 2: 2} and count(few.test) == count(data.test)
    assert set(fewer.train.names) < set(few.train.names) < set(data.train.names)
    assert source.select(data, 0.0, 5).split_hash() == few.split_hash() != data.split_hash()
    assert source.select(data, 0.0, None).split_hash() == data.split_hash()
    held = source.select(data, 0.3, 5)
    assert count(held.train) == {0: 5, 1: 5, 2: 1} and not set(held.train.names) & set(held.test.names)


def test_a_run_with_validation_never_sees_the_test_images(settings: Settings) -> None:
    plain, validated = (
        prepare(parse_config(settings(data={"validation": share})), CPU, ProgressCallback()) for share in (0.0, 0.25)
    )
    trained, tested = set(plain.learner.images.names), set(plain.scorer.images.names)
    assert set(validated.learner.images.names) | set(validated.scorer.images.names) == trained
    assert not tested & trained
    assert len(validated.scorer.images.names) == 12


# Reading


def test_loading_decodes_every_image_once_and_keeps_their_order(tmp_path: Path) -> None:
    data, advanced = read(folder(tmp_path, ant=10, bee=10)), list[int]()
    loaded = load(data.train, CPU, advanced.append, workers=4)
    assert sum(advanced) == len(loaded.store) == 16
    assert loaded.names == data.train.names and loaded.unreadable == ()
    assert loaded.labels.tolist() == data.train.labels.tolist()
    for index in range(16):
        stored = loaded.store.canvas(torch.tensor([index]))[0].permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(stored, data.train.read(index))


def spoiled(root: Path, *files: str) -> tuple[Loaded, Loaded]:
    """Both sides of a folder, of which these files hold no picture."""
    for file in files:
        (root / file).write_bytes(b"no picture")
    data = read(root)
    return load(data.train, CPU, lambda _: None, workers=2), load(data.test, CPU, lambda _: None, workers=2)


@pytest.fixture
def both(tmp_path: Path) -> Path:
    folder(tmp_path / "train", ant=14, bee=4)
    folder(tmp_path / "test", ant=2, bee=2)
    return tmp_path


@pytest.mark.parametrize("number", [1, 9, 13])
def test_unreadable_files_stop_the_run_and_ten_are_listed(both: Path, number: int) -> None:
    sides = spoiled(both, "test/ant/01.png", *[f"train/ant/{index:02}.png" for index in range(number)])
    with pytest.raises(UserError, match=rf"(?s){number + 1} unreadable.*--skip-unreadable") as problem:
        check_readable(sides, ("ant", "bee"), skip=False)
    text = str(problem.value)
    assert "ant/00.png: not a supported" in text and text.count("ant/") == min(10, number + 1)
    assert ("and 4 more" in text) is (number == 13)


def test_unreadable_files_may_be_skipped_and_are_named(both: Path) -> None:
    assert all(check_readable(spoiled(both), ("ant", "bee"), skip) == [] for skip in (True, False))
    train, test = spoiled(both, "train/ant/02.png", "test/ant/01.png")
    assert check_readable((train, test), ("ant", "bee"), skip=True) == ["ant/02.png", "ant/01.png"]
    assert train.names[:3] == ("ant/00.png", "ant/01.png", "ant/03.png")
    assert train.labels.tolist() == [0] * 13 + [1] * 4 and len(train.store) == 17
    third = train.store.canvas(torch.tensor([2]))[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(third, np.asarray(Image.open(both / "train" / "ant" / "03.png")))


@pytest.mark.parametrize("side", ["train", "test", ""])
def test_a_class_may_not_lose_its_last_image(both: Path, side: str) -> None:
    lost = [str(path) for path in (both / side).rglob("*.png") if not side or "bee" in path.parts]
    with pytest.raises(UserError, match=f"'{'bee' if side else 'ant'}'.* remove it"):
        check_readable(spoiled(both, *lost), ("ant", "bee"), skip=True)


def test_a_run_tells_what_it_skipped(settings: Settings, pictures: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    (root / "class3" / "4.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"class3/4\.png"):
        prepare(parse_config(settings(data={"benchmark": str(root)})), CPU, ProgressCallback())
    config = parse_config(settings(data={"benchmark": str(root), "skip_unreadable": True}))
    assert prepare(config, CPU, ProgressCallback()).skipped == ["class3/4.png"]


# What a run says of its images


class Listening(ProgressCallback):
    """Remembers what is noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_what_is_not_as_published_is_noted_and_recorded(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else under the name of a benchmark must not pass for it, also where there are as many images."""
    figures = replace(Cifar100.figures, classes=2, train=8, test=8, train_per_class=(4, 4), test_per_class=(4, 4))
    monkeypatch.setattr(Cifar100, "figures", figures)
    expected = [
        "images are JPEG files, published are images without loss: they were encoded anew",
        "images have 64 x 64 pixels, published are 32 x 32: they were resized",
    ]
    for ending, size, differences in ((".png", 32, []), (".jpg", 64, expected)):
        for place in ("train/cat", "train/dog", "test/cat", "test/dog"):
            for index in range(4):
                draw(tmp_path / ending / place / f"{index}{ending}", index, (size, size))
        data = {"benchmark": "cifar100", "root": str(tmp_path / ending), "tasks": 1}
        workshop = prepare(parse_config(settings(data=data)), CPU, heard := Listening())
        assert describe(workshop, "run").stream.differences == differences
        assert heard.notes == [f"cifar100 differs from the published dataset: {text}" for text in differences]


@pytest.mark.parametrize(("side", "words"), [("train", "training"), ("test", "test")])
def test_classes_without_images_are_named(settings: Settings, tmp_path: Path, side: str, words: str) -> None:
    names = ("n01443537", "n01484850", "n01494475")
    folder(tmp_path / "imagenet-r", **dict.fromkeys(names, 6))
    for which, indices in (("train", range(4)), ("test", range(4, 6))):
        listed = [name for name in names if (which, name) != (side, names[1])]
        lines = [f"{name}/{index:02}.png" for name in listed for index in indices]
        (tmp_path / "imagenet-r" / f"{which}.txt").write_text("\n".join(lines))
    data = {"benchmark": "imagenet-r", "root": str(tmp_path / "imagenet-r"), "tasks": 3}
    with pytest.raises(UserError, match=rf"imagenet-r has no {words} images of .*. Add some, or remove"):
        prepare(parse_config(settings(data=data)), CPU, ProgressCallback())
