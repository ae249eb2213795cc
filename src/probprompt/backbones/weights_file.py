"""Files of weights: reading them without running anything, and fitting what they hold to a model.

Three formats are read: safetensors, the npz archives of Google's JAX models, and files of torch.save that hold nothing
but tensors and plain containers. A pickle that asks for anything else is refused before any of it runs.
"""

from __future__ import annotations

import hashlib
import math
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probprompt.errors import UserError, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


SAFETENSORS, NUMPY = ".safetensors", ".npz"
TORCH = (".pth", ".pt", ".bin", ".ckpt", ".tar")
FORMATS = f"a {SAFETENSORS} file, an {NUMPY} file in Google's layout, or tensors saved by torch ({', '.join(TORCH)})"
# What the weights lie under in common files; a teacher is what its authors evaluate, so it goes first.
_WRAPPERS = ("teacher", "state_dict", "model")
# What a file may hold beyond the backbone: heads, and what only pretraining needs.
_BESIDE = {"head", "head_dist", "fc", "fc_norm", "classifier", "pre_logits", "projector", "predictor", "contrast"}
_BESIDE |= {"mask_token", "masked_embed", "dino_head", "ibot_head", "dino_loss", "ibot_patch_loss"}
_POSITIONS = "pos_embed"
_DECODER = "decoder"  # of a masked autoencoder: decoder_embed, decoder_blocks, ...
_DAMAGED = (ValueError, OSError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)  # of a zip of arrays
_NUMPY_LAYOUTS = ("", "opt/target/", "params/", "params/img/")
_NUMPY_PARTS = ("embedding/", "cls", "pos_embedding", "Transformer/", "head/", "pre_logits/")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"  # how files of torch.save begin
_LFS = b"version https://git-lfs"
_HTML = (b"<!doctype", b"<html", b"<head", b"<?xml")


def digest(path: Path) -> str:
    """The SHA-256 of a file of weights; what is no such file is refused."""
    if path.suffix.lower() not in (SAFETENSORS, NUMPY, *TORCH):
        raise UserError(f"weights are {FORMATS}, or 'random', got {str(path)!r}")
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fill(model: Any, path: Path, image_size: int | None) -> None:
    """Load a file into a headless timm ViT, every one of its weights and nothing else but a head, as float32.

    The model is on the device "meta", except for npz (:func:`needs_values`). Where the file has positions of another
    grid, the model takes that grid, and ``image_size`` must say which side is wanted in the end.
    """
    if needs_values(path):
        _fill_from_numpy(model, path, image_size)
        return
    state = _backbone_part(read(path), model.state_dict().keys(), path)
    _refuse_misfits(model.state_dict(), state, path, but=_POSITIONS)  # of which the grid may still change
    if _POSITIONS in state:
        _take_grid(model, tuple(state[_POSITIONS].shape), path, image_size)
    _refuse_misfits(model.state_dict(), state, path)
    model.load_state_dict(as_float32(state), assign=True)


def needs_values(path: Path) -> bool:
    """Whether the model to fill must hold values: timm's reader of npz copies into them."""
    return path.suffix.lower() == NUMPY


def as_float32(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, those of any other precision as float32."""
    return {name: t.detach().float() if t.is_floating_point() else t for name, t in state.items()}


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors or torch file by name, out of whatever wraps them."""
    if path.suffix.lower() == SAFETENSORS:
        return read_safetensors(path)
    return _unwrap(_read_torch(path), path)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _refuse_foreign(path, "safetensors")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error


def _refuse_foreign(path: Path, wanted: str) -> bytes:
    """Refuse what came in place of a file that was to be downloaded; gives how the file begins."""
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith(_LFS):
        what, remedy = "a pointer of git-lfs, not the file itself", "fetch that with git lfs pull, or download it"
    elif head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_HTML):
        what, remedy = "an HTML page", "download the file again, by the address of the file itself"
    else:
        return head
    raise UserError(f"{path} cannot be read as {wanted}: it is {what}; {remedy}")


def _read_torch(path: Path) -> Any:
    """What a torch file holds, as long as it is tensors and plain containers: nothing in it is ever run."""
    import torch

    wanted = "tensors saved by torch"
    if not _refuse_foreign(path, wanted).startswith((_ZIP, _PICKLE)):
        raise UserError(f"{path} cannot be read as {wanted}: it begins like no file of torch.save; download it again")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or foreign file makes torch raise anything
        found = re.search(r"(Trying to|Unsupported) .*?(?=\.\s|$)", str(error), re.MULTILINE)  # without torch's advice
        reason = found[0] if found else str(error).partition(". ")[0] or type(error).__name__
        raise UserError(
            f"{path} cannot be read as {wanted} ({reason}): nothing of it was run. Download it again, or give a file "
            f"of the weights alone, at best {SAFETENSORS}"
        ) from error


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    """The dictionary of weights inside ``{"state_dict": ...}`` and the like."""
    from torch import Tensor

    held = content if isinstance(content, Mapping) else {}
    while inside := [value for name in _WRAPPERS if isinstance(value := held.get(name), Mapping)]:
        content = held = inside[0]
    tensors = {str(name): value for name, value in held.items() if isinstance(value, Tensor)}
    if not tensors:
        names = shorten(held, 8) or f"a {type(content).__name__}"
        raise UserError(
            f"{path} holds no dictionary of weights, neither itself nor under {', '.join(_WRAPPERS)}. It holds: {names}"
        )
    return tensors


def _backbone_part(state: dict[str, Tensor], wanted: Iterable[str], path: Path) -> dict[str, Tensor]:
    """The weights under the model's own names: without what stands before these, and without heads."""
    names = set(wanted)
    prefix = _prefix(state, names, path)
    of_teacher, part = "teacher" in prefix.split("."), {}
    for name, tensor in state.items():
        inner, parts = name.removeprefix(prefix), name.split(".")
        if name.startswith(prefix):
            if inner in names or not _stands_beside(inner.split(".")[:1]):
                part[inner] = tensor
        elif not _stands_beside(parts) and not (of_teacher and "student" in parts):
            part[name] = tensor
    return part


def _prefix(state: Iterable[str], wanted: set[str], path: Path) -> str:
    """What stands before the names of the backbone ("module.backbone."), nothing where that fits none better."""
    held, token = set(state), "cls_token"
    before = {name.removesuffix(token) for name in held if name == token or name.endswith(f".{token}")}
    fitting = {prefix: sum(f"{prefix}{name}" in held for name in wanted) for prefix in before | {""}}
    most = max(fitting.values())
    if fitting[""] == most:
        return ""
    best = sorted(prefix for prefix, count in fitting.items() if count == most)
    teachers = [prefix for prefix in best if "teacher" in prefix.split(".")]
    chosen = best if len(best) == 1 else teachers
    if len(chosen) != 1:
        raise UserError(
            f"{path} holds {len(best)} backbones, under {', '.join(best)}: give a file with the one that is meant"
        )
    return chosen[0]


def _stands_beside(parts: Iterable[str]) -> bool:
    return any(part in _BESIDE or part.startswith(_DECODER) for part in parts)


def _refuse_misfits(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor], path: Path, but: str = "") -> None:
    shared = sorted((wanted.keys() & state.keys()) - {but})
    problems = {
        "missing": sorted(wanted.keys() - state.keys()),
        "unexpected": sorted(state.keys() - wanted.keys()),
        "of another shape": [
            f"{name} {tuple(state[name].shape)} instead of {tuple(wanted[name].shape)}"
            for name in shared
            if state[name].shape != wanted[name].shape
        ],
        "not of floats": [
            f"{name} {state[name].dtype}"
            for name in shared
            if wanted[name].is_floating_point() and not state[name].is_floating_point()
        ],
    }
    _refuse(problems, path)


def _refuse(problems: Mapping[str, list[str]], path: Path) -> None:
    if any(problems.values()):
        said = "; ".join(f"{what}: {shorten(names, 8)}" for what, names in problems.items() if names)
        raise UserError(f"{path} does not fit this architecture. {said}")


def _take_grid(model: Any, shape: tuple[int, ...], path: Path, image_size: int | None) -> None:
    """Give the model the grid that the file's position embeddings are for, where these are square."""
    if model.pos_embed is None or len(shape) != 3:
        return
    patches = shape[1] - (0 if model.no_embed_class else model.num_prefix_tokens)
    side = math.isqrt(max(patches, 0))
    if side == 0 or side**2 != patches or patches == model.patch_embed.num_patches:
        return
    height, width = model.patch_embed.patch_size
    if image_size is None:
        rows, columns = model.patch_embed.grid_size
        raise UserError(
            f"{path} holds positions of {side} x {side} patches, for images of {side * height} pixels; the "
            f"architecture has {rows} x {columns}, for {rows * height} pixels. Say which is wanted: "
            f"image_size={side * height} takes the positions as they are, any other image_size resamples them"
        )
    model.set_input_size((side * height, side * width))


def _fill_from_numpy(model: Any, path: Path, image_size: int | None) -> None:
    """Load Google's layout by timm's own reader, and see that it left nothing out on either side."""
    import torch

    _compare_with_numpy(model, path, image_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)  # what is still so afterwards was not in the file
        try:
            model.load_pretrained(str(path))
        except KeyError as error:
            _refuse({"missing": [str(error).strip("'\"")]}, path)
        except (*_DAMAGED, RuntimeError, AttributeError, TypeError) as error:
            raise UserError(f"{path} does not fit this architecture: {error}") from error
    _refuse({"missing": [name for name, value in model.named_parameters() if value.isnan().any()]}, path)


def _compare_with_numpy(model: Any, path: Path, image_size: int | None) -> None:
    """Refuse what timm's reader would skip, stretch or resample without a word."""
    import numpy as np

    _refuse_foreign(path, "an npz of arrays")
    try:
        with np.load(path, allow_pickle=False) as archive:
            layout = next((p for p in _NUMPY_LAYOUTS if f"{p}embedding/kernel" in archive.files), None)
            if layout is None:
                raise UserError(f"{path} is not in Google's layout of a ViT. It holds: {shorten(archive.files, 8)}")
            inner = [name.removeprefix(layout) for name in archive.files if name.startswith(layout)]
            kernel = archive[f"{layout}embedding/kernel"]
            names = (f"{layout}pos_embedding", f"{layout}Transformer/posembed_input/pos_embedding")
            positions: tuple[int, ...] = next((archive[name].shape for name in names if name in archive), ())
            heads, blocks = _numpy_heads_and_blocks(archive, layout)
    except (*_DAMAGED, TypeError) as error:  # an array alone is no context
        raise UserError(f"{path} cannot be read as an npz of arrays: {error}") from error
    _refuse({"unexpected": sorted(name for name in inner if not name.startswith(_NUMPY_PARTS))}, path)
    own_heads, patch = model.blocks[0].attn.num_heads, tuple(model.patch_embed.patch_size)
    pairs = {
        "blocks": (blocks, len(model.blocks)),
        "heads": (heads, own_heads),
        "patch": (tuple(kernel.shape[:2]), patch),
        "width": (kernel.shape[-1], model.embed_dim),
    }
    differing = [f"{name} {found} instead of {own}" for name, (found, own) in pairs.items() if found != own]
    _refuse({"of another shape": differing}, path)
    _take_grid(model, positions, path, image_size)


def _numpy_heads_and_blocks(archive: Mapping[str, NDArray[Any]], layout: str) -> tuple[int | None, int]:
    """Attention heads and blocks, which are stored one by one or all stacked."""
    kernels = [name for name in archive if name.startswith(layout) and name.endswith("/query/kernel")]
    kernels = [name for name in kernels if "/encoderblock" in name]
    if not kernels:
        return None, 0
    shape = archive[kernels[0]].shape  # (D, heads, D / heads), or (blocks, D, heads, D / heads)
    return shape[-2], shape[0] if len(shape) == 4 else len(kernels)
