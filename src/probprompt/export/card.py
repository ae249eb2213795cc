"""The model card (``README.md`` on the Hub), written from the model's record."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from probprompt import __version__
from probprompt.backbones import pretrained
from probprompt.config import from_stored
from probprompt.data.datasets import benchmark_label
from probprompt.errors import UserError, shorten
from probprompt.export.bundle import Record
from probprompt.export.onnx import View
from probprompt.methods import parse_config as parse_method
from probprompt.report.tables import markdown_table
from probprompt.runs.run import Run
from probprompt.storage import natural_order, read_json

MARKER = "<!-- Made by `probprompt "  # A card with this text may be replaced
_NOTICE = MARKER + "model push`, which replaces it. Remove this line to keep your own text. -->"
LISTED = 200  # largest number of classes listed by name
_SPECIAL = "\\`*_{}[]<>#|~&!$"  # characters with a meaning in Markdown or HTML


@dataclass(frozen=True)
class CardContent:
    """The content of a card for any kind of model."""

    method: str
    head: str
    classes: Sequence[str]
    view: View
    backbone: str
    weights: str | None
    sha256: str
    history: Sequence[tuple[str, ...]]  # version or task, date, event, classes, images
    warnings: Sequence[str]
    loading: str  # Python that loads and uses the model
    quality: Sequence[str] = ()  # on probabilities and unknown images
    scores: Mapping[str, float] = field(default_factory=dict)
    benchmark: str | None = None
    tested: bool = False  # whether scores are from test images, not from held-out training images


def make_card(record: Record, repository: str, statistics: bool) -> str:
    """Return the card of a model for a repository."""
    content = _of_run(record) if record.head is None else _of_classifier(record)
    history = _table(("step", "date", "event", "classes", "images"), content.history)
    parts = [
        "---\n" + _front(content, repository) + "---",
        _NOTICE,
        f"# {_plain(repository.partition('/')[2])}",
        _summary(content, statistics),
        "## Use\n\n```\npip install probprompt\n" + f"probprompt model pull {repository} model/\n```\n\n"
        f"```python\n{content.loading}```",
        "## Classes\n\n" + _classes(content.classes),
        f"## History\n\n{history}" if content.history else "",
        _quality(content),
        "## Backbone\n\n" + _backbone(content),
        f"Made with probprompt {__version__}. Files are safetensors and JSON; loading them executes no code.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _of_run(record: Record) -> CardContent:
    note, run = record.note, _run_of(record.folder)
    scores = {name: value for name, value in run.metrics.items() if value == value} if run else {}
    keys = ", keys=pixel_keys" if note["method"].get("evaluation") == "image" else ""
    return CardContent(
        method=note["method"]["name"],
        head=from_stored(note["head"], "head")["kind"] or "default of the method",
        classes=note["classes"],
        view=View.of(note["preprocessing"]),
        backbone=note["backbone"]["name"],
        weights=note["backbone"]["weights"],
        sha256=note["backbone"]["sha256"],
        history=_tasks(note["task_sizes"], note["classes"]),
        scores=scores,
        benchmark=benchmark_label(run.config.data.benchmark) if run else None,
        tested=bool(run and run.record.evaluated_on == "test"),
        warnings=note["marks"],
        loading="import probprompt\n\n"
        'loaded = probprompt.load_model("model/")\n'
        f"logits = loaded.model.predict(images{keys})  # (B, 3, size, size), preprocessed as in loaded.note\n"
        "names = [loaded.class_names[label] for label in logits.argmax(dim=1).tolist()]\n",
    )


def _run_of(home: Path) -> Run | None:
    try:
        run = Run.open(home.parent)
    except UserError:
        return None
    return run if run.model == home and run.finished else None


def _tasks(sizes: Sequence[int], classes: Sequence[str]) -> list[tuple[str, ...]]:
    rest = iter(classes)
    learned = [shorten(islice(rest, size), 20) for size in sizes]
    return [(str(number), "", "learned", names, "") for number, names in enumerate(learned, start=1)]


def _of_classifier(record: Record) -> CardContent:
    settings, state = record.note["settings"], record.note["state"]
    config, calibration = settings["config"], state["calibration"]
    quality = f"Temperature {calibration['temperature']:.3g}; too few held-out images to measure the calibration error."
    if calibration["error"] is not None:
        quality = (
            f"Temperature {calibration['temperature']:.3g}, fitted on {calibration['images']} held-out training "
            f"images; expected calibration error on them {100 * calibration['error']:.1f}%."
        )
    unknown = "`unknown` flags images farther from all classes than 95% of held-out training images."
    return CardContent(
        method=config["method"]["name"],
        head=from_stored({"kind": settings["head"]}, "head")["kind"],
        classes=[known["name"] for known in state["classes"]],
        view=View.of(settings["preprocessing"]),
        backbone=settings["backbone"]["name"],
        weights=config["backbone"]["weights"],
        sha256=settings["backbone"]["sha256"],
        history=_versions(record),
        quality=(quality,) if state["scale"]["limit"] is None else (quality, unknown),
        warnings=parse_method(from_stored(config["method"], "method")).marks(),
        loading="from probprompt import ContinualClassifier\n\n"
        'classifier = ContinualClassifier.load("model/")\n'
        'for answer in classifier.predict(["a.jpg", "b.jpg"], top_k=3):\n'
        "    print(answer.source, answer.label, answer.probability, answer.unknown)\n",
    )


def _versions(record: Record) -> list[tuple[str, ...]]:
    assert record.head is not None
    rows = []
    for path in sorted((record.folder / "versions").glob("*.json"), key=natural_order):
        if path.stem.isdigit() and int(path.stem) <= record.head["version"]:
            version = read_json(path)["version"]
            names = shorten(version["classes"], 20)
            row = (version["number"], version["when"][:10], version["what"], names, version["images"] or "")
            rows.append(tuple(map(str, row)))
    return rows


def _front(content: CardContent, repository: str) -> str:
    """Return YAML for the Hub; values are JSON, which is valid YAML."""
    values: list[tuple[str, object]] = [
        ("library_name", "probprompt"),
        ("pipeline_tag", "image-classification"),
        ("tags", ["continual-learning", "class-incremental-learning", "prompt-tuning", content.method]),
    ]
    source, _ = _origin(content)
    if source:
        values += [("base_model", source), ("base_model_relation", "adapter")]
    if content.tested and content.benchmark and "FAA" in content.scores:
        metric = {"type": "accuracy", "name": "final average accuracy", "value": round(content.scores["FAA"], 2)}
        data = {"type": content.benchmark, "name": content.benchmark}
        result = {"task": {"type": "image-classification"}, "dataset": data, "metrics": [metric]}
        index = [{"name": repository.partition("/")[2], "results": [result]}]
        values += [("metrics", ["accuracy"]), ("model-index", index)]
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in values)


def _origin(content: CardContent) -> tuple[str, str]:
    """Return the repository and license of the backbone's weights."""
    if content.weights is not None:
        return "", "unknown (local weights file)"
    try:
        return pretrained.origin(content.backbone)
    except UserError:  # unknown to this version of timm
        return "", "unknown"


def _summary(content: CardContent, statistics: bool) -> str:
    count = len(content.classes)
    lines = [
        f"An image classifier of {count} class{'es' if count != 1 else ''}, trained task by task without keeping old "
        f"images: a vision transformer, the method `{content.method}` and the head `{content.head}`.",
        "It can learn more classes: the necessary statistics are included."
        if statistics
        else "It can only predict: the statistics needed to learn more classes are not included.",
    ]
    lines += [f"**Not comparable:** {_plain(warning)}" for warning in content.warnings]
    return "\n\n".join(lines)


def _classes(names: Sequence[str]) -> str:
    more = f"\n\nand {len(names) - LISTED} more." if len(names) > LISTED else ""
    return ", ".join(map(_plain, names[:LISTED])) + more


def _quality(content: CardContent) -> str:
    lines = list(content.quality)
    if content.scores:
        names = {"FAA": "final average accuracy", "CAA": "cumulative average accuracy"}
        rows = [(names.get(name, name), f"{value:.2f}") for name, value in content.scores.items()]
        images = "test images" if content.tested else "held-out training images (also used to choose settings)"
        lines += [f"Measured on {images} of {_plain(content.benchmark or 'its data')}, in %:", _table(("", ""), rows)]
    else:
        lines.append("No test accuracy is recorded. Measure it with `probprompt evaluate model/ FOLDER`.")
    return "## Accuracy\n\n" + "\n\n".join(lines)


def _backbone(content: CardContent) -> str:
    source, license_name = _origin(content)
    view, weights = content.view, content.weights
    size = f"{view.image_size}x{view.image_size}, short side resized to {view.resized} ({view.interpolation})"
    rows = [
        ("name", f"`{content.backbone}`"),
        *([("weights", f"the file {_plain(Path(weights).name)}")] if weights not in (None, "random") else ()),
        *([("source", f"[{source}](https://huggingface.co/{source})")] if source else ()),
        ("SHA-256", f"`{content.sha256}`"),
        ("license of the weights", _plain(license_name)),
        ("input", size),
    ]
    text = "The backbone is not part of this repository. It is loaded by name, and its hash is checked."
    if weights not in (None, "random"):
        text += " Its weights were a local file: pass it with `--weights FILE` when you pull the model."
    return text + "\n\n" + markdown_table(("", ""), rows, 2)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown_table(header, [[_plain(cell) for cell in row] for row in rows], len(header))


def _plain(text: str) -> str:
    """Escape text for Markdown, on one line.

    >>> _plain("a|b <i>")
    'a\\\\|b \\\\<i\\\\>'
    """
    line = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in _SPECIAL else letter for letter in line)
