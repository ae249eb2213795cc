"""A classifier on disk: numbered versions whose tensors are stored once, however many versions share them.

``current.json`` names the version that counts and is replaced last, so at every moment the folder holds one whole
model: a process that is killed while it saves leaves the old one or the new one.

    MODEL/current.json                 {"format": 1, "model": ..., "version": 3}
    MODEL/versions/3.json              what it knows, and which objects it is made of
    MODEL/objects/<sha256>.safetensors tensors, named by their contents

Loading reads JSON and safetensors, and executes no code.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from probprompt.classifier.answers import Version
from probprompt.classifier.state import Kept, State
from probprompt.classifier.sums import Part
from probprompt.errors import UserError, shorten
from probprompt.storage import is_part, lock, read_json, write_error, write_json

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

    def read(self, number: int) -> tuple[dict[str, Any], Kept]:
        """A version with its settings."""
        path = self._version_file(number)
        note = read_json(path)
        try:
            kept = Kept(
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
        self, model: str, settings: Mapping[str, Any], every: Sequence[Kept], ancestors: Mapping[int, str], keep: int
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

    def _write_version(self, settings: Mapping[str, Any], one: Kept, last: bool) -> None:
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
