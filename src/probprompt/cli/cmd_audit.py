"""Command ``audit``: check for leaks, show a table, write the report, and exit with 1 if there is a leak."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probprompt.cli.console import METHODS, SET, Device, Precision, Screen, argument, option
from probprompt.errors import UserError

if TYPE_CHECKING:
    from probprompt.evaluation.audit import Audit, Check
    from probprompt.runs.leak_audit import AuditReport

_LABELS = {
    "batch size": ("batch size", "size"),
    "batch mates": ("other images", "others"),
    "task-pure batches": ("one-task batches", "tasks"),
    "unseen classes": ("unseen classes", "unseen"),
    "repeated": ("repeatability", "repeat"),
    "nothing told": ("no task labels", "labels"),
    "future classes": ("future classes", "future"),
}
"""Long and short label of each check, by its name in the report file."""


def audit(
    target: Annotated[
        str | None,
        argument("Run or model folder; a benchmark with --method or --all-methods.", "[TARGET]", default="emoji-r"),
    ] = None,
    method: Annotated[
        str | None, option("Train this method on a few images and audit it.", "NAME", autocompletion=METHODS)
    ] = None,
    all_methods: Annotated[bool, option("Train and audit every method.", None, "--all-methods")] = False,
    assignments: Annotated[list[str] | None, option(*SET)] = None,
    data: Annotated[str | None, option("Images for a saved model: a folder or a benchmark.", "FOLDER")] = None,
    num_images: Annotated[
        int | None, option("Number of images.", "N", default="64 for a model, 32 for a method", min=2)
    ] = None,
    precision: Annotated[Precision, option("Precision of the backbone.")] = Precision.fp32,
    device: Device = None,
    out: Annotated[Path | None, option("JSON file for the audit report.", "FILE")] = None,
) -> None:
    """Check that predictions do not leak information between images.

    The exit code is 1 if there is a leak.

    Example: probprompt audit my-model --data photos/
    """
    from probprompt import methods
    from probprompt.config import apply_assignments
    from probprompt.engine.build import pick_device
    from probprompt.runs import leak_audit
    from probprompt.storage import write_json

    screen, picked = Screen(), pick_device(device)
    if method is None and not all_methods:
        if target is None:
            raise UserError("Nothing to audit. Pass the folder of a run or model, --method NAME, or --all-methods.")
        if assignments:
            raise UserError("--set requires --method or --all-methods. A saved model keeps its settings; remove --set.")
        count = num_images or leak_audit.SAVED_IMAGES
        reports = [leak_audit.audit_saved(Path(target), picked, precision.value, count, data, screen)]
    else:
        if data is not None:
            raise UserError("--data is for saved models. Pass the benchmark first: probprompt audit DATA --method NAME")
        if method is not None and all_methods:
            raise UserError("--method and --all-methods cannot be combined. Remove one of them.")
        names = list(methods.registered()) if method is None else [method]
        count = num_images or leak_audit.METHOD_IMAGES
        given = {name: apply_assignments({"method": {"name": name}}, assignments or []) for name in names}
        configs = [leak_audit.quick_config(name, target or "emoji-r", given[name]) for name in names]
        reports = [leak_audit.audit_method(config, picked, precision.value, count, screen) for config in configs]
    _show_overview(screen, reports) if len(reports) > 1 else _show_checks(screen, reports[0])
    for report in reports:
        for mark in report.about["marks"]:
            screen.print(f"{report.subject}: {mark}")
    screen.print(_explain(reports[0].audit))
    for report in reports:
        if report.written:
            screen.print(f"Wrote {report.written}.")
    if out:
        write_json(out, [report.to_json() for report in reports] if len(reports) > 1 else reports[0].to_json())
        screen.print(f"Wrote {out}.")
    if not all(report.audit.passed for report in reports):
        raise typer.Exit(1)


def _show_checks(screen: Screen, report: "AuditReport") -> None:
    outcome = report.audit
    method = report.about["method"]["name"]
    subject = method if report.subject == method else f"{report.subject} ({method})"
    screen.title(f"\n{subject}: {outcome.images} images of {report.about['images_of']}")
    header = ("check", "compared", "worst", "allowed", "beyond", "changed", "")
    screen.listing(header, [_row(check) for check in outcome.checks])
    verdict = "No leak found: each prediction depends only on its own image."
    screen.print(f"\n{verdict if outcome.passed else f'LEAK: {_listed(outcome.leaks)}'}")


def _row(check: "Check") -> tuple[str, ...]:
    compared = f"{check.question} ({check.note})" if check.note else check.question
    label = _labels(check.name)[0]
    if check.worst is None:
        return label, compared, "", "", "", "", _verdict(check)
    worst, beyond = f"{check.worst:.0e}" if check.worst else "0", str(round((check.share or 0) * check.images))
    changed = "" if check.changed is None else str(check.changed)
    return label, compared, worst, f"{check.tolerance:g}", beyond, changed, _verdict(check)


def _show_overview(screen: Screen, reports: "Sequence[AuditReport]") -> None:
    """Print one line per method."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for check in reports[0].audit.checks:
        table.add_column(_labels(check.name)[1], overflow="fold")
    for report in reports:
        table.add_row(report.subject, *map(_verdict, report.audit.checks))
    screen.print("")
    screen.console.print(table)
    leaking = [report.subject for report in reports if not report.audit.passed]
    verdict = (
        f"LEAK: {', '.join(leaking)}" if leaking else "No leak found: each prediction depends only on its own image."
    )
    screen.print(f"\n{verdict}\nShow the numbers of one method with 'probprompt audit --method NAME'.")


def _labels(check: str) -> tuple[str, str]:
    return _LABELS.get(check, (check, check))


def _listed(checks: Sequence[str]) -> str:
    return ", ".join(_labels(check)[0] for check in checks)


def _verdict(check: "Check") -> str:
    return {True: "ok", False: "LEAK", None: "-"}[check.passed]


def _explain(outcome: "Audit") -> str:
    """Return how the audit was measured, and what counts as a leak."""
    from probprompt.evaluation.audit import TOLERANCES

    tolerance = outcome.tolerance
    share = f"more than {tolerance.share:.0%} of the images (and of more than one)" if tolerance.share else "any image"
    return (
        f"Measured in {outcome.precision} on {outcome.device}. Leak: the logits of {share} differ by more than "
        f"{tolerance.difference:g} times the mean range of an image's logits. For prompts, the limit is "
        f"{TOLERANCES['fp32'].difference:g} in any precision. beyond: images above the limit; changed: images whose "
        "predicted class changes; -: not applicable."
    )
