"""State of a classifier and its versions on disk; states are immutable."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self, TypedDict

import torch
from pydantic import BaseModel
from torch import Tensor

from probprompt.classifier.confidence import Calibration, Scale
from probprompt.classifier.outputs import Version
from probprompt.errors import UserError, shorten
from probprompt.storage import is_part, lock, read_json, read_tensors, store_by_contents, write_error, write_json


class Part:
    """Immutable tensors that are in memory, or in a file that is read on first use."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, path: Path | None = None) -> None:
        self._tensors, self._path = tensors, path
        self.digest = path.stem if path else None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors, on the CPU."""
        if self._tensors is None:
            assert self._path is not None
            if not self._path.is_file():
                raise UserError(
                    f"{self._path} does not exist. If the model was changed since it was loaded, load it again. If it "
                    "was pulled without statistics, it can only predict: push it with --trainable and pull it again. "
                    "Otherwise its folder is corrupted."
                )
            self._tensors = read_tensors(self._path, torch.device("cpu"))[0]
        return self._tensors

    @property
    def available(self) -> bool:
        """True if the tensors are available; parts that can be recomputed may have been removed."""
        return self._tensors is not None or (self._path is not None and self._path.is_file())

    def store(self, folder: Path) -> str:
        """Save the tensors in a folder of files named by content; return the name."""
        if self.digest is None or not (folder / f"{self.digest}.safetensors").is_file():
            self.digest = store_by_contents(folder, self.tensors)
        self._path = self._path or folder / f"{self.digest}.safetensors"
        return self.digest

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Copy tensors to the CPU."""
        return cls({name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()})


FORMAT = 1
Busy = Callable[[], None]  # called repeatedly while another process holds a lock; it waits or raises an error
_OWN = {"current.json", "versions", "objects", ".lock"}
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError)


@dataclass(frozen=True)
class KnownClass:
    """A class with the stored features of its images."""

    uid: int  # unique among all classes of the classifier, including renamed and forgotten ones
    name: str
    task: int  # task that added it
    images: int
    held: Part  # held-out images: rows (h, D), mirrors of their flips, keys of their pixels
    rest: Part  # other images: rows (n, D) with optional keys (n,), or sums over them


@dataclass(frozen=True)
class LearnedTask:
    """One call of ``learn`` that added classes."""

    name: str
    version: int
    images: int


@dataclass(frozen=True)
class State:
    """Classes, prompts, head, Gaussians, and what only further learning needs."""

    classes: tuple[KnownClass, ...] = ()
    tasks: tuple[LearnedTask, ...] = ()
    adapted: tuple[int, ...] = ()  # number of classes of each task in which prompts were trained
    next_uid: int = 0
    method: Part | None = None  # tensors of the method, and of a backbone that is trained
    head: Part | None = None
    gaussians: Part | None = None
    later: Part | None = None  # further tensors of a learner: auxiliary head, statistics for the refit, prototypes
    sums: Part | None = None  # statistics of all images that are not held out; they can be recomputed
    strength: float | None = None  # penalty of a ridge head, once it is chosen
    calibration: Calibration = field(default_factory=Calibration)
    scale: Scale = field(default_factory=Scale)
    held_out: tuple[float | None, ...] = ()
    """Held-out accuracy in % per task, of a head that has not learned it; None if unknown."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the head's rows."""
        return tuple(known.name for known in self.classes)

    def read(self) -> None:
        """Read what prediction needs, so that it no longer depends on the files."""
        for part in (self.method, self.head, self.gaussians):
            if part is not None:
                _ = part.tensors

    def note(self, keep: Callable[[Part], str]) -> "StateNote":
        """Describe the state, its parts by the names that ``keep`` returns."""
        parts = {name: getattr(self, name) for name in ("method", "head", "gaussians", "later", "sums")}
        classes = [
            ClassNote(**{**vars(known), "held": keep(known.held), "rest": keep(known.rest)}) for known in self.classes
        ]
        digests = {name: keep(part) for name, part in parts.items() if part is not None and part.available}
        return StateNote(**{**vars(self), "classes": classes, "parts": digests})


class ClassNote(BaseModel):
    """A class as stored, its parts by their digests."""

    uid: int
    name: str
    task: int
    images: int
    held: str
    rest: str


class StateNote(BaseModel):
    """A state as stored, its parts by their digests."""

    classes: list[ClassNote]
    tasks: tuple[LearnedTask, ...]
    adapted: tuple[int, ...]
    next_uid: int
    parts: dict[str, str]
    strength: float | None
    calibration: Calibration
    scale: Scale
    held_out: tuple[float | None, ...]

    def state(self, find: Callable[[str], Part]) -> State:
        """Return the state; its parts are read on first use."""
        plain = {name: value for name, value in vars(self).items() if name not in ("classes", "parts")}
        known = (KnownClass(**{**vars(one), "held": find(one.held), "rest": find(one.rest)}) for one in self.classes)
        parts: dict[str, Any] = {name: find(digest) for name, digest in self.parts.items()}
        return State(tuple(known), **plain, **parts)


class VersionNote(BaseModel):
    """Contents of ``versions/NUMBER.json``."""

    version: Version
    token: str
    settings: dict[str, Any]
    state: StateNote


class Current(TypedDict):
    """Contents of ``current.json``."""

    format: int
    model: str
    version: int


@dataclass(frozen=True)
class SavedVersion:
    """A version with its state."""

    version: Version
    state: State
    token: str  # unique among all versions of that number


def lock_folder(folder: Path, name: str, busy: Busy) -> IO[str] | None:
    """Create a folder and lock it by a file in it; return None if files cannot be locked."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return lock(folder / name)
        except BlockingIOError:
            pass
        except OSError as problem:
            raise write_error(folder, problem) from problem
        busy()


@dataclass
class Store:
    """Folder of a saved classifier."""

    folder: Path
    _held: bool = field(default=False, init=False)

    @property
    def exists(self) -> bool:
        """True if a classifier is saved here."""
        return (self.folder / "current.json").is_file()

    @contextmanager
    def locked(self, busy: Busy | None = None) -> Iterator[None]:
        """Keep other processes from writing; without ``busy``, a lock held by another is an error."""
        if self._held:
            yield
            return
        self._check_folder()
        with lock_folder(self.folder, ".lock", busy or self._reject) or nullcontext():
            self._held = True
            try:
                yield
            finally:
                self._held = False
                if not self.exists:  # nothing was saved
                    with suppress(OSError):
                        (self.folder / ".lock").unlink()
                        self.folder.rmdir()

    def _reject(self) -> None:
        raise UserError(f"Another process is changing {self.folder}. Wait until it ends, or stop it.")

    def _check_folder(self) -> None:
        """Raise an error if the folder contains anything but a classifier."""
        if self.exists or not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file. Pass a folder for the model.")
        strange = [path.name for path in self.folder.iterdir() if path.name not in _OWN and not is_part(path)]
        if strange:
            contents = shorten(sorted(strange), 3)
            raise UserError(f"{self.folder} contains other files than a model ({contents}). Choose a new folder.")

    def head(self) -> Current:
        """Read ``current.json``."""
        if not self.exists:
            reason = "contains no model (no current.json)" if self.folder.exists() else "does not exist"
            raise UserError(f"{self.folder} {reason}. Create a model with 'probprompt learn {self.folder} FOLDER'.")
        content: Any = read_json(self.folder / "current.json")
        content = content if isinstance(content, dict) else {}
        number = content.get("format")
        if number != FORMAT:
            raise UserError(f"{self.folder} has model format {number!r}. This version reads format {FORMAT}.")
        if not isinstance(content.get("version"), int) or not isinstance(content.get("model"), str):
            raise UserError(f"{self.folder / 'current.json'} is corrupted: it contains no version number.")
        return Current(format=FORMAT, model=content["model"], version=content["version"])

    def read(self, number: int) -> tuple[dict[str, Any], SavedVersion]:
        """Read a version, after its settings."""
        path = self._version_file(number)
        content = read_json(path)
        try:
            note = VersionNote.model_validate(content)
            return note.settings, SavedVersion(note.version, note.state.state(self._part), note.token)
        except _MALFORMED as problem:
            raise UserError(f"{path} is corrupted: it does not describe a classifier ({problem!r}).") from problem

    def numbers(self, current: int) -> list[int]:
        """Return the kept versions, the current one last; later ones were never finished."""
        matches = (re.fullmatch(r"(\d+)\.json", path.name) for path in (self.folder / "versions").glob("*.json"))
        return sorted(number for match in matches if match and (number := int(match[1])) <= current)

    def _part(self, digest: str) -> Part:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"{digest!r} is not a digest")
        return Part(path=self._objects / f"{digest}.safetensors")

    def write(
        self,
        model: str,
        settings: Mapping[str, Any],
        every: Sequence[SavedVersion],
        ancestors: Mapping[int, str],
        keep: int,
    ) -> None:
        """Add new versions, make the last one current, and prune; ``ancestors`` are all tokens."""
        with self.locked():
            stored = self._check_ancestor(model, ancestors)
            for folder in (self._objects, self.folder / "versions"):
                folder.mkdir(parents=True, exist_ok=True)
            chosen = every[-keep:]
            for one in chosen:
                if one.version.number > stored:
                    state = one.state.note(lambda part: part.store(self._objects))
                    if one is not chosen[-1]:
                        state.parts.pop("sums", None)
                    note = VersionNote(version=one.version, token=one.token, settings=dict(settings), state=state)
                    write_json(self._version_file(one.version.number), note.model_dump())
            current = every[-1].version.number
            write_json(self.folder / "current.json", {"format": FORMAT, "model": model, "version": current})
            self._prune(current, keep)

    def _check_ancestor(self, model: str, ancestors: Mapping[int, str]) -> int:
        """Return the stored version's number, 0 if none; raise an error if it is no ancestor."""
        if not self.exists:
            return 0
        head = self.head()
        if head["model"] != model:
            raise UserError(f"{self.folder} contains a different model. Choose another folder.")
        token = self.read(head["version"])[1].token
        if ancestors.get(head["version"]) != token:
            raise UserError(
                f"{self.folder} was changed by another process (version {head['version']}). "
                "Load it again and repeat the change, or save to another folder."
            )
        return head["version"]

    def _prune(self, current: int, keep: int) -> None:
        """Remove versions beyond the number to keep, then objects that no version needs."""
        kept = self.numbers(current)[-keep:]
        needed: set[str] = set()
        for number in kept:
            state = read_json(self._version_file(number))["state"]
            needed |= {digest for known in state["classes"] for digest in (known["held"], known["rest"])}
            needed |= {digest for name, digest in state["parts"].items() if name != "sums" or number == current}
        with suppress(OSError):
            for path in (self.folder / "versions").iterdir():
                if path.stem.isdigit() and int(path.stem) not in kept:
                    path.unlink()
            for path in self._objects.iterdir():
                if path.stem not in needed:
                    path.unlink()
            for path in filter(is_part, self.folder.iterdir()):
                path.unlink()

    @property
    def _objects(self) -> Path:
        return self.folder / "objects"

    def _version_file(self, number: int) -> Path:
        return self.folder / "versions" / f"{number}.json"
