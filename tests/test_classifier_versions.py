"""A saved classifier: small, whole at every moment, its versions kept by number and what they share stored once."""

import errno
import json
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from probprompt import ContinualClassifier, UserError
from probprompt.classifier import changing
from probprompt.classifier.store import Store
from probprompt.storage import read_tensors

SETTINGS: dict[str, Any] = {
    "backbone": "test_vit",
    "weights": "random",
    "image_size": 32,
    "device": "cpu",
    "epochs": 1,
    "samples": 2,
    "components": 3,
    "method.tokens": 2,
    "blocks": [0, 2],
    "projections": 60,
}


def test_what_would_be_prepared_otherwise_is_refused_and_weights_may_come_along(tmp_path: Path) -> None:
    weights = tmp_path / "there" / "mine.safetensors"
    weights.parent.mkdir()
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), weights)
    beside, said = weights.with_suffix(".json"), {"image_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
    beside.write_text(json.dumps({"preprocessing": said}))
    made = ContinualClassifier(**{**SETTINGS, "weights": str(weights), "image_size": None})
    made.learn(paint("ab"))
    made.save(tmp_path / "classifier")
    expected = made.predict(PROBE[:2])
    beside.write_text(json.dumps({"preprocessing": {**said, "mean": [0.0] * 3}}))
    with pytest.raises(UserError, match=r"prepared otherwise than they were \(mean \[0.5, 0.5, 0.5\], now \[0.0"):
        ContinualClassifier.load(tmp_path / "classifier", device="cpu").predict(PROBE[:2])
    beside.write_text(json.dumps({"preprocessing": said}))
    away = tmp_path / "classifier"
    for file in (weights, beside):
        file.rename(away / file.name)
    assert ContinualClassifier.load(away, device="cpu").predict(PROBE[:2]) == expected
    (away / weights.name).unlink()
    with pytest.raises(UserError, match=r"there is no file .*mine.safetensors.*put it into .*classifier"):
        ContinualClassifier.load(away, device="cpu").predict(PROBE[:2])


def paint(names: str, images: int = 8, seed: int = 0) -> dict[str, list[NDArray[np.uint8]]]:
    found = {}
    for name in names:
        pattern = np.kron(np.random.RandomState(ord(name)).randint(0, 255, (4, 4, 3)), np.ones((9, 9, 1)))
        noise = np.random.RandomState([ord(name), seed]).normal(0, 25, (images, 36, 36, 3))
        found[name] = list((pattern + noise).clip(0, 255).astype(np.uint8))
    return found


PROBE = [picture for group in paint("abcde", 2, seed=9).values() for picture in group]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions: a and b learned, c and d learned, a renamed; not to be changed."""
    made = ContinualClassifier(**SETTINGS)
    made.learn(paint("ab"), name="first")
    made.learn(paint("cd"), name="second")
    made.rename("a", "alpha")
    folder = tmp_path_factory.mktemp("saved") / "model"
    made.save(folder)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(folder: Path, version: int | None = None) -> ContinualClassifier:
    return ContinualClassifier.load(folder, version=version, device="cpu")


def answers(classifier: ContinualClassifier) -> list[Any]:
    return classifier.predict(PROBE, top_k=9)


def objects(folder: Path) -> set[str]:
    return {path.name for path in (folder / "objects").iterdir()}


# Writing and reading


def test_a_loaded_classifier_is_the_one_that_was_saved(saved: Path, tmp_path: Path) -> None:
    loaded = load(saved)
    assert (loaded.version, loaded.classes, loaded.task_count) == (3, ("alpha", "b", "c", "d"), 2)
    assert [(one.number, one.what, one.note) for one in loaded.history()] == [
        (1, "learned", "first"),
        (2, "learned", "second"),
        (3, "renamed", "was a"),
    ]
    loaded.save(tmp_path / "copy")
    assert answers(load(tmp_path / "copy")) == answers(loaded)
    assert load(saved, version=1).classes == ("a", "b")
    with pytest.raises(UserError, match="has no version 7; kept are: 1, 2, 3"):
        load(saved, version=7)


def test_learning_goes_on_after_loading_as_if_nothing_had_been(model: Path) -> None:
    loaded, unbroken = load(model), ContinualClassifier(**SETTINGS)
    unbroken.learn(paint("ab"))
    unbroken.learn(paint("cd"))
    for one in (loaded, unbroken):
        one.learn(paint("ef"))
    weights = [one.predictor.model.head.weight for one in (loaded, unbroken)]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
    mine, other = (one.predictor.state.calibration for one in (loaded, unbroken))
    assert mine.temperature == pytest.approx(other.temperature, rel=1e-4)
    back = load(model, version=1)  # its sums are gone, and made again
    again = ContinualClassifier(**SETTINGS)
    again.learn(paint("ab"))
    for one in (back, again):
        one.learn(paint("xy"))
    torch.testing.assert_close(
        back.predictor.model.head.weight, again.predictor.model.head.weight, rtol=1e-5, atol=1e-6
    )


def test_predicting_reads_nothing_that_only_learning_needs(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def watched(path: Path, device: torch.device) -> Any:
        read.append(path.name)
        return read_tensors(path, device)

    monkeypatch.setattr("probprompt.classifier.statistics.read_tensors", watched)
    assert answers(load(saved))
    state = json.loads((saved / "versions" / "3.json").read_text())["state"]
    assert {name.removesuffix(".safetensors") for name in read} == {
        state["parts"][name] for name in ("method", "head", "gaussians")
    }


def test_what_versions_share_is_stored_once_and_what_none_needs_is_removed(model: Path) -> None:
    before = objects(model)
    first, second, third = (json.loads((model / "versions" / f"{n}.json").read_text())["state"] for n in (1, 2, 3))
    assert first["parts"]["method"] == second["parts"]["method"] == third["parts"]["method"]
    assert first["classes"][0]["rest"] == third["classes"][0]["rest"]
    assert "sums" not in first["parts"] and "sums" in third["parts"]
    with changing(model, "cpu") as classifier:
        classifier.rename("b", "beta")
    assert objects(model) == before, "another name is no other tensor"
    with changing(model, "cpu") as classifier:
        classifier.keep_versions = 1
        classifier.forget("c")
    assert [path.name for path in (model / "versions").iterdir()] == ["5.json"]
    state = json.loads((model / "versions" / "5.json").read_text())["state"]
    needed = {digest for known in state["classes"] for digest in (known["held"], known["rest"])}
    assert {name.removesuffix(".safetensors") for name in objects(model)} == needed | set(state["parts"].values())
    assert load(model).keep_versions == 1


def test_going_back_on_disk(model: Path) -> None:
    with changing(model, "cpu") as classifier:
        classifier.rollback(1)
    loaded = load(model)
    assert (loaded.version, loaded.classes) == (4, ("a", "b"))
    assert answers(loaded) == answers(load(model, version=1))


def test_the_default_size_is_a_few_megabytes_to_predict(tmp_path: Path) -> None:
    made = ContinualClassifier(backbone="demo", device="cpu", epochs=1, config={"training": {"batch": 4}})
    made.learn(paint("ab", 4))
    made.save(tmp_path / "model")
    state = json.loads((tmp_path / "model" / "versions" / "1.json").read_text())["state"]
    size = sum(
        (tmp_path / "model" / "objects" / f"{state['parts'][name]}.safetensors").stat().st_size
        for name in ("method", "head", "gaussians")
    )
    assert size < 3e6


# Whole at every moment


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_classifier_versions import load, paint

source, target = Path({source!r}), Path({target!r})
prepared = load(source)
prepared.learn(paint("e"))
original = {{name: getattr(Path, name) for name in ("write_bytes", "replace", "unlink")}}
done = 0

def deadly(name, at):
    def act(path, *given, **named):
        global done
        done += 1
        if done == at:
            if name == "write_bytes":  # half a file
                original[name](path, given[0][: len(given[0]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return original[name](path, *given, **named)
    return act

at, status = 0, None
while status != 0:
    at += 1
    copy = target / str(at)
    shutil.copytree(source, copy)
    child = os.fork()
    if not child:
        for name in original:
            setattr(Path, name, deadly(name, at))
        prepared.save(copy)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
"""


def test_killed_at_any_moment_a_saved_classifier_is_the_old_or_the_new_one(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "killed"
    target.mkdir()
    script = KILLED.format(tests=str(Path(__file__).parent), source=str(model), target=str(target))
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)
    old, moments = answers(load(model)), sorted(target.iterdir(), key=lambda path: int(path.name))
    last = load(moments[-1])
    new = answers(last)
    assert last.version == 4 and last.classes == ("alpha", "b", "c", "d", "e")
    seen = []
    for folder in moments:
        found = load(folder)
        assert (found.version, answers(found)) in ((3, old), (4, new))
        seen.append(found.version)
    assert len(seen) > 12 and seen == sorted(seen) and set(seen) == {3, 4}
    for folder in (moments[0], moments[len(seen) // 2], moments[seen.index(4)]):  # and it goes on from there
        with changing(folder, "cpu") as classifier:
            classifier.learn(paint("fg"))
        assert load(folder).classes[-2:] == ("f", "g")
        assert not list(folder.rglob("*.part"))


class Starving(TorchDispatchMode):
    """Lets so many operations of PyTorch pass; the next one finds no memory."""

    def __init__(self, operations: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = operations

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")
        return operation(*arguments, **(named or {}))


def moments(lesson: Callable[[], object]) -> list[int]:
    """A dozen moments of a lesson, from its first operation to its last."""
    with Starving(10**9) as counted:
        lesson()
    needed = 10**9 - counted.left
    assert needed > 200
    return sorted({round(part * (needed - 1) / 11) for part in range(12)})


def test_out_of_memory_at_any_moment_of_a_lesson_nothing_has_changed(tmp_path: Path) -> None:
    def begun() -> ContinualClassifier:
        made = ContinualClassifier(**SETTINGS)
        made.learn(paint("ab"))
        return made

    starved, expected = begun(), begun()
    starved.save(tmp_path / "model")
    old, kept = answers(starved), starved.history()
    for at in moments(lambda: expected.learn(paint("cd"))):
        with pytest.raises(torch.OutOfMemoryError), Starving(at):
            starved.learn(paint("cd"))
        assert starved.history() == kept and answers(starved) == old
    starved.save(tmp_path / "model")
    assert load(tmp_path / "model").version == 1 and answers(load(tmp_path / "model")) == old
    starved.learn(paint("cd"))
    assert answers(starved) == answers(expected) != old


def test_out_of_memory_in_the_first_lesson_nothing_is_learned() -> None:
    expected = ContinualClassifier(**SETTINGS)
    for at in moments(lambda: expected.learn(paint("ab"))):
        starved = ContinualClassifier(**SETTINGS)
        with pytest.raises(torch.OutOfMemoryError), Starving(at):
            starved.learn(paint("ab"))
        assert starved.version == 0 and starved.classes == ()
    starved.learn(paint("ab"))
    assert answers(starved) == answers(expected)


LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
import torch
from probprompt.classifier import ContinualClassifier
from probprompt.cli import console, main

torch.set_num_threads(1)
folder, lesson, room = sys.argv[1:]
ContinualClassifier.load(folder, device="cpu").predictor
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(room), resource.RLIM_INFINITY))
sys.argv = ["probprompt", "learn", folder, lesson, "--device", "cpu"]
main()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs a system that limits and tells memory")
def test_a_machine_with_too_little_memory_says_so_and_keeps_the_old_version(model: Path, pictures: Path) -> None:
    old = answers(load(model))
    told = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY, str(model), str(pictures), str(10**7)], capture_output=True, text=True
    )
    assert told.returncode == 1 and "there is not enough memory" in told.stderr, told.stderr
    assert "Traceback" not in told.stderr
    assert load(model).version == 3 and answers(load(model)) == old


@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_full_disk_leaves_the_old_version_and_is_told(model: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    classifier = load(model)
    before = answers(classifier)
    classifier.learn(paint("e"))
    original, done = Path.write_bytes, 0

    def full(path: Path, data: bytes) -> int:
        nonlocal done
        done += 1
        if done >= at:
            original(path, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="the disk is full, make room on it"):
        classifier.save(model)
    monkeypatch.undo()
    assert answers(load(model)) == before and load(model).version == 3
    assert classifier.version == 4, "what is in memory is not lost"
    classifier.save(model)
    assert answers(load(model)) == answers(classifier)


# Several writers


def test_two_writers_never_lose_what_the_other_saved(model: Path, tmp_path: Path) -> None:
    one, other = load(model), load(model)
    one.rename("b", "beta")
    one.save(model)
    other.rename("b", "bravo")
    with pytest.raises(UserError, match="has moved on to version 4, which this classifier does not know"):
        other.save(model)
    assert load(model).classes == ("alpha", "beta", "c", "d")
    other.save(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="another classifier"):
        stranger = ContinualClassifier(**SETTINGS)
        stranger.learn(paint("ab"))
        stranger.save(model)


def test_while_one_process_changes_a_classifier_no_other_does(model: Path) -> None:
    with Store(model).locked(), pytest.raises(UserError, match="another process is changing"):
        load(model).save(model)
    with changing(model, "cpu") as classifier:
        assert load(model).version == 3, "reading is free"
        with pytest.raises(UserError, match="another process is changing"), changing(model, "cpu"):
            pass
        classifier.rename("b", "beta")
    assert load(model).version == 4


def test_readers_find_it_whole_while_a_writer_keeps_a_single_version(model: Path) -> None:
    stop = threading.Event()

    def keep_changing() -> None:
        while not stop.is_set():
            with changing(model, "cpu") as classifier:
                classifier.keep_versions = 1
                classifier.forget("d") if "d" in classifier.classes else classifier.learn(paint("d"))
                classifier.rename(*("beta", "b") if "beta" in classifier.classes else ("b", "beta"))

    writer = threading.Thread(target=keep_changing)
    writer.start()
    try:
        for _ in range(12):
            found = load(model)
            assert all(answer.label in found.classes for answer in answers(found))
    finally:
        stop.set()
        writer.join()
    assert load(model).version > 6, "the writer was at work all the while"


def test_a_change_that_fails_saves_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="known already"), changing(model, "cpu") as classifier:
        classifier.rename("b", "beta")
        classifier.learn(paint("c"))
    assert load(model).classes == ("alpha", "b", "c", "d")
    with pytest.raises(UserError, match="only one class"), changing(tmp_path / "new", create=SETTINGS) as classifier:
        classifier.learn(paint("a"))
    assert not (tmp_path / "new").exists()


# What is no classifier


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds no classifier, but other things \(cat\): choose a new folder"):
        load(saved).save(tmp_path / "photos")
    with pytest.raises(UserError, match="holds no classifier"):
        load(tmp_path / "photos")
    with pytest.raises(UserError, match="there is no such folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        load(saved).save(tmp_path / "file")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("current.json", lambda note: note.update(format=9), "classifier format 9, this version reads 1"),
        ("current.json", lambda note: note.pop("version"), "is damaged: it names no version"),
        ("versions/3.json", lambda note: note.pop("state"), "is damaged: it does not describe a classifier"),
        ("versions/3.json", lambda note: note["state"]["parts"].update(head="../../x"), "is damaged"),
        ("versions/3.json", lambda note: note["settings"].pop("config"), "is damaged"),
        ("versions/3.json", lambda note: note["settings"]["backbone"].update(sha256="0" * 64), "other weights"),
    ],
)
def test_damage_is_told_in_words(model: Path, file: str, change: Any, message: str) -> None:
    path = model / file
    note = json.loads(path.read_text())
    change(note)
    path.write_text(json.dumps(note))
    with pytest.raises(UserError, match=message):
        answers(load(model))


def test_objects_that_were_altered_or_are_missing_are_refused(model: Path) -> None:
    state = json.loads((model / "versions" / "3.json").read_text())["state"]
    path = model / "objects" / f"{state['parts']['head']}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="do not match its digest"):
        answers(load(model))
    path.write_bytes(pickle.dumps({"run": "me"}))
    with pytest.raises(UserError, match="damaged"):
        answers(load(model))
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        answers(load(model))


def test_going_back_undoes_forgetting_and_refining_goes_on_from_there(model: Path) -> None:
    never = load(model)
    never.learn(paint("c", seed=4), known="refine")
    forgot = load(model)
    forgot.forget("c")
    forgot.save(model)
    forgot.save(model)
    back = load(model)
    back.rollback(3)
    back.learn(paint("c", seed=4), known="refine")
    back.save(model)
    assert answers(load(model)) == answers(never)
    assert [one.what for one in load(model).history()][-3:] == ["forgot", "rolled back", "refined"]
    with pytest.raises(UserError, match="is called 'c' already"):
        back.rename("c", "c")
