"""Where published data is obtained, and how it is known to be right."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Source:
    """A published file with its hash."""

    url: str
    file: str
    algorithm: Literal["md5", "sha256"]
    digest: str
    unpack: bool = True
    """Whether it is an archive; otherwise a file that is stored with the images."""


@dataclass(frozen=True)
class Figures:
    """What a dataset should hold by its publication."""

    classes: int
    train: int
    test: int
    train_per_class: tuple[int, int]
    """The least and the most images of a class."""
    test_per_class: tuple[int, int]
    shared: int | None = None
    """Test images that are among the training images, too, in the data as it was published; None: not known."""
    encoding: Literal["jpeg", "lossless"] | None = None
    """How its images are published: as JPEG files, or with every pixel as it is; in any other way they were encoded
    anew. None: not known."""
    size: tuple[int, int] | None = None
    """Width and height, where all images have the same."""
