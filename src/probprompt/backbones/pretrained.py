"""Named weights: where they come from, how images are prepared for them, and how to check them.

A backbone is named by one of the short names below, by a timm name ``architecture.tag``, or by a timm
architecture together with a file of weights. timm and torch are imported only when something is loaded.
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


Colour = tuple[float, float, float]
RANDOM = "random"
"""Value of ``weights`` for untrained weights, always the same. For tests and timings only."""
_PACKAGED = Path(__file__).parent.parent / "weights"
_PACKAGED_FILE = "demo.safetensors"
_HUB_FILE = "model.safetensors"
_GIVE_FILE = "give a file with --weights (in Python weights=FILE)"
_HUB_CACHE, _TORCH_CACHE = "Hugging Face cache", "torch.hub cache"
# Names of timm's plain ViTs with a class token and a tag; building one would need timm.
_PLAIN = re.compile(
    r"(test_vit|(vit|deit3?)_[a-z0-9]+_patch\d+(_reg\d)?(_plus)?(_clip(_quickgelu)?|_dinov2|_tipsv2)?(_\d+)?(_miil)?)\.\w+"
)
_DRAWING = threading.RLock()
"""Held while weights are drawn, since all threads share the generator."""


@dataclass(frozen=True)
class Preprocessing:
    """Image size in pixels, and mean and standard deviation of each color in [0, 1]."""

    image_size: int
    mean: Colour
    std: Colour

    def __post_init__(self) -> None:
        if self.image_size < 1 or len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"needs a positive image size, 3 means and 3 positive deviations, got {self}")


@dataclass(frozen=True)
class Checkpoint:
    """Named weights.

    ``architecture`` is timm's name, built with additional ``arguments``; if it is empty, ``arguments`` describe a
    VisionTransformer. ``source`` is a repository on the Hugging Face hub, or empty; then ``obtain`` states where to get
    the file. ``torch_file`` is the file's name in the cache of torch.hub, where earlier versions of timm and the
    authors' loaders store the same weights.
    """

    name: str
    architecture: str
    preprocessing: Preprocessing
    source: str
    licence: str
    description: str = ""
    torch_file: str = ""
    obtain: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Listing:
    """A named checkpoint, its place and size in bytes if it can be loaded without network."""

    name: str
    description: str
    source: str
    licence: str
    available: bool
    place: str = ""
    size: int | None = None


@dataclass(frozen=True)
class LoadedBackbone:
    """A frozen backbone with what a run records of it.

    ``source``: ``packaged``, ``hub:REPOSITORY``, ``torch-hub:FILE``, ``file:PATH`` or ``random``.
    ``sha256``: hash of the file of weights, or the fingerprint of random ones.
    """

    model: FrozenViT
    preprocessing: Preprocessing
    name: str
    source: str
    sha256: str


def _vit_base(name: str, tag: str, prepared: Preprocessing, pretraining: str, torch_file: str = "") -> Checkpoint:
    timm_name, description = f"vit_base_patch16_224.{tag}", f"ViT-B/16, {pretraining}"
    return Checkpoint(name, timm_name, prepared, f"timm/{timm_name}", "apache-2.0", description, torch_file)


_HALF = Preprocessing(224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_IMAGENET = Preprocessing(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_AUGREG_FILE = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz"
# No hash of this file is published to check a download against, so it is not fetched: the user brings it.
_IBOT1K = Checkpoint(
    name="ibot1k",
    architecture="vit_base_patch16_224",
    preprocessing=_IMAGENET,
    source="",
    licence="apache-2.0",
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
    """List the named checkpoints, and timm's ViTs in the hub's cache that can be prompted, without network."""
    packaged = [_PACKAGED / file for file in (_PACKAGED_FILE, "demo.json")]
    demo = packaged[0] if all(path.is_file() for path in packaged) else None
    listings = [_listing("demo", "small ViT that comes with the package", "packaged", "apache-2.0", demo, "packaged")]
    for name, checkpoint in _NAMED.items():
        source = f"hub:{checkpoint.source}" if checkpoint.source else f"file for timm/{checkpoint.architecture}"
        listings.append(_listing(name, checkpoint.description, source, checkpoint.licence, *_cached(checkpoint)))
    for name in _cached_names():
        source = f"timm/{name}"
        if path := _cached_hub_file(source):
            listings.append(_listing(name, "of timm, in the cache", f"hub:{source}", "see there", path, _HUB_CACHE))
    return listings


def _listing(name: str, description: str, source: str, licence: str, path: Path | None, place: str) -> Listing:
    if path is None:
        return Listing(name, description, source, licence, available=False)
    return Listing(name, description, source, licence, True, place, path.stat().st_size)


def origin(name: str) -> tuple[str, str]:
    """Return the repository of named weights, empty if there is none, and their license.

    >>> origin("sup1k")
    ('timm/vit_base_patch16_224.augreg2_in21k_ft_in1k', 'apache-2.0')
    """
    if name == "demo":
        return "", "apache-2.0"
    checkpoint = find_checkpoint(name)
    return checkpoint.source, checkpoint.licence


def find_file(name: str) -> Path | None:
    """Return the file of named weights on this machine, without network; None if it must be downloaded.

    Unknown names are an error, and so are missing weights that cannot be downloaded.
    """
    return _PACKAGED / _PACKAGED_FILE if name == "demo" else _found(find_checkpoint(name))[0]


def fetch(name: str) -> Path:
    """Download named weights unless they are on this machine, and return their file."""
    return find_file(name) or _download(find_checkpoint(name))


def find_checkpoint(name: str) -> Checkpoint:
    """Return what is known of a named checkpoint, or of a timm name; unknown names are an error."""
    return _NAMED[name] if name in _NAMED else _find_in_timm(name)


def load_backbone(
    name: str,
    weights: str | Path | None = None,
    image_size: int | None = None,
    expected_sha256: str | None = None,
) -> LoadedBackbone:
    """Load a backbone by name and freeze it.

    ``name`` is ``demo``, ``sup1k``, ``sup21k``, ``ibot1k``, ``dino1k``, a timm name ``architecture.tag``, or a
    timm architecture alone, which then needs ``weights``, as ``ibot1k`` does: a file (safetensors, npz in Google's
    layout, or tensors alone saved by torch), or ``random``. With a file, images are prepared as timm does for
    ``name`` (so name the tag where there is one), unless a JSON file beside it with the same stem says
    ``{"preprocessing": {"image_size": ..., "mean": [...], "std": [...]}}``. An ``image_size`` other than that of
    the weights resamples their position embeddings, which nothing else does. Weights whose SHA-256 is not
    ``expected_sha256`` are refused.
    """
    if name == "demo":
        if weights is not None:
            raise UserError("'demo' brings its own weights: leave those away, or name a timm architecture")
        return _load_packaged(image_size, expected_sha256)
    checkpoint = find_checkpoint(name)
    if weights is None:
        return _load_by_name(checkpoint, image_size, expected_sha256)
    if weights == RANDOM:
        return _load_random(checkpoint, image_size, expected_sha256)
    return _load_file(checkpoint, Path(weights), f"file:{weights}", image_size, expected_sha256)


def _find_in_timm(name: str) -> Checkpoint:
    """Describe a timm name, ``architecture`` or ``architecture.tag``, from timm's own record of it."""
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = get_close_matches(name, ["demo", *_NAMED], n=2)
        near += get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.7)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(
            f"there is no backbone {name!r}. Allowed: {', '.join(['demo', *_NAMED])}, a timm name "
            f"architecture.tag, or a timm architecture with a file: --weights (in Python weights=FILE).{hint}"
        )
    tagged = timm.list_pretrained(f"{architecture}.*")
    if tag and name not in tagged:
        raise UserError(f"timm has no weights {tag!r} for {architecture}; it has: {shorten(tagged, 12)}")
    config = timm.get_pretrained_cfg(name)
    if config is None:
        raise UserError(f"timm does not say how images are prepared for {name!r}: name another architecture")
    source = config.hf_hub_id or "" if tag else ""
    return Checkpoint(
        name=name,
        architecture=name,
        preprocessing=Preprocessing(config.input_size[-1], _colour(config.mean), _colour(config.std)),
        source=source,
        licence=config.license or "unknown",
        torch_file=str(config.url or "").rpartition("/")[2] if tag else "",
    )


def _load_packaged(image_size: int | None, expected_sha256: str | None) -> LoadedBackbone:
    description, weights = _PACKAGED / "demo.json", _PACKAGED / _PACKAGED_FILE
    if not description.is_file() or not weights.is_file():
        raise UserError(f"the demo weights are missing from {_PACKAGED}: install the package again")
    content = json.loads(description.read_text(encoding="utf-8"))
    prepared = _parse_preprocessing(content["preprocessing"], description)
    checkpoint = Checkpoint("demo", "", prepared, "", "apache-2.0", arguments=content["architecture"])
    return _load_file(checkpoint, weights, "packaged", image_size, expected_sha256 or content["sha256"])


def _load_random(checkpoint: Checkpoint, image_size: int | None, expected: str | None) -> LoadedBackbone:
    import torch

    from probprompt.backbones.vit import fingerprint

    if checkpoint.source or checkpoint.obtain:
        architecture = checkpoint.architecture.partition(".")[0]
        raise UserError(f"{checkpoint.name!r} names trained weights: for random ones name {architecture!r}")
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # of the CPU alone: torch.manual_seed would reach GPUs too
        model = _build(checkpoint, device="cpu")
    sha256 = fingerprint(model)
    _check_hash(sha256, expected, "the random weights")
    return _freeze(model, checkpoint.name, checkpoint.preprocessing, image_size, RANDOM, sha256)


def _load_file(
    checkpoint: Checkpoint, path: Path, source: str, image_size: int | None, expected: str | None
) -> LoadedBackbone:
    sha256 = weights_file.digest(path)
    _check_hash(sha256, expected, str(path))
    beside = _preprocessing_beside(path)
    if beside is None:
        _refuse_unclear_preprocessing(checkpoint, path)
    # Without values unless they are needed: no time is spent on weights that the file replaces.
    model = _build(checkpoint, device="cpu" if weights_file.needs_values(path) else "meta")
    weights_file.fill(model, path, beside.image_size if image_size is None and beside is not None else image_size)
    prepared = beside or replace(checkpoint.preprocessing, image_size=int(model.patch_embed.img_size[0]))
    return _freeze(model, checkpoint.name, prepared, image_size, source, sha256)


def _refuse_unclear_preprocessing(checkpoint: Checkpoint, path: Path) -> None:
    """An architecture alone does not say how images are prepared where timm's weights for it differ in that."""
    import timm

    if checkpoint.name in _NAMED or not checkpoint.architecture or "." in checkpoint.architecture:
        return
    ways: dict[tuple[Colour, Colour], list[str]] = {}
    for name in timm.list_pretrained(f"{checkpoint.architecture}.*"):
        config: Any = timm.get_pretrained_cfg(name)
        ways.setdefault((_colour(config.mean), _colour(config.std)), []).append(name)
    if len(ways) > 1:
        said = "; ".join(f"mean {mean}: {shorten(names, 4)}" for (mean, _), names in ways.items())
        raise UserError(
            f"{checkpoint.name!r} alone does not say how images are prepared for {path}: its weights in timm differ "
            f'({said}). Name the one that the file is of, or put {{"preprocessing": {{"image_size": ..., "mean": '
            f'[...], "std": [...]}}}} into {path.with_suffix(".json").name} beside it'
        )


def _load_by_name(checkpoint: Checkpoint, image_size: int | None, expected: str | None) -> LoadedBackbone:
    _build(checkpoint, device="meta")  # refuses what is not supported before anything is downloaded
    path, place = _found(checkpoint)
    if path is not None and place == _TORCH_CACHE:
        return _load_file(checkpoint, path, f"torch-hub:{path.name}", image_size, expected)
    return _load_hub_file(checkpoint, path or _download(checkpoint), image_size, expected)


def _found(checkpoint: Checkpoint) -> tuple[Path | None, str]:
    """As :func:`_cached`; what is in no cache and cannot be fetched is refused."""
    path, place = _cached(checkpoint)
    if path is None and checkpoint.obtain:
        raise UserError(f"{checkpoint.name!r} is not fetched for you: get {checkpoint.obtain}, and {_GIVE_FILE}")
    if path is None and not checkpoint.source:
        import timm

        name = checkpoint.architecture
        tagged = shorten(timm.list_pretrained(f"{name.partition('.')[0]}.*"), 12) or "none"
        raise UserError(
            f"{name!r} does not say which weights: name one of timm's on the hub ({tagged}), or {_GIVE_FILE}, or "
            f"{RANDOM!r} in its place"
        )
    return path, place


def _load_hub_file(checkpoint: Checkpoint, path: Path, image_size: int | None, expected: str | None) -> LoadedBackbone:
    import timm

    sha256 = weights_file.digest(path)
    _check_hash(sha256, _hash_of_blob(path), f"{path}, which is damaged (remove it)")
    _check_hash(sha256, expected, str(path))
    state = weights_file.as_float32(weights_file.read_safetensors(path))
    try:
        # timm converts the weights where they need it, and loads them strictly as long as the head is kept.
        model: Any = timm.create_model(
            checkpoint.architecture, pretrained=True, pretrained_cfg_overlay={"state_dict": state}, weight_init="skip"
        )
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise UserError(f"{path} does not fit {checkpoint.architecture!r}: {said}") from error
    model.pretrained_cfg.pop("state_dict")  # a second copy of all weights
    model.reset_classifier(0)
    return _freeze(model, checkpoint.name, checkpoint.preprocessing, image_size, f"hub:{checkpoint.source}", sha256)


def _cached(checkpoint: Checkpoint) -> tuple[Path | None, str]:
    """Return the file of a checkpoint on this machine, and its cache."""
    if checkpoint.source and (found := _cached_hub_file(checkpoint.source)):
        return found, _HUB_CACHE
    path = _torch_cache() / checkpoint.torch_file
    return (path, _TORCH_CACHE) if checkpoint.torch_file and path.is_file() else (None, "")


def _torch_cache() -> Path:
    """Return the folder of torch.hub by its own rule, without importing torch, which is slow."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("TORCH_HOME") or cache / "torch").expanduser() / "hub" / "checkpoints"


def _cached_hub_file(repository: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, _HUB_FILE)
    return Path(found) if isinstance(found, str) else None


def _cached_names() -> list[str]:
    """List timm's ViTs in the hub's cache that can be prompted, except those with a short name."""
    from huggingface_hub import constants

    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--timm--*"))
    names = [folder.name.removeprefix("models--timm--") for folder in folders]
    listed = {checkpoint.architecture for checkpoint in _NAMED.values()}
    return [name for name in names if _PLAIN.fullmatch(name) and name not in listed]


def _hash_of_blob(path: Path) -> str | None:
    """Return the hub's hash of a file, under which the cache stores large files."""
    name = path.resolve().name
    return name if path.is_symlink() and len(name) == 64 and set(name) <= set("0123456789abcdef") else None


def _download(checkpoint: Checkpoint) -> Path:
    import huggingface_hub
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        # Asked first because it answers at once: without a network the download itself retries for a minute.
        get_hf_file_metadata(hf_hub_url(checkpoint.source, _HUB_FILE), timeout=TIMEOUT)
        return Path(hf_hub_download(checkpoint.source, _HUB_FILE))
    except failures() as error:
        raise UserError(
            f"the weights of {checkpoint.name!r} are not in the caches of this machine "
            f"({huggingface_hub.constants.HF_HUB_CACHE}, {_torch_cache()}), and {checkpoint.source} could not be "
            f"fetched from the Hugging Face hub: {error}. Connect to the network, or {_GIVE_FILE}: "
            f"{_HUB_FILE} from there; or use 'demo', which needs no download"
        ) from error


def _build(checkpoint: Checkpoint, device: str) -> Any:
    """Build the architecture without a head; on the device "meta" it has shapes and no values."""
    import timm
    import torch
    from timm.models.vision_transformer import VisionTransformer

    from probprompt.backbones.vit import SUPPORTED, refuse_unsupported

    model: nn.Module
    try:
        with _DRAWING, torch.device(device):
            if checkpoint.architecture:
                model = timm.create_model(checkpoint.architecture, num_classes=0, **checkpoint.arguments)
            else:
                model = VisionTransformer(**{**checkpoint.arguments, "num_classes": 0})
        refuse_unsupported(model)
    except UserError as error:
        raise UserError(f"{checkpoint.name!r} cannot be prompted: {error}") from None
    except (NotImplementedError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        # Some architectures read values while they are built, which "meta" lacks: no plain ViT does.
        raise UserError(f"{checkpoint.name!r} cannot be prompted: it is no plain ViT; {SUPPORTED}") from error
    return model


def _check_hash(found: str, expected: str | None, what: str) -> None:
    if expected is not None and found != expected.lower():
        raise UserError(
            f"{what}: the SHA-256 is {found}, expected was {expected}: these are other weights. Give the file that was "
            f"recorded, or start anew with this one"
        )


def _preprocessing_beside(path: Path) -> Preprocessing | None:
    description = path.with_suffix(".json")
    if not description.is_file():
        return None
    try:
        content = json.loads(description.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{description} is not JSON: {error}") from error
    if not isinstance(content, dict) or "preprocessing" not in content:
        return None
    return _parse_preprocessing(content["preprocessing"], description)


def _colour(values: Iterable[float]) -> Colour:
    red, green, blue = values
    return float(red), float(green), float(blue)


def _parse_preprocessing(content: Any, where: Path) -> Preprocessing:
    try:
        return Preprocessing(int(content["image_size"]), _colour(content["mean"]), _colour(content["std"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f'{where}: "preprocessing" must hold "image_size" (a number), "mean" and "std" (three numbers '
            f"each), got {content!r} ({error})"
        ) from error


def _freeze(
    model: Any, name: str, prepared: Preprocessing, image_size: int | None, source: str, sha256: str
) -> LoadedBackbone:
    from probprompt.backbones.vit import FrozenViT

    size = prepared.image_size if image_size is None else image_size
    patch = model.patch_embed.patch_size
    if size < 1 or any(size % side for side in patch):
        raise UserError(f"{name!r} cuts images into patches of {patch} pixels: {size} is not a multiple of it")
    if size != model.patch_embed.img_size[0]:
        model.set_input_size((size, size))
    return LoadedBackbone(FrozenViT(model), replace(prepared, image_size=size), name, source, sha256)


_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "giant": "g"}
_TIMM = re.compile(r"vit_(?P<size>[a-z]+)_patch(?P<patch>\d+)(?:_(?P<kind>[a-z]\w*?))?(?:_(?P<side>\d{3}))?")
_ONLY = ("lvd142m",)  # tags of architectures that have no other weights


def slug(text: str) -> str:
    """A name for a path: lower-case words with dashes between.

    >>> slug("My_weights (v2)")
    'my-weights-v2'
    """
    return re.sub(r"[^a-z0-9+]+", "-", text.lower()).strip("-")


def _parts(backbone: Mapping[str, JsonValue]) -> tuple[str, str]:
    """Return the kind of network and of its pretraining, as far as the names show them."""
    name, weights = str(backbone["name"]), str(backbone.get("weights") or "")
    if name in _NAMED:
        return "ViT-B/16", name
    architecture, _, tag = name.partition(".")
    network, kind = architecture, ""
    found = _TIMM.fullmatch(architecture)
    if found and found["size"] in _SIZES:
        side = "" if found["side"] in (None, "224") else f" at {found['side']}"
        network, kind = f"ViT-{_SIZES[found['size']]}/{found['patch']}{side}", found["kind"] or ""
    kind = "-".join(filter(None, (kind, "" if tag in _ONLY else tag)))
    if not kind and weights:
        stem = weights if weights == RANDOM else PurePath(weights.partition("@")[0]).stem
        kind = stem.removeprefix(architecture).strip("._-")
    return network, kind


def backbone_slug(backbone: Mapping[str, JsonValue]) -> str:
    """A backbone's name in paths, from the settings of a run.

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
    """A backbone's name in tables, with the side of its images where that is not its own.

    >>> backbone_words({"name": "sup1k"}), backbone_words({"name": "demo", "image_size": 64})
    ('ViT-B/16 (sup1k)', 'demo at 64 px')
    """
    network, kind = _parts(backbone)
    side = backbone.get("image_size")
    return (f"{network} ({slug(kind)})" if kind else network) + (f" at {side} px" if side else "")


def find_weights(weights: str | None, home: Path) -> str | None:
    """Find a recorded file of weights: at its path, or by its name in or next to the saved folder.

    So a folder can be copied together with its weights; loading compares their hash.
    """
    if weights is None or weights == RANDOM or Path(weights).is_file():
        return weights
    for beside in (folder / Path(weights).name for folder in (home, home.parent)):
        if beside.is_file():
            return str(beside)
    raise UserError(f"there is no file {weights}, whose weights are needed: put it back, or put it into {home}")
