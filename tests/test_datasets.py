"""Published benchmarks in every layout they are met in, made up and small."""

import copyreg
import os
import pickle
import re
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from probprompt import presets
from probprompt.config import parse_config
from probprompt.data import layouts, verify
from probprompt.data.cache import decode
from probprompt.data.datasets import ImageData, ImageSet, class_folders, find, registered
from probprompt.data.layouts import read_pickle
from probprompt.data.published import Dataset, data_folder, recognize
from probprompt.data.stream import build_stream
from probprompt.data.verify import differences, other_differences
from probprompt.errors import UserError
from probprompt.progress import SILENT
from probprompt.runs.train import prepare

Settings = Callable[..., dict[str, Any]]
PUBLISHED = ("cifar100", "cub200", "imagenet-r", "tiny-imagenet", "tu-berlin")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of datasets."""
    monkeypatch.setenv("PROBPROMPT_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


def draw(path: Path, colour: int = 0, side: int = 4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (colour % 256, 255 - colour % 256, colour // 256)).save(path)


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def listing(images: ImageSet, data: ImageData) -> dict[str, str]:
    return {name: data.class_names[label] for name, label in zip(images.names, images.labels.tolist(), strict=True)}


# Pickles, written by hand as Python 2 wrote them -----------------------------------------------------------------


def octets(value: bytes) -> bytes:
    return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<I", len(value)) + value


def number(value: int) -> bytes:
    return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)


def items(values: Sequence[bytes]) -> bytes:
    return b"]q\x05(" + b"".join(values) + b"e"


def array(pixels: NDArray[np.uint8], kind: bytes = b"u1") -> bytes:
    rows, columns = pixels.shape
    made = b"cnumpy.core.multiarray\n_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85q\x08U\x01bq\x09\x87q\x0aRq\x0b"
    dtype = b"cnumpy\ndtype\nq\x0c" + octets(kind) + b"q\x0dK\x00K\x01\x87q\x0eRq\x0f"
    state = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return (
        made
        + b"(K\x01"
        + number(rows)
        + number(columns)
        + b"\x86"
        + dtype
        + state
        + b"\x89"
        + octets(pixels.tobytes())
        + b"tb"
    )


def dictionary(**parts: bytes) -> bytes:
    inside = b"".join(octets(name.encode()) + b"q\x02" + value for name, value in parts.items())
    return b"\x80\x02}q\x01(" + inside + b"u."


CLASSES = ("apple", "aquarium_fish", "baby")


def cifar(folder: Path, per_class: tuple[int, int] = (4, 2)) -> dict[str, NDArray[np.uint8]]:
    """The three files; returns the pixels of both sides as they were packed."""
    folder.mkdir(parents=True)
    names = items([octets(name.encode()) for name in CLASSES])
    (folder / "meta").write_bytes(dictionary(coarse_label_names=items([octets(b"fruit")]), fine_label_names=names))
    packed = {}
    for side, count in zip(("train", "test"), per_class, strict=True):
        total = count * len(CLASSES)
        pixels = np.random.RandomState(total).randint(0, 256, (total, 3072)).astype(np.uint8)
        content = dictionary(
            filenames=items([octets(f"thing_{index}.png".encode()) for index in range(total)]),
            batch_label=octets(b"training batch 1 of 1"),
            fine_labels=items([number(index % len(CLASSES)) for index in range(total)]),
            coarse_labels=items([number(0)] * total),
            data=array(pixels),
        )
        (folder / side).write_bytes(content)
        packed[side] = pixels
    return packed


def test_a_pickle_of_plain_data_is_read_as_python_reads_it(tmp_path: Path) -> None:
    cifar(tmp_path / "c")
    for file in ("train", "test", "meta"):
        path = tmp_path / "c" / file
        mine, pythons = read_pickle(path), pickle.loads(path.read_bytes(), encoding="bytes")
        assert mine.keys() == pythons.keys()
        for key, value in pythons.items():
            np.testing.assert_array_equal(mine[key], value)


@pytest.mark.parametrize("protocol", range(5))
def test_a_pickle_made_anew_in_python_3_is_read(tmp_path: Path, protocol: int) -> None:
    pixels = np.arange(252, 258).astype(np.uint8).reshape(2, 3)
    names = [b"%d.png" % number for number in range(600)]
    held: dict[Any, Any] = {
        "data": pixels,
        "turned": np.asfortranarray(pixels),
        "names": ["a", "b"],
        b"bytes": [b"\x00\xff\n", b"c", *names, b"x" * 300, names[3], names[3]],
        "labels": [*range(300), 0, 255, 256, 2**20, -3, 7, 7, True],
        "mixed": [1, b"a", 2, "b", None, 3, names[599]],
        "n": -3,
    }
    (tmp_path / "p").write_bytes(pickle.dumps(held, protocol))
    mine = read_pickle(tmp_path / "p")
    for key in ("data", "turned"):
        np.testing.assert_array_equal(mine.pop(key), held.pop(key))
    assert mine == held


def test_an_array_in_a_newer_protocol_is_told_which_are_read(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(pickle.dumps({"data": np.zeros((2, 3), np.uint8)}, 5))
    with pytest.raises(UserError, match=r"_frombuffer.* protocol 4 or lower"):
        read_pickle(tmp_path / "p")


class Evil:
    """What it is made of runs when Python reads it."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.target,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps({"fine_label_names": [Evil(tmp_path / "run")]}, protocol)
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(UserError, match=r"is refused.*Nothing of it was run"):
        read_pickle(tmp_path / "p")
    assert not (tmp_path / "run").exists()
    pickle.loads(content)
    assert (tmp_path / "run").is_dir(), "the attack is a real one"


def test_an_extension_that_others_use_is_not_called(tmp_path: Path) -> None:
    """Python's own reader calls one that is cached without asking for its name."""
    copyreg.add_extension("os", "mkdir", 250)
    try:
        call = b"\x80\x02}(U\x01a\x82\xfaX%c\0\0\0%b\x85Ru." % (len(str(tmp_path / "run")), bytes(tmp_path / "run"))
        pickle.loads(call)
        (tmp_path / "run").rmdir()
        refuse(tmp_path, call)
        assert not (tmp_path / "run").exists()
    finally:
        copyreg.remove_extension("os", "mkdir", 250)
        copyreg.clear_extension_cache()


def refuse(folder: Path, content: bytes) -> None:
    (folder / "p").write_bytes(content)
    with pytest.raises(UserError, match=r"p is refused: .*\(.+\)\. Nothing of it was run; get the file anew"):
        read_pickle(folder / "p")


ARRAY, DTYPE = b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy\ndtype\n"
ENCODE, LATIN1 = b"c_codecs\nencode\n", b"X\x06\0\0\0latin1"
PIXELS = array(np.zeros((2, 3), np.uint8))
REFUSED = {
    "a command": b"cos\nsystem\n(S'true'\ntR.",
    "code": b"}(U\x01acbuiltins\neval\nU\x011\x85Ru.",
    "another name of NumPy's": b"cnumpy\nfromfile\n.",
    "a decoder": b"c_codecs\ndecode\n.",
    "a name inside a name": b"}(U\x01a\x8c\x05numpy\x8c\x0edtype.__init__\x93u.",
    "an instance": b"(U\x01ai__main__\nEvil\n.",
    "an object": b"}(U\x01a(" + DTYPE + b"U\x02u1ou.",
    "a new object": b"}(U\x01a" + ARRAY + b")\x81u.",
    "an extension": b"}(U\x01a\x82\x01u.",
    "a persistent number": b"}(U\x01aPsome\nu.",
    "a persistent object": b"}(U\x01aK\x01Qu.",
    "a set": b"}(U\x01a\x8fu.",
    "a call of a text": b"}(U\x01aU\x01b)Ru.",
    "a call of names in texts": b"}(U\x01a(U\x05numpyU\x07ndarrayt)Ru.",
    "another codec": b"}(U\x01a" + ENCODE + b"X\x01\0\0\0aX\x05\0\0\0rot13\x86Ru.",
    "bytes to encode": b"}(U\x01a" + ENCODE + b"U\x01a" + LATIN1 + b"\x86Ru.",
    "letters beyond the codec": b"}(U\x01a" + ENCODE + b"X\x02\0\0\0\xc4\x80" + LATIN1 + b"\x86Ru.",
    "nothing to encode": b"}(U\x01a" + ENCODE + b")Ru.",
    "a function as a value": b"}(U\x01a" + ENCODE + b"u.",
    "a class as a value": b"}(U\x01acnumpy\nndarray\nu.",
    "a type without a code": b"}(U\x01a" + DTYPE + b")Ru.",
    "an array that stays empty": b"}(U\x01a" + ARRAY + b")Ru.",
    "a state of a dictionary": b"}U\x01b}U\x01aK\x01sb.",
    "a state of an array's class": b"}(U\x01a" + ARRAY + b"}U\x07contentK\x01sbu.",
    "a state of a type's class": b"}(U\x01a" + DTYPE + b"N}U\x0c__setstate__K\x01s\x86bu.",
    "a state of a function": b"}(U\x01a" + ENCODE + b"N}U\x08__call__K\x01s\x86bu.",
    "a state of too few parts": b"}(U\x01a" + ARRAY + b")RK\x01K\x02\x86bu.",
    "an array in an array": PIXELS.join((b"}(U\x01a" + ARRAY + b")R(K\x01K\x01\x85", b"\x89U\x01atbu.")),
    "a shape that is too large": dictionary(
        data=PIXELS.replace(b"K\x02K\x03\x86", b"K\x02\x8a\x08" + b"\x7f" * 8 + b"\x86")
    ),
    "a shape of nothing": dictionary(data=PIXELS.replace(b"K\x02K\x03\x86", b"K\0\x8a\x08" + b"\x7f" * 8 + b"\x86")),
    "a shape of texts": dictionary(data=PIXELS.replace(b"K\x02K\x03\x86", b"X\x02\0\0\0\1\6")),
    "negative shapes": dictionary(data=PIXELS.replace(b"K\x02K\x03", b"J\xfe\xff\xff\xffJ\xfd\xff\xff\xff")),
    "too few numbers": dictionary(data=PIXELS.replace(octets(bytes(6)), octets(bytes(5)))),
    "numbers that are a text": dictionary(data=PIXELS.replace(octets(bytes(6)), b"X\6\0\0\0aaaaaa")),
    "an array of objects": dictionary(data=array(np.zeros((2, 3), np.uint8), b"O8")),
    "a list as a key": b"}]U\x01as.",
    "a nested key": b"})" + b"\x85" * 400_000 + b"Ns.",
    "nested keys": b"}()" + b"\x85" * 400_000 + b"Nu.",
    "a nested key of another kind": b"()" + b"\x85" * 400_000 + b"Nd.",
    "a text that is filled": b"U\x01aU\x01ba.",
    "a list of lists": dictionary(data=items([b"]"])),
    "no dictionary": b"].",
    "an unknown number": b"}h\x07.",
    "nothing": b"",
    "no end": b"}q\x01",
    "half a text": b"}(U\x05abc",
    "half a number": b"}(K\x01K",
    "a long list named many times": b"}(U\x01a"
    + items([b"N"] * 40_000)
    + b"".join(octets(f"k{index}".encode()) + b"h\x05" for index in range(300))
    + b"u.",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_data_is_refused(tmp_path: Path, kind: str) -> None:
    refuse(tmp_path, REFUSED[kind])


def test_large_numbers_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"}r\xff\xff\xff\xff.")
    assert read_pickle(tmp_path / "p") == {}, "Python's own reader takes 64 GiB for this memo"
    with (tmp_path / "large").open("wb") as file:
        file.truncate(layouts.LARGEST + 1)
    for name, reason in (("large", "is larger than"), ("missing", "cannot be read")):
        with pytest.raises(UserError, match=reason):
            read_pickle(tmp_path / name)


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_anywhere_is_told_in_words(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = dictionary(fine_labels=items([number(1), number(300)]), data=array(np.ones((2, 3), np.uint8)))
    place = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(whole[:place] + data.draw(st.binary(max_size=3)) + whole[place + 1 :])
    try:
        read_pickle(path)
    except UserError as problem:
        assert "refused" in str(problem)


# CIFAR-100 -------------------------------------------------------------------------------------------------------


def test_cifar_is_read_from_its_pickles(home: Path) -> None:
    packed = cifar(home / "cifar100" / "cifar-100-python")
    data = find("cifar100").load(None)
    assert data.class_names == ("apple", "aquarium fish", "baby")
    assert (len(data.train), len(data.test)) == (12, 6)
    assert listing(data.train, data)["train/aquarium fish/thing_4.png"] == "aquarium fish"
    image = data.test.read(1)
    assert image.shape == (32, 32, 3) and image.dtype == np.uint8
    row = packed["test"][1]
    assert image[3, 5].tolist() == [row[3 * 32 + 5], row[1024 + 3 * 32 + 5], row[2048 + 3 * 32 + 5]]
    assert find("cifar100").load(16).test.read(1).shape == (16, 16, 3)


@pytest.mark.parametrize("side", ["test", "val"])
def test_cifar_is_read_from_a_tree_of_pictures(tmp_path: Path, side: str) -> None:
    for within, count in (("train", 3), (side, 2)):
        for name in reversed(CLASSES):
            for index in range(count):
                draw(tmp_path / "mine" / within / name / f"{index}.png", index)
    data = find("cifar100", root=str(tmp_path / "mine")).load(None)
    assert data.class_names == ("apple", "aquarium fish", "baby")
    assert (len(data.train), len(data.test)) == (9, 6)
    assert data.train.files is data.test.files, "both sides are kept decoded as one"
    assert listing(data.test, data)[f"{side}/baby/1.png"] == "baby"
    assert data.test.read(1)[0, 0].tolist() == [1, 254, 0]


def test_files_that_are_no_cifar_are_refused(home: Path) -> None:
    cifar(home / "cifar100")
    (home / "cifar100" / "meta").write_bytes(dictionary(label_names=items([octets(b"cat")])))
    with pytest.raises(UserError, match=r"no CIFAR-100.*fine_label_names"):
        find("cifar100").load(None)


# CUB -------------------------------------------------------------------------------------------------------------

BIRDS = ("001.Black_footed_Albatross", "002.Laysan_Albatross", "003.Sooty_Albatross")


def birds(folder: Path) -> Path:
    """Caltech's own lists: of each kind two birds for training and one for the test."""
    images: list[str] = []
    labels: list[str] = []
    sides: list[str] = []
    for label, name in enumerate(BIRDS, start=1):
        for index in range(3):
            place = len(images) + 1
            images.append(f"{place} {name}/{name[4:]}_{index}.jpg")
            labels.append(f"{place} {label}")
            sides.append(f"{place} {int(index != 1)}")
            draw(folder / "images" / name / f"{name[4:]}_{index}.jpg", 10 * place)
    write(folder / "images.txt", *images)
    write(folder / "image_class_labels.txt", *labels)
    write(folder / "train_test_split.txt", *sides)
    return folder


def test_cub_is_read_by_its_official_lists(home: Path) -> None:
    birds(home / "cub200" / "CUB_200_2011")
    data = find("cub200").load(None)
    assert data.class_names == ("Black footed Albatross", "Laysan Albatross", "Sooty Albatross")
    assert listing(data.test, data) == {f"images/{name}/{name[4:]}_1.jpg": name[4:].replace("_", " ") for name in BIRDS}
    assert len(data.train) == 6


def test_cub_in_a_tree_has_the_same_classes(tmp_path: Path) -> None:
    for side in ("train", "test"):
        for name in BIRDS:
            draw(tmp_path / side / name / "a.jpg")
    data = find("cub200", root=str(tmp_path)).load(None)
    assert data.class_names == find("cub200", root=str(birds(tmp_path / "lists"))).load(None).class_names


def test_cub_is_one_and_the_same_by_lists_and_in_a_tree(tmp_path: Path) -> None:
    """In the same order, held out alike and with the same fingerprint, in whatever order the lists name the images."""
    folder, tree = birds(tmp_path / "lists"), tmp_path / "tree"
    for name in BIRDS:
        for index, side in enumerate(("train", "test", "train")):
            (tree / side / name).mkdir(parents=True, exist_ok=True)
            file = f"{name[4:]}_{index}.jpg"
            (tree / side / name / file).write_bytes((folder / "images" / name / file).read_bytes())
    listed = (folder / "images.txt").read_text().splitlines()
    (folder / "images.txt").write_text("\n".join(reversed(listed)))
    sources = [find("cub200", root=str(root)) for root in (folder, tree)]
    by_lists, by_sides = (source.load(None) for source in sources)
    assert by_lists.split_hash() == by_sides.split_hash()
    for one, other in ((by_lists.train, by_sides.train), (by_lists.test, by_sides.test)):
        assert [Path(name).name for name in one.names] == [Path(name).name for name in other.names]
        assert all(np.array_equal(one.read(row), other.read(row)) for row in range(len(one)))
    files = [data.train.files for data in (by_lists, by_sides)]
    pixels = [decode(every.read, len(every), lambda _: None, 1).pixels for every in files if every]
    assert len(pixels) == 2 and np.array_equal(pixels[0], pixels[1])  # whose hash is recorded
    held = [source.hold_out(data, 0.5) for source, data in zip(sources, (by_lists, by_sides), strict=True)]
    assert held[0].split_hash() == held[1].split_hash() != by_sides.split_hash()


def test_a_listed_bird_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = birds(tmp_path)
    (folder / "images" / BIRDS[1] / "Laysan_Albatross_2.jpg").unlink()
    with pytest.raises(UserError, match=r"1 of 9 images of .*images.txt are not in .*: images/002.*_2.jpg"):
        find("cub200", root=str(folder)).load(None)


@pytest.mark.parametrize(
    "file, line, reason",
    [
        ("train_test_split.txt", "1 7", "says nothing of image 1"),
        ("image_class_labels.txt", "1 2", "gives image 4 the class 2"),
        ("image_class_labels.txt", "1 x", "gives image 1 the class x"),
        ("images.txt", "1", "line 1: a number and a value are due"),
    ],
)
def test_damaged_lists_of_cub_are_told(tmp_path: Path, file: str, line: str, reason: str) -> None:
    folder = birds(tmp_path)
    lines = (folder / file).read_text().splitlines()
    write(folder / file, line, *lines[1:])
    with pytest.raises(UserError, match=reason):
        find("cub200", root=str(folder)).load(None)


# ImageNet-R ------------------------------------------------------------------------------------------------------

NUMBERED = {"n01910747": 2, "n02437616": 0, "n03773504": 1}


def renditions(folder: Path) -> Path:
    for name in NUMBERED:
        for index in range(3):
            draw(folder / name / f"art_{index}.jpg", index)
    write(folder / "README.txt", "ImageNet-R", "n01910747 jellyfish", "n02437616 llama", "n03773504 missile")
    return folder


def published_lists(folder: Path) -> None:
    for side, chosen in (("train", (0, 2)), ("test", (1,))):
        paths = [(name, f"- data/imagenet-r/{name}/art_{index}.jpg") for index in chosen for name in NUMBERED]
        targets = [f"- {NUMBERED[name]}" for name, _ in paths]
        write(folder / f"imagenet-r_{side}.yaml", "data:", *(path for _, path in paths), "targets:", *targets)


def test_imagenet_r_is_cut_and_ordered_by_the_published_lists(home: Path) -> None:
    renditions(home / "imagenet-r" / "imagenet-r")
    published_lists(home / "imagenet-r")
    data = find("imagenet-r").load(None)
    assert data.class_names == ("llama", "missile", "jellyfish"), "not by the alphabet"
    assert listing(data.test, data) == {
        "n01910747/art_1.jpg": "jellyfish",
        "n02437616/art_1.jpg": "llama",
        "n03773504/art_1.jpg": "missile",
    }
    assert len(data.train) == 6 and not set(data.train.names) & set(data.test.names)


@pytest.mark.parametrize("numbers", [True, False])
def test_imagenet_r_takes_lists_of_ones_own(tmp_path: Path, numbers: bool) -> None:
    folder = renditions(tmp_path)
    for side, chosen in (("train", (0, 1)), ("test", (2,))):
        lines = [f"{n}/art_{i}.jpg" + (f" {NUMBERED[n]}" if numbers else "") for n in NUMBERED for i in chosen]
        write(folder / f"{side}.txt", "# mine", *lines)
    data = find("imagenet-r", root=str(folder)).load(None)
    ordered = ("llama", "missile", "jellyfish") if numbers else ("jellyfish", "llama", "missile")
    assert data.class_names == ordered
    assert listing(data.test, data)["n02437616/art_2.jpg"] == "llama"


@pytest.mark.parametrize("within", ["imagenet-r", "imagenet-r/imagenet-r"])
def test_imagenet_r_without_its_lists_says_how_to_get_them(home: Path, within: str) -> None:
    renditions(home / within)
    with pytest.raises(UserError, match=r"not the lists.* with: probprompt data get imagenet-r; or .*train.txt"):
        find("imagenet-r").load(None)


def test_imagenet_r_without_its_lists_in_another_place_is_not_fetched_to_the_usual_one(tmp_path: Path) -> None:
    """The command is for the folder at hand: there, and there alone, it fetches the lists only."""
    at_hand = renditions(tmp_path / "my sets" / "imagenet-r")
    told = f"probprompt data get imagenet-r --to '{tmp_path / 'my sets'}'; or"
    for root in (at_hand, at_hand.parent):
        with pytest.raises(UserError, match=re.escape(told)):
            find("imagenet-r", root=str(root)).load(None)
    with pytest.raises(UserError) as problem:
        find("imagenet-r", root=str(renditions(tmp_path / "mine"))).load(None)
    for source in published("imagenet-r").sources[1:]:
        assert source.url in str(problem.value)
    assert f"{tmp_path / 'mine'} has the class folders" in str(problem.value)
    assert "data get" not in str(problem.value)


@pytest.mark.parametrize("missing", [("train",), ("test",), ("train", "test")])
def test_the_list_whose_image_is_missing_is_named(tmp_path: Path, missing: tuple[str, ...]) -> None:
    folder = renditions(tmp_path)
    for side, index in (("train", 0), ("test", 1)):
        lines = [f"{name}/art_{index}.jpg" for name in NUMBERED]
        write(folder / f"{side}.txt", *lines, *([f"n01910747/no_{side}.jpg"] if side in missing else []))
    with pytest.raises(UserError) as problem:
        find("imagenet-r", root=str(folder)).load(None)
    assert str(problem.value) == "; ".join(
        f"1 of 4 images of {folder / side}.txt are not in {folder}: n01910747/no_{side}.jpg" for side in missing
    )


@pytest.mark.parametrize("numbered", ["train", "test"])
def test_numbers_in_one_list_alone_are_refused(tmp_path: Path, numbered: str) -> None:
    """To pass over them would put the classes into another order than the user wrote down."""
    folder = renditions(tmp_path)
    for side, index in (("train", 0), ("test", 1)):
        write(
            folder / f"{side}.txt",
            *(f"{n}/art_{index}.jpg {NUMBERED[n] if side == numbered else ''}" for n in NUMBERED),
        )
    other = {"train": "test", "test": "train"}[numbered]
    with pytest.raises(
        UserError, match=rf"/{numbered}.txt gives .*, .*/{other}.txt does not: give them in both, or in"
    ):
        find("imagenet-r", root=str(folder)).load(None)


@pytest.mark.parametrize(
    "side, lines, reason",
    [
        ("test", ["n01910747/art_0.jpg"], "name images twice: n01910747/art_0.jpg"),
        ("test", ["n01910747/art_1.jpg", "n01910747/art_1.jpg"], "name images twice"),
        ("test", ["n01910747/art_9.jpg"], "are not in"),
        ("test", ["../art_1.jpg"], "must name images as class/file"),
        ("test", ["art_1.jpg"], "must name images as class/file"),
        ("test", ["n01910747/art_1.jpg 1", "n02437616/art_1.jpg"], "2 images and 1 classes"),
        ("test", [], "must name images as class/file"),
    ],
)
def test_wrong_lists_are_told(tmp_path: Path, side: str, lines: list[str], reason: str) -> None:
    folder = renditions(tmp_path)
    write(folder / "train.txt", "n01910747/art_0.jpg", "n02437616/art_0.jpg")
    write(folder / f"{side}.txt", *lines)
    with pytest.raises(UserError, match=reason):
        find("imagenet-r", root=str(folder)).load(None)


def test_a_list_that_gives_a_class_two_numbers_is_refused(tmp_path: Path) -> None:
    folder = renditions(tmp_path)
    write(folder / "train.txt", "n01910747/art_0.jpg 0", "n02437616/art_0.jpg 1")
    write(folder / "test.txt", "n01910747/art_1.jpg 1")
    with pytest.raises(UserError, match=r"train.txt and .*test.txt give a class two numbers"):
        find("imagenet-r", root=str(folder)).load(None)


# Tiny-ImageNet ---------------------------------------------------------------------------------------------------


def tiny(folder: Path) -> Path:
    for name in ("n02124075", "n01443537"):
        for index in range(2):
            draw(folder / "train" / name / "images" / f"{name}_{index}.JPEG", index)
        write(folder / "train" / name / f"{name}_boxes.txt", "0 0 1 1")
    draw(folder / "val" / "images" / "val_0.JPEG")
    draw(folder / "val" / "images" / "val_1.JPEG")
    write(folder / "val" / "val_annotations.txt", "val_0.JPEG\tn02124075\t0\t0\t1\t1", "val_1.JPEG\tn01443537\t0")
    draw(folder / "test" / "images" / "test_0.JPEG")
    write(folder / "words.txt", "n02124075\tEgyptian cat", "n01443537\tgoldfish, Carassius auratus")
    return folder


def test_tiny_imagenet_is_read_as_published(home: Path) -> None:
    tiny(home / "tiny-imagenet" / "tiny-imagenet-200")
    data = find("tiny-imagenet").load(None)
    assert data.class_names == ("goldfish", "Egyptian cat")
    assert listing(data.test, data) == {"val/images/val_0.JPEG": "Egyptian cat", "val/images/val_1.JPEG": "goldfish"}
    assert len(data.train) == 4


def test_tiny_imagenet_is_read_when_others_sorted_its_validation_images(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    (folder / "val" / "val_annotations.txt").unlink()
    for file, name in (("val_0", "n02124075"), ("val_1", "n01443537")):
        (folder / "val" / name / "images").mkdir(parents=True)
        (folder / "val" / "images" / f"{file}.JPEG").rename(folder / "val" / name / "images" / f"{file}.JPEG")
    (folder / "val" / "images").rmdir()
    data = find("tiny-imagenet", root=str(folder)).load(None)
    assert data.class_names == ("goldfish", "Egyptian cat")
    assert listing(data.test, data)["val/n02124075/images/val_0.JPEG"] == "Egyptian cat"


def test_tiny_imagenet_with_an_unknown_class_is_told(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    write(folder / "val" / "val_annotations.txt", "val_0.JPEG\tn99999999")
    with pytest.raises(UserError, match="line 1: a file and one of the classes"):
        find("tiny-imagenet", root=str(folder)).load(None)


# TU-Berlin -------------------------------------------------------------------------------------------------------


def sketches(folder: Path, *names: str) -> Path:
    for place, name in enumerate(names):
        for index in range(80):
            draw(folder / name / f"{80 * place + index + 1}.png", index, side=1)
    return folder


def test_tu_berlin_is_cut_64_to_16_and_always_in_the_same_way(home: Path, tmp_path: Path) -> None:
    sketches(home / "tu-berlin" / "png", "airplane", "flying bird")
    write(home / "tu-berlin" / "png" / "filelist.txt", "airplane/1.png")
    data = find("tu-berlin").load(None)
    assert data.class_names == ("airplane", "flying bird")
    sides = [Counter(images.labels.tolist()) for images in (data.train, data.test)]
    assert sides == [{0: 64, 1: 64}, {0: 16, 1: 16}]
    assert not set(data.train.names) & set(data.test.names)
    assert [name for name in data.test.names if name.startswith("airplane")][:6] == AIRPLANES
    other = find("tu-berlin", root=str(sketches(tmp_path / "other", "airplane", "flying_bird"))).load(None)
    assert other.class_names == data.class_names
    assert [name.replace("_", " ") for name in other.test.names] == list(data.test.names)


AIRPLANES = [f"airplane/{number}.png" for number in (13, 19, 25, 27, 28, 32)]
"""Held out by seed 0: published results hang on it."""


# Where they lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_not_there_is_told_with_all_that_helps(home: Path, name: str) -> None:
    with pytest.raises(UserError) as problem:
        find(name).load(None)
    text = str(problem.value)
    assert str(home / name) in text and "does not exist" in text and "PROBPROMPT_DATA" in text
    assert f"probprompt data get {name}" in text and "(1)" in text and "train/<class>/" in text
    (home / name).mkdir(parents=True)
    with pytest.raises(UserError, match="holds nothing that looks like it"):
        find(name).load(None)


def test_the_usual_place_is_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROBPROMPT_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "probprompt"
    monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert data_folder() == tmp_path / "me" / ".local" / "share" / "probprompt"
    monkeypatch.setenv("PROBPROMPT_DATA", "~/sets")
    assert data_folder() == tmp_path / "me" / "sets"


@pytest.mark.parametrize("within", ["", "cub200", "CUB_200_2011", "cub200/CUB_200_2011"])
def test_a_root_may_be_the_folder_or_one_that_holds_it(tmp_path: Path, within: str) -> None:
    birds(tmp_path / within)
    assert len(find("cub200", root=str(tmp_path)).load(None).train) == 6


def test_only_published_benchmarks_have_a_root(tmp_path: Path) -> None:
    for name in ("emoji-r", str(tmp_path), "hf:owner/name"):
        with pytest.raises(UserError, match="takes no root"):
            find(name, root=str(tmp_path))
    for name in ("cifar100", "hf:owner/name"):
        with pytest.raises(UserError, match="has a test set of its own"):
            find(name, test=str(tmp_path))


def listed_renditions(folder: Path) -> Path:
    published_lists(renditions(folder))
    return folder


def all_renditions(folder: Path, file: str = "sketch_0.jpg", classes: int = 200) -> Path:
    """As many as were published, without lists."""
    for label in range(classes):
        write(folder / f"n{label:08}" / file)
    return folder


@pytest.mark.parametrize(
    "make, name",
    [
        (birds, "cub200"),
        (tiny, "tiny-imagenet"),
        (listed_renditions, "imagenet-r"),
        (all_renditions, "imagenet-r"),
    ],
)
def test_a_folder_is_recognised_by_its_layout(tmp_path: Path, make: Callable[[Path], Path], name: str) -> None:
    found = recognize(make(tmp_path / "some folder"))
    assert found is not None and found.name == name


def test_not_all_folders_of_wordnets_numbers_are_imagenet_r(tmp_path: Path) -> None:
    assert recognize(renditions(tmp_path / "mine")) is None, "three of them"
    assert recognize(tiny(tmp_path / "tiny") / "train") is None
    assert recognize(all_renditions(tmp_path / "a", "images/n0_0.JPEG")) is None
    assert recognize(all_renditions(tmp_path / "b", "n0_0.JPEG")) is None
    assert recognize(all_renditions(tmp_path / "c", classes=1000)) is None
    for side in ("train", "test"):
        write(tmp_path / "c" / f"{side}.txt", "n00000001/sketch_0.jpg")
    assert recognize(tmp_path / "c") is None, "ImageNet itself has such lists, too"
    found = recognize(renditions(tmp_path / "imagenet-r"))
    assert found is not None and found.name == "imagenet-r", "by its name"


def test_a_tree_is_recognised_by_its_name_alone(tmp_path: Path) -> None:
    for folder in ("cifar100", "mine"):
        for side in ("train", "test"):
            for name in CLASSES:
                draw(tmp_path / folder / side / name / "a.png")
    found = recognize(tmp_path / "cifar100")
    assert found is not None and found.name == "cifar100"
    assert recognize(tmp_path / "mine") is None


def test_two_classes_of_one_word_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "words.txt", "n00000001\tcrane", "n00000002\tcrane, bird")
    found = layouts.wordnet_names(tmp_path, ["n00000001", "n00000002", "n00000003"])
    assert found == ("crane (n00000001)", "crane (n00000002)", "n00000003")


def test_a_side_without_a_class_is_told(tmp_path: Path) -> None:
    for side, names in (("train", CLASSES), ("test", CLASSES[:2])):
        for name in names:
            draw(tmp_path / side / name / "a.png")
    with pytest.raises(UserError, match=r"has no folder for the class.*baby"):
        find("cifar100", root=str(tmp_path)).load(None)


def test_folders_that_are_numbers_are_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    for side in ("train", "test"):
        for label in range(12):
            for index in range(2):
                draw(tmp_path / side / str(label) / f"{index}.png")
    for data in (find("cifar100", root=str(tmp_path)).load(None), find(str(tmp_path)).load(None)):
        assert data.class_names == tuple(str(label) for label in range(12))
        paths = zip(data.train.names, data.train.labels.tolist(), strict=True)
        assert all(name.split("/")[-2] == str(label) for name, label in paths)
        assert [task.classes for task in build_stream(data.class_names, 6, seed=0)][4:] == [(8, 9), (10, 11)]
    data = find(str(tmp_path / "train")).load(None)
    assert data.class_names[2] == "2"


def test_one_word_among_numbers_makes_them_words(tmp_path: Path) -> None:
    for name in ("9", "10", "010", "cat"):
        draw(tmp_path / name / "0.png")
    assert class_folders(tmp_path) == ("010", "10", "9", "cat")
    (tmp_path / "cat" / "0.png").unlink()
    (tmp_path / "cat").rmdir()
    assert class_folders(tmp_path) == ("9", "010", "10")


# How they differ from what was published -------------------------------------------------------------------------


def held(counts: dict[str, tuple[int, int]], lists: tuple[str, ...] = (), suffix: str = ".jpg") -> ImageData:
    """So many images of each class, none of which can be read."""

    def side(which: int) -> ImageSet:
        names = [f"{name}/{index}{suffix}" for name, numbers in counts.items() for index in range(numbers[which])]
        labels = np.repeat(np.arange(len(counts)), [numbers[which] for numbers in counts.values()])
        return ImageSet(tuple(names), labels.astype(np.int64), unread)

    return ImageData(tuple(counts), side(0), side(1), lists)


def unread(index: int) -> NDArray[np.uint8]:
    raise AssertionError("no image has to be read")


def published(name: str) -> Dataset:
    source = find(name)
    assert isinstance(source, Dataset)
    return source


def test_the_birds_are_counted_class_by_class() -> None:
    source = published("cub200")
    counts = source.class_counts()
    assert list(counts)[:2] == ["Black footed Albatross", "Laysan Albatross"] and len(counts) == 200
    for side, total, limits in ((0, 5_994, (29, 30)), (1, 5_794, (11, 30))):
        numbers = [both[side] for both in counts.values()]
        assert sum(numbers) == total and (min(numbers), max(numbers)) == limits
    assert differences(source, held(counts)) == []
    moved = counts | {"Crested Auklet": (30, 15), "Least Auklet": (30, 10)}
    assert differences(source, held(moved)) == [
        "test: not as many images of each class as published: "
        "Crested Auklet has 15 instead of 14, Least Auklet has 10 instead of 11"
    ]


def test_the_birds_by_the_alphabet_are_another_order() -> None:
    source = published("cub200")
    told = differences(source, held(dict(sorted(source.class_counts().items()))))
    assert told == [
        "the classes are in another order than published: Acadian Flycatcher, American Crow, American Goldfinch "
        "and 197 more"
    ]


def test_images_that_were_encoded_anew_are_told() -> None:
    """A photograph that is stored a second time is not the published one, a drawing without loss is."""
    birds = published("cub200")
    (told,) = differences(birds, held(birds.class_counts(), suffix=".webp"))
    assert told == "images are WEBP files, published are JPEG files: they were encoded anew"
    assert differences(birds, held(birds.class_counts(), suffix=".JPEG")) == []
    for name, counts in WHOLE.items():
        assert differences(published(name), held(counts, suffix=".png")) == []
        (told,) = differences(published(name), held(counts, suffix=".jpg"))
        assert told == "images are JPEG files, published are images without loss: they were encoded anew"
    unnamed = held(WHOLE["cifar100"], suffix="")
    train, test = (
        replace(part, pixels=np.zeros((len(part), 32, 32, 3), np.uint8)) for part in (unnamed.train, unnamed.test)
    )
    packed = replace(unnamed, train=train, test=test)
    assert differences(published("cifar100"), packed) == [], "pixels that came without any file"


WHOLE = {
    "cifar100": {str(label): (500, 100) for label in range(100)},
    "tu-berlin": {str(label): (64, 16) for label in range(250)},
}


def stored(folder: Path, file: str, side: int, **options: Any) -> Path:
    """A tree of photographs, each stored in this way."""
    noise = np.random.RandomState(0)
    for place in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (folder / place).mkdir(parents=True)
        for number in range(2):
            pixels = noise.randint(0, 256, (side, side, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / place / f"{number}{file}", **options)
    return folder


@pytest.mark.parametrize(
    "name, file, side, options, told",
    [
        ("cifar100", ".png", 32, {}, []),
        ("cifar100", ".bmp", 32, {}, []),
        ("cifar100", ".tif", 32, {"compression": "tiff_lzw"}, []),
        ("cifar100", ".webp", 32, {"lossless": True}, []),
        ("cifar100", ".webp", 32, {"lossless": True, "exif": b"Exif\0\0odd"}, []),
        ("cifar100", ".webp", 32, {"quality": 90}, ["WEBP files, published are images without loss"]),
        ("cifar100", ".tif", 32, {"compression": "jpeg"}, ["TIFF files, published are images without loss"]),
        ("cifar100", ".png", 32, {"format": "JPEG"}, ["JPEG files, published are images without loss"]),
        ("cifar100", ".gif", 32, {}, ["GIF files, published are images without loss"]),
        (
            "cifar100",
            ".jpg",
            64,
            {},
            ["JPEG files, published are images", "have 64 x 64 pixels, published are 32 x 32"],
        ),
        ("tu-berlin", ".png", 256, {}, ["have 256 x 256 pixels, published are 1111 x 1111: they were resized"]),
        ("tiny-imagenet", ".jpg", 64, {}, []),
        ("tiny-imagenet", ".jpg", 32, {}, ["have 32 x 32 pixels, published are 64 x 64: they were resized"]),
    ],
)
def test_images_stored_in_another_way_are_told(
    tmp_path: Path, name: str, file: str, side: int, options: dict[str, Any], told: list[str]
) -> None:
    """By the files themselves, whatever they are called: as many of another size or quality are other images."""
    source = find(name, root=str(stored(tmp_path, file, side, **options)))
    assert isinstance(source, Dataset)
    found = other_differences(source, source.load(16))
    assert len(found) == len(told)
    assert all(text in line for text, line in zip(told, found, strict=True))


def test_the_pickles_of_cifar_are_as_published(home: Path) -> None:
    cifar(home / "cifar100")
    assert other_differences(published("cifar100"), find("cifar100").load(None)) == []


def test_a_few_files_of_both_sides_tell_how_all_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_LOOKED", 2)
    seen: list[str] = []
    monkeypatch.setattr(verify, "read_header", lambda path: seen.append(path.relative_to(tmp_path).as_posix()))
    source = find("cifar100", root=str(stored(tmp_path, ".png", 4)))
    assert isinstance(source, Dataset) and other_differences(source, source.load(None)) == []
    assert seen == ["train/cat/0.png", "train/dog/1.png", "test/cat/0.png", "test/dog/1.png"]


def test_classes_of_other_names_are_held_to_the_least_and_the_most() -> None:
    source = published("cub200")
    renamed = {str(place): both for place, both in enumerate(source.class_counts().values())}
    assert differences(source, held(renamed)) == []
    assert differences(source, held(renamed | {"3": (29, 31)})) == [
        "train: 5993 images, published are 5994",
        "test: 5795 images, published are 5794",
        "test: published are 11 to 30 images of each class, but 3 has 31",
    ]


def test_missing_classes_and_images_are_told() -> None:
    told = differences(
        published("cifar100"), held({str(label): (500, 100) for label in range(98)} | {"x": (499, 100)}, suffix=".png")
    )
    assert told == [
        "99 classes, published are 100",
        "train: 49499 images, published are 50000",
        "train: published are 500 images of each class, but x has 499",
        "test: 9900 images, published are 10000",
    ]


def test_whether_imagenet_r_is_cut_as_published_is_told() -> None:
    source = published("imagenet-r")
    counts = {str(label): (120, 30) for label in range(200)}
    lists = [item.digest for item in source.sources[1:]]
    assert differences(source, held(counts, tuple(lists))) == []
    (told,) = differences(source, held(counts))
    assert told.startswith("no lists say which images are for training") and told.endswith("cannot be known")
    (told,) = differences(source, held(counts, (lists[0], "abc")))
    assert told.startswith("the list of the test images is not the published one (sha256 abc)")
    assert differences(published("tu-berlin"), held(WHOLE["tu-berlin"], suffix=".png")) == []


# What they are ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_benchmarks_are_as_the_paper_has_them(name: str) -> None:
    source = registered()[name]
    assert issubclass(source, Dataset) and source.tasks == 10
    assert source.enlarge is (name not in ("cifar100", "tiny-imagenet"))
    figures = source.figures
    for total, (least, most) in ((figures.train, figures.train_per_class), (figures.test, figures.test_per_class)):
        assert least * figures.classes <= total <= most * figures.classes
    assert source.sources[0].unpack and not any(other.unpack for other in source.sources[1:])
    for tasks in (5, 10, 20, 7):
        stream = build_stream([str(label) for label in range(figures.classes)], tasks, seed=1)
        assert sum(len(task.classes) for task in stream) == figures.classes
    config = parse_config(presets.settings("matched", "probprompt", name))
    assert config.data.tasks == 10 and config.backbone.name == ("sup21k" if name == "cub200" else "sup1k")


HASHES = {
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
    "imagenet-r.tar": "a61312130a589d0ca1a8fca1f2bd3337",
    "CUB_200_2011.tgz": "97eceeb196236b17998738112f37df78",
    "tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de",
    "sketches_png.zip": "023123df86a928a5273e3ba11990d8fd",
    "imagenet-r_train.yaml": "6bcaa14ca9359915ac3a44c48ae71388146385686eb15da79a37844421a0b845",
    "imagenet-r_test.yaml": "57275ac242d68983a4f39ccb81ec34f48b1bd920b9cd79e6e8040d7c042db02a",
}
"""The MD5 of archives and the SHA-256 of lists, as they are known from elsewhere."""
DOCS = Path(__file__).parents[1] / "docs" / "data.md"


def test_everything_that_is_fetched_is_known_by_its_hash() -> None:
    sources = [source for name in PUBLISHED for source in published(name).sources]
    assert {source.file: source.digest for source in sources} == HASHES
    assert {source.algorithm for source in sources if source.unpack} == {"md5"}


def test_the_page_on_data_shows_the_archives_and_their_hashes() -> None:
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) == len(PUBLISHED)
    for name in PUBLISHED:
        archive = published(name).sources[0]
        (row,) = (line for line in rows if line.startswith(f"| `{name}` |"))
        assert row.endswith(f"| [{archive.file}]({archive.url}) | MD5 {HASHES[archive.file]} |")


def test_the_lists_of_imagenet_r_come_from_a_fixed_commit() -> None:
    """A branch may change, and then the hashes no longer fit."""
    for source in published("imagenet-r").sources[1:]:
        assert re.search(r"/GT-RIPL/CODA-Prompt/[0-9a-f]{40}/", source.url), source.url


def test_a_benchmark_by_name_can_be_learned(home: Path, settings: Settings) -> None:
    cifar(home / "cifar100" / "cifar-100-python")
    config = parse_config(settings(data={"benchmark": "cifar100", "tasks": 1}, training={"epochs": 1, "batch": 2}))
    workshop = prepare(config, torch.device("cpu"), SILENT)
    assert workshop.class_names == ("apple", "aquarium fish", "baby")
    assert [len(task.rows) for task in workshop.tasks] == [12]
