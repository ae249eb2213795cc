"""Audits of what there is: a run, a saved model, or a method, which is trained for it; the proof is written down."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from probprompt import methods, presets, randomness
from probprompt.backbones.vit import Precision
from probprompt.config import RunConfig, merge, parse_config, with_absolute_paths
from probprompt.data import datasets
from probprompt.data.datasets import ImageData
from probprompt.data.image_store import Loaded, load
from probprompt.data.transforms import Preprocessor, enlarged
from probprompt.engine.hardware import hardware, versions
from probprompt.engine.learner import Learner
from probprompt.engine.loader import TaskImages
from probprompt.engine.model import PromptedModel
from probprompt.engine.saved_model import LoadedModel, load_model
from probprompt.errors import UserError, shorten
from probprompt.evaluation.audit import CHECKS, TOLERANCES, Audit, Check, Tolerance, audit, compare, spread_of
from probprompt.methods.settings import Settings
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs.run import Run, config_hash
from probprompt.runs.train import TrainingSetup, prepare
from probprompt.storage import write_json

SAVED_IMAGES, METHOD_IMAGES = 64, 32
"""Images to audit a saved model, or a method, with."""
COMMON_TASKS = 2  # learned before the futures part
CLASS_IMAGES = 8  # training images of a class: to leak or not to leak needs no accuracy
_FUTURES = ("as it is", "another", "none")
_STRANGERS = 16  # images of classes not learned, at most
_UNSEEN = -1  # stands for the task of a class not learned


@dataclass(frozen=True)
class AuditReport:
    """An audit, and what it is about."""

    subject: str
    audit: Audit
    about: dict[str, Any]
    """Method, marks, model, images, versions, hardware."""
    written: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**self.audit.to_json(), "subject": self.subject, **self.about}


@dataclass(frozen=True)
class Sample:
    """Images to audit with, as the backbone is fed."""

    images: Tensor  # (n, 3, H, W)
    tasks: Tensor  # (n,)
    strangers: Tensor | None  # (m, 3, H, W): of classes not learned
    source: str
    keys: Tensor | None = None  # (n,): computed from the stored pixels

    def audit(self, model: PromptedModel, classes: int, progress: ProgressCallback) -> Audit:
        """Audit a model that knows the given number of classes."""
        return audit(model, self.images, self.tasks, classes, self.strangers, self.keys, progress.advance)


# A saved model --------------------------------------------------------------------------------------------------


def audit_saved(
    folder: Path,
    device: torch.device,
    precision: Precision = "fp32",
    count: int = SAVED_IMAGES,
    data: str | None = None,
    progress: ProgressCallback = SILENT,
) -> AuditReport:
    """Audit the model of a run, or a model's own folder, and write the proof into the record or beside the model.

    The images are those that the run was evaluated on, or of ``data`` (a folder or a benchmark), or else noise.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not the folder of a run or of a model; a method is audited by its name, with --method NAME"
        )
    run = Run.open(folder) if (folder / "run.json").is_file() else None
    with run.locked() if run else nullcontext():
        loaded = load_model(folder, device)
        note = loaded.note
        if data is not None:
            images = datasets.find(data).load(_stored_side(loaded))
            sample = _sample(images, False, data, loaded, count, device, progress)
        elif run:
            sample = _run_sample(run, loaded, count, device, progress)
        else:
            size = note["preprocessing"]["image_size"]
            noise = randomness.normal((count, 3, size, size), 0, "audit", "images").to(device)
            sample = Sample(noise, torch.zeros(count, dtype=torch.long, device=device), None, "noise")
        loaded.model.set_precision(precision)
        with progress.stage("auditing", CHECKS):
            outcome = sample.audit(loaded.model, len(loaded.class_names), progress)
        about = {"method": note["method"], "marks": note["marks"], "model": note["tensors"], "images_of": sample.source}
        home = folder if run or (folder / "model.json").is_file() else folder / "model"
        written = home / ("run.json" if run else "audit.json")
        proof = AuditReport(str(folder), outcome, {**about, **_circumstances(device)}, written)
        if run:
            run.update(audit=proof.to_json())
        else:
            write_json(written, proof.to_json())
        return proof


def _run_sample(run: Run, loaded: LoadedModel, count: int, device: torch.device, progress: ProgressCallback) -> Sample:
    """Images that the run was evaluated on; others than at its time are refused."""
    config, record = run.config.data, run.record
    benchmark = datasets.find(config.benchmark, config.test, config.test_fraction, config.root)
    found = benchmark.load(config.short_side(_stored_side(loaded)))
    found = benchmark.select(found, config.validation, config.per_class)
    before, now = record.stream.split_hash, found.split_hash()
    if before != now:
        raise UserError(
            f"the images of {config.benchmark} are not those of the run (hash {before[:12]}, now {now[:12]}): "
            "put them back, or audit with images of another folder (--data FOLDER)"
        )
    source = f"{config.benchmark} ({record.evaluated_on})"
    return _sample(found, config.skip_unreadable, source, loaded, count, device, progress)


def _sample(
    data: ImageData,
    skip_unreadable: bool,
    source: str,
    loaded: LoadedModel,
    count: int,
    device: torch.device,
    progress: ProgressCallback,
) -> Sample:
    """Choose test images, spread over the tasks learned, and some of classes that were not, and read them."""
    tasks_learned = (task for task, size in enumerate(loaded.note["task_sizes"]) for _ in range(size))
    learned = dict(zip(loaded.class_names, tasks_learned, strict=True))
    task_of = [learned.get(name, _UNSEEN) for name in data.class_names]
    groups: dict[int, list[int]] = {}
    for row, label in enumerate(data.test.labels.tolist()):
        groups.setdefault(task_of[label], []).append(row)
    unseen = groups.pop(_UNSEEN, [])
    if not groups:
        raise UserError(
            f"{source} has no test image of the classes that the model knows ({shorten(loaded.class_names)}): "
            "name a folder of such images, or leave --data away to audit with noise"
        )
    chosen = [row for group in groups.values() for row in _spread(group, -(-count // len(groups)))]
    others = _spread(unseen, _STRANGERS)
    with progress.stage("reading images", len(chosen) + len(others)):
        own, strange = (load(data.test.subset(rows), device, progress.advance) for rows in (chosen, others))
    unreadable = [name for name, _ in (*own.unreadable, *strange.unreadable)]
    if unreadable and not skip_unreadable:
        raise UserError(f"{len(unreadable)} image(s) cannot be read, repair or remove them: {shorten(unreadable)}")
    note = loaded.note["preprocessing"]
    size, resized, mean, std = (note[name] for name in ("image_size", "resized", "mean", "std"))
    view = Preprocessor.of(size, resized, mean, std, note.get("interpolation", "bilinear"), device)
    tasks = torch.tensor([task_of[label] for label in own.labels.tolist()], device=device)
    keys = own.store.keys(torch.arange(len(own.labels), device=device))
    return Sample(_views(view, own), tasks, _views(view, strange) if len(strange.labels) else None, source, keys)


def _stored_side(loaded: LoadedModel) -> int:
    return enlarged(int(loaded.note["preprocessing"]["image_size"]))


def _views(viewer: Preprocessor, images: Loaded) -> Tensor:
    return viewer.evaluation(images.store, torch.arange(len(images.labels), device=images.labels.device))


def _spread(rows: list[int], count: int) -> list[int]:
    """At most so many of the rows, evenly from all over them."""
    places = torch.linspace(0, len(rows) - 1, min(count, len(rows))).round().long().tolist()
    return [rows[place] for place in places]


# A method -------------------------------------------------------------------------------------------------------


def quick_config(method: str, benchmark: str, given: Mapping[str, Any]) -> RunConfig:
    """Return the settings of the shortest training that an audit of a method needs: an epoch of a few images."""
    quick: Settings = {"training": {"epochs": 1, "batch_size": 8}, "alignment": {"epochs": 1}, "head": {"kind": None}}
    if methods.find(method).preferred_head == "ridge":
        quick["head"]["projections"] = 256
    settings = merge(presets.settings("matched", method, benchmark), quick)
    return with_absolute_paths(parse_config(merge(settings, given)))


def audit_method(
    config: RunConfig,
    device: torch.device,
    precision: Precision = "fp32",
    count: int = METHOD_IMAGES,
    progress: ProgressCallback = SILENT,
) -> AuditReport:
    """Train a method on the first tasks of a stream, under several futures, and audit what it has become.

    The streams agree in the tasks that are learned. After them come the benchmark's classes; or the same in another
    order and number of tasks, with other images; or nothing at all. The models must be the same.
    """
    models, subject = list[PromptedModel](), config.method.name
    first = prepare(config, device, SILENT)
    common = max(1, min(COMMON_TASKS, len(first.tasks) - 1))
    futures, other = (_FUTURES if common < len(first.tasks) else _FUTURES[:1]), _with_another_future(first, common)
    with progress.stage(subject, len(futures) * common + CHECKS):
        for future in futures:
            workshop = first if future == _FUTURES[0] else prepare(other, device, SILENT)
            learner, tasks = _world(workshop, future, common)
            with _deterministic(device):
                for task in tasks:
                    learner.fit(task)
                    progress.advance(1)
            models.append(learner.model)
        sample = _test_sample(first, common, count)
        known = sum(task.classes for task in first.tasks[:common])
        same = _future(models, sample, device)
        model = models[0]
        model.set_precision(precision)
        outcome = sample.audit(model, known, progress).also(same)
        progress.describe("independent" if outcome.passed else f"leaks: {', '.join(outcome.leaks)}")
    about = {
        "method": config.to_stored()["method"],
        "marks": list(config.method.marks()),
        "config_hash": config_hash(config),
        "images_of": sample.source,
    }
    return AuditReport(subject, outcome, {**about, **_circumstances(device)})


def _with_another_future(workshop: TrainingSetup, common: int) -> RunConfig:
    """Settings whose tasks are others after the common ones."""
    names = [tuple(workshop.class_names[label] for label in task.classes) for task in workshop.stream]
    later = [name for group in reversed(names[common:]) for name in reversed(group)]
    half = len(later) // 2 if len(names) - common == 1 else 0
    others = (later[:half], later[half:]) if half > 1 else (later,)  # another number, but no task of one class
    groups = (*names[:common], *map(tuple, others))
    data = workshop.config.data.model_copy(update={"tasks": groups})
    return workshop.config.model_copy(update={"data": data})


def _world(workshop: TrainingSetup, future: str, common: int) -> tuple[Learner, list[TaskImages]]:
    """A learner that knows of this future, and the tasks before it."""
    learner, tasks = workshop.learner, [_thinned(task) for task in workshop.tasks[:common]]
    if future == "another":
        later = torch.cat([task.rows for task in workshop.tasks[common:]])
        learner.loader.images = replace(learner.images, store=learner.images.store.inverted(later))
    if future == "none":
        data = workshop.config.data
        assert isinstance(data.tasks, tuple)
        config = workshop.config.model_copy(update={"data": data.model_copy(update={"tasks": data.tasks[:common]})})
        kept = torch.cat([task.rows for task in workshop.tasks[:common]])
        images = learner.images
        names = tuple(images.names[row] for row in kept.tolist())
        left = Loaded(images.store.only(kept), images.labels[kept], names)
        learner = Learner(learner.model, left, learner.viewer, config)
        tasks = [replace(task, rows=(task.rows[:, None] == kept).int().argmax(dim=1)) for task in tasks]
    return learner, tasks


def _thinned(task: TaskImages) -> TaskImages:
    """The first few images of each class."""
    labels = range(task.first, task.first + task.classes)
    few = torch.cat([(task.labels == label).nonzero()[:CLASS_IMAGES, 0] for label in labels])
    return replace(task, rows=task.rows[few], labels=task.labels[few])


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Ask for kernels that repeat to the bit: on a GPU not all of them do by themselves."""
    before = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # where there is no such kernel, the comparison has a tolerance
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # the gradients of fused attention do not repeat
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=lenient)


def _future(models: list[PromptedModel], sample: Sample, device: torch.device) -> Check:
    """Compare models that learned the same tasks and were to meet other ones: in training precision."""
    name, question = "future classes", "trained with other tasks to come, and with none"
    if len(models) < 2:
        return Check(name, question, note="not applicable: all classes are learned at once")
    keys = sample.keys if models[0].method.needs_keys else None
    expected, *others = (model.predict(sample.images, keys=keys) for model in models)
    tolerance = Tolerance(0.0) if device.type == "cpu" else TOLERANCES["fp32"]
    return compare(name, question, others, expected, spread_of(expected), tolerance)


def _test_sample(workshop: TrainingSetup, common: int, count: int) -> Sample:
    """Test images, spread over the tasks learned, and some of the tasks to come."""
    scorer, tasks = workshop.scorer, workshop.test_tasks
    joint = len(workshop.tasks) < len(tasks)
    learned = tasks if joint else tasks[:common]
    rows = [_spread(task.rows.tolist(), -(-count // len(learned))) for task in learned]
    numbers = [0 if joint else task for task, group in enumerate(rows) for _ in group]
    later = [row for task in tasks[len(learned) :] for row in task.rows.tolist()]

    def views(chosen: list[int]) -> Tensor:
        return scorer.viewer.evaluation(scorer.images.store, torch.tensor(chosen, device=workshop.device))

    strangers = views(_spread(later, _STRANGERS)) if later else None
    chosen = [row for group in rows for row in group]
    keys = scorer.images.store.keys(torch.tensor(chosen, device=workshop.device))
    kind = "validation" if workshop.config.data.validation else "test"
    source = f"{workshop.config.data.benchmark} ({kind})"
    return Sample(views(chosen), torch.tensor(numbers, device=workshop.device), strangers, source, keys)


def _circumstances(device: torch.device) -> dict[str, str | Mapping[str, str | int]]:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": created, "versions": versions(), "hardware": hardware(device)}
