"""Model factory and predictor of a classifier."""

import copy
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probprompt.backbones.pretrained import LoadedBackbone
from probprompt.classifier.confidence import Gaussians, unit
from probprompt.classifier.statistics import Moments, Statistics, Views, add_up
from probprompt.classifier.store import State
from probprompt.config import RunConfig
from probprompt.data.image_store import Loaded
from probprompt.data.images import Pixels, UnreadableImageError
from probprompt.data.inputs import InputImage, decode_ahead
from probprompt.data.transforms import Packed, Preprocessor, enlarged
from probprompt.engine.build import ModelState, build_model, build_preprocessor, default_precision, load_frozen
from probprompt.engine.learner import Learner
from probprompt.engine.model import PromptedModel
from probprompt.engine.saved_model import restore_learning
from probprompt.errors import UserError
from probprompt.heads.closed_form import ClosedFormHead, ClosedFormSettings, RidgeHead, RidgeSettings
from probprompt.methods import find

STEPS = {"cpu": 160, "cuda": 1600}  # most training steps per task if epochs are not set; on a CPU a step takes seconds


@dataclass(frozen=True)
class JudgedBatch:
    """A batch of images with the outputs for its readable ones."""

    images: list[tuple[InputImage, Pixels | UnreadableImageError]]
    pixels: list[Pixels]  # readable images; rows of the tensors correspond to them
    features: Tensor  # (n, D or more)
    probabilities: Tensor  # (n, C)
    novelty: Tensor  # (n,)

    @property
    def unreadable(self) -> list[tuple[str, str]]:
        """Sources of the unreadable images, and the reasons."""
        return [(image.source, str(error)) for image, error in self.images if isinstance(error, UnreadableImageError)]


@dataclass(frozen=True)
class Predictor:
    """A state that is ready to predict; it never changes."""

    model: PromptedModel
    viewer: Preprocessor
    state: State
    gaussians: Gaussians

    @torch.no_grad()
    def look(self, pixels: list[Pixels]) -> Tensor:
        """Return the head's input (n, D or more) for images."""
        device = self.viewer.mean.device
        store, rows = Packed.of(pixels, device), torch.arange(len(pixels), device=device)
        return self.model.look(self.viewer.evaluation(store, rows), keys=self.model.known(store, rows).keys)

    @torch.no_grad()
    def judge(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities (n, C) and novelty (n,) for the output of :meth:`look`."""
        logits: Tensor = self.model.head(features)
        probabilities = (logits.double() / self.state.calibration.temperature).softmax(dim=1)
        width = self.model.backbone.width  # the prompted feature, without a query after it
        return probabilities, self.state.scale.novelty(self.gaussians.score(unit(features[:, :width].float())))

    def judge_each(self, images: Iterator[InputImage], size: int) -> Iterator[JudgedBatch]:
        """Decode images in the background and yield their predictions in batches, in order."""
        stream = decode_ahead(images)
        while group := list(islice(stream, size)):
            pixels = [image for _, image in group if not isinstance(image, UnreadableImageError)]
            features = self.look(pixels) if pixels else self.gaussians.means.new_zeros(0, self.model.backbone.width)
            judged = self.judge(features) if pixels else (features.new_zeros(0, len(self.state.names)), features[:, 0])
            yield JudgedBatch(group, pixels, features, *judged)


class ModelFactory:
    """Builds models from states; the backbone is loaded on first use."""

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        sha256: str | None,
        own_epochs: bool,
        prepared: Mapping[str, Any] | None = None,
        home: Path | None = None,
    ) -> None:
        """Set up; ``sha256``, ``prepared`` and ``home`` are those of a saved classifier."""
        self.config, self.device, self.own_epochs = config, device, own_epochs
        self._expected, self._prepared, self._home = sha256, prepared, home
        self._loading = threading.Lock()
        self._backbone: LoadedBackbone | None = None

    @property
    def backbone(self) -> LoadedBackbone:
        """The frozen backbone on the device, shared by all threads."""
        with self._loading:
            if self._backbone is None:
                loaded = load_frozen(self.config.backbone, self._expected, self._home)
                loaded.model.to(self.device)
                if not find(self.config.method.name).trains_backbone:
                    loaded.model.set_precision(self.config.backbone.precision or default_precision(self.device))
                self._backbone = loaded
            return self._backbone

    @cached_property
    def viewer(self) -> Preprocessor:
        """Preprocessor of the images."""
        size = self.backbone.preprocessing.image_size
        viewer = build_preprocessor(self.config, self.backbone, self.device, enlarged(size))
        if self._prepared is not None:
            viewer.check_record(self._prepared)
        return viewer

    @cached_property
    def short_side(self) -> int | None:
        """Length of the short edge of decoded images; None keeps their size."""
        return self.config.data.short_side(enlarged(self.backbone.preprocessing.image_size))

    @property
    def closed_form(self) -> bool:
        """True if the head is solved in closed form."""
        return isinstance(self.config.head, ClosedFormSettings)

    def adapts(self, task: int) -> bool:
        """Return True if prompts are trained in this task."""
        return self.config.adapts(task, not self.closed_form)

    def build(self, state: State) -> PromptedModel:
        """Build the model of a state, without what only learning needs."""
        backbone = self.backbone
        if find(self.config.method.name).trains_backbone:
            backbone = replace(backbone, model=copy.deepcopy(backbone.model))
        tensors: dict[str, Tensor] = {}
        if state.method is not None and state.head is not None:
            tensors = {**state.method.tensors, **{f"head.{name}": value for name, value in state.head.tensors.items()}}
        try:
            return build_model(self.config, backbone, self.device, state=ModelState(state.adapted, tensors))
        except ValueError as problem:
            raise UserError(
                f"The saved model is corrupted: its tensors do not match its settings ({problem})."
            ) from problem

    def predictor(self, state: State) -> Predictor:
        """Build the predictor of a state that has classes."""
        assert state.gaussians is not None
        model = self.build(state)
        model.fix()
        return Predictor(model, self.viewer, state, Gaussians.from_tensors(state.gaussians.tensors, self.device))

    def learner(self, state: State, images: Loaded, sums: Statistics | None) -> Learner:
        """Build a learner that continues from a state and the statistics of its images."""
        model = self.build(state)
        learner = Learner(model, images, self.viewer, self._config_for(len(images.labels)))
        if state.later is not None:
            restore_learning(learner, {name: value.to(self.device) for name, value in state.later.tensors.items()})
        if isinstance(model.head, ClosedFormHead) and sums is not None:
            self.solve(model.head, sums.solved, state.strength, solve=False)
        return learner

    def _config_for(self, images: int) -> RunConfig:
        """Return the settings with default epochs reduced to at most :data:`STEPS` steps."""
        training, most = self.config.training, STEPS[self.device.type]
        steps = max(1, images // min(training.batch_size, images))
        if not self.own_epochs or training.epochs * steps <= most:
            return self.config
        epochs = max(1, most // steps)
        return self.config.model_copy(update={"training": training.model_copy(update={"epochs": epochs})})

    def solve(self, head: ClosedFormHead, moments: Moments, strength: float | None, solve: bool = True) -> None:
        """Set the statistics of a head, and solve it from them."""
        if isinstance(head, RidgeHead):
            value = float("nan") if strength is None else strength
            head.register_buffer("strength", torch.tensor(value, dtype=torch.float64, device=self.device))
        head.solve_sums(moments.counts, moments.totals, moments.moment, solve)

    @cached_property
    def widths(self) -> dict[str, int]:
        """Width of each kind of summed features; the head is solved from the last."""
        width, head = self.backbone.model.width, self.config.head
        if isinstance(head, RidgeSettings) and head.projections:
            return {"unit": width, "lifted": head.projections + head.unprojected_width(width)}
        return {"unit": width, "plain": head.input_width(width)}

    @cached_property
    def views(self) -> Views:
        """Transformations of features before they are summed, by name."""
        width, head = self.backbone.model.width, self.build(State()).head
        views = {"unit": lambda features: unit(features[:, :width]), "plain": lambda features: features}
        return {**views, "lifted": head.lift} if isinstance(head, ClosedFormHead) else views

    def sums(self, state: State) -> Statistics:
        """Return a new copy of the statistics of all images that are not held out."""
        if state.sums is not None and state.sums.available:
            return Statistics.from_tensors(state.sums.tensors, self.widths, self.device)
        empty = Statistics.zero(len(state.classes), self.widths, self.device)
        return add_up((known.rest.tensors for known in state.classes), empty, self.views)

    def with_held_out(self, state: State, sums: Statistics) -> Statistics:
        """Return the statistics of all images, including held-out ones."""
        return add_up((known.held.tensors for known in state.classes), copy.deepcopy(sums), self.views)
