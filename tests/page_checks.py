"""What pages promise about what their blocks of code leave behind and say, beyond that they run."""

import csv
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime

from page_marks import ROOT
from page_world import BROKEN
from probprompt import ContinualClassifier


def record(run: Path) -> Any:
    """What a run has written down."""
    return json.loads((run / "run.json").read_text(encoding="utf-8"))


def sizes(run: Path) -> list[int]:
    """How many classes its tasks have."""
    return [len(task) for task in record(run)["stream"]["tasks"]]


def check_readme(folder: Path, said: list[str]) -> None:
    """The model went the way that the comments tell; so did the runs."""
    used, ran = said
    assert "old classes that may now be taken for new ones" in used and used.rstrip().endswith("stopped")
    rows = list(csv.DictReader((folder / "answers.csv").read_text(encoding="utf-8").splitlines()))
    unread = [row for row in rows if row["error"]]
    assert len(rows) == 5 and [Path(row["file"]).name for row in unread] == [BROKEN] and not unread[0]["label"]
    assert re.search(r"AUROC \d\.\d+", used)
    history = ContinualClassifier.load(folder / "my-model").history()
    assert [version.what for version in history] == [*["learned"] * 3, "forgot", "renamed", "rolled back"]
    assert set(history[-1].classes) == {"cat", "flower", "boat", "clock"}, "version 2, as it was"
    graph = onnxruntime.InferenceSession(str(folder / "my-model.onnx"), providers=["CPUExecutionProvider"])
    assert [given.name for given in graph.get_inputs()] == ["images"]
    runs = folder / "experiments" / "runs"
    first, second = (runs / f"photos-probprompt-s0{more}" for more in ("", "-2"))
    assert sizes(first) == [2] * 5 and sizes(second) == [4, 4, 2]
    assert sum(record(first)["stream"]["train_images"]) == 40, "of 50: a fifth became the test set"
    assert sum(record(second)["stream"]["train_images"]) == 50, "the other folder is the test set"
    assert "on held-out training images" in ran and "few-probprompt-s1 is finished already" in ran
    assert "predictions depend on their own image alone" in ran and re.search(r"\d GPU hours", ran)
    assert (folder / "experiments" / "report.html").is_file() and (runs / "compare" / "comparison.html").is_file()


def check_hub(folder: Path, said: list[str]) -> None:
    """What was pulled answers as what was pushed, and cannot learn, as the page says."""
    pictures = sorted((ROOT / "docs").rglob("*.png"))
    sent, fetched = (ContinualClassifier.load(folder / name).predict(pictures) for name in ("birds", "birds-again"))
    assert [one.top for one in sent] == [one.top for one in fetched] and all(one.label for one in sent)
    assert "predicts, but was published without what learning needs" in said[0]


def check_data(folder: Path, said: list[str]) -> None:
    """The folder's tasks are those of the option and of the file."""
    assert "all is well" in said[0] and "on held-out training images" in said[1]
    assert sizes(folder / "runs" / "photos-ranpac-s0-2") == [4, 4, 2]
    lines = (folder / "months.txt").read_text(encoding="utf-8").splitlines()
    for method, preset in (("probprompt", "flagship"), ("probprompt", "matched"), ("ranpac", "matched")):
        found = record(folder / "runs" / "compare" / "photos" / preset / method / "seed-0")
        assert [", ".join(task) for task in found["stream"]["tasks"]] == lines


def check_backbones(folder: Path, said: list[str]) -> None:
    """Weights are recorded as the page says: by file, hash and size of images."""
    for run, file in (("s0", "vit_tiny"), ("s0-2", "dinov2_224")):
        found = record(folder / "runs" / f"cifar100-nearest-mean-{run}")
        content = (folder / f"{file}.safetensors").read_bytes()
        assert re.fullmatch(rf"file:.*{file}\.safetensors", found["backbone"]["source"])
        assert found["backbone"]["sha256"] == hashlib.sha256(content).hexdigest()
        assert found["preprocessing"]["image_size"] == 224


def check_cluster(folder: Path, said: list[str]) -> None:
    """A grid and a job that are started again do nothing twice; tables and book are there."""
    grid, first, again, *_ = said
    assert grid.count("[4/4]") == 1, "tabulated only, the second time"
    assert "is finished already" in again and "is finished already" not in first
    assert first.partition("accuracy in %")[2] == again.partition("accuracy in %")[2] != ""
    assert (folder / "tables" / "comparison.html").is_file() and list((folder / "results" / "cifar100").rglob("*.json"))


def check_scale(folder: Path, said: list[str]) -> None:
    """Two processes give the same, however they are started; so do the ways to run a grid."""
    started, launched = (folder / "runs" / f"few-probprompt-s0{more}" for more in ("", "-2"))
    assert record(started)["world_size"] == record(launched)["world_size"] == 2
    assert (started / "accuracy.json").read_bytes() == (launched / "accuracy.json").read_bytes()
    assert "Ray: room for" in said[1]
    accuracy = [path.read_bytes() for path in (folder / "runs").rglob("ranpac/seed-0/accuracy.json")]
    assert len(accuracy) == 2 and len(set(accuracy)) == 1


def check_performance(folder: Path, said: list[str]) -> None:
    """Records, a picture, and a page of their tables."""
    assert (folder / "growth.png").is_file() and "samples: done" in said[0] and "ratio" in said[0]
    assert "<!-- bench figures" in (folder / "page.md").read_text(encoding="utf-8")


def check_reproducing(folder: Path, said: list[str]) -> None:
    """The rehearsal left what the list says."""
    run = folder / "runs" / "rehearsal"
    assert (run / "report.html").is_file() and record(run)["audit"]["passed"]
    (entry,) = (folder / "results" / "pictures").rglob("*.json")
    assert str(folder) not in entry.read_text(encoding="utf-8"), "a path of this machine"
    assert "nearest-mean" in (folder / "RESULTS.md").read_text(encoding="utf-8")
    assert re.search(r"\d+ missing", said[1])


def check_serve(folder: Path, said: list[str]) -> None:
    """The address to open holds the token, and Ctrl-C ends the service in peace."""
    assert re.search(r"open http://\S+/#token=\S{20,}", said[0]) and said[0].rstrip().endswith("stopped")


def check_own_photos(folder: Path, said: list[str]) -> None:
    """Both ways of working went on with the same model; a version is there for every change."""
    changes = ["learned", "learned", "renamed", "forgot", "rolled back", "learned", "forgot", "rolled back"]
    history = ContinualClassifier.load(folder / "my-model").history()
    assert [version.what for version in history] == changes
    assert set(history[-1].classes) == {"cat", "flower", "moon", "boat", "clock"}
    assert len((folder / "answers.csv").read_text(encoding="utf-8").splitlines()) == 1 + 12
    assert "all is well" in said[2] and "on held-out training images" in said[2]
    assert (folder / "runs" / "mine" / "comparison.html").is_file() and sizes(folder / "runs" / "chosen") == [2, 2, 2]


def check_tables(page: str) -> Callable[[Path, list[str]], None]:
    """The page that was filled from the record is the one that is here."""

    def check(folder: Path, said: list[str]) -> None:
        assert (folder / page).read_bytes() == (ROOT / page).read_bytes() and f"Wrote {page}." in said[0]

    return check


CHECKS: dict[str, Callable[[Path, list[str]], None]] = {
    "README.md": check_readme,
    "docs/backbones.md": check_backbones,
    "docs/data.md": check_data,
    "docs/export.md": check_hub,
    "docs/performance.md": check_performance,
    "docs/scale.md": check_scale,
    "docs/serve.md": check_serve,
    "docs/tutorials/cluster.md": check_cluster,
    "docs/tutorials/own-photos.md": check_own_photos,
    "docs/tutorials/reproducing.md": check_reproducing,
    "docs/fidelity.md": check_tables("docs/fidelity.md"),
}
"""By page: looks at the folder in which its blocks were executed, and at what each of those in bash has said."""
