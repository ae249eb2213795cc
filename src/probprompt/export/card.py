"""A model card, ``README.md`` on the hub, made from what the model's own record says."""

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

MARK = (
    "<!-- Made by `probprompt push`, which writes it anew each time. Remove this line to keep a text of your own. -->"
)
"""A card with this line may be replaced."""
SHOWN = 200
"""Classes that are listed by name."""
_SPECIAL = "\\`*_{}[]<>#|~&!$"  # what Markdown, HTML or a table would take for something else


@dataclass(frozen=True)
class Story:
    """What a card tells, whatever kind of model it is about."""

    method: str
    head: str
    classes: Sequence[str]
    view: View
    backbone: str
    weights: str | None
    sha256: str
    history: Sequence[tuple[str, ...]]
    """Version or task, date, what happened, classes, images."""
    marks: Sequence[str]
    loading: str
    """Lines of Python that load and use it."""
    quality: Sequence[str] = ()
    """What is known of its probabilities, and of what it marks as unknown."""
    scores: Mapping[str, float] = field(default_factory=dict)
    benchmark: str | None = None
    tested: bool = False
    """Whether the scores are those of test images, not of held-out training images."""


def make_card(record: Record, repository: str, statistics: bool) -> str:
    """Write the card of a model that goes to this repository."""
    story = _of_run(record) if record.head is None else _of_classifier(record)
    history = _table(("step", "date", "what", "classes", "images"), story.history)
    parts = [
        "---\n" + _front(story, repository) + "---",
        MARK,
        f"# {_plain(repository.partition('/')[2])}",
        _summary(story, statistics),
        "## Use\n\n```\npip install probprompt\n" + f"probprompt pull {repository} model/\n```\n\n"
        f"```python\n{story.loading}```",
        "## Classes\n\n" + _classes(story.classes),
        f"## What was learned when\n\n{history}" if story.history else "",
        _quality(story),
        "## Backbone\n\n" + _backbone(story),
        f"Made with probprompt {__version__}. Files are safetensors and JSON; loading them executes no code.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _of_run(record: Record) -> Story:
    note, run = record.note, _run_of(record.folder)
    scores = {name: value for name, value in run.metrics.items() if value == value} if run else {}
    keys = ", keys=pixel_keys" if note["method"].get("evaluation") == "image" else ""
    return Story(
        method=note["method"]["name"],
        head=from_stored(note["head"], "head")["kind"] or "the method's own",
        classes=note["classes"],
        view=View.of(note["preprocessing"]),
        backbone=note["backbone"]["name"],
        weights=note["backbone"]["weights"],
        sha256=note["backbone"]["sha256"],
        history=_tasks(note["task_sizes"], note["classes"]),
        scores=scores,
        benchmark=benchmark_label(run.config.data.benchmark) if run else None,
        tested=bool(run and run.record.evaluated_on == "test"),
        marks=note["marks"],
        loading="import probprompt\n\n"
        'loaded = probprompt.load_model("model/")\n'
        f"logits = loaded.model.predict(images{keys})  # (B, 3, side, side), prepared as loaded.note says\n"
        "names = [loaded.class_names[label] for label in logits.argmax(dim=1).tolist()]\n",
    )


def _run_of(home: Path) -> Run | None:
    """The run that a model lies in, if it is finished."""
    folder = home.parent
    try:
        run = Run.open(folder)
    except UserError:
        return None
    return run if run.model == home and run.finished else None


def _tasks(sizes: Sequence[int], classes: Sequence[str]) -> list[tuple[str, ...]]:
    """The tasks of a run: what was learned after what."""
    rest = iter(classes)
    learned = [shorten(islice(rest, size), 20) for size in sizes]
    return [(str(number), "", "learned", names, "") for number, names in enumerate(learned, start=1)]


def _of_classifier(record: Record) -> Story:
    settings, state = record.note["settings"], record.note["state"]
    config, calibration = settings["config"], state["calibration"]
    quality = f"Temperature {calibration['temperature']:.3g}; too few images were held out to measure its error."
    if calibration["error"] is not None:
        quality = (
            f"Temperature {calibration['temperature']:.3g}, fitted on {calibration['images']} held-out training "
            f"images; expected calibration error there {100 * calibration['error']:.1f} %."
        )
    unknown = "`unknown` marks images farther from all classes than 95 % of held-out training images are."
    return Story(
        method=config["method"]["name"],
        head=from_stored({"kind": settings["head"]}, "head")["kind"],
        classes=[known["name"] for known in state["classes"]],
        view=View.of(settings["preprocessing"]),
        backbone=settings["backbone"]["name"],
        weights=config["backbone"]["weights"],
        sha256=settings["backbone"]["sha256"],
        history=_versions(record),
        quality=(quality,) if state["scale"]["limit"] is None else (quality, unknown),
        marks=parse_method(from_stored(config["method"], "method")).marks(),
        loading="from probprompt import ContinualClassifier\n\n"
        'classifier = ContinualClassifier.load("model/")\n'
        'for answer in classifier.predict(["a.jpg", "b.jpg"], top_k=3):\n'
        "    print(answer.source, answer.label, answer.probability, answer.unknown)\n",
    )


def _versions(record: Record) -> list[tuple[str, ...]]:
    """What happened to a classifier, by the versions that are kept."""
    assert record.head is not None
    rows = []
    for path in sorted((record.folder / "versions").glob("*.json"), key=natural_order):
        if path.stem.isdigit() and int(path.stem) <= record.head["version"]:
            found = read_json(path)["version"]
            names = shorten(found["classes"], 20)
            row = (found["number"], found["when"][:10], found["what"], names, found["images"] or "")
            rows.append(tuple(map(str, row)))
    return rows


def _front(story: Story, repository: str) -> str:
    """YAML that the hub reads; every value is written as JSON, which is YAML."""
    values: list[tuple[str, object]] = [
        ("library_name", "probprompt"),
        ("pipeline_tag", "image-classification"),
        ("tags", ["continual-learning", "class-incremental-learning", "prompt-tuning", story.method]),
    ]
    source, _ = _origin(story)
    if source:
        values += [("base_model", source), ("base_model_relation", "adapter")]
    if story.tested and story.benchmark and "FAA" in story.scores:
        metric = {"type": "accuracy", "name": "final average accuracy", "value": round(story.scores["FAA"], 2)}
        data = {"type": story.benchmark, "name": story.benchmark}
        result = {"task": {"type": "image-classification"}, "dataset": data, "metrics": [metric]}
        index = [{"name": repository.partition("/")[2], "results": [result]}]
        values += [("metrics", ["accuracy"]), ("model-index", index)]
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in values)


def _origin(story: Story) -> tuple[str, str]:
    """Where the backbone's weights come from, and their licence; a file of one's own has neither."""
    if story.weights is not None:
        return "", "unknown: the weights were given as a file"
    try:
        return pretrained.origin(story.backbone)
    except UserError:  # a name that this version of timm does not know
        return "", "unknown"


def _summary(story: Story, statistics: bool) -> str:
    count = len(story.classes)
    lines = [
        f"An image classifier of {count} class{'es' if count != 1 else ''} that was taught task by task, without "
        f"keeping old images: a vision transformer, the method `{story.method}` and the head `{story.head}`.",
        "It can learn further classes: what that needs is included."
        if statistics
        else "It predicts; what further learning needs was not published with it.",
    ]
    lines += [f"**Not to be compared:** {_plain(mark)}" for mark in story.marks]
    return "\n\n".join(lines)


def _classes(names: Sequence[str]) -> str:
    more = f"\n\nand {len(names) - SHOWN} more." if len(names) > SHOWN else ""
    return ", ".join(map(_plain, names[:SHOWN])) + more


def _quality(story: Story) -> str:
    """What is known of how good it is; nothing is claimed that was not measured."""
    lines = list(story.quality)
    if story.scores:
        names = {"FAA": "final average accuracy", "CAA": "cumulative average accuracy", "forgetting": "forgetting"}
        rows = [(names.get(name, name), f"{value:.2f}") for name, value in story.scores.items()]
        where = "test images" if story.tested else "held-out training images, on which settings may have been chosen,"
        lines += [f"Measured on {where} of {_plain(story.benchmark or 'its data')}, in %:", _table(("", ""), rows)]
    else:
        lines.append("No accuracy on test images is recorded: measure it with `probprompt evaluate model/ FOLDER`.")
    return "## How good it is\n\n" + "\n\n".join(lines)


def _backbone(story: Story) -> str:
    source, licence = _origin(story)
    view, weights = story.view, story.weights
    rows = [
        ("name", f"`{story.backbone}`"),
        *([("weights", f"the file {_plain(Path(weights).name)}")] if weights not in (None, "random") else ()),
        *([("source", f"[{source}](https://huggingface.co/{source})")] if source else ()),
        ("SHA-256", f"`{story.sha256}`"),
        ("licence of the weights", _plain(licence)),
        (
            "input",
            f"{view.image_size} x {view.image_size}, short side resized to {view.resized} ({view.interpolation})",
        ),
    ]
    told = "The backbone is not part of this repository: it is loaded by its name, and refused if its hash is another."
    if weights not in (None, "random"):
        told += " Its weights were a local file: whoever pulls the model names that file with `--weights FILE`."
    return told + "\n\n" + markdown_table(("", ""), rows, 2)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown_table(header, [[_plain(cell) for cell in row] for row in rows], len(header))


def _plain(text: str) -> str:
    """Text that means nothing to Markdown, on one line.

    >>> _plain("a|b <i>")
    'a\\\\|b \\\\<i\\\\>'
    """
    line = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in _SPECIAL else letter for letter in line)
