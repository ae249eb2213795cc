"""Train and resume runs: learn task after task, score after each, record everything."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from probprompt.backbones.pretrained import LoadedBackbone
from probprompt.backbones.vit import Precision
from probprompt.config import RunConfig
from probprompt.data import datasets, verify
from probprompt.data.cache import ImageCache
from probprompt.data.datasets import ImageData
from probprompt.data.image_store import Loaded, check_readable, load_kept
from probprompt.data.published import Dataset
from probprompt.data.stream import Task, build_stream, order_hash
from probprompt.data.transforms import enlarged
from probprompt.distributed import ALONE, World, from_environment, join
from probprompt.engine import build
from probprompt.engine.build import default_precision, pick_device
from probprompt.engine.hardware import hardware, versions
from probprompt.engine.learner import Callbacks, EpochResult, Learner
from probprompt.engine.loader import TaskImages, queries_of
from probprompt.engine.saved_model import disk_sizes, learner_tensors, save_model
from probprompt.engine.scorer import Scorer
from probprompt.errors import UserError, shorten, suggest
from probprompt.evaluation import diagnostics, metrics
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs.checkpoint import Checkpoint, CheckpointTimer, Position, load_checkpoint, save_checkpoint
from probprompt.runs.run import Run, RunRecord, check_unused, config_hash
from probprompt.storage import write_json

TRACKERS = {"tensorboard": ("torch.utils.tensorboard", "track"), "trackio": ("trackio",) * 2, "wandb": ("wandb",) * 2}
"""Module of each experiment tracker, and the extra that installs it."""


def check_tracker(name: str) -> ModuleType:
    """Import the module of a tracker, or raise an error if it is unknown or not installed."""
    if name not in TRACKERS:
        raise UserError(f"Unknown tracker {name!r}. {suggest(name, TRACKERS)}")
    module, extra = TRACKERS[name]
    try:
        return import_module(module)
    except ImportError:
        raise UserError(f"{name} is not installed. Run pip install 'probprompt[{extra}]'.") from None


class Tracker:
    """Sends named numbers to TensorBoard, trackio or wandb."""

    def __init__(self, name: str, folder: Path, config: RunConfig) -> None:
        self._module = check_tracker(name)
        self._board = self._module.SummaryWriter(str(folder / name)) if name == "tensorboard" else None
        if self._board is None:
            self._module.init(project="probprompt", name=folder.name, config=config.to_stored())

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send numbers at a step."""
        if self._board is None:
            self._module.log(dict(values), step=step)
            return
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Send what is left."""
        if self._board is None:
            self._module.finish()
        else:
            self._board.close()


@dataclass(frozen=True)
class TrainingSetup:
    """Everything a run works with."""

    config: RunConfig
    device: torch.device
    backbone: LoadedBackbone
    class_names: tuple[str, ...]
    stream: tuple[Task, ...]
    tasks: list[TaskImages]  # tasks to train, in order
    test_tasks: list[TaskImages]  # tasks to evaluate: the same, also if all are trained jointly
    learner: Learner
    scorer: Scorer
    split_hash: str
    differences: list[str]  # differences of the images from a published dataset, as text
    order_hash: str
    skipped: list[str]
    loading_s: float = 0.0  # seconds that the setup took
    world: World = ALONE

    @property
    def task_names(self) -> list[list[str]]:
        """Classes of each task that is trained."""
        order = [self.class_names[label] for task in self.stream for label in task.classes]
        return [order[task.first : task.first + task.classes] for task in self.tasks]


def train(
    config: RunConfig,
    out: Path,
    device: str | None = None,
    progress: ProgressCallback = SILENT,
    track: str | None = None,
) -> Run:
    """Execute a new run in a new folder; under torchrun, jointly with the other processes."""
    progress, writes = _on_main_process(progress), from_environment().writes
    if writes:
        check_unused(out)
    if track:
        check_tracker(track)
    world, place = join(pick_device(device))
    out = world.agree(out)  # its name may depend on existing folders
    precision = world.agree(config.backbone.precision or default_precision(place))  # GPUs may differ
    with world.in_turn():
        setup = prepare(config, place, progress, None, world, precision)
    run = Run.create(out, describe(setup, out.name)) if writes else Run(out)
    with run.locked() if writes else nullcontext():
        return _execute(run, setup, None, progress, track)


def resume(out: Path, device: str | None = None, progress: ProgressCallback = SILENT, track: str | None = None) -> Run:
    """Resume a run from its last checkpoint; the number of processes may differ."""
    progress = _on_main_process(progress)
    run = Run.open(out)
    if track:
        check_tracker(track)
    if run.finished:
        progress.note(f"{out} is already finished.")
        return run
    with run.locked() if from_environment().writes else nullcontext():
        record = run.record
        start_device = record.hardware.device
        world, place = join(pick_device(device or start_device))
        with world.in_turn():
            weights = record.backbone
            setup = prepare(run.config, place, progress, weights.sha256, world, weights.precision, out)
        if setup.device.type != start_device:
            progress.note(f"Started on {start_device}, resuming on {setup.device.type}: random draws will differ.")
        setup.learner.viewer.check_record(record.preprocessing.to_json())
        _check_data(record, setup)
        saved = None
        if run.checkpoint.exists():
            saved = load_checkpoint(run.checkpoint, record.config_hash, setup.device)
            saved.restore(setup.learner, setup.tasks)
        position = saved.position if saved else Position()
        more = {} if world.alone else {"world_size": world.size}
        if world.writes:
            run.log("resumed", task=position.task, epoch=position.epoch, device=setup.device.type, **more)
        return _execute(run, setup, saved, progress, track)


def _on_main_process(progress: ProgressCallback) -> ProgressCallback:
    """Return the callback on the main process and a silent one elsewhere."""
    return progress if from_environment().writes else SILENT


def prepare(
    config: RunConfig,
    device: torch.device,
    progress: ProgressCallback,
    expected_sha256: str | None = None,
    world: World = ALONE,
    precision: Precision | None = None,
    home: Path | None = None,
) -> TrainingSetup:
    """Load and check images and backbone, and build the learner; nothing is written."""
    start = time.perf_counter()
    if device.type == "cuda" and torch.cuda.memory_allocated(device):
        build.release(device)  # memory of an earlier run of this process
    source = datasets.find(config.data.benchmark, config.data.test, config.data.test_fraction, config.data.root)
    backbone = build.load_frozen(config.backbone, expected_sha256, home)
    size = backbone.preprocessing.image_size
    short_side = enlarged(size)
    with progress.stage("opening data", 1) if source.remote else nullcontext():
        notes = source.notes()  # may download the images
        if source.remote:
            progress.advance(1)
    for note in notes:
        progress.note(note)
    data = source.load(config.data.short_side(short_side))
    differences = verify.differences(source, data) if isinstance(source, Dataset) else []
    for difference in differences:
        progress.note(f"{source.name} differs from the published dataset: {difference}")
    data = source.select(data, config.data.validation, config.data.per_class)
    _check_classes(data, config.data.benchmark)
    tasks_given = config.data.tasks or source.default_tasks(len(data.class_names))
    stream = build_stream(data.class_names, tasks_given, config.seeds.order)
    train, test = load_kept((data.train, data.test), device, progress, ImageCache.default())
    skipped = check_readable((train, test), data.class_names, config.data.skip_unreadable)
    model = build.build_model(config, backbone, device, precision)
    crops = source.enlarge if config.data.center_crop is None else config.data.center_crop
    viewer = build.build_preprocessor(config, backbone, device, short_side if crops else size)
    split, order, joint = data.split_hash(), order_hash(stream, data.class_names), model.method.joint
    # Everything that determines the views of an epoch, their order, and the backbone's output for them.
    training, chosen = config.training, config.backbone
    weights = (backbone.sha256, model.precision, chosen.image_size, chosen.normalization, model.method.query_readout)
    views = (config.data.stored_size, training.augmentation, training.crop_scale, training.flip, config.seeds.data)
    learner = Learner(model, train, viewer, config, world, queries_of((weights, split, order, joint, views)))
    tasks = _task_images((Task.joined(stream),) if joint else stream, train)
    for task in tasks:
        learner.check(task)
    return TrainingSetup(
        config=config,
        device=device,
        backbone=backbone,
        class_names=data.class_names,
        stream=stream,
        tasks=tasks,
        test_tasks=_task_images(stream, test),
        learner=learner,
        scorer=Scorer(model, test, viewer, config.images_at_a_time(device.type), world),
        split_hash=split,
        differences=differences,
        order_hash=order,
        loading_s=time.perf_counter() - start,
        skipped=skipped,
        world=world,
    )


def _check_classes(data: ImageData, name: str) -> None:
    """Raise an error for classes without training or test images."""
    for split, images in (("training", data.train), ("test", data.test)):
        present = set(images.labels.tolist())
        empty = [class_name for label, class_name in enumerate(data.class_names) if label not in present]
        if empty:
            raise UserError(f"{name} has no {split} images of {shorten(empty)}. Add some, or remove these classes.")


def _task_images(stream: tuple[Task, ...], images: Loaded) -> list[TaskImages]:
    """Return the rows of each task's images, with labels in order of appearance."""
    order = torch.tensor([label for task in stream for label in task.classes], device=images.labels.device)
    appearance = torch.empty_like(order)
    appearance[order] = torch.arange(len(order), device=order.device)
    labels = appearance[images.labels]  # (n,)
    tasks = []
    for task in stream:
        rows = ((labels >= task.first) & (labels < task.first + len(task.classes))).nonzero().flatten()
        tasks.append(TaskImages(task.index, task.first, len(task.classes), rows, labels[rows]))
    return tasks


def describe(setup: TrainingSetup, name: str) -> RunRecord:
    """Return the record of a run before it starts."""
    config, backbone, model = setup.config, setup.backbone, setup.learner.model
    stored = config.to_stored()
    content = {
        "name": name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "status": "running",
        "config": stored,
        "config_hash": config_hash(config),
        "backbone": {
            "name": backbone.name,
            "source": backbone.source,
            "sha256": backbone.sha256,
            "parameters": sum(parameter.numel() for parameter in backbone.model.parameters()),
            "precision": model.precision,
        },
        "preprocessing": {**setup.learner.viewer.record(), "normalisation": config.backbone.normalization},
        "data": {"train": setup.learner.images.describe(), "test": setup.scorer.images.describe()},
        "stream": {
            "classes": [name for task in setup.task_names for name in task],
            "tasks": setup.task_names,
            "order_hash": setup.order_hash,
            "split_hash": setup.split_hash,
            "differences": setup.differences,
            "train_images": [len(task) for task in setup.tasks],
            "test_images": [len(task) for task in setup.test_tasks],
            "test_classes": [task.classes for task in setup.test_tasks],
        },
        "versions": versions(),
        "hardware": hardware(setup.device),
        "world_size": setup.world.size,
        "evaluated_on": "validation" if config.data.validation else "test",
        "head": stored["head"]["kind"],
        "joint": model.method.joint,
        "marks": list(config.method.marks()),
        "skipped": setup.skipped,
    }
    return RunRecord.model_validate(content)


def _check_data(record: RunRecord, setup: TrainingSetup) -> None:
    stream, remedy = record.stream, "Restore them, or start a new run."
    hashes = {"train": setup.learner.images.sha256, "test": setup.scorer.images.sha256}
    pixels = {split: (images.pixels_sha256 or "", hashes[split] or "") for split, images in record.data.items()}
    for what, before, after in (
        ("tasks", stream.order_hash, setup.order_hash),
        ("images", stream.split_hash, setup.split_hash),
        # Pixels of files have a hash only if they are cached on disk.
        *((f"pixels of the {split} images", *pair) for split, pair in pixels.items() if all(pair)),
    ):
        if before != after:
            raise UserError(
                f"The {what} of {setup.config.data.benchmark} have changed since the run started "
                f"(hash {before[:12]}, now {after[:12]}). {remedy}"
            )
    changed = sorted(set(record.skipped) ^ set(setup.skipped))
    if changed:
        raise UserError(f"The unreadable images have changed since the run started ({shorten(changed)}). {remedy}")


def _execute(
    run: Run, setup: TrainingSetup, saved: Checkpoint | None, progress: ProgressCallback, track: str | None
) -> Run:
    import_module("sklearn.manifold")  # for the diagnostics; keeps the import out of the recorded times
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.device)
    tracker = Tracker(track, run.folder, setup.config) if track and setup.world.writes else None
    try:
        RunLoop(run, setup, saved, progress, tracker).run_all()
    finally:
        if tracker:
            tracker.close()
    setup.world.barrier()  # all processes return to a finished run
    return run


@dataclass(eq=False)
class RunLoop(Callbacks):
    """Trains, scores and records task after task; only the first process writes."""

    run: Run
    setup: TrainingSetup
    saved: Checkpoint | None
    progress: ProgressCallback
    tracker: Tracker | None

    def __post_init__(self) -> None:
        self.learner, count = self.setup.learner, len(self.setup.tasks)
        self.position = self.saved.position if self.saved else Position(matrix=[[None] * count for _ in range(count)])
        self.writes = self.setup.world.writes
        self._start = time.perf_counter()
        self._before = sum(self.position.seconds.values())
        self._spend("loading_s", self.setup.loading_s)
        self._timer = CheckpointTimer(lambda: sum(part.nbytes for part in learner_tensors(self.learner).values()))

    def run_all(self) -> None:
        """Train the remaining tasks, and write the diagnostics."""
        for task in self.setup.tasks[self.position.task :]:
            self.learn(task)
        with self.timed("diagnostics_s"):
            content = diagnose(self.setup)
            if not self.writes:
                return
            write_json(self.run.folder / "diagnostics.json", content)
        timed = sum(self.position.seconds.values()) - self._before - self.setup.loading_s
        self._spend("other_s", time.perf_counter() - self._start - timed)
        self.run.update(
            status="finished",
            time={**self.position.seconds, "total_s": sum(self.position.seconds.values())},
            peak_memory_mb=_peak_memory(self.setup.device),
            trainable_parameters=self.learner.parameters(),
            model_mb=disk_sizes(self.run.model),
        )

    def learn(self, task: TaskImages) -> None:
        """Train a task and score all tasks so far."""
        resume = self.saved.mid_task if self.saved else None
        with self.progress.stage(f"task {task.index + 1} of {len(self.setup.tasks)}", self.learner.work(task)):
            self.learner.fit(task, resume=resume, progress=self.progress, callbacks=self)
            with self.timed("evaluation_s"):
                self.progress.describe("evaluating")
                scores = self._score(task.index)
            self.progress.describe(f"average accuracy {np.mean(scores):.1f}%")
        self._finish_task(task, scores)

    def epoch_done(self, task: TaskImages, epoch: int, result: EpochResult, optimizer: Optimizer) -> None:
        """Log and track an epoch, and write a checkpoint if it is time."""
        if self.writes:
            self.run.log("epoch", task=task.index, epoch=epoch, **vars(result))
        if self.tracker:
            step = task.index * self.setup.config.training.epochs + epoch
            self.tracker.log({"loss": result.loss, "training accuracy": result.accuracy, "rate": result.rate}, step)
        self.position.task, self.position.epoch = task.index, epoch + 1
        if self.writes and self._timer.due():
            self._checkpoint(optimizer)

    def _score(self, step: int) -> list[float]:
        joint = self.learner.model.method.joint
        seen = self.setup.test_tasks[: None if joint else step + 1]
        scores = [self.setup.scorer.accuracy(task.rows, task.labels) for task in seen]
        if self.writes:
            self.run.log("task", task=step, accuracies=scores)
        return [float(np.mean(scores))] if joint else scores  # one step: its average

    def _finish_task(self, task: TaskImages, scores: list[float]) -> None:
        for row, score in enumerate(scores):
            self.position.matrix[row][task.index] = score
        if self.tracker:
            step = (task.index + 1) * self.setup.config.training.epochs - 1
            self.tracker.log({"average accuracy": float(np.mean(scores))}, step)
        self.position.task, self.position.epoch = task.index + 1, 0
        if not self.writes:
            return
        self.run.write_accuracy(metrics.from_json(self.position.matrix))
        last = task.index + 1 == len(self.setup.tasks)
        if last or self._timer.due():
            with self.timed("saving_s"):
                save_model(self.run.model, self.learner, self._model_note(task), learning=last)
            self._checkpoint(None)

    def _checkpoint(self, optimizer: Optimizer | None) -> None:
        with self.timed("saving_s"), self._timer.timed():
            save_checkpoint(self.run.checkpoint, self.run.record.config_hash, self.position, self.learner, optimizer)

    def _model_note(self, task: TaskImages) -> dict[str, Any]:
        config, record = self.setup.config, self.run.record
        stored = config.to_stored()
        learned, names = self.setup.tasks[: task.index + 1], self.setup.task_names[: task.index + 1]
        return {
            "method": stored["method"],
            "marks": list(config.method.marks()),
            "head": stored["head"],
            "seed": config.seeds.init,
            "backbone": {**stored["backbone"], "sha256": record.backbone.sha256},
            "preprocessing": record.preprocessing.to_json(),
            "classes": [name for group in names for name in group],
            "task_sizes": [len(group) for group in names],
            "adapted_tasks": sum(map(self.learner.adapts, learned)),
        }

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        if phase == "alignment_s":
            self.progress.describe("refitting the head")
        start = time.perf_counter()
        yield
        self._spend(phase, time.perf_counter() - start)

    def _spend(self, phase: str, seconds: float) -> None:
        self.position.seconds[phase] = self.position.seconds.get(phase, 0.0) + seconds


def diagnose(setup: TrainingSetup) -> dict[str, Any]:
    """Compute the diagnostics of the trained model with the queries of the test images."""
    model, scorer, tasks = setup.learner.model, setup.scorer, setup.test_tasks
    names, first = [name for group in setup.task_names for name in group], tasks[0]
    one_each = [task.rows[(task.labels == label).nonzero()[0]] for task in tasks for label in task.labels.unique()]
    # First, and in the batches of the scoring, so that the queries are the same after a resume.
    every = [scorer.task_queries(task.rows) for task in tasks if model.method.needs_query]  # (n, D) each
    single = scorer.queries(torch.cat(one_each))  # (C, D)
    mapped = every[0] if every else scorer.task_queries(first.rows)  # (n, D)
    if not setup.world.writes:
        return {}
    relevance = diagnostics.component_usage(model.method, torch.cat(every)) if every else None
    adapted = [task.classes for task in setup.tasks if setup.learner.adapts(task)]
    fresh = build.build_method(setup.config, setup.backbone, setup.device, adapted)
    fresh.copy_statistics(model.method)
    keys = model.known(scorer.images.store, torch.cat(one_each)).keys
    similarity = diagnostics.prompt_diversity(model.method, fresh, single, names, keys)
    queries = diagnostics.query_map(mapped, first.labels, names[: first.classes], 1)
    parts = {"relevance": relevance, "similarity": similarity, "queries": queries}
    if similarity is not None:
        used = diagnostics.selection(model.method, torch.cat(every)) if every else {}
        parts["prompts"] = diagnostics.mean_and_sampled(model.method, fresh, single) | used
        rows, labels = (torch.cat([getattr(task, name) for task in tasks]) for name in ("rows", "labels"))
        parts["swap"] = diagnostics.swap_test(scorer, rows, labels)
    return {name: part for name, part in parts.items() if part}


def _peak_memory(device: torch.device) -> float:
    """Return the peak memory in MB, of the GPU if one is used, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        import resource
    except ImportError:  # Windows
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
