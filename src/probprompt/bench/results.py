"""The record of a benchmark: one JSON file, and how a later one compares with it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from probprompt.bench.timing import Peak
from probprompt.engine.hardware import hardware, versions
from probprompt.errors import UserError
from probprompt.storage import is_changed, read_json, with_hash, write_json

KIND, FORMAT = "probprompt bench", 1
SETTINGS = ("backbone", "image_size", "batch", "precision", "classes", "task")
"""What two entries must have in common to be compared fairly."""
PASSES = (("head", "mirrored", False), ("method", "evaluation_draws", 1))
"""Settings that say how many passes a prediction takes, and what they are where an entry has none: these, too."""


@dataclass(frozen=True)
class Figure:
    """A number of an entry: where it stands, what it is, and whether more is better."""

    path: tuple[str, str]
    words: str
    more_is_better: bool = True


FIGURES = (
    Figure(("training", "images_per_s"), "training, images/s"),
    Figure(("inference", "images_per_s"), "inference, images/s"),
    Figure(("frozen_pass", "images_per_s"), "one frozen pass, images/s"),
    Figure(("latency", "median_ms"), "latency of one image, median, ms", more_is_better=False),
    Figure(("latency", "p99_ms"), "latency of one image, 99 %, ms", more_is_better=False),
    Figure(("memory", "training_peak"), "peak memory in training, bytes", more_is_better=False),
)


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
    results: Sequence[Mapping[str, Any]],
    growth: Sequence[Mapping[str, Any]],
    peaks: Mapping[Any, Peak],
    device: torch.device,
    seconds: float,
) -> dict[str, Any]:
    """All that was measured, and on what."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(device),
        "versions": versions(),
        "seconds": seconds,
        "matrix_peak": {precision: asdict(peak) for precision, peak in peaks.items()},
        "results": list(results),
        "growth": list(growth),
    }


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record."""
    write_json(path, with_hash(record))


def read_record(path: Path) -> dict[str, Any]:
    """Read an earlier record."""
    found = read_json(path)
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise UserError(f"{path} is no record of probprompt bench: name a file that --out wrote")
    if found.get("format") != FORMAT:
        raise UserError(f"{path} has format {found.get('format')!r}, this version reads {FORMAT}: measure it again")
    if is_changed(found):
        raise UserError(f"{path} was changed by hand: it has not the hash that it records; measure it again")
    return found


def refuse_unwritable(path: Path | None) -> None:
    """Refuse a file in a folder that is not there, before anything is measured for it."""
    if path and not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder {path.absolute().parent} to write {path.name} into: make it first")


def ratios(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Ratio]:
    """Every figure of methods that both records hold, and the speed of growing settings at values that both hold."""
    found = [ratio for old, new in matched(before, now) for ratio in _entry_ratios(old, new)]
    curves = {(curve["axis"], curve["method"]): curve for curve in before["growth"]}
    for curve in now["growth"]:
        old = curves.get((curve["axis"], curve["method"]))
        found += _curve_ratios(old, curve) if old else []
    return found


def matched(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of entries on the same method; of several earlier ones that with the most settings in common."""
    for new in now["results"]:
        same = [old for old in before["results"] if old["method"] == new["method"]]
        if same:
            yield min(same, key=lambda old: len(differences(old, new))), new


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say what was set otherwise before."""
    pairs = [(name, old[name], new[name]) for name in SETTINGS]
    pairs += [
        (name, old["config"][group].get(name, usual), new["config"][group].get(name, usual))
        for group, name, usual in PASSES
    ]
    return [f"{name} {before} before, {now} now" for name, before, now in pairs if before != now]


def _entry_ratios(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Ratio]:
    for figure in FIGURES:
        group, name = figure.path
        first, second = ((entry[group] or {}).get(name) for entry in (old, new))
        if first and second:
            yield Ratio(new["method"], figure.words, first, second, figure.more_is_better)


def _curve_ratios(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Ratio]:
    """Geometric means over the values that both curves have."""
    earlier = {point["value"]: point for point in old["points"]}
    found = []
    for name, words in (("training_images_per_s", "training"), ("inference_images_per_s", "inference")):
        pairs = [(earlier.get(point["value"], {}).get(name), point[name]) for point in new["points"]]
        known = [(first, second) for first, second in pairs if first and second]
        if known:
            means = [math.exp(sum(math.log(pair[side]) for pair in known) / len(known)) for side in (0, 1)]
            subject = f"{new['method']}, {new['axis']} growing"
            found.append(Ratio(subject, f"{words}, images/s, mean", means[0], means[1], True))
    return found
