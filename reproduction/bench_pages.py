"""Tables of recorded benchmarks in a page, and an estimate of the paper's cost.

A pair of comments, ``<!-- bench figures: made by python -m reproduction pages -->`` and
``<!-- end of bench figures -->``, marks the place of a table.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from probprompt import methods, presets
from probprompt.bench.measure import EPOCH_IMAGES
from probprompt.bench.results import BenchRecord as Content
from probprompt.bench.results import Curve, Entry, Point, read_record
from probprompt.bench.timing import Rate
from probprompt.config import RunConfig, parse_config
from probprompt.engine.hardware import chip_words, machine_name
from probprompt.errors import UserError
from probprompt.report.compare import grouped
from probprompt.report.tables import markdown_table
from probprompt.storage import write_bytes
from reproduction import paper
from reproduction.paper import EXPERIMENTS, Experiment
from reproduction.plots import draw_growth, draw_methods
from reproduction.results_page import bullets
from reproduction.scaling import AXES, COSTS, WORSE

Part = Literal["training", "inference"]
PARTS: tuple[Part, ...] = ("training", "inference")
Setting = Literal["backbone", "image_size", "precision", "batch"]
DASH = "-"  # not measured
PLOT = "growth.png"  # in the folder of the page
ORDER = {name: number for number, name in enumerate(AXES)}


@dataclass(frozen=True)
class BenchRecord:
    """A record and its file."""

    path: Path
    content: Content

    @property
    def results(self) -> list[Entry]:
        """The measured methods."""
        return list(self.content["results"])

    @property
    def chip(self) -> str:
        """The processor or GPU."""
        return chip_words(self.content["hardware"])

    @property
    def machine(self) -> str:
        """Chip and versions in one line."""
        versions = self.content["versions"]
        names = ("python", "torch", "torchvision", "timm")
        installed = ", ".join(f"{name} {versions[name]}" for name in names if versions.get(name))
        revision = f" ({versions['revision']})" if versions.get("revision") else ""
        return f"{self.chip}; {installed}, probprompt {versions['probprompt']}{revision}"


def write_page(page: Path, records: Sequence[Path]) -> None:
    """Fill the tables of a page from records, or create the page."""
    try:
        text = page.read_text(encoding="utf-8") if page.exists() else "# Performance\n"
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"Cannot read {page}: {problem}. Pass a Markdown file.") from None
    write_bytes(page, fill_page(text, page, records).encode())


def fill_page(text: str, page: Path, records: Sequence[Path]) -> str:
    """Return the text of a page with its tables replaced, or else added at its end."""
    read = [BenchRecord(path, read_record(path)) for path in sorted(set(records), key=lambda path: (path.name, path))]
    names = [name for name in SECTIONS if _comments(name)[0] in text]
    if not names:
        names = [name for name, (_, make) in SECTIONS.items() if make(read, page) is not None]
        text = "\n\n".join([text.rstrip(), *("\n\n".join(_comments(name)) for name in names)]) + "\n"
    for name in names:
        start, end = _comments(name)
        before, _, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not closed:
            raise UserError(f"{page} lacks the comment {end} after {start}. Add it where the table ends.")
        needs, make = SECTIONS[name]
        table = make(read, page) or f"Not measured: this table needs {needs}."
        text = f"{before}{start}\n\n{table}\n\n{end}{after}"
    return text


def _comments(name: str) -> tuple[str, str]:
    return f"<!-- bench {name}: made by python -m reproduction pages -->", f"<!-- end of bench {name} -->"


def draw(records: Sequence[Path]) -> bytes:
    """Draw all curves of growth, or else the methods of a single record."""
    read = list(map(read_record, records))
    grown = [record for record in read if record["growth"]]
    if not grown and len(read) == 1:
        return draw_methods(read[0])
    about = {_subject(curve) for curve in _curves(grown)}
    machines = {machine_name(record["hardware"]) for record in grown}
    if len(about) != 1 or len(machines) != 1:
        raise UserError(
            "A plot needs one record of methods, or growth of one method, backbone, precision and machine. "
            f"These records have growth of {len(about)} setups on {len(machines)} machines."
        )
    return draw_growth({**grown[0], "growth": _curves(grown)})


def _code(text: object) -> str:
    return f"`{text}`"


def _machines(records: Sequence[BenchRecord]) -> list[str]:
    """Return the machines of records, in one line if all are the same."""
    lines = grouped((record.machine, _code(record.path.name)) for record in records)
    if len(lines) == 1:
        return [f"Measured on: {next(iter(lines))}."]
    return [f"{', '.join(names)}: measured on {machine}." for machine, names in lines.items()]


def _speed(rate: Rate | None) -> str:
    return f"{rate['images_per_s']:,.0f}" if rate else DASH


def _gib(count: float | None) -> str:
    return DASH if count is None else f"{count / 2**30:.2f}"


# Methods one by one

HEADER = ("Backbone", "Method", "Training", "Inference", "One image, ms", "Memory, GiB")
SAME: tuple[Setting, ...] = ("backbone", "image_size", "precision", "batch")
"""What two results must have in common to be compared."""
OFFICIAL = {"fp32": 293, "TF32": 943}
"""Images/s in training of the official VQ-Prompt code on an H200, ViT-B/16, 224 px, batch 128."""
OFFICIAL_SETUP = ("vq-prompt", "vit_base_patch16_224", 224, 128)  # method, backbone, image size, batch


def _figures(records: Sequence[BenchRecord], page: Path) -> str | None:
    """Return tables of single methods, by chip."""
    single = sorted((record for record in records if len(record.results) == 1), key=lambda r: _order(r.results[0]))
    if not single:
        return None
    chips = grouped((record.chip, record.results[0]) for record in single)
    notes = [
        "Training, inference: images/s, the median of the rounds. Memory: the peak in training, without the images.",
        *_comparisons(single),
        *(line for record in single for line in _over_official(record)),
        *_machines(single),
    ]
    parts = list[str]()
    for chip, results in chips.items():
        parts += [f"On {chip}:"] if len(chips) > 1 else []
        parts.append(markdown_table(HEADER, map(_row, results), 2))
    return "\n\n".join([*parts, bullets(notes)])


def _order(result: Entry) -> tuple[Any, ...]:
    """Return a key that sorts large backbones first."""
    about = result["backbone"], result["method"], result["precision"], result["batch"]
    return -result["flops_per_image"]["prompted"], *about


def _row(result: Entry) -> tuple[str, ...]:
    backbone = f"{_code(result['backbone'])}, {result['precision']}, batch {result['batch']}"
    speeds = _speed(result["training"]), _speed(result["inference"]), f"{result['latency']['median_ms']:.2f}"
    return backbone, _code(result["method"]), *speeds, _gib(result["memory"]["training_peak"])


def _comparisons(records: Sequence[BenchRecord]) -> Iterator[str]:
    """Compare the time per image of ProbPrompt with each other method on the same machine."""
    for one, two in product(records, repeat=2):
        (own,), (other,) = one.results, two.results
        same = one.content["hardware"] == two.content["hardware"] and all(own[key] == other[key] for key in SAME)
        if own["method"] == "probprompt" != other["method"] and same:
            parts = [_extra_time(own, other, name) for name in PARTS]
            setup = f"{_code(own['backbone'])}, {own['precision']}, batch {own['batch']}"
            names = f"{_code(own['method'])} over {_code(other['method'])}"
            yield f"Time for an image, {names} ({setup}): {', '.join(filter(None, parts))}."


def _extra_time(own: Entry, other: Entry, name: Part) -> str:
    """Return the extra time over another method, and whether the rounds of both overlap."""
    first, second = own[name], other[name]
    if not first or not second:
        return ""
    more, mine, others = 100 * (second["images_per_s"] / first["images_per_s"] - 1), first["rounds"], second["rounds"]
    overlap = min(mine) <= max(others) and min(others) <= max(mine)
    return f"{name} {more:+.1f}%".replace("-", "−") + (" (the rounds of both overlap)" if overlap else "")


def _over_official(record: BenchRecord) -> Iterator[str]:
    """Compare with the speed of the official code in the same setup."""
    (result,) = record.results
    setup = result["method"], result["backbone"], result["image_size"], result["batch"]
    if "H200" in str(record.content["hardware"].get("gpu", "")) and result["training"] and setup == OFFICIAL_SETUP:
        speed = result["training"]["images_per_s"]
        official = " and ".join(f"{value} images/s in {name}" for name, value in OFFICIAL.items())
        times = " and ".join(f"{speed / value:.1f}" for value in OFFICIAL.values())
        yield (
            f"The official VQ-Prompt code trains {official} on the same GPU (batch {result['batch']}). "
            f"{_code('vq-prompt')} in {result['precision']} is {times} times as fast."
        )


def _methods(records: Sequence[BenchRecord], page: Path) -> str | None:
    """Return the paper's cost table for records of several methods."""
    return "\n\n".join(_cost_table(record) for record in records if len(record.results) > 1) or None


def _cost_table(record: BenchRecord) -> str:
    results = record.results
    header = ("Method", "Prompts, MB", "Epoch, s", "FPS", "Training", "Inference", "Memory, GiB")
    rows = [
        (
            _code(result["method"]) + (" (head only)" if result["static"] and result["training"] else ""),
            f"{result['cost']['prompts_mb']:.2f}",
            DASH if result["cost"]["epoch_s"] is None else f"{result['cost']['epoch_s']:.2f}",
            f"{result['cost']['fps']:.1f}",
            _speed(result["training"]),
            _speed(result["inference"]),
            _gib(result["memory"]["training_peak"]),
        )
        for result in results
    ]
    sizes = f"images of {_common(results, 'image_size')} px, batch {_common(results, 'batch')}"
    notes = [
        f"{_code(_common(results, 'backbone'))}, {_common(results, 'precision')}, {sizes}.",
        f"Prompts: size added to the backbone. Epoch: {EPOCH_IMAGES:,} images. FPS: one image at a time. "
        "Training, inference: images/s. Memory: peak in training, without the images. -: nothing is trained.",
    ]
    if any(result["static"] and result["training"] for result in results):
        notes.append("Head only: features are computed once, and only the head is trained.")
    return f"{markdown_table(header, rows)}\n\n{bullets([*notes, *_machines([record])])}"


def _common(results: Sequence[Entry], key: Setting) -> str:
    return " or ".join(str(value) for value in dict.fromkeys(result[key] for result in results))


def _growth(records: Sequence[BenchRecord], page: Path) -> str | None:
    """Return the page's plot of growth, and a table for each method on a backbone."""
    groups = grouped((_subject(curve), record) for record in records for curve in record.content["growth"][:1])
    tables = [_growth_table(group) for group in groups.values()]
    if tables and page.with_name(PLOT).is_file():
        tables.insert(0, f"![Speed, memory and the end of a task as one setting after another grows]({PLOT})")
    return "\n\n".join(tables) or None


def _subject(curve: Curve) -> tuple[str, ...]:
    """Return the key of curves that are shown together."""
    return curve["method"], curve["backbone"], curve["precision"]


def _curves(records: Iterable[Content]) -> list[Curve]:
    """Return the curves of all records, in the order of the axes."""
    return sorted((curve for record in records for curve in record["growth"]), key=lambda curve: ORDER[curve["axis"]])


def _growth_table(records: Sequence[BenchRecord]) -> str:
    curves = _curves(record.content for record in records)
    rows = [(curve["label"], _range(curve["points"]), *(_exponent(curve, cost) for cost in COSTS)) for curve in curves]
    header = ("What grows", "From, to", *(f"{words[0].upper()}{words[1:]}" for words in COSTS.values()))
    names = [(curve, curve["label"].partition(",")[0]) for curve in curves]
    worse = [f"{COSTS[cost]} with {name}" for curve, name in names for cost in curve["worse_than_linear"]]
    missing = [f"{p['value']:,} {name}: {p['note']}" for curve, name in names for p in curve["points"] if p["note"]]
    notes = [
        f"{_code(curves[0]['method'])} on {_code(curves[0]['backbone'])}, {curves[0]['precision']}. Exponents of a "
        "power law, over all points and (in parentheses) over the last three: 1 is linear, 0 no growth. Time is per "
        "image, or per batch where the batch grows. The image size counts by its pixels.",
        f"Worse than linear (above {WORSE}): {'; '.join(worse) if worse else 'nothing'}.",
        *([f"Not measured: {'; '.join(missing)}."] if missing else []),
        *_machines(records),
    ]
    return f"{markdown_table(header, rows, 2)}\n\n{bullets(notes)}"


def _range(points: Sequence[Point]) -> str:
    return f"{points[0]['value']:,} to {points[-1]['value']:,}"


def _exponent(curve: Curve, cost: str) -> str:
    exponent = curve["exponents"].get(cost)
    if not exponent:
        return DASH
    text = f"{exponent['whole']:.2f} ({exponent['end']:.2f})".replace("-", "−")
    return f"**{text}**" if cost in curve["worse_than_linear"] else text


SEEDS = 5
FLEETS = (1, 8, 64)  # GPUs


def published(method: str, experiment: Experiment) -> RunConfig:
    """Return a method's settings in an experiment of the paper."""
    return parse_config(presets.settings(paper.PRESET, method, experiment.benchmark, experiment.tasks))


def images_without_training(method: str, experiment: Experiment) -> float:
    """Count the images of a run in passes without training, for statistics and evaluation.

    A test image is evaluated after its task and every later one, (T + 1) / 2 times on average, or once in joint runs.

    >>> images_without_training("joint", EXPERIMENTS[0]), images_without_training("coda-prompt", EXPERIMENTS[0])
    (10000.0, 55000.0)
    """
    kind, enabled = methods.find(method), published(method, experiment).alignment.enabled
    passes = sum((kind.aligned if enabled is None else enabled, kind.needs_summary, kind.needs_prototypes))
    times = 1.0 if kind.joint else (experiment.tasks + 1) / 2
    return passes * experiment.training + times * experiment.test


def run_seconds(result: Entry, experiment: Experiment, epochs: int | None = None) -> float:
    """Return the time of a run at measured speeds, with its published or other epochs."""
    trained = (epochs or published(result["method"], experiment).training.epochs) * experiment.training
    passed = images_without_training(result["method"], experiment)
    speed = result["training"]["images_per_s"] if result["training"] else math.inf
    return trained / speed + passed / result["inference"]["images_per_s"]


def time_on(gpus: int, runs: Iterable[float]) -> float:
    """Return when the last run ends if each GPU takes the next run when it is free.

    >>> time_on(2, [1, 2, 3]), time_on(1, [1, 2, 3])
    (4.0, 6.0)
    """
    free = [0.0] * gpus
    for seconds in runs:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def _reproduction(records: Sequence[BenchRecord], page: Path) -> str | None:
    """Return GPU hours of the paper's experiments, from the first record with all methods."""
    for record in records:
        results = {result["method"]: result for result in record.results if result["training"]}
        if all(method in results for method in paper.METHODS):
            return _estimate(record, [results[method] for method in paper.METHODS])
    return None


def _estimate(record: BenchRecord, results: Sequence[Entry]) -> str:
    spent = [[run_seconds(result, each) for each in EXPERIMENTS] for result in results]
    rows = [
        (_code(result["method"]), *(f"{s / 60:.1f}" for s in row), f"{SEEDS * sum(row) / 3600:.1f}")
        for result, row in zip(results, spent, strict=True)
    ]
    columns = list(zip(*spent, strict=True))  # a benchmark with its methods, in the order of compare
    total = SEEDS * sum(map(sum, columns)) / 3600
    rows.append(("all", *(f"{sum(column) / 60:.1f}" for column in columns), f"{total:.1f}"))
    runs = [seconds for _ in range(SEEDS) for column in columns for seconds in column]
    header = ("Minutes of a run", *(each.heading for each in EXPERIMENTS), f"GPU hours, {SEEDS} seeds")
    hours = [f"{time_on(gpus, runs) / 3600:.1f}" for gpus in FLEETS]
    training = {result["method"]: [published(result["method"], e).training for e in EXPERIMENTS] for result in results}
    batches = [settings.batch_size for row in training.values() for settings in row]
    colored = [_code(method) for method, row in training.items() if row[0].augmentation != "crop"]
    notes = [
        f"An estimate, not a measurement: {len(runs)} runs ({len(spent)} methods, {len(EXPERIMENTS)} benchmarks, "
        f"{SEEDS} seeds), one per GPU at a time. The longest takes {max(runs) / 60:.0f} minutes.",
        "Included: the epochs of the preset `published` at the measured training speed. Statistics at the end of tasks "
        "and evaluation after every task count at the inference speed.",
        f"Speeds are those of batch {_common(results, 'batch')} on {_code(_common(results, 'backbone'))}, "
        f"{_common(results, 'precision')}, with random crops. The presets have batch sizes of {min(batches)} to "
        f"{max(batches)}, and {' and '.join(colored)} also change colors. Not included: start, decoding, first steps "
        "of a task, refit of the head, checkpoints.",
        *_machines([record]),
    ]
    fleet = markdown_table(("GPUs", *map(str, FLEETS)), [("Hours", *hours)])
    return "\n\n".join([markdown_table(header, rows), fleet, bullets(notes)])


SECTIONS: dict[str, tuple[str, Callable[[Sequence[BenchRecord], Path], str | None]]] = {
    "figures": ("a record of a single method", _figures),
    "methods": ("a record of several methods (--methods)", _methods),
    "growth": ("a record of how cost grows (scaling)", _growth),
    "reproduction": ("a record of all methods of the paper (--methods all)", _reproduction),
}
"""Tables by name: the records they need, and a function that makes them, or None without such records."""
