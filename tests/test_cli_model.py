"""Commands on a model: output, files, and errors."""

import csv
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probprompt import ContinualClassifier
from probprompt.cli import cmd_model

TINY = ("--backbone", "test_vit", "--weights", "random", "--set", "image_size=32", "--epochs", "1")
SMALL = (*TINY, "--set", "samples=2", "--set", "blocks=[0]", "--set", "projections=60")

Command = Callable[..., Any]
Split = Callable[..., Path]


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(scope="module")
def split(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Split:
    """Some of the classes, and some of the images of each, in a new folder."""

    def make(classes: str, images: str = "01234") -> Path:
        root = tmp_path_factory.mktemp("split") / f"photos-{classes}-{images}"
        for label in classes:
            (root / f"class{label}").mkdir(parents=True)
            for image in images:
                shutil.copy(pictures / f"class{label}" / f"{image}.png", root / f"class{label}")
        return root

    return make


@pytest.fixture(scope="module")
def saved(split: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows classes 0 and 1 of one lesson and 2 of another; not to be changed."""
    backbone: dict[str, Any] = {"backbone": "test_vit", "weights": "random", "image_size": 32, "device": "cpu"}
    classifier = ContinualClassifier(**backbone, epochs=1, samples=2, blocks=[0], projections=60)
    for classes in ("01", "2"):
        classifier.learn(split(classes))
    folder = tmp_path_factory.mktemp("saved") / "model"
    classifier.save(folder)
    return folder


@pytest.fixture
def probprompt(probprompt: Command) -> Command:
    """The command line, on the CPU where it may be chosen."""

    def run(name: str, *arguments: object) -> Any:
        device = ("--device", "cpu") if name in ("learn", "predict", "evaluate") else ()
        return probprompt(name, *arguments, *device)

    return run


def error(answer: Any) -> str:
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ") and "Traceback" not in answer.err
    return str(answer.err)


def load(folder: Path) -> ContinualClassifier:
    return ContinualClassifier.load(folder, device="cpu")


def test_learn_reports_the_result(probprompt: Command, split: Split, tmp_path: Path) -> None:
    folder = tmp_path / "birds"
    first = probprompt("learn", folder, split("01"), *SMALL, "--note", "January")
    assert first.code == 0 and first.err == "" and first.out.startswith("reading images: done\n")
    assert re.search(r"^Learned 2 new class\(es\) from 10 images in [\d.]+ s\.$", first.out, re.MULTILINE)
    assert f"Saved {folder}, version 1, with 2 classes." in first.out
    bad = split("2", "0123456789")
    (bad / "class2" / "bad.png").write_text("nothing")
    second = probprompt("learn", folder, bad, "--keep-versions", 3)
    assert second.code == 0 and "Skipped class2/bad.png" in second.out and "too few held-out images" in second.out
    assert load(folder).classes == ("class0", "class1", "class2") and load(folder).keep_versions == 3
    assert [one.note for one in load(folder).history()] == ["January", bad.name]


def test_existing_classes_are_an_error_or_extended(probprompt: Command, model: Path, split: Split) -> None:
    more = split("13", "567")
    message = error(probprompt("learn", model, more))
    assert "class1" in message and load(model).version == 2
    answer = probprompt("learn", model, more, "--existing", "extend")
    assert answer.code == 0 and "1 new class(es) and more images of class1" in answer.out


def test_predictions_are_rows_as_text_json_or_csv(probprompt: Command, saved: Path, split: Split) -> None:
    folder = split("02", "67")
    (folder / "bad.png").write_text("nothing")
    expected = {answer.source: answer for answer in load(saved).predict(folder, top_k=2)}
    text = probprompt("predict", saved, folder)
    assert text.code == 0 and len(text.out.splitlines()) == 5
    assert f"{folder / 'bad.png'}: unreadable: " in text.out and "1 of 5 file(s)" in text.err
    lines = probprompt("predict", saved, folder, "--format", "json", "--top-k", 2).out.splitlines()
    for row in map(json.loads, lines):
        answer = expected[row["source"]]
        assert (row["label"], row["unknown"], row["error"]) == (answer.label, answer.unknown, answer.error)
        assert [(one["label"], one["probability"]) for one in row["top"]] == list(answer.top)
    rows = list(csv.DictReader(io.StringIO(probprompt("predict", saved, folder, "--format", "csv", "--top-k", 2).out)))
    assert list(rows[0]) == ["file", "label", "probability", "label_2", "probability_2", "unknown", "novelty", "error"]
    assert len(rows) == len(lines) == 5
    for row in rows:
        answer = expected[row["file"]]
        assert row["label"] == (answer.label or "") and row["error"] == (answer.error or "")
        assert row["unknown"] == ("" if answer.error else str(answer.unknown).lower())


def test_rows_come_while_images_are_still_read(
    probprompt: Command, saved: Path, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, decoded, seen = split("012", "0123456789"), list[Path](), list[int]()
    write, read = cmd_model._write_text, sys.modules["probprompt.data.inputs"].read_image

    def watched_write(answer: Any) -> None:
        seen.append(len(decoded))
        write(answer)

    def watched_read(path: Path, short_side: int | None) -> Any:
        decoded.append(path)
        return read(path, short_side)

    monkeypatch.setattr("probprompt.data.inputs.read_image", watched_read)
    monkeypatch.setattr(cmd_model, "_write_text", watched_write)
    assert probprompt("predict", saved, folder, "--batch-size", 2).code == 0
    assert len(seen) == 30 and seen[0] < 30 and len(decoded) == 30


def test_missing_file_is_a_row_and_no_file_is_wrong(probprompt: Command, saved: Path, tmp_path: Path) -> None:
    answer = probprompt("predict", saved, tmp_path / "missing.png")
    assert answer.code == 2 and "unreadable: " in answer.out and "No such file" in answer.out
    assert "None of 1 file(s)" in answer.err
    (tmp_path / "empty").mkdir()
    assert "No images in" in error(probprompt("predict", saved, tmp_path / "empty"))
    assert "does not exist" in error(probprompt("predict", tmp_path / "nowhere", tmp_path))


def test_a_closed_folder_is_a_row(
    probprompt: Command, saved: Path, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def closed(path: Any) -> Any:
        if Path(path).name == "class1":
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    answer = probprompt("predict", saved, split("012", "01"))
    assert answer.code == 0 and len(answer.out.splitlines()) == 5
    assert re.search("class1: unreadable: .*Permission denied", answer.out)


@pytest.mark.skipif(sys.platform != "linux", reason="only there may names of files be any bytes")
def test_names_that_are_no_text_are_printed(probprompt: Command, saved: Path, pictures: Path, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")
    shutil.copy(pictures / "class0" / "0.png", path)
    assert "caf\\udce9.png: class" in probprompt("predict", saved, path).out
    row = json.loads(probprompt("predict", saved, path, "--format", "json").out)
    assert row["source"] == path and row["error"] is None


def test_closed_pipe_ends_the_command_quietly(saved: Path, pictures: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "probprompt",
        "predict",
        str(saved),
        str(pictures),
        "--batch-size=1",
        "--device=cpu",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        assert process.wait(60) == 0


def test_evaluate_shows_tasks_classes_and_unknown_images(probprompt: Command, saved: Path, split: Split) -> None:
    test, strange = split("012", "789"), split("45", "789")
    answer = probprompt("evaluate", saved, test, "--unknown", strange)
    assert answer.code == 0 and answer.err == ""
    expected = load(saved).evaluate(test, unknown=strange)
    assert f"Overall accuracy: {expected.accuracy:.1f}% of 9 images" in answer.out
    assert re.search(rf"^photos-01-01234 +2 +6 +[\d.]+ +{expected.per_task[0].accuracy:.1f}$", answer.out, re.MULTILINE)
    assert f"AUROC {expected.auroc:.3f}" in answer.out and "of 6 flagged" in answer.out
    row = json.loads(probprompt("evaluate", saved, test, "--json").out)
    assert row["accuracy"] == pytest.approx(expected.accuracy) and row["auroc"] is None
    assert row["confusion"] == [list(line) for line in expected.confusion]
    assert "class4, class5" in error(probprompt("evaluate", saved, strange))


def test_forget_rename_and_rollback_create_versions(probprompt: Command, model: Path) -> None:
    message = probprompt("model", "forget", model, "class1").out
    assert message.startswith(f"Removed class1. Saved {model}, version 3, with 2 classes.\nEarlier versions")
    renamed = probprompt("model", "rename", model, "class0", "tit").out
    assert renamed == f"Renamed class0 to tit. Saved {model}, version 4.\n"
    assert load(model).classes == ("tit", "class2")
    restored = probprompt("model", "rollback", model, 2).out
    assert restored == f"Restored version 2. Saved {model}, version 5, with 3 classes.\n"
    assert load(model).classes == ("class0", "class1", "class2")
    listing = probprompt("model", "history", model).out
    assert [line.split()[0] for line in listing.splitlines()[1:]] == ["1", "2", "3", "4", "5"]
    assert "forgot" in listing and "was class0" in listing and "to version 2" in listing
    rows = [json.loads(line) for line in probprompt("model", "history", model, "--json").out.splitlines()]
    assert [row["what"] for row in rows] == ["learned", "learned", "forgot", "renamed", "rolled back"]
    assert "'class1'" in error(probprompt("model", "forget", model, "clas1"))
    assert "1, 2, 3, 4, 5" in error(probprompt("model", "rollback", model, 9))
    assert "'class1'" in error(probprompt("model", "rename", model, "class0", "Class1"))


def test_settings_are_chosen_once(probprompt: Command, saved: Path, split: Split, tmp_path: Path) -> None:
    new, photos = tmp_path / "new", split("34")
    for arguments, message in (
        ((saved, photos, "--method", "l2p", "--set", "samples=3"), "Remove --method, --set"),
        ((photos, split("01", "0"), *SMALL), r"(class3, class4)"),
        ((new, photos, "--set", "sample=3"), "'method.samples'"),
        ((new, photos, "--method", "l3p"), "'l3p'"),
    ):
        assert message in error(probprompt("learn", *arguments))
    assert not new.exists()
    assert probprompt("learn", new, photos, "--method", "l2p", *TINY).code == 0
    assert load(new).settings.preset == "ridge"


def test_an_interrupted_lesson(probprompt: Command, model: Path, split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("probprompt.classifier.lesson.settle", interrupt)
    answer = probprompt("learn", model, split("3"))
    assert (answer.code, answer.err) == (130, f"Interrupted. {model} is unchanged.\n")
    assert load(model).version == 2
