"""What ``probprompt audit`` does: look for leaks, show a table, write the proof, say so with the exit code."""

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.table import Table

from probprompt import methods
from probprompt.backbones.vit import Precision
from probprompt.cli.console import Screen
from probprompt.config import apply_assignments
from probprompt.engine.build import pick_device
from probprompt.errors import UserError
from probprompt.evaluation.audit import TOLERANCES, Audit, Check
from probprompt.runs.leak_audit import METHOD_IMAGES, SAVED_IMAGES, AuditReport, audit_method, audit_saved, quick_config
from probprompt.storage import write_json

LEAK = 1  # exit code


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


def run_audit(
    target: str | None,
    method: str | None,
    every: bool,
    assignments: list[str],
    data: str | None,
    images: int | None,
    precision: Precision,
    device: str | None,
    out: Path | None,
) -> None:
    """Audit a run or a saved model, or else methods, which are trained for it."""
    screen, where = Screen(), pick_device(device)
    if method is None and not every:
        if target is None:
            raise UserError("name what to audit: the folder of a run or of a model, or --method NAME, or --all")
        if assignments:
            raise UserError("--set goes with --method or --all: a saved model has its settings already")
        proofs = [audit_saved(Path(target), where, precision, images or SAVED_IMAGES, data, screen)]
    else:
        if data is not None:
            raise UserError("--data goes with a saved model: name the benchmark of a method behind the command")
        if method is not None and every:
            raise UserError("--method and --all exclude each other")
        names = list(methods.registered()) if method is None else [method]
        configs = [
            quick_config(name, target or "emoji-r", apply_assignments({"method": {"name": name}}, assignments))
            for name in names
        ]
        proofs = [audit_method(config, where, precision, images or METHOD_IMAGES, screen) for config in configs]
    _show(screen, proofs)
    _write(screen, proofs, out)
    if not all(proof.audit.passed for proof in proofs):
        raise typer.Exit(LEAK)


def _show(screen: Screen, proofs: Sequence[AuditReport]) -> None:
    if len(proofs) == 1:
        _show_checks(screen, proofs[0])
    else:
        _show_overview(screen, proofs)
    for proof in proofs:
        for mark in proof.about["marks"]:
            screen.say(f"{proof.subject}: {mark}")
    screen.say(_statement(proofs[0].audit))


def _show_checks(screen: Screen, proof: AuditReport) -> None:
    outcome = proof.audit
    method = proof.about["method"]["name"]
    subject = method if proof.subject == method else f"{proof.subject} ({method})"
    screen.title(f"\n{subject}: {outcome.images} images of {proof.about['images_of']}")
    header = ("check", "compared", "worst", "allowed", "beyond", "changed", "")
    screen.listing(header, [_line(check) for check in outcome.checks])
    verdict = "predictions depend on their own image alone" if outcome.passed else f"LEAK: {', '.join(outcome.leaks)}"
    screen.say(f"\n{verdict}")


def _line(check: Check) -> tuple[str, ...]:
    compared = f"{check.question} ({check.note})" if check.note else check.question
    if check.worst is None:
        return check.name, compared, "", "", "", "", _verdict(check)
    beyond, changed = round((check.share or 0) * check.images), "" if check.changed is None else str(check.changed)
    return (
        check.name,
        compared,
        f"{check.worst:.0e}" if check.worst else "0",
        f"{check.tolerance:g}",
        str(beyond),
        changed,
        _verdict(check),
    )


def _show_overview(screen: Screen, proofs: Sequence[AuditReport]) -> None:
    """One line per method."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for check in proofs[0].audit.checks:
        table.add_column(_WORDS.get(check.name, check.name), overflow="fold")
    for proof in proofs:
        table.add_row(proof.subject, *map(_verdict, proof.audit.checks))
    screen.say("")
    screen.console.print(table)
    leaking = [proof.subject for proof in proofs if not proof.audit.passed]
    verdict = f"LEAK: {', '.join(leaking)}" if leaking else "predictions of all depend on their own image alone"
    screen.say(f"\n{verdict}\nThe columns in full, with numbers: probprompt audit --method NAME")


def _verdict(check: Check) -> str:
    return {True: "ok", False: "LEAK", None: "-"}[check.passed]


def _statement(outcome: Audit) -> str:
    """How it was measured, and what counts as a leak."""
    tolerance = outcome.tolerance
    share = f"more than {tolerance.share:.0%} of the images (and of more than one)" if tolerance.share else "any image"
    return (
        f"Measured in {outcome.precision} on {outcome.device}. A leak: the logits of {share} differ by more than "
        f"{tolerance.difference:g} of their spread, the mean range of the logits of an image. Prompts are held to "
        f"{TOLERANCES['fp32'].difference:g} of theirs in any precision. beyond: images that differ by more; changed: "
        "images of which another class is predicted; -: not applicable."
    )


def _write(screen: Screen, proofs: Sequence[AuditReport], out: Path | None) -> None:
    for proof in proofs:
        if proof.written:
            screen.say(f"proof: {proof.written}")
    if out:
        write_json(out, [proof.to_json() for proof in proofs] if len(proofs) > 1 else proofs[0].to_json())
        screen.say(f"proof: {out}")
