"""The command ``bench``: measure, show tables, write a record, compare with an earlier one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from probprompt.cli.console import PLAIN, Assignments, Device, Precision, Preset, Screen
from probprompt.errors import UserError

if TYPE_CHECKING:
    import torch

    from probprompt.bench.results import BenchRecord, Entry, Ratio
    from probprompt.bench.timing import Rate
    from probprompt.config import RunConfig

_DEFAULTS = {"cpu": ("demo", 16), "cuda": ("vit_base_patch16_224", 128)}
"""Backbone and batch where none are given: on a CPU what takes less than a minute."""
SECONDS, SECONDS_OF_MANY = 5.0, 1.0
DASH = "-"  # not measured
_NUMBERS = {2: "two", 3: "three", 4: "four"}


def bench(
    method: Annotated[str | None, Option(help="What to measure.", show_default="probprompt")] = None,
    methods: Annotated[
        list[str] | None, Option(help="Several methods, with commas between; all: a cost table of every one.")
    ] = None,
    backbone: Annotated[
        str | None, Option(help="As in training, with random weights.", show_default="demo; on a GPU ViT-B/16")
    ] = None,
    preset: Preset = None,
    batch: Annotated[int | None, Option(min=1, help="Images per step.", show_default="16; on a GPU 128")] = None,
    image_size: Annotated[int | None, Option(min=8, help="Side of the images; the backbone's own.")] = None,
    precision: Annotated[Precision | None, Option(help="What the backbone computes in.")] = None,
    assignments: Assignments = None,
    seconds: Annotated[
        float | None, Option(min=0.01, help="For each measurement.", show_default="5; 1 where there are many")
    ] = None,
    device: Device = None,
    out: Annotated[Path | None, Option(metavar="FILE", help="Write a record in JSON.")] = None,
    against: Annotated[Path | None, Option(metavar="FILE", help="Compare with an earlier record.")] = None,
) -> None:
    """Measure what training and prediction cost on this machine."""
    from probprompt.bench.measure import Peaks, measure_each
    from probprompt.bench.results import make_record, ratios, read_record, refuse_unwritable, write_record
    from probprompt.engine.build import pick_device
    from probprompt.methods import registered

    given: dict[str, dict[str, Any]] = {
        "backbone": {"name": backbone, "image_size": image_size, "precision": precision and precision.value},
        "training": {"batch_size": batch},
    }
    screen, where = Screen(), pick_device(device)
    names = [part.strip() for text in methods or [] for part in text.split(",") if part.strip()]
    if names and method:
        raise UserError("--methods and --method cannot be combined")
    refuse_unwritable(out)
    before = read_record(against) if against else None
    chosen = list(registered()) if names == ["all"] else names or [method or "probprompt"]
    configs = [bench_config(name, given, preset, assignments or [], where) for name in chosen]
    budget = seconds or (SECONDS_OF_MANY if len(configs) > 1 else SECONDS)
    peaks, results = Peaks(where, budget), []
    for entry in measure_each(configs, budget, peaks, screen):
        results.append(entry)
        record = make_record(results, [], peaks.found, where, budget)
        if out:
            write_record(out, record)  # what was measured is kept if the rest is interrupted
    if len(results) == 1:
        _show_one(screen, record, results[0])
    else:
        _show_costs(screen, record)
    if before:
        show_ratios(screen, before, record, ratios(before, record))
    if out:
        screen.print(f"record: {out}")


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
        f"images of {entry['image_size']} px in batches of {entry['batch']}, task {entry['task']}, "
        f"{entry['classes']} classes seen\n"
    )
    table = Table("", **PLAIN, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in _rows(record, entry):
        table.add_row(*row)
    screen.console.print(table)
    if entry["stages"]:
        shares = ", ".join(f"{stage} {100 * share:.0f} %" for stage, share in entry["stages"].items())
        screen.print(f"\na training step (slower steps of their own, stage by stage): {shares}")
    if entry["static"] and entry["training"]:
        screen.print("\nFeatures that never change are computed once: training is that of the head alone.")
    rates = {"training": entry["training"], "inference": entry["inference"], "frozen pass": entry["frozen_pass"]}
    warm = ", ".join(f"{name} {_time(rate['warm_up_s'])}" for name, rate in rates.items() if rate)
    screen.print(f"warm-up with whatever is compiled in it, not counted: {warm}")


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
        return f"{_operations(flops[name])} each, {100 * part:.0f} % of the peak" if part else ""

    return [
        ("training", speed(entry["training"]), share("training")),
        (f"inference{passes}", speed(entry["inference"]), share("inference")),
        ("one frozen pass", speed(entry["frozen_pass"]), ""),
        ("one image alone", f"{latency['median_ms']:.2f} ms", f"99 % within {latency['p99_ms']:.2f} ms"),
        ("memory in training", _size(memory["training_peak"]), f"at its peak, without the images{held}"),
        ("prompts", f"{cost['prompts_mb']:.2f} MB", f"{cost['with_backbone_mb']:.2f} MB with the backbone"),
        ("an epoch", _time(cost["epoch_s"]), f"of {EPOCH_IMAGES:,} images"),
        ("matrix peak", f"{_operations(peak['flops'])}/s", f"{peak['precision']}, {peak['size']} x {peak['size']}"),
    ]


def _show_costs(screen: Screen, record: "BenchRecord") -> None:
    """Show the paper's cost table, with what else was measured."""
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
        f"\nprompts: MB that a method adds to the backbone ({first['memory']['backbone'] / 1e6:.1f} MB); epoch: of "
        f"{EPOCH_IMAGES:,} images; FPS: one image at a time; training and inference: images/s in batches of "
        f"{first['batch']}; memory: peak in training without the images; -: nothing is trained"
    )
    if any(entry["static"] and entry["training"] for entry in record["results"]):
        screen.print("Where features never change they are computed once: training is then that of the head alone.")


def show_ratios(screen: Screen, before: "BenchRecord", now: "BenchRecord", found: "Sequence[Ratio]") -> None:
    """Show every figure relative to the earlier one, and which settings differ."""
    from probprompt.bench.results import differences, matched

    rows = [
        (f"{r.subject}: {r.words}", f"{r.before:,.5g}", f"{r.now:,.5g}", f"{r.ratio:.2f}", "" if r.better else "worse")
        for r in found
    ]
    if not rows:
        screen.print("\nnothing in the earlier record can be compared with this one: other methods were measured")
        return
    screen.title(f"\nnow over {before['created']}")
    screen.figures(("", "before", "now", "ratio", ""), rows)
    for old, new in matched(before, now):
        for difference in differences(old, new):
            screen.print(f"not the same, {new['method']}: {difference}")
    if _machine(before) != _machine(now):
        screen.print(f"not the same machine: {_machine(before)} before, {_machine(now)} now")


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
