"""Commands of a checkout: pages of results and speed, and the paper's tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from probprompt import cli, distributed
from probprompt.bench.results import BenchRecord, Curve, check_writable, make_record, read_record, write_record
from probprompt.cli.cmd_bench import SECONDS_OF_MANY, bench_config, show_ratios
from probprompt.cli.console import Device, Screen
from probprompt.cli.grid_screen import GridScreen
from probprompt.config import apply_assignments, flatten
from probprompt.engine.build import pick_device
from probprompt.engine.hardware import chip_words, hardware, machine_name
from probprompt.errors import Interrupted, UserError
from probprompt.report.compare import gather_runs
from probprompt.report.pages import write
from probprompt.report.tables import count
from probprompt.runs import run as recorded_runs
from probprompt.runs.grid import ExecutionOptions, Outcome
from probprompt.storage import write_bytes
from reproduction import bench_pages, fidelity, page_tables, paper, reproduce, results, results_page
from reproduction.plots import draw_growth
from reproduction.scaling import AXES, COSTS, curve_ratios, find_axes, measure_curve

app = typer.Typer(
    name="python -m reproduction",
    help="Reproduce the paper's tables, and build the pages of results and speed from records.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
results_app = typer.Typer()
app.add_typer(results_app, name="results")
Results = Annotated[Path, typer.Option("--results", metavar="FOLDER", help="Folder of recorded runs.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override any setting (repeatable).")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a plot into this PNG file.")]
_FOLDER = Path("results")


@results_app.callback(invoke_without_command=True)
def write_results(
    context: typer.Context,
    folder: Results = _FOLDER,
    page: Annotated[Path, typer.Option(metavar="FILE", help="Page to write.")] = Path("RESULTS.md"),
) -> None:
    """Write RESULTS.md, its figures and the tables of results/*.md."""
    if context.invoked_subcommand:
        if (folder, page) != (_FOLDER, Path("RESULTS.md")):
            raise UserError("'results add' takes --results after 'add', and no --page.")
        return
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder. Record runs with 'python -m reproduction results add RUN', or pass --results."
        )
    screen = Screen()
    screen.print(f"{count(len(results.read_entries(folder)), 'run')} in {folder}.")
    tables = [write(path, text.encode()) for path, text in page_tables.fill_pages(folder).items()]
    for path in [*results_page.write_page(folder, page), *tables]:
        screen.print(f"Wrote {path}.")


@results_app.command("add")
def add_results(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of them.")],
    folder: Results = _FOLDER,
    file: Annotated[
        Path | None, typer.Option(metavar="JSONL", help="Record all runs in this one file instead.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace runs of other settings.")] = False,
    skip_unfinished: Annotated[bool, typer.Option("--skip-unfinished", help="Skip unfinished runs.")] = False,
) -> None:
    """Record finished runs, without paths of this machine."""
    screen = Screen()
    if file:
        screen.print(f"Wrote {recorded_runs.write_results(file, gather_runs(runs).recorded)}.")
        return
    added, skipped = results.add_runs(runs, folder, replace, skip_unfinished)
    for path, change in added.items():
        screen.print(f"{change}: {path}")
    if skipped:
        screen.print(f"Skipped {count(len(skipped), 'unfinished run')}.")


@app.command("run")
def run_table(
    table: Annotated[str, typer.Argument(help=f"Table of the paper: {', '.join(t.name for t in paper.tables())}.")],
    yes: Annotated[bool, typer.Option("--yes", help="Start the missing runs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what is missing and its cost.")] = False,
    seeds: Annotated[list[int] | None, typer.Option("--seed", min=0, help="Run only this seed (repeatable).")] = None,
    methods: Annotated[list[str] | None, typer.Option("--method", help="Run only this method (repeatable).")] = None,
    assignments: Assignments = None,
    weights: Annotated[list[str] | None, typer.Option(metavar="NAME=FILE", help="Weights file of a backbone.")] = None,
    folder: Results = _FOLDER,
    out: Annotated[Path, typer.Option(help="Output folder of the runs.")] = Path("runs/reproduce"),
    bench: Annotated[Path | None, typer.Option(metavar="FILE", help="Speeds for the estimate.")] = None,
    device: Device = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of concurrent runs.")] = 1,
) -> None:
    """Run what is missing of a table of the paper, and show the table."""
    distributed.check_single_process("a reproduction")
    screen, chosen, picked = GridScreen(), paper.find(table), pick_device(device)
    settings: dict[str, Any] = flatten(apply_assignments({}, assignments or []))
    files = _weight_files(chosen, weights or [])
    requested = reproduce.requested_runs(chosen, out, seeds or (), methods or (), settings, files)
    plan = reproduce.make_plan(chosen, requested, folder, out, picked)
    _show_plan(screen, plan, bench or reproduce.recorded_speeds(folder), picked)
    if dry_run:
        return
    if plan.problems:
        raise UserError(f"Nothing was started. Resolve {count(len(plan.problems), 'problem')} first (see above).")
    if (plan.to_run or plan.measure) and not yes:
        screen.print("Nothing was started. To start or to resume, add --yes.")
        return
    try:
        cells = bool(plan.grid.runs)
        outcomes = reproduce.run_missing(plan, folder, device, screen, ExecutionOptions(workers)) if cells else []
    except KeyboardInterrupt:
        raise Interrupted("Interrupted. Finished runs are recorded; resume with the same command.") from None
    if plan.measure:
        screen.print(f"Wrote {reproduce.measure_costs(chosen, folder, picked, screen)}.")
    screen.title(f"\n{chosen.heading}")
    screen.print(results_page.paper_table(chosen, results.read_entries(folder), results_page.read_benches(folder)))
    if assignments:
        screen.print("\nRuns with --set that differ from the paper's are in RESULTS.md under every run.")
    screen.print("\nUpdate RESULTS.md with 'python -m reproduction results'.")
    _report_failures(screen, outcomes)


def _weight_files(table: paper.Table, weights: Sequence[str]) -> dict[str, str]:
    """Return files of weights by the names of the table's backbones."""
    files = {}
    for assignment in weights:
        name, equals, file = assignment.partition("=")
        if not equals or name not in table.backbones:
            known = ", ".join(table.backbones)
            raise UserError(
                f"Invalid --weights {assignment!r}. Expected NAME=FILE with a backbone of {table.name}: {known}."
            )
        files[name] = file
    return files


def _show_plan(screen: Screen, plan: reproduce.Plan, bench: Path, device: torch.device) -> None:
    """Show what is recorded, what the rest costs, and what is missing on this machine."""
    table = plan.table
    kind = "the paper's weights, images and settings" if plan.is_paper else "with your settings or weights"
    screen.title(f"{table.heading}: {kind}")
    rows = []
    for row in plan.rows:
        run, recorded = row.requested, f"{row.recorded} of {row.total}"
        rows.append((run.row.label, run.row.method, run.setup, recorded, str(row.total - row.recorded)))
    first = table.first.lower() if len(table.first) > 1 and table.first.isalpha() else table.first  # not of symbols
    screen.listing((first, "method", "setup", "recorded", "missing"), rows, (0, 2))
    screen.print(
        f"{count(plan.total, 'run')}, {plan.missing} missing{'; costs will be measured' if plan.measure else ''}"
    )
    if plan.deviating:
        screen.print(
            f"{plan.deviating} of the missing were run on this machine's images or weights, which differ from the "
            "paper's. They are flagged in RESULTS.md and are not run again."
        )
    if plan.to_run:
        _show_estimate(screen, plan, bench, device)
    for difference in plan.differences:
        screen.print(f"Differs from the published images: {difference}")
    if plan.differences:
        screen.print("Runs on these images do not count as the paper's. Check them with 'probprompt data check'.")
    for name in plan.downloads:
        screen.print(f"Will be downloaded before the first run: weights {name}, from the Hugging Face Hub.")
    for problem in plan.problems:
        screen.print(f"Problem: {problem}")


def _show_estimate(screen: Screen, plan: reproduce.Plan, bench: Path, device: torch.device) -> None:
    cost = reproduce.estimate(plan, bench)
    if not cost:
        screen.print(
            f"No estimate of GPU hours: {bench} does not exist. Measure it: probprompt bench --methods all --out FILE"
        )
        return
    rest = f", without {count(cost.unknown, 'run')} of unknown speed" if cost.unknown else ""
    screen.print(f"Estimate: {cost.hours:.1f} GPU hours on one {cost.machine}{rest}.")
    machine = machine_name(hardware(device))
    if device.type == "cpu":
        screen.print(f"The runs will use the CPU ({machine}), which takes many times as long.")
    elif machine != cost.machine:
        screen.print(f"The estimate does not hold for the GPU of this machine ({machine}).")


def _report_failures(screen: Screen, outcomes: Sequence[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.problem]
    if failed:
        screen.print(f"Failed: {len(failed)} of {len(outcomes)} runs. Run the same command to try them again.")
        for outcome in failed:
            screen.print(f"  {outcome.spec.folder}: {outcome.reason}")
        raise SystemExit(1)


@app.command()
def scaling(
    axes: Annotated[
        list[str], typer.Argument(metavar="SETTING...", help=f"Settings to increase: {', '.join(AXES)} or all.")
    ],
    method: Annotated[str, typer.Option(help="Method to measure.")] = "probprompt",
    backbone: Annotated[str | None, typer.Option(help="Backbone, with random weights.")] = None,
    preset: Annotated[str | None, typer.Option(help="Preset of the settings.")] = None,
    assignments: Assignments = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds per measurement.")] = SECONDS_OF_MANY,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record into this JSON file.")] = None,
    plot: Plot = None,
    before: Annotated[
        Path | None, typer.Option("--compare-to", metavar="FILE", help="Compare with an earlier record.")
    ] = None,
) -> None:
    """Measure how the cost of a method grows with each setting."""
    screen, picked = Screen(), pick_device(device)
    for path in (out, plot):
        check_writable(path)
    earlier = read_record(before) if before else None
    config = bench_config(method, {"backbone": {"name": backbone}}, preset, assignments or [], picked)
    curves: list[Curve] = []
    for axis in find_axes(axes, config):
        curves.append(measure_curve(axis, config, picked, seconds, screen))
        record = make_record([], curves, {}, picked, seconds)
        if out:
            write_record(out, record)  # after each curve, in case of an interruption
    for curve in curves:
        _show_curve(screen, record, curve)
    if earlier:
        show_ratios(screen, earlier, record, list(curve_ratios(earlier, record)))
    if out:
        screen.print(f"Wrote {out}.")
    if plot:
        write_bytes(plot, draw_growth(record))
        screen.print(f"Wrote {plot}.")


def _show_curve(screen: Screen, record: BenchRecord, curve: Curve) -> None:
    about = f"{curve['method']} on {curve['backbone']}, {curve['precision']}, {chip_words(record['hardware'])}"
    screen.title(f"\n{curve['label']}: {about}")
    units = {"training_images_per_s": (1, ""), "inference_images_per_s": (1, ""), "memory": (2**20, " MiB")}
    units["closing_s"] = (1, " s")
    points: Sequence[Mapping[str, Any]] = curve["points"]
    rows = [
        (
            f"{point['value']:,} {point['note']}",
            *("-" if point[k] is None else f"{point[k] / unit:,.2f}{text}" for k, (unit, text) in units.items()),
        )
        for point in points
    ]
    screen.figures(("", "training", "inference", "memory", "end of task"), rows)
    for name, exponent in curve["exponents"].items():
        worse = "  WORSE THAN LINEAR" if name in curve["worse_than_linear"] else ""
        screen.print(f"{COSTS[name]}: exponent {exponent['whole']:.2f}, at the end {exponent['end']:.2f}{worse}")


@app.command()
def pages(
    records: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Records of 'bench' or 'scaling'.")],
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Markdown page to fill.")] = None,
    plot: Plot = None,
) -> None:
    """Fill the tables of a page from recorded benchmarks, or plot them."""
    if not (page or plot):
        raise UserError("Nothing to do. Pass --page FILE, --plot FILE, or both.")
    for path in (page, plot):
        check_writable(path)
    screen = Screen()
    if plot:
        write_bytes(plot, bench_pages.draw(records))
        screen.print(f"Wrote {plot}.")
    if page:
        bench_pages.write_page(page, records)
        screen.print(f"Wrote {page}.")


@app.command("fidelity")
def write_fidelity(folder: Results = _FOLDER) -> None:
    """Write the tables and the figure of docs/fidelity.md and docs/demo.md."""
    write_bytes(Path("docs/fidelity.png"), fidelity.draw_noise(folder / "emoji-r" / "noise.jsonl"))
    for name, table in fidelity.tables(folder).items():
        page = Path("docs") / name
        write_bytes(page, fidelity.fill(page.read_text(encoding="utf-8"), table).encode())
        Screen().print(f"Wrote {page}.")


def main() -> None:
    """Run a command."""
    cli.main(app)


if __name__ == "__main__":
    main()
