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
from probprompt.data.image_store import ImageStore, Loaded, load, refuse_unreadable
from probprompt.data.published import Cifar100
from probprompt.errors import UserError
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs.train import describe, prepare

Settings = Callable[..., dict[str, Any]]

CPU = torch.device("cpu")


def draw(path: Path, colour: int = 0, size: tuple[int, int] = (6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 255 - colour, 7)).save(path)
    return path


def folder(root: Path, **classes: int) -> Path:
    """Class folders with so many pictures each, all of another colour."""
    for label, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            draw(root / name / f"{index:02}.png", 40 * label + index)
    return root


def read(root: Path, test: Path | None = None, fraction: float = 0.2) -> ImageData:
    return find(str(root), str(test) if test else None, fraction).load(None)


def count(images: ImageSet) -> dict[int, int]:
    return dict(Counter(images.labels.tolist()))


def in_memory(images: ImageSet) -> Loaded:
    return load(images, CPU, lambda _: None, workers=2)


# By name


def test_emoji_r_has_twenty_classes_on_both_sides() -> None:
    data = find("emoji-r").load(None)
    assert len(data.class_names) == len(set(data.class_names)) == 20
    assert set(count(data.train)) == set(count(data.test)) == set(range(20))
    assert not set(data.train.names) & set(data.test.names)
    pixels = data.test.read(len(data.test) - 1)
    assert pixels.shape == (64, 64, 3) and pixels.dtype == np.uint8
    for images in (data.train, data.test):
        for name, label in zip(images.names, images.labels.tolist(), strict=True):
            assert name.startswith(f"{data.class_names[label]}/")


def test_all_benchmarks_say_what_they_are() -> None:
    assert "emoji-r" in registered()
    for name, source in registered().items():
        assert source.name == name and source.summary and source.tasks >= 1


def test_an_unknown_name_is_met_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"neither a benchmark nor a folder.*did you mean 'emoji-r'.*class folders"):
        find("emoji_r")
    with pytest.raises(UserError, match=r"neither a benchmark nor a folder.*allowed: .*emoji-r"):
        find("/no/such/place")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a file, not a folder"):
        find(str(draw(tmp_path / "a.png")))


def test_a_benchmark_takes_no_test_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has a test set of its own"):
        find("emoji-r", str(tmp_path))


# Class folders


def test_class_folders_become_classes_in_order_of_their_names(tmp_path: Path) -> None:
    data = read(folder(tmp_path, cat=5, ant=10, bee=5))
    assert data.class_names == ("ant", "bee", "cat")
    assert count(data.train) == {0: 8, 1: 4, 2: 4}
    assert count(data.test) == {0: 2, 1: 1, 2: 1}
    every = {*data.train.names, *data.test.names}
    assert len(every) == 20 and "bee/04.png" in every
    for images in (data.train, data.test):
        for index, name in enumerate(images.names):
            assert data.class_names[images.labels[index]] == name.split("/")[0]
            expected = np.asarray(Image.open(tmp_path / name))
            np.testing.assert_array_equal(images.read(index), expected)


def test_images_are_reduced_to_the_side_that_is_asked_for(tmp_path: Path) -> None:
    for name in ("ant", "bee"):
        for index in range(2):
            draw(tmp_path / name / f"{index}.png", size=(60, 40))
    assert find(str(tmp_path)).load(20).train.read(0).shape == (20, 30, 3)
    assert find(str(tmp_path)).load(None).train.read(0).shape == (40, 60, 3)


@pytest.mark.parametrize("side", ["test", "val"])
def test_train_and_test_folders_inside_are_used(tmp_path: Path, side: str) -> None:
    folder(tmp_path / "train", ant=3, bee=1)
    folder(tmp_path / side, ant=1, bee=2)
    data = read(tmp_path)
    assert data.class_names == ("ant", "bee")
    assert (count(data.train), count(data.test)) == ({0: 3, 1: 1}, {0: 1, 1: 2})


def test_test_is_preferred_to_val(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=3, bee=1)
    folder(tmp_path / "val", ant=1, bee=1)
    folder(tmp_path / "test", ant=2, bee=2)
    assert count(read(tmp_path).test) == {0: 2, 1: 2}


def test_train_and_test_beside_other_folders_are_classes(tmp_path: Path) -> None:
    assert read(folder(tmp_path, train=2, test=2, bus=2)).class_names == ("bus", "test", "train")


def test_a_separate_test_folder_leaves_all_others_for_training(tmp_path: Path) -> None:
    data = read(folder(tmp_path / "a", ant=3, bee=4), folder(tmp_path / "b", bee=2, ant=1))
    assert (count(data.train), count(data.test)) == ({0: 3, 1: 4}, {0: 1, 1: 2})


def test_a_test_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    root = folder(tmp_path / "a", ant=3, bee=4)
    with pytest.raises(UserError, match=r"test folder .*nowhere is not a folder"):
        read(root, tmp_path / "nowhere")


def test_a_test_folder_with_other_classes_is_refused(tmp_path: Path) -> None:
    two, three = folder(tmp_path / "two", ant=2, bee=2), folder(tmp_path / "three", ant=2, bee=2, cat=2)
    with pytest.raises(UserError, match=r"two has no folder for the class\(es\) cat"):
        read(three, two)
    with pytest.raises(UserError, match=r"two has no folder for the class\(es\) cat"):
        read(two, three)


def test_hidden_files_and_files_that_are_no_images_do_not_count(tmp_path: Path) -> None:
    folder(tmp_path, ant=3, bee=3)
    draw(tmp_path / "ant" / "._00.png")
    draw(tmp_path / "ant" / ".thumbnails" / "00.png")
    draw(tmp_path / ".git" / "00.png")
    draw(tmp_path / "loose.png")
    (tmp_path / "ant" / "notes.txt").write_text("seen in June")
    (tmp_path / "ant" / "Thumbs.db").write_bytes(b"\0")
    (tmp_path / "bee" / "folder.png").mkdir()
    data = read(tmp_path)
    assert data.class_names == ("ant", "bee")
    assert len(data.train) + len(data.test) == 6


def test_a_hidden_folder_above_does_not_hide_the_images(tmp_path: Path) -> None:
    assert len(read(folder(tmp_path / ".cache" / "data", ant=3, bee=3)).train) == 4


def test_images_in_folders_of_a_class_belong_to_it_whatever_their_suffix(tmp_path: Path) -> None:
    folder(tmp_path, ant=1, bee=2)
    draw(tmp_path / "ant" / "2024" / "june" / "A.JPG")
    data = read(tmp_path)
    assert {*data.train.names, *data.test.names} >= {"ant/2024/june/A.JPG", "ant/00.png"}
    assert count(data.train)[0] + count(data.test)[0] == 2


# Refused


def test_an_empty_class_folder_is_refused_with_its_path(tmp_path: Path) -> None:
    folder(tmp_path, ant=3, bee=0, cat=3)
    (tmp_path / "bee" / "readme.txt").write_text("to do")
    with pytest.raises(UserError, match="holds no image") as problem:
        read(tmp_path)
    assert str(tmp_path / "bee") in str(problem.value)


@pytest.mark.parametrize("classes", [{}, {"ant": 5}], ids=["none", "one"])
def test_fewer_than_two_classes_are_refused(tmp_path: Path, classes: dict[str, int]) -> None:
    with pytest.raises(UserError, match=rf"holds {len(classes)} class folder\(s\), at least 2") as problem:
        read(folder(tmp_path, **classes))
    assert "one folder per class" not in str(problem.value)


def test_loose_images_are_met_with_a_hint(tmp_path: Path) -> None:
    for index in range(3):
        draw(tmp_path / f"{index}.png")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"its 3 image\(s\) must lie in one folder per class"):
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
    with pytest.raises(UserError, match="two classes of one name") as problem:
        read(tmp_path)
    assert repr(one) in str(problem.value) and repr(other) in str(problem.value)


def test_a_class_of_one_image_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'bee' has 1 image\(s\): at least 2"):
        read(folder(tmp_path, ant=3, bee=1))


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


def test_the_split_stays_what_it_always_was() -> None:
    """Pinned: runs of different versions must be comparable."""
    _, held = stratified_split(np.zeros(20, dtype=np.int64), 0.2, "test", ("ant",))
    assert held == [1, 17, 18, 19]


def test_the_split_of_a_class_depends_on_no_other_class(tmp_path: Path) -> None:
    two = read(folder(tmp_path / "two", ant=20, cat=20))
    three = read(folder(tmp_path / "three", ant=20, bee=7, cat=20))
    assert set(two.test.names) == {name for name in three.test.names if not name.startswith("bee")}


def test_classes_are_not_split_alike() -> None:
    labels = np.repeat(np.arange(2, dtype=np.int64), 50)
    _, held = stratified_split(labels, 0.3, "test", ("ant", "bee"))
    assert [index for index in held if index < 50] != [index - 50 for index in held if index >= 50]


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


def listed(**labels: int) -> ImageSet:
    """Images that are only names and class numbers."""
    return ImageSet(
        tuple(labels), np.array(list(labels.values()), dtype=np.int64), lambda _: np.zeros((1, 1, 3), np.uint8)
    )


def test_the_split_hash_is_of_side_class_and_name_alone() -> None:
    hashes = [
        ImageData(("ant", "bee"), train, test).split_hash()
        for train, test in (
            (listed(a=0, b=1), listed(c=1)),
            (listed(a=0), listed(b=1, c=1)),  # on the other side
            (listed(a=0, b=0), listed(c=1)),  # of another class
            (listed(a=0, d=1), listed(c=1)),  # of another name
        )
    ]
    assert len(set(hashes)) == 4
    assert ImageData(("ant", "bee"), listed(b=1, a=0), listed(c=1)).split_hash() == hashes[0]


def test_a_file_name_that_is_no_unicode_has_a_hash(tmp_path: Path) -> None:
    folder(tmp_path, ant=2, bee=2)
    try:
        (tmp_path / "ant" / "00.png").rename(os.fsdecode(os.fsencode(tmp_path / "ant") + b"/caf\xe9.png"))
    except OSError:
        pytest.skip("this file system takes unicode only")
    assert len(read(tmp_path).split_hash()) == 64


def test_the_split_hash_does_not_change_with_the_seeds(settings: Settings) -> None:
    runs = [
        prepare(parse_config(settings(seeds=dict.fromkeys(("order", "init", "data"), seed))), CPU, SILENT)
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
    again = find(str(tmp_path)).hold_out(data, 0.3)
    assert again.test.names == held.test.names
    for index, name in enumerate(held.test.names):
        np.testing.assert_array_equal(held.test.read(index), np.asarray(Image.open(tmp_path / "train" / name)))


def test_emoji_r_holds_out_whole_styles() -> None:
    source = find("emoji-r")
    data = source.load(None)
    held = source.hold_out(data, 0.2)
    styles = [{name.rpartition(".")[2] for name in side.names} for side in (held.train, held.test)]
    assert styles[1] == {"fluent-emoji-high-contrast", "twemoji"} and not styles[0] & styles[1]
    assert sorted(held.train.names + held.test.names) == sorted(data.train.names)
    assert len(count(held.train)) == len(count(held.test)) == 20
    assert not set(held.test.names) & set(data.test.names)


def test_validation_is_not_cut_like_the_test_set() -> None:
    labels = np.zeros(50, dtype=np.int64)
    held = [stratified_split(labels, 0.3, purpose, ("ant",))[1] for purpose in ("test", "validation")]
    assert held[0] != held[1]


def test_a_run_with_validation_never_sees_the_test_images(settings: Settings) -> None:
    plain, validated = (
        prepare(parse_config(settings(data={"validation": share})), CPU, SILENT) for share in (0.0, 0.25)
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


def test_images_of_different_sizes_stand_in_the_corner() -> None:
    generator = np.random.RandomState(0)
    arrays = [generator.randint(0, 255, (*size, 3), dtype=np.uint8) for size in ((3, 5), (4, 2), (3, 5))]
    store = ImageStore.of(arrays, CPU)
    assert len(store) == 3 and store.sizes.tolist() == [[3, 5], [4, 2], [3, 5]]
    canvas = store.canvas(torch.tensor([1, 0]))
    assert canvas.shape == (2, 3, 4, 5)
    np.testing.assert_array_equal(canvas[0, :, :4, :2].permute(1, 2, 0).numpy(), arrays[1])
    np.testing.assert_array_equal(canvas[1, :, :3, :5].permute(1, 2, 0).numpy(), arrays[0])


def spoil(*paths: Path) -> None:
    for path in paths:
        path.write_bytes(b"no picture")


def sides(root: Path) -> tuple[Loaded, Loaded]:
    data = read(root)
    return in_memory(data.train), in_memory(data.test)


def test_unreadable_files_are_listed_and_stop_the_run(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=4, bee=4)
    folder(tmp_path / "test", ant=2, bee=2)
    spoil(tmp_path / "train" / "bee" / "02.png", tmp_path / "test" / "ant" / "01.png")
    with pytest.raises(UserError, match=r"2 image file\(s\) cannot be read") as problem:
        refuse_unreadable(sides(tmp_path), ("ant", "bee"), skip=False)
    message = str(problem.value)
    assert "bee/02.png: no image format" in message and "ant/01.png: " in message
    assert "--skip-unreadable" in message


def test_of_many_unreadable_files_ten_are_listed(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=14, bee=4)
    folder(tmp_path / "test", ant=2, bee=2)
    spoil(*[tmp_path / "train" / "ant" / f"{index:02}.png" for index in range(13)])
    with pytest.raises(UserError, match=r"13 image file\(s\)") as problem:
        refuse_unreadable(sides(tmp_path), ("ant", "bee"), skip=False)
    message = str(problem.value)
    assert message.count("ant/") == 10 and "and 3 more" in message


def test_unreadable_files_may_be_skipped_and_are_named(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=4, bee=4)
    folder(tmp_path / "test", ant=2, bee=2)
    spoil(tmp_path / "train" / "ant" / "02.png", tmp_path / "test" / "ant" / "01.png")
    train, test = sides(tmp_path)
    assert refuse_unreadable((train, test), ("ant", "bee"), skip=True) == ["ant/02.png", "ant/01.png"]
    assert train.names[:3] == ("ant/00.png", "ant/01.png", "ant/03.png")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert len(train.store) == 7
    third = train.store.canvas(torch.tensor([2]))[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(third, np.asarray(Image.open(tmp_path / "train" / "ant" / "03.png")))


def test_where_all_can_be_read_nothing_is_skipped(tmp_path: Path) -> None:
    for skip in (True, False):
        root = folder(tmp_path / str(skip), ant=4, bee=4)
        assert refuse_unreadable(sides(root), ("ant", "bee"), skip) == []


@pytest.mark.parametrize("side", ["train", "test"])
def test_a_class_may_not_lose_its_last_image(tmp_path: Path, side: str) -> None:
    folder(tmp_path / "train", ant=2, bee=2)
    folder(tmp_path / "test", ant=2, bee=2)
    spoil(*(tmp_path / side / "bee").iterdir())
    with pytest.raises(UserError, match="the class 'bee' has no image left"):
        refuse_unreadable(sides(tmp_path), ("ant", "bee"), skip=True)


def test_not_one_readable_image_is_told_as_such(tmp_path: Path) -> None:
    folder(tmp_path, ant=3, bee=3)
    spoil(*tmp_path.rglob("*.png"))
    with pytest.raises(UserError, match="the class 'ant' has no image left"):
        refuse_unreadable(sides(tmp_path), ("ant", "bee"), skip=True)


def test_a_run_tells_what_it_skipped(settings: Settings, pictures: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    spoil(root / "class3" / "4.png")
    with pytest.raises(UserError, match=r"class3/4\.png"):
        prepare(parse_config(settings(data={"benchmark": str(root)})), CPU, SILENT)
    config = parse_config(settings(data={"benchmark": str(root), "skip_unreadable": True}))
    assert prepare(config, CPU, SILENT).skipped == ["class3/4.png"]


def test_a_folder_is_known_by_its_path_alone(tmp_path: Path) -> None:
    source = find(str(folder(tmp_path, ant=2, bee=2)))
    assert isinstance(source, Folder)
    assert source.root == tmp_path and source.test is None


# What a run says of its images


class Listening(ProgressCallback):
    """Remembers what is noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_what_is_not_as_published_is_noted_and_recorded(settings: Settings, tmp_path: Path) -> None:
    """Something else under the name of a benchmark must not pass for it."""
    for side in ("train", "test"):
        folder(tmp_path / "mine" / side, cat=4, dog=4)
    config = parse_config(settings(data={"benchmark": "cifar100", "root": str(tmp_path / "mine"), "tasks": 1}))
    heard = Listening()
    workshop = prepare(config, CPU, heard)
    found = describe(workshop, "run").stream.differences
    assert found and found[0] == "2 classes, published are 100"
    assert [f"cifar100 is not as published: {text}" for text in found] == heard.notes
    own = prepare(parse_config(settings()), CPU, heard := Listening())
    assert own.differences == heard.notes == []


def test_images_of_another_size_and_quality_are_recorded_by_a_run(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many images as published do not make it the published data."""
    figures = replace(Cifar100.figures, classes=2, train=8, test=8, train_per_class=(4, 4), test_per_class=(4, 4))
    monkeypatch.setattr(Cifar100, "figures", figures)
    recorded = {}
    for ending, size in ((".png", 32), (".jpg", 64)):
        for place in ("train/cat", "train/dog", "test/cat", "test/dog"):
            for index in range(4):
                draw(tmp_path / ending / place / f"{index}{ending}", index, (size, size))
        data = {"benchmark": "cifar100", "root": str(tmp_path / ending), "tasks": 1}
        workshop = prepare(parse_config(settings(data=data)), CPU, SILENT)
        recorded[ending] = describe(workshop, "run").stream.differences
    assert recorded[".png"] == []
    assert recorded[".jpg"] == [
        "images are JPEG files, published are images without loss: they were encoded anew",
        "images have 64 x 64 pixels, published are 32 x 32: they were resized",
    ]


@pytest.mark.parametrize(("side", "words"), [("train", "training"), ("test", "test")])
def test_classes_without_images_are_named(settings: Settings, tmp_path: Path, side: str, words: str) -> None:
    listed = {"train": {"n01443537": 4, "n01484850": 4, "n01494475": 4}, "test": {"n01443537": 2, "n01484850": 2}}
    listed["test"]["n01494475"] = 2
    listed[side].pop("n01484850")
    home = tmp_path / "imagenet-r"
    for name in ("n01443537", "n01484850", "n01494475"):
        folder(home, **{name: 6})
    for which, counts in listed.items():
        first = 0 if which == "train" else 4
        lines = [f"{name}/{index:02}.png" for name, number in counts.items() for index in range(first, first + number)]
        (home / f"{which}.txt").write_text("\n".join(lines))
    config = parse_config(settings(data={"benchmark": "imagenet-r", "root": str(home), "tasks": 3}))
    with pytest.raises(UserError, match=rf"imagenet-r has no {words} images of .*: add some, or take"):
        prepare(config, CPU, SILENT)
