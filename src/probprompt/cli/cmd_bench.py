"""What ``probprompt bench`` does: measure, show tables, write a record, compare with an earlier one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from probprompt import methods, presets
from probprompt.bench.measure import EPOCH_IMAGES, Peaks, measure_each
from probprompt.bench.results import (
    differences,
    make_record,
    matched,
    ratios,
    read_record,
    refuse_unwritable,
    write_record,
)
from probprompt.cli.console import PLAIN, Screen
from probprompt.config import RunConfig, apply_assignments, merge, parse_config
from probprompt.engine.build import pick_device
from probprompt.engine.hardware import chip_words
from probprompt.errors import UserError

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"backbone": {"name": "demo"}, "training": {"batch": 16}},
    "cuda": {"backbone": {"name": "vit_base_patch16_224"}, "training": {"batch": 128}},
}
"""What is measured where nobody says: on a CPU something that takes less than a minute."""


SECONDS, SECONDS_OF_MANY = 5.0, 1.0


DASH = "-"  # not measured


_NUMBERS = {2: "two", 3: "three", 4: "four"}


Record = Mapping[str, Any]


def run_bench(
    given: Mapping[str, Mapping[str, Any]],
    preset: str | None,
    assignments: Sequence[str],
    method: str | None,
    several: Sequence[str],
    device: str | None,
    seconds: float | None,
    out: Path | None,
    against: Path | None,
) -> None:
    """Measure one method, or several of them."""
    screen, where = Screen(), pick_device(device)
    names = [part.strip() for text in several for part in text.split(",") if part.strip()]
    if names and method:
        raise UserError("--methods and --method cannot be combined")
    refuse_unwritable(out)
    before = read_record(against) if against else None
    chosen = list(methods.registered()) if names == ["all"] else names or [method or "probprompt"]
    configs = [bench_config(name, given, preset, assignments, where) for name in chosen]
    budget = seconds or (SECONDS_OF_MANY if len(configs) > 1 else SECONDS)
    peaks, results = Peaks(where, budget), list[dict[str, Any]]()
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
        show_ratios(screen, before, record)
    if out:
        screen.say(f"record: {out}")


def bench_config(
    method: str,
    given: Mapping[str, Mapping[str, Any]],
    preset: str | None,
    assignments: Sequence[str],
    device: torch.device,
) -> RunConfig:
    """Return the settings: the preset or the defaults of this device, then the options, then the assignments."""
    options = {name: {key: value for key, value in group.items() if value is not None} for name, group in given.items()}
    settings = apply_assignments({"method": {"name": method}, **options}, assignments)
    return parse_config(presets.resolve(preset, settings) if preset else merge(DEFAULTS[device.type], settings))


def _machine(record: Record) -> str:
    return chip_words(record["hardware"])


def _show_one(screen: Screen, record: Record, entry: Mapping[str, Any]) -> None:
    screen.title(f"\n{entry['method']} on {entry['backbone']}, {entry['precision']}, {_machine(record)}")
    screen.say(
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
        screen.say(f"\na training step (slower steps of their own, stage by stage): {shares}")
    if entry["static"] and entry["training"]:
        screen.say("\nFeatures that never change are computed once: training is that of the head alone.")
    warm = {name: entry[name]["warm_up_s"] for name in ("training", "inference", "frozen_pass") if entry[name]}
    words = ", ".join(f"{name.replace('_', ' ')} {_time(spent)}" for name, spent in warm.items())
    screen.say(f"warm-up with whatever is compiled in it, not counted: {words}")


def _rows(record: Record, entry: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What was measured, each with its value and a remark."""
    used, cost, latency = entry["memory"], entry["cost"], entry["latency"]
    peak, needed = record["matrix_peak"][entry["precision"]], entry["flops_per_image"]
    reserved = used["training_reserved"]
    held = f", {_size(reserved)} reserved" if reserved is not None else ""

    def speed(name: str) -> str:
        return f"{entry[name]['images_per_s']:,.1f} images/s" if entry[name] else DASH

    def share(name: str) -> str:
        found = entry["share_of_peak"].get(name)
        return f"{_operations(needed[name])} each, {100 * found:.0f} % of the peak" if found else ""

    passes = entry["passes"]
    counted = f", {_NUMBERS.get(passes, passes)} passes" if passes > 1 else ""
    return [
        ("training", speed("training"), share("training")),
        (f"inference{counted}", speed("inference"), share("inference")),
        ("one frozen pass", speed("frozen_pass"), ""),
        ("one image alone", f"{latency['median_ms']:.2f} ms", f"99 % within {latency['p99_ms']:.2f} ms"),
        ("memory in training", _size(used["training_peak"]), f"at its peak, without the images{held}"),
        ("prompts", f"{cost['prompts_mb']:.2f} MB", f"{cost['with_backbone_mb']:.2f} MB with the backbone"),
        ("an epoch", _time(cost["epoch_s"]), f"of {EPOCH_IMAGES:,} images"),
        ("matrix peak", f"{_operations(peak['flops'])}/s", f"{peak['precision']}, {peak['size']} x {peak['size']}"),
    ]


def _show_costs(screen: Screen, record: Record) -> None:
    """The paper's cost table, with what else was measured."""
    first = record["results"][0]
    screen.title(f"\n{first['backbone']}, {first['precision']}, {_machine(record)}")
    header = ("prompts", "epoch", "FPS", "training", "inference", "memory")
    table = _number_table("", *header)
    for entry in record["results"]:
        cost, trained = entry["cost"], entry["training"]
        table.add_row(
            entry["method"],
            f"{cost['prompts_mb']:.2f}",
            _time(cost["epoch_s"]),
            f"{cost['fps']:.1f}",
            f"{trained['images_per_s']:,.0f}" if trained else DASH,
            f"{entry['inference']['images_per_s']:,.0f}",
            _size(entry["memory"]["training_peak"]),
        )
    screen.console.print(table)
    screen.say(
        f"\nprompts: MB that a method adds to the backbone ({first['memory']['backbone'] / 1e6:.1f} MB); epoch: of "
        f"{EPOCH_IMAGES:,} images; FPS: one image at a time; training and inference: images/s in batches of "
        f"{first['batch']}; memory: peak in training without the images; -: nothing is trained"
    )
    if any(entry["static"] and entry["training"] for entry in record["results"]):
        screen.say("Where features never change they are computed once: training is then that of the head alone.")


def _number_table(*header: str) -> Table:
    table = Table(header[0], **PLAIN)
    for name in header[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show_ratios(screen: Screen, before: Record, now: Record) -> None:
    """Show every figure relative to the earlier one, and which settings differ."""
    found = ratios(before, now)
    if not found:
        screen.say("\nnothing in the earlier record can be compared with this one: other methods were measured")
        return
    screen.title(f"\nnow over {before['created']}")
    table = _number_table("", "before", "now", "ratio", "")
    for ratio in found:
        verdict = "" if ratio.better else "worse"
        values = (f"{ratio.before:,.5g}", f"{ratio.now:,.5g}", f"{ratio.ratio:.2f}", verdict)
        table.add_row(f"{ratio.subject}: {ratio.words}", *values)
    screen.console.print(table)
    for old, new in matched(before, now):
        for difference in differences(old, new):
            screen.say(f"not the same, {new['method']}: {difference}")
    if _machine(before) != _machine(now):
        screen.say(f"not the same machine: {_machine(before)} before, {_machine(now)} now")


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
