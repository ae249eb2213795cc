"""Everything a classifier knows at one time. A state never changes: learning makes another one beside it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from probprompt.classifier.confidence import Calibration, Scale
from probprompt.classifier.outputs import Version
from probprompt.classifier.statistics import Part
from probprompt.errors import UserError, shorten
from probprompt.storage import is_part, lock, read_json, write_error, write_json

Find = Callable[[str], Part]
"""A part by the name that it is kept under."""


@dataclass(frozen=True)
class KnownClass:
    """A class, with what is kept of its images for later learning."""

    uid: int
    """Tells it apart from all classes that ever were, whatever they are called."""
    name: str
    task: int
    """Which task brought it."""
    images: int
    held: Part
    """``rows``: the features of the images that are held out (h, D); ``mirrors``: of their mirror images."""
    rest: Part
    """Of the other images: ``rows`` (n, D), or sums over them."""


@dataclass(frozen=True)
class LearnedTask:
    """One call of ``learn`` that brought new classes."""

    name: str
    version: int
    images: int


@dataclass(frozen=True)
class State:
    """What is known: classes, prompts, head, Gaussians, and what only further learning needs."""

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
    """What a learner needs beside them: a head that leads prompts, statistics for the refit, prototypes."""
    sums: Part | None = None
    """Sums over all images that are not held out; can be made again from the classes."""
    strength: float | None = None
    """Lambda of a ridge head, once it is chosen."""
    calibration: Calibration = field(default_factory=Calibration)
    scale: Scale = field(default_factory=Scale)
    held_out: tuple[float | None, ...] = ()
    """Accuracy in % on the held-out images of each task, under a head that has not seen them; None where unknown."""

    @property
    def names(self) -> tuple[str, ...]:
        """The classes by their names, in the order of the head's rows."""
        return tuple(known.name for known in self.classes)

    def read(self) -> None:
        """Read what prediction needs: then it is there, whatever becomes of the files."""
        for part in (self.method, self.head, self.gaussians):
            if part is not None:
                _ = part.tensors

    def to_json(self, keep: Callable[[Part], str]) -> dict[str, Any]:
        """Describe the state, its parts by the names that ``keep`` gives them."""
        whole = ("method", "head", "gaussians", "later", "sums")
        parts = {name: getattr(self, name) for name in whole}
        return {
            "classes": [
                {
                    "uid": known.uid,
                    "name": known.name,
                    "task": known.task,
                    "images": known.images,
                    "held": keep(known.held),
                    "rest": keep(known.rest),
                }
                for known in self.classes
            ],
            "tasks": [vars(task) for task in self.tasks],
            "adapted": list(self.adapted),
            "next_uid": self.next_uid,
            "parts": {name: keep(part) for name, part in parts.items() if part is not None and part.there},
            "strength": self.strength,
            "calibration": vars(self.calibration),
            "scale": vars(self.scale),
            "held_out": list(self.held_out),
        }

    @classmethod
    def from_json(cls, note: Mapping[str, Any], find: Find) -> "State":
        """What :meth:`to_json` gave; parts are read when they are needed."""
        classes = tuple(
            KnownClass(
                uid=int(known["uid"]),
                name=str(known["name"]),
                task=int(known["task"]),
                images=int(known["images"]),
                held=find(known["held"]),
                rest=find(known["rest"]),
            )
            for known in note["classes"]
        )
        return cls(
            classes=classes,
            tasks=tuple(LearnedTask(**task) for task in note["tasks"]),
            adapted=tuple(note["adapted"]),
            next_uid=note["next_uid"],
            strength=note["strength"],
            calibration=Calibration(**note["calibration"]),
            scale=Scale(**note["scale"]),
            held_out=tuple(note["held_out"]),
            **{name: find(digest) for name, digest in note["parts"].items()},
        )


@dataclass(frozen=True)
class SavedVersion:
    """A version with its state."""

    version: Version
    state: State
    token: str
    """Tells this version apart from every other of that number."""


FORMAT = 1
Busy = Callable[[], None]
"""Called again and again while another process changes a classifier; it takes its time, or raises to give up."""
_OWN = {"current.json", "versions", "objects", ".lock"}
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError)  # from a description that was altered


@dataclass
class Store:
    """The folder of a saved classifier."""

    folder: Path
    _held: bool = field(default=False, init=False)

    @property
    def exists(self) -> bool:
        """Whether a classifier is saved here."""
        return (self.folder / "current.json").is_file()

    @contextmanager
    def locked(self, busy: Busy | None = None) -> Iterator[None]:
        """Keep other processes from writing; the lock ends with the process. May be asked for again inside.

        Where another process has it, ``busy`` is called until it is free; without that it is an error.
        """
        if self._held:
            yield
            return
        self._refuse_foreign()
        while (held := self._lock()) is False:
            if busy is None:
                raise UserError(f"another process is changing {self.folder}: wait for it, or stop it")
            busy()
        with held or nullcontext():  # without locks no process is kept out
            self._held = True
            try:
                yield
            finally:
                self._held = False
                self._leave_nothing()

    def _lock(self) -> IO[str] | Literal[False] | None:
        """Take the lock; False while another process has it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return lock(self.folder / ".lock")
        except BlockingIOError:
            return False
        except OSError as problem:
            raise write_error(self.folder, problem) from problem

    def _refuse_foreign(self) -> None:
        """A new classifier goes into a folder of its own."""
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

    def _leave_nothing(self) -> None:
        """Where nothing was saved, no folder is left behind that looks as if."""
        if not self.exists:
            with suppress(OSError):
                (self.folder / ".lock").unlink()
                self.folder.rmdir()

    # Reading -------------------------------------------------------------------------------------------------------

    def head(self) -> dict[str, Any]:
        """What ``current.json`` says."""
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
        return dict(found)

    def read(self, number: int) -> tuple[dict[str, Any], SavedVersion]:
        """A version with its settings."""
        path = self._version_file(number)
        note = read_json(path)
        try:
            kept = SavedVersion(
                version=Version(**{**note["version"], "classes": tuple(note["version"]["classes"])}),
                state=State.from_json(note["state"], self._part),
                token=str(note["token"]),
            )
            return dict(note["settings"]), kept
        except _DAMAGE as problem:
            raise UserError(f"{path} is damaged: it does not describe a classifier ({problem!r})") from problem

    def numbers(self, current: int) -> list[int]:
        """Versions that are kept, the current one last; later ones were never finished."""
        found = (re.fullmatch(r"(\d+)\.json", path.name) for path in (self.folder / "versions").glob("*.json"))
        return sorted(number for match in found if match and (number := int(match[1])) <= current)

    def _part(self, digest: str) -> Part:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"{digest!r} names no object")
        return Part(path=self._objects / f"{digest}.safetensors")

    # Writing -------------------------------------------------------------------------------------------------------

    def write(
        self,
        model: str,
        settings: Mapping[str, Any],
        every: Sequence[SavedVersion],
        ancestors: Mapping[int, str],
        keep: int,
    ) -> None:
        """Add the versions that are not here yet; the last one becomes the current one. Older ones are pruned.

        ``ancestors`` are the tokens of all versions that they come from, kept or not, by their numbers.
        """
        with self.locked():
            there = self._refuse_others(model, ancestors)
            for folder in (self._objects, self.folder / "versions"):
                folder.mkdir(parents=True, exist_ok=True)
            chosen = every[-keep:]
            for one in chosen:
                if one.version.number > there:
                    self._write_version(settings, one, last=one is chosen[-1])
            current = every[-1].version.number
            write_json(self.folder / "current.json", {"format": FORMAT, "model": model, "version": current})
            self._prune(current, keep)

    def _write_version(self, settings: Mapping[str, Any], one: SavedVersion, last: bool) -> None:
        state = one.state.to_json(lambda part: part.store(self._objects))
        if not last:  # made again where it should be needed
            state["parts"].pop("sums", None)
        note = {"version": vars(one.version), "token": one.token, "settings": dict(settings), "state": state}
        write_json(self._version_file(one.version.number), note)

    def _refuse_others(self, model: str, ancestors: Mapping[int, str]) -> int:
        """The number of the version here, of which the versions to be written must be later ones."""
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
        return int(head["version"])

    def _prune(self, current: int, keep: int) -> None:
        """Remove versions beyond the number to keep, then objects that no version needs."""
        kept = self.numbers(current)[-keep:]
        needed: set[str] = set()
        for number in kept:
            state = read_json(self._version_file(number))["state"]
            needed |= {digest for known in state["classes"] for digest in (known["held"], known["rest"])}
            needed |= {digest for name, digest in state["parts"].items() if name != "sums" or number == current}
        with suppress(OSError):  # what cannot be removed does no harm
            for path in (self.folder / "versions").iterdir():
                if path.stem.isdigit() and int(path.stem) not in kept:
                    path.unlink()
            for path in self._objects.iterdir():
                if path.stem not in needed:
                    path.unlink()
            for path in self.folder.iterdir():
                if is_part(path):
                    path.unlink()

    @property
    def _objects(self) -> Path:
        return self.folder / "objects"

    def _version_file(self, number: int) -> Path:
        return self.folder / "versions" / f"{number}.json"
