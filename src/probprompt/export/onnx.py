"""A saved model as something to be handed on: what predicts, how it is fed, and what its answers mean."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from probprompt import __version__, randomness
from probprompt.classifier import ContinualClassifier
from probprompt.engine.model import PromptedModel
from probprompt.engine.saved_model import load_model
from probprompt.errors import UserError
from probprompt.export.bundle import read_record
from probprompt.storage import write_with


@dataclass(frozen=True)
class View:
    """How an image becomes what the backbone is fed."""

    image_size: int
    resized: int
    """What the short side is resized to before the middle is cut out."""
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, note: dict[str, Any]) -> "View":
        """From what a record says."""
        return cls(
            image_size=int(note["image_size"]),
            resized=int(note["resized"]),
            interpolation=str(note.get("interpolation", "bilinear")),
            mean=tuple(map(float, note["mean"])),
            std=tuple(map(float, note["std"])),
        )


Judge = Callable[[Tensor], tuple[Tensor, ...]]
"""What a head is given (B, D or more) to probabilities (B, C) and, where that is known, novelty (B,)."""


@dataclass(frozen=True)
class Source:
    """A model that predicts."""

    model: PromptedModel
    classes: tuple[str, ...]
    view: View
    judge: Judge
    outputs: tuple[str, ...] = ("probabilities",)
    """The names of what ``judge`` answers."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is worth knowing: temperature, method, backbone, marks."""


def open_source(folder: Path) -> Source:
    """Read the current version of a saved classifier, or the model of a run."""
    return _of_classifier(folder) if (folder / "current.json").is_file() else _of_run(folder)


def _of_run(folder: Path) -> Source:
    loaded = load_model(folder)
    note, head = loaded.note, loaded.model.head

    def judge(features: Tensor) -> tuple[Tensor, ...]:
        return (head(features).softmax(dim=1),)

    facts = {
        "temperature": 1.0,
        "method": note["method"]["name"],
        "backbone": {name: note["backbone"][name] for name in ("name", "sha256")},
        "marks": note["marks"],
    }
    return Source(loaded.model, loaded.class_names, View.of(note["preprocessing"]), judge, facts=facts)


def _of_classifier(folder: Path) -> Source:
    classifier = ContinualClassifier.load(folder, device="cpu")
    predictor, settings = classifier.predictor, classifier.settings
    viewer, state = predictor.viewer, predictor.state
    knows = state.scale.limit is not None
    outputs = ("probabilities", "novelty") if knows else ("probabilities",)

    def judge(features: Tensor) -> tuple[Tensor, ...]:
        return predictor.judge(features)[: len(outputs)]

    predictor.model.set_precision("fp32")  # what was computed in 16 bits on a GPU is not faster so elsewhere
    view = View(
        image_size=viewer.size,
        resized=viewer.resized,
        interpolation=viewer.kernel,
        mean=tuple(viewer.mean.flatten().tolist()),
        std=tuple(viewer.std.flatten().tolist()),
    )
    facts = {
        "temperature": state.calibration.temperature,
        "unknown_above": 1.0 if knows else None,
        "method": settings.method.name,
        "backbone": {"name": settings.backbone.name, "sha256": read_record(folder).sha256},
        "marks": list(settings.method.marks()),
        "classifier_version": classifier.version,
    }
    return Source(predictor.model, classifier.classes, view, judge, outputs, facts)


OPSET = 18
"""Read by every onnxruntime since 1.14."""
BATCHES = (1, 3, 17)
"""Numbers of images that a file is checked with before it is called done."""
TOLERANCE = 1e-4
"""How far probabilities may be from torch's."""
NOVELTY_TOLERANCE = 1e-3
"""How far novelty may be from torch's, relative to it where it is above 1."""
LARGEST = 2**31 - 2**20
"""Bytes: what one ONNX file can hold, with some room for the graph itself."""
_INSTALL = "pip install 'probprompt[onnx]'"


@dataclass(frozen=True)
class Exported:
    """A file that was written and checked."""

    path: Path
    bytes: int
    classes: tuple[str, ...]
    outputs: tuple[str, ...]
    difference: float
    """The largest difference of a probability from torch's, over all images of the check."""


class Graph(nn.Module):
    """Pixels to probabilities, and novelty where it is known: what becomes the ONNX graph."""

    pixel_mean: Tensor
    pixel_scale: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.model, self.judge, self.outputs = source.model, source.judge, source.outputs
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (source.view.mean, source.view.std))
        self.register_buffer("pixel_mean", 255 * mean)
        self.register_buffer("pixel_scale", 1 / (255 * std))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Images (B, side, side, 3) of uint8 to probabilities (B, C) and novelty (B,)."""
        pixels = (images.permute(0, 3, 1, 2).float() - self.pixel_mean) * self.pixel_scale  # (B, 3, side, side)
        return tuple(answer.float() for answer in self.judge(self.model.look(pixels)))


def export_onnx(folder: str | Path, file: str | Path) -> Exported:
    """Write the model of a folder as one ONNX file that was checked against torch with onnxruntime."""
    _require()
    path = Path(file)
    _refuse_place(path)
    return write_onnx(open_source(Path(folder)), path)


def write_onnx(source: Source, path: Path) -> Exported:
    """Write a model as an ONNX file; it is put in its place only once onnxruntime answers as torch does."""
    runtime = _require()
    graph = Graph(source).eval().requires_grad_(False)
    _refuse_large(graph)
    data = _translate(graph, source)
    differences: list[float] = []

    def fill(temporary: Path) -> None:
        temporary.write_bytes(data)
        differences.append(_check(runtime, temporary, graph, source.view))

    write_with(path, fill)
    return Exported(path, len(data), source.classes, graph.outputs, differences[0])


def metadata(source: Source) -> dict[str, str]:
    """What the file says of itself: JSON by name."""
    view = source.view
    prepare = {
        "image_size": view.image_size,
        "resize_short_side_to": view.resized,
        "interpolation": view.interpolation,
        "crop": "centre",
        "colours": "RGB",
        "layout": "batch, height, width, colour",
        "dtype": "uint8",
        "normalised_in_graph": {"mean": view.mean, "std": view.std},
    }
    about = {"version": __version__, **source.facts}
    parts = {"classes": source.classes, "preprocessing": prepare, "probprompt": about}
    return {name: json.dumps(part, sort_keys=True) for name, part in parts.items()}


def _require() -> Any:
    """Onnxruntime; what the exporter needs is looked for as well, before any time is spent."""
    try:
        for name in ("onnx", "onnxscript"):
            import_module(name)
        return import_module("onnxruntime")
    except ImportError as problem:
        raise UserError(f"an ONNX file needs the package {problem.name!r}: {_INSTALL}") from None


def _refuse_place(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the file, such as {path / 'model.onnx'}")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} to write {path.name} into: make it first")


def _refuse_large(graph: nn.Module) -> None:
    size = sum(part.numel() * part.element_size() for part in (*graph.parameters(), *graph.buffers()))
    if size > LARGEST:
        raise UserError(
            f"the model has {size / 1e9:.1f} GB of weights, but one ONNX file holds 2 GB: use a smaller ViT"
        )


def _translate(graph: Graph, source: Source) -> bytes:
    """The graph in ONNX's own terms."""
    pixels = torch.from_numpy(_pixels(3, source.view))
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            graph,
            (pixels,),
            dynamo=True,
            input_names=["images"],
            output_names=list(graph.outputs),
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            opset_version=OPSET,
            custom_translation_table={torch.ops.aten.sort.stable: _sort},
            verbose=False,
        )
        assert program is not None
        # What the exporter notes at each node names lines and folders of this machine.
        import_module("onnx_ir.passes.common").ClearMetadataAndDocStringPass()(program.model)
        program.model.metadata_props.update(metadata(source))
        program.model.producer_name, program.model.producer_version = "probprompt", __version__
        data: bytes = program.model_proto.SerializeToString()
    return data


def _sort(values: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """A stable sort in ONNX: TopK of all, in which of two equals the earlier one comes first."""
    operators: Any = import_module("onnxscript").opset18
    count = operators.Gather(operators.Shape(values), operators.Constant(value_ints=[dim]))
    return operators.TopK(values, count, axis=dim, largest=int(descending), sorted=1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what torch's exporter says about its own insides."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _pixels(count: int, view: View) -> NDArray[np.uint8]:
    """Images to try the graph with: noise, the same each time."""
    shape = (count, view.image_size, view.image_size, 3)
    return (256 * randomness.uniform(shape, 0, "onnx check", count)).byte().numpy()


@torch.no_grad()
def _check(runtime: Any, path: Path, graph: Graph, view: View) -> float:
    """The largest difference of a probability from torch's, for several sizes of batch; a larger one is refused."""
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest = 0.0
    for count in BATCHES:
        pixels = _pixels(count, view)
        expected = [part.numpy() for part in graph(torch.from_numpy(pixels))]
        found = session.run(None, {"images": pixels})
        difference = float(np.abs(found[0] - expected[0]).max())
        largest = max(largest, difference)
        wrong = not difference <= TOLERANCE
        if len(expected) > 1:
            bound = NOVELTY_TOLERANCE * np.maximum(1, np.abs(expected[1]))
            wrong = wrong or not bool((np.abs(found[1] - expected[1]) <= bound).all())
        if wrong:
            raise UserError(
                f"the ONNX file was not written: with {count} image(s) onnxruntime {runtime.__version__} answers "
                f"otherwise than torch {torch.__version__} (probabilities differ by {difference:.1e}, allowed is "
                f"{TOLERANCE:.0e}). Install the versions of constraints.txt, or report this"
            )
    return largest
