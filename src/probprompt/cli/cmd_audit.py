"""The command ``audit``: look for leaks, show a table, write the report, and exit with 1 where there is a leak."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from probprompt.cli.console import Device, Precision, Screen
from probprompt.errors import UserError

if TYPE_CHECKING:
    from probprompt.evaluation.audit import Audit, Check
    from probprompt.runs.leak_audit import AuditReport

_WORDS = {
    "batch size": "size",
    "batch mates": "mates",
    "task-pure batches": "tasks",
    "unseen classes": "unseen",
    "repeated": "again",
    "nothing told": "told",
    "future classes": "future",
}
"""Checks in a word each, so that a table of methods fits the screen."""


def audit(
    target: Annotated[
        str | None,
        Argument(
            metavar="[RUN|MODEL|BENCHMARK]",
            help="A run's or a model's folder; with --method or --all a benchmark.",
            show_default="emoji-r",
        ),
    ] = None,
    method: Annotated[str | None, Option(help="Train this method on a few images and audit it.")] = None,
    every: Annotated[bool, Option("--all", help="Train and audit every method.")] = False,
    assignments: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Any setting of that training.")
    ] = None,
    data: Annotated[str | None, Option(help="Images for a saved model: a folder or a benchmark.")] = None,
    images: Annotated[int | None, Option(min=2, help="How many images: 64 for a model, 32 for a method.")] = None,
    precision: Annotated[Precision, Option(help="What the backbone computes in.")] = Precision.fp32,
    device: Device = None,
    out: Annotated[Path | None, Option(metavar="FILE", help="Write the proof to a JSON file, too.")] = None,
) -> None:
    """Prove that predictions depend on their own image alone; a leak is told with exit code 1."""
    from probprompt import methods
    from probprompt.config import apply_assignments
    from probprompt.engine.build import pick_device
    from probprompt.runs import leak_audit
    from probprompt.storage import write_json

    screen, where = Screen(), pick_device(device)
    if method is None and not every:
        if target is None:
            raise UserError("name what to audit: the folder of a run or of a model, or --method NAME, or --all")
        if assignments:
            raise UserError("--set goes with --method or --all: a saved model has its settings already")
        count = images or leak_audit.SAVED_IMAGES
        proofs = [leak_audit.audit_saved(Path(target), where, precision.value, count, data, screen)]
    else:
        if data is not None:
            raise UserError("--data goes with a saved model: name the benchmark of a method behind the command")
        if method is not None and every:
            raise UserError("--method and --all exclude each other")
        names = list(methods.registered()) if method is None else [method]
        count = images or leak_audit.METHOD_IMAGES
        given = {name: apply_assignments({"method": {"name": name}}, assignments or []) for name in names}
        configs = [leak_audit.quick_config(name, target or "emoji-r", given[name]) for name in names]
        proofs = [leak_audit.audit_method(config, where, precision.value, count, screen) for config in configs]
    _show_overview(screen, proofs) if len(proofs) > 1 else _show_checks(screen, proofs[0])
    for proof in proofs:
        for mark in proof.about["marks"]:
            screen.print(f"{proof.subject}: {mark}")
    screen.print(_statement(proofs[0].audit))
    for proof in proofs:
        if proof.written:
            screen.print(f"proof: {proof.written}")
    if out:
        write_json(out, [proof.to_json() for proof in proofs] if len(proofs) > 1 else proofs[0].to_json())
        screen.print(f"proof: {out}")
    if not all(proof.audit.passed for proof in proofs):
        raise typer.Exit(1)


def _show_checks(screen: Screen, proof: "AuditReport") -> None:
    outcome = proof.audit
    method = proof.about["method"]["name"]
    subject = method if proof.subject == method else f"{proof.subject} ({method})"
    screen.title(f"\n{subject}: {outcome.images} images of {proof.about['images_of']}")
    header = ("check", "compared", "worst", "allowed", "beyond", "changed", "")
    screen.listing(header, [_line(check) for check in outcome.checks])
    verdict = "predictions depend on their own image alone" if outcome.passed else f"LEAK: {', '.join(outcome.leaks)}"
    screen.print(f"\n{verdict}")


def _line(check: "Check") -> tuple[str, ...]:
    compared = f"{check.question} ({check.note})" if check.note else check.question
    if check.worst is None:
        return check.name, compared, "", "", "", "", _verdict(check)
    worst, beyond = f"{check.worst:.0e}" if check.worst else "0", str(round((check.share or 0) * check.images))
    changed = "" if check.changed is None else str(check.changed)
    return check.name, compared, worst, f"{check.tolerance:g}", beyond, changed, _verdict(check)


def _show_overview(screen: Screen, proofs: "Sequence[AuditReport]") -> None:
    """Show one line per method."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for check in proofs[0].audit.checks:
        table.add_column(_WORDS.get(check.name, check.name), overflow="fold")
    for proof in proofs:
        table.add_row(proof.subject, *map(_verdict, proof.audit.checks))
    screen.print("")
    screen.console.print(table)
    leaking = [proof.subject for proof in proofs if not proof.audit.passed]
    verdict = f"LEAK: {', '.join(leaking)}" if leaking else "predictions of all depend on their own image alone"
    screen.print(f"\n{verdict}\nThe columns in full, with numbers: probprompt audit --method NAME")


def _verdict(check: "Check") -> str:
    return {True: "ok", False: "LEAK", None: "-"}[check.passed]


def _statement(outcome: "Audit") -> str:
    """Say how it was measured, and what counts as a leak."""
    from probprompt.evaluation.audit import TOLERANCES

    tolerance = outcome.tolerance
    share = f"more than {tolerance.share:.0%} of the images (and of more than one)" if tolerance.share else "any image"
    return (
        f"Measured in {outcome.precision} on {outcome.device}. A leak: the logits of {share} differ by more than "
        f"{tolerance.difference:g} of their spread, the mean range of the logits of an image. Prompts are held to "
        f"{TOLERANCES['fp32'].difference:g} of theirs in any precision. beyond: images that differ by more; changed: "
        "images of which another class is predicted; -: not applicable."
    )
