"""The files of the book: ``<benchmark>/<backbone>/<method>-<preset>-s<seed>.json``, one per finished run.

A file says all that its run recorded, without any path of the machine that it ran on: a folder of images or a file of
weights is named by its name and its hash. What a run has set otherwise than its preset stands in the name, too. Its
last entry is a hash of all the others: a number that somebody changed is refused.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probprompt import presets
from probprompt.config import RunConfig, flatten, parse_config
from probprompt.data import datasets
from probprompt.errors import UserError, shorten
from probprompt.evaluation import metrics
from probprompt.report.page import write
from probprompt.runs.book import Recorded, completed, is_absolute, without_paths
from probprompt.runs.files import content_hash, natural_order, read_json, sealed
from probprompt.runs.grid import CUSTOM, describe
from probprompt.runs.naming import backbone_slug, backbone_words
from probprompt.runs.record import Run, settings_hash

FORMAT = 2
CLASSES = 50  # shown at most in the picture of a similarity: files stay small
_DIGITS = 12  # of a hash beside a name
_ROUNDING = 1e-6
_TASKS = 10  # of a folder of images where nobody says
_LONGEST = 80  # characters that settings may take in the name of a file
_FILE = re.compile(r".+-s\d+(?:\.\d+\.\d+)?\.json")
_LEFT_OUT = ("format", "name", "status")  # say nothing about a finished run in a book
_ELSEWHERE = {"preset", "data.benchmark", "data.test", "data.tasks", "method.name"} | {
    *("backbone.name", "backbone.weights", "backbone.image_size"),
    *("evaluation_batch", "data.root", "data.skip_unreadable"),
}
"""Settings that are told apart by other means than as departures from a preset, or that change rounding alone."""
_VIEW = ("backbone.precision", "data.stored_side")
"""Settings that go with a machine: whoever has a smaller one needs them."""

Settings = Mapping[str, Any]


# What a file says


@dataclass(frozen=True, eq=False)
class Entry:
    """A run of the book."""

    path: str
    """Within the book."""
    content: Mapping[str, Any]

    @cached_property
    def recorded(self) -> Recorded:
        """As the tables of a comparison take it."""
        return Recorded(self.path, self.content, metrics.from_json(self.content["matrix"]), self.content["similarity"])

    @property
    def matrix(self) -> NDArray[np.float64]:
        """Accuracy in % on task i (row) after step j (column)."""
        return self.recorded.matrix

    @property
    def config(self) -> Settings:
        """All settings."""
        return dict(self.content["config"])

    @property
    def method(self) -> str:
        """Its name."""
        return str(self.config["method"]["name"])

    @property
    def preset(self) -> str:
        """The preset that its settings were laid over, or ``custom``."""
        return str(self.config.get("preset") or CUSTOM)

    @property
    def benchmark(self) -> str:
        """Its name; of a folder, without its hash."""
        return str(self.config["data"]["benchmark"]).partition("@")[0]

    @property
    def tasks(self) -> int:
        """How many tasks were evaluated."""
        return count_tasks(self.content)

    @property
    def seed(self) -> int:
        """Of the order of classes."""
        return int(self.config["seeds"]["order"])

    @property
    def backbone(self) -> str:
        """In words."""
        return backbone_words(self.config["backbone"])

    @property
    def held_out(self) -> bool:
        """Whether it was evaluated on held-out training images."""
        return bool(self.content.get("evaluated_on", "test") != "test")

    @cached_property
    def departures(self) -> dict[str, Any]:
        """What it has set otherwise than its preset, by dotted names."""
        return departures(self.content)

    @property
    def varied(self) -> dict[str, Any]:
        """The same without what goes with the machine: what makes it another experiment under its preset."""
        return {name: value for name, value in self.departures.items() if name not in _VIEW}


def count_tasks(record: Mapping[str, Any]) -> int:
    """How many tasks a run was evaluated on, also where it learned all of them at once."""
    stream = record["stream"]
    return len(stream.get("test_classes") or stream["tasks"])


def _usual(config: Settings, tasks: object) -> Settings:
    """What the preset of a run says, or the defaults where it has none."""
    found = presets.of_run(config.get("preset"), config, tasks)
    return found or {
        "data": {"benchmark": str(config["data"]["benchmark"])},
        "method": {"name": config["method"]["name"]},
    }


def departures(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a run has set otherwise than its preset, but for benchmark, tasks, backbone and seeds."""
    config = record["config"]
    tasks = config["data"].get("tasks")
    try:
        usual, own = (flatten(parse_config(part).model_dump(mode="json")) for part in (_usual(config, tasks), config))
    except UserError:  # settings of another version: whatever they are, runs that share them belong together
        text = json.dumps({**config, "seeds": None}, sort_keys=True)
        return {"config": hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}
    if own.get("method.top_k") == own.get("method.components"):
        own["method.top_k"] = None  # all of them: the whole mixture
    elsewhere = _ELSEWHERE - {"data.tasks"} if isinstance(tasks, list) else _ELSEWHERE  # sizes, or names of classes
    names = [name for name in own if name not in elsewhere and not name.startswith("seeds.")]
    return {name: own[name] for name in names if own[name] != usual.get(name)}


def _usual_tasks(config: Settings) -> int:
    found = _usual(config, None).get("data", {}).get("tasks")
    known = datasets.registered().get(str(config["data"]["benchmark"]))
    return int(found or (known.tasks if known else _TASKS))


def file_of(record: Mapping[str, Any]) -> str:
    """Where a run stands in the book."""
    config, tasks = record["config"], count_tasks(record)
    more = [f"tasks={tasks}"] if tasks != _usual_tasks(config) else []
    more += describe(tuple(departures(record).items()))
    told = re.sub(r"[^\w.,=+\[\]-]", "-", "".join(f",{part}" for part in more))
    if len(told) > _LONGEST:
        told = f",{hashlib.sha256(told.encode()).hexdigest()[:_DIGITS]}"
    seeds = [str(config["seeds"][name]) for name in ("order", "init", "data")]
    seed = seeds[0] if len(set(seeds)) == 1 else ".".join(seeds)
    benchmark = re.sub(r"[^\w.+-]", "-", str(config["data"]["benchmark"]).partition("@")[0])
    name = f"{config['method']['name']}-{config.get('preset') or CUSTOM}{told}-s{seed}.json"
    return f"{benchmark}/{backbone_slug(config['backbone'])}/{name}"


# Without paths


def portable(record: Mapping[str, Any]) -> dict[str, Any]:
    """A run's record without paths: folders of images and files of weights by name and hash."""
    found: dict[str, Any] = without_paths(record)
    before, after = record["config"], found["config"]
    if is_absolute(str(before["data"]["benchmark"])):
        after["data"]["benchmark"] += f"@{record['stream']['split_hash'][:_DIGITS]}"
    if is_absolute(str(before["backbone"].get("weights") or "")):
        after["backbone"]["weights"] += f"@{record['backbone']['sha256'][:_DIGITS]}"
    found["stream"] = {name: part for name, part in found["stream"].items() if name != "classes"}  # they are in tasks
    return {name: part for name, part in found.items() if name not in _LEFT_OUT}


def same_settings(entry: Entry, config: RunConfig) -> bool:
    """Whether a run of the book is one with these settings, seeds included, wherever its files lay."""
    return _bare(entry.config) == _bare(config.model_dump(mode="json"))


def _bare(config: Settings) -> Settings | None:
    """Settings with what later versions added, paths by their names, and without what changes no result."""
    found = without_paths(completed(config))
    if found is None:
        return None
    for group, name in (("data", "benchmark"), ("backbone", "weights")):
        found[group][name] = str(found[group][name]).partition("@")[0]
    found["data"]["root"] = None  # where files lay
    return {name: part for name, part in found.items() if name != "evaluation_batch"}


# Reading


def read_entries(book: Path) -> list[Entry]:
    """All runs of a book, in the order of their files; what else lies there is passed over."""
    paths = [path for path in book.glob("*/*/*.json") if _FILE.fullmatch(path.name)]
    return [read_entry(book, path) for path in sorted(paths, key=lambda path: natural_order(path.relative_to(book)))]


def read_entry(book: Path, path: Path) -> Entry:
    """One file of a book."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("book") != FORMAT:
        raise UserError(f"{path} is no file of a results book of format {FORMAT}: probprompt book add RUN writes them")
    try:
        entry = Entry(path.relative_to(book).as_posix(), content)
        found = metrics.summarize(entry.matrix)
        wrong = any(abs(found[name] - content["metrics"][name]) > _ROUNDING for name in found)
    except (KeyError, TypeError, ValueError) as problem:
        raise UserError(f"{path} is damaged: {problem}") from None
    if wrong:
        raise UserError(f"{path} was changed by hand: its metrics are not those of its matrix; add the run again")
    if content.get("sha256") != content_hash(content):
        raise UserError(f"{path} was changed by hand: it has not the hash that it records; add the run again")
    return entry


# Writing


@dataclass(frozen=True)
class Added:
    """What became of a run that was to be added."""

    path: Path
    what: str


def add_runs(
    paths: Sequence[Path], book: Path, replace: bool = False, skip_unfinished: bool = False
) -> tuple[list[Added], list[Path]]:
    """Write the files of finished runs, each a folder or inside one; with them come the runs that were passed over.

    Nothing is written where any run is refused: an unfinished one, unless such are to be passed over, or one whose
    file holds a run of other settings, unless that is to be replaced.
    """
    runs = [run for path in paths for run in _runs(path)]
    unfinished = [run.folder for run in runs if not run.finished]
    if unfinished and not skip_unfinished:
        raise UserError(
            f"{len(unfinished)} run(s) are not finished: {shorten(unfinished)}. Finish them with probprompt train "
            "--resume RUN, name others, or pass them over with --skip-unfinished"
        )
    made: dict[Path, tuple[Run, dict[str, Any]]] = {}
    for run in runs:
        if run.finished:
            content = content_of(run)
            path = book / file_of(content)
            if path in made:
                raise UserError(f"{made[path][0].folder} and {run.folder} would both be {path}: name one of them")
            made[path] = run, content
    changes = {path: _change(path, run, content, replace) for path, (run, content) in made.items()}
    for path, (_, content) in made.items():
        write(path, _lines(content).encode())
    return [Added(path, what) for path, what in changes.items()], unfinished


def _runs(path: Path) -> Iterator[Run]:
    if (path / "run.json").exists():
        yield Run.open(path)
        return
    inside = sorted(path.rglob("run.json"), key=natural_order)
    if not inside:
        raise UserError(f"{path} is no run and holds none: name the folder of a run, or one with runs inside")
    yield from (Run.open(found.parent) for found in inside)


def content_of(run: Run) -> dict[str, Any]:
    """What the book says of a finished run."""
    record, matrix = run.record, run.matrix
    own = settings_hash(record["config"])
    if own != record["config_hash"]:
        raise UserError(f"{run.folder}/run.json was changed by hand: its settings do not have the hash that it records")
    inside = run.folder / "diagnostics.json"
    found = read_json(inside) if inside.exists() else {}
    content = {
        "book": FORMAT,
        **portable(record),
        "matrix": metrics.to_json(matrix),
        "metrics": metrics.summarize(matrix),
        "similarity": dict(Recorded.of(run, "").similarity),
        "pictures": _pictures(found),
    }
    return sealed(content)


def _pictures(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the pictures of the book need, in few digits: likeness of prompts between classes, queries in the plane."""
    kept: dict[str, Any] = {}
    if "similarity" in found:
        labels = found["similarity"]["labels"]
        chosen = np.unique(np.linspace(0, len(labels) - 1, min(CLASSES, len(labels))).round().astype(int))
        matrix = np.asarray(found["similarity"]["matrix"])[np.ix_(chosen, chosen)]
        kept["similarity"] = {"labels": [labels[i] for i in chosen], "matrix": matrix.round(3).tolist()}
    if "queries" in found:
        queries = found["queries"]
        kept["queries"] = {**queries, "points": np.asarray(queries["points"]).round(1).tolist()}
    return kept


def _change(path: Path, run: Run, content: Mapping[str, Any], replace: bool) -> str:
    """What writing a file does to the one that is there; one of other settings is refused."""
    if not path.exists():
        return "added"
    there = read_json(path)
    if there == content:
        return "there already"
    before, after = (_identity(part) for part in (there, content))
    differ = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if differ and not replace:
        raise UserError(
            f"{path} holds a run of other settings, images or weights than {run.folder} ({shorten(differ)}): replace "
            "it with --replace, or leave that run away"
        )
    return "replaced"


def _identity(content: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for one run to stand in another's place."""
    stream, backbone = content.get("stream") or {}, content.get("backbone") or {}
    hashes = {"split_hash": stream.get("split_hash"), "sha256 of the weights": backbone.get("sha256")}
    return {**flatten(content.get("config") or {}), **hashes}


def _lines(content: Mapping[str, Any]) -> str:
    """JSON with a line per entry: as short as can be read and compared."""
    lines = [
        f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
        for name, value in content.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"
