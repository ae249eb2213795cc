"""Pretrained backbones: download, preprocessing and verification of named weights.

A name is one of the short names below, a timm name ``architecture.tag``, or a timm architecture with a file of weights.
timm and torch are imported only for loading.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from probprompt.backbones import weights_file
from probprompt.errors import UserError, is_out_of_memory, shorten
from probprompt.hub import TIMEOUT, failures

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch import nn

    from probprompt.backbones.vit import FrozenViT


Color = tuple[float, float, float]
RANDOM = "random"  # value of ``weights`` for fixed untrained weights, for tests and timings only
_PACKAGED = Path(__file__).parent.parent / "weights"
_PACKAGED_FILE = "demo.safetensors"
_HUB_FILE = "model.safetensors"
_PASS_FILE = "pass a file with --weights (Python: weights=FILE)"
_HUB_CACHE, _TORCH_CACHE = "Hugging Face cache", "torch.hub cache"
# Names of timm's plain ViTs with a class token and a tag, recognized without importing timm.
_PLAIN = re.compile(
    r"(test_vit|(vit|deit3?)_[a-z0-9]+_patch\d+(_reg\d)?(_plus)?(_clip(_quickgelu)?|_dinov2|_tipsv2)?(_\d+)?(_miil)?)\.\w+"
)
_INIT_LOCK = threading.RLock()  # for random weights, since all threads share the generator


@dataclass(frozen=True)
class Preprocessing:
    """Image size in pixels, and mean and standard deviation of each color in [0, 1]."""

    image_size: int
    mean: Color
    std: Color

    def __post_init__(self) -> None:
        if self.image_size < 1 or len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"expected a positive image size, 3 means and 3 positive standard deviations, got {self}")


@dataclass(frozen=True)
class Checkpoint:
    """Named weights."""

    name: str
    architecture: str  # timm's name; empty for a VisionTransformer of ``arguments``
    preprocessing: Preprocessing
    source: str  # repository on the Hugging Face Hub, or empty
    license: str
    description: str = ""
    torch_file: str = ""  # file in the cache of torch.hub, where older loaders store the same weights
    obtain: str = ""  # where to get the file, without a source
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    """A named checkpoint, with its place and size in bytes if it is available offline."""

    name: str
    description: str
    source: str
    license: str
    available: bool
    place: str = ""
    size: int | None = None


@dataclass(frozen=True)
class LoadedBackbone:
    """A frozen backbone and its description."""

    model: FrozenViT
    preprocessing: Preprocessing
    name: str
    source: str  # packaged, hub:REPOSITORY, torch-hub:FILE, file:PATH or random
    sha256: str  # of the weights file, or the fingerprint of random weights


def _vit_base(name: str, tag: str, prepared: Preprocessing, pretraining: str, torch_file: str = "") -> Checkpoint:
    timm_name, description = f"vit_base_patch16_224.{tag}", f"ViT-B/16, {pretraining}"
    return Checkpoint(name, timm_name, prepared, f"timm/{timm_name}", "apache-2.0", description, torch_file)


_HALF = Preprocessing(224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_IMAGENET = Preprocessing(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_AUGREG_FILE = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz"
# Not downloaded automatically, since no hash of this file is published.
_IBOT1K = Checkpoint(
    name="ibot1k",
    architecture="vit_base_patch16_224",
    preprocessing=_IMAGENET,
    source="",
    license="apache-2.0",
    description="ViT-B/16, self-supervised (iBOT) on ImageNet-1K; needs the authors' file",
    obtain="the teacher backbone of ViT-B/16 (vitb_16/checkpoint_teacher.pth), linked in the README of bytedance/ibot",
)
_NAMED = {
    "sup1k": _vit_base("sup1k", "augreg2_in21k_ft_in1k", _HALF, "supervised on ImageNet-21K, then on ImageNet-1K"),
    "sup21k": _vit_base("sup21k", "augreg_in21k", _HALF, "supervised on ImageNet-21K", _AUGREG_FILE),
    "ibot1k": _IBOT1K,
    "dino1k": _vit_base(
        "dino1k", "dino", _IMAGENET, "self-supervised (DINO) on ImageNet-1K", "dino_vitbase16_pretrain.pth"
    ),
}


def known() -> list[Listing]:
    """List named checkpoints and supported timm ViTs in the Hub's cache, without network."""
    packaged = [_PACKAGED / file for file in (_PACKAGED_FILE, "demo.json")]
    demo = packaged[0] if all(path.is_file() for path in packaged) else None
    listings = [_listing("demo", "small ViT in the package", "packaged", "apache-2.0", demo, "packaged")]
    for name, checkpoint in _NAMED.items():
        source = f"hub:{checkpoint.source}" if checkpoint.source else f"file for timm/{checkpoint.architecture}"
        listings.append(_listing(name, checkpoint.description, source, checkpoint.license, *_cached(checkpoint)))
    for name in _cached_names():
        source = f"timm/{name}"
        if path := _cached_hub_file(source):
            listings.append(_listing(name, "timm model in the cache", f"hub:{source}", "see there", path, _HUB_CACHE))
    return listings


def _listing(name: str, description: str, source: str, license: str, path: Path | None, place: str) -> Listing:
    if path is None:
        return Listing(name, description, source, license, available=False)
    return Listing(name, description, source, license, True, place, path.stat().st_size)


def origin(name: str) -> tuple[str, str]:
    """Return the repository (or an empty string) and license of named weights.

    >>> origin("sup1k")
    ('timm/vit_base_patch16_224.augreg2_in21k_ft_in1k', 'apache-2.0')
    """
    if name == "demo":
        return "", "apache-2.0"
    checkpoint = find_checkpoint(name)
    return checkpoint.source, checkpoint.license


def find_file(name: str) -> Path | None:
    """Return the local file of named weights; None if it must be downloaded."""
    return _PACKAGED / _PACKAGED_FILE if name == "demo" else _locate(find_checkpoint(name))[0]


def download(name: str) -> Path:
    """Return the file of named weights, downloaded if needed."""
    return find_file(name) or _download(find_checkpoint(name))


def find_checkpoint(name: str) -> Checkpoint:
    """Return a named checkpoint or that of a timm name; raise UserError for unknown names."""
    return _NAMED[name] if name in _NAMED else _find_in_timm(name)


def load_backbone(
    name: str, weights: str | Path | None = None, image_size: int | None = None, expected_sha256: str | None = None
) -> LoadedBackbone:
    """Load a backbone by name and freeze it.

    Args:
        name: ``demo``, ``sup1k``, ``sup21k``, ``ibot1k``, ``dino1k``, a timm name ``architecture.tag``, or a timm
            architecture. The last and ``ibot1k`` need ``weights``.
        weights: A file (safetensors, npz in Google's layout, tensors saved by torch) or ``random``. Images are prepared
            as by timm for ``name``, unless a JSON file next to it with the same stem contains
            ``{"preprocessing": {"image_size": ..., "mean": [...], "std": [...]}}``.
        image_size: Size in pixels; another size than that of the weights resamples their position embeddings.
        expected_sha256: Required SHA-256 of the weights.

    """
    if name == "demo":
        if weights is not None:
            raise UserError("'demo' includes its weights. Remove --weights, or choose a timm architecture.")
        return _load_packaged(image_size, expected_sha256)
    checkpoint = find_checkpoint(name)
    if weights is None:
        return _load_by_name(checkpoint, image_size, expected_sha256)
    if weights == RANDOM:
        return _load_random(checkpoint, image_size, expected_sha256)
    return _load_file(checkpoint, Path(weights), f"file:{weights}", image_size, expected_sha256)


def _find_in_timm(name: str) -> Checkpoint:
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = get_close_matches(name, ["demo", *_NAMED], n=2)
        near += get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.7)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"Unknown backbone {name!r}.{hint} Choose {', '.join(['demo', *_NAMED])}, a timm name architecture.tag, or "
            "a timm architecture with --weights (Python: weights=FILE)."
        )
    tagged = timm.list_pretrained(f"{architecture}.*")
    if tag and name not in tagged:
        raise UserError(f"timm has no weights {tag!r} for {architecture}. Choose one of {shorten(tagged, 12)}.")
    config = timm.get_pretrained_cfg(name)
    if config is None:
        raise UserError(f"timm has no preprocessing for {name!r}. Choose another architecture.")
    source = config.hf_hub_id or "" if tag else ""
    return Checkpoint(
        name=name,
        architecture=name,
        preprocessing=Preprocessing(config.input_size[-1], _color(config.mean), _color(config.std)),
        source=source,
        license=config.license or "unknown",
        torch_file=str(config.url or "").rpartition("/")[2] if tag else "",
    )


def _load_packaged(image_size: int | None, expected_sha256: str | None) -> LoadedBackbone:
    description, weights = _PACKAGED / "demo.json", _PACKAGED / _PACKAGED_FILE
    if not description.is_file() or not weights.is_file():
        raise UserError(f"Demo weights not found in {_PACKAGED}. Reinstall probprompt.")
    content = json.loads(description.read_text(encoding="utf-8"))
    prepared = _parse_preprocessing(content["preprocessing"], description)
    checkpoint = Checkpoint("demo", "", prepared, "", "apache-2.0", arguments=content["architecture"])
    return _load_file(checkpoint, weights, "packaged", image_size, expected_sha256 or content["sha256"])


def _load_random(checkpoint: Checkpoint, image_size: int | None, expected: str | None) -> LoadedBackbone:
    import torch

    from probprompt.backbones.vit import fingerprint

    if checkpoint.source or checkpoint.obtain:
        architecture = checkpoint.architecture.partition(".")[0]
        raise UserError(f"{checkpoint.name!r} has trained weights. For random weights, choose {architecture!r}.")
    with _INIT_LOCK, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed GPUs
        model = _build(checkpoint, device="cpu")
    sha256 = fingerprint(model)
    _check_hash(sha256, expected, "the random weights")
    return _freeze(model, checkpoint.name, checkpoint.preprocessing, image_size, RANDOM, sha256)


def _load_file(
    checkpoint: Checkpoint, path: Path, source: str, image_size: int | None, expected: str | None
) -> LoadedBackbone:
    sha256 = weights_file.digest(path)
    _check_hash(sha256, expected, str(path))
    described = _described_preprocessing(path)
    if described is None:
        _check_preprocessing(checkpoint, path)
    # On "meta", no time is spent on initial values that the file replaces.
    model = _build(checkpoint, device="cpu" if weights_file.needs_values(path) else "meta")
    weights_file.fill(model, path, described.image_size if image_size is None and described else image_size)
    prepared = described or replace(checkpoint.preprocessing, image_size=int(model.patch_embed.img_size[0]))
    return _freeze(model, checkpoint.name, prepared, image_size, source, sha256)


def _check_preprocessing(checkpoint: Checkpoint, path: Path) -> None:
    """Raise UserError if timm's weights for an architecture differ in their preprocessing."""
    import timm

    if checkpoint.name in _NAMED or not checkpoint.architecture or "." in checkpoint.architecture:
        return
    variants: dict[tuple[Color, Color], list[str]] = {}
    for name in timm.list_pretrained(f"{checkpoint.architecture}.*"):
        config: Any = timm.get_pretrained_cfg(name)
        variants.setdefault((_color(config.mean), _color(config.std)), []).append(name)
    if len(variants) > 1:
        details = "; ".join(f"mean {mean}: {shorten(names, 4)}" for (mean, _), names in variants.items())
        raise UserError(
            f"Preprocessing of {path} is ambiguous for {checkpoint.name!r} ({details}). Choose one of these names, or "
            f'write {{"preprocessing": {{"image_size": ..., "mean": [...], "std": [...]}}}} to '
            f"{path.with_suffix('.json').name} next to it."
        )


def _load_by_name(checkpoint: Checkpoint, image_size: int | None, expected: str | None) -> LoadedBackbone:
    _build(checkpoint, device="meta")  # rejects unsupported models before a download
    path, place = _locate(checkpoint)
    if path is not None and place == _TORCH_CACHE:
        return _load_file(checkpoint, path, f"torch-hub:{path.name}", image_size, expected)
    return _load_hub_file(checkpoint, path or _download(checkpoint), image_size, expected)


def _locate(checkpoint: Checkpoint) -> tuple[Path | None, str]:
    """Return the result of :func:`_cached`; raise UserError if a download is impossible."""
    path, place = _cached(checkpoint)
    if path is None and checkpoint.obtain:
        raise UserError(f"{checkpoint.name!r} has no automatic download. Get {checkpoint.obtain}, and {_PASS_FILE}.")
    if path is None and not checkpoint.source:
        import timm

        name = checkpoint.architecture
        tagged = shorten(timm.list_pretrained(f"{name.partition('.')[0]}.*"), 12) or "none"
        raise UserError(
            f"{name!r} has no default weights. Choose a timm model of the Hub ({tagged}), {_PASS_FILE}, or pass "
            f"{RANDOM!r} instead."
        )
    return path, place


def _load_hub_file(checkpoint: Checkpoint, path: Path, image_size: int | None, expected: str | None) -> LoadedBackbone:
    import timm

    sha256 = weights_file.digest(path)
    _check_hash(sha256, _hash_of_blob(path), f"{path} is corrupted (remove it)")
    _check_hash(sha256, expected, str(path))
    state = weights_file.as_float32(weights_file.read_safetensors(path))
    try:
        # timm converts weights if needed, and loads them strictly as long as the model has its head.
        model: Any = timm.create_model(
            checkpoint.architecture, pretrained=True, pretrained_cfg_overlay={"state_dict": state}, weight_init="skip"
        )
    except RuntimeError as error:
        raise UserError(f"{path} does not fit {checkpoint.architecture!r}: {' '.join(str(error).split())}") from error
    model.pretrained_cfg.pop("state_dict")  # a second copy of all weights
    model.reset_classifier(0)
    return _freeze(model, checkpoint.name, checkpoint.preprocessing, image_size, f"hub:{checkpoint.source}", sha256)


def _cached(checkpoint: Checkpoint) -> tuple[Path | None, str]:
    if checkpoint.source and (cached := _cached_hub_file(checkpoint.source)):
        return cached, _HUB_CACHE
    path = _torch_cache() / checkpoint.torch_file
    return (path, _TORCH_CACHE) if checkpoint.torch_file and path.is_file() else (None, "")


def _torch_cache() -> Path:
    """Return the folder of torch.hub without importing torch, which is slow."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("TORCH_HOME") or cache / "torch").expanduser() / "hub" / "checkpoints"


def _cached_hub_file(repository: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repository, _HUB_FILE)
    return Path(path) if isinstance(path, str) else None


def _cached_names() -> list[str]:
    from huggingface_hub import constants

    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--timm--*"))
    names = [folder.name.removeprefix("models--timm--") for folder in folders]
    listed = {checkpoint.architecture for checkpoint in _NAMED.values()}
    return [name for name in names if _PLAIN.fullmatch(name) and name not in listed]


def _hash_of_blob(path: Path) -> str | None:
    """Return the Hub's hash of a file, which names large files in the cache."""
    name = path.resolve().name
    return name if path.is_symlink() and len(name) == 64 and set(name) <= set("0123456789abcdef") else None


def _download(checkpoint: Checkpoint) -> Path:
    import huggingface_hub
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        # Fails immediately without a network, where the download would retry for a minute.
        get_hf_file_metadata(hf_hub_url(checkpoint.source, _HUB_FILE), timeout=TIMEOUT)
        return Path(hf_hub_download(checkpoint.source, _HUB_FILE))
    except failures() as error:
        caches = f"{huggingface_hub.constants.HF_HUB_CACHE} or {_torch_cache()}"
        raise UserError(
            f"Weights of {checkpoint.name!r} are not in {caches}, and {checkpoint.source} could not be downloaded: "
            f"{error}. Connect to the network, {_PASS_FILE} ({_HUB_FILE}), or use 'demo', which needs no download."
        ) from error


def _build(checkpoint: Checkpoint, device: str) -> Any:
    """Build the architecture without a head; on the device "meta" it has no values."""
    import timm
    import torch
    from timm.models.vision_transformer import VisionTransformer

    from probprompt.backbones.vit import SUPPORTED, check_supported

    model: nn.Module
    try:
        with _INIT_LOCK, torch.device(device):
            if checkpoint.architecture:
                model = timm.create_model(checkpoint.architecture, num_classes=0, **checkpoint.arguments)
            else:
                model = VisionTransformer(**{**checkpoint.arguments, "num_classes": 0})
        check_supported(model)
    except UserError as error:
        raise UserError(f"Unsupported backbone {checkpoint.name!r}. {error}") from None
    except (NotImplementedError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        # Some architectures read values while they are built, which "meta" lacks. No plain ViT does.
        raise UserError(f"Unsupported backbone {checkpoint.name!r}: not a plain ViT. {SUPPORTED}") from error
    return model


def _check_hash(sha256: str, expected: str | None, subject: str) -> None:
    if expected is not None and sha256 != expected.lower():
        raise UserError(
            f"{subject}: SHA-256 mismatch (expected {expected}, got {sha256}). Pass the weights this run was trained "
            "with, or start a new run."
        )


def _described_preprocessing(path: Path) -> Preprocessing | None:
    description = path.with_suffix(".json")
    if not description.is_file():
        return None
    try:
        content = json.loads(description.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{description} is not JSON: {error}.") from error
    if not isinstance(content, dict) or "preprocessing" not in content:
        return None
    return _parse_preprocessing(content["preprocessing"], description)


def _color(values: Iterable[float]) -> Color:
    red, green, blue = values
    return float(red), float(green), float(blue)


def _parse_preprocessing(content: Any, where: Path) -> Preprocessing:
    try:
        return Preprocessing(int(content["image_size"]), _color(content["mean"]), _color(content["std"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f'{where}: "preprocessing" must contain "image_size" (a number), "mean" and "std" (three numbers each), '
            f"got {content!r} ({error})."
        ) from error


def _freeze(
    model: Any, name: str, prepared: Preprocessing, image_size: int | None, source: str, sha256: str
) -> LoadedBackbone:
    from probprompt.backbones.vit import FrozenViT

    size = prepared.image_size if image_size is None else image_size
    patch = model.patch_embed.patch_size
    if size < 1 or any(size % side for side in patch):
        raise UserError(f"Image size {size} is not a multiple of the patch size {patch} of {name!r}.")
    if size != model.patch_embed.img_size[0]:
        model.set_input_size((size, size))
    return LoadedBackbone(FrozenViT(model), replace(prepared, image_size=size), name, source, sha256)


_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "giant": "g"}
_TIMM = re.compile(r"vit_(?P<size>[a-z]+)_patch(?P<patch>\d+)(?:_(?P<kind>[a-z]\w*?))?(?:_(?P<side>\d{3}))?")
_ONLY = ("lvd142m",)  # tags of architectures without other weights


def slug(text: str) -> str:
    """Return a name for a path: lower-case words joined by dashes.

    >>> slug("My_weights (v2)")
    'my-weights-v2'
    """
    return re.sub(r"[^a-z0-9+]+", "-", text.lower()).strip("-")


def _parts(backbone: Mapping[str, JsonValue]) -> tuple[str, str]:
    name, weights = str(backbone["name"]), str(backbone.get("weights") or "")
    if name in _NAMED:
        return "ViT-B/16", name
    architecture, _, tag = name.partition(".")
    network, kind = architecture, ""
    match = _TIMM.fullmatch(architecture)
    if match and match["size"] in _SIZES:
        side = "" if match["side"] in (None, "224") else f" at {match['side']}"
        network, kind = f"ViT-{_SIZES[match['size']]}/{match['patch']}{side}", match["kind"] or ""
    kind = "-".join(filter(None, (kind, "" if tag in _ONLY else tag)))
    if not kind and weights:
        stem = weights if weights == RANDOM else PurePath(weights.partition("@")[0]).stem
        kind = stem.removeprefix(architecture).strip("._-")
    return network, kind


def backbone_slug(backbone: Mapping[str, JsonValue]) -> str:
    """Return a backbone's name for paths.

    >>> backbone_slug({"name": "sup1k"}), backbone_slug({"name": "vit_small_patch14_dinov2.lvd142m"})
    ('vit-b16-sup1k', 'vit-s14-dinov2')
    >>> backbone_slug({"name": "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "weights": "some/file.safetensors"})
    'vit-ti16-augreg-in21k-ft-in1k'
    >>> backbone_slug({"name": "vit_small_patch14_dinov2", "image_size": 224})
    'vit-s14-dinov2-224px'
    """
    network, kind = _parts(backbone)
    side = backbone.get("image_size")
    return slug(f"{network.replace('/', '')} {kind} {f'{side}px' if side else ''}")


def backbone_words(backbone: Mapping[str, JsonValue]) -> str:
    """Return a backbone's name for tables.

    >>> backbone_words({"name": "sup1k"}), backbone_words({"name": "demo", "image_size": 64})
    ('ViT-B/16 (sup1k)', 'demo at 64 px')
    """
    network, kind = _parts(backbone)
    side = backbone.get("image_size")
    return (f"{network} ({slug(kind)})" if kind else network) + (f" at {side} px" if side else "")


def find_weights(weights: str | None, home: Path) -> str | None:
    """Find a recorded weights file at its path, or by name in or next to the saved folder."""
    if weights is None or weights == RANDOM or Path(weights).is_file():
        return weights
    for path in (folder / Path(weights).name for folder in (home, home.parent)):
        if path.is_file():
            return str(path)
    raise UserError(f"Weights file {weights} not found. Restore it, or copy it to {home}.")
