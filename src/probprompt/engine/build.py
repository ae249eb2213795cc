"""Carrying out a run: learn task after task, score after each, record everything, go on after a stop."""

import gc

import torch

from probprompt import methods
from probprompt.backbones.pretrained import LoadedBackbone
from probprompt.backbones.vit import DTYPES, Precision
from probprompt.config import RunConfig
from probprompt.data.transforms import Preprocessor
from probprompt.engine.hardware import bf16_unit
from probprompt.engine.model import PromptedModel
from probprompt.errors import UserError, suggest
from probprompt.heads import make_head
from probprompt.heads.closed_form import ClosedFormSettings
from probprompt.methods import Method, Shape

_NORMALISATIONS = {
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


def pick_device(name: str | None) -> torch.device:
    """The device by name; by default the GPU where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"no device is called {name!r}: {suggest(name, ('cpu', 'cuda', 'cuda:0'))}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"the device {name!r} is not supported: use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"the device {name!r} is not there: this machine has {torch.cuda.device_count()} GPU(s)")
    if device.index is not None:
        torch.cuda.set_device(device)  # where streams are made and kernels launched
    return device


def default_precision(device: torch.device) -> Precision:
    """What a frozen backbone computes in where nobody says: bf16 on a GPU or a processor that has it."""
    if device.type == "cuda":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_it = bf16_unit() is not None
    return "bf16" if has_it else "fp32"


def release(device: torch.device) -> None:
    """Give back the memory of what is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def build_model(config: RunConfig, backbone: LoadedBackbone) -> PromptedModel:
    """The model before it has learned anything."""
    method = _build_method(config, backbone)
    if isinstance(config.head, ClosedFormSettings) and config.head.with_query and not method.needs_query:
        raise UserError(f"head.with_query needs a method that asks for a query, which {config.method.name} does not")
    head = make_head(config.head, backbone.model.width, config.seeds.init)
    return PromptedModel(backbone.model, method, head)


def _build_method(config: RunConfig, backbone: LoadedBackbone) -> Method:
    shape = Shape(backbone.model.width, backbone.model.depth)
    return methods.find(config.method.name).create(config.method, shape, config.seeds.init)


def build_viewer(config: RunConfig, backbone: LoadedBackbone, resized: int, device: torch.device) -> Preprocessor:
    """How images are prepared for this backbone; ``resized`` is the short side from which its input is cut."""
    wanted = backbone.preprocessing
    mean, std = {**_NORMALISATIONS, "backbone": (wanted.mean, wanted.std)}[config.backbone.normalisation]
    dtype = DTYPES[backbone.model.precision]
    return Preprocessor.of(wanted.image_size, resized, mean, std, config.data.interpolation, device, dtype)
