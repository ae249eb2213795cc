"""A classifier learns classes a few at a time, exactly, all or nothing, and knows what it does not know."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from probprompt import ContinualClassifier, UserError, methods
from probprompt.classifier import Prediction, confidence, statistics
from probprompt.data.image_store import ImageStore
from probprompt.heads.closed_form import RidgeHead, RidgeSettings
from probprompt.progress import ProgressCallback
from probprompt.randomness import pixel_key

Pixels = NDArray[np.uint8]
Classes = dict[str, list[Pixels]]
TINY: dict[str, Any] = {"backbone": "test_vit", "weights": "random", "image_size": 32, "device": "cpu", "epochs": 1}
PROBPROMPT: dict[str, Any] = {**TINY, "samples": 2, "components": 3, "method.tokens": 2, "blocks": [0, 2]}
PROBPROMPT["projections"] = 60


def paint(names: str, images: int = 10, seed: int = 0) -> Classes:
    """Pictures of a coarse pattern per class, by the letters that name them; another seed gives other pictures."""
    found = {}
    for name in names:
        pattern = np.random.RandomState(ord(name)).randint(0, 255, (4, 4, 3))
        noise = np.random.RandomState([ord(name), seed]).normal(0, 25, (images, 36, 36, 3))
        found[name] = list((np.kron(pattern, np.ones((9, 9, 1))) + noise).clip(0, 255).astype(np.uint8))
    return found


def flat(images: Classes) -> list[Pixels]:
    return [picture for group in images.values() for picture in group]


def taught(*lessons: Classes, **settings: Any) -> ContinualClassifier:
    """A classifier after these lessons: a small ProbPrompt unless a method is named."""
    made = ContinualClassifier(**{**(TINY if "method" in settings else PROBPROMPT), **settings})
    for lesson in lessons:
        made.learn(lesson)
    return made


@pytest.fixture(scope="module")
def two_tasks() -> ContinualClassifier:
    """Knows a, b, c of one task and d, e of another; not to be changed."""
    return taught(paint("abc"), paint("de"))


def features_of(classifier: ContinualClassifier, images: Classes) -> tuple[torch.Tensor, torch.Tensor]:
    labels = [classifier.classes.index(name) for name, group in images.items() for _ in group]
    return classifier.predictor.look(flat(images)), torch.tensor(labels)


def joint(classifier: ContinualClassifier, images: Classes) -> RidgeHead:
    """One head given all features at once."""
    features, labels = features_of(classifier, images)
    strength = classifier.predictor.state.strength
    assert strength is not None
    head = RidgeHead.create(classifier.settings.head, classifier.predictor.model.backbone.width, 0)
    head.strength.fill_(strength)
    head.learn(features, labels, len(classifier.classes), 0)
    return head


def weight(classifier: ContinualClassifier) -> torch.Tensor:
    return classifier.predictor.model.head.weight


def labels_of(answers: list[Prediction]) -> list[str | None]:
    return [answer.label for answer in answers]


@pytest.mark.parametrize(("layers", "intermediate"), [(0, "unprojected"), (2, "unprojected"), (2, "projected")])
def test_the_head_is_always_the_joint_solution_over_all_images(layers: int, intermediate: str) -> None:
    """Whatever was learned, refined and forgotten before."""
    made = taught(paint("abc"), paint("de"), **{"head.layers": layers, "head.intermediate": intermediate})
    every = paint("abcde")

    def check() -> None:
        assert made.classes == tuple(every)
        assert [known.images for known in made.predictor.state.classes] == [len(group) for group in every.values()]
        torch.testing.assert_close(weight(made), joint(made, every).weight, rtol=1e-4, atol=1e-5)

    check()
    for more, new, refined in (
        ({**paint("b", 7, seed=5), **paint("f", 6)}, ("f",), ("b",)),
        (paint("d", 5, seed=6), (), ("d",)),
    ):
        report = made.learn(more, existing="extend")
        assert (report.classes, report.refined, made.task_count) == (new, refined, 3)
        every.update({name: every.get(name, []) + group for name, group in more.items()})
        check()
    assert made.history()[-1].what == "refined" and made.history()[-1].classes == ("d",)
    for name in "be":
        made.forget(name)
        del every[name]
        assert made.history()[-1].what == "forgot"
        check()
    made.learn(paint("gb"))
    every.update(paint("gb"))
    check()


def test_prompts_adapt_in_the_first_lesson_and_stay_afterwards(two_tasks: ContinualClassifier) -> None:
    fresh = ContinualClassifier(**PROBPROMPT)._engine.build(two_tasks._kept[0].state.__class__()).method.state_dict()
    first, second = (kept.state.method.tensors for kept in two_tasks._kept if kept.state.method)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert any(not torch.equal(fresh[name.removeprefix("method.")], value) for name, value in first.items())


def test_what_was_learned_is_recognized(two_tasks: ContinualClassifier) -> None:
    fresh = paint("abcde", 4, seed=1)
    answers = two_tasks.predict(flat(fresh), top_k=3)
    truth = [name for name, group in fresh.items() for _ in group]
    assert np.mean([answer.label == name for answer, name in zip(answers, truth, strict=True)]) >= 0.9
    for answer in answers:
        chances = [chance for _, chance in answer.top]
        assert len(answer.top) == 3 and chances == sorted(chances, reverse=True) and sum(chances) <= 1 + 1e-9
        assert answer.top[0] == (answer.label, answer.probability) and answer.error is None
    whole = two_tasks.predict(fresh["a"][0], top_k=99)[0].top
    assert {name for name, _ in whole} == set("abcde") and sum(chance for _, chance in whole) == pytest.approx(1)


def test_the_report_says_what_was_learned(two_tasks: ContinualClassifier) -> None:
    made = taught(paint("abc"))
    report = made.learn(paint("de"), note="second")
    assert (report.version, report.classes, report.images, report.refined) == (2, ("d", "e"), 20, ())
    assert report.seconds > 0 and 0 < report.temperature < 10 and report.warnings == ()
    assert report.calibration_error is None  # of 10 held-out images nothing can be said
    more = made.learn(paint("fg", 30))
    assert more.calibration_error is not None and 0 <= more.calibration_error <= 1
    made.rollback(2)
    assert [version.note for version in made.history()] == ["task 1", "second", "task 3", "to version 2"]
    assert weight(made).equal(weight(two_tasks)), "the same lessons and seed make the same classifier"


CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in methods.registered() if name != "joint"},
    "linear head": {"method": "probprompt", "preset": "matched"},
    "lda head": {"method": "probprompt", "head.kind": "lda"},
    "nearest mean": {"method": "l2p", "head.kind": "nearest-mean"},
    "two tasks adapt": {"method": "probprompt", "adapt_tasks": 2},
    "plain ridge": {"method": "ranpac", "projections": 0},
    "blocks before the last": {"method": "probprompt", "head.layers": 2},
    "these alone": {"method": "ranpac", "projections": 0, "head.layers": 1},
    "mirror images": {"method": "probprompt", "head.flip_augment": True},
}


@pytest.mark.parametrize("case", CASES)
def test_any_method_and_head_learns_and_is_loaded_as_it_was(case: str, tmp_path: Path) -> None:
    made = ContinualClassifier(**{**TINY, **CASES[case]}, config={"alignment": {"epochs": 1}})
    for names in ("abc", "de"):
        made.learn(paint(names, 6))
    made.save(tmp_path / "model")
    loaded = ContinualClassifier.load(tmp_path / "model", device="cpu")
    pictures = paint("a", 2)["a"]
    for one, other in zip(made.predict(pictures, top_k=5), loaded.predict(pictures, top_k=5), strict=True):
        assert (one.label, one.unknown) == (other.label, other.unknown)
        assert [chance for _, chance in one.top] == pytest.approx([chance for _, chance in other.top], rel=1e-4)
    loaded.learn(paint("f" if made._engine.closed_form else "fg", 6))
    assert loaded.classes[:6] == tuple("abcdef")


def test_a_lesson_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = taught(paint("abc"))
    before, kept = made.predict(paint("a", 3)["a"], top_k=3), made.history()
    tensors = {name: value.clone() for name, value in made.predictor.model.state_dict().items()}

    class Breaking(list[Pixels]):
        def __iter__(self) -> Iterator[Pixels]:
            yield from paint("d", 4)["d"]
            raise RuntimeError("the camera is gone")

    with pytest.raises(RuntimeError, match="camera"):
        made.learn({"d": Breaking()})
    monkeypatch.setattr("probprompt.classifier.lesson.calibrate", lambda *_: 1 / 0)  # the very last step
    with pytest.raises(ZeroDivisionError):
        made.learn(paint("de"))
    assert made.history() == kept and made.classes == tuple("abc")
    assert all(torch.equal(value, tensors[name]) for name, value in made.predictor.model.state_dict().items())
    assert made.predict(paint("a", 3)["a"], top_k=3) == before
    monkeypatch.undo()
    assert made.learn(paint("de")).version == 2


def test_predictions_use_the_old_version_while_another_is_learned() -> None:
    made = taught(paint("abc"))
    picture, versions, answers = paint("b", 1, seed=3)["b"], list[int](), list[list[Prediction]]()
    expected = made.predict(picture, top_k=9)

    class Asking(ProgressCallback):
        stages: ClassVar[dict[str, list[int]]] = {}  # steps announced and made

        def stage(self, description: str, total: int) -> Any:
            self.stages[description] = [total, 0]
            return super().stage(description, total)

        def advance(self, steps: int) -> None:
            list(self.stages.values())[-1][1] += steps
            asked = threading.Thread(target=lambda: answers.append(made.predict(picture, top_k=9)))
            asked.start()
            asked.join(30)
            versions.append(made.version)

    made.learn(paint("de", 3), progress=Asking())
    assert set(versions) == {1} and len(answers) == len(versions) > 6
    assert all(answer == expected for answer in answers)
    assert len(made.predict(picture, top_k=9)[0].top) == 5
    assert Asking.stages["reading images"] == [6, 6]
    assert Asking.stages["learning"][0] == Asking.stages["learning"][1] > 0


def test_learn_rejects_existing_classes_by_default(two_tasks: ContinualClassifier) -> None:
    with pytest.raises(UserError, match=r": b\..*--existing extend"):
        two_tasks.learn(paint("bx"))
    with pytest.raises(UserError, match=r"'B'.*'b'"):
        two_tasks.learn({"B": paint("b")["b"]}, existing="extend")
    with pytest.raises(UserError, match=r"'merge'.*'error' or 'extend'"):
        two_tasks.learn(paint("b"), existing="merge")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"'known'.*existing='extend'"):
        two_tasks.learn(paint("b"), known="refine")  # type: ignore[call-arg]


@pytest.mark.parametrize("projections", [0, 60], ids=["kept one by one", "kept as sums"])
def test_mirror_images_follow_their_images(projections: int) -> None:
    made = taught(paint("abc"), paint("de", 6), **{"head.flip_augment": True, "projections": projections})
    made.learn(paint("b", 7, seed=5), existing="extend")
    made.forget("c")
    every = {**paint("ab"), **paint("de", 6)}
    every["b"] = every["b"] + paint("b", 7, seed=5)["b"]
    pictures = ImageStore.of(flat(every), torch.device("cpu"))
    views = made.predictor.viewer.evaluation(pictures, torch.arange(len(pictures)))
    labels = torch.tensor([made.classes.index(name) for name, group in every.items() for _ in group])
    head = joint(made, every)  # of the images alone
    assert not torch.allclose(weight(made), head.weight, rtol=1e-2)
    head.learn(made.predictor.model.look(views.flip(-1)), labels, 0, 1)
    torch.testing.assert_close(weight(made), head.weight, rtol=1e-3, atol=1e-5)
    state = made.predictor.state
    assert [known.images for known in state.classes] == [len(every[name]) for name in made.classes]
    held = sum(len(known.held.tensors["rows"]) for known in state.classes)
    assert ("rows" in state.classes[0].rest.tensors) == (projections == 0)
    assert state.calibration.images == held < len(pictures) / 4


def test_nothing_of_a_forgotten_class_of_a_later_lesson_is_left() -> None:
    made, never = taught(paint("abc"), paint("de")), taught(paint("abc"), paint("d"))
    made.forget("e")
    torch.testing.assert_close(weight(made), weight(never), rtol=1e-5, atol=1e-6)
    first, second = (one.predictor.state for one in (made, never))
    assert first.calibration.temperature == pytest.approx(second.calibration.temperature, rel=1e-4)
    assert first.scale.limit == pytest.approx(second.scale.limit, rel=1e-4)
    assert first.calibration.images == second.calibration.images
    assert made.learn(paint("e")).classes == ("e",), "it can be learned again"


@pytest.mark.parametrize("kind", ["lda", "nearest-mean"])
def test_every_head_in_closed_form_forgets(kind: str) -> None:
    made, never = (taught(paint(names), method="nearest-mean", **{"head.kind": kind}) for names in ("abc", "ab"))
    made.forget("c")
    torch.testing.assert_close(weight(made), weight(never), rtol=1e-4, atol=1e-5)


def test_large_classes_are_kept_as_sums() -> None:
    made = taught(paint("abc", 180), method="ranpac", projections=0)
    kept = made.predictor.state.classes[0].rest.tensors
    assert "rows" not in kept and int(kept["count"]) == 160
    more = paint("a", 20, seed=3)
    made.learn(more, existing="extend")
    made.forget("b")
    every = paint("ac", 180)
    every["a"] = every["a"] + more["a"]
    torch.testing.assert_close(weight(made), joint(made, every).weight, rtol=1e-3, atol=1e-5)


def test_what_cannot_be_forgotten_or_refined_exactly_is_refused(two_tasks: ContinualClassifier) -> None:
    linear, adapting = taught(paint("ab", 4), method="linear-probe"), taught(paint("ab", 4), adapt_tasks=2)
    for made, name, message in (
        (linear, "a", "the head 'linear' was trained"),
        (adapting, "a", "'a' yet.*adapt_tasks"),
        (two_tasks, "aa", "'a'"),
        (taught(paint("a", 4), method="ranpac"), "a", "the only class"),
    ):
        with pytest.raises(UserError, match=message):
            made.forget(name)
    for made, message in ((linear, "closed-form head"), (adapting, "still trained in task 2")):
        with pytest.raises(UserError, match=message):
            made.learn(paint("a", 4), existing="extend")


def test_renaming_changes_names_alone() -> None:
    made, pictures = taught(paint("abc")), paint("b", 3)["b"]
    before = made.predict(pictures)
    made.rename("b", "  Cafe\u0301 ")
    after = made.predict(pictures)
    assert made.classes == ("a", "Caf\u00e9", "c") and made.history()[-1].note == "was b"
    assert [answer.probability for answer in after] == [answer.probability for answer in before]
    assert labels_of(after) == ["Caf\u00e9" if answer.label == "b" else answer.label for answer in before]
    for name, message in (("C", "'C': class 'c'"), (" ", "visible"), ("\u200d", "visible")):
        with pytest.raises(UserError, match=message):
            made.rename("a", name)
    made.rename("a", "A")  # its own name in another case is nobody else's
    assert made.classes == ("A", "Caf\u00e9", "c")


def test_going_back_makes_a_new_version_and_loses_none() -> None:
    made, once = taught(paint("abc"), paint("de")), taught(paint("abc"))
    made.rollback(1)
    assert (made.version, made.classes) == (3, tuple("abc"))
    history = [(one.number, one.what, one.known) for one in made.history()]
    assert history == [(1, "learned", 3), (2, "learned", 5), (3, "rolled back", 3)]
    assert torch.equal(weight(made), weight(once))
    for one in (made, once):
        one.learn(paint("fg"))
    torch.testing.assert_close(weight(made), weight(once), rtol=1e-5, atol=1e-6)
    made.rollback(2)
    assert made.classes == tuple("abcde")
    with pytest.raises(UserError, match=r"Version 9 .*1, 2, 3, 4, 5"):
        made.rollback(9)
    made.keep_versions = 2
    made.rename("a", "x")
    assert [one.number for one in made.history()] == [5, 6]
    with pytest.raises(UserError, match="versions: 5, 6"):
        made.rollback(1)
    with pytest.raises(UserError, match="at least 1"):
        ContinualClassifier(**TINY, keep_versions=0)


def test_anything_that_shows_a_picture_is_predicted_alike(two_tasks: ContinualClassifier, tmp_path: Path) -> None:
    pixels = paint("d", 1, seed=2)["d"][0]
    path = tmp_path / "sub" / "d.png"
    path.parent.mkdir()
    Image.fromarray(pixels).save(path)
    expected = two_tasks.predict([pixels])[0]
    assert expected.source == "0"
    files = [path, str(path), tmp_path, [path], [Image.open(path)]]
    arrays = [pixels, pixels[None], torch.from_numpy(pixels).permute(2, 0, 1), pixels / np.float32(255), iter([pixels])]
    for given in (*files, Image.fromarray(pixels), *arrays):
        (answer,) = two_tasks.predict(given)
        assert answer.label == expected.label and answer.probability == pytest.approx(expected.probability, rel=1e-6)
    assert two_tasks.predict(path)[0].source == str(path) == two_tasks.predict([Image.open(path)])[0].source


def test_an_answer_depends_on_its_own_image_alone(two_tasks: ContinualClassifier) -> None:
    every = flat(paint("abcdex", 3, seed=4))
    alone = [two_tasks.predict(picture)[0] for picture in every]
    for batch in (1, 7, 100):
        together = list(two_tasks.predict_each(every, batch_size=batch))
        assert labels_of(together) == labels_of(alone)
        assert [one.probability for one in together] == pytest.approx([one.probability for one in alone], rel=1e-4)
        assert [one.novelty for one in together] == pytest.approx([one.novelty for one in alone], rel=1e-3, abs=1e-3)


def test_an_unreadable_file_is_an_answer_with_its_error(two_tasks: ContinualClassifier, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.fromarray(paint("a", 1)["a"][0]).save(good)
    bad.write_text("no picture")
    answers = two_tasks.predict([good, bad, tmp_path / "missing.png", np.zeros((2, 2, 7), np.uint8), good])
    assert [answer.error is None for answer in answers] == [True, False, False, False, True]
    assert answers[1].label is None and answers[1].top == () and answers[1].error == "not a supported image format"
    assert "No such file" in str(answers[2].error) and "(2, 2, 7)" in str(answers[3].error)
    assert two_tasks.predict([bad])[0].error and two_tasks.predict([]) == []


def test_images_are_taken_as_they_are_asked_for(two_tasks: ContinualClassifier) -> None:
    taken, picture = itertools.count(), paint("a", 1)["a"][0]
    stream = two_tasks.predict_each((picture for _ in taken), batch_size=4)
    assert [next(stream).label for _ in range(6)] == ["a"] * 6
    assert next(taken) < 60, "a stream of any length is gone through in constant memory"
    stream.close()  # type: ignore[attr-defined]


def test_what_is_no_image_is_refused(two_tasks: ContinualClassifier) -> None:
    refused: list[tuple[object, str]] = [(3, "a path, a PIL image or"), ([3], "got int"), ([None], "got NoneType")]
    for given, message in refused:
        with pytest.raises(UserError, match=message):
            two_tasks.predict(given)
    with pytest.raises(UserError, match="top_k 0"):
        two_tasks.predict(paint("a", 1)["a"], top_k=0)


def test_probabilities_are_calibrated_on_held_out_images(two_tasks: ContinualClassifier) -> None:
    from probprompt.classifier.confidence import UNFITTED, fit_temperature

    state, head = two_tasks.predictor.state, two_tasks.predictor.model.head
    held = [known.held.tensors["rows"] for known in state.classes]
    rest = [known.rest.tensors["rows"] for known in state.classes]
    assert [len(rows) for rows in held] == [2] * 5 and [len(rows) for rows in rest] == [8] * 5
    labels = torch.arange(5).repeat_interleave(8)
    without = RidgeHead(head.width, 0, 60, state.strength)
    without.learn(torch.cat(rest), labels, 5, 0)
    expected = fit_temperature(without(torch.cat(held)), torch.arange(5).repeat_interleave(2), UNFITTED)
    assert state.calibration.temperature == pytest.approx(expected, rel=1e-3)
    assert not torch.allclose(without.weight, head.weight, rtol=1e-2), "the final head has learned them"


def test_pictures_of_no_known_class_are_marked() -> None:
    made = taught(paint("abc", 40), paint("de", 40))
    known, strange = paint("abcde", 20, seed=9), flat(paint("qrst"))
    found, flagged = made.evaluate(known, unknown=strange), [answer.unknown for answer in made.predict(flat(known))]
    assert np.mean(flagged) < 0.15
    assert np.mean([answer.unknown for answer in made.predict(strange)]) > 0.5
    assert found.auroc is not None and found.auroc > 0.9 and found.unknown_images == 40
    assert found.fpr_at_95 is not None and found.fpr_at_95 < 0.5
    assert found.flagged == pytest.approx(100 * np.mean(flagged))


def test_old_classes_that_look_like_new_ones_are_told() -> None:
    made = taught(paint("abc", 20))
    twin = made.learn({"twin of b": paint("b", 20, seed=7)["b"], "z": paint("z", 20)["z"]}).confusion_risks
    assert twin and (twin[0].old, twin[0].new) == ("b", "twin of b") and 0.2 < twin[0].share <= 1
    assert [risk.share for risk in twin] == sorted((risk.share for risk in twin), reverse=True)
    made.rollback(1)
    assert all(risk.share < twin[0].share / 2 for risk in made.learn(paint("yz", 20)).confusion_risks)


def test_evaluation_counts_what_predictions_say(two_tasks: ContinualClassifier) -> None:
    given = {**paint("abc", 4, seed=3), "d": paint("e", 4, seed=3)["e"]}
    found = two_tasks.evaluate(given)
    truth = [name for name, group in given.items() for _ in group]
    said = labels_of(two_tasks.predict(flat(given)))
    right = np.array([one == other for one, other in zip(said, truth, strict=True)])
    assert found.accuracy == pytest.approx(100 * right.mean()) and found.images == 16
    assert found.per_class["d"] == pytest.approx(100 * right[12:].mean()) and set(found.per_class) == set("abcd")
    assert sum(map(sum, found.confusion)) == 16 and found.confusion[3][4] == said[12:].count("e")
    assert [(task.name, task.images) for task in found.per_task] == [("task 1", 12), ("task 2", 4)]
    assert found.auroc is None and found.unreadable == ()
    assert found.forgetting == found.per_task[0].forgotten is not None
    earlier = two_tasks.evaluate(paint("abc"))  # newer classes need not be tested
    assert len(earlier.per_task) == 1 and earlier.forgetting == earlier.per_task[0].forgotten is not None
    assert two_tasks.evaluate(paint("de")).forgetting is None
    with pytest.raises(UserError, match=r"p, q\..*--unknown"):
        two_tasks.evaluate(paint("apq", 2))
    with pytest.raises(UserError, match="None of the images can be read"):
        two_tasks.evaluate({"a": ["missing.png"]})


def test_forgetting_is_measured_since_a_task_was_learned() -> None:
    made = taught(paint("abc", 6))
    test = paint("abc", 8, seed=8)
    then = made.evaluate(test)
    made.learn({"x": paint("a", 20, seed=1)["a"], "y": paint("y", 6)["y"]})  # takes a's place
    now = made.evaluate({**test, **paint("y", 3, seed=8)})
    first, second = now.per_task
    assert first.when_learned == pytest.approx(then.accuracy)
    assert first.accuracy < then.accuracy and now.forgetting == pytest.approx(then.accuracy - first.accuracy)
    assert second.forgotten == 0
    made.rename("b", "beta")
    renamed = made.evaluate({"a": test["a"], "beta": test["b"], "c": test["c"]})
    assert renamed.per_task[0].when_learned == pytest.approx(then.accuracy), "whatever classes are called now"
    made.keep_versions = 1
    made.rename("beta", "b")
    assert made.evaluate(test).forgetting is None, "the version that would know is gone"


def write(folder: Path, images: Classes) -> Path:
    folder.mkdir()
    for name, group in images.items():
        (folder / name).mkdir()
        for index, picture in enumerate(group):
            Image.fromarray(picture).save(folder / name / f"{index}.png")
    return folder


def test_folders_mappings_and_datasets_teach_the_same(tmp_path: Path) -> None:
    images = paint("abc", 5)
    folder = write(tmp_path / "photos", images)
    files = {name: sorted((folder / name).iterdir()) for name in images}

    class Dataset:
        classes: ClassVar = ["a", "unused", "b", "c"]
        items: ClassVar = [(image, label) for label, name in ((0, "a"), (2, "b"), (3, "c")) for image in images[name]]

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return Image.fromarray(self.items[index][0]), self.items[index][1]

    expected = weight(taught(images))
    subset = torch.utils.data.Subset(Dataset(), range(15))  # type: ignore[arg-type, var-annotated]
    for given in (folder, str(folder), files, {name: folder / name for name in images}, Dataset(), subset):
        made = ContinualClassifier(**PROBPROMPT)
        made.learn(given)
        assert made.classes == ("a", "b", "c")
        torch.testing.assert_close(weight(made), expected, rtol=1e-5, atol=1e-6)


def test_images_of_any_mode_are_learned() -> None:
    modes = [Image.fromarray(picture) for picture in paint("a", 6)["a"]]
    modes = [image.convert(mode) for image, mode in zip(modes, ("RGB", "L", "RGBA", "P", "CMYK", "1"), strict=True)]
    made = ContinualClassifier(**PROBPROMPT)
    assert made.learn({"mixed": modes, "b": paint("b", 6)["b"]}).warnings == ()
    assert made.predict(modes[2])[0].error is None


def test_unreadable_files_are_named_and_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "photos", paint("ab", 5))
    (folder / "a" / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    report = ContinualClassifier(**PROBPROMPT).learn(folder)
    assert report.images == 10 and len(report.warnings) == 1 and "a/broken.jpg" in report.warnings[0]
    (folder / "c").mkdir()
    (folder / "c" / "broken.png").write_text("nothing")
    with pytest.raises(UserError, match=r"(?s)class\(es\) c\..*c/broken.png"):
        ContinualClassifier(**PROBPROMPT).learn(folder)


def test_rounding_is_not_taken_for_variance() -> None:
    """Whether one image of each class leaves 0 or 1e-19 depends on the processor."""
    noise = 1e-19 * torch.tensor([[1.0, 2.0], [2.0, 3.0]], dtype=torch.float64)  # with a negative eigenvalue
    assert torch.allclose(confidence._whitening(noise, 0.3), torch.eye(2, dtype=torch.float64))


def test_sums_that_are_kept_are_those_that_are_solved() -> None:
    """A product of a matrix with itself is symmetric to the last bit on some processors alone."""
    views: statistics.Views = {"unit": lambda rows: rows}
    made = statistics.Statistics.zero(2, {"unit": 3}, torch.device("cpu"))
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for label in (0, 1):
        made.add_rows(label, rows[4 * label : 4 * label + 4], views)
    moments = made.of["unit"]
    moments.moment.add_(1e-9 * torch.ones(3, 3).triu(1))  # the half that no solve reads
    (again,) = statistics.Statistics.from_tensors(made.tensors(), {"unit": 3}, torch.device("cpu")).of.values()
    assert torch.equal(again.within, moments.within)
    assert torch.equal(again.total[1].tril(), moments.total[1].tril())
    head = RidgeHead(3, 0, projections=0, ridge=1.0).grow(2)
    assert torch.equal(*[head.solve_sums(part.counts, part.totals, part.moment).weight for part in (moments, again)])


def test_a_single_image_per_class_is_enough_but_told() -> None:
    made = ContinualClassifier(**PROBPROMPT)
    report = made.learn(paint("abc", 1))
    assert report.calibration_error is None and "a (1), b (1)" in report.warnings[0]
    answer = made.predict(paint("b", 1)["b"])[0]
    assert (answer.label, answer.unknown) == ("b", False)
    assert made.learn(paint("de", 60)).calibration_error is not None


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: folder / "nowhere", "does not exist"),
    "empty": (lambda folder: write(folder, {}), "contains no class folder"),
    "loose": (lambda folder: write(folder, paint("a", 1)) / "a", r"Move its 1 image\(s\)"),
    "hollow": (lambda folder: write(folder, {**paint("ab", 1), "c": []}), "c contains no image"),
    "one class": (lambda folder: paint("a"), "only one class"),
    "case": (lambda folder: {"Cat": paint("a")["a"], "cat": paint("b")["b"]}, "'cat' twice .as 'Cat'"),
    "accents": (lambda folder: {"\u00e9": [], "e\u0301": []}, "Merge them"),
    "nothing": (lambda folder: {}, "at least one class"),
    "no images": (lambda folder: {"a": []}, "'a' has no image"),
    "numbers": (lambda folder: {1: []}, "must be a string, got 1"),
    "line break": (lambda folder: {"a\nb": []}, "visible characters on one line"),
    "deceiving": (lambda folder: {"a\u202eb": paint("a")["a"], **paint("b")}, "visible"),
    "joiner": (lambda folder: {"\u200d": paint("a")["a"], **paint("b")}, "visible"),
    "list": (lambda folder: ["a.png"], "a folder of class folders"),
    "no classes": (lambda folder: torch.utils.data.TensorDataset(torch.zeros(2)), "attribute 'classes'"),
    "junk": (lambda folder: {"a": [1], "b": [2]}, r"got int \(1\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_learned_is_refused_in_words(case: str, tmp_path: Path) -> None:
    spoil, message = BAD[case]
    made = ContinualClassifier(**PROBPROMPT)
    with pytest.raises(UserError, match=message):
        made.learn(spoil(tmp_path / "photos"))
    assert made.version == 0


def test_the_default_is_the_flagship_on_a_small_real_vit() -> None:
    made = ContinualClassifier(device="cpu")
    settings = made.settings
    assert (settings.preset, settings.method.name) == ("flagship", "probprompt")
    assert isinstance(settings.head, RidgeSettings) and settings.head.projections == 2000 and settings.head.with_query
    assert settings.backbone.name == "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert repr(made) == "<ContinualClassifier version 0: 0 classes, probprompt>"


def test_few_epochs_for_many_images_unless_they_are_set() -> None:
    engine = ContinualClassifier(device="cpu", backbone="demo")._engine
    assert engine._config_for(100).training.epochs == 12
    assert [engine._config_for(images).training.epochs for images in (210, 800, 10**6)] == [12, 3, 1]
    assert ContinualClassifier(device="cpu", epochs=7)._engine._config_for(10**6).training.epochs == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "probpromt"}, "[Dd]id you mean 'probprompt'"),
        ({"preset": "best"}, "'best'"),
        ({"method": "l2p", "preset": "flagship"}, "'flagship'"),
        ({"method": "joint"}, "'joint'"),
        ({"tasks": 5}, "data.tasks"),
        ({"compensate_drift": True}, "head.compensate_drift"),
        ({"sample": 5}, "'method.samples'"),
        ({"device": "tpu"}, "[Dd]evice 'tpu'"),
    ],
)
def test_wrong_settings_are_refused_immediately(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ContinualClassifier(**{"device": "cpu", **settings})


def test_before_anything_is_learned_there_is_nothing_to_ask(tmp_path: Path) -> None:
    made, pictures = taught(), paint("a", 1)
    assert (made.classes, made.version, made.history(), made.accuracy_matrix().tasks) == ((), 0, [], ())
    assert made.prompt_diversity() is None
    asks: list[Callable[[], object]] = [
        lambda: made.predict(pictures["a"]),
        lambda: made.evaluate(pictures),
        lambda: next(made.predict_each([])),
        lambda: made.forget("a"),
        lambda: made.rename("a", "b"),
        lambda: made.save(tmp_path / "model"),
    ]
    for ask in asks:
        with pytest.raises(UserError, match=r"learn\(\)"):
            ask()


def test_a_class_may_be_called_what_people_call_things(tmp_path: Path) -> None:
    names = {"👩\u200d🔬": "a", "می\u200cخواهم": "b", "a/b/../c": "c", "x" * 500: "d"}
    taught({name: paint(letter)[letter] for name, letter in names.items()}).save(tmp_path / "model")
    loaded = ContinualClassifier.load(tmp_path / "model", device="cpu")
    assert loaded.classes == tuple(names)
    for name, letter in names.items():
        assert labels_of(loaded.predict(paint(letter, 2, seed=3)[letter])) == [name, name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_the_matrix_follows_the_path_to_the_current_version(tmp_path: Path) -> None:
    made = taught(paint("abc"), paint("de"))
    before = made.accuracy_matrix()
    assert (before.tasks, before.versions) == (("task 1", "task 2"), (1, 2))
    assert before.values[1][0] is None  # version 1 does not know task 2
    known = [value for row in before.values for value in row if value is not None]
    assert len(known) == 3 and all(0 <= value <= 100 for value in known)
    made.learn(paint("f", 6), note="last")
    extended = made.accuracy_matrix()
    assert extended.tasks[-1] == "last" and extended.versions == (1, 2, 3)
    assert tuple(row[:2] for row in extended.values[:2]) == before.values
    made.rollback(2)
    assert made.accuracy_matrix() == before  # without the lesson that was undone
    made.rename("a", "alpha")
    assert made.accuracy_matrix() == before
    made.save(tmp_path / "model")
    assert ContinualClassifier.load(tmp_path / "model").accuracy_matrix() == before


def test_kept_images_keep_their_keys_where_prompts_depend_on_them(tmp_path: Path) -> None:
    made = taught(paint("ab", 10), evaluation="image")
    made.learn(paint("b", 5, seed=4) | paint("c", 2), existing="extend")
    images = {"a": paint("a", 10)["a"], "b": paint("b", 10)["b"] + paint("b", 5, seed=4)["b"], "c": paint("c", 2)["c"]}
    for known in made._state.classes:
        kept = [part.tensors["keys"].tolist() for part in (known.held, known.rest)]
        keys = {pixel_key(image, *image.shape[:2]) for image in images[known.name]}
        assert set(kept[0]) | set(kept[1]) == keys and len(kept[0]) == len(known.held.tensors["rows"])
    assert made.prompt_diversity() is not None
    made.save(tmp_path / "model")
    pictures = flat(paint("abc", 3, seed=9))
    again = ContinualClassifier.load(tmp_path / "model", device="cpu")
    assert labels_of(again.predict(pictures)) == labels_of(made.predict(pictures))
    one = [round(answer.probability, 4) for picture in pictures for answer in again.predict([picture])]
    assert one == pytest.approx([answer.probability for answer in made.predict(pictures)], abs=2e-3)


def test_prompt_diversity_compares_one_image_of_each_class(two_tasks: ContinualClassifier) -> None:
    found = two_tasks.prompt_diversity()
    assert found is not None and found["labels"] == list("abcde")
    matrix = np.array(found["matrix"])
    assert matrix.shape == (5, 5) and np.allclose(matrix.diagonal(), 1, atol=1e-3) and np.allclose(matrix, matrix.T)
    assert found["mean"] == pytest.approx((matrix.sum() - 5) / 20, abs=1e-3) and found["mean"] != found["initial_mean"]
    plain = taught(paint("ab", 3), method="ranpac", projections=60)
    assert two_tasks.settings.method.model_dump()["evaluation"] == "mean"
    drawn = ContinualClassifier(backbone="demo", device="cpu", evaluation_draws=2)
    assert drawn.settings.method.model_dump()["evaluation"] == "sample", "several draws of one mean would be the same"
    white, raw = (taught(paint("ab", 6), query=query).prompt_diversity() for query in ("whitened", "raw"))
    assert white and raw and abs(white["initial_mean"] - raw["initial_mean"]) > 0.01
    assert plain.prompt_diversity() is None and plain.accuracy_matrix().versions == (1,)
