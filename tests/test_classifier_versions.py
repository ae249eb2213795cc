"""A saved classifier: small, whole at every moment, its versions kept by number and what they share stored once."""

import errno
import itertools
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from probprompt import ContinualClassifier, UserError
from probprompt.classifier import changing
from probprompt.classifier.store import Store
from probprompt.storage import read_tensors
from test_classifier import PROBPROMPT, Classes, flat, paint, taught

PROBE = flat(paint("abcde", 2, seed=9))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions: a and b learned, c and d learned, a renamed; not to be changed."""
    made = taught(paint("ab"), paint("cd"))
    made.rename("a", "alpha")
    folder = tmp_path_factory.mktemp("saved") / "model"
    made.save(folder)
    return folder


def load(folder: Path, version: int | None = None) -> ContinualClassifier:
    return ContinualClassifier.load(folder, version=version, device="cpu")


def answers(classifier: ContinualClassifier) -> list[Any]:
    return classifier.predict(PROBE, top_k=9)


def objects(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "objects").iterdir()}


def state_of(folder: Path, version: int) -> dict[str, Any]:
    """What is written of a version."""
    state: dict[str, Any] = json.loads((folder / "versions" / f"{version}.json").read_text())["state"]
    return state


def test_a_loaded_classifier_is_the_one_that_was_saved(saved: Path, tmp_path: Path) -> None:
    loaded = load(saved)
    assert (loaded.version, loaded.classes, loaded.task_count) == (3, ("alpha", "b", "c", "d"), 2)
    history = [(one.number, one.what, one.note) for one in loaded.history()]
    assert history == [(1, "learned", "task 1"), (2, "learned", "task 2"), (3, "renamed", "was a")]
    loaded.save(tmp_path / "copy")
    assert answers(load(tmp_path / "copy")) == answers(loaded)
    assert load(saved, version=1).classes == ("a", "b")
    with pytest.raises(UserError, match=r"Version 7 .*1, 2, 3"):
        load(saved, version=7)


@pytest.mark.parametrize(("version", "lessons"), [(3, ("ab", "cd")), (1, ("ab",))], ids=["with sums", "without"])
def test_learning_goes_on_after_loading_as_if_unbroken(saved: Path, version: int, lessons: tuple[str, ...]) -> None:
    loaded, unbroken = load(saved, version), taught(*map(paint, lessons))
    for one in (loaded, unbroken):
        one.learn(paint("ef"))
    torch.testing.assert_close(*[one.predictor.model.head.weight for one in (loaded, unbroken)], rtol=1e-5, atol=1e-6)
    mine, other = (one.predictor.state.calibration.temperature for one in (loaded, unbroken))
    assert mine == pytest.approx(other, rel=1e-4)


def test_predicting_reads_nothing_that_only_learning_needs(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def watched(path: Path, device: torch.device) -> Any:
        read.append(path.stem)
        return read_tensors(path, device)

    monkeypatch.setattr("probprompt.classifier.store.read_tensors", watched)
    assert answers(load(saved))
    assert set(read) == {state_of(saved, 3)["parts"][name] for name in ("method", "head", "gaussians")}


def test_shared_objects_are_stored_once_and_unused_ones_removed(model: Path) -> None:
    before, first, second, third = objects(model), *(state_of(model, version) for version in (1, 2, 3))
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
    state = state_of(model, 5)
    needed = {digest for known in state["classes"] for digest in (known["held"], known["rest"])}
    assert objects(model) == needed | set(state["parts"].values())
    assert load(model).keep_versions == 1


def test_the_default_size_is_a_few_megabytes_to_predict(tmp_path: Path) -> None:
    made = ContinualClassifier(backbone="demo", device="cpu", epochs=1, config={"training": {"batch_size": 4}})
    made.learn(paint("ab", 4))
    made.save(tmp_path)
    needed = [state_of(tmp_path, 1)["parts"][name] for name in ("method", "head", "gaussians")]
    assert sum((tmp_path / "objects" / f"{name}.safetensors").stat().st_size for name in needed) < 3e6


def test_other_preprocessing_is_refused_and_weights_may_come_along(tmp_path: Path) -> None:
    folder, weights = tmp_path / "classifier", tmp_path / "there" / "mine.safetensors"
    weights.parent.mkdir()
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), weights)
    about, said = weights.with_suffix(".json"), {"image_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
    about.write_text(json.dumps({"preprocessing": said}))
    made = taught(paint("ab"), weights=str(weights), image_size=None)
    made.save(folder)
    about.write_text(json.dumps({"preprocessing": {**said, "mean": [0.0] * 3}}))
    with pytest.raises(UserError, match=r"mean \[0.5, 0.5, 0.5\], now \[0.0"):
        answers(load(folder))
    about.write_text(json.dumps({"preprocessing": said}))
    for file in (weights, about):
        file.rename(folder / file.name)
    assert answers(load(folder)) == answers(made)
    (folder / weights.name).unlink()
    with pytest.raises(UserError, match=r"mine.safetensors.*copy it to .*classifier"):
        answers(load(folder))


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
source, target, tests = map(Path, sys.argv[1:])
sys.path.insert(0, str(tests))
from test_classifier_versions import load, paint

prepared = load(source)
prepared.learn(paint("e"))
original = {name: getattr(Path, name) for name in ("write_bytes", "replace", "unlink")}
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


def test_killed_at_any_moment_it_is_the_old_or_the_new_one(saved: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, saved, tmp_path, Path(__file__).parent], check=True, timeout=300)
    old, moments = answers(load(saved)), sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
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


@pytest.mark.parametrize("learned", [[], [paint("ab")]], ids=["first lesson", "later lesson"])
def test_out_of_memory_at_any_moment_of_a_lesson_changes_nothing(learned: list[Classes]) -> None:
    starved, expected = taught(*learned), taught(*learned)
    old, kept = answers(starved) if learned else [], starved.history()
    for at in moments(lambda: expected.learn(paint("cd"))):
        starved = starved if learned else taught()  # a new one loads its backbone in the lesson
        with pytest.raises(torch.OutOfMemoryError), Starving(at):
            starved.learn(paint("cd"))
        assert starved.history() == kept and (not learned or answers(starved) == old)
    starved.learn(paint("cd"))
    assert answers(starved) == answers(expected) != old


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
def test_too_little_memory_is_told_and_keeps_the_old_version(model: Path, pictures: Path) -> None:
    old = answers(load(model))
    command = [sys.executable, "-c", LITTLE_MEMORY, str(model), str(pictures), str(10**7)]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 1 and "Out of memory" in told.stderr and "Traceback" not in told.stderr, told.stderr
    assert load(model).version == 3 and answers(load(model)) == old


@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_full_disk_leaves_the_old_version_and_is_told(model: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    classifier = load(model)
    before = answers(classifier)
    classifier.learn(paint("e"))
    original, done = Path.write_bytes, itertools.count(1)

    def full(path: Path, data: bytes) -> int:
        if next(done) < at:
            return original(path, data)
        original(path, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="the disk is full"):
        classifier.save(model)
    monkeypatch.undo()
    assert answers(load(model)) == before and load(model).version == 3
    assert classifier.version == 4, "what is in memory is not lost"
    classifier.save(model)
    assert answers(load(model)) == answers(classifier)


def test_two_writers_never_lose_what_the_other_saved(model: Path, tmp_path: Path) -> None:
    one, other = load(model), load(model)
    one.rename("b", "beta")
    one.save(model)
    other.rename("b", "bravo")
    with pytest.raises(UserError, match=r"\(version 4\)"):
        other.save(model)
    assert load(model).classes == ("alpha", "beta", "c", "d")
    other.save(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="different model"):
        taught(paint("ab", 2)).save(model)


def test_while_one_process_changes_a_classifier_no_other_does(model: Path) -> None:
    with Store(model).locked(), pytest.raises(UserError, match="Another process is changing"):
        load(model).save(model)
    with changing(model, "cpu") as classifier:
        assert load(model).version == 3, "reading is free"
        with pytest.raises(UserError, match="Another process is changing"), changing(model, "cpu"):
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
    with pytest.raises(UserError, match="--existing extend"), changing(model, "cpu") as classifier:
        classifier.rename("b", "beta")
        classifier.learn(paint("c"))
    assert load(model).classes == ("alpha", "b", "c", "d")
    with pytest.raises(UserError, match="only one class"), changing(tmp_path / "new", create=PROBPROMPT) as classifier:
        classifier.learn(paint("a"))
    assert not (tmp_path / "new").exists()


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name, message in (("photos", r"\(cat\).*new folder"), ("file", "is a file")):
        with pytest.raises(UserError, match=message):
            load(saved).save(tmp_path / name)
    for name, message in (("photos", "current.json"), ("nowhere", "does not exist")):
        with pytest.raises(UserError, match=message):
            load(tmp_path / name)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("current.json", lambda note: note.update(format=9), "format 9.* format 1"),
        ("current.json", lambda note: note.pop("version"), "damaged|corrupted"),
        ("versions/3.json", lambda note: note.pop("state"), "damaged|corrupted"),
        ("versions/3.json", lambda note: note["state"]["parts"].update(head="../../x"), "damaged|corrupted"),
        ("versions/3.json", lambda note: note["settings"].pop("config"), "damaged|corrupted"),
        ("versions/3.json", lambda note: note["settings"]["backbone"].update(sha256="0" * 64), "SHA-256 mismatch"),
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
    path = model / "objects" / f"{state_of(model, 3)['parts']['head']}.safetensors"
    data = path.read_bytes()
    for content, message in (
        (data[:-1] + bytes([data[-1] ^ 1]), "do not match its hash"),
        (pickle.dumps({"run": "me"}), "damaged|corrupted"),
        (None, "does not exist"),
    ):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            answers(load(model))


def test_going_back_undoes_forgetting_and_refining_goes_on(model: Path) -> None:
    never, more = load(model), paint("c", seed=4)
    never.learn(more, existing="extend")
    forgot = load(model)
    forgot.forget("c")
    forgot.save(model)
    forgot.save(model)
    with changing(model, "cpu") as back:
        back.rollback(3)
    assert load(model).version == 5 and answers(load(model)) == answers(load(model, version=3))
    with changing(model, "cpu") as back:
        back.learn(more, existing="extend")
    assert answers(load(model)) == answers(never)
    assert [one.what for one in load(model).history()][-3:] == ["forgot", "rolled back", "refined"]
    with pytest.raises(UserError, match="already named 'c'"):
        back.rename("c", "c")
