"""The commands of a checkout: the page of results, the runs of the paper's tables, and the pages on speed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from probprompt import cli, distributed
from probprompt.bench.results import BenchRecord, Curve, make_record, read_record, refuse_unwritable, write_record
from probprompt.cli.cmd_bench import SECONDS_OF_MANY, bench_config, show_ratios
from probprompt.cli.console import Device, Screen
from probprompt.cli.grid_screen import GridScreen
from probprompt.config import apply_assignments, flatten
from probprompt.engine.build import pick_device
from probprompt.engine.hardware import chip_words, hardware, machine_name
from probprompt.errors import Interrupted, UserError
from probprompt.runs.grid import ExecutionOptions, Outcome
from probprompt.storage import write_bytes
from reproduction import bench_pages, fidelity, paper, reproduce, results, results_page
from reproduction.plots import draw_growth
from reproduction.scaling import AXES, COSTS, curve_ratios, find_axes, measure_curve

app = typer.Typer(
    name="python -m reproduction",
    help="The project's own results: RESULTS.md, the paper's tables run again, and the pages on speed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
results_app = typer.Typer()
app.add_typer(results_app, name="results")
Book = Annotated[Path, typer.Option("--book", metavar="FOLDER", help="Folder of the recorded runs.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; repeatable.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a plot (PNG).")]
_BOOK = Path("results")


# Results


@results_app.callback(invoke_without_command=True)
def write_results(
    context: typer.Context,
    book: Book = _BOOK,
    page: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("RESULTS.md"),
) -> None:
    """Write RESULTS.md and its figures from the files of runs; 'results add' adds runs to them."""
    if context.invoked_subcommand:
        if (book, page) != (_BOOK, Path("RESULTS.md")):
            raise UserError("--book goes after 'add', and --page belongs to 'results' without 'add'")
        return
    if not book.is_dir():
        raise UserError(f"{book} is not a folder: add runs with python -m reproduction results add RUN, or pass --book")
    screen = Screen()
    screen.say(f"{len(results.read_entries(book))} run(s) in {book}")
    for path in results_page.write_page(book, page):
        screen.say(f"written: {path}")


@results_app.command("add")
def add_results(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or with such inside.")],
    book: Book = _BOOK,
    replace: Annotated[bool, typer.Option("--replace", help="Also replace a run of other settings.")] = False,
    skip_unfinished: Annotated[bool, typer.Option("--skip-unfinished", help="Skip unfinished runs.")] = False,
) -> None:
    """Record finished runs, without paths of this machine."""
    screen = Screen()
    added, skipped = results.add_runs(runs, book, replace, skip_unfinished)
    for path, change in added.items():
        screen.say(f"{change}: {path}")
    if skipped:
        screen.say(f"skipped, not finished: {len(skipped)}")


# A table of the paper


@app.command("run")
def run_table(
    table: Annotated[str, typer.Argument(help=f"A table of the paper: {', '.join(t.name for t in paper.tables())}.")],
    yes: Annotated[bool, typer.Option("--yes", help="Start: run what is missing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what is missing, and its cost.")] = False,
    seeds: Annotated[list[int] | None, typer.Option("--seed", min=0, help="Only this seed; repeatable.")] = None,
    methods: Annotated[list[str] | None, typer.Option("--method", help="Only rows of this method; repeatable.")] = None,
    assignments: Assignments = None,
    weights: Annotated[list[str] | None, typer.Option(metavar="NAME=FILE", help="Such as ibot1k=FILE.")] = None,
    book: Book = _BOOK,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/reproduce"),
    bench: Annotated[Path | None, typer.Option(metavar="FILE", help="Other speeds for the estimate.")] = None,
    device: Device = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs side by side, each in a process.")] = 1,
) -> None:
    """Run what is missing of a table of the paper, with the paper's weights and images, and show both."""
    distributed.refuse_several("a reproduction")
    screen, chosen, picked = GridScreen(), paper.find(table), pick_device(device)
    settings: dict[str, Any] = flatten(apply_assignments({}, assignments or []))
    files = _weight_files(chosen, weights or [])
    requested = reproduce.requested_runs(chosen, out, seeds or (), methods or (), settings, files)
    plan = reproduce.make_plan(chosen, requested, book, out, picked)
    _show_plan(screen, plan, bench or reproduce.recorded_speeds(book), picked)
    if dry_run:
        return
    if plan.problems:
        raise UserError(f"{len(plan.problems)} thing(s) are to do first, see above: nothing was started")
    if (plan.to_run or plan.measure) and not yes:
        screen.say("nothing was started: add --yes to start, the same command goes on after a stop")
        return
    try:
        cells = bool(plan.grid.cells)
        outcomes = reproduce.run_missing(plan, book, device, screen, ExecutionOptions(workers)) if cells else []
    except KeyboardInterrupt:
        raise Interrupted("interrupted; finished runs are recorded, continue with the same command") from None
    if plan.measure:
        screen.say(f"written: {reproduce.measure_costs(chosen, book, picked, screen)}")
    screen.title(f"\n{chosen.heading}")
    screen.say(results_page.paper_table(chosen, results.read_entries(book), results_page.read_benches(book)))
    if assignments:
        screen.say("\nRuns with --set may not be the paper's: those that are not are in RESULTS.md under every run.")
    screen.say("\npython -m reproduction results puts all of this into RESULTS.md")
    _report_failures(screen, outcomes)


def _weight_files(table: paper.Table, weights: Sequence[str]) -> dict[str, str]:
    """Return files of weights by the names of the table's backbones."""
    files = {}
    for assignment in weights:
        name, equals, file = assignment.partition("=")
        if not equals or name not in table.backbones:
            known = ", ".join(table.backbones)
            raise UserError(f"--weights takes NAME=FILE with a backbone of {table.name} ({known}), not {assignment!r}")
        files[name] = file
    return files


def _show_plan(screen: Screen, plan: reproduce.Plan, bench: Path, device: torch.device) -> None:
    """Show what is recorded, what the rest costs, and what it uses on this machine or lacks."""
    table = plan.table
    kind = "the paper's weights, images and settings" if plan.is_paper else "with settings or weights of your own"
    screen.title(f"{table.heading}: {kind}")
    rows = []
    for row in plan.rows:
        run, recorded = row.requested, f"{row.recorded} of {row.total}"
        rows.append((run.row.label, run.row.method, run.setup, recorded, str(row.total - row.recorded)))
    first = table.first.lower() if len(table.first) > 1 and table.first.isalpha() else table.first  # not of symbols
    screen.listing((first, "run as", "where", "there", "missing"), rows, (0, 2))
    screen.say(f"{plan.total} run(s), {plan.missing} missing{'; costs are to be measured' if plan.measure else ''}")
    if plan.deviating:
        screen.say(
            f"{plan.deviating} of the missing were run already, on images or with weights of this machine that are not "
            "the paper's: they are flagged in RESULTS.md, and are not run again"
        )
    if plan.to_run:
        _show_estimate(screen, plan, bench, device)
    for difference in plan.differences:
        screen.say(f"not as published: {difference}")
    if plan.differences:
        screen.say("runs on these images are not the paper's: check them with probprompt data check before you start")
    for name in plan.downloads:
        screen.say(f"to be downloaded before the first run: the weights {name}, from the Hugging Face hub")
    for problem in plan.problems:
        screen.say(f"to do first: {problem}")


def _show_estimate(screen: Screen, plan: reproduce.Plan, bench: Path, device: torch.device) -> None:
    cost = reproduce.estimate(plan, bench)
    if not cost:
        screen.say(f"no estimate of GPU hours: {bench} does not exist (probprompt bench --methods all --out FILE)")
        return
    rest = f", and {cost.unknown} run(s) that the record says nothing about" if cost.unknown else ""
    screen.say(f"an estimate, not a measurement: {cost.hours:.1f} GPU hours on one {cost.machine}{rest}")
    machine = machine_name(hardware(device))
    if device.type == "cpu":
        why = "--device says cpu" if torch.cuda.is_available() else "this machine has no GPU"
        screen.say(f"{why}: these hours are not those of its processor ({machine}), which takes many times as long")
    elif machine != cost.machine:
        screen.say(f"this machine has another GPU ({machine}): it takes longer or shorter")


def _report_failures(screen: Screen, outcomes: Sequence[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.problem]
    if failed:
        screen.say(f"failed: {len(failed)} of {len(outcomes)} runs (the same command tries them again)")
        for outcome in failed:
            screen.say(f"  {outcome.cell.folder}: {outcome.reason}")
        raise SystemExit(1)


# Speed


@app.command()
def scaling(
    axes: Annotated[list[str], typer.Argument(metavar="SETTING...", help=f"{', '.join(AXES)} or all.")],
    method: Annotated[str, typer.Option(help="What to measure.")] = "probprompt",
    backbone: Annotated[str | None, typer.Option(help="With random weights; demo, on a GPU ViT-B/16.")] = None,
    preset: Annotated[str | None, typer.Option(help="published, matched, ridge or flagship.")] = None,
    assignments: Assignments = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="For each measurement.")] = SECONDS_OF_MANY,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a record in JSON.")] = None,
    plot: Plot = None,
    against: Annotated[Path | None, typer.Option(metavar="FILE", help="Compare with an earlier record.")] = None,
) -> None:
    """Measure how the cost of a method grows with one setting after another."""
    screen, picked = Screen(), pick_device(device)
    for path in (out, plot):
        refuse_unwritable(path)
    before = read_record(against) if against else None
    config = bench_config(method, {"backbone": {"name": backbone}}, preset, assignments or [], picked)
    curves: list[Curve] = []
    for axis in find_axes(axes, config):
        curves.append(measure_curve(axis, config, picked, seconds, screen))
        record = make_record([], curves, {}, picked, seconds)
        if out:
            write_record(out, record)  # what was measured is kept if the rest is interrupted
    for curve in curves:
        _show_curve(screen, record, curve)
    if before:
        show_ratios(screen, before, record, list(curve_ratios(before, record)))
    if out:
        screen.say(f"record: {out}")
    if plot:
        write_bytes(plot, draw_growth(record))
        screen.say(f"plot: {plot}")


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
    screen.figures(("", "training", "inference", "memory", "closing"), rows)
    for name, exponent in curve["exponents"].items():
        worse = "  WORSE THAN LINEAR" if name in curve["worse_than_linear"] else ""
        screen.say(f"{COSTS[name]}: exponent {exponent['whole']:.2f}, at the end {exponent['end']:.2f}{worse}")


@app.command()
def pages(
    records: Annotated[list[Path], typer.Argument(metavar="RECORD...", help="Files that 'bench' or 'scaling' wrote.")],
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Put their tables into this Markdown page.")] = None,
    plot: Plot = None,
) -> None:
    """Put the tables of recorded benchmarks into a page, or draw a plot of them."""
    if not (page or plot):
        raise UserError("Nothing to make of these records: pass --page FILE, --plot FILE, or both")
    for path in (page, plot):
        refuse_unwritable(path)
    screen = Screen()
    if plot:
        write_bytes(plot, bench_pages.draw(records))
        screen.say(f"plot: {plot}")
    if page:
        bench_pages.write_page(page, records)
        screen.say(f"written: {page}")


@app.command("fidelity")
def write_fidelity(book: Book = _BOOK) -> None:
    """Write the tables of docs/fidelity.md and docs/demo.md and a figure from recorded runs."""
    write_bytes(Path("docs/fidelity.png"), fidelity.draw_noise(book / "emoji-r" / "noise.jsonl"))
    for name, table in fidelity.tables(book).items():
        page = Path("docs") / name
        write_bytes(page, fidelity.fill(page.read_text(encoding="utf-8"), table).encode())
        Screen().say(f"written: {page}")


def main() -> None:
    """Run a command."""
    cli.main(app)


if __name__ == "__main__":
    main()
