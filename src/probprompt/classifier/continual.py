"""Continual classifier: learn classes, predict, forget, rename, roll back, save and load."""

import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import torch

from probprompt import presets
from probprompt.classifier import lesson as transitions
from probprompt.classifier.evaluate import AccuracyMatrix, accuracy_matrix, diversity, evaluate
from probprompt.classifier.lesson import Existing, read_lesson
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
from probprompt.data.inputs import clean_name, input_images, labeled, same_name
from probprompt.engine.build import pick_device
from probprompt.errors import UserError, renamed_arguments, suggest
from probprompt.heads.closed_form import ClosedFormSettings
from probprompt.methods import find
from probprompt.progress import SILENT, ProgressCallback


class ContinualClassifier:
    """Image classifier that learns new classes a few at a time, without keeping the images.

    The default is ProbPrompt with a ridge head. The first :meth:`learn` trains the prompts; each later one makes one
    pass over the new images and solves the head, which then equals one trained on all images at once.

    ``preset``, ``method``, ``config`` and ``settings`` are as for :func:`probprompt.train`. ``backbone`` is a named
    backbone or a timm model (default: ViT-B/16 on a GPU, a small ViT otherwise). ``keep_versions`` is the number of
    versions that can be restored. Nothing is read or downloaded before it is needed. Learning and predicting may happen
    in different threads: the previous version predicts until the new one is complete.
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
            raise UserError(f"Invalid keep_versions {keep_versions}. Expected at least 1.")
        self._begin(ModelFactory(parsed, place, None, own_epochs), keep_versions, secrets.token_hex(16))

    def _begin(self, engine: ModelFactory, keep: int, model: str) -> None:
        self._engine, self.keep_versions, self._model = engine, keep, model
        self._kept: tuple[SavedVersion, ...] = ()
        self._ancestors: dict[int, str] = {}
        self._predictor: Predictor | None = None
        self._settings_note: dict[str, Any] | None = None  # as loaded
        self._changing, self._building = threading.RLock(), threading.Lock()

    @property
    def _state(self) -> State:
        return self._kept[-1].state if self._kept else State()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self._state.names

    @property
    def version(self) -> int:
        """Number of the version that predicts; 0 before anything is learned."""
        return self._kept[-1].version.number if self._kept else 0

    @property
    def task_count(self) -> int:
        """Number of calls of :meth:`learn` that added classes."""
        return len(self._state.tasks)

    @property
    def settings(self) -> RunConfig:
        """All settings."""
        return self._engine.config

    @property
    def short_side(self) -> int | None:
        """Length of the short edge of decoded images; None keeps their size."""
        return self._engine.short_side

    def __repr__(self) -> str:
        return f"<ContinualClassifier version {self.version}: {len(self.classes)} classes, {self.settings.method.name}>"

    def history(self) -> list[Version]:
        """Return the kept versions, the current one last."""
        return [one.version for one in self._kept]

    @property
    def predictor(self) -> Predictor:
        """The current version, ready to predict, as an immutable object."""
        if not self._kept:
            raise UserError(_NO_CLASSES)
        state, ready = self._state, self._predictor
        if ready is None or ready.state is not state:
            with self._building:  # not the lock of changes: learning takes long
                ready = self._predictor
                if ready is None or ready.state is not state:
                    ready = self._predictor = self._engine.predictor(state)
        return ready

    def predict(self, images: object, top_k: int = 1) -> list[Prediction]:
        """Classify a file, a folder with its subfolders, PIL images, arrays, or a list of these.

        An image that cannot be read gives a prediction with its ``error``.
        """
        return list(self.predict_each(images, top_k))

    @renamed_arguments(batch="batch_size")
    def predict_each(self, images: object, top_k: int = 1, batch_size: int | None = None) -> Iterator[Prediction]:
        """Yield predictions as :meth:`predict` does, in constant memory."""
        predictor = self.predictor
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise UserError(f"Invalid top_k {top_k!r}. Expected a whole number of at least 1.")
        size = batch_size or self._engine.config.images_at_a_time(self._engine.device.type)
        for judged in predictor.judge_each(input_images(images, self._engine.short_side), size):
            yield from _answers(judged, predictor.state.names, top_k)

    def evaluate(self, images: object, unknown: object = None, progress: ProgressCallback = SILENT) -> Evaluation:
        """Measure accuracy on labeled images: overall, per task, and what was forgotten.

        Forgetting compares each task with the version that had just learned it, if that is kept. ``unknown`` are images
        of no known class, to measure how well these are distinguished.
        """
        given = labeled(images, self._engine.short_side)
        return evaluate(self._engine, self.predictor, self._kept, given, unknown, progress)

    def accuracy_matrix(self) -> AccuracyMatrix:
        """Return the held-out accuracy of each task under each kept version."""
        return accuracy_matrix(self._kept)

    def prompt_diversity(self) -> dict[str, Any] | None:
        """Return the similarity of prompts between classes; None if no queries are stored."""
        return diversity(self._engine, self._state)

    @renamed_arguments(known="existing='error' or existing='extend'", name="note")
    def learn(
        self,
        images: object,
        *,
        existing: Existing = "error",
        note: str | None = None,
        progress: ProgressCallback = SILENT,
    ) -> LearnReport:
        """Learn classes from a folder of class folders, images by class name, or a dataset.

        Images of classes that the model knows are an error, or with ``existing="extend"`` are added to these classes.
        ``note`` describes the new version (default: the folder's name). A few images of each class are held out to
        calibrate probabilities. If anything fails, the classifier is unchanged.
        """
        start = time.perf_counter()
        with self._changing:
            old, models = self._state, self._engine
            lesson = read_lesson(models, old, labeled(images, models.short_side), existing, progress)
            rest = models.sums(old)
            learner = models.learner(old, lesson.loaded, models.with_held_out(old, rest))

            train, every, closed = lesson.task(old, ~lesson.held), lesson.task(old), models.closed_form
            work = learner.work(train, every) if closed else learner.work(train) + learner.loader.passes(every)
            with progress.stage("learning", work):
                features = learner.fit(train, solve_on=every if closed else None, progress=progress)
                if features is None:
                    features = learner.look(every, progress.advance)[:, None]  # (n, V, D or more)
            progress.describe("calibrating")
            if not bool(features.isfinite().all()):
                raise UserError(
                    "Training diverged: some features are not finite. Lower training.head_lr. Nothing was changed."
                )

            source = Path(images).resolve().name if isinstance(images, str | Path) else f"task {len(old.tasks) + 1}"
            title, new, refined = note or source, lesson.new, lesson.refined
            rest = transitions.add_lesson(rest, lesson, features, models.views)
            state = transitions.with_lesson(models, old, lesson, features, learner, title, self.version + 1)
            judge = transitions.unlearned(models, state, rest, learner.model.head)
            state = transitions.settle(models, state, rest, judge)
            risks = transitions.confusion_risks(models, state, judge, len(old.classes)) if new else ()
            predictor = models.predictor(state)
            text = title if not (new and refined) else f"{title}; more images of {', '.join(refined)}"
            self._append("learned" if new else "refined", new or refined, len(lesson.labels), text, state, predictor)
        return LearnReport(
            version=self.version,
            classes=new,
            images=len(lesson.labels),
            seconds=time.perf_counter() - start,
            calibration_error=state.calibration.error,
            temperature=state.calibration.temperature,
            confusion_risks=risks,
            warnings=lesson.warnings,
            refined=refined,
        )

    def forget(self, name: str) -> None:
        """Remove a class; the head is solved again from the images of all other classes.

        Prompts keep what they learned of it in the first task, and kept versions before this one still know the class.
        Heads that are trained cannot forget exactly, which is an error.
        """
        with self._changing:
            self._find(name)
            state = transitions.forget(self._engine, self._state, name)
            self._append("forgot", (name,), 0, "", state, self._engine.predictor(state))

    def rename(self, old: str, new: str) -> None:
        """Rename a class."""
        with self._changing:
            self._find(old)
            name = clean_name(new)
            if name == old:
                raise UserError(f"The class is already named {old!r}.")
            for other in self.classes:
                if other != old and same_name(other) == same_name(name):
                    raise UserError(f"Cannot rename {old!r} to {name!r}: class {other!r} already exists.")
            classes = tuple(replace(one, name=name) if one.name == old else one for one in self._state.classes)
            self._append("renamed", (name,), 0, f"was {old}", replace(self._state, classes=classes))

    @renamed_arguments(to="version")
    def rollback(self, version: int) -> None:
        """Restore a kept version, under a new number; no version is lost."""
        with self._changing:
            states = {one.version.number: one.state for one in self._kept}
            if version not in states:
                raise UserError(_no_version(version, states))
            if version == self.version:
                raise UserError(f"Version {version} is already the current one.")
            self._append("rolled back", states[version].names, 0, f"to version {version}", states[version])

    def _find(self, name: str) -> None:
        if not self._kept:
            raise UserError(_NO_CLASSES)
        if name not in self.classes:
            raise UserError(f"Unknown class {name!r}. {suggest(str(name), self.classes)}")

    def _append(
        self, what: str, classes: tuple[str, ...], images: int, note: str, state: State, ready: Predictor | None = None
    ) -> None:
        """Add a version and make it current; older ones drop what can be recomputed."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        version = Version(self.version + 1, when, what, classes, images, note, len(state.classes))
        older = tuple(replace(one, state=replace(one.state, sums=None)) for one in self._kept)
        newest = SavedVersion(version, state, secrets.token_hex(8))
        self._ancestors[version.number] = newest.token
        self._kept, self._predictor = (*older, newest)[-self.keep_versions :], ready

    def save(self, folder: str | Path) -> None:
        """Save the new versions; if it is killed, the folder keeps the old or the new state."""
        self._save(Store(Path(folder).expanduser()))

    def _save(self, store: Store) -> None:
        if not self._kept:
            raise UserError(_NO_CLASSES)
        with self._changing:
            store.write(self._model, self._note(), self._kept, self._ancestors, self.keep_versions)

    def _note(self) -> dict[str, Any]:
        """Return the settings that every version is saved with."""
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
        """Load a saved classifier, by default its current version."""
        store = Store(Path(folder).expanduser())
        while True:
            current = store.head()
            try:
                classifier = cls._load(store, version, device)
                classifier._state.read()
                return classifier
            except UserError:
                if version is not None or store.head() == current:
                    raise  # otherwise it was replaced while it was read

    @classmethod
    def _load(cls, store: Store, version: int | None, device: str | None) -> Self:
        head = store.head()
        numbers = store.numbers(head["version"])
        requested = head["version"] if version is None else version
        if requested not in numbers:
            raise UserError(_no_version(requested, numbers))
        note, newest = store.read(requested)
        every = [newest]
        for number in reversed(numbers[: numbers.index(requested)]):
            with suppress(UserError):  # an older version may have been pruned just now, or be corrupted
                every.insert(0, store.read(number)[1])
        try:
            config = parse_stored(note["config"])
            sha256, own_epochs = note["backbone"]["sha256"], bool(note["own_epochs"])
            prepared, keep = note["preprocessing"], int(note["keep_versions"])
            engine = ModelFactory(config, pick_device(device), sha256, own_epochs, prepared, store.folder)
        except (KeyError, TypeError, ValueError) as problem:
            raise UserError(f"Version {requested} in {store.folder} is corrupted: {problem!r}.") from problem
        classifier = cls.__new__(cls)
        classifier._begin(engine, keep, head["model"])
        classifier._settings_note, classifier._kept = note, tuple(every)
        classifier._ancestors = {kept.version.number: kept.token for kept in every}
        return classifier


def _no_version(number: int, kept: Iterable[int]) -> str:
    return f"Version {number} does not exist. Available versions: {', '.join(map(str, kept)) or 'none'}."


@contextmanager
def changing(
    folder: str | Path, device: str | None = None, create: Mapping[str, Any] | None = None, busy: Busy | None = None
) -> Iterator[ContinualClassifier]:
    """Load a saved classifier, keep other processes from changing it, and save it at the end.

    Without a saved one, it is created with the arguments ``create``, if given. ``busy`` is called while another process
    changes the model; without ``busy`` that is an error.
    """
    store, classifier = Store(Path(folder).expanduser()), None
    if create is None or store.exists:
        store.head()
    else:
        classifier = ContinualClassifier(**{**create, **({"device": device} if device else {})})
    with store.locked(busy):
        classifier = classifier or ContinualClassifier._load(store, None, device)
        before = classifier.version
        yield classifier
        if not before or classifier.version != before:
            classifier._save(store)


def _answers(batch: JudgedBatch, names: tuple[str, ...], top_k: int) -> Iterator[Prediction]:
    """Yield the predictions of a batch, in order."""
    best, classes = (part.tolist() for part in batch.probabilities.topk(min(top_k, len(names)), dim=1))
    rows = zip(best, classes, batch.novelty.tolist(), strict=True)
    for image, pixels in batch.images:
        if isinstance(pixels, UnreadableImageError):
            yield Prediction(image.source, None, 0.0, (), False, 0.0, str(pixels))
            continue
        probabilities, labels, novelty = next(rows)
        top = tuple(zip((names[label] for label in labels), probabilities, strict=True))
        yield Prediction(image.source, *top[0], top, novelty > 1, novelty)


SMALL_VIT = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
"""Default backbone without a GPU."""
_NO_CLASSES = "The model has no classes yet. Teach it some with learn()."
_OWN_DATA = {"stored_size", "interpolation"}  # data settings that apply to a classifier


def make_config(
    preset: str | None,
    method: str,
    backbone: str | None,
    device: torch.device,
    seed: int,
    config: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> tuple[RunConfig, bool]:
    """Complete the settings; return with them whether the epochs are left open."""
    if not preset:
        others = "ridge" if presets.has_prompts(find(method)) else "matched"
        preset = "flagship" if method == "probprompt" else others
    base = presets.settings(preset, method, "emoji-r")
    base = {name: part for name, part in base.items() if name not in ("data", "backbone")}
    default = "sup1k" if device.type == "cuda" else SMALL_VIT
    named: dict[str, Any] = {"seeds": dict.fromkeys(("order", "init", "data"), seed), "method": {"name": method}}
    given = apply_values(merge(config or {}, named), settings)
    if backbone is not None:
        given = merge(given, {"backbone": {"name": backbone}})
    if method == "probprompt" and not {"evaluation_draws", "evaluation_samples"} & set(given["method"]):
        base = merge(base, {"method": {"evaluation": "mean"}})  # as in ONNX
    parsed = parse_config(merge(merge(base, {"backbone": {"name": default}}), given))
    _check_run_settings(parsed)
    if find(parsed.method.name).joint:
        raise UserError(
            f"Method {parsed.method.name!r} learns all classes jointly. Choose one that learns task by task."
        )
    return with_absolute_paths(parsed), "epochs" not in given.get("training", {})


def _check_run_settings(config: RunConfig) -> None:
    """Reject settings that only apply to runs."""
    default = DataConfig()
    for name in DataConfig.model_fields:
        if name not in _OWN_DATA and getattr(config.data, name) != getattr(default, name):
            raise UserError(f"data.{name} only applies to runs ('probprompt train'). Remove it.")
    if isinstance(config.head, ClosedFormSettings) and config.head.compensate_drift:
        raise UserError("head.compensate_drift only applies to runs ('probprompt train'). Remove it.")
