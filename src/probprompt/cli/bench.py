"""What ``probprompt bench`` does: measure, show tables, write record and picture, compare with an earlier record.

Tables of a page of Markdown are filled from records that are there.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from probprompt import api, methods
from probprompt.bench.grow import COSTS, find_axes, measure_curve
from probprompt.bench.measure import EPOCH_IMAGES, Peaks, measure_each
from probprompt.bench.page import draw_growth, write_page
from probprompt.bench.results import (
    differences,
    make_record,
    matched,
    ratios,
    read_record,
    refuse_unwritable,
    write_record,
)
from probprompt.cli.screen import PLAIN, Screen
from probprompt.config import RunConfig, apply_assignments, merge, parse_config
from probprompt.errors import UserError
from probprompt.runs.execute import pick_device
from probprompt.runs.record import chip_words
from probprompt.storage import write_bytes

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
    growing: Sequence[str],
    device: str | None,
    seconds: float | None,
    out: Path | None,
    plot: Path | None,
    against: Path | None,
) -> None:
    """Measure one method, several of them, or how the cost of one grows."""
    screen, where = Screen(), pick_device(device)
    names, axes = _split(several), _split(growing)
    if names and (method or axes):
        raise UserError("--methods goes neither with --method nor with --grow: those are about one method")
    for path in (out, plot):
        refuse_unwritable(path)
    before = read_record(against) if against else None
    chosen = list(methods.registered()) if names == ["all"] else names or [method or "probprompt"]
    configs = [_settings(name, given, preset, assignments, where) for name in chosen]
    for record in _measured(configs, axes, where, seconds, screen):
        if out:
            write_record(out, record)  # what was measured stays where the rest is cut off
    _show(screen, record)
    if before:
        _compare(screen, before, record)
    if out:
        screen.say(f"record: {out}")
    if plot:
        from probprompt.bench.figures import draw  # drawing loads only when it is asked for

        write_bytes(plot, draw(record))
        screen.say(f"picture: {plot}")


def run_page(records: Sequence[Path], page: Path | None, plot: Path | None, others: Mapping[str, object]) -> None:
    """Fill the tables of a page from records, or draw how cost grows by them.

    ``others`` are the options for measuring, which do not belong here.
    """
    if not records or not (page or plot):
        raise UserError(
            "--from RECORD goes with --page FILE, whose tables come from the records, or with --plot FILE, a picture "
            "of how cost grows by them"
        )
    given = [name for name, value in others.items() if value]
    if given:
        raise UserError(f"--from takes records that are there and measures nothing: leave {', '.join(given)} away")
    for path in (page, plot):
        refuse_unwritable(path)
    if plot:
        write_bytes(plot, draw_growth(records))
        Screen().say(f"picture: {plot}")
    if page:
        write_page(page, records)
        Screen().say(f"written: {page}")


def _split(texts: Sequence[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _settings(
    method: str,
    given: Mapping[str, Mapping[str, Any]],
    preset: str | None,
    assignments: Sequence[str],
    device: torch.device,
) -> RunConfig:
    """The preset or what is usual on this device, over it the options, over them the assignments."""
    options = {name: {key: value for key, value in group.items() if value is not None} for name, group in given.items()}
    settings = apply_assignments({"method": {"name": method}, **options}, assignments)
    return parse_config(api.with_preset(preset, settings) if preset else merge(DEFAULTS[device.type], settings))


def _measured(
    configs: Sequence[RunConfig], axes: Sequence[str], device: torch.device, seconds: float | None, screen: Screen
) -> Iterator[dict[str, Any]]:
    """The record of all that is measured, as far as it goes: again and again, the last one whole."""
    many = len(configs) > 1 or bool(axes)
    budget = seconds or (SECONDS_OF_MANY if many else SECONDS)
    peaks, results, growth = Peaks(device, budget), list[dict[str, Any]](), list[dict[str, Any]]()
    if axes:
        (config,) = configs
        for axis in find_axes(axes, config):
            growth.append(measure_curve(axis, config, device, budget, screen))
            yield make_record(results, growth, peaks.found, device, budget)
        return
    for entry in measure_each(configs, budget, peaks, screen):
        results.append(entry)
        yield make_record(results, growth, peaks.found, device, budget)


def _show(screen: Screen, record: Record) -> None:
    for curve in record["growth"]:
        _show_curve(screen, record, curve)
    if len(record["results"]) == 1:
        _show_one(screen, record, record["results"][0])
    elif record["results"]:
        _show_costs(screen, record)


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


def _show_curve(screen: Screen, record: Record, curve: Mapping[str, Any]) -> None:
    about = f"{curve['method']} on {curve['backbone']}, {curve['precision']}, {_machine(record)}"
    screen.title(f"\n{curve['label']}: {about}")
    closing = any(point["closing_s"] is not None for point in curve["points"])
    table = _number_table("", "training", "inference", "memory", *(["closing"] if closing else []))
    for point in curve["points"]:
        speeds = [point["training_images_per_s"], point["inference_images_per_s"]]
        shown = [DASH if speed is None else f"{speed:,.1f}" for speed in speeds]
        ending = [_time(point["closing_s"])] if closing else []
        table.add_row(f"{point['value']:,} {point['note']}", *shown, _size(point["memory"]), *ending)
    screen.console.print(table)
    for name, exponent in curve["exponents"].items():
        worse = "  WORSE THAN LINEAR" if name in curve["worse_than_linear"] else ""
        screen.say(f"{COSTS[name]}: exponent {exponent['whole']:.2f}, at the end {exponent['end']:.2f}{worse}")


def _compare(screen: Screen, before: Record, now: Record) -> None:
    """Every figure over the earlier one, and what was not the same."""
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
