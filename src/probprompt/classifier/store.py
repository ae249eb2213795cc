"""The state of a classifier and its versions on disk. A state never changes: learning makes another one."""

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
    """Tensors that belong together and never change: in memory, or in a file that is read when they are needed."""

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
                    f"{self._path} is missing: if the classifier was changed since it was loaded, load it again; if it "
                    "was pulled without its statistics, it predicts but cannot learn or change (push it with "
                    "--with-statistics, and pull that); else its folder is damaged"
                )
            self._tensors = read_tensors(self._path, torch.device("cpu"))[0]
        return self._tensors

    @property
    def there(self) -> bool:
        """Whether the tensors can be had: a part that can be made again may have been removed."""
        return self._tensors is not None or (self._path is not None and self._path.is_file())

    def store(self, folder: Path) -> str:
        """Keep the tensors in a folder of files named by their contents; returns that name."""
        if self.digest is None or not (folder / f"{self.digest}.safetensors").is_file():
            self.digest = store_by_contents(folder, self.tensors)
        self._path = self._path or folder / f"{self.digest}.safetensors"
        return self.digest

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Keep copies on the CPU, so that nobody changes them."""
        return cls({name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()})


FORMAT = 1
Busy = Callable[[], None]
"""Called repeatedly while another process holds a lock; it waits, or raises an error to cancel."""
_OWN = {"current.json", "versions", "objects", ".lock"}
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError)  # from a description that was altered


@dataclass(frozen=True)
class KnownClass:
    """A class, with what is kept of its images for later learning."""

    uid: int
    """Unique among all classes that the classifier ever had, renamed and forgotten ones included."""
    name: str
    task: int
    """The task that added it."""
    images: int
    held: Part
    """``rows``: features of the held-out images (h, D); ``mirrors``: those of their horizontal flips; ``keys`` (h,):
    hashes of their pixels, if the method needs them."""
    rest: Part
    """Of the other images: ``rows`` (n, D) and any ``keys`` (n,), or sums over them."""


@dataclass(frozen=True)
class LearnedTask:
    """One call of ``learn`` that brought new classes."""

    name: str
    version: int
    images: int


@dataclass(frozen=True)
class State:
    """Classes, prompts, head, Gaussians, and what only further learning needs."""

    classes: tuple[KnownClass, ...] = ()
    tasks: tuple[LearnedTask, ...] = ()
    adapted: tuple[int, ...] = ()
    """The number of classes of each task in which prompts learned."""
    next_uid: int = 0
    method: Part | None = None
    """The method's tensors, with those of a backbone that learns."""
    head: Part | None = None
    gaussians: Part | None = None
    later: Part | None = None
    """What else a learner needs: a head that leads prompts, statistics for the refit, prototypes."""
    sums: Part | None = None
    """Sums over all images that are not held out; they follow from the classes."""
    strength: float | None = None
    """Lambda of a ridge head, once it is chosen."""
    calibration: Calibration = field(default_factory=Calibration)
    scale: Scale = field(default_factory=Scale)
    held_out: tuple[float | None, ...] = ()
    """Accuracy in % on the held-out images of each task, under a head that has not seen them; None where unknown."""

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
        """Describe the state, its parts by the names that ``keep`` gives them."""
        parts = {name: getattr(self, name) for name in ("method", "head", "gaussians", "later", "sums")}
        classes = [
            ClassNote(**{**vars(known), "held": keep(known.held), "rest": keep(known.rest)}) for known in self.classes
        ]
        digests = {name: keep(part) for name, part in parts.items() if part is not None and part.there}
        return StateNote(**{**vars(self), "classes": classes, "parts": digests})


class ClassNote(BaseModel):
    """A class as it is stored, its parts by their digests."""

    uid: int
    name: str
    task: int
    images: int
    held: str
    rest: str


class StateNote(BaseModel):
    """A state as it is stored, its parts by their digests."""

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
        """Return the state; its parts are read when they are needed."""
        plain = {name: value for name, value in vars(self).items() if name not in ("classes", "parts")}
        known = (KnownClass(**{**vars(one), "held": find(one.held), "rest": find(one.rest)}) for one in self.classes)
        parts: dict[str, Any] = {name: find(digest) for name, digest in self.parts.items()}
        return State(tuple(known), **plain, **parts)


class VersionNote(BaseModel):
    """The contents of ``versions/NUMBER.json``."""

    version: Version
    token: str
    settings: dict[str, Any]
    state: StateNote


class Current(TypedDict):
    """The contents of ``current.json``."""

    format: int
    model: str
    version: int


@dataclass(frozen=True)
class SavedVersion:
    """A version with its state."""

    version: Version
    state: State
    token: str
    """Unique among all versions of that number."""


def lock_folder(folder: Path, name: str, busy: Busy) -> IO[str] | None:
    """Lock a folder, which is created, by a file in it; None if files cannot be locked."""
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
    """The folder of a saved classifier."""

    folder: Path
    _held: bool = field(default=False, init=False)

    @property
    def exists(self) -> bool:
        """True if a classifier is saved here."""
        return (self.folder / "current.json").is_file()

    @contextmanager
    def locked(self, busy: Busy | None = None) -> Iterator[None]:
        """Keep other processes from writing while the block lasts; the lock ends with the process and can be nested.

        While another process holds the lock, ``busy`` is called; without ``busy`` that is an error.
        """
        if self._held:
            yield
            return
        self._check_folder()
        with lock_folder(self.folder, ".lock", busy or self._refuse) or nullcontext():  # no lock keeps no process out
            self._held = True
            try:
                yield
            finally:
                self._held = False
                if not self.exists:  # nothing was saved
                    with suppress(OSError):
                        (self.folder / ".lock").unlink()
                        self.folder.rmdir()

    def _refuse(self) -> None:
        raise UserError(f"another process is changing {self.folder}: wait for it, or stop it")

    def _check_folder(self) -> None:
        """Reject a folder that holds anything but a classifier."""
        if self.exists or not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file: a classifier is saved as a folder")
        strange = [path.name for path in self.folder.iterdir() if path.name not in _OWN and not is_part(path)]
        if strange:
            raise UserError(
                f"{self.folder} holds no classifier, but other things ({shorten(sorted(strange), 3)}): "
                "choose a new folder"
            )

    def head(self) -> Current:
        """Read ``current.json``."""
        if not self.exists:
            hint = "" if self.folder.exists() else ": there is no such folder"
            raise UserError(f"{self.folder} holds no classifier (no current.json){hint}")
        found: Any = read_json(self.folder / "current.json")
        found = found if isinstance(found, dict) else {}
        number = found.get("format")
        if number != FORMAT:
            raise UserError(f"{self.folder} has classifier format {number!r}, this version reads {FORMAT}")
        if not isinstance(found.get("version"), int) or not isinstance(found.get("model"), str):
            raise UserError(f"{self.folder / 'current.json'} is damaged: it names no version")
        return Current(format=FORMAT, model=found["model"], version=found["version"])

    def read(self, number: int) -> tuple[dict[str, Any], SavedVersion]:
        """Read a version, after its settings."""
        path = self._version_file(number)
        found = read_json(path)
        try:
            note = VersionNote.model_validate(found)
            return note.settings, SavedVersion(note.version, note.state.state(self._part), note.token)
        except _DAMAGE as problem:
            raise UserError(f"{path} is damaged: it does not describe a classifier ({problem!r})") from problem

    def numbers(self, current: int) -> list[int]:
        """Return the kept versions, the current one last; later ones were never finished."""
        found = (re.fullmatch(r"(\d+)\.json", path.name) for path in (self.folder / "versions").glob("*.json"))
        return sorted(number for match in found if match and (number := int(match[1])) <= current)

    def _part(self, digest: str) -> Part:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"{digest!r} names no object")
        return Part(path=self._objects / f"{digest}.safetensors")

    def write(
        self,
        model: str,
        settings: Mapping[str, Any],
        every: Sequence[SavedVersion],
        ancestors: Mapping[int, str],
        keep: int,
    ) -> None:
        """Add the versions that are not stored yet, make the last one current, and prune older ones.

        ``ancestors``: tokens by number of all versions that they come from, kept or not.
        """
        with self.locked():
            there = self._check_ancestor(model, ancestors)
            for folder in (self._objects, self.folder / "versions"):
                folder.mkdir(parents=True, exist_ok=True)
            chosen = every[-keep:]
            for one in chosen:
                if one.version.number > there:
                    state = one.state.note(lambda part: part.store(self._objects))
                    if one is not chosen[-1]:  # computed again when they are needed
                        state.parts.pop("sums", None)
                    note = VersionNote(version=one.version, token=one.token, settings=dict(settings), state=state)
                    write_json(self._version_file(one.version.number), note.model_dump())
            current = every[-1].version.number
            write_json(self.folder / "current.json", {"format": FORMAT, "model": model, "version": current})
            self._prune(current, keep)

    def _check_ancestor(self, model: str, ancestors: Mapping[int, str]) -> int:
        """Return the number of the stored version, from which the versions to write must come; 0 if none is stored."""
        if not self.exists:
            return 0
        head = self.head()
        if head["model"] != model:
            raise UserError(f"{self.folder} holds another classifier: load that one, or choose another folder")
        token = self.read(head["version"])[1].token
        if ancestors.get(head["version"]) != token:
            raise UserError(
                f"{self.folder} has moved on to version {head['version']}, which this classifier does not know: "
                "load it again and repeat the change, or save into another folder"
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
        with suppress(OSError):  # what cannot be removed is harmless
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
