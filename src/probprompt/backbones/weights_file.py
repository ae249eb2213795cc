"""Weights files: safetensors, npz of Google's JAX models, and tensors saved by torch.

Nothing in a file is executed: a pickle of anything but tensors and plain containers is rejected.
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
# Keys of weights in common files. Authors evaluate the teacher, so it comes first.
_WRAPPERS = ("teacher", "state_dict", "model")
# Parts that are not of the backbone: heads and parts for pretraining.
_OTHER_PARTS = {"head", "head_dist", "fc", "fc_norm", "classifier", "pre_logits", "projector", "predictor", "contrast"}
_OTHER_PARTS |= {"mask_token", "masked_embed", "dino_head", "ibot_head", "dino_loss", "ibot_patch_loss"}
_POSITIONS = "pos_embed"
_DECODER = "decoder"  # prefix of a masked autoencoder's decoder_embed, decoder_blocks, ...
_BROKEN = (ValueError, OSError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)  # from corrupted npz
_NUMPY_LAYOUTS = ("", "opt/target/", "params/", "params/img/")
_NUMPY_PARTS = ("embedding/", "cls", "pos_embedding", "Transformer/", "head/", "pre_logits/")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"  # first bytes of files of torch.save
_LFS = b"version https://git-lfs"
_HTML = (b"<!doctype", b"<html", b"<head", b"<?xml")


def digest(path: Path) -> str:
    """Return the SHA-256 of a weights file."""
    if path.suffix.lower() not in (SAFETENSORS, NUMPY, *TORCH):
        raise UserError(f"Weights must be {FORMATS}, or 'random', got {str(path)!r}.")
    if not path.is_file():
        raise UserError(f"File {path} not found. Pass an existing file of weights.")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fill(model: Any, path: Path, image_size: int | None) -> None:
    """Load all weights of a headless timm ViT as float32; raise UserError for misfits.

    The model is on the device "meta", except for npz (:func:`needs_values`). If the file has positions of another grid,
    the model takes that grid, and ``image_size`` must be given.
    """
    if needs_values(path):
        _fill_from_numpy(model, path, image_size)
        return
    state = _backbone_part(read(path), model.state_dict().keys(), path)
    _check_fit(model.state_dict(), state, path, ignore=_POSITIONS)  # its grid may change below
    if _POSITIONS in state:
        _take_grid(model, tuple(state[_POSITIONS].shape), path, image_size)
    _check_fit(model.state_dict(), state, path)
    model.load_state_dict(as_float32(state), assign=True)


def needs_values(path: Path) -> bool:
    """Return True if the model must not be on "meta": timm's reader of npz copies into it."""
    return path.suffix.lower() == NUMPY


def as_float32(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights of any precision to float32."""
    return {name: t.detach().float() if t.is_floating_point() else t for name, t in state.items()}


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors or torch file by name."""
    if path.suffix.lower() == SAFETENSORS:
        return read_safetensors(path)
    return _unwrap(_read_torch(path), path)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _read_start(path, "safetensors")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"Could not read {path} as safetensors: {error}.") from error


def _read_start(path: Path, expected: str) -> bytes:
    """Return the first bytes of a file; raise UserError for a failed download."""
    with path.open("rb") as file:
        start = file.read(512)
    if start.startswith(_LFS):
        problem = "a git-lfs pointer. Run 'git lfs pull', or download the file"
    elif start.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_HTML):
        problem = "an HTML page. Download the file again by its own address"
    else:
        return start
    raise UserError(f"Could not read {path} as {expected}: it is {problem}.")


def _read_torch(path: Path) -> Any:
    import torch

    expected = "tensors saved by torch"
    if not _read_start(path, expected).startswith((_ZIP, _PICKLE)):
        raise UserError(f"Could not read {path} as {expected}: unknown format. Download it again.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # corrupted and foreign files raise any exception
        match = re.search(r"(Trying to|Unsupported) .*?(?=\.\s|$)", str(error), re.MULTILINE)  # without torch's advice
        reason = match[0] if match else str(error).partition(". ")[0] or type(error).__name__
        raise UserError(
            f"Could not read {path} as {expected} ({reason}). Nothing was executed. Download it again, or pass a "
            f"{SAFETENSORS} file of the weights."
        ) from error


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    from torch import Tensor

    state = content if isinstance(content, Mapping) else {}
    while inside := [value for name in _WRAPPERS if isinstance(value := state.get(name), Mapping)]:
        content = state = inside[0]
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        names = shorten(state, 8) or f"a {type(content).__name__}"
        keys = ", ".join(_WRAPPERS)
        raise UserError(f"{path} has no weights at the top or under {keys}. It contains: {names}.")
    return tensors


def _backbone_part(state: dict[str, Tensor], expected: Iterable[str], path: Path) -> dict[str, Tensor]:
    """Return the weights of the backbone, without prefixes of names and without heads."""
    names = set(expected)
    prefix = _prefix(state, names, path)
    of_teacher, part = "teacher" in prefix.split("."), {}
    for name, tensor in state.items():
        inner, parts = name.removeprefix(prefix), name.split(".")
        if name.startswith(prefix):
            if inner in names or not _is_other_part(inner.split(".")[:1]):
                part[inner] = tensor
        elif not _is_other_part(parts) and not (of_teacher and "student" in parts):
            part[name] = tensor
    return part


def _prefix(state: Iterable[str], expected: set[str], path: Path) -> str:
    """Return the prefix of the backbone's names ("module.backbone."), or an empty string."""
    names, token = set(state), "cls_token"
    prefixes = {name.removesuffix(token) for name in names if name == token or name.endswith(f".{token}")}
    counts = {prefix: sum(f"{prefix}{name}" in names for name in expected) for prefix in prefixes | {""}}
    most = max(counts.values())
    if counts[""] == most:
        return ""
    best = sorted(prefix for prefix, count in counts.items() if count == most)
    teachers = [prefix for prefix in best if "teacher" in prefix.split(".")]
    chosen = best if len(best) == 1 else teachers
    if len(chosen) != 1:
        raise UserError(f"{path} contains {len(best)} backbones: {', '.join(best)}. Pass a file with one of them.")
    return chosen[0]


def _is_other_part(parts: Iterable[str]) -> bool:
    return any(part in _OTHER_PARTS or part.startswith(_DECODER) for part in parts)


def _check_fit(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], path: Path, ignore: str = "") -> None:
    shared = sorted((expected.keys() & state.keys()) - {ignore})
    shapes = {name: (tuple(state[name].shape), tuple(expected[name].shape)) for name in shared}
    floats = (name for name in shared if expected[name].is_floating_point())
    problems = {
        "missing": sorted(expected.keys() - state.keys()),
        "unexpected": sorted(state.keys() - expected.keys()),
        "other shape": [f"{name} {own} instead of {due}" for name, (own, due) in shapes.items() if own != due],
        "not float": [f"{name} {state[name].dtype}" for name in floats if not state[name].is_floating_point()],
    }
    _raise_misfits(problems, path)


def _raise_misfits(problems: Mapping[str, list[str]], path: Path) -> None:
    if any(problems.values()):
        details = "; ".join(f"{kind}: {shorten(names, 8)}" for kind, names in problems.items() if names)
        raise UserError(f"{path} does not fit this architecture. {details}. Pass the weights of this backbone.")


def _take_grid(model: Any, shape: tuple[int, ...], path: Path, image_size: int | None) -> None:
    """Set the model's grid to that of the file's position embeddings, if these are square."""
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
            f"{path} has {side}x{side} position embeddings ({side * height} px), the architecture {rows}x{columns} "
            f"({rows * height} px). Set image_size={side * height} to keep them, or another size to resample them."
        )
    model.set_input_size((side * height, side * width))


def _fill_from_numpy(model: Any, path: Path, image_size: int | None) -> None:
    """Load Google's layout with timm's reader, and check that all weights were loaded."""
    import torch

    _check_numpy(model, path, image_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)  # remains NaN if the file lacks it
        try:
            model.load_pretrained(str(path))
        except KeyError as error:
            _raise_misfits({"missing": [str(error).strip("'\"")]}, path)
        except (*_BROKEN, RuntimeError, AttributeError, TypeError) as error:
            raise UserError(f"{path} does not fit this architecture: {error}.") from error
    _raise_misfits({"missing": [name for name, value in model.named_parameters() if value.isnan().any()]}, path)


def _check_numpy(model: Any, path: Path, image_size: int | None) -> None:
    """Raise UserError for what timm's reader would silently skip, stretch or resample."""
    import numpy as np

    _read_start(path, "an npz of arrays")
    try:
        with np.load(path, allow_pickle=False) as archive:
            layout = next((p for p in _NUMPY_LAYOUTS if f"{p}embedding/kernel" in archive.files), None)
            if layout is None:
                raise UserError(f"{path} is not in Google's ViT layout. It contains: {shorten(archive.files, 8)}.")
            inner = [name.removeprefix(layout) for name in archive.files if name.startswith(layout)]
            kernel = archive[f"{layout}embedding/kernel"]
            names = (f"{layout}pos_embedding", f"{layout}Transformer/posembed_input/pos_embedding")
            positions: tuple[int, ...] = next((archive[name].shape for name in names if name in archive), ())
            heads, blocks = _numpy_heads_and_blocks(archive, layout)
    except (*_BROKEN, TypeError) as error:  # TypeError: a single array is not a context manager
        raise UserError(f"Could not read {path} as an npz of arrays: {error}.") from error
    _raise_misfits({"unexpected": sorted(name for name in inner if not name.startswith(_NUMPY_PARTS))}, path)
    own_heads, patch = model.blocks[0].attn.num_heads, tuple(model.patch_embed.patch_size)
    pairs = {
        "blocks": (blocks, len(model.blocks)),
        "heads": (heads, own_heads),
        "patch": (tuple(kernel.shape[:2]), patch),
        "width": (kernel.shape[-1], model.embed_dim),
    }
    differing = [f"{name} {value} instead of {own}" for name, (value, own) in pairs.items() if value != own]
    _raise_misfits({"other shape": differing}, path)
    _take_grid(model, positions, path, image_size)


def _numpy_heads_and_blocks(archive: Mapping[str, NDArray[Any]], layout: str) -> tuple[int | None, int]:
    kernels = [name for name in archive if name.startswith(layout) and name.endswith("/query/kernel")]
    kernels = [name for name in kernels if "/encoderblock" in name]
    if not kernels:
        return None, 0
    shape = archive[kernels[0]].shape  # (D, heads, D / heads), or (blocks, D, heads, D / heads)
    return shape[-2], shape[0] if len(shape) == 4 else len(kernels)
