"""Command ``bench``: measure, show tables, write a record, compare with an earlier one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from probprompt.cli.console import BACKBONE, METHODS, PLAIN, PRESET, SET, Device, Precision, Screen, option

if TYPE_CHECKING:
    import torch

    from probprompt.bench.results import BenchRecord, Entry, Ratio
    from probprompt.bench.timing import Rate
    from probprompt.config import RunConfig

_DEFAULTS = {"cpu": ("demo", 16), "cuda": ("vit_base_patch16_224", 128)}
"""Default backbone and batch size; on a CPU they take less than a minute."""
SECONDS, SECONDS_OF_MANY = 5.0, 1.0
DASH = "-"  # not measured
_NUMBERS = {2: "two", 3: "three", 4: "four"}


def bench(
    methods: Annotated[
        list[str] | None,
        option(
            "Methods, comma-separated, or all for a cost table.", "NAMES", default="probprompt", autocompletion=METHODS
        ),
    ] = None,
    preset: Annotated[str | None, option(**PRESET)] = None,
    backbone: Annotated[str | None, option(**BACKBONE, default="demo; ViT-B/16 on a GPU")] = None,
    image_size: Annotated[
        int | None, option("Image size in pixels.", "N", default="that of the backbone", min=8)
    ] = None,
    batch_size: Annotated[
        int | None, option("Images per training step.", "N", default="16; 128 on a GPU", min=1)
    ] = None,
    precision: Annotated[Precision | None, option("Precision of the backbone.")] = None,
    assignments: Annotated[list[str] | None, option(*SET)] = None,
    seconds: Annotated[
        float | None, option("Seconds per measurement.", "S", default="5; 1 for several methods", min=0.01)
    ] = None,
    device: Device = None,
    out: Annotated[Path | None, option("JSON file to write.", "FILE")] = None,
    compare_to: Annotated[Path | None, option("Earlier JSON file to compare with.", "FILE")] = None,
) -> None:
    """Measure training and prediction speed on this machine.

    Weights are random, which takes the same time.

    Example: probprompt bench --methods all
    """
    from probprompt.bench.measure import Peaks, measure_each
    from probprompt.bench.results import check_writable, make_record, ratios, read_record, write_record
    from probprompt.engine.build import pick_device
    from probprompt.methods import registered

    given: dict[str, dict[str, Any]] = {
        "backbone": {"name": backbone, "image_size": image_size, "precision": precision and precision.value},
        "training": {"batch_size": batch_size},
    }
    screen, picked = Screen(), pick_device(device)
    names = [part.strip() for text in methods or ["probprompt"] for part in text.split(",") if part.strip()]
    check_writable(out)
    before = read_record(compare_to) if compare_to else None
    chosen = list(registered()) if names == ["all"] else names
    configs = [bench_config(name, given, preset, assignments or [], picked) for name in chosen]
    budget = seconds or (SECONDS_OF_MANY if len(configs) > 1 else SECONDS)
    peaks, results = Peaks(picked, budget), []
    for entry in measure_each(configs, budget, peaks, screen):
        results.append(entry)
        record = make_record(results, [], peaks.measured, picked, budget)
        if out:
            write_record(out, record)  # keeps what was measured if the rest is interrupted
    if len(results) == 1:
        _show_one(screen, record, results[0])
    else:
        _show_costs(screen, record)
    if before:
        show_ratios(screen, before, record, ratios(before, record))
    if out:
        screen.print(f"Wrote {out}.")


def bench_config(
    method: str,
    given: Mapping[str, Mapping[str, Any]],
    preset: str | None,
    assignments: Sequence[str],
    device: "torch.device",
) -> "RunConfig":
    """Return the settings: the preset or the defaults of this device, then the options, then the assignments."""
    from probprompt import presets
    from probprompt.config import apply_assignments, merge, parse_config

    options = {name: {key: value for key, value in group.items() if value is not None} for name, group in given.items()}
    settings = apply_assignments({"method": {"name": method}, **options}, assignments)
    if preset:
        return parse_config(presets.resolve(preset, settings))
    backbone, batch = _DEFAULTS[device.type]
    return parse_config(merge({"backbone": {"name": backbone}, "training": {"batch_size": batch}}, settings))


def _machine(record: "BenchRecord") -> str:
    from probprompt.engine.hardware import chip_words

    return chip_words(record["hardware"])


def _show_one(screen: Screen, record: "BenchRecord", entry: "Entry") -> None:
    from rich.table import Table

    screen.title(f"\n{entry['method']} on {entry['backbone']}, {entry['precision']}, {_machine(record)}")
    screen.print(
        f"Batches of {entry['batch']} images of {entry['image_size']} px, in task {entry['task']} with "
        f"{entry['classes']} classes.\n"
    )
    table = Table("", **PLAIN, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in _rows(record, entry):
        table.add_row(*row)
    screen.console.print(table)
    if entry["stages"]:
        shares = ", ".join(f"{stage} {100 * share:.0f}%" for stage, share in entry["stages"].items())
        screen.print(f"\nShares of a training step (measured separately, stage by stage): {shares}.")
    if entry["static"] and entry["training"]:
        screen.print("\nFrozen features are computed once, so training covers only the head.")
    rates = {"training": entry["training"], "inference": entry["inference"], "frozen pass": entry["frozen_pass"]}
    warm = ", ".join(f"{name} {_time(rate['warm_up_s'])}" for name, rate in rates.items() if rate)
    screen.print(f"Warm-up with compilation (not included): {warm}.")


def _rows(record: "BenchRecord", entry: "Entry") -> list[tuple[str, str, str]]:
    """Return a label, a value and a note for each figure."""
    from probprompt.bench.measure import EPOCH_IMAGES

    memory, cost, latency, flops = entry["memory"], entry["cost"], entry["latency"], entry["flops_per_image"]
    peak, reserved = record["matrix_peak"][entry["precision"]], memory["training_reserved"]
    held = f", {_size(reserved)} reserved" if reserved is not None else ""
    passes = f", {_NUMBERS.get(entry['passes'], entry['passes'])} passes" if entry["passes"] > 1 else ""

    def speed(rate: "Rate | None") -> str:
        return f"{rate['images_per_s']:,.1f} images/s" if rate else DASH

    def share(name: str) -> str:
        part = entry["share_of_peak"].get(name)
        return f"{_operations(flops[name])} each, {100 * part:.0f}% of the peak" if part else ""

    return [
        ("training", speed(entry["training"]), share("training")),
        (f"inference{passes}", speed(entry["inference"]), share("inference")),
        ("one frozen pass", speed(entry["frozen_pass"]), ""),
        ("one image", f"{latency['median_ms']:.2f} ms", f"99% within {latency['p99_ms']:.2f} ms"),
        ("memory in training", _size(memory["training_peak"]), f"peak, without the images{held}"),
        ("prompts", f"{cost['prompts_mb']:.2f} MB", f"{cost['with_backbone_mb']:.2f} MB with the backbone"),
        ("an epoch", _time(cost["epoch_s"]), f"of {EPOCH_IMAGES:,} images"),
        ("matrix peak", f"{_operations(peak['flops'])}/s", f"{peak['precision']}, {peak['size']} x {peak['size']}"),
    ]


def _show_costs(screen: Screen, record: "BenchRecord") -> None:
    """Print the paper's cost table with the other measurements."""
    from probprompt.bench.measure import EPOCH_IMAGES

    first, rows = record["results"][0], []
    screen.title(f"\n{first['backbone']}, {first['precision']}, {_machine(record)}")
    for entry in record["results"]:
        cost, trained, speed = entry["cost"], entry["training"], f"{entry['inference']['images_per_s']:,.0f}"
        figures = f"{cost['prompts_mb']:.2f}", _time(cost["epoch_s"]), f"{cost['fps']:.1f}"
        training, memory = f"{trained['images_per_s']:,.0f}" if trained else DASH, entry["memory"]["training_peak"]
        rows.append((entry["method"], *figures, training, speed, _size(memory)))
    screen.figures(("", "prompts", "epoch", "FPS", "training", "inference", "memory"), rows)
    screen.print(
        f"\nprompts: MB added to the backbone ({first['memory']['backbone'] / 1e6:.1f} MB); epoch: {EPOCH_IMAGES:,} "
        f"images; FPS: one image at a time; training and inference: images/s in batches of {first['batch']}; memory: "
        "peak in training without the images; -: nothing is trained."
    )
    if any(entry["static"] and entry["training"] for entry in record["results"]):
        screen.print("Frozen features are computed once; training then covers only the head.")


def show_ratios(screen: Screen, before: "BenchRecord", now: "BenchRecord", ratios: "Sequence[Ratio]") -> None:
    """Print every figure relative to the earlier one, and the settings that differ."""
    from probprompt.bench.results import differences, matched

    rows = [
        (f"{r.subject}: {r.words}", f"{r.before:,.5g}", f"{r.now:,.5g}", f"{r.ratio:.2f}", "" if r.better else "worse")
        for r in ratios
    ]
    if not rows:
        screen.print("\nNothing to compare: the earlier file has other methods. Pass the same --methods.")
        return
    screen.title(f"\nCompared with {before['created']}")
    screen.figures(("", "before", "now", "ratio", ""), rows)
    for old, new in matched(before, now):
        for difference in differences(old, new):
            screen.print(f"Different settings, {new['method']}: {difference}")
    if _machine(before) != _machine(now):
        screen.print(f"Different machine: {_machine(before)} before, {_machine(now)} now.")


def _size(count: float | None) -> str:
    if count is None:
        return DASH
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _operations(count: float) -> str:
    for limit, unit in ((1e12, "TFLOP"), (1e9, "GFLOP")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count / 1e6:.1f} MFLOP"
