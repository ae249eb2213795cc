"""Blocks of code in pages, what a test replaces in them, and the files and services that they use.

Folders of class folders are drawings of the embedded benchmark, few of each class; weights are random ones of real
architectures; the hub is a stand-in on this machine.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from local_hub import TOKEN, Hub
from probprompt.data import emoji_r
from probprompt.data.emoji_r import write_sample

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Plan:
    """How a page is executed."""

    given: tuple[str, ...] = ()
    """Names in ``GIVEN``, prepared before the first block."""
    swaps: Mapping[str, str] = field(default_factory=dict)
    """Replacements for what a small machine cannot run."""
    parsed_only: tuple[str, ...] = ()
    """Texts of blocks that no test can run: installation, downloads, several machines, hours of computing."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Texts of blocks that another test runs, with its file."""
    twice: tuple[str, ...] = ()
    """Texts of blocks that are repeated, as a job that is queued again."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"

    def _holds(self, kind: str) -> bool:
        return any(text in self.code for text in getattr(PLANS.get(self.page, Plan()), kind))

    @property
    def is_executed(self) -> bool:
        """Return True if the block runs with its page."""
        return self.language in ("python", "bash") and not self._holds("parsed_only") and not self.is_elsewhere

    @property
    def is_elsewhere(self) -> bool:
        """Return True if another test runs the block."""
        return self._holds("elsewhere")

    @property
    def is_repeated(self) -> bool:
        """Return True if the block runs twice."""
        return self._holds("twice")

    @property
    def replaced(self) -> str:
        """Return the code with all swaps made at once, the longest text first."""
        swaps = PLANS.get(self.page, Plan()).swaps
        pattern = "|".join(map(re.escape, sorted(swaps, key=len, reverse=True)))
        return re.sub(pattern, lambda found: swaps[found[0]], self.code) if swaps else self.code


def read_blocks(page: str) -> list[Block]:
    """Return the blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, one.start()) + 1, one[1], one[2]) for one in _FENCE.finditer(text)]


_SHORT = "--backbone demo --tasks 2 --epochs 1"
_STILL = "--tasks 2 --method nearest-mean"
_QUICK = "--backbone test_vit --batch-size 2 --seconds 0.01"
PLANS: dict[str, Plan] = {
    "README.md": Plan(
        ("few", "photos/march"),
        {
            "serve my-model": "serve my-model --port 0",
            "probprompt demo": "true",  # tests/test_cli.py runs it
            "photos/ --seeds 0-2": "few --seeds 0 --set training.epochs=1",
        },
        parsed_only=("make demo", "data get"),
    ),
    "docs/index.md": Plan(parsed_only=("pip install",)),
    "docs/backbones.md": Plan(
        ("data/cifar100", "vit_tiny.safetensors", "dinov2_224.safetensors"),
        {
            "--backbone sup1k": f"--backbone demo {_STILL}",
            "train cifar100 --backbone vit": f"train cifar100 {_STILL} --backbone vit",
        },
        parsed_only=("ibot1k",),
    ),
    "docs/data.md": Plan(
        ("photos", "data/cifar100", "holiday", "months.txt"),
        {
            "probprompt data get cifar100": "true",
            "check cifar100": "check photos",
            "train cifar100": f"train cifar100 {_SHORT}",
            "--tasks 5": "--tasks 5 --method ranpac",
            "--tasks 4,4,2": "--tasks 4,4,2 --method ranpac",
            "--tasks months.txt": "--tasks months.txt --seeds 0 --set training.epochs=1",
        },
    ),
    "docs/export.md": Plan(
        ("birds", "hub"),
        elsewhere={"probprompt export": "tests/test_export.py", "onnxruntime": "tests/test_export.py"},
    ),
    "docs/fidelity.md": Plan(parsed_only=("reproduction fidelity",)),  # tests/test_docs.py compares its tables
    "docs/performance.md": Plan(
        swaps={
            "bench  ": f"bench --out before.json {_QUICK}",
            "--methods all": f"--methods apt,ranpac {_QUICK}",
            "--out now.json": f"--out now.json {_QUICK}",
            "scaling all": "scaling samples --backbone test_vit --set training.batch_size=2 --seconds 0.01",
        },
    ),
    "docs/scaling.md": Plan(
        ("few", "shared/data/cifar100"),
        {
            "=/shared": "=shared",
            "=/local": "=local",
            "export ": "export SLURM_ARRAY_TASK_ID=0 ",
            "--preset published": f"--preset published {_SHORT}",
            "--runs /shared": "--runs shared",
            "add /shared": "add shared",
            "photos/ --tasks 10 --gpus 8": "few --tasks 2 --epochs 1 --gpus 2 --device cpu",
            "--nproc-per-node 8 -m probprompt train photos/ --tasks 10": "--nproc-per-node 2 "
            "-m probprompt train few --tasks 2 --epochs 1",
            "--backbone sup1k --methods all": f"--methods apt,ranpac {_QUICK}",
        },
        parsed_only=("ray start", "--nnodes"),
        twice=("#SBATCH",),
    ),
    "docs/serve.md": Plan(
        ("my-model",),
        {"serve my-model": "serve my-model --port 0"},
        elsewhere={"curl": "tests/test_serve.py"},
    ),
    "docs/troubleshooting.md": Plan(("photos",), {"train photos/": "train photos/ --tasks 2 --epochs 1"}),
    "docs/tutorials/reproducing.md": Plan(
        ("data/cifar100",),
        {
            "probprompt data get cifar100": "true",
            "check cifar100": "check images",
            "--seed 0 --out": f"--seed 0 {_SHORT} --out",
        },
        parsed_only=("--yes",),
    ),
}


@dataclass
class World:
    """Environment of one page."""

    small_model: Callable[[], Path]
    """Return the folder of a classifier with four classes."""
    patch: pytest.MonkeyPatch
    closing: ExitStack

    def prepare(self, name: str, folder: Path) -> None:
        """Put the files of this name into a folder."""
        if name not in GIVEN:
            raise KeyError(f"{name!r} cannot be given, only {', '.join(sorted(GIVEN))}")
        target = folder / name
        assert not target.exists(), f"{name} exists already"
        target.parent.mkdir(parents=True, exist_ok=True)
        GIVEN[name](self, target)


def drawings(classes: tuple[str, ...] | int, images: int, test: bool = False) -> Callable[[World, Path], None]:
    """Write a folder of class folders."""

    def give(_: World, target: Path) -> None:
        write_sample(target, classes, images, test)

    return give


def give_lists(_: World, target: Path) -> None:
    """Write a file with the tasks of `photos`."""
    first, *others = (emoji_r.classes()[:10][place : place + 2] for place in range(0, 10, 2))
    target.write_text("\n".join(", ".join(names) for names in (first, sum(others, ()))) + "\n", encoding="utf-8")


def give_model(world: World, target: Path) -> None:
    """Copy a saved classifier."""
    shutil.copytree(world.small_model(), target)


def weights(name: str, **settings: Any) -> Callable[[World, Path], None]:
    """Save a file of random weights of this architecture."""

    def give(_: World, target: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            save_file(timm.create_model(name, **settings).state_dict(), target)

    return give


def give_cifar100(world: World, target: Path) -> None:
    """Write four classes in place of its hundred, and set PROBPROMPT_DATA."""
    write_sample(target / "train", 4, 4)
    write_sample(target / "test", 4, 2, test=True)
    for split in ("train", "test"):
        (target / split / "ATTRIBUTION.md").unlink()
    world.patch.setenv("PROBPROMPT_DATA", str(target.parent))


def give_hub(world: World, target: Path) -> None:
    """Start an empty hub."""
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
    "my-model": give_model,
    "birds": give_model,
    "vit_tiny.safetensors": weights("vit_tiny_patch16_224"),
    "dinov2_224.safetensors": weights("vit_small_patch14_dinov2", img_size=224),
    "data/cifar100": give_cifar100,
    "shared/data/cifar100": give_cifar100,
    "hub": give_hub,
}
