"""Leakage audits of runs, saved models and methods."""

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

SAVED_IMAGES, METHOD_IMAGES = 64, 32  # number of images to audit a saved model, or a method, with
COMMON_TASKS = 2  # learned before the futures differ
CLASS_IMAGES = 8  # training images per class; a leakage audit needs no accuracy
_FUTURES = ("unchanged", "another", "none")
_STRANGERS = 16  # most images of classes not learned
_UNSEEN = -1  # task of a class not learned


@dataclass(frozen=True)
class AuditReport:
    """An audit and its subject."""

    subject: str
    audit: Audit
    about: dict[str, Any]
    """Method, marks, model, images, versions, hardware."""
    written: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {**self.audit.to_json(), "subject": self.subject, **self.about}


@dataclass(frozen=True)
class Sample:
    """Images to audit with, preprocessed."""

    images: Tensor  # (n, 3, H, W)
    tasks: Tensor  # (n,)
    strangers: Tensor | None  # (m, 3, H, W): of classes not learned
    source: str
    keys: Tensor | None = None  # (n,): computed from the stored pixels

    def audit(self, model: PromptedModel, classes: int, progress: ProgressCallback) -> Audit:
        """Audit a model that knows the given number of classes."""
        return audit(model, self.images, self.tasks, classes, self.strangers, self.keys, progress.advance)


def audit_saved(
    folder: Path,
    device: torch.device,
    precision: Precision = "fp32",
    count: int = SAVED_IMAGES,
    data: str | None = None,
    progress: ProgressCallback = SILENT,
) -> AuditReport:
    """Audit a run or model with its images, those of ``data``, or noise; write the report."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder of a run or model. To audit a method, use --method NAME.")
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
        report = AuditReport(str(folder), outcome, {**about, **_circumstances(device)}, written)
        if run:
            run.update(audit=report.to_json())
        else:
            write_json(written, report.to_json())
        return report


def _run_sample(run: Run, loaded: LoadedModel, count: int, device: torch.device, progress: ProgressCallback) -> Sample:
    """Return images that the run was evaluated on; raise an error if they have changed."""
    config, record = run.config.data, run.record
    benchmark = datasets.find(config.benchmark, config.test, config.test_fraction, config.root)
    data = benchmark.load(config.short_side(_stored_side(loaded)))
    data = benchmark.select(data, config.validation, config.per_class)
    before, now = record.stream.split_hash, data.split_hash()
    if before != now:
        raise UserError(
            f"The images of {config.benchmark} have changed since the run (hash {before[:12]}, now {now[:12]}). "
            "Restore them, or audit with other images (--data FOLDER)."
        )
    source = f"{config.benchmark} ({record.evaluated_on})"
    return _sample(data, config.skip_unreadable, source, loaded, count, device, progress)


def _sample(
    data: ImageData,
    skip_unreadable: bool,
    source: str,
    loaded: LoadedModel,
    count: int,
    device: torch.device,
    progress: ProgressCallback,
) -> Sample:
    """Load test images spread over the learned tasks, and some of classes not learned."""
    tasks_learned = (task for task, size in enumerate(loaded.note["task_sizes"]) for _ in range(size))
    learned = dict(zip(loaded.class_names, tasks_learned, strict=True))
    task_of = [learned.get(name, _UNSEEN) for name in data.class_names]
    groups: dict[int, list[int]] = {}
    for row, label in enumerate(data.test.labels.tolist()):
        groups.setdefault(task_of[label], []).append(row)
    unseen = groups.pop(_UNSEEN, [])
    if not groups:
        raise UserError(
            f"{source} has no test images of the model's classes ({shorten(loaded.class_names)}). "
            "Pass a folder of such images, or remove --data to audit with noise."
        )
    chosen = [row for group in groups.values() for row in _spread(group, -(-count // len(groups)))]
    others = _spread(unseen, _STRANGERS)
    with progress.stage("reading images", len(chosen) + len(others)):
        own, strange = (load(data.test.subset(rows), device, progress.advance) for rows in (chosen, others))
    unreadable = [name for name, _ in (*own.unreadable, *strange.unreadable)]
    if unreadable and not skip_unreadable:
        raise UserError(f"Cannot read {len(unreadable)} image(s): {shorten(unreadable)}. Repair or remove them.")
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
    """Return up to ``count`` rows, evenly spaced."""
    places = torch.linspace(0, len(rows) - 1, min(count, len(rows))).round().long().tolist()
    return [rows[place] for place in places]


def quick_config(method: str, benchmark: str, given: Mapping[str, Any]) -> RunConfig:
    """Return the settings of a short training for the audit of a method."""
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
    """Train a method on the first tasks under several futures, and audit it.

    The streams share the tasks that are learned. They continue with the benchmark's classes, with the same in another
    order and number of tasks and with other images, or not at all. The models must be identical.
    """
    models, subject = list[PromptedModel](), config.method.name
    first = prepare(config, device, SILENT)
    common = max(1, min(COMMON_TASKS, len(first.tasks) - 1))
    futures, other = (_FUTURES if common < len(first.tasks) else _FUTURES[:1]), _with_another_future(first, common)
    with progress.stage(subject, len(futures) * common + CHECKS):
        for future in futures:
            setup = first if future == _FUTURES[0] else prepare(other, device, SILENT)
            learner, tasks = _learner_before(setup, future, common)
            with _deterministic(device):
                for task in tasks:
                    learner.fit(task)
                    progress.advance(1)
            models.append(learner.model)
        sample = _test_sample(first, common, count)
        known = sum(task.classes for task in first.tasks[:common])
        same = _future_classes(models, sample, device)
        model = models[0]
        model.set_precision(precision)
        outcome = sample.audit(model, known, progress).also(same)
        progress.describe(outcome.verdict)
    about = {
        "method": config.to_stored()["method"],
        "marks": list(config.method.marks()),
        "config_hash": config_hash(config),
        "images_of": sample.source,
    }
    return AuditReport(subject, outcome, {**about, **_circumstances(device)})


def _with_another_future(setup: TrainingSetup, common: int) -> RunConfig:
    """Return settings with other tasks after the common ones."""
    names = [tuple(setup.class_names[label] for label in task.classes) for task in setup.stream]
    later = [name for group in reversed(names[common:]) for name in reversed(group)]
    half = len(later) // 2 if len(names) - common == 1 else 0
    others = (later[:half], later[half:]) if half > 1 else (later,)  # another number of tasks, none of one class
    groups = (*names[:common], *map(tuple, others))
    data = setup.config.data.model_copy(update={"tasks": groups})
    return setup.config.model_copy(update={"data": data})


def _learner_before(setup: TrainingSetup, future: str, common: int) -> tuple[Learner, list[TaskImages]]:
    """Return a learner for a future, and the tasks before it."""
    learner, tasks = setup.learner, [_reduced(task) for task in setup.tasks[:common]]
    if future == "another":
        later = torch.cat([task.rows for task in setup.tasks[common:]])
        learner.loader.images = replace(learner.images, store=learner.images.store.inverted(later))
    if future == "none":
        data = setup.config.data
        assert isinstance(data.tasks, tuple)
        config = setup.config.model_copy(update={"data": data.model_copy(update={"tasks": data.tasks[:common]})})
        kept = torch.cat([task.rows for task in setup.tasks[:common]])
        images = learner.images
        names = tuple(images.names[row] for row in kept.tolist())
        left = Loaded(images.store.only(kept), images.labels[kept], names)
        learner = Learner(learner.model, left, learner.viewer, config)
        tasks = [replace(task, rows=(task.rows[:, None] == kept).int().argmax(dim=1)) for task in tasks]
    return learner, tasks


def _reduced(task: TaskImages) -> TaskImages:
    """Return the task with the first few images of each class."""
    labels = range(task.first, task.first + task.classes)
    few = torch.cat([(task.labels == label).nonzero()[:CLASS_IMAGES, 0] for label in labels])
    return replace(task, rows=task.rows[few], labels=task.labels[few])


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic kernels; on a GPU not all are by default."""
    before = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # without such a kernel, the comparison has a tolerance
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # gradients of fused attention vary
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=lenient)


def _future_classes(models: list[PromptedModel], sample: Sample, device: torch.device) -> Check:
    """Compare models that learned the same tasks before different ones, in training precision."""
    name, question = "future classes", "trained before other tasks, and before none"
    if len(models) < 2:
        return Check(name, question, note="not applicable: all classes are learned jointly")
    keys = sample.keys if models[0].method.needs_keys else None
    expected, *others = (model.predict(sample.images, keys=keys) for model in models)
    tolerance = Tolerance(0.0) if device.type == "cpu" else TOLERANCES["fp32"]
    return compare(name, question, others, expected, spread_of(expected), tolerance)


def _test_sample(setup: TrainingSetup, common: int, count: int) -> Sample:
    """Return test images spread over the learned tasks, and some of later tasks."""
    scorer, tasks = setup.scorer, setup.test_tasks
    joint = len(setup.tasks) < len(tasks)
    learned = tasks if joint else tasks[:common]
    rows = [_spread(task.rows.tolist(), -(-count // len(learned))) for task in learned]
    numbers = [0 if joint else task for task, group in enumerate(rows) for _ in group]
    later = [row for task in tasks[len(learned) :] for row in task.rows.tolist()]

    def views(chosen: list[int]) -> Tensor:
        return scorer.viewer.evaluation(scorer.images.store, torch.tensor(chosen, device=setup.device))

    strangers = views(_spread(later, _STRANGERS)) if later else None
    chosen = [row for group in rows for row in group]
    keys = scorer.images.store.keys(torch.tensor(chosen, device=setup.device))
    kind = "validation" if setup.config.data.validation else "test"
    source = f"{setup.config.data.benchmark} ({kind})"
    return Sample(views(chosen), torch.tensor(numbers, device=setup.device), strangers, source, keys)


def _circumstances(device: torch.device) -> dict[str, str | Mapping[str, str | int]]:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": created, "versions": versions(), "hardware": hardware(device)}
