"""What the commands on a classifier do."""

import csv
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from probprompt.classifier import ContinualClassifier, Evaluation, LearnReport, Prediction, changing
from probprompt.classifier.store import Store
from probprompt.cli import Interrupted
from probprompt.cli.console import Screen
from probprompt.config import apply_assignments, merge
from probprompt.data.inputs import pictures
from probprompt.errors import UserError, shorten

_MOST_RISKS = 10  # shown after learning


class Rows(Protocol):
    """How predictions are written."""

    def write(self, answer: Prediction) -> None:
        """Write one."""


# Changing a model --------------------------------------------------------------------------------------------------


def run_learn(
    model: Path,
    folder: Path,
    known: str,
    name: str | None,
    given: Mapping[str, Any],
    weights: str | None,
    assignments: Sequence[str],
    keep_versions: int | None,
    device: str | None,
) -> None:
    """Learn a folder of class folders, with a new classifier where there is none."""
    options = {option: value for option, value in given.items() if value is not None}
    create: dict[str, Any] | None = None
    if Store(model).exists:
        named = [f"--{option}" for option in options] + ["--weights"] * bool(weights) + ["--set"] * bool(assignments)
        if named:
            raise UserError(f"{model} goes on with the settings it began with: leave out {shorten(named)}")
    else:
        config = apply_assignments(_method_of(options), assignments)
        create = {**options, "config": merge(config, {"backbone": {"weights": weights}} if weights else {})}
    screen = Screen()
    with _unchanged(model), changing(model, device, create) as classifier:
        if keep_versions is not None:
            classifier.keep_versions = keep_versions
        report = classifier.learn(folder, known=known, name=name, progress=screen)  # type: ignore[arg-type]
    _show_lesson(screen, model, classifier, report)


def _method_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The method that settings by their last names belong to."""
    return {"method": {"name": options["method"]}} if "method" in options else {}


def _show_lesson(screen: Screen, model: Path, classifier: ContinualClassifier, report: LearnReport) -> None:
    for warning in report.warnings:
        screen.say(warning)
    new = f"{len(report.classes)} new class(es)" if report.classes else ""
    more = f"more images of {shorten(report.refined)}" if report.refined else ""
    what = " and ".join(part for part in (new, more) if part)
    screen.say(f"{report.images} images in {report.seconds:.1f} s: {what}; {len(classifier.classes)} classes are known")
    if report.calibration_error is not None:
        error = 100 * report.calibration_error
        screen.say(f"probabilities are off by {error:.1f} % on average, on images held out")
    else:
        screen.say("too few images were held out to say how far probabilities are off")
    if report.retention:
        screen.say("old classes that may now be taken for new ones, by their stored statistics:")
        rows = [(risk.old, risk.new, f"{100 * risk.share:.0f} %") for risk in report.retention[:_MOST_RISKS]]
        screen.listing(("class", "taken for", "how often"), rows)
    elif classifier.task_count > 1 and report.classes:
        screen.say("no old class is at risk of being taken for a new one, by their stored statistics")
    screen.say(f"version {report.version} saved: {model}")


def run_forget(model: Path, name: str) -> None:
    """Forget a class."""
    with _unchanged(model), changing(model) as classifier:
        classifier.forget(name)
    screen = Screen()
    screen.say(f"forgot {name!r}; version {classifier.version} knows {len(classifier.classes)} classes")
    screen.say(
        f"versions before it still know the class until {classifier.keep_versions} newer ones have taken their place; "
        "prompts that adapted to it in the first lesson stay as they are"
    )


def run_rename(model: Path, old: str, new: str) -> None:
    """Rename a class."""
    with _unchanged(model), changing(model) as classifier:
        classifier.rename(old, new)
    Screen().say(f"{old!r} is now called {new!r}; version {classifier.version}")


def run_rollback(model: Path, to: int) -> None:
    """Go back to a version."""
    with _unchanged(model), changing(model) as classifier:
        classifier.rollback(to)
    Screen().say(f"version {classifier.version} is version {to} again: {len(classifier.classes)} classes")


@contextmanager
def _unchanged(model: Path) -> Iterator[None]:
    """Tell a user who interrupts a change that nothing came of it."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {model} is as it was") from None


def run_history(model: Path, as_json: bool) -> None:
    """A line for each version that is kept."""
    versions = ContinualClassifier.load(model, device="cpu").history()
    if as_json:
        for version in versions:
            sys.stdout.write(json.dumps(asdict(version)) + "\n")
        return
    rows = [
        (
            str(one.number) + (" *" if one is versions[-1] else ""),
            one.when[:16].replace("T", " "),
            one.what,
            shorten(one.classes, 4),
            str(one.images or ""),
            str(one.known),
            one.note,
        )
        for one in versions
    ]
    Screen().listing(("version", "when (UTC)", "what", "classes", "images", "known", "note"), rows, (2, 3, 6))


# Asking a model ----------------------------------------------------------------------------------------------------


def run_predict(
    model: Path,
    files: Sequence[Path],
    as_json: bool,
    as_csv: bool,
    top_k: int,
    batch: int | None,
    version: int | None,
    device: str | None,
) -> None:
    """Classify files and folders, a row for each as it comes; the bar and what went wrong go to the errors' stream."""
    if as_json and as_csv:
        raise UserError("--json and --csv exclude each other: name one")
    classifier = ContinualClassifier.load(model, version=version, device=device)
    screen, failed = Screen(stderr=True), 0
    total = sum(1 for _ in pictures(files))
    if not total:
        raise UserError(f"no image in {shorten(files)}: give images, or folders that hold some")
    rows: Rows = _JsonRows() if as_json else _CsvRows(top_k) if as_csv else _TextRows()
    try:
        with screen.stage("predicting", total):
            for answer in classifier.predict_each(files, top_k, batch):
                rows.write(answer)
                failed += answer.error is not None
                screen.advance(1)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough; nothing more can be written there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if failed == total:
        raise UserError(f"none of {total} file(s) could be read")
    if failed:
        screen.say(f"{failed} of {total} file(s) could not be read")


class _JsonRows:
    def write(self, answer: Prediction) -> None:
        top = [{"label": label, "probability": chance} for label, chance in answer.top]
        row = {**asdict(answer), "top": top}
        sys.stdout.write(json.dumps(row) + "\n")


class _CsvRows:
    def __init__(self, top_k: int) -> None:
        self._top_k, self._writer = top_k, csv.writer(sys.stdout, lineterminator="\n")
        more = [f"{name}_{place}" for place in range(2, top_k + 1) for name in ("label", "probability")]
        self._writer.writerow(["file", "label", "probability", *more, "unknown", "novelty", "error"])

    def write(self, answer: Prediction) -> None:
        cells: list[object] = [cell for label, chance in answer.top for cell in (label, f"{chance:.6f}")]
        cells += [""] * (2 * self._top_k - len(cells))
        unknown = "" if answer.error else str(answer.unknown).lower()
        novelty = "" if answer.error else f"{answer.novelty:.4f}"
        self._writer.writerow([_printable(answer.source), *cells, unknown, novelty, answer.error or ""])


class _TextRows:
    def write(self, answer: Prediction) -> None:
        if answer.error:
            said = f"not read: {answer.error}"
        else:
            said = ", ".join(f"{label} {100 * chance:.1f} %" for label, chance in answer.top)
            said += "  (perhaps none of these)" if answer.unknown else ""
        sys.stdout.write(f"{_printable(answer.source)}: {said}\n")


def _printable(name: str) -> str:
    """A file's name as text, whatever its bytes."""
    return name.encode("utf-8", "backslashreplace").decode()


def run_evaluate(
    model: Path, folder: Path, unknown: Path | None, as_json: bool, version: int | None, device: str | None
) -> None:
    """Measure a classifier on a folder of class folders."""
    classifier = ContinualClassifier.load(model, version=version, device=device)
    screen = Screen(stderr=as_json)
    found = classifier.evaluate(folder, unknown, progress=screen)
    if as_json:
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        return
    _show_evaluation(screen, found)


def _show_evaluation(screen: Screen, found: Evaluation) -> None:
    tasks = [
        (task.name, str(len(task.classes)), str(task.images), _percent(task.when_learned), _percent(task.accuracy))
        for task in found.per_task
    ]
    screen.title("\naccuracy in %")
    screen.figures(("task", "classes", "images", "when learned", "now"), tasks)
    screen.figures(("class", "now"), [(name, _percent(score)) for name, score in found.per_class.items()])
    screen.say(f"\noverall: {found.accuracy:.1f} % of {found.images} images")
    if found.forgetting is not None:
        screen.say(f"forgotten since it was learned: {found.forgetting:.1f} points, on average over earlier tasks")
    screen.say(f"probabilities are off by {100 * found.calibration_error:.1f} % on average")
    screen.say(f"marked as none of these: {found.flagged:.1f} % of these images")
    if found.auroc is not None and found.fpr_at_95 is not None and found.unknown_flagged is not None:
        screen.say(f"and {found.unknown_flagged:.1f} % of the {found.unknown_images} of no known class")
        screen.say(
            f"AUROC {found.auroc:.3f}; at a threshold that 95 % of these known images pass, "
            f"{100 * found.fpr_at_95:.1f} % of the others would pass, too"
        )
    for name, reason in found.unreadable:
        screen.say(f"not read: {_printable(name)}: {reason}")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
