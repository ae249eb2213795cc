"""Promises of pages about the files and the output of their blocks of code, beyond that they run."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page_world import ROOT
from probprompt import ContinualClassifier


def record(run: Path) -> Any:
    """Return the record of a run."""
    return json.loads((run / "run.json").read_text(encoding="utf-8"))


def sizes(run: Path) -> list[int]:
    """Return the number of classes of each task."""
    return [len(task) for task in record(run)["stream"]["tasks"]]


def changes(model: Path) -> list[str]:
    """Return the changes that created the versions of a classifier."""
    return [version.what for version in ContinualClassifier.load(model).history()]


def check_readme(folder: Path, outputs: list[str]) -> None:
    """Both models learned their folders, and the comparison has its page."""
    assert changes(folder / "my-model") == ["learned"] * 3 and changes(folder / "photo-model") == ["learned"] * 2
    assert (folder / "runs" / "compare" / "comparison.html").is_file()


def check_hub(folder: Path, outputs: list[str]) -> None:
    """A pulled model answers as the pushed one does."""
    images = sorted((ROOT / "docs").rglob("*.png"))
    sent, received = (ContinualClassifier.load(folder / name).predict(images) for name in ("birds", "birds-again"))
    assert [one.top for one in sent] == [one.top for one in received] and all(one.label for one in sent)


def check_data(folder: Path, outputs: list[str]) -> None:
    """The tasks of the folder are those of the option and of the file."""
    assert sizes(folder / "runs" / "photos-ranpac-s0") == [2] * 5
    assert sizes(folder / "runs" / "photos-ranpac-s0-2") == [4, 4, 2]
    lines = (folder / "months.txt").read_text(encoding="utf-8").splitlines()
    for method, preset in (("probprompt", "flagship"), ("probprompt", "matched"), ("ranpac", "matched")):
        run = record(folder / "runs" / "compare" / "photos" / preset / method / "seed-0")
        assert [", ".join(task) for task in run["stream"]["tasks"]] == lines


def check_backbones(folder: Path, outputs: list[str]) -> None:
    """Weights are recorded by file, hash and image size."""
    for number, file in ((2, "vit_tiny"), (3, "dinov2_224")):
        run = record(folder / "runs" / f"cifar100-nearest-mean-s0-{number}")
        content = (folder / f"{file}.safetensors").read_bytes()
        assert re.fullmatch(rf"file:.*{file}\.safetensors", run["backbone"]["source"])
        assert run["backbone"]["sha256"] == hashlib.sha256(content).hexdigest()
        assert run["preprocessing"]["image_size"] == 224


def check_scaling(folder: Path, outputs: list[str]) -> None:
    """Every way to run a grid, and to start two processes, gives the same; a queued job does nothing twice."""
    for method in ("nearest-mean", "ranpac"):
        accuracy = [path.read_bytes() for path in (folder / "runs").rglob(f"{method}/seed-0/accuracy.json")]
        assert len(accuracy) == 3 and len(set(accuracy)) == 1
    started, launched = (folder / "runs" / f"few-probprompt-s0{more}" for more in ("", "-2"))
    assert record(started)["world_size"] == record(launched)["world_size"] == 2
    assert (started / "accuracy.json").read_bytes() == (launched / "accuracy.json").read_bytes()
    assert (folder / "tables" / "comparison.html").is_file() and len(list((folder / "shared").rglob("run.json"))) == 1
    assert list((folder / "results" / "cifar100").rglob("*.json")) and (folder / "speeds.json").is_file()


def check_performance(folder: Path, outputs: list[str]) -> None:
    """Records, a plot, and a page of their tables exist."""
    assert (folder / "growth.png").is_file() and (folder / "now.json").is_file()
    assert "<!-- bench figures" in (folder / "page.md").read_text(encoding="utf-8")


def check_reproducing(folder: Path, outputs: list[str]) -> None:
    """The rehearsal left what the list states."""
    run = folder / "runs" / "rehearsal"
    assert (run / "report.html").is_file() and record(run)["audit"]["passed"]
    (entry,) = (folder / "results" / "images").rglob("*.json")
    assert str(folder) not in entry.read_text(encoding="utf-8"), "a path of this machine"
    assert "nearest-mean" in (folder / "RESULTS.md").read_text(encoding="utf-8")


def check_serve(folder: Path, outputs: list[str]) -> None:
    """The printed URL contains the token."""
    assert re.search(r"http://\S+/#token=\S{20,}", outputs[0])


def check_own_photos(folder: Path, outputs: list[str]) -> None:
    """Python and commands changed the same model, one version per change."""
    learned, rolled_back = "learned", "rolled back"
    expected = [learned, learned, "renamed", "forgot", rolled_back, learned, "forgot", rolled_back]
    assert changes(folder / "my-model") == expected
    assert set(ContinualClassifier.load(folder / "my-model").classes) == {"cat", "flower", "moon", "boat", "clock"}
    assert len((folder / "answers.csv").read_text(encoding="utf-8").splitlines()) == 1 + 12


CHECKS: dict[str, Callable[[Path, list[str]], None]] = {
    "README.md": check_readme,
    "docs/backbones.md": check_backbones,
    "docs/data.md": check_data,
    "docs/export.md": check_hub,
    "docs/performance.md": check_performance,
    "docs/scaling.md": check_scaling,
    "docs/serve.md": check_serve,
    "docs/tutorials/own-photos.md": check_own_photos,
    "docs/tutorials/reproducing.md": check_reproducing,
}
"""By page: a check of the folder in which its blocks ran, and of the output of each shell block."""
