"""A folder of your own photos is a benchmark like any other, with odd names, junk files and HEIC images."""

import json
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from probprompt.config import flatten
from probprompt.data import emoji_r
from probprompt.data.datasets import Folder
from probprompt.data.images import UnreadableImageError, read_image
from probprompt.data.inputs import walk
from probprompt.data.stream import build_stream
from probprompt.runs.run import Run, RunRecord
from reproduction.results import read_entries

Command = Callable[..., Any]
NAMES = ("Kätzchen", "Hund & Co", "鳥", "owl's nest", "a,b", "100%")
SIDES = ((400, 300), (90, 120), (64, 64))
EACH = 6
QUICK = {
    "backbone": {"name": "test_vit", "weights": "random", "image_size": 32},
    "training": {"epochs": 1, "batch_size": 16},
    "alignment": {"epochs": 1},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos on a disk that several systems have written to."""
    root = tmp_path_factory.mktemp("own") / "Meine Fotos, Mai"
    pixels, renditions = emoji_r.read()
    for name, label in zip(NAMES, emoji_r.classes(), strict=False):
        own = [pixels[i] for i, item in enumerate(renditions) if item.label == label and item.split == "train"][:EACH]
        (root / name / "@eaDir" / "IMG 0.JPG").mkdir(parents=True)
        for number, image in enumerate(own):
            picture = Image.fromarray(np.asarray(image)).resize(SIDES[number % len(SIDES)])
            picture.save(root / name / f"IMG {number} é.JPG")
        picture.save(root / name / "@eaDir" / "IMG 0.JPG" / "thumbnail.jpg")
        for junk in ("Thumbs.db", ".DS_Store", "._IMG 0 é.JPG", "notes.txt"):
            (root / name / junk).write_bytes(b"junk")
    for junk in ("__MACOSX", "@eaDir", ".thumbnails", "$RECYCLE.BIN"):
        (root / junk).mkdir()
    (root / "README.txt").write_text("mine")
    return root


@pytest.fixture
def settings() -> list[str]:
    """Options for runs of seconds."""
    return [part for name, value in flatten(QUICK).items() for part in ("--set", f"{name}={json.dumps(value)}")]


def test_junk_is_neither_class_nor_image(photos: Path) -> None:
    data = Folder(photos).load(None)
    assert set(data.class_names) == set(NAMES)
    assert len(data.train) + len(data.test) == EACH * len(NAMES)
    assert not [name for name in (*data.train.names, *data.test.names) if "thumbnail" in name]
    assert not Folder(photos).notes()
    found = list(walk(photos))  # the images of a classifier
    assert len(found) == EACH * len(NAMES) and not [path for path in found if "@eaDir" in path.parts]


@pytest.mark.parametrize("sides", [("train", "valid"), ("Train", "Test"), ("training", "validation"), ("train", "val")])
def test_split_folders_are_recognized(photos: Path, tmp_path: Path, sides: tuple[str, str]) -> None:
    for side in sides:
        (tmp_path / side).symlink_to(photos, target_is_directory=True)
    folder = Folder(tmp_path)
    assert (folder.root, folder.test) == tuple(tmp_path / side for side in sides)
    (tmp_path / "tram").symlink_to(photos / NAMES[0], target_is_directory=True)
    assert Folder(tmp_path).test is None  # they are classes like the third


@pytest.mark.parametrize(("classes", "tasks"), [(100, 10), (20, 10), (8, 4), (3, 1), (2, 1)])
def test_default_number_of_tasks(photos: Path, classes: int, tasks: int) -> None:
    assert Folder(photos).default_tasks(classes) == tasks


def test_class_names_match_in_any_unicode_form() -> None:
    on_disk = [unicodedata.normalize("NFD", "Kätzchen"), "Hund"]
    (first, second) = build_stream(on_disk, [["Hund"], [unicodedata.normalize("NFC", "Kätzchen")]], seed=0)
    assert (first.classes, second.classes) == ((1,), (0,))


def _published_measures(folder: Path) -> RunRecord:
    run = Run.open(folder)
    assert run.finished and set(run.metrics) == {"FAA", "CAA", "forgetting"}
    return run.record


def test_train_command(photos: Path, tmp_path: Path, probprompt: Command, settings: list[str]) -> None:
    answer = probprompt("train", photos, *settings, "--out", tmp_path / "run", "--method", "linear-probe")
    assert answer.code == 0, answer.err
    assert [len(task) for task in _published_measures(tmp_path / "run").stream.tasks] == [2, 2, 2]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert all(part in page for part in ("Meine Fotos, Mai", "Hund &amp; Co", "鳥", "Accuracy matrix"))


def test_comparison_and_results_of_an_own_folder(
    photos: Path,
    tmp_path: Path,
    probprompt: Command,
    reproduction: Command,
    settings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = [["Kätzchen", "鳥"], ["a,b", "100%"], ["Hund & Co", "owl's nest"]]
    Path("tasks.json").write_text(json.dumps(tasks, ensure_ascii=False), encoding="utf-8")
    grid = ("compare", "--methods", "probprompt,vq-prompt", "--benchmarks", photos, "--seeds", "0")
    answer = probprompt(*grid, "--tasks", "tasks.json", *settings, "--set", "tokens=4", "--set", "method.samples=2")
    assert answer.code == 0, answer.err
    (first, second) = sorted(Path("runs/compare").rglob("run.json"))
    assert [_published_measures(path.parent).stream.tasks for path in (first, second)] == [tasks, tasks]
    page = Path("runs/compare/comparison.html").read_text(encoding="utf-8")
    assert all(part in page for part in ("Final accuracy", "Forgetting", "Task by task", "Prompt"))
    assert reproduction("results", "add", "runs/compare").code == 0
    assert reproduction("results").code == 0
    text = Path("RESULTS.md").read_text(encoding="utf-8")
    assert all(f"### Figure {number}: " in text for number in ("1a", "4"))
    assert "### Meine Fotos, Mai@" in text and str(tmp_path) not in text and str(photos) not in text
    assert "tasks=[2,2,2]-by-name-" in text
    assert all(len(entry.path) < 200 for entry in read_entries(Path("results")))


def test_compare_command(photos: Path, tmp_path: Path, probprompt: Command, settings: list[str]) -> None:
    grid = ("compare", "--methods", "nearest-mean", "--benchmarks", photos, "--seeds", "0", *settings)
    assert probprompt(*grid, "--tasks", "3,3", "--test", photos, "--validate", "--out", tmp_path).code == 0
    (found,) = tmp_path.rglob("run.json")
    record = Run.open(found.parent).record
    assert [len(task) for task in record.stream.tasks] == [3, 3]
    assert record.config["data"]["validation"] == 0.2 and record.config["data"]["test"] == str(photos)
    wrong = probprompt(*grid, "--tasks", "nowhere.txt")
    assert wrong.code == 2 and "'nowhere.txt'" in wrong.err
    late = probprompt("compare", "--runs", tmp_path, "--tasks", "3")
    assert late.code == 2 and "--runs" in late.err


def _photograph(path: Path, orientation: int = 1) -> Path:
    """Write a photo as a phone does, red on the left and blue on the right."""
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, :64, 0] = pixels[:, 64:, 2] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = pillow_heif.from_pillow(Image.fromarray(pixels))
    image.info["exif"] = exif.tobytes()
    image.save(path, quality=90)
    return path


def test_heic_images_are_read_upright(tmp_path: Path) -> None:
    flat = read_image(_photograph(tmp_path / "a.HEIC"))
    assert flat.shape == (64, 128, 3) and flat[32, 10, 0] > 240 and flat[32, 118, 2] > 240
    turned = read_image(_photograph(tmp_path / "b.heic", orientation=6))
    assert turned.shape == (128, 64, 3) and turned[10, 32, 0] > 240 and turned[118, 32, 2] > 240
    assert read_image(tmp_path / "a.HEIC", 16).shape == (16, 32, 3)
    data = (tmp_path / "a.HEIC").read_bytes()
    (tmp_path / "sent.jpg").write_bytes(data)
    assert read_image(tmp_path / "sent.jpg").shape == (64, 128, 3)  # known by its content
    for length in (12, 40, len(data) // 2, len(data) - 5):
        (tmp_path / "cut.heic").write_bytes(data[:length])
        with pytest.raises(UnreadableImageError) as error:
            read_image(tmp_path / "cut.heic")
        assert not error.value.passing


def test_missing_heic_package_is_named(
    photos: Path, tmp_path: Path, probprompt: Command, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROBPROMPT_CACHE", str(tmp_path / "cache"))
    for name in NAMES[:2]:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "photos" / name / f"{number}.heic").write_bytes(_photograph(tmp_path / "a.heic").read_bytes())
    command = ("train", tmp_path / "photos", "--method", "nearest-mean", *settings)
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "pillow_heif", None)
        bare.setattr(Image, "ID", [name for name in Image.ID if name not in ("HEIF", "HEIC")])
        answer = probprompt(*command, "--out", tmp_path / "refused")
    assert answer.code == 2 and "pip install 'probprompt[heic]'" in answer.err and "6 unreadable" in answer.err
    assert probprompt(*command, "--out", tmp_path / "run").code == 0  # the cache does not keep the failure


def test_sample_is_a_folder_of_images(tmp_path: Path, probprompt: Command) -> None:
    answer = probprompt("data", "sample", tmp_path / "photos", "--classes", "cat,moon", "--images", 5)
    assert answer.code == 0 and "(cat, moon)" in answer.out
    data = Folder(tmp_path / "photos").load(None)
    assert data.class_names == ("cat", "moon") and len(data.train) + len(data.test) == 10
    assert len({data.train.read(index).shape for index in range(len(data.train))}) > 1  # wide and tall ones
    assert (tmp_path / "photos" / "ATTRIBUTION.md").stat().st_size > 0
    assert probprompt("data", "sample", tmp_path / "test", "--classes", "cat,moon", "--images", 5, "--test").code == 0
    own, other = (list((tmp_path / side).rglob("*.jpg")) for side in ("photos", "test"))
    assert not {path.stem.rpartition("(")[2] for path in own} & {path.stem.rpartition("(")[2] for path in other}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new", "--classes", "cats"), "'cats'. Did you mean 'cat'"),
        (("new", "--classes", "21"), "1 to 20, got 21"),
        ((".",), "Pass a new folder"),
    ],
)
def test_sample_rejects_wrong_arguments(
    photos: Path, probprompt: Command, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos)
    answer = probprompt("data", "sample", *arguments)
    assert answer.code == 2 and message in answer.err and not Path("new").exists()
