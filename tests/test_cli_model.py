"""A classifier on the command line, as its user meets it: what is printed, what is left, how mistakes are answered."""

import csv
import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probprompt import ContinualClassifier
from probprompt.cli import model as commands

TINY = (
    "--backbone",
    "test_vit",
    "--weights",
    "random",
    "--set",
    "image_size=32",
    "--epochs",
    "1",
    "--set",
    "samples=2",
)
SMALL = (*TINY, "--set", "blocks=[0]", "--set", "projections=60", "--device", "cpu")

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def split(pictures: Path, tmp_path: Path) -> Callable[[str, str], Path]:
    """Some of the classes, and some of the images of each, in a folder of their own."""

    def make(classes: str, images: str = "01234") -> Path:
        root = tmp_path / f"photos-{classes}-{images}"
        for label in classes:
            (root / f"class{label}").mkdir(parents=True)
            for image in images:
                source = pictures / f"class{label}" / f"{image}.png"
                (root / f"class{label}" / source.name).write_bytes(source.read_bytes())
        return root

    return make


@pytest.fixture
def model(probprompt: Command, split: Command, tmp_path: Path) -> Path:
    """Knows classes 0 and 1 of one lesson and 2 of another."""
    folder = tmp_path / "model"
    assert probprompt("learn", folder, split("01"), *SMALL).code == 0
    assert probprompt("learn", folder, split("2"), "--device", "cpu").code == 0
    return folder


def mistake(answer: Any) -> str:
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ") and "Traceback" not in answer.err
    return str(answer.err)


def load(folder: Path) -> ContinualClassifier:
    return ContinualClassifier.load(folder, device="cpu")


def test_learning_says_what_came_of_it(probprompt: Command, split: Command, tmp_path: Path) -> None:
    folder = tmp_path / "birds"
    first = probprompt("learn", folder, split("01"), *SMALL, "--name", "January")
    assert first.code == 0 and first.err == ""
    assert first.out.splitlines()[:2] == ["reading images: done", first.out.splitlines()[1]]
    assert re.search(r"^10 images in [\d.]+ s: 2 new class\(es\); 2 classes are known$", first.out, re.MULTILINE)
    assert f"version 1 saved: {folder}" in first.out
    bad = split("2", "0123456789")
    (bad / "class2" / "bad.png").write_text("nothing")
    second = probprompt("learn", folder, bad, "--device", "cpu", "--keep-versions", 3)
    assert second.code == 0 and "not read: class2/bad.png: no image format that can be read" in second.out
    assert "too few images were held out to say how far probabilities are off" in second.out
    assert load(folder).classes == ("class0", "class1", "class2") and load(folder).keep_versions == 3
    assert [one.note for one in load(folder).history()] == ["January", bad.name]


def test_classes_known_already_are_refused_or_refined(probprompt: Command, model: Path, split: Command) -> None:
    more = split("13", "567")
    said = mistake(probprompt("learn", model, more, "--device", "cpu"))
    assert "1 class(es) are known already: class1" in said and "--known refine" in said
    assert load(model).version == 2
    answer = probprompt("learn", model, more, "--known", "refine", "--device", "cpu")
    assert answer.code == 0 and "1 new class(es) and more images of class1" in answer.out


def test_predictions_are_rows_as_text_json_or_csv(probprompt: Command, model: Path, split: Command) -> None:
    folder = split("02", "67")
    (folder / "bad.png").write_text("nothing")
    expected = {answer.source: answer for answer in load(model).predict(folder, top_k=2)}
    text = probprompt("predict", model, folder, "--device", "cpu")
    assert text.code == 0 and len(text.out.splitlines()) == 5
    assert f"{folder / 'bad.png'}: not read: no image format that can be read" in text.out
    assert "1 of 5 file(s) could not be read" in text.err
    lines = probprompt("predict", model, folder, "--json", "--top-k", 2, "--device", "cpu").out.splitlines()
    for row in map(json.loads, lines):
        answer = expected[row["source"]]
        assert (row["label"], row["unknown"], row["error"]) == (answer.label, answer.unknown, answer.error)
        assert [(one["label"], one["probability"]) for one in row["top"]] == list(answer.top)
    table = probprompt("predict", model, folder, "--csv", "--top-k", 2, "--device", "cpu").out
    rows = list(csv.DictReader(io.StringIO(table)))
    assert list(rows[0]) == ["file", "label", "probability", "label_2", "probability_2", "unknown", "novelty", "error"]
    assert len(rows) == 5
    for row in rows:
        answer = expected[row["file"]]
        assert row["label"] == (answer.label or "") and row["error"] == (answer.error or "")
        assert row["unknown"] == ("" if answer.error else str(answer.unknown).lower())


def test_rows_come_while_images_are_still_read(
    probprompt: Command, model: Path, split: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = split("012", "0123456789"), list[int]()
    original = commands._TextRows.write

    class Rows(commands._TextRows):
        def write(self, answer: Any) -> None:
            seen.append(len(decoded))
            original(self, answer)

    decoded: list[Path] = []
    read = sys.modules["probprompt.classifier.pictures"].read_image

    def watched(path: Path, short_side: int | None) -> Any:
        decoded.append(path)
        return read(path, short_side)

    monkeypatch.setattr("probprompt.classifier.pictures.read_image", watched)
    monkeypatch.setattr(commands, "_TextRows", Rows)
    assert probprompt("predict", model, folder, "--batch", 2, "--device", "cpu").code == 0
    assert len(seen) == 30 and seen[0] < 30 and len(decoded) == 30


def test_a_missing_file_is_a_row_and_nothing_at_all_a_mistake(probprompt: Command, model: Path, tmp_path: Path) -> None:
    answer = probprompt("predict", model, tmp_path / "missing.png", "--device", "cpu")
    assert answer.code == 2 and "not read: " in answer.out and "No such file" in answer.out
    assert "none of 1 file(s) could be read" in answer.err
    (tmp_path / "empty").mkdir()
    assert "no image in" in mistake(probprompt("predict", model, tmp_path / "empty", "--device", "cpu"))
    assert "exclude each other" in mistake(probprompt("predict", model, tmp_path, "--json", "--csv"))
    assert "holds no classifier" in mistake(probprompt("predict", tmp_path / "nowhere", tmp_path))


def test_a_folder_that_cannot_be_opened_is_a_row_among_the_others(
    probprompt: Command, model: Path, split: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scan = split("012", "01"), os.scandir

    def closed(path: Any) -> Any:
        if Path(path).name == "class1":
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    answer = probprompt("predict", model, folder, "--device", "cpu")
    assert answer.code == 0 and len(answer.out.splitlines()) == 5
    assert "class1: not read: the folder" in answer.out and "Permission denied" in answer.out
    monkeypatch.undo()


@pytest.mark.skipif(sys.platform != "linux", reason="only there may names of files be any bytes")
def test_names_of_files_that_are_no_text_are_printed_all_the_same(
    probprompt: Command, model: Path, pictures: Path, tmp_path: Path
) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9.png"
    Path(os.fsdecode(odd)).write_bytes((pictures / "class0" / "0.png").read_bytes())
    path = os.fsdecode(odd)
    assert "caf\\udce9.png: class" in probprompt("predict", model, path, "--device", "cpu").out
    row = json.loads(probprompt("predict", model, path, "--json", "--device", "cpu").out)
    assert row["source"] == path and row["error"] is None


def test_who_reads_no_further_ends_the_command_quietly(model: Path, pictures: Path) -> None:
    command = [sys.executable, "-m", "probprompt", "predict", str(model), str(pictures), "--batch", "1"]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--json", "--top-k", "3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    assert process.wait(60) == 0
    process.stderr.close()


def test_evaluation_shows_tasks_classes_and_what_is_unknown(probprompt: Command, model: Path, split: Command) -> None:
    test, strange = split("012", "789"), split("45", "789")
    answer = probprompt("evaluate", model, test, "--unknown", strange, "--device", "cpu")
    assert answer.code == 0 and answer.err == ""
    found = load(model).evaluate(test, unknown=strange)
    assert f"overall: {found.accuracy:.1f} % of 9 images" in answer.out
    assert re.search(rf"^photos-01-01234 +2 +6 +[\d.]+ +{found.per_task[0].accuracy:.1f}$", answer.out, re.MULTILINE)
    assert f"AUROC {found.auroc:.3f}" in answer.out and "of the 6 of no known class" in answer.out
    row = json.loads(probprompt("evaluate", model, test, "--json", "--device", "cpu").out)
    assert row["accuracy"] == pytest.approx(found.accuracy) and row["auroc"] is None
    assert row["confusion"] == [list(line) for line in found.confusion]
    assert "are not known: class4, class5" in mistake(probprompt("evaluate", model, strange, "--device", "cpu"))


def test_forgetting_renaming_and_going_back_are_versions(probprompt: Command, model: Path) -> None:
    told = probprompt("forget", model, "class1").out
    assert told.startswith("forgot 'class1'; version 3 knows 2 classes\n") and "versions before it still know" in told
    assert probprompt("rename", model, "class0", "tit").out == "'class0' is now called 'tit'; version 4\n"
    assert load(model).classes == ("tit", "class2")
    assert probprompt("rollback", model, "--to", 2).out == "version 5 is version 2 again: 3 classes\n"
    assert load(model).classes == ("class0", "class1", "class2")
    shown = probprompt("history", model).out
    assert [line.split()[0] for line in shown.splitlines()[1:]] == ["1", "2", "3", "4", "5"]
    assert "forgot" in shown and "was class0" in shown and "to version 2" in shown
    rows = [json.loads(line) for line in probprompt("history", model, "--json").out.splitlines()]
    assert [row["what"] for row in rows] == ["learned", "learned", "forgot", "renamed", "rolled back"]
    assert "did you mean 'class1'" in mistake(probprompt("forget", model, "clas1"))
    assert "no version 9 to go back to; kept are: 1, 2, 3, 4, 5" in mistake(probprompt("rollback", model, "--to", 9))
    assert "there is a class 'class1' already" in mistake(probprompt("rename", model, "class0", "Class1"))


def test_settings_stay_as_they_were(probprompt: Command, model: Path, split: Command, tmp_path: Path) -> None:
    said = mistake(probprompt("learn", model, split("3"), "--method", "l2p", "--set", "samples=3"))
    assert "goes on with the settings it began with: leave out --method, --set" in said
    photos = split("34")
    assert "holds no classifier, but other things (class3, class4)" in mistake(
        probprompt("learn", photos, split("01", "0"), *SMALL)
    )
    assert "did you mean 'method.samples'" in mistake(
        probprompt("learn", tmp_path / "new", photos, "--set", "sample=3")
    )
    assert "no method is called 'l3p'" in mistake(probprompt("learn", tmp_path / "new", photos, "--method", "l3p"))
    assert not (tmp_path / "new").exists()
    other = probprompt("learn", tmp_path / "l2p", photos, "--method", "l2p", *TINY[:-2], "--device", "cpu")
    assert other.code == 0 and load(tmp_path / "l2p").settings.preset == "ridge"


def test_an_interrupted_lesson_changes_nothing(
    probprompt: Command, model: Path, split: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("probprompt.classifier.teaching.settle", interrupt)
    answer = probprompt("learn", model, split("3"), "--device", "cpu")
    assert (answer.code, answer.err) == (130, f"interrupted; {model} is as it was\n")
    assert load(model).version == 2


def test_help_names_the_commands(probprompt: Command) -> None:
    shown = probprompt("--help").out
    assert all(name in shown for name in ["learn", "predict", "evaluate", "forget", "rename", "history", "rollback"])
    assert "--known" in probprompt("learn", "--help").out
