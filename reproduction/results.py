"""RecordedRun runs, one file each: ``<benchmark>/<backbone>/<method>-<preset>-s<seed>.json``.

A file contains the run's record without paths of the machine: folders of images and files of weights have a name and a
hash. Settings that differ from the preset are part of the file name. A hash of all entries rejects edited files.
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
from probprompt.backbones.pretrained import backbone_slug, backbone_words
from probprompt.config import RunConfig, flatten, from_stored, to_stored
from probprompt.data import datasets
from probprompt.errors import UserError, shorten
from probprompt.evaluation import metrics
from probprompt.report.pages import write
from probprompt.runs.grid import CUSTOM, describe
from probprompt.runs.run import RecordedRun, Run, RunRecord, is_absolute, settings_hash, without_paths
from probprompt.storage import content_hash, natural_order, read_json, with_hash

FORMAT = 2
MAX_CLASSES = 50  # in the figure of similarity between classes, to limit the file size
_DIGITS = 12  # of a hash in a name
_TOLERANCE = 1e-6
_TASKS = 10  # of a folder of images, unless the preset has a number
_LONGEST = 80  # characters of settings in a file name
_FILE = re.compile(r".+-s\d+(?:\.\d+\.\d+)?\.json")
_LEFT_OUT = ("format", "name", "status")  # the same in every file
_NOT_OVERRIDES = {"preset", "data.benchmark", "data.test", "data.tasks", "method.name"} | {
    *("backbone.name", "backbone.weights", "backbone.image_size"),
    *("evaluation_batch_size", "data.root", "data.skip_unreadable"),
}
"""Settings that are not compared with a preset, or that change only rounding."""
_OF_MACHINE = ("backbone.precision", "data.stored_size")  # a smaller machine needs other values

Settings = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Entry:
    """A recorded run."""

    path: str  # within the folder of results
    content: Mapping[str, Any]

    @cached_property
    def recorded(self) -> RecordedRun:
        """The run as tables of a comparison read it."""
        return RecordedRun(
            self.path, self.record, metrics.from_json(self.content["matrix"]), self.content["similarity"]
        )

    @cached_property
    def record(self) -> RunRecord:
        """Record of the run."""
        return RunRecord.model_validate(self.content)

    @property
    def matrix(self) -> NDArray[np.float64]:
        """Accuracy in % on task i (row) after step j (column)."""
        return self.recorded.matrix

    @property
    def config(self) -> Settings:
        """All settings."""
        return self.record.config

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.record.method

    @property
    def preset(self) -> str:
        """Name of its preset, or ``custom``."""
        return self.record.preset or CUSTOM

    @property
    def benchmark(self) -> str:
        """Name of the benchmark, without the hash of a folder."""
        return self.record.benchmark.partition("@")[0]

    @property
    def tasks(self) -> int:
        """Number of evaluated tasks."""
        return count_tasks(self.record)

    @property
    def seed(self) -> int:
        """Seed of the order of classes."""
        return int(self.config["seeds"]["order"])

    @property
    def backbone(self) -> str:
        """Name of the backbone in tables."""
        return backbone_words(self.config["backbone"])

    @property
    def held_out(self) -> bool:
        """Whether it was evaluated on held-out training images."""
        return self.record.evaluated_on != "test"

    @cached_property
    def preset_overrides(self) -> dict[str, Any]:
        """Settings that differ from the preset, by dotted names."""
        return preset_overrides(self.record)

    @property
    def varied(self) -> dict[str, Any]:
        """Overrides that make it another experiment, not only a run on another machine."""
        return {name: value for name, value in self.preset_overrides.items() if name not in _OF_MACHINE}


def count_tasks(record: RunRecord) -> int:
    """Count the evaluated tasks of a run, also if it learned them jointly."""
    return len(record.stream.test_classes or record.stream.tasks)


def preset_overrides(record: RunRecord) -> dict[str, Any]:
    """Return settings that differ from the preset, except benchmark, backbone and seeds."""
    config, preset = record.config, record.preset_settings
    if record.settings is None or preset is None:  # of another version
        text = json.dumps({**config, "seeds": None}, sort_keys=True)
        return {"config": hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}
    overrides, key = dict(record.preset_overrides), "method.top_k"
    if key in overrides and overrides[key] == record.flat_settings["method.components"]:
        overrides[key] = None  # the whole mixture
        if preset.get(key) is None:
            del overrides[key]
    by_name = isinstance(config["data"].get("tasks"), list)  # sizes, or class names
    ignored = _NOT_OVERRIDES - {"data.tasks"} if by_name else _NOT_OVERRIDES
    return {name: value for name, value in overrides.items() if name not in ignored}


def _default_tasks(record: RunRecord) -> int:
    known = datasets.registered().get(record.benchmark)
    preset = presets.of_run(record.preset, record.config, None) or {}
    return int(preset.get("data", {}).get("tasks") or (known.tasks if known else _TASKS))


def entry_path(record: RunRecord) -> str:
    """Return the path of a run's file within the folder of results."""
    config, tasks = record.config, count_tasks(record)
    parts = [f"tasks={tasks}"] if tasks != _default_tasks(record) else []
    parts += describe(tuple(to_stored(preset_overrides(record)).items()))
    overrides = re.sub(r"[^\w.,=+\[\]-]", "-", "".join(f",{part}" for part in parts))
    if len(overrides) > _LONGEST:
        overrides = f",{hashlib.sha256(overrides.encode()).hexdigest()[:_DIGITS]}"
    seeds = [str(config["seeds"][name]) for name in ("order", "init", "data")]
    seed = seeds[0] if len(set(seeds)) == 1 else ".".join(seeds)
    benchmark = re.sub(r"[^\w.+-]", "-", record.benchmark.partition("@")[0])
    name = f"{record.method}-{record.preset or CUSTOM}{overrides}-s{seed}.json"
    return f"{benchmark}/{backbone_slug(config['backbone'])}/{name}"


def _portable(record: RunRecord) -> dict[str, Any]:
    """Return a run's record with names and hashes for paths."""
    portable: dict[str, Any] = without_paths(record.to_json())
    before, after = record.config, portable["config"]
    if is_absolute(record.benchmark):
        after["data"]["benchmark"] += f"@{record.stream.split_hash[:_DIGITS]}"
    if is_absolute(str(before["backbone"].get("weights") or "")):
        after["backbone"]["weights"] += f"@{record.backbone.sha256[:_DIGITS]}"
    portable["stream"] = {name: part for name, part in portable["stream"].items() if name != "classes"}  # in tasks, too
    return {name: part for name, part in portable.items() if name not in _LEFT_OUT}


def same_settings(entry: Entry, config: RunConfig) -> bool:
    """Return True if a run has these settings and seeds, wherever its files were."""
    return entry.record.settings is not None and _bare(entry.record.settings) == _bare(config)


def _bare(config: RunConfig) -> Settings:
    """Return settings with names for paths, without those that change no result."""
    bare = without_paths(config.model_dump(mode="json"))
    for group, name in (("data", "benchmark"), ("backbone", "weights")):
        bare[group][name] = str(bare[group][name]).partition("@")[0]
    bare["data"]["root"] = None
    return {name: part for name, part in bare.items() if name != "evaluation_batch_size"}


def read_entries(folder: Path) -> list[Entry]:
    """Read all runs of a folder of results, and skip other files."""
    paths = sorted(folder.glob("*/*/*.json"), key=lambda path: natural_order(path.relative_to(folder)))
    return [read_entry(folder, path) for path in paths if _FILE.fullmatch(path.name)]


def read_entry(folder: Path, path: Path) -> Entry:
    """Read and check the file of one run."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("book") != FORMAT:
        raise UserError(f"{path} is not a run recorded in format {FORMAT}. Record it with 'results add RUN'.")
    try:
        entry = Entry(path.relative_to(folder).as_posix(), content)
        own = metrics.summarize(entry.matrix)
        wrong = any(abs(own[name] - content["metrics"][name]) > _TOLERANCE for name in own)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is corrupted: {error}. Restore it.") from None
    if wrong:
        raise UserError(f"{path} was edited: its metrics do not match its matrix. Add the run again.")
    if content.get("sha256") != content_hash(content):
        raise UserError(f"{path} was edited: it does not match its recorded hash. Add the run again.")
    return entry


def add_runs(
    paths: Sequence[Path], folder: Path, replace: bool = False, skip_unfinished: bool = False
) -> tuple[dict[Path, str], list[Path]]:
    """Record finished runs in folders; return the changes of files, and skipped folders.

    Nothing is written if a run is unfinished (unless skipped) or if its file contains a run of other settings (unless
    replaced).
    """
    runs = [run for path in paths for run in _runs(path)]
    unfinished = [run.folder for run in runs if not run.finished]
    if unfinished and not skip_unfinished:
        raise UserError(
            f"Unfinished runs: {shorten(unfinished)}. Finish each with 'probprompt train --resume RUN', or skip them "
            "with --skip-unfinished."
        )
    contents: dict[Path, tuple[Run, dict[str, Any]]] = {}
    for run in runs:
        if run.finished:
            content = entry_content(run)
            path = folder / entry_path(RunRecord.model_validate(content))
            if path in contents:
                raise UserError(f"{contents[path][0].folder} and {run.folder} would both be {path}. Add one of them.")
            contents[path] = run, content
    added = {path: _change(path, run, content, replace) for path, (run, content) in contents.items()}
    for path, (_, content) in contents.items():
        write(path, _lines(content).encode())
    return added, unfinished


def _runs(path: Path) -> Iterator[Run]:
    inside = [path / "run.json"] if (path / "run.json").exists() else sorted(path.rglob("run.json"), key=natural_order)
    if not inside:
        raise UserError(f"{path} is not a run and contains none. Pass a run folder, or a folder of runs.")
    yield from (Run.open(record.parent) for record in inside)


def entry_content(run: Run) -> dict[str, Any]:
    """Return the content of a finished run's file."""
    record, matrix = run.record, run.matrix
    if settings_hash(record.config) != record.config_hash:
        raise UserError(f"{run.folder}/run.json was edited: its settings do not match their hash. Run it again.")
    inside = run.folder / "diagnostics.json"
    content = {
        "book": FORMAT,
        **_portable(record),
        "matrix": metrics.to_json(matrix),
        "metrics": metrics.summarize(matrix),
        "similarity": dict(RecordedRun.of(run, "").similarity),
        "pictures": _figure_data(read_json(inside) if inside.exists() else {}),
    }
    return with_hash(content)


def _figure_data(diagnostics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of figures with few digits: similarity between classes, queries."""
    kept: dict[str, Any] = {}
    if "similarity" in diagnostics:
        labels = diagnostics["similarity"]["labels"]
        chosen = np.unique(np.linspace(0, len(labels) - 1, min(MAX_CLASSES, len(labels))).round().astype(int))
        matrix = np.asarray(diagnostics["similarity"]["matrix"])[np.ix_(chosen, chosen)]
        kept["similarity"] = {"labels": [labels[i] for i in chosen], "matrix": matrix.round(3).tolist()}
    if "queries" in diagnostics:
        queries = diagnostics["queries"]
        kept["queries"] = {**queries, "points": np.asarray(queries["points"]).round(1).tolist()}
    return kept


def _change(path: Path, run: Run, content: Mapping[str, Any], replace: bool) -> str:
    """Return the change of a file; reject other settings unless they may be replaced."""
    if not path.exists():
        return "added"
    existing = read_json(path)
    if existing == content:
        return "unchanged"
    before, after = (_identity(part) for part in (existing, content))
    differ = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if differ and not replace:
        raise UserError(
            f"{path} contains another run than {run.folder}, with other settings, images or weights: "
            f"{shorten(differ)}. Replace it with --replace, or do not add that run."
        )
    return "replaced"


def _identity(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings and hashes, which must be equal for one run to replace another."""
    stream, backbone = content.get("stream") or {}, content.get("backbone") or {}
    hashes = {"split_hash": stream.get("split_hash"), "sha256 of the weights": backbone.get("sha256")}
    return {**flatten(from_stored(content.get("config") or {})), **hashes}


def _lines(content: Mapping[str, Any]) -> str:
    """Return JSON with one line per entry, for readable diffs."""
    entries = (f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False, allow_nan=False)}" for k, v in content.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"
