"""The commands on a classifier: teach it, ask it, and change what it knows."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from probprompt.cli.console import Device, Screen
from probprompt.errors import Interrupted, UserError, shorten

if TYPE_CHECKING:
    from probprompt.classifier import ContinualClassifier, Evaluation, LearnReport, Prediction

_MOST_RISKS = 10  # shown after learning
Model = Annotated[Path, Argument(metavar="MODEL", help="The folder of a classifier.")]
ImageFolder = Annotated[Path, Argument(metavar="FOLDER", help="One folder of images per class.")]
Version = Annotated[int | None, Option(min=1, help="Another version than the current one.")]
AsJson = Annotated[bool, Option("--json", help="A JSON object per line.")]


class Known(StrEnum):
    """What happens to classes that are known already."""

    refuse = "refuse"
    refine = "refine"


# Changing a model --------------------------------------------------------------------------------------------------


def learn(
    model: Annotated[Path, Argument(metavar="MODEL", help="The folder of a classifier, new or there already.")],
    folder: ImageFolder,
    known: Annotated[
        Known, Option(help="Classes known already: refuse them, or learn their images as more of the same.")
    ] = Known.refuse,
    name: Annotated[str | None, Option(help="What this is called in the history.")] = None,
    method: Annotated[str | None, Option(help="Of a new one; see: probprompt list methods.")] = None,
    preset: Annotated[str | None, Option(help="Of a new one: flagship, ridge, matched or published.")] = None,
    backbone: Annotated[
        str | None, Option(help="Of a new one: demo, or any timm arch.tag.", show_default="a small ViT; on a GPU sup1k")
    ] = None,
    weights: Annotated[str | None, Option(help="Of a new one: a file of weights for that architecture.")] = None,
    epochs: Annotated[int | None, Option(min=1, help="Of a new one: epochs where anything is trained.")] = None,
    seed: Annotated[int | None, Option(min=0, help="Of a new one: initial parameters, batches.")] = None,
    assignments: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Of a new one: any setting.")
    ] = None,
    keep_versions: Annotated[
        int | None, Option(min=1, help="How many versions can be gone back to.", show_default="10")
    ] = None,
    device: Device = None,
) -> None:
    """Learn new classes from a folder of class folders; the images are not needed again."""
    from probprompt.classifier.store import Store
    from probprompt.config import apply_assignments, merge

    given = {"method": method, "preset": preset, "backbone": backbone, "epochs": epochs, "seed": seed}
    options = {option: value for option, value in given.items() if value is not None}
    create: dict[str, Any] | None = None
    if Store(model).exists:
        named = [f"--{option}" for option in options] + ["--weights"] * bool(weights) + ["--set"] * bool(assignments)
        if named:
            raise UserError(f"{model} goes on with the settings it began with: leave out {shorten(named)}")
    else:
        config = apply_assignments({"method": {"name": method}} if method is not None else {}, assignments or [])
        create = {**options, "config": merge(config, {"backbone": {"weights": weights}} if weights else {})}
    screen = Screen()
    with _changing(model, device, create) as classifier:
        if keep_versions is not None:
            classifier.keep_versions = keep_versions
        report = classifier.learn(folder, known=known.value, name=name, progress=screen)
    _show_lesson(screen, model, classifier, report)


def _show_lesson(screen: Screen, model: Path, classifier: "ContinualClassifier", report: "LearnReport") -> None:
    for warning in report.warnings:
        screen.print(warning)
    new = f"{len(report.classes)} new class(es)" if report.classes else ""
    more = f"more images of {shorten(report.refined)}" if report.refined else ""
    what = " and ".join(part for part in (new, more) if part)
    screen.print(
        f"{report.images} images in {report.seconds:.1f} s: {what}; {len(classifier.classes)} classes are known"
    )
    if report.calibration_error is not None:
        error = 100 * report.calibration_error
        screen.print(f"probabilities are off by {error:.1f} % on average, on images held out")
    else:
        screen.print("too few images were held out to say how far probabilities are off")
    if report.retention:
        screen.print("old classes that may now be taken for new ones, by their stored statistics:")
        rows = [(risk.old, risk.new, f"{100 * risk.share:.0f} %") for risk in report.retention[:_MOST_RISKS]]
        screen.listing(("class", "taken for", "how often"), rows)
    elif classifier.task_count > 1 and report.classes:
        screen.print("no old class is at risk of being taken for a new one, by their stored statistics")
    screen.print(f"version {report.version} saved: {model}")


def forget(model: Model, name: Annotated[str, Argument(metavar="CLASS", help="The class to forget.")]) -> None:
    """Forget a class, as if its images had never been learned."""
    with _changing(model) as classifier:
        classifier.forget(name)
    screen = Screen()
    screen.print(f"forgot {name!r}; version {classifier.version} knows {len(classifier.classes)} classes")
    screen.print(
        f"versions before it still know the class until {classifier.keep_versions} newer ones have taken their place; "
        "prompts that adapted to it in the first lesson stay as they are"
    )


def rename(
    model: Model,
    old: Annotated[str, Argument(metavar="CLASS", help="The class to rename.")],
    new: Annotated[str, Argument(metavar="NAME", help="Its new name.")],
) -> None:
    """Give a class another name."""
    with _changing(model) as classifier:
        classifier.rename(old, new)
    Screen().print(f"{old!r} is now called {new!r}; version {classifier.version}")


def rollback(
    model: Model, to: Annotated[int, Option("--to", metavar="N", min=1, help="The version to go back to.")]
) -> None:
    """Make an earlier version the current one again; no version is lost by it."""
    with _changing(model) as classifier:
        classifier.rollback(to)
    Screen().print(f"version {classifier.version} is version {to} again: {len(classifier.classes)} classes")


@contextmanager
def _changing(
    model: Path, device: str | None = None, create: dict[str, Any] | None = None
) -> "Iterator[ContinualClassifier]":
    """Change a classifier; tell a user who interrupts it that nothing came of it."""
    from probprompt.classifier import changing

    try:
        with changing(model, device, create) as classifier:
            yield classifier
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {model} is as it was") from None


def history(model: Model, as_json: AsJson = False) -> None:
    """List what was learned when, and the versions that can be gone back to."""
    from probprompt.classifier import ContinualClassifier

    versions = ContinualClassifier.load(model, device="cpu").history()
    if as_json:
        sys.stdout.writelines(json.dumps(asdict(version)) + "\n" for version in versions)
        return
    rows = []
    for one in versions:
        number, when = f"{one.number}{' *' * (one is versions[-1])}", one.when[:16].replace("T", " ")
        rows.append((number, when, one.what, shorten(one.classes, 4), str(one.images or ""), str(one.known), one.note))
    Screen().listing(("version", "when (UTC)", "what", "classes", "images", "known", "note"), rows, (2, 3, 6))


# Asking a model ----------------------------------------------------------------------------------------------------


def predict(
    model: Model,
    files: Annotated[list[Path], Argument(metavar="FILES...", help="Images, or folders with all below them.")],
    as_json: AsJson = False,
    as_csv: Annotated[bool, Option("--csv", help="Comma-separated, with a header.")] = False,
    top_k: Annotated[int, Option(min=1, help="How many classes are named.")] = 1,
    batch: Annotated[int | None, Option(min=1, help="Images looked at together.")] = None,
    version: Version = None,
    device: Device = None,
) -> None:
    """Classify images: a row for each, written as it comes; one that cannot be read is a row with its error."""
    from probprompt.classifier import ContinualClassifier
    from probprompt.data.inputs import pictures

    if as_json and as_csv:
        raise UserError("--json and --csv exclude each other: name one")
    classifier = ContinualClassifier.load(model, version=version, device=device)
    screen, failed = Screen(stderr=True), 0
    total = sum(1 for _ in pictures(files))
    if not total:
        raise UserError(f"no image in {shorten(files)}: give images, or folders that hold some")
    write = _write_json if as_json else _csv_writer(top_k) if as_csv else _write_text
    try:
        with screen.stage("predicting", total):
            for answer in classifier.predict_each(files, top_k, batch):
                write(answer)
                failed += answer.error is not None
                screen.advance(1)
        sys.stdout.flush()
    except BrokenPipeError:  # nothing more can be written there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if failed == total:
        raise UserError(f"none of {total} file(s) could be read")
    if failed:
        screen.print(f"{failed} of {total} file(s) could not be read")


def _write_text(answer: "Prediction") -> None:
    if answer.error:
        text = f"not read: {answer.error}"
    else:
        text = ", ".join(f"{label} {100 * chance:.1f} %" for label, chance in answer.top)
        text += "  (perhaps none of these)" if answer.unknown else ""
    sys.stdout.write(f"{_printable(answer.source)}: {text}\n")


def _write_json(answer: "Prediction") -> None:
    top = [{"label": label, "probability": chance} for label, chance in answer.top]
    sys.stdout.write(json.dumps({**asdict(answer), "top": top}) + "\n")


def _csv_writer(top_k: int) -> "Callable[[Prediction], None]":
    """Write the header, and return what writes a row."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    more = [f"{name}_{place}" for place in range(2, top_k + 1) for name in ("label", "probability")]
    writer.writerow(["file", "label", "probability", *more, "unknown", "novelty", "error"])

    def write(answer: "Prediction") -> None:
        cells = [cell for label, chance in answer.top for cell in (label, f"{chance:.6f}")]
        cells += [""] * (2 * top_k - len(cells))
        cells += ["", "", answer.error] if answer.error else [str(answer.unknown).lower(), f"{answer.novelty:.4f}", ""]
        writer.writerow([_printable(answer.source), *cells])

    return write


def _printable(name: str) -> str:
    """A file's name as text, whatever its bytes."""
    return name.encode("utf-8", "backslashreplace").decode()


def evaluate(
    model: Model,
    folder: ImageFolder,
    unknown: Annotated[
        Path | None, Option(metavar="DIR", help="Images of no known class: how well are they told apart?")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="All of it as one JSON object.")] = False,
    version: Version = None,
    device: Device = None,
) -> None:
    """Measure accuracy on images whose classes are known: per task, overall, and what was forgotten."""
    from probprompt.classifier import ContinualClassifier

    classifier = ContinualClassifier.load(model, version=version, device=device)
    screen = Screen(stderr=as_json)
    evaluation = classifier.evaluate(folder, unknown, progress=screen)
    if as_json:
        sys.stdout.write(json.dumps(asdict(evaluation)) + "\n")
    else:
        _show_evaluation(screen, evaluation)


def _show_evaluation(screen: Screen, found: "Evaluation") -> None:
    tasks = [
        (task.name, str(len(task.classes)), str(task.images), _percent(task.when_learned), _percent(task.accuracy))
        for task in found.per_task
    ]
    screen.title("\naccuracy in %")
    screen.figures(("task", "classes", "images", "when learned", "now"), tasks)
    screen.figures(("class", "now"), [(name, _percent(score)) for name, score in found.per_class.items()])
    screen.print(f"\noverall: {found.accuracy:.1f} % of {found.images} images")
    if found.forgetting is not None:
        screen.print(f"forgotten since it was learned: {found.forgetting:.1f} points, on average over earlier tasks")
    screen.print(f"probabilities are off by {100 * found.calibration_error:.1f} % on average")
    screen.print(f"marked as none of these: {found.flagged:.1f} % of these images")
    if found.auroc is not None and found.fpr_at_95 is not None and found.unknown_flagged is not None:
        screen.print(f"and {found.unknown_flagged:.1f} % of the {found.unknown_images} of no known class")
        screen.print(
            f"AUROC {found.auroc:.3f}; at a threshold that 95 % of these known images pass, "
            f"{100 * found.fpr_at_95:.1f} % of the others would pass, too"
        )
    for name, reason in found.unreadable:
        screen.print(f"not read: {_printable(name)}: {reason}")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
