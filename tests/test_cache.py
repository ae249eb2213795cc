"""Decoded images on disk: decoded once, correct, and harmless whatever happens to them."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import PIL
import pytest
from PIL import Image

from probprompt.data import cache as module
from probprompt.data.cache import Decoded, Entry, ImageCache, decode
from probprompt.data.images import ImageFiles, Pixels, UnreadableImageError, read_ahead, read_image
from probprompt.errors import UserError

SIZES = ((12, 20), (9, 7), (30, 11), (12, 20), (5, 40), (16, 16))
NAMES = tuple(f"{'ant' if index < 3 else 'bee'}/{index}.png" for index in range(len(SIZES)))


@dataclass(frozen=True)
class Counted(ImageFiles):
    """Files that record which rows are decoded."""

    reads: list[int] = field(default_factory=list)

    def read(self, row: int) -> Pixels:
        self.reads.append(row)
        return super().read(row)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures of several sizes."""
    random = np.random.RandomState(3)
    for name, size in zip(NAMES, SIZES, strict=True):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.randint(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    return tmp_path / "pictures"


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    """A cache that keeps the smallest folder."""
    return ImageCache(tmp_path / "cache", worth=0)


def quiet(_: object) -> None:
    """Neither progress nor notes."""


def place(cache: ImageCache, files: ImageFiles) -> Entry:
    found = cache.entry(files)
    assert found is not None
    return found


@pytest.fixture
def entry(cache: ImageCache, folder: Path) -> Entry:
    return place(cache, ImageFiles(folder, NAMES, None))


def images(decoded: Decoded) -> list[Pixels]:
    """The images one by one, cut out of the pixels."""
    assert len(decoded.pixels) == 3 * decoded.sizes.prod(axis=1).sum()
    ends = np.cumsum(3 * decoded.sizes.prod(axis=1))[:-1]
    assert decoded.offsets.tolist() == [0, *ends]
    parts = np.split(np.asarray(decoded.pixels), ends)
    return [part.reshape(*size, 3) for part, size in zip(parts, decoded.sizes.tolist(), strict=True)]


def assert_right(decoded: Decoded, root: Path) -> None:
    for image, name in zip(images(decoded), NAMES, strict=True):
        np.testing.assert_array_equal(image, np.asarray(Image.open(root / name)))


def only_entry(cache: ImageCache) -> Path:
    """The only entry in the cache, except locks."""
    (found,) = (path for path in cache.folder.iterdir() if path.suffix != ".lock")
    return found


def test_second_run_decodes_nothing(folder: Path, cache: ImageCache) -> None:
    files, advanced = Counted(folder, NAMES, None), list[int]()
    entry = place(cache, files)
    assert entry.read() is None
    first = entry.write(advanced.append, quiet)
    assert sorted(files.reads) == list(range(6)) and advanced == [1] * 6
    assert_right(first, folder)
    assert first.unreadable == {} and first.sizes.tolist() == [list(size) for size in SIZES]
    again = Counted(folder, NAMES, None)
    second = place(cache, again).read(verify=True)
    assert second is not None and again.reads == []
    assert_right(second, folder)
    assert second.sha256 == first.sha256 == hashlib.sha256(first.pixels.tobytes()).hexdigest()
    assert isinstance(second.pixels, np.memmap)  # not read into memory


def test_entry_of_reduced_images_and_its_index(folder: Path, cache: ImageCache, tmp_path: Path) -> None:
    decoded = place(cache, ImageFiles(folder, NAMES, 8)).write(quiet, quiet)
    found = only_entry(cache)
    index = json.loads((found / "index.json").read_text())
    assert found == cache.root / "images" / index["key"]
    assert {path.name for path in found.iterdir()} == {"pixels.u8", "index.json"}
    assert index["names"] == list(NAMES) and index["stored_side"] == 8 and index["folder"] == str(folder)
    assert index["sizes"] == [[8, 13], [9, 7], [22, 8], [8, 13], [5, 40], [8, 8]]
    assert index["sha256"] == hashlib.sha256((found / "pixels.u8").read_bytes()).hexdigest()
    assert index["decoders"]["pillow"] == PIL.__version__
    copies = tmp_path / "copies"  # without loss: their hash is that of the files that a run reduces
    for name, image in zip(NAMES, images(decoded), strict=True):
        np.testing.assert_array_equal(image, read_image(folder / name, 8))
        (copies / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(copies / name)
    sources = (ImageFiles(copies, NAMES, 8), ImageFiles(folder, NAMES, None))
    copied, whole = (place(cache, source).write(quiet, quiet).sha256 for source in sources)
    assert decoded.sha256 == copied != whole


def test_changed_file_is_decoded_again(entry: Entry, cache: ImageCache, folder: Path) -> None:
    entry.write(quiet, quiet)
    path, other = folder / NAMES[3], folder.parent / "other.png"
    Image.fromarray(np.full((12, 20, 3), 7, np.uint8)).save(other)
    whole, moment = path.read_bytes() + b"x", path.stat().st_mtime_ns
    for content, changed in ((whole, moment), (whole, moment + 1), (other.read_bytes(), moment + 1)):
        path.write_bytes(content)
        os.utime(path, ns=(moment, changed))
        found = place(cache, entry.files)
        assert found.read() is None
        assert_right(found.write(quiet, quiet), folder)


def test_entries_by_content(folder: Path, cache: ImageCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))  # of the same names, sizes and times
    assert (copy / NAMES[0]).stat().st_mtime_ns == (folder / NAMES[0]).stat().st_mtime_ns
    different = [ImageFiles(folder, NAMES, side) for side in (None, 8, 9)]
    different += [ImageFiles(folder, names, None) for names in (NAMES[:-1], NAMES[::-1])]
    folders = {place(cache, files).folder for files in (*different, ImageFiles(copy, NAMES, None))}
    assert len(folders) == 6
    (tmp_path / "link").symlink_to(folder)  # another path to the same files
    linked = ImageFiles(tmp_path / "link", NAMES, None)
    assert place(cache, linked) == Entry(place(cache, different[0]).folder, linked)
    monkeypatch.setattr("PIL.__version__", "0.0")
    assert place(cache, different[0]).folder not in folders


def test_file_name_that_is_not_unicode(folder: Path, cache: ImageCache) -> None:
    name = os.fsdecode(b"ant/caf\xe9.png")
    try:
        (folder / NAMES[0]).rename(folder / name)
    except OSError:
        pytest.skip("this file system takes unicode only")
    entry = place(cache, ImageFiles(folder, (name, *NAMES[1:]), None))
    entry.write(quiet, quiet)
    assert entry.read() is not None


def test_decode_keeps_the_order_and_bounds_the_memory() -> None:
    reads, most = list[int](), 0

    def read(row: int) -> Pixels:
        reads.append(row)
        time.sleep(0.004 * (row % 5 == 0))
        return np.full((1, 1 + row % 3, 3), row, np.uint8)

    for taken, _ in read_ahead(read, range(200), workers=2):
        time.sleep(0.0005)
        most = max(most, len(reads) - taken)
    assert len(reads) == 200 and most <= 2 * 4 + 1


def test_decode_of_strided_arrays_and_of_nothing() -> None:
    large = np.random.RandomState(0).randint(0, 256, (8, 9, 3), dtype=np.uint8)
    decoded = decode(lambda row: large[row::2, ::-1], 2, quiet)
    for row, image in enumerate(images(decoded)):
        np.testing.assert_array_equal(image, large[row::2, ::-1])
    decoded = decode(lambda _: np.zeros((1, 1, 3), np.uint8), 0, quiet)
    assert decoded.pixels.shape == (0,) and decoded.sizes.shape == (0, 2) and decoded.offsets.shape == (0,)


def test_unreadable_files_are_remembered(folder: Path, cache: ImageCache) -> None:
    for row in (1, 5):
        (folder / NAMES[row]).write_bytes(b"not an image")
    whole = (folder / NAMES[4]).read_bytes()
    (folder / NAMES[4]).write_bytes(whole[: len(whole) // 2])
    first = place(cache, ImageFiles(folder, NAMES, None)).write(quiet, quiet)
    files = Counted(folder, NAMES, None)
    second = place(cache, files).read()
    assert second is not None and files.reads == []
    assert second.unreadable == first.unreadable and sorted(second.unreadable) == [1, 4, 5]
    assert second.unreadable[1] == "not a supported image format" and "truncated" in second.unreadable[4]
    for row in (0, 2, 3):
        np.testing.assert_array_equal(images(second)[row], np.asarray(Image.open(folder / NAMES[row])))
    for name in NAMES:
        (folder / name).write_bytes(b"not an image")
    place(cache, files).write(quiet, quiet)
    files.reads.clear()
    none = place(cache, files).read()
    assert none is not None and files.reads == [] and len(none.unreadable) == 6 and len(none.pixels) == 0


@dataclass(frozen=True)
class Moody(ImageFiles):
    """Files of which one cannot be read as long as the disk has a problem."""

    problem: list[bool] = field(default_factory=lambda: [True])

    def read(self, row: int) -> Pixels:
        if row == 2 and self.problem:
            raise UnreadableImageError("Input/output error", passing=True)
        return super().read(row)


def test_temporary_failure_is_tried_again(folder: Path, cache: ImageCache) -> None:
    files = Moody(folder, NAMES, None)
    entry = place(cache, files)
    entry.write(quiet, quiet)
    found = entry.read()
    assert found is not None and found.unreadable == {2: "Input/output error"}
    files.problem.clear()
    assert entry.read() is None
    assert_right(entry.write(quiet, quiet), folder)
    assert entry.read() is not None


def test_read_image_distinguishes_temporary_failures(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    whole = (folder / NAMES[2]).read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "none.png").write_bytes(b"")
    for name, passing in (("missing.png", True), ("folder.png", True), ("half.png", False), ("none.png", False)):
        with pytest.raises(UnreadableImageError) as problem:
            read_image(tmp_path / name)
        assert problem.value.passing is passing, name


def test_missing_file_does_not_stop_the_others(entry: Entry, cache: ImageCache, folder: Path) -> None:
    (folder / NAMES[0]).unlink()
    assert list(place(cache, entry.files).write(quiet, quiet).unreadable) == [0]
    Image.new("RGB", (3, 4)).save(folder / NAMES[0])
    assert place(cache, entry.files).read() is None


def _edit(**values: Any) -> Callable[[Path], None]:
    def change(entry: Path) -> None:
        (entry / "index.json").write_text(json.dumps({**json.loads((entry / "index.json").read_text()), **values}))

    return change


DAMAGE: dict[str, Callable[[Path], object]] = {
    "pixels cut": lambda entry: os.truncate(entry / "pixels.u8", (entry / "pixels.u8").stat().st_size - 1),
    "pixels longer": lambda entry: (entry / "pixels.u8").write_bytes((entry / "pixels.u8").read_bytes() + b"x"),
    "no pixels": lambda entry: (entry / "pixels.u8").unlink(),
    "no index": lambda entry: (entry / "index.json").unlink(),
    "empty": lambda entry: list(map(os.remove, entry.iterdir())),
    "half an index": lambda entry: os.truncate(entry / "index.json", 100),
    "empty index": lambda entry: os.truncate(entry / "index.json", 0),
    "no JSON": lambda entry: (entry / "index.json").write_bytes(b"\xff\xfe"),
    "a list": lambda entry: (entry / "index.json").write_text("[1]"),
    "other format": _edit(format=0),
    "other key": _edit(key="0" * 64),
    "other names": _edit(names=["x.png", *NAMES[1:]]),
    "too few sizes": _edit(sizes=[[12, 20]]),
    "sizes as words": _edit(sizes=["a", "b"]),
    "negative sizes": _edit(sizes=[[-12, -20], *SIZES[1:]]),
    "sizes of another row length": _edit(sizes=[[20, 12, 3], *SIZES[1:]]),
    "an unreadable file that has pixels": _edit(unreadable=[[1, "broken", False]]),
    "no reasons": _edit(unreadable=None),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_entry_is_decoded_again(folder: Path, cache: ImageCache, what: str) -> None:
    files = Counted(folder, NAMES, None)
    entry = place(cache, files)
    entry.write(quiet, quiet)
    files.reads.clear()
    DAMAGE[what](entry.folder)
    assert entry.read() is None
    assert_right(entry.write(quiet, quiet), folder)
    assert len(files.reads) == 6
    assert entry.read(verify=True) is not None and only_entry(cache) == entry.folder


def test_changed_byte_is_found_on_verification(entry: Entry, folder: Path) -> None:
    content = bytearray(entry.write(quiet, quiet).pixels.tobytes())
    content[0] ^= 1
    (entry.folder / "pixels.u8").write_bytes(content)
    assert entry.read() is not None
    assert entry.read(verify=True) is None
    assert_right(entry.write(quiet, quiet), folder)
    assert entry.read(verify=True) is not None


def test_interrupted_decoding_leaves_nothing_behind(entry: Entry, cache: ImageCache, folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        entry.write(Mock(side_effect=KeyboardInterrupt), quiet)
    assert [path.suffix for path in cache.folder.iterdir()] == [".lock"]
    assert_right(entry.write(quiet, quiet), folder)


@pytest.mark.parametrize("locks", [True, False])
def test_concurrent_threads(folder: Path, cache: ImageCache, locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    files, found, notes, advanced = Counted(folder, NAMES, None), list[Decoded](), list[str](), list[int]()
    together = threading.Barrier(4)
    if not locks:  # the first to finish stays
        monkeypatch.setitem(sys.modules, "fcntl", None)

    def work() -> None:
        together.wait()
        found.append(place(cache, files).write(advanced.append, notes.append, workers=1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and sorted(files.reads) == sorted([*range(6)] * (1 if locks else 4))
    for decoded in found:
        assert_right(decoded, folder)
    assert set(notes) <= {"Waiting for another process that decodes the same images."} and sum(advanced) == 4 * 6
    assert only_entry(cache) == place(cache, files).folder and place(cache, files).read(verify=True) is not None


SCRIPT = """
import resource, sys, time
from pathlib import Path
from probprompt.data.cache import ImageCache
from probprompt.data.images import ImageFiles
root, folder, names, limit, pause = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[5:], int(sys.argv[3]), sys.argv[4]
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
class Slow(ImageFiles):
    def read(self, row):
        time.sleep(float(pause))
        return super().read(row)
steps, notes = [], []
entry = ImageCache(root, worth=0).entry(Slow(folder, tuple(names), None))
decoded = entry.write(steps.append, notes.append, workers=1)
print(sum(steps), decoded.sha256, decoded.pixels.tobytes().hex(), *notes)
"""


def other_process(cache: ImageCache, folder: Path, limit: int = 0, pause: float = 0.0) -> subprocess.Popen[str]:
    """Start a process that decodes, with a limit on the bytes of a file and seconds of delay per image."""
    command = [sys.executable, "-c", SCRIPT, *map(str, [cache.root, folder, limit, pause, *NAMES])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> list[str]:
    out, problems = process.communicate(timeout=60)
    assert process.returncode == 0, problems
    return out.split(maxsplit=3)


def test_concurrent_processes_do_no_harm(folder: Path, cache: ImageCache) -> None:
    answers = [answer(process) for process in [other_process(cache, folder, pause=0.02) for _ in range(3)]]
    expected = b"".join(np.asarray(Image.open(folder / name)).tobytes() for name in NAMES)
    for steps, sha256, pixels, *_ in answers:
        assert (steps, bytes.fromhex(pixels), sha256) == ("6", expected, hashlib.sha256(expected).hexdigest())
    assert place(cache, ImageFiles(folder, NAMES, None)).folder == only_entry(cache)


def test_killed_process_leaves_nothing_that_stays(entry: Entry, cache: ImageCache, folder: Path) -> None:
    process = other_process(cache, folder, pause=30)
    deadline = time.monotonic() + 30
    while not any(cache.folder.glob(".*/pixels.u8")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cache.clean() == 0 and any(cache.folder.glob(".*/pixels.u8"))  # in use: kept
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert entry.read() is None and any(cache.folder.glob(".*/pixels.u8"))
    assert_right(entry.write(quiet, quiet), folder)
    assert only_entry(cache) == entry.folder


@pytest.mark.parametrize("limit", [35_000, 95_000])  # in the middle of the pixels; at their end
def test_full_disk_keeps_images_in_memory(folder: Path, cache: ImageCache, limit: int) -> None:
    for shade, name in enumerate(NAMES):
        Image.fromarray(np.full((80, 67, 3), shade, np.uint8)).save(folder / name)
    steps, sha256, pixels, note = answer(other_process(cache, folder, limit))
    assert bytes.fromhex(pixels) == b"".join(bytes([shade]) * (80 * 67 * 3) for shade in range(6))
    assert (steps, sha256) == ("6", "None") and str(cache.folder) in note and "PROBPROMPT_CACHE" in note
    assert [path.suffix for path in cache.folder.iterdir()] == [".lock"]


def test_unwritable_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_bytes(b"a file")
    notes, advanced = list[str](), list[int]()
    entry = place(ImageCache(tmp_path / "taken", worth=0), ImageFiles(folder, NAMES, None))
    assert entry.read() is None
    decoded = entry.write(advanced.append, notes.append)
    assert_right(decoded, folder)
    assert decoded.sha256 is None and sum(advanced) == 6 and len(notes) == 1 and str(tmp_path / "taken") in notes[0]
    monkeypatch.setattr(ImageFiles, "read", Mock(side_effect=MemoryError))
    with pytest.raises(UserError, match=r"nor in memory.*data.stored_size"):
        entry.write(quiet, quiet)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PROBPROMPT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ImageCache.default() == ImageCache(tmp_path / ".cache" / "probprompt")
    for variable, value, folder in (
        ("XDG_CACHE_HOME", "relative", ".cache/probprompt"),  # not allowed, and to be ignored
        ("XDG_CACHE_HOME", str(tmp_path / "xdg"), "xdg/probprompt"),
        ("PROBPROMPT_CACHE", "~/mine", "mine"),
    ):
        monkeypatch.setenv(variable, value)
        assert ImageCache.default() == ImageCache(tmp_path / folder)
    for word in ("off", "OFF"):
        monkeypatch.setenv("PROBPROMPT_CACHE", word)
        assert ImageCache.default() is None


def test_few_small_files_are_not_kept(entry: Entry, folder: Path, tmp_path: Path) -> None:
    total = sum((folder / name).stat().st_size for name in NAMES)
    assert ImageCache(tmp_path).entry(entry.files) is None
    assert ImageCache(tmp_path, worth=total + 1).entry(entry.files) is None
    assert ImageCache(tmp_path, worth=total).entry(entry.files) is not None


def test_cleaning_removes_the_least_recently_used(folder: Path, cache: ImageCache) -> None:
    entries = [place(cache, ImageFiles(folder, NAMES, side)) for side in (5, 6, 7)]
    for age, entry in enumerate(entries):
        entry.write(quiet, quiet)
        os.utime(entry.folder, (1000 + age, 1000 + age))
    mapped = entries[0].read()  # used: now the last to go
    assert mapped is not None
    before = mapped.pixels.tobytes()
    sizes = [sum(path.stat().st_size for path in entry.folder.iterdir()) for entry in entries]
    assert cache.clean(sum(sizes)) == 0
    assert cache.clean(sizes[0] + sizes[2]) == sizes[1]
    assert [entry.folder.exists() for entry in entries] == [True, False, True]
    assert cache.clean(sizes[0]) == sizes[2] and entries[0].folder.exists()
    left = module._part(entries[1].folder)
    left.mkdir()
    assert cache.clean() == sizes[0] and not entries[0].folder.exists() and not left.exists()
    assert mapped.pixels.tobytes() == before  # who uses it is not disturbed
    assert ImageCache(cache.root / "nowhere").clean() == 0


def test_cache_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probprompt: Callable[..., Any]) -> None:
    monkeypatch.setenv("PROBPROMPT_CACHE", str(tmp_path))
    (tmp_path / "images" / "old").mkdir(parents=True)
    with (tmp_path / "images" / "old" / "pixels.u8").open("wb") as stream:
        stream.truncate(50_000_000)
    assert "0.05 GB" in probprompt("data", "cache").out
    printed = probprompt("data", "cache", "--max-size", "0").out
    assert "Deleted 0.05 GB" in printed and "0.00 GB of decoded images" in " ".join(printed.split())
    monkeypatch.setenv("PROBPROMPT_CACHE", "off")
    assert "switched off" in probprompt("data", "cache").out
