"""Record of a benchmark in one JSON file, and its comparison with a later one."""

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
    """Bytes; None for training if nothing is trained, and for ``training_reserved`` on a CPU."""

    training_peak: int | None
    training_reserved: int | None
    images: int
    prompts: int
    backbone: int


class Cost(TypedDict):
    """Columns of the paper's cost table."""

    prompts_mb: float
    with_backbone_mb: float
    epoch_s: float | None
    fps: float


class Entry(TypedDict):
    """Measurements of one method."""

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
    passes: int  # missing in older records
    flops_per_image: dict[str, int]  # of passes, and of a prediction and a training step
    share_of_peak: dict[str, float]
    cost: Cost


class Point(TypedDict):
    """Costs at one value of a varied setting; None if not measured."""

    value: int
    training_images_per_s: float | None
    inference_images_per_s: float | None
    memory: int | None
    closing_s: float | None
    note: str


class Curve(TypedDict):
    """Costs of a method over the values of one setting."""

    axis: str
    label: str
    method: str
    backbone: str
    precision: Precision
    config: dict[str, Any]
    points: Sequence[Point]
    exponents: dict[str, dict[str, float]]
    """By cost: over the whole curve, and over its end, where fixed costs matter less."""
    worse_than_linear: Sequence[str]


class BenchRecord(TypedDict):
    """Measurements and the machine they were made on."""

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
    """A measurement compared with an earlier one."""

    subject: str
    words: str
    before: float
    now: float
    more_is_better: bool

    @property
    def ratio(self) -> float:
        """Current value divided by the earlier one."""
        return self.now / self.before

    @property
    def better(self) -> bool:
        """True if it is not worse than before."""
        return self.ratio >= 1 if self.more_is_better else self.ratio <= 1


def make_record(
    results: Sequence[Entry],
    growth: Sequence[Curve],
    peaks: Mapping[Precision, Peak],
    device: torch.device,
    seconds: float,
) -> BenchRecord:
    """Combine measurements with a description of the machine."""
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
        raise UserError(f"{path} is not a benchmark record. Pass a file written by 'probprompt bench --out FILE'.")
    remedy = f"Run 'probprompt bench --out {path}' again."
    if content.get("format") != FORMAT:
        raise UserError(f"{path} has format {content.get('format')!r}, expected {FORMAT}. {remedy}")
    if is_changed(content):
        raise UserError(f"{path} does not match its recorded hash; it may have been edited. {remedy}")
    return cast(BenchRecord, content)


def check_writable(path: Path | None) -> None:
    """Raise an error if the folder of a file does not exist, before anything is measured."""
    if path and not path.absolute().parent.is_dir():
        raise UserError(f"Cannot write {path}: folder {path.absolute().parent} does not exist. Create it first.")


def ratios(before: BenchRecord, now: BenchRecord) -> list[Ratio]:
    """Return the ratios of all measurements of methods in both records."""
    return [
        Ratio(new["method"], words, first, second, more_is_better)
        for old, new in matched(before, now)
        for (words, first, more_is_better), (_, second, _) in zip(_figures(old), _figures(new), strict=True)
        if first and second
    ]


def matched(before: BenchRecord, now: BenchRecord) -> Iterator[tuple[Entry, Entry]]:
    """Yield pairs of entries on the same method, with the earlier one closest in settings."""
    for new in now["results"]:
        same = [old for old in before["results"] if old["method"] == new["method"]]
        if same:
            yield min(same, key=lambda old: len(differences(old, new))), new


def differences(old: Entry, new: Entry) -> list[str]:
    """Describe the settings that differ from before."""
    pairs = zip(_settings(old), _settings(new), strict=True)
    return [f"{name} {before} before, {now} now" for (name, before), (_, now) in pairs if before != now]


def _settings(entry: Entry) -> Iterator[tuple[str, object]]:
    """Yield the settings that two entries must share for a fair comparison."""
    for name, value in entry.items():
        if name in ("backbone", "image_size", "batch", "precision", "classes", "task"):
            yield name, value
    # Passes of a prediction; older entries lack these settings.
    config = from_stored(entry["config"])
    for group, name, default in (("head", "flip_average", False), ("method", "evaluation_draws", 1)):
        yield name, config[group].get(name, default)


def _figures(entry: Entry) -> Iterator[tuple[str, float | None, bool]]:
    """Yield the description and value of each measurement, and whether more is better."""
    rates = {"training": entry["training"], "inference": entry["inference"], "one frozen pass": entry["frozen_pass"]}
    for name, rate in rates.items():
        yield f"{name}, images/s", rate and rate["images_per_s"], True
    yield "latency of one image, median, ms", entry["latency"]["median_ms"], False
    yield "latency of one image, 99%, ms", entry["latency"]["p99_ms"], False
    yield "peak memory in training, bytes", entry["memory"]["training_peak"], False
