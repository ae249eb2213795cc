"""The files of a model to upload: JSON and safetensors, listed in ``probprompt.json``."""

import copy
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from probprompt import __version__
from probprompt.classifier.store import Current
from probprompt.errors import UserError
from probprompt.storage import encode_json, file_hash, read_json

FORMAT = 1
LIST = "probprompt.json"  # the list of files with their sizes and SHA-256
CARD = "README.md"
_HEX = "[0-9a-f]"
OWN = re.compile(
    rf"current\.json|versions/[0-9]{{1,9}}\.json|objects/{_HEX}{{64}}\.safetensors"
    rf"|model\.json|(model|statistics)-{_HEX}{{16}}\.safetensors"
)
"""Names of all files that may be uploaded, downloaded or removed."""
_NEEDED = ("method", "head", "gaussians")  # parts of a classifier for prediction


def check_path(path: str) -> str:
    """Return the path; raise ValueError if it is not a file of a model."""
    if not OWN.fullmatch(path):
        raise ValueError(f"{path!r} is not a file of a model")
    return path


class FileEntry(BaseModel):
    """The hash and size of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    sha256: str = Field(pattern=r"\A[0-9a-f]{64}\z")
    bytes: int


class Listing(BaseModel):
    """The contents of ``probprompt.json``."""

    format: int = FORMAT
    probprompt: str = ""
    statistics: bool = Field(strict=True)
    files: dict[Annotated[str, AfterValidator(check_path)], FileEntry]


class SavedBackbone(TypedDict):
    """The settings of a backbone that matter here."""

    name: str
    weights: str | None


@dataclass(frozen=True)
class Bundle:
    """Files by their path in the repository."""

    descriptions: Mapping[str, bytes]  # JSON without local paths
    tensors: Mapping[str, Path]
    statistics: bool  # whether files for further learning are included

    def listing(self) -> Listing:
        """Return the contents of ``probprompt.json``."""
        files = {path: describe(content) for path, content in self.files.items()}
        return Listing(probprompt=__version__, statistics=self.statistics, files=files)

    @property
    def files(self) -> dict[str, bytes | Path]:
        """All contents by their path in the repository."""
        return {**self.descriptions, **self.tensors}

    @property
    def bytes(self) -> int:
        """Size of all files."""
        small = sum(map(len, self.descriptions.values()))
        return small + sum(file.stat().st_size for file in self.tensors.values())


@dataclass(frozen=True)
class Record:
    """A saved model as its JSON describes it."""

    folder: Path
    note: dict[str, Any]  # model.json of a run, or the current version of a classifier
    head: Current | None = None  # current.json of a classifier

    @property
    def backbone(self) -> SavedBackbone:
        """Settings of the backbone, within the note."""
        where = self.note if self.head is None else self.note["settings"]["config"]
        chosen: SavedBackbone = where["backbone"]
        return chosen

    @property
    def sha256(self) -> str:
        """Hash of the backbone's weights."""
        where = self.note if self.head is None else self.note["settings"]
        return str(where["backbone"]["sha256"])

    @property
    def described_in(self) -> Path:
        """File of the note."""
        name = "model.json" if self.head is None else f"versions/{self.head['version']}.json"
        return self.folder / name


def read_record(folder: Path) -> Record:
    """Read the description of a run's model, or of a saved classifier."""
    if (folder / "current.json").is_file():
        head = read_json(folder / "current.json")
        version = head.get("version") if isinstance(head, dict) else None
        if not isinstance(version, int):
            raise UserError(f"{folder / 'current.json'} is corrupted: it has no version.")
        return _checked(Record(folder, read_json(folder / "versions" / f"{version}.json"), head))
    home = folder if (folder / "model.json").is_file() else folder / "model"
    if not (home / "model.json").is_file():
        raise UserError(f"{folder} contains no model. Pass a saved classifier (current.json) or a run (model.json).")
    return _checked(Record(home, read_json(home / "model.json")))


def _checked(record: Record) -> Record:
    try:
        bundle(record, with_statistics=False)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UserError(f"{record.folder} is corrupted: its JSON does not describe a model ({problem!r}).") from problem
    return record


def bundle(record: Record, with_statistics: bool) -> Bundle:
    """Choose the files of a model to upload."""
    paths = sorted({check_path(path) for path, needed in _tensor_files(record) if needed or with_statistics})
    return Bundle(_descriptions(record), {path: record.folder / path for path in paths}, with_statistics)


def _tensor_files(record: Record) -> list[tuple[str, bool]]:
    """Return files, and whether prediction needs them."""
    if record.head is None:
        learning = record.note["statistics"]
        return [(record.note["tensors"], True), *([(learning, False)] if learning else ())]
    state = record.note["state"]
    parts = [(digest, name in _NEEDED) for name, digest in state["parts"].items()]
    parts += [(known[kind], False) for known in state["classes"] for kind in ("held", "rest")]
    return [(f"objects/{digest}.safetensors", needed) for digest, needed in parts]


def _descriptions(record: Record) -> dict[str, bytes]:
    """Return the JSON of a model without the local folder of weights."""
    note = copy.deepcopy(record.note)
    chosen = Record(record.folder, note, record.head).backbone
    if chosen["weights"] not in (None, "random"):
        chosen["weights"] = Path(chosen["weights"]).name
    if record.head is None:
        return {"model.json": encode_json(note)}
    version = f"versions/{int(record.head['version'])}.json"
    return {"current.json": encode_json(record.head), version: encode_json(note)}


def describe(content: bytes | Path) -> FileEntry:
    """Return the SHA-256 and size of a file."""
    if isinstance(content, bytes):
        return FileEntry(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    try:
        return FileEntry(sha256=file_hash(content), bytes=content.stat().st_size)
    except OSError as problem:
        raise UserError(f"Could not read {content}: {problem.strerror}. The model is incomplete.") from None
