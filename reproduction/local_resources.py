"""Images and weights of this machine, and their differences from the paper's."""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from probprompt.backbones import pretrained
from probprompt.backbones.pretrained import find_file
from probprompt.backbones.weights_file import digest
from probprompt.config import RunConfig
from probprompt.data import datasets
from probprompt.data.cache import Decoded, ImageCache
from probprompt.data.datasets import Benchmark, ImageSet
from probprompt.data.published import Dataset
from probprompt.data.verify import differences
from probprompt.errors import UserError
from reproduction import paper
from reproduction.results import Entry, same_settings
from reproduction.results_page import has_paper_data


@dataclass(frozen=True)
class LocalImages:
    """The images that a run would use, or why there are none."""

    source: Benchmark | None = None
    split_hash: str = ""
    differences: tuple[str, ...] = ()  # from the published images
    inside: bool = False  # in a folder inside the one in the settings
    problem: str = ""


class LocalResources:
    """Images and weights of this machine, each read once."""

    def __init__(self) -> None:
        self._images: dict[Hashable, LocalImages] = {}
        self._weights: dict[Hashable, str | None] = {}
        self._pixels: dict[Hashable, str | None] = {}

    def images(self, config: RunConfig) -> LocalImages:
        """Return the images that a run with these settings would use."""
        data = config.data
        key = data.benchmark, data.test, data.test_fraction, data.root, data.validation
        if key not in self._images:
            try:
                self._images[key] = _find_images(config)
            except UserError as error:
                remedy = f"the images of {data.benchmark}: {error}. Get them with: probprompt data get {data.benchmark}"
                self._images[key] = LocalImages(problem=str(error) if "data get" in str(error) else remedy)
        return self._images[key]

    def would_repeat(self, entry: Entry, config: RunConfig, column: paper.Column) -> bool:
        """Return True if these settings would repeat this run with the same images and weights.

        Images that are not on this machine count as the same only if the run used the published ones.
        """
        if not same_settings(entry, config) or not self._same_weights(entry, config):
            return False
        images, stream = self.images(config), entry.record.stream
        if images.problem:
            return has_paper_data(entry, column)
        recorded = images.differences if stream.differences is None else tuple(stream.differences)
        same = (stream.split_hash, recorded) == (images.split_hash, images.differences)
        return same and self._same_pixels(entry, images)

    def _same_pixels(self, entry: Entry, images: LocalImages) -> bool:
        """Return False if pixels differ from a record; unknown hashes count as equal."""
        held_out = entry.config["data"].get("validation") or 0.0
        for split, data in entry.record.data.items():
            recorded, stored = data.pixels_sha256, data.stored_side
            key = images.split_hash, split, stored, held_out
            if recorded and images.source and key not in self._pixels:
                loaded = images.source.load(None if stored == "full" else stored)
                used = images.source.hold_out(loaded, held_out) if held_out else loaded
                self._pixels[key] = _hash_pixels(used.train if split == "train" else used.test)
            if recorded and self._pixels.get(key, recorded) not in (None, recorded):
                return False
        return True

    def _same_weights(self, entry: Entry, config: RunConfig) -> bool:
        used, given = entry.record.backbone, config.backbone
        key = given.name, given.weights
        if key not in self._weights:
            self._weights[key] = _hash_weights(given.name, given.weights)
        known = self._weights[key]
        return not used.source.startswith("file:") if known is None else used.sha256 == known


def _find_images(config: RunConfig) -> LocalImages:
    data = config.data
    source = datasets.find(data.benchmark, data.test, data.test_fraction, data.root)
    loaded = source.load(None)
    used = source.hold_out(loaded, data.validation) if data.validation else loaded
    if not isinstance(source, Dataset):
        return LocalImages(source, used.split_hash())
    inside = source.locate()[0] != source.place
    return LocalImages(source, used.split_hash(), tuple(differences(source, loaded)), inside)


def _hash_pixels(images: ImageSet) -> str | None:
    """Return the hash of pixels in memory or of cached files."""
    if images.pixels is not None:
        return Decoded.of(images.pixels).hashed().sha256
    cache = ImageCache.default()
    cached = cache.entry(images.files) if cache and images.files else None
    decoded = cached.read() if cached else None
    return decoded.sha256 if decoded else None


def _hash_weights(name: str, weights: str | None) -> str | None:
    """Return the sha256 of the weights file that a run would use, None without a file."""
    try:
        file = find_file(name) if weights is None else Path(weights)
        return digest(file) if file and weights != pretrained.RANDOM else None
    except UserError:
        return None


def missing_resources(configs: Sequence[RunConfig], local: LocalResources) -> list[str]:
    """List missing images and weights that are not downloaded automatically, with remedies."""
    problems = [problem for config in configs if (problem := local.images(config).problem)]
    problems += _shared_root(configs, local)
    for backbone in dict.fromkeys(config.backbone for config in configs):
        try:
            if backbone.weights is None:
                find_file(backbone.name)
            elif backbone.weights != pretrained.RANDOM and not Path(backbone.weights).is_file():
                problems.append(f"weights {backbone.name}: {backbone.weights} is not a file")
        except UserError as error:
            named = any(backbone.name in table.backbones for table in paper.tables())
            option = f"--weights {backbone.name}=FILE" if named else "--set backbone.weights=FILE"
            problems.append(f"weights {backbone.name}: {str(error).rstrip('.')}. Option: {option}")
    return list(dict.fromkeys(problems))


def _shared_root(configs: Sequence[RunConfig], local: LocalResources) -> list[str]:
    """Report one folder for several benchmarks, unless each has a folder inside."""
    roots = {config.data.benchmark: config.data.root for config in configs if config.data.root}
    if len(roots) < 2 or all(local.images(config).inside for config in configs if config.data.root):
        return []
    root = next(iter(roots.values()))
    return [f"data.root={root} is for {' and '.join(roots)}. Pass a folder that contains each under its name."]


def image_differences(configs: Iterable[RunConfig], local: LocalResources) -> tuple[str, ...]:
    """List differences of the images of runs from the published ones."""
    lines = (f"{config.data.benchmark}: {text}" for config in configs for text in local.images(config).differences)
    return tuple(dict.fromkeys(lines))


def weights_to_download(configs: Iterable[RunConfig]) -> tuple[str, ...]:
    """List the named weights of runs that are on the Hub but not on this machine."""
    names = []
    for name in dict.fromkeys(config.backbone.name for config in configs if config.backbone.weights is None):
        with suppress(UserError):  # reported by missing_resources
            names += [name] if find_file(name) is None else []
    return tuple(names)
