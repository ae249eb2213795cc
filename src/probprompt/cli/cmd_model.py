"""Commands that teach, query and change a model."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probprompt.cli.console import BACKBONE, METHOD, PRESET, SET, WEIGHTS, Device, Screen, argument, option
from probprompt.errors import Interrupted, UserError, shorten

if TYPE_CHECKING:
    from probprompt.classifier import ContinualClassifier, Evaluation, LearnReport, Prediction

_MOST_RISKS = 10  # shown after learning
Model = Annotated[Path, argument("Model folder.", "MODEL")]
ImageFolder = Annotated[Path, argument("Folder with one folder of images per class.", "FOLDER")]
Version = Annotated[int | None, option("Model version to use.", "N", default="latest", min=1)]
CREATION = "When creating a model"  # a panel
app = typer.Typer(no_args_is_help=True, help="Show versions, forget or rename classes, roll back, push, pull.")


class Existing(StrEnum):
    """What to do with images of classes that the model already has."""

    error = "error"
    extend = "extend"


class Format(StrEnum):
    """Output format of predictions."""

    text = "text"
    json = "json"
    csv = "csv"


# Changing a model


def learn(
    model: Annotated[Path, argument("Model folder; created if it does not exist.", "MODEL")],
    folder: ImageFolder,
    existing: Annotated[
        Existing, option("If a class already exists: stop with an error, or add the images to it.")
    ] = Existing.error,
    note: Annotated[str | None, option("Note for the history.", "TEXT", default="name of the folder")] = None,
    keep_versions: Annotated[int | None, option("Number of versions to keep.", "N", default="10", min=1)] = None,
    device: Device = None,
    method: Annotated[str | None, option(**METHOD, panel=CREATION)] = None,
    preset: Annotated[str | None, option(**PRESET, panel=CREATION)] = None,
    backbone: Annotated[str | None, option(**BACKBONE, default="small ViT; sup1k on a GPU", panel=CREATION)] = None,
    weights: Annotated[str | None, option(**WEIGHTS, panel=CREATION)] = None,
    epochs: Annotated[int | None, option("Number of training epochs.", "N", min=1, panel=CREATION)] = None,
    seed: Annotated[int | None, option("Seed of initial parameters and batches.", "N", min=0, panel=CREATION)] = None,
    assignments: Annotated[list[str] | None, option(*SET, panel=CREATION)] = None,
) -> None:
    """Teach a model new classes from a folder of class folders.

    The images are not needed again.

    Example: probprompt learn my-model photos/
    """
    from probprompt.classifier.store import Store
    from probprompt.config import apply_assignments, merge

    given = {"method": method, "preset": preset, "backbone": backbone, "epochs": epochs, "seed": seed}
    options = {option: value for option, value in given.items() if value is not None}
    create: dict[str, Any] | None = None
    if Store(model).exists:
        names = [f"--{option}" for option in options] + ["--weights"] * bool(weights) + ["--set"] * bool(assignments)
        if names:
            raise UserError(f"{model} already exists and keeps its settings. Remove {shorten(names)}.")
    else:
        config = apply_assignments({"method": {"name": method}} if method is not None else {}, assignments or [])
        create = {**options, "config": merge(config, {"backbone": {"weights": weights}} if weights else {})}
    screen = Screen()
    with _changing(model, device, create) as classifier:
        if keep_versions is not None:
            classifier.keep_versions = keep_versions
        report = classifier.learn(folder, existing=existing.value, note=note, progress=screen)
    _show_report(screen, model, classifier, report)


def _show_report(screen: Screen, model: Path, classifier: "ContinualClassifier", report: "LearnReport") -> None:
    for warning in report.warnings:
        screen.print(warning)
    new = f"{len(report.classes)} new class(es)" if report.classes else ""
    more = f"more images of {shorten(report.refined)}" if report.refined else ""
    what = " and ".join(part for part in (new, more) if part)
    screen.print(f"Learned {what} from {report.images} images in {report.seconds:.1f} s.")
    if report.calibration_error is not None:
        screen.print(f"Calibration error: {100 * report.calibration_error:.1f}% on held-out images.")
    else:
        screen.print("Calibration error: unknown, too few held-out images.")
    if report.confusion_risks:
        screen.print("Possible confusions, estimated from stored statistics:")
        rows = [(risk.old, risk.new, f"{100 * risk.share:.0f}%") for risk in report.confusion_risks[:_MOST_RISKS]]
        screen.listing(("class", "classified as", "images"), rows)
    elif classifier.task_count > 1 and report.classes:
        screen.print("No confusions of old with new classes expected, estimated from stored statistics.")
    screen.print(f"Saved {model}, version {report.version}, with {len(classifier.classes)} classes.")


@contextmanager
def _changing(
    model: Path, device: str | None = None, create: dict[str, Any] | None = None
) -> "Iterator[ContinualClassifier]":
    """Change a classifier; if the user interrupts, report that nothing changed."""
    from probprompt.classifier import changing

    try:
        with changing(model, device, create) as classifier:
            yield classifier
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted. {model} is unchanged.") from None


@app.command()
def history(
    model: Model, as_json: Annotated[bool, option("Print one JSON object per version.", None, "--json")] = False
) -> None:
    """List versions.

    Shows what was learned or changed when; * is the current version.

    Example: probprompt model history my-model
    """
    from probprompt.classifier import ContinualClassifier

    versions = ContinualClassifier.load(model, device="cpu").history()
    if as_json:
        sys.stdout.writelines(json.dumps(asdict(version)) + "\n" for version in versions)
        return
    rows = []
    for one in versions:
        number, when = f"{one.number}{' *' * (one is versions[-1])}", one.when[:16].replace("T", " ")
        rows.append((number, when, one.what, shorten(one.classes, 4), str(one.images or ""), str(one.known), one.note))
    Screen().listing(("version", "time (UTC)", "change", "classes", "images", "total", "note"), rows, (2, 3, 6))


@app.command()
def forget(model: Model, name: Annotated[str, argument("Class to remove.", "CLASS")]) -> None:
    """Remove a class.

    The head becomes as if the class was never learned.

    Example: probprompt model forget my-model cat
    """
    with _changing(model) as classifier:
        classifier.forget(name)
    screen = Screen()
    screen.print(
        f"Removed {name}. Saved {model}, version {classifier.version}, with {len(classifier.classes)} classes."
    )
    screen.print(
        f"Earlier versions keep the class until {classifier.keep_versions} newer ones replace them. Prompts trained on "
        "it in the first lesson do not change."
    )


@app.command()
def rename(
    model: Model,
    old: Annotated[str, argument("Class to rename.", "CLASS")],
    new: Annotated[str, argument("New name.", "NAME")],
) -> None:
    """Rename a class.

    Example: probprompt model rename my-model cat kitten
    """
    with _changing(model) as classifier:
        classifier.rename(old, new)
    Screen().print(f"Renamed {old} to {new}. Saved {model}, version {classifier.version}.")


@app.command()
def rollback(model: Model, version: Annotated[int, argument("Version to restore.", "VERSION", min=1)]) -> None:
    """Restore an earlier version.

    It becomes a new version, so none is lost.

    Example: probprompt model rollback my-model 2
    """
    with _changing(model) as classifier:
        classifier.rollback(version)
    classes = len(classifier.classes)
    Screen().print(f"Restored version {version}. Saved {model}, version {classifier.version}, with {classes} classes.")


# Querying a model


def predict(
    model: Model,
    files: Annotated[list[Path], argument("Images, or folders to search for images.", "FILES...")],
    output: Annotated[Format, option("Output format.", None, "--format")] = Format.text,
    top_k: Annotated[int, option("Number of classes to print.", "K", min=1)] = 1,
    batch_size: Annotated[int | None, option("Images per batch.", "N", min=1)] = None,
    version: Version = None,
    device: Device = None,
) -> None:
    """Classify images and print one row per file.

    The row of an unreadable file contains the error.

    Example: probprompt predict my-model photos/ --format csv
    """
    from probprompt.classifier import ContinualClassifier
    from probprompt.data.inputs import input_images

    classifier = ContinualClassifier.load(model, version=version, device=device)
    screen, failed = Screen(stderr=True), 0
    total = sum(1 for _ in input_images(files))
    if not total:
        raise UserError(f"No images in {shorten(files)}. Pass image files, or folders that contain some.")
    write = {Format.text: _write_text, Format.json: _write_json}.get(output) or _csv_writer(top_k)
    try:
        with screen.stage("predicting", total):
            for answer in classifier.predict_each(files, top_k, batch_size):
                write(answer)
                failed += answer.error is not None
                screen.advance(1)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if failed == total:
        raise UserError(f"None of {total} file(s) could be read. The rows above contain the reasons.")
    if failed:
        screen.print(f"{failed} of {total} file(s) could not be read.")


def _write_text(answer: "Prediction") -> None:
    if answer.error:
        text = f"unreadable: {answer.error}"
    else:
        text = ", ".join(f"{label} {100 * probability:.1f}%" for label, probability in answer.top)
        text += "  (possibly unknown)" if answer.unknown else ""
    sys.stdout.write(f"{_printable(answer.source)}: {text}\n")


def _write_json(answer: "Prediction") -> None:
    top = [{"label": label, "probability": probability} for label, probability in answer.top]
    sys.stdout.write(json.dumps({**asdict(answer), "top": top}) + "\n")


def _csv_writer(top_k: int) -> "Callable[[Prediction], None]":
    """Write the header, and return a function that writes a row."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    more = [f"{name}_{rank}" for rank in range(2, top_k + 1) for name in ("label", "probability")]
    writer.writerow(["file", "label", "probability", *more, "unknown", "novelty", "error"])

    def write(answer: "Prediction") -> None:
        cells = [cell for label, probability in answer.top for cell in (label, f"{probability:.6f}")]
        cells += [""] * (2 * top_k - len(cells))
        cells += ["", "", answer.error] if answer.error else [str(answer.unknown).lower(), f"{answer.novelty:.4f}", ""]
        writer.writerow([_printable(answer.source), *cells])

    return write


def _printable(name: str) -> str:
    """Return a file name as text, even if its bytes are not."""
    return name.encode("utf-8", "backslashreplace").decode()


def evaluate(
    model: Model,
    folder: ImageFolder,
    unknown: Annotated[Path | None, option("Folder of unknown images; reports AUROC.", "FOLDER")] = None,
    as_json: Annotated[bool, option("Print one JSON object.", None, "--json")] = False,
    version: Version = None,
    device: Device = None,
) -> None:
    """Measure accuracy, calibration and forgetting on labeled images.

    Example: probprompt evaluate my-model test-photos/
    """
    from probprompt.classifier import ContinualClassifier

    classifier = ContinualClassifier.load(model, version=version, device=device)
    screen = Screen(stderr=as_json)
    evaluation = classifier.evaluate(folder, unknown, progress=screen)
    if as_json:
        sys.stdout.write(json.dumps(asdict(evaluation)) + "\n")
    else:
        _show_evaluation(screen, evaluation)


def _show_evaluation(screen: Screen, result: "Evaluation") -> None:
    tasks = [
        (task.name, str(len(task.classes)), str(task.images), _percent(task.when_learned), _percent(task.accuracy))
        for task in result.per_task
    ]
    screen.title("\nAccuracy in %")
    screen.figures(("task", "classes", "images", "when learned", "now"), tasks)
    screen.figures(("class", "now"), [(name, _percent(score)) for name, score in result.per_class.items()])
    screen.print(f"\nOverall accuracy: {result.accuracy:.1f}% of {result.images} images.")
    if result.forgetting is not None:
        screen.print(f"Forgetting: {result.forgetting:.1f} points on average over earlier tasks.")
    screen.print(f"Calibration error: {100 * result.calibration_error:.1f}%.")
    screen.print(f"Flagged as unknown: {result.flagged:.1f}% of these images.")
    if result.auroc is not None and result.fpr_at_95 is not None and result.unknown_flagged is not None:
        screen.print(f"Unknown images: {result.unknown_flagged:.1f}% of {result.unknown_images} flagged.")
        screen.print(
            f"AUROC {result.auroc:.3f}. A threshold that accepts 95% of the known images also accepts "
            f"{100 * result.fpr_at_95:.1f}% of the unknown ones."
        )
    for name, reason in result.unreadable:
        screen.print(f"Skipped {_printable(name)} (unreadable: {reason}).")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
