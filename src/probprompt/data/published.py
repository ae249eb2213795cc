"""Published benchmarks: contents, sources and folders."""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import ClassVar, Literal

import numpy as np

from probprompt.data import layouts
from probprompt.data.datasets import Benchmark, ImageData, ImageSet, benchmark, registered
from probprompt.data.layouts import Layout
from probprompt.errors import UserError, shorten

PLACE = "PROBPROMPT_DATA"  # environment variable with the folder for datasets

_LISTS = (
    "https://raw.githubusercontent.com/GT-RIPL/CODA-Prompt/6417d4f68754be68b697c7ca2323ee61e791e1a3/dataloaders/splits/"
)
_CUB_FILE = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
_SKETCHES = "https://cybertron.cg.tu-berlin.de/eitz/projects/classifysketch/sketches_png.zip"
_TRAIN_LIST = "6bcaa14ca9359915ac3a44c48ae71388146385686eb15da79a37844421a0b845"
_TEST_LIST = "57275ac242d68983a4f39ccb81ec34f48b1bd920b9cd79e6e8040d7c042db02a"


@dataclass(frozen=True)
class Source:
    """A published file with its hash."""

    url: str
    algorithm: Literal["md5", "sha256"]
    digest: str
    unpack: bool = True  # whether it is an archive of images, or a file to store next to them

    @property
    def file(self) -> str:
        """File name."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Figures:
    """The published contents of a dataset; None if unknown."""

    classes: int
    train: int
    test: int
    train_per_class: tuple[int, int]  # smallest and largest number of images of a class
    test_per_class: tuple[int, int]
    shared: int | None = None  # number of test images that are also training images
    encoding: Literal["jpeg", "lossless"] | None = None
    size: tuple[int, int] | None = None  # width and height, if the same for all images


def data_folder() -> Path:
    """Return ``PROBPROMPT_DATA``, else ``probprompt`` in the user's data folder."""
    folder = os.environ.get(PLACE, "")
    if folder:
        return Path(folder).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_DATA_HOME", ""))
    try:
        return (xdg if xdg.is_absolute() else Path.home() / ".local" / "share") / "probprompt"
    except RuntimeError:
        raise UserError(f"No home directory found. Set {PLACE} to the folder for datasets.") from None


class Dataset(Benchmark):
    """A published dataset in any of its common layouts."""

    stored = True
    sources: ClassVar[tuple[Source, ...]]  # the archive of the images, then lists
    folders: ClassVar[tuple[str, ...]]  # common names of the folder of images
    layouts: ClassVar[tuple[Layout, ...]]
    figures: ClassVar[Figures]

    def __init__(self, root: Path | None = None) -> None:
        self.root = root  # its folder or the folder above; None: the folder for all datasets

    def load(self, short_side: int | None) -> ImageData:
        """List the images."""
        folder, layout = self.locate()
        if layout is layouts.LISTED and layouts.find_lists(folder) is None:
            raise UserError(self._unlisted(folder))
        return layout.load(folder, short_side)

    def locate(self) -> tuple[Path, Layout]:
        """Return the folder and layout of the images; raise UserError if not found."""
        located = self.recognize()
        if located is None:
            raise UserError(self._missing())
        return located

    def recognize(self) -> tuple[Path, Layout] | None:
        """Return the folder and layout of the images, or None."""
        bases = (self.place / self.name, self.place) if self.root else (self.place,)
        folders = (base / name for base in bases for name in (*self.folders, ""))
        return next(((path, one) for path in folders for one in self.layouts if path.is_dir() and one.fits(path)), None)

    def miscounts(self, data: ImageData) -> list[str]:
        """Return differences in the number of classes and images, and in the order of classes."""
        names, published = data.class_names, self.class_counts()
        differences = []
        if len(names) != self.figures.classes:
            differences.append(f"{len(names)} classes, published: {self.figures.classes}")
        elif set(names) == set(published) and names != tuple(published):
            differences.append(f"class order differs from the published one: {shorten(names, 3)}")
        for split, images, total, limits in (
            ("train", data.train, self.figures.train, self.figures.train_per_class),
            ("test", data.test, self.figures.test, self.figures.test_per_class),
        ):
            if len(images) != total:
                differences.append(f"{split}: {len(images)} images, published: {total}")
            expected = {name: counts[split == "test"] for name, counts in published.items()}
            differences += [f"{split}: {text}" for text in _odd_classes(names, images, expected, limits)]
        return differences

    @classmethod
    def lists(cls) -> set[str]:
        """Return the SHA-256 of the published lists of training and test images, if any."""
        return {item.digest for item in cls.sources if not item.unpack}

    def class_counts(self) -> dict[str, tuple[int, int]]:
        """Return published numbers of training and test images by class; empty if unknown."""
        return {}

    @property
    def place(self) -> Path:
        """Expected folder."""
        return self.root.absolute() if self.root else data_folder() / self.name

    def _missing(self) -> str:
        forms = "; ".join(f"({number}) {layout.form}" for number, layout in enumerate(self.layouts, start=1))
        if self.root and self.place.is_dir():
            return f"{self.place} does not contain {self.name}. Accepted: {forms}."
        state = "does not contain it" if self.place.is_dir() else "does not exist"
        return (
            f"{self.name} not found: {self.place} {state}. Run 'probprompt data get {self.name}', copy it there, or "
            f"set data.root or {PLACE}. Accepted: {forms}."
        )

    def _unlisted(self, folder: Path) -> str:
        remedy = f"Add {' and '.join(source.url for source in self.sources[1:])}"
        if self.root is None or folder.name == self.name:
            option = f" --dir {quote(str(folder.parent))}" if self.root else ""
            remedy = f"Run 'probprompt data get {self.name}{option}'"
        lists = "the lists of training and test images are missing"
        return f"{folder}: {lists}. {remedy}, or add train.txt and test.txt with one class/file per line."


def _odd_classes(
    names: tuple[str, ...], images: ImageSet, expected: dict[str, int], limits: tuple[int, int]
) -> Iterator[str]:
    counts = list(zip(names, np.bincount(images.labels, minlength=len(names)).tolist(), strict=True))
    low, high = limits
    wrong = [f"{name} has {n} instead of {expected[name]}" for name, n in counts if n != expected.get(name, n)]
    outside = [f"{name} has {n}" for name, n in counts if name not in expected and not low <= n <= high]
    if wrong:
        yield f"images per class differ from the published ones: {shorten(wrong)}"
    if outside:
        each = f"{low}" if low == high else f"{low} to {high}"
        yield f"expected {each} images per class, but {shorten(outside)}"


@benchmark
class Cifar100(Dataset):
    """Small photos of 100 classes (Krizhevsky, 2009)."""

    name = "cifar100"
    summary = "CIFAR-100: photos of 100 classes, 32 px"
    enlarge = False
    sources = (
        Source("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "md5", "eb9058c3a382ffc7106e4002c42a8d85"),
    )
    folders = ("cifar-100-python", "CIFAR-100", "cifar-100")
    layouts = (layouts.CIFAR, layouts.tree(layouts.plain_names))
    figures = Figures(100, 50_000, 10_000, (500, 500), (100, 100), shared=10, encoding="lossless", size=(32, 32))


@benchmark
class ImageNetR(Dataset):
    """Renditions of 200 ImageNet classes (Hendrycks et al., 2021), split as in CODA-Prompt."""

    name = "imagenet-r"
    summary = "ImageNet-R: 200 classes as art, cartoons, sketches, toys and more"
    sources = (
        Source("https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar", "md5", "a61312130a589d0ca1a8fca1f2bd3337"),
        Source(_LISTS + "imagenet-r_train.yaml", "sha256", _TRAIN_LIST, unpack=False),
        Source(_LISTS + "imagenet-r_test.yaml", "sha256", _TEST_LIST, unpack=False),
    )
    folders = ("imagenet-r",)
    layouts = (layouts.LISTED, layouts.tree(layouts.wordnet_names))
    figures = Figures(200, 24_000, 6_000, (38, 354), (5, 81), encoding="jpeg")


@benchmark
class Cub200(Dataset):
    """Photos of 200 bird species (Wah et al., 2011)."""

    name = "cub200"
    summary = "CUB-200-2011: photos of 200 bird species"
    sources = (Source(_CUB_FILE, "md5", "97eceeb196236b17998738112f37df78"),)
    folders = ("CUB_200_2011",)
    layouts = (layouts.CUB, layouts.tree(layouts.numbered_names))
    figures = Figures(200, 5_994, 5_794, (29, 30), (11, 30), encoding="jpeg")

    def class_counts(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of the official split."""
        with (Path(__file__).parent / "cub200.csv").open(encoding="utf-8", newline="") as file:
            return {row["class"]: (int(row["train"]), int(row["test"])) for row in csv.DictReader(file)}


@benchmark
class TinyImageNet(Dataset):
    """Small photos of 200 ImageNet classes (Stanford's CS231n); not in the paper."""

    name = "tiny-imagenet"
    summary = "Tiny-ImageNet: photos of 200 ImageNet classes, 64 px"
    enlarge = False
    sources = (Source("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5", "90528d7ca1a48142e341f4ef8d21d0de"),)
    folders = ("tiny-imagenet-200",)
    layouts = (layouts.TINY, layouts.tree(layouts.wordnet_names))
    figures = Figures(200, 100_000, 10_000, (500, 500), (50, 50), shared=7, encoding="jpeg", size=(64, 64))


@benchmark
class TuBerlin(Dataset):
    """Sketches of 250 classes by the public (Eitz et al., 2012), 80 each; not in the paper."""

    name = "tu-berlin"
    summary = "TU-Berlin: sketches of 250 classes, with 64 for training and 16 for testing each"
    sources = (Source(_SKETCHES, "md5", "023123df86a928a5273e3ba11990d8fd"),)
    folders = ("png", "sketches_png", "sketches_png/png", "TU-Berlin")
    layouts = (
        layouts.tree(layouts.plain_names),
        layouts.flat("png/ with 250 class folders", "tu-berlin, seed 0", layouts.plain_names),
    )
    figures = Figures(250, 16_000, 4_000, (64, 64), (16, 16), encoding="lossless", size=(1111, 1111))


def recognize(path: Path) -> Dataset | None:
    """Return the dataset in a folder or its subfolder, by layout or name."""
    known = [source for source in registered().values() if issubclass(source, Dataset)]
    inside = [source for source in known if source(path / source.name).recognize()]
    if len(inside) > 1:
        folders = shorten(path / source.name for source in inside)
        raise UserError(f"{path} contains {len(inside)} datasets. Choose one of {folders}.")
    if inside:
        return inside[0](path)
    fitting = [(source, located) for source in known if (located := source(path).recognize())]
    unique = [source for source, (folder, layout) in fitting if layout.is_unique(folder)]
    named = [source for source, _ in fitting if path.name in (source.name, *source.folders)]
    return next((source(path) for source in unique + named), None)
