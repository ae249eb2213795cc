"""What lies ready where the pages' blocks of code are executed, each by the name that a mark gives it.

Folders of class folders are drawings of the embedded benchmark, few of each class; weights are random ones of real
architectures; the hub is a stand-in on this machine.
"""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from local_hub import TOKEN, Hub
from page_marks import ROOT
from probprompt.data import emoji_r
from probprompt.data.emoji_r import write_sample

BROKEN = "holiday.jpg"
"""The file in the inbox that cannot be read."""


@dataclass
class World:
    """One page's world."""

    small_model: Callable[[], Path]
    """The folder of a classifier that knows four classes."""
    patch: pytest.MonkeyPatch
    closing: ExitStack

    def prepare(self, name: str, folder: Path) -> None:
        """Put what has this name into a folder."""
        if name not in GIVEN:
            raise KeyError(f"nobody can give {name!r}, only {', '.join(sorted(GIVEN))}")
        target = folder / name
        assert not target.exists(), f"{name} is there already"
        target.parent.mkdir(parents=True, exist_ok=True)
        GIVEN[name](self, target)


def drawings(classes: tuple[str, ...] | int, images: int, test: bool = False) -> Callable[[World, Path], None]:
    """A folder of class folders."""

    def give(_: World, target: Path) -> None:
        write_sample(target, classes, images, test)

    return give


def give_inbox(_: World, target: Path) -> None:
    """Pictures as they come in, without classes, among them one that cannot be read."""
    write_sample(target / "new", ("cat", "boat"), 2, test=True)
    (target / BROKEN).write_bytes(b"\xff\xd8\xff\xe0 cut off")


def give_lists(_: World, target: Path) -> None:
    """Which classes of `photos` come together."""
    first, *others = (emoji_r.classes()[:10][place : place + 2] for place in range(0, 10, 2))
    target.write_text("\n".join(", ".join(names) for names in (first, sum(others, ()))) + "\n", encoding="utf-8")


def give_model(world: World, target: Path) -> None:
    """A saved classifier."""
    shutil.copytree(world.small_model(), target)


def weights(name: str, **settings: Any) -> Callable[[World, Path], None]:
    """A file of weights of this architecture, as it would be published."""

    def give(_: World, target: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            save_file(timm.create_model(name, **settings).state_dict(), target)

    return give


def give_cifar100(world: World, target: Path) -> None:
    """Four classes that stand for its hundred, where PROBPROMPT_DATA leads."""
    write_sample(target / "train", 4, 4)
    write_sample(target / "test", 4, 2, test=True)
    for side in ("train", "test"):
        (target / side / "ATTRIBUTION.md").unlink()
    world.patch.setenv("PROBPROMPT_DATA", str(target.parent))


def give_grid(_: World, target: Path) -> None:
    """A grid of two cells."""
    write_sample(target.parent / "pictures", 4, 4)
    lines = ('methods = ["nearest-mean", "ranpac"]', 'benchmarks = ["pictures"]', "seeds = [0]", "[settings]")
    target.write_text("\n".join((*lines, "data.tasks = 2", "")), encoding="utf-8")


def give_records(_: World, target: Path) -> None:
    """What is recorded here, without the pages' figures."""
    shutil.copytree(ROOT / "results", target, ignore=shutil.ignore_patterns("figures"))
    for page in (ROOT / "docs").glob("*.md"):  # some have tables of these records
        if "<!-- table:" in page.read_text(encoding="utf-8"):
            (target.parent / "docs").mkdir(exist_ok=True)
            shutil.copy(page, target.parent / "docs")


def give_hub(world: World, target: Path) -> None:
    """A hub on which everything is new."""
    hub = Hub()
    world.closing.callback(hub.close)
    world.patch.setenv("HF_ENDPOINT", hub.url)
    world.patch.setenv("HF_TOKEN", TOKEN)


GIVEN: dict[str, Callable[[World, Path], None]] = {
    "photos": drawings(10, 5),
    "few": drawings(4, 5),
    "holiday": drawings(10, 1, test=True),
    "months.txt": give_lists,
    "photos/march": drawings(("drink", "shoe"), 6),
    "photos/test": drawings(("cat", "flower", "boat", "clock", "drink", "shoe"), 2, test=True),
    "strangers": drawings(("hand", "train"), 4, test=True),
    "inbox": give_inbox,
    "my-model": give_model,
    "birds": give_model,
    "vit_tiny.safetensors": weights("vit_tiny_patch16_224"),
    "dinov2_224.safetensors": weights("vit_small_patch14_dinov2", img_size=224),
    "data/cifar100": give_cifar100,
    "shared/data/cifar100": give_cifar100,
    "grid.toml": give_grid,
    "results": give_records,
    "hub": give_hub,
}
