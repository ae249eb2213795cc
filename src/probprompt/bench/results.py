"""The record of a benchmark: one JSON file, and how a later one compares with it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, cast

import torch

from probprompt.backbones.vit import Precision
from probprompt.bench.timing import Latency, Peak, Rate
from probprompt.config import from_stored
from probprompt.engine.hardware import hardware, versions
from probprompt.errors import UserError
from probprompt.storage import is_changed, read_json, with_hash, write_json

KIND, FORMAT = "probprompt bench", 1


class Memory(TypedDict):
    """Bytes; in training None if nothing is trained, reserved None on a CPU too."""

    training_peak: int | None
    training_reserved: int | None
    images: int
    prompts: int
    backbone: int


class Cost(TypedDict):
    """The columns of the paper's cost table."""

    prompts_mb: float
    with_backbone_mb: float
    epoch_s: float | None
    fps: float


class Entry(TypedDict):
    """What was measured of one method."""

    method: str
    backbone: str
    precision: Precision
    image_size: int
    batch: int
    task: int
    classes: int
    static: bool
    config: dict[str, Any]
    training: Rate | None
    inference: Rate
    latency: Latency
    frozen_pass: Rate
    memory: Memory
    stages: dict[str, float] | None
    passes: int
    """Missing in older records."""
    flops_per_image: dict[str, int]
    """Of passes, and of a prediction and a training step."""
    share_of_peak: dict[str, float]
    cost: Cost


class Point(TypedDict):
    """Costs at one value of a setting that grows; None if not measured."""

    value: int
    training_images_per_s: float | None
    inference_images_per_s: float | None
    memory: int | None
    closing_s: float | None
    note: str


class Curve(TypedDict):
    """The costs of a method as one setting grows."""

    axis: str
    label: str
    method: str
    backbone: str
    precision: Precision
    config: dict[str, Any]
    points: Sequence[Point]
    exponents: dict[str, dict[str, float]]
    """By cost: over the whole curve, and over its end, where a fixed cost hides less."""
    worse_than_linear: Sequence[str]


class BenchRecord(TypedDict):
    """A record: what was measured, on what."""

    kind: str
    format: int
    created: str
    hardware: dict[str, str | int]
    versions: dict[str, str]
    seconds: float
    matrix_peak: dict[Precision, Peak]
    results: Sequence[Entry]
    growth: Sequence[Curve]


@dataclass(frozen=True)
class Ratio:
    """A figure now, over the same one before."""

    subject: str
    words: str
    before: float
    now: float
    more_is_better: bool

    @property
    def ratio(self) -> float:
        """How many times what it was."""
        return self.now / self.before

    @property
    def better(self) -> bool:
        """Whether it is no worse than it was."""
        return self.ratio >= 1 if self.more_is_better else self.ratio <= 1


def make_record(
    results: Sequence[Entry],
    growth: Sequence[Curve],
    peaks: Mapping[Precision, Peak],
    device: torch.device,
    seconds: float,
) -> BenchRecord:
    """Put all that was measured together with what it was measured on."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(device),
        "versions": versions(),
        "seconds": seconds,
        "matrix_peak": dict(peaks),
        "results": list(results),
        "growth": list(growth),
    }


def write_record(path: Path, record: BenchRecord) -> None:
    """Write a record."""
    write_json(path, with_hash(record))


def read_record(path: Path) -> BenchRecord:
    """Read an earlier record."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise UserError(f"{path} is no record of probprompt bench: name a file that --out wrote")
    if content.get("format") != FORMAT:
        raise UserError(f"{path} has format {content.get('format')!r}, this version reads {FORMAT}: measure it again")
    if is_changed(content):
        raise UserError(f"{path} was changed by hand: it has not the hash that it records; measure it again")
    return cast(BenchRecord, content)


def refuse_unwritable(path: Path | None) -> None:
    """Refuse a file in a folder that is not there, before anything is measured for it."""
    if path and not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder {path.absolute().parent} to write {path.name} into: make it first")


def ratios(before: BenchRecord, now: BenchRecord) -> list[Ratio]:
    """Every figure of methods that both records hold."""
    return [
        Ratio(new["method"], words, first, second, more_is_better)
        for old, new in matched(before, now)
        for (words, first, more_is_better), (_, second, _) in zip(_figures(old), _figures(new), strict=True)
        if first and second
    ]


def matched(before: BenchRecord, now: BenchRecord) -> Iterator[tuple[Entry, Entry]]:
    """Pairs of entries on the same method; of several earlier ones that with the most settings in common."""
    for new in now["results"]:
        same = [old for old in before["results"] if old["method"] == new["method"]]
        if same:
            yield min(same, key=lambda old: len(differences(old, new))), new


def differences(old: Entry, new: Entry) -> list[str]:
    """Say which settings were others before."""
    pairs = zip(_settings(old), _settings(new), strict=True)
    return [f"{name} {before} before, {now} now" for (name, before), (_, now) in pairs if before != now]


def _settings(entry: Entry) -> Iterator[tuple[str, object]]:
    """Yield what two entries must have in common to be compared fairly."""
    for name, value in entry.items():
        if name in ("backbone", "image_size", "batch", "precision", "classes", "task"):
            yield name, value
    # How many passes a prediction takes: entries may have no such setting.
    config = from_stored(entry["config"])
    for group, name, default in (("head", "flip_average", False), ("method", "evaluation_draws", 1)):
        yield name, config[group].get(name, default)


def _figures(entry: Entry) -> Iterator[tuple[str, float | None, bool]]:
    """Yield the words and the value of each figure, and whether more is better."""
    rates = {"training": entry["training"], "inference": entry["inference"], "one frozen pass": entry["frozen_pass"]}
    for name, rate in rates.items():
        yield f"{name}, images/s", rate and rate["images_per_s"], True
    yield "latency of one image, median, ms", entry["latency"]["median_ms"], False
    yield "latency of one image, 99 %, ms", entry["latency"]["p99_ms"], False
    yield "peak memory in training, bytes", entry["memory"]["training_peak"], False
