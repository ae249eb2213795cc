"""Export of a saved model to ONNX, checked against torch with onnxruntime."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue, TypeAdapter
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn

from probprompt import __version__, randomness
from probprompt.classifier import ContinualClassifier
from probprompt.engine.model import PromptedModel
from probprompt.engine.saved_model import load_model
from probprompt.errors import UserError
from probprompt.export.bundle import read_record
from probprompt.storage import write_with

OPSET = 18  # supported since onnxruntime 1.14
BATCHES = (1, 3, 17)  # batch sizes of the check
TOLERANCE = 1e-4  # largest allowed difference of a probability from torch's
NOVELTY_TOLERANCE = 1e-3  # largest allowed difference of the novelty from torch's, relative if above 1
LARGEST = 2**31 - 2**20  # largest size of weights in bytes: that of an ONNX file, less some for the graph
_INSTALL = "pip install 'probprompt[onnx]'"

Judge = Callable[[Tensor], tuple[Tensor, ...]]
"""Function from features `(B, D or more)` to probabilities `(B, C)` (and novelty `(B,)`)."""


@validated(frozen=True)
class View:
    """Preprocessing of images for the backbone."""

    image_size: int
    resized: int  # short side before the center crop
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @classmethod
    def of(cls, note: Mapping[str, JsonValue]) -> "View":
        """Read a record's preprocessing."""
        return TypeAdapter(cls).validate_python(note)


@dataclass(frozen=True)
class Source:
    """A model that predicts."""

    model: PromptedModel
    classes: tuple[str, ...]
    view: View
    judge: Judge
    outputs: tuple[str, ...] = ("probabilities",)  # names of the results of ``judge``
    facts: dict[str, Any] = field(default_factory=dict)  # for the metadata


def open_source(folder: Path) -> Source:
    """Read the current version of a saved classifier, or the model of a run."""
    return _of_classifier(folder) if (folder / "current.json").is_file() else _of_run(folder)


def _of_run(folder: Path) -> Source:
    loaded = load_model(folder)
    note, head = loaded.note, loaded.model.head
    facts = {
        "temperature": 1.0,
        "method": note["method"]["name"],
        "backbone": {name: note["backbone"][name] for name in ("name", "sha256")},
        "marks": note["marks"],
    }
    view = View.of(note["preprocessing"])
    return Source(loaded.model, loaded.class_names, view, lambda features: (head(features).softmax(1),), facts=facts)


def _of_classifier(folder: Path) -> Source:
    classifier = ContinualClassifier.load(folder, device="cpu")
    predictor, settings = classifier.predictor, classifier.settings
    viewer, state = predictor.viewer, predictor.state
    knows = state.scale.limit is not None
    outputs = ("probabilities", "novelty") if knows else ("probabilities",)
    predictor.model.set_precision("fp32")  # 16 bits are faster on GPUs only
    mean, std = (tuple(values.flatten().tolist()) for values in (viewer.mean, viewer.std))
    view = View(viewer.size, viewer.resized, viewer.kernel, mean, std)
    facts = {
        "temperature": state.calibration.temperature,
        "unknown_above": 1.0 if knows else None,
        "method": settings.method.name,
        "backbone": {"name": settings.backbone.name, "sha256": read_record(folder).sha256},
        "marks": list(settings.method.marks()),
        "classifier_version": classifier.version,
    }
    answers = len(outputs)
    return Source(predictor.model, classifier.classes, view, lambda x: predictor.judge(x)[:answers], outputs, facts)


@dataclass(frozen=True)
class Exported:
    """An ONNX file that was written and checked."""

    path: Path
    bytes: int
    classes: tuple[str, ...]
    outputs: tuple[str, ...]
    difference: float  # largest difference of a probability from torch's in the check


class Graph(nn.Module):
    """Module for the ONNX graph: pixels to probabilities and possibly novelty."""

    pixel_mean: Tensor
    pixel_scale: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.model, self.judge, self.outputs = source.model, source.judge, source.outputs
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (source.view.mean, source.view.std))
        self.register_buffer("pixel_mean", 255 * mean)
        self.register_buffer("pixel_scale", 1 / (255 * std))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map images `(B, size, size, 3)` of uint8 to probabilities `(B, C)` and novelty `(B,)`."""
        pixels = (images.permute(0, 3, 1, 2).float() - self.pixel_mean) * self.pixel_scale  # (B, 3, size, size)
        return tuple(answer.float() for answer in self.judge(self.model.look(pixels)))


def export_onnx(folder: str | Path, file: str | Path) -> Exported:
    """Write the model of a folder as one ONNX file."""
    _require()
    path = Path(file)
    if path.is_dir():
        raise UserError(f"{path} is a folder. Pass a file such as {path / 'model.onnx'}.")
    if not path.parent.is_dir():
        raise UserError(f"Folder {path.parent} does not exist. Create it first.")
    return write_onnx(open_source(Path(folder)), path)


def write_onnx(source: Source, path: Path) -> Exported:
    """Write a model as an ONNX file if onnxruntime reproduces the results of torch."""
    runtime = _require()
    if source.model.method.needs_keys:
        raise UserError(
            "An ONNX file cannot draw noise from stored pixels (method.evaluation='image'). Export a model with "
            "method.evaluation=mean."
        )
    graph = Graph(source).eval().requires_grad_(False)
    size = sum(part.numel() * part.element_size() for part in (*graph.parameters(), *graph.buffers()))
    if size > LARGEST:
        raise UserError(f"The weights have {size / 1e9:.1f} GB, but an ONNX file holds 2 GB. Use a smaller ViT.")
    data = _translate(graph, source)
    differences: list[float] = []

    def fill(temporary: Path) -> None:
        temporary.write_bytes(data)
        differences.append(_check(runtime, temporary, graph, source.view))

    write_with(path, fill)
    return Exported(path, len(data), source.classes, graph.outputs, differences[0])


def metadata(source: Source) -> dict[str, str]:
    """Return the metadata of the file: JSON by name."""
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
    try:
        return [import_module(name) for name in ("onnx", "onnxscript", "onnxruntime")][-1]
    except ImportError as problem:
        raise UserError(f"ONNX export needs the package {problem.name!r}. Run: {_INSTALL}") from None


def _translate(graph: Graph, source: Source) -> bytes:
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
        # The exporter's notes contain local source lines and folders.
        import_module("onnx_ir.passes.common").ClearMetadataAndDocStringPass()(program.model)
        program.model.metadata_props.update(metadata(source))
        program.model.producer_name, program.model.producer_version = "probprompt", __version__
        data: bytes = program.model_proto.SerializeToString()
    return data


def _sort(values: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """Sort stably in ONNX by TopK, which returns the earlier of two equal values first."""
    operators: Any = import_module("onnxscript").opset18
    count = operators.Gather(operators.Shape(values), operators.Constant(value_ints=[dim]))
    return operators.TopK(values, count, axis=dim, largest=int(descending), sorted=1)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        for logger in map(logging.getLogger, ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def _pixels(count: int, view: View) -> NDArray[np.uint8]:
    shape = (count, view.image_size, view.image_size, 3)
    return (256 * randomness.uniform(shape, 0, "onnx check", count)).byte().numpy()


@torch.no_grad()
def _check(runtime: Any, path: Path, graph: Graph, view: View) -> float:
    """Return the largest difference of a probability; raise UserError above the tolerance."""
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest = 0.0
    for count in BATCHES:
        pixels = _pixels(count, view)
        expected = [part.numpy() for part in graph(torch.from_numpy(pixels))]
        outputs = session.run(None, {"images": pixels})
        difference = float(np.abs(outputs[0] - expected[0]).max())
        largest = max(largest, difference)
        wrong = not difference <= TOLERANCE
        if len(expected) > 1:
            bound = NOVELTY_TOLERANCE * np.maximum(1, np.abs(expected[1]))
            wrong = wrong or not bool((np.abs(outputs[1] - expected[1]) <= bound).all())
        if wrong:
            raise UserError(
                f"Wrote no ONNX file: onnxruntime {runtime.__version__} and torch {torch.__version__} differ by "
                f"{difference:.1e} on {count} image(s), expected at most {TOLERANCE:.0e}. Install the versions of "
                "constraints.txt, or report this."
            )
    return largest
