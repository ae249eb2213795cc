"""A published dataset brought onto this machine: fetched, verified, unpacked and put in its place at once."""

import hashlib
import json
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from probprompt.data.archives import ArchiveError, make_room, unpack, unpacked_size
from probprompt.data.datasets import Dataset, data_folder
from probprompt.data.download import SLACK, download, verify
from probprompt.data.layouts import LISTED, find_lists
from probprompt.data.sources import Source
from probprompt.errors import UserError
from probprompt.progress import ProgressCallback

NOTE = "source.json"
"""The file beside the images that says where they came from, and by which hashes they were known."""
_ROOM = 2.5  # times the size of an archive: itself and its files


def get(
    kind: type[Dataset],
    to: Path | None,
    url: str | None,
    file: Path | None,
    watch: ProgressCallback,
    pause: float = 1.0,
) -> Dataset:
    """Put a dataset into ``to``/its name, from its publisher, a mirror (``url``) or an archive that is here (``file``).

    What is there already is left as it is.
    """
    if url and file:
        raise UserError("--url and --file exclude each other: name a mirror, or an archive that is on this machine")
    home = (to.expanduser().absolute() if to else data_folder()).resolve()
    target = home / kind.name
    there = kind(target)
    found = there.recognise()
    if found is None:
        _refuse_others(target, kind)
        _bring(kind, home, target, url, file, watch, pause)
        return there
    watch.note(f"{kind.name} is in {found[0]} already")
    if found[1] is LISTED and find_lists(found[0]) is None:
        for source in kind.sources[1:]:
            _fetch_beside(source, target, watch, pause, file)
    return there


def _refuse_others(target: Path, kind: type[Dataset]) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{target} exists and does not look like {kind.name}: move it away, or choose another folder with --to"
        )


def _bring(
    kind: type[Dataset],
    home: Path,
    target: Path,
    url: str | None,
    file: Path | None,
    watch: ProgressCallback,
    pause: float,
) -> None:
    """Fetch and unpack beside the target, then put everything in its place with one rename."""
    main, *others = kind.sources
    part = home / f".{kind.name}.{secrets.token_hex(4)}"
    try:
        part.mkdir(parents=True)
        notes = [_fetch_beside(source, part, watch, pause, file) for source in others]  # small: trouble shows early
        archive = _archive(main, home, url, file)
        notes.insert(0, _open_up(archive, kind, part, watch, pause))
        (part / NOTE).write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
        if target.exists():
            target.rmdir()  # empty, as was seen before
        part.rename(target)
        if file is None:
            archive.path.unlink()
    except OSError as problem:
        raise UserError(f"{kind.name} cannot be written to {home}: {problem.strerror or problem}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


@dataclass(frozen=True)
class _Archive:
    """An archive that is on this machine, or will be."""

    path: Path
    source: Source
    url: str | None
    """Where it is fetched from; None where the user has put it there."""
    remedy: str
    """What to do where it is not the right one."""


def _archive(source: Source, home: Path, url: str | None, file: Path | None) -> _Archive:
    """Which archive is taken: one that was named, one that lies there already, or one from the web."""
    if file is not None:
        if not file.is_file():
            raise UserError(f"{file} is no file: name the archive {source.file}")
        return _Archive(file, source, None, "Name the right archive")
    path = home / source.file
    if url and not source.hashed:  # what lies there might be another file, and what comes is kept apart from it
        path = path.with_stem(f"{path.stem}.{hashlib.sha256(url.encode()).hexdigest()[:8]}")
    elif path.exists():
        return _Archive(path, source, None, "It was there already: remove it, and the same command fetches it")
    return _Archive(path, source, url or source.url, "It was removed: try again, or name a mirror with --url")


def _open_up(
    archive: _Archive, kind: type[Dataset], part: Path, watch: ProgressCallback, pause: float
) -> dict[str, str]:
    """Verify and unpack an archive; one that was fetched, but is not the dataset, is removed. Returns what it was."""
    if archive.url and not archive.path.exists():
        download(archive.url, archive.path, watch, pause, _ROOM)
    try:
        known = _checked(archive.path, archive.source, watch)
        _unpack(archive.path, part, watch)
        if kind(part).recognise() is None:
            raise ArchiveError(f"{archive.path} holds nothing that looks like {kind.name}")
    except ArchiveError as problem:
        if archive.url:
            archive.path.unlink()
        raise UserError(f"{problem}. {archive.remedy}") from None
    return {"file": archive.source.file, "from": archive.url or str(archive.path), **known}


def _checked(path: Path, source: Source, watch: ProgressCallback) -> dict[str, str]:
    try:
        known = verify(path, source, watch)
    except UserError as problem:
        raise ArchiveError(str(problem)) from None
    if not source.hashed:
        watch.note(f"no hash of {source.file} was published; this one has sha256 {known['sha256']}")
    return known


def _unpack(archive: Path, part: Path, watch: ProgressCallback) -> None:
    size = unpacked_size(archive)
    make_room(part.parent, size + SLACK, f"unpacking {archive.name}")
    with watch.transfer("unpacking", size):
        unpack(archive, part, watch.advance)


def _fetch_beside(
    source: Source, folder: Path, watch: ProgressCallback, pause: float, file: Path | None
) -> dict[str, str]:
    """A file that lies with the images as it is: from its publisher, or from beside the archive that is here."""
    path = folder / source.file
    waiting = path.with_name(f".{path.name}")  # not to be mistaken for the file before it is verified
    near = file.parent / source.file if file else None
    try:
        if near and near.is_file():
            shutil.copyfile(near, waiting)
        else:
            download(source.url, waiting, watch, pause)
        known = verify(waiting, source, watch)
        waiting.replace(path)
    finally:
        waiting.unlink(missing_ok=True)
    return {"file": source.file, "from": str(near) if near and near.is_file() else source.url, **known}
