"""The files of a model that travel: all that prediction needs and, where asked for, what further learning needs.

A list of them, ``probprompt.json``, goes with them and says the SHA-256 of each. They are JSON and safetensors alone.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probprompt import __version__
from probprompt.errors import UserError
from probprompt.storage import read_json

FORMAT = 1
LIST = "probprompt.json"
"""The file that lists the others."""
CARD = "README.md"
_HEX = "[0-9a-f]"
OWN = re.compile(
    rf"current\.json|versions/[0-9]{{1,9}}\.json|objects/{_HEX}{{64}}\.safetensors"
    rf"|model\.json|(model|statistics)-{_HEX}{{16}}\.safetensors"
)
"""What may travel: nothing else is sent, fetched or removed."""
_NEEDED = ("method", "head", "gaussians")  # the parts of a classifier that predict


@dataclass(frozen=True)
class Bundle:
    """Files by their path in the repository."""

    descriptions: Mapping[str, bytes]
    """Small files that may differ from what lies on this machine: they name no path of it."""
    tensors: Mapping[str, Path]
    statistics: bool
    """Whether what further learning needs is among them."""

    def listing(self) -> dict[str, Any]:
        """What ``probprompt.json`` says."""
        files = {path: describe(content) for path, content in self.descriptions.items()}
        files |= {path: describe(file) for path, file in self.tensors.items()}
        return {"format": FORMAT, "probprompt": __version__, "statistics": self.statistics, "files": files}

    @property
    def files(self) -> tuple[str, ...]:
        """Their paths in the repository."""
        return (*self.descriptions, *self.tensors)

    @property
    def bytes(self) -> int:
        """The size of all files."""
        small = sum(map(len, self.descriptions.values()))
        return small + sum(file.stat().st_size for file in self.tensors.values())


@dataclass(frozen=True)
class Record:
    """A saved model as its JSON describes it."""

    folder: Path
    note: dict[str, Any]
    """What describes the model: ``model.json`` of a run, or the current version of a classifier."""
    head: dict[str, Any] | None = None
    """What ``current.json`` of a classifier says."""

    @property
    def backbone(self) -> dict[str, Any]:
        """The backbone's settings, as they are written down."""
        where = self.note if self.head is None else self.note["settings"]["config"]
        chosen: dict[str, Any] = where["backbone"]
        return chosen

    @property
    def sha256(self) -> str:
        """The hash of the backbone's weights."""
        where = self.note if self.head is None else self.note["settings"]
        return str(where["backbone"]["sha256"])

    @property
    def described_in(self) -> Path:
        """The file of the note."""
        name = "model.json" if self.head is None else f"versions/{self.head['version']}.json"
        return self.folder / name


def read_record(folder: Path) -> Record:
    """Read what describes the model of a run, or a saved classifier."""
    if (folder / "current.json").is_file():
        head = read_json(folder / "current.json")
        version = head.get("version") if isinstance(head, dict) else None
        if not isinstance(version, int):
            raise UserError(f"{folder / 'current.json'} is damaged: it names no version")
        return _checked(Record(folder, read_json(folder / "versions" / f"{version}.json"), head))
    home = folder if (folder / "model.json").is_file() else folder / "model"
    if not (home / "model.json").is_file():
        raise UserError(
            f"{folder} holds no model: neither a current.json (a saved classifier) nor a model.json (that of a run)"
        )
    return _checked(Record(home, read_json(home / "model.json")))


def _checked(record: Record) -> Record:
    try:
        bundle(record, with_statistics=False)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UserError(f"{record.folder} is damaged: its JSON does not describe a model ({problem!r})") from problem
    return record


def bundle(record: Record, with_statistics: bool) -> Bundle:
    """Choose the files of a model that travel."""
    names = _classifier_files(record) if record.head is not None else _run_files(record)
    needed, rest = names
    chosen = [*needed, *(rest if with_statistics else ())]
    for path in chosen:
        if not OWN.fullmatch(path):
            raise ValueError(f"{path!r} is no file of a model")
    return Bundle(_descriptions(record), {path: record.folder / path for path in sorted(set(chosen))}, with_statistics)


def _run_files(record: Record) -> tuple[list[str], list[str]]:
    """Tensors that prediction needs, and those that only learning needs."""
    learning = record.note["statistics"]
    return [record.note["tensors"]], [learning] if learning else []


def _classifier_files(record: Record) -> tuple[list[str], list[str]]:
    state = record.note["state"]
    parts: dict[str, str] = state["parts"]
    needed = [parts[name] for name in _NEEDED if name in parts]
    rest = [digest for name, digest in parts.items() if name not in _NEEDED]
    rest += [known[kind] for known in state["classes"] for kind in ("held", "rest")]
    files = [[f"objects/{digest}.safetensors" for digest in digests] for digests in (needed, rest)]
    return files[0], files[1]


def _descriptions(record: Record) -> dict[str, bytes]:
    """The JSON of a model, in which a file of weights is named without its folder on this machine."""
    note: dict[str, Any] = json.loads(json.dumps(record.note))
    chosen = Record(record.folder, note, record.head).backbone
    if chosen["weights"] not in (None, "random"):
        chosen["weights"] = Path(chosen["weights"]).name
    if record.head is None:
        return {"model.json": encode(note)}
    return {"current.json": encode(record.head), f"versions/{int(record.head['version'])}.json": encode(note)}


def encode(value: Any) -> bytes:
    """JSON as it is written everywhere here."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def describe(content: bytes | Path) -> dict[str, Any]:
    """SHA-256 and size of a file."""
    if isinstance(content, bytes):
        return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    try:
        with content.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256")
            return {"sha256": digest.hexdigest(), "bytes": stream.tell()}
    except OSError as problem:
        raise UserError(f"{content} cannot be read: {problem.strerror}. The model is not complete") from None
