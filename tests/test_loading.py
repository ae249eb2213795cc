"""Image sets in memory are the same with and without the cache, on the device and on the host."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from probprompt import kernels, randomness
from probprompt.config import parse_config
from probprompt.data import image_store, transforms
from probprompt.data.cache import ImageCache, decode
from probprompt.data.datasets import ImageSet, find
from probprompt.data.image_store import ImageStore, Loaded, load, load_kept
from probprompt.data.images import ImageFiles, Pixels
from probprompt.data.transforms import (
    DRAWS,
    Augmentation,
    Kernel,
    Packed,
    Preprocessor,
    RandomViews,
    draws_needed,
    random_boxes,
)
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs import train as runs_train

CPU = torch.device("cpu")
Settings = Callable[..., dict[str, Any]]
Sizes = tuple[tuple[int, int], ...]
ONE_SIZE = ((12, 20),) * 7
RAGGED = ((12, 20), (9, 7), (30, 11), (12, 20), (5, 40), (16, 16), (12, 20))


def pictures(sizes: Sizes) -> list[Pixels]:
    random = np.random.RandomState(5)
    return [random.randint(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def stores(sizes: Sizes, rows: list[int] | None = None) -> tuple[ImageStore, ImageStore]:
    """The same images held by the device, and by the host."""
    arrays = pictures(sizes)
    decoded = decode(lambda row: arrays[row], len(arrays), lambda _: None)
    chosen = None if rows is None else np.array(rows)
    resident, hosted = (ImageStore.place(decoded, CPU, chosen, room) for room in (None, 0))
    assert resident.resident and not hosted.resident
    return resident, hosted


both = pytest.mark.parametrize("sizes", [ONE_SIZE, RAGGED], ids=["one size", "ragged"])


@both
@pytest.mark.parametrize("rows", [None, [6, 1, 4, 3]])
def test_stores_hold_the_images(sizes: Sizes, rows: list[int] | None) -> None:
    arrays, chosen = pictures(sizes), rows or list(range(7))
    for store in stores(sizes, rows):
        assert len(store) == len(chosen) and store.bytes == sum(arrays[row].size for row in chosen)
        for batch in ([0], [2, 0, 2], list(range(len(chosen)))):
            expected = [arrays[chosen[index]] for index in batch]
            canvas = store.canvas(torch.tensor(batch))
            assert canvas.dtype == torch.uint8 and canvas.is_contiguous()
            pixels, offsets, extents = store.batch(torch.tensor(batch))
            assert offsets.dtype == torch.int64 and extents.tolist() == [list(image.shape[:2]) for image in expected]
            assert store.resident or len(pixels) == sum(image.size for image in expected)  # no more than needed is sent
            for drawn, start, image in zip(canvas, offsets.tolist(), expected, strict=True):
                found = drawn[:, : image.shape[0], : image.shape[1]].permute(1, 2, 0).numpy()
                np.testing.assert_array_equal(found, image)
                np.testing.assert_array_equal(pixels[start : start + image.size].numpy(), image.reshape(-1))


def test_keys_follow_the_pixels_and_the_size() -> None:
    first = np.random.RandomState(0).randint(0, 255, (6, 8, 3)).astype(np.uint8)
    other = first.copy()
    other[5, 7, 2] ^= 1
    images = [first, other, first.reshape(8, 6, 3), first, np.ascontiguousarray(first[:, ::-1])]
    store = Packed.of(images, torch.device("cpu"))
    keys = store.keys(torch.arange(5))
    assert keys[0] == keys[3] and keys.unique().numel() == 4 and keys.dtype == torch.long
    assert torch.equal(keys[[4, 1]], store.keys(torch.tensor([4, 1])))
    assert torch.equal(Packed.of(images[::-1], torch.device("cpu")).keys(torch.arange(5)), keys.flip(0))
    assert keys[0] == 3727788898050532886, "saved classifiers keep such numbers"


@both
@pytest.mark.parametrize("chunk", [1, 1500, 10**6])
def test_images_are_sent_in_chunks(sizes: Sizes, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_store, "_CHUNK", chunk)
    store, rows, arrays = stores(sizes)[0], torch.tensor([6, 2, 3, 0]), pictures(sizes)
    flat = [arrays[row].reshape(-1) for row in rows.tolist()]
    sent, starts = image_store._send(store.pixels, store.offsets[rows], store.sizes[rows], sum(map(len, flat)), CPU)
    np.testing.assert_array_equal(sent.numpy(), np.concatenate(flat))
    assert starts.tolist() == [sum(map(len, flat[:row])) for row in range(4)]


def test_store_shape() -> None:
    assert all(store.shape == (12, 20) for store in stores(ONE_SIZE))
    # Of one size, but with others between them: they cannot be numbered consecutively.
    assert all(store.shape is None for store in (*stores(RAGGED), *stores(RAGGED, [0, 3, 6])))
    empty = ImageStore.of([], CPU)
    assert len(empty) == 0 and empty.bytes == 0 and empty.sizes.shape == (0, 2)
    for full in stores(ONE_SIZE):
        assert full.canvas(torch.empty(0, dtype=torch.long)).shape == (0, 3, 12, 20)


@both
def test_subsets_and_inverted_images(sizes: Sizes) -> None:
    for store in stores(sizes):
        before = store.canvas(torch.arange(7))
        few = store.only(torch.tensor([4, 2]))
        assert len(few) == 2 and few.resident == store.resident
        assert len(few.pixels) == few.bytes == sum(3 * high * wide for high, wide in (sizes[4], sizes[2]))
        assert torch.equal(few.canvas(torch.tensor([1, 0])), store.canvas(torch.tensor([2, 4])))
        inverted = store.inverted(torch.tensor([1, 6])).canvas(torch.arange(7))
        for row, (high, wide) in enumerate(sizes):
            was = before[row, :, :high, :wide]
            assert torch.equal(inverted[row, :, :high, :wide], 255 - was if row in (1, 6) else was)
        assert torch.equal(store.canvas(torch.arange(7)), before)


def viewer(kernel: Kernel = "bicubic", device: torch.device = CPU) -> Preprocessor:
    return Preprocessor.of(16, 18, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), kernel, device)


def views(store: ImageStore, indices: Tensor, augmentation: Augmentation) -> RandomViews:
    draws = randomness.uniform((len(indices), DRAWS), 0, "test").to(store.device)
    colours = randomness.uniform((len(indices), draws_needed(augmentation)), 0, "colour").to(store.device)
    return RandomViews(random_boxes(store.sizes[indices], draws), augmentation, colours)


@both
def test_views_of_hosted_and_resident_images_are_equal(sizes: Sizes) -> None:
    resident, hosted = stores(sizes)
    rows = torch.tensor([3, 6, 1, 1, 0])
    expected = viewer().evaluation(resident, rows)
    assert expected.shape == (5, 3, 16, 16) and torch.equal(viewer().evaluation(hosted, rows), expected)
    augmentations: tuple[Augmentation, ...] = ("crop", "crop+color", "autoaugment+crop", "crop+brightness")
    seen = []
    for augmentation in augmentations:
        given = views(resident, rows, augmentation)
        seen.append(viewer().random(resident, rows, given))
        assert torch.equal(viewer().random(hosted, rows, given), seen[-1])
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    given = views(resident, rows, "crop+brightness")
    sharp = transforms.resample(resident.canvas(rows), given.boxes, 16, "bicubic")  # HiDe-Prompt's crops
    mean, spread = viewer().mean, viewer().std
    assert given.draws is not None
    torch.testing.assert_close(seen[3], (transforms.after_crop(sharp, given.draws, given.augmentation) - mean) / spread)


@pytest.mark.parametrize("augmentation", ["crop", "crop+color"])
def test_large_image_does_not_enlarge_the_canvas(augmentation: Augmentation, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = stores(((20, 30), (24, 16), (200, 300), (20, 20), (16, 40)))
    rows = torch.arange(5)
    given = views(store, rows, augmentation)
    assert store.groups(rows) == [slice(0, 5)]
    whole = viewer().evaluation(store, rows), viewer().random(store, rows, given)
    monkeypatch.setattr(transforms, "CANVAS", 3 * 24 * 40 * 2)
    assert store.groups(rows) == [slice(0, 2), slice(2, 3), slice(3, 5)]
    parts = viewer().evaluation(store, rows), viewer().random(store, rows, given)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    same, _ = stores(ONE_SIZE)
    assert same.groups(rows) == [slice(0, 5)]  # of one size


def test_views_are_normalized_by_channel() -> None:
    store = ImageStore.of([np.full((20, 20, 3), (51, 102, 204), np.uint8)], CPU)
    row = torch.tensor([0])
    expected = torch.tensor([(0.2 - 0.5) / 0.2, (0.4 - 0.4) / 0.3, (0.8 - 0.3) / 0.4])
    given = views(store, row, "crop")
    for seen in (
        viewer().evaluation(store, row),
        viewer().random(store, row, given),
        viewer().random(store, row, RandomViews(given.boxes)),
    ):
        assert torch.allclose(seen[0], expected[:, None, None].expand(3, 16, 16), atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@both
@pytest.mark.parametrize("room", [None, 0])
def test_views_on_a_gpu_and_cpu(sizes: Sizes, room: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device, arrays = torch.device("cuda"), pictures(sizes)
    plain = stores(sizes)[0]
    store = ImageStore.place(decode(lambda row: arrays[row], 7, lambda _: None), device, capacity=room)
    assert store.pixels.device.type == ("cuda" if room is None else "cpu") and store.device.type == "cuda"
    rows = torch.tensor([3, 6, 1, 1, 0])
    for switch in ("on", "off"):
        monkeypatch.setenv(kernels.SWITCH, switch)
        for augmentation in ("crop", "crop+color"):
            expected = viewer().random(plain, rows, views(plain, rows, augmentation))
            found = viewer(device=device).random(store, rows.to(device), views(store, rows.to(device), augmentation))
            assert torch.allclose(found.cpu(), expected, atol=2e-3), (switch, augmentation)
        for kernel in ("bilinear", "bicubic"):
            seen = viewer(kernel, device).evaluation(store, rows.to(device))
            assert torch.allclose(seen.cpu(), viewer(kernel).evaluation(plain, rows), atol=2e-3), (switch, kernel)


@dataclass(frozen=True)
class Counted(ImageFiles):
    """Files that record which rows are decoded."""

    reads: list[int] = field(default_factory=list)

    def read(self, row: int) -> Pixels:
        self.reads.append(row)
        return super().read(row)


class Watch(ProgressCallback):
    """Records what is reported."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.notes: list[str] = []

    @contextmanager
    def stage(self, description: str, total: int) -> Iterator[None]:
        assert description == "reading images"
        self.total += total
        yield

    def advance(self, steps: int) -> None:
        self.done += steps

    def note(self, text: str) -> None:
        self.notes.append(text)


NAMES = tuple(f"{'ant' if index < 3 else 'bee'}/{index}.png" for index in range(7))
LABELS = np.array([0, 0, 0, 1, 1, 1, 1], dtype=np.int64)
SIDES = ([0, 2, 4, 5], [6, 1, 3])


@pytest.fixture(params=[ONE_SIZE, RAGGED], ids=["one size", "ragged"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Seven pictures; the sixth is none."""
    for name, array in zip(NAMES, pictures(request.param), strict=True):
        (tmp_path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(tmp_path / "pictures" / name)
    (tmp_path / "pictures" / NAMES[5]).write_bytes(b"no picture")
    return tmp_path / "pictures"


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    """A cache that keeps the smallest folder."""
    return ImageCache(tmp_path / "cache", worth=0)


def sides(files: ImageFiles) -> list[ImageSet]:
    """A training and a test set out of one folder."""
    every = ImageSet.of_files(files, LABELS)
    return [every.subset(rows) for rows in SIDES]


def entries(cache: ImageCache) -> list[Path]:
    return [path for path in cache.folder.iterdir() if path.is_dir()]


def assert_same(found: Loaded, expected: Loaded) -> None:
    assert (found.names, found.unreadable) == (expected.names, expected.unreadable)
    assert torch.equal(found.labels, expected.labels) and torch.equal(found.store.sizes, expected.store.sizes)
    every = torch.arange(len(found.labels))
    assert torch.equal(found.store.canvas(every), expected.store.canvas(every))
    assert found.stored_side == expected.stored_side


def test_splits_of_a_folder_are_decoded_once(folder: Path, cache: ImageCache) -> None:
    expected = [load(images, CPU, lambda _: None) for images in sides(ImageFiles(folder, NAMES, None))]
    for round_, reads in enumerate((7, 0, 0)):
        files, watch = Counted(folder, NAMES, None), Watch()
        found = load_kept(sides(files), CPU, watch, cache, verify=round_ == 2)
        assert len(files.reads) == reads and watch.done == watch.total == 7 and watch.notes == []
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
            assert one.sha256 is not None and other.sha256 is None
    assert found[0].names == ("ant/0.png", "ant/2.png", "bee/4.png") and found[0].labels.tolist() == [0, 0, 1]
    assert found[0].unreadable == (("bee/5.png", "not a supported image format"),)
    assert found[1].names == ("bee/6.png", "ant/1.png", "bee/3.png") and found[1].unreadable == ()
    for one in found:
        for index, name in enumerate(one.names):
            expected_pixels = np.asarray(Image.open(folder / name))
            image = one.store.only(torch.tensor([index])).canvas(torch.tensor([0]))[0].permute(1, 2, 0)
            np.testing.assert_array_equal(image.numpy(), expected_pixels)
    (pixels,) = cache.folder.glob("*/pixels.u8")
    content = bytearray(pixels.read_bytes())
    content[5] ^= 255
    pixels.write_bytes(content)
    for verify in (False, True):  # what is damaged is found on verification
        train, _ = load_kept(sides(files), CPU, Watch(), cache, verify)
        canvases = [one.store.canvas(torch.tensor([0])) for one in (train, expected[0])]
        assert torch.equal(*canvases) is verify


def test_part_of_a_folder_caches_all_of_it(folder: Path, cache: ImageCache) -> None:
    first, second = Counted(folder, NAMES, None), Counted(folder, NAMES, None)
    watches = Watch(), Watch()
    load_kept(sides(first)[1:], CPU, watches[0], cache)
    load_kept(sides(second)[:1], CPU, watches[1], cache)
    assert sorted(first.reads) == list(range(7)) and second.reads == []
    assert (watches[0].done, watches[0].total) == (7, 7) and (watches[1].done, watches[1].total) == (4, 4)
    Image.fromarray(np.full((12, 20, 3), 9, np.uint8)).save(folder / NAMES[0])
    train, _ = load_kept(sides(second), CPU, Watch(), cache)
    assert (train.store.canvas(torch.tensor([0]))[0, :, :12, :20] == 9).all()  # a changed image is read again


def test_each_stored_size_has_an_entry(folder: Path, cache: ImageCache) -> None:
    for side in (None, 8):
        train, _ = load_kept(sides(ImageFiles(folder, NAMES, side)), CPU, Watch(), cache)
        assert train.describe()["stored_side"] == (side or "full")
        assert train.store.sizes[0].tolist() == ([8, 13] if side else [12, 20])
    assert len(entries(cache)) == 2


def test_without_cache_nothing_is_written(folder: Path, cache: ImageCache) -> None:
    expected = load_kept(sides(ImageFiles(folder, NAMES, None)), CPU, Watch(), cache)
    for other in (None, ImageCache(folder.parent / "other")):  # off; too few files to be worth it
        files, watch = Counted(folder, NAMES, None), Watch()
        for one, kept in zip(load_kept(sides(files), CPU, watch, other), expected, strict=True):
            assert_same(one, kept)
            assert one.sha256 is None
        assert len(files.reads) == watch.done == watch.total == 7
    assert not (folder.parent / "other").exists()
    (folder.parent / "taken").write_bytes(b"a file")  # where nothing can be written, the run goes on
    watch = Watch()
    found = load_kept(sides(ImageFiles(folder, NAMES, None)), CPU, watch, ImageCache(folder.parent / "taken", worth=0))
    for one, kept in zip(found, expected, strict=True):
        assert_same(one, kept)
    assert watch.done == watch.total == 7 and len(watch.notes) == 1 and found[0].sha256 is None


def test_images_without_files_are_not_cached(cache: ImageCache) -> None:
    data, watch = find("emoji-r").load(None), Watch()
    train, test = load_kept((data.train, data.test), CPU, watch, cache)
    assert not cache.folder.exists() and watch.done == watch.total == len(data.train) + len(data.test)
    assert train.store.shape == test.store.shape == (64, 64)
    for loaded, images in ((train, data.train), (test, data.test)):
        canvas = loaded.store.canvas(torch.tensor([3, 0])).permute(0, 2, 3, 1).numpy()
        np.testing.assert_array_equal(canvas, np.stack([images.read(3), images.read(0)]))
    pixels = np.stack([data.train.read(row) for row in range(len(data.train))])
    assert train.describe() == {
        "stored_side": "full",
        "bytes": len(data.train) * 64 * 64 * 3,
        "resident": "host",
        "resident_share": image_store.RESIDENT,
        "pixels_sha256": hashlib.sha256(pixels.tobytes()).hexdigest(),
    }
    arrays = replace(data.train, pixels=pixels)
    assert load(arrays, CPU, watch.advance).sha256 == train.sha256, "as the published files of CIFAR-100 come"


def test_validation_and_test_images_share_one_entry(cache: ImageCache, pictures: Path) -> None:
    source = find(str(pictures))
    data = source.load(4)
    held = source.hold_out(data, 0.25)
    for one in (held, data, source.hold_out(source.load(4), 0.25)):
        pair = (one.train, one.test)
        for images, loaded in zip(pair, load_kept(pair, CPU, Watch(), cache), strict=True):
            assert loaded.names == images.names and loaded.stored_side == 4
            for row in range(len(images)):
                stored = loaded.store.canvas(torch.tensor([row]))[0].permute(1, 2, 0).numpy()
                np.testing.assert_array_equal(stored, images.read(row))
    assert len(entries(cache)) == 1


def test_large_sets_stay_on_the_host(folder: Path, cache: ImageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_kept(sides(ImageFiles(folder, NAMES, None)), CPU, Watch(), cache)
    monkeypatch.setattr(image_store, "_capacity", lambda _: 2000.0)
    watch = Watch()
    found = load_kept(sides(ImageFiles(folder, NAMES, None)), CPU, watch, cache)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    outside = [one for one in found if one.store.bytes > 2000]
    assert [one.store.resident for one in found] == [one.store.bytes <= 2000 for one in found] and outside
    assert len(watch.notes) == len(outside) and "on the host: over 40%" in watch.notes[0]


def test_record_describes_the_images(settings: Settings, cache: ImageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBPROMPT_CACHE", str(cache.root))
    workshop = runs_train.prepare(parse_config(settings(data={"stored_size": 24})), CPU, SILENT)
    record = runs_train.describe(workshop, "run").to_json()["data"]
    assert set(record) == {"train", "test"}
    for side, count in (("train", 48), ("test", 12)):
        assert record[side]["bytes"] == count * 24 * 24 * 3 and record[side]["stored_side"] == 24
        assert record[side]["pixels_sha256"] is None  # too few to be kept
        assert record[side]["resident"] == "host"
    assert not cache.folder.exists()
