"""Measurements of one method on one backbone, through the engine."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from probprompt.backbones.vit import FrozenViT, Precision
from probprompt.bench import timing
from probprompt.bench.results import Entry, Memory
from probprompt.bench.synthetic import BenchSetup, build
from probprompt.bench.timing import Latency, Peak, Rate
from probprompt.config import RunConfig
from probprompt.engine.build import release
from probprompt.methods import Context
from probprompt.progress import SILENT, ProgressCallback
from probprompt.prompts import Prompt, Prompts, Readout

MOST_STEPS = 40  # per epoch, as for a tenth of CIFAR-100 with batch size 128
EPOCHS_TIMED = 4
EPOCH_IMAGES = 24_000  # ImageNet-R's training set, as in the paper's time per epoch
STAGE_STEPS = {"cuda": 8, "cpu": 2}
STATIC_STEPS = {"cuda": MOST_STEPS, "cpu": 4}  # per epoch on stored features
PARTS = ("training", "stages", "inference", "latency", "frozen pass")  # parts of a measurement, in order
T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """Training speed, and the bytes that it takes without the images."""

    rate: Rate
    peak: int  # largest sum of live tensors: weights, statistics, gradients, activations, one batch
    reserved: int | None  # memory that the GPU's allocator took from the device; None on a CPU


def training(setup: BenchSetup, seconds: float) -> Training | None:
    """Measure epochs of the engine; None if nothing is trained."""
    if setup.learner.epochs(setup.task) == 0:
        return None
    epochs, device = Epochs(setup), setup.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        rate, without = _epochs_per_s(epochs, seconds), setup.held_before + setup.images_bytes
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return Training(rate, peak - without, reserved - without)
    rate = _epochs_per_s(epochs, seconds)
    with LiveTensors() as live:  # a CPU has no memory statistics
        epochs(epochs.shortest)
    return Training(rate, held(setup, epochs.optimizer) + live.peak, None)


def _epochs_per_s(epochs: "Epochs", seconds: float) -> Rate:
    """Choose the length of an epoch so that several fit into the time, and measure them."""
    device, shortest = epochs.setup.device, epochs.shortest
    first, again = (timing.timed(lambda: epochs(shortest), device) for _ in range(2))
    steps = shortest
    if not epochs.setup.model.static:
        # On a GPU the first steps are not representative: kernels are compiled, and steps captured.
        steps = MOST_STEPS if device.type == "cuda" else math.ceil(seconds / EPOCHS_TIMED / again)
        steps = max(1, min(MOST_STEPS, steps))
    measured = timing.rate(lambda: epochs(steps), seconds, device, warm_ups=2)
    measured["first_s"] = first
    measured["warm_up_s"] += first + again
    return measured


class Epochs:
    """Trains one epoch after another, and counts images and steps."""

    def __init__(self, setup: BenchSetup) -> None:
        self.setup, self.optimizer = setup, setup.learner.optimizer(setup.task)
        self.shortest = STATIC_STEPS[setup.device.type] if setup.model.static else 1
        """Steps of the shortest possible epoch."""
        self._number = 0

    def __call__(self, steps: int) -> tuple[int, int]:
        """Train an epoch of ``steps`` steps; return its images and steps."""
        done: list[int] = []
        training = self.setup.config.training
        number, task = self._number % training.epochs, self.setup.steps_of(steps)
        self.setup.learner.train_epoch(task, number, self.optimizer, done.append)
        self._number += 1
        return sum(done) * training.batch_size, sum(done)


def inference(setup: BenchSetup, seconds: float) -> Rate:
    """Measure predictions in batches: evaluation views, query, prompted pass, head."""
    batch = setup.config.training.batch_size
    rows = setup.rows_of(batch).rows

    def predict() -> tuple[int, int]:
        setup.predict(rows)
        return batch, 1

    return timing.rate(predict, seconds, setup.device)


def latency(setup: BenchSetup, seconds: float) -> Latency:
    """Measure predictions of one image at a time, from its pixels to its logits."""
    rows = setup.rows_of(len(setup.learner.images.store)).rows

    def predict(number: int) -> None:
        setup.predict(rows[number % len(rows)][None])

    return timing.latency(predict, seconds, setup.device)


def frozen_pass(setup: BenchSetup, seconds: float) -> Rate:
    """Measure the backbone without prompts on preprocessed images."""
    batch, model, learner = setup.config.training.batch_size, setup.model, setup.learner
    images = learner.viewer.evaluation(learner.images.store, setup.rows_of(batch).rows)

    def ask() -> tuple[int, int]:
        model.backbone.query(images, model.method.query_readout)
        return batch, 1

    return timing.rate(ask, seconds, setup.device)


class Peaks:
    """Matrix peaks of the machine by precision, each measured once."""

    def __init__(self, device: torch.device, seconds: float = timing.PEAK_SECONDS) -> None:
        self.device, self.seconds = device, min(seconds, timing.PEAK_SECONDS)
        self.measured: dict[Precision, Peak] = {}

    def of(self, precision: Precision) -> Peak:
        """Return the peak in this precision."""
        if precision not in self.measured:
            self.measured[precision] = timing.matrix_peak(self.device, precision, self.seconds)
        return self.measured[precision]


def measure(config: RunConfig, seconds: float, peaks: Peaks, progress: ProgressCallback = SILENT) -> Entry:
    """Measure one method."""
    setup = build(config, peaks.device)
    model, backbone = setup.model, setup.backbone
    peak = peaks.of(model.precision)["flops"]

    def next_part(name: str, work: Callable[[], T]) -> T:
        progress.describe(name)
        result = work()
        progress.advance(1)
        return result

    trained = next_part(PARTS[0], lambda: training(setup, seconds))
    passes_backbone = trained is not None and not model.static  # else only the head, on stored features
    steps = STAGE_STEPS[setup.device.type]
    stages = next_part(PARTS[1], lambda: timing.shares(setup, steps) if passes_backbone else None)
    if not model.head.trained:
        setup.close()  # solves the head
    predicted = next_part(PARTS[2], lambda: inference(setup, seconds))
    alone = next_part(PARTS[3], lambda: latency(setup, seconds))
    frozen = next_part(PARTS[4], lambda: frozen_pass(setup, seconds))
    count, memory = count_flops(setup), _memory(setup, trained)
    flops = {name: getattr(count, name) for name in ("query", "prompted", "backward", "inference")}
    shares = {"inference": count.inference * predicted["images_per_s"] / peak}
    if trained and passes_backbone:
        flops["training"] = count.training
        shares["training"] = count.training * trained.rate["images_per_s"] / peak
    return {
        "method": setup.config.method.name,
        "backbone": backbone.name,
        "precision": model.precision,
        "image_size": backbone.preprocessing.image_size,
        "batch": setup.config.training.batch_size,
        "task": setup.task.index + 1,
        "classes": setup.task.first + setup.task.classes,
        "static": model.static,
        "config": setup.config.to_stored(),
        "training": trained.rate if trained else None,
        "inference": predicted,
        "latency": alone,
        "frozen_pass": frozen,
        "memory": memory,
        "stages": stages,
        "passes": count.passes,
        "flops_per_image": flops,
        "share_of_peak": shares,
        "cost": {
            "prompts_mb": memory["prompts"] / 1e6,
            "with_backbone_mb": (memory["prompts"] + memory["backbone"]) / 1e6,
            "epoch_s": EPOCH_IMAGES / trained.rate["images_per_s"] if trained else None,
            "fps": 1e3 / alone["median_ms"],
        },
    }


def _memory(setup: BenchSetup, trained: Training | None) -> Memory:
    return {
        "training_peak": trained.peak if trained else None,
        "training_reserved": trained.reserved if trained else None,
        "images": setup.images_bytes,
        "prompts": size_of(setup.model.method.parameters()),
        "backbone": size_of(setup.model.backbone.parameters()),
    }


def measure_each(
    configs: Sequence[RunConfig], seconds: float, peaks: Peaks, progress: ProgressCallback = SILENT
) -> Iterator[Entry]:
    """Measure several methods, one after the other."""
    for config in configs:
        with progress.stage(config.method.name, len(PARTS)):
            entry = measure(config, seconds, peaks, progress)
            progress.describe(f"{(entry['training'] or entry['inference'])['images_per_s']:,.0f} images/s")
        yield entry
        release(peaks.device)


class LiveTensors(TorchDispatchMode):
    """Tracks the largest memory of tensors created while it is active, without scratch memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and record the tensors it creates."""
        results = func(*args, **(kwargs or {}))
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(results):
            # Views and tensors changed in place take no new memory.
            if isinstance(leaf, Tensor) and _address(leaf) not in given and _address(leaf) not in self._known:
                self._note(leaf)
        return results

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = _address(tensor), storage.nbytes()

        def forget(_: object) -> None:
            self.now -= size
            self._known.pop(address, None)

        self._known[address] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def held(setup: BenchSetup, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of everything that training keeps: weights, statistics, moments."""
    learner = setup.learner
    parts: list[Tensor] = [*learner.model.parameters(), *learner.model.buffers(), *learner.trained.parameters()]
    parts += [learner.statistics.mean, learner.statistics.variance, learner.prototypes]
    parts += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return size_of(parts)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of these tensors, counting shared storage once."""
    return sum({_address(one): one.untyped_storage().nbytes() for one in tensors}.values())


@dataclass(frozen=True)
class Count:
    """Floating-point operations for one image."""

    query: int  # pass without prompts; 0 if the method needs no query
    prompted: int  # pass with prompts (or without, for a method that has none)
    backward: int  # backward pass to the prompts, or to all weights of a trained backbone
    draws: int = 1  # prompted passes that a prediction averages
    looks: int = 1  # views of an image that a prediction averages

    @property
    def passes(self) -> int:
        """Passes of a prediction."""
        return self.looks * (bool(self.query) + self.draws)

    @property
    def inference(self) -> int:
        """Operations of a prediction."""
        return self.looks * (self.query + self.draws * self.prompted)

    @property
    def training(self) -> int:
        """Operations of a training step, per image."""
        return self.query + self.prompted + self.backward


@torch.no_grad()
def count_flops(setup: BenchSetup) -> Count:
    """Count the operations for one image, with the prompts that the method injects."""
    model = setup.model
    query = torch.zeros(1, model.backbone.width, device=setup.device) if model.method.needs_query else None
    context = Context(keys=torch.zeros(1, dtype=torch.long, device=setup.device))
    prompts = model.method.prompts(query, context).prompts
    count = flops(model.backbone, prompts, model.method.readout)
    needed = count.query if model.method.needs_query else 0
    return replace(count, query=needed, draws=model.method.draws, looks=2 if model.head.flip_average else 1)


def flops(backbone: FrozenViT, prompts: Prompts | None = None, readout: Readout = "class") -> Count:
    """Count the matrix products of a query, a prompted pass and its backward pass, per image.

    Norms, activations and softmax (about 1%) are omitted, and recomputation in kernels counts once.
    """
    memo: dict[int, Any] = {id(backbone._fused): None}  # copies of the weights for kernels
    for weight in backbone.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in backbone.buffers()}
    model, size = deepcopy(backbone, memo), backbone.model.patch_embed.img_size
    images = torch.empty(1, 3, *size, device="meta")
    leaves = {index: _on_meta(prompt) for index, prompt in (prompts or {}).items()}
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        model.query(images)
        query = counter.get_total_flops()
        features = model.features(images, leaves, readout)
        forward = counter.get_total_flops() - query
        if features.requires_grad:
            features.sum().backward()
        return Count(query, forward, counter.get_total_flops() - query - forward)


def _on_meta(prompt: Prompt) -> Prompt:
    leaves: dict[str, Any] = vars(prompt).copy()
    for name, part in leaves.items():
        if isinstance(part, Tensor):
            leaves[name] = torch.empty_like(part, device="meta", requires_grad=True)
    return replace(prompt, **leaves)
