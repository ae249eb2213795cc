"""Small, real things to test with: a folder of pictures and a tiny vision transformer."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from probprompt.cli import main

# Two test processes share two cores: threads of their own would only fight.
torch.set_num_threads(1)

# Without a GPU, kernels run in Triton's interpreter; Triton must know before anything imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The tests stop runs after epochs that take no time at all.
os.environ["PROBPROMPT_CHECKPOINTS"] = "all"

TINY = {"name": "test_vit", "weights": "random", "image_size": 32}
"""timm's own test model, 64 wide and 6 deep."""


def paint(folder: Path, classes: int = 6, images: int = 10, side: int = 36) -> Path:
    """Write class folders whose pictures share a coarse pattern."""
    random = np.random.RandomState(0)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        pattern = np.kron(random.randint(0, 255, (4, 4, 3)), np.ones((side // 4, side // 4, 1)))
        for index in range(images):
            noisy = pattern + random.normal(0, 30, pattern.shape)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"class{label}" / f"{index}.png")
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes of ten pictures."""
    return paint(tmp_path_factory.mktemp("data") / "pictures")


Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(pictures: Path) -> Settings:
    """Settings of a run of a few seconds; groups given by name are laid over them."""

    def build(**groups: dict[str, Any]) -> dict[str, Any]:
        base: dict[str, dict[str, Any]] = {
            "data": {"benchmark": str(pictures), "tasks": 3},
            "backbone": TINY,
            "method": {"name": "probprompt", "samples": 3, "components": 4, "tokens": 4, "blocks": [0, 2]},
            "training": {"epochs": 2, "batch": 8},
            "alignment": {"epochs": 2},
        }
        return {name: {**base.get(name, {}), **groups.get(name, {})} for name in {**base, **groups}}

    return build


class Answer(NamedTuple):
    """What a command gave back."""

    code: int
    out: str
    err: str


@pytest.fixture
def probprompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The command line, without a new process."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["probprompt", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return Answer(int(end.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def count_queries(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[int]]:
    """How many images each call of a workshop's backbone without prompts looks at, from now on."""

    def watch(workshop: Any) -> list[int]:
        backbone, images = workshop.learner.model.backbone, list[int]()
        original = backbone.query

        def counting(pictures: Tensor, *readout: str) -> Tensor:
            images.append(len(pictures))
            seen: Tensor = original(pictures, *readout)
            return seen

        monkeypatch.setattr(backbone, "query", counting)
        return images

    return watch
