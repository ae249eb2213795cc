"""What runs of the paper's tables need and this machine has: images, weights, and which of them are the published."""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from probprompt import checkpoints
from probprompt.checkpoints import find_file
from probprompt.config import RunConfig
from probprompt.data import datasets
from probprompt.data.cache import Decoded, ImageCache
from probprompt.data.datasets import Benchmark, ImageSet
from probprompt.data.published import Dataset
from probprompt.data.verify import differences
from probprompt.errors import UserError
from probprompt.results import paper
from probprompt.results.book import Entry, same_settings
from probprompt.results.page import same_data
from probprompt.weights_files import digest


@dataclass(frozen=True)
class Images:
    """What runs would meet, as far as that can be told without reading images; or why they would meet none."""

    source: Benchmark | None = None
    split_hash: str = ""
    differences: tuple[str, ...] = ()
    inside: bool = False
    """Whether they lie in a folder of their own inside that which the settings name."""
    problem: str = ""


class Here:
    """Images and weights of this machine, each looked at once."""

    def __init__(self) -> None:
        self._images: dict[Hashable, Images] = {}
        self._weights: dict[Hashable, str | None] = {}
        self._pixels: dict[Hashable, str | None] = {}

    def images(self, config: RunConfig) -> Images:
        """Those that a run with these settings would meet."""
        data = config.data
        key = data.benchmark, data.test, data.test_fraction, data.root, data.validation
        if key not in self._images:
            try:
                self._images[key] = _load_images(config)
            except UserError as problem:
                self._images[key] = Images(problem=_with_remedy(data.benchmark, str(problem)))
        return self._images[key]

    def differences(self, config: RunConfig) -> tuple[str, ...]:
        """How these differ from the published ones."""
        return self.images(config).differences

    def would_repeat(self, entry: Entry, config: RunConfig, column: paper.Column) -> bool:
        """Whether these settings would give this run again: on the same images with the same weights, as far as known.

        Of images that are not here, only the published ones are taken to be the same.
        """
        if not same_settings(entry, config) or not self._same_weights(entry, config):
            return False
        images, stream = self.images(config), entry.content["stream"]
        if images.problem:
            return same_data(entry, column)
        recorded = tuple(stream.get("differences", images.differences))
        same = (stream["split_hash"], recorded) == (images.split_hash, images.differences)
        return same and self._same_pixels(entry, images)

    def _same_pixels(self, entry: Entry, images: Images) -> bool:
        """Whether pixels are the same, where a record has their hash and this machine knows that of its own."""
        held_out = entry.config["data"].get("validation") or 0.0
        for side, told in entry.content.get("data", {}).items():
            recorded, stored = told.get("pixels_sha256"), told.get("stored_side")
            key = images.split_hash, side, stored, held_out
            if recorded and images.source and key not in self._pixels:
                loaded = images.source.load(None if stored == "full" else stored)
                met = images.source.hold_out(loaded, held_out) if held_out else loaded
                self._pixels[key] = _pixels_hash(met.train if side == "train" else met.test)
            if recorded and self._pixels.get(key, recorded) not in (None, recorded):
                return False
        return True

    def _same_weights(self, entry: Entry, config: RunConfig) -> bool:
        used, given = entry.content["backbone"], config.backbone
        key = given.name, given.weights
        if key not in self._weights:
            self._weights[key] = _digest(given.name, given.weights)
        known = self._weights[key]
        if known is not None:
            return bool(used["sha256"] == known)
        return not str(used["source"]).startswith("file:")


def _load_images(config: RunConfig) -> Images:
    data = config.data
    source = datasets.find(data.benchmark, data.test, data.test_fraction, data.root)
    loaded = source.load(None)
    met = source.hold_out(loaded, data.validation) if data.validation else loaded
    if not isinstance(source, Dataset):
        return Images(source, met.split_hash())
    inside = source.locate()[0] != source.place
    return Images(source, met.split_hash(), tuple(differences(source, loaded)), inside)


def _pixels_hash(images: ImageSet) -> str | None:
    """Of what lies in memory, or of files that were decoded and kept before."""
    if images.pixels is not None:
        return Decoded.of(images.pixels).hashed().sha256
    cache = ImageCache.usual()
    kept = cache.entry(images.files) if cache and images.files else None
    decoded = kept.read() if kept else None
    return decoded.sha256 if decoded else None


def _digest(name: str, weights: str | None) -> str | None:
    """The sha256 of the file of weights that a run would use; None where it has no file, or none yet."""
    try:
        file = find_file(name) if weights is None else Path(weights)
        return digest(file) if file and weights != checkpoints.RANDOM else None
    except UserError:
        return None


def lacking(configs: Iterable[RunConfig], here: Here | None = None) -> list[str]:
    """Images and weights that runs need and that nobody fetches for them, each with what to do."""
    here, every = here or Here(), list(configs)
    found = [problem for config in every if (problem := here.images(config).problem)]
    found += _shared_root(every, here)
    for backbone in dict.fromkeys(config.backbone for config in every):
        try:
            if backbone.weights is None:
                find_file(backbone.name)
            elif backbone.weights != checkpoints.RANDOM and not Path(backbone.weights).is_file():
                found.append(f"the weights {backbone.name}: there is no file {backbone.weights}")
        except UserError as problem:
            found.append(f"the weights {backbone.name}: {problem}. Here: {_option(backbone.name)}")
    return list(dict.fromkeys(found))


def _option(backbone: str) -> str:
    named = {column.backbone for table in paper.tables() for column in table.columns}
    return f"--weights {backbone}=FILE" if backbone in named else "--set backbone.weights=FILE"


def _shared_root(configs: Sequence[RunConfig], here: Here) -> list[str]:
    """One folder cannot be several benchmarks: where runs need more than one, each must have its own inside."""
    needed = {config.data.benchmark: config for config in configs if config.data.root}
    if len(needed) < 2 or all(here.images(config).inside for config in needed.values()):
        return []
    root = next(iter(needed.values())).data.root
    return [f"data.root={root} goes for {' and '.join(needed)}: name a folder that holds each of them under its name"]


def told_differences(configs: Iterable[RunConfig], here: Here) -> tuple[str, ...]:
    """How images that runs would meet differ from the published ones, by benchmark."""
    told = (f"{config.data.benchmark}: {text}" for config in configs for text in here.differences(config))
    return tuple(dict.fromkeys(told))


def to_fetch(configs: Iterable[RunConfig]) -> tuple[str, ...]:
    """The named weights of runs that are not on this machine, but on the hub."""
    names = dict.fromkeys(config.backbone.name for config in configs if config.backbone.weights is None)
    found = []
    for name in names:
        with suppress(UserError):  # which says what is lacking
            found += [name] if find_file(name) is None else []
    return tuple(found)


def _with_remedy(benchmark: str, problem: str) -> str:
    if "data get" in problem:
        return problem
    return f"the images of {benchmark}: {problem}. Get them with: probprompt data get {benchmark}"
