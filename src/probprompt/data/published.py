"""The published benchmarks: contents, sources, folders."""

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

PLACE = "PROBPROMPT_DATA"
"""Environment variable with the folder of all datasets."""

_LISTS = (
    "https://raw.githubusercontent.com/GT-RIPL/CODA-Prompt/6417d4f68754be68b697c7ca2323ee61e791e1a3/dataloaders/splits/"
)
_TRAIN_LIST = "6bcaa14ca9359915ac3a44c48ae71388146385686eb15da79a37844421a0b845"
_TEST_LIST = "57275ac242d68983a4f39ccb81ec34f48b1bd920b9cd79e6e8040d7c042db02a"


@dataclass(frozen=True)
class Source:
    """A published file with its hash."""

    url: str
    algorithm: Literal["md5", "sha256"]
    digest: str
    unpack: bool = True
    """Whether it is an archive; otherwise a file that is stored with the images."""

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Figures:
    """The published contents of a dataset; None: not known."""

    classes: int
    train: int
    test: int
    train_per_class: tuple[int, int]
    """The least and the most images of a class."""
    test_per_class: tuple[int, int]
    shared: int | None = None
    """Test images that are training images as well."""
    encoding: Literal["jpeg", "lossless"] | None = None
    size: tuple[int, int] | None = None
    """Width and height, if all images have the same."""


def data_folder() -> Path:
    """Return the folder of datasets: ``PROBPROMPT_DATA``, else ``probprompt`` in the user's data folder."""
    named = os.environ.get(PLACE, "")
    if named:
        return Path(named).expanduser().absolute()
    shared = Path(os.environ.get("XDG_DATA_HOME", ""))
    try:
        return (shared if shared.is_absolute() else Path.home() / ".local" / "share") / "probprompt"
    except RuntimeError:
        raise UserError(f"this user has no home: name the folder of datasets with {PLACE}") from None


class Dataset(Benchmark):
    """A published dataset in any of its common layouts."""

    stored = True
    sources: ClassVar[tuple[Source, ...]]
    """The archive of the images first, then its lists."""
    folders: ClassVar[tuple[str, ...]]
    """Common names of the folder inside."""
    layouts: ClassVar[tuple[Layout, ...]]
    figures: ClassVar[Figures]

    def __init__(self, root: Path | None = None) -> None:
        self.root = root
        """Its folder, or one that contains it under its name; None: the folder of all datasets."""

    def load(self, short_side: int | None) -> ImageData:
        """List the images."""
        folder, layout = self.locate()
        if layout is layouts.LISTED and layouts.find_lists(folder) is None:
            raise UserError(self._unlisted(folder))
        return layout.load(folder, short_side)

    def locate(self) -> tuple[Path, Layout]:
        """Return the folder of the images and their layout."""
        found = self.recognize()
        if found is None:
            raise UserError(self._missing())
        return found

    def recognize(self) -> tuple[Path, Layout] | None:
        """Return the same, or None without such a dataset."""
        bases = (self.place / self.name, self.place) if self.root else (self.place,)
        folders = (base / name for base in bases for name in (*self.folders, ""))
        return next(((path, one) for path in folders for one in self.layouts if path.is_dir() and one.fits(path)), None)

    def miscounts(self, data: ImageData) -> list[str]:
        """Return differences from the published number of classes and images, and order of classes."""
        names, published = data.class_names, self.class_counts()
        found = []
        if len(names) != self.figures.classes:
            found.append(f"{len(names)} classes, published are {self.figures.classes}")
        elif set(names) == set(published) and names != tuple(published):
            found.append(f"the classes are in another order than published: {shorten(names, 3)}")
        for side, images, total, limits in (
            ("train", data.train, self.figures.train, self.figures.train_per_class),
            ("test", data.test, self.figures.test, self.figures.test_per_class),
        ):
            if len(images) != total:
                found.append(f"{side}: {len(images)} images, published are {total}")
            due = {name: counts[side == "test"] for name, counts in published.items()}
            found += [f"{side}: {text}" for text in _odd_classes(names, images, due, limits)]
        return found

    @classmethod
    def lists(cls) -> set[str]:
        """Return the sha256 of the published lists of training and test images; empty if it has none."""
        return {item.digest for item in cls.sources if not item.unpack}

    def class_counts(self) -> dict[str, tuple[int, int]]:
        """Return the published number of training and test images of each class, in order; empty: not known."""
        return {}

    @property
    def place(self) -> Path:
        """The folder in which it is expected."""
        return self.root.absolute() if self.root else data_folder() / self.name

    def _missing(self) -> str:
        forms = "; ".join(f"({number}) {layout.form}" for number, layout in enumerate(self.layouts, start=1))
        if self.root and self.place.is_dir():
            return f"{self.place} holds nothing that looks like {self.name}. Accepted: {forms}"
        state = "holds nothing that looks like it" if self.place.is_dir() else "does not exist"
        return (
            f"{self.name} is not on this machine: {self.place} {state}. Get it with: probprompt data get {self.name}; "
            f"or put it there yourself, or name its place with data.root or {PLACE}. Accepted: {forms}"
        )

    def _unlisted(self, folder: Path) -> str:
        if self.root is None or folder.name == self.name:
            to = f" --to {quote(str(folder.parent))}" if self.root else ""
            way = f"Fetch them alone with: probprompt data get {self.name}{to}"
        else:
            way = f"Put {' and '.join(source.url for source in self.sources[1:])} there"
        return (
            f"{folder} has the class folders, but not the lists that say which images are for training and which for "
            f"the test. {way}; or put your own there, as train.txt and test.txt with a path (class/file) in each line"
        )


def _odd_classes(
    names: tuple[str, ...], images: ImageSet, due: dict[str, int], limits: tuple[int, int]
) -> Iterator[str]:
    """Report classes whose number of images differs from the published one, or is outside its limits."""
    counts = list(zip(names, np.bincount(images.labels, minlength=len(names)).tolist(), strict=True))
    least, most = limits
    exact = [f"{name} has {n} instead of {due[name]}" for name, n in counts if name in due and n != due[name]]
    beyond = [f"{name} has {n}" for name, n in counts if name not in due and not least <= n <= most]
    if exact:
        yield f"not as many images of each class as published: {shorten(exact)}"
    if beyond:
        each = f"{least}" if least == most else f"{least} to {most}"
        yield f"published are {each} images of each class, but {shorten(beyond)}"


@benchmark
class Cifar100(Dataset):
    """Small photographs of 100 kinds of things (Krizhevsky, 2009)."""

    name = "cifar100"
    summary = "CIFAR-100: photographs of 100 kinds of things, 32 px"
    enlarge = False
    sources = (
        Source("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "md5", "eb9058c3a382ffc7106e4002c42a8d85"),
    )
    folders = ("cifar-100-python", "CIFAR-100", "cifar-100")
    layouts = (layouts.CIFAR, layouts.tree(layouts.plain_names))
    figures = Figures(100, 50_000, 10_000, (500, 500), (100, 100), shared=10, encoding="lossless", size=(32, 32))


@benchmark
class ImageNetR(Dataset):
    """Renditions of 200 classes of ImageNet (Hendrycks et al., 2021), cut as CODA-Prompt cut them."""

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
    """Photographs of 200 species of birds (Wah et al., 2011)."""

    name = "cub200"
    summary = "CUB-200-2011: photographs of 200 species of birds"
    sources = (
        Source(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
            "md5",
            "97eceeb196236b17998738112f37df78",
        ),
    )
    folders = ("CUB_200_2011",)
    layouts = (layouts.CUB, layouts.tree(layouts.numbered_names))
    figures = Figures(200, 5_994, 5_794, (29, 30), (11, 30), encoding="jpeg")

    def class_counts(self) -> dict[str, tuple[int, int]]:
        """By the official split."""
        with (Path(__file__).parent / "cub200.csv").open(encoding="utf-8", newline="") as file:
            return {row["class"]: (int(row["train"]), int(row["test"])) for row in csv.DictReader(file)}


@benchmark
class TinyImageNet(Dataset):
    """Small photographs of 200 classes of ImageNet (Stanford's CS231n); not in the paper."""

    name = "tiny-imagenet"
    summary = "Tiny-ImageNet: photographs of 200 classes of ImageNet, 64 px"
    enlarge = False
    sources = (Source("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5", "90528d7ca1a48142e341f4ef8d21d0de"),)
    folders = ("tiny-imagenet-200",)
    layouts = (layouts.TINY, layouts.tree(layouts.wordnet_names))
    figures = Figures(200, 100_000, 10_000, (500, 500), (50, 50), shared=7, encoding="jpeg", size=(64, 64))


@benchmark
class TuBerlin(Dataset):
    """Sketches of 250 kinds of things by everybody (Eitz et al., 2012), 80 of each; not in the paper."""

    name = "tu-berlin"
    summary = "TU-Berlin: sketches of 250 kinds of things, 64 for training and 16 for the test each"
    sources = (
        Source(
            "https://cybertron.cg.tu-berlin.de/eitz/projects/classifysketch/sketches_png.zip",
            "md5",
            "023123df86a928a5273e3ba11990d8fd",
        ),
    )
    folders = ("png", "sketches_png", "sketches_png/png", "TU-Berlin")
    layouts = (
        layouts.tree(layouts.plain_names),
        layouts.flat("png/ with 250 class folders", "tu-berlin, seed 0", layouts.plain_names),
    )
    figures = Figures(250, 16_000, 4_000, (64, 64), (16, 16), encoding="lossless", size=(1111, 1111))


def recognize(path: Path) -> Dataset | None:
    """Return the dataset in a folder, or in a folder inside, by its layout or name."""
    known = [source for source in registered().values() if issubclass(source, Dataset)]
    inside = [source for source in known if source(path / source.name).recognize()]
    if len(inside) > 1:
        places = [str(path / source.name) for source in inside]
        raise UserError(f"{path} holds {len(inside)} datasets: name one of {shorten(places)}")
    if inside:
        return inside[0](path)
    fitting = [(source, found) for source in known if (found := source(path).recognize())]
    telling = [source for source, (folder, layout) in fitting if layout.telling(folder)]
    named = [source for source, _ in fitting if path.name in (source.name, *source.folders)]
    return next((source(path) for source in telling + named), None)
