"""A classifier learns classes a few at a time, exactly, all or nothing, and knows what it does not know."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import probprompt
from probprompt import ContinualClassifier, UserError, methods
from probprompt.classifier import Prediction, novelty, sums
from probprompt.data.image_store import ImageStore
from probprompt.heads import HEADS, ClosedFormHead, RidgeHead
from probprompt.runs.progress import Watcher

Pixels = NDArray[np.uint8]
Classes = dict[str, list[Pixels]]
TINY: dict[str, Any] = {"backbone": "test_vit", "weights": "random", "image_size": 32, "device": "cpu", "epochs": 1}
PROBPROMPT: dict[str, Any] = {
    **TINY,
    "samples": 2,
    "components": 3,
    "method.tokens": 2,
    "blocks": [0, 2],
    "projections": 60,
}


def paint(names: str, images: int = 10, seed: int = 0) -> Classes:
    """Pictures of a coarse pattern per class, by the letters that name them; another seed gives other pictures."""
    found = {}
    for name in names:
        pattern = np.random.RandomState(ord(name)).randint(0, 255, (4, 4, 3))
        noise = np.random.RandomState([ord(name), seed]).normal(0, 25, (images, 36, 36, 3))
        wide = np.kron(pattern, np.ones((9, 9, 1)))
        found[name] = list((wide + noise).clip(0, 255).astype(np.uint8))
    return found


def taught(*lessons: Classes, **settings: Any) -> ContinualClassifier:
    made = ContinualClassifier(**{**PROBPROMPT, **settings})
    for lesson in lessons:
        made.learn(lesson)
    return made


@pytest.fixture(scope="module")
def two_tasks() -> ContinualClassifier:
    """Knows a, b, c of one task and d, e of another; not to be changed."""
    return taught(paint("abc"), paint("de"))


def features_of(classifier: ContinualClassifier, images: Classes) -> tuple[torch.Tensor, torch.Tensor]:
    every = [picture for group in images.values() for picture in group]
    labels = [classifier.classes.index(name) for name, group in images.items() for _ in group]
    return classifier.predictor.look(every), torch.tensor(labels)


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


# Learning


@pytest.mark.parametrize(("layers", "readings"), [(0, "beside"), (2, "beside"), (2, "projected")])
def test_after_any_lessons_the_head_is_the_joint_solution_over_all_images_ever_learned(
    layers: int, readings: str
) -> None:
    made = taught(paint("abc"), paint("de"), paint("f"), **{"head.layers": layers, "head.readings": readings})
    assert made.classes == tuple("abcdef") and (made.version, made.task_count) == (3, 3)
    every = {**paint("abc"), **paint("de"), **paint("f")}
    torch.testing.assert_close(weight(made), joint(made, every).weight, rtol=1e-4, atol=1e-5)


def test_prompts_adapt_in_the_first_lesson_and_stay_afterwards(two_tasks: ContinualClassifier) -> None:
    fresh = ContinualClassifier(**PROBPROMPT)._engine.build(two_tasks._kept[0].state.__class__()).method.state_dict()
    first, second = (kept.state.method.tensors for kept in two_tasks._kept if kept.state.method)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert any(not torch.equal(fresh[name.removeprefix("method.")], value) for name, value in first.items())


def test_what_was_learned_is_recognised_and_told_with_probabilities(two_tasks: ContinualClassifier) -> None:
    fresh = paint("abcde", 4, seed=1)
    answers = two_tasks.predict([picture for group in fresh.values() for picture in group], top_k=3)
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
    report = made.learn(paint("de"), name="second")
    assert (report.version, report.classes, report.images, report.refined) == (2, ("d", "e"), 20, ())
    assert report.seconds > 0 and 0 < report.temperature < 10 and report.warnings == ()
    assert report.calibration_error is None  # of 10 held-out images nothing can be said
    more = made.learn(paint("fg", 30))
    assert more.calibration_error is not None and 0 <= more.calibration_error <= 1
    made.rollback(2)
    assert [version.note for version in made.history()] == ["task 1", "second", "task 3", "to version 2"]
    assert weight(made).equal(weight(two_tasks)), "the same lessons and seed make the same classifier"


def test_every_stage_is_told() -> None:
    class Listener(Watcher):
        steps: dict[str, list[int]]

        def stage(self, description: str, total: int) -> Any:
            self.steps = {**getattr(self, "steps", {}), description: [total, 0]}
            return super().stage(description, total)

        def advance(self, steps: int) -> None:
            list(self.steps.values())[-1][1] += steps

    listener = Listener()
    ContinualClassifier(**PROBPROMPT).learn(paint("ab"), watcher=listener)
    assert listener.steps["reading images"] == [20, 20]
    assert listener.steps["learning"][0] == listener.steps["learning"][1] > 1


CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in methods.registered() if name != "joint"},
    "linear head": {"method": "probprompt", "preset": "matched"},
    "lda head": {"method": "probprompt", "head.kind": "lda"},
    "nearest mean": {"method": "l2p", "head.kind": "nearest-mean"},
    "two tasks adapt": {"method": "probprompt", "adapt_tasks": 2},
    "plain ridge": {"method": "ranpac", "projections": 0},
    "blocks before the last": {"method": "probprompt", "head.layers": 2},
    "these alone": {"method": "ranpac", "projections": 0, "head.layers": 1},
    "mirror images": {"method": "probprompt", "head.with_mirrors": True},
}


@pytest.mark.parametrize("case", CASES)
def test_any_method_and_head_learns_twice_and_is_loaded_as_it_was(case: str, tmp_path: Path) -> None:
    made = ContinualClassifier(
        **{**TINY, **CASES[case]}, config={"alignment": {"epochs": 1}, "head": {"projections": 60}}
    )
    made.learn(paint("abc", 6))
    made.learn(paint("de", 6))
    answers = made.predict(paint("ae", 2)["a"], top_k=5)
    made.save(tmp_path / "model")
    loaded = ContinualClassifier.load(tmp_path / "model", device="cpu")
    again = loaded.predict(paint("ae", 2)["a"], top_k=5)
    for one, other in zip(answers, again, strict=True):
        assert (one.label, one.unknown) == (other.label, other.unknown)
        assert [chance for _, chance in one.top] == pytest.approx([chance for _, chance in other.top], rel=1e-4)
    loaded.learn(paint("f", 6) if made._engine.closed_form else paint("fg", 6))
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
    monkeypatch.setattr("probprompt.classifier.teaching.calibrate", lambda *_: 1 / 0)  # the very last step
    with pytest.raises(ZeroDivisionError):
        made.learn(paint("de"))
    assert made.history() == kept and made.classes == tuple("abc")
    assert all(torch.equal(value, tensors[name]) for name, value in made.predictor.model.state_dict().items())
    assert made.predict(paint("a", 3)["a"], top_k=3) == before
    monkeypatch.undo()
    assert made.learn(paint("de")).version == 2


def test_a_later_lesson_of_a_hundred_images_takes_seconds() -> None:
    made = ContinualClassifier(backbone="demo", device="cpu", epochs=1)
    made.learn(paint("abc", 6))
    report = made.learn(paint("defgh", 20))
    assert report.images == 100 and report.seconds < 20
    found = made.evaluate(paint("defgh", 4, seed=1))
    assert found.accuracy > 80 and len(made.classes) == 8


def test_predictions_go_on_from_the_old_version_while_another_is_learned() -> None:
    made = taught(paint("abc"))
    picture, versions = paint("b", 1, seed=3)["b"], list[int]()
    expected = made.predict(picture, top_k=9)

    class Asking(Watcher):
        def advance(self, steps: int) -> None:
            asked = threading.Thread(target=lambda: answers.append(made.predict(picture, top_k=9)))
            asked.start()
            asked.join(30)
            versions.append(made.version)

    answers: list[list[Prediction]] = []
    made.learn(paint("de", 3), watcher=Asking())
    assert set(versions) == {1} and len(answers) == len(versions) > 6
    assert all(answer == expected for answer in answers)
    assert len(made.predict(picture, top_k=9)[0].top) == 5


# More images of a known class


def test_a_known_class_is_refused_by_name_with_the_choice(two_tasks: ContinualClassifier) -> None:
    with pytest.raises(UserError, match=r"1 class\(es\) are known already: b\. Say known='refine'.*other names"):
        two_tasks.learn(paint("bx"))
    with pytest.raises(UserError, match=r"'B' is the known class 'b' but for its spelling"):
        two_tasks.learn({"B": paint("b")["b"]}, known="refine")
    with pytest.raises(UserError, match=r"known must be 'refuse' or 'refine', not 'merge'"):
        two_tasks.learn(paint("b"), known="merge")  # type: ignore[arg-type]


def test_refining_equals_having_had_all_images_at_once() -> None:
    made = taught(paint("abc"), paint("de"))
    more = {**paint("b", 7, seed=5), **paint("f", 6)}
    report = made.learn(more, known="refine")
    assert (report.classes, report.refined, made.classes) == (("f",), ("b",), tuple("abcdef"))
    only = made.learn(paint("d", 5, seed=6), known="refine")
    assert (only.classes, only.refined, made.task_count) == ((), ("d",), 3)
    assert made.history()[-1].what == "refined" and made.history()[-1].classes == ("d",)
    every = {**paint("abc"), **paint("de"), **paint("f", 6)}
    every["b"] = every["b"] + more["b"]
    every["d"] = every["d"] + paint("d", 5, seed=6)["d"]
    torch.testing.assert_close(weight(made), joint(made, every).weight, rtol=1e-4, atol=1e-5)
    assert made.predictor.state.classes[1].images == 17


@pytest.mark.parametrize("projections", [0, 60], ids=["kept one by one", "kept as sums"])
def test_mirror_images_are_learned_refined_and_forgotten_with_their_images(projections: int) -> None:
    images = 10
    made = taught(paint("abc", images), paint("de", 6), **{"head.with_mirrors": True, "projections": projections})
    made.learn(paint("b", 7, seed=5), known="refine")
    made.forget("c")
    every = {**paint("ab", images), **paint("de", 6)}
    every["b"] = every["b"] + paint("b", 7, seed=5)["b"]
    pictures = ImageStore.of([picture for group in every.values() for picture in group], torch.device("cpu"))
    views = made.predictor.viewer.evaluation(pictures, torch.arange(len(pictures)))
    labels = torch.tensor([made.classes.index(name) for name, group in every.items() for _ in group])
    head = joint(made, every)  # of the images alone
    assert not torch.allclose(weight(made), head.weight, rtol=1e-2)
    head.learn(made.predictor.look_at(views.flip(-1)), labels, 0, 1)
    torch.testing.assert_close(weight(made), head.weight, rtol=1e-3, atol=1e-5)
    state = made.predictor.state
    assert [known.images for known in state.classes] == [len(every[name]) for name in made.classes]
    held = sum(len(known.held.tensors["rows"]) for known in state.classes)
    assert ("rows" in state.classes[0].rest.tensors) == (projections == 0)
    assert state.calibration.images == held < sum(len(group) for group in every.values()) / 4


def test_refining_is_refused_where_it_would_do_silent_damage() -> None:
    made = ContinualClassifier(**TINY, method="linear-probe")
    made.learn(paint("ab", 4))
    with pytest.raises(UserError, match="only where the head is solved in closed form"):
        made.learn(paint("a", 4), known="refine")
    with pytest.raises(UserError, match="still learn in task 2"):
        taught(paint("ab", 4), adapt_tasks=2).learn(paint("a", 4), known="refine")


# Forgetting, renaming, going back


@pytest.mark.parametrize("name", ["b", "d"])
def test_forgetting_is_the_joint_solution_over_what_remains(name: str) -> None:
    made = taught(paint("abc"), paint("de"))
    made.forget(name)
    remaining = {key: value for key, value in paint("abcde").items() if key != name}
    assert made.classes == tuple(remaining) and made.history()[-1].what == "forgot"
    torch.testing.assert_close(weight(made), joint(made, remaining).weight, rtol=1e-4, atol=1e-5)
    made.learn(paint("fg"))
    torch.testing.assert_close(weight(made), joint(made, {**remaining, **paint("fg")}).weight, rtol=1e-4, atol=1e-5)


def test_nothing_of_a_forgotten_class_of_a_later_lesson_is_left() -> None:
    made, never = taught(paint("abc"), paint("de")), taught(paint("abc"), paint("d"))
    made.forget("e")
    torch.testing.assert_close(weight(made), weight(never), rtol=1e-5, atol=1e-6)
    mine, other = made.predictor.state, never.predictor.state
    assert mine.calibration.images == other.calibration.images
    assert (mine.calibration.temperature, mine.scale.limit) == pytest.approx(
        (other.calibration.temperature, other.scale.limit), rel=1e-4
    )
    assert made.learn(paint("e")).classes == ("e",), "it can be learned again"


@pytest.mark.parametrize("kind", ["lda", "nearest-mean"])
def test_every_head_in_closed_form_forgets(kind: str) -> None:
    settings: dict[str, Any] = {**TINY, "method": "nearest-mean", "head.kind": kind}
    made, never = ContinualClassifier(**settings), ContinualClassifier(**settings)
    made.learn(paint("abc", 6))
    never.learn(paint("ab", 6))
    made.forget("c")
    torch.testing.assert_close(weight(made), weight(never), rtol=1e-4, atol=1e-5)


def test_large_classes_are_kept_as_sums_and_forgotten_and_refined_as_exactly() -> None:
    settings: dict[str, Any] = {**TINY, "method": "ranpac", "projections": 0}
    made = ContinualClassifier(**settings)
    made.learn(paint("abc", 180))
    kept = made.predictor.state.classes[0].rest.tensors
    assert "rows" not in kept and int(kept["count"]) == 160
    made.learn(paint("a", 20, seed=3), known="refine")
    made.forget("b")
    every = paint("ac", 180)
    features, labels = features_of(made, {"a": every["a"] + paint("a", 20, seed=3)["a"], "c": every["c"]})
    head = RidgeHead(features.shape[1], 0, 0, made.predictor.state.strength)
    head.learn(features, labels, 2, 0)
    torch.testing.assert_close(weight(made), head.weight, rtol=1e-3, atol=1e-5)


def test_what_cannot_be_forgotten_exactly_is_refused(two_tasks: ContinualClassifier) -> None:
    linear = ContinualClassifier(**TINY, method="linear-probe")
    linear.learn(paint("ab", 4))
    with pytest.raises(UserError, match="cannot be forgotten exactly: the head 'linear' was trained"):
        linear.forget("a")
    with pytest.raises(UserError, match="cannot be forgotten yet"):
        taught(paint("ab", 4), adapt_tasks=2).forget("a")
    with pytest.raises(UserError, match=r"no class is called 'aa': did you mean 'a'|allowed"):
        two_tasks.forget("aa")
    lone = ContinualClassifier(**TINY, method="ranpac")
    lone.learn(paint("a", 4))
    with pytest.raises(UserError, match="the only class"):
        lone.forget("a")


def test_renaming_changes_names_alone(two_tasks: ContinualClassifier) -> None:
    made = taught(paint("abc"))
    before = made.predict(paint("b", 3)["b"])
    made.rename("b", "  Cafe\u0301 ")
    after = made.predict(paint("b", 3)["b"])
    assert made.classes == ("a", "Caf\u00e9", "c") and made.history()[-1].note == "was b"
    assert [answer.probability for answer in after] == [answer.probability for answer in before]
    assert labels_of(after) == ["Caf\u00e9" if answer.label == "b" else answer.label for answer in before]
    with pytest.raises(UserError, match="there is a class 'c' already"):
        made.rename("a", "C")
    with pytest.raises(UserError, match="must not be empty"):
        made.rename("a", " ")
    made.rename("a", "A")  # its own name in another case is nobody else's
    assert made.classes == ("A", "Caf\u00e9", "c")


def test_going_back_makes_a_new_version_and_loses_none() -> None:
    made = taught(paint("abc"), paint("de"))
    made.rollback(1)
    assert (made.version, made.classes) == (3, tuple("abc"))
    assert [(one.number, one.what, one.known) for one in made.history()] == [
        (1, "learned", 3),
        (2, "learned", 5),
        (3, "rolled back", 3),
    ]
    once = taught(paint("abc"))
    assert torch.equal(weight(made), weight(once))
    made.learn(paint("fg"))
    once.learn(paint("fg"))
    torch.testing.assert_close(weight(made), weight(once), rtol=1e-5, atol=1e-6)
    made.rollback(2)
    assert made.classes == tuple("abcde")
    with pytest.raises(UserError, match="no version 9 to go back to; kept are: 1, 2, 3, 4, 5"):
        made.rollback(9)


def test_only_so_many_versions_are_kept() -> None:
    made = taught(paint("ab", 4), keep_versions=2)
    made.rename("a", "x")
    made.rename("x", "y")
    assert [one.number for one in made.history()] == [2, 3]
    with pytest.raises(UserError, match="kept are: 2, 3"):
        made.rollback(1)
    with pytest.raises(UserError, match="keep_versions must be at least 1"):
        ContinualClassifier(**TINY, keep_versions=0)


# Predicting


def test_anything_that_shows_a_picture_is_predicted_alike(two_tasks: ContinualClassifier, tmp_path: Path) -> None:
    pixels = paint("d", 1, seed=2)["d"][0]
    path = tmp_path / "sub" / "d.png"
    path.parent.mkdir()
    Image.fromarray(pixels).save(path)
    expected = two_tasks.predict([pixels])[0]
    assert expected.source == "0"
    chances: list[float] = []
    for given in (
        path,
        str(path),
        tmp_path,
        [path],
        Image.fromarray(pixels),
        [Image.open(path)],
        pixels,
        pixels[None],
        torch.from_numpy(pixels).permute(2, 0, 1),
        pixels / np.float32(255),
        iter([pixels]),
    ):
        (answer,) = two_tasks.predict(given)
        chances.append(answer.probability)
        assert answer.label == expected.label
    assert chances == pytest.approx([expected.probability] * len(chances), rel=1e-6)
    assert two_tasks.predict(path)[0].source == str(path) == two_tasks.predict([Image.open(path)])[0].source


def test_an_answer_depends_on_its_own_image_alone(two_tasks: ContinualClassifier) -> None:
    every = [picture for group in paint("abcdex", 3, seed=4).values() for picture in group]
    alone = [two_tasks.predict(picture)[0] for picture in every]
    for batch in (1, 7, 100):
        together = list(two_tasks.predict_each(every, batch=batch))
        assert labels_of(together) == labels_of(alone)
        assert [one.probability for one in together] == pytest.approx([one.probability for one in alone], rel=1e-4)
        assert [one.novelty for one in together] == pytest.approx([one.novelty for one in alone], rel=1e-3, abs=1e-3)


def test_an_unreadable_file_is_an_answer_with_its_error(two_tasks: ContinualClassifier, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.fromarray(paint("a", 1)["a"][0]).save(good)
    bad.write_text("no picture")
    answers = two_tasks.predict([good, bad, tmp_path / "missing.png", np.zeros((2, 2, 7), np.uint8), good])
    assert [answer.error is None for answer in answers] == [True, False, False, False, True]
    assert answers[1].label is None and answers[1].top == () and answers[1].error == "no image format that can be read"
    assert "No such file" in str(answers[2].error) and "(2, 2, 7)" in str(answers[3].error)
    assert two_tasks.predict([bad])[0].error and two_tasks.predict([]) == []


def test_images_are_taken_as_they_are_asked_for(two_tasks: ContinualClassifier) -> None:
    taken = 0

    def endless() -> Iterator[Pixels]:
        nonlocal taken
        while True:
            taken += 1
            yield paint("a", 1)["a"][0]

    stream = two_tasks.predict_each(endless(), batch=4)
    assert [next(stream).label for _ in range(6)] == ["a"] * 6
    assert taken < 60, "a stream of any length is gone through in constant memory"
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "images must be a path, a PIL image or an array of pixels"),
        ([3], "an image must be .* not int"),
        ([None], "an image must be .* not NoneType"),
    ],
)
def test_what_is_no_image_is_refused(two_tasks: ContinualClassifier, given: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        two_tasks.predict(given)
    with pytest.raises(UserError, match="top_k must be a number of at least 1, not 0"):
        two_tasks.predict(paint("a", 1)["a"], top_k=0)


# Probabilities, novelty, retention, evaluation


def test_probabilities_are_calibrated_on_images_that_the_head_has_not_learned(two_tasks: ContinualClassifier) -> None:
    from probprompt.classifier.calibration import UNFITTED, fit_temperature

    state, head = two_tasks.predictor.state, two_tasks.predictor.model.head
    held = [known.held.tensors["rows"] for known in state.classes]
    rest = [known.rest.tensors["rows"] for known in state.classes]
    assert [len(rows) for rows in held] == [2] * 5 and [len(rows) for rows in rest] == [8] * 5
    labels = torch.arange(5).repeat_interleave(8)
    without = RidgeHead(head.width, 0, 60, state.strength)
    without.learn(torch.cat(rest), labels, 5, 0)
    logits = without(torch.cat(held))
    expected = fit_temperature(logits, torch.arange(5).repeat_interleave(2), UNFITTED)
    assert state.calibration.temperature == pytest.approx(expected, rel=1e-3)
    assert not torch.allclose(without.weight, head.weight, rtol=1e-2), "the final head has learned them"


def test_pictures_of_no_known_class_are_marked(two_tasks: ContinualClassifier) -> None:
    made = taught(paint("abc", 40), paint("de", 40))
    known = [picture for group in paint("abcde", 20, seed=9).values() for picture in group]
    strange = [picture for group in paint("qrst", 10).values() for picture in group]
    flagged = [answer.unknown for answer in made.predict(known)]
    assert np.mean(flagged) < 0.15
    assert np.mean([answer.unknown for answer in made.predict(strange)]) > 0.5
    found = made.evaluate(paint("abcde", 20, seed=9), unknown=strange)
    assert found.auroc is not None and found.auroc > 0.9 and found.unknown_images == 40
    assert found.fpr_at_95 is not None and found.fpr_at_95 < 0.5
    assert found.flagged == pytest.approx(100 * np.mean(flagged))


def test_old_classes_that_look_like_new_ones_are_told(two_tasks: ContinualClassifier) -> None:
    made = taught(paint("abc", 20))
    twin = made.learn({"twin of b": paint("b", 20, seed=7)["b"], "z": paint("z", 20)["z"]}).retention
    assert twin and (twin[0].old, twin[0].new) == ("b", "twin of b") and 0.2 < twin[0].share <= 1
    assert [risk.share for risk in twin] == sorted((risk.share for risk in twin), reverse=True)
    apart = taught(paint("abc", 20)).learn(paint("yz", 20)).retention
    assert all(risk.share < twin[0].share / 2 for risk in apart)


def test_evaluation_counts_what_predictions_say(two_tasks: ContinualClassifier) -> None:
    given = {**paint("abc", 4, seed=3), "d": paint("e", 4, seed=3)["e"]}
    found = two_tasks.evaluate(given)
    truth = [name for name, group in given.items() for _ in group]
    said = labels_of(two_tasks.predict([picture for group in given.values() for picture in group]))
    right = np.array([one == other for one, other in zip(said, truth, strict=True)])
    assert found.accuracy == pytest.approx(100 * right.mean()) and found.images == 16
    assert found.per_class["d"] == pytest.approx(100 * right[12:].mean()) and set(found.per_class) == set("abcd")
    assert sum(map(sum, found.confusion)) == 16
    assert found.confusion[3][4] == said[12:].count("e")
    assert [(task.name, task.images) for task in found.per_task] == [("task 1", 12), ("task 2", 4)]
    assert found.auroc is None and found.unreadable == ()


def test_forgetting_is_measured_against_the_version_that_had_just_learned_a_task() -> None:
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


def test_evaluation_refuses_classes_that_it_does_not_know(two_tasks: ContinualClassifier) -> None:
    with pytest.raises(UserError, match=r"2 class\(es\) are not known: p, q.*--unknown"):
        two_tasks.evaluate(paint("apq", 2))
    with pytest.raises(UserError, match="none of the images can be read"):
        two_tasks.evaluate({"a": ["missing.png"]})


# What is given to learn


def write(folder: Path, images: Classes) -> Path:
    for name, group in images.items():
        (folder / name).mkdir(parents=True)
        for index, picture in enumerate(group):
            Image.fromarray(picture).save(folder / name / f"{index}.png")
    return folder


def test_folders_mappings_and_datasets_teach_the_same(tmp_path: Path) -> None:
    images = paint("abc", 5)
    folder = write(tmp_path / "photos", images)
    files = {name: sorted((folder / name).iterdir()) for name in images}

    class Dataset:
        classes: ClassVar = ["a", "unused", "b", "c"]
        items: ClassVar = [
            (picture, label) for label, name in ((0, "a"), (2, "b"), (3, "c")) for picture in images[name]
        ]

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
    plain = [Image.fromarray(picture) for picture in paint("a", 6)["a"]]
    modes = [image.convert(mode) for image, mode in zip(plain, ("RGB", "L", "RGBA", "P", "CMYK", "1"), strict=True)]
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
    with pytest.raises(UserError, match=r"(?s)class\(es\) c can be read:.*c/broken.png"):
        ContinualClassifier(**PROBPROMPT).learn(folder)


def test_rounding_where_there_is_no_variance_is_not_taken_for_variance() -> None:
    """Whether one image of each class leaves 0 or 1e-19 depends on the processor."""
    noise = 1e-19 * torch.tensor([[1.0, 2.0], [2.0, 3.0]], dtype=torch.float64)  # with a negative eigenvalue
    assert torch.allclose(novelty._whitening(noise, 0.3), torch.eye(2, dtype=torch.float64))


def test_sums_that_are_kept_are_those_that_are_solved() -> None:
    """A product of a matrix with itself is symmetric to the last bit on some processors alone."""
    views: sums.Views = {"unit": lambda rows: rows}
    made = sums.Sums.zero(2, {"unit": 3}, torch.device("cpu"))
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for label in (0, 1):
        made.add_rows(label, rows[4 * label : 4 * label + 4], views)
    moments = made.of["unit"]
    moments.moment.add_(1e-9 * torch.ones(3, 3).triu(1))  # the half that no solve reads
    (again,) = sums.Sums.from_tensors(made.tensors(), made.widths, torch.device("cpu")).of.values()
    assert torch.equal(again.within, moments.within)
    assert torch.equal(again.total[1].tril(), moments.total[1].tril())
    head = RidgeHead(3, 0, projections=0, ridge=1.0).grow(2)
    solved = [head.solve_sums(part.counts, part.totals, part.moment).weight for part in (moments, again)]
    assert torch.equal(*solved)


def test_a_single_image_per_class_is_enough_but_told() -> None:
    made = ContinualClassifier(**PROBPROMPT)
    report = made.learn(paint("abc", 1))
    assert report.calibration_error is None and "very few images" in report.warnings[0]
    answer = made.predict(paint("b", 1)["b"])[0]
    assert (answer.label, answer.unknown) == ("b", False)
    assert made.learn(paint("de", 60)).calibration_error is not None


Spoil = Callable[[Path], object]


def empty(folder: Path) -> object:
    folder.mkdir()
    return folder


def loose(folder: Path) -> object:
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    return folder


def hollow(folder: Path) -> object:
    write(folder, paint("ab", 2))
    (folder / "c").mkdir()
    return folder


BAD: dict[str, tuple[Spoil, str]] = {
    "missing": (lambda folder: folder / "nowhere", "does not exist: give a folder with one folder of images per class"),
    "empty": (empty, "holds no class folder: put the images of each class into a folder"),
    "loose": (loose, r"holds no class folder: its 1 image\(s\) must lie in one folder per class"),
    "hollow": (hollow, "c holds no image: fill it or remove it"),
    "one class": (lambda folder: paint("a"), "only one class, and nothing to tell it apart from"),
    "case": (
        lambda folder: {"Cat": paint("a")["a"], "cat": paint("b")["b"]},
        "two classes of one name, 'Cat' and 'cat'",
    ),
    "accents": (lambda folder: {"\u00e9": [], "e\u0301": []}, "two classes of one name"),
    "nothing": (lambda folder: {}, "no class was given"),
    "no images": (lambda folder: {"a": []}, "the class 'a' has no image"),
    "numbers": (lambda folder: {1: []}, "the name of a class must be text, not 1"),
    "line break": (lambda folder: {"a\nb": []}, "printable on one line"),
    "list": (lambda folder: ["a.png"], "images with classes must be a folder of class folders"),
    "no classes": (lambda folder: torch.utils.data.TensorDataset(torch.zeros(2)), "says nothing of its classes"),
    "junk": (lambda folder: {"a": [1], "b": [2]}, r"an image must be .* not int \(1\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_learned_is_refused_in_words(case: str, tmp_path: Path) -> None:
    spoil, message = BAD[case]
    made = ContinualClassifier(**PROBPROMPT)
    with pytest.raises(UserError, match=message):
        made.learn(spoil(tmp_path / "photos"))
    assert made.version == 0


# Settings


def test_the_default_is_the_flagship_on_a_small_real_vit() -> None:
    made = ContinualClassifier(device="cpu")
    settings = made.settings
    assert (settings.preset, settings.method.name, settings.head.kind) == ("flagship", "probprompt", "ridge")
    assert settings.head.projections == 2000 and settings.head.with_query
    assert settings.backbone.name == "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert repr(made) == "<ContinualClassifier version 0: 0 classes, probprompt>"
    assert probprompt.ContinualClassifier is ContinualClassifier


def test_few_epochs_for_many_images_unless_they_are_set() -> None:
    engine = ContinualClassifier(device="cpu", backbone="demo")._engine
    assert engine._config_for(100).training.epochs == 12
    assert [engine._config_for(images).training.epochs for images in (210, 800, 10**6)] == [12, 3, 1]
    assert ContinualClassifier(device="cpu", epochs=7)._engine._config_for(10**6).training.epochs == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "probpromt"}, "did you mean 'probprompt'"),
        ({"preset": "best"}, "no preset is called 'best'"),
        ({"method": "l2p", "preset": "flagship"}, "'flagship' is for probprompt alone"),
        ({"method": "joint"}, "'joint' learns everything at once"),
        ({"tasks": 5}, "data.tasks is for runs"),
        ({"follow": True}, "head.follow is for runs"),
        ({"sample": 5}, "did you mean 'method.samples'"),
        ({"device": "tpu"}, "no device is called 'tpu'|not supported"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ContinualClassifier(**{"device": "cpu", **settings})


def test_before_anything_is_learned_there_is_nothing_to_ask(tmp_path: Path) -> None:
    made = ContinualClassifier(**PROBPROMPT)
    assert (made.classes, made.version, made.history()) == ((), 0, [])
    asks: list[Callable[[], object]] = [
        lambda: made.predict(paint("a", 1)["a"]),
        lambda: made.evaluate(paint("a", 1)),
        lambda: next(made.predict_each([])),
        lambda: made.forget("a"),  # "allowed:" and then nothing would help nobody
        lambda: made.rename("a", "b"),
    ]
    for ask in asks:
        with pytest.raises(UserError, match="nothing is learned yet"):
            ask()
    with pytest.raises(UserError, match="nothing to save"):
        made.save(tmp_path / "model")


def test_a_sum_kept_for_a_head_is_what_the_head_would_add_up() -> None:
    features, labels = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    for name, kind in HEADS.items():
        if not issubclass(kind, ClosedFormHead):
            continue
        learned = kind(6, 0).grow(0)
        assert isinstance(learned, ClosedFormHead)
        learned.learn(features, labels, 3, 0)
        lifted = learned.lift(features.double())
        member = torch.nn.functional.one_hot(labels, 3).double()
        other = kind(6, 0)
        assert isinstance(other, ClosedFormHead)
        if isinstance(other, RidgeHead) and isinstance(learned, RidgeHead):
            other.strength.copy_(learned.strength)
        other.solve_sums(member.sum(dim=0), member.T @ lifted, lifted.T @ lifted)
        torch.testing.assert_close(other.weight, learned.weight, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", ["👩\u200d🔬", "می\u200cخواهم", "a/b/../c", "x" * 500])
def test_a_class_may_be_called_what_people_call_things(name: str, tmp_path: Path) -> None:
    made = taught({name: paint("a")["a"], **paint("b")})
    made.save(tmp_path / "model")
    loaded = ContinualClassifier.load(tmp_path / "model", device="cpu")
    assert loaded.classes == (name, "b") and labels_of(loaded.predict(paint("a", 2, seed=3)["a"])) == [name, name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("name", ["a\u202eb", "\u200d", "a\x00"])
def test_names_that_deceive_the_eye_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"printable|empty"):
        taught({name: paint("a")["a"], **paint("b")})


def test_what_was_forgotten_does_not_depend_on_which_newer_classes_are_tested(two_tasks: ContinualClassifier) -> None:
    earlier = two_tasks.evaluate(paint("abc"))
    assert len(earlier.per_task) == 1 and earlier.forgetting == earlier.per_task[0].forgotten is not None
    every = two_tasks.evaluate(paint("abcde"))
    assert len(every.per_task) == 2 and every.forgetting == every.per_task[0].forgotten
    assert two_tasks.evaluate(paint("de")).forgetting is None
