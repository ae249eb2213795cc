"""An image passes through few modules. Those in which a function runs are counted, and the counts may only fall."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from probprompt import ContinualClassifier

LIMITS = {"predict": 16, "predict command": 25, "train command": 42}
WALKS = """
import inspect, json, sys, threading
from pathlib import Path
import torch
import probprompt
from probprompt.cli import main

torch.cpu.get_capabilities = dict
root, entered, seen = str(Path(probprompt.__file__).parent), set(), set()

def inside(code):
    return code.co_filename.startswith(root)

def note(frame, event, _):
    code = frame.f_code
    if code in seen or not inside(code) or not code.co_flags & inspect.CO_OPTIMIZED:  # no function
        return
    while frame := frame.f_back:
        if inside(frame.f_code) and frame.f_code.co_name == "<module>":  # called by an import
            return
    seen.add(code)
    entered.add(Path(code.co_filename).relative_to(root).with_suffix("").as_posix())

def walk(call, *arguments):
    entered.clear()
    seen.clear()
    threading.settrace(note)
    sys.settrace(note)
    call(*arguments)
    sys.settrace(None)
    return sorted(entered)

def command(*arguments):
    sys.argv = ["probprompt", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code

settings = ("image_size=32", "training.epochs=1", "batch_size=8", "samples=2", "components=2", "method.tokens=2")
options = [part for setting in settings for part in ("--set", setting)]
backbone = ("--backbone", "test_vit", "--weights", "random")
walks = {"train command": walk(command, "train", "pictures", "--tasks", "3", *backbone, *options)}
walks["predict command"] = walk(command, "predict", "model", "photo.png")
classifier = probprompt.ContinualClassifier.load("model")
classifier.predict("photo.png")
walks["predict"] = walk(classifier.predict, "photo.png")
Path("walks.json").write_text(json.dumps(walks))
"""


@pytest.fixture(scope="module")
def walks(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The modules that a fresh process enters, by walk, with a classifier that knows six classes."""
    folder = tmp_path_factory.mktemp("walks")
    small: dict[str, Any] = {"image_size": 32, "samples": 2, "components": 2, "method.tokens": 2, "projections": 50}
    classifier = ContinualClassifier(backbone="test_vit", weights="random", device="cpu", epochs=1, **small)
    classifier.learn(pictures)
    classifier.save(folder / "model")
    (folder / "pictures").symlink_to(pictures)
    (folder / "photo.png").symlink_to(pictures / "class0" / "0.png")
    subprocess.run([sys.executable, "-c", WALKS], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, list[str]] = json.loads((folder / "walks.json").read_text())
    return found


@pytest.mark.parametrize("walk", LIMITS)
def test_walk_enters_few_modules(walks: dict[str, list[str]], walk: str) -> None:
    entered = walks[walk]
    assert 5 < len(entered) <= LIMITS[walk], f"{len(entered)} modules: {', '.join(entered)}"
