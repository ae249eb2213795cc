"""The commands about the results book: adding runs, making its page, and running a table of the paper again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from probprompt import distributed
from probprompt.cli import Interrupted
from probprompt.cli.compare import GridScreen
from probprompt.cli.screen import Screen
from probprompt.config import apply_assignments, flatten
from probprompt.errors import UserError
from probprompt.results import paper
from probprompt.results.book import add_runs, read_entries
from probprompt.results.page import paper_table, read_benches, write_page
from probprompt.results.reproduce import Plan, carry_out, estimate, known_speeds, make_plan, measure_costs, wishes
from probprompt.runs.carry_out import Where
from probprompt.runs.execute import pick_device
from probprompt.runs.grid import Outcome
from probprompt.runs.record import hardware, machine_name

_BOOK, _PAGE = Path("results"), Path("RESULTS.md")


def one_book(before: Path | None, page: Path | None, behind: Path | None) -> Path:
    """The book that is meant, by the option before add, behind it, or neither; two books and a page are refused."""
    if page is not None:
        raise UserError("--page goes with probprompt book alone, which writes the page: leave it away with add")
    if before is not None and behind is not None and before != behind:
        raise UserError(f"--book names two folders, {before} and {behind}: name the one that is meant")
    return behind or before or _BOOK


def run_book(book: Path | None, page: Path | None) -> None:
    """Make the page anew."""
    book, page = book or _BOOK, page or _PAGE
    if not book.is_dir():
        raise UserError(f"there is no book {book}: begin one with probprompt book add RUN, or name one with --book")
    screen = Screen()
    screen.say(f"{len(read_entries(book))} run(s) in {book}")
    for path in write_page(book, page):
        screen.say(f"written: {path}")


def run_add(runs: Sequence[Path], book: Path, replace: bool, skip_unfinished: bool) -> None:
    """Put finished runs into the book."""
    if not runs:
        raise UserError("no run is named: probprompt book add RUN..., each the folder of a run or one with runs inside")
    added, passed_over = add_runs(runs, book, replace, skip_unfinished)
    screen = Screen()
    for one in added:
        screen.say(f"{one.what}: {one.path}")
    if passed_over:
        screen.say(f"passed over, not finished: {len(passed_over)}")


def run_reproduce(
    name: str,
    seeds: Sequence[int],
    methods: Sequence[str],
    assignments: Sequence[str],
    weights: Sequence[str],
    book: Path,
    out: Path,
    bench: Path | None,
    device: str | None,
    workers: int,
    yes: bool,
    dry_run: bool,
) -> None:
    """Show what a table of the paper lacks and costs; with consent run it, add it to the book, and show the table."""
    distributed.refuse_several("a reproduction")
    screen, table = GridScreen(), paper.find(name)
    settings: dict[str, Any] = flatten(apply_assignments({}, assignments))
    picked = pick_device(device)
    plan = make_plan(table, wishes(table, out, seeds, methods, settings, _files(table, weights)), book, out, picked)
    _show_plan(screen, plan)
    _show_estimate(screen, plan, bench or known_speeds(book), picked)
    _show_needs(screen, plan)
    if dry_run:
        return
    if plan.problems:
        raise UserError(f"{len(plan.problems)} thing(s) are to do first, see above: nothing was started")
    unadded = any(standing.finished or standing.waiting for standing in plan.standings)
    if (plan.to_run or plan.measure) and not yes:
        screen.say("nothing was started: add --yes to start, the same command goes on after a stop")
        return
    outcomes = _run(plan, book, device, screen, Where(workers)) if unadded else []
    if plan.measure:
        screen.say(f"written: {measure_costs(table, book, picked, screen)}")
    screen.title(f"\n{table.heading}")
    screen.say(paper_table(table, read_entries(book), read_benches(book)))
    if assignments:
        screen.say("\nRuns with --set may not be the paper's: those that are not stand in RESULTS.md under every run.")
    screen.say("\nprobprompt book puts all of this into RESULTS.md")
    _conclude(screen, outcomes)


def _files(table: paper.Table, weights: Sequence[str]) -> dict[str, str]:
    """Files of weights by the names of backbones of the table."""
    known, found = dict.fromkeys(column.backbone for column in table.columns), {}
    for assignment in weights:
        name, equals, file = assignment.partition("=")
        if not equals or name not in known:
            raise UserError(
                f"--weights takes NAME=FILE with a backbone of {table.name} ({', '.join(known)}), not {assignment!r}"
            )
        found[name] = file
    return found


def _run(plan: Plan, book: Path, device: str | None, screen: GridScreen, where: Where) -> list[Outcome]:
    try:
        return carry_out(plan, book, device, screen, where)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what was finished is in the book, go on with the same command") from None


def _show_plan(screen: Screen, plan: Plan) -> None:
    table = plan.table
    asked = "the paper's weights, images and settings" if plan.papers else "with settings or weights of your own"
    screen.title(f"{table.heading}: {asked}")
    rows = [
        (
            standing.wish.row.label,
            standing.wish.row.method,
            standing.wish.where,
            f"{standing.there} of {standing.wanted}",
            str(standing.missing),
        )
        for standing in plan.standings
    ]
    first = table.first.lower() if len(table.first) > 1 and table.first.isalpha() else table.first  # symbols stay
    screen.listing((first, "run as", "where", "there", "missing"), rows, (0, 2))
    wanted = sum(standing.wanted for standing in plan.standings)
    screen.say(f"{wanted} run(s), {plan.missing} missing{'; costs are to be measured' if plan.measure else ''}")
    if plan.otherwise:
        screen.say(
            f"{plan.otherwise} of the missing were run already, on images or with weights of this machine that are not "
            "the paper's: they stand in RESULTS.md with their marks, and are not run again"
        )


def _show_needs(screen: Screen, plan: Plan) -> None:
    """What the runs would meet here: other images than published, weights to be fetched, and what is to do first."""
    for difference in plan.differences:
        screen.say(f"not as published: {difference}")
    if plan.differences:
        screen.say("runs on these images are not the paper's: check them with probprompt data check before you start")
    for name in plan.fetched:
        screen.say(f"to be fetched before the first run: the weights {name}, from the Hugging Face hub")
    for problem in plan.problems:
        screen.say(f"to do first: {problem}")


def _show_estimate(screen: Screen, plan: Plan, bench: Path, device: torch.device) -> None:
    if not plan.to_run:
        return
    found = estimate(plan, bench)
    if not found:
        screen.say(f"no estimate of GPU hours: there is no record {bench} (probprompt bench --methods all --out FILE)")
        return
    rest = f", and {found.unknown} run(s) that the record says nothing about" if found.unknown else ""
    screen.say(f"an estimate, not a measurement: {found.hours:.1f} GPU hours on one {found.machine}{rest}")
    here = machine_name(hardware(device))
    if device.type == "cpu":
        why = "--device says cpu" if torch.cuda.is_available() else "this machine has no GPU"
        screen.say(f"{why}: these hours are not those of its processor ({here}), which takes many times as long")
    elif here != found.machine:
        screen.say(f"this machine has another GPU ({here}): it takes longer or shorter")


def _conclude(screen: Screen, outcomes: Sequence[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.problem]
    if failed:
        screen.say(f"failed: {len(failed)} of {len(outcomes)} runs (the same command tries them again)")
        for outcome in failed:
            screen.say(f"  {outcome.cell.folder}: {outcome.reason}")
        raise SystemExit(1)
