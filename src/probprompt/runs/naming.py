"""How backbones are called in paths and in tables."""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from probprompt import checkpoints

_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "giant": "g"}
_TIMM = re.compile(r"vit_(?P<size>[a-z]+)_patch(?P<patch>\d+)(?:_(?P<kind>[a-z]\w*?))?(?:_(?P<side>\d{3}))?")
_USUAL_SIDE = "224"
_ONLY = ("lvd142m",)  # tags of architectures that have no other weights
_PAPERS = ("sup1k", "sup21k", "ibot1k", "dino1k")  # all of them ViT-B/16


def slug(text: str) -> str:
    """A name for a path: lower-case words with dashes between.

    >>> slug("My_weights (v2)")
    'my-weights-v2'
    """
    return re.sub(r"[^a-z0-9+]+", "-", text.lower()).strip("-")


def _parts(name: str, weights: str | None) -> tuple[str, str]:
    """What kind of network it is, in words, and how it was pretrained, as far as the names tell."""
    if name in _PAPERS:
        return "ViT-B/16", name
    architecture, _, tag = name.partition(".")
    network, kind = _network(architecture)
    kind = "-".join(filter(None, (kind, "" if tag in _ONLY else tag)))
    if not kind and weights:
        stem = weights if weights == checkpoints.RANDOM else PurePath(weights.partition("@")[0]).stem
        kind = stem.removeprefix(architecture).strip("._-")
    return network, kind


def _network(architecture: str) -> tuple[str, str]:
    """Its kind in words, and what of its name says how it was pretrained."""
    found = _TIMM.fullmatch(architecture)
    if not found or found["size"] not in _SIZES:
        return architecture, ""
    side = "" if found["side"] in (None, _USUAL_SIDE) else f" at {found['side']}"
    return f"ViT-{_SIZES[found['size']]}/{found['patch']}{side}", found["kind"] or ""


def backbone_slug(backbone: Mapping[str, Any]) -> str:
    """A backbone's name in paths, from the settings of a run.

    >>> backbone_slug({"name": "sup1k"}), backbone_slug({"name": "vit_small_patch14_dinov2.lvd142m"})
    ('vit-b16-sup1k', 'vit-s14-dinov2')
    >>> backbone_slug({"name": "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "weights": "some/file.safetensors"})
    'vit-ti16-augreg-in21k-ft-in1k'
    >>> backbone_slug({"name": "vit_small_patch14_dinov2", "image_size": 224})
    'vit-s14-dinov2-224px'
    """
    network, kind = _parts(str(backbone["name"]), backbone.get("weights"))
    side = backbone.get("image_size")
    return slug(f"{network.replace('/', '')} {kind} {f'{side}px' if side else ''}")


def backbone_words(backbone: Mapping[str, Any]) -> str:
    """A backbone's name in tables, with the side of its images where that is not its own.

    >>> backbone_words({"name": "sup1k"}), backbone_words({"name": "demo", "image_size": 64})
    ('ViT-B/16 (sup1k)', 'demo at 64 px')
    """
    network, kind = _parts(str(backbone["name"]), backbone.get("weights"))
    side = backbone.get("image_size")
    return (f"{network} ({slug(kind)})" if kind else network) + (f" at {side} px" if side else "")
