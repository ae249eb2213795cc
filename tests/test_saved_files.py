"""Files of an earlier version load, predict and continue; tests/data/saved/README.md says how they were written.

Backbone and images are made of whole numbers, so they are the same on every machine. All classes are well separated,
so no expectation depends on rounding.
"""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.numpy import save_file

import probprompt as package
from probprompt import ContinualClassifier
from probprompt.config import flatten

SAVED = Path(__file__).parent / "data" / "saved"
Command = Callable[..., Any]


def paint(name: str, count: int, seed: int = 0) -> list[Image.Image]:
    """Images of the class with this letter; every seed gives others."""
    pattern = np.random.RandomState(ord(name)).randint(0, 256, (4, 4, 3))
    noise = np.random.RandomState([ord(name), seed]).randint(-50, 51, (count, 32, 32, 3))
    wide = np.kron(pattern, np.ones((8, 8, 1), dtype=int))
    return [Image.fromarray(pixels) for pixels in (wide + noise).clip(0, 255).astype(np.uint8)]


def prepare(folder: Path) -> Path:
    """Write the backbone's weights, and a folder of images by class, where the saved files expect them."""
    draw, weights = np.random.RandomState(0), {}
    for name, value in timm.create_model("test_vit", num_classes=0).state_dict().items():
        one = "norm" in name and name.endswith("weight")
        weights[name] = (draw.randint(-128, 129, tuple(value.shape)) / 1024 + one).astype(np.float32)
    save_file(weights, folder / "weights.safetensors")
    for name in "abcdef":
        (folder / "pictures" / name).mkdir(parents=True)
        for index, image in enumerate(paint(name, 10)):
            image.save(folder / "pictures" / name / f"{index}.png")
    return folder


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the saved files in the working directory, with weights and images next to it."""
    monkeypatch.chdir(prepare(shutil.copytree(SAVED, tmp_path / "saved")))
    return tmp_path / "saved"


def logits(folder: Path, names: str) -> torch.Tensor:
    """Logits of new images by a saved model, three of each class."""
    images = [image.resize((37, 37)).crop((2, 2, 34, 34)) for name in names for image in paint(name, 3, seed=3)]
    pixels = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])
    found: torch.Tensor = package.load_model(folder).model.predict(pixels / 127.5 - 1)
    return found


def labels(classifier: ContinualClassifier, names: str) -> str:
    """The most probable classes of new images, two of each class."""
    answers = classifier.predict([image for name in names for image in paint(name, 2, seed=3)], top_k=2)
    assert all(answer.top[0] == (answer.label, answer.probability) for answer in answers)
    return "".join(str(answer.label) for answer in answers)


@pytest.mark.parametrize("name", ["linear", "ridge", "apt", "lda", "nearest-mean"])
def test_saved_models_predict(saved: Path, name: str) -> None:
    classes = package.load_model(saved / name).class_names
    assert "".join(classes[index] for index in logits(saved / name, "abcdef").argmax(dim=1)) == "aaabbbcccdddeeefff"


@pytest.mark.parametrize(("name", "task", "epoch"), [("linear", 1, 2), ("ridge", 2, 0)])
def test_stopped_runs_resume(saved: Path, name: str, task: int, epoch: int) -> None:
    """What decides is the hash in run.json, so settings that a later version adds or renames do not matter."""
    stopped = saved / f"{name}-stopped"
    run = package.resume(stopped)
    assert run.finished and run.report.exists()
    events = [json.loads(line) for line in (stopped / "events.jsonl").read_text().splitlines()]
    place = next(index for index, event in enumerate(events) if event["event"] == "resumed")
    assert (events[place]["task"], events[place]["epoch"]) == (task, epoch)
    epochs = {"linear": [(1, 2), (1, 3), *((2, number) for number in range(4))], "ridge": []}[name]
    assert [(event["task"], event["epoch"]) for event in events[place:] if event["event"] == "epoch"] == epochs
    np.testing.assert_allclose(run.matrix, package.Run.open(saved / name).matrix, atol=26)  # one image of four
    whole = logits(saved / name, "abcdef")
    assert float((logits(stopped, "abcdef") - whole).abs().max()) < 0.01 * float(whole.std())


def test_settings_of_other_heads_that_were_ignored_are_dropped(saved: Path) -> None:
    """Heads took the settings of all kinds until version 0.1: ``--set head.projections=500`` under a linear head."""
    for path in (*saved.glob("l*/run.json"), *saved.glob("l*/model/model.json"), *saved.glob("*/versions/*.json")):
        note = json.loads(path.read_text())
        for place in (note, note.get("config", {}), note.get("settings", {}).get("config", {})):
            if "head" in place and isinstance(place["head"], dict):
                place["head"] |= {"projections": 500} if place["head"]["kind"] != "ridge" else {"shrinkage": 0.1}
        path.write_text(json.dumps(note))
    assert package.Run.open(saved / "linear").record.flat_settings["head.projections"] == 2000
    assert package.resume(saved / "linear-stopped").finished
    assert len(logits(saved / "linear", "a")) == 3
    assert labels(ContinualClassifier.load(saved / "classifier"), "abcde") == "aabbccddee"


def test_finished_runs_are_left_as_they_are(saved: Path, probprompt: Command) -> None:
    before = (saved / "ridge" / "run.json").read_bytes()
    assert package.resume(saved / "ridge").finished
    assert (saved / "ridge" / "run.json").read_bytes() == before
    record = package.Run.open(saved / "ridge").record
    assert (
        record.settings
        and flatten(record.settings.to_stored()).items()
        >= {name: value for name, value in flatten(record.config).items() if name != "head.shrinkage"}.items()
    )
    assert probprompt("report", saved / "linear", saved / "ridge", "--out", "both.html").code == 0
    assert "100.0" in Path("both.html").read_text(encoding="utf-8")
    again = package.write_report([str(saved / "linear"), str(saved / "ridge")], "again.html")
    assert again.read_bytes() == Path("both.html").read_bytes()


def test_saved_records_are_compared(saved: Path, probprompt: Command) -> None:
    assert probprompt("compare", "--runs", saved / "records.jsonl", "--out", "compared").code == 0
    with Path("compared", "table.csv").open(newline="", encoding="utf-8") as stream:
        rows = {row["folder"]: row for row in csv.DictReader(stream)}
    lines = [json.loads(line) for line in (saved / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len(lines) == 6
    for line in lines:
        row, final = rows[line["where"]], [scores[-1] for scores in line["matrix"]]
        assert row["method"] == line["run"]["config"]["method"]["name"]
        assert float(row["FAA"]) == pytest.approx(sum(final) / len(final))
    assert rows["ridge"]["head.layers"] == "2"


def test_saved_classifier_predicts_and_continues(saved: Path, probprompt: Command) -> None:
    classifier = ContinualClassifier.load(saved / "classifier")
    history = [(one.number, one.what, one.known) for one in classifier.history()]
    assert history == [(1, "learned", 3), (2, "learned", 5), (3, "refined", 5)]
    assert labels(classifier, "abcde") == "aabbccddee"
    classifier.rollback(1)
    assert classifier.classes == tuple("abc") and labels(classifier, "abc") == "aabbcc"
    classifier.learn({"f": paint("f", 6)})
    classifier.save(saved / "classifier")
    again = ContinualClassifier.load(saved / "classifier")
    assert (again.version, again.classes) == (5, tuple("abcf")) and labels(again, "abcf") == "aabbccff"
    assert labels(ContinualClassifier.load(saved / "classifier", version=3), "abcde") == "aabbccddee"
    answer = probprompt("predict", saved / "classifier", Path("pictures", "b", "0.png"), "--format", "json")
    assert answer.code == 0 and json.loads(answer.out)["label"] == "b"


def test_saved_classifier_learns_by_command(saved: Path, probprompt: Command) -> None:
    for name in "ef":
        shutil.copytree(Path("pictures", name), Path("more", name))
    assert probprompt("learn", saved / "classifier", "more", "--existing", "extend").code == 0
    assert probprompt("model", "forget", saved / "classifier", "c").code == 0
    assert labels(ContinualClassifier.load(saved / "classifier"), "abdef") == "aabbddeeff"
