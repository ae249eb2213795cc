"""The classifier that people use: learn today, learn more next month, predict, forget, go back."""

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import torch

from probprompt import presets
from probprompt.classifier.evaluate import AccuracyMatrix, accuracy_matrix, diversity, evaluate
from probprompt.classifier.lesson import (
    Known,
    add_lesson,
    confusion_risks,
    forget,
    read_lesson,
    settle,
    unlearned,
    with_lesson,
)
from probprompt.classifier.outputs import Evaluation, LearnReport, Prediction, Version
from probprompt.classifier.predictor import JudgedBatch, ModelFactory, Predictor
from probprompt.classifier.store import Busy, SavedVersion, State, Store
from probprompt.config import (
    DataConfig,
    RunConfig,
    apply_values,
    merge,
    parse_config,
    parse_stored,
    to_stored,
    with_absolute_paths,
)
from probprompt.data.images import UnreadableImageError
from probprompt.data.inputs import clean_name, labeled, pictures, same_name
from probprompt.engine.build import pick_device
from probprompt.errors import UserError, suggest
from probprompt.heads.closed_form import ClosedFormSettings
from probprompt.methods import find
from probprompt.progress import SILENT, ProgressCallback


class ContinualClassifier:
    """Learns classes of images, a few at a time, without keeping the images.

    The default is ProbPrompt under the ridge head: its prompts adapt to the images of the first :meth:`learn`; every
    later one is a single pass over the new images and a solve, and the head is then the same as if all images ever
    learned had been there at once. Any other method, head or backbone can be named.

    ``preset``, ``method``, ``config`` and ``settings`` are those of :func:`probprompt.train`; ``backbone`` is a named
    checkpoint or a timm name (a small ViT by default, ViT-B/16 on a GPU). ``keep_versions`` is how many versions can
    be returned to. Nothing is read or downloaded before it is needed. Learning and predicting may happen in different
    threads: predictions come from the version before, until the new one is complete.
    """

    def __init__(
        self,
        *,
        preset: str | None = None,
        method: str = "probprompt",
        backbone: str | None = None,
        device: str | None = None,
        seed: int = 0,
        keep_versions: int = 10,
        epochs: int | None = None,
        config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        place = pick_device(device)
        if epochs is not None:
            settings["training.epochs"] = epochs
        parsed, own_epochs = make_config(preset, method, backbone, place, seed, config, settings)
        if keep_versions < 1:
            raise UserError(f"keep_versions must be at least 1, not {keep_versions}")
        self._begin(ModelFactory(parsed, place, None, own_epochs), keep_versions, secrets.token_hex(16))

    def _begin(self, engine: ModelFactory, keep: int, model: str) -> None:
        self._engine, self.keep_versions, self._model = engine, keep, model
        self._kept: tuple[SavedVersion, ...] = ()
        self._ancestors: dict[int, str] = {}
        self._predictor: Predictor | None = None
        self._settings_note: dict[str, Any] | None = None  # as it was saved
        self._changing, self._building = threading.RLock(), threading.Lock()

    # What it knows --------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> State:
        return self._kept[-1].state if self._kept else State()

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that it knows."""
        return self._state.names

    @property
    def version(self) -> int:
        """The number of the version that predicts; 0 before anything is learned."""
        return self._kept[-1].version.number if self._kept else 0

    @property
    def task_count(self) -> int:
        """How many calls of :meth:`learn` brought new classes."""
        return len(self._state.tasks)

    @property
    def settings(self) -> RunConfig:
        """All settings, complete."""
        return self._engine.config

    @property
    def short_side(self) -> int | None:
        """What the short side of an image is reduced to when it is decoded; None leaves it as it is."""
        return self._engine.short_side

    def __repr__(self) -> str:
        return f"<ContinualClassifier version {self.version}: {len(self.classes)} classes, {self.settings.method.name}>"

    def history(self) -> list[Version]:
        """The versions that are kept, the current one last."""
        return [one.version for one in self._kept]

    # Predicting -----------------------------------------------------------------------------------------------------

    @property
    def predictor(self) -> Predictor:
        """The current version, ready to predict, as one object that never changes."""
        if not self._kept:
            raise UserError("nothing is learned yet: call learn first")
        state, found = self._state, self._predictor
        if found is None or found.state is not state:
            with self._building:  # never while something is learned: that may take long
                found = self._predictor
                if found is None or found.state is not state:
                    found = self._predictor = self._engine.predictor(state)
        return found

    def predict(self, images: object, top_k: int = 1) -> list[Prediction]:
        """Classify a file, a folder with all below it, PIL images, arrays, or a list of any of these.

        An image that cannot be read is an answer with its ``error``.
        """
        return list(self.predict_each(images, top_k))

    def predict_each(self, images: object, top_k: int = 1, batch: int | None = None) -> Iterator[Prediction]:
        """As :meth:`predict`, one answer after the other: any number of images in constant memory."""
        predictor = self.predictor
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise UserError(f"top_k must be a number of at least 1, not {top_k!r}")
        size = batch or self._engine.config.images_at_a_time(self._engine.device.type)
        for judged in predictor.judge_each(pictures(images, self._engine.short_side), size):
            yield from _answers(judged, predictor.state.names, top_k)

    def evaluate(self, images: object, unknown: object = None, progress: ProgressCallback = SILENT) -> Evaluation:
        """Measure accuracy on images with known classes: overall, per task, and what was forgotten.

        What a task lost is measured against the version that had just learned it, where that is still kept.
        ``unknown`` are images of no known class: how well they are told apart is then measured, too.
        """
        given = labeled(images, self._engine.short_side)
        return evaluate(self._engine, self.predictor, self._kept, given, unknown, progress)

    def accuracy_matrix(self) -> AccuracyMatrix:
        """How well each task's held-out images were recognised by each version that is kept; no image is needed."""
        return accuracy_matrix(self._kept)

    def prompt_diversity(self) -> dict[str, Any] | None:
        """How alike the prompts of different classes are, as in reports; None where queries are not kept."""
        return diversity(self._engine, self._state)

    # Changing -------------------------------------------------------------------------------------------------------

    def learn(
        self, images: object, *, known: Known = "refuse", name: str | None = None, progress: ProgressCallback = SILENT
    ) -> LearnReport:
        """Learn new classes: a folder of class folders, lists of images by class name, or a dataset with ``classes``.

        A class that is known already is refused, or with ``known="refine"`` gets these images as more of the same.
        All or nothing: where anything goes wrong, the classifier is what it was. A few images of each class are held
        out while probabilities are calibrated.
        """
        begun = time.perf_counter()
        with self._changing:
            old, models = self._state, self._engine
            lesson = read_lesson(models, old, labeled(images, models.short_side), known, progress)
            rest = models.sums(old)  # all earlier images that were not held out
            learner = models.learner(old, lesson.loaded, models.with_held_out(old, rest))

            train, every, closed = lesson.task(old, ~lesson.held), lesson.task(old), models.closed_form
            work = learner.work(train, every) if closed else learner.work(train) + learner.loader.passes(every)
            with progress.stage("learning", work):
                seen = learner.fit(train, solve_on=every if closed else None, progress=progress)
                features = learner.look(every, progress.advance)[:, None] if seen is None else seen  # (n, V, D or more)
            progress.describe("calibrating")
            if not bool(features.isfinite().all()):
                raise UserError("the features of some images are not finite: nothing was learned")

            place = Path(images).resolve().name if isinstance(images, str | Path) else f"task {len(old.tasks) + 1}"
            title, new, refined = name or place, lesson.new, lesson.refined
            rest = add_lesson(rest, lesson, features, models.views)
            state = with_lesson(models, old, lesson, features, learner, title, self.version + 1)
            judge = unlearned(models, state, rest, learner.model.head)  # has not learned from held-out images
            state = settle(models, state, rest, judge)
            risks = confusion_risks(models, state, judge, len(old.classes)) if new else ()
            predictor = models.predictor(state)  # whatever can fail has failed by now
            note = title if not (new and refined) else f"{title}; more images of {', '.join(refined)}"
            self._append("learned" if new else "refined", new or refined, len(lesson.labels), note, state, predictor)
        return LearnReport(
            version=self.version,
            classes=new,
            images=len(lesson.labels),
            seconds=time.perf_counter() - begun,
            calibration_error=state.calibration.error,
            temperature=state.calibration.temperature,
            retention=risks,
            warnings=lesson.warnings,
            refined=refined,
        )

    def forget(self, name: str) -> None:
        """Forget a class: the head is then the solution over the images of all other classes, as if it had never been.

        Prompts that adapted to it, in the first task, keep what they learned there. Versions before this one still
        know the class until they are pruned. Heads that are trained cannot forget exactly, and refuse.
        """
        with self._changing:
            self._find(name)
            state = forget(self._engine, self._state, name)
            self._append("forgot", (name,), 0, "", state, self._engine.predictor(state))

    def rename(self, old: str, new: str) -> None:
        """Give a class another name; nothing else changes."""
        with self._changing:
            self._find(old)
            name = clean_name(new)
            if name == old:
                raise UserError(f"the class is called {old!r} already")
            for other in self.classes:
                if other != old and same_name(other) == same_name(name):
                    raise UserError(f"there is a class {other!r} already: {old!r} cannot become {name!r}")
            classes = tuple(replace(one, name=name) if one.name == old else one for one in self._state.classes)
            self._append("renamed", (name,), 0, f"was {old}", replace(self._state, classes=classes))

    def rollback(self, to: int) -> None:
        """Make a version that is kept the current one again; it gets a new number, and none is lost."""
        with self._changing:
            found = {one.version.number: one.state for one in self._kept}
            if to not in found:
                kept = ", ".join(map(str, found)) or "none"
                raise UserError(f"there is no version {to} to go back to; kept are: {kept}")
            if to == self.version:
                raise UserError(f"version {to} is the current one already")
            self._append("rolled back", found[to].names, 0, f"to version {to}", found[to])

    def _find(self, name: str) -> None:
        if not self._kept:
            raise UserError("nothing is learned yet: call learn first")
        if name not in self.classes:
            raise UserError(f"no class is called {name!r}. {suggest(str(name), self.classes)}")

    def _append(
        self, what: str, classes: tuple[str, ...], images: int, note: str, state: State, ready: Predictor | None = None
    ) -> None:
        """Put a new version in its place, at once; what was is kept without what can be made again."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        version = Version(self.version + 1, when, what, classes, images, note, len(state.classes))
        older = tuple(replace(one, state=replace(one.state, sums=None)) for one in self._kept)
        newest = SavedVersion(version, state, secrets.token_hex(8))
        self._ancestors[version.number] = newest.token
        self._kept, self._predictor = (*older, newest)[-self.keep_versions :], ready

    # On disk --------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write it, or the versions that are new since it was loaded; killed midway, what is there is old or new."""
        self._save(Store(Path(folder).expanduser()))

    def _save(self, store: Store) -> None:
        if not self._kept:
            raise UserError("nothing is learned yet: there is nothing to save")
        with self._changing:
            store.write(self._model, self._note(), self._kept, self._ancestors, self.keep_versions)

    def _note(self) -> dict[str, Any]:
        """The settings that every version is saved with."""
        if self._settings_note is not None:
            return {**self._settings_note, "keep_versions": self.keep_versions}
        engine = self._engine
        config = engine.config.model_dump(mode="json", exclude={"data": {"benchmark", "tasks", "test", "root"}})
        stored = to_stored(config)
        return {
            "config": stored,
            "own_epochs": engine.own_epochs,
            "keep_versions": self.keep_versions,
            "backbone": {"name": engine.backbone.name, "sha256": engine.backbone.sha256},
            "preprocessing": engine.viewer.record(),
            "head": stored["head"]["kind"],
        }

    @classmethod
    def load(cls, folder: str | Path, *, version: int | None = None, device: str | None = None) -> Self:
        """Read a saved classifier, or an older version of it; what only further learning needs is read later.

        Others may change it meanwhile: what is loaded is whole, and predicts whatever becomes of the folder.
        """
        store = Store(Path(folder).expanduser())
        while True:
            current = store.head()
            try:
                made = cls._load(store, version, device)
                made._state.read()
                return made
            except UserError:
                if version is not None or store.head() == current:
                    raise  # else it was replaced while it was read: the new one is there now

    @classmethod
    def _load(cls, store: Store, version: int | None, device: str | None) -> Self:
        head = store.head()
        numbers = store.numbers(head["version"])
        wanted = head["version"] if version is None else version
        if wanted not in numbers:
            raise UserError(f"{store.folder} has no version {wanted}; kept are: {', '.join(map(str, numbers))}")
        note, newest = store.read(wanted)
        every = [newest]
        for number in reversed(numbers[: numbers.index(wanted)]):
            with suppress(UserError):  # one that was pruned just now, or is damaged, keeps no other from being used
                every.insert(0, store.read(number)[1])
        try:
            config = parse_stored(note["config"])
            place, own_epochs = pick_device(device), bool(note["own_epochs"])
            engine = ModelFactory(
                config, place, note["backbone"]["sha256"], own_epochs, note["preprocessing"], store.folder
            )
            keep = int(note["keep_versions"])
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(f"version {wanted} in {store.folder} is damaged: {problem!r}") from problem
        made = cls.__new__(cls)
        made._begin(engine, keep, head["model"])
        made._settings_note, made._kept = note, tuple(every)
        made._ancestors = {kept.version.number: kept.token for kept in every}
        return made


@contextmanager
def changing(
    folder: str | Path,
    device: str | None = None,
    create: Mapping[str, Any] | None = None,
    busy: Busy | None = None,
) -> Iterator[ContinualClassifier]:
    """Load a saved classifier, keep others from changing it, and save it when the block ends without an error.

    Where none is saved, one is made with the arguments ``create``, if these are given. While another process changes
    it, ``busy`` is called until that is over; without that it is an error.
    """
    store, made = Store(Path(folder).expanduser()), None
    if create is None or store.exists:
        store.head()
    else:
        made = ContinualClassifier(**{**create, **({"device": device} if device else {})})
    with store.locked(busy):
        made = made or ContinualClassifier._load(store, None, device)
        before = made.version
        yield made
        if not before or made.version != before:
            made._save(store)


def _answers(batch: JudgedBatch, names: tuple[str, ...], top_k: int) -> Iterator[Prediction]:
    """Predictions of a batch, in its order."""
    best, places = (part.tolist() for part in batch.probabilities.topk(min(top_k, len(names)), dim=1))
    rows = zip(best, places, batch.novelty.tolist(), strict=True)
    for picture, found in batch.images:
        if isinstance(found, UnreadableImageError):
            yield Prediction(picture.source, None, 0.0, (), False, 0.0, str(found))
            continue
        chances, labels, far = next(rows)
        top = tuple(zip((names[label] for label in labels), chances, strict=True))
        yield Prediction(picture.source, *top[0], top, far > 1, far)


SMALL_VIT = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
"""The backbone where there is no GPU and none is named."""
_OWN_DATA = {"stored_size", "interpolation"}  # what of a run's data settings means something here


def make_config(
    preset: str | None,
    method: str,
    backbone: str | None,
    device: torch.device,
    seed: int,
    config: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> tuple[RunConfig, bool]:
    """Complete settings, and whether the number of epochs was left to us.

    Without a preset: ``flagship`` for ProbPrompt, ``ridge`` for other methods with prompts, ``matched`` for the rest.
    They are those that were chosen for small sets of images (:mod:`probprompt.presets`).
    """
    if not preset:
        others = "ridge" if presets.has_prompts(find(method)) else "matched"
        preset = "flagship" if method == "probprompt" else others
    base = presets.settings(preset, method, "emoji-r")
    base = {name: part for name, part in base.items() if name not in ("data", "backbone")}
    usual = "sup1k" if device.type == "cuda" else SMALL_VIT
    named: dict[str, Any] = {"seeds": dict.fromkeys(("order", "init", "data"), seed), "method": {"name": method}}
    given = apply_values(merge(config or {}, named), settings)
    if backbone is not None:
        given = merge(given, {"backbone": {"name": backbone}})
    if method == "probprompt" and not {"evaluation_draws", "evaluation_samples"} & set(given["method"]):
        base = merge(base, {"method": {"evaluation": "mean"}})  # the same on the command line, on the page and in ONNX
    parsed = parse_config(merge(merge(base, {"backbone": {"name": usual}}), given))
    _refuse_run_settings(parsed)
    if find(parsed.method.name).joint:
        raise UserError(f"{parsed.method.name!r} learns everything at once: choose a method that learns task by task")
    return with_absolute_paths(parsed), "epochs" not in given.get("training", {})


def _refuse_run_settings(config: RunConfig) -> None:
    """Settings that have no meaning here, as those on where a run's images come from, are not silently dropped."""
    usual = DataConfig()
    for name in DataConfig.model_fields:
        if name not in _OWN_DATA and getattr(config.data, name) != getattr(usual, name):
            raise UserError(f"data.{name} is for runs: a classifier learns what each call of learn is given")
    if isinstance(config.head, ClosedFormSettings) and config.head.compensate_drift:
        raise UserError("head.compensate_drift is for runs: a classifier does not correct what it keeps of each class")
