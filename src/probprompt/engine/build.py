"""Assemble models: device, frozen backbone, method and head, preprocessing of images."""

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from probprompt import kernels, methods
from probprompt.backbones.pretrained import LoadedBackbone, find_weights, load_backbone
from probprompt.backbones.vit import DTYPES, Precision
from probprompt.config import BackboneConfig, RunConfig
from probprompt.data.transforms import Preprocessor
from probprompt.engine.model import PromptedModel
from probprompt.errors import UserError, is_out_of_memory, suggest
from probprompt.heads import make_head
from probprompt.heads.closed_form import ClosedFormSettings
from probprompt.methods import Method, Shape

_NORMALIZATIONS = {
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


def pick_device(name: str | None) -> torch.device:
    """Return the device by name; by default the GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"Unknown device {name!r}. {suggest(name, ('cpu', 'cuda', 'cuda:0'))}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"Unsupported device {name!r}. Use cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"Device {name!r} not found. This machine has {torch.cuda.device_count()} GPU(s).")
    if device.index is not None:
        torch.cuda.set_device(device)  # for streams and kernels
    return device


def default_precision(device: torch.device) -> Precision:
    """Return bf16 on a GPU or CPU with bf16 units, else fp32."""
    if device.type == "cuda":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_it = kernels.bf16_unit() is not None
    return "bf16" if has_it else "fp32"


def release(device: torch.device) -> None:
    """Free unused memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class ModelState:
    """State of a trained model."""

    adapted: tuple[int, ...]
    """Number of classes of each task that trained the prompts."""
    tensors: Mapping[str, Tensor]
    """``method.*``, ``head.*`` and ``backbone.*`` as in saved files; empty for a new model."""


def load_frozen(config: BackboneConfig, sha256: str | None = None, home: Path | None = None) -> LoadedBackbone:
    """Load and check a backbone.

    ``home`` is the folder of a saved model: a weights file that moved along with it is found there.
    """
    weights = find_weights(config.weights, home) if home else config.weights
    return load_backbone(config.name, weights, config.image_size, sha256)


def build_method(
    config: RunConfig, backbone: LoadedBackbone, device: torch.device, adapted: Iterable[int] = ()
) -> Method:
    """Build the initial method, with space for the classes of tasks that trained prompts."""
    shape = Shape(backbone.model.width, backbone.model.depth)
    method = methods.find(config.method.name).create(config.method, shape, config.seeds.init).to(device)
    for task, classes in enumerate(adapted):
        method.begin_task(task, classes)
    return method.to(device)


def build_model(
    config: RunConfig,
    backbone: LoadedBackbone,
    device: torch.device,
    precision: Precision | None = None,
    state: ModelState | None = None,
) -> PromptedModel:
    """Assemble backbone, method and head on a device; ``state`` restores a saved model.

    If the method trains the backbone, pass a copy of a shared one. Raises ValueError if the state does not fit.
    """
    torch.backends.cudnn.allow_tf32 = False  # TF32 rounding of a query could change which component it selects
    method = build_method(config, backbone, device, state.adapted if state else ())
    if isinstance(config.head, ClosedFormSettings) and config.head.with_query and not method.needs_query:
        raise UserError(f"head.with_query needs a method with queries; {config.method.name} has none. Set it to false.")
    head = make_head(config.head, backbone.model.width, config.seeds.init)
    model = PromptedModel(backbone.model, method, head).to(device)
    model.set_precision(precision or config.backbone.precision or default_precision(device))
    if state and state.tensors:
        fill(model, {name: value.to(device) for name, value in state.tensors.items()})
    return model


def fill(model: PromptedModel, tensors: Mapping[str, Tensor]) -> None:
    """Load saved tensors into a model that has grown by the same tasks."""
    try:
        model.method.load_state_dict(group(tensors, "method"))
        if model.method.trains_backbone:
            model.backbone.load_state_dict(group(tensors, "backbone"))
    except RuntimeError as problem:
        if is_out_of_memory(problem):  # load_state_dict wraps this error
            raise torch.OutOfMemoryError(problem) from problem
        raise ValueError(problem) from problem
    model.head.restore(group(tensors, "head"))


def group(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with ``prefix.``, without the prefix."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def build_preprocessor(config: RunConfig, backbone: LoadedBackbone, device: torch.device, resize: int) -> Preprocessor:
    """Return the preprocessing for a backbone; inputs are crops of short edge ``resize``."""
    own = backbone.preprocessing
    mean, std = {**_NORMALIZATIONS, "backbone": (own.mean, own.std)}[config.backbone.normalization]
    dtype = DTYPES[backbone.model.precision]
    return Preprocessor.of(own.image_size, resize, mean, std, config.data.interpolation, device, dtype)
