"""Published benchmarks in every layout they are met in, made up and small."""

import copyreg
import pickle
import re
import struct
from collections import Counter
from collections.abc import Callable, Sequence
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
from probprompt.progress import ProgressCallback
from probprompt.runs.train import prepare
from run_cases import Bomb

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


# Pickles as Python 2 wrote them --------------------------------------------------------------------------------


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
    shape = b"(K\x01" + number(rows) + number(columns) + b"\x86"
    return made + shape + dtype + state + b"\x89" + octets(pixels.tobytes()) + b"tb"


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


def refuse(folder: Path, content: bytes, reason: str = "") -> None:
    (folder / "p").write_bytes(content)
    message = rf"p: .*\(.*{reason}.*\)\. Nothing was executed\. Download it again"
    with pytest.raises(UserError, match=message):
        read_pickle(folder / "p")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps({"fine_label_names": [Bomb(tmp_path / "run")]}, protocol)
    refuse(tmp_path, content)
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


ARRAY, DTYPE = b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy\ndtype\n"
ENCODE, LATIN1, HUGE = b"c_codecs\nencode\n", b"X\x06\0\0\0latin1", b"\x8a\x08" + b"\x7f" * 8
PIXELS = array(np.zeros((2, 3), np.uint8))
REFUSED = {
    "a command": b"cos\nsystem\n(S'true'\ntR.",
    "another name of NumPy's": b"cnumpy\nfromfile\n.",
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
    "a type without a code": b"}(U\x01a" + DTYPE + b")Ru.",
    "an array that stays empty": b"}(U\x01a" + ARRAY + b")Ru.",
    "a state of a dictionary": b"}U\x01b}U\x01aK\x01sb.",
    "a state of an array's class": b"}(U\x01a" + ARRAY + b"}U\x07contentK\x01sbu.",
    "a state of a type's class": b"}(U\x01a" + DTYPE + b"N}U\x0c__setstate__K\x01s\x86bu.",
    "a state of a function": b"}(U\x01a" + ENCODE + b"N}U\x08__call__K\x01s\x86bu.",
    "a state of too few parts": b"}(U\x01a" + ARRAY + b")RK\x01K\x02\x86bu.",
    "an array in an array": PIXELS.join((b"}(U\x01a" + ARRAY + b")R(K\x01K\x01\x85", b"\x89U\x01atbu.")),
    "a shape that is too large": dictionary(data=PIXELS.replace(b"K\x02K\x03\x86", b"K\x02" + HUGE + b"\x86")),
    "a shape of nothing": dictionary(data=PIXELS.replace(b"K\x02K\x03\x86", b"K\0" + HUGE + b"\x86")),
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
    "half a text": b"}(U\x05abc",
    "a long list named many times": b"}(U\x01a"
    + items([b"N"] * 40_000)
    + b"".join(octets(f"k{index}".encode()) + b"h\x05" for index in range(300))
    + b"u.",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_data_is_refused(tmp_path: Path, kind: str) -> None:
    refuse(tmp_path, REFUSED[kind])


def test_protocols_that_are_read_are_told(tmp_path: Path) -> None:
    refuse(tmp_path, pickle.dumps({"data": np.zeros(3, np.uint8)}, 5), "_frombuffer.* protocol 4")


def test_large_numbers_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"}r\xff\xff\xff\xff.")
    assert read_pickle(tmp_path / "p") == {}, "Python's own reader takes 64 GiB for this memo"
    with (tmp_path / "large").open("wb") as file:
        file.truncate(layouts.LARGEST + 1)
    for name, reason in (("large", "is larger than"), ("missing", "No such file")):
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
        assert "Rejected" in str(problem)


# CIFAR-100 -------------------------------------------------------------------------------------------------------


def load(name: str, root: Path, side: int | None = None) -> ImageData:
    return find(name, root=str(root)).load(side)


def tree(root: Path, names: Sequence[str], splits: Sequence[str] = ("train", "test"), count: int = 2) -> Path:
    for split in splits:
        for name in names:
            for index in range(count):
                draw(root / split / name / f"{index}.png", index)
    return root


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
    assert other_differences(published("cifar100"), data) == []


@pytest.mark.parametrize("side", ["test", "val"])
def test_cifar_is_read_from_a_tree_of_pictures(tmp_path: Path, side: str) -> None:
    data = load("cifar100", tree(tmp_path / "mine", CLASSES[::-1], ("train", side)))
    assert data.class_names == ("apple", "aquarium fish", "baby")
    assert data.train.files is data.test.files, "both sides are kept decoded as one"
    assert listing(data.test, data)[f"{side}/baby/1.png"] == "baby"
    assert data.test.read(1)[0, 0].tolist() == [1, 254, 0]


@pytest.mark.parametrize(
    "file, content, reason",
    [
        ("meta", dictionary(label_names=items([octets(b"cat")])), "fine_label_names"),
        (
            "test",
            dictionary(fine_labels=items([number(9)]), data=array(np.zeros((1, 3072), np.uint8))),
            "labels do not match",
        ),
        ("test", dictionary(fine_labels=items([b"\x8a\x0a" + b"\x7f" * 10])), "OverflowError"),
        ("meta", b"}K\x01K\x02s.", "AttributeError"),
    ],
)
def test_files_that_are_no_cifar_are_refused(home: Path, file: str, content: bytes, reason: str) -> None:
    cifar(home / "cifar100")
    (home / "cifar100" / file).write_bytes(content)
    with pytest.raises(UserError, match=f"not CIFAR-100.*{reason}"):
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


def test_cub_is_one_and_the_same_by_lists_and_in_a_tree(tmp_path: Path) -> None:
    """In the same order, held out alike and with the same fingerprint, in whatever order the lists name the images."""
    folder, trees = birds(tmp_path / "lists"), tmp_path / "tree"
    for name in BIRDS:
        for index, side in enumerate(("train", "test", "train")):
            (trees / side / name).mkdir(parents=True, exist_ok=True)
            file = f"{name[4:]}_{index}.jpg"
            (trees / side / name / file).write_bytes((folder / "images" / name / file).read_bytes())
    (folder / "images.txt").write_text("\n".join(reversed((folder / "images.txt").read_text().splitlines())))
    sources = [find("cub200", root=str(root)) for root in (folder, trees)]
    by_lists, by_sides = (source.load(None) for source in sources)
    assert by_lists.class_names == by_sides.class_names == tuple(name[4:].replace("_", " ") for name in BIRDS)
    official = {f"images/{name}/{name[4:]}_1.jpg": name[4:].replace("_", " ") for name in BIRDS}
    assert listing(by_lists.test, by_lists) == official and len(by_lists.train) == 6
    assert by_lists.split_hash() == by_sides.split_hash()
    for one, other in ((by_lists.train, by_sides.train), (by_lists.test, by_sides.test)):
        assert [Path(name).name for name in one.names] == [Path(name).name for name in other.names]
        assert all(np.array_equal(one.read(row), other.read(row)) for row in range(len(one)))
    files = [data.train.files for data in (by_lists, by_sides)]
    pixels = [decode(every.read, len(every), lambda _: None, 1).pixels for every in files if every]
    assert len(pixels) == 2 and np.array_equal(pixels[0], pixels[1])  # whose hash is recorded
    held = [source.hold_out(data, 0.5) for source, data in zip(sources, (by_lists, by_sides), strict=True)]
    assert held[0].split_hash() == held[1].split_hash() != by_sides.split_hash()


@pytest.mark.parametrize(
    "file, line, reason",
    [
        ("train_test_split.txt", "1 7", "has no line for image 1"),
        ("image_class_labels.txt", "1 2", "gives image 4 the class 2"),
        ("image_class_labels.txt", "1 x", "gives image 1 the class x"),
        ("images.txt", "1", "line 1: .*'1'"),
        (
            "images.txt",
            f"1 {BIRDS[0]}/no.jpg",
            f"lacks 1 of 9 images in .*images.txt: images/{BIRDS[0]}/no.jpg",
        ),
        ("images.txt", "\0caf\udce9", "the list .*images.txt: "),
        ("image_class_labels.txt", "1 4\n2 4\n3 4", "lacks classes"),
    ],
)
def test_damaged_lists_of_cub_are_told(tmp_path: Path, file: str, line: str, reason: str) -> None:
    folder = birds(tmp_path)
    lines = [line, *(folder / file).read_text().splitlines()[1 + line.count("\n") :]]
    (folder / file).write_text("\n".join(lines), errors="surrogateescape")
    with pytest.raises(UserError, match=reason):
        load("cub200", folder)


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


@pytest.mark.parametrize("kind", ["published", "numbered", "plain"])
def test_imagenet_r_is_cut_and_ordered_by_lists(home: Path, kind: str) -> None:
    folder = renditions(home / "imagenet-r" / "imagenet-r")
    if kind == "published":
        published_lists(home / "imagenet-r")
    else:
        for side, chosen in (("train", (0, 2)), ("test", (1,))):
            number = {name: f" {NUMBERED[name]}" if kind == "numbered" else "" for name in NUMBERED}
            write(folder / f"{side}.txt", "# mine", *(f"{n}/art_{i}.jpg{number[n]}" for n in NUMBERED for i in chosen))
    data = find("imagenet-r").load(None)
    words = {"n01910747": "jellyfish", "n02437616": "llama", "n03773504": "missile"}
    numbered = ("llama", "missile", "jellyfish")
    assert data.class_names == (tuple(words.values()) if kind == "plain" else numbered), "else not by the alphabet"
    assert listing(data.test, data) == {f"{name}/art_1.jpg": word for name, word in words.items()}
    assert len(data.train) == 6 and not set(data.train.names) & set(data.test.names)


def test_imagenet_r_without_its_lists_says_how_to_get_them(home: Path, tmp_path: Path) -> None:
    """The command downloads only the lists, to this folder."""
    renditions(home / "imagenet-r" / "imagenet-r")
    with pytest.raises(UserError, match=r"lists .*'probprompt data get imagenet-r', or .*train.txt"):
        find("imagenet-r").load(None)
    at_hand = renditions(tmp_path / "my sets" / "imagenet-r")
    message = f"probprompt data get imagenet-r --dir '{tmp_path / 'my sets'}'', or"
    for root in (at_hand, at_hand.parent):
        with pytest.raises(UserError, match=re.escape(message)):
            load("imagenet-r", root)
    with pytest.raises(UserError, match=f"{tmp_path / 'mine'}: the lists") as problem:
        load("imagenet-r", renditions(tmp_path / "mine"))
    assert all(source.url in str(problem.value) for source in published("imagenet-r").sources[1:])
    assert "data get" not in str(problem.value)


ONE, TWO = "n01910747/art_0.jpg", "n01910747/art_1.jpg"


@pytest.mark.parametrize(
    "train, test, reason",
    [
        ([ONE], [ONE], f"list images twice: {ONE}"),
        ([ONE], [TWO, TWO], "list images twice"),
        ([ONE], ["n01910747/art_9.jpg"], r"lacks 1 of 1 images in .*/test.txt: n01910747/art_9.jpg.$"),
        (
            [ONE, "a/b"],
            [TWO, "a/c"],
            "1 of 2 images in .*/train.txt: a/b. .* 1 of 2 images in .*/test.txt: a/c.$",
        ),
        ([ONE], ["../art_1.jpg"], "class/file, got ../art_1.jpg"),
        ([ONE], ["art_1.jpg"], "must list images as class/file"),
        ([ONE], [], "must list images as class/file"),
        ([ONE], [f"{TWO} 1", "n02437616/art_1.jpg"], "2 images but 1 class numbers"),
        ([f"{ONE} 0", "n02437616/art_0.jpg 1"], [f"{TWO} 1"], r"/train.txt and .*/test.txt: .* one number"),
        ([f"{ONE} 0"], [TWO], r"/train.txt has .*, but .*/test.txt has none"),
        ([ONE], [f"{TWO} 0"], r"/test.txt has .*, but .*/train.txt has none"),
    ],
)
def test_wrong_lists_are_told(tmp_path: Path, train: list[str], test: list[str], reason: str) -> None:
    folder = renditions(tmp_path)
    write(folder / "train.txt", *train)
    write(folder / "test.txt", *test)
    with pytest.raises(UserError, match=reason):
        load("imagenet-r", folder)


def test_a_list_in_yaml_of_something_else_is_told(tmp_path: Path) -> None:
    published_lists(renditions(tmp_path))
    write(tmp_path / "imagenet-r_test.yaml", "data:", "  some: thing")
    with pytest.raises(UserError, match=r"test.yaml, line 2: .*'some: thing'"):
        load("imagenet-r", tmp_path)


# Tiny-ImageNet and TU-Berlin -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("moved", [False, True])
def test_tiny_imagenet_is_read_as_published_and_as_others_sorted_it(home: Path, moved: bool) -> None:
    folder = tiny(home / "tiny-imagenet" / "tiny-imagenet-200")
    places = {"val_0": "val/images", "val_1": "val/images"}
    if moved:
        (folder / "val" / "val_annotations.txt").unlink()
        places = {"val_0": "val/n02124075/images", "val_1": "val/n01443537/images"}
        for file, place in places.items():
            (folder / place).mkdir(parents=True)
            (folder / "val" / "images" / f"{file}.JPEG").rename(folder / place / f"{file}.JPEG")
        (folder / "val" / "images").rmdir()
    data = find("tiny-imagenet").load(None)
    assert data.class_names == ("goldfish", "Egyptian cat") and len(data.train) == 4
    labels = {f"{places['val_0']}/val_0.JPEG": "Egyptian cat", f"{places['val_1']}/val_1.JPEG": "goldfish"}
    assert listing(data.test, data) == labels


def test_tiny_imagenet_with_an_unknown_class_is_told(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    write(folder / "val" / "val_annotations.txt", "val_0.JPEG\tn99999999")
    with pytest.raises(UserError, match=r"line 1: .*n99999999"):
        load("tiny-imagenet", folder)


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
    assert [Counter(images.labels.tolist()) for images in (data.train, data.test)] == [{0: 64, 1: 64}, {0: 16, 1: 16}]
    assert not set(data.train.names) & set(data.test.names)
    assert [name for name in data.test.names if name.startswith("airplane")][:6] == AIRPLANES
    other = load("tu-berlin", sketches(tmp_path / "other", "airplane", "flying_bird"))
    assert other.class_names == data.class_names
    assert [name.replace("_", " ") for name in other.test.names] == list(data.test.names)


AIRPLANES = [f"airplane/{number}.png" for number in (13, 19, 25, 27, 28, 32)]
"""Held out by seed 0: published results hang on it."""


# Where they lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_not_there_is_told_with_all_that_helps(home: Path, name: str) -> None:
    with pytest.raises(UserError, match="does not exist") as problem:
        find(name).load(None)
    for help_ in (str(home / name), "PROBPROMPT_DATA", f"probprompt data get {name}", "(1)", "train/<class>/"):
        assert help_ in str(problem.value)
    (home / name).mkdir(parents=True)
    with pytest.raises(UserError, match="does not contain it"):
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
    assert len(load("cub200", tmp_path).train) == 6


def test_only_published_benchmarks_have_a_root(tmp_path: Path) -> None:
    for name in ("emoji-r", str(tmp_path), "hf:owner/name"):
        with pytest.raises(UserError, match=r"data.root"):
            find(name, root=str(tmp_path))
    for name in ("emoji-r", "cifar100", "hf:owner/name"):
        with pytest.raises(UserError, match="--test"):
            find(name, test=str(tmp_path))


def name_of(folder: Path) -> str | None:
    found = recognize(folder)
    return found.name if found else None


def all_renditions(folder: Path, file: str = "sketch_0.jpg", classes: int = 200) -> Path:
    """As many as were published, without lists."""
    for label in range(classes):
        write(folder / f"n{label:08}" / file)
    return folder


def test_folders_are_recognized_by_layout_and_name(tmp_path: Path) -> None:
    assert name_of(birds(tmp_path / "b")) == "cub200"
    assert name_of(tiny(tmp_path / "t")) == "tiny-imagenet"
    assert name_of(all_renditions(tmp_path / "r")) == "imagenet-r"
    assert name_of(renditions(tmp_path / "mine")) is None, "three classes of any part of ImageNet"
    published_lists(tmp_path / "mine")
    assert name_of(tmp_path / "mine") == "imagenet-r", "by its lists"
    assert name_of(renditions(tmp_path / "imagenet-r")) == "imagenet-r", "by its name"
    assert name_of(tree(tmp_path / "cifar100", CLASSES)) == "cifar100"
    assert name_of(tree(tmp_path / "some tree", CLASSES)) is None
    assert name_of(tmp_path / "t" / "train") is None
    assert name_of(all_renditions(tmp_path / "c", "images/n0_0.JPEG")) is None
    assert name_of(all_renditions(tmp_path / "d", "n0_0.JPEG")) is None
    assert name_of(all_renditions(tmp_path / "e", classes=1000)) is None
    for side in ("train", "test"):
        write(tmp_path / "e" / f"{side}.txt", "n00000001/sketch_0.jpg")
    assert name_of(tmp_path / "e") is None, "ImageNet itself has such lists, too"


# Classes ---------------------------------------------------------------------------------------------------------


def test_two_classes_of_one_word_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "words.txt", "n00000001\tcrane", "n00000002\tcrane, bird")
    found = layouts.wordnet_names(tmp_path, ["n00000001", "n00000002", "n00000003"])
    assert found == ("crane (n00000001)", "crane (n00000002)", "n00000003")


def test_folders_that_are_numbers_are_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    tree(tmp_path, [str(label) for label in range(12)])
    for data in (load("cifar100", tmp_path), find(str(tmp_path)).load(None)):
        assert data.class_names == tuple(str(label) for label in range(12))
        paths = zip(data.train.names, data.train.labels.tolist(), strict=True)
        assert all(name.split("/")[-2] == str(label) for name, label in paths)
        assert [task.classes for task in build_stream(data.class_names, 6, seed=0)][4:] == [(8, 9), (10, 11)]
    for name in ("010", "cat"):
        draw(tmp_path / "test" / name / "0.png")
    assert class_folders(tmp_path / "test")[:4] == ("0", "010", "1", "10"), "one word makes all of them words"


# How they differ from what was published -------------------------------------------------------------------------


def held(counts: dict[str, tuple[int, int]], lists: tuple[str, ...] = (), suffix: str = ".jpg") -> ImageData:
    """This number of images of each class, all unreadable."""

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
    assert differences(source, held(counts | {"Crested Auklet": (30, 15), "Least Auklet": (30, 10)})) == [
        "test: images per class differ from the published ones: "
        "Crested Auklet has 15 instead of 14, Least Auklet has 10 instead of 11"
    ]
    assert differences(source, held(dict(sorted(counts.items())))) == [
        "class order differs from the published one: Acadian Flycatcher, American Crow, American Goldfinch and 197 more"
    ]
    renamed = {str(place): both for place, both in enumerate(counts.values())}
    assert differences(source, held(renamed)) == []
    assert differences(source, held(renamed | {"3": (29, 31)})) == [
        "train: 5993 images, published: 5994",
        "test: 5795 images, published: 5794",
        "test: expected 11 to 30 images per class, but 3 has 31",
    ]


def test_missing_classes_and_images_are_told() -> None:
    counts = {str(label): (500, 100) for label in range(98)} | {"x": (499, 100)}
    assert differences(published("cifar100"), held(counts, suffix=".png")) == [
        "99 classes, published: 100",
        "train: 49499 images, published: 50000",
        "train: expected 500 images per class, but x has 499",
        "test: 9900 images, published: 10000",
    ]


def stored(folder: Path, file: str, side: int, **options: Any) -> Path:
    """A tree of photographs, each stored in this way."""
    noise = np.random.RandomState(0)
    for place in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (folder / place).mkdir(parents=True)
        for index in range(2):
            pixels = noise.randint(0, 256, (side, side, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / place / f"{index}{file}", **options)
    return folder


LOSS = "files, published are images without loss"


@pytest.mark.parametrize(
    "name, file, side, options, message",
    [
        ("cifar100", ".png", 32, {}, []),
        ("cifar100", ".bmp", 32, {}, []),
        ("cifar100", ".tif", 32, {"compression": "tiff_lzw"}, []),
        ("cifar100", ".webp", 32, {"lossless": True}, []),
        ("cifar100", ".webp", 32, {"lossless": True, "exif": b"Exif\0\0odd"}, []),
        ("cifar100", ".webp", 32, {"quality": 90}, [f"WEBP {LOSS}"]),
        ("cifar100", ".tif", 32, {"compression": "jpeg"}, [f"TIFF {LOSS}"]),
        ("cifar100", ".png", 32, {"format": "JPEG"}, [f"JPEG {LOSS}"]),
        ("cifar100", ".gif", 32, {}, [f"GIF {LOSS}"]),
        ("cifar100", ".jpg", 64, {}, [f"JPEG {LOSS}", "64 x 64 pixels, published are 32 x 32"]),
        ("tu-berlin", ".png", 256, {}, ["256 x 256 pixels, published are 1111 x 1111"]),
        ("cub200", ".JPEG", 32, {}, []),
        ("cub200", ".webp", 32, {"lossless": True}, ["WEBP files, published are JPEG files: they were encoded anew"]),
        ("tiny-imagenet", ".jpg", 64, {}, []),
        ("tiny-imagenet", ".jpg", 32, {}, ["32 x 32 pixels, published are 64 x 64"]),
    ],
)
def test_images_stored_in_another_way_are_told(
    tmp_path: Path, name: str, file: str, side: int, options: dict[str, Any], message: list[str]
) -> None:
    """A photograph that is stored again is not the published one, a drawing without loss is: its file tells."""
    source = find(name, root=str(stored(tmp_path, file, side, **options)))
    assert isinstance(source, Dataset)
    found = other_differences(source, source.load(16))
    assert len(found) == len(message)
    assert all(text in line for text, line in zip(message, found, strict=True))


def test_a_few_files_of_both_sides_tell_how_all_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_NUM_HEADERS", 2)
    seen: list[str] = []
    monkeypatch.setattr(verify, "read_header", lambda path: seen.append(path.relative_to(tmp_path).as_posix()))
    source = find("cifar100", root=str(stored(tmp_path, ".png", 4)))
    assert isinstance(source, Dataset) and other_differences(source, source.load(None)) == []
    assert seen == ["train/cat/0.png", "train/dog/1.png", "test/cat/0.png", "test/dog/1.png"]


def test_whether_imagenet_r_is_cut_as_published_is_told() -> None:
    source = published("imagenet-r")
    counts = {str(label): (120, 30) for label in range(200)}
    lists = [item.digest for item in source.sources[1:]]
    assert differences(source, held(counts, tuple(lists))) == []
    (message,) = differences(source, held(counts))
    assert message.startswith("no lists")
    (message,) = differences(source, held(counts, (lists[0], "abc")))
    assert message.startswith("the list of test images is not the published one (SHA-256 abc)")


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
"""The MD5 of archives and the SHA-256 of lists, as known from elsewhere."""
DOCS = Path(__file__).parents[1] / "docs" / "data.md"


def test_everything_that_is_fetched_is_known_by_its_hash() -> None:
    sources = [source for name in PUBLISHED for source in published(name).sources]
    assert {source.file: source.digest for source in sources} == HASHES
    for source in sources:
        assert source.algorithm == ("md5" if source.unpack else "sha256")
        fixed = r"/GT-RIPL/CODA-Prompt/[0-9a-f]{40}/"  # a branch may change, and then the hashes no longer fit
        assert source.unpack or re.search(fixed, source.url), source.url


def test_the_page_on_data_shows_the_archives_and_their_hashes() -> None:
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for name in PUBLISHED:
        archive = published(name).sources[0]
        row = next(line for line in rows if line.startswith(f"| `{name}` |"))
        assert row.endswith(f"| [{archive.file}]({archive.url}) | `{HASHES[archive.file]}` |")


def test_a_benchmark_by_name_can_be_learned(home: Path, settings: Settings) -> None:
    cifar(home / "cifar100" / "cifar-100-python")
    config = parse_config(settings(data={"benchmark": "cifar100", "tasks": 1}, training={"epochs": 1, "batch_size": 2}))
    workshop = prepare(config, torch.device("cpu"), ProgressCallback())
    assert workshop.class_names == ("apple", "aquarium fish", "baby")
    assert [len(task.rows) for task in workshop.tasks] == [12]
