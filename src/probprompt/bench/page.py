"""Tables of recorded benches in a page of Markdown, and what the paper's experiments would cost by them.

A page says which tables it wants by pairs of marks, ``<!-- bench figures: made by probprompt bench -->`` and
``<!-- end of bench figures -->``; what stands between them is written anew, all other words stay.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probprompt import methods, presets
from probprompt.bench.grow import AXES, COSTS, WORSE
from probprompt.bench.measure import EPOCH_IMAGES
from probprompt.bench.results import read_record
from probprompt.config import RunConfig, parse_config
from probprompt.errors import UserError
from probprompt.runs.record import chip_words, machine_name
from probprompt.storage import write_bytes

Entry = Mapping[str, Any]
DASH = "-"  # not measured
PICTURE = "growth.png"
"""The picture of how cost grows, beside the page."""
ORDER = {name: number for number, name in enumerate(AXES)}


@dataclass(frozen=True)
class Recorded:
    """A record and its file."""

    path: Path
    record: Entry

    @property
    def results(self) -> list[Entry]:
        """The methods that were measured."""
        return list(self.record["results"])

    @property
    def machine(self) -> str:
        """What it was measured on, and with which versions, in a line."""
        versions = self.record["versions"]
        named = ("python", "torch", "torchvision", "timm")
        with_versions = ", ".join(f"{name} {versions[name]}" for name in named if versions.get(name))
        revision = f" ({versions['revision']})" if versions.get("revision") else ""
        return f"{self.chip}; {with_versions}, probprompt {versions['probprompt']}{revision}"

    @property
    def chip(self) -> str:
        """What computed."""
        return chip_words(self.record["hardware"])


# The page --------------------------------------------------------------------------------------------------------


def write_page(page: Path, records: Sequence[Path]) -> None:
    """Fill the tables of a page from records; a page that is not there is begun."""
    try:
        text = page.read_text(encoding="utf-8") if page.exists() else "# Performance\n"
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"the page {page} cannot be read ({problem}): name a file of Markdown") from None
    write_bytes(page, fill_page(text, page, records).encode())


def fill_page(text: str, page: Path, records: Sequence[Path]) -> str:
    """The text of a page with the tables of its marks made anew; without any mark all tables go to its end."""
    found = [Recorded(path, read_record(path)) for path in sorted(set(records), key=lambda path: (path.name, path))]
    asked = [name for name in SECTIONS if _marks(name)[0] in text]
    if not asked:
        asked = [name for name, section in SECTIONS.items() if section.make(found, page) is not None]
        text = "\n\n".join([text.rstrip(), *("\n\n".join(_marks(name)) for name in asked)]) + "\n"
    for name in asked:
        made = SECTIONS[name].make(found, page) or f"Not measured: this table needs {SECTIONS[name].needs}."
        text = _replaced(text, name, made, page)
    return text


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- bench {name}: made by probprompt bench -->", f"<!-- end of bench {name} -->"


def _replaced(text: str, name: str, made: str, page: Path) -> str:
    begin, end = _marks(name)
    before, _, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not closed:
        raise UserError(f"{page} has the mark {begin} without {end} after it: put that where the table ends")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Lines of a table, its first columns words and the others numbers."""
    body = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if place < words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if place < words else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, body)])


def _notes(notes: Iterable[str]) -> str:
    return "\n".join(f"- {note}" for note in notes)


def _code(text: object) -> str:
    return f"`{text}`"


def _machines(records: Sequence[Recorded]) -> list[str]:
    """What records were made on: one line where it is the same for all."""
    lines: dict[str, list[str]] = {}
    for recorded in records:
        lines.setdefault(recorded.machine, []).append(_code(recorded.path.name))
    if len(lines) == 1:
        return [f"Measured on: {next(iter(lines))}."]
    return [f"{', '.join(names)}: measured on {machine}." for machine, names in lines.items()]


def _speed(entry: Entry, name: str) -> str:
    return f"{entry[name]['images_per_s']:,.0f}" if entry[name] else DASH


def _gib(count: float | None) -> str:
    return DASH if count is None else f"{count / 2**30:.2f}"


# Methods one by one ----------------------------------------------------------------------------------------------

LABELS = ("Backbone", "Method", "Precision", "Batch")
SPEEDS = ("Training", "Slowest to fastest round", "Inference", "Frozen pass", "One image, ms")
COSTS_OF_ONE = ("Memory, GiB", "Training, GFLOP", "of peak", "Inference, GFLOP", "of peak", "Warm-up, s")
SAME = ("backbone", "image_size", "precision", "batch")
"""What two entries must have in common for one to be called dearer than the other."""
OFFICIAL = {"fp32": 293, "TF32": 943}
"""Images/s in training of the official VQ-Prompt code on an H200, ViT-B/16, 224 px, batch 128."""
OFFICIAL_ON = {"method": "vq-prompt", "backbone": "vit_base_patch16_224", "image_size": 224, "batch": 128}


def _figures(records: Sequence[Recorded], page: Path) -> str | None:
    """Records of a single method, side by side where they were made on the same chip."""
    single = [recorded for recorded in records if len(recorded.results) == 1]
    single.sort(key=lambda recorded: _order(recorded.results[0]))
    if not single:
        return None
    chips = dict[str, list[Entry]]()
    for recorded in single:
        chips.setdefault(recorded.chip, []).append(recorded.results[0])
    notes = [
        "Training, inference, frozen pass: images/s, the median of the rounds of a measurement.",
        "Memory: the peak in training, without the images. GFLOP: matrix products for one image. Of peak: the share of "
        "the matrix peak that was measured beside it. Warm-up: training before the "
        "measurement, with whatever is compiled and captured in it.",
        *_compared(single),
        *(line for recorded in single for line in _over_official(recorded)),
        *_machines(single),
    ]
    parts = list[str]()
    for chip, entries in chips.items():
        parts += [f"On {chip}:"] if len(chips) > 1 else []
        parts.append(_table((*LABELS, *SPEEDS), [(*_label(entry), *_speeds(entry)) for entry in entries], 3))
        parts.append(_table((*LABELS, *COSTS_OF_ONE), [(*_label(entry), *_costs(entry)) for entry in entries], 3))
    return "\n\n".join([*parts, _notes(notes)])


def _order(entry: Entry) -> tuple[Any, ...]:
    """Large backbones first, whatever order the records came in."""
    return -entry["flops_per_image"]["prompted"], entry["backbone"], entry["method"], entry["precision"], entry["batch"]


def _label(entry: Entry) -> tuple[str, ...]:
    return _code(entry["backbone"]), _code(entry["method"]), entry["precision"], f"{entry['batch']}"


def _speeds(entry: Entry) -> tuple[str, ...]:
    rounds = (entry["training"] or {}).get("rounds")
    spread = f"{min(rounds):,.0f} to {max(rounds):,.0f}" if rounds else DASH
    alone = f"{entry['latency']['median_ms']:.2f}"
    return _speed(entry, "training"), spread, _speed(entry, "inference"), _speed(entry, "frozen_pass"), alone


def _costs(entry: Entry) -> tuple[str, ...]:
    found = [_gib(entry["memory"]["training_peak"])]
    for name in ("training", "inference"):
        share = entry["share_of_peak"].get(name)
        found.append(f"{entry['flops_per_image'][name] / 1e9:.1f}")
        found.append(DASH if share is None else f"{100 * share:.0f} %")
    return *found, f"{entry['training']['warm_up_s']:.1f}" if entry["training"] else DASH


def _compared(records: Sequence[Recorded]) -> Iterator[str]:
    """What ProbPrompt costs over each other method that was measured in the same place, in time for an image."""
    for one in records:
        entry = one.results[0]
        if entry["method"] != "probprompt":
            continue
        for two in records:
            other = two.results[0]
            same = one.record["hardware"] == two.record["hardware"] and all(entry[key] == other[key] for key in SAME)
            if same and other["method"] != "probprompt":
                parts = [_dearer(entry, other, name) for name in ("training", "inference")]
                where = f"{_code(entry['backbone'])}, {entry['precision']}, batch {entry['batch']}"
                names = f"{_code(entry['method'])} over {_code(other['method'])}"
                yield f"Time for an image, {names} ({where}): {', '.join(filter(None, parts))}."


def _dearer(entry: Entry, other: Entry, name: str) -> str:
    """How much more time than another method takes, in words; whether the rounds of both tell them apart."""
    if not entry[name] or not other[name]:
        return ""
    more = 100 * (other[name]["images_per_s"] / entry[name]["images_per_s"] - 1)
    mine, others = entry[name]["rounds"], other[name]["rounds"]
    overlap = min(mine) <= max(others) and min(others) <= max(mine)
    return f"{name} {more:+.1f} %".replace("-", "−") + (" (the rounds of both overlap)" if overlap else "")


def _over_official(recorded: Recorded) -> Iterator[str]:
    """How many times the official code's speed this is, where that was measured on the same."""
    (entry,) = recorded.results
    gpu = recorded.record["hardware"].get("gpu", "")
    if "H200" in gpu and entry["training"] and all(entry[key] == value for key, value in OFFICIAL_ON.items()):
        speed = entry["training"]["images_per_s"]
        told = " and ".join(f"{value} images/s in {name}" for name, value in OFFICIAL.items())
        times = " and ".join(f"{speed / value:.1f}" for value in OFFICIAL.values())
        yield (
            f"The official VQ-Prompt code trains {told} on such a card (batch {entry['batch']}): {_code('vq-prompt')} "
            f"here, in {entry['precision']}, is {times} times as fast."
        )


# Many methods ----------------------------------------------------------------------------------------------------


def _methods(records: Sequence[Recorded], page: Path) -> str | None:
    """The paper's cost table, for records of several methods."""
    return "\n\n".join(_cost_table(recorded) for recorded in records if len(recorded.results) > 1) or None


def _cost_table(recorded: Recorded) -> str:
    entries = recorded.results
    header = ("Method", "Prompts, MB", "Epoch, s", "FPS", "Training", "Inference", "Memory, GiB")
    rows = [
        (
            _code(entry["method"]) + (" (head alone)" if entry["static"] and entry["training"] else ""),
            f"{entry['cost']['prompts_mb']:.2f}",
            DASH if entry["cost"]["epoch_s"] is None else f"{entry['cost']['epoch_s']:.2f}",
            f"{entry['cost']['fps']:.1f}",
            _speed(entry, "training"),
            _speed(entry, "inference"),
            _gib(entry["memory"]["training_peak"]),
        )
        for entry in entries
    ]
    sizes = f"images of {_common(entries, 'image_size')} px, batch {_common(entries, 'batch')}"
    notes = [
        f"{_code(_common(entries, 'backbone'))}, {_common(entries, 'precision')}, {sizes}.",
        f"Prompts: what a method adds to the backbone. Epoch: {EPOCH_IMAGES:,} images. FPS: one image at a time. "
        "Training, inference: images/s. Memory: the peak in training, without the images. -: nothing is trained.",
    ]
    if any(entry["static"] and entry["training"] for entry in entries):
        notes.append("Head alone: features never change and are computed once, so that only the head is trained.")
    return f"{_table(header, rows)}\n\n{_notes([*notes, *_machines([recorded])])}"


def _common(entries: Sequence[Entry], key: str) -> str:
    return " or ".join(str(value) for value in dict.fromkeys(entry[key] for entry in entries))


# Growth ----------------------------------------------------------------------------------------------------------


def _growth(records: Sequence[Recorded], page: Path) -> str | None:
    """How cost grows, for records that measured it: one table for a method on a backbone, below the page's picture."""
    groups: dict[tuple[str, ...], list[Recorded]] = {}
    for recorded in records:
        for curve in recorded.record["growth"][:1]:
            groups.setdefault(_about(curve), []).append(recorded)
    tables = [_growth_table(group) for group in groups.values()]
    beside = page.with_name(PICTURE)
    if tables and beside.is_file():
        tables.insert(0, f"![Speed, memory and the end of a task as one setting after another grows]({PICTURE})")
    return "\n\n".join(tables) or None


def _about(curve: Entry) -> tuple[str, ...]:
    """What a curve is of: only such with the same can stand together."""
    return curve["method"], curve["backbone"], curve["precision"]


def grown(records: Sequence[Entry]) -> list[Entry]:
    """The curves of all records, in the order in which they are always told."""
    return sorted((curve for record in records for curve in record["growth"]), key=lambda curve: ORDER[curve["axis"]])


def draw_growth(records: Sequence[Path]) -> bytes:
    """One picture of all curves in records, which must be of one method on one machine."""
    from probprompt.bench.figures import growth  # drawing loads only when it is asked for

    read = [record for record in map(read_record, records) if record["growth"]]
    of = {_about(curve) for curve in grown(read)}
    machines = {machine_name(record["hardware"]) for record in read}
    if len(of) != 1 or len(machines) != 1:
        raise UserError(
            f"a picture of growth is of one method, backbone, precision and machine; these records have "
            f"{len(of)} and {len(machines)} of them"
        )
    return growth({**read[0], "growth": grown(read)})


def _growth_table(records: Sequence[Recorded]) -> str:
    curves = grown([recorded.record for recorded in records])
    rows = [(curve["label"], _range(curve["points"]), *(_exponent(curve, cost) for cost in COSTS)) for curve in curves]
    header = ("What grows", "From, to", *(f"{words[0].upper()}{words[1:]}" for words in COSTS.values()))
    worse = [
        f"{COSTS[cost]} with {curve['label'].partition(',')[0]}"
        for curve in curves
        for cost in curve["worse_than_linear"]
    ]
    missing = [
        f"{point['value']:,} {curve['label'].partition(',')[0]}: {point['note']}"
        for curve in curves
        for point in curve["points"]
        if point["note"]
    ]
    notes = [
        f"{_code(curves[0]['method'])} on {_code(curves[0]['backbone'])}, {curves[0]['precision']}. Exponents of a "
        "power law, over all points and (in parentheses) over the last three: 1 is linear, 0 no growth. Time is for "
        "one image, where the batch grows for a batch; a side counts by its pixels.",
        f"Worse than linear (above {WORSE}): {'; '.join(worse) if worse else 'nothing'}.",
        *([f"Not measured: {'; '.join(missing)}."] if missing else []),
        *_machines(records),
    ]
    return "\n\n".join([_table(header, rows, 2), _notes(notes)])


def _range(points: Sequence[Entry]) -> str:
    values = [point["value"] for point in points]
    return f"{values[0]:,} to {values[-1]:,}"


def _exponent(curve: Entry, cost: str) -> str:
    found = curve["exponents"].get(cost)
    if not found:
        return DASH
    text = f"{found['whole']:.2f} ({found['end']:.2f})".replace("-", "−")
    return f"**{text}**" if cost in curve["worse_than_linear"] else text


# What the paper's experiments cost -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """A column of the paper's tables: a benchmark in so many tasks, and its images."""

    benchmark: str
    words: str
    tasks: int
    training: int
    test: int


PAPER = (
    Experiment("cifar100", "CIFAR-100, 10 tasks", 10, 50_000, 10_000),
    *(Experiment("imagenet-r", f"ImageNet-R, {tasks}", tasks, 24_000, 6_000) for tasks in (5, 10, 20)),
    Experiment("cub200", "CUB-200, 10", 10, 5_994, 5_794),
)
PAPER_METHODS = (
    *("joint", "ft", "ft++", "l2p", "l2p++", "deep-l2p++", "dual-prompt", "coda-prompt", "hide-prompt"),
    *("evo-prompt", "apt", "vq-prompt", "probprompt"),
)
"""Those of the paper's tables."""
SEEDS = 5
FLEETS = (1, 8, 64)  # GPUs


def published(method: str, experiment: Experiment) -> RunConfig:
    """A method's settings in an experiment of the paper."""
    return parse_config(presets.settings("published", method, experiment.benchmark, experiment.tasks))


def images_looked_at(method: str, experiment: Experiment) -> float:
    """Images that pass through a model without training in a run: at the ends of tasks, and in evaluation.

    Task i is evaluated after itself and every later task, so that an image of the test set is seen (T + 1) / 2 times
    on average; where all tasks are learned at once, it is seen once.

    >>> images_looked_at("joint", PAPER[0]), images_looked_at("coda-prompt", PAPER[0])
    (10000.0, 55000.0)
    """
    kind, wanted = methods.find(method), published(method, experiment).alignment.enabled
    passes = sum((kind.aligned if wanted is None else wanted, kind.needs_summary, kind.needs_prototypes))
    times = 1.0 if kind.joint else (experiment.tasks + 1) / 2
    return passes * experiment.training + times * experiment.test


def run_seconds(entry: Entry, experiment: Experiment, epochs: int | None = None) -> float:
    """What a run takes at a method's measured speeds: training for its published or other epochs, and all passes."""
    trained = (epochs or published(entry["method"], experiment).training.epochs) * experiment.training
    looked = images_looked_at(entry["method"], experiment)
    seconds: float = trained / entry["training"]["images_per_s"] + looked / entry["inference"]["images_per_s"]
    return seconds


def time_on(gpus: int, runs: Iterable[float]) -> float:
    """When the last of these runs ends, each taken by the GPU that is free first, in their order.

    >>> time_on(2, [1, 2, 3]), time_on(1, [1, 2, 3])
    (4.0, 6.0)
    """
    free = [0.0] * gpus
    for seconds in runs:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def _reproduction(records: Sequence[Recorded], page: Path) -> str | None:
    """GPU hours of all of the paper's experiments, by the first record that has all methods."""
    for recorded in records:
        of = {entry["method"]: entry for entry in recorded.results if entry["training"]}
        if all(method in of for method in PAPER_METHODS):
            spent = {method: [run_seconds(of[method], each) for each in PAPER] for method in PAPER_METHODS}
            return _estimate(recorded, [of[method] for method in PAPER_METHODS], spent)
    return None


def _estimate(recorded: Recorded, entries: Sequence[Entry], spent: Mapping[str, Sequence[float]]) -> str:
    rows = [
        (_code(method), *(f"{seconds / 60:.1f}" for seconds in row), f"{SEEDS * sum(row) / 3600:.1f}")
        for method, row in spent.items()
    ]
    columns = list(zip(*spent.values(), strict=True))  # a benchmark each, its methods inside: as compare has them
    total = SEEDS * sum(map(sum, columns)) / 3600
    rows.append(("all", *(f"{sum(column) / 60:.1f}" for column in columns), f"{total:.1f}"))
    runs = [seconds for _ in range(SEEDS) for column in columns for seconds in column]
    header = ("Minutes of a run", *(each.words for each in PAPER), f"GPU hours, {SEEDS} seeds")
    hours = [f"{time_on(gpus, runs) / 3600:.1f}" for gpus in FLEETS]
    settings = {method: [published(method, each).training for each in PAPER] for method in spent}
    batches = [training.batch for row in settings.values() for training in row]
    coloured = [_code(method) for method, row in settings.items() if row[0].augmentation != "crop"]
    notes = [
        f"An estimate, not a measurement: {len(runs)} runs ({len(spent)} methods, {len(PAPER)} benchmarks, {SEEDS} "
        f"seeds), each on one GPU, which takes the next run when it is free. The longest takes {max(runs) / 60:.0f} "
        "minutes.",
        "Counted are the epochs of the preset `published` at the measured speed of training, and at that of inference "
        "the passes for statistics at the end of tasks and the evaluation after every task.",
        f"Speeds are those of batch {_common(entries, 'batch')} on {_code(_common(entries, 'backbone'))}, "
        f"{_common(entries, 'precision')}, random crops alone; the presets have batches of {min(batches)} to "
        f"{max(batches)}, and {' and '.join(coloured)} change colours, too. Left out: start, decoding, the first steps "
        "of a task, the refit of the head, checkpoints.",
        *_machines([recorded]),
    ]
    fleet = _table(("GPUs", *map(str, FLEETS)), [("Hours", *hours)])
    return "\n\n".join([_table(header, rows), fleet, _notes(notes)])


# All of them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """Tables of one kind: what they need, and how they are made; None where no record has that."""

    needs: str
    make: Callable[[Sequence[Recorded], Path], str | None]


SECTIONS = {
    "figures": Section("a record of a single method", _figures),
    "methods": Section("a record of several methods (--methods)", _methods),
    "growth": Section("a record of how cost grows (--grow)", _growth),
    "reproduction": Section("a record of all methods of the paper (--methods all)", _reproduction),
}
